export default function ({ parentElement, data, setStateValue }) {
  const canvas = parentElement.querySelector("canvas"), side = data.side;
  canvas.width = canvas.height = side;
  const brush = canvas.getContext("2d");
  let pixels = canvas.pixels ?? [...data.pixels], drawing = false;
  const paint = () => {
    canvas.pixels = pixels;
    pixels.forEach((ink, i) => {
      const grey = Math.round(255 * (1 - ink));
      brush.fillStyle = `rgb(${grey},${grey},${grey})`;
      brush.fillRect(i % side, Math.floor(i / side), 1, 1);
    });
  };
  const send = () => setStateValue("pixels", pixels);
  const dab = (event) => {
    const box = canvas.getBoundingClientRect();
    const column = (event.clientX - box.left) / box.width * side;
    const row = (event.clientY - box.top) / box.height * side;
    pixels = pixels.map((ink, i) => {
      const apart = Math.hypot(i % side + 0.5 - column, Math.floor(i / side) + 0.5 - row);
      return Math.min(1, ink + Math.max(0, 1 - apart / 1.1) * 0.7);
    });
    paint();
  };
  canvas.onpointerdown = (event) => {
    drawing = true; canvas.setPointerCapture(event.pointerId); dab(event);
  };
  canvas.onpointermove = (event) => { if (drawing) dab(event); };
  canvas.onpointerup = () => { drawing = false; send(); };
  parentElement.querySelector("[data-clear]").onclick = () => {
    pixels = pixels.map(() => 0); paint(); send();
  };
  parentElement.querySelector("[data-back]").onclick = () => {
    pixels = [...data.pixels]; paint(); send();
  };
  paint();
}

"""A pad to draw a digit on: what the browser gets, and the check of what it sends back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HTML = """<canvas aria-label="Draw a digit" tabindex="0"></canvas>
<div><button data-clear>clear</button><button data-back>as it was</button></div>"""

CSS = """canvas{width:100%;aspect-ratio:1;image-rendering:pixelated;touch-action:none;
border:1px solid currentColor;cursor:crosshair;display:block;max-width:260px}
button{margin:6px 6px 0 0;font:inherit;cursor:pointer}"""

SCRIPT = """
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
"""


def pixels(sent: Any, like: Tensor) -> Tensor | None:  # (1, H, W)
    """What the pad sent, as an image; None where nothing was drawn, or nothing that is an image.

    >>> blank = torch.zeros(1, 2, 2)
    >>> pixels([0, 0.5, 0, 2], blank)
    tensor([[[0.0000, 0.5000],
             [0.0000, 1.0000]]])
    >>> pixels(None, blank), pixels([1], blank), pixels(["a"] * 4, blank)
    (None, None, None)
    """
    try:
        values = torch.tensor([float(each) for each in sent], dtype=like.dtype)
    except (TypeError, ValueError):
        return None
    if values.numel() != like.numel() or not values.isfinite().all():
        return None
    image = values.clamp(0, 1).view_as(like)
    return None if image.equal(like) else image

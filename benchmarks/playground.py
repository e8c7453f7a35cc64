"""How long a move in the playground takes: `python benchmarks/playground.py`, half a minute after
the models are trained (a minute, once).

The median over 20 moves of the eps slider, wall clock: through streamlit's headless `AppTest`, and
with `--browser` in a real Chromium (Debian's package `chromium`, driven through its debugging port
by the `websockets` that streamlit brings), from the key press until the pictures of all four
defenses have changed, with screenshots in `--out`, every host that was asked and the console's
warnings and errors. Needs a quiet machine. `--browser` writes `results/playground.json`; below
300 ms is wanted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from base64 import b64decode
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit
from urllib.request import urlopen

from advbayes.cli.experiments import PAGE, command, environment
from advbayes.experiments.playground import WORLDS, load_world
from advbayes.runs import record

MOVES = 20
RESULTS = Path(__file__).parent / "results"


def headless() -> dict[str, dict[str, float]]:
    """Milliseconds of a move, by the clock and of the processor (other work slows the first)."""
    from streamlit.testing.v1 import AppTest

    app = AppTest.from_file(str(PAGE), default_timeout=300).run()
    medians = {}
    for name in WORLDS:
        app.radio[0].set_value(name).run()
        took, worked = [], []
        for step in range(MOVES):
            began, used = time.perf_counter(), time.process_time()
            app.slider(key=f"eps-{name}").set_value(0.05 * (step + 1)).run()
            took.append(time.perf_counter() - began)
            worked.append(time.process_time() - used)
        assert not app.exception
        medians[name] = {
            "clock": round(1e3 * statistics.median(took), 1),
            "processor": round(1e3 * statistics.median(worked), 1),
        }
    return medians


def in_chromium(out: Path) -> dict[str, object]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(command(port, browser=False), env=environment())
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        return _drive(f"http://127.0.0.1:{port}", out)
    finally:
        server.terminate()
        server.wait()


NUDGE = """
window.times = [];
window.nudge = (key) => {
  const slider = [...document.querySelectorAll('input[type=range]')]
    .find((each) => each.ariaLabel.startsWith('eps'));
  const shown = () => [...document.querySelectorAll('[data-testid=stColumn]')]
    .map((each) => [...each.querySelectorAll('img')].map((img) => img.src).join());
  const before = shown(), began = performance.now();
  slider.focus();
  slider.dispatchEvent(new KeyboardEvent('keydown', {key, code: key, bubbles: true}));
  const look = () => shown().every((each, i) => each !== before[i])
    || performance.now() - began > 20000
    ? window.times.push(performance.now() - began) : requestAnimationFrame(look);
  requestAnimationFrame(look);
};
1
"""


FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
FLAGS += " --disable-background-networking --disable-component-update --disable-dev-shm-usage"


class Browser:
    """A page of Chromium, by its debugging protocol."""

    def __init__(self, profile: str) -> None:
        from websockets.sync.client import connect

        command = ["chromium", *FLAGS.split(), "--remote-debugging-port=0"]
        command += [f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        port = Path(profile, "DevToolsActivePort")
        while not port.exists() or len(port.read_text().splitlines()) < 2:
            time.sleep(0.1)
        pages = urlopen(f"http://127.0.0.1:{port.read_text().split()[0]}/json")
        (page,) = (each for each in json.load(pages) if each["type"] == "page")
        self.stack = ExitStack()
        address = connect(page["webSocketDebuggerUrl"], max_size=None)
        self.socket = self.stack.enter_context(address)
        self.sent, self.events = 0, []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        self.stack.close()
        self.process.terminate()
        self.process.wait()

    def ask(self, method: str, **parameters: object) -> dict:
        self.sent += 1
        self.socket.send(json.dumps({"id": self.sent, "method": method, "params": parameters}))
        while (message := json.loads(self.socket.recv())).get("id") != self.sent:
            self.events.append(message)
        return message["result"]

    def run(self, script: str) -> object:
        asked = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        return asked["result"].get("value")

    def until(self, script: str, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(script)
            time.sleep(0.05)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def picture(self, path: Path) -> None:
        path.write_bytes(b64decode(self.ask("Page.captureScreenshot")["data"]))

    def hosts(self) -> list[str]:
        """Every host that anything was asked of."""
        sent = [e["params"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        opened = [e["params"] for e in self.events if e["method"] == "Network.webSocketCreated"]
        addresses = [each["request"]["url"] for each in sent] + [each["url"] for each in opened]
        return sorted({urlsplit(each).hostname or urlsplit(each).scheme for each in addresses})

    def console(self) -> list[object]:
        """Its warnings and errors."""
        said: list[object] = []
        for event in self.events:
            match event:
                case {
                    "method": "Runtime.consoleAPICalled",
                    "params": {"type": "error" | "warning", "args": words},
                }:
                    said.append([each.get("value", each.get("description")) for each in words])
                case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": what}}:
                    said.append(what["text"])
                case {
                    "method": "Log.entryAdded",
                    "params": {"entry": {"level": "error" | "warning", "text": text}},
                }:
                    said.append(text)
        return said


def _drive(url: str, out: Path) -> dict[str, object]:
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        try:
            return _measured(browser, url, out)
        finally:
            browser.close()


# nothing lies over the middle of the first line
ON_TOP = """
(() => {
  const line = document.querySelector('[data-testid=stMarkdown] p').getBoundingClientRect();
  const top = document.elementFromPoint(line.x + 20, line.y + line.height / 2);
  return top !== null && top.closest('[data-testid=stMarkdown]') !== null;
})()
"""


def _measured(browser: Browser, url: str, out: Path) -> dict[str, object]:
    browser.resize(1280, 950)
    browser.ask("Page.navigate", url=url)
    browser.until("document.querySelectorAll('img[alt^=Class]').length == 4")
    time.sleep(2)
    browser.picture(out / "playground-1280.png")
    browser.run(NUDGE)
    for step in range(MOVES):
        browser.run(f"window.nudge('{'ArrowRight' if step < MOVES // 2 else 'ArrowLeft'}'); 1")
        browser.until(f"window.times.length > {step}", 30.0)
        time.sleep(0.5)
    took = browser.run("window.times")
    browser.resize(390, 844)
    time.sleep(3)
    browser.picture(out / "playground-390.png")
    return {
        "median_ms": round(statistics.median(took), 1),
        "largest_ms": round(max(took), 1),
        "hosts": browser.hosts(),
        "console": browser.console(),
        "first_line_is_on_top_at_390": browser.run(ON_TOP),
        "clipped_at_390": browser.run("document.documentElement.scrollWidth > window.innerWidth"),
        "load": round(os.getloadavg()[0], 1),
    }


def run() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("."))
    given = parser.parse_args()
    for name in WORLDS:
        load_world(name, tell=lambda text: print(text, file=sys.stderr))
    result: dict[str, object] = {
        "machine": platform.processor() or platform.machine(),
        "moves": MOVES,
        "apptest_median_ms": headless(),
    }
    if given.browser:
        result["chromium"] = in_chromium(given.out)
    text = json.dumps(result | record(), indent=1)
    print(text)
    if given.browser:
        RESULTS.joinpath("playground.json").write_text(f"{text}\n")


if __name__ == "__main__":
    run()

"""How long a move in the playground takes: `python benchmarks/playground.py`, half a minute after
the models are trained (a minute, once).

The median over 20 moves of the eps slider, wall clock: through streamlit's headless `AppTest`, and
with `--browser` in a real Chromium (needs `pip install PyQt6-WebEngine`), from the key press to the
changed pictures, with screenshots in `--out`, every host that was asked and the console's messages.
Needs a quiet machine.
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
from pathlib import Path

from advbayes.cli.playground import PAGE, command, environment
from advbayes.experiments.playground import WORLDS, load_world

MOVES = 20


def headless() -> dict[str, float]:
    from streamlit.testing.v1 import AppTest

    app = AppTest.from_file(str(PAGE), default_timeout=300).run()
    medians = {}
    for name in WORLDS:
        app.radio[0].set_value(name).run()
        took = []
        for step in range(MOVES):
            began = time.perf_counter()
            app.slider(key=f"eps-{name}").set_value(0.05 * (step + 1)).run()
            took.append(time.perf_counter() - began)
        assert not app.exception
        medians[name] = round(1e3 * statistics.median(took), 1)
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
  const shown = () => [...document.querySelectorAll('[data-testid=stHtml] img')]
    .map((each) => each.src).join();
  const before = shown(), began = performance.now();
  slider.focus();
  slider.dispatchEvent(new KeyboardEvent('keydown', {key, code: key, bubbles: true}));
  const look = () => shown() !== before || performance.now() - began > 20000
    ? window.times.push(performance.now() - began) : requestAnimationFrame(look);
  requestAnimationFrame(look);
};
1
"""


def _drive(url: str, out: Path) -> dict[str, object]:
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")
    from PyQt6.QtCore import QEventLoop, QTimer, QUrl
    from PyQt6.QtWebEngineCore import (
        QWebEnginePage,
        QWebEngineProfile,
        QWebEngineUrlRequestInterceptor,
    )
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    app = QApplication([])
    hosts, console = set(), []

    class Watch(QWebEngineUrlRequestInterceptor):
        def interceptRequest(self, info):
            hosts.add(info.requestUrl().host())

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level, message, line, source):
            console.append(message)

    profile, watch, view = QWebEngineProfile(), Watch(), QWebEngineView()
    profile.setUrlRequestInterceptor(watch)
    page = Page(profile, view)
    view.setPage(page)
    view.resize(1280, 950)
    view.show()

    def wait(seconds):
        loop = QEventLoop()
        QTimer.singleShot(int(1e3 * seconds), loop.quit)
        loop.exec()

    def ask(script):
        answer, loop = [], QEventLoop()
        page.runJavaScript(script, lambda value: (answer.append(value), loop.quit()))
        loop.exec()
        return answer[0]

    def until(script, seconds=120.0):
        end = time.monotonic() + seconds
        while not ask(script):
            if time.monotonic() > end:
                raise TimeoutError(script)
            wait(0.05)

    view.load(QUrl(url))
    until("document.querySelectorAll('img[alt^=Class]').length == 4")
    wait(2)
    view.grab().save(str(out / "playground-1280.png"))
    ask(NUDGE)
    for step in range(MOVES):
        ask(f"window.nudge('{'ArrowRight' if step < MOVES // 2 else 'ArrowLeft'}'); 1")
        until(f"window.times.length > {step}", 30.0)
        wait(0.5)
    took = ask("window.times")
    view.resize(390, 844)
    wait(3)
    view.grab().save(str(out / "playground-390.png"))
    wide = ask("document.documentElement.scrollWidth > window.innerWidth")
    page.deleteLater()
    app.processEvents()
    return {
        "median_ms": round(statistics.median(took), 1),
        "largest_ms": round(max(took), 1),
        "hosts": sorted(hosts),
        "console": console,
        "clipped_at_390": wide,
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
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run()

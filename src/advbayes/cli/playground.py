"""`advbayes playground`: attack small models by hand, in a browser on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from advbayes.cli.screen import say
from advbayes.cli.signals import watched

PAGE = Path(__file__).parents[1] / "experiments" / "playground" / "page.py"


def playground(
    port: Annotated[int, typer.Option(min=1024, max=65535, help="Of 127.0.0.1")] = 8501,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser")
    ] = True,
) -> None:
    """Attack small models by hand: a page on this machine alone, which sends nothing.

    Choose or draw a digit, or move the features of a wine; choose attack, eps and defenses; see the
    input, the perturbation and what each defense predicts. The first start trains the models (about
    a minute) and keeps them in the cache.

    Examples:

    advbayes playground

    advbayes playground --port 9000 --no-browser
    """
    if find_spec("streamlit") is None:
        raise ModuleNotFoundError(
            "the playground needs streamlit: pip install 'advbayes[playground]'"
        )
    from advbayes.experiments.playground import WORLDS, load_world

    with watched():
        for name in WORLDS:
            load_world(name, tell=say)
        say(f"http://127.0.0.1:{port} (Ctrl-C ends it)")
        server = subprocess.Popen(command(port, browser=browser), env=environment())
        try:
            server.wait()
        finally:
            server.terminate()
            server.wait()
    if server.returncode:
        raise OSError(f"the playground's server ended with code {server.returncode}")


def command(port: int, *, browser: bool) -> list[str]:
    """The server: this machine alone, no statistics, no watching of files, no waiting for a
    garbage collection at every move.

    >>> "--server.address=127.0.0.1" in command(8501, browser=False)
    True
    """
    settings = {
        "server.address": "127.0.0.1",
        "server.port": str(port),
        "server.headless": str(not browser).lower(),
        "server.fileWatcherType": "none",
        # would collect all of torch's objects before the pictures are sent: longer than the move
        "runner.postScriptGC": "false",
        "browser.gatherUsageStats": "false",
        "browser.serverAddress": "127.0.0.1",
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "logger.level": "error",
        "theme.primaryColor": "#0072b2",
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "streamlit", "run", str(PAGE), *options]


def environment() -> dict[str, str]:
    """Without this process's settings of streamlit, and with one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMLIT_")}
    return kept | {"OMP_NUM_THREADS": "1"}

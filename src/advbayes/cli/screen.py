"""What commands say alike: tables and sentences for people, one JSON object for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advbayes.checks import inert
from advbayes.cli.signals import Stopped, watched
from advbayes.runs.config import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from advbayes.evaluation.tables import Grid


def usable(device: str) -> str:
    """The device, if torch has it here.

    >>> usable("cpu")
    'cpu'
    """
    import torch

    try:
        torch.Generator(device)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        wanted = "device: must be one that torch has on this machine, such as cpu"
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"{wanted}, got {device!r:.40} ({first:.100})") from None
    return device


def check_new(key: str, path: str | None, suffixes: tuple[str, ...]) -> None:
    """Refuse a file that exists, has another ending, or has no folder, before the work starts.

    >>> check_new("out", "x.exe", (".csv", ".npz"))
    Traceback (most recent call last):
    ...
    advbayes.runs.config.ConfigError: out: must end in .csv or .npz, got 'x.exe'
    """
    if path is None:
        return
    if Path(path).suffix.lower() not in suffixes:
        raise ConfigError(f"{key}: must end in {' or '.join(suffixes)}, got {path!r}")
    if Path(path).exists():
        raise ConfigError(f"{key}: must be a new file, got {path}, which exists")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"{key}: must be in a folder that is there, got {path}")


def console(*, stderr: bool = False) -> Console:
    """A rich console on the stream as it is now."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else 140)


def say(text: str) -> None:
    """A plain line for people; nothing in it is markup or a command to the terminal."""
    print(inert(text), flush=True)


def emit(result: dict[str, Any]) -> None:
    """The JSON object."""
    print(json.dumps(result, allow_nan=False, indent=1, sort_keys=True), flush=True)


def table(grid: Grid) -> None:
    """A table for people."""
    console().print(grid.rich())


def warn(message: str) -> None:
    """A remark on standard error, on what has no effect."""
    fault(f"warning: {message}")


def fault(message: str) -> None:
    """One clean message on standard error."""
    print(inert(f"advbayes: {message}"), file=sys.stderr, flush=True)


@contextmanager
def resumable(hint: str) -> Iterator[None]:
    """Work with something to save; a signal ends it with a line that says what is left."""
    with watched():
        try:
            yield
        except Stopped:
            fault(f"stopped{hint}")
            raise


@contextmanager
def downloads(*, quiet: bool = False) -> Iterator[Callable[[str, int, int | None], None]]:
    """A callback for (file, bytes so far, bytes in all) that shows progress bars on a terminal.

    >>> with downloads(quiet=True) as tell:
    ...     tell("a.gz", 10, 100)
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    hidden = quiet or not sys.stderr.isatty()
    bar = Progress(*columns, console=console(stderr=True), disable=hidden)
    tasks: dict[str, Any] = {}

    def tell(file: str, done: int, total: int | None) -> None:
        if file not in tasks:
            bar.start()
            tasks[file] = bar.add_task(file, total=total)
        bar.update(tasks[file], completed=done, total=total)

    try:
        yield tell
    finally:
        if tasks and not hidden:
            bar.stop()

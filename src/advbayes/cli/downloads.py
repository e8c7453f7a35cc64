"""A progress bar for what is downloaded."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Downloads:
    """Called with (file, bytes so far, bytes in all); shows a bar with the time left, on a terminal
    unless told otherwise.

    >>> with Downloads(show=False) as downloads:
    ...     downloads("a.gz", 10, 100)
    """

    def __init__(self, show: bool | None = None) -> None:
        self.show = sys.stderr.isatty() if show is None else show
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Downloads:
        return self

    def __call__(self, file: str, done: int, total: int | None) -> None:
        if not self.show:
            return
        if self._bar is None:
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            from advbayes.cli.screen import console

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=console(stderr=True))
            self._bar.start()
        if file not in self._tasks:
            self._tasks[file] = self._bar.add_task(file, total=total)
        self._bar.update(self._tasks[file], completed=done, total=total)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

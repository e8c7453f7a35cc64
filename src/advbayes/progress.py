"""A progress line on standard error, shown after two seconds, on a terminal unless asked for."""

from __future__ import annotations

import sys
import time
from types import TracebackType


class Progress:
    """A progress line after two seconds; `show=None`: on a terminal, True: always, False: never.

    >>> with Progress("fit", 10, show=False) as bar:
    ...     bar.advance("bound", -3.2)
    """

    def __init__(self, what: str, total: int, show: bool | None = None, start: int = 0) -> None:
        self.what, self.total, self.done = what, total, start
        self.show = sys.stderr.isatty() if show is None else show
        self._start = start
        self._began = self._drawn = time.monotonic()
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def advance(self, note: str = "", value: float | None = None, num: int = 1) -> None:
        """`num` more done; the note and its value are written when the line is."""
        self.done += num
        if self.show:
            now = time.monotonic()
            if now - self._began > 2.0 and now - self._drawn > 0.2:
                self._draw(now, note if value is None else f"{note} {value:.4g}")

    def _draw(self, now: float, note: str) -> None:
        self._drawn = now
        speed = (self.done - self._start) / max(now - self._began, 1e-9)
        left = (self.total - self.done) / speed if speed else 0.0
        filled = round(24 * self.done / max(self.total, 1))
        line = (
            f"{self.what} [{'=' * filled}{' ' * (24 - filled)}] {self.done}/{self.total}  "
            f"{_clock(left)} left  {note}"
        )
        padded = line.ljust(self._width)
        self._width = len(line)
        print(f"\r{padded}", end="", file=sys.stderr, flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

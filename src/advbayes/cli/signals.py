"""Signals as exit codes: SIGTERM ends with 143 and Ctrl-C with 130, at a place where nothing is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LIMIT = 4.0  # seconds that a step may still take; what is on disk is whole at any moment


class Stopped(BaseException):
    """A signal asked for the end.

    >>> Stopped(signal.SIGTERM).code
    143
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


@contextmanager
def watched() -> Iterator[None]:
    """SIGTERM raises `Stopped`, so that locks are given back on the way out; Ctrl-C raises KeyboardInterrupt as ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Finishing:
    """Puts a signal off until the step is done: call it after each step, true means stop.

    Before the first call there is nothing to finish and a signal ends at once; so does a second signal, or a step that
    takes longer than `limit` seconds.

    >>> with Finishing() as stop:
    ...     stop(), stop.code
    (False, 0)
    """

    def __init__(self, limit: float = LIMIT) -> None:
        self.limit = limit
        self.code = 0  # 143 or 130 once a signal came
        self._stepping = False
        self._before: dict[int, object] = {}

    def __call__(self) -> bool:
        self._stepping = True
        return self.code != 0

    def __enter__(self) -> Finishing:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0) if self._before else None
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._stepping or self.code:
            raise Stopped(number)
        self.code = 128 + number

        def late(_: int, __: FrameType | None) -> None:
            raise Stopped(number)

        self._before.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, late))
        signal.setitimer(signal.ITIMER_REAL, self.limit)

"""Signals as exit codes: SIGTERM ends with 143, Ctrl-C with 130, where nothing is lost.

Until a command has something to save, the console program leaves at once and without a word: an
exception raised while C extensions are imported may be swallowed, printed or turned into an abort.
From then on `Stopped` is raised, so that locks and half-written files are cleaned up on the way
out, and never while a module is being imported.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

# seconds that a step or an import may still take; what is on disk is whole at any moment
LIMIT = 4.0
AGAIN = 0.05  # seconds until an import is looked at again
NUMBERS = (signal.SIGTERM, signal.SIGINT)

_console = False  # whether the process is the console program, which may be ended from here


class Stopped(BaseException):
    """A signal asked for the end.

    >>> Stopped(signal.SIGTERM).code
    143
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


def take_over() -> None:
    """For the first lines of the console program: a signal ends the process at once."""
    global _console
    if threading.current_thread() is threading.main_thread():
        _console = True
        for number in NUMBERS:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported below this frame.

    >>> importing(None)
    False
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class Finishing:
    """Puts a signal off until the step is done: call it after each step, true means stop.

    Before the first call there is nothing to finish and a signal ends at once; so does a second
    signal, or a step that takes longer than `limit` seconds.

    >>> with Finishing() as stop:
    ...     stop(), stop.code
    (False, 0)
    """

    def __init__(self, limit: float = LIMIT, numbers: Sequence[signal.Signals] = NUMBERS) -> None:
        self.limit = limit
        self.code = 0  # 143 or 130 once a signal came
        self._stepping = self._raised = False
        self._number, self._deadline = 0, 0.0  # of the signal that ends all
        self._own = dict.fromkeys(numbers, self._note) | {signal.SIGALRM: self._late}
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        self._stepping = True
        return self.code != 0

    def __enter__(self) -> Finishing:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {number: signal.signal(number, own) for number, own in self._own.items()}
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._stepping or self.code:
            self._leave(number, frame)
        else:
            self.code = 128 + number
            signal.setitimer(signal.ITIMER_REAL, self.limit)

    def _late(self, _: int, frame: FrameType | None) -> None:
        """The alarm: a step took too long, an import is over, or `Stopped` was swallowed."""
        self._leave(self._number or self.code - 128, frame)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        """Raises `Stopped` once, outside imports; where that was swallowed, the console program
        ends after `LIMIT` seconds."""
        if not self._number:
            self._number, self._deadline = number, time.monotonic() + LIMIT
        late = time.monotonic() >= self._deadline
        if late and _console:
            os._exit(128 + self._number)
        if importing(frame) and not late:
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        elif late or not self._raised:
            self._raised = True
            signal.setitimer(signal.ITIMER_REAL, max(self._deadline - time.monotonic(), AGAIN))
            raise Stopped(self._number)


def watched() -> Finishing:
    """Around work with something to save but no steps: SIGTERM, and Ctrl-C in the console program,
    raise `Stopped` at once."""
    numbers = NUMBERS if _console else (signal.SIGTERM,)
    return Finishing(numbers=numbers)

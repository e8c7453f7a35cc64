"""What can go wrong with a file: every message names the file, what was wanted and what came."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from advbayes.checks import InputError, printable

FAULTS = (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError)


class StoreError(InputError):
    r"""A file that cannot be trusted or written.

    >>> str(StoreError("a/manifest.json", "schema 1", "schema 9"))
    'a/manifest.json: wanted schema 1, got schema 9'
    >>> str(StoreError("run", "a name", "\x1b[31mred"))
    'run: wanted a name, got \\x1b[31mred'
    """

    def __init__(self, file: str | os.PathLike[str], wanted: str, got: str) -> None:
        self.file = os.fspath(file)
        self.wanted, self.got = printable(wanted), printable(got)
        super().__init__(str(self))

    def __str__(self) -> str:  # OSError, a base of some subclasses, would print its own fields
        return f"{printable(self.file, 1000)}: wanted {self.wanted}, got {self.got}"


@contextmanager
def refusing(
    file: str | os.PathLike[str], wanted: str, faults: tuple[type[Exception], ...] = FAULTS
) -> Iterator[None]:
    """What goes wrong inside, as an error that names the file.

    >>> with refusing("a.json", "a number"):
    ...     float("one")
    Traceback (most recent call last):
    ...
    advbayes.store.errors.StoreError: a.json: wanted a number, got could not convert string to float: 'one'
    """  # noqa: E501
    try:
        yield
    except StoreError:
        raise
    except faults as error:
        raise StoreError(file, wanted, f"{error!s:.200}" or type(error).__name__) from None


class MissingError(StoreError, FileNotFoundError):
    """Nothing is there."""

    def __init__(self, file: str | os.PathLike[str], wanted: str) -> None:
        super().__init__(file, wanted, "nothing (no such file)")


class DiskFullError(StoreError, OSError):
    """No room; whatever was there before is untouched."""

    def __init__(self, file: str | os.PathLike[str], *, needed: int, free: int) -> None:
        self.needed, self.free = needed, free
        got = f"{free} bytes free; what was saved before is intact"
        super().__init__(file, wanted=f"{needed} bytes of disk", got=got)
        self.errno = errno.ENOSPC


class NotWritableError(StoreError, PermissionError):
    """A place where nothing may be written."""

    def __init__(self, file: str | os.PathLike[str], *, got: str) -> None:
        super().__init__(file, wanted="a place to write to", got=got)


class LockedError(StoreError):
    """Another writer is at work in the folder."""

    def __init__(self, file: str | os.PathLike[str], *, pid: int, host: str) -> None:
        self.pid, self.host = pid, host
        got = f"one that pid {pid} on host {host} is writing to"
        super().__init__(file, wanted="a folder without another writer", got=got)

"""One writer for each folder."""

from __future__ import annotations

import json
import os
import platform
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from advbayes.checks import number

from .errors import LockedError, MissingError, StoreError
from .files import room

_NAME = ".lock"
_SIZE = 4096  # bytes, one block of most file systems


@dataclass(frozen=True)
class Lock:
    """The right to write in a folder, held by one process until the `with` block or it ends.

    An advisory lock of the operating system, which dies with its holder, on a file that names pid
    and host.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Lock(folder):
    ...     with Lock(folder):  # doctest: +ELLIPSIS
    ...         pass
    Traceback (most recent call last):
    ...
    advbayes.store.errors.LockedError: .../.lock: wanted a folder without another writer, got one that pid ...
    """  # noqa: E501

    folder: str | os.PathLike[str]
    wait: float = 0.0  # seconds to wait for a living writer before LockedError
    _locks: list[tuple[FileLock, int]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        number("wait", self.wait, low=0)

    @property
    def path(self) -> Path:
        """Where the lock file is while the lock is held."""
        return Path(self.folder) / _NAME

    def __enter__(self) -> Lock:
        if not Path(self.folder).is_dir():
            raise MissingError(self.folder, "a folder to lock")
        with _named(self.path), suppress(FileNotFoundError):
            mode = self.path.lstat().st_mode
            if not stat.S_ISREG(mode):
                raise StoreError(self.path, "a lock file", stat.filemode(mode))
        lock = FileLock(self.path, timeout=self.wait, poll_interval=0.02, thread_local=False)
        with _named(self.path), room(self.path, _SIZE):
            lock.acquire()
            self._locks.append((lock, os.getpid()))
            self.path.write_text(
                json.dumps({"pid": os.getpid(), "host": platform.node() or "unknown"})
            )
        return self

    def __exit__(self, *_: object) -> None:
        lock, pid = self._locks.pop()
        if pid == os.getpid():  # else a forked child left the block: the lock stays its parent's
            # before the release: whoever waits notices and makes another
            self.path.unlink(missing_ok=True)
            lock.release()


def claim(path: str | os.PathLike[str]) -> Lock:
    """The lock, not yet entered, of a new folder: `path`, or `path-2`, `path-3`, ... where taken.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [os.path.basename(claim(f"{folder}/run").folder) for _ in range(3)]
    ['run', 'run-2', 'run-3']
    """
    base, tries = Path(path), 1
    while True:
        folder = base if tries == 1 else base.with_name(f"{base.name}-{tries}")
        try:
            os.mkdir(folder)
            return Lock(folder)
        except FileExistsError:
            tries += 1
        except FileNotFoundError:
            raise MissingError(folder.parent, "a folder to write to") from None


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Faults of the lock file as errors that name it, and its writer where there is one."""
    try:
        yield
    except Timeout:
        pid, host = _owner(path)
        raise LockedError(path, pid=pid, host=host) from None
    except StoreError:
        raise
    except (OSError, NotImplementedError) as error:
        raise StoreError(path, "a lock file", str(error)) from error


def _owner(path: Path) -> tuple[int, str]:
    """Pid and host of the lock's holder; 0 where its file does not say."""
    with suppress(OSError, ValueError, RecursionError):
        match json.loads(path.read_bytes()[:4096]):
            case {"pid": int(pid), "host": str(host)}:
                return pid, host
    return 0, "unknown"

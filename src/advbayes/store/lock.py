"""One writer for each folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from advbayes.checks import number

from .errors import LockedError, MissingError, StoreError
from .files import write_all
from .owner import Owner, current

_NAME = ".lock"
_BRIEFLY = 10.0  # seconds: looking at a lock file takes microseconds, so this only ends on a stopped process


@dataclass(frozen=True)
class Lock:
    """The right to write in a folder, held by one process until the end of the `with` block or its death.

    The lock file names pid, host and starting time. It is read and changed only under an advisory lock of the operating
    system, which dies with its holder, so that of any number of processes that find a stale lock exactly one takes it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Lock(folder):
    ...     with Lock(folder):  # doctest: +ELLIPSIS
    ...         pass
    Traceback (most recent call last):
    ...
    advbayes.store.errors.LockedError: .../.lock: wanted a folder without another writer, got one that pid ...
    """

    folder: str | os.PathLike[str]
    wait: float = 0.0  # seconds to wait for a living writer before LockedError
    _held: list[Owner] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        number("wait", self.wait, low=0)

    @property
    def path(self) -> Path:
        """Where the lock file is while the lock is held."""
        return Path(self.folder) / _NAME

    def __enter__(self) -> Lock:
        deadline = time.monotonic() + self.wait
        while True:
            try:
                self._acquire()
                return self
            except LockedError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.02)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        mine = self._held.pop()
        if mine.pid != os.getpid():
            return  # a forked child left the block: the lock stays its parent's
        with _guarded(self.path) as descriptor:
            if _parse(_content(descriptor)) == mine:
                os.unlink(self.path)

    def _acquire(self) -> None:
        if not Path(self.folder).is_dir():
            raise MissingError(self.folder, wanted="a folder to lock")
        with _guarded(self.path) as descriptor:
            owner = _parse(_content(descriptor))
            alive = owner is not None and owner.alive()
            if owner is not None and alive is not False:
                advice = f"delete {self.path} if that process is gone" if alive is None else ""
                raise LockedError(self.path, pid=owner.pid, host=owner.host, advice=advice)
            mine = current()
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            write_all(descriptor, json.dumps(asdict(mine)).encode())
            os.fsync(descriptor)
            self._held.append(mine)


def claim(path: str | os.PathLike[str]) -> Lock:
    """The lock, not yet entered, of a new folder: `path`, or `path-2`, `path-3`, ... when that name is taken.

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
            raise MissingError(folder.parent, wanted="a folder to write to") from None


@contextmanager
def _guarded(path: Path) -> Iterator[int]:
    """The lock file, created where absent, with nobody else looking at it."""
    try:
        import fcntl
    except ImportError:
        raise StoreError(path, wanted="a system with flock (Linux, macOS)", got=os.name) from None
    deadline = time.monotonic() + _BRIEFLY
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise StoreError(path, wanted="a lock file", got=error.strerror or str(error)) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    got = f"one that another process has been looking at for {_BRIEFLY:g} s"
                    raise StoreError(path, wanted="a free lock file", got=got) from None
            except OSError as error:
                raise StoreError(path, wanted="a file system with flock", got=error.strerror or str(error)) from error
            else:
                if _same_file(descriptor, path):  # else its holder removed the name after we opened it
                    try:
                        yield descriptor
                    finally:
                        if _same_file(descriptor, path) and not _content(descriptor):
                            os.unlink(path)  # created by us, not used
                    return
        finally:
            os.close(descriptor)
        time.sleep(0.002)


def _same_file(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    return False


def _content(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, 4096)


def _parse(content: bytes) -> Owner | None:
    """The owner; None for a lock file that is new, or whose writer died while it wrote."""
    try:
        match json.loads(content):
            case {"pid": int(pid), "host": str(host), "place": str(place), "started": str(started)}:
                return Owner(pid, host, place, started)
    except (ValueError, RecursionError):
        pass
    return None

"""Durable files: written beside, flushed, renamed, so that the old content or the new is there; and
one writer for each folder.

All calls that change the disk go through `os`, one call for each step, so that tests can stop the
process at each.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from advbayes.checks import number

from .errors import DiskFullError, LockedError, MissingError, NotWritableError, StoreError

try:
    import fcntl
except ImportError:  # Windows: what killed writers leave behind stays
    fcntl = None  # type: ignore[assignment]

_PIECE = 1 << 20
_LOCK = ".lock"
_BLOCK = 4096  # bytes, of most file systems: what a lock file takes
if sys.platform == "win32":
    _PLAIN, _WARY = os.O_BINARY, os.O_RDONLY
else:
    _PLAIN, _WARY = os.O_CLOEXEC, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file's content, atomically and durably.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bytes(f"{folder}/a", b"one")
    ...     write_bytes(f"{folder}/a", b"two")
    ...     (Path(folder) / "a").read_bytes(), os.listdir(folder)
    (b'two', ['a'])
    """
    target = Path(os.path.realpath(path))
    sweep(target)
    with room(target, len(data)), staged(target) as temporary:
        create(temporary, [data])
        os.replace(temporary, target)
        sync_folder(target.parent)


def read_bytes(path: Path, *, limit: int) -> bytes:
    """All of a regular file, never following a link, never more than `limit` bytes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bytes(f"{folder}/a", b"12345")
    ...     read_bytes(Path(folder) / "a", limit=4)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    advbayes.store.errors.StoreError: .../a: wanted at most 4 bytes, got 5
    """
    with opened(path) as (descriptor, size):
        if size > limit:
            raise StoreError(path, f"at most {limit} bytes", f"{size}")
        return read_at(path, descriptor, 0, size)


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a regular file; anything else is refused without waiting on it."""
    try:
        descriptor = os.open(path, _WARY | _PLAIN)
    except FileNotFoundError:
        raise MissingError(path, "a file") from None
    except OSError as error:
        got = "a symbolic link" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise StoreError(path, "a readable regular file", got) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(path, "a regular file", stat.filemode(status.st_mode))
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def read_at(path: Path, descriptor: int, offset: int, size: int) -> bytes:
    """Exactly `size` bytes."""
    return b"".join(pieces_at(path, descriptor, offset, size))


def pieces_at(path: Path, descriptor: int, offset: int, size: int) -> Iterator[bytes]:
    """Exactly `size` bytes, in pieces; a file that turns out shorter is refused."""
    os.lseek(descriptor, offset, os.SEEK_SET)
    left = size
    while left:
        piece = os.read(descriptor, min(left, _PIECE))
        if not piece:
            raise StoreError(path, f"{offset + size} bytes", f"{offset + size - left} (truncated)")
        left -= len(piece)
        yield piece


def check_digest(file: str | os.PathLike[str], wanted: str, got: str) -> None:
    """Refuse a file whose SHA-256 is not the one that was recorded."""
    if wanted != got:
        raise StoreError(file, f"SHA-256 {wanted}", f"{got} (damaged or altered)")


def create(path: Path, pieces: Iterable[bytes], *, reserve: int = 0) -> int:
    """Write an empty or new file and flush it to the disk; returns the number of bytes.

    Space for `reserve` bytes is allocated first, so that a full disk is noticed at once.
    """
    written = 0
    with writing(path) as descriptor:
        if reserve and sys.platform == "linux":
            try:
                os.posix_fallocate(descriptor, 0, reserve)
            except OSError as error:  # some file systems cannot
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
        for data in pieces:
            write_all(descriptor, data)
            written += len(data)
        os.fsync(descriptor)
    return written


@contextmanager
def writing(path: Path) -> Iterator[int]:
    """The descriptor of a file, made where there is none, and closed again."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _PLAIN, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """`os.write` until everything is written."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left[:_PIECE]) :]


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable (a rename is not, before this)."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def staged(target: Path, *, folder: bool = False) -> Iterator[Path]:
    """An empty file or folder beside `target`, locked while its writer lives, then removed."""
    descriptor = None
    while descriptor is None:  # else somebody took it for a dead writer's
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        if folder:
            os.mkdir(temporary)
        else:
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        try:
            descriptor = _locked(temporary)
        except OSError:  # too many open files, for instance
            (os.rmdir if folder else os.unlink)(temporary)
            raise
    try:
        yield temporary
    finally:
        discard(temporary)
        os.close(descriptor)


def _locked(path: Path, *, surely: bool = False) -> int | None:
    """A descriptor that holds the advisory lock on a name; None if another has it or removed it.

    A file system may have no such locks: that counts as held, unless one must be sure.
    """
    try:
        descriptor = os.open(path, _WARY)
    except FileNotFoundError:
        return None
    ours = False
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except (OSError, AttributeError):
            if surely:
                return None
        with suppress(FileNotFoundError):
            there = os.stat(path, follow_symlinks=False)
            ours = os.path.samestat(os.fstat(descriptor), there)
        return descriptor if ours else None
    finally:
        if not ours:
            os.close(descriptor)


def discard(path: Path) -> None:
    """Remove a file or a folder of ours, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)


def sweep(target: Path) -> None:
    """Remove what dead writers of `target` left beside it: names whose lock nobody holds."""
    leftover = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-z-]+\.tmp")
    with suppress(FileNotFoundError):
        for name in filter(leftover.fullmatch, os.listdir(target.parent)):
            with suppress(OSError):  # one that may not be opened stays
                if (descriptor := _locked(target.with_name(name), surely=True)) is not None:
                    discard(target.with_name(name))
                    os.close(descriptor)


@contextmanager
def room(target: Path, needed: int) -> Iterator[None]:
    """Refuse a disk that is full or fills up on the way, and a place where none may write."""
    parent = target.parent
    if not parent.is_dir():
        raise MissingError(parent, "a folder to write to")
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise DiskFullError(target, needed=needed, free=free)
    try:
        yield
    except DiskFullError:
        raise
    except OSError as error:
        if error.errno in _FORBIDDEN:
            raise NotWritableError(target, got=error.strerror or str(error)) from error
        if error.errno not in _FULL:
            if error.filename is None:
                error.filename = os.fspath(target)
            raise
        raise DiskFullError(target, needed=needed, free=shutil.disk_usage(parent).free) from error


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
        return Path(self.folder) / _LOCK

    def __enter__(self) -> Lock:
        if not Path(self.folder).is_dir():
            raise MissingError(self.folder, "a folder to lock")
        with _lock_faults(self.path), suppress(FileNotFoundError):
            mode = self.path.lstat().st_mode
            if not stat.S_ISREG(mode):
                raise StoreError(self.path, "a lock file", stat.filemode(mode))
        lock = FileLock(self.path, timeout=self.wait, poll_interval=0.02, thread_local=False)
        with _lock_faults(self.path), room(self.path, _BLOCK):
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
def _lock_faults(path: Path) -> Iterator[None]:
    """Faults of the lock file as errors that name it, and its writer where there is one."""
    try:
        yield
    except Timeout:
        pid, host = 0, "unknown"
        with suppress(OSError, ValueError, RecursionError):
            match json.loads(path.read_bytes()[:_BLOCK]):
                case {"pid": int(its_pid), "host": str(its_host)}:
                    pid, host = its_pid, its_host
        raise LockedError(path, pid=pid, host=host) from None
    except StoreError:
        raise
    except (OSError, NotImplementedError) as error:
        raise StoreError(path, "a lock file", str(error)) from error

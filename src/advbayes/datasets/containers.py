"""Bytes out of plain, gzip and tar files, never more of them than were asked for."""

from __future__ import annotations

import gzip
import stat
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from advbayes.datasets.errors import DataError, DataMissingError

_CHUNK = 1 << 20
REFETCH = "Delete it and fetch it again."
# Deflate never grows data by more than 5 bytes in 16 KiB; the rest is room for headers and padding.
_OVERHEAD = 1 << 20


def file_size(path: Path) -> int:
    """The size of a regular file; anything else (absent, a folder, a device, a pipe) is an error.

    >>> import os
    >>> file_size(Path(os.devnull))
    Traceback (most recent call last):
    ...
    advbayes.datasets.errors.DataError: /dev/null: wanted a regular file, got something else. Give the path of a file.
    """  # noqa: E501
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DataMissingError(path, "a file", "nothing", "Check the path.") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise DataError(path, "a readable file", str(error), "Check the path.") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(path, "a regular file", "something else", "Give the path of a file.")
    return status.st_size


def read_plain(path: Path, limit: int, *, exact: bool = False) -> bytes:
    """The whole of a file of at most (or exactly) `limit` bytes; the size is checked first.

    >>> read_plain(Path(__file__), 10)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    advbayes.datasets.errors.DataError: ...containers.py: wanted at most 10 bytes, got ... bytes...
    """
    size = file_size(path)
    if size > limit or (exact and size != limit):
        wanted = f"{'exactly' if exact else 'at most'} {limit} bytes"
        remedy = REFETCH if exact else "Give a smaller file or raise the limit."
        raise DataError(path, wanted, f"{size} bytes", remedy)
    try:
        with _opened(path) as stream:
            data = stream.read(size + 1)  # the buffer is as large as what is asked for
    except MemoryError:
        remedy = "Give a smaller file, or free some memory."
        raise DataError(path, f"{size} bytes of memory to read it", "less", remedy) from None
    if len(data) != size:
        got = f"{len(data)} bytes: it changes while it is read"
        raise DataError(path, f"{size} bytes", got, REFETCH)
    return data


def read_gzip(path: Path, size: int) -> bytes:
    """The `size` bytes of a gzip file, exactly; at most one byte more is ever unpacked.

    >>> import tempfile
    >>> bomb = Path(tempfile.mkdtemp(), "bomb.gz")
    >>> _ = bomb.write_bytes(gzip.compress(bytes(10**6)))
    >>> read_gzip(bomb, 100)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    advbayes.datasets.errors.DataError: ...: wanted exactly 100 bytes of content, got more. Delete it...
    """  # noqa: E501
    with _inflated(path, size) as stream:
        data = stream.read(size + 1)
    if len(data) != size:
        got = "more" if len(data) > size else f"{len(data)}"
        raise DataError(path, f"exactly {size} bytes of content", got, REFETCH)
    return data


def read_tar_gzip(path: Path, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """Members of a .tar.gz by base name, each of a known size; nothing is written to disk.

    Other members are skipped, in a bounded amount: whatever the headers say, no more than that is
    unpacked.

    >>> import io, tempfile
    >>> path = Path(tempfile.mkdtemp(), "a.tar.gz")
    >>> with tarfile.open(path, "w:gz") as archive:
    ...     member = tarfile.TarInfo("folder/a.bin")
    ...     member.size = 3
    ...     archive.addfile(member, io.BytesIO(b"abc"))
    >>> read_tar_gzip(path, {"a.bin": 3})
    {'a.bin': b'abc'}
    """
    contents: dict[str, bytes] = {}
    allowed = 2 * sum(sizes.values()) + 4 * _OVERHEAD  # unpacked bytes, wanted and skipped together
    with _inflated(path, allowed) as stream:
        try:
            with tarfile.open(fileobj=_Bounded(path, stream, allowed), mode="r|") as archive:  # type: ignore[call-overload]
                for member in archive:
                    base = PurePosixPath(member.name).name
                    if not member.isreg() or base not in sizes:
                        continue
                    content = archive.extractfile(member) if member.size == sizes[base] else None
                    data = b"" if content is None else content.read()
                    if base in contents or len(data) != sizes[base]:
                        wanted = f"one member of {sizes[base]} bytes"
                        got = "a second one" if base in contents else f"{member.size} bytes"
                        raise DataError(f"{path}: {base!r}", wanted, got, REFETCH)
                    contents[base] = data
        except tarfile.TarError as error:
            raise DataError(path, "an intact tar archive", str(error), REFETCH) from None
        while stream.read(_CHUNK):  # to the end, where gzip keeps its checksum
            pass
    if absent := sorted(set(sizes) - set(contents)):
        wanted = f"the members {', '.join(sorted(sizes))}"
        raise DataError(path, wanted, f"none named {absent[0]}", REFETCH)
    return contents


@dataclass
class _Bounded:
    """As much of a stream as a reader may have, in pieces of bounded size."""

    path: Path
    stream: gzip.GzipFile
    left: int

    def read(self, num: int) -> bytes:
        piece = self.stream.read(min(num, _CHUNK))
        self.left -= len(piece)
        if self.left < 0:
            raise DataError(self.path, "an archive of this data set", "more in it", REFETCH)
        return piece


@contextmanager
def _inflated(path: Path, size: int) -> Iterator[gzip.GzipFile]:
    """A gzip stream of at most about `size` bytes, its faults as DataError."""
    if (packed := file_size(path)) > size + _OVERHEAD:
        wanted = f"a gzip file of {size} bytes of content"
        raise DataError(path, wanted, f"{packed} packed bytes", REFETCH)
    try:
        with _opened(path) as raw, gzip.GzipFile(fileobj=raw, mode="rb") as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(path, "an intact gzip file", str(error), REFETCH) from None


def _opened(path: Path) -> AbstractContextManager[IO[bytes]]:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(path, "a readable file", str(error), "Check its permissions.") from None

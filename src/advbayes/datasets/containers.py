"""Bytes out of plain, gzip and tar files, never more of them than were asked for."""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import IO

from advbayes.datasets.errors import DataError, DataMissingError, problem

_CHUNK = 1 << 20
_BLOCK = 512
_REFETCH = "Delete it and fetch it again."
# Deflate never grows data by more than 5 bytes in 16 KiB; the rest is room for headers and padding.
_OVERHEAD = 1 << 20


def archived(name: str) -> bool:
    """Whether a file of this name is a compressed tar archive.

    >>> archived("cifar-10-binary.tar.gz"), archived("train-images-idx3-ubyte.gz")
    (True, False)
    """
    return name.endswith((".tar.gz", ".tgz"))


def file_size(path: Path) -> int:
    """The size of a regular file; anything else (absent, a folder, a device, a pipe) is an error.

    >>> import os
    >>> file_size(Path(os.devnull))
    Traceback (most recent call last):
    ...
    advbayes.datasets.errors.DataError: /dev/null: wanted a regular file, got something else. Give the path of a file.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DataMissingError(problem(path, "a file", "nothing", "Check the path.")) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise DataError(problem(path, "a readable file", str(error), "Check the path.")) from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(problem(path, "a regular file", "something else", "Give the path of a file."))
    return status.st_size


def read_plain(path: Path, limit: int, *, exact: bool = False) -> bytes:
    """The whole of a file of at most (or exactly) `limit` bytes; the size is checked before anything is read.

    >>> read_plain(Path(__file__), 10)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    advbayes.datasets.errors.DataError: ...containers.py: wanted at most 10 bytes, got ... bytes...
    """
    size = file_size(path)
    if size > limit or (exact and size != limit):
        wanted = f"{'exactly' if exact else 'at most'} {limit} bytes"
        remedy = _REFETCH if exact else "Give a smaller file or raise the limit."
        raise DataError(problem(path, wanted, f"{size} bytes", remedy))
    with _opened(path) as stream:
        data = stream.read(size + 1)  # the buffer is as large as what is asked for
    if len(data) != size:
        raise DataError(problem(path, f"{size} bytes", f"{len(data)} bytes: it changes while it is read", _REFETCH))
    return data


def read_gzip(path: Path, size: int) -> bytes:
    """The content of a gzip file that must be exactly `size` bytes; at most one byte more is ever unpacked.

    >>> import tempfile
    >>> bomb = Path(tempfile.mkdtemp(), "bomb.gz")
    >>> _ = bomb.write_bytes(gzip.compress(bytes(10**6)))
    >>> read_gzip(bomb, 100)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    advbayes.datasets.errors.DataError: ...: wanted exactly 100 bytes of content, got more. Delete it...
    """
    packed = file_size(path)
    if packed > size + _OVERHEAD:
        raise DataError(problem(path, f"a gzip file of {size} bytes of content", f"{packed} packed bytes", _REFETCH))
    with _opened(path) as raw:
        data = _Inflated(path, raw).take(size + 1)
    if len(data) != size:
        got = "more" if len(data) > size else f"{len(data)}"
        raise DataError(problem(path, f"exactly {size} bytes of content", got, _REFETCH))
    return data


def read_tar_gzip(path: Path, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """Members of a .tar.gz by base name, each of a known size; nothing is written to disk.

    Other members are skipped, in a bounded amount: a short reader of our own, because the standard one lets a header
    ask for any amount of memory.

    >>> import io, tarfile, tempfile
    >>> path = Path(tempfile.mkdtemp(), "a.tar.gz")
    >>> with tarfile.open(path, "w:gz") as archive:
    ...     member = tarfile.TarInfo("folder/a.bin")
    ...     member.size = 3
    ...     archive.addfile(member, io.BytesIO(b"abc"))
    >>> read_tar_gzip(path, {"a.bin": 3})
    {'a.bin': b'abc'}
    """
    allowed = 2 * sum(sizes.values()) + 4 * _OVERHEAD  # unpacked bytes, wanted and skipped together
    if file_size(path) > allowed:
        raise DataError(problem(path, f"an archive of at most {allowed} bytes", f"{file_size(path)} bytes", _REFETCH))
    found: dict[str, bytes] = {}
    with _opened(path) as raw:
        stream = _Inflated(path, raw)
        while len(found) < len(sizes):
            header = stream.take(_BLOCK)
            if len(header) < _BLOCK or not any(header):
                break
            name, size, regular = _tar_header(path, header)
            padded = -(-size // _BLOCK) * _BLOCK
            allowed -= _BLOCK + padded
            if allowed < 0:
                raise DataError(problem(path, "an archive of this data set", f"{name!r} of {size} bytes", _REFETCH))
            base = PurePosixPath(name).name
            if not regular or base not in sizes:
                stream.skip(padded)
                continue
            if size != sizes[base] or base in found:
                got = "a second one" if base in found else f"{size} bytes"
                raise DataError(problem(f"{path}: {base!r}", f"one member of {sizes[base]} bytes", got, _REFETCH))
            found[base] = stream.take(padded)[:size]
            if len(found[base]) != size:
                raise DataError(problem(f"{path}: {base}", f"{size} bytes", f"{len(found[base])} bytes", _REFETCH))
        stream.skip(allowed)  # to the end, where gzip keeps its checksum
    absent = sorted(set(sizes) - set(found))
    if absent:
        raise DataError(problem(path, f"the members {', '.join(sorted(sizes))}", f"none named {absent[0]}", _REFETCH))
    return found


class _Inflated:
    """A gzip stream read in bounded pieces, with its faults as DataError."""

    def __init__(self, path: Path, raw: IO[bytes]) -> None:
        self.path = path
        self.stream = gzip.GzipFile(fileobj=raw, mode="rb")

    def take(self, num: int) -> bytes:
        pieces = bytearray()
        try:
            while len(pieces) < num:
                piece = self.stream.read(min(_CHUNK, num - len(pieces)))
                if not piece:
                    break
                pieces += piece
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(problem(self.path, "an intact gzip file", str(error), _REFETCH)) from None
        return bytes(pieces)

    def skip(self, num: int) -> None:
        while num > 0 and (piece := self.take(min(_CHUNK, num))):
            num -= len(piece)


def _tar_header(path: Path, header: bytes) -> tuple[str, int, bool]:
    """Name, size and whether it is a regular file; long-name and pax records count as other members."""
    try:
        size = int(header[124:136].strip(b" \0") or b"0", 8)
        stated = int(header[148:156].strip(b" \0") or b"0", 8)
    except ValueError:
        raise DataError(problem(path, "a tar header", "bytes that are none", _REFETCH)) from None
    if stated != sum(header) - sum(header[148:156]) + 8 * 32 or size < 0:
        raise DataError(problem(path, "an intact tar header", "one with a wrong checksum", _REFETCH))
    name = header[:100].split(b"\0", 1)[0].decode("utf-8", "replace")
    return name, size, header[156:157] in (b"0", b"\0")


def _opened(path: Path) -> AbstractContextManager[IO[bytes]]:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(problem(path, "a readable file", str(error), "Check its permissions.")) from None

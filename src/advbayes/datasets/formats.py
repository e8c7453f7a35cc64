"""Bytes out of plain, gzip and tar files, arrays out of IDX, CIFAR and .npz files: never more than
was asked for, and every size checked before an array is made."""

from __future__ import annotations

import gzip
import hashlib
import math
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from advbayes.datasets.errors import DataError, DataMissingError
from advbayes.store.archive import FAULTS, directory_size

_CIFAR_RECORD = 1 + 3 * 32 * 32
_NPZ_DIRECTORY = 1 << 16  # bytes: some hundred members, where a data set has at most six
_NPZ_HEADER = 1 << 12
_CHUNK = 1 << 20
# Deflate never grows data by more than 5 bytes in 16 KiB; the rest is room for headers and padding.
_OVERHEAD = 1 << 20
REFETCH = "Delete it and fetch it again."
_SAVEZ = "Write it with numpy.savez(path, x=..., y=...) from plain numeric arrays."
_RAISE = "Raise max_bytes if it is right."


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
    advbayes.datasets.errors.DataError: ...formats.py: wanted at most 10 bytes, got ... bytes...
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


def parse_idx(data: bytes, name: str) -> npt.NDArray[np.uint8]:
    """An IDX file of unsigned bytes: `0 0 8 ndim`, the dimensions as big-endian 32-bit integers,
    the values.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]), "labels")
    array([5, 7], dtype=uint8)
    """
    if len(data) < 4 or data[:3] != b"\0\0\x08" or not 1 <= data[3] <= 4:
        wanted = "an IDX file of bytes with 1 to 4 dimensions"
        raise DataError(name, wanted, f"{data[:4].hex()} at its start", REFETCH)
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise DataError(name, f"an IDX header of {start} bytes", f"{len(data)} bytes", REFETCH)
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    size = start + math.prod(shape)
    if len(data) != size:
        wanted = f"{size} bytes, as its header {shape} says"
        raise DataError(name, wanted, f"{len(data)} bytes", REFETCH)
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def parse_cifar(data: bytes, name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Images (N, 3, 32, 32) and labels (N,) of a CIFAR-10 binary batch: records of 1 label and
    3,072 pixel bytes.

    >>> images, labels = parse_cifar(bytes([3]) + bytes(3072), "batch")
    >>> images.shape, labels
    ((1, 3, 32, 32), array([3], dtype=uint8))
    """
    if not data or len(data) % _CIFAR_RECORD:
        raise DataError(name, f"records of {_CIFAR_RECORD} bytes", f"{len(data)} bytes", REFETCH)
    records = np.frombuffer(data, np.uint8).reshape(-1, _CIFAR_RECORD)
    if (largest := int(records[:, 0].max())) > 9:
        raise DataError(name, "labels from 0 to 9", f"a label of {largest}", REFETCH)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def values_sha256(values: npt.NDArray[np.float64], decimals: int) -> str:
    """SHA-256 of a table's numbers to so many decimals, however a file spells them.

    >>> len({values_sha256(np.array([[value]]), 2) for value in (1.0, 1.001, 1.1)})
    2
    """
    # Half up, with a margin for numbers that binary fractions cannot hold.
    whole = np.floor(values * 10.0**decimals + 0.5 + 1e-6).astype("<i8")
    return hashlib.sha256(repr(whole.shape).encode() + whole.tobytes()).hexdigest()


def read_npz(path: Path, keys: Collection[str], max_bytes: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a stranger's .npz, of these keys and no others, at most `max_bytes` unpacked.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "a.npz")
    >>> np.savez_compressed(path, x=np.zeros((1000, 1000)))
    >>> read_npz(path, ["x"], max_bytes=10**6)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    advbayes.datasets.errors.DataError: ...: wanted at most 1000000 bytes unpacked, got 8000128 bytes. Raise...
    """  # noqa: E501
    size = file_size(path)
    if size > max_bytes + _NPZ_DIRECTORY:
        raise DataError(path, f"at most {max_bytes} bytes", f"{size} bytes", _RAISE)
    try:
        with path.open("rb") as stream:
            num, length = directory_size(stream, size)
            if not num or length > _NPZ_DIRECTORY:
                wanted = f"an .npz file (a zip with a directory of at most {_NPZ_DIRECTORY} bytes)"
                raise DataError(path, wanted, f"{length} bytes, or something else", _SAVEZ)
            with zipfile.ZipFile(stream) as archive:
                members = _members(path, archive, keys, max_bytes)
                return {key: _read_array(path, archive, info) for key, info in members.items()}
    except DataError:
        raise
    except MemoryError as error:
        wanted = f"memory for arrays of a file of {size} bytes"
        raise DataError(path, wanted, str(error) or "less", "Give a smaller file.") from None
    except FAULTS as error:
        got = str(error) or type(error).__name__
        raise DataError(path, "an intact .npz file", got, _SAVEZ) from None


def _members(
    path: Path, archive: zipfile.ZipFile, keys: Collection[str], max_bytes: int
) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        key = info.filename.removesuffix(".npy")
        if key not in keys or not info.filename.endswith(".npy") or key in members:
            got = f"a member {info.filename[:80]!r}{' twice' if key in members else ''}"
            raise DataError(path, f"arrays named {', '.join(keys)}", got, _SAVEZ)
        plain = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if info.flag_bits & 1 or not plain:
            raise DataError(path, "plain or deflated members", f"{key!r} packed otherwise", _SAVEZ)
        members[key] = info
    unpacked = sum(info.file_size for info in members.values())
    if unpacked > max_bytes:
        raise DataError(path, f"at most {max_bytes} bytes unpacked", f"{unpacked} bytes", _RAISE)
    return members


def _read_array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> npt.NDArray[Any]:
    where = f"{path}: {info.filename}"
    npy = np.lib.format
    with archive.open(info) as stream:
        try:
            old = npy.read_magic(stream) == (1, 0)
            read = npy.read_array_header_1_0 if old else npy.read_array_header_2_0
            shape, fortran, dtype = read(stream, max_header_size=_NPZ_HEADER)
        except Exception as error:  # whatever its parser of headers raises on bytes that are none
            got = f"{type(error).__name__}: {error!s:.80}"
            raise DataError(where, "a numpy array", got, _SAVEZ) from None
        if dtype.kind not in "biufU" or dtype.itemsize > 40_000:
            raise DataError(where, "plain numbers or text, no objects", str(dtype), _SAVEZ)
        size = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or not 0 < info.file_size - size < _NPZ_HEADER:
            got = f"{info.file_size} bytes"
            raise DataError(where, f"{size} bytes for shape {shape}", got, _SAVEZ)
        data = bytearray()
        while len(data) < size and (piece := stream.read(min(_CHUNK, size - len(data)))):
            data += piece
        # One more read lets the zip reader compare its checksum, which it does at the end only.
        if len(data) != size or stream.read(1):
            raise DataError(where, f"{size} bytes", f"{len(data)} bytes", _SAVEZ)
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")

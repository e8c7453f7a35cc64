"""Arrays out of a stranger's .npz: plain numbers only, sizes checked in directory and headers before reading."""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from advbayes.datasets.containers import file_size
from advbayes.datasets.errors import DataError, problem

_DIRECTORY_LIMIT = 1 << 16  # bytes: some hundred members, where a data set has at most six
_HEADER_LIMIT = 1 << 12
_CHUNK = 1 << 20
_REMEDY = "Write it with numpy.savez(path, x=..., y=...) from plain numeric arrays."
# What the standard zip reader raises on broken files, besides its own error.
_ZIP_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, struct.error, RuntimeError, OSError, ValueError, OverflowError)
# What numpy writes. A pattern, and no parsing of Python: only plain types of at most 8 bytes, or text, get through.
_HEADER = re.compile(
    r"\{'descr': '([<>|=]?(?:b1|[iu][1248]|f[248]|U[0-9]{1,4}))', 'fortran_order': (True|False), "
    r"'shape': \(([0-9]{1,18}(?:, [0-9]{1,18}){0,7},?|)\),? *\} *\n"
)


def read_npz(path: Path, keys: Collection[str], max_bytes: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz, which may have these keys and no others, at most `max_bytes` unpacked in all.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "a.npz")
    >>> np.savez_compressed(path, x=np.zeros((1000, 1000)))
    >>> read_npz(path, ["x"], max_bytes=10**6)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    advbayes.datasets.errors.DataError: ...: wanted at most 1000000 bytes unpacked, got 8000128 bytes. Raise...
    """
    size = file_size(path)
    if size > max_bytes + _DIRECTORY_LIMIT:
        raise DataError(problem(path, f"at most {max_bytes} bytes", f"{size} bytes", "Raise max_bytes if it is right."))
    try:
        with path.open("rb") as stream:
            _check_directory(path, stream, size)
            with zipfile.ZipFile(stream) as archive:
                members = _members(path, archive, keys, max_bytes)
                return {key: _read_array(path, archive, info) for key, info in members.items()}
    except DataError:
        raise
    except _ZIP_FAULTS as error:
        raise DataError(problem(path, "an intact .npz file", str(error) or type(error).__name__, _REMEDY)) from None


def _check_directory(path: Path, stream: IO[bytes], size: int) -> None:
    """The zip directory must be short: the standard reader takes it into memory whole."""
    stream.seek(max(0, size - (1 << 16) - 22))
    tail = stream.read()
    end = len(tail) - 22 if tail[-22:-18] == b"PK\5\6" and tail[-2:] == b"\0\0" else tail.rfind(b"PK\5\6")
    if end < 0 or len(tail) < end + 22:
        raise DataError(problem(path, "an .npz file (a zip archive)", "something else, or a truncated one", _REMEDY))
    directory = struct.unpack("<I", tail[end + 12 : end + 16])[0]
    if directory > _DIRECTORY_LIMIT or tail[max(0, end - 20) : end][:4] == b"PK\6\7":
        raise DataError(problem(path, f"a directory of at most {_DIRECTORY_LIMIT} bytes", "a larger one", _REMEDY))
    stream.seek(0)


def _members(path: Path, archive: zipfile.ZipFile, keys: Collection[str], max_bytes: int) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        key = info.filename.removesuffix(".npy")
        if key not in keys or not info.filename.endswith(".npy") or key in members:
            got = f"a member {info.filename[:80]!r}{' twice' if key in members else ''}"
            raise DataError(problem(path, f"arrays named {', '.join(keys)}", got, _REMEDY))
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(problem(path, "plain or deflated members", f"{key!r} packed otherwise", _REMEDY))
        members[key] = info
    unpacked = sum(info.file_size for info in members.values())
    if unpacked > max_bytes:
        raise DataError(
            problem(path, f"at most {max_bytes} bytes unpacked", f"{unpacked} bytes", "Raise max_bytes if it is right.")
        )
    return members


def _read_array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> npt.NDArray[Any]:
    where = f"{path}: {info.filename}"
    with archive.open(info) as stream:
        magic = stream.read(8)
        width = {b"\x93NUMPY\1": 2, b"\x93NUMPY\2": 4, b"\x93NUMPY\3": 4}.get(magic[:7], 0)
        stated = stream.read(width)
        length = int.from_bytes(stated, "little")
        if width == 0 or len(stated) != width or length > _HEADER_LIMIT:
            raise DataError(problem(where, "a numpy array", "another header", _REMEDY))
        header = stream.read(length)
        match = _HEADER.fullmatch(header.decode("latin-1"))
        if match is None:
            raise DataError(problem(where, "plain numbers or text, no objects", repr(header[:60]), _REMEDY))
        dtype = np.dtype(match[1])
        shape = tuple(int(part) for part in match[3].split(",") if part.strip())
        wanted = math.prod(shape) * dtype.itemsize
        left = info.file_size - 8 - width - length
        if wanted != left:
            raise DataError(problem(where, f"{wanted} bytes for shape {shape}", f"{left} bytes", _REMEDY))
        data = bytearray()
        while len(data) < wanted and (piece := stream.read(min(_CHUNK, wanted - len(data)))):
            data += piece
        # One more read lets the zip reader compare its checksum, which it does at the end only.
        if len(data) != wanted or stream.read(1):
            raise DataError(problem(where, f"{wanted} bytes", f"{len(data)} bytes", _REMEDY))
    flat = np.frombuffer(data, dtype)
    return flat.reshape(shape, order="F" if match[2] == "True" else "C")

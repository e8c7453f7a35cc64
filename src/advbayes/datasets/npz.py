"""Arrays out of a stranger's .npz: plain numbers only, sizes checked in directory and headers
before reading."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from advbayes.datasets.containers import file_size
from advbayes.datasets.errors import DataError, problem
from advbayes.store.archive import FAULTS, directory_size

_DIRECTORY_LIMIT = 1 << 16  # bytes: some hundred members, where a data set has at most six
_HEADER_LIMIT = 1 << 12
_CHUNK = 1 << 20
_REMEDY = "Write it with numpy.savez(path, x=..., y=...) from plain numeric arrays."


def read_npz(path: Path, keys: Collection[str], max_bytes: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz, of these keys and no others, at most `max_bytes` unpacked.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "a.npz")
    >>> np.savez_compressed(path, x=np.zeros((1000, 1000)))
    >>> read_npz(path, ["x"], max_bytes=10**6)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    advbayes.datasets.errors.DataError: ...: wanted at most 1000000 bytes unpacked, got 8000128 bytes. Raise...
    """  # noqa: E501
    size = file_size(path)
    if size > max_bytes + _DIRECTORY_LIMIT:
        raise DataError(
            problem(
                path,
                f"at most {max_bytes} bytes",
                f"{size} bytes",
                "Raise max_bytes if it is right.",
            )
        )
    try:
        with path.open("rb") as stream:
            num, length = directory_size(stream, size)
            if not num or length > _DIRECTORY_LIMIT:
                wanted = (
                    f"an .npz file (a zip archive) with a directory of at most "
                    f"{_DIRECTORY_LIMIT} bytes"
                )
                raise DataError(
                    problem(path, wanted, f"{length} bytes, or something else", _REMEDY)
                )
            with zipfile.ZipFile(stream) as archive:
                members = _members(path, archive, keys, max_bytes)
                return {key: _read_array(path, archive, info) for key, info in members.items()}
    except DataError:
        raise
    except MemoryError as error:
        got = str(error) or "less"
        raise DataError(
            problem(
                path, f"memory for arrays of a file of {size} bytes", got, "Give a smaller file."
            )
        ) from None
    except FAULTS as error:
        raise DataError(
            problem(path, "an intact .npz file", str(error) or type(error).__name__, _REMEDY)
        ) from None


def _members(
    path: Path, archive: zipfile.ZipFile, keys: Collection[str], max_bytes: int
) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        key = info.filename.removesuffix(".npy")
        if key not in keys or not info.filename.endswith(".npy") or key in members:
            got = f"a member {info.filename[:80]!r}{' twice' if key in members else ''}"
            raise DataError(problem(path, f"arrays named {', '.join(keys)}", got, _REMEDY))
        if info.flag_bits & 1 or info.compress_type not in (
            zipfile.ZIP_STORED,
            zipfile.ZIP_DEFLATED,
        ):
            raise DataError(
                problem(path, "plain or deflated members", f"{key!r} packed otherwise", _REMEDY)
            )
        members[key] = info
    unpacked = sum(info.file_size for info in members.values())
    if unpacked > max_bytes:
        raise DataError(
            problem(
                path,
                f"at most {max_bytes} bytes unpacked",
                f"{unpacked} bytes",
                "Raise max_bytes if it is right.",
            )
        )
    return members


def _read_array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> npt.NDArray[Any]:
    where = f"{path}: {info.filename}"
    with archive.open(info) as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, fortran, dtype = read(stream, max_header_size=_HEADER_LIMIT)
        except Exception as error:  # whatever its parser of headers raises on bytes that are none
            raise DataError(
                problem(where, "a numpy array", f"{type(error).__name__}: {error!s:.80}", _REMEDY)
            ) from None
        if dtype.kind not in "biufU" or dtype.itemsize > 40_000:
            raise DataError(
                problem(where, "plain numbers or text, no objects", str(dtype), _REMEDY)
            )
        wanted = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or not 0 < info.file_size - wanted < _HEADER_LIMIT:
            raise DataError(
                problem(
                    where, f"{wanted} bytes for shape {shape}", f"{info.file_size} bytes", _REMEDY
                )
            )
        data = bytearray()
        while len(data) < wanted and (piece := stream.read(min(_CHUNK, wanted - len(data)))):
            data += piece
        # One more read lets the zip reader compare its checksum, which it does at the end only.
        if len(data) != wanted or stream.read(1):
            raise DataError(problem(where, f"{wanted} bytes", f"{len(data)} bytes", _REMEDY))
    flat = np.frombuffer(data, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")

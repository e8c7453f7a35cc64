"""Arrays out of IDX, CIFAR and .npz files; every size is checked before an array is made."""

from __future__ import annotations

import hashlib
import math
import struct
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from advbayes.datasets.containers import REFETCH, file_size
from advbayes.datasets.errors import DataError
from advbayes.store.archive import FAULTS, directory_size

_CIFAR_RECORD = 1 + 3 * 32 * 32
_NPZ_DIRECTORY = 1 << 16  # bytes: some hundred members, where a data set has at most six
_NPZ_HEADER = 1 << 12
_CHUNK = 1 << 20
_SAVEZ = "Write it with numpy.savez(path, x=..., y=...) from plain numeric arrays."
_RAISE = "Raise max_bytes if it is right."


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

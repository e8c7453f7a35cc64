"""The file formats of the built-in sets, from bytes already read; every size is checked before an
array is made."""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import numpy.typing as npt

from advbayes.datasets.errors import DataError, problem

_REMEDY = "Delete it and fetch it again."
_CIFAR_RECORD = 1 + 3 * 32 * 32


def parse_idx(data: bytes, name: str) -> npt.NDArray[np.uint8]:
    """An IDX file of unsigned bytes: `0 0 8 ndim`, the dimensions as big-endian 32-bit integers,
    the values.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]), "labels")
    array([5, 7], dtype=uint8)
    """
    if len(data) < 4 or data[:3] != b"\0\0\x08" or not 1 <= data[3] <= 4:
        raise DataError(
            problem(
                name,
                "an IDX file of bytes with 1 to 4 dimensions",
                f"{data[:4].hex()} at its start",
                _REMEDY,
            )
        )
    ndim = data[3]
    start = 4 + 4 * ndim
    if len(data) < start:
        raise DataError(
            problem(name, f"an IDX header of {start} bytes", f"{len(data)} bytes", _REMEDY)
        )
    shape = struct.unpack(f">{ndim}I", data[4:start])
    wanted = start + math.prod(shape)
    if len(data) != wanted:
        raise DataError(
            problem(
                name, f"{wanted} bytes, as its header {shape} says", f"{len(data)} bytes", _REMEDY
            )
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def parse_cifar(data: bytes, name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Images (N, 3, 32, 32) and labels (N,) of a CIFAR-10 binary batch: records of 1 label and
    3,072 pixel bytes.

    >>> images, labels = parse_cifar(bytes([3]) + bytes(3072), "batch")
    >>> images.shape, labels
    ((1, 3, 32, 32), array([3], dtype=uint8))
    """
    if not data or len(data) % _CIFAR_RECORD:
        raise DataError(
            problem(name, f"records of {_CIFAR_RECORD} bytes", f"{len(data)} bytes", _REMEDY)
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, _CIFAR_RECORD)
    if int(records[:, 0].max()) > 9:
        raise DataError(
            problem(name, "labels from 0 to 9", f"a label of {int(records[:, 0].max())}", _REMEDY)
        )
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def values_sha256(values: npt.NDArray[np.float64], decimals: int) -> str:
    """SHA-256 of a table's numbers to so many decimals, however a file spells them.

    >>> len({values_sha256(np.array([[value]]), 2) for value in (1.0, 1.001, 1.1)})
    2
    """
    # Half up, with a margin for numbers that binary fractions cannot hold.
    whole = np.floor(values * 10.0**decimals + 0.5 + 1e-6).astype("<i8")
    return hashlib.sha256(repr(whole.shape).encode() + whole.tobytes()).hexdigest()

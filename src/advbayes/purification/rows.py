"""Large tables, row after row: held in memory, or in a .npy file of which one block at a time is mapped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype("<f4"), torch.float64: np.dtype("<f8")}


class Rows(Protocol):
    """A table of shape (G, N, V), read in blocks."""

    @property
    def shape(self) -> tuple[int, int, int]: ...

    def block(self, groups: slice, rows: slice) -> Tensor: ...  # (g, n, V)

    def pick(
        self,
        group: int,
        index: Tensor,  # any shape
        columns: slice = slice(None),
    ) -> Tensor: ...  # (*index.shape, V or as many as `columns`)

    def write(self, group: int, start: int, part: Tensor) -> None: ...  # (n, V)


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """In memory.

    >>> table = MemoryRows(torch.zeros(1, 4, 2))
    >>> table.write(0, 1, torch.ones(2, 2))
    >>> table.block(slice(0, 1), slice(0, 2))
    tensor([[[0., 0.],
             [1., 1.]]])
    """

    data: Tensor  # (G, N, V)

    @property
    def shape(self) -> tuple[int, int, int]:
        groups, num, width = self.data.shape
        return groups, num, width

    def block(self, groups: slice, rows: slice) -> Tensor:
        return self.data[groups, rows]

    def pick(self, group: int, index: Tensor, columns: slice = slice(None)) -> Tensor:
        return self.data[group, :, columns].index_select(0, index.reshape(-1)).view(*index.shape, -1)

    def write(self, group: int, start: int, part: Tensor) -> None:
        self.data[group, start : start + len(part)] = part


@dataclass(frozen=True, eq=False)
class DiskRows:
    """In a .npy file. A block is mapped when it is read and unmapped when it is dropped, so that what is resident stays small.

    >>> import tempfile
    >>> table = DiskRows.create(Path(tempfile.mkdtemp()) / "table.npy", (1, 4, 2), torch.float32)
    >>> table.write(0, 1, torch.ones(2, 2))
    >>> table.block(slice(0, 1), slice(0, 2))
    tensor([[[0., 0.],
             [1., 1.]]])
    """

    path: Path
    shape: tuple[int, int, int]
    dtype: torch.dtype
    offset: int

    @classmethod
    def create(cls, path: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> DiskRows:
        # Made sparse and full-sized by numpy itself, so that any reader of .npy files can open it.
        made = np.lib.format.open_memmap(path, mode="w+", dtype=_NUMPY[dtype], shape=shape)
        offset = int(made.offset)
        del made
        return cls(path, shape, dtype, offset)

    @classmethod
    def open(cls, path: Path) -> DiskRows:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        kinds = {kind: dtype for dtype, kind in _NUMPY.items()}
        if not isinstance(found, np.memmap) or found.ndim != 3 or found.dtype not in kinds or not found.flags.c_contiguous:
            raise ValueError(f"{path} must hold a float table of three axes, got {found.dtype} of shape {found.shape}")
        groups, num, width = (int(size) for size in found.shape)
        return cls(path, (groups, num, width), kinds[found.dtype], int(found.offset))

    def _map(self, group: int, start: int, num: int, mode: str = "c") -> Tensor:  # (num, V)
        _, total, width = self.shape
        kind = _NUMPY[self.dtype]
        at = self.offset + (group * total + start) * width * kind.itemsize
        # "c" maps privately: torch wants a writable array, and nothing written ever reaches the file.
        return torch.from_numpy(np.memmap(self.path, kind, mode, at, (num, width)))  # type: ignore[call-overload]

    def block(self, groups: slice, rows: slice) -> Tensor:
        first, last, _ = groups.indices(self.shape[0])
        start, stop, _ = rows.indices(self.shape[1])
        if stop - start == self.shape[1]:
            return self._map(first, 0, (last - first) * self.shape[1]).view(last - first, self.shape[1], self.shape[2])
        if last - first == 1:
            return self._map(first, start, stop - start).unsqueeze(0)
        return torch.stack([self._map(group, start, stop - start) for group in range(first, last)])

    def pick(self, group: int, index: Tensor, columns: slice = slice(None)) -> Tensor:
        wanted, places = torch.unique(index, return_inverse=True)
        rows = torch.stack([self._map(group, int(row), 1)[0, columns] for row in wanted])
        return rows[places.reshape(-1)].view(*index.shape, -1)

    def write(self, group: int, start: int, part: Tensor) -> None:
        self._map(group, start, len(part), "r+").copy_(part)


def num_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    """What a table of this shape takes.

    >>> num_bytes((1, 60_000, 784), torch.float32)
    188160000
    """
    return math.prod(shape) * dtype.itemsize


def spans(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Cuts 0..total into pieces of at most `size`.

    >>> list(spans(5, 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    for start in range(0, total, size):
        yield start, min(total, start + size)

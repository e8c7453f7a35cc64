"""Large tables, row after row: in memory, or in a file of which one block at a time is mapped."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.float64: np.dtype("<f8"),
}


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """A table of shape (G, N, V), read in blocks: in memory."""

    data: Tensor  # (G, N, V)

    @property
    def shape(self) -> tuple[int, int, int]:
        groups, num, width = self.data.shape
        return groups, num, width

    def block(self, groups: slice, rows: slice) -> Tensor:  # (g, n, V)
        return self.data[groups, rows]

    def pick(self, group: int, index: Tensor, columns: slice = slice(None)) -> Tensor:
        """The columns of rows in an index of any shape, (*index.shape, V)."""
        return _at(self.data[group, :, columns], index)

    def write(self, group: int, start: int, part: Tensor) -> None:  # (n, V)
        self.data[group, start : start + len(part)] = part


@dataclass(frozen=True, eq=False)
class DiskRows:
    """The same in a file: a block is mapped while it is read, so that little stays resident."""

    path: Path
    shape: tuple[int, int, int]
    dtype: torch.dtype
    offset: int = 0

    @classmethod
    def create(cls, path: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> DiskRows:
        """Zeros whose space is taken: writing to a map on a full disk ends the process."""
        size = num_bytes(shape, dtype)
        with path.open("wb") as file:
            file.truncate(size)
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
        return cls(path, shape, dtype)

    def _place(self, group: int, start: int) -> int:
        return self.offset + (group * self.shape[1] + start) * self.shape[2] * self.dtype.itemsize

    def _map(self, group: int, start: int, num: int) -> Tensor:  # (num, V)
        at, shape = self._place(group, start), (num, self.shape[2])
        # "c" maps privately: torch wants a writable array, and nothing written ever reaches the
        # file.
        return torch.from_numpy(np.memmap(self.path, _NUMPY[self.dtype], "c", at, shape))

    def block(self, groups: slice, rows: slice) -> Tensor:
        first, last, _ = groups.indices(self.shape[0])
        start, stop, _ = rows.indices(self.shape[1])
        if stop - start == self.shape[1]:
            return self._map(first, 0, (last - first) * self.shape[1]).view(
                last - first, self.shape[1], self.shape[2]
            )
        if last - first == 1:
            return self._map(first, start, stop - start).unsqueeze(0)
        return torch.stack([self._map(group, start, stop - start) for group in range(first, last)])

    def pick(self, group: int, index: Tensor, columns: slice = slice(None)) -> Tensor:
        # Mapped whole, but only the pages that are touched become resident.
        return _at(self._map(group, 0, self.shape[1])[:, columns], index)

    def write(self, group: int, start: int, part: Tensor) -> None:
        with self.path.open("r+b") as file:
            file.seek(self._place(group, start))
            file.write(part.to(self.dtype).contiguous().numpy().data)


Rows: TypeAlias = MemoryRows | DiskRows


def _at(table: Tensor, index: Tensor) -> Tensor:  # (N, V), any shape -> (*index.shape, V)
    return table.index_select(0, index.reshape(-1)).view(*index.shape, table.shape[1])


def num_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    """What a table of this shape takes."""
    return math.prod(shape) * dtype.itemsize


def spans(total: int, size: int) -> Iterator[slice]:
    """Cuts 0..total into pieces of at most `size`."""
    for start in range(0, total, size):
        yield slice(start, min(total, start + size))

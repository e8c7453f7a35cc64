"""Bundles with tables too large for memory: written and checked in pieces, read in place.

The folder is a bundle like any other (`parts.py`), a table being a safetensors part with the one
tensor `table`. `read_bundle` reads it too, if it fits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import documents
from .documents import JSON
from .errors import StoreError
from .files import read_at
from .parts import Content, Manifest, Part, hashed_part, one_version, parsed, verified

_DTYPES = {torch.float32: "F32", torch.float64: "F64"}
_NAME = "table"
_MAX_TABLE_HEADER = 4096
_MAX_PART = 1 << 28  # bytes of a part that is no table


def streamed(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    blocks: Iterable[Tensor],  # the rows in order, some at a time
) -> Content:
    """A table for `write_bundle`: the bytes of a safetensors file with the one tensor.

    >>> import tempfile
    >>> from advbayes.store import write_bundle
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = streamed((1, 2, 3), torch.float32, [torch.zeros(1, 3), torch.ones(1, 3)])
    ...     write_bundle(f"{folder}/a", {}, {"note": {"sigma": 0.5}}, {"rows": rows})
    ...     opened = read_tables(f"{folder}/a")
    ...     opened.tables["rows"].shape, opened.texts
    ((1, 2, 3), {'note': {'sigma': 0.5}})
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    kind = {"dtype": _DTYPES[dtype], "shape": list(shape)}
    header = documents.encode({_NAME: {"data_offsets": [0, size], **kind}}, _NAME)
    header += b" " * (-len(header) % 8)

    def pieces() -> Iterator[bytes]:
        yield len(header).to_bytes(8, "little") + header
        for block in blocks:
            yield block.detach().to("cpu", dtype).contiguous().numpy().tobytes()

    return Content(8 + len(header) + size, pieces())


@dataclass(frozen=True)
class SavedTable:
    """A table in a file, from a byte on."""

    file: Path
    offset: int
    shape: tuple[int, int, int]
    dtype: torch.dtype


@dataclass(frozen=True)
class OpenedTables:
    """A bundle of tables whose every byte was checked."""

    tables: dict[str, SavedTable]
    parts: dict[str, dict[str, Tensor]]
    texts: dict[str, JSON]


def read_tables(path: str | os.PathLike[str]) -> OpenedTables:
    """Tables, tensors and documents of a folder, all hashed; tables stay on the disk."""
    folder = Path(path)
    if folder.is_file():
        raise StoreError(folder, "a folder with a bundle of tables", "a file")

    def read(manifest: Manifest, _: object) -> OpenedTables:
        tables: dict[str, SavedTable] = {}
        contents: dict[str, bytes] = {}
        for part in manifest.parts:
            file = folder / part.file
            if (table := _table(file, part)) is not None:
                tables[part.name.rpartition(".")[0]] = table
            elif part.size > _MAX_PART:
                raise StoreError(file, f"at most {_MAX_PART} bytes", f"{part.size}")
            else:
                contents[part.name] = verified(folder, part)
        return OpenedTables(tables, *parsed(folder, contents))

    return one_version(folder, read)[1]


def _table(file: Path, part: Part) -> SavedTable | None:
    """The table in a part, all of it hashed; None for a part of another kind."""
    if not part.name.endswith(".safetensors") or part.size < 8:
        return None
    with hashed_part(file, part) as descriptor:
        length = int.from_bytes(read_at(file, descriptor, 0, 8), "little")
        if not 2 <= length <= min(_MAX_TABLE_HEADER, part.size - 8):
            return None
        header = read_at(file, descriptor, 8, length)
    fields = documents.decode(header, os.fspath(file), limit=_MAX_TABLE_HEADER)
    match fields:
        case {"table": {"dtype": ("F32" | "F64") as kind, "shape": shape}, **rest} if not rest:
            dtype = torch.float32 if kind == "F32" else torch.float64
        case _:
            return None
    match shape:
        case [int(groups), int(rows), int(width)] if min(groups, rows, width) > 0:
            if 8 + length + groups * rows * width * dtype.itemsize == part.size:
                return SavedTable(file, 8 + length, (groups, rows, width), dtype)
    raise StoreError(file, "a table of three axes that fills its file", f"{shape!r:.80}")

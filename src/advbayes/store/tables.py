"""Bundles with tables too large for memory: written and checked by pieces, read where they lie.

The folder is a bundle like any other (`parts.py`): a sealed manifest and parts named by their
content, a table being a safetensors part with the one tensor `table`. `read_bundle` reads it too,
if it fits.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import documents, manifest, tensors
from .documents import JSON
from .errors import MissingError, StoreError
from .files import (
    check_digest,
    create,
    discard,
    opened,
    pieces_at,
    read_at,
    read_bytes,
    room,
    staged,
    sweep,
    sync_folder,
    write_all,
)
from .lock import Lock
from .manifest import SCHEMA, Manifest, Part, versions
from .parts import _MANIFEST, _WAIT, _own_files, _put, read_manifest

_DTYPES = {torch.float32: "F32", torch.float64: "F64"}
_NAME = "table"
_MAX_TABLE_HEADER = 4096
_MAX_PART = 1 << 28  # bytes of a part that is no table


@dataclass(frozen=True)
class StreamedTable:
    """What is to be saved: `blocks` gives the rows in order, some at a time."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    blocks: Callable[[], Iterator[Tensor]]


@dataclass(frozen=True)
class SavedTable:
    """A table in a file, from a byte on."""

    file: Path
    offset: int
    shape: tuple[int, int, int]
    dtype: torch.dtype


def write_tables(
    path: str | os.PathLike[str],
    tables: Mapping[str, StreamedTable],
    parts: Mapping[str, Mapping[str, Tensor]],
    texts: Mapping[str, object],
) -> None:
    """Save tables, tensors and documents as a folder, atomically and durably, over an earlier one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = StreamedTable(
    ...         (1, 2, 3), torch.float32, lambda: iter([torch.zeros(1, 3), torch.ones(1, 3)])
    ...     )
    ...     write_tables(f"{folder}/a", {"rows": rows}, {}, {"note": {"sigma": 0.5}})
    ...     opened = read_tables(f"{folder}/a")
    ...     opened.tables["rows"].shape, opened.texts
    ((1, 2, 3), {'note': {'sigma': 0.5}})
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_dir():
        raise StoreError(target, wanted="a folder to write", got="a file")
    small = {
        f"{name}.safetensors": tensors.encode(values, f"{target}:{name}")
        for name, values in parts.items()
    }
    small |= {
        f"{name}.json": documents.encode(text, f"{target}:{name}") for name, text in texts.items()
    }
    needed = sum(map(len, small.values())) + sum(_size(table) for table in tables.values())
    sweep(target)
    with room(target, needed), staged(target, folder=True) as temporary:
        described = [
            _stream(temporary, f"{name}.safetensors", table, target)
            for name, table in tables.items()
        ]
        for name, data in small.items():
            described.append(Part(name, hashlib.sha256(data).hexdigest(), len(data)))
            create(temporary / described[-1].file, data)
        seal = manifest.encode(Manifest(SCHEMA, versions(), tuple(described)), target / _MANIFEST)
        create(temporary / _MANIFEST, seal)
        sync_folder(temporary)
        try:
            os.rename(temporary, target)
            sync_folder(target.parent)
            return
        except (
            OSError
        ) as error:  # something is there: its parts stay until the manifest is replaced
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        with Lock(target, wait=_WAIT):
            before = _own_files(target)
            for part in described:
                os.replace(temporary / part.file, target / part.file)
            # the parts' names reach the disk before the manifest that needs them
            sync_folder(target)
            _put(target / _MANIFEST, seal)
            sync_folder(target)
            for name in before - {part.file for part in described} - {_MANIFEST}:
                discard(target / name)


def _header(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    size = torch.Size(shape).numel() * dtype.itemsize
    fields = {_NAME: {"data_offsets": [0, size], "dtype": _DTYPES[dtype], "shape": list(shape)}}
    data = documents.encode(fields, _NAME)
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


def _size(table: StreamedTable) -> int:
    return (
        len(_header(table.shape, table.dtype))
        + torch.Size(table.shape).numel() * table.dtype.itemsize
    )


def _stream(folder: Path, name: str, table: StreamedTable, target: Path) -> Part:
    """Write a table under the name of its content, block by block; its space is taken first."""
    size, digest, written = _size(table), hashlib.sha256(), 0
    path = folder / name
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        reserve(descriptor, size)
        for data in _encoded(table):
            digest.update(data)
            write_all(descriptor, data)
            written += len(data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if written != size:
        raise StoreError(f"{target}:{name}", wanted=f"{size} bytes of rows", got=f"{written}")
    part = Part(name, digest.hexdigest(), size)
    os.rename(path, folder / part.file)
    return part


def _encoded(table: StreamedTable) -> Iterator[bytes]:
    yield _header(table.shape, table.dtype)
    for block in table.blocks():
        yield block.detach().to("cpu", table.dtype).contiguous().numpy().tobytes()


def reserve(descriptor: int, size: int) -> None:
    """Take a file's space on the disk: a full one says so now, not by a signal later."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:  # some file systems cannot
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


@dataclass(frozen=True)
class OpenedTables:
    """A bundle of tables whose every byte was checked."""

    tables: dict[str, SavedTable]
    parts: dict[str, dict[str, Tensor]]
    texts: dict[str, JSON]


def read_tables(path: str | os.PathLike[str]) -> OpenedTables:
    """What `write_tables` saved: every hash is checked, piece by piece; tables stay where they are.

    >>> read_tables("absent")
    Traceback (most recent call last):
    ...
    advbayes.store.errors.MissingError: absent: wanted a bundle of tables, got nothing (no such file)
    """  # noqa: E501
    folder = Path(path)
    if not folder.exists():
        raise MissingError(folder, wanted="a bundle of tables")
    if not folder.is_dir():
        raise StoreError(folder, wanted="a folder with a bundle of tables", got="a file")
    while True:
        listed = read_manifest(folder)
        try:
            return _read(folder, listed)
        except (
            MissingError
        ):  # replaced while we read it? then the manifest is another one by now: read that
            if read_manifest(folder) == listed:
                raise


def _read(folder: Path, listed: Manifest) -> OpenedTables:
    tables: dict[str, SavedTable] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    texts: dict[str, JSON] = {}
    for part in listed.parts:
        file, (stem, _, suffix) = folder / part.file, part.name.rpartition(".")
        saved = _checked(file, part)
        if saved is not None:
            tables[stem] = saved
            continue
        data = read_bytes(file, limit=_MAX_PART)
        check_digest(file, part.sha256, hashlib.sha256(data).hexdigest())
        if suffix == "json":
            texts[stem] = documents.decode(data, os.fspath(file))
        else:
            parts[stem] = tensors.decode(data, os.fspath(file))
    return OpenedTables(tables, parts, texts)


def _checked(file: Path, part: Part) -> SavedTable | None:
    """The table in a part, all of it hashed; None for a part of another kind, which is hashed when
    it is read."""
    with opened(file) as (descriptor, size):
        if size != part.size:
            raise StoreError(file, wanted=f"{part.size} bytes", got=f"{size}")
        digest = hashlib.sha256()
        for piece in pieces_at(file, descriptor, 0, size):
            digest.update(piece)
        check_digest(file, part.sha256, digest.hexdigest())
        if not part.name.endswith(".safetensors") or size < 8:
            return None
        length = int.from_bytes(read_at(file, descriptor, 0, 8), "little")
        if not 2 <= length <= min(_MAX_TABLE_HEADER, size - 8):
            return None
        fields = documents.decode(
            read_at(file, descriptor, 8, length), os.fspath(file), limit=_MAX_TABLE_HEADER
        )
    match fields:
        case {"table": {"dtype": ("F32" | "F64") as kind, "shape": list(shape)}, **rest} if (
            not rest
        ):
            dtype = torch.float32 if kind == "F32" else torch.float64
            match shape:
                case [int(groups), int(rows), int(width)] if min(groups, rows, width) > 0:
                    if 8 + length + groups * rows * width * dtype.itemsize == size:
                        return SavedTable(file, 8 + length, (groups, rows, width), dtype)
            raise StoreError(
                file, wanted="a table of three axes that fills its file", got=f"{shape!r:.80}"
            )
    return None

"""Bundles: named tensors and documents under one manifest, as a folder or as one file.

A folder holds `manifest.json` and parts named by their content (`posterior.3f0c….safetensors`). A
new version is written beside it, then adds its parts, then replaces the manifest in one rename,
then drops the parts that nothing names any more: the old bundle or the new one, at every instant,
with no more than POSIX `rename` promises. The manifest has the SHA-256 of each part and ends in its
own.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch
from torch import Tensor

from . import archive, documents, files, tensors
from .documents import JSON
from .errors import MissingError, StoreError
from .files import Lock

SUFFIX = ".advbayes"
FORMAT = "advbayes-bundle"
SCHEMA = 1
MAX_BYTES = 1 << 33
MAX_PARTS = 256
_MANIFEST = "manifest.json"
_MAX_MANIFEST = 1 << 18
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_PART = re.compile(rf"({_NAME.pattern})\.([0-9a-f]{{16}})\.(safetensors|json)")
_LARGE = 1 << 26  # parts above this are hashed once before they are held in memory
_WAIT = 60.0  # seconds to wait for another writer of the same folder
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """What the manifest says of a part."""

    name: str  # "posterior.safetensors"
    sha256: str
    size: int

    @property
    def file(self) -> str:
        """The file that holds it: a changed content is another file."""
        stem, _, suffix = self.name.rpartition(".")
        return f"{stem}.{self.sha256[:16]}.{suffix}"


@dataclass(frozen=True)
class Manifest:
    """Schema, the versions of the libraries that wrote the bundle, and its parts."""

    schema: int
    versions: dict[str, str]
    parts: tuple[Part, ...]


def versions() -> dict[str, str]:
    """The versions that a manifest records."""
    try:
        installed = version("advbayes")
    except PackageNotFoundError:  # used from a source tree
        installed = "unknown"
    return {
        "advbayes": installed,
        "python": platform.python_version(),
        "safetensors": safetensors.__version__,
        "torch": str(torch.__version__),
    }


def encode_manifest(manifest: Manifest, file: Path) -> bytes:
    """The bytes of a manifest; its last field is the SHA-256 of all bytes before it."""
    parts = {part.name: {"bytes": part.size, "sha256": part.sha256} for part in manifest.parts}
    body = {
        "format": FORMAT,
        "parts": parts,
        "schema": manifest.schema,
        "versions": manifest.versions,
    }
    return documents.seal(documents.encode(body, os.fspath(file)))


def decode_manifest(data: bytes, file: Path) -> Manifest:
    """Check the seal, then parse."""
    if (body := documents.unseal(data, file)) is None:
        wanted = "a manifest that ends in its own SHA-256"
        raise StoreError(file, wanted, "another end (damaged or altered)")
    fields: Any = documents.decode(body, os.fspath(file), limit=_MAX_MANIFEST)
    match fields:
        case {"format": format, "schema": _} if format == FORMAT:
            schema = fields["schema"]
        case _:
            raise StoreError(file, f"format {FORMAT} and a schema", "something else")
    if type(schema) is not int or schema != SCHEMA:
        newer = type(schema) is int and schema > SCHEMA
        hint = " (written by a newer advbayes: update it)" if newer else ""
        raise StoreError(file, f"schema {SCHEMA}", f"{schema!r:.80}{hint}")
    match fields:
        case {"parts": dict(parts), "versions": dict(libraries)} if len(fields) == 4:
            if len(parts) > MAX_PARTS:
                raise StoreError(file, f"at most {MAX_PARTS} parts", f"{len(parts)}")
            described = tuple(_decode_part(name, entry, file) for name, entry in parts.items())
            return Manifest(1, {key: str(value) for key, value in libraries.items()}, described)
    others = sorted(fields.keys() - {"format", "schema"})
    raise StoreError(file, "the fields parts and versions", f"{others!r:.200}")


def _decode_part(name: str, entry: JSON, file: Path) -> Part:
    match entry:
        case {"bytes": size, "sha256": str(digest), **rest} if not rest and type(size) is int:
            part = Part(name, digest, size)
            hexadecimal = re.fullmatch(r"[0-9a-f]{64}", digest)
            if size >= 0 and hexadecimal and _PART.fullmatch(part.file):
                return part
    wanted = "NAME.safetensors or NAME.json with bytes and sha256"
    raise StoreError(file, wanted, f"{name!r:.80}: {entry!r:.80}")


@dataclass(frozen=True)
class Content:
    """What goes into a part: its size, and its bytes in pieces."""

    size: int
    pieces: Iterable[bytes]


def write_bundle(
    path: str | os.PathLike[str],
    parts: Mapping[str, Mapping[str, Tensor]],
    texts: Mapping[str, object],
    more: Mapping[str, Content] | None = None,  # safetensors too large for memory; folders only
) -> None:
    """Save tensors (`NAME.safetensors`) and documents (`NAME.json`), atomically and durably.

    One file when `path` ends in `.advbayes`, else a folder; an earlier bundle there is replaced.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tensors, texts = {"theta": {"mean": torch.zeros(2)}}, {"config": {"epochs": 5}}
    ...     write_bundle(f"{folder}/a.advbayes", tensors, texts)
    ...     read_bundle(f"{folder}/a.advbayes")
    ({'theta': {'mean': tensor([0., 0.])}}, {'config': {'epochs': 5}})
    """
    target = Path(os.path.realpath(path))
    for name in (*parts, *texts, *(more or {})):
        if not _NAME.fullmatch(str(name)) or name == "manifest":
            wanted = "part names of letters, digits, _ and - (not manifest)"
            raise StoreError(target, wanted, f"{name!r:.80}")
    encoded = {
        f"{name}.safetensors": tensors.encode(values, f"{target}:{name}")
        for name, values in parts.items()
    }
    encoded |= {f"{name}.json": documents.encode(texts[name], f"{target}:{name}") for name in texts}
    _check_values(target, encoded)
    contents = {f"{name}.safetensors": content for name, content in (more or {}).items()}
    contents |= {name: Content(len(data), (data,)) for name, data in encoded.items()}
    if len({name.lower() for name in contents}) < len(contents) or len(contents) > MAX_PARTS:
        wanted = f"at most {MAX_PARTS} parts that differ by more than case"
        raise StoreError(target, wanted, f"{sorted(contents)!r:.200}")
    files.sweep(target)
    # each part also has an entry of some 200 bytes in the manifest
    with files.room(target, sum(content.size + 256 for content in contents.values())):
        (_write_file if target.suffix == SUFFIX else _write_folder)(target, contents)


def _write_file(target: Path, contents: Mapping[str, Content]) -> None:
    if target.is_dir():
        raise StoreError(target, f"a file to write (the name ends in {SUFFIX})", "a folder")
    described: list[Part] = []
    members = {}
    for name, content in contents.items():
        data = b"".join(content.pieces)
        described.append(Part(name, hashlib.sha256(data).hexdigest(), len(data)))
        members[described[-1].file] = data
    members = {_MANIFEST: _sealed(target, described), **members}
    files.write_bytes(target, archive.pack(members, os.fspath(target)))


def _write_folder(target: Path, contents: Mapping[str, Content]) -> None:
    if target.exists() and not target.is_dir():
        raise StoreError(target, f"a folder to write (or a name that ends in {SUFFIX})", "a file")
    with files.staged(target, folder=True) as temporary:
        described = [_stage(temporary, target, *each) for each in contents.items()]
        files.create(temporary / _MANIFEST, [_sealed(target, described)])
        files.sync_folder(temporary)
        try:
            os.rename(temporary, target)
            files.sync_folder(target.parent)
            return
        except OSError as error:  # something is there: its parts stay until its manifest goes
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        with Lock(target, wait=_WAIT):
            before = _bundle_files(target)
            for part in described:
                os.replace(temporary / part.file, target / part.file)
            # the parts' names reach the disk before the manifest that needs them
            files.sync_folder(target)
            os.replace(temporary / _MANIFEST, target / _MANIFEST)
            files.sync_folder(target)
            for name in before - {part.file for part in described} - {_MANIFEST}:
                files.discard(target / name)


def _stage(folder: Path, target: Path, name: str, content: Content) -> Part:
    """Write a part, piece by piece, and name it by what was written."""
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes]:
        for piece in content.pieces:
            digest.update(piece)
            yield piece

    written = files.create(folder / name, hashed(), reserve=content.size)
    if written != content.size:
        raise StoreError(f"{target}:{name}", f"{content.size} bytes of rows", f"{written}")
    part = Part(name, digest.hexdigest(), written)
    os.rename(folder / name, folder / part.file)
    return part


def _sealed(target: Path, described: list[Part]) -> bytes:
    return encode_manifest(Manifest(SCHEMA, versions(), tuple(described)), target / _MANIFEST)


def _bundle_files(target: Path) -> set[str]:
    """The files of the bundle in a folder and of writers that died in it; others are refused."""
    names = {entry.name for entry in os.scandir(target) if entry.name != ".lock"}
    if names and _MANIFEST not in names:
        raise StoreError(target, "an empty folder or a bundle", f"{len(names)} other entries")
    if names:
        read_manifest(target)
    leftover = re.compile(rf"\.({re.escape(_MANIFEST)}|{_PART.pattern})\.[0-9a-z-]+\.tmp")
    return {name for name in names if _PART.fullmatch(name) or leftover.fullmatch(name)}


def read_bundle(
    path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES
) -> tuple[dict[str, dict[str, Tensor]], dict[str, JSON]]:
    """Load what `write_bundle` saved: every hash is checked before anything is parsed.

    >>> read_bundle("absent")
    Traceback (most recent call last):
    ...
    advbayes.store.errors.MissingError: absent: wanted a bundle, got nothing (no such file)
    """
    return read_all(path, max_bytes=max_bytes)[1:]


def read_all(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_BYTES,
    known: Set[str] | None = None,  # the parts that may be there; absent: any
) -> tuple[Manifest, dict[str, dict[str, Tensor]], dict[str, JSON]]:
    """Manifest, tensors and documents of one version of a bundle; see `read_bundle`."""
    place = Path(path)

    def read(manifest: Manifest, members: dict[str, bytes] | None) -> dict[str, bytes]:
        if known is not None and (unknown := {part.name for part in manifest.parts} - known):
            raise StoreError(path, "the parts of a model", f"a part {min(unknown)}")
        if (total := sum(part.size for part in manifest.parts)) > max_bytes:
            raise StoreError(path, f"at most {max_bytes} bytes", f"{total}")
        return {part.name: verified(place, part, members) for part in manifest.parts}

    try:
        manifest, contents = one_version(place, read, max_bytes)
        _check_values(place, contents)
        return manifest, *parsed(place, contents)
    except MemoryError:
        there = place.iterdir() if place.is_dir() else [place]
        needed = sum(file.stat().st_size for file in there)
        wanted = f"some {2 * needed} bytes of memory to load {needed} bytes"
        raise StoreError(path, wanted, "less") from None


def parsed(
    path: Path, contents: Mapping[str, bytes]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, JSON]]:
    """Tensors and documents from the bytes of their parts."""
    loaded: dict[str, dict[str, Tensor]] = {}
    texts: dict[str, JSON] = {}
    for name, data in contents.items():
        stem, _, suffix = name.rpartition(".")
        if suffix == "json":
            texts[stem] = documents.decode(data, f"{path}:{name}")
        else:
            loaded[stem] = tensors.decode(data, f"{path}:{name}")
    return loaded, texts


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """What is in a bundle, without reading it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bundle(f"{folder}/a", {}, {"config": {}})
    ...     [part.name for part in read_manifest(f"{folder}/a").parts]
    ['config.json']
    """
    return _opened(Path(path), MAX_BYTES)[0]


def one_version(
    path: Path, read: Callable[[Manifest, dict[str, bytes] | None], T], max_bytes: int = MAX_BYTES
) -> tuple[Manifest, T]:
    """The manifest and what `read` makes of it; once more if the bundle was replaced meanwhile."""
    while True:
        manifest, members = _opened(path, max_bytes)
        try:
            return manifest, read(manifest, members)
        except MissingError:  # a new version has another manifest, without the part
            if members is not None or read_manifest(path) == manifest:
                raise


def _opened(path: Path, max_bytes: int) -> tuple[Manifest, dict[str, bytes] | None]:
    """The manifest of a bundle, and the other members where it is one file."""
    if not path.exists():
        raise MissingError(path, "a bundle")
    file = path / _MANIFEST
    if path.is_dir():
        if not file.exists():
            raise MissingError(file, "the manifest of a bundle")
        return decode_manifest(files.read_bytes(file, limit=_MAX_MANIFEST), file), None
    members = archive.unpack(Path(os.path.realpath(path)), limit=max_bytes)
    manifest = decode_manifest(members.pop(_MANIFEST, b""), file)
    if unlisted := members.keys() - {part.file for part in manifest.parts}:
        raise StoreError(path, "no member that the manifest does not name", min(unlisted)[:80])
    return manifest, members


def verified(path: Path, part: Part, members: dict[str, bytes] | None = None) -> bytes:
    """A part's bytes, of the size and the SHA-256 that the manifest says."""
    file = path / part.file
    if members is None:
        if part.size > _LARGE:  # a false giant costs time, not memory
            with hashed_part(file, part):
                pass
        data = files.read_bytes(file, limit=part.size)
    elif part.file in members:
        data = members[part.file]
    else:
        raise MissingError(file, "a part that the manifest names")
    _check_size(file, part, len(data))
    files.check_digest(file, part.sha256, hashlib.sha256(data).hexdigest())
    return data


@contextmanager
def hashed_part(file: Path, part: Part) -> Iterator[int]:
    """The open descriptor of a part whose every byte has been hashed, piece by piece."""
    with files.opened(file) as (descriptor, size):
        _check_size(file, part, size)
        digest = hashlib.sha256()
        for piece in files.pieces_at(file, descriptor, 0, size):
            digest.update(piece)
        files.check_digest(file, part.sha256, digest.hexdigest())
        yield descriptor


def _check_size(file: Path, part: Part, size: int) -> None:
    if size != part.size:
        raise StoreError(file, f"{part.size} bytes", f"{size}")


def _check_values(path: Path, contents: Mapping[str, bytes]) -> None:
    texts = (data for name, data in contents.items() if name.endswith(".json"))
    documents.check_values(os.fspath(path), *texts)

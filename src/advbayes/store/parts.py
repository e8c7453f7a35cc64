"""Bundles: named tensors and documents under one manifest, as a folder or as one file.

A folder holds `manifest.json` and parts named by their content (`posterior.3f0c….safetensors`). A
new version adds its parts, then replaces the manifest in one rename, then drops the parts that
nothing names any more: the old bundle or the new one, at every instant, with no more than POSIX
    `rename` promises.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Mapping, Set
from pathlib import Path

from torch import Tensor

from . import archive, documents, tensors
from . import manifest as manifests
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
)
from .lock import Lock
from .manifest import MAX_PARTS, NAME, PART, SCHEMA, Manifest, Part, versions

SUFFIX = ".advbayes"
MAX_BYTES = 1 << 33
_MANIFEST = "manifest.json"
_LARGE = 1 << 26  # parts above this are hashed once before they are held in memory
_WAIT = 60.0  # seconds to wait for another writer of the same folder


def write_bundle(
    path: str | os.PathLike[str],
    parts: Mapping[str, Mapping[str, Tensor]],
    texts: Mapping[str, object],
) -> None:
    """Save tensors (`NAME.safetensors`) and documents (`NAME.json`), atomically and durably.

    One file when `path` ends in `.advbayes`, else a folder; an earlier bundle there is replaced.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bundle(
    ...         f"{folder}/a.advbayes",
    ...         {"theta": {"mean": torch.zeros(2)}},
    ...         {"config": {"epochs": 5}},
    ...     )
    ...     read_bundle(f"{folder}/a.advbayes")
    ({'theta': {'mean': tensor([0., 0.])}}, {'config': {'epochs': 5}})
    """
    target = Path(os.path.realpath(path))
    contents: dict[str, bytes] = {}
    for name, values in parts.items():
        contents[f"{_plain(target, name)}.safetensors"] = tensors.encode(values, f"{target}:{name}")
    for name, document in texts.items():
        contents[f"{_plain(target, name)}.json"] = documents.encode(document, f"{target}:{name}")
    if len({name.lower() for name in contents}) < len(contents) or len(contents) > MAX_PARTS:
        wanted = f"at most {MAX_PARTS} parts that differ by more than case"
        raise StoreError(target, wanted=wanted, got=f"{sorted(contents)!r:.200}")
    documents.check_values(
        os.fspath(target), *(data for name, data in contents.items() if name.endswith(".json"))
    )
    described = {
        name: Part(name, hashlib.sha256(data).hexdigest(), len(data))
        for name, data in contents.items()
    }
    files = {described[name].file: data for name, data in contents.items()}
    manifest = manifests.encode(
        Manifest(SCHEMA, versions(), tuple(described.values())), target / _MANIFEST
    )
    sweep(target)
    with room(target, sum(map(len, files.values())) + len(manifest)):
        if target.suffix == SUFFIX:
            _write_file(target, manifest, files)
        else:
            _write_folder(target, manifest, files)


def read_bundle(
    path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES
) -> tuple[dict[str, dict[str, Tensor]], dict[str, JSON]]:
    """Load what `write_bundle` saved: every hash is checked before anything is parsed, and what was
    hashed is parsed.

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
    try:
        return _parsed(path, *_read(Path(path), max_bytes, known))
    except MemoryError:
        needed = sum(
            file.stat().st_size
            for file in (Path(path).iterdir() if Path(path).is_dir() else [Path(path)])
        )
        raise StoreError(
            path, wanted=f"some {2 * needed} bytes of memory to load {needed} bytes", got="less"
        ) from None


def _parsed(
    path: str | os.PathLike[str], manifest: Manifest, contents: dict[str, bytes]
) -> tuple[Manifest, dict[str, dict[str, Tensor]], dict[str, JSON]]:
    documents.check_values(
        os.fspath(path), *(data for name, data in contents.items() if name.endswith(".json"))
    )
    loaded: dict[str, dict[str, Tensor]] = {}
    texts: dict[str, JSON] = {}
    for name, data in contents.items():
        stem, _, suffix = name.rpartition(".")
        if suffix == "json":
            texts[stem] = documents.decode(data, f"{os.fspath(path)}:{name}")
        else:
            loaded[stem] = tensors.decode(data, f"{os.fspath(path)}:{name}")
    return manifest, loaded, texts


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """What is in a bundle, without reading it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bundle(f"{folder}/a", {}, {"config": {}})
    ...     [part.name for part in read_manifest(f"{folder}/a").parts]
    ['config.json']
    """
    return _opened(Path(path), MAX_BYTES)[0]


def _plain(target: Path, name: str) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == "manifest":
        raise StoreError(
            target,
            wanted="part names of letters, digits, _ and - (not manifest)",
            got=f"{name!r:.80}",
        )
    return name


def _write_file(target: Path, manifest: bytes, files: Mapping[str, bytes]) -> None:
    if target.is_dir():
        raise StoreError(
            target, wanted=f"a file to write (the name ends in {SUFFIX})", got="a folder"
        )
    with staged(target) as temporary:
        create(temporary, archive.pack({_MANIFEST: manifest, **files}, os.fspath(target)))
        os.replace(temporary, target)
        sync_folder(target.parent)


def _write_folder(target: Path, manifest: bytes, files: Mapping[str, bytes]) -> None:
    if not target.exists():
        with staged(target, folder=True) as temporary:
            for name, data in {**files, _MANIFEST: manifest}.items():
                create(temporary / name, data)
            sync_folder(temporary)
            try:
                os.rename(temporary, target)
                sync_folder(target.parent)
                return
            except OSError as error:  # another process was quicker: replace what it wrote
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
    if not target.is_dir():
        raise StoreError(
            target, wanted=f"a folder to write (or a name that ends in {SUFFIX})", got="a file"
        )
    with Lock(target, wait=_WAIT):
        kept = _own_files(target)
        for name, data in files.items():
            _put(target / name, data)
        sync_folder(target)  # the parts' names reach the disk before the manifest that needs them
        _put(target / _MANIFEST, manifest)
        sync_folder(target)
        for name in kept - {*files, _MANIFEST}:
            discard(target / name)


def _put(path: Path, data: bytes) -> None:
    with staged(path) as temporary:
        create(temporary, data)
        os.replace(temporary, path)


def _own_files(target: Path) -> set[str]:
    """The files of the bundle in a folder and of writers that died in it; a folder of something
    else is refused."""
    names = {entry.name for entry in os.scandir(target) if entry.name != ".lock"}
    if names and _MANIFEST not in names:
        raise StoreError(
            target, wanted="an empty folder or a bundle", got=f"{len(names)} other entries"
        )
    if names:
        read_manifest(target)
    left = re.compile(rf"\.({re.escape(_MANIFEST)}|{PART.pattern})\.[0-9a-z-]+\.tmp")
    return {name for name in names if PART.fullmatch(name) or left.fullmatch(name)}


def _read(path: Path, max_bytes: int, known: Set[str] | None) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest and the verified bytes of every part, all of one version of the bundle."""
    while True:
        manifest, members = _opened(path, max_bytes)
        if known is not None and (unknown := {part.name for part in manifest.parts} - known):
            raise StoreError(path, wanted="the parts of a model", got=f"a part {min(unknown)}")
        if (total := sum(part.size for part in manifest.parts)) > max_bytes:
            raise StoreError(path, wanted=f"at most {max_bytes} bytes", got=f"{total}")
        try:
            return manifest, {part.name: _verified(path, part, members) for part in manifest.parts}
        except (
            MissingError
        ):  # replaced while we read it? then the manifest is another one by now: read that
            if members is not None or read_manifest(path) == manifest:
                raise


def _opened(path: Path, max_bytes: int) -> tuple[Manifest, dict[str, bytes] | None]:
    """The manifest of a bundle, and the other members where it is one file."""
    if not path.exists():
        raise MissingError(path, wanted="a bundle")
    if path.is_dir():
        if not (path / _MANIFEST).exists():
            raise MissingError(path / _MANIFEST, wanted="the manifest of a bundle")
        return manifests.decode(
            read_bytes(path / _MANIFEST, limit=manifests.MAX_BYTES), path / _MANIFEST
        ), None
    members = archive.unpack(Path(os.path.realpath(path)), limit=max_bytes)
    manifest = manifests.decode(members.pop(_MANIFEST, b""), path / _MANIFEST)
    if unlisted := members.keys() - {part.file for part in manifest.parts}:
        raise StoreError(
            path, wanted="no member that the manifest does not name", got=min(unlisted)[:80]
        )
    return manifest, members


def _verified(path: Path, part: Part, members: dict[str, bytes] | None) -> bytes:
    """A part's bytes, of the size and the SHA-256 that the manifest says."""
    file = path / part.file
    if members is not None:
        if part.file not in members:
            raise MissingError(file, wanted="a part that the manifest names")
        data = members[part.file]
        _check_size(file, part, len(data))
    else:
        with opened(file) as (descriptor, size):
            _check_size(file, part, size)
            if size > _LARGE:  # a false giant costs time, not memory
                digest = hashlib.sha256()
                for piece in pieces_at(file, descriptor, 0, size):
                    digest.update(piece)
                check_digest(file, part.sha256, digest.hexdigest())
            data = read_at(file, descriptor, 0, size)
    check_digest(file, part.sha256, hashlib.sha256(data).hexdigest())
    return data


def _check_size(file: Path, part: Part, size: int) -> None:
    if size != part.size:
        raise StoreError(file, wanted=f"{part.size} bytes", got=f"{size}")

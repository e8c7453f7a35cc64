"""The manifest of a bundle: schema, versions, and a SHA-256 for each part, sealed with its own."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors
import torch

from . import documents
from .documents import JSON
from .errors import StoreError

FORMAT = "advbayes-bundle"
SCHEMA = 1
MAX_BYTES = 1 << 18
MAX_PARTS = 256
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
PART = re.compile(rf"({NAME.pattern})\.([0-9a-f]{{16}})\.(safetensors|json)")


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


def encode(manifest: Manifest, file: Path) -> bytes:
    """The bytes of a manifest; its last field is the SHA-256 of all bytes before it."""
    parts = {part.name: {"bytes": part.size, "sha256": part.sha256} for part in manifest.parts}
    body = {
        "format": FORMAT,
        "parts": parts,
        "schema": manifest.schema,
        "versions": manifest.versions,
    }
    return documents.seal(documents.encode(body, os.fspath(file)))


def decode(data: bytes, file: Path) -> Manifest:
    """Check the seal, then parse."""
    if (body := documents.unseal(data, file)) is None:
        wanted = "a manifest that ends in its own SHA-256"
        raise StoreError(file, wanted, "another end (damaged or altered)")
    fields: Any = documents.decode(body, os.fspath(file), limit=MAX_BYTES)
    match fields:
        case {"format": format, "schema": schema, **rest} if format == FORMAT:
            if type(schema) is int and schema in _READERS:
                return _READERS[schema](rest, file)
            newer = type(schema) is int and schema > SCHEMA
            hint = " (written by a newer advbayes: update it)" if newer else ""
            wanted = f"schema {', '.join(map(str, _READERS))}"
            raise StoreError(file, wanted, f"{schema!r:.80}{hint}")
    raise StoreError(file, f"format {FORMAT} and a schema", "something else")


def _manifest_1(fields: Mapping[Any, Any], file: Path) -> Manifest:
    match fields:
        case {"parts": dict(parts), "versions": dict(libraries), **rest} if not rest:
            if len(parts) > MAX_PARTS:
                raise StoreError(file, f"at most {MAX_PARTS} parts", f"{len(parts)}")
            described = tuple(_part_1(name, entry, file) for name, entry in parts.items())
            return Manifest(1, {key: str(value) for key, value in libraries.items()}, described)
    raise StoreError(file, "the fields parts and versions", f"{sorted(fields)!r:.200}")


def _part_1(name: str, entry: JSON, file: Path) -> Part:
    match entry:
        case {"bytes": size, "sha256": str(digest), **rest} if not rest and type(size) is int:
            part = Part(name, digest, size)
            hexadecimal = re.fullmatch(r"[0-9a-f]{64}", digest)
            if size >= 0 and hexadecimal and PART.fullmatch(part.file):
                return part
    wanted = "NAME.safetensors or NAME.json with bytes and sha256"
    raise StoreError(file, wanted, f"{name!r:.80}: {entry!r:.80}")


# One reader for each schema that was ever written.
_READERS = {1: _manifest_1}

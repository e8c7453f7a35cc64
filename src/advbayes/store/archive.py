"""One file for a bundle: a zip archive of stored members in the one form that this module writes.

Whatever differs from what `pack` makes of the same members is refused, so no byte of the file is
free. Any unzip program can open it.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from .errors import StoreError, refusing
from .files import opened

MAX_MEMBERS = 257
MAX_FILE = (1 << 31) - 1  # without the 64-bit extension; a folder has no such limit
_PIECE = 1 << 20
# What the standard reader raises on broken files.
_OF_ZIP = (zipfile.BadZipFile, zlib.error, struct.error)
FAULTS = (*_OF_ZIP, EOFError, RuntimeError, OSError, ValueError, OverflowError)


def pack(members: Mapping[str, bytes], name: str) -> bytes:
    """The archive.

    >>> pack({"a.json": b"{}"}, "x")[:4]
    b'PK\\x03\\x04'
    """
    buffer = io.BytesIO()
    try:
        with zipfile.ZipFile(buffer, "w", allowZip64=False) as archive:
            for member, content in members.items():
                info = zipfile.ZipInfo(member)  # 1 January 1980, stored
                info.create_system, info.external_attr = 3, 0o100644 << 16  # a file, made on Unix
                archive.writestr(info, content)
    except zipfile.LargeZipFile:
        wanted = f"at most {MAX_FILE} bytes in one file (save to a folder)"
        raise StoreError(name, wanted, "more") from None
    return buffer.getvalue()


def unpack(path: Path, *, limit: int) -> dict[str, bytes]:
    """The members of an archive, every byte of which is as `pack` writes it."""
    with opened(path) as (descriptor, size), os.fdopen(os.dup(descriptor), "rb") as stream:
        if size > min(limit, MAX_FILE):
            raise StoreError(path, f"a bundle of at most {min(limit, MAX_FILE)} bytes", f"{size}")
        if stream.read(4) not in (b"PK\3\4", b""):
            raise StoreError(path, "a bundle that save wrote", "a file of another kind")
        num, length = directory_size(stream, size)
        if not 0 < num <= MAX_MEMBERS or length > 256 * num:
            wanted = f"an archive as save writes it, of at most {MAX_MEMBERS} members"
            got = f"{num} in {length} bytes, or another end (a truncated file)"
            raise StoreError(path, wanted, got)
        with refusing(path, "an intact archive", FAULTS), zipfile.ZipFile(stream) as archive:
            infos = archive.infolist()
            stored = all(info.compress_type == zipfile.ZIP_STORED for info in infos)
            if not stored or sum(info.file_size for info in infos) > size:
                raise StoreError(path, f"stored members of at most {size} bytes", "others")
            members = {info.filename: archive.read(info) for info in infos}
            packed = memoryview(pack(members, os.fspath(path)))
        stream.seek(0)
        for start in range(0, max(size, len(packed)), _PIECE):
            if stream.read(_PIECE) != packed[start : start + _PIECE]:
                got = f"another byte after {start}"
                raise StoreError(path, "an archive as save writes it", got)
    return members


def directory_size(stream: IO[bytes], size: int) -> tuple[int, int]:
    """Members and bytes of a zip directory, by its last record; zeros if it has none or a comment.

    The standard reader takes the directory into memory whole, so this comes first.
    """
    stream.seek(max(0, size - 42))
    tail = stream.read(42)
    ends = tail[-22:-18] == b"PK\5\6" and tail[-2:] == b"\0\0"
    if not ends or tail[:4] == b"PK\6\7":
        return 0, 0
    num, length = struct.unpack("<HI", tail[-12:-6])
    return num, length

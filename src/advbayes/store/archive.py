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

from .errors import StoreError
from .files import opened

MAX_MEMBERS = 257
MAX_FILE = (1 << 31) - 1  # without the 64-bit extension; a folder has no such limit
_PIECE = 1 << 20
# What the standard reader raises on broken files, besides its own errors.
FAULTS = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    struct.error,
    RuntimeError,
    OSError,
    ValueError,
    OverflowError,
)


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
                # a regular file, made on Unix
                info.create_system, info.external_attr = (3, 0o100644 << 16)
                archive.writestr(info, content)
    except zipfile.LargeZipFile:
        wanted = f"at most {MAX_FILE} bytes in one file (save to a folder)"
        raise StoreError(name, wanted, "more") from None
    return buffer.getvalue()


def unpack(path: Path, *, limit: int) -> dict[str, bytes]:
    """The members of an archive, every byte of which is as `pack` writes it.

    >>> unpack(Path("absent.advbayes"), limit=100)
    Traceback (most recent call last):
    ...
    advbayes.store.errors.MissingError: absent.advbayes: wanted a file, got nothing (no such file)
    """
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
        try:
            with zipfile.ZipFile(stream) as archive:
                if (total := sum(info.file_size for info in archive.infolist())) > size:
                    raise StoreError(path, f"at most {size} bytes in its members", f"{total}")
                members = {
                    info.filename: archive.read(_plain(path, info, size))
                    for info in archive.infolist()
                }
        except StoreError:
            raise
        except FAULTS as error:
            wanted = "an intact archive"
            raise StoreError(path, wanted, str(error) or type(error).__name__) from None
        packed = memoryview(pack(members, os.fspath(path)))
        stream.seek(0)
        for start in range(0, max(size, len(packed)), _PIECE):
            if stream.read(_PIECE) != packed[start : start + _PIECE]:
                wanted = "an archive as save writes it"
                raise StoreError(path, wanted, f"another byte after {start}")
    return members


def directory_size(stream: IO[bytes], size: int) -> tuple[int, int]:
    """Members and bytes of a zip archive's directory, from its last record; zeros where it has none
    or a comment.

    The standard reader takes the directory into memory whole, so this comes first.
    """
    stream.seek(max(0, size - 42))
    tail = stream.read(42)
    ends = tail[-22:-18] == b"PK\5\6" and tail[-2:] == b"\0\0"
    if not ends or tail[:4] == b"PK\6\7":
        return 0, 0
    num, length = struct.unpack("<HI", tail[-12:-6])
    return num, length


def _plain(path: Path, info: zipfile.ZipInfo, size: int) -> zipfile.ZipInfo:
    """A member as `pack` makes them; what a hostile archive would try is named."""
    name = info.orig_filename
    if info.compress_type != zipfile.ZIP_STORED or not info.compress_size == info.file_size <= size:
        raise StoreError(path, "stored members", f"{name:.80} compressed or too large")
    if (info.external_attr >> 16) & 0o170000 == 0o120000:
        raise StoreError(path, "regular files", f"a symbolic link {name:.80}")
    plain = name.isascii() and name.isprintable() and not {"/", "\\"} & set(name)
    if not plain or name[:1] in ("", "."):
        raise StoreError(path, "plain member names", f"{name!r:.80}")
    return info

"""One file for a bundle: a zip archive of stored members in the one form that this module writes.

Every byte of the file is either a member's content or determined by names, sizes and contents, so whatever differs from
what `pack` would have written is refused. Any unzip program can open it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import StoreError
from .files import opened, pieces_at, read_at

MAX_MEMBERS = 257
MAX_FILE = 2**32 - 1  # without the 64-bit extension; a folder has no such limit
_MAX_NAME = 200
_VERSION, _MADE_BY, _DATE = 20, (3 << 8) | 20, 0x21  # stored members; made on Unix; 1 January 1980
_MODE = 0o100644 << 16  # a regular file
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")


def pack(members: Mapping[str, bytes], name: str) -> list[bytes]:
    """The archive, in pieces.

    >>> b"".join(pack({"a.json": b"{}"}, "x"))[:4]
    b'PK\\x03\\x04'
    """
    pieces: list[bytes] = []
    directory: list[bytes] = []
    offset = 0
    for member, content in members.items():
        local, central = _headers(member, len(content), zlib.crc32(content), offset)
        pieces += [local, content]
        directory.append(central)
        offset += len(local) + len(content)
        if offset > MAX_FILE:
            raise StoreError(name, wanted=f"at most {MAX_FILE} bytes in one file (save to a folder)", got="more")
    return [*pieces, *directory, _end(len(directory), sum(map(len, directory)), offset)]


@dataclass(frozen=True)
class Archive:
    """The members of an open archive; their contents are read piece by piece."""

    path: Path
    descriptor: int
    members: dict[str, tuple[int, int, int]]  # name -> offset of the content, size, CRC-32

    def sizes(self) -> dict[str, int]:
        """Each member's size in bytes."""
        return {name: size for name, (_, size, _) in self.members.items()}

    def pieces(self, name: str) -> Iterator[bytes]:
        """A member's content."""
        offset, size, checksum = self.members[name]
        found = 0
        for piece in pieces_at(self.path, self.descriptor, offset, size):
            found = zlib.crc32(piece, found)
            yield piece
        if found != checksum:
            raise StoreError(f"{self.path}:{name}", wanted=f"CRC-32 {checksum:08x}", got=f"{found:08x}")


@contextmanager
def unpacked(path: Path, *, limit: int) -> Iterator[Archive]:
    """An archive whose every byte outside the contents is as `pack` writes it.

    >>> with unpacked(Path("absent.advbayes"), limit=100):
    ...     pass
    Traceback (most recent call last):
    ...
    advbayes.store.errors.MissingError: absent.advbayes: wanted a file, got nothing (no such file)
    """
    with opened(path) as (descriptor, size):
        if not _END.size <= size <= min(limit, MAX_FILE):
            raise StoreError(path, wanted=f"a bundle of {_END.size} to {min(limit, MAX_FILE)} bytes", got=f"{size}")
        tail = read_at(path, descriptor, size - _END.size, _END.size)
        number, length, offset = _END.unpack(tail)[4:7]
        if tail != _end(number, length, offset) or offset + length + _END.size != size:
            raise StoreError(path, wanted="an archive as save writes it", got="another end (or a truncated file)")
        if not 0 < number <= MAX_MEMBERS or length > number * (_CENTRAL.size + _MAX_NAME):
            wanted = f"an archive of at most {MAX_MEMBERS} members with short names"
            raise StoreError(path, wanted=wanted, got=f"{number} in {length} bytes")
        members: dict[str, tuple[int, int, int]] = {}
        position = 0
        for name, stored, checksum, entry in _entries(path, read_at(path, descriptor, offset, length), number):
            if name in members:
                raise StoreError(path, wanted="each member once", got=f"{name} twice")
            local, central = _headers(name, stored, checksum, position)
            content = position + len(local)
            if content + stored > offset:
                raise StoreError(path, wanted="members one after the other", got=f"an overlap at {name}")
            if entry != central or read_at(path, descriptor, position, len(local)) != local:
                raise StoreError(f"{path}:{name}", wanted="a plain stored member", got="other header fields")
            members[name] = (content, stored, checksum)
            position = content + stored
        if position != offset:
            raise StoreError(path, wanted="nothing between the members", got=f"{offset - position} bytes more")
        yield Archive(path, descriptor, members)


def _entries(path: Path, directory: bytes, number: int) -> list[tuple[str, int, int, bytes]]:
    """Name, size, CRC-32 and bytes of each entry; what a hostile archive would try is named."""
    entries: list[tuple[str, int, int, bytes]] = []
    position = 0
    for _ in range(number):
        if position + _CENTRAL.size > len(directory):
            raise StoreError(path, wanted=f"{number} members", got=f"{len(entries)}")
        fields = _CENTRAL.unpack_from(directory, position)
        method, checksum, stored, size, name_length = fields[4], *fields[7:11]
        stop = position + _CENTRAL.size + name_length
        entry = directory[position:stop]
        name = entry[_CENTRAL.size :]
        text = name.decode("ascii", "replace")
        if method != 0 or stored != size:
            raise StoreError(path, wanted="stored members", got=f"{text:.80} compressed (method {method})")
        if (fields[15] >> 16) & 0o170000 == 0o120000:
            raise StoreError(path, wanted="regular files", got=f"a symbolic link {text:.80}")
        if not name.isascii() or not name or b"/" in name or b"\\" in name or b"\0" in name or name[:1] == b".":
            raise StoreError(path, wanted="plain member names", got=f"{text!r:.80}")
        entries.append((text, size, checksum, entry))
        position = stop
    if position != len(directory):
        raise StoreError(path, wanted=f"{number} members", got="a longer directory")
    return entries


def _headers(member: str, size: int, checksum: int, offset: int) -> tuple[bytes, bytes]:
    name = member.encode("ascii")
    shared = (0, 0, 0, _DATE, checksum, size, size, len(name), 0)  # flags, method (stored), time, date, ...
    local = _LOCAL.pack(0x04034B50, _VERSION, *shared)
    central = _CENTRAL.pack(0x02014B50, _MADE_BY, _VERSION, *shared, 0, 0, 0, _MODE, offset)
    return local + name, central + name


def _end(number: int, length: int, offset: int) -> bytes:
    return _END.pack(0x06054B50, 0, 0, number, number, length, offset, 0)

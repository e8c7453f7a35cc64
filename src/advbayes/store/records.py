"""A log of records, one JSON line each, that survives a kill or power cut in mid-line.

Each line carries a check over itself and the line before, so that a lost or altered line is
noticed, and any JSON-lines reader can still read the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from advbayes.checks import count

from .documents import JSON, check, decode
from .errors import StoreError
from .files import read_bytes, room, sync_folder, write_all

MAX_BYTES = 1 << 30
_KEY = "check"
_BLOCK = 512  # every disk writes multiples of this
_LINE = re.compile(rb'(\{.*), "check": "([0-9a-f]{16})"\}')


class _End(NamedTuple):
    """Where the next record goes, and the check that it continues."""

    offset: int = 0
    check: bytes = b""


@dataclass
class RecordLog:
    """An append-only file of records; one writer (hold the folder's `Lock`), any number of readers.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = RecordLog(f"{folder}/history.jsonl")
    ...     log.append({"step": 1, "loss": 0.5})
    ...     RecordLog(f"{folder}/history.jsonl").read()
    [{'step': 1, 'loss': 0.5}]
    """

    path: str | os.PathLike[str]
    _end: _End | None = field(default=None, init=False, repr=False, compare=False)

    def append(self, *records: Mapping[str, object]) -> None:
        """Add records, all or none, and flush them to the disk."""
        end = self._end or self.keep(None)
        lines, check = _encode(records, end.check, os.fspath(self.path))
        path = Path(os.path.realpath(self.path))
        with room(path, len(lines)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                try:
                    os.lseek(descriptor, end.offset, os.SEEK_SET)
                    write_all(descriptor, lines)
                    os.fsync(descriptor)
                except OSError:
                    # the disk is full: drop the torn line at once
                    os.ftruncate(descriptor, end.offset)
                    raise
            finally:
                os.close(descriptor)
            if end.offset == 0:
                sync_folder(path.parent)
        self._end = _End(end.offset + len(lines), check)

    def read(self) -> list[dict[str, JSON]]:
        """All whole records, without a torn last line; any other damage is refused."""
        return _scan(Path(self.path))[0]

    def keep(self, num: int | None) -> _End:
        """Cut the file back to its first `num` records (None: to its whole ones)."""
        records, ends = _scan(Path(self.path))
        wanted = len(records) if num is None else count("num", num, low=0)
        if wanted > len(records):
            raise StoreError(self.path, f"{wanted} records", f"{len(records)}")
        end = ends[wanted]
        if Path(self.path).exists() and Path(self.path).stat().st_size != end.offset:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.ftruncate(descriptor, end.offset)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._end = end
        return end


def _encode(
    records: Iterable[Mapping[str, object]], previous: bytes, name: str
) -> tuple[bytes, bytes]:
    lines = []
    for record in records:
        body = dict(record)
        if not body or _KEY in body:
            raise StoreError(name, f"a record with fields, none of them {_KEY!r}", f"{body!r:.80}")
        check(body, name)
        text = json.dumps(body, allow_nan=False).encode("ascii")[:-1]
        previous = _digest(previous, text)
        lines.append(b'%s, "check": "%s"}\n' % (text, previous))
    return b"".join(lines), previous


def _scan(path: Path) -> tuple[list[dict[str, JSON]], list[_End]]:
    """The whole records and the ends before, between and after them."""
    data = read_bytes(path, limit=MAX_BYTES) if path.exists() else b""
    records: list[dict[str, JSON]] = []
    ends = [_End()]
    while ends[-1].offset < len(data):
        start, previous = ends[-1].offset, ends[-1].check
        stop = data.find(b"\n", start)
        line = data[start : stop if stop >= 0 else len(data)]
        match = _LINE.fullmatch(line)
        if match and stop >= 0 and _digest(previous, match[1]) == match[2]:
            record: Any = decode(match[1] + b"}", f"{path}:{len(records) + 1}")  # begins with {
            records.append(record)
            ends.append(_End(stop + 1, match[2]))
        elif _torn(data, start, stop):
            break
        else:
            wanted = "a record that continues the line before"
            got = "a damaged, altered or misplaced one"
            raise StoreError(f"{path}:{len(records) + 1}", wanted, got)
    return records, ends


def _torn(data: bytes, start: int, stop: int) -> bool:
    """Whether an append never reached the disk whole: no end, or blocks of zeros."""
    if stop < 0:
        return True
    hole = data.find(b"\0", start, stop)
    if hole < 0:
        return False
    end = len(data) - len(data[hole:].lstrip(b"\0"))
    return (hole == start or hole % _BLOCK == 0) and (end == len(data) or end % _BLOCK == 0)


def _digest(previous: bytes, text: bytes) -> bytes:
    return hashlib.sha256(previous + text).hexdigest()[:16].encode()

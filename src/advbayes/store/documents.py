"""Strict JSON: one way to write a document, and nothing read that could not have been written.

A document in a file of its own ends in its own SHA-256, so that no number in it changes unnoticed.
A log of records has one JSON line for each and survives a kill or power cut in mid-line: each line
carries a check over itself and the line before, so that a lost or altered one is noticed, and any
JSON-lines reader can still read the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from advbayes.checks import count

from .errors import StoreError
from .files import check_digest, read_bytes, room, sync_folder, write_all, write_bytes, writing

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

MAX_BYTES = 2 << 20  # a document is for settings and verdicts, arrays go into tensors
MAX_LOG_BYTES = 1 << 30
MAX_DEPTH = 32
MAX_VALUES = 1 << 17  # a value takes up to some 300 bytes of memory, two of the file's
_MAX_INT = 2**63
_SURROGATE = re.compile("[\ud800-\udfff]")
_SEAL = b',\n "sha256": "%s"\n}\n'
_SEALED = re.compile(_SEAL % b"([0-9a-f]{64})")
SEAL_BYTES = len(_SEAL % (64 * b"0"))
_KEY = "check"
_BLOCK = 512  # every disk writes multiples of this
_LINE = re.compile(rb'(\{.*), "check": "([0-9a-f]{16})"\}')


def encode(document: object, name: str = "document") -> bytes:
    """A document as sorted, indented JSON; what JSON cannot hold exactly is refused and named.

    >>> encode({"b": 1, "a": (0.1, None)})
    b'{\\n "a": [\\n  0.1,\\n  null\\n ],\\n "b": 1\\n}\\n'
    >>> encode({"audit": {"accuracy": float("nan")}})
    Traceback (most recent call last):
    ...
    advbayes.store.errors.StoreError: document.audit.accuracy: wanted a finite number, got nan
    """
    check(document, name)
    data = json.dumps(document, allow_nan=False, sort_keys=True, indent=1).encode("ascii") + b"\n"
    if len(data) > MAX_BYTES:
        raise StoreError(name, f"a document of at most {MAX_BYTES} bytes", f"{len(data)}")
    check_values(name, data)
    return data


def decode(data: bytes, name: str = "document", *, limit: int = MAX_BYTES) -> JSON:
    """Parse a document: UTF-8, no NaN, no key twice, bounded in size and depth.

    >>> decode(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ...
    advbayes.store.errors.StoreError: document: wanted each key once, got 'a' twice
    """
    if len(data) > limit:
        raise StoreError(name, f"a document of at most {limit} bytes", f"{len(data)}")
    check_values(name, data)

    def unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
        if len(result := dict(pairs)) < len(pairs):
            [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise StoreError(name, "each key once", f"{twice[:80]!r} twice")
        return result

    def constant(text: str) -> JSON:
        raise StoreError(name, "finite numbers", text)

    try:
        document = json.loads(
            data.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant
        )
    except StoreError:
        raise
    except RecursionError:
        raise StoreError(name, f"JSON at most {MAX_DEPTH} deep", "a deeper one") from None
    except ValueError as error:  # bad UTF-8, bad JSON, numbers of thousands of digits
        raise StoreError(name, "JSON", f"{type(error).__name__}: {str(error)[:120]}") from None
    check(document, name)
    return document  # type: ignore[no-any-return]


def check_values(name: str, *documents: bytes) -> None:
    """Refuse documents of more than `MAX_VALUES` values in all, before parsing them."""
    num = sum(data.count(sign) for data in documents for sign in (b",", b"[", b"{"))
    if num > MAX_VALUES:
        raise StoreError(name, f"at most {MAX_VALUES} values", f"{num}")


def check(value: object, name: str, *, depth: int = 0) -> None:
    """Refuse what JSON cannot hold exactly, naming the place."""
    if depth > MAX_DEPTH:
        raise StoreError(name, f"JSON at most {MAX_DEPTH} deep", "a deeper one")
    match value:
        case None | bool():
            pass
        case int():
            if not -_MAX_INT <= value < _MAX_INT:
                raise StoreError(name, "an integer of 64 bits", f"one of {value.bit_length()} bits")
        case float():
            if not math.isfinite(value):
                raise StoreError(name, "a finite number", f"{value}")
        case str():
            if _SURROGATE.search(value):
                raise StoreError(name, "valid Unicode", "a lone surrogate")
        case list() | tuple():
            for index, child in enumerate(value):
                check(child, f"{name}[{index}]", depth=depth + 1)
        case dict():
            for key, child in value.items():
                if not isinstance(key, str):
                    raise StoreError(name, "text keys", f"{key!r:.80}")
                check(key, name, depth=depth)
                check(child, f"{name}.{key[:40]}", depth=depth + 1)
        case _:
            raise StoreError(name, "text, numbers, lists and dictionaries", type(value).__name__)


def seal(data: bytes) -> bytes:
    """The bytes of a dictionary with one more field at the end: the SHA-256 of all before it.

    >>> seal(encode({"a": 1}))[-12:]
    b'cf2f1785"\\n}\\n'
    """
    body = data.removesuffix(b"\n}\n")
    return body + _SEAL % hashlib.sha256(body).hexdigest().encode()


def unseal(data: bytes, file: str | os.PathLike[str]) -> bytes | None:
    """Inverse of `seal`, refusing a wrong SHA-256; None if there is none."""
    if not (tail := _SEALED.fullmatch(data[-SEAL_BYTES:])):
        return None
    body = data[:-SEAL_BYTES]
    check_digest(file, tail[1].decode(), hashlib.sha256(body).hexdigest())
    return body + b"\n}\n"


def write_document(path: str | os.PathLike[str], document: object) -> None:
    """Save one JSON file, atomically and durably; a dictionary is sealed with its SHA-256.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_document(f"{folder}/config.json", {"epochs": 5})
    ...     read_document(f"{folder}/config.json")
    {'epochs': 5}
    """
    data = encode(document, Path(path).name)
    match document:
        case {"sha256": _}:
            raise StoreError(path, "other names than sha256", "sha256")
        case dict() if document:
            data = seal(data)
    write_bytes(path, data)


def read_document(path: str | os.PathLike[str]) -> JSON:
    """Load one JSON file, strictly; see `write_document`. One without a SHA-256 is read as it is.

    >>> read_document("absent.json")
    Traceback (most recent call last):
    ...
    advbayes.store.errors.MissingError: absent.json: wanted a file, got nothing (no such file)
    """
    data = read_bytes(Path(path), limit=MAX_BYTES + SEAL_BYTES)
    body = unseal(data, path)
    match document := decode(data if body is None else body, os.fspath(path)):
        case {"sha256": _}:  # it had one
            wanted = "a document that ends in its own SHA-256"
            raise StoreError(path, wanted, "another end (damaged or altered)")
    return document


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
        last, pieces = end.check, []
        for record in map(dict, records):
            if not record or _KEY in record:
                wanted = f"a record with fields, none of them {_KEY!r}"
                raise StoreError(self.path, wanted, f"{record!r:.80}")
            check(record, os.fspath(self.path))
            text = json.dumps(record, allow_nan=False).encode("ascii")[:-1]
            last = _digest(last, text)
            pieces.append(b'%s, "check": "%s"}\n' % (text, last))
        lines = b"".join(pieces)
        path = Path(os.path.realpath(self.path))
        with room(path, len(lines)):
            with writing(path) as descriptor:
                try:
                    os.lseek(descriptor, end.offset, os.SEEK_SET)
                    write_all(descriptor, lines)
                    os.fsync(descriptor)
                except OSError:  # the disk is full: drop the torn line at once
                    os.ftruncate(descriptor, end.offset)
                    raise
            if end.offset == 0:
                sync_folder(path.parent)
        self._end = _End(end.offset + len(lines), last)

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
        path = Path(self.path)
        if path.exists() and path.stat().st_size != end.offset:
            with writing(path) as descriptor:
                os.ftruncate(descriptor, end.offset)
                os.fsync(descriptor)
        self._end = end
        return end


def _scan(path: Path) -> tuple[list[dict[str, JSON]], list[_End]]:
    """The whole records and the ends before, between and after them."""
    data = read_bytes(path, limit=MAX_LOG_BYTES) if path.exists() else b""
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

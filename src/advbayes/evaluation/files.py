"""An evaluation on disk: config.json, records.jsonl (one line per example) and one safetensors file
per block of arrays."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import advbayes
from advbayes.checks import InputError
from advbayes.evaluation.contents import UNKNOWN, tensor_hash
from advbayes.evaluation.result import Cell
from advbayes.likelihoods import predicts_classes
from advbayes.store import (
    RecordLog,
    StoreError,
    read_document,
    versions,
    write_bytes,
    write_document,
)
from advbayes.store.files import read_bytes
from advbayes.store.tensors import decode, encode

MAX_ARRAY_BYTES = 1 << 32
data_hash = tensor_hash  # of (x, y)


@dataclass(frozen=True)
class Block:
    """One batch of one predictor under one attack at one radius: written and resumed whole.

    >>> Block(3, Cell("MIX", "PGD", 2.0), 0, 256).file
    'blocks/00003.safetensors'
    """

    number: int
    cell: Cell
    start: int
    stop: int
    array: str = ""  # SHA-256 of its file as the records name it; older folders do not

    @property
    def rows(self) -> slice:
        """The examples that it holds."""
        return slice(self.start, self.stop)

    @property
    def job(self) -> tuple[str, float | None]:
        """The attack and its radius."""
        return self.cell.attack, self.cell.eps

    @property
    def key(self) -> str:
        """What its randomness is keyed by, beside seed and first row."""
        return f"{self.cell.predictor}/{self.cell.attack}/{self.cell.eps!r}"

    @property
    def file(self) -> str:
        """Where its adversarial array is kept."""
        return f"blocks/{self.number:05d}.safetensors"


@lru_cache(maxsize=1)
def code_hash() -> str:
    """SHA-256 of the library's own source files: which code made these numbers.

    >>> len(code_hash())
    64
    """
    root = Path(advbayes.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Folder:
    """The folder of one evaluation.

    >>> Folder(Path("run")).log.path.name
    'records.jsonl'
    """

    path: Path

    @cached_property
    def log(self) -> RecordLog:
        """The records."""
        return RecordLog(self.path / "records.jsonl")

    def saved(self) -> list[tuple[Block, list[dict[str, Any]]]]:
        """The blocks with the records that are there of each, in order."""
        blocks = []
        for number, group in groupby(self.log.read(), key=lambda record: record["block"]):
            records: list[dict[str, Any]] = list(group)
            first, stop = records[0], int(records[-1]["index"]) + 1
            eps = None if first["eps"] is None else float(first["eps"])
            cell = Cell(str(first["predictor"]), str(first["attack"]), eps)
            array = str(first.get("array", ""))
            blocks.append((Block(int(number), cell, int(first["index"]), stop, array), records))
        return blocks

    def open(self, config: dict[str, Any]) -> None:
        """Begin, or go on with, the evaluation that `config` describes; another one's folder is
        refused."""
        (self.path / "blocks").mkdir(parents=True, exist_ok=True)
        file = self.path / "config.json"
        if not file.exists():
            write_document(file, {**config, "code": code_hash(), "versions": versions()})
            return
        saved = self.config()
        for attack, contents in config.get("contents", {}).items():
            for place, value in contents.items():
                if str(value).startswith(UNKNOWN):
                    raise InputError(
                        f"out must be a new folder: the attack {attack!r} holds "
                        f"{str(value).removeprefix(UNKNOWN)} ({place}), which cannot be compared "
                        f"with what it held when {self.path} was begun"
                    )
        same = f"out must be a new folder or hold the same evaluation, got {self.path}"
        for key, value in config.items():
            if key == "contents" and key not in saved:  # fine, if the attacks hold nothing
                needed = [f"{name}: {path}" for name, paths in value.items() for path in paths]
                if needed:
                    raise InputError(
                        f"{same}, which does not say what the attacks held ({', '.join(needed)}): "
                        f"an older version made it, and it cannot be resumed; give a new folder"
                    )
            elif not _alike(saved.get(key), value):
                place, before, now = _difference(key, saved.get(key), value)
                raise InputError(f"{same} whose {place} is {before!r:.200}, not {now!r:.200}")

    def config(self) -> dict[str, Any]:
        """What was evaluated, with which code."""
        document = read_document(self.path / "config.json")
        if not isinstance(document, dict):
            raise InputError(
                f"{self.path / 'config.json'} must hold a dictionary, got {type(document).__name__}"
            )
        return document

    def write_array(self, block: Block, x_adv: Tensor, y: Tensor) -> str:
        """Keep the very array that is scored, with its targets; its SHA-256 goes into the records.

        A block that has a hash already is made again, and refused where the new array is another
        one.
        """
        data = encode({"x_adv": x_adv, "y": y}, block.file)
        digest = hashlib.sha256(data).hexdigest()
        if block.array not in ("", digest):
            raise StoreError(
                self.path / block.file,
                wanted="the array that was scored, to the bit, when made again",
                got="another one; evaluate into a new folder",
            )
        write_bytes(self.path / block.file, data)
        return digest

    def holds(self, block: Block) -> bool:
        """Whether the block's array is there as it was written."""
        path = self.path / block.file
        if not path.is_file() or not block.array:
            return path.is_file()
        return hashlib.sha256(read_bytes(path, limit=MAX_ARRAY_BYTES)).hexdigest() == block.array

    def check_array(self, block: Block) -> None:
        """Refuse a block whose array is missing or another one."""
        path = self.path / block.file
        if not self.holds(block):
            got = "another one" if path.exists() else "no file"
            raise StoreError(
                path,
                wanted="the array that was scored",
                got=f"{got}; call evaluate with this folder once more to make it again",
            )

    def read_array(self, block: Block) -> tuple[Tensor, Tensor]:
        """The array of a block and its targets, refused unless it is the one that was scored."""
        self.check_array(block)
        path = self.path / block.file
        tensors = decode(read_bytes(path, limit=MAX_ARRAY_BYTES), str(path))
        return tensors["x_adv"], tensors["y"]


def _alike(first: Any, second: Any) -> bool:
    """Equal, numbers up to rounding: the predictions of a model differ in the last bits from
    machine to machine."""
    match first, second:
        case list() | tuple(), list() | tuple():
            return len(first) == len(second) and all(map(_alike, first, second))
        case dict(), dict():
            same = first.keys() == second.keys()
            return same and all(_alike(first[key], second[key]) for key in first)
        case float(), float():
            return abs(first - second) <= 1e-4 * (1 + abs(second))
    return bool(first == second)


def _difference(place: str, saved: Any, wanted: Any) -> tuple[str, Any, Any]:
    """Where two settings differ, as deep as dictionaries go, and the two values there."""
    match saved, wanted:
        case dict(), dict():
            for key in (*wanted, *(key for key in saved if key not in wanted)):
                if key not in saved or key not in wanted or not _alike(saved[key], wanted[key]):
                    return _difference(f"{place}[{key!r}]", saved.get(key), wanted.get(key))
    return place, saved, wanted


@torch.no_grad()
def fingerprint(predict: Any, x: Tensor) -> list[float]:  # x (B, *event), a few examples
    """A few numbers that tell one trained predictor from another."""
    prediction = predict(x)
    values: Tensor = prediction.logits if predicts_classes(prediction) else prediction.mean
    return [float(value) for value in values.flatten()[:16].double()]

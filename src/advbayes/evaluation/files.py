"""An evaluation on disk: config.json, records.jsonl (one line per example) and one safetensors file per block of arrays."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import advbayes
from advbayes.store import RecordLog, read_document, versions, write_bytes, write_document
from advbayes.store.files import read_bytes
from advbayes.store.tensors import decode, encode

MAX_ARRAY_BYTES = 1 << 32


@dataclass(frozen=True)
class Block:
    """One batch of one predictor under one attack at one radius: the unit that is written, and resumed, whole.

    >>> Block(3, "MIX", "PGD", 2.0, 0, 256).file
    'blocks/00003.safetensors'
    """

    number: int
    predictor: str
    attack: str
    eps: float | None
    start: int
    stop: int

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


def data_hash(x: Tensor, y: Tensor) -> str:
    """SHA-256 of the data.

    >>> data_hash(torch.zeros(1, 2), torch.zeros(1)) == data_hash(torch.zeros(1, 2), torch.zeros(1))
    True
    """
    digest = hashlib.sha256()
    for value in (x, y):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Folder:
    """The folder of one evaluation.

    >>> Folder(Path("run")).log.path.name
    'records.jsonl'
    """

    path: Path

    @property
    def log(self) -> RecordLog:
        """The records."""
        return RecordLog(self.path / "records.jsonl")

    def open(self, config: dict[str, Any]) -> None:
        """Begin, or go on with, the evaluation that `config` describes; another one's folder is refused."""
        (self.path / "blocks").mkdir(parents=True, exist_ok=True)
        file = self.path / "config.json"
        if not file.exists():
            write_document(file, {**config, "code": code_hash(), "versions": versions()})
            return
        held = self.config()
        for key, value in config.items():
            if not _alike(held.get(key), value):
                raise ValueError(
                    f"out must be a new folder or hold the same evaluation, got {self.path} whose {key} is "
                    f"{held.get(key)!r:.200}, not {value!r:.200}"
                )

    def config(self) -> dict[str, Any]:
        """What was evaluated, with which code."""
        held = read_document(self.path / "config.json")
        if not isinstance(held, dict):
            raise ValueError(f"{self.path / 'config.json'} must hold a dictionary, got {type(held).__name__}")
        return held

    def write_array(self, block: Block, x_adv: Tensor, y: Tensor) -> None:
        """The very array that is scored, with its targets."""
        write_bytes(self.path / block.file, encode({"x_adv": x_adv, "y": y}, block.file))

    def read_array(self, block: Block) -> tuple[Tensor, Tensor]:
        """The array of a block and its targets."""
        path = self.path / block.file
        held = decode(read_bytes(path, limit=MAX_ARRAY_BYTES), str(path))
        return held["x_adv"], held["y"]


def _alike(first: Any, second: Any) -> bool:
    """Equal, numbers up to rounding: the predictions of a model differ in the last bits from machine to machine."""
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_alike, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_alike(first[key], second[key]) for key in first)
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second) <= 1e-4 * (1 + abs(second))
    return bool(first == second)


@torch.no_grad()
def fingerprint(predict: Any, x: Tensor) -> list[float]:  # x (B, *event), a few examples
    """A few numbers that tell one trained predictor from another."""
    prediction = predict(x)
    values: Tensor = prediction.logits if hasattr(prediction, "logits") else prediction.mean
    return [float(value) for value in values.flatten()[:16].double()]

"""What an attack holds that its repr does not show: a hash of each tensor, a fingerprint of each predictor."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from advbayes.attacks.parts import LOSSES
from advbayes.types import Predictor


def tensor_hash(*values: Tensor) -> str:
    """SHA-256 of dtype, shape and entries.

    >>> tensor_hash(torch.zeros(2)) == tensor_hash(torch.zeros(1, 2))
    False
    """
    digest = hashlib.sha256()
    for value in values:
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        plain = value.detach().cpu().contiguous()
        digest.update((plain.view(torch.uint8) if plain.dtype == torch.bfloat16 else plain).numpy().tobytes())
    return digest.hexdigest()


def contents_of(
    attack: object,
    fingerprint: Callable[[Predictor], list[float]],  # as the predictors under evaluation get
) -> dict[str, str | list[float]]:
    """Path in the attack -> hash of the tensor or fingerprint of the predictor that is there.

    >>> from advbayes import L2, pgd
    >>> list(contents_of(pgd(L2(1.0, scale=torch.ones(3))), lambda predict: [0.0]))
    ['ball.scale']
    """
    return dict(_found(attack, "", fingerprint, is_loss=False))


def _found(
    value: Any, path: str, fingerprint: Callable[[Predictor], list[float]], *, is_loss: bool
) -> Iterator[tuple[str, str | list[float]]]:
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        yield path, tensor_hash(value)
        return
    predicts = None if is_loss else _predicts(value, fingerprint)
    if predicts is not None:
        yield path, predicts  # its own tensors show in what it predicts
        return
    members: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        members = [(str(key), member) for key, member in value.items()]
    elif isinstance(value, (tuple, list)):
        members = [(str(number), member) for number, member in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        members = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]
    for name, member in members:
        inner = name in LOSSES or (is_loss and name.isdigit())
        yield from _found(member, f"{path}.{name}".strip("."), fingerprint, is_loss=inner)


def _predicts(value: Any, fingerprint: Callable[[Predictor], list[float]]) -> list[float] | None:
    """The fingerprint of what answers inputs alone; losses and attacks want more than that."""
    if not callable(value) or isinstance(value, type):
        return None
    try:
        inspect.signature(value).bind(None)
        return fingerprint(value)
    except Exception:  # not made for these inputs: whatever it is, it is no predictor of them
        return None

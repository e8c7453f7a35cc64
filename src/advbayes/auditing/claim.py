"""Somebody's arrays and the scores claimed for them, made to fit the data they are judged on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from advbayes import checks
from advbayes.types import Predictor

Values = Tensor | np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Claim:
    """Somebody's evaluation: arrays (or tensors) and the scores claimed for them, by attack.

    `x_adv` are the arrays that were scored. `worst` is the claimed worst-case column. `rescored` is
    how often each final point was scored; `knowledge` the levels that the table has ("thetas
    known", "thetas fresh"); `through` the predictor that the attack went through, where it is not
    the one that is scored. Seeds, config and code make it re-scorable; `test_size` and `test_hash`
    (`data_hash(x, y)`) of the whole test set say whether the examples are all of it or a selection.

    >>> claim = Claim({"PGD": torch.zeros(2, 3)}, correct={"PGD": torch.tensor([True, False])})
    >>> claim.accuracy("PGD")
    0.5
    """

    x_adv: Mapping[str, Tensor]
    correct: Mapping[str, Tensor] = field(default_factory=dict)
    log_prob: Mapping[str, Tensor] = field(default_factory=dict)
    worst: Tensor | None = None  # (N,) correct, union over attacks
    through: Predictor | None = None
    rescored: int = 1
    knowledge: tuple[str, ...] = ()
    purifier_attacks: tuple[str, ...] = ()
    seed: int | None = None
    config: Mapping[str, Any] | None = None
    code: str | None = None
    test_size: int | None = None
    test_hash: str | None = None

    def __post_init__(self) -> None:
        for name in ("x_adv", "correct", "log_prob"):
            object.__setattr__(self, name, _tensors(name, vars(self)[name]))
        if self.worst is not None:
            object.__setattr__(self, "worst", _tensor("worst", self.worst))
        if not self.x_adv:
            raise checks.InputError(
                "x_adv must hold the scored array of at least one attack, got none"
            )
        shares = {f"correct[{name!r}]": value for name, value in self.correct.items()}
        if self.worst is not None:
            shares["worst"] = self.worst
        for what, value in shares.items():
            if not _in_unit_interval(value):
                raise checks.InputError(
                    f"{what} must say for each example whether it was right (0 to 1)", got=value
                )
        for name, value in self.log_prob.items():
            if bool((value > 1e-6).any()) and _in_unit_interval(value):
                raise checks.InputError(
                    f"log_prob[{name!r}] must hold log-probabilities (<= 0 for classes), got "
                    f"{float(value.min()):g} to {float(value.max()):g}: these are probabilities"
                )
            checks.finite(f"log_prob[{name!r}]", value)

    def accuracy(self, attack: str) -> float:
        """The claimed accuracy."""
        return float(self.correct[attack].double().mean())


def _in_unit_interval(value: Tensor) -> bool:
    return bool(((value >= 0) & (value <= 1)).all())


def _tensors(name: str, values: Mapping[str, Values]) -> dict[str, Tensor]:
    checks.instance(name, values, Mapping, "a mapping from the names of attacks")
    return {key: _tensor(f"{name}[{key!r}]", value) for key, value in values.items()}


def _tensor(name: str, value: Values) -> Tensor:
    checks.instance(name, value, (Tensor, np.ndarray), "a tensor or an array")
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value)


def fitted(
    claim: Claim,
    x: Tensor,  # (N, *event)
) -> Claim:
    """The claim with its arrays in x's dtype and its scores of shape (N,); what does not fit the
    data is named.

    >>> fitted(Claim({"a": torch.zeros(2, 3)}, correct={"a": torch.ones(1)}), torch.zeros(2, 3))
    Traceback (most recent call last):
    ...
    advbayes.checks.InputError: correct['a'] must hold one value for each of the 2 examples of x, got a torch.float32 tensor of shape (1,) on cpu
    """  # noqa: E501
    for name, x_adv in claim.x_adv.items():
        if x_adv.shape != x.shape:
            raise checks.InputError(
                f"x_adv[{name!r}] must have x's shape {tuple(x.shape)}", got=x_adv
            )

    def column(name: str, value: Tensor) -> Tensor:
        if tuple(value.shape) not in ((len(x),), (len(x), 1)):
            raise checks.InputError(
                f"{name} must hold one value for each of the {len(x)} examples of x", got=value
            )
        return value.reshape(-1)

    def columns(kind: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        unknown = [name for name in values if name not in claim.x_adv]
        if unknown:
            raise checks.InputError(
                f"{kind} must speak of attacks in x_adv ({', '.join(claim.x_adv)}), got "
                f"{', '.join(unknown)}"
            )
        return {name: column(f"{kind}[{name!r}]", value) for name, value in values.items()}

    return dataclasses.replace(
        claim,
        x_adv={name: x_adv.to(x) for name, x_adv in claim.x_adv.items()},
        correct=columns("correct", claim.correct),
        log_prob=columns("log_prob", claim.log_prob),
        worst=None if claim.worst is None else column("worst", claim.worst),
    )

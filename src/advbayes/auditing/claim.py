"""What is said: the threat model, without which a robustness number means nothing (E0), and
somebody's arrays with the scores claimed for them, made to fit the data they are judged on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from advbayes.attacks.balls import Ball
from advbayes.attacks.parts import loss_names, restarts_of, settings, steps_of
from advbayes.checks import InputError, choice, finite, instance, native
from advbayes.types import Attack, Predictor

UNITS = ("raw", "standardised")
Values = Tensor | np.ndarray[Any, Any]


@dataclass(frozen=True)
class ThreatModel:
    """What the attacker may do and knows. `audit` fills in what the ball, the attacks and the
    predictor say themselves.

    `units` are those of eps: "raw", or "standardised" with the scale that x was divided by. Where
    nothing is said, neither here nor by a scale of the ball, `audit` takes x as raw; a claim must
    say its own.

    >>> ThreatModel(norm="L2", eps=2.0, units="raw").missing()[:3]
    ('box', 'goal', 'knowledge')
    """

    norm: str | None = None
    eps: float | None = None
    units: str | None = None
    scale: Any = None  # a number or one per feature; needed when standardised
    box: str | None = None
    goal: str | None = None  # "untargeted", "targeted", "entropy up", ...
    # of theta: "thetas known", "thetas fresh", "thetas known and fresh", "no thetas"
    knowledge: str | None = None
    attack_thetas: int | None = None
    evaluation_thetas: int | None = None
    randomness: str | None = None  # "fixed", "fresh" or "none"
    steps: int | None = None
    step_size: str | float | None = None
    restarts: int | None = None
    loss: str | None = None

    def __post_init__(self) -> None:
        if self.units is not None:
            choice("units", self.units, UNITS)

    @classmethod
    def in_units_of(cls, scale: Any) -> ThreatModel:
        """Of eps in units of `scale`, which x was divided by; None: in raw units."""
        return cls(units="raw") if scale is None else cls(units="standardised", scale=scale)

    def missing(self) -> tuple[str, ...]:
        """The fields that nothing is said about."""
        absent = [name for name, value in vars(self).items() if value is None and name != "scale"]
        if self.units == "standardised" and self.scale is None:
            absent.append("scale (of the standardised units)")
        return tuple(absent)

    def filled(self, **known: Any) -> ThreatModel:
        """The same, with what is missing taken from `known`."""
        said = {name for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: known[name] for name in known if name not in said})


def said_by(ball: Ball, attacks: Mapping[str, Attack]) -> dict[str, Any]:
    """What a ball and attacks say about the threat model by themselves."""
    steps = [steps for attack in attacks.values() if (steps := steps_of(attack))]
    sizes = [settings(attack).get("step_size") for attack in attacks.values()]
    size = next((size for size in sizes if size is not None), None) or "adapted to steps"
    losses = dict.fromkeys(name for attack in attacks.values() for name in loss_names(attack))
    return {
        "norm": type(ball).__name__,
        "eps": float(ball.eps),
        "box": "none" if ball.box is None else str(ball.box),
        "goal": "untargeted",
        "steps": max(steps) if steps else None,
        "step_size": size if attacks else None,
        "restarts": max((restarts_of(attack) for attack in attacks.values()), default=None),
        "loss": ", ".join(losses) or None,
    }


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
            raise InputError("x_adv must hold the scored array of at least one attack, got none")
        shares = {f"correct[{name!r}]": value for name, value in self.correct.items()}
        if self.worst is not None:
            shares["worst"] = self.worst
        for what, value in shares.items():
            if not _in_unit_interval(value):
                raise InputError(
                    f"{what} must say for each example whether it was right (0 to 1)", got=value
                )
        for name, value in self.log_prob.items():
            if bool((value > 1e-6).any()) and _in_unit_interval(value):
                raise InputError(
                    f"log_prob[{name!r}] must hold log-probabilities (<= 0 for classes), got "
                    f"{float(value.min()):g} to {float(value.max()):g}: these are probabilities"
                )
            finite(f"log_prob[{name!r}]", value)

    def accuracy(self, attack: str) -> float:
        """The claimed accuracy."""
        return float(self.correct[attack].double().mean())


def _in_unit_interval(value: Tensor) -> bool:
    return bool(((value >= 0) & (value <= 1)).all())


def _tensors(name: str, values: Mapping[str, Values]) -> dict[str, Tensor]:
    instance(name, values, Mapping, "a mapping from the names of attacks")
    return {key: _tensor(f"{name}[{key!r}]", value) for key, value in values.items()}


def _tensor(name: str, value: Values) -> Tensor:
    instance(name, value, (Tensor, np.ndarray), "a tensor or an array")
    return value.detach() if isinstance(value, Tensor) else torch.tensor(native(value))


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
            raise InputError(f"x_adv[{name!r}] must have x's shape {tuple(x.shape)}", got=x_adv)

    def column(name: str, value: Tensor) -> Tensor:
        if tuple(value.shape) not in ((len(x),), (len(x), 1)):
            raise InputError(
                f"{name} must hold one value for each of the {len(x)} examples of x", got=value
            )
        return value.reshape(-1)

    def columns(kind: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        unknown = [name for name in values if name not in claim.x_adv]
        if unknown:
            raise InputError(
                f"{kind} must speak of attacks in x_adv ({', '.join(claim.x_adv)}), got "
                f"{', '.join(unknown)}"
            )
        return {name: column(f"{kind}[{name!r}]", value) for name, value in values.items()}

    return replace(
        claim,
        x_adv={name: x_adv.to(x) for name, x_adv in claim.x_adv.items()},
        correct=columns("correct", claim.correct),
        log_prob=columns("log_prob", claim.log_prob),
        worst=None if claim.worst is None else column("worst", claim.worst),
    )

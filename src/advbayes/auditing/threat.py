"""The threat model: all that must be said before a robustness number means anything (E0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from advbayes import checks
from advbayes.attacks.balls import Ball
from advbayes.attacks.parts import loss_names, restarts_of, settings, steps_of
from advbayes.types import Attack

UNITS = ("raw", "standardised")


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
            checks.choice("units", self.units, UNITS)

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

"""One move: an input, an attack, an eps; what each defense answers before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks import Suite
from advbayes.attacks.balls import Ball
from advbayes.experiments.playground.worlds import World
from advbayes.purification import Purifier
from advbayes.runs import make_attack
from advbayes.runs.config import ATTACKS as DESCRIPTIONS
from advbayes.runs.named import adaptive_attack
from advbayes.types import Predictor

ADAPTIVE = "adaptive"
ATTACKS = {
    **{name: DESCRIPTIONS[name] for name in ("pgd", "pgd1", "ent", "pgd_plus", "random")},
    ADAPTIVE: "PGD; on the purifier also the attacks made for purifiers",
}
STEPS = 10
QUERIES = 10
GRID = 41  # points at which a regression's density is drawn


@dataclass(frozen=True, eq=False)
class Answer:
    """A predictive at one input: class probabilities, or the density of a number."""

    values: Tensor  # (C,) probabilities, or (GRID,) densities
    places: Tensor | None = None  # (GRID,) where the densities are; None for classes
    mean: float = 0.0
    sd: float = 0.0

    @property
    def label(self) -> int:
        """The likeliest class."""
        return int(self.values.argmax())


@dataclass(frozen=True, eq=False)
class Panel:
    """What one defense makes of a move."""

    defense: str
    x: Tensor  # (*event): as the models see it
    x_adv: Tensor
    norm: float  # of x_adv - x
    clean: Answer
    attacked: Answer
    evidence: tuple[float, float] | None = None  # log evidence before and after; of purifiers
    ess: tuple[float, float] | None = None  # effective sample size before and after

    @property
    def broken(self) -> bool:
        """Whether the likeliest class changed (never, for a number)."""
        return self.clean.places is None and self.clean.label != self.attacked.label


def move(
    world: World,
    x: Tensor,  # (*event)
    y: Tensor | None = None,  # () its label, where it is known
    *,
    attack: str = "pgd",
    eps: float = 0.5,
    defenses: Sequence[str] = (),
    made_for: str | None = None,
) -> list[Panel]:
    """The panels of some defenses (all of them by default) side by side.

    Each defense is attacked by itself; with `made_for` all get the input that was made for that
    one. The same move gives the same panels.
    """
    checks.choice("attack", attack, tuple(ATTACKS))
    known = tuple(world.predictors)
    names = tuple(defenses) or known
    for name in (*names, made_for or names[0]):
        checks.choice("defense", name, known)
    ball, batch = world.ball(eps), x.unsqueeze(0)
    target = None if y is None else y.unsqueeze(0)
    panels: list[Panel] = []
    for name in names:
        predict = world.predictors[name]
        x_adv = panels[0].x_adv[None] if panels and made_for else None
        if x_adv is None:
            victim = world.predictors[made_for or name]
            x_adv = _attacked(victim, batch, target, attack, ball, world.task)
        both = torch.cat([batch, x_adv])
        clean, attacked = _answers(world, predict, both)
        evidence = ess = None
        if isinstance(predict, Purifier):
            diagnosis = predict.diagnose(both)
            evidence, ess = (
                (float(before), float(after))
                for before, after in (diagnosis.log_evidence, diagnosis.ess_reference)
            )
        norm = float(ball.norm(x_adv - batch))
        panels.append(Panel(name, x, x_adv[0], norm, clean, attacked, evidence, ess))
    return panels


def _attacked(
    predict: Predictor, x: Tensor, y: Tensor | None, name: str, ball: Ball, task: str
) -> Tensor:
    known = "pgd" if name == ADAPTIVE else name
    attack = make_attack(known, ball, task=task, steps=STEPS, queries=QUERIES)
    if name == ADAPTIVE and isinstance(predict, Purifier):
        attack = Suite((attack, adaptive_attack(ball, task=task, steps=STEPS)))
    return attack(predict, x, y, generator=torch.Generator().manual_seed(0)).detach()


def _answers(world: World, predict: Predictor, both: Tensor) -> tuple[Answer, Answer]:
    """At a batch of two: the clean and the attacked input."""
    with torch.no_grad():
        prediction = predict(both)
        if world.task == "classification":
            first, second = prediction.probs  # type: ignore[attr-defined]
            return Answer(first), Answer(second)
        scaling = world.data.scaling
        assert scaling is not None
        means, sds = prediction.mean.flatten(), prediction.variance.flatten().sqrt()
        grid = torch.linspace(float((means - 4 * sds).min()), float((means + 4 * sds).max()), GRID)
        rows = predict(both.repeat_interleave(GRID, 0))  # a distribution for each point of the grid
        densities = rows.log_prob(grid.repeat(2).view(rows.mean.shape)).view(2, GRID).exp()
        places, shown = scaling.inverse_target(grid), scaling.inverse_target(means)
        unit = float(places[1] - places[0]) / float(grid[1] - grid[0])
        first, second = (
            Answer(densities[i] / unit, places, float(shown[i]), float(sds[i]) * unit)
            for i in range(2)
        )
        return first, second

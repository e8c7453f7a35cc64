"""Attacks made of attacks: the worst of several, transfer from other predictors, the default suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution

from advbayes import checks
from advbayes.attacks.apgd import APGD
from advbayes.attacks.ascent import pgd
from advbayes.attacks.black_box import RandomSearch, Square
from advbayes.attacks.gradients import Best, config, score, targets
from advbayes.attacks.losses import dlr, margin, nll, squared_error
from advbayes.balls import _Ball as Ball
from advbayes.types import Attack, Loss, Predictor

_Any = TypeVar("_Any")


def _check_attacks(name: str, attacks: Sequence[Attack], *, low: int = 1) -> tuple[Attack, ...]:
    attacks = tuple(attacks)
    if len(attacks) < low:
        raise ValueError(f"{name} must hold at least one attack, got none")
    for attack in attacks:
        if not callable(attack):
            raise TypeError(f"{name} must hold attacks such as pgd(L2(1.0)), got {checks.describe(attack)}")
    return attacks


@dataclass(frozen=True, repr=False)
class Suite:
    """The worst of several attacks, example by example: broken first, then the larger `rank`.

    The first attack sees every example, each later one only those that are not broken yet; in regression, where nothing
    breaks, `regression` (absent: the same attacks) runs on all of them.

    >>> from advbayes import L2, one_step, pgd
    >>> Suite((one_step(L2(1.0)), pgd(L2(1.0), 3))).attacks[0].is_one_step
    True
    """

    attacks: tuple[Attack, ...]
    regression: tuple[Attack, ...] = ()
    rank: Loss = nll

    __repr__ = config

    def __post_init__(self) -> None:
        object.__setattr__(self, "attacks", _check_attacks("attacks", self.attacks))
        object.__setattr__(self, "regression", _check_attacks("regression", self.regression, low=0))

    def __call__(
        self,
        predict: Predictor,
        x: Tensor,  # (B, *event)
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        if not len(x):
            return x.clone()
        y = targets(predict, x, y)
        with torch.no_grad():
            prediction = predict(x)
        classes = isinstance(prediction, CategoricalDistribution)
        best = Best(x, *score(predict, self.rank, x, y))
        for number, attack in enumerate(self.attacks if classes or not self.regression else self.regression):
            rows = torch.arange(len(x), device=x.device)
            if number:
                rows = rows[~best.broken]
                if not len(rows):
                    break
            x_adv = attack(predict, x[rows], y[rows], generator=generator)
            best = best.put(rows, best.pick(rows).or_better(Best(x_adv, *score(predict, self.rank, x_adv, y[rows]))))
        return best.x


@dataclass(frozen=True, repr=False)
class Transfer:
    """Examples made against other predictors (an undefended or sibling model), the worst for this one kept.

    >>> from advbayes import L2, one_step
    >>> gentle, steep = (lambda x, a=a: torch.distributions.Normal(a * x[:, 0], 1.0) for a in (1, 2))
    >>> Transfer(one_step(L2(0.5)), (steep,))(gentle, torch.ones(1, 1), torch.zeros(1))
    tensor([[1.5000]])
    """

    attack: Attack
    sources: tuple[Predictor, ...]
    rank: Loss = nll

    __repr__ = config

    def __post_init__(self) -> None:
        if not isinstance(self.sources, (tuple, list)) or not all(callable(source) for source in self.sources):
            raise TypeError(f"sources must be a tuple of predictors, got {checks.describe(self.sources)}")
        object.__setattr__(self, "sources", tuple(self.sources))
        if not self.sources:
            raise ValueError("sources must hold at least one predictor, got none")

    def __call__(
        self, predict: Predictor, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        if not len(x):
            return x.clone()
        y = targets(predict, x, y)
        best = Best(x, *score(predict, self.rank, x, y))
        for source in self.sources:
            x_adv = self.attack(source, x, y, generator=generator)
            best = best.or_better(Best(x_adv, *score(predict, self.rank, x_adv, y)))
        return best.x


def strong_suite(
    ball: Ball,
    *,
    steps: int = 100,
    restarts: int = 1,
    targets: int = 9,
    queries: int = 500,
    others: Sequence[Attack] = (),
) -> Suite:
    """The default worst case: every loss, adaptive steps, every likely wrong class, then queries alone.

    Classification: APGD on the likelihood, on the margin and on DLR, by way of the `targets` likeliest wrong classes, PGD,
    Square with `queries` (0: without), random points. Regression: APGD on squared error and likelihood, PGD, Square.
    `others` join at the end: transfer, a purifier's own attacks.

    >>> from advbayes import L2
    >>> len(strong_suite(L2(1.0), queries=0).attacks)
    6
    """
    checks.count("queries", queries, low=0)
    classification: list[Attack] = [
        APGD(ball, nll, steps, restarts),
        APGD(ball, margin, steps, restarts, stop_at_success=True),
        APGD(ball, margin, steps, 0, targets, stop_at_success=True),
        APGD(ball, dlr, steps, restarts, stop_at_success=True),
        pgd(ball, steps, nll, restarts=restarts, stop_at_success=True),
        RandomSearch(ball, 20, margin, stop_at_success=True),
    ]
    regression: list[Attack] = [
        APGD(ball, squared_error, steps, restarts),
        APGD(ball, nll, steps, restarts),
        pgd(ball, steps, squared_error, restarts=restarts),
        RandomSearch(ball, 20),
    ]
    if queries:
        classification.append(Square(ball, queries))
        regression.append(Square(ball, queries, nll))
    return Suite((*classification, *others), (*regression, *others))


def with_ball(attack: _Any, ball: Ball) -> _Any:
    """The same attack, all its parts included, within another ball.

    >>> from advbayes import L2, pgd
    >>> with_ball(pgd(L2(1.0)), L2(2.0)).ball
    L2(2)
    """
    if not is_dataclass(attack) or isinstance(attack, type):
        raise TypeError(f"attack must be one of this package's attacks (a dataclass with a ball), got {checks.describe(attack)}")
    names = {field.name for field in fields(attack)}
    changed: dict[str, Any] = {}
    if "ball" in names:
        changed["ball"] = ball
    if "attack" in names:
        changed["attack"] = with_ball(attack.attack, ball)  # type: ignore[attr-defined]
    for name in {"attacks", "regression"} & names:
        changed[name] = tuple(with_ball(part, ball) for part in getattr(attack, name))
    if not changed:
        raise TypeError(f"attack must have a ball or parts that have one, got {checks.describe(attack)}")
    return replace(attack, **changed)

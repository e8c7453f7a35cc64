"""What attacks within a ball share: the examples under attack, their best points, the entry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks.balls import Ball
from advbayes.attacks.gradients import entry, loss_and_gradient, move, score, where_rows
from advbayes.attacks.losses import for_rows
from advbayes.types import Loss, Predictor


@dataclass(frozen=True)
class Best:
    """A point of each example with its loss and whether it is broken."""

    x: Tensor  # (B, *event)
    value: Tensor  # (B,)
    broken: Tensor  # (B,)

    @property
    def unbroken(self) -> Tensor:
        """The rows that are not broken yet."""
        return (~self.broken).nonzero().squeeze(1)

    def or_better(self, other: Best) -> Best:
        """Broken first, then the larger loss, then the later: a flat loss must not keep x."""
        better = (other.broken & ~self.broken) | (
            (other.broken == self.broken) & (other.value >= self.value)
        )
        return self.replaced(better, other)

    def replaced(self, where: Tensor, other: Best) -> Best:
        """`other` in the examples that are True in `where`; broken where either is."""
        return Best(
            where_rows(where, other.x, self.x),
            torch.where(where, other.value, self.value),
            self.broken | other.broken,
        )

    def pick(self, rows: Tensor | slice) -> Best:
        return Best(self.x[rows], self.value[rows], self.broken[rows])

    def put(self, rows: Tensor, part: Best) -> Best:
        """With some rows, in order, replaced."""
        if len(rows) == len(self.x):
            return part
        return Best(
            self.x.index_copy(0, rows, part.x),
            self.value.index_copy(0, rows, part.value.to(self.value.dtype)),
            self.broken.index_copy(0, rows, part.broken),
        )

    def improved(self, rows: Tensor, part: Best) -> Best:
        """With some rows, in order, replaced where `part` is better."""
        if len(rows) == len(self.x):
            return self.or_better(part)
        return self.put(rows, self.pick(rows).or_better(part))


@dataclass(frozen=True, eq=False)
class Problem:
    """Examples under attack: inputs, targets, and the loss of a Predictor's answer to them."""

    predict: Predictor
    loss: Loss
    ball: Ball
    x: Tensor  # (B, *event)
    y: Tensor  # (B,) or (B, D)
    generator: torch.Generator | None = None
    index: Tensor | None = None  # (B,): rows of the attack's whole batch; None: all of it

    def __len__(self) -> int:
        return len(self.x)

    def score(self, point: Tensor) -> Best:
        return Best(point, *score(self.predict, self.loss, point, self.y))

    def climb(self, point: Tensor) -> tuple[Best, Tensor]:
        """The points with their losses, and the losses' gradient."""
        value, broken, gradient = loss_and_gradient(self.predict, self.loss, point, self.y)
        return Best(point, value, broken), gradient

    def move(self, point: Tensor, gradient: Tensor, step: float | Tensor) -> Tensor:
        """One projected step of ascent."""
        return move(self.ball, point, gradient, step, self.x)

    def random(self) -> Tensor:
        return self.ball.random(self.x, generator=self.generator)

    def in_turn(
        self, run: Callable[[int, Problem, Best], Best], num: int, stop_at_success: bool
    ) -> Best:
        """The best of x and of `num` runs, each given its number and the best so far; with
        `stop_at_success` a run sees only what is not broken yet."""
        best = self.score(self.x)
        rows = torch.arange(len(self), device=self.x.device)
        for number in range(num):
            rows = best.unbroken if stop_at_success else rows
            if not len(rows):
                break
            best = best.improved(rows, run(number, self.rows(rows), best.pick(rows)))
        return best

    def rows(self, rows: Tensor) -> Problem:
        """Some of the examples; each may stand there several times."""
        index = rows if self.index is None else self.index[rows]
        loss = for_rows(self.loss, rows)
        return replace(self, loss=loss, x=self.x[rows], y=self.y[rows], index=index)

    def repeated(self, num: int) -> Problem:
        """All examples, `num` times over."""
        return self.rows(torch.arange(len(self), device=self.x.device).repeat(num))

    def on(self, loss: Loss) -> Problem:
        """The same examples with another loss, one of the attack's whole batch."""
        return replace(self, loss=loss if self.index is None else for_rows(loss, self.index))


class Search(ABC):
    """An attack that looks for the best point of its ball: a dataclass with `ball` and `loss`."""

    ball: Ball

    @property
    def _losses(self) -> tuple[Loss, ...]:
        """What the attack climbs; points compete by the last one."""
        return (self.loss,)  # type: ignore[attr-defined]

    @abstractmethod
    def _search(self, problem: Problem) -> Tensor: ...  # (B, *event)

    def __call__(
        self,
        predict: Predictor,
        x: Tensor,  # (B, *event)
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        if self.ball.eps == 0 or not len(x):
            return x.detach().clone()
        x, y = entry(predict, self.ball, x, y, *self._losses)
        return self._search(Problem(predict, self._losses[-1], self.ball, x, y, generator))

    def __repr__(self) -> str:
        return config(self)


def check_ball(ball: object) -> None:
    """Refuse what is not a ball."""
    checks.instance("ball", ball, Ball, "a ball such as L2(eps)")


def check_settings(attack: Any, **least: int) -> None:
    """Refuse a `ball` and a `loss` that are none, and counts below their `least`."""
    check_ball(attack.ball)
    checks.function("loss", attack.loss, "a loss such as nll")
    for name, low in least.items():
        checks.count(name, vars(attack)[name], low=low)


def config(attack: Any) -> str:
    """The repr of an attack: its settings, functions by name, so that equal settings read equal."""
    shown = (f"{name}={_named(value)}" for name, value in vars(attack).items())
    return f"{type(attack).__name__}({', '.join(shown)})"


def _named(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_named, value))}{',' if len(value) == 1 else ''})"
    return str(getattr(value, "__qualname__", None) or repr(value))

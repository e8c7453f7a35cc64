"""Ascent from many points of the ball at once, for losses with many local maxima."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from advbayes.attacks.ascent import step_length
from advbayes.attacks.balls import Ball
from advbayes.attacks.losses import nll
from advbayes.attacks.search import Best, Problem, Search, check_settings
from advbayes.types import Loss

_KEEP = 4  # of so many starts one goes on to the next round
_LAST = 4  # a round of at most so many starts is the last
_NUMBERS, _ROWS = 2**20, 1024  # of x in one pass: so many numbers, or so many rows


@dataclass(frozen=True, repr=False)
class MultiStart(Search):
    """Projected ascent from x and from random points of the ball, of which after every round the
    best quarter goes on (successive halving, Jamieson and Talwalkar 2016).

    Each round has twice the steps of the one before; a start that reaches the last one takes
    `steps` in all, of the lengths of `PGD`. The best point of all is returned, x's own one-step
    point among them. On regression nets of a few features, where one ascent from x often ends in a
    local maximum, this finds more than longer runs from fewer points, at the cost of
    `num_gradients` gradients for each example.

    >>> from advbayes import L2, squared_error
    >>> predict = lambda x: torch.distributions.Normal((4 * x[:, 0]).sin() + x[:, 0], 1.0)
    >>> attack = MultiStart(L2(3.0), squared_error, restarts=16)
    >>> seeded = torch.Generator().manual_seed(0)
    >>> attack(predict, torch.zeros(1, 1), torch.zeros(1), generator=seeded).abs() > 1.9
    tensor([[True]])
    """

    ball: Ball
    loss: Loss = nll
    steps: int = 32
    restarts: int = 128

    def __post_init__(self) -> None:
        check_settings(self, steps=1, restarts=1)

    @property
    def rounds(self) -> tuple[tuple[int, int], ...]:
        """(starts, steps) of each round.

        >>> from advbayes import L2
        >>> MultiStart(L2(1.0), steps=30, restarts=64).rounds
        ((64, 4), (16, 8), (4, 18))
        """
        starts = [self.restarts]
        while starts[-1] > _LAST:
            starts.append(-(-starts[-1] // _KEEP))
        shares = 2 ** len(starts) - 1
        ends = [self.steps * (2 ** (k + 1) - 1) // shares for k in range(len(starts))]
        return tuple(
            (num, end - begin) for num, begin, end in zip(starts, [0, *ends], ends, strict=False)
        )

    @property
    def num_gradients(self) -> int:
        """Gradients for each example."""
        return sum(starts * steps for starts, steps in self.rounds)

    def _search(self, problem: Problem) -> Tensor:
        x, size = problem.x, len(problem)
        best = problem.score(x)
        together = max(1, max(_ROWS, _NUMBERS // x[0].numel()) // size)
        points = torch.empty(0)  # (starts, B, *event), of the round to come
        first = 0
        for number, (starts, steps) in enumerate(self.rounds):
            ends: list[Best] = []
            for begin in range(0, starts, together):
                num = min(together, starts - begin)
                if number:
                    begins = points[begin : begin + num].flatten(0, 1)
                else:  # drawn start by start, so that passes of another size draw the same
                    drawn = (problem.random() for _ in range(num))
                    begins = torch.cat([x if begin + k == 0 else b for k, b in enumerate(drawn)])
                end = self._climb(problem.repeated(num), begins, first, steps)
                ends += [end.pick(slice(k * size, (k + 1) * size)) for k in range(num)]
            for end in ends:
                best = best.or_better(end)
            first += steps
            if number + 1 < len(self.rounds):
                points = _foremost(ends, self.rounds[number + 1][0])
        return best.x

    def _climb(self, problem: Problem, point: Tensor, first: int, steps: int) -> Best:
        """The steps `first` to `first + steps` of a run from each point."""
        best = None
        for step in range(first, first + steps):
            here, gradient = problem.climb(point)
            best = here if best is None else best.or_better(here)
            point = problem.move(point, gradient, step_length(self.ball.eps, step, self.steps))
        here = problem.score(point)
        return here if best is None else best.or_better(here)


def _foremost(ends: list[Best], num: int) -> Tensor:
    """The `num` best points of each example, broken ones first: (num, B, *event)."""
    value = torch.stack([end.value.masked_fill(end.broken, torch.inf) for end in ends])
    chosen = value.nan_to_num(-torch.inf, posinf=torch.inf).topk(num, dim=0).indices
    points = torch.stack([end.x for end in ends])
    return points[chosen, torch.arange(points.shape[1], device=points.device)]

"""Attacks that ask for predictions alone, not gradients: points of the sphere, and Square."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks.balls import L2, Ball, per_row
from advbayes.attacks.gradients import where_rows
from advbayes.attacks.losses import margin, nll
from advbayes.attacks.search import Best, Problem, Search, check_settings
from advbayes.types import Loss


@dataclass(frozen=True, repr=False)
class RandomSearch(Search):
    """The best of `num` random points of the sphere: what any attack with a gradient must beat.

    >>> predict = lambda x: torch.distributions.Categorical(logits=torch.cat([x, -x], 1))
    >>> from advbayes import L2
    >>> seeded = torch.Generator().manual_seed(0)
    >>> RandomSearch(L2(1.5), 50)(predict, torch.ones(1, 1), torch.tensor([0]), generator=seeded)
    tensor([[-0.5000]])
    """

    ball: Ball
    num: int = 100
    loss: Loss = nll
    stop_at_success: bool = False

    def __post_init__(self) -> None:
        check_settings(self, num=1)

    def _search(self, problem: Problem) -> Tensor:
        def run(number: int, part: Problem, so_far: Best) -> Best:
            return part.score(self.ball.sphere(part.x, generator=part.generator))

        return problem.in_turn(run, self.num, self.stop_at_success).x


@dataclass(frozen=True, repr=False)
class Square(Search):
    """Random square-shaped changes, kept where they help (after Andriushchenko et al.).

    Images (C, H, W) are changed in square windows, other inputs in random sets of features. The
    share of the input that one proposal touches starts at `share` and halves along the queries.
    Linf: a window moves to a corner of the ball. L2: a window takes over another one's budget, in a
    shape that falls off from its middle.

    >>> two_sums = lambda x: torch.stack([x.sum(1), -x.sum(1)], 1)
    >>> predict = lambda x: torch.distributions.Categorical(logits=two_sums(x))
    >>> from advbayes import Linf
    >>> seeded = torch.Generator().manual_seed(0)
    >>> attack = Square(Linf(1.5), 50)
    >>> attack(predict, torch.ones(1, 4), torch.tensor([0]), generator=seeded).sum() < 0
    tensor(True)
    """

    ball: Ball
    queries: int = 5000
    loss: Loss = margin
    share: float = 0.8
    stop_at_success: bool = True

    def __post_init__(self) -> None:
        check_settings(self, queries=1)
        checks.number("share", self.share, low=0, high=1, open_low=True)

    def _search(self, problem: Problem) -> Tensor:
        changed = self._shift_mass if isinstance(self.ball, L2) else self._corners

        def run(query: int, part: Problem, so_far: Best) -> Best:
            if query == 0:
                return part.score(self._stripes(part.x, part.generator))
            return part.score(changed(so_far.x, part.x, self._share_at(query), part.generator))

        return problem.in_turn(run, self.queries, self.stop_at_success).x

    def _share_at(self, query: int) -> float:
        """Halved at fixed fractions of the queries: early on often, later rarely."""
        marks = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
        return math.ldexp(self.share, -sum(query > mark * self.queries for mark in marks))

    def _stripes(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """The first proposal, on the edge: vertical stripes of random sign, or random signs."""
        signs = _signs(x, generator, columns=True).expand(x.shape)
        alike = self.ball.within_reach(signs / self.ball.units(x), x)  # in units of the norm
        return self.ball.project(x + self.ball.ascend(alike, self.ball.eps), x)

    def _corners(
        self, point: Tensor, x: Tensor, share: float, generator: torch.Generator | None
    ) -> Tensor:
        """Linf: a window of each example moves to +-eps, one sign a channel (or a feature)."""
        inside, _ = _windows(x, share, generator)
        signs = _signs(x, generator).expand(x.shape)
        corner = x + self.ball.ascend(signs, self.ball.eps)
        return self.ball.project(torch.where(inside, corner, point), x)

    def _shift_mass(
        self, point: Tensor, x: Tensor, share: float, generator: torch.Generator | None
    ) -> Tensor:
        """L2: window 1 takes the unused, its own and window 2's budget, bent by a bump."""
        unit = self.ball.units(x)
        d = (point - x) / unit
        first, bump = _windows(x, share, generator)
        second, _ = _windows(x, share, generator)
        slack = (self.ball.eps**2 - _square(d)).clamp_min(0)
        mass = _square(torch.where(first | second, d, torch.zeros_like(d)))
        old = torch.where(first, d, torch.zeros_like(d))
        bent = self.ball.within_reach(_unit(old) + _signs(x, generator) * _unit(bump), x)
        fresh = _unit(bent) * (mass + slack).sqrt()
        moved = where_rows((_square(bent) > 0).flatten(), torch.where(first, fresh, d * ~second), d)
        return self.ball.project(x + moved * unit, x)


def _windows(x: Tensor, share: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """A random window of about `share` of each example: where it is, and a bump inside of it."""
    if x.ndim != 4:
        count = max(1, round(share * x[0].numel()))
        order = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device).flatten(1)
        inside = (order <= order.kthvalue(count, dim=1, keepdim=True).values).view_as(x)
        return inside, inside.to(x.dtype)
    height, width = x.shape[2:]
    side = min(max(1, round(math.sqrt(share * height * width))), height, width)
    top = torch.randint(height - side + 1, (len(x), 1, 1, 1), generator=generator, device=x.device)
    left = torch.randint(width - side + 1, (len(x), 1, 1, 1), generator=generator, device=x.device)
    row = torch.arange(height, device=x.device).view(1, 1, -1, 1) - top
    column = torch.arange(width, device=x.device).view(1, 1, 1, -1) - left
    inside = (row >= 0) & (row < side) & (column >= 0) & (column < side)
    # Two opposite halves, each with its peak in its middle: neighbouring pixels agree, the whole
    # window's mean is near zero.
    upright = bool(torch.rand((), generator=generator, device=x.device) < 0.5)
    along, across = (row, column) if upright else (column, row)
    half = max(1, side // 2)
    sign = torch.where(along < half, 1.0, -1.0)
    peak = torch.maximum(
        (along % half - (half - 1) / 2).abs() / half, (across - (side - 1) / 2).abs() / side
    )
    bump = torch.where(inside, sign / (0.2 + peak).square(), torch.zeros((), device=x.device))
    return inside.expand_as(x), bump.to(x.dtype).expand_as(x)


def _signs(x: Tensor, generator: torch.Generator | None, columns: bool = False) -> Tensor:
    """Random signs: one a channel of images, or one a column of it; else one a feature."""
    image = (*x.shape[:2], 1, x.shape[-1] if columns else 1)
    shape = image if x.ndim == 4 else x.shape
    return torch.randint(2, shape, generator=generator, device=x.device).to(x.dtype) * 2 - 1


def _square(d: Tensor) -> Tensor:
    """|d|^2 of each example, broadcastable against d."""
    return per_row(d.flatten(1).square().sum(1), d)


def _unit(d: Tensor) -> Tensor:
    return d / _square(d).sqrt().clamp_min(torch.finfo(d.dtype).tiny)

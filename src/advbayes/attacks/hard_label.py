"""An attack that sees labels only (after Chen, Jordan and Wainwright's HopSkipJump)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from advbayes.attacks.balls import L2, Ball, per_row
from advbayes.attacks.gradients import where_rows
from advbayes.attacks.losses import margin
from advbayes.attacks.search import Best, Problem, Search, check_settings
from advbayes.seeds import normal_like
from advbayes.types import Loss

_ROWS = 4096  # inputs asked about in one call


@dataclass(frozen=True, repr=False)
class HardLabel(Search):
    """From some broken input along the decision boundary towards x, asking only "broken or not?".

    The start is the nearest other example of the batch that is broken for this one, or else noise
    of growing size. At the boundary the normal is estimated from the answers at `probes` random
    points, then one step outwards and a bisection towards x. Examples whose boundary point is
    within the ball are done. `loss` only says what broken means.

    >>> predict = lambda x: torch.distributions.Categorical(logits=torch.cat([x, -x], 1))
    >>> from advbayes import L2
    >>> attack = HardLabel(L2(1.2), rounds=10)
    >>> seeded = torch.Generator().manual_seed(0)
    >>> attack(predict, torch.ones(1, 1), torch.tensor([0]), generator=seeded) < 0
    tensor([[True]])
    """

    ball: Ball
    rounds: int = 20
    probes: int = 50
    loss: Loss = margin
    stop_at_success: bool = True

    def __post_init__(self) -> None:
        check_settings(self, rounds=1, probes=2)

    def _search(self, problem: Problem) -> Tensor:
        broken = problem.score(problem.x).broken
        outside, started = self._starts(problem, broken)
        rows = started.nonzero().squeeze(1)
        if len(rows):
            reached = self._walk(problem.rows(rows), outside[rows])
            outside = outside.index_copy(0, rows, reached)
        return where_rows(broken, problem.x, self.ball.project(outside, problem.x))

    def _asked(self, problem: Problem, points: Tensor) -> Tensor:
        """Whether points (N, B, *event) are broken, (N, B); a bounded number at a time."""
        together = max(1, _ROWS // len(problem))
        answers = [
            problem.repeated(len(part)).score(part.flatten(0, 1)).broken.view(len(part), -1)
            for part in torch.split(points, together)
        ]
        return torch.cat(answers)

    def _allowed(self, points: Tensor, x: Tensor) -> Tensor:
        """In the box and untouched where masked; the radius does not count on the way."""
        points, reach = self.ball.clip(points), self.ball.reach(x)
        return points if reach is None else torch.where(reach, points, x)

    def _starts(self, problem: Problem, broken: Tensor) -> tuple[Tensor, Tensor]:
        """A broken input for each example that has one, and which those are."""
        x = problem.x
        start, started = x, torch.zeros_like(broken)
        flat, y = (x / self.ball.units(x)).flatten(1), problem.y.reshape(len(x), -1)
        same = (y.unsqueeze(1) == y.unsqueeze(0)).all(-1)
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))  # cdist knows none narrower
        distance = torch.cdist(flat, flat).masked_fill(same, math.inf)
        for _ in range(min(3, len(x) - 1)):  # a few rounds: the nearest example whose label differs
            open_rows = ~started & ~broken
            if not bool(open_rows.any()):
                return start, started
            near, pick = distance.min(dim=1)
            candidate = self._allowed(x[pick], x)
            hit = open_rows & near.isfinite() & problem.score(candidate).broken
            start, started = where_rows(hit, candidate, start), started | hit
            distance = distance.scatter(1, pick.unsqueeze(1), math.inf)
        for doubling in range(16):
            open_rows = ~started & ~broken
            if not bool(open_rows.any()):
                break
            noise = normal_like(x, problem.generator)
            wide = 2.0 ** (doubling - 2) * self.ball.eps
            candidate = self._allowed(x + wide * noise * self.ball.units(x), x)
            hit = open_rows & problem.score(candidate).broken
            start, started = where_rows(hit, candidate, start), started | hit
        return start, started

    def _walk(self, problem: Problem, start: Tensor) -> Tensor:
        """`rounds` of: find the boundary, estimate its normal, step outwards; nearest points."""
        everywhere = torch.ones(len(problem), dtype=torch.bool, device=start.device)
        best = Best(start, -self.ball.norm(start - problem.x), everywhere)
        active = torch.arange(len(problem), device=start.device)
        here, point = problem, start
        for number in range(1, self.rounds + 2):
            point = self._to_boundary(here, point)
            norm = self.ball.norm(point - here.x)
            best = best.improved(active, Best(point, -norm, everywhere[active]))
            if number > self.rounds:
                break
            if self.stop_at_success:
                stay = (best.value[active] < -self.ball.eps).nonzero().squeeze(1)
                active, point, norm = active[stay], point[stay], norm[stay]
                if not len(active):
                    break
                here = problem.rows(active)
            normal = self._normal(here, point, norm, number)
            point = self._outwards(here, point, normal, norm / math.sqrt(number))
        return best.x

    def _to_boundary(self, problem: Problem, outside: Tensor, rounds: int = 12) -> Tensor:
        """The last broken point towards x: along the segment in L2, in a shrinking cube in Linf."""
        x, reach = problem.x, self.ball.norm(outside - problem.x)
        low, high = torch.zeros_like(reach), torch.ones_like(reach)

        def at(fraction: Tensor) -> Tensor:
            if isinstance(self.ball, L2):
                return x + per_row(fraction, x) * (outside - x)
            cube = per_row(fraction * reach, x) * self.ball.units(x)
            return x + torch.minimum(torch.maximum(outside - x, -cube), cube)

        for _ in range(rounds):
            middle = 0.5 * (low + high)
            broken = problem.score(at(middle)).broken
            high, low = torch.where(broken, middle, high), torch.where(broken, low, middle)
        return where_rows(high < 1, at(high), outside)

    def _normal(self, problem: Problem, point: Tensor, norm: Tensor, number: int) -> Tensor:
        """The boundary's normal from answers around the point, centred for less variance."""
        x, shape = problem.x, (int(self.probes * math.sqrt(number)), *point.shape)
        flat = normal_like(x, problem.generator, shape).flatten(2)
        noise = (flat / torch.linalg.vector_norm(flat, dim=2, keepdim=True)).view(shape)
        # Wide enough to see the boundary's slope, narrow enough to see no bend.
        width = (norm / math.sqrt(point[0].numel())).clamp_min(1e-4 * self.ball.eps)
        around = self._allowed(point + per_row(width, x) * noise * self.ball.units(x), x)
        answers = self._asked(problem, around).to(x.dtype) * 2 - 1
        mean = answers.mean(0)
        weights = torch.where(mean.abs() < 1, answers - mean, answers)
        # The probes lie evenly in units of the norm, and the slope in these is unit * gradient.
        slopes = (around - point) / self.ball.units(x) ** 2
        return (weights.view(*weights.shape, *[1] * (x.ndim - 1)) * slopes).mean(0)

    def _outwards(self, problem: Problem, point: Tensor, normal: Tensor, size: Tensor) -> Tensor:
        """A step along the normal, halved until the point is broken; stays where no step is."""
        result, done = point, torch.zeros(len(point), dtype=torch.bool, device=point.device)
        for _ in range(10):
            candidate = self._allowed(point + self.ball.ascend(normal, size), problem.x)
            broken = problem.score(candidate).broken & ~done
            result, done = where_rows(broken, candidate, result), done | broken
            if bool(done.all()):
                break
            size = size / 2
        return result

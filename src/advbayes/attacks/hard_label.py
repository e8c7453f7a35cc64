"""An attack that sees labels only (after Chen, Jordan and Wainwright's HopSkipJump)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks.ascent import check_ball
from advbayes.attacks.balls import L2, Ball
from advbayes.attacks.gradients import Best, config, entry, score, where_rows
from advbayes.attacks.losses import for_rows, margin
from advbayes.types import Loss, Predictor

_ROWS = 4096  # inputs asked about in one call


@dataclass(frozen=True, repr=False)
class HardLabel:
    """From some broken input along the decision boundary towards x, asking only "broken or not?".

    The start is the nearest other example of the batch that is broken for this one, or else noise
    of growing size. At the boundary the normal is estimated from the answers at `probes` random
    points, then one step outwards and a bisection towards x. Examples whose boundary point is
    within the ball are done. `loss` only says what broken means.

    >>> predict = lambda x: torch.distributions.Categorical(
    ...     logits=torch.stack([x[:, 0], -x[:, 0]], 1)
    ... )
    >>> from advbayes import L2
    >>> attack = HardLabel(L2(1.2), rounds=10)
    >>> x_adv = attack(
    ...     predict,
    ...     torch.tensor([[1.0, 0.0]]),
    ...     torch.tensor([0]),
    ...     generator=torch.Generator().manual_seed(0),
    ... )
    >>> bool(x_adv[0, 0] < 0)
    True
    """

    ball: Ball
    rounds: int = 20
    probes: int = 50
    loss: Loss = margin
    stop_at_success: bool = True

    __repr__ = config

    def __post_init__(self) -> None:
        check_ball(self.ball)
        checks.count("rounds", self.rounds)
        checks.count("probes", self.probes, low=2)

    def __call__(
        self,
        predict: Predictor,
        x: Tensor,  # (B, *event)
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        if self.ball.eps == 0 or not len(x):
            return x.clone()
        x, y = entry(predict, self.ball, x, y, self.loss)
        _, broken = score(predict, self.loss, x, y)
        outside, started = self._starts(predict, x, y, broken, generator)
        rows = started.nonzero().squeeze(1)
        if len(rows):
            reached = self._walk(
                predict, for_rows(self.loss, rows), outside[rows], x[rows], y[rows], generator
            )
            outside = outside.index_copy(0, rows, reached)
        return where_rows(broken, x, self.ball.project(outside, x))

    def _asked(self, predict: Predictor, loss: Loss, points: Tensor, y: Tensor) -> Tensor:
        """Whether each point is broken, (N, B) for points (N, B, *event), a bounded number of rows
        at a time."""
        num, size = points.shape[:2]
        together = max(1, _ROWS // size)
        answers = []
        for start in range(0, num, together):
            part = points[start : start + together]
            index = torch.arange(size, device=y.device).repeat(len(part))
            answers.append(
                score(predict, for_rows(loss, index), part.flatten(0, 1), y[index])[1].view(
                    len(part), size
                )
            )
        return torch.cat(answers)

    def _allowed(self, points: Tensor, x: Tensor) -> Tensor:
        """In the box and untouched where masked; the radius does not count on the way."""
        points = self.ball.clip(points)
        return (
            points
            if self.ball.mask is None
            else torch.where(self.ball.mask.to(x.device), points, x)
        )

    def _starts(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor,
        broken: Tensor,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, Tensor]:
        """A broken input for each example where one was found, and where that is."""
        start, started = x, torch.zeros_like(broken)
        distance = torch.cdist(x.flatten(1), x.flatten(1))
        for _ in range(min(3, len(x) - 1)):  # a few rounds: the nearest example whose label differs
            open_rows = ~started & ~broken
            if not bool(open_rows.any()):
                return start, started
            other = torch.where(_differs(y), distance, torch.full_like(distance, math.inf))
            near, pick = other.min(dim=1)
            candidate = self._allowed(x[pick], x)
            hit = (
                open_rows
                & near.isfinite()
                & self._asked(predict, self.loss, candidate.unsqueeze(0), y)[0]
            )
            start, started = where_rows(hit, candidate, start), started | hit
            distance = distance.scatter(1, pick.unsqueeze(1), math.inf)
        unit = 1.0 if self.ball.scale is None else torch.as_tensor(self.ball.scale).to(x)
        for doubling in range(16):
            open_rows = ~started & ~broken
            if not bool(open_rows.any()):
                break
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
            candidate = self._allowed(x + 2.0 ** (doubling - 2) * self.ball.eps * noise * unit, x)
            hit = open_rows & self._asked(predict, self.loss, candidate.unsqueeze(0), y)[0]
            start, started = where_rows(hit, candidate, start), started | hit
        return start, started

    def _walk(
        self,
        predict: Predictor,
        whole_loss: Loss,
        start: Tensor,
        x: Tensor,
        y: Tensor,
        generator: torch.Generator | None,
    ) -> Tensor:
        """`rounds` of: find the boundary, estimate its normal, step outwards."""
        best = Best(
            start, -self.ball.norm(start - x), torch.ones(len(x), dtype=torch.bool, device=x.device)
        )
        active, loss = torch.arange(len(x), device=x.device), whole_loss
        point = start
        for number in range(1, self.rounds + 1):
            point = self._to_boundary(predict, loss, point, x[active], y[active])
            norm = self.ball.norm(point - x[active])
            best = best.put(
                active,
                best.pick(active).or_better(
                    Best(point, -norm, torch.ones_like(active, dtype=torch.bool))
                ),
            )
            if self.stop_at_success:
                stay = (best.value[active] < -self.ball.eps).nonzero().squeeze(1)
                active, point, norm = active[stay], point[stay], norm[stay]
                loss = for_rows(whole_loss, active)
                if not len(active):
                    break
            normal = self._normal(
                predict, loss, point, x[active], y[active], norm, number, generator
            )
            point = self._outwards(
                predict, loss, point, normal, x[active], y[active], norm / math.sqrt(number)
            )
        if len(active):
            point = self._to_boundary(predict, loss, point, x[active], y[active])
            norm = self.ball.norm(point - x[active])
            best = best.put(
                active,
                best.pick(active).or_better(
                    Best(point, -norm, torch.ones_like(active, dtype=torch.bool))
                ),
            )
        return best.x

    def _to_boundary(
        self,
        predict: Predictor,
        loss: Loss,
        outside: Tensor,
        x: Tensor,
        y: Tensor,
        rounds: int = 12,
    ) -> Tensor:
        """The last broken point on the way from a broken one to x: along the segment in L2, in a
        shrinking cube in Linf."""
        low, high = torch.zeros_like(self.ball.norm(x)), torch.ones_like(self.ball.norm(x))
        reach = self.ball.norm(outside - x)

        def at(fraction: Tensor) -> Tensor:
            part = fraction.view(-1, *[1] * (x.ndim - 1))
            if isinstance(self.ball, L2):
                return x + part * (outside - x)
            unit = 1.0 if self.ball.scale is None else torch.as_tensor(self.ball.scale).to(x)
            cube = (fraction * reach).view(-1, *[1] * (x.ndim - 1)) * unit
            return x + torch.minimum(torch.maximum(outside - x, -cube), cube)

        for _ in range(rounds):
            middle = 0.5 * (low + high)
            broken = self._asked(predict, loss, at(middle).unsqueeze(0), y)[0]
            high, low = torch.where(broken, middle, high), torch.where(broken, low, middle)
        return where_rows(high < 1, at(high), outside)

    def _normal(
        self,
        predict: Predictor,
        loss: Loss,
        point: Tensor,
        x: Tensor,
        y: Tensor,
        norm: Tensor,
        number: int,
        generator: torch.Generator | None,
    ) -> Tensor:
        """The boundary's normal from answers at random points around, their mean taken out to
        reduce the variance."""
        probes = int(self.probes * math.sqrt(number))
        shape = (probes, *point.shape)
        noise = torch.randn(shape, generator=generator, dtype=point.dtype, device=point.device)
        noise = noise / torch.linalg.vector_norm(noise.flatten(2), dim=2).view(
            probes, -1, *[1] * (x.ndim - 1)
        )
        unit = 1.0 if self.ball.scale is None else torch.as_tensor(self.ball.scale).to(x)
        # Wide enough to see the boundary's slope, narrow enough to see no bend.
        width = (
            (norm / math.sqrt(point[0].numel()))
            .clamp_min(1e-4 * self.ball.eps)
            .view(-1, *[1] * (x.ndim - 1))
        )
        around = self._allowed(point + width * noise * unit, x)
        answers = self._asked(predict, loss, around, y).to(x.dtype) * 2 - 1
        mean = answers.mean(0)
        weights = torch.where(mean.abs() < 1, answers - mean, answers).view(
            probes, -1, *[1] * (x.ndim - 1)
        )
        return (weights * (around - point)).mean(0)

    def _outwards(
        self,
        predict: Predictor,
        loss: Loss,
        point: Tensor,
        normal: Tensor,
        x: Tensor,
        y: Tensor,
        size: Tensor,
    ) -> Tensor:
        """A step along the normal, halved until the point is broken; stays where no step is."""
        result, done = point, torch.zeros(len(point), dtype=torch.bool, device=point.device)
        for _ in range(10):
            candidate = self._allowed(point + self.ball.ascend(normal, size), x)
            broken = self._asked(predict, loss, candidate.unsqueeze(0), y)[0] & ~done
            result, done = where_rows(broken, candidate, result), done | broken
            if bool(done.all()):
                break
            size = size / 2
        return result


def _differs(y: Tensor) -> Tensor:
    """Which pairs of examples have another y, (B, B)."""
    flat = y.reshape(len(y), -1)
    return (flat.unsqueeze(1) != flat.unsqueeze(0)).any(-1)

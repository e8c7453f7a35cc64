"""The robust radius: the nearest input that breaks a prediction (after Pintor et al.'s fast
minimum-norm attack)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks.ascent import check_ball, pgd
from advbayes.attacks.balls import Ball
from advbayes.attacks.gradients import (
    Best,
    config,
    entry,
    is_flat,
    loss_and_gradient,
    score,
    targets,
    where_rows,
)
from advbayes.attacks.losses import (
    ByLoss,
    DivergenceFrom,
    HasSuccess,
    MarginTo,
    PerExample,
    Toward,
    for_rows,
    margin,
    margins_to_wrong_classes,
    nll,
)
from advbayes.likelihoods import predicts_classes
from advbayes.types import Loss, Predictor


@dataclass(frozen=True, repr=False)
class MinimumNorm:
    """The nearest broken input within the ball, whose `eps` is the largest radius searched.

    Ascent on the loss inside a radius that shrinks while the example is broken and grows while it
    is not; until it breaks the radius is the linear guess |loss| / |gradient|. A bisection towards
    x ends it. `loss` must be positive exactly where the example is broken: `margin`, or
    `Exceeding(squared_error, t)` in regression. With `margin` the `targets` likeliest wrong classes
    are tried one by one as well: the class that comes nearest in probability need not be the
    nearest in distance. What is still whole then meets PGD in the whole ball, and a search from the
    point that it breaks. Where nothing breaks, the call returns the point of largest loss and
    `radius` says infinity.

    >>> predict = lambda x: torch.distributions.Categorical(
    ...     logits=torch.stack([x[:, 0], -x[:, 0]], 1)
    ... )
    >>> from advbayes import L2
    >>> MinimumNorm(L2(5.0)).radius(
    ...     predict, torch.tensor([[1.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 0])
    ... ).round(decimals=3)
    tensor([1., inf])
    """

    ball: Ball
    loss: Loss = margin
    steps: int = 100
    restarts: int = 1
    targets: int = 9  # at most; there are no more than the wrong classes
    shrink: float = 0.05  # how fast the radius follows, first; falls to a fiftieth of it

    __repr__ = config

    def __post_init__(self) -> None:
        check_ball(self.ball)
        if not callable(self.loss):
            raise checks.InputTypeError(
                f"loss must be a loss such as margin, got {checks.describe(self.loss)}"
            )
        checks.count("steps", self.steps)
        checks.count("restarts", self.restarts)
        checks.count("targets", self.targets, low=0)
        checks.number("shrink", self.shrink, low=0, high=1, open_low=True, open_high=True)

    def radius(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # (B,)
        """The norm of the smallest change found that breaks each example: 0 if it needs none,
        infinity if none was found."""
        y = targets(predict, x, y)
        x_adv = self(predict, x, y, generator=generator)
        if not len(x):
            return x.new_zeros(0)
        _, broken = score(predict, self.loss, x_adv, y)
        return torch.where(
            broken, self.ball.norm(x_adv - x.detach()), torch.full_like(self.ball.norm(x), math.inf)
        )

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
        self._refuse_unbreakable(predict, x)
        value, broken, gradient = loss_and_gradient(predict, self.loss, x, y)
        best = Best(x, value, broken)
        rows = (~broken).nonzero().squeeze(1)  # what is broken as it stands has radius 0
        for restart in range(self.restarts):
            if not len(rows):
                break
            centre, loss = x[rows], for_rows(self.loss, rows)
            start = centre if restart == 0 else self.ball.random(centre, generator=generator)
            flat = is_flat(gradient[rows])
            if restart == 0 and bool(flat.any()):
                start = where_rows(flat, self.ball.random(centre, generator=generator), centre)
            reached = self._run(predict, loss, start, centre, y[rows])
            best = best.put(rows, _nearer(self.ball, best.pick(rows), reached, centre))
        for loss in self._directed_losses(predict, x[rows], y[rows]):
            reached = self._run(predict, loss, x[rows], x[rows], y[rows])
            # compared by this attack's loss
            value, hit = score(predict, self.loss, reached.x, y[rows])
            best = best.put(
                rows, _nearer(self.ball, best.pick(rows), Best(reached.x, value, hit), x[rows])
            )
        return self._from_far(predict, best, x, y, generator).x

    def _refuse_unbreakable(self, predict: Predictor, x: Tensor) -> None:
        """A loss by which nothing is ever broken would call every example safe."""
        with torch.no_grad():
            prediction = predict(x[:1])
        if not _can_break(self.loss, predicts_classes(prediction)):
            raise checks.InputTypeError(
                f"loss must say when an example is broken, such as Exceeding(squared_error, 1.0), "
                f"got {checks.describe(self.loss)} for a prediction of type "
                f"{type(prediction).__name__}"
            )

    def _from_far(
        self,
        predict: Predictor,
        best: Best,
        x: Tensor,
        y: Tensor,
        generator: torch.Generator | None,
    ) -> Best:
        """What no search broke is tried with the whole budget, then followed back from there."""
        for whole_loss in (self.loss, nll) if self.loss is margin else (self.loss,):
            rows = (~best.broken).nonzero().squeeze(1)
            if not len(rows):
                break
            attack = pgd(self.ball, self.steps, for_rows(whole_loss, rows), stop_at_success=True)
            far = attack(predict, x[rows], y[rows], generator=generator)
            found = Best(far, *score(predict, for_rows(self.loss, rows), far, y[rows]))
            best = best.put(rows, _nearer(self.ball, best.pick(rows), found, x[rows]))
            rows = rows[found.broken]
            if len(rows):
                loss, centre = for_rows(self.loss, rows), x[rows]
                near = self._bisect(predict, loss, best.pick(rows), centre, y[rows])
                reached = self._run(predict, loss, near.x, centre, y[rows])
                best = best.put(rows, _nearer(self.ball, near, reached, centre))
        return best

    def _directed_losses(self, predict: Predictor, x: Tensor, y: Tensor) -> list[MarginTo]:
        """Margins to the likeliest wrong classes; with two classes that is the margin itself."""
        if self.loss is not margin or not self.targets or not len(x):
            return []
        with torch.no_grad():
            prediction = predict(x)
        assert predicts_classes(prediction)  # margin has refused everything else
        if prediction.logits.shape[1] == 2:
            return []
        return margins_to_wrong_classes(prediction, y, self.targets)

    def _run(self, predict: Predictor, loss: Loss, start: Tensor, x: Tensor, y: Tensor) -> Best:
        """One search; the smallest broken point, or the one of largest loss."""
        point, limit = start, x.new_full((len(x),), self.ball.eps)
        radius, smallest = limit, torch.full_like(limit, math.inf)
        best: Best | None = None
        for step in range(self.steps):
            fading = 0.5 * (1 + math.cos(math.pi * step / self.steps))
            value, broken, gradient = loss_and_gradient(predict, loss, point, y)
            norm = self.ball.norm(point - x)
            here = Best(point, value, broken)
            best = here if best is None else _nearer(self.ball, best, here, x)
            smallest = torch.where(broken, torch.minimum(smallest, norm), smallest)
            rate = self.shrink * (0.02 + 0.98 * fading)
            # Features at the box that would leave it take their share of the steepest move and gain
            # nothing; per unit of the rest a step gains <gradient, free> / |free|. They stay in the
            # step, where the projection weighs them, and the step is longer instead.
            gradient = torch.nan_to_num(gradient, nan=0.0, posinf=1e18, neginf=-1e18)
            free = self.ball.unblocked(self.ball.ascend(gradient, 1.0), point)
            kept = self.ball.norm(free)
            gain = (gradient * free).flatten(1).sum(1) / kept
            # no gain: nowhere near
            guess = norm + torch.nan_to_num(value.abs() / gain, nan=math.inf)
            outward = torch.where(smallest.isinf(), guess, radius) * (1 + rate)
            radius = torch.where(broken, torch.minimum(radius, smallest) * (1 - rate), outward)
            radius = torch.minimum(
                torch.nan_to_num(radius, nan=self.ball.eps), torch.minimum(limit, smallest)
            )
            size = radius.clamp_min(0.01 * norm) * (0.02 + 0.98 * fading)
            point = point + self.ball.ascend(gradient, size / kept.clamp_min(0.01))
            point = _of_radius(self.ball, radius, x).project(point, x)
        assert best is not None
        best = _nearer(self.ball, best, Best(point, *score(predict, loss, point, y)), x)
        return self._bisect(predict, loss, best, x, y)

    def _bisect(
        self, predict: Predictor, loss: Loss, best: Best, x: Tensor, y: Tensor, rounds: int = 12
    ) -> Best:
        """Between x and the broken point, on the straight line."""
        low, high, far = x.new_zeros(len(x)), x.new_ones(len(x)), best.x
        for _ in range(rounds):
            middle = 0.5 * (low + high)
            point = self.ball.project(x + middle.view(-1, *[1] * (x.ndim - 1)) * (far - x), x)
            here = Best(point, *score(predict, loss, point, y))
            best = _nearer(self.ball, best, here, x)
            high, low = (
                torch.where(here.broken, middle, high),
                torch.where(here.broken, low, middle),
            )
        return best


def _nearer(ball: Ball, this: Best, other: Best, x: Tensor) -> Best:
    """Broken first, then the smaller norm; among the unbroken the larger loss."""
    near = ball.norm(other.x - x) < ball.norm(this.x - x)
    better = (other.broken & ~this.broken) | (other.broken & this.broken & near)
    better |= ~other.broken & ~this.broken & (other.value > this.value)
    return Best(
        where_rows(better, other.x, this.x),
        torch.where(better, other.value, this.value),
        this.broken | other.broken,
    )


def _of_radius(ball: Ball, radius: Tensor, x: Tensor) -> Ball:
    """The ball with a radius of its own for each example: their units differ in place of eps."""
    unit = radius.clamp_min(torch.finfo(radius.dtype).tiny).view(-1, *[1] * (x.ndim - 1))
    return replace(
        ball,
        eps=1.0,
        scale=unit if ball.scale is None else unit * torch.as_tensor(ball.scale).to(x),
    )


def _can_break(loss: Loss, classes: bool) -> bool:
    """Whether there can be broken examples by this loss: with classes by default, in regression if
    it says when."""
    if isinstance(loss, (ByLoss, DivergenceFrom)):
        return False
    if isinstance(loss, PerExample):
        return any(_can_break(part, classes) for part in loss.losses)
    return classes or (isinstance(loss, HasSuccess) and not isinstance(loss, Toward))

"""The robust radius: the nearest input that breaks a prediction (after Pintor et al.'s fast
minimum-norm attack)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks.ascent import pgd
from advbayes.attacks.balls import Ball, per_row
from advbayes.attacks.gradients import is_flat, score, targets, where_rows
from advbayes.attacks.losses import (
    ByLoss,
    DivergenceFrom,
    HasSuccess,
    MarginTo,
    MeanOf,
    PerExample,
    Toward,
    margin,
    margins_to_wrong_classes,
    nll,
)
from advbayes.attacks.search import Best, Problem, Search, check_settings
from advbayes.likelihoods import predicts_classes
from advbayes.types import Loss, Predictor


@dataclass(frozen=True, repr=False)
class MinimumNorm(Search):
    """The nearest broken input within the ball, whose `eps` is the largest radius searched.

    Ascent on the loss inside a radius that shrinks while the example is broken and grows while it
    is not; until it breaks the radius is the linear guess |loss| / |gradient|. A bisection towards
    x ends it. `loss` must be positive exactly where the example is broken: `margin`, or
    `Exceeding(squared_error, t)` in regression. With `margin` the `targets` likeliest wrong classes
    are tried one by one as well: the class that comes nearest in probability need not be the
    nearest in distance. In regression a search begins where each of as many outputs is largest, and
    where it is least: an ascent from x stays on the side of y on which the prediction is. What is
    still whole then meets PGD in the whole ball, and a search from the point that it breaks. Where
    nothing breaks, the call returns the point of largest loss and `radius` says infinity.

    >>> predict = lambda x: torch.distributions.Categorical(logits=torch.cat([x, -x], 1))
    >>> from advbayes import L2
    >>> x, y = torch.tensor([[1.0], [9.0]]), torch.tensor([0, 0])
    >>> MinimumNorm(L2(5.0)).radius(predict, x, y).round(decimals=3)
    tensor([1., inf])
    """

    ball: Ball
    loss: Loss = margin
    steps: int = 100
    restarts: int = 1
    targets: int = 9  # at most; there are no more than the wrong classes, or outputs
    shrink: float = 0.05  # how fast the radius follows, first; falls to a fiftieth of it

    def __post_init__(self) -> None:
        check_settings(self, steps=1, restarts=1, targets=0)
        checks.number("shrink", self.shrink, low=0, high=1, open_low=True, open_high=True)

    def radius(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # (B,)
        """The least norm that breaks each example: 0 if it needs none, infinity if none was met."""
        y = targets(predict, x, y)
        x_adv = self(predict, x, y, generator=generator)
        if not len(x):
            return x.new_zeros(0)
        _, broken = score(predict, self.loss, x_adv, y)
        return self.ball.norm(x_adv - x.detach()).masked_fill(~broken, math.inf)

    def _search(self, problem: Problem) -> Tensor:
        outputs = self._num_outputs(problem.predict, problem.x)
        best, gradient = problem.climb(problem.x)
        rows = best.unbroken  # what is broken as it stands has radius 0
        if len(rows):
            whole = problem.rows(rows)
            for reached in self._searches(whole, is_flat(gradient[rows]), outputs):
                best = best.put(rows, _nearer(best.pick(rows), reached, whole))
        return self._from_far(problem, best).x

    def _searches(self, problem: Problem, flat: Tensor, outputs: int) -> Iterator[Best]:
        """From x (at random where it is flat), from random points, towards each class or output."""
        for restart in range(self.restarts):
            start = problem.x
            if restart:
                start = problem.random()
            elif bool(flat.any()):
                start = where_rows(flat, problem.random(), start)
            yield self._run(problem, start)
        for loss in self._directed_losses(problem):
            # compared by this attack's loss
            yield problem.score(self._run(replace(problem, loss=loss), problem.x).x)
        for output in range(min(self.targets, outputs)):
            for sign in (1, -1):
                attack = pgd(self.ball, max(1, self.steps // 4), MeanOf(output, sign))
                far = attack(problem.predict, problem.x, problem.y, generator=problem.generator)
                yield self._back(problem, problem.score(far))

    def _num_outputs(self, predict: Predictor, x: Tensor) -> int:
        """Of a regression; 0 for classes. A loss by which nothing is ever broken is refused: it
        would call every example safe."""
        with torch.no_grad():
            prediction = predict(x[:1])
        classes = predicts_classes(prediction)
        if not _can_break(self.loss, classes):
            raise checks.InputTypeError(
                f"loss must say when an example is broken, such as Exceeding(squared_error, 1.0), "
                f"got {checks.describe(self.loss)} for a prediction of type "
                f"{type(prediction).__name__}"
            )
        return 0 if classes else prediction.mean[0].numel()

    def _from_far(self, problem: Problem, best: Best) -> Best:
        """What no search broke is tried with the whole budget, then followed back from there."""
        for loss in (self.loss, nll) if self.loss is margin else (self.loss,):
            rows = best.unbroken
            if not len(rows):
                break
            whole = problem.rows(rows)
            attack = pgd(self.ball, self.steps, whole.on(loss).loss, stop_at_success=True)
            far = whole.score(attack(whole.predict, whole.x, whole.y, generator=whole.generator))
            best = best.put(rows, _nearer(best.pick(rows), far, whole))
            rows = rows[far.broken]
            if len(rows):
                best = best.put(rows, self._back(problem.rows(rows), best.pick(rows)))
        return best

    def _back(self, problem: Problem, far: Best) -> Best:
        """A search from where a point that is broken is nearest on the line to x."""
        near = self._bisect(problem, far)
        return _nearer(near, self._run(problem, near.x), problem)

    def _directed_losses(self, problem: Problem) -> list[MarginTo]:
        """Margins to the likeliest wrong classes; with two classes that is the margin itself."""
        if self.loss is not margin or not self.targets:
            return []
        with torch.no_grad():
            prediction = problem.predict(problem.x)
        assert predicts_classes(prediction)  # margin has refused everything else
        if prediction.logits.shape[1] == 2:
            return []
        return margins_to_wrong_classes(prediction, problem.y, self.targets)

    def _run(self, problem: Problem, start: Tensor) -> Best:
        """One search; the smallest broken point, or the one of largest loss."""
        x, point = problem.x, start
        dtype = torch.promote_types(x.dtype, torch.float32)  # bfloat16 rounds eps
        radius = limit = x.new_full((len(x),), self.ball.eps, dtype=dtype)
        smallest = torch.full_like(limit, math.inf)
        best: Best | None = None
        for step in range(self.steps):
            fading = 0.5 * (1 + math.cos(math.pi * step / self.steps))
            here, gradient = problem.climb(point)
            norm = self.ball.norm(point - x)
            best = here if best is None else _nearer(best, here, problem)
            smallest = torch.where(here.broken, torch.minimum(smallest, norm), smallest)
            rate = self.shrink * (0.02 + 0.98 * fading)
            # Features at the box that would leave it take their share of the steepest move and gain
            # nothing; per unit of the rest a step gains <gradient, free> / |free|. They stay in the
            # step, where the projection weighs them, and the step is longer instead.
            gradient = torch.nan_to_num(gradient, nan=0.0, posinf=1e18, neginf=-1e18)
            free = self.ball.unblocked(self.ball.ascend(gradient, 1.0), point)
            kept = self.ball.norm(free)
            gain = (gradient * free).flatten(1).sum(1) / kept
            # no gain: nowhere near
            guess = norm + torch.nan_to_num(here.value.abs() / gain, nan=math.inf)
            outward = torch.where(smallest.isinf(), guess, radius) * (1 + rate)
            radius = torch.where(here.broken, torch.minimum(radius, smallest) * (1 - rate), outward)
            radius = torch.minimum(
                torch.nan_to_num(radius, nan=self.ball.eps), torch.minimum(limit, smallest)
            )
            size = radius.clamp_min(0.01 * norm) * (0.02 + 0.98 * fading)
            point = point + self.ball.ascend(gradient, size / kept.clamp_min(0.01))
            point = _of_radius(self.ball, radius, x).project(point, x)
        assert best is not None
        return self._bisect(problem, _nearer(best, problem.score(point), problem))

    def _bisect(self, problem: Problem, best: Best, rounds: int = 12) -> Best:
        """Between x and the broken point, on the straight line."""
        x, far = problem.x, best.x
        low, high = x.new_zeros(len(x)), x.new_ones(len(x))
        for _ in range(rounds):
            middle = 0.5 * (low + high)
            here = problem.score(self.ball.project(x + per_row(middle, x) * (far - x), x))
            best = _nearer(best, here, problem)
            high = torch.where(here.broken, middle, high)
            low = torch.where(here.broken, low, middle)
        return best


def _nearer(this: Best, other: Best, problem: Problem) -> Best:
    """Broken first, then the smaller norm; among the unbroken the larger loss."""
    near = problem.ball.norm(other.x - problem.x) < problem.ball.norm(this.x - problem.x)
    better = (other.broken & ~this.broken) | (other.broken & this.broken & near)
    better |= ~other.broken & ~this.broken & (other.value > this.value)
    return this.replaced(better, other)


def _of_radius(ball: Ball, radius: Tensor, x: Tensor) -> Ball:
    """The ball with a radius of its own for each example: their units differ in place of eps."""
    unit = per_row(radius.clamp_min(torch.finfo(radius.dtype).tiny), x)
    return replace(ball, eps=1.0, scale=unit * ball.units(unit))


def _can_break(loss: Loss, classes: bool) -> bool:
    """Whether the loss can call examples broken: of classes by default, else if it says when."""
    match loss:
        case ByLoss() | DivergenceFrom():
            return False
        case PerExample():
            return any(_can_break(part, classes) for part in loss.losses)
        case HasSuccess() if not isinstance(loss, Toward):
            return True
    return classes

"""Ascent whose step sizes adapt to each example (after Croce and Hein's APGD)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import checks
from advbayes.attacks.ascent import check_ball
from advbayes.attacks.balls import Ball
from advbayes.attacks.gradients import (
    Best,
    config,
    entry,
    is_flat,
    loss_and_gradient,
    move,
    score,
    where_rows,
)
from advbayes.attacks.losses import (
    MeanAlong,
    MeanOf,
    PerExample,
    for_rows,
    margin,
    margins_to_wrong_classes,
)
from advbayes.likelihoods import predicts_classes
from advbayes.seeds import drawn
from advbayes.types import Loss, Predictor


@dataclass(frozen=True, repr=False)
class APGD:
    """Ascent with momentum from a step of 2 eps; an example that stops improving returns to its
    best point with half the step.

    The first run starts at x (whose first step is the one-step point), further restarts at random;
    where the gradient at x vanishes, the first does too. `targets` > 0 adds directed runs: towards
    that many wrong classes, likeliest at x first, on the loss log p(class) - log p(y); in
    regression, along that many outputs, each up and down, and with several outputs also along twice
    as many random directions of them. More than two directions get a few of the steps each, then
    the two that came nearest get all of them. On a linear model with all classes tried this is the
    exact optimum. With `stop_at_success`, later runs see only what is not yet broken, and broken
    examples leave within a run too.

    >>> predict = lambda x: torch.distributions.Categorical(
    ...     logits=torch.stack([x[:, 0], -x[:, 0]], 1)
    ... )
    >>> from advbayes import L2
    >>> APGD(L2(0.5), steps=10)(predict, torch.tensor([[1.0]]), torch.tensor([0]))
    tensor([[0.5000]])
    """

    ball: Ball
    loss: Loss = margin
    steps: int = 100
    restarts: int = 1
    targets: int = 0
    stop_at_success: bool = False
    momentum: float = 0.25
    # the share of steps between two checks that must improve, or else the step is halved
    progress: float = 0.75

    __repr__ = config

    def __post_init__(self) -> None:
        check_ball(self.ball)
        if not callable(self.loss):
            raise checks.InputTypeError(
                f"loss must be a loss such as nll, got {checks.describe(self.loss)}"
            )
        checks.count("steps", self.steps)
        checks.count("restarts", self.restarts, low=0)
        checks.count("targets", self.targets, low=0)
        if not self.restarts + self.targets:
            raise checks.InputError(
                "restarts and targets must not both be 0: there would be no run"
            )
        checks.number("momentum", self.momentum, low=0, high=1, open_high=True)
        checks.number("progress", self.progress, low=0, high=1)

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
        best = Best(x, *score(predict, self.loss, x, y))
        for run in range(self.restarts):
            rows = self._open(best)
            if len(rows):
                start = x[rows] if run == 0 else self.ball.random(x[rows], generator=generator)
                reached = self._run(
                    predict,
                    for_rows(self.loss, rows),
                    start,
                    x[rows],
                    y[rows],
                    self.steps,
                    generator,
                )
                best = best.put(rows, best.pick(rows).or_better(reached))
        return (self._directed_runs(predict, best, x, y, generator) if self.targets else best).x

    def _open(self, best: Best) -> Tensor:
        """The rows that a further run sees."""
        return (
            (~best.broken if self.stop_at_success else torch.ones_like(best.broken))
            .nonzero()
            .squeeze(1)
        )

    def _directed_losses(
        self, prediction: Distribution, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Loss, ...]:
        """Each another way of leaving y: to one of the likeliest wrong classes; one of the outputs
        up, or down.

        The largest |r + W d|^2 over the ball lies at the d that is best along u = r + W d: it is
        found from a u of its own neighbourhood, of which one for each output is too few.
        """
        if predicts_classes(prediction):
            return tuple(margins_to_wrong_classes(prediction, y, self.targets))
        outputs = prediction.mean[0].numel()
        each = tuple(MeanOf(k, sign) for k in range(min(self.targets, outputs)) for sign in (1, -1))
        if outputs == 1:
            return each
        shape = (len(y), 2 * len(each), outputs)
        directions = drawn(torch.randn, shape, generator, device=prediction.mean.device)
        return (*each, *map(MeanAlong, directions.unbind(1)))

    def _directed_runs(
        self,
        predict: Predictor,
        best: Best,
        x: Tensor,
        y: Tensor,
        generator: torch.Generator | None,
    ) -> Best:
        """A short run on each directed loss, then whole ones from the two that came nearest by this
        attack's own loss."""
        with torch.no_grad():
            prediction = predict(x)
        losses = self._directed_losses(prediction, y, generator)

        def run(best: Best, loss: Loss, start: Tensor, steps: int) -> tuple[Best, Best]:
            rows = self._open(best)
            if not len(rows):
                return best, best
            reached = self._run(
                predict, for_rows(loss, rows), start[rows], x[rows], y[rows], steps, generator
            )
            here = reached
            if loss is not self.loss:
                own = for_rows(self.loss, rows)
                here = Best(reached.x, *score(predict, own, reached.x, y[rows]))
            return best.put(rows, best.pick(rows).or_better(here)), best.put(rows, here)

        if len(losses) <= 2:
            for directed in losses:
                best, _ = run(best, directed, x, self.steps)
            return best
        classes, ends = predicts_classes(prediction), []
        for directed in losses:
            if classes:
                best, end = run(best, directed, x, max(1, self.steps // 3))
            else:  # a direction says where to begin, not where to end
                few = max(1, self.steps // 16)
                begin = self._run(predict, directed, x, x, y, few, generator)
                best, end = run(best, self.loss, begin.x, few)
            ends.append(end)
        points, each = torch.stack([end.x for end in ends]), torch.arange(len(x), device=x.device)
        for pick in torch.stack([end.value for end in ends]).topk(2, dim=0).indices:
            loss = PerExample(losses, pick) if classes else self.loss
            best, _ = run(best, loss, points[pick, each], self.steps)
        return best

    def _run(
        self,
        predict: Predictor,
        whole_loss: Loss,
        start: Tensor,
        x: Tensor,
        y: Tensor,
        steps: int,
        generator: torch.Generator | None,
    ) -> Best:
        """One ascent from `start`; rows are dropped from every tensor of the state when their
        example is broken."""
        loss, kept = whole_loss, torch.arange(len(x), device=x.device)
        value, broken, gradient = loss_and_gradient(predict, loss, start, y)
        best = Best(start, value, broken)  # what is returned: broken first
        # where to go back to: the largest loss alone
        peak_x, peak, peak_gradient = (start, value, gradient)
        flat = is_flat(gradient)
        point = (
            where_rows(flat, self.ball.random(x, generator=generator), start)
            if bool(flat.any())
            else start
        )
        before, step = point, torch.full_like(value, 2 * self.ball.eps)
        rises, last_value = torch.zeros_like(value), value
        peak_at_check, halved_at_check = peak, torch.ones_like(broken)
        check, since = max(1, int(0.22 * steps)), 0
        for iteration in range(steps):
            if self.stop_at_success and bool(broken.any()):
                stay = (~best.broken[kept]).nonzero().squeeze(1)
                if not len(stay):
                    break
                kept, x, y, step = kept[stay], x[stay], y[stay], step[stay]
                point, before, gradient = point[stay], before[stay], gradient[stay]
                rises, last_value = rises[stay], last_value[stay]
                peak_x, peak, peak_gradient = peak_x[stay], peak[stay], peak_gradient[stay]
                peak_at_check, halved_at_check = peak_at_check[stay], halved_at_check[stay]
                loss = for_rows(whole_loss, kept)
            proposal = move(self.ball, point, gradient, step, x)
            if iteration and self.momentum:
                mixed = (
                    point
                    + (1 - self.momentum) * (proposal - point)
                    + self.momentum * (point - before)
                )
                proposal = self.ball.project(mixed, x)
            point, before = proposal, point
            value, broken, gradient = loss_and_gradient(predict, loss, point, y)
            best = best.put(kept, best.pick(kept).or_better(Best(point, value, broken)))
            rises, last_value = rises + (value > last_value), value
            higher = value > peak
            peak_x, peak_gradient = (
                where_rows(higher, point, peak_x),
                where_rows(higher, gradient, peak_gradient),
            )
            peak = torch.where(higher, value, peak)
            since += 1
            if since == check:
                stuck = (rises <= self.progress * since) | (
                    ~halved_at_check & (peak <= peak_at_check)
                )
                step = torch.where(stuck, step / 2, step)
                point, gradient = (
                    where_rows(stuck, peak_x, point),
                    where_rows(stuck, peak_gradient, gradient),
                )
                peak_at_check, halved_at_check = peak, stuck
                rises, since = torch.zeros_like(rises), 0
                check = max(check - max(1, int(0.03 * steps)), max(1, int(0.06 * steps)))
        return best

"""Ascent whose step sizes adapt to each example (after Croce and Hein's APGD)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import checks
from advbayes.attacks.balls import Ball
from advbayes.attacks.gradients import is_flat, where_rows
from advbayes.attacks.losses import MeanAlong, MeanOf, PerExample, margin, margins_to_wrong_classes
from advbayes.attacks.search import Best, Problem, Search, check_settings
from advbayes.likelihoods import predicts_classes
from advbayes.seeds import drawn
from advbayes.types import Loss


@dataclass(frozen=True, repr=False)
class APGD(Search):
    """Ascent with momentum from a step of 2 eps, halved, back at the best point, where it stalls.

    The first run starts at x (whose first step is the one-step point), further restarts at random;
    where the gradient at x vanishes, the first does too. `targets` > 0 adds directed runs: towards
    that many wrong classes, likeliest at x first, on the loss log p(class) - log p(y); in
    regression, along that many outputs, each up and down, and with several outputs also along twice
    as many random directions of them. More than two directions get a few of the steps each, then
    the two that came nearest get all of them. On a linear model with all classes tried this is the
    exact optimum. With `stop_at_success`, later runs see only what is not yet broken, and broken
    examples leave within a run too.

    >>> predict = lambda x: torch.distributions.Categorical(logits=torch.cat([x, -x], 1))
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

    def __post_init__(self) -> None:
        check_settings(self, steps=1, restarts=0, targets=0)
        if not self.restarts + self.targets:
            raise checks.InputError("restarts and targets must not both be 0, got no run")
        checks.number("momentum", self.momentum, low=0, high=1, open_high=True)
        checks.number("progress", self.progress, low=0, high=1)

    def _search(self, problem: Problem) -> Tensor:
        def run(number: int, part: Problem, so_far: Best) -> Best:
            return self._run(part, part.random() if number else part.x, self.steps)

        best = problem.in_turn(run, self.restarts, self.stop_at_success)
        return (self._directed_runs(problem, best) if self.targets else best).x

    def _directed_losses(
        self, prediction: Distribution, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Loss, ...]:
        """Ways of leaving y: to one of the likeliest wrong classes, or one output up or down.

        The largest |r + W d|^2 over the ball lies at the d that is best along u = r + W d: ascent
        reaches it from a nearby u, and one u for each output is too few.
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

    def _directed_runs(self, problem: Problem, best: Best) -> Best:
        """Short runs on each directed loss, then whole ones from the two ends of largest loss."""
        with torch.no_grad():
            prediction = problem.predict(problem.x)
        losses = self._directed_losses(prediction, problem.y, problem.generator)
        everything = torch.arange(len(problem), device=problem.x.device)

        def run(best: Best, loss: Loss, start: Tensor, steps: int) -> tuple[Best, Best]:
            rows = best.unbroken if self.stop_at_success else everything
            if not len(rows):
                return best, best
            part = problem.rows(rows)
            end = self._run(part.on(loss), start[rows], steps)
            if loss is not self.loss:
                end = part.score(end.x)
            return best.improved(rows, end), best.put(rows, end)

        if len(losses) <= 2:
            for directed in losses:
                best, _ = run(best, directed, problem.x, self.steps)
            return best
        classes, ends = predicts_classes(prediction), []
        for directed in losses:
            if classes:
                best, end = run(best, directed, problem.x, max(1, self.steps // 3))
            else:  # a direction says where to begin, not where to end
                few = max(1, self.steps // 16)
                begin = self._run(problem.on(directed), problem.x, few)
                best, end = run(best, self.loss, begin.x, few)
            ends.append(end)
        points = torch.stack([end.x for end in ends])
        for pick in torch.stack([end.value for end in ends]).topk(2, dim=0).indices:
            loss = PerExample(losses, pick) if classes else self.loss
            best, _ = run(best, loss, points[pick, everything], self.steps)
        return best

    def _run(self, problem: Problem, start: Tensor, steps: int) -> Best:
        """One ascent from `start`; broken examples leave every tensor of the state."""
        here, kept = problem, torch.arange(len(problem), device=start.device)
        reached, gradient = here.climb(start)
        best = reached  # what is returned: broken first
        # where to go back to: the largest loss alone
        peak_x, peak, peak_gradient = start, reached.value, gradient
        flat = is_flat(gradient)
        point = where_rows(flat, here.random(), start) if bool(flat.any()) else start
        before, step = point, torch.full_like(peak, 2 * self.ball.eps)
        rises, last_value = torch.zeros_like(peak), peak
        peak_at_check, halved_at_check = peak, torch.ones_like(best.broken)
        check, since = max(1, int(0.22 * steps)), 0
        for iteration in range(steps):
            if self.stop_at_success and bool(reached.broken.any()):
                stay = best.pick(kept).unbroken
                if not len(stay):
                    break
                kept, step, point, before, gradient, rises, last_value = (
                    state[stay]
                    for state in (kept, step, point, before, gradient, rises, last_value)
                )
                peak_x, peak, peak_gradient, peak_at_check, halved_at_check = (
                    state[stay]
                    for state in (peak_x, peak, peak_gradient, peak_at_check, halved_at_check)
                )
                here = problem.rows(kept)
            proposal = here.move(point, gradient, step)
            if iteration and self.momentum:
                mixed = (
                    point
                    + (1 - self.momentum) * (proposal - point)
                    + self.momentum * (point - before)
                )
                proposal = self.ball.project(mixed, here.x)
            point, before = proposal, point
            reached, gradient = here.climb(point)
            best = best.improved(kept, reached)
            rises, last_value = rises + (reached.value > last_value), reached.value
            higher = reached.value > peak
            peak_x = where_rows(higher, point, peak_x)
            peak_gradient = where_rows(higher, gradient, peak_gradient)
            peak = torch.where(higher, reached.value, peak)
            since += 1
            if since == check:
                stuck = (rises <= self.progress * since) | (
                    ~halved_at_check & (peak <= peak_at_check)
                )
                step = torch.where(stuck, step / 2, step)
                point = where_rows(stuck, peak_x, point)
                gradient = where_rows(stuck, peak_gradient, gradient)
                peak_at_check, halved_at_check = peak, stuck
                rises, since = torch.zeros_like(rises), 0
                check = max(check - max(1, int(0.03 * steps)), max(1, int(0.06 * steps)))
        return best

"""Projected gradient ascent, with the paper's attacks as settings (section 4, SM-5)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from advbayes import checks
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
from advbayes.attacks.losses import entropy, for_rows, nll
from advbayes.types import Loss, Predictor

_ROWS = 1024  # restarts share a batch up to this many rows


@dataclass(frozen=True, repr=False)
class PGD:
    """Projected gradient ascent on each stage's loss in turn; the best iterate is returned.

    The first step goes from x to the edge of the ball (the one-step point), so that more steps are
    never weaker than one; where the gradient at x vanishes the start is drawn at random instead.
    Further restarts start at random. An iterate is better if it is broken where the best so far is
    not, or else has the larger loss. A later stage starts at the best of the one before and keeps
    its successes. One step in all is the paper's one-step attack, returned as it is. With
    `stop_at_success` broken examples leave the batch: the same accuracy for less work, but not the
    largest loss.

    >>> predict = lambda x: torch.distributions.Categorical(
    ...     logits=torch.stack([x[:, 0], -x[:, 0]], 1)
    ... )
    >>> from advbayes import L2
    >>> PGD(L2(0.5), stages=((nll, 10),))(predict, torch.tensor([[1.0]]), torch.tensor([0]))
    tensor([[0.5000]])
    """

    ball: Ball
    stages: tuple[tuple[Loss, int], ...] = ((nll, 50),)
    # in units of the norm; absent: `step_length`, anew in each stage
    step_size: float | None = None
    restarts: int = 1
    stop_at_success: bool = False

    __repr__ = config

    def __post_init__(self) -> None:
        check_ball(self.ball)
        try:
            object.__setattr__(self, "stages", tuple((loss, steps) for loss, steps in self.stages))
        except (TypeError, ValueError):
            raise checks.InputTypeError(
                f"stages must hold (loss, steps) pairs, got {checks.describe(self.stages)}"
            ) from None
        if not self.stages:
            raise checks.InputError("stages must hold at least one (loss, steps) pair, got none")
        for loss, steps in self.stages:
            if not callable(loss):
                raise checks.InputTypeError(
                    f"stages must hold (loss, steps) pairs, got {checks.describe(loss)} for a loss"
                )
            checks.count("steps", steps)
        if self.step_size is not None:
            checks.number("step_size", self.step_size, low=0, open_low=True)
        checks.count("restarts", self.restarts)

    @property
    def is_one_step(self) -> bool:
        """Whether this is the paper's one-step attack."""
        return len(self.stages) == 1 and self.stages[0][1] == 1 and self.restarts == 1

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
        x, y = entry(predict, self.ball, x, y, *(loss for loss, _ in self.stages))
        if self.is_one_step:
            gradient = loss_and_gradient(predict, self.stages[0][0], x, y)[2]
            return move(self.ball, x, gradient, self.ball.eps, x)
        best: Best | None = None
        if len(self.stages) > 1:  # iterates are ranked by the last stage's loss
            best = Best(x, *score(predict, self.stages[-1][0], x, y))
        together = max(1, _ROWS // len(x))
        for first in range(0, self.restarts, together):
            num = min(together, self.restarts - first)
            rows = torch.arange(len(x), device=x.device)
            if self.stop_at_success and best is not None:
                rows = rows[~best.broken]
                if not len(rows):
                    break
            whole = len(rows) == len(x)
            found = self._restarts(
                predict,
                x if whole else x[rows],
                y if whole else y[rows],
                rows,
                first,
                num,
                generator,
            )
            if best is None:
                best = found
            elif whole:
                best = best.or_better(found)
            else:
                best = best.put(rows, best.pick(rows).or_better(found))
        assert best is not None
        return best.x

    def _restarts(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor,
        rows: Tensor,
        first: int,
        num: int,
        generator: torch.Generator | None,
    ) -> Best:
        """The best of `num` restarts run as one batch; restart 0 from x, the others at random."""
        size = len(x)
        tiled, targets = _tile(x, num), _tile(y, num)
        if first == 0:
            starts = (
                torch.cat([x, self.ball.random(_tile(x, num - 1), generator=generator)])
                if num > 1
                else x
            )
        else:
            starts = self.ball.random(tiled, generator=generator)
        from_x = size if first == 0 else 0
        found = self._climb(predict, starts, tiled, targets, _tile(rows, num), from_x, generator)
        best = found if num == 1 else found.pick(slice(0, size))
        for k in range(1, num):
            best = best.or_better(found.pick(slice(k * size, (k + 1) * size)))
        return best

    def _climb(
        self,
        predict: Predictor,
        start: Tensor,
        x: Tensor,
        y: Tensor,
        owner: Tensor,
        from_x: int,
        generator: torch.Generator | None,
    ) -> Best:
        """All stages; the first `from_x` rows begin at x and take the one-step move first."""
        best = Best(
            start, start.new_zeros(len(x)), torch.zeros(len(x), dtype=torch.bool, device=x.device)
        )
        active = torch.arange(len(x), device=x.device)
        for stage, (whole_loss, steps) in enumerate(self.stages):
            loss = for_rows(whole_loss, owner[active])
            whole = len(active) == len(x)
            point, centre, target = (
                (best.x, x, y) if whole else (best.x[active], x[active], y[active])
            )
            for step in range(steps + 1):
                last = step == steps
                if last:
                    value, broken = score(predict, loss, point, target)
                else:
                    value, broken, gradient = loss_and_gradient(predict, loss, point, target)
                here = Best(point, value, broken)
                if len(active) == len(x):
                    best = here if step == 0 else best.or_better(here)
                else:
                    best = best.put(
                        active, here if step == 0 else best.pick(active).or_better(here)
                    )
                if last:
                    break
                size = (
                    step_length(self.ball.eps, step, steps)
                    if self.step_size is None
                    else self.step_size
                )
                if stage == 0 and step == 0 and from_x:
                    point = self._first(gradient, point, size, centre, from_x, generator)
                else:
                    point = move(self.ball, point, gradient, size, centre)
                if self.stop_at_success and bool(broken.any()):
                    stay = _still_whole(best.broken, owner)[active].nonzero().squeeze(1)
                    active, point, centre, target = (
                        active[stay],
                        point[stay],
                        centre[stay],
                        target[stay],
                    )
                    if not len(active):
                        return best
                    loss = for_rows(whole_loss, owner[active])
        return best

    def _first(
        self,
        gradient: Tensor,
        point: Tensor,
        size: float,
        x: Tensor,
        from_x: int,
        generator: torch.Generator | None,
    ) -> Tensor:
        """From x to the edge, or to a random point where there is no gradient; the other rows take
        a plain step."""
        edge = move(self.ball, point[:from_x], gradient[:from_x], self.ball.eps, x[:from_x])
        flat = is_flat(gradient[:from_x])
        if bool(flat.any()):
            edge = where_rows(flat, self.ball.random(x[:from_x], generator=generator), edge)
        if from_x == len(point):
            return edge
        return torch.cat(
            [edge, move(self.ball, point[from_x:], gradient[from_x:], size, x[from_x:])]
        )


def step_length(eps: float, step: int, steps: int) -> float:
    """eps ((1 + cos(pi step / steps)) / 2)^(3/2), at least eps / 100: from the whole budget down.

    Steps of 2.5 eps / steps, the usual rule, creep along the sphere: on a quadratic loss 50 of them
    may end at half of the maximum where these reach it. The power leaves more of the steps to the
    end, where a corner of ball and box is approached.

    >>> [round(step_length(1.0, step, 4), 2) for step in range(4)]
    [1.0, 0.79, 0.35, 0.06]
    """
    return eps * max(0.01, math.pow(0.5 * (1 + math.cos(math.pi * step / steps)), 1.5))


def check_ball(ball: object) -> None:
    """Refuse what is not a ball."""
    checks.instance("ball", ball, Ball, "a ball such as L2(eps)")


def _tile(x: Tensor, num: int) -> Tensor:
    return x.repeat(num, *[1] * (x.ndim - 1)) if num != 1 else x


def _still_whole(broken: Tensor, owner: Tensor) -> Tensor:
    """Rows whose example no restart has broken yet."""
    done = torch.zeros(int(owner.max()) + 1, dtype=torch.bool, device=broken.device)
    done[owner[broken]] = True
    return ~done[owner]


def one_step(ball: Ball, loss: Loss = nll) -> PGD:
    """One step to the edge of the ball (PGD1): x + eps g / |g|.

    >>> from advbayes import L2
    >>> one_step(L2(1.0)).is_one_step
    True
    """
    return PGD(ball, stages=((loss, 1),))


def pgd(
    ball: Ball,
    steps: int = 50,
    loss: Loss = nll,
    *,
    step_size: float | None = None,
    restarts: int = 1,
    stop_at_success: bool = False,
) -> PGD:
    """Projected gradient ascent on the negative log-likelihood (PGD).

    >>> from advbayes import L2
    >>> pgd(L2(1.0), steps=20)
    PGD(ball=L2(1), stages=((nll, 20),), step_size=None, restarts=1, stop_at_success=False)
    """
    return PGD(ball, ((loss, steps),), step_size, restarts, stop_at_success)


def pgd_plus(ball: Ball, steps: int = 25, *, restarts: int = 1) -> PGD:
    """`steps` of PGD on the likelihood, then `steps` on the entropy (PGD+, 25 + 25 in the paper).

    >>> from advbayes import L2
    >>> [steps for _, steps in pgd_plus(L2(1.0)).stages]
    [25, 25]
    """
    return PGD(ball, stages=((nll, steps), (entropy, steps)), restarts=restarts)


def entropy_pgd(ball: Ball, steps: int = 50, *, restarts: int = 1) -> PGD:
    """Projected gradient ascent on the predictive entropy (ENT).

    >>> from advbayes import L2
    >>> entropy_pgd(L2(1.0)).stages[0][0].__name__
    'entropy'
    """
    return PGD(ball, stages=((entropy, steps),), restarts=restarts)

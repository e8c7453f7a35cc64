"""Projected gradient ascent, with the paper's attacks as settings (section 4, SM-5)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks.balls import Ball
from advbayes.attacks.gradients import is_flat, where_rows
from advbayes.attacks.losses import entropy, nll
from advbayes.attacks.search import Best, Problem, Search, check_ball
from advbayes.types import Loss

_ROWS = 1024  # restarts share a batch up to this many rows


@dataclass(frozen=True, repr=False)
class PGD(Search):
    """Projected gradient ascent on each stage's loss in turn; the best iterate is returned.

    The first step goes from x to the edge of the ball (the one-step point), so that more steps are
    never weaker than one; where the gradient at x vanishes the start is drawn at random instead.
    Further restarts start at random. An iterate is better if it is broken where the best so far is
    not, or else has the larger loss. A later stage starts at the best of the one before and keeps
    its successes. One step in all is the paper's one-step attack, returned as it is. With
    `stop_at_success` broken examples leave the batch: the same accuracy for less work, but not the
    largest loss.

    >>> predict = lambda x: torch.distributions.Categorical(logits=torch.cat([x, -x], 1))
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

    def __post_init__(self) -> None:
        check_ball(self.ball)
        try:
            object.__setattr__(self, "stages", tuple((loss, steps) for loss, steps in self.stages))
        except (TypeError, ValueError):
            raise checks.InputTypeError(
                "stages must hold (loss, steps) pairs", got=self.stages
            ) from None
        if not self.stages:
            raise checks.InputError("stages must hold at least one (loss, steps) pair, got none")
        for loss, steps in self.stages:
            checks.function("a loss of stages", loss, "one such as nll")
            checks.count("steps", steps)
        if self.step_size is not None:
            checks.number("step_size", self.step_size, low=0, open_low=True)
        checks.count("restarts", self.restarts)

    @property
    def is_one_step(self) -> bool:
        """Whether this is the paper's one-step attack."""
        return len(self.stages) == 1 and self.stages[0][1] == 1 and self.restarts == 1

    @property
    def _losses(self) -> tuple[Loss, ...]:
        return tuple(loss for loss, _ in self.stages)

    def _search(self, problem: Problem) -> Tensor:
        if self.is_one_step:
            _, gradient = problem.climb(problem.x)
            return problem.move(problem.x, gradient, self.ball.eps)
        # iterates of several stages are ranked by the last one's loss
        best = problem.score(problem.x) if len(self.stages) > 1 else None
        together = max(1, _ROWS // len(problem))
        for first in range(0, self.restarts, together):
            num = min(together, self.restarts - first)
            if best is None or not self.stop_at_success:
                reached = self._restarts(problem, first, num)
                best = reached if best is None else best.or_better(reached)
            elif len(rows := best.unbroken):
                best = best.improved(rows, self._restarts(problem.rows(rows), first, num))
        assert best is not None
        return best.x

    def _restarts(self, problem: Problem, first: int, num: int) -> Best:
        """The best of `num` restarts run as one batch; restart 0 from x, the others at random."""
        size, tiled = len(problem), problem.repeated(num)
        if first:
            reached = self._climb(tiled, tiled.random(), 0)
        else:
            others = [problem.repeated(num - 1).random()] if num > 1 else []
            reached = self._climb(tiled, torch.cat([problem.x, *others]), size)
        best = reached.pick(slice(0, size))
        for k in range(1, num):
            best = best.or_better(reached.pick(slice(k * size, (k + 1) * size)))
        return best

    def _climb(self, problem: Problem, start: Tensor, from_x: int) -> Best:
        """All stages; the first `from_x` rows begin at x and take the one-step move first."""
        best = Best(start, start.new_zeros(len(start)), start.new_zeros(len(start)).bool())
        active = torch.arange(len(start), device=start.device)
        for stage, (loss, steps) in enumerate(self.stages):
            here, point = problem.rows(active).on(loss), best.x[active]
            for step in range(steps):
                reached, gradient = here.climb(point)
                best = best.improved(active, reached) if step else best.put(active, reached)
                size = self.step_size or step_length(self.ball.eps, step, steps)
                if stage == 0 and step == 0 and from_x:
                    point = self._first(here, gradient, point, size, from_x)
                else:
                    point = here.move(point, gradient, size)
                if self.stop_at_success and bool(reached.broken.any()):
                    stay = _unbroken_examples(best.broken, problem.index)[active]
                    active, point = active[stay], point[stay]
                    if not len(active):
                        return best
                    here = problem.rows(active).on(loss)
            best = best.improved(active, here.score(point))
        return best

    def _first(
        self, problem: Problem, gradient: Tensor, point: Tensor, size: float, from_x: int
    ) -> Tensor:
        """From x to the edge, or at random where it is flat; the other rows take a plain step."""
        rows = torch.arange(len(point), device=point.device)
        head = problem.rows(rows[:from_x])
        edge = head.move(point[:from_x], gradient[:from_x], self.ball.eps)
        flat = is_flat(gradient[:from_x])
        if bool(flat.any()):
            edge = where_rows(flat, head.random(), edge)
        if from_x == len(point):
            return edge
        tail = problem.rows(rows[from_x:])
        return torch.cat([edge, tail.move(point[from_x:], gradient[from_x:], size)])


def step_length(eps: float, step: int, steps: int) -> float:
    """eps ((1 + cos(pi step / steps)) / 2)^(3/2), at least eps / 100: from the whole budget down.

    Steps of 2.5 eps / steps, the usual rule, creep along the sphere: on a quadratic loss 50 of them
    may end at half of the maximum where these reach it. The power leaves more of the steps to the
    end, where a corner of ball and box is approached.

    >>> [round(step_length(1.0, step, 4), 2) for step in range(4)]
    [1.0, 0.79, 0.35, 0.06]
    """
    return eps * max(0.01, math.pow(0.5 * (1 + math.cos(math.pi * step / steps)), 1.5))


def _unbroken_examples(broken: Tensor, owner: Tensor | None) -> Tensor:
    """The rows whose example no restart has broken yet, (B,) bool."""
    assert owner is not None
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

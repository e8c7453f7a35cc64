"""Attacks on any Predictor: losses, and projected gradient ascent with the paper's attacks as settings (section 4, SM-5).

An attack sees a Predictor and nothing else. Which thetas it goes through is the Predictor's business: one theta
(`model.at(theta)`), the posterior predictive (`PosteriorPredictive`), fresh thetas at each call (`FreshPredictive`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution

from advbayes import checks
from advbayes.balls import _Ball as Ball
from advbayes.types import Loss, Predictor

# --- Losses: what the attacker wants large, one value per example ------------------------------------------------


def nll(prediction: Distribution, y: Tensor) -> Tensor:
    """-log p(y): through a predictive this is the loss of the log-mean-exp over theta, never of mean logits.

    >>> nll(CategoricalDistribution(logits=torch.zeros(1, 2)), torch.tensor([0]))
    tensor([0.6931])
    """
    return -prediction.log_prob(y)


def margin(prediction: Distribution, y: Tensor) -> Tensor:
    """max_{c != y} log p(c) - log p(y) (Carlini and Wagner): positive when the class is wrong.

    >>> margin(CategoricalDistribution(logits=torch.tensor([[2.0, 0.0, 1.0]])), torch.tensor([0]))
    tensor([-1.])
    """
    if not isinstance(prediction, CategoricalDistribution):
        raise TypeError(f"margin is a loss for classification, got a prediction of type {type(prediction).__name__}")
    own = prediction.logits.gather(1, y.unsqueeze(1)).squeeze(1)
    others = prediction.logits.scatter(1, y.unsqueeze(1), float("-inf"))
    return others.amax(1) - own


def entropy(prediction: Distribution, y: Tensor) -> Tensor:
    """The predictive's entropy: the attacker who wants doubt.

    >>> entropy(CategoricalDistribution(logits=torch.zeros(1, 2)), torch.tensor([0]))
    tensor([0.6931])
    """
    value: Tensor = prediction.entropy()
    return value


def squared_error(prediction: Distribution, y: Tensor) -> Tensor:
    """|E[y] - y|^2, summed over outputs; (B, 1) targets meet (B,) means without broadcasting.

    >>> squared_error(torch.distributions.Normal(torch.zeros(2), 1.0), torch.tensor([[1.0], [2.0]]))
    tensor([1., 4.])
    """
    mean = prediction.mean
    if y.ndim == mean.ndim + 1 and y.shape[-1] == 1:
        y = y.squeeze(-1)
    if y.shape != mean.shape:
        raise ValueError(f"y must have the predicted mean's shape {tuple(mean.shape)}, got {checks.describe(y)}")
    error = (mean - y).square()
    return error if error.ndim == 1 else error.flatten(1).sum(1)


@dataclass(frozen=True, eq=False)
class PerExample:
    """A loss for each example, `losses[index[b]]`: one gradient pass serves them all.

    >>> both = PerExample((nll, margin), torch.tensor([0, 1]))
    >>> both(CategoricalDistribution(logits=torch.zeros(2, 2)), torch.tensor([0, 1]))
    tensor([0.6931, 0.0000])
    """

    losses: tuple[Loss, ...]
    index: Tensor  # (B,)

    def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
        values = torch.stack([loss(prediction, y) for loss in self.losses], dim=1)  # (B, losses)
        return values.gather(1, self.index.unsqueeze(1)).squeeze(1)


def mode(prediction: Distribution) -> Tensor:
    """What the attacker without a label takes for y: the likeliest class, or the mean.

    >>> mode(CategoricalDistribution(logits=torch.tensor([[0.0, 1.0]])))
    tensor([1])
    """
    if isinstance(prediction, CategoricalDistribution):
        return prediction.logits.argmax(-1)
    return prediction.mean


def succeeded(prediction: Distribution, y: Tensor) -> Tensor:
    """Whether the prediction is wrong, (B,) bool; regression has no such notion and gives False."""
    if isinstance(prediction, CategoricalDistribution):
        return prediction.logits.argmax(-1) != y
    return torch.zeros(prediction.batch_shape, dtype=torch.bool, device=y.device)


# --- Gradients ----------------------------------------------------------------------------------------------------


@runtime_checkable
class HasInputGradient(Protocol):
    """A Predictor that knows a better way to its own gradient than autograd through `__call__` (less memory, compiled)."""

    def loss_and_gradient(
        self, loss: Loss, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # loss (B,), succeeded (B,), gradient (B, *event)


_through = False


@contextmanager
def through_attacks() -> Iterator[None]:
    """Within, attacks keep the graph from theta to x': the paper's pathwise gradient (ChannelELBO(through=True))."""
    global _through
    before, _through = _through, True
    try:
        yield
    finally:
        _through = before


def loss_and_gradient(predict: Predictor, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, whether the prediction is wrong, and the loss' input gradient, example by example.

    >>> predict = lambda x: torch.distributions.Normal(x[:, 0], 1.0)
    >>> loss_and_gradient(predict, squared_error, torch.tensor([[3.0]]), torch.tensor([1.0]))[2]
    tensor([[4.]])
    """
    if isinstance(predict, HasInputGradient) and not _through:
        return predict.loss_and_gradient(loss, x, y)
    with torch.enable_grad():
        if not (_through and x.requires_grad):
            x = x.detach().requires_grad_()
        prediction = predict(x)
        value = loss(prediction, y)
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=_through, allow_unused=True)
        else:
            gradient = None
    with torch.no_grad():
        wrong = succeeded(prediction, y)
    return value.detach(), wrong, torch.zeros_like(x) if gradient is None else gradient


# --- Projected gradient ascent ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PGD:
    """Projected gradient ascent on each stage's loss in turn, over the ball; the best iterate is returned.

    The first step goes from x to the edge of the ball (the one-step point), so that more steps are never weaker than one;
    where the gradient at x vanishes the start is drawn at random instead. Further restarts start at random. An iterate is
    better if it is misclassified where the best so far is not, or else has the larger loss. A later stage starts at the
    best of the one before and keeps its successes. One step in all is the paper's one-step attack, returned as it is.

    >>> predict = lambda x: CategoricalDistribution(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> from advbayes import L2
    >>> PGD(L2(0.5), stages=((nll, 10),))(predict, torch.tensor([[1.0]]), torch.tensor([0]))
    tensor([[0.5000]])
    """

    ball: Ball
    stages: tuple[tuple[Loss, int], ...] = ((nll, 50),)
    step_size: float | None = None  # in units of the norm; absent: 2.5 eps / steps of the stage
    restarts: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.ball, Ball):
            raise TypeError(f"ball must be a ball such as L2(eps), got {checks.describe(self.ball)}")
        if not self.stages:
            raise ValueError("stages must hold at least one (loss, steps) pair, got none")
        object.__setattr__(self, "stages", tuple((loss, steps) for loss, steps in self.stages))
        for loss, steps in self.stages:
            if not callable(loss):
                raise TypeError(f"stages must hold (loss, steps) pairs, got {checks.describe(loss)} for a loss")
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
        if y is None:
            with torch.no_grad():
                y = mode(predict(x))
        loss, _ = self.stages[0]
        value, wrong, gradient = loss_and_gradient(predict, loss, x, y)
        start = self.ball.project(x + self.ball.ascend(gradient, self.ball.eps), x)
        if self.is_one_step:
            return start
        if len(self.stages) > 1:  # iterates are ranked by the last stage's loss
            value, wrong = _score(predict, self.stages[-1][0], x, y)
        best = _Best(x, value, wrong)
        for restart in range(self.restarts):
            if restart == 0:
                flat = (gradient.flatten(1) == 0).all(1)
                if bool(flat.any()):
                    drawn = self.ball.random(x, generator=generator)
                    start = torch.where(flat.view(-1, *[1] * (x.ndim - 1)), drawn, start)
            else:
                start = self.ball.random(x, generator=generator)
            best = best.or_better(self._climb(predict, start, x, y, taken=1 if restart == 0 else 0))
        return best.x

    def _climb(self, predict: Predictor, start: Tensor, x: Tensor, y: Tensor, taken: int) -> _Best:
        """All stages from one starting point, of whose first stage `taken` steps are already done."""
        best = _Best(start, torch.empty(0), torch.empty(0))
        for loss, steps in self.stages:
            size = self.step_size if self.step_size is not None else 2.5 * self.ball.eps / steps
            point = best.x
            for step in range(taken, steps):
                value, wrong, gradient = loss_and_gradient(predict, loss, point, y)
                here = _Best(point, value, wrong)
                best = here if step == taken else best.or_better(here)
                point = self.ball.project(point + self.ball.ascend(gradient, size), x)
            here = _Best(point, *_score(predict, loss, point, y))
            best = here if taken == steps else best.or_better(here)
            taken = 0
        return best


@dataclass(frozen=True)
class _Best:
    """A point of each example with its loss and whether it is misclassified."""

    x: Tensor
    value: Tensor  # (B,)
    wrong: Tensor  # (B,)

    def or_better(self, other: _Best) -> _Best:
        better = (other.wrong & ~self.wrong) | ((other.wrong == self.wrong) & (other.value > self.value))
        rows = better.view(-1, *[1] * (self.x.ndim - 1))
        return _Best(
            torch.where(rows, other.x, self.x),
            torch.where(better, other.value, self.value),
            self.wrong | other.wrong,
        )


@torch.no_grad()
def _score(predict: Predictor, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    prediction = predict(x)
    return loss(prediction, y), succeeded(prediction, y)


def one_step(ball: Ball, loss: Loss = nll) -> PGD:
    """One step to the edge of the ball (PGD1): x + eps g / |g|.

    >>> from advbayes import L2
    >>> one_step(L2(1.0)).is_one_step
    True
    """
    return PGD(ball, stages=((loss, 1),))


def pgd(ball: Ball, steps: int = 50, loss: Loss = nll, *, restarts: int = 1) -> PGD:
    """Projected gradient ascent on the negative log-likelihood (PGD)."""
    return PGD(ball, stages=((loss, steps),), restarts=restarts)


def pgd_plus(ball: Ball, steps: int = 25, *, restarts: int = 1) -> PGD:
    """`steps` of PGD on the likelihood, then `steps` on the entropy (PGD+, 25 + 25 in the paper)."""
    return PGD(ball, stages=((nll, steps), (entropy, steps)), restarts=restarts)


def entropy_pgd(ball: Ball, steps: int = 50, *, restarts: int = 1) -> PGD:
    """Projected gradient ascent on the predictive entropy (ENT)."""
    return PGD(ball, stages=((entropy, steps),), restarts=restarts)


def with_ball(attack: PGD, ball: Ball) -> PGD:
    """The same attack within another ball.

    >>> from advbayes import L2
    >>> with_ball(pgd(L2(1.0)), L2(2.0)).ball
    L2(2)
    """
    return replace(attack, ball=ball)

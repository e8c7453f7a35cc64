"""Attacks for predictors without any gradient: they ask for answers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal

from advbayes import checks
from advbayes.attacks.apgd import APGD
from advbayes.attacks.balls import L2, Ball, per_row
from advbayes.attacks.black_box import RandomSearch, Square
from advbayes.attacks.gradients import value_of
from advbayes.attacks.hard_label import HardLabel
from advbayes.attacks.losses import (
    for_rows,
    lower_mean,
    margin,
    nll,
    raise_mean,
    squared_error,
    success,
)
from advbayes.attacks.parts import ball_of
from advbayes.likelihoods import predicts_classes
from advbayes.seeds import normal_like
from advbayes.types import Attack, Loss, Predictor

_ROWS = 4096  # inputs asked about in one call


@dataclass(frozen=True)
class ZerothOrder:
    """An attack on gradients estimated by central differences (after Chen et al. 2017).

    One gradient asks 2 `directions` questions: along every feature where there are no more features
    than that, else along random directions. Differences are taken over `width` times eps.

    >>> from advbayes import L2
    >>> blind = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1).detach())
    >>> x = torch.tensor([[1.0, 0.0]])
    >>> bool(ZerothOrder(APGD(L2(1.2), margin, 5))(blind, x, torch.tensor([0]))[0, 0] < 0)
    True
    """

    attack: Attack
    directions: int = 64
    width: float = 0.1

    def __post_init__(self) -> None:
        checks.count("directions", self.directions)
        checks.number("width", self.width, low=0, open_low=True)

    def __call__(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        ball = ball_of(self.attack) or L2(1.0)
        estimated = Differences(predict, ball, self.width * ball.eps, self.directions, generator)
        return self.attack(estimated, x, y, generator=generator)


ANSWERS_ALONE = (Square, RandomSearch, HardLabel, ZerothOrder)


@dataclass(frozen=True, eq=False)
class Differences:
    """A predictor whose gradient in x is estimated from its answers, which stay as they are."""

    predict: Predictor
    ball: Ball
    width: float
    directions: int
    generator: torch.Generator | None = field(default=None, repr=False)

    def __call__(self, x: Tensor) -> Distribution:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self.predict(x)
        values = _Estimated.apply(x, self)  # type: ignore[no-untyped-call]
        if predicts_classes(self.predict(x.detach()[:1])):
            return Categorical(logits=values, validate_args=False)
        normal = Normal(values[..., 0], values[..., 1].exp(), validate_args=False)
        return Independent(normal, values.ndim - 2) if values.ndim > 2 else normal

    def answers(self, x: Tensor) -> Tensor:
        """Log-probabilities (B, C), or means and log standard deviations (B, ..., 2)."""
        with torch.no_grad():
            prediction = self.predict(x)
        if predicts_classes(prediction):
            return prediction.logits
        return torch.stack([prediction.mean, 0.5 * prediction.variance.log()], -1)

    def loss_and_gradient(self, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and success of the answers as they are. In regression the differences are those of
        the loss: the two moments do not say what a mixture's likelihood is."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            answers = self(leaf)
            if predicts_classes(answers):
                value = value_of(loss, answers, y)
                (gradient,) = torch.autograd.grad(value.sum(), leaf)
                return value.detach(), success(loss, answers, y), gradient
        with torch.no_grad():
            prediction = self.predict(x)
            value, broken = value_of(loss, prediction, y), success(loss, prediction, y)
        rows = torch.arange(len(x), device=x.device)

        def losses(points: Tensor) -> Tensor:  # (K, B, *event) -> (K, B)
            index = rows.repeat(len(points))
            with torch.no_grad():
                answers = self.predict(points.flatten(0, 1))
                return value_of(for_rows(loss, index), answers, y[index]).view(len(points), -1)

        return value, broken, self.gradient(losses, x)

    def gradient(self, ask: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """By central differences of what `ask` says of points: (K, B, *event) -> (K, B)."""
        moves, unit = self.moves(x), self.ball.units(x)
        gradient = torch.zeros_like(x)
        together = max(1, _ROWS // len(x))
        for start in range(0, len(moves), together):
            part = moves[start : start + together].unsqueeze(1)  # (K, 1, *event)
            length = per_row(part.flatten(1).norm(dim=1).clamp_min(torch.finfo(x.dtype).tiny), part)
            step = self.width * unit * (part / length)
            slope = (ask(x + step) - ask(x - step)) / (2 * self.width)  # (K, B)
            slope = slope.view(len(part), len(x), *[1] * (x.ndim - 1))
            gradient += (slope * part * length / unit).sum(0)
        return gradient

    def moves(self, x: Tensor) -> Tensor:
        """(K, *event): directions, scaled so that differences along them sum to the gradient."""
        size = x[0].numel()
        if size <= self.directions:
            moves = torch.eye(size, dtype=x.dtype, device=x.device)
        else:
            moves = normal_like(x, self.generator, (self.directions, size)) / self.directions**0.5
        moves = moves.view(-1, *x.shape[1:])
        return moves if self.ball.mask is None else moves * self.ball.mask.to(x.device)


class _Estimated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Differences) -> Tensor:
        ctx.owner = owner
        ctx.save_for_backward(x)
        return owner.answers(x.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,), owner = ctx.saved_tensors, ctx.owner

        def weighed(points: Tensor) -> Tensor:  # (K, B, *event) -> (K, B)
            answers: Tensor = owner.answers(points.flatten(0, 1))
            return (answers.view(len(points), *grads[0].shape) * grads[0]).flatten(2).sum(2)

        return owner.gradient(weighed, x), None


def blind_attacks(ball: Ball, task: str, steps: int, queries: int) -> dict[str, Attack]:
    """The default attacks of black-box mode."""
    if task == "regression":
        losses = (squared_error, nll, raise_mean, lower_mean)
        attacks: dict[str, Attack] = {
            f"zeroth-order {loss.__name__}": ZerothOrder(APGD(ball, loss, steps)) for loss in losses
        }
        return attacks | {"Square": Square(ball, queries, nll)}
    return {
        "zeroth-order margin": ZerothOrder(APGD(ball, margin, steps, 1, 3)),
        "zeroth-order nll": ZerothOrder(APGD(ball, nll, steps)),
        "Square": Square(ball, queries),
        "hard label": HardLabel(ball),
    }


def gives_gradient(predict: Predictor, x: Tensor) -> bool:
    """Whether there is any gradient of the answers in x to be had; one that is zero counts."""
    point = x.detach().clone().requires_grad_()
    try:
        with torch.enable_grad():
            prediction = predict(point)
            value = prediction.logits if predicts_classes(prediction) else prediction.mean
            if not value.requires_grad:
                return False
            return torch.autograd.grad(value.sum(), point, allow_unused=True)[0] is not None
    except RuntimeError:  # arrays made of tensors that want a gradient: answers alone
        return False

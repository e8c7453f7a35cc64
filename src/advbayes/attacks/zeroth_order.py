"""Attacks for predictors without any gradient: they ask for answers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

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
        return self.predict(x)

    def loss_and_gradient(self, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and success of the answers as they are. Of classes the differences are those of
        the log-probabilities, weighed by the loss' gradient in them; in regression those of the
        loss, for two moments do not say what a mixture's likelihood is."""
        with torch.no_grad():
            prediction = self.predict(x)
        if predicts_classes(prediction):
            return self._of_classes(loss, prediction.logits, x, y)
        rows = torch.arange(len(x), device=x.device)

        def losses(points: Tensor) -> Tensor:  # (K, B, *event) -> (K, B)
            index = rows.repeat(len(points))
            answers = self.predict(points.flatten(0, 1))
            return value_of(for_rows(loss, index), answers, y[index]).view(len(points), -1)

        with torch.no_grad():
            value, broken = value_of(loss, prediction, y), success(loss, prediction, y)
            return value, broken, self.gradient(losses, x)

    def _of_classes(
        self, loss: Loss, logits: Tensor, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()  # (B, C)
            answers = Categorical(logits=leaf, validate_args=False)
            value = value_of(loss, answers, y)
            (slope,) = torch.autograd.grad(value.sum(), leaf)

        def weighed(points: Tensor) -> Tensor:  # (K, B, *event) -> (K, B)
            asked = self.predict(points.flatten(0, 1))
            assert predicts_classes(asked)
            return (asked.logits.view(len(points), *slope.shape) * slope).flatten(2).sum(2)

        with torch.no_grad():
            return value.detach(), success(loss, answers, y), self.gradient(weighed, x)

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

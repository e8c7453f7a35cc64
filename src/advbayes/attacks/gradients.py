"""The loss of a Predictor's answer and its input gradient, all arguments checked."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import checks
from advbayes.attacks.balls import Ball, per_row
from advbayes.attacks.losses import mode, num_rows, success
from advbayes.likelihoods import predicts_classes
from advbayes.types import Loss, Predictor


@runtime_checkable
class HasInputGradient(Protocol):
    """A Predictor with a better way to its gradient than autograd (less memory, compiled)."""

    def loss_and_gradient(
        self, loss: Loss, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # loss (B,), succeeded (B,), gradient (B, *event)


class NoGradientWarning(UserWarning):
    """A gradient attack on a predictor without gradients: what it leaves standing says nothing."""


_BLIND = (
    "predict gives no gradient, so attacks that need one move at random: what they leave standing "
    "says nothing. Use attacks that ask for predictions (Square, HardLabel, RandomSearch) or "
    "Transfer from a model with gradients"
)
_through: ContextVar[bool] = ContextVar("through", default=False)  # of this thread alone


@contextmanager
def through_attacks() -> Iterator[None]:
    """Within, attacks keep the graph from theta to x': the paper's pathwise gradient."""
    token = _through.set(True)
    try:
        yield
    finally:
        _through.reset(token)


def loss_and_gradient(
    predict: Predictor, loss: Loss, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, whether the example is broken, and the loss' input gradient, example by example.

    >>> from advbayes.attacks import squared_error
    >>> predict = lambda x: torch.distributions.Normal(x[:, 0], 1.0)
    >>> loss_and_gradient(predict, squared_error, torch.tensor([[3.0]]), torch.tensor([1.0]))[2]
    tensor([[4.]])
    """
    refuse_inference_mode()
    through = _through.get()
    if isinstance(predict, HasInputGradient) and not through:
        return predict.loss_and_gradient(loss, x, y)
    with torch.enable_grad():
        if not (through and x.requires_grad):
            x = x.detach().requires_grad_()
        prediction = predict(x)
        value = value_of(loss, prediction, y)
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(
                value.sum(), x, create_graph=through, allow_unused=True
            )
        else:
            gradient = None
            _warn_if_blind(prediction)
    with torch.no_grad():
        broken = success(loss, prediction, y)
    return value.detach(), broken, torch.zeros_like(x) if gradient is None else gradient


# where one warning is enough: whether it was given
_warned: ContextVar[list[bool] | None] = ContextVar("warned", default=None)


@contextmanager
def one_blind_warning() -> Iterator[None]:
    """Within, a `NoGradientWarning` is given once, however many steps meet it."""
    token = _warned.set([])
    try:
        yield
    finally:
        _warned.reset(token)


def _warn_if_blind(prediction: Distribution) -> None:
    """A loss without a gradient may be flat itself, as the entropy of a fixed scale."""
    if predicts_classes(prediction):
        is_blind = not prediction.logits.requires_grad
    else:
        is_blind = not (prediction.mean.requires_grad or prediction.variance.requires_grad)
    if not is_blind:
        return
    warned = _warned.get()
    if not warned:
        warnings.warn(_BLIND, NoGradientWarning, stacklevel=3)
    if warned is not None:
        warned.append(True)


@torch.no_grad()
def score(predict: Predictor, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and whether the example is broken, without a gradient."""
    prediction = predict(x)
    return value_of(loss, prediction, y), success(loss, prediction, y)


def value_of(loss: Loss, prediction: Distribution, y: Tensor) -> Tensor:
    """The loss of each example; labels that no class has are named."""
    if not isinstance(prediction, Distribution):
        raise checks.InputTypeError(
            "predict must return a torch Distribution over y", got=prediction
        )
    if prediction.batch_shape[:1] != (len(y),):
        raise checks.InputError(
            f"predict must return a Distribution of batch shape ({len(y)},) for {len(y)} inputs, "
            f"got {tuple(prediction.batch_shape)}"
        )
    if predicts_classes(prediction) and (y.is_floating_point() or y.dtype == torch.bool):
        raise checks.InputTypeError("y must hold integer class labels", got=y)
    try:
        value = loss(prediction, y)
    except (RuntimeError, IndexError, ValueError):
        num = prediction.logits.shape[-1] if predicts_classes(prediction) else 0
        if num and bool(((y < 0) | (y >= num)).any()):
            raise checks.InputError(
                f"y must hold labels from 0 to {num - 1}, got {y.min():g} to {y.max():g}"
            ) from None
        raise
    if value.shape != (len(y),):  # broadcast labels and batch means attack something else
        raise checks.InputError(
            f"loss must give one value for each of the {len(y)} examples, got shape "
            f"{tuple(value.shape)}; is y of shape (B,)?"
        )
    return value


def targets(predict: Predictor, x: Tensor, y: Tensor | None) -> Tensor:
    """What the examples are to be broken away from: y, or the predictor's mode where it is absent.

    >>> targets(lambda x: torch.distributions.Normal(x[:, 0], 1.0), torch.tensor([[3.0]]), None)
    tensor([3.])
    """
    checks.function("predict", predict, "a Predictor, x -> Distribution")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise checks.InputTypeError("x must be a floating-point tensor of shape (B, *event)", got=x)
    checks.finite("x", x)
    if y is None:
        with torch.no_grad():
            return mode(predict(x))
    checks.instance("y", y, Tensor, "a tensor with one target for each example of x")
    if y.ndim == 0 or len(y) != len(x):
        raise checks.InputError(f"y must hold one target for each of the {len(x)} examples", got=y)
    if y.is_floating_point():
        return y.to(x.dtype)
    return y if y.dtype == torch.bool else y.long()  # labels of any width; bool is refused later


def entry(
    predict: Predictor, ball: Ball, x: Tensor, y: Tensor | None, *losses: Loss
) -> tuple[Tensor, Tensor]:
    """What an attack starts from, checked: targets, and x without its history (but `through`)."""
    y = targets(predict, x, y)
    for num in map(num_rows, losses):
        if num not in (None, len(x)):
            raise checks.InputError(
                f"loss must hold one entry for each of the {len(x)} examples of x, got one for "
                f"{num}"
            )
    ball.check(x)
    return x if _through.get() else x.detach(), y


def refuse_inference_mode() -> None:
    """Under inference mode gradients are silently absent, and attacks silently harmless."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "an attack needs gradients, which torch.inference_mode() forbids: call it under "
            "torch.no_grad() instead"
        )


def move(ball: Ball, point: Tensor, gradient: Tensor, step: float | Tensor, x: Tensor) -> Tensor:
    """One projected ascent step; a gradient that is not finite (p(y) = 0) never leads to NaN."""
    usable = ball.unblocked(torch.nan_to_num(gradient, nan=0.0, posinf=1e18, neginf=-1e18), point)
    if point is x and ball.box is None and isinstance(step, float) and step <= ball.eps:
        # a step from the centre stays in the ball
        return ball.shifted(x, ball.ascend(usable, step))
    return ball.project(point + ball.ascend(usable, step), x)


def is_flat(gradient: Tensor) -> Tensor:
    """Where there is no direction to go, (B,) bool."""
    return (torch.nan_to_num(gradient, nan=0.0) == 0).flatten(1).all(1)


def where_rows(rows: Tensor, this: Tensor, other: Tensor) -> Tensor:
    """`this` in the rows that are True."""
    return torch.where(per_row(rows, this), this, other)

"""What is refused before the first attack runs: data, predictors and radii that cannot give a
number to believe."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils.data import DataLoader

from advbayes.attacks.balls import Ball
from advbayes.checks import (
    InputError,
    InputTypeError,
    describe,
    finite,
    instance,
    native,
    number,
    outlined,
)
from advbayes.likelihoods import predicts_classes
from advbayes.metrics.intervals import wilson
from advbayes.metrics.scores import labels, log_prob, targets
from advbayes.metrics.trivial import ConstantClasses, ConstantGaussian
from advbayes.seeds import GlobalStream
from advbayes.types import Predictor

Task = Literal["classification", "regression"]
Data = tuple[Any, Any] | DataLoader[Any]  # (x, y) of tensors or arrays, or batches of them

PROBE = 256  # examples that a predictor is tried on before anything starts
MANY = 100  # whole numbers, from which on they are levels of something rather than kinds
TWICE = 64  # examples that it is asked about twice: on few a coin may fall the same way
FEW, AGAIN = 4, 8  # as a coin may that is thrown once a call: so many examples, so often


# what makes a Predictor of what came: of a function, of a network, of something else
_REMEDIES = (
    "wrap logits as Categorical(logits=...), probabilities as Categorical(probs=...)",
    "advbayes.adapters.from_torch(net.eval()) makes a Predictor of a network",
)
_OTHERS = (
    "advbayes.adapters.from_function(model.predict_proba, 'probs', numpy=True) makes one of a "
    "model that only has predict_proba"
)


class UnitsWarning(UserWarning):
    """The radius and the data seem to be in different units."""


class SoftmaxWarning(UserWarning):
    """Probabilities seem to have been given as logits, and been soft-maxed again."""


def dtype_of(*predictors: Predictor) -> torch.dtype:
    """The dtype that arrays are converted to: a predictor's own where it says so, else float32."""
    for predict in predictors:
        match predict:
            case object(model=object(dtype=torch.dtype() as dtype)):
                return dtype
    return torch.float32


def as_tensors(data: Data, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """One x and one y from tensors, arrays or a DataLoader; refused when empty, of unequal length
    or not finite.

    >>> x, y = as_tensors((np.zeros((3, 2)), np.array([0, 1, 1])))
    >>> x.dtype, y.dtype
    (torch.float32, torch.int64)
    """
    match data:
        case DataLoader():
            with GlobalStream(0):
                batches = [_pair(batch) for batch in data]
            if not batches:
                raise InputError("data must hold at least one example, got an empty DataLoader")
            x, y = (torch.cat(side) for side in zip(*batches, strict=True))
        case (x, y):
            x, y = _tensor("x", x, dtype), _tensor("y", y, dtype)
        case _:
            raise InputTypeError("data must be a pair (x, y) or a DataLoader", got=data)
    if x.ndim < 2 or not len(x) or not x.is_floating_point():
        raise InputError(
            "x must be a floating-point tensor of shape (N, *event) with N >= 1", got=x
        )
    if y.ndim == 0 or len(y) != len(x):
        raise InputError(f"y must hold one target for each of the {len(x)} examples of x", got=y)
    return finite("x", x), finite("y", y)


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    match batch:
        case (x, y):
            return x, y
        case tuple() | list():
            got = f"{len(batch)} parts"
        case _:
            got = describe(batch)
    raise InputError(f"data must be a DataLoader of pairs (x, y), got batches of {got}")


def as_targets(name: str, value: Any) -> Tensor:
    """Targets from a tensor, an array or a list.

    >>> as_targets("train_y", [0, 1, 1])
    tensor([0, 1, 1])
    """
    try:
        targets = torch.as_tensor(native(value))
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(
            f"{name} must be a tensor, an array or a list of numbers", got=value
        ) from None
    if targets.ndim not in (1, 2) or not len(targets):
        raise InputError(f"{name} must have shape (N,) or (N, D) with N >= 1", got=targets)
    return finite(name, targets)


def as_radii(radii: Any) -> tuple[float, ...]:
    """Budgets, each a number >= 0.

    >>> as_radii(0.5)
    Traceback (most recent call last):
    ...
    advbayes.checks.InputTypeError: radii must be a sequence of numbers such as (0.5, 1.0), got 0.5
    """
    a_row = isinstance(radii, Collection) and getattr(radii, "ndim", 1) == 1
    if not a_row or isinstance(radii, str):
        raise InputTypeError("radii must be a sequence of numbers such as (0.5, 1.0)", got=radii)
    if not len(radii):
        raise InputError("radii must hold at least one eps, got none")
    return tuple(number("radii", eps, low=0) for eps in radii)


def in_shape_of(
    predictions: Sequence[Distribution],  # of a few inputs, one by each predictor
    y: Tensor,  # (N,), (N, 1) or (N, D)
) -> Tensor:
    """Labels as integers of shape `(N,)`; real targets in the predictions' own shape, `(N, 1)`
    never broadcast to `(N,)`.

    >>> in_shape_of([torch.distributions.Normal(torch.zeros(2), 1.0)], torch.zeros(5, 1)).shape
    torch.Size([5])
    """
    if predicts_classes(predictions[0]):
        return y.reshape(-1).long()
    shapes = {tuple(each.batch_shape[1:] + each.event_shape) for each in predictions}
    if y.numel() != len(y):
        return y
    return y.reshape(len(y), *(shapes.pop() if len(shapes) == 1 else ()))


def _tensor(name: str, value: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            got = f"an array of {value.dtype}"
            raise InputTypeError(f"{name} must hold numbers (classes from 0), got {got}")
        array: Tensor = torch.tensor(native(value))
        return array.to(dtype) if array.is_floating_point() else array
    tensor: Tensor = instance(name, value, Tensor, "a tensor or an array")
    return tensor


def check_predictor(
    predict: Predictor,
    x: Tensor,  # (N, *event)
    y: Tensor,
    name: str = "predict",
) -> Task:
    """The task of a predictor, after one call on the first examples; faults are named.

    >>> check_predictor(lambda x: x.softmax(1), torch.zeros(2, 3), torch.tensor([0, 1]))
    Traceback (most recent call last):
    ...
    advbayes.checks.InputTypeError: predict must return a torch Distribution over y, got a torch.float32 tensor of shape (2, 3) on cpu; wrap logits \
as Categorical(logits=...), probabilities as Categorical(probs=...)
    """  # noqa: E501
    x, y = x[:PROBE], y[:PROBE]
    remedy = _REMEDIES[isinstance(predict, nn.Module)]
    if not callable(predict):
        raise InputTypeError(
            f"{name} must be a Predictor: callable on x, giving a torch Distribution over y, got "
            f"{describe(predict)}; {_OTHERS}"
        )
    try:
        with torch.no_grad():
            prediction = predict(x)
    except RuntimeError as error:
        if not isinstance(predict, nn.Module):
            raise
        got = f"RuntimeError: {error!s:.200}"
        wanted = f"{name} must answer {x.dtype} inputs of shape {tuple(x.shape)}"
        raise InputError(f"{wanted}, got {got}; {remedy}") from error
    if not isinstance(prediction, Distribution):
        raise InputTypeError(
            f"{name} must return a torch Distribution over y, got {outlined(prediction)}; {remedy}"
        )
    if tuple(prediction.batch_shape) not in ((len(x),), (len(x), 1)):
        raise InputError(
            f"{name} must predict with batch shape ({len(x)},) for {len(x)} inputs, "
            f"got batch shape {tuple(prediction.batch_shape)}"
        )
    if not predicts_classes(prediction):
        targets(prediction, y)
        finite(f"the log-probabilities of {name}", log_prob(prediction, y))
        return "regression"
    finite(f"the log-probabilities of {name}", prediction.logits)
    places = labels(prediction, y)
    off = float((prediction.logits.softmax(-1) - prediction.probs).abs().max())
    if off > 0.01:
        raise InputError(
            f"{name} must give probs that are the softmax of its logits, got some that are "
            f"{off:.2g} away: attacks climb the ones, the others are scored"
        )
    said = prediction.logits.log_softmax(-1).gather(1, places.unsqueeze(1)).squeeze(1)
    off = float((log_prob(prediction, y) - said).abs().max())
    if off > 0.01:
        raise InputError(
            f"{name} must give a log_prob that is the log-softmax of its logits, got some that are "
            f"{off:.2g} away: these are no log-probabilities"
        )
    constant = isinstance(predict, (ConstantClasses, ConstantGaussian))
    spread = prediction.logits.amax(1) - prediction.logits.amin(1)
    if not constant and float(spread.max()) < 1e-7:
        raise InputError(
            f"{name} must tell the classes apart, got equal logits for all "
            f"{prediction.logits.shape[1]} classes on each of {len(x)} inputs (all zero, or a "
            f"constant was added); use advbayes.metrics.uniform for the trivial predictor"
        )
    if not constant and softmaxed_twice(prediction.logits, y.reshape(-1)):
        ceiling = math.e / (math.e + prediction.logits.shape[1] - 1)
        warnings.warn(
            f"{name} seems to give probabilities where logits are due (soft-maxed twice): no "
            f"confidence exceeds e/(e + C - 1) = {ceiling:.3f} and many sit just below it",
            SoftmaxWarning,
            stacklevel=3,
        )
    return "classification"


def softmaxed_twice(
    log_probs: Tensor,  # (B, C), normalised
    y: Tensor,  # (B,)
) -> bool:
    """Whether log p = log softmax(p') for probabilities p' on every row, p' often near certain.

    Adding a constant to log p so that each row sums to 1 recovers p'; only a soft-maxed softmax
    gives rows without a negative entry that pile up at the ceiling p' = 1 and are right far more
    often than they say.

    >>> certain = torch.eye(3).repeat(40, 1)
    >>> y = torch.arange(3).repeat(40)
    >>> [softmaxed_twice((k * certain).log_softmax(1), y) for k in (1, 9)]
    [True, False]
    """
    log_probs = log_probs.double()
    num, num_classes = log_probs.shape
    recovered = log_probs + (1 - log_probs.sum(1, keepdim=True)) / num_classes
    if float(recovered.min()) < -1e-4 or float((recovered.amax(1) > 0.95).double().mean()) < 0.05:
        return False
    right = int((log_probs.argmax(1) == y).sum())
    return wilson(right, num, level=0.99)[0] > float(log_probs.exp().amax(1).mean())


def check_units(
    ball: Ball,
    x: Tensor,  # (N, *event)
    name: str = "ball",
) -> str | None:
    """A sentence with both scales when eps and the data cannot be in the same units: eps beyond the
    data's whole extent, below a thousandth of it, or below half a step of whole numbers of many
    values, as pixels from 0 to 255 are.

    >>> from advbayes import Linf
    >>> check_units(Linf(8.0), torch.tensor([[0.0, 0.5], [1.0, 0.5]]))
    'ball has eps = 8, but the data extend over 1 in its norm (x from 0 to 1): more than the whole of it; in other units?'
    """  # noqa: E501
    extent, steps = extent_of(ball, x), float(x.max() - x.min())
    if ball.eps == 0 or extent == 0:
        return None
    if ball.eps > extent:
        side = "more than the whole of it"
    elif ball.eps < 1e-3 * extent:
        side = "less than a thousandth of it"
    elif ball.scale is None and ball.eps < 0.5 and steps >= MANY and bool((x == x.round()).all()):
        side = "in whole numbers, of which it is less than half a step"
    else:
        return None
    return (
        f"{name} has eps = {ball.eps:g}, but the data extend over {extent:.3g} in its norm (x "
        f"from {float(x.min()):g} to {float(x.max()):g}): {side}; in other units?"
    )


def extent_of(ball: Ball, x: Tensor) -> float:
    """The norm of the smallest box around the data (or of the ball's own box): a radius from which
    everything is reachable."""
    reach = x.amax(0) - x.amin(0)
    if ball.box is not None:
        low, high = (torch.as_tensor(side, dtype=x.dtype, device=x.device) for side in ball.box)
        if bool(torch.isfinite(high - low).all()):
            reach = (high - low).expand(x.shape[1:])
    return float(ball.norm(reach.unsqueeze(0)))


def warn_units(ball: Ball, x: Tensor, name: str) -> None:
    """`check_units` as a warning."""
    sentence = check_units(ball, x, name)
    if sentence is not None:
        warnings.warn(sentence, UnitsWarning, stacklevel=3)


@torch.no_grad()
def is_stochastic(predict: Predictor, x: Tensor) -> bool:
    """Whether calls on the first inputs differ: two on many of them, and more on a few, since one
    draw may serve a whole call.

    >>> is_stochastic(lambda x: torch.distributions.Categorical(logits=x), torch.zeros(2, 3))
    False
    """
    if _differ(predict(x[:TWICE]), predict(x[:TWICE])):
        return True
    first = predict(x[:FEW])
    return any(_differ(first, predict(x[:FEW])) for _ in range(AGAIN))


def _differ(first: Distribution, second: Distribution) -> bool:
    return not torch.equal(numbers_of(first), numbers_of(second))


def numbers_of(prediction: Distribution) -> Tensor:  # (B, K)
    """What is said, finer than probabilities that are near 0 or 1: logits, or mean and variance."""
    if predicts_classes(prediction):
        return prediction.logits
    return torch.stack([prediction.mean, prediction.variance], 1).flatten(1)

"""One score per example: a prediction (batch shape `(B,)`) against its targets, not reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes.checks import InputError, InputTypeError, describe, finite, instance
from advbayes.likelihoods import targets_like

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def batch_size(prediction: Distribution) -> int:
    """B, for a prediction of batch shape `(B,)`, or `(B, 1)` with one output.

    >>> batch_size(torch.distributions.Normal(torch.zeros(3), 1.0))
    3
    """
    instance("prediction", prediction, Distribution, "a torch Distribution")
    batch, event = tuple(prediction.batch_shape), tuple(prediction.event_shape)
    one_output = len(batch) == 2 and batch[1] == 1 and event == ()
    if (len(batch) != 1 and not one_output) or batch[0] == 0 or len(event) > 1:
        raise InputError(
            "prediction must have batch shape (B,) with B >= 1 and event shape () or (D,), "
            f"got batch shape {batch} and event shape {event}"
        )
    return batch[0]


def class_probs(prediction: Distribution) -> Tensor:  # (B, C)
    """The class probabilities of a categorical prediction, checked to be a distribution.

    >>> class_probs(torch.distributions.Categorical(probs=torch.tensor([[0.25, 0.75]])))
    tensor([[0.2500, 0.7500]])
    """
    num = batch_size(prediction)
    probs: Any = getattr(prediction, "probs", None)
    if not _is_categorical(prediction) or len(probs) != num:
        raise InputTypeError(
            f"prediction must be categorical with .probs of shape (B, C) = ({num}, C), got "
            f"{type(prediction).__name__} with .probs {describe(probs)}"
        )
    finite("prediction.probs", probs)
    error = (probs.detach().sum(-1) - 1).abs().max()
    # float32 rounding of a sum of C terms stays far below this
    if bool((probs < 0).any()) or float(error) > 1e-3:
        raise InputError(
            "prediction.probs must be non-negative and sum to 1 over classes, got a minimum of "
            f"{float(probs.min()):g} and a sum that is off by {float(error):g}"
        )
    return cast(Tensor, probs)


def is_real(y: object) -> TypeIs[Tensor]:
    """Whether y is a tensor of numbers, neither complex nor truth values."""
    return isinstance(y, Tensor) and not y.is_complex() and y.dtype != torch.bool


def is_integral(y: object) -> TypeIs[Tensor]:
    """Whether y is a tensor of whole numbers."""
    return is_real(y) and not y.is_floating_point()


def labels(
    prediction: Distribution,
    y: Tensor,  # (B,) or (B, 1), integers
) -> Tensor:  # (B,)
    """Class labels that fit a categorical prediction.

    >>> labels(torch.distributions.Categorical(logits=torch.zeros(2, 3)), torch.tensor([[0], [2]]))
    tensor([0, 2])
    """
    return class_labels(y, *class_probs(prediction).shape)


def class_labels(y: Tensor, num: int, num_classes: int) -> Tensor:  # (num,) or (num, 1) -> (num,)
    """Class labels of `num` examples, or what is wrong with them.

    >>> class_labels(torch.tensor([0, 3]), 2, 3)
    Traceback (most recent call last):
    ...
    advbayes.checks.InputError: y must hold labels from 0 to 2, got 0 to 3
    """
    if not is_integral(y):
        raise InputTypeError("y must be a tensor of integer class labels", got=y)
    if tuple(y.shape) not in ((num,), (num, 1)):
        raise InputError(f"y must have one label per prediction, shape ({num},)", got=y)
    y = y.reshape(num).long()
    if num and (int(y.min()) < 0 or int(y.max()) >= num_classes):
        raise InputError(
            f"y must hold labels from 0 to {num_classes - 1}, got {int(y.min())} to {int(y.max())}"
        )
    return y


def targets(
    prediction: Distribution,
    y: Tensor,  # (B,), (B, 1) or (B, D)
) -> Tensor:  # batch shape + event shape of the prediction
    """Regression targets in the prediction's own shape, `(B, 1)` never broadcast to `(B,)`.

    >>> targets(torch.distributions.Normal(torch.zeros(2), 1.0), torch.tensor([[1.0], [2.0]]))
    tensor([1., 2.])
    """
    batch_size(prediction)
    if not is_real(y):
        raise InputTypeError("y must be a real tensor", got=y)
    y = finite("y", targets_like(prediction, y))
    return y if y.is_floating_point() else y.to(prediction.mean.dtype)


def _is_categorical(prediction: Distribution) -> bool:
    match prediction:
        case object(probs=Tensor(ndim=2), event_shape=()):
            return True
    return False


def log_prob(
    prediction: Distribution,
    y: Tensor,  # (B,) labels, or (B,), (B, 1), (B, D) targets
) -> Tensor:  # (B,)
    """log p(y given x), for classes and for densities.

    >>> coin = torch.distributions.Categorical(probs=torch.tensor([[0.5, 0.5]]))
    >>> log_prob(coin, torch.tensor([1])).exp()
    tensor([0.5000])
    """
    num = batch_size(prediction)
    y = labels(prediction, y) if _is_categorical(prediction) else targets(prediction, y)
    return prediction.log_prob(y).reshape(num)


def nll(prediction: Distribution, y: Tensor) -> Tensor:  # (B,)
    """Negative log-likelihood, -log p(y given x).

    >>> nll(torch.distributions.Categorical(logits=torch.zeros(1, 4)), torch.tensor([3]))
    tensor([1.3863])
    """
    return -log_prob(prediction, y)


def correct(prediction: Distribution, y: Tensor) -> Tensor:  # (B,), bool
    """Whether the most probable class is the right one (the first of equally probable ones).

    >>> two = torch.distributions.Categorical(probs=torch.tensor([[0.2, 0.8], [0.9, 0.1]]))
    >>> correct(two, torch.tensor([1, 1]))
    tensor([ True, False])
    """
    return class_probs(prediction).argmax(-1) == labels(prediction, y)


def expected_correct(prediction: Distribution, y: Tensor) -> Tensor:  # (B,), float64
    """The accuracy to expect of a guess among the most probable classes: 1/k where y is one of k.

    >>> guess = torch.distributions.Categorical(probs=torch.ones(2, 4))
    >>> expected_correct(guess, torch.tensor([0, 3]))
    tensor([0.2500, 0.2500], dtype=torch.float64)
    """
    probs = class_probs(prediction)
    ties = (probs == probs.amax(-1, keepdim=True)).double()
    return ties.gather(-1, labels(prediction, y).unsqueeze(-1)).squeeze(-1) / ties.sum(-1)


def confidence(prediction: Distribution) -> Tensor:  # (B,)
    """Probability of the most probable class.

    >>> confidence(torch.distributions.Categorical(probs=torch.tensor([[0.25, 0.75]])))
    tensor([0.7500])
    """
    return class_probs(prediction).max(-1).values.clamp(max=1.0)


def brier(prediction: Distribution, y: Tensor) -> Tensor:  # (B,)
    """Brier score in [0, 2]: sum over classes of (p_c - 1[y = c])^2.

    >>> one = torch.distributions.Categorical(probs=torch.tensor([[0.25, 0.75]]))
    >>> brier(one, torch.tensor([1]))
    tensor([0.1250])
    """
    probs = class_probs(prediction)
    truth = torch.nn.functional.one_hot(labels(prediction, y), probs.shape[1])
    return (probs - truth).square().sum(-1)


def squared_error(
    prediction: Distribution,
    y: Tensor,  # (B,), (B, 1) or (B, D)
) -> Tensor:  # (B,)
    """Squared error of the predictive mean, averaged over outputs (an RMSE has y's units).

    >>> squared_error(torch.distributions.Normal(torch.zeros(2), 1.0), torch.tensor([1.0, 2.0]))
    tensor([1., 4.])
    """
    if _is_categorical(prediction):
        kind = type(prediction).__name__
        raise InputTypeError(f"squared_error wants a regression prediction, got {kind}; use brier")
    y = targets(prediction, y)
    return (finite("prediction.mean", prediction.mean) - y).square().reshape(len(y), -1).mean(1)


def entropy(prediction: Distribution) -> Tensor:  # (B,)
    """The prediction's own entropy, in nats (a density's may be negative; a mixture of Gaussians
    gives that of the Gaussian of its moments, an upper bound).

    >>> entropy(torch.distributions.Categorical(logits=torch.zeros(1, 4)))
    tensor([1.3863])
    """
    num = batch_size(prediction)
    return prediction.entropy().reshape(num)

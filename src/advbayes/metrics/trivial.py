"""Predictors that never look at x: a result that does not beat them is no result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal

from advbayes.checks import InputError, InputTypeError, count, describe, finite
from advbayes.metrics.scores import is_integral, is_real


@dataclass(frozen=True)
class ConstantClasses:
    """The same class probabilities for every input.

    >>> ConstantClasses((0.25, 0.75))(torch.zeros(2, 5)).probs
    tensor([[0.2500, 0.7500],
            [0.2500, 0.7500]])
    """

    probs: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.probs) == 0 or min(self.probs) < 0 or not abs(sum(self.probs) - 1) < 1e-6:
            raise InputError("probs must be non-negative and sum to 1", got=self.probs)

    def __call__(self, x: Tensor, /) -> Distribution:  # x (B, *event)
        zeros = _zeros(x)
        return Categorical(
            logits=torch.tensor(self.probs, dtype=zeros.dtype, device=zeros.device).log() + zeros
        )


@dataclass(frozen=True)
class ConstantGaussian:
    """The same Gaussian for every input; batch shape (B,), with D outputs event shape (D,).

    >>> ConstantGaussian((1.0,), (2.0,))(torch.zeros(3, 5)).mean
    tensor([1., 1., 1.])
    """

    mean: tuple[float, ...]
    scale: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) == 0 or len(self.mean) != len(self.scale) or not min(self.scale) > 0:
            raise InputError(
                "mean and scale must have one entry per output and scale must be > 0, "
                f"got {describe(self.mean)} and {describe(self.scale)}"
            )

    def __call__(self, x: Tensor, /) -> Distribution:  # x (B, *event)
        zeros = _zeros(x)
        mean, scale = (
            torch.tensor(each, dtype=zeros.dtype, device=zeros.device) + zeros  # (B, D)
            for each in (self.mean, self.scale)
        )
        if len(self.mean) == 1:
            return Normal(mean[:, 0], scale[:, 0])
        return Independent(Normal(mean, scale), 1)


def _zeros(x: Tensor) -> Tensor:  # (B, 1)
    """Zeros that hang on x: gradient attacks see a zero gradient, not an error."""
    first = x.unsqueeze(-1).flatten(1)[:, :1]
    return torch.where(torch.zeros_like(first, dtype=torch.bool), first, 0.0)


def uniform(num_classes: int) -> ConstantClasses:
    """Every class equally probable: NLL ln C.

    >>> uniform(4)
    ConstantClasses(probs=(0.25, 0.25, 0.25, 0.25))
    """
    num_classes = count("num_classes", num_classes)
    return ConstantClasses((1 / num_classes,) * num_classes)


def majority(
    y: Tensor,  # (N,) integer labels
    num_classes: int | None = None,  # absent: the largest label + 1
) -> ConstantClasses:
    """The training frequencies, (n_c + 1)/(N + C) so that no class is impossible: always answers
    the majority class.

    >>> majority(torch.tensor([0, 1, 1]), num_classes=2)
    ConstantClasses(probs=(0.4, 0.6))
    """
    if not is_integral(y):
        raise InputTypeError("y must be a tensor of integer class labels", got=y)
    if tuple(y.shape) not in ((len(y),), (len(y), 1)) or len(y) == 0 or int(y.min()) < 0:
        raise InputError("y must hold labels >= 0 in shape (N,) with N >= 1", got=y)
    num_classes = int(y.max()) + 1 if num_classes is None else count("num_classes", num_classes)
    if int(y.max()) >= num_classes:
        raise InputError(f"y must hold labels from 0 to {num_classes - 1}, got {int(y.max())}")
    counts = torch.bincount(y.reshape(-1).cpu(), minlength=num_classes).tolist()
    return ConstantClasses(tuple((c + 1) / (len(y) + num_classes) for c in counts))


def constant(
    y: Tensor,  # (N,), (N, 1) or (N, D)
) -> ConstantGaussian:
    """The training mean and standard deviation of each output: the best that can be done without x.

    >>> constant(torch.tensor([1.0, 3.0]))
    ConstantGaussian(mean=(2.0,), scale=(1.0,))
    """
    if not is_real(y):
        raise InputTypeError("y must be a real tensor", got=y)
    if y.ndim not in (1, 2) or len(y) == 0:
        raise InputError("y must have shape (N,) or (N, D) with N >= 1", got=y)
    y = finite("y", y).detach().cpu().double().reshape(len(y), -1)
    scale = y.std(0, correction=0)
    if bool((scale == 0).any()):
        raise InputError("y must vary in every output: its standard deviation is 0")
    return ConstantGaussian(tuple(y.mean(0).tolist()), tuple(scale.tolist()))

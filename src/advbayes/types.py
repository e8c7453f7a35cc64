"""The protocols that the parts of the package share.

Axis order, wherever several appear together: `S` (theta), `K` (channel sample), `N` (reference
    point), `B` (batch).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributions import Distribution


class Predictor(Protocol):
    """Anything that predicts: inputs in, a distribution over `y` of batch shape `(B,)` out."""

    def __call__(
        self,
        x: Tensor,  # (B, *event)
        /,
    ) -> Distribution: ...


class Loss(Protocol):
    """What an attacker maximises: one value per example."""

    def __call__(self, prediction: Distribution, y: Tensor, /) -> Tensor: ...  # (B,)


class Attack(Protocol):
    """Turns clean inputs into adversarial ones, knowing a Predictor and nothing else."""

    def __call__(
        self,
        predict: Predictor,
        x: Tensor,  # (B, *event)
        y: Tensor | None = None,  # (B,) or (B, D); absent: the predictor's own mode
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor: ...  # (B, *event)


class ChannelDensity(Protocol):
    """`log p(x'_b | x_n, theta)`; whatever does not depend on x' was computed beforehand."""

    def log_prob(
        self,
        x_adv: Tensor,  # (B, *event)
        /,
    ) -> Tensor: ...  # (N, B)


@runtime_checkable
class Channel(Protocol):
    """The stochastic adversary p(x' | x, theta); theta reaches it through the Predictor alone."""

    def sample(
        self,
        predict: Predictor,
        x: Tensor,  # (B, *event)
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor: ...  # (B, *event)

    def density(
        self,
        predict: Predictor,
        x: Tensor,  # (N, *event)
        y: Tensor | None = None,
    ) -> ChannelDensity: ...

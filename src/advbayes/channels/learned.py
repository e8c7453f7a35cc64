"""A channel that a network computes, trained against the model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from advbayes import checks
from advbayes.attacks import mode
from advbayes.attacks.balls import Ball
from advbayes.channels.density import GaussianDensity
from advbayes.channels.mixture import components
from advbayes.channels.noise import noise_like
from advbayes.types import Channel, Predictor


@dataclass(frozen=True, eq=False)
class Learned:
    """x' = x + bounded(mean) + std * noise with (mean, raw log-std) from a network of (x, y);
    trained against the model by `fit`.

    The mean stays in `ball` around x, so that the adversary cannot win by leaving the data; the
    standard deviations stay in `sigma_range`. `entropy_bonus` rewards the adversary for its mean
    log-std, so that it stays random.

    >>> from advbayes import L2
    >>> from advbayes.networks import FullyConnectedGenerator
    >>> channel = Learned(FullyConnectedGenerator(3), L2(1.0))
    >>> channel.sample(None, torch.zeros(5, 3), torch.zeros(5)).shape
    torch.Size([5, 3])
    """

    generator: nn.Module  # (x, y) -> mean shift and raw log-std, both of x's shape
    ball: Ball
    sigma_range: tuple[float, float] = (1e-2, 0.5)
    entropy_bonus: float = 0.0

    def __post_init__(self) -> None:
        checks.instance("generator", self.generator, nn.Module, "a torch.nn.Module of (x, y)")
        low, high = self.sigma_range
        checks.number("sigma_range[0]", low, low=0, open_low=True)
        checks.number("sigma_range[1]", high, low=low)
        checks.number("entropy_bonus", self.entropy_bonus, low=0)

    def moments(
        self, predict: Predictor, x: Tensor, y: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Centre and standard deviation of x', of x's shape, differentiable in the generator."""
        if y is None:
            with torch.no_grad():
                y = mode(predict(x))
        shift, raw = self.generator(x, y)
        if shift.shape != x.shape or raw.shape != x.shape:
            raise checks.InputError(
                f"generator must return mean and log-std of x's shape {tuple(x.shape)}, "
                f"got {tuple(shift.shape)} and {tuple(raw.shape)}"
            )
        low, high = (math.log(bound) for bound in self.sigma_range)
        return self.ball.project(x + shift, x), (low + (high - low) * torch.sigmoid(raw)).exp()

    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        centre, std = self.moments(predict, x, y)
        return centre + std * noise_like(x, generator)

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> GaussianDensity:
        with torch.no_grad():
            centre, std = self.moments(predict, x, y)
        return GaussianDensity((0.0,), (centre,), (std,))


def learned_in(channel: Channel) -> list[Learned]:
    """The learned channels in a (nested) mixture: the adversaries that `fit` trains.

    >>> from advbayes import Mixture, Noise
    >>> learned_in(Mixture([0.5, 0.5], [Noise(), Noise(1.0)]))
    []
    """
    parts = [part for part in components(channel) if isinstance(part, Learned)]
    return list(dict.fromkeys(parts))  # each is trained once

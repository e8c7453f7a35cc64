"""Gaussian noise, the neutral element of channels at sigma = 0. It is never clipped: a clipped
Gaussian has no simple density."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from advbayes import checks
from advbayes.channels.density import GaussianDensity
from advbayes.seeds import drawn
from advbayes.types import Predictor


@dataclass(frozen=True)
class Noise:
    """x' = x + sigma * noise; `Noise(0)` is the identity, the neutral element.

    >>> Noise(0.0).sample(None, torch.ones(2, 3)).equal(torch.ones(2, 3))
    True
    """

    sigma: float = 0.0

    def __post_init__(self) -> None:
        checks.number("sigma", self.sigma, low=0)

    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return add_noise(x, self.sigma, generator)

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> GaussianDensity:
        if self.sigma == 0:
            refuse_dirac(self)
        return GaussianDensity((0.0,), (x,), (self.sigma,))


def add_noise(x: Tensor, sigma: float, generator: torch.Generator | None) -> Tensor:
    if sigma == 0:
        return x
    return torch.add(x, noise_like(x, generator), alpha=sigma)


def noise_like(x: Tensor, generator: torch.Generator | None) -> Tensor:
    return drawn(torch.randn, x.shape, generator, dtype=x.dtype, device=x.device)


def refuse_dirac(channel: object) -> None:
    raise checks.InputError(
        f"{channel} has no density: with sigma = 0 all mass sits on single points. Give it noise "
        f"(sigma > 0), or purify by simulation, which only needs samples"
    )

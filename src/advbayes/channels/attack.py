"""An attack made probabilistic: its output, plus Gaussian noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import checks
from advbayes.attacks import PGD
from advbayes.attacks.gradients import move
from advbayes.channels.density import GaussianDensity
from advbayes.channels.noise import Noise, add_noise, refuse_dirac
from advbayes.types import Attack, Channel, Loss, Predictor


@dataclass(frozen=True)
class AttackChannel:
    """x' = attack(x) + sigma * noise: an optimiser made probabilistic. At fixed theta its density is Gaussian around the attack.

    >>> from advbayes import L2, one_step
    >>> AttackChannel(one_step(L2(1.0)), sigma=0.1).sigma
    0.1
    """

    attack: Attack
    sigma: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.attack):
            raise TypeError(f"attack must be an attack such as one_step(L2(1.0)), got {checks.describe(self.attack)}")
        checks.number("sigma", self.sigma, low=0)

    def sample(
        self, predict: Predictor, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        return add_noise(self.centre(predict, x, y, generator=generator), self.sigma, generator)

    def centre(
        self, predict: Predictor, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """The attack's output, before the noise. Attacks need gradients, whatever the mode they are called in."""
        if torch.is_grad_enabled():
            return self.attack(predict, x, y, generator=generator)
        with torch.enable_grad():
            return self.attack(predict, x, y, generator=generator).detach()

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> GaussianDensity:
        if self.sigma == 0:
            refuse_dirac(self)
        # A fixed generator: the centres of an attack with random starts are one draw, the same at every call.
        generator = torch.Generator(x.device).manual_seed(0)
        return GaussianDensity((0.0,), (self.centre(predict, x, y, generator=generator).detach(),), (self.sigma,))


def draws_noise_alone(channel: Channel) -> bool:
    """Noise, or an attack that is not random itself, plus noise."""
    if isinstance(channel, AttackChannel):
        return isinstance(channel.attack, PGD) and channel.attack.is_one_step
    return isinstance(channel, Noise)


class HasDirection(ABC):
    """A Predictor that gives a loss' input gradient alone, without the loss and whether the example is broken."""

    @abstractmethod
    def __call__(self, x: Tensor, /) -> Distribution: ...

    @abstractmethod
    def input_gradient(self, loss: Loss, x: Tensor, y: Tensor) -> Tensor: ...


def shifted_by(channel: Channel, predict: Predictor, x: Tensor, y: Tensor | None, noise: Tensor | None) -> Tensor:
    """A channel that draws noise alone, at a given noise."""
    assert isinstance(channel, (Noise, AttackChannel))
    centre = x
    if isinstance(channel, AttackChannel):
        attack = channel.attack
        if isinstance(predict, HasDirection) and isinstance(attack, PGD) and y is not None and attack.ball.eps > 0:
            gradient = predict.input_gradient(attack.stages[0][0], x, y)  # a one-step attack needs nothing else
            centre = move(attack.ball, x, gradient, attack.ball.eps, x, strict=False)
        else:
            centre = attack(predict, x, y)
    return centre if noise is None or channel.sigma == 0 else torch.add(centre, noise, alpha=channel.sigma)

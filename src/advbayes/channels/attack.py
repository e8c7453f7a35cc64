"""An attack made probabilistic: its output, plus Gaussian noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks import PGD, mode
from advbayes.attacks.gradients import where_rows
from advbayes.channels.density import GaussianDensity
from advbayes.channels.noise import Noise, add_noise, refuse_dirac
from advbayes.likelihoods import predicts_classes
from advbayes.seeds import SharedStarts, drawn, seed_from
from advbayes.types import Attack, Channel, Predictor


@dataclass(frozen=True)
class AttackChannel:
    """x' = attack(x) + sigma * noise: at fixed theta a Gaussian around the attack's output.

    Where an attack starts at random (its gradient vanishes at x), all examples share one start, so
    that the density is that of the samples. An attack that draws more than its start has samples
    but no density. Without labels a classifier is attacked at its likeliest class, a regression at
    y = mean + sd or mean - sd, each with probability 1/2, because at its own mean it would have no
    gradient; the density is then a mixture of two Gaussians.

    >>> from advbayes import L2, one_step
    >>> AttackChannel(one_step(L2(1.0)), sigma=0.1).sigma
    0.1
    """

    attack: Attack
    sigma: float = 0.0

    def __post_init__(self) -> None:
        checks.function("attack", self.attack, "an attack such as one_step(L2(1.0))")
        checks.number("sigma", self.sigma, low=0)

    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        y = drawn_labels(predict, x, generator) if y is None else y
        return add_noise(self.centre(predict, x, y, generator=generator), self.sigma, generator)

    def centre(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The attack's output before the noise; gradients are enabled for it in any grad mode."""
        if not draws_noise_alone(self):
            seed = seed_from(generator, x.device)
            generator = SharedStarts(len(x), x.device, seed)
        return self._attacked(predict, x, y, generator)

    def _attacked(
        self, predict: Predictor, x: Tensor, y: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        if torch.is_grad_enabled():
            return self.attack(predict, x, y, generator=generator)
        with torch.enable_grad():
            return self.attack(predict, x, y, generator=generator).detach()

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> GaussianDensity:
        if self.sigma == 0:
            refuse_dirac(self)
        labels = likely_labels(predict, x) if y is None else (y,)
        starts = SharedStarts(len(x), x.device)
        before = starts.get_state()
        centres = tuple(self._attacked(predict, x, each, starts).detach() for each in labels)
        if not torch.equal(starts.get_state(), before):
            raise checks.InputError(
                f"{self} has no density: its attack is random throughout, and not by one start "
                f"alone. Purify by simulation (SimulatedPurifier), which only needs samples"
            )
        num = len(centres)
        return GaussianDensity((-math.log(num),) * num, centres, (self.sigma,) * num)


def likely_labels(predict: Predictor, x: Tensor) -> tuple[Tensor, ...]:
    """Labels in place of an absent y: the likeliest class, or mean +- sd, equally likely."""
    with torch.no_grad():
        prediction = predict(x)
    if predicts_classes(prediction):
        return (mode(prediction),)
    mean, sd = prediction.mean, prediction.stddev
    return mean + sd, mean - sd


def drawn_labels(predict: Predictor, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """One of `likely_labels` for each example."""
    labels = likely_labels(predict, x)
    if len(labels) == 1:
        return labels[0]
    return where_rows(drawn(torch.rand, (len(x),), generator, device=x.device) < 0.5, *labels)


def draws_noise_alone(channel: Channel) -> bool:
    """Noise, or an attack that is not random itself, plus noise."""
    match channel:
        case Noise() | AttackChannel(PGD(is_one_step=True)):
            return True
    return False


def shifted_by(
    channel: Channel, predict: Predictor, x: Tensor, y: Tensor | None, noise: Tensor | None
) -> Tensor:
    """A channel that draws noise alone, at a given noise."""
    match channel:
        case AttackChannel(attack, sigma):
            x = attack(predict, x, y)
        case Noise(sigma):
            pass
    return x if noise is None or sigma == 0 else torch.add(x, noise, alpha=sigma)

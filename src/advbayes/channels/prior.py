"""Uncertainty about the adversary's budget: a prior over eps (section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributions import Beta, Distribution
from torch.nn import functional

from advbayes import checks
from advbayes.attacks.parts import with_eps
from advbayes.channels.attack import AttackChannel
from advbayes.channels.mixture import Mixture
from advbayes.types import Attack


def eps_prior(
    attack: Attack,
    eps: Distribution | Mapping[float, float] | Sequence[float],
    sigma: float = 0.0,
    *,
    num: int = 8,
    stratified: bool = True,
) -> Mixture:
    """p(x' | x, theta) = sum_k w_k N(x'; attack(x; eps_k), sigma^2): an attack of unknown budget.

    `eps` is a finite prior, {eps: weight} or equally likely values, or a distribution on positive
    numbers (Beta, Gamma, Uniform, LogNormal ...), which is replaced by its quantiles at (k + 1/2) /
    num, each with weight 1 / num. Sampling and density are exact for that finite prior. The
    attack's step sizes scale with eps; at eps = 0 there is noise alone.

    >>> from advbayes import L2, one_step
    >>> channel = eps_prior(one_step(L2(1.0)), {0.0: 0.2, 0.5: 0.5, 1.0: 0.3}, sigma=0.1)
    >>> [part.attack.ball.eps for part in channel.channels], channel.weights
    ([0.0, 0.5, 1.0], (0.2, 0.5, 0.3))
    >>> halves = eps_prior(one_step(L2(1.0)), torch.distributions.Uniform(0.0, 2.0), 0.1, num=2)
    >>> [part.attack.ball.eps for part in halves.channels]
    [0.5, 1.5]
    """
    if isinstance(eps, Distribution):
        values = quantiles(eps, checks.count("num", num))
        weights = [1.0 / num] * num
    elif isinstance(eps, Mapping):
        values, weights = list(eps), list(eps.values())
    else:
        values = list(eps)
        weights = [1.0 / max(1, len(values))] * len(values)
    values = [checks.number("eps", value, low=0) for value in values]
    return Mixture(
        weights, [AttackChannel(with_eps(attack, value), sigma) for value in values], stratified
    )


def quantiles(prior: Distribution, num: int) -> list[float]:
    """The quantiles of a distribution on the real line at (k + 1/2) / num."""
    if prior.batch_shape or prior.event_shape:
        raise checks.InputError("eps must be a distribution of one number", got=prior)
    levels = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    if isinstance(prior, Beta):
        return list(map(float, _of_beta(prior, levels)))
    for quantile in (prior.icdf, partial(_by_bisection, prior)):
        try:
            return list(map(float, quantile(levels)))
        except NotImplementedError:
            continue
    raise checks.InputError("eps must be a distribution with a cdf", got=prior)


def _of_beta(prior: Beta, levels: Tensor) -> Tensor:
    """A Beta's, whose cdf torch lacks: by a sum over t with x = 1 / (1 + e^-t), where its density
    has one bell without corners, however small or large its parameters are."""
    a, b = float(prior.concentration1), float(prior.concentration0)
    reach = 12 * math.sqrt(1 / a + 1 / b)  # of the bell; beyond, it falls as e^(a t) and e^(-b t)
    low, high = math.log(a / b) - reach - 50 / a, math.log(a / b) + reach + 50 / b
    width = (high - low) / (1 << 17)
    t = low + (torch.arange(1 << 17, dtype=torch.float64) + 0.5) * width
    mass = (a * functional.logsigmoid(t) + b * functional.logsigmoid(-t)).softmax(0)
    total = mass.cumsum(0)
    cell = torch.searchsorted(total, levels).clamp_max(len(t) - 1)
    return (t[cell] + (0.5 - (total[cell] - levels) / mass[cell]) * width).sigmoid()


def _by_bisection(prior: Distribution, levels: Tensor) -> Tensor:
    low, high = torch.zeros_like(levels), torch.ones_like(levels)
    while bool((prior.cdf(high) < levels).any()):
        high = 2 * high
    for _ in range(200):
        middle = 0.5 * (low + high)
        above = prior.cdf(middle) >= levels
        high, low = torch.where(above, middle, high), torch.where(above, low, middle)
    return 0.5 * (low + high)

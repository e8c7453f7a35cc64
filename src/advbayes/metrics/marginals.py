"""Scores of whole predictive distributions of real targets, one output at a time: quantiles,
intervals, CRPS."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    LowRankMultivariateNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
)

from advbayes.checks import InputTypeError, count, finite, number
from advbayes.likelihoods import GaussianMixture
from advbayes.metrics.intervals import confidence_level
from advbayes.metrics.scores import batch_size, targets
from advbayes.seeds import GlobalStream

MOST_PAIRED = 2048  # components


@dataclass(frozen=True)
class GaussianMarginals:
    """What each output's marginal is made of: K weighted Gaussians.

    >>> normal = GaussianMarginals(torch.ones(1, 1), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    >>> normal.cdf(torch.zeros(1, 1))
    tensor([[0.5000]])
    """

    weights: Tensor  # (B, K)
    means: Tensor  # (B, K, D)
    scales: Tensor  # (B, K, D)

    def double(self) -> GaussianMarginals:
        """The same in float64, with weights that sum to 1 there."""
        weights = self.weights.double()
        share = weights / weights.sum(1, keepdim=True)
        return GaussianMarginals(share, self.means.double(), self.scales.double())

    def cdf(self, value: Tensor) -> Tensor:  # (B, D) -> (B, D)
        """P(output <= value), sum over k of w_k Phi((value - m_k)/s_k)."""
        below: Tensor = torch.special.ndtr((value[:, None] - self.means) / self.scales)
        return (self.weights[:, :, None] * below).sum(1)


def gaussian_marginals(prediction: Distribution) -> GaussianMarginals | None:
    """The Gaussians that a prediction's marginals are mixed from, or None where they are not known.

    >>> gaussian_marginals(torch.distributions.Normal(torch.zeros(2), 1.0)).means.shape
    torch.Size([2, 1, 1])
    """
    num = batch_size(prediction)
    moments: tuple[Tensor, Tensor] | None
    match prediction:
        case GaussianMixture():  # components first, as everywhere here; last in torch's mixtures
            weights = prediction.log_weights.exp().T
            moments = prediction.means.transpose(0, 1), prediction.scales.transpose(0, 1)
        case MixtureSameFamily():
            weights = prediction.mixture_distribution.probs
            moments = _moments(prediction.component_distribution)
        case _:
            weights, moments = torch.ones(num, 1), _moments(prediction)
    if moments is None:
        return None
    weights = weights.to(moments[0]).reshape(num, -1)
    means, scales = (each.reshape(num, weights.shape[1], -1) for each in moments)
    return GaussianMarginals(weights, means, scales)


def _moments(prediction: Distribution) -> tuple[Tensor, Tensor] | None:
    match prediction:
        case Independent():
            return _moments(prediction.base_dist)
        case Normal() | MultivariateNormal() | LowRankMultivariateNormal():
            return prediction.mean, prediction.stddev
    return None


def quantile(prediction: Distribution, q: float) -> Tensor:  # (B,) or (B, D), the shape of the mean
    """The q-quantile of each output: closed form for a Gaussian or where `.icdf` is given, else
    bisection on the cdf.

    The bracket needs no search: by Cantelli's inequality the quantile lies between mean - sd
    sqrt((1-q)/q) and mean + sd sqrt(q/(1-q)).

    >>> quantile(torch.distributions.Normal(torch.zeros(1), 1.0), 0.975)
    tensor([1.9600])
    """
    num = batch_size(prediction)
    q = number("q", q, low=0.0, high=1.0, open_low=True, open_high=True)
    known = gaussian_marginals(prediction)
    centre = finite("prediction.mean", prediction.mean)
    if known is not None and known.weights.shape[1] == 1:
        z = torch.special.ndtri(torch.tensor(q, dtype=torch.float64)).to(centre)
        gaussian: Tensor = centre + z * prediction.stddev
        return gaussian
    if known is None:
        if math.prod(prediction.event_shape) != 1:
            name, shape = type(prediction).__name__, tuple(prediction.event_shape)
            raise InputTypeError(
                f"the quantiles of {name} with {shape} outputs are not known: only Gaussians and "
                f"mixtures of them may have several outputs"
            )
        with contextlib.suppress(NotImplementedError):
            # float32 rounds levels near 1
            level = torch.full_like(centre, q, dtype=torch.float64)
            return prediction.icdf(level).to(centre.dtype)
        # without a cdf the moments, which may be infinite, do not matter
        _cdf(prediction, known, centre.reshape(num, -1))
    dtype, spread = centre.dtype, finite("prediction.variance", prediction.variance).sqrt()
    if known is not None:  # the tails of a float32 cdf are rounding
        known, centre, spread = known.double(), centre.double(), spread.double()
    slack = 1e-4 * spread  # the moments are rounded too
    low = centre - spread * math.sqrt((1 - q) / q) - slack
    high = centre + spread * math.sqrt(q / (1 - q)) + slack
    with contextlib.suppress(NotImplementedError):  # a cdf may refuse what lies outside the support
        low = low.clamp(min=getattr(prediction.support, "lower_bound", -math.inf))
        high = high.clamp(max=getattr(prediction.support, "upper_bound", math.inf))
    for _ in range(64 if centre.dtype == torch.float64 else 40):
        middle = 0.5 * (low + high)
        below = _cdf(prediction, known, middle.reshape(num, -1)).reshape(middle.shape) < q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (0.5 * (low + high)).to(dtype)


def _cdf(
    prediction: Distribution, known: GaussianMarginals | None, value: Tensor
) -> Tensor:  # (B, D) -> (B, D)
    if known is not None:
        return known.cdf(value)
    try:
        return prediction.cdf(value.reshape(prediction.mean.shape))
    except NotImplementedError:
        name = type(prediction).__name__
        raise InputTypeError(
            f"prediction must have a cdf or be made of Gaussians to give quantiles, got {name}"
        ) from None


@dataclass(frozen=True)
class Interval:
    """Central prediction intervals and whether they hold the targets, each `(B,)` or `(B, D)`.

    >>> Interval(torch.zeros(1), torch.ones(1), torch.tensor([True])).width
    tensor([1.])
    """

    low: Tensor
    high: Tensor
    inside: Tensor

    @property
    def width(self) -> Tensor:
        """high - low."""
        return self.high - self.low


def interval(
    prediction: Distribution,
    y: Tensor,  # (B,), (B, 1) or (B, D)
    *,
    level: float,
) -> Interval:
    """The central interval of each output at `level`, from its quantiles (1 -+ level)/2.

    >>> two = torch.distributions.Normal(torch.zeros(2), 1.0)
    >>> interval(two, torch.tensor([1.0, 2.0]), level=0.9).inside
    tensor([ True, False])
    """
    y, level = targets(prediction, y), confidence_level(level)
    low, high = quantile(prediction, 0.5 - 0.5 * level), quantile(prediction, 0.5 + 0.5 * level)
    shape = (len(y),) if y[0].numel() == 1 else y.shape
    return Interval(*(each.reshape(shape) for each in (low, high, (low <= y) & (y <= high))))


def crps(
    prediction: Distribution,
    y: Tensor,  # (B,), (B, 1) or (B, D)
    *,
    num_samples: int = 1000,
    generator: torch.Generator | None = None,
) -> Tensor:  # (B,)
    """Continuous ranked probability score E|X - y| - E|X - X'|/2, averaged over the D outputs.

    Closed form for Gaussians and mixtures of up to `MOST_PAIRED` of them (its cost is quadratic in
    their number); otherwise the unbiased estimate from `num_samples` draws.

    >>> crps(torch.distributions.Normal(torch.zeros(1), 1.0), torch.tensor([0.0]))
    tensor([0.2337])
    """
    num, y = batch_size(prediction), targets(prediction, y)
    known = gaussian_marginals(prediction)
    if known is None or known.means.shape[1] > MOST_PAIRED:
        return _sampled_crps(prediction, y, count("num_samples", num_samples, low=2), generator)
    k, d = known.means.shape[1:]
    rows = max(1, 2**22 // (k * k * d))  # bounds the memory of the K x K pairs
    return torch.cat(
        [_mixture_crps(known, y.reshape(num, d), slice(i, i + rows)) for i in range(0, num, rows)]
    )


def _mixture_crps(known: GaussianMarginals, y: Tensor, rows: slice) -> Tensor:
    weights, means, scales = known.weights[rows, :, None], known.means[rows], known.scales[rows]
    to_y = (weights * _mean_abs(means - y[rows, None], scales)).sum(1)
    apart = _mean_abs(
        means[:, :, None] - means[:, None], (scales[:, :, None] ** 2 + scales[:, None] ** 2).sqrt()
    )
    among = (weights[:, :, None] * weights[:, None] * apart).sum((1, 2))
    score: Tensor = to_y - 0.5 * among
    return score.mean(1)


def _mean_abs(mean: Tensor, scale: Tensor) -> Tensor:
    """E|X| of a Gaussian: m (2 Phi(m/s) - 1) + 2 s phi(m/s)."""
    z = mean / scale
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return mean * torch.erf(z / math.sqrt(2)) + 2 * scale * density


def _sampled_crps(
    prediction: Distribution, y: Tensor, num: int, generator: torch.Generator | None
) -> Tensor:
    # torch's distributions draw from the global stream alone: a seeded one, put back afterwards
    stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if generator is not None:
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        stream = GlobalStream(int(seed))
    with stream:
        draws = prediction.sample((num,)).sort(0).values  # (M, B) or (M, B, D)
    finite("draws of the prediction", draws)
    # sum over pairs of |x_i - x_j| from the order statistics
    rank = torch.arange(1, num + 1, device=draws.device).to(draws) * 2 - num - 1
    apart = torch.tensordot(rank, draws, dims=1) * 2 / (num * (num - 1))
    score: Tensor = (draws - y).abs().mean(0) - 0.5 * apart
    return score.reshape(len(y), -1).mean(1)

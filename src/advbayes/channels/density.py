"""Densities of channels: mixtures of Gaussians whose centres do not depend on x'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from advbayes import checks
from advbayes.likelihoods import gaussian_log_density
from advbayes.types import ChannelDensity


@dataclass(frozen=True, eq=False)
class GaussianDensity:
    """log sum_k w_k N(x'; centres_kn, scales_k^2) for each reference point n.

    >>> density = GaussianDensity((0.0,), (torch.zeros(2, 3),), (1.0,))
    >>> density.log_prob(torch.zeros(5, 3)).shape
    torch.Size([2, 5])
    """

    log_weights: tuple[float, ...]
    centres: tuple[Tensor, ...]  # K times (N, *event)
    # K times a number, or a tensor that broadcasts against (N, *event)
    scales: tuple[float | Tensor, ...]

    def log_prob(self, x_adv: Tensor) -> Tensor:  # (B, *event) -> (N, B)
        components = zip(self.log_weights, self.centres, self.scales, strict=True)
        parts = [w + log_normal(x_adv, centres, scale) for w, centres, scale in components]
        return parts[0] if len(parts) == 1 else torch.logsumexp(torch.stack(parts), dim=0)


def log_normal(
    x_adv: Tensor, centres: Tensor, scale: float | Tensor, limit: int = 1 << 24
) -> Tensor:
    """log N(x'_b; c_n, scale_n^2), (N, B), from differences, `limit` numbers at a time."""
    points, middle = x_adv.flatten(1), centres.flatten(1)
    if points.shape[1] != middle.shape[1]:
        raise checks.InputError(
            f"x_adv must have the event shape {tuple(centres.shape[1:])} of the reference",
            got=x_adv,
        )
    rows = max(1, limit // max(1, points.numel()))
    blocks = torch.split(middle.unsqueeze(1), rows)
    wide: Sequence[float | Tensor] = [scale] * len(blocks)
    if isinstance(scale, Tensor):
        each = torch.broadcast_to(scale, centres.shape).flatten(1)
        wide = torch.split(each.unsqueeze(1), rows)
    pairs = zip(blocks, wide, strict=True)
    return torch.cat([gaussian_log_density(points, *pair).sum(-1) for pair in pairs])


@dataclass(frozen=True, eq=False)
class MixtureDensity:
    """logsumexp(ln pi_k + log p_k) for densities that are not all Gaussian."""

    log_weights: tuple[float, ...]
    parts: tuple[ChannelDensity, ...]

    def log_prob(self, x_adv: Tensor) -> Tensor:
        each = [
            weight + part.log_prob(x_adv)
            for weight, part in zip(self.log_weights, self.parts, strict=True)
        ]
        return torch.logsumexp(torch.stack(each), dim=0)

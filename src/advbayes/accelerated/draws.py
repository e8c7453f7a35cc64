"""A channel's randomness apart from its computation, which can then be compiled."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from advbayes.attacks.gradients import where_rows
from advbayes.channels.attack import draws_noise_alone, shifted_by
from advbayes.channels.mixture import Mixture, edge, systematic, with_losses
from advbayes.channels.noise import noise_like
from advbayes.types import Channel, Predictor


class Draws(NamedTuple):
    """All the randomness of one call to a channel's `sample`, drawn as `sample` draws it."""

    noise: Tensor  # as x, in the order below
    order: Tensor  # (B,): which examples, one component after the other
    offset: Tensor  # (): where in [0, 1) the strata begin


def draws(channel: Channel, x: Tensor, *, generator: torch.Generator | None = None) -> Draws | None:
    """A channel's randomness apart from its computation; None where the two are mixed."""
    if isinstance(channel, Mixture):
        if not channel._splits or not channel.stratified or channel._holds_rows:
            return None
        offset, order = systematic(len(x), generator, x.device)
        return Draws(noise_like(x, generator), order, offset)
    if not draws_noise_alone(channel):
        return None
    noiseless = channel.sigma == 0  # type: ignore[attr-defined]
    none = torch.empty(0, dtype=torch.long, device=x.device)
    return Draws(x.new_empty(0) if noiseless else noise_like(x, generator), none, none)


def sample_at(
    channel: Channel,
    drawn: Draws,
    predict: Predictor,
    x: Tensor,  # (B, *event), a mixture's already in the order drawn
    y: Tensor,
) -> Tensor:  # x' in x's order
    """What `sample` computes, given its randomness, by operations whose shapes do not depend on it.

    A stratified component's share of a batch varies by one example: it is computed for the larger
    share, and kept where the example is its own.
    """
    if not isinstance(channel, Mixture):
        return shifted_by(channel, predict, x, y, drawn.noise if drawn.noise.numel() else None)
    num, first = len(x), 0
    rows = torch.arange(num, device=x.device)
    bounds = [0.0, *channel._cumulated, 1.0]
    inner = (edge(num, share, drawn.offset) for share in channel._cumulated)
    edges: list[Tensor | int] = [0, *inner, num]
    out = x
    for members in channel._groups:
        last = first + len(members)
        low = math.floor(round(num * bounds[first], 9))
        high = min(num, math.ceil(round(num * bounds[last], 9)))
        places, part = rows[low:high], slice(low, high)
        merged = channel.channels[members[0]]
        if len(members) > 1:
            index = torch.stack([places >= end for end in edges[first + 1 : last]]).sum(0)
            merged = with_losses([channel.channels[k] for k in members], index)
        if high > low:
            moved = shifted_by(merged, predict, x[part], y[part], drawn.noise[part])
            is_member = (places >= edges[first]) & (places < edges[last])
            kept = where_rows(is_member, moved, out[part])
            out = torch.cat([out[:low], kept, out[high:]])
        first = last
    return out

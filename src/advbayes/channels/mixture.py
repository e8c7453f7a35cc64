"""Mixtures of channels, stratified within a batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast, overload

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks import PGD, PerExample
from advbayes.attacks.parts import on_rows as attack_on_rows
from advbayes.attacks.parts import settings
from advbayes.channels.attack import AttackChannel, drawn_labels, draws_noise_alone, shifted_by
from advbayes.channels.density import GaussianDensity, MixtureDensity
from advbayes.channels.noise import Noise, noise_like
from advbayes.seeds import for_batch, narrowed, num_drawn, sorted_share
from advbayes.types import Channel, Predictor


@dataclass(frozen=True)
class Mixture:
    """sum_k pi_k p_k, stratified within a batch as in the paper; iid with `stratified=False`.

    Stratified: example i of a random order takes the component at (i + u)/B of the cumulated
    weights, with one u for the batch, so each component's share is pi_k up to one example and
    exactly pi_k on average. An attack runs only on the examples of its component, and attacks that
    differ in their loss alone share gradient passes.

    >>> Mixture([0.5, 0.5], [Noise(0.0), Noise(1.0)]).sample(None, torch.zeros(4, 1)).eq(0).sum()
    tensor(2)
    """

    weights: Sequence[float]
    channels: Sequence[Channel]
    stratified: bool = True

    def __post_init__(self) -> None:
        numbered = enumerate(self.weights)
        weights = tuple(checks.number(f"weights[{k}]", weight) for k, weight in numbered)
        channels = tuple(self.channels)
        if not channels or len(weights) != len(channels):
            raise checks.InputError(
                f"weights must be as many as channels, got {len(weights)} weights and "
                f"{len(channels)} channels"
            )
        if any(weight < 0 for weight in weights) or abs(sum(weights) - 1) > 1e-6:
            raise checks.InputError(
                f"Mixture weights must be non-negative and sum to 1, got {list(weights)}"
            )
        for channel in channels:
            if not isinstance(channel, Channel):
                raise checks.InputTypeError("channels must have sample and density", got=channel)
        total = math.fsum(weights)  # 1 up to rounding: the last edge must be exactly there
        object.__setattr__(self, "weights", tuple(weight / total for weight in weights))
        object.__setattr__(self, "channels", channels)

    def _strata(
        self, num: int, generator: torch.Generator | None, device: torch.device
    ) -> tuple[Tensor, list[int]]:
        """A random order of the examples and the components' edges in it, group by group."""
        if self.stratified:
            offset, order = systematic(num, generator, device)
            u = float(offset)
            return order, [0, *(int(edge(num, share, u)) for share in self._cumulated), num]
        weights = torch.tensor(self._ordered_weights, dtype=torch.float64, device=device)
        component = torch.multinomial(weights, num, replacement=True, generator=generator)
        counts = torch.bincount(component, minlength=len(weights))
        return component.argsort(stable=True), [0, *counts.cumsum(0).tolist()]

    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        if not len(x):
            return x.clone()
        # labels that an attack draws for itself are not those of the other components
        labels = drawn_labels(predict, x, generator) if y is None and self._has_attacks else y
        num = num_drawn(len(x), generator)
        order, edges = self._strata(num, for_batch(generator), x.device)
        index, places, local_edges = sorted_share(order, edges, generator)
        noise = noise_like(x, narrowed(generator, places)) if self._splits else None
        x_in, moved, first = x.index_select(0, index), [], 0
        for members in self._groups:
            last = first + len(members)
            targets = labels if isinstance(self.channels[members[0]], AttackChannel) else y
            cuts, begin, end = local_edges[first : last + 1], edges[first], edges[last]
            first, start, stop = last, cuts[0], cuts[-1]
            if stop == start and end > begin and noise is None:
                # a process without rows of this part still draws what the others draw
                source = narrowed(generator, index.new_zeros(1), end - begin)
                some = None if targets is None else targets[:1]
                self.channels[members[0]].sample(predict, x[:1], some, generator=source)
            if stop > start:
                counts = [b - a for a, b in itertools.pairwise(cuts)]
                loss_rows = order[places[start:stop]] if self._holds_rows else None
                channel = self._merged(members, counts, x.device, loss_rows)
                inputs = x_in[start:stop]
                rows = None if targets is None else targets.index_select(0, index[start:stop])
                if noise is None:
                    source = narrowed(generator, places[start:stop] - begin, end - begin)
                    moved.append(channel.sample(predict, inputs, rows, generator=source))
                else:
                    moved.append(shifted_by(channel, predict, inputs, rows, noise[start:stop]))
        return torch.empty_like(x).index_copy_(0, index, torch.cat(moved))

    @cached_property
    def _splits(self) -> bool:
        """Whether all randomness can be drawn before any attack is computed."""
        return all(draws_noise_alone(channel) for channel in self.channels)

    @cached_property
    def _groups(self) -> list[list[int]]:
        """Components that one call can serve: equal noises, attacks that differ in losses alone."""
        groups: dict[object, list[int]] = {}
        for k, channel in enumerate(self.channels):
            key: object = k
            match channel:
                case Noise():
                    key = channel
                case AttackChannel(PGD() as attack, sigma):
                    alike = settings(attack) | {"stages": tuple(num for _, num in attack.stages)}
                    key = (sigma, *alike.values())
            groups.setdefault(key, []).append(k)
        return list(groups.values())

    @cached_property
    def _ordered_weights(self) -> list[float]:  # in the order of the groups
        return [self.weights[k] for members in self._groups for k in members]

    @cached_property
    def _cumulated(self) -> list[float]:
        """The inner edges of the components in [0, 1], in the order of the groups."""
        return [math.fsum(self._ordered_weights[:k]) for k in range(1, len(self.weights))]

    @cached_property
    def _has_attacks(self) -> bool:
        return any(isinstance(channel, AttackChannel) for channel in self.channels)

    @cached_property
    def _holds_rows(self) -> bool:
        """Whether an attack's loss has an entry for each example of the batch, to go with it."""
        return on_rows(self, slice(0, 0)) is not self

    def _merged(
        self, members: list[int], counts: list[int], device: torch.device, rows: Tensor | None
    ) -> Channel:
        """The channel of one group: examples in the members' order, with their own losses."""
        channels = [self.channels[k] for k in members]
        if rows is not None:
            channels = [on_rows(channel, rows) for channel in channels]
        if len(members) == 1:
            return channels[0]
        index = torch.arange(len(members), device=device)
        return with_losses(channels, index.repeat_interleave(torch.tensor(counts, device=device)))

    def density(
        self, predict: Predictor, x: Tensor, y: Tensor | None = None
    ) -> GaussianDensity | MixtureDensity:
        parts = [
            (w, c.density(predict, x, y))
            for w, c in zip(self.weights, self.channels, strict=True)
            if w > 0
        ]
        gaussian = [(weight, part) for weight, part in parts if isinstance(part, GaussianDensity)]
        if len(gaussian) < len(parts):
            return MixtureDensity(tuple(math.log(w) for w, _ in parts), tuple(p for _, p in parts))
        return GaussianDensity(
            tuple(math.log(w) + inner for w, part in gaussian for inner in part.log_weights),
            tuple(centres for _, part in gaussian for centres in part.centres),
            tuple(scale for _, part in gaussian for scale in part.scales),
        )


def components(channel: Channel) -> Iterator[Channel]:
    """The components of a (nested) mixture; any other channel is its own component.

    >>> [part.sigma for part in components(Mixture([0.5, 0.5], [Noise(0.0), Noise(1.0)]))]
    [0.0, 1.0]
    """
    if isinstance(channel, Mixture):
        for part in channel.channels:
            yield from components(part)
    else:
        yield channel


def on_rows(channel: Channel, rows: Tensor | slice) -> Channel:
    """The channel of some of the examples: losses with an entry for each keep those of `rows`."""
    if isinstance(channel, AttackChannel):
        attack = attack_on_rows(channel.attack, rows)
        return channel if attack is channel.attack else replace(channel, attack=attack)
    if isinstance(channel, Mixture):
        parts = tuple(on_rows(part, rows) for part in channel.channels)
        same = all(new is old for new, old in zip(parts, channel.channels, strict=True))
        return channel if same else replace(channel, channels=parts)
    return channel


def with_losses(channels: Sequence[Channel], index: Tensor) -> Channel:
    """One channel for a group: of equal noises the first, of attacks alike but for their losses one
    that gives example b those of `index[b]`."""
    match channels[0]:
        case AttackChannel(PGD() as first, sigma):
            stages = [settings(cast(AttackChannel, each).attack)["stages"] for each in channels]
            merged = tuple(
                (PerExample(tuple(loss for loss, _ in same), index), same[0][1])
                for same in zip(*stages, strict=True)
            )
            return AttackChannel(replace(first, stages=merged), sigma)
    return channels[0]


@overload
def edge(num: int, share: float, offset: float) -> float: ...
@overload
def edge(num: int, share: float, offset: Tensor) -> Tensor: ...
def edge(num: int, share: float, offset: float | Tensor) -> float | Tensor:
    """Where a component ends, ceil(num share - offset), in strata that begin at `offset`.

    `share` is the weight of the components up to this one.

    >>> edge(10, 0.25, 0.6), edge(10, 0.25, 0.4)
    (2, 3)
    """
    at = round(num * share, 9) - offset
    return at.ceil().clamp(0, num) if isinstance(at, Tensor) else min(num, max(0, math.ceil(at)))


def systematic(
    num: int, generator: torch.Generator | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """What a stratified batch draws: one offset in [0, 1), and an order of the examples."""
    offset = torch.rand((), generator=generator, dtype=torch.float64, device=device)
    return offset, torch.randperm(num, generator=generator, device=device)

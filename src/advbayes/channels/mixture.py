"""Mixtures of channels, stratified within a batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks import PGD, PerExample
from advbayes.channels.attack import AttackChannel, draws_noise_alone, shifted_by
from advbayes.channels.density import GaussianDensity, MixtureDensity
from advbayes.channels.noise import Noise, noise_like
from advbayes.types import Channel, Predictor


@dataclass(frozen=True)
class Mixture:
    """sum_k pi_k p_k. Stratified within a batch by default, as the paper builds its batches; iid on request.

    Stratified: example i of a random order takes the component at (i + u)/B of the cumulated weights, one u for the batch,
    so each component's share is pi_k up to one example and exactly pi_k on average. Only the examples that use an attack
    pay for it, and attacks that differ in their loss alone share their gradient passes.

    >>> Mixture([0.5, 0.5], [Noise(0.0), Noise(1.0)]).sample(None, torch.zeros(4, 1)).eq(0).sum()
    tensor(2)
    """

    weights: Sequence[float]
    channels: Sequence[Channel]
    stratified: bool = True

    def __post_init__(self) -> None:
        weights = tuple(checks.number(f"weights[{k}]", weight) for k, weight in enumerate(self.weights))
        channels = tuple(self.channels)
        if not channels or len(weights) != len(channels):
            raise ValueError(f"weights must be as many as channels, got {len(weights)} weights and {len(channels)} channels")
        if any(weight < 0 for weight in weights) or abs(sum(weights) - 1) > 1e-6:
            raise ValueError(f"Mixture weights must be non-negative and sum to 1, got {list(weights)}")
        for channel in channels:
            if not isinstance(channel, Channel):
                raise TypeError(f"channels must have sample and density, got {checks.describe(channel)}")
        total = math.fsum(weights)  # 1 up to rounding: the last edge must be exactly there
        object.__setattr__(self, "weights", tuple(weight / total for weight in weights))
        object.__setattr__(self, "channels", channels)

    def _strata(self, num: int, generator: torch.Generator | None, device: torch.device) -> tuple[Tensor, list[int]]:
        """A random order of the examples and the edges that cut it into components, those of one group side by side."""
        if self.stratified:
            offset, order = systematic(num, generator, device)
            u = float(offset)
            inner = [min(num, max(0, math.ceil(round(num * edge, 9) - u))) for edge in self._cumulated]
            return order, [0, *inner, num]
        weights = torch.tensor([self.weights[k] for members in self._groups for k in members], dtype=torch.float64, device=device)
        component = torch.multinomial(weights, num, replacement=True, generator=generator)
        counts = torch.bincount(component, minlength=len(weights))
        return component.argsort(stable=True), [0, *counts.cumsum(0).tolist()]

    def sample(
        self, predict: Predictor, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        if not len(x):
            return x.clone()
        order, edges = self._strata(len(x), generator, x.device)
        noise = noise_like(x, generator) if self._splits else None
        x_in, y_in = x.index_select(0, order), None if y is None else y.index_select(0, order)
        moved, first = [], 0
        for members in self._groups:
            cuts = edges[first : first + len(members) + 1]
            first += len(members)
            start, stop = cuts[0], cuts[-1]
            if stop > start:
                channel = self._merged(members, [b - a for a, b in itertools.pairwise(cuts)], x.device)
                inputs, rows = x_in[start:stop], None if y_in is None else y_in[start:stop]
                if noise is None:
                    moved.append(channel.sample(predict, inputs, rows, generator=generator))
                else:
                    own = noise[start:stop] if self._one_sigma is None else None
                    moved.append(shifted_by(channel, predict, inputs, rows, own))
        out = torch.cat(moved)
        if noise is not None and self._one_sigma is not None:
            out = torch.add(out, noise, alpha=self._one_sigma)
        return torch.empty_like(x).index_copy_(0, order, out)

    @cached_property
    def _splits(self) -> bool:
        """Whether all randomness can be drawn before any attack is computed."""
        return all(draws_noise_alone(channel) for channel in self.channels)

    @cached_property
    def _one_sigma(self) -> float | None:
        """The standard deviation that all components share: their noise is then added at once."""
        sigmas = {getattr(channel, "sigma", None) for channel in self.channels}
        return sigmas.pop() if len(sigmas) == 1 else None

    @cached_property
    def _groups(self) -> list[list[int]]:
        """Components that one call can serve: equal noises, and attacks alike but for their losses."""
        groups: dict[object, list[int]] = {}
        for k, channel in enumerate(self.channels):
            key: object = k
            if isinstance(channel, Noise):
                key = channel
            elif isinstance(channel, AttackChannel) and isinstance(channel.attack, PGD):
                attack = channel.attack
                settings = (getattr(attack, f.name) for f in fields(attack) if f.name != "stages")
                key = (channel.sigma, *settings, *(number for _, number in attack.stages))
            groups.setdefault(key, []).append(k)
        return list(groups.values())

    @cached_property
    def _cumulated(self) -> list[float]:
        """The inner edges of the components in [0, 1], in the order of the groups."""
        weights = [self.weights[k] for members in self._groups for k in members]
        return [math.fsum(weights[:k]) for k in range(1, len(weights))]

    @cached_property
    def _merged_before(self) -> dict[tuple[object, ...], Channel]:
        return {}

    def _merged(self, members: list[int], counts: list[int], device: torch.device) -> Channel:
        """The channel of one group, its examples in the members' order, each with its own component's losses."""
        first = self.channels[members[0]]
        if len(members) == 1 or not isinstance(first, AttackChannel) or not isinstance(first.attack, PGD):
            return first
        key = (members[0], *counts, device)
        merged = self._merged_before.get(key)
        if merged is None:
            if len(self._merged_before) >= 64:  # stratified counts take a few values; those drawn iid take many
                self._merged_before.clear()
            index = torch.arange(len(members), device=device).repeat_interleave(torch.tensor(counts, device=device))
            merged = self._merged_before[key] = self._with_losses(members, index)
        return merged

    def _with_losses(self, members: list[int], index: Tensor) -> AttackChannel:
        """One attack channel for a group, example b with the losses of its member `index[b]`."""
        first = self.channels[members[0]]
        assert isinstance(first, AttackChannel)
        assert isinstance(first.attack, PGD)
        stages = [self.channels[k].attack.stages for k in members]  # type: ignore[attr-defined]
        merged = tuple(
            (PerExample(tuple(stage[i][0] for stage in stages), index), first.attack.stages[i][1])
            for i in range(len(first.attack.stages))
        )
        return AttackChannel(replace(first.attack, stages=merged), first.sigma)

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> GaussianDensity | MixtureDensity:
        parts = [(w, c.density(predict, x, y)) for w, c in zip(self.weights, self.channels, strict=True) if w > 0]
        gaussian = [(weight, part) for weight, part in parts if isinstance(part, GaussianDensity)]
        if len(gaussian) < len(parts):
            return MixtureDensity(tuple(math.log(w) for w, _ in parts), tuple(part for _, part in parts))
        return GaussianDensity(
            tuple(math.log(weight) + inner for weight, part in gaussian for inner in part.log_weights),
            tuple(centres for _, part in gaussian for centres in part.centres),
            tuple(scale for _, part in gaussian for scale in part.scales),
        )


def systematic(num: int, generator: torch.Generator | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a stratified batch draws: one offset in [0, 1), and an order of the examples."""
    offset = torch.rand((), generator=generator, dtype=torch.float64, device=device)
    return offset, torch.randperm(num, generator=generator, device=device)

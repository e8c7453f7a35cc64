"""Adversarial channels p(x' | x, theta) (SM-5): each has `sample`, and `density` where one exists.

Theta reaches a channel only through the Predictor it is given. Channel noise is never clipped: a clipped Gaussian has no
simple density. Every density here is a mixture of Gaussians whose centres do not depend on x'.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from advbayes import checks
from advbayes.attacks import PGD, PerExample, mode
from advbayes.attacks.gradients import move
from advbayes.balls import _Ball as Ball
from advbayes.types import Attack, Channel, Loss, Predictor

_LOG_TWO_PI = math.log(2.0 * math.pi)


@dataclass(frozen=True, eq=False)
class GaussianDensity:
    """x' -> log sum_k w_k N(x'; centres_kn, scales_k^2) for each reference point n: what a Purifier computes once.

    >>> density = GaussianDensity((0.0,), (torch.zeros(2, 3),), (1.0,))
    >>> density.log_prob(torch.zeros(5, 3)).shape
    torch.Size([2, 5])
    """

    log_weights: tuple[float, ...]
    centres: tuple[Tensor, ...]  # K times (N, *event)
    scales: tuple[float | Tensor, ...]  # K times a number or (N, *event)

    def log_prob(self, x_adv: Tensor) -> Tensor:  # (B, *event) -> (N, B)
        parts = [
            weight + _log_normal(x_adv, centres, scale)
            for weight, centres, scale in zip(self.log_weights, self.centres, self.scales, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.logsumexp(torch.stack(parts), dim=0)


def _log_normal(x_adv: Tensor, centres: Tensor, scale: float | Tensor, limit: int = 1 << 24) -> Tensor:
    """log N(x'_b; c_n, scale_n^2), (N, B), from differences (exact to rounding), `limit` numbers at a time."""
    points, middle = x_adv.flatten(1), centres.flatten(1)
    if points.shape[1] != middle.shape[1]:
        raise ValueError(
            f"x_adv must have the event shape {tuple(centres.shape[1:])} of the reference, got {checks.describe(x_adv)}"
        )
    rows = max(1, limit // max(1, points.numel()))
    out = []
    for start in range(0, len(middle), rows):
        chunk = middle[start : start + rows].unsqueeze(1)
        if isinstance(scale, Tensor):
            wide: float | Tensor = scale.flatten(1)[start : start + rows].unsqueeze(1)
            log_det: float | Tensor = scale.flatten(1)[start : start + rows].log().sum(-1, keepdim=True)
        else:
            wide, log_det = scale, points.shape[1] * math.log(scale)
        square = ((points - chunk) / wide).square().sum(-1)
        out.append(-0.5 * square - log_det - 0.5 * points.shape[1] * _LOG_TWO_PI)
    return torch.cat(out)


def _add_noise(x: Tensor, sigma: float, generator: torch.Generator | None) -> Tensor:
    if sigma == 0:
        return x
    return torch.add(x, torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device), alpha=sigma)


def _noise_like(x: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)


def _refuse_dirac(channel: object) -> None:
    raise ValueError(
        f"{channel} has no density: with sigma = 0 all mass sits on single points. Give it noise (sigma > 0), or purify by "
        "simulation, which only needs samples"
    )


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
        self, predict: Predictor, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        return _add_noise(x, self.sigma, generator)

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> GaussianDensity:
        if self.sigma == 0:
            _refuse_dirac(self)
        return GaussianDensity((0.0,), (x,), (self.sigma,))


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
        return _add_noise(self.centre(predict, x, y, generator=generator), self.sigma, generator)

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
            _refuse_dirac(self)
        # A fixed generator: the centres of an attack with random starts are one draw, the same at every call.
        generator = torch.Generator(x.device).manual_seed(0)
        return GaussianDensity((0.0,), (self.centre(predict, x, y, generator=generator).detach(),), (self.sigma,))


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
            offset, order = _systematic(num, generator, device)
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
        noise = _noise_like(x, generator) if self._splits else None
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
                    moved.append(_shifted(channel, predict, inputs, rows, own))
        out = torch.cat(moved)
        if noise is not None and self._one_sigma is not None:
            out = torch.add(out, noise, alpha=self._one_sigma)
        return torch.empty_like(x).index_copy_(0, order, out)

    @cached_property
    def _splits(self) -> bool:
        """Whether all randomness can be drawn before any attack is computed."""
        return all(_draws_noise_alone(channel) for channel in self.channels)

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
        if key not in self._merged_before:
            if len(self._merged_before) >= 64:  # stratified counts take a few values; those drawn iid take many
                self._merged_before.clear()
            index = torch.arange(len(members), device=device).repeat_interleave(torch.tensor(counts, device=device))
            self._merged_before[key] = self._with_losses(members, index)
        return self._merged_before[key]

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


def _systematic(num: int, generator: torch.Generator | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a stratified batch draws: one offset in [0, 1), and an order of the examples."""
    offset = torch.rand((), generator=generator, dtype=torch.float64, device=device)
    return offset, torch.randperm(num, generator=generator, device=device)


def _draws_noise_alone(channel: Channel) -> bool:
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


def _shifted(channel: Channel, predict: Predictor, x: Tensor, y: Tensor | None, noise: Tensor | None) -> Tensor:
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


class Draws(NamedTuple):
    """All the randomness of one call to a channel's `sample`, drawn as `sample` draws it."""

    noise: Tensor  # as x, in the order below
    order: Tensor  # (B,): which examples, one component after the other
    offset: Tensor  # (): where in [0, 1) the strata begin


def draws(channel: Channel, x: Tensor, *, generator: torch.Generator | None = None) -> Draws | None:
    """The randomness apart from the computation, which can then be compiled; None for channels that mix the two.

    >>> draws(Mixture([0.5, 0.5], [Noise(0.1), Noise(0.2)]), torch.zeros(4, 2)).order.shape
    torch.Size([4])
    """
    if isinstance(channel, Mixture):
        if not channel._splits or not channel.stratified:
            return None
        offset, order = _systematic(len(x), generator, x.device)
        return Draws(_noise_like(x, generator), order, offset)
    if not _draws_noise_alone(channel):
        return None
    noiseless = channel.sigma == 0  # type: ignore[attr-defined]
    none = torch.empty(0, dtype=torch.long, device=x.device)
    return Draws(x.new_empty(0) if noiseless else _noise_like(x, generator), none, none)


def sample_at(
    channel: Channel,
    drawn: Draws,
    predict: Predictor,
    x: Tensor,  # (B, *event), a mixture's already in the order drawn
    y: Tensor,
) -> Tensor:  # x' in x's order
    """What `sample` computes, given its randomness, by operations whose shapes do not depend on it.

    A stratified component's share of a batch varies by one example: it is computed for the larger share, and kept where
    the example is its own.

    >>> sample_at(Noise(1.0), Draws(torch.ones(2, 1), *[torch.empty(0)] * 2), None, torch.zeros(2, 1), torch.zeros(2)).sum()
    tensor(2.)
    """
    if not isinstance(channel, Mixture):
        return _shifted(channel, predict, x, y, drawn.noise if drawn.noise.numel() else None)
    num, first = len(x), 0
    rows = torch.arange(num, device=x.device)
    bounds = [0.0, *channel._cumulated, 1.0]
    inner = [(round(num * edge, 9) - drawn.offset).ceil().clamp(0, num) for edge in channel._cumulated]
    edges: list[Tensor | int] = [0, *inner, num]
    out = x
    for members in channel._groups:
        last = first + len(members)
        low = math.floor(round(num * bounds[first], 9))
        high = min(num, math.ceil(round(num * bounds[last], 9)))
        own, part = rows[low:high], slice(low, high)
        merged = channel.channels[members[0]]
        if len(members) > 1 and isinstance(merged, AttackChannel):
            merged = channel._with_losses(members, torch.stack([own >= edge for edge in edges[first + 1 : last]]).sum(0))
        if high > low:
            moved = _shifted(merged, predict, x[part], y[part], drawn.noise[part])
            mine = (own >= edges[first]) & (own < edges[last])
            kept = torch.where(mine.view(-1, *[1] * (x.ndim - 1)), moved, out[part])
            out = torch.cat([out[:low], kept, out[high:]])
        first = last
    return out


@dataclass(frozen=True, eq=False)
class MixtureDensity:
    """logsumexp(ln pi_k + log p_k) for densities that are not all Gaussian."""

    log_weights: tuple[float, ...]
    parts: tuple[object, ...]

    def log_prob(self, x_adv: Tensor) -> Tensor:
        each = [w + part.log_prob(x_adv) for w, part in zip(self.log_weights, self.parts, strict=True)]  # type: ignore[attr-defined]
        return torch.logsumexp(torch.stack(each), dim=0)


@dataclass(frozen=True, eq=False)
class Learned:
    """x' = x + bounded(mean) + std * noise with (mean, raw log-std) from a network of (x, y); trained against the model by `fit`.

    The mean stays in `ball` around x, so that the adversary cannot win by leaving the data; the standard deviations stay in
    `sigma_range`. `entropy_bonus` rewards the adversary for mean log-std, so that it keeps a distribution.

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
        if not isinstance(self.generator, nn.Module):
            raise TypeError(f"generator must be a torch.nn.Module of (x, y), got {checks.describe(self.generator)}")
        low, high = self.sigma_range
        checks.number("sigma_range[0]", low, low=0, open_low=True)
        checks.number("sigma_range[1]", high, low=low)
        checks.number("entropy_bonus", self.entropy_bonus, low=0)

    def moments(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Centre and standard deviation of x', both of x's shape, differentiable in the generator."""
        if y is None:
            with torch.no_grad():
                y = mode(predict(x))
        shift, raw = self.generator(x, y)
        if shift.shape != x.shape or raw.shape != x.shape:
            raise ValueError(
                f"generator must return mean and log-std of x's shape {tuple(x.shape)}, "
                f"got {tuple(shift.shape)} and {tuple(raw.shape)}"
            )
        low, high = (math.log(bound) for bound in self.sigma_range)
        return self.ball.project(x + shift, x), (low + (high - low) * torch.sigmoid(raw)).exp()

    def sample(
        self, predict: Predictor, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        centre, std = self.moments(predict, x, y)
        return centre + std * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> GaussianDensity:
        with torch.no_grad():
            centre, std = self.moments(predict, x, y)
        return GaussianDensity((0.0,), (centre,), (std,))


def learned_in(channel: Channel) -> list[Learned]:
    """The learned channels in a (nested) mixture: the adversaries that `fit` trains.

    >>> learned_in(Mixture([0.5, 0.5], [Noise(), Noise(1.0)]))
    []
    """
    if isinstance(channel, Learned):
        return [channel]
    if isinstance(channel, Mixture):
        return [learned for part in channel.channels for learned in learned_in(part)]
    return []

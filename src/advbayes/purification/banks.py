"""log p(x' | x_n, theta) for blocks of reference points: one matrix product for a Gaussian channel.

A bank is one component of the channel: its centres for all N reference points and each of G thetas
(G = 1 where all thetas share them). Log-densities come as `logits + offset`: `logits` of shape
(g, B, n) in the dtype of the query's products, `offset` of shape (B,) in float64, which holds what
is the same for all reference points.

With origin o, q = x' - o and c = centre - o:

    log N(x'; centre, s^2) = q.centre / s^2 - |c|^2 / 2 s^2  +  (-|q|^2 / 2 - q.o) / s^2 + const
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from advbayes.checks import InputError
from advbayes.likelihoods import LOG_TWO_PI, gaussian_log_density
from advbayes.purification.rows import Rows, spans
from advbayes.types import ChannelDensity

if TYPE_CHECKING:
    from advbayes.purification.store import Store

_TILE = 1 << 19  # numbers in one block of logits: 2 MB of float32 stay in the cache between passes
_MOST_ROWS = 8192  # of centres at a time: 25 MB at d = 784
_DIFFERENCES = 1 << 21  # numbers in one block of differences x' - centre
FEWEST_ROWS = 256  # below this a matrix product is no longer worth its call

Tile = tuple[slice, slice]  # groups, rows


@dataclass(frozen=True, eq=False)
class Query:
    """A block of inputs, and the precision in which they are multiplied with the centres."""

    x: Tensor  # (B, *event)
    flat: Tensor  # (B, d) float64: x or its features; may carry a graph
    origin: Tensor  # (d,) float64: close to the centres, which keeps the expansion's rounding small
    dtype: torch.dtype
    # (G, B, k) for each bank: rows to answer from, -1 for none
    nearest: tuple[Tensor, ...] | None = None
    y: Tensor | None = None  # (B, D) float64: outputs that come with x', around the store's middle

    def __len__(self) -> int:
        return len(self.flat)

    @cached_property
    def points(self) -> Tensor:  # (B, d) float64
        return self.flat.detach()

    @cached_property
    def around(self) -> Tensor:  # (B, d)
        return (self.points - self.origin).to(self.dtype)

    def take(self, rows: Tensor | slice) -> Query:
        nearest = None if self.nearest is None else tuple(index[:, rows] for index in self.nearest)
        y = None if self.y is None else self.y[rows]
        return replace(self, x=self.x[rows], flat=self.flat[rows], nearest=nearest, y=y)


class Room:
    """One buffer for all blocks of a pass: allocated anew, each block would be faulted in again."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def of(self, like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
        size = math.prod(shape)
        if self.buffer is None or self.buffer.numel() < size:
            self.buffer = like.new_empty(size, dtype=dtype)
        return self.buffer[:size].view(shape)


class Bank(ABC):
    """log p(x' | x_n, theta) of one component of the channel, for blocks of thetas and points."""

    # whether the log-densities of single points can be computed from differences x' - centre
    has_centres: bool = True

    @property
    @abstractmethod
    def groups(self) -> int:
        """G: 1 where all thetas share the densities, else their number."""

    @abstractmethod
    def tiles(self, batch: int) -> Iterator[Tile]:
        """Blocks that together hold every theta and reference point once."""

    @abstractmethod
    def logits(self, query: Query, groups: slice, rows: slice, room: Room) -> Tensor:
        """(g, B, n), the log-densities without `offset`; may lie in `room`."""

    @abstractmethod
    def offset(self, query: Query) -> Tensor:
        """(B,) float64: what is the same for all reference points."""

    @abstractmethod
    def gradient(self, query: Query, groups: slice, rows: slice, coefficients: Tensor) -> Tensor:
        """sum over g, n of coefficients (g, B, n) * d log-density / d x', (B, d) float64."""

    def exact_at(self, query: Query, group: int, index: Tensor) -> Tensor:
        """The log-densities (B, k) of a few reference points, exact to rounding in float64."""
        raise NotImplementedError

    def gradient_at(self, query: Query, group: int, index: Tensor, coefficients: Tensor) -> Tensor:
        """sum over k of coefficients (B, k) * d log-density / d x', (B, d) float64."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class GaussianBank(Bank):
    """w N(x'; centres, scale^2): one scale for all, or one for each reference point and feature."""

    log_weight: float
    centres: Rows  # (G, N, d)
    scales: Rows | None  # (G, N, d), or one for all
    half_norms: Tensor  # (G, N) float64: |centre - origin|^2 / 2
    # over the reference points of all ranks
    reach: float  # the largest |centre|
    spread: float  # the largest |centre - origin|
    scale: float  # the least
    factor: float = 1.0  # on the scale: annealed attacks use the same centres and a wider channel
    log_weights: Tensor | None = None  # (N,) float64, of the reference points; absent: zero

    @property
    def groups(self) -> int:
        return self.centres.shape[0]

    @property
    def sigma(self) -> float:
        """The noise, or the least of it."""
        return self.scale * self.factor

    @property
    def log_peak(self) -> float:
        """log w N(centre; centre, sigma^2), where there is one noise for all."""
        return self.log_weight - self.centres.shape[2] * (math.log(self.sigma) + 0.5 * LOG_TWO_PI)

    def tiles(self, batch: int) -> Iterator[Tile]:
        groups, num, _ = self.centres.shape
        rows = min(_MOST_ROWS, max(FEWEST_ROWS, _TILE // max(1, batch)))
        return itertools.product(spans(groups, max(1, rows // num)), spans(num, rows))

    def widened(self, factor: float) -> GaussianBank:
        return replace(self, factor=self.factor * factor)

    def rounding(self, norms: Tensor) -> Tensor:  # (B,): |x' - origin| -> (B,)
        """How far float32 `logits` may be off: the products' rounding over the variance."""
        size = norms.clamp_min(self.spread)
        if self.scales is not None:
            size = size * size / max(self.reach, 1e-300)
        eps = torch.finfo(torch.float32).eps
        return 4.0 * eps * self.reach / self.sigma**2 * size

    def logits(self, query: Query, groups: slice, rows: slice, room: Room) -> Tensor:
        points, dtype = query.around, query.dtype
        centres = self.centres.block(groups, rows).to(dtype)
        if self.scales is None:
            gain = 1.0 / self.sigma**2
            bias = (self.half_norms[groups, rows] * -gain).to(dtype)
        else:
            scale = self.scales.block(groups, rows).to(dtype) * self.factor
            precision = scale.square().reciprocal()
            centres = centres - query.origin.to(dtype)
            bias = -0.5 * (centres.square() * precision).sum(-1) - scale.log().sum(-1)
            centres = torch.cat([centres * precision, precision * -0.5], -1)
            points, gain = torch.cat([points, points.square()], -1), 1.0
        if self.log_weights is not None:
            bias = bias + self.log_weights[rows].to(dtype)
        out = room.of(points, dtype, len(centres), len(points), centres.shape[1])
        if len(centres) == 1:
            torch.addmm(bias[0], points, centres[0].T, alpha=gain, out=out[0])
            return out
        left = points.expand(len(centres), -1, -1)
        return torch.baddbmm(bias.unsqueeze(1), left, centres.mT, alpha=gain, out=out)

    def offset(self, query: Query) -> Tensor:
        if self.scales is not None:
            constant = self.log_weight - 0.5 * query.points.shape[1] * LOG_TWO_PI
            return query.points.new_full((len(query),), constant)
        around = query.points - query.origin
        square = -0.5 * around.square().sum(1) - around @ query.origin
        return square / self.sigma**2 + self.log_peak

    def _differences(
        self,
        points: Tensor,  # (B, d) float64
        group: int,
        index: Tensor,  # (B, k)
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """centre - x' and scales of a few reference points, in float64, some queries at a time."""
        one = points.new_full((1,), self.sigma)
        size = max(1, _DIFFERENCES // max(1, index.shape[1] * points.shape[1]))
        for part in spans(len(points), size):
            away = self.centres.pick(group, index[part]) - points[part].unsqueeze(1)
            if self.scales is None:
                yield part, away, one
            else:
                yield part, away, self.scales.pick(group, index[part]).double() * self.factor

    def exact_at(self, query: Query, group: int, index: Tensor) -> Tensor:
        width, out = query.points.shape[1], query.points.new_empty(index.shape)
        for part, away, scale in self._differences(query.points, group, index):
            log_scale = scale.log().sum(-1) * (width / scale.shape[-1])
            out[part] = -0.5 * _square(away / scale) - log_scale
        if self.log_weights is not None:
            out += self.log_weights[index]
        return out + (self.log_weight - 0.5 * width * LOG_TWO_PI)

    def gradient_at(self, query: Query, group: int, index: Tensor, coefficients: Tensor) -> Tensor:
        out = torch.zeros_like(query.points)
        for part, away, scale in self._differences(query.points, group, index):
            out[part] = torch.einsum("bk,bkd->bd", coefficients[part], away / scale.square())
        return out

    def gradient(self, query: Query, groups: slice, rows: slice, coefficients: Tensor) -> Tensor:
        rounded = coefficients.to(query.dtype)
        centres = self.centres.block(groups, rows).to(query.dtype)
        if self.scales is None:
            total = rounded.sum((0, 2), dtype=torch.float64).unsqueeze(1)
            moved = torch.matmul(rounded, centres).sum(0, dtype=torch.float64)
            return (moved - total * query.points) / self.sigma**2
        scale = self.scales.block(groups, rows).to(query.dtype) * self.factor
        precision = scale.square().reciprocal()
        total = torch.matmul(rounded, precision).sum(0, dtype=torch.float64)
        moved = torch.matmul(rounded, centres * precision).sum(0, dtype=torch.float64)
        return moved - total * query.points

    def squared_distance(self, points: Tensor, group: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """From each point (B, d) to the centre in its row of the index (B,): Euclidean, and in
        units of the channel's noise, (B,) float64 each."""
        each = self._differences(points, group, index.unsqueeze(1))
        parts = [(_square(away), _square(away / scale)) for _, away, scale in each]
        plain, scaled = (torch.cat(column).squeeze(1) for column in zip(*parts, strict=True))
        return plain, scaled


def _square(away: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(away, dim=-1)
    return norm.square()


@dataclass(frozen=True, eq=False)
class FunctionBank(Bank):
    """A channel density of any other kind, for each theta and each block of reference points."""

    densities: tuple[tuple[ChannelDensity, ...], ...]  # (G, blocks)
    edges: tuple[int, ...]  # where the blocks begin, and N
    log_weights: Tensor | None = None  # (N,) float64, of the reference points; absent: zero
    has_centres = False

    @property
    def groups(self) -> int:
        return len(self.densities)

    def tiles(self, batch: int) -> Iterator[Tile]:
        for group in range(self.groups):
            for start, stop in itertools.pairwise(self.edges):
                yield slice(group, group + 1), slice(start, stop)

    def logits(self, query: Query, groups: slice, rows: slice, room: Room) -> Tensor:
        density = self.densities[groups.start][self.edges.index(rows.start)]
        log_prob = density.log_prob(query.x)
        wanted = (rows.stop - rows.start, len(query))
        if log_prob.shape != wanted:
            raise InputError(
                f"the channel's log_prob must return shape (N, B) = {wanted}, got "
                f"{tuple(log_prob.shape)}"
            )
        # A copy, for it is worked on in place; what is not a number is no evidence.
        logits: Tensor = log_prob.T.unsqueeze(0).nan_to_num(nan=-math.inf, neginf=-math.inf)
        if self.log_weights is not None:
            logits = logits + self.log_weights[rows]
        return logits.to(query.dtype)

    def offset(self, query: Query) -> Tensor:
        return query.points.new_zeros(len(query))

    def gradient(self, query: Query, groups: slice, rows: slice, coefficients: Tensor) -> Tensor:
        with torch.enable_grad():
            x = query.x.detach().requires_grad_()
            logits = self.logits(replace(query, x=x), groups, rows, Room())
            if not logits.requires_grad:
                return torch.zeros_like(query.points)
            # An impossible reference point has no say, and minus infinity no gradient.
            possible = torch.where(logits > -math.inf, logits, torch.zeros_like(logits))
            (gradient,) = torch.autograd.grad((possible * coefficients).sum(), x)
        return torch.nan_to_num(gradient, nan=0.0).flatten(1).double()


@dataclass(frozen=True, eq=False)
class JointBank(Bank):
    """log p(x' | x_n, theta_s) + log p(y | x_n, theta_s), with `query.y` for y.

    The second term differs from theta to theta even if the first does not.
    """

    bank: Bank
    store: Store

    @property
    def has_centres(self) -> bool:  # type: ignore[override]
        return self.bank.has_centres

    @property
    def groups(self) -> int:
        return self.store.num_thetas

    def _inner(self, groups: slice) -> slice:
        return groups if self.bank.groups > 1 else slice(0, 1)

    def tiles(self, batch: int) -> Iterator[Tile]:
        for groups, rows in self.bank.tiles(batch):
            yield groups if self.bank.groups > 1 else slice(0, self.groups), rows

    def logits(self, query: Query, groups: slice, rows: slice, room: Room) -> Tensor:
        assert query.y is not None
        logits = self.bank.logits(query, self._inner(groups), rows, room)
        return logits + self.store.log_outputs(query.y, groups, rows).to(logits.dtype)

    def offset(self, query: Query) -> Tensor:
        return self.bank.offset(query)

    def gradient(self, query: Query, groups: slice, rows: slice, coefficients: Tensor) -> Tensor:
        if self.bank.groups == 1:
            coefficients = coefficients.sum(0, keepdim=True)
        return self.bank.gradient(query, self._inner(groups), rows, coefficients)

    def exact_at(self, query: Query, group: int, index: Tensor) -> Tensor:
        assert query.y is not None
        values = self.store.value_at(index, slice(group, group + 1)).squeeze(-2)
        mean, variance, _ = values.chunk(3, -1)
        log_y = gaussian_log_density(query.y.unsqueeze(1), mean, variance.sqrt()).sum(-1)
        return self.bank.exact_at(query, min(group, self.bank.groups - 1), index) + log_y

    def gradient_at(self, query: Query, group: int, index: Tensor, coefficients: Tensor) -> Tensor:
        return self.bank.gradient_at(query, min(group, self.bank.groups - 1), index, coefficients)

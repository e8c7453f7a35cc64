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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from advbayes.checks import InputError
from advbayes.likelihoods import LOG_TWO_PI
from advbayes.purification.rows import Rows, spans
from advbayes.types import ChannelDensity

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
        return replace(self, x=self.x[rows], flat=self.flat[rows], nearest=nearest)


class Room:
    """One buffer for all blocks of a pass: allocated anew, each block would be faulted in again."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def of(self, like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
        size = math.prod(shape)
        if self.buffer is None or self.buffer.numel() < size:
            self.buffer = like.new_empty(size, dtype=dtype)
        return self.buffer[:size].view(shape)


@dataclass(frozen=True, eq=False)
class GaussianBank:
    """w N(x'; centres, scale^2) one scale for all, or one for each reference point and feature."""

    log_weight: float
    centres: Rows  # (G, N, d)
    scale: float | Rows  # (G, N, d)
    half_norms: Tensor  # (G, N) float64: |centre - origin|^2 / 2
    # over the reference points of all ranks
    reach: float  # the largest |centre|
    spread: float  # the largest |centre - origin|
    least_scale: float
    factor: float = 1.0  # on the scale: annealed attacks use the same centres and a wider channel

    @property
    def groups(self) -> int:
        return self.centres.shape[0]

    def tiles(self, batch: int) -> Iterator[Tile]:
        groups, num, _ = self.centres.shape
        rows = min(_MOST_ROWS, max(FEWEST_ROWS, _TILE // max(1, batch)))
        for first, last in spans(groups, max(1, rows // num)):
            for start, stop in spans(num, rows):
                yield slice(first, last), slice(start, stop)

    def widened(self, factor: float) -> GaussianBank:
        return replace(self, factor=self.factor * factor)

    def rounding(self, norms: Tensor) -> Tensor:  # (B,): |x' - origin| -> (B,)
        """How far float32 `logits` may be off: the products' rounding over the variance."""
        size = norms.clamp_min(self.spread)
        if not isinstance(self.scale, float):
            size = size * size / max(self.reach, 1e-300)
        eps = torch.finfo(torch.float32).eps
        return 4.0 * eps * self.reach / (self.least_scale * self.factor) ** 2 * size

    def _precision(self, groups: slice, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """1/scale^2 and sum log scale, (g, n, d) and (g, n), of per-feature scales."""
        assert not isinstance(self.scale, float)
        scale = self.scale.block(groups, rows).to(dtype) * self.factor
        return scale.square().reciprocal(), scale.log().sum(-1)

    def logits(self, query: Query, groups: slice, rows: slice, room: Room) -> Tensor:  # (g, B, n)
        points, dtype = query.around, query.dtype
        centres = self.centres.block(groups, rows).to(dtype)
        if isinstance(self.scale, float):
            gain = 1.0 / (self.scale * self.factor) ** 2
            bias = (self.half_norms[groups, rows] * -gain).to(dtype)
        else:
            precision, log_scale = self._precision(groups, rows, dtype)
            centres = centres - query.origin.to(dtype)
            bias = -0.5 * (centres.square() * precision).sum(-1) - log_scale
            centres = torch.cat([centres * precision, precision * -0.5], -1)
            points, gain = torch.cat([points, points.square()], -1), 1.0
        out = room.of(points, dtype, len(centres), len(points), centres.shape[1])
        if len(centres) == 1:
            torch.addmm(bias[0], points, centres[0].T, alpha=gain, out=out[0])
            return out
        left = points.expand(len(centres), -1, -1)
        return torch.baddbmm(bias.unsqueeze(1), left, centres.mT, alpha=gain, out=out)

    def offset(self, query: Query) -> Tensor:  # (B,) float64
        width = query.points.shape[1]
        constant = self.log_weight - 0.5 * width * LOG_TWO_PI
        if not isinstance(self.scale, float):
            return query.points.new_full((len(query),), constant)
        scale = self.scale * self.factor
        around = query.points - query.origin
        square = -0.5 * around.square().sum(1) - around @ query.origin
        return square / scale**2 + (constant - width * math.log(scale))

    def _differences(
        self,
        points: Tensor,  # (B, d) float64
        group: int,
        index: Tensor,  # (B, k)
    ) -> Iterator[tuple[slice, Tensor, float | Tensor]]:
        """centre - x' and scales of a few reference points, in float64, some queries at a time."""
        size = max(1, _DIFFERENCES // max(1, index.shape[1] * points.shape[1]))
        for start, stop in spans(len(points), size):
            part = slice(start, stop)
            away = self.centres.pick(group, index[part]) - points[part].unsqueeze(1)
            if isinstance(self.scale, float):
                yield part, away, self.scale * self.factor
            else:
                yield part, away, self.scale.pick(group, index[part]).double() * self.factor

    def exact_at(
        self, points: Tensor, group: int, index: Tensor
    ) -> Tensor:  # (B, d), (B, k) -> (B, k) float64
        """The log-densities of a few reference points from differences, exact to rounding: logits +
        offset."""
        width, out = points.shape[1], points.new_empty(index.shape)
        for part, away, scale in self._differences(points, group, index):
            log_scale = width * math.log(scale) if isinstance(scale, float) else scale.log().sum(-1)
            out[part] = -0.5 * _norm(away, scale).square() - log_scale
        return out + (self.log_weight - 0.5 * width * LOG_TWO_PI)

    def gradient_at(
        self,
        query: Query,
        group: int,
        index: Tensor,  # (B, k)
        coefficients: Tensor,  # (B, k) float64
    ) -> Tensor:  # (B, d) float64
        """sum over k of coefficients * d log-density / d x', from differences."""
        out = torch.zeros_like(query.points)
        for part, away, scale in self._differences(query.points, group, index):
            if isinstance(scale, float):
                out[part] = torch.einsum("bk,bkd->bd", coefficients[part] / scale**2, away)
            else:
                out[part] = torch.einsum("bk,bkd->bd", coefficients[part], away / scale.square())
        return out

    def gradient(
        self,
        query: Query,
        groups: slice,
        rows: slice,
        coefficients: Tensor,  # (g, B, n)
    ) -> Tensor:  # (B, d) float64
        """sum over g, n of coefficients * d log-density / d x'."""
        rounded = coefficients.to(query.dtype)
        centres = self.centres.block(groups, rows).to(query.dtype)
        if isinstance(self.scale, float):
            total = rounded.sum((0, 2), dtype=torch.float64).unsqueeze(1)
            moved = (
                torch.matmul(rounded, centres).sum(0, dtype=torch.float64) - total * query.points
            )
            return moved / (self.scale * self.factor) ** 2
        precision, _ = self._precision(groups, rows, query.dtype)
        total = torch.matmul(rounded, precision).sum(0, dtype=torch.float64)
        moved = torch.matmul(rounded, centres * precision).sum(0, dtype=torch.float64)
        return moved - total * query.points

    def squared_distance(
        self,
        query: Query,
        group: int,
        index: Tensor,  # (B, k)
    ) -> tuple[Tensor, Tensor]:  # (B, k), (B, k), float64
        """Euclidean, and in units of the channel's noise."""
        plain, scaled = (query.points.new_empty(index.shape) for _ in range(2))
        for part, away, scale in self._differences(query.points, group, index):
            plain[part], scaled[part] = _norm(away, 1.0).square(), _norm(away, scale).square()
        return plain, scaled


def _norm(away: Tensor, scale: float | Tensor) -> Tensor:
    """|away / scale| over the last axis."""
    plain = isinstance(scale, float)
    norm: Tensor = torch.linalg.vector_norm(away if plain else away / scale, dim=-1)
    return norm / scale if plain else norm


@dataclass(frozen=True, eq=False)
class FunctionBank:
    """A channel density of any other kind, for each theta and each block of reference points."""

    densities: tuple[tuple[ChannelDensity, ...], ...]  # (G, blocks)
    edges: tuple[int, ...]  # where the blocks begin, and N

    @property
    def groups(self) -> int:
        return len(self.densities)

    def tiles(self, batch: int) -> Iterator[Tile]:
        for group in range(self.groups):
            for start, stop in itertools.pairwise(self.edges):
                yield slice(group, group + 1), slice(start, stop)

    def widened(self, factor: float) -> FunctionBank:
        raise InputError("widened needs a channel with a Gaussian density, got one of another kind")

    def logits(self, query: Query, groups: slice, rows: slice, room: Room | None = None) -> Tensor:
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
        return logits.to(query.dtype)

    def offset(self, query: Query) -> Tensor:
        return query.points.new_zeros(len(query))

    def gradient(self, query: Query, groups: slice, rows: slice, coefficients: Tensor) -> Tensor:
        with torch.enable_grad():
            x = query.x.detach().requires_grad_()
            logits = self.logits(replace(query, x=x), groups, rows)
            if not logits.requires_grad:
                return torch.zeros_like(query.points)
            # An impossible reference point has no say, and minus infinity no gradient.
            possible = torch.where(logits > -math.inf, logits, torch.zeros_like(logits))
            (gradient,) = torch.autograd.grad((possible * coefficients).sum(), x)
        return torch.nan_to_num(gradient, nan=0.0).flatten(1).double()


Bank = GaussianBank | FunctionBank

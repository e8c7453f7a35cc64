"""log p(x' | x_n, theta) for blocks of reference points: one matrix product for a Gaussian channel, a call for any other.

A bank is one component of the channel: its centres for all N reference points, and for each of G thetas (G = 1 where all
thetas share them). Log-densities come as `logits + offset`: `logits` of shape (g, B, n) in the data's dtype, `offset`
of shape (B,) in float64, which holds what is the same for all reference points and may be as large as it likes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from advbayes.purification.rows import Rows, spans
from advbayes.types import ChannelDensity

_LOG_TWO_PI = math.log(2.0 * math.pi)
_TILE = 1 << 19  # numbers in one block of logits: 2 MB of float32 stay in the cache between its passes
_MOST_ROWS = 8192  # of centres at a time: 25 MB at d = 784
FEWEST_ROWS = 256  # below this a matrix product is no longer worth its call

Tile = tuple[slice, slice]  # groups, rows


@dataclass(frozen=True, eq=False)
class Query:
    """A block of inputs: as they came, and flat around the reference's mean, which keeps the expansion's rounding small."""

    x: Tensor  # (B, *event)
    flat: Tensor  # (B, d)

    def __len__(self) -> int:
        return len(self.flat)

    def take(self, rows: Tensor) -> Query:
        return Query(self.x[rows], self.flat[rows])


class Room:
    """One buffer for all blocks of a pass: allocated block by block, the heap would come apart and be faulted in each time."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def of(self, like: Tensor, *shape: int) -> Tensor:
        size = math.prod(shape)
        if self.buffer is None or self.buffer.numel() < size:
            self.buffer = like.new_empty(size)
        return self.buffer[:size].view(shape)


@dataclass(frozen=True, eq=False)
class GaussianBank:
    """w N(x'; centres, scale^2) with one scale for all, or one for each reference point and feature."""

    log_weight: float
    centres: Rows  # (G, N, d), around the reference's mean
    scale: float | Rows  # (G, N, d)
    half_norms: Tensor  # (G, N): |c|^2 / 2
    factor: float = 1.0  # on the scale: annealed attacks look at the same centres through a wider channel

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

    def _precision(self, groups: slice, rows: slice) -> tuple[Tensor, Tensor]:
        """1/scale^2 and sum log scale, (g, n, d) and (g, n), of per-feature scales."""
        assert not isinstance(self.scale, float)
        scale = self.scale.block(groups, rows) * self.factor
        return scale.square().reciprocal(), scale.log().sum(-1)

    def logits(self, query: Query, groups: slice, rows: slice, room: Room | None = None) -> Tensor:  # (g, B, n)
        centres, points = self.centres.block(groups, rows), query.flat
        if isinstance(self.scale, float):
            gain = 1.0 / (self.scale * self.factor) ** 2
            bias = self.half_norms[groups, rows] * -gain
        else:
            precision, log_scale = self._precision(groups, rows)
            bias = -0.5 * (centres.square() * precision).sum(-1) - log_scale
            centres = torch.cat([centres * precision, precision * -0.5], -1)
            points, gain = torch.cat([points, points.square()], -1), 1.0
        out = (room or Room()).of(query.flat, len(centres), len(points), centres.shape[1])
        if len(centres) == 1:
            torch.addmm(bias[0], points, centres[0].T, alpha=gain, out=out[0])
            return out
        left = points.expand(len(centres), -1, -1)
        return torch.baddbmm(bias.unsqueeze(1), left, centres.transpose(1, 2), alpha=gain, out=out)

    def offset(self, query: Query) -> Tensor:  # (B,) float64
        width = query.flat.shape[1]
        constant = self.log_weight - 0.5 * width * _LOG_TWO_PI
        if not isinstance(self.scale, float):
            return query.flat.new_full((len(query),), constant, dtype=torch.float64)
        scale = self.scale * self.factor
        square = query.flat.double().square().sum(1)
        return square * (-0.5 / scale**2) + (constant - width * math.log(scale))

    def exact(
        self,
        query: Query,
        group: int,
        index: Tensor,  # (B, k)
    ) -> Tensor:  # (B, k) float64: logits + offset
        """The log-densities of a few reference points from differences, which is exact to rounding."""
        width = query.flat.shape[1]
        away = query.flat.unsqueeze(1) - self.centres.pick(group, index)
        if isinstance(self.scale, float):
            scale = self.scale * self.factor
            square = away.square_().sum(-1, dtype=torch.float64)
            return square * (-0.5 / scale**2) + (self.log_weight - width * (math.log(scale) + 0.5 * _LOG_TWO_PI))
        scales = self.scale.pick(group, index) * self.factor
        square = (away / scales).square_().sum(-1, dtype=torch.float64)
        return self.log_weight - 0.5 * square - scales.log().sum(-1, dtype=torch.float64) - 0.5 * width * _LOG_TWO_PI

    def rounding(self, query: Query) -> float:
        """About how far `logits` may be from `exact`: the products' rounding over the variance."""
        if not len(query) or not isinstance(self.scale, float):
            return math.inf
        reach = math.sqrt(2.0 * float(self.half_norms.max()))
        far = float(torch.linalg.vector_norm(query.flat, dim=1).max())
        size = max(far, reach) * reach / (self.scale * self.factor) ** 2
        return 4.0 * torch.finfo(query.flat.dtype).eps * size

    def pull(
        self,
        query: Query,
        groups: slice,
        rows: slice,
        coefficients: Tensor,  # (g, B, n)
    ) -> Tensor:  # (B, d)
        """sum over g, n of coefficients * d log-density / d x'."""
        centres = self.centres.block(groups, rows)
        if isinstance(self.scale, float):
            moved = torch.matmul(coefficients, centres).sum(0) - coefficients.sum((0, 2)).unsqueeze(1) * query.flat
            return moved / (self.scale * self.factor) ** 2
        precision, _ = self._precision(groups, rows)
        pulled = torch.matmul(coefficients, centres * precision).sum(0)
        return pulled - torch.matmul(coefficients, precision).sum(0) * query.flat

    def squared_distance(
        self,
        query: Query,
        group: int,
        index: Tensor,  # (B, k)
    ) -> tuple[Tensor, Tensor]:  # (B, k), (B, k), float64
        """Euclidean, and in units of the channel's noise."""
        away = (query.flat.unsqueeze(1) - self.centres.pick(group, index)).double()
        if isinstance(self.scale, float):
            square = away.square().sum(-1)
            return square, square / (self.scale * self.factor) ** 2
        scales = self.scale.pick(group, index).double() * self.factor
        return away.square().sum(-1), (away / scales).square().sum(-1)


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
        raise ValueError("widened needs a channel with a Gaussian density, got one of another kind")

    def logits(self, query: Query, groups: slice, rows: slice, room: Room | None = None) -> Tensor:
        density = self.densities[groups.start][self.edges.index(rows.start)]
        found = density.log_prob(query.x)
        wanted = (rows.stop - rows.start, len(query))
        if found.shape != wanted:
            raise ValueError(f"the channel's log_prob must return shape (N, B) = {wanted}, got {tuple(found.shape)}")
        # A copy, for it is worked on in place; what is not a number is no evidence.
        copied: Tensor = found.T.unsqueeze(0).nan_to_num(nan=-math.inf, neginf=-math.inf)
        return copied

    def offset(self, query: Query) -> Tensor:
        return query.flat.new_zeros(len(query), dtype=torch.float64)

    def rounding(self, query: Query) -> float:
        return 0.0

    def pull(self, query: Query, groups: slice, rows: slice, coefficients: Tensor) -> Tensor:
        with torch.enable_grad():
            x = query.x.detach().requires_grad_()
            found = self.logits(Query(x, query.flat), groups, rows)
            if not found.requires_grad:
                return torch.zeros_like(query.flat)
            # An impossible reference point has no say, and minus infinity no gradient.
            weighted = torch.where(found > -math.inf, found, torch.zeros_like(found)) * coefficients
            (gradient,) = torch.autograd.grad(weighted.sum(), x)
        flat: Tensor = torch.nan_to_num(gradient, nan=0.0).flatten(1)
        return flat


Bank = GaussianBank | FunctionBank

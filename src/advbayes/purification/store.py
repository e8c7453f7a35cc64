"""What a query needs and does not change it: the channel's centres and the model's predictions at
every reference point.

Computed once for all S thetas and all N reference points. In memory within a stated limit, in files
beyond it.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from advbayes import checks
from advbayes.channels import GaussianDensity
from advbayes.distributed import ALONE, Ranks
from advbayes.likelihoods import LOG_TWO_PI, predicts_classes
from advbayes.model import BayesianModel
from advbayes.purification.banks import FEWEST_ROWS, Bank, FunctionBank, GaussianBank
from advbayes.purification.rows import DiskRows, MemoryRows, Rows, num_bytes, spans
from advbayes.types import Channel, ChannelDensity

Features = Callable[[Tensor], Tensor]

_BLOCK = 1000  # reference points whose predictions and centres are computed at a time
_SMALL = 1 << 19  # numbers in the centres of all banks
_DENSITY = "channel must have a density (SimulatedPurifier needs samples alone)"
# of a class probability, so that the log of a weighted average is finite: what the products of
# weights and probabilities can hold
_FLOOR, _DOUBLE_FLOOR = 1e-30, 1e-300


class _ThetaAskedError(Exception):
    """Raised by the Predictor that must not be called."""


def _refuse(x: Tensor) -> Distribution:
    raise _ThetaAskedError


class _OtherPartsError(Exception):
    """A density whose weights, single scales or untouched centres are not those of the first."""


@dataclass(frozen=True, eq=False)
class Store:
    """The reference side of Eq. 4 and 5, all of it constant.

    The tables have the data's dtype. `values` holds, for every reference point and theta, class
    probabilities (V = C of them), or for D outputs means around `middle` and scales^2, which are
    read with the squared means behind them (V = 3 D).
    """

    banks: tuple[GaussianBank | FunctionBank, ...]
    values: Rows  # (1, N, S * C or S * 2 D)
    num_thetas: int
    event_shape: tuple[int, ...]
    origin: Tensor  # (d,) float64: the reference's mean
    middle: Tensor  # (D,) float64
    dtype: torch.dtype
    folder: Path | None
    counts: tuple[int, ...]  # the reference points of each rank
    ranks: Ranks = ALONE  # that hold a part of the reference each

    @property
    def num_outputs(self) -> int:
        """D, or 0 for classes."""
        return len(self.middle)

    @property
    def num_reference(self) -> int:
        """N, of this rank's part."""
        return self.values.shape[1]

    @property
    def num_whole(self) -> int:
        """N, of all ranks together."""
        return sum(self.counts)

    @cached_property
    def gaussians(self) -> tuple[GaussianBank, ...]:
        """The banks, or none where they are of another kind."""
        return tuple(bank for bank in self.banks if isinstance(bank, GaussianBank))

    def check_gaussian(self, name: str) -> None:
        """Refuse what only a Gaussian channel can do, by its name."""
        if not self.gaussians:
            raise checks.InputError(
                f"{name} needs a channel with a Gaussian density, got one of another kind"
            )

    @property
    def is_small(self) -> bool:
        """Whether float64 products cost next to nothing."""
        size = sum(bank.groups * bank.centres.shape[2] for bank in self.gaussians)
        return size * self.num_whole <= _SMALL

    @property
    def width(self) -> int:
        """V, the number of values for each reference point and theta."""
        return 3 * self.num_outputs or self.values.shape[2] // self.num_thetas

    def _read(self, table: Tensor) -> Tensor:  # (*, C or 2 D) -> (*, V) float64
        table = table.double()
        if self.num_outputs:
            return torch.cat([table, table[..., : self.num_outputs].square()], -1)
        # sums to 1 to rounding of float64: gradients of classes cancel
        return table / table.sum(-1, keepdim=True)

    def value_block(self, rows: slice) -> Tensor:  # (n, S, V) float64
        table = self.values.block(slice(0, 1), rows)[0]
        return self._read(table.view(len(table), self.num_thetas, -1))

    def value_at(self, index: Tensor, thetas: slice) -> Tensor:  # (*index.shape, s, V) float64
        width = self.values.shape[2] // self.num_thetas
        columns = slice(thetas.start * width, thetas.stop * width)
        return self._read(self.values.pick(0, index, columns).view(*index.shape, -1, width))

    def thetas_of(self, bank: Bank, groups: slice) -> slice:
        """The thetas that a bank's groups serve: all of them where they share it."""
        return slice(0, self.num_thetas) if bank.groups == 1 else groups

    def log_outputs(self, y: Tensor, thetas: slice, rows: slice) -> Tensor:  # (s, B, n)
        """log N(y_b; mean_sn, scale_sn^2) of outputs around `middle`, summed over them, as one
        product: -(y^2 / 2 - y m + m^2 / 2) / s^2 - log s."""
        # (s, n, D)
        mean, variance, square = self.value_block(rows)[:, thetas].transpose(0, 1).chunk(3, -1)
        constant = (-0.5 * square / variance - 0.5 * variance.log() - 0.5 * LOG_TWO_PI).sum(-1)
        right = torch.cat([-0.5 / variance, mean / variance], -1)  # (s, n, 2 D)
        return torch.matmul(torch.cat([y.square(), y], -1), right.mT) + constant.unsqueeze(1)

    def widened(self, factor: float) -> Store:
        self.check_gaussian("widened")
        return replace(self, banks=tuple(bank.widened(factor) for bank in self.gaussians))

    def weighed(self, weights: Tensor) -> Store:
        """The same with reference points that count in proportion to positive `weights` (N,)."""
        # of mean 1, so that they count N times in all
        log_weights = (weights.double() / weights.double().mean()).log().to(self.origin.device)
        banks = (replace(bank, log_weights=log_weights) for bank in self.banks)
        return replace(self, banks=tuple(banks))


def _values(prediction: Distribution) -> tuple[Tensor, int]:
    """(n, V) and the number of outputs (0 for classes)."""
    if predicts_classes(prediction):
        probs = prediction.probs
        return probs.clamp_min(_DOUBLE_FLOOR if probs.dtype is torch.float64 else _FLOOR), 0
    normal = prediction.base_dist if isinstance(prediction, Independent) else prediction
    if not isinstance(normal, Normal):
        raise checks.InputTypeError(
            f"the likelihood must predict classes or Gaussians, got {type(prediction).__name__}"
        )
    parts = (normal.loc, normal.scale.square())
    moments = torch.cat([part.reshape(len(part), -1) for part in parts], 1)
    return moments, moments.shape[1] // 2


def _single(scale: float | Tensor) -> float | None:
    """A component's scale, if it has one for all reference points and features."""
    match scale:
        case Tensor() if scale.ndim:
            return None
    return float(scale)


def _components(density: object) -> list[tuple[float, float | None]] | None:
    """What a table of centres holds once for all thetas and reference points: each component's
    log-weight, and its scale where that is a single one; None for a density of another kind."""
    if not isinstance(density, GaussianDensity):
        return None
    return [
        (float(w), _single(s)) for w, s in zip(density.log_weights, density.scales, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Builder:
    """Centres and predictions at all reference points, computed block by block."""

    model: BayesianModel
    channel: Channel
    thetas: Tensor  # (S, P)
    x: Tensor  # (N, *event)
    y: Tensor | None
    features: Features | None
    memory_limit: int
    folder: Path | None
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        if not callable(getattr(self.channel, "density", None)):
            raise checks.InputTypeError(_DENSITY, got=self.channel)

    def _density(self, predict: Any, rows: slice) -> tuple[Any, Tensor]:  # and x[rows]
        x = self.x[rows]
        y = None if self.y is None else self.y[rows]
        try:
            return self.channel.density(predict, x, y), x
        except NotImplementedError as error:
            raise checks.InputError(f"{_DENSITY}, got {self.channel} ({error})") from error
        except (TypeError, AttributeError) as error:
            if y is None:
                raise checks.InputError(
                    f"reference must hold labels, (x, y), for this channel, got x alone: without "
                    f"labels it failed with {type(error).__name__}: {error}"
                ) from error
            raise

    def _shared(self) -> bool:
        """Whether the density needs no theta, at the first point: the Predictor that it is given
        must not be asked."""
        try:
            density, _ = self._density(_refuse, slice(0, 1))
        except _ThetaAskedError:
            return False
        return isinstance(density, GaussianDensity)

    def _flat(self, x: Tensor) -> Tensor:
        return (x if self.features is None else self.features(x)).flatten(1)

    @torch.no_grad()
    def store(self) -> Store:
        with suppress(_OtherPartsError):
            if self._shared():
                with suppress(_ThetaAskedError):  # needed at another point, as in a mixture
                    return self._built(shared=True)
            return self._built(shared=False)
        if self.ranks.size > 1:
            raise checks.InputError(
                "channel must have the same weights and single scales for all thetas and reference "
                "points of a sharded reference, got others"
            )
        return self._built(shared=False, tabled=False)

    def _built(self, *, shared: bool, tabled: bool = True) -> Store:
        """The tables and what reads them; `shared`: the density is that of any theta. `tabled`: a
        Gaussian one by its centres, whose weights and single scales are one for all."""
        num, num_thetas = len(self.x), len(self.thetas)
        first, x = self._density(_refuse if shared else self.model.at(self.thetas[0]), slice(0, 1))
        sample, num_outputs = _values(self.model.at(self.thetas[0])(self.x[:1]))
        components = _components(first) if tabled else None
        if components is None and self.features is not None:
            raise checks.InputError(
                "features need a channel with a Gaussian density, got one of another kind"
            )
        width = self._flat(self.x[:1]).shape[1]
        shapes = {"values": (1, num, num_thetas * sample.shape[1])}
        for k, (_, scale) in enumerate(components or ()):
            is_shared = shared or (first.centres[k] is x and scale is not None)
            shapes[f"centres-{k}"] = (1 if is_shared else num_thetas, num, width)
            if scale is None:
                shapes[f"scales-{k}"] = shapes[f"centres-{k}"]
        tables, folder = self._tables(shapes, width)
        origin = torch.zeros(width, dtype=torch.float64, device=self.x.device)
        middle = torch.zeros(num_outputs, dtype=torch.float64, device=self.x.device)
        densities: list[list[ChannelDensity]] = [[] for _ in self.thetas]
        for rows in spans(num, _BLOCK):
            origin += self._flat(self.x[rows]).double().sum(0) / num
            values = []
            for s, theta in enumerate(self.thetas):
                predict = self.model.at(theta)
                predictions = _values(predict(self.x[rows]))[0]
                checks.finite("the model's prediction at the reference", predictions)
                predictions = predictions.double()
                if num_outputs and rows.start == 0 and s == 0:
                    middle = self.ranks.same(predictions[:, :num_outputs].mean(0))
                predictions[:, :num_outputs] -= middle
                values.append(predictions)
                if s > 0 and shared:
                    continue
                density, x = self._density(_refuse if shared else predict, rows)
                if components is None:
                    densities[s].append(density)
                    continue
                if _components(density) != components:
                    raise _OtherPartsError
                for k, (_, scale) in enumerate(components):
                    centres = density.centres[k].detach()
                    if s < shapes[f"centres-{k}"][0]:
                        flat = self._flat(centres)
                        checks.finite("the channel's centres", flat)
                        tables[f"centres-{k}"].write(s, rows.start, flat)
                        if scale is None:
                            scales = torch.broadcast_to(density.scales[k], centres.shape)
                            tables[f"scales-{k}"].write(s, rows.start, scales.flatten(1))
                    elif density.centres[k] is not x:
                        raise _OtherPartsError
            tables["values"].write(0, rows.start, torch.cat(values, 1))
        counts = self.ranks.gathered(torch.tensor([num], device=self.x.device)).flatten().tolist()
        origin = self.ranks.sum(origin * (num / sum(counts)))
        banks: list[GaussianBank | FunctionBank] = []
        for k, (weight, scale) in enumerate(components or ()):
            both = tables[f"centres-{k}"], scale, tables.get(f"scales-{k}")
            banks.append(gaussian_bank(weight, *both, origin, ranks=self.ranks))
        if components is None:
            edges = (*range(0, num, _BLOCK), num)
            banks.append(FunctionBank(tuple(map(tuple, densities)), edges))
        event, dtype = tuple(self.x.shape[1:]), self.x.dtype
        of_model = num_thetas, event, origin, middle, dtype
        return Store(tuple(banks), tables["values"], *of_model, folder, tuple(counts), self.ranks)

    def _tables(
        self, shapes: dict[str, tuple[int, int, int]], width: int
    ) -> tuple[dict[str, Rows], Path | None]:
        """Empty tables of these shapes: in memory, or in a folder if that is wanted or needed."""
        folder, dtype = self.folder, self.x.dtype
        total = sum(num_bytes(shape, dtype) for shape in shapes.values())
        columns = 2 * width + shapes["values"][2] + 2 * FEWEST_ROWS
        needed = num_bytes((FEWEST_ROWS, columns), dtype)
        if self.memory_limit < needed:
            raise checks.InputError(
                f"memory_limit must be at least {needed} bytes, one block of {FEWEST_ROWS} "
                f"reference points, got {self.memory_limit}"
            )
        if folder is None and total <= self.memory_limit:
            empty = partial(torch.empty, dtype=dtype, device=self.x.device)
            return {name: MemoryRows(empty(shape)) for name, shape in shapes.items()}, None
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="advbayes-reference-"))
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < total:
            raise OSError(
                errno.ENOSPC,
                f"the reference tables need {total} bytes of disk, got {free} bytes free",
                os.fspath(folder),
            )
        tables: dict[str, Rows] = {}
        for name, shape in shapes.items():
            tables[name] = DiskRows.create(folder / f"{name}.table", shape, dtype)
        if self.folder is None:
            weakref.finalize(tables["values"], shutil.rmtree, folder, True)
        return tables, folder


def gaussian_bank(
    log_weight: float,
    centres: Rows,
    scale: float | None,
    scales: Rows | None,
    origin: Tensor,
    factor: float = 1.0,
    ranks: Ranks = ALONE,
) -> GaussianBank:
    """The bank of these tables, with one scale or a table of them."""
    groups, num, _ = centres.shape
    half_norms = origin.new_empty(groups, num)
    reach, least = 0.0, math.inf if scale is None else scale
    for group in range(groups):
        for rows in spans(num, _BLOCK):
            tile = slice(group, group + 1), rows
            block = centres.block(*tile)[0].double()
            half_norms[group, rows] = 0.5 * (block - origin).square().sum(1)
            reach = max(reach, float(block.square().sum(1).max()) ** 0.5)
            if scales is not None:
                low, high = (float(value) for value in torch.aminmax(scales.block(*tile)))
                least = min(least, low) if math.isfinite(high) else math.nan
    if not (0 < least < math.inf and math.isfinite(float(half_norms.sum()))):
        raise checks.InputError(
            f"the channel's centres must be finite and its scales positive, got a least scale of "
            f"{least:g}"
        )
    spread = math.sqrt(2.0 * float(half_norms.max()))
    # What decides on far queries and on precisions must be the same on all ranks.
    reach, spread, least = ranks.max(origin.new_tensor([reach, spread, -least])).tolist()
    return GaussianBank(log_weight, centres, scales, half_norms, reach, spread, -least, factor)

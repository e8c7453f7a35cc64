"""What a query needs and does not change it: the channel's centres and the model's predictions at every reference point.

Computed once for all S thetas and all N reference points. In memory within a stated limit, in .npy files beyond it;
saved and loaded without the model, which is not needed any more.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, Independent, Normal

from advbayes import checks
from advbayes.channels import GaussianDensity
from advbayes.model import BayesianModel
from advbayes.purification.banks import FEWEST_ROWS, Bank, FunctionBank, GaussianBank
from advbayes.purification.rows import DiskRows, MemoryRows, Rows, num_bytes, spans
from advbayes.types import Channel, ChannelDensity

Features = Callable[[Tensor], Tensor]

_BLOCK = 1000  # reference points whose predictions and centres are computed at a time
_FLOOR = 1e-30  # of a class probability, so that the log of a weighted average is finite
_FORMAT = 1


class _ThetaAskedError(Exception):
    """Raised by the Predictor that must not be called."""


def _refuse(x: Tensor) -> Distribution:
    raise _ThetaAskedError


@dataclass(frozen=True, eq=False)
class Store:
    """The reference side of Eq. 4 and 5, all of it constant.

    `values` holds, for every reference point and theta, class probabilities (C of them), or for D outputs the means,
    scales^2 and squared means (3 D, means around `middle`).
    """

    banks: tuple[Bank, ...]
    values: Rows  # (1, N, S * V)
    num_thetas: int
    num_outputs: int  # D, or 0 for classes
    event_shape: tuple[int, ...]
    centre: Tensor  # (d,): the reference's mean, subtracted from centres and queries
    middle: Tensor  # (D,)
    folder: Path | None

    @property
    def num_reference(self) -> int:
        return self.values.shape[1]

    @property
    def width(self) -> int:
        """V, the number of values for each reference point and theta."""
        return self.values.shape[2] // self.num_thetas

    def value_block(self, rows: slice) -> Tensor:  # (n, S, V)
        return self.values.block(slice(0, 1), rows)[0].view(-1, self.num_thetas, self.width)

    def value_at(self, index: Tensor) -> Tensor:  # (*index.shape, S, V)
        return self.values.pick(0, index).view(*index.shape, self.num_thetas, self.width)

    def value_of(self, theta: int, index: Tensor) -> Tensor:  # (*index.shape, V)
        return self.values.pick(0, index, slice(theta * self.width, (theta + 1) * self.width))

    def widened(self, factor: float) -> Store:
        return replace(self, banks=tuple(bank.widened(factor) for bank in self.banks))


def _values(prediction: Distribution) -> tuple[Tensor, int]:
    """(n, V) and the number of outputs (0 for classes)."""
    if isinstance(prediction, CategoricalDistribution):
        return prediction.probs.clamp_min(_FLOOR), 0
    normal = prediction.base_dist if isinstance(prediction, Independent) else prediction
    if not isinstance(normal, Normal):
        raise TypeError(f"the likelihood must predict classes or Gaussians, got {type(prediction).__name__}")
    mean, variance = (part if part.ndim == 2 else part.unsqueeze(1) for part in (normal.loc, normal.scale.square()))
    return torch.cat([mean, variance, mean.square()], 1), mean.shape[1]


def build(
    model: BayesianModel,
    channel: Channel,
    thetas: Tensor,  # (S, P)
    x: Tensor,  # (N, *event)
    y: Tensor | None,
    *,
    features: Features | None,
    memory_limit: int,
    folder: Path | None,
) -> Store:
    """Centres and predictions at all reference points, block by block."""
    if not callable(getattr(channel, "density", None)):
        raise TypeError(
            f"channel must have a density to purify with, got {checks.describe(channel)}; a channel that can only be sampled "
            "is purified by simulation (SimulatedPurifier)"
        )
    with torch.no_grad():
        return _Builder(model, channel, thetas, x, y, features, memory_limit, folder).run()


@dataclass(frozen=True, eq=False)
class _Builder:
    model: BayesianModel
    channel: Channel
    thetas: Tensor
    x: Tensor
    y: Tensor | None
    features: Features | None
    memory_limit: int
    folder: Path | None

    def _density(self, predict: Any, rows: slice) -> tuple[ChannelDensity, Tensor]:
        x = self.x[rows]
        y = None if self.y is None else self.y[rows]
        try:
            return self.channel.density(predict, x, y), x
        except NotImplementedError as error:
            raise ValueError(
                f"channel must have a density to purify with, got {self.channel} ({error}); a channel that can only be "
                "sampled is purified by simulation (SimulatedPurifier)"
            ) from error
        except (TypeError, AttributeError) as error:
            if y is None:
                raise ValueError(
                    f"reference must hold labels, (x, y), for this channel, got x alone: without labels it failed with "
                    f"{type(error).__name__}: {error}"
                ) from error
            raise

    def _shared(self) -> bool:
        """Whether the density needs no theta. Theta reaches a channel through its Predictor alone: so give it none to ask."""
        try:
            density, _ = self._density(_refuse, slice(0, 1))
        except _ThetaAskedError:
            return False
        return isinstance(density, GaussianDensity)

    def _flat(self, x: Tensor) -> Tensor:
        return (x if self.features is None else self.features(x)).flatten(1)

    def run(self) -> Store:
        num, num_thetas = len(self.x), len(self.thetas)
        shared = self._shared()
        first, x = self._density(_refuse if shared else self.model.at(self.thetas[0]), slice(0, 1))
        sample, num_outputs = _values(self.model.at(self.thetas[0])(self.x[:1]))
        gaussian = isinstance(first, GaussianDensity)
        if not gaussian and self.features is not None:
            raise ValueError("features need a channel with a Gaussian density, got one of another kind")
        width = self._flat(self.x[:1]).shape[1]
        value_shape = (1, num, num_thetas * sample.shape[1])
        groups: list[int] = []
        per_feature: list[bool] = []
        if isinstance(first, GaussianDensity):
            groups = [1 if shared or centres is x else num_thetas for centres in first.centres]
            per_feature = [isinstance(scale, Tensor) and scale.ndim > 0 for scale in first.scales]
        dtype = self.x.dtype
        total = num_bytes(value_shape, dtype) + sum(
            num_bytes((g, num, width), dtype) * (2 if wide else 1) for g, wide in zip(groups, per_feature, strict=True)
        )
        needed = num_bytes((FEWEST_ROWS, 2 * width + value_shape[2] + 2 * FEWEST_ROWS), dtype)
        if self.memory_limit < needed:
            raise ValueError(
                f"memory_limit must be at least {needed} bytes, one block of {FEWEST_ROWS} reference points, "
                f"got {self.memory_limit}"
            )
        folder = self.folder
        on_disk = folder is not None or total > self.memory_limit
        if on_disk and folder is None:
            folder = Path(tempfile.mkdtemp(prefix="advbayes-reference-"))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

        def table(name: str, shape: tuple[int, int, int]) -> Rows:
            if folder is not None:
                return DiskRows.create(folder / f"{name}.npy", shape, dtype)
            return MemoryRows(torch.empty(shape, dtype=dtype, device=self.x.device))

        values = table("values", value_shape)
        centre = torch.zeros(width, dtype=torch.float64, device=self.x.device)
        for start, stop in spans(num, _BLOCK):
            centre += self._flat(self.x[start:stop]).double().sum(0)
        centre = (centre / num).to(dtype)
        banks: list[Bank] = []
        if isinstance(first, GaussianDensity):
            for k, weight in enumerate(first.log_weights):
                scale: float | Rows = table(f"scales-{k}", (groups[k], num, width)) if per_feature[k] else float(first.scales[k])
                norms = torch.empty(groups[k], num, dtype=dtype, device=self.x.device)
                banks.append(GaussianBank(float(weight), table(f"centres-{k}", (groups[k], num, width)), scale, norms))
        densities: list[list[ChannelDensity]] = [[] for _ in self.thetas]
        middle = torch.zeros(num_outputs, dtype=dtype, device=self.x.device)
        for start, stop in spans(num, _BLOCK):
            parts = []
            for s, theta in enumerate(self.thetas):
                predict = self.model.at(theta)
                found, outputs = _values(predict(self.x[start:stop]))
                if outputs and start == 0 and s == 0:
                    middle = found[:, :outputs].mean(0)
                if outputs:
                    found[:, :outputs] -= middle
                    found[:, 2 * outputs :] = found[:, :outputs].square()
                parts.append(checks.finite("the model's prediction at the reference", found))
                if s == 0 or not (gaussian and all(g == 1 for g in groups)):
                    self._fill(banks, densities, s, start, stop, predict if not shared else _refuse, centre, groups)
            values.write(0, start, torch.cat(parts, 1))
        if not gaussian:
            edges = (*range(0, num, _BLOCK), num)
            banks.append(FunctionBank(tuple(map(tuple, densities)), edges))
        store = Store(
            tuple(banks), values, num_thetas, num_outputs, tuple(self.x.shape[1:]), centre, middle, folder if on_disk else None
        )
        if folder is not None and self.folder is None:
            weakref.finalize(store.values, shutil.rmtree, folder, True)
        return store

    def _fill(
        self,
        banks: list[Bank],
        densities: list[list[ChannelDensity]],
        s: int,
        start: int,
        stop: int,
        predict: Any,
        centre: Tensor,
        groups: list[int],
    ) -> None:
        density, _ = self._density(predict, slice(start, stop))
        if not banks:
            densities[s].append(density)
            return
        assert isinstance(density, GaussianDensity)
        for k, (bank, points) in enumerate(zip(banks, density.centres, strict=True)):
            assert isinstance(bank, GaussianBank)
            if groups[k] == 1 and s > 0:
                continue
            flat = checks.finite("the channel's centres", self._flat(points.detach())) - centre
            bank.centres.write(s, start, flat)
            bank.half_norms[s, start:stop] = 0.5 * flat.double().square().sum(1).to(flat.dtype)
            if not isinstance(bank.scale, float):
                given = density.scales[k]
                assert isinstance(given, Tensor)
                bank.scale.write(s, start, given.flatten(1))


def save(store: Store, folder: Path, update: str, note: str) -> None:
    """Tables as .npy, the rest as one JSON document."""
    if any(isinstance(bank, FunctionBank) for bank in store.banks):
        raise ValueError("only channels with a Gaussian density can be saved, got one of another kind")
    if store.folder is not None and folder.resolve() == store.folder.resolve():
        raise ValueError(f"folder must not be the one that the purifier reads from, got {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    tables: dict[str, Rows] = {"values": store.values}
    banks: list[dict[str, object]] = []
    for k, bank in enumerate(store.banks):
        assert isinstance(bank, GaussianBank)
        tables[f"centres-{k}"] = bank.centres
        if isinstance(bank.scale, float):
            scale: float | None = bank.scale * bank.factor
        else:
            tables[f"scales-{k}"], scale = bank.scale, None
        banks.append({"log_weight": bank.log_weight, "scale": scale, "factor": 1.0 if scale is not None else bank.factor})
    dtype = store.centre.dtype
    for name, table in tables.items():
        copy = DiskRows.create(folder / f"{name}.npy", table.shape, dtype)
        for group in range(table.shape[0]):
            for start, stop in spans(table.shape[1], _BLOCK):
                copy.write(group, start, table.block(slice(group, group + 1), slice(start, stop))[0])
    document = {
        "format": _FORMAT,
        "update": update,
        "note": note,
        "banks": banks,
        "num_thetas": store.num_thetas,
        "num_outputs": store.num_outputs,
        "event_shape": list(store.event_shape),
        "centre": store.centre.double().tolist(),
        "middle": store.middle.double().tolist(),
    }
    (folder / "purifier.json").write_text(json.dumps(document))


def load(folder: Path, memory_limit: int) -> tuple[Store, str, str]:
    """The store, its update and its note; tables stay on disk if they take more than `memory_limit`."""
    try:
        document = json.loads((folder / "purifier.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"folder must hold a saved purifier (purifier.json), got {folder}") from None
    if document.get("format") != _FORMAT:
        raise ValueError(f"{folder} must have format {_FORMAT}, got {document.get('format')}")
    found = {path.stem: DiskRows.open(path) for path in sorted(folder.glob("*.npy"))}
    total = sum(num_bytes(rows.shape, rows.dtype) for rows in found.values())
    on_disk = total > memory_limit

    def table(name: str) -> Rows:
        if name not in found:
            raise ValueError(f"{folder} must hold {name}.npy, got {', '.join(sorted(found)) or 'no tables'}")
        rows = found[name]
        return rows if on_disk else MemoryRows(rows.block(slice(None), slice(None)).clone())

    values = table("values")
    dtype = found["values"].dtype
    banks: list[Bank] = []
    for k, entry in enumerate(document["banks"]):
        centres = table(f"centres-{k}")
        norms = torch.empty(centres.shape[:2], dtype=dtype)
        for group in range(centres.shape[0]):
            for start, stop in spans(centres.shape[1], _BLOCK):
                block = centres.block(slice(group, group + 1), slice(start, stop))[0]
                norms[group, start:stop] = 0.5 * block.double().square().sum(1).to(dtype)
        scale = table(f"scales-{k}") if entry["scale"] is None else float(entry["scale"])
        if centres.shape[1] != values.shape[1] or not math.isfinite(float(norms.sum())):
            raise ValueError(f"{folder} holds centres-{k}.npy that do not fit its values")
        banks.append(GaussianBank(float(entry["log_weight"]), centres, scale, norms, float(entry["factor"])))
    store = Store(
        tuple(banks),
        values,
        int(document["num_thetas"]),
        int(document["num_outputs"]),
        tuple(document["event_shape"]),
        torch.tensor(document["centre"], dtype=torch.float64).to(dtype),
        torch.tensor(document["middle"], dtype=torch.float64).to(dtype),
        folder if on_disk else None,
    )
    return store, str(document["update"]), str(document["note"])

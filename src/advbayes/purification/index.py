"""The nearest centres of a query by a FAISS index, and a bound on the weight of all the others.

Centres lie in cells around centroids m_j (inverted lists). A search visits some cells and returns
the k nearest centres in them. What it leaves out weighs at most, in units of a density at its
centre,

    (visited - k) exp(-d_k^2 / 2 s^2) + sum_j n_j exp(-max(0, |x' - m_j| - r_j)^2 / 2 s^2)

over the cells j that were not visited, r_j being the radius of cell j: a bound, not an estimate.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advbayes.checks import InputError
from advbayes.purification.banks import GaussianBank
from advbayes.purification.store import Store

_SLACK = 1.0 - 1e-4  # on d_k^2, which the search computes in float32
_CELLS = 4096  # at most
_VISITED = 16


@dataclass(frozen=True, eq=False)
class Cells:
    """The centres of one bank and theta in a FAISS index, by cells."""

    index: Any
    centroids: Tensor  # (J, d) float64
    radii: Tensor  # (J,) float64
    counts: Tensor  # (J,) float64

    @classmethod
    def of(cls, centres: Tensor) -> Cells:  # (N, d)
        try:
            faiss = importlib.import_module("faiss")
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "index='faiss' needs faiss: pip install 'advbayes[scale]'"
            ) from None
        points = centres.float().contiguous().numpy()
        num, width = points.shape
        size = max(1, min(_CELLS, round(math.sqrt(num))))
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(width), width, size)
        index.cp.min_points_per_centroid, index.nprobe = 1, min(size, _VISITED)
        index.train(points)
        index.add(points)
        centroids = torch.from_numpy(index.quantizer.reconstruct_n(0, size)).double()
        radii, counts = (torch.zeros(size, dtype=torch.float64) for _ in range(2))
        for cell in range(size):
            length = index.invlists.list_size(cell)
            if length:
                members = torch.from_numpy(
                    faiss.rev_swig_ptr(index.invlists.get_ids(cell), length).copy()
                )
                away = centres[members].double() - centroids[cell]
                radii[cell] = torch.linalg.vector_norm(away, dim=1).max() * (1 + 1e-9)
                counts[cell] = length
        return cls(index, centroids, radii, counts)

    def search(
        self, points: Tensor, num: int, scale: float
    ) -> tuple[Tensor, Tensor]:  # (B, d) float64
        """The rows of the nearest centres, (B, num), -1 for none; and the log of the bound, (B,)
        float64."""
        distance = torch.cdist(points, self.centroids)  # (B, J)
        cells = distance.topk(self.index.nprobe, largest=False)[1]
        square, rows = (
            torch.from_numpy(part)
            for part in self.index.search_preassigned(
                points.float().numpy(), num, cells.numpy(), torch.zeros(cells.shape).numpy()
            )
        )
        visited = torch.zeros_like(distance, dtype=torch.bool).scatter_(1, cells, True)
        near = (distance - self.radii).clamp_min(0.0)
        away = (self.counts.log() - 0.5 * (near / scale).square()).masked_fill(visited, -math.inf)
        beyond = (visited * self.counts).sum(1) - (rows >= 0).sum(1)
        last = square.double().masked_fill(rows < 0, 0.0).amax(1) * _SLACK
        rest = beyond.log() - 0.5 * last / scale**2
        return rows, torch.logsumexp(torch.cat([away, rest.unsqueeze(1)], 1), 1)


class NearestIndex:
    """Every bank of a store in an index, and how many centres of each theta answer a query."""

    def __init__(self, store: Store, num: int) -> None:
        self.num = num
        self.cells: list[list[Cells]] = []
        for bank in store.banks:
            if not isinstance(bank, GaussianBank) or not isinstance(bank.scale, float):
                raise InputError(
                    "index needs a Gaussian channel with one noise for all centres, got another"
                )
            whole = slice(0, store.num_reference)
            self.cells.append(
                [
                    Cells.of(bank.centres.block(slice(g, g + 1), whole)[0])
                    for g in range(bank.groups)
                ]
            )

    def search(
        self, store: Store, points: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor]:  # (B, d) float64
        """Rows for each bank, (G, B, k), and a bound on the share of the evidence that they leave
        out, (B,)."""
        nearest, log_left, log_evidence = [], [], []
        for bank, groups in zip(store.banks, self.cells, strict=True):
            assert isinstance(bank, GaussianBank)
            assert isinstance(bank.scale, float)
            scale = bank.scale * bank.factor
            rows, left = zip(
                *(cells.search(points, self.num, scale) for cells in groups), strict=True
            )
            nearest.append(torch.stack(rows))
            peak = bank.log_weight - points.shape[1] * math.log(scale * math.sqrt(2.0 * math.pi))
            each = [bank.exact_at(points, g, row.clamp_min(0)) for g, row in enumerate(rows)]
            kept = torch.stack(each).masked_fill(nearest[-1] < 0, -math.inf)
            log_left.append((torch.stack(left) + peak).expand(store.num_thetas, -1))
            log_evidence.append(kept.logsumexp(-1).expand(store.num_thetas, -1))
        share = torch.logsumexp(torch.stack(log_left), 0) - torch.logsumexp(
            torch.stack(log_evidence), 0
        )
        return tuple(nearest), share.amax(0).exp().nan_to_num(nan=math.inf)

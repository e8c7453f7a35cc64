"""The nearest centres of a query by a FAISS index, and a bound on the weight of all the others.

Centres lie in cells around centroids m_j (inverted lists). No centre of cell j is nearer to x' than

    a_j = max(|x' - m_j| - r_j,  u.(m_j - x') + l_ij),   u the direction from m_i to m_j,

where r_j is the radius of the cell, m_i the centroid nearest to x', and l_ij the least u.(c - m_j)
over the centres c of cell j: the edge of the cell on the line through the two centroids. A search
visits the cells that could matter and returns the k nearest centres in them. Of n_j centres in each
cell, those left out then weigh at most, in units of a density at its centre,

    sum_j n_j exp(-b_j^2 / 2 s^2),   b_j = a_j, or at least the k-th distance where j was visited:

a bound, not an estimate.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advbayes.checks import InputError, extra
from advbayes.purification.banks import GaussianBank, Query
from advbayes.purification.rows import spans
from advbayes.purification.store import Store

_ROUNDING = 2.0**-20  # of what is float32 here: points, squared distances and edges of cells
_CELLS = 4096  # at most
_FIRST = 8  # cells visited to learn how large the evidence is
_MOST = 0.5  # of all centres: to visit more of them takes as long as the exact sweep
_ROWS = 4096  # of a cell, whose edges are computed at a time


@dataclass(frozen=True, eq=False)
class Cells:
    """The centres of one bank and theta in a FAISS index, by cells, around the origin."""

    index: Any
    centroids: Tensor  # (J, d) float64
    radii: Tensor  # (J,) float64
    edges: Tensor  # (J, J) float32: l_ij
    counts: Tensor  # (J,) float64
    reach: float  # the largest norm of a centre

    @classmethod
    def of(cls, centres: Tensor) -> Cells:  # (N, d) float64
        with extra("index='faiss' needs faiss", "scale"):
            faiss = importlib.import_module("faiss")
        points = centres.float().contiguous().numpy()
        num, width = points.shape
        size = max(1, min(_CELLS, round(math.sqrt(num))))
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(width), width, size)
        index.cp.min_points_per_centroid, index.nprobe = 1, size
        index.train(points)
        index.add(points)
        centroids = torch.from_numpy(index.quantizer.reconstruct_n(0, size)).double()
        radii, counts = (centroids.new_zeros(size) for _ in range(2))
        edges = centroids.new_zeros(size, size)
        for cell in range(size):
            counts[cell] = length = index.invlists.list_size(cell)
            ids = faiss.rev_swig_ptr(index.invlists.get_ids(cell), length).copy()
            towards = torch.nn.functional.normalize(centroids[cell] - centroids)  # (J, d)
            for some in spans(length, _ROWS):
                away = centres[torch.from_numpy(ids[some])] - centroids[cell]
                radii[cell] = max(radii[cell], torch.linalg.vector_norm(away, dim=1).max())
                edge = (away @ towards.T).amin(0)
                edges[:, cell] = torch.minimum(edges[:, cell], edge) if some.start else edge
        reach = float(torch.linalg.vector_norm(centres, dim=1).max())
        return cls(index, centroids, radii, edges.float(), counts, reach)

    def nearest_possible(self, points: Tensor) -> Tensor:  # (B, d) float64 -> (B, J)
        """No centre of a cell is nearer than this."""
        distance = torch.cdist(points, self.centroids)
        least, nearest = distance.min(1)
        length = torch.cdist(self.centroids[nearest], self.centroids)
        beyond = (distance.square() - least.square().unsqueeze(1)) / length + length
        along = 0.5 * beyond + self.edges[nearest]
        along = along.masked_fill(length == 0, 0.0)
        near = torch.maximum(distance - self.radii, along)
        return (near - self._slack(points).unsqueeze(1)).clamp_min(0.0)

    def nearest(self, points: Tensor, num: int) -> Tensor:  # (B, d) float64 -> (B, J) bool
        """The cells with the nearest centroids."""
        distance = torch.cdist(points, self.centroids)
        cells = distance.topk(min(num, distance.shape[1]), largest=False)[1]
        return torch.zeros_like(distance, dtype=torch.bool).scatter_(1, cells, True)

    def _slack(self, points: Tensor) -> Tensor:  # (B,)
        norms: Tensor = torch.linalg.vector_norm(points, dim=1)
        return _ROUNDING * (norms + self.reach)

    def search(
        self,
        points: Tensor,  # (B, d) float64
        visited: Tensor,  # (B, J) bool
        num: int,
    ) -> tuple[Tensor, Tensor]:
        """The rows of the nearest centres in these cells, (B, num), -1 for none; and how near the
        other centres in them could be, (B,) float64."""
        cells = torch.arange(visited.shape[1], device=visited.device)
        order = torch.where(visited, cells, -1).sort(1, descending=True)[0]
        answer = self.index.search_preassigned(points.float().numpy(), num, order.numpy(), None)
        square, rows = map(torch.from_numpy, answer)
        returned = (rows >= 0).sum(1)
        all_of_them = (visited * self.counts).sum(1) == returned
        last = square.double().masked_fill(rows < 0, 0.0).amax(1).sqrt() * (1.0 - _ROUNDING)
        last = (last - self._slack(points)).clamp_min(0.0)
        return rows, last.masked_fill(all_of_them, math.inf)


class NearestIndex:
    """Every bank of a store in an index, and how many centres of each theta answer a query."""

    def __init__(self, store: Store, num: int) -> None:
        self.num, self.origin = num, store.origin.cpu()
        self.cells: list[Cells] = []  # bank after bank, theta after theta
        whole = slice(0, store.num_reference)
        for bank, group in _groups(store):
            centres = bank.centres.block(slice(group, group + 1), whole)[0].double().cpu()
            self.cells.append(Cells.of(centres - self.origin))

    def search(
        self, store: Store, query: Query, left_out: float
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Rows for each bank, (G, B, k), and a bound on the share of the evidence that they leave
        out, (B,): as many cells are visited as it takes to bring it below `left_out`."""
        around = query.points.cpu() - self.origin
        near = [cells.nearest_possible(around) for cells in self.cells]
        first = [cells.nearest(around, _FIRST) for cells in self.cells]
        rows, _ = self._visit(around, first)
        # what a cell may weigh without being visited
        num_cells = sum(len(cells.counts) for cells in self.cells)
        share = math.log(left_out / (4 * num_cells)) if left_out else -math.inf
        limit = self._evidence(store, query, rows) + share  # (S, B)
        visited = []
        for weight, cells, seen, (bank, group) in zip(
            self._weights(store, near), self.cells, first, _groups(store), strict=True
        ):
            threshold = limit[group] if bank.groups > 1 else limit.amin(0)
            more = weight > threshold.unsqueeze(1)
            worthwhile = (more * cells.counts).sum(1) <= _MOST * cells.counts.sum()
            visited.append(seen | (more & worthwhile.unsqueeze(1)))
        rows, last = self._visit(around, visited)
        near = [
            torch.where(seen, torch.maximum(each, farther.unsqueeze(1)), each)
            for seen, each, farther in zip(visited, near, last, strict=True)
        ]
        left = _over_banks(store, [each.logsumexp(1) for each in self._weights(store, near)])
        bound = (left - self._evidence(store, query, rows)).amax(0).exp().nan_to_num(nan=math.inf)
        device = query.points.device
        return tuple(index.to(device) for index in _by_bank(store, rows)), bound.to(device)

    def _visit(
        self, around: Tensor, visited: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:  # (B, k) and (B,) each
        pairs = zip(self.cells, visited, strict=True)
        each = [cells.search(around, seen, self.num) for cells, seen in pairs]
        return [rows for rows, _ in each], [last for _, last in each]

    def _weights(self, store: Store, near: list[Tensor]) -> list[Tensor]:  # (B, J) each
        """The log of the most that each cell can weigh, if its centres are no nearer than this."""
        out = []
        for (bank, _), cells, bound in zip(_groups(store), self.cells, near, strict=True):
            out.append(bank.log_peak + cells.counts.log() - 0.5 * (bound / bank.sigma).square())
        return out

    def _evidence(self, store: Store, query: Query, rows: list[Tensor]) -> Tensor:  # (S, B)
        """log sum p(x' | x_n, theta_s) over these rows alone."""
        parts = []
        for (bank, group), index in zip(_groups(store), rows, strict=True):
            each = bank.exact_at(query, group, index.clamp_min(0).to(query.points.device)).cpu()
            parts.append(each.masked_fill(index < 0, -math.inf).logsumexp(1))
        return _over_banks(store, parts)


def _groups(store: Store) -> Iterator[tuple[GaussianBank, int]]:
    if not store.gaussians or any(bank.scales is not None for bank in store.gaussians):
        raise InputError("index needs a Gaussian channel of one noise for all centres, got another")
    for bank in store.gaussians:
        for group in range(bank.groups):
            yield bank, group


def _by_bank(store: Store, parts: list[Tensor]) -> list[Tensor]:  # (G, ...) each
    sizes = [bank.groups for bank in store.banks]
    return list(torch.split(torch.stack(parts), sizes))


def _over_banks(store: Store, parts: list[Tensor]) -> Tensor:  # (B,) each -> (S, B)
    """log-sum-exp over the banks, of which some are shared by all thetas."""
    each = [part.expand(store.num_thetas, -1) for part in _by_bank(store, parts)]
    return torch.stack(each).logsumexp(0)

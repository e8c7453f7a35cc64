"""May a purified prediction be believed? Effective samples, evidence, nearest centre, support."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from advbayes.purification.banks import Query
from advbayes.purification.rows import spans
from advbayes.purification.store import Store
from advbayes.purification.sweep import Sums, sweep, weights

_WEIGHTS = 1 << 24  # weights at a time: 128 MB
# a query that no centre's noise reaches within six standard deviations is out of support
_SUPPORT_SDS = 6.0


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What stands behind each of B purified predictions; see `Purifier.diagnose`."""

    # (B,) float64: log p(x' | D) = log 1/(SN) sum_sn p(x' | x_n, theta_s), an anomaly score
    log_evidence: Tensor
    ess_reference: Tensor  # (B,): 1 / sum_n w_n^2, the effective sample size over reference points
    ess_theta: Tensor  # (B,): 1 / sum_s w_s^2
    nearest: Tensor  # (B,) int64: the reference point of the likeliest centre
    distance: Tensor  # (B,): to that centre (infinite for a channel that has no centres)
    out_of_support: Tensor  # (B,) bool: no centre's noise explains the query
    # (B,) float64: at most this share of the evidence was left out (0 without an index)
    left_out: Tensor


def merge(parts: list[Diagnosis], join: Callable[[list[Tensor]], Tensor]) -> Diagnosis:
    """Of several blocks of queries."""
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Diagnosis(*(join(list(column)) for column in columns))


def chi_square_limit(width: int) -> float:
    """What chi-square of `width` degrees exceeds as rarely as a Gaussian 6 sd (Wilson-Hilferty)."""
    spread = 2.0 / (9.0 * width)
    return width * (1.0 - spread + _SUPPORT_SDS * math.sqrt(spread)) ** 3


def diagnose(store: Store, query: Query, log_shares: Callable[[Tensor], Tensor]) -> Diagnosis:
    """Two passes: the evidence of each theta, then the weights of reference points, by blocks."""
    size = max(1, _WEIGHTS // max(store.counts))
    if len(query) > size:
        blocks = (query.take(rows) for rows in spans(len(query), size))
        return merge([diagnose(store, block, log_shares) for block in blocks], torch.cat)
    sums = sweep(store, query, values=False)
    shares = log_shares(sums.log_evidence).exp()  # (S, B)
    num, impossible = store.num_whole, sums.log_evidence == -math.inf  # (S, B)
    # thetas that exclude x' are spread evenly
    evenly, shown = (shares * impossible).sum(0) / num, shares.masked_fill(impossible, 0.0)
    each = query.points.new_zeros(len(query), store.num_reference)
    for block in weights(store, query, sums, shown):
        each[:, block.rows] += torch.einsum("gbn,gb->bn", block.terms, block.group_factor)
    each += evenly.unsqueeze(1)
    best, nearest, source = _likeliest(sums)
    distance, far = _support(store, query, nearest, source)
    ranks, dtype = store.ranks, store.dtype
    nearest = nearest + sum(store.counts[: ranks.rank])
    winner = ranks.gathered(best).argmax(0, keepdim=True)
    best, nearest, distance, far = (
        ranks.gathered(each).gather(0, winner).squeeze(0) for each in (best, nearest, distance, far)
    )
    return Diagnosis(
        log_evidence=torch.logsumexp(sums.log_evidence, 0) - math.log(store.num_thetas * num),
        ess_reference=(1.0 / ranks.sum(each.square().sum(1))).clamp(1.0, num).to(dtype),
        ess_theta=(1.0 / shares.square().sum(0)).to(dtype),
        nearest=nearest,
        distance=distance.to(dtype),
        out_of_support=far | (best == -math.inf),
        left_out=torch.zeros_like(best),
    )


def _likeliest(sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest centre: log-density (B,), reference point (B,), bank and group (2, B)."""
    tops, indices, sources = [], [], []
    for k, part in enumerate(sums.banks):
        top, place = part.leading.logits.max(-1)  # (G, B)
        tops.append(top + part.offset)
        indices.append(part.leading.rows.gather(-1, place.unsqueeze(-1)).squeeze(-1))
        sources += [(k, group) for group in range(len(top))]
    best, winner = torch.cat(tops).max(0)
    nearest = torch.cat(indices).gather(0, winner.unsqueeze(0)).squeeze(0)
    return best, nearest, torch.tensor(sources, device=winner.device)[winner].T


def _support(store: Store, query: Query, nearest: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """The distance to the likeliest centre, and whether its noise reaches that far."""
    distance = query.points.new_full((len(query),), math.inf)
    far = torch.zeros(len(query), dtype=torch.bool, device=distance.device)
    limit = chi_square_limit(query.points.shape[1])
    for k, bank in enumerate(store.gaussians):
        for group in range(bank.groups):
            rows = torch.nonzero((source[0] == k) & (source[1] == group)).squeeze(1)
            if len(rows):
                square, in_noise = bank.squared_distance(query.points[rows], group, nearest[rows])
                distance[rows] = square.sqrt()
                far[rows] = in_noise > limit
    return distance, far

"""May a purified prediction be believed? Effective sample sizes, evidence, nearest centre, support."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from advbayes.purification.banks import GaussianBank, Query
from advbayes.purification.store import Store
from advbayes.purification.sweep import sweep

_SUPPORT_SDS = 6.0  # a query that no centre's noise reaches within six standard deviations is out of support


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What stands behind each of B purified predictions; see `Purifier.diagnose`."""

    log_evidence: Tensor  # (B,) float64: log p(x' | D) = log 1/(SN) sum_sn p(x' | x_n, theta_s), an anomaly score
    ess_reference: Tensor  # (B,): 1 / sum_n w_n^2, how many reference points speak
    ess_theta: Tensor  # (B,): 1 / sum_s w_s^2
    nearest: Tensor  # (B,) int64: the reference point of the likeliest centre
    distance: Tensor  # (B,): to that centre (infinite for a channel that has no centres)
    out_of_support: Tensor  # (B,) bool: no centre's noise explains the query


def merge(parts: list[Diagnosis]) -> Diagnosis:
    """One after the other."""
    return Diagnosis(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Diagnosis)))


def chi_square_limit(width: int) -> float:
    """The value that a chi-square variable of `width` degrees exceeds as rarely as a Gaussian its sixth sd (Wilson-Hilferty).

    >>> 784 < chi_square_limit(784) < 1100
    True
    """
    spread = 2.0 / (9.0 * width)
    return width * (1.0 - spread + _SUPPORT_SDS * math.sqrt(spread)) ** 3


def diagnose(store: Store, query: Query, log_shares: Callable[[Tensor], Tensor]) -> Diagnosis:
    """Two passes: the evidence of each theta, then the weights of all reference points, block by block."""
    sums = sweep(store, query, values=False)
    shares = log_shares(sums.log_evidence)  # (S, B)
    batch, num = len(query), store.num_reference
    impossible = sums.log_evidence == -math.inf  # (S, B)
    squares = query.flat.new_zeros(batch, dtype=torch.float64)
    best = query.flat.new_full((batch,), -math.inf, dtype=torch.float64)
    nearest = torch.zeros(batch, dtype=torch.int64, device=best.device)
    source = torch.zeros(2, batch, dtype=torch.int64, device=best.device)  # bank and group of the likeliest centre
    edges = sorted({rows.start for bank in store.banks for _, rows in bank.tiles(batch)} | {num})
    # Theta by theta and bank by bank within each block of rows, so that weights can be added before they are squared.
    for start, stop in itertools.pairwise(edges):
        weights = query.flat.new_zeros(batch, stop - start, dtype=torch.float64)
        for k, (bank, part) in enumerate(zip(store.banks, sums.banks, strict=True)):
            for group in range(bank.groups):
                logits = bank.logits(query, slice(group, group + 1), slice(start, stop))[0]  # (B, n)
                thetas = slice(0, store.num_thetas) if bank.groups == 1 else slice(group, group + 1)
                log_share = shares[thetas] - sums.log_evidence[thetas]
                log_share = torch.where(impossible[thetas], torch.full_like(log_share, -math.inf), log_share).logsumexp(0)
                weights += (logits.double() + (part.offset + log_share).unsqueeze(1)).exp()
                top, index = logits.max(-1)
                here = top.double() + part.offset
                better = here > best
                best = torch.where(better, here, best)
                nearest = torch.where(better, index + start, nearest)
                source = torch.where(better, torch.tensor([[k], [group]], device=source.device), source)
        blind = (shares.exp() * impossible).sum(0) / num  # thetas that exclude x' are spread evenly
        squares += (weights + blind.unsqueeze(1)).square().sum(1)
    distance, far = _support(store, query, nearest, source)
    lost = best == -math.inf
    ess = (1.0 / squares.clamp_min(1.0 / num)).clamp(1.0, num)
    dtype = query.flat.dtype
    return Diagnosis(
        log_evidence=torch.logsumexp(sums.log_evidence, 0) - math.log(store.num_thetas * num),
        ess_reference=ess.to(dtype),
        ess_theta=(1.0 / (2.0 * shares).exp().sum(0)).to(dtype),
        nearest=nearest,
        distance=distance.to(dtype),
        out_of_support=far | lost,
    )


def _support(store: Store, query: Query, nearest: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """The distance to the likeliest centre, and whether its noise reaches that far."""
    distance = query.flat.new_full((len(query),), math.inf, dtype=torch.float64)
    far = torch.zeros(len(query), dtype=torch.bool, device=distance.device)
    limit = chi_square_limit(query.flat.shape[1])
    for k, bank in enumerate(store.banks):
        if not isinstance(bank, GaussianBank):
            continue
        for group in range(bank.groups):
            rows = torch.nonzero((source[0] == k) & (source[1] == group)).squeeze(1)
            if len(rows):
                square, in_noise = bank.squared_distance(query.take(rows), group, nearest[rows].unsqueeze(1))
                distance[rows] = square.squeeze(1).sqrt()
                far[rows] = in_noise.squeeze(1) > limit
    return distance, far

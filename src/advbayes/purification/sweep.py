"""One pass over all reference points: evidence and weighted averages for a block of queries, and their exact gradient.

    L_s(b) = sum_k sum_n w_k N(x'_b; c_skn, scale^2),   A_s(b) = sum_n p(n | x'_b, theta_s) v_sn

Blocks of N: a matrix product, then a streaming log-sum-exp. Nothing of size N x B outlives its block, unless a gradient is
wanted and all of it takes no more than a fixed allowance; the backward pass computes larger ones again, block by block. The
products' float32 rounding shows in the weights once the noise is small (1e-3 at sigma 0.1 on images), so the leading terms
are computed again from differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from advbayes.purification.banks import Bank, GaussianBank, Query, Room
from advbayes.purification.store import Store

_LEAST = -80.0  # exp is many times slower where it underflows, and exp(-80) is nothing beside 1
_NOTHING = 1.0001 * math.exp(_LEAST)
_LEADING = 8  # terms of each theta and query that are computed exactly
_TOLERATED = 1e-5  # rounding of log-weights that is left as it is
KEPT = 1 << 25  # terms of one prediction that may wait for the backward pass: 128 MB of float32


class Tilt(Protocol):
    """log p(y_b | x_n, theta_s): turns the evidence of x' into that of x' and y together."""

    def block(self, thetas: slice, rows: slice) -> Tensor: ...  # (s, B, n)

    def at(
        self,
        theta: int,
        index: Tensor,  # (B, k)
    ) -> Tensor: ...  # (B, k)


@dataclass(frozen=True, eq=False)
class Kept:
    """exp(logits - level) of one block, for the backward pass."""

    terms: Tensor  # (g, B, n)
    level: Tensor  # (g, B): the largest logit of this block and those before it

    def correct(self, start: int, index: Tensor, change: Tensor) -> None:  # (g, B, k), (g, B, k)
        """Multiplies the terms of these reference points by exp(change), as far as the block has them."""
        index, num = index - start, self.terms.shape[-1]
        inside, index = (index >= 0) & (index < num), index.clamp(0, num - 1)
        added = self.terms.gather(-1, index) * torch.expm1(change).to(self.terms.dtype)
        self.terms.scatter_add_(-1, index, torch.where(inside, added, torch.zeros_like(added)))


@dataclass(frozen=True, eq=False)
class BankSums:
    """A bank's share: everything is relative to `peak` (the largest logit) and free of the bank's offset."""

    peak: Tensor  # (G, B), minus infinity where the bank excludes a query
    total: Tensor  # (G, B) float64: sum exp(logits - peak)
    weighted: Tensor  # (G, B, S * V or V) float64
    offset: Tensor  # (B,) float64
    tile_peaks: list[Tensor]  # (g, B) each
    leading: Tensor | None  # (G, B, k) indices of the terms computed exactly
    correction: Tensor | None  # (G, B, k) float64: exact - logits
    kept: list[Kept] | None = None  # one for each block

    @property
    def log_evidence(self) -> Tensor:  # (G, B) float64
        return self.peak.double() + self.total.log() + self.offset


@dataclass(frozen=True, eq=False)
class Sums:
    """The evidence of each theta and the weighted averages of the values."""

    log_evidence: Tensor  # (S, B) float64: log sum_n p(x' | x_n, theta_s)
    averages: Tensor  # (S, B, V) float64
    banks: list[BankSums]
    shares: list[Tensor]  # (S, B) float64 for each bank: p(bank | x', theta_s)


def _exp(logits: Tensor) -> Tensor:
    """exp in place, clamped where it is nothing."""
    return logits.clamp_(min=_LEAST).exp_()


def _block_of_values(store: Store, groups: slice, rows: slice, own: int) -> Tensor:
    """The values as right factors for `own` groups: (1, n, S * V) when all thetas share the weights, else (g, n, V)."""
    values = store.value_block(rows)  # (n, S, V)
    if own == 1 and store.num_thetas > 1:
        return values.reshape(1, len(values), -1)
    return values[:, groups].transpose(0, 1)


def _sweep_bank(store: Store, bank: Bank, query: Query, tilt: Tilt | None, values: bool, keep: bool) -> BankSums:
    batch = len(query)
    own = bank.groups if tilt is None else store.num_thetas  # a tilt differs from theta to theta even if the centres do not
    width = 0 if not values else store.width * (store.num_thetas if own == 1 else 1)
    like = query.flat
    peak = like.new_full((own, batch), -math.inf)
    total = like.new_zeros((own, batch), dtype=torch.float64)
    weighted = like.new_zeros((own, batch, width), dtype=torch.float64)
    correct = isinstance(bank, GaussianBank) and bank.rounding(query) > _TOLERATED and like.dtype == torch.float32
    leaders: list[tuple[slice, Tensor, Tensor]] = []
    kept: list[tuple[slice, slice, Kept]] = []
    peaks = []
    room = None if keep else Room()
    for groups, rows in bank.tiles(batch):
        logits = bank.logits(query, groups, rows, room)
        if tilt is not None:
            groups = slice(0, own) if bank.groups == 1 else groups
            logits = logits + tilt.block(groups, rows)
        if correct:
            leaders.append((groups, *_leaders(logits, rows.start)))
        before = peak[groups]
        top = logits.amax(-1)
        peaks.append(top)
        after = torch.maximum(before, top)
        level = after.masked_fill(after == -math.inf, 0.0)
        # Where nothing was possible so far, `before` counts for nothing once something is.
        fade = torch.where(after == before, torch.zeros_like(after), before - level).double().exp()
        terms = _exp(logits.sub_(level.unsqueeze(-1)))
        if keep:
            kept.append((groups, rows, Kept(terms, level)))
        peak[groups] = after
        total[groups] = total[groups] * fade + terms.sum(-1)
        if values:
            right = _block_of_values(store, groups, rows, own)
            weighted[groups] = weighted[groups] * fade.unsqueeze(-1) + torch.matmul(terms, right)
    offset = bank.offset(query)
    sums = BankSums(peak, total, weighted, offset, peaks, None, None, [tile for _, _, tile in kept] if keep else None)
    if correct and leaders and isinstance(bank, GaussianBank):
        sums = _corrected(store, bank, query, tilt, values, sums, *_merge(leaders, own))
        for groups, rows, tile in kept:
            assert sums.leading is not None and sums.correction is not None  # noqa: PT018
            tile.correct(rows.start, sums.leading[groups], sums.correction[groups])
    return sums


def _leaders(logits: Tensor, start: int) -> tuple[Tensor, Tensor]:
    value, index = logits.topk(min(_LEADING, logits.shape[-1]), dim=-1, sorted=False)
    return value, index + start


def _merge(kept: list[tuple[slice, Tensor, Tensor]], own: int) -> tuple[Tensor, Tensor]:
    """The leaders of all blocks -> the leaders of each theta."""
    values, indices = [], []
    for group in range(own):
        mine = [(v[group - g.start], i[group - g.start]) for g, v, i in kept if g.start <= group < g.stop]
        value, index = torch.cat([v for v, _ in mine], -1), torch.cat([i for _, i in mine], -1)
        value, place = value.topk(min(_LEADING, value.shape[-1]), dim=-1, sorted=False)
        values.append(value)
        indices.append(index.gather(-1, place))
    return torch.stack(values), torch.stack(indices)


def _corrected(
    store: Store,
    bank: GaussianBank,
    query: Query,
    tilt: Tilt | None,
    values: bool,
    sums: BankSums,
    logits: Tensor,  # (G, B, k)
    index: Tensor,  # (G, B, k)
) -> BankSums:
    """Replaces the leading terms by exact ones: total += exp(exact) - exp(logits), and the averages' numerators alike."""
    corrections = []
    total, weighted = sums.total, sums.weighted
    for group in range(len(index)):
        exact = bank.exact(query, group if bank.groups > 1 else 0, index[group])
        given = logits[group].double()
        if tilt is not None:
            given = given - tilt.at(group, index[group]).double()
        # The correction itself is rounding; more than that (a query farther off than float32 can tell) is not to be trusted.
        correction = (exact - given - sums.offset.unsqueeze(1)).clamp(-1.0, 1.0)
        corrections.append(correction)
        change = (logits[group] - sums.peak[group].unsqueeze(-1)).double().exp() * torch.expm1(correction)
        total[group] += change.sum(-1)
        if values:
            shared = weighted.shape[0] == 1 and store.num_thetas > 1
            right = store.value_at(index[group]).flatten(2) if shared else store.value_of(group, index[group])  # (B, k, *)
            weighted[group] += torch.bmm(change.unsqueeze(1), right.double()).squeeze(1)
    return replace(sums, leading=index, correction=torch.stack(corrections))


def sweep(store: Store, query: Query, *, tilt: Tilt | None = None, values: bool = True, keep: bool = False) -> Sums:
    """All banks, added up; `keep` holds on to what `pull_back` would compute again."""
    parts = [_sweep_bank(store, bank, query, tilt, values, keep) for bank in store.banks]
    num_thetas, batch = store.num_thetas, len(query)
    if len(parts) == 1:
        log_evidence = parts[0].log_evidence.expand(num_thetas, batch)
        shares = [torch.ones_like(log_evidence)]
    else:
        each = torch.stack([part.log_evidence.expand(num_thetas, batch) for part in parts])
        log_evidence = torch.logsumexp(each, 0)
        possible = log_evidence > -math.inf
        shares = list(torch.where(possible, each, torch.zeros_like(each)).softmax(0))
    averages = query.flat.new_zeros((num_thetas, batch, store.width if values else 0), dtype=torch.float64)
    if values:
        for part, share in zip(parts, shares, strict=True):
            mean = part.weighted / part.total.unsqueeze(-1)
            if len(mean) == 1 and num_thetas > 1:
                mean = mean[0].view(batch, num_thetas, -1).transpose(0, 1)
            averages = averages + share.unsqueeze(-1) * mean
    return Sums(log_evidence, averages, parts, shares)


def pull_back(
    store: Store,
    query: Query,
    sums: Sums,
    of_evidence: Tensor,  # (S, B) float64: d / d log_evidence
    of_averages: Tensor | None,  # (S, B, V) float64: d / d averages
    tilt: Tilt | None = None,
) -> Tensor:  # (B, d)
    """d log L_s = sum_n p(n) d log p_n and dA_s = sum_n p(n) (v_n - A_s) d log p_n, block by block, computed again."""
    constant = of_evidence
    if of_averages is not None:
        constant = constant - (of_averages * sums.averages).sum(-1)
    gradient = torch.zeros_like(query.flat)
    room, side = Room(), Room()
    for bank, part in zip(store.banks, sums.banks, strict=True):
        own = len(part.peak)
        scale = (part.peak.double() + part.offset - sums.log_evidence).exp()  # (S, B): exp(logits - peak) -> p(n | x', theta)
        scale = torch.where(sums.log_evidence > -math.inf, scale, torch.zeros_like(scale))
        lift = (constant * scale).to(query.flat.dtype)  # (S, B)
        slope = None if of_averages is None else (of_averages * scale.unsqueeze(-1)).to(query.flat.dtype)  # (S, B, V)
        if own == 1 and store.num_thetas > 1:
            lift = lift.sum(0, keepdim=True)
            slope = None if slope is None else slope.transpose(0, 1).reshape(1, len(query), -1)
        level = part.peak.masked_fill(part.peak == -math.inf, 0.0)
        kept: Iterable[Kept | None] = part.kept or [None] * len(part.tile_peaks)
        for (groups, rows), top, tile in zip(bank.tiles(len(query)), part.tile_peaks, kept, strict=True):
            places = slice(0, own) if tilt is not None and bank.groups == 1 else groups
            live = torch.nonzero((top - level[places] > _LEAST).any(0)).squeeze(1)  # for the others the block is nothing
            if not len(live):
                continue
            pick = None if len(live) == len(query) else live
            steep, factors = lift[places], None if slope is None else slope[places]
            if tile is None:
                terms = _terms(bank, part, query, groups, rows, tilt, pick, room)
                out = terms
            else:
                terms = _taken(tile.terms, pick)
                out = room.of(query.flat, *terms.shape)  # another backward pass may come
                fade = (tile.level - level[places]).clamp_max(0.0).exp()  # above 0 only where nothing was possible yet
                steep, factors = steep * fade, None if factors is None else factors * fade.unsqueeze(-1)
            functional.threshold(terms, _NOTHING, 0.0, inplace=True)  # a clamped term does not move
            steep = _taken(steep, pick).unsqueeze(-1)
            if factors is not None:
                right = _block_of_values(store, places, rows, own)
                room_of_slopes = side.of(query.flat, *terms.shape)
                steep = torch.bmm(_taken(factors, pick), right.transpose(1, 2), out=room_of_slopes).add_(steep)
            terms = torch.mul(terms, steep, out=out)
            if tilt is not None and bank.groups == 1:
                terms = terms.sum(0, keepdim=True)
            if pick is None:
                gradient += bank.pull(query, groups, rows, terms)
            else:
                gradient.index_add_(0, live, bank.pull(query.take(live), groups, rows, terms))
    return gradient


def _taken(values: Tensor, pick: Tensor | None) -> Tensor:  # (g, B, *) -> (g, b, *)
    return values if pick is None else values[:, pick]


def _terms(
    bank: Bank,
    part: BankSums,
    query: Query,
    groups: slice,
    rows: slice,
    tilt: Tilt | None,
    pick: Tensor | None,
    room: Room,
) -> Tensor:  # (g, b, n)
    """exp(logits - peak) of one block, computed again for the queries in `pick`, leading terms exact as before."""
    logits = bank.logits(query if pick is None else query.take(pick), groups, rows, room)
    places = groups
    if tilt is not None:
        places = slice(0, len(part.peak)) if bank.groups == 1 else groups
        logits = logits + _taken(tilt.block(places, rows), pick)
    if part.leading is not None and part.correction is not None:
        num = rows.stop - rows.start
        index = _taken(part.leading[places], pick) - rows.start
        inside = (index >= 0) & (index < num)
        change = _taken(part.correction[places], pick).to(logits.dtype)
        logits.scatter_add_(-1, index.clamp(0, num - 1), torch.where(inside, change, torch.zeros_like(change)))
    level = part.peak[places].masked_fill(part.peak[places] == -math.inf, 0.0)
    return _exp(logits.sub_(_taken(level, pick).unsqueeze(-1)))


@dataclass(frozen=True, eq=False)
class Block:
    """p(n, bank | x', theta_s) = terms * factor for the rows of one block and s in `thetas`.

    Where all thetas share a bank, one group of terms (g = 1) serves all of them.
    """

    bank: Bank
    groups: slice
    thetas: slice
    rows: slice
    terms: Tensor  # (g, B, n)
    factor: Tensor  # (s, B) float64


def weights(store: Store, query: Query, sums: Sums) -> Iterator[Block]:
    """The posterior of the clean input, block by block; the terms are to be used before the next block."""
    room = Room()
    for bank, part, share in zip(store.banks, sums.banks, sums.shares, strict=True):
        factor = share / part.total
        for groups, rows in bank.tiles(len(query)):
            thetas = slice(0, store.num_thetas) if bank.groups == 1 else groups
            yield Block(bank, groups, thetas, rows, _terms(bank, part, query, groups, rows, None, None, room), factor[thetas])


class Evidence(torch.autograd.Function):
    """(x flat, ...) -> log evidence and averages, with the recomputing gradient."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, x: Tensor, store: Store, tilt: Tilt | None, values: bool, keep: bool
    ) -> tuple[Tensor, Tensor]:
        query = Query(x.detach(), flat.detach())
        sums = sweep(store, query, tilt=tilt, values=values, keep=keep and ctx.needs_input_grad[0])
        ctx.query, ctx.sums, ctx.store, ctx.tilt, ctx.values = query, sums, store, tilt, values
        return sums.log_evidence.clone(), sums.averages.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_evidence: Tensor, of_averages: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None, None
        slope = of_averages if ctx.values else None
        gradient = pull_back(ctx.store, ctx.query, ctx.sums, of_evidence, slope, ctx.tilt)
        return gradient, None, None, None, None, None

"""One pass over all reference points: evidence and weighted averages for a block of queries, and
their gradient.

    L_s(b) = sum_k sum_n w_k N(x'_b; c_skn, scale^2),   A_s(b) = sum_n p(n | x'_b, theta_s) v_sn
    d log L_s = sum_n p(n) d log p_n,   dA_s = sum_n p(n) (v_sn - A_s) d log p_n

Blocks of N: a matrix product, then a streaming log-sum-exp. Nothing of size N x B outlives its
block, unless a gradient is wanted and all of it takes no more than a fixed allowance; the backward
pass computes larger ones again, block by block.

The products may be float32. The weights then have a relative error, and everything that could
cancel is float64: values, averages, and the leading terms of each query, whose log-densities and
gradients are computed from the differences x' - centre. Where one reference point has all the
weight but 1e-9, the gradient still is that of the 1e-9.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from advbayes.purification.banks import Bank, JointBank, Query, Room, Tile
from advbayes.purification.store import Store

# exp is many times slower where it underflows
_LEAST = {torch.float32: -87.0, torch.float64: -700.0}
_LEADING = 8  # terms of each theta and query that are computed from differences
KEPT = 1 << 25  # terms of one prediction kept for the backward pass: 128 MB of float32


class Leading(NamedTuple):
    """The likeliest reference points of each theta and query."""

    logits: Tensor  # (G, B, k) float64
    rows: Tensor  # (G, B, k)
    values: Tensor  # (G, B, k, W + 1) float64, the last one 1

    def pick(self, places: Tensor) -> Leading:  # (G, B, j)
        groups, batch, num, width = self.values.shape
        first = torch.arange(groups * batch, device=places.device).view(groups, batch, 1) * num
        values = self.values.reshape(-1, width).index_select(0, (first + places).flatten())
        return Leading(
            self.logits.gather(-1, places),
            self.rows.gather(-1, places),
            values.view(*places.shape, width),
        )


@dataclass(frozen=True, eq=False)
class BankSums:
    """A bank's share: relative to `peak` (the largest logit), without the bank's offset."""

    bank: Bank
    peak: Tensor  # (G, B), minus infinity where the bank excludes a query
    rest: Tensor  # (G, B, W + 1) float64: sum exp(logits - peak) v, and of 1, but for the leading
    offset: Tensor  # (B,) float64
    tile_peaks: list[Tensor]  # (g, B) each
    leading: Leading
    # of each block, for the backward pass: exp(logits - level), (g, B, n), and the level, (g, B),
    # the largest logit so far
    kept: list[tuple[Tensor, Tensor]]

    @cached_property
    def sums(self) -> Tensor:  # (G, B, W + 1) float64: with the leading terms
        return self.rest + torch.einsum("gbk,gbkw->gbw", self.leading_terms, self.leading.values)

    @property
    def level(self) -> Tensor:  # (G, B)
        return self.peak.masked_fill(self.peak == -math.inf, 0.0)

    @property
    def total(self) -> Tensor:  # (G, B)
        return self.sums[..., -1]

    @property
    def leading_terms(self) -> Tensor:  # (G, B, k) float64
        return _exp(self.leading.logits - self.level.unsqueeze(-1))

    @property
    def log_total(self) -> Tensor:  # (G, B) float64: the evidence without the offset
        return self.peak.double() + self.total.log()


@dataclass(frozen=True, eq=False)
class Sums:
    """The evidence of each theta and the weighted averages of the values."""

    log_evidence: Tensor  # (S, B) float64: log sum_n p(x' | x_n, theta_s)
    averages: Tensor  # (S, B, V) float64
    banks: list[BankSums]
    shares: list[Tensor]  # (S, B) float64 for each bank: p(bank | x', theta_s)


def _exp(logits: Tensor) -> Tensor:
    """exp in place, clamped where it is nothing."""
    return logits.clamp_(min=_LEAST[logits.dtype]).exp_()


def _without_clamped(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `_exp` clamped, in place: such a term does not move."""
    return functional.threshold(terms, 1.0001 * math.exp(_LEAST[dtype]), 0.0, inplace=True)


def _value_dtype(store: Store, query: Query) -> torch.dtype:
    """Of the products with values: the small variance of large means would cancel in float32."""
    return torch.float64 if store.num_outputs else query.dtype


def _values(store: Store, bank: Bank, groups: slice, rows: slice, wanted: bool) -> Tensor:
    """Values and a 1, float64: (1, n, S * V + 1) when all thetas share the weights, else (g, n, V +
    1)."""
    if not wanted:
        return store.origin.new_ones(groups.stop - groups.start, rows.stop - rows.start, 1)
    values = store.value_block(rows)  # (n, S, V)
    shared = bank.groups == 1
    right = values.flatten(1).unsqueeze(0) if shared else values[:, groups].transpose(0, 1)
    return functional.pad(right, (0, 1), value=1.0)


def _exact(bank: Bank, query: Query, rows: Tensor, offset: Tensor) -> Tensor:  # (G, B, k)
    """The logits of a few reference points of each theta, from differences."""
    each = [bank.exact_at(query, group, index) for group, index in enumerate(rows)]
    return torch.stack(each) - offset.unsqueeze(1)


def _sweep_bank(store: Store, bank: Bank, query: Query, values: bool, keep: bool) -> BankSums:
    batch, per_group = len(query), store.num_thetas if bank.groups == 1 else 1
    width = 1 + (store.width * per_group if values else 0)
    peak = query.around.new_full((bank.groups, batch), -math.inf)
    sums = query.points.new_zeros((bank.groups, batch, width))
    leading: dict[int, Leading] = {}  # by the first group
    kept: list[tuple[Tensor, Tensor]] = []
    peaks: list[Tensor] = []
    room, narrow = Room(), _value_dtype(store, query)
    for groups, rows in bank.tiles(batch):
        logits = bank.logits(query, groups, rows, Room() if keep else room)
        top, index = logits.topk(min(_LEADING, logits.shape[-1]), dim=-1, sorted=False)
        highest = top.amax(-1)
        peaks.append(highest)
        before, after = peak[groups], torch.maximum(peak[groups], highest)
        level = after.masked_fill(after == -math.inf, 0.0)
        # Where nothing was possible so far, `before` counts for nothing once something is.
        fade = torch.where(after == before, torch.zeros_like(after), before - level).double().exp()
        terms = _exp(logits.sub_(level.unsqueeze(-1)))
        if bank.has_centres:  # of which none is impossible
            terms = _without_clamped(terms, terms.dtype)
        if keep:
            kept.append((terms, level))
        right = _values(store, bank, groups, rows, values)
        largest = terms.gather(-1, index)
        rest = torch.matmul(terms.scatter_(-1, index, 0.0).to(narrow), right.to(narrow))
        terms.scatter_(-1, index, largest)
        theirs = torch.stack([table[at] for table, at in zip(right, index, strict=True)])
        fresh = Leading(top.double(), index + rows.start, theirs)
        earlier = leading.get(groups.start)
        both = fresh if earlier is None else _joined(earlier, fresh, dim=2)
        order = both.logits.topk(min(_LEADING, both.logits.shape[-1]), dim=-1)[1]
        leading[groups.start] = both.pick(order)
        lesser = _exp(both.logits - level.unsqueeze(-1)).scatter_(-1, order, 0.0)
        rest = rest + torch.einsum("gbk,gbkw->gbw", lesser, both.values)
        sums[groups] = sums[groups] * fade.unsqueeze(-1) + rest
        peak[groups] = after
    lead = _joined(*leading.values(), dim=0)
    offset = bank.offset(query)
    if bank.has_centres and query.dtype != torch.float64:
        lead = lead._replace(logits=_exact(bank, query, lead.rows, offset))
    return BankSums(bank, peak, sums, offset, peaks, lead, kept)


def _nearest_bank(
    store: Store, bank: Bank, query: Query, values: bool, nearest: Tensor
) -> BankSums:
    """The sums over the nearest centres alone, which all count as leading."""
    offset, nearest = bank.offset(query), nearest.expand(bank.groups, -1, -1)
    rows = nearest.clamp_min(0)
    logits = _exact(bank, query, rows, offset).masked_fill(nearest < 0, -math.inf)
    right = query.points.new_zeros(*rows.shape, 0)
    if values:
        thetas = (store.thetas_of(bank, slice(g, g + 1)) for g in range(bank.groups))
        each = [store.value_at(*pair).flatten(2) for pair in zip(rows, thetas, strict=True)]
        right = torch.stack(each)
    lead = Leading(logits, rows, functional.pad(right, (0, 1), value=1.0))
    rest = torch.zeros_like(lead.values[:, :, 0])
    return BankSums(bank, logits.amax(-1), rest, offset, [], lead, [])


def _joined(*parts: Leading, dim: int) -> Leading:
    return Leading(*(torch.cat(tensors, dim) for tensors in zip(*parts, strict=True)))


def _banks(store: Store, query: Query) -> tuple[Bank, ...]:
    return tuple(bank if query.y is None else JointBank(bank, store) for bank in store.banks)


def sweep(store: Store, query: Query, *, values: bool = True, keep: bool = False) -> Sums:
    """All banks, added up, jointly with the outputs that the query comes with; `keep` holds on to
    what `vjp` would compute again."""
    banks = _banks(store, query)
    if query.nearest is None:
        parts = [_sweep_bank(store, bank, query, values, keep) for bank in banks]
    else:
        pairs = zip(banks, query.nearest, strict=True)
        parts = [_nearest_bank(store, bank, query, values, nearest) for bank, nearest in pairs]
    num_thetas, batch = store.num_thetas, len(query)
    # Offsets may be so large that float64 leaves little beside them: only their differences count
    # here.
    offset = parts[0].offset
    each = torch.stack(
        [(part.log_total + (part.offset - offset)).expand(num_thetas, batch) for part in parts]
    )
    log_total = torch.logsumexp(each, 0)
    possible = log_total > -math.inf
    shares = list(torch.where(possible, each, torch.zeros_like(each)).softmax(0))
    averages = query.points.new_zeros((num_thetas, batch, store.width if values else 0))
    if values:
        for part, share in zip(parts, shares, strict=True):
            mean = part.sums[..., :-1] / part.sums[..., -1:]
            if len(mean) == 1 and num_thetas > 1:
                mean = mean[0].view(batch, num_thetas, -1).transpose(0, 1)
            averages = averages + share.unsqueeze(-1) * mean
    if store.ranks.size > 1:
        log_total, averages, of_rank = _over_ranks(store, log_total, averages)
        shares = [share * of_rank for share in shares]
    return Sums(log_total + offset, averages, parts, shares)


def _over_ranks(
    store: Store,
    log_total: Tensor,  # (S, B) float64
    averages: Tensor,  # (S, B, V) float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Evidence and averages over the reference points of all ranks, and this rank's share of the
    evidence: the offset is the same for all."""
    top = store.ranks.max(log_total)
    level = top.masked_fill(top == -math.inf, 0.0)
    # where no rank explains a query, its reference points count alike
    part = (log_total - level).exp().masked_fill(top == -math.inf, store.num_reference)
    sums = store.ranks.sum(functional.pad(averages, (0, 1), value=1.0) * part.unsqueeze(-1))
    total = sums[..., -1]
    log_total = torch.where(top == -math.inf, top, level + total.log())
    return log_total, sums[..., :-1] / total.unsqueeze(-1), part / total


def vjp(
    store: Store,
    query: Query,
    sums: Sums,
    of_evidence: Tensor,  # (S, B) float64: d / d log_evidence
    of_averages: Tensor | None,  # (S, B, V) float64: d / d averages
) -> Tensor:  # (B, d) float64
    """sum_s of_evidence_s d log L_s + of_averages_s . dA_s, block by block."""
    constant = of_evidence
    if of_averages is not None:
        constant = constant - (of_averages * sums.averages).sum(-1)
    gradient = torch.zeros_like(query.points)
    rooms, narrow = (Room(), Room()), _value_dtype(store, query)
    for part, share in zip(sums.banks, sums.shares, strict=True):
        bank = part.bank
        scale = share / part.total  # (S, B): exp(logits - peak) -> p(n | x', theta)
        scale = torch.where(sums.log_evidence > -math.inf, scale, torch.zeros_like(scale))
        slope = (constant * scale).unsqueeze(-1)  # (S, B, 1)
        if of_averages is not None:
            slope = torch.cat([of_averages * scale.unsqueeze(-1), slope], -1)  # (S, B, V + 1)
        if bank.groups == 1 and store.num_thetas > 1:
            lift = slope[..., -1:].sum(0)
            slope = torch.cat([slope[..., :-1].transpose(0, 1).flatten(1), lift], -1).unsqueeze(0)
        if bank.has_centres:
            lead = part.leading
            ahead = _without_clamped(part.leading_terms, torch.float64)
            ahead = ahead * torch.einsum("gbw,gbkw->gbk", slope, lead.values)
            for group, (index, each) in enumerate(zip(lead.rows, ahead, strict=True)):
                gradient += bank.gradient_at(query, group, index, each)
        for number, (groups, rows) in enumerate(bank.tiles(len(query)) if part.tile_peaks else ()):
            near = part.tile_peaks[number] - part.level[groups] > _LEAST[query.dtype]
            live = torch.nonzero(near.any(0)).squeeze(1)  # for the others the block is nothing
            if not len(live):
                continue
            pick = slice(None) if len(live) == len(query) else live
            terms = _terms(part, query, number, (groups, rows), pick, rooms, narrow)
            if bank.has_centres:
                _set_leading(terms, part, groups, rows, pick, None)
            right = _values(store, bank, groups, rows, of_averages is not None)
            terms *= torch.matmul(slope[groups][:, pick].to(narrow), right.mT.to(narrow))
            gradient[pick] += bank.gradient(query.take(pick), groups, rows, terms)
    return gradient


def _terms(
    part: BankSums,
    query: Query,
    number: int,
    tile: Tile,
    pick: Tensor | slice,
    rooms: tuple[Room, Room],
    dtype: torch.dtype,
) -> Tensor:  # (g, b, n)
    """exp(logits - peak) of one block for the queries in `pick`, kept or computed again."""
    groups, rows = tile
    level = part.level[groups][:, pick].unsqueeze(-1)
    if part.kept:
        terms, before = (tensor[:, pick] for tensor in part.kept[number])
        # Above 0 only where nothing was possible yet.
        fade = (before.unsqueeze(-1) - level).clamp_max(0.0).double().exp()
    else:
        logits = part.bank.logits(query.take(pick), groups, rows, rooms[0])
        terms, fade = _exp(logits.sub_(level)), None
    out = _without_clamped(rooms[1].of(terms, dtype, *terms.shape).copy_(terms), terms.dtype)
    return out if fade is None else out.mul_(fade)


def _set_leading(
    terms: Tensor,  # (g, b, n), changed in place
    part: BankSums,
    groups: slice,
    rows: slice,
    pick: Tensor | slice,
    leading: Tensor | None,  # (G, B, k), None: 0
) -> None:
    """Puts the leading terms in their places, as far as the block has them."""
    num = rows.stop - rows.start
    index = part.leading.rows[groups][:, pick] - rows.start
    inside, index = (index >= 0) & (index < num), index.clamp(0, num - 1)
    change = -terms.gather(-1, index)
    if leading is not None:
        change += leading[groups][:, pick]
    terms.scatter_add_(-1, index, torch.where(inside, change, torch.zeros_like(change)))


@dataclass(frozen=True, eq=False)
class Block:
    """p(theta_s, n, bank | x') = terms * factor for the rows of one block and s in `thetas`.

    Where all thetas share a bank, one group of terms (g = 1) serves all of them.
    """

    bank: int  # its place among the store's
    groups: slice
    thetas: slice
    rows: slice
    terms: Tensor  # (g, B, n) float64
    factor: Tensor  # (s, B) float64

    @property
    def group_factor(self) -> Tensor:  # (g, B): summed over the thetas that share the terms
        return self.factor.sum(0, keepdim=True) if len(self.terms) == 1 else self.factor


def weights(
    store: Store,
    query: Query,
    sums: Sums,
    shares: Tensor,  # (S, B) float64: of the thetas
) -> Iterator[Block]:
    """The posterior of the clean input, block by block; use the terms before the next block."""
    rooms = Room(), Room()
    for k, (part, share) in enumerate(zip(sums.banks, sums.shares, strict=True)):
        bank, factor, leading = part.bank, share / part.total * shares, part.leading_terms
        for number, tile in enumerate(bank.tiles(len(query))):
            groups, rows = tile
            if query.nearest is None:
                terms = _terms(part, query, number, tile, slice(None), rooms, torch.float64)
            else:  # all that there is are the leading ones
                shape = groups.stop - groups.start, len(query), rows.stop - rows.start
                terms = rooms[1].of(part.sums, torch.float64, *shape).zero_()
            _set_leading(terms, part, groups, rows, slice(None), leading)
            if not bank.has_centres:  # all count alike where all exclude a query
                excluded = (part.peak[groups] == -math.inf).unsqueeze(-1)
                terms.masked_fill_(excluded, math.exp(_LEAST[torch.float64]))
            thetas = store.thetas_of(bank, groups)
            yield Block(k, groups, thetas, rows, terms, factor[thetas])


class Evidence(torch.autograd.Function):
    """(x flat, ...) -> log evidence and averages, with the recomputing gradient. `num` queries
    share the graph, and what is kept for it."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, query: Query, store: Store, values: bool, num: int
    ) -> tuple[Tensor, Tensor]:
        terms = num * store.num_reference * sum(bank.groups for bank in _banks(store, query))
        keep = ctx.needs_input_grad[0] and terms <= KEPT
        sums = sweep(store, query, values=values, keep=keep)
        ctx.query, ctx.sums, ctx.store, ctx.values = query, sums, store, values
        return sums.log_evidence.clone(), sums.averages.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_evidence: Tensor, of_averages: Tensor) -> tuple[Tensor | None, ...]:
        slope = of_averages if ctx.values else None
        gradient = vjp(ctx.store, ctx.query, ctx.sums, of_evidence, slope)
        return ctx.store.ranks.sum(gradient), None, None, None, None

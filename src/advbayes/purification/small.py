"""Few reference points: everything at once, in float64, by plain autograd; no blocks, no
corrections, a dozen kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from advbayes.purification.rows import MemoryRows
from advbayes.purification.store import Store

_BIT = math.log(2.0)
# bits: exp2 is many times slower where it underflows
_LEAST = {torch.float32: -125.0, torch.float64: -1000.0}
_WEIGHTS = 1 << 18  # numbers in the weights of one block of queries


@dataclass(frozen=True, eq=False)
class Small:
    """A store that is small enough.

    The log2-densities of all M = K N centres of the K banks are one product, (x', 1, |x'|^2).slope
    - gain / 2 |x'|^2; in bits, for exp2 takes half the time of exp. The value tables have a row of
    ones at the end, so that one product gives numerators and totals. They are left factors: a
    product with a handful of columns is several times slower than its transpose.
    """

    slope: Tensor  # (d + 2, G * M), theta after theta; G = 1 where all thetas share all centres
    gain: float  # 1 / scale^2, in nats, of the widest bank
    # by the dtype of the weights: (S, V + 1, M), and (V + 1, G * M), averaged over the thetas where
    # they share the centres
    tables: dict[torch.dtype, tuple[Tensor, Tensor]]
    origin: Tensor  # (d,) float64
    dtype: torch.dtype  # of the data
    is_regression: bool

    @classmethod
    def of(cls, store: Store) -> Small | None:
        """None where the store is too large for it, on disk, or not of plain Gaussians."""
        if not store.is_small or not store.gaussians:
            return None
        groups = max(bank.groups for bank in store.gaussians)
        gain, slopes = min(1.0 / bank.sigma**2 for bank in store.gaussians), []
        for bank in store.gaussians:
            if bank.scales is not None or not isinstance(bank.centres, MemoryRows):
                return None
            centres = bank.centres.data.double() - store.origin  # (1 or G, N, d)
            precision = 1.0 / bank.sigma**2
            bias = bank.log_peak - 0.5 * precision * centres.square().sum(-1, keepdim=True)
            if bank.log_weights is not None:
                bias = bias + bank.log_weights.unsqueeze(-1)
            square = torch.full_like(bias, 0.5 * (gain - precision))
            slope = torch.cat([precision * centres, bias, square], -1) / _BIT
            slopes.append(slope.expand(groups, -1, -1))
        slope = torch.cat(slopes, 1).flatten(0, 1).T.contiguous()
        values = functional.pad(
            store.value_block(slice(0, store.num_reference)), (0, 1), value=1.0
        ).permute(1, 2, 0)  # (S, V + 1, N)
        values = values.repeat(1, 1, len(slopes))
        joint = values.mean(0) if groups == 1 else values.transpose(0, 1).flatten(1)
        joint = joint.contiguous()
        dtypes = torch.float64, store.dtype  # of weights with a gradient, and without
        tables = {dtype: (values.to(dtype), joint.to(dtype)) for dtype in dtypes}
        kind = store.dtype, bool(store.num_outputs)
        return cls(slope, gain, tables, store.origin, *kind)

    def fits(self, batch: int) -> bool:
        return batch * self.slope.shape[1] <= _WEIGHTS

    def _wide(self, terms: Tensor) -> Tensor:
        """The terms as the values want them: the small variance of large means would cancel in
        float32."""
        return terms.double() if self.is_regression else terms

    def _logits(self, flat: Tensor) -> tuple[Tensor, Tensor]:  # (B, d) -> (B, G * M), (B, 1)
        """In bits, without the last term; and |x'|^2 around the origin."""
        around = flat - self.origin
        square = around.square().sum(1, keepdim=True)
        return torch.mm(torch.cat([around, torch.ones_like(square), square], 1), self.slope), square

    def evidence(self, flat: Tensor, log_y: Tensor | None, values: bool) -> tuple[Tensor, Tensor]:
        """(B, d) -> log evidence (S, B) and averages (S, B, V), as the sweep gives them; jointly
        with log p(y | x_n, theta_s), (S, B, N), if there is a y."""
        logits, square = self._logits(flat)
        num_thetas, _, num = self.tables[self.dtype][0].shape
        logits = logits.view(len(flat), -1, num)
        if log_y is not None:
            each = log_y.transpose(0, 1).repeat(1, 1, num // log_y.shape[-1])
            logits = torch.add(logits, each, alpha=1.0 / _BIT)
        peak, terms = _terms(logits, self.dtype)
        right = terms.permute(1, 2, 0)  # (G, M, B)
        if values:
            right = self._wide(right)
            table, _ = self.tables[right.dtype]
            if len(right) == 1:
                sums = torch.mm(table.flatten(0, 1), right[0]).view(num_thetas, -1, len(flat))
            else:
                sums = torch.bmm(table, right)
            sums = sums.double()  # (S, V + 1, B)
            total = sums[:, -1]
            averages = (sums[:, :-1] / total.unsqueeze(1)).transpose(1, 2)
        else:
            total = right.sum(1, dtype=torch.float64)
            averages = square.new_zeros((num_thetas, len(flat), 0))
        log_evidence = torch.add(total.log(), peak.squeeze(-1).T, alpha=_BIT)  # (G or S, B)
        log_evidence = torch.sub(log_evidence, square.T, alpha=0.5 * self.gain)
        return log_evidence.expand(num_thetas, -1), averages

    def averages(self, flat: Tensor, online: bool) -> Tensor:  # (B, d) -> (V, B)
        """The values averaged over reference points and thetas, without the evidence.

        Online each pair is weighed by p(x' | x_n, theta_s) alone, so that all thetas are one long
        sum; offline each theta has a sum of its own.
        """
        logits, num = self._logits(flat)[0], self.tables[self.dtype][0].shape[-1]
        if online or logits.shape[1] == num:
            terms = self._wide(_terms(logits, self.dtype)[1])
            sums = torch.mm(self.tables[terms.dtype][1], terms.T)
            return sums[:-1] / sums[-1]
        terms = self._wide(_terms(logits.view(len(flat), -1, num), self.dtype)[1])
        sums = torch.bmm(self.tables[terms.dtype][0], terms.permute(1, 2, 0))  # (S, V + 1, B)
        return (sums[:, :-1] / sums[:, -1:]).mean(0)


def _terms(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest of the last axis, and 2 ** (logits - largest); in place without gradients."""
    peak = logits.detach().amax(-1, keepdim=True)
    if logits.requires_grad:
        return peak, (logits - peak).clamp_min(_LEAST[logits.dtype]).exp2()
    # A gradient needs float64 where the weights saturate; an answer does not once the peak is taken
    # off.
    return peak, logits.sub_(peak).to(dtype).clamp_min_(_LEAST[dtype]).exp2_()

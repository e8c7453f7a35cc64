"""Few reference points: everything at once, in float64, by plain autograd; no blocks, no corrections, a dozen kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from advbayes.purification.banks import GaussianBank
from advbayes.purification.rows import MemoryRows
from advbayes.purification.store import Store
from advbayes.purification.sweep import Tilt

_TABLE = 1 << 19  # numbers in the centres of all banks
_LEAST = -80.0
_WEIGHTS = 1 << 18  # numbers in the weights of one block of queries


@dataclass(frozen=True, eq=False)
class SmallBank:
    """One bank in float64, its log-density written as gain * x'.c + bias - gain / 2 |x'|^2."""

    transposed: Tensor  # (G, d, N)
    bias: Tensor  # (G, 1, N)
    gain: float


@dataclass(frozen=True, eq=False)
class Small:
    """A store that is small enough."""

    banks: tuple[SmallBank, ...]
    shared_values: Tensor  # (N, S * V)
    values: Tensor  # (S, N, V)
    num_weights: int  # of one query

    @classmethod
    def of(cls, store: Store) -> Small | None:
        """None where the store is too large for it, on disk, or not of plain Gaussians."""
        banks, size = [], 0
        for bank in store.banks:
            if (
                not isinstance(bank, GaussianBank)
                or not isinstance(bank.scale, float)
                or not isinstance(bank.centres, MemoryRows)
            ):
                return None
            size += math.prod(bank.centres.shape)
            if size > _TABLE:
                return None
            centres, scale = bank.centres.data.double(), bank.scale * bank.factor
            width = centres.shape[-1]
            constant = bank.log_weight - width * (math.log(scale) + 0.5 * math.log(2.0 * math.pi))
            bias = constant - 0.5 / scale**2 * centres.square().sum(-1)
            banks.append(SmallBank(centres.transpose(1, 2).contiguous(), bias.unsqueeze(1), 1.0 / scale**2))
        values = store.value_block(slice(0, store.num_reference)).double()  # (N, S, V)
        weights = store.num_reference * sum(bank.transposed.shape[0] for bank in banks)
        return cls(tuple(banks), values.flatten(1), values.transpose(0, 1).contiguous(), weights)

    def fits(self, batch: int) -> bool:
        return batch * self.num_weights <= _WEIGHTS

    def evidence(self, flat: Tensor, tilt: Tilt | None, values: bool) -> tuple[Tensor, Tensor]:
        """(B, d) -> log evidence (S, B) and averages (S, B, V), as the sweep gives them."""
        points = flat.double()
        square = points.square().sum(1)  # (B,)
        num_thetas, num = self.values.shape[:2]
        alone = len(self.banks) == 1
        logits: Tensor | None = None
        for bank in self.banks:
            left = points.expand(len(bank.transposed), -1, -1)
            here = torch.baddbmm(bank.bias, left, bank.transposed, alpha=bank.gain)  # (G, B, N)
            if not alone:
                here = torch.add(here, square.unsqueeze(1), alpha=-0.5 * bank.gain)
            logits = here if logits is None else torch.logaddexp(logits, here)
        assert logits is not None
        if tilt is not None:
            logits = logits + tilt.block(slice(0, num_thetas), slice(0, num)).double()
        peak = logits.detach().amax(-1, keepdim=True)
        # A gradient needs float64 where the weights saturate; an answer does not once the peak is taken off.
        dtype = torch.float64 if logits.requires_grad else flat.dtype
        terms = (logits - peak).to(dtype).clamp_min(_LEAST).exp()
        total = terms.sum(-1, keepdim=True)
        log_evidence = (total.double().log() + peak).squeeze(-1)  # (G, B)
        if alone:
            log_evidence = log_evidence - (0.5 * self.banks[0].gain) * square
        batch, shared = len(flat), len(log_evidence) == 1
        averages = flat.new_zeros((num_thetas, batch, 0), dtype=torch.float64)
        if values:
            if shared:
                mean = torch.mm(terms[0], self.shared_values.to(dtype)).div_(total[0])
                averages = mean.view(batch, num_thetas, -1).transpose(0, 1).double()
            else:
                averages = torch.bmm(terms, self.values.to(dtype)).div_(total).double()
        return log_evidence.expand(num_thetas, batch) if shared else log_evidence, averages

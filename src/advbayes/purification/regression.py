"""The purified predictive of a regression, S x N Gaussians that are never in memory at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from advbayes import checks
from advbayes.likelihoods import LOG_TWO_PI, GaussianPredictive, targets_like
from advbayes.purification.banks import Query
from advbayes.purification.rows import spans
from advbayes.purification.sweep import Block, Sums, sweep, weights
from advbayes.seeds import normal_like

if TYPE_CHECKING:
    from advbayes.purification.purifier import Purifier

_LEVELS = 150  # turns at most: fifty halvings; Newton's steps need about ten


class PurifiedMixture(GaussianPredictive):
    """sum_sn w_sn(x') N(y; mean_sn, scale_sn^2): moments at once, the rest by further passes.

    `mean`, `variance`, `entropy()` (of the moment-matched Gaussian, an upper bound) and `log_prob`
    are differentiable in x'. `cdf` and `icdf` are for one output. Obtained by calling a `Purifier`.
    """

    def __init__(self, purifier: Purifier, x: Tensor) -> None:
        if not len(x):
            raise checks.InputError("x must hold at least one input, got none")
        self._purifier, self._x = purifier, x
        # the passes share their graph in float64, where their gradients may cancel
        self._queries = purifier.queries(x)
        blocks = [purifier.averages(query, len(x)) for query in self._queries]
        # (S, b) of each block of queries, where the moments did not do without
        self._evidence = [log_evidence for _, log_evidence in blocks]
        averages = self._queries.join([part for part, _ in blocks], 1)  # (3 D, B)
        # (B,) each for one output, (B, D) for more
        mean, noise, square = averages.unbind() if len(averages) == 3 else averages.T.chunk(3, -1)
        spread = torch.addcmul(square, mean, mean, value=-1.0).clamp_min(0.0)
        self._mean = (mean + purifier.store.middle).to(x.dtype)
        self._variance = (noise + spread).to(x.dtype)
        self._cached: dict[int, Sums] = {}
        super().__init__(x.shape[:1], self._mean.shape[1:], validate_args=False)

    def _log_evidence(self, number: int, query: Query) -> Tensor:  # (S, b)
        log_evidence = self._evidence[number]
        # What was computed without a gradient does not serve where one is wanted.
        if log_evidence is None or (
            query.flat.requires_grad and torch.is_grad_enabled() and not log_evidence.requires_grad
        ):
            log_evidence, _ = self._purifier.evidence(query, len(self._x), values=False)
            self._evidence[number] = log_evidence
        return log_evidence

    @property
    def mean(self) -> Tensor:
        return self._mean

    @property
    def variance(self) -> Tensor:
        """E[scale^2] + Var[mean]."""
        return self._variance

    def _columns(self, value: Tensor) -> Tensor:  # (B, D)
        return targets_like(self._mean, value).reshape(len(self._x), -1)

    def log_prob(self, value: Tensor) -> Tensor:
        y = self._columns(value).double() - self._purifier.store.middle
        parts = []
        for number, (rows, query) in enumerate(self._queries.blocks):
            both = replace(query, y=y[rows])
            joint, _ = self._purifier.evidence(both, len(self._x), values=False)
            evidence = self._log_evidence(number, query)
            shares = self._purifier.log_shares(evidence)
            lost = evidence == -math.inf
            if bool(lost.any()):  # thetas that exclude x' know nothing of it: their plain average
                joint = torch.where(lost, self._blind(y[rows]), joint)
                evidence = evidence.masked_fill(lost, 0.0)
            parts.append(torch.logsumexp(shares + joint - evidence, 0))
        return self._queries.join(parts).to(self._x.dtype)

    def _blind(self, y: Tensor) -> Tensor:  # (b, D) -> (S, b)
        """log mean_n p(y | x_n, theta_s)."""
        store = self._purifier.store
        thetas = slice(0, store.num_thetas)
        parts = [
            store.log_outputs(y, thetas, rows).logsumexp(-1)
            for rows in spans(store.num_reference, 1000)
        ]
        return store.ranks.logsumexp(torch.stack(parts).logsumexp(0)) - math.log(store.num_whole)

    # --- passes that need every component --------------------------------------------------------

    def _blocks(self, number: int, query: Query) -> Iterator[Block]:
        """The components and their weights, block by block."""
        store = self._purifier.store
        if number not in self._cached:
            self._cached[number] = sweep(store, query, values=False)
        sums = self._cached[number]
        return weights(store, query, sums, self._purifier.log_shares(sums.log_evidence).exp())

    def _below(self, y: Tensor) -> tuple[Tensor, Tensor]:  # (B,) -> (B,), (B,)
        """P(Y <= y), and the density there."""
        store = self._purifier.store
        out = self._x.new_zeros(2, len(self._x), dtype=torch.float64)
        with torch.no_grad():
            for number, (rows, query) in enumerate(self._queries.blocks):
                for block in self._blocks(number, query):
                    values = store.value_block(block.rows)[:, block.thetas].transpose(0, 1)
                    means, scales, _ = values.unsqueeze(1).unbind(-1)  # (s, 1, n)
                    scales = scales.sqrt()
                    z = (y[rows, None] - (means + store.middle)) / scales
                    density = (-0.5 * z.square() - 0.5 * LOG_TWO_PI).exp() / scales
                    for k, each in enumerate((torch.special.ndtr(z), density)):
                        mass = (block.terms * each).sum(-1)  # (s, b)
                        out[k, rows] += (mass * block.factor).sum(0)
        below, density = store.ranks.sum(out)
        return below, density

    def _one_output(self, name: str) -> None:
        num = self._purifier.store.num_outputs
        if num > 1:
            raise checks.InputError(f"{name} is defined for one output, got {num}")

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value) for one output."""
        self._one_output("cdf")
        each = torch.as_tensor(value, dtype=torch.float64).expand(len(self._x))
        below, _ = self._below(self._columns(each).squeeze(-1))
        return below.clamp(0.0, 1.0).to(self._x.dtype)

    def icdf(self, value: Tensor) -> Tensor:
        """Quantiles for one output: Newton's steps, halved where they leave Cantelli's bracket."""
        self._one_output("icdf")
        level = torch.as_tensor(value, dtype=torch.float64, device=self._x.device).expand(
            len(self._x)
        )
        if bool(((level <= 0) | (level >= 1)).any()):
            raise checks.InputError("value must lie strictly between 0 and 1", got=value)
        mean, spread = self._mean.detach().double(), self._variance.detach().double().sqrt()
        low = mean - spread * ((1 - level) / level).sqrt() * (1 + 1e-6)
        high = mean + spread * (level / (1 - level)).sqrt() * (1 + 1e-6)
        tolerance = 4 * torch.finfo(self._x.dtype).eps * (spread + mean.abs())
        at = 0.5 * (low + high)
        done = torch.zeros_like(level, dtype=torch.bool)
        for turn in range(_LEVELS):
            below, density = self._below(at)
            high = torch.where(below >= level, at, high)
            low = torch.where(below >= level, low, at)
            step = at - (below - level) / density.clamp_min(1e-300)
            settled = done | ((step - at).abs() <= tolerance) | (high - low <= tolerance)
            # Every third turn halves, whatever Newton says: between two modes it may wander.
            good = (step >= low) & (step <= high) & (turn % 3 != 2)
            at = torch.where(settled, at, torch.where(good, step, 0.5 * (low + high)))
            done = settled
            if bool(done.all()):
                break
        return at.to(self._x.dtype)

    def sample(self, sample_shape: Any = (), *, generator: torch.Generator | None = None) -> Tensor:
        if self._purifier.store.ranks.size > 1:
            raise checks.InputError("sample needs the reference in one process, got a sharded one")
        shape = torch.Size(sample_shape)
        num = max(1, math.prod(shape))
        with torch.no_grad():
            parts = [
                self._draw(number, query, num, generator)
                for number, query in enumerate(self._queries)
            ]
            mean, variance, _ = self._queries.join(parts, 1).chunk(3, -1)  # (num, B, D)
            noise = normal_like(self._x, generator, mean.shape)
            drawn = (mean + self._purifier.store.middle + variance.sqrt() * noise).to(self._x.dtype)
        return drawn.reshape(shape + self.batch_shape + self.event_shape)

    def _draw(
        self, number: int, query: Query, num: int, generator: torch.Generator | None
    ) -> Tensor:  # (num, b, 3 D)
        """Values of `num` components of each query: first their block, then the row in it."""
        store = self._purifier.store
        masses, owners = [], []  # of each (theta, block)
        for block in self._blocks(number, query):
            masses.append(block.terms.sum(-1) * block.factor)  # (s, b)
            owners += list(range(store.num_thetas))[block.thetas]
        # (b, num)
        chosen = torch.multinomial(torch.cat(masses).T, num, replacement=True, generator=generator)
        within = torch.rand(
            chosen.shape, generator=generator, dtype=torch.float64, device=chosen.device
        )
        index, first = torch.zeros_like(chosen), 0
        for mass, block in zip(masses, self._blocks(number, query), strict=True):
            cumulated = block.terms.cumsum(-1)  # (g, b, n)
            for place in range(len(mass)):
                levels = cumulated[place if len(cumulated) > 1 else 0]  # (b, n)
                row = torch.searchsorted(levels, within * levels[:, -1:], right=True)
                row = row.clamp_max(levels.shape[1] - 1)
                index = torch.where(chosen == first + place, row + block.rows.start, index)
            first += len(mass)
        theta = torch.tensor(owners, device=chosen.device)[chosen]  # (b, num)
        values = store.value_at(index, slice(0, store.num_thetas))  # (b, num, S, 3 D)
        picked = values.gather(
            2, theta[:, :, None, None].expand(-1, -1, 1, values.shape[-1])
        ).squeeze(2)
        return picked.transpose(0, 1)

"""The reactive predictive p(y | x', D), exact over the whole reference set (Eq. 4 and 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution

from advbayes import checks, distributed
from advbayes.distributed import ALONE
from advbayes.model import BayesianModel
from advbayes.posteriors import Posterior, check_over
from advbayes.predictive import PosteriorPredictive
from advbayes.purification import saving
from advbayes.purification.banks import Query
from advbayes.purification.diagnosis import Diagnosis, diagnose, merge
from advbayes.purification.index import NearestIndex
from advbayes.purification.regression import PurifiedMixture
from advbayes.purification.rows import spans
from advbayes.purification.small import Small
from advbayes.purification.store import Builder, Features, Store
from advbayes.purification.sweep import Evidence, Sums, sweep, weights
from advbayes.types import Channel

_QUERIES = 512  # at a time; more are answered one block after the other
# rounding of log-weights that float32 products may have; beyond it they are float64
_TOLERATED = 1e-3
_NARROW, _WIDE, _INDEXED = range(3)  # how a row is answered
_FARTHEST = 1e6  # in radii of the centres; float32 tells no directions apart beyond


class Purifier:
    """The reactive predictive: sum_sn p(y | x_n, theta_s) p(x' | x_n, theta_s), normalised.

    `update="online"` weighs the thetas by their evidence for x' (Eq. 4), `"offline"` keeps them
    equal (Eq. 5). `reference` is the training set, `(x, y)` or x alone (the channel then attacks
    the model's own predictions), or samples of any generative model of x, or such a model itself
    (anything with `sample(n)`, as scikit-learn's mixtures), of which `num_samples` are drawn. All
    that does not depend on x' is computed here, once: in memory up to `memory_limit` bytes, in a
    folder beyond it. `features` compares x' and centres after a map of the user's, differentiable
    in x'. `posterior` is where `with_thetas` draws from.

    `index="faiss"` answers from the `num_nearest` centres of each theta that a FAISS index gives
    (extra `scale`), wherever the share of the evidence that they leave out is proven to be at most
    `left_out`, and from all centres elsewhere; `diagnose(x).left_out` says the bound. For millions
    of reference points.

    `sharded=True` under a process group (torchrun): `reference` is this rank's part of the
    reference set, and all ranks ask the same queries at the same time. Their sums are added up in
    one exchange for each block of queries, so that predictions, gradients and diagnoses are those
    of the whole set, which no rank has to hold.

    The gradient through a prediction is exact, at the memory of one block and at most 128 MB (more
    is computed again, not stored), so every attack on a Predictor is an adaptive attack on this
    one. Inputs farther than a million radii of the data are answered as if they were there;
    `diagnose` flags what is far.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical, MeanField, Noise
    >>> model = BayesianModel(nn.Linear(4, 3), Categorical())
    >>> purified = Purifier(model, Noise(0.5), MeanField(model).sample(5), torch.randn(100, 4))
    >>> purified(torch.ones(2, 4)).probs.shape
    torch.Size([2, 3])
    """

    _redraw: Callable[[int, torch.Generator | None], Purifier] | None

    def __init__(
        self,
        model: BayesianModel,
        channel: Channel,
        thetas: Tensor,  # (S, P)
        reference: Any,
        update: str = "online",
        *,
        num_samples: int = 10_000,
        memory_limit: int = 2 << 30,
        folder: str | Path | None = None,
        features: Features | None = None,
        posterior: Posterior | None = None,
        index: str | None = None,
        num_nearest: int = 64,
        left_out: float = 1e-6,
        sharded: bool = False,
    ) -> None:
        checks.instance("model", model, BayesianModel, "a BayesianModel")
        checks.choice("update", update, ("online", "offline"))
        model._check_theta("thetas", thetas, 2)
        checks.finite("thetas", thetas)
        checks.count("memory_limit", memory_limit)
        if posterior is not None:
            check_over(model, posterior)
        x, y = _reference(reference, checks.count("num_samples", num_samples), model)
        ranks = distributed.ranks() if sharded else ALONE
        if ranks.size > 1 and index is not None:
            raise checks.InputError(f"index must be None for a sharded reference, got {index!r}")
        thetas = ranks.same(thetas)
        place = None if folder is None else Path(folder)
        store = Builder(
            model, channel, thetas.detach(), x, y, features, int(memory_limit), place, ranks
        ).store()
        note = (
            f"Purifier({model}, {channel}, num_thetas={len(thetas)}, "
            f"num_reference={store.num_whole}, update={update!r})"
        )
        nearest = None
        if index is not None:
            checks.choice("index", index, ("faiss",))
            nearest = NearestIndex(store, min(checks.count("num_nearest", num_nearest), len(x)))
            checks.number("left_out", left_out, low=0)
        base = PosteriorPredictive(model, thetas)
        self._set(store, update, features, base, note, nearest, left_out)
        if posterior is not None:
            again = partial(
                Purifier,
                model,
                channel,
                reference=x if y is None else (x, y),
                update=update,
                memory_limit=memory_limit,
                features=features,
                posterior=posterior,
                index=index,
                num_nearest=num_nearest,
                left_out=left_out,
                sharded=sharded,
            )
            self._redraw = lambda num, source: again(thetas=posterior.sample(num, generator=source))

    def _set(
        self,
        store: Store,
        update: str,
        features: Features | None,
        base: PosteriorPredictive | None,
        note: str,
        index: NearestIndex | None = None,
        left_out: float = 0.0,
    ) -> Purifier:
        self.store, self.update, self.features, self.base = store, update, features, base
        self._note, self._redraw, self._index, self._left_out = note, None, index, left_out
        self._reach = max((bank.reach for bank in store.gaussians), default=0.0)
        largest = torch.finfo(store.dtype).max
        for bank in store.gaussians:
            if _FARTHEST * max(self._reach, 1.0) ** 2 > 1e-2 * largest * bank.sigma**2:
                raise checks.InputError(
                    f"sigma must be large enough for {store.dtype} to hold 1/sigma^2, got "
                    f"{bank.sigma:g}"
                )
        self._exact = store.is_small or store.dtype == torch.float64
        self._small = Small.of(store) if store.ranks.size == 1 and index is None else None
        return self

    def __repr__(self) -> str:
        return self._note

    def __call__(self, x: Tensor) -> Distribution:  # (B, *event)
        self._check(x)
        if self.store.num_outputs:
            return PurifiedMixture(self, x)
        if not len(x):
            empty = x.new_zeros(0, self.store.width)
            return CategoricalDistribution(logits=empty, validate_args=False)
        queries, parts = self.queries(x), []
        for query in queries:
            log_evidence, averages = self.evidence(query, len(x))
            each = averages.log() + self.log_shares(log_evidence).unsqueeze(-1)
            # in float32 the gradient of a saturated prediction would be rounding
            parts.append(each.logsumexp(0).log_softmax(-1))  # (B, C) float64
        logits = queries.join(parts).to(x.dtype)
        return CategoricalDistribution(logits=logits, validate_args=False)

    def evidence(self, query: Query, num: int, *, values: bool = True) -> tuple[Tensor, Tensor]:
        """log sum_n p(x' | x_n, theta_s), (S, B), and the weighted averages of the values, (S, B,
        V), in float64; p(x', y | x_n, theta_s) where outputs y come with the query.

        The query is a block of `num` that share a graph and the memory for its backward pass.
        """
        store = self.store
        if self._small is not None and self._small.fits(num):
            whole = slice(0, store.num_thetas), slice(0, store.num_reference)
            log_y = None if query.y is None else store.log_outputs(query.y, *whole)
            return self._small.evidence(query.flat, log_y, values)
        evidence: tuple[Tensor, Tensor] = Evidence.apply(query.flat, query, store, values, num)  # type: ignore[no-untyped-call]
        return evidence

    def averages(self, query: Query, num: int) -> tuple[Tensor, Tensor | None]:
        """Averages over all thetas and reference points, (V, B); the evidence if it came too."""
        if self._small is not None and self._small.fits(num):
            return self._small.averages(query.flat, self.update == "online"), None
        log_evidence, each = self.evidence(query, num)
        shares = self.log_shares(log_evidence).exp()
        return (shares.unsqueeze(-1) * each).sum(0).T, log_evidence

    def log_shares(self, log_evidence: Tensor) -> Tensor:  # (S, B)
        """The thetas' log-weights: by evidence online, equal offline or where none explains x'."""
        if self.update == "offline" or len(log_evidence) == 1:
            return torch.full_like(log_evidence, -math.log(len(log_evidence)))
        possible = (log_evidence > -math.inf).any(0)
        return torch.where(possible, log_evidence, torch.zeros_like(log_evidence)).log_softmax(0)

    def flat(self, x: Tensor) -> Tensor:  # (B, d) float64
        """x (or its features), the unreasonably far brought to where directions can be told."""
        points: Tensor = (x if self.features is None else self.features(x)).flatten(1).double()
        limit = _FARTHEST * max(self._reach, 1.0)
        with torch.no_grad():
            largest = torch.linalg.vector_norm(points, math.inf) if points.numel() else 0.0
            if float(largest) * math.sqrt(points.shape[1]) <= limit:
                return points
            checks.finite("x", x)  # only now: what is small is finite
            norms: Tensor = torch.linalg.vector_norm(points, dim=1, keepdim=True)
            shrink = (limit / norms).clamp_max(1.0)
        return points * shrink

    def queries(self, x: Tensor) -> Queries:
        """Blocks of inputs as the banks want them; a row's precision depends on that row alone."""
        flat, origin = self.flat(x), self.store.origin
        kinds, left_out = self._precisions(flat.detach()), flat.new_zeros(len(x))
        nearest: tuple[Tensor, ...] = ()
        if self._index is not None:
            whole = Query(x, flat, origin, torch.float64)
            parts = [
                self._index.search(self.store, whole.take(rows), self._left_out)
                for rows in spans(len(x), _QUERIES)
            ]
            rows_of, bounds = zip(*parts, strict=True)
            nearest = tuple(torch.cat(rows, 1) for rows in zip(*rows_of, strict=True))
            bound = torch.cat(bounds)
            within = bound <= self._left_out
            kinds, left_out = torch.where(within, _INDEXED, kinds), left_out.where(~within, bound)
        present, blocks = sorted(set(kinds.tolist())), []
        for kind in present:
            pieces: Iterable[slice | Tensor] = spans(len(x), _QUERIES)
            if len(present) > 1:
                pieces = torch.split(torch.nonzero(kinds == kind).squeeze(1), _QUERIES)
            dtype = torch.float32 if kind == _NARROW else torch.float64
            for rows in pieces:
                near = tuple(index[:, rows] for index in nearest) if kind == _INDEXED else None
                blocks.append((rows, Query(x[rows], flat[rows], origin, dtype, near)))
        return Queries(blocks, left_out)

    def _precisions(self, points: Tensor) -> Tensor:  # (B, d) -> (B,)
        """The precision of each row's products: float32 where that will do for a large store."""
        kinds = torch.full((len(points),), _WIDE, device=points.device)
        if self._exact or not self.store.gaussians:
            return kinds
        norms = torch.linalg.vector_norm(points - self.store.origin, dim=1)
        rounding = torch.stack([bank.rounding(norms) for bank in self.store.gaussians])
        return torch.where(rounding.amax(0) > _TOLERATED, kinds, _NARROW)

    def query(self, x: Tensor) -> Query:
        """All inputs at once, in float64."""
        with torch.no_grad():
            return Query(x.detach(), self.flat(x.detach()), self.store.origin, torch.float64)

    def denoise(self, x: Tensor) -> Tensor:
        """E[centre | x'], of x's shape: where x' is believed to come from (not for `features`)."""
        self._check(x)
        if self.features is not None:
            raise checks.InputError("denoise needs centres like x, got a purifier with features")
        self.store.check_gaussian("denoise")
        if not len(x):
            return x.clone()
        with torch.no_grad():
            queries = self.queries(x)
            means = queries.join([self._denoise(query) for query in queries])
        return means.to(x.dtype).view_as(x)

    def _denoise(self, query: Query) -> Tensor:  # (B, d) float64
        sums = sweep(self.store, query, values=False)
        shares, mean = self.log_shares(sums.log_evidence).exp(), torch.zeros_like(query.points)
        if query.nearest is not None:
            return self._nearest_mean(query, sums, shares)
        for block in weights(self.store, query, sums, shares):
            each = (block.terms * block.group_factor.unsqueeze(-1)).to(query.dtype)
            bank = self.store.gaussians[block.bank]
            centres = bank.centres.block(block.groups, block.rows).to(query.dtype)
            mean += torch.matmul(each, centres).sum(0)
        return self.store.ranks.sum(mean)

    def _nearest_mean(self, query: Query, sums: Sums, shares: Tensor) -> Tensor:  # (B, d) float64
        """E[centre | x'] over the centres of an index's answer."""
        mean = torch.zeros_like(query.points)
        for bank, part, of_bank in zip(self.store.gaussians, sums.banks, sums.shares, strict=True):
            factor = of_bank * shares / part.total  # (S, B)
            factor = factor if bank.groups > 1 else factor.sum(0, keepdim=True)
            each = part.leading_terms * factor.unsqueeze(-1)  # (G, B, k)
            for group in range(bank.groups):
                centres = bank.centres.pick(group, part.leading.rows[group]).double()
                mean += torch.einsum("bk,bkd->bd", each[group], centres)
        return mean

    def diagnose(self, x: Tensor) -> Diagnosis:
        """Whether to believe each prediction: effective samples, evidence, support."""
        self._check(x)
        if not len(x):
            raise checks.InputError("x must hold at least one input, got none")
        with torch.no_grad():
            queries = self.queries(x)
            parts = [diagnose(self.store, query, self.log_shares) for query in queries]
            return replace(merge(parts, queries.join), left_out=queries.left_out)

    def widened(self, factor: float) -> Purifier:
        """The same tables with noise `factor` times as wide: for annealed attacks."""
        checks.number("factor", factor, low=0, open_low=True)
        return self._like(self.store.widened(factor), f"{self._note}.widened({factor:g})")

    def with_thetas(self, num: int, *, generator: torch.Generator | None = None) -> Purifier:
        """The same purifier with `num` thetas drawn anew from the `posterior` given with it: what
        an attacker who does not know the thetas can build. The reference points stay, the tables
        are computed again.

        >>> from torch import nn
        >>> from advbayes import BayesianModel, Categorical, MeanField, Noise
        >>> model = BayesianModel(nn.Linear(4, 3), Categorical())
        >>> q, x = MeanField(model), torch.randn(100, 4)
        >>> purified = Purifier(model, Noise(0.5), q.sample(5), x, posterior=q)
        >>> purified.with_thetas(20).store.num_thetas
        20
        """
        checks.count("num", num)
        if self._redraw is None:
            raise checks.InputError(
                "with_thetas needs the posterior to draw from: Purifier(..., "
                "posterior=posterior), got none"
            )
        return self._redraw(num, generator)

    def _weighed(self, weights: Tensor) -> Purifier:  # (N,), positive
        """The same purifier with reference points that count in proportion to their weights."""
        if self._index is not None or self.store.ranks.size > 1:
            raise checks.InputError("weights need a purifier without an index, in one process")
        return self._like(self.store.weighed(weights), self._note)

    def _like(self, store: Store, note: str) -> Purifier:
        kept = self.update, self.features, self.base, note, self._index, self._left_out
        return Purifier.__new__(Purifier)._set(store, *kept)

    def save(self, folder: str | Path) -> None:
        """A bundle: every byte under a hash, replaced in one step. The model is not in it."""
        if self.store.ranks.size > 1:
            raise checks.InputError("save needs the reference in one process, got a sharded one")
        if any(bank.log_weights is not None for bank in self.store.banks):
            raise checks.InputError(
                "save needs reference points that count once each, got weights: save the estimator"
            )
        saving.save(self.store, Path(folder), self.update, self._note, self.features is not None)

    @classmethod
    def load(
        cls, folder: str | Path, *, memory_limit: int = 2 << 30, features: Features | None = None
    ) -> Purifier:
        """A saved purifier; its tables stay on disk if they take more than `memory_limit` bytes."""
        store, update, note = saving.load(
            Path(folder), checks.count("memory_limit", memory_limit), features is not None
        )
        return cls.__new__(cls)._set(store, update, features, None, note)

    def _check(self, x: Any) -> None:
        if not isinstance(x, Tensor) or x.ndim < 2 or tuple(x.shape[1:]) != self.store.event_shape:
            wanted = ", ".join(("B", *map(str, self.store.event_shape)))
            raise checks.InputError(f"x must have shape ({wanted}) as the reference", got=x)
        if x.dtype != self.store.dtype:
            raise checks.InputTypeError(f"x must be {self.store.dtype} as the reference", got=x)


@dataclass(frozen=True, eq=False)
class Queries:
    """Inputs in blocks of one precision, and the most evidence that an index leaves out."""

    blocks: list[tuple[slice | Tensor, Query]]  # which rows, and what they ask
    left_out: Tensor  # (B,) float64

    def __iter__(self) -> Iterator[Query]:
        return (query for _, query in self.blocks)

    def join(self, parts: list[Tensor], dim: int = 0) -> Tensor:
        """What each block gave, in the order of the inputs."""
        if len(parts) == 1:
            return parts[0]
        whole = torch.cat(parts, dim)
        places = [rows for rows, _ in self.blocks if isinstance(rows, Tensor)]
        return whole.index_select(dim, torch.cat(places).argsort()) if places else whole


def _reference(
    reference: Any, num_samples: int, model: BayesianModel
) -> tuple[Tensor, Tensor | None]:
    """x and the labels, if any, checked; drawn if the reference is a generative model."""
    y = None
    if callable(getattr(reference, "sample", None)):
        drawn = reference.sample(num_samples)
        # scikit-learn's mixtures also tell the component
        drawn = drawn[0] if isinstance(drawn, tuple) else drawn
        x = torch.as_tensor(drawn, dtype=model.dtype, device=model.device)
    elif isinstance(reference, (tuple, list)):
        if len(reference) != 2:
            raise checks.InputError(
                f"reference must be x, (x, y) or a model with sample(n), got {len(reference)} parts"
            )
        x, y = reference
    else:
        x = reference
    if not isinstance(x, Tensor) or x.ndim < 2:
        raise checks.InputTypeError("reference must hold a tensor x of shape (N, *event)", got=x)
    if not len(x):
        raise checks.InputError("reference must hold at least one point", got=x)
    model._check_input(x)
    checks.finite("reference", x)
    if y is not None and (not isinstance(y, Tensor) or y.ndim < 1 or len(y) != len(x)):
        wanted = f"reference labels must be one for each of the {len(x)} points"
        raise checks.InputError(wanted, got=y)
    return x.detach(), y

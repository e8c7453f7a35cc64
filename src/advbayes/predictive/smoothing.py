"""Randomised smoothing as a Predictor: the reactive defense with a flat prior on the clean input
(section 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, Independent, Normal
from torch.utils.checkpoint import checkpoint

from advbayes import checks
from advbayes.likelihoods import GaussianMixture, mix, predicts_classes
from advbayes.predictive.posterior import FreshPredictive
from advbayes.seeds import generator_for, normal_like
from advbayes.types import Attack, Predictor

# noises (k, B or 1, *event), and what thetas come from
Randomness = tuple[Tensor, torch.Generator | None]
_ROWS = 1024  # noisy inputs in one forward pass
_BLOCK = 256  # draws that one key of the seed stands for
_ASKED = 20  # times that a predictor is asked again, to see whether it draws: of two thetas, say


@dataclass(frozen=True, eq=False)
class Smoothed:
    """E p(y | x' + sigma noise) over `num` Gaussian draws: the smoothing limit as a Predictor.

    Given a `FreshPredictive`, every draw has a theta of its own (its `num` is not used), so that
    the expectation is over noise and posterior together. Randomness: with a `seed` (the default)
    the instance is a function: draw k has the same noise and the same theta at every call, for
    every input and for every `num` above k, so that a prediction depends neither on its neighbours
    in the batch nor on how the draws are cut into passes. With `seed=None` they are drawn anew at
    every call, from `generator` if given: what an attack must average over.

    >>> predict = lambda x: CategoricalDistribution(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> smoothed = Smoothed(predict, sigma=0.5, num=10)
    >>> torch.equal(smoothed(torch.ones(1, 2)).probs, smoothed(torch.ones(1, 2)).probs)
    True
    """

    predict: Predictor
    sigma: float
    num: int = 100
    seed: int | None = 0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        checks.function("predict", self.predict, "a Predictor")
        checks.number("sigma", self.sigma, low=0)
        checks.count("num", self.num)
        if self.seed is not None and self.generator is not None:
            raise checks.InputError(
                "generator must be absent unless seed=None, got both a seed and a generator"
            )

    def __call__(self, x: Tensor) -> Distribution:
        parts = list(self._draws(x, self._randomness(x)))
        if len(parts[0]) == 1:
            log_probs = torch.cat([part[0] for part in parts])  # (num, B, C)
            return mix(CategoricalDistribution(logits=log_probs, validate_args=False))
        means, scales, log_weights = (torch.cat(column) for column in zip(*parts, strict=True))
        return GaussianMixture(means, scales, log_weights)

    def votes(
        self,
        x: Tensor,  # (B, *event)
        num: int,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # (B, C) int64
        """How many of `num` independent draws (noise, theta where fresh) vote for each class."""
        counts: Tensor | None = None
        with torch.no_grad():
            apart = _draws_itself(self.predict, x)
            for part in self._draws(x, _anew(x, checks.count("num", num), generator), apart):
                if len(part) != 1:
                    raise checks.InputTypeError("votes need a classifier, got a regression")
                # NaN counts as the largest: a net that diverged would be certified
                checks.finite("the logits of the draws (their largest)", part[0].amax(-1))
                classes = part[0].shape[-1]
                ballot = torch.nn.functional.one_hot(part[0].argmax(-1), classes).sum(0)  # (B, C)
                counts = ballot if counts is None else counts + ballot
        assert counts is not None
        return counts

    def _randomness(self, x: Tensor) -> Iterator[Randomness]:
        if self.seed is None:
            yield from _anew(x, self.num, self.generator)
            return
        for block, start in enumerate(range(0, self.num, _BLOCK)):
            generator = generator_for(self.seed, "smoothing", block, x.device)
            thetas = generator_for(self.seed, "smoothing thetas", block, x.device)
            # A whole block, whatever is used of it: normal numbers drawn in other pieces are
            # others.
            noise = normal_like(x, generator, (_BLOCK, 1, *x.shape[1:]))
            yield noise[: self.num - start], thetas

    def _draws(
        self, x: Tensor, randomness: Iterable[Randomness], apart: bool = False
    ) -> Iterator[tuple[Tensor, ...]]:
        """The parts of the predictions under each noise, (k, B, ...) each, some draws at a time, or
        one (`apart`).

        A graph is rebuilt rather than kept, so that attacks through many draws fit in memory.
        """
        fresh = self.predict if isinstance(self.predict, FreshPredictive) else None
        size = 1 if apart or fresh is not None else max(1, _ROWS // max(1, len(x)))
        for noise, generator in randomness:
            for some in torch.split(self.sigma * noise, size):
                predict: Predictor = self.predict
                if fresh is not None:
                    predict = fresh.model.at(fresh.posterior.sample(1, generator=generator)[0])
                forward = _forward(predict, some)
                if torch.is_grad_enabled() and x.requires_grad and self.num > size:
                    yield checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)
                else:
                    yield forward(x)


@dataclass(frozen=True)
class SmoothedAttack:
    """An attack on E p(y | x + sigma noise), `num` draws anew at every question, in place of p.

    As a channel, `AttackChannel(SmoothedAttack(one_step(L2(1.0)), 1.0), sigma=1.0)`, it trains nets
    to be smoothed (Salman et al. 2019): the adversary moves the input before the noise comes.

    >>> from advbayes import L2, one_step
    >>> predict = lambda x: CategoricalDistribution(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> attack = SmoothedAttack(one_step(L2(0.5)), sigma=1.0)
    >>> attack(predict, torch.ones(1, 2), torch.tensor([0]))
    tensor([[0.5000, 1.0000]])
    """

    attack: Attack
    sigma: float
    num: int = 2

    def __post_init__(self) -> None:
        checks.function("attack", self.attack, "an attack such as one_step(L2(1.0))")
        checks.number("sigma", self.sigma, low=0)
        checks.count("num", self.num)

    def __call__(
        self,
        predict: Predictor,
        x: Tensor,  # (B, *event)
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # (B, *event)
        smoothed = Smoothed(predict, self.sigma, self.num, seed=None, generator=generator)
        return self.attack(smoothed, x, y, generator=generator)


def _anew(x: Tensor, num: int, generator: torch.Generator | None) -> Iterator[Randomness]:
    """`num` independent noises for every input, as many at a time as make one pass."""
    size = max(1, _ROWS // max(1, len(x)))
    for start in range(0, num, size):
        yield normal_like(x, generator, (min(size, num - start), *x.shape)), generator


def _draws_itself(predict: Predictor, x: Tensor) -> bool:
    """Whether a predictor has randomness of its own, such as a `FreshPredictive` within a function:
    one pass has one draw of it, and votes that share it are not independent."""
    if isinstance(predict, FreshPredictive) or not len(x):
        return False
    first = predict(x)
    if not predicts_classes(first):
        return False
    others = (predict(x) for _ in range(_ASKED))
    same = (torch.allclose(first.probs, each.probs, atol=1e-6, equal_nan=True) for each in others)  # type: ignore[attr-defined]
    return not all(same)


def _forward(predict: Predictor, noise: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """x -> its predictions under this noise: (log-probs,) or (means, scales, log-weights)."""

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        count, batch = len(noise), len(x)
        prediction = predict((x + noise).reshape(count * batch, *x.shape[1:]))
        if predicts_classes(prediction):
            return (prediction.logits.view(count, batch, prediction.logits.shape[-1]),)
        means, scales, log_weights = components(prediction)
        num = len(means) * count
        means, scales = (part.reshape(num, batch, *part.shape[2:]) for part in (means, scales))
        return means, scales, log_weights.reshape(num, batch)

    return forward


def components(prediction: Distribution) -> tuple[Tensor, Tensor, Tensor]:
    """Means, scales (S, B) or (S, B, D), log-weights (S, B) of a Gaussian or a mixture."""
    match prediction:
        case GaussianMixture():
            return prediction.means, prediction.scales, prediction.log_weights
        case Normal(loc=loc, scale=scale) | Independent(base_dist=Normal(loc=loc, scale=scale)):
            return loc.unsqueeze(0), scale.unsqueeze(0), loc.new_zeros((1, *loc.shape[:1]))
    raise checks.InputTypeError(
        f"predict must give classes, Gaussians or Gaussian mixtures, got "
        f"{type(prediction).__name__}"
    )

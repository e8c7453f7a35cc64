"""The variational objectives of the proactive defense (sections 3.3 and 3.4, SM-3, SM-4).

One tensor, log p(y_b | x'_skb, theta_s) of shape (S, K, B), and its one-line reductions.
Adversarial training, TRADES, logit pairing, consistency and the robust Gibbs posterior are settings
(docs/defenses.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, kl_divergence

from advbayes import checks
from advbayes.attacks import through_attacks
from advbayes.channels import AttackChannel, Noise
from advbayes.likelihoods import mix, predicts_classes
from advbayes.model import BayesianModel
from advbayes.posteriors import Posterior
from advbayes.seeds import for_thetas
from advbayes.types import Channel, Predictor

BOUNDS = ("surrogate", "importance_weighted")


class Terms(NamedTuple):
    """Of the whole data set: bound = log_likelihood - kl_weight * kl - penalty."""

    bound: Tensor
    log_likelihood: Tensor
    kl: Tensor
    penalty: Tensor


class Penalty(Protocol):
    """Omega of Eq. 15, one value per example, from the raw outputs at x and at x'."""

    @property
    def likelihood(self) -> str: ...  # where y is scored: "adversarial" (at x') or "clean" (at x)

    def __call__(
        self, model: BayesianModel, clean: Outputs, adversarial: Outputs
    ) -> Tensor: ...  # (B,)


class Outputs(NamedTuple):
    """A network's raw output at one theta, with the likelihood's coordinates of theta."""

    output: Tensor  # (B, O)
    extra: Tensor  # (num_extra,)


@dataclass(frozen=True)
class Trades:
    """beta KL(p(. | x) || p(. | x')); y is scored at x' (the paper) or at x (Zhang et al.).

    >>> Trades(6.0, likelihood="clean")
    Trades(beta=6.0, likelihood='clean')
    """

    beta: float = 6.0
    likelihood: str = "adversarial"

    def __post_init__(self) -> None:
        checks.number("beta", self.beta, low=0)
        checks.choice("likelihood", self.likelihood, ("adversarial", "clean"))

    def __call__(self, model: BayesianModel, clean: Outputs, adversarial: Outputs) -> Tensor:
        p, q = model.likelihood(*clean), model.likelihood(*adversarial)
        return self.beta * divergence(p, q)


@dataclass(frozen=True)
class LogitPairing:
    """weight |g(x) - g(x')|^2 on the network's raw outputs (ALP).

    >>> LogitPairing(0.5)
    LogitPairing(weight=0.5, likelihood='adversarial')
    """

    weight: float = 0.5
    likelihood: str = "adversarial"

    def __post_init__(self) -> None:
        checks.number("weight", self.weight, low=0)
        checks.choice("likelihood", self.likelihood, ("adversarial", "clean"))

    def __call__(self, model: BayesianModel, clean: Outputs, adversarial: Outputs) -> Tensor:
        return self.weight * (clean.output - adversarial.output).square().sum(-1)


@dataclass(frozen=True)
class Consistency:
    """weight KL(p_mean || p(. | x'_k)) + entropy H(p_mean), p_mean = 1/K sum_k p(. | x'_k).

    Over K >= 2 samples of a classifier: its votes shall agree (Jeong and Shin 2020).

    >>> Consistency(10.0)
    Consistency(weight=10.0, entropy=0.5)
    """

    weight: float = 10.0
    entropy: float = 0.5
    likelihood = "adversarial"

    def __post_init__(self) -> None:
        checks.number("weight", self.weight, low=0)
        checks.number("entropy", self.entropy, low=0)

    def __call__(self, model: BayesianModel, clean: Outputs, adversarial: Outputs) -> Tensor:
        """Of one sample x'_k; what takes the place of `clean` is the mean of all."""
        mean, one = model.likelihood(*clean), model.likelihood(*adversarial)
        if not predicts_classes(mean):
            raise checks.InputTypeError(
                "penalty must be Trades or LogitPairing for a regression, got Consistency"
            )
        spread = self.weight * divergence(mean, one)
        return spread - self.entropy * (mean.probs * mean.logits).sum(-1)


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """`torch.stack` without a copy of a single row."""
    return torch.stack(list(rows)) if len(rows) > 1 else rows[0].unsqueeze(0)


def divergence(p: Distribution, q: Distribution) -> Tensor:
    """KL(p || q) of each example; finite for categoricals at any logits."""
    if predicts_classes(p) and predicts_classes(q):
        return (p.logits.exp() * (p.logits - q.logits)).sum(-1)
    return kl_divergence(p, q)


@dataclass(frozen=True)
class ChannelELBO:
    """The evidence lower bound of the robust posterior, through an adversarial channel.

    surrogate (Eq. 11):           N/B sum_b mean_s mean_k log p_skb                - KL(q || prior)
    importance_weighted (SM-3):   N/B sum_b mean_s log( 1/K sum_k p_skb )          - KL(q || prior)

    whose gradient is SM-4's self-normalised estimator. The K channel samples of one theta share
    their attack where the channel is an attack plus noise. By default no gradient flows through the
    attack, as in adversarial training; `through=True` gives the paper's pathwise formula. With
    `class_weight` an example of class c counts w_c times, with `weight` example b w_b times.

    >>> ChannelELBO(60_000, num_channel=5, bound="importance_weighted").num_theta
    1
    """

    num_data: int
    num_theta: int = 1
    num_channel: int = 1
    bound: str = "surrogate"
    penalty: Penalty | None = None
    kl_weight: float = 1.0
    through: bool = False
    # one for each class; `datasets.class_weights` balances them
    class_weight: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for weight in self.class_weight or ():
            checks.number("class_weight", weight, low=0)
        checks.count("num_data", self.num_data)
        checks.count("num_theta", self.num_theta)
        checks.count("num_channel", self.num_channel)
        checks.choice("bound", self.bound, BOUNDS)
        checks.number("kl_weight", self.kl_weight, low=0)
        if isinstance(self.penalty, Consistency) and self.num_channel < 2:
            raise checks.InputError(
                f"num_channel must be >= 2 for a Consistency penalty, which compares channel "
                f"samples, got {self.num_channel}"
            )

    def __call__(
        self,
        model: BayesianModel,
        posterior: Posterior,
        channel: Channel,
        x: Tensor,  # (B, *event)
        y: Tensor,  # (B,) or (B, D)
        *,
        weight: Tensor | None = None,  # (B,)
        generator: torch.Generator | None = None,
    ) -> Terms:
        """One estimate of the bound and its parts, differentiable in the posterior."""
        thetas = posterior.rsample(self.num_theta, generator=for_thetas(generator))
        x_adv = self.corrupt(model, thetas, channel, x, y, generator=generator)
        return self.terms(model, posterior, thetas, x, x_adv, y, weight)

    def corrupt(
        self,
        model: BayesianModel,
        thetas: Tensor,  # (S, P)
        channel: Channel,
        x: Tensor,
        y: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # (S, K, B, *event)
        """x' ~ p(. | x, theta_s), K times for every theta."""
        if channel == Noise(0):
            return x.expand(len(thetas), self.num_channel, *x.shape)
        with through_attacks() if self.through else torch.no_grad():
            seen = thetas if self.through else thetas.detach()
            rows = [self._draw(channel, model.at(theta), x, y, generator) for theta in seen]
            return _stacked(rows)

    def _draw(
        self,
        channel: Channel,
        predict: Predictor,
        x: Tensor,
        y: Tensor,
        generator: torch.Generator | None,
    ) -> Tensor:
        """K samples; K noises share one attack."""
        if isinstance(channel, AttackChannel):
            x = channel.centre(predict, x, y, generator=generator)
            channel = Noise(channel.sigma)
        draws = range(self.num_channel)
        return _stacked([channel.sample(predict, x, y, generator=generator) for _ in draws])

    def terms(
        self,
        model: BayesianModel,
        posterior: Posterior,
        thetas: Tensor,  # (S, P)
        x: Tensor,  # (B, *event)
        x_adv: Tensor,  # (S, K, B, *event)
        y: Tensor,
        weight: Tensor | None = None,  # (B,)
    ) -> Terms:
        """The bound at given thetas and channel samples: no randomness left."""
        scale = self.num_data / len(x)
        kl = posterior.kl(model.prior_scale)
        weight = self._weigh(x, y, weight)
        if self.penalty is None:
            log_p = self._score(model, thetas, x_adv, y)
            penalty = log_p.new_zeros(())
        else:
            log_p, omega = self._score_with_penalty(model, thetas, x, x_adv, y)
            omega = omega if weight is None else omega * weight
            penalty = scale / (omega.shape[0] * omega.shape[1]) * omega.sum()
        rows = self.reduce(log_p)
        rows = rows if weight is None else rows * weight
        log_likelihood = scale / len(thetas) * rows.sum()
        bound = log_likelihood - kl if self.kl_weight == 1 else log_likelihood - self.kl_weight * kl
        bound = bound if self.penalty is None else bound - penalty
        return Terms(bound, log_likelihood, kl, penalty)

    def _weigh(self, x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor | None:  # (B,)
        """How often each example counts, by its class too; None: once."""
        if self.class_weight is None:
            return weight
        of_class = torch.tensor(self.class_weight, dtype=x.dtype, device=x.device)[y]
        return of_class if weight is None else of_class * weight

    def reduce(self, log_p: Tensor) -> Tensor:  # (S, K, B) -> (S, B)
        """Over the channel: the mean of the logs, or the log of the mean."""
        if log_p.shape[1] == 1:
            return log_p.squeeze(1)
        if self.bound == "surrogate":
            return log_p.mean(1)
        return torch.logsumexp(log_p, dim=1) - math.log(log_p.shape[1])

    def _score(self, model: BayesianModel, thetas: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """log p(y_b | x'_skb, theta_s), (S, K, B): what the bounds reduce."""
        num_channel = x_adv.shape[1]
        if num_channel > 1:
            y = y.repeat(num_channel, *[1] * (y.ndim - 1))
        rows = [
            model.log_likelihood(theta, inputs.flatten(0, 1), y).view(num_channel, -1)
            for theta, inputs in zip(thetas, x_adv, strict=True)
        ]
        return _stacked(rows)

    def _score_with_penalty(
        self, model: BayesianModel, thetas: Tensor, x: Tensor, x_adv: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:  # (S, K, B) each
        assert self.penalty is not None
        scores, omegas = [], []
        for theta, inputs in zip(thetas, x_adv, strict=True):
            attacked = [Outputs(*model.output(theta, one)) for one in inputs]
            if isinstance(self.penalty, Consistency):  # outputs that predict the samples' mean
                logits = torch.stack([one.output for one in attacked])
                mean = mix(CategoricalDistribution(logits=logits, validate_args=False))
                assert predicts_classes(mean)
                clean = Outputs(mean.logits, attacked[0].extra)
            else:
                clean = Outputs(*model.output(theta, x))
            scored = (
                attacked if self.penalty.likelihood == "adversarial" else [clean] * len(attacked)
            )
            log_prob = model.likelihood.log_prob
            scores.append(torch.stack([log_prob(one.output, y, one.extra) for one in scored]))
            omegas.append(torch.stack([self.penalty(model, clean, one) for one in attacked]))
        return torch.stack(scores), torch.stack(omegas)

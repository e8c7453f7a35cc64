"""The variational objectives of the proactive defense (sections 3.3 and 3.4, SM-3, SM-4).

One tensor, log p(y_b | x'_skb, theta_s) of shape (S, K, B), and its one-line reductions. Adversarial training, TRADES, logit
pairing and the robust Gibbs posterior are settings (docs/defenses.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, kl_divergence

from advbayes import checks
from advbayes.attacks import nll, squared_error, through_attacks
from advbayes.attacks.gradients import per_example
from advbayes.channels import AttackChannel, HasDirection, Noise
from advbayes.likelihoods import Gaussian
from advbayes.model import BayesianModel, Parts
from advbayes.tracing import is_tracing
from advbayes.types import Channel, Loss, Posterior

BOUNDS = ("surrogate", "importance_weighted")


class Terms(NamedTuple):
    """The bound and its parts, each for the whole data set: bound = log_likelihood - kl_weight * kl - penalty."""

    bound: Tensor
    log_likelihood: Tensor
    kl: Tensor
    penalty: Tensor


class ThetaGradient(NamedTuple):
    """Parts of the bound for the whole data set, and the gradient of -(log_likelihood - penalty) / N in each theta."""

    log_likelihood: float
    penalty: float
    gradient: Tensor  # (S, P)


class Penalty(Protocol):
    """Omega of Eq. 15, one value per example, from the raw outputs at x and at x'."""

    @property
    def likelihood(self) -> str: ...  # where y is scored: "adversarial" (at x') or "clean" (at x)

    def __call__(self, model: BayesianModel, clean: Outputs, adversarial: Outputs) -> Tensor: ...  # (B,)


class Outputs(NamedTuple):
    """A network's raw output at one theta, with theta's coordinates that belong to the likelihood."""

    output: Tensor  # (B, O)
    extra: Tensor  # (num_extra,)


@dataclass(frozen=True)
class Trades:
    """beta KL(p(. | x) || p(. | x')). The paper adds it to the adversarial likelihood, Zhang et al. to the clean one.

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


def divergence(p: Distribution, q: Distribution) -> Tensor:
    """KL(p || q) of each example; finite for categoricals at any logits.

    >>> divergence(CategoricalDistribution(logits=torch.zeros(1, 2)), CategoricalDistribution(logits=torch.zeros(1, 2)))
    tensor([0.])
    """
    if isinstance(p, CategoricalDistribution) and isinstance(q, CategoricalDistribution):
        return (p.logits.exp() * (p.logits - q.logits)).sum(-1)
    return kl_divergence(p, q)


@dataclass(frozen=True)
class ChannelELBO:
    """The evidence lower bound of the robust posterior, through an adversarial channel.

    surrogate (Eq. 11):           N/B sum_b mean_s mean_k log p_skb                - KL(q || prior)
    importance_weighted (SM-3):   N/B sum_b mean_s log( 1/K sum_k p_skb )          - KL(q || prior)

    whose gradient is SM-4's self-normalised estimator. The K channel samples of one theta share their attack where the
    channel is an attack plus noise. By default no gradient flows through the attack, as in adversarial training;
    `through=True` gives the paper's pathwise formula.

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

    def __post_init__(self) -> None:
        checks.count("num_data", self.num_data)
        checks.count("num_theta", self.num_theta)
        checks.count("num_channel", self.num_channel)
        checks.choice("bound", self.bound, BOUNDS)
        checks.number("kl_weight", self.kl_weight, low=0)

    def __call__(
        self,
        model: BayesianModel,
        posterior: Posterior,
        channel: Channel,
        x: Tensor,  # (B, *event)
        y: Tensor,  # (B,) or (B, D)
        *,
        generator: torch.Generator | None = None,
    ) -> Terms:
        """One estimate of the bound and its parts, differentiable in the posterior."""
        thetas = posterior.rsample(self.num_theta, generator=generator)
        x_adv = self.corrupt(model, thetas, channel, x, y, generator=generator)
        return self.terms(model, posterior, thetas, x, x_adv, y)

    def corrupt(
        self,
        model: BayesianModel,
        thetas: Tensor | Sequence[Parts],  # (S, P)
        channel: Channel,
        x: Tensor,
        y: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # (S, K, B, *event)
        """x' ~ p(. | x, theta_s), K times for every theta."""
        if isinstance(channel, Noise) and channel.sigma == 0:
            return x.expand(len(thetas), self.num_channel, *x.shape)
        with through_attacks() if self.through else torch.no_grad():
            given = thetas.detach() if isinstance(thetas, Tensor) and not self.through else thetas
            at = model.at if self.through else partial(_AttackedTheta, model)
            rows = [self._draw(channel, at(theta), x, y, generator) for theta in given]
            return torch.stack(rows) if len(rows) > 1 else rows[0].unsqueeze(0)

    def _draw(self, channel: Channel, predict: Any, x: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        """K samples; K noises share one attack."""
        if self.num_channel == 1:
            return channel.sample(predict, x, y, generator=generator).unsqueeze(0)
        if isinstance(channel, AttackChannel):
            centre = channel.centre(predict, x, y, generator=generator)
            noise = Noise(channel.sigma)
            return torch.stack([noise.sample(predict, centre, generator=generator) for _ in range(self.num_channel)])
        return torch.stack([channel.sample(predict, x, y, generator=generator) for _ in range(self.num_channel)])

    def terms(
        self,
        model: BayesianModel,
        posterior: Posterior,
        thetas: Tensor,  # (S, P)
        x: Tensor,  # (B, *event)
        x_adv: Tensor,  # (S, K, B, *event)
        y: Tensor,
    ) -> Terms:
        """The bound at given thetas and channel samples: no randomness left."""
        scale = self.num_data / len(x)
        kl = posterior.kl(model.prior_scale)
        if self.penalty is None:
            log_p = self._score(model, thetas, x_adv, y)
            penalty = log_p.new_zeros(())
        else:
            log_p, omega = self._score_with_penalty(model, thetas, x, x_adv, y)
            penalty = scale / (omega.shape[0] * omega.shape[1]) * omega.sum()
        log_likelihood = scale / len(thetas) * self.reduce(log_p).sum()
        bound = log_likelihood - kl if self.kl_weight == 1 else log_likelihood - self.kl_weight * kl
        return Terms(bound if self.penalty is None else bound - penalty, log_likelihood, kl, penalty)

    def theta_gradient(
        self,
        model: BayesianModel,
        thetas: Tensor | Sequence[Parts],  # (S, P): a leaf, or the parts of each theta, all leaves
        x: Tensor,  # (B, *event)
        x_adv: Tensor,  # (S, K, B, *event)
        y: Tensor,
    ) -> ThetaGradient:
        """What `terms` holds beside the KL, with its gradient in theta (past theta the posterior's `pull_back` goes on).

        Parts make it cheap: the bound is a sum over thetas, and gradients meet in one flat vector at the end. A tensor of
        thetas is for gradients that also go through the attack.
        """
        scale = self.num_data / (len(x) * len(thetas))
        share = -1.0 / (len(x) * len(thetas))
        if isinstance(thetas, Tensor):
            log_p, omega = self._score_all(model, thetas, x, x_adv, y)
            total, penalty = self.reduce(log_p).sum(), omega.sum() / omega.shape[1]
            (gradient,) = torch.autograd.grad(total - penalty, thetas)
            return ThetaGradient(float(total.detach()) * scale, float(penalty.detach()) * scale, gradient * share)
        sums = [self._accumulate(model, parts, x, inputs, y, share) for parts, inputs in zip(thetas, x_adv, strict=True)]
        rows = [row for _, _, row in sums]
        return ThetaGradient(
            sum(total for total, _, _ in sums) * scale,
            sum(penalty for _, penalty, _ in sums) * scale,
            rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows),
        )

    def _accumulate(
        self,
        model: BayesianModel,
        parts: Parts,
        x: Tensor,
        inputs: Tensor,  # (K, B, *event)
        y: Tensor,
        share: float,
    ) -> tuple[float, float, Tensor]:  # sums over the batch; (P,)
        """One theta's log-likelihood, penalty, and `share` times the gradient of their difference."""
        wanted = parts if parts[-1].numel() else parts[:-1]
        if self.penalty is None and len(inputs) == 1:
            by_hand = _dense_gradient(model, parts, inputs[0], y, share)
            if by_hand is not None:
                return by_hand[0], 0.0, by_hand[1]
            output, extra = model.output(parts, inputs[0])
            with torch.no_grad():
                closed = model.likelihood.weighted_gradient(output, y, share)
            if closed is not None:  # the backward pass starts at the network's output
                return closed[0], 0.0, _flat_gradient(output, wanted, closed[1])
            value = model.likelihood.log_prob(output, y, extra).sum()
            return float(value.detach()), 0.0, _flat_gradient(value, wanted, torch.full_like(value, share))
        log_p, omega = self._score_all(model, [parts], x, inputs.unsqueeze(0), y)
        total, penalty = self.reduce(log_p).sum(), omega.sum() / omega.shape[1]
        value = total - penalty
        return float(total.detach()), float(penalty.detach()), _flat_gradient(value, wanted, torch.full_like(value, share))

    def reduce(self, log_p: Tensor) -> Tensor:  # (S, K, B) -> (S, B)
        """Over the channel: the mean of the logs, or the log of the mean."""
        if log_p.shape[1] == 1:
            return log_p.squeeze(1)
        if self.bound == "surrogate":
            return log_p.mean(1)
        return torch.logsumexp(log_p, dim=1) - math.log(log_p.shape[1])

    def log_likelihoods(
        self,
        model: BayesianModel,
        thetas: Tensor,  # (S, P)
        channel: Channel,
        x: Tensor,
        y: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log p(y_b | x'_skb, theta_s), (S, K, B): what the bounds reduce."""
        return self._score(model, thetas, self.corrupt(model, thetas, channel, x, y, generator=generator), y)

    def _score_all(
        self, model: BayesianModel, thetas: Tensor | Sequence[Parts], x: Tensor, x_adv: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:  # (S, K, B) each
        """log p and the penalty, zero where there is none."""
        if self.penalty is not None:
            return self._score_with_penalty(model, thetas, x, x_adv, y)
        log_p = self._score(model, thetas, x_adv, y)
        return log_p, torch.zeros_like(log_p)

    def _score(self, model: BayesianModel, thetas: Tensor | Sequence[Parts], x_adv: Tensor, y: Tensor) -> Tensor:  # (S, K, B)
        num_channel = x_adv.shape[1]
        if num_channel > 1:
            y = y.repeat(num_channel, *[1] * (y.ndim - 1))
        rows = [
            model.log_likelihood(theta, inputs.flatten(0, 1), y).view(num_channel, -1)
            for theta, inputs in zip(thetas, x_adv, strict=True)
        ]
        return torch.stack(rows) if len(rows) > 1 else rows[0].unsqueeze(0)

    def _score_with_penalty(
        self, model: BayesianModel, thetas: Tensor | Sequence[Parts], x: Tensor, x_adv: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:  # (S, K, B) each
        assert self.penalty is not None
        scores, omegas = [], []
        for theta, inputs in zip(thetas, x_adv, strict=True):
            clean = Outputs(*model.output(theta, x))
            attacked = [Outputs(*model.output(theta, one)) for one in inputs]
            scored = attacked if self.penalty.likelihood == "adversarial" else [clean] * len(attacked)
            scores.append(torch.stack([model.likelihood.log_prob(one.output, y, one.extra) for one in scored]))
            omegas.append(torch.stack([self.penalty(model, clean, one) for one in attacked]))
        return torch.stack(scores), torch.stack(omegas)


def _dense_gradient(model: BayesianModel, parts: Parts, x: Tensor, y: Tensor, share: float) -> tuple[float, Tensor] | None:
    """The sum of log p(y | x, theta) and `share` times its gradient in theta without autograd, where that can be had."""
    dense = model.dense(x)
    if dense is None or parts[-1].numel():
        return None
    with torch.no_grad():
        values = dense.values(x, parts)
        closed = model.likelihood.weighted_gradient(values[-1], y, share)
        if closed is None:
            return None
        flat = x.new_empty(model.num_params)
        dense.gradient(values, closed[1], parts, model.parts(flat))
    return closed[0], flat


def _flat_gradient(value: Tensor, wanted: Parts, weight: Tensor) -> Tensor:
    found = torch.autograd.grad(value, wanted, weight, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in zip(found, wanted, strict=True)])


class _AttackedTheta(HasDirection):
    """p(y | x, theta) whose input gradient starts at the network's output where loss and likelihood have a closed form there.

    It saves building the prediction with its graph and going back through it: a third of a small net's attack.
    """

    def __init__(self, model: BayesianModel, theta: Tensor | Parts) -> None:
        self.model, self.parts = model, model.parts(theta) if isinstance(theta, Tensor) else theta

    def __call__(self, x: Tensor, /) -> Distribution:
        return self.model.at(self.parts)(x)

    def input_gradient(self, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
        likelihood = self.model.likelihood
        weight = None if is_tracing() else _weight(loss, likelihood)  # closed forms give numbers, which a program has not
        dense = self.model.dense(x)
        if weight is not None and dense is not None:
            with torch.no_grad():
                values = dense.values(x, self.parts)
                closed = likelihood.weighted_gradient(values[-1], y, weight)
                if closed is not None:
                    return dense.input_gradient(values, closed[1], self.parts)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output, extra = self.model.output(self.parts, x)
            if weight is not None and output.requires_grad:
                closed = likelihood.weighted_gradient(output.detach(), y, weight)
                if closed is not None:
                    return torch.autograd.grad(output, x, closed[1])[0]
            value = per_example(loss(likelihood(output, extra), y), len(x))
            found = torch.autograd.grad(value.sum(), x, allow_unused=True)[0] if value.requires_grad else None
        return torch.zeros_like(x) if found is None else found


def _weight(loss: Loss, likelihood: object) -> float | None:
    """w where the loss is w log p(y) up to a constant."""
    if loss is nll:
        return -1.0
    if loss is squared_error and isinstance(likelihood, Gaussian) and isinstance(likelihood.scale, float | int):
        return -2.0 * likelihood.scale**2
    return None

"""Identities 1 to 7: the reactive defense against its closed forms, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    Gaussian,
    Mixture,
    Noise,
    one_step,
)
from advbayes.channels import GaussianDensity
from advbayes.metrics.intervals import clopper_pearson
from advbayes.networks import mlp
from advbayes.predictive import Smoothed, certify
from advbayes.purification import Purifier
from advbayes.types import Predictor
from tests.oracles import FLOAT, LinearGaussian, assert_exact, generator, randn


@dataclass(frozen=True)
class Gain:
    """SM-2's channel x' = (1 + eps) x + N(0, sd^2), and identity 2's shift by c theta (the model's
    slope)."""

    gain: float
    sd: float
    shift: float = 0.0

    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return self._centres(predict, x) + self.sd * torch.randn(
            x.shape, generator=generator, dtype=x.dtype
        )

    def _centres(self, predict: Predictor, x: Tensor) -> Tensor:
        if self.shift == 0:
            return self.gain * x
        slope = predict(
            torch.ones_like(x[:1])
        ).mean  # theta reaches the channel through its Predictor
        return self.gain * x + self.shift * slope

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> GaussianDensity:
        return GaussianDensity((0.0,), (self._centres(predict, x),), (self.sd,))


SM2 = LinearGaussian()


def line() -> BayesianModel:
    return BayesianModel(nn.Linear(1, 1, bias=False).to(FLOAT), Gaussian(SM2.sy))


def quantiles(num: int, mean: float, variance: float) -> Tensor:
    """Equally likely values of a Gaussian: a sample without noise, whose averages converge fast."""
    levels = (torch.arange(num, dtype=FLOAT) + 0.5) / num
    return mean + math.sqrt(variance) * torch.special.ndtri(levels)


def classifier(num_thetas: int = 4, seed: int = 0) -> tuple[BayesianModel, Tensor]:
    model = BayesianModel(mlp(5, 3).to(FLOAT), Categorical())
    return model, 0.7 * randn(num_thetas, model.num_params, seed=seed)


def data(num: int = 300, seed: int = 1) -> tuple[Tensor, Tensor]:
    return randn(num, 5, seed=seed), torch.randint(0, 3, (num,), generator=generator(seed))


# --- 1: the closed form of SM-2 -----------------------------------------------------------------


def test_purifier_converges_to_the_closed_form() -> None:
    x_adv = torch.tensor([[-1.7], [0.0], [2.3]], dtype=FLOAT)
    wanted = torch.tensor([SM2.reactive(float(x)) for x in x_adv], dtype=FLOAT)  # (B, 2)
    errors = []
    for num in (10, 100, 1000):
        thetas = quantiles(num, SM2.mu, SM2.v).unsqueeze(1)
        reference = quantiles(num, 0.0, SM2.sx**2).unsqueeze(1)
        found = Purifier(line(), Gain(1 + SM2.eps, SM2.sd), thetas, reference)(x_adv)
        errors.append(float((torch.stack([found.mean, found.variance], 1) - wanted).abs().max()))
    assert errors[2] < 5e-3
    assert errors[0] > 4 * errors[1] > 16 * errors[2]


# --- 2: online and offline differ when the channel depends on theta -----------------------------


def test_online_and_offline_hit_their_own_closed_forms_and_miss_the_other() -> None:
    c, x_adv = 0.9, -0.6
    thetas = quantiles(400, SM2.mu, SM2.v).unsqueeze(1)
    reference = quantiles(2000, 0.0, SM2.sx**2).unsqueeze(1)
    found = {
        update: float(
            Purifier(line(), Gain(1.0, SM2.sd, c), thetas, reference, update)(
                torch.tensor([[x_adv]], dtype=FLOAT)
            ).mean
        )
        for update in ("online", "offline")
    }
    online, offline = SM2.online_mean(x_adv, c), SM2.offline_mean(x_adv, c)
    assert abs(online - offline) > 0.05
    assert abs(found["online"] - online) < 2e-3
    assert abs(found["offline"] - offline) < 2e-3


# --- 3: when they are equal ---------------------------------------------------------------------


def test_online_is_offline_with_one_theta_or_a_channel_that_ignores_theta() -> None:
    model, thetas = classifier()
    x = randn(6, 5, seed=9)
    attacked = AttackChannel(one_step(L2(1.0)), 0.4)
    for channel, some in (
        (attacked, thetas[:1]),
        (Noise(0.4), thetas),
        (attacked, thetas[:1].repeat(3, 1)),
    ):
        on, off = (
            Purifier(model, channel, some, data(), update)(x).probs
            for update in ("online", "offline")
        )
        torch.testing.assert_close(on, off, rtol=1e-10, atol=0)
    on, off = (
        Purifier(model, attacked, thetas, data(), update)(x).probs
        for update in ("online", "offline")
    )
    assert float((on - off).abs().max()) > 1e-3


def test_online_is_the_evidence_weighted_sum_of_single_thetas() -> None:
    model, thetas = classifier()
    x, channel = (
        randn(6, 5, seed=9),
        Mixture([0.3, 0.7], [Noise(0.3), AttackChannel(one_step(L2(1.0)), 0.4)]),
    )
    single = [Purifier(model, channel, theta.unsqueeze(0), data()) for theta in thetas]
    weights = torch.stack([one.diagnose(x).log_evidence for one in single]).softmax(0)
    wanted = sum(w.unsqueeze(1) * one(x).probs for w, one in zip(weights, single, strict=True))
    torch.testing.assert_close(
        Purifier(model, channel, thetas, data())(x).probs, wanted, rtol=1e-10, atol=0
    )


# --- 4: the limits in sigma ---------------------------------------------------------------------


def test_wide_noise_averages_and_narrow_noise_takes_the_nearest() -> None:
    model, thetas = classifier()
    (reference, labels), x = data(), randn(6, 5, seed=9)
    each = model.at_each(thetas)(reference).probs  # (S, N, C)
    wide = Purifier(model, Noise(1e7), thetas, (reference, labels))(x).probs
    torch.testing.assert_close(wide, each.mean((0, 1)).expand_as(wide), rtol=1e-10, atol=0)
    nearest = torch.cdist(x, reference).argmin(1)
    narrow = Purifier(model, Noise(3e-3), thetas, (reference, labels))(x).probs
    torch.testing.assert_close(narrow, each.mean(0)[nearest], rtol=1e-10, atol=0)


# --- 5: invariances -----------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["online", "offline"])
def test_invariant_to_order_duplicates_chunks_and_constants(
    update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, thetas = classifier()
    (reference, labels), x = data(), randn(6, 5, seed=9)
    channel = AttackChannel(one_step(L2(1.0)), 0.4)

    def gradient(purifier: Purifier) -> tuple[Tensor, Tensor]:
        at = x.clone().requires_grad_()
        probs = purifier(at).probs
        (found,) = torch.autograd.grad(probs[:, 0].log().sum(), at)
        return probs.detach(), found

    wanted = gradient(Purifier(model, channel, thetas, (reference, labels), update))
    order = torch.randperm(len(reference), generator=generator(3))
    shuffled = Purifier(model, channel, thetas, (reference[order], labels[order]), update)
    doubled = Purifier(model, channel, thetas, (reference.repeat(2, 1), labels.repeat(2)), update)

    class Lifted:  # all log-densities 1234 higher, through the path for densities of any kind
        def sample(self, *args: object, **kwargs: object) -> Tensor:
            raise NotImplementedError

        def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> object:
            inner = channel.density(predict, x, y)

            class Density:
                def log_prob(self, x_adv: Tensor) -> Tensor:
                    return inner.log_prob(x_adv) + 1234.0

            return Density()

    lifted = Purifier(model, Lifted(), thetas, (reference, labels), update)
    for purifier in (shuffled, doubled, lifted):
        for found, expected in zip(gradient(purifier), wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr("advbayes.purification.store._SMALL", 0)  # in blocks, and in small ones
    monkeypatch.setattr("advbayes.purification.banks._TILE", 1)
    monkeypatch.setattr("advbayes.purification.banks.FEWEST_ROWS", 7)
    for found, expected in zip(
        gradient(Purifier(model, channel, thetas, (reference, labels), update)), wanted, strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


# --- 6: far out, and out of support -------------------------------------------------------------


def test_images_with_log_densities_near_minus_5000_stay_finite() -> None:
    model = BayesianModel(nn.Linear(784, 3).to(FLOAT), Categorical())
    thetas = 0.05 * randn(3, model.num_params)
    reference = torch.rand(200, 784, dtype=FLOAT, generator=generator(1))
    x = (torch.rand(4, 784, dtype=FLOAT, generator=generator(2)) + 0.7).requires_grad_()
    purifier = Purifier(model, Noise(0.2), thetas, reference)
    density = Noise(0.2).density(model.at(thetas[0]), reference).log_prob(x)  # (N, B)
    assert -9000 < float(density.detach().max()) < -3000
    probs = purifier(x).probs
    wanted = density.softmax(0).T @ model.at_each(thetas)(reference).probs.mean(0)
    torch.testing.assert_close(probs, wanted, rtol=1e-9, atol=0)
    gradients = [torch.autograd.grad(p[:, 0].log().sum(), x)[0] for p in (probs, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-12)


class Window:
    """A channel that reaches no farther than 1 in any feature: minus infinity beyond."""

    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return x + 2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> Window.Density:
        return Window.Density(x)

    @dataclass(frozen=True)
    class Density:
        x: Tensor

        def log_prob(self, x_adv: Tensor) -> Tensor:
            away = (x_adv - self.x.unsqueeze(1)).abs().amax(-1)
            return torch.log1p(-away.clamp_max(1.0))


@pytest.mark.parametrize("update", ["online", "offline"])
def test_out_of_support_is_flagged_and_finite(update: str) -> None:
    model, thetas = classifier()
    reference, _ = data()
    purifier = Purifier(model, Window(), thetas, reference, update)
    x = torch.cat([reference[:2] + 0.1, torch.full((2, 5), 50.0, dtype=FLOAT)]).requires_grad_()
    diagnosis = purifier.diagnose(x.detach())
    assert diagnosis.out_of_support.tolist() == [False, False, True, True]
    assert not any(bool(torch.isnan(value).any()) for value in vars(diagnosis).values())
    assert bool((diagnosis.log_evidence[2:] == -math.inf).all())
    probs = purifier(x).probs
    blind = model.at_each(thetas)(reference).probs.mean((0, 1))  # nothing known: the plain average
    torch.testing.assert_close(probs[2:], blind.expand(2, -1), rtol=1e-10, atol=0)
    (gradient,) = torch.autograd.grad(probs[:, 0].log().sum(), x)
    assert bool(torch.isfinite(gradient).all())
    assert bool((gradient[2:] == 0).all())
    assert float(gradient[:2].abs().max()) > 0


# --- 7: the smoothing limit ---------------------------------------------------------------------


class Probit:
    """P(class 0) = Phi(w.x + b); `hard` makes it a decision."""

    def __init__(self, w: Tensor, b: float, hard: bool = False) -> None:
        self.w, self.b, self.hard = w, b, hard

    def __call__(self, x: Tensor) -> CategoricalDistribution:
        score = x @ self.w + self.b
        p = (score > 0).to(x.dtype) if self.hard else torch.special.ndtr(score)
        return CategoricalDistribution(probs=torch.stack([p, 1 - p], -1), validate_args=False)


def test_smoothed_probit_is_a_probit() -> None:
    w, b, sigma = torch.tensor([0.8, -1.1], dtype=FLOAT), 0.2, 0.7
    x = randn(4, 2, seed=5)
    wanted = torch.special.ndtr((x @ w + b) / math.sqrt(1 + sigma**2 * float(w @ w)))
    smoothed = Smoothed(Probit(w, b), sigma, num=40_000)
    found = smoothed(x).probs[:, 0]
    spread = 0.5 / math.sqrt(smoothed.num)  # a probability's draws differ by at most 1
    assert float((found - wanted).abs().max()) < 4.9 * spread
    # The purifier of a nearly flat reference set is the smoothed predictor.
    grid = torch.linspace(-9, 9, 181, dtype=FLOAT)
    reference = torch.cartesian_prod(grid, grid)
    linear = BayesianModel(nn.Linear(2, 2).to(FLOAT), Categorical())
    theta = torch.tensor([[0.8, -1.1, -0.8, 1.1, 0.2, -0.2]], dtype=FLOAT)
    purified = Purifier(linear, Noise(sigma), theta, reference)(x).probs[:, 0]
    exact = torch.stack([_smooth(linear.at(theta[0]), point, sigma) for point in x])
    torch.testing.assert_close(purified, exact, rtol=1e-8, atol=0)


def _smooth(predict: Predictor, point: Tensor, sigma: float) -> Tensor:
    """The Gaussian average by the trapezoid rule, which is spectrally exact here."""
    grid = torch.linspace(-8, 8, 161, dtype=FLOAT)
    z = torch.cartesian_prod(grid, grid)
    weights = torch.softmax(-0.5 * z.square().sum(1), 0)
    return (weights * predict(point + sigma * z).probs[:, 0]).sum()


def test_certificate_approaches_the_margin_from_below() -> None:
    """With n votes for the class, Binomial(n, Phi(margin / sigma)): the bound at five standard
    deviations either way."""
    w, b, sigma, alpha, num = torch.tensor([3.0, 4.0], dtype=FLOAT), 0.5, 0.5, 1e-6, 200_000
    x = torch.tensor([0.1, 0.05], dtype=FLOAT)
    margin = float(x @ w + b) / 5.0
    p = NormalDist().cdf(margin / sigma)
    spread = 5 * math.sqrt(num * p * (1 - p))  # false alarm 6e-7
    low, high = (
        clopper_pearson(round(num * p + d), num, level=1 - alpha, side="lower")[0]
        for d in (-spread, spread)
    )
    smoothed = Smoothed(Probit(w, b, hard=True), sigma)
    one = certify(smoothed, x.unsqueeze(0), n=num, alpha=alpha, generator=generator(0))
    assert low < float(one.lower) < high
    assert_exact(
        one.radii, torch.tensor([sigma * NormalDist().inv_cdf(float(one.lower))], dtype=FLOAT)
    )


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_certificates_exceed_the_margin_as_often_as_the_binomial_says(alpha: float) -> None:
    """The largest rate <= alpha that n votes allow: neither more often nor, by a padded bound, more
    rarely."""
    w, b, sigma, trials, num = torch.tensor([3.0, 4.0], dtype=FLOAT), 0.5, 0.5, 4000, 100
    x = torch.tensor([0.1, 0.05], dtype=FLOAT)
    margin = float(x @ w + b) / 5.0
    p = NormalDist().cdf(margin / sigma)
    masses = [math.comb(num, k) * p**k * (1 - p) ** (num - k) for k in range(num + 1)]
    tails = [math.fsum(masses[k:]) for k in range(num + 1)]
    rate = max(tail for tail in tails if tail <= alpha)
    smoothed = Smoothed(Probit(w, b, hard=True), sigma)
    many = certify(
        smoothed,
        x.expand(trials, 2),
        n0=100,
        n=num,
        alpha=alpha,
        generator=generator(1),
        batch=2000,
    )
    exceeded = int((many.lower > p).sum())
    # false alarm 6e-7
    assert abs(exceeded - rate * trials) < 5 * math.sqrt(rate * (1 - rate) * trials)
    assert torch.equal(many.lower > p, many.radii > margin)


def test_a_certificate_s_draws_are_all_its_own() -> None:
    """n0 draws choose the class, n others bound its share: no noise is used twice, none is shared
    by two inputs. The inputs themselves are asked about as well, whether the answer is random."""
    asked: list[Tensor] = []

    def predict(x: Tensor) -> torch.distributions.Categorical:
        asked.append(x)
        return torch.distributions.Categorical(
            logits=torch.stack([x[:, 0], -x[:, 0]], 1), validate_args=False
        )

    certify(
        Smoothed(predict, 0.5),
        torch.zeros(3, 2, dtype=FLOAT),
        n0=500,
        n=2000,
        generator=generator(0),
        batch=2,
    )
    rows = torch.cat(asked)
    noisy = rows[(rows != 0).any(1)]
    assert len(noisy) == len(noisy.unique(dim=0)) == 3 * 2500

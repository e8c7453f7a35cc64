"""The proactive defense against its closed forms (identities 8 to 15), on linear-Gaussian models in
float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Ensemble,
    Gaussian,
    HeteroscedasticGaussian,
    LowRank,
    MeanField,
    Mixture,
    Noise,
    PointMass,
    PosteriorPredictive,
    Trades,
    fit,
    nll,
    one_step,
)
from advbayes.seeds import generator_for
from advbayes.training.batches import Batch
from advbayes.training.steps import adam_for, eager_step
from advbayes.types import Channel
from tests.oracles import (
    FLOAT,
    AffineChannel,
    LinearGaussian,
    LinearRegression,
    ShiftChannel,
    assert_exact,
    generator,
    mean_test,
    normal_kl,
    normal_log_prob,
    randn,
    worst_inputs,
    worst_squared_error,
)

BOUNDS = ("surrogate", "importance_weighted")


def linear_model(dim: int, scale: float = 1.0, prior_scale: float = 1.0) -> BayesianModel:
    """y ~ N(theta.x, scale^2)."""
    return BayesianModel(
        nn.Linear(dim, 1, bias=False, dtype=FLOAT), Gaussian(scale), prior_scale=prior_scale
    )


def mean_field(model: BayesianModel, mean: Tensor, scale: Tensor) -> MeanField:
    posterior = MeanField(model)
    with torch.no_grad():
        posterior.mu.copy_(mean)
        posterior.rho.copy_(torch.log(torch.expm1(scale)))
    return posterior


def point_mass(model: BayesianModel, theta: Tensor) -> PointMass:
    return PointMass(model, init=theta)


def copies(x: Tensor, y: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """One data point, `num` times: the channel draws for every copy anew."""
    return x.expand(num, -1).contiguous(), y.expand(num).contiguous()


# --- 8: SM-2 ------------------------------------------------------------------------------------

SM2 = LinearGaussian()
SM2_X, SM2_Y = torch.tensor([[SM2.x1]], dtype=FLOAT), torch.tensor([SM2.y1], dtype=FLOAT)
SM2_CHANNEL = AffineChannel(SM2.eps, SM2.sd)


def log_likelihoods(
    objective: ChannelELBO,
    model: BayesianModel,
    thetas: Tensor,
    channel: Channel,
    x: Tensor,
    y: Tensor,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:  # (S, K, B)
    x_adv = objective.corrupt(model, thetas, channel, x, y, generator=generator)
    return objective._score(model, thetas, x_adv, y)


def sm2_log_likelihoods(thetas: Tensor, num: int, source: torch.Generator) -> Tensor:  # (num, S)
    objective = ChannelELBO(num_data=num)
    model = linear_model(1, SM2.sy, SM2.st)
    x, y = copies(SM2_X, SM2_Y, num)
    log_p = log_likelihoods(objective, model, thetas, SM2_CHANNEL, x, y, generator=source)
    assert log_p.shape == (len(thetas), 1, num)
    return log_p[:, 0].T


def test_8_channel_marginalised_likelihood() -> None:
    thetas = torch.tensor([[-0.7], [0.4], [1.5]], dtype=FLOAT)
    expected = SM2.log_marginal(thetas[:, 0]).exp()
    assert mean_test(
        lambda n, g: sm2_log_likelihoods(thetas, n, g).exp(), expected, resolution=2e-3 * expected
    )
    surrogate = SM2.mean_log_likelihood(thetas[:, 0])
    assert bool((surrogate < SM2.log_marginal(thetas[:, 0])).all())
    assert mean_test(lambda n, g: sm2_log_likelihoods(thetas, n, g), surrogate, resolution=2e-2)


def test_8_proactive_posterior_moments() -> None:
    """E over prior and channel of (t - mean) p, ((t - mean)^2 - variance) p is zero at the
    posterior's moments."""
    posterior = SM2.proactive_posterior
    grid = torch.linspace(-8 * SM2.st, 8 * SM2.st, 129, dtype=FLOAT)
    weights = normal_log_prob(grid, 0.0, SM2.st**2).exp() * (grid[1] - grid[0])
    z = math.exp(posterior.log_z)

    def draw(mean: float, variance: float, num: int, source: torch.Generator) -> Tensor:
        weighted = weights * sm2_log_likelihoods(grid[:, None], num, source).exp() / z  # (num, S)
        gap = grid - mean
        return torch.stack([weighted.sum(1), weighted @ gap, weighted @ (gap**2 - variance)], 1)

    expected = torch.tensor([1.0, 0.0, 0.0], dtype=FLOAT)
    moments = posterior.mean, posterior.variance
    assert mean_test(lambda n, g: draw(*moments, n, g), expected, resolution=2e-3)
    # and the clean posterior's moments are not those of the proactive one
    assert not mean_test(lambda n, g: draw(SM2.mu, SM2.v, n, g), expected, resolution=2e-3)


@pytest.mark.parametrize("update", ["online", "offline"])
def test_8_the_two_defenses_differ(update: str) -> None:
    """Var_re(0) - Var_pr(0) = tau2 (mu^2 + v), with tau2 of a flat covariate law (the reference is
    a uniform grid)."""
    from advbayes import Purifier

    thetas = SM2.mu + math.sqrt(SM2.v) * randn(5, 1, seed=1)
    model = linear_model(1, SM2.sy)
    reference = torch.linspace(-12, 12, 1201, dtype=FLOAT)[:, None]
    purified = Purifier(
        model, SM2_CHANNEL, thetas, reference=(reference, reference[:, 0]), update=update
    )
    zero = torch.zeros(1, 1, dtype=FLOAT)
    proactive = PosteriorPredictive(model, thetas)(zero).variance
    assert_exact(proactive, torch.full((1,), SM2.sy**2, dtype=FLOAT))
    tau2 = SM2.sd**2 / (1 + SM2.eps) ** 2
    assert_exact(purified(zero).variance - proactive, tau2 * (thetas**2).mean().reshape(1))


# --- 9: the one-step channel on a linear-Gaussian model -----------------------------------------

THETA = torch.tensor([0.6, -1.1, 0.3, 0.8], dtype=FLOAT)
X, Y = randn(3, 4, seed=2), torch.tensor([1.4, -2.0, 0.1], dtype=FLOAT)
EPS, SCALE, SIGMA = 0.5, 0.9, 0.3


def surrogate_terms(theta: Tensor, sigma: float) -> Tensor:  # (B,)
    worst = worst_squared_error(theta, X, Y, EPS)
    return -0.5 * math.log(2 * math.pi * SCALE**2) - (worst + sigma**2 * theta.dot(theta)) / (
        2 * SCALE**2
    )


def exact_terms(theta: Tensor, sigma: float) -> Tensor:  # (B,)
    worst = worst_squared_error(theta, X, Y, EPS).sqrt()
    return normal_log_prob(worst, 0.0, SCALE**2 + sigma**2 * theta.dot(theta))


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("bound", BOUNDS)
def test_9_one_step_without_noise(bound: str, through: bool) -> None:
    model, channel = linear_model(4, SCALE), AttackChannel(one_step(L2(EPS)), 0.0)
    objective = ChannelELBO(num_data=3, num_channel=2, bound=bound, through=through)
    thetas = THETA[None].clone().requires_grad_()
    log_p = log_likelihoods(objective, model, thetas, channel, X, Y)
    assert log_p.shape == (1, 2, 3)
    terms = objective.reduce(log_p)[0]
    theta = THETA.clone().requires_grad_()
    expected = surrogate_terms(theta, 0.0)
    assert_exact(terms, expected)
    assert_exact(expected, exact_terms(theta, 0.0))
    (gradient,) = torch.autograd.grad(terms.sum(), thetas)
    (wanted,) = torch.autograd.grad(expected.sum(), theta)
    assert_exact(gradient[0], wanted)


@pytest.mark.parametrize("point", range(3))
def test_9_one_step_with_noise(point: int) -> None:
    """The mean of log p is the surrogate's term, the mean of p the exact one's."""
    model, channel = linear_model(4, SCALE), AttackChannel(one_step(L2(EPS)), SIGMA)
    objective = ChannelELBO(num_data=1)

    def draw(num: int, source: torch.Generator) -> Tensor:
        log_p = log_likelihoods(
            objective,
            model,
            THETA[None],
            channel,
            *copies(X[point], Y[point], num),
            generator=source,
        )
        return torch.stack([log_p[0, 0], log_p[0, 0].exp()], 1)

    exact = exact_terms(THETA, SIGMA)[point].exp()
    expected = torch.stack([surrogate_terms(THETA, SIGMA)[point], exact])
    assert mean_test(draw, expected, resolution=torch.stack([torch.tensor(5e-3), 5e-3 * exact]))


@pytest.mark.parametrize("through", [False, True])
def test_9_gradient_with_noise(through: bool) -> None:
    model, channel = linear_model(4, SCALE), AttackChannel(one_step(L2(EPS)), SIGMA)
    objective = ChannelELBO(num_data=1, through=through)
    x, y = copies(X[0], Y[0], 64)

    def draw(num: int, source: torch.Generator) -> Tensor:
        gradients = []
        for _ in range(num):
            thetas = THETA[None].clone().requires_grad_()
            log_p = log_likelihoods(objective, model, thetas, channel, x, y, generator=source)
            gradients.append(torch.autograd.grad(objective.reduce(log_p).mean(), thetas)[0][0])
        return torch.stack(gradients)

    theta = THETA.clone().requires_grad_()
    (expected,) = torch.autograd.grad(surrogate_terms(theta, SIGMA)[0], theta)
    assert mean_test(draw, expected, resolution=0.01, num=256, max_num=4096)


# --- 10: the order of the bounds ----------------------------------------------------------------


def mixed_channel() -> Mixture:
    return Mixture([0.4, 0.6], [Noise(0.2), AttackChannel(one_step(L2(1.0), nll), sigma=0.2)])


@pytest.mark.parametrize(
    "channel",
    [Noise(0.3), AttackChannel(one_step(L2(1.0)), 0.3), AffineChannel(0.2, 0.3), mixed_channel()],
)
def test_10_bounds_are_ordered_sample_by_sample(channel: Channel) -> None:
    model, num = linear_model(4, SCALE), 64
    tight = ChannelELBO(num_data=3, num_channel=num, bound="importance_weighted")
    loose = ChannelELBO(num_data=3, num_channel=num, bound="surrogate")
    thetas = torch.stack([THETA, -0.5 * THETA])
    log_p = log_likelihoods(tight, model, thetas, channel, X, Y, generator=generator(3))
    assert log_p.shape == (2, num, 3)
    assert len(log_p[0, :, 0].unique()) == num, "every channel sample must be drawn anew"
    sizes = (1, 2, 4, 8, 16, 32, 64)
    values = [
        torch.stack([tight.reduce(block) for block in log_p.split(size, 1)]).mean(0)
        for size in sizes
    ]
    assert_exact(values[0], loose.reduce(log_p))
    for lower, upper in itertools.pairwise(values):
        assert bool((lower < upper).all())
    assert_exact(values[-1], torch.log(log_p.exp().mean(1)))


def test_10_expected_bounds_rise_to_the_exact_term() -> None:
    """A channel with two outcomes: all 2^K samples can be enumerated, so the expectations are
    exact."""
    model = linear_model(4, SCALE)
    y = X[:1] @ THETA + 2.0  # so far off that the outcomes differ, whatever x is
    two = torch.stack([model.at(THETA)(X[:1] + shift).log_prob(y)[0] for shift in (-0.4, 0.4)])
    assert float((two[0] - two[1]).abs()) > 0.5
    exact = float(torch.logsumexp(two, 0) - math.log(2))
    loose = float(two.mean())
    expected = [loose]
    for k in range(1, 9):
        outcomes = torch.cartesian_prod(*[two] * k).reshape(-1, k)  # (2^k, k)
        objective = ChannelELBO(num_data=1, num_channel=k, bound="importance_weighted")
        expected.append(float(objective.reduce(outcomes.T[None].contiguous()).mean()))
    assert expected[0] == pytest.approx(expected[1], rel=1e-12)
    assert all(a < b for a, b in itertools.pairwise(expected[1:]))
    assert expected[-1] < exact
    assert exact - expected[-1] < 0.2 * (exact - loose)


def test_10_one_channel_sample_is_the_surrogate_bit_for_bit() -> None:
    model = linear_model(4, SCALE)
    results = []
    for bound in BOUNDS:
        posterior = mean_field(model, THETA, torch.full((4,), 0.3, dtype=FLOAT))
        objective = ChannelELBO(num_data=30, num_theta=3, num_channel=1, bound=bound)
        terms = objective(model, posterior, mixed_channel(), X, Y, generator=generator(4))
        terms.bound.backward()
        results.append((terms.bound, posterior.mu.grad, posterior.rho.grad))
    for loose, tight in zip(*results, strict=True):
        assert torch.equal(loose, tight)


# --- 11: SM-4's estimator -----------------------------------------------------------------------


@pytest.mark.parametrize("through", [False, True])
def test_11_weighted_estimator_is_the_gradient_of_log_mean_exp(through: bool) -> None:
    model = linear_model(4, SCALE)
    objective = ChannelELBO(num_data=3, num_channel=5, bound="importance_weighted", through=through)
    thetas = torch.stack([THETA, 0.3 * THETA]).requires_grad_()
    log_p = log_likelihoods(objective, model, thetas, mixed_channel(), X, Y, generator=generator(5))
    automatic = torch.autograd.grad(objective.reduce(log_p).sum(), thetas, retain_graph=True)[0]
    weights = torch.softmax(log_p.detach(), 1)
    assert float(weights.max()) > 0.3, "the weights must matter"
    by_hand = sum(
        weights[s, k, b] * torch.autograd.grad(log_p[s, k, b], thetas, retain_graph=True)[0]
        for s in range(2)
        for k in range(5)
        for b in range(3)
    )
    assert_exact(automatic, by_hand)


def test_11_the_whole_gradient_of_a_minibatch() -> None:
    """N/(|B| S) sum_s sum_i g_is minus the KL's gradient, in mu and rho, from one batch."""
    model = linear_model(4, SCALE, prior_scale=0.7)
    scale = torch.tensor([0.2, 0.3, 0.4, 0.5], dtype=FLOAT)
    posterior = mean_field(model, THETA, scale)
    objective = ChannelELBO(num_data=30, num_theta=4, num_channel=2, bound="importance_weighted")
    terms = objective(model, posterior, AffineChannel(0.2, 0.0), X, Y, generator=generator(6))
    terms.bound.backward()
    # the thetas are the only thing random here: draw them again
    thetas = posterior.rsample(4, generator=generator(6)).detach()
    x_adv = 1.2 * X
    residual = Y - thetas @ x_adv.T  # (S, B)
    value = normal_log_prob(residual, 0.0, SCALE**2)
    assert_exact(terms.log_likelihood, 10 * value.mean(0).sum())
    # (S, d): the gradient at each theta
    per_theta = 10 * (residual[:, :, None] * x_adv).sum(1) / SCALE**2
    to_scale = torch.sigmoid(posterior.rho.detach())
    noise = (thetas - THETA) / scale
    grad_mu = per_theta.mean(0) - THETA / 0.7**2
    grad_rho = ((per_theta * noise).mean(0) - scale / 0.7**2 + 1 / scale) * to_scale
    assert_exact(posterior.mu.grad, grad_mu)
    assert_exact(posterior.rho.grad, grad_rho)


LIKELIHOODS = {
    "classes": (Categorical(), 3),
    "fixed scale": (Gaussian(0.7), 1),
    "learned scale": (Gaussian(0.7, learned=True), 1),
    "two outputs": (Gaussian(0.7), 2),
    "heteroscedastic": (HeteroscedasticGaussian(), 2),
}
POSTERIORS = {
    "mean field": lambda model: MeanField(model, init_scale=0.2),
    "low rank": lambda model: LowRank(model, rank=2, init_scale=0.2),
    "ensemble": lambda model: Ensemble(model, 3),
    "point": PointMass,
}


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_11_the_gradient_that_fit_uses_is_that_of_the_bound(
    likelihood: str, posterior: str
) -> None:
    """The norm that a step of `fit` reports, and where Adam goes, against autograd of -bound/N."""
    kind, outputs = LIKELIHOODS[likelihood]
    net = nn.Sequential(nn.Linear(4, 5, dtype=FLOAT), nn.Tanh(), nn.Linear(5, outputs, dtype=FLOAT))
    model = BayesianModel(net, kind, prior_scale=0.6)
    x = randn(7, 4, seed=60)
    y = randn(7, seed=61) if likelihood != "two outputs" else randn(7, 2, seed=61)
    y = (torch.arange(7) % 3) if likelihood == "classes" else y
    penalty = Trades(0.8) if likelihood == "classes" else None
    channel = AttackChannel(one_step(L2(0.5)), 0.2)
    for objective in (
        ChannelELBO(21, num_theta=3),
        ChannelELBO(21, num_theta=2, num_channel=3, kl_weight=0.4),
        ChannelELBO(21, num_theta=2, num_channel=3, bound="importance_weighted"),
        ChannelELBO(21, num_theta=2, num_channel=2, bound="importance_weighted", penalty=penalty),
    ):
        trained = POSTERIORS[posterior](model)
        terms = objective(model, trained, channel, x, y, generator=generator_for(0, "step", 0))
        wanted = torch.autograd.grad(-terms.bound / 21, list(trained.parameters()))
        step = eager_step(model, trained, channel, objective, adam_for(trained, 1e-3))
        before = [p.detach().clone() for p in trained.parameters()]
        numbers = step(Batch(x, y), generator_for(0, "step", 0), 1e-3)
        assert numbers[:4] == pytest.approx([term.item() for term in terms], rel=1e-10)
        assert numbers[4] == pytest.approx(
            math.hypot(*(float(g.norm()) for g in wanted)), rel=1e-10
        )
        for p, start, gradient in zip(
            trained.parameters(), before, wanted, strict=True
        ):  # Adam's first step is a sign
            moved = p.detach() - start
            assert_exact(moved, -1e-3 * gradient / (gradient.abs() + 1e-8))


def expected_gradient(
    num_channel: int, theta: float, x: float, y: float, scale: float, sigma: float
) -> float:
    """E of SM-4's estimator for one parameter and x' = x + N(0, sigma^2), by Gauss-Hermite over all
    K noises."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(48)
    grids = torch.cartesian_prod(*[torch.tensor(nodes, dtype=FLOAT)] * num_channel).reshape(
        -1, num_channel
    )
    mass = torch.cartesian_prod(*[torch.tensor(weights / weights.sum(), dtype=FLOAT)] * num_channel)
    mass = mass.reshape(-1, num_channel).prod(1)
    x_adv = x + sigma * grids
    residual = y - theta * x_adv
    share = torch.softmax(-0.5 * residual**2 / scale**2, 1)
    return float((mass * (share * residual * x_adv / scale**2).sum(1)).sum())


def test_11_bias_depends_on_the_channel_samples_alone() -> None:
    theta, x, y, scale, sigma = 1.0, 0.5, 1.5, 0.6, 0.8
    t = torch.tensor(theta, dtype=FLOAT, requires_grad=True)
    exact = normal_log_prob(torch.tensor(y), t * x, scale**2 + t**2 * sigma**2)
    (exact_gradient,) = torch.autograd.grad(exact, t)
    gradients = {k: expected_gradient(k, theta, x, y, scale, sigma) for k in (1, 2, 3)}
    bias = {k: gradients[k] - float(exact_gradient) for k in gradients}
    assert abs(bias[1]) > abs(bias[2]) > abs(bias[3]) > 0.02

    model, posterior = (
        linear_model(1, scale),
        point_mass(linear_model(1, scale), torch.tensor([theta], dtype=FLOAT)),
    )
    inputs, targets = copies(torch.tensor([x], dtype=FLOAT), torch.tensor(y, dtype=FLOAT), 128)
    for num_theta in (1, 4):
        objective = ChannelELBO(1, num_theta, 2, bound="importance_weighted", kl_weight=0.0)

        def draw(num: int, source: torch.Generator, objective: ChannelELBO = objective) -> Tensor:
            gradients = []
            for _ in range(num):
                terms = objective(model, posterior, Noise(sigma), inputs, targets, generator=source)
                gradients.append(torch.autograd.grad(terms.bound, posterior.theta)[0])
            return torch.cat(gradients)

        verdict = mean_test(draw, gradients[2], resolution=0.01, num=256, max_num=4096)
        assert verdict
        assert abs(float(verdict.mean) - float(exact_gradient)) > 0.5 * abs(bias[2])


# --- 12: the surrogate's optimum ----------------------------------------------------------------

DESIGN = randn(12, 3, seed=7)
REGRESSION = LinearRegression(
    DESIGN,
    DESIGN @ torch.tensor([1.0, -0.5, 0.3], dtype=FLOAT) + 0.5 * randn(12, seed=8),
    0.5,
    1.2,
    1.0,
    0.15,
)


def test_12_oracle_identity() -> None:
    """surrogate(q) = log Z - KL(q, q*), with both sides written apart."""
    for seed in range(3):
        mean, scale = randn(3, seed=seed), randn(3, seed=seed + 10).exp()
        for gain in (1.0, 1.3):
            case = LinearRegression(REGRESSION.x, REGRESSION.y, 0.5, 1.2, gain, 0.15)
            left = case.surrogate(mean, scale)
            assert_exact(left, case.log_z - case.kl_to_optimum(mean, scale))


@pytest.mark.parametrize("gain", [1.0, 1.3])
def test_12_surrogate_is_log_z_minus_kl(gain: float) -> None:
    case = LinearRegression(REGRESSION.x, REGRESSION.y, 0.5, 1.2, gain, 0.15)
    channel = Noise(0.15) if gain == 1.0 else AffineChannel(gain - 1, 0.15)
    model = linear_model(3, 0.5, 1.2)
    mean, scale = (
        torch.tensor([0.7, -0.2, 0.1], dtype=FLOAT),
        torch.tensor([0.3, 0.2, 0.15], dtype=FLOAT),
    )
    posterior = mean_field(model, mean, scale)
    objective = ChannelELBO(num_data=12, num_theta=64)
    kl = posterior.kl(1.2).detach()

    def draw(num: int, source: torch.Generator) -> Tensor:
        values = []
        for _ in range(num // 64):
            thetas = posterior.sample(64, generator=source)
            log_p = log_likelihoods(
                objective, model, thetas, channel, case.x, case.y, generator=source
            )
            values.append(objective.reduce(log_p).sum(1) - kl)
        return torch.cat(values)

    expected = case.log_z - float(case.kl_to_optimum(mean, scale))
    assert mean_test(draw, expected, resolution=0.1)

    def whole(num: int, source: torch.Generator) -> Tensor:
        terms = [
            objective(model, posterior, channel, case.x, case.y, generator=source)
            for _ in range(num)
        ]
        return torch.stack([term.bound for term in terms])

    assert mean_test(whole, expected, resolution=0.2, num=64, max_num=1024)


def test_12_gradient_of_the_surrogate() -> None:
    model = linear_model(3, 0.5, 1.2)
    mean, scale = (
        torch.tensor([0.7, -0.2, 0.1], dtype=FLOAT),
        torch.tensor([0.3, 0.2, 0.15], dtype=FLOAT),
    )
    posterior = mean_field(model, mean, scale)
    objective = ChannelELBO(num_data=12, num_theta=32)

    def draw(num: int, source: torch.Generator) -> Tensor:
        gradients = []
        for _ in range(num):
            terms = objective(
                model, posterior, Noise(0.15), REGRESSION.x, REGRESSION.y, generator=source
            )
            gradients.append(
                torch.cat(torch.autograd.grad(terms.bound, [posterior.mu, posterior.rho]))
            )
        return torch.stack(gradients)

    rho = posterior.rho.detach().clone().requires_grad_()
    mu = mean.clone().requires_grad_()
    closed = REGRESSION.surrogate(mu, nn.functional.softplus(rho))
    expected = torch.cat(torch.autograd.grad(closed, [mu, rho]))
    assert mean_test(draw, expected, resolution=0.3, num=256, max_num=2048)


class Columns(nn.Module):
    """Many one-parameter regressions side by side: output j is weight_j x_j."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num, dtype=FLOAT))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_12_variational_inference_reaches_the_optimum() -> None:
    """Within 1 % of a standard deviation, in mean and scale; a thousand runs in one average the
    last steps' noise out."""
    num, noise = 1000, 0.15
    x = randn(12, 3, seed=7) * torch.tensor([0.4, 0.8, 1.2], dtype=FLOAT)
    y = x * torch.tensor([1.0, -0.5, 0.3], dtype=FLOAT) + 0.5 * randn(12, 3, seed=8)
    cases = [LinearRegression(x[:, i : i + 1], y[:, i], 0.5, 1.2, noise=noise) for i in range(3)]
    mean = torch.cat([case.mean for case in cases])[:, None]
    sd = torch.cat([case.covariance[0] for case in cases]).sqrt()[:, None]
    model = BayesianModel(Columns(3 * num), Gaussian(0.5), prior_scale=1.2)
    posterior = MeanField(model, init_scale=0.1)
    data = (x.repeat_interleave(num, 1), y.repeat_interleave(num, 1))
    steps, first, last = 1000, 0.05, 0.001
    decay = (last / first) ** (2 / steps)  # two batches a pass
    fit(model, posterior, Noise(noise), data, steps=steps, batch_size=6, lr=first, decay=decay)
    means, scales = (
        (posterior.mean.view(3, num) - mean) / sd,
        posterior.scale.detach().view(3, num) / sd - 1,
    )
    assert float(means.mean(1).abs().max()) < 0.01
    assert float(scales.mean(1).abs().max()) < 0.01
    # and no single run is far off
    assert float(means.std(1).max()) < 0.1
    assert float(scales.std(1).max()) < 0.1


# --- 13: the KL ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prior_scale", [1.0, 0.6])
def test_13_kl_of_the_mean_field(prior_scale: float) -> None:
    net = nn.Sequential(nn.Linear(3, 5, dtype=FLOAT), nn.ReLU(), nn.Linear(5, 4, dtype=FLOAT))
    model = BayesianModel(net, Categorical(), prior_scale=prior_scale)
    num = sum(p.numel() for p in net.parameters())
    assert model.num_params == num
    mean, scale = randn(num, seed=9) + 0.05, (0.5 * randn(num, seed=10)).exp()
    posterior = mean_field(model, mean, scale)
    kl = posterior.kl(prior_scale)
    assert kl.shape == ()
    assert_exact(kl, normal_kl(mean, scale**2, 0.0, prior_scale**2).sum())
    if prior_scale == 1.0:
        by_hand = 0.5 * (scale**2 + mean**2 - 1 - torch.log(scale**2)).sum()
        assert_exact(kl, by_hand)
    grad_mu, grad_rho = torch.autograd.grad(kl, [posterior.mu, posterior.rho])
    assert_exact(grad_mu, mean / prior_scale**2)
    # sigmoid(rho) = 1 - exp(-scale)
    by_hand = (scale / prior_scale**2 - 1 / scale) * -torch.expm1(-scale)
    assert_exact(grad_rho, by_hand)
    assert bool((grad_mu != 0).all())
    assert bool((grad_rho != 0).all())


def test_13_the_objective_uses_the_models_prior() -> None:
    model = linear_model(4, SCALE, prior_scale=0.6)
    scale = torch.full((4,), 0.3, dtype=FLOAT)
    posterior = mean_field(model, THETA, scale)
    for weight in (1.0, 0.25):
        objective = ChannelELBO(num_data=50, kl_weight=weight)
        terms = objective(model, posterior, Noise(0.0), X, Y, generator=generator(11))
        assert_exact(terms.kl, normal_kl(THETA, scale**2, 0.0, 0.36).sum())
        assert_exact(terms.bound, terms.log_likelihood - weight * terms.kl - terms.penalty)
        assert float(terms.penalty) == 0


# --- 14: minibatches ----------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 4, 4), (12,), (1, 3, 8)])
@pytest.mark.parametrize("attacked", [False, True])
def test_14_minibatch_gradients_average_to_the_full_one(
    sizes: tuple[int, ...], attacked: bool
) -> None:
    model = linear_model(3, 0.5, 1.2)
    channel = AttackChannel(one_step(L2(0.3)), 0.0) if attacked else Noise(0.0)
    posterior = mean_field(model, randn(3, seed=12), torch.full((3,), 0.2, dtype=FLOAT))
    objective = ChannelELBO(num_data=12, num_theta=2)

    def value_and_gradient(x: Tensor, y: Tensor) -> Tensor:
        # the same generator gives the same thetas, and nothing else is random
        terms = objective(model, posterior, channel, x, y, generator=generator(13))
        gradient = torch.autograd.grad(terms.bound, [posterior.mu, posterior.rho])
        return torch.cat([terms.bound.detach()[None], terms.kl.detach()[None], *gradient])

    full = value_and_gradient(REGRESSION.x, REGRESSION.y)
    parts = zip(REGRESSION.x.split(sizes), REGRESSION.y.split(sizes), strict=True)
    average = sum(len(y) / 12 * value_and_gradient(x, y) for x, y in parts)
    assert_exact(average, full)
    # KL counted once: the full batch's gradient by hand
    thetas = posterior.rsample(2, generator=generator(13)).detach()
    gradient = torch.zeros(3, dtype=FLOAT)
    for theta in thetas:
        x = worst_inputs(theta, REGRESSION.x, REGRESSION.y, 0.3) if attacked else REGRESSION.x
        gradient += ((REGRESSION.y - x @ theta)[:, None] * x).sum(0) / 0.25 / 2
    assert_exact(full[2:5], gradient - posterior.mu.detach() / 1.44)


# --- 15: through the channel or not -------------------------------------------------------------


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("through", [False, True])
def test_15_gradient_through_a_shift_channel(through: bool, bound: str) -> None:
    c, scale = 0.7, 0.9
    x, y = randn(6, 1, seed=14), randn(6, seed=15)
    model = linear_model(1, scale)
    objective = ChannelELBO(num_data=6, num_channel=2, bound=bound, through=through)
    thetas = torch.tensor([[0.8], [-1.3]], dtype=FLOAT, requires_grad=True)
    log_p = log_likelihoods(objective, model, thetas, ShiftChannel(c), x, y)
    (gradient,) = torch.autograd.grad(objective.reduce(log_p).sum(), thetas)
    theta = thetas.detach()
    residual = y - (theta * (x[:, 0] + c * theta))  # (S, B)
    inner = x[:, 0] + (2 if through else 1) * c * theta
    assert_exact(gradient[:, 0], (residual * inner).sum(1) / scale**2)


@pytest.mark.parametrize("through", [False, True])
def test_15_the_objective_has_the_same_gradient(through: bool) -> None:
    c, scale, theta = 0.7, 0.9, 0.8
    x, y = randn(6, 1, seed=14), randn(6, seed=15)
    model = linear_model(1, scale)
    posterior = point_mass(model, torch.tensor([theta], dtype=FLOAT))
    objective = ChannelELBO(num_data=18, num_theta=2, through=through, kl_weight=0.0)
    terms = objective(model, posterior, ShiftChannel(c), x, y, generator=generator(0))
    (gradient,) = torch.autograd.grad(terms.bound, posterior.theta)
    residual = y - theta * (x[:, 0] + c * theta)
    inner = x[:, 0] + (2 if through else 1) * c * theta
    assert_exact(gradient, 3 * (residual * inner).sum().reshape(1) / scale**2)


@pytest.mark.parametrize("through", [False, True])
def test_15_fit_follows_the_gradient_it_is_told_to(through: bool) -> None:
    """The two gradients vanish at different thetas; each fit ends at its own."""
    c, scale = 0.7, 0.9
    # no draws: where residuals happened to sum to nothing, both gradients would vanish together
    x = torch.tensor([[0.2], [0.5], [0.8], [1.1], [1.6], [2.4]], dtype=FLOAT)
    y = torch.tensor([2.2, 0.4, 1.9, 2.5, 1.2, 1.8], dtype=FLOAT)
    model = linear_model(1, scale)
    posterior = point_mass(model, torch.tensor([0.3], dtype=FLOAT))
    objective = ChannelELBO(num_data=6, through=through, kl_weight=0.0)
    for lr in (3e-2, 3e-3, 3e-4):
        fit(
            model,
            posterior,
            ShiftChannel(c),
            (x, y),
            objective=objective,
            steps=150,
            batch_size=6,
            lr=lr,
        )
    theta = posterior.theta.detach()
    residual = y - theta * (x[:, 0] + c * theta)
    own, other = (
        (residual * (x[:, 0] + factor * c * theta)).sum()
        for factor in ((2, 1) if through else (1, 2))
    )
    assert abs(float(own)) < 1e-3
    assert abs(float(other)) > 0.1


def test_15_at_the_worst_case_both_agree() -> None:
    model, channel = linear_model(4, SCALE), AttackChannel(one_step(L2(EPS)), 0.0)
    x_adv = worst_inputs(THETA, X, Y, EPS)
    expected = ((Y - x_adv @ THETA)[:, None] * x_adv).sum(0) / SCALE**2
    for through in (False, True):
        objective = ChannelELBO(num_data=3, through=through)
        thetas = THETA[None].clone().requires_grad_()
        log_p = log_likelihoods(objective, model, thetas, channel, X, Y)
        (gradient,) = torch.autograd.grad(objective.reduce(log_p).sum(), thetas)
        assert_exact(gradient[0], expected)

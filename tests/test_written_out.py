"""The formulas written out once more in plain code, example by example: the bound with all its
settings, divergences, losses, densities, architectures, the progress line."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

from advbayes import (
    APGD,
    L2,
    PGD,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Ensemble,
    Gaussian,
    GaussianMixture,
    HardLabel,
    HeteroscedasticGaussian,
    Learned,
    Linf,
    LogitPairing,
    LowRank,
    MeanField,
    MinimumNorm,
    Mixture,
    Noise,
    PointMass,
    RandomSearch,
    Samples,
    Square,
    Trades,
    dlr,
    entropy,
    entropy_pgd,
    margin,
    nll,
    one_step,
    pgd,
    pgd_plus,
    strong_suite,
)
from advbayes.attacks import (
    Exceeding,
    MarginTo,
    MeanAlong,
    MeanOf,
    PerExample,
    Toward,
    ball_of,
    deflate_variance,
    inflate_variance,
    lower_mean,
    raise_mean,
    squared_error,
    steps_of,
)
from advbayes.attacks.ascent import step_length
from advbayes.attacks.balls import Ball
from advbayes.attacks.losses import num_rows
from advbayes.attacks.search import Best
from advbayes.channels.density import log_normal
from advbayes.networks import (
    ConvGenerator,
    FullyConnectedGenerator,
    conv_net,
    large_kernel_net,
    mlp,
    resnet18,
    wide_conv_net,
)
from advbayes.objectives import Penalty
from advbayes.posteriors import Posterior
from advbayes.progress import Progress
from advbayes.seeds import generator_for
from tests.oracles import FLOAT, generator, randn

# --- The bound ----------------------------------------------------------------------------------

# name -> likelihood, outputs of the net
LIKELIHOODS = {
    "classes": (Categorical(), 3),
    "fixed": (Gaussian(0.7), 1),
    "learned": (Gaussian((0.5, 0.9), learned=True, num_outputs=2), 2),
    "each": (Gaussian((0.5, 0.9), num_outputs=2), 2),
    "by input": (HeteroscedasticGaussian(min_scale=0.4), 4),
}


def output(theta: Tensor, x: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Of Linear(2, 3), Tanh, Linear(3, num) at one input, and what is left of theta."""
    sizes = [6, 3, 3 * num, num]
    w1, b1, w2, b2, rest = theta.split([*sizes, len(theta) - sum(sizes)])
    return w2.view(num, 3) @ torch.tanh(w1.view(3, 2) @ x + b1) + b2, rest


def plain(name: str, raw: Tensor, rest: Tensor) -> torch.distributions.Distribution:
    if name == "classes":
        return CategoricalDistribution(logits=raw)
    if name == "by input":
        return Independent(Normal(raw[:2], raw[2:].exp().clamp_min(0.4)), 1)
    scales = {"fixed": [0.7], "each": [0.5, 0.9]}
    scale = rest.exp() if name == "learned" else torch.tensor(scales[name], dtype=raw.dtype)
    return Independent(Normal(raw, scale), 1)


def divergence_from_prior(posterior: Posterior, t: float) -> Tensor:
    if isinstance(posterior, PointMass):
        return posterior.theta.square().sum() / (2 * t**2)
    if isinstance(posterior, Ensemble):
        return torch.stack([theta.square().sum() / (2 * t**2) for theta in posterior.thetas]).mean()
    assert isinstance(posterior, (MeanField, LowRank))
    variance = posterior.rho.exp().log1p().square()
    covariance = torch.diag(variance)
    if isinstance(posterior, LowRank):
        covariance = covariance + posterior.factor @ posterior.factor.T
    zero = torch.zeros_like(posterior.mu)
    prior = MultivariateNormal(zero, t**2 * torch.eye(len(zero), dtype=zero.dtype))
    return kl_divergence(MultivariateNormal(posterior.mu, covariance), prior)


POSTERIORS = {
    "mean field": lambda model: MeanField(model, 0.3),
    "low rank": lambda model: LowRank(model, 2, 0.3),
    "point": PointMass,
    "ensemble": lambda model: Ensemble(model, 3),
}
PENALTIES = (None, Trades(2.0), Trades(1.5, likelihood="clean"), LogitPairing(0.7))


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_bound_and_its_gradient_are_those_of_single_examples(name: str, kind: str) -> None:
    likelihood, num = LIKELIHOODS[name]
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, num)).to(FLOAT)
    model = BayesianModel(net, likelihood, prior_scale=1.7)
    posterior = POSTERIORS[kind](model)
    x, y = randn(4, 2), randn(4, num // 2 if name == "by input" else num, seed=1)
    labels = torch.tensor([0, 2, 1, 2])
    choices = itertools.product(
        (1, 3),
        (1, 2),
        ("surrogate", "importance_weighted"),
        PENALTIES,
        (1.0, 0.3),
        (None, (0.5, 2.0, 0.0)) if name == "classes" else (None,),
        (None, torch.tensor([0.0, 1.0, 2.5, 1.0], dtype=FLOAT)),
    )
    for settings in random.Random(f"{name} {kind}").sample(list(choices), 8):
        num_theta, num_channel, bound, penalty, kl_weight, class_weight, weight = settings
        objective = ChannelELBO(
            37, num_theta, num_channel, bound, penalty, kl_weight, class_weight=class_weight
        )
        thetas = posterior.rsample(num_theta, generator=generator(1))
        x_adv = randn(num_theta, num_channel, 4, 2, seed=2)
        targets = labels if name == "classes" else y
        terms = objective.terms(model, posterior, thetas, x, x_adv, targets, weight)
        log_likelihood, omega = torch.zeros((), dtype=FLOAT), torch.zeros((), dtype=FLOAT)
        for s, b in itertools.product(range(num_theta), range(4)):
            count = 1.0 if weight is None else float(weight[b])
            count *= 1.0 if class_weight is None else class_weight[int(labels[b])]
            clean = output(thetas[s], x[b], num)
            attacked = [output(thetas[s], x_adv[s, k, b], num) for k in range(num_channel)]
            scored = attacked
            if penalty is not None and penalty.likelihood == "clean":
                scored = [clean] * num_channel
            each = torch.stack([plain(name, *one).log_prob(targets[b]) for one in scored])
            row = each.mean() if bound == "surrogate" else each.exp().mean().log()
            log_likelihood = log_likelihood + count * 37 / 4 / num_theta * row
            for one in attacked:
                share = count * 37 / 4 / num_theta / num_channel
                omega = omega + share * written_penalty(name, penalty, clean, one)
        kl = divergence_from_prior(posterior, 1.7)
        wanted = (log_likelihood - kl_weight * kl - omega, log_likelihood, kl, omega)
        for term, value in zip(terms, wanted, strict=True):
            torch.testing.assert_close(term, value, rtol=1e-9, atol=1e-9)
        parameters = list(posterior.parameters())
        gradients = torch.autograd.grad(terms.bound, parameters, retain_graph=True)
        for one, other in zip(gradients, torch.autograd.grad(wanted[0], parameters), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("eps", [0.5, 0.05])
@pytest.mark.parametrize("ball", range(8))
def test_the_gradient_through_an_attack_is_the_slope_of_the_bound(ball: int, eps: float) -> None:
    """With through=True the bound is a function of the posterior alone: differences say its
    slope."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).to(FLOAT)
    model = BayesianModel(net, Categorical())
    posterior = MeanField(model, 0.1, init=0.5 * randn(model.num_params, seed=4))
    x, y = torch.rand(5, 4, dtype=FLOAT, generator=generator(0)), torch.arange(5) % 3
    within_reach = replace(BALLS[ball], eps=eps)
    steps = [one_step(within_reach, loss) for loss in (nll, entropy)]
    parts = [AttackChannel(attack, 0.1) for attack in (*steps, pgd(within_reach, 3))]
    objective = ChannelELBO(20, 2, 2, "importance_weighted", Trades(2.0), through=True)
    channel = Mixture([0.1, 0.3, 0.3, 0.3], [Noise(0.1), *parts])
    direction = [randn(model.num_params, seed=seed) for seed in (1, 2)]
    parameters = [posterior.mu, posterior.rho]

    def bound() -> Tensor:
        return objective(model, posterior, channel, x, y, generator=generator(3)).bound

    gradients = torch.autograd.grad(bound(), parameters)
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
    sides = []
    with torch.no_grad():
        for move in (1e-6, -2e-6):
            for parameter, d in zip(parameters, direction, strict=True):
                parameter += move * d
            sides.append(float(bound()))
    assert slope == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-3)


def written_penalty(
    name: str,
    penalty: Penalty | None,
    clean: tuple[Tensor, Tensor],
    attacked: tuple[Tensor, Tensor],
) -> Tensor:
    if isinstance(penalty, LogitPairing):
        return penalty.weight * (clean[0] - attacked[0]).square().sum()
    if isinstance(penalty, Trades):
        return penalty.beta * kl_divergence(plain(name, *clean), plain(name, *attacked))
    return torch.zeros((), dtype=FLOAT)


# --- Posteriors ---------------------------------------------------------------------------------


def test_where_posteriors_start() -> None:
    model = BayesianModel(nn.Linear(40, 20).to(FLOAT), Categorical())
    torch.testing.assert_close(
        MeanField(model, 0.05).scale, torch.full((820,), 0.05, dtype=FLOAT), rtol=1e-9, atol=0
    )
    low_rank = LowRank(model, 4, 0.05)
    rows = low_rank.factor.detach().square().sum(1)
    # a chi-square of four, with a relative standard deviation of sqrt(2 / 4)
    assert float(rows.mean()) == pytest.approx(0.05**2, rel=5 * math.sqrt(0.5 / 820))
    covariance = torch.cov(low_rank.sample(4000, generator=generator(0))[:, :3].T)
    factor = low_rank.factor.detach()[:3]
    wanted = factor @ factor.T + 0.05**2 * torch.eye(3, dtype=FLOAT)
    error = 5 * math.sqrt(2 / 4000) * float(wanted.max())
    assert float((covariance - wanted).abs().max()) < error


def test_seeds_of_posteriors_are_theirs_alone() -> None:
    model = BayesianModel(nn.Linear(4, 3).to(FLOAT), Categorical())
    before = torch.get_rng_state()
    for drawn in (
        lambda seed: LowRank(model, 2, seed=seed).factor,
        lambda seed: Ensemble(model, 2, seed=seed).thetas,
    ):
        assert torch.equal(drawn(1), drawn(1))
        assert not torch.isclose(drawn(1), drawn(2)).any()
    assert torch.equal(torch.get_rng_state(), before)
    first, second = Ensemble(model, 2).thetas.detach()
    assert not torch.isclose(first, second).any()
    limit = 1 / math.sqrt(4)  # of nn.Linear's own rule
    assert 0.5 * limit < float(first.abs().max()) <= limit


@pytest.mark.parametrize("num", [1, 2, 3, 4, 7, 9])
def test_members_are_used_as_often_as_each_other(num: int) -> None:
    thetas = randn(3, 5)
    model = BayesianModel(nn.Linear(4, 1).to(FLOAT), Gaussian())
    for posterior in (Samples(thetas), Ensemble(model, init=thetas)):
        drawn = posterior.sample(num, generator=generator(num))
        uses = [int((drawn == theta).all(1).sum()) for theta in thetas]
        assert sum(uses) == num
        assert max(uses) - min(uses) <= 1
        torch.testing.assert_close(posterior.mean, thetas.mean(0))
        firsts = {float(posterior.sample(1, generator=generator(seed))[0, 0]) for seed in range(20)}
        assert len(firsts) == 3


# --- Likelihoods --------------------------------------------------------------------------------


def test_scales_by_input_reach_as_far_as_they_say_and_stay_finite() -> None:
    raw = torch.tensor([[0.0, 14.9], [0.0, 1e4], [0.0, -14.9], [0.0, -1e4]], dtype=FLOAT)
    scale = HeteroscedasticGaussian(0.0)(raw, torch.empty(0)).stddev
    exponents = torch.tensor([14.9, 15.0, -14.9, -15.0], dtype=FLOAT)
    torch.testing.assert_close(scale, exponents.exp())


@pytest.mark.parametrize("by_example", [False, True])
def test_mixtures_weigh_their_components(by_example: bool) -> None:
    log_weights = randn(3, 5, seed=1) if by_example else randn(3, seed=1)
    weights = (log_weights.softmax(0) if by_example else log_weights.softmax(0)[:, None]).expand(
        3, 5
    )
    means, scales, y = randn(3, 5, 2), randn(3, 5, 2, seed=2).exp(), randn(5, 2, seed=3)
    mixture = GaussianMixture(means, scales, log_weights)
    density = Independent(Normal(means, scales), 1).log_prob(y).exp()
    torch.testing.assert_close(mixture.log_prob(y), (weights * density).sum(0).log())
    mean = torch.einsum("sb,sbd->bd", weights, means)
    second = torch.einsum("sb,sbd->bd", weights, scales.square() + means.square())
    torch.testing.assert_close(mixture.mean, mean)
    torch.testing.assert_close(mixture.variance, second - mean.square())


def test_the_sampled_entropy_is_the_integral() -> None:
    mixture = GaussianMixture(
        torch.tensor([[-2.0], [1.0]], dtype=FLOAT),
        torch.tensor([[0.5], [0.8]], dtype=FLOAT),
        torch.tensor([0.3, 0.7], dtype=FLOAT).log(),
    )
    at = torch.linspace(-8, 8, 801, dtype=FLOAT)
    log_p = torch.cat([mixture.log_prob(point.view(1)) for point in at])
    wanted = float(-(log_p.exp() * log_p).sum() * 16 / 800)
    sampled = float(mixture.monte_carlo_entropy(4000, generator=generator(0)))
    assert sampled == pytest.approx(wanted, abs=5 / math.sqrt(4000))
    assert mixture.sample(generator=generator(0)).shape == (1,)


# --- Losses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 3])
def test_losses_of_a_regression(outputs: int) -> None:
    shape = (4,) if outputs == 1 else (4, outputs)
    mean, scale, y = randn(*shape), randn(*shape, seed=1).exp(), randn(*shape, seed=2)
    prediction = Normal(mean, scale) if outputs == 1 else Independent(Normal(mean, scale), 1)
    flat, deviations, targets = (value.view(4, -1) for value in (mean, scale, y))
    directions = randn(4, outputs, seed=3)
    density = -0.5 * ((targets - flat) / deviations) ** 2 - deviations.log()
    for loss, wanted in (
        (nll, -(density - 0.5 * math.log(2 * math.pi)).sum(1)),
        (squared_error, (flat - targets).square().sum(1)),
        (raise_mean, flat.sum(1)),
        (lower_mean, -flat.sum(1)),
        (inflate_variance, 2 * deviations.log().sum(1)),
        (deflate_variance, -2 * deviations.log().sum(1)),
        (MeanOf(outputs - 1), flat[:, -1]),
        (MeanOf(0, -1), -flat[:, 0]),
        (MeanAlong(directions), (flat * directions).sum(1)),
        (Exceeding(squared_error, 0.7), (flat - targets).square().sum(1) - 0.7),
        (Toward(squared_error), -(flat - targets).square().sum(1)),
    ):
        torch.testing.assert_close(loss(prediction, y), wanted)  # type: ignore[operator]


def test_losses_of_classes() -> None:
    logits, y, other = randn(6, 5), torch.arange(6) % 5, torch.tensor([1, 2, 3, 4, 0, 3])
    log_p = logits.log_softmax(1)
    prediction = CategoricalDistribution(logits=logits)
    best = torch.stack(
        [max(row[c] for c in range(5) if c != k) for row, k in zip(log_p, y, strict=True)]
    )
    own = log_p[range(6), y]
    ordered = log_p.sort(1, descending=True).values
    for loss, wanted in (
        (nll, -own),
        (margin, best - own),
        (dlr, (best - own) / (ordered[:, 0] - ordered[:, 2])),
        (MarginTo(other), log_p[range(6), other] - own),
        (PerExample((nll, margin), y % 2), torch.where(y % 2 == 0, -own, best - own)),
    ):
        torch.testing.assert_close(loss(prediction, y), wanted)  # type: ignore[operator]
    two = CategoricalDistribution(logits=logits[:, :2])
    torch.testing.assert_close(dlr(two, y % 2), margin(two, y % 2))
    for loss in (Toward(MarginTo(other)), Exceeding(MeanAlong(randn(6, 2)), 0.0)):
        assert num_rows(loss) == 6
        assert num_rows(loss.rows(slice(1, 3))) == 2


def test_the_better_of_two_points() -> None:
    """Broken first, then the larger loss, then the later one."""
    cases = [  # (value, broken) of the first and the second, and whether the second is better
        ((1.0, False), (2.0, False), True),
        ((2.0, False), (1.0, False), False),
        ((1.0, False), (1.0, False), True),
        ((5.0, False), (1.0, True), True),
        ((1.0, True), (5.0, False), False),
        ((1.0, True), (2.0, True), True),
    ]
    first, second = (
        Best(
            torch.full((len(cases), 1), float(side)),
            torch.tensor([case[side][0] for case in cases]),
            torch.tensor([case[side][1] for case in cases]),
        )
        for side in (0, 1)
    )
    chosen = first.or_better(second)
    assert chosen.x.flatten().tolist() == [float(case[2]) for case in cases]
    values = [case[int(case[2])][0] for case in cases]  # type: ignore[index]
    assert chosen.value.tolist() == values
    assert chosen.broken.tolist() == [case[0][1] or case[1][1] for case in cases]


# --- Moves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", [(0.0, 1.0), (torch.zeros(6), torch.ones(6))], ids=["one", "each"])
def test_what_pushes_against_the_box_is_left_out(box: tuple[float, float]) -> None:
    x = torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.5, 0.5]])
    gradient = torch.tensor([[-1.0, 2.0, -3.0, 4.0, -5.0, 6.0]])
    kept = torch.tensor([[0.0, 2.0, -3.0, 0.0, -5.0, 6.0]])
    for kind in (L2, Linf):
        assert torch.equal(kind(1.0, box=box).unblocked(gradient, x), kept)
        assert torch.equal(kind(1.0).unblocked(gradient, x), gradient)
    moved = one_step(L2(0.1, box=box), raise_mean)(
        lambda at: Normal(at @ gradient[0], 1.0), x, torch.zeros(1)
    )
    torch.testing.assert_close(moved - x, 0.1 * kept / kept.norm())


SCALE, MASK = torch.tensor([1.0, 2.0, 0.5, 1.5]), torch.tensor([True, True, True, False])
LOW, HIGH = torch.tensor([-0.2, 0.0, -0.5, 0.0]), torch.tensor([1.0, 1.1, 1.0, 1.0])
BALLS = [
    kind(eps, **options)
    for kind, eps in ((L2, 0.7), (Linf, 0.3))
    for options in (
        {"scale": SCALE},
        {"mask": MASK},
        {"box": (0.0, 1.0)},
        {"scale": SCALE, "mask": MASK, "box": (LOW, HIGH)},
    )
]


def within(ball: Ball, d: Tensor, x: Tensor, most: float = 1e6) -> Tensor:
    """t d of one example, cut where mask and box (and Linf) say, with the largest t <= `most` that
    the norm allows: the nearest point to d for `most` = 1, by bisection."""
    unit = torch.ones(4, dtype=FLOAT) if ball.scale is None else SCALE.to(FLOAT)
    low, high = torch.full((4,), -1e9, dtype=FLOAT), torch.full((4,), 1e9, dtype=FLOAT)
    if ball.box is not None:
        low, high = (torch.as_tensor(side, dtype=FLOAT) - x for side in ball.box)
    if isinstance(ball, Linf):
        low, high = low.maximum(-ball.eps * unit), high.minimum(ball.eps * unit)
    if ball.mask is not None:
        d = d * ball.mask
    inside, outside = 0.0, 2 * most
    for _ in range(60):
        t = (inside + outside) / 2
        moved = (t * d).maximum(low).minimum(high)
        fits = t <= most and (isinstance(ball, Linf) or float((moved / unit).norm()) <= ball.eps)
        inside, outside = (t, outside) if fits else (inside, t)
    return (inside * d).maximum(low).minimum(high)


@pytest.mark.parametrize("ball", BALLS, ids=repr)
def test_projections_and_worst_cases_of_a_line_are_exact(ball: Ball) -> None:
    x = torch.rand(12, 4, dtype=FLOAT, generator=generator(0)).clamp(0.1, 0.9).round(decimals=1)
    x[0], x[1] = 0.0, 1.0  # on the faces of the box
    far = x + randn(12, 4, seed=1)
    nearest = torch.stack(
        [at + within(ball, to - at, at, 1.0) for at, to in zip(x, far, strict=True)]
    )
    torch.testing.assert_close(ball.project(far, x), nearest, rtol=0, atol=1e-5)
    slope = torch.tensor([3.0, -1.0, 4.0, 2.0], dtype=FLOAT)
    unit = torch.ones(4, dtype=FLOAT) if ball.scale is None else SCALE.to(FLOAT)
    steepest = slope * (unit.square() if isinstance(ball, L2) else 1.0)
    most = torch.stack([within(ball, steepest, at) @ slope for at in x])
    least = torch.stack([within(ball, -steepest, at) @ slope for at in x])

    def line(x: Tensor) -> Normal:
        return Normal(x @ slope, 1.0)

    y = x @ slope + randn(12, seed=2)
    error = x @ slope - y
    wanted = torch.maximum((error + most).square(), (error + least).square())
    worst = APGD(ball, squared_error, 60, targets=1)(line, x, y)
    torch.testing.assert_close(squared_error(line(worst), y), wanted, rtol=1e-3, atol=1e-6)
    # an error of ten is reached on the way up, after a share of all that can be gained
    for share in (0.7, 1.1):
        attack = MinimumNorm(ball, Exceeding(squared_error, 100.0), steps=40)
        radius = attack.radius(line, x, x @ slope + share * most - 10)
        if share > 1:
            assert bool(radius.isinf().all())
            continue
        for at, gain, found in zip(x, share * most, radius.tolist(), strict=True):
            gains = [
                within(replace(ball, eps=found * factor), steepest, at) @ slope
                for factor in (0.97, 1.0 + 1e-6)
            ]
            assert gains[0] < gain <= gains[1] + 1e-6


def test_lengths_of_steps() -> None:
    for step in range(10):
        share = (0.5 + 0.5 * math.cos(math.pi * step / 10)) ** 1.5
        assert step_length(3.0, step, 10) == pytest.approx(3.0 * max(share, 0.01))
    assert step_length(3.0, 99, 100) == pytest.approx(0.03)


def test_windows_of_square_shrink_at_fixed_shares_of_the_queries() -> None:
    attack = Square(L2(1.0), queries=10_000, share=0.8)
    marks = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
    for number, mark in enumerate(marks):
        assert attack._share_at(mark) == pytest.approx(0.8 / 2**number)
        assert attack._share_at(mark + 1) == pytest.approx(0.8 / 2 ** (number + 1))


@pytest.mark.parametrize(("targets", "count"), [(1, 1), (2, 2), (9, 3)])
def test_directed_runs_go_to_the_likeliest_wrong_classes_first(targets: int, count: int) -> None:
    prediction = CategoricalDistribution(logits=torch.tensor([[3.0, 1.0, 0.0, 2.0]]))
    losses = APGD(L2(1.0), targets=targets)._directed_losses(prediction, torch.tensor([3]), None)
    assert [int(loss.classes) for loss in losses] == [0, 1, 2][:count]  # type: ignore[attr-defined]
    several = Independent(Normal(torch.zeros(2, 4), 1.0), 1)
    num = min(targets, 4)
    losses = APGD(L2(1.0), targets=targets)._directed_losses(
        several, torch.zeros(2, 4), generator(0)
    )
    assert losses[: 2 * num] == tuple(MeanOf(k, sign) for k in range(num) for sign in (1, -1))
    assert [loss.directions.shape for loss in losses[2 * num :]] == [(2, 4)] * (4 * num)  # type: ignore[attr-defined]


@pytest.mark.parametrize("limit", [1, 40, 1 << 24])
@pytest.mark.parametrize("scaled", [False, True])
def test_densities_do_not_depend_on_how_many_are_worked_on_at_once(
    limit: int, scaled: bool
) -> None:
    x_adv, centres = randn(4, 2, 3), randn(7, 2, 3, seed=1)
    scale = randn(7, 2, 3, seed=2).exp() if scaled else torch.tensor(0.4, dtype=FLOAT)
    wanted = torch.stack(
        [
            Normal(c, s).log_prob(x_adv).sum((1, 2))
            for c, s in zip(centres, scale.expand(7, 2, 3), strict=True)
        ]
    )
    given = scale if scaled else 0.4
    torch.testing.assert_close(log_normal(x_adv, centres, given, limit), wanted)


class Fixed(nn.Module):
    """A shift of 3 and raw log-stds from -4 to 4."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(x, 3.0), torch.linspace(-4, 4, x.shape[1], dtype=x.dtype).expand_as(
            x
        )


def test_moments_of_a_learned_channel() -> None:
    x, y = torch.zeros(2, 5, dtype=FLOAT), torch.zeros(2)
    centre, std = Learned(Fixed(), Linf(0.5), (0.02, 0.3)).moments(lambda x: None, x, y)  # type: ignore[arg-type, return-value]
    raw = torch.linspace(-4, 4, 5, dtype=FLOAT)
    share = 1 / (1 + (-raw).exp())
    torch.testing.assert_close(centre, torch.full_like(x, 0.5))
    torch.testing.assert_close(std, (0.02 * (0.3 / 0.02) ** share).expand_as(x))


# --- What attacks are made of ---------------------------------------------------------------------


def test_the_papers_attacks_are_settings() -> None:
    ball = L2(0.5)
    assert one_step(ball, margin) == PGD(ball, ((margin, 1),))
    assert pgd(ball, 7, margin, step_size=0.1, restarts=3, stop_at_success=True) == PGD(
        ball, ((margin, 7),), 0.1, 3, stop_at_success=True
    )
    assert pgd_plus(ball, 3, restarts=2) == PGD(ball, ((nll, 3), (entropy, 3)), restarts=2)
    assert entropy_pgd(ball, 4, restarts=2) == PGD(ball, ((entropy, 4),), restarts=2)
    assert pgd(ball).stages == ((nll, 50),)
    assert pgd_plus(ball).stages == ((nll, 25), (entropy, 25))
    assert entropy_pgd(ball).stages == ((entropy, 50),)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_settings_of_a_suite_reach_its_parts(task: str) -> None:
    ball = Linf(0.2)
    suite = strong_suite(ball, steps=7, restarts=3, targets=4, queries=11).in_task(task)
    kinds = {
        kind: [attack for attack in suite.attacks if isinstance(attack, kind)]
        for kind in (APGD, PGD, Square, RandomSearch)
    }
    for attack in (*kinds[APGD], *kinds[PGD]):
        assert steps_of(attack) == 7
        assert attack.restarts == 3
    assert [attack.num for attack in kinds[RandomSearch]] == [20]
    assert [attack.queries for attack in kinds[Square]] == [11]
    assert sorted(attack.targets for attack in kinds[APGD])[-2:] == [0, 4]
    assert all(ball_of(attack) == ball for attack in suite.attacks)
    later = [getattr(attack, "stop_at_success", False) for attack in suite.attacks[1:]]
    assert all(later) == (task == "classification")  # only classes can be broken
    assert not any(
        isinstance(a, Square) for a in strong_suite(ball, queries=0).in_task(task).attacks
    )


@pytest.mark.parametrize("probes", [10, 16])
def test_the_normal_is_asked_for_with_ever_more_probes(probes: int) -> None:
    sizes: list[int] = []

    def predict(x: Tensor) -> CategoricalDistribution:
        sizes.append(len(x))
        return CategoricalDistribution(logits=torch.stack([x[:, 0], -x[:, 0]], 1))

    x, y = torch.tensor([[1.0, 0.5]], dtype=FLOAT), torch.tensor([0])
    attack = HardLabel(L2(0.1), rounds=4, probes=probes)
    attack(predict, x, y, generator=generator(0))
    wanted = [int(probes * math.sqrt(number)) for number in (1, 2, 3, 4)]
    assert [size for size in sizes if size > 1] == wanted


# --- Architectures ------------------------------------------------------------------------------


def test_the_paper_s_nets_have_the_sizes_of_the_paper() -> None:
    for net, num in (
        (conv_net(), 160 + 4640 + 15690),
        (conv_net(3, channels=2, size=9), 304 + 4640 + 3 * 129),
        (mlp(11), 192 + 272 + 17),
        (mlp(4, 3, (5,)), 25 + 18),
        (wide_conv_net(), 320 + 9248 + 18496 + 36928 + 205000 + 40200 + 2010),
        (large_kernel_net(), 64 * 82 + 64 * 577 + 512 * 4097 + 10 * 513),
        (resnet18(), 11_173_962),  # as with BatchNorm: its affine parameters are as many
        (ConvGenerator(), 160 + 2320 + 2 * 145 + 11 * 784),
    ):
        assert sum(p.numel() for p in net.parameters()) == num
    kinds = [type(layer) for layer in conv_net()]
    block = [nn.Conv2d, nn.ReLU, nn.AvgPool2d]
    assert kinds == [*block, *block, nn.Flatten, nn.Linear]
    assert [type(layer) for layer in mlp(3)] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]


@pytest.mark.parametrize("kind", ["convolutional", "classes", "regression"])
def test_generators_see_the_label(kind: str) -> None:
    x = randn(2, 1, 4, 4).float()
    y = torch.tensor([0, 1])
    if kind == "convolutional":
        made: nn.Module = ConvGenerator(3, size=4)
    elif kind == "classes":
        made = FullyConnectedGenerator(16, num_classes=3)
    else:
        made, y = FullyConnectedGenerator(16), torch.tensor([0.0, 1.0])
        for one, other in zip(made(x, y), made(x, y.unsqueeze(1)), strict=True):
            assert torch.equal(one, other)
    shift, raw = made(x, y)
    again, raw_again = made(x, y.flip(0))
    assert shift.shape == raw.shape == x.shape
    assert not torch.allclose(shift, again)
    assert torch.equal(raw, raw_again) == (kind == "convolutional")
    alone = made(x[:1], y[:1])
    torch.testing.assert_close(shift[:1], alone[0])
    torch.testing.assert_close(raw[:1], alone[1])


# --- The progress line --------------------------------------------------------------------------


def test_the_progress_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress("fit", 60, show=True, start=12) as bar:
        now[0] += 1.9
        bar.advance("bound", -3.0)
        assert capsys.readouterr().err == ""  # not in the first two seconds
        now[0] += 2.1
        bar.advance("bound", -3.21456, num=17)  # 18 in four seconds, 30 left
        line = f"fit [{'=' * 12}{' ' * 12}] 30/60  0:07 left  bound -3.215"
        assert capsys.readouterr().err == f"\r{line}"
        now[0] += 0.1
        bar.advance("bound", -3.0)
        assert capsys.readouterr().err == ""  # five times a second at most
    assert capsys.readouterr().err == f"\r{' ' * len(line)}\r"
    for show in (False, None):  # None: this is no terminal
        with Progress("fit", 9, show=show) as bar:
            now[0] += 100.0
            bar.advance()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (59, "0:59"), (60, "1:00"), (754, "12:34"), (36005, "10:00:05")],
)
def test_the_time_left(
    seconds: int, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress("x", 10 + seconds, show=True) as bar:
        now[0] = 10.0
        bar.advance("done", num=10)  # one a second
        assert f"  {shown} left  done" in capsys.readouterr().err


def test_keys_of_randomness_are_told_apart() -> None:
    keys = [(0, "a", 0), (0, "a", 1), (1, "a", 0), (0, "b", 0), (10, "a", 0), (1, "0/a", 0)]
    drawn = {float(torch.rand((), generator=generator_for(*key), dtype=FLOAT)) for key in keys}
    assert len(drawn) == len(keys)

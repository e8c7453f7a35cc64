"""Old defenses as limits, and attacks at their linear worst case (identities 16 to 18), in
float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    PGD,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Consistency,
    Gaussian,
    Linf,
    LogitPairing,
    MeanField,
    Noise,
    PointMass,
    Trades,
    fit,
    margin,
    nll,
    one_step,
    pgd,
    pgd_plus,
    squared_error,
)
from tests.oracles import (
    FLOAT,
    assert_exact,
    generator,
    integrate,
    mean_test,
    normal_log_prob,
    randn,
    worst_inputs,
    worst_shift,
    worst_squared_error,
)


def linear_model(dim: int, scale: float = 1.0, prior_scale: float = 1.0) -> BayesianModel:
    """y ~ N(theta.x, scale^2)."""
    return BayesianModel(
        nn.Linear(dim, 1, bias=False, dtype=FLOAT), Gaussian(scale), prior_scale=prior_scale
    )


def classifier(dim: int, num_classes: int) -> BayesianModel:
    """Logits W x + b; theta is W row by row, then b."""
    return BayesianModel(nn.Linear(dim, num_classes, dtype=FLOAT), Categorical())


def logits_of(theta: Tensor, x: Tensor, num_classes: int) -> Tensor:
    weight = theta[: num_classes * x.shape[1]].view(num_classes, x.shape[1])
    return x @ weight.T + theta[num_classes * x.shape[1] :]


# --- 16: attacks reach the worst case -----------------------------------------------------------

REGRESSION_ATTACKS = {
    "one step, nll": lambda ball: one_step(ball),
    "one step, squared error": lambda ball: one_step(ball, squared_error),
    "pgd": lambda ball: pgd(ball),
    "pgd, 7 steps": lambda ball: pgd(ball, steps=7),
    "pgd, squared error, restarts": lambda ball: PGD(
        ball, stages=((squared_error, 20),), restarts=3
    ),
    "pgd, small steps": lambda ball: PGD(ball, stages=((nll, 10),), step_size=1e-3),
    "pgd+": lambda ball: pgd_plus(ball),
    "nll, then squared error": lambda ball: PGD(ball, stages=((nll, 10), (squared_error, 10))),
}
CLASSIFICATION_ATTACKS = {
    "one step, nll": lambda ball: one_step(ball),
    "one step, margin": lambda ball: one_step(ball, margin),
    "pgd": lambda ball: pgd(ball),
    "pgd, margin, restarts": lambda ball: PGD(ball, stages=((margin, 20),), restarts=2),
}


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", REGRESSION_ATTACKS)
def test_16_regression_attacks_reach_the_worst_squared_error(name: str, norm: str) -> None:
    eps, theta, x = 0.7, randn(6, seed=1), randn(50, 6, seed=2)
    # residuals of all sizes
    y = x @ theta + randn(50, seed=3) * torch.logspace(-7, 1, 50, dtype=FLOAT)
    predict = linear_model(6, 0.4).at(theta)
    ball = L2(eps) if norm == "l2" else Linf(eps)
    x_adv = REGRESSION_ATTACKS[name](ball)(predict, x, y, generator=generator(4))
    size = (x_adv - x).norm(dim=1) if norm == "l2" else (x_adv - x).abs().amax(1)
    assert float(size.max()) <= eps * (1 + 1e-9)
    reached = (y - x_adv @ theta) ** 2
    worst = worst_squared_error(theta, x, y, eps, norm)
    assert float((reached / worst).min()) > 0.999
    assert float((reached / worst).max()) < 1 + 1e-9


@pytest.mark.parametrize("name", CLASSIFICATION_ATTACKS)
def test_16_classification_attacks_reach_the_worst_margin(name: str) -> None:
    eps, theta = 0.9, randn(12, seed=5)
    x, y = randn(80, 5, seed=6), (randn(80, seed=7) > 0).long()
    x_adv = CLASSIFICATION_ATTACKS[name](L2(eps))(
        classifier(5, 2).at(theta), x, y, generator=generator(8)
    )
    sign = 2.0 * y - 1
    weight, bias = theta[5:10] - theta[:5], theta[11] - theta[10]
    clean, attacked = sign * (x @ weight + bias), sign * (x_adv @ weight + bias)
    loss = clean - attacked  # of the margin, at most eps |w|
    assert float((loss / (eps * weight.norm())).min()) > 0.999
    assert float((x_adv - x).norm(dim=1).max()) <= eps * (1 + 1e-9)


@pytest.mark.parametrize("name", CLASSIFICATION_ATTACKS)
@pytest.mark.parametrize("eps", [0.1, 0.5, 1.5])
def test_16_robust_accuracy_has_no_mismatch(name: str, eps: float) -> None:
    theta = randn(12, seed=9)
    x, y = randn(2000, 5, seed=10), (randn(2000, seed=11) > 0).long()
    predict = classifier(5, 2).at(theta)
    x_adv = CLASSIFICATION_ATTACKS[name](L2(eps))(predict, x, y, generator=generator(12))
    measured = predict(x_adv).logits.argmax(-1) == y
    weight, bias = theta[5:10] - theta[:5], theta[11] - theta[10]
    expected = (2.0 * y - 1) * (x @ weight + bias) > eps * weight.norm()
    assert 0.01 < float(expected.double().mean()) < 0.6
    assert torch.equal(measured, expected)


@pytest.mark.parametrize(
    ("dtype", "margin_of_x"), [(FLOAT, 25.0), (FLOAT, 250.0), (torch.float32, 60.0)]
)
def test_16_a_small_gradient_is_as_good_as_a_large_one(
    dtype: torch.dtype, margin_of_x: float
) -> None:
    """Far from the boundary the likelihood's gradient is exp(-margin), its square underflows: only
    its direction counts."""
    weight = torch.tensor([3.0, 4.0], dtype=dtype)
    theta = torch.cat([-weight / 2, weight / 2, torch.zeros(2, dtype=dtype)])
    x, y = weight[None] * margin_of_x / 25, torch.tensor([1])
    predict = BayesianModel(nn.Linear(2, 2, dtype=dtype), Categorical()).at(theta)
    for attack in (one_step(L2(1.0)), pgd(L2(1.0), steps=10)):
        torch.testing.assert_close(attack(predict, x, y), x - weight / 5, rtol=1e-6, atol=1e-6)


def test_16_no_gradient_no_step() -> None:
    """The one-step convention: the gradient term is zero when its norm vanishes; PGD then starts at
    random."""
    predict, theta = linear_model(3).at(randn(3, seed=13)), randn(3, seed=13)
    x, y = torch.zeros(4, 3, dtype=FLOAT), torch.zeros(4, dtype=FLOAT)
    assert torch.equal(one_step(L2(1.0))(predict, x, y), x)
    x_adv = pgd(L2(1.0))(predict, x, y, generator=generator(0))
    # a random start is not the one-step point: its angle to theta shrinks by exp(-2.45) on a path
    # of 49 * 2.5 eps / 50
    assert float(((x_adv @ theta) ** 2).min()) > 0.95 * float(theta.dot(theta))


@pytest.mark.parametrize(("steps", "least"), [(50, 0.99), (200, 0.998)])
def test_16_pgd_within_a_box(steps: int, least: float) -> None:
    """The worst case of ball and box together, by bisection: reached, never passed."""
    theta, x = randn(8, seed=14), torch.rand(60, 8, dtype=FLOAT, generator=generator(15))
    y = x @ theta + randn(60, seed=16)
    direction = -torch.sign(y - x @ theta)[:, None] * theta
    eps, box = 0.8, (0.0, 1.0)
    predict = linear_model(8).at(theta)
    x_adv = pgd(L2(eps, box=box), steps=steps)(predict, x, y, generator=generator(17))
    assert float((x_adv - x).norm(dim=1).max()) <= eps * (1 + 1e-9)
    assert float(x_adv.min()) >= 0
    assert float(x_adv.max()) <= 1
    best = (direction * worst_shift(direction, x, eps, box)).sum(1)
    gain = (direction * (x_adv - x)).sum(1)
    assert float((gain / best).max()) < 1 + 1e-6
    assert float((gain / best).min()) > least
    once = one_step(L2(eps, box=box))(predict, x, y) - x
    assert bool((gain >= (direction * once).sum(1) - 1e-12).all()), "more steps are never weaker"
    assert float((gain / best).mean()) > float(((direction * once).sum(1) / best).mean()) + 0.02


# --- 17: adversarial training and the robust Gibbs posterior ------------------------------------

SCALE, EPS = 1.5, 0.2


def adversarial_loss(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """sum_i max over the ball of -log p(y_i | z, theta)."""
    worst = worst_squared_error(theta, x, y, EPS)
    return (worst / (2 * SCALE**2) + 0.5 * math.log(2 * math.pi * SCALE**2)).sum()


def adversarial_argmin(x: Tensor, y: Tensor) -> Tensor:
    theta = torch.linalg.lstsq(x, y[:, None]).solution[:, 0].requires_grad_()
    solver = torch.optim.LBFGS(
        [theta],
        max_iter=500,
        tolerance_grad=1e-13,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = adversarial_loss(theta, x, y)
        loss.backward()
        return loss

    solver.step(closure)
    return theta.detach()


def smooth_case() -> tuple[Tensor, Tensor, Tensor]:
    """Data whose optimum is away from the kinks, where a residual is 0, and that optimum: every
    other draw has one there."""
    for seed in range(22, 422, 2):
        x = randn(12, 3, seed=seed)
        y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=FLOAT) + SCALE * randn(12, seed=seed + 1)
        argmin = adversarial_argmin(x, y)
        if float((y - x @ argmin).abs().min()) > 0.02:
            return x, y, argmin
    raise AssertionError("no such data")


X, Y, ARGMIN = smooth_case()


def test_17_the_objective_is_that_of_adversarial_training() -> None:
    """Dirac worst-case channel, flat prior, point posterior: value, gradient and argmin."""
    model = linear_model(3, SCALE)
    objective = ChannelELBO(num_data=12, kl_weight=0.0)
    channel = AttackChannel(one_step(L2(EPS)), 0.0)
    for theta in (ARGMIN, randn(3, seed=25), randn(3, seed=26)):
        posterior = PointMass(model, init=theta)
        terms = objective(model, posterior, channel, X, Y, generator=generator(0))
        (gradient,) = torch.autograd.grad(terms.bound, posterior.theta)
        variable = theta.clone().requires_grad_()
        loss = adversarial_loss(variable, X, Y)
        (expected,) = torch.autograd.grad(loss, variable)
        assert_exact(-terms.bound, loss)
        torch.testing.assert_close(-gradient, expected, rtol=1e-10, atol=1e-10)
        if theta is ARGMIN:
            assert float(gradient.abs().max()) < 1e-7


def test_17_fit_ends_at_the_argmin_of_adversarial_training() -> None:
    model = linear_model(3, SCALE)
    posterior = PointMass(model, init=torch.zeros(3, dtype=FLOAT) + 0.1)
    objective = ChannelELBO(num_data=12, kl_weight=0.0)
    channel = AttackChannel(one_step(L2(EPS)), 0.0)
    for lr, steps in ((5e-2, 200), (5e-3, 150), (5e-4, 100)):
        fit(
            model,
            posterior,
            channel,
            (X, Y),
            objective=objective,
            steps=steps,
            batch_size=12,
            lr=lr,
        )
    torch.testing.assert_close(posterior.theta.detach(), ARGMIN, rtol=0, atol=1e-3)
    least_squares = torch.linalg.lstsq(X, Y[:, None]).solution[:, 0]
    assert float((ARGMIN - least_squares).norm()) > 0.05, "the attack must matter"


def test_17_the_flat_prior_is_the_wide_limit_of_the_gaussian_one() -> None:
    """With its prior, a point posterior is the maximum a posteriori: -log p(theta) up to its
    constant."""
    model = linear_model(3, SCALE, prior_scale=0.7)
    theta = randn(3, seed=24)
    posterior = PointMass(model, init=theta)
    terms = ChannelELBO(num_data=12)(model, posterior, AttackChannel(one_step(L2(EPS)), 0.0), X, Y)
    (gradient,) = torch.autograd.grad(terms.bound, posterior.theta)
    variable = theta.clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        -adversarial_loss(variable, X, Y) - variable.dot(variable) / (2 * 0.49), variable
    )
    assert_exact(gradient, expected)


def test_17_robust_gibbs_posterior() -> None:
    """log p(theta) - sum (|r_i| + eps |theta|)^2/(2 s^2), and surrogate(q) = log Z - KL(q,
    that)."""
    x, y, prior_scale = X[:8, :1], Y[:8], 1.3
    model = linear_model(1, SCALE, prior_scale)
    channel = AttackChannel(one_step(L2(EPS)), 0.0)
    objective = ChannelELBO(num_data=8, num_theta=32)

    def log_density(t: Tensor) -> Tensor:
        worst = ((y - t[:, None] * x[:, 0]).abs() + EPS * t[:, None].abs()) ** 2
        constant = 0.5 * len(y) * math.log(2 * math.pi * SCALE**2)
        return normal_log_prob(t, 0.0, prior_scale**2) - worst.sum(1) / (2 * SCALE**2) - constant

    grid = torch.linspace(-2, 2, 41, dtype=FLOAT)
    x_adv = objective.corrupt(model, grid[:, None], channel, x, y)
    log_p = objective.reduce(objective._score(model, grid[:, None], x_adv, y)).sum(1)
    assert_exact(log_p + normal_log_prob(grid, 0.0, prior_scale**2), log_density(grid))

    gibbs = integrate(log_density, -15.0, 15.0)
    at = float(gibbs.expect(gibbs.grid)) - 1.4  # so far off that the divergence is large
    posterior = MeanField(model, init_scale=0.3, init=torch.tensor([at], dtype=FLOAT))
    q = integrate(lambda t: normal_log_prob(t, at, 0.09), at - 4.0, at + 4.0)
    kl = q.expect(normal_log_prob(q.grid, at, 0.09) - log_density(q.grid) + gibbs.log_z)
    assert kl > 1

    def draw(num: int, source: torch.Generator) -> Tensor:
        terms = [
            objective(model, posterior, channel, x, y, generator=source).bound for _ in range(num)
        ]
        return torch.stack(terms)

    assert mean_test(draw, gibbs.log_z - kl, resolution=0.1, num=64, max_num=512)


# --- 18: TRADES and logit pairing ---------------------------------------------------------------

CLASSES, DIM = 4, 3
INPUTS, LABELS = randn(6, DIM, seed=30), torch.tensor([0, 1, 2, 3, 1, 0])
THETA = randn(CLASSES * DIM + CLASSES, seed=31)


def by_hand(theta: Tensor, x_adv: Tensor) -> dict[str, Tensor]:
    clean, adversarial = logits_of(theta, INPUTS, CLASSES), logits_of(theta, x_adv, CLASSES)
    log_p, log_q = torch.log_softmax(clean, 1), torch.log_softmax(adversarial, 1)
    rows = torch.arange(6)
    return {
        "kl": (log_p.exp() * (log_p - log_q)).sum(),
        "pairing": ((clean - adversarial) ** 2).sum(),
        "clean": log_p[rows, LABELS].sum(),
        "adversarial": log_q[rows, LABELS].sum(),
    }


@pytest.mark.parametrize("likelihood", ["adversarial", "clean"])
def test_18_trades(likelihood: str) -> None:
    model, attack = classifier(DIM, CLASSES), one_step(L2(0.6))
    posterior = PointMass(model, init=THETA)
    objective = ChannelELBO(num_data=18, penalty=Trades(2.5, likelihood=likelihood), kl_weight=0.0)
    terms = objective(
        model, posterior, AttackChannel(attack, 0.0), INPUTS, LABELS, generator=generator(0)
    )
    x_adv = attack(model.at(THETA), INPUTS, LABELS)
    theta = THETA.clone().requires_grad_()
    expected = by_hand(theta, x_adv)
    assert float(expected["kl"].detach()) > 0.1
    assert_exact(terms.penalty, 3 * 2.5 * expected["kl"])
    assert_exact(terms.log_likelihood, 3 * expected[likelihood])
    assert_exact(terms.bound, terms.log_likelihood - terms.penalty)
    (gradient,) = torch.autograd.grad(terms.bound, posterior.theta)
    (wanted,) = torch.autograd.grad(3 * (expected[likelihood] - 2.5 * expected["kl"]), theta)
    assert_exact(gradient, wanted)


def test_18_logit_pairing() -> None:
    """The pairing is of the pre-softmax logits, constants included."""
    model, attack = classifier(DIM, CLASSES), one_step(L2(0.6))
    posterior = PointMass(model, init=THETA)
    objective = ChannelELBO(num_data=18, penalty=LogitPairing(0.4), kl_weight=0.0)
    terms = objective(
        model, posterior, AttackChannel(attack, 0.0), INPUTS, LABELS, generator=generator(0)
    )
    x_adv = attack(model.at(THETA), INPUTS, LABELS)
    theta = THETA.clone().requires_grad_()
    expected = by_hand(theta, x_adv)
    assert_exact(terms.penalty, 3 * 0.4 * expected["pairing"])
    assert_exact(terms.log_likelihood, 3 * expected["adversarial"])
    (gradient,) = torch.autograd.grad(terms.bound, posterior.theta)
    (wanted,) = torch.autograd.grad(
        3 * (expected["adversarial"] - 0.4 * expected["pairing"]), theta
    )
    assert_exact(gradient, wanted)


@pytest.mark.parametrize("entropy", [0.0, 0.7])
@pytest.mark.parametrize("num_channel", [2, 3])
def test_18_consistency(num_channel: int, entropy: float) -> None:
    """The divergence of each sample's prediction from their mean, and the mean's entropy."""
    model, noise = classifier(DIM, CLASSES), 0.8
    posterior = PointMass(model, init=THETA)
    objective = ChannelELBO(
        18, num_channel=num_channel, penalty=Consistency(2.5, entropy), kl_weight=0.0
    )
    samples = objective.corrupt(
        model, THETA[None], Noise(noise), INPUTS, LABELS, generator=generator(0)
    )[0]
    terms = objective.terms(model, posterior, posterior.rsample(1), INPUTS, samples[None], LABELS)
    theta = THETA.clone().requires_grad_()
    probs = torch.stack([model.at(theta)(one).probs for one in samples])  # type: ignore[attr-defined]
    mean = probs.mean(0)
    spread = (mean * (mean.log() - probs.log())).sum(-1).mean(0)  # (B,)
    wanted = (2.5 * spread - entropy * (mean * mean.log()).sum(-1)).sum() * 3
    assert float(spread.detach().sum()) > 0.01
    assert_exact(terms.penalty, wanted)
    assert_exact(
        terms.log_likelihood,
        3 * sum(model.log_likelihood(THETA, one, LABELS).sum() for one in samples) / num_channel,
    )
    (gradient,) = torch.autograd.grad(terms.penalty, posterior.theta)
    assert_exact(gradient, torch.autograd.grad(wanted, theta)[0])


def test_18_consistency_wants_samples_to_compare() -> None:
    with pytest.raises(ValueError, match="num_channel must be >= 2 for a Consistency penalty"):
        ChannelELBO(18, penalty=Consistency())
    net = torch.nn.Linear(DIM, 1).double()
    model = BayesianModel(net, Gaussian(1.0))
    objective = ChannelELBO(18, num_channel=2, penalty=Consistency())
    with pytest.raises(TypeError, match="regression, got Consistency"):
        objective(model, PointMass(model), Noise(0.1), INPUTS, INPUTS[:, 0])


@pytest.mark.parametrize(
    "penalty", [Trades(2.5), Trades(2.5, likelihood="clean"), LogitPairing(0.4)]
)
def test_18_penalties_vanish_without_an_attack(penalty: Trades | LogitPairing) -> None:
    model = classifier(DIM, CLASSES)
    posterior = MeanField(model, init_scale=0.3)
    objective = ChannelELBO(num_data=18, num_theta=2, num_channel=2, penalty=penalty)
    plain = ChannelELBO(num_data=18, num_theta=2, num_channel=2)
    for channel in (Noise(0.0), AttackChannel(one_step(L2(0.0)), 0.0)):
        terms = objective(model, posterior, channel, INPUTS, LABELS, generator=generator(1))
        assert float(terms.penalty.detach().abs()) < 1e-12
        without = plain(model, posterior, channel, INPUTS, LABELS, generator=generator(1))
        assert_exact(terms.log_likelihood, without.log_likelihood)


def test_18_penalties_are_averaged_over_theta_and_scaled_to_the_data() -> None:
    """With a posterior the penalty is N/B sum_b of the mean over theta, each theta with its own
    attack."""
    model, attack = classifier(DIM, CLASSES), one_step(L2(0.6))
    posterior = MeanField(model, init_scale=0.3, init=THETA)
    objective = ChannelELBO(num_data=18, num_theta=3, penalty=Trades(1.0))
    terms = objective(
        model, posterior, AttackChannel(attack, 0.0), INPUTS, LABELS, generator=generator(2)
    )
    thetas = posterior.sample(3, generator=generator(2))
    each = [by_hand(theta, attack(model.at(theta), INPUTS, LABELS)) for theta in thetas]
    assert_exact(terms.penalty, 3 * torch.stack([one["kl"] for one in each]).mean())
    expected = 3 * torch.stack([one["adversarial"] for one in each]).mean()
    assert_exact(terms.log_likelihood, expected)


def test_the_worst_input_is_the_worst() -> None:
    """The oracle itself: no point of the ball does worse."""
    theta = randn(3, seed=40)
    worst = worst_squared_error(theta, X, Y, EPS)
    assert_exact((Y - worst_inputs(theta, X, Y, EPS) @ theta) ** 2, worst)
    for seed in range(20):
        shift = randn(12, 3, seed=50 + seed)
        shift = EPS * shift / shift.norm(dim=1, keepdim=True)
        assert bool(((Y - (X + shift) @ theta) ** 2 <= worst).all())

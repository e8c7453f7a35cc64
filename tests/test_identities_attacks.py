"""Attacks, balls, channels and predictive mixtures against what must hold of them exactly
(identities 20 to 23)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Learned,
    Linf,
    Mixture,
    Noise,
    PosteriorPredictive,
    entropy,
    entropy_pgd,
    nll,
    one_step,
    pgd,
    squared_error,
)
from tests.oracles import (
    FLOAT,
    AffineChannel,
    LinearRegression,
    assert_exact,
    generator,
    mean_test,
    randn,
    uniform_cells,
    worst_squared_error,
)


def linear_model(dim: int, scale: float = 1.0) -> BayesianModel:
    """y ~ N(theta.x, scale^2)."""
    return BayesianModel(nn.Linear(dim, 1, bias=False, dtype=FLOAT), Gaussian(scale))


# --- 20: through the predictive -----------------------------------------------------------------

DATA = randn(12, 4, seed=1)
POSTERIOR = LinearRegression(DATA, DATA @ randn(4, seed=2) + 0.5 * randn(12, seed=3), 0.5, 1.0)
QUERY, TARGET, EPS = randn(15, 4, seed=4), 2 * randn(15, seed=5), 0.6


def error_of_the_mean(thetas: Tensor, x_adv: Tensor) -> Tensor:
    return (TARGET - x_adv @ thetas.mean(0)) ** 2


@pytest.mark.parametrize(
    "attack", [one_step(L2(EPS), squared_error), pgd(L2(EPS), 20, squared_error)]
)
def test_20_the_predictive_attack_is_the_worst_case_and_single_thetas_fall_short(
    attack: Any,
) -> None:
    model, thetas = linear_model(4, 0.5), POSTERIOR.sample(8, generator(6))
    through_all = error_of_the_mean(
        thetas, attack(PosteriorPredictive(model, thetas), QUERY, TARGET)
    )
    assert_exact(through_all, worst_squared_error(thetas.mean(0), QUERY, TARGET, EPS))
    mean = thetas.mean(0)
    for theta in thetas:
        through_one = error_of_the_mean(thetas, attack(model.at(theta), QUERY, TARGET))
        assert bool((through_one < through_all).all())
        # by closed form: the step goes along theta, with the sign of its own residual
        step = EPS * torch.sign(TARGET - QUERY @ theta) * (theta @ mean) / theta.norm()
        assert_exact(through_one, (TARGET - QUERY @ mean + step) ** 2)


def test_20_equality_when_theta_is_parallel_to_the_mean() -> None:
    model, thetas = linear_model(4, 0.5), POSTERIOR.sample(8, generator(6))
    attack = one_step(L2(EPS), squared_error)
    through_all = error_of_the_mean(
        thetas, attack(PosteriorPredictive(model, thetas), QUERY, TARGET)
    )
    through_parallel = error_of_the_mean(
        thetas, attack(model.at(1.02 * thetas.mean(0)), QUERY, TARGET)
    )
    same_side = torch.sign(TARGET - QUERY @ thetas.mean(0)) == torch.sign(
        TARGET - 1.02 * QUERY @ thetas.mean(0)
    )
    assert bool(same_side.all())
    assert_exact(through_parallel, through_all)


def test_20_the_likelihood_attack_through_the_predictive_wins_too() -> None:
    model, thetas = linear_model(4, 0.5), POSTERIOR.sample(8, generator(6))
    predict, attack = PosteriorPredictive(model, thetas), pgd(L2(EPS), steps=50)
    # on one side of what all thetas say: between them there are two ways out, of which a single
    # start may take the lesser one
    side = torch.arange(15) % 2 == 0
    each = QUERY @ thetas.T
    target = torch.where(side, each.amax(1) + 0.5, each.amin(1) - 0.5)
    through_all = nll(predict(attack(predict, QUERY, target)), target)
    for theta in thetas:
        through_one = nll(predict(attack(model.at(theta), QUERY, target)), target)
        # far from the data one theta can carry the whole mixture: then its attack is the
        # predictive's
        assert bool((through_one <= through_all * (1 + 1e-3)).all())
        assert float(through_one.mean()) < float(through_all.mean())


def test_20_the_predictive_averages_densities_not_logits() -> None:
    model, thetas = linear_model(4, 0.5), POSTERIOR.sample(8, generator(6))
    each = torch.stack([model.at(theta)(QUERY).log_prob(TARGET) for theta in thetas])
    mixed = PosteriorPredictive(model, thetas)(QUERY).log_prob(TARGET)
    assert_exact(mixed, torch.log(each.exp().mean(0)))
    net = BayesianModel(nn.Linear(4, 3, dtype=FLOAT), Categorical())
    several = randn(5, 15, seed=7)
    probs = torch.stack([net.at(theta)(QUERY).probs for theta in several]).mean(0)
    assert_exact(PosteriorPredictive(net, several)(QUERY).probs, probs)


# --- 21: balls ----------------------------------------------------------------------------------

CENTRES = torch.rand(400, 5, dtype=FLOAT, generator=generator(10))
SCALES = torch.tensor([0.5, 1.0, 2.0, 1.0, 3.0], dtype=FLOAT)
MASK = torch.tensor([True, True, False, True, True])
BALLS = {
    "L2": L2(0.7),
    "L2 in a box": L2(0.7, box=(0.0, 1.0)),
    "L2 with scales": L2(0.7, scale=SCALES),
    "L2 with a mask": L2(0.7, mask=MASK),
    "L2 with all": L2(0.7, box=(0.0, 1.0), scale=SCALES, mask=MASK),
    "Linf": Linf(0.3),
    "Linf in a box": Linf(0.3, box=(0.0, 1.0)),
    "Linf with all": Linf(0.3, box=(0.0, 1.0), scale=SCALES, mask=MASK),
}


def size(ball: Any, d: Tensor) -> Tensor:
    """norm(d / scale), written apart from the library."""
    d = d if ball.scale is None else d / ball.scale
    return d.norm(dim=1) if isinstance(ball, L2) else d.abs().amax(1)


@pytest.mark.parametrize("name", BALLS)
def test_21_projection(name: str) -> None:
    """Inside the set; idempotent; the identity inside; non-expansive (in the ball's own metric when
    it has scales)."""
    ball, x = BALLS[name], CENTRES
    one, two = x + 2 * randn(400, 5, seed=11), x + 2 * randn(400, 5, seed=12)
    first, second = ball.project(one, x), ball.project(two, x)
    assert float(size(ball, first - x).max()) <= ball.eps * (1 + 1e-12)
    if ball.box is not None:
        assert bool(((first >= 0) & (first <= 1)).all())
    if ball.mask is not None:
        assert torch.equal(first[:, ~MASK], x[:, ~MASK])
    torch.testing.assert_close(ball.project(first, x), first, rtol=1e-14, atol=1e-14)
    inside = x + 0.999 * (first - x)
    torch.testing.assert_close(ball.project(inside, x), inside, rtol=1e-14, atol=1e-14)
    scale = 1.0 if ball.scale is None else ball.scale
    before, after = ((one - two) / scale).norm(dim=1), ((first - second) / scale).norm(dim=1)
    assert bool((after <= before * (1 + 1e-12)).all())
    moved = (one - x).abs().sum(1) > 0
    assert bool(moved.all())


@pytest.mark.parametrize("name", BALLS)
def test_21_random_points_and_steepest_moves_stay_in_the_ball(name: str) -> None:
    ball, x = BALLS[name], CENTRES
    drawn = ball.random(x, generator=generator(13))
    torch.testing.assert_close(ball.project(drawn, x), drawn, rtol=1e-12, atol=1e-12)
    gradient = randn(400, 5, seed=14)
    move = ball.ascend(gradient, ball.eps)
    if ball.mask is not None:
        assert bool((move[:, ~MASK] == 0).all())
    assert_exact(size(ball, move), torch.full((400,), ball.eps, dtype=FLOAT))
    # steepest: no feasible move gains more
    gain = (gradient * move).sum(1)
    for seed in range(20):
        rival = randn(400, 5, seed=100 + seed)
        rival = rival if ball.mask is None else rival * MASK
        rival = ball.eps * rival / size(ball, rival)[:, None]
        assert bool(((gradient * rival).sum(1) <= gain * (1 + 1e-12)).all())


def test_21_random_points_fill_the_l2_ball_uniformly() -> None:
    """(|d|/eps)^n is uniform and the direction has no preference."""

    def draw(num: int, source: torch.Generator) -> Tensor:
        d = L2(0.7).random(torch.zeros(num, 3, dtype=FLOAT), generator=source)
        return torch.cat([uniform_cells((d.norm(dim=1) / 0.7) ** 3), d, d[:, :1] * d[:, 1:2]], 1)

    assert mean_test(draw, [1 / 8] * 8 + [0.0] * 4, resolution=0.005)


# --- 21: channels -------------------------------------------------------------------------------


class Generator(nn.Module):
    """A perturbation generator with moments that depend on x and y."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return 0.3 * torch.tanh(x) + 0.1 * y.reshape(-1, *[1] * (x.ndim - 1)), torch.sin(3 * x)


def mix_of(stratified: bool = False) -> Mixture:
    attacks = [AttackChannel(one_step(L2(0.8), loss), sigma=0.25) for loss in (nll, squared_error)]
    return Mixture([0.4, 0.35, 0.25], [Noise(0.4), *attacks], stratified=stratified)


CHANNELS: dict[str, Callable[[], Any]] = {
    "noise": lambda: Noise(0.3),
    "attack": lambda: AttackChannel(one_step(L2(0.8)), sigma=0.3),
    "mixture": mix_of,
    "mixture with a foreign part": lambda: Mixture(
        [0.3, 0.7], [Noise(0.2), AffineChannel(0.5, 0.3)], stratified=False
    ),
    "nested mixture": lambda: Mixture([0.5, 0.5], [mix_of(), Noise(1.0)], stratified=False),
    "learned": lambda: Learned(Generator(), L2(1.0), sigma_range=(0.1, 0.6)),
    "mixture with a learned part": lambda: Mixture(
        [0.6, 0.4],
        [Learned(Generator(), L2(1.0), sigma_range=(0.1, 0.6)), Noise(0.2)],
        stratified=False,
    ),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_21_density_integrates_to_one(name: str) -> None:
    """In two dimensions, on a fine grid, for every reference point."""
    channel, predict = CHANNELS[name](), linear_model(2).at(torch.tensor([0.8, -0.5], dtype=FLOAT))
    x, y = (
        torch.tensor([[0.3, -0.4], [1.0, 0.2]], dtype=FLOAT),
        torch.tensor([0.7, -0.3], dtype=FLOAT),
    )
    axis = torch.linspace(-8, 8, 401, dtype=FLOAT)
    grid = torch.cartesian_prod(axis, axis)
    log_p = channel.density(predict, x, y).log_prob(grid)
    assert log_p.shape == (2, len(grid))
    torch.testing.assert_close(
        log_p.exp().sum(1) * 0.04**2, torch.ones(2, dtype=FLOAT), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("name", CHANNELS)
def test_21_samples_fit_the_density(name: str) -> None:
    """In one dimension: the density's own distribution function makes the samples uniform."""
    channel, predict = CHANNELS[name](), linear_model(1).at(torch.tensor([0.8], dtype=FLOAT))
    x, y = torch.tensor([[0.6]], dtype=FLOAT), torch.tensor([1.7], dtype=FLOAT)
    grid = torch.linspace(-8, 8, 16_001, dtype=FLOAT)
    density = channel.density(predict, x, y).log_prob(grid[:, None])[0].exp()
    cumulated = torch.cumsum(density, 0) * 1e-3 - 0.5 * density * 1e-3
    assert float(cumulated[-1]) == pytest.approx(1, abs=1e-9)

    def draw(num: int, source: torch.Generator) -> Tensor:
        x_adv = channel.sample(predict, x.expand(num, 1), y.expand(num), generator=source)
        assert x_adv.shape == (num, 1)
        place = (x_adv[:, 0].clamp(-7.999, 7.999) + 8) * 1000
        left = place.long()
        u = torch.lerp(cumulated[left], cumulated[left + 1], place - left)
        return uniform_cells(u, 16)

    assert mean_test(draw, [1 / 16] * 16, resolution=0.002)


@pytest.mark.parametrize("name", CHANNELS)
def test_21_samples_fit_the_density_in_three_dimensions(name: str) -> None:
    """E over samples of q/p = 1 and of f q/p = E_q f, for a narrow q within the channel's reach."""
    channel = CHANNELS[name]()
    predict = linear_model(3).at(torch.tensor([0.8, -0.5, 0.2], dtype=FLOAT))
    x, y = torch.tensor([[0.3, -0.4, 0.1]], dtype=FLOAT), torch.tensor([0.9], dtype=FLOAT)
    density = channel.density(predict, x, y)
    probe = channel.sample(predict, x.expand(256, 3), y.expand(256), generator=generator(15))
    centre = probe[density.log_prob(probe)[0].argmax()]
    q = torch.distributions.Normal(centre, 0.08)

    def draw(num: int, source: torch.Generator) -> Tensor:
        x_adv = channel.sample(predict, x.expand(num, 3), y.expand(num), generator=source)
        ratio = (q.log_prob(x_adv).sum(1) - density.log_prob(x_adv)[0]).exp()
        return torch.cat([ratio[:, None], ratio[:, None] * (x_adv - centre)], 1)

    assert mean_test(
        draw, [1.0, 0.0, 0.0, 0.0], resolution=torch.tensor([0.02, 0.002, 0.002, 0.002]), num=16_384
    )


def test_21_mixture_density_is_the_weighted_sum() -> None:
    predict = linear_model(2).at(torch.tensor([0.8, -0.5], dtype=FLOAT))
    x, y, x_adv = randn(6, 2, seed=16), randn(6, seed=17), randn(9, 2, seed=18)
    mixture = mix_of()
    parts = torch.stack([part.density(predict, x, y).log_prob(x_adv) for part in mixture.channels])
    expected = torch.logsumexp(
        torch.tensor([0.4, 0.35, 0.25], dtype=FLOAT).log()[:, None, None] + parts, 0
    )
    assert_exact(mixture.density(predict, x, y).log_prob(x_adv), expected)
    centre = one_step(L2(0.8))(predict, x, y)
    squares = ((x_adv[None] - centre[:, None]) ** 2).sum(-1)
    assert_exact(parts[1], -squares / (2 * 0.25**2) - math.log(2 * math.pi * 0.25**2))


def test_21_without_noise_there_are_samples_but_no_density() -> None:
    predict = linear_model(2).at(torch.tensor([0.8, -0.5], dtype=FLOAT))
    x, y = randn(4, 2, seed=19), randn(4, seed=20)
    attack = one_step(L2(0.5))
    dirac = AttackChannel(attack, 0.0)
    assert torch.equal(Noise(0.0).sample(predict, x, y), x)
    assert_exact(dirac.sample(predict, x, y), attack(predict, x, y))
    for channel in (Noise(0.0), dirac, Mixture([0.5, 0.5], [Noise(0.1), dirac])):
        with pytest.raises(ValueError, match="density"):
            channel.density(predict, x, y)


@pytest.mark.parametrize("stratified", [False, True])
def test_21_a_component_without_weight_is_never_used(stratified: bool) -> None:
    class Refuses:
        def sample(self, *args: Any, **kwargs: Any) -> Tensor:
            raise AssertionError("a component without weight was sampled")

        def density(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("a component without weight was scored")

    predict = linear_model(2).at(torch.tensor([0.8, -0.5], dtype=FLOAT))
    x, y = randn(50, 2, seed=21), randn(50, seed=22)
    for weights in ([0.0, 1.0, 0.0], [0.0, 0.3, 0.7]):
        last = Refuses() if weights[2] == 0 else Noise(0.4)
        mixture = Mixture(weights, [Refuses(), Noise(0.3), last], stratified=stratified)
        assert not torch.equal(mixture.sample(predict, x, y, generator=generator(23)), x)
        kept = [
            part.density(predict, x).log_prob(x) + math.log(w)
            for w, part in zip(weights[1:], [Noise(0.3), last], strict=True)
            if w
        ]
        expected = torch.logsumexp(torch.stack(kept), 0)
        assert_exact(mixture.density(predict, x, y).log_prob(x), expected)


def test_21_channel_samples_are_not_clipped() -> None:
    """The attack stays in the box, the noise does not: a clipped Gaussian would have no such
    density."""
    predict = linear_model(2).at(torch.tensor([0.8, -0.5], dtype=FLOAT))
    x, y = torch.rand(500, 2, dtype=FLOAT, generator=generator(24)), randn(500, seed=25)
    ball = L2(0.5, box=(0.0, 1.0))
    x_adv = AttackChannel(one_step(ball), 0.3).sample(predict, x, y, generator=generator(26))
    assert float(x_adv.min()) < -0.1
    assert float(x_adv.max()) > 1.1


# --- 22: stratified batches ---------------------------------------------------------------------

WEIGHTS = [0.4, 0.2, 0.1, 0.3]
SHIFTS = torch.tensor([0.0, 1.0, 3.0, -2.0], dtype=FLOAT)


class Shift:
    """x' = x + by: the sample tells its component."""

    def __init__(self, by: float) -> None:
        self.by = by

    def sample(
        self, predict: Any, x: Tensor, y: Tensor | None = None, *, generator: Any = None
    ) -> Tensor:
        return x + self.by

    def density(self, predict: Any, x: Tensor, y: Tensor | None = None) -> Any:
        raise ValueError("no density")


def shares(stratified: bool, batch: int) -> Callable[[int, torch.Generator], Tensor]:
    """Draws of the components of one batch, as indicators (num, batch, component)."""
    mixture = Mixture(WEIGHTS, [Shift(float(by)) for by in SHIFTS], stratified=stratified)

    def draw(num: int, source: torch.Generator) -> Tensor:
        x = torch.zeros(batch, 1, dtype=FLOAT)
        batches = [mixture.sample(None, x, generator=source)[:, 0] for _ in range(num)]
        return (torch.stack(batches)[:, :, None] == SHIFTS).to(FLOAT)

    return draw


@pytest.mark.parametrize("batch", [1, 7, 20])
@pytest.mark.parametrize("stratified", [False, True])
def test_22_every_position_has_the_mixtures_weights(stratified: bool, batch: int) -> None:
    draw = shares(stratified, batch)
    expected = torch.tensor(WEIGHTS, dtype=FLOAT).expand(batch, 4)
    assert mean_test(draw, expected, resolution=0.015, num=1024, max_num=4096)


@pytest.mark.parametrize("batch", [7, 20])
def test_22_stratified_shares_are_exact_up_to_one_example(batch: int) -> None:
    counts = shares(True, batch)(300, generator(30)).sum(1)
    wanted = batch * torch.tensor(WEIGHTS, dtype=FLOAT)
    assert bool(((counts - wanted).abs() < 1).all())
    assert bool((counts.sum(1) == batch).all())
    if batch == 20:  # whole numbers wanted: always met
        assert_exact(counts, wanted.expand_as(counts))


def test_22_stratified_batches_have_less_variance() -> None:
    """Batch means: the mixture's mean both ways; iid variance Var/B, stratified far less."""
    batch, weights = 7, torch.tensor(WEIGHTS, dtype=FLOAT)
    mean = float(weights @ SHIFTS)
    iid_variance = float(weights @ SHIFTS**2 - mean**2) / batch

    def moments(stratified: bool) -> Callable[[int, torch.Generator], Tensor]:
        draw = shares(stratified, batch)

        def features(num: int, source: torch.Generator) -> Tensor:
            batch_mean = (draw(num, source) @ SHIFTS).mean(1)
            return torch.stack([batch_mean, (batch_mean - mean) ** 2], 1)

        return features

    resolution = torch.tensor([0.02, 0.02], dtype=FLOAT)
    assert mean_test(
        moments(False), [mean, iid_variance], resolution=resolution, num=2048, max_num=8192
    )
    stratified = moments(True)(2048, generator(31))
    assert mean_test(
        lambda n, g: moments(True)(n, g)[:, 0], mean, resolution=0.02, num=2048, max_num=8192
    )
    assert float(stratified[:, 1].mean()) < 0.2 * iid_variance


def test_22_only_the_examples_of_a_component_pay_for_it() -> None:
    """An attack is computed for the examples that use it, and one gradient pass serves attacks that
    differ in loss."""
    model = linear_model(2)
    seen: list[int] = []

    def predict(x: Tensor) -> Any:
        seen.append(len(x))
        return model.at(torch.tensor([0.8, -0.5], dtype=FLOAT))(x)

    x, y = randn(20, 2, seed=32), randn(20, seed=33)
    attacks = [AttackChannel(one_step(L2(0.8), loss), sigma=0.25) for loss in (nll, squared_error)]
    Mixture([0.5, 0.25, 0.25], [Noise(0.1), *attacks]).sample(
        predict, x, y, generator=generator(34)
    )
    assert seen == [10]


# --- 23: predictive entropies and moments -------------------------------------------------------


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_23_entropy_of_a_categorical_predictive(spread: float) -> None:
    model = BayesianModel(nn.Linear(3, 5, dtype=FLOAT), Categorical())
    x = randn(40, 3, seed=40)
    prediction = PosteriorPredictive(model, spread * randn(6, 20, seed=41))(x)
    value = entropy(prediction, torch.zeros(40, dtype=torch.long))
    probs = prediction.probs
    torch.testing.assert_close(value, torch.special.entr(probs).sum(1), rtol=1e-10, atol=1e-12)
    assert float(value.min()) >= 0
    assert float(value.max()) <= math.log(5) * (1 + 1e-12)
    uniform = PosteriorPredictive(model, torch.zeros(2, 20, dtype=FLOAT))(x)
    assert_exact(uniform.entropy(), torch.full((40,), math.log(5), dtype=FLOAT))


@pytest.mark.parametrize("kind", ["fixed", "learned", "heteroscedastic"])
def test_23_mixture_variance_is_within_plus_between(kind: str) -> None:
    """Var[y] = E[s^2] + Var[m], for one scale, a scale in theta, a scale for every input."""
    x, thetas = randn(10, 3, seed=42), 0.7 * randn(9, 20, seed=43)
    if kind == "heteroscedastic":
        model = BayesianModel(nn.Linear(3, 2, dtype=FLOAT), HeteroscedasticGaussian())
        thetas = thetas[:, :8]
        weight = thetas[:, :6].view(9, 2, 3)
        outputs = torch.einsum("sod,bd->sbo", weight, x) + thetas[:, None, 6:]
        means, scales = outputs[..., 0], outputs[..., 1].exp()
    else:
        learned = kind == "learned"
        model = BayesianModel(nn.Linear(3, 1, dtype=FLOAT), Gaussian(0.6, learned=learned))
        thetas = thetas[:, : 5 if learned else 4]
        means = thetas[:, :3] @ x.T + thetas[:, 3:4]
        scales = (thetas[:, 4:].exp() if learned else torch.full((9, 1), 0.6, dtype=FLOAT)).expand(
            9, 10
        )
    assert model.num_params == thetas.shape[1]
    prediction = PosteriorPredictive(model, thetas)(x)
    assert_exact(prediction.mean, means.mean(0))
    expected = (scales**2).mean(0) + means.var(0, unbiased=False)
    assert_exact(prediction.variance, expected)
    y = randn(10, seed=44)
    each = torch.distributions.Normal(means, scales).log_prob(y)
    assert_exact(prediction.log_prob(y), torch.logsumexp(each, 0) - math.log(9))
    assert_exact(squared_error(prediction, y), (y - means.mean(0)) ** 2)


def test_23_one_gaussians_entropy_has_no_input_gradient() -> None:
    model = linear_model(4, 0.5)
    thetas = POSTERIOR.sample(8, generator(45))
    x = QUERY.clone().requires_grad_()
    value = entropy(model.at(thetas[0])(x), TARGET)
    assert_exact(value, torch.full((15,), 0.5 * math.log(2 * math.pi * math.e * 0.25), dtype=FLOAT))
    assert not value.requires_grad or bool((torch.autograd.grad(value.sum(), x)[0] == 0).all())
    # the mixture over thetas has one: an entropy attack must go through the predictive
    through = entropy(PosteriorPredictive(model, thetas)(x), TARGET)
    (gradient,) = torch.autograd.grad(through.sum(), x)
    assert float(gradient.norm(dim=1).min()) > 1e-3
    predict = PosteriorPredictive(model, thetas)
    attacked = entropy_pgd(L2(EPS))(predict, QUERY, TARGET, generator=generator(46))
    assert bool((entropy(predict(attacked), TARGET) > through).all())


def test_a_column_of_targets_is_one_output_and_never_broadcast() -> None:
    """(B, 1) against (B,) would give (B, B) errors, summed into a far weaker attack."""
    prediction = torch.distributions.Normal(torch.tensor([0.0, 3.0]), 1.0)
    y = torch.tensor([1.0, 5.0])
    assert (
        squared_error(prediction, y.unsqueeze(1)).tolist()
        == squared_error(prediction, y).tolist()
        == [1.0, 4.0]
    )
    with pytest.raises(ValueError, match="y must have the prediction's shape"):
        squared_error(prediction, torch.zeros(3))

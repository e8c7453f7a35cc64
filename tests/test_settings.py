"""Every setting of an attack, a likelihood, an objective or a decision has its effect, and attacks
keep the worst of what they asked."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, Independent, Normal

import advbayes.attacks
from advbayes import (
    APGD,
    L2,
    PGD,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Gaussian,
    HardLabel,
    HeteroscedasticGaussian,
    Linf,
    LogitPairing,
    MinimumNorm,
    MultiStart,
    Noise,
    PointMass,
    RandomSearch,
    Square,
    Suite,
    Trades,
    Transfer,
    entropy,
    margin,
    nll,
    one_step,
    pgd,
    squared_error,
)
from advbayes.attacks import ByLoss, Exceeding, certainty, for_rows
from advbayes.attacks.gradients import NoGradientWarning, score
from advbayes.estimators import RobustClassifier, RobustRegressor, robust_scorer
from advbayes.likelihoods import GaussianMixture
from advbayes.predictive.decisions import (
    Choices,
    Spoiling,
    decide,
    utility_under,
    worst_case_utility,
)
from advbayes.purification import Purifier
from advbayes.purification.attacks import Annealed, NearestCentre
from advbayes.types import Attack, Predictor

from .contracts import seeded


@lru_cache(None)
def net(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = nn.Sequential(nn.Linear(40, 16), nn.Tanh(), nn.Linear(16, outputs))
    return made.requires_grad_(False)


def classes(x: Tensor) -> Distribution:
    return CategoricalDistribution(logits=6 * net()(x))


def numbers(x: Tensor) -> Distribution:
    return Normal(net()(x)[:, 0], 0.5)


def steep(x: Tensor) -> Distribution:
    return CategoricalDistribution(logits=40 * torch.stack([x[:, 0], -x[:, 1], x[:, 2]], 1))


class Watched:
    """A predictor that keeps what it was asked."""

    def __init__(self, predict: Predictor) -> None:
        self.predict, self.asked = predict, list[Tensor]()

    def __call__(self, x: Tensor) -> Distribution:
        self.asked.append(x.detach().clone())
        return self.predict(x)


def at_distances() -> Tensor:
    """Of many inputs those that are, to first order, as far from another class as these: some that
    an attack of one step breaks, some that it takes more for, some that none breaks."""
    x = torch.randn(2000, 40, generator=torch.Generator().manual_seed(1)).requires_grad_()
    first, second = net()(x).topk(2, dim=1).values.T
    (slope,) = torch.autograd.grad((first - second).sum(), x)
    distance = ((first - second) / slope.norm(dim=1)).detach()
    wanted = torch.tensor([0.03, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 9.0, 0.6, 0.7])
    return x.detach()[(distance - wanted.unsqueeze(1)).abs().argmin(1)]


X = at_distances()
Y = (net()(X).argmax(1) + torch.tensor([0] * 10 + [1, 1])) % 3  # the last two are wrong at once


def trace(attack: Attack, predict: Predictor = classes) -> tuple[list[Tensor], Tensor]:
    """All that an attack asks, and what it returns."""
    asked = Watched(predict)
    with torch.no_grad():
        y = Y if isinstance(predict(X), CategoricalDistribution) else Y.float()
    return asked.asked, attack(asked, X, y, generator=seeded())


def same(one: tuple[list[Tensor], Tensor], other: tuple[list[Tensor], Tensor]) -> bool:
    first, second = ([*asked, end] for asked, end in (one, other))
    return len(first) == len(second) and all(map(torch.equal, first, second))


BALL, OTHER = L2(0.6), L2(0.5)
MANY = (classes, steep)
# kind -> the settings to begin from, and another value for each one
SETTINGS: dict[type, tuple[dict[str, Any], dict[str, Any]]] = {
    PGD: (
        {"ball": BALL, "stages": ((nll, 6),)},
        {
            "ball": OTHER,
            "stages": ((margin, 6),),
            "step_size": 0.1,
            "restarts": 3,
            "stop_at_success": True,
        },
    ),
    APGD: (
        {"ball": BALL, "steps": 20},
        {
            "ball": OTHER,
            "loss": nll,
            "steps": 19,
            "restarts": 2,
            "targets": 2,
            "stop_at_success": True,
            "momentum": 0.5,
            "progress": 0.2,
        },
    ),
    MultiStart: (
        {"ball": BALL, "steps": 9, "restarts": 12},
        {"ball": OTHER, "loss": margin, "steps": 8, "restarts": 11},
    ),
    RandomSearch: (
        {"ball": BALL, "num": 8},
        {"ball": OTHER, "num": 7, "loss": entropy, "stop_at_success": True},
    ),
    Square: (
        {"ball": BALL, "queries": 30},
        {"ball": OTHER, "queries": 20, "loss": entropy, "share": 0.3, "stop_at_success": False},
    ),
    HardLabel: (
        {"ball": L2(1.4), "rounds": 3, "probes": 5},
        {
            "ball": L2(1.3),
            "rounds": 2,
            "probes": 4,
            "loss": advbayes.attacks.Toward(margin),
            "stop_at_success": False,
        },
    ),
    MinimumNorm: (
        {"ball": BALL, "steps": 8},
        {"ball": OTHER, "loss": nll, "steps": 7, "restarts": 2, "targets": 1, "shrink": 0.2},
    ),
    Transfer: (
        {"attack": pgd(BALL, 3), "sources": MANY},
        {"attack": pgd(OTHER, 3), "sources": MANY[:1], "rank": ByLoss(certainty)},
    ),
    Suite: (
        {"attacks": (one_step(BALL), pgd(BALL, 3))},
        {
            "attacks": (one_step(BALL), pgd(BALL, 4)),
            "regression": (pgd(BALL, 3, squared_error),),
            "rank": entropy,
        },
    ),
}


def test_every_attack_is_held_to_its_settings() -> None:
    public = {
        value
        for value in vars(advbayes.attacks).values()
        if inspect.isclass(value)
        and dataclasses.is_dataclass(value)
        and "generator" in inspect.signature(value.__call__).parameters
    }
    assert public == set(SETTINGS)
    for kind, (_, others) in SETTINGS.items():
        assert set(others) == {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, (_, others) in SETTINGS.items() for name in others]
)
def test_a_setting_of_an_attack_has_its_effect(kind: type, name: str) -> None:
    base, others = SETTINGS[kind]
    predict = numbers if name == "regression" else classes
    before = trace(kind(**base), predict)
    assert same(before, trace(kind(**base), predict))
    assert not same(before, trace(kind(**base | {name: others[name]}), predict))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (Annealed, "factors", (3.0, 1.0)),
        (Annealed, "steps", 3),
        (Annealed, "loss", nll),
        (Annealed, "start", one_step(BALL)),
        (NearestCentre, "num", 1),
    ],
)
def test_a_setting_of_an_attack_on_purifiers_has_its_effect(
    kind: type, name: str, value: Any
) -> None:
    model = BayesianModel(copy.deepcopy(net()).requires_grad_(True), Categorical())
    x, reference = torch.randn(90, 40, generator=seeded(5)).split([60, 30])
    purifier = Purifier(model, Noise(1.5), model.initial_theta().unsqueeze(0), reference)
    base: dict[str, Any] = {"ball": BALL} | ({"steps": 4} if kind is Annealed else {})
    ends = [
        kind(**base | more)(purifier, x, net()(x).argmax(1), generator=seeded())
        for more in ({}, {}, {name: value})
    ]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


# --- what is kept --------------------------------------------------------------------------------


def rugged(x: Tensor) -> Tensor:
    """Many maxima within reach, of which a start finds its own."""
    return 3 * torch.sin(4 * x[:, :3]) + net()(x)


def rugged_classes(x: Tensor) -> Distribution:
    return CategoricalDistribution(logits=rugged(x))


def rugged_numbers(x: Tensor) -> Distribution:
    return Normal(rugged(x).sum(1), 0.5)


@pytest.mark.parametrize("predict", [rugged_classes, rugged_numbers], ids=["classes", "regression"])
@pytest.mark.parametrize(
    "make",
    [
        lambda loss: pgd(BALL, 4, loss, restarts=2),
        lambda loss: pgd(BALL, 4, loss, restarts=5),
        lambda loss: APGD(BALL, loss, 6, restarts=4),
        lambda loss: MultiStart(BALL, loss, 6, 9),
        lambda loss: RandomSearch(BALL, 6, loss),
        lambda loss: Square(BALL, 12, loss, stop_at_success=False),
        lambda loss: Transfer(pgd(BALL, 3, loss), MANY),
    ],
    ids=["two restarts", "five restarts", "APGD", "MultiStart", "random", "Square", "transfer"],
)
def test_an_attack_returns_the_worst_of_all_points_it_asked_about(
    make: Callable[[Any], Attack], predict: Predictor
) -> None:
    """Asked about one example at a time, all points are that example's; a class broken once stays
    broken."""
    is_class = predict is rugged_classes
    loss = margin if is_class else squared_error
    attack = make(loss)
    if not is_class and isinstance(attack, Transfer):
        attack = dataclasses.replace(
            attack, sources=(rugged_numbers, lambda x: Normal(x[:, 0], 0.5))
        )
    improved = 0
    for row in range(24):
        x = torch.randn(1, 40, generator=seeded(100 + row))
        y = rugged(x).argmax(1) if is_class else torch.zeros(1)
        asked = Watched(predict)
        end = attack(asked, x, y, generator=seeded(row))
        points = torch.cat(asked.asked)
        values, broken = score(predict, loss, points, y.expand(len(points)))
        value, hit = score(predict, loss, end, y)
        assert bool(hit) == bool(broken.any())
        worst = values[broken] if bool(broken.any()) else values
        # of broken points the attack may keep the first it saw, where it ranks them by another loss
        if not isinstance(attack, Transfer):
            assert float(value) == pytest.approx(float(worst.max()), rel=1e-5, abs=1e-5)
        improved += float(value) > float(values[0]) + 1e-6
    assert improved > 12


@pytest.mark.parametrize("eps", [1.0, 3.0])
@pytest.mark.parametrize("step_size", [0.05, 0.2])
@pytest.mark.parametrize("kind", [L2, Linf])
def test_a_step_has_the_length_asked_for(kind: type, step_size: float, eps: float) -> None:
    """In the norm of the ball; some of the restarts begin inside, where no projection shortens
    it."""
    ball = kind(eps)
    asked = Watched(lambda x: Normal(x[:, 0] + 0.3 * x[:, 1].sin(), 1.0))
    attack = pgd(ball, 2, step_size=step_size, restarts=20)
    attack(asked, torch.zeros(1, 2), torch.zeros(1), generator=seeded(2))
    first, second = [rows[1:] for rows in asked.asked if len(rows) == 20][:2]
    assert float(ball.norm(second - first).max()) == pytest.approx(step_size, rel=1e-4)


def test_a_threshold_stays_with_the_examples_that_are_left() -> None:
    loss = Exceeding(squared_error, 2.0)
    prediction = numbers(X)
    part = for_rows(loss, torch.tensor([4, 1]))
    wanted = loss(prediction, Y.float())[[4, 1]]
    assert torch.allclose(part(numbers(X[[4, 1]]), Y[[4, 1]].float()), wanted, atol=1e-5)


# --- likelihoods, objectives ---------------------------------------------------------------------


@pytest.mark.parametrize("least", [0.0, 0.02, 0.7])
def test_no_predicted_scale_is_below_the_least_one(least: float) -> None:
    output = torch.tensor([[0.0, -9.0], [0.0, -1.0], [0.0, 1.0]], dtype=torch.float64)
    likelihood, none = HeteroscedasticGaussian(least), torch.empty(0)
    wanted = output[:, 1].exp().clamp_min(least)
    assert torch.allclose(likelihood(output, none).stddev, wanted, rtol=1e-12)
    y = torch.ones(3, dtype=torch.float64)
    assert torch.allclose(likelihood.log_prob(output, y, none), Normal(0.0, wanted).log_prob(y))


@pytest.mark.parametrize("scale", [0.5, (0.5, 2.0, 3.0)], ids=["one", "each"])
def test_learned_scales_begin_where_they_are_set(scale: Any) -> None:
    likelihood = Gaussian(scale, learned=True, num_outputs=3)
    model = BayesianModel(nn.Linear(2, 3), likelihood)
    predicted = model.at(model.initial_theta())(torch.zeros(4, 2))
    assert torch.allclose(predicted.stddev, torch.tensor(scale).expand(4, 3))


@pytest.mark.parametrize("outputs", [1, 2, 5])
def test_entropies_of_several_outputs_add_up(outputs: int) -> None:
    """For one component the mixture is a Gaussian; for more, one with the same moments."""
    shape = (4, 6, outputs) if outputs > 1 else (4, 6)
    means = torch.randn(shape, generator=seeded(1), dtype=torch.float64)
    scales = 0.5 + torch.rand(shape, generator=seeded(2), dtype=torch.float64)
    for num in (1, 4):
        mixture = GaussianMixture(means[:num], scales[:num])
        matched: Distribution = Normal(mixture.mean, mixture.variance.sqrt())
        wanted = (Independent(matched, 1) if outputs > 1 else matched).entropy()
        assert torch.allclose(mixture.entropy(), wanted, rtol=1e-12)


@pytest.mark.parametrize("level", [1e-9, 1e-4, 0.03, 0.5, 0.97, 1 - 1e-4, 1 - 1e-9])
def test_quantiles_go_back_to_their_level_far_out_too(level: float) -> None:
    means = torch.tensor([[-1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    scales = torch.tensor([[0.3, 1.0], [1.5, 1.0]], dtype=torch.float64)
    mixture = GaussianMixture(means, scales)
    wanted = torch.full((2,), level, dtype=torch.float64)
    found = mixture.icdf(wanted)
    assert torch.allclose(mixture.cdf(found), wanted, rtol=1e-5, atol=0)
    assert float(found[1]) == pytest.approx(float(Normal(0.0, 1.0).icdf(wanted[1])), abs=1e-5)


@pytest.mark.parametrize("penalty", [None, Trades(2.0), Trades(2.0, "clean"), LogitPairing(0.7)])
@pytest.mark.parametrize("weights", [None, (0.5, 2.0, 1.0)])
def test_several_draws_of_the_channel_are_the_average_of_each(penalty: Any, weights: Any) -> None:
    """The surrogate and its penalty are means over theta and over the channel: the terms of S x K
    draws are the averages of those of one draw at a time."""
    model = BayesianModel(nn.Linear(40, 3).double(), Categorical())
    posterior = PointMass(model)
    thetas = torch.randn(2, model.num_params, generator=seeded(4), dtype=torch.float64)
    x = X.double()
    x_adv = x + torch.randn(2, 3, *x.shape, generator=seeded(5), dtype=torch.float64)

    def terms(s: slice, k: slice) -> Tensor:
        objective = ChannelELBO(
            60, num_theta=2, num_channel=3, penalty=penalty, kl_weight=0.3, class_weight=weights
        )
        found = objective.terms(model, posterior, thetas[s], x, x_adv[s, k], Y)
        return torch.stack([found.bound, found.log_likelihood, found.kl, found.penalty]).detach()

    each = [terms(slice(s, s + 1), slice(k, k + 1)) for s in range(2) for k in range(3)]
    whole = terms(slice(0, 2), slice(0, 3))
    assert torch.allclose(whole, torch.stack(each).mean(0), rtol=1e-12)
    assert float(whole[0]) == pytest.approx(float(whole[1] - 0.3 * whole[2] - whole[3]))
    assert bool(whole[3] > 0) is (penalty is not None)


# --- decisions -----------------------------------------------------------------------------------


def calls(run: Callable[[Predictor], object], predict: Predictor = classes) -> int:
    asked = Watched(predict)
    run(asked)
    return len(asked.asked)


@pytest.mark.parametrize(
    "run",
    [
        lambda predict, steps: decide(
            predict, X, torch.eye(3), worst_case=L2(0.3), steps=steps, generator=seeded()
        ),
        lambda predict, steps: worst_case_utility(
            predict, X, Choices(torch.eye(3)), L2(0.3), steps=steps, generator=seeded()
        ),
        lambda predict, steps: utility_under(
            predict,
            (X, Y),
            Choices(torch.eye(3)),
            worst_case=L2(0.3),
            steps=steps,
            generator=seeded(),
        ),
    ],
    ids=["decide", "worst_case_utility", "utility_under"],
)
def test_worst_cases_take_as_many_steps_as_asked_for(run: Callable[[Predictor, int], Any]) -> None:
    """Each further step is one more question for each of the three actions."""
    two, five = (calls(lambda predict, steps=steps: run(predict, steps)) for steps in (2, 5))
    assert five - two == 3 * 3


def test_the_temperature_of_a_spoiler_smooths_the_decision() -> None:
    prediction, choices = classes(X), Choices(torch.eye(3))
    cold, warm = (Spoiling(choices, temperature)(prediction, Y) for temperature in (1e-4, 1e4))
    taken = choices.expected(prediction).argmax(1)
    assert torch.allclose(cold, -(taken == Y).float(), atol=1e-4)
    assert torch.allclose(warm, torch.full((len(X),), -1 / 3), atol=1e-4)


def test_the_draws_of_an_expected_utility_are_as_many_as_asked_for() -> None:
    seen: list[int] = []

    def utility(action: Tensor, y: Tensor) -> Tensor:
        seen.append(len(y))
        return -(action - y).square()

    prediction = Normal(torch.zeros(2), torch.ones(2))
    Choices(utility, torch.tensor([0.0]), num=33).expected(prediction)
    found = Choices(utility, torch.tensor([0.0]), num=20_000).expected(prediction)
    assert seen == [33, 20_000]
    assert torch.allclose(found, -torch.ones(2, 1), atol=5 * math.sqrt(2 / 20_000))


@pytest.mark.parametrize("kind", [RobustClassifier, RobustRegressor])
def test_a_robust_score_takes_as_many_steps_and_the_seed_asked_for(kind: type) -> None:
    """Each further step is one more question; the seed draws the start where there is no
    gradient."""
    x = X[:, :3].double().numpy()
    metric = "accuracy" if kind is RobustClassifier else "rmse"
    fitted = kind(hidden=(), epochs=1, num_thetas=2, random_state=0).fit(x, Y.numpy())
    inner = fitted.predictor_

    def asked(flat: bool, **options: int) -> list[Tensor]:
        watched = Watched(lambda x: inner(x.detach() if flat else x))
        fitted.predictor_ = watched
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoGradientWarning)
            robust_scorer(metric, **options)(fitted, x, Y.numpy())
        return watched.asked

    two, five = (len(asked(False, steps=steps)) for steps in (2, 5))
    assert five - two == 3
    first, again, other = (torch.cat(asked(True, steps=2, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)

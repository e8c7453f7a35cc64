"""What rests on a purifier, wherever its tables lie: widened channels, fresh thetas, the attacks
that know it, an evaluation of them, and the intervals of a purified regression."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    Annealed,
    AttackChannel,
    BayesianModel,
    Categorical,
    Gaussian,
    MeanField,
    Mixture,
    NearestCentre,
    Noise,
    Purifier,
    StraightThrough,
    evaluate,
    margin,
    nll,
    one_step,
    pgd,
)
from advbayes.attacks import search
from advbayes.attacks.gradients import loss_and_gradient
from advbayes.purification.banks import GaussianBank, Room
from advbayes.purification.diagnosis import chi_square_limit
from advbayes.runs.named import adaptive_attack
from tests.oracles import generator
from tests.test_purifier_same_answer import Setting, cosine, everywhere, exactly, with_gradient

SETTING = Setting(500, 10, 0.3, 0.5, 3, "mixture", "online", 0, 30, seed=11)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Purifier]:
    return everywhere(SETTING, tmp_path, monkeypatch)


def test_a_widened_channel_is_that_of_the_formula(places: dict[str, Purifier]) -> None:
    _, _, _, x = SETTING.draw()
    y = SETTING.target()
    for place, purifier in places.items():
        for factor in (0.5, 4.0):
            wide = purifier.widened(factor)
            wanted, direction = with_gradient(exactly(wide), nll, x.double(), y)
            value, gradient = with_gradient(wide, nll, x, y)
            torch.testing.assert_close(value, wanted, rtol=2e-5, atol=2e-5, msg=place)
            counted = direction.norm(dim=1) > 1e-10
            assert float(cosine(gradient, direction)[counted].min()) > 0.999, place


@pytest.mark.parametrize("channel", [Noise, lambda sigma: AttackChannel(one_step(L2(0.5)), sigma)])
def test_a_widened_channel_has_that_noise(channel: Any) -> None:
    model, thetas, x, query = SETTING.draw()
    y = model.at(thetas[0])(x).logits.argmax(1)  # type: ignore[attr-defined]
    found = Purifier(model, channel(0.2), thetas, (x, y)).widened(1.5).widened(2.0)
    wanted = Purifier(model, channel(0.6), thetas, (x, y))
    torch.testing.assert_close(found(query).logits, wanted(query).logits)  # type: ignore[attr-defined]
    assert repr(found).endswith(".widened(1.5).widened(2)")


def test_float32_products_are_no_farther_off_than_allowed_for() -> None:
    """The bound that decides on the precision, against log-densities from differences."""
    for seed, channel in enumerate(["noise", "features"] * 3):
        spread, sigma = (0.5, 3.0, 20.0)[seed // 2], 0.5
        setting = Setting(300, 30, sigma, spread, 1, channel, "online", 0, 50, seed)
        purifier, x = setting.build(), 3.0 * setting.draw()[3]
        (bank,) = purifier.store.banks
        assert isinstance(bank, GaussianBank)
        query = replace(purifier.query(x), dtype=torch.float32)
        every = torch.arange(300).expand(50, -1)
        exact = bank.exact_at(query, 0, every)
        products = bank.logits(query, slice(0, 1), slice(0, 300), Room())[0].double()
        error = products + bank.offset(query).unsqueeze(1) - exact
        error = (error - error.mean(1, keepdim=True)).abs().amax(1)  # what all share is no weight
        allowed = bank.rounding((query.points - query.origin).norm(dim=1))
        assert bool((error <= allowed).all())
        assert bool((error >= 1e-4 * allowed).all())


def test_options_stay_with_fresh_thetas() -> None:
    pytest.importorskip("faiss")
    model, thetas, x, _ = SETTING.draw()
    options: dict[str, Any] = {"posterior": MeanField(model), "features": lambda at: at[:, :3]}
    purifier = Purifier(
        model, Noise(0.3), thetas, x, index="faiss", num_nearest=7, left_out=0.25, **options
    )
    fresh = purifier.with_thetas(2)
    assert fresh._index is not None
    assert (fresh._index.num, fresh._left_out, fresh.features) == (7, 0.25, options["features"])
    assert purifier.widened(2.0)._index is purifier._index
    assert purifier.widened(2.0)._left_out == 0.25
    small = Purifier(model, Noise(0.3), thetas, x, memory_limit=1_500_000, **options)
    assert small.store.folder is None
    many = small.with_thetas(260)  # whose predictions take more than that
    assert many.store.folder is not None
    assert Purifier(model, Noise(0.3), thetas, x, index="faiss")._index.num == 64  # type: ignore[union-attr]


def test_settings_of_the_attacks_on_a_purifier_have_their_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step asks for one gradient, at each width in turn, from each start."""
    model, thetas, x, query = SETTING.draw()
    purifier = Purifier(model, Noise(0.3), thetas, x)
    y, ball = purifier(query).logits.argmax(1), L2(1e-4)  # type: ignore[attr-defined]
    asked: list[float] = []
    scored: list[int] = []
    gradient, score = search.loss_and_gradient, search.score

    def counted(predict: Any, loss: Any, at: Tensor, labels: Tensor) -> Any:
        asked.append(predict.store.banks[0].factor)
        return gradient(predict, loss, at, labels)

    def noted(predict: Any, loss: Any, at: Tensor, labels: Tensor) -> Any:
        scored.append(len(at))
        return score(predict, loss, at, labels)

    monkeypatch.setattr(search, "loss_and_gradient", counted)
    monkeypatch.setattr(search, "score", noted)
    Annealed(ball, (3.0, 1.0), steps=2)(purifier, query, y)
    assert asked == [3.0, 3.0, 1.0, 1.0]
    Annealed(ball, (2.0, 1.0), steps=1, start=NearestCentre(ball, 1))(purifier, query, y)
    assert asked[4:] == [2.0, 1.0] * 2
    for num in (1, 3):  # towards each centre, and across the plane between it and the own one
        scored.clear()
        NearestCentre(ball, num)(purifier, query, y)
        assert len(scored) == 1 + 2 * num
    wanted: list[Any] = []

    def loss(prediction: Any, labels: Tensor) -> Tensor:
        wanted.append(prediction)
        return nll(prediction, labels)

    Annealed(ball, (1.0,), steps=1, loss=loss)(purifier, query, y)
    assert wanted


def test_attacks_find_as_much_everywhere(places: dict[str, Purifier]) -> None:
    _, _, _, x = SETTING.draw()
    ball = L2(0.6)
    y = places["memory"](x).logits.argmax(1)  # type: ignore[attr-defined]
    for attack in (NearestCentre(ball), Annealed(ball, steps=8), pgd(ball, steps=8)):
        values = {}
        for place, purifier in places.items():
            moved = attack(purifier, x, y)
            assert bool(ball.contains(moved, x).all())
            values[place] = margin(purifier(moved), y)
        for place, value in values.items():
            close = torch.isclose(value, values["memory"], rtol=1e-2, atol=1e-2)
            # an ascent may part at a tie
            assert float(close.double().mean()) > 0.9, (attack, place)


def test_straight_through_is_the_model_s_gradient_at_the_denoised_input(
    places: dict[str, Purifier],
) -> None:
    _, _, _, x = SETTING.draw()
    y, base = SETTING.target(), places["memory"].base
    assert base is not None
    for place, purifier in places.items():
        _, _, wanted = loss_and_gradient(base, nll, places["memory"].denoise(x), y)
        _, _, gradient = loss_and_gradient(StraightThrough(purifier, base), nll, x, y)
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-5, msg=place)


@pytest.mark.parametrize("options", [{}, {"memory_limit": 1_500_000}], ids=["memory", "limit"])
def test_fresh_thetas_are_those_of_the_posterior(options: dict[str, Any]) -> None:
    model, thetas, x, query = SETTING.draw()
    posterior = MeanField(model, init_scale=0.5)
    purifier = Purifier(model, Noise(0.3), thetas, x, posterior=posterior, **options)
    fresh = purifier.with_thetas(4, generator=generator(2))
    wanted = Purifier(model, Noise(0.3), posterior.sample(4, generator=generator(2)), x)
    torch.testing.assert_close(fresh(query).logits, wanted(query).logits)  # type: ignore[attr-defined]


def test_an_evaluation_of_a_purified_regression_and_of_a_class_that_nobody_predicts() -> None:
    x = torch.randn(60, 3, generator=generator(1))
    ball = L2(0.5)
    model = BayesianModel(nn.Linear(3, 1), Gaussian(0.3))
    channel = AttackChannel(one_step(L2(0.3)), 0.3)
    regression = Purifier(
        model, channel, MeanField(model).sample(2, generator=generator(2)), (x, x.sum(1))
    )
    classes = BayesianModel(nn.Linear(3, 3), Categorical())
    theta = torch.zeros(1, classes.num_params)
    theta[0, :3], theta[0, -1] = 1.0, -50.0  # never the last class
    purified = Purifier(classes, Noise(0.3), theta, x)
    for predict, y, task in (
        (regression, x[:12].sum(1), "regression"),
        (purified, torch.arange(12) % 3, "classification"),
    ):
        attacks = {"pgd": pgd(ball, steps=3), "adaptive": adaptive_attack(ball, task=task, steps=4)}
        found = evaluate({"purified": predict}, (x[:12], y), attacks=attacks, progress=False)
        names = {row["attack"] for row in found.records()}
        assert {"pgd", "adaptive"} <= names
    # no centre of its own class to move from
    moved = NearestCentre(ball)(purified, x[:12], torch.full((12,), 2))
    assert bool(ball.contains(moved, x[:12]).all())


# --- the intervals of a purified regression -----------------------------------------------------


def regression(num: int = 300) -> tuple[Purifier, Tensor]:
    """A predictive with two modes wherever two neighbours disagree."""
    model = BayesianModel(nn.Linear(1, 1), Gaussian(0.3))
    x = torch.randn(num, 1, generator=generator(3))
    thetas = torch.tensor([[3.0, 0.0], [-3.0, 0.5]])
    channel = Mixture([0.5, 0.5], [Noise(0.2), AttackChannel(one_step(L2(0.5)), 0.4)])
    return Purifier(model, channel, thetas, (x, x[:, 0])), torch.linspace(-2, 2, 9).unsqueeze(1)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.99])
def test_an_interval_covers_what_it_says(level: float) -> None:
    """Of draws from the predictive itself, between its quantiles lie as many as promised: neither
    fewer nor more."""
    purifier, x = regression()
    prediction: Any = purifier(x)
    low, high = (prediction.icdf(torch.tensor(q)) for q in ((1 - level) / 2, (1 + level) / 2))
    num = 4000
    draws = prediction.sample((num,), generator=generator(4))
    covered = ((draws > low) & (draws < high)).double().mean(0)
    sd = math.sqrt(level * (1 - level) / num)
    assert float((covered - level).abs().max()) < 5 * sd
    below = (draws < low).double().mean(0)
    assert float((below - (1 - level) / 2).abs().max()) < 5 * sd  # on both sides alike


def test_quantiles_are_the_inverse_of_the_distribution_function() -> None:
    purifier, x = regression()
    prediction: Any = purifier(x)
    for level in (1e-6, 0.01, 0.25, 0.5, 0.75, 0.99, 1 - 1e-6):
        at = prediction.icdf(torch.tensor(level, dtype=torch.float64))
        torch.testing.assert_close(
            prediction.cdf(at), torch.full((9,), level), rtol=1e-3, atol=2e-6
        )
    levels = torch.linspace(0.05, 0.95, 9)
    assert bool((prediction.icdf(levels).diff().abs() > 0).all())
    grid = torch.linspace(-12, 12, 4001)
    density = torch.stack([prediction.log_prob(at.expand(9)).exp() for at in grid])
    torch.testing.assert_close(
        torch.trapezoid(density, grid, dim=0), torch.ones(9), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("width", [1, 2, 5, 30, 300, 3072])
def test_the_limit_of_the_support_is_the_quantile_of_chi_square(width: int) -> None:
    """Never below the exact one, so that no more than a billionth of the noise is out of support,
    and above it by less than 1 / (2 width) of it."""
    exact = float(scipy.stats.chi2.isf(scipy.stats.norm.sf(6.0), width))
    assert 0 < chi_square_limit(width) / exact - 1 < 0.5 / width


def test_support_ends_where_the_noise_does() -> None:
    """Both sides of the threshold of `out_of_support`: six standard deviations of the noise's
    length."""
    for width in (1, 5, 300):
        model = BayesianModel(nn.Linear(width, 2), Categorical())
        purifier = Purifier(
            model, Noise(0.5), torch.zeros(1, model.num_params), torch.zeros(3, width)
        )
        edge = 0.5 * math.sqrt(chi_square_limit(width))
        direction = torch.nn.functional.normalize(
            torch.randn(1, width, generator=generator(width)), dim=1
        )
        for share, out in ((0.99, False), (1.01, True)):
            diagnosis = purifier.diagnose(share * edge * direction)
            assert bool(diagnosis.out_of_support) is out
            torch.testing.assert_close(
                diagnosis.distance, torch.tensor([share * edge]), rtol=1e-5, atol=0
            )


def test_effective_sample_sizes_run_from_one_to_all() -> None:
    model = BayesianModel(nn.Linear(2, 2), Categorical())
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    middle = torch.tensor([[0.5, 0.5], [0.5, 0.0], [0.0, 0.0]])
    purifier = Purifier(model, Noise(0.05), torch.zeros(1, 6), x)
    torch.testing.assert_close(
        purifier.diagnose(middle).ess_reference, torch.tensor([4.0, 2.0, 1.0]), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("update", ["online", "offline"])
def test_draws_from_several_blocks_are_those_of_the_mixture(
    update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reference points in order, so that every block has values of its own."""
    monkeypatch.setattr("advbayes.purification.store._SMALL", 0)
    monkeypatch.setattr("advbayes.purification.banks._TILE", 0)
    monkeypatch.setattr("advbayes.purification.banks.FEWEST_ROWS", 128)
    x = torch.linspace(-3.0, 3.0, 700, dtype=torch.float64).unsqueeze(1)
    model = BayesianModel(nn.Linear(1, 1).double(), Gaussian(0.1))
    thetas = torch.tensor([[1.0, 0.0], [1.3, 0.2]], dtype=torch.float64)
    queries = torch.tensor([[-2.5], [0.3], [2.7]], dtype=torch.float64)
    prediction = Purifier(model, Noise(0.4), thetas, x, update)(queries)
    assert len(list(prediction._blocks(0, prediction._queries.blocks[0][1]))) > 2
    draws = prediction.sample((4000,), generator=generator(0))
    for k in range(len(queries)):
        levels = torch.stack([prediction.cdf(draw) for draw in draws[:300]])[:, k]
        assert scipy.stats.kstest(levels.numpy(), "uniform").pvalue > 1e-5
    error = (draws.mean(0) - prediction.mean) / (prediction.variance / len(draws)).sqrt()
    assert float(error.abs().max()) < 4.9

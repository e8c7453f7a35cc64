"""Smoothing as a Predictor: its randomness, its gradient, its thetas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution

from advbayes import (
    L2,
    BayesianModel,
    Categorical,
    FreshPredictive,
    Gaussian,
    GaussianMixture,
    MeanField,
    PosteriorPredictive,
    SmoothedAttack,
    nll,
    one_step,
    pgd,
)
from advbayes.predictive import Smoothed
from tests.oracles import FLOAT, generator, randn


def predictor(likelihood: object = None, outputs: int = 3, num: int = 4) -> PosteriorPredictive:
    model = BayesianModel(nn.Linear(5, outputs).to(FLOAT), likelihood or Categorical())  # type: ignore[arg-type]
    return PosteriorPredictive(model, 0.7 * randn(num, model.num_params))


def test_no_noise_is_no_smoothing() -> None:
    x = randn(6, 5, seed=1)
    for predict in (
        predictor(),
        predictor(Gaussian(0.3), 1),
        predictor(Gaussian(0.3, num_outputs=2), 2),
    ):
        smoothed, plain = Smoothed(predict, 0.0, num=7)(x), predict(x)
        for name in ("probs",) if hasattr(plain, "probs") else ("mean", "variance"):
            torch.testing.assert_close(getattr(smoothed, name), getattr(plain, name))


def test_an_empty_batch_has_an_empty_answer() -> None:
    none = randn(3, 5)[:0]
    for predict in (
        predictor(),
        predictor(Gaussian(0.3), 1),
        predictor(Gaussian(0.3, num_outputs=2), 2),
    ):
        found, plain = Smoothed(predict, 0.5, num=7)(none), predict(none)
        assert found.batch_shape == plain.batch_shape == (0,)
        assert found.event_shape == plain.event_shape
    assert Smoothed(predictor(), 0.5)(none).probs.shape == (0, 3)  # type: ignore[attr-defined]


def test_linear_regression_smooths_in_closed_form() -> None:
    """E over the noise of N(w.x + b, s^2) has the mean of the middle and the variance s^2 + sigma^2
    |w|^2."""
    predict, sigma = predictor(Gaussian(0.3), 1, num=1), 0.4
    x = randn(6, 5, seed=1)
    found = Smoothed(predict, sigma, num=20_000)(x)
    w = predict.thetas[0, :5]
    variance = 0.3**2 + sigma**2 * float(w @ w)
    assert float((found.mean - predict(x).mean).abs().max()) < 4.9 * math.sqrt(variance / 20_000)
    assert float((found.variance / variance - 1).abs().max()) < 4.9 * math.sqrt(2 / 20_000)


def test_learned_scales_are_smoothed_as_well() -> None:
    """A scale that is the same for all inputs is one number, read many times."""
    model = BayesianModel(nn.Linear(2, 1), Gaussian(0.5, learned=True))
    thetas = torch.tensor([[1.0, -2.0, 0.3, 0.0], [0.5, 1.0, 0.0, -1.0]])  # the last: log-scales
    x = torch.randn(7, 2, generator=generator(0))
    found: Any = Smoothed(PosteriorPredictive(model, thetas), 0.2, 6)(x)
    parts = Smoothed(model.at(thetas[0]), 0.2, 6)(x), Smoothed(model.at(thetas[1]), 0.2, 6)(x)
    torch.testing.assert_close(found.mean, (parts[0].mean + parts[1].mean) / 2)
    y = torch.linspace(-1, 1, 7)
    both = torch.stack([part.log_prob(y) for part in parts]).logsumexp(0) - math.log(2)
    torch.testing.assert_close(found.log_prob(y), both)


def test_a_seed_makes_it_a_function_of_each_input_alone() -> None:
    x, predict = randn(6, 5, seed=1), predictor()
    fixed = Smoothed(predict, 0.5, num=50)
    torch.testing.assert_close(fixed(x).probs[2:4], fixed(x[2:4]).probs, rtol=1e-12, atol=0)
    assert torch.equal(fixed(x).probs, Smoothed(predict, 0.5, num=50)(x).probs)
    assert not torch.equal(fixed(x).probs, Smoothed(predict, 0.5, num=50, seed=1)(x).probs)
    fresh = Smoothed(predict, 0.5, num=50, seed=None, generator=generator(0))
    assert not torch.equal(fresh(x).probs, fresh(x).probs)


def test_draws_are_keyed_one_by_one() -> None:
    """More draws keep the first ones; each draw counts alike however the last pass comes out."""
    x, predict = randn(7, 5, seed=1), predictor(Gaussian(0.3), 1, num=2)
    few, many = Smoothed(predict, 0.5, num=150)(x), Smoothed(predict, 0.5, num=600)(x)
    assert isinstance(few, GaussianMixture)
    assert isinstance(many, GaussianMixture)
    torch.testing.assert_close(few.log_weights.exp(), torch.full((300, 7), 1 / 300, dtype=FLOAT))
    torch.testing.assert_close(few.mean, few.means.mean(0))
    first = [set(part.means[:, 0].mul(1e9).round().long().tolist()) for part in (few, many)]
    assert first[0] < first[1]
    assert len(first[1]) == 1200


def test_fresh_thetas_come_with_every_draw() -> None:
    model = BayesianModel(nn.Linear(5, 3).to(FLOAT), Categorical())
    posterior = MeanField(model, init_scale=1.0)
    x, drawn = randn(4, 5, seed=1), []
    sample = posterior.sample

    def counted(num: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        drawn.append(num)
        return sample(num, generator=generator)

    posterior.sample = counted  # type: ignore[method-assign]
    smoothed = Smoothed(FreshPredictive(model, posterior, 2), 0.0, num=1500)
    probs = smoothed(x).probs
    assert drawn == [1] * 1500
    thetas = sample(1500, generator=generator(5))
    wanted = model.at_each(thetas)(x).probs.mean(0)
    assert float((probs - wanted).abs().max()) < 4.9 * math.sqrt(2 * 0.25 / 1500)
    assert torch.equal(probs, smoothed(x).probs)


@pytest.mark.parametrize("num", [5, 3000])
def test_gradients_are_exact_whether_kept_or_rebuilt(num: int) -> None:
    predict, y = predictor(), torch.tensor([0, 1, 2])
    x = randn(3, 5, seed=1)
    smoothed = Smoothed(predict, 0.5, num=num)
    at = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(nll(smoothed(at), y).sum(), at)
    for column in range(5):
        shift = torch.zeros_like(x)
        shift[:, column] = 1e-5
        slope = (nll(smoothed(x + shift), y) - nll(smoothed(x - shift), y)) / 2e-5
        torch.testing.assert_close(gradient[:, column], slope, rtol=1e-5, atol=1e-8)


def test_attacks_go_through_it() -> None:
    smoothed, x = Smoothed(predictor(), 0.5, num=20), randn(8, 5, seed=1)
    y = smoothed(x).probs.argmax(1)
    moved = pgd(L2(0.5), steps=5)(smoothed, x, y)
    assert bool((nll(smoothed(moved), y) > nll(smoothed(x), y)).all())


def test_votes_count_every_draw() -> None:
    smoothed, x = Smoothed(predictor(), 0.5), randn(8, 5, seed=1)
    votes = smoothed.votes(x, 333, generator=generator(0))
    assert votes.shape == (8, 3)
    assert votes.sum(1).tolist() == [333] * 8
    with pytest.raises(TypeError, match="votes need a classifier"):
        Smoothed(predictor(Gaussian(0.3), 1), 0.5).votes(x, 3)


def test_bad_arguments_are_named() -> None:
    for settings, message in (
        ({"sigma": -1.0}, "sigma must be"),
        ({"num": 0}, "num must be"),
        ({"predict": 3}, "predict must be a Predictor"),
        ({"generator": generator(0)}, "generator must be absent unless seed=None"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            Smoothed(**({"predict": predictor(), "sigma": 0.5} | settings))  # type: ignore[arg-type]


def test_an_attack_on_the_smoothed_predictive_sees_what_lies_within_the_noise() -> None:
    def predict(x: Tensor) -> CategoricalDistribution:  # a cliff beside a plain that tilts
        logit = 5 * torch.tanh(50 * (0.5 - x[:, 0])) - 0.1 * x[:, 1]
        return CategoricalDistribution(logits=torch.stack([logit, -logit], 1))

    x, y = torch.zeros(4, 2, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    near = one_step(L2(0.1))
    moved = near(predict, x, y)
    assert (moved[:, 1] - x[:, 1] > 0.0999).all()  # the cliff has no slope here
    attack = SmoothedAttack(near, sigma=0.5, num=2000)
    seen = attack(predict, x, y, generator=generator(0))
    assert (seen[:, 0] > 0.099).all()
    again = attack(predict, x, y, generator=generator(0))
    other = attack(predict, x, y, generator=generator(1))
    assert torch.equal(seen, again)
    assert not torch.equal(seen, other)
    assert torch.equal(SmoothedAttack(near, sigma=0.0)(predict, x, y), moved)  # the limit

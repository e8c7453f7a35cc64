"""The estimators beyond the conventions: defenses, budgets in any unit, intervals with their
coverage, searches, threads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from advbayes import pgd
from advbayes.estimators import RobustClassifier, RobustRegressor, robust_scorer
from advbayes.purification import Purifier


def waves(num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise that grows with x, in raw units far from one."""
    draw = np.random.default_rng(seed)
    x = draw.uniform(0, 1, size=(num, 1))
    y = 1000 + 200 * (np.sin(4 * x[:, 0]) + (0.05 + 0.6 * x[:, 0]) * draw.normal(size=num))
    return 50 * x, y


def test_intervals_have_their_coverage_where_the_noise_depends_on_the_input() -> None:
    x, y = waves(6000, 0)
    x_new, y_new = waves(4000, 1)
    robust = RobustRegressor(noise_scale="heteroscedastic", epochs=30, random_state=0).fit(x, y)
    for level in (0.5, 0.9):
        low, high = robust.predict_interval(x_new, level)
        inside = (low <= y_new) & (y_new <= high)
        # the model is fitted, not known: over fits the three are 0.01, 0.05 and 0.01 off, each
        # with a standard deviation of 0.01
        assert abs(inside.mean() - level) < 0.05
        quiet, loud = x_new[:, 0] < 12, x_new[:, 0] > 38
        assert abs(inside[quiet].mean() - level) < 0.1
        assert abs(inside[loud].mean() - level) < 0.1
        assert (high - low)[loud].mean() > 3 * (high - low)[quiet].mean()


@pytest.mark.parametrize("noise_scale", ["learned", "heteroscedastic"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_unit_of_y_does_not_matter(noise_scale: str, outputs: int) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(20, 2))
    y = (x + 0.3 * draw.normal(size=x.shape))[:, :outputs]
    units = np.array([2.0**40, 2.0**-40])[:outputs]  # powers of two are exact

    def answers(unit: np.ndarray | float) -> np.ndarray:
        robust = RobustRegressor(noise_scale=noise_scale, epochs=30, hidden=(4,), random_state=0)
        robust.fit(x, y * unit)
        return np.stack([*robust.predict(x, return_std=True), *robust.predict_interval(x)]) / unit

    np.testing.assert_allclose(answers(units), answers(1.0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("num", "value"), [(10, 0.1), (7, 1.0), (30, 273.15), (10, 7.0)])
def test_a_constant_feature_has_no_scale(dtype: type, num: int, value: float) -> None:
    x = np.stack([np.arange(num), np.full(num, value)], 1).astype(dtype)
    robust = RobustClassifier(epochs=1, random_state=0).fit(x, np.arange(num) % 2)
    assert robust.ball_.scale is not None
    assert float(robust.ball_.scale[1]) == 1.0  # type: ignore[index]


def test_quantiles_are_those_of_the_predictive() -> None:
    x, y = waves(200, 0)
    robust = RobustRegressor(epochs=20, random_state=0).fit(x, y)
    quantiles = robust.predict_quantiles(x[:5], (0.1, 0.5, 0.9))
    draws = robust.predictor_(robust.as_tensors(x[:5], y[:5])[0]).sample((20_000,)).numpy()
    assert quantiles.shape == (5, 3)
    for column, q in enumerate((0.1, 0.5, 0.9)):
        below = (draws < quantiles[:, column]).mean(0)
        assert np.abs(below - q).max() < 5 * math.sqrt(q * (1 - q) / 20_000)
    low, high = robust.predict_interval(x[:5], level=0.8)
    # (1 - 0.8) / 2 is not quite 0.1
    np.testing.assert_allclose(np.stack([low, high], 1), quantiles[:, [0, 2]], rtol=1e-12)
    both = RobustRegressor(epochs=2, random_state=0).fit(x, np.stack([y, -y], 1))
    assert both.predict_quantiles(x[:5]).shape == (5, 3, 2)
    with pytest.raises(ValueError, match="level must be"):
        robust.predict_interval(x, 1.0)


def test_one_adversary_in_three_units() -> None:
    """Standardised, raw and per feature say the same ball, and train the same model."""
    x, y = load_iris(return_X_y=True)
    x = x * [1, 10, 100, 1000]
    spread = x.std(0)
    settings = {"epochs": 3, "random_state": 0, "norm": "linf"}
    first = RobustClassifier("os", eps=0.5, **settings).fit(x, y)
    second = RobustClassifier("os", eps=(0.5 * spread).tolist(), units="raw", **settings).fit(x, y)
    third = RobustClassifier("os", eps=[0.5] * 4, **settings).fit(x, y)
    for other in (second, third):
        assert np.allclose(first.predict_proba(x), other.predict_proba(x), atol=1e-6)
    tensors = first.as_tensors(x, y)
    moved = (pgd(first.ball_, 20)(first.predictor_, *tensors) - tensors[0]).abs().amax(0).numpy()
    assert np.allclose(moved, 0.5 * spread, rtol=1e-3)
    untouched = RobustClassifier("os", eps=[0.5, 0.0, 0.5, 0.5], **settings).fit(x, y)
    moved = (
        (pgd(untouched.ball_, 5)(untouched.predictor_, *tensors) - tensors[0]).abs().amax(0).numpy()
    )
    assert moved[1] == 0
    assert moved[[0, 2, 3]].min() > 0


@pytest.mark.parametrize("posterior", ["mean_field", "point", "ensemble", "low_rank"])
def test_posteriors_by_name(posterior: str) -> None:
    x, y = load_iris(return_X_y=True)
    robust = RobustClassifier(posterior=posterior, epochs=40, random_state=0).fit(x, y)
    assert robust.score(x, y) > 0.6
    assert len(robust.predictor_.thetas) == {"point": 1, "ensemble": 5}.get(posterior, 20)


def test_defenses_before_and_after_the_attack() -> None:
    x, y = load_iris(return_X_y=True)
    settings = {"epochs": 120, "random_state": 0, "sigma": 0.3}
    found = {
        defense: RobustClassifier("os", defense=defense, **settings).fit(x, y)
        for defense in ("none", "proactive", "reactive", "both")
    }
    undefended = RobustClassifier(epochs=120, random_state=0).fit(x, y)
    assert np.array_equal(found["none"].predict_proba(x), undefended.predict_proba(x))
    for plain, purified in (("none", "reactive"), ("proactive", "both")):
        assert torch.equal(found[plain].posterior_.mu, found[purified].posterior_.mu)
        assert isinstance(found[purified].predictor_.predict, Purifier)
        assert not np.allclose(
            found[plain].predict_proba(x), found[purified].predict_proba(x), atol=1e-3
        )
    assert not torch.equal(found["none"].posterior_.mu, found["proactive"].posterior_.mu)
    assert min(robust.score(x, y) for robust in found.values()) > 0.8


def test_abstaining_answers_fewer_and_better() -> None:
    x, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    robust = RobustClassifier(epochs=40, random_state=0).fit(x, names)
    confidence = robust.predict_proba(x).max(1)
    level = float(np.median(confidence))
    robust.set_params(abstain=level)
    answers = robust.predict(x)
    assert [answer is not None for answer in answers] == (confidence >= level).tolist()
    assert (
        robust.score(x, names)
        > RobustClassifier(epochs=40, random_state=0).fit(x, names).score(x, names) - 1e-9
    )
    assert math.isnan(robust.set_params(abstain=1.0).score(x, names))
    regressor = RobustRegressor(epochs=20, noise_scale="heteroscedastic", random_state=0).fit(
        *waves(200, 0)
    )
    _, std = regressor.predict(waves(50, 1)[0], return_std=True)
    regressor.set_params(abstain=float(np.median(std)))
    assert np.isnan(regressor.predict(waves(50, 1)[0])).tolist() == (std > np.median(std)).tolist()


def test_a_search_by_the_robust_score_picks_the_robust_model() -> None:
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 300)
    # A strong feature that a small budget turns round, and a weak one that it does not.
    x = np.stack(
        [
            0.1 * (2 * y - 1) + 0.01 * draw.normal(size=300),
            (2 * y - 1) + 0.8 * draw.normal(size=300),
        ],
        1,
    )
    pipeline = make_pipeline(
        StandardScaler(with_std=False),
        RobustClassifier(units="raw", eps=0.3, epochs=30, random_state=0),
    )
    grid = {"robustclassifier__channel": ["none", "pgd"]}
    scoring = {
        **{f"robust {metric}": robust_scorer(metric) for metric in ("accuracy", "nll")},
        **{f"clean {metric}": metric for metric in ("accuracy", "neg_log_loss")},
    }
    search = GridSearchCV(pipeline, grid, scoring=scoring, refit="robust nll", cv=3).fit(x, y)
    for name in scoring:
        undefended, defended = search.cv_results_[f"mean_test_{name}"]
        assert defended > undefended if name.startswith("robust") else undefended >= defended, name
    assert search.best_params_ == {"robustclassifier__channel": "pgd"}


def test_scores_under_attack_of_a_regression() -> None:
    x, y = waves(300, 0)
    robust = RobustRegressor("pgd", eps=0.1, epochs=20, random_state=0)
    attacked = cross_val_score(robust, x, y, cv=3, scoring=robust_scorer("rmse")).mean()
    clean = cross_val_score(robust, x, y, cv=3, scoring="neg_root_mean_squared_error").mean()
    assert attacked < clean < 0
    with pytest.raises(ValueError, match="metric must be one of"):
        robust_scorer("f1")


def test_a_search_over_eps_can_hold_the_adversary_fixed() -> None:
    """Within its own ball the model of the smallest eps looks best, whatever it is worth."""
    x, y = load_iris(return_X_y=True)
    near, far = (
        RobustClassifier(eps=eps, epochs=5, random_state=0).fit(x, y) for eps in (0.1, 1.0)
    )
    assert (near.predict_proba(x) == far.predict_proba(x)).all()  # no channel: one and the same
    assert robust_scorer()(near, x, y) > robust_scorer()(far, x, y)
    assert robust_scorer(eps=1.0)(near, x, y) == robust_scorer()(far, x, y)
    with pytest.raises(ValueError, match="eps must be a finite number >= 0, got -1"):
        robust_scorer(eps=-1)
    each = RobustClassifier(eps=[0.1, 0.2, 0.3, 0], epochs=1, random_state=0).fit(x, y)
    with pytest.raises(ValueError, match="eps of robust_scorer must be left out"):
        robust_scorer(eps=0.5)(each, x, y)


def test_threads_give_the_scores_of_one() -> None:
    x, y = load_iris(return_X_y=True)
    robust = RobustClassifier("os", epochs=3, random_state=0)
    from joblib import parallel_backend

    alone = cross_val_score(robust, x, y, cv=4)
    with parallel_backend("threading"):
        together = cross_val_score(robust, x, y, cv=4, n_jobs=4)
    assert np.array_equal(alone, together)

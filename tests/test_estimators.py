"""The scikit-learn estimators: the conventions, and that what they trained can be attacked."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits, make_classification
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from advbayes import (
    L2,
    AttackChannel,
    Learned,
    Mixture,
    Noise,
    PosteriorPredictive,
    evaluate,
    load,
    one_step,
    pgd,
    save,
    squared_error,
)
from advbayes.estimators import RobustClassifier, RobustRegressor
from advbayes.networks import FullyConnectedGenerator, conv_net


@pytest.mark.filterwarnings(
    "ignore::sklearn.exceptions.SkipTestWarning", "ignore::DeprecationWarning"
)
@parametrize_with_checks(
    [each(epochs=30, lr=0.05, random_state=0) for each in (RobustClassifier, RobustRegressor)]
)
def test_scikit_learns_conventions(estimator, check) -> None:  # type: ignore[no-untyped-def]
    check(estimator)


def tables() -> tuple[np.ndarray, np.ndarray]:
    x, y = make_classification(
        400, 6, n_informative=4, n_redundant=0, class_sep=1.5, random_state=0
    )
    return x.astype(np.float32), np.array(["no", "yes"])[y]


def test_a_channel_makes_it_robust_and_labels_are_kept() -> None:
    x, y = tables()
    ball = L2(1.0)
    left = {}
    for name, channel in {"none": None, "pgd": AttackChannel(pgd(ball, 5))}.items():
        estimator = RobustClassifier(channel, epochs=60, random_state=0).fit(x[:300], y[:300])
        assert set(estimator.predict(x[300:])) == {"no", "yes"}
        report = evaluate(
            estimator.predictor_,
            estimator.as_tensors(x[300:], y[300:]),
            attacks={"PGD": pgd(ball, 20)},
        )
        table = {
            row["attack"]: row
            for row in report.table().json()["rows"]
            if row["predictor"] == "predict"
        }
        assert table["clean"]["accuracy"]["value"] == pytest.approx(
            estimator.score(x[300:], y[300:])
        )
        left[name] = table["PGD"]["accuracy"]["value"]
    assert left["pgd"] > left["none"] + 0.03, left


def test_the_same_seed_gives_the_same_predictions() -> None:
    x, y = tables()
    first, second, other = (
        RobustClassifier(Noise(0.1), epochs=3, random_state=seed).fit(x, y).predict_proba(x)
        for seed in (1, 1, 2)
    )
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_images_and_a_net_of_ones_own() -> None:
    x, y = load_digits(return_X_y=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = conv_net(10, size=8)
    before = [p.detach().clone() for p in net.parameters()]
    estimator = RobustClassifier(net=net, event_shape=(1, 8, 8), epochs=12, random_state=0).fit(
        x[:1200] / 16, y[:1200]
    )
    assert estimator.score(x[1200:] / 16, y[1200:]) > 0.8
    assert estimator.as_tensors(x[:3] / 16, y[:3])[0].shape == (3, 1, 8, 8)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_a_learned_adversary_given_is_not_the_one_trained() -> None:
    x, y = tables()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        channel = Mixture(
            [0.5, 0.5], [Noise(0.0), Learned(FullyConnectedGenerator(6, 2, 2), L2(0.5))]
        )
    before = [p.detach().clone() for p in channel.channels[1].generator.parameters()]  # type: ignore[attr-defined]
    RobustClassifier(channel, epochs=2, random_state=0).fit(x, y)
    after = channel.channels[1].generator.parameters()  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_regression_is_in_the_units_of_y() -> None:
    x, y = load_diabetes(return_X_y=True, scaled=False)
    pipeline = make_pipeline(
        StandardScaler(),
        RobustRegressor(AttackChannel(one_step(L2(0.2), squared_error)), random_state=0),
    )
    pipeline.fit(x[:300], y[:300])
    mean, std = pipeline.predict(x[300:], return_std=True)
    assert pipeline.score(x[300:], y[300:]) > 0.3
    assert 0.7 < std.mean() / (y[300:] - mean).std() < 1.6
    estimator = pipeline[-1]
    tensors = estimator.as_tensors(pipeline[:-1].transform(x[300:]), y[300:])
    assert estimator.predictor_(tensors[0]).mean.numpy() == pytest.approx(mean, rel=1e-5)
    attacked = pgd(L2(0.5), 10, squared_error)(estimator.predictor_, *tensors)
    worse = (estimator.predictor_(attacked).mean - tensors[1]).square().mean()
    assert worse > 1.2 * ((torch.as_tensor(mean) - tensors[1]) ** 2).mean()


def test_several_outputs() -> None:
    x, y = load_diabetes(return_X_y=True)
    both = np.stack([y, -3 * y], 1)
    estimator = RobustRegressor(epochs=60, random_state=0).fit(20 * x, both)
    assert estimator.predict(20 * x).shape == both.shape
    assert estimator.score(20 * x, both) > 0.4
    column = RobustRegressor(epochs=1, random_state=0).fit(20 * x, y[:, None])
    assert column.predict(20 * x).shape == (len(x), 1)


def test_what_was_trained_can_be_saved(tmp_path: Path) -> None:
    x, y = load_diabetes(return_X_y=True)
    estimator = RobustRegressor(epochs=3, random_state=0).fit(20 * x, y)
    save(tmp_path / "model.advbayes", model=estimator.model_, posterior=estimator.posterior_)
    kept = load(tmp_path / "model.advbayes")
    again = PosteriorPredictive(kept.model, estimator.predictor_.thetas)
    assert np.array_equal(
        again(estimator.as_tensors(20 * x, y)[0]).mean.numpy(), estimator.predict(20 * x)
    )


def test_grid_search_over_channels() -> None:
    x, y = tables()
    search = GridSearchCV(
        RobustClassifier(epochs=30, random_state=0), {"channel": [Noise(30.0), Noise(0.0)]}, cv=2
    ).fit(x, y)
    assert search.best_params_["channel"] == Noise(0.0)
    assert clone(search.best_estimator_).get_params()["channel"] == Noise(0.0)


def test_an_interrupt_goes_on_and_loses_nothing() -> None:
    x, y = tables()
    estimator = RobustClassifier(epochs=100_000, random_state=0)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            estimator.fit(x, y)
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, handler)
    assert estimator.score(x, y) > 0.7
    assert estimator.result_.interrupted


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"net": "conv"}, TypeError, "net must be a torch.nn.Module with 2 outputs, got"),
        (
            {"net": nn.Linear(6, 3)},
            ValueError,
            r"net must give 2 outputs for this y, got shape \(1, 3\)",
        ),
        (
            {"event_shape": (1, 2, 2)},
            ValueError,
            r"event_shape must have as many entries as X has features \(6\)",
        ),
        ({"num_thetas": 0}, ValueError, "num_thetas must be"),
        ({"channel": 3}, TypeError, "channel must have sample and density, got"),
        ({"channel": "mixx"}, ValueError, "channel must be one of 'none', 'noise'"),
        ({"defense": "magic"}, ValueError, "defense must be one of 'proactive'"),
        ({"units": "feet"}, ValueError, "units must be one of"),
        ({"norm": "l3"}, ValueError, "norm must be one of"),
        ({"posterior": "gp"}, ValueError, "posterior must be one of"),
        (
            {"eps": [1.0, 2.0]},
            ValueError,
            "eps must be a number or hold one for each of 6 features",
        ),
        ({"eps": -1.0}, ValueError, "eps must be"),
        ({"epochs": -1}, ValueError, "epochs must be"),
        ({"epochs": "many"}, TypeError, "epochs must be a finite number > 0, got 'many'"),
        ({"hidden": 16}, TypeError, r"hidden must hold the width of each layer, .* got 16"),
        ({"kl_weight": -1.0}, ValueError, "kl_weight must be"),
    ],
)
def test_bad_settings_are_named(
    settings: dict[str, object], error: type[Exception], words: str
) -> None:
    x, y = tables()
    with pytest.raises(error, match=words):
        RobustClassifier(**settings).fit(x, y)  # type: ignore[arg-type]


def test_no_class_is_named_where_the_net_overflows() -> None:
    x = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32) * np.float32([1, 0.01])
    fitted = RobustClassifier("at", epochs=1, random_state=0).fit(x, x[:, 0] > 0)
    for ask in (fitted.predict, fitted.predict_proba):
        with pytest.raises(ValueError, match=r"prediction\.probs must be finite"):
            ask(np.array([[0, 3e38]], dtype=np.float32))


def test_bad_data_is_named() -> None:
    x, y = tables()
    with pytest.raises(ValueError, match="at least two classes, got one class"):
        RobustClassifier().fit(x, ["a"] * len(x))
    with pytest.raises(NotFittedError):
        RobustClassifier().as_tensors(x, y)
    with pytest.raises(ValueError, match=r"y must hold classes seen by fit, got \['perhaps'\]"):
        RobustClassifier(epochs=1).fit(x, y).as_tensors(x[:1], ["perhaps"])

"""Weights of examples: one of weight two counts as the example given twice, in the bound, in
training and in the estimators; and estimators go through processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import cross_validate
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Learned,
    MeanField,
    Mixture,
    Noise,
    fit,
    one_step,
)
from advbayes.channels import learned_in
from advbayes.estimators import RobustClassifier, RobustRegressor, robust_scorer
from advbayes.networks import FullyConnectedGenerator
from advbayes.objectives import Trades
from advbayes.purification import Purifier
from advbayes.types import Channel, Predictor

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 1, 0, 1, 0])
WEIGHT = torch.tensor([1.0, 2.0, 0.0, 3.0, 1.0, 1.0], dtype=torch.float64)
TWICE = torch.arange(6).repeat_interleave(WEIGHT.long())


def parts() -> tuple[BayesianModel, MeanField]:
    net = nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        net.weight.copy_(torch.arange(6.0).view(2, 3) / 6)
        net.bias.zero_()
    model = BayesianModel(net, Categorical())
    return model, MeanField(model)


def channels() -> list[Channel]:
    """Random ones and one that learns."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        generator = FullyConnectedGenerator(3, num_classes=2, width=4).double()
    attack = AttackChannel(one_step(L2(0.5)), 0.1)
    return [
        Mixture([0.5, 0.5], [Noise(0.1), attack]),
        Learned(generator, L2(0.5), entropy_bonus=0.1),
    ]


@pytest.mark.parametrize("which", [0, 1], ids=["attack", "learned"])
def test_a_row_of_no_weight_is_not_seen(which: int) -> None:
    """Neither by the posterior nor by the adversary, whatever stands in it."""
    ends = []
    for far in (0.0, 100.0):
        (model, posterior), channel = parts(), channels()[which]
        x, y = X.clone(), Y.clone()
        x[WEIGHT == 0] += far
        y[WEIGHT == 0] = int(far > 0)
        objective = ChannelELBO(6, penalty=Trades(2.0))
        data = {"objective": objective, "sample_weight": WEIGHT, "steps": 5, "lr": 0.1}
        fit(model, posterior, channel, (x, y), **data)  # type: ignore[arg-type]
        learned = [p for part in learned_in(channel) for p in part.generator.parameters()]
        ends.append([posterior.mean, *learned])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("penalty", [None, Trades(2.0)], ids=["plain", "penalty"])
def test_the_bound_counts_an_example_as_often_as_its_weight_says(penalty: Any) -> None:
    model, posterior = parts()
    thetas, shift = posterior.sample(2), X + 0.1
    found = [
        ChannelELBO(len(x), num_theta=2, penalty=penalty).terms(
            model, posterior, thetas, x, x_adv.expand(2, 1, *x.shape), y, weight
        )
        for x, x_adv, y, weight in ((X, shift, Y, WEIGHT), (X[TWICE], shift[TWICE], Y[TWICE], None))
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_training_on_weights_is_training_on_repeated_rows() -> None:
    found = []
    for x, y, weight in ((X, Y, WEIGHT), (X[TWICE], Y[TWICE], None)):
        model, posterior = parts()
        fit(model, posterior, Noise(0.0), (x, y), sample_weight=weight, steps=30, lr=0.1)
        found.append(posterior.mean)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    model, posterior = parts()
    fit(model, posterior, Noise(0.0), (X, Y), steps=30, lr=0.1)
    assert not torch.allclose(posterior.mean, found[0], atol=1e-2)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(5), "one number for each of the 6 examples"),
        (-WEIGHT, "sample_weight must be >= 0"),
        (torch.zeros(6), "positive somewhere"),
        (WEIGHT * float("nan"), "sample_weight must be finite"),
    ],
)
def test_weights_that_are_none(weight: torch.Tensor, message: str) -> None:
    model, posterior = parts()
    with pytest.raises(ValueError, match=message):
        fit(model, posterior, Noise(0.0), (X, Y), sample_weight=weight, steps=1)


def test_weights_do_not_go_with_loaders_or_compiled_steps() -> None:
    model, posterior = parts()
    loader: DataLoader[Any] = DataLoader(TensorDataset(X, Y))
    with pytest.raises(TypeError, match="left out for a DataLoader"):
        fit(model, posterior, Noise(0.0), loader, sample_weight=WEIGHT, steps=1)
    with pytest.raises(ValueError, match="compile must be False"):
        fit(model, posterior, Noise(0.0), (X, Y), sample_weight=WEIGHT, steps=1, compile=True)


ROWS = np.random.default_rng(0).normal(size=(40, 2))
LABELS = np.where(ROWS[:, 0] + 0.3 * ROWS[:, 1] > 0.8, "rare", "usual")
OFTEN = np.arange(40) % 3
REPEATED = np.repeat(np.arange(40), OFTEN)


@pytest.mark.parametrize("noise", ["learned", "heteroscedastic"])
def test_a_weighted_regression_is_one_of_repeated_rows(noise: str) -> None:
    y = 3 * ROWS[:, 0] + ROWS[:, 1] ** 2
    robust = RobustRegressor(None, noise_scale=noise, epochs=40, random_state=0)
    weighted = clone(robust).fit(ROWS, y, sample_weight=OFTEN)
    repeated = clone(robust).fit(ROWS[REPEATED], y[REPEATED])
    np.testing.assert_allclose(weighted.predict(ROWS), repeated.predict(ROWS), rtol=1e-7)
    assert weighted.score(ROWS, y, OFTEN) == pytest.approx(
        repeated.score(ROWS[REPEATED], y[REPEATED])
    )


@pytest.mark.parametrize("channel", [None, "os"])
def test_a_purifier_counts_its_reference_points_as_often_as_they_weigh(
    channel: str | None, tmp_path: Path
) -> None:
    y = 3 * ROWS[:, 0] + ROWS[:, 1] ** 2
    options: Any = {"defense": "reactive", "sigma": 0.5, "epochs": 5, "random_state": 0}
    regressor = RobustRegressor(channel, **options)
    weighted = clone(regressor).fit(ROWS, y, sample_weight=OFTEN)
    repeated = clone(regressor).fit(ROWS[REPEATED], y[REPEATED])
    np.testing.assert_allclose(weighted.predict(ROWS), repeated.predict(ROWS), rtol=1e-7)
    said = [each.predictor_(each._checked(ROWS)) for each in (weighted, repeated)]
    targets = torch.tensor(y)
    torch.testing.assert_close(said[0].log_prob(targets), said[1].log_prob(targets))
    weighted.save(tmp_path / "weighted.advbayes")
    again = RobustRegressor.load(tmp_path / "weighted.advbayes")
    assert (again.predict(ROWS) == weighted.predict(ROWS)).all()
    classifier = RobustClassifier(channel, **options)
    one, other = (
        clone(classifier).fit(ROWS, LABELS, sample_weight=OFTEN),
        clone(classifier).fit(ROWS[REPEATED], LABELS[REPEATED]),
    )
    np.testing.assert_allclose(one.predict_proba(ROWS), other.predict_proba(ROWS), rtol=1e-7)


@dataclass(frozen=True)
class Laplacian:
    """A channel with another density than a Gaussian."""

    x: torch.Tensor | None = None

    def density(self, predict: Predictor, x: torch.Tensor, y: Any = None) -> Laplacian:
        return Laplacian(x)

    def log_prob(self, x_adv: torch.Tensor) -> torch.Tensor:
        assert self.x is not None
        away = (x_adv.unsqueeze(0) - self.x.unsqueeze(1)).abs()
        return -away.sum(-1)


@pytest.mark.parametrize("update", ["online", "offline"])
@pytest.mark.parametrize("which", ["memory", "disk", "scales", "other"])
def test_weighed_reference_points_are_repeated_ones(
    which: str, update: str, tmp_path: Path
) -> None:
    model, posterior = parts()
    with torch.no_grad():
        posterior.rho.fill_(0.5)
    thetas = posterior.sample(3, generator=torch.Generator().manual_seed(1))
    shown = WEIGHT > 0
    mixture, learned = channels()
    channel: Any = {"scales": learned, "other": Laplacian()}.get(which, mixture)
    folders = [tmp_path / "one", tmp_path / "other"] if which == "disk" else [None, None]
    purifiers = [
        Purifier(model, channel, thetas, (X[rows], Y[rows]), update, folder=folder)
        for rows, folder in zip((shown, TWICE), folders, strict=True)
    ]
    one, other = purifiers[0]._weighed(WEIGHT[shown]), purifiers[1]
    x = [(X + 0.3).clone().requires_grad_() for _ in range(2)]
    said = [purifier(inputs).logits for purifier, inputs in zip((one, other), x, strict=True)]
    torch.testing.assert_close(*said)
    slopes = [
        torch.autograd.grad(each[:, 0].sum(), inputs)[0]
        for each, inputs in zip(said, x, strict=True)
    ]
    torch.testing.assert_close(*slopes)
    found = [purifier.diagnose(X + 0.3).ess_theta for purifier in (one, other)]
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="count once each"):
        one.save(tmp_path / "saved")


def test_class_weights_are_sample_weights_and_find_the_rare_class() -> None:
    """After a short training: a long one fits these rows whatever they weigh."""
    robust = RobustClassifier(None, epochs=20, random_state=0)
    plain = clone(robust).fit(ROWS, LABELS)
    balanced = clone(robust).set_params(class_weight="balanced").fit(ROWS, LABELS)
    num = (LABELS == "rare").sum()
    each = np.where(LABELS == "rare", 20 / num, 20 / (40 - num))
    by_hand = clone(robust).fit(ROWS, LABELS, sample_weight=each)
    np.testing.assert_allclose(balanced.predict_proba(ROWS), by_hand.predict_proba(ROWS), rtol=1e-9)
    weights = {"rare": each.max(), "usual": each.min()}
    named = clone(robust).set_params(class_weight=weights).fit(ROWS, LABELS)
    np.testing.assert_allclose(named.predict_proba(ROWS), by_hand.predict_proba(ROWS), rtol=1e-9)
    rare = plain.classes_.tolist().index("rare")
    said = [each.predict_proba(ROWS)[:, rare].mean() for each in (plain, balanced)]
    assert said[1] > said[0] + 0.05


@pytest.mark.parametrize("class_weight", [None, "balanced", {"rare": 3.0, "usual": 0.5}])
@pytest.mark.parametrize("defense", ["proactive", "reactive"])
def test_a_row_of_weight_w_is_w_rows_whatever_its_class_weighs(
    class_weight: Any, defense: str
) -> None:
    """As far as the rows decide beside the training, which draws others: it takes no step."""
    robust = RobustClassifier(
        "os", defense=defense, class_weight=class_weight, lr=1e-12, epochs=1, random_state=0
    )
    times = np.where(LABELS == "rare", 3, np.arange(len(ROWS)) % 3)
    weighed = clone(robust).fit(ROWS, LABELS, sample_weight=times)
    repeated = clone(robust).fit(np.repeat(ROWS, times, 0), np.repeat(LABELS, times))
    said = weighed.predict_proba(ROWS), repeated.predict_proba(ROWS)
    np.testing.assert_allclose(*said, rtol=1e-6)


def test_a_regressor_that_abstains_scores_what_it_answers() -> None:
    y = ROWS[:, 0] + 0.1 * ROWS[:, 1]
    robust = RobustRegressor(None, noise_scale="heteroscedastic", epochs=60, random_state=0)
    robust.fit(ROWS, y)
    mean, std = robust.predict(ROWS, return_std=True)
    robust.abstain = float(np.median(std))
    answered = std <= robust.abstain
    assert 0 < answered.sum() < 40
    kept, left = y[answered], (y - mean)[answered]
    by_hand = 1 - (left**2).sum() / ((kept - kept.mean()) ** 2).sum()
    assert robust.score(ROWS, y) == pytest.approx(by_hand)
    for num, is_known in ((0, False), (1, False), (2, True)):  # one row has no spread
        robust.abstain = float(np.mean([0.0, *np.sort(std)][num : num + 2]))
        assert (std <= robust.abstain).sum() == num
        assert np.isfinite(robust.score(ROWS, y)) == is_known


@pytest.mark.unshifted("the other processes know nothing of it")
def test_processes_train_score_and_give_back_what_one_process_does() -> None:
    y = (ROWS[:, 0] > 0).astype(int)
    robust = RobustClassifier("os", eps=0.3, epochs=10, random_state=0)
    found = [
        cross_validate(
            robust, ROWS, y, cv=2, scoring=robust_scorer(), n_jobs=jobs, return_estimator=True
        )
        for jobs in (1, 2)
    ]
    assert found[0]["test_score"].tolist() == found[1]["test_score"].tolist()
    for one, other in zip(*(each["estimator"] for each in found), strict=True):
        assert (one.predict_proba(ROWS) == other.predict_proba(ROWS)).all()

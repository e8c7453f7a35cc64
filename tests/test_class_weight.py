"""Weights of classes: a class of weight two counts as its rows given twice, and a rare class is no
longer passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from advbayes import (
    L2,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Learned,
    LogitPairing,
    MeanField,
    Trades,
    fit,
)
from advbayes.datasets import class_weights
from advbayes.networks import FullyConnectedGenerator
from advbayes.objectives import Penalty
from advbayes.runs import build_defense, create_run, load_trained, prepare, train
from advbayes.runs.config import ConfigError, make_config
from advbayes.seeds import GlobalStream


@pytest.mark.parametrize("penalty", [None, Trades(2.0), LogitPairing(0.5)], ids=str)
def test_a_class_of_weight_two_counts_twice(penalty: Penalty | None) -> None:
    model = BayesianModel(nn.Linear(3, 2), Categorical())
    posterior = MeanField(model)
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])
    thetas = posterior.sample(2)
    weighted = ChannelELBO(6, num_theta=2, class_weight=(1.0, 2.0), penalty=penalty)
    twice = torch.cat([torch.arange(6), torch.nonzero(y == 1).flatten()])
    plain = ChannelELBO(len(twice), num_theta=2, penalty=penalty)
    x_adv = torch.randn(2, 1, 6, 3)
    one = weighted.terms(model, posterior, thetas, x, x_adv, y)
    other = plain.terms(model, posterior, thetas, x[twice], x_adv[:, :, twice], y[twice])
    for term, of_rows in zip(one, other, strict=True):
        torch.testing.assert_close(term, of_rows)
    each = torch.tensor([3.0, 0.0, 1.0, 2.0, 0.5, 1.0])  # and with a weight of their own
    both = weighted.terms(model, posterior, thetas, x, x_adv, y, each)
    alone = ChannelELBO(6, num_theta=2, penalty=penalty)
    torch.testing.assert_close(
        both.bound, alone.terms(model, posterior, thetas, x, x_adv, y, each * (1.0 + y)).bound
    )
    equal = ChannelELBO(6, num_theta=2, class_weight=(1.0, 1.0), penalty=penalty)
    none = alone.terms(model, posterior, thetas, x, x_adv, y)
    torch.testing.assert_close(equal.terms(model, posterior, thetas, x, x_adv, y).bound, none.bound)
    with pytest.raises(ValueError, match="class_weight"):
        ChannelELBO(6, class_weight=(-1.0, 1.0))


def test_a_learned_adversary_counts_the_classes_as_the_model_does() -> None:
    """Its first gradient is that of examples with the weights of their classes."""
    x, weights = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), (0.2, 3.0)
    y = (x[:, 0] > 0.3).long()
    slopes = []
    for by_class in (True, False):
        model = BayesianModel(nn.Linear(3, 2), Categorical())
        posterior = MeanField(model, init=torch.linspace(-1.0, 1.0, model.num_params))
        with GlobalStream(0):
            channel = Learned(FullyConnectedGenerator(3), L2(1.0))
        each: dict[str, Any] = {"sample_weight": torch.tensor(weights)[y]}
        if by_class:
            each = {"objective": ChannelELBO(12, class_weight=weights)}
        result = fit(model, posterior, channel, (x, y), steps=1, **each)
        slopes.append(result.state.tensors["adversary0/adam/0/exp_avg"])
    torch.testing.assert_close(*slopes)


def test_balanced_weights() -> None:
    y = torch.tensor([0] * 6 + [1] * 3 + [2])
    weights = torch.tensor(class_weights(y))
    torch.testing.assert_close(weights * torch.bincount(y), torch.full((3,), 10 / 3))
    torch.testing.assert_close(weights[y].mean(), torch.tensor(1.0))
    for wrong, num in ((y, 4), (y[:0], None), (torch.tensor([1, 1]), None)):
        with pytest.raises(ValueError, match="every class"):
            class_weights(wrong, num)


def test_balanced_in_a_run(tmp_path: Path) -> None:
    """Five per cent of rows are of the other class, and overlap with the rest: only balanced
    training finds them."""
    rng = np.random.default_rng(0)
    label = np.arange(400) % 20 == 0
    x = rng.normal(0, 1, (400, 2)) + 1.2 * label[:, None]
    lines = ["a,b,y"] + [
        f"{a:.4f},{b:.4f},{'rare' if c else 'usual'}" for (a, b), c in zip(x, label, strict=True)
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    recall = {}
    for weight in (None, "balanced"):
        values = {
            "data": str(tmp_path / "t.csv"),
            "target": "y",
            "defense": "none",
            "hidden": [4],
            "epochs": 15,
        }
        config = make_config({**values, "lr": 0.03, "batch_size": 64, "class_weight": weight})
        with create_run(config, tmp_path / f"run-{weight}") as run:
            train(run)
        data = prepare(config)
        rare = data.y_train == data.dataset.class_names.index("rare")
        predicted = load_trained(run.path).predict()(data.x_train).probs.argmax(-1)  # type: ignore[attr-defined]
        recall[weight] = float((predicted == data.y_train)[rare].float().mean())
    assert recall[None] < 0.3
    assert recall["balanced"] > 0.6


def test_regression_has_no_classes() -> None:
    config = make_config({"data": "diabetes", "class_weight": "balanced"})
    with pytest.raises(ConfigError, match="class_weight: must be left out for regression"):
        build_defense(config, prepare(config))

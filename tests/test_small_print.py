"""What a line of documentation promises in passing: limits, edges, rounding, units, shares."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Normal

from advbayes import (
    L2,
    BayesianModel,
    Categorical,
    Learned,
    MultiStart,
    Noise,
    PointMass,
    fit,
    metrics,
    strong_suite,
)
from advbayes.auditing import remembering
from advbayes.auditing.strength import _radii
from advbayes.cli.describe import said_scores, units_of
from advbayes.datasets import Standardize
from advbayes.estimators import RobustClassifier
from advbayes.evaluation import Cell, Evaluation
from advbayes.predictive.decisions import Choices, Spoiling
from advbayes.report.folders import merged
from advbayes.report.gather import _headline
from advbayes.report.telling import verdicts
from advbayes.report.words import FIRST_LOOK
from advbayes.runs.training import _trivial
from advbayes.seeds import generator_for


@pytest.mark.parametrize("limits", [(0.05, 0.2), (1.0, 4.0)])
def test_a_learned_channel_keeps_its_noise_within_its_limits(limits: tuple[float, float]) -> None:
    """Near the least and the largest where the network wants less and more, at their geometric mean
    where it wants nothing."""

    class Wanting(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return torch.zeros_like(x), torch.tensor([-50.0, 0.0, 50.0]).expand_as(x)

    channel = Learned(Wanting(), L2(1.0), sigma_range=limits)
    _, std = channel.moments(lambda x: Normal(x[:, 0], 1.0), torch.zeros(1, 3), torch.zeros(1))
    wanted = torch.tensor([[limits[0], math.sqrt(limits[0] * limits[1]), limits[1]]])
    assert torch.allclose(std, wanted, rtol=1e-5)


def test_a_decision_is_spoiled_where_a_better_one_was_to_be_had() -> None:
    """Not where the best is taken, even if two are equally good."""
    worth = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.5, 1.0]])
    prediction = CategoricalDistribution(probs=torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1]]))
    found = Spoiling(Choices(worth)).succeeded(prediction, torch.tensor([0, 1, 1]))
    assert found.tolist() == [False, False, True]


@pytest.mark.parametrize("bins", [2, 4, 10])
def test_a_confidence_on_an_edge_belongs_to_the_bin_above(bins: int) -> None:
    """Equal width: [i / bins, (i + 1) / bins), and 1 in the last."""
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins
    found = metrics.reliability(edges, torch.ones(bins + 1), bins=bins, binning="equal_width")
    assert [each.low for each in found] == pytest.approx([i / bins for i in range(bins)])
    assert [each.accuracy.num for each in found] == [1] * (bins - 1) + [2]


def trained(**options: Any) -> Any:
    model = BayesianModel(nn.Linear(2, 2).double(), Categorical())
    x = torch.randn(10, 2, generator=generator_for(0, "x"), dtype=torch.float64)
    return fit(model, PointMass(model), Noise(0.0), (x, (x[:, 0] > 0).long()), **options)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 5), (0.1, 1), (1.2, 3), (1.21, 4)])
def test_a_broken_pass_is_rounded_up(epochs: float, steps: int) -> None:
    """Ten examples in batches of four are 2.5 steps a pass."""
    assert trained(epochs=epochs, batch_size=4).steps == steps


def test_the_learning_rate_falls_all_along_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `decay` over each pass, by its root over half of one."""
    rates: list[float] = []
    step = torch.optim.Adam.step

    def noted(self: torch.optim.Adam, *given: Any) -> Any:
        rates.append(float(self.param_groups[0]["lr"]))
        return step(self, *given)

    monkeypatch.setattr(torch.optim.Adam, "step", noted)
    trained(steps=7, batch_size=4, lr=0.1, decay=0.25)
    assert rates == pytest.approx([0.1 * 0.25 ** (step / 2.5) for step in range(7)])


@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e4])
def test_answers_of_a_regression_are_the_same_in_units_of_the_targets(spread: float) -> None:
    x = torch.zeros(2, 1)
    case: Any = SimpleNamespace(spread=spread)
    for share, other in ((0.9, False), (1.1, True)):
        moved = share * remembering.SAME * spread
        found = remembering.changed(
            lambda x: Normal(x[:, 0].double(), 1.0),
            lambda x, moved=moved: Normal(x[:, 0].double() + moved, 1.0),
            x,
            case,
        )
        assert found.tolist() == [other, other]


def test_no_radius_of_the_audit_is_larger_than_the_box() -> None:
    """Twice eps, but no more than the whole."""
    asked: list[float] = []
    x = torch.rand(4, 2, generator=generator_for(0, "box"))
    ball = L2(1.2, box=(0.0, 1.0))
    case: Any = SimpleNamespace(
        ball=ball,
        x=x,
        claim=object(),
        task="classification",
        attacks={"a": strong_suite(ball, queries=0).attacks[0]},
        support=SimpleNamespace(),
        once=lambda name, make: make(),
        union=lambda attacks, name, **options: asked.extend(
            attack.ball.eps for attack in attacks.values()
        ),
    )
    radii = list(_radii(case))
    assert max(radii) == pytest.approx(math.sqrt(2), rel=1e-3)
    assert min(radii) == pytest.approx(0.6)


@pytest.mark.parametrize("value", [0.1, 0.3, 123.456, 1e6 / 3])
def test_a_constant_column_has_no_scale_though_its_mean_is_rounded(value: float) -> None:
    x = torch.full((1001, 1), value, dtype=torch.float64)
    assert 0 < float(x.std(0, correction=0)) < 1e-12 * value  # what rounding leaves
    assert float(Standardize.fit(x).std) == 1
    x[0] += 1e-6 * value  # a spread of its own
    assert float(Standardize.fit(x).std) == pytest.approx(float(x.std(correction=0)), rel=1e-4)


def test_a_score_weighs_its_rows() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2))
    y = (x[:, 0] > 0).astype(int)
    fitted = RobustClassifier(hidden=(), epochs=2, num_thetas=2, random_state=0).fit(x, y)
    labels = np.where(rng.random(40) < 0.3, 1 - y, y)
    weights = rng.random(40) ** 3
    right = fitted.predict(x) == labels
    assert fitted.score(x, labels) == pytest.approx(right.mean())
    wanted = (weights * right).sum() / weights.sum()
    assert fitted.score(x, labels, sample_weight=weights) == pytest.approx(wanted)
    assert abs(wanted - right.mean()) > 1e-3


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_a_coverage_is_printed_with_the_level_of_its_intervals(level: float) -> None:
    said = said_scores({"coverage": {"value": 0.5, "low": 0.4, "high": 0.6}}, None, (), level)
    assert said == f"coverage of {100 * level:g} % intervals 0.500 [0.400, 0.600]"


@pytest.mark.parametrize(("told", "wanted"), [({}, 0.5), ({"eps": 0.1}, 0.1), ({"eps": 9.0}, 0.5)])
def test_the_headline_is_about_the_threat_model_or_else_the_largest_radius(
    told: dict[str, float], wanted: float
) -> None:
    evaluation: Any = SimpleNamespace(radii=(0.1, 0.5, 0.3, None))
    assert _headline(evaluation, told) == wanted


def test_the_trivial_error_is_that_of_the_training_mean() -> None:
    data: Any = SimpleNamespace(y_train=torch.tensor([0.0, 2.0]), y_test=torch.tensor([4.0, 6.0]))
    assert _trivial("regression", data) == {"rmse": pytest.approx(math.sqrt((9 + 25) / 2))}


def test_a_first_look_counts_the_checks_that_passed_and_those_left_out() -> None:
    status = ["passed"] * 3 + ["not run"] * 2 + ["not applicable"]
    findings = [
        {"id": f"E{k}", "title": "", "status": each, "mandatory": True, "figures": {}, "advice": ""}
        for k, each in enumerate(status)
    ]
    findings.append({**findings[3], "id": "E25", "mandatory": False})  # advice, not left out
    audit = {"level": "D", "tier": "quick", "findings": findings, "never_asked": []}
    document = {"predictors": ["a"], "audit": {"a": audit}, "summary": []}
    (found,) = verdicts(document)
    assert found["head"] == "A first look"
    assert found["meaning"] == FIRST_LOOK.format(passed=3, missing=2)
    assert [check["id"] for check in found["not_run"]] == ["E3", "E4"]  # the list that it counts


def test_budgets_of_single_features_are_printed_in_their_own_units() -> None:
    """eps times the feature's standard deviation times its scale in the ball; 0 where it is
    fixed."""
    scaling = Standardize(torch.zeros(3), torch.tensor([1.0, 10.0, 4.0]))
    scale, mask = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([True, True, False])
    found = units_of(0.5, scaling, ("a", "b", "c"), mask, scale)
    assert found["raw"] == {"a": 0.5, "b": 10.0, "c": 0.0}


@pytest.mark.parametrize("targets", [1, 4])
def test_a_suite_tries_as_many_classes_as_asked_for(targets: int) -> None:
    suite = strong_suite(L2(1.0), targets=targets, steps=7, restarts=2, queries=33)
    for attacks in (suite.attacks, suite.regression):
        held = [getattr(attack, "targets", 0) for attack in attacks]
        assert {each for each in held if each} == {targets}
        assert {getattr(attack, "queries", 33) for attack in attacks} == {33}
        for attack in attacks:  # MultiStart begins with many, of which its rounds leave few
            wanted = 2 * (256 if isinstance(attack, MultiStart) else 1)
            assert getattr(attack, "restarts", wanted) == wanted


def test_evaluations_of_the_same_examples_are_merged_whole() -> None:
    """Attacks and trivial predictors of all, later cells, trivial ones last; no other data."""

    def made(predictor: str, trivial: str, data: str, num: int, value: float) -> Evaluation:
        cells = {
            Cell(trivial, "clean", 0.0): {"correct": torch.zeros(num)},
            Cell(predictor, "clean", 0.0): {"correct": torch.full((num,), value)},
        }
        config = {"num": num, "data": data, "attacks": {predictor + trivial: "an attack"}}
        return Evaluation("classification", cells, (trivial,), config)

    whole = merged(
        [
            made("MIX", "majority", "x", 9, 0.1),
            made("BL", "uniform", "x", 9, 0.2),
            made("MIX", "uniform", "x", 9, 0.3),
            made("AT", "majority", "other", 5, 0.4),
        ]
    )
    assert whole.trivial == ("majority", "uniform")
    assert [cell.predictor for cell in whole.cells] == ["MIX", "BL", "majority", "uniform"]
    assert float(whole.columns("MIX", "clean")["correct"][0]) == pytest.approx(0.3)
    assert list(whole.config["attacks"]) == ["MIXmajority", "BLuniform", "MIXuniform"]

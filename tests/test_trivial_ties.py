"""A predictor that never looks at x is scored by the accuracy to expect over its ties."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical

from advbayes import L2, audit, evaluate, metrics, pgd
from advbayes.auditing import Support
from advbayes.runs import prepare
from advbayes.runs.config import make_config
from advbayes.runs.training import _trivial

X = torch.linspace(-1, 1, 12).reshape(-1, 1)
Y = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2])  # the first class is two thirds


def model(x: torch.Tensor) -> Categorical:
    return Categorical(logits=torch.cat([-x, x, 0 * x], 1))


def test_the_share_of_ties_that_is_right() -> None:
    tied = Categorical(probs=torch.tensor([[0.4, 0.4, 0.2], [0.4, 0.4, 0.2], [0.1, 0.8, 0.1]]))
    assert metrics.expected_correct(tied, torch.tensor([1, 2, 1])).tolist() == [0.5, 0.0, 1.0]


def test_a_uniform_guess_has_one_over_the_classes_whatever_their_frequencies() -> None:
    table = evaluate(model, (X, Y), attacks={"PGD": pgd(L2(0.1), steps=1)}).table(
        ["accuracy", "ece"]
    )
    found = {row.predictor: row.values for row in table.rows if row.attack == "any"}
    assert found["uniform"]["accuracy"].value == pytest.approx(1 / 3)
    assert found["uniform"]["ece"].value == pytest.approx(0, abs=1e-6)
    assert found["majority"]["accuracy"].value == pytest.approx(2 / 3)


def test_two_most_frequent_classes_share_their_answers() -> None:
    train_y = torch.tensor([1, 1, 2, 2, 0])
    found = evaluate(model, (X, Y), attacks={"PGD": pgd(L2(0.1), steps=1)}, train_y=train_y)
    assert found.estimate("accuracy", "majority").value == pytest.approx(4 / 12 / 2)


@pytest.mark.parametrize(("edge", "status"), [(-0.3, "passed"), (-0.7, "failed")])
def test_the_audit_and_the_run_judge_by_the_same_number(edge: float, status: str) -> None:
    def some(x: torch.Tensor) -> Categorical:  # right on the first rows and on the last two
        return Categorical(logits=torch.cat([edge - x, -1 + 0 * x, 0 * x], 1))

    # two frequent classes: (8 + 2) / 12 / 2 = 5/12 to expect; 6/12 and 4/12 answered right
    support = Support(train_y=torch.tensor([0, 0, 1, 1, 2]))
    verdict = audit(some, (X, Y), ball=L2(0.1), tier="quick", only=("E22",), support=support)
    assert verdict["E22"].status == status
    data = prepare(make_config({"data": "digits"}))
    guess = metrics.majority(data.y_train, 10)(data.x_test)
    assert _trivial("classification", data)["accuracy"] == pytest.approx(
        float(metrics.expected_correct(guess, data.y_test).mean())
    )

"""What an audit takes: arrays and tensors, targets of either shape and dtype; what it cannot take
is named."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical as Classes
from torch.distributions import Independent, Normal

from advbayes import L2, MarginTo, margin, pgd
from advbayes.auditing import Budget, Claim, Support, Verdict, audit, audit_cost, audit_records
from advbayes.checks import InputError
from advbayes.types import Predictor

SMALL = Budget(num=40, steps=10, restarts=1, random_points=10, queries=20, max_steps=40)
BALL = L2(0.5)
WEIGHT = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
X = torch.randn(40, 5, generator=torch.Generator().manual_seed(2))


def predict(x: Tensor) -> Classes:
    return Classes(logits=x @ WEIGHT.T)


Y = predict(X).logits.argmax(1)


def judged(arrays: Any, **options: Any) -> Verdict:
    chosen: dict[str, Any] = {"predict": predict, "ball": BALL, "tier": SMALL, "progress": False}
    return audit_records(options.pop("data", (X, Y)), arrays, **(chosen | options))


class TwoFaced(Classes):
    """Its logits are one model's, its probabilities another's."""

    @property
    def probs(self) -> Tensor:
        return self.logits.flip(-1).softmax(-1)


def test_attacks_and_scores_must_be_of_the_same_answer() -> None:
    with pytest.raises(InputError, match="probs that are the softmax of its logits"):
        audit(lambda x: TwoFaced(logits=x @ WEIGHT.T), (X, Y), ball=BALL, tier=SMALL)


@dataclass(frozen=True, eq=False)
class OfItsExamples:
    """The margin, refused for other examples than those that it is for."""

    labels: Tensor  # (B,)

    def __call__(self, prediction: Any, y: Tensor) -> Tensor:
        if not torch.equal(self.labels, y):
            raise AssertionError("entries of other examples")
        return margin(prediction, y)

    def rows(self, index: Tensor | slice) -> OfItsExamples:
        return OfItsExamples(self.labels[index])


@dataclass(frozen=True, eq=False)
class AsksAtOnce:
    """A black-box attack of one call that finds nothing."""

    ball: L2
    loss: OfItsExamples
    steps: int = 5000

    def __call__(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        assert y is not None
        self.loss(predict(x), y)
        predict(x.repeat(self.steps, 1))
        return x


def test_a_loss_with_an_entry_for_each_example_keeps_to_them() -> None:
    draw = torch.Generator().manual_seed(3)
    y = torch.randint(10, (120,), generator=draw)
    x = y.float().unsqueeze(1) + 0.2 * torch.randn(120, 1, generator=draw)

    def nearest(x: Tensor) -> Classes:
        return Classes(logits=-(x - torch.arange(10.0)).square())

    verdict = audit(
        nearest,
        (x, y),
        ball=L2(0.4),
        tier=SMALL,
        attacks={"PGD": pgd(L2(0.4), 5, OfItsExamples(y), stop_at_success=True)},
        progress=False,
    )
    assert [each.id for each in verdict.findings if "entries of other" in each.advice] == []
    assert [verdict[id].status for id in ("E1", "E6", "E28", "E29")] == ["passed"] * 4
    blind = AsksAtOnce(L2(0.4), OfItsExamples(y))
    support = Support(black_box=blind, unpurified=nearest, purifier_attacks={"annealed": blind})
    options: Any = {"ball": L2(0.4), "tier": SMALL, "progress": False}
    helped = audit(nearest, (x, y), support=support, only=("E11", "E23"), **options)
    assert [each.id for each in helped.findings if "entries of other" in each.advice] == []
    assert helped["E11"].status == "passed"
    few = pgd(BALL, 5, MarginTo(y[:40]))
    for given in (
        {"attacks": {"PGD": few}},
        {"support": Support(black_box=few)},
        {"support": Support(purifier_attacks={"annealed": few})},
    ):
        with pytest.raises(ValueError, match="one entry for each of the 120 examples"):
            audit(nearest, (x, y), ball=BALL, progress=False, **given)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_points_that_are_not_finite_fail_e1_and_nothing_else_stops(value: float) -> None:
    x_adv = pgd(BALL, 10)(predict, X, Y)
    x_adv[:7] = value
    found = judged({"a": x_adv})
    assert found["E1"].status == "failed"
    assert found["E1"].figures["infeasible"] == 7
    left = (predict(x_adv[7:]).logits.argmax(1) == Y[7:]).sum() + 7  # x stands in for them
    assert float(found["E12"].figures["standing"] or 0) == int(left)
    assert judged({"a": torch.full_like(X, value)})["E1"].figures["infeasible"] == 40


def test_arrays_are_judged_as_tensors_are() -> None:
    x_adv = pgd(BALL, 10)(predict, X, Y)
    correct = predict(x_adv).logits.argmax(1) == Y
    of_tensors = judged({"a": x_adv}, correct={"a": correct}, worst=correct)
    of_arrays = judged(
        {"a": x_adv.double().numpy()},
        correct={"a": correct.numpy()},
        worst=correct.numpy(),
        data=(X.double().numpy(), Y.numpy()),
    )
    assert of_arrays.json() == of_tensors.json()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"correct": {"a": torch.ones(3)}},
            r"correct\['a'\] must hold one value for each of the 40 examples",
        ),
        (
            {"log_prob": {"a": -torch.ones(3)}},
            r"log_prob\['a'\] must hold one value for each of the 40 examples",
        ),
        ({"worst": np.ones(3)}, "worst must hold one value for each of the 40 examples"),
        (
            {"correct": {"b": torch.ones(40)}},
            r"correct must speak of attacks in x_adv \(a\), got b",
        ),
        (
            {"correct": {"a": torch.full((40,), math.nan)}},
            r"correct\['a'\] must say for each example",
        ),
        ({"worst": torch.full((40,), 7)}, "worst must say for each example"),
        ({"correct": torch.ones(40)}, "correct must be a mapping from the names of attacks"),
        ({"correct": {"a": [True] * 40}}, r"correct\['a'\] must be a tensor or an array"),
    ],
)
def test_claimed_scores_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        judged({"a": X}, **options)


@pytest.mark.parametrize("argument", ["attacks", "siblings", "purifier_attacks"])
def test_a_list_where_names_are_due(argument: str) -> None:
    given: dict[str, Any] = {argument: [pgd(BALL, 5)]}
    with pytest.raises(TypeError, match=f"{argument} must be a mapping from names"):
        audit(
            predict,
            (X, Y),
            ball=BALL,
            **(given if argument == "attacks" else {"support": Support(**given)}),
        )


def test_the_cost_of_a_list_is_named_too() -> None:
    with pytest.raises(TypeError, match="attacks must be a mapping"):
        audit_cost(predict, (X, Y), ball=BALL, attacks=[pgd(BALL, 5)])  # type: ignore[arg-type]


def regress(x: Tensor) -> Normal:
    return Normal(x @ WEIGHT[0], 0.3)


@pytest.mark.parametrize("shape", [(40,), (40, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_regression_targets_of_either_shape_and_dtype(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    y = X @ WEIGHT[0] + 0.1 * torch.randn(40, generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"ball": BALL, "tier": SMALL, "progress": False}
    assert (
        audit(regress, (X, y.to(dtype).reshape(shape)), **options).json()
        == audit(regress, (X, y), **options).json()
    )


def test_regression_targets_of_two_outputs() -> None:
    def two(x: Tensor) -> Independent:
        return Independent(Normal(x @ WEIGHT[:2].T, 0.3), 1)

    y = (X @ WEIGHT[:2].T).double() + 0.1
    found = audit(two, (X, y), ball=BALL, tier=SMALL, progress=False, only=("E1", "E3", "E12"))
    assert not found.failed
    claim = Claim({"a": X.numpy()})  # type: ignore[dict-item]
    assert (
        audit(two, (X, y), ball=BALL, claim=claim, tier=SMALL, progress=False, only=("E1",))[
            "E1"
        ].status
        == "passed"
    )


@pytest.mark.parametrize("wrong", [0, 3])
def test_claimed_scores_in_a_column_are_judged_as_those_in_a_row(wrong: int) -> None:
    """Compared example by example: as many differ as were changed."""
    x_adv = pgd(BALL, 10, margin)(predict, X, Y)
    correct = (predict(x_adv).logits.argmax(1) == Y).double()
    correct[:wrong] = 1 - correct[:wrong]
    log_prob = predict(x_adv).log_prob(Y)
    for shape in ((-1,), (-1, 1)):
        scores = {
            "correct": {"a": correct.reshape(shape)},
            "log_prob": {"a": log_prob.reshape(shape)},
            "worst": correct.reshape(shape),
        }
        verdict = judged({"a": x_adv}, only=("E27",), **scores)
        assert verdict["E27"].figures["changed"] == wrong

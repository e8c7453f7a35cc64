"""Level A: only for a certificate that backs the number it stands under."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical as Classes
from torch.distributions import Normal

from advbayes import L2
from advbayes.auditing import Budget, Claim, Verdict, audit
from advbayes.evaluation import evaluate

SMALL = Budget(num=40, steps=20, restarts=1, random_points=10)
BALL = L2(0.5)
ONLY = ("E1", "E2", "E17")
WEIGHT = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
X = torch.randn(60, 5, generator=torch.Generator().manual_seed(2))


def predict(x: Tensor) -> Classes:
    return Classes(logits=x @ WEIGHT.T)


Y = predict(X).logits.argmax(1)


def exact_radii() -> Tensor:
    logits = predict(X).logits
    gap = logits.gather(1, Y[:, None]) - logits
    return (gap / (WEIGHT[Y][:, None] - WEIGHT).norm(dim=-1)).scatter(1, Y[:, None], math.inf).amin(1)


RADII = exact_radii()


def audited(certified: Any, **options: Any) -> Verdict:
    chosen: dict[str, Any] = {"ball": BALL, "budget": SMALL, "progress": False, "only": ONLY}
    return audit(predict, options.pop("data", (X, Y)), certified=certified, **(chosen | options))


def test_exact_radii_are_level_a_and_their_accuracy_is_reported() -> None:
    whole = audited(RADII, budget=Budget(num=60, steps=20, restarts=1, random_points=10))
    share = float((RADII >= 0.5).double().mean())
    assert whole.level == "A"
    assert whole.summary["certified accuracy"] == pytest.approx(share)
    assert whole.summary["worst accuracy"] == pytest.approx(share)
    assert f"certified accuracy {share:.4g} at eps 0.5" in whole.line()
    assert f"certified accuracy {share:.4g}" in whole.text().splitlines()[0]
    assert json.loads(json.dumps(whole.json()))["summary"]["certified accuracy"] == pytest.approx(share)


@pytest.mark.parametrize("make", [torch.Tensor.numpy, lambda radii: radii.unsqueeze(1), lambda radii: radii.double()])
def test_radii_are_cut_to_the_audited_examples(make: Any) -> None:
    found = audited(make(RADII))
    assert found.summary["examples"] == 40
    assert found.level == "A"
    mixed = audited(RADII.roll(1))  # one for each example, but not its own
    assert mixed.level == "D"


@pytest.mark.parametrize("tier", ["quick", "standard"])
def test_radii_that_certify_nothing_are_not_level_a(tier: str) -> None:
    found = audited(torch.zeros(60), tier=tier, budget=None)
    assert found.level == "D"
    assert found.summary["certified accuracy"] == 0.0
    table = evaluate(predict, (X, Y), attacks={"a": _step()}).table(verdict=found)
    assert "†" in table.markdown()


def _step() -> Any:
    from advbayes import one_step

    return one_step(BALL)


def test_less_than_the_printed_number_is_not_level_a() -> None:
    found = audited(0.8 * RADII)
    assert 0 < float(found.summary["certified accuracy"] or 0) < float(found.summary["worst accuracy"] or 0)
    assert found.summary["certified but broken"] == 0
    assert found.level == "D"


def test_a_broken_certificate_is_not_level_a_and_says_so() -> None:
    found = audited(RADII + 1)
    assert int(found.summary["certified but broken"] or 0) > 0
    assert found.level == "D"
    assert "contradicted by" in found.line()


def test_wrong_examples_are_not_certified() -> None:
    y = (Y + 1) % 3
    found = audited(torch.full((60,), 9.0), data=(X, y))
    assert found.summary["certified accuracy"] == 0.0
    assert found.level == "D"


@dataclass(frozen=True)
class Outside:
    """Leaves the ball: its worst case is nobody's."""

    ball: Any

    def __call__(self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return x + 3 * self.ball.eps


def test_no_level_a_while_the_table_itself_fails() -> None:
    found = audited(0.9 * RADII, attacks={"a": Outside(BALL)})
    assert "E1" in found.failed
    assert found.level == "D"
    assert audited(RADII, only=("E0",)).level == "D"  # E1 did not run


def test_a_claimed_number_is_what_must_be_backed() -> None:
    nothing = {"a": X}
    radii = 0.8 * RADII
    certified = radii >= 0.5
    right = {"a": torch.ones(60)}
    modest = audited(radii, claim=Claim(nothing, correct=right, worst=certified))
    assert modest.level == "A"
    assert modest.summary["claimed worst accuracy"] == pytest.approx(float(certified.double().mean()))
    assert audited(radii, claim=Claim(nothing, correct=right, worst=torch.ones(60))).level == "D"
    assert audited(radii, claim=Claim(nothing, correct=right)).level == "D"  # no worst case is claimed: E17


@pytest.mark.parametrize(
    ("certified", "message"),
    [
        (torch.full((60,), math.nan), "certified must be finite, got 60 NaN"),
        (torch.full((60,), math.inf), "certified must be finite, got 0 NaN and 60 infinite"),
        (torch.full((60,), -1.0), "certified must hold radii >= 0, got a smallest one of -1"),
        (torch.ones(59), "certified must hold one radius for each of the 60 examples"),
        (torch.ones(61), "certified must hold one radius for each of the 60 examples"),
        (torch.ones(20, 3), "certified must hold one radius for each of the 60 examples"),
        (torch.ones(60, dtype=torch.bool), "certified must hold radii, got"),
        (0.5, "certified must be a tensor or an array"),
    ],
)
def test_bad_radii_are_named(certified: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        audited(certified)


def test_regression_has_no_certificate() -> None:
    with pytest.raises(ValueError, match="no meaning in regression"):
        audit(lambda x: Normal(x[:, 0], 1.0), (X, X[:, 0]), ball=BALL, budget=SMALL, certified=np.ones(60))

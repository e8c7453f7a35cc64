"""Level A: only for a certificate that the audit confirms."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical as Classes
from torch.distributions import Normal

from advbayes import L2, Linf, pgd
from advbayes.auditing import Budget, Claim, Verdict, audit, others
from advbayes.auditing.certificate import beyond_votes, broken_at_their_radius, certified_again
from advbayes.auditing.run import _case
from advbayes.auditing.support import Support
from advbayes.predictive import Certificates, Smoothed, certify
from tests import zoo

SMALL = Budget(
    num=40, steps=5, restarts=1, random_points=5, queries=20, max_steps=20, certified_again=40
)
WEIGHT = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])


def line(x: Tensor) -> Classes:
    """Two classes on both sides of a line: the smoothed vote's radius is the distance to it,
    exactly."""
    return Classes(logits=20 * x @ WEIGHT.T)


X = torch.stack([torch.linspace(-1.5, 1.5, 40), torch.zeros(40)], 1)
Y = (X[:, 0] < 0).long()
SMOOTHED = Smoothed(line, 0.5, num=32)
# The predictor itself errs where the noise of its draws, the same everywhere, is not even: its edge
# is off the line by 1.25 * 0.5 / sqrt(num), with 32 draws by 0.11, with 4096 by 0.01.
MANY = replace(SMOOTHED, num=4096)
HELD = certify(SMOOTHED, X, n=2000, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "QUERIES", 20)


def audited(certified: Any, predict: Any = SMOOTHED, **options: Any) -> Verdict:
    chosen: dict[str, Any] = {
        "ball": L2(0.5),
        "tier": SMALL,
        "progress": False,
        "attacks": {"a": pgd(L2(0.5), 5)},
    }
    return audit(predict, options.pop("data", (X, Y)), certified=certified, **(chosen | options))


def case(held: Certificates, predict: Any = SMOOTHED) -> Any:
    attacks = {"a": pgd(L2(0.5), 5)}
    return _case(predict, (X, Y), L2(0.5), SMALL, Support(), attacks, certified=held)


def test_an_honest_certificate_is_level_a_and_its_accuracy_is_reported() -> None:
    found = audited(HELD)
    share = float(HELD.accuracy(Y, 0.5))
    assert 0 < share < 1
    assert found.level == "A", found.line()
    assert found.summary["certified accuracy"] == pytest.approx(share)
    assert (
        found.sentence()
        == f"A share of {share:.4g} of the examples is proven right within eps = 0.5, whatever "
        f"the attack."
    )
    assert found.sentence()[:-1] in found.line()
    assert json.loads(json.dumps(found.json()))["summary"]["certified accuracy"] == pytest.approx(
        share
    )


def test_an_overclaim_of_a_tenth_falls() -> None:
    found = audited(replace(HELD, radii=1.1 * HELD.radii))
    assert found.level == "D"
    assert "radii are larger" in str(found.summary["certificate"])


@pytest.mark.parametrize("seed", range(10))
def test_honest_radii_are_confirmed_and_stretched_ones_are_not_whatever_the_seed(seed: int) -> None:
    held = certify(SMOOTHED, X, n=500, generator=torch.Generator().manual_seed(seed))
    assert certified_again(case(held), SMOOTHED, held).why == ""
    stretched = replace(held, radii=1.1 * held.radii)
    assert certified_again(case(stretched), SMOOTHED, stretched).why


def test_radii_that_are_larger_on_average_are_found_though_each_is_possible() -> None:
    """An eighth too large, but none beyond what the votes can certify: old and new cannot be
    exchanged."""
    stretched = replace(HELD, radii=torch.where(HELD.radii < 0.9, 1.12 * HELD.radii, HELD.radii))
    why = certified_again(case(stretched), SMOOTHED, stretched).why
    assert "larger than when certified again" in why, why


def test_a_single_impossible_radius_is_found() -> None:
    radii = HELD.radii.clone()
    row = int((HELD.radii - 0.4).abs().argmin())
    radii[row] = 3 * radii[row]
    again = certified_again(case(replace(HELD, radii=radii)), SMOOTHED, replace(HELD, radii=radii))
    assert again.why == "1 radii are larger than the votes allow"


def test_a_radius_that_is_not_certified_again_is_looked_at_too() -> None:
    """Larger than the bound of its own vote; and, where that bound was altered as well, than a vote
    of the audit's own allows."""
    assert beyond_votes(case(HELD), SMOOTHED, HELD) == ""
    radii, lower = HELD.radii.clone(), HELD.lower.clone()
    row = int((HELD.radii - 0.4).abs().argmin())
    radii[row] = 0.6
    held = replace(HELD, radii=radii)
    said = beyond_votes(case(held), SMOOTHED, held)
    assert said == "1 radii are larger than the bounds of their own votes say"
    lower[row] = 0.9
    held = replace(HELD, radii=radii, lower=lower)
    said = beyond_votes(case(held), SMOOTHED, held)
    assert said == "1 radii are larger than a vote of 2000 allows"


def test_no_level_a_where_any_radius_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("advbayes.auditing.certificate.beyond_votes", lambda *_: "too large")
    found = audited(HELD)
    assert found.level != "A"
    assert found.summary["certificate"] == "too large"


def test_examples_are_attacked_at_their_own_radius() -> None:
    """On a line the exact radius is the distance: a tenth beyond it every example falls, a tenth
    within it none does. A tenth is 0.065 or more, six standard deviations of where the predictor's
    edge is."""
    exact = torch.where(X[:, 0].abs() > 0.6, X[:, 0].abs(), 0.0).double()
    for factor, wanted in ((0.9, 0), (1.1, int((exact > 0).sum()))):
        held = replace(HELD, radii=factor * exact, classes=Y, n=20_000)
        assert broken_at_their_radius(case(held, MANY), MANY, held) == wanted


def test_errors_of_the_predictors_few_draws_do_not_contradict_a_certificate() -> None:
    """The vote of three draws errs within the radius, the vote of infinitely many does not."""
    few = replace(SMOOTHED, num=3)
    held = replace(HELD, radii=0.95 * X[:, 0].abs().double(), classes=Y, n=20_000)
    with torch.no_grad():
        towards = X - X.sign() * held.radii.float().unsqueeze(1)
        erring = int((few(towards).logits.argmax(-1) != Y).sum())  # type: ignore[attr-defined]
    assert erring > 0
    assert broken_at_their_radius(case(held, few), few, held) == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"only": ("E1", "E2")}, "no level A under `only`"),
        ({"tier": "quick"}, "E6, E7, E11 did not run"),
        ({"predict": line}, "to certify a sample again the audit needs the Smoothed predictor"),
        ({"predict": Smoothed(line, 0.4, num=32)}, "it is for sigma = 0.5, the predictor has 0.4"),
        ({"ball": Linf(0.5), "attacks": {"a": pgd(Linf(0.5), 5)}}, "the radii are L2 radii"),
        ({"ball": L2(9.0), "attacks": {"a": pgd(L2(9.0), 5)}}, "it certifies nothing at eps"),
        (
            {"claim": Claim({"a": X}, correct={"a": torch.ones(40)}, worst=torch.ones(40))},
            "did not run",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::advbayes.evaluation.UnitsWarning")
def test_what_keeps_a_certificate_from_level_a_is_said(options: dict[str, Any], why: str) -> None:
    if "claim" in options:
        options = options | {"attacks": {}}
    found = audited(HELD, **options)
    assert found.level != "A"
    assert why in str(found.summary["certificate"])
    assert f"not confirmed: {found.summary['certificate']}" in found.line()


def test_radii_alone_are_reported_and_never_level_a() -> None:
    found = audited(HELD.radii.numpy())
    assert found.level == "D"
    assert found.summary["certified accuracy"] == pytest.approx(float(HELD.accuracy(Y, 0.5)))


@pytest.mark.parametrize("above", [False, True])
def test_a_claimed_number_must_be_the_proven_one(above: bool) -> None:
    """The next example to the line that can be proven at 0.5 is 0.077 away from falling, more than
    seven standard deviations of where the predictor's edge is."""
    proven = (HELD.classes == Y) & (HELD.radii >= 0.5)
    x_adv = pgd(L2(0.5), 5)(MANY, X, Y, generator=torch.Generator().manual_seed(1))
    worst = proven.clone()
    if above:
        worst[int((~proven).nonzero()[0])] = True
    claim = Claim({"a": x_adv}, correct={"a": torch.ones(40)}, worst=worst)
    found = audited(HELD, MANY, claim=claim)
    said = str(found.summary["certificate"])
    assert ("is claimed" in said or "E17 failed" in said) if above else found.level == "A", said


def test_the_zoo_of_certificates() -> None:
    assert zoo.certificate(1.0).level == "A"
    assert zoo.certificate(1.1).level != "A"


@pytest.mark.parametrize(
    ("certified", "message"),
    [
        (torch.full((40,), math.nan), "certified must be finite, got 40 NaN"),
        (torch.full((40,), math.inf), "certified must be finite, got 0 NaN and 40 infinite"),
        (torch.full((40,), -1.0), "certified must hold radii >= 0, got a smallest one of -1"),
        (torch.ones(39), "certified must hold one radius for each of the 40 examples"),
        (torch.ones(41), "certified must hold one radius for each of the 40 examples"),
        (torch.ones(20, 2), "certified must hold one radius for each of the 40 examples"),
        (torch.ones(40, dtype=torch.bool), "certified must hold radii, got"),
        (0.5, "certified must be what certify"),
    ],
)
def test_bad_radii_are_named(certified: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        audited(certified)


def test_regression_has_no_certificate() -> None:
    with pytest.raises(ValueError, match="no meaning in regression"):
        audit(
            lambda x: Normal(x[:, 0], 1.0),
            (X, X[:, 0]),
            ball=L2(0.5),
            tier=SMALL,
            certified=np.ones(40),
        )

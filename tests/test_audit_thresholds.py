"""Thresholds of the audit's rules, each from both sides, on columns made by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical as Classes
from torch.distributions import Normal

from advbayes import L2, margin, nll, pgd
from advbayes.attacks import APGD
from advbayes.auditing import (
    TIERS,
    Budget,
    Claim,
    Support,
    ThreatModel,
    answers,
    describing,
    others,
    purifier,
    strength,
)
from advbayes.auditing.case import Case
from advbayes.auditing.certificate import certificate
from advbayes.auditing.run import _case
from advbayes.evaluation import Evaluation, evaluate
from advbayes.evaluation.result import CLEAN, Cell

NUM = 200
BALL = L2(0.5)
BUDGET = Budget(num=NUM, steps=5, restarts=1, random_points=5, queries=20, max_thetas=40)
WEIGHT = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
X = torch.randn(NUM, 5, generator=torch.Generator().manual_seed(2))


def predict(x: Tensor) -> Classes:
    return Classes(logits=x @ WEIGHT.T)


Y = predict(X).logits.argmax(1)


def case(model: Any = predict, y: Tensor = Y, ball: Any = BALL, **options: Any) -> Case:
    arguments = {"attacks": {"a": pgd(BALL, 3)}, "support": Support(), "claim": None} | options
    chosen = [arguments.pop(name) for name in ("attacks", "support", "claim")]
    found = _case(model, (X, y), ball, BUDGET, chosen[0], None, chosen[1], chosen[2], None, 0)
    return replace(found, **arguments)


def columns(wrong: int, num: int = NUM) -> dict[str, Tensor]:
    """Scores of which the first `wrong` are wrong."""
    correct = (torch.arange(num) >= wrong).double()
    return {"correct": correct, "log_prob": correct - 1.5, "loss": 1.5 - correct}


@pytest.mark.parametrize(("more", "wanted"), [(6, False), (7, True)])
def test_mcnemar_is_at_one_percent(more: int, wanted: bool) -> None:
    """Seven discordant pairs of seven: 1/128; six of six: 1/64."""
    assert strength.breaks_more(case(), columns(50 + more), columns(50))[0] is wanted
    assert strength.breaks_more(case(), columns(50), columns(50 + more))[0] is False


@pytest.mark.parametrize(
    ("ball", "wanted"),
    [
        (L2(0.0101), None),
        (L2(0.0099), [True, False, True]),
        (L2(0.0101, scale=torch.tensor([1.0, 0.98, 1.0])), [True, False, True]),
        (L2(0.0101, scale=torch.tensor([1.0, 2.0, 1.0])), None),
        (L2(0.0101, mask=torch.tensor([False, True, True])), [False, True, True]),
        # most of what varies is out of reach, the constant feature not counted: eps is small
        (L2(0.0099, mask=torch.tensor([False, True, True])), [False, True, True]),
        (L2(1e-9), None),
    ],
)
def test_e5_within_reach_is_a_hundredth_of_the_extent(ball: Any, wanted: list[bool] | None) -> None:
    reach = strength.within_reach(ball, torch.tensor([[0.0, 2.0, 1.0], [0.1, 3.0, 1.0]]))
    assert (None if reach is None else reach.tolist()) == wanted


@pytest.mark.parametrize(("more", "wanted"), [(6, "passed"), (7, "failed")])
def test_e13_transfer(more: int, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = case(support=Support(siblings={"other": lambda x: predict(x)}))
    found.memory |= {"clean": columns(0), "columns": {"a": columns(50)}}
    monkeypatch.setattr(Case, "union", lambda self, *_, **__: columns(50 + more))
    assert others.transfer(found).status == wanted


@pytest.mark.parametrize(("cost", "wanted"), [(1, "passed"), (2, "failed")])  # 0.5 and 1 point
def test_e10_thetas(cost: int, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = SimpleNamespace(with_thetas=lambda num: predict)

    def union(self: Case, attacks: Any, purpose: str, **_: Any) -> dict[str, Tensor]:
        return columns(50 + cost * (purpose == "thetas 40"))

    monkeypatch.setattr(Case, "union", union)
    result = others.enough_thetas(case(support=Support(fresh=fresh)))
    assert (result.status, result.figures["thetas"]) == (wanted, 20)


@pytest.mark.parametrize(("scorings", "wanted"), [(9, "failed"), (10, "passed")])
def test_e18_scorings(scorings: int, wanted: str) -> None:
    found = case(claim=Claim({"a": X}, rescored=scorings), stochastic=True)
    assert describing.rescoring(found).status == wanted


@pytest.mark.parametrize(("off", "wanted"), [(-1e-3, "passed"), (1e-3, "failed")])
def test_e22_log_of_the_number_of_classes(off: float, wanted: str) -> None:
    found = case()
    found.memory["clean"] = columns(0) | {
        "log_prob": torch.full((NUM,), -math.log(3) - off, dtype=torch.float64)
    }
    result = answers.trivial_predictors(found)
    assert result.status == wanted
    assert ("NLL above ln C = 1.099" in result.advice) is (wanted == "failed")


@pytest.mark.parametrize(("factor", "wanted"), [(0.999, "passed"), (1.001, "failed")])
def test_e22_the_spread_of_the_targets(factor: float, wanted: str) -> None:
    y = 3 * X[:, 0]
    found = case(lambda x: Normal(3 * x[:, 0], 1 + x[:, 1].abs()), y)
    assert found.spread == pytest.approx(float(y.std(correction=0)))
    found.memory["clean"] = {
        "squared_error": torch.full((NUM,), (factor * found.spread) ** 2, dtype=torch.float64),
        "log_prob": torch.full((NUM,), -9.0, dtype=torch.float64),
    }
    assert answers.trivial_predictors(found).status == wanted


@pytest.mark.parametrize(
    ("few", "ess", "silent", "wanted"),
    [
        (20, 1.99, 0, "passed"),  # clean and attacked: 20 of 400
        (21, 1.99, 0, "failed"),
        (400, 2.0, 0, "passed"),
        (0, 1.0, 1, "failed"),
    ],
)
def test_e24_effective_sample_size(few: int, ess: float, silent: int, wanted: str) -> None:
    asked: list[int] = []

    def diagnose(x: Tensor) -> Any:
        left = max(0, few - sum(asked))
        asked.append(len(x))
        rows = torch.arange(len(x))
        evidence = torch.where(rows < silent, -torch.inf, 0.0)
        return SimpleNamespace(
            ess_reference=torch.where(rows < left, ess, 9.0),
            log_evidence=evidence,
            out_of_support=torch.zeros(len(x), dtype=torch.bool),
        )

    class Purifies:
        def __call__(self, x: Tensor) -> Classes:
            return predict(x)

    found = case(Purifies(), support=Support(unpurified=predict))
    found.predict.diagnose = diagnose  # type: ignore[attr-defined]
    found.memory["arrays"] = {"a": X}
    assert purifier.effective_sample_size(found).status == wanted


@pytest.mark.parametrize(
    ("rivals", "ahead", "wanted"), [(1, 4, "failed"), (1, 5, "passed"), (2, 5, "failed")]
)
def test_e25_significance_after_holm(rivals: int, ahead: int, wanted: str) -> None:
    """Five of five: 1/32; with two rivals twice that."""
    cells = {}
    for name, wrong in {"own": 0, **{f"rival {k}": ahead for k in range(rivals)}}.items():
        cells |= {Cell(name, CLEAN, 0.0): columns(0), Cell(name, "PGD", 0.5): columns(wrong)}
    report = Evaluation("classification", cells, ())
    found = case(support=Support(num_seeds=5, better=True, evaluation=report))
    assert describing.statistics(found).status == wanted


@pytest.mark.parametrize(("share", "said"), [(0.49, True), (0.51, False)])
def test_e0_points_that_stay_far_from_the_edge(share: float, said: bool) -> None:
    step = torch.zeros(5)
    step[0] = share * BALL.eps
    found = case(claim=Claim({"a": X + step}))
    assert ("other units?" in describing.threat_model(found).advice) is said


@pytest.mark.parametrize(("factor", "said"), [(1.0005, False), (1.002, True), (0.998, True)])
def test_e0_attacks_in_another_ball(factor: float, said: bool) -> None:
    found = case(attacks={"PGD": pgd(L2(factor * BALL.eps), 3)}, threat_model=ThreatModel())
    assert ("PGD reaches" in describing.threat_model(found).advice) is said


@pytest.mark.parametrize(
    ("stochastic", "flipped", "drift", "wanted"),
    [
        (False, 0, 9e-4, "passed"),
        (False, 0, 1.1e-3, "failed"),
        (False, 1, 0.0, "failed"),
        (True, 10, 9.0, "passed"),  # five percent of noise
        (True, 11, 0.0, "failed"),
    ],
)
def test_e27_a_claim_scored_again(
    stochastic: bool, flipped: int, drift: float, wanted: str
) -> None:
    from advbayes.evaluation.files import data_hash

    claim = Claim(
        {"a": X},
        correct={"a": torch.arange(NUM) >= flipped},
        log_prob={"a": columns(0)["log_prob"] - drift},
        seed=0,
        config={"steps": 1},
        code="0",
        test_size=NUM,
        test_hash=data_hash(X, Y),
    )
    found = case(claim=claim, stochastic=stochastic)
    found.memory["columns"] = {"a": columns(0)}
    result = describing.rescorable(found)
    assert result.status == wanted, result.line()
    assert result.figures["changed"] == flipped


@pytest.mark.parametrize(("drift", "wanted"), [(9e-4, "passed"), (1.1e-3, "failed")])
def test_e27_files_scored_again(drift: float, wanted: str, tmp_path: Path) -> None:
    """The table as it was told and the arrays on disk agree to a thousandth."""
    found = case()
    attacks = {"a": pgd(found.ball, 2)}
    told = evaluate(found.predict, (X, Y), attacks=attacks, out=tmp_path, progress=False)
    cells = {
        cell: rows | {"log_prob": rows["log_prob"] - drift} for cell, rows in told.cells.items()
    }
    found.support = replace(found.support, evaluation=replace(told, cells=cells))
    result = describing.rescorable(found)
    assert result.status == wanted, result.line()
    assert float(result.figures["largest_drift"]) == pytest.approx(drift, rel=1e-2)


@pytest.mark.parametrize(
    ("stochastic", "better", "wanted"),
    [(False, 0, "passed"), (False, 1, "failed"), (True, 10, "passed"), (True, 11, "failed")],
)
def test_e17_better_than_the_union(stochastic: bool, better: int, wanted: str) -> None:
    claim = Claim({"a": X}, worst=torch.arange(NUM) >= 50 - better)
    found = case(claim=claim, stochastic=stochastic)
    found.memory["columns"] = {"a": columns(50)}
    result = describing.worst_column(found)
    assert (result.status, result.figures["better_than_the_union"]) == (wanted, better)


@dataclass(frozen=True)
class Sparing:
    """A sound attack that leaves the first rows alone: of the linear model (200), of the planted
    one (100)."""

    ball: Any
    linear: int = 0
    planted: int = 0
    steps: int = 30

    def __call__(
        self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        broken = x
        for loss in (nll, margin):
            moved = APGD(self.ball, loss, self.steps)(predict, x, y, generator=generator)
            wrong = (predict(moved).logits.argmax(1) != y).unsqueeze(1)
            broken = torch.where(wrong, moved, broken)
        spared = (broken != x).any(1).cumsum(0) <= (self.linear if len(x) == 200 else self.planted)
        return torch.where(spared.unsqueeze(1), x, broken)


@pytest.mark.parametrize(
    ("linear", "planted", "wanted"), [(0, 5, "passed"), (0, 6, "failed"), (1, 0, "failed")]
)
def test_e19_one_mismatch_and_five_percent(linear: int, planted: int, wanted: str) -> None:
    result = answers.attack_itself(case(attacks={"a": Sparing(BALL, linear, planted)}))
    assert (result.status, result.figures["mismatches"]) == (wanted, linear)
    assert result.figures["planted_found"] == pytest.approx(1 - planted / 100)


@pytest.mark.parametrize(("short", "share"), [(0.0, 1.0), (1e-6, 0.5)])
def test_a_radius_of_eps_certifies_at_eps(short: float, share: float) -> None:
    radii = torch.full((NUM,), 0.5, dtype=torch.float64)
    radii[::2] -= short
    found = case(certified=radii)
    found.memory["clean"] = columns(0)
    assert certificate(found, (), None)[1]["certified accuracy"] == share
    found.memory["clean"] = columns(50)  # what is wrong is not certified, however far
    expected = ((radii >= 0.5) & (torch.arange(NUM) >= 50)).double().mean()
    assert certificate(found, (), None)[1]["certified accuracy"] == float(expected)


def test_a_tier_spends_what_the_pages_say() -> None:
    spent = {
        name: (tier.num, tier.steps, tier.restarts, tier.random_points, tier.queries)
        for name, tier in TIERS.items()
    }
    assert spent == {
        "quick": (64, 20, 1, 20, 5000),
        "standard": (256, 50, 1, 100, 5000),
        "full": (1000, 100, 2, 1000, 5000),
    }
    assert {name: tier.left_out for name, tier in TIERS.items()} == {
        "quick": ("E6", "E7", "E10", "E11"),
        "standard": (),
        "full": (),
    }
    assert {tier.max_steps for tier in TIERS.values()} == {1600}

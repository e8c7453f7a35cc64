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
    found = _case(model, (X, y), ball, BUDGET, chosen[1], chosen[0], claim=chosen[2])
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
    other = lambda x: torch.distributions.Categorical(logits=2 * predict(x).logits)  # noqa: E731
    found = case(support=Support(siblings={"other": other}))
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


@pytest.mark.parametrize(("said", "tried"), [(None, 20), (5, 20), (20, 20), (30, 30)])
def test_e10_begins_with_the_thetas_of_the_attack(
    said: int | None, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with twenty where they are fewer, or the predictor holds its own."""
    asked = []
    fresh = SimpleNamespace(with_thetas=lambda num: asked.append(num) or predict)
    monkeypatch.setattr(Case, "union", lambda self, *_, **__: columns(50))
    found = case(support=Support(fresh=fresh), threat_model=ThreatModel(attack_thetas=said))
    assert others.enough_thetas(found).figures["thetas"] == tried
    assert asked == [20, tried, 2 * tried]  # the first: whether they have learnt anything
    monkeypatch.setattr(Case, "num_thetas", 3)
    assert others.enough_thetas(found).figures["thetas"] == 20


@pytest.mark.parametrize(
    ("size", "note"), [(NUM - 1, 0), (NUM, 0), (NUM + 1, 1), (None, 0)], ids=str
)
def test_some_of_the_test_set_are_a_selection(size: int | None, note: int) -> None:
    found = case(claim=Claim({"a": X}, test_size=size))
    found.memory["clean"] = columns(1)
    told = [f"{NUM} of the {size} examples of the test set: a selection"] * note
    assert describing.notes_on_data(found) == tuple(told)


def test_what_else_is_noted_of_the_data() -> None:
    found = case(y=Y)
    found.memory["clean"] = columns(0)
    right = "a clean accuracy of exactly 1: were the examples chosen?"
    assert describing.notes_on_data(found) == (right,)
    found.memory["clean"] = columns(1)
    twice = X.clone()
    twice[:3] = X[5]
    assert describing.notes_on_data(replace(found, whole=(twice, Y))) == (
        "3 of 200 rows are duplicates",
    )
    assert describing.notes_on_data(replace(found, black_box=True)) == (
        "black-box mode: there is no gradient, the attacks ask for answers alone",
    )


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
    assert others.effective_sample_size(found).status == wanted


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
    ("factor", "said"), [(1 + 5e-7, False), (1 + 2e-6, True), (1 - 2e-6, True)]
)
def test_e0_eps_is_said_to_a_millionth(factor: float, said: bool) -> None:
    found = case(threat_model=ThreatModel(eps=factor * BALL.eps))
    assert ("eps is said to be" in describing.threat_model(found).advice) is said


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("restarts", 0, False),
        ("restarts", None, True),
        ("attack_thetas", 0, False),
        ("eps", 0.0, False),
        ("units", "standardised", True),  # without its scale
        ("scale", None, False),
    ],
)
def test_e0_nothing_is_not_none(field: str, value: Any, said: bool) -> None:
    """A count or a radius of zero is said; None is not."""
    known = ThreatModel(
        *("L2", 1.0, "raw", 2.0, "none", "untargeted", "thetas known", 3, 4, "fixed", 5, 0.1, 1),
        "nll",
    )
    assert known.missing() == ()
    assert bool(replace(known, **{"scale": None, field: value}).missing()) is said


def test_all_that_is_tried_joins_the_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a name and with scores of its own."""
    found = case(attacks={"a": pgd(BALL, 1), "b": pgd(BALL, 2), "c": pgd(BALL, 3)})
    wrong = {"a": torch.arange(0, 20), "b": torch.arange(40, 60), "c": torch.arange(80, 110)}

    def scored(self: Case, x: Tensor, purpose: str, **_: Any) -> dict[str, Tensor]:
        right = torch.ones(NUM, dtype=torch.float64)
        right[wrong[purpose[-1]]] = 0
        return {"correct": right, "log_prob": right - 1.5, "loss": 1.5 - right}

    monkeypatch.setattr(Case, "scored", scored)
    found.memory |= {"clean": columns(0), "columns": {}}
    together = found.union(found.attacks, "purpose", join=True)
    assert int((together["correct"] == 0).sum()) == 70
    assert int((found.worst()["correct"] == 0).sum()) == 70
    for name, each in found.memory["joined"].items():
        assert (each["correct"] == 0).nonzero().squeeze(1).tolist() == wrong[name[-1]].tolist()


@pytest.mark.parametrize(("distance", "groups"), [(0.6, 2), (0.99, 2), (1.01, 1), (1.5, 1)])
def test_e8_balls_that_meet_are_kept_apart(distance: float, groups: int) -> None:
    """Two of radius 0.5: a point between them would count for both."""
    found = replace(case(), x=torch.tensor([[0.0] * 5, [distance, *[0.0] * 4]]))
    assert len(strength._apart(found, torch.arange(2))) == groups


@dataclass(frozen=True)
class Returning:
    """Asks about one point of the ball and returns it, or another that it never asked about."""

    ball: Any
    asked: float  # towards another class: 1 breaks, 0 does not
    returned: float

    def __call__(
        self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        predict(x + self.asked * torch.tensor([1.0, 0.0]))
        return x + self.returned * torch.tensor([1.0, 0.0])


@pytest.mark.parametrize(
    ("asked", "returned", "wanted"),
    [
        (1.0, 1.0, "passed"),
        (1.0, 0.9, "passed"),  # another success than the one that was seen
        (0.0, 0.0, "passed"),  # none was seen
        (0.0, 0.1, "passed"),
        (1.0, 0.0, "failed"),
        (1.0, 0.1, "failed"),
    ],
)
def test_e8_a_success_is_returned_whichever(asked: float, returned: float, wanted: str) -> None:
    x = torch.stack([torch.zeros(NUM), 3.0 * torch.arange(NUM)], 1)
    step = lambda x: Classes(logits=torch.stack([4 - 8 * x[:, 0], 8 * x[:, 0] - 4], 1))  # noqa: E731
    attacks = {"a": Returning(L2(1.0), asked, returned)}
    data = (x, torch.zeros(NUM, dtype=torch.long))
    found = _case(step, data, L2(1.0), BUDGET, Support(), attacks)
    result = strength.silent_success(found)
    assert (result.status, result.figures["watched"]) == (wanted, 32)
    assert result.figures["missed"] == (32 if wanted == "failed" else 0)


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


@pytest.mark.parametrize("altered", ["a", "b", "c"])
def test_e27_every_column_of_a_claim_counts(altered: str) -> None:
    """Whichever of them drifts, or has another answer."""
    names = ("a", "b", "c")
    drift = {name: 0.5 * (name == altered) for name in names}
    claim = Claim(
        dict.fromkeys(names, X),
        correct={name: torch.arange(NUM) >= 2 * (name == altered) for name in names},
        log_prob={name: columns(0)["log_prob"] - drift[name] for name in names},
    )
    found = case(claim=claim)
    found.memory["columns"] = dict.fromkeys(names, columns(0))
    figures = describing.rescorable(found).figures
    assert (figures["changed"], figures["of"]) == (2, 3 * NUM)
    assert figures["largest_drift"] == pytest.approx(0.5)
    for name in names:
        assert figures[f"claimed {name}"] == 1 - 0.01 * (name == altered)
        assert figures[f"recomputed {name}"] == 1


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


def test_a_claim_takes_arrays_for_all_that_it_holds() -> None:
    right = torch.ones(NUM)
    claim = Claim(
        {"a": X.numpy()},
        correct={"a": right.numpy()},
        log_prob={"a": -right.numpy()},
        worst=right.numpy(),
    )
    held = claim.x_adv["a"], claim.correct["a"], claim.log_prob["a"], claim.worst
    for value, wanted in zip(held, (X, right, -right, right), strict=True):
        assert isinstance(value, Tensor)
        assert torch.equal(value, wanted.to(value))


# --- what a check says where it has nothing to look at --------------------------------------------


@pytest.mark.parametrize(
    ("units", "scaled", "said"),
    [("raw", True, True), ("raw", False, False), ("standardised", True, False)],
)
def test_e0_raw_units_of_a_ball_with_a_scale(units: str, scaled: bool, said: bool) -> None:
    ball = replace(BALL, scale=torch.full((5,), 2.0)) if scaled else BALL
    found = case(ball=ball, threat_model=ThreatModel(units=units, scale="a scale"))
    advice = describing.threat_model(found).advice
    assert ("eps is said to be in raw units" in advice) is said


@dataclass(frozen=True)
class Anyhow:
    """An attack that says nothing of its steps."""

    ball: Any

    def __call__(self, predict: Any, x: Tensor, y: Any = None, *, generator: Any = None) -> Tensor:
        return x


def test_e6_an_attack_without_steps_is_not_doubled() -> None:
    found = strength.converged_in_steps(case(attacks={"any": Anyhow(BALL)}))
    assert found.status == "not run"
    assert found.advice == "the attacks do not say how many steps they take"


@pytest.mark.parametrize("num", [19, 20])
def test_e10_a_claim_is_compared_with_the_thetas_there_are(num: int) -> None:
    """At least twenty, or others must be given."""

    class Several:
        thetas = torch.zeros(num, 15)

        def __call__(self, x: Tensor) -> Classes:
            return predict(x)

    looked = case(Several(), attacks={"PGD": pgd(BALL, 3)}, threat_model=ThreatModel())
    assert looked.num_thetas == num
    assert (others._enough_in_claim(looked).status == "not run") is (num < 20)

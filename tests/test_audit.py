"""The audit's rules one by one, its levels, its cost and what it refuses."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as Classes
from torch.distributions import Distribution, Normal

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    FreshPredictive,
    Linf,
    MeanField,
    Mixture,
    Noise,
    PointMass,
    PosteriorPredictive,
    entropy_pgd,
    margin,
    nll,
    one_step,
    pgd,
)
from advbayes.attacks import APGD, RandomSearch
from advbayes.auditing import (
    CHECKS,
    Budget,
    Claim,
    Finding,
    Support,
    ThreatModel,
    Verdict,
    audit,
    audit_cost,
    audit_records,
    others,
)
from advbayes.auditing.answers import Planted
from advbayes.evaluation import evaluate
from advbayes.predictive import Smoothed
from advbayes.purification import Purifier
from advbayes.store import read_document, write_document

IDS = [f"E{number}" for number in range(31)]
SMALL = Budget(
    num=60, steps=10, restarts=1, random_points=10, queries=50, max_steps=80, max_thetas=40
)
BALL = L2(0.5)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True, eq=False)
class Linear:
    weight: Tensor

    def __call__(self, x: Tensor) -> Classes:
        return Classes(logits=x @ self.weight.T)


MODEL = Linear(torch.randn(3, 5, generator=generator(1)))
X = torch.randn(60, 5, generator=generator(2))
Y = MODEL(X).logits.argmax(1)
BOTH: dict[str, Any] = {"nll": pgd(BALL, 10), "margin": pgd(BALL, 10, margin)}


def check(id: str, predict: Any = MODEL, **options: Any) -> Finding:
    chosen: dict[str, Any] = {
        "ball": BALL,
        "tier": SMALL,
        "progress": False,
        "threat_model": ThreatModel(units="raw"),
    }
    data = options.pop("data", (X, Y))
    support = Support(
        **{
            field.name: options.pop(field.name)
            for field in fields(Support)
            if field.name in options
        }
    )
    return audit(predict, data, only=(id,), support=support, **(chosen | options))[id]


def claimed(arrays: dict[str, Tensor], **fields: Any) -> Claim:
    return Claim(arrays, **fields)


# --- the table and the levels -------------------------------------------------------------------


def test_every_rule_has_its_check() -> None:
    assert sorted((check.id for check in CHECKS), key=lambda id: int(id[1:])) == IDS


def test_levels_follow_the_rules() -> None:
    def level(*statuses: str, certified: bool = False, mandatory: bool = True) -> str:
        found = tuple(
            Finding(f"E{i}", "", status, mandatory=mandatory) for i, status in enumerate(statuses)
        )  # type: ignore[arg-type]
        return Verdict(found, certified=certified).level

    assert level("passed", "not applicable") == "B"
    assert level("passed", "failed") == "C"
    assert level("passed", "failed", "not run") == "D"
    assert level("not run", "passed") == "D"  # not run never counts as passed
    assert level("not run", "failed", mandatory=False) == "B"
    assert level("failed", "passed", "passed", certified=True) == "A"


def test_a_verdict_is_text_and_json_and_goes_under_a_table() -> None:
    unsaid = ThreatModel(units="standardised")
    verdict = audit(
        MODEL,
        (X, Y),
        ball=BALL,
        tier=SMALL,
        progress=False,
        threat_model=unsaid,
        only=("E0", "E1", "E13"),
    )
    assert verdict.level == "D"
    assert {"E2", "E13"} <= set(verdict.not_run)
    assert not {"E0", "E1"} & set(verdict.not_run)
    assert verdict.failed == ("E0",)
    assert "say scale" in verdict["E0"].advice
    assert json.loads(json.dumps(verdict.json()))["level"] == "D"
    assert verdict.text().splitlines()[-1] == verdict.line()
    absent = len(verdict.not_run)
    sentence = (
        f"The attacked numbers must not be quoted as they are: one check failed, and "
        f"{absent} checks did not run"
    )
    assert verdict.line().startswith(
        f"audit (custom): level D. {sentence}; failed E0 †; not run E2, E3"
    )
    table = evaluate(MODEL, (X, Y), attacks={"PGD": pgd(BALL, 5)}).table(verdict=verdict)
    assert table.text().splitlines()[-1] == verdict.line()
    marked = [
        line for line in table.markdown().splitlines() if "†" in line and line.startswith("|")
    ]
    assert len(marked) == 2  # PGD and worst, not clean and not the trivial ones
    optional = replace(
        verdict, findings=tuple(replace(f, mandatory=False) for f in verdict.findings)
    )
    table = evaluate(MODEL, (X, Y), attacks={"PGD": pgd(BALL, 5)}).table(verdict=optional)
    assert optional.failed == ("E0",)
    assert "†" not in table.markdown()
    with pytest.raises(KeyError, match="no check 'E99'"):
        verdict["E99"]


def test_the_quick_tier_leaves_checks_out_and_says_so() -> None:
    verdict = audit(MODEL, (X, Y), ball=BALL, tier="quick", progress=False)
    assert {"E6", "E7", "E11"} <= set(verdict.not_run)
    assert verdict.level == "D"


def test_costs_grow_with_the_tier() -> None:
    quick, standard, full = (
        audit_cost(MODEL, (X, Y), ball=BALL, tier=tier) for tier in ("quick", "standard", "full")
    )
    assert quick.passes < standard.passes < full.passes
    assert quick.by_check["E11"] == 0
    assert standard.by_check["E11"] == 5000
    assert "passes for each" in str(standard)
    assert standard.seconds > 0


# --- rule by rule -------------------------------------------------------------------------------


def test_e0_names_what_is_missing_and_what_contradicts() -> None:
    assert check("E0").status == "passed"
    assert check("E0", threat_model=ThreatModel()).figures["units"] == "raw"
    standardised = check("E0", threat_model=ThreatModel(units="standardised"))
    assert "scale (of the standardised units)" in standardised.advice
    assert check("E0", threat_model=ThreatModel(units="standardised", scale=0.3)).status == "passed"
    assert (
        "eps is said to be 2" in check("E0", threat_model=ThreatModel(units="raw", eps=2.0)).advice
    )
    assert (
        "norm is said to be Linf"
        in check("E0", threat_model=ThreatModel(units="raw", norm="Linf")).advice
    )
    with pytest.raises(ValueError, match="units must be one of"):
        ThreatModel(units="pixels")


def test_e1_uses_the_exact_tolerance() -> None:
    direction = nn.functional.normalize(torch.randn(60, 5, generator=generator(4)), dim=1)
    for factor, wanted in ((1 + 5e-6, "passed"), (1 + 3e-5, "failed")):
        arrays = {"a": (X.double() + 0.5 * factor * direction.double())}
        model = Linear(MODEL.weight.double())
        assert (
            check("E1", model, data=(X.double(), Y), claim=claimed(arrays), attacks={}).status
            == wanted
        )
    broken = X.clone()
    broken[3] = math.nan
    assert check("E1", claim=claimed({"a": broken}), attacks={}).figures["infeasible"] == 1


@dataclass(frozen=True)
class Restless:
    """Adds a rounding error even when it may not move."""

    ball: Any

    def __call__(
        self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        return x * (1 + 1e-6)


def test_e2_wants_every_bit() -> None:
    assert check("E2").status == "passed"
    assert check("E2", attacks={"a": Restless(BALL)}).status == "failed"


@dataclass(frozen=True)
class Backwards:
    """An iterative attack that descends."""

    ball: Any
    steps: int = 5

    def __call__(
        self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        return 2 * x - pgd(self.ball, self.steps)(predict, x, y)


def test_e3_an_iterative_attack_weaker_than_one_step_fails() -> None:
    assert check("E3").status == "passed"
    found = check("E3", attacks={"a": Backwards(L2(1.0))}, ball=L2(1.0))
    assert found.status == "failed"
    assert float(found.figures["p"]) < 0.01  # type: ignore[arg-type]
    assert check("E3", attacks={"a": one_step(BALL)}).status == "not run"


def test_e3_in_regression_is_a_paired_bootstrap() -> None:
    def predict(x: Tensor) -> Distribution:
        return Normal(x[:, 0], 0.5)

    data = X, X[:, 0] + 0.1 * torch.randn(60, generator=generator(3))
    assert check("E3", predict, data=data).status == "passed"
    assert check("E3", predict, data=data, attacks={"a": Backwards(BALL)}).status == "failed"


def test_e4_and_e5_want_the_whole_box_to_win() -> None:
    assert check("E4").status == "passed"
    assert check("E5").figures["accuracy"] == 0.0

    @dataclass(frozen=True)
    class Timid:
        """Moves less the more it may."""

        ball: Any

        def __call__(
            self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
        ) -> Tensor:
            step = min(self.ball.eps, 1.0 / max(self.ball.eps, 1e-9))
            return pgd(L2(step), 10)(predict, x, y)

    timid = check("E4", attacks={"a": Timid(L2(1.0))}, ball=L2(1.0))
    assert timid.status == "failed"
    assert "accuracy rises" in timid.advice


def test_e6_escalates_what_it_may_and_fails_what_was_claimed() -> None:
    ball = L2(0.5, box=(-3, 3))
    planted, points = Planted(ball), 0.01 * torch.randn(60, 20, generator=generator(5))
    data = points, torch.zeros(60, dtype=torch.long)
    lazy = pgd(ball, 2)
    options: dict[str, Any] = {"data": data, "attacks": {"a": lazy}, "ball": ball}
    escalated = check("E6", planted, **options)
    assert escalated.status == "passed"
    assert int(escalated.figures["steps"]) > 2  # type: ignore[arg-type]
    claim = claimed({"a": lazy(planted, *data)})
    assert check("E6", planted, claim=claim, **options).status == "failed"


def test_e7_counts_what_more_restarts_break() -> None:
    assert check("E7").status == "passed"
    lottery = Linear(MODEL.weight)
    found = check("E7", lottery, attacks={"a": RandomStart(L2(1.5))}, ball=L2(1.5))
    assert found.status == "failed"


@dataclass(frozen=True)
class RandomStart:
    """Draws one point for each restart."""

    ball: Any
    restarts: int = 1

    def __call__(
        self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        return RandomSearch(self.ball, self.restarts)(predict, x, y, generator=generator)


def test_e9_counts_flat_and_infinite_gradients() -> None:
    assert check("E9").status == "passed"
    assert check("E9", lambda x: MODEL(x.detach()), attacks=BOTH).figures["unusable"] == 1.0
    steep = check("E9", lambda x: MODEL(x + (x - x.detach()).abs().sqrt()))
    assert steep.figures["unusable"] == 1.0
    assert steep.advice.startswith("gradients are masked")  # there is something to touch


def test_e11_and_e12_fail_an_attack_that_noise_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "QUERIES", SMALL.queries)
    lame = {"a": pgd(BALL, 1)}
    masked = lambda x: MODEL(X[: len(x)] * 0 + x.detach() + 0 * x)  # noqa: E731
    assert check("E12").status == "passed"
    data = X / 3, Y  # nearer to the boundary, where noise suffices
    assert check("E12", masked, data=data, attacks=lame).status == "failed"
    square = check("E11", masked, data=data, attacks=lame)
    assert square.status == "failed"
    assert float(square.figures["beyond"]) > 0.002  # type: ignore[arg-type]
    assert check("E11").status == "passed"


def test_e13_lets_transfer_join_the_worst_case() -> None:
    assert check("E13").status == "not run"
    assert check("E13", siblings={"other": Linear(1.1 * MODEL.weight)}).status == "passed"
    masked = lambda x: MODEL(x.detach() + 0 * x)  # noqa: E731
    assert check("E13", masked, siblings={"open": MODEL}).status == "failed"


def test_e13_wants_another_model_than_the_audited_one() -> None:
    for same in (MODEL, Linear(MODEL.weight + 0.1), Linear(MODEL.weight * (1 + 1e-6))):
        found = check("E13", siblings={"twin": same})
        assert found.status == "not run"
        assert "twin answers as the audited model itself does" in found.advice
    other = Linear(MODEL.weight + 0.3 * MODEL.weight.flip(1))
    assert check("E13", siblings={"twin": MODEL, "other": other}).status == "passed"
    found = check("E13", siblings={"dull": Linear(-MODEL.weight)})  # wrong everywhere
    assert found.status == "not run"
    assert "dull is no better than a constant" in found.advice


def bayesian(scale: float = 0.3) -> tuple[BayesianModel, MeanField]:
    torch.manual_seed(0)
    model = BayesianModel(nn.Linear(5, 3), Categorical())
    posterior = MeanField(model, init_scale=scale)
    with torch.no_grad():
        posterior.mean.copy_(torch.cat([2 * MODEL.weight.flatten(), torch.zeros(3)]))
    return model, posterior


@pytest.mark.parametrize("same", [True, False])
def test_e10_of_a_point_estimate_is_asked_only_whether_it_is_that_point(same: bool) -> None:
    model, posterior = bayesian()
    point = PointMass(model)
    with torch.no_grad():
        point.mean.copy_(posterior.mean)
    known = PosteriorPredictive(model, point.sample(1) if same else 1.1 * point.sample(1))
    found = check("E10", known, fresh=FreshPredictive(model, point, 20))
    assert found.status == "passed"
    assert found.figures["thetas"] == (1 if same else 20)


@pytest.mark.parametrize("id", ["E10", "E14"])
def test_fresh_thetas_have_learnt_something(id: str) -> None:
    model, posterior = bayesian()
    known = PosteriorPredictive(model, posterior.sample(20, generator=generator(1)))
    nothing = MeanField(model)
    with torch.no_grad():  # one that was never trained may beat the most frequent class by luck
        nothing.mean.copy_(-posterior.mean)
    found = check(id, known, fresh=FreshPredictive(model, nothing, 20, generator(2)))
    assert found.status == "not run"
    assert "have learnt nothing" in found.advice
    assert "have learnt nothing" not in check(id, known).advice


def test_e14_and_e15_need_both_kinds_of_knowledge() -> None:
    model, posterior = bayesian()
    known = PosteriorPredictive(model, posterior.sample(20, generator=generator(1)))
    fresh = FreshPredictive(model, posterior, 20, generator(2))
    assert (
        check("E14", known).status
        == check("E15", known).status
        == check("E10", known).status
        == "not run"
    )
    options: dict[str, Any] = {"ball": BALL, "tier": SMALL, "progress": False}
    verdict = audit(
        known, (X, Y), only=("E10", "E14", "E15"), support=Support(fresh=fresh), **options
    )
    assert all(verdict[id].status == "passed" for id in ("E10", "E14", "E15"))
    assert verdict.level == "D", "checks left out never count as passed"
    assert verdict["E15"].figures.keys() == {"thetas known", "thetas fresh"}
    assert check("E14").status == check("E15").status == "not applicable"
    one_level = claimed({"a": X}, knowledge=("thetas fresh",))
    assert "thetas known" in check("E15", known, claim=one_level, attacks={}).advice


def test_thetas_are_found_inside_of_wrappers() -> None:
    model, posterior = bayesian()
    smoothed = Smoothed(
        PosteriorPredictive(model, posterior.sample(3, generator=generator(1))), sigma=0.1, num=4
    )
    # there is a theta to know, and nobody was given who does not
    assert check("E15", smoothed).status == "not run"


def test_e16_wants_a_margin_beside_the_likelihood() -> None:
    assert check("E16").status == "passed"
    assert check("E16", attacks={"a": pgd(BALL, 5)}).status == "failed"


def test_e17_wants_the_minimum_of_the_columns() -> None:
    arrays = {"a": X, "b": X}
    correct = {"a": torch.arange(60) < 30, "b": torch.arange(60) < 40}
    for worst, wanted in (
        (None, "failed"),
        (torch.arange(60) < 35, "failed"),
        (torch.arange(60) < 30, "passed"),
    ):
        claim = claimed(arrays, correct=correct, worst=worst)
        assert check("E17", claim=claim, attacks={}).status == wanted


def test_e18_counts_the_scorings_of_a_stochastic_predictor() -> None:
    model, posterior = bayesian()
    fresh = FreshPredictive(model, posterior, 3, generator(2))
    assert check("E18", fresh).figures["scorings"] == 10
    assert check("E18", fresh, claim=claimed({"a": X}, rescored=9), attacks={}).status == "failed"
    assert check("E18").status == "not applicable"


@pytest.mark.parametrize("ball", [L2(0.7), Linf(0.2)], ids=str)
def test_e19_the_default_attacks_are_exact_where_the_answer_is_known(ball: Any) -> None:
    found = check("E19", ball=ball)
    assert found.status == "passed", found.line()
    assert check("E19", ball=ball, attacks={"a": RandomSearch(ball, 20)}).status == "failed"
    weak = check("E19", ball=ball, attacks={"a": one_step(ball)})
    assert weak.status == "failed"
    assert float(weak.figures["planted_found"]) < 0.95  # type: ignore[arg-type]


def test_e20_and_e21_are_controls() -> None:
    assert check("E20").status == "not run"
    # eps 0.5 leaves it more than 5 %
    assert check("E20", undefended=MODEL, control_ball=L2(0.5)).status == "failed"
    assert check("E20", undefended=MODEL, control_ball=L2(2.0)).status == "passed"
    assert check("E21").status == "not run"
    published: dict[str, Any] = {"dataset": "MNIST", "ball": L2(2.0)}
    recorded = check("E21", **published)  # the package's own record
    assert (recorded.status, recorded.figures["published_worst"]) == ("passed", 0.692)
    assert str(recorded.figures["source"]).startswith("recorded at ")
    assert check("E21", baseline=MODEL, **published).status == "failed"
    assert check("E21", published=(1.0, 0.3)).status == "not run"  # nothing recorded, none given
    assert check("E21", baseline=MODEL, published=(1.0, 0.3)).status == "passed"


def test_e22_saying_nothing_is_better_than_saying_wrong() -> None:
    assert check("E22").status == "passed"
    wrong = check("E22", Linear(-9 * MODEL.weight))
    assert "NLL above ln C = 1.099" in wrong.advice
    assert "majority" in wrong.advice
    # under attack it is worse
    assert check("E22", Linear(40 * MODEL.weight), better=True, ball=L2(1.5)).status == "failed"

    y = X[:, 0] + 0.1 * torch.randn(60, generator=generator(3))

    def regression(mean: float, scale: float, error: float = 0.0) -> Any:
        return lambda x: Shifted(x[:, 0] + mean, scale, error)

    assert check("E22", regression(0.0, 0.1), data=(X, y)).status == "passed"
    assert "above sd(y)" in check("E22", regression(5.0, 5.0), data=(X, y)).advice
    assert "Gaussian floor" in check("E22", regression(0.0, 0.1, error=2.0), data=(X, y)).advice


class Shifted(Normal):
    """A Gaussian whose density is in other units than its mean."""

    def __init__(self, mean: Tensor, scale: float, gain: float) -> None:
        super().__init__(mean, scale, validate_args=False)
        self.gain = gain

    def log_prob(self, value: Tensor) -> Tensor:
        density: Tensor = super().log_prob(value)
        return density + self.gain


def test_e23_and_e24_are_for_purifiers() -> None:
    assert check("E23").status == check("E24").status == "not applicable"
    model, posterior = bayesian()
    thetas = posterior.sample(2, generator=generator(1))
    purified = Purifier(model, Noise(1.0), thetas, torch.randn(100, 5, generator=generator(6)))
    data = X, purified(X).logits.argmax(1)  # type: ignore[attr-defined]
    honest = check("E23", purified, data=data, attacks=BOTH)
    assert honest.status == "passed", honest.line()
    assert {"exact", "straight_through", "transfer", "nearest_centre"} <= honest.figures.keys()
    assert check("E24", purified, data=data, attacks=BOTH).status == "passed"
    narrow = Purifier(model, Noise(0.01), thetas, torch.randn(100, 5, generator=generator(6)))
    few = check("E24", narrow, data=data, attacks=BOTH)
    assert few.status == "failed"
    assert float(few.figures["few"]) > 0.9  # type: ignore[arg-type]


def test_e25_wants_seeds_and_significance() -> None:
    assert check("E25").status == "not run"
    assert check("E25", num_seeds=4).status == "failed"
    assert check("E25", num_seeds=5).status == "passed"
    report = evaluate(
        {"a": MODEL, "b": Linear(1.01 * MODEL.weight)}, (X, Y), attacks={"PGD": pgd(BALL, 5)}
    )
    assert "bold" in check("E25", num_seeds=5, better=True, evaluation=report).advice
    report = evaluate(
        {"a": MODEL, "b": Linear(-MODEL.weight)}, (X, Y), attacks={"PGD": pgd(BALL, 5)}
    )
    assert check("E25", num_seeds=5, better=True, evaluation=report).status == "passed"


def test_e26_wants_an_attack_on_the_detectors_score() -> None:
    assert check("E26").status == "not applicable"
    assert check("E26", detector="entropy").status == "failed"
    assert (
        check("E26", detector="entropy", attacks={**BOTH, "entropy": entropy_pgd(BALL, 5)}).status
        == "passed"
    )


def test_e27_scores_the_files_again(tmp_path: Path) -> None:
    evaluate(MODEL, (X, Y), attacks={"PGD": pgd(BALL, 5)}, out=tmp_path / "run")
    assert check("E27", evaluation=tmp_path / "run").status == "passed"
    assert check("E27", Linear(2 * MODEL.weight), evaluation=tmp_path / "run").status == "failed"
    assert check("E27").status == "not run"
    config = tmp_path / "run" / "config.json"
    held: Any = read_document(config)
    del held["code"]
    write_document(config, held)
    assert check("E27", evaluation=tmp_path / "run").figures["missing"] == "code"


def test_e30_wants_a_family_that_training_has_not_seen() -> None:
    assert check("E30").status == "not run"
    channel = Mixture([0.5, 0.5], [Noise(0.1), AttackChannel(pgd(L2(1.0), 3, nll), 0.1)])
    assert check("E30", channel=channel, attacks={"a": pgd(BALL, 50)}).status == "failed"
    for other in (pgd(BALL, 50, margin), APGD(BALL, nll, 20), one_step(BALL)):
        assert check("E30", channel=channel, attacks={"a": other}).status == "passed"
    assert check("E30", channel=Noise(0.0)).status == "passed"


# --- records by others, and bad input -----------------------------------------------------------


def test_records_by_others_are_judged_from_their_arrays() -> None:
    x_adv = pgd(BALL, 10)(MODEL, X, Y)
    correct = MODEL(x_adv).logits.argmax(1) == Y
    options: dict[str, Any] = {"predict": MODEL, "ball": BALL, "tier": SMALL, "progress": False}
    verdict = audit_records(
        (X, Y), {"PGD": x_adv}, correct={"PGD": correct}, worst=correct, **options
    )
    assert verdict["E1"].status == verdict["E17"].status == verdict["E12"].status == "passed"
    assert verdict["E6"].status == "not run"  # nothing is known of the attack
    boast = audit_records(
        (X, Y), {"PGD": x_adv}, correct={"PGD": torch.ones(60, dtype=torch.bool)}, **options
    )
    assert {"E17", "E27"} <= set(boast.failed)


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match="ball must be a ball"):
        audit(MODEL, (X, Y), ball=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tier must be one of"):
        audit(MODEL, (X, Y), ball=BALL, tier="slow")
    with pytest.raises(ValueError, match="attacks must hold at least one named attack"):
        audit(MODEL, (X, Y), ball=BALL, attacks={})
    with pytest.raises(TypeError, match="must be a dataclass with a `ball`"):
        audit(MODEL, (X, Y), ball=BALL, attacks={"a": lambda *_, **__: X})
    with pytest.raises(ValueError, match="only must hold ids"):
        audit(MODEL, (X, Y), ball=BALL, only=("E99",))
    with pytest.raises(ValueError, match="these are probabilities"):
        Claim({"a": X}, log_prob={"a": torch.full((60,), 0.7)})
    with pytest.raises(ValueError, match="x_adv must hold the scored array"):
        Claim({})
    with pytest.raises(ValueError, match="must have x's shape"):
        audit(MODEL, (X, Y), ball=BALL, claim=Claim({"a": X[:3]}), attacks={})
    with pytest.raises(ValueError, match="box must contain the data"):
        audit(MODEL, (X, Y), ball=L2(0.5, box=(0, 1)))

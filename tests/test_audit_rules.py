"""Every threshold of the audit from both sides, and its printed text read back against the
numbers."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as Classes
from torch.distributions import Distribution, Normal

import advbayes
from advbayes import (
    L2,
    BayesianModel,
    Gaussian,
    Linf,
    MeanField,
    Noise,
    PosteriorPredictive,
    Square,
    fit,
    margin,
    one_step,
    pgd,
)
from advbayes.attacks import APGD, RandomSearch
from advbayes.attacks.zeroth_order import ZerothOrder, gives_gradient
from advbayes.auditing import (
    Baseline,
    Budget,
    Claim,
    Finding,
    Support,
    ThreatModel,
    Verdict,
    audit,
    audit_cost,
    controls,
    describing,
    others,
    remembering,
    strength,
)
from advbayes.auditing.case import Case
from advbayes.auditing.claim import said_by
from advbayes.auditing.copies import copied, copies_of
from advbayes.auditing.run import CHECKS, _case
from advbayes.evaluation import evaluate
from advbayes.evaluation.files import data_hash
from advbayes.likelihoods import HeteroscedasticGaussian
from advbayes.seeds import GlobalStream
from tests import zoo

BALL = L2(0.5)
SMALL = Budget(
    num=60, steps=5, restarts=1, random_points=5, queries=20, max_steps=20, max_thetas=40
)
WEIGHT = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
X = torch.randn(60, 5, generator=torch.Generator().manual_seed(2))


def predict(x: Tensor) -> Classes:
    return Classes(logits=x @ WEIGHT.T)


Y = predict(X).logits.argmax(1)


def looked_at(*ids: str, model: Any = predict, data: Any = (X, Y), **options: Any) -> Verdict:
    support = Support(
        **{
            field.name: options.pop(field.name)
            for field in fields(Support)
            if field.name in options
        }
    )
    chosen: dict[str, Any] = {
        "ball": BALL,
        "tier": SMALL,
        "progress": False,
        "threat_model": ThreatModel(units="raw"),
    }
    return audit(model, data, only=ids, support=support, **(chosen | options))


def case(**options: Any) -> Case:
    found = _case(predict, (X, Y), BALL, SMALL, Support(), None, claim=options.pop("claim", None))
    return replace(found, **options)


def columns(num: int, wrong: int) -> dict[str, Tensor]:
    """The scores of `num` examples of which the first `wrong` are wrong."""
    correct = (torch.arange(num) >= wrong).double()
    return {"correct": correct, "log_prob": correct - 1.5, "loss": 1.5 - correct}


# --- E28, E29 -----------------------------------------------------------------------------------


def mcnemar(only_first: int) -> float:
    return 0.5**only_first  # all discordant pairs on one side


@pytest.mark.parametrize(("lost", "wanted"), [(14, False), (15, True)])
def test_e28_takes_eight_points_off_before_mcnemar(lost: int, wanted: bool) -> None:
    """100 examples: 8 are taken off, 7 discordant pairs of 7 have p = 1/128 < 1 %, 6 of 6 have
    1/64."""
    bad, figures = remembering.loses_more(columns(100, lost), columns(100, 0), case())
    assert figures["p"] == mcnemar(lost - 8)
    assert bad is wanted


def test_e28_counts_those_that_stand_again() -> None:
    here = columns(100, 30)
    there = {"correct": here["correct"].flip(0)}  # 30 lost and 30 won
    assert not remembering.loses_more(there, here, case())[0]


def gaussian(squared_error: Tensor, variance: float) -> dict[str, Tensor]:
    """The scores of Gaussian predictions of one variance."""
    log_prob = -0.5 * (squared_error / variance + math.log(2 * math.pi * variance))
    return {"squared_error": squared_error, "log_prob": log_prob}


@pytest.mark.parametrize(("factor", "wanted"), [(1.49, False), (1.51, True)])
def test_e28_in_regression_allows_half_of_the_squared_error(factor: float, wanted: bool) -> None:
    error = torch.linspace(0.9, 1.1, 50).double()
    here, there = gaussian(error, 100.0), gaussian(factor * error, 100.0)
    assert remembering.loses_more(there, here, replace(case(), task="regression"))[0] is wanted


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize(("variance", "allowed"), [(1.0, 0.1), (0.25, 0.1 + 0.5 * (1.5 - 0.6931))])
@pytest.mark.parametrize("outputs", [1, 2])
def test_e28_in_regression_allows_a_tenth_of_a_nat_and_half_of_the_misfit(
    variance: float, allowed: float, unit: float, outputs: int
) -> None:
    """Squared errors of 1 under a variance of 1/4 have an NLL (4 - 1 - ln 4) / 2 above that of a
    variance of 1; outputs alike have twice as much."""
    regression = replace(case(), task="regression", y=torch.zeros(50, outputs))
    here = gaussian(torch.full((50,), unit**2).double(), variance * unit**2)
    here["log_prob"] *= outputs
    for share, wanted in ((0.99, False), (1.01, True)):
        there = here | {"log_prob": here["log_prob"] - share * allowed * outputs}
        bad, figures = remembering.loses_more(there, here, regression)
        assert bad is wanted, figures
        assert figures["beyond_allowed"] < 0


@pytest.mark.parametrize("heteroscedastic", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_e28_spares_honest_variances(heteroscedastic: bool, seed: int) -> None:
    likelihood = HeteroscedasticGaussian() if heteroscedastic else Gaussian(0.3)
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(seed))
    noise = torch.randn(400, generator=torch.Generator().manual_seed(100 + seed))
    y = x[:, 0].sin() + 0.5 * x[:, 1] * x[:, 2] + 0.3 * x[:, 0].sigmoid() * noise
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1 + heteroscedastic))
    model = BayesianModel(net, likelihood)
    posterior, data = MeanField(model), (x[:250], y[:250])
    fit(model, posterior, Noise(0.0), data, epochs=30, lr=1e-2, batch_size=50, progress=False)
    predict = PosteriorPredictive(
        model, posterior.sample(10, generator=torch.Generator().manual_seed(2))
    )
    for eps in (0.3, 0.8):
        data, tier = (x[250:], y[250:]), replace(SMALL, num=150)
        found = looked_at("E28", model=predict, data=data, ball=L2(eps), tier=tier)["E28"]
        assert found.status == "passed", found.line()


@pytest.mark.parametrize("dimensions", [1, 2, 5])
@pytest.mark.parametrize("eps", [0.1, 0.5, 1.0])
def test_e28_spares_honest_models_in_few_dimensions(dimensions: int, eps: float) -> None:
    """Where the moved centre matters most: the attack of radius eps reaches 1.5 eps from x."""
    x = torch.randn(80, dimensions, generator=torch.Generator().manual_seed(3))
    weight = torch.ones(dimensions)
    classes = lambda x: Classes(logits=4 * torch.stack([x @ weight, -(x @ weight)], 1))  # noqa: E731
    y = classes(x).logits.argmax(1)
    assert looked_at("E28", model=classes, data=(x, y), ball=L2(eps))["E28"].status == "passed"
    curve = lambda x: Normal((x @ weight).sin() + 0.3 * (x @ weight), 0.3)  # noqa: E731
    target = curve(x).mean + 0.2 * torch.randn(80, generator=torch.Generator().manual_seed(4))
    assert looked_at("E28", model=curve, data=(x, target), ball=L2(eps))["E28"].status == "passed"


@pytest.mark.parametrize(("shift", "wanted"), [(0.9e-4, 0), (1.1e-4, 2)])
def test_e29_calls_answers_other_beyond_rounding(shift: float, wanted: int) -> None:
    probabilities = torch.tensor([[0.6, 0.4], [0.3, 0.7]])
    first = lambda x: Classes(probs=probabilities)  # noqa: E731
    second = lambda x: Classes(probs=probabilities + torch.tensor([shift, -shift]))  # noqa: E731
    assert int(remembering.changed(first, second, X[:2], case()).sum()) == wanted


class Counting:
    """Answers otherwise once it was asked `after` times."""

    def __init__(self, after: int) -> None:
        self.after, self.asked = after, 0

    def __call__(self, x: Tensor) -> Distribution:
        self.asked += 1
        return predict(x if self.asked < self.after else x + 0.1)


def test_e29_clean_answers_are_repeated_at_the_end() -> None:
    assert looked_at("E29", model=Counting(10**9))["E29"].status == "passed"
    late = looked_at("E29", model=Counting(8))["E29"]
    assert late.status == "failed"
    assert int(late.figures["clean"]) > 0  # type: ignore[call-overload]


def in_batches(x: Tensor) -> Distribution:
    """Answers otherwise in a batch of fewer than forty."""
    return predict(x if len(x) >= 40 else x + 0.1)


def by_place(x: Tensor) -> Distribution:
    return predict(x + 0.1 * torch.arange(len(x)).unsqueeze(1))


def alone(x: Tensor) -> Distribution:
    return predict(x if len(x) > 1 else x + 0.1)


@pytest.mark.parametrize(("model", "wanted"), [(in_batches, 30), (by_place, 31), (alone, 1)])
def test_e29_answers_do_not_depend_on_the_batch(model: Any, wanted: int) -> None:
    assert int(remembering.in_other_company(predict, X, case()).sum()) == 0
    assert int(remembering.in_other_company(model, X, case()).sum()) >= wanted
    found = looked_at("E29", model=model)["E29"]
    assert found.status == "failed", found.line()
    assert int(found.figures["in_other_company"]) >= wanted  # type: ignore[call-overload]


def test_e29_compares_means_and_deviations_in_units_of_y() -> None:
    found = case(task="regression", y=1000 * X[:, 0])
    wide = lambda x: Normal(1000 * x[:, 0], 5.0)  # noqa: E731
    for shift, count in ((0.05, 0), (0.5, 60)):
        mean = lambda x, by=shift: Normal(1000 * x[:, 0] + by, 5.0)  # noqa: E731
        deviation = lambda x, by=shift: Normal(1000 * x[:, 0], 5.0 + by)  # noqa: E731
        for other in (mean, deviation):
            assert int(remembering.changed(wide, other, X, found).sum()) == count


class Uncopyable:
    def __call__(self, x: Tensor) -> Distribution:
        return predict(x)

    def __deepcopy__(self, memo: object) -> None:
        raise TypeError("no copies of this")


def test_e29_without_a_copy_is_not_run_and_a_factory_is_the_way_out() -> None:
    found = looked_at("E29", model=Uncopyable())["E29"]
    assert found.status == "not run"
    assert "no copies of this" in found.advice
    assert "Support(factory=...)" in found.advice
    assert looked_at("E29", model=Uncopyable(), factory=Uncopyable)["E29"].status == "passed"


class Restless:
    """Draws from a source of its own that nobody can fix."""

    def __init__(self) -> None:
        self.source = [torch.Generator()]
        self.source[0].seed()

    def __call__(self, x: Tensor) -> Distribution:
        return Classes(logits=x @ WEIGHT.T + 0.3 * torch.randn(len(x), 3, generator=self.source[0]))

    def __deepcopy__(self, memo: object) -> Restless:
        return Restless()


def test_e29_compares_unfixable_randomness_on_average() -> None:
    """All nine arrays together are apart by chance in one of a thousand audits."""
    found = looked_at("E29", model=Restless())["E29"]
    assert found.status == "passed", found.line()
    assert "other_answers" in found.figures


def test_a_copied_function_shares_nothing_that_it_changes() -> None:
    seen: list[int] = []

    def inner() -> int:
        seen.append(1)
        return len(seen)

    outer = lambda: inner()  # noqa: E731
    twin = copied(outer)
    assert (outer(), outer(), twin(), twin()) == (1, 2, 1, 2)
    assert copies_of(predict, None).make is not None


COUNTED: list[int] = []


def count_in_a_global() -> int:
    return (lambda: COUNTED.append(1) or len(COUNTED))()  # type: ignore[func-returns-value]


class CountsInAGlobal:
    def __call__(self) -> int:
        return count_in_a_global()


class CountsInItsClass:
    count = 0

    def __call__(self) -> int:
        CountsInItsClass.count += 1
        return CountsInItsClass.count


class CountsInAList(CountsInItsClass):
    seen: list[int] = []  # noqa: RUF012

    def __call__(self) -> int:
        assert super().__call__() > 0
        self.seen.append(1)
        return len(self.seen)


class CountsInAClosure:
    def __init__(self) -> None:
        seen: list[int] = []
        self.count = lambda: seen.append(1) or len(seen)  # type: ignore[func-returns-value]

    def __call__(self) -> int:
        return self.count()


def count_in_an_attribute() -> int:
    count_in_an_attribute.asked += 1  # type: ignore[attr-defined]
    return count_in_an_attribute.asked  # type: ignore[attr-defined, no-any-return]


count_in_an_attribute.asked = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "make",
    [
        lambda: count_in_a_global,
        CountsInAGlobal,
        lambda: lambda: CountsInAGlobal()(),
        CountsInItsClass,
        CountsInAList,
        CountsInAClosure,
        lambda: [CountsInAClosure()][0].__call__,
        lambda: count_in_an_attribute,
    ],
)
def test_a_copy_has_a_memory_of_its_own_wherever_it_is_kept(make: Any) -> None:
    original = make()
    before = copied(original)
    first = original()
    twin, again = copied(original), copied(copied(original))
    sibling = copied(twin)
    assert (original(), original(), original()) == (first + 1, first + 2, first + 3)
    assert (before(), twin(), twin(), again()) == (first, first + 1, first + 2, first + 1)
    assert sibling() == first + 1
    assert type(twin) is type(original) or issubclass(type(twin), type(original))


class Only:
    """There is one of it, or its copies share what it holds."""

    def __init__(self, other: bool) -> None:
        self.other, self.seen = other, [0]

    def __deepcopy__(self, memo: Any) -> Only:
        if not self.other:
            return self
        twin = Only(True)
        twin.__dict__ = self.__dict__
        return twin

    def __call__(self, x: Tensor) -> Classes:
        return predict(x)


@pytest.mark.parametrize("other", [False, True])
def test_what_cannot_be_copied_is_no_copy(other: bool) -> None:
    """A copy with the memory of the original has been asked what the original was asked."""
    held = Only(other)
    for model in (held, lambda x: held(x)):
        found = looked_at("E29", model=model)["E29"]
        assert found.status == "not run"
        assert "a copy of a Only is not another one" in found.advice
    made = looked_at("E29", model=held, factory=lambda: Only(other))["E29"]
    assert made.status == "passed", made.line()


def test_a_copy_shares_what_belongs_to_libraries() -> None:
    linear = torch.nn.Linear(2, 2)
    twin = copied(linear)
    assert type(twin) is torch.nn.Linear
    assert twin.weight is not linear.weight
    assert copied(torch.nn.functional.softmax) is torch.nn.functional.softmax


# --- claims -------------------------------------------------------------------------------------


def claim(x_adv: Tensor | None = None, **changes: Any) -> Claim:
    x_adv = pgd(BALL, 5)(predict, X, Y) if x_adv is None else x_adv
    correct = predict(x_adv).logits.argmax(1) == Y
    held = {
        "correct": {"PGD": correct},
        "worst": correct,
        "seed": 0,
        "config": {"a": 1},
        "code": "0",
    }
    held |= {"test_size": len(X), "test_hash": data_hash(X, Y)}
    return Claim({"PGD": x_adv}, **(held | changes))


def test_e17_and_e27_print_what_is_claimed_beside_what_is_recomputed() -> None:
    honest = claim()
    verdict = looked_at("E17", "E27", claim=honest, attacks={})
    share = float(honest.correct["PGD"].double().mean())
    assert verdict["E27"].status == verdict["E17"].status == "passed", verdict.text()
    assert (
        verdict["E27"].figures["claimed PGD"]
        == verdict["E27"].figures["recomputed PGD"]
        == pytest.approx(share)
    )
    assert f"claimed_worst = {share:.4g}, recomputed_worst = {share:.4g}" in verdict["E17"].line()


def test_e17_compares_example_by_example() -> None:
    """The same mean with the errors elsewhere is not the union."""
    right = claim().worst
    assert right is not None
    first, other = int((~right).nonzero()[0]), int(right.nonzero()[0])
    swapped = right.clone()
    swapped[first], swapped[other] = True, False
    found = looked_at("E17", claim=claim(worst=swapped), attacks={})["E17"]
    assert found.status == "failed"
    assert found.figures["better_than_the_union"] == 1
    lower = right.clone()
    lower[other] = False
    assert looked_at("E17", claim=claim(worst=lower), attacks={})["E17"].status == "passed"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"test_size": None}, "size and hash of the whole test set"),
        ({"test_hash": None}, "size and hash of the whole test set"),
        ({"test_hash": "0"}, "its hash is another"),
        ({"test_size": 59}, "said to hold 59 examples, but 60 are scored"),
        ({"seed": None}, "save seed"),
        ({"code": None}, "save code hash"),
    ],
)
def test_e27_names_what_a_claim_lacks(changes: dict[str, Any], said: str) -> None:
    found = looked_at("E27", claim=claim(**changes), attacks={})["E27"]
    assert found.status == "failed"
    assert said in found.advice


def test_every_array_needs_its_scores() -> None:
    two = Claim(
        {"PGD": X, "other": X},
        **{f.name: getattr(claim(X), f.name) for f in fields(Claim) if f.name != "x_adv"},
    )
    found = looked_at("E27", claim=two, attacks={})["E27"]
    assert "the correctness of other" in found.advice


def test_data_are_named() -> None:
    """Duplicate rows, a clean accuracy of exactly 1, a selection: named, not failed."""
    assert "a clean accuracy of exactly 1" in looked_at("E1").notes[0]
    wrong = Y.clone()
    wrong[0] = (wrong[0] + 1) % 3
    assert looked_at("E1", data=(X, wrong)).notes == ()
    twice = torch.cat([X, X[:4]]), torch.cat([wrong, wrong[:4]])
    verdict = looked_at("E1", data=twice)
    assert verdict.notes == ("4 of 64 rows are duplicates",)
    assert verdict.line().endswith("; 4 of 64 rows are duplicates")
    selected = looked_at("E1", data=(X, wrong), claim=claim(test_size=61), attacks={})
    assert selected.notes == ("60 of the 61 examples of the test set: a selection",)


def test_an_array_only_claim_fails_nothing_for_want_of_attacks() -> None:
    """E2 to E8, E13, E16, E19, E28, E30: nothing was run, so nothing failed."""
    wrong = Y.clone()
    wrong[0] = (wrong[0] + 1) % 3
    support = Support(channel=Noise(0.0), undefended=predict)
    chosen: dict[str, Any] = {"ball": BALL, "tier": SMALL, "progress": False, "support": support}
    verdict = audit(predict, (X, Y), claim=claim(), attacks={}, **chosen)
    for id in ("E2", "E4", "E5", "E6", "E7", "E8", "E13", "E16", "E19", "E28", "E30"):
        assert verdict[id].status == "not run", verdict[id].line()
    assert verdict.failed == ("E0",), verdict.text()  # steps, step size and loss are nowhere said


# --- what helps is checked ----------------------------------------------------------------------


def flipping(num: int) -> Callable[[Tensor], Classes]:
    """`predict` with the answers turned around on the first `num` rows of X."""
    rows = {row.numpy().tobytes() for row in X[:num]}

    def wrong(x: Tensor) -> Classes:
        turn = torch.tensor([-1.0 if row.numpy().tobytes() in rows else 1.0 for row in x.detach()])
        return Classes(logits=turn.unsqueeze(1) * (x @ WEIGHT.T))

    return wrong


@pytest.mark.parametrize(
    ("num", "off", "wanted"),
    [
        (60, 0, "passed"),
        (60, 1, "passed"),  # 1.7 points
        (60, 2, "not run"),  # 3.3, but it may be less for all that 60 examples say
        (60, 7, "not run"),
        (60, 8, "failed"),  # 13.3
        (33, 0, "passed"),
        (33, 1, "not run"),
        (33, 6, "not run"),
        (33, 7, "failed"),
    ],
)
def test_e20_wants_a_control_within_three_points(num: int, off: int, wanted: str) -> None:
    options: Any = {"control_ball": L2(2.4), "attacks": {"a": pgd(BALL, 5)}}
    found = looked_at("E20", undefended=flipping(off), data=(X[:num], Y[:num]), **options)["E20"]
    assert found.status == wanted, found.line()
    assert ("within 3 points" in found.advice) is (wanted != "passed")
    if wanted != "not run":
        assert found.figures["clean"] == pytest.approx(1 - off / num)


@pytest.mark.parametrize("margin", [controls.NEAR, controls.AHEAD])
@pytest.mark.parametrize("rarely", [0.0, 0.01, 0.1])
def test_a_lead_of_just_the_margin_is_no_more_than_that(margin: float, rarely: float) -> None:
    """Where the first is alone right with probability `rarely + margin` and the second with
    `rarely`, one in a hundred is taken for more, or one in fifty: the test is of large samples."""
    num, row, found = 100, torch.arange(100), 0.0
    for ahead in range(num + 1):
        for behind in range(num - ahead + 1 if rarely else 1):
            rest = num - ahead - behind
            ways = math.comb(num, ahead) * math.comb(num - ahead, behind)
            chance = (rarely + margin) ** ahead * rarely**behind
            chance *= ways * (1 - margin - 2 * rarely) ** rest
            second = (row >= ahead) & (row < ahead + behind)
            if chance > 1e-9 and controls.is_ahead(row < ahead, second, margin):
                found += chance
    assert found <= 0.02


def test_a_lead_is_paired() -> None:
    """The same shares say less the more often the two disagree."""
    row = torch.arange(200)
    assert controls.is_ahead(row < 180, row < 156, 0.05)
    assert not controls.is_ahead(row < 180, row >= 44, 0.05)


@pytest.mark.parametrize(("left", "wanted"), [(3, "passed"), (4, "failed")])  # of 60: 5 and 6.7 %
def test_e20_leaves_the_control_five_percent(
    left: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Case, "union", lambda self, *_, **__: columns(60, 60 - left))
    found = looked_at("E20", undefended=predict, control_ball=BALL)["E20"]
    assert found.status == wanted
    assert found.figures["accuracy"] == pytest.approx(left / 60)


def test_e20_prints_the_control_ball_relative_to_the_data() -> None:
    found = looked_at("E20", undefended=predict, control_ball=L2(2.4))["E20"]
    distance = float((X - X.roll(1, 0)).norm(dim=1).median())
    assert found.figures["eps_of_distance"] == pytest.approx(2.4 / distance)
    assert f"eps_of_distance = {2.4 / distance:.4g}" in found.line()


def test_e20_widens_the_ball_by_itself_until_nearly_all_can_reach_another_answer() -> None:
    found = looked_at("E20", undefended=predict, data=(X / 2, Y))["E20"]
    half = 0.5 * float((X - X.roll(1, 0)).norm(dim=1).median()) / 2
    said = predict(X / 2).logits.argmax(-1)  # type: ignore[attr-defined]
    nearest = torch.cdist(X, X).masked_fill(Y.unsqueeze(1) == said, torch.inf).amin(1) / 2
    most = max(half, float(nearest.quantile(0.97)))
    assert BALL.eps < float(found.figures["eps"]) <= most + 1e-6  # type: ignore[arg-type]
    assert found.status == "passed"  # there are witnesses, and the attack finds them


def test_e20_says_where_a_control_that_stands_in_the_published_ball_falls() -> None:
    ball = L2(2.0)
    found = looked_at("E20", undefended=predict, data=(5 * X, Y), ball=ball, dataset="mnist")["E20"]
    assert found.status == "failed"
    assert found.figures["eps"] == 2
    assert float(found.figures["falls_at_eps"]) > 2  # type: ignore[arg-type]


def test_e20_wants_one_net() -> None:
    model, posterior = zoo.trained().model, zoo.trained().posterior
    data = zoo.digits()[2:]
    # three times the same net is one net
    single = advbayes.PosteriorPredictive(model, posterior.mean.expand(3, -1))
    options: dict[str, Any] = {
        "model": single,
        "data": data,
        "ball": zoo.BALL,
        "control_ball": zoo.CONTROL,
    }
    assert looked_at("E20", undefended=single, **options)["E20"].status == "passed"
    several = advbayes.PosteriorPredictive(model, posterior.sample(3))
    assert "averages over thetas" in looked_at("E20", undefended=several, **options)["E20"].advice
    other = advbayes.BayesianModel(torch.nn.Linear(64, 10), advbayes.Categorical())
    narrow = advbayes.PosteriorPredictive(
        other, torch.zeros(1, other.num_params) + 0.01 * torch.randn(other.num_params)
    )
    assert (
        "its architecture is another (650 parameters"
        in looked_at("E20", undefended=narrow, **options)["E20"].advice
    )


RECORD = Baseline("MNIST", "L2", 2.0, 0.99, 0.68, 1000, "four convolutions", "PGD", "0a1b2c3")


@pytest.mark.parametrize(
    ("clean", "worst", "wanted"),
    [
        (0.942, 0.642, "passed"),
        (0.941, 0.7, "failed"),
        (0.99, 0.641, "failed"),
        (1.0, 1.0, "passed"),
    ],
)
def test_e21_allows_five_points_below_the_published_figure(
    clean: float, worst: float, wanted: str
) -> None:
    record = replace(RECORD, clean=clean, worst=worst)
    found = looked_at("E21", baseline=record, dataset="mnist", ball=L2(2.0))["E21"]
    assert found.status == wanted, found.line()
    assert found.figures["published_worst"] == 0.692
    assert found.figures["examples"] == 1000
    assert "0a1b2c3" in str(found.figures["source"])


def test_e21_finds_the_packages_own_record_on_mnist() -> None:
    found = looked_at("E21", dataset="MNIST", ball=L2(2.0))["E21"]
    assert found.status == "passed", found.line()
    assert found.figures["published_worst"] == 0.692
    assert looked_at("E21", dataset="MNIST", ball=L2(1.0))["E21"].status == "not run"


def test_e21_takes_a_record_of_this_threat_model_alone(tmp_path: Path) -> None:
    assert (
        looked_at("E21", baseline=replace(RECORD, eps=1.0), dataset="mnist", ball=L2(2.0))[
            "E21"
        ].status
        == "failed"
    )
    assert looked_at("E21", baseline=RECORD, dataset="digits")["E21"].status == "not run"
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**RECORD.__dict__, "machine": "x"}))
    assert Baseline.load(path) == RECORD
    path.write_text(json.dumps({"dataset": "MNIST"}))
    with pytest.raises(ValueError, match="a baseline record must say norm, eps, clean"):
        Baseline.load(path)
    with pytest.raises(ValueError, match="commit must be said"):
        replace(RECORD, commit="")


@pytest.mark.parametrize(
    ("num", "more", "wanted"),
    [
        (512, 25, "failed"),  # 4.9 points
        (512, 26, "not run"),  # 5.1: more or less than five for all that 512 examples say
        (512, 37, "not run"),
        (512, 38, "passed"),
        # fewer examples: the advantage may be five points for all they say, or it may not
        (60, 0, "failed"),
        (60, 1, "not run"),
        (60, 8, "not run"),
        (60, 9, "passed"),
        (255, 6, "failed"),
        (180, 6, "not run"),
    ],
)
def test_e21_elsewhere_wants_a_baseline_that_beats_the_control(
    num: int, more: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is published: significantly (1 %) more than five points ahead of the undefended
    net under the same attack."""
    other = lambda x: predict(x)  # noqa: E731
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(0))
    data = x, predict(x).logits.argmax(1)

    def union(self: Case, *_: Any, by: Any = None, **__: Any) -> dict[str, Tensor]:
        return columns(num, 50 if by is not other else 50 - more)

    monkeypatch.setattr(Case, "union", union)
    options: Any = {"baseline": other, "data": data, "tier": replace(SMALL, num=num)}
    found = looked_at("E21", undefended=predict, **options)["E21"]
    assert found.status == wanted, found.line()
    assert ("too few to tell" in found.advice) is (wanted == "not run")
    assert looked_at("E21", **options)["E21"].status == "not run"


def test_e21_takes_no_constant_for_adversarial_training() -> None:
    """No attack touches a baseline that answers nothing."""
    share = float((Y.mode().values == Y).double().mean())
    constant = lambda x: Classes(logits=torch.eye(3)[Y.mode().values] + 1e-6 * predict(x).logits)  # noqa: E731
    assert float((constant(X).logits.argmax(1) == Y).double().mean()) == share
    found = looked_at("E21", undefended=predict, baseline=constant)["E21"]
    assert found.status == "not run"
    assert "no better on clean data than the most frequent class" in found.advice


def test_e21_sees_through_a_baseline_that_hides_its_gradients() -> None:
    """It stands against an attack by its own gradients, not against points made for the control."""
    hides = lambda x: Classes(logits=x.detach() @ WEIGHT.T + 0 * x[:, :3])  # noqa: E731
    x = torch.randn(256, 5, generator=torch.Generator().manual_seed(3))
    data = x, predict(x).logits.argmax(1)
    options: Any = {"data": data, "tier": replace(SMALL, num=256), "undefended": predict}
    found = looked_at("E21", baseline=hides, **options)["E21"]
    assert found.status == "failed", found.line()
    assert found.figures["baseline"] == found.figures["undefended"]


@pytest.mark.parametrize(("queries", "wanted"), [(4999, "not run"), (5000, "passed")])
def test_e11_reads_the_queries_off_the_attack(queries: int, wanted: str) -> None:
    broken = Y.roll(1), (Y + 1) % 3  # nothing stands, so that nothing is asked
    found = looked_at("E11", data=(X, broken[1]), black_box=Square(BALL, queries))["E11"]
    assert found.status == wanted
    assert str(queries) in found.line()


@dataclass(frozen=True)
class Idle:
    """A black box that says 5,000 queries and asks `asked`."""

    ball: Any
    asked: int
    queries: int = 5000

    def __call__(self, predict: Any, x: Tensor, y: Any = None, *, generator: Any = None) -> Tensor:
        for _ in range(self.asked):
            predict(x)
        return self.ball.project(x + 1.0, x) if self.asked == 1 else x


def test_e11_counts_the_questions_of_a_foreign_attack_and_keeps_it_in_the_ball() -> None:
    sure = lambda x: Classes(logits=50 * torch.eye(3)[Y[: len(x)]] + 0 * x[:, :3])  # noqa: E731
    idle = looked_at("E11", model=sure, black_box=Idle(BALL, 4999))["E11"]
    assert idle.status == "not run"
    assert "this one has 4999" in idle.advice
    asks = looked_at("E11", model=sure, black_box=Idle(BALL, 5000))["E11"]
    assert asks.status == "not run"
    assert "breaks 0.00 of what can be broken" in asks.advice
    # one that succeeds at once need not ask on, and its own ball is not the audited one
    edge = torch.tensor([[-1.0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    torn = lambda x: Classes(logits=x @ edge.T + torch.tensor([0.5, -0.5, -9]))  # noqa: E731
    points = torch.zeros(60, 5), torch.zeros(60, dtype=torch.long)
    weak = {"weak": pgd(BALL, 1, step_size=1e-6)}
    options: Any = {"model": torn, "data": points, "ball": L2(1.5), "attacks": weak}
    found = looked_at("E11", black_box=Idle(L2(0.01), 1), **options)["E11"]
    assert found.status == "failed", found.line()


@pytest.mark.parametrize(("num", "wanted"), [(499, "passed"), (501, "failed")])
def test_e11_allows_two_tenths_of_a_point(
    num: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One example in 501 is less than 0.2 %, one in 499 is more."""
    monkeypatch.setattr(others, "QUERIES", 1)
    num = 1000 - num  # 501 or 499 examples
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(0))
    found = _case(
        predict, (x, predict(x).logits.argmax(1)), BALL, replace(SMALL, num=num), Support(), None
    )
    found.memory |= {"clean": columns(num, 0), "columns": {"a": columns(num, 0)}}
    monkeypatch.setattr(Case, "attacked", lambda self, *_, **__: self.x)
    monkeypatch.setattr(Case, "scored", lambda self, *_, **__: columns(num, 1))
    assert others.black_box(found).status == wanted


def test_e27_wants_an_evaluation_of_these_data_in_this_ball(tmp_path: Path) -> None:
    def saved(name: str, attack: Any, rows: slice = slice(None)) -> Finding:
        evaluate(
            predict,
            (X[rows], Y[rows]),
            attacks={"PGD": attack},
            out=tmp_path / name,
            progress=False,
        )
        return looked_at("E27", evaluation=tmp_path / name)["E27"]

    assert saved("same", pgd(BALL, 5)).status == "passed"
    # some of the audited examples
    assert saved("part", pgd(BALL, 5), slice(20, 40)).status == "passed"
    assert "the evaluation has eps (0.25,), the ball 0.5" in saved("eps", pgd(L2(0.25), 5)).advice
    assert (
        "no attack of the evaluation stays in a ball of the norm L2"
        in saved("norm", pgd(Linf(0.5), 5)).advice
    )
    evaluate(
        predict, (X + 1, Y), attacks={"PGD": pgd(BALL, 5)}, out=tmp_path / "other", progress=False
    )
    other = looked_at("E27", evaluation=tmp_path / "other")["E27"]
    assert "60 of the evaluation's 60 inputs are not among the 60 audited ones" in other.advice


# --- black boxes --------------------------------------------------------------------------------


def blind(x: Tensor) -> Classes:
    # an array: a gradient is refused
    return Classes(logits=torch.tensor(x.numpy() @ WEIGHT.T.numpy()))


def test_black_box_mode_is_for_predictors_without_any_gradient() -> None:
    assert not gives_gradient(blind, X)
    # zero is a gradient, and E9's business
    assert gives_gradient(lambda x: Classes(logits=0 * x[:, :3]), X)
    verdict = looked_at("E9", "E16", "E1", "E6", model=blind)
    assert verdict["E9"].status == verdict["E16"].status == "not applicable"
    assert any("black-box mode" in note for note in verdict.notes)
    assert verdict["E6"].status == "passed", verdict["E6"].line()
    masked = looked_at(
        "E9", "E16", model=lambda x: predict(x.detach()), attacks={"a": pgd(BALL, 5)}
    )
    # an attack by gradients where there are none
    assert masked["E9"].status == masked["E16"].status == "failed"


def test_e6_doubles_queries_in_black_box_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    called = Square.__call__

    def watched(self: Square, *args: Any, **options: Any) -> Tensor:
        asked.append(self.queries)
        return called(self, *args, **options)

    monkeypatch.setattr(Square, "__call__", watched)
    looked_at(
        "E6", model=blind, attacks={"Square": Square(BALL, 7)}, tier=replace(SMALL, max_steps=10)
    )
    assert set(asked) == {7, 14}


@pytest.mark.parametrize("ball", [L2(0.7), Linf(0.2)], ids=str)
def test_estimated_gradients_are_exact_on_linear_models(ball: Any) -> None:
    attack, estimated = APGD(ball, margin, 10), ZerothOrder(APGD(ball, margin, 10))
    by_gradient, by_answers = (
        predict(each(predict, X, Y, generator=torch.Generator().manual_seed(0))).logits.argmax(1)
        == Y
        for each in (attack, estimated)
    )
    assert torch.equal(by_gradient, by_answers)
    normal = lambda x: Normal(x[:, 0] * 2, 0.5)  # noqa: E731
    regression = ZerothOrder(APGD(ball, advbayes.squared_error, 5))
    x_adv = regression(normal, X, torch.zeros(60), generator=torch.Generator().manual_seed(0))
    assert torch.allclose((x_adv - X)[:, 0].abs(), torch.tensor(ball.eps), atol=1e-3)


def test_more_features_than_directions_are_asked_along_random_ones() -> None:
    wide = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    model = lambda x: Classes(logits=torch.stack([x.sum(1), -x.sum(1)], 1) / 4)  # noqa: E731
    y = model(wide).logits.argmax(1)
    left = {
        name: float(
            (
                model(
                    attack(model, wide, y, generator=torch.Generator().manual_seed(1))
                ).logits.argmax(1)
                == y
            )
            .float()
            .mean()
        )
        for name, attack in {
            "blind": ZerothOrder(APGD(L2(1.0), margin, 20)),
            "noise": RandomSearch(L2(1.0), 20),
        }.items()
    }
    assert left["blind"] < left["noise"] - 0.2


# --- one screen ---------------------------------------------------------------------------------


def test_the_call_fits_on_one_screen() -> None:
    import inspect

    named = [
        p
        for p in inspect.signature(audit).parameters.values()
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    assert [p.name for p in named][:4] == ["predict", "data", "ball", "tier"]
    assert len(named) <= 12


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"undefended": predict}, "support=Support(undefended=...)"),
        ({"siblings": {"a": predict}}, "support=Support(siblings=...)"),
        ({"channel": Noise(0.0)}, "support=Support(channel=...)"),
        ({"budget": SMALL}, "tier=Budget(...)"),
        ({"batch_size": 7}, "tier=Budget(..., batch_size=...)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_the_keywords_of_the_version_before_still_work_and_name_the_new_ones(
    old: dict[str, Any], new: str
) -> None:
    (name,) = old
    with pytest.warns(
        DeprecationWarning,
        match=re.escape(f"audit({name}=...) will go in the next version: use {new}"),
    ):
        before = audit(
            predict,
            (X, Y),
            ball=BALL,
            tier="quick",
            only=("E1", "E13", "E30"),
            progress=False,
            **old,
        )
    tiers = {"budget": SMALL, "batch_size": replace(advbayes.auditing.TIERS["quick"], batch_size=7)}
    support = Support(**old) if name not in tiers else None
    after = audit(
        predict,
        (X, Y),
        ball=BALL,
        tier=tiers.get(name, "quick"),
        only=("E1", "E13", "E30"),
        progress=False,
        support=support,
    )
    assert before.json()["findings"] == after.json()["findings"]


def test_unknown_keywords_are_refused() -> None:
    with pytest.raises(
        TypeError, match="audit takes no argument undefendet; what helps it is Support"
    ):
        audit(predict, (X, Y), ball=BALL, undefendet=predict)
    with pytest.raises(TypeError, match="support must be a Support"):
        audit(predict, (X, Y), ball=BALL, support={"undefended": predict})  # type: ignore[arg-type]


def test_a_predictor_that_raises_costs_its_check_alone() -> None:
    def fragile(x: Tensor) -> Classes:
        if x.requires_grad and torch.is_grad_enabled() and len(x) > 2:
            raise RuntimeError("out of cheese")
        return predict(x)

    verdict = looked_at("E0", "E1", "E9", "E29", model=fragile, attacks={"a": pgd(BALL, 5)})
    assert verdict["E0"].status == "passed"
    assert verdict["E9"].status == "not run"
    assert "E9 was cut short by RuntimeError: out of cheese" in verdict["E9"].advice
    assert "E9 was cut short by RuntimeError: out of cheese" in verdict.text()


def test_a_purifiers_own_attack_can_be_audited() -> None:
    held = zoo.trained()
    purified = advbayes.Purifier(held.model, Noise(0.3), held.thetas(2), zoo.digits()[0][:100])
    data = tuple(part[:12] for part in zoo.digits()[2:])
    attacks = {"a": advbayes.Annealed(zoo.BALL)}
    chosen: dict[str, Any] = {
        "ball": zoo.BALL,
        "tier": replace(SMALL, num=12),
        "progress": False,
        "attacks": attacks,
    }
    verdict = audit(purified, data, **chosen)
    cut = [finding.line() for finding in verdict.findings if "cut short" in finding.advice]
    assert not cut, cut


# --- stochastic predictors ----------------------------------------------------------------------


class Coin:
    """Right with probability one half, whatever x is."""

    def __call__(self, x: Tensor) -> Distribution:
        sign = torch.randint(2, (len(x),)).float() * 2 - 1
        return Classes(logits=torch.stack([sign, -sign], 1) + 1e-3 * x[:, :2])


def test_the_worst_of_many_harmless_attacks_on_noise_is_noise() -> None:
    """Chosen and reported on the same draws, the least of eight coins would be far below one
    half."""
    x, y = (
        torch.randn(200, 5, generator=torch.Generator().manual_seed(0)),
        torch.zeros(200, dtype=torch.long),
    )
    attacks = {str(seed): RandomSearch(L2(0.05), 1 + seed) for seed in range(8)}
    found = _case(Coin(), (x, y), L2(0.05), replace(SMALL, num=200), Support(), attacks)
    assert found.stochastic
    union = strength.worst([found.clean, *found.columns().values()], "classification")
    assert abs(found.value(union) - 0.5) < 0.05
    assert found.value(found.worst()) > 0.4


# --- text ---------------------------------------------------------------------------------------


def test_levels_and_sentences_say_the_same_as_the_numbers() -> None:
    def verdict(*statuses: str, mandatory: bool = True, certified: bool = False) -> Verdict:
        held = tuple(
            Finding(f"E{i}", f"check {i}", status, mandatory=mandatory)
            for i, status in enumerate(statuses)
        )  # type: ignore[arg-type]
        return Verdict(
            held,
            certified=certified,
            summary={"certified accuracy": 0.4375, "certified at eps": 0.5} if certified else {},
        )

    assert (
        verdict("passed", "passed").sentence()
        == "Every check that must pass did: the attacked numbers may be quoted."
    )
    assert verdict("failed", "failed").sentence().endswith("2 checks failed.")
    assert (
        verdict("failed", "not run", "not run").sentence()
        == "The attacked numbers must not be quoted as they are: one check failed, and 2 checks "
        "did not run."
    )
    quiet = verdict("passed", "not run").sentence()
    assert quiet == "Nothing speaks against the attacked numbers so far, but one check did not run."
    assert "0.4375" in verdict("not run", certified=True).sentence()
    assert "†" not in verdict("not run", "passed").line()
    assert "†" not in verdict("failed", "passed", mandatory=False).line()
    assert "failed E0 †" in verdict("failed", "not run").line()


def test_every_figure_of_the_text_is_the_figure_of_the_json() -> None:
    verdict = looked_at("E0", "E1", "E3", "E12", "E20", undefended=predict)
    lines = {
        line.split()[0]: line for line in verdict.text().splitlines() if re.match(r"E\d+ ", line)
    }
    for found in verdict.json()["findings"]:
        for name, value in found["figures"].items():
            shown = re.search(
                rf"[ ,:]{re.escape(name)} = ([^,.]+(?:\.\d+)?(?:e-?\d+)?)", lines[found["id"]]
            )
            assert shown, (name, lines[found["id"]])
            if isinstance(value, float):
                assert float(shown[1]) == pytest.approx(value, rel=1e-3)
            else:
                assert shown[1] == str(value)
    head = verdict.text().splitlines()[0]
    for name, value in verdict.summary.items():
        assert float(head.split(f"{name} ")[1].split(",")[0]) == pytest.approx(
            float(value or 0), rel=1e-3
        )


def test_a_dagger_stands_where_a_check_failed_and_not_where_none_ran() -> None:
    report = evaluate(predict, (X, Y), attacks={"PGD": pgd(BALL, 5)}, progress=False)
    quiet = looked_at("E1")
    assert quiet.level == "D"
    assert "†" not in report.table(verdict=quiet).markdown()
    loud = looked_at("E0", threat_model=ThreatModel(units="standardised"))
    assert loud.failed == ("E0",)
    assert "†" in report.table(verdict=loud).markdown()


def test_the_cost_names_what_is_trained_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = SimpleNamespace(perf_counter=itertools.count().__next__)  # every pass takes as long
    monkeypatch.setattr("advbayes.auditing.run.time", ticks)
    held = zoo.trained()
    support = Support(training=zoo.digits()[:2])
    cost = audit_cost(
        held.predictive(2), zoo.digits()[2:], ball=zoo.BALL, tier="quick", support=support
    )
    assert cost.trained == ("undefended", "baseline")
    assert "trains undefended and baseline first" in str(cost)
    assert (
        cost.seconds
        > audit_cost(held.predictive(2), zoo.digits()[2:], ball=zoo.BALL, tier="quick").seconds
    )
    assert {check.id for check in CHECKS} == set(cost.by_check)


def test_thresholds_are_those_of_the_rules() -> None:
    """One place each, as the table of docs/audit.md has them."""
    assert (strength.SIGNIFICANT, strength.POINT) == (0.01, 0.005)
    assert (others.QUERIES, others.BEYOND) == (5000, 0.002)
    assert (controls.LEFT, controls.NEAR, controls.BEHIND) == (0.05, 0.03, 0.05)
    assert remembering.ALLOWED == 0.08
    assert (controls.EPOCHS, controls.UPDATES, controls.BATCH) == (4, 400, 128)
    assert (controls.RATE, controls.ATTACK_STEPS) == (5e-3, 5)
    assert {"margin", "dlr"} <= describing.MARGINS
    assert (
        SimpleNamespace(
            **{budget: vars(held)["queries"] for budget, held in advbayes.auditing.TIERS.items()}
        ).full
        == 5000
    )


@dataclass(frozen=True)
class Half:
    """Breaks every other example."""

    ball: Any
    steps: int = 3

    def __call__(
        self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        return x


@pytest.mark.parametrize(("broken", "wanted"), [(1, "passed"), (2, "failed")])
def test_e12_allows_half_a_percent_of_what_stands(
    broken: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num = 200
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(0))
    found = _case(
        predict,
        (x, predict(x).logits.argmax(1)),
        BALL,
        replace(SMALL, num=num),
        Support(),
        {"a": Half(BALL)},
    )
    found.memory |= {"clean": columns(num, 0), "columns": {"a": columns(num, 0)}}
    monkeypatch.setattr(Case, "scored", lambda self, *_, **__: columns(num, broken))
    assert strength.noise_not_better(found).status == wanted


@pytest.mark.parametrize(("steps", "factor"), [(1, 10), (3, 4), (5, 2), (20, 2)])
def test_e6_holds_an_attack_of_few_steps_against_ten(
    steps: int, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []
    more = strength.with_steps

    def with_steps(attack: Any, factor: float) -> Any:
        tried.append(factor)
        return more(attack, factor)

    monkeypatch.setattr(strength, "with_steps", with_steps)
    looked_at("E6", attacks={"PGD": pgd(BALL, steps)})
    assert tried[0] == factor


@pytest.mark.parametrize(("broken", "wanted"), [(1, "passed"), (2, "failed")])
@pytest.mark.parametrize("id", ["E6", "E7"])
def test_e6_and_e7_allow_half_a_point(
    id: str, broken: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num = 200
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(0))
    budget = replace(SMALL, num=num, max_steps=3)
    found = _case(
        predict, (x, predict(x).logits.argmax(1)), BALL, budget, Support(), {"a": Half(BALL)}
    )
    found.memory |= {"clean": columns(num, 0), "columns": {"a": columns(num, 0)}}
    monkeypatch.setattr(Case, "scored", lambda self, *_, **__: columns(num, broken))
    run = strength.converged_in_steps if id == "E6" else strength.converged_in_restarts
    assert run(found).status == wanted


@pytest.mark.parametrize(
    ("own", "most", "status", "times"),
    [(True, 8, "passed", 4), (True, 4, "failed", 2), (False, 8, "failed", 1)],
)
def test_e7_gives_the_audits_own_attacks_more_restarts(
    own: bool, most: int, status: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice and four times the restarts break ten more each, eight times none; what they broke
    stays in the worst case."""
    num = 200
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(0))
    attacks = {"a": pgd(BALL, 1)}
    budget = replace(SMALL, num=num, max_restarts=most)
    data = x, predict(x).logits.argmax(1)
    found = _case(predict, data, BALL, budget, Support(), attacks)
    found.own_attacks = own
    found.memory |= {"clean": columns(num, 0), "columns": {"a": columns(num, 0)}}
    broken = {"restarts x2 a": 10, "restarts x4 a": 20, "restarts x8 a": 20}
    monkeypatch.setattr(
        Case,
        "scored",
        lambda self, _, purpose, rows: {
            name: each[rows] for name, each in columns(num, broken[purpose]).items()
        },
    )
    verdict = strength.converged_in_restarts(found)
    assert (verdict.status, verdict.figures["times"]) == (status, times)
    joined = 10 if times == 1 else 20
    assert found.value(found.worst()) == pytest.approx(1 - joined / num)


@pytest.mark.parametrize(("flat", "wanted"), [(1, "passed"), (2, "failed")])
def test_e9_allows_one_percent_without_a_gradient(flat: int, wanted: str) -> None:
    x = torch.randn(100, 5, generator=torch.Generator().manual_seed(0))
    known = {row.numpy().tobytes() for row in x[:flat]}

    def masked(x: Tensor) -> Classes:
        dead = torch.tensor([row.numpy().tobytes() in known for row in x.detach()]).unsqueeze(1)
        return predict(torch.where(dead, x.detach(), x))

    data = x, predict(x).logits.argmax(1)
    found = looked_at("E9", model=masked, data=data, tier=replace(SMALL, num=100))["E9"]
    assert found.status == wanted
    assert found.figures["zero"] == flat


def test_e9_wants_the_gradient_of_the_answers_that_are_scored() -> None:
    def two_faced(x: Tensor) -> Classes:
        return predict(x + 0.1 if x.requires_grad else x)

    found = looked_at("E9", model=two_faced)["E9"]
    assert (found.status, found.figures["of_other_answers"]) == ("failed", 60)
    assert found.figures["zero"] == found.figures["not_finite"] == 0


def test_e9_looks_at_what_the_attacker_may_touch() -> None:
    """The gradient is there, but not in the first feature."""
    ball = L2(0.5, mask=torch.arange(5) == 0)
    deaf = looked_at("E9", model=lambda x: predict(x * (torch.arange(5) > 0)), ball=ball)["E9"]
    assert (deaf.status, deaf.figures["zero"]) == ("failed", 60)
    assert looked_at("E9", ball=ball)["E9"].status == "passed"


@pytest.mark.parametrize(("taken", "wanted"), [(1, "failed"), (2, "passed")])
def test_e5_what_a_mask_leaves_to_the_attacker_has_a_say(
    taken: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = case(ball=L2(0.5, mask=torch.arange(5) == 0), attacks={"a": Half(BALL)})
    found.memory |= {"radii": {9.0: columns(100, 100)}, "clean": columns(100, 0)}
    monkeypatch.setattr(strength, "_left_by", lambda *_: columns(100, taken))
    result = strength.unbounded(found)
    assert result.status == wanted
    assert result.figures["in_reach"] == 1 - taken / 100
    found.memory["clean"] = columns(100, 100)  # nothing is right: nothing to be taken
    assert strength.unbounded(found).status == "passed"


@pytest.mark.parametrize(("left", "wanted"), [(1, "passed"), (2, "failed")])
@pytest.mark.parametrize("id", ["E4", "E5"])
def test_e4_and_e5_leave_one_percent(
    id: str, left: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num = 100
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(0))
    budget = replace(SMALL, num=num)
    found = _case(
        predict, (x, predict(x).logits.argmax(1)), BALL, budget, Support(), {"a": Half(BALL)}
    )
    monkeypatch.setattr(Case, "union", lambda self, *_, **__: columns(num, num - left))
    monkeypatch.setattr(Case, "columns", lambda self: {"a": columns(num, num - left)})
    assert (strength.monotone if id == "E4" else strength.unbounded)(found).status == wanted


@pytest.mark.parametrize(("rise", "wanted"), [(6, "passed"), (7, "failed")])
def test_e4_lets_accuracy_rise_by_chance(rise: int, wanted: str) -> None:
    """Seven discordant pairs of seven have p = 1/128 < 1 %, six of six 1/64."""
    found = case(attacks={"a": Half(BALL)})
    wrong = {0.1: 30, 0.5: 30 - rise, 9.0: 60}
    found.memory["radii"] = {eps: columns(60, num) for eps, num in wrong.items()}
    assert strength.monotone(found).status == wanted


@pytest.mark.parametrize(("weaker", "wanted"), [(1, "passed"), (2, "failed")])
def test_e14_lets_knowledge_cost_a_point(
    weaker: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num = 100
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(0))
    model = lambda x: predict(x)  # noqa: E731
    support = Support(fresh=model)
    data = x, predict(x).logits.argmax(1)
    found = _case(predict, data, BALL, replace(SMALL, num=num), support, {"a": Half(BALL)})

    def union(self: Case, attacks: Any, purpose: str, **_: Any) -> dict[str, Tensor]:
        return columns(num, 50 - weaker * (purpose == "thetas known"))

    monkeypatch.setattr(Case, "union", union)
    assert others.fixed_randomness(found).status == wanted


@pytest.mark.parametrize(("below", "wanted"), [(0.0, "passed"), (0.01, "failed"), (0.4, "failed")])
@pytest.mark.parametrize("scale", [0.1, 2.0])
def test_e22_takes_no_likelihood_below_the_gaussian_floor(
    below: float, wanted: str, scale: float
) -> None:
    """The best that a Gaussian with this RMSE can do is 0.5 ln(2 pi e) + ln RMSE, with the RMSE for
    its scale: so much passes, and a density that counts in other units does not."""
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(2)).double()
    error = torch.randn(60, generator=torch.Generator().manual_seed(3)).double()
    error = scale * error / error.square().mean().sqrt()

    class Shifted(Normal):
        def log_prob(self, value: Tensor) -> Tensor:
            return super().log_prob(value) + below

    def numbers(x: Tensor) -> Normal:
        return Shifted(10 * x[:, 0], torch.full_like(x[:, 0], scale))

    found = looked_at("E22", model=numbers, data=(x, 10 * x[:, 0] + error))["E22"]
    assert found.status == wanted
    floor = 0.5 * math.log(2 * math.pi * math.e) + math.log(scale)
    assert found.figures["Gaussian floor"] == pytest.approx(floor, rel=1e-6)
    assert found.figures["clean NLL"] == pytest.approx(floor - below, rel=1e-6)


def test_e6_prints_the_steps_that_were_judged() -> None:
    """Those of the attack, whose double changed nothing."""
    # of two classes, where the first step already goes the whole way in the right direction
    two = lambda x: Classes(logits=torch.stack([x[:, 0] + x[:, 1], -x[:, 0] - x[:, 1]], 1))  # noqa: E731
    data = X, two(X).logits.argmax(1)
    found = looked_at("E6", model=two, data=data, attacks={"PGD": pgd(BALL, 7)})["E6"]
    assert found.status == "passed"
    assert found.figures["steps"] == 7


# --- E0 -----------------------------------------------------------------------------------------


MASK = torch.tensor([True, True, True, True, False])


@pytest.mark.parametrize(
    ("ball", "inner", "said"),
    [
        (L2(0.5), L2(0.5), ""),
        (Linf(0.5), L2(0.5), "a stays in L2(0.5), the ball is Linf(0.5)"),
        (L2(0.5), L2(0.5, mask=MASK), "kept from what the ball allows"),
        (L2(0.5, mask=MASK), L2(0.5), ""),  # beyond what is allowed: E1's business
        (L2(0.5, mask=MASK), L2(0.5, mask=MASK), ""),
        (L2(0.5), L2(0.5, box=(-9, 9)), "kept from what the ball allows"),
        (L2(0.5, box=(-9, 9)), L2(0.5, box=(-8.9, 9)), "kept from what the ball allows"),
        (L2(0.5, box=(-9, 9)), L2(0.5, box=(-9, 9)), ""),
    ],
)
def test_e0_wants_attacks_that_may_do_what_the_attacker_may(
    ball: Any, inner: Any, said: str
) -> None:
    found = looked_at("E0", ball=ball, attacks={"a": pgd(inner, 5)})["E0"]
    assert (found.status == "failed") is bool(said), found.line()
    assert said in found.advice


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"steps": 5, "restarts": 2}, ""),
        ({"steps": 6}, "steps are said to be 6, but the attacks take 5"),
        ({"restarts": 3}, "restarts are said to be 3, but the attacks take 2"),
        ({"box": "none"}, "no box is said, but the ball is L2(0.5, box=(-9, 9))"),
    ],
)
def test_e0_wants_what_was_run(said: dict[str, Any], fault: str) -> None:
    ball = L2(0.5, box=(-9, 9))
    model = ThreatModel(units="raw", **said)
    attacks = {"a": pgd(ball, 5, restarts=2)}
    found = looked_at("E0", ball=ball, attacks=attacks, threat_model=model)["E0"]
    assert (found.status == "failed") is bool(fault), found.line()
    assert fault in found.advice


@pytest.mark.parametrize(("turn", "said"), [(1, True), (0, False)])
def test_e22_says_where_the_classes_are_in_another_order(turn: int, said: bool) -> None:
    def turned(x: Tensor) -> Distribution:
        return Classes(logits=predict(x).logits.roll(turn, -1))

    found = looked_at("E22", model=turned, data=(X, predict(X).logits.argmax(-1)))["E22"]
    assert (found.status == "failed") == said
    assert ("it would be right on 1.000" in found.advice) == said


def test_e22_is_silent_about_the_order_where_none_would_help() -> None:
    labels = torch.ones(len(X), dtype=torch.long)
    labels[0] = 0
    always = lambda x: Classes(logits=torch.eye(3)[0].expand(len(x), 3))  # noqa: E731
    found = looked_at("E22", model=always, data=(X, labels))["E22"]
    assert "below the majority class" in found.advice
    assert "another order" not in found.advice


def test_e22_says_the_same_of_a_random_predictor_at_every_asking() -> None:
    def random(x: Tensor) -> Distribution:
        return Classes(logits=torch.randn(len(x), 3))

    labels = torch.arange(len(X)) % 3
    found = []
    for seed in range(8):
        with GlobalStream(seed):
            found.append(looked_at("E22", model=random, data=(X, labels))["E22"])
    assert len({each.advice for each in found}) == 1
    assert "another order" not in found[0].advice


def test_a_function_over_a_forest_can_be_copied() -> None:
    from sklearn.ensemble import RandomForestClassifier

    forest = RandomForestClassifier(3, random_state=0).fit(X.numpy(), Y.numpy())
    asked = []

    def probabilities(x: Tensor) -> Any:
        asked.append(len(x))
        return forest.predict_proba(x.numpy())

    made = copies_of(probabilities, None)  # type: ignore[arg-type]
    assert made.make is not None, made.why
    twin: Any = made.make()
    assert (twin(X) == probabilities(X)).all()
    assert asked == [len(X)]  # the copy counts for itself


def test_the_threat_model_says_the_most_that_any_attack_does() -> None:
    attacks = {
        "short": pgd(BALL, 3, step_size=0.2),
        "long": pgd(BALL, 9, margin, restarts=4),
        "one": one_step(BALL),
    }
    for order in (attacks, dict(reversed(attacks.items()))):
        said = said_by(BALL, order)
        assert (said["steps"], said["restarts"], said["step_size"]) == (9, 4, 0.2)
        assert set(said["loss"].split(", ")) == {"nll", "margin"}
    assert said_by(BALL, {})["steps"] is said_by(BALL, {})["restarts"] is None

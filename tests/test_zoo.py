"""The audit catches the bad and spares the good."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from advbayes.auditing import others
from advbayes.evaluation import SoftmaxWarning
from tests import zoo
from tests.conftest import shift


@pytest.fixture(autouse=True)
def _few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Square's 5,000 queries take ten seconds a member: they are tested in test_audit_rules."""
    monkeypatch.setattr(others, "QUERIES", zoo.QUERIES)


@pytest.mark.parametrize("name", zoo.BROKEN)
# the zero-gradient layer's attack
@pytest.mark.filterwarnings("ignore::advbayes.attacks.gradients.NoGradientWarning")
def test_a_broken_evaluation_is_flagged_by_the_check_meant_for_it(name: str) -> None:
    check, make = zoo.BROKEN[name]
    if name == "double softmax":
        with pytest.warns(SoftmaxWarning, match="soft-maxed twice"):
            verdict = make()
    else:
        verdict = make()
    found = verdict[check]
    assert found.status == "failed", found.line()
    assert found.figures, "a verdict without a figure convinces nobody"
    assert found.advice
    assert verdict.level not in "AB"


@pytest.mark.parametrize("name", zoo.VOID)
def test_what_helps_nothing_leaves_its_check_without_a_result(name: str) -> None:
    check, make, why = zoo.VOID[name]
    found = make()[check]
    assert found.status == "not run", found.line()
    assert re.search(why, found.advice), found.line()


@pytest.mark.parametrize("name", zoo.HONEST)
def test_an_honest_evaluation_has_no_failure(name: str, tmp_path: Path) -> None:
    verdict = zoo.HONEST[name](tmp_path / "run")
    assert verdict.failed == (), verdict.text()
    assert verdict.not_run == (), verdict.text()
    assert verdict.level == "B"


# with controls that are given, or trained by the audit, and in another norm
COMPARING = (
    "undefended posterior predictive",
    "adversarially trained predictive",
    "single net, maximum norm",
)


@pytest.fixture(params=[7, 101])
def _other_seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shift(request.param, monkeypatch.setattr)
    zoo.forget()
    yield
    zoo.forget()


@pytest.mark.usefixtures("_other_seeds")
def test_what_compares_nets_does_not_hang_on_their_seeds(tmp_path: Path) -> None:
    """Nets of different seeds are several points apart, clean and under attack. From the
    spread over eight shifts, about one in a hundred is expected to leave one without a result."""
    for number, name in enumerate(COMPARING):
        verdict = zoo.HONEST[name](tmp_path / str(number), only=("E20", "E21"))
        for id in ("E20", "E21"):
            assert verdict[id].status == "passed", (name, verdict[id].line())
    for name in ("weak baseline", "baseline without gradients", "one step"):
        check, make = zoo.BROKEN[name]
        assert (found := make()[check]).status == "failed", (name, found.line())


def test_an_honest_claim_passes_the_checks_that_catch_the_broken_ones() -> None:
    verdict = zoo.honest_claim()
    assert verdict.failed == (), verdict.text()
    assert verdict["E23"].status == "not applicable"
    wanted = {check for check, _ in zoo.ORIGINAL if check != "E23"} | {"E17", "E20", "E28", "E29"}
    assert {finding.id for finding in verdict.findings if finding.status == "passed"} == wanted


def test_the_figures_say_how_bad_it_is() -> None:
    assert zoo.ball_leak()["E1"].figures["infeasible"] == 150
    units = zoo.wrong_units()["E0"]
    assert units.figures["missing"] == 0  # everything is said; it is what is said that is wrong
    assert "reaches 0.188" in units.advice
    label = zoo.label_leak()["E5"].figures
    assert (label["clean"], label["in_reach"]) == (1.0, 1.0)  # whatever is done to the image
    assert label["accuracy"] == 0.0  # the label's columns are changed, too
    redrawn = zoo.thetas_redrawn()["E14"].figures
    assert (
        float(redrawn["thetas truly known leave"]) < float(redrawn["claimed arrays leave"]) - 0.05
    )  # type: ignore[arg-type]
    memory = zoo.recognises_test_points()["E28"].figures
    assert float(memory["displaced"]) < float(memory["at_x"]) - 0.2  # type: ignore[arg-type]
    bypassed = zoo.purifier_bypassed()["E23"].figures
    assert float(bypassed["claimed attacks leave"]) > float(bypassed["exact"])  # type: ignore[arg-type]

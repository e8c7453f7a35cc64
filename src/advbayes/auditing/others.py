"""Checks against other attackers: the black box (E11), transfer (E13), more thetas (E10), knowledge
of them (E14, E15)."""

from __future__ import annotations

from typing import Any

import torch

from advbayes.attacks import Square, margin, nll
from advbayes.attacks.parts import steps_of
from advbayes.auditing.case import (
    POINT,
    Case,
    Frozen,
    finding,
    judged,
    not_applicable,
    not_run,
    with_thetas,
)
from advbayes.auditing.findings import Finding
from advbayes.auditing.strength import breaks_more
from advbayes.types import Predictor

QUERIES, BEYOND = 5000, 0.002  # of the black box


def black_box(case: Case) -> Finding:
    """E11: Square with 5,000 queries breaks at most 0.2 points beyond the union of all attacks."""
    attack = case.support.black_box or Square(
        case.ball, case.budget.queries, margin if case.task == "classification" else nll
    )
    queries = steps_of(attack)
    if (queries or 0) < QUERIES:
        return not_run(
            "E11",
            f"a black-box attack with at least {QUERIES} queries is due, this one has {queries}",
        )
    before = case.worst()
    rows = (
        torch.arange(len(case.x))
        if case.task == "regression"
        else (before["correct"] >= 0.5).nonzero().squeeze(1)
    )
    if not len(rows):
        return finding("E11", "passed", beyond=0.0, standing=0, queries=queries)
    case.union({"black box": attack}, "E11", rows=rows, join=True)
    beyond = case.value(before) - case.value(case.worst())
    advice = "gradients mislead the attack: the predictor masks them"
    return judged(
        "E11", beyond > BEYOND + 1e-9, advice, beyond=beyond, standing=len(rows), queries=queries
    )


def transfer(case: Case) -> Finding:
    """E13: examples made for an undefended or sibling model do not break more."""
    support = case.support
    unpurified = (
        support.unpurified
        if support.unpurified is not None
        else getattr(case.predict, "base", None)
    )
    given = {**support.siblings, "undefended": support.undefended, "unpurified": unpurified}
    sources = {name: source for name, source in given.items() if source is not None}
    if not sources:
        return not_run(
            "E13", "give Support(undefended=...) (--undefended RUN) or Support(siblings={...})"
        )
    if not case.attacks:
        return not_run("E13", "give the attacks, not only their arrays")
    direct = case.gradient()
    figures: dict[str, Any] = {"own attack": case.value(direct)}
    worse = []
    for name, source in sources.items():
        attacks = case.attacks_on(source)
        if not attacks:
            return not_run(
                "E13", f"give attacks that are made for any predictor: these cannot run on {name}"
            )
        columns = case.union(attacks, f"transfer {name}", through=source, join=True)
        figures[f"from {name}"] = case.value(columns)
        worse += [name] * breaks_more(case, columns, direct)[0]
    advice = (
        f"examples made for {', '.join(worse)} do more harm than the attack itself: its "
        f"gradients are no use"
    )
    return judged("E13", bool(worse), advice, **figures)


def enough_thetas(case: Case) -> Finding:
    """E10: twice the thetas in the attack cost at most half a point, from 20 thetas up."""
    if not case.is_bayesian:
        return not_applicable("E10", "the predictor has no thetas")
    if not case.attacks:
        return not_run("E10", "give the attacks, not only their arrays")
    claimed = case.claim is not None and case.claim.through is not None
    if claimed:
        used = case.threat_model.attack_thetas or 1
        wider = _wider(case, max(20, 2 * used))
        if wider is None:
            return not_run(
                "E10", "give Support(fresh=...), a FreshPredictive to draw more thetas from"
            )
        before, after = (
            case.value(case.gradient()),
            case.value(case.union(case.attacks, f"thetas {wider[1]}", through=wider[0])),
        )
        advice = f"attack through at least {wider[1]} thetas, not {used}"
        return judged(
            "E10",
            before - after > POINT + 1e-9,
            advice,
            thetas=used,
            cost=before - after,
            **{case.label: after},
        )
    num = max(20, case.threat_model.attack_thetas or 20) if case.num_thetas is None else 20
    wide = with_thetas(case.support.fresh, num)
    if wide is None:
        return not_run(
            "E10",
            "give Support(fresh=...), a FreshPredictive (or a predictor with `with_thetas`) to "
            "draw more thetas from",
        )
    # noise in the scores is none of the attack's
    by = Frozen(case.predict, case.seed) if case.stochastic else None
    before = case.value(case.union(case.attacks, f"thetas {num}", through=wide, by=by))
    while True:
        num *= 2
        wide = with_thetas(case.support.fresh, num)
        assert wide is not None
        after = case.value(
            case.union(case.attacks, f"thetas {num}", through=wide, by=by, join=by is None)
        )
        if before - after <= POINT + 1e-9 or num >= case.budget.max_thetas:
            break
        before = after
    advice = "draw more thetas in the attack until doubling changes nothing"
    return judged(
        "E10",
        before - after > POINT + 1e-9,
        advice,
        thetas=num // 2,
        cost=before - after,
        **{case.label: after},
    )


def _wider(case: Case, num: int) -> tuple[Predictor, int] | None:
    wide = with_thetas(case.support.fresh, num)
    if wide is not None:
        return wide, num
    thetas = case.num_thetas
    return (
        (case.predict, thetas)
        if thetas is not None and thetas >= 20 and not case.stochastic
        else None
    )


def fixed_randomness(case: Case) -> Finding:
    """E14: the attack that knows the evaluated thetas is not weaker than the one that does not, by
    more than a point."""
    if not case.is_bayesian and not case.stochastic:
        return not_applicable("E14", "the predictor has no randomness to know")
    if case.claim is not None and case.threat_model.randomness == "fixed" and case.stochastic:
        advice = (
            "the thetas are said to be fixed, but are drawn anew at each call: fix them for "
            "attack and score alike"
        )
        figures = {"claimed arrays leave": case.value(case.gradient())}
        if case.attacks:
            fixed = Frozen(case.predict, case.seed)
            figures["thetas truly known leave"] = case.value(
                case.union(case.attacks, "thetas fixed", through=fixed, by=fixed)
            )
        return finding("E14", "failed", advice, **figures)
    if not case.attacks:
        return not_run("E14", "give the attacks, not only their arrays")
    blind = (
        case.support.fresh
        if case.support.fresh is not None
        else case.predict
        if case.stochastic
        else None
    )
    if blind is None:
        return not_run(
            "E14",
            "give Support(fresh=...), a FreshPredictive that does not know the evaluated thetas",
        )
    scorer = Frozen(case.predict, case.seed) if case.stochastic else case.predict

    known = case.value(case.union(case.attacks, "thetas known", through=scorer, by=scorer))
    unknown = case.value(case.union(case.attacks, "thetas fresh", through=blind, by=scorer))
    case.memory["knowledge"] = {"thetas known": known, "thetas fresh": unknown}
    advice = (
        "the attack that knows the thetas must be at least as strong: they were redrawn "
        "between attack and score"
    )
    return judged(
        "E14", known - unknown > 2 * POINT + 1e-9, advice, thetas_known=known, thetas_fresh=unknown
    )


def two_knowledge_levels(case: Case) -> Finding:
    """E15: the table has a column for thetas known and one for thetas fresh."""
    if not case.is_bayesian and not case.stochastic:
        return not_applicable("E15", "the predictor has no thetas")
    if case.claim is not None:
        absent = [
            level for level in ("thetas known", "thetas fresh") if level not in case.claim.knowledge
        ]
        return judged(
            "E15",
            bool(absent),
            f"add the column {' and '.join(absent)}",
            columns=len(case.claim.knowledge),
        )
    levels = case.memory.get("knowledge")
    if levels is None:
        return not_run("E15", "give Support(fresh=...), so that both columns can be made")
    return finding("E15", "passed", **levels)

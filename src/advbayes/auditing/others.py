"""Checks against other attackers: the black box (E11), transfer (E13), more thetas (E10), knowledge
of them (E14, E15), those made for a purifier (E23), and whether it can be believed (E24)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import distributed
from advbayes.attacks import Square, loss_and_gradient, margin, nll, with_ball
from advbayes.attacks.parts import losses_of, steps_of
from advbayes.attacks.zeroth_order import ANSWERS_ALONE
from advbayes.auditing.answers import share_of_breakable
from advbayes.auditing.case import POINT, Case, Frozen, num_different, with_thetas
from advbayes.auditing.controls import has_learnt_less
from advbayes.auditing.findings import Finding, check, judged, no_attacks, not_applicable, not_run
from advbayes.auditing.remembering import ASKED, changed
from advbayes.auditing.strength import breaks_more
from advbayes.evaluation.scoring import worst
from advbayes.posteriors import PointMass
from advbayes.predictive import FreshPredictive
from advbayes.purification import Purifier
from advbayes.purification.attacks import Annealed, NearestCentre, StraightThrough
from advbayes.types import Attack, Predictor

QUERIES, BEYOND = 5000, 0.002  # of the black box
FOUND = 0.9  # the share that one of the user's own finds on a linear model
LEVELS = ("thetas known", "thetas fresh")
# what a purifier must be attacked by
KINDS = ("exact", "straight_through", "transfer", "nearest_centre")


@check("E11", "black box not better", cost=lambda case: case.budget.queries)
def black_box(case: Case) -> Finding:
    """E11: Square with 5,000 queries breaks at most 0.2 points beyond the union of all attacks."""
    loss = margin if case.task == "classification" else nll
    attack = case.support.black_box or Square(case.ball, case.budget.queries, loss)
    attack = with_ball(attack, case.ball)
    before = case.worst()
    rows = case.unbroken(before)
    queries = steps_of(attack)
    if len(rows) and type(attack) not in ANSWERS_ALONE:  # what it says is not what it does
        queries = min(queries or 0, _asked(case, attack, rows[:1]))
    if (queries or 0) < QUERIES:
        return not_run(
            f"a black-box attack with at least {QUERIES} queries is due, this one has {queries}"
        )
    beyond = 0.0
    if len(rows):
        case.union({"black box": attack}, "E11", rows=rows, join=True)
        beyond = case.value(before) - case.value(case.worst())
    # one that holds something for each example cannot be tried on others
    own = case.support.black_box is not None
    plain = all(hasattr(loss, "__name__") for loss in losses_of(attack))
    if own and plain and case.task == "classification" and beyond <= BEYOND + 1e-9:
        share = share_of_breakable(attack, case.ball, case.seed)
        if share < FOUND:
            return not_run(
                f"this black-box attack breaks {share:.2f} of what can be broken on a linear "
                f"model, {FOUND:g} are due"
            )
    advice = "gradients mislead the attack: the predictor masks them"
    figures = {"beyond": beyond, "standing": len(rows), "queries": queries}
    return judged(beyond > BEYOND + 1e-9, advice, **figures)


def is_another(predict: Predictor, case: Case) -> bool:
    """Whether it is another model than the audited one, by its answers or their gradients."""
    if predict is case.predict:
        return False
    x, y = case.x[:ASKED], case.y[:ASKED]
    if bool(changed(predict, case.predict, x, case).any()):
        return True
    there, here = (loss_and_gradient(each, nll, x, y)[2] for each in (predict, case.predict))
    return bool((there - here).norm() > 1e-3 * here.norm())


def fresh_of(case: Case) -> Any:
    """The predictor with fresh thetas; None where they are the evaluated ones, although there are
    others to be drawn, or those of a model that has learnt nothing, though the audited one has."""
    fresh = case.support.fresh
    if fresh is None or (num_different(case.predict) > 1 and not is_another(fresh, case)):
        return None

    def dull() -> bool:
        return has_learnt_less(case, with_thetas(fresh, 20) or fresh)  # one theta may say little

    return None if case.once("dull thetas", dull) else fresh


def _wants_fresh(case: Case, what: str) -> Finding:
    why = "; the thetas of the one given have learnt nothing, unlike the audited model's"
    return not_run(f"give Support(fresh=...), {what}{why * case.memory.get('dull thetas', False)}")


@dataclass(frozen=True)
class _Counted:
    """A predictor that counts the inputs it is asked about."""

    predict: Predictor
    sizes: list[int] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Distribution:
        self.sizes.append(len(x))
        return self.predict(x)


def _asked(case: Case, attack: Attack, row: Tensor) -> int:
    """How often an attack asks about one example; as often as is due where it breaks it."""
    counted = _Counted(case.target)
    with distributed.alone():
        columns = case.union({"black box": attack}, "E11 counted", through=counted, rows=row)
    broken = case.task == "classification" and float(columns["correct"][0]) < 0.5
    return QUERIES if broken else sum(counted.sizes)


@check("E13", "transfer not better", cost=lambda case: case.sources * case.passes)
def transfer(case: Case) -> Finding:
    """E13: examples made for an undefended or sibling model do not break more."""
    support = case.support
    named = {**support.siblings, "undefended": support.undefended, "unpurified": case.unpurified}
    given = {name: source for name, source in named.items() if source is not None}
    others = {name: source for name, source in given.items() if is_another(source, case)}
    sources = {name: source for name, source in others.items() if not has_learnt_less(case, source)}
    if not sources:
        wanted = ["give Support(undefended=...) (--undefended RUN) or Support(siblings={...})"]
        same = ", ".join(name for name in given if name not in others)
        wanted += [f"{same} answers as the audited model itself does"] * bool(same)
        dull = ", ".join(others)
        wanted += [f"{dull} is no better than a constant, and has nothing to share"] * bool(dull)
        return not_run("; ".join(wanted))
    if not case.attacks:
        return no_attacks()
    direct = case.gradient()
    figures: dict[str, Any] = {"own attack": case.value(direct)}
    worse = []
    for name, source in sources.items():
        attacks = case.attacks_on(source)
        if not attacks:
            return not_run(
                f"give attacks that are made for any predictor: these cannot run on {name}"
            )
        columns = case.union(attacks, f"transfer {name}", through=source, join=True)
        figures[f"from {name}"] = case.value(columns)
        worse += [name] * breaks_more(case, columns, direct)[0]
    advice = f"examples made for {', '.join(worse)} do more harm: the attack's gradients are no use"
    return judged(bool(worse), advice, **figures)


@check(
    "E10",
    "enough thetas in the attack",
    cost=lambda case: 3 * case.passes * case.has_randomness,
    applies=lambda case: case.is_bayesian or case.target is not case.predict,
)
def enough_thetas(case: Case) -> Finding:
    """E10: twice the thetas in the attack cost at most half a point, from 20 thetas up; nor does an
    attack through the predictor itself where a claim's went through another one."""
    if not case.is_bayesian and case.target is case.predict:
        return not_applicable("the predictor has no thetas")
    if not case.attacks:
        return no_attacks()
    if case.target is not case.predict:
        return _enough_in_claim(case) if case.is_bayesian else _through_itself(case)
    fresh = fresh_of(case)
    match fresh:
        case FreshPredictive(posterior=PointMass()) if not is_another(fresh, case):
            # every draw is the evaluated theta
            return judged(False, "", thetas=1, cost=0.0, **{case.label: case.value(case.worst())})
    num = max(20, case.threat_model.attack_thetas or 20) if case.num_thetas is None else 20
    wide = with_thetas(fresh, num)
    if wide is None:
        return _wants_fresh(
            case, "a FreshPredictive (or a predictor with `with_thetas`) to draw more thetas from"
        )
    # noise in the scores is none of the attack's
    by = Frozen(case.predict, case.seed) if case.stochastic else None

    def left(wide: Predictor | None, join: bool) -> float:
        return case.value(case.union(case.attacks, f"thetas {num}", through=wide, by=by, join=join))

    before = left(wide, join=False)
    while True:
        num *= 2
        after = left(with_thetas(fresh, num), join=by is None)
        cost = before - after
        if cost <= POINT + 1e-9 or num >= case.budget.max_thetas:
            break
        before = after
    advice = "draw more thetas in the attack until doubling changes nothing"
    figures = {"thetas": num // 2, "cost": cost, case.label: after}
    return judged(cost > POINT + 1e-9, advice, **figures)


def _enough_in_claim(case: Case) -> Finding:
    """The same of a claim whose attack went through thetas of its own: against at least 20."""
    used = case.threat_model.attack_thetas or 1
    num, known = max(20, 2 * used), case.num_thetas
    wide: Predictor | None = with_thetas(fresh_of(case), num)
    if wide is None and known is not None and known >= 20 and not case.stochastic:
        wide, num = case.predict, known
    if wide is None:
        return _wants_fresh(case, "a FreshPredictive to draw more thetas from")
    after = case.value(case.union(case.attacks, f"thetas {num}", through=wide))
    cost = case.value(case.gradient()) - after
    advice = f"attack through at least {num} thetas, not {used}"
    figures = {"thetas": used, "cost": cost, case.label: after}
    return judged(cost > POINT + 1e-9, advice, **figures)


def _through_itself(case: Case) -> Finding:
    """A claim whose attack went through something else than what is scored: a member of an
    ensemble, a net before its defense."""
    calm = case.calm()
    after = case.union(case.attacks, "itself", through=calm.predict, by=calm.predict)
    cost = calm.value(calm.gradient()) - case.value(worst([calm.gradient(), after], case.task))
    advice = "attack the predictor that is scored, not another one"
    return judged(cost > POINT + 1e-9, advice, cost=cost, **{case.label: case.value(after)})


@check("E14", "fixed randomness", cost=lambda case: 2 * case.passes * case.has_randomness)
def fixed_randomness(case: Case) -> Finding:
    """E14: the attack that knows the evaluated thetas is not weaker than the one that does not, by
    more than a point."""
    if not case.is_bayesian and not (case.stochastic and case.can_be_fixed):
        return not_applicable("the predictor has no randomness to know")
    scorer = Frozen(case.predict, case.seed) if case.stochastic else case.predict
    if case.claim is not None and case.threat_model.randomness == "fixed" and case.stochastic:
        advice = "thetas said to be fixed are drawn anew at each call: fix them in attack and score"
        figures = {"claimed arrays leave": case.value(case.gradient())}
        if case.attacks:
            fixed = case.union(case.attacks, "thetas fixed", through=scorer, by=scorer)
            figures["thetas truly known leave"] = case.value(fixed)
        return judged(True, advice, **figures)
    if not case.attacks:
        return no_attacks()
    blind = fresh_of(case)
    if blind is None and case.stochastic:
        blind = case.predict
    if blind is None:
        return _wants_fresh(case, "a FreshPredictive that does not know the evaluated thetas")
    known = case.value(case.union(case.attacks, "thetas known", through=scorer, by=scorer))
    unknown = case.value(case.union(case.attacks, "thetas fresh", through=blind, by=scorer))
    case.memory["knowledge"] = dict(zip(LEVELS, (known, unknown), strict=True))
    advice = "knowing thetas must not weaken an attack: they were redrawn between attack and score"
    bad = known - unknown > 2 * POINT + 1e-9
    return judged(bad, advice, thetas_known=known, thetas_fresh=unknown)


@check("E15", "two knowledge levels")
def two_knowledge_levels(case: Case) -> Finding:
    """E15: the table has a column for thetas known and one for thetas fresh."""
    if not case.is_bayesian and not (case.stochastic and case.can_be_fixed):
        return not_applicable("the predictor has no thetas")
    if case.claim is not None:
        absent = [level for level in LEVELS if level not in case.claim.knowledge]
        advice = f"add the column {' and '.join(absent)}"
        return judged(bool(absent), advice, columns=len(case.claim.knowledge))
    levels = case.memory.get("knowledge")
    if levels is None:
        return not_run("give Support(fresh=...), so that both columns can be made")
    return judged(False, "", **levels)


@check("E23", "adaptive attack on a purifier", mandatory=lambda case: case.is_purifier)
def adaptive_attacks(case: Case) -> Finding:
    """E23: exact and straight-through gradients, transfer from the unpurified model, and the
    nearest-centre attack."""
    if not case.is_purifier:
        return not_applicable("the predictor does not purify")
    if case.task == "regression":
        return not_run(
            "the purifier's attacks are made for classes; give Support(purifier_attacks=...)"
        )
    # what the ordinary attacks go through, and the attacks that are made for a purifier
    ways: dict[str, Predictor] = {"exact": case.predict}
    adaptive: dict[str, Attack] = {}
    if isinstance(case.predict, Purifier):
        if case.unpurified is not None:
            ways["straight_through"] = StraightThrough(case.predict, case.unpurified)
        adaptive = {"nearest_centre": NearestCentre(case.ball), "annealed": Annealed(case.ball)}
    if case.unpurified is not None:
        ways["transfer"] = case.unpurified
    results = {}
    for kind, through in ways.items():
        if attacks := case.attacks_on(through):
            results[kind] = case.union(attacks, kind, through=through, join=True)
    for kind, attack in (adaptive | dict(case.support.purifier_attacks)).items():
        made = case.attacked(attack, f"purifier {kind}", through=case.predict)
        columns = case.scored(made, f"purifier {kind}")
        case.join(f"purifier {kind}", columns)
        standing = case.unbroken(columns)
        # one that leaves whatever stands where it was has not been tried
        if not len(standing) or not torch.equal(made[standing], case.x[standing]):
            results[kind] = columns
    figures: dict[str, Any] = {kind: case.value(columns) for kind, columns in results.items()}
    if case.claim is not None:
        # the table is theirs: what they did not run is missing, whatever it gives here
        absent = [kind for kind in KINDS if kind not in case.claim.purifier_attacks]
        figures["claimed attacks leave"] = case.value(case.gradient())
        return judged(bool(absent), f"add {', '.join(absent)}", **figures)
    absent = [kind for kind in KINDS if kind not in results]
    if absent:
        return not_run(
            f"give Support(unpurified=...), or {', '.join(absent)} as Support(purifier_attacks=...)"
        )
    return judged(False, "", **figures)


@check("E24", "effective sample size", mandatory=lambda case: case.is_purifier)
def effective_sample_size(case: Case) -> Finding:
    """E24: at most 5 % of the queries rest on fewer than two points, and underflow is flagged."""
    if not case.is_purifier:
        return not_applicable("the predictor does not purify")
    diagnose = getattr(case.predict, "diagnose", None)
    if diagnose is None:
        return not_run("the purifier does not report its weights (a method `diagnose`)")
    few, silent, total = 0, 0, 0
    for points in (case.x, *case.arrays().values()):
        seen = diagnose(points)
        few += int((seen.ess_reference < 2).sum())
        silent += int((~torch.isfinite(seen.log_evidence) & ~seen.out_of_support).sum())
        total += len(points)
    nearest = "widen the channel's noise: the answer is that of the nearest reference point"
    figures = {"few": few / total, "underflow_not_flagged": silent}
    bad = few > 0.05 * total or silent > 0
    return judged(bad, "flag underflow" if silent else nearest, **figures)

"""`audit`: run the table of checks. A new check is a function of a Case under `@check`, and a place
in CHECKS."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from advbayes import distributed
from advbayes.adapters import with_estimators
from advbayes.attacks import default_attacks, loss_and_gradient, nll
from advbayes.attacks.balls import Ball
from advbayes.attacks.gradients import NoGradientWarning
from advbayes.attacks.parts import ball_of, check_rows, on_rows
from advbayes.attacks.zeroth_order import ANSWERS_ALONE, blind_attacks, gives_gradient
from advbayes.auditing import answers, controls, describing, others, remembering, strength
from advbayes.auditing.case import TIERS, Budget, Case
from advbayes.auditing.certificate import certificate, cut, radii_of
from advbayes.auditing.claim import Claim, ThreatModel, Values, fitted, said_by
from advbayes.auditing.copies import copies_of, held_by
from advbayes.auditing.findings import Check, Finding, Verdict, not_run
from advbayes.auditing.support import Support, named
from advbayes.checks import InputError, InputTypeError, choice, count, instance
from advbayes.evaluation.inputs import (
    Data,
    as_tensors,
    check_predictor,
    dtype_of,
    in_shape_of,
    is_stochastic,
    warn_units,
)
from advbayes.predictive import Certificates
from advbayes.progress import Progress
from advbayes.seeds import GlobalStream
from advbayes.types import Attack, Predictor

# In the order of running: what joins the worst case comes before what is judged against it.
CHECKS: tuple[Check, ...] = (
    describing.threat_model,
    strength.feasible,
    strength.null_attack,
    strength.beats_one_step,
    strength.usable_gradients,
    strength.silent_success,
    strength.converged_in_steps,
    strength.converged_in_restarts,
    strength.monotone,
    strength.unbounded,
    strength.noise_not_better,
    others.transfer,
    others.fixed_randomness,
    others.two_knowledge_levels,
    others.enough_thetas,
    others.adaptive_attacks,
    others.effective_sample_size,
    others.black_box,
    describing.two_losses,
    describing.worst_column,
    describing.rescoring,
    answers.attack_itself,
    controls.undefended_control,
    controls.credible_baseline,
    answers.trivial_predictors,
    describing.statistics,
    describing.attack_on_score,
    describing.rescorable,
    remembering.displaced_centre,
    describing.unseen_family,
    remembering.order_independence,
)


def audit(
    predict: Predictor | Any,  # or a fitted estimator
    data: Data | Any,
    *,
    ball: Ball,
    tier: str | Budget = "standard",
    attacks: Mapping[str, Attack] | None = None,
    threat_model: ThreatModel | None = None,
    support: Support | None = None,
    claim: Claim | None = None,
    certified: Certificates | Tensor | None = None,
    only: tuple[str, ...] | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **deprecated: Any,
) -> Verdict:
    """May the robustness of `predict` within `ball` be believed? Checks E0 to E30, each with its
    figure, and a level A to D.

    - `predict` may be a fitted scikit-learn estimator or pipeline: `data` are then its (X, y), and
      eps is in the units of X.
    - `attacks`: the attacks to judge (absent: the audit chooses its own).
    - `support`: controls, a baseline, siblings, files. A check that lacks what it needs is "not
      run".
    - `claim`: somebody's arrays and scores, to be judged in place of attacks run here.
    - `certified`: the certificates of a Smoothed predictor, one for each example of `data`. They
      give level A where the audit confirms them.
    - `tier`: how much to spend. `only`: the ids of the checks to run; the others are "not run".

    Under a process group (torchrun) the ranks share the attacks out, batch by batch, and all return
    the verdict of one process.

    >>> from torch.distributions import Categorical
    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> from advbayes import L2
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> data = x, (x[:, 0] < 0).long()
    >>> verdict = audit(predict, data, ball=L2(0.5), tier="quick", only=("E1", "E2", "E9"))
    >>> verdict.level, verdict["E1"].status, verdict["E1"].figures["infeasible"]
    ('D', 'passed', 0)
    """
    progress = distributed.ranks().shown(progress)
    spent, budget, support = _renamed(tier, support, deprecated)
    own = getattr(predict, "ball_", None)  # of an estimator: measured in spreads of its features
    if isinstance(own, Ball) and own == ball and ball.scale is not None:
        threat_model = (threat_model or ThreatModel()).filled(units="standardised", scale=own.scale)
    predict, data, training, train_y = with_estimators(
        predict, data, support.training, support.train_y
    )
    support = replace(support, training=training, train_y=train_y)
    said: Any = {"threat_model": threat_model, "claim": claim, "certified": certified}
    case = _case(predict, data, ball, budget, support, attacks, seed=seed, **said)
    known = {check.id for check in CHECKS}
    if only is not None and not set(only) <= known:
        raise InputError(f"only must hold ids among {sorted(known, key=_order)}, got {only}")
    if only is None or {"E13", "E20", "E21"} & set(only):
        with distributed.alone():  # to the bit what one process trains
            case.support = controls.with_controls(case, progress=progress)
    left_out = dict.fromkeys(budget.left_out, f"tier {spent!r} leaves it out")
    if only is not None:
        left_out = dict.fromkeys(known - set(only), "`only` leaves it out")
    made: list[Finding] = []
    with Progress("audit", len(CHECKS), progress) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore", NoGradientWarning)  # E9 says it
        for check in CHECKS:
            why = left_out.get(check.id)
            if why is None or (only is None and not check.applies(case)):
                made.append(_run(check, case))
            elif check.applies(case):
                made.append(check.named(not_run(why), case))
            bar.advance(check.id)
    findings = tuple(sorted(made, key=lambda finding: _order(finding.id)))
    clean = case.value(case.clean)
    summary: dict[str, Any] = {"examples": len(case.x), f"clean {case.label}": clean}
    if "columns" in case.memory:
        summary[f"worst {case.label}"] = case.value(case.worst())
    proven, figures = certificate(case, findings, only)
    return Verdict(findings, spent, proven, summary | figures, describing.notes_on_data(case))


def _run(check: Check, case: Case) -> Finding:
    """The check's finding; where something raises, "not run" with what it said."""
    try:
        return check(case)
    except Exception as error:  # whatever a foreign predictor or attack raises
        why = f"{check.id} was cut short by {type(error).__name__}: {error}"
        return check.named(not_run(why), case)


def _renamed(
    tier: str | Budget, support: Support | None, deprecated: dict[str, Any]
) -> tuple[str, Budget, Support]:
    """The tier's name, its budget and the support, after the keywords of the version before:
    `budget` is a tier, `batch_size` the tier's, the rest is the support's."""
    support = support or Support()
    instance("support", support, Support, "a Support(...)")
    names = {field.name for field in fields(Support)}
    unknown = sorted(deprecated.keys() - names - {"budget", "batch_size"})
    if unknown:
        raise InputTypeError(
            f"audit takes no argument {', '.join(unknown)}; what helps it is "
            f"Support({', '.join(sorted(names))})"
        )
    new = {"budget": "tier=Budget(...)", "batch_size": "tier=Budget(..., batch_size=...)"}
    for name in deprecated:
        use = new.get(name, f"support=Support({name}=...)")
        warnings.warn(
            f"audit({name}=...) will go in the next version: use {use}",
            DeprecationWarning,
            stacklevel=3,
        )
    tier = tier if deprecated.get("budget") is None else deprecated["budget"]
    if isinstance(tier, Budget):  # of one's own: its figures say what is spent
        spent, budget = "custom", tier
    else:
        spent = choice("tier", tier, tuple(TIERS))
        budget = TIERS[spent]
    if "batch_size" in deprecated:
        size = count("batch_size", deprecated["batch_size"])
        spent, budget = "custom", replace(budget, batch_size=size)
    present = {name: value for name, value in deprecated.items() if value is not None}
    changes = {name: value for name, value in present.items() if name in names}
    return spent, budget, replace(support, **changes)


def audit_records(
    data: Data,
    x_adv: Mapping[str, Values],
    *,
    predict: Predictor,
    ball: Ball,
    correct: Mapping[str, Values] | None = None,
    log_prob: Mapping[str, Values] | None = None,
    worst: Values | None = None,
    **options: Any,
) -> Verdict:
    """Judge somebody's arrays (or tensors) and scores: E1, E12, E16, E17, E22, E27 and whatever
    `options` (as in `audit`) allow.

    >>> from torch.distributions import Categorical
    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> from advbayes import L2
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> data, far = (x, (x[:, 0] < 0).long()), {"PGD": x + 3}
    >>> audit_records(data, far, predict=predict, ball=L2(0.5), only=("E1",)).failed
    ('E1',)
    """
    # Claim makes tensors of arrays
    arrays: Any = {"x_adv": x_adv, "correct": correct, "log_prob": log_prob, "worst": worst}
    claim = Claim(**{name: value for name, value in arrays.items() if value is not None})
    return audit(
        predict, data, ball=ball, claim=claim, attacks=options.pop("attacks", {}), **options
    )


@dataclass(frozen=True)
class Cost:
    """What an audit will take: passes through the predictor, in all and by check, and an estimate
    of the seconds."""

    tier: str
    examples: int
    passes: float
    seconds: float
    by_check: dict[str, float]
    trained: tuple[str, ...] = ()  # controls that are to be trained first

    def __str__(self) -> str:
        first = f"trains {' and '.join(self.trained)} first; " if self.trained else ""
        return (
            f"audit ({self.tier}): {first}{self.examples} examples, about {self.passes:,.0f} "
            f"passes for each, about {self.seconds:,.0f} s; what is broken early costs less, "
            f"escalation (E6, E7) more"
        )


def audit_cost(
    predict: Predictor,
    data: Data,
    *,
    ball: Ball,
    tier: str | Budget = "standard",
    attacks: Mapping[str, Attack] | None = None,
    support: Support | None = None,
    **others: Any,
) -> Cost:
    """The cost of `audit` with the same arguments, from one timed pass; training comes on top.

    >>> from torch.distributions import Categorical
    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> from advbayes import L2
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> audit_cost(predict, (x, (x[:, 0] < 0).long()), ball=L2(0.5), tier="quick").examples
    40
    """
    same = {"threat_model", "claim", "certified", "only", "seed", "progress"}
    older = {name: value for name, value in others.items() if name not in same}
    spent, budget, support = _renamed(tier, support, older)
    predict, data = with_estimators(predict, data)
    case = _case(predict, data, ball, budget, support, attacks)
    x, y = case.x[:64], case.y[:64]
    for _ in range(2):  # the first pass may build what later ones share
        began = time.perf_counter()
        if case.black_box:
            predict(x)
        else:
            loss_and_gradient(predict, nll, x, y)
        seconds = (time.perf_counter() - began) / len(x)
    costs = {check.id: float(check.cost(case)) for check in CHECKS}
    costs |= dict.fromkeys(budget.left_out, 0.0)
    passes, num = sum(costs.values()), len(case.x)
    total = (passes * num + controls.training_passes(case)) * seconds
    return Cost(spent, num, passes, total, by_check=costs, trained=support.to_train)


def _order(id: str) -> int:
    return int(re.sub(r"\D", "", id))


def _case(
    predict: Predictor,
    data: Data,
    ball: Ball,
    budget: Budget,
    support: Support,
    attacks: Mapping[str, Attack] | None,
    *,
    threat_model: ThreatModel | None = None,
    claim: Claim | None = None,
    certified: Certificates | Tensor | None = None,
    seed: int = 0,
) -> Case:
    """The case: some rows of the data, or those of a claim's arrays."""
    instance("ball", ball, Ball, "a ball such as L2(eps)")
    copies = copies_of(predict, support.factory)  # before anything is asked
    x, y = as_tensors(data, dtype_of(predict))
    held = held_by(predict, x)
    ball.check(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    rows = order[: budget.num].sort().values
    if claim is not None:  # the arrays are as they were scored
        rows, claim = torch.arange(len(x)), fitted(claim, x)
    first = x[rows][: remembering.ASKED]
    in_turn = remembering.asked_in_turn(predict, first, ball, seed)
    task = check_predictor(predict, x[rows], y[rows])
    with torch.no_grad(), GlobalStream(seed):
        at_first = predict(first)
    y = in_shape_of([at_first], y)
    y = y if task == "classification" else y.to(x.dtype)
    radii = None if certified is None else radii_of(certified, len(x), task)
    blind = not gives_gradient(predict, x[rows][:2])
    if claim is None:
        warn_units(ball, x, "ball")
    chosen = named("attacks", attacks)
    own_attacks = attacks is None and claim is None
    if own_attacks:
        chosen = default_attacks(ball, task, steps=budget.steps, restarts=budget.restarts)
        if blind:
            chosen = blind_attacks(ball, task, budget.steps, budget.blind_queries or budget.queries)
    if not chosen and claim is None:
        raise InputError("attacks must hold at least one named attack, got none")

    def here(name: str, attack: Attack) -> Attack:
        """An attack on the examples audited; its losses may hold entries for all of the data."""
        check_rows(attack, len(x), name)
        return on_rows(attack, rows)

    for name, attack in chosen.items():
        if ball_of(attack) is None:
            raise InputTypeError(f"attacks[{name!r}] must be a dataclass with a `ball`", got=attack)
        chosen[name] = here(f"attacks[{name!r}]", attack)
    special = {
        name: here(f"support.purifier_attacks[{name!r}]", attack)
        for name, attack in support.purifier_attacks.items()
    }
    black_box = support.black_box and here("support.black_box", support.black_box)
    case = Case(
        predict=predict,
        x=x[rows],
        y=y[rows],
        whole=(x, y),
        ball=ball,
        task=task,
        budget=budget,
        attacks=chosen,
        threat_model=threat_model or ThreatModel(),
        stochastic=is_stochastic(predict, x[rows]),
        own_attacks=own_attacks,
        black_box=blind and all(isinstance(attack, ANSWERS_ALONE) for attack in chosen.values()),
        copies=copies,
        in_turn=in_turn,
        at_first=at_first,
        held=held[rows],
        support=replace(support, black_box=black_box, purifier_attacks=special),
        claim=claim,
        certified=cut(radii, rows),
        seed=count("seed", seed, low=0),
    )
    case.threat_model = _filled(case)
    return case


def _filled(case: Case) -> ThreatModel:
    """What the ball, the attacks and the predictor say by themselves; a claim must speak for its
    own thetas."""
    model = case.threat_model.filled(**said_by(case.ball, case.attacks))
    if case.claim is None and case.ball.scale is None and model.scale is None:
        model = model.filled(units="raw")  # eps is then in the units of x
    fresh = case.support.fresh
    if not case.is_bayesian:
        return model.filled(
            knowledge="no thetas",
            attack_thetas=0,
            evaluation_thetas=0,
            randomness="fresh" if case.stochastic else "none",
        )
    if case.claim is not None:
        return model
    return model.filled(
        knowledge="thetas known" if fresh is None else "thetas known and fresh",
        attack_thetas=case.num_thetas or getattr(fresh, "num", None),
        evaluation_thetas=case.num_thetas,
        randomness="fresh" if case.stochastic else "fixed",
    )

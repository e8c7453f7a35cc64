"""`audit`: run the table of checks. A new check is a function of a Case and one row of CHECKS."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from advbayes import checks, distributed
from advbayes.adapters import with_estimators
from advbayes.attacks import default_attacks, loss_and_gradient, nll
from advbayes.attacks.balls import Ball
from advbayes.attacks.gradients import NoGradientWarning
from advbayes.attacks.parts import ball_of, steps_of
from advbayes.auditing import answers, controls, describing, others, purifier, remembering, strength
from advbayes.auditing.answers_alone import ANSWERS_ALONE, blind_attacks, gives_gradient
from advbayes.auditing.case import TIERS, Budget, Case
from advbayes.auditing.certificate import certificate, cut, radii_of
from advbayes.auditing.claim import Claim, Values, fitted
from advbayes.auditing.copies import copies_of
from advbayes.auditing.findings import Finding, Verdict
from advbayes.auditing.support import Support, named
from advbayes.auditing.threat import ThreatModel, said_by
from advbayes.evaluation.inputs import (
    ASKED,
    Data,
    as_tensors,
    check_predictor,
    dtype_of,
    is_stochastic,
    warn_units,
)
from advbayes.predictive import Certificates
from advbayes.progress import Progress
from advbayes.types import Attack, Predictor


@dataclass(frozen=True)
class Size:
    """What the costs are made of: gradient passes of all attacks once, their number, the tier, the
    sources of transfer."""

    passes: float
    attacks: int
    sources: int
    thetas: bool
    budget: Budget


@dataclass(frozen=True)
class Check:
    """A row of the table. `cost` is in passes through the predictor for each example."""

    id: str
    title: str
    run: Callable[[Case], Finding]
    cost: Callable[[Size], float] = lambda size: 0.0
    mandatory: Callable[[Case], bool] = lambda case: True
    # a tier does not leave out what has nothing to say anyway
    applies: Callable[[Case], bool] = lambda case: True


# In the order of running: what joins the worst case comes before what is judged against it.
CHECKS: tuple[Check, ...] = (
    Check("E0", "threat model complete", describing.threat_model),
    Check("E1", "feasible", strength.feasible, lambda size: size.passes),
    Check("E2", "null attack", strength.null_attack, lambda size: size.attacks),
    Check("E3", "iterative beats one-step", strength.beats_one_step, lambda size: 2),
    Check("E9", "usable gradients", strength.usable_gradients, lambda size: 2),
    Check(
        "E8",
        "no silent success",
        strength.silent_success,
        lambda size: size.passes * min(1.0, 32 / size.budget.num),
    ),
    Check("E6", "converged in steps", strength.converged_in_steps, lambda size: 2 * size.passes),
    Check(
        "E7", "converged in restarts", strength.converged_in_restarts, lambda size: 2 * size.passes
    ),
    Check("E4", "monotone in eps", strength.monotone, lambda size: 4 * size.passes),
    Check("E5", "unbounded attack wins", strength.unbounded),
    Check(
        "E12", "noise not better", strength.noise_not_better, lambda size: size.budget.random_points
    ),
    Check("E13", "transfer not better", others.transfer, lambda size: size.sources * size.passes),
    Check(
        "E14",
        "fixed randomness",
        others.fixed_randomness,
        lambda size: 2 * size.passes * size.thetas,
    ),
    Check("E15", "two knowledge levels", others.two_knowledge_levels),
    Check(
        "E10",
        "enough thetas in the attack",
        others.enough_thetas,
        lambda size: 3 * size.passes * size.thetas,
        applies=lambda case: case.is_bayesian,
    ),
    Check(
        "E23",
        "adaptive attack on a purifier",
        purifier.adaptive_attacks,
        mandatory=lambda case: case.is_purifier,
    ),
    Check(
        "E24",
        "effective sample size",
        purifier.effective_sample_size,
        mandatory=lambda case: case.is_purifier,
    ),
    Check("E11", "black box not better", others.black_box, lambda size: size.budget.queries),
    Check("E16", "two losses through the predictive", describing.two_losses, lambda size: 1),
    Check("E17", "worst-case column", describing.worst_column),
    Check("E18", "stochastic re-scoring", describing.rescoring),
    Check("E19", "the attack itself", answers.attack_itself, lambda size: 0.5 * size.passes),
    Check(
        "E20",
        "undefended control",
        controls.undefended_control,
        lambda size: 3 * size.passes * (size.sources > 0),
    ),
    Check(
        "E21",
        "credible baseline",
        controls.credible_baseline,
        lambda size: size.passes * (size.sources > 0),
    ),
    Check("E22", "trivial predictors", answers.trivial_predictors),
    Check("E25", "statistics", describing.statistics, mandatory=lambda case: False),
    Check(
        "E26",
        "attack on the score",
        describing.attack_on_score,
        mandatory=lambda case: case.support.detector is not None,
    ),
    Check("E27", "re-scorable", describing.rescorable, lambda size: size.attacks),
    Check("E28", "displaced centre", remembering.displaced_centre, lambda size: size.passes),
    Check("E30", "unseen family", describing.unseen_family),
    Check(
        "E29",
        "order independence",
        remembering.order_independence,
        lambda size: size.passes * min(1.0, remembering.ASKED / size.budget.num),
    ),
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

    A fitted scikit-learn estimator or pipeline is a predictor, too: data are then its (X, y), eps
    is in the units of X. `attacks` (absent: the audit's own) are those whose numbers are to be
    believed. `support` holds what helps: controls, a baseline, siblings, files; what a check needs
    and is not there leaves it "not run". `claim` holds somebody's arrays and scores: then theirs
    are judged, not ours. `certified` holds the certificates of a Smoothed predictor, one for each
    example of `data`: they give level A where the audit confirms them.
    `tier` says how much to spend. `only` picks checks by id; the others count as not run. Under a
    process group (torchrun) the ranks share the attacks out, batch by batch, and all return the
    verdict of one process.

    >>> from torch.distributions import Categorical
    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> from advbayes import L2
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> verdict = audit(
    ...     predict, (x, (x[:, 0] < 0).long()), ball=L2(0.5), tier="quick", only=("E1", "E2", "E9")
    ... )
    >>> verdict.level, verdict["E1"].status, verdict["E1"].figures["infeasible"]
    ('D', 'passed', 0)
    """
    progress = distributed.ranks().shown(progress)
    tier, support = _renamed(tier, support, deprecated)
    predict, data, training, train_y = with_estimators(
        predict, data, support.training, support.train_y
    )
    support = support.but(training=training, train_y=train_y)
    case = _case(predict, data, ball, tier, attacks, threat_model, support, claim, certified, seed)
    known = {check.id for check in CHECKS}
    if only is not None and not set(only) <= known:
        raise checks.InputError(f"only must hold ids among {sorted(known, key=_order)}, got {only}")
    if only is None or {"E13", "E20", "E21"} & set(only):
        with distributed.alone():  # to the bit what one process trains
            case.support = controls.with_controls(case, progress=progress)
    found: list[Finding] = []
    with Progress("audit", len(CHECKS), progress) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore", NoGradientWarning)  # E9 says it
        for check in CHECKS:
            if only is not None and check.id not in only:
                if not check.applies(case):
                    continue
                result = Finding(check.id, check.title, "not run", {}, "`only` leaves it out")
            elif check.id in case.budget.left_out and only is None and check.applies(case):
                result = Finding(
                    check.id, check.title, "not run", {}, f"tier {tier!r} leaves it out"
                )
            else:
                result = _run(check, case)
            found.append(replace(result, title=check.title, mandatory=check.mandatory(case)))
            bar.advance(check.id)
    findings = tuple(sorted(found, key=lambda item: _order(item.id)))
    summary: dict[str, Any] = {
        "examples": len(case.x),
        f"clean {case.label}": case.value(case.clean),
    }
    if "columns" in case.memory:
        summary[f"worst {case.label}"] = case.value(case.worst())
    proven, figures = certificate(case, findings, only)
    # a budget of one's own is no tier: its figures say what was spent
    spent = tier if isinstance(tier, str) else "custom"
    return Verdict(findings, spent, proven, summary | figures, describing.notes_on_data(case))


def _run(check: Check, case: Case) -> Finding:
    """The check's finding; where something raises, "not run" with what it said."""
    try:
        return check.run(case)
    except Exception as error:  # whatever a foreign predictor or attack raises
        return Finding(
            check.id,
            check.title,
            "not run",
            {},
            f"{check.id} was cut short by {type(error).__name__}: {error}",
        )


def _renamed(
    tier: str | Budget, support: Support | None, deprecated: dict[str, Any]
) -> tuple[str | Budget, Support]:
    """The keywords of the version before: `budget` is a tier, `batch_size` the tier's, the rest is
    the support's."""
    support = support or Support()
    checks.instance("support", support, Support, "a Support(...)")
    names = {field.name for field in fields(Support)}
    unknown = sorted(deprecated.keys() - names - {"budget", "batch_size"})
    if unknown:
        raise checks.InputTypeError(
            f"audit takes no argument {', '.join(unknown)}; what helps it is "
            f"Support({', '.join(sorted(names))})"
        )
    for name in deprecated:
        new = {"budget": "tier=Budget(...)", "batch_size": "tier=Budget(..., batch_size=...)"}.get(
            name, f"support=Support({name}=...)"
        )
        warnings.warn(
            f"audit({name}=...) will go in the next version: use {new}",
            DeprecationWarning,
            stacklevel=3,
        )
    renamed = {
        name: value for name, value in deprecated.items() if name in names and value is not None
    }
    budget = deprecated.get("budget")
    tier = tier if budget is None else budget
    if "batch_size" in deprecated:
        size = checks.count("batch_size", deprecated["batch_size"])
        tier = replace(TIERS[tier] if isinstance(tier, str) else tier, batch_size=size)
    return tier, support.but(**renamed) if renamed else support


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
    >>> audit_records(
    ...     (x, (x[:, 0] < 0).long()), {"PGD": x + 3}, predict=predict, ball=L2(0.5), only=("E1",)
    ... ).failed
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
            f"passes for each, "
            f"about {self.seconds:,.0f} s; what is broken early costs less, escalation (E6) more"
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
    tier, support = _renamed(
        tier, support, {name: value for name, value in others.items() if name not in same}
    )
    predict, data = with_estimators(predict, data)
    case = _case(predict, data, ball, tier, attacks, None, support, None, None, 0)
    probe = slice(0, min(64, len(case.x)))

    def ask() -> None:
        if case.black_box:
            predict(case.x[probe])
        else:
            loss_and_gradient(predict, nll, case.x[probe], case.y[probe])

    ask()
    began = time.perf_counter()
    ask()
    each = (time.perf_counter() - began) / len(case.x[probe])
    controls_too = support.training is not None and bool(support.lacks_controls)
    size = Size(
        passes=float(sum((steps_of(attack) or 1) for attack in case.attacks.values())),
        attacks=len(case.attacks),
        sources=len(support.siblings) + (support.undefended is not None or controls_too),
        thetas=case.is_bayesian or case.stochastic,
        budget=case.budget,
    )
    costs = {
        check.id: 0.0 if check.id in case.budget.left_out else float(check.cost(size))
        for check in CHECKS
    }
    passes = sum(costs.values())
    trained = controls.training_passes(case) if controls_too else 0.0
    name = tier if isinstance(tier, str) else "custom"
    return Cost(
        name,
        len(case.x),
        passes,
        (passes * len(case.x) + trained) * each,
        costs,
        support.lacks_controls * controls_too,
    )


def _order(id: str) -> int:
    return int(re.sub(r"\D", "", id))


def _case(
    predict: Predictor,
    data: Data,
    ball: Ball,
    tier: str | Budget,
    attacks: Mapping[str, Attack] | None,
    threat_model: ThreatModel | None,
    support: Support,
    claim: Claim | None,
    certified: Certificates | Tensor | None,
    seed: int,
) -> Case:
    """The case: some rows of the data, or those of a claim's arrays."""
    checks.instance("ball", ball, Ball, "a ball such as L2(eps)")
    budget = tier if isinstance(tier, Budget) else TIERS[checks.choice("tier", tier, tuple(TIERS))]
    copies = copies_of(predict, support.factory)  # before anything is asked
    x, y = as_tensors(data, dtype_of(predict))
    ball.check(x)
    rows = (
        torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: budget.num]
        .sort()
        .values
    )
    if claim is not None:  # the arrays are as they were scored
        rows, claim = torch.arange(len(x)), fitted(claim, x)
    task = check_predictor(predict, x[rows][:256], y[rows][:256])
    y = y.reshape(-1).long() if task == "classification" else _as_predicted(predict, x[rows], y)
    radii = None if certified is None else radii_of(certified, len(x), task)
    blind = not gives_gradient(predict, x[rows][:2])
    if claim is None:
        warn_units(ball, x, "ball")
    chosen = named("attacks", attacks)
    if attacks is None and claim is None:
        chosen = default_attacks(ball, task, steps=budget.steps, restarts=budget.restarts)
        if blind:
            chosen = blind_attacks(ball, task, budget.steps, budget.blind_queries or budget.queries)
    if not chosen and claim is None:
        raise checks.InputError("attacks must hold at least one named attack, got none")
    for name, attack in chosen.items():
        if ball_of(attack) is None:
            raise checks.InputTypeError(
                f"attacks[{name!r}] must be a dataclass with a `ball`, got "
                f"{checks.describe(attack)}"
            )
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
        stochastic=is_stochastic(predict, x[rows][:ASKED]),
        black_box=blind and all(isinstance(attack, ANSWERS_ALONE) for attack in chosen.values()),
        copies=copies,
        support=support,
        claim=claim,
        certified=cut(radii, rows),
        seed=checks.count("seed", seed, low=0),
    )
    case.threat_model = _filled(case)
    return case


def _as_predicted(predict: Predictor, x: Tensor, y: Tensor) -> Tensor:
    """Regression targets in the shape of the predictions, so that (N, 1) never meets (N,), and of
    x's dtype."""
    with torch.no_grad():
        prediction = predict(x[:1])
    one = (prediction.batch_shape + prediction.event_shape)[1:]
    return y.reshape(len(y), *one).to(x.dtype)


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

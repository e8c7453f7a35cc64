"""`audit`: run the table of checks. A new check is a function of a Case and one row of CHECKS."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks import Square, loss_and_gradient, margin, nll
from advbayes.attacks.gradients import NoGradientWarning
from advbayes.attacks.parts import ball_of, steps_of
from advbayes.auditing import answers, describing, others, purifier, strength
from advbayes.auditing.case import TIERS, Budget, Case, default_attacks
from advbayes.auditing.certificate import certificate, radii_of
from advbayes.auditing.claim import Claim, Values, fitted
from advbayes.auditing.findings import Finding, Verdict
from advbayes.auditing.threat import ThreatModel, said_by
from advbayes.balls import Ball
from advbayes.evaluation.inputs import ASKED, Data, Task, as_tensors, check_predictor, dtype_of, is_stochastic, warn_units
from advbayes.evaluation.result import Evaluation
from advbayes.evaluation.run import load_evaluation
from advbayes.progress import Progress
from advbayes.types import Attack, Channel, Predictor


@dataclass(frozen=True)
class Size:
    """What the costs are made of: gradient passes of all attacks once, their number, the tier, the sources of transfer."""

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
    applies: Callable[[Case], bool] = lambda case: True  # a tier does not leave out what has nothing to say anyway


# In the order of running: what joins the worst case comes before what is judged against it.
CHECKS: tuple[Check, ...] = (
    Check("E0", "threat model complete", describing.threat_model),
    Check("E1", "feasible", strength.feasible, lambda size: size.passes),
    Check("E2", "null attack", strength.null_attack, lambda size: size.attacks),
    Check("E3", "iterative beats one-step", strength.beats_one_step, lambda size: 2),
    Check("E9", "usable gradients", strength.usable_gradients, lambda size: 2),
    Check("E8", "no silent success", strength.silent_success, lambda size: size.passes * min(1.0, 32 / size.budget.num)),
    Check("E6", "converged in steps", strength.converged_in_steps, lambda size: 2 * size.passes),
    Check("E7", "converged in restarts", strength.converged_in_restarts, lambda size: 2 * size.passes),
    Check("E4", "monotone in eps", strength.monotone, lambda size: 4 * size.passes),
    Check("E5", "unbounded attack wins", strength.unbounded),
    Check("E12", "noise not better", strength.noise_not_better, lambda size: size.budget.random_points),
    Check("E13", "transfer not better", others.transfer, lambda size: size.sources * size.passes),
    Check("E14", "fixed randomness", others.fixed_randomness, lambda size: 2 * size.passes * size.thetas),
    Check("E15", "two knowledge levels", others.two_knowledge_levels),
    Check(
        "E10",
        "enough thetas in the attack",
        others.enough_thetas,
        lambda size: 3 * size.passes * size.thetas,
        applies=lambda case: case.is_bayesian,
    ),
    Check("E23", "adaptive attack on a purifier", purifier.adaptive_attacks, mandatory=lambda case: case.is_purifier),
    Check("E24", "effective sample size", purifier.effective_sample_size, mandatory=lambda case: case.is_purifier),
    Check("E11", "black box not better", others.black_box, lambda size: size.budget.queries),
    Check("E16", "two losses through the predictive", describing.two_losses, lambda size: 1),
    Check("E17", "worst-case column", describing.worst_column),
    Check("E18", "stochastic re-scoring", describing.rescoring),
    Check("E19", "the attack itself", answers.attack_itself, lambda size: 0.5 * size.passes),
    Check("E20", "undefended control", answers.undefended_control, lambda size: size.passes * (size.sources > 0)),
    Check("E21", "credible baseline", answers.credible_baseline),
    Check("E22", "trivial predictors", answers.trivial_predictors),
    Check("E25", "statistics", describing.statistics, mandatory=lambda case: False),
    Check("E26", "attack on the score", describing.attack_on_score, mandatory=lambda case: case.detector is not None),
    Check("E27", "re-scorable", describing.rescorable, lambda size: size.attacks),
    Check("E30", "unseen family", describing.unseen_family),
)


def audit(
    predict: Predictor,
    data: Data,
    *,
    ball: Ball,
    tier: str = "standard",
    attacks: Mapping[str, Attack] | None = None,
    threat_model: ThreatModel | None = None,
    claim: Claim | None = None,
    evaluation: Evaluation | str | Path | None = None,
    undefended: Predictor | None = None,
    siblings: Mapping[str, Predictor] | None = None,
    control_ball: Ball | None = None,
    baseline: Predictor | None = None,
    published: tuple[float, float] | None = None,
    dataset: str = "",
    fresh: Any = None,
    unpurified: Predictor | None = None,
    purifier_attacks: Mapping[str, Attack] | None = None,
    channel: Channel | None = None,
    black_box: Attack | None = None,
    detector: str | None = None,
    num_seeds: int | None = None,
    certified: Tensor | None = None,
    better: bool = False,
    train_y: Tensor | None = None,
    only: tuple[str, ...] | None = None,
    budget: Budget | None = None,
    batch_size: int = 256,
    seed: int = 0,
    progress: bool | None = None,
) -> Verdict:
    """May the robustness of `predict` within `ball` be believed? Checks E0 to E30, each with its figure, and a level A to D.

    `attacks` (absent: APGD on two losses) are those whose numbers are to be believed. What a check needs and was not given
    leaves it "not run": `fresh` (a FreshPredictive, or a predictor with `with_thetas(num)`) for E10, E14 and E15;
    `undefended` and `siblings` for E13 and E20 (at `control_ball` where `ball` is too small to break it); the training
    `channel` for E30; an `evaluation` on disk for E27; `baseline` for E21. `claim` holds somebody's arrays and scores: then
    theirs are judged, not ours. `certified` holds certified radii in the ball's norm, one for each example of `data`; they
    give level A where the certified accuracy at eps is no less than the worst case. `better` says that the row is claimed to
    beat others. `only` picks checks by id; the others count as not run.

    >>> from torch.distributions import Categorical
    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> from advbayes import L2
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> verdict = audit(predict, (x, (x[:, 0] < 0).long()), ball=L2(0.5), tier="quick", only=("E1", "E2", "E9"))
    >>> verdict.level, verdict["E1"].status, verdict["E1"].figures["infeasible"]
    ('D', 'passed', 0)
    """
    case = _case(
        predict,
        data,
        ball,
        tier,
        attacks,
        threat_model,
        claim,
        budget,
        batch_size,
        seed,
        fresh,
        {
            "evaluation": load_evaluation(evaluation) if isinstance(evaluation, (str, Path)) else evaluation,
            "undefended": undefended,
            "siblings": _named("siblings", siblings),
            "control_ball": control_ball,
            "baseline": baseline,
            "published": published,
            "dataset": dataset,
            "unpurified": unpurified,
            "purifier_attacks": _named("purifier_attacks", purifier_attacks),
            "channel": channel,
            "black_box": black_box,
            "detector": detector,
            "num_seeds": num_seeds,
            "better": better,
            "train_y": train_y,
        },
        certified=certified,
    )
    known = {check.id for check in CHECKS}
    if only is not None and not set(only) <= known:
        raise ValueError(f"only must hold ids among {sorted(known, key=_order)}, got {only}")
    found = []
    with Progress("audit", len(CHECKS), progress) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore", NoGradientWarning)  # E9 says it
        for check in CHECKS:
            if only is not None and check.id not in only:
                if not check.applies(case):
                    continue
                result = Finding(check.id, check.title, "not run", {}, "`only` leaves it out")
            elif check.id in case.budget.left_out and only is None and check.applies(case):
                result = Finding(check.id, check.title, "not run", {}, f"tier {tier!r} leaves it out")
            else:
                result = check.run(case)
            found.append(replace(result, title=check.title, mandatory=check.mandatory(case)))
            bar.advance(check.id)
    summary: dict[str, Any] = {"examples": len(case.x), f"clean {case.label}": case.value(case.clean)}
    if "columns" in case.memory:
        summary[f"worst {case.label}"] = case.value(case.worst())
    proven, figures = certificate(case)
    if figures:
        summary |= {f"worst {case.label}": case.value(case.worst()), **figures}
    spent = tier if budget is None else "custom"  # a budget of one's own is no tier: its figures say what was spent
    return Verdict(tuple(sorted(found, key=lambda item: _order(item.id))), spent, proven, summary)


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
    """Judge somebody's arrays (or tensors) and scores: E1, E12, E16, E17, E22, E27 and whatever `options` (as in `audit`) allow.

    >>> from torch.distributions import Categorical
    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> from advbayes import L2
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> audit_records((x, (x[:, 0] < 0).long()), {"PGD": x + 3}, predict=predict, ball=L2(0.5), only=("E1",)).failed
    ('E1',)
    """
    given: Any = {"x_adv": x_adv, "correct": correct, "log_prob": log_prob, "worst": worst}  # Claim makes tensors of arrays
    claim = Claim(**{name: value for name, value in given.items() if value is not None})
    return audit(predict, data, ball=ball, claim=claim, attacks=options.pop("attacks", {}), **options)


@dataclass(frozen=True)
class Cost:
    """What an audit will take: passes through the predictor, in all and by check, and an estimate of the seconds."""

    tier: str
    examples: int
    passes: float
    seconds: float
    by_check: dict[str, float]

    def __str__(self) -> str:
        return (
            f"audit ({self.tier}): {self.examples} examples, about {self.passes:,.0f} passes for each, "
            f"about {self.seconds:,.0f} s; what is broken early costs less, escalation (E6) more"
        )


def audit_cost(
    predict: Predictor,
    data: Data,
    *,
    ball: Ball,
    tier: str = "standard",
    attacks: Mapping[str, Attack] | None = None,
    undefended: Predictor | None = None,
    siblings: Mapping[str, Predictor] | None = None,
    fresh: Any = None,
    budget: Budget | None = None,
    **_: Any,
) -> Cost:
    """The cost of `audit` with the same arguments, from one timed pass.

    >>> from torch.distributions import Categorical
    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> from advbayes import L2
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> audit_cost(predict, (x, (x[:, 0] < 0).long()), ball=L2(0.5), tier="quick").examples
    40
    """
    case = _case(predict, data, ball, tier, attacks, None, None, budget, 256, 0, fresh, {})
    probe = slice(0, min(64, len(case.x)))
    loss_and_gradient(predict, nll, case.x[probe], case.y[probe])
    began = time.perf_counter()
    loss_and_gradient(predict, nll, case.x[probe], case.y[probe])
    each = (time.perf_counter() - began) / len(case.x[probe])
    size = Size(
        passes=float(sum((steps_of(attack) or 1) for attack in case.attacks.values())),
        attacks=len(case.attacks),
        sources=len(siblings or {}) + (undefended is not None),
        thetas=case.is_bayesian or case.stochastic,
        budget=case.budget,
    )
    costs = {check.id: 0.0 if check.id in case.budget.left_out else float(check.cost(size)) for check in CHECKS}
    passes = sum(costs.values())
    return Cost(tier, len(case.x), passes, passes * len(case.x) * each, costs)


def _order(id: str) -> int:
    return int(re.sub(r"\D", "", id))


def _case(
    predict: Predictor,
    data: Data,
    ball: Ball,
    tier: str,
    attacks: Mapping[str, Attack] | None,
    threat_model: ThreatModel | None,
    claim: Claim | None,
    budget: Budget | None,
    batch_size: int,
    seed: int,
    fresh: Any,
    options: dict[str, Any],
    certified: Any = None,
) -> Case:
    """The case: some rows of the data, or those of a claim's arrays."""
    if not isinstance(ball, Ball):
        raise TypeError(f"ball must be a ball such as L2(eps), got {checks.describe(ball)}")
    budget = TIERS[checks.choice("tier", tier, tuple(TIERS))] if budget is None else budget
    x, y = as_tensors(data, dtype_of(predict))
    ball.check(x)
    task = check_predictor(predict, x[:256], y[:256])
    y = y.reshape(-1).long() if task == "classification" else _as_predicted(predict, x, y)
    radii = None if certified is None else radii_of(certified, len(x), task)
    if claim is None:
        warn_units(ball, x, "ball")
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: budget.num].sort().values
    else:  # the arrays are as they were scored
        rows = torch.arange(len(x))
        claim = fitted(claim, x)
    given = default_attacks(ball, task, budget) if attacks is None and claim is None else _named("attacks", attacks)
    if not given and claim is None:
        raise ValueError("attacks must hold at least one named attack, got none")
    for name, attack in given.items():
        if ball_of(attack) is None:
            raise TypeError(f"attacks[{name!r}] must be a dataclass with a `ball`, got {checks.describe(attack)}")
    stochastic = is_stochastic(predict, x[:ASKED])
    case = Case(
        predict=predict,
        x=x[rows],
        y=y[rows],
        ball=ball,
        task=task,
        budget=budget,
        attacks=given,
        threat_model=threat_model or ThreatModel(),
        stochastic=stochastic,
        seed=checks.count("seed", seed, low=0),
        batch_size=checks.count("batch_size", batch_size),
        claim=claim,
        fresh=fresh,
        radii=None if radii is None else radii[rows],
        **options,
    )
    case.threat_model = _filled(case, task)
    if case.black_box is None and "E11" not in budget.left_out:
        case.black_box = Square(ball, budget.queries, margin if task == "classification" else nll)
    return case


def _named(argument: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{argument} must be a mapping from names, such as {{'PGD': ...}}, got {checks.describe(given)}")
    return dict(given or {})


def _as_predicted(predict: Predictor, x: Tensor, y: Tensor) -> Tensor:
    """Regression targets in the shape of the predictions, so that (N, 1) never meets (N,), and of x's dtype."""
    with torch.no_grad():
        prediction = predict(x[:1])
    one = (prediction.batch_shape + prediction.event_shape)[1:]
    return y.reshape(len(y), *one).to(x.dtype)


def _filled(case: Case, task: Task) -> ThreatModel:
    """What the ball, the attacks and the predictor say by themselves; a claim must speak for its own thetas."""
    model = case.threat_model.filled(**said_by(case.ball, case.attacks))
    if not case.is_bayesian:
        return model.filled(
            knowledge="no thetas",
            attack_thetas=0,
            evaluation_thetas=0,
            randomness="fresh" if case.stochastic else "none",
        )
    if case.claim is not None:
        return model
    both = "thetas known and fresh" if case.fresh is not None else "thetas known"
    return model.filled(
        knowledge=both,
        attack_thetas=case.num_thetas or getattr(case.fresh, "num", None),
        evaluation_thetas=case.num_thetas,
        randomness="fresh" if case.stochastic else "fixed",
    )

"""Checks of what is said about an evaluation: E0, E16, E17, E18, E25, E26, E27, E30."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from advbayes import metrics
from advbayes.attacks.balls import Ball
from advbayes.attacks.parts import ball_of, family_of, loss_names
from advbayes.auditing.case import Case, Frozen
from advbayes.auditing.claim import Claim, said_by
from advbayes.auditing.copies import rows_of
from advbayes.auditing.findings import Finding, check, judged, no_attacks, not_applicable, not_run
from advbayes.auditing.remembering import BY_CHANCE
from advbayes.channels import AttackChannel, Learned, Mixture
from advbayes.evaluation.files import Folder, data_hash
from advbayes.evaluation.inputs import check_units, softmaxed_twice
from advbayes.evaluation.result import CLEAN, Cell, Evaluation
from advbayes.evaluation.run import rescore
from advbayes.evaluation.scoring import Columns, worst
from advbayes.likelihoods import predicts_classes
from advbayes.types import Channel

MARGINS, ERRORS = {"margin", "dlr", "MarginTo"}, {"squared_error"}
NOTHING: tuple[Any, ...] = (None, "", {}, [])  # what a saved setting must not be
SCORES = {"entropy": {"entropy", "certainty"}}  # a detector's score -> the losses that attack it


@check("E0", "threat model complete")
def threat_model(case: Case) -> Finding:
    """E0: everything is said, and what is said is what was run."""
    said = case.threat_model
    missing, wrong = said.missing(), _contradictions(case)
    advice = "; ".join([f"say {', '.join(missing)}"] * bool(missing) + wrong)
    figures = {"missing": len(missing), "contradictions": len(wrong)}
    return judged(bool(missing or wrong), advice, **figures, eps=said.eps, units=said.units)


def _contradictions(case: Case) -> list[str]:
    """Where the threat model, the ball, the attacks and the arrays speak of different units."""
    said, ball = case.threat_model, case.ball
    faults = []
    if said.norm != type(ball).__name__:
        faults.append(f"the norm is said to be {said.norm}, but the ball is {ball}")
    if said.eps is not None and abs(said.eps - ball.eps) > 1e-6 * ball.eps:
        faults.append(f"eps is said to be {said.eps:g}, but the ball has {ball.eps:g}")
    if said.units == "raw" and ball.scale is not None:
        faults.append("eps is said to be in raw units, but the ball measures in units of its scale")
    for name, attack in case.attacks.items():
        other = ball_of(attack)
        if other is None:
            continue
        if type(other) is not type(ball):
            faults.append(f"{name} stays in {other}, the ball is {ball}")
        elif (reaches := _reaches(other, ball, case.x[0])) is not None:
            there, here = reaches
            faults.append(f"{name} reaches {there:.3g} in the units of x, the ball {here:.3g}")
        elif _is_kept_from(other, ball, case.x):
            faults.append(f"{name} is kept from what the ball allows by its box or its mask")
    if said.box == "none" and ball.box is not None:
        faults.append(f"no box is said, but the ball is {ball}")
    run = said_by(ball, case.attacks)
    for what in ("steps", "restarts"):
        most, stated = run[what], vars(said)[what]
        if most is not None and stated is not None and stated > most:
            faults.append(f"{what} are said to be {stated}, but the attacks take {most}")
    if units := check_units(ball, case.x):
        faults.append(units)
    if case.claim is not None and ball.eps > 0:
        norms = (ball.norm(x_adv - case.x) for x_adv in case.claim.x_adv.values())
        largest = max(float(norm.nan_to_num(torch.inf).max()) for norm in norms)
        if largest < 0.5 * ball.eps:
            faults.append(
                f"no scored point comes nearer to the edge than {largest:.3g} of eps = "
                f"{ball.eps:g}; other units?"
            )
    return faults


def _reaches(inner: Ball, ball: Ball, x: Tensor) -> tuple[float, float] | None:
    """How far the two go in the feature in which they differ most, in the units of x; None where
    they go equally far, to a thousandth, in all that the attacker may change.

    >>> from advbayes import L2
    >>> _reaches(L2(1.0, scale=torch.tensor([2.0, 0.5])), L2(1.0), torch.zeros(2))
    (2.0, 1.0)
    """
    there, here = (
        (torch.ones_like(x) * each.units(x) * each.eps).double() for each in (inner, ball)
    )
    off = (there - here).abs() / here.clamp_min(torch.finfo(x.dtype).tiny)
    off = off if ball.mask is None else torch.where(ball.mask.to(x.device), off, 0.0)
    most = off.argmax()
    if float(off.flatten()[most]) <= 1e-3:
        return None
    return float(there.flatten()[most]), float(here.flatten()[most])


def _is_kept_from(inner: Ball, ball: Ball, x: Tensor) -> bool:
    """Whether one ball, by its box, mask or indicators, forbids what another allows.

    >>> from advbayes import L2
    >>> _is_kept_from(L2(1.0, box=(0.2, 1.0)), L2(1.0, box=(0.0, 1.0)), torch.zeros(1, 3))
    True
    """
    far = torch.inf * torch.ones_like(x[:1])
    tighter = any(not torch.equal(inner.clip(edge), edge) for edge in map(ball.clip, (-far, far)))
    every = torch.ones_like(x, dtype=torch.bool)
    free, allowed = (each.within_reach(every, x) for each in (inner, ball))
    return tighter or bool((allowed & ~free).any())


def _losses(case: Case) -> set[str]:
    return {name for attack in case.attacks.values() for name in loss_names(attack)}


@check("E16", "two losses through the predictive", cost=lambda case: 1)
def two_losses(case: Case) -> Finding:
    """E16: log-mean-exp NLL and a margin loss, and probabilities soft-maxed once."""
    if case.black_box:
        return not_applicable("there is no gradient for a loss to be pulled through")
    with torch.no_grad():
        prediction = Frozen(case.predict, case.seed)(case.x)
    figures: dict[str, float] = {}
    if predicts_classes(prediction):
        figures["largest_confidence"] = float(prediction.probs.max())
        if softmaxed_twice(prediction.logits, case.y):
            advice = "give logits or log-probabilities to Categorical(logits=...), no probabilities"
            return judged(True, advice, **figures)
    said = (case.threat_model.loss or "").split(",")
    names = _losses(case) | {name.strip() for name in said if name.strip()}
    if not names:
        return not_run("give the attacks, or say their losses in ThreatModel(loss=...)")
    classes = case.task == "classification"
    other, wanted = ("a margin loss", MARGINS) if classes else ("the squared error", ERRORS)
    advice = f"attack through the predictive with both its NLL and {other}"
    bad = "nll" not in names or not names & wanted
    return judged(bad, advice, losses=", ".join(sorted(names)), **figures)


@check("E17", "worst-case column")
def worst_column(case: Case) -> Finding:
    """E17: a worst-case column that is nowhere above the least of the attacks, example by example,
    when they are scored again."""
    if case.claim is None:
        value, least = case.value(case.worst()), min(map(case.value, case.columns().values()))
        advice = "take the union per example"
        return judged(value > least + 1e-9, advice, worst=value, least_attack=least)
    if case.task == "regression":
        return not_applicable("a claim has no worst-case column of errors")
    if case.claim.worst is None:
        advice = "add the worst case over attacks, example by example"
        return judged(True, advice, claimed_worst="absent")
    claimed = case.claim.worst.double().cpu()
    union = worst(list(case.columns().values()), case.task)["correct"]
    # a stochastic predictor may differ on points near the edge
    doubt, allowed = (0.5, edge(case.claim) * len(claimed)) if case.stochastic else (0.0, 0.0)
    better = int((claimed > union + doubt + 1e-9).sum())
    least = min((case.claim.accuracy(name) for name in case.claim.correct), default=1.0)
    value = float(claimed.mean())
    figures = {"claimed_worst": value, "recomputed_worst": float(union.mean())}
    advice = "take the union per example, of the arrays as they are scored"
    bad = better > allowed or value > least + 1e-9
    return judged(bad, advice, **figures, better_than_the_union=better)


@check("E18", "stochastic re-scoring")
def rescoring(case: Case) -> Finding:
    """E18: ten scorings of each final point when the predictor is stochastic."""
    if not case.stochastic:
        return not_applicable("the predictor answers the same twice")
    num = case.claim.rescored if case.claim is not None else case.rescored
    advice = "score each final point at least 10 times with fresh randomness"
    return judged(num < 10, advice, scorings=num)


@check("E25", "statistics", mandatory=lambda case: False)
def statistics(case: Case) -> Finding:
    """E25: five training seeds behind a compared row, and "better" only where paired tests (Holm)
    say so.

    The intervals are the tables' own: every proportion carries Wilson's.
    """
    support, report = case.support, case.support.saved
    if support.num_seeds is None:
        return not_run("say how many training seeds are behind the row in Support(num_seeds=...)")
    bad = [] if support.num_seeds >= 5 else ["train with at least 5 seeds before comparing"]
    figures: dict[str, float] = {"seeds": support.num_seeds}
    if support.better and report is not None and case.task == "classification":
        names = [name for name in report.predictors if name not in report.trivial]
        first, *rivals = [report.columns(name)["correct"] > 0.5 for name in names]
        adjusted = metrics.holm([metrics.mcnemar(first, rival) for rival in rivals])
        largest = figures["largest adjusted p"] = max(adjusted, default=0.0)
        bad += ["it is not significantly the best: do not set it in bold"] * (largest >= 0.05)
    return judged(bool(bad), "; ".join(bad), **figures)


@check("E26", "attack on the score", mandatory=lambda case: case.support.detector is not None)
def attack_on_score(case: Case) -> Finding:
    """E26: a detector meets an attack on its own score."""
    detector = case.support.detector
    if detector is None:
        return not_applicable("there is no detector")
    names = _losses(case)
    advice = f"add an attack on {detector} itself, in both directions"
    figures = {"detector": detector, "losses": ", ".join(sorted(names))}
    return judged(not SCORES.get(detector, {detector}) & names, advice, **figures)


@check("E27", "re-scorable", cost=lambda case: len(case.attacks))
def rescorable(case: Case) -> Finding:
    """E27: arrays, seeds, config and code hash are kept, of these data and in this ball, and give
    the same table again."""
    if case.claim is not None:
        return _rescored_claim(case, case.claim)
    report = case.support.saved
    if report is None or report.folder is None:
        return not_run("give Support(evaluation=...), made with evaluate(..., out=folder)")
    config = Folder(report.folder).config()
    absent = [name for name in ("seed", "code", "attacks", "data") if config.get(name) in NOTHING]
    if absent:
        return judged(True, f"save {', '.join(absent)}", missing=", ".join(absent))
    if faults := _elsewhere(case, report, Folder(report.folder)):
        return judged(True, "; ".join(faults), of_other_data_or_ball=len(faults))
    elsewhere: list[str] = []
    changed, total, drift = 0, 0, 0.0
    # what draws from a source of its own may differ on points near the edge
    doubt = 0.0 if case.can_be_fixed else 0.5
    for cell, rows in rescore(report.folder, case.predict).cells.items():
        saved = report.cells[cell]
        total += len(rows["log_prob"])
        if case.task == "classification":
            changed += int(((saved["correct"] - rows["correct"]).abs() > doubt).sum())
        if case.can_be_fixed:
            drift = max(drift, *(_drift(name, saved[name], rows[name]) for name in rows))
        elif case.task == "regression":
            elsewhere += [cell.attack] * _is_elsewhere(saved, rows)
    advice = "the files and the table disagree: model or arrays are not those that were scored"
    bad = changed > (0 if case.can_be_fixed else 0.05 * total) or drift > 1e-3
    figures: dict[str, Any] = {"changed": changed, "largest_drift": drift}
    figures |= {"other errors": ", ".join(elsewhere)} if elsewhere else {}
    return judged(bad or bool(elsewhere), advice, **figures)


def _drift(name: str, saved: Tensor, again: Tensor) -> float:
    """The largest change in a column: of log-probabilities in nats, else of the mean value."""
    off = float((saved - again).abs().max())
    return off if name.startswith("log_prob") else off / max(float(again.abs().mean()), 1e-12)


def _is_elsewhere(saved: Columns, again: Columns) -> bool:
    """Whether squared errors with randomness of their own are others on average: by more than a
    twentieth, and beyond chance (0.1 %, a paired bootstrap)."""
    first, second = saved["squared_error"], again["squared_error"]
    apart = metrics.paired_difference(first, second, level=1 - BY_CHANCE)
    return abs(apart.value) > 0.05 * float(second.mean()) and not apart.low <= 0 <= apart.high


def _elsewhere(case: Case, report: Evaluation, folder: Folder) -> list[str]:
    """Where a saved evaluation is not of the data and the ball that are audited."""
    ball, faults = case.ball, []
    if float(ball.eps) not in report.radii:
        faults.append(f"the evaluation has eps {report.radii}, the ball {ball.eps:g}")
    norm, texts = type(ball).__name__, report.config.get("attacks", {})
    if not any(f"{norm}(" in text for text in texts.values()):
        faults.append(f"no attack of the evaluation stays in a ball of the norm {norm}")
    first = Cell(report.predictors[0], CLEAN, 0.0)
    clean = [block for block, _ in folder.saved() if block.cell == first]
    here = set(rows_of(case.whole[0]))
    there = {row for block in clean for row in rows_of(folder.read_array(block)[0])}
    if not there <= here and not here <= there:
        faults.append(
            f"{len(there - here)} of the evaluation's {len(there)} inputs are not among the "
            f"{len(here)} audited ones"
        )
    return faults


def _rescored_claim(case: Case, claim: Claim) -> Finding:
    wanted = {
        "seed": claim.seed,
        "config": claim.config,
        "code hash": claim.code,
        "scores": claim.correct or claim.log_prob,
        "size and hash of the whole test set (test_size, test_hash)": claim.test_size
        and claim.test_hash,
    }
    absent = [name for name, value in wanted.items() if value is None or value == {}]
    what, held = ("the correctness", claim.correct)
    if case.task == "regression" or not claim.correct:
        what, held = ("the log-probabilities", claim.log_prob)
    absent += [f"{what} of {name}" for name in claim.x_adv if held and name not in held]
    # a stochastic predictor may differ on points near the edge
    doubt, allowed = (0.5, edge(claim)) if case.stochastic else (0.0, 0.0)
    changed, total, drift = 0, 0, 0.0
    accuracies: dict[str, float] = {}
    bad = []
    for name, correct in claim.correct.items():
        again = case.columns()[name]["correct"]
        off = (again - correct.double().cpu()).abs() > doubt
        changed, total = changed + int(off.sum()), total + len(off)
        accuracies[f"claimed {name}"] = claim.accuracy(name)
        accuracies[f"recomputed {name}"] = float(again.mean())
        if case.stochastic and (p := _by_luck(case, claim, name)) < BY_CHANCE / len(claim.correct):
            bad.append(f"so much more than is recomputed for {name} is no luck (p = {p:.2g})")
    for name, value in claim.log_prob.items():
        off = (case.columns()[name]["log_prob"] - value.double().cpu()).abs()
        drift = max(drift, float(off.max()))
    figures: dict[str, Any] = {"changed": changed, "of": total, "largest_drift": drift}
    figures |= accuracies
    if changed > allowed * total or (drift > 1e-3 and not case.stochastic):
        bad.append(
            "scoring the saved arrays again changes the table: this is not the model that was "
            "scored"
        )
    if claim.test_size is not None and claim.test_size < len(case.x):
        said = f"the test set is said to hold {claim.test_size} examples"
        bad.append(f"{said}, but {len(case.x)} are scored")
    whole = claim.test_size is not None and claim.test_size <= len(case.x)
    if whole and claim.test_hash != data_hash(*case.whole):
        bad.append(
            f"the {len(case.x)} examples are said to be the whole test set, but its hash is another"
        )
    if absent:
        figures["missing"] = ", ".join(absent)
        bad.append(f"save {', '.join(absent)} with the arrays")
    return judged(bool(bad), "; ".join(bad), **figures)


def edge(claim: Claim) -> float:
    """The share of examples on which two scorings of the same points may be half apart, as those
    near the edge of a class are: fewer if each is the mean of ten."""
    return 0.05 if claim.rescored < 10 else 0.02


def _by_luck(case: Case, claim: Claim, name: str) -> float:
    """p of an accuracy as high as the claimed one, of a stochastic predictor that is asked again:
    a t-test against as many single calls as the audit scores with. One example more or less is
    within the resolution."""
    points = case.usable(claim.x_adv[name])
    calls = [
        case.value(case.scored(points, f"again {name} {call}", by=case.predict))
        for call in range(case.rescored)
    ]
    again = torch.tensor(calls, dtype=torch.float64)
    said = torch.full_like(again, claim.accuracy(name) - 1 / len(case.x))
    return metrics.paired_t(again, said, overlap=1 / max(1, claim.rescored))


def notes_on_data(case: Case) -> tuple[str, ...]:
    """What a reader should know of the examples: repeated ones, a selection, none that is wrong."""
    num, rows = len(case.whole[0]), set(rows_of(case.whole[0]))
    repeated, seen = num - len(rows), len(rows.intersection(rows_of(case.known)))
    notes = [f"{repeated} of {num} rows are duplicates"] * bool(repeated)
    notes += [f"{seen} of {num} rows are among the training data"] * bool(seen)
    if case.task == "classification" and float(case.clean["correct"].mean()) == 1.0:
        notes.append("a clean accuracy of exactly 1: were the examples chosen?")
    size = None if case.claim is None else case.claim.test_size
    if size is not None and size > len(case.x):
        notes.append(f"{len(case.x)} of the {size} examples of the test set: a selection")
    if case.black_box:
        notes.append("black-box mode: there is no gradient, the attacks ask for answers alone")
    return tuple(notes)


@check("E30", "unseen family")
def unseen_family(case: Case) -> Finding:
    """E30: some attack has a loss or step rule that the training channel has not."""
    if case.support.channel is None:
        return not_run("give Support(channel=...), the training's (Noise(0) for none)")
    if not case.attacks:
        return no_attacks()
    trained_on = _attacks_in(case.support.channel)
    seen, used = (
        {family for attack in attacks for family in family_of(attack)}
        for attacks in (trained_on, case.attacks.values())
    )
    advice = "add an attack whose loss or step rule the training never used"
    return judged(not used - seen, advice, unseen=len(used - seen), used=len(used))


def _attacks_in(channel: Channel) -> list[object]:
    match channel:
        case Mixture():
            return [attack for part in channel.channels for attack in _attacks_in(part)]
        case AttackChannel():
            return [channel.attack]
        case Learned():
            return [channel]
    return []

"""Checks of what is said about an evaluation: E0, E16, E17, E18, E25, E26, E27, E30."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advbayes import metrics
from advbayes.attacks.balls import Ball
from advbayes.attacks.parts import ball_of, family_of, loss_names
from advbayes.auditing.case import Case, finding, judged, not_applicable, not_run
from advbayes.auditing.findings import Finding
from advbayes.channels import AttackChannel, Learned, Mixture
from advbayes.evaluation.files import Folder, data_hash
from advbayes.evaluation.inputs import check_units, softmaxed_twice
from advbayes.evaluation.result import CLEAN, Evaluation
from advbayes.evaluation.run import rescore, saved_blocks
from advbayes.evaluation.scoring import worst
from advbayes.likelihoods import predicts_classes
from advbayes.types import Channel

MARGINS = {"margin", "dlr", "MarginTo"}
SCORES = {"entropy": {"entropy", "certainty"}}  # a detector's score -> the losses that attack it


def threat_model(case: Case) -> Finding:
    """E0: everything is said, and what is said is what was run."""
    said = case.threat_model
    missing = said.missing()
    wrong = _contradictions(case)
    advice = "; ".join([f"say {', '.join(missing)}"] * bool(missing) + wrong)
    return judged(
        "E0",
        bool(missing or wrong),
        advice,
        missing=len(missing),
        contradictions=len(wrong),
        eps=said.eps,
        units=said.units,
    )


def _contradictions(case: Case) -> list[str]:
    """Where the threat model, the ball, the attacks and the arrays speak of different units."""
    said, ball = case.threat_model, case.ball
    faults = (
        []
        if said.norm == type(ball).__name__
        else [f"the norm is said to be {said.norm}, but the ball is {ball}"]
    )
    if said.eps is not None and abs(said.eps - ball.eps) > 1e-6 * ball.eps:
        faults.append(f"eps is said to be {said.eps:g}, but the ball has {ball.eps:g}")
    if said.units == "raw" and ball.scale is not None:
        faults.append("eps is said to be in raw units, but the ball measures in units of its scale")
    for name, attack in case.attacks.items():
        other = ball_of(attack)
        if other is not None and abs(_reach(other) - _reach(ball)) > 1e-3 * _reach(ball):
            faults.append(
                f"{name} reaches {_reach(other):.3g} in the units of x, eps = {ball.eps:g} "
                f"reaches {_reach(ball):.3g}"
            )
    units = check_units(ball, case.x)
    if units:
        faults.append(units)
    if case.claim is not None and ball.eps > 0:
        largest = max(
            float(ball.norm(x_adv - case.x).nan_to_num(torch.inf).max())
            for x_adv in case.claim.x_adv.values()
        )
        if largest < 0.5 * ball.eps:
            faults.append(
                f"no scored point comes nearer to the edge than {largest:.3g} of eps = "
                f"{ball.eps:g}; other units?"
            )
    return faults


def _reach(ball: Ball) -> float:
    """How far eps goes in one feature, averaged over features, in the units of x."""
    scale = torch.ones(()) if ball.scale is None else torch.as_tensor(ball.scale)
    return float(ball.eps) * float(scale.double().mean())


def two_losses(case: Case) -> Finding:
    """E16: log-mean-exp NLL and a margin loss, and probabilities soft-maxed once."""
    if case.black_box:
        return not_applicable("E16", "there is no gradient for a loss to be pulled through")
    with torch.no_grad():
        prediction = case.predict(case.x)
    twice = predicts_classes(prediction) and softmaxed_twice(prediction.logits, case.y)
    names = {name for attack in case.attacks.values() for name in loss_names(attack)}
    names |= {name.strip() for name in (case.threat_model.loss or "").split(",") if name.strip()}
    top = float(prediction.probs.max()) if predicts_classes(prediction) else None
    if twice:
        advice = "give logits or log-probabilities to Categorical(logits=...), not probabilities"
        return finding("E16", "failed", advice, largest_confidence=top)
    if not names:
        return not_run("E16", "give the attacks, or say their losses in ThreatModel(loss=...)")
    wanted = "nll" in names and (
        bool(names & MARGINS) if case.task == "classification" else "squared_error" in names
    )
    other = "a margin loss" if case.task == "classification" else "the squared error"
    advice = f"attack through the predictive with both its NLL and {other}"
    return judged(
        "E16", not wanted, advice, losses=", ".join(sorted(names)), largest_confidence=top
    )


def worst_column(case: Case) -> Finding:
    """E17: a worst-case column that is nowhere above the least of the attacks, example by example,
    when they are scored again."""
    if case.claim is None:
        value, least = case.value(case.worst()), min(map(case.value, case.columns().values()))
        return judged(
            "E17",
            value > least + 1e-9,
            "take the union per example",
            worst=value,
            least_attack=least,
        )
    if case.task == "regression":
        return not_applicable("E17", "a claim has no worst-case column of errors")
    if case.claim.worst is None:
        return finding(
            "E17",
            "failed",
            "add the worst case over attacks, example by example",
            claimed_worst="absent",
        )
    claimed = case.claim.worst.double().cpu()
    union = worst(list(case.columns().values()), case.task)["correct"]
    # a stochastic predictor may differ on points near the edge
    doubt = 0.5 if case.stochastic else 0.0
    better = int((claimed > union + doubt + 1e-9).sum())
    said = [case.claim.accuracy(name) for name in case.claim.correct]
    value, again = float(claimed.mean()), float(union.mean())
    bad = (
        better > (0.05 * len(claimed) if case.stochastic else 0)
        or value > min(said, default=1.0) + 1e-9
    )
    advice = "take the union per example, of the arrays as they are scored"
    return judged(
        "E17",
        bad,
        advice,
        claimed_worst=value,
        recomputed_worst=again,
        better_than_the_union=better,
    )


def rescoring(case: Case) -> Finding:
    """E18: ten scorings of each final point when the predictor is stochastic."""
    if not case.stochastic:
        return not_applicable("E18", "the predictor answers the same twice")
    num = case.claim.rescored if case.claim is not None else case.rescored
    return judged(
        "E18",
        num < 10,
        "score each final point at least 10 times with fresh randomness",
        scorings=num,
    )


def statistics(case: Case) -> Finding:
    """E25: five training seeds behind a compared row, and "better" only where paired tests (Holm)
    say so.

    The intervals are the tables' own: every proportion carries Wilson's.
    """
    if case.support.num_seeds is None:
        return not_run(
            "E25", "say how many training seeds are behind the row in Support(num_seeds=...)"
        )
    bad = [] if case.support.num_seeds >= 5 else ["train with at least 5 seeds before comparing"]
    figures: dict[str, float] = {"seeds": case.support.num_seeds}
    report = case.support.evaluation
    if case.support.better and isinstance(report, Evaluation) and case.task == "classification":
        own, *rivals = [name for name in report.predictors if name not in report.trivial]
        pairs = [
            (report.columns(own)["correct"] > 0.5, report.columns(name)["correct"] > 0.5)
            for name in rivals
        ]
        adjusted = metrics.holm([metrics.mcnemar(first, second) for first, second in pairs])
        figures["largest adjusted p"] = max(adjusted, default=0.0)
        bad += ["it is not significantly the best: do not set it in bold"] * (
            figures["largest adjusted p"] >= 0.05
        )
    return judged("E25", bool(bad), "; ".join(bad), **figures)


def attack_on_score(case: Case) -> Finding:
    """E26: a detector meets an attack on its own score."""
    if case.support.detector is None:
        return not_applicable("E26", "there is no detector")
    wanted = SCORES.get(case.support.detector, {case.support.detector})
    names = {name for attack in case.attacks.values() for name in loss_names(attack)}
    advice = f"add an attack on {case.support.detector} itself, in both directions"
    return judged(
        "E26",
        not (wanted & names),
        advice,
        detector=case.support.detector,
        losses=", ".join(sorted(names)),
    )


def rescorable(case: Case) -> Finding:
    """E27: arrays, seeds, config and code hash are kept, of these data and in this ball, and give
    the same table again."""
    if case.claim is not None:
        return _rescored_claim(case)
    report = case.support.evaluation
    if not isinstance(report, Evaluation) or report.folder is None:
        return not_run("E27", "give Support(evaluation=...), made with evaluate(..., out=folder)")
    config = Folder(report.folder).config()
    absent = [
        name
        for name in ("seed", "code", "attacks", "data")
        if not config.get(name) and config.get(name) != 0
    ]
    if absent:
        return finding("E27", "failed", f"save {', '.join(absent)}", missing=", ".join(absent))
    elsewhere = _elsewhere(case, report)
    if elsewhere:
        return finding("E27", "failed", "; ".join(elsewhere), of_other_data_or_ball=len(elsewhere))
    again = rescore(report.folder, case.predict)
    changed, drift = 0, 0.0
    for cell, rows in again.cells.items():
        saved = report.cells[cell]
        if case.task == "classification":
            changed += int((saved["correct"] != rows["correct"]).sum())
        drift = max(drift, float((saved["log_prob"] - rows["log_prob"]).abs().max()))
    advice = (
        "the files and the table disagree: the model, or the arrays, are not those that were scored"
    )
    return judged("E27", changed > 0 or drift > 1e-3, advice, changed=changed, largest_drift=drift)


def _elsewhere(case: Case, report: Evaluation) -> list[str]:
    """Where a saved evaluation is not of the data and the ball that are audited."""
    ball, faults = case.ball, []
    if float(ball.eps) not in [eps for eps in report.radii if eps is not None]:
        faults.append(f"the evaluation has eps {report.radii}, the ball {ball.eps:g}")
    texts = report.config.get("attacks", {})
    if not any(f"{type(ball).__name__}(" in text for text in texts.values()):
        faults.append(
            f"no attack of the evaluation stays in a ball of the norm {type(ball).__name__}"
        )
    folder = Folder(report.folder or Path())
    clean = [
        block
        for block in saved_blocks(folder)
        if (block.predictor, block.attack) == (report.predictors[0], CLEAN)
    ]
    here, there = (
        rows_of(case.whole[0]),
        {row for block in clean for row in rows_of(folder.read_array(block)[0])},
    )
    if not there <= here and not here <= there:
        faults.append(
            f"{len(there - here)} of the evaluation's {len(there)} inputs are not among the "
            f"{len(here)} audited ones"
        )
    return faults


def _rescored_claim(case: Case) -> Finding:
    claim = case.claim
    assert claim is not None
    scores = claim.correct or claim.log_prob
    named = (
        ("seed", claim.seed),
        ("config", claim.config),
        ("code hash", claim.code),
        ("scores", scores),
        (
            "size and hash of the whole test set (test_size, test_hash)",
            claim.test_size and claim.test_hash,
        ),
    )
    absent = [name for name, value in named if value is None or value == {}]
    unscored = (
        [name for name in claim.x_adv if name not in claim.correct]
        if case.task == "classification"
        else []
    )
    absent += [f"the correctness of {name}" for name in unscored if claim.correct]
    figures: dict[str, Any] = {}
    changed, total = 0, 0
    for name, correct in claim.correct.items():
        again = case.columns()[name]["correct"]
        doubt = case.stochastic  # a stochastic predictor may differ on points near the edge
        off = (again - correct.double().cpu()).abs() > (0.5 if doubt else 0)
        changed, total = changed + int(off.sum()), total + len(off)
        figures |= {
            f"claimed {name}": claim.accuracy(name),
            f"recomputed {name}": float(again.mean()),
        }
    drift = max(
        (
            float((case.columns()[name]["log_prob"] - value.double().cpu()).abs().max())
            for name, value in claim.log_prob.items()
        ),
        default=0.0,
    )
    figures = {"changed": changed, "of": total, "largest_drift": drift, **figures}
    bad = []
    if changed > (0.05 * total if case.stochastic else 0) or (drift > 1e-3 and not case.stochastic):
        bad.append(
            "scoring the saved arrays again changes the table: the model scored is not the model "
            "given"
        )
    if (
        claim.test_size is not None
        and claim.test_size <= len(case.x)
        and claim.test_hash != data_hash(*case.whole)
    ):
        bad.append(
            f"the {len(case.x)} examples are said to be the whole test set, but its hash is another"
        )
    if absent:
        figures["missing"] = ", ".join(absent)
        bad.append(f"save {', '.join(absent)} with the arrays")
    return judged("E27", bool(bad), "; ".join(bad), **figures)


def notes_on_data(case: Case) -> tuple[str, ...]:
    """What a reader should know of the examples: repeated ones, a selection, none that is wrong."""
    repeated = len(case.whole[0]) - len(rows_of(case.whole[0]))
    notes = [f"{repeated} of {len(case.whole[0])} rows are duplicates"] * bool(repeated)
    if case.task == "classification" and float(case.clean["correct"].mean()) == 1.0:
        notes.append("a clean accuracy of exactly 1: were the examples chosen?")
    size = None if case.claim is None else case.claim.test_size
    if size is not None and size > len(case.x):
        notes.append(f"{len(case.x)} of the {size} examples of the test set: a selection")
    if case.black_box:
        notes.append("black-box mode: there is no gradient, the attacks ask for answers alone")
    return tuple(notes)


def unseen_family(case: Case) -> Finding:
    """E30: some attack has a loss or step rule that the training channel has not."""
    if case.support.channel is None:
        return not_run("E30", "give Support(channel=...), the training's (Noise(0) for none)")
    if not case.attacks:
        return not_run("E30", "give the attacks, not only their arrays")
    seen = {family for attack in _attacks_in(case.support.channel) for family in family_of(attack)}
    used = {family for attack in case.attacks.values() for family in family_of(attack)}
    new = used - seen
    advice = "add an attack whose loss or step rule the training never used"
    return judged("E30", not new, advice, unseen=len(new), used=len(used))


def rows_of(x: Tensor) -> set[bytes]:
    """The different rows of x, as bytes.

    >>> len(rows_of(torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]])))
    2
    """
    return {row.tobytes() for row in x.detach().cpu().contiguous().flatten(1).numpy()}


def _attacks_in(channel: Channel) -> list[object]:
    if isinstance(channel, Mixture):
        return [attack for part in channel.channels for attack in _attacks_in(part)]
    if isinstance(channel, AttackChannel):
        return [channel.attack]
    return [channel] if isinstance(channel, Learned) else []

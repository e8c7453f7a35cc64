"""Checks of what is said about an evaluation: E0, E16, E17, E18, E25, E26, E27, E30."""

from __future__ import annotations

import torch
from torch.distributions import Categorical

from advbayes import metrics
from advbayes.attacks.parts import ball_of, family_of, loss_names
from advbayes.auditing.case import Case, finding, judged, not_applicable, not_run
from advbayes.auditing.findings import Finding
from advbayes.balls import Ball
from advbayes.channels import AttackChannel, Learned, Mixture
from advbayes.evaluation.files import Folder
from advbayes.evaluation.inputs import check_units, softmaxed_twice
from advbayes.evaluation.run import rescore
from advbayes.types import Channel

MARGINS = {"margin", "dlr", "MarginTo"}
SCORES = {"entropy": {"entropy", "certainty"}}  # a detector's score -> the losses that attack it


def threat_model(case: Case) -> Finding:
    """E0: everything is said, and what is said is what was run."""
    said = case.threat_model
    missing = said.missing()
    wrong = _contradictions(case)
    advice = "; ".join([f"say {', '.join(missing)}"] * bool(missing) + wrong)
    return judged("E0", bool(missing or wrong), advice, missing=len(missing), contradictions=len(wrong), eps=said.eps)


def _contradictions(case: Case) -> list[str]:
    """Where the threat model, the ball, the attacks and the arrays speak of different units."""
    said, ball = case.threat_model, case.ball
    found = [] if said.norm == type(ball).__name__ else [f"the norm is said to be {said.norm}, but the ball is {ball}"]
    if said.eps is not None and abs(said.eps - ball.eps) > 1e-6 * ball.eps:
        found.append(f"eps is said to be {said.eps:g}, but the ball has {ball.eps:g}")
    if said.units == "raw" and ball.scale is not None:
        found.append("eps is said to be in raw units, but the ball measures in units of its scale")
    for name, attack in case.attacks.items():
        other = ball_of(attack)
        if other is not None and abs(_reach(other) - _reach(ball)) > 1e-3 * _reach(ball):
            found.append(f"{name} reaches {_reach(other):.3g} in the units of x, eps = {ball.eps:g} reaches {_reach(ball):.3g}")
    units = check_units(ball, case.x)
    if units:
        found.append(units)
    if case.claim is not None and ball.eps > 0:
        largest = max(float(ball.norm(x_adv - case.x).nan_to_num(torch.inf).max()) for x_adv in case.claim.x_adv.values())
        if largest < 0.5 * ball.eps:
            found.append(f"no scored point comes nearer to the edge than {largest:.3g} of eps = {ball.eps:g}; other units?")
    return found


def _reach(ball: Ball) -> float:
    """How far eps goes in one feature, averaged over features, in the units of x."""
    scale = torch.ones(()) if ball.scale is None else torch.as_tensor(ball.scale)
    return float(ball.eps) * float(scale.double().mean())


def two_losses(case: Case) -> Finding:
    """E16: log-mean-exp NLL and a margin loss, and probabilities soft-maxed once."""
    with torch.no_grad():
        prediction = case.predict(case.x)
    twice = isinstance(prediction, Categorical) and softmaxed_twice(prediction.logits, case.y)
    names = {name for attack in case.attacks.values() for name in loss_names(attack)}
    names |= {name.strip() for name in (case.threat_model.loss or "").split(",") if name.strip()}
    top = float(prediction.probs.max()) if isinstance(prediction, Categorical) else None
    if twice:
        advice = "give logits or log-probabilities to Categorical(logits=...), not probabilities"
        return finding("E16", "failed", advice, largest_confidence=top)
    wanted = "nll" in names and (bool(names & MARGINS) if case.task == "classification" else "squared_error" in names)
    other = "a margin loss" if case.task == "classification" else "the squared error"
    advice = f"attack through the predictive with both its NLL and {other}"
    return judged("E16", not wanted, advice, losses=", ".join(sorted(names)), largest_confidence=top)


def worst_column(case: Case) -> Finding:
    """E17: a worst-case column that is nowhere above the least of the attacks."""
    if case.claim is None:
        value, least = case.value(case.worst()), min(map(case.value, case.columns().values()))
        return judged("E17", value > least + 1e-9, "take the union per example", worst=value, least_attack=least)
    if case.claim.worst is None:
        return finding("E17", "failed", "add the worst case over attacks, example by example")
    if not case.claim.correct:
        return not_run("E17", "give the claimed correctness of each attack")
    value = float(case.claim.worst.double().mean())
    least = min(case.claim.accuracy(name) for name in case.claim.correct)
    return judged("E17", value > least + 1e-9, "take the union per example", worst=value, least_attack=least)


def rescoring(case: Case) -> Finding:
    """E18: ten scorings of each final point when the predictor is stochastic."""
    if not case.stochastic:
        return not_applicable("E18", "the predictor answers the same twice")
    num = case.claim.rescored if case.claim is not None else case.rescored
    return judged("E18", num < 10, "score each final point at least 10 times with fresh randomness", scorings=num)


def statistics(case: Case) -> Finding:
    """E25: five training seeds behind a compared row, and "better" only where paired tests (Holm) say so.

    The intervals are the tables' own: every proportion carries Wilson's.
    """
    if case.num_seeds is None:
        return not_run("E25", "say how many training seeds are behind the row (num_seeds)")
    bad = [] if case.num_seeds >= 5 else ["train with at least 5 seeds before comparing"]
    figures: dict[str, float] = {"seeds": case.num_seeds}
    report = case.evaluation
    if case.better and report is not None and case.task == "classification":
        own, *rivals = [name for name in report.predictors if name not in report.trivial]
        pairs = [(report.columns(own)["correct"] > 0.5, report.columns(name)["correct"] > 0.5) for name in rivals]
        adjusted = metrics.holm([metrics.mcnemar(first, second) for first, second in pairs])
        figures["largest adjusted p"] = max(adjusted, default=0.0)
        bad += ["it is not significantly the best: do not set it in bold"] * (figures["largest adjusted p"] >= 0.05)
    return judged("E25", bool(bad), "; ".join(bad), **figures)


def attack_on_score(case: Case) -> Finding:
    """E26: a detector meets an attack on its own score."""
    if case.detector is None:
        return not_applicable("E26", "there is no detector")
    wanted = SCORES.get(case.detector, {case.detector})
    names = {name for attack in case.attacks.values() for name in loss_names(attack)}
    advice = f"add an attack on {case.detector} itself, in both directions"
    return judged("E26", not (wanted & names), advice, detector=case.detector, losses=", ".join(sorted(names)))


def rescorable(case: Case) -> Finding:
    """E27: arrays, seeds, config and code hash are kept, and give the same table again."""
    if case.claim is not None:
        return _rescored_claim(case)
    if case.evaluation is None or case.evaluation.folder is None:
        return not_run("E27", "give the evaluation, made with evaluate(..., out=folder)")
    config = Folder(case.evaluation.folder).config()
    absent = [name for name in ("seed", "code", "attacks", "data") if not config.get(name) and config.get(name) != 0]
    if absent:
        return finding("E27", "failed", f"save {', '.join(absent)}", missing=", ".join(absent))
    again = rescore(case.evaluation.folder, case.predict)
    changed, drift = 0, 0.0
    for cell, rows in again.cells.items():
        held = case.evaluation.cells[cell]
        if case.task == "classification":
            changed += int((held["correct"] != rows["correct"]).sum())
        drift = max(drift, float((held["log_prob"] - rows["log_prob"]).abs().max()))
    advice = "the files and the table disagree: the model, or the arrays, are not those that were scored"
    return judged("E27", changed > 0 or drift > 1e-3, advice, changed=changed, largest_drift=drift)


def _rescored_claim(case: Case) -> Finding:
    claim = case.claim
    assert claim is not None
    scores = claim.correct or claim.log_prob
    named = (("seed", claim.seed), ("config", claim.config), ("code hash", claim.code), ("scores", scores))
    absent = [name for name, value in named if value is None or value == {}]
    changed, total = 0, 0
    for name, correct in claim.correct.items():
        again = case.columns()[name]["correct"]
        doubt = case.stochastic  # a stochastic predictor may differ on points near the edge
        off = (again - correct.double().cpu()).abs() > (0.5 if doubt else 0)
        changed, total = changed + int(off.sum()), total + len(off)
    drift = max(
        (float((case.columns()[name]["log_prob"] - value.double().cpu()).abs().max()) for name, value in claim.log_prob.items()),
        default=0.0,
    )
    bad = changed > (0.05 * total if case.stochastic else 0) or (drift > 1e-3 and not case.stochastic)
    if absent and not bad:
        return finding("E27", "failed", f"save {', '.join(absent)} with the arrays", changed=changed, missing=", ".join(absent))
    advice = "scoring the saved arrays again changes the table: the model scored is not the model given"
    return judged("E27", bad, advice, changed=changed, of=total, largest_drift=drift)


def unseen_family(case: Case) -> Finding:
    """E30: some attack has a loss or step rule that the training channel has not."""
    if case.channel is None:
        return not_run("E30", "give the training channel (Noise(0) for none)")
    seen = {family for attack in _attacks_in(case.channel) for family in family_of(attack)}
    used = {family for attack in case.attacks.values() for family in family_of(attack)}
    new = used - seen
    advice = "add an attack whose loss or step rule the training never used"
    return judged("E30", not new, advice, unseen=len(new), used=len(used))


def _attacks_in(channel: Channel) -> list[object]:
    if isinstance(channel, Mixture):
        return [attack for part in channel.channels for attack in _attacks_in(part)]
    if isinstance(channel, AttackChannel):
        return [channel.attack]
    return [channel] if isinstance(channel, Learned) else []

"""Checks of a purifier: adaptive attacks on it (E23), and how many reference points speak for each
answer (E24)."""

from __future__ import annotations

from typing import Any

import torch

from advbayes.auditing.case import Case
from advbayes.auditing.findings import Finding, check, judged, not_applicable, not_run
from advbayes.purification import Purifier
from advbayes.purification.attacks import Annealed, NearestCentre, StraightThrough
from advbayes.types import Attack, Predictor

KINDS = ("exact", "straight_through", "transfer", "nearest_centre")


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

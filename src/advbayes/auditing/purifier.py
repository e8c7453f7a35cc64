"""Checks of a purifier: adaptive attacks on it (E23), and how many reference points speak for each
answer (E24)."""

from __future__ import annotations

from typing import Any

import torch

from advbayes.auditing.case import Case, finding, judged, not_applicable, not_run
from advbayes.auditing.findings import Finding
from advbayes.purification import Purifier
from advbayes.purification.attacks import Annealed, NearestCentre, StraightThrough
from advbayes.types import Predictor

KINDS = ("exact", "straight_through", "transfer", "nearest_centre")


def adaptive_attacks(case: Case) -> Finding:
    """E23: exact and straight-through gradients, transfer from the unpurified model, and the
    nearest-centre attack."""
    if not case.is_purifier:
        return not_applicable("E23", "the predictor does not purify")
    if case.task == "regression":
        return not_run(
            "E23", "the purifier's attacks are made for classes; give Support(purifier_attacks=...)"
        )
    figures: dict[str, Any] = {}
    results = {}
    for kind, through in _ways(case).items():
        if attacks := case.attacks_on(through):
            results[kind] = case.union(attacks, kind, through=through, join=True)
    given = dict(case.support.purifier_attacks)
    if isinstance(case.predict, Purifier):
        given = {
            "nearest_centre": NearestCentre(case.ball),
            "annealed": Annealed(case.ball),
            **given,
        }
    for kind, attack in given.items():
        results[kind] = case.union({kind: attack}, "purifier", through=case.predict, join=True)
    figures |= {kind: case.value(columns) for kind, columns in results.items()}
    if (
        case.claim is not None
    ):  # the table is theirs: what they did not run is missing, whatever it gives here
        absent = [kind for kind in KINDS if kind not in case.claim.purifier_attacks]
        figures["claimed attacks leave"] = case.value(case.gradient())
        return judged("E23", bool(absent), f"add {', '.join(absent)}", **figures)
    absent = [kind for kind in KINDS if kind not in results]
    if absent:
        return not_run(
            "E23",
            f"give Support(unpurified=...), or {', '.join(absent)} as "
            f"Support(purifier_attacks=...)",
        )
    return finding("E23", "passed", **figures)


def _ways(case: Case) -> dict[str, Predictor]:
    """What the ordinary attacks may go through: the purifier itself, its straight-through gradient,
    the unpurified model."""
    ways: dict[str, Predictor] = {"exact": case.predict}
    unpurified = case.support.unpurified
    if isinstance(case.predict, Purifier):
        unpurified = unpurified if unpurified is not None else case.predict.base
        if unpurified is not None:
            ways["straight_through"] = StraightThrough(case.predict, unpurified)
    if unpurified is not None:
        ways["transfer"] = unpurified
    return ways


def effective_sample_size(case: Case) -> Finding:
    """E24: at most 5 % of the queries rest on fewer than two points, and underflow is flagged."""
    if not case.is_purifier:
        return not_applicable("E24", "the predictor does not purify")
    diagnose = getattr(case.predict, "diagnose", None)
    if diagnose is None:
        return not_run("E24", "the purifier does not report its weights (a method `diagnose`)")
    few, silent, total = 0, 0, 0
    for points in (case.x, *case.arrays().values()):
        seen = diagnose(points)
        few += int((seen.ess_reference < 2).sum())
        silent += int((~torch.isfinite(seen.log_evidence) & ~seen.out_of_support).sum())
        total += len(points)
    advice = (
        "widen the channel's noise: the answer is that of the nearest reference point"
        if not silent
        else "flag underflow"
    )
    return judged(
        "E24",
        few > 0.05 * total or silent > 0,
        advice,
        few=few / total,
        underflow_not_flagged=silent,
    )

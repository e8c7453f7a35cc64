"""Everything that a report says, as one plain document, from which all formats are made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypedDict, Unpack

import torch

from advbayes import metrics
from advbayes.attacks.parts import settings
from advbayes.auditing import CHECKS, Finding, ThreatModel, Verdict
from advbayes.checks import InputError
from advbayes.datasets import Standardize
from advbayes.evaluation.result import CLEAN, REDUCTIONS, WORST, Evaluation, gives, risk_coverage_of
from advbayes.evaluation.scoring import Columns
from advbayes.metrics import Estimate
from advbayes.report.pictures import Gallery, gallery_of
from advbayes.report.text import clean
from advbayes.report.words import MAIN

# Those of detectors, purifiers and compared rows are asked for where there are some.
MANDATORY = tuple(each.id for each in CHECKS if each.id not in ("E23", "E24", "E25", "E26"))
SCHEMA = 1
Document = dict[str, Any]
Entries = Iterator[dict[str, Any]]
_CURVE_POINTS = 60
# not for the prediction to say
_UNKNOWN: dict[str, Any] = dict.fromkeys(("value", "low", "high"), None) | {"num": 0, "level": 0.95}
# What differs between two runs of one seed (where it ran, when, how it was called) is told, but is
# no result.
_PLACE = ("started", "command", "machine", "folder", "root", "out", "path", "host", "pid", "log")
_NOT_RESULTS = (*_PLACE, "seconds", "time")
_UNSAID = vars(Finding("?", "", "not run"))  # of a finding that leaves something out
_OF_MANIFEST = ("versions", "weights", "steps", "skipped", "status")
_SETTINGS = ("code", "versions", "data", "rescored", "batch_size")  # of the evaluation


class Sources(TypedDict, total=False):
    """What a report is made from besides its title and the evaluation; each may be left out."""

    audit: Mapping[str, Verdict | Mapping[str, Any]]  # by predictor; or its JSON
    threat_model: ThreatModel | Mapping[str, Any]
    run: Mapping[str, Mapping[str, Any]]  # by name: config and manifest (`Run.described`)
    history: Mapping[str, Mapping[str, Any]]  # by predictor: that of `fit`
    gallery: Gallery | None
    class_names: Sequence[str]
    feature_names: Sequence[str]
    scaling: Standardize | None


def gather(
    *,
    title: str,
    evaluation: Evaluation,
    pictures: dict[str, str] | None = None,
    **sources: Unpack[Sources],
) -> Document:
    """The document of a report, all JSON, the same for one seed; images go to `pictures`.

    >>> import torch
    >>> from torch.distributions import Categorical
    >>> from advbayes import L2, pgd
    >>> from advbayes.evaluation import evaluate
    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> data = torch.tensor([[2.0], [-0.3]]), torch.tensor([0, 1])
    >>> document = gather(
    ...     title="toy", evaluation=evaluate(predict, data, attacks={"PGD": pgd(L2(1.0), steps=5)})
    ... )
    >>> document["summary"][0]["worst"]["value"], document["summary"][0]["believed"]
    (0.5, False)
    """
    runs, classes = sources.get("run", {}), sources.get("class_names", ())
    audits = {name: _verdict(each) for name, each in sources.get("audit", {}).items()}
    threat = _threat(sources.get("threat_model", {}), evaluation, runs)
    scale = _scaling(sources.get("scaling"), sources.get("feature_names", ()))
    gallery, images = sources.get("gallery"), {} if pictures is None else pictures
    names = [name for name in evaluation.predictors if name not in evaluation.trivial]
    believed = {name: name in audits and _believed(audits[name]) for name in names}
    believed |= dict.fromkeys(evaluation.trivial, True)
    levels = {name: verdict["level"] for name, verdict in audits.items()}
    eps = _headline(evaluation, threat)
    config = evaluation.config
    return {
        "schema": SCHEMA,
        "title": clean(title),
        "task": evaluation.task,
        "examples": len(next(iter(evaluation.cells.values()))["log_prob"]),
        "seed": config.get("seed"),
        "interval_level": config.get("interval_level", 0.9),
        "metric": MAIN[evaluation.task],
        "metrics": list(REDUCTIONS[evaluation.task]),
        "eps": eps,
        "predictors": [clean(name) for name in names],
        "trivial": [clean(name) for name in evaluation.trivial],
        "attacks": _attacks(evaluation),
        "summary": [
            {**_summary(evaluation, name, eps), "level": levels.get(name), "believed": sure}
            for name, sure in believed.items()
        ],
        "table": [*_table(evaluation, believed)],
        "curves": [*_curves(evaluation, names, believed)],
        "calibration": [*_calibration(evaluation, names, eps)],
        "risk_coverage": [*_risk_coverage(evaluation, names, eps)],
        "audit": {clean(name): _plain(verdict) for name, verdict in audits.items()},
        "threat_model": threat,
        "scaling": scale,
        "gallery": gallery and gallery_of(gallery, classes, scale, threat, images),
        "training": [*_training(sources.get("history", {}))],
        "runs": [*_runs(runs)],
        "class_names": [clean(name) for name in classes] or None,
        "evaluation": _plain({key: config[key] for key in config if key in _SETTINGS}),
    }


# --- who may be believed ------------------------------------------------------------------------


def _verdict(verdict: Any) -> dict[str, Any]:
    match verdict:
        case Verdict():
            return _verdict(verdict.json())
        case {"findings": [*findings], "level": _}:
            pass
        case _:
            wanted = "each audit must be a Verdict or its JSON"
            raise InputError(f"{wanted}, got {type(verdict).__name__}")
    known = [{key: each.get(key, _UNSAID[key]) for key in _UNSAID} for each in findings]
    asked = {finding["id"] for finding in known}
    never_asked = [id for id in MANDATORY if id not in asked]
    return {**verdict, "findings": known, "never_asked": never_asked}


def _believed(verdict: Mapping[str, Any]) -> bool:
    """Level A, or B with no mandatory check left out: one never asked for did not pass."""
    return verdict["level"] == "A" or (verdict["level"] == "B" and not verdict["never_asked"])


# --- numbers ------------------------------------------------------------------------------------


def _headline(evaluation: Evaluation, threat: Mapping[str, Any]) -> float | None:
    """The radius that the summary is about: the threat model's if evaluated, else the largest."""
    radii = [eps for eps in evaluation.radii if eps is not None]
    said = threat.get("eps")
    wanted = said if isinstance(said, (int, float)) else math.nan
    near = [eps for eps in radii if math.isclose(eps, wanted, rel_tol=1e-6)]
    return near[0] if near else max(radii, default=None)


def _both(
    evaluation: Evaluation, names: Sequence[str], eps: float | None
) -> Iterator[tuple[dict[str, Any], Columns]]:
    """Each predictor untouched and under the worst case, with its scores."""
    for name in names:
        yield _entry(name, CLEAN, 0.0), evaluation.columns(name, CLEAN)
        if eps in evaluation.radii_of(name):
            yield _entry(name, WORST, eps), evaluation.columns(name, WORST, eps)


def _entry(predictor: str, attack: str, eps: float | None) -> dict[str, Any]:
    return {"predictor": clean(predictor), "attack": attack, "eps": eps}


def _summary(evaluation: Evaluation, name: str, eps: float | None) -> dict[str, Any]:
    """A predictor untouched and in the worst case at the headline radius."""
    trivial, metric = name in evaluation.trivial, MAIN[evaluation.task]
    attacked = trivial or eps in evaluation.radii_of(name)
    worst = evaluation.estimate(metric, name, WORST, eps) if attacked else None
    return {
        "predictor": clean(name),
        "trivial": trivial,
        "clean": _plain(evaluation.estimate(metric, name, CLEAN)),
        "worst": _plain(worst),
        "eps": None if trivial else eps,
    }


def _table(evaluation: Evaluation, believed: Mapping[str, bool]) -> Entries:
    """The rows of the evaluation's own table, in all metrics."""
    metrics = tuple(REDUCTIONS[evaluation.task])
    for row in evaluation.table(metrics).rows:
        kind = row.attack if row.attack in (CLEAN, WORST) else "attack"
        known = {metric: _plain(each) for metric, each in row.values.items()}
        yield {
            **_entry(row.predictor, clean(row.attack), row.eps),
            "kind": "trivial" if row.predictor in evaluation.trivial else kind,
            "dagger": row.marked and not believed[row.predictor],
            "values": {metric: known.get(metric, _UNKNOWN) for metric in metrics},
        }


def _curves(evaluation: Evaluation, names: Sequence[str], believed: Mapping[str, bool]) -> Entries:
    """Security curves: the worst case of every predictor; of a single one, each attack as well."""
    single = len(names) == 1 and len(evaluation.attacks) > 1
    attacks = [WORST, *(evaluation.attacks if single else ())]
    for metric, name, attack in product((MAIN[evaluation.task], "nll"), names, attacks):
        curve = evaluation.curve(metric, name, attack)
        points = [{"eps": eps, **_plain(each)} for eps, each in curve]
        if len(points) > 1:
            of = {"predictor": clean(name), "attack": clean(attack), "metric": metric}
            yield {**of, "points": points, "believed": believed[name]}


def _calibration(evaluation: Evaluation, names: Sequence[str], eps: float | None) -> Entries:
    """Reliability bins or interval coverage, untouched and under the worst case."""
    reductions = REDUCTIONS[evaluation.task]
    for entry, rows in _both(evaluation, names, eps):
        if evaluation.task == "classification":
            bins = metrics.reliability(rows["confidence"], rows["correct"], bins=10)
            bars = [{**vars(each), "accuracy": _plain(each.accuracy)} for each in bins]
            yield {**entry, "bins": bars, "ece": _plain(reductions["ece"](rows))}
        elif gives(rows, "coverage"):
            yield {**entry, "coverage": _plain(reductions["coverage"](rows))}


def _risk_coverage(evaluation: Evaluation, names: Sequence[str], eps: float | None) -> Entries:
    """The risk among the most certain answers, thinned to a few points."""
    for entry, rows in _both(evaluation, names, eps):
        if not gives(rows, "aurc") or len(rows["entropy"]) < 2:
            continue
        curve = risk_coverage_of(rows, evaluation.task)
        # Below a twentieth of the examples the risk is that of a handful, and jumps.
        num = len(curve.risk)
        first = max(0, math.ceil(num / 20) - 1)
        keep = torch.linspace(first, num - 1, min(_CURVE_POINTS, num - first)).round().int()
        points = [
            {"coverage": curve.coverage[i], "risk": curve.risk[i]}
            for i in dict.fromkeys(keep.tolist())
        ]
        yield {**entry, "aurc": curve.aurc, "points": points}


def _attacks(evaluation: Evaluation) -> list[dict[str, Any]]:
    config = evaluation.config
    return [
        {
            "name": clean(name),
            "settings": clean(config.get("attacks", {}).get(name, ""), 400),
            "losses": [clean(loss) for loss in config.get("losses", {}).get(name, ())],
            "iterations": config.get("iterations", {}).get(name),
        }
        for name in evaluation.attacks
    ]


# --- threat model and units ---------------------------------------------------------------------


def _threat(threat: Any, evaluation: Evaluation, runs: Mapping[str, Any]) -> dict[str, Any]:
    """The threat model; what it leaves open is read from the attacks and the configuration."""
    said = settings(threat) or threat
    document = {k: value for k, value in said.items() if k != "scale" and value is not None}
    texts = " ".join(str(text) for text in evaluation.config.get("attacks", {}).values())
    norms = sorted(set(re.findall(r"\b(L2|Linf)\(", texts)))
    boxes = sorted(set(re.findall(r"box=(\([^()]*\))", texts)))
    if norms:
        document.setdefault("norm", " and ".join(norms))
    if texts:
        document.setdefault("box", " and ".join(boxes) or "none")
    radii = [eps for eps in evaluation.radii if eps is not None]
    if "eps" not in document and radii:
        used = [one["config"].get("eps") for one in runs.values()]
        trained = {eps for eps in radii if eps in used}
        document["eps"] = min(trained) if len(trained) == 1 else max(radii)
    return _plain({**document, "radii": radii})  # type: ignore[no-any-return]


def _scaling(scaling: Standardize | None, names: Sequence[str]) -> dict[str, Any] | None:
    """Means and standard deviations of the features, with their names, and of the target."""
    if scaling is None and not names:
        return None
    document: dict[str, Any] = dict.fromkeys(("mean", "std", "target_mean", "target_std"))
    for name, value in {} if scaling is None else scaling.to_dict().items():
        document[name] = value.double().reshape(-1).tolist()
    numbered = [f"feature {i}" for i in range(len(document["mean"] or ()))]
    return {"features": [clean(name) for name in names] or numbered, **document}


# --- runs and their history ---------------------------------------------------------------------


def _runs(runs: Mapping[str, Any]) -> Entries:
    for name, one in runs.items():
        manifest = one["manifest"]
        started = manifest.get("started") or {}
        yield {
            "name": clean(name),
            "config": _plain(one["config"]),
            "commit": clean(started["commit"]) if "commit" in started else None,
            "data": _plain(manifest.get("data", {}).get("sha256")),
            **{key: _plain(manifest.get(key)) for key in _OF_MANIFEST},
        }


def _training(histories: Mapping[str, Any]) -> Entries:
    """The bound over the steps, thinned by averaging."""
    for name, columns in histories.items():
        rows = columns["bound"]
        values = [
            (step, float(value))
            for step, value in enumerate(rows, 1)
            if value is not None and math.isfinite(value)
        ]
        size = max(1, math.ceil(len(values) / _CURVE_POINTS))
        parts = [values[i : i + size] for i in range(0, len(values), size)]
        points = [
            {"step": part[-1][0], "bound": sum(value for _, value in part) / len(part)}
            for part in parts
        ]
        if points:
            yield {"predictor": clean(name), "points": points, "steps": len(rows)}


def _plain(value: Any) -> Any:
    """Results as JSON: text cleaned, tensors as lists, infinities, which JSON lacks, as text."""
    match value:
        case None | bool() | int():
            return value
        case float():
            return None if math.isnan(value) else value if math.isfinite(value) else str(value)
        case Mapping():
            results = {key: member for key, member in value.items() if key not in _NOT_RESULTS}
            return {clean(key): _plain(member) for key, member in results.items()}
        case Estimate():
            return _plain(vars(value))
        case torch.Tensor():
            return _plain(value.tolist())
        case list() | tuple():
            return [_plain(member) for member in value]
    return clean(value, 600)

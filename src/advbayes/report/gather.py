"""Everything that a report says, as one plain document; HTML, Markdown and CSV are made from it and
from nothing else."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from advbayes import metrics
from advbayes.checks import InputError
from advbayes.evaluation.result import CLEAN, REDUCTIONS, WORST, Evaluation, gives
from advbayes.evaluation.scoring import Columns
from advbayes.metrics import Estimate
from advbayes.report.examples import gallery_of
from advbayes.report.pictures import Gallery
from advbayes.report.text import clean
from advbayes.report.words import MAIN, MANDATORY

SCHEMA = 1
Document = dict[str, Any]
_CURVE_POINTS = 60
# not for the prediction to say
_UNKNOWN: dict[str, Any] = dict.fromkeys(("value", "low", "high"), None) | {"num": 0, "level": 0.95}
# What differs between two runs of one seed (where it ran, when, how it was called) is told, but is
# no result.
_NOT_RESULTS = (
    "started",
    "command",
    "machine",
    "folder",
    "root",
    "out",
    "path",
    "seconds",
    "time",
    "host",
    "pid",
    "log",
)


def gather(
    *,
    title: str,
    evaluation: Evaluation,
    audit: Any = None,
    threat_model: Any = None,
    run: Mapping[str, Any] | None = None,
    history: Any = None,
    gallery: Gallery | None = None,
    class_names: Sequence[str] | None = None,
    feature_names: Sequence[str] | None = None,
    scaling: Any = None,
    pictures: dict[str, str] | None = None,
) -> Document:
    """The document of a report: the same for two runs of one seed, and all of it JSON. Images go to
    `pictures`.

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
    audits = _audits(audit, evaluation)
    threat = _threat(threat_model, evaluation, run)
    eps = _headline(evaluation, threat)
    names = [name for name in evaluation.predictors if name not in evaluation.trivial]
    believed = {name: _believed(audits.get(name)) for name in names}
    scale = _scaling(scaling, feature_names)
    document: Document = {
        "schema": SCHEMA,
        "title": clean(title),
        "task": evaluation.task,
        "examples": len(next(iter(evaluation.cells.values()))["log_prob"]),
        "seed": evaluation.config.get("seed"),
        "interval_level": evaluation.config.get("interval_level", 0.9),
        "metric": MAIN[evaluation.task],
        "metrics": list(REDUCTIONS[evaluation.task]),
        "eps": eps,
        "predictors": [clean(name) for name in names],
        "trivial": [clean(name) for name in evaluation.trivial],
        "attacks": _attacks(evaluation),
        "summary": _summary(evaluation, names, eps, audits, believed),
        "table": _table(evaluation, names, believed),
        "curves": _curves(evaluation, names, believed),
        "calibration": _calibration(evaluation, names, eps),
        "risk_coverage": _risk_coverage(evaluation, names, eps),
        "audit": {clean(name): _plain(verdict) for name, verdict in audits.items()},
        "threat_model": threat,
        "scaling": scale,
        "gallery": None
        if gallery is None
        else gallery_of(gallery, class_names, scale, threat, {} if pictures is None else pictures),
        "training": _training(history, names),
        "runs": _runs(run),
        "class_names": None if class_names is None else [clean(name) for name in class_names],
        "evaluation": _plain(
            {
                k: v
                for k, v in evaluation.config.items()
                if k in ("code", "versions", "data", "rescored", "batch_size")
            }
        ),
    }
    return document


# --- who may be believed ------------------------------------------------------------------------


def _audits(audit: Any, evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    """Predictor -> verdict as a dictionary; one verdict alone is that of the first predictor."""
    if audit is None:
        return {}
    if hasattr(audit, "json") or (isinstance(audit, Mapping) and "findings" in audit):
        return {evaluation.predictors[0]: _verdict(audit)}
    return {str(name): _verdict(verdict) for name, verdict in audit.items() if verdict is not None}


def _verdict(verdict: Any) -> dict[str, Any]:
    document = verdict.json() if hasattr(verdict, "json") else dict(verdict)
    if not isinstance(document.get("findings"), (list, tuple)) or "level" not in document:
        raise InputError(
            f"audit must be a Verdict, its JSON, or a mapping of predictors to them, got "
            f"{type(verdict).__name__}"
        )
    findings = [
        {
            "id": str(one.get("id", "?")),
            "title": one.get("title", ""),
            "status": one.get("status", "not run"),
            "figures": dict(one.get("figures") or {}),
            "advice": one.get("advice", ""),
            "mandatory": bool(one.get("mandatory", True)),
        }
        for one in document["findings"]
    ]
    ids = {finding["id"] for finding in findings}
    return {
        **document,
        "findings": findings,
        "never_asked": [id for id in MANDATORY if id not in ids],
    }


def _believed(verdict: Mapping[str, Any] | None) -> bool:
    """Level A, or B with no mandatory check left out: one never asked for did not pass."""
    return verdict is not None and (
        verdict["level"] == "A" or (verdict["level"] == "B" and not verdict["never_asked"])
    )


# --- numbers ------------------------------------------------------------------------------------


def _number(value: float) -> float | str:
    """JSON has no infinity: it is written as text."""
    return value if math.isfinite(value) else "inf" if value > 0 else "-inf"


def estimate(found: Estimate) -> dict[str, Any]:
    """An estimate as a dictionary.

    >>> estimate(Estimate(0.5, 0.4, 0.6, 10, 0.95))["low"]
    0.4
    """
    return {
        "value": _number(found.value),
        "low": _number(found.low),
        "high": _number(found.high),
        "num": found.num,
        "level": found.level,
    }


def _headline(evaluation: Evaluation, threat: Mapping[str, Any]) -> float | None:
    """The radius that the summary is about: the threat model's if evaluated, else the largest."""
    radii = [eps for eps in evaluation.radii if eps is not None]
    wanted = threat.get("eps")
    near = [
        eps
        for eps in radii
        if isinstance(wanted, (int, float)) and math.isclose(eps, wanted, rel_tol=1e-6)
    ]
    return near[0] if near else max(radii, default=None)


def _held(evaluation: Evaluation, predictor: str) -> list[float | None]:
    """The radii at which a predictor was attacked, smallest first."""
    found = dict.fromkeys(
        cell.eps
        for cell in evaluation.cells
        if cell.predictor == predictor and cell.attack != CLEAN
    )
    return sorted(found, key=lambda eps: math.inf if eps is None else eps)


def _columns(
    evaluation: Evaluation, predictor: str, attack: str, eps: float | None
) -> Columns | None:
    """The scores of a cell, None where it was not evaluated."""
    if attack != CLEAN and eps not in _held(evaluation, predictor):
        return None
    try:
        return evaluation.columns(predictor, attack, eps)
    except (KeyError, ValueError):
        return None


def _summary(
    evaluation: Evaluation,
    names: Sequence[str],
    eps: float | None,
    audits: Mapping[str, Mapping[str, Any]],
    believed: Mapping[str, bool],
) -> list[dict[str, Any]]:
    """One line a predictor: untouched, worst case at the headline radius, level of its audit."""
    reduce = REDUCTIONS[evaluation.task][MAIN[evaluation.task]]
    lines = []
    for name in (*names, *evaluation.trivial):
        trivial = name in evaluation.trivial
        clean_rows = evaluation.cells[
            next(c for c in evaluation.cells if c.predictor == name and c.attack == CLEAN)
        ]
        rows = clean_rows if trivial else _columns(evaluation, name, WORST, eps)
        lines.append(
            {
                "predictor": clean(name),
                "trivial": trivial,
                "clean": estimate(reduce(clean_rows)),
                "worst": None if rows is None else estimate(reduce(rows)),
                "eps": None if trivial else eps,
                "level": audits.get(name, {}).get("level"),
                "believed": trivial or believed[name],
            }
        )
    return lines


def _table(
    evaluation: Evaluation, names: Sequence[str], believed: Mapping[str, bool]
) -> list[dict[str, Any]]:
    """Every predictor under every attack at every radius, clean first, the worst case after its
    attacks, trivial ones last."""
    reductions = REDUCTIONS[evaluation.task]
    rows = []
    for name in (*names, *evaluation.trivial):
        trivial = name in evaluation.trivial
        keys: list[tuple[str, float | None]] = [(CLEAN, 0.0)]
        for eps in [] if trivial else _held(evaluation, name):
            keys += [
                (c.attack, eps)
                for c in evaluation.cells
                if (c.predictor, c.eps) == (name, eps) and c.attack != CLEAN
            ]
            keys.append((WORST, eps))
        for attack, eps in keys:
            columns = _columns(evaluation, name, attack, eps)
            if columns is None:
                continue
            rows.append(
                {
                    "predictor": clean(name),
                    "attack": "any" if trivial else clean(attack),
                    "kind": "trivial"
                    if trivial
                    else attack
                    if attack in (CLEAN, WORST)
                    else "attack",
                    "eps": None if trivial else eps,
                    "dagger": attack != CLEAN and not trivial and not believed[name],
                    "values": {
                        metric: estimate(reduce(columns)) if gives(columns, metric) else _UNKNOWN
                        for metric, reduce in reductions.items()
                    },
                }
            )
    return rows


def _curves(
    evaluation: Evaluation, names: Sequence[str], believed: Mapping[str, bool]
) -> list[dict[str, Any]]:
    """Security curves: the worst case of every predictor; of a single one, each attack as well."""
    shown = [MAIN[evaluation.task], "nll"]
    labels = [
        WORST,
        *(evaluation.attacks if len(names) == 1 and len(evaluation.attacks) > 1 else ()),
    ]
    curves = []
    for metric in shown:
        reduce = REDUCTIONS[evaluation.task][metric]
        for name in names:
            for attack in labels:
                points = []
                for eps in (0.0, *(eps for eps in _held(evaluation, name) if eps)):
                    rows = _columns(evaluation, name, CLEAN if eps == 0.0 else attack, eps)
                    if rows is not None:
                        points.append({"eps": eps, **estimate(reduce(rows))})
                if len(points) > 1:
                    curves.append(
                        {
                            "predictor": clean(name),
                            "attack": clean(attack),
                            "metric": metric,
                            "points": points,
                            "believed": believed[name],
                        }
                    )
    return curves


def _calibration(
    evaluation: Evaluation, names: Sequence[str], eps: float | None
) -> list[dict[str, Any]]:
    """Reliability bins of classes, interval coverage of regressions; untouched and under the worst
    case."""
    entries = []
    for name in names:
        for attack, radius in ((CLEAN, 0.0), (WORST, eps)):
            rows = _columns(evaluation, name, attack, radius)
            if rows is None or (evaluation.task == "regression" and not gives(rows, "coverage")):
                continue
            entry: dict[str, Any] = {"predictor": clean(name), "attack": attack, "eps": radius}
            if evaluation.task == "classification":
                bins = metrics.reliability(rows["confidence"], rows["correct"], bins=10)
                entry["bins"] = [
                    {
                        "low": b.low,
                        "high": b.high,
                        "confidence": b.confidence,
                        "accuracy": estimate(b.accuracy),
                    }
                    for b in bins
                ]
                entry["ece"] = estimate(REDUCTIONS["classification"]["ece"](rows))
            else:
                entry["coverage"] = estimate(REDUCTIONS["regression"]["coverage"](rows))
            entries.append(entry)
    return entries


def _risk_coverage(
    evaluation: Evaluation, names: Sequence[str], eps: float | None
) -> list[dict[str, Any]]:
    """The risk among the most certain answers, thinned to a few points."""
    entries = []
    for name in names:
        for attack, radius in ((CLEAN, 0.0), (WORST, eps)):
            rows = _columns(evaluation, name, attack, radius)
            if rows is None or not gives(rows, "aurc") or len(rows["entropy"]) < 2:
                continue
            losses = (
                1 - rows["correct"]
                if evaluation.task == "classification"
                else rows["squared_error"]
            )
            curve = metrics.risk_coverage(losses, -rows["entropy"])
            # Below a twentieth of the examples the risk is that of a handful, and jumps.
            first = max(0, math.ceil(len(curve.risk) / 20) - 1)
            keep = (
                torch.linspace(
                    first, len(curve.risk) - 1, min(_CURVE_POINTS, len(curve.risk) - first)
                )
                .round()
                .long()
                .tolist()
            )
            entries.append(
                {
                    "predictor": clean(name),
                    "attack": attack,
                    "eps": radius,
                    "aurc": curve.aurc,
                    "points": [
                        {"coverage": curve.coverage[i], "risk": curve.risk[i]}
                        for i in dict.fromkeys(keep)
                    ],
                }
            )
    return entries


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


def _threat(threat: Any, evaluation: Evaluation, run: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is said of the attacker; what is not said is taken from the attacks' settings and the
    run's configuration."""
    if dataclasses.is_dataclass(threat) and not isinstance(threat, type):
        threat = {field.name: getattr(threat, field.name) for field in dataclasses.fields(threat)}
    document = {
        str(key): value
        for key, value in dict(threat or {}).items()
        if value is not None and key != "scale"
    }
    settings = " ".join(str(text) for text in evaluation.config.get("attacks", {}).values())
    norms = sorted(set(re.findall(r"\b(L2|Linf)\(", settings)))
    if "norm" not in document and norms:
        document["norm"] = " and ".join(norms)
    boxes = sorted(set(re.findall(r"box=(\([^()]*\))", settings)))
    if "box" not in document and settings:
        document["box"] = " and ".join(boxes) or "none"
    if "eps" not in document:
        radii = [eps for eps in evaluation.radii if eps is not None]
        configs = [one.get("config", {}) for one in _each_run(run).values()]
        trained = {
            float(config["eps"])
            for config in configs
            if isinstance(config.get("eps"), (int, float))
        } & set(radii)
        document["eps"] = min(trained) if len(trained) == 1 else max(radii, default=None)
    document["radii"] = [eps for eps in evaluation.radii if eps is not None]
    return _plain({key: value for key, value in document.items() if value is not None})  # type: ignore[no-any-return]


def _scaling(scaling: Any, feature_names: Sequence[str] | None) -> dict[str, Any] | None:
    """Means and standard deviations of the features, with their names; of the target too, where it
    is scaled."""
    named = (
        None
        if feature_names is None or len(feature_names) == 0
        else [clean(name) for name in feature_names]
    )
    if scaling is None:
        return (
            None
            if named is None
            else {
                "features": named,
                "mean": None,
                "std": None,
                "target_mean": None,
                "target_std": None,
            }
        )
    document = scaling.to_dict() if hasattr(scaling, "to_dict") else dict(scaling)
    flat = {
        name: torch.as_tensor(value, dtype=torch.float64).reshape(-1).tolist()
        for name, value in document.items()
        if value is not None
    }
    if not {"mean", "std"} <= flat.keys():
        raise InputError(f"scaling must have mean and std, got {sorted(flat)}")
    features = named or [f"feature {i}" for i in range(len(flat["mean"]))]
    return {
        "features": features,
        "mean": flat["mean"],
        "std": flat["std"],
        "target_mean": flat.get("target_mean"),
        "target_std": flat.get("target_std"),
    }


# --- runs and their history ---------------------------------------------------------------------


def _each_run(run: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Name -> {config, manifest}; one run alone has the name of its defense."""
    if run is None:
        return {}
    if "config" in run or "manifest" in run:
        return {str(dict(run.get("config") or {}).get("defense", "run")): run}
    return {str(name): one for name, one in run.items()}


def _runs(run: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    documents = []
    for name, one in _each_run(run).items():
        config, manifest = dict(one.get("config") or {}), dict(one.get("manifest") or {})
        started = manifest.get("started") or {}
        documents.append(
            {
                "name": clean(name),
                "config": _plain(config),
                "commit": clean(started["commit"]) if "commit" in started else None,
                "versions": _plain(manifest.get("versions")),
                "data": _plain((manifest.get("data") or {}).get("sha256")),
                "weights": _plain(manifest.get("weights")),
                "steps": _plain(manifest.get("steps")),
                "skipped": _plain(manifest.get("skipped")),
                "status": _plain(manifest.get("status")),
            }
        )
    return documents


def _training(history: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """The bound over the steps, thinned by averaging."""
    if history is None:
        return []
    many = isinstance(history, Mapping) and not all(_is_column(value) for value in history.values())
    histories = {str(name): one for name, one in history.items()} if many else {names[0]: history}
    curves = []
    for name, one in histories.items():
        rows = (
            one.get("bound", []) if isinstance(one, Mapping) else [row.get("bound") for row in one]
        )
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
            curves.append({"predictor": clean(name), "points": points, "steps": len(rows)})
    return curves


def _is_column(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and (not value or not isinstance(value[0], Mapping))
    )


def _plain(value: Any) -> Any:
    """Whatever came, as JSON: text cleaned, tensors as lists, infinities as text; what is no result
    left out."""
    match value:
        case None | bool() | int():
            return value
        case float():
            return None if math.isnan(value) else _number(value)
        case Mapping():
            results = {key: member for key, member in value.items() if key not in _NOT_RESULTS}
            return {clean(key): _plain(member) for key, member in results.items()}
        case torch.Tensor():
            return _plain(value.tolist())
        case set() | frozenset():
            return [_plain(member) for member in sorted(value, key=str)]
        case list() | tuple():
            return [_plain(member) for member in value]
    return clean(value, 600)

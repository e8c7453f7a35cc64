"""What is in a run or a bundle, as JSON and as lines; budgets and scores with their units."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advbayes import store
from advbayes.attacks.balls import Ball
from advbayes.checks import counted, joined
from advbayes.datasets import Standardize
from advbayes.evaluation.tables import Column
from advbayes.runs import Run, Trained
from advbayes.runs.config import TABLE_SETS, RunConfig, listed, names_code

_SAID_BY_COMPARE = {"data", "target", "defense", "eps", "seed", "checkpoint_every", "threads"}
SHOWN_PARTS = ("posterior", "channel", "class_names", "threat_model", "extra", "audit")
# --json has all
SHOWN = {"classification": ("accuracy", "nll", "ece"), "regression": ("rmse", "nll", "coverage")}
_NAMES = {
    "balanced_accuracy": "balanced accuracy",
    "nll": "NLL (nats)",
    "brier": "Brier score",
    "ece": "ECE",
    "selective_accuracy": "accuracy on the surer half",
    "aurc": "AURC",
}
_STANDARDISED = {  # a density and a squared error of the target as the model sees it
    "nll": "NLL (nats, standardised)",
    "aurc": "AURC (standardised)",
}
_MEANINGS = {
    "accuracy": "accuracy: the share answered right",
    "balanced_accuracy": "balanced accuracy: its mean over the classes",
    "rmse": "RMSE: the root of the mean squared error",
    "nll": "NLL: minus the log-probability (density) of the truth, lower is better",
    "brier": "Brier score: squared error of the probabilities, from 0 to 2",
    "coverage": "coverage: the share of targets inside",
    "ece": "ECE: the mean gap between confidence and accuracy",
}


def units_of(
    eps: float,
    scaling: Standardize | None,
    names: Sequence[str],
    mask: Tensor | None = None,
    scale: Tensor | float | None = None,
) -> dict[str, Any]:
    """eps in the model's units and, where data were standardised, in those of each feature.

    >>> units_of(1.0, None, ())
    {'eps': 1.0, 'units': 'raw'}
    """
    if scaling is None:
        return {"eps": eps, "units": "raw"}
    raw = scaling.raw_eps(eps).reshape(-1)
    if scale is not None:
        raw = raw * scale
    if mask is not None:
        raw = raw * mask
    reach = raw.tolist()
    if len(names) != len(reach):
        names = [f"feature {number}" for number in range(len(reach))]
    by_name = dict(zip(map(str, names), reach, strict=True))
    return {"eps": eps, "units": "standardised", "raw": by_name}


def units_within(trained: Trained, ball: Ball) -> dict[str, Any]:
    """The same for a ball around a run's examples."""
    return units_of(ball.eps, trained.scaling, trained.feature_names, ball.mask, ball.scale)


def said_units(units: dict[str, Any], name: str = "eps") -> str:
    """The same in one line."""
    if "raw" not in units:
        return f"{name} = {units['eps']:g} in the data's own units"
    raw = units["raw"]
    imputed = {name: f"{name} missing" for name in raw if f"{name} missing" in raw}
    parts = [
        f"{name} {value:.3g}{' where known' if name in imputed else ''}"
        if value
        else f"{name.partition('=')[0]} fixed"  # the words of a text column, at once
        for name, value in raw.items()
        if name not in imputed.values()
    ]
    parts = list(dict.fromkeys(parts))
    shown = ", ".join(parts[:8]) + (f", and {len(parts) - 8} more" if len(parts) > 8 else "")
    eps = f"{name} = {units['eps']:g} standardised (standard deviations)"
    return f"{eps}, that is in raw units: {shown}"


def described_run(run: Run) -> dict[str, Any]:
    """A run folder for machines."""
    config, manifest = run.config, run.manifest
    result: dict[str, Any] = {
        "run": str(run.path),
        "status": run.status,
        "steps": manifest.get("steps", 0),
        "skipped": manifest.get("skipped", 0),
        "weights": manifest.get("weights"),
        "config": config.model_dump(mode="json"),
        "metrics": _document(run.path / "metrics.json"),
        "audit": _document(run.path / "audit.json"),
        "evaluations": [path.name for path in run.evaluations],
        "changed_since_training": {},
    }
    if run.model_path.exists():
        _, documents, scaling = _bundle(run.model_path)
        extra = documents.get("extra", {})
        names = extra.get("feature_names", ())
        result["changed_since_training"] = {
            key: {"trained": before, "now": now}
            for key, (before, now) in run.changed(extra.get("config")).items()
        }
        threat = documents.get("threat_model") or {}
        known = [key for key in ("mask", "scale") if threat.get(key) is not None]
        reach = {key: torch.tensor(threat[key]) for key in known}
        units = units_of(config.eps, scaling, names, **reach)
        result["threat_model"] = units | {"norm": config.norm}
    return result


def lines_of_run(run: Run) -> str:
    """A run folder for people."""
    described, config = described_run(run), run.config
    metrics, audit = described["metrics"], described["audit"]
    defense = config.channel or config.defense
    lines = [
        f"data {config.data}, defense {defense}, posterior {config.posterior}, seed {config.seed}",
        why_task(config, metrics["task"]) if metrics else "",
        f"status {described['status']}, {described['steps']} steps, {described['skipped']} skipped",
    ]
    if changed := described["changed_since_training"]:
        said = ", ".join(f"{key} ({each['trained']!r})" for key, each in changed.items())
        edited = "config.toml was edited after training and is not what was trained"
        lines.append(f"  {edited}; trained with: {said}")
    if "threat_model" in described:
        attacked = config.channel or config.defense not in ("none", "noise", "consistency")
        how = "trained within" if attacked else "trained without an attacker; attacks within"
        lines.append(f"{how} {config.norm} {said_units(described['threat_model'])}")
    if metrics:
        _, documents, scaling = _bundle(run.model_path)
        targets = documents.get("extra", {}).get("target_names", ())
        values = said_scores(metrics["clean"], scaling, targets)
        lines += [
            f"clean test set ({counted(metrics['num'])}, 95 % intervals): {values}",
            legend(metrics["clean"]),
            no_better(metrics),
        ]
    if described["weights"]:
        lines.append(f"SHA-256 of the weights {described['weights']}")
    if described["evaluations"]:
        lines.append(f"evaluations: {', '.join(described['evaluations'])}")
    if audit:
        lines.append(f"audit ({audit.get('tier')}): level {audit.get('level')}")
    return "\n".join(f"  {line}" for line in lines if line)


def described_bundle(path: Path) -> dict[str, Any]:
    """A bundle for machines, every hash checked, nothing built from it."""
    manifest, documents, scaling = _bundle(path)
    parts = {part.name: {"bytes": part.size, "sha256": part.sha256} for part in manifest.parts}
    return {
        "bundle": str(path),
        "schema": manifest.schema,
        "versions": manifest.versions,
        "parts": parts,
        "scaled": scaling is not None,
        **{name: documents.get(name) for name in ("model", *SHOWN_PARTS)},
    }


def _bundle(path: Path) -> tuple[store.Manifest, dict[str, Any], Standardize | None]:
    manifest = store.read_manifest(path)
    tensors, documents = store.read_bundle(path)
    scaling = tensors.get("scaling")
    return manifest, dict(documents), None if scaling is None else Standardize.from_dict(scaling)


def why_task(config: RunConfig, task: str) -> str:
    """The task, and for a file of one's own where that comes from.

    >>> from advbayes.runs.config import make_config
    >>> why_task(make_config({"data": "digits"}), "classification")
    'classification'
    >>> why_task(make_config({"data": "t.csv", "target": "y,z"}), "regression")
    'regression, since there are several targets'
    """
    if config.file is None:
        return task
    if config.task is not None:
        return f"{task}, as asked for by --task"
    classes = task == "classification"
    if config.target is not None and len(listed(config.target)) > 1:
        return f"{task}, since there are several targets"
    if config.file.suffix.lower() == ".csv":
        text = "text" if classes else "numbers; --task classification makes classes of them"
        return f"{task}, since column {config.target!r} holds {text}"
    whole, other = ("", "regression") if classes else ("not only ", "classification")
    return f"{task}, since y holds {whole}whole numbers; --task {other} treats it otherwise"


def price(config: RunConfig) -> str:
    """How to see what a table's defense costs and gains; empty where `compare` cannot say.

    >>> from advbayes.runs.config import make_config
    >>> print(price(make_config({"data": "my t.csv", "target": "y", "drop": ["id", "a, b"]})))
    What mix costs on clean rows and gains under attack, against no defense: advbayes compare --data 'my t.csv' --target y --defense none --defense mix --eps 0.3 --set 'drop=id,"a, b"'
    >>> price(make_config({"data": "diabetes", "defense": "none"}))
    ''
    """  # noqa: E501
    own = config.channel or names_code(config.network)
    table = config.file is not None or config.data in TABLE_SETS
    if own or not table or config.defense == "none" or config.norm != "l2":
        return ""
    words = ["advbayes", "compare", "--data", config.data]
    words += [] if config.target is None else ["--target", config.target]
    words += ["--defense", "none", "--defense", config.defense, "--eps", f"{config.eps:g}"]
    for key, value in config.model_dump(exclude_defaults=True).items():
        if key not in _SAID_BY_COMPARE and type(value) is not bool:
            text = joined(value) if type(value) is tuple else f"{value}"
            words += ["--set", f"{key}={text}"]
    what = f"What {config.defense} costs on clean rows and gains under attack, against no defense"
    return f"{what}: {shlex.join(words)}"


def no_better(metrics: dict[str, Any]) -> str:
    """A remark where the test set shows no gain over a model that never looks at its input.

    >>> no_better(
    ...     {
    ...         "clean": {"accuracy": {"value": 0.8, "low": 0.7, "high": 0.9}},
    ...         "trivial": {"accuracy": 0.75},
    ...     }
    ... )
    'No better, as far as this test set shows, than always giving the most frequent class (accuracy 0.750); try --class-weight balanced, more --epochs or a smaller --eps.'
    """  # noqa: E501
    trivial, clean = metrics.get("trivial") or {}, metrics["clean"]
    if "accuracy" in trivial and clean["accuracy"]["low"] <= trivial["accuracy"]:
        always = f"the most frequent class (accuracy {trivial['accuracy']:.3f})"
        balanced = clean.get("balanced_accuracy")
        if balanced and balanced["low"] > trivial.get("balanced_accuracy", 1.0):
            return (
                f"Accuracy is no better than that of {always}, but the classes are told apart: "
                f"balanced accuracy {balanced['value']:.3f}, where a guess has "
                f"{trivial['balanced_accuracy']:.3f}."
            )
        hint = "--class-weight balanced, more --epochs or a smaller --eps"
    elif "rmse" in trivial and (
        clean["rmse"]["high"] is None or clean["rmse"]["high"] >= trivial["rmse"]
    ):
        always = "the mean of the training targets"
        hint = "more --epochs or a smaller --eps"
    else:
        return ""
    return f"No better, as far as this test set shows, than always giving {always}; try {hint}."


def _document(path: Path) -> Any:
    return store.read_document(path) if path.exists() else None


def legend(metrics: Iterable[str]) -> str:
    """What the scores mean, in one line.

    >>> legend(["accuracy", "ece"])
    'accuracy: the share answered right; ECE: the mean gap between confidence and accuracy'
    """
    return "; ".join(_MEANINGS[metric] for metric in metrics if metric in _MEANINGS)


def uneven(labels: Tensor) -> bool:
    """Whether one class is more than four of five rows: accuracy alone says little then.

    >>> uneven(torch.tensor([0, 0, 0, 0, 0, 1])), uneven(torch.tensor([0, 0, 1]))
    (True, False)
    """
    return 5 * int(labels.bincount().max()) > 4 * len(labels)


def column_of(
    metric: str, scaling: Standardize | None, targets: Sequence[str], level: float = 0.9
) -> Column:
    """The name and unit of a metric.

    >>> scaling = Standardize(torch.zeros(1), torch.ones(1), torch.tensor(3.0), torch.tensor(20.0))
    >>> column_of("rmse", scaling, ["price"])
    Column(name="RMSE (in the unit of 'price')", factor=20.0)
    >>> column_of("coverage", scaling, ["price"])
    Column(name='coverage of 90 % intervals', factor=1.0)
    >>> column_of("nll", scaling, ["price"])
    Column(name='NLL (nats, standardised)', factor=1.0)
    """
    if metric == "coverage":
        return Column(f"coverage of {100 * level:g} % intervals")
    spread = None if scaling is None else scaling.target_std
    if spread is not None and metric in _STANDARDISED:
        return Column(_STANDARDISED[metric])
    if metric not in ("rmse", "crps"):
        return Column(_NAMES.get(metric, metric))
    if spread is None:
        return Column(metric.upper())
    if spread.numel() == 1:
        name = repr(targets[0]) if len(targets) == 1 else "the target"
        return Column(f"{metric.upper()} (in the unit of {name})", float(spread))
    return Column(f"{metric.upper()} (in standard deviations of the targets)")


def said_scores(
    values: Mapping[str, Any],
    scaling: Standardize | None,
    targets: Sequence[str],
    level: float = 0.9,
) -> str:
    """The scores of `metrics.json` in one line.

    >>> said_scores({"nll": {"value": 0.5, "low": 0.4, "high": 0.6}}, None, ())
    'NLL (nats) 0.500 [0.400, 0.600]'
    """
    order = {name: place for place, name in enumerate(_MEANINGS)}
    return ", ".join(
        f"{(column := column_of(name, scaling, targets, level)).name} "
        f"{column.cell(each['value'], each['low'], each['high'])}"
        for name, each in sorted(values.items(), key=lambda item: order.get(item[0], len(order)))
    )

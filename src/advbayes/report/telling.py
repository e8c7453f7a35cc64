"""The document in sentences, for HTML and Markdown. Plain text: whoever prints it escapes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from advbayes.report.text import number, percent, short
from advbayes.report.words import (
    DEFENSES,
    FIRST_LOOK,
    KNOWLEDGE,
    LEVELS,
    METRICS,
    NORMS,
    PARTIAL,
    POSTERIORS,
    TRIVIAL,
    UNAUDITED,
    norm_name,
)

Document = Mapping[str, Any]
MOST_FEATURES = 20
UNITS = {
    "raw": "in the units of the raw data",
    "standardised": "in standard deviations of each feature",
}
WHITE_BOX = "the whole predictor (white box): gradients pass through all of the defense"


def factor(document: Document, metric: str) -> float:
    """What a value is multiplied by to be read: errors of a regression are in the target's unit.

    >>> factor({"scaling": {"target_std": [20.0]}}, "rmse"), factor({"scaling": None}, "rmse")
    (20.0, 1.0)
    """
    spread = (document["scaling"] or {}).get("target_std")
    return float(spread[0]) if spread and len(spread) == 1 and metric in ("rmse", "crps") else 1.0


def shown(document: Document, metric: str, value: Any) -> str:
    """A value of a metric, without its unit.

    >>> shown({"scaling": None}, "accuracy", 0.5), shown({"scaling": None}, "nll", 0.5)
    ('50.0', '0.500')
    """
    if METRICS[metric].share:
        return percent(value)
    return number(value * factor(document, metric) if isinstance(value, float) else value)


def interval(document: Document, metric: str, estimate: Mapping[str, Any]) -> str:
    """A confidence interval.

    >>> interval({"scaling": None}, "accuracy", {"low": 0.4, "high": 0.6})
    '40.0 to 60.0'
    """
    return (
        f"{shown(document, metric, estimate['low'])} to {shown(document, metric, estimate['high'])}"
    )


def label(document: Document, metric: str) -> str:
    """The name of a metric with its unit.

    >>> (
    ...     label({"scaling": {"target_std": [20.0]}}, "rmse"),
    ...     label({"interval_level": 0.9}, "coverage"),
    ... )
    ("RMSE, in the target's unit", 'Coverage of 90 % intervals, %')
    """
    name = METRICS[metric].label
    if metric == "coverage":
        name = f"{name} of {percent(document['interval_level'], 0)} % intervals"
    if METRICS[metric].share:
        return f"{name}, %"
    if metric == "nll":
        return f"{name}, nats"
    if metric not in ("rmse", "crps") or not (document["scaling"] or {}).get("target_std"):
        return name
    single = len(document["scaling"]["target_std"]) == 1
    return name + (", in the target's unit" if single else ", in standard deviations")


def results(document: Document) -> list[dict[str, Any]]:
    """The tables of results as text, for every format: that at the headline radius, and all of it
    where there is more."""
    rows = [
        {
            "predictor": row["predictor"],
            "kind": row["kind"],
            "attack": {"clean": "untouched", "trivial": "any"}.get(row["kind"], row["attack"]),
            "eps": "any" if row["kind"] == "trivial" else short(row["eps"]),
            "at": row["eps"],
            "dagger": row["dagger"],
            "cells": [
                {
                    "value": shown(document, metric, row["values"][metric]["value"]),
                    "interval": interval(document, metric, row["values"][metric]),
                }
                for metric in document["metrics"]
            ],
        }
        for row in document["table"]
    ]
    main = [
        row for row in rows if row["kind"] in ("clean", "trivial") or row["at"] == document["eps"]
    ]
    tables = {"": main} | ({"All budgets": rows} if len(main) < len(rows) else {})
    head = [label(document, metric) for metric in document["metrics"]]
    return [
        {"title": title, "head": head, "rows": chosen, "groups": _grouped(chosen)}
        for title, chosen in tables.items()
    ]


def _grouped(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault("" if row["kind"] == "trivial" else row["predictor"], []).append(row)
    return [{"predictor": name, "rows": members} for name, members in groups.items()]


def budget(document: Document) -> str:
    """The headline radius with its norm.

    >>> budget({"eps": 2.0, "threat_model": {"norm": "L2"}})
    'ε = 2 (L2)'
    """
    norm = document["threat_model"].get("norm")
    return f"ε = {short(document['eps'])}{f' ({norm_name(norm)})' if norm else ''}"


def lede(document: Document) -> list[str]:
    """What was done, against whom, in a few sentences."""
    names, trivial = document["predictors"], document["trivial"]
    attacks = [attack["name"] for attack in document["attacks"]]
    who = (
        f"the predictor {names[0]}"
        if len(names) == 1
        else f"{_count(len(names))} predictors ({listed(names)})"
    )
    sets = sorted(
        {str(run["config"].get("data")) for run in document["runs"] if run["config"].get("data")}
    )
    where = f" of {listed(sets)}" if sets else ""
    does = "does" if len(names) == 1 else "do"
    on = f"{document['examples']:,} test examples{where}"
    first = f"This report says how well {who} {does} on {on}, untouched and under attack."
    second = (
        f"The attacker may change every input by up to {budget(document)} and uses "
        f"{listed(attacks)}; the worst case takes, "
        "for each example, whichever did most harm."
        if attacks
        else "No attack was run."
    )
    if not trivial:
        return [first, second]
    told = listed([f"{name} ({TRIVIAL[name]})" if name in TRIVIAL else name for name in trivial])
    there = (
        "is one predictor that never looks"
        if len(trivial) == 1
        else "are predictors that never look"
    )
    return [first, second, f"For comparison there {there} at the input: {told}."]


def headline(document: Document) -> list[str]:
    """One sentence for each predictor."""
    metric = document["metric"]
    lines = []
    for row in document["summary"]:
        if row["trivial"]:
            continue
        before, after = row["clean"], row["worst"]
        unit = " %" if metric == "accuracy" else ""
        before_text = f"{shown(document, metric, before['value'])}{unit}"
        if metric == "accuracy":
            said = f"{row['predictor']} answers {before_text} of untouched inputs correctly"
        else:
            where = label(document, metric).partition(", ")[2]
            said = (
                f"{row['predictor']} has an RMSE of "
                f"{before_text}{f' ({where})' if where else ''} on untouched inputs"
            )
        if after is None:
            lines.append(f"{said}; it was not attacked at {budget(document)}.")
            continue
        mark = "" if row["believed"] else "†"
        value = (
            f"{shown(document, metric, after['value'])}{unit}{mark} (95 % interval "
            f"{interval(document, metric, after)})"
        )
        lines.append(f"{said}, and {value} under the worst attack at {budget(document)}.")
    return lines


def verdicts(document: Document) -> list[dict[str, Any]]:
    """For each predictor: level, what it means, failed and missing checks with advice."""
    verdicts = []
    for name in document["predictors"]:
        audit = document["audit"].get(name)
        if audit is None:
            verdicts.append(
                {
                    "predictor": name,
                    "level": None,
                    "head": UNAUDITED[0],
                    "meaning": UNAUDITED[1],
                    "believed": False,
                }
            )
            continue
        level = str(audit["level"])
        head, meaning = LEVELS.get(level, UNAUDITED)
        missing = len(audit["never_asked"])
        if missing and level == "B":
            head, meaning = PARTIAL[0], PARTIAL[1].format(level=level, missing=missing)
        checks = list(audit["findings"])
        ran = {
            status: sum(one["status"] == status for one in checks)
            for status in ("passed", "failed", "not run")
        }
        if level == "D" and audit.get("tier") == "quick" and not ran["failed"]:
            head = "A first look"
            meaning = FIRST_LOOK.format(passed=ran["passed"], missing=ran["not run"])
        optional = [
            one for one in checks if one["status"] == "failed" and not one.get("mandatory", True)
        ]
        verdicts.append(
            {
                "predictor": name,
                "level": level,
                "head": head,
                "meaning": meaning,
                "believed": any(
                    row["believed"] for row in document["summary"] if row["predictor"] == name
                ),
                "tier": audit.get("tier"),
                "failed": [
                    one for one in checks if one["status"] == "failed" and one not in optional
                ],
                "remarks": optional,
                "not_run": [
                    one
                    for one in checks
                    if one["status"] == "not run" and one.get("mandatory", True)
                ],
                "passed": sum(one["status"] == "passed" for one in checks),
                "checks": checks,
                "examples": (audit.get("summary") or {}).get("examples"),
            }
        )
    return verdicts


def figures_of(check: Mapping[str, Any]) -> str:
    """The figures of a check, in a line.

    >>> figures_of({"figures": {"infeasible": 3, "share": 0.25}})
    'infeasible 3, share 0.25'
    """
    return ", ".join(
        f"{name} {short(value) if isinstance(value, float) else value}"
        for name, value in check["figures"].items()
    )


def trained(document: Document) -> list[str]:
    """What each run trained, in a sentence."""
    lines = []
    for run in document["runs"]:
        config = run["config"]
        if not config:
            continue
        parts = [f"{run['name']}: "]
        network = config.get("network")
        posterior = POSTERIORS.get(str(config.get("posterior")), config.get("posterior"))
        if posterior:
            over = f" over {_article(network)} network" if network in ("conv", "mlp") else ""
            parts.append(f"{posterior}{over}, ")
        parts.append("trained")
        if config.get("data"):
            parts.append(f" on {config['data']}")
        if config.get("epochs"):
            parts.append(f" for {short(config['epochs'])} epochs")
        if run.get("steps"):
            parts.append(f" ({run['steps']:,} steps)")
        how = DEFENSES.get(str(config.get("defense")))
        if how:
            parts.append(f" {how}")
        if config.get("defense") not in (None, "none", "noise") and config.get("eps") is not None:
            parts.append(
                f"; the training adversary had {norm_name(config.get('norm', ''))} ε = "
                f"{short(config['eps'])}"
            )
        if config.get("sigma") and config.get("defense") in ("noise", "os", "os50", "mix", "pgd"):
            parts.append(f"; noise σ = {short(config['sigma'])}")
        lines.append("".join(parts) + ".")
    return lines


def threat_rows(document: Document) -> list[tuple[str, str]]:
    """The threat model as labelled lines."""
    threat, task = document["threat_model"], document["task"]
    norm = str(threat.get("norm", ""))
    name, meaning = NORMS.get(norm.lower(), (norm or "not stated", ""))
    goal = str(threat.get("goal") or "untargeted")
    words = {
        "untargeted": "any wrong answer (untargeted)"
        if task == "classification"
        else "as large an error as possible"
    }
    rows = [("Goal", words.get(goal, goal)), ("Norm", f"{name}{f': {meaning}' if meaning else ''}")]
    radii = threat.get("radii") or []
    units = threat.get("units") or (
        "standardised" if (document["scaling"] or {}).get("std") else None
    )
    unit = UNITS.get(str(units), "in the model's units")
    rows.append(("Budget ε", f"{listed([short(eps) for eps in radii]) or 'not stated'}, {unit}"))
    size = _dimension(document)
    if size and document["eps"] and norm.lower() == "l2":
        each = short(document["eps"] / math.sqrt(size))
        rows.append(
            (
                "Spread evenly",
                f"over all {size:,} features, ε = {short(document['eps'])} moves each of them by "
                f"{each}",
            )
        )
    box = str(threat.get("box", "not stated"))
    rows.append(
        (
            "Box",
            "none: inputs may take any value"
            if box in ("none", "None")
            else f"inputs stay within {box}",
        )
    )
    knowledge = threat.get("knowledge")
    rows.append(
        ("Knows", KNOWLEDGE.get(str(knowledge), str(knowledge)) if knowledge else WHITE_BOX)
    )
    if threat.get("randomness"):
        rows.append(("Randomness", f"{threat['randomness']}"))
    counts = [
        f"{threat[key]} {label}"
        for key, label in (
            ("attack_thetas", "in the attack"),
            ("evaluation_thetas", "in the evaluation"),
        )
        if threat.get(key)
    ]
    if counts:
        rows.append(("Parameter draws", ", ".join(counts)))
    effort = [
        f"{key.replace('_', ' ')} {threat[key]}"
        for key in ("steps", "step_size", "restarts", "loss")
        if threat.get(key)
    ]
    if effort:
        rows.append(("Effort", ", ".join(effort)))
    return rows


def _dimension(document: Document) -> int | None:
    if document["gallery"]:
        return int(math.prod(document["gallery"]["shape"]))
    scaling = document["scaling"]
    return len(scaling["features"]) if scaling else None


def reach(document: Document) -> dict[str, Any] | None:
    """eps in each feature's own unit, where the inputs are standardised."""
    scaling, eps = document["scaling"], document["eps"]
    if not scaling or not scaling.get("std") or eps is None:
        return None
    rows = [
        {"name": name, "std": std, "raw": eps * std, "mean": mean}
        for name, std, mean in zip(
            scaling["features"], scaling["std"], scaling["mean"], strict=False
        )
    ]
    return {"eps": eps, "rows": rows[:MOST_FEATURES], "left_out": max(0, len(rows) - MOST_FEATURES)}


def facts(document: Document, provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What somebody who repeats this needs to know."""
    rows: list[tuple[str, str]] = []
    if document["seed"] is not None:
        rows.append(("Seed of the evaluation", str(document["seed"])))
    seeds = {str(run["config"]["seed"]) for run in document["runs"] if "seed" in run["config"]}
    if seeds:
        rows.append(("Seed of the training", listed(sorted(seeds))))
    commits = {str(run["commit"]) for run in document["runs"] if run.get("commit")}
    commit = provenance.get("commit") or (listed(sorted(commits)) if commits else None)
    if commit:
        rows.append(("Commit", str(commit)))
    versions = provenance.get("versions") or next(
        (run["versions"] for run in document["runs"] if run.get("versions")), None
    )
    versions = versions or document["evaluation"].get("versions")
    if isinstance(versions, Mapping):
        rows.append(
            (
                "Versions",
                ", ".join(f"{name} {version}" for name, version in sorted(versions.items())),
            )
        )
    if provenance.get("machine"):
        rows.append(("Machine", str(provenance["machine"])))
    if provenance.get("folder"):
        rows.append(("Run", str(provenance["folder"])))
    rows += [
        (f"Weights of {run['name']}", f"SHA-256 {run['weights']}")
        for run in document["runs"]
        if run.get("weights")
    ]
    if document["evaluation"].get("data"):
        rows.append(("Test data", f"SHA-256 {document['evaluation']['data']}"))
    if document["evaluation"].get("code"):
        rows.append(("Code", f"SHA-256 {document['evaluation']['code']}"))
    return rows


def listed(items: list[str]) -> str:
    """Joined as a sentence would.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    items = [str(item) for item in items]
    return (
        items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""
    )


def _count(num: int) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return words[num] if num < len(words) else str(num)


def _article(network: Any) -> str:
    return {"conv": "a convolutional", "mlp": "a fully connected"}.get(str(network), f"a {network}")

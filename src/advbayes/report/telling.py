"""The document in sentences, for HTML and Markdown. Plain text: whoever prints it escapes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from advbayes.auditing import is_first_look
from advbayes.checks import counted
from advbayes.report import words
from advbayes.report.text import number, percent, short

Document = Mapping[str, Any]
MOST_FEATURES = 20
UNITS = {
    "raw": "in the units of the raw data",
    "standardised": "in standard deviations of each feature",
}
MODEL_UNITS = "in the model's units"
NETWORKS = {"conv": "a convolutional", "mlp": "a fully connected"}
_OF_TARGET = {  # what the scores of a standardised target are recorded in
    "rmse": "standard deviations of the target",
    "crps": "standard deviations of the target",
    "nll": "nats of the standardised target",
    "aurc": "variances of the target",
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
    if words.METRICS[metric].share:
        return percent(value)
    return number(None if value is None else float(value) * factor(document, metric))


def interval(document: Document, metric: str, estimate: Mapping[str, Any]) -> str:
    """A confidence interval: 40.0 to 60.0."""
    low, high = (shown(document, metric, estimate[end]) for end in ("low", "high"))
    return f"{low} to {high}"


def label(document: Document, metric: str) -> str:
    """The name of a metric with its unit."""
    name = words.METRICS[metric].label
    if metric == "coverage":
        name = f"{name} of {percent(document['interval_level'], 0)} % intervals"
    if words.METRICS[metric].share:
        return f"{name}, %"
    spread = (document["scaling"] or {}).get("target_std")
    if metric == "nll":
        return f"{name} of the standardised target, nats" if spread else f"{name}, nats"
    if not spread or metric not in _OF_TARGET:
        return name
    if metric == "aurc":
        return f"{name}, in {_OF_TARGET[metric]}"
    return name + (", in the target's unit" if len(spread) == 1 else ", in standard deviations")


def recorded_unit(document: Document, metric: str) -> str:
    """What a value is in as it was recorded, where that is the standardised target's unit.

    >>> recorded_unit({"scaling": {"target_std": [20.0]}}, "rmse")
    'standard deviations of the target'
    """
    return _OF_TARGET.get(metric, "") if (document["scaling"] or {}).get("target_std") else ""


def budget(document: Document) -> str:
    """The headline radius with its norm: ε = 2 (L2)."""
    norm = document["threat_model"].get("norm")
    return f"ε = {short(document['eps'])}{f' ({words.norm_name(norm)})' if norm else ''}"


def lede(document: Document) -> list[str]:
    """What was done, against whom, in a few sentences."""
    names, attacks = document["predictors"], [attack["name"] for attack in document["attacks"]]
    sets = {str(run["config"]["data"]) for run in document["runs"] if run["config"].get("data")}
    where = f" of {listed(sorted(sets))}" if sets else ""
    on = f"{counted(document['examples'], 'test example')}{where}"
    sentences = [f"This report is about {listed(names)} on {on}, untouched and under attack."]
    if attacks:
        sentences.append(
            f"The attacker may change every input by up to {budget(document)} and uses "
            f"{listed(attacks)}; the worst case takes, for each example, whichever did most harm."
        )
    else:
        sentences.append("No attack was run.")
    if trivial := [f"{name} ({words.TRIVIAL.get(name, name)})" for name in document["trivial"]]:
        sentences.append(f"For comparison, without a look at the input: {listed(trivial)}.")
    return sentences


def headline(document: Document) -> Iterator[str]:
    """One sentence for each predictor."""
    metric, at = document["metric"], f"at {budget(document)}"
    percent_sign, unit = " %" if metric == "accuracy" else "", label(document, metric)
    for row in [row for row in document["summary"] if not row["trivial"]]:
        clean = f"{shown(document, metric, row['clean']['value'])}{percent_sign}"
        line = f"{row['predictor']} answers {clean} of untouched inputs correctly"
        if metric != "accuracy":
            where = f" ({unit.partition(', ')[2]})" if ", " in unit else ""
            line = f"{row['predictor']} has an RMSE of {clean}{where} on untouched inputs"
        if row["worst"] is None:
            yield f"{line}; it was not attacked {at}.{_no_better(document, row)}"
            continue
        worst = f"{shown(document, metric, row['worst']['value'])}{percent_sign}"
        within = f"(95 % interval {interval(document, metric, row['worst'])})"
        mark = "" if row["believed"] else "†"
        line += f", and {worst}{mark} {within} under the worst attack {at}."
        yield line + _no_better(document, row)


def _no_better(document: Document, row: Mapping[str, Any]) -> str:
    """What a predictor that never looks at the input makes of it, where that is no worse."""
    metric, sign = document["metric"], -1 if document["metric"] == "accuracy" else 1

    def loss(estimate: Mapping[str, Any]) -> float:
        return sign * float(estimate["value"])

    trivial = [each for each in document["summary"] if each["trivial"]]
    if not trivial:
        return ""
    best = min(trivial, key=lambda each: loss(each["clean"]))
    value = f"{shown(document, metric, best['clean']['value'])}{' %' if sign < 0 else ''}"
    than = f"than {best['predictor']}, which never looks at the input ({value})"
    for begin, each in ((" It is", row["clean"]), (" Under attack it is", row["worst"])):
        if each is not None and loss(each) >= loss(best["clean"]):
            return f"{begin} no better {than}."
    return ""


def verdicts(document: Document) -> Iterator[dict[str, Any]]:
    """For each predictor: level, what it means, failed and missing checks with advice."""
    believed = {row["predictor"] for row in document["summary"] if row["believed"]}
    for name in document["predictors"]:
        audit = document["audit"].get(name) or {"level": "", "findings": [], "never_asked": []}
        level, checks, missing = str(audit["level"]), audit["findings"], len(audit["never_asked"])
        passed, failed, skipped = (
            [check for check in checks if check["status"] == status]
            for status in ("passed", "failed", "not run")
        )
        not_run = [check for check in skipped if check["mandatory"]]
        head, meaning = words.LEVELS.get(level, words.UNAUDITED)
        if missing and level == "B":
            head, meaning = words.PARTIAL[0], words.PARTIAL[1].format(level=level, missing=missing)
        if is_first_look(level, audit.get("tier"), len(failed)):
            head = "A first look"
            meaning = words.FIRST_LOOK.format(passed=len(passed), missing=len(not_run))
        yield {
            "predictor": name,
            "level": level,
            "head": head,
            "meaning": meaning,
            "believed": name in believed,
            "tier": audit.get("tier"),
            "failed": [check for check in failed if check["mandatory"]],
            "remarks": [check for check in failed if not check["mandatory"]],
            "not_run": not_run,
            "passed": len(passed),
            "checks": checks,
            "examples": (audit.get("summary") or {}).get("examples"),
        }


def figures_of(check: Mapping[str, Any]) -> str:
    """The figures of a check, in a line."""
    return ", ".join(
        f"{name} {short(value) if isinstance(value, float) else value}"
        for name, value in check["figures"].items()
    )


def checked(check: Mapping[str, Any]) -> str:
    """A check with its figures and what to do about it."""
    figures = figures_of(check)
    said = f"{check['id']} {check['title']}{f' ({figures})' if figures else ''}"
    return f"{said}. {check['advice']}" if check["advice"] else said


def under(entry: Mapping[str, Any]) -> str:
    """Which inputs an entry is about."""
    return "untouched" if entry["attack"] == "clean" else f"worst case, ε = {short(entry['eps'])}"


def calibrated(entry: Mapping[str, Any]) -> str:
    """The calibration of an entry, with its interval."""
    what, key = ("expected calibration error", "ece") if "ece" in entry else ("coverage",) * 2
    value, low, high = (percent(entry[key][name]) for name in ("value", "low", "high"))
    return f"{what} {value} % ({low} to {high})"


def trained(document: Document) -> list[str]:
    """What each run trained, in a sentence."""
    return [
        f"{run['name']}: {_how(run, run['config'])}." for run in document["runs"] if run["config"]
    ]


def _how(run: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    defense, network = config.get("defense"), NETWORKS.get(str(config.get("network")))
    posterior = words.POSTERIORS.get(str(config.get("posterior")), config.get("posterior"))
    own, unattacked = config.get("channel"), (None, "none", "noise", "consistency")
    adversary = (own or defense not in unattacked) and config.get("eps") is not None
    noisy = own or defense in ("noise", "consistency", "os", "os50", "mix", "pgd")
    through = f"through {own}" if own else words.DEFENSES.get(str(defense))
    norm = words.norm_name(config.get("norm", ""))
    parts = (
        (posterior, f"{posterior}{f' over {network} network' if network else ''}, "),
        (True, "trained"),
        (config.get("data"), f" on {config.get('data')}"),
        (config.get("epochs"), f" for {short(config.get('epochs'))} epochs"),
        (run.get("steps"), f" ({run.get('steps') or 0:,} steps)"),
        (through, f" {through}"),
        (adversary, f"; the training adversary had {norm} ε = {short(config.get('eps'))}"),
        (noisy and config.get("sigma"), f"; noise σ = {short(config.get('sigma'))}"),
    )
    return "".join(text for known, text in parts if known)


def threat_rows(document: Document) -> list[tuple[str, str]]:
    """The threat model as labelled lines."""
    threat, eps, size = document["threat_model"], document["eps"], _dimension(document)
    fixed = threat.get("fixed") or []
    norm, goal = str(threat.get("norm", "")), str(threat.get("goal") or "untargeted")
    name, meaning = words.NORMS.get(norm.lower(), (norm or "not stated", ""))
    if goal == "untargeted":
        classes = document["task"] == "classification"
        goal = "any wrong answer (untargeted)" if classes else "as large an error as possible"
    standardised = (document["scaling"] or {}).get("std")
    units = threat.get("units") or ("standardised" if standardised else None)
    radii = listed([short(eps) for eps in threat.get("radii") or []]) or "not stated"
    rows = {
        "Goal": goal,
        "Norm": f"{name}{f': {meaning}' if meaning else ''}",
        "Budget ε": f"{radii}, {UNITS.get(str(units), MODEL_UNITS)}",
    }
    if fixed:
        rows["Out of reach"] = listed([str(name) for name in fixed])
    free, alike = (size or 0) - len(fixed), not threat.get("multiples")
    if free > 0 and alike and eps and norm.lower() == "l2":
        which = f"the {free:,} that may change" if fixed else f"all {free:,} features"
        each = short(eps / math.sqrt(free))
        rows["Spread evenly"] = f"over {which}, ε = {short(eps)} moves each of them by {each}"
    box = str(threat.get("box", "not stated"))
    unbounded = box in ("none", "None")
    rows["Box"] = "none: inputs may take any value" if unbounded else f"inputs stay within {box}"
    knowledge = threat.get("knowledge")
    rows["Knows"] = words.KNOWLEDGE.get(str(knowledge), str(knowledge)) if knowledge else WHITE_BOX
    rows["Randomness"] = str(threat.get("randomness") or "")
    thetas = {"attack_thetas": "in the attack", "evaluation_thetas": "in the evaluation"}
    rows["Parameter draws"] = ", ".join(
        f"{threat[key]} {where}" for key, where in thetas.items() if threat.get(key)
    )
    rows["Effort"] = ", ".join(
        f"{key.replace('_', ' ')} {threat[key]}"
        for key in ("steps", "step_size", "restarts", "loss")
        if threat.get(key)
    )
    return [(label, value) for label, value in rows.items() if value]


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
    threat, names = document["threat_model"], scaling["features"]
    fixed, multiples = threat.get("fixed") or (), threat.get("multiples") or [1.0] * len(names)
    rows = [
        {"name": name, "std": std, "raw": eps * multiple * std, "mean": mean}
        for name, std, mean, multiple in zip(
            names, scaling["std"], scaling["mean"], multiples, strict=False
        )
        if name not in fixed
    ]
    return {"eps": eps, "rows": rows[:MOST_FEATURES], "left_out": max(0, len(rows) - MOST_FEATURES)}


def facts(document: Document, provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What somebody who repeats this needs to know."""
    runs, evaluation, seed = document["runs"], document["evaluation"], document["seed"]
    seeds = {str(run["config"]["seed"]) for run in runs if "seed" in run["config"]}
    commits = {str(run["commit"]) for run in runs if run.get("commit")}
    told = [one["versions"] for one in (provenance, *runs, evaluation) if one.get("versions")]
    versions = told[0] if told else {}
    hashes = {f"Weights of {run['name']}": run.get("weights") for run in runs}
    hashes |= {"Test data": evaluation.get("data"), "Code": evaluation.get("code")}
    rows = {
        "Seed of the evaluation": "" if seed is None else seed,
        "Seed of the training": listed(sorted(seeds)),
        "Commit": provenance.get("commit") or listed(sorted(commits)),
        "Versions": ", ".join(f"{name} {number}" for name, number in sorted(versions.items())),
        "Machine": provenance.get("machine"),
        "Run": provenance.get("folder"),
        **{label: f"SHA-256 {value}" for label, value in hashes.items() if value},
    }
    return [(label, str(value)) for label, value in rows.items() if value not in (None, "")]


def listed(items: list[str]) -> str:
    """Joined as a sentence would.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    *others, last = [str(item) for item in items] or [""]
    return f"{', '.join(others)} and {last}" if others else last

"""The document as Markdown and as CSV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advbayes.evaluation.tables import Grid
from advbayes.report import telling
from advbayes.report.text import csv, markdown, percent, short
from advbayes.report.words import METRICS


def render(document: Mapping[str, Any], provenance: Mapping[str, Any], *, digest: str) -> str:
    """The report in Markdown, without its figures."""
    lines = [f"# {markdown(document['title'])}", ""]
    lines += [*(markdown(sentence) for sentence in telling.lede(document)), ""]
    lines += [
        "## In short",
        "",
        *(f"- {markdown(sentence)}" for sentence in telling.headline(document)),
        "",
    ]
    lines += ["## Can these numbers be believed?", ""]
    for verdict in telling.verdicts(document):
        lines += [*_verdict(verdict), ""]
    lines += ["## Results", "", *_results(document), ""]
    if any(row["dagger"] for row in document["table"]):
        lines += [
            "† Not to be believed yet: the audit of this predictor failed, is incomplete or is "
            "missing.",
            "",
        ]
    if provenance.get("left_out"):
        names = ", ".join(map(markdown, provenance["left_out"]))
        lines += [f"Not shown, since they are of other examples: {names}.", ""]
    lines += [
        f"- {METRICS[metric].label}: {METRICS[metric].meaning}." for metric in document["metrics"]
    ] + [""]
    lines += _calibration(document)
    lines += _examples(document)
    lines += [
        "## Threat model",
        "",
        *(f"- {label}: {markdown(value)}" for label, value in telling.threat_rows(document)),
        "",
    ]
    reach = telling.reach(document)
    if reach:
        lines += [
            f"The budget ε = {short(reach['eps'])} in the features' own units, if all of it goes "
            f"into one of them:",
            "",
        ]
        rows = [
            [markdown(row["name"]), short(row["std"]), short(row["raw"])] for row in reach["rows"]
        ]
        head = ["feature", "standard deviation", "ε in raw units"]
        lines += [Grid(head, rows).markdown(), ""]
    if document["attacks"]:
        rows = [
            [markdown(a["name"]), markdown(", ".join(a["losses"])), str(a["iterations"] or "–")]
            for a in document["attacks"]
        ]
        lines += [Grid(["attack", "losses", "iterations"], rows).markdown(), ""]
    said = telling.trained(document)
    if said:
        lines += ["## What was trained", "", *(f"- {markdown(sentence)}" for sentence in said), ""]
    lines += ["## How to reproduce this", ""]
    if provenance.get("commands"):
        # Code, to be copied, unless a renderer that knows no indented code would see HTML in it.
        commands = provenance["commands"]
        lines += [
            *(
                (f"- {markdown(line)}" if set("<>&") & set(line) else f"    {line}")
                for line in commands
            ),
            "",
        ]
    lines += [f"SHA-256 of the results (the JSON file beside this one): `{digest}`", ""]
    lines += [
        f"- {markdown(label)}: {markdown(value)}"
        for label, value in telling.facts(document, provenance)
    ]
    return "\n".join(lines).rstrip() + "\n"


def _verdict(verdict: Mapping[str, Any]) -> list[str]:
    name = markdown(verdict["predictor"])
    level = f"level {verdict['level']}, " if verdict["level"] else ""
    lines = [f"**{name}: {level}{verdict['head'].lower()}.** {verdict['meaning']}"]
    if not verdict["level"]:
        return lines
    for label, listed in (
        ("Failed", verdict["failed"] + verdict["remarks"]),
        ("Not run", verdict["not_run"]),
    ):
        if listed:
            lines += ["", f"{label}:", ""]
            for check in listed:
                figures = telling.figures_of(check)
                said = markdown(
                    f"{check['id']} {check['title']}{f' ({figures})' if figures else ''}"
                )
                advice = f". {markdown(check['advice'])}" if check["advice"] else ""
                lines.append(f"- {said}{advice}")
    return lines


def _results(document: Mapping[str, Any]) -> list[str]:
    table = telling.results(document)[-1]
    rows = [
        [
            *(markdown(row[key]) for key in ("predictor", "attack", "eps")),
            *(
                f"{cell['value']}{'†' if row['dagger'] else ''} ({cell['interval']})"
                for cell in row["cells"]
            ),
        ]
        for row in table["rows"]
    ]
    return [Grid(["predictor", "attack", "ε", *table["head"]], rows).markdown()]


def _calibration(document: Mapping[str, Any]) -> list[str]:
    if not document["calibration"]:
        return []
    lines = ["## Calibration", ""]
    for entry in document["calibration"]:
        where = (
            "untouched" if entry["attack"] == "clean" else f"worst case, ε = {short(entry['eps'])}"
        )
        estimate, what = (
            (entry["ece"], "expected calibration error")
            if "ece" in entry
            else (entry["coverage"], "coverage")
        )
        value, low, high = (percent(estimate[key]) for key in ("value", "low", "high"))
        said = f"{value} % ({low} to {high})"
        lines.append(f"- {markdown(entry['predictor'])}, {where}: {what} {said}")
    return [*lines, ""]


def _examples(document: Mapping[str, Any]) -> list[str]:
    gallery = document["gallery"]
    if not gallery:
        return []
    rows = []
    for example in gallery["examples"]:
        truth = example["truth"] if isinstance(example["truth"], str) else short(example["truth"])
        for predictor in example["predictors"]:
            for view in predictor["views"]:
                moved = short(view["linf"] if gallery["norm"].lower() == "linf" else view["l2"])
                if gallery["classes"]:
                    said = f"{view['says']} ({percent(view['probabilities'][view['class']], 0)} %)"
                else:
                    said = f"{short(view['mean'])} ± {short(view['spread'], 3)}"
                cells = [
                    str(example["index"]),
                    truth,
                    predictor["name"],
                    view["label"],
                    moved,
                    said,
                ]
                rows.append([markdown(cell) for cell in cells])
    head = ["example", "truth", "predictor", "input", "moved by", "prediction"]
    return [
        "## Examples",
        "",
        f"Chosen: {markdown(gallery['how_chosen'])}.",
        "",
        Grid(head, rows).markdown(),
        "",
    ]


def spreadsheet(document: Mapping[str, Any]) -> str:
    """The table of results as CSV, one value a line.

    >>> spreadsheet({"table": [], "metrics": []})
    'predictor,attack,eps,metric,value,low,high,examples,believed\\n'
    """
    lines = ["predictor,attack,eps,metric,value,low,high,examples,believed"]
    for row in document["table"]:
        for metric in document["metrics"]:
            estimate = row["values"][metric]
            cells = [
                row["predictor"],
                row["attack"],
                row["eps"],
                metric,
                estimate["value"],
                estimate["low"],
                estimate["high"],
                estimate["num"],
            ]
            lines.append(",".join(map(csv, [*cells, "no" if row["dagger"] else "yes"])))
    return "\n".join(lines) + "\n"

"""The tables of a report; the page, its Markdown and the tests print these."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Any, NamedTuple

from advbayes.evaluation.tables import Grid
from advbayes.report.telling import Document, budget, figures_of, interval, label, shown
from advbayes.report.text import percent, short
from advbayes.report.words import METRICS

_ARROWS = {"higher": " ↑", "lower": " ↓", "near": ""}
_TONES = {"passed": "fine", "failed": "bad"}


class Cell(NamedTuple):
    """A cell of more than text: an interval, a dagger, a tone of voice, or the share of a bar."""

    text: str
    interval: str = ""
    dagger: bool = False  # not to be believed yet
    tone: str = ""  # fine, bad or quiet
    share: float | None = None  # of the largest change, with its sign

    def __str__(self) -> str:
        interval = f" ({self.interval})" if self.interval else ""
        return f"{self.text}{'†' if self.dagger else ''}{interval}"


def _measured(document: Document, metric: str, estimate: Mapping[str, Any], dagger: bool) -> Cell:
    text = shown(document, metric, estimate["value"])
    return Cell(text, interval(document, metric, estimate), dagger)


def summary(document: Document) -> Grid:
    """Each predictor untouched and in the worst case at the headline radius, and its audit."""
    metric, rows = document["metric"], []
    for row in document["summary"]:
        level, believed, worst = row["level"], row["believed"], row["worst"]
        audit = Cell("not audited", tone="bad")
        if level is not None:
            audit = Cell(f"level {level}", tone="fine" if believed else "bad")
        rows.append(
            [
                f"{row['predictor']}{' (never looks at the input)' if row['trivial'] else ''}",
                _measured(document, metric, row["clean"], False),
                _measured(document, metric, worst, not believed) if worst else "–",
                "–" if row["trivial"] else audit,
            ]
        )
    at = "" if document["eps"] is None else f", {budget(document)}"
    head = ["predictor", f"{label(document, metric)}, untouched", f"worst case{at}", "audit"]
    return Grid(head, rows, "Summary", right=(1, 2, 3))


def results(document: Document) -> list[Grid]:
    """The results at the headline radius, and all of them where there are more."""
    metrics, rows = document["metrics"], document["table"]
    lines = [
        [
            row["predictor"],
            "untouched" if row["kind"] == "clean" else row["attack"],
            "any" if row["kind"] == "trivial" else short(row["eps"]),
            *(_measured(document, name, row["values"][name], row["dagger"]) for name in metrics),
        ]
        for row in rows
    ]
    unattacked, eps = ("clean", "trivial"), document["eps"]
    at_headline = [row["kind"] in unattacked or row["eps"] == eps for row in rows]
    tables = {"Results with confidence intervals": list(compress(lines, at_headline))}
    if not all(at_headline):
        tables["All budgets"] = lines
    names = [f"{label(document, name)}{_ARROWS[METRICS[name].better]}" for name in metrics]
    head, right = ["predictor", "attack", "ε", *names], range(2, len(metrics) + 3)
    return [Grid(head, cells, title, right) for title, cells in tables.items()]


def checks(verdict: Mapping[str, Any]) -> Grid:
    """Every check of an audit, with its figures or what to do."""
    rows = [
        [
            f"{check['id']} {check['title']}",
            Cell(check["status"], tone=_TONES.get(check["status"], "quiet")),
            figures_of(check) or check["advice"] or "–",
        ]
        for check in verdict["checks"]
    ]
    return Grid(["check", "result", "figures"], rows, "All checks")


def examples(gallery: Mapping[str, Any]) -> Grid:
    """The examples of the gallery: how far each input was moved, and what is answer of it."""
    norm = "linf" if gallery["norm"].lower() == "linf" else "l2"
    rows = []
    for example in gallery["examples"]:
        truth = example["truth"] if gallery["classes"] else short(example["truth"])
        for predictor in example["predictors"]:
            for view in predictor["views"]:
                if gallery["classes"]:
                    sure = percent(view["probabilities"][view["class"]], 0)
                    answer = f"{view['says']} ({sure} %)"
                else:
                    answer = f"{short(view['mean'])} ± {short(view['spread'], 3)}"
                of = [example["index"], truth, predictor["name"], view["label"]]
                rows.append([*of, short(view[norm]), answer])
    return Grid(["example", "truth", "predictor", "input", "moved by", "prediction"], rows)


def features(example: Mapping[str, Any]) -> Grid:
    """The features of an example that were moved most, in their own units."""
    changed = example["features"]
    attacks = [f"{column['attack']} on {column['predictor']}" for column in changed["columns"]]
    rows = []
    for row in changed["rows"]:
        signed = [f"{'+' if change > 0 else ''}{short(change, 3)}" for change in row["changes"]]
        cells = zip(signed, row["share"], strict=True)
        bars = [Cell(text, share=share) for text, share in cells]
        rows.append([row["name"], short(row["value"]), *bars])
    head, title = ["feature", "untouched", *attacks], f"Changes of example {example['index']}"
    return Grid(head, rows, title, right=range(1, len(head)))


def attacks(document: Document) -> Grid:
    """The attacks, the losses that they climb, how long, and their settings."""
    rows = [
        [each["name"], ", ".join(each["losses"]), each["iterations"], each["settings"]]
        for each in document["attacks"]
    ]
    filled = [[cell or "–" for cell in row] for row in rows]
    return Grid(["attack", "losses", "iterations", "settings"], filled, "Attacks", right=(2,))


def reach(budgets: Mapping[str, Any]) -> Grid:
    """eps in each feature's own unit."""
    numbers = ("mean", "std", "raw")
    rows = [[row["name"], *(short(row[name]) for name in numbers)] for row in budgets["rows"]]
    head = ["feature", "mean", "standard deviation", "ε in raw units"]
    return Grid(head, rows, "Budget in raw units", right=(1, 2, 3))

"""The document as one HTML page that needs nothing else, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advbayes.checks import extra
from advbayes.evaluation.tables import Grid
from advbayes.report import figures, tables, telling
from advbayes.report.text import inert_cell, inert_markdown, number, percent, short
from advbayes.report.words import METRICS, norm_name

if TYPE_CHECKING:
    from jinja2 import Environment

Document = Mapping[str, Any]
TEMPLATES = Path(__file__).parent / "templates"


@lru_cache(maxsize=2)
def _environment(markdown: bool) -> Environment:
    """The templates, compiled once; whatever they print is escaped for its format."""
    with extra("the report's page needs jinja2", "report"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup

    def dead(value: Any) -> str:
        """Text in which nothing is Markdown, tables by their cells; what is marked safe stays."""
        match value:
            case Grid():
                cells = [[inert_markdown(cell) for cell in row] for row in value.rows]
                return Grid(value.head, cells).markdown()
            case Markup():
                return value
        return inert_markdown(value)

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=not markdown,
        finalize=dead if markdown else None,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "short": short, "norm": norm_name}
    environment.globals |= {
        "telling": telling,
        "tables": tables,
        "metrics": METRICS,
        "bars": bars,
        "style": Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),  # our own file
    }
    return environment


def page(
    document: Document, pictures: Mapping[str, str], provenance: Mapping[str, Any], *, digest: str
) -> str:
    """The report as an HTML page."""
    template = _environment(False).get_template("report.html.j2")
    names = document["predictors"]
    attacks = list(dict.fromkeys(curve["attack"] for curve in document["curves"]))
    return template.render(
        document=document,
        pictures=pictures,
        provenance=provenance,
        digest=digest,
        drawn={
            "curves": figures.security_curves(document),
            "calibration": figures.calibration(document),
            "risk": figures.risk_coverage(document),
            "training": figures.training(document),
        },
        legend=legend(names),
        curve_legend=legend(attacks if len(names) == 1 else names),
    )


def markdown(document: Document, provenance: Mapping[str, Any], *, digest: str) -> str:
    """The report in Markdown, without its figures."""
    template = _environment(True).get_template("report.md.j2")
    text = template.render(document=document, provenance=provenance, digest=digest)
    return text.rstrip() + "\n"


def spreadsheet(document: Document) -> str:
    """The table of results as CSV, one value a line, as recorded, with its unit."""
    place, numbers = ("predictor", "attack", "eps"), ("value", "low", "high")
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow([*place, "metric", *numbers, "examples", "believed", "unit"])
    for row, metric in product(document["table"], document["metrics"]):
        estimate, believed = row["values"][metric], "no" if row["dagger"] else "yes"
        cells = [*(row[key] for key in place), metric, *(estimate[key] for key in numbers)]
        cells += [estimate["num"], believed, telling.recorded_unit(document, metric)]
        writer.writerow(map(inert_cell, cells))
    return file.getvalue()


def legend(names: Sequence[str]) -> list[dict[str, Any]]:
    """Colour and shape of each series."""
    num = figures.NUM_COLOURS
    return [
        {"name": name, "colour": i % num, "marker": figures.MARKERS[i % num]}
        for i, name in enumerate(names)
    ]


def bars(view: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """The predictive probabilities as bars: all classes where they are few, else the likeliest.

    >>> drawn = bars({"probabilities": [0.2, 0.8], "truth_class": 0, "class": 1}, ["no", "yes"])
    >>> [(bar["height"], bar["kind"]) for bar in drawn["bars"]]
    [(8.0, 'truth'), (32.0, 'said')]
    """
    probabilities = view["probabilities"]
    chosen = list(range(len(probabilities)))
    if len(chosen) > 12:
        chosen = sorted({*sorted(chosen, key=lambda i: -probabilities[i])[:7], view["truth_class"]})
    top, width = 40.0, 120.0 / len(chosen)
    order = sorted(chosen, key=lambda i: -probabilities[i])[:3]
    likeliest = (f"{classes[i]} {percent(probabilities[i], 0)} %" for i in order)
    kinds = {view["class"]: "said", view["truth_class"]: "truth"}
    return {
        "label": f"Probabilities: {', '.join(likeliest)}",
        "named": all(len(classes[i]) <= 2 for i in chosen),
        "bars": [
            {
                "x": round(k * width + 0.12 * width, 2),
                "width": round(0.76 * width, 2),
                "height": round(top * probabilities[i], 2),
                "y": round(top - top * probabilities[i], 2),
                "middle": round((k + 0.5) * width, 2),
                "name": classes[i],
                "kind": kinds.get(i, "other"),
            }
            for k, i in enumerate(chosen)
        ],
    }

"""The document as one HTML page that needs nothing else: no script, no outside host, colours for
light, dark and paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advbayes.report import figures, telling
from advbayes.report.text import number, percent, short
from advbayes.report.words import METRICS, norm_name

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


def render(
    document: Mapping[str, Any],
    pictures: Mapping[str, str],
    provenance: Mapping[str, Any],
    *,
    digest: str,
) -> str:
    """The page."""
    try:
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError(
            "the report's page needs jinja2: pip install 'advbayes[report]'"
        ) from error
    drawn = {
        "curves": figures.security_curves(document),
        "calibration": figures.calibration(document),
        "risk": figures.risk_coverage(document),
        "training": figures.training(document),
    }
    single = len(document["predictors"]) == 1
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            document=document,
            pictures=pictures,
            provenance=provenance,
            digest=digest,
            drawn={
                name: [
                    {"svg": Markup(one.svg), "caption": one.caption, "predictor": one.predictor}
                    for one in figures_of
                ]
                for name, figures_of in drawn.items()
            },
            legend=legend(document["predictors"]),
            curve_legend=legend(
                list(dict.fromkeys(curve["attack"] for curve in document["curves"]))
                if single
                else document["predictors"]
            ),
            tables=telling.results(document),
        )
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """The templates, compiled once; whatever they print is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "short": short, "norm": norm_name}
    environment.globals |= {
        "telling": telling,
        "metrics": METRICS,
        "bars": bars,
        "style": Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),  # our own file
    }
    return environment


def legend(names: Sequence[str]) -> list[dict[str, Any]]:
    """Colour and shape of each series.

    >>> legend(["MIX"])
    [{'name': 'MIX', 'colour': 0, 'marker': 'o'}]
    """
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
    named = all(len(classes[i]) <= 2 for i in chosen)
    order = sorted(chosen, key=lambda i: -probabilities[i])[:3]
    return {
        "label": "Probabilities: "
        + ", ".join(f"{classes[i]} {percent(probabilities[i], 0)} %" for i in order),
        "named": named,
        "bars": [
            {
                "x": round(k * width + 0.12 * width, 2),
                "width": round(0.76 * width, 2),
                "height": round(top * probabilities[i], 2),
                "y": round(top - top * probabilities[i], 2),
                "middle": round((k + 0.5) * width, 2),
                "name": classes[i],
                "kind": "truth"
                if i == view["truth_class"]
                else "said"
                if i == view["class"]
                else "other",
            }
            for k, i in enumerate(chosen)
        ],
    }

"""Figures as inline SVG, without names from outside, in the colours of the page."""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from advbayes.checks import extra
from advbayes.report import telling
from advbayes.report.text import number, percent, short
from advbayes.report.words import METRICS, NORMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that stand for the page's own: after drawing they become var(--ink) and so on, so that
# dark pages need no second figure.
INK, MUTED, GRID, PAPER = "#010200", "#010201", "#010202", "#010203"
_PAGE = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--line)", PAPER: "var(--paper)"}
NUM_COLOURS = 6
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))

EDGE: Any = {"markeredgecolor": PAPER, "markeredgewidth": 0.8}

# The styles of all figures: those of experiments, as files, and those of reports, in the page.
AS_FILE: Any = {"svg.hashsalt": "advbayes", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
ON_PAGE: Any = {
    "svg.hashsalt": "advbayes",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "axes.unicode_minus": True,
    "path.simplify": True,
}


@dataclass(frozen=True)
class Figure:
    """A drawing as an <svg> element, and what stands below and above it."""

    svg: str
    caption: str
    predictor: str = ""


def colour(index: int) -> str:
    """The stand-in for the colour of a series."""
    return f"#0101{index % NUM_COLOURS:02x}"


@contextmanager
def canvas(size: tuple[float, float], style: Any) -> Iterator[Any]:
    """An empty figure of some inches, and its style while it is painted and saved."""
    with extra("figures need matplotlib", "report"):
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    with matplotlib.rc_context(style):
        yield Canvas(figsize=size, layout="constrained")


def draw(
    paint: Callable[[Axes], None],
    *,
    name: str,
    title: str,
    description: str,
    size: tuple[float, float] = (4.4, 2.9),  # inches of 72 units
) -> str:
    """One pair of axes as an <svg> element: the same every time, its ids its own."""
    # a glyph that the measuring font lacks is no concern of a page with its own fonts
    with canvas(size, ON_PAGE) as figure, warnings.catch_warnings(action="ignore"):
        axes = figure.add_subplot()
        paint(axes)
        buffer = io.StringIO()
        unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=unsaid)
    return _inlined(buffer.getvalue(), name, title, description)


def _inlined(svg: str, name: str, title: str, description: str) -> str:
    """The bare element, without prologue and metadata, its ids unique, its colours the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-", svg.replace("xlink:href", "href"))
    for stand_in, meant in _PAGE.items():
        svg = svg.replace(stand_in, meant)
    svg = re.sub(r"#0101([0-9a-f]{2})", lambda match: f"var(--s{int(match.group(1), 16)})", svg)
    box = re.search(r'viewBox="[^"]+"', svg)
    inside = svg[svg.index(">") + 1 :]
    head = (
        f'<svg class="figure" {box[0] if box else ""} role="img" '
        f'aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{html.escape(title)}</title>'
        f'<desc id="{name}-desc">{html.escape(description)}</desc>'
    )
    return re.sub(r"\n\s*", "\n", head + inside).strip()


def _finite(points: Sequence[Mapping[str, Any]], *keys: str) -> list[Mapping[str, Any]]:
    return [point for point in points if all(isinstance(point[key], (int, float)) for key in keys)]


def _percent_axis(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))


def _log_axis(axis: Any) -> None:
    """Ticks at 1, 2 and 5 times a power of ten, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_formatter(NullFormatter())


def _marker(i: int) -> dict[str, Any]:
    """Colour and shape of a series."""
    return {"color": colour(i), "marker": MARKERS[i % NUM_COLOURS]}


def _error_bars(axes: Axes, x: Sequence[float], estimates: Sequence[Any], **style: Any) -> None:
    y = [each["value"] for each in estimates]
    low = [max(0.0, each["value"] - each["low"]) for each in estimates]
    high = [max(0.0, each["high"] - each["value"]) for each in estimates]
    axes.errorbar(x, y, yerr=[low, high], **style)


def _untouched_or_not(entry: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Hollow and grey for untouched inputs."""
    hollow = entry["attack"] == "clean"
    grey = {"color": MUTED, "markerfacecolor": PAPER}
    return {**_marker(i), "markerfacecolor": colour(i), **(grey if hollow else {})}


def security_curves(document: Mapping[str, Any]) -> list[Figure]:
    """The main metric and the NLL against eps, with their confidence bands."""
    metrics = dict.fromkeys(curve["metric"] for curve in document["curves"])
    return [_security_curve(document, metric) for metric in metrics]


def _security_curve(document: Mapping[str, Any], metric: str) -> Figure:
    names, about = list(document["predictors"]), METRICS[metric]
    single = len(names) == 1
    norm = NORMS.get(str(document["threat_model"].get("norm", "")).lower(), ("", ""))[0]
    size = telling.factor(document, metric)
    floor = [size * value for value in _trivial(document, metric)]
    curves = [
        {**curve, "points": [_sized(point, size) for point in curve["points"]]}
        for curve in document["curves"]
        if curve["metric"] == metric
    ]

    def paint(axes: Axes) -> None:
        for index, curve in enumerate(curves):
            i = index if single else names.index(curve["predictor"])
            points = _finite(curve["points"], "value", "low", "high")
            x, y, low, high = ([p[key] for p in points] for key in ("eps", "value", "low", "high"))
            # attacks on one predictor are near each other: one band, that of the worst case
            if index == 0 or not single:
                axes.fill_between(x, low, high, color=colour(i), alpha=0.14, linewidth=0)
            dashes = DASHES[(i // NUM_COLOURS) % 4] if len(points) > 2 else (0, (1.5, 2.5))
            above = 3 - 0.1 * index if single else 2  # the worst case above its attacks
            axes.plot(x, y, linestyle=dashes, zorder=above, **_marker(i), **EDGE)
        for level in floor:
            axes.axhline(level, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
        values = [p["value"] for curve in curves for p in _finite(curve["points"], "value")]
        if about.share:
            axes.set_ylim(-0.02, 1.02)
            _percent_axis(axes.yaxis)
        elif _spans(values):
            axes.set_yscale("log")
            _log_axis(axes.yaxis)
            axes.set_ylim(0.8 * min(values), 1.25 * max(values))
        else:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        radii = sorted({point["eps"] for curve in curves for point in curve["points"]})
        axes.set_xlim(0, 1.04 * max(radii))
        if len(radii) <= 6 and min(b - a for a, b in pairwise(radii)) > max(radii) / 12:
            axes.set_xticks(radii, [short(eps) for eps in radii])
        axes.set_xlabel(f"budget ε{f' ({norm})' if norm else ''}")
        axes.set_ylabel(about.label if about.share else telling.label(document, metric))

    summary = []
    for curve in curves:
        values = ((p["value"], short(p["eps"])) for p in curve["points"])
        steps = (
            f"{f'{percent(value)} %' if about.share else number(value)} at ε = {eps}"
            for value, eps in values
        )
        summary.append(f"{curve['attack' if single else 'predictor']}: {', '.join(steps)}")
    title, description = f"{about.label} as the attacker's budget grows", ". ".join(summary) + "."
    better = {"higher": "Higher is better.", "lower": "Lower is better."}.get(about.better, "")
    dotted = "; the dotted line is the best possible without looking at the input" if floor else ""
    return Figure(
        draw(paint, name=f"curve-{metric}", title=title, description=description),
        f"{about.label}: {about.meaning}. {better} Bands are 95 % confidence intervals{dotted}.",
    )


def _sized(point: Mapping[str, Any], size: float) -> dict[str, Any]:
    return {
        key: value * size if key != "eps" and isinstance(value, float) else value
        for key, value in point.items()
    }


def _spans(values: Sequence[float]) -> bool:
    """Whether the values are so far apart that a linear axis would show the largest alone."""
    return min(values) > 0 and max(values) > 20 * min(values)


def _trivial(document: Mapping[str, Any], metric: str) -> list[float]:
    """The best value among predictors that never look at the input."""
    rows = [row["values"][metric] for row in document["table"] if row["kind"] == "trivial"]
    values = [row["value"] for row in _finite(rows, "value")]
    return [max(values) if METRICS[metric].better == "higher" else min(values)] if values else []


def calibration(document: Mapping[str, Any]) -> list[Figure]:
    """A reliability diagram for each predictor, or one figure of interval coverages."""
    entries = document["calibration"]
    if document["task"] == "regression":
        return [_coverages(document)] if entries else []
    return [
        _reliability(i, name, of_it)
        for i, name in enumerate(document["predictors"])
        if (of_it := [entry for entry in entries if entry["predictor"] == name])
    ]


def _reliability(i: int, name: str, entries: Sequence[Mapping[str, Any]]) -> Figure:
    def paint(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        for entry in entries:
            confidence = [each["confidence"] for each in entry["bins"]]
            accuracy = [each["accuracy"] for each in entry["bins"]]
            style = _untouched_or_not(entry, i) | {"elinewidth": 0.8, "linewidth": 1.4}
            _error_bars(axes, confidence, accuracy, **style)
        axes.set_xlim(0, 1.02)
        axes.set_ylim(-0.02, 1.04)
        axes.set_xticks([0, 0.5, 1])
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        _percent_axis(axes.xaxis)
        _percent_axis(axes.yaxis)
        axes.set_xlabel("confidence")
        axes.set_ylabel("accuracy")

    summary = ". ".join(
        f"{telling.under(entry).capitalize()}: {telling.calibrated(entry)}" for entry in entries
    )
    said: Any = {
        "title": "Reliability diagram",
        "description": f"{name}. {summary}. Points below the diagonal are overconfident.",
    }
    svg = draw(paint, name=f"reliability-{i}", size=(3.1, 2.9), **said)
    return Figure(svg, f"{summary}.", name)


def _coverages(document: Mapping[str, Any]) -> Figure:
    entries, level = document["calibration"], document["interval_level"]
    names = list(document["predictors"])

    def paint(axes: Axes) -> None:
        axes.axhline(level, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        for entry in entries:
            i = names.index(entry["predictor"])
            beside = i + (-0.14 if entry["attack"] == "clean" else 0.14)
            style = _untouched_or_not(entry, i) | {"markersize": 7, "capsize": 3}
            _error_bars(axes, [beside], [entry["coverage"]], **style)
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_xticks(range(len(names)), [str(i + 1) for i in range(len(names))])
        axes.set_ylim(0, 1.04)
        _percent_axis(axes.yaxis)
        axes.set_xlabel("predictor, in the order of the legend")
        axes.set_ylabel("coverage")

    summary = "; ".join(
        f"{entry['predictor']}, {telling.under(entry)}: {percent(entry['coverage']['value'])} %"
        for entry in entries
    )
    title = f"Truths inside the {percent(level, 0)} % intervals"
    description = f"{summary}. The dashed line is what was promised."
    return Figure(draw(paint, name="coverage", title=title, description=description), description)


def risk_coverage(document: Mapping[str, Any]) -> list[Figure]:
    """Untouched and worst case: the risk among the most certain answers by the share answered."""
    return [
        _risk(document, attack, entries)
        for attack in ("clean", "worst")
        if (entries := [one for one in document["risk_coverage"] if one["attack"] == attack])
    ]


def _risk(document: Mapping[str, Any], attack: str, entries: Sequence[Mapping[str, Any]]) -> Figure:
    names, share = list(document["predictors"]), document["task"] == "classification"
    unit = telling.recorded_unit(document, "aurc")
    error = f"mean squared error ({unit})" if unit else "mean squared error"

    def paint(axes: Axes) -> None:
        for entry in entries:
            points = entry["points"]
            x, y = ([point[key] for point in points] for key in ("coverage", "risk"))
            every = max(1, len(points) // 6)
            axes.plot(x, y, markevery=every, **_marker(names.index(entry["predictor"])), **EDGE)
        axes.set_xlim(0, 1.02)
        axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 0.05))
        _percent_axis(axes.xaxis)
        if share:
            _percent_axis(axes.yaxis)
        axes.set_xlabel("share answered, most certain first")
        axes.set_ylabel("error rate" if share else error)

    where = "untouched inputs" if attack == "clean" else telling.under(entries[0])
    risks = (f"{entry['predictor']}: mean risk {number(entry['aurc'])}" for entry in entries)
    title, summary = f"Risk against coverage, {where}", f"{'; '.join(risks)}."
    svg = draw(paint, name=f"risk-{attack}", title=title, description=summary)
    return Figure(svg, f"{title}. {summary}")


def training(document: Mapping[str, Any]) -> list[Figure]:
    """The bound over the steps of training."""
    entries = document["training"]
    if not entries:
        return []
    order = {name: index for index, name in enumerate(document["predictors"])}

    def paint(axes: Axes) -> None:
        lowest, highest = [], []
        for index, entry in enumerate(entries):
            x, y = ([point[key] for point in entry["points"]] for key in ("step", "bound"))
            lowest.append(sorted(y)[len(y) // 20])
            highest.append(max(y))
            axes.plot(x, y, color=colour(order.get(entry["predictor"], index)))
        low, top = min(lowest), max(highest)
        if top > low:  # the first steps of a training would flatten all that follows
            axes.set_ylim(low - 0.05 * (top - low), top + 0.05 * (top - low))
        axes.set_xlabel("step")
        axes.set_ylabel("bound")

    summary = "; ".join(
        f"{entry['predictor']}: from {number(entry['points'][0]['bound'])} to "
        f"{number(entry['points'][-1]['bound'])} in {entry['steps']} steps"
        for entry in entries
    )
    title = "The bound on the evidence during training"
    caption = f"{title} (higher is better): {summary}."
    return [Figure(draw(paint, name="training", title=title, description=caption), caption)]

"""Inputs, perturbations and predictives as SVG inside an `<img>`, which a browser draws at once."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape

from torch import Tensor

from advbayes.experiments.playground.moves import Answer

CLEAN, ATTACKED = "#0072b2", "#d55e00"  # told apart with any colour vision
_INK = "#777"  # on white and on black
_SIDE = 12  # of a pixel
_WIDTH = 240


def image(x: Tensor) -> str:  # (1, H, W) in [0, 1]
    """Ink on paper."""
    rows = (255 * (1 - x[0]).clamp(0, 1)).round().int().tolist()
    return _grid([[f"rgb({c},{c},{c})" for c in row] for row in rows], "An input")


def difference(d: Tensor, limit: float) -> str:  # (1, H, W)
    """What was added (orange) and taken away (blue); `limit` has full colour."""
    rows = []
    for row in (d[0] / max(limit, 1e-12)).clamp(-1, 1).tolist():
        colours = [(ATTACKED if value > 0 else CLEAN, abs(value)) for value in row]
        rows.append([f"{colour}{round(255 * size):02x}" for colour, size in colours])
    return _grid(rows, "What was added and taken away")


def bars(names: Sequence[str], clean: Answer, attacked: Answer, truth: int | None = None) -> str:
    """The probability of each class: before above, after below."""
    height, parts = 16, []
    for i, name in enumerate(names):
        top = i * height
        weight = ' font-weight="bold"' if i == truth else ""
        parts.append(
            f'<text x="58" y="{top + 12}" text-anchor="end"{weight}>{escape(name[:9])}</text>'
        )
        for colour, answer, shift in ((CLEAN, clean, 2), (ATTACKED, attacked, 8)):
            size = f'width="{170 * float(answer.values[i]):.1f}" height="5"'
            parts.append(f'<rect x="64" y="{top + shift}" {size} fill="{colour}"/>')
    return _svg("".join(parts), _WIDTH, height * len(names), "Class probabilities before and after")


def density(clean: Answer, attacked: Answer, truth: float | None = None) -> str:
    """The density of a number, before and after the attack."""
    assert clean.places is not None
    low, high = float(clean.places[0]), float(clean.places[-1])
    top = max(float(clean.values.max()), float(attacked.values.max()))
    parts = []
    for colour, answer in ((CLEAN, clean), (ATTACKED, attacked)):
        points = " ".join(
            f"{_across(float(place), low, high):.1f},{95 - 85 * float(value) / top:.1f}"
            for place, value in zip(clean.places, answer.values, strict=True)
        )
        style = f'fill="none" stroke="{colour}" stroke-width="2"'
        parts.append(f'<polyline points="{points}" {style}/>')
    if truth is not None and low <= truth <= high:
        at = f"{_across(truth, low, high):.1f}"
        style = f'stroke="{_INK}" stroke-dasharray="3 3"'
        parts.append(f'<line x1="{at}" x2="{at}" y1="5" y2="95" {style}/>')
    parts.append(f'<text x="4" y="110">{low:.1f}</text>')
    parts.append(f'<text x="{_WIDTH - 4}" y="110" text-anchor="end">{high:.1f}</text>')
    return _svg("".join(parts), _WIDTH, 114, "Predictive density before and after")


def shifts(names: Sequence[str], d: Tensor, limit: float) -> str:  # (F,)
    """How far each feature was moved, in standard deviations; `limit` is half of the width."""
    height, parts = 15, []
    for i, (name, value) in enumerate(zip(names, d.tolist(), strict=True)):
        length = 55 * min(abs(value) / max(limit, 1e-12), 1.0)
        x = 180 - (length if value < 0 else 0)
        parts.append(f'<text x="118" y="{i * height + 11}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect x="{x:.1f}" y="{i * height + 3}" width="{length:.1f}" height="9" '
            f'fill="{ATTACKED if value > 0 else CLEAN}"/>'
        )
    parts.append(f'<line x1="180" x2="180" y1="0" y2="{height * len(names)}" stroke="{_INK}"/>')
    return _svg("".join(parts), _WIDTH, height * len(names), "How far each feature was moved")


def _across(place: float, low: float, high: float) -> float:
    return 4 + (_WIDTH - 8) * (place - low) / max(high - low, 1e-12)


def _grid(colours: list[list[str]], title: str) -> str:
    size = f'width="{_SIDE}" height="{_SIDE}"'
    parts = [
        f'<rect x="{_SIDE * j}" y="{_SIDE * i}" {size} fill="{colour}"/>'
        for i, row in enumerate(colours)
        for j, colour in enumerate(row)
    ]
    body = f'<g shape-rendering="crispEdges">{"".join(parts)}</g>'
    return _svg(body, _SIDE * len(colours[0]), _SIDE * len(colours), title)


def _svg(body: str, width: float, height: float, title: str) -> str:
    drawn = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'font-size="11" font-family="sans-serif" fill="{_INK}">{body}</svg>'
    )
    data = b64encode(drawn.encode()).decode()
    return f'<img alt="{escape(title)}" style="width:100%" src="data:image/svg+xml;base64,{data}">'

"""The paper's numbers, as printed, from `reported.toml`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

Cell = tuple[float, float | None]  # mean, standard deviation over its repetitions


def parse(text: str, columns: str = "clean PGD1 PGD PGD+ ENT") -> dict[str, Cell]:
    """A row of a table, by its columns.

    >>> parse("0.96 (0.00) 0.32", "clean PGD")
    {'clean': (0.96, 0.0), 'PGD': (0.32, None)}
    """
    cells = re.findall(r"(-?\d+\.\d+)(?: \((\d+\.\d+)\))?", text)
    pairs = [(float(mean), float(sd) if sd else None) for mean, sd in cells]
    return dict(zip(columns.split(), pairs, strict=True))


def _rows(rows: dict[str, str]) -> dict[str, dict[str, Cell]]:
    columns = {"columns": rows.pop("columns")} if "columns" in rows else {}
    return {row: parse(text, **columns) for row, text in rows.items()}


_PAPER = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# table -> metric -> row -> column
REPORTED = {
    table: {metric: _rows(rows) for metric, rows in metrics.items()}
    for table, metrics in _PAPER["tables"].items()
}
MULTI_STEP: dict[str, dict[str, list[float]]] = _PAPER[
    "multi_step"
]  # metric -> attack -> by radius
COST: dict[str, list[float]] = _PAPER["cost"]
CERTIFIED: dict[str, tuple[float, float]] = _PAPER["certified"]

"""Tables as text, Markdown and JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from advbayes.metrics import Estimate


def shown(value: float) -> str:
    """Three decimals, more digits for small numbers, infinity as inf.

    >>> shown(0.5), shown(0.00012), shown(1234.5)
    ('0.500', '1.20e-04', '1234')
    """
    if not math.isfinite(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    return f"{value:.0f}" if size >= 1000 else f"{value:.2e}" if 0 < size < 5e-4 else f"{value:.3f}"


@dataclass(frozen=True)
class Row:
    """One predictor under one attack at one radius."""

    predictor: str
    attack: str
    eps: float | None
    values: dict[str, Estimate]  # without the metrics that its predictions cannot give
    marked: bool = False  # whether a failed audit puts a dagger on it


@dataclass(frozen=True)
class Table:
    """Estimates with their intervals, and the audit's line beneath.

    >>> rows = (Row("MIX", "PGD", 2.0, {"accuracy": Estimate(0.5, 0.4, 0.6, 100, 0.95)}),)
    >>> print(Table(("accuracy",), rows).markdown())
    | predictor | attack | eps | accuracy |
    |---|---|---|---|
    | MIX | PGD | 2 | 0.500 [0.400, 0.600] |
    """

    metrics: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""
    dagger: bool = False

    def _lines(self) -> list[list[str]]:
        lines = [["predictor", "attack", "eps", *self.metrics]]
        for row in self.rows:
            mark = " †" if self.dagger and row.marked else ""
            cells = [
                f"{shown(value.value)}{mark} [{shown(value.low)}, {shown(value.high)}]"
                if value is not None
                else ""
                for value in (row.values.get(name) for name in self.metrics)
            ]
            lines.append(
                [row.predictor, row.attack, "" if row.eps is None else f"{row.eps:g}", *cells]
            )
        return lines

    def markdown(self) -> str:
        """A Markdown table."""
        head, *body = self._lines()
        lines = [f"| {' | '.join(cells)} |" for cells in (head, *body)]
        lines.insert(1, "|" + "---|" * len(head))
        return "\n".join(lines) + (f"\n\n{self.note}" if self.note else "")

    def text(self) -> str:
        """Aligned columns."""
        lines = self._lines()
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        body = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        body.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(body) + (f"\n{self.note}" if self.note else "")

    __str__ = text

    def json(self) -> dict[str, Any]:
        """A dictionary that JSON can hold (an infinite value is null)."""

        def number(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return {
            "note": self.note,
            "dagger": self.dagger,
            "rows": [
                {
                    "predictor": row.predictor,
                    "attack": row.attack,
                    "eps": row.eps,
                    **{
                        name: {
                            "value": number(found.value),
                            "low": number(found.low),
                            "high": number(found.high),
                            "num": found.num,
                            "level": found.level,
                        }
                        for name, found in row.values.items()
                    },
                }
                for row in self.rows
            ],
        }

"""Tables: of text for every place they are printed in, and of estimates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from advbayes.checks import inert
from advbayes.metrics import Estimate

if TYPE_CHECKING:
    from rich.table import Table as RichTable


_ROUNDING = 1e-7  # such as the ECE of a guess among three classes


def shown(value: float) -> str:
    """Three decimals, more digits for small numbers, none for float32's rounding; infinity as inf.

    >>> shown(0.5), shown(0.00012), shown(9.9e-9), shown(1234.5)
    ('0.500', '1.20e-04', '0.000', '1234')
    """
    if not math.isfinite(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    if size < _ROUNDING:
        return "0.000"
    return f"{value:.0f}" if size >= 1000 else f"{value:.2e}" if size < 5e-4 else f"{value:.3f}"


@dataclass(frozen=True)
class Grid:
    """Cells of text under a head: what a terminal, a text file and Markdown are printed from.

    >>> print(Grid(("row", "accuracy"), [("MIX", 0.5)]).markdown())
    | row | accuracy |
    |---|---|
    | MIX | 0.5 |
    """

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    right: Sequence[int] = ()  # columns of numbers, aligned to the right on a terminal

    def markdown(self) -> str:
        """As Markdown; cells may hold markup."""
        lines = [f"| {' | '.join(map(str, cells))} |" for cells in (self.head, *self.rows)]
        return "\n".join([lines[0], "|" + "---|" * len(self.head), *lines[1:]])

    def text(self) -> str:
        """Aligned columns."""
        lines = [list(map(str, cells)) for cells in (self.head, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in lines)

    def rich(self) -> RichTable:
        """For a terminal; cells are text, never markup."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(inert(self.title)) if self.title else None, title_justify="left"
        )
        for number, name in enumerate(self.head):
            table.add_column(Text(inert(name)), justify="right" if number in self.right else "left")
        for row in self.rows:
            table.add_row(*(Text(inert(str(cell))) for cell in row))
        return table


@dataclass(frozen=True)
class Column:
    """How a metric is called, and what it is multiplied by to be in the unit that the name states.

    >>> Column("RMSE (price)", 20.0).cell(0.5, 0.4, 0.6)
    '10.000 [8.000, 12.000]'
    >>> Column("NLL").cell(0.5, -math.inf, math.inf)  # of one example
    '0.500 [no interval]'
    """

    name: str
    factor: float = 1.0

    def cell(
        self, value: float | None, low: float | None, high: float | None, mark: str = ""
    ) -> str:
        """Value and interval; None stands for a number that is not finite."""
        parts = (value, low, high)
        text = ["not finite" if x is None else shown(self.factor * x) for x in parts]
        known = [x is not None and math.isfinite(x) for x in parts]
        interval = "no interval" if known[0] and not all(known) else f"{text[1]}, {text[2]}"
        return f"{text[0]}{mark} [{interval}]"


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

    def grid(self, columns: Mapping[str, Column] | None = None, title: str = "") -> Grid:
        """The cells as text, each metric under its column's name and in its unit."""
        shown_as = columns or {metric: Column(metric) for metric in self.metrics}
        rows = []
        for row in self.rows:
            mark = " †" if self.dagger and row.marked else ""
            estimates = {name: row.values.get(name) for name in shown_as}
            cells = [
                "" if each is None else shown_as[name].cell(each.value, each.low, each.high, mark)
                for name, each in estimates.items()
            ]
            eps = "" if row.eps is None else f"{row.eps:g}"
            rows.append((row.predictor, row.attack, eps, *cells))
        names = (column.name for column in shown_as.values())
        return Grid(("predictor", "attack", "eps", *names), rows, title)

    def markdown(self) -> str:
        """A Markdown table."""
        return self.grid().markdown() + (f"\n\n{self.note}" if self.note else "")

    def text(self) -> str:
        """Aligned columns."""
        return self.grid().text() + (f"\n{self.note}" if self.note else "")

    __str__ = text

    def json(self) -> dict[str, Any]:
        """A dictionary that JSON can hold (an infinite value is null)."""

        def plain(each: Estimate) -> dict[str, float | None]:
            values = vars(each).items()
            return {name: value if math.isfinite(value) else None for name, value in values}

        rows = [
            {
                "predictor": row.predictor,
                "attack": row.attack,
                "eps": row.eps,
                **{name: plain(each) for name, each in row.values.items()},
            }
            for row in self.rows
        ]
        return {"note": self.note, "dagger": self.dagger, "rows": rows}

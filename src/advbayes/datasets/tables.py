"""Delimited text with a header: numbers out, or the line and column that is none."""

from __future__ import annotations

import csv
import difflib
import io
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advbayes.checks import InputError, describe
from advbayes.datasets.errors import DataError, problem

DELIMITERS = (",", ";", "\t")
_MAX_LINE = 1 << 20
_MAX_COLUMNS = 100_000


class NotANumberError(DataError):
    """A cell that is no number where one was wanted."""


@dataclass(frozen=True)
class Table:
    """Numeric columns as one array, text columns as they stand.

    >>> parse_table(b"a;b\\n1;2\\n", "t.csv")
    Table(columns=('a', 'b'), numbers=array([[1., 2.]]), text={})
    """

    columns: tuple[str, ...]  # of `numbers`
    numbers: npt.NDArray[np.float64]  # (N, len(columns))
    text: dict[str, list[str]]


def parse_table(
    data: bytes,
    name: str,
    *,
    header: Sequence[str] | None = None,  # for a file that has none
    text: Sequence[str] | None = (),  # columns to leave as text; None: all
    numbers: Sequence[str] | None = None,  # columns to take as numbers; absent: all the others
    delimiter: str | None = None,  # absent: whichever of , ; tab gives the most columns
) -> Table:
    """Read delimited text in UTF-8; blank lines are skipped.

    >>> parse_table(b"a,b\\n1,x\\n", "t.csv")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    advbayes.datasets.tables.NotANumberError: t.csv: wanted a number in line 2, column 'b', got 'x'. Encode text as numbers...
    """  # noqa: E501
    lines = _Lines(data, name)
    try:
        if delimiter is None:
            delimiter = _sniffed(_Lines(data, name))
        elif len(delimiter) != 1 or delimiter in '"\r\n':
            raise InputError(
                f"delimiter must be one character, no quote and no line end, got "
                f"{describe(delimiter)}"
            )
        reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
        return _parse(lines, reader, name, header, text, numbers)
    except csv.Error as error:
        raise DataError(
            problem(name, "delimited text", f"{error} in line {lines.num}", "Check that line.")
        ) from None
    except UnicodeDecodeError as error:
        got = f"byte {error.object[error.start]:#04x} after line {lines.num}"
        raise DataError(problem(name, "text in UTF-8", got, "Save it as UTF-8.")) from None


class _Lines:
    """The lines of a file, decoded as they are read, none endless, each a row of its own."""

    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        self.num = 0  # lines given out
        self.rows = 0  # lines whose row is complete
        self.stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig", newline="")

    def __iter__(self) -> Iterator[str]:
        while line := self.stream.readline(_MAX_LINE + 1):
            self.num += 1
            if len(line) > _MAX_LINE:
                wanted = f"at most {_MAX_LINE} characters in line {self.num}"
                raise DataError(problem(self.name, wanted, "more", "Check that it is a table."))
            if self.num > self.rows + 1:
                # A row that goes on over lines could go on for ever, and no number has a line end
                # in it.
                wanted = f"the quote opened in line {self.num - 1} closed there"
                raise DataError(
                    problem(self.name, wanted, "a line end inside it", "Check that line.")
                )
            yield line

    def complete(self) -> None:
        self.rows = self.num


def _parse(
    lines: _Lines,
    reader: Iterator[list[str]],
    name: str,
    header: Sequence[str] | None,
    text: Sequence[str] | None,
    numbers: Sequence[str] | None,
) -> Table:
    rows = _rows(lines, reader)
    columns = [cell.strip() for cell in (header if header is not None else next(rows, []))]
    if not 0 < len(columns) <= _MAX_COLUMNS:
        got = f"{len(columns)} columns" if columns else "an empty file"
        raise DataError(
            problem(name, f"a table of 1 to {_MAX_COLUMNS} columns", got, "Check the file.")
        )
    if header is None and all(finite_number(cell) is not None for cell in columns):
        raise DataError(
            problem(
                name, "a first line that names the columns", "numbers", "Add one, or pass header=."
            )
        )
    seen = {""}
    for index, column in enumerate(columns, 1):
        if column in seen:
            got = f"{describe(column)} for column {index}"
            raise DataError(problem(name, "a name of its own for each column", got, "Rename it."))
        seen.add(column)
    position = {column: index for index, column in enumerate(columns)}
    text = columns if text is None else text
    for column in (*text, *(numbers or ())):
        if column not in position:
            near = difflib.get_close_matches(column, columns[:1000], 1)
            remedy = f"Did you mean {near[0]!r}?" if near else "Check the name."
            got = f"the columns {', '.join(columns[:50])[:300]}"
            raise DataError(problem(name, f"a column {column!r}", got, remedy))
    left = {column: position[column] for column in text}
    kept = [
        position[column]
        for column in (columns if numbers is None else numbers)
        if column not in left
    ]
    words: dict[str, list[str]] = {column: [] for column in text}
    values = array("d")
    num = 0
    for row in rows:
        if len(row) != len(columns):
            raise DataError(
                problem(
                    name,
                    f"{len(columns)} cells in line {lines.num}",
                    f"{len(row)}",
                    "Check that line.",
                )
            )
        for index in kept:
            value = finite_number(row[index])
            if value is None:
                raise NotANumberError(_not_a_number(name, lines.num, columns[index], row[index]))
            values.append(value)
        for column, index in left.items():
            words[column].append(row[index].strip())
        num += 1
    if num == 0:
        raise DataError(problem(name, "rows below the header", "none", "Check the file."))
    cells = (
        np.frombuffer(values, np.float64).reshape(num, len(kept)) if kept else np.empty((num, 0))
    )
    return Table(tuple(columns[index] for index in kept), cells, words)


def _rows(lines: _Lines, reader: Iterator[list[str]]) -> Iterator[list[str]]:
    for row in reader:
        lines.complete()
        if any(cell.strip() for cell in row):
            yield row


def _sniffed(lines: _Lines) -> str:
    """The delimiter that divides the first line that is not blank into the most cells."""
    first = ""
    for first in lines:
        lines.complete()
        if first.strip():
            break
    return max(DELIMITERS, key=lambda candidate: len(_cells(first, candidate)))


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return []


def finite_number(cell: str) -> float | None:
    """A finite number, or None; Python's own `1_000` is no number in a data file.

    >>> finite_number(" 2.5"), finite_number("1_000"), finite_number("nan")
    (2.5, None, None)
    """
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in cell else None


def _not_a_number(name: str, line: int, column: str, cell: str) -> str:
    remedy = "Encode text as numbers, or leave the column out."
    if not cell.strip():
        remedy = "Fill in the missing value, or drop the line."
    elif finite_number(cell.replace(",", ".", 1)) is not None:
        remedy = "Write a decimal point, not a comma."
    elif cell.strip().lower().lstrip("+-") in ("nan", "inf", "infinity", "na", "null"):
        remedy = "Only finite values can be used: fill it in, or drop the line."
    return problem(name, f"a number in line {line}, column {column!r}", describe(cell), remedy)

"""Delimited text with a header: numbers out, or the line and column that is none."""

from __future__ import annotations

import csv
import difflib
import io
import math
import re
import warnings
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from advbayes.checks import InputError, describe
from advbayes.datasets.errors import DataError

DELIMITERS = (",", ";", "\t")
MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?"))
_SEPARATOR = re.compile(r'"?sep=([^"\r\n])"?\r?\n?', re.IGNORECASE)
UNNAMED = "column 1"  # what a first column without a name is called
_MAX_LINE = 1 << 20
_MAX_COLUMNS = 100_000
NO_COMMA = "Write a decimal point, not a comma, and nothing between thousands."
# how files that are no text begin
PACKED = {b"\x1f\x8b": "a gzip file", b"PK\x03\x04": "a zip file or a workbook"}


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
    padded: dict[str, str] = field(default_factory=dict, repr=False)  # of numbers, such as 00150

    def select(self, names: Sequence[str]) -> npt.NDArray[np.float64]:  # (N, len(names))
        """Numeric columns by name."""
        return self.numbers[:, [self.columns.index(name) for name in names]]


def parse_table(
    data: bytes,
    name: str,
    *,
    header: Sequence[str] | None = None,  # for a file that has none
    text: Sequence[str] | None = (),  # columns to leave as text; None: all
    numbers: Sequence[str] | None = None,  # columns to take as numbers; absent: all the others
    delimiter: str | None = None,  # absent: as a line `sep=;` says, or what gives most of , ; tab
) -> Table:
    """Read delimited text in UTF-8; blank lines, and a delimiter at the end of a line, are skipped.

    Unless commas divide the cells, a number may have a decimal comma; then none has a point.

    >>> with warnings.catch_warnings(action="ignore"):  # which says that commas were read as points
    ...     parse_table(b"a;b\\n1,5;2\\n", "t.csv").numbers
    array([[1.5, 2. ]])
    >>> parse_table(b"a,b\\n1,x\\n", "t.csv")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    advbayes.datasets.tables.NotANumberError: t.csv: wanted a number in line 2, column 'b', got 'x'. Encode text as numbers...
    """  # noqa: E501
    for signature, got in PACKED.items():
        if data.startswith(signature):
            remedy = "Unpack it, or save its sheet as CSV."
            raise DataError(name, "delimited text", got, remedy)
    delimiter = _delimiter(data, delimiter)
    rows = _rows(data, name, delimiter)
    columns = [*map(_one_line, header if header is not None else next(rows, (0, []))[1])]
    first = list(islice(rows, 1))
    unnamed = header is None and len(columns) > 1 and not columns[-1]
    if unnamed and not any(row[-1].strip() for _, row in first):
        del columns[-1]  # a delimiter at the end of each line
    if header is None and len(columns) > 1 and not columns[0]:
        columns[0] = UNNAMED  # the row numbers that other programs write
    _check_header(name, columns, given=header is not None)
    text = columns if text is None else text
    position = {column: index for index, column in enumerate(columns)}
    for column in (*text, *(numbers or ())):
        if column not in position:
            near = difflib.get_close_matches(column, columns[:1000], 1)
            remedy = f"Did you mean {near[0]!r}?" if near else "Check the name."
            if near and "," in near[0]:
                remedy += " On the command line a name with a comma in it stands in double quotes."
            if len(columns) == 1:
                remedy = "Check that its cells are divided by commas, semicolons or tabs."
            got = f"the columns {', '.join(columns[:50])[:300]}"
            raise DataError(name, f"a column {column!r}", got, remedy)
    words: dict[str, list[str]] = {column: [] for column in text}
    asked = columns if numbers is None else numbers
    numeric = [column for column in asked if column not in words]
    values = array("d")
    padded: dict[str, str] = {}
    points: dict[str, tuple[str, str]] = {}  # of "," and ".", where one is first in a number
    num = 0
    for line, row in chain(first, rows):
        num += 1
        if len(row) == len(columns) + 1 and not row[-1].strip():
            del row[-1]
        if len(row) != len(columns):
            wanted = f"{len(columns)} cells in line {line}"
            raise DataError(name, wanted, f"{len(row)}", "Check that line.")
        for column in numeric:
            cell = row[position[column]]
            value = finite_number(cell)
            if delimiter != ",":
                if value is None and (value := _with_comma(cell)) is not None:
                    points.setdefault(",", (column, cell))
                elif "." in cell:
                    points.setdefault(".", (column, cell))
            if value is None:
                wanted = f"a number in line {line}, column {column!r}"
                raise NotANumberError(name, wanted, describe(cell), _remedy(cell))
            values.append(value)
            if zero_padded(cell):
                padded.setdefault(column, cell)
        for column, cells in words.items():
            cells.append(_one_line(row[position[column]]))
    if num == 0:
        raise DataError(name, "rows below the header", "none", "Check the file.")
    if delimiter != ",":
        words = {column: _with_points(column, cells, points) for column, cells in words.items()}
    _check_points(name, points)
    matrix = np.frombuffer(values, np.float64) if numeric else np.empty(0)
    return Table(tuple(numeric), matrix.reshape(num, len(numeric)), words, padded)


def _one_line(cell: str) -> str:
    """The cell without space around it, and with a space for each line end within it."""
    cell = cell.strip()
    return cell if cell.isprintable() else " ".join(cell.splitlines())


def _with_comma(cell: str) -> float | None:
    """A number with a decimal comma."""
    return finite_number(cell.replace(",", ".")) if "," in cell and "." not in cell else None


def _with_points(column: str, cells: list[str], points: dict[str, tuple[str, str]]) -> list[str]:
    """The cells of a column with decimal points for its commas, if it holds numbers alone."""
    with_commas = {cell for cell in cells if _with_comma(cell) is not None}
    others = [cell for cell in cells if cell.lower() not in MISSING and cell not in with_commas]
    if any(finite_number(cell) is None for cell in others):
        return cells
    if with_point := [cell for cell in others if "." in cell]:
        points.setdefault(".", (column, with_point[0]))
    if not with_commas:
        return cells
    points.setdefault(",", (column, min(with_commas)))
    return [cell.replace(",", ".") if cell in with_commas else cell for cell in cells]


def _check_points(name: str, points: dict[str, tuple[str, str]]) -> None:
    """Say that commas were read as points; refuse a file with both, where one may divide
    thousands."""
    if "," not in points:
        return
    column, cell = points[","]
    if "." in points:
        other, with_point = points["."]
        got = f"{cell!r:.40} in column {column!r} and {with_point!r:.40} in column {other!r}"
        raise DataError(name, "decimal points, or decimal commas, in all numbers", got, NO_COMMA)
    warnings.warn(
        f"{name}: numbers are read with decimal commas, such as {cell!r:.40} in column {column!r}",
        stacklevel=3,
    )


def _check_header(name: str, columns: list[str], *, given: bool) -> None:
    if not 0 < len(columns) <= _MAX_COLUMNS:
        got = f"{len(columns)} columns" if columns else "an empty file"
        raise DataError(name, f"a table of 1 to {_MAX_COLUMNS} columns", got, "Check the file.")
    if not given and all(finite_number(cell) is not None for cell in columns):
        wanted = "a first line that names the columns"
        remedy = "Add a line of names at the top (in Python, header= names them)."
        raise DataError(name, wanted, "numbers", remedy)
    seen: dict[str, int] = {}
    for index, column in enumerate(columns, 1):
        if not column or column in seen:
            also = f", as for column {seen[column]}" if column else ""
            got = f"{describe(column)} for column {index}{also}"
            raise DataError(name, "a name of its own for each column", got, "Rename it.")
        seen[column] = index


def _delimiter(data: bytes, delimiter: str | None) -> str:
    """What divides the cells: as given, as a line `sep=;` says, or what gives most of , ; tab."""
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
        wanted = "delimiter must be one character, no quote and no line end"
        raise InputError(f"{wanted}, got {describe(delimiter)}")
    if delimiter is not None:
        return delimiter
    lines = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig", errors="replace", newline="")
    line = lines.readline(_MAX_LINE + 1)
    if said := _SEPARATOR.fullmatch(line):  # which Excel writes
        return said[1]
    while line and not line.strip():
        line = lines.readline(_MAX_LINE + 1)
    return max(DELIMITERS, key=lambda each: _num_cells(line, each))


def _rows(data: bytes, name: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of each row that is not blank, decoded as they are read, none endless."""
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig", newline="")
    length, line = 0, ""  # of the row so far; its last line

    def lines() -> Iterator[str]:
        nonlocal length, line
        while line := stream.readline(_MAX_LINE + 1):
            length += len(line)
            if length > _MAX_LINE:
                wanted = f"at most {_MAX_LINE} characters in line {began}"
                raise DataError(name, wanted, "more", "Check its quotes, and that it is a table.")
            yield line

    reader = csv.reader(lines(), delimiter=delimiter, skipinitialspace=True)
    began = 1
    try:
        for row in reader:
            if not line:  # the reader wanted more
                wanted = f"the quote opened in line {began} closed"
                raise DataError(name, wanted, "the end of the file", "Check that line.")
            said_alone = began == 1 and _SEPARATOR.fullmatch(line)
            if any(cell.strip() for cell in row) and not said_alone:
                yield began, row
            began, length = reader.line_num + 1, 0
    except csv.Error as error:
        got = f"{error} in line {began}"
        raise DataError(name, "delimited text", got, "Check that line.") from None
    except UnicodeDecodeError as error:  # of a piece of the file, somewhere ahead of the reader
        where = 1 + data.count(b"\n", 0, _undecodable(data))
        got = f"byte {error.object[error.start]:#04x} in line {where}"
        raise DataError(name, "text in UTF-8", got, "Save it as UTF-8.") from None


def _num_cells(line: str, delimiter: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=delimiter)))
    except csv.Error:
        return 0


def _undecodable(data: bytes) -> int:
    """Where the first byte that is no UTF-8 stands."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(data)


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


def zero_padded(cell: str) -> bool:
    """Whether a number is written as codes are.

    >>> zero_padded("00150"), zero_padded("0.5"), zero_padded("0")
    (True, False, False)
    """
    return cell[:1] == "0" and cell[1:2].isdigit()


def decimal_comma(cell: str) -> bool:
    """Whether a cell would be a number with a decimal point for its comma.

    >>> decimal_comma("2,5"), decimal_comma("a,b")
    (True, False)
    """
    return finite_number(cell.replace(",", ".", 1)) is not None


def _remedy(cell: str) -> str:
    if not cell.strip():
        return "Fill in the missing value, or drop the line."
    if decimal_comma(cell):
        return NO_COMMA
    if cell.strip().lower().lstrip("+-") in ("nan", "inf", "infinity", "na", "null"):
        return "Only finite values can be used: fill it in, or drop the line."
    return "Encode text as numbers, or leave the column out."


def check_apart(file: object, name: str, values: npt.NDArray[np.float64]) -> None:
    """Refuse a column whose differences are lost in float32, such as times in seconds since 1970:
    its rounding must stay below a hundredth of its standard deviation.

    >>> check_apart("a.csv", "hour", np.arange(24.0))
    >>> check_apart("a.csv", "time", 1.7e9 + np.arange(24.0))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    advbayes.datasets.errors.DataError: a.csv: wanted numbers that differ in float32 ...
    """
    with np.errstate(all="ignore"):  # what is beyond float32 is refused elsewhere
        size = float(np.abs(values).max(initial=0.0)) or 1.0  # of which squares may be 0
        spread = float((values / size).std()) * size if len(values) else 0.0
        lost = float(np.abs(values.astype(np.float32) - values).max(initial=0.0))
    if math.inf > lost > 0.01 * spread > 0:
        wanted = f"numbers that differ in float32 in column {name!r}"
        got = f"{values[0]:.12g} and others, of standard deviation {spread:.3g}"
        raise DataError(file, wanted, got, "Subtract a constant from it, rescale it, or drop it.")


def float32(
    file: object,
    what: str,
    values: npt.NDArray[Any],
    names: Sequence[str] = (),  # of the columns
) -> Tensor:
    """A copy in float32; what is not finite there is refused."""
    with np.errstate(all="ignore"):  # what does not survive is not finite
        narrow = np.array(values, np.float32, order="C")  # a copy: tensors must own what they hold
    if not np.isfinite(narrow).all():
        place = tuple(np.argwhere(~np.isfinite(narrow))[0])
        got = f"{values[place]:.6g} in row {int(place[0]) + 1}"
        wanted = f"finite numbers within float32 (up to 3.4e38) in {what}"
        if len(place) == 2 and names:
            wanted += f", column {names[place[1]]!r}"
        raise DataError(file, wanted, got, "Rescale or drop it.")
    return torch.from_numpy(narrow)

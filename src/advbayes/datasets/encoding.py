"""Tables as they come: text columns one-hot encoded, missing numbers imputed and marked."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from advbayes.checks import InputError, extra, joined
from advbayes.datasets.errors import DataError
from advbayes.datasets.tables import (
    MISSING,
    NO_COMMA,
    decimal_comma,
    finite_number,
    float32,
    parse_table,
)
from advbayes.store import StoreError
from advbayes.store.preprocessing import as_fitted, decode, dense, encode

if TYPE_CHECKING:
    from advbayes.datasets.scaling import Standardize

MAX_CATEGORIES = 50


@dataclass(frozen=True, eq=False)
class Encoding:
    """A table's columns as features: medians for missing numbers with an indicator, one column for
    each word of a text.

    An attacker may change the numbers that are known (`mask`, `indicators`), not which category a
    row is of nor whether a value is known.

    >>> rows = np.array([[1.0, "red"], [np.nan, "blue"], [3.0, "red"]], object)
    >>> encoding = Encoding.fit(("size", "colour"), rows, numeric=(True, False))
    >>> encoding.feature_names, encoding.mask.tolist()
    (('size', 'size missing', 'colour=blue', 'colour=red'), [True, False, False, False])
    >>> encoding.transform([[None, "red"]])
    tensor([[2., 1., 0., 1.]])
    """

    columns: tuple[str, ...]  # of the table
    numeric: tuple[bool, ...]  # which of them are numbers
    movable: tuple[str, ...]  # columns whose text or imputed numbers may be changed after all
    transformer: Any  # a fitted ColumnTransformer over `columns`
    late: tuple[str, ...] = ()  # numbers that can be missing, and never were in the rows fitted to

    @classmethod
    def fit(
        cls,
        columns: Sequence[str],
        rows: npt.NDArray[Any],  # (N, len(columns)): numbers (NaN where missing) and text
        numeric: Sequence[bool],
        movable: Sequence[str] = (),
        later: npt.NDArray[Any] | None = None,  # rows to come, for the gaps that they have
    ) -> Encoding:
        """Medians, indicators and categories of the rows; indicators also of what is missing in
        later rows alone.

        >>> rows, later = np.array([[1.0], [3.0]], object), np.array([[np.nan]], object)
        >>> Encoding.fit(("size",), rows, (True,), later=later).transform(later)
        tensor([[2., 1.]])
        """
        with extra("text columns and missing values need scikit-learn", "data"):
            from sklearn.compose import ColumnTransformer
            from sklearn.impute import SimpleImputer
            from sklearn.preprocessing import OneHotEncoder
        imputer = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
        one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        numbers = [index for index, is_number in enumerate(numeric) if is_number]
        text = [index for index, is_number in enumerate(numeric) if not is_number]
        parts = [("numbers", imputer, numbers), ("text", one_hot, text)]
        transformer = ColumnTransformer(
            [part for part in parts if part[2]], sparse_threshold=0
        ).fit(rows)
        late: list[int] = []
        if numbers and later is not None:
            fitted = transformer.named_transformers_["numbers"].indicator_
            seen = set(fitted.features_.tolist())
            gaps = np.isnan(later[:, numbers].astype(np.float64)).any(0)
            late = [place for place in np.flatnonzero(gaps).tolist() if place not in seen]
            fitted.features_ = np.array(sorted({*seen, *late}), np.int64)
        without = tuple(columns[numbers[place]] for place in late)
        return cls(tuple(columns), tuple(numeric), tuple(movable), transformer, without)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Of the encoded columns: numbers, indicators, categories."""
        return tuple(name for name, _ in self._features())

    @property
    def mask(self) -> Tensor:  # (F,)
        """Which encoded columns an attacker may change."""
        return torch.tensor([free for _, free in self._features()])

    def indicators(
        self, scaling: Standardize | None = None
    ) -> tuple[tuple[int, int, float], ...] | None:
        """For a ball: each number that can be missing, its indicator, and halfway between 0 and 1
        in the scaling's units; None where there are none.

        >>> rows = np.array([[1.0, 5.0], [2.0, np.nan], [3.0, 6.0]], object)
        >>> Encoding.fit(("a", "b"), rows, numeric=(True, True)).indicators()
        ((1, 2, 0.5),)
        """
        names, marked = self._numbers
        halfway = torch.full((len(self.feature_names),), 0.5)
        halfway = halfway if scaling is None else scaling.transform(halfway)
        found = tuple(
            (feature, indicator, float(halfway[indicator]))
            for indicator, feature in enumerate(marked, len(names))
            if names[feature] not in self.movable
        )
        return found or None

    def unmarked_gaps(self, rows: npt.NDArray[Any]) -> dict[str, int]:  # (N, len(columns))
        """How many numbers are missing from each column that has no indicator of it."""
        marked = self.feature_names
        found = {
            name: sum(map(_missing, rows[:, index]))
            for index, name in enumerate(self.columns)
            if self.numeric[index] and f"{name} missing" not in marked
        }
        return {name: num for name, num in found.items() if num}

    @property
    def _numbers(self) -> tuple[list[str], list[int]]:
        """The columns of numbers, and which of these have an indicator."""
        for part, fitted, places in self.transformer.transformers_:
            if part == "numbers":
                return [
                    self.columns[index] for index in places
                ], fitted.indicator_.features_.tolist()
        return [], []

    @property
    def _text(self) -> list[tuple[str, list[str]]]:
        """The columns of text with their words, an empty one for what is missing."""
        for part, fitted, places in self.transformer.transformers_:
            if part == "text":
                names = [self.columns[index] for index in places]
                return list(zip(names, fitted.categories_, strict=True))
        return []

    def _features(self) -> list[tuple[str, bool]]:
        """The encoded columns, and whether an attacker may change each."""
        names, marked = self._numbers
        return [
            *((name, True) for name in names),
            *((f"{names[index]} missing", False) for index in marked),
            *(
                (f"{name}={word or '(missing)'}", name in self.movable)
                for name, words in self._text
                for word in words
            ),
        ]

    @property
    def words(self) -> dict[str, list[str]]:
        """The words of each text column, without those that are missing."""
        return {name: [str(word) for word in words if word] for name, words in self._text}

    def unseen(self, rows: Any) -> dict[str, list[str]]:  # (N, len(columns)) -> by column
        """The words of text columns that were not there when it was fitted, one for each row that
        has such a word.

        >>> table = np.array([["red"], ["blue"]], object)
        >>> Encoding.fit(("colour",), table, numeric=(False,)).unseen([["red"], ["green"]])
        {'colour': ['green']}
        """
        found: dict[str, list[str]] = {}
        for name, known in self._text:
            words = [_word(row[self.columns.index(name)]) for row in rows]
            if new := [word for word in words if word not in set(known)]:
                found[name] = new
        return found

    def transform(
        self,
        rows: Any,  # (N, len(columns))
        name: str = "the rows",  # in messages
    ) -> Tensor:  # (N, F)
        """Rows of the table, numbers and text, as features; None and NaN are missing, an unknown
        word is no category."""
        values = np.array(rows, object)
        if values.ndim != 2 or values.shape[1] != len(self.columns):
            wanted = f"rows must have the columns {', '.join(self.columns)}"
            raise InputError(f"{wanted}, got shape {values.shape}")
        for index, (column, is_number) in enumerate(zip(self.columns, self.numeric, strict=True)):
            cells = values[:, index]
            values[:, index] = (
                _as_numbers(column, cells, name) if is_number else list(map(_word, cells))
            )
        with np.errstate(all="ignore"):
            encoded = np.asarray(self.transformer.transform(values), np.float64)
        return float32(name, "the table", encoded, self.feature_names)

    def read(self, data: bytes, name: str) -> Tensor:
        """The rows of a CSV file, by the names of its columns; words that are no category draw a
        warning, and so do numbers missing from a column that was complete."""
        text = parse_table(data, name, text=self.columns, numbers=()).text
        cells = np.array([text[column] for column in self.columns], object)
        for column, words in self.unseen(cells.T).items():
            shown = sorted({repr(word[:40]) if word else "an empty cell" for word in words})
            more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
            warnings.warn(
                f"{name}: column {column!r} has values that were not in the training data, in "
                f"{len(words)} of {cells.shape[1]} rows ({', '.join(shown[:5])}{more}); they are "
                f"predicted as of no known category",
                stacklevel=2,
            )
        late = {each: sum(map(_missing, cells[self.columns.index(each)])) for each in self.late}
        for column, num in (self.unmarked_gaps(cells.T) | late).items():
            if num:
                warnings.warn(
                    f"{name}: column {column!r} is missing in {num} of {cells.shape[1]} rows, and "
                    f"never was in the training data; the training median stands in for it",
                    stacklevel=2,
                )
        return self.transform(cells.T, name)

    def to_json(self) -> dict[str, Any]:
        """Settings and fitted values, for a bundle."""
        return {
            "columns": list(self.columns),
            "numeric": list(self.numeric),
            "movable": list(self.movable),
            "transformer": encode(self.transformer, "encoding"),
            **({"late": list(self.late)} if self.late else {}),
        }

    @classmethod
    def from_json(cls, document: Any) -> Encoding:
        """Inverse of `to_json`."""
        match document:
            case {
                "columns": list(columns),
                "numeric": list(numeric),
                "movable": list(movable),
                "transformer": {"kind": "ColumnTransformer", "columns": int(num)} as described,
            } if len(columns) == len(numeric) == num:
                return cls(
                    tuple(map(str, columns)),
                    tuple(map(bool, numeric)),
                    tuple(map(str, movable)),
                    decode(described, "encoding"),
                    tuple(map(str, document.get("late", ()))),
                )
        wanted = "columns, numeric, movable and a transformer over them"
        raise StoreError("encoding", wanted, f"{document!r:.80}")


def read_rows(
    data: bytes, name: str, columns: Sequence[str], transformer: Any
) -> npt.NDArray[np.float64]:
    """The rows of a CSV file, by the names of its columns, through a fitted transformer."""
    text = parse_table(data, name, text=columns, numbers=()).text
    cells = [[_word(cell) for cell in text[column]] for column in columns]
    numeric = [
        all(not cell or finite_number(cell) is not None for cell in column) for column in cells
    ]
    values = [
        [float(cell or "nan") for cell in column] if is_number else column
        for column, is_number in zip(cells, numeric, strict=True)
    ]
    rows = np.array(values, np.float64 if all(numeric) else object).T
    try:
        return dense(transformer.transform(as_fitted(rows, transformer))).astype(np.float64)
    except ValueError as error:
        wanted = "rows that the saved steps take"
        raise DataError(name, wanted, f"{error!s:.200}", "Check its columns.") from None


def _missing(cell: object) -> bool:
    return cell is None or cell != cell or str(cell).strip().lower() in MISSING


def _word(cell: object) -> str:
    return "" if _missing(cell) else str(cell).strip()


def _as_numbers(column: str, cells: Iterable[object], file: object) -> list[float]:
    """A column's cells as numbers, NaN where missing."""
    numbers = []
    for row, cell in enumerate(cells, 1):
        value = float("nan") if _missing(cell) else finite_number(str(cell))
        if value is None:
            remedy = NO_COMMA if decimal_comma(str(cell)) else "Correct it, or leave it empty."
            wanted = f"a number in row {row}, column {column!r}"
            raise DataError(file, wanted, f"{cell!r:.80}", remedy)
        numbers.append(value)
    return numbers


def sort_columns(
    file: object,
    table: Mapping[str, list[str]],  # the cells of each column
    text: Collection[str] = (),  # columns that are text even if every cell is a number
) -> tuple[npt.NDArray[Any], tuple[bool, ...]]:
    """The rows as numbers (NaN where missing) and text, and which columns are numbers.

    A column is one of numbers if every cell that is not missing is one. A column of which half are
    numbers is taken for one with a mistake in it, and one of more than `MAX_CATEGORIES` words for a
    name or an identifier: both are refused, and so is an empty one.
    """
    rows = np.empty((len(next(iter(table.values()))), len(table)), object)
    numeric = []
    empty: list[str] = []
    many: dict[str, tuple[int, str]] = {}  # text columns of too many words, and one of these
    for index, (name, cells) in enumerate(table.items()):
        present = [(row, cell) for row, cell in enumerate(cells, 1) if not _missing(cell)]
        wrong = [(row, cell) for row, cell in present if finite_number(cell) is None]
        if not present:
            empty.append(name)
        commas = sum(decimal_comma(cell) for _, cell in wrong)
        if name in text:
            wrong = present
        elif wrong and (2 * len(wrong) <= len(present) or 2 * commas > len(wrong)):
            row, cell = wrong[0]
            remedy = NO_COMMA if commas else "Correct it, or leave the cell empty."
            wanted = f"a number in row {row} below the header, column {name!r}"
            raise DataError(file, wanted, f"{cell[:80]!r}", remedy)
        numeric.append(not wrong)
        if not wrong:
            rows[:, index] = _as_numbers(name, cells, file)
            continue
        words = {cell.strip() for cell in cells}
        if len(words) > MAX_CATEGORIES:
            many[name] = len(words), present[0][1][:40]
        rows[:, index] = [_word(cell) for cell in cells]
    faults = {}  # what was wanted: what came
    if empty:
        faults[f"values in {', '.join(map(repr, empty))}"] = "none"
    if many:
        named = ", ".join(map(repr, many))
        wanted = f"at most {MAX_CATEGORIES} different words in a text column, in {named}"
        faults[wanted] = ", ".join(f"{num} such as {word!r}" for num, word in many.values())
    if faults:
        names = shlex.quote(joined([*empty, *many]))
        remedy = f"Leave them out: --drop {names} (drop= in Python)."
        if many:
            remedy += " Write amounts and dates as plain numbers (1234.5)."
        raise DataError(file, "; ".join(faults), "; ".join(faults.values()), remedy)
    return rows, tuple(numeric)

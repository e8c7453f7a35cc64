"""A user's own data: a table in a CSV file, or arrays in an .npz file."""

from __future__ import annotations

import functools
import hashlib
import math
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from advbayes.checks import InputError, choice, count, joined
from advbayes.datasets.dataset import Dataset, Provenance, split_rows
from advbayes.datasets.encoding import MAX_CATEGORIES, Encoding, sort_columns
from advbayes.datasets.errors import DataError
from advbayes.datasets.formats import read_npz, read_plain
from advbayes.datasets.scaling import Standardize
from advbayes.datasets.tables import (
    MISSING,
    NotANumberError,
    check_apart,
    finite_number,
    float32,
    parse_table,
    zero_padded,
)

_TASKS = ("classification", "regression")
_AS_CLASSES = "say that they are classes (--task classification, task='classification')"
_NUMBERED = (
    "Number the classes from 0: y = np.unique(y, return_inverse=True)[1]; class_names may hold "
    "what they are called."
)
_FEW = "Check y, class_names and the task."
_MAX_CLASSES = 10_000
# The standard deviation given to an indicator that was 0 in every training row: no model has
# learned what it means, and 1e-4 says it to the attacker's ball alone.
_UNHEARD = 1e4
MAX_CSV_BYTES = 1 << 28
MAX_NPZ_BYTES = 1 << 31


def from_csv(
    path: str | Path,
    target: str | Sequence[str],
    *,
    task: str | None = None,  # absent: text is a class; a target of numbers, or most, regressed on
    features: Sequence[str] | None = None,  # absent: every other column
    drop: Sequence[str] = (),  # columns that are neither
    text: Sequence[str] = (),  # columns of numbers that are codes, such as 00150: taken for text
    movable: Sequence[str] = (),  # columns whose text, or imputed numbers, an attacker may change
    header: Sequence[str] | None = None,  # the columns of a file that does not name them
    delimiter: str | None = None,  # absent: , or ; or tab, whichever divides the header most
    encoding: Encoding | None = None,  # of earlier rows; absent: fitted to the training rows
    seed: int = 0,
    test_fraction: float = 0.2,
    max_bytes: int = MAX_CSV_BYTES,
) -> Dataset:
    """A table with a named target column (or several, for regression), split by the seed.

    Text columns are one-hot encoded, missing numbers take the training rows' median and a column
    that says so.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "fruit.csv")
    >>> _ = path.write_text("size,weight,kind\\n" + "1,2,apple\\n3,5,pear\\n" * 5)
    >>> from_csv(path, target="kind")
    Dataset('fruit', classification, 8 train, 2 test, x (2,), 2 classes)
    """
    path = Path(path)
    targets = (target,) if isinstance(target, str) else tuple(target)
    if not targets or len(set(targets)) != len(targets):
        raise InputError(f"target must name one or more different columns, got {target!r}")
    if task is not None:
        choice("task", task, _TASKS)
    if task == "classification" and len(targets) > 1:
        raise InputError(f"target must be one column for classification, got {target!r}")
    asked = () if features is None else tuple(features)
    if both := sorted(set(drop) & {*targets, *asked}):
        raise InputError(f"drop must name neither the target nor a feature, got {both}")
    if both := sorted(set(asked) & set(targets)):
        raise InputError(f"features must not contain the target, got {both}")
    for name, given in (("movable", movable), ("text", text)):
        if encoding is not None and given:
            raise InputError(
                f"{name} must be left out with an encoding, which has its own, got {given}"
            )
    data = read_plain(path, count("max_bytes", max_bytes))
    parse = functools.partial(parse_table, data, str(path), header=header, delimiter=delimiter)
    others = (*targets, *drop)
    rows: npt.NDArray[Any] | None = None
    is_number: tuple[bool, ...] = ()
    as_text: dict[str, Any] = {
        "text": None if features is None else (*others, *asked),
        "numbers": (),
    }
    try:
        table = parse(**as_text if encoding or text else {"text": others, "numbers": features})
    except NotANumberError:  # text or missing values
        table = parse(**as_text)
    columns = table.columns or tuple(name for name in table.text if name not in others)
    if encoding is not None:
        rows = _rows_for(path, encoding, columns, table.text)
    elif not table.columns and columns:
        rows, is_number = sort_columns(path, {name: table.text[name] for name in columns}, text)
    if not columns:
        raise DataError(path, "a column besides the target", "none", "Check the delimiter.")
    for argument, given in (("movable", movable), ("text", text)):
        if unknown := [name for name in given if name not in columns]:
            there = ", ".join(columns[:20])
            raise InputError(f"{argument} must name features, got {unknown}; there are {there}")
    if encoding is None:
        cells_of = {name: table.text[name] for name in compress(columns, is_number)}
        numbers_of = {name: table.select([name]).ravel().tolist() for name in table.padded}
        _remark_codes(path, _padded(cells_of) | table.padded, cells_of | numbers_of)
    task, known, cells = _known_targets(path, {name: table.text[name] for name in targets}, task)
    numbers = table.numbers[known]
    rows = None if rows is None else rows[known]
    class_names: tuple[str, ...] = ()
    if task == "regression":
        y = _numbers(path, cells, known)
    else:
        class_names, y = _classes(path, cells[targets[0]])
    labels = y if task == "classification" else None
    train, test = split_rows(len(y), seed=seed, test_fraction=test_fraction, labels=labels)
    if rows is None:
        for name, column in zip(columns, numbers.T, strict=True):
            check_apart(path, name, column)
        x = float32(path, "the features", numbers, columns)
    else:
        for name in compress(columns, is_number):
            present = (finite_number(cell) for cell in table.text[name])
            check_apart(path, name, np.array([each for each in present if each is not None]))
        if encoding is None:
            encoding = Encoding.fit(columns, rows[train], is_number, movable, later=rows)
        x = encoding.transform(rows, str(path))
    scaling = Standardize.fit(x[train], y[train] if task == "regression" else None)
    if encoding is not None and encoding.late:
        late = {f"{name} missing" for name in encoding.late}
        idle = torch.tensor([name in late for name in encoding.feature_names])
        scaling = replace(scaling, std=torch.where(idle, _UNHEARD, scaling.std))
    digest = {path.name: hashlib.sha256(data).hexdigest()}
    return Dataset(
        path.stem,
        task,
        *(x[train], y[train], x[test], y[test]),
        class_names=class_names,
        feature_names=columns if encoding is None else encoding.feature_names,
        target_names=targets,
        scaling=scaling,
        encoding=encoding,
        provenance=Provenance(str(path), digest, note="the user's own file"),
    )


def from_npz(
    path: str | Path,
    *,
    task: str | None = None,  # absent: whole numbers are classes, others are regressed on
    seed: int = 0,
    test_fraction: float = 0.2,  # for a file with x and y only
    max_bytes: int = MAX_NPZ_BYTES,
) -> Dataset:
    """Arrays `x`, `y`, or `x_train`, `y_train`, `x_test`, `y_test`; optionally `class_names`,
    `feature_names`.

    Images are (N, C, H, W) or (N, H, W); unsigned bytes become [0, 1]. More than `max_bytes`
    unpacked (2 GiB unless said otherwise) is refused.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "toy.npz")
    >>> np.savez(path, x=np.zeros((10, 3)), y=np.linspace(0, 1, 10))
    >>> from_npz(path)
    Dataset('toy', regression, 8 train, 2 test, x (3,), target y)
    """
    path = Path(path)
    if task is not None:
        choice("task", task, _TASKS)
    whole, parts = ("x", "y"), ("x_train", "y_train", "x_test", "y_test")
    known = (*whole, *parts, "class_names", "feature_names")
    arrays = read_npz(path, known, count("max_bytes", max_bytes))
    class_names, feature_names = (
        _names(path, key, arrays.pop(key)) if key in arrays else ()
        for key in ("class_names", "feature_names")
    )
    if set(arrays) not in (set(whole), set(parts)):
        wanted = f"{' and '.join(whole)}, or {', '.join(parts)}"
        got = ", ".join(sorted(arrays)) or "no array"
        raise DataError(path, wanted, got, "Use these names.")
    if task is None:
        first = arrays["y" if "y" in arrays else "y_train"]
        task = "classification" if first.dtype.kind in "iub" else "regression"
    tensors = {
        key: _inputs(path, key, value) if key[0] == "x" else _outputs(path, key, value, task)
        for key, value in arrays.items()
    }
    if "x" in tensors:
        x, y = tensors["x"], tensors["y"]
        if len(x) != len(y):
            got = f"{len(x)} and {len(y)}"
            raise DataError(path, "as many rows in y as in x", got, "Check them.")
        labels = y if task == "classification" else None
        train, test = split_rows(len(x), seed=seed, test_fraction=test_fraction, labels=labels)
        x_train, y_train, x_test, y_test = x[train], y[train], x[test], y[test]
    else:
        x_train, y_train, x_test, y_test = (tensors[key] for key in parts)
    if task == "classification" and not class_names:
        largest = max((int(part.max()) for part in (y_train, y_test) if len(part)), default=0)
        class_names = tuple(map(str, range(largest + 1)))
    if task == "classification" and len(class_names) < 2:
        raise DataError(path, "two classes or more", f"{len(class_names)}", _FEW)
    size = math.prod(x_train.shape[1:])
    if feature_names and not len(feature_names) == len(set(feature_names)) == size:
        wanted = f"feature_names to be {size} different ones, as x has features"
        got = f"{len(feature_names)} ({', '.join(feature_names)[:80]})"
        raise DataError(path, wanted, got, "Name each feature once.")
    image, box, scaling = x_train.ndim > 2, None, None
    if image and all(x.numel() and x.min() >= 0 and x.max() <= 1 for x in (x_train, x_test)):
        box = (0.0, 1.0)
    if not image and x_train.numel() and y_train.numel() and len(x_train) == len(y_train):
        scaling = Standardize.fit(x_train, y_train if task == "regression" else None)
    digest = {
        key: hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        for key, value in arrays.items()
    }
    return Dataset(
        path.stem,
        task,
        *(x_train, y_train, x_test, y_test),
        class_names=class_names if task == "classification" else (),
        feature_names=feature_names,
        target_names=("y",),
        box=box,
        scaling=scaling,
        provenance=Provenance(str(path), digest, note="the user's own file"),
    )


def _padded(cells: Mapping[str, list[str]]) -> dict[str, str]:
    """A number with zeros in front, of each column that has one."""
    found = {name: next(filter(zero_padded, column), "") for name, column in cells.items()}
    return {name: cell for name, cell in found.items() if cell}


def _remark_codes(path: Path, codes: Mapping[str, str], cells: Mapping[str, list[Any]]) -> None:
    """Say that what is written as codes are is read as numbers, and what else could be done."""
    if not codes:
        return
    shown = ", ".join(f"{cell!r:.40} in column {name!r}" for name, cell in codes.items())
    many = {name for name in codes if len(set(cells[name])) > MAX_CATEGORIES}
    few, flags = [name for name in codes if name not in many], []
    if few:
        flags.append(f"--text {shlex.quote(joined(few))} (text= in Python) takes them for text")
    if many:
        names = shlex.quote(joined(name for name in codes if name in many))
        flags.append(f"--drop {names} leaves out what has more than {MAX_CATEGORIES} of them")
    warnings.warn(
        f"{path}: numbers with zeros in front are read as plain numbers, such as {shown}; if "
        f"they are codes, {', and '.join(flags)}",
        stacklevel=3,
    )


def _rows_for(
    path: Path, encoding: Encoding, columns: tuple[str, ...], cells: dict[str, list[str]]
) -> npt.NDArray[Any]:
    """The rows as an encoding of earlier ones takes them; gaps that it does not mark are said."""
    if encoding.columns != columns:
        wanted = f"encoding must be of the columns of {path}, {', '.join(columns)}"
        raise InputError(f"{wanted}, got one of {', '.join(encoding.columns)}")
    rows = np.array([cells[name] for name in columns], object).T
    for name, num in encoding.unmarked_gaps(rows).items():
        warnings.warn(
            f"{path}: column {name!r} is missing in {num} of {len(rows)} rows, and the encoding "
            f"does not mark it: what is filled in counts as known to an attacker; a model that is "
            f"trained anew marks it",
            stacklevel=3,
        )
    return rows


def _known_targets(
    path: Path, cells: dict[str, list[str]], task: str | None
) -> tuple[str, list[int], dict[str, list[str]]]:
    """The task, the rows whose target is known, and their targets; how many are left out is said.

    An empty cell is not known, and where numbers are wanted neither is `NA` or its like. A class
    may be called so.
    """
    rows = list(zip(*cells.values(), strict=True))
    known = [place for place, row in enumerate(rows) if all(row)]
    present = {name: [column[place] for place in known] for name, column in cells.items()}
    task = task or _task_of(path, present)
    if task == "regression":
        known = [place for place in known if not any(c.lower() in MISSING for c in rows[place])]
        present = {name: [column[place] for place in known] for name, column in cells.items()}
    if lost := len(rows) - len(known):
        named = ", ".join(map(repr, cells))
        warnings.warn(
            f"{path}: {lost} of {len(rows)} rows have no target ({named}) and are left out",
            stacklevel=3,
        )
    return task, known, present


def _task_of(path: Path, cells: dict[str, list[str]]) -> str:
    """Text is a class, unless nearly every row has one to itself: a price with its unit, a name. A
    number that is missing or mistyped does not make classes of the others."""
    (target, column), *others = cells.items()
    num_words, num = sum(finite_number(cell) is None for cell in column), len(set(column))
    if others or 2 * num_words < len(column):
        return "regression"
    if num > 2 and 2 * num > len(column):
        got = f"{num} different ones in {len(column)} rows, such as {column[0][:80]!r}"
        remedy = f"Write plain numbers (1234.5), or {_AS_CLASSES}."
        raise DataError(path, f"numbers, or few words, in the target {target!r}", got, remedy)
    return "classification"


def _classes(path: Path, cells: list[str]) -> tuple[tuple[str, ...], Tensor]:
    """Class names, numbers in their order and text in the alphabet's, and each row's class."""
    values = {cell: finite_number(cell) for cell in cells}
    by_number = None not in values.values()
    names = sorted(values, key=lambda cell: ((by_number and values[cell]) or 0.0, cell))
    if not 2 <= len(names) <= _MAX_CLASSES:
        wanted = f"2 to {_MAX_CLASSES} classes"
        raise DataError(path, wanted, f"{len(names)}", "Check the target column and the task.")
    index = {name: position for position, name in enumerate(names)}
    return tuple(names), torch.tensor([index[cell] for cell in cells])


def _numbers(
    path: Path,
    cells: dict[str, list[str]],
    rows: list[int],  # their places in the file
) -> Tensor:  # (N,) or (N, D)
    """What is regressed on."""
    columns = []
    for name, column in cells.items():
        values = list(map(finite_number, column))
        if None in values:
            row = values.index(None)
            got = f"{column[row][:80]!r} in row {rows[row] + 1}"
            remedy = f"Fix it, leave it empty, or {_AS_CLASSES}."
            raise DataError(path, f"numbers in the target {name!r}", got, remedy)
        columns.append(np.array(values, np.float64))
        check_apart(path, name, columns[-1])
    y = float32(path, "the target", np.array(columns).T, tuple(cells))
    return y[:, 0] if len(cells) == 1 else y


def _names(path: Path, key: str, value: npt.NDArray[Any]) -> tuple[str, ...]:
    if value.dtype.kind != "U" or value.ndim != 1 or len(value) > _MAX_CLASSES:
        raise DataError(path, f"{key} as a list of text", _described(value), "Fix it.")
    # Numbers that are no characters make the interpreter fail in ways that cannot be caught by
    # type: look first.
    order = ">" if value.dtype.byteorder == ">" else "<"
    codes = np.frombuffer(value.tobytes(), f"{order}u4")
    if bool(((codes > 0x10FFFF) | ((codes >= 0xD800) & (codes < 0xE000))).any()):
        got = "numbers that are no characters"
        raise DataError(path, f"{key} as text", got, "Write it again.")
    return tuple(str(name) for name in value)


def _inputs(path: Path, key: str, value: npt.NDArray[Any]) -> Tensor:
    if value.dtype.kind not in "iufb" or not 2 <= value.ndim <= 4:
        wanted = f"{key} as numbers of shape (N, F) or (N, C, H, W)"
        raise DataError(path, wanted, _described(value), "Reshape it.")
    if value.ndim == 4 and value.shape[1] > 4 and value.shape[3] in (1, 3, 4):
        remedy = "Move the channels: x.transpose(0, 3, 1, 2)."
        raise DataError(path, f"{key} as (N, C, H, W)", _described(value), remedy)
    x = float32(path, key, value)
    if value.ndim > 2 and value.dtype == np.uint8:
        x /= 255
    return x.unsqueeze(1) if value.ndim == 3 else x


def _outputs(path: Path, key: str, value: npt.NDArray[Any], task: str) -> Tensor:
    if value.dtype.kind not in "iufb" or value.ndim not in (1, 2):
        wanted = f"{key} as numbers of shape (N,) or (N, D)"
        remedy = _NUMBERED if value.dtype.kind == "U" else "Reshape it."
        raise DataError(path, wanted, _described(value), remedy)
    if value.ndim == 2 and value.shape[1] == 1:
        value = value[:, 0]
    if task == "regression":
        return float32(path, key, value)
    with np.errstate(all="ignore"):  # NaN and infinity are no classes
        whole = value.ndim == 1 and bool((np.isfinite(value) & (value == np.floor(value))).all())
    if not whole or (len(value) and not (value.min() >= 0 and value.max() < _MAX_CLASSES)):
        wanted = f"{key} as classes 0, 1, ... below {_MAX_CLASSES}"
        if value.ndim == 2:
            remedy = "One-hot rows become classes by y.argmax(1)."
            raise DataError(path, wanted, _described(value), remedy)
        raise DataError(path, wanted, f"{value.min()} to {value.max()}", _NUMBERED)
    return torch.from_numpy(value.astype(np.int64))


def _described(value: npt.NDArray[Any]) -> str:
    return f"{value.dtype} of shape {value.shape}"

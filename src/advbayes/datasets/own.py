"""A user's own data: a table in a CSV file, or arrays in an .npz file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from advbayes.checks import InputError, choice, count
from advbayes.datasets.containers import read_plain
from advbayes.datasets.dataset import Dataset, Provenance, split_rows
from advbayes.datasets.encoding import Encoding, sort_columns
from advbayes.datasets.errors import DataError, problem
from advbayes.datasets.npz import read_npz
from advbayes.datasets.scaling import Standardize
from advbayes.datasets.tables import NotANumberError, Table, finite_number, parse_table

_TASKS = ("classification", "regression")
_MAX_CLASSES = 10_000
MAX_CSV_BYTES = 1 << 28
MAX_NPZ_BYTES = 1 << 31


def from_csv(
    path: str | Path,
    target: str | Sequence[str],
    *,
    task: str | None = None,  # absent: text is a class; a target of numbers, or most, regressed on
    features: Sequence[str] | None = None,  # absent: every other column
    drop: Sequence[str] = (),  # columns that are neither
    movable: Sequence[str] = (),  # text columns that an attacker may change (`Dataset.mask`)
    header: Sequence[str] | None = None,  # the columns of a file that does not name them
    delimiter: str | None = None,  # absent: , or ; or tab, whichever divides the header most
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
    data = read_plain(path, count("max_bytes", max_bytes))
    if set(drop) & {*targets, *(features or ())}:
        raise InputError(
            f"drop must name neither the target nor a feature, got "
            f"{sorted(set(drop) & {*targets, *(features or ())})}"
        )
    if features is not None and set(features) & set(targets):
        raise InputError(
            f"features must not contain the target, got {sorted(set(features) & set(targets))}"
        )

    def parsed(text: Sequence[str] | None, numbers: Sequence[str] | None) -> Table:
        return parse_table(
            data, str(path), header=header, text=text, numbers=numbers, delimiter=delimiter
        )

    others = (*targets, *drop)
    rows: npt.NDArray[Any] | None = None
    is_number: tuple[bool, ...] = ()
    try:
        table = parsed(others, features)
        columns = table.columns
    except NotANumberError:  # text or missing values
        table = parsed(None if features is None else (*others, *features), ())
        columns = tuple(name for name in table.text if name not in others)
        rows, is_number = sort_columns(path, {name: table.text[name] for name in columns})
    if not columns:
        raise DataError(
            problem(path, "a column besides the target", "none", "Check the delimiter.")
        )
    if unknown := [name for name in movable if name not in columns]:
        raise InputError(
            f"movable must name features, got {unknown}; there are {', '.join(columns[:20])}"
        )
    numeric = [[finite_number(cell) for cell in table.text[name]] for name in targets]
    if task is None:  # a number that is missing or mistyped does not make classes of the others
        text = sum(value is None for value in numeric[0])
        task = "regression" if len(targets) > 1 or 2 * text < len(numeric[0]) else "classification"
    class_names: tuple[str, ...] = ()
    if task == "classification":
        if len(targets) > 1:
            raise InputError(f"target must be one column for classification, got {target!r}")
        class_names, y = _classes(path, table.text[targets[0]], numeric[0])
    else:
        y = _regression_target(path, targets, table, numeric)
    train, test = split_rows(
        len(y),
        seed=seed,
        test_fraction=test_fraction,
        labels=y if task == "classification" else None,
    )
    encoding = None if rows is None else Encoding.fit(columns, rows[train], is_number, movable)
    x = (
        _float32(path, "the features", table.numbers)
        if encoding is None
        else encoding.transform(rows)
    )
    return Dataset(
        path.stem,
        task,
        x[train],
        y[train],
        x[test],
        y[test],
        class_names=class_names,
        feature_names=columns if encoding is None else encoding.feature_names,
        target_names=targets,
        scaling=Standardize.fit(x[train], y[train] if task == "regression" else None),
        encoding=encoding,
        provenance=Provenance(
            str(path), {path.name: hashlib.sha256(data).hexdigest()}, note="the user's own file"
        ),
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
    arrays = read_npz(
        path, (*whole, *parts, "class_names", "feature_names"), count("max_bytes", max_bytes)
    )
    names = {
        key: _names(path, key, arrays.pop(key))
        for key in ("class_names", "feature_names")
        if key in arrays
    }
    if set(arrays) not in (set(whole), set(parts)):
        wanted = f"{' and '.join(whole)}, or {', '.join(parts)}"
        raise DataError(
            problem(path, wanted, ", ".join(sorted(arrays)) or "no array", "Name the arrays so.")
        )
    if task is None:
        first = arrays.get("y", arrays.get("y_train"))
        task = "classification" if first is not None and first.dtype.kind in "iub" else "regression"
    x = {key: _inputs(path, key, value) for key, value in arrays.items() if key.startswith("x")}
    y = {
        key: _outputs(path, key, value, task)
        for key, value in arrays.items()
        if key.startswith("y")
    }
    if "x" in x:
        if len(x["x"]) != len(y["y"]):
            raise DataError(
                problem(
                    path,
                    "as many rows in y as in x",
                    f"{len(x['x'])} and {len(y['y'])}",
                    "Check them.",
                )
            )
        labels = y["y"] if task == "classification" else None
        train, test = split_rows(len(x["x"]), seed=seed, test_fraction=test_fraction, labels=labels)
        x = {"x_train": x["x"][train], "x_test": x["x"][test]}
        y = {"y_train": y["y"][train], "y_test": y["y"][test]}
    class_names = names.get("class_names", ())
    if task == "classification" and not class_names:
        class_names = tuple(
            str(index)
            for index in range(1 + max((int(v.max()) for v in y.values() if len(v)), default=0))
        )
    image = x["x_train"].ndim > 2
    box = (
        (0.0, 1.0)
        if image and all(v.numel() and v.min() >= 0 and v.max() <= 1 for v in x.values())
        else None
    )
    scaling = None
    if (
        not image
        and x["x_train"].numel()
        and y["y_train"].numel()
        and len(x["x_train"]) == len(y["y_train"])
    ):
        scaling = Standardize.fit(x["x_train"], y["y_train"] if task == "regression" else None)
    digest = {
        key: hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        for key, value in arrays.items()
    }
    return Dataset(
        path.stem,
        task,
        *(x["x_train"], y["y_train"], x["x_test"], y["y_test"]),
        class_names=class_names if task == "classification" else (),
        feature_names=names.get("feature_names", ()),
        target_names=("y",),
        box=box,
        scaling=scaling,
        provenance=Provenance(str(path), digest, note="the user's own file"),
    )


def _classes(
    path: Path, cells: list[str], numeric: Sequence[float | None]
) -> tuple[tuple[str, ...], Tensor]:
    """Class names, numbers in their order and text in the alphabet's, and each row's class."""
    if "" in cells:
        raise DataError(
            problem(
                path,
                "a class for every row",
                f"an empty one in row {cells.index('') + 1}",
                "Fill it in.",
            )
        )
    values = dict(zip(cells, numeric, strict=True))
    number_like = None not in values.values()
    names = sorted(
        values, key=lambda cell: (values[cell] or 0.0, cell) if number_like else (0.0, cell)
    )
    if not 2 <= len(names) <= _MAX_CLASSES:
        raise DataError(
            problem(
                path, f"2 to {_MAX_CLASSES} classes", f"{len(names)}", "Check target= and task=."
            )
        )
    index = {name: position for position, name in enumerate(names)}
    return tuple(names), torch.tensor([index[cell] for cell in cells])


def _regression_target(
    path: Path, targets: tuple[str, ...], table: Table, numeric: list[list[float | None]]
) -> Tensor:
    for name, values in zip(targets, numeric, strict=True):
        if None in values:
            row = values.index(None)
            got = f"{table.text[name][row][:80]!r} in row {row + 1}"
            raise DataError(
                problem(
                    path,
                    f"numbers in the target {name!r}",
                    got,
                    "Fix it, or pass task='classification'.",
                )
            )
    y = _float32(path, "the target", np.array(numeric, np.float64).T)
    return y[:, 0] if len(targets) == 1 else y


def _float32(path: Path, what: str, values: npt.NDArray[Any]) -> Tensor:
    with np.errstate(all="ignore"):  # what does not survive is not finite, and refused below
        narrow = np.array(values, np.float32, order="C")  # a copy: tensors must own what they hold
    if not np.isfinite(narrow).all():
        row = int(np.argwhere(~np.isfinite(narrow))[0][0]) + 1
        raise DataError(
            problem(
                path,
                f"finite numbers within float32 in {what}",
                f"others in row {row}",
                "Rescale or drop it.",
            )
        )
    return torch.from_numpy(narrow)


def _names(path: Path, key: str, value: npt.NDArray[Any]) -> tuple[str, ...]:
    if value.dtype.kind != "U" or value.ndim != 1 or len(value) > _MAX_CLASSES:
        raise DataError(
            problem(
                path, f"{key} as a list of text", f"{value.dtype} of shape {value.shape}", "Fix it."
            )
        )
    # Numbers that are no characters make the interpreter fail in ways that cannot be caught by
    # type: look first.
    order = ">" if value.dtype.byteorder == ">" else "<"
    codes = np.frombuffer(value.tobytes(), f"{order}u4")
    if bool(((codes > 0x10FFFF) | ((codes >= 0xD800) & (codes < 0xE000))).any()):
        raise DataError(
            problem(path, f"{key} as text", "numbers that are no characters", "Write it again.")
        )
    return tuple(str(name) for name in value)


def _inputs(path: Path, key: str, value: npt.NDArray[Any]) -> Tensor:
    if value.dtype.kind not in "iufb" or not 2 <= value.ndim <= 4:
        got = f"{value.dtype} of shape {value.shape}"
        raise DataError(
            problem(path, f"{key} as numbers of shape (N, F) or (N, C, H, W)", got, "Reshape it.")
        )
    if value.ndim == 4 and value.shape[1] > 4 and value.shape[3] in (1, 3, 4):
        got = f"shape {value.shape}"
        raise DataError(
            problem(
                path, f"{key} as (N, C, H, W)", got, "Move the channels: x.transpose(0, 3, 1, 2)."
            )
        )
    x = _float32(path, key, value)
    if value.ndim > 2 and value.dtype == np.uint8:
        x /= 255
    return x.unsqueeze(1) if value.ndim == 3 else x


def _outputs(path: Path, key: str, value: npt.NDArray[Any], task: str) -> Tensor:
    if value.dtype.kind not in "iufb" or value.ndim not in (1, 2):
        raise DataError(
            problem(
                path,
                f"{key} as numbers of shape (N,) or (N, D)",
                f"{value.dtype} of shape {value.shape}",
                "Fix it.",
            )
        )
    if value.ndim == 2 and value.shape[1] == 1:
        value = value[:, 0]
    if task == "regression":
        return _float32(path, key, value)
    with np.errstate(all="ignore"):
        integral = value.dtype.kind != "f" or bool(
            (np.isfinite(value) & (value == np.floor(value))).all()
        )
    whole = value.ndim == 1 and integral
    if not whole or (len(value) and not (value.min() >= 0 and value.max() < _MAX_CLASSES)):
        raise DataError(
            problem(
                path,
                f"{key} as classes 0, 1, ... below {_MAX_CLASSES}",
                "other values",
                "Number the classes from 0.",
            )
        )
    return torch.from_numpy(value.astype(np.int64))

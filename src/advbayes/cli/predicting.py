"""Inputs read as the model wants them, predictions as columns in raw units."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical

from advbayes import metrics
from advbayes.datasets.containers import read_plain
from advbayes.datasets.encoding import read_rows
from advbayes.datasets.npz import read_npz
from advbayes.datasets.own import MAX_CSV_BYTES, MAX_NPZ_BYTES
from advbayes.datasets.tables import parse_table
from advbayes.likelihoods import predicts_classes
from advbayes.progress import Progress
from advbayes.runs import Trained
from advbayes.runs.config import ConfigError
from advbayes.store import write_bytes

_ROWS = 500

Columns = dict[str, list[Any]]


def read_inputs(trained: Trained, path: Path) -> Tensor:  # (N, *event), as the model sees them
    """Rows of a file, checked against what the model was trained on, standardised as it was."""
    if path.suffix.lower() == ".csv":
        if not trained.feature_names:
            raise ConfigError(
                f"INPUT: must be an .npz file for a model of inputs of shape {trained.event}, got "
                f"{path}"
            )
        data = read_plain(path, MAX_CSV_BYTES)
        if trained.encoding is not None:
            x = trained.encoding.read(data, str(path))
        elif trained.steps is not None:
            x = torch.from_numpy(read_rows(data, str(path), trained.feature_names, trained.steps))
        else:
            # Text columns (a label, a name) are left out: only the model's own columns must be
            # numbers.
            table = parse_table(data, str(path), numbers=trained.feature_names)
            order = [table.columns.index(name) for name in trained.feature_names]
            x = torch.from_numpy(table.numbers[:, order].astype(np.float32))
    else:
        arrays = read_npz(path, ("x", "y", "class_names", "feature_names"), MAX_NPZ_BYTES)
        if "x" not in arrays:
            raise ConfigError(
                f"INPUT: must hold an array x, got {path} with "
                f"{', '.join(sorted(arrays)) or 'none'}"
            )
        values = arrays["x"]
        x = torch.from_numpy(np.ascontiguousarray(values.astype(np.float32)))
        if trained.steps is not None:
            x = torch.from_numpy(np.asarray(trained.steps.transform(values), np.float64))
        if values.dtype == np.uint8 and trained.box == (0.0, 1.0):
            x = x / 255
        if (
            x.ndim == len(trained.event) and len(trained.event) == 3
        ):  # images without a channel axis
            x = x.unsqueeze(1)
    if trained.event and tuple(x.shape[1:]) != trained.event:
        raise ConfigError(
            f"INPUT: must hold inputs of shape {trained.event}, got {tuple(x.shape[1:])} in {path}"
        )
    if not len(x) or not bool(torch.isfinite(x).all()):
        raise ConfigError(
            f"INPUT: must hold at least one row of finite numbers, got {tuple(x.shape)} in {path}"
        )
    x = x.to(trained.model.dtype)
    return x if trained.scaling is None else trained.scaling.transform(x)


def tabulate(trained: Trained, x: Tensor, *, num_thetas: int = 20, level: float = 0.9) -> Columns:
    """One value for each row: class, confidence, entropy and probabilities, or mean, standard
    deviation and interval."""
    predict = trained.predict(num_thetas)
    parts: list[Columns] = []
    with torch.no_grad(), Progress("predict", len(x)) as bar:
        for start in range(0, len(x), _ROWS):
            prediction = predict(x[start : start + _ROWS])
            if predicts_classes(prediction):
                parts.append(_classes(prediction, trained.class_names))
            else:
                parts.append(_numbers(prediction, trained, level))
            bar.advance(num=min(_ROWS, len(x) - start))
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def _classes(prediction: Categorical, names: tuple[str, ...]) -> Columns:
    probs = prediction.probs
    names = names if len(names) == probs.shape[-1] else tuple(map(str, range(probs.shape[-1])))
    best = probs.argmax(-1)
    columns: Columns = {
        "class": [names[index] for index in best.tolist()],
        "confidence": probs.amax(-1).tolist(),
        "entropy": metrics.entropy(prediction).tolist(),
    }
    return columns | {f"p({name})": probs[:, index].tolist() for index, name in enumerate(names)}


def decide(columns: Columns, names: tuple[str, ...], positive: str, threshold: float) -> None:
    """The positive class wherever its probability reaches the threshold, else the other one.

    >>> columns = {"class": ["no", "no"], "p(no)": [0.9, 0.6], "p(yes)": [0.1, 0.4]}
    >>> decide(columns, ("no", "yes"), "yes", 0.4)
    >>> columns["class"]
    ['no', 'yes']
    """
    if len(names) != 2 or positive not in names:
        raise ConfigError(
            f"positive: must be one of two classes, got {positive!r}; the model's are "
            f"{', '.join(names) or 'none'}"
        )
    other = names[1 - names.index(positive)]
    columns["class"] = [
        positive if value >= threshold else other for value in columns[f"p({positive})"]
    ]


def _numbers(prediction: Any, trained: Trained, level: float) -> Columns:
    """Mean, standard deviation and the central interval from the predictive's own quantiles, in the
    target's unit."""
    edges = [metrics.quantile(prediction, 0.5 + sign * level / 2).cpu() for sign in (-1, 1)]
    # each (B, D)
    numbers = [
        value.reshape(len(value), -1)
        for value in (prediction.mean.cpu(), prediction.variance.sqrt().cpu(), *edges)
    ]
    shift, spread = (
        (None, None)
        if trained.scaling is None
        else (trained.scaling.target_mean, trained.scaling.target_std)
    )
    if shift is not None and spread is not None:
        shift, spread = shift.reshape(-1), spread.reshape(-1)
        numbers = [
            value * spread + (0 if index == 1 else shift) for index, value in enumerate(numbers)
        ]
    num = numbers[0].shape[1]
    names = (
        trained.target_names
        if len(trained.target_names) == num
        else [f"y{index}" for index in range(num)]
    )
    suffixes = ("", " std", f" {100 * level:g}% low", f" {100 * level:g}% high")
    return {
        f"{name}{suffix}": values[:, index].tolist()
        for index, name in enumerate(names)
        for suffix, values in zip(suffixes, numbers, strict=True)
    }


def as_csv(columns: Columns) -> str:
    """Comma-separated text; a name that a spreadsheet would run is quoted with an apostrophe.

    >>> as_csv({"class": ["=1+1", "b"], "confidence": [0.5, 1.0]})
    "class,confidence\\r\\n'=1+1,0.5\\r\\nb,1.0\\r\\n"
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([_inert(name) for name in columns])
    writer.writerows([_inert(cell) for cell in row] for row in zip(*columns.values(), strict=True))
    return text.getvalue()


def _inert(cell: Any) -> Any:
    return (
        f"'{cell}"
        if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r", "\n")
        else cell
    )


def write_columns(path: Path, columns: Columns) -> None:
    """A .csv, .json or .npz file, at once or not at all."""
    if path.suffix.lower() == ".csv":
        write_bytes(path, as_csv(columns).encode())
    elif path.suffix.lower() == ".json":
        write_bytes(path, json.dumps(columns, indent=1).encode())
    else:
        buffer = io.BytesIO()
        np.savez(buffer, **{name: np.array(values) for name, values in columns.items()})  # type: ignore[arg-type]
        write_bytes(path, buffer.getvalue())

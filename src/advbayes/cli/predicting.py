"""Inputs read as the model wants them, predictions as columns in raw units."""

from __future__ import annotations

import csv
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical

from advbayes import metrics
from advbayes.datasets.encoding import read_rows
from advbayes.datasets.formats import read_npz, read_plain
from advbayes.datasets.own import MAX_CSV_BYTES, MAX_NPZ_BYTES
from advbayes.datasets.tables import parse_table
from advbayes.likelihoods import predicts_classes
from advbayes.metrics.scores import class_probs
from advbayes.progress import Progress
from advbayes.report.text import inert_cell
from advbayes.runs import Trained
from advbayes.runs.config import ConfigError
from advbayes.store import write_bytes

LEVEL = 0.9  # of intervals, unless another is asked for
_ROWS = 500
_FAR = 10  # standard deviations: at most a hundredth of the training rows is beyond

_NAMELESS = (
    "; a .csv file is read by the names of its columns, and this model has none: save_pipeline "
    "takes them as feature_names=[...], an .npz file to train on as an array feature_names"
)

Columns = dict[str, list[Any]]


def check_task(trained: Trained, *, level: float | None, threshold: float | None) -> None:
    """Refuse a level of intervals for classes and a threshold on probabilities for numbers."""
    if trained.task == "classification" and level is not None:
        wanted = "level: must be left out for a classifier, which gives probabilities, no intervals"
        raise ConfigError(f"{wanted}, got {level:g}")
    if trained.task == "regression" and threshold is not None:
        wanted = "threshold, positive: must be left out for a regression, which has no classes"
        raise ConfigError(f"{wanted}, got {threshold:g}")


def read_inputs(trained: Trained, path: Path) -> Tensor:  # (N, *event), as the model sees them
    """Rows of a file, checked against what the model was trained on, standardised as it was."""
    x = (_read_csv if path.suffix.lower() == ".csv" else _read_npz)(trained, path)
    if trained.event and tuple(x.shape[1:]) != trained.event:
        wanted = f"INPUT: must hold inputs of shape {trained.event}"
        raise ConfigError(f"{wanted}, got {tuple(x.shape[1:])} in {path}")
    if not len(x) or not bool(torch.isfinite(x).all()):
        wanted = "INPUT: must hold at least one row of finite numbers"
        raise ConfigError(f"{wanted}, got {tuple(x.shape)} in {path}")
    x = x.to(trained.model.dtype)
    if trained.scaling is None:
        return x
    x = trained.scaling.transform(x)
    if trained.steps is None and len(trained.feature_names) == x.shape[-1]:
        _remark_on_far(x, trained, path)
    return x


def _remark_on_far(x: Tensor, trained: Trained, path: Path) -> None:
    """A warning of numbers that nothing in training was near to: of an encoded table neither
    categories, which may be rare, nor indicators count."""
    far = x.abs() > _FAR
    if trained.encoding is not None:
        far = far & trained.encoding.mask
    if bool(far.any()):
        named = ", ".join(map(repr, compress(trained.feature_names, far.any(0).tolist())))
        warnings.warn(
            f"{path}: {int(far.any(1).sum())} of {len(x)} rows are more than {_FAR} standard "
            f"deviations from the training mean, in {named}; predictions there are extrapolated",
            stacklevel=2,
        )


def _read_csv(trained: Trained, path: Path) -> Tensor:
    names = trained.feature_names
    if not names:
        wanted = f"INPUT: must be an .npz file for a model of inputs of shape {trained.event}"
        remedy = _NAMELESS if len(trained.event) == 1 else ""
        raise ConfigError(f"{wanted}, got {path}{remedy}")
    data = read_plain(path, MAX_CSV_BYTES)
    if trained.encoding is not None:
        return trained.encoding.read(data, str(path))
    if trained.steps is not None:
        return torch.from_numpy(read_rows(data, str(path), names, trained.steps))
    # Text columns (a label, a name) are left out: only the model's own columns must be numbers.
    table = parse_table(data, str(path), numbers=names)
    return torch.from_numpy(table.select(names).astype(np.float32))


def _read_npz(trained: Trained, path: Path) -> Tensor:
    arrays = read_npz(path, ("x", "y", "class_names", "feature_names"), MAX_NPZ_BYTES)
    if "x" not in arrays:
        there = ", ".join(sorted(arrays)) or "none"
        raise ConfigError(f"INPUT: must hold an array x, got {path} with {there}")
    values = arrays["x"]
    if trained.steps is not None:
        return torch.from_numpy(np.asarray(trained.steps.transform(values), np.float64))
    if values.dtype.kind == "U" or not values.ndim:
        got = f"{values.dtype} of shape {values.shape} in {path}"
        raise ConfigError(f"INPUT: must hold numbers of shape (N, ...) in x, got {got}")
    with np.errstate(over="ignore"):  # what does not survive is not finite, and refused as such
        x = torch.from_numpy(np.ascontiguousarray(values.astype(np.float32)))
    if values.dtype == np.uint8 and trained.box == (0.0, 1.0):
        x = x / 255
    if trained.box is not None and x.numel():
        low, high = trained.box
        least, most = (float(edge) for edge in x.aminmax())
        if least < 2 * low - high or most > 2 * high - low:  # noise may leave the box, not that far
            wanted = f"must hold values from {low:g} to {high:g}, as the model was trained on"
            got = f"{least:g} to {most:g} in {path}; in other units?"
            raise ConfigError(f"INPUT: {wanted}, got {got}")
    # images without a channel axis
    return x.unsqueeze(1) if x.ndim == len(trained.event) == 3 else x


def tabulate(trained: Trained, x: Tensor, *, num_thetas: int = 20, level: float = LEVEL) -> Columns:
    """Columns: class, confidence, entropy, probabilities; or mean, deviation and interval."""
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
    probs = class_probs(prediction)
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
        known = ", ".join(names) or "none"
        wanted = "positive: must be one of two classes"
        raise ConfigError(f"{wanted}, got {positive!r}; the model's are {known}")
    other = names[1 - names.index(positive)]
    columns["class"] = [
        positive if value >= threshold else other for value in columns[f"p({positive})"]
    ]


def _numbers(prediction: Any, trained: Trained, level: float) -> Columns:
    """Mean, deviation and central interval (by quantiles), in the target's unit."""
    edges = [metrics.quantile(prediction, 0.5 + sign * level / 2).cpu() for sign in (-1, 1)]
    moments = prediction.mean.cpu(), prediction.variance.sqrt().cpu()
    mean, std, low, high = (value.reshape(len(value), -1) for value in (*moments, *edges))  # (B, D)
    scaling = trained.scaling
    if scaling is not None and scaling.target_std is not None:
        mean, low, high = (scaling.inverse_target(value) for value in (mean, low, high))
        std = std * scaling.target_std
    names: Sequence[str] = trained.target_names
    if len(names) != mean.shape[1]:
        names = [f"y{index}" for index in range(mean.shape[1])]
    percent = f"{100 * level:g}%"
    by_suffix = {"": mean, " std": std, f" {percent} low": low, f" {percent} high": high}
    return {
        f"{name}{suffix}": values[:, index].tolist()
        for index, name in enumerate(names)
        for suffix, values in by_suffix.items()
    }


def as_csv(columns: Columns) -> str:
    """Comma-separated text; a name that a spreadsheet would run is quoted with an apostrophe.

    >>> as_csv({"class": ["=1+1", "b"], "confidence": [0.5, 1.0]})
    "class,confidence\\r\\n'=1+1,0.5\\r\\nb,1.0\\r\\n"
    """
    text = io.StringIO()
    writer = csv.writer(text)
    for row in (columns, *zip(*columns.values(), strict=True)):
        writer.writerow(map(inert_cell, row))
    return text.getvalue()


def write_columns(path: Path, columns: Columns) -> None:
    """A .csv, .json or .npz file, at once or not at all."""
    match path.suffix.lower():
        case ".csv":
            write_bytes(path, as_csv(columns).encode())
        case ".json":
            write_bytes(path, json.dumps(columns, indent=1).encode())
        case _:
            write_npz(path, columns)


def write_npz(path: Path, arrays: Mapping[str, Any]) -> None:
    """The arrays by name, at once or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **{name: np.asarray(values) for name, values in arrays.items()})  # type: ignore[arg-type]
    write_bytes(path, buffer.getvalue())

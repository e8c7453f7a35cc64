"""scikit-learn's own transformers as JSON: settings and fitted arrays, without pickle.

A transformer comes back by being fitted on a made-up example of the right shape, which gives it
whatever its version keeps inside, and then given the arrays that are documented as its fitted
attributes. `encode` checks that what comes back transforms as the original does.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from advbayes.checks import extra

from .documents import JSON
from .errors import FAULTS, StoreError, refusing

_MAX_COLUMNS = 100_000
_MAX_BYTES = 1 << 24  # of all arrays together; a document holds 2 MB
_DTYPE = re.compile(r"[<|]([bif]\d|U\d{1,4}|O)")
_PLAIN_STEPS = ("drop", "passthrough")


@functools.cache
def _known() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Each transformer with its fitted attributes."""
    with extra("a transformer in a bundle needs scikit-learn", "data"):
        from sklearn.impute import SimpleImputer
        from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, RobustScaler, StandardScaler
    return {
        "StandardScaler": (StandardScaler, ("mean_", "scale_", "var_", "n_samples_seen_")),
        "MinMaxScaler": (MinMaxScaler, ("min_", "scale_", "data_min_", "data_max_", "data_range_")),
        "RobustScaler": (RobustScaler, ("center_", "scale_")),
        "SimpleImputer": (SimpleImputer, ("statistics_",)),
        "OneHotEncoder": (OneHotEncoder, ("categories_",)),
    }


def encode(transformer: Any, place: str = "transformer") -> dict[str, JSON]:
    """A fitted transformer as JSON.

    >>> from sklearn.preprocessing import StandardScaler
    >>> encode(StandardScaler().fit([[1.0], [3.0]]))["state"]["mean_"]
    {'dtype': '<f8', 'values': [2.0]}
    """
    described = _describe(transformer, place)
    probe = _example(described, place)
    before, after = (
        dense(each.transform(as_fitted(probe, each)))
        for each in (transformer, decode(described, place))
    )
    same = before.shape == after.shape
    if not same or not ((before == after) | ((before != before) & (after != after))).all():
        wanted = "a transformer that its settings and fitted arrays determine"
        raise StoreError(place, wanted, repr(transformer))
    return described


def decode(described: Any, place: str = "transformer") -> Any:
    """Inverse of `encode`; only the listed classes are ever built.

    >>> decode({"kind": "os.system"})
    Traceback (most recent call last):
    ...
    advbayes.store.errors.StoreError: transformer: wanted a known transformer, got {'kind': 'os.system'}
    """  # noqa: E501
    _check_size(described, place)
    wanted, faults = "settings and arrays that fit together", (*FAULTS, MemoryError)
    with refusing(place, wanted, faults), warnings.catch_warnings(action="ignore"):
        return _rebuild(described, place)  # silent about the example's constant or empty columns


def as_fitted(rows: npt.NDArray[Any], transformer: Any) -> Any:
    """The rows as the kind of table that the transformer was fitted on: one that knows the names of
    its columns wants them, where pandas is there to hold them.

    >>> from sklearn.preprocessing import StandardScaler
    >>> as_fitted(np.ones((1, 2)), StandardScaler().fit([[1.0, 2.0]]))
    array([[1., 1.]])
    """
    names = getattr(transformer, "feature_names_in_", None)
    try:
        pandas = None if names is None else importlib.import_module("pandas")
    except ModuleNotFoundError:
        return rows
    return rows if pandas is None else pandas.DataFrame(rows, columns=names).infer_objects()


def _describe(transformer: Any, place: str) -> dict[str, JSON]:
    kind = type(transformer).__name__
    if kind == "Pipeline":
        steps: list[JSON] = [
            [name, step if step in _PLAIN_STEPS else _describe(step, f"{place}/{name}")]
            for name, step in transformer.steps
        ]
        return {"kind": kind, "steps": steps}
    if kind not in ("ColumnTransformer", *_known()):
        wanted = f"one of {', '.join([*_known(), 'ColumnTransformer', 'Pipeline'])}"
        raise StoreError(place, wanted, f"{transformer!r:.80}")
    fitted, num = vars(transformer), int(transformer.n_features_in_)
    names = list(fitted.get("feature_names_in_", ()))
    common = {"kind": kind, "columns": num, "names": plain(names, place) or None}
    if (output := fitted.get("_sklearn_output_config", {}).get("transform")) is not None:
        common["output"] = output  # as set_output was told
    if kind == "ColumnTransformer":
        if transformer.remainder not in _PLAIN_STEPS:
            wanted = "drop or passthrough"
            raise StoreError(f"{place}/remainder", wanted, repr(transformer.remainder))
        asked = {name: inner for name, inner, _ in transformer.transformers}
        parts: list[JSON] = [
            [
                name,
                asked[name] if asked[name] in _PLAIN_STEPS else _describe(inner, f"{place}/{name}"),
                _columns(columns, names, num, place),
            ]
            for name, inner, columns in transformer.transformers_
            if name != "remainder"
        ]
        return {**common, "transformers": parts, "remainder": transformer.remainder}
    described: dict[str, JSON] = {
        **common,
        "settings": {
            name: plain(value, f"{place}.{name}")
            for name, value in transformer.get_params().items()
            if name not in ("categories", "dtype")
        },
        "state": {name: plain(fitted[name], f"{place}.{name}") for name in _known()[kind][1]},
    }
    if kind == "SimpleImputer" and transformer.add_indicator:
        described["missing"] = plain(transformer.indicator_.features_.tolist(), place)
    return described


def _columns(columns: Any, names: list[str], num: int, place: str) -> list[JSON]:
    """Places of a ColumnTransformer's columns, however they were given."""
    match columns:
        case slice(start=str()) | slice(stop=str()):
            raise StoreError(place, "columns by place or name", f"{columns}")
        case slice():
            return list(range(num))[columns]  # type: ignore[return-value]
        case int() | str():
            columns = [columns]
    listed = np.asarray(columns)
    if listed.dtype == bool:
        listed = np.flatnonzero(listed)
    return [names.index(item) if item in names else int(item) % num for item in listed.tolist()]


def _rebuild(described: Any, place: str) -> Any:
    match described:
        case "drop" | "passthrough":
            return described
        case {"kind": "Pipeline", "steps": list(steps)} if len(described) == 2 and steps:
            from sklearn.pipeline import Pipeline

            return Pipeline(
                [(str(name), _rebuild(step, f"{place}/{name}")) for name, step in steps]
            )
        case {"kind": "ColumnTransformer", "transformers": list(parts), "remainder": str(rest)}:
            from sklearn.compose import ColumnTransformer

            named = [
                (str(name), _rebuild(inner, f"{place}/{name}"), columns)
                for name, inner, columns in parts
            ]
            whole = ColumnTransformer(named, remainder=rest, sparse_threshold=0)
            whole.fit(_example(described, place))
            ready = {name: inner for name, inner, _ in named if inner not in _PLAIN_STEPS}
            whole.transformers_ = [
                (name, ready.get(name, inner), columns)
                for name, inner, columns in whole.transformers_
            ]
        case {"kind": str(kind), "settings": dict(), "state": dict()} if kind in _known():
            whole = _rebuild_leaf(described, place)
        case _:
            raise StoreError(place, "a known transformer", f"{described!r:.80}")
    if described.get("names"):
        whole.feature_names_in_ = np.array(described["names"], object)
    return whole.set_output(transform=described["output"]) if described.get("output") else whole


def _rebuild_leaf(described: dict[str, Any], place: str) -> Any:
    made, attributes = _known()[described["kind"]]
    num = described.get("columns")
    values, options = (
        {name: array(value, f"{place}.{name}") for name, value in described[part].items()}
        for part in ("state", "settings")
    )
    options = {
        name: tuple(value) if type(value) is list else value for name, value in options.items()
    }
    if values.keys() != set(attributes):
        raise StoreError(place, ", ".join(attributes), f"{sorted(values)!r:.200}")
    for name, value in values.items():
        if type(value) in (list, np.ndarray) and len(value) != num:
            raise StoreError(f"{place}.{name}", f"one for each of {num} columns", f"{len(value)}")
    if "categories_" in values:
        options["categories"] = values["categories_"]
    leaf = made(**options).fit(_example(described, place))
    for name, value in values.items():
        setattr(leaf, name, value)
    return leaf


def _example(described: Any, place: str) -> npt.NDArray[Any]:
    """Two rows that a transformer of this description could have been fitted on."""
    num = described.get("columns", 0)
    if type(num) is not int or not 0 <= num <= _MAX_COLUMNS:
        raise StoreError(place, f"at most {_MAX_COLUMNS} columns", f"{num!r:.80}")
    rows: npt.NDArray[Any] = np.zeros((2, num), object)
    match described:
        case {"kind": "Pipeline", "steps": [[_, dict(first)], *_]}:
            return _example(first, place)
        case {"kind": "ColumnTransformer", "transformers": list(parts)}:
            for _, inner, columns in parts:
                if inner not in _PLAIN_STEPS:
                    rows[:, columns] = _example(inner, place)
        case {"kind": "OneHotEncoder", "state": {"categories_": categories}}:
            rows[:] = [values[0] for values in array(categories, place)]
        case {
            "kind": "SimpleImputer",
            "state": {"statistics_": statistics},
            "settings": {"missing_values": missing},
        }:
            rows[:] = array(statistics, place)
            rows[1, described.get("missing", [])] = array(missing, place)
            if array(statistics, place).dtype == object:
                return rows
    if any(isinstance(cell, str) for cell in rows[0]):  # which may look like a number
        return rows
    try:
        return rows.astype(np.float64)
    except (ValueError, TypeError):
        return rows


def plain(value: Any, place: str) -> Any:
    """A setting or a fitted attribute as JSON; NaN as an object, since JSON has none."""
    match value:
        case np.ndarray():
            if not _DTYPE.fullmatch(value.dtype.str):
                raise StoreError(place, "numbers or text", f"{value.dtype}")
            listed = [plain(item, place) for item in value.tolist()]
            return {"dtype": value.dtype.str, "values": listed}
        case np.generic():
            return plain(value.item(), place)
        case float() if not math.isfinite(value):
            return {"number": str(value)}
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [plain(item, place) for item in value]
        case dict():  # keys of any plain type, which those of JSON are not
            return {"mapping": [[plain(part, place) for part in pair] for pair in value.items()]}
    raise StoreError(place, "a plain setting", f"{value!r:.80}")


def array(value: Any, place: str) -> Any:
    """Inverse of `plain`."""
    match value:
        case {"number": "nan" | "inf" | "-inf" as text, **rest} if not rest:
            return float(text)
        case {"dtype": str(dtype), "values": list(values), **rest} if not rest and _DTYPE.fullmatch(
            dtype
        ):
            _check_size(value, place)
            return np.array([array(item, place) for item in values], np.dtype(dtype))
        case {"mapping": list(pairs), **rest} if not rest:
            return {array(key, place): array(item, place) for key, item in pairs}
        case list():
            return [array(item, place) for item in value]
        case None | bool() | int() | float() | str():
            return value
    raise StoreError(place, "numbers or text", f"{value!r:.80}")


def _check_size(value: Any, place: str) -> None:
    """Refuse arrays, and examples to be made, of more memory than any genuine document needs."""
    size, left = 0, [value]
    while left:
        match left.pop():
            case {"dtype": str(dtype), "values": list(values)} if _DTYPE.fullmatch(dtype):
                size += len(values) * np.dtype(dtype).itemsize
            case dict() as node:
                left += node.values()
                size += 16 * node["columns"] if type(node.get("columns")) is int else 0
            case list() as node:
                left += node
    if size > _MAX_BYTES:
        raise StoreError(place, f"at most {_MAX_BYTES} bytes of arrays", f"{size}")


def dense(values: Any) -> npt.NDArray[Any]:
    """What a transformer gives, as an array."""
    return np.asarray(values.toarray() if hasattr(values, "toarray") else values)

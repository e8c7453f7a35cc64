"""scikit-learn's own transformers as JSON: settings and fitted arrays, without pickle.

A transformer comes back by being fitted on a made-up example of the right shape, which gives it
whatever its version keeps inside, and then given the arrays that are documented as its fitted
attributes. `encode` checks that what comes back transforms as the original does.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from .documents import JSON
from .errors import StoreError

_MAX_COLUMNS = 100_000
_MAX_BYTES = 1 << 24  # of all arrays together; a document holds 2 MB
_DTYPE = re.compile(r"[<|]([bif]\d|U\d{1,4}|O)")
_FAULTS = (
    ValueError,
    TypeError,
    RuntimeError,
    ArithmeticError,
    LookupError,
    AttributeError,
    MemoryError,
)


@functools.cache
def _known() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Each transformer with its fitted attributes."""
    try:
        from sklearn.impute import SimpleImputer
        from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, RobustScaler, StandardScaler
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a transformer in a bundle needs scikit-learn: pip install 'advbayes[data]'"
        ) from None

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
    rebuilt, probe = decode(described, place), _example(described, place)
    if not _equal(dense(rebuilt.transform(probe)), dense(transformer.transform(probe))):
        raise StoreError(
            place,
            wanted="a transformer that its settings and fitted arrays determine",
            got=repr(transformer),
        )
    return described


def decode(described: Any, place: str = "transformer") -> Any:
    """Back from `encode`; nothing but the listed classes comes of it.

    >>> decode({"kind": "os.system"})
    Traceback (most recent call last):
    ...
    advbayes.store.errors.StoreError: transformer: wanted a known transformer, got {'kind': 'os.system'}
    """  # noqa: E501
    _check_size(described, place)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # comments on the example's constant or empty columns
            return _rebuild(described, place)
    except StoreError:
        raise
    except _FAULTS as error:
        raise StoreError(
            place, wanted="settings and arrays that fit together", got=f"{error!s:.200}"
        ) from None


def _describe(transformer: Any, place: str) -> dict[str, JSON]:
    kind = type(transformer).__name__
    if kind == "Pipeline":
        steps: list[JSON] = [
            [name, step if isinstance(step, str) else _describe(step, f"{place}/{name}")]
            for name, step in transformer.steps
        ]
        return {"kind": kind, "steps": steps}
    if kind == "ColumnTransformer":
        names = list(getattr(transformer, "feature_names_in_", ()))
        asked = {name: inner for name, inner, _ in transformer.transformers}
        parts: list[JSON] = [
            [
                name,
                asked[name]
                if isinstance(asked[name], str)
                else _describe(inner, f"{place}/{name}"),
                _columns(columns, names, transformer.n_features_in_, place),
            ]
            for name, inner, columns in transformer.transformers_
            if name != "remainder"
        ]
        if not isinstance(transformer.remainder, str):
            raise StoreError(
                f"{place}/remainder", wanted="drop or passthrough", got=repr(transformer.remainder)
            )
        return {
            "kind": kind,
            "transformers": parts,
            "remainder": transformer.remainder,
            "columns": int(transformer.n_features_in_),
            "names": plain(names, place) if names else None,
        }
    if kind not in _known() or type(transformer) is not _known()[kind][0]:
        wanted = f"one of {', '.join([*_known(), 'ColumnTransformer', 'Pipeline'])}"
        raise StoreError(place, wanted=wanted, got=f"{transformer!r:.80}")
    settings = {
        name: value
        for name, value in transformer.get_params().items()
        if name not in ("categories", "dtype")
    }
    described: dict[str, JSON] = {
        "kind": kind,
        "settings": {name: plain(value, f"{place}.{name}") for name, value in settings.items()},
        "state": {
            name: plain(getattr(transformer, name), f"{place}.{name}") for name in _known()[kind][1]
        },
        "columns": int(transformer.n_features_in_),
        "names": plain(list(getattr(transformer, "feature_names_in_", ())), place) or None,
    }
    if kind == "SimpleImputer" and transformer.add_indicator:
        described["missing"] = plain(transformer.indicator_.features_.tolist(), place)
    return described


def _columns(columns: Any, names: list[str], num: int, place: str) -> list[JSON]:
    """Places of a ColumnTransformer's columns, however they were given."""
    if isinstance(columns, slice):
        if isinstance(columns.start, str) or isinstance(columns.stop, str):
            raise StoreError(place, wanted="columns by place or name", got=f"{columns}")
        return list(range(num))[columns]  # type: ignore[return-value]
    listed = np.asarray([columns] if isinstance(columns, (int, str)) else columns)
    if listed.dtype == bool:
        listed = np.flatnonzero(listed)
    return [
        names.index(item) if isinstance(item, str) else int(item) % num for item in listed.tolist()
    ]


def _rebuild(described: Any, place: str) -> Any:
    match described:
        case {"kind": "Pipeline", "steps": list(steps)} if len(described) == 2 and steps:
            from sklearn.pipeline import Pipeline

            return Pipeline(
                [(str(name), _rebuild_inner(step, f"{place}/{name}")) for name, step in steps]
            )
        case {
            "kind": "ColumnTransformer",
            "transformers": list(parts),
            "remainder": str(remainder),
        }:
            from sklearn.compose import ColumnTransformer

            named = [
                (str(name), _rebuild_inner(inner, f"{place}/{name}"), columns)
                for name, inner, columns in parts
            ]
            whole = ColumnTransformer(named, remainder=remainder, sparse_threshold=0).fit(
                _example(described, place)
            )
            fitted = {name: inner for name, inner, _ in named if not isinstance(inner, str)}
            whole.transformers_ = [
                (name, fitted.get(name, inner), columns)
                for name, inner, columns in whole.transformers_
            ]
            return _with_names(whole, described)
        case {"kind": str(kind), "settings": dict(settings), "state": dict(state)} if (
            kind in _known()
        ):
            values = {name: array(value, f"{place}.{name}") for name, value in state.items()}
            options = {name: _option(value, f"{place}.{name}") for name, value in settings.items()}
            if values.keys() != set(_known()[kind][1]):
                raise StoreError(
                    place, wanted=f"{', '.join(_known()[kind][1])}", got=f"{sorted(values)!r:.200}"
                )
            if kind == "OneHotEncoder":
                options["categories"] = values["categories_"]
            for name, value in values.items():
                if isinstance(value, (list, np.ndarray)) and len(value) != described.get("columns"):
                    wanted = f"one for each of {described.get('columns')} columns"
                    raise StoreError(f"{place}.{name}", wanted=wanted, got=f"{len(value)}")
            leaf = _known()[kind][0](**options).fit(_example(described, place))
            for name, value in values.items():
                setattr(leaf, name, value)
            return _with_names(leaf, described)
    raise StoreError(place, wanted="a known transformer", got=f"{described!r:.80}")


def _rebuild_inner(described: Any, place: str) -> Any:
    return described if described in ("drop", "passthrough") else _rebuild(described, place)


def _with_names(transformer: Any, described: dict[str, Any]) -> Any:
    if described.get("names"):
        transformer.feature_names_in_ = np.array(described["names"], object)
    return transformer


def _example(described: Any, place: str) -> npt.NDArray[Any]:
    """Two rows that a transformer of this description could have been fitted on."""
    num = described.get("columns", 0)
    if not isinstance(num, int) or not 0 <= num <= _MAX_COLUMNS:
        raise StoreError(place, wanted=f"at most {_MAX_COLUMNS} columns", got=f"{num!r:.80}")
    rows: npt.NDArray[Any] = np.zeros((2, num), object)
    match described:
        case {"kind": "Pipeline", "steps": [[_, dict(first)], *_]}:
            return _example(first, place)
        case {"kind": "ColumnTransformer", "transformers": list(parts)}:
            for _, inner, columns in parts:
                if isinstance(inner, dict):
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
    try:
        return rows.astype(np.float64)
    except (ValueError, TypeError):
        return rows


def plain(value: Any, place: str) -> Any:
    """A setting or a fitted attribute as JSON; NaN as an object, since JSON has none."""
    match value:
        case np.ndarray():
            if not _DTYPE.fullmatch(value.dtype.str):
                raise StoreError(place, wanted="numbers or text", got=f"{value.dtype}")
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
    raise StoreError(place, wanted="a plain setting", got=f"{value!r:.80}")


def array(value: Any, place: str) -> Any:
    """Back from `plain`."""
    match value:
        case {"number": "nan" | "inf" | "-inf" as text, **rest} if not rest:
            return float(text)
        case {"dtype": str(dtype), "values": list(values), **rest} if not rest and _DTYPE.fullmatch(
            dtype
        ):
            _check_size(value, place)
            return np.array([array(item, place) for item in values], np.dtype(dtype))
        case list():
            return [array(item, place) for item in value]
        case None | bool() | int() | float() | str():
            return value
    raise StoreError(place, wanted="numbers or text", got=f"{value!r:.80}")


def _check_size(value: Any, place: str) -> None:
    """Refuse arrays that take more memory than any document needs: every text of an array takes as
    much as its dtype says, and every column some room in the example."""
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
        raise StoreError(place, wanted=f"at most {_MAX_BYTES} bytes of arrays", got=f"{size}")


def _option(value: Any, place: str) -> Any:
    decoded = array(value, place)
    return tuple(decoded) if isinstance(decoded, list) else decoded


def dense(values: Any) -> npt.NDArray[Any]:
    """What a transformer gives, as an array."""
    return np.asarray(values.toarray() if hasattr(values, "toarray") else values)


def _equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return one.shape == other.shape and all(
        a == b or (a != a and b != b)
        for a, b in zip(one.ravel().tolist(), other.ravel().tolist(), strict=True)
    )

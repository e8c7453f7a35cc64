"""scikit-learn's transformers as JSON: what comes back transforms the same, and nothing but the
listed classes can come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MinMaxScaler,
    OneHotEncoder,
    RobustScaler,
    StandardScaler,
)

from advbayes.estimators import RobustClassifier, load_pipeline
from advbayes.store import StoreError, load, save
from advbayes.store.preprocessing import array, decode, encode

RNG = np.random.default_rng(0)
NUMBERS = RNG.normal(3.0, 2.0, (40, 3))
HOLES = np.where(RNG.random((40, 3)) < [0.3, 0.0, 0.2], np.nan, NUMBERS)
EMPTY, LAST = np.column_stack([HOLES, np.full(40, np.nan)]), np.column_stack([HOLES, np.ones(40)])
TEXT = RNG.choice(["red", "green", "", "blé"], (40, 2)).astype(object)
MIXED = np.column_stack([HOLES.astype(object), TEXT])
NEW = MIXED.copy()
NEW[0, 3], NEW[1, 4] = "never seen", "red"


def columns(**settings: Any) -> ColumnTransformer:
    numbers = make_pipeline(SimpleImputer(strategy="median", add_indicator=True), StandardScaler())
    fill = SimpleImputer(strategy="constant", fill_value="?", missing_values="")
    text = Pipeline([("fill", fill), ("hot", OneHotEncoder(handle_unknown="ignore"))])
    return ColumnTransformer([("numbers", numbers, [0, 1, 2]), ("text", text, [3, 4])], **settings)


CASES: dict[str, tuple[Any, Any, Any]] = {
    "scaler": (StandardScaler(), NUMBERS, NUMBERS),
    "scaler without mean": (StandardScaler(with_mean=False), NUMBERS, NUMBERS),
    "scaler without std": (StandardScaler(with_std=False), NUMBERS, NUMBERS),
    "scaler of a constant": (StandardScaler(), np.ones((5, 2)), NUMBERS[:, :2]),
    "range": (MinMaxScaler((-1, 1), clip=True), NUMBERS, 2 * NUMBERS),
    "robust": (RobustScaler(), NUMBERS, NUMBERS),
    "imputer": (SimpleImputer(), HOLES, HOLES[::-1]),
    "imputer with indicator": (
        SimpleImputer(strategy="median", add_indicator=True),
        HOLES,
        HOLES[::-1],
    ),
    "imputer of an empty column": (
        SimpleImputer(keep_empty_features=True, add_indicator=True),
        EMPTY,
        LAST,
    ),
    "imputer that drops an empty column": (SimpleImputer(), EMPTY, LAST),
    "imputer of text": (
        SimpleImputer(strategy="most_frequent", missing_values=""),
        TEXT,
        TEXT[::-1],
    ),
    "one-hot": (OneHotEncoder(handle_unknown="ignore"), TEXT, NEW[:, 3:]),
    "one-hot dropping": (OneHotEncoder(drop="if_binary"), TEXT, TEXT[::-1]),
    "one-hot of numbers": (
        OneHotEncoder(sparse_output=False),
        np.round(NUMBERS),
        np.round(NUMBERS)[::-1],
    ),
    "columns": (columns(), MIXED, NEW),
    "columns with a remainder": (
        ColumnTransformer([("s", StandardScaler(), [1])], remainder="passthrough"),
        NUMBERS,
        NUMBERS,
    ),
    "columns by slice": (
        ColumnTransformer([("s", StandardScaler(), slice(0, 2))]),
        NUMBERS,
        NUMBERS,
    ),
    "columns by mask": (
        ColumnTransformer([("s", StandardScaler(), [True, False, True])]),
        NUMBERS,
        NUMBERS,
    ),
    "columns passed and dropped": (
        ColumnTransformer([("p", "passthrough", [2]), ("d", "drop", [0])]),
        NUMBERS,
        NUMBERS,
    ),
    "pipeline": (
        Pipeline([("fill", SimpleImputer()), ("no", "passthrough"), ("scale", StandardScaler())]),
        HOLES,
        HOLES,
    ),
}


def dense(values: Any) -> np.ndarray:
    return np.asarray(values.toarray() if hasattr(values, "toarray") else values)


@pytest.mark.filterwarnings("ignore:Skipping features")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.replace(" ", "-"))
def test_what_comes_back_transforms_the_same(case: str) -> None:
    transformer, rows, new = CASES[case]
    transformer.fit(rows)
    document = json.loads(json.dumps(encode(transformer), allow_nan=False))
    came = decode(document)
    np.testing.assert_array_equal(dense(came.transform(rows)), dense(transformer.transform(rows)))
    np.testing.assert_array_equal(dense(came.transform(new)), dense(transformer.transform(new)))
    assert encode(came) == document
    assert came.n_features_in_ == transformer.n_features_in_


@pytest.mark.parametrize(
    ("transformer", "words"),
    [
        (FunctionTransformer(np.log1p), "wanted one of StandardScaler"),
        (
            make_pipeline(StandardScaler(), FunctionTransformer(np.log1p)),
            "functiontransformer: wanted one of",
        ),
        (
            ColumnTransformer([("a", StandardScaler(), [0])], remainder=StandardScaler()),
            "remainder: wanted drop",
        ),
        (
            OneHotEncoder(max_categories=2, handle_unknown="infrequent_if_exist"),
            "fitted arrays determine",
        ),
    ],
    ids=["function", "inner", "remainder", "infrequent"],
)
def test_what_cannot_be_kept_is_named(transformer: Any, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        encode(transformer.fit(np.round(NUMBERS)))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(kind="os.system"),
        lambda d: d.update(kind="FunctionTransformer"),
        lambda d: d["settings"].update(with_mean="yes"),
        lambda d: d["settings"].update(more=1),
        lambda d: d["state"].pop("mean_"),
        lambda d: d["state"].update(more=[1]),
        lambda d: d["state"]["mean_"].update(dtype="|V8"),
        lambda d: d["state"]["mean_"].update(dtype="O8"),
        lambda d: d["state"].update(mean_={"number": "1e999"}),
        lambda d: d.update(columns=10**12),
        lambda d: d.update(columns=-1),
        lambda d: d.update(columns="3"),
        lambda d: d.update(steps=[]),
    ],
)
def test_altered_descriptions_are_refused(change: Any) -> None:
    document: Any = json.loads(json.dumps(encode(StandardScaler().fit(NUMBERS))))
    change(document)
    if "steps" in document:
        document = {"kind": "Pipeline", "steps": []}
    with pytest.raises(StoreError, match=r"transformer.*: wanted"):
        decode(document)


def test_arrays_of_another_length_are_refused() -> None:
    document: Any = encode(StandardScaler().fit(NUMBERS))
    document["state"]["mean_"]["values"] = [0.0]
    with pytest.raises(StoreError, match="one for each of 3 columns"):
        decode(document)


def test_arrays_take_no_more_memory_than_their_limit() -> None:
    """A file of half a megabyte could ask for gigabytes: a text takes the width of its dtype."""
    assert array({"dtype": "<U32", "values": [""] * (1 << 17)}, "x").nbytes == 1 << 24
    with pytest.raises(StoreError, match="x: wanted at most 16777216 bytes of arrays"):
        array({"dtype": "<U33", "values": [""] * (1 << 17)}, "x")
    document: Any = encode(OneHotEncoder().fit(np.array([["a"], ["b"]])))
    document["state"]["categories_"] = [{"dtype": "<U999", "values": ["a"]}] * 5000
    with pytest.raises(StoreError, match="16777216 bytes of arrays, got 19980016"):
        decode(document)
    with pytest.raises(StoreError, match="16777216 bytes of arrays"):
        decode({"kind": "Pipeline", "steps": [["a", {"columns": 100_000}]] * 11})


def test_classes_of_a_saved_classifier_are_an_array(tmp_path: Path) -> None:
    fitted = RobustClassifier(epochs=1, random_state=0).fit(NUMBERS, np.arange(len(NUMBERS)) % 2)
    fitted.save(tmp_path / "m")
    bundle = load(tmp_path / "m")
    for classes in (None, 3, ["0", "1"]):
        extra: Any = json.loads(json.dumps(bundle.extra))
        extra["estimator"]["classes"] = classes
        save(
            tmp_path / "n",
            model=bundle.model,
            posterior=bundle.posterior,
            threat_model=bundle.threat_model,
            class_names=bundle.class_names,
            extra=extra,
            tensors=bundle.tensors,
        )
        with pytest.raises(StoreError, match="classes_"):
            load_pipeline(tmp_path / "n")

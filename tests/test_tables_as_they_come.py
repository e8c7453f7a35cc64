"""Tables with text and missing values: encoded, kept with the model, asked for again, and out of
the attacker's reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import advbayes
from advbayes import store
from advbayes.cli import main
from advbayes.datasets import DataError, Encoding, from_csv
from advbayes.datasets.encoding import MAX_CATEGORIES
from advbayes.runs import create_run, load_trained, prepare, train
from advbayes.runs.config import make_config


def table(path: Path, num: int = 60) -> Path:
    """Colour moves the target, size moves it, weight is missing every fifth time."""
    rng = np.random.default_rng(0)
    lines = ["size,colour,weight,label,price"]
    for row in range(num):
        size, colour = rng.normal(10, 3), ["red", "blue", "green"][row % 3]
        weight = "" if row % 5 == 0 else f"{rng.normal(2, 1):.3f}"
        price = 5 * size + {"red": 40, "blue": 0, "green": -40}[colour]
        lines.append(
            f"{size:.3f},{colour},{weight},{'dear' if price > 50 else 'cheap'},{price:.3f}"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    return table(tmp_path / "t.csv")


NAMES = ("size", "weight", "weight missing", "colour=blue", "colour=green", "colour=red")


def test_text_and_missing_values_become_features(csv_file: Path) -> None:
    table(csv_file, 300)  # so many that weights are missing in the test rows as well
    data = from_csv(csv_file, "price", drop=["label"])
    assert data.feature_names == NAMES
    assert data.mask is not None
    assert data.mask.tolist() == [True, True, False, False, False, False]
    colours = data.x_train[:, 3:]
    assert torch.equal(colours.sum(1), torch.ones(len(colours)))
    lost = data.x_train[:, 2] == 1
    known = data.x_train[~lost, 1]
    assert 0.1 < float(lost.float().mean()) < 0.3
    assert torch.equal(
        data.x_train[lost, 1], known.double().quantile(0.5).float().expand(int(lost.sum()))
    )
    offset = {(1, 0, 0): 0.0, (0, 1, 0): -40.0, (0, 0, 1): 40.0}
    for row, y in zip(data.x_train.tolist(), data.y_train.tolist(), strict=True):
        assert y == pytest.approx(5 * row[0] + offset[tuple(map(int, row[3:]))], abs=0.01)  # type: ignore[index]
    # Medians come from the training rows alone: the test rows are encoded with them.
    assert torch.equal(
        data.x_test[data.x_test[:, 2] == 1, 1].unique(), data.x_train[lost, 1].unique()
    )


def test_options(csv_file: Path) -> None:
    assert from_csv(csv_file, "price", features=["size", "colour"]).feature_names == (
        "size",
        *NAMES[3:],
    )
    assert from_csv(csv_file, "price", features=["size"]).encoding is None
    free = from_csv(csv_file, "price", drop=["label"], movable=["colour"])
    assert free.mask is not None
    assert free.mask.tolist() == [True, True, False, True, True, True]
    with pytest.raises(ValueError, match="movable must name features"):
        from_csv(csv_file, "price", movable=["price"])
    classes = from_csv(csv_file, "label", drop=["price"])
    assert classes.class_names == ("cheap", "dear")
    assert (
        from_csv(csv_file, "price", drop=["label"], seed=1).y_train.tolist()
        != from_csv(csv_file, "price", drop=["label"]).y_train.tolist()
    )
    assert len(from_csv(csv_file, "price", drop=["label"], test_fraction=0.5).x_test) == 30


def test_thresholds_from_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"

    def words(num: int) -> None:
        path.write_text("a,b,y\n" + "".join(f"1,w{i % num},{i}\n" for i in range(100)))

    words(MAX_CATEGORIES)
    assert len(from_csv(path, "y").feature_names) <= 1 + MAX_CATEGORIES
    words(MAX_CATEGORIES + 1)
    with pytest.raises(DataError, match=f"at most {MAX_CATEGORIES} different words"):
        from_csv(path, "y")
    path.write_text("a,b,y\n" + "1,2,3\n" * 5 + "1,x,3\n" * 5)  # half are numbers: a mistake
    with pytest.raises(DataError, match=r"a number in row 6 below the header, column 'b', got 'x'"):
        from_csv(path, "y")
    path.write_text("a,b,y\n" + "1,2,3\n" * 5 + "1,x,3\n" * 6)  # fewer: text
    assert from_csv(path, "y").feature_names == ("a", "b=2", "b=x")


@pytest.mark.parametrize("word", ["", " ", "NA", "n/a", "NaN", "null", "None", "?"])
def test_what_counts_as_missing(tmp_path: Path, word: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + f"1,3\n2,4\n{word},5\n" * 4)
    assert from_csv(path, "y").feature_names == ("a", "a missing")
    with pytest.warns(UserWarning, match=r"4 of 12 rows have no target \('a'\) and are left out"):
        left = from_csv(path, "a", task="regression")
    assert len(left.y_train) + len(left.y_test) == 8


def test_rows_that_were_never_seen(csv_file: Path) -> None:
    encoding = from_csv(csv_file, "price", drop=["label"]).encoding
    assert encoding is not None
    assert encoding.columns == ("size", "colour", "weight")
    rows = encoding.transform([[1, "violet", 2], [None, None, float("nan")], ["3", " red ", "?"]])
    assert rows[:, 3:].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert rows[0, :3].tolist() == [1.0, 2.0, 0.0]
    assert rows[2, 0] == 3
    assert rows[1:, 2].tolist() == [1.0, 1.0]
    for wrong, words in (
        ([[1, "red"]], "columns size, colour, weight"),
        ([["tall", "red", 1]], "the rows: wanted a number in row 1, column 'size'"),
    ):
        with pytest.raises(ValueError, match=words):
            encoding.transform(wrong)
    with pytest.raises(DataError, match="float32"):
        encoding.transform([[1e39, "red", 1]])


def test_a_mistake_in_new_rows_is_named_with_file_and_row(csv_file: Path) -> None:
    encoding = from_csv(csv_file, "price", drop=["label"]).encoding
    assert encoding is not None
    rows = b"size,colour,weight\n1,red,2\ntall,red,2\n"
    with pytest.raises(DataError, match=r"new.csv: wanted a number in row 2, column 'size'"):
        encoding.read(rows, "new.csv")


@pytest.mark.parametrize("price", ["{:,}", "{} EUR"])
def test_a_target_of_numbers_as_text_is_no_set_of_classes(tmp_path: Path, price: str) -> None:
    path = tmp_path / "t.csv"
    lines = [f'{row},"{price.format(250_000 + 1000 * row)}"' for row in range(20)]
    path.write_text("\n".join(["size,price", *lines]))
    with pytest.raises(DataError, match=r"the target 'price', got 20 different ones in 20 rows"):
        from_csv(path, "price")
    assert len(from_csv(path, "price", task="classification").class_names) == 20


def test_it_comes_back_from_json(csv_file: Path) -> None:
    data = from_csv(csv_file, "price", drop=["label"], movable=["colour"])
    assert data.encoding is not None
    document = json.loads(json.dumps(data.encoding.to_json(), allow_nan=False))
    came = Encoding.from_json(document)
    rows = [[1, "violet", 2], [None, "red", None]]
    assert torch.equal(came.transform(rows), data.encoding.transform(rows))
    assert came.feature_names == data.feature_names
    assert torch.equal(came.mask, data.encoding.mask)
    for change in (
        {"columns": ["a"]},
        {"numeric": 1},
        {"transformer": {"kind": "os.system"}},
        {"movable": None},
    ):
        with pytest.raises(store.StoreError, match="encoding"):
            Encoding.from_json({**document, **change})


def test_train_predict_and_load(csv_file: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "data": str(csv_file),
        "target": "price",
        "drop": ("label",),
        "defense": "at",
        "eps": 0.3,
    }
    config = make_config({**values, "hidden": [8], "epochs": 40, "lr": 0.03, "batch_size": 16})
    with create_run(config, tmp_path / "run") as run:
        train(run)
    trained = load_trained(run.path)
    assert trained.mask is not None
    assert trained.mask.tolist() == [True, True, False, False, False, False]
    # The attacker of the training moves numbers alone.
    data = prepare(config)
    moved = advbayes.L2(0.3, mask=data.mask).project(data.x_train + 1, data.x_train) - data.x_train
    assert torch.equal(moved[:, 2:], torch.zeros_like(moved[:, 2:]))
    assert float(moved[:, :2].abs().min()) > 0
    rows = [[10.0, "red", None], [10.0, "green", 2.0]]
    mean = advbayes.load(run.path).predictor()(rows).mean
    assert float(mean[0] - mean[1]) > 30  # red is 80 dearer
    new = tmp_path / "new.csv"
    new.write_text("colour,extra,size,weight\nred,x,10,\ngreen,y,10,2\n")
    out = tmp_path / "p.json"
    assert main(["predict", str(run.path), str(new), "--out", str(out)]) == 0
    np.testing.assert_allclose(mean.numpy(), json.loads(out.read_text())["price"], rtol=1e-5)


def test_predict_says_which_categories_training_has_not_seen(
    csv_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"data": str(csv_file), "target": "price", "drop": ["label"], "epochs": 1}
    with create_run(make_config(config), tmp_path / "run") as run:
        train(run, progress=False)
    new = tmp_path / "new.csv"
    new.write_text("size,colour,weight\n9,red,2\n9,violet,2\n9,,2\n9,violet,\n")
    said = r"column 'colour' .* in 3 of 4 rows \('violet', an empty cell\)"
    with pytest.warns(UserWarning, match=said) as caught:
        assert main(["predict", str(run.path), str(new)]) == 0
    assert len(caught) == 1
    assert len(capsys.readouterr().out.splitlines()) == 5
    new.write_text("size,colour,weight\n9,red,2\n")
    assert main(["predict", str(run.path), str(new)]) == 0
    assert not capsys.readouterr().err

"""Files as strangers have them: what cannot be used is refused in one line that says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from advbayes.cli import main
from advbayes.datasets import DataError, from_npz
from advbayes.datasets.tables import parse_table
from advbayes.estimators import RobustClassifier, save_pipeline
from advbayes.report.telling import reach
from advbayes.runs import Run, load_trained, prepare
from advbayes.runs.verdict import _saved

Printed = pytest.CaptureFixture[str]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 3))
Y = (X[:, 0] > 0).astype(int)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "from -1": ({"y": 2 * Y - 1}, r"below 10000, got -1 to 1\. Number the classes from 0"),
    "text": ({"y": np.array(["no", "yes"])[Y]}, r"got <U3 of shape \(20,\)\. Number the classes"),
    "one-hot": ({"y": np.eye(2, dtype=int)[Y]}, r"got int64 of shape \(20, 2\)\. One-hot rows"),
    "one class": ({"y": np.zeros(20, int)}, r"two classes or more, got 1\. Check y"),
    "too few names": ({"feature_names": np.array(["a"])}, r"3 different ones.*got 1 \(a\)"),
    "a name twice": ({"feature_names": np.array(["a", "b", "a"])}, r"3 different ones.*got 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arrays_that_cannot_be_trained_on(case: str, tmp_path: Path) -> None:
    arrays, message = REFUSED[case]
    np.savez(tmp_path / "a.npz", **{"x": X, "y": Y, **arrays})
    with pytest.raises(DataError, match=message):
        from_npz(tmp_path / "a.npz")


def refused(capsys: Printed, argv: list[str], *wanted: str) -> None:
    capsys.readouterr()
    assert main(argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    for text in wanted:
        assert text in lines[0]


def test_inputs_that_cannot_be_predicted(tmp_path: Path, capsys: Printed) -> None:
    """Also a regression on images, one output of the convolutions."""
    out, file = str(tmp_path / "run"), tmp_path / "in.npz"
    images = RNG.integers(0, 256, (20, 8, 8), np.uint8)
    np.savez(tmp_path / "a.npz", x=images, y=X[:, 0])
    assert main(["train", "--data", str(tmp_path / "a.npz"), "--epochs", "1", "--out", out]) == 0
    np.savez(file, x=np.array([["a", "b"]]))
    refused(capsys, ["predict", out, str(file)], "must hold numbers", "<U1 of shape (1, 2)")
    np.savez(file, x=np.array(1.0))
    refused(capsys, ["predict", out, str(file)], "must hold numbers", "float64 of shape ()")
    np.savez(file, x=np.full((1, 8, 8), 255.0))
    refused(capsys, ["predict", out, str(file)], "from 0 to 1", "got 255 to 255", "other units?")
    np.savez(file, x=images[:2])
    assert main(["predict", out, str(file)]) == 0


def test_a_model_without_names_says_how_it_gets_them(tmp_path: Path, capsys: Printed) -> None:
    model, path = RobustClassifier(epochs=1, random_state=0).fit(X, Y), tmp_path / "m.advbayes"
    model.save(path)
    (tmp_path / "in.csv").write_text("a,b,c\n1,2,3\n")
    refused(capsys, ["predict", str(path), str(tmp_path / "in.csv")], "feature_names=[...]")
    save_pipeline(model, tmp_path / "named.advbayes", feature_names=["a", "b", "c"])
    assert main(["predict", str(tmp_path / "named.advbayes"), str(tmp_path / "in.csv")]) == 0


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [";", "|", "\t", ","])
def test_the_line_in_which_a_spreadsheet_names_the_delimiter(mark: str, end: str) -> None:
    lines = [f"sep={mark}", f"a b{mark}c", f"1{mark}2", f"3{mark}x"]
    data = ("\ufeff" + end.join(lines[:3])).encode()
    table = parse_table(data, "t.csv")
    assert table.columns == ("a b", "c")
    assert table.numbers.tolist() == [[1.0, 2.0]]
    with pytest.raises(DataError, match="line 4, column 'c', got 'x'"):
        parse_table(end.join(lines).encode(), "t.csv")


def test_an_attacked_regression_is_told_in_the_unit_of_its_target(
    tmp_path: Path, capsys: Printed
) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "adversarial.npz"
    price = 1000 * X[:, 0] + 5000
    rows = [f"{a},{b},{y}" for (a, b), y in zip(X[:, :2], price, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,price", *rows]))
    data = ["--data", str(tmp_path / "t.csv"), "--target", "price"]
    assert main(["train", *data, "--epochs", "1", "--out", run]) == 0
    capsys.readouterr()
    assert main(["attack", run, "--steps", "3", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metric"] == "RMSE (in the unit of 'price')"
    trained = load_trained(run)
    assert trained.scaling is not None
    with np.load(out) as arrays, torch.no_grad():
        for key, name in (("clean", "x"), ("attacked", "x_adv")):
            mean = trained.predict()(torch.from_numpy(arrays[name])).mean
            said = trained.scaling.inverse_target(mean)
            truth = trained.scaling.inverse_target(torch.from_numpy(arrays["y"]))
            assert found[key] == pytest.approx(float((said - truth).square().mean().sqrt()))


def test_a_report_tells_the_reach_that_was_evaluated(tmp_path: Path, capsys: Printed) -> None:
    run = str(tmp_path / "run")
    rows = [f"{a},{b},{c},{'yn'[y]}" for (a, b, c), y in zip(X, Y, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,c,kind", *rows]))
    data = ["--data", str(tmp_path / "t.csv"), "--target", "kind", "--fixed", "a"]
    assert main(["train", *data, "--epochs", "1", "--eps", "0.5", "--out", run]) == 0

    def told(*flags: str) -> tuple[dict[str, Any], dict[str, float]]:
        """What the report of the latest evaluation says, and what the evaluation itself did."""
        for old in (tmp_path / "run" / "evaluation").glob("*"):
            shutil.rmtree(old)
        assert main(["evaluate", run, "--attack", "pgd1", "--eps", "0.8", *flags]) == 0
        capsys.readouterr()
        assert main(["evaluate", run, "--attack", "pgd1", "--eps", "0.8", *flags, "--json"]) == 0
        by_name = json.loads(capsys.readouterr().out)["threat_model"][0]["raw"]
        assert main(["report", run]) == 0
        document = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
        return document, {name: reach for name, reach in by_name.items() if reach}

    for flags, fixed in (
        ((), ["a"]),
        (("--fixed", "b"), ["b"]),
        (("--feature-eps", "c=0.25"), ["a"]),
        (("--fixed", "b", "--fixed", "c", "--feature-eps", "a=2"), ["b", "c"]),
    ):
        document, wanted = told(*flags)
        found = reach(document)
        assert found is not None
        assert {row["name"]: row["raw"] for row in found["rows"]} == pytest.approx(wanted)
        assert document["threat_model"]["fixed"] == fixed
    # beside one of the run's own reach, that of another is not shown, and that is said
    assert main(["evaluate", run, "--attack", "pgd1", "--eps", "0.8", "--name", "zz"]) == 0
    assert main(["report", run]) == 0
    page = (tmp_path / "run" / "report" / "report.md").read_text()
    (line,) = (line for line in page.splitlines() if "other examples or features" in line)
    assert "pgd1-l2-0.8-" in line
    assert "zz" not in line
    assert "- Out of reach: a" in page.splitlines()


def test_an_audit_looks_at_an_evaluation_of_its_own_reach(tmp_path: Path) -> None:
    """Six features: the text of a ball then says how many a mask has, not which."""
    place = str(tmp_path / "run")
    rows = [",".join(map(str, [*row, *row, "yn"[y]])) for row, y in zip(X, Y, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,c,d,e,f,kind", *rows]))
    data = ["--data", str(tmp_path / "t.csv"), "--target", "kind"]
    assert main(["train", *data, "--epochs", "1", "--eps", "0.5", "--out", place]) == 0
    flags = ["--fixed", "b", "--feature-eps", "c=0.2"]
    made = ["--attack", "pgd1", "--eps", "0.25", "--eps", "0.5", "--name", "made"]
    assert main(["evaluate", place, *made, *flags]) == 0
    run, trained = Run.open(place), load_trained(place)
    x, predict = prepare(run.config).x_test, trained.predict()

    def found(*reach: str) -> Path | None:
        given = [reach[1:2] if reach else (), reach[3:] if len(reach) > 2 else ()]
        return _saved(run, predict, x, trained.ball(None, 0.5, *given), reach)

    assert found(*flags) == tmp_path / "run" / "evaluation" / "made"
    assert found() is None
    assert found("--fixed", "a", "--feature-eps", "c=0.2") is None
    assert found("--fixed", "b", "--feature-eps", "c=0.3") is None

"""Tables as people have them: what is odd about them is said, with what to do about it."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from advbayes import L2, audit, evaluate, pgd
from advbayes.checks import InputError
from advbayes.cli import main
from advbayes.cli.describe import said_units
from advbayes.datasets import DataError, from_csv
from advbayes.estimators import RobustClassifier, RobustRegressor
from advbayes.evaluation import UnchangedWarning
from advbayes.runs.remarks import remarks


def write(path: Path, header: str, rows: list[str]) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def said(path: Path, target: str, **settings: Any) -> str:
    return "\n".join(remarks(from_csv(path, target, **settings)))


def test_the_page_for_newcomers_shows_the_seconds_that_were_recorded() -> None:
    root = Path(__file__).parents[1]
    recorded = json.loads((root / "benchmarks/results/first_contact.json").read_text())
    page = (root / "docs/first-contact.md").read_text()
    shown = re.findall(r"\| (\d+)(?:, without the installation)? \|\n", page)
    steps = ("demo", "python", "train", "evaluate", "audit", "predict")
    assert list(map(int, shown)) == [round(recorded["seconds"][step]) for step in steps]
    assert f"the rarest of {recorded['rarest']} rows" in page
    assert f"it ended at level {recorded['level']}" in page


def test_all_names_and_identifiers_are_named_at_once(tmp_path: Path) -> None:
    rows = [f"C{n},2020-{1 + n % 12:02}-{1 + n % 28:02},{n % 7},{n % 2}" for n in range(90)]
    path = write(tmp_path / "t.csv", "customer,signup,size,y", rows)
    with pytest.raises(DataError) as refused:
        from_csv(path, "y")
    assert "in 'customer', 'signup', got 90 such as 'C0', 84 such as '2020-01-01'" in str(
        refused.value
    )
    assert "--drop customer,signup" in str(refused.value)
    assert from_csv(path, "y", drop=["customer", "signup"]).feature_names == ("size",)


def test_a_first_column_without_a_name_is_read_and_suggested_to_be_dropped(tmp_path: Path) -> None:
    """What pandas writes in front of every table."""
    rows = [f"{n},{n % 5}.5,{n % 3}" for n in range(40)]
    path = write(tmp_path / "t.csv", ",size,y", rows)
    data = from_csv(path, "y")
    assert data.feature_names == ("column 1", "size")
    assert "'column 1' only numbers the rows" in remarks(data)[0]
    assert from_csv(path, "y", drop=["column 1"]).feature_names == ("size",)
    for header in (",column 1,y", "size,,y"):
        with pytest.raises(DataError, match="a name of its own for each column"):
            from_csv(write(path, header, rows), "y")


@pytest.mark.parametrize("colour", ["", "red"])  # read as numbers alone, and with text
def test_codes_written_with_zeros_in_front_are_remarked_on(tmp_path: Path, colour: str) -> None:
    rows = [f"{n % 4:05d},0.{n % 9},0,{colour or 1},{n % 3}" for n in range(40)]
    path = write(tmp_path / "t.csv", '"my, zip",size,nil,colour,y', rows)
    with pytest.warns(UserWarning, match="zeros in front") as warned:
        data = from_csv(path, "y")
    (said,) = (str(each.message) for each in warned)
    assert "zeros in front are read as plain numbers, such as '00000' in column 'my, zip'" in said
    assert """--text '"my, zip"' (text= in Python)""" in said
    assert data.feature_names[0] == "my, zip"
    data = from_csv(path, "y", text=["my, zip"])  # and no warning
    assert [name for name in data.feature_names if "zip" in name] == [
        f"my, zip={code:05d}" for code in range(4)
    ]
    assert not any("amounts" in remark for remark in remarks(data))
    many = [f"{n:05d},{row}" for n, row in enumerate(rows * 2)]
    with pytest.warns(UserWarning, match="text, and --drop number leaves out what has more than"):
        from_csv(write(path, 'number,"my, zip",size,nil,colour,y', many), "y")
    write(path, '"my, zip",size,nil,colour,y', rows)
    with pytest.raises(InputError, match=r"text must name features, got \['zap'\]"):
        from_csv(path, "y", text=["zap"])


def test_names_with_commas_are_suggested_as_a_shell_takes_them(tmp_path: Path) -> None:
    rows = [f"{n},name {n},{n % 2}" for n in range(90)]
    path = write(tmp_path / "t.csv", '"row, id","its name",y', rows)
    with pytest.raises(DataError, match=r"--drop 'its name' \(drop="):
        from_csv(path, "y")
    said_at_last = said(path, "y", drop=["its name"])
    assert """--drop '"row, id"' leaves it out""" in said_at_last


@pytest.mark.parametrize("code", ["-999", "9999", "-99"])
def test_a_number_that_may_stand_for_unknown_is_remarked_on(tmp_path: Path, code: str) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{code if n % 9 == 0 else round(rng.normal(20, 5), 1)},{n % 7}" for n in range(80)]
    path = write(tmp_path / "t.csv", "pressure,y", rows)
    assert f"'pressure' is {code} in" in said(path, "y")
    rows = [f"{n % 100},{n % 7}" for n in range(200)]  # 99 is one of many here
    assert "training rows" not in said(write(path, "percent,y", rows), "y")


def test_text_that_may_stand_for_amounts_is_remarked_on(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for make in ("{}%", "$ {}", "{},00 €"):
        rows = [f'"{make.format(n % 20)}",{n % 7}' for n in range(60)]
        assert "'discount' is taken for text of" in said(write(path, "discount,y", rows), "y")
    rows = [f"{['red', 'blue', '5%'][n % 3]},{n % 7}" for n in range(60)]
    assert "taken for text" not in said(write(path, "colour,y", rows), "y")


def test_a_target_of_two_numbers_and_a_class_of_three_rows_are_remarked_on(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "a,y", [f"{n % 9}.5,{10 + 10 * (n % 2)}" for n in range(60)])
    assert "the target has two values, 10 and 20" in said(path, "y")
    assert "two values" not in said(path, "y", task="classification")
    rows = [f"{n % 9}.5,{'rare' if n < 3 else 'no' if n % 2 else 'yes'}" for n in range(90)]
    assert "'rare' has fewer than 5 training rows" in said(write(path, "a,y", rows), "y")


def test_what_is_missing_of_a_text_has_a_name(tmp_path: Path) -> None:
    rows = [f"{['yes', 'no', 'NA'][n % 3]},{n % 4}.5,{n % 5}" for n in range(30)]
    data = from_csv(write(tmp_path / "t.csv", "smoker,a,y", rows), "y")
    assert data.feature_names == ("a", "smoker=(missing)", "smoker=no", "smoker=yes")


def test_a_column_beyond_float32_is_named(tmp_path: Path) -> None:
    rows = [f"{n % 3},{n}e200,{n % 5}" for n in range(1, 30)]
    path = write(tmp_path / "t.csv", "a,flux,y", rows)
    with pytest.raises(DataError, match=r"column 'flux', got 1e[+]200 in row 1"):
        from_csv(path, "y")
    text = [f"{'rgb'[n % 3]},{n}e200,{n % 5}" for n in range(1, 30)]
    with pytest.raises(DataError, match="column 'flux'"):
        from_csv(write(path, "a,flux,y", text), "y")
    with pytest.raises(DataError, match="column 'flux'"):
        from_csv(write(path, "a,flux,y", text), "flux", drop=["a"])


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_a_column_that_an_estimator_cannot_standardise_is_named(size: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 3))
    x[:, 1] *= size
    with pytest.raises(
        ValueError, match=r"X must hold numbers whose squares.*in column 1; rescale"
    ):
        RobustClassifier(epochs=1).fit(x, np.arange(30) % 2)
    with pytest.raises(ValueError, match=r"y must hold numbers whose squares.*in column 0"):
        RobustRegressor(epochs=1).fit(x[:, :1], size * rng.normal(size=30))
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=r"in column 1 \('flux'\)"):
        RobustClassifier(epochs=1).fit(
            pandas.DataFrame(x, columns=["a", "flux", "b"]), np.arange(30) % 2
        )
    # rows without weight do not count
    x[:, 1] = np.where(np.arange(30) < 20, 1.0, 5.0)
    weights = (np.arange(30) < 20).astype(float)
    RobustClassifier(epochs=1).fit(x, np.arange(30) % 2, sample_weight=weights)


def test_a_decimal_comma_in_new_rows_is_read_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{'rgb'[n % 3]};{n % 9}.5;{n % 5}" for n in range(40)]
    path, run = write(tmp_path / "t.csv", "a;b;y", rows), str(tmp_path / "run")
    flags = ["--data", str(path), "--target", "y", "--epochs", "1", "--quiet", "--out", run]
    assert main(["train", *flags]) == 0
    capsys.readouterr()
    new = write(tmp_path / "new.csv", "a;b", ["r;6.5"])
    assert main(["predict", run, str(new)]) == 0
    with_point = capsys.readouterr().out
    new = write(tmp_path / "new.csv", "a;b", ["r;6,5"])
    with pytest.warns(UserWarning, match="with decimal commas, such as '6,5' in column 'b'"):
        assert main(["predict", run, str(new)]) == 0
    assert capsys.readouterr().out == with_point


@pytest.mark.parametrize(("copies", "remarked"), [(0, False), (3, False), (40, True)])
def test_test_rows_that_were_trained_on_are_counted(
    tmp_path: Path, copies: int, remarked: bool
) -> None:
    rows = [f"{n * 37 % 101}.5,{n % 7},{n % 3},{n % 2},{n % 4},{n % 5}" for n in range(100)]
    found = said(write(tmp_path / "t.csv", "a,b,c,d,e,y", rows + rows[:copies]), "y")
    assert ("test rows have the features of a training row" in found) == remarked


def test_rows_of_few_words_are_not_taken_for_copies(tmp_path: Path) -> None:
    rows = [f"{'rgb'[n % 3]},{n % 2},{n % 5}" for n in range(100)]
    assert "features of a training row" not in said(write(tmp_path / "t.csv", "a,b,y", rows), "y")


def test_text_columns_are_said_to_be_fixed_once() -> None:
    raw = {"age": 6.9, "age missing": 0.0, "sex=f": 0.0, "sex=m": 0.0, "size": 1.0}
    line = said_units({"eps": 0.3, "units": "standardised", "raw": raw})
    assert line.endswith("in raw units: age 6.9 where known, sex fixed, size 1")


def test_an_attacker_who_may_touch_nothing_is_told_so() -> None:
    """Not that the gradients are masked, or the units wrong."""
    weights = torch.tensor([[2.0, -1.0], [0.0, 1.0]])
    predict = lambda x: torch.distributions.Categorical(logits=x @ weights)  # noqa: E731
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    y = predict(x).logits.argmax(1)
    ball = L2(0.3, mask=torch.zeros(2, dtype=torch.bool))
    with pytest.warns(UnchangedWarning, match="its ball keeps every feature from it"):
        evaluate(predict, (x, y), attacks={"PGD": pgd(ball, 3)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = audit(predict, (x, y), ball=ball, tier="quick")
    advice = {finding.id: finding.advice for finding in verdict.findings}
    for check in ("E5", "E9"):
        assert advice[check].startswith("the attacker may touch nothing")


def test_a_rare_class_is_scored_by_balanced_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for share, shown in ((20, True), (2, False)):
        rows = [
            f"{rng.normal(n % share == 0):.3f},{'no' if n % share else 'yes'}" for n in range(200)
        ]
        path, run = write(tmp_path / f"{share}.csv", "a,y", rows), str(tmp_path / f"run{share}")
        flags = ["--data", str(path), "--target", "y", "--epochs", "1", "--quiet", "--out", run]
        assert main(["train", *flags]) == 0
        capsys.readouterr()
        assert main(["evaluate", run, "--attack", "pgd1", "--quiet"]) == 0
        assert ("balanced accuracy: its mean" in capsys.readouterr().out) == shown


def test_runs_of_other_data_cannot_stand_in_one_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for name in ("one", "two"):
        rows = [f"{(n * 7 + len(runs)) % 11}.5,{n % 2}" for n in range(40)]
        path = write(tmp_path / f"{name}.csv", "a,y", rows)
        runs.append(str(tmp_path / name))
        flags = ["--data", str(path), "--target", "y", "--task", "classification"]
        assert main(["train", *flags, "--epochs", "1", "--quiet", "--out", runs[-1]]) == 0
        assert main(["evaluate", runs[-1], "--attack", "pgd1", "--quiet"]) == 0
    assert main(["report", *runs, "--out", str(tmp_path / "both")]) == 2
    message = capsys.readouterr().err
    assert re.search("evaluated on the same examples.*got .*(one|two); make a report", message)
    assert not (tmp_path / "both").exists()

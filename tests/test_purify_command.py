"""`evaluate --purify` on what broke it: a regression, and a classifier with a class that nobody
predicts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from advbayes.cli import main

FEW = ["--attack", "pgd", "--num", "12", "--steps", "4", "--thetas", "2", "--json"]


def rows_of(
    capsys: pytest.CaptureFixture[str], run: Path, update: str
) -> dict[tuple[str, str], dict[str, dict[str, float]]]:
    capsys.readouterr()
    assert main(["evaluate", str(run), "--purify", update, *FEW]) == 0
    return {
        (row["predictor"], row["attack"]): row
        for row in json.loads(capsys.readouterr().out)["rows"]
    }


@pytest.mark.parametrize("update", ["online", "offline"])
def test_a_regression_is_purified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], update: str
) -> None:
    x = np.random.default_rng(0).normal(size=(80, 2))
    lines = [f"{a:.3f},{b:.3f},{3 * a - b:.3f}" for a, b in x]
    (tmp_path / "t.csv").write_text("a,b,y\n" + "\n".join(lines))
    argv = [
        "train",
        "--data",
        str(tmp_path / "t.csv"),
        "--target",
        "y",
        "--defense",
        "mix",
        "--eps",
        "0.3",
        "--epochs",
        "20",
    ]
    assert main([*argv, "--lr", "0.05", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    rows = rows_of(capsys, tmp_path / "run", update)
    name = f"mix purified {update}"
    assert {(name, "clean"), (name, "pgd"), (name, "adaptive"), (name, "worst")} <= set(rows)
    worst = rows[name, "worst"]["rmse"]["value"]
    assert (
        worst
        >= max(rows[name, attack]["rmse"]["value"] for attack in ("clean", "pgd", "adaptive"))
        - 1e-9
    )


def test_a_regression_of_several_outputs_has_coverage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(0).normal(size=(100, 2))
    lines = [f"{a:.3f},{b:.3f},{a - b:.3f},{a + b:.3f}" for a, b in x]
    (tmp_path / "t.csv").write_text("a,b,y,z\n" + "\n".join(lines))
    argv = ["train", "--data", str(tmp_path / "t.csv"), "--target", "y,z", "--noise-scale", "0.5"]
    argv += ["--defense", "os", "--eps", "0.01", "--epochs", "60", "--lr", "0.05", "--quiet"]
    assert main([*argv, "--out", str(tmp_path / "run")]) == 0
    rows = rows_of(capsys, tmp_path / "run", "online")
    assert rows["os purified online", "clean"]["coverage"]["value"] > 0.9
    assert {"coverage"} <= rows["os purified online", "worst"].keys()


def test_a_class_that_nobody_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).normal(size=(90, 2))
    kinds = np.where(x[:, 0] > 0, "right", "left")
    kinds[[3, 11, 19, 28, 40, 52, 63, 77]] = "never"
    (tmp_path / "t.csv").write_text(
        "a,b,kind\n" + "\n".join(f"{a:.3f},{b:.3f},{k}" for (a, b), k in zip(x, kinds, strict=True))
    )
    argv = [
        "train",
        "--data",
        str(tmp_path / "t.csv"),
        "--target",
        "kind",
        "--defense",
        "os",
        "--eps",
        "0.3",
        "--epochs",
        "30",
    ]
    assert main([*argv, "--lr", "0.05", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    rows = rows_of(capsys, tmp_path / "run", "online")
    worst = rows["os purified online", "worst"]["accuracy"]["value"]
    assert worst <= min(
        rows["os purified online", attack]["accuracy"]["value"]
        for attack in ("clean", "pgd", "adaptive")
    )

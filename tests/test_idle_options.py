"""What is asked for has an effect, is refused, or is said to have none: for each command, the
options that say nothing for the task, the attack or the posterior at hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from advbayes.cli import main
from advbayes.runs.building import prepare
from advbayes.runs.config import ATTACKS, SPENDING, make_config
from advbayes.runs.remarks import without_effect


def write_table(path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [
        f"{a:.3f},{b:.3f},{2 * a - b:.3f},{'up' if a > 0 else 'down'}"
        for a, b in rng.normal(size=(60, 2))
    ]
    path.write_text("a,b,price,kind\n" + "\n".join(rows))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier and a regression with one theta, on one table."""
    folder = tmp_path_factory.mktemp("idle")
    table = write_table(folder / "t.csv")
    for target, other in (("kind", "price"), ("price", "kind")):
        argv = ["train", "--data", str(table), "--target", target, "--drop", other]
        argv += ["--posterior", "point", "--defense", "none", "--epochs", "1", "--quiet"]
        assert main([*argv, "--out", str(folder / target)]) == 0
    return folder


@pytest.mark.parametrize(
    ("run", "flags", "said"),
    [
        ("kind", ("--level", "0.9"), "level: must be left out for a classifier"),
        (
            "price",
            ("--threshold", "0.3", "--positive", "up"),
            "threshold, positive: must be left out for a regression",
        ),
    ],
)
def test_predictions_refuse_what_says_nothing_for_their_task(
    place: Path, capsys: pytest.CaptureFixture[str], run: str, flags: tuple[str, ...], said: str
) -> None:
    assert main(["predict", str(place / run), str(place / "t.csv"), *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_level_of_a_regression_is_that_of_its_intervals(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, name in (((), "90%"), (("--level", "0.5"), "50%")):
        capsys.readouterr()
        assert main(["predict", str(place / "price"), str(place / "t.csv"), *flags]) == 0
        assert f"price {name} low" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--attack", "square", "--steps", "7"), "steps: 7 has no effect on square"),
        (("--attack", "pgd1", "--restarts", "3"), "restarts: 3 has no effect on pgd1"),
        (("--attack", "pgd", "--queries", "9"), "queries: 9 has no effect on pgd"),
        (("--attack", "pgd1", "--thetas", "7"), r"thetas: 7 has no effect on this model.*has 1"),
    ],
)
@pytest.mark.parametrize("command", ["evaluate", "attack"])
def test_a_budget_that_nobody_spends_is_remarked_on(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    flags: tuple[str, ...],
    said: str,
) -> None:
    where = ["--name", tmp_path.name] if command == "evaluate" else ["--out", f"{tmp_path}/a.npz"]
    assert main([command, str(place / "kind"), *flags, "--num", "2", *where]) == 0
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


def test_thetas_of_a_point_estimate_are_remarked_on_in_its_report(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(place / "kind")
    assert main(["evaluate", run, "--attack", "pgd1", "--num", "2", "--name", "reported"]) == 0
    for flags, said in (((), False), (("--thetas", "7"), True)):
        capsys.readouterr()
        assert main(["report", run, "--out", str(tmp_path / "report"), *flags]) == 0
        warned = " ".join(capsys.readouterr().err.split())
        assert ("thetas: 7 has no effect on this model" in warned) is said


def test_the_budgets_that_attacks_spend() -> None:
    """An attack holds the budgets that it is said to take, and no other."""
    from advbayes import L2
    from advbayes.runs import make_attack

    usual: dict[str, Any] = {"steps": 50, "restarts": 1, "queries": 500}
    for name in ATTACKS:
        base = repr(make_attack(name, L2(1.0), **usual))
        taken = {
            option
            for option in usual
            if repr(make_attack(name, L2(1.0), **usual | {option: 7})) != base
        }
        assert taken == set(SPENDING.get(name, ())), name


@pytest.mark.parametrize(
    ("keys", "idle"),
    [
        ({}, ()),
        ({"noise_scale": 0.1, "members": 7, "rank": 7}, ("members", "rank", "noise_scale")),
        ({"posterior": "ensemble", "members": 7, "init_scale": 0.1}, ("init_scale",)),
        ({"posterior": "low_rank", "rank": 7, "init_scale": 0.1}, ()),
        ({"defense": "at", "sigma": 0.3, "beta": 2.0}, ("sigma", "beta")),
        ({"defense": "trades", "sigma": 0.3, "beta": 2.0, "attack_steps": 3}, ("sigma",)),
        ({"defense": "mix", "sigma": 0.3, "attack_steps": 3}, ("attack_steps",)),
        ({"defense": "nn", "adversary_lr": 0.1}, ()),
        ({"defense": "os", "adversary_lr": 0.1}, ("adversary_lr",)),
        ({"bound": "importance_weighted"}, ("bound",)),
        ({"bound": "importance_weighted", "num_channel": 2}, ()),
        ({"channel": "mine:make", "defense": "none", "sigma": 0.3}, ()),
        ({"hidden": [4]}, ("hidden",)),
        ({"hidden": [4], "network": "mlp"}, ()),
    ],
)
def test_keys_without_effect(keys: dict[str, Any], idle: tuple[str, ...]) -> None:
    config = make_config({"data": "digits", "num_train": 10, **keys})
    lines = without_effect(config, prepare(config))
    assert tuple(line.partition(" ")[0] for line in lines) == idle


def test_noise_of_a_classifier_is_remarked_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", "--data", str(write_table(tmp_path / "t.csv")), "--target", "kind", "--quiet"]
    argv += ["--epochs", "1", "--noise-scale", "0.1", "--out", str(tmp_path / "run")]
    assert main(argv) == 0
    said = "noise_scale = 0.1 has no effect: the task is classification"
    assert f"warning: {said}" in " ".join(capsys.readouterr().err.split())
    assert said in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("command", "key"),
    [
        *[("compare", key) for key in ("data", "target", "eps", "defense", "seed")],
        *[("reproduce", key) for key in ("defense", "seed")],
    ],
)
def test_settings_leave_to_flags_what_has_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, key: str
) -> None:
    """--set eps trained at one budget and attacked at another, --set defense made all rows the
    same, and the others had no effect."""
    table = str(write_table(tmp_path / "t.csv"))
    compared = ["--data", table, "--target", "kind", "--defense", "none"]
    argv = [command, *(compared if command == "compare" else ["wine", "--preset", "quick"])]
    assert main([*argv, "--set", f"{key}=1", "--out", str(tmp_path / "out")]) == 2
    assert f"--set must leave {key} to" in capsys.readouterr().err

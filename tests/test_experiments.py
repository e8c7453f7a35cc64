"""The experiments: defenses as SM-5 says, units that resume, tables from records alone, tests that
may call a row best."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from advbayes.attacks import Suite, Transfer
from advbayes.channels import AttackChannel, Mixture, Noise
from advbayes.experiments import running
from advbayes.experiments.catalogue import EXPERIMENTS, Experiment, Row, Spec
from advbayes.experiments.defenses import DEFENSES, Defense
from advbayes.experiments.reported import REPORTED
from advbayes.experiments.running import run
from advbayes.experiments.scores import Cell, Scores
from advbayes.experiments.units import CLEAN, Unit, attacks_on, predictor, prepared, run_unit
from advbayes.experiments.views import pairs, write_views
from advbayes.metrics import paired_t
from advbayes.purification.attacks import Annealed, NearestCentre
from advbayes.runs import build_defense
from advbayes.runs.config import make_config

SKETCH = {"data": "diabetes", "epochs": 1, "num_train": 60, "hidden": [3]}


def sketch(*defenses: str) -> Spec:
    return Spec("compare-diabetes", "quick", SKETCH, 10, defenses, "regression", 0.5)


def test_mixed_channels_hold_the_noisy_identity() -> None:
    """SM-5: rho N(x, sigma^2) + (1 - rho) one step plus noise; AT alone is without noise."""
    config = make_config({"data": "digits", "sigma": 0.2})
    data = prepared(config)["test"]
    for name in ("OS50", "NN50"):
        make = DEFENSES[name].channel
        assert make is not None
        channel = make(config, data)
        assert isinstance(channel, Mixture)
        assert tuple(channel.weights) == (0.5, 0.5)
        assert channel.channels[0] == Noise(0.2)
    at = DEFENSES["AT"].channel
    assert at is not None
    channel = at(config, data)
    assert isinstance(channel, Mixture)
    assert channel.channels[0] == Noise(0.0)
    assert isinstance(channel.channels[1], AttackChannel)
    assert channel.channels[1].sigma == 0


def test_the_mix_channel_has_the_papers_weights() -> None:
    config = make_config({"data": "digits", **DEFENSES["MIX"].settings})
    channel, _ = build_defense(config, prepared(config)["test"])
    assert isinstance(channel, Mixture)
    assert [round(weight, 9) for weight in channel.weights] == [0.4, 0.2, 0.2, 0.2]
    losses = [part.attack.stages[0][0].__name__ for part in channel.channels[1:]]  # type: ignore[attr-defined]
    assert losses == ["nll", "margin", "entropy"]


def test_every_reported_row_is_a_row_of_its_experiment() -> None:
    for name, tables in REPORTED.items():
        missing = {row for rows in tables.values() for row in rows} - EXPERIMENTS[name].rows.keys()
        assert missing <= {"onPure", "offPure"}, (name, missing)


def test_validation_rows_come_out_of_the_training_rows() -> None:
    config = make_config({"data": "diabetes", "seed": 3})
    alone, both = prepared(config), prepared(config, validation=True)
    assert alone.keys() == {"test"}
    whole, data, held_out = alone["test"], both["test"], both["validation"]
    assert torch.equal(data.x_test, whole.x_test)
    together = torch.cat([data.x_train, held_out.x_test])
    assert len(together) == len(whole.x_train)
    assert {tuple(row) for row in together.tolist()} == {
        tuple(row) for row in whole.x_train.tolist()
    }


def test_least_squares_of_dependent_columns_has_small_weights() -> None:
    """Rounded to float32, dependent columns look independent: any weights would do on the data, and
    none beside it."""
    data = prepared(make_config({"data": "diabetes"}))["test"]
    doubled = torch.cat([data.x_train, data.x_train[:, :1] * 3 + data.x_train[:, 1:2]], 1)
    reference = DEFENSES["least squares"].reference
    assert reference is not None
    predict = reference(dataclasses.replace(data, x_train=doubled), 0)
    x = torch.eye(11)
    assert predict(x).mean.abs().max() < 2


def test_min_max_units_are_those_of_the_training_rows() -> None:
    data = prepared(make_config({"data": "diabetes"}), "min-max")["test"]
    assert torch.allclose(data.x_train.amin(0), torch.zeros(10))
    assert torch.allclose(data.x_train.amax(0), torch.ones(10))


def test_a_stopped_run_goes_on_and_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = sketch("BL", "MIX")
    whole = run(spec, tmp_path / "whole", quiet=True)
    worked: list[tuple[str, int]] = []
    original = running.work

    def stopping(spec: Spec, folder: Path, row: str, seed: int) -> float:
        if len(worked) == 3:
            raise KeyboardInterrupt
        worked.append((row, seed))
        return original(spec, folder, row, seed)

    monkeypatch.setattr(running, "work", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(spec, tmp_path / "stopped", quiet=True)
    assert not (tmp_path / "stopped" / spec.name / "records.jsonl.gz").exists()
    monkeypatch.setattr(
        running, "work", lambda *given: worked.append(given[2:]) or original(*given)
    )  # type: ignore[func-returns-value]
    stopped = run(spec, tmp_path / "stopped", quiet=True)
    assert len(worked) == len(set(worked)) == 6
    assert (stopped / "records.jsonl.gz").read_bytes() == (whole / "records.jsonl.gz").read_bytes()
    run(spec, tmp_path / "stopped", quiet=True)
    assert len(worked) == 6, "what is in the records is not done again"
    run(spec, tmp_path / "stopped", rows=["MIX"], again=True, quiet=True)
    assert worked[6:] == [("MIX", 0), ("MIX", 1)]
    assert (stopped / "records.jsonl.gz").read_bytes() == (whole / "records.jsonl.gz").read_bytes()


@pytest.mark.unshifted("the workers know nothing of it")
def test_side_by_side_gives_the_same_records(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(80, 3))
    file = tmp_path / "t.csv"  # for which the workers need not load scikit-learn
    file.write_text("a,b,y\n" + "\n".join(",".join(f"{v:.4f}" for v in row) for row in rows))
    spec = dataclasses.replace(sketch("BL"), settings={**SKETCH, "data": str(file), "target": "y"})
    one = run(spec, tmp_path / "one", quiet=True)
    two = run(spec, tmp_path / "two", jobs=2, quiet=True)
    assert (one / "records.jsonl.gz").read_bytes() == (two / "records.jsonl.gz").read_bytes()


def test_tables_are_made_from_records_alone(tmp_path: Path) -> None:
    folder = run(sketch("BL", "AT"), tmp_path, quiet=True)
    table = write_views(folder).read_text()
    assert "| *constant* |" in table
    records = [
        json.loads(line)
        for line in gzip.decompress((folder / "records.jsonl.gz").read_bytes()).splitlines()
    ]
    errors = [
        each["squared_error"]
        for each in records
        if (each["row"], each["seed"], each["attack"]) == ("BL", 0, "PGD")
    ]
    assert Scores(folder).value("rmse", "BL", 0, Cell("test", "PGD", 0.5)) == pytest.approx(
        math.sqrt(np.mean(errors))
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {"command", "commit", "machine", "seconds", "seeds", "units"} <= manifest.keys()


@pytest.mark.parametrize("num", [2, 3, 5, 10])
def test_the_paired_t_test_is_scipys(num: int) -> None:
    draw = np.random.default_rng(num)
    first, second = draw.normal(size=num), draw.normal(size=num)
    assert paired_t(first, second) == pytest.approx(
        stats.ttest_rel(first, second, alternative="less").pvalue
    )
    plain, corrected = (
        paired_t(first, first + 1 + second / 9),
        paired_t(first, first + 1 + second / 9, overlap=0.25),
    )
    assert plain < corrected < 0.5


def written(folder: Path, values: dict[str, list[float]]) -> Scores:
    """Rows whose examples are all correct with the given probability of each seed."""
    cells = {"split": "test", "attack": "clean", "eps": 0.0}
    records = [
        {
            "row": row,
            "seed": seed,
            **cells,
            "index": index,
            "correct": float(index < 100 * share),
            "log_prob": -1.0,
        }
        for row, shares in values.items()
        for seed, share in enumerate(shares)
        for index in range(100)
    ]
    (folder / "records.jsonl.gz").write_bytes(running.packed(records))
    (folder / "manifest.json").write_text(
        json.dumps({"units": {row: {"row": row} for row in values}})
    )
    return Scores(folder)


@pytest.mark.parametrize("overlap", [0.0, 0.25])
def test_intervals_over_seeds_allow_for_the_rows_that_splits_share(
    tmp_path: Path, overlap: float
) -> None:
    """A constant's RMSE on five redrawn test sets of one sample: Student's interval held the truth
    in 87 % of the samples, with the correction of the paired tests in 94 %."""
    values = [0.7, 0.9, 0.8, 0.75, 0.95]
    records = [
        {"row": "a", "seed": seed, "split": "test", "attack": "clean", "eps": 0.0, "index": index}
        | {"squared_error": value**2}
        for seed, value in enumerate(values)
        for index in range(3)
    ]
    (tmp_path / "records.jsonl.gz").write_bytes(running.packed(records))
    unit = {"row": "a", "overlap": overlap}
    (tmp_path / "manifest.json").write_text(json.dumps({"units": {"a": unit}}))
    found = Scores(tmp_path).summary("rmse", "a", Cell("test", "clean", 0.0))
    half = stats.t.ppf(0.975, 4) * np.std(values, ddof=1) * math.sqrt(1 / 5 + overlap)
    assert (found.low, found.high) == pytest.approx((0.82 - half, 0.82 + half), rel=1e-8)


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ({"a": [0.9, 0.91, 0.9, 0.92, 0.9], "b": [0.5, 0.52, 0.5, 0.51, 0.5]}, "a"),
        # four seeds are too few
        ({"a": [0.9, 0.91, 0.9, 0.92], "b": [0.5, 0.52, 0.5, 0.51]}, None),
        # ahead on average, not significantly
        ({"a": [0.9, 0.2, 0.9, 0.2, 0.9], "b": [0.5, 0.52, 0.5, 0.51, 0.5]}, None),
        # a tie has no best
        ({"a": [0.9] * 5, "b": [0.5, 0.52, 0.5, 0.51, 0.5], "c": [0.9] * 5}, None),
        # a row with one seed takes the bold away where it is ahead, and only there
        ({"a": [0.9, 0.91, 0.9, 0.92, 0.9], "b": [0.5, 0.52, 0.5, 0.51, 0.5], "c": [0.95]}, None),
        ({"a": [0.9, 0.91, 0.9, 0.92, 0.9], "b": [0.5, 0.52, 0.5, 0.51, 0.5], "c": [0.4]}, "a"),
    ],
)
def test_best_is_what_beats_every_other_row(
    tmp_path: Path, values: dict[str, list[float]], best: str | None
) -> None:
    assert (
        written(tmp_path, values).best("accuracy", list(values), Cell("test", "clean", 0.0)) == best
    )


def test_paired_differences_say_who_is_ahead_and_how_surely(tmp_path: Path) -> None:
    """The sign is first minus second, the p-value that of the sign seen; rows with too
    few seeds are left out."""
    values = {
        "MIX": [0.9, 0.91, 0.9, 0.92, 0.9],
        "AT": [0.5, 0.52, 0.5, 0.51, 0.5],
        "BL": [0.95, 0.95, 0.94, 0.95, 0.96],
        "NN50": [0.7] * 4,
    }
    scores = written(tmp_path, values)
    experiment = Experiment("", {}, {}, metrics=("accuracy",), attacks=(), radii=(0.0,))
    text = "\n\n".join(pairs(experiment, scores, tmp_path))
    shown = dict(re.findall(r"^\| (\S+ - \S+) \| (.*) \|$", text, re.MULTILINE))
    assert list(shown) == ["MIX - AT", "MIX - BL", "AT - BL"]
    cell = Cell("test", "clean", 0.0)
    for name, sign in {"MIX - AT": "+", "MIX - BL": "-", "AT - BL": "-"}.items():
        first, second = name.split(" - ")
        gap = [scores.value("accuracy", row, s, cell) for row in (first, second) for s in range(5)]
        mean = sum(gap[:5]) / 5 - sum(gap[5:]) / 5
        ahead = (first, second) if mean > 0 else (second, first)
        p = scores.p_better("accuracy", *ahead, cell)
        assert shown[name].startswith(sign)
        assert shown[name] == f"{mean:+.3f} (p = {p:.2g})"
        assert p < 0.05


def test_a_purifier_meets_the_attacks_that_know_it() -> None:
    """And a plain predictive the strong suite alone."""
    settings = {"data": "digits", "epochs": 0.1, "num_train": 60, "hidden": [4]}
    rows = {name: Row(DEFENSES[name]) for name in ("BL", "onPure")}
    experiment = Experiment("", settings, rows, attacks=("PGD", "strong"), steps=2, thetas=2)
    for row, kinds in (("BL", set()), ("onPure", {Transfer, NearestCentre, Annealed})):
        unit = Unit(experiment, row, 0)
        data = unit.data
        predict, _ = predictor(unit)
        strong = attacks_on(unit, predict)["strong"]
        assert isinstance(strong, Suite)
        assert {type(each) for each in strong.attacks} >= kinds
        assert any(isinstance(each, NearestCentre) for each in strong.attacks) == bool(kinds)
        x, y = data.x_test[:4], data.y_test[:4]
        assert strong(predict, x, y).shape == x.shape


def test_certified_records_are_certificates() -> None:
    """At most sigma Phi^-1(alpha^(1/n)), correct ones alone in the average."""
    settings = {"data": "digits", "epochs": 30, "lr": 0.01, "defense": "noise", "sigma": 0.25}
    rows = {"posterior": Row(Defense("", {}))}
    experiment = Experiment("", settings, rows, num_test=30, draws=400, measure="certified")
    records, about = run_unit(Unit(experiment, "posterior", 0))
    longest = 0.25 * stats.norm.ppf(0.001 ** (1 / about["draws"]))
    assert about["draws"] == 400
    assert len(records) >= 30
    assert all(0 <= each["radius"] <= longest + 1e-6 for each in records)
    assert np.mean([each["correct"] for each in records]) > 0.7
    assert max(each["radius"] for each in records) > 0.5 * longest


def test_floors_are_those_of_rows_of_the_whole_table() -> None:
    """The constant keeps within them; the less clean error is allowed, the higher they are."""
    experiment = Experiment(
        "",
        {"data": "diabetes", "num_train": 30},
        {"diabetes": Row(DEFENSES["BL"])},
        radii=(1.0, 3.0),
        num_test=80,
        measure="floored",
    )
    unit = Unit(experiment, "diabetes", 0)
    records, about = run_unit(unit)
    assert about["num_rows"] == 80
    floors = {(each["radius"], each["clean"]): each["floor"] for each in records}
    for eps in experiment.radii:
        bounds = [floors[eps, clean] for clean in (*CLEAN, None)]
        assert bounds == sorted(bounds, reverse=True)
        assert 0 < floors[eps, None] < 1 + 1e-6
    assert floors[3.0, None] > floors[1.0, None]
    assert floors[3.0, 0.1] > 1.2  # far above the constant


def test_floors_are_printed_and_drawn_as_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {name: Row(DEFENSES["BL"], {"data": "diabetes"}) for name in ("diabetes", "again")}
    settings = {"num_test": 40, "seeds": 1, "measure": "floored", "views": ("limits",)}
    experiment = Experiment("Limits", {}, rows, radii=(1.0, 3.0), **settings)  # type: ignore[arg-type]
    monkeypatch.setitem(EXPERIMENTS, "limits", experiment)
    folder = run(Spec("limits"), tmp_path, quiet=True)
    page, scores = write_views(folder).read_text(), Scores(folder)
    for row in rows:
        for clean in (None, *CLEAN):
            found = [each["floor"] for each in scores.of(row) if each["clean"] == clean]
            name = "any" if clean is None else f"{clean:g}"
            assert f"| {name} | {found[0]:.3f} | {found[1]:.3f} |" in page
    assert page.count("(40 rows)") == 2
    assert (folder / "limits.svg").exists()
    assert (folder / "limits.png").exists()

"""What is printed is what was measured: tables and sentences of terminal and report, read back and
compared with the numbers."""

from __future__ import annotations

import csv
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from advbayes.cli import main
from advbayes.cli.predicting import tabulate
from advbayes.datasets import Standardize
from advbayes.evaluation import load_evaluation, score
from advbayes.likelihoods import GaussianMixture
from advbayes.runs import load_trained

FEW = ["--num", "24", "--thetas", "3", "--steps", "4", "--attack", "pgd", "--attack", "pgd1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A classifier and a regression on tables, evaluated at two radii, with reports."""
    folder = tmp_path_factory.mktemp("readback")
    x = np.random.default_rng(1).normal(size=(150, 3)) * [1, 10, 100]
    score_ = x @ [1.0, -0.2, 0.01]
    lines = [",".join(f"{value:.4f}" for value in row) for row in x]
    (folder / "kinds.csv").write_text(
        "a,b,c,kind\n"
        + "\n".join(f"{r},{'up' if s > 0 else 'down'}" for r, s in zip(lines, score_, strict=True))
    )
    (folder / "prices.csv").write_text(
        "a,b,c,price\n"
        + "\n".join(f"{r},{500 + 40 * s:.3f}" for r, s in zip(lines, score_, strict=True))
    )
    found = {}
    for task, target in (("kinds", "kind"), ("prices", "price")):
        argv = [
            "train",
            "--data",
            str(folder / f"{task}.csv"),
            "--target",
            target,
            "--epochs",
            "15",
            "--lr",
            "0.03",
        ]
        assert main([*argv, "--eps", "0.3", "--out", str(folder / task), "--quiet"]) == 0
        assert (
            main(
                [
                    "evaluate",
                    str(folder / task),
                    *FEW,
                    "--eps",
                    "0.2",
                    "--eps",
                    "0.5",
                    "--name",
                    "two",
                ]
            )
            == 0
        )
        assert main(["report", str(folder / task), "--thetas", "3"]) == 0
        found[task] = str(folder / task)
    return found


def numbers(text: str) -> list[float]:
    return [
        float(part)
        for part in re.findall(
            r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text.replace("−", "-").replace(",", "")
        )
    ]


def cells_of(text: str) -> list[list[str]]:
    """The rows of a table drawn on the terminal."""
    return [
        [cell.strip() for cell in line.strip("│┃ ").split("│")]
        for line in text.splitlines()
        if line.startswith("│")
    ]


def close(shown: list[float], wanted: list[float], digits: int = 3) -> bool:
    return len(shown) == len(wanted) and all(
        math.isclose(a, b, abs_tol=0.51 * 10**-digits, rel_tol=0.006 if abs(b) < 5e-4 else 0.0)
        or (abs(b) >= 1000 and abs(a - b) <= 0.51)
        for a, b in zip(shown, wanted, strict=True)
    )


@pytest.mark.parametrize("task", ["kinds", "prices"])
def test_the_table_on_the_terminal(
    runs: dict[str, str], task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["evaluate", runs[task], *FEW, "--eps", "0.2", "--eps", "0.5", "--name", "two"]
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)["rows"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    rows = cells_of(text)
    assert len(rows) == len(wanted)
    unit = float(load_trained(runs[task]).scaling.target_std) if task == "prices" else 1.0  # type: ignore[union-attr,arg-type]
    metrics = ("rmse", "nll", "coverage") if task == "prices" else ("accuracy", "nll", "ece")
    for row, found in zip(rows, wanted, strict=True):
        assert row[:2] == [found["predictor"], found["attack"]]
        assert row[2] == ("" if found["eps"] is None else f"{found['eps']:g}")
        for cell, metric in zip(row[3:], metrics, strict=True):
            size = unit if metric == "rmse" else 1.0
            assert close(
                numbers(cell), [size * found[metric][key] for key in ("value", "low", "high")]
            ), (cell, found[metric])
    head = next(line for line in text.splitlines() if line.startswith("┃"))
    names = (
        ["RMSE (in the unit of 'price')", "NLL (nats, standardised)", "coverage of 90 % intervals"]
        if task == "prices"
        else ["accuracy", "NLL"]
    )
    for name in names:
        assert name in head
    # a long path wraps the title
    assert "24 test examples, with 95 % intervals" in " ".join(text.split())


@pytest.mark.parametrize("task", ["kinds", "prices"])
def test_what_a_run_says_of_itself(
    runs: dict[str, str], task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["show", runs[task]]) == 0
    text = capsys.readouterr().out
    kept = json.loads((Path(runs[task]) / "metrics.json").read_text())
    line = next(line for line in text.splitlines() if "clean test set" in line)
    trained = load_trained(runs[task])
    assert f"({kept['num']} examples, 95 % intervals)" in line
    for metric, words in {
        "rmse": "RMSE (in the unit of 'price')",
        "nll": "NLL (nats, standardised)" if task == "prices" else "NLL (nats)",
        "accuracy": "accuracy",
    }.items():
        if metric in kept["clean"]:
            shown = re.search(re.escape(words) + r" (\S+ \[\S+ \S+\])", line)
            assert shown is not None
            size = float(trained.scaling.target_std) if metric == "rmse" else 1.0  # type: ignore[union-attr,arg-type]
            assert close(
                numbers(shown[1]),
                [size * kept["clean"][metric][key] for key in ("value", "low", "high")],
            )
    if task == "prices":  # the truth, computed without the package's metrics
        assert "regression, since column 'price' holds numbers" in text
        assert "coverage of 90 % intervals" in line
    else:
        assert "classification, since column 'kind' holds text" in text


class Tables(HTMLParser):
    """Every table of a page as rows of cell texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.cell = True
        elif tag == "span" and self.cell:
            self.handle_data(" ")

    def handle_endtag(self, tag: str) -> None:
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.cell:
            self.tables[-1][-1][-1] += data


@pytest.mark.parametrize("task", ["kinds", "prices"])
def test_the_tables_of_the_report(runs: dict[str, str], task: str) -> None:
    folder, evaluation = (
        Path(runs[task]) / "report",
        load_evaluation(Path(runs[task]) / "evaluation" / "two"),
    )
    unit = float(load_trained(runs[task]).scaling.target_std) if task == "prices" else 1.0  # type: ignore[union-attr,arg-type]
    metrics = json.loads((folder / "report.json").read_text())["metrics"]

    def wanted(predictor: str, attack: str, eps: float, metric: str) -> list[float]:
        found = evaluation.estimate(
            metric, predictor, {"untouched": "clean", "any": "clean"}.get(attack, attack), eps
        )
        size = (
            100.0
            if metric in ("accuracy", "coverage", "selective_accuracy")
            else unit
            if metric in ("rmse", "crps")
            else 1.0
        )
        return [size * value for value in (found.value, found.low, found.high)]

    compared = 0
    lines = [
        line for line in (folder / "report.md").read_text().splitlines() if line.startswith("| ")
    ]
    head = next(line for line in lines if line.startswith("| predictor | attack"))
    assert head.count("|") == len(metrics) + 4
    for line in lines[lines.index(head) + 1 :]:
        cells = [cell.strip().replace("\\", "") for cell in line.strip("|").split(" | ")]
        if len(cells) != len(metrics) + 3:
            break
        for cell, metric in zip(cells[3:], metrics, strict=True):
            value = wanted(
                cells[0], cells[1], 0.0 if cells[2] == "any" else float(cells[2]), metric
            )
            digits = 1 if metric in ("accuracy", "coverage", "selective_accuracy") else 3
            assert close(numbers(cell.replace("†", "")), value, digits), (line, metric, value)
            compared += 1
    assert compared == len(metrics) * (1 + 2 * 3 + (2 if task == "kinds" else 1))

    page = Tables((folder / "report.html").read_text())
    table = max((table for table in page.tables if table[0][1:3] == ["attack", "ε"]), key=len)
    for row in table[1:]:
        eps = 0.0 if row[2] == "any" else float(row[2])
        for cell, metric in zip(row[3:], metrics, strict=True):
            digits = 1 if metric in ("accuracy", "coverage", "selective_accuracy") else 3
            assert close(
                numbers(cell.replace("†", " ")), wanted(row[0], row[1], eps, metric), digits
            ), (row, metric)
            compared -= 1
    assert compared == 0

    with (folder / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(metrics) * (1 + 2 * 3 + (2 if task == "kinds" else 1))
    for row in rows:
        found = evaluation.estimate(
            row["metric"],
            row["predictor"],
            "clean" if row["attack"] == "any" else row["attack"],
            float(row["eps"]) if row["eps"] else 0.0,
        )
        assert [float(row[key]) for key in ("value", "low", "high", "examples")] == [
            found.value,
            found.low,
            found.high,
            found.num,
        ]
    units = {row["metric"]: row["unit"] for row in rows}
    if task == "kinds":
        assert set(units.values()) == {""}
    else:  # as recorded, not as the page shows them
        assert units["rmse"] == units["crps"] == "standard deviations of the target"
        assert units["nll"] == "nats of the standardised target"
        assert units["aurc"] == "variances of the target"
        assert "| NLL of the standardised target, nats ↓ |" in (folder / "report.md").read_text()
        page = (folder / "report.html").read_text()
        assert "mean squared error (variances of the target)" in page


@pytest.mark.parametrize("task", ["kinds", "prices"])
def test_the_sentences_of_the_report(runs: dict[str, str], task: str) -> None:
    folder, evaluation = (
        Path(runs[task]) / "report",
        load_evaluation(Path(runs[task]) / "evaluation" / "two"),
    )
    eps = json.loads((folder / "report.json").read_text())["eps"]
    text = (folder / "report.md").read_text()
    if task == "kinds":
        shown = re.search(
            r"answers ([\d.]+) % of untouched inputs correctly, and ([\d.]+) %†? \(95 % interval "
            r"([\d.]+) to ([\d.]+)\)",
            text,
        )
        metric, size, digits = "accuracy", 100.0, 1
    else:
        first = r"RMSE of ([\d.]+) \(in the target's unit\) on untouched inputs"
        shown = re.search(first + r", and ([\d.]+)†? \(95 % interval ([\d.]+) to ([\d.]+)\)", text)
        metric, size, digits = "rmse", float(load_trained(runs[task]).scaling.target_std), 3  # type: ignore[union-attr,arg-type]
    assert shown is not None
    clean, worst = (
        evaluation.estimate(metric, None, "clean"),
        evaluation.estimate(metric, None, "worst", eps),
    )
    assert close(
        [float(v) for v in shown.groups()],
        [size * v for v in (clean.value, worst.value, worst.low, worst.high)],
        digits,
    )
    assert "24 test examples" in " ".join(text.split())
    what = ("ece", "expected calibration error") if task == "kinds" else ("coverage", "coverage")
    for attack, words in (("clean", "untouched"), ("worst", f"worst case, ε = {eps:g}")):
        line = next(
            line
            for line in text.splitlines()
            if line.startswith("- ") and f"{words}: {what[1]}" in line
        )
        found = evaluation.estimate(what[0], None, attack, 0.0 if attack == "clean" else eps)
        assert close(
            numbers(line.partition(what[1])[2]),
            [100 * v for v in (found.value, found.low, found.high)],
            1,
        )


# --- intervals have the coverage that they are labelled with ------------------------------------


def lopsided(x: Tensor) -> GaussianMixture:
    """A narrow and a wide bell with other means: far from a normal with the same moments."""
    means = torch.stack([x[:, 0], x[:, 0] + 3.0])
    scales = torch.stack([torch.full_like(x[:, 0], 0.3), torch.full_like(x[:, 0], 1.5)])
    return GaussianMixture(means, scales, torch.tensor([0.7, 0.3]).log()[:, None].expand(2, len(x)))


def drawn(num: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 1, generator=generator)
    wide = torch.rand(num, generator=generator) < 0.3
    noise = torch.randn(num, generator=generator)
    return x, torch.where(wide, x[:, 0] + 3.0 + 1.5 * noise, x[:, 0] + 0.3 * noise)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95])
def test_predicted_intervals_have_their_coverage_and_their_label(level: float) -> None:
    num = 4000
    x, y = drawn(num, 3)
    scaling = Standardize(torch.zeros(1), torch.ones(1), torch.tensor(7.0), torch.tensor(20.0))
    trained = SimpleNamespace(
        predict=lambda num: lopsided, scaling=scaling, target_names=("price",), class_names=()
    )
    columns = tabulate(trained, x, level=level)  # type: ignore[arg-type]
    low, high = (np.array(columns[f"price {100 * level:g}% {side}"]) for side in ("low", "high"))
    truth = y.numpy() * 20 + 7
    inside = float(((low <= truth) & (truth <= high)).mean())
    assert abs(inside - level) < 4 * math.sqrt(level * (1 - level) / num)
    tails = float((truth < low).mean()), float((truth > high).mean())
    assert all(abs(tail - (1 - level) / 2) < 4 * math.sqrt((1 - level) / 2 / num) for tail in tails)
    assert np.allclose(columns["price"], (lopsided(x).mean * 20 + 7).numpy(), rtol=1e-5)
    assert np.allclose(columns["price std"], (lopsided(x).variance.sqrt() * 20).numpy(), rtol=1e-5)


@pytest.mark.parametrize("level", [0.5, 0.9])
@pytest.mark.parametrize("kind", ["normal", "mixture"])
def test_scored_coverage_is_that_of_its_level(level: float, kind: str) -> None:
    num = 4000
    if kind == "mixture":
        x, y = drawn(num, 5)
        predict: Any = lopsided
    else:
        x = torch.randn(num, 1, generator=torch.Generator().manual_seed(0))
        y = x[:, 0] + 2 * torch.randn(num, generator=torch.Generator().manual_seed(1))
        predict = lambda x: Normal(x[:, 0], 2.0)  # noqa: E731
    inside = float(score(predict, x, y, "regression", interval_level=level)["inside"].mean())
    assert abs(inside - level) < 4 * math.sqrt(level * (1 - level) / num)


# --- thresholds, from both sides ----------------------------------------------------------------


@pytest.mark.parametrize(("low", "said"), [(0.75, True), (0.7500001, False)])
def test_a_model_is_said_to_be_no_better_exactly_where_its_interval_reaches_the_majority(
    low: float, said: bool
) -> None:
    from advbayes.cli.describe import no_better

    clean = {"accuracy": {"value": 0.8, "low": low, "high": 0.9}}
    assert bool(no_better({"clean": clean, "trivial": {"accuracy": 0.75}})) is said
    errors = {"rmse": {"value": 0.8, "low": 0.7, "high": 1.75 - low}}
    assert bool(no_better({"clean": errors, "trivial": {"rmse": 1.0}})) is said


@pytest.mark.parametrize(("largest", "logarithmic"), [(20.0, False), (20.1, True)])
def test_curves_are_logarithmic_where_a_linear_axis_would_hide_the_small(
    largest: float, logarithmic: bool
) -> None:
    from advbayes.report.figures import _spans

    assert _spans([1.0, largest]) is logarithmic
    assert not _spans([-1.0, largest])


# --- reproduction -------------------------------------------------------------------------------


def test_the_commands_of_a_report_make_the_same_numbers_again(
    runs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shlex

    from advbayes.report import report_runs

    text = (Path(runs["kinds"]) / "report" / "report.md").read_text()
    part = text.partition("## How to reproduce this")[2]
    commands = [
        line.strip() for line in part.splitlines() if line.startswith("    advbayes evaluate")
    ]
    assert len(commands) == 1
    words = shlex.split(commands[0])[1:]
    assert words[:2] == ["evaluate", runs["kinds"]]
    words[words.index("--name") + 1] = "again"
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    before = load_evaluation(Path(runs["kinds"]) / "evaluation" / "two").table().json()["rows"]
    assert rows == before
    # An evaluation of other examples is not shown, and that is said.
    assert (
        main(
            [
                "evaluate",
                runs["kinds"],
                "--num",
                "7",
                "--attack",
                "pgd1",
                "--thetas",
                "3",
                "--name",
                "few",
            ]
        )
        == 0
    )
    paths = report_runs([runs["kinds"]], tmp_path / "report", num_thetas=3)
    for file in (paths.html, paths.markdown):
        assert "few (7 examples)" in file.read_text()
    assert "mix on kinds" in paths.html.read_text()  # the file's name, not its whole path

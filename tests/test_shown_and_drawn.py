"""What experiments, downloads and records show where somebody looks: figures by the numbers in
them, tables on a terminal, lists; and the values that records of functions tell apart."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributions import Distribution, Normal

from advbayes import L2, PGD, BayesianModel, Categorical, Linf
from advbayes.attacks import MeanOf
from advbayes.attacks.parts import is_attack
from advbayes.cli import main
from advbayes.cli.screen import downloads
from advbayes.evaluation.contents import contents_of
from advbayes.evaluation.tables import Grid
from advbayes.experiments import demo, views
from advbayes.experiments.catalogue import EXPERIMENTS, Experiment, Row
from advbayes.experiments.defenses import DEFENSES
from advbayes.experiments.running import MANIFEST, RECORDS, Board, packed
from advbayes.experiments.scores import Cell, Scores
from advbayes.report.folders import _renamed
from advbayes.report.rendering import bars
from advbayes.report.telling import headline, listed
from advbayes.report.text import number
from advbayes.runs import prepare
from advbayes.runs.building import build_net
from advbayes.runs.config import ConfigError, make_config
from advbayes.store import write_document

from .calls_pages import folder_of
from .calls_users import evaluated


def painted_by(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that views paint from here on."""
    painted: dict[str, Figure] = {}

    @contextmanager
    def figure(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
        painted[path.name] = Figure(figsize=size)
        yield painted[path.name]

    monkeypatch.setattr(views, "saved_figure", figure)
    return painted


def drawn(
    view: str, rows: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[Scores, Experiment, dict[str, Figure]]:
    """The records, and the figures that a view paints of them."""
    painted = painted_by(monkeypatch)
    experiment = replace(
        Experiment("A title", {}, {row: Row(DEFENSES["BL"]) for row in rows}), **settings
    )
    folder = folder_of(experiment, rows, 3, {})
    assert list(views.VIEWS[view](experiment, Scores(folder), folder))
    return Scores(folder), experiment, painted


def test_a_front_has_each_defense_where_its_errors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ("BL", "constant", "posterior, eps 1", "posterior, eps 2", "point, eps 2")
    scores, experiment, figures = drawn(
        *("front", rows, monkeypatch),
        metrics=("rmse",),
        attacks=("strong",),
        radii=(0.5, 1.0),
        splits=("validation", "test"),
    )
    (figure,) = figures.values()
    assert list(figures) == ["front"]
    assert tuple(figure.get_size_inches()) == (6, 3.2)
    assert [axes.get_title() for axes in figure.axes] == ["eps 0.5", "eps 1"]
    assert figure.axes[0].get_ylabel() == "attacked RMSE"
    assert figure.axes[1].get_legend() is not None
    for axes, eps in zip(figure.axes, experiment.radii, strict=True):
        assert axes.get_xlabel() == "clean RMSE"
        found = {
            str(dots.get_label()): np.asarray(dots.get_offsets()).tolist()
            for dots in axes.collections
        }
        wanted: dict[str, list[list[float]]] = {}
        for row in rows:
            start = row.split(",")[0]
            wanted.setdefault(start, []).append(
                [
                    scores.mean("rmse", row, Cell("test", "clean", 0.0)),
                    scores.mean("rmse", row, Cell("test", "strong", eps)),
                ]
            )
        assert found == wanted
        marks = {
            str(dots.get_label()): dots.get_paths()[0].vertices.tolist()
            for dots in axes.collections
        }
        assert marks["posterior"] != marks["point"]
        assert marks["BL"] == marks["constant"]
        assert marks["BL"] not in (marks["posterior"], marks["point"])


def test_curves_go_through_the_means_in_bands_of_the_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores, _, figures = drawn(
        *("curves", ("BL", "MIX"), monkeypatch),
        attacks=("PGD", "PGD+"),
        radii=(1.0, 2.0),
        metrics=("accuracy", "nll"),
    )
    assert list(figures) == ["pgd", "pgd-plus"]
    for attack, figure in zip(("PGD", "PGD+"), figures.values(), strict=True):
        assert tuple(figure.get_size_inches()) == (9, 3.4)
        assert figure.axes[0].get_legend() is not None
        for axes, metric in zip(figure.axes, ("accuracy", "nll"), strict=True):
            assert axes.get_xlabel() == "eps (L2)"
            assert axes.get_ylabel().lower() == metric
            for line, band, row in zip(axes.lines, axes.collections, ("BL", "MIX"), strict=True):
                cells = [Cell("test", "clean", 0.0)]
                cells += [Cell("test", attack, eps) for eps in (1.0, 2.0)]
                each = [scores.summary(metric, row, cell) for cell in cells]
                assert line.get_label() == row
                assert list(line.get_xdata()) == [0.0, 1.0, 2.0]
                assert list(line.get_ydata()) == [one.mean for one in each]
                edges = band.get_paths()[0].vertices
                for x, one in zip((0.0, 1.0, 2.0), each, strict=True):
                    heights = [float(y) for at, y in edges if at == x]
                    wanted = (one.mean - one.sd, one.mean + one.sd)
                    assert (min(heights), max(heights)) == pytest.approx(wanted)


def test_pictures_stand_above_what_was_predicted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pixels = {0: bytes(range(9)), 1: bytes(range(100, 109))}
    records = [
        {
            "row": row,
            "seed": seed,
            "attack": attack,
            "index": index,
            "y": index,
            "pixels": pixels[index].hex(),
            "probs": [0.1 * (1 + index), 0.2, 0.7 - 0.1 * index],
        }
        for row in ("A", "B")
        for seed in (4, 5)
        for attack in ("clean", "PGD")
        for index in (0, 1)
    ]
    (tmp_path / RECORDS).write_bytes(packed(records))
    write_document(tmp_path / MANIFEST, {"units": {}, "seeds": [4, 5]})
    figures = painted_by(monkeypatch)
    text = list(views.pictures(EXPERIMENTS["mnist"], Scores(tmp_path), tmp_path))
    assert text == ["## A\n\n![A](a.svg)", "## B\n\n![B](b.svg)", "Green: the true class."]
    assert list(figures) == ["a", "b"]
    for figure in figures.values():
        assert tuple(figure.get_size_inches()) == (2.2, 3.2)
        grid = np.array(figure.axes).reshape(4, 2)
        for top, attack in ((0, "clean"), (2, "PGD")):
            for index in (0, 1):
                image, bars = grid[top, index], grid[top + 1, index]
                shown = np.frombuffer(pixels[index], np.uint8).reshape(3, 3)
                assert np.array_equal(image.images[0].get_array(), shown)
                assert image.images[0].get_clim() == (0, 255)
                heights = [bar.get_height() for bar in bars.patches]
                assert heights == records[index]["probs"]
                colours = [bar.get_facecolor() for bar in bars.patches]
                assert [colours.count(each) for each in colours] == [
                    1 if k == index else 2 for k in range(3)
                ]
                assert bars.get_ylim() == (0, 1)
                assert image.get_ylabel() == ("" if index else attack)
                assert not len(image.get_xticks())
                assert not len(bars.get_yticks())


def test_a_figure_is_the_same_bytes_of_both_kinds(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with views.saved_figure(tmp_path / name, (3, 2)) as figure:
            figure.subplots().plot([1, 2])
    for kind, start in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        one, two = (tmp_path / f"{name}.{kind}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
        assert one.read_bytes().startswith(start)
    width = int.from_bytes((tmp_path / "one.png").read_bytes()[16:20], "big")
    assert width == 3 * 150


def test_rows_below_level_b_carry_their_failed_checks(tmp_path: Path) -> None:
    folder = tmp_path / "wine"
    assert views._levels(folder) == {}
    beside = tmp_path / "wine-audit"
    beside.mkdir()
    statuses = {"E1": "failed", "E2": "passed", "E3": "failed", "E4": "not run"}
    records = [
        {"row": row, "seed": 0, "check": check, "status": status, "mandatory": True}
        for row in ("A", "B", "C")
        for check, status in statuses.items()
    ]
    (beside / RECORDS).write_bytes(packed(records))
    units = {
        f"{row} / seed 0": {"row": row, "seed": 0, "level": level}
        for row, level in (("A", "A"), ("B", "B"), ("C", "C"))
    }
    write_document(beside / MANIFEST, {"units": units, "seeds": [0]})
    assert views._levels(folder) == {"A": "A", "B": "B", "C": "C† E1, E3"}


# --- terminals -----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def board(**options: Any) -> Board:
    left = [("BL", 0), ("BL", 1), ("MIX", 0), ("MIX", 1)]
    return Board("wine", 6, left, **options)


def test_units_of_an_experiment_are_told_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = board()
    shown.begin("BL", 0)
    shown.begin("BL", 1)
    shown.done("BL", 1, 12.4)
    out, error = capsys.readouterr()
    assert out == ""
    assert error.split(" ", 1)[1] == "wine: BL, seed 1: 12 s; 3 of 6 left\n"
    silent = board(quiet=True)
    silent.begin("BL", 0)
    silent.done("BL", 0, 12.4)
    assert capsys.readouterr() == ("", "")


def test_units_of_an_experiment_are_a_table_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    times = iter((100.0, 110.0, 125.0, 125.0, 125.0, 125.0))
    monkeypatch.setattr("advbayes.experiments.running.time.monotonic", lambda: next(times, 130.0))
    shown = board()
    shown.begin("BL", 0)
    assert shown.live is not None
    assert shown.live.is_started
    shown.live.stop()
    shown.begin("BL", 1)
    table = shown._table()
    assert str(table.title) == "wine: 2 of 6 waiting"
    shown.done("BL", 0, 120.0)
    table = shown._table()
    assert str(table.title) == "wine: 2 of 6 waiting, about 4 min"
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    assert cells[:2] == [["BL"], ["1"]]
    shown.begin("MIX", 0)
    shown.live.start()
    shown.done("BL", 1, 60.0)
    shown.done("MIX", 0, 60.0)
    assert shown.live.is_started  # one is left
    shown.begin("MIX", 1)
    shown.done("MIX", 1, 60.0)
    shown.close()
    assert not shown.live.is_started
    assert "left" not in screen.getvalue()
    assert capsys.readouterr().out == ""


def test_downloads_are_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for screen, quiet, wanted in (
        (Terminal(), False, True),
        (Terminal(), True, False),
        (io.StringIO(), False, False),
    ):
        monkeypatch.setattr(sys, "stderr", screen)
        with downloads(quiet=quiet) as tell:
            tell("a.gz", 10_000, 100_000)
            tell("b.gz", 30_000, 50_000)
            tell("a.gz", 100_000, 100_000)
        assert ("a.gz" in screen.getvalue()) is wanted
        assert ("100.0/100.0 kB" in screen.getvalue()) is wanted
        assert ("30.0/50.0 kB" in screen.getvalue()) is wanted


def test_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS)
    for line, experiment in zip(lines, EXPERIMENTS.values(), strict=True):
        assert line.split()[1:3] == [str(len(experiment.rows)), "rows"]
        assert line.endswith(f"  {experiment.title}")


# --- records of functions ------------------------------------------------------------------------


def held(value: object) -> dict[str, Any]:
    """What a record holds of a function that closes over the value."""

    def loss(prediction: Distribution, y: Tensor) -> Any:
        return (prediction, y, value)

    return {
        name: found
        for name, found in contents_of(loss, lambda predict: [0.0]).items()
        if name.startswith("closure")
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        ("a", "b"),
        (None, 0),
        (torch.float32, torch.float64),
        (torch.device("cpu"), torch.device("meta")),
        (range(3), range(4)),
        (torch.Size([1, 2]), torch.Size([2, 1])),
        (np.arange(3), np.arange(1, 4)),
        (torch.arange(3), torch.arange(1, 4)),
        ({1, 2}, {1, 3}),
        (frozenset("ab"), frozenset("ac")),
        ([1, [2]], [1, [3]]),
        ({"a": 1}, {"a": 2}),
        (int, float),
        (functools.partial(int, base=2), functools.partial(int, base=3)),
        (SimpleNamespace(a=1), SimpleNamespace(a=2)),
    ],
)
def test_what_a_function_closes_over_is_in_its_record(one: object, other: object) -> None:
    assert held(one)
    assert held(one) == held(one)
    assert held(one) != held(other)


def test_sets_are_kept_in_an_order_of_their_own() -> None:
    words = [f"word {k}" for k in range(20)]
    assert list(held(set(words)).values()) == sorted(map(repr, words))


def test_a_stream_and_a_module_are_no_values() -> None:
    assert list(held(np)) == []
    (found,) = held(torch.Generator()).values()
    assert found.startswith("unknown")


# --- edges ---------------------------------------------------------------------------------------


def test_predictors_beside_others_carry_the_name_of_their_run() -> None:
    evaluation = evaluated("classification")
    old = evaluation.predictors[0]
    renamed = _renamed(evaluation, old, "another")
    assert renamed.trivial == evaluation.trivial
    assert renamed.predictors == ("another", *evaluation.predictors[1:])
    for cell, columns in evaluation.cells.items():
        name = "another" if cell.predictor == old else cell.predictor
        assert renamed.cells[replace(cell, predictor=name)] is columns


def test_numbers_without_end_are_signs() -> None:
    assert number(float("inf")) == "∞"
    assert number(float("-inf")) == "−∞"
    assert number(1000.0) == "1,000"
    assert number(999.9) == "999.900"


@pytest.mark.parametrize(("side", "convolutional"), [(3, False), (4, True)])
def test_images_of_four_pixels_a_side_get_convolutions(
    tmp_path: Path, side: int, convolutional: bool
) -> None:
    x = np.random.default_rng(0).random((20, 1, side, side), np.float32)
    y = np.arange(20) % 2
    np.savez(tmp_path / "t.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    config = make_config({"data": str(tmp_path / "t.npz"), "task": "classification"})
    net = build_net(config, prepare(config))
    assert any(isinstance(m, torch.nn.Conv2d) for m in net.modules()) is convolutional


def test_convolutions_want_squares(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((20, 1, 4, 5), np.float32)
    y = np.arange(20) % 2
    np.savez(tmp_path / "t.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    given = {"data": str(tmp_path / "t.npz"), "task": "classification", "network": "conv"}
    config = make_config(given)
    with pytest.raises(ConfigError, match=r"auto or mlp for inputs of shape \(1, 4, 5\)"):
        build_net(config, prepare(config))


@pytest.mark.parametrize("kind", [L2, Linf])
def test_a_box_of_anything_that_holds_numbers_is_the_same_box(kind: Any) -> None:
    plain = kind(1.0, box=(0, 1))
    for low, high in ((0, 1), (0.0, 1.0), (np.float32(0), np.float64(1))):
        assert kind(1.0, box=[low, high]) == plain
        assert isinstance(kind(1.0, box=[low, high]).box, tuple)
    arrays = kind(1.0, box=(np.zeros(2), np.ones(2))).box
    assert all(isinstance(side, Tensor) for side in arrays)
    with pytest.raises(TypeError, match="box must hold numbers or tensors, got 'a'"):
        kind(1.0, box=("a", 1))


def test_a_class_is_no_attack() -> None:
    class Made:
        def __init__(self, predict: Any, x: Any, y: Any, *, generator: Any = None) -> None: ...

    assert not is_attack(Made)
    assert not is_attack(PGD)


def test_a_mean_is_that_of_its_output() -> None:
    prediction = Normal(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 1.0)
    for output in (0, 1):
        found = MeanOf(output)(prediction, torch.zeros(2, 2))
        assert found.tolist() == prediction.mean[:, output].tolist()


# --- tables and sentences ------------------------------------------------------------------------


def test_columns_of_numbers_stand_right_on_a_terminal() -> None:
    grid = Grid(("name", "value"), [("a", 1), ("b", 22)], "A title", right=(1,))
    table = grid.rich()
    assert [column.justify for column in table.columns] == ["left", "right"]
    assert [str(column.header) for column in table.columns] == ["name", "value"]
    assert [[str(cell) for cell in column.cells] for column in table.columns] == [
        ["a", "b"],
        ["1", "22"],
    ]
    assert str(table.title) == "A title"
    assert table.title_justify == "left"
    assert Grid(("name",), [("a",)]).rich().title is None


@pytest.mark.parametrize("num", [12, 13])
def test_of_many_classes_the_likeliest_seven_and_the_true_one_have_bars(num: int) -> None:
    shares = [(k + 1) / 100 for k in range(num)]
    view = {"probabilities": shares, "truth_class": 1, "class": num - 1}
    found = bars(view, [f"class {k}" for k in range(num)])["bars"]
    wanted = list(range(num)) if num <= 12 else [1, *range(num - 7, num)]
    assert [bar["height"] for bar in found] == pytest.approx([40 * shares[k] for k in wanted])
    assert [bar["kind"] for bar in found].count("truth") == 1
    assert found[-1]["kind"] == "said"
    assert found[wanted.index(1)]["kind"] == "truth"


def test_lists_are_joined_as_in_a_sentence() -> None:
    assert [listed(names) for names in ([], ["a"], ["a", "b"])] == ["", "a", "a and b"]


def test_who_was_not_attacked_is_said_so_and_the_others_follow() -> None:
    score = {"value": 0.5, "low": 0.4, "high": 0.6}
    rows = [
        {"predictor": "A", "trivial": False, "clean": score, "worst": None, "believed": True},
        {"predictor": "B", "trivial": True, "clean": score, "worst": score, "believed": True},
        {"predictor": "C", "trivial": False, "clean": score, "worst": None, "believed": True},
    ]
    document: Any = {"metric": "accuracy", "summary": rows, "eps": 2.0}
    document |= {"threat_model": {"norm": "L2"}, "task": "classification"}
    assert list(headline(document)) == [
        f"{name} answers 50.0 % of untouched inputs correctly; it was not attacked at ε = 2 (L2). "
        "It is no better than B, which never looks at the input (50.0 %)."
        for name in ("A", "C")
    ]


def test_the_demos_attacked_pictures_stay_within_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, Any] = {}
    monkeypatch.setattr(
        demo, "make_gallery", lambda predictors, x, y, attacked, eps: shown.update(attacked["PGD"])
    )
    data = prepare(make_config({"data": "digits"}))
    model = BayesianModel(build_net(make_config({"data": "digits"}), data), Categorical())
    demo._gallery({"a": model.at(model.initial_theta())}, data, 3, 0)
    low, high = shown["a"].aminmax()
    assert (float(low), float(high)) == data.box == (0.0, 1.0)

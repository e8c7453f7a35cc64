"""What somebody meets who walks through the commands for the first time: one name for one thing, an
interrupted evaluation that says how it goes on, a test set of one row, errors in the words of the
command line."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from advbayes.cli import main
from advbayes.cli.experiments import command
from advbayes.datasets import DataError, from_csv, load_dataset
from advbayes.evaluation.tables import Column


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("walk")
    rows = [f"{i % 7},{i % 5},{'NO'[i % 2]},{'ill' if i % 7 > 3 else 'well'}" for i in range(60)]
    place.joinpath("table.csv").write_text("\n".join(["a,b,city,outcome", *rows, ""]))
    argv = ["train", "--data", str(place / "table.csv"), "--target", "outcome"]
    argv += ["--epochs", "2", "--quiet", "--out", str(place / "run")]
    assert main(argv) == 0
    return place / "run"


SHORT = ["--attack", "pgd", "--steps", "2", "--thetas", "2", "--quiet"]


def test_a_test_set_of_one_row_has_no_interval(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["evaluate", str(run), *SHORT, "--num", "1"]) == 0
    said = capsys.readouterr().out
    assert "1 test example, with" in said
    assert "[no interval]" in said
    assert "inf" not in said
    assert main(["certify", str(run), "--num", "1", "--draws", "20"]) == 0
    said = capsys.readouterr().out
    assert "1 example, " in said
    assert said.startswith("sigma = 0.25 standardised")
    assert main(["attack", str(run), "--num", "1", "--out", str(run / "one.npz")]) == 0
    assert "1 example: accuracy" in capsys.readouterr().out


def test_only_a_known_value_is_said_to_lack_an_interval() -> None:
    column = Column("RMSE", 2.0)
    for low, high in ((0.0, math.inf), (None, 1.0), (-math.inf, math.inf)):
        assert column.cell(0.5, low, high) == "1.000 [no interval]"
    assert column.cell(None, 0.0, None) == "not finite [0.000, not finite]"
    assert column.cell(0.5, 0.5, 0.5) == "1.000 [1.000, 1.000]"


@pytest.mark.parametrize("flag", ["--num", "--num-test"])
def test_the_number_of_test_examples_has_one_name_and_an_alias(
    run: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), *SHORT, flag, "3"]) == 0
    assert "3 test examples" in capsys.readouterr().out


def test_purified_records_are_named_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), *SHORT, "--num", "4", "--purify", "online"]) == 0
    first, second = capsys.readouterr().out.split("Records and arrays: ")[1].split(" and ")
    assert (Path(first) / "records.jsonl").exists()
    assert (Path(second.strip()) / "records.jsonl").exists()
    assert second.strip() == f"{first}-purified-online"


def test_a_stopped_evaluation_says_how_it_goes_on_and_does(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from advbayes.evaluation import run as module

    argv = ["evaluate", str(run), *SHORT, "--num", "8", "--batch-size", "2", "--name", "stopped"]
    real, calls = module.Progress.advance, []

    def stop(self: Any, *given: Any, **options: Any) -> None:
        real(self, *given, **options)
        calls.append(self.done)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(module.Progress, "advance", stop)
        assert main(argv) == 143
    said = capsys.readouterr().err
    assert said == (
        "advbayes: stopped; the same command goes on from the first batch that is missing\n"
    )
    monkeypatch.setattr(module.Progress, "advance", stop)
    assert main(argv) == 0
    assert calls == list(range(1, len(calls) + 1))  # where it stopped, not from the start
    assert len(calls) > 2
    assert "8 test examples" in capsys.readouterr().out


def test_a_report_knows_what_the_attacker_cannot_change(run: Path) -> None:
    """Two numbers of four columns: text is out of reach, and eps is not spread over it."""
    import json

    assert main(["evaluate", str(run), *SHORT, "--num", "6", "--eps", "0.3"]) == 0
    assert main(["evaluate", str(run), *SHORT, "--num", "1", "--eps", "0.3"]) == 0
    assert main(["report", str(run)]) == 0
    page = (run / "report" / "report.html").read_text()
    assert "city=N and city=O" in page
    assert "over the 2 that may change, ε = 0.3 moves each of them by 0.2121" in page
    assert "(1 example)" in page
    document = json.loads((run / "report" / "report.json").read_text())
    assert document["threat_model"]["fixed"] == ["city=N", "city=O"]
    from advbayes.report.telling import reach

    reached = reach(document)
    assert reached is not None
    assert [row["name"] for row in reached["rows"]] == ["a", "b"]


def test_errors_of_data_are_in_the_words_of_the_command_line(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("a,y\n1,b\n2,b\n3,b\n")
    with pytest.raises(DataError, match=r"2 to \d+ classes, got 1\. Check the target column"):
        from_csv(table, "y")
    table.write_text("a,y\n1,7 kg\n2,8 kg\n3,9 kg\n")
    with pytest.raises(DataError, match="or say that they are classes"):
        from_csv(table, "y")
    table.write_text("1,2\n3,4\n")
    with pytest.raises(DataError, match="Add a line of names at the top"):
        from_csv(table, "y")
    with pytest.raises(DataError, match="advbayes datasets --fetch wine"):
        load_dataset("wine", tmp_path, download=False)


def test_no_move_of_the_playground_waits_for_a_garbage_collection() -> None:
    assert "--runner.postScriptGC=false" in command(9000, browser=False)

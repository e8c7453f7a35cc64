"""`advbayes compare` on a table of one's own: stopped, on a full disk, asked again with other
settings; and a report that is stopped."""

from __future__ import annotations

import copy
import errno
import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from advbayes import store
from advbayes.cli import main
from advbayes.cli.train import PANELS
from advbayes.datasets.errors import DataError
from advbayes.estimators import RobustClassifier
from advbayes.experiments import running, units
from advbayes.runs.config import ConfigError, RunConfig, make_config
from tests import forking
from tests.test_missing_values import table

RECORDS = "compare-t/records.jsonl.gz"


def asked(csv_file: Path, out: Path, *more: str) -> list[str]:
    given = ["--data", str(csv_file), "--target", "outcome", "--out", str(out), "--quiet"]
    sketch = ["--defense", "none", "--seeds", "1", "--num", "4", "--set", "epochs=1"]
    return ["compare", *given, *sketch, *more]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A table and its comparison, undisturbed."""
    folder = tmp_path_factory.mktemp("compared")
    csv_file = table(folder / "t.csv")
    assert main(asked(csv_file, folder / "out")) == 0
    return csv_file, folder / "out"


def test_a_comparison_names_its_rows_as_asked_and_says_what_they_are(
    compared: tuple[Path, Path],
) -> None:
    text = (compared[1] / "compare-t/table.md").read_text()
    assert "# none: L2, eps 0.3" in text
    assert "| none | 1 |" in text
    assert "BL" not in text
    assert "Rows: none: undefended mean-field posterior, clean data; uniform: every" in text
    assert "[95 % interval, of an accuracy over examples, of the others over seeds]" in text


def test_a_comparison_of_numbers_says_that_the_target_is_standardised(tmp_path: Path) -> None:
    csv_file = tmp_path / "t.csv"
    lines = [f"{row % 7},{row * 1000}" for row in range(20)]
    csv_file.write_text("\n".join(["a,price", *lines]))
    argv = ["compare", "--data", str(csv_file), "--target", "price", "--defense", "none"]
    argv += ["--seeds", "1", "--set", "epochs=1", "--out", str(tmp_path / "out"), "--quiet"]
    assert main(argv) == 0
    text = (tmp_path / "out/compare-t/table.md").read_text()
    assert "RMSE and NLL are those of the standardised target." in text


def test_a_comparison_refuses_code_of_ones_own_before_it_trains(
    compared: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for change in ("channel=mine:gain", "network=mine:net"):
        assert main(asked(compared[0], tmp_path / "out", "--set", change)) == 2
        said = capsys.readouterr().err
        assert "--set must name no code of your own" in said
        assert change in said
    assert not (tmp_path / "out").exists()


def test_ctrl_c_says_how_to_go_on_and_loses_nothing(
    compared: tuple[Path, Path], tmp_path: Path
) -> None:
    csv_file, whole = compared
    argv = asked(csv_file, tmp_path)
    script = (
        "import os, signal, sys\n"
        "from advbayes.experiments import running\n"
        "kept, done = running.work, []\n"
        "def work(*given):\n"
        "    if done:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    done.append(kept(*given))\n"
        "    return done[-1]\n"
        "running.work = work\n"
        "from advbayes.cli import main\n"
        f"sys.argv = ['advbayes', *{argv!r}]\n"
        "sys.exit(main())\n"
    )
    done = forking.ran(script)
    assert (done.returncode, done.stdout) == (130, "")
    line = "stopped; the same command goes on with the units that are missing"
    assert done.stderr.strip() == f"advbayes: {line}"
    folder = tmp_path / "compare-t"
    assert not (folder / ".lock").exists()
    assert len(running.finished(folder)) == 1
    assert main(argv) == 0
    assert (tmp_path / RECORDS).read_bytes() == (whole / RECORDS).read_bytes()


def test_a_full_disk_ends_at_once_and_loses_nothing(
    compared: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    csv_file, whole = compared
    argv = asked(csv_file, tmp_path)
    kept, calls, real = running.work, list[str](), os.write

    def work(*given: Any) -> float:
        calls.append(given[2])
        return kept(*given)

    def write(descriptor: int, data: Any) -> int:
        if len(calls) > 1 and descriptor > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(running, "work", work)
        patch.setattr(os, "write", write)
        assert main(argv) == 2
    said = capsys.readouterr().err
    assert "bytes of disk" in said
    assert "bytes free; what was saved before is intact" in said
    assert "Traceback" not in said
    assert len(calls) == 2  # no second try
    assert len(running.finished(tmp_path / "compare-t")) == 1
    assert main(argv) == 0
    assert (tmp_path / RECORDS).read_bytes() == (whole / RECORDS).read_bytes()


def test_other_settings_are_another_comparison(
    compared: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finished units are not repeated; so they must be those that are asked for."""
    csv_file, whole = compared
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for more, said in (
        (("--eps", "0.7"), "compare-t holds a comparison with eps 0.3; asked for eps 0.7"),
        (("--set", "drop=sex"), "asked for drop ['sex']"),
        (("--num", "5"), "num_test 4; asked for num_test 5"),
    ):
        capsys.readouterr()
        assert main(asked(csv_file, out, *more)) == 2
        assert said in capsys.readouterr().err
    assert (out / RECORDS).read_bytes() == (whole / RECORDS).read_bytes()
    capsys.readouterr()
    assert main(asked(csv_file, out)) == 0  # the same again: nothing to do
    # of two classes, not of the paper's ten
    assert "Above ln 2 = 0.693 an NLL is worse than the uniform" in capsys.readouterr().out
    before = csv_file.read_text()
    csv_file.write_text(before.replace("ill", "sick"))
    try:
        assert main(asked(csv_file, out)) == 2
        assert "content {'t.csv'" in capsys.readouterr().err
    finally:
        csv_file.write_text(before)


def test_a_comparison_of_an_earlier_version_goes_on(
    compared: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its records do not name the keys that were added since."""
    csv_file, whole = compared
    shutil.copytree(whole, tmp_path / "out")
    for part in (tmp_path / "out/compare-t/parts").glob("*.json"):
        about = json.loads(part.read_text())
        del about["config"]["text"]
        store.write_document(part, about)
    assert main(asked(csv_file, tmp_path / "out")) == 0


def test_every_key_of_the_data_reaches_a_comparison() -> None:
    """One that did not would be ignored in silence. The rows trained on are cut off afterwards."""
    keys = {*PANELS["Data"].split(), "seed"} - {"num_train"}
    assert keys == units._OF_DATA


def test_errors_come_back_from_a_worker_as_they_were() -> None:
    errors = (
        store.DiskFullError("a", needed=2000, free=30),
        store.MissingError("a", "a bundle"),
        store.StoreError("a", "b", "c"),
        store.LockedError("a", pid=3, host="h"),
        DataError("a.csv", "a number", "x", "Fix it."),
        ConfigError("eps: must be > 0"),
    )
    for error in errors:
        again = copy.copy(error)  # by __reduce__, as from another process
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_a_report_that_is_stopped_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    csv_file = table(tmp_path / "t.csv")
    flags = ["--data", str(csv_file), "--target", "outcome", "--epochs", "1", "--quiet"]
    assert main(["train", *flags, "--out", str(run)]) == 0
    assert main(["evaluate", str(run), "--attack", "pgd1", "--num", "4", "--quiet"]) == 0
    script = (
        "import os, signal, sys\n"
        "from advbayes.report import rendering\n"
        "kept = rendering.markdown\n"
        "def markdown(*given, **settings):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return kept(*given, **settings)\n"
        "rendering.markdown = markdown\n"
        "from advbayes.cli import main\n"
        f"sys.argv = ['advbayes', 'report', {str(run)!r}]\n"
        "sys.exit(main())\n"
    )
    done = forking.ran(script)
    assert (done.returncode, done.stdout) == (130, "")
    line = "stopped before the report was complete; the same command writes it"
    assert done.stderr.strip() == f"advbayes: {line}"
    assert not list((run / "report").glob("*.tmp*"))
    assert main(["report", str(run)]) == 0
    assert (run / "report" / "report.html").is_file()


def test_training_and_evaluation_name_the_comparison_that_prices_the_defense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the command that they name runs as printed."""
    csv_file = tmp_path / "my t.csv"
    csv_file.write_text(
        "\n".join(["a,b,id, c,y", *(f"{n % 7},{n % 3},{n},1,{n % 5}" for n in range(40))])
    )
    flags = ["--data", str(csv_file), "--target", "y", "--drop", "id,c", "--epochs", "1", "--quiet"]
    run = ["--out", str(tmp_path / "run")]
    assert main(["train", *flags, "--fixed", "b", "--eps", "0.2", *run]) == 0
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "against no def" in line)
    assert main(["evaluate", run[1], "--attack", "pgd1", "--num", "4", "--quiet"]) == 0
    assert said in capsys.readouterr().out
    words = shlex.split(said.partition(": advbayes ")[2])
    assert {"drop=id,c", "fixed=b", "epochs=1.0", "0.2", "none", "mix"} <= set(words)
    more = ["--seeds", "1", "--num", "4", "--out", str(tmp_path / "out"), "--quiet"]
    assert main([*words, *more]) == 0
    assert "| mix |" in capsys.readouterr().out.lower()
    assert main(["train", *flags, "--defense", "none", "--out", str(tmp_path / "none")]) == 0
    assert "against no defense" not in capsys.readouterr().out


def test_a_comparison_says_what_is_odd_about_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv_file = tmp_path / "t.csv"
    csv_file.write_text("\n".join(["id,a,y", *(f"{n},{n % 7},{n % 5}" for n in range(40))]))
    argv = ["compare", "--data", str(csv_file), "--target", "y", "--defense", "none", "--quiet"]
    argv += ["--seeds", "1", "--num", "4", "--set", "epochs=1", "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    assert "'id' only numbers the rows" in capsys.readouterr().err


@pytest.mark.parametrize("seeds", ["0", "-1", "3,-4"])
def test_a_comparison_over_no_seed_is_refused(
    seeds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["compare", "--data", "diabetes", "--defense", "none", "--seeds", seeds]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 2
    assert "seeds must be how many (1 or more)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_commands_and_estimators_state_the_price_of_a_defense_in_the_same_words() -> None:
    words = "A defense costs clean error: `advbayes compare` shows how much, and what it gains"
    pages = (Path(__file__).parents[1] / "docs").joinpath
    places = [RunConfig.model_fields["defense"].description, RobustClassifier.__doc__]
    places += [pages(f"{page}.md").read_text() for page in ("command-line", "estimators")]
    for text in places:
        assert words in " ".join(str(text).split())


def test_a_key_that_is_not_set_leaves_the_names_of_kept_models_as_they_are() -> None:
    """Experiments know a model by its configuration's repr: keys added later must not be in it."""
    assert "text" not in repr(make_config({"data": "wine"}))

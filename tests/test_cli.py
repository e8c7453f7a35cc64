"""The command line: every command on a small run, exit codes, messages, JSON, help that tells the
truth, a quick start."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import advbayes
from advbayes.auditing.case import TIERS
from advbayes.cli import main
from advbayes.cli.app import app, is_mistake
from advbayes.cli.train import PANELS
from advbayes.evaluation import load_evaluation
from advbayes.runs.config import ATTACKS, RunConfig
from tests import killing

COMMANDS = (
    "demo",
    "train",
    "predict",
    "attack",
    "evaluate",
    "audit",
    "certify",
    "report",
    "datasets",
    "show",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Classification: digits, a small net, noise."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    settings = killing.SMALL | {"defense": "os", "eps": "0.5", "sigma": "0.2"}
    assert main(["train", *killing.flags(settings), "--out", str(folder), "--quiet"]) == 0
    return str(folder)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a user's own: two features in very different units, a text column, a target."""
    draw = np.random.default_rng(0)
    size, weight = draw.normal(100, 20, 120), draw.normal(0, 0.01, 120)
    price = 3 * (size - 100) / 20 + weight / 0.01 + draw.normal(0, 0.1, 120) + 50
    rows = [f"{s:.4f},{w:.6f},{p:.4f}" for s, w, p in zip(size, weight, price, strict=True)]
    path = tmp_path_factory.mktemp("table") / "houses.csv"
    path.write_text("size,weight,price\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def regression(table: Path) -> str:
    """A run on it."""
    argv = [
        "train",
        "--data",
        str(table),
        "--target",
        "price",
        "--defense",
        "at",
        "--eps",
        "0.3",
        "--epochs",
        "40",
        "--lr",
        "0.02",
    ]
    assert main([*argv, "--out", str(table.parent / "run"), "--quiet"]) == 0
    return str(table.parent / "run")


def told(capsys: pytest.CaptureFixture[str], argv: list[str], code: int = 0) -> dict[str, Any]:
    """The JSON that a command prints, and nothing else beside it."""
    assert main([*argv, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], argv: list[str], *words: str) -> None:
    """Exit code 2, one clean message on standard error, nothing on standard output."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("advbayes: ")
    assert "Traceback" not in err
    for word in words:
        assert word in err, err


def spend_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a quick audit finds is not the question here: every check it makes, in few steps."""
    quick = replace(TIERS["quick"], steps=3, random_points=3)
    monkeypatch.setitem(TIERS, "quick", quick)


# --- Starting -----------------------------------------------------------------------------------


def test_help_loads_little() -> None:
    """What keeps `advbayes --help` below half a second, whatever else the machine does."""
    script = (
        "import sys\n"
        "from advbayes.cli import main\n"
        "code = main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'scipy', 'matplotlib', 'pandas', 'streamlit'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "print(len(sys.modules), file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stderr) < 600
    for command in COMMANDS:
        assert command in done.stdout


def test_the_package_loads_little_beyond_torch() -> None:
    """What keeps the import of all names below 0.3 s beyond torch's own (0.11 s where bytecode is
    cached, twice that with collections of garbage on the way), whatever else the machine does."""
    script = (
        "import sys, numpy, torch\n"
        "before = set(sys.modules)\n"
        "import advbayes, gc\n"
        "collections = lambda: sum(each['collections'] for each in gc.get_stats()[1:])\n"
        "was = collections()\n"
        "for name in advbayes.__all__: getattr(advbayes, name)\n"
        "assert gc.isenabled() and collections() == was, 'collected garbage on the way'\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = done.stdout.split()
    packages = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert packages <= {"advbayes", "filelock", "numpy", "safetensors"}
    assert len(loaded) < 200


def test_a_mistake_is_refused_without_loading_torch() -> None:
    script = (
        "import sys\n"
        "from advbayes.cli import main\n"
        "assert main(['train', '--lr', '-1']) == 2 and main(['evaluate', 'x', '--attack', 'pdg']) "
        "== 2\n"
        "assert main(['train', '--data', 'nowhere.npz']) == 2 and main(['audit', 'x', '--tier', "
        "'fast']) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("advbayes: ") == 4


def test_python_dash_m_and_the_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "advbayes", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert re.fullmatch(r"advbayes \d+\.\d+\.\d+\n", done.stdout)


def test_shell_completion_knows_commands_and_choices() -> None:
    script = "import sys\nfrom advbayes.cli import main\nsys.exit(main())\n"
    for line, wanted in (
        ("advbayes ev", "evaluate"),
        ("advbayes train --defense o", "os50"),
        ("advbayes attack r --attack pg", "pgd_plus"),
    ):
        words = line.split()
        environment = {
            "_ADVBAYES_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
            "PATH": "/bin",
        }
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=environment,
        )
        assert wanted in done.stdout, (line, done)


# --- Help ---------------------------------------------------------------------------------------


def parser_of(command: str) -> Any:
    import typer

    return typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_would_be_understood(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    examples = re.findall(rf"^ +(?:\w+=\S+ )?advbayes ({command}\b.*?) *$", text, re.MULTILINE)
    assert len(examples) >= 2, text
    for example in examples:
        # fails on an unknown flag
        parsed = parser_of(command).make_context(command, shlex.split(example)[1:])
        assert parsed.params


def test_every_key_is_a_flag_in_one_panel(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [key for panel in PANELS.values() for key in panel.split()]
    assert sorted(keys) == sorted(RunConfig.model_fields)
    named = {parameter.name for parameter in parser_of("train").params}
    assert set(RunConfig.model_fields) <= named


def test_every_default_is_shown_those_that_are_zero_or_false_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    defaults = {key: field.default for key, field in RunConfig.model_fields.items()}
    wanted = {
        key: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for key, value in defaults.items()
        if value is not None and value != ()
    }
    assert {"seed", "compile", "own_thetas", "hidden"} <= wanted.keys()
    params = {each.name: each for each in parser_of("train").params}
    assert {key: params[key].show_default for key in defaults} == {
        key: wanted.get(key, False) for key in defaults
    }
    assert main(["train", "--help"]) == 0
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert f"{RunConfig.model_fields['seed'].description} [default: (0)]" in text


# --- Training -----------------------------------------------------------------------------------


def test_flags_override_the_file_and_all_is_written_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        'data = "digits"\nnetwork = "mlp"\nhidden = [4, 4]\nnum_train = 64\nepochs = 50\nseed = 7\n'
    )
    found = told(
        capsys,
        [
            "train",
            "--config",
            str(file),
            "--epochs",
            "1",
            "--compile",
            "--no-compile",
            "--out",
            str(tmp_path / "run"),
        ],
    )
    assert (
        found["config"] | {"epochs": 1.0, "seed": 7, "hidden": [4, 4], "lr": None, "compile": False}
        == found["config"]
    )
    again = told(
        capsys,
        [
            "train",
            "--config",
            str(tmp_path / "run" / "config.toml"),
            "--out",
            str(tmp_path / "again"),
        ],
    )
    assert again["weights"] == found["weights"]
    assert again["metrics"] == found["metrics"]


def test_runs_without_a_name_get_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["train", *killing.flags(killing.SMALL | {"epochs": "0.1"})]
    assert [told(capsys, argv)["run"] for _ in range(2)] == ["runs/digits-mix", "runs/digits-mix-2"]


def test_a_finished_run_is_not_trained_again(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = killing.state_of(Path(run))
    assert told(capsys, ["train", "--resume", run])["status"] == "trained"
    assert killing.state_of(Path(run)) == before


def test_mistakes_in_training_are_named(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, ["train", "--epochs", "many"], "epochs: must be a number > 0", "'many'")
    refused(capsys, ["train", "--hidden", "8,x"], "hidden: ", "'x'")
    refused(capsys, ["train", "--defense", "mixx"], "defense: must be one of", "'mix'")
    refused(capsys, ["train", "--epoch", "5"], "--epoch", "--help")
    refused(
        capsys,
        ["train", "--data", "nowhere.csv", "--target", "y"],
        "data: must be a file that is there",
    )
    refused(
        capsys,
        ["train", "--data", "mnist", "--root", str(tmp_path / "x")],
        "root: must be a folder",
    )
    refused(capsys, ["train", "--data", "mnist", "--root", str(tmp_path)], "mnist")
    refused(capsys, ["train", "--config", str(tmp_path / "no.toml")], "no.toml")
    refused(capsys, ["train", "--out", run], "train --resume")
    refused(capsys, ["train", "--resume", run, "--epochs", "9"], "--epochs")
    refused(capsys, ["train", "--resume", str(tmp_path)], "run folder")
    refused(
        capsys,
        ["train", "--network", "evil:make", "--out", str(tmp_path / "evil")],
        "--trust-network",
    )
    refused(capsys, ["fly"], "fly")


# --- Using a run --------------------------------------------------------------------------------


def test_show_tells_of_runs_and_bundles(
    run: str, regression: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, ["show", run])
    assert found["status"] == "trained"
    assert set(found["metrics"]["clean"]) >= {"accuracy", "nll"}
    bundle = told(capsys, ["show", f"{run}/model.advbayes"])
    assert bundle["parts"]["posterior.safetensors"]["sha256"] == found["weights"]
    assert (
        main(["show", run])
        == main(["show", f"{run}/model.advbayes"])
        == main(["show", regression])
        == 0
    )
    text = capsys.readouterr().out
    assert found["weights"] in text
    assert "0.3 standardised" in text
    assert re.search(r"raw units: size \d", text)
    (tmp_path / "evil.advbayes").write_bytes(b"\x80\x04cos\nsystem\n")
    refused(capsys, ["show", str(tmp_path / "evil.advbayes")], "evil.advbayes")
    refused(capsys, ["show", str(tmp_path / "absent")], "absent")


def test_show_says_that_the_configuration_was_edited_after_training(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, ["show", run])["changed_since_training"] == {}
    main(["show", run])
    assert "edited" not in capsys.readouterr().out
    edited = tmp_path / "edited"
    shutil.copytree(run, edited)
    config = edited / "config.toml"
    text = config.read_text()
    assert "\neps = 0.5\n" in text
    config.write_text(text.replace("\neps = 0.5\n", "\neps = 0.25\n"))
    changed = told(capsys, ["show", str(edited)])["changed_since_training"]
    assert changed == {"eps": {"trained": 0.5, "now": 0.25}}
    main(["show", str(edited)])
    assert "edited after training" in (out := capsys.readouterr().out)
    assert "trained with: eps (0.5)" in out


def test_predict_reads_columns_by_name_and_answers_in_raw_units(
    regression: str, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, ["predict", regression, str(table)])["predictions"]
    price = np.array([float(line.split(",")[2]) for line in table.read_text().splitlines()[1:]])
    assert np.corrcoef(found["price"], price)[0, 1] > 0.9
    inside = (np.array(found["price 90% low"]) <= price) & (
        price <= np.array(found["price 90% high"])
    )
    assert 0.7 < inside.mean() <= 1
    # another order of the columns, one that the model does not know
    shuffled = tmp_path / "other.csv"
    lines = [line.split(",") for line in table.read_text().splitlines()]
    shuffled.write_text(
        "\n".join(f"{w},{i},{s}" for i, (s, w, _) in enumerate(lines)).replace(
            "weight,0,size", "weight,id,size"
        )
    )
    assert told(capsys, ["predict", regression, str(shuffled)])["predictions"] == found
    out = tmp_path / "predictions.csv"
    assert told(capsys, ["predict", regression, str(table), "--out", str(out)])["num"] == 120
    assert out.read_text().splitlines()[0] == "price,price std,price 90% low,price 90% high"
    refused(capsys, ["predict", regression, str(table), "--out", str(out)], "must be a new file")
    (tmp_path / "short.csv").write_text("size\n1\n")
    refused(capsys, ["predict", regression, str(tmp_path / "short.csv")], "weight")
    refused(capsys, ["predict", regression, "x.txt"], "INPUT")


def test_predict_classifies_arrays(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from advbayes.datasets import load_dataset

    digits = load_dataset("digits")
    np.savez(tmp_path / "x.npz", x=digits.x_test[:50].numpy())
    bundle, more = f"{run}/model.advbayes", [str(tmp_path / "x.npz"), "--thetas", "20"]
    found = told(capsys, ["predict", bundle, *more])["predictions"]
    wanted = advbayes.load(bundle).predictor(20)(digits.x_test[:50]).probs
    assert [int(said) for said in found["class"]] == wanted.argmax(1).tolist()
    for digit in range(10):
        np.testing.assert_allclose(found[f"p({digit})"], wanted[:, digit], rtol=1e-4, atol=1e-6)
    total = np.sum([found[f"p({digit})"] for digit in range(10)], axis=0)
    assert np.allclose(total, 1, atol=1e-5)
    assert main(["predict", run, *more, "--out", str(tmp_path / "out.npz")]) == 0
    with np.load(tmp_path / "out.npz", allow_pickle=False) as arrays:
        assert arrays["confidence"].tolist() == found["confidence"]
    np.savez(tmp_path / "bad.npz", x=np.zeros((3, 1, 9, 9)))
    capsys.readouterr()
    refused(capsys, ["predict", run, str(tmp_path / "bad.npz")], "(1, 8, 8)", "(1, 9, 9)")


@pytest.mark.filterwarnings("ignore:.*predictions there are extrapolated")
def test_predict_names_no_class_where_the_net_overflows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = np.random.default_rng(0).normal(size=(60, 2)) * [1, 0.01]
    lines = [f"{a:.4f},{b:.6f},{'yes' if a > 0 else 'no'}" for a, b in rows]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,y", *lines]))
    (tmp_path / "new.csv").write_text("a,b\n0,3e38\n0,0.01\n")
    flags = ["--data", str(tmp_path / "t.csv"), "--target", "y", "--epochs", "1", "--quiet"]
    assert main(["train", *flags, "--out", str(tmp_path / "r")]) == 0
    capsys.readouterr()
    asked = ["predict", str(tmp_path / "r"), str(tmp_path / "new.csv")]
    refused(capsys, asked, "prediction.probs must be finite, got 2 NaN")


def test_attack_writes_what_it_says(
    run: str, regression: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "adversarial.safetensors"
    argv = [
        "attack",
        run,
        "--attack",
        "pgd",
        "--eps",
        "1",
        "--num",
        "30",
        "--steps",
        "10",
        "--out",
        str(out),
    ]
    found = told(capsys, argv)
    arrays = load_file(out)
    moved = torch.linalg.vector_norm((arrays["x_adv"] - arrays["x"]).flatten(1), dim=1)
    assert float(moved.max()) <= 1 + 1e-5
    assert 0 <= float(arrays["x_adv"].min()) <= float(arrays["x_adv"].max()) <= 1
    assert found["attacked"] < found["clean"]
    refused(capsys, argv, "must be a new file")
    refused(
        capsys,
        ["attack", run, "--attack", "pdg", "--out", str(tmp_path / "a.npz")],
        "did you mean 'pgd'",
    )
    refused(capsys, ["attack", run, "--norm", "l3", "--out", str(tmp_path / "a.npz")], "norm: ")
    raw = told(capsys, ["attack", regression, "--steps", "5", "--out", str(tmp_path / "r.npz")])[
        "threat_model"
    ]
    assert raw["units"] == "standardised"
    assert raw["raw"]["size"] == pytest.approx(0.3 * 20, rel=0.2)
    assert raw["raw"]["weight"] == pytest.approx(0.3 * 0.01, rel=0.2)


@pytest.mark.parametrize("name", ATTACKS)
def test_every_named_attack_attacks(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    argv = [
        "attack",
        run,
        "--attack",
        name,
        "--eps",
        "1.5",
        "--num",
        "12",
        "--steps",
        "6",
        "--queries",
        "30",
        "--thetas",
        "3",
    ]
    found = told(capsys, [*argv, "--out", str(tmp_path / "x.npz")])
    assert found["attacked"] <= found["clean"]


def test_evaluate_goes_on_where_it_was_killed(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "evaluate",
        run,
        "--attack",
        "pgd",
        "--attack",
        "ent",
        "--eps",
        "0.5",
        "--eps",
        "1",
        "--num",
        "40",
        "--steps",
        "5",
    ]
    argv += ["--thetas", "3", "--batch-size", "10"]
    whole = told(capsys, [*argv, "--name", "whole"])
    rows = {
        (row["attack"], row["eps"]): row["accuracy"]["value"]
        for row in whole["rows"]
        if row["predictor"] == "os"
    }
    assert rows["worst", 1.0] <= rows["worst", 0.5] <= rows["clean", 0.0]
    records = Path(whole["evaluation"]) / "records.jsonl"
    for when in (0.3, 0.6):
        killing.signalled([*argv, "--name", "parts"], 9, when)
    assert killing.wait(killing.start([*argv, "--name", "parts"])) == 0
    parts = Path(run) / "evaluation" / "parts"
    assert (parts / "records.jsonl").read_bytes() == records.read_bytes()
    for block in sorted((records.parent / "blocks").iterdir()):
        assert (parts / "blocks" / block.name).read_bytes() == block.read_bytes()
    assert (
        load_evaluation(parts).estimate("accuracy", attack="worst", eps=1.0).value
        == rows["worst", 1.0]
    )
    refused(capsys, [*argv, "--name", "whole", "--seed", "5"], "same evaluation")
    refused(capsys, ["evaluate", run, "--attack", "pgd", "--name", "../x"], "name: ")


def test_evaluate_purified_and_in_regression(
    run: str, regression: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--attack", "pgd", "--num", "10", "--steps", "3", "--thetas", "2"]
    found = told(capsys, ["evaluate", run, "--purify", "online", *few])
    rows = {(row["predictor"], row["attack"]) for row in found["rows"]}
    assert rows >= {
        ("os", "pgd"),
        ("os purified online", "pgd"),
        ("os purified online", "adaptive"),
    }
    assert ("os", "adaptive") not in rows
    refused(capsys, ["evaluate", regression, "--purify", "online", *few], "purify: ")
    refused(capsys, ["evaluate", run, "--purify", "always", *few], "purify: ")
    assert main(["evaluate", regression, *few]) == 0
    text = capsys.readouterr().out
    assert "raw units: size" in text
    assert "RMSE" in text
    assert "coverage" in text


def test_audit_certify_and_report_keep_their_findings_in_the_run(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spend_little(monkeypatch)
    verdict = told(
        capsys, ["audit", run, "--tier", "quick", "--num", "16", "--thetas", "2", "--eps", "0.5"]
    )
    assert verdict["level"] in "ABCD"
    # quick leaves checks out
    assert json.loads((Path(run) / "audit.json").read_text())["level"] == verdict["level"] == "D"
    assert (
        main(
            [
                "audit",
                run,
                "--tier",
                "quick",
                "--num",
                "16",
                "--thetas",
                "2",
                "--require",
                "B",
                "--json",
            ]
        )
        == 3
    )
    capsys.readouterr()
    found = told(capsys, ["certify", run, "--sigma", "0.25", "--num", "5", "--draws", "200"])
    curve = [point["certified_accuracy"] for point in found["curve"]]
    assert curve == sorted(curve, reverse=True)
    assert len(found["radii"]) == 5
    few = [
        "--attack",
        "pgd",
        "--num",
        "10",
        "--steps",
        "3",
        "--thetas",
        "2",
        "--name",
        "for-report",
    ]
    told(capsys, ["evaluate", run, *few])
    report = told(capsys, ["report", run, "--thetas", "2"])
    assert Path(report["html"]).read_text().startswith("<!doctype html>")
    assert told(capsys, ["report", run, "--thetas", "2"])["sha256"] == report["sha256"]


def test_certify_wants_classes(regression: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, ["certify", regression], "classifier")


def test_datasets_are_listed_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        row["name"]: row for row in told(capsys, ["datasets", "--root", str(tmp_path)])["datasets"]
    }
    assert len(found) == 9
    assert found["mnist"]["place"].startswith("not here")
    assert told(capsys, ["datasets", "--fetch", "digits"])["verified"] is True
    refused(capsys, ["datasets", "--fetch", "minst"], "did you mean 'mnist'")
    assert main(["datasets"]) == 0


@pytest.mark.slow
def test_the_demo_ends_with_a_report_and_goes_on_from_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    spend_little(monkeypatch)
    assert main(["demo", "--quick"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1] == "demo-report/report.html"
    assert Path(lines[-1]).read_text().startswith("<!doctype html>")
    for name in ("undefended", "adversarial training", "MIX", "purified"):
        assert any(name in line for line in lines), name
    refused(capsys, ["demo", "--quick", "--seed", "3", "--json"], "another configuration")


# --- Errors -------------------------------------------------------------------------------------


def test_bugs_are_told_from_mistakes(
    monkeypatch: pytest.MonkeyPatch, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from advbayes.cli import describe

    def broken(run: object) -> str:
        return str({}["status"])  # a KeyError, ours

    with monkeypatch.context() as patch:
        patch.setattr(describe, "lines_of_run", broken)
        assert main(["show", run]) == 1
        assert "Traceback" in capsys.readouterr().err
        patch.undo()
        # a TypeError in our own code that nobody raised on purpose
        patch.setattr(describe, "said_scores", None)
        assert main(["show", run]) == 1
        assert "Traceback" in capsys.readouterr().err
    with pytest.raises(ValueError) as caught:
        int("x")  # of a type that we raise, but not raised by us
    assert not is_mistake(caught.value)


def test_commands_work_outside_the_main_thread(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(["show", run, "--json"])))
    thread.start()
    thread.join()
    assert codes == [0]

"""What reaches the screen: nothing from a file drives the terminal, and what cannot be done says
what it would have taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from advbayes.cli import main
from advbayes.cli.app import memory_wanted
from advbayes.store import Lock
from tests import forking

ESCAPES = "\x1b]0;owned\x07\x1b[31m\u202e\x9b2J"


def visible(text: str) -> bool:
    return all(c == "\n" or c.isprintable() for c in text)


def test_escapes_in_columns_classes_and_paths_are_spelled_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a\x1b[2Jb"
    folder.mkdir()
    table = folder / "t.csv"
    values = np.random.default_rng(0).normal(size=60)
    rows = [f"{v:.3f},{-v:.3f},{'yes' + ESCAPES if v > 0 else 'no'}" for v in values]
    table.write_text(f"width\x1b[31m,b,kind{ESCAPES}\n" + "\n".join(rows) + "\n")
    run = folder / "run"
    train = [
        "train",
        "--data",
        str(table),
        "--target",
        f"kind{ESCAPES}",
        "--task",
        "classification",
        "--epochs",
        "2",
    ]
    assert main([*train, "--out", str(run), "--quiet"]) == 0
    few = ["--num", "8", "--thetas", "2", "--eps", "0.1"]
    assert main(["evaluate", str(run), "--attack", "pgd1", *few]) == 0
    assert main(["show", str(run)]) == 0
    assert main(["show", str(run / "model.advbayes")]) == 0
    assert (
        main(["attack", str(run), "--attack", "pgd1", *few, "--out", str(tmp_path / "x.npz")]) == 0
    )
    assert main(["show", str(folder / "absent\x1b[31m")]) == 2
    assert main([*train, "--out", str(run)]) == 2
    assert main(["predict", str(run), str(folder / "none\x1b.csv")]) == 2
    out, err = capsys.readouterr()
    assert visible(out)
    assert visible(err)
    assert "\\x1b[31m" in out
    assert "width" in out


def test_a_lock_file_cannot_drive_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('data = "digits"\n')
    with Lock(run):
        (run / ".lock").write_text(json.dumps({"pid": 1, "host": f"here{ESCAPES}"}))
        assert main(["train", "--resume", str(run), "--quiet"]) == 2
    err = capsys.readouterr().err
    assert visible(err)
    assert "here\\x1b" in err


def test_warnings_of_libraries_are_one_visible_line() -> None:
    script = (
        "import sys, warnings\n"
        "import advbayes.cli.looking as show\n"
        "from advbayes.cli.app import app, run\n"
        "@app.command('warn')\n"
        f"def warn() -> None: warnings.warn('column {ESCAPES!s}', stacklevel=1)\n"
        "sys.argv = ['advbayes', 'warn']\n"
        "sys.exit(run())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0
    assert done.stderr.startswith("advbayes: warning: column \\x1b")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "allocate",
    [lambda: torch.empty(10**14), lambda: np.empty(10**14), lambda: torch.empty(10**10, 10**10)],
)
def test_out_of_memory_says_what_was_wanted_and_what_needs_less(
    allocate: object,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from advbayes.cli import describe

    (tmp_path / "config.toml").write_text('data = "digits"\n')
    monkeypatch.setattr(describe, "lines_of_run", lambda run: allocate())  # type: ignore[operator]
    assert main(["show", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("advbayes: out of memory: ")
    assert "--batch-size" in err
    assert "bug" not in err
    assert any(
        amount in err for amount in ("400000.00 GB", "728. TiB", "[10000000000, 10000000000]")
    )


@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="limits of address space as on Linux"
)
def test_a_net_too_wide_for_the_machine_is_no_bug(tmp_path: Path) -> None:
    script = (
        "import resource, sys, torch\n"
        "from advbayes.cli import main\n"
        "import advbayes.runs, sklearn.datasets\n"
        "pages = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (pages + (1 << 30), pages + (1 << 30)))\n"
        f"sys.exit(main(['train', '--data', 'digits', '--network', 'mlp', '--hidden', "
        f"'65536,65536', '--epochs', '0.1',\n"
        f"    '--out', {str(tmp_path / 'run')!r}]))\n"
    )
    done = forking.ran(script)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("advbayes: out of memory: wanted 17.18 GB at once")


def test_other_errors_are_not_called_a_lack_of_memory() -> None:
    assert memory_wanted(RuntimeError("The size of tensor a must match")) is None

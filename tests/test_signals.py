"""Signals: from the first instruction on they end the program quietly, and never inside an import
that might swallow them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from advbayes.cli.signals import Stopped, importing, watched
from tests import forking, killing

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@pytest.mark.parametrize("when", [0.0, 0.4])
def test_the_program_ends_quietly_from_its_first_instruction_on(
    tmp_path: Path, number: signal.Signals, when: float
) -> None:
    command = "demo" if number is signal.SIGINT else "train"
    code, said, took = killing.early([command, "--out", str(tmp_path / "out")], number, when)
    assert (code, said) == (CODES[number], "")
    assert took < 5


@pytest.mark.parametrize("module", ["typer", "pydantic_core", "torch._C", "advbayes.runs.training"])
def test_ctrl_c_while_a_module_is_imported_ends_quietly(tmp_path: Path, module: str) -> None:
    script = (
        "import os, signal, sys, time\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            time.sleep(0.01)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from advbayes.cli import main\n"
        f"sys.argv = ['advbayes', 'train', '--out', {str(tmp_path / 'out')!r}]\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_in_the_middle_of_the_demo_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    """Training catches Ctrl-C for those who call it from Python; the demo must not go on with half
    of a model."""
    script = (
        "import os, signal, sys\n"
        "import advbayes.training as training\n"
        "kept = training.fit\n"
        "def fit(*args, **settings):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return kept(*args, **settings)\n"
        "import advbayes.runs.training as runs\n"
        "runs.fit = fit\n"
        "from advbayes.cli import main\n"
        f"sys.argv = ['advbayes', 'demo', '--quick', '--json', '--out', "
        f"{str(tmp_path / 'out')!r}]\n"
        "sys.exit(main())\n"
    )
    done = forking.ran(script)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not list((tmp_path / "out").glob("*/.lock"))


def _import_slowly() -> None:
    with watched():
        import swallowing_module  # type: ignore[import-not-found]  # noqa: F401

        time.sleep(1)


def test_nothing_is_raised_inside_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module swallows whatever is raised in it, as C extensions do: the signal comes after
    it."""
    (tmp_path / "swallowing_module.py").write_text(
        "import os, signal, time\n"
        "raised = False\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.2)\n"
        "except BaseException:\n"
        "    raised = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Stopped) as caught:
        _import_slowly()
    assert caught.value.code == 143
    assert not sys.modules["swallowing_module"].raised
    assert not importing(sys._getframe())


def _swallow_and_clean_up(cleaned: list[bool]) -> None:
    with watched():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        except Stopped:
            os.kill(os.getpid(), signal.SIGTERM)  # while files are cleaned up
            cleaned.append(True)
        time.sleep(5)


def test_a_signal_that_was_swallowed_comes_again_and_a_second_does_not_disturb_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("advbayes.cli.signals.LIMIT", 0.3)
    began, cleaned = time.monotonic(), list[bool]()
    with pytest.raises(Stopped):
        _swallow_and_clean_up(cleaned)
    assert cleaned == [True]
    assert 0.2 < time.monotonic() - began < 2
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)

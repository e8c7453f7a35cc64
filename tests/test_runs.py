"""Run folders: exact resume after any death, signals, locks, full disks, what must never be
saved."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from advbayes import store
from advbayes.cli import main
from advbayes.cli.signals import Finishing, Stopped, watched
from advbayes.runs import Run, create_run, load_trained, train
from advbayes.runs.building import prepare
from advbayes.runs.config import ConfigError, RunConfig, make_config
from advbayes.runs.folder import record
from advbayes.runs.training import read_checkpoint
from advbayes.training.loop import COLUMNS
from tests import faults, killing

SEED = 20
pytestmark = pytest.mark.forks


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """An undisturbed run, made as the others are, and how long it took."""
    run = tmp_path_factory.mktemp("reference") / "run"
    return run, killing.duration_of(run, killing.SMALL)


def small(**changes: Any) -> Any:
    values = {
        "data": "digits",
        "network": "mlp",
        "hidden": [8],
        "num_train": 256,
        "batch_size": 32,
        "epochs": 1,
    }
    return make_config(values | {"lr": 0.01, "checkpoint_every": 5} | changes)


def test_the_commit_is_the_packages_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = record(["a"])
    user = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], [*user, "commit", "-q", "--allow-empty", "-m", "another"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    assert record(["a"]) == here


@pytest.mark.parametrize("changed", [{}, {"seed": 3}, {"eps": 0.5, "defense": "at"}])
def test_a_key_that_is_younger_than_a_run_had_its_default(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    config = make_config({"data": "digits", "root": str(tmp_path), **changed})
    with create_run(config, tmp_path / "run") as run:
        sealed = config.model_dump(mode="json")
        assert run.changed(sealed) == {}
        assert run.changed({**sealed, "root": "elsewhere"}) == {}
        assert run.changed(None) == {}
        for key in RunConfig.model_fields:
            older = {name: value for name, value in sealed.items() if name != key}
            wanted = {key: (None, sealed[key])} if key in changed else {}
            assert run.changed(older) == wanted
        for key, value in changed.items():
            default = RunConfig.model_fields[key].default
            assert run.changed({**sealed, key: default}) == {key: (default, value)}


# --- The same, again ----------------------------------------------------------------------------


def test_two_runs_of_one_seed_are_the_same_to_the_byte(
    reference: tuple[Path, float], tmp_path: Path
) -> None:
    assert (
        main(["train", *killing.flags(killing.SMALL), "--out", str(tmp_path / "again"), "--quiet"])
        == 0
    )
    assert killing.state_of(tmp_path / "again") == killing.state_of(reference[0])
    assert (
        main(
            [
                "train",
                *killing.flags(killing.SMALL | {"seed": "1"}),
                "--out",
                str(tmp_path / "other"),
                "--quiet",
            ]
        )
        == 0
    )
    assert Run(tmp_path / "other").manifest["weights"] != Run(reference[0]).manifest["weights"]


def test_a_run_killed_at_random_moments_ends_as_if_it_had_not_been(
    reference: tuple[Path, float], tmp_path: Path
) -> None:
    """Three kills; the script in benchmarks/reliability takes fifty."""
    draw = random.Random(SEED)
    kills = 0
    for _ in range(40):
        run, times = killing.killed_and_resumed(tmp_path, killing.SMALL, reference[1], draw)
        kills += times
        assert killing.state_of(run) == killing.state_of(reference[0])
        if kills >= 3:
            return
    pytest.fail(f"only {kills} kills came while the run was alive")


def test_a_kill_at_any_call_that_changes_the_disk_loses_nothing(
    reference: tuple[Path, float], tmp_path: Path
) -> None:
    """A sample of the points; the script in benchmarks/reliability takes more."""

    def action(run: Path) -> int:
        return main(["train", *killing.flags(killing.SMALL), "--out", str(run), "--quiet"])

    points = faults.kill_points(lambda: action(tmp_path / "traced"))
    assert len(points) > 100
    for number, point in enumerate(random.Random(SEED).sample(points, 6)):
        run = tmp_path / f"run{number}"
        assert faults.killed_at(point, lambda run=run: action(run))  # type: ignore[misc]
        again = killing.start(killing._command(run, killing.SMALL))
        assert killing.wait(again) == 0, point
        assert killing.state_of(run) == killing.state_of(reference[0]), point


@pytest.mark.parametrize("defense", ["nn50", "trades", "none"])
def test_every_kind_of_state_is_resumed_exactly(tmp_path: Path, defense: str) -> None:
    """Interrupted after some steps, with the adversary's network and optimiser where there is
    one."""
    config = small(defense=defense, attack_steps=2)
    with create_run(config, tmp_path / "whole") as run:
        train(run, progress=False)
    steps = iter(range(100))
    with create_run(config, tmp_path / "parts") as run:
        assert train(run, progress=False, stop=lambda: next(steps) == 2).interrupted
        assert run.status == "interrupted"
        result = train(run, progress=False)
        assert run.status == "trained"
    assert len(result.history["bound"]) == result.steps == 8
    assert killing.state_of(tmp_path / "parts") == killing.state_of(tmp_path / "whole")


def test_data_that_changed_are_not_gone_on_with(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 3)), draw.integers(0, 2, 60)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    config = make_config(
        {"data": str(tmp_path / "data.npz"), "epochs": 5, "batch_size": 8, "defense": "none"}
    )
    with create_run(config, tmp_path / "run") as run:
        assert train(run, progress=False, stop=lambda: True).interrupted
        np.savez(tmp_path / "data.npz", x=x + 1, y=y)
        with pytest.raises(store.StoreError, match="the data that the run began with"):
            train(run, progress=False)


# --- Signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_finish_the_step_and_leave_a_checkpoint(
    tmp_path: Path, number: int, code: int
) -> None:
    settings = killing.SMALL | {"epochs": "3000", "checkpoint_every": "100000"}
    run = Run(tmp_path / "run")
    pid = killing.start(["train", *killing.flags(settings), "--out", str(run.path), "--quiet"])
    while not (run.path / "history.jsonl").exists() and run.status != "training":
        time.sleep(0.05)
    time.sleep(1.0)
    began = time.monotonic()
    os.kill(pid, number)
    assert killing.wait(pid) == code
    assert time.monotonic() - began < 5
    assert not (run.path / ".lock").exists()
    assert run.status in ("interrupted", "training")
    if run.status == "interrupted":
        assert 0 < len(run.history.read()) == run.manifest["steps"]


def test_a_signal_before_the_first_step_ends_at_once_and_a_long_step_does_not_hold_it() -> None:
    def early() -> None:
        with Finishing():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    def late() -> None:
        with Finishing(limit=0.2) as stop:
            assert not stop()
            os.kill(os.getpid(), signal.SIGINT)
            assert stop()  # noted, not raised
            time.sleep(5)  # the step that does not end

    began = time.monotonic()
    with pytest.raises(Stopped) as caught:
        early()
    assert caught.value.code == 143
    with pytest.raises(Stopped) as caught:
        late()
    assert caught.value.code == 130
    assert time.monotonic() - began < 3
    with Finishing(limit=0.05) as stop:  # done in time: nothing fires afterwards
        stop()
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    with pytest.raises(Stopped), watched():
        os.kill(os.getpid(), signal.SIGTERM)


# --- One writer ---------------------------------------------------------------------------------


def contenders(folder: Path, num: int, *, named: bool) -> list[int]:
    """`num` processes that all want a run here at once; their exit codes."""
    settings = killing.SMALL | {"epochs": "0.2"}
    os.chdir(folder)
    out = ["--out", "run"] if named else []
    children = [
        killing.start(["train", *killing.flags(settings), *out, "--quiet"]) for _ in range(num)
    ]
    return [killing.wait(pid) for pid in children]


@pytest.mark.parametrize("named", [True, False])
def test_of_many_processes_on_one_name_each_run_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = contenders(tmp_path, 4, named=named)
    runs = [tmp_path / "run"] if named else sorted((tmp_path / "runs").iterdir())
    assert sorted(codes) == ([0, 2, 2, 2] if named else [0] * 4)
    assert len(runs) == (1 if named else 4)
    states = [killing.state_of(run) for run in runs]
    assert all(state == states[0] for state in states)
    assert all(Run(run).status == "trained" for run in runs)


def test_a_folder_in_use_or_with_files_in_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with create_run(small(), tmp_path / "run"):
        assert main(["train", "--resume", str(tmp_path / "run")]) == 2
        assert f"pid {os.getpid()}" in capsys.readouterr().err
        with (
            pytest.raises(ConfigError, match="train --resume"),
            create_run(small(), tmp_path / "run"),
        ):
            pass
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="not a run's"), create_run(small(), tmp_path / "mine"):
        pass
    with (
        pytest.raises(ConfigError, match="below a file"),
        create_run(small(), tmp_path / "mine" / "thesis.tex" / "run"),
    ):
        pass
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"
    with pytest.raises(ConfigError, match="wanted a run folder"):
        Run.open(tmp_path / "mine")


def test_what_a_dead_process_left_of_a_folder_is_taken_over(tmp_path: Path) -> None:
    """Killed between the folder's creation and its configuration: the lock is stale, the
    half-written file is swept."""

    def die() -> None:
        with store.Lock(tmp_path / "run"):
            (tmp_path / "run" / ".config.toml.0123456789abcdef.tmp").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    (tmp_path / "run").mkdir()
    assert faults.forked(die) == -signal.SIGKILL
    with create_run(small(), tmp_path / "run") as run:
        assert run.config == small()
    assert os.listdir(tmp_path / "run") == ["config.toml"]


# --- The disk, and numbers that are none --------------------------------------------------------


def test_a_full_disk_leaves_the_last_checkpoint_and_says_what_was_needed(
    reference: tuple[Path, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run(tmp_path / "run")
    real, free = os.write, [60_000]

    def limited(descriptor: int, data: Any) -> int:
        if free[0] < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        free[0] -= len(data)
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", limited)
        assert (
            main(["train", *killing.flags(killing.SMALL), "--out", str(run.path), "--quiet"]) == 2
        )
    message = capsys.readouterr().err
    assert "bytes of disk" in message
    assert "bytes free" in message
    assert "Traceback" not in message
    assert store.read_bundle(run.path / "checkpoint")[1]["state"]["step"] >= 5  # type: ignore[index, call-overload, operator]
    assert main(["train", "--resume", str(run.path), "--quiet"]) == 0
    assert killing.state_of(run.path) == killing.state_of(reference[0])


class Poisoned(nn.Module):
    """A linear net whose output turns to NaN, or whose gradient does, after some calls."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.flat, self.linear, self.where, self.calls = nn.Flatten(), nn.Linear(64, 10), where, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output: torch.Tensor = self.linear(self.flat(x))
        if self.calls > 40 and self.where == "output":
            return output * math.nan
        if self.calls > 40 and self.where == "gradient" and output.requires_grad:
            return Burst.apply(output)  # type: ignore[no-any-return, no-untyped-call]
        return output


class Burst(torch.autograd.Function):
    """The identity with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * math.inf


def poisoned_output() -> nn.Module:
    return Poisoned("output")


def poisoned_gradient() -> nn.Module:
    return Poisoned("gradient")


def finite_on_disk(run: Run) -> Iterator[bool]:
    for path in (run.path / "checkpoint", run.model_path):
        if path.exists():
            for tensors in store.read_bundle(path)[0].values():
                yield from (bool(torch.isfinite(value).all()) for value in tensors.values())
    yield (
        "NaN" not in (run.path / "history.jsonl").read_text()
        if (run.path / "history.jsonl").exists()
        else True
    )


@pytest.mark.filterwarnings("ignore::advbayes.training.SkippedStepWarning")
@pytest.mark.parametrize(
    ("factory", "cause"),
    [("poisoned_output", "the likelihood"), ("poisoned_gradient", "the gradient")],
    ids=["output", "gradient"],
)
def test_nan_in_the_network_or_its_gradient_is_named_and_never_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factory: str, cause: str
) -> None:
    run = Run(tmp_path / "run")
    settings = killing.SMALL | {
        "network": f"tests.test_runs:{factory}",
        "defense": "none",
        "epochs": "20",
    }
    assert (
        main(
            [
                "train",
                *killing.flags(settings),
                "--trust-network",
                "--out",
                str(run.path),
                "--quiet",
            ]
        )
        == 2
    )
    message = capsys.readouterr().err
    assert cause in message
    assert "Traceback" not in message
    assert (run.path / "checkpoint").exists()
    assert all(finite_on_disk(run))


def test_nan_in_the_data_is_refused_naming_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.zeros((40, 3))
    x[7, 1] = math.nan
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(40) % 2)
    assert (
        main(["train", "--data", str(tmp_path / "data.npz"), "--out", str(tmp_path / "run")]) == 2
    )
    message = capsys.readouterr().err
    assert "data.npz: wanted finite numbers" in message
    assert "row 8" in message
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.filterwarnings("ignore::advbayes.training.SkippedStepWarning")
def test_a_step_that_is_skipped_is_null_in_the_history_and_goes_on_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from advbayes.channels import Noise

    real, poisoned = Noise.sample, {3}

    def sample(
        self: Noise, predict: Any, x: torch.Tensor, y: Any = None, *, generator: Any = None
    ) -> torch.Tensor:
        result = real(self, predict, x, y, generator=generator)
        return result * math.nan if step.pop() in poisoned else result

    step: list[int] = []
    monkeypatch.setattr(Noise, "sample", sample)
    for name, stops in (("whole", ()), ("parts", (4,))):
        step[:] = range(100)[::-1]
        with create_run(small(defense="noise"), tmp_path / name) as run:
            for at in stops:
                train(run, progress=False, stop=lambda at=at: 100 - len(step) > at)  # type: ignore[misc]
            result = train(run, progress=False)
        assert result.skipped == 1
        assert [row["step"] for row in run.history.read() if row["bound"] is None] == [3]
    assert killing.state_of(tmp_path / "parts") == killing.state_of(tmp_path / "whole")


# --- Code and files of others -------------------------------------------------------------------


def test_a_network_of_ones_own_runs_only_when_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from pathlib import Path\nfrom torch import nn\nPath('ran').touch()\n"
    code += "def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    (tmp_path / "mynet_for_test.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    config = small(network="mynet_for_test:make")
    with create_run(config, "run") as run:
        with pytest.raises(ConfigError, match="--trust-network"):
            train(run, progress=False)
        assert not (tmp_path / "ran").exists()
        train(run, trusted=True, progress=False)
    assert (tmp_path / "ran").exists()
    trained = load_trained("run", trusted=True)
    assert trained.predict(2)(prepare(config).x_test[:3]).probs.shape == (3, 10)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "network", ["no_such_module_here:make", "math:nothing", "math:gamma", "os:getcwd"]
)
def test_a_factory_that_does_not_work_is_the_users_to_mend(tmp_path: Path, network: str) -> None:
    with (
        create_run(small(network=network), tmp_path / "run") as run,
        pytest.raises(ConfigError, match="network: "),
    ):
        train(run, trusted=True, progress=False)


def test_a_damaged_checkpoint_or_history_is_refused(tmp_path: Path) -> None:
    with create_run(small(), tmp_path / "run") as run:
        train(run, progress=False, stop=lambda: True)
        lines = (run.path / "history.jsonl").read_text()
        (run.path / "history.jsonl").write_text(lines.replace('"step": 0', '"step": 7'))
        with pytest.raises(store.StoreError, match=r"history\.jsonl"):
            train(run, progress=False)
        (run.path / "history.jsonl").write_text("")
        with pytest.raises(store.StoreError, match="1 records, as the checkpoint"):
            train(run, progress=False)
        (run.path / "history.jsonl").write_text(lines)
        train(run, progress=False)


def test_a_trained_run_without_its_manifest_is_damaged(
    reference: tuple[Path, float], tmp_path: Path
) -> None:
    copied = shutil.copytree(reference[0], tmp_path / "run")
    (copied / "manifest.json").unlink()
    with pytest.raises(store.StoreError, match="the manifest of a trained run, got no such file"):
        Run(copied).described()


def test_the_manifest_proves_where_the_weights_come_from(reference: tuple[Path, float]) -> None:
    manifest = json.loads((reference[0] / "manifest.json").read_text())
    parts = {
        part.name: part.sha256
        for part in store.read_manifest(reference[0] / "model.advbayes").parts
    }
    assert manifest["weights"] == parts["posterior.safetensors"]
    assert manifest["started"].keys() == {"command", "commit", "machine"}
    assert manifest["data"]["sha256"]
    assert manifest["status"] == "trained"
    assert not (reference[0] / ".lock").exists()


def test_a_checkpoint_is_read_back_whole(tmp_path: Path) -> None:
    """What a stopped training held, the clock with it, which a resumed one does not start anew."""
    with create_run(small(defense="none"), tmp_path / "run") as run:
        calls = iter(range(99))
        first = train(run, progress=False, stop=lambda: next(calls) == 3)
        state = read_checkpoint(run)
        assert state is not None
        assert (state.step, state.skipped) == (first.steps, first.skipped)
        assert first.interrupted
        for name in set(COLUMNS) - {"seconds"}:
            assert state.history[name] == pytest.approx(first.history[name], rel=1e-6)
        assert state.history["seconds"][-1] == pytest.approx(first.history["seconds"][-1])
        for name, value in first.state.tensors.items():
            assert torch.equal(state.tensors[name], value), name
        time.sleep(0.05)
        second = train(run, progress=False)
    assert second.history["seconds"][first.steps] >= first.history["seconds"][-1]
    assert len(second.history["seconds"]) == second.steps > first.steps

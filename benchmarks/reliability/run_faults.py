"""A run on a disk that fills up at every size, and NaN or infinity injected where it can be: the
last checkpoint stays good, nothing that is not finite is ever saved, the message names the
cause."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import outcome
import torch
from tests import killing
from tests.test_runs import finite_on_disk

from advbayes import store
from advbayes.channels import Noise
from advbayes.cli import main as advbayes
from advbayes.posteriors import MeanField
from advbayes.runs import Run

SEED = 0
DISKS = 40


def called(argv: list[str]) -> tuple[int, str]:
    """Exit code and standard error of a command."""
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        code = advbayes(argv)
    return code, said.getvalue()


@contextlib.contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Writes fail as on a full disk once so many bytes were written."""
    real, left = os.write, [size]

    def write(descriptor: int, data: Any) -> int:
        if left[0] < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= len(data)
        return real(descriptor, data)

    os.write = write  # type: ignore[assignment]
    try:
        yield
    finally:
        os.write = real


def full_disks(folder: Path, wanted: dict[str, bytes], failures: list[str]) -> int:
    """Runs stopped by a full disk, each gone on with when there is room again."""
    draw, stopped = random.Random(SEED), 0
    for number in range(DISKS):
        run = Run(folder / f"disk{number}")
        argv = ["train", *killing.flags(killing.SMALL), "--out", str(run.path), "--quiet"]
        with disk_of(draw.randrange(200_000)):
            code, said = called(argv)
        if code == 0:
            continue
        stopped += 1
        if (
            code != 2
            or "bytes of disk" not in said
            or "bytes free" not in said
            or "Traceback" in said
        ):
            failures.append(f"disk {number}: exit code {code}: {said[-200:]}")
        if (run.path / "checkpoint").exists():
            store.read_bundle(run.path / "checkpoint")
        again = (
            ["train", "--resume", str(run.path), "--quiet"]
            if (run.path / "config.toml").exists()
            else argv
        )
        if called(again)[0] != 0 or killing.state_of(run.path) != wanted:
            failures.append(f"disk {number}: did not go on to the same end")
    return stopped


@contextlib.contextmanager
def changed(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """A method replaced for a while."""
    real = getattr(owner, name)
    setattr(owner, name, make(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def after(calls: int, value: float) -> Callable[[Any], Any]:
    """A method whose tensor result turns to `value` from some call on."""
    count = [0]

    def make(real: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            count[0] += 1
            result = real(*args, **options)
            return result + value if count[0] > calls else result

        return wrapped

    return make


def injected(folder: Path, failures: list[str]) -> int:
    """NaN and infinity in the data, the channel, the weights' draws, the network's output and its
    gradient."""
    tried = 0
    base = killing.SMALL | {"defense": "noise", "epochs": "20"}
    own = "tests.test_runs:poisoned_"
    cases: list[tuple[str, dict[str, str], Any, str]] = []
    for value in (math.nan, math.inf):
        x = np.random.default_rng(0).normal(size=(300, 4))
        x[17, 2] = value
        path = folder / f"{value}.npz"
        np.savez(path, x=x, y=np.arange(300) % 3)
        cases.append(
            (
                f"data {value}",
                base | {"data": str(path)},
                contextlib.nullcontext(),
                "finite numbers",
            )
        )
        cases.append(
            (f"channel {value}", base, changed(Noise, "sample", after(30, value)), "the channel")
        )
        cases.append(
            (
                f"weights {value}",
                base,
                changed(MeanField, "at", after(30, value)),
                "the posterior's draws",
            )
        )
    cases.append(
        (
            "network's output",
            base | {"network": f"{own}output"},
            contextlib.nullcontext(),
            "the likelihood",
        )
    )
    cases.append(
        ("gradient", base | {"network": f"{own}gradient"}, contextlib.nullcontext(), "the gradient")
    )
    for number, (name, settings, broken, cause) in enumerate(cases):
        tried += 1
        run = Run(folder / f"nan{number}")
        with broken:
            code, said = called(
                [
                    "train",
                    *killing.flags(settings),
                    "--trust-network",
                    "--out",
                    str(run.path),
                    "--quiet",
                ]
            )
        if code != 2 or cause not in said or "Traceback" in said:
            failures.append(f"{name}: exit code {code}, wanted {cause!r}: {said[-300:]}")
        if not all(finite_on_disk(run)):
            failures.append(f"{name}: something that is not finite was saved")
    return tried


def main() -> None:
    start = time.time()
    failures: list[str] = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killing.duration_of(folder / "reference", killing.SMALL)
        stopped = full_disks(folder, killing.state_of(folder / "reference"), failures)
        tried = injected(folder, failures)
    outcome.write(
        "run_faults",
        wanted="full disks: last checkpoint intact, bytes needed and free in the message; no NaN "
        "saved, the cause named",
        passed=not failures and stopped >= DISKS // 2,
        seed=SEED,
        seconds=time.time() - start,
        full_disks=stopped,
        injections=tried,
        failures=failures[:20],
    )


if __name__ == "__main__":
    main()

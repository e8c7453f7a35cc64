"""Runs that are killed: the command line in a forked child (torch is loaded once), and what a
finished run must be equal in."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

# loaded before the fork, so that a child's time is its own; the second is what Adam loads
import sklearn.datasets  # noqa: F401
import torch._dynamo  # noqa: F401

import advbayes.runs  # noqa: F401
from advbayes.cli import main

SMALL = {
    "data": "digits",
    "network": "mlp",
    "hidden": "8",
    "num_train": "256",
    "batch_size": "32",
    "epochs": "6",
    "lr": "0.01",
    "checkpoint_every": "5",
}
FILES = ("config.toml", "history.jsonl", "metrics.json", "model.advbayes")


def flags(settings: dict[str, str]) -> list[str]:
    """A configuration as flags."""
    return [
        part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", value)
    ]


def start(argv: Sequence[str]) -> int:
    """`advbayes ARGV` in a child; its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            code = main(list(argv))
        finally:
            os._exit(code)
    return pid


def wait(pid: int) -> int:
    """How a child ended: its exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def signalled(argv: Sequence[str], number: int, when: float) -> tuple[int, float]:
    """Send a signal after so many seconds; how the child ended and how long that took from the
    signal."""
    pid = start(argv)
    if number != signal.SIGKILL:  # until it catches signals, the child is not yet the command
        while not _catches(pid, signal.SIGTERM) and not _ended(pid):
            time.sleep(0.0005)
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(pid, number)  # not waited for yet: the id cannot have been given to another process

    timer = threading.Timer(when, send)
    timer.start()
    time.sleep(max(0.0, when))
    timer.join()
    code = wait(pid)
    return code, time.monotonic() - sent[0]


def early(argv: Sequence[str], number: int, when: float) -> tuple[int, str, float]:
    """Send a signal so long after the first instruction of `python -m advbayes ARGV`; exit code,
    standard error, seconds.

    The first instruction is seen from outside: from it on the process catches SIGTERM.
    """
    command = [sys.executable, "-m", "advbayes", *argv]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not _catches(process.pid, signal.SIGTERM):
            time.sleep(0.0005)
        time.sleep(when)
        began = time.monotonic()
        process.send_signal(number)  # does nothing where the process is gone
        _, said = process.communicate(timeout=60)
        return process.returncode, said, time.monotonic() - began


def _catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def _ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def state_of(run: Path) -> dict[str, bytes]:
    """What two runs of one configuration must agree in, byte for byte."""
    return {name: (run / name).read_bytes() for name in FILES}


def duration_of(run: Path, settings: dict[str, str]) -> float:
    """Make an undisturbed run; how long it took."""
    began = time.monotonic()
    code = wait(start(_command(run, settings)))
    assert code == 0, code
    return time.monotonic() - began


def killed_and_resumed(
    folder: Path, settings: dict[str, str], duration: float, draw: random.Random
) -> tuple[Path, int]:
    """A run killed (SIGKILL) at a random moment, and again while it goes on, until it is done;
    folder and number of kills."""
    run = folder / f"run-{draw.getrandbits(40):010x}"
    kills = 0
    for share in (1.0, 0.5):  # what is left after the first kill takes less
        when = draw.uniform(0, share * duration)
        code, _ = signalled(_command(run, settings), signal.SIGKILL, when)
        kills += code == -signal.SIGKILL
    pid = start(_command(run, settings))
    code = wait(pid)
    if code != 0:
        raise AssertionError(f"{run}: exit code {code} after {kills} kills")
    return run, kills


def _command(run: Path, settings: dict[str, str]) -> list[str]:
    """Go on with the run, or begin it where the kill came before there was one."""
    if (run / "config.toml").exists():
        return ["train", "--resume", str(run), "--quiet"]
    return ["train", *flags(settings), "--out", str(run), "--quiet"]

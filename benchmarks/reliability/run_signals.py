"""SIGTERM and Ctrl-C: exit codes 143 and 130 within five seconds.

python benchmarks/reliability/run_signals.py         at random moments of a run, which then goes on
to the same end python benchmarks/reliability/run_signals.py early   in the first two seconds of the
program, while it imports
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import outcome
from tests import killing

SEED = 0
SIGNALS, EARLY = 30, 300
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


def main() -> None:
    start = time.time()
    draw = random.Random(SEED)
    failures: list[str] = []
    slowest, sent = 0.0, {"143": 0, "130": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killing.duration_of(folder / "first", killing.SMALL)
        duration = killing.duration_of(folder / "reference", killing.SMALL)
        wanted = killing.state_of(folder / "reference")
        for number in range(10 * SIGNALS):
            which = draw.choice(list(CODES))
            run = folder / f"run{number}"
            code, took = killing.signalled(
                killing._command(run, killing.SMALL), which, draw.uniform(0.05, duration)
            )
            if code not in (0, CODES[which]):  # 0: it was done before the signal came
                failures.append(f"{number}: exit code {code} after {which.name}")
            if code == CODES[which]:
                slowest = max(slowest, took)
                sent[str(code)] += 1
            if (run / ".lock").exists():
                failures.append(f"{number}: the lock was left")
            if (
                killing.wait(killing.start(killing._command(run, killing.SMALL))) != 0
                or killing.state_of(run) != wanted
            ):
                failures.append(f"{number}: did not go on to the same end")
            if sum(sent.values()) >= SIGNALS:
                break
    outcome.write(
        "run_signals",
        wanted="exit codes 143 and 130 within 5 s, resumed to the same bytes",
        passed=not failures and slowest < 5 and sum(sent.values()) >= SIGNALS,
        seed=SEED,
        seconds=time.time() - start,
        stopped=sent,
        slowest_seconds=round(slowest, 2),
        failures=failures[:20],
    )


def early() -> None:
    """Nothing but the exit code: no traceback, no abort, no signal lost."""
    start = time.time()
    draw = random.Random(SEED)
    failures: list[str] = []
    slowest, sent = 0.0, dict.fromkeys(("train", "demo"), 0)
    with tempfile.TemporaryDirectory() as name:
        for number in range(EARLY):
            which, command = draw.choice(list(CODES)), draw.choice(list(sent))
            argv = [command, "--out", f"{name}/{number}"]
            code, said, took = killing.early(argv, which, draw.uniform(0, 2))
            sent[command] += 1
            slowest = max(slowest, took)
            quiet = not any(
                word in said for word in ("Traceback", "Error", "abort", "terminate", "Exception")
            )
            if code != CODES[which] or not quiet:
                failures.append(
                    f"{number}: {command}, {which.name}: exit code {code}, {said[-200:]!r}"
                )
    outcome.write(
        "run_signals_early",
        wanted="exit codes 143 and 130 within 5 s and not a word, from the first instruction on",
        passed=not failures and slowest < 5,
        seed=SEED,
        seconds=time.time() - start,
        sent=sent,
        slowest_seconds=round(slowest, 2),
        failures=failures[:20],
    )


if __name__ == "__main__":
    early() if "early" in sys.argv[1:] else main()

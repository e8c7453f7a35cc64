"""SIGKILL of one of two ranks at twenty random moments of a training run: the other one ends with a
message, and the run resumed on two ranks is the undisturbed one to the byte."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import outcome
from tests import killing, ranks

from advbayes.cli import main as advbayes

SEED, KILLS, LIMIT = 0, 20, 60.0
SETTINGS = killing.SMALL | {"defense": "mix", "epochs": "12"}


def train(run: Path, log: Path) -> list[int]:
    """Two ranks that begin the run, or go on with it; their process ids."""
    argv = ["--resume", str(run)]
    if not (run / "config.toml").exists():
        argv = [*killing.flags(SETTINGS), "--out", str(run)]
    return ranks.start(2, lambda: advbayes(["train", *argv, "--quiet"]), log)


def main() -> None:
    start, draw = time.time(), random.Random(SEED)
    failures: list[str] = []
    seconds: list[float] = []
    told = runs = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log"
        ranks.wait(train(folder / "first", log))  # what is loaded lazily is loaded
        began = time.monotonic()
        ranks.wait(train(folder / "whole", log))
        length = time.monotonic() - began
        wanted = killing.state_of(folder / "whole")
        while len(seconds) < KILLS and runs < 10 * KILLS:
            runs += 1
            run, said = folder / f"run-{runs}", folder / f"log-{runs}"
            children, killed = train(run, said), draw.randrange(2)
            time.sleep(draw.uniform(0, length))
            os.kill(children[killed], signal.SIGKILL)
            began = time.monotonic()
            codes = ranks.wait(children, limit=2 * LIMIT)
            if codes[killed] != -signal.SIGKILL:  # it was done already
                continue
            seconds.append(time.monotonic() - began)
            told += codes[1 - killed] == 2 and "another one is gone" in said.read_text()
            if codes[1 - killed] not in (0, 2):
                failures.append(f"{run.name}: the other rank ended with {codes[1 - killed]}")
            codes = ranks.wait(train(run, said), limit=2 * LIMIT)
            if codes != [0, 0] or killing.state_of(run) != wanted:
                failures.append(f"{run.name}: resumed with {codes}, not the undisturbed run")
    outcome.write(
        "rank_kills",
        wanted="20 kills, the other rank gone within 60 s, resumed runs to the byte",
        passed=not failures and len(seconds) == KILLS and max(seconds) < LIMIT,
        seed=SEED,
        seconds=time.time() - start,
        kills=len(seconds),
        exact=KILLS - len(failures),
        with_a_message=told,
        longest_end=round(max(seconds), 2),
        failures=failures,
        settings=SETTINGS,
        how="two gloo ranks in children forked after loading torch; one of them, drawn at random, "
        "killed at a time uniform over a run's length",
    )


if __name__ == "__main__":
    main()

"""SIGKILL at fifty random moments of a training run, resumed: final weights, history and metrics to
the byte."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import outcome
from tests import killing

SEED = 0
KILLS = 50


def main() -> None:
    start = time.time()
    draw = random.Random(SEED)
    failures: list[str] = []
    kills = runs = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killing.duration_of(folder / "first", killing.SMALL)  # what is loaded lazily is loaded
        reference = folder / "reference"
        duration = killing.duration_of(reference, killing.SMALL)
        wanted = killing.state_of(reference)
        while kills < KILLS and runs < 10 * KILLS:
            runs += 1
            try:
                run, times = killing.killed_and_resumed(folder, killing.SMALL, duration, draw)
                kills += times
                changed = [
                    file
                    for file, content in killing.state_of(run).items()
                    if content != wanted[file]
                ]
                if changed:
                    failures.append(f"{run.name}: other {', '.join(changed)}")
            except (AssertionError, OSError) as error:
                failures.append(f"{type(error).__name__}: {error}")
    outcome.write(
        "run_kills",
        wanted="50 kills, final weights, history and metrics to the byte",
        passed=not failures and kills >= KILLS,
        seed=SEED,
        seconds=time.time() - start,
        kills=kills,
        runs=runs,
        identical=runs - len(failures),
        failures=failures[:20],
        settings=killing.SMALL,
        how="the command line in a child forked after loading torch, killed once or twice at "
        "times uniform over a run's length",
    )


if __name__ == "__main__":
    main()

"""Eight processes that want one run name at once, a hundred rounds: no mixed folder, no lost
run."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import outcome
from tests import killing

from advbayes.runs import Run

ROUNDS, PROCESSES = 100, 8
SETTINGS = killing.SMALL | {"epochs": "0.2"}


def main() -> None:
    start = time.time()
    failures: list[str] = []
    trained = refused = 0
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        killing.duration_of(Path(name) / "reference", SETTINGS)
        wanted = killing.state_of(Path(name) / "reference")
        for number in range(ROUNDS):
            folder = Path(name) / f"round{number}"
            folder.mkdir()
            os.chdir(folder)
            named = number % 2 == 0  # by turns all ask for one folder, or for the next free name
            out = ["--out", "run"] if named else []
            children = [
                killing.start(["train", *killing.flags(SETTINGS), *out, "--quiet"])
                for _ in range(PROCESSES)
            ]
            codes = sorted(killing.wait(child) for child in children)
            os.chdir(home)
            runs = sorted(path.parent for path in folder.glob("**/config.toml"))
            if codes != ([0] + [2] * (PROCESSES - 1) if named else [0] * PROCESSES):
                failures.append(f"round {number}: exit codes {codes}")
            if len(runs) != codes.count(0):
                failures.append(
                    f"round {number}: {len(runs)} runs for {codes.count(0)} that ended well"
                )
            for run in runs:
                same = (
                    Run(run).status == "trained"
                    and killing.state_of(run) == wanted
                    and not (run / ".lock").exists()
                )
                if not same:
                    failures.append(f"round {number}: {run.name} is not what one process makes")
            trained, refused = trained + codes.count(0), refused + codes.count(2)
    outcome.write(
        "run_rivals",
        wanted="100 rounds of 8 processes: no mixed folder, no lost run",
        passed=not failures,
        seed=None,
        seconds=time.time() - start,
        rounds=ROUNDS,
        processes=PROCESSES,
        trained=trained,
        refused=refused,
        failures=failures[:20],
    )


if __name__ == "__main__":
    main()

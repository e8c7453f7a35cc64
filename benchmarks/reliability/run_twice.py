"""Two runs of one seed for each defense: the same weights and report; evaluations killed and
resumed: the same records."""

from __future__ import annotations

import contextlib
import io
import json
import random
import signal
import tempfile
import time
from pathlib import Path

import outcome
from tests import killing

from advbayes.cli import main as advbayes

SEED = 0
DEFENSES = ("none", "noise", "at", "os", "os50", "mix", "pgd", "trades", "alp", "nn", "nn50")
EVALUATION_KILLS = 10


def told(argv: list[str]) -> dict[str, object]:
    """The JSON of a command."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = advbayes([*argv, "--json"])
    assert code == 0, (argv, code)
    found: dict[str, object] = json.loads(said.getvalue())
    return found


def main() -> None:
    start = time.time()
    failures: list[str] = []
    weights: dict[str, str] = {}
    few = [
        "--attack",
        "pgd",
        "--attack",
        "ent",
        "--eps",
        "0.5",
        "--num",
        "60",
        "--steps",
        "10",
        "--thetas",
        "3",
        "--batch-size",
        "10",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for defense in DEFENSES:
            settings = killing.SMALL | {"defense": defense, "epochs": "1", "attack_steps": "2"}
            both = [
                told(
                    [
                        "train",
                        *killing.flags(settings),
                        "--out",
                        str(folder / f"{defense}{turn}"),
                        "--quiet",
                    ]
                )
                for turn in "ab"
            ]
            weights[defense] = str(both[0]["weights"])
            if both[0]["weights"] != both[1]["weights"] or both[0]["metrics"] != both[1]["metrics"]:
                failures.append(f"{defense}: weights or metrics differ")
        reports = []
        for turn in "ab":
            told(["evaluate", str(folder / f"mix{turn}"), *few, "--name", "table"])
            report = told(["report", str(folder / f"mix{turn}"), "--thetas", "3"])
            reports.append(str(report["sha256"]))
        if reports[0] != reports[1]:
            failures.append(f"the reports differ: {reports}")
        draw, kills = random.Random(SEED), 0
        whole = folder / "mixa" / "evaluation" / "table"
        began = time.monotonic()
        killing.wait(killing.start(["evaluate", str(folder / "mixb"), *few, "--name", "timed"]))
        length = time.monotonic() - began
        for number in range(10 * EVALUATION_KILLS):
            argv = ["evaluate", str(folder / "mixb"), *few, "--name", f"killed{number}"]
            kills += (
                killing.signalled(argv, signal.SIGKILL, draw.uniform(0, length))[0]
                == -signal.SIGKILL
            )
            code = killing.wait(killing.start(argv))
            parts = folder / "mixb" / "evaluation" / f"killed{number}"
            same = (
                code == 0
                and (parts / "records.jsonl").read_bytes() == (whole / "records.jsonl").read_bytes()
            )
            if not same:
                failures.append(f"evaluation {number}: exit code {code}, records differ")
            if kills >= EVALUATION_KILLS:
                break
    outcome.write(
        "run_twice",
        wanted="identical SHA-256 of weights and of the report's JSON; killed evaluations end "
        "with the same records",
        passed=not failures and kills >= EVALUATION_KILLS,
        seed=SEED,
        seconds=time.time() - start,
        weights=weights,
        report=reports[0],
        evaluation_kills=kills,
        failures=failures[:20],
    )


if __name__ == "__main__":
    main()

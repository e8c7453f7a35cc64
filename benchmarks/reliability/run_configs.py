"""Sixty bad configurations: each refused in under two seconds, naming key and range, and nothing
started."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import outcome
from tests.bad_configs import BAD

LIMIT = 2.0


def main() -> None:
    start = time.time()
    failures: list[str] = []
    slowest, busiest = 0.0, 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (text, key, wanted) in enumerate(BAD):
            assert isinstance(text, str)
            (folder / "bad.toml").write_text(text)
            began, used = time.monotonic(), time_of_children()
            done = subprocess.run(
                [sys.executable, "-m", "advbayes", "train", "--config", "bad.toml", "--out", "run"],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            slowest, busiest = (
                max(slowest, time.monotonic() - began),
                max(busiest, time_of_children() - used),
            )
            named = done.stderr.startswith(f"advbayes: {key}:") and wanted in done.stderr
            if done.returncode != 2 or not named or done.stdout or "Traceback" in done.stderr:
                failures.append(f"{number}: {text!r}: {done.returncode}: {done.stderr[-300:]}")
            if {path.name for path in folder.iterdir()} != {"bad.toml"}:
                failures.append(f"{number}: {text!r}: something was started")
    outcome.write(
        "run_configs",
        wanted="60 refused in under 2 s, naming key and range, nothing started",
        passed=not failures and slowest < LIMIT,
        seed=None,
        seconds=time.time() - start,
        configs=len(BAD),
        refused=len(BAD) - len(failures),
        slowest_seconds=round(slowest, 2),
        most_processor_seconds=round(busiest, 2),
        failures=failures[:20],
    )


def time_of_children() -> float:
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()

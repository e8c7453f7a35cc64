"""The path of a new user, walked and timed: clone, demo, report, the Python lines, a table of one's
own with text and missing values, evaluate, audit, predict in another process.

    python benchmarks/first_contact.py      writes benchmarks/results/first_contact.json

Seconds are those of the processor, children included, one thread; the installation is not counted.
`docs/first-contact.md` shows them.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import random
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "first_contact.json"
ROWS = 600


def write_table(path: Path, first: int, num: int, *, labelled: bool = True) -> None:
    """Rows such as those of the page: a tenth of the ages and doses is missing."""
    draw = random.Random(first)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        header = ["id", "age", "sex", "dose", "city"]
        writer.writerow(header + ["outcome"] * labelled)
        for row in range(first, first + num):
            age, dose = draw.gauss(50, 12), draw.gauss(2.5, 0.8)
            sex, city = draw.choice(("male", "female")), draw.choice(("Oslo", "Rom", "Wien"))
            risk = 0.06 * (age - 50) + 1.2 * (dose - 2.5) + (0.5 if city == "Rom" else 0.0)
            risk += draw.gauss(0, 0.5)
            outcome = "healthy" if risk < 0.3 else "ill" if risk < 1.8 else "critical"
            cells = [
                row,
                "" if draw.random() < 0.1 else f"{age:.0f}",
                sex,
                "NA" if draw.random() < 0.1 else f"{dose:.2f}",
                city,
            ]
            writer.writerow(cells + [outcome] * labelled)


def timed(command: list[str], folder: Path, settings: dict[str, str]) -> tuple[float, str]:
    """Processor seconds and what was printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=folder, env=settings, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, done.stdout + done.stderr


def python_lines(page: Path) -> str:
    """The first block of Python of the page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        clone = folder / "advbayes"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        write_table(folder / "patients.csv", 0, ROWS)
        write_table(folder / "new.csv", ROWS, 5, labelled=False)
        settings = {**os.environ, "PYTHONPATH": str(clone / "src"), "OMP_NUM_THREADS": "1"}
        run, advbayes = "runs/patients", [sys.executable, "-m", "advbayes"]
        table = ["--data", "patients.csv", "--target", "outcome", "--drop", "id", "--out", run]
        walked = {
            "demo": [*advbayes, "demo"],
            "python": [sys.executable, "-c", python_lines(clone / "docs" / "first-contact.md")],
            "train": [*advbayes, "train", *table],
            "evaluate": [*advbayes, "evaluate", run],
            "audit": [*advbayes, "audit", run],
            "report": [*advbayes, "report", run],
            "predict": [*advbayes, "predict", run, "new.csv", "--out", "answers.csv"],
        }
        seconds, said = {}, {}
        for step, command in walked.items():
            spent, said[step] = timed(command, folder, settings)
            seconds[step] = round(spent, 1)
            print(f"{step}: {seconds[step]} s", flush=True)
        assert (folder / "demo-report" / "report.html").is_file()
        assert len((folder / "answers.csv").read_text().splitlines()) == 6
        counts = [line.rsplit(",", 1)[1] for line in (folder / "patients.csv").read_text().split()]
        level = re.search(r"\blevel ([A-D])\b", said["audit"])
        result = {
            "command": "python benchmarks/first_contact.py",
            "machine": f"{platform.machine()}, Python {platform.python_version()}, one thread",
            "unit": "processor seconds",
            "rows": ROWS,
            "rarest": min(counts.count(name) for name in set(counts[1:])),
            "level": level[1] if level else None,
            "seconds": seconds,
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        print(said["train"], said["evaluate"], said["audit"], sep="\n")


if __name__ == "__main__":
    main()

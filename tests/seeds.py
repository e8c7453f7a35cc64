"""The random tests with other seeds: no test may pass by its seed.

    python -m tests.seeds 7 11 23                 every test file, with each of these shifts
    python -m tests.seeds 7 --files test_attacks  these alone
    python -m tests.seeds --table                 runs nothing, writes the page again

Ten minutes or more for each shift, one process at a time. Adds a row for each run to
benchmarks/results/seeds.json and makes the tables of seeds.md beside it, below the text that is
written by hand. What has a row for this commit is not run again, unless with --again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RECORDS, PAGE = (ROOT / "benchmarks" / "results" / f"seeds.{kind}" for kind in ("json", "md"))
HAND = "<!-- what follows is written by tests/seeds.py -->\n"  # what precedes it is not touched


def git(*asked: str) -> str:
    return subprocess.check_output(["git", *asked], text=True, cwd=ROOT).strip()


def commit() -> str:
    changed = git("status", "--porcelain", "src", "tests")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def counted(report: Path) -> dict[str, Any]:
    """What ran and what fell, by pytest's own report; what was skipped has not run."""
    ran, fell = 0, list[str]()
    for case in ElementTree.parse(report).iter("testcase"):  # of a run of our own
        kinds = {part.tag for part in case}
        ran += "skipped" not in kinds
        if kinds & {"failure", "error"}:
            file = (case.get("classname") or case.get("name") or "").split(".")[1]
            fell.append(f"{file}::{case.get('name')}")
    return {"ran": ran, "fell": sorted(set(fell))}


def run(shift: int, files: list[str]) -> dict[str, Any]:
    """One run of pytest over those files, or over all, with every seed shifted."""
    row: dict[str, Any] = {"shift": shift, "commit": commit(), "files": files}
    began, surroundings = time.monotonic(), {**os.environ, "ADVBAYES_TEST_SEED": str(shift)}
    paths = [f"tests/{name}.py" for name in files] or ["tests"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}", *paths],
            cwd=ROOT,
            env=surroundings,
        )
        return row | counted(report) | {"seconds": round(time.monotonic() - began)}


def tables(rows: list[dict[str, Any]]) -> str:
    """All runs; and of each test that fell in one, where it held afterwards with that shift."""
    lines = ["| shift | commit | test files | ran | fell | minutes |", "|---|---|---|---|---|---|"]
    fell: dict[str, dict[int, bool]] = {}  # by test and shift: whether it has held since
    for row in rows:
        some = len(row["files"]) or "all"
        cells = [row["shift"], row["commit"], some, row["ran"], len(row["fell"])]
        lines.append("| " + " | ".join(map(str, [*cells, round(row["seconds"] / 60)])) + " |")
        for name, shifts in fell.items():
            if row["shift"] in shifts and (not row["files"] or name.split("::")[0] in row["files"]):
                shifts[row["shift"]] = True
        for name in row["fell"]:
            fell.setdefault(name, {})[row["shift"]] = False
    lines += ["", "| fell | at shift | held in the last run there |", "|---|---|---|"]
    for name, shifts in sorted(fell.items()):
        held = all(shifts.values()) or ", ".join(str(each) for each in shifts if shifts[each])
        at = ", ".join(map(str, shifts))
        lines.append(f"| `{name}` | {at} | {'yes' if held is True else held or 'no'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the random tests with other seeds.")
    parser.add_argument("shifts", nargs="*", type=int)
    parser.add_argument("--files", nargs="+", default=[], help="test files, without .py")
    parser.add_argument("--again", action="store_true", help="what has a row already, too")
    parser.add_argument("--table", action="store_true", help="only write the page again")
    asked = parser.parse_args()
    if bool(asked.shifts) == asked.table:
        parser.error("give shifts, or --table")
    rows: list[dict[str, Any]] = json.loads(RECORDS.read_text()) if RECORDS.exists() else []
    files, new = sorted(asked.files), list[dict[str, Any]]()
    for shift in asked.shifts:
        done = {(row["shift"], row["commit"]) for row in rows if row["files"] in ([], files)}
        if (shift, commit()) in done and not asked.again and not commit().endswith("-dirty"):
            continue
        new.append(run(shift, files))
        rows.append(new[-1])
        RECORDS.write_text(json.dumps(rows, indent=1) + "\n")
    hand = PAGE.read_text().partition(HAND)[0] if PAGE.exists() else "# Tests with other seeds\n\n"
    PAGE.write_text(hand + HAND + "\n" + tables(rows))
    return int(any(row["fell"] for row in new))


if __name__ == "__main__":
    sys.exit(main())

"""Deliberate bugs: each is planted in a copy of the package, and the tests must notice.

    python tests/mutations.py            all of them; writes benchmarks/results/mutations.{json,md}
    python tests/mutations.py PATTERN    those whose name contains PATTERN; writes nothing
    python tests/mutations.py --slips    those of `tests/slips.py`, by another hand than the tests'
    python tests/mutations.py --first    the test files named with a bug alone, not all the others
    python tests/mutations.py --reach    all tests that run the line changed, the quickest first
                                         (see `tests/reach.py`)

The bugs are in `tests/data/bugs.json`. Each is looked for first by the test that caught it last,
then in the test files named with it, then in all the others of `TESTS`. Every run is a fork of one
process that has imported torch already. At the end the tests that caught something run once on the
package as it is: one that fails there as well has caught nothing.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.reach import Reach  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
NAMES = """
test_likelihoods test_model test_balls test_contracts test_identities_attacks test_identities_limits
test_identities_proactive test_identities_reactive test_training test_calibration test_attacks
test_accelerated
"""
TESTS = NAMES.split()
SECONDS = 600  # of the processor, for one run of pytest; ten times as many on the clock


@dataclass(frozen=True)
class Bug:
    name: str
    file: str  # below src/advbayes
    old: str
    new: str
    tests: str  # where it should be caught first


def read(name: str) -> Any:
    """What is to be planted, from `tests/data`."""
    return json.loads((ROOT / "tests" / "data" / name).read_text(encoding="utf-8"))


BUGS = tuple(Bug(**bug) for bug in read("bugs.json"))


class InOrder:
    """A plugin: these tests alone, in this order."""

    def __init__(self, names: Iterable[str]) -> None:
        self.places = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.places]
        items.sort(key=lambda item: self.places[item.nodeid])


def first_failure(tree: Path, chosen: Sequence[str]) -> str | None:
    """Run pytest over the chosen files or tests in a fork, in that tree: the first that fails."""
    named = [name for name in chosen if "::" in name]
    files = dict.fromkeys(name.split("::")[0] for name in chosen)
    plugins = [InOrder(named)] if len(named) == len(chosen) else []
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 10))
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            os.chdir(tree)
            os.environ["PYTHONPATH"] = f"{tree / 'src'}:{tree}"
            sys.path[:] = [str(tree / "src"), str(tree), *(p for p in sys.path if p != str(ROOT))]
            sys.dont_write_bytecode = True
            code = 70  # what only a crash of pytest itself leaves
            options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header"]
            try:
                code = int(pytest.main([*options, *files], plugins=plugins))
            finally:
                sys.stdout.flush()
                os._exit(code)
        deadline = time.monotonic() + 10 * SECONDS
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(ended[1])
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return "no end"
        output.seek(0)
        text = output.read()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    if failed:
        return failed.group(1).removeprefix("tests/")
    return None if code in (0, 4, 5) else f"collection ({code})"  # 4 and 5: no such test any more


def copied(tree: Path) -> None:
    """All that the tests read, without copying a byte."""
    kept_out = shutil.ignore_patterns(".git", ".venv", ".reach", "*_cache", "__pycache__", "_build")
    shutil.copytree(ROOT, tree, ignore=kept_out, copy_function=os.link)


def run(bug: Bug, last: dict[str, str], first: bool, reach: Reach | None) -> dict[str, Any]:
    """Plant the bug in a copy and run the tests until one fails."""
    began = time.monotonic()
    row: dict[str, Any] = {"bug": bug.name, "file": bug.file, "caught_by": None}
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as folder:
        tree = Path(folder) / "tree"
        copied(tree)
        path = tree / "src" / "advbayes" / bug.file
        text = path.read_text()
        if bug.old not in text:
            return {**row, "note": "the line to change is not there"}
        path.unlink()  # a link to the file itself
        path.write_text(text.replace(bug.old, bug.new, 1))
        named = bug.tests.split()
        steps = (
            [named] if first or reach else [named, [name for name in TESTS if name not in named]]
        )
        runs = [[f"tests/{name}.py" for name in names] for names in steps]
        if reach is not None:
            runs.insert(0, within(reach.tests(bug.file, bug.old), reach.seconds))
        if "::" in last.get(bug.name, ""):
            runs.insert(0, [last[bug.name]])
        for chosen in runs:
            row["caught_by"] = first_failure(tree, chosen) if chosen else None
            if row["caught_by"]:
                break
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def within(tests: list[str], seconds: dict[str, float]) -> list[str]:
    """As many of them, from the first on, as are expected to end in time."""
    ends = itertools.accumulate(seconds.get(name, 0.0) for name in tests)
    return [name for name, end in zip(tests, ends, strict=True) if end < SECONDS / 2]


def record(name: str, command: str, title: str, rows: list[dict[str, Any]]) -> None:
    """Write the table and the rows behind it."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    caught = sum(row["caught_by"] is not None for row in rows)
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {
        "command": command,
        "commit": commit,
        "caught": caught,
        "planted": len(rows),
        "rows": rows,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    table = "\n".join(
        f"| {row['bug']} | `{row['file']}` | {row['caught_by'] or '**not caught**'} |"
        for row in rows
    )
    (RESULTS / f"{name}.md").write_text(
        f"# {title}\n\n{caught} of {len(rows)} caught, at commit {commit} (`{command}`).\n\n"
        f"| bug | planted in | caught by |\n|---|---|---|\n{table}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant deliberate bugs; the tests must notice.")
    parser.add_argument("pattern", nargs="?", default="", help="only bugs with this in their name")
    parser.add_argument("--slips", action="store_true", help="the list of tests/slips.py")
    parser.add_argument("--first", action="store_true", help="only the test files named with a bug")
    parser.add_argument("--reach", action="store_true", help="all tests that run the line changed")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))
    for heavy in ("torch", "torch.distributions", "numpy", "scipy.stats", "sklearn", "pytest"):
        importlib.import_module(heavy)

    name, bugs = "mutations", BUGS
    if asked.slips:
        name, bugs = "slips", importlib.import_module("tests.slips").SLIPS
    chosen = [bug for bug in bugs if asked.pattern in bug.name]
    before = RESULTS / f"{name}.json"
    rows = json.loads(before.read_text())["rows"] if before.exists() else []
    last = {row["bug"]: f"tests/{row['caught_by']}" for row in rows if row["caught_by"]}

    rows = []
    reach = Reach() if asked.reach else None
    with multiprocessing.get_context("fork").Pool(asked.workers) as pool:
        for row in pool.imap(partial(run, last=last, first=asked.first, reach=reach), chosen):
            rows.append(row)
            found = row["caught_by"] or f"NOT CAUGHT {row.get('note', '')}"
            print(f"{len(rows):3}/{len(chosen)}  {row['bug']}: {found}", flush=True)
    where = {row["caught_by"] for row in rows if "::" in (row["caught_by"] or "")}
    while where and (wrong := first_failure(ROOT, [f"tests/{test}" for test in where])):
        print(f"{wrong} fails on the package as it is: it catches nothing")
        where.discard(wrong)
        for row in rows:
            if row["caught_by"] == wrong:
                row["caught_by"] = None
    caught = sum(row["caught_by"] is not None for row in rows)
    print(f"{caught} of {len(rows)} caught")
    if not asked.pattern and not asked.first:
        command = "python tests/mutations.py" + " --slips" * asked.slips + " --reach" * asked.reach
        record(name, command, "Slips by another hand" if asked.slips else "Deliberate bugs", rows)
    return 0 if caught >= len(rows) - 1 else 1


if __name__ == "__main__":
    sys.exit(main())

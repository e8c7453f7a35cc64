"""Which tests run which line, and how long each takes: so that a planted bug meets all tests that
could notice it, the quickest first, and no others.

    python -m tests.reach          runs the suite once under coverage (twice its usual time); writes
                                   .reach/, which `python tests/mutations.py --reach` reads

Needs pytest-cov. What only another process runs is not seen.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".reach"
SETTINGS = "[run]\nsource = src/advbayes\nrelative_files = true\n"


class Seconds:
    """A plugin that writes down how long each test took."""

    def __init__(self, path: Path) -> None:
        self.path, self.each = path, dict[str, float]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.each.get(report.nodeid, 0.0)
        self.each[report.nodeid] = round(before + report.duration, 4)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.each))


@dataclass(frozen=True)
class Reach:
    """What one run of the suite under coverage found."""

    folder: Path = FOLDER

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Of each test, by its name."""
        return dict(json.loads((self.folder / "seconds.json").read_text()))

    @cached_property
    def _data(self) -> Any:
        import coverage

        data = coverage.CoverageData(str(self.folder / "coverage"))
        data.read()
        return data

    def tests(self, file: str, old: str) -> list[str]:
        """The tests that run the statements of `file` (below the package) in which `old` stands,
        the quickest first; where that is at import, those that run anything of the file."""
        text = (ROOT / "src" / "advbayes" / file).read_text()
        first = text[: text.index(old)].count("\n") + 1
        wanted = _statements(text, first, first + old.count("\n"))
        (measured,) = (name for name in self._data.measured_files() if name.endswith(f"/{file}"))
        contexts: dict[int, list[str]] = self._data.contexts_by_lineno(measured)
        found = _names(contexts.get(line, ()) for line in wanted) or _names(contexts.values())
        return sorted(found, key=lambda name: self.seconds.get(name, 0.0))


def _names(contexts: Iterable[Iterable[str]]) -> set[str]:
    return {name.split("|")[0] for each in contexts for name in each if name}


def _statements(text: str, first: int, last: int) -> set[int]:
    """The lines of the smallest statements that hold the lines from first to last; of a compound
    one those of its head."""
    lines: set[int] = set()
    for line in range(first, last + 1):
        holding = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)
        ]
        if not holding:
            continue
        smallest = max(holding, key=lambda node: node.lineno)
        end = smallest.end_lineno or line
        body = getattr(smallest, "body", [])
        if isinstance(body, list) and body:
            end = max(smallest.lineno, body[0].lineno - 1)
        lines |= set(range(smallest.lineno, end + 1))
    return lines


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    settings = FOLDER / "coveragerc"
    settings.write_text(f"{SETTINGS}data_file = {FOLDER / 'coverage'}\n")
    options = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    code = pytest.main(["-q", "-n", "2", *options], plugins=[Seconds(FOLDER / "seconds.json")])
    sys.exit(code)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()

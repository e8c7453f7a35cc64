"""The README's code runs as printed."""

from __future__ import annotations

from pathlib import Path

from tests import forking
from tests.test_docs import blocks, same

README = Path(__file__).parents[1] / "README.md"


def test_quickstart_runs_as_printed() -> None:
    ((block, promised),) = blocks(README.read_text())
    assert len([line for line in block.splitlines() if line]) <= 6
    done = forking.ran(block, anew=True)
    assert done.returncode == 0, done.stderr
    assert promised is not None
    assert same(done.stdout, promised), done.stdout
    for line in done.stdout.splitlines():
        clean, attacked = map(float, line.split()[1:])
        assert attacked < clean

"""The README's code runs as printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.test_docs import blocks, same

README = Path(__file__).parents[1] / "README.md"


def test_quickstart_runs_as_printed(tmp_path: Path) -> None:
    ((block, promised),) = blocks(README.read_text())
    assert len([line for line in block.splitlines() if line]) <= 6
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert promised is not None
    assert same(done.stdout, promised), done.stdout
    for line in done.stdout.splitlines():
        clean, attacked = map(float, line.split()[1:])
        assert attacked < clean

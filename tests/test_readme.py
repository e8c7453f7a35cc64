"""The README's code runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_quickstart_runs_as_printed(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    accuracies = {
        row[1]: float(row[3])
        for row in (line.split() for line in done.stdout.splitlines())
        if row[:1] == ["predict"]
    }
    assert accuracies["clean"] > 0.9, done.stdout
    assert 0.2 < accuracies["worst"] < accuracies["clean"], done.stdout


def test_every_linked_page_exists() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", README.read_text()):
        assert (README.parent / link).exists(), link

"""The pages on writing a member of one's own are run as they stand: code blocks in order, tests
called."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import advbayes

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ("write-a-channel", "write-an-attack", "write-a-posterior")


def test_the_pages_run_as_they_stand(tmp_path: Path) -> None:
    """Each as a test file of its own, with warnings as errors."""
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
        assert sum(block.count("def test_") for block in blocks) == 1
        (tmp_path / f"test_{page.replace('-', '_')}.py").write_text("\n".join(blocks))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert "3 passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_a_screen(page: str) -> None:
    assert len((DOCS / f"{page}.md").read_text().splitlines()) <= 75


def test_every_method_of_a_ball_is_in_its_table() -> None:
    """With the names of its arguments in their order."""
    text = (DOCS / "write-an-attack.md").read_text()
    for name, method in inspect.getmembers(advbayes.Ball, inspect.isfunction):
        if not name.startswith("_"):
            names = [
                key
                for key, p in inspect.signature(method).parameters.items()
                if p.kind is p.POSITIONAL_OR_KEYWORD
            ]
            assert f"`{name}({', '.join(names[1:])}" in text, name

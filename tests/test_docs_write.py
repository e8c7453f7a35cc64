"""The pages on writing a member of one's own are run as they stand: code blocks in order, tests
called."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import advbayes

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ("write-a-channel", "write-an-attack", "write-a-posterior")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_as_it_stands(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a test file of its own, with warnings as errors."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    name = f"test_{page.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(str(tmp_path))
    (test,) = (each for key, each in vars(import_module(name)).items() if key.startswith("test_"))
    test()


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

"""What `tests/mutations.py` plants can be planted: each line is in the package, once."""

from __future__ import annotations

from pathlib import Path

import pytest

import advbayes

from .mutations import BUGS, Bug
from .slips import SLIPS

PACKAGE = Path(advbayes.__file__).parent


@pytest.mark.parametrize("bug", [*BUGS, *SLIPS], ids=lambda bug: bug.name)
def test_the_line_to_change_is_there_once(bug: Bug) -> None:
    assert (PACKAGE / bug.file).read_text().count(bug.old) == 1
    assert bug.old != bug.new
    for name in bug.tests.split():
        assert Path(__file__).with_name(f"{name}.py").exists()

"""Defaults are what they were when they were recorded (`python -m tests.defaults`)."""

from __future__ import annotations

import json

from .calls import differences
from .defaults import FILE, defaults


def test_a_default_is_what_it_was() -> None:
    """Of whatever was there; what is new is not held yet."""
    found, recorded = defaults(), json.loads(FILE.read_text())
    assert len(found.keys() & recorded.keys()) > 0.9 * len(recorded)
    for name in found.keys() & recorded.keys():
        known = recorded[name].keys() & found[name].keys()
        assert (
            differences(
                {key: found[name][key] for key in known},
                {key: recorded[name][key] for key in known},
            )
            == []
        ), name

"""Every keyword of every public function is read, and what the functions gave they still give."""

from __future__ import annotations

import inspect
import json
import secrets
from functools import lru_cache
from typing import Any

import pytest

import advbayes
from advbayes import (
    adapters,
    attacks,
    auditing,
    datasets,
    evaluation,
    metrics,
    predictive,
    purification,
)
from advbayes.seeds import GlobalStream

from .calls import FILE, MACHINE, answers, brief, differences, every, exported, machine

CALLS = every()
PUBLIC = (
    *(advbayes, adapters, attacks, auditing, datasets),
    *(evaluation, metrics, predictive, purification),
)
# both tests of a call in turn: in one process, which makes it once
EACH = pytest.mark.parametrize("name", CALLS, scope="module")
RECORDED = pytest.mark.unshifted("answers are recorded, and examples are those of the record")


@lru_cache(None)
def found(name: str) -> dict[str, Any]:
    with GlobalStream(secrets.randbits(40)):  # whoever draws from here is not what was recorded
        return answers(CALLS[name])


@lru_cache(None)
def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text())  # type: ignore[no-any-return]


@RECORDED
@EACH
def test_a_keyword_has_its_effect(name: str) -> None:
    """Each other value of `changed` gives another answer, those of `kept` the same."""
    each = CALLS[name]
    base = brief(found(name)[""]) if each.brief else found(name)[""]
    for keyword in each.changed:
        assert differences(found(name)[keyword], base, rel=1e-9), keyword
    for keyword, value in each.kept.items():
        assert differences(each(**{keyword: value}), found(name)[""]) == [], keyword


@RECORDED
@EACH
def test_a_call_gives_what_it_gave(name: str) -> None:
    """Whatever the state of the global generator."""
    if recorded()[MACHINE] != machine():
        pytest.skip(f"recorded with {recorded()[MACHINE]}, this is {machine()}")
    assert differences(found(name), recorded()[name]) == []


# keywords whose effect another file has: what is shown, where files are, other machines, ...
ELSEWHERE: dict[str, set[str]] = {
    "audit": {"certified", "claim", "progress", "seed"},
    "audit_records": {"correct", "worst"},
    "choose_bandwidth": {"y"},
    "decide": {"generator", "steps"},
    "evaluate": {"out", "progress"},
    "find_dataset": {"root"},
    "fit": {"compile", "progress", "state"},
    "from_function": {"numpy"},
    "from_torch": {"kind"},
    "load": {"device", "net", "own"},
    "load_dataset": {"download", "mirror", "progress", "root", "target", "verify"},
    "score": {"halves", "what"},
    "selective_task": {"progress", "seed"},
    "to_art": {"device"},
    "to_autoattack": {"device"},
    "to_foolbox": {"device"},
    "utility_under": {"generator"},
    "worst_case_utility": {"generator"},
}


def test_every_keyword_of_a_public_function_has_another_value() -> None:
    """A keyword that is added needs a call here, or a reason why not."""
    tried: dict[Any, set[str]] = {}
    for each in CALLS.values():
        tried.setdefault(each.of, set()).update(each.changed, each.kept)
    missing = {}
    for module in PUBLIC:
        for name in exported(module):
            function = getattr(module, name)
            if inspect.isfunction(function):
                parameters = inspect.signature(function).parameters.values()
                keywords = {each.name for each in parameters if each.default is not each.empty}
                missing[name] = keywords - tried.get(function, set())
    assert {name: keywords for name, keywords in missing.items() if keywords} == ELSEWHERE


def test_nothing_is_recorded_that_is_not_called() -> None:
    assert recorded().keys() - {MACHINE} == CALLS.keys()

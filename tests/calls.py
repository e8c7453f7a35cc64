"""Calls of the public functions, each with another value for every keyword; `tests/test_calls.py`
holds them to what they gave when they were recorded.

    python -m tests.calls            records anew what has changed, and says what that is
    python -m tests.calls PATTERN    those calls alone whose name contains PATTERN

A recorded number does not say that it is right, only that it is the same: what a change moves on
purpose is recorded again and read in the diff.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

from advbayes.likelihoods import GaussianMixture

FILE = Path(__file__).with_name("data") / "calls.json"
MODULES = tuple(f"tests.calls_{part}" for part in ("core", "users", "runs", "pages"))
MACHINE = "recorded on"  # rounding, and with it what many steps lead to, is a machine's own
LONGEST = 12  # numbers of one tensor that are kept one by one


@dataclasses.dataclass(frozen=True)
class Call:
    """A function, the arguments to begin from, another value for each keyword that must change the
    answer (`changed`), and one for each that must not (`kept`). Functions without arguments stand
    for what they make, anew for each call."""

    function: Callable[..., Any]
    given: Mapping[str, Any]
    changed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    look: Callable[[Any], Any] = lambda found: found
    brief: bool = False  # of the other values only sums and a hash are kept
    of: Callable[..., Any] | None = None  # the public function that it is about

    def __call__(self, **other: Any) -> Any:
        arguments = {name: _made(value) for name, value in {**self.given, **other}.items()}
        return plain(self.look(self.function(**arguments)))


CALLS: dict[str, Call] = {}


def exported(module: Any) -> list[str]:
    """The public names of a module or package."""
    kept = (k for k, v in vars(module).items() if k[0] != "_" and not inspect.ismodule(v))
    return getattr(module, "__all__", None) or sorted(kept)


def call(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    changed: Mapping[str, Any] | None = None,
    kept: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    look: Callable[[Any], Any] = lambda found: found,
    brief: bool = False,
    of: Callable[..., Any] | None = None,
) -> None:
    """Adds a call, named as its function unless it has a name of its own."""
    key = name or f"{function.__module__.removeprefix('advbayes.')}.{function.__qualname__}"
    assert key not in CALLS, key
    CALLS[key] = Call(function, given, changed or {}, kept or {}, look, brief, of or function)


def _made(value: Any) -> Any:
    is_maker = inspect.isfunction(value) and value.__name__ == "<lambda>"
    return value() if is_maker and not inspect.signature(value).parameters else value


def plain(value: Any) -> Any:
    """Whatever came, as JSON."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value
        case Tensor():
            return _numbers(value.detach())
        case np.ndarray() | np.generic():
            if value.dtype.kind in "OUS":
                return [plain(each) for each in value.tolist()]
            return _numbers(torch.as_tensor(value))
        case Categorical():
            return {"probs": plain(value.probs)}
        case GaussianMixture():
            parts = (value.means, value.scales, value.log_weights)
            return {"means": plain(parts[0]), "scales": plain(parts[1]), "log": plain(parts[2])}
        case Distribution():
            return {"mean": plain(value.mean), "variance": plain(value.variance)}
        case nn.Module():
            return {name: plain(each) for name, each in value.state_dict().items()}
        case Mapping():
            return {str(key): plain(each) for key, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case set() | frozenset():
            return sorted(map(str, value))
        case Path():
            return value.name
        case torch.Generator():
            return "generator"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        parts = {name: plain(each) for name, each in shown.items() if not name.startswith("_")}
        return {"": type(value).__name__, **parts}
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return type(value).__name__


def _numbers(value: Tensor) -> Any:
    """All of a small tensor; of a large one its shape, its sums and both ends."""
    flat = value.double().flatten().cpu()
    if len(flat) <= LONGEST:
        return value.double().tolist()
    turn = torch.arange(len(flat), dtype=torch.float64).mul(0.7).cos()  # notices another order
    sums = [float(flat.sum()), float(flat.square().sum()), float(flat @ turn)]
    return [list(value.shape), sums, flat[:3].tolist(), flat[-3:].tolist()]


def differences(found: Any, wanted: Any, place: str = "", rel: float = 2e-5) -> list[str]:
    """Where two answers differ by more than rounding."""
    if isinstance(found, bool) or isinstance(wanted, bool) or not _is_number(found, wanted):
        if isinstance(found, dict) and isinstance(wanted, dict):
            if found.keys() != wanted.keys():
                return [f"{place}: {sorted(found)} for {sorted(wanted)}"]
            return [d for k in found for d in differences(found[k], wanted[k], f"{place}.{k}", rel)]
        if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
            pairs = enumerate(zip(found, wanted, strict=True))
            return [d for i, (a, b) in pairs for d in differences(a, b, f"{place}[{i}]", rel)]
        return (
            []
            if found == wanted and type(found) is type(wanted)
            else [f"{place}: {found!r:.80} for {wanted!r:.80}"]
        )
    same = math.isclose(found, wanted, rel_tol=rel, abs_tol=1e-7)
    return (
        []
        if same or (math.isnan(found) and math.isnan(wanted))
        else [f"{place}: {found} for {wanted}"]
    )


def _is_number(*values: Any) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def every() -> dict[str, Call]:
    """All calls of all modules."""
    for module in MODULES:
        importlib.import_module(module)
    return importlib.import_module("tests.calls").CALLS  # type: ignore[no-any-return]


def answers(call_: Call) -> dict[str, Any]:
    """What a call gives as it is (""), and with each of its other values."""
    base = call_()
    others = {name: call_(**{name: value}) for name, value in call_.changed.items()}
    return {"": base} | {
        name: brief(other) if call_.brief else other for name, other in others.items()
    }


def brief(value: Any) -> dict[str, Any]:
    """The numbers of an answer in a few sums, and its words in a hash."""
    numbers: list[float] = []

    def walk(part: Any) -> Any:
        match part:
            case dict():
                return [[key, walk(part[key])] for key in sorted(part)]
            case list():
                return [walk(each) for each in part]
            case float() if math.isfinite(part):
                numbers.append(part)
                return 0
        return part

    words = hashlib.sha256(json.dumps(walk(value)).encode()).hexdigest()[:16]
    return {
        "words": words,
        "numbers": _numbers(torch.tensor([*numbers, *[0.0] * LONGEST], dtype=torch.float64)),
    }


def _short(value: Any) -> Any:
    """With nine digits of each number."""
    match value:
        case float():
            return float(f"{value:.9g}")
        case dict():
            return {key: _short(each) for key, each in value.items()}
        case list():
            return [_short(each) for each in value]
    return value


def machine() -> str:
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def main() -> None:
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    calls = every()
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    found = {name: value for name, value in before.items() if name in calls}
    for name, each in calls.items():
        if pattern in name:
            now = answers(each)
            if name not in before or differences(now, before[name]):
                print(name, *(differences(now, before[name])[:3] if name in before else ["new"]))
                found[name] = now
    found[MACHINE] = machine()
    lines = [f"{json.dumps(name)}: {json.dumps(_short(found[name]))}" for name in sorted(found)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

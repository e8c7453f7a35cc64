"""What every function, class and method with a public name takes where nothing is given.

    python -m tests.defaults         records it anew, in tests/data/defaults.json

`tests/test_calls.py` holds the defaults of what `__all__` names; these are those of all modules.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from pathlib import Path
from typing import Any

import advbayes

from .calls import plain

FILE = Path(__file__).with_name("data") / "defaults.json"
RUN_WHEN_IMPORTED = ("__main__", "page")


def defaults() -> dict[str, dict[str, Any]]:
    found = {}
    for each in pkgutil.walk_packages(advbayes.__path__, "advbayes."):
        if each.name.rpartition(".")[2] in RUN_WHEN_IMPORTED:
            continue
        module = importlib.import_module(each.name)
        for name, made in vars(module).items():
            if not name.startswith("_") and getattr(made, "__module__", "") == each.name:
                inner = vars(made).items() if inspect.isclass(made) else ()
                methods = {f"{name}.{key}": one for key, one in inner if not key.startswith("_")}
                for key, one in {name: made, **methods}.items():
                    if kept := taken(one):
                        found[f"{each.name}.{key}"] = kept
    return found


def taken(made: Any) -> dict[str, Any]:
    made = getattr(made, "__func__", made)  # of a class method
    is_class = inspect.isclass(made) and not issubclass(made, (BaseException, dict))
    if not inspect.isfunction(made) and not is_class:
        return {}
    given = inspect.signature(made).parameters.values()
    return {each.name: plain(each.default) for each in given if each.default is not each.empty}


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(kept)}" for name, kept in sorted(defaults().items()))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")

"""One switch for other seeds: with ADVBAYES_TEST_SEED=7 every generator that a test or the package
seeds is seeded with 7 more. A test that then fails had passed by luck: those that cannot be run so
(they compare with recorded numbers, or with another process, where nothing is shifted) are marked
`unshifted`, with the reason, and are skipped, as doctests are, whose numbers are printed.

Tests that fork many times come first: a fork takes 65 ms then, and three times as long when all
others have left something in memory. Temporary files are kept in memory where there is room: a
disk takes 10 ms for each that is to survive a power cut, which no test waits for. Each worker has
one thread, whoever starts them: two workers of two threads each wait for one another."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch as it is loaded
gc.disable()  # until all tests are collected: nothing of it is garbage

import numpy as np  # noqa: E402
import torch  # noqa: E402

SHIFT = int(os.environ.get("ADVBAYES_TEST_SEED", "0"))
MEMORY = Path("/dev/shm")

if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # of tmp_path and its like alone


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Of several workers none waits while another has tests left: the long ones are at the end."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("forks") is None)
    for item in items if SHIFT else ():
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.skip(reason="seeds are shifted: its numbers are printed"))
        elif mark := item.get_closest_marker("unshifted"):
            item.add_marker(pytest.mark.skip(reason=f"seeds are shifted: {mark.args[0]}"))


def pytest_collection_finish() -> None:
    gc.freeze()  # half a million objects that no collection has to walk through again
    gc.enable()


def shift(by: int, put: Callable[[object, str, object], None] = setattr) -> None:
    """Seed every generator that is made from now on with that much more."""
    plain, set_global, make_numpy = torch.Generator, torch.manual_seed, np.random.default_rng
    default = torch.default_generator

    class Shifted(plain):  # type: ignore[misc, valid-type]
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(seed + by)  # type: ignore[no-any-return]

    class Default:  # torch's own generator: whoever hands it on has to take it from elsewhere
        def __getattr__(self, name: str) -> Any:
            return getattr(default, name)

        def manual_seed(self, seed: int) -> torch.Generator:
            return default.manual_seed(seed + by)

    def default_rng(seed: Any = None) -> np.random.Generator:
        return make_numpy(seed + by if isinstance(seed, int) else seed)

    for name in ("__module__", "__qualname__"):  # of both the same is said
        setattr(Shifted, name, getattr(plain, name))
    put(torch, "Generator", Shifted)
    put(torch, "default_generator", Default())
    put(torch, "manual_seed", lambda seed: set_global(int(seed) + by))
    put(np.random, "default_rng", default_rng)


if SHIFT:
    shift(SHIFT)

"""One switch for other seeds: with ADVBAYES_TEST_SEED=7 every generator that a test or the package
seeds is seeded with 7 more. A test that then fails had passed by luck, unless it compares with
recorded numbers.

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


def pytest_collection_finish() -> None:
    gc.freeze()  # half a million objects that no collection has to walk through again
    gc.enable()


def shift(by: int, put: Callable[[object, str, object], None] = setattr) -> None:
    """Seed every generator that is made from now on with that much more."""
    plain, set_global, make_numpy = torch.Generator, torch.manual_seed, np.random.default_rng

    class Shifted(plain):  # type: ignore[misc, valid-type]
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(seed + by)  # type: ignore[no-any-return]

    def default_rng(seed: Any = None) -> np.random.Generator:
        return make_numpy(seed + by if isinstance(seed, int) else seed)

    put(torch, "Generator", Shifted)
    put(torch, "manual_seed", lambda seed: set_global(int(seed) + by))
    put(np.random, "default_rng", default_rng)


if SHIFT:
    shift(SHIFT)

"""One switch for other seeds: with ADVBAYES_TEST_SEED=7 every generator that a test or the package
seeds is seeded with 7 more. A test that then fails had passed by luck, unless it compares with
recorded numbers."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

SHIFT = int(os.environ.get("ADVBAYES_TEST_SEED", "0"))


class _Shifted(torch.Generator):
    def manual_seed(self, seed: int) -> torch.Generator:
        return super().manual_seed(seed + SHIFT)


def _shift() -> None:
    set_global, make_numpy = torch.manual_seed, np.random.default_rng

    def default_rng(seed: Any = None) -> np.random.Generator:
        return make_numpy(seed + SHIFT if isinstance(seed, int) else seed)

    torch.Generator = _Shifted  # type: ignore[misc]
    torch.manual_seed = lambda seed: set_global(int(seed) + SHIFT)
    np.random.default_rng = default_rng


if SHIFT:
    _shift()

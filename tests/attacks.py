"""Every attack on any predictor, small enough to be run often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from advbayes import (
    APGD,
    HardLabel,
    MinimumNorm,
    MultiStart,
    RandomSearch,
    Square,
    nll,
    one_step,
    pgd,
    pgd_plus,
    strong_suite,
)
from advbayes.attacks.balls import Ball
from advbayes.attacks.zeroth_order import ZerothOrder

EVERY: dict[str, Callable[[Ball], Any]] = {
    "one_step": one_step,
    "PGD": lambda ball: pgd(ball, 6, restarts=3),
    "PGD by a fixed step": lambda ball: pgd(ball, 6, step_size=0.25 * ball.eps),
    "PGD+": lambda ball: pgd_plus(ball, 3),
    "APGD": lambda ball: APGD(ball, nll, 8, targets=2),
    "MinimumNorm": lambda ball: MinimumNorm(ball, steps=8),
    "MultiStart": lambda ball: MultiStart(ball, steps=6, restarts=8),
    "Square": lambda ball: Square(ball, 30),
    "RandomSearch": lambda ball: RandomSearch(ball, 30),
    "HardLabel": lambda ball: HardLabel(ball, 6, probes=20),
    "ZerothOrder": lambda ball: ZerothOrder(pgd(ball, 4)),
    "strong_suite": lambda ball: strong_suite(ball, steps=5, queries=20),
}

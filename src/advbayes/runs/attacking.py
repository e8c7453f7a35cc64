"""Attacks by the names that the command line knows (`advbayes.runs.config.ATTACKS`)."""

from __future__ import annotations

from advbayes import attacks, checks
from advbayes.attacks import Suite
from advbayes.attacks.balls import Ball
from advbayes.purification.attacks import Annealed, NearestCentre
from advbayes.runs.config import ATTACKS
from advbayes.types import Attack

_CLASSES_ONLY = ("minimum_norm", "hard_label")


def make_attack(
    name: str,
    ball: Ball,
    *,
    task: str = "classification",
    steps: int = 50,
    restarts: int = 1,
    queries: int = 500,
) -> Attack:
    """A named attack; on a regression the squared error takes the place of the likelihood.

    >>> from advbayes import L2
    >>> make_attack("pgd_plus", L2(1.0), steps=10)
    PGD(ball=L2(1), stages=((nll, 5), (entropy, 5)), step_size=None, restarts=1, stop_at_success=False)
    """  # noqa: E501
    checks.choice("attack", name, tuple(ATTACKS))
    checks.count("steps", steps)
    regression = task == "regression"
    if regression and name in _CLASSES_ONLY:
        wanted = "attack must be one for regression"
        raise checks.InputError(f"{wanted}, got {name!r}, which wants classes")
    main = attacks.squared_error if regression else attacks.nll
    half = max(1, steps // 2)
    match name:
        case "pgd1":
            return attacks.one_step(ball, main)
        case "pgd":
            return attacks.pgd(ball, steps, main, restarts=restarts)
        case "pgd_plus":
            return attacks.PGD(ball, ((main, half), (attacks.entropy, half)), restarts=restarts)
        case "ent":
            return attacks.entropy_pgd(ball, steps, restarts=restarts)
        case "apgd":
            return attacks.APGD(ball, main if regression else attacks.margin, steps, restarts)
        case "minimum_norm":
            return attacks.MinimumNorm(ball, steps=steps, restarts=restarts)
        case "hard_label":
            return attacks.HardLabel(ball)
        case "square":
            return attacks.Square(ball, queries, main if regression else attacks.margin)
        case "random":
            return attacks.RandomSearch(ball, queries, main)
        case _:
            error = attacks.nll if name == "strong_nll" else attacks.squared_error
            return attacks.strong_suite(
                ball, steps=steps, restarts=restarts, queries=queries, error=error
            )


def adaptive_attack(ball: Ball, *, task: str = "classification", steps: int = 50) -> Attack:
    """The worst of the attacks that know what a purifier is made of."""
    annealed = Annealed(ball, steps=max(1, steps // 2))
    return Suite((annealed, NearestCentre(ball)) if task == "classification" else (annealed,))

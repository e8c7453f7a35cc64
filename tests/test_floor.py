"""The worst-case RMSE that no predictor is below: against the quadratic program as scipy solves it,
and against predictors whose worst case is known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import LinearConstraint, NonlinearConstraint, minimize
from torch import Tensor

from advbayes import L2, Linf
from advbayes.attacks.balls import Ball
from advbayes.checks import InputError
from advbayes.metrics import rmse_floor


def rows(num: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, dim, dtype=torch.float64, generator=generator)
    return x, torch.randn(num, dtype=torch.float64, generator=generator)


def solved(x: Tensor, y: Tensor, eps: float, clean: float | None, p: float) -> float:
    """The program itself in t and e, by trust regions."""
    num, apart = len(y), torch.cdist(x, x, p=p)
    pairs = [(i, j) for i in range(num) for j in range(num) if i != j]
    both = [(i, j) for i, j in pairs if i < j and apart[i, j] <= 2 * eps]
    onto = [(i, num + j) for i, j in pairs if clean is not None and apart[i, j] <= eps]
    left = np.zeros((len(both) + len(onto), 2 * num))
    gaps = np.zeros(len(left))
    for row, (i, j) in enumerate((*both, *onto)):
        left[row, [i, j]], gaps[row] = 1, abs(float(y[i] - y[j % num]))
    constraints: list[object] = [LinearConstraint(left, gaps)] if len(left) else []
    if clean is not None:
        constraints.append(
            NonlinearConstraint(lambda z: np.mean(z[num:] ** 2) - clean**2, -np.inf, 0)
        )
    start = np.concatenate([np.full(num, 3.0), np.zeros(num)])
    found = minimize(
        lambda z: np.mean(z[:num] ** 2),
        start,
        method="SLSQP",
        constraints=constraints,
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert found.success
    return math.sqrt(found.fun)


@pytest.mark.parametrize("clean", [None, 0.6, 0.2])
@pytest.mark.parametrize("eps", [0.4, 0.8, 1.6])
@pytest.mark.parametrize("ball", [L2, Linf])
def test_it_is_the_optimum_of_the_program(
    ball: Callable[[float], Ball], eps: float, clean: float | None
) -> None:
    for seed in range(2):
        x, y = rows(8, 2, seed)
        exact = solved(x, y, eps, clean, 2.0 if ball is L2 else math.inf)
        found = rmse_floor(x, y, ball(eps), clean_rmse=clean, steps=1500)
        assert found == pytest.approx(exact, abs=2e-3)
        assert found <= exact + 1e-6


def worst_of_steps(x: Tensor, y: Tensor, cuts: Tensor, levels: Tensor, eps: float) -> Tensor:
    """The largest error of a step function around each row: over the steps that it can reach."""
    low, high = (torch.searchsorted(cuts, x[:, 0] + side) for side in (-eps, eps))
    return torch.stack(
        [(levels[a : b + 1] - t).abs().max() for a, b, t in zip(low, high, y, strict=True)]
    )


def test_no_step_function_is_below_it() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = rows(40, 1)
    cuts = torch.linspace(-3, 3, 60, dtype=torch.float64)
    eps = 0.15
    floor = rmse_floor(x, y, L2(eps))
    least = math.inf
    for _ in range(100):
        width = float(torch.rand((), generator=generator))
        at = torch.cat([cuts[:1] - 0.05, cuts + 0.05])
        near = torch.exp(-((at[:, None] - x[:, 0]) / width).square() / 2) + 1e-12
        levels = (near * y).sum(1) / near.sum(1)
        errors = worst_of_steps(x, y, cuts, levels, eps)
        clean = (levels[torch.searchsorted(cuts, x[:, 0])] - y).square().mean().sqrt()
        worst = float(errors.square().mean().sqrt())
        least = min(least, worst)
        assert worst >= floor
        assert worst >= rmse_floor(x, y, L2(eps), clean_rmse=float(clean), steps=50)
    assert floor > 0.5 * least  # not an empty bound


def test_where_every_row_reaches_every_other_the_mean_is_best() -> None:
    x, y = torch.zeros(3, 2), torch.tensor([0.0, 1.0, 4.0])
    spread = float(y.std(correction=0))
    assert rmse_floor(x, y, L2(1.0), steps=3000) == pytest.approx(spread, abs=1e-3)
    assert rmse_floor(x, torch.ones(3), L2(1.0)) == 0.0
    assert rmse_floor(x[:1], y[:1], L2(1.0)) == 0.0


def test_it_grows_with_eps_and_falls_with_the_clean_error_allowed() -> None:
    x, y = rows(60, 2)
    over_eps = [rmse_floor(x, y, L2(eps)) for eps in (0.0, 0.1, 0.3, 1.0, 3.0)]
    steps = [after - before for before, after in pairwise(over_eps)]
    assert min(steps) > -1e-6  # where both are the mean's: up to where the ascents stopped
    assert sum(step > 0.05 for step in steps) >= 2
    assert over_eps[0] == 0.0
    spread = float(y.std(correction=0))
    assert over_eps[-1] <= spread * (1 + 1e-6)  # the mean reaches it
    over_clean = [rmse_floor(x, y, L2(1.0), clean_rmse=c) for c in (0.2, 0.5, 0.9)]
    assert over_clean == sorted(over_clean, reverse=True)
    assert over_clean[0] > over_eps[3] + 0.1


def test_what_cannot_be_touched_keeps_rows_apart() -> None:
    x, y = torch.tensor([[0.0, 0.0], [0.1, 1.0]]), torch.tensor([0.0, 2.0])
    assert rmse_floor(x, y, L2(5.0), steps=2000) == pytest.approx(1.0, abs=1e-3)
    held = torch.tensor([True, False])
    assert rmse_floor(x, y, L2(5.0, mask=held)) == 0.0
    same = torch.tensor([[0.0, 1.0], [0.1, 1.0]])
    assert rmse_floor(same, y, L2(5.0, mask=held), steps=2000) == pytest.approx(1.0, abs=1e-3)
    # column 1 says that column 0 is missing in the second row: it cannot leave its place
    ball = L2(5.0, indicators=((0, 1, 0.5),))
    assert rmse_floor(x, y, ball, clean_rmse=0.1) == 0.0
    scaled = L2(0.06, scale=torch.tensor([1.0, 10.0]))
    assert rmse_floor(x, y, scaled) == 0.0  # 0.1414 apart in these units, 0.12 in reach
    assert rmse_floor(x, y, L2(0.08, scale=torch.tensor([1.0, 10.0]))) > 0.9


def test_the_ball_is_that_of_the_dtype_of_x() -> None:
    y = torch.tensor([0.0, 1.0])
    # the nearest float32 to 0.7 is below it: inside the box all the same
    edge = torch.tensor([[0.7], [0.75]])
    assert rmse_floor(edge, y, L2(0.1, box=(0.7, 0.9))) == pytest.approx(0.5, abs=1e-3)
    # the nearest float32 to 0.3 is above it: no sign of a missing feature all the same
    known = torch.tensor([[0.0, 0.3], [0.1, 0.3]])
    ball = L2(1.0, indicators=((0, 1, 0.3),))
    assert rmse_floor(known, y, ball) == pytest.approx(0.5, abs=1e-3)
    # adjacent numbers: nothing lies between them that a predictor could be asked about
    adjacent = torch.tensor([[1e6], [1e6 + 0.0625]])
    assert rmse_floor(adjacent, y, L2(0.04)) == 0.0
    assert rmse_floor(adjacent.double(), y, L2(0.04)) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("unit", [1e-25, 1e-6, 1e6, 1e25])
@pytest.mark.parametrize("clean", [None, 0.4])
def test_it_goes_with_the_unit_of_y(unit: float, clean: float | None) -> None:
    x, y = rows(20, 2)
    usual = rmse_floor(x, y, L2(0.5), clean_rmse=clean)
    scaled = rmse_floor(x, unit * y, L2(0.5), clean_rmse=clean and unit * clean)
    assert usual > 0.1
    assert scaled == pytest.approx(unit * usual, rel=1e-4)


def test_bad_input_is_named() -> None:
    x, y = rows(4, 2)
    for call, message in (
        (lambda: rmse_floor(x, y[:3], L2(1.0)), "same N"),
        (lambda: rmse_floor(x, y, L2(1.0), clean_rmse=0.0), "clean_rmse"),
        (lambda: rmse_floor(x, y, L2(1.0), steps=0), "steps"),
        (lambda: rmse_floor(x * math.nan, y, L2(1.0)), "x must"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    assert rmse_floor(x, y[:, None], L2(1.0)) == rmse_floor(x, y, L2(1.0))

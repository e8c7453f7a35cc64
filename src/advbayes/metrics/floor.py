"""What no predictor can do: rows that can be moved onto each other cannot both be answered well."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks.balls import Ball

_SHARE = 0.3  # of the way that the price of clean error goes towards its best value at each step


@torch.no_grad()
def rmse_floor(
    x: Tensor,  # (N, *event)
    y: Tensor,  # (N,)
    ball: Ball,
    *,
    clean_rmse: float | None = None,
    steps: int = 500,
) -> float:
    """The RMSE on these rows, each moved to its worst point in the ball, that no predictor is
    below, whatever it is and however it was trained; with `clean_rmse`, none whose RMSE on the rows
    themselves is at most that.

    Two rows at most 2 eps apart have a point in reach of both, half-way. Whatever is answered
    there, the worst errors t of the two add up to |y_i - y_j| or more. Two rows at most eps apart
    can be moved onto each other, where the clean error e of one counts:

        minimise mean(t^2)   subject to   t_i + t_j >= |y_i - y_j|   if norm(x_i - x_j) <= 2 eps
                                          t_i + e_j >= |y_i - y_j|   if norm(x_i - x_j) <= eps
                                          mean(e^2) <= clean_rmse^2

    The answer is a value of the dual program after so many steps of ascent: each such value is a
    lower bound, so that fewer steps make it lower, not wrong. More rows make it higher. It takes
    memory for up to thirty matrices of N x N numbers, where all rows are in reach of each other:
    draw a few thousand rows at most. Of a predictor that draws its answers it bounds the root of
    the expected squared error.

    >>> from advbayes.attacks.balls import L2
    >>> x, y = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([0.0, 3.0, 7.0])
    >>> round(rmse_floor(x, y, L2(0.6)), 4)  # errors of 1.5 in two of three rows: sqrt(2 / 3) 1.5
    1.2247
    >>> rmse_floor(x, y, L2(0.4))
    0.0
    """
    x, y, budget = _checked(x, y, clean_rmse)
    steps = checks.count("steps", steps)
    shared, onto = _in_reach(x, ball)
    onto &= budget < math.inf
    gap = (y[:, None] - y).abs()
    unit = float(gap.max()) or 1.0
    best = _largest_dual((gap / unit).float(), shared, onto, budget / unit, steps)
    return unit * math.sqrt(best / len(y))


def _checked(x: Tensor, y: Tensor, clean_rmse: float | None) -> tuple[Tensor, Tensor, float]:
    x, y = (checks.finite(name, each).detach() for name, each in (("x", x), ("y", y)))
    x, y = x if x.is_floating_point() else x.double(), y.double()
    if y.shape not in ((len(x),), (len(x), 1)) or len(x) == 0:
        raise checks.InputError(
            f"x and y must hold the same N >= 1 rows, y in shape (N,), got {tuple(x.shape)} and "
            f"{tuple(y.shape)}"
        )
    if clean_rmse is None:
        return x, y.view(-1), math.inf
    return x, y.view(-1), checks.number("clean_rmse", clean_rmse, low=0, open_low=True)


def _in_reach(x: Tensor, ball: Ball) -> tuple[Tensor, Tensor]:  # (N, N) bool each
    """Which rows i < j have a point half-way in reach of both, rounded as x is: adjacent numbers
    have none between them. Which rows i can be moved onto which j."""
    ball.check(x)
    reach, wide = ball.reach(x), x.double()
    free = torch.ones_like(x, dtype=torch.bool) if reach is None else reach.expand_as(x)
    shared, onto = x.new_zeros(2, len(x), len(x), dtype=torch.bool)
    for row, movable in enumerate(free):
        moved, apart = x != x[row], ball.norm(wide - wide[row])
        kept = ~(moved & ~movable).flatten(1).any(1)
        onto[row] = kept & (apart <= ball.eps)
        kept &= ~(moved & ~free).flatten(1).any(1) & (apart <= 2.001 * ball.eps)
        others = row + 1 + kept[row + 1 :].nonzero()[:, 0]
        half = ((wide[others] + wide[row]) / 2).to(x.dtype).double()
        near = torch.maximum(ball.norm(half - wide[others]), ball.norm(half - wide[row]))
        shared[row, others] = near <= ball.eps
    return shared, onto.fill_diagonal_(False)


def _largest_dual(
    gap: Tensor, shared: Tensor, onto: Tensor, budget: float, steps: int
) -> float:  # all (N, N)
    """Accelerated projected ascent of the dual in the multipliers a of shared points and b of rows
    moved onto others; sum(a gap) + sum(b gap) - sum(t^2) - sqrt(N) clean_rmse norm(s), with
    t = (sums of a and b over all that holds t) / 2 and s the sums of b over all that holds e."""
    root = math.sqrt(len(gap)) * budget if budget < math.inf else 0.0
    (i, j), (k, l) = shared.nonzero().T, onto.nonzero().T
    gap_a, gap_b = gap[i, j], gap[k, l]

    def summed(at: Tensor, values: Tensor) -> Tensor:  # (N,)
        return values.new_zeros(len(gap)).index_add_(0, at, values)

    def worst(a: Tensor, b: Tensor) -> Tensor:
        return (summed(i, a) + summed(j, a) + summed(k, b)) / 2

    def dual(a: Tensor, b: Tensor) -> float:
        gained = (a * gap_a).sum() + (b * gap_b).sum() - worst(a, b).square().sum()
        return float(gained - root * summed(l, b).norm())

    a, b, price = torch.zeros_like(gap_a), torch.zeros_like(gap_b), 1.0
    degree, degree_clean = 2 * worst(a + 1, b + 1), summed(l, b + 1)
    rate = 2 / (degree[i] + degree[j])
    a_ahead, b_ahead, best, pace = a, b, 0.0, 1.0
    for _ in range(steps):
        t, e = worst(a_ahead, b_ahead), summed(l, b_ahead) / (2 * price)
        rate_clean = 2 / (degree[k] + (degree_clean / price)[l])
        a_next = (a_ahead + rate * (gap_a - t[i] - t[j])).clamp_min(0)
        b_next = (b_ahead + rate_clean * (gap_b - t[k] - e[l])).clamp_min(0)
        value = dual(a_next, b_next)
        pace, before = (1 + math.sqrt(1 + 4 * pace**2)) / 2, pace
        drive = (before - 1) / pace
        if value < best:  # too fast
            pace, drive = 1.0, 0.0
        best = max(best, value)
        a_ahead, b_ahead = a_next + drive * (a_next - a), b_next + drive * (b_next - b)
        a, b = a_next, b_next
        if root:
            target = float(summed(l, b).norm()) / (2 * root)
            price += _SHARE * (max(target, 1e-3) - price)
    return max(dual(a.double(), b.double()), 0.0)

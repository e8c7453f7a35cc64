"""Is one better than the other? Paired tests and the correction for asking often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

from torch import Tensor

from advbayes.checks import finite, number
from advbayes.metrics.intervals import (
    Estimate,
    Resampling,
    bootstrap,
    column,
    incomplete_beta,
    outcomes,
    same_length,
)


def mcnemar(
    first: Any,  # (N,) truth values
    second: Any,  # (N,) truth values of the same examples
) -> float:
    """Exact one-sided McNemar test: p of "`first` is true no more often than `second`".

    With n discordant pairs of which k have only `first` true, P(Binomial(n, 1/2) >= k).

    >>> mcnemar([1, 1, 1, 1, 0], [0, 0, 0, 0, 0])  # 4 of 4 discordant pairs
    0.0625
    """
    first, second = outcomes("first", first), outcomes("second", second)
    same_length(first=first, second=second)
    only_first, only_second = int((first > second).sum()), int((second > first).sum())
    discordant = only_first + only_second
    # in whole numbers, so that the p-value is exact
    ways = term = math.comb(discordant, only_first)
    for k in range(only_first, discordant):
        term = term * (discordant - k) // (k + 1)
        ways += term
    return ways / (1 << discordant)


def paired_difference(
    first: Any,  # (N,) scores
    second: Any,  # (N,) scores of the same examples
    **options: Unpack[Resampling],
) -> Estimate:
    """Mean of `first - second` over examples, resampled in pairs: `first` is lower if `high < 0`.

    >>> paired_difference([1.0, 2.0, 3.0], [0.5, 1.5, 2.5])
    Estimate(value=0.5, low=0.5, high=0.5, num=3, level=0.95)
    """
    return bootstrap(lambda rows: rows.mean(1), _difference(first, second), **options)


def _difference(first: Any, second: Any) -> Tensor:  # (N,)
    columns = {"first": column("first", first), "second": column("second", second)}
    for name, values in columns.items():
        finite(name, values)
    same_length(**columns)
    return columns["first"] - columns["second"]


def paired_t(
    first: Any,  # (K,), one value for each repetition
    second: Any,  # (K,) of the same repetitions
    *,
    overlap: float = 0.0,
) -> float:
    """One-sided paired t-test over repetitions: the p-value against "`first` is on average no lower
    than `second`".

    t = mean(d) / (sd(d) sqrt(1/K + overlap)) with K - 1 degrees of freedom. `overlap` is the ratio
    of test to training rows where every repetition divides the same rows anew (Nadeau and Bengio
    2003), 0 where the test set is a fixed one. With one repetition nothing is known, and the
    p-value is 1.

    >>> round(paired_t([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]), 4)
    0.0371
    """
    difference = _difference(first, second)
    number("overlap", overlap, low=0.0)
    num = len(difference)
    if num < 2:
        return 1.0
    spread = float(difference.std()) * math.sqrt(1 / num + overlap)
    mean = float(difference.mean())
    if spread == 0:
        return 1.0 if mean >= 0 else 0.0
    t, degrees = mean / spread, num - 1
    tail = 0.5 * incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)  # P(T > |t|)
    return tail if t < 0 else 1 - tail


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's step-down adjusted p-values, in the order given.

    Sorted, the i-th of m becomes max over j <= i of min(1, (m - j + 1) p_j).

    >>> holm([0.01, 0.04, 0.02])
    (0.03, 0.04, 0.04)
    """
    values = [number(f"p_values[{i}]", p, low=0.0, high=1.0) for i, p in enumerate(p_values)]
    adjusted, running = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        running = max(running, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = running
    return tuple(adjusted)

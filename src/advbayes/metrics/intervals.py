"""A number and how far it may be trusted: `Estimate`, binomial intervals, the bootstrap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, TypedDict

import torch
from torch import Tensor

from advbayes.checks import InputError, InputTypeError, choice, count, native, number
from advbayes.seeds import generator_for


@dataclass(frozen=True)
class Estimate:
    """A reduced score with its confidence interval, from `num` examples at confidence `level`.

    >>> Estimate(value=0.5, low=0.4, high=0.6, num=100, level=0.95)
    Estimate(value=0.5, low=0.4, high=0.6, num=100, level=0.95)
    """

    value: float
    low: float
    high: float
    num: int
    level: float

    def __post_init__(self) -> None:
        count("num", self.num)
        confidence_level(self.level)
        if not self.low <= self.value <= self.high:  # false for NaN too
            raise InputError(
                f"an Estimate needs low <= value <= high, got {self.low}, {self.value}, {self.high}"
            )


def confidence_level(level: float) -> float:
    """A level strictly between 0 and 1.

    >>> confidence_level(0.95)
    0.95
    """
    return number("level", level, low=0.0, high=1.0, open_low=True, open_high=True)


def column(name: str, values: Any) -> Tensor:  # (N,), float64 on the CPU
    """Per-example values (a tensor, an array, a list) as one float64 column without NaN; `(N, 1)`
    is taken as `(N,)`.

    >>> column("scores", [1, 2])
    tensor([1., 2.], dtype=torch.float64)
    """
    values = native(values)
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(
            f"{name} must be a tensor or an array of numbers", got=values
        ) from None
    if tensor.is_complex():
        raise InputTypeError(f"{name} must be real", got=tensor)
    if tensor is not values:  # a list once more: torch has rounded its floats to float32
        tensor = torch.as_tensor(values, dtype=torch.float64)
    if tensor.ndim == 2 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tensor.ndim != 1 or len(tensor) == 0:
        raise InputError(f"{name} must have shape (N,) with N >= 1", got=tensor)
    tensor = tensor.detach().cpu().double()
    if bool(tensor.isnan().any()):
        raise InputError(
            f"{name} must not be NaN, got {int(tensor.isnan().sum())} NaN of {len(tensor)} values"
        )
    return tensor


def outcomes(name: str, values: Any) -> Tensor:  # (N,), zeros and ones
    """Per-example truth values as a column of zeros and ones.

    >>> outcomes("correct", [True, False])
    tensor([1., 0.], dtype=torch.float64)
    """
    tensor = column(name, values)
    wanted = "hold True and False (or 1 and 0) only"
    return holding(name, tensor, (tensor == 0) | (tensor == 1), wanted)


def shares(name: str, values: Any) -> Tensor:  # (N,), in [0, 1]
    """Per-example truth values, or the share of several answers that were true (a stochastic
    predictor asked again).

    >>> shares("correct", [True, 0.3])
    tensor([1.0000, 0.3000], dtype=torch.float64)
    """
    tensor = column(name, values)
    wanted = "hold truth values or shares in [0, 1]"
    return holding(name, tensor, (tensor >= 0) & (tensor <= 1), wanted)


def holding(name: str, values: Tensor, fine: Tensor, wanted: str) -> Tensor:
    """The values, refused with their range unless all of them are fine."""
    if not bool(fine.all()):
        low, high = float(values.min()), float(values.max())
        raise InputError(f"{name} must {wanted}, got values in [{low:g}, {high:g}]")
    return values


def same_length(**columns: Tensor) -> None:
    """Columns that speak of the same examples have the same length.

    >>> same_length(a=torch.zeros(2), b=torch.zeros(3))
    Traceback (most recent call last):
    ...
    advbayes.checks.InputError: a and b must have one value per example each, got 2 and 3 values
    """
    lengths = [len(values) for values in columns.values()]
    if len(set(lengths)) > 1:
        got = " and ".join(map(str, lengths))
        raise InputError(
            f"{' and '.join(columns)} must have one value per example each, got {got} values"
        )


def normal_quantile(level: float) -> float:
    """z such that a standard normal lies within [-z, z] with probability `level`.

    >>> round(normal_quantile(0.95), 4)
    1.96
    """
    return NormalDist().inv_cdf(0.5 + 0.5 * confidence_level(level))


def wilson(successes: float, num: int, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a binomial proportion.

    `successes` may be fractional (shared ties, a fraction of outputs per example): the variance of
    a variable in [0, 1] with mean p is at most p(1-p), so the interval only gets wider than it need
    be.

    >>> low, high = wilson(8, 10)
    >>> round(low, 3), round(high, 3)
    (0.49, 0.943)
    """
    num = count("num", num)
    successes = number("successes", successes, low=0.0, high=num)
    p, z2 = successes / num, normal_quantile(level) ** 2
    centre = (p + z2 / (2 * num)) / (1 + z2 / num)
    half = math.sqrt(z2 * (p * (1 - p) / num + z2 / (4 * num**2))) / (1 + z2 / num)
    # min and max with p: rounding must not push the bound past the estimate at 0 and 1
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))


def proportion(values: Tensor, level: float = 0.95) -> Estimate:  # values (N,), in [0, 1]
    """The mean of truth values, or of the shares of several answers, with Wilson's interval.

    >>> proportion(torch.tensor([1.0, 0.0, 1.0, 1.0])).value
    0.75
    """
    num = len(values)
    total = min(float(values.sum()), num)  # the sum of shares is rounded
    return Estimate(total / num, *wilson(total, num, level=level), num, level)


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b) for a, b > 0; P(Binomial(n, x) >= k) =
    I_x(k, n - k + 1).

    >>> round(incomplete_beta(0.5, 2, 3), 12)
    0.6875
    """
    x = number("x", x, low=0.0, high=1.0)
    a, b = number("a", a, low=0.0, open_low=True), number("b", b, low=0.0, open_low=True)
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # the continued fraction converges fast only below this point
        return 1.0 - incomplete_beta(1.0 - x, b, a)
    log_front = (
        a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    )
    # modified Lentz evaluation of 1/(1 + d1/(1 + d2/(1 + ...))); it takes O(sqrt(max(a, b))) terms
    tiny = 1e-300  # in place of an exact zero
    c, d = 1.0, 1.0 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, 1000 + int(20 * math.sqrt(a + b))):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / ((1 + term * d) or tiny)
            c = (1 + term / c) or tiny
            value *= c * d
        if abs(c * d - 1) < 4e-16:
            return math.exp(log_front) * value / a
    raise ArithmeticError(f"incomplete_beta did not converge at x={x}, a={a}, b={b}")


def clopper_pearson(
    successes: int, num: int, *, level: float = 0.95, side: str = "both"
) -> tuple[float, float]:
    """The exact interval of a binomial proportion; `side="lower"` or `"upper"` spends all of 1 -
    level on that bound.

    >>> low, high = clopper_pearson(8, 10)
    >>> round(low, 4), round(high, 4)
    (0.4439, 0.9748)
    >>> clopper_pearson(100, 100, level=0.999, side="lower")[0] == 0.001 ** (1 / 100)
    True
    """
    num, successes = count("num", num), count("successes", successes, low=0)
    if successes > num:
        raise InputError(f"successes must be at most num = {num}, got {successes}")
    choice("side", side, ("both", "lower", "upper"))
    # rounded, so that level=0.999 means a tail of 0.001 and not 0.0010000000000000009
    tail = round(1 - confidence_level(level), 15) / (2 if side == "both" else 1)
    low = 0.0 if side == "upper" else _lower_bound(successes, num, tail)
    high = 1.0 if side == "lower" else 1.0 - _lower_bound(num - successes, num, tail)
    return low, high


@lru_cache(maxsize=4096)
def _lower_bound(successes: int, num: int, tail: float) -> float:
    """The p at which P(Binomial(num, p) >= successes) = tail, from below, by bisection."""
    if successes == 0:
        return 0.0
    if successes == num:
        return float(tail ** (1 / num))
    low, high = 0.0, 1.0
    while low < (middle := 0.5 * (low + high)) < high:
        if incomplete_beta(middle, successes, num - successes + 1) <= tail:
            low = middle
        else:
            high = middle
    return low


class Resampling(TypedDict, total=False):
    """How a bootstrap interval is made: its level (0.95), from how many resamples (1,000), drawn
    from which generator (absent: one keyed by (0, "bootstrap"))."""

    level: float
    num_resamples: int
    generator: torch.Generator | None


def resamples(
    *columns: Tensor,  # (N,) each, resampled together
    num_resamples: int = 1000,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[Tensor, ...]]:  # (R, N) each, `num_resamples` rows in all
    """Bootstrap resamples of the examples, as many at once as the memory allows; without a
    generator keyed by (0, "bootstrap"), so the same scores always give the same interval.

    >>> [rows.shape for (rows,) in resamples(torch.arange(5.0), num_resamples=3)]
    [torch.Size([3, 5])]
    """
    num_resamples = count("num_resamples", num_resamples, low=2)
    same_length(**{f"column {i}": values for i, values in enumerate(columns)})
    generator = generator_for(0, "bootstrap") if generator is None else generator
    num = len(columns[0])
    rows = max(1, 2**20 // num)
    for start in range(0, num_resamples, rows):
        shape = (min(rows, num_resamples - start), num)
        index = torch.randint(num, shape, generator=generator, device=generator.device).cpu()
        yield tuple(values[index] for values in columns)


def bootstrap(
    statistic: Callable[..., Tensor],  # columns of shape (R, N) -> (R,), one value per resample
    *columns: Tensor,  # (N,) each, resampled together
    level: float = 0.95,
    num_resamples: int = 1000,
    support: tuple[float, float] = (-math.inf, math.inf),
    generator: torch.Generator | None = None,
) -> Estimate:
    """Percentile bootstrap interval over examples, widened to hold the value; one example gives the
    whole `support`.

    >>> bootstrap(lambda scores: scores.mean(1), torch.tensor([1.0, 1.0, 1.0]))
    Estimate(value=1.0, low=1.0, high=1.0, num=3, level=0.95)
    """
    value = float(statistic(*(values[None] for values in columns)))
    if len(columns[0]) == 1:
        return Estimate(value, *support, 1, level)
    drawn = [
        statistic(*rows)
        for rows in resamples(*columns, num_resamples=num_resamples, generator=generator)
    ]
    low, high = quantiles(torch.cat(drawn), 0.5 - 0.5 * confidence_level(level), 0.5 + 0.5 * level)
    return Estimate(value, min(low, value), max(high, value), len(columns[0]), level)


def quantiles(values: Tensor, *levels: float) -> list[float]:
    """Empirical quantiles.

    >>> quantiles(torch.tensor([0.0, 1.0, 2.0]), 0.25, 0.5)
    [0.5, 1.0]
    """
    at = torch.tensor(levels, dtype=torch.float64)
    edges: list[float] = values.double().quantile(at).tolist()
    return edges

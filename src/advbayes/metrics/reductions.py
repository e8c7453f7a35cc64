"""From one score per example to one number with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from advbayes.checks import InputError, choice, count, native
from advbayes.metrics.intervals import (
    Estimate,
    Resampling,
    bootstrap,
    column,
    confidence_level,
    holding,
    normal_quantile,
    outcomes,
    proportion,
    quantiles,
    resamples,
    same_length,
    shares,
    wilson,
)


def accuracy(
    correct: Any,  # (N,) truth values
    *,
    level: float = 0.95,
) -> Estimate:
    """Fraction correct, with Wilson's interval.

    >>> accuracy([True, True, False, True]).value
    0.75
    """
    return proportion(outcomes("correct", correct), level)


def recall(
    correct: Any,  # (N,) truth values, or shares of several answers
    labels: Any,  # (N,) classes
    of: int,
    *,
    level: float = 0.95,
) -> Estimate:
    """The share of the examples of class `of` that are answered right, with Wilson's interval.

    >>> recall([1, 0, 1, 1], [0, 0, 1, 1], of=0).value
    0.5
    """
    hits = _by_class(correct, labels).get(of)
    if hits is None:
        raise InputError("of must be a class that occurs among the labels", got=of)
    return proportion(hits, level)


def balanced_accuracy(
    correct: Any,  # (N,) truth values, or shares of several answers
    labels: Any,  # (N,) classes
    *,
    level: float = 0.95,
) -> Estimate:
    """The mean of the recalls of the classes that occur; each end of the interval is the further
    of two.

    One adds the distances of each recall from its own Wilson bounds in quadrature, and is right
    where recalls differ; but a class without an error says nothing there about the upper end. The
    other is Wilson's for as many examples as give this variance where all recalls are alike. For
    one class both are Wilson's.

    >>> balanced_accuracy([1, 1, 1, 0], [0, 0, 0, 1]).value
    0.5
    """
    recalls = [proportion(hits, level) for hits in _by_class(correct, labels).values()]
    num = len(recalls)
    value = sum(each.value for each in recalls) / num
    below = math.hypot(*(each.value - each.low for each in recalls)) / num
    above = math.hypot(*(each.high - each.value for each in recalls)) / num
    alike = int(num**2 / sum(1 / each.num for each in recalls) + 1e-9)
    low, high = wilson(value * alike, alike, level=level)
    ends = max(0.0, min(low, value - below)), min(1.0, max(high, value + above))
    return Estimate(value, *ends, sum(each.num for each in recalls), level)


def _by_class(correct: Any, labels: Any) -> dict[int, Tensor]:
    correct, labels = shares("correct", correct), column("labels", labels)
    holding("labels", labels, labels == labels.round(), "hold whole numbers")
    same_length(correct=correct, labels=labels)
    return {int(label): correct[labels == label] for label in labels.unique().tolist()}


def coverage(
    inside: Any,  # (N,) or (N, D) truth values
    *,
    level: float = 0.95,
) -> Estimate:
    """Fraction of targets inside their interval, with Wilson's interval over examples (several
    outputs are averaged).

    `level` is that of the confidence interval, not the one that the prediction intervals claim.

    >>> coverage([[True, True], [True, False]]).value
    0.75
    """
    inside = torch.as_tensor(native(inside))
    if inside.ndim != 2 or inside.shape[1] == 1:
        return proportion(outcomes("inside", inside), level)
    return proportion(outcomes("inside", inside.flatten()).reshape(inside.shape).mean(1), level)


def mean(
    scores: Any,  # (N,), e.g. of nll, brier or crps
    *,
    method: str = "normal",
    **options: Unpack[Resampling],  # but for the level, for the bootstrap alone
) -> Estimate:
    """Mean score with a normal or bootstrap interval.

    An infinite score (an NLL where the probability was 0) makes the mean infinite, and rightly: an
    event that was seen has positive probability, so the expected score is infinite too and the
    interval has no width.

    >>> mean([1.0, 2.0, 3.0]).value
    2.0
    """
    scores = column("scores", scores)
    choice("method", method, ("normal", "bootstrap"))
    level = options.get("level", 0.95)
    if bool(scores.isinf().any()):
        return _infinite(scores, level)
    if method == "bootstrap":
        return bootstrap(lambda rows: rows.mean(1), scores, **options)
    num, value, z = len(scores), float(scores.mean()), normal_quantile(level)
    half = z * float(scores.std()) / math.sqrt(num) if num > 1 else math.inf
    return Estimate(value, value - half, value + half, num, level)


def _infinite(scores: Tensor, level: float) -> Estimate:
    value = float(scores.sum())
    if math.isnan(value):
        raise InputError("scores must not hold both +inf and -inf: their mean is undefined")
    return Estimate(value, value, value, len(scores), confidence_level(level))


def rmse(
    squared_errors: Any,  # (N,), non-negative
    **options: Unpack[Resampling],
) -> Estimate:
    """Root of the mean squared error, with a bootstrap interval.

    >>> rmse([9.0, 9.0, 9.0]).value
    3.0
    """
    squared_errors = column("squared_errors", squared_errors)
    if bool((squared_errors < 0).any()):
        raise InputError(
            f"squared_errors must be >= 0, got a minimum of {float(squared_errors.min()):g}"
        )
    if bool(squared_errors.isinf().any()):
        return _infinite(squared_errors, options.get("level", 0.95))
    support = (0.0, math.inf)
    return bootstrap(lambda rows: rows.mean(1).sqrt(), squared_errors, support=support, **options)


@dataclass(frozen=True)
class Bin:
    """One bar of a reliability diagram: confidences in [low, high], their mean, their accuracy.

    >>> Bin(0.5, 1.0, 0.7, Estimate(0.5, 0.2, 0.8, 10, 0.95)).confidence
    0.7
    """

    low: float
    high: float
    confidence: float
    accuracy: Estimate


def reliability(
    confidence: Any,  # (N,) in [0, 1]
    correct: Any,  # (N,) truth values, or shares of several answers
    *,
    bins: int = 15,
    binning: str = "equal_mass",
    level: float = 0.95,
) -> tuple[Bin, ...]:
    """The data of a reliability diagram, without its empty bins.

    Equal width: [i/bins, (i+1)/bins), low and high its edges. Equal mass: low and high are the
    confidences at its ends, and examples that tie across an edge share their accuracy, so
    that their order does not matter.

    >>> bars = reliability([0.25, 0.25, 0.75, 0.75], [0, 1, 1, 1], bins=2)
    >>> [(bar.confidence, bar.accuracy.value) for bar in bars]
    [(0.25, 0.5), (0.75, 1.0)]
    """
    confidence, correct, bins = _calibration(confidence, correct, bins, binning)
    index, confidence, correct = (
        rows[0] for rows in _assign(confidence[None], correct[None], bins, binning)
    )
    bars = []
    for i in torch.unique(index).tolist():
        inside = confidence[index == i]
        if binning == "equal_width":
            low, high = i / bins, (i + 1) / bins
        else:
            low, high = float(inside[0]), float(inside[-1])
        bars.append(Bin(low, high, float(inside.mean()), proportion(correct[index == i], level)))
    return tuple(bars)


def ece(
    confidence: Any,  # (N,) in [0, 1]
    correct: Any,  # (N,) truth values, or shares of several answers
    *,
    bins: int = 15,
    binning: str = "equal_mass",
    level: float = 0.95,
    num_resamples: int = 1000,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Expected calibration error, sum over bins of (n_b/N) |accuracy_b - confidence_b|, with a
    bootstrap interval.

    Noise counts as miscalibration: the estimate is biased upwards and its resamples twice over, so
    their lower quantile would almost never hold the truth of a calibrated predictor. By the
    triangle inequality the error of the estimate is at most the sum of the bins' own errors, and
    the lower bound goes down by the upper quantile of that; the upper one is that of the resamples.
    Both err on the wide side.

    >>> ece([0.25, 0.25, 0.75, 0.75], [0, 1, 1, 1], bins=2).value
    0.25
    """
    confidence, correct, bins = _calibration(confidence, correct, bins, binning)
    tail, num = 0.5 + 0.5 * confidence_level(level), len(correct)
    gaps = _gaps(confidence[None], correct[None], bins, binning)
    value = float(gaps.abs().sum())
    if num == 1:
        return Estimate(value, 0.0, 1.0, 1, level)
    draws = resamples(confidence, correct, num_resamples=num_resamples, generator=generator)
    drawn = torch.cat([_gaps(rows, hits, bins, binning) for rows, hits in draws])
    (high,) = quantiles(drawn.abs().sum(1), tail)
    (error,) = quantiles((drawn - gaps).abs().sum(1), tail)
    return Estimate(value, max(0.0, value - error), max(high, value), num, level)


def _gaps(
    confidence: Tensor, correct: Tensor, bins: int, binning: str
) -> Tensor:  # (R, N) each -> (R, bins)
    """(n_b/N) (accuracy_b - confidence_b)."""
    index, confidence, correct = _assign(confidence, correct, bins, binning)
    gaps = torch.zeros(len(index), bins, dtype=torch.float64)
    return gaps.scatter_add_(1, index, correct - confidence) / index.shape[1]


def _calibration(
    confidence: Any, correct: Any, bins: int, binning: str
) -> tuple[Tensor, Tensor, int]:
    confidence, correct = column("confidence", confidence), shares("correct", correct)
    same_length(confidence=confidence, correct=correct)
    # float32 probabilities may sum to a little more than 1
    fine = (confidence >= 0) & (confidence <= 1 + 1e-5)
    holding("confidence", confidence, fine, "lie in [0, 1]")
    choice("binning", binning, ("equal_mass", "equal_width"))
    return confidence.clamp(max=1.0), correct, count("bins", bins)


def _assign(
    confidence: Tensor,  # (R, N)
    correct: Tensor,  # (R, N)
    bins: int,
    binning: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Bin indices, confidences and outcomes, (R, N) each; equal mass: sorted, ties shared."""
    if binning == "equal_width":
        inner = torch.arange(1, bins, dtype=torch.float64) / bins
        return torch.searchsorted(inner, confidence, right=True), confidence, correct
    rows, num = confidence.shape
    index = (torch.arange(num) * bins // num).expand(rows, num)
    ordered, order = confidence.sort(1)
    return index, ordered, share_ties(ordered, correct.gather(1, order))


def share_ties(
    ordered: Tensor,  # (R, N), each row sorted
    values: Tensor,  # (R, N)
) -> Tensor:  # (R, N)
    """Each value replaced by the mean over those with the same key: its expectation when ties are
    broken at random.

    >>> share_ties(torch.tensor([[1.0, 2.0, 2.0]]), torch.tensor([[5.0, 0.0, 1.0]]))
    tensor([[5.0000, 0.5000, 0.5000]])
    """
    group = torch.zeros_like(ordered, dtype=torch.long)
    group[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
    total = torch.zeros_like(values).scatter_add_(1, group, values)
    size = torch.zeros_like(values).scatter_add_(1, group, torch.ones_like(values))
    return (total / size.clamp(min=1)).gather(1, group)

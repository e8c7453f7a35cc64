"""Scores that rank: whom to answer (risk-coverage), what to flag (AUROC, average precision). Only
the order of the score matters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from advbayes.checks import InputError, choice, finite, number
from advbayes.metrics.intervals import (
    Estimate,
    Resampling,
    bootstrap,
    column,
    normal_quantile,
    outcomes,
    proportion,
    same_length,
    shares,
    wilson,
)
from advbayes.metrics.reductions import share_ties


@dataclass(frozen=True)
class RiskCoverage:
    """The risk among the k most confident answers, for every coverage k/N; `aurc` is the mean risk
    over the curve.

    >>> RiskCoverage(coverage=(0.5, 1.0), risk=(0.0, 0.5), aurc=0.25).aurc
    0.25
    """

    coverage: tuple[float, ...]
    risk: tuple[float, ...]
    aurc: float


def risk_coverage(
    losses: Any,  # (N,), e.g. 1 - correct, or a squared error
    confidence: Any,  # (N,), any score: the larger, the sooner answered
) -> RiskCoverage:
    """The risk-coverage curve; ties give the expectation over breaking them at random.

    >>> risk_coverage([0, 1, 0], [0.9, 0.1, 0.5]).risk
    (0.0, 0.0, 0.3333333333333333)
    """
    losses, confidence = _selection("losses", losses, confidence)
    risk = _risks(losses[None], confidence[None])[0]
    coverage = tuple(k / len(risk) for k in range(1, len(risk) + 1))
    return RiskCoverage(coverage, tuple(risk.tolist()), float(risk.mean()))


def aurc(
    losses: Any,  # (N,)
    confidence: Any,  # (N,)
    *,
    most: float | None = None,
    **options: Unpack[Resampling],
) -> Estimate:
    """Area under the risk-coverage curve, with a bootstrap interval.

    It is a mean of the losses in which the most confident answers weigh most. Where a loss is at
    most `most` (1 for shares of wrong answers; known without a word where all are zeros and ones),
    the interval is no narrower than Wilson's for as many examples as these weights are worth, about
    N / 2: no error among few answers does not make the area 0.

    >>> round(aurc([0, 1, 0], [0.9, 0.1, 0.5]).value, 4)
    0.1111
    >>> round(aurc([0, 0, 0], [0.9, 0.1, 0.5], most=4.0).high, 4)
    2.6305
    """
    losses, confidence = _selection("losses", losses, confidence)
    if most is None and bool(((losses == 0) | (losses == 1)).all()):
        most = 1.0
    unit = 1.0 if most is None else number("most", most, low=0.0, open_low=True)
    losses = losses / unit
    if most is not None:
        bounded = losses.clamp(0.0, 1.0)
        if float((bounded - losses).abs().max()) > 1e-9:  # more than the rounding of a share
            low, high = unit * float(losses.min()), unit * float(losses.max())
            raise InputError(f"losses must be from 0 to most, {unit:g}, got {low:g} to {high:g}")
        losses = bounded
    estimate = bootstrap(lambda *rows: _risks(*rows).mean(1), losses, confidence, **options)
    if most is None:
        return estimate
    num = len(losses)
    weights = (1 / torch.arange(num, 0, -1, dtype=torch.float64)).cumsum(0) / num
    found = _no_narrower(estimate, int(1 / float(weights.square().sum()) + 1e-9))
    return replace(found, value=unit * found.value, low=unit * found.low, high=unit * found.high)


def selective_accuracy(
    correct: Any,  # (N,) truth values, or shares of several answers
    confidence: Any,  # (N,), any score: the larger, the sooner answered
    *,
    coverage: float,
    level: float = 0.95,
) -> Estimate:
    """Accuracy among the ceil(coverage N) most confident answers, ties shared, with Wilson's
    interval for that many.

    >>> selective_accuracy([1, 0, 1, 1], [0.9, 0.1, 0.8, 0.7], coverage=0.75).value
    1.0
    """
    correct, confidence = _selection("correct", shares("correct", correct), confidence)
    coverage = number("coverage", coverage, low=0.0, high=1.0, open_low=True)
    # 0.55 * 100 is a little more than 55
    answered = max(1, math.ceil(coverage * len(correct) - 1e-9))
    ordered, order = confidence.sort(descending=True)
    return proportion(share_ties(ordered[None], correct[order][None])[0, :answered], level)


def _selection(name: str, values: Any, confidence: Any) -> tuple[Tensor, Tensor]:
    values, confidence = finite(name, column(name, values)), column("confidence", confidence)
    same_length(**{name: values, "confidence": confidence})
    return values, confidence


def _risks(losses: Tensor, confidence: Tensor) -> Tensor:  # (R, N) each -> (R, N)
    ordered, order = confidence.sort(1, descending=True)
    shared = share_ties(ordered, losses.gather(1, order))
    return shared.cumsum(1) / torch.arange(1, losses.shape[1] + 1)


def auroc(
    scores: Any,  # (N,), the larger, the more positive
    positive: Any,  # (N,) truth values, e.g. out-of-distribution
    *,
    level: float = 0.95,
    method: str = "hanley_mcneil",
) -> Estimate:
    """Area under the ROC curve, P(score of a positive > of a negative) + P(equal)/2 (Mann-Whitney).

    The interval is the score interval with Hanley and McNeil's variance (as Newcombe, 2006: all a
    with |value - a| <= z sd(a), so a perfect separation of few examples is not claimed to be
    certain), or DeLong's.

    >>> auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]).value
    0.75
    """
    scores, positive = column("scores", scores), outcomes("positive", positive).bool()
    same_length(scores=scores, positive=positive)
    choice("method", method, ("hanley_mcneil", "delong"))
    above, below = scores[positive], scores[~positive]
    m, n = len(above), len(below)
    if m == 0 or n == 0:
        raise InputError(
            f"positive must have examples of both kinds, got {m} positive and {n} negative"
        )
    ranks = _midranks(scores)
    # placements: the share of the other side that each one beats
    above_wins = (ranks[positive] - _midranks(above)) / n
    below_loses = 1 - (ranks[~positive] - _midranks(below)) / m
    value = min(1.0, max(0.0, float(above_wins.mean())))
    z = normal_quantile(level)
    if method == "delong":
        half = math.inf
        if min(m, n) > 1:
            half = z * math.sqrt(float(above_wins.var() / m + below_loses.var() / n))
        low, high = max(0.0, value - half), min(1.0, value + half)
    else:
        low, high = _score_bound(value, 0.0, m, n, z), _score_bound(value, 1.0, m, n, z)
    return Estimate(value, low, high, len(scores), level)


def auprc(
    scores: Any,  # (N,), larger where the positive class is likelier
    positive: Any,  # (N,) truth values
    **options: Unpack[Resampling],
) -> Estimate:
    """Average precision, sum over thresholds of (recall_k - recall_{k-1}) precision_k, with a
    bootstrap interval no narrower than Wilson's for as many examples as are positive: it is the
    mean of a precision over these, and a perfect order of few examples is not certain.

    >>> round(auprc([0.9, 0.8, 0.3], [1, 0, 1]).value, 4)
    0.8333
    """
    scores, positive = column("scores", scores), outcomes("positive", positive)
    same_length(scores=scores, positive=positive)
    if not bool(positive.any()):
        raise InputError(f"positive must be True somewhere, got {len(positive)} times False")
    estimate = bootstrap(_average_precision, scores, positive, support=(0.0, 1.0), **options)
    return _no_narrower(estimate, int(positive.sum()))


def _no_narrower(estimate: Estimate, num: int) -> Estimate:
    """An interval in [0, 1] that holds Wilson's for `num` truth values of this mean: resamples of
    scores that are all alike have no spread."""
    value = min(estimate.value, 1.0)  # up to rounding
    low, high = wilson(value * num, num, level=estimate.level)
    low, high = min(low, max(0.0, estimate.low)), max(high, min(1.0, estimate.high))
    return replace(estimate, low=min(low, estimate.value), high=max(high, estimate.value))


def _average_precision(scores: Tensor, positive: Tensor) -> Tensor:  # (R, N) each -> (R,)
    """Tied scores are one threshold; a resample without a positive counts as its base rate, 0."""
    ordered, order = scores.sort(1, descending=True)
    hits = positive.gather(1, order)
    precision = hits.cumsum(1) / torch.arange(1, scores.shape[1] + 1, dtype=torch.float64)
    rising = -ordered
    at_end = precision.gather(1, torch.searchsorted(rising, rising, right=True) - 1)  # of each tie
    return (hits * at_end).sum(1) / hits.sum(1).clamp_min(1)


def _midranks(values: Tensor) -> Tensor:  # (N,) -> (N,), ranks from 1, ties get their mean
    _, group, size = torch.unique(values, return_inverse=True, return_counts=True)
    size = size.double()
    ranks: Tensor = size.cumsum(0) - (size - 1) / 2
    return ranks[group]


def _score_bound(value: float, end: float, m: int, n: int, z: float) -> float:
    """The area `a` farthest from `value` to `end` with |value - a| <= z sd(a), by bisection."""

    def covered(a: float) -> bool:
        pairs = (m + n) / 2 - 1  # Newcombe's symmetric stand-in for m - 1 and n - 1
        variance = a * (1 - a) * (1 + pairs * (1 - a) / (2 - a) + pairs * a / (1 + a)) / (m * n)
        return (value - a) ** 2 <= z**2 * variance

    near, far = value, end
    for _ in range(60):
        middle = 0.5 * (near + far)
        near, far = (middle, far) if covered(middle) else (near, middle)
    return near

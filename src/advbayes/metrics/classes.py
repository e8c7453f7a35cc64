"""Classes of unequal size: recall, balanced accuracy, area under the precision-recall curve."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from advbayes.checks import InputError
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
)


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
    """The mean of the recalls of the classes that occur; the interval has the variance of a mean of
    Wilson's proportions.

    Each recall enters with (k + z^2/2) / (n + z^2), Wilson's centre, so that a class without an
    error has a variance too.

    >>> balanced_accuracy([1, 1, 1, 0], [0, 0, 0, 1]).value
    0.5
    """
    parts, z2 = _by_class(correct, labels).values(), normal_quantile(level) ** 2
    value = sum(float(hits.mean()) for hits in parts) / len(parts)
    centres = [(float(hits.sum()) + z2 / 2) / (len(hits) + z2) for hits in parts]
    variance = (
        sum(p * (1 - p) / (len(hits) + z2) for p, hits in zip(centres, parts, strict=True))
        / len(parts) ** 2
    )
    centre, half = sum(centres) / len(parts), math.sqrt(z2 * variance)
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Estimate(value, min(low, value), max(high, value), sum(map(len, parts)), level)


def _by_class(correct: Any, labels: Any) -> dict[int, Tensor]:
    correct, labels = shares("correct", correct), column("labels", labels)
    same_length(correct=correct, labels=labels)
    return {int(label): correct[labels == label] for label in labels.unique().tolist()}


def auprc(
    scores: Any,  # (N,), larger where the positive class is likelier
    positive: Any,  # (N,) truth values
    **options: Unpack[Resampling],
) -> Estimate:
    """Average precision, sum over thresholds of (recall_k - recall_{k-1}) precision_k, with a
    bootstrap interval.

    >>> round(auprc([0.9, 0.8, 0.3], [1, 0, 1]).value, 4)
    0.8333
    """
    scores, positive = column("scores", scores), outcomes("positive", positive)
    same_length(scores=scores, positive=positive)
    if not bool(positive.any()):
        raise InputError(f"positive must be True somewhere, got {len(positive)} times False")
    return bootstrap(_average_precision, scores, positive, support=(0.0, 1.0), **options)


def _average_precision(scores: Tensor, positive: Tensor) -> Tensor:  # (R, N) each -> (R,)
    """Tied scores are one threshold; a resample without a positive counts as its base rate, 0."""
    ordered, order = scores.sort(1, descending=True)
    hits = positive.gather(1, order)
    positives, rank = hits.cumsum(1), torch.arange(1, scores.shape[1] + 1, dtype=torch.float64)
    group = torch.zeros_like(order)
    group[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
    precision = positives / rank
    # where each tie ends
    last = torch.zeros_like(precision).scatter_reduce_(1, group, rank.expand_as(precision), "amax")
    at_end = precision.gather(1, last.gather(1, group).long() - 1)
    return (hits * at_end).sum(1) / hits.sum(1).clamp_min(1)

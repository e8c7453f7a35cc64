"""Split conformal prediction on top of any predictive: intervals and sets with a coverage that
holds for finite samples.

The guarantee is about new examples that are drawn as the calibration examples were. Under attack
that means calibrating on attacked examples: `attack=` makes them, and the coverage then holds for
inputs attacked the same way, on average over examples; on clean inputs the intervals are wider than
they need be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from advbayes import checks
from advbayes.likelihoods import predicts_classes, targets_like
from advbayes.metrics.scores import class_labels
from advbayes.types import Attack, Predictor

PREDICTOR = "a Predictor (of an estimator: its `predictor_`)"
ATTACK = "an attack such as pgd(ball)"
# last digits by which an answer is wider than its quantile: a score that ties with the quantile is
# inside, whatever the rounding of a product, or of a prediction in another batch
_DIGITS = 8


def conformal_quantile(scores: Tensor, level: float) -> float:
    """The ceil((n + 1) level)-th smallest score, or infinity: P(new score <= it) >= level.

    >>> conformal_quantile(torch.tensor([3.0, 1.0, 2.0, 4.0]), 0.75)
    4.0
    >>> conformal_quantile(torch.tensor([1.0]), 0.9)
    inf
    """
    checks.number("level", level, low=0, high=1, open_low=True, open_high=True)
    if bool(scores.isnan().any()):
        raise checks.InputError("scores must not be NaN", got=scores)
    rank = math.ceil(round((len(scores) + 1) * level, 9))
    return math.inf if rank > len(scores) else float(scores.double().sort().values[rank - 1])


@dataclass(frozen=True, eq=False)
class ConformalIntervals:
    """mean +- factor * standard deviation of the predictive; see `conformal_intervals`."""

    predict: Predictor
    factor: float
    level: float

    @torch.no_grad()
    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (B,) or (B, D) each
        """Lower and upper ends."""
        mean, deviation = _moments(self.predict(x))
        half = (self.factor * deviation).nan_to_num(nan=math.inf, posinf=math.inf)  # of inf 0
        half = half + _DIGITS * torch.finfo(mean.dtype).eps * (mean.abs() + half)
        return mean - half, mean + half

    def covers(self, x: Tensor, y: Tensor) -> Tensor:  # (B,) bool
        """Whether y lies inside, in every output."""
        low, high = self(x)
        y = targets_like(low, y)
        return ((low <= y) & (y <= high)).reshape(len(y), -1).all(1)


@dataclass(frozen=True, eq=False)
class ConformalSets:
    """The classes with p(c) >= 1 - threshold, never none; see `conformal_sets`."""

    predict: Predictor
    threshold: float
    level: float

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:  # (B, C) bool
        """Which classes are in the set of each input."""
        probs = _classes(self.predict(x)).probs
        threshold = self.threshold + _DIGITS * torch.finfo(probs.dtype).eps
        return (1 - probs <= threshold) | (probs == probs.amax(1, keepdim=True))

    def covers(self, x: Tensor, y: Tensor) -> Tensor:  # (B,) bool
        """Whether the class is in the set."""
        return _of_class(self(x), y)


@torch.no_grad()
def conformal_intervals(
    predict: Predictor,
    data: tuple[Tensor, Tensor],  # calibration examples that the predictor was not trained on
    *,
    level: float = 0.9,
    attack: Attack | None = None,
    generator: torch.Generator | None = None,
) -> ConformalIntervals:
    """Intervals of coverage >= `level`; the score is |y - mean| / sd, the largest of outputs.

    >>> predict = lambda x: torch.distributions.Normal(x[:, 0], 1.0)
    >>> x = torch.zeros(9, 1)
    >>> intervals = conformal_intervals(predict, (x, torch.arange(9.0)), level=0.8)
    >>> [round(float(end), 4) for end in intervals(torch.ones(1, 1))]
    [-6.0, 8.0]
    """
    x, y = _calibration(predict, data, attack, generator)
    prediction = predict(x)
    if predicts_classes(prediction):
        raise checks.InputTypeError(
            "predict must be a regression predictor, got classes; see conformal_sets"
        )
    mean, deviation = _moments(prediction)
    error = (targets_like(mean, y) - mean).abs()
    scores = torch.where(error == 0, 0.0, error / deviation)
    factor = conformal_quantile(scores.reshape(len(y), -1).amax(1), level)
    return ConformalIntervals(predict, factor, level)


@torch.no_grad()
def conformal_sets(
    predict: Predictor,
    data: tuple[Tensor, Tensor],
    *,
    level: float = 0.9,
    attack: Attack | None = None,
    generator: torch.Generator | None = None,
) -> ConformalSets:
    """Sets of classes that contain y with probability >= `level`: the score is 1 - p(y).

    >>> predict = lambda x: Categorical(probs=torch.tensor([[0.7, 0.2, 0.1]]).expand(len(x), 3))
    >>> x, y = torch.zeros(9, 1), torch.tensor([0] * 7 + [1, 1])
    >>> conformal_sets(predict, (x, y), level=0.8)(torch.zeros(1, 1))
    tensor([[ True,  True, False]])
    """
    x, y = _calibration(predict, data, attack, generator)
    probs = _classes(predict(x)).probs
    threshold = conformal_quantile(1 - _of_class(probs, y), level)
    return ConformalSets(predict, threshold, level)


def _of_class(values: Tensor, y: Tensor) -> Tensor:  # (B, C), (B,) or (B, 1) -> (B,)
    """The value at each example's class."""
    labels = class_labels(y, *values.shape)
    return values.gather(1, labels.unsqueeze(1)).squeeze(1)


def _classes(prediction: Distribution) -> Categorical:
    if not predicts_classes(prediction):
        raise checks.InputTypeError(
            f"predict must predict classes, got {type(prediction).__name__}; see "
            f"conformal_intervals"
        )
    checks.finite("prediction.probs", prediction.probs)
    return prediction


def _moments(prediction: Distribution) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation; an interval of NaN would hold nothing."""
    mean = checks.finite("prediction.mean", prediction.mean)
    return mean, checks.finite("prediction.stddev", prediction.stddev)


def _calibration(
    predict: Predictor,
    data: tuple[Tensor, Tensor],
    attack: Attack | None,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    checks.function("predict", predict, PREDICTOR)
    x, y = data
    if not len(x) or len(x) != len(y):
        raise checks.InputError(
            f"data must hold one y for each x, and at least one, got {len(x)} and {len(y)}"
        )
    if attack is None:
        return x, y
    checks.function("attack", attack, ATTACK)
    with torch.enable_grad():
        return attack(predict, x, y, generator=generator), y

"""One row of numbers per example: what `evaluate` records, and the worst of several attacks,
example by example."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import metrics
from advbayes.attacks import nll
from advbayes.attacks.gradients import value_of
from advbayes.checks import InputError, finite
from advbayes.evaluation.inputs import Task
from advbayes.likelihoods import predicts_classes
from advbayes.types import Loss, Predictor

Columns = dict[str, Tensor]  # name -> (N,), float64

# name -> what is worse: -1 the smaller, +1 the larger, 0 goes with the example's worst attack
WORSE: dict[Task, dict[str, int]] = {
    "classification": {
        "loss": 1,
        "correct": -1,
        "log_prob": -1,
        "brier": 1,
        **dict.fromkeys(("entropy", "confidence", "norm", "label", "positive"), 0),
    },
    "regression": {
        "loss": 1,
        "squared_error": 1,
        "log_prob": -1,
        "crps": 1,
        "inside": -1,
        "entropy": 0,
        "norm": 0,
    },
}


DRAWS = 1000  # of a prediction whose quantiles are not known
HALVES = ("first", "second")  # of the scorings of a stochastic predictor


def column_names(task: Task) -> tuple[str, ...]:
    """Every column that a record may have, in order: the scores, then those of each half.

    >>> column_names("regression")[:3]
    ('loss', 'squared_error', 'log_prob')
    """
    scored = [name for name in WORSE[task] if name not in ("norm", "label")]
    return (*WORSE[task], *(f"{name}_{half}" for half in HALVES for name in scored))


def joined(parts: Sequence[Mapping[str, Tensor]], task: Task) -> Columns:
    """The columns of consecutive batches, end to end: those that every batch has, in order."""
    names = [name for name in column_names(task) if all(name in rows for rows in parts)]
    return {name: torch.cat([rows[name] for rows in parts]) for name in names if parts}


@torch.no_grad()
def score(
    predict: Predictor,
    x: Tensor,  # (B, *event)
    y: Tensor,
    task: Task,
    *,
    loss: Loss = nll,
    repeats: int = 1,
    halves: bool = False,
    interval_level: float = 0.9,
    what: str = "the scores",
) -> Columns:
    """The scores of each example, averaged over `repeats` calls (a stochastic predictor answers
    differently each time). A predictor that never looks at x is given the accuracy to expect over
    its ties.

    With `halves` also over the first and the second half of the calls apart (`correct_first`,
    `correct_second`, ...), from which `worst` chooses without favour. What a prediction cannot give
    (CRPS and intervals without draws or a cdf, entropy) is absent.

    >>> predict = lambda x: torch.distributions.Categorical(logits=x)
    >>> x, y = torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1])
    >>> score(predict, x, y, "classification")["correct"]
    tensor([1., 0.], dtype=torch.float64)
    """
    guesses = isinstance(predict, metrics.ConstantClasses)
    calls = []
    for _ in range(repeats):
        prediction = predict(x)
        calls.append(_scores(prediction, y, loss, interval_level, what))
        if guesses:
            calls[-1]["correct"] = metrics.expected_correct(prediction, y).cpu()
    parts = {"": calls}
    if halves and repeats > 1:
        parts |= {"_first": calls[: repeats // 2], "_second": calls[repeats // 2 :]}
    total: Columns = {}
    for part, some in parts.items():
        for name in calls[0]:
            mean = reduce(torch.add, (each[name] / len(some) for each in some))
            if name == "correct" and not guesses:  # ten tenths are one
                mean = (mean * len(some)).round() / len(some)
            if name == "label":  # and no score
                mean = calls[0][name]
            total[name + part] = mean
    return total


def _scores(
    prediction: Distribution, y: Tensor, loss: Loss, interval_level: float, what: str
) -> Columns:
    """The scores of one call."""
    if predicts_classes(prediction):
        finite(f"{what} (log-probabilities)", prediction.logits)
    columns = {"log_prob": metrics.log_prob(prediction, y)}
    finite(f"{what} (log-probabilities of y)", columns["log_prob"])
    columns["loss"] = -columns["log_prob"] if loss is nll else value_of(loss, prediction, y)
    if predicts_classes(prediction):
        columns["entropy"] = metrics.entropy(prediction)
        columns["correct"] = metrics.correct(prediction, y)
        columns["confidence"] = metrics.confidence(prediction)
        columns["brier"] = metrics.brier(prediction, y)
        columns["label"] = y
        if prediction.probs.shape[-1] == 2:
            columns["positive"] = prediction.probs[:, 1]
    else:
        columns["squared_error"] = metrics.squared_error(prediction, y)
        with suppress(NotImplementedError):
            columns["entropy"] = metrics.entropy(prediction)
        with suppress(NotImplementedError):  # no closed form and no draws
            columns["crps"] = metrics.crps(prediction, y)
        with suppress(NotImplementedError, TypeError):  # neither quantiles nor a cdf nor draws
            inside = _inside(prediction, y, interval_level)
            columns["inside"] = inside.double().reshape(len(y), -1).mean(1)
    for name, values in columns.items():
        finite(f"{what} ({name})", values)
    return {name: values.detach().cpu().double() for name, values in columns.items()}


def _inside(prediction: Distribution, y: Tensor, level: float) -> Tensor:  # (B,) or (B, D)
    """Whether the central interval of each output holds its target; for several outputs whose
    quantiles are not known (a purified regression), by the target's rank among draws."""
    try:
        return metrics.interval(prediction, y, level=level).inside
    except TypeError:
        if math.prod(prediction.event_shape) == 1:
            raise
    below = (prediction.sample((DRAWS,)) < y).double().mean(0)
    return (below - 0.5).abs() <= 0.5 * level


def worst(columns: Sequence[Columns], task: Task) -> Columns:
    """The union over attacks, per example: least correct, lowest log-probability, largest error,
    each column by itself; entropy, confidence and norm are those of the attack that did most harm.

    The least of several noisy scores is too low, and lower with each of them. Where the columns
    have halves (a stochastic predictor), the worst attack of an example is chosen on one half of
    its scorings and reported from the other, and the other way round, and the two are averaged:
    attacks that do nothing then cost nothing in expectation.

    >>> a = {"correct": torch.tensor([1.0, 0.0]), "log_prob": torch.tensor([-1.0, -2.0])}
    >>> b = {"correct": torch.tensor([0.0, 1.0]), "log_prob": torch.tensor([-3.0, -0.5])}
    >>> worst([a, b], "classification")["correct"]
    tensor([0., 0.])
    """
    if not columns:
        raise InputError("worst wants at least one attack's columns, got none")
    everywhere = {name for name in columns[0] if all(name in rows for rows in columns)}
    names = [name for name in WORSE[task] if name in everywhere]
    if len(columns) == 1:
        return {name: columns[0][name] for name in names}
    stacked = {name: torch.stack([rows[name] for rows in columns]) for name in everywhere}
    if not {f"log_prob_{half}" for half in HALVES} <= everywhere:
        pick = _picked(stacked, task)
        return {name: stacked[name].gather(0, pick[name])[0] for name in names}
    sides = []
    for chosen_on, reported in (HALVES, HALVES[::-1]):
        first, second = (
            {name: stacked.get(f"{name}_{half}", stacked[name]) for name in names}
            for half in (chosen_on, reported)
        )
        pick = _picked(first, task)
        sides.append({name: second[name].gather(0, pick[name])[0] for name in names})
    return {name: (sides[0][name] + sides[1][name]) / 2 for name in names}


def _picked(scores: Columns, task: Task) -> Columns:  # (attacks, N) each -> (1, N)
    """Which attack is the worst for each example, by each column."""
    if task == "classification":  # correctness first
        harm = -scores["log_prob"] - 1e9 * scores["correct"]
    else:
        harm = scores.get("squared_error", -scores["log_prob"])
    pick = {}
    for name in WORSE[task].keys() & scores.keys():
        # of equally correct ones, the one that came closest to breaking
        by_itself = WORSE[task][name] != 0 and name != "correct"
        pick[name] = (WORSE[task][name] * scores[name] if by_itself else harm).argmax(0, True)
    return pick

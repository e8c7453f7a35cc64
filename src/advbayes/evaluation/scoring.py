"""One row of numbers per example: what `evaluate` records, and the worst of several attacks, example by example."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Categorical

from advbayes import metrics
from advbayes.attacks import nll
from advbayes.evaluation.inputs import Task, check_scores
from advbayes.types import Loss, Predictor

Columns = dict[str, Tensor]  # name -> (N,), float64

# name -> what is worse: -1 the smaller, +1 the larger, 0 goes with the example's worst attack
WORSE: dict[Task, dict[str, int]] = {
    "classification": {"loss": 1, "correct": -1, "log_prob": -1, "brier": 1, "entropy": 0, "confidence": 0, "norm": 0},
    "regression": {"loss": 1, "squared_error": 1, "log_prob": -1, "crps": 1, "inside": -1, "entropy": 0, "norm": 0},
}


@torch.no_grad()
def score(
    predict: Predictor,
    x: Tensor,  # (B, *event)
    y: Tensor,
    task: Task,
    *,
    loss: Loss = nll,
    repeats: int = 1,
    interval_level: float = 0.9,
    what: str = "the scores",
) -> Columns:
    """The scores of each example, averaged over `repeats` calls (a stochastic predictor answers differently each time).

    >>> y = torch.tensor([0, 1])
    >>> score(lambda x: Categorical(logits=x), torch.tensor([[9.0, 0.0], [9.0, 0.0]]), y, "classification")["correct"]
    tensor([1., 0.], dtype=torch.float64)
    """
    total: Columns = {}
    for _ in range(repeats):
        prediction = predict(x)
        if isinstance(prediction, Categorical):
            check_scores(prediction.logits, f"{what} (log-probabilities)")
        found = {"loss": loss(prediction, y), "log_prob": metrics.log_prob(prediction, y), "entropy": metrics.entropy(prediction)}
        check_scores(found["log_prob"], f"{what} (log-probabilities of y)")
        if isinstance(prediction, Categorical):
            found["correct"] = metrics.correct(prediction, y)
            found["confidence"] = metrics.confidence(prediction)
            found["brier"] = metrics.brier(prediction, y)
        else:
            inside = metrics.interval(prediction, y, level=interval_level).inside
            found["squared_error"] = metrics.squared_error(prediction, y)
            found["crps"] = metrics.crps(prediction, y)
            found["inside"] = inside.double().reshape(len(x), -1).mean(1)
        for name, values in found.items():
            check_scores(values, f"{what} ({name})")
            total[name] = total.get(name, torch.zeros((), dtype=torch.float64)) + values.detach().cpu().double() / repeats
    if "correct" in total:  # ten tenths are one
        total["correct"] = (total["correct"] * repeats).round() / repeats
    return total


def worst(columns: Sequence[Columns], task: Task) -> Columns:
    """The union over attacks, per example: least correct, lowest log-probability, largest error, each column by itself;
    entropy, confidence and norm are those of the attack that did most harm.

    >>> a = {"correct": torch.tensor([1.0, 0.0]), "log_prob": torch.tensor([-1.0, -2.0])}
    >>> b = {"correct": torch.tensor([0.0, 1.0]), "log_prob": torch.tensor([-3.0, -0.5])}
    >>> worst([a, b], "classification")["correct"]
    tensor([0., 0.])
    """
    if not columns:
        raise ValueError("worst wants at least one attack's columns, got none")
    if task == "classification":
        harm = torch.stack([-rows["log_prob"] - 1e9 * rows["correct"] for rows in columns])  # correctness first
    else:
        harm = torch.stack([rows.get("squared_error", -rows["log_prob"]) for rows in columns])
    pick = harm.argmax(0, keepdim=True)
    found: Columns = {}
    for name, direction in WORSE[task].items():
        if all(name in rows for rows in columns):
            stacked = torch.stack([rows[name] for rows in columns])
            found[name] = stacked.gather(0, pick)[0] if direction == 0 else stacked.amax(0) if direction > 0 else stacked.amin(0)
    return found

"""Scores as people read them: each with its name, its unit and its interval; errors of a regression
in the target's unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from advbayes.datasets import Standardize
from advbayes.evaluation.tables import Column

if TYPE_CHECKING:
    from torch import Tensor

# --json has all
SHOWN = {"classification": ("accuracy", "nll", "ece"), "regression": ("rmse", "nll", "coverage")}
_NAMES = {
    "balanced_accuracy": "balanced accuracy",
    "nll": "NLL (nats)",
    "brier": "Brier score",
    "ece": "ECE",
    "selective_accuracy": "accuracy on the surer half",
    "aurc": "AURC",
}
_STANDARDISED = {  # a density and a squared error of the target as the model sees it
    "nll": "NLL (nats, standardised)",
    "aurc": "AURC (standardised)",
}
_MEANINGS = {
    "accuracy": "accuracy: the share answered right",
    "balanced_accuracy": "balanced accuracy: its mean over the classes",
    "rmse": "RMSE: the root of the mean squared error",
    "nll": "NLL: minus the log-probability (density) of the truth, lower is better",
    "brier": "Brier score: squared error of the probabilities, from 0 to 2",
    "coverage": "coverage: the share of targets inside",
    "ece": "ECE: the mean gap between confidence and accuracy",
}


def legend(metrics: Iterable[str]) -> str:
    """What the scores mean, in one line.

    >>> legend(["accuracy", "ece"])
    'accuracy: the share answered right; ECE: the mean gap between confidence and accuracy'
    """
    return "; ".join(_MEANINGS[metric] for metric in metrics if metric in _MEANINGS)


def uneven(labels: Tensor) -> bool:
    """Whether always answering one class is right for more than four of five rows: accuracy alone
    says little then.

    >>> import torch
    >>> uneven(torch.tensor([0, 0, 0, 0, 0, 1])), uneven(torch.tensor([0, 0, 1]))
    (True, False)
    """
    return 5 * int(labels.bincount().max()) > 4 * len(labels)


def column_of(
    metric: str, scaling: Standardize | None, targets: Sequence[str], level: float = 0.9
) -> Column:
    """The name and unit of a metric.

    >>> import torch
    >>> scaling = Standardize(torch.zeros(1), torch.ones(1), torch.tensor(3.0), torch.tensor(20.0))
    >>> column_of("rmse", scaling, ["price"])
    Column(name="RMSE (in the unit of 'price')", factor=20.0)
    >>> column_of("coverage", scaling, ["price"])
    Column(name='coverage of 90 % intervals', factor=1.0)
    >>> column_of("nll", scaling, ["price"])
    Column(name='NLL (nats, standardised)', factor=1.0)
    """
    if metric == "coverage":
        return Column(f"coverage of {100 * level:g} % intervals")
    spread = None if scaling is None else scaling.target_std
    if spread is not None and metric in _STANDARDISED:
        return Column(_STANDARDISED[metric])
    if metric not in ("rmse", "crps"):
        return Column(_NAMES.get(metric, metric))
    if spread is None:
        return Column(metric.upper())
    if spread.numel() == 1:
        name = repr(targets[0]) if len(targets) == 1 else "the target"
        return Column(f"{metric.upper()} (in the unit of {name})", float(spread))
    return Column(f"{metric.upper()} (in standard deviations of the targets)")


def said_scores(
    values: Mapping[str, Any],
    scaling: Standardize | None,
    targets: Sequence[str],
    level: float = 0.9,
) -> str:
    """The scores of `metrics.json` in one line.

    >>> said_scores({"nll": {"value": 0.5, "low": 0.4, "high": 0.6}}, None, ())
    'NLL (nats) 0.500 [0.400, 0.600]'
    """
    order = {name: place for place, name in enumerate(_MEANINGS)}
    return ", ".join(
        f"{(column := column_of(name, scaling, targets, level)).name} "
        f"{column.cell(each['value'], each['low'], each['high'])}"
        for name, each in sorted(values.items(), key=lambda item: order.get(item[0], len(order)))
    )

"""Scores as people read them: each with its name, its unit and its interval; errors of a regression
in the target's unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from advbayes.datasets import Standardize
from advbayes.evaluation.tables import Row, shown

# --json has all
SHOWN = {"classification": ("accuracy", "nll", "ece"), "regression": ("rmse", "nll", "coverage")}
_ORDER = (
    "accuracy",
    "rmse",
    "nll",
    "brier",
    "coverage",
    "ece",
    "crps",
    "selective_accuracy",
    "aurc",
)
_NAMES = {
    "nll": "NLL (nats)",
    "brier": "Brier score",
    "ece": "ECE",
    "selective_accuracy": "accuracy on the surer half",
    "aurc": "AURC",
}


@dataclass(frozen=True)
class Score:
    """How a metric is called and what it is multiplied by to be in the unit that the name states.

    >>> Score("RMSE (price)", 20.0).said(0.5, 0.4, 0.6)
    '10.000 [8.000, 12.000]'
    """

    name: str
    factor: float = 1.0

    def said(
        self, value: float | None, low: float | None, high: float | None, mark: str = ""
    ) -> str:
        """Value and interval; None stands for a value that is not finite."""
        value, low, high = (
            None if each is None else self.factor * each for each in (value, low, high)
        )
        return f"{_text(value)}{mark} [{_text(low)}, {_text(high)}]"


def _text(value: float | None) -> str:
    return "not finite" if value is None else shown(value)


def score_of(
    metric: str, scaling: Standardize | None, targets: Sequence[str], level: float = 0.9
) -> Score:
    """The name and unit of a metric.

    >>> import torch
    >>> scaling = Standardize(torch.zeros(1), torch.ones(1), torch.tensor(3.0), torch.tensor(20.0))
    >>> score_of("rmse", scaling, ["price"])
    Score(name="RMSE (in the unit of 'price')", factor=20.0)
    >>> score_of("coverage", scaling, ["price"])
    Score(name='coverage of 90 % intervals', factor=1.0)
    """
    if metric == "coverage":
        return Score(f"coverage of {100 * level:g} % intervals")
    if metric not in ("rmse", "crps"):
        return Score(_NAMES.get(metric, metric))
    spread = None if scaling is None else scaling.target_std
    if spread is None:
        return Score(metric.upper())
    if spread.numel() == 1:
        name = repr(targets[0]) if len(targets) == 1 else "the target"
        return Score(f"{metric.upper()} (in the unit of {name})", float(spread))
    return Score(f"{metric.upper()} (in standard deviations of the targets)")


def score_table(
    rows: Sequence[Row],
    metrics: Sequence[str],
    scaling: Standardize | None,
    targets: Sequence[str],
    level: float,
) -> tuple[list[str], list[list[str]]]:
    """Head and rows of an evaluation's table."""
    scores = {metric: score_of(metric, scaling, targets, level) for metric in metrics}
    body = []
    for row in rows:
        found = {name: row.values.get(name) for name in metrics}
        cells = [
            "" if value is None else scores[name].said(value.value, value.low, value.high)
            for name, value in found.items()
        ]
        body.append([row.predictor, row.attack, "" if row.eps is None else f"{row.eps:g}", *cells])
    return ["predictor", "attack", "eps", *(score.name for score in scores.values())], body


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
    return ", ".join(
        f"{(score := score_of(name, scaling, targets, level)).name} "
        f"{score.said(each['value'], each['low'], each['high'])}"
        for name, each in sorted(values.items(), key=lambda item: _ORDER.index(item[0]))
    )

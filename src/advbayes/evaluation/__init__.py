"""`evaluate`: attack, predict, score -> records; security curves, the worst case, tables."""

from __future__ import annotations

from advbayes.attacks import ball_of, losses_of, restarts_of, steps_of, with_eps
from advbayes.evaluation.inputs import SoftmaxWarning, UnitsWarning
from advbayes.evaluation.result import Cell, Evaluation
from advbayes.evaluation.run import UnchangedWarning, evaluate, load_evaluation, rescore
from advbayes.evaluation.scoring import score, worst
from advbayes.evaluation.selective import SelectivePoint, selective_task
from advbayes.evaluation.tables import Row, Table

__all__ = [
    "Cell",
    "Evaluation",
    "Row",
    "SelectivePoint",
    "SoftmaxWarning",
    "Table",
    "UnchangedWarning",
    "UnitsWarning",
    "ball_of",
    "evaluate",
    "load_evaluation",
    "losses_of",
    "rescore",
    "restarts_of",
    "score",
    "selective_task",
    "steps_of",
    "with_eps",
    "worst",
]

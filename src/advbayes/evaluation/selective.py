"""The selective task of section 4: entropy as the filter, both sides attacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advbayes import metrics
from advbayes.attacks import PGD, ByLoss, certainty, pgd_plus
from advbayes.attacks.balls import Ball
from advbayes.attacks.parts import with_eps
from advbayes.checks import InputError, InputTypeError, count, instance, number
from advbayes.evaluation.inputs import (
    Data,
    Task,
    as_radii,
    as_tensors,
    check_predictor,
    dtype_of,
    is_stochastic,
    warn_units,
)
from advbayes.evaluation.measuring import attacked, batches, scored
from advbayes.evaluation.scoring import Columns
from advbayes.metrics import Estimate
from advbayes.progress import Progress
from advbayes.types import Attack, Predictor

TASK: Task = "classification"


@dataclass(frozen=True)
class SelectivePoint:
    """The task at one radius: accuracy among those kept, how well entropy tells outsiders, the area
    under risk-coverage."""

    eps: float
    selective_accuracy: Estimate
    ood_auroc: Estimate
    aurc: Estimate
    kept_outside: float  # share of outsiders among those kept


def selective_task(
    predict: Predictor,
    inside: Data,  # (x, y)
    outside: Any,  # (N, *event), out-of-distribution inputs
    *,
    ball: Ball,
    radii: Sequence[float] | None = None,
    inside_attack: Attack | None = None,
    outside_attack: Attack | None = None,
    coverage: float = 0.5,
    batch_size: int = 256,
    seed: int = 0,
    rescore: int = 10,
    progress: bool | None = None,
) -> list[SelectivePoint]:
    """Accuracy on the `coverage` of lowest entropy of a balanced mix of known and foreign inputs,
    both attacked.

    Known inputs meet PGD+ (error, then entropy up), foreign ones a PGD that lowers the entropy; a
    foreign input that is kept counts as an error, whatever class it is given.

    >>> from torch.distributions import Categorical
    >>> from advbayes import L2
    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> known = torch.tensor([[3.0], [-3.0]]), torch.tensor([0, 1])
    >>> points = selective_task(predict, known, torch.zeros(2, 1), ball=L2(5.0), radii=(0.0, 5.0))
    >>> [point.selective_accuracy.value for point in points]
    [1.0, 0.0]
    """
    x, y = as_tensors(inside, dtype_of(predict))
    if check_predictor(predict, x, y) != TASK:
        raise InputTypeError("selective_task is about classes, got a regression predictor")
    foreign = as_tensors((outside, torch.zeros(len(outside))), dtype_of(predict))[0]
    if foreign.shape[1:] != x.shape[1:]:
        raise InputError(
            f"outside must have the event shape {tuple(x.shape[1:])} of inside", got=foreign
        )
    number("coverage", coverage, low=0, high=1, open_low=True)
    instance("ball", ball, Ball, "a ball such as L2(1.0)")
    ball.check(x)
    ball.check(foreign)
    warn_units(ball, x, "ball")
    num = min(len(x), len(foreign))  # balanced
    x, y, foreign = x[:num], y[:num].reshape(-1).long(), foreign[:num]
    inside_attack = pgd_plus(ball) if inside_attack is None else inside_attack
    outside_attack = (
        PGD(ball, stages=((ByLoss(certainty), 50),)) if outside_attack is None else outside_attack
    )
    repeats = count("rescore", rescore) if is_stochastic(predict, x) else 1
    radii = (ball.eps,) if radii is None else as_radii(radii)
    nobody = torch.zeros_like(y)  # an outsider has no class; the entropy does not look at it
    parts = batches(num, count("batch_size", batch_size))

    def measured(attack: Attack, x: Tensor, y: Tensor, rows: slice, key: str) -> Columns:
        keyed: Any = {"seed": seed, "key": key}
        x_adv = attacked(predict, attack, x, y, rows, **keyed)
        return scored(predict, x_adv, y[rows], TASK, start=rows.start, repeats=repeats, **keyed)

    points = []
    with Progress("selective_task", len(radii) * len(parts), progress) as bar:
        for eps in radii:
            attack, decoy = (with_eps(each, eps) for each in (inside_attack, outside_attack))
            key, sides = f"selective/{eps!r}", []
            for rows in parts:
                here = measured(attack, x, y, rows, key)
                there = measured(decoy, foreign, nobody, rows, f"{key}/outside")
                sides.append((here["correct"], here["entropy"], there["entropy"]))
                bar.advance(f"eps {eps:g}")
            columns = (torch.cat(each) for each in zip(*sides, strict=True))
            points.append(_point(eps, *columns, coverage=coverage))
    return points


def _point(
    eps: float, correct: Tensor, entropy: Tensor, foreign_entropy: Tensor, *, coverage: float
) -> SelectivePoint:
    answers = torch.cat([correct, torch.zeros_like(foreign_entropy)])
    doubt = torch.cat([entropy, foreign_entropy])
    foreign = torch.cat([torch.zeros_like(entropy), torch.ones_like(foreign_entropy)])
    return SelectivePoint(
        float(eps),
        metrics.selective_accuracy(answers, -doubt, coverage=coverage),
        metrics.auroc(doubt, foreign),
        metrics.aurc(1 - answers, -doubt, most=1.0),
        metrics.selective_accuracy(foreign, -doubt, coverage=coverage).value,
    )

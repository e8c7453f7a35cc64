"""Checks with known answers: the attack itself (E19), trivial predictors (E22)."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from advbayes import metrics
from advbayes.attacks import succeeded, with_ball
from advbayes.attacks.balls import L2, Ball
from advbayes.auditing.case import Case, Frozen
from advbayes.auditing.check import check, judged, not_applicable, not_run
from advbayes.auditing.findings import Finding
from advbayes.seeds import generator_for

DIMENSIONS = 20


def _dual(ball: Ball, w: Tensor) -> Tensor:
    """max <w, d> over the unit ball, for each row of w."""
    rows = w.reshape(-1, w.shape[-1])
    return (rows * ball.ascend(rows, 1.0)).sum(-1).view(w.shape[:-1])


@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
    """Classes by a linear map: its robust accuracy has a closed form.

    >>> Linear(torch.eye(2), torch.zeros(2))(torch.tensor([[1.0, 0.0]])).probs.argmax()
    tensor(0)
    """

    weight: Tensor  # (C, D)
    bias: Tensor  # (C,)

    def __call__(self, x: Tensor) -> Categorical:
        return Categorical(logits=x @ self.weight.T + self.bias, validate_args=False)

    def slack(self, ball: Ball, x: Tensor, y: Tensor) -> Tensor:
        """min over classes c != y of the margin to c less the most that eps can take from it; > 0:
        robust."""
        logits = x @ self.weight.T + self.bias
        margin = logits.gather(1, y.unsqueeze(1)) - logits
        taken = ball.eps * _dual(ball, self.weight[y].unsqueeze(1) - self.weight)
        return (margin - taken).scatter(1, y.unsqueeze(1), math.inf).amin(1)


@dataclasses.dataclass(frozen=True, eq=False)
class Planted:
    """Robust but for a valley that bends: the second direction pays once the first was followed.

    >>> Planted(L2(1.0))(torch.zeros(1, 20)).probs.argmax()
    tensor(0)
    """

    ball: Ball

    def __call__(self, x: Tensor) -> Distribution:
        half = x.shape[1] // 2
        first, second = (torch.zeros(x.shape[1], dtype=x.dtype) for _ in range(2))
        first[:half], second[half:] = 1.0, 1.0
        a = x @ first / (self.ball.eps * _dual(self.ball, first))
        b = x @ second / (self.ball.eps * _dual(self.ball, second))
        margin = 1.0 - 0.3 * a - 2.6 * torch.relu(a - 0.3) * torch.relu(b + 0.1)
        return Categorical(logits=torch.stack([margin, -margin], 1), validate_args=False)


@check("E19", "the attack itself", cost=lambda size: 0.5 * size.passes, attacks=True)
def attack_itself(case: Case) -> Finding:
    """E19: no mismatch with the linear closed form, and 95 % success on a planted vulnerability."""
    if case.task == "regression":
        return not_applicable(
            "the closed form is that of classes; regression attacks share their engine"
        )
    # the closed forms hold without box, scale and mask
    ball = type(case.ball)(eps=case.ball.eps if case.ball.eps > 0 else 1.0)
    generator = generator_for(case.seed, "audit/linear")
    linear = Linear(torch.randn(3, DIMENSIONS, generator=generator), torch.zeros(3))
    attacks = [with_ball(attack, ball) for attack in case.attacks_on(linear).values()]
    if not attacks:
        return not_run(
            "give attacks that are made for any predictor: these cannot run on a linear model"
        )
    spread = 2.0 * ball.eps * (0.7 if isinstance(ball, L2) else 1.0)
    x = spread * torch.randn(200, DIMENSIONS, generator=generator)
    y = linear(x).logits.argmax(1)
    planted = Planted(ball)
    points = 0.05 * ball.eps * torch.randn(100, DIMENSIONS, generator=generator) / DIMENSIONS
    zeros = torch.zeros(len(points), dtype=torch.long)
    broken, reached = torch.zeros(len(x)).bool(), torch.zeros(len(points)).bool()
    for attack in attacks:
        with torch.no_grad():
            broken |= succeeded(linear(attack(linear, x, y, generator=generator)), y)
            x_adv = attack(planted, points, zeros, generator=generator)
            reached |= succeeded(planted(x_adv), zeros)
    slack = linear.slack(ball, x, y)
    clear = slack.abs() > 1e-3 * ball.eps * _dual(ball, linear.weight).max()
    mismatches = int(((slack < 0) != broken)[clear].sum())
    rate = float(reached.double().mean())
    advice = (
        "the attack misses what is there on models whose answer is known: repair it before "
        "anything else"
    )
    figures = {"mismatches": mismatches, "of": int(clear.sum()), "planted_found": rate}
    return judged(mismatches > 0 or rate < 0.95, advice, **figures)


@check("E22", "trivial predictors")
def trivial_predictors(case: Case) -> Finding:
    """E22: better than saying nothing; no NLL below a homoscedastic model's Gaussian floor."""
    rows = {"clean": case.clean, **({"worst": case.worst()} if case.support.better else {})}
    figures: dict[str, float] = {}
    bad = []
    if case.task == "classification":
        with torch.no_grad():
            num_classes = case.predict(case.x[:1]).logits.shape[-1]  # type: ignore[attr-defined]
        train_y = case.y if case.support.train_y is None else case.support.train_y
        labels = torch.as_tensor(train_y).to(case.y).reshape(-1)
        guess = metrics.majority(labels, num_classes)(case.x)
        floor, share = math.log(num_classes), float(metrics.expected_correct(guess, case.y).mean())
        for name, columns in rows.items():
            loss, accuracy = -float(columns["log_prob"].mean()), float(columns["correct"].mean())
            figures |= {f"{name} NLL": loss, f"{name} accuracy": accuracy}
            bad += [f"{name} NLL above ln C = {floor:.3f}"] * (loss > floor)
            bad += [f"{name} accuracy below the majority class' {share:.3f}"] * (accuracy < share)
        return judged(bool(bad), "; ".join(bad), **figures)
    for name, columns in rows.items():
        error = float(columns["squared_error"].mean().sqrt())
        figures |= {f"{name} RMSE": error, f"{name} NLL": -float(columns["log_prob"].mean())}
        bad += [f"{name} RMSE above sd(y) = {case.spread:.3g}"] * (error > case.spread)
    gaussian = _gaussian_floor(case)
    if gaussian is not None:
        figures["Gaussian floor"] = gaussian
        units = "NLL below the Gaussian floor: the errors and the densities are in different units"
        bad += [units] * (figures["clean NLL"] < gaussian - 1e-4)
    return judged(bool(bad), "; ".join(bad), **figures)


def _gaussian_floor(case: Case) -> float | None:
    """0.5 ln(2 pi e) + ln RMSE for one output, if the predicted variance is the same everywhere."""
    with torch.no_grad():
        variance = Frozen(case.predict, case.seed)(case.x).variance.double()
    if variance.ndim > 1 or float(variance.std()) > 1e-3 * float(variance.mean()):
        return None
    error = float(case.clean["squared_error"].mean().sqrt())
    return 0.5 * math.log(2 * math.pi * math.e) + math.log(max(error, 1e-300))

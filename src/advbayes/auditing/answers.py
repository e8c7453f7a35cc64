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
from advbayes.auditing.case import Case, judged, not_applicable, not_run
from advbayes.auditing.findings import Finding
from advbayes.seeds import generator_for

DIMENSIONS = 20


def _plain(ball: Ball) -> Ball:
    """The same norm and eps without box, scale and mask, where the closed forms hold."""
    return type(ball)(eps=ball.eps if ball.eps > 0 else 1.0)


def _dual(ball: Ball, w: Tensor) -> Tensor:
    """max <w, d> over the unit ball, for each row of w."""
    norm: Tensor = torch.linalg.vector_norm(w, ord=2 if isinstance(ball, L2) else 1, dim=-1)
    return norm


@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
    """Classes by a linear map: its robust accuracy has a closed form.

    >>> Linear(torch.eye(2), torch.zeros(2))(torch.tensor([[1.0, 0.0]])).probs.argmax()
    tensor(0)
    """

    weight: Tensor  # (C, D)
    bias: Tensor  # (C,)

    def __call__(self, x: Tensor) -> Distribution:
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


def attack_itself(case: Case) -> Finding:
    """E19: no mismatch with the linear closed form, and a planted vulnerability found in 95 %."""
    if not case.attacks:
        return not_run("E19", "give the attacks, not only their arrays")
    if case.task == "regression":
        return not_applicable(
            "E19", "the closed form is that of classes; regression attacks share their engine"
        )
    ball = _plain(case.ball)
    generator = generator_for(case.seed, "audit/linear")
    classes = 3
    model = Linear(torch.randn(classes, DIMENSIONS, generator=generator), torch.zeros(classes))
    attacks = {name: with_ball(attack, ball) for name, attack in case.attacks_on(model).items()}
    if not attacks:
        return not_run(
            "E19",
            "give attacks that are made for any predictor: these cannot run on a linear model",
        )
    x = (
        2.0
        * ball.eps
        * (0.7 if isinstance(ball, L2) else 1.0)
        * torch.randn(200, DIMENSIONS, generator=generator)
    )
    y = model(x).logits.argmax(1)  # type: ignore[attr-defined]
    slack = model.slack(ball, x, y)
    broken = torch.zeros(len(x), dtype=torch.bool)
    points, hidden = torch.zeros(100, DIMENSIONS), torch.zeros(100, dtype=torch.long)
    points = points + 0.05 * ball.eps * torch.randn(points.shape, generator=generator) / DIMENSIONS
    found = torch.zeros(len(points), dtype=torch.bool)
    planted = Planted(ball)
    for attack in attacks.values():
        with torch.no_grad():
            broken |= succeeded(model(attack(model, x, y, generator=generator)), y)
            found |= succeeded(
                planted(attack(planted, points, hidden, generator=generator)), hidden
            )
    clear = slack.abs() > 1e-3 * ball.eps * _dual(ball, model.weight).max()
    mismatches = int(((slack < 0) != broken)[clear].sum())
    rate = float(found.double().mean())
    advice = (
        "the attack misses what is there on models whose answer is known: repair it before "
        "anything else"
    )
    return judged(
        "E19",
        mismatches > 0 or rate < 0.95,
        advice,
        mismatches=mismatches,
        of=int(clear.sum()),
        planted_found=rate,
    )


def trivial_predictors(case: Case) -> Finding:
    """E22: better than saying nothing; no NLL below a homoscedastic model's Gaussian floor."""
    rows = {"clean": case.clean, **({"worst": case.worst()} if case.support.better else {})}
    y = (
        case.y
        if case.support.train_y is None
        else torch.as_tensor(case.support.train_y).to(case.y).reshape(-1)
    )
    figures: dict[str, float] = {}
    bad = []
    if case.task == "classification":
        with torch.no_grad():
            num_classes = case.predict(case.x[:1]).logits.shape[-1]  # type: ignore[attr-defined]
        floor = math.log(num_classes)
        guess = metrics.majority(y, num_classes)(case.x)
        share = float(metrics.expected_correct(guess, case.y).mean())
        for name, columns in rows.items():
            loss, accuracy = -float(columns["log_prob"].mean()), float(columns["correct"].mean())
            figures |= {f"{name} NLL": loss, f"{name} accuracy": accuracy}
            bad += [f"{name} NLL above ln C = {floor:.3f}"] * (loss > floor)
            bad += [f"{name} accuracy below the majority class' {share:.3f}"] * (accuracy < share)
        return judged("E22", bool(bad), "; ".join(bad), **figures)
    for name, columns in rows.items():
        error, loss = (
            float(columns["squared_error"].mean().sqrt()),
            -float(columns["log_prob"].mean()),
        )
        figures |= {f"{name} RMSE": error, f"{name} NLL": loss}
        bad += [f"{name} RMSE above sd(y) = {case.spread:.3g}"] * (error > case.spread)
    gaussian = _gaussian_floor(case)
    if gaussian is not None:
        figures["Gaussian floor"] = gaussian
        loss = -float(case.clean["log_prob"].mean())
        bad += [
            "NLL below the Gaussian floor: the errors and the densities are in different units"
        ] * (loss < gaussian - 1e-4)
    return judged("E22", bool(bad), "; ".join(bad), **figures)


def _gaussian_floor(case: Case) -> float | None:
    """0.5 ln(2 pi e) + ln RMSE for one output, if the predicted variance is the same everywhere."""
    with torch.no_grad():
        variance = case.predict(case.x).variance.double()
    if variance.ndim > 1 or float(variance.std()) > 1e-3 * float(variance.mean()):
        return None
    error = float(case.clean["squared_error"].mean().sqrt())
    return 0.5 * math.log(2 * math.pi * math.e) + math.log(max(error, 1e-300))

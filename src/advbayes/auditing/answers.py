"""Checks with known answers: the attack itself (E19), trivial predictors (E22)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from advbayes import metrics
from advbayes.attacks import succeeded, with_ball
from advbayes.attacks.balls import L2, Ball
from advbayes.auditing.case import Case, Frozen
from advbayes.auditing.findings import Finding, check, judged, not_applicable, not_run
from advbayes.seeds import generator_for
from advbayes.types import Attack

DIMENSIONS = 20
FEW, POINTS = 4, 20_000  # examples whose densities are integrated; points for several outputs


def _dual(ball: Ball, w: Tensor) -> Tensor:
    """max <w, d> over the unit ball, for each row of w."""
    rows = w.reshape(-1, w.shape[-1])
    return (rows * ball.ascend(rows, 1.0)).sum(-1).view(w.shape[:-1])


@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
    """Classes by a linear map: its robust accuracy has a closed form.

    >>> Linear(torch.eye(2))(torch.tensor([[1.0, 0.0]])).probs.argmax()
    tensor(0)
    """

    weight: Tensor  # (C, D)

    def __call__(self, x: Tensor) -> Categorical:
        return Categorical(logits=x @ self.weight.T, validate_args=False)

    def slack(self, ball: Ball, x: Tensor, y: Tensor) -> Tensor:
        """min over classes c != y of the margin to c less the most that eps can take from it; > 0:
        robust."""
        logits = x @ self.weight.T
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


def _plain(ball: Ball) -> Ball:
    """The ball without box, scale and mask, in which the closed forms hold."""
    return type(ball)(eps=ball.eps if ball.eps > 0 else 1.0)


def _breakable(ball: Ball, num: int, generator: torch.Generator) -> tuple[Linear, Tensor, Tensor]:
    """A linear model, points of which eps breaks some, and their classes."""
    linear = Linear(torch.randn(3, DIMENSIONS, generator=generator))
    spread = 2.0 * ball.eps * (0.7 if isinstance(ball, L2) else 1.0)
    x = spread * torch.randn(num, DIMENSIONS, generator=generator)
    return linear, x, linear(x).logits.argmax(1)


def share_of_breakable(attack: Attack, ball: Ball, seed: int) -> float:
    """What an attack breaks of the points of a linear model that a tenth less than eps would break.

    >>> from advbayes import pgd
    >>> share_of_breakable(pgd(L2(0.5), 20), L2(0.5), 0)
    1.0
    """
    ball, generator = _plain(ball), generator_for(seed, "audit/breakable")
    linear, x, y = _breakable(ball, 200, generator)  # of 50, one seed in fifty came out below 0.9
    breakable = linear.slack(dataclasses.replace(ball, eps=0.9 * ball.eps), x, y) < 0
    with torch.no_grad():
        x_adv = with_ball(attack, ball)(linear, x, y, generator=generator)
    return float(succeeded(linear(x_adv), y)[breakable].double().mean())


@check("E19", "the attack itself", cost=lambda case: 0.5 * case.passes, attacks=True)
def attack_itself(case: Case) -> Finding:
    """E19: no mismatch with the linear closed form, and 95 % success on a planted vulnerability."""
    if case.task == "regression":
        return not_applicable(
            "the closed form is that of classes; regression attacks share their engine"
        )
    ball, generator = _plain(case.ball), generator_for(case.seed, "audit/linear")
    linear, x, y = _breakable(ball, 200, generator)
    attacks = case.attacks_on(linear, ball)
    if not attacks:
        return not_run(
            "give attacks that are made for any predictor: these cannot run on a linear model"
        )
    planted = Planted(ball)
    points = 0.05 * ball.eps * torch.randn(100, DIMENSIONS, generator=generator) / DIMENSIONS
    zeros = torch.zeros(len(points), dtype=torch.long)
    broken, reached = torch.zeros(len(x)).bool(), torch.zeros(len(points)).bool()
    for attack in attacks.values():
        with torch.no_grad():
            broken |= succeeded(linear(attack(linear, x, y, generator=generator)), y)
            x_adv = attack(planted, points, zeros, generator=generator)
            reached |= succeeded(planted(x_adv), zeros)
    slack = linear.slack(ball, x, y)
    clear = slack.abs() > 1e-3 * ball.eps * _dual(ball, linear.weight).max()
    mismatches = int(((slack < 0) != broken)[clear].sum())
    rate = float(reached.double().mean())
    advice = "the attack misses what is there on models whose answer is known: repair it first"
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
        pairs = case.classes_of(case.x) * num_classes + case.y  # of an answer and a label
        counts = torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)
        # right, if each answer meant the class that it is given to most
        renamed = float(counts.amax(1).sum() / len(case.x))
        by_chance = 2 / math.sqrt(len(case.x))  # what choosing the best name may add
        if figures["clean accuracy"] < share < renamed - by_chance:
            bad.append(
                f"were its classes in another order, it would be right on {renamed:.3f}: are the "
                f"labels numbered as its outputs are?"
            )
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
    mass = largest_mass(case)
    if mass is not None and mass > 1.01:
        figures["largest mass"] = mass
        bad.append(f"a density that integrates to {mass:.3g} or more: it is none")
    return judged(bool(bad), "; ".join(bad), **figures)


def _gaussian_floor(case: Case) -> float | None:
    """0.5 ln(2 pi e) + ln RMSE for one output, if the predicted variance is the same everywhere."""
    with torch.no_grad():
        variance = Frozen(case.predict, case.seed)(case.x).variance.double()
    if variance.ndim > 1 or float(variance.std()) > 1e-3 * float(variance.mean()):
        return None
    error = float(case.clean["squared_error"].mean().sqrt())
    return 0.5 * math.log(2 * math.pi * math.e) + math.log(max(error, 1e-300))


@torch.no_grad()
def largest_mass(case: Case) -> float | None:
    """The most that the density of one output integrates to between -50 and 50 standard deviations
    around its mean, of the first few examples; None where it cannot be asked about many values.

    Of four grids the least counts: a peak between the points of a grid can only be missed. The
    density of several outputs is integrated by random points, and what counts is what it integrates
    to at least, beyond doubt.
    """
    prediction = Frozen(case.predict, case.seed)(case.x[:FEW])
    mean, deviation = prediction.mean.double(), prediction.variance.double().sqrt()
    if not bool((torch.isfinite(deviation) & (deviation > 0)).all()):
        return None
    if mean.ndim > 1:
        return _mass_of_several(prediction, mean, deviation, case.seed)
    places = torch.arange(-50, 50, 0.00125, dtype=torch.float64, device=mean.device).unsqueeze(1)
    try:
        density = prediction.log_prob(mean + places * deviation).exp()
    except (ValueError, RuntimeError):  # it takes one value for each prediction, or not every value
        return None
    mass = density.double().view(-1, 4, len(mean)).sum(0) * 0.005 * deviation
    return float(mass.amin(0).max())


def _mass_of_several(
    prediction: Distribution,
    mean: Tensor,  # (B, *outputs)
    deviation: Tensor,
    seed: int,
) -> float | None:
    """At least what a density of several outputs integrates to: the mean of p / q over points of q,
    less five standard errors. q mixes Gaussians around the mean, of a fifth to 50 times the
    standard deviations."""
    generator = generator_for(seed, "audit/mass", device=mean.device)
    widths = 10 ** torch.linspace(-0.7, 1.7, 8, dtype=torch.float64, device=mean.device)
    where: Any = {"generator": generator, "device": mean.device}
    choice = torch.randint(len(widths), (POINTS, len(mean)), **where)
    noise = torch.randn((POINTS, *mean.shape), dtype=torch.float64, **where)
    outputs = mean[0].numel()
    steps = noise.flatten(2) * widths[choice].unsqueeze(2)  # (S, B, D), in standard deviations
    squares = steps.square().sum(2).unsqueeze(2)
    log_each = -0.5 * squares / widths**2 - outputs * (widths.log() + 0.5 * math.log(2 * math.pi))
    log_q = log_each.logsumexp(2) - math.log(len(widths)) - deviation.flatten(1).log().sum(1)
    try:
        values = mean + steps.view_as(noise) * deviation
        log_p = prediction.log_prob(values.to(prediction.mean.dtype)).double()
        ratio = (log_p.reshape(POINTS, len(mean), -1).sum(2) - log_q).exp()
    except (ValueError, RuntimeError):  # it takes one value for each prediction, or not every value
        return None
    least = ratio.mean(0) - 5 * ratio.std(0) / math.sqrt(POINTS)
    return float(least.max())

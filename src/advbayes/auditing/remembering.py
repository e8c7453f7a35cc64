"""Checks that a predictor does not remember: test points (E28), or what it was asked (E29)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import metrics
from advbayes.attacks.balls import Ball, per_row
from advbayes.auditing.case import Case, Frozen
from advbayes.auditing.copies import Forgetful, rows_of
from advbayes.auditing.findings import Finding, check, judged, not_run
from advbayes.auditing.strength import SIGNIFICANT, further
from advbayes.evaluation.inputs import numbers_of
from advbayes.evaluation.scoring import Columns, worst
from advbayes.likelihoods import predicts_classes
from advbayes.seeds import GlobalStream, generator_for
from advbayes.types import Predictor

ALLOWED = 0.08  # of the examples: what honest models lose when the centre is moved by eps / 2
ALLOWED_ERROR = 0.5  # in regression: of the mean squared error, and of the NLL's misfit
ALLOWED_NATS = 0.1  # and of NLL beside it, for each output
HELD = 0.5  # of the examples: what a predictor may have seen of them, repeated rows being common
ASKED = 64  # examples of E29
# answers (probabilities; means in units of sd(y)) no further apart than this are the same
SAME = 1e-4
# E29: how far apart two points are asked about, in units of eps; the p at which it is no chance
BETWEEN, BY_CHANCE = (1.1, 6.0), 0.001
TURNS = 4  # E29: times that each example has two such points
EXCHANGES = 99_999  # permutations


@check("E28", "displaced centre", cost=lambda case: case.passes, attacks=True, calm=True)
def displaced_centre(case: Case) -> Finding:
    """E28: within eps of a point eps / 2 away from x the attack does not find much more than within
    eps of x."""
    if case.task == "classification" and 0.5 ** len(case.x) >= SIGNIFICANT:
        return not_run(f"{len(case.x)} examples are too few: it would pass, were all of them lost")
    generator = generator_for(case.seed, "audit/displaced", device=case.x.device)
    centre = replace(case.ball, eps=0.5 * case.ball.eps).sphere(case.x, generator=generator)
    there = case.scored(centre, "displaced")
    there = further(case, case.attacks, "displaced", there, centre)
    if case.claim is None:
        here = case.gradient()
    else:
        here = worst([case.clean, case.union(case.attacks, "in place")], case.task)
    lost, figures = loses_more(there, here, case)
    advice = "it is robust around the test points alone: it recognises them"
    values = {"at_x": case.value(here), "displaced": case.value(there)}
    known = set(rows_of(case.known))
    new = torch.tensor([row not in known for row in rows_of(case.x)])
    held = int((case.held & new).sum())
    if not lost and held > HELD * len(case.x):
        return not_run(
            f"the predictor holds {held} of the {len(case.x)} audited inputs: if it answers from "
            f"them, it is robust around them alone. Give one that has not seen them, or the data "
            f"it was trained on, if they are among those: Support(training=(x, y))"
        )
    return judged(lost, advice, **values, **figures)


def loses_more(there: Columns, here: Columns, case: Case) -> tuple[bool, dict[str, float]]:
    """Whether more is lost from `here` to `there` than honest models lose: McNemar at 1 % after 8
    points of the examples are taken off; in regression paired bootstraps of the squared errors,
    after half of their mean is, and of the NLL, after 0.1 nats and half of what it is above that of
    the Gaussian whose variance is the mean squared error."""
    if case.task == "regression":
        before, after = (1 + ALLOWED_ERROR) * here["squared_error"], there["squared_error"]
        nll, nll_after = (-each["log_prob"] / case.y[0].numel() for each in (here, there))
        fitting = 0.5 * (2 * math.pi * math.e * here["squared_error"].mean()).log()
        misfit = (nll.mean() - fitting).clamp(0, sys.float_info.max)
        nll = nll + ALLOWED_NATS + ALLOWED_ERROR * misfit
        beyond, nll_beyond = (
            metrics.paired_difference(*pair, level=1 - 2 * SIGNIFICANT).low
            for pair in ((after, before), (nll_after, nll))
        )
        figures = {"beyond_allowed": beyond, "nll_beyond_allowed": nll_beyond}
        return max(beyond, nll_beyond) > 0, figures
    broken, stood = there["correct"] < 0.5, here["correct"] >= 0.5
    aside = (broken & stood).nonzero().squeeze(1)[: int(ALLOWED * len(broken))]
    kept = torch.ones(len(broken), dtype=torch.bool)
    kept[aside] = False
    p = metrics.mcnemar(broken[kept], ~stood[kept])
    return p < SIGNIFICANT, {"p": p}


@check(
    "E29", "order independence", cost=lambda case: case.passes * min(1.0, ASKED / case.budget.num)
)
def order_independence(case: Case) -> Finding:
    """E29: adversarial points asked first, of a copy, get the answers that they get after
    everything else; so do clean ones, in whatever order and company they are asked."""
    make = case.copies.make
    if make is None:
        return not_run(
            f"the predictor cannot be copied ({case.copies.why}): give Support(factory=...)"
        )
    if not case.attacks and case.claim is None:
        return not_run("give the attacks")
    rows = torch.arange(min(ASKED, len(case.x)))
    unasked: Predictor = Forgetful(make)
    asked: Predictor = case.predict
    if case.stochastic and case.can_be_fixed:
        unasked, asked = Forgetful(lambda: Frozen(make(), case.seed)), Frozen(asked, case.seed)
    points = {
        f"{name} of the copy": case.attacked(attack, f"unasked {name}", through=unasked, rows=rows)
        for name, attack in case.attacks_on(unasked).items()
    }
    arrays = {name: x_adv[rows] for name, x_adv in case.arrays().items()}
    points |= {name: x_adv for name, x_adv in arrays.items() if bool(torch.isfinite(x_adv).all())}
    clean = case.x[rows]
    if not case.can_be_fixed or changed(unasked, unasked, clean, case).any():
        # it draws from a source of its own: its answers are compared on average
        return _on_average(case, make, {"clean": clean, **points}, rows)
    asked(clean)
    other = torch.stack([changed(unasked, asked, x_adv, case) for x_adv in points.values()]).any(0)
    again = changed(unasked, asked, clean, case)
    advice = "answers depend on what was asked before: the predictor remembers its queries"
    figures = {"adversarial": int(other.sum()), "clean": int(again.sum()), "of": len(rows)}
    drawn = False
    if not case.stochastic:
        moved = in_other_company(asked, case.x[: case.budget.batch_size], case)
        figures["in_other_company"] = int(moved.sum())
        if not bool((other | again).any()) and bool(moved.any()):
            advice = "answers depend on the batch that an input comes in"
        after, before = case.in_turn
        figures["drawn_together"] = int((after & ~before).sum())
        drawn = metrics.mcnemar(after, before) < BY_CHANCE
        with torch.no_grad():
            later = apart(answers(case.at_first, case), answers(asked(clean), case))
        figures["since_the_beginning"] = int(later.sum())
        if bool(later.any()) and not bool((other | again).any() or moved.any() or drawn):
            advice = "answers are others than when the audit began: they depend on time, or on use"
        again = torch.cat([again, moved, later])
    return judged(drawn or bool(other.any() or again.any()), advice, **figures)


@torch.no_grad()
def asked_in_turn(predict: Predictor, x: Tensor, ball: Ball, seed: int) -> tuple[Tensor, Tensor]:
    """Whether two points are answered alike, (TURNS B,) bool each: where the one half-way between
    them was asked about before, and where it was not. Nothing has been asked there earlier, and
    wherever a memory may be kept, it makes the first more frequent than the second. Of a predictor
    that raises away from the data nothing is found out.

    >>> from torch.distributions import Categorical
    >>> first = []
    >>> def repeats(x):
    ...     first.append(x)
    ...     return Categorical(logits=first[min(len(first) - 1, 2 * TURNS)])
    >>> from advbayes import L2
    >>> alike = asked_in_turn(repeats, torch.rand(20, 3), L2(0.1), 0)
    >>> [int(each.sum()) for each in alike]
    [80, 0]
    """
    generator = generator_for(seed, "audit/in turn", device=x.device)

    def moved(points: Tensor, by: Tensor) -> Tensor:
        """Each point moved by so many eps in some direction, within the box."""
        way = replace(ball, box=None).sphere(points, generator=generator) - points
        return ball.clip(points + per_row(by, points) * way)

    def alike(between: bool) -> Tensor:
        low, high = BETWEEN
        share = torch.rand(len(x), generator=generator, dtype=x.dtype, device=x.device)
        apart = low * (high / low) ** share
        one = moved(x, 2 * apart)
        other = moved(one, apart)
        if between:
            predict((one + other) / 2)
        first, second = (numbers_of(predict(points)) for points in (one, other))
        return ((first - second).abs() <= 1e-6 * (1 + first.abs())).all(1).cpu()

    try:
        with GlobalStream(seed):
            without = torch.cat([alike(between=False) for _ in range(TURNS)])
            return torch.cat([alike(between=True) for _ in range(TURNS)]), without
    except Exception:  # whatever a foreign predictor raises; on the data it is named
        return torch.zeros(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)


@torch.no_grad()
def in_other_company(predict: Predictor, x: Tensor, case: Case) -> Tensor:  # (B,) bool
    """Which of the points are answered differently in the opposite order, in half of the batch, in
    a quarter and so on, down to the first one alone."""
    usual = answers(predict(x), case)
    moved = torch.zeros(len(x), dtype=torch.bool)
    for size in sorted({-(-len(x) // 2**k) for k in range(len(x).bit_length() + 1)}):
        turned = answers(predict(x[:size].flip(0)), case).flip(0)
        moved[:size] |= apart(usual[:size], turned)
    return moved


@torch.no_grad()
def changed(first: Predictor, second: Predictor, x: Tensor, case: Case) -> Tensor:  # (B,) bool
    """Which of the points two predictors answer differently."""
    return apart(answers(first(x), case), answers(second(x), case))


def answers(prediction: Distribution, case: Case) -> Tensor:  # (B, K)
    """Probabilities, or means and standard deviations in units of sd(y)."""
    if predicts_classes(prediction):
        return prediction.probs
    moments = torch.stack([prediction.mean, prediction.variance.sqrt()], 1)
    return moments.flatten(1) / case.spread


def apart(first: Tensor, second: Tensor) -> Tensor:  # (B, K) each -> (B,) bool
    """Which rows are not the same."""
    return ((first - second).abs().amax(1) > SAME).cpu()


def _on_average(
    case: Case, make: Callable[[], Predictor], points: dict[str, Tensor], rows: Tensor
) -> Finding:
    """The same where a predictor's randomness cannot be fixed: several calls, of a copy for each
    array and of the predictor, have values that may be exchanged. With many arrays one of them
    would be apart by chance: each has its share of `BY_CHANCE`."""
    worse = []
    for name, x_adv in points.items():
        values = [
            [
                case.value(case.scored(x_adv, f"order {name} {call}", by=each, rows=rows))
                for call in range(case.rescored)
            ]
            for each in (make(), case.predict)
        ]
        first, after = torch.tensor(values, dtype=torch.float64)
        worse += [name] * (by_exchange(first, after, case.seed) < BY_CHANCE / len(points))
    advice = (
        f"answers ({', '.join(worse)}) depend on what was asked before: the predictor "
        f"remembers its queries"
    )
    return judged(bool(worse), advice, other_answers=len(worse), of=len(points))


def by_exchange(first: Tensor, second: Tensor, seed: int) -> float:
    """p of a difference in means this large, if values may be exchanged between the two (a
    permutation test).

    >>> (
    ...     by_exchange(torch.zeros(10), torch.ones(10), 0),
    ...     by_exchange(torch.ones(4), torch.ones(4), 0),
    ... )
    (1e-05, 1.0)
    """
    together = torch.cat([first, second]).double()
    coins = generator_for(seed, "audit/exchange")
    order = torch.rand(EXCHANGES, len(together), generator=coins).argsort(1)
    means = together[order[:, : len(first)]].mean(1), together[order[:, len(first) :]].mean(1)
    apart = float((first.double().mean() - second.double().mean()).abs())
    return (1 + int(((means[0] - means[1]).abs() >= apart - 1e-12).sum())) / (1 + EXCHANGES)

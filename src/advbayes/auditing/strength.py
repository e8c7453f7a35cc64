"""Checks of how strong the attack is against this predictor: E1 to E9 and E12."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import metrics
from advbayes.attacks import loss_and_gradient, nll, one_step, squared_error, succeeded, with_ball
from advbayes.attacks.balls import Ball
from advbayes.attacks.gradients import score
from advbayes.attacks.hard_label import HardLabel
from advbayes.attacks.parts import losses_of, steps_of, with_eps, with_restarts, with_steps
from advbayes.auditing.case import POINT, Case, Frozen, overwritten
from advbayes.auditing.copies import Forgetful
from advbayes.auditing.findings import Finding, check, judged, no_attacks, not_applicable, not_run
from advbayes.evaluation.inputs import extent_of
from advbayes.evaluation.measuring import batches
from advbayes.evaluation.scoring import Columns, worst
from advbayes.likelihoods import predicts_classes
from advbayes.seeds import generator_for
from advbayes.types import Attack

SIGNIFICANT = 0.01
FEWEST = 10  # E6: steps that an attack of fewer is held against
NEIGHBOURS, OTHERS = 5, 2000  # E12: examples that one is moved towards, of so many
NOTHING = (
    "the attacker may touch nothing (every feature is text, missing or fixed): numbers under "
    "attack are the clean ones, and say nothing of attacks"
)


def breaks_more(case: Case, first: Columns, second: Columns) -> tuple[bool, float]:
    """Whether `first` does significantly more harm than `second`: McNemar on what broke, or a
    paired bootstrap of the squared errors; with the p-value (regression: the least difference in
    the 98 % interval)."""
    if case.task == "classification":
        p = metrics.mcnemar(first["correct"] < 0.5, second["correct"] < 0.5)
        return p < SIGNIFICANT, p
    difference = metrics.paired_difference(
        first["squared_error"], second["squared_error"], level=1 - 2 * SIGNIFICANT
    )
    return difference.low > 0, difference.low


@check("E1", "feasible", cost=lambda case: case.passes)
def feasible(case: Case) -> Finding:
    """E1: every scored point is finite, in the ball and in the box."""
    outside, farthest = 0, 0.0
    for x_adv in case.arrays().values():
        outside += int((~case.ball.contains(x_adv, case.x)).sum())
        farthest = max(farthest, float(case.ball.norm(x_adv - case.x).nan_to_num(torch.inf).max()))
    advice = "project the array that is scored, after every conversion of it"
    figures = {"infeasible": outside, "largest_norm": farthest, "eps": float(case.ball.eps)}
    return judged(outside > 0, advice, **figures)


@check("E2", "null attack", cost=lambda case: len(case.attacks), attacks=True)
def null_attack(case: Case) -> Finding:
    """E2: eps = 0 changes nothing."""
    changed = 0
    for name, attack in case.attacks.items():
        x_adv = case.attacked(with_eps(attack, 0.0), f"null {name}")
        changed += int((x_adv != case.x).flatten(1).any(1).sum())
    advice = "with eps = 0 the attack must return x itself, to the bit"
    return judged(changed > 0, advice, changed=changed)


@check("E3", "iterative beats one-step", cost=lambda case: 2)
def beats_one_step(case: Case) -> Finding:
    """E3: the one-step attack does not break more than the iterative one."""
    iterative = [name for name in case.arrays() if (steps_of(case.attacks.get(name)) or 2) > 1]
    if not iterative:
        return not_run("there is no iterative attack")
    loss = squared_error if case.task == "regression" else nll
    single = case.union({"one step": one_step(case.ball, loss)}, "E3", join=True)
    many = case.columns()[iterative[0]]
    worse, p = breaks_more(case, single, many)
    advice = (
        "the iterative attack is broken: keep the best iterate, start at the one-step point, "
        "check its step size"
    )
    figures = {"one_step": case.value(single), "iterative": case.value(many)}
    figures["p" if case.task == "classification" else "least_difference"] = p
    return judged(worse, advice, **figures)


def _radii(case: Case) -> dict[float, Columns]:
    """eps -> the scores of the union of attacks, at half, once and twice eps and in the whole box;
    each radius by itself. In the whole box every feature may change: an honest model may well
    answer from those that a mask keeps from the attacker."""
    whole = extent_of(case.ball.freed(), case.x)
    radii = sorted({0.5 * case.ball.eps, case.ball.eps, min(2 * case.ball.eps, whole), whole})

    def at(eps: float) -> Columns:
        if eps == case.ball.eps and case.claim is None:
            return worst(list(case.columns().values()), case.task)
        attacks = case.attacks.items()
        wider = {name: with_eps(each, eps, free=eps == whole) for name, each in attacks}
        return _left_by(case, wider, f"eps {eps!r}")

    return case.once("radii", lambda: {eps: at(eps) for eps in radii})


def _left_by(case: Case, attacks: dict[str, Attack], purpose: str) -> Columns:
    """What the attacks leave, each of them asked about the rest alone; the one that starts from
    other examples comes first, while it has any."""
    in_order = sorted(attacks.items(), key=lambda named: not isinstance(named[1], HardLabel))
    return further(case, dict(in_order[1:]), purpose, case.union(dict(in_order[:1]), purpose))


def within_reach(ball: Ball, x: Tensor) -> Tensor | None:  # (*event) bool
    """The features that the attacker may touch in some example, without the few that eps moves by
    less than a hundredth of their extent; None where these are all.

    >>> from advbayes import L2
    >>> within_reach(L2(0.5, scale=torch.tensor([1.0, 0.01])), torch.tensor([[0.0, 0], [1, 1]]))
    tensor([ True, False])
    """
    extent = x.amax(0) - x.amin(0)
    allowed = ball.within_reach(torch.ones_like(x, dtype=torch.bool), x).any(0)
    far = allowed & (ball.eps * ball.units(x) < 0.01 * extent)
    if int(far.sum()) <= int((allowed & ~far & (extent > 0)).sum()):  # else eps is just small
        allowed = allowed & ~far
    return None if bool(allowed.all()) else allowed


@check("E4", "monotone in eps", cost=lambda case: 4 * case.passes, attacks=True, calm=True)
def monotone(case: Case) -> Finding:
    """E4: accuracy does not rise with eps, and the largest eps leaves at most 1 %."""
    curve = _radii(case)
    rises = [
        f"{nearer:g} to {farther:g}"
        for (nearer, before), (farther, after) in pairwise(curve.items())
        if breaks_more(case, before, after)[0]
    ]
    figures = {f"at eps {eps:.3g}": case.value(columns) for eps, columns in curve.items()}
    left = case.value(worst(list(curve.values()), case.task))
    bad = bool(rises) or (case.task == "classification" and left > 0.01)
    rising = f"accuracy rises from eps {', '.join(rises)}"
    advice = rising if rises else "the largest eps leaves too much"
    advice += ": the attack does not use its budget, or the labels leak"
    return judged(bad, advice, **figures)


@check("E5", "unbounded attack wins", attacks=True, calm=True)
def unbounded(case: Case) -> Finding:
    """E5: with the whole box to move in, nothing is left; and where some features are out of the
    attacker's reach, the others have a say in the answers, or the labels may sit in those."""
    figures: dict[str, float] = {}
    bad = void = False
    if case.task == "classification":
        curve = _radii(case)
        # points of a smaller ball are in the larger one
        left = case.value(worst(list(curve.values()), case.task))
        figures, bad = {"eps": max(curve), "accuracy": left}, left > 0.01
    reach = within_reach(case.ball, case.x)
    if reach is None and case.task == "regression":
        return not_applicable("regression has no accuracy")
    if reach is not None:
        low, high = case.x.amin(0), case.x.amax(0)
        around = low - (low == high).to(low), high + (low == high).to(low)  # a constant moves by 1
        ball = replace(case.ball, mask=reach, box=case.ball.box or around)
        ball = replace(ball, eps=extent_of(ball, case.x))
        attacks = {name: with_ball(each, ball) for name, each in case.attacks.items()}
        reached = worst([case.clean, _left_by(case, attacks, "in reach")], case.task)
        clean, kept = case.value(case.clean), case.value(reached)
        figures |= {"clean": clean, "in_reach": kept}
        void = clean - kept <= 0.01 + 1e-9 and (case.task == "regression" or clean > 0.01)
    advice = (
        "some of the answer does not come from what the attacker may touch (leaked labels, "
        "masked gradients)"
    )
    if reach is not None and not bool(reach.any()):
        advice = NOTHING
    return judged(bad or void, advice, **figures)


def further(
    case: Case,
    attacks: Mapping[str, Attack],
    purpose: str,
    columns: Columns,
    centre: Tensor | None = None,
) -> Columns:
    """The union of what `columns` broke and what each attack in turn breaks of the rest."""
    for name, attack in attacks.items():
        rows, what = case.unbroken(columns), f"{purpose} {name}"
        if len(rows):
            made = case.attacked(attack, what, rows=rows, centre=centre)
            scores = case.scored(made, what, rows=rows)
            before = {key: columns[key][rows] for key in scores}
            columns = overwritten(columns, worst([before, scores], case.task), rows)
    return columns


def doubled(
    case: Case,
    attacks: Mapping[str, Attack],
    before: Columns,
    what: str,
    more: Callable[[Attack, int], Attack],
    is_last: Callable[[int], bool],
    factor: int = 2,
) -> tuple[int, float, Columns]:
    """Twice (or `factor` times) as much of something, and twice as much again while that costs more
    than half a point: how many times as much there was before the last of these, what that cost,
    and the scores that are left."""
    enough = 1
    while True:
        larger = {name: more(attack, factor) for name, attack in attacks.items()}
        after = further(case, larger, f"{what} x{factor}", before)
        case.join(f"{what} x{factor}", after)
        cost = case.value(before) - case.value(after)
        if cost <= POINT + 1e-9 or is_last(factor):
            return enough, cost, after
        before, enough, factor = after, factor, 2 * factor


@check("E6", "converged in steps", cost=lambda case: 2 * case.passes, attacks=True, calm=True)
def converged_in_steps(case: Case) -> Finding:
    """E6: twice the steps, and ten at least, cost at most half a point; an attack of the audit's
    own choosing is escalated first."""
    most = max(steps_of(attack) or 0 for attack in case.attacks.values())
    if not most:
        return not_run("the attacks do not say how many steps they take")

    def is_last(factor: int) -> bool:
        return case.claim is not None or 2 * factor * most > case.budget.max_steps

    before = case.gradient()
    factor = max(2, math.ceil(FEWEST / most))  # two steps may be as far from the end as one
    enough, cost, after = doubled(
        case, case.attacks, before, "steps", with_steps, is_last, factor=factor
    )
    case.memory["converged attacks"] = {
        name: with_steps(attack, enough) for name, attack in case.attacks.items()
    }
    figures = {"cost": cost, "steps": enough * most, case.label: case.value(after)}
    advice = "use more steps, or adaptive step sizes, until doubling changes nothing"
    return judged(cost > POINT + 1e-9, advice, **figures)


@check("E7", "converged in restarts", cost=lambda case: 2 * case.passes, attacks=True, calm=True)
def converged_in_restarts(case: Case) -> Finding:
    """E7: twice the restarts cost at most half a point; attacks of the audit's own choosing are
    given more of them first."""
    attacks: dict[str, Attack] = case.memory.get("converged attacks", case.attacks)
    before = case.gradient() if attacks is case.attacks or case.claim is not None else case.worst()

    def is_last(factor: int) -> bool:
        return not case.own_attacks or 2 * factor > case.budget.max_restarts

    enough, cost, _ = doubled(case, attacks, before, "restarts", with_restarts, is_last)
    advice = "use more restarts until doubling changes nothing"
    return judged(cost > POINT + 1e-9, advice, cost=cost, times=enough)


class _Watched:
    """A predictor that remembers the points at which it was wrong, by the example that they belong
    to: the one in whose ball they are where no two balls meet (`apart`), else the one in whose
    place they stand, as long as no row leaves the batch."""

    def __init__(self, case: Case, rows: Tensor, apart: bool) -> None:
        self.case, self.x, self.y, self.apart = case, case.x[rows], case.y[rows], apart
        self.purifier = case.target  # for the attacks that are made for one
        self.aligned = True
        self.seen: list[list[Tensor]] = [[] for _ in rows]

    def __call__(self, x: Tensor) -> Distribution:
        prediction = self.case.target(x)
        self.aligned &= self.apart or len(x) == len(self.x)
        # of an estimated gradient: no iterates
        probes = self.case.black_box and len(x) > len(self.x)
        if self.aligned and not probes and predicts_classes(prediction):
            # (B, N): point, example
            wrong = prediction.logits.detach().argmax(-1).unsqueeze(1) != self.y
            if not self.apart:
                wrong &= torch.eye(len(x), dtype=torch.bool, device=x.device)
            point, example = wrong.nonzero().unbind(1)
            inside = self.case.ball.contains(x.detach()[point], self.x[example])
            for row, place in zip(example[inside].tolist(), point[inside].tolist(), strict=True):
                self.seen[row].append(x[place].detach().clone())
        return prediction


def _apart(case: Case, rows: Tensor) -> list[Tensor]:
    """The rows in groups within which no two balls meet."""
    groups: list[list[int]] = []
    reach = 2.001 * case.ball.eps + 1e-6
    for row in rows.tolist():
        for group in groups:
            if bool((case.ball.norm(case.x[group] - case.x[row]) > reach).all()):
                group.append(row)
                break
        else:
            groups.append([row])
    return [torch.tensor(group) for group in groups]


@check(
    "E8",
    "no silent success",
    cost=lambda case: case.passes * min(1.0, 32 / case.budget.num),
    calm=True,
)
def silent_success(case: Case) -> Finding:
    """E8: whenever an adversarial iterate was seen, an adversarial one is returned."""
    if case.task == "regression":
        return not_applicable("regression has no success to miss")
    if not case.attacks:
        return no_attacks()
    first = torch.arange(min(len(case.x), 32))
    # Black boxes are asked about one example at a time: the number of inputs tells a probe from an
    # iterate.
    groups = list(torch.split(first[:4], 1)) if case.black_box else _apart(case, first)[:16]
    missed, watched = 0, 0

    def watch(attack: Attack, purpose: str, rows: Tensor, apart: bool) -> tuple[_Watched, Tensor]:
        spy = _Watched(case, rows, apart)
        return spy, case.attacked(attack, f"watched {purpose}", through=spy, rows=rows)

    for name, attack in case.attacks.items():
        parts = [watch(attack, name, first, apart=len(groups) == 1)]
        if not parts[0][0].aligned:
            parts = [
                watch(attack, f"{name} {number}", group, apart=True)
                for number, group in enumerate(groups)
            ]
        for spy, final in parts:
            with torch.no_grad():
                harmless = (~succeeded(case.target(final), spy.y)).tolist()
            for seen, x_adv, missing in zip(spy.seen, final, harmless, strict=True):
                watched += 1
                returned = any(torch.equal(x_adv, point) for point in seen)
                missed += bool(seen) and missing and not returned
    advice = "return the best iterate, not the last"
    return judged(missed > 0, advice, missed=missed, watched=watched)


@check("E9", "usable gradients", cost=lambda case: 2)
def usable_gradients(case: Case) -> Finding:
    """E9: at most 1 % of the examples have no gradient in what the attacker may touch (for every
    loss in use), one that is not finite, or one of other answers than those that are scored."""
    if case.black_box:
        return not_applicable("there is no gradient, and no attack asks for one")
    used = dict.fromkeys(loss for attack in case.attacks.values() for loss in losses_of(attack))
    losses = [loss for loss in used if hasattr(loss, "__name__")] or [nll]
    reach = case.ball.within_reach(torch.ones_like(case.x, dtype=torch.bool), case.x)
    # An example of which all is missing has nothing to move; where that is all of them, say so.
    movable = reach.flatten(1).any(1).cpu()
    nothing = not bool(movable.any())
    flat = ~movable if nothing else movable
    broken, foreign = torch.zeros_like(flat), torch.zeros_like(flat)
    comparable = case.target is case.predict and not case.stochastic
    for loss in losses:
        for part in batches(len(case.x), case.budget.batch_size):
            x, y = case.x[part], case.y[part]
            value, _, gradient = loss_and_gradient(case.target, loss, x, y)
            finite = torch.isfinite(gradient).flatten(1).all(1).cpu()
            broken[part] |= ~finite
            flat[part] &= finite & (gradient * reach[part] == 0).flatten(1).all(1).cpu()
            if comparable:
                plain, _ = score(case.predict, loss, x, y)
                foreign[part] |= ((value - plain).abs() > 1e-3 * (1 + plain.abs())).cpu()
    share = float((flat | broken | foreign).double().mean())
    masked = "gradients are masked: attack through a stand-in (straight-through) and by black boxes"
    advice = NOTHING if nothing else masked
    counts = {"zero": flat, "not_finite": broken, "of_other_answers": foreign}
    figures = {name: int(rows.sum()) for name, rows in counts.items()}
    return judged(share > 0.01, advice, unusable=share, **figures)


@check(
    "E12",
    "noise not better",
    cost=lambda case: case.budget.random_points + NEIGHBOURS + 1,
    calm=True,
)
def noise_not_better(case: Case) -> Finding:
    """E12: random points of the sphere break at most 0.5 % of what the gradient attack left, and
    points on the way to other examples do not break more than it did (McNemar)."""
    standing = case.unbroken(case.gradient())
    if not len(standing):
        return judged(False, "", standing=0, broken=0.0)
    # fixed noise is that of a place in the batch: all are asked about, so that it stays the same
    is_fixed = isinstance(case.predict, (Frozen, Forgetful))
    rows = torch.arange(len(case.x)) if is_fixed else standing
    kept = standing if is_fixed else torch.arange(len(rows))
    before = {name: values[rows] for name, values in case.gradient().items()}
    generator = generator_for(case.seed, "audit/noise", device=case.x.device)
    draws = [
        case.scored(case.ball.sphere(case.x[rows], generator=generator), f"noise {k}", rows=rows)
        for k in range(case.budget.random_points)
    ]
    noisy = worst(draws, case.task)
    if case.task == "classification":
        harmed = noisy["correct"] < 0.5
    else:  # clearly larger errors than the attack's
        harmed = noisy["squared_error"] > before["squared_error"] + 0.01 * case.spread**2
    broken = float(harmed[kept].double().mean())
    case.join("noise", noisy, rows)
    advice = "the gradient attack misses what noise finds: it is broken, or gradients are masked"
    figures: dict[str, float] = {"broken": broken, "standing": len(standing)}
    figures["points"] = case.budget.random_points
    missed = False
    if towards := _towards_others(case, rows):
        columns = worst([case.scored(points, "others", rows=rows) for points in towards], case.task)
        missed, _ = breaks_more(case, columns, before)
        figures["towards_others"] = int((columns["correct"][kept] < 0.5).sum())
        case.join("towards others", columns, rows)
        if missed and broken <= POINT:
            advice = (
                "the attack misses what lies on the way to other examples: use one that goes there "
                "(HardLabel), or one made for this defense"
            )
    return judged(broken > POINT or missed, advice, **figures)


@torch.no_grad()
def _towards_others(case: Case, rows: Tensor) -> list[Tensor]:
    """The rows, moved by eps towards the nearest, the second nearest ... of the examples (of the
    data and of the training) that are answered otherwise; classes alone."""
    if case.task == "regression":
        return []
    others = torch.cat([case.whole[0][:OTHERS], case.known[:OTHERS]])
    said = case.classes_of(others)
    x, y, ball = case.x[rows], case.y[rows], replace(case.ball, eps=0.999 * case.ball.eps)
    moved = [x.clone() for _ in range(NEIGHBOURS)]
    for row in range(len(x)):
        otherwise = others[said != y[row]]
        nearest = ball.norm(otherwise - x[row]).argsort()[:NEIGHBOURS]
        for points, one in zip(moved, otherwise[nearest], strict=False):
            way = ball.within_reach(one - x[row], x[row])
            length = max(float(ball.norm(way.unsqueeze(0))), 1e-12)
            step = min(1.0, ball.eps / length) * way
            points[row] = ball.project((x[row] + step).unsqueeze(0), x[row : row + 1])[0]
    return moved

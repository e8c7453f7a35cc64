"""Attacks made of attacks: the worst of several, transfer, the default suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks.apgd import APGD
from advbayes.attacks.ascent import pgd
from advbayes.attacks.balls import L2, Ball
from advbayes.attacks.black_box import RandomSearch, Square
from advbayes.attacks.losses import (
    ByLoss,
    DivergenceFrom,
    Exceeding,
    MarginTo,
    PerExample,
    Toward,
    dlr,
    margin,
    nll,
    squared_error,
)
from advbayes.attacks.multi_start import MultiStart
from advbayes.attacks.parts import (
    A,
    applies_to,
    inner_attacks,
    loss_names,
    on_rows,
    rebuilt,
    settings,
)
from advbayes.attacks.search import Problem, Search
from advbayes.likelihoods import predicts_classes
from advbayes.types import Attack, Loss, Predictor

_ANYWHERE = L2(1e300)  # holds all data: the parts check x against balls of their own


def _check_attacks(name: str, attacks: Sequence[Attack], *, low: int = 1) -> tuple[Attack, ...]:
    attacks = tuple(attacks)
    if len(attacks) < low:
        raise checks.InputError(f"{name} must hold at least one attack, got none")
    for number, attack in enumerate(attacks):
        checks.function(f"{name}[{number}]", attack, "an attack such as pgd(L2(1.0))")
    return attacks


def _rank(
    rank: Loss | None, name: str, attacks: Sequence[Attack], *, regression: bool = False
) -> Loss:
    """What the points compete by: the loss given, or else what the attacks want."""
    if rank is None:
        return _rank_of(name, attacks, regression=regression)
    return checks.function("rank", rank, "a loss such as nll")


@dataclass(frozen=True, repr=False)
class Suite(Search):
    """The worst of several attacks, example by example: broken first, then the larger `rank`.

    `rank` also defines what broken means. By default it follows the attacks' own aim (a PGD's last
    stage counts): their target, or their common loss if that is not a loss of the label, or else
    `nll`; in regression `squared_error` where one of them climbs it, for the largest error is at
    another point than the least likelihood (`rank=nll` keeps that one). Without `rank`, targeted
    and untargeted attacks cannot be mixed: for the former y is the class to reach, for the latter
    the one to leave.

    The first attack sees every example, each later one only those that are not broken yet; in
    regression, where nothing breaks, `regression` (default: the same attacks) runs on all of them.
    Attacks that are made for other predictors (a purifier's own) are left out.

    >>> from advbayes import L2, one_step, pgd
    >>> Suite((one_step(L2(1.0)), pgd(L2(1.0), 3))).attacks[0].is_one_step
    True
    """

    attacks: tuple[Attack, ...]
    regression: tuple[Attack, ...] = ()
    rank: Loss | None = None
    ball = _ANYWHERE

    def __post_init__(self) -> None:
        object.__setattr__(self, "attacks", _check_attacks("attacks", self.attacks))
        object.__setattr__(self, "regression", _check_attacks("regression", self.regression, low=0))
        _rank(self.rank, "attacks", self.attacks)
        _rank(self.rank, "regression", self.regression)

    @property
    def _losses(self) -> tuple[Loss, ...]:
        return (self.rank or nll,)

    def _search(self, problem: Problem) -> Tensor:
        predict, x = problem.predict, problem.x
        with torch.no_grad():
            classes = predicts_classes(predict(x))
        attacks = self.in_task("classification" if classes else "regression").attacks
        rank = _rank(self.rank, "attacks", attacks, regression=not classes)
        attacks = tuple(attack for attack in attacks if applies_to(attack, predict))
        if not attacks:
            raise checks.InputTypeError(
                f"attacks must hold one that applies to this predictor, got none for "
                f"{checks.describe(predict)}"
            )
        problem = problem.on(rank)
        best = problem.score(x)
        for number, attack in enumerate(attacks):
            rows = best.unbroken if number else torch.arange(len(x), device=x.device)
            if not len(rows):
                break
            part = problem.rows(rows)
            x_adv = on_rows(attack, rows)(predict, part.x, part.y, generator=part.generator)
            best = best.improved(rows, part.score(x_adv))
        return best.x

    def in_task(self, task: str) -> Suite:
        """The suite of what runs in a task alone."""
        regression = self.regression if task == "regression" else ()
        return Suite(regression or self.attacks, rank=self.rank)

    def applies_to(self, predict: Predictor) -> bool:
        """Whether some of it is made for the predictor."""
        return any(applies_to(attack, predict) for attack in (*self.attacks, *self.regression))


def for_task(attack: A, task: str) -> A:
    """The attack with those parts alone that run in a task.

    >>> from advbayes import L2, pgd, squared_error
    >>> both = Suite((pgd(L2(1.0)),), regression=(pgd(L2(1.0), 5, squared_error),))
    >>> for_task(both, "regression").attacks[0].stages[0][0].__name__
    'squared_error'
    """
    return rebuilt(
        attack, lambda part: settings(part.in_task(task)) if isinstance(part, Suite) else {}
    )


@dataclass(frozen=True, repr=False)
class Transfer(Search):
    """Examples made against other models (undefended, sibling), the worst by `rank` kept.

    `rank` is as in `Suite`: absent, it follows what the attack wants.

    >>> from advbayes import L2, one_step
    >>> gentle = lambda x: torch.distributions.Normal(x[:, 0], 1.0)
    >>> steep = lambda x: torch.distributions.Normal(2 * x[:, 0], 1.0)
    >>> Transfer(one_step(L2(0.5)), (steep,))(gentle, torch.ones(1, 1), torch.zeros(1))
    tensor([[1.5000]])
    """

    attack: Attack
    sources: tuple[Predictor, ...]
    rank: Loss | None = None
    ball = _ANYWHERE

    def __post_init__(self) -> None:
        checks.function("attack", self.attack, "an attack such as pgd(L2(1.0))")
        _rank(self.rank, "attack", (self.attack,))
        if not isinstance(self.sources, (tuple, list)) or not all(map(callable, self.sources)):
            raise checks.InputTypeError("sources must be a tuple of predictors", got=self.sources)
        object.__setattr__(self, "sources", tuple(self.sources))
        if not self.sources:
            raise checks.InputError("sources must hold at least one predictor, got none")

    @property
    def _losses(self) -> tuple[Loss, ...]:
        return (self.rank or nll,)

    def _search(self, problem: Problem) -> Tensor:
        x, y, rank = problem.x, problem.y, self.rank
        if rank is None:
            with torch.no_grad():
                classes = predicts_classes(problem.predict(x[:1]))
            rank = _rank_of("attack", (self.attack,), regression=not classes)
        problem = problem.on(rank)
        best = problem.score(x)
        for source in self.sources:
            x_adv = self.attack(source, x, y, generator=problem.generator)
            best = best.or_better(problem.score(x_adv))
        return best.x

    def applies_to(self, predict: Predictor) -> bool:
        """Whether the attack is made for its sources; the predictor itself it only asks."""
        return all(applies_to(self.attack, source) for source in self.sources)


def _rank_of(name: str, attacks: Sequence[Attack], *, regression: bool = False) -> Loss:
    """What several attacks compete by, from what each of them wants."""
    wanted = [loss for attack in attacks for loss in _wants(attack)]
    targeted = [loss for loss in wanted if _is_targeted(loss)]
    if targeted and len(targeted) < len(wanted):
        shown = ", ".join(getattr(loss, "__name__", type(loss).__name__) for loss in wanted)
        raise checks.InputError(
            f"{name} must be all targeted or all untargeted, unless rank says what is worse, got "
            f"losses {shown}"
        )
    if targeted:
        return targeted[0]
    shared = bool(wanted) and all(_is_same(loss, wanted[0]) for loss in wanted)
    if shared and not _leaves_y(wanted[0]):
        return wanted[0]
    errors = regression and any(loss is squared_error for loss in wanted)
    return squared_error if errors else nll


def _wants(attack: object) -> Iterator[Loss]:
    """The losses that an attack's points are chosen by; nothing for one that does not show them."""
    fields = settings(attack)
    if callable(fields.get("rank")):
        yield fields["rank"]
    elif "stages" in fields:
        yield fields["stages"][-1][0]
    elif callable(fields.get("loss")):
        yield fields["loss"]
    else:
        for part in inner_attacks(attack):
            yield from _wants(part)


def _is_targeted(loss: Loss) -> bool:
    """Whether the attacker wants the prediction to become something, rather than to leave y."""
    match loss:
        case Toward() | DivergenceFrom():
            return True
        case ByLoss() | Exceeding():
            return _is_targeted(loss.loss)
        case PerExample():
            return any(_is_targeted(part) for part in loss.losses)
    return False


def _leaves_y(loss: Loss) -> bool:
    """Whether the loss is one more way away from y, so that points compete by the likelihood."""
    return isinstance(loss, MarginTo) or loss in (nll, margin, dlr, squared_error)


def _is_same(this: Loss, other: Loss) -> bool:
    return this is other or (isinstance(this, (ByLoss, Exceeding)) and this == other)


def default_attacks(
    ball: Ball,
    task: str,
    *,
    steps: int = 100,
    restarts: int = 1,
    targets: int = 9,
    error: Loss = squared_error,
) -> dict[str, Attack]:
    """The attacks with gradients that the suite and the audit run unless told otherwise.

    Classification: APGD on the likelihood, on the margin with as many wrong classes as `targets`,
    on DLR, and PGD; all but the first stop at success. Regression: APGD on the squared error with
    as many outputs up and down and on the likelihood, and ascent on `error` from 256 points for
    each restart, since what one ascent reaches there is often a local maximum.

    >>> from advbayes import L2
    >>> list(default_attacks(L2(1.0), "regression"))
    ['APGD squared_error', 'APGD nll', 'MultiStart squared_error']
    """
    if checks.choice("task", task, ("classification", "regression")) == "regression":
        many = MultiStart(ball, error, max(32, steps // 2), 256 * restarts)
        return {
            "APGD squared_error": APGD(ball, squared_error, steps, restarts, targets),
            "APGD nll": APGD(ball, nll, steps, restarts),
            f"MultiStart {loss_names(many)[0]}": many,
        }
    return {
        "APGD nll": APGD(ball, nll, steps, restarts),
        "APGD margin": APGD(ball, margin, steps, restarts, targets, stop_at_success=True),
        "APGD dlr": APGD(ball, dlr, steps, restarts, stop_at_success=True),
        "PGD nll": pgd(ball, steps, nll, restarts=restarts, stop_at_success=True),
    }


def strong_suite(
    ball: Ball,
    *,
    steps: int = 100,
    restarts: int = 1,
    targets: int = 9,
    queries: int = 500,
    error: Loss = squared_error,
    others: Sequence[Attack] = (),
) -> Suite:
    """The default worst case: `default_attacks`, 20 random points, Square with `queries` (0:
    without), then `others` (transfer, a purifier's own).

    In regression it looks for the largest `error`. That is not the least likely point: for the
    worst likelihood of a predictive distribution, `error=nll`.

    >>> from advbayes import L2
    >>> len(strong_suite(L2(1.0), queries=0).attacks)
    5
    """
    checks.count("queries", queries, low=0)
    parts: dict[str, tuple[Attack, ...]] = {}
    budget: Any = {"steps": steps, "restarts": restarts, "targets": targets, "error": error}
    for task, loss in (("classification", margin), ("regression", error)):
        square = (Square(ball, queries, loss),) if queries else ()
        parts[task] = (
            *default_attacks(ball, task, **budget).values(),
            RandomSearch(ball, 20, loss, stop_at_success=True),
            *square,
            *others,
        )
    rank = None if error is squared_error else error
    return Suite(parts["classification"], parts["regression"], rank=rank)

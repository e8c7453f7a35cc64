"""What an attack is made of: one walk over an attack and the attacks within it, and everything that
is read off it.

An attack is a dataclass; its fields are its settings. Those with a meaning here: `ball`; `loss`,
`losses`, `stages` ((loss, steps) pairs) and `rank` (what its points compete by); `steps` or, for
attacks without gradients, `queries`, `rounds` or `num`; `restarts`; `step_size`. Attacks within it
may stand in any field, in tuples, lists and mappings. Predictors (`x -> Distribution`) are closed:
the attacks that a defense holds are the defense's.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from advbayes import checks
from advbayes.attacks.balls import Ball
from advbayes.attacks.losses import for_rows, num_rows
from advbayes.types import Loss, Predictor

A = TypeVar("A")
LOSSES = ("stages", "loss", "losses", "rank")  # the settings that hold losses
# the first that an attack has is its work
WORK = ("steps", "num_steps", "queries", "num_queries", "rounds", "num")


@runtime_checkable
class HasScope(Protocol):
    """An attack that is made for some predictors alone."""

    def applies_to(self, predict: Predictor) -> bool: ...


# --- The walk -----------------------------------------------------------------------------------


def settings(value: object) -> dict[str, Any]:
    """Name -> value of what a dataclass was made with; nothing for anything else."""
    if not is_dataclass(value) or isinstance(value, type):
        return {}
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


def members(value: object) -> tuple[Any, ...]:
    """What a tuple, list or mapping holds; anything else holds itself."""
    match value:
        case tuple() | list():
            return tuple(value)
        case Mapping():
            return tuple(value.values())
    return (value,)


def is_attack(value: object) -> bool:
    """Whether a value is called as attacks are: (predict, x, y, *, generator).

    >>> from advbayes import L2, nll, pgd
    >>> is_attack(pgd(L2(1.0))), is_attack(nll), is_attack(L2(1.0))
    (True, False, False)
    """
    if not callable(value) or isinstance(value, type):
        return False
    try:
        # a module takes anything and passes it on
        called = value.forward if isinstance(value, nn.Module) else value
        inspect.signature(called).bind(None, None, None, generator=None)
    except (TypeError, ValueError):
        return False
    return True


def inner_attacks(attack: object) -> list[Any]:
    """The attacks that an attack holds itself, in the order of its settings."""
    parts = [member for value in settings(attack).values() for member in members(value)]
    return [member for member in parts if is_attack(member)]


def parts_of(attack: object) -> Iterator[Any]:
    """An attack and the attacks within it, outermost first."""
    yield attack
    for part in inner_attacks(attack):
        yield from parts_of(part)


def rebuilt(attack: A, change: Callable[[Any], Mapping[str, Any]]) -> A:
    """The attack with the settings `change(part)` in each of its parts, innermost first.

    >>> from advbayes import L2, Suite, pgd
    >>> thrice = lambda part: {"restarts": 3} if "restarts" in settings(part) else {}
    >>> rebuilt(Suite((pgd(L2(1.0)),)), thrice).attacks[0].restarts
    3
    """

    def visited(value: Any) -> Any:
        match value:
            case tuple() | list():
                new = [visited(member) for member in value]
                return value if all(map(operator.is_, new, value)) else type(value)(new)
            case Mapping():
                named = {key: visited(member) for key, member in value.items()}
                return value if all(named[key] is value[key] for key in value) else named
        if not is_attack(value) or not is_dataclass(value):
            return value
        fields = settings(value)
        inner = {name: new for name, old in fields.items() if (new := visited(old)) is not old}
        value = replace(value, **inner) if inner else value  # type: ignore[type-var]
        changed = {
            name: new for name, new in change(value).items() if new is not settings(value)[name]
        }
        return replace(value, **changed) if changed else value

    whole: A = visited(attack)
    return whole


# --- Read off an attack -------------------------------------------------------------------------


def applies_to(attack: object, predict: Predictor) -> bool:
    """Whether an attack is made for a predictor: by its own word, or else by its parts'.

    >>> from advbayes import L2, pgd
    >>> applies_to(pgd(L2(1.0)), lambda x: x)
    True
    """
    if isinstance(attack, HasScope):
        return attack.applies_to(predict)
    return all(applies_to(part, predict) for part in inner_attacks(attack))


def ball_of(attack: object) -> Ball | None:
    """The ball that an attack stays in, or None where it does not say.

    >>> from advbayes import L2, pgd
    >>> ball_of(pgd(L2(2.0)))
    L2(2)
    """
    balls = (settings(part).get("ball") for part in parts_of(attack))
    return next((ball for ball in balls if isinstance(ball, Ball)), None)


def losses_of(attack: object) -> tuple[Loss, ...]:
    """The losses an attack climbs, in order.

    >>> from advbayes import L2, pgd_plus
    >>> [loss.__name__ for loss in losses_of(pgd_plus(L2(1.0)))]
    ['nll', 'entropy']
    """
    return tuple(_losses(attack, ("stages", "loss", "losses")))


def _losses(attack: object, names: tuple[str, ...]) -> Iterator[Loss]:
    for part in parts_of(attack):
        for name in names:
            for value in members(settings(part).get(name)):
                loss = value[0] if name == "stages" and value else value
                if callable(loss):
                    yield loss


def loss_names(attack: object) -> tuple[str, ...]:
    """The names of an attack's losses; for attacks that name theirs as text, that text."""
    named = [_loss_name(loss) for loss in losses_of(attack)]
    texts = (settings(part).get("loss") for part in parts_of(attack))
    named += [text for text in texts if isinstance(text, str)]
    return tuple(dict.fromkeys(named))


def _loss_name(loss: object) -> str:
    # a loss in a loss (ByLoss, Toward) is known by the inner one
    inner = settings(loss).get("loss")
    return getattr(loss, "__name__", type(loss).__name__) if inner is None else _loss_name(inner)


def family_of(attack: object) -> tuple[str, ...]:
    """Step rule and losses of each part: what an unseen attack must not share with training."""
    families = []
    for part in parts_of(attack):
        if ball := settings(part).get("ball"):
            rule = "one step" if getattr(part, "is_one_step", False) else type(part).__name__
            losses = "+".join(loss_names(part)) or "its own loss"
            families.append(f"{rule} on {losses} ({type(ball).__name__})")
    return tuple(dict.fromkeys(families))


def steps_of(attack: object) -> int | None:
    """How many steps one start takes (queries for a black-box attack); None where it does not say.

    >>> from advbayes import L2, pgd_plus
    >>> steps_of(pgd_plus(L2(1.0)))
    50
    """
    total = 0
    for part in parts_of(attack):
        fields = settings(part)
        total += sum(steps for _, steps in fields.get("stages", ())) or fields.get(_work(fields), 0)
    return total or None


def _work(fields: Mapping[str, Any]) -> str:
    """The setting that says how much work an attack does."""
    return next((name for name in WORK if isinstance(fields.get(name), int)), "")


def restarts_of(attack: object) -> int:
    """The largest number of restarts in an attack."""
    return max(int(settings(part).get("restarts", 1)) for part in parts_of(attack))


def check_rows(attack: object, num: int, name: str) -> None:
    """Refuse a loss that holds entries for another number of examples than there are."""
    for rows in map(num_rows, _losses(attack, LOSSES)):
        if rows not in (None, num):
            raise checks.InputError(
                f"{name} must hold a loss with one entry for each of the {num} examples, got one "
                f"for {rows}"
            )


def text_of(value: object) -> str:
    """A repr without addresses and types, so that two processes agree on it."""
    text = re.sub(
        r"<(?:function|bound method) ([\w.<>]+)(?: of [^>]*)?(?: at 0x[0-9a-f]+)?>",
        r"\1",
        repr(value),
    )
    return re.sub(r" at 0x[0-9a-f]+", "", text)


# --- The same attack with other settings --------------------------------------------------------


def with_ball(attack: A, ball: Ball) -> A:
    """The same attack, with all its parts, in another ball; step sizes stay in proportion to eps.

    >>> from advbayes import L2, pgd
    >>> with_ball(pgd(L2(1.0), step_size=0.1), L2(2.0))
    PGD(ball=L2(2), stages=((nll, 50),), step_size=0.2, restarts=1, stop_at_success=False)
    """
    return _with_balls(attack, lambda _: ball)


def with_eps(attack: A, eps: float, *, free: bool = False) -> A:
    """The same attack with another budget: norm, box and scale stay, and unless `free` what it may
    not touch.

    >>> from advbayes import L2, pgd
    >>> with_eps(pgd(L2(1.0, box=(0, 1))), 0.5).ball
    L2(0.5, box=(0, 1))
    """
    return _with_balls(attack, lambda ball: replace(ball.freed() if free else ball, eps=eps))


def _with_balls(attack: A, new: Callable[[Ball], Ball]) -> A:
    closed = [
        part
        for part in parts_of(attack)
        if "ball" not in settings(part) and not inner_attacks(part)
    ]
    if closed:
        raise checks.InputTypeError(
            f"an attack needs a field `ball`, or parts that have one, to be made again in another "
            f"ball, got {checks.describe(closed[0])}"
        )

    def change(part: Any) -> dict[str, Any]:
        fields = settings(part)
        if "ball" not in fields:
            return {}
        before, after = fields["ball"], new(fields["ball"])
        size = fields.get("step_size")
        if size is None:
            return {"ball": after}
        scaled = size * after.eps / before.eps if before.eps and after.eps else None
        return {"ball": after, "step_size": scaled}

    return rebuilt(attack, change)


def with_steps(attack: A, factor: float) -> A:
    """The same attack with `factor` times the steps (without gradients: queries), at least one.

    >>> from advbayes import L2, Square, pgd
    >>> steps_of(with_steps(pgd(L2(1.0), steps=20), 2)), with_steps(Square(L2(1.0), 100), 2).queries
    (40, 200)
    """

    def change(part: Any) -> dict[str, Any]:
        fields = settings(part)
        if "stages" in fields:
            stages = ((loss, max(1, round(steps * factor))) for loss, steps in fields["stages"])
            return {"stages": tuple(stages)}
        name = _work(fields)
        return {name: max(1, round(fields[name] * factor))} if name else {}

    return rebuilt(attack, change)


def with_restarts(attack: A, factor: int) -> A:
    """The same attack with `factor` times the restarts."""
    return rebuilt(
        attack, lambda part: {k: v * factor for k, v in settings(part).items() if k == "restarts"}
    )


def on_rows(attack: A, rows: Tensor | slice) -> A:
    """The attack on some of the examples: losses with an entry for each keep those of `rows`.

    >>> import torch
    >>> from advbayes import L2, MarginTo, pgd
    >>> attack = pgd(L2(1.0), 5, MarginTo(torch.tensor([1, 0, 2])))
    >>> on_rows(attack, slice(1, 3)).stages[0][0].classes
    tensor([0, 2])
    """

    def cut(value: Any) -> Any:
        if not isinstance(value, (tuple, list)):
            return for_rows(value, rows)  # a stage's number of steps passes through
        new = tuple(map(cut, value))
        return value if all(map(operator.is_, new, value)) else new

    return rebuilt(
        attack,
        lambda part: {name: cut(value) for name, value in settings(part).items() if name in LOSSES},
    )

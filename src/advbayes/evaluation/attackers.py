"""What an attack is made of, read off its dataclass: its ball, losses, steps, restarts; and the same attack elsewhere."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from advbayes import checks
from advbayes.attacks import Suite
from advbayes.balls import Ball
from advbayes.types import Attack, Loss, Predictor


def parts_of(attack: object) -> Iterator[object]:
    """An attack and the attacks nested in it (in fields, tuples, lists and mappings), outermost first."""
    yield attack
    if not dataclasses.is_dataclass(attack) or isinstance(attack, (type, Ball)):
        return
    for field in dataclasses.fields(attack):
        value = getattr(attack, field.name)
        members = value if isinstance(value, (tuple, list)) else value.values() if isinstance(value, Mapping) else (value,)
        for member in members:
            if dataclasses.is_dataclass(member) and not isinstance(member, (type, Ball)) and _is_attack(member):
                yield from parts_of(member)


def _is_attack(value: object) -> bool:
    """Attacks have a ball, or hold something that has."""
    return any(isinstance(getattr(value, field.name), Ball) for field in dataclasses.fields(value)) or any(  # type: ignore[arg-type]
        dataclasses.is_dataclass(member) and not isinstance(member, (type, Ball)) and _is_attack(member)
        for field in dataclasses.fields(value)  # type: ignore[arg-type]
        for member in _members(getattr(value, field.name))
    )


def _members(value: object) -> tuple[object, ...]:
    if isinstance(value, (tuple, list)):
        return tuple(value)
    return tuple(value.values()) if isinstance(value, Mapping) else (value,)


def ball_of(attack: object) -> Ball | None:
    """The ball that an attack stays in, or None where it does not say.

    >>> from advbayes import L2, pgd
    >>> ball_of(pgd(L2(2.0)))
    L2(2)
    """
    for part in parts_of(attack):
        ball = getattr(part, "ball", None)
        if isinstance(ball, Ball):
            return ball
    return None


def with_eps(attack: Attack, eps: float) -> Attack:
    """The same attack with another budget: norm, box, scale and mask stay.

    >>> from advbayes import L2, pgd
    >>> with_eps(pgd(L2(1.0, box=(0, 1))), 0.5).ball
    L2(0.5, box=(0, 1))
    """
    if ball_of(attack) is None:
        raise TypeError(f"an attack needs a field `ball` to be re-made at eps = {eps:g}, got {checks.describe(attack)}")
    return cast(Attack, _rebuilt(attack, lambda ball: dataclasses.replace(ball, eps=eps)))


def _rebuilt(value: Any, change: Any) -> Any:
    if isinstance(value, Ball):
        return change(value)
    if isinstance(value, (tuple, list)):
        members = [_rebuilt(member, change) for member in value]
        return value if all(a is b for a, b in zip(members, value, strict=True)) else type(value)(members)
    if isinstance(value, Mapping):
        changed = {key: _rebuilt(member, change) for key, member in value.items()}
        return value if all(changed[key] is value[key] for key in value) else changed
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    new = {field.name: _rebuilt(getattr(value, field.name), change) for field in dataclasses.fields(value) if field.init}
    moved = {key: member for key, member in new.items() if member is not getattr(value, key)}
    if "ball" in moved and isinstance(new.get("step_size"), float):  # steps stay in proportion
        before, after = cast(Any, value).ball.eps, moved["ball"].eps
        moved["step_size"] = new["step_size"] * after / before if before and after else None
    return dataclasses.replace(value, **moved) if moved else value


LOSSES = ("stages", "loss", "losses", "rank")  # the fields that hold an attack's losses


def check_rows(attack: Attack, num: int, name: str) -> None:
    """Refuse a loss that holds entries for another number of examples than there are."""
    for part in parts_of(attack):
        for loss in (*losses_of(part), *_members(getattr(part, "rank", None))):
            held = getattr(loss, "num_rows", None)
            if isinstance(held, int) and held != num:
                raise ValueError(f"{name} must hold a loss with one entry for each of the {num} examples, got one for {held}")


def for_task(attack: Attack, task: str) -> Attack:
    """The attack with those parts alone that run in a task: a Suite has some for classes and some for regression.

    >>> from advbayes import L2, pgd, squared_error
    >>> both = Suite((pgd(L2(1.0)),), regression=(pgd(L2(1.0), 5, squared_error),))
    >>> [loss.__name__ for loss in losses_of(for_task(both, "regression"))]
    ['squared_error']
    """
    return cast(Attack, _for_task(attack, task))


def _for_task(value: Any, task: str) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_for_task(member, task) for member in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, Ball)) or not _is_attack(value):
        return value
    if isinstance(value, Suite):
        value = Suite(value.attacks if task == "classification" or not value.regression else value.regression, rank=value.rank)
    inner = {
        field.name: _for_task(old, task)
        for field in dataclasses.fields(value)
        if field.init and (isinstance(old := getattr(value, field.name), (tuple, list)) or dataclasses.is_dataclass(old))
    }
    return dataclasses.replace(value, **inner) if inner else value


def losses_of(attack: object) -> tuple[Loss, ...]:
    """The losses an attack climbs, in order.

    >>> from advbayes import L2, pgd_plus
    >>> [loss.__name__ for loss in losses_of(pgd_plus(L2(1.0)))]
    ['nll', 'entropy']
    """
    found: list[Loss] = []
    for part in parts_of(attack):
        stages = getattr(part, "stages", ())
        found += [stage[0] for stage in stages if isinstance(stage, tuple) and callable(stage[0])]
        for name in ("loss", "losses"):
            value = getattr(part, name, None)
            found += [loss for loss in _members(value) if callable(loss)]
    return tuple(found)


def loss_names(attack: object) -> tuple[str, ...]:
    """The names of an attack's losses; for attacks that name theirs as text, that text."""
    named = [_loss_name(loss) for loss in losses_of(attack)]
    named += [value for part in parts_of(attack) if isinstance(value := getattr(part, "loss", None), str)]
    return tuple(dict.fromkeys(named))


def _loss_name(loss: object) -> str:
    inner = getattr(loss, "loss", None)  # a loss in a loss (ByLoss, Toward) is known by the inner one
    return _loss_name(inner) if callable(inner) else getattr(loss, "__name__", type(loss).__name__)


def family_of(attack: object) -> tuple[str, ...]:
    """Step rule and losses of each part of an attack: what an unseen family must not share with the training."""
    found = []
    for part in parts_of(attack):
        if ball := getattr(part, "ball", None):
            rule = "one step" if getattr(part, "is_one_step", False) else type(part).__name__
            found.append(f"{rule} on {'+'.join(loss_names(part)) or 'its own loss'} ({type(ball).__name__})")
    return tuple(dict.fromkeys(found))


def steps_of(attack: object) -> int | None:
    """How many steps one start takes (queries for a black-box attack), or None where the attack does not say.

    >>> from advbayes import L2, pgd_plus
    >>> steps_of(pgd_plus(L2(1.0)))
    50
    """
    total = 0
    for part in parts_of(attack):
        stages = getattr(part, "stages", None)
        if stages:
            total += sum(int(stage[1]) for stage in stages if isinstance(stage, tuple))
            continue
        for name in ("steps", "queries", "num_queries", "num_steps"):
            value = getattr(part, name, None)
            if isinstance(value, int):
                total += value
                break
    return total or None


def restarts_of(attack: object) -> int:
    """The largest number of restarts in an attack."""
    return max((value for part in parts_of(attack) if isinstance(value := getattr(part, "restarts", 1), int)), default=1)


def with_steps(attack: Attack, factor: float) -> Attack:
    """The same attack with `factor` times the steps, at least one.

    >>> from advbayes import L2, pgd
    >>> steps_of(with_steps(pgd(L2(1.0), steps=20), 2))
    40
    """

    def scale(steps: int) -> int:
        return max(1, round(steps * factor))

    return cast(Attack, _with_counts(attack, scale, ("steps", "num_steps")))


def with_restarts(attack: Attack, factor: int) -> Attack:
    """The same attack with `factor` times the restarts."""
    return cast(Attack, _with_counts(attack, lambda restarts: restarts * factor, ("restarts",)))


def _with_counts(value: Any, scale: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_with_counts(member, scale, names) for member in value)
    if isinstance(value, Mapping):
        return {key: _with_counts(member, scale, names) for key, member in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, Ball)) or not _is_attack(value):
        return value
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        if not field.init:
            continue
        if field.name in names and isinstance(old, int):
            moved[field.name] = scale(old)
        elif field.name == "stages" and "steps" in names:
            moved["stages"] = tuple((loss, scale(steps)) for loss, steps in old)
        elif isinstance(old, (tuple, list, Mapping)) or (dataclasses.is_dataclass(old) and not isinstance(old, (type, Ball))):
            moved[field.name] = _with_counts(old, scale, names)
    return dataclasses.replace(value, **moved)


def with_generator(predict: Predictor, generator: torch.Generator) -> Predictor:
    """The same predictor drawing from `generator`, where it (or a predictor in it) has such a field.

    >>> with_generator(len, torch.Generator()) is len
    True
    """
    whole: Any = predict
    if not dataclasses.is_dataclass(whole) or isinstance(whole, type):
        return predict
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(whole):
        value = getattr(predict, field.name)
        if not field.init:
            continue
        if field.name == "generator" and getattr(whole, "seed", None) is None:  # a seed keys the draws already
            moved[field.name] = generator
        elif dataclasses.is_dataclass(value) and not isinstance(value, type) and callable(value):
            inner = with_generator(cast(Predictor, value), generator)
            if inner is not value:
                moved[field.name] = inner
    return cast(Predictor, dataclasses.replace(whole, **moved)) if moved else predict


def text_of(value: object) -> str:
    """A repr without addresses and type, so that two processes agree on it.

    >>> text_of((text_of, 1))
    '(text_of, 1)'
    """
    text = re.sub(r"<(?:function|bound method) ([\w.<>]+)(?: of [^>]*)?(?: at 0x[0-9a-f]+)?>", r"\1", repr(value))
    return re.sub(r" at 0x[0-9a-f]+", "", text)

"""The loop that every measurement goes through: attack a batch, score it; each draw depends on
(seed, key, first row) alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from advbayes.attacks.parts import LOSSES, members, on_rows, rebuilt, settings
from advbayes.checks import InputError
from advbayes.distributed import ranks
from advbayes.evaluation.inputs import Task
from advbayes.evaluation.scoring import Columns, score
from advbayes.seeds import GlobalStream, generator_for, seed_for
from advbayes.types import Attack, Predictor


def batches(num: int, size: int) -> list[slice]:
    """The rows of each batch.

    >>> batches(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def seeded(seed: int, key: str, step: int = 0) -> GlobalStream:
    """A global stream of the key, for predictors without a generator of their own."""
    return GlobalStream(seed_for(seed, key, step))


def with_generator(predict: Predictor, generator: torch.Generator) -> Predictor:
    """The same predictor drawing from `generator`, where it, or one inside it, has such a field.

    >>> with_generator(len, torch.Generator()) is len
    True
    """
    moved: dict[str, Any] = {}
    fields = settings(predict)
    for name, value in fields.items():
        if name == "generator" and fields.get("seed") is None:  # a seed keys the draws already
            moved[name] = generator
        elif settings(value) and callable(value):
            inner = with_generator(cast(Predictor, value), generator)
            if inner is not value:
                moved[name] = inner
    return cast(Predictor, dataclasses.replace(cast(Any, predict), **moved)) if moved else predict


def keyed(predict: Predictor, seed: int, key: str, step: int = 0) -> Predictor:
    """The predictor with its randomness keyed."""
    device: Any = "cpu"
    match predict:
        case object(model=object(device=where)):
            device = where
    return with_generator(predict, generator_for(seed, key, step, device))


def _keyed_sources(attack: Attack, seed: int, key: str, step: int) -> Attack:
    """The attack with the randomness of predictors in it (a Transfer's sources) keyed."""

    def change(part: Any) -> dict[str, Any]:
        changed = {}
        for name, value in settings(part).items():
            if name in LOSSES or not isinstance(value, (tuple, list)):
                continue
            new = [
                keyed(each, seed, f"{key}/{name}/{k}", step) if settings(each) else each
                for k, each in enumerate(value)
            ]
            if any(one is not other for one, other in zip(new, members(value), strict=True)):
                changed[name] = type(value)(new)
        return changed

    return rebuilt(attack, change)


def attacked(
    predict: Predictor,
    attack: Attack,
    x: Tensor,  # (N, *event)
    y: Tensor,
    rows: slice,
    *,
    seed: int,
    key: str,
) -> Tensor:  # (B, *event)
    """Some rows after the attack: losses with one entry for each example keep those rows, all
    randomness is keyed.

    >>> from advbayes import L2, pgd
    >>> predict = lambda x: torch.distributions.Normal(x[:, 0], 1.0)
    >>> x, y, rows = torch.zeros(3, 1), torch.ones(3), slice(1, 3)
    >>> attacked(predict, pgd(L2(1.0), 3), x, y, rows, seed=0, key="PGD")
    tensor([[-1.],
            [-1.]])
    """
    start = rows.start
    with seeded(seed, f"{key}/global", start):
        through = keyed(predict, seed, f"{key}/attack theta", start)
        method = _keyed_sources(on_rows(attack, rows), seed, f"{key}/sources", start)
        generator = generator_for(seed, f"{key}/attack", start, x.device)
        x_adv = method(through, x[rows], y[rows], generator=generator).detach()
    if x_adv.shape != x[rows].shape:
        raise InputError(f"{key} must return inputs of shape {tuple(x[rows].shape)}", got=x_adv)
    return x_adv


def attacked_in_batches(
    predict: Predictor, attack: Attack, x: Tensor, y: Tensor, *, batch_size: int, **key: Any
) -> Iterator[Tensor]:
    """`attacked`, batch by batch, which the ranks share; `key` is its seed and key."""
    made = ranks().mapped(
        lambda rows: {"x": attacked(predict, attack, x, y, rows, **key)},
        batches(len(x), batch_size),
    )
    return (part["x"] for part in made)


def scored(
    predict: Predictor,
    x_adv: Tensor,  # (B, *event)
    y: Tensor,
    task: Task,
    *,
    seed: int,
    key: str,
    start: int = 0,
    repeats: int = 1,
    **options: Any,
) -> Columns:
    """The scores of a batch that begins at row `start`, the same whenever they are made; `options`
    are those of `score`."""
    with seeded(seed, f"{key}/score", start):
        through = keyed(predict, seed, f"{key}/score theta", start)
        return score(through, x_adv, y, task, repeats=repeats, halves=repeats > 1, **options)

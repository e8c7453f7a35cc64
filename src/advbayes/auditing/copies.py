"""Copies of a predictor that has not been asked anything yet: for E29."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any, cast

from torch import Tensor
from torch.distributions import Distribution

from advbayes.attacks import loss_and_gradient
from advbayes.purification import Purifier
from advbayes.types import Loss, Predictor

SHARED = (ModuleType, type, BuiltinFunctionType)


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy; of a function one with copies of what it closes over and of the global objects
    that it names.

    >>> seen = []
    >>> def predict(x):
    ...     seen.append(x)
    ...     return len(seen)
    >>> other = copied(predict)
    >>> predict(0), predict(0), other(0)
    (1, 2, 1)
    """
    memo = {} if memo is None else memo
    if not isinstance(value, FunctionType):
        return copy.deepcopy(value, memo)
    if id(value) in memo:
        return memo[id(value)]
    space = dict(value.__globals__)
    made = FunctionType(
        value.__code__,
        space,
        value.__name__,
        None,
        tuple(CellType() for _ in value.__closure__ or ()),
    )
    memo[id(value)] = made
    for name in value.__code__.co_names:
        if name in space and not isinstance(space[name], SHARED):
            space[name] = copied(space[name], memo)
    for cell, new in zip(value.__closure__ or (), made.__closure__ or (), strict=True):
        new.cell_contents = (
            cell.cell_contents
            if isinstance(cell.cell_contents, SHARED)
            else copied(cell.cell_contents, memo)
        )
    made.__defaults__ = copy.deepcopy(value.__defaults__, memo)
    made.__kwdefaults__ = copy.deepcopy(value.__kwdefaults__, memo)
    return made


@dataclass(frozen=True)
class Copies:
    """Unasked copies of a predictor, or why there are none."""

    make: Callable[[], Predictor] | None
    why: str = ""


def copies_of(predict: Predictor, factory: Callable[[], Predictor] | None) -> Copies:
    """Copies made by the factory, or of the predictor as it is now."""
    if factory is not None:
        return Copies(factory)
    # large, and never written to
    shared = {id(predict.store): predict.store} if isinstance(predict, Purifier) else {}
    try:
        unasked = copied(predict, dict(shared))
    except Exception as error:  # whatever a foreign object raises when copied
        return Copies(None, f"{type(error).__name__}: {error}")
    return Copies(lambda: cast(Predictor, copied(unasked, dict(shared))))


@dataclass(frozen=True)
class Forgetful:
    """Every question goes to an unasked copy: whoever remembers has nothing to remember."""

    make: Callable[[], Predictor]

    def __call__(self, x: Tensor) -> Distribution:
        return self.make()(x)

    def loss_and_gradient(self, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As the copy has it, which may know a faster way than autograd."""
        return loss_and_gradient(self.make(), loss, x, y)

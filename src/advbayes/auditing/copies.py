"""Copies of a predictor that has not been asked anything yet: for E29."""

from __future__ import annotations

import copy
import dis
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes.attacks import loss_and_gradient
from advbayes.checks import InputTypeError
from advbayes.evaluation.contents import content_of
from advbayes.purification import Purifier
from advbayes.types import Loss, Predictor

SHARED = (ModuleType, BuiltinFunctionType)
PLAIN = (int, float, complex, str, bytes, bool, type(None), Tensor)
# where no predictor keeps what it was asked
LIBRARIES = sys.stdlib_module_names | {
    *("advbayes", "torch", "numpy", "scipy", "sklearn", "joblib", "pandas"),
    *("xgboost", "lightgbm", "catboost", "statsmodels"),
}
MOST = 100_000  # objects that a predictor is searched through
ROWS = 1_000_000  # of an array that are compared


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy that shares nothing which asking may change: functions come with copies of what
    they close over and of the global objects that they name, instances with a class of their own.

    >>> seen = []
    >>> def predict(x):
    ...     seen.append(x)
    ...     return len(seen)
    >>> predict.__module__ = "mine"  # what belongs to libraries is shared
    >>> other = copied(predict)
    >>> predict(0), predict(0), other(0)
    (1, 2, 1)
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    match value:
        case ModuleType() | BuiltinFunctionType():
            return value
        case type():
            return _class(value, memo)
        case FunctionType():
            return _function(value, memo)
    parts = list(_parts(value))
    for part in parts:  # `deepcopy` shares functions, unless it finds a copy in the memo
        if isinstance(part, FunctionType):
            memo[id(part)] = _function(part, memo)
    made = copy.deepcopy(value, memo)
    for part in parts:
        twin = memo.get(id(part), part)
        if _is_shared(part, twin):
            raise InputTypeError(f"a copy of a {type(part).__name__} is not another one")
        if twin is not part and type(twin) is type(part) and _foreign(type(part)):
            object.__setattr__(twin, "__class__", _class(type(part), memo))
    return made


def _foreign(definition: Any) -> bool:
    """Whether a class or function is neither Python's nor one of the libraries'."""
    return (definition.__module__ or "").partition(".")[0] not in LIBRARIES


def _is_shared(part: Any, twin: Any) -> bool:
    """Whether a foreign object makes its copies itself, and these have what it has."""
    own = hasattr(type(part), "__deepcopy__") and _foreign(type(part))
    if not own or isinstance(part, Enum):
        return False
    return twin is part or (hasattr(part, "__dict__") and vars(part) is vars(twin))


def _parts(value: Any) -> Iterator[Any]:
    """The objects that a value is made of; what stands behind classes and functions is not
    searched."""
    seen, left = set[int](), [value]
    while left and len(seen) < MOST:
        part = left.pop()
        if id(part) in seen or isinstance(part, (*SHARED, *PLAIN, type)):
            continue
        seen.add(id(part))
        yield part
        if not isinstance(part, FunctionType):
            left += gc.get_referents(part)


def _function(value: FunctionType, memo: dict[int, Any]) -> FunctionType:
    if id(value) in memo or not _foreign(value):
        return cast(FunctionType, memo.get(id(value), value))
    space = dict(value.__globals__)
    cells = tuple(CellType() for _ in value.__closure__ or ())
    made = FunctionType(value.__code__, space, value.__name__, None, cells)
    made.__module__ = value.__module__
    memo[id(value)] = made
    for name in _globals_in(value.__code__):
        if name in space:
            space[name] = copied(space[name], memo)
    closed_over = zip(value.__code__.co_freevars, value.__closure__ or (), cells, strict=True)
    for name, cell, new in closed_over:
        content = cell.cell_contents  # super() wants the class itself
        new.cell_contents = content if name == "__class__" else copied(content, memo)
    made.__defaults__ = copied(value.__defaults__, memo)
    made.__kwdefaults__ = copied(value.__kwdefaults__, memo)
    made.__dict__.update(copied(value.__dict__, memo))
    return made


def _class(value: type, memo: dict[int, Any]) -> type:
    """A subclass with copies of the methods and of what the class itself holds; the class where
    there can be none."""
    if id(value) in memo or not _foreign(value):
        return cast(type, memo.get(id(value), value))
    try:
        space = {"__slots__": (), "__module__": value.__module__}
        made = type(value)(value.__name__, (value,), space)
    except TypeError:  # an enumeration, a final class
        return value
    memo[id(value)] = made
    for base in reversed(value.__mro__):
        if not _foreign(base):
            continue
        for name, member in vars(base).items():
            match member:
                case staticmethod() | classmethod():
                    setattr(made, name, type(member)(copied(member.__func__, memo)))
                case _ if isinstance(member, FunctionType) or not name.startswith("__"):
                    setattr(made, name, copied(member, memo))
    return made


def _reached(part: Any) -> list[Any]:
    """What an object refers to; of a function, what it closes over and the globals it names."""
    match part:
        case FunctionType():
            space = part.__globals__ if _foreign(part) else {}
            cells = map(content_of, part.__closure__ or ())
            named = [space[name] for name in _globals_in(part.__code__) if name in space]
            return [*cells, *named, part.__defaults__, part.__kwdefaults__, part.__dict__]
    return gc.get_referents(part)


def _globals_in(code: CodeType) -> set[str]:
    """The global names that a function, or one within it, reads; not its attributes."""
    inner = [_globals_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    read = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return read.union(*inner)


def held_by(
    predict: Predictor,
    x: Tensor,  # (N, *event)
) -> Tensor:  # (N,) bool
    """Which of the inputs lie, to the bit, in an array that the predictor holds: in an attribute at
    any depth, in what a function closes over, in a global that it names.

    >>> x = torch.eye(3)
    >>> reference = torch.tensor([[0.0, 1.0, 0.0], [7.0, 7.0, 7.0]])
    >>> held_by(lambda x, reference=reference: torch.cdist(x, reference), x).tolist()
    [False, True, False]
    """
    event = x.shape[1:]
    wanted: dict[bytes, list[int]] = {}
    for place, row in enumerate(rows_of(x)):
        wanted.setdefault(row, []).append(place)
    found = torch.zeros(len(x), dtype=torch.bool)
    seen, left = set[int](), list[Any]([predict])
    while left and len(seen) < MOST:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        match part:
            case ModuleType() | BuiltinFunctionType() | FrameType() | type():
                continue
            case int() | float() | complex() | str() | bytes() | None:
                continue
            case Tensor():
                array = part
            case np.ndarray() if part.dtype.kind in "iuf":
                array = torch.as_tensor(part)
            case _:
                left += _reached(part)
                continue
        shape = tuple(array.shape)
        if shape[-len(event) :] == tuple(event) or shape[-1:] == (event.numel(),):
            held = array.detach().to("cpu", x.dtype)
            for row in rows_of(held.reshape(-1, event.numel())[:ROWS]):
                found[wanted.get(row, [])] = True
    return found


def rows_of(x: Tensor) -> Iterator[bytes]:
    """The rows of x as bytes, to be compared to the bit.

    >>> len(set(rows_of(torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]]))))
    2
    """
    return (row.tobytes() for row in x.detach().cpu().flatten(1).contiguous().numpy())


@dataclass(frozen=True)
class Copies:
    """Unasked copies of a predictor, or why there are none."""

    make: Callable[[], Predictor] | None
    why: str = ""


def copies_of(predict: Predictor, factory: Callable[[], Predictor] | None) -> Copies:
    """Copies made by the factory, or of the predictor as it is now."""
    if factory is not None:
        if (made := factory()) is predict or factory() is made:
            return Copies(None, "the factory gives one and the same predictor at every call")
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

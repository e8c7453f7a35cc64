"""What an attack holds that its repr does not show: tensors, predictors, closures."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from advbayes.attacks.parts import LOSSES, settings
from advbayes.types import Predictor

UNKNOWN = "unknown: "  # what cannot be told from another of its kind
_OPEN = ("advbayes.", "torch.", "numpy.", "math", "builtins")  # known by their names
Fingerprint = Callable[[Predictor], list[float]]  # as the predictors under evaluation get


def tensor_hash(*values: Tensor) -> str:
    """SHA-256 of dtype, shape and entries.

    >>> tensor_hash(torch.zeros(2)) == tensor_hash(torch.zeros(1, 2))
    False
    """
    digest = hashlib.sha256()
    for value in values:
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        plain = value.detach().cpu().contiguous()
        plain = plain.view(torch.uint8) if plain.dtype == torch.bfloat16 else plain
        digest.update(plain.numpy().tobytes())
    return digest.hexdigest()


def contents_of(attack: object, fingerprint: Fingerprint) -> dict[str, str | list[float]]:
    """Path in the attack -> hash of the tensor, fingerprint of the predictor, or code and values of
    the function there.

    Of functions (lambdas, partials, methods) that are not this library's: their code, defaults,
    what they close over and the global values that they name. What cannot be compared is "unknown".

    >>> from advbayes import L2, pgd
    >>> list(contents_of(pgd(L2(1.0, scale=torch.ones(3))), lambda predict: [0.0]))
    ['ball.scale']
    >>> power = lambda power: lambda prediction, y: prediction.mean**power
    >>> list(contents_of(power(2), lambda predict: [0.0]))
    ['code', 'closure.power']
    """
    return dict(_walked(attack, "", fingerprint, False, False, set()))


def _walked(
    value: Any, path: str, fingerprint: Fingerprint, is_loss: bool, hidden: bool, above: set[int]
) -> Iterator[tuple[str, str | list[float]]]:
    """`hidden`: within a function, where the repr shows nothing."""
    match value:
        case Tensor():
            yield path, tensor_hash(value)
            return
        case np.ndarray() if value.dtype != object:
            yield path, tensor_hash(torch.as_tensor(value, device="cpu"))
            return
        case ModuleType():
            return
        case None | int() | float() | complex() | str() | bytes() | range():
            if hidden:
                yield path, repr(value)
            return
        case torch.dtype() | torch.device() | torch.Size():
            if hidden:
                yield path, repr(value)
            return
        case type() | BuiltinFunctionType() | FunctionType() if _is_open(value):
            if hidden or not _is_plain(value):
                yield path, f"{value.__module__}.{value.__qualname__}"
            return
    if id(value) in above:
        return
    predicts = None if is_loss else _predicts(value, fingerprint)
    if predicts is not None:
        yield path, predicts  # its own tensors show in what it predicts
        return
    parts, hidden = _parts(value, hidden)
    if parts is None:
        yield path, f"{UNKNOWN}{type(value).__module__}.{type(value).__qualname__}"
        return
    for name, member in parts:
        inner = name in LOSSES or (is_loss and name.isdigit())
        yield from _walked(
            member, f"{path}.{name}".strip("."), fingerprint, inner, hidden, above | {id(value)}
        )


def _is_open(value: type | BuiltinFunctionType | FunctionType) -> bool:
    """Known by its name alone: a class, what is built in, a function of the libraries."""
    if not isinstance(value, FunctionType):
        return True
    return value.__module__.startswith(_OPEN) and value.__closure__ is None


def _is_plain(value: type | BuiltinFunctionType | FunctionType) -> bool:
    """Whether a repr, which names a function without its module, says all: there is one of that
    name among attacks and losses."""
    return isinstance(value, type) or (value.__module__ or "").startswith("advbayes.attacks.")


def _parts(value: Any, hidden: bool) -> tuple[list[tuple[str, Any]] | None, bool]:
    """The named parts of a value, and whether its repr leaves them out; None: it has none."""
    match value:
        case Mapping():
            return [(str(key), member) for key, member in value.items()], hidden
        case tuple() | list():
            return [(str(number), member) for number, member in enumerate(value)], hidden
        case set() | frozenset():
            in_order = sorted(value, key=repr)
            return [(str(number), member) for number, member in enumerate(in_order)], hidden
        case _ if settings(value):
            return list(settings(value).items()), hidden
        case functools.partial():
            return [("func", value.func), ("args", value.args), ("keywords", value.keywords)], True
        case MethodType():
            return [("function", value.__func__), ("self", value.__self__)], True
        case FunctionType():
            return _of_function(value), True
        case torch.Generator():  # a stream's place moves as it is drawn from
            return None, True
    attributes = getattr(value, "__dict__", None)
    return None if attributes is None else [("class", type(value)), *attributes.items()], True


def _of_function(value: FunctionType) -> list[tuple[str, Any]]:
    """Code, defaults, closure and the globals that are named in it."""
    names = value.__code__.co_freevars
    cells = dict(zip(names, map(content_of, value.__closure__ or ()), strict=True))
    named = {
        name: value.__globals__[name]
        for name in names_in(value.__code__)
        if name in value.__globals__
    }
    parts = {
        "code": _code(value.__code__),
        "defaults": value.__defaults__,
        "keyword defaults": value.__kwdefaults__,
        "closure": cells,
        "globals": named,
    }
    return [(name, part) for name, part in parts.items() if part]


def content_of(cell: CellType) -> Any:
    """What a function closes over; None where that has not been made yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def names_in(code: CodeType) -> list[str]:
    """The global names and attributes that a function, or one within it, speaks of.

    >>> names_in((lambda x: [abs(each) for each in x]).__code__)
    ['abs']
    """
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return sorted({*code.co_names, *chain(*inner)})


def _code(code: CodeType) -> str:
    """SHA-256 of what a function does, wherever it stands."""
    inner = [
        _code(constant) if isinstance(constant, CodeType) else repr(constant)
        for constant in code.co_consts
    ]
    text = repr((code.co_code, inner, code.co_names, code.co_varnames))
    return hashlib.sha256(text.encode()).hexdigest()


def _predicts(value: Any, fingerprint: Fingerprint) -> list[float] | None:
    """The fingerprint of what answers inputs alone; losses and attacks want more than that."""
    if not callable(value) or isinstance(value, type):
        return None
    try:
        inspect.signature(value).bind(None)
        return fingerprint(value)
    except Exception:  # not made for these inputs: whatever it is, it is no predictor of them
        return None

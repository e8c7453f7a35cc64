"""Likelihoods, balls, attacks and channels as data, {"kind": name, field: value, ...}."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from advbayes import attacks, channels, likelihoods
from advbayes.attacks import balls

from .documents import JSON
from .errors import StoreError, refusing
from .nets import build_net, describe_net, fill_net

LIKELIHOODS = (likelihoods.Categorical, likelihoods.Gaussian, likelihoods.HeteroscedasticGaussian)
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *LIKELIHOODS,
        *(balls.L2, balls.Linf),
        *(attacks.PGD, attacks.APGD, attacks.MinimumNorm, attacks.MultiStart),
        *(attacks.RandomSearch, attacks.Square, attacks.HardLabel, attacks.Suite),
        *(attacks.Toward, attacks.ByLoss, attacks.Exceeding),
        *(attacks.MarginTo, attacks.DivergenceFrom),
        *(channels.Noise, channels.AttackChannel, channels.Mixture, channels.Learned),
    )
}
_LOSSES: dict[str, Any] = {
    loss.__name__: loss
    for loss in (
        *(attacks.nll, attacks.margin, attacks.dlr, attacks.entropy, attacks.certainty),
        *(attacks.squared_error, attacks.raise_mean, attacks.lower_mean),
        *(attacks.inflate_variance, attacks.deflate_variance),
    )
}
_NUMBERS = {"inf": math.inf, "-inf": -math.inf}
MAX_KINDS = 2048  # layers and settings in one document; a layer takes some ten kilobytes of memory


def own_name(kind: type) -> str:
    """How a file names a user-defined class: `module:name`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def check_number(document: JSON, place: str) -> None:
    """Refuse a document of more than `MAX_KINDS` kinds before the first of them is built."""
    left, num = [document], 0
    while left:
        match left.pop():
            case dict() as node:
                num += "kind" in node
                left += node.values()
            case list() as node:
                left += node
    if num > MAX_KINDS:
        raise StoreError(place, f"at most {MAX_KINDS} layers and settings", f"{num}")


def encode(value: object, place: str, tensors: dict[str, Tensor]) -> JSON:
    """A setting as JSON; its tensors go into `tensors`, named by where they belong.

    >>> encode(balls.L2(0.5, box=(0, 1)), "ball", {})
    {'kind': 'L2', 'eps': 0.5, 'box': [0, 1], 'scale': None, 'mask': None, 'indicators': None}
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"kind": "number", "value": str(value)}
        case tuple() | list():
            return [encode(item, f"{place}/{index}", tensors) for index, item in enumerate(value)]
        case Tensor():
            tensors[place] = value
            return {"kind": "tensor", "name": place}
        case nn.Module():
            described = describe_net(value)
            if described is None:
                wanted = "a network of plain layers or a built-in one"
                raise StoreError(place, wanted, type(value).__name__)
            state = value.state_dict()
            tensors.update({f"{place}/{name}": tensor for name, tensor in state.items()})
            return {"kind": "net", "net": described}
    if type(value) in _KINDS.values():
        return {"kind": type(value).__name__, **_settings(value, place, tensors)}
    for name, loss in _LOSSES.items():
        if value is loss:
            return {"kind": "loss", "name": name}
    name = own_name(type(value))
    if is_dataclass(type(value)) and "<locals>" not in name:
        return {"kind": "own", "name": name, "settings": _settings(value, place, tensors)}
    wanted = f"one of {', '.join([*_KINDS, *_LOSSES])}, or a dataclass of a module of your own"
    raise StoreError(place, wanted, f"{value!r:.80} ({type(value).__name__})")


def decode(
    value: object, place: str, tensors: Mapping[str, Tensor], own: Sequence[type] = ()
) -> Any:
    """Inverse of `encode`: unknown kinds and fields are refused, and classes check their values.

    User-defined dataclasses are built only if they are listed in `own`: a name in a file never
    triggers an import.

    >>> decode({"kind": "L2", "eps": 0.5, "box": [0, 1]}, "ball", {})
    L2(0.5, box=(0, 1))
    >>> decode({"kind": "os.system", "command": "id"}, "ball", {})
    Traceback (most recent call last):
    ...
    advbayes.store.errors.StoreError: ball: wanted a known kind, got 'os.system'
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return tuple(
                decode(item, f"{place}/{index}", tensors, own) for index, item in enumerate(value)
            )
        case {"kind": "number", "value": str(text), **rest} if not rest and text in _NUMBERS:
            return _NUMBERS[text]
        case {"kind": "tensor", "name": str(name), **rest} if not rest and name in tensors:
            if not tensors[name].numel():  # nothing in the file, and axes of any length
                wanted = "a tensor with numbers in it"
                raise StoreError(place, wanted, f"shape {tuple(tensors[name].shape)}")
            return tensors[name]
        case {"kind": "loss", "name": str(name), **rest} if not rest and name in _LOSSES:
            return _LOSSES[name]
        case {"kind": "net", "net": description, **rest} if not rest:
            prefix = f"{place}/"
            state = {
                key.removeprefix(prefix): tensor
                for key, tensor in tensors.items()
                if key.startswith(prefix)
            }
            return fill_net(build_net(description, place), state, place)
        case {"kind": str(kind), **arguments} if kind in _KINDS:
            named = {str(key): item for key, item in arguments.items()}
            return _construct(_KINDS[kind], named, place, tensors, own)
        case {"kind": "own", "name": str(name), "settings": dict(settings), **rest} if not rest:
            for each in own:
                if own_name(each) == name and is_dataclass(each):
                    return _construct(each, settings, place, tensors, own)
            wanted = "a known kind, or its class by load(..., own=(...,))"
            raise StoreError(place, wanted, f"{name!r:.80}")
        case {"kind": kind}:
            raise StoreError(place, "a known kind", f"{kind!r:.80}")
    raise StoreError(place, "a setting", f"{value!r:.80}")


def _construct(
    kind: Any,
    arguments: dict[str, Any],
    place: str,
    tensors: Mapping[str, Tensor],
    own: Sequence[type],
) -> Any:
    names = ", ".join(field.name for field in fields(kind) if field.init)
    with refusing(place, f"{kind.__name__} with {names or 'no fields'}"):
        inspect.signature(kind).bind(**arguments)
    decoded = {
        name: decode(item, f"{place}/{name}", tensors, own) for name, item in arguments.items()
    }
    with refusing(place, f"settings that {kind.__name__} accepts"):
        return kind(**decoded)


def _settings(value: object, place: str, tensors: dict[str, Tensor]) -> dict[str, JSON]:
    named = attacks.settings(value)
    return {name: encode(item, f"{place}/{name}", tensors) for name, item in named.items()}


def encode_document(value: object, place: str, tensors: dict[str, Tensor]) -> JSON:
    """A document whose values, at any depth of dictionaries, may be kinds.

    >>> encode_document({"loss": attacks.nll, "who": "white box"}, "threat", {})
    {'loss': {'kind': 'loss', 'name': 'nll'}, 'who': 'white box'}
    """
    match value:
        case {"kind": _}:
            raise StoreError(place, "other names than kind", "kind")
        case Mapping():
            return {
                str(key): encode_document(item, f"{place}/{key}", tensors)
                for key, item in value.items()
            }
    if type(value) in _KINDS.values() or any(value is loss for loss in _LOSSES.values()):
        return encode(value, place, tensors)
    return value  # type: ignore[return-value]  # checked where it is written


def decode_document(
    value: JSON, place: str, tensors: Mapping[str, Tensor], own: Sequence[type] = ()
) -> Any:
    """Inverse of `encode_document`."""
    match value:
        case {"kind": _}:
            return decode(value, place, tensors, own)
        case dict():
            return {
                key: decode_document(item, f"{place}/{key}", tensors, own)
                for key, item in value.items()
            }
    return value

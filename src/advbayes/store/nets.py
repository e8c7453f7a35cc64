"""Networks and posteriors as data: a tree of plain layers, never built by importing a name from a
file, and tensors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from advbayes import posteriors
from advbayes.model import BayesianModel

from .documents import JSON
from .errors import StoreError, refusing

_CONV = "in_channels out_channels kernel_size stride padding dilation groups bias padding_mode"
# Each layer with the arguments of its constructor that are also its attributes.
_LAYERS: dict[type[nn.Module], str] = {
    nn.Linear: "in_features out_features bias",
    nn.Conv1d: _CONV,
    nn.Conv2d: _CONV,
    nn.AvgPool2d: "kernel_size stride padding ceil_mode count_include_pad divisor_override",
    nn.MaxPool2d: "kernel_size stride padding dilation return_indices ceil_mode",
    nn.AdaptiveAvgPool2d: "output_size",
    nn.Flatten: "start_dim end_dim",
    nn.Identity: "",
    nn.Dropout: "p inplace",
    nn.GroupNorm: "num_groups num_channels eps affine",
    nn.LayerNorm: "normalized_shape eps elementwise_affine",
    nn.ReLU: "inplace",
    nn.LeakyReLU: "negative_slope inplace",
    nn.ELU: "alpha inplace",
    nn.GELU: "approximate",
    nn.SiLU: "inplace",
    nn.Softplus: "beta threshold",
    nn.Tanh: "",
    nn.Sigmoid: "",
}
# What an argument may be, where that is not one whole number.
_FLAGS = "bias ceil_mode count_include_pad return_indices inplace affine elementwise_affine"
_NUMBERS = "p eps negative_slope alpha beta threshold"
_SIZES = "kernel_size stride padding dilation output_size normalized_shape"
_OPTIONAL = "stride output_size divisor_override num_classes"
_WORDS = {
    "padding": ("same", "valid"),
    "padding_mode": ("zeros", "reflect", "replicate", "circular"),
    "approximate": ("none", "tanh"),
}


def describe_net(net: nn.Module) -> dict[str, JSON] | None:
    """What `build_net` needs to rebuild the net without its weights; None for custom code.

    >>> describe_net(nn.Sequential(nn.Linear(4, 3), nn.Tanh()))["layers"][0]
    ['0', {'kind': 'Linear', 'in_features': 4, 'out_features': 3, 'bias': True}]
    """
    described = _describe(net)
    if described is None or _signature(net) != _signature(build_net(described, "net")):
        return None  # a tied weight, for instance
    return described


def build_net(description: object, name: str) -> nn.Module:
    """The net, on the meta device: nothing is drawn or allocated, so sizes can be checked first.

    >>> build_net({"kind": "Linear", "in_features": 4, "out_features": 3, "bias": True}, "net")
    Linear(in_features=4, out_features=3, bias=True)
    """
    match description:
        case {"kind": "Sequential", "layers": list(layers), **rest} if not rest:
            net = nn.Sequential()
            for entry in layers:
                match entry:
                    case [str(key), layer] if key and "." not in key and not hasattr(net, key):
                        net.add_module(key, build_net(layer, f"{name}.{key}"))
                    case _:
                        raise StoreError(name, "layers as [name, layer]", f"{entry!r:.80}")
            return net
        case {"kind": str(kind), **arguments} if kind in _known():
            layer_type, names = _known()[kind]
            if arguments.keys() != set(names):
                wanted = f"{kind} with {', '.join(names)}"
                raise StoreError(name, wanted, f"{list(arguments)!r:.200}")
            checked = {
                str(key): _setting(f"{name}.{key}", str(key), value)
                for key, value in arguments.items()
            }
            with (
                refusing(name, f"settings that {kind} accepts"),
                torch.device("meta"),
                warnings.catch_warnings(action="ignore"),  # torch comments on layers of size zero
            ):
                built: nn.Module = layer_type(**checked)
            return built
    kinds = ", ".join(["Sequential", *_known()])
    raise StoreError(name, f"a layer of kind {kinds}", f"{description!r:.200}")


def fill_net(net: nn.Module, state: Mapping[str, Tensor], name: str) -> nn.Module:
    """Give a net its weights and buffers; names and shapes must be exactly its own."""
    wanted = {key: tuple(value.shape) for key, value in net.state_dict().items()}
    came = {key: tuple(value.shape) for key, value in state.items()}
    for key in sorted(wanted.keys() | came.keys()):
        if wanted.get(key) != came.get(key):
            shape, other = wanted.get(key, "no such tensor"), came.get(key, "none")
            raise StoreError(name, f"{key} of shape {shape}", f"{other}")
        if 0 in came[key]:  # a file of no size could name layers of any width
            raise StoreError(name, f"{key} with numbers in it", f"shape {came[key]}")
    with refusing(name, "weights that fit the net"):  # not one of whole numbers, for instance
        net.load_state_dict(dict(state), strict=True, assign=True)
    return net


def _describe(net: nn.Module) -> dict[str, JSON] | None:
    if net._forward_hooks or net._forward_pre_hooks or "forward" in net.__dict__:
        return None
    if type(net) is nn.Sequential:
        layers: list[JSON] = []
        for name, child in net.named_children():
            layer = _describe(child)
            if layer is None:
                return None
            layers.append([name, layer])
        return {"kind": "Sequential", "layers": layers} if len(layers) == len(net) else None
    kind = type(net).__name__
    known, names = _known().get(kind, (None, ()))
    if type(net) is not known:
        return None
    return {"kind": kind, **{name: _plain(getattr(net, name)) for name in names}}


@functools.cache
def _known() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Every layer and built-in network by name, with the arguments of its constructor."""
    # stands below this module in the layout
    from advbayes.networks import ConvGenerator, FullyConnectedGenerator

    layers = {
        **_LAYERS,
        ConvGenerator: "num_classes channels size",
        FullyConnectedGenerator: "num_features num_outputs num_classes width",
    }
    return {layer.__name__: (layer, tuple(names.split())) for layer, names in layers.items()}


def _plain(value: Any) -> JSON:
    match value:
        case Tensor():
            return True  # a bias that is there
        case tuple():
            return [_plain(item) for item in value]
    return value  # type: ignore[no-any-return]


def _setting(place: str, key: str, value: object) -> object:
    """An argument of a layer, its type checked, since constructors take almost anything."""
    listed = value if type(value) is list else [value]
    if key in _WORDS and type(value) is str:
        wanted, fits = f"one of {', '.join(_WORDS[key])}", value in _WORDS[key]
    elif key in _FLAGS.split():
        wanted, fits = "true or false", type(value) is bool or (value is None and key == "bias")
    elif key in _NUMBERS.split():
        wanted, fits = "a number", type(value) in (int, float)
    else:
        sizes, optional = key in _SIZES.split(), key in _OPTIONAL.split()
        wanted = "whole numbers" if sizes else "a whole number"
        whole = all(type(item) is int or (item is None and optional) for item in listed)
        fits = whole and (sizes or listed is not value)
    if not fits:
        raise StoreError(place, wanted, f"{value!r:.80}")
    return tuple(listed) if listed is value else value


def _signature(net: nn.Module) -> tuple[object, ...]:
    named = (net.named_parameters(), net.state_dict().items())
    return *([(name, tuple(value.shape)) for name, value in each] for each in named), repr(net)


# Each posterior's tensors with their axes (P: the model's parameters, others: at least one); the
# first is what it is made from.
_POSTERIORS: dict[str, tuple[Any, dict[str, str]]] = {
    "MeanField": (posteriors.MeanField, {"mu": "P", "rho": "P"}),
    "PointMass": (posteriors.PointMass, {"theta": "P"}),
    "Ensemble": (posteriors.Ensemble, {"thetas": "SP"}),
    "LowRank": (posteriors.LowRank, {"mu": "P", "rho": "P", "factor": "PR"}),
    "Samples": (posteriors.Samples, {"thetas": "SP"}),
}


def encode_posterior(
    posterior: Any, model: BayesianModel, place: str
) -> tuple[dict[str, JSON], dict[str, Tensor]]:
    """A posterior's kind and its tensors."""
    kind = type(posterior).__name__
    if kind not in _POSTERIORS or type(posterior) is not _POSTERIORS[kind][0]:
        raise StoreError(f"{place}:posterior", f"one of {', '.join(_POSTERIORS)}", kind)
    if posterior.num_params != model.num_params:
        wanted = f"a posterior over the model's {model.num_params} parameters"
        raise StoreError(f"{place}:posterior", wanted, f"{posterior.num_params}")
    return {"kind": kind}, dict(posterior.state_dict())


def decode_posterior(
    document: JSON, state: dict[str, Tensor], model: BayesianModel, place: str
) -> Any:
    """Inverse of `encode_posterior`."""
    part, size = f"{place}:posterior", model.num_params
    match document:
        case {"kind": str(kind), **rest} if kind in _POSTERIORS and not rest:
            made, axes = _POSTERIORS[kind]
        case _:
            raise StoreError(part, f"one of {', '.join(_POSTERIORS)}", f"{document!r:.80}")
    if state.keys() != axes.keys():
        raise StoreError(part, f"the tensors {', '.join(axes)}", f"{sorted(state)!r:.200}")
    for name, letters in axes.items():  # before a constructor allocates what the shapes say
        shape = tuple(state[name].shape)
        pairs = zip(shape, letters, strict=False)
        fits = [length == size if axis == "P" else length > 0 for length, axis in pairs]
        if len(shape) != len(letters) or not all(fits):
            axes_wanted = ", ".join(letters).replace("P", str(size))
            wanted = f"{name} of shape ({axes_wanted}), no axis of length 0"
            raise StoreError(part, wanted, f"{shape}")
    first = state[next(iter(axes))]
    with refusing(part, f"tensors that fit {kind} and the model"):
        if kind == "Samples":
            posterior = made(first)
        else:
            rank = {"rank": state["factor"].shape[1]} if kind == "LowRank" else {}
            posterior = made(model, init=first, **rank)
        posterior.load_state_dict(state)
        return posterior

"""Layers at given parameters, without the module tree; convolutions with few input channels and a faster input gradient.

A library convolution pads its few channels to a whole vector register and wastes the rest, and its input gradient is the slow
part of an attack on a convolutional net. Here that gradient is one matrix product and one shifted addition for each position of
the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from advbayes.tracing import is_tracing

MAX_CHANNELS = 2  # measured: 1.8 times faster for one, 1.2 to 1.5 for two, no clear gain from three on (docs/performance.md)


def is_thin(layer: nn.Module) -> bool:
    """Whether `thin_forward` computes what the layer does, faster backwards.

    >>> is_thin(nn.Conv2d(1, 16, 3)), is_thin(nn.Conv2d(16, 32, 3)), is_thin(nn.Conv2d(1, 16, 3, stride=2))
    (True, False, False)
    """
    return (
        type(layer) is nn.Conv2d
        and layer.in_channels <= MAX_CHANNELS
        and layer.groups == 1
        and layer.stride == (1, 1)
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and isinstance(layer.padding, tuple)
    )


def thin_forward(layer: nn.Conv2d) -> partial[Tensor]:
    """A `forward` for the layer, which reads its parameters at each call.

    >>> layer = nn.Conv2d(1, 4, 3, padding=1)
    >>> x = torch.randn(2, 1, 5, 5, requires_grad=True)
    >>> by_library, by_product = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (layer, thin_forward(layer)))
    >>> torch.allclose(by_library, by_product, atol=1e-5)
    True
    """
    return partial(_forward, layer)


def _forward(layer: nn.Conv2d, x: Tensor) -> Tensor:
    padding = layer.padding
    if not x.requires_grad:
        return functional.conv2d(x, layer.weight, layer.bias, padding=padding)
    output: Tensor = _ThinConvolution.apply(x, layer.weight, layer.bias, padding)  # type: ignore[no-untyped-call]
    return output


Layer = Callable[[Tensor, Sequence[Tensor]], Tensor]  # (x, the network's parameters) -> the layer's output


def in_sequence(net: nn.Module, parameters: Sequence[Tensor]) -> list[Layer] | None:
    """The layers of a plain `nn.Sequential` as functions of (x, parameters in the given order); None for any other net.

    Half of a small net's forward time goes into calling modules and hanging tensors into them.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> layers = in_sequence(net, list(net.parameters()))
    >>> layers[1](layers[0](torch.ones(1, 2), [torch.ones(3, 2), torch.ones(3)]), [])
    tensor([[3., 3., 3.]])
    >>> in_sequence(nn.Bilinear(2, 2, 2), []) is None
    True
    """
    if type(net) is not nn.Sequential:
        return None
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    layers: list[Layer] = []
    for module in net:
        if type(module) is nn.Sequential:
            inner = in_sequence(module, parameters)
            if inner is None:
                return None
            layers += inner
        elif not any(True for _ in module.parameters()):
            layers.append(partial(_without_parameters, module.forward))
        elif type(module) in (nn.Linear, nn.Conv2d) and _is_plain(module, places):
            bias = None if module.bias is None else places[id(module.bias)]
            if type(module) is nn.Linear:
                layers.append(partial(_linear, places[id(module.weight)], bias))
            elif type(module) is nn.Conv2d and module.padding_mode == "zeros":
                layers.append(partial(_convolution, module, is_thin(module), places[id(module.weight)], bias))
            else:
                return None
        else:
            return None
    return layers


def _is_plain(module: nn.Module, places: dict[int, int]) -> bool:
    """Whether weight and bias are parameters at known places, and nothing computes them (as weight norms and prunings do)."""
    return id(module.weight) in places and (module.bias is None or id(module.bias) in places) and not module._forward_pre_hooks


def _without_parameters(forward: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    return forward(x)


def _linear(weight: int, bias: int | None, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    return functional.linear(x, parameters[weight], None if bias is None else parameters[bias])


def _convolution(layer: nn.Conv2d, thin: bool, weight: int, bias: int | None, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    w, b = parameters[weight], None if bias is None else parameters[bias]
    if thin and x.requires_grad:
        output: Tensor = _ThinConvolution.apply(x, w, b, layer.padding)  # type: ignore[no-untyped-call]
        return output
    return functional.conv2d(x, w, b, layer.stride, layer.padding, layer.dilation, layer.groups)


class _ThinConvolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        return functional.conv2d(x, weight, bias, padding=padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, padding = inputs
        ctx.save_for_backward(x, weight)
        ctx.padding, ctx.has_bias = padding, bias is not None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        _, for_weight, for_bias, _ = ctx.needs_input_grad
        of_weight = of_bias = None
        if for_weight or for_bias:
            _, of_weight, of_bias = torch.ops.aten.convolution_backward(
                gradient, x, weight, [len(weight)], [1, 1], ctx.padding, [1, 1], False, [0, 0], 1, [False, for_weight, for_bias]
            )
        return (_input_gradient(gradient, weight, ctx.padding) if ctx.needs_input_grad[0] else None), of_weight, of_bias, None


def _input_gradient(
    gradient: Tensor,  # (B, O, H', W')
    weight: Tensor,  # (O, C, k, l)
    padding: tuple[int, int],
) -> Tensor:  # (B, C, H, W)
    num_out, num_in, tall, wide = weight.shape
    batch, _, height, width = gradient.shape
    rows = gradient.permute(0, 2, 3, 1).reshape(-1, num_out)  # a view in channels_last
    shares = (weight.reshape(num_out, -1).T @ rows.T).view(num_in, tall, wide, batch, height, width)
    if is_tracing():  # one fused kernel instead of one for each position
        padded = sum(
            functional.pad(shares[:, i, j], (j, wide - 1 - j, i, tall - 1 - i)) for i in range(tall) for j in range(wide)
        )
    else:
        padded = shares.new_zeros(num_in, batch, height + tall - 1, width + wide - 1)
        for i in range(tall):
            for j in range(wide):
                padded[:, :, i : i + height, j : j + width].add_(shares[:, i, j])
    assert isinstance(padded, Tensor)
    inside = padded[:, :, padding[0] : padded.shape[2] - padding[0], padding[1] : padded.shape[3] - padding[1]]
    return inside.transpose(0, 1)

"""Nets of linear layers and activations, forwards and backwards by hand.

On a small net autograd spends four times as long on its own records as on the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    # the value, and the gradient in its argument from the gradient in the value and the value itself
    nn.ReLU: (torch.relu, lambda gradient, value: torch.ops.aten.threshold_backward.default(gradient, value, 0)),
    nn.Tanh: (torch.tanh, lambda gradient, value: torch.ops.aten.tanh_backward.default(gradient, value)),
    nn.Sigmoid: (torch.sigmoid, lambda gradient, value: torch.ops.aten.sigmoid_backward.default(gradient, value)),
}


@dataclass(frozen=True)
class Dense:
    """A net by the places of its layers' weights and biases among the parameters; an activation stands by its type.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> parameters = [p.detach() for p in net.parameters()]
    >>> dense = Dense.of(net, list(net.parameters()))
    >>> x = torch.ones(4, 2, requires_grad=True)
    >>> values = dense.values(x.detach(), parameters)
    >>> by_hand = dense.input_gradient(values, torch.ones(4, 1), parameters)
    >>> torch.allclose(by_hand, torch.autograd.grad(net(x).sum(), x)[0])
    True
    """

    layers: tuple[tuple[int, int | None] | type[nn.Module], ...]

    @staticmethod
    def of(net: nn.Module, parameters: Sequence[Tensor]) -> Dense | None:
        """None for nets of anything else, and where layers share parameters or something computes them."""
        if type(net) is not nn.Sequential:
            return None
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        layers: list[tuple[int, int | None] | type[nn.Module]] = []
        for module in net:
            if type(module) in _ACTIVATIONS:
                layers.append(type(module))
            elif type(module) is nn.Linear and id(module.weight) in places:
                weight = places.pop(id(module.weight))
                if module.bias is not None and id(module.bias) not in places:
                    return None
                layers.append((weight, None if module.bias is None else places.pop(id(module.bias))))
            else:
                return None
        return Dense(tuple(layers)) if layers and not places else None

    def values(
        self,
        x: Tensor,  # (B, features)
        parameters: Sequence[Tensor],
    ) -> list[Tensor]:
        """x and what each layer makes of it, the net's output last."""
        values = [x]
        for layer in self.layers:
            if isinstance(layer, tuple):
                weight, bias = layer
                turned = parameters[weight].t()
                x = torch.mm(x, turned) if bias is None else torch.addmm(parameters[bias], x, turned)
            else:
                x = _ACTIVATIONS[layer][0](x)
            values.append(x)
        return values

    def gradient(
        self,
        values: list[Tensor],
        gradient: Tensor,  # (B, O), in the output
        parameters: Sequence[Tensor],
        out: Sequence[Tensor],
    ) -> None:
        """The gradient in each parameter, written to `out`."""
        self._back(values, gradient, parameters, out)

    def input_gradient(self, values: list[Tensor], gradient: Tensor, parameters: Sequence[Tensor]) -> Tensor:  # (B, features)
        """The gradient in x."""
        return self._back(values, gradient, parameters, None)

    def _back(self, values: list[Tensor], gradient: Tensor, parameters: Sequence[Tensor], out: Sequence[Tensor] | None) -> Tensor:
        for k in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[k]
            if not isinstance(layer, tuple):
                gradient = _ACTIVATIONS[layer][1](gradient, values[k + 1])
                continue
            weight, bias = layer
            if out is not None:
                torch.mm(gradient.t(), values[k], out=out[weight])
                if bias is not None:
                    torch.sum(gradient, 0, out=out[bias])
                if k == 0:
                    break
            gradient = torch.mm(gradient, parameters[weight])
        return gradient

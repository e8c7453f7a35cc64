"""One pass for many thetas: what the thetas can share is computed for all of them at once.

The first layer sees the same x whatever theta is, so S convolutions are one with S times the channels, and their input
gradients one matrix product; the activations and poolings after it do not care whose channels they see. Linear layers after
a linear one are batched products. From the second convolution on each theta goes its own way, which is then the fastest.
Nets that are not plain stacks of such layers are run theta by theta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from advbayes.layers import is_thin
from advbayes.model import BayesianModel, _as_matrix, _channels_last

# Layers without parameters that treat every number, or every channel, alike.
_EACH_NUMBER = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Identity,
    nn.Dropout,
)
_EACH_CHANNEL = (*_EACH_NUMBER, nn.AvgPool2d, nn.MaxPool2d)
_CACHED = 1 << 19  # numbers of a first layer's output that are worked on at a time

_Step = tuple[nn.Module, int, int | None]  # a layer, where its weight is among the model's parameters, and its bias
_plans: WeakKeyDictionary[nn.Module, tuple[_Step, ...] | None] = WeakKeyDictionary()


class Stacked:
    """x -> the network's raw outputs at each theta (S, B, O), with one gradient in x at most; thetas are constants.

    >>> from advbayes import Categorical
    >>> model = BayesianModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), Categorical())
    >>> thetas, x = torch.randn(5, model.num_params), torch.randn(2, 4)
    >>> apart = torch.stack([model.output(theta, x)[0] for theta in thetas])
    >>> torch.allclose(Stacked(model, thetas)(x), apart, atol=1e-5)
    True
    """

    def __init__(
        self,
        model: BayesianModel,
        thetas: Tensor,  # (S, P)
    ) -> None:
        self.model, self.thetas = model, thetas.detach()
        if model.net not in _plans:
            _plans[model.net] = _plan(model)
        self._steps = _plans[model.net]
        *flat, self.extra = self.thetas.split_with_sizes(model._sizes, dim=1)  # the likelihood's coordinates: (S, num_extra)
        self._weights = [part.reshape(len(thetas), *shape) for part, shape in zip(flat, model.shapes, strict=True)]
        self._spread: dict[tuple[int, torch.Size, bool], Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        self.model._check_input(x)
        if self._steps is None or not len(x):
            return torch.stack([self.model.output(theta, x)[0] for theta in self.thetas])
        return self._run(self._steps, x, len(self.thetas))

    def _run(self, plan: Sequence[_Step], x: Tensor, num: int) -> Tensor:
        """Shared until the first layer with weights, joint through what follows it, apart from the next convolution on."""
        while plan[0][1] < 0:
            x, plan = plan[0][0](x), plan[1:]
        (layer, place, bias_place), plan = plan[0], plan[1:]
        weight = self._weights[place].flatten(0, 1)
        bias = None if bias_place is None else self._weights[bias_place].flatten()
        if isinstance(layer, nn.Linear):
            if x.ndim != 2:
                raise ValueError(f"x must reach {layer} as (B, {layer.in_features}), got shape {tuple(x.shape)}")
            return self._linear(plan, functional.linear(x, weight, bias).view(len(x), num, -1).transpose(0, 1))
        assert isinstance(layer, nn.Conv2d)
        x = _channels_last(x)
        if is_thin(layer) and _rectified_then_halved(plan, x.shape[2:], layer):
            joint: Tensor = _FirstBlock.apply(x, weight, bias, layer.padding)  # type: ignore[no-untyped-call]
            plan = plan[2:]
        else:
            joint = functional.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation)
        while plan and type(plan[0][0]) in _EACH_CHANNEL and not _flattened_next(plan):
            joint, plan = plan[0][0](joint), plan[1:]
        each = torch.split(joint, joint.shape[1] // num, dim=1)
        return torch.stack([self._apart(plan, s, own) for s, own in enumerate(each)])

    def _linear(self, plan: Sequence[_Step], h: Tensor) -> Tensor:
        """h (S, B, O) through activations and linear layers, each of them one batched product."""
        for layer, place, bias_place in plan:
            if place < 0:
                h = layer(h)
            else:
                turned = self._weights[place].transpose(1, 2)
                bias = None if bias_place is None else self._weights[bias_place].unsqueeze(1)
                h = torch.bmm(h, turned) if bias is None else torch.baddbmm(bias, h, turned)
        return h

    def _apart(self, plan: Sequence[_Step], s: int, h: Tensor) -> Tensor:
        """The rest of the net at one theta."""
        h = h.clone(memory_format=torch.channels_last)  # a copy of its own: layers may work in place
        while plan:
            skipped = _flattened_next(plan) if h.ndim == 4 else 0
            if skipped and not (skipped == 2 and (h.shape[2] % 2 or h.shape[3] % 2)):
                (_, place, bias_place), plan = plan[skipped], plan[skipped + 1 :]
                bias = None if bias_place is None else self._weights[bias_place][s]
                h = functional.linear(
                    h.permute(0, 2, 3, 1).reshape(len(h), -1), self._spread_out(place, h, skipped == 2)[s], bias
                )
                continue
            (layer, place, bias_place), plan = plan[0], plan[1:]
            bias = None if bias_place is None else self._weights[bias_place][s]
            if isinstance(layer, nn.Conv2d):
                own = self._weights[place][s]
                h = functional.conv2d(h, own, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
                if plan and type(plan[0][0]) is nn.ReLU:  # in place: a convolution's way back does not need its output
                    h, plan = h.relu_(), plan[1:]
            elif place >= 0:
                h = functional.linear(h, self._weights[place][s], bias)
            else:
                h = layer(h)
        return _as_matrix(h)

    def _spread_out(self, place: int, h: Tensor, halved: bool) -> Tensor:  # (S, O, H * W * C)
        """A linear layer's weights for h in channels_last, with the average pooling before it (if any) folded in.

        Pooling and reordering cost more time than the larger product, most of all backwards.
        """
        key = (place, h.shape[1:], halved)
        if key not in self._spread:
            weight, (_, channels, height, width) = self._weights[place], h.shape
            if halved:
                shaped = weight.view(*weight.shape[:2], channels, height // 2, 1, width // 2, 1) * 0.25
                shaped = shaped.expand(-1, -1, -1, -1, 2, -1, 2).reshape(*weight.shape[:2], channels, height, width)
            else:
                shaped = weight.view(*weight.shape[:2], channels, height, width)
            self._spread[key] = shaped.permute(0, 1, 3, 4, 2).reshape(*weight.shape[:2], -1).contiguous()
        return self._spread[key]


def _plan(model: BayesianModel) -> tuple[_Step, ...] | None:
    """The layers with the places of their parameters; None for a net that cannot be run this way."""
    layers = {name: layer for name, layer in model.net._modules.items() if layer is not None}  # with repetitions
    known = (*_EACH_CHANNEL, nn.Flatten, nn.Linear, nn.Conv2d)
    if type(model.net) is not nn.Sequential or any(type(layer) not in known for layer in layers.values()):
        return None
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in (model.net, *layers.values())):
        return None
    steps: list[_Step] = []
    for name, layer in layers.items():
        keys = [f"{name}.{key}" for key in ("weight", "bias") if getattr(layer, key, None) is not None]
        if any(key not in model.names for key in keys):  # frozen, or tied to another layer
            return None
        places = [model.names.index(key) for key in keys]
        steps.append((layer, places[0] if places else -1, places[1] if len(places) > 1 else None))
    start = next(k for k, (_, place, _) in enumerate(steps) if place >= 0)
    first, rest = steps[start][0], [layer for layer, _, _ in steps[start + 1 :]]
    if isinstance(first, nn.Linear):
        return tuple(steps) if all(type(layer) in (*_EACH_NUMBER, nn.Linear) for layer in rest) else None
    convolutions = [layer for layer in (first, *rest) if isinstance(layer, nn.Conv2d)]
    if first.groups != 1 or any(layer.padding_mode != "zeros" or isinstance(layer.padding, str) for layer in convolutions):
        return None
    return tuple(steps)


def _flattened_next(plan: Sequence[_Step]) -> int:
    """How many layers to skip to a linear layer that follows Flatten (1), or 2x2 average pooling and Flatten (2); else 0."""
    kinds = [type(layer) for layer, _, _ in plan[:3]]
    if kinds[:2] == [nn.Flatten, nn.Linear]:
        return int(_is_whole(plan[0][0]))
    if kinds == [nn.AvgPool2d, nn.Flatten, nn.Linear]:
        return 2 * int(_is_halving(plan[0][0]) and _is_whole(plan[1][0]))
    return 0


def _is_whole(flatten: nn.Module) -> bool:
    return isinstance(flatten, nn.Flatten) and flatten.start_dim == 1 and flatten.end_dim == -1


def _is_halving(pool: nn.Module) -> bool:
    if not isinstance(pool, nn.AvgPool2d):
        return False
    plain = _pair(pool.kernel_size) == _pair(pool.stride) == (2, 2) and _pair(pool.padding) == (0, 0)
    return plain and not pool.divisor_override


def _rectified_then_halved(plan: Sequence[_Step], size: Sequence[int], layer: nn.Conv2d) -> bool:
    """Whether ReLU and 2x2 average pooling of an even size follow the layer."""
    if [type(step[0]) for step in plan[:2]] != [nn.ReLU, nn.AvgPool2d] or not _is_halving(plan[1][0]):
        return False
    height, width = (n + 2 * p - k + 1 for n, p, k in zip(size, _pair(layer.padding), layer.kernel_size, strict=True))
    return height % 2 == 0 and width % 2 == 0


def _pair(value: Any) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _pull_back(gradient: Tensor, rectified: Tensor) -> Tensor:
    """Through 2x2 average pooling, then through ReLU."""
    spread = torch.ops.aten.avg_pool2d_backward(gradient, rectified, [2, 2], [2, 2], [0, 0], False, True, None)
    pulled: Tensor = torch.ops.aten.threshold_backward(spread, rectified, 0)
    return pulled


class _FirstBlock(torch.autograd.Function):
    """avg_pool2d(relu(conv2d(x)), 2), a few examples at a time so that what lies between stays in the cache.

    It is computed again on the way back: a thin convolution is cheaper than fresh memory for all that it gives.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.padding = padding
        ctx.rows = max(1, _CACHED // (len(weight) * x.shape[2] * x.shape[3]))
        return torch.cat([functional.avg_pool2d(_rectified(part, weight, bias, padding), 2) for part in torch.split(x, ctx.rows)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight, bias = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        taps = [
            _taps(_pull_back(part, _rectified(inputs, weight, bias, ctx.padding)), weight)
            for inputs, part in zip(torch.split(x, ctx.rows), torch.split(gradient, ctx.rows), strict=True)
        ]
        return _overlay(torch.cat(taps, dim=3), ctx.padding), None, None, None


def _rectified(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
    return functional.conv2d(x, weight, bias, padding=padding).contiguous(memory_format=torch.channels_last).relu_()


def _taps(
    gradient: Tensor,  # (B, O, H, W)
    weight: Tensor,  # (O, C, k, l)
) -> Tensor:  # (C, k, l, B, H, W)
    """What each kernel position passes back, before it is shifted to its place."""
    batch, num_out, height, width = gradient.shape
    rows = gradient.permute(0, 2, 3, 1).reshape(-1, num_out)  # a view in channels_last
    return (weight.reshape(num_out, -1).T @ rows.T).view(*weight.shape[1:], batch, height, width)


def _overlay(taps: Tensor, padding: tuple[int, int]) -> Tensor:  # (B, C, H, W)
    """The sum of the shifted taps, without the padding."""
    channels, tall, wide, batch, height, width = taps.shape
    padded = taps.new_zeros(channels, batch, height + tall - 1, width + wide - 1)
    for i in range(tall):
        for j in range(wide):
            padded[:, :, i : i + height, j : j + width].add_(taps[:, i, j])
    (down, right), (bottom, edge) = padding, padded.shape[2:]
    return padded[:, :, down : bottom - down, right : edge - right].transpose(0, 1)

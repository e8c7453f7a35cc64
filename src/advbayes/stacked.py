"""One pass for many thetas, forwards and back to x: what the thetas can share is computed for all of them at once.

The first layer sees the same x whatever theta is, so S convolutions are one with S times the channels, and their input
gradients one matrix product; the activations and poolings after it do not care whose channels they see. Linear layers after
a linear one are batched products. From the second convolution on each theta goes its own way, which is then the fastest.
The way back is written out layer by layer, since thetas are constants here and gradients can be worked on in place.
Nets that are not plain stacks of such layers are run theta by theta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from advbayes.layers import is_thin
from advbayes.model import BayesianModel, _as_matrix, _channels_last

aten = torch.ops.aten

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

Pull = Callable[[Tensor], Tensor]  # the gradient in a layer's output, which may be overwritten -> in its input
_Step = tuple[nn.Module, int, int | None]  # a layer, where its weight is among the model's parameters, and its bias
_plans: WeakKeyDictionary[nn.Module, tuple[_Step, ...] | None] = WeakKeyDictionary()


class Stacked:
    """x -> the network's raw outputs at each theta (S, B, O); thetas are constants.

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
        self._made: dict[Any, Any] = {}  # weights in the form that a layer needs, made when first met

    @property
    def is_plain(self) -> bool:
        """Whether the net is run without its module tree, so that threads may share this object."""
        return self._steps is not None

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs alone."""
        self.model._check_input(x)
        with torch.no_grad():
            if self._steps is None or not len(x):
                return torch.stack([self.model.output(theta, x)[0] for theta in self.thetas])
            return self._run(self._steps, x)[0]

    def traced(self, x: Tensor) -> tuple[Tensor, Pull]:
        """The outputs, and the way back, to be gone once: a gradient in them (S, B, O) -> the gradient in x."""
        self.model._check_input(x)
        if self._steps is not None and len(x):
            with torch.no_grad():
                return self._run(self._steps, x)
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            outputs = torch.stack([self.model.output(theta, at)[0] for theta in self.thetas])
        return outputs.detach(), lambda g: _gradient(outputs, at, g)

    def _run(self, plan: Sequence[_Step], x: Tensor) -> tuple[Tensor, Pull]:
        """Shared until the first layer with weights, joint through what follows it, apart from the next convolution on."""
        num, pulls = len(self.thetas), []
        while plan[0][1] < 0:
            x, pull = _without_weights(plan[0][0], x)
            pulls.append(pull)
            plan = plan[1:]
        layer, place, bias_place = plan[0]
        if isinstance(layer, nn.Linear):
            if x.ndim != 2:
                raise ValueError(f"x must reach {layer} as (B, {layer.in_features}), got shape {tuple(x.shape)}")
            outputs, pull = self._linear_net(plan, x)
            return outputs, _back([*pulls, pull])
        assert isinstance(layer, nn.Conv2d)
        x, plan = _channels_last(x), plan[1:]
        weight = self._weights[place].flatten(0, 1)
        bias = None if bias_place is None else self._weights[bias_place].flatten()
        if is_thin(layer) and _rectified_then_halved(plan, x.shape[2:], layer):
            if place not in self._made:
                self._made[place] = _FirstBlock(weight, bias, _pair(layer.padding))
            joint, pull = self._made[place](x)
            plan = plan[2:]
        else:
            joint, pull = _convolution(layer, x, weight, bias)
        pulls.append(pull)
        fresh = True
        while plan and type(plan[0][0]) in _EACH_CHANNEL and not _flattened_next(plan):
            joint, pull = _without_weights(plan[0][0], joint, fresh)
            pulls.append(pull)
            plan, fresh = plan[1:], False
        apart = [self._apart(plan, s, own) for s, own in enumerate(joint.chunk(num, dim=1))]

        def join(gradient: Tensor) -> Tensor:
            whole = torch.empty_like(joint)
            for channels, own, (_, back) in zip(whole.chunk(num, dim=1), gradient.clone(), apart, strict=True):
                channels.copy_(back(own))
            return whole

        return torch.stack([outputs for outputs, _ in apart]), _back([*pulls, join])

    def _linear_net(self, plan: Sequence[_Step], x: Tensor) -> tuple[Tensor, Pull]:
        """x (B, I) through linear layers and activations, each for all thetas at once: one product, or one batched product."""
        pulls: list[Pull] = []
        h: Tensor | None = None
        for layer, place, bias_place in plan:
            if h is None:
                weight = self._weights[place].flatten(0, 1)
                bias = None if bias_place is None else self._weights[bias_place].flatten()
                h = functional.linear(x, weight, bias).view(len(x), len(self.thetas), -1).transpose(0, 1)
                pulls.append(lambda g, w=weight: g.transpose(0, 1).reshape(len(x), -1) @ w)  # type: ignore[misc]
            elif place < 0:
                h, pull = _without_weights(layer, h)
                pulls.append(pull)
            else:
                weights = self._weights[place]  # (S, O, I)
                h = torch.bmm(h, weights.transpose(1, 2))
                if bias_place is not None:
                    h += self._weights[bias_place].unsqueeze(1)
                pulls.append(lambda g, w=weights: torch.bmm(g, w))  # type: ignore[misc]
        assert h is not None
        return h, _back(pulls)

    def _apart(self, plan: Sequence[_Step], s: int, h: Tensor) -> tuple[Tensor, Pull]:
        """The rest of the net at one theta."""
        h = h.contiguous(memory_format=torch.channels_last)
        pulls: list[Pull] = []
        fresh = False  # whether h is a product's output, which nothing else needs
        while plan:
            skipped = _flattened_next(plan) if h.ndim == 4 else 0
            if skipped and not (skipped == 2 and (h.shape[2] % 2 or h.shape[3] % 2)):
                layer, place, bias_place = plan[skipped]
                weight, plan = self._spread_out(place, h, skipped == 2)[s], plan[skipped + 1 :]
                h, pull = _flat_product(h, weight, None if bias_place is None else self._weights[bias_place][s])
            else:
                (layer, place, bias_place), plan = plan[0], plan[1:]
                bias = None if bias_place is None else self._weights[bias_place][s]
                if isinstance(layer, nn.Conv2d):
                    h, pull = _convolution(layer, h, self._weights[place][s], bias)
                elif place >= 0:
                    h, pull = _product(h, self._weights[place][s], bias)
                else:
                    h, pull = _without_weights(layer, h, fresh)
            pulls.append(pull)
            fresh = place >= 0
        return _as_matrix(h), _back([*pulls, _shaped_as(h)])

    def _spread_out(self, place: int, h: Tensor, halved: bool) -> Tensor:  # (S, O, H * W * C)
        """A linear layer's weights for h in channels_last, with the average pooling before it (if any) folded in.

        Pooling and reordering cost more time than the larger product, most of all backwards.
        """
        key = (place, h.shape[1:], halved)
        if key not in self._made:
            weight, (_, channels, height, width) = self._weights[place], h.shape
            if halved:
                shaped = weight.view(*weight.shape[:2], channels, height // 2, 1, width // 2, 1) * 0.25
                shaped = shaped.expand(-1, -1, -1, -1, 2, -1, 2).reshape(*weight.shape[:2], channels, height, width)
            else:
                shaped = weight.view(*weight.shape[:2], channels, height, width)
            self._made[key] = shaped.permute(0, 1, 3, 4, 2).reshape(*weight.shape[:2], -1).contiguous()
        made: Tensor = self._made[key]
        return made


class _FirstBlock:
    """avg_pool2d(relu(conv2d(x)), 2) as matrix products, a few rows at a time so that what lies between stays in the cache.

    The four outputs of a pooling window see one patch of x, so patches times kernels gives them side by side (4, O), and no
    pooling or its way back has to move anything. They are computed again on the way back: a thin convolution is
    cheaper than memory for all that it gives.
    """

    def __init__(
        self,
        weight: Tensor,  # (O, C, k, l)
        bias: Tensor | None,
        padding: tuple[int, ...],
    ) -> None:
        num_out, channels, tall, wide = weight.shape
        self._size, self._padding, self._num_out = (tall + 1, wide + 1), padding, num_out
        kernels = weight.new_zeros(2, 2, num_out, channels, *self._size)
        for i in range(2):
            for j in range(2):
                kernels[i, j, :, :, i : i + tall, j : j + wide] = weight
        ones = weight.new_zeros(num_out) if bias is None else bias
        # The mean's quarter goes into the kernels: relu(a) / 4 = relu(a / 4).
        self._kernels = 0.25 * torch.cat([kernels.view(4 * num_out, -1).T, ones.repeat(1, 4)])  # (C K L + 1, 4 O)

    def __call__(self, x: Tensor) -> tuple[Tensor, Pull]:
        down, right = self._padding
        padded = functional.pad(x, (right, right, down, down))
        windows = padded.unfold(2, self._size[0], 2).unfold(3, self._size[1], 2).permute(0, 2, 3, 1, 4, 5)  # (B, H, W, C, K, L)
        shape, num_out, height = windows.shape[:3], self._num_out, len(self._kernels)
        patches = x.new_ones(*shape, height)
        patches[..., :-1].view(windows.shape).copy_(windows)
        patches = patches.view(-1, height)
        pooled = x.new_empty(len(patches), num_out)
        rows = max(1, _CACHED // (4 * num_out))
        parts = [slice(start, start + rows) for start in range(0, len(patches), rows)]
        memory = x.new_empty(min(rows, len(patches)), 4 * num_out)
        for part in parts:
            outputs = torch.mm(patches[part], self._kernels, out=memory[: len(patches[part])])
            torch.sum(outputs.relu_().view(-1, 4, num_out), 1, out=pooled[part])

        def pull(gradient: Tensor) -> Tensor:
            flat = gradient.permute(0, 2, 3, 1).reshape(len(patches), 1, num_out)
            back = x.new_empty(len(patches), height - 1)
            for part in parts:
                outputs = torch.mm(patches[part], self._kernels, out=memory[: len(patches[part])])
                each = outputs.view(-1, 4, num_out)
                aten.threshold_backward.grad_input(flat[part].expand(-1, 4, -1), each, 0, grad_input=each)
                torch.mm(outputs, self._kernels[:-1].T, out=back[part])
            columns = back.view(len(x), -1, height - 1).transpose(1, 2)
            spread = functional.fold(columns, padded.shape[2:], self._size, stride=2)
            return spread[:, :, down : spread.shape[2] - down, right : spread.shape[3] - right]

        return pooled.view(*shape, num_out).permute(0, 3, 1, 2), pull


def _back(pulls: Sequence[Pull]) -> Pull:
    """The way back through layers given in the order of the way forward."""

    def back(gradient: Tensor) -> Tensor:
        for pull in reversed(pulls):
            gradient = pull(gradient)
        return gradient

    return back


def _gradient(out: Tensor, at: Tensor, gradient: Tensor) -> Tensor:
    """By autograd; zero where nothing depends on `at`."""
    found = torch.autograd.grad(out, at, gradient, allow_unused=True)[0] if out.requires_grad else None
    return torch.zeros_like(at) if found is None else found


def _shaped_as(h: Tensor) -> Pull:
    shape = h.shape
    return lambda gradient: gradient.reshape(shape)


def _without_weights(layer: nn.Module, h: Tensor, fresh: bool = False) -> tuple[Tensor, Pull]:
    """A layer without parameters; in place where nothing else needs h."""
    if type(layer) is nn.ReLU:
        rectified = h.relu_() if fresh else h.relu()
        return rectified, lambda g: aten.threshold_backward.grad_input(g, rectified, 0, grad_input=g)
    with torch.enable_grad():
        at = h.detach().requires_grad_()
        out = layer(at.clone() if getattr(layer, "inplace", False) else at)
    return out.detach(), lambda g: torch.autograd.grad(out, at, g)[0]


def _convolution(layer: nn.Conv2d, h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Pull]:
    stride, padding, dilation, groups = layer.stride, _pair(layer.padding), layer.dilation, layer.groups

    def pull(g: Tensor) -> Tensor:
        wanted = [True, False, False]  # the input's gradient alone
        gradients = aten.convolution_backward(g, h, weight, None, stride, padding, dilation, False, [0, 0], groups, wanted)
        gradient: Tensor = gradients[0]
        return gradient

    return functional.conv2d(h, weight, bias, stride, padding, dilation, groups), pull


def _product(h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Pull]:
    return functional.linear(h, weight, bias), lambda g: g @ weight


def _flat_product(h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Pull]:
    """A linear layer on h (B, C, H, W) flattened as it lies in memory."""
    batch, channels, height, width = h.shape
    out = (weight @ h.permute(0, 2, 3, 1).reshape(batch, -1).T).T  # few outputs: twice as fast this way round
    return out if bias is None else out + bias, lambda g: (g @ weight).view(batch, height, width, channels).permute(0, 3, 1, 2)


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

"""One pass for many thetas, forwards and back to x: what the thetas can share is computed for all of them at once.

The first layer sees the same x whatever theta is, so S convolutions are one with S times the channels, and their input
gradients one matrix product; the activations and poolings after it do not care whose channels they see. Linear layers after
a linear one are batched products. From the second convolution on each theta goes its own way, which is then the fastest.
The way back is written out layer by layer, since thetas are constants here and gradients can be worked on in place.
Nets that are not plain stacks of such layers are run theta by theta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
_CACHED = 1 << 20  # numbers of a first layer's output that are worked on at a time

Pull = Callable[[Tensor], Tensor]  # the gradient in a layer's output, which may be overwritten -> in its input
_Layer = Callable[[Tensor], tuple[Tensor, Pull]]
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
        self._plan = _plans[model.net]
        *flat, self.extra = self.thetas.split_with_sizes(model._sizes, dim=1)  # the likelihood's coordinates: (S, num_extra)
        self._weights = [part.reshape(len(thetas), *shape) for part, shape in zip(flat, model.shapes, strict=True)]
        self._made: dict[Any, Any] = {}  # weights in the form that a layer needs, made when first met

    @property
    def is_plain(self) -> bool:
        """Whether the net is run without its module tree, so that threads may share this object."""
        return self._steps is not None

    @property
    def _steps(self) -> tuple[_Step, ...] | None:
        """The plan, but not under autocast: that is a setting of one thread, and products here write into given memory."""
        return None if torch.is_autocast_enabled(self.thetas.device.type) else self._plan

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs alone."""
        self.model._check_input(x)
        with torch.no_grad():
            steps = self._steps
            if steps is None or not len(x):
                return torch.stack([self.model.output(theta, x)[0] for theta in self.thetas])
            return self._run(steps, x)[0]

    def traced(self, x: Tensor) -> tuple[Tensor, Pull]:
        """The outputs, and the way back, to be gone once: a gradient in them (S, B, O) -> the gradient in x."""
        self.model._check_input(x)
        steps = self._steps
        if steps is not None and len(x):
            with torch.no_grad():
                return self._run(steps, x)
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            outputs = torch.stack([self.model.output(theta, at)[0] for theta in self.thetas])
        return outputs.detach(), lambda g: _gradient(outputs, at, g)

    def _run(self, plan: Sequence[_Step], x: Tensor) -> tuple[Tensor, Pull]:
        """Shared until the first layer with weights, joint through what follows it, apart from the next convolution on."""
        num, pulls = len(self.thetas), []
        while plan[0][1] < 0:
            x, pull = _without_weights(plan[0][0], False, x)
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
                self._made[place] = _FirstBlock(weight, bias, _pair(layer.padding), num)
            block: _FirstBlock = self._made[place]
            (owns, unite), plan = block(x), plan[2:]
        else:
            joint, pull = _convolution(layer, weight, bias, x)
            pulls.append(pull)
            fresh = True
            while plan and type(plan[0][0]) in _EACH_CHANNEL and not _flattened_next(plan):
                joint, pull = _without_weights(plan[0][0], fresh, joint)
                pulls.append(pull)
                plan, fresh = plan[1:], False
            owns, unite = joint.chunk(num, dim=1), _side_by_side
        apart = [_through(layers, own) for layers, own in zip(self._rest(plan, owns), owns, strict=True)]

        def join(gradient: Tensor) -> Tensor:
            return unite([back(own) for own, (_, back) in zip(gradient.clone(), apart, strict=True)])

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
                h, pull = _without_weights(layer, False, h)
                pulls.append(pull)
            else:
                weights = self._weights[place]  # (S, O, I)
                h = torch.bmm(h, weights.transpose(1, 2))
                if bias_place is not None:
                    h += self._weights[bias_place].unsqueeze(1)
                pulls.append(lambda g, w=weights: torch.bmm(g, w))  # type: ignore[misc]
        assert h is not None
        return h, _back(pulls)

    def _rest(self, plan: Sequence[_Step], owns: Sequence[Tensor]) -> list[list[_Layer]]:
        """The rest of the net at each theta, found out with one row and kept."""
        key = (len(plan), owns[0].shape[1:])
        if key not in self._made:
            self._made[key] = [self._layers(plan, s, own[:1]) for s, own in enumerate(owns)]
        made: list[list[_Layer]] = self._made[key]
        return made

    def _layers(self, plan: Sequence[_Step], s: int, h: Tensor) -> list[_Layer]:
        """The layers at one theta, for inputs of h's size."""
        layers: list[_Layer] = []
        fresh = False  # whether what comes in is a product's output, which nothing else needs
        while plan:
            skipped = _flattened_next(plan) if h.ndim == 4 else 0
            if skipped == 2 and (h.shape[2] % 2 or h.shape[3] % 2):
                skipped = 0
            (layer, place, bias_place), plan = plan[skipped], plan[skipped + 1 :]
            bias = None if bias_place is None else self._weights[bias_place][s]
            run: _Layer
            if skipped:
                run = partial(_flat_product, self._spread_out(place, h, skipped == 2)[s], bias)
            elif isinstance(layer, nn.Conv2d):
                run = partial(_convolution, layer, self._weights[place][s], bias)
            elif place >= 0:
                run = partial(_product, self._weights[place][s], bias)
            else:
                run = partial(_without_weights, layer, fresh)
            layers.append(run)
            h, fresh = run(h)[0], place >= 0
        return layers

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

    The four outputs of a pooling window see one patch of x. They lie in four matrices, a row for each window: pooling is their
    sum, its way back one gradient for all four, and nothing has to be moved. They are computed again on the way back: a thin
    convolution is cheaper than memory for all that it gives.
    """

    def __init__(
        self,
        weight: Tensor,  # (O, C, k, l)
        bias: Tensor | None,
        padding: tuple[int, ...],
        num: int,  # of thetas, each with a share of the outputs
    ) -> None:
        num_out, channels, tall, wide = weight.shape
        self._size, self._padding, self._num_out, self._num = (tall + 1, wide + 1), padding, num_out, num
        whole = channels * (tall + 1) * (wide + 1)  # numbers of a patch; a one follows them, for the bias
        places = torch.arange(whole, device=weight.device).view(channels, *self._size)
        corners = [(slice(i, i + tall), slice(j, j + wide)) for i in range(2) for j in range(2)]
        seen = torch.stack([places[:, rows, columns].flatten() for rows, columns in corners])  # (4, C k l)
        picks = torch.cat([seen, seen.new_full((4, 1), whole)], 1).flatten()
        self._pick = torch.eye(whole + 1, dtype=weight.dtype, device=weight.device)[:, picks]  # patch -> what each output sees
        # The mean's quarter goes into the kernels: relu(a) / 4 = relu(a / 4).
        flat = 0.25 * weight.flatten(1)
        ones = weight.new_zeros(num_out) if bias is None else 0.25 * bias
        self._kernels = torch.cat([flat.T, ones.unsqueeze(0)])  # (C k l + 1, O)
        self._back = weight.new_zeros(4, num_out, whole)
        for kernels, where in zip(self._back, seen, strict=True):
            kernels[:, where] = flat

    def __call__(self, x: Tensor) -> tuple[tuple[Tensor, ...], Callable[[Sequence[Tensor]], Tensor]]:
        """Each theta's outputs, and the way back from all their gradients."""
        down, right = self._padding
        padded = functional.pad(x, (right, right, down, down))
        windows = padded.unfold(2, self._size[0], 2).unfold(3, self._size[1], 2).permute(0, 2, 3, 1, 4, 5)  # (B, H, W, C, K, L)
        shape, num_out, whole = windows.shape[:3], self._num_out, len(self._pick) - 1
        patches = x.new_ones(*shape, whole + 1)
        patches[..., :-1].view(windows.shape).copy_(windows)
        seen = (patches.view(-1, whole + 1) @ self._pick).view(shape.numel(), 4, -1).transpose(0, 1)  # (4, B H W, C k l + 1)
        rows = max(1, _CACHED // (4 * num_out))
        parts = torch.split(seen, rows, 1)
        memory = x.new_empty(4, min(rows, seen.shape[1]), num_out)
        kernels = self._kernels.expand(4, -1, -1)

        def each(part: Tensor) -> Tensor:  # (4, rows, O)
            return torch.bmm(part, kernels, out=memory[:, : part.shape[1]])

        total, own = seen.shape[1], num_out // self._num
        pooled = x.new_empty(self._num, total, own)
        for part, out in zip(parts, torch.split(pooled.transpose(0, 1), rows), strict=True):
            first, second, third, fourth = each(part).relu_().view(4, -1, self._num, own)
            torch.add(first.add_(second).add_(third), fourth, out=out)

        def pull(gradients: Sequence[Tensor]) -> Tensor:
            pieces = [torch.split(gradient.permute(0, 2, 3, 1).reshape(-1, own), rows) for gradient in gradients]
            back = x.new_empty(total, whole)
            for part, out, *piece in zip(parts, torch.split(back, rows), *pieces, strict=True):
                outputs = each(part)
                gradient = torch.cat(piece, 1).expand_as(outputs)
                aten.threshold_backward.grad_input(gradient, outputs, 0, grad_input=outputs)
                torch.mm(outputs[0], self._back[0], out=out)
                for matrix, transposed in zip(outputs[1:], self._back[1:], strict=True):
                    out.addmm_(matrix, transposed)
            columns = back.view(len(x), -1, whole).transpose(1, 2)
            spread = functional.fold(columns, padded.shape[2:], self._size, stride=2)
            return spread[:, :, down : spread.shape[2] - down, right : spread.shape[3] - right]

        return pooled.view(self._num, *shape, own).permute(0, 1, 4, 2, 3).unbind(), pull


def _through(layers: Sequence[_Layer], h: Tensor) -> tuple[Tensor, Pull]:
    """The outputs of the layers in turn, as a matrix."""
    h, pulls = h.contiguous(memory_format=torch.channels_last), []
    for layer in layers:
        h, pull = layer(h)
        pulls.append(pull)
    return _as_matrix(h), _back([*pulls, _shaped_as(h)])


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Channels after channels, in channels_last."""
    batch, _, height, width = parts[0].shape
    rows = [part.permute(0, 2, 3, 1).reshape(batch * height * width, -1) for part in parts]
    return torch.cat(rows, 1).view(batch, height, width, -1).permute(0, 3, 1, 2)


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


def _without_weights(layer: nn.Module, fresh: bool, h: Tensor) -> tuple[Tensor, Pull]:
    """A layer without parameters; in place where nothing else needs h."""
    if type(layer) is nn.ReLU:
        rectified = h.relu_() if fresh else h.relu()
        return rectified, lambda g: aten.threshold_backward.grad_input(g, rectified, 0, grad_input=g)
    with torch.enable_grad():
        at = h.detach().requires_grad_()
        out = layer(at.clone() if getattr(layer, "inplace", False) else at)
    return out.detach(), lambda g: torch.autograd.grad(out, at, g)[0]


def _convolution(layer: nn.Conv2d, weight: Tensor, bias: Tensor | None, h: Tensor) -> tuple[Tensor, Pull]:
    """The way back is the transposed convolution, which needs no h: its memory is free for the next theta's."""
    stride, padding, dilation, groups = layer.stride, _pair(layer.padding), layer.dilation, layer.groups
    sizes = zip(h.shape[2:], padding, dilation, layer.kernel_size, stride, strict=True)
    unseen = [(n + 2 * p - d * (k - 1) - 1) % s for n, p, d, k, s in sizes]  # rows and columns that no kernel reached
    return (
        functional.conv2d(h, weight, bias, stride, padding, dilation, groups),
        lambda g: functional.conv_transpose2d(g, weight, None, stride, padding, unseen, groups, dilation),
    )


def _product(weight: Tensor, bias: Tensor | None, h: Tensor) -> tuple[Tensor, Pull]:
    return functional.linear(h, weight, bias), lambda g: g @ weight


def _flat_product(weight: Tensor, bias: Tensor | None, h: Tensor) -> tuple[Tensor, Pull]:
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

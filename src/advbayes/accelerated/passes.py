"""Passes through many thetas at once: `run(model, thetas, x) -> (outputs, vjp)`, as
`BayesianModel.run` defines it.

Nets of linear layers and norms run all thetas as one batch (`torch.func.vmap`): a product for each
layer instead of S small ones. So do convolutions of few pixels, where calls cost more than
products. Of many pixels they run theta by theta, which is then the fastest (grouped convolutions
are not); where the images have one or two channels, for which a library's input gradient wastes
most of a vector register, the first layer's input gradients are matrix products that add up over
the thetas.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from advbayes.model import BayesianModel, Vjp, vjp_of

# rows x thetas x input size worked on at once: activations then stay near the cache
_NUMBERS = 1 << 19
_ROWS = 16  # of a batch; fewer are not worth a call
# of a batch of images, up to which a grouped convolution is faster than one for each theta
_PIXELS = 3 << 10
_RESHAPES = (torch.flatten, Tensor.flatten, torch.reshape, Tensor.reshape, Tensor.view)
_THIN = 2  # channels up to which a product is the faster input gradient (docs/performance.md)

_R = TypeVar("_R")
_one_by_one: WeakSet[nn.Module] = WeakSet()  # nets that vmap has refused


def run(
    model: BayesianModel,
    thetas: Tensor,  # (S, P), constants
    x: Tensor,  # (B, *event)
) -> tuple[Tensor, Vjp]:  # (S, B, O)
    """Raw outputs at each theta and their vector-Jacobian product in x, where gradients are on.

    >>> from advbayes import Categorical
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> model = BayesianModel(net, Categorical())
    >>> thetas, x = torch.randn(5, model.num_params), torch.randn(2, 4)
    >>> (outputs, vjp), (plain, plain_vjp) = run(model, thetas, x), model.run(thetas, x)
    >>> torch.allclose(outputs, plain, atol=1e-5)
    True
    >>> torch.allclose(vjp(outputs), plain_vjp(outputs), rtol=1e-3, atol=1e-4)
    True
    """
    if torch.is_autocast_enabled(x.device.type):
        return model.run(thetas, x)
    if len(thetas) > 1 and len(x) and model.net not in _one_by_one and _fits_one_batch(model, x):
        try:
            return _as_one_batch(model, thetas, x)
        except Exception:  # whatever cannot be vectorised; what is wrong raises again below
            _one_by_one.add(model.net)
    if _is_thin(model, x) and torch.is_grad_enabled():
        return _with_thin_first_layer(model, thetas, x)
    return model.run(thetas, x)


def in_parts(
    work: Callable[[slice], _R], model: BayesianModel, thetas: Tensor, x: Tensor
) -> list[_R]:
    """The work on parts of a batch, on torch's threads: layers gain less from their own."""
    recycle_blocks()
    numbers = _NUMBERS if _is_convolutional(model) else 8 * _NUMBERS
    most = max(_ROWS, numbers // (max(1, math.prod(x.shape[1:])) * len(thetas)))
    # as equal parts as few as may be
    rows = math.ceil(len(x) / math.ceil(len(x) / most)) if len(x) else 1
    slices = [slice(start, min(start + rows, len(x))) for start in range(0, max(1, len(x)), rows)]
    all_threads = torch.get_num_threads()
    # The modes of torch are a thread's own. Its number of threads is also that of threads begun
    # after it, so threads of the caller's own are left alone.
    if (
        min(all_threads, len(slices)) == 1
        or x.device.type != "cpu"
        or threading.current_thread() is not threading.main_thread()
        or torch.is_autocast_enabled("cpu")
        or torch.is_inference_mode_enabled()
    ):
        return [work(part) for part in slices]
    with_gradients = torch.set_grad_enabled(torch.is_grad_enabled())
    with ThreadPoolExecutor(all_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            return list(pool.map(with_gradients(work), slices))
        finally:
            torch.set_num_threads(all_threads)


@cache
def recycle_blocks() -> None:
    """Free one block of 31 MB, once in a process: what `fit` and attacks do before they start.

    The GNU C library learns from it that blocks of this size come and go: it takes them from memory
    of its own from then on and keeps up to twice as much, where it would let every block return to
    the system and be mapped and cleared anew.
    """
    torch.empty(31 << 20, dtype=torch.uint8)  # never touched: it costs two system calls


def _fits_one_batch(model: BayesianModel, x: Tensor) -> bool:
    """Whether all parameters are matrices and vectors, or the images are small and few; and nobody
    looks at what passes through the layers."""
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.net.modules())
    is_small = x.ndim == 4 and len(x) * x.shape[2] * x.shape[3] <= _PIXELS
    return not hooked and (is_small or not _is_convolutional(model))


def _is_convolutional(model: BayesianModel) -> bool:
    return any(len(shape) > 2 for shape in model.shapes)


def _as_one_batch(model: BayesianModel, thetas: Tensor, x: Tensor) -> tuple[Tensor, Vjp]:
    leaf = x.detach().requires_grad_(torch.is_grad_enabled())
    outputs = torch.func.vmap(lambda theta: model.output(theta, leaf)[0])(thetas.detach())
    return outputs.detach(), lambda cotangent: vjp_of(outputs, leaf, cotangent)


# --- Images of one or two channels --------------------------------------------------------------


def _is_thin(model: BayesianModel, x: Tensor) -> bool:
    # products want channels_last
    return model.is_channels_last and x.ndim == 4 and 0 < x.shape[1] <= _THIN and len(x) > 0


def _with_thin_first_layer(model: BayesianModel, thetas: Tensor, x: Tensor) -> tuple[Tensor, Vjp]:
    """Theta by theta; gradients of the first layer's patches add up, and are put together once."""
    with _FirstConvolutions() as mode:
        outputs, vjp = model.run(thetas, model.laid_out(x))

    def with_patches(cotangent: Tensor) -> Tensor:
        total = vjp(cotangent)
        for key, patches in mode.patches.items():
            total += _folded(patches, x.shape, key)
        return total

    return outputs, with_patches


class _FirstConvolutions(TorchFunctionMode):
    """Begins the graph after the convolutions of x itself; gradients stay channels_last."""

    def __init__(self) -> None:
        super().__init__()
        # by kernel size and padding: gradients of the patches that a kernel sees, summed over the
        # thetas, (C k l, B H W)
        self.patches: dict[tuple[int, ...], Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RESHAPES and args and args[0].requires_grad and _is_channels_last(args[0]):
            # else a pooling before it copies its whole input
            args[0].register_hook(_in_channels_last)
        if func is not torch.conv2d or kwargs or len(args) != 7:
            return func(*args, **(kwargs or {}))
        x, weight, _, stride, padding, dilation, groups = args
        is_plain = (stride, dilation, groups) == ((1, 1), (1, 1), 1) and isinstance(padding, tuple)
        is_x_itself = x.is_leaf and x.requires_grad  # thetas are constants here
        if not is_plain or not is_x_itself or weight.requires_grad:
            return func(*args)
        return _GraphBegins.apply(func(x.detach(), *args[1:]), x, self.patches, weight, padding)  # type: ignore[no-untyped-call]


class _GraphBegins(torch.autograd.Function):
    """The identity, whose gradient goes to the patches and no further."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, *layer: Any) -> Tensor:
        ctx.layer = layer
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        patches, weight, padding = ctx.layer
        rows = gradient.permute(0, 2, 3, 1).reshape(-1, len(weight))  # a view in channels_last
        key, product = (*weight.shape[2:], *padding), (weight.reshape(len(weight), -1).T, rows.T)
        patches[key] = patches[key].addmm_(*product) if key in patches else torch.mm(*product)
        return None, None, None, None, None


def _is_channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)


def _in_channels_last(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous(memory_format=torch.channels_last)


def _folded(patches: Tensor, shape: torch.Size, key: tuple[int, ...]) -> Tensor:
    """Every pixel's sum over the patches that hold it, by a shifted addition for each position."""
    tall, wide, down, right = key
    batch, channels, height, width = shape
    rows, columns = height + 2 * down - tall + 1, width + 2 * right - wide + 1
    shares = patches.view(channels, tall, wide, batch, rows, columns)
    padded = patches.new_zeros(channels, batch, height + 2 * down, width + 2 * right)
    for i in range(tall):
        for j in range(wide):
            padded[:, :, i : i + rows, j : j + columns] += shares[:, i, j]
    return padded[:, :, down : down + height, right : right + width].transpose(0, 1)

"""p(y | x, theta) p(theta) from any `nn.Module`, with theta one flat vector (section 3.1, SM-6)."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from advbayes import checks
from advbayes.likelihoods import Likelihood

Vjp = Callable[[Tensor], Tensor]  # a cotangent of the outputs (S, B, O) -> the gradient in x
# theta cut into the network's tensors, then the likelihood's coordinates
Parts = tuple[Tensor, ...]
_RANDOM_IN_EVAL = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class BayesianModel:
    """Any network becomes p(y | x, theta) N(theta; 0, prior_scale^2 I); theta is every parameter.

    The network is copied and put in evaluation mode: theta is the only randomness, so dropout does
    nothing. Parameters with `requires_grad=False` stay constants. `prior_scale=math.inf` is the
    flat prior.

    >>> from advbayes import Categorical
    >>> model = BayesianModel(nn.Linear(4, 3), Categorical())
    >>> model.num_params, model.at(torch.zeros(15))(torch.ones(2, 4)).probs.shape
    (15, torch.Size([2, 3]))
    """

    def __init__(self, net: nn.Module, likelihood: Likelihood, prior_scale: float = 1.0) -> None:
        checks.instance("net", net, nn.Module, "a torch.nn.Module")
        if isinstance(likelihood, type) or not callable(getattr(likelihood, "log_prob", None)):
            raise checks.InputTypeError(
                "likelihood must be one such as Categorical() or Gaussian(0.5)", got=likelihood
            )
        self.prior_scale = check_prior_scale(prior_scale)
        _refuse_unfit_layers(net)
        self.likelihood = likelihood
        self.net = copy.deepcopy(net).eval()
        trainable = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        if not trainable:
            raise checks.InputError("net must have at least one trainable parameter, got none")
        first = next(iter(trainable.values()))
        for name, p in trainable.items():
            if p.dtype != first.dtype or p.device != first.device:
                raise checks.InputTypeError(
                    f"net must keep its parameters in one dtype and on one device, got "
                    f"{first.dtype} on {first.device} and {p.dtype} on {p.device} ({name})"
                )
        self.names = tuple(trainable)
        self.shapes = tuple(p.shape for p in trainable.values())
        self._sizes = [p.numel() for p in trainable.values()] + [likelihood.num_extra()]
        self.num_params = sum(self._sizes)
        self.dtype, self.device = first.dtype, first.device
        self._originals = list(trainable.values())
        for p in self._originals:
            p.requires_grad_(False)
        self._trees = _Trees(self.net, self._originals)
        layers = list(map(type, self.net.modules()))
        # whether the net runs on images in that order; GroupNorm is ten times slower in it
        self.is_channels_last = nn.Conv2d in layers and nn.GroupNorm not in layers

    def __repr__(self) -> str:
        return (
            f"BayesianModel({type(self.net).__name__}, {self.likelihood}, "
            f"prior_scale={self.prior_scale:g}, num_params={self.num_params})"
        )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> BayesianModel:
        """The same model with its net on another device or in another dtype; posteriors are
        modules and move by their own `to`.

        >>> from advbayes import Categorical
        >>> BayesianModel(nn.Linear(4, 3), Categorical()).to(dtype=torch.float64).dtype
        torch.float64
        """
        net = copy.deepcopy(self.net).to(device=device, dtype=dtype)
        for name, p in net.named_parameters():
            p.requires_grad_(name in self.names)
        return BayesianModel(net, self.likelihood, self.prior_scale)

    def initial_theta(self) -> Tensor:
        """The net's own weights and the likelihood's initial scale: where posteriors start."""
        return self.theta_of(self.net)

    def theta_of(self, net: nn.Module) -> Tensor:
        """The weights of a (trained) network of the same shape as a theta, for a warm start."""
        parameters = dict(net.named_parameters())
        parts = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name not in parameters or parameters[name].shape != shape:
                came = tuple(parameters[name].shape) if name in parameters else "no such parameter"
                raise checks.InputError(
                    f"net must have a parameter {name!r} of shape {tuple(shape)}, got {came}"
                )
            parts.append(parameters[name].detach().reshape(-1).to(self.device, self.dtype))
        extra = self.likelihood.initial_extra()
        return torch.cat([*parts, torch.tensor(extra, dtype=self.dtype, device=self.device)])

    def parts(self, theta: Tensor) -> Parts:
        """Views of theta in the shapes of the net's parameters, then the likelihood's part.

        Every method that takes one theta takes its parts as well: cut once, used many times.
        """
        *flat, extra = theta.split_with_sizes(self._sizes)
        return (*[v.view(s) for v, s in zip(flat, self.shapes, strict=True)], extra)

    def output(
        self,
        theta: Tensor | Parts,  # (P,)
        x: Tensor,  # (B, *event)
    ) -> tuple[Tensor, Tensor]:  # (B, O), (num_extra,)
        """The network's raw output at one theta, and the likelihood's coordinates of theta.

        Under `torch.autocast` the layers compute in the lower precision, and the output is rounded
        no further: losses and probabilities of bfloat16 would stand still near 0 and 1.
        """
        parts = self.parts(theta) if isinstance(theta, Tensor) else theta
        output = self._trees.run(parts, self.laid_out(x))
        output = output.unsqueeze(-1) if output.ndim == 1 else output
        if output.dtype != self.dtype and torch.is_autocast_enabled(x.device.type):
            output = output.to(self.dtype)
        return output, parts[-1]

    def laid_out(self, x: Tensor) -> Tensor:
        """x in the memory order in which the net is fastest."""
        return _channels_last(x) if self.is_channels_last and x.ndim == 4 else x

    def run(
        self,
        thetas: Tensor,  # (S, P), constants
        x: Tensor,  # (B, *event)
    ) -> tuple[Tensor, Vjp]:  # (S, B, O)
        """Raw outputs at each theta, and their vector-Jacobian product in x if gradients are on.

        This is the definition of a pass through many thetas, for any net; `advbayes.accelerated`
        has faster ones. Each theta has a graph of its own, freed once its gradient is added.
        """
        leaf = x.detach().requires_grad_(torch.is_grad_enabled())
        each = [self.output(theta, leaf)[0] for theta in thetas.detach()]

        def vjp(cotangent: Tensor) -> Tensor:
            total = torch.zeros_like(leaf)
            for output, of_theta in zip(each, cotangent, strict=True):
                total += vjp_of(output, leaf, of_theta)
            return total

        return torch.stack([output.detach() for output in each]), vjp

    def log_likelihood(
        self,
        theta: Tensor | Parts,  # (P,)
        x: Tensor,  # (B, *event)
        y: Tensor,  # (B,) or (B, D)
    ) -> Tensor:  # (B,)
        """log p(y | x, theta), without building a Distribution."""
        output, extra = self.output(theta, x)
        return self.likelihood.log_prob(output, y, extra)

    def at(self, theta: Tensor | Parts) -> _AtTheta:
        """The Predictor p(y | x, theta)."""
        if not isinstance(theta, Tensor):
            return _AtTheta(self, theta)
        self._check_theta("theta", theta, 1)
        return _AtTheta(self, self.parts(theta))

    def predictions(
        self,
        thetas: Tensor,  # (S, P)
        outputs: Tensor,  # (S, B, O)
    ) -> Distribution:
        """p(y | x, theta_s) of batch shape (S, B), from the network's outputs at each theta."""
        return self.likelihood(outputs, thetas[:, self.num_params - self._sizes[-1] :])

    def at_each(self, thetas: Tensor) -> _AtEachTheta:
        """x -> the predictions of each theta, a Distribution of batch shape (S, B)."""
        self._check_theta("thetas", thetas, 2)
        return _AtEachTheta(self, thetas)

    def _check_theta(self, name: str, theta: Tensor, ndim: int) -> None:
        wanted = f"({self.num_params},)" if ndim == 1 else f"(S, {self.num_params})"
        if (
            not isinstance(theta, Tensor)
            or theta.ndim != ndim
            or theta.shape[-1] != self.num_params
            or not theta.numel()
        ):
            raise checks.InputError(
                f"{name} must be a tensor of shape {wanted} for this model", got=theta
            )
        self._check_kind(name, theta)

    def _check_input(self, x: Any) -> None:
        if not isinstance(x, Tensor) or x.ndim < 2:
            raise checks.InputTypeError("x must be a tensor of shape (B, *event)", got=x)
        self._check_kind("x", x)

    def _check_kind(self, name: str, value: Tensor) -> None:
        if value.dtype != self.dtype or value.device != self.device:
            wanted = f"{self.dtype} on {self.device} as the net"
            raise checks.InputTypeError(f"{name} must be {wanted}", got=value)


def check_prior_scale(prior_scale: float) -> float:
    """Positive; infinite for the flat prior."""
    if prior_scale == math.inf:
        return math.inf
    return checks.number("prior_scale", prior_scale, low=0, open_low=True)


class _Trees:
    """Runs a net at given parameters, each pass under way in a module tree of its own.

    `net` itself is never touched. Its copies share its tensors, buffers and hooks, so what is
    registered on it later is seen; a copy is made anew where the tree or an attribute has changed
    since. Parameters hang in a copy until the pass is over, and in modules with a forward of their
    own until its graph is gone: `torch.utils.checkpoint` runs them again.
    """

    def __init__(self, net: nn.Module, parameters: Sequence[Tensor]) -> None:
        self.net, self.parameters = net, list(parameters)
        self._idle: list[_Tree] = []
        # for nets that cannot be copied: one pass at a time, in the net itself
        self._lock = threading.RLock()
        homes = {type(module).__module__ for module in net.modules()}
        self._may_recompute = not all(home.startswith("torch.nn.") for home in homes)

    def __getstate__(self) -> tuple[nn.Module, list[Tensor]]:
        return self.net, self.parameters

    def __setstate__(self, state: tuple[nn.Module, list[Tensor]]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def run(self, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        tree = self._tree()
        output: Tensor
        if tree is None:
            with self._lock:
                tree = _Tree(self.net, self.net, self.parameters)
                try:
                    tree.hang(parameters)
                    output = self.net(x)
                    return output
                finally:
                    tree.hang(self.parameters)
        lease = _Lease(self._idle, tree)
        tree.hang(parameters)
        output = tree.net(x)
        if self._may_recompute and output.grad_fn is not None:
            notes: Any = output.grad_fn.metadata  # a property, unlike its annotation
            notes["advbayes"] = lease
        return output

    def _tree(self) -> _Tree | None:
        """An idle copy, or a new one; None where the net cannot be copied."""
        while self._idle:
            try:
                tree = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if tree.is_current():
                return tree
        memo: dict[int, Any] = {}
        for module in self.net.modules():
            shared = (
                v
                for k, v in vars(module).items()
                if k == "_buffers" or "_hooks" in k or isinstance(v, Tensor)
            )
            memo.update((id(value), value) for value in (*shared, *module._parameters.values()))
        try:
            copied = copy.deepcopy(self.net, memo)
        except Exception:  # whatever a module's own state may raise
            return None
        apart = set(map(id, self.net.modules())).isdisjoint(map(id, copied.modules()))
        return _Tree(copied, self.net, self.parameters) if apart else None


class _Tree:
    """A module tree, where (tied) parameters hang in it, and what it was copied from."""

    def __init__(self, net: nn.Module, source: nn.Module, parameters: Sequence[Tensor]) -> None:
        self.net, self.parameters = net, parameters
        self._slots = [
            [
                (m._parameters, key)
                for m in net.modules()
                for key, here in m._parameters.items()
                if here is p
            ]
            for p in parameters
        ]
        self._source = [(m, dict(vars(m)), dict(m._modules)) for m in source.modules()]

    def is_current(self) -> bool:
        """Whether the source still has the modules and attributes that were copied."""
        try:
            return all(
                vars(m) == attributes and m._modules == children
                for m, attributes, children in self._source
            )
        except (RuntimeError, ValueError):  # of tensors and arrays, which have no truth value
            return False

    def hang(self, parameters: Sequence[Tensor]) -> None:
        for slots, tensor in zip(self._slots, parameters, strict=False):
            for holder, key in slots:
                holder[key] = tensor  # type: ignore[assignment]


class _Lease:
    """The use of a tree, which is idle again once nobody holds the lease."""

    def __init__(self, idle: list[_Tree], tree: _Tree) -> None:
        self.idle, self.tree = idle, tree

    def __del__(self) -> None:
        self.tree.hang(self.tree.parameters)
        self.idle.append(self.tree)


class _AtTheta:
    """p(y | x, theta) at one theta."""

    def __init__(self, model: BayesianModel, parts: Parts) -> None:
        self.model, self.parts = model, parts

    def __call__(self, x: Tensor) -> Distribution:
        self.model._check_input(x)
        return self.model.likelihood(*self.model.output(self.parts, x))


class _AtEachTheta:
    """p(y | x, theta_s) at each of S thetas."""

    def __init__(self, model: BayesianModel, thetas: Tensor) -> None:
        self.model, self.thetas = model, thetas

    def __call__(self, x: Tensor) -> Distribution:
        self.model._check_input(x)
        outputs = torch.stack([self.model.output(theta, x)[0] for theta in self.thetas])
        return self.model.predictions(self.thetas, outputs)


def vjp_of(
    output: Tensor,
    x: Tensor,  # a leaf
    cotangent: Tensor,  # as output
) -> Tensor:  # as x
    """The vector-Jacobian product by autograd; zero where the output does not depend on x."""
    if not output.requires_grad:
        return torch.zeros_like(x)
    (gradient,) = torch.autograd.grad(output, x, cotangent, materialize_grads=True)
    return gradient


def _channels_last(
    x: Tensor,  # (B, C, H, W)
) -> Tensor:
    """x with its channels innermost (itself where they are): convolutions run 1.5 times faster.
    With one channel that is a matter of strides alone, which `contiguous(memory_format=...)` does
    not touch and the library then takes for the other order."""
    if x.shape[1] == 1 and not (x.is_contiguous() and x.stride(1) == 1):
        return x.reshape(len(x), *x.shape[2:], 1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)


def _refuse_unfit_layers(net: nn.Module) -> None:
    for name, layer in net.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) or (
            isinstance(layer, _NormBase) and layer.track_running_stats
        ):
            raise checks.InputError(
                f"net must be free of batch statistics, got layer {name!r}: {layer}; running "
                f"statistics belong to one theta and "
                "a posterior has many. Convert it first: advbayes.networks.with_group_norm(net)"
            )
        if any(map(is_lazy, layer.parameters(recurse=False))):
            raise checks.InputError(
                f"net must know its shapes, got the lazy layer {name!r}: {layer}; run the net "
                f"once on an input first"
            )
        if isinstance(layer, _RANDOM_IN_EVAL):
            raise checks.InputError(
                f"net must be a function of x and theta alone, got layer {name!r}: {layer}, which "
                f"draws at random"
            )

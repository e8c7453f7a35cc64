"""Predictive distributions over theta: fixed thetas, or fresh ones at every call (section 3.2, Eq. 9)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import checks
from advbayes.attacks import for_rows, success
from advbayes.attacks.gradients import value_of
from advbayes.likelihoods import mix
from advbayes.model import BayesianModel
from advbayes.performance import recycle_blocks
from advbayes.stacked import Stacked
from advbayes.types import Loss, Posterior

# Rows x thetas x input size whose graphs are held at once: the activations then stay near the cache.
_NUMBERS = 1 << 19
_THETAS = 32  # as many share a graph; with more, forward passes are repeated instead
_ROWS = 16  # smaller parts of a batch are not worth a call

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, eq=False)
class PosteriorPredictive:
    """E_theta p(y | x, theta) over given thetas: the mixture of their predictions (Eq. 9).

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical, MeanField
    >>> model = BayesianModel(nn.Linear(4, 3), Categorical())
    >>> PosteriorPredictive(model, MeanField(model).sample(20))(torch.ones(2, 4)).probs.shape
    torch.Size([2, 3])
    """

    model: BayesianModel
    thetas: Tensor  # (S, P)

    def __post_init__(self) -> None:
        self.model._check_theta("thetas", self.thetas, 2)
        checks.finite("thetas", self.thetas)
        object.__setattr__(self, "thetas", self.thetas.detach().clone())  # nobody changes them from outside

    @cached_property
    def _blocks(self) -> list[Stacked]:
        return _blocks(self.model, self.thetas)

    def __call__(self, x: Tensor) -> Distribution:
        return _predict(self._blocks, x)

    def loss_and_gradient(self, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of the mixture, what it breaks and its input gradient, in memory that does not grow with S."""
        return _loss_and_gradient(self._blocks, loss, x, y)


@dataclass(frozen=True, eq=False)
class FreshPredictive:
    """The posterior predictive with `num` thetas drawn anew at every call: attacks through it see the expectation.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical, MeanField
    >>> model = BayesianModel(nn.Linear(4, 3), Categorical())
    >>> predict = FreshPredictive(model, MeanField(model, init_scale=0.5), 5, generator=torch.Generator().manual_seed(0))
    >>> torch.equal(predict(torch.ones(1, 4)).probs, predict(torch.ones(1, 4)).probs)
    False
    """

    model: BayesianModel
    posterior: Posterior
    num: int
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        checks.count("num", self.num)
        num_params = getattr(self.posterior, "num_params", None)
        if isinstance(self.posterior, type) or not isinstance(num_params, int):
            raise TypeError(f"posterior must be a posterior such as MeanField(model), got {checks.describe(self.posterior)}")
        if num_params != self.model.num_params:
            raise ValueError(f"posterior must be over the model's {self.model.num_params} parameters, got one over {num_params}")

    def _thetas(self) -> Tensor:
        return self.posterior.sample(self.num, generator=self.generator).detach()

    def __call__(self, x: Tensor) -> Distribution:
        return _predict(_blocks(self.model, self._thetas()), x)

    def loss_and_gradient(self, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `PosteriorPredictive`'s, at one fresh draw of the thetas for the whole batch."""
        return _loss_and_gradient(_blocks(self.model, self._thetas()), loss, x, y)


def _blocks(model: BayesianModel, thetas: Tensor) -> list[Stacked]:
    """The thetas in groups whose graphs may be held at once."""
    return [Stacked(model, some) for some in torch.split(thetas, _THETAS)]


def _mixture(blocks: list[Stacked], outputs: Tensor) -> Distribution:
    extra = blocks[0].extra if len(blocks) == 1 else torch.cat([block.extra for block in blocks])
    return mix(blocks[0].model.likelihood(outputs, extra))


def _predict(blocks: list[Stacked], x: Tensor) -> Distribution:
    """The mixture; the fast way has one gradient at most, so a caller who wants a graph gets the plain one."""
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        return mix(blocks[0].model.at_each(torch.cat([block.thetas for block in blocks]))(x))
    parts = torch.split(x, _rows(blocks, x)) if isinstance(x, Tensor) and len(x) else (x,)
    return _mixture(blocks, torch.cat(_for_each(blocks, lambda part: torch.cat([block(part) for block in blocks]), parts), dim=1))


def _rows(blocks: list[Stacked], x: Tensor) -> int:
    """How much of a batch is worked on at once: as equal parts as few as may be."""
    most = max(_ROWS, _NUMBERS // (max(1, x[0].numel()) * len(blocks[0].thetas)))
    return math.ceil(len(x) / math.ceil(len(x) / most))


def _for_each(blocks: list[Stacked], work: Callable[[_T], _R], parts: Sequence[_T]) -> list[_R]:
    """The work on each part of a batch, side by side on torch's threads: small layers gain little from threads of their own."""
    recycle_blocks()
    num = min(torch.get_num_threads(), len(parts))
    if num == 1 or not all(block.is_plain for block in blocks) or blocks[0].thetas.device.type != "cpu":
        return [work(part) for part in parts]
    all_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            return list(pool.map(work, parts))
        finally:
            torch.set_num_threads(all_threads)  # a thread's setting is also that of the threads begun after it


def _loss_and_gradient(blocks: list[Stacked], loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Exact for any loss of the mixture, part by part of the batch."""
    if not len(x):
        return x.new_zeros(0), torch.zeros(0, dtype=torch.bool, device=x.device), torch.zeros_like(x)
    rows = _rows(blocks, x)
    slices = [slice(start, start + rows) for start in range(0, len(x), rows)]
    parts = _for_each(blocks, lambda part: _part(blocks, for_rows(loss, part), x[part], y[part]), slices)
    if len(parts) == 1:
        return parts[0]
    values, broken, gradients = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(broken), torch.cat(gradients)


def _part(blocks: list[Stacked], loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss' gradient in the S outputs (a few numbers each), pulled back through the net; with many thetas one block of
    them at a time, whose way forward is then gone again."""
    x = x.detach()
    if len(blocks) == 1:
        outputs, pull = blocks[0].traced(x)
    else:
        outputs = torch.cat([block(x) for block in blocks])  # (S, B, O)
    with torch.enable_grad():
        prediction = _mixture(blocks, outputs.requires_grad_())
        value = value_of(loss, prediction, y)
        back = _gradient(value, outputs)
    if len(blocks) == 1:
        gradient = pull(back)
    else:
        gradient = torch.zeros_like(x)
        for block, part in zip(blocks, torch.split(back, _THETAS), strict=True):
            gradient += block.traced(x)[1](part)
    with torch.no_grad():
        return value.detach(), success(loss, prediction, y), gradient


def _gradient(value: Tensor, at: Tensor) -> Tensor:
    """d sum(value) / d at, zero where nothing depends on it."""
    if not value.requires_grad:
        return torch.zeros_like(at)
    (gradient,) = torch.autograd.grad(value.sum(), at, allow_unused=True)
    return torch.zeros_like(at) if gradient is None else gradient

"""Predictive distributions over theta: fixed thetas, or fresh ones at every call (Eq. 9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import checks
from advbayes.attacks import for_rows, success
from advbayes.attacks.gradients import value_of
from advbayes.likelihoods import mix
from advbayes.model import BayesianModel, Vjp, vjp_of
from advbayes.posteriors import Posterior, check_over
from advbayes.types import Loss

try:
    from advbayes import accelerated
except ImportError:  # a package without it is slower, and does the same
    accelerated = None  # type: ignore[assignment]

R = TypeVar("R")
_THETAS = 32  # as many share a graph; with more, forward passes are repeated instead


@dataclass(frozen=True, eq=False)
class PosteriorPredictive:
    """E_theta p(y | x, theta) over fixed thetas: the mixture of their predictions (Eq. 9).

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
        # nobody changes them from outside
        object.__setattr__(self, "thetas", self.thetas.detach().clone())

    def __call__(self, x: Tensor) -> Distribution:
        return _predict(self.model, self.thetas, x)

    def loss_and_gradient(self, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mixture's loss, what it breaks and its input gradient; memory is constant in S."""
        return _loss_and_gradient(self.model, self.thetas, loss, x, y)


@dataclass(frozen=True, eq=False)
class FreshPredictive:
    """The predictive with `num` thetas drawn at each call: attacks see the expectation.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical, MeanField
    >>> model = BayesianModel(nn.Linear(4, 3), Categorical())
    >>> seeded = torch.Generator().manual_seed(0)
    >>> predict = FreshPredictive(model, MeanField(model, init_scale=0.5), 5, generator=seeded)
    >>> torch.equal(predict(torch.ones(1, 4)).probs, predict(torch.ones(1, 4)).probs)
    False
    """

    model: BayesianModel
    posterior: Posterior
    num: int
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        checks.count("num", self.num)
        check_over(self.model, self.posterior)

    def _thetas(self) -> Tensor:
        return self.posterior.sample(self.num, generator=self.generator).detach()

    def __call__(self, x: Tensor) -> Distribution:
        return _predict(self.model, self._thetas(), x)

    def loss_and_gradient(self, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `PosteriorPredictive`'s, at one fresh draw of the thetas for the whole batch."""
        return _loss_and_gradient(self.model, self._thetas(), loss, x, y)


def _predict(model: BayesianModel, thetas: Tensor, x: Tensor) -> Distribution:
    """The mixture, differentiable in x for a caller who asks for it."""
    model._check_input(x)
    if x.requires_grad and torch.is_grad_enabled():
        return mix(model.at_each(thetas)(x))
    with torch.no_grad():
        parts = _in_parts(lambda rows: _outputs(model, thetas, x[rows]), model, thetas, x)
        return mix(model.predictions(thetas, torch.cat(parts, dim=1)))


def _loss_and_gradient(
    model: BayesianModel, thetas: Tensor, loss: Loss, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Exact for any loss of the mixture."""
    model._check_input(x)

    def part(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        return _part(model, thetas, for_rows(loss, rows), x[rows].detach(), y[rows])

    parts = _in_parts(part, model, thetas, x)
    if len(parts) == 1:
        return parts[0]
    values, broken, gradients = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(broken), torch.cat(gradients)


def _part(
    model: BayesianModel, thetas: Tensor, loss: Loss, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss' gradient in the S outputs (a few numbers each) is the cotangent of their vjp. With
    many thetas one block of them is run at a time, and run again for its vjp."""
    blocks = torch.split(thetas, _THETAS)
    with torch.enable_grad():
        if len(blocks) == 1:
            outputs, vjp = _run(model, thetas, x)
        else:
            with torch.no_grad():
                outputs = _outputs(model, thetas, x)
        leaf = outputs.requires_grad_()  # (S, B, O)
        prediction = mix(model.predictions(thetas, leaf))
        value = value_of(loss, prediction, y)
        cotangent = vjp_of(value, leaf, torch.ones_like(value))
        if len(blocks) == 1:
            gradient = vjp(cotangent)
        else:
            gradient = torch.zeros_like(x)
            for block, of_block in zip(blocks, torch.split(cotangent, _THETAS), strict=True):
                gradient += _run(model, block, x)[1](of_block)
    with torch.no_grad():
        return value.detach(), success(loss, prediction, y), gradient


def _outputs(model: BayesianModel, thetas: Tensor, x: Tensor) -> Tensor:  # (S, B, O)
    return torch.cat([_run(model, block, x)[0] for block in torch.split(thetas, _THETAS)])


def _run(model: BayesianModel, thetas: Tensor, x: Tensor) -> tuple[Tensor, Vjp]:
    return accelerated.run(model, thetas, x) if _is_accelerated() else model.run(thetas, x)


def _in_parts(
    work: Callable[[slice], R], model: BayesianModel, thetas: Tensor, x: Tensor
) -> list[R]:
    """The work on a batch, in parts where that is faster."""
    if _is_accelerated():
        return accelerated.in_parts(work, model, thetas, x)
    return [work(slice(0, len(x)))]


def _is_accelerated() -> bool:
    return accelerated is not None and accelerated.is_enabled()

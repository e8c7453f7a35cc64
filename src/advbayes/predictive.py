"""Predictive distributions over theta: fixed thetas, or fresh ones at every call (section 3.2, Eq. 9)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import checks
from advbayes.likelihoods import mix
from advbayes.model import BayesianModel
from advbayes.types import Posterior


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
        object.__setattr__(self, "thetas", self.thetas.detach())

    def __call__(self, x: Tensor) -> Distribution:
        return mix(self.model.at_each(self.thetas)(x))


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

    def __call__(self, x: Tensor) -> Distribution:
        return mix(self.model.at_each(self.posterior.sample(self.num, generator=self.generator))(x))

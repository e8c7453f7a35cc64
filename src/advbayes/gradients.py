"""One stochastic gradient of -bound / N in the posterior's parameters: what `fit` takes its steps along.

Four stages: theta from the posterior, x' from the channel, the gradient in theta, the chain rule from theta to the posterior.
`advbayes.steps` compiles as many of them as can be to one native program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from advbayes.model import BayesianModel
from advbayes.objectives import ChannelELBO
from advbayes.posteriors import Posterior
from advbayes.types import Channel


class StepGradient(NamedTuple):
    """The bound's parts for the whole data set; the gradient of -bound / N in each trainable parameter, and its norm."""

    log_likelihood: float
    kl: float
    penalty: float
    norm: float
    gradients: list[Tensor]


Gradient = Callable[[Tensor, Tensor, torch.Generator], StepGradient]  # (x, y, generator), seeded for the step


def eager_gradient(model: BayesianModel, posterior: Posterior, channel: Channel, objective: ChannelELBO) -> Gradient:
    """The four stages one by one.

    >>> from torch import nn
    >>> from advbayes import Categorical, MeanField, Noise
    >>> model = BayesianModel(nn.Linear(2, 2), Categorical())
    >>> gradient = eager_gradient(model, MeanField(model), Noise(0.1), ChannelELBO(4))
    >>> gradient(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long), torch.Generator()).gradients[0].shape
    torch.Size([6])
    """
    # Thetas live in one buffer whose parts are cut once: as constants for the attack, as leaves for the gradient.
    thetas = torch.empty(objective.num_theta, model.num_params, dtype=model.dtype, device=model.device)
    constants = [model.parts(theta) for theta in thetas]
    leaves = [tuple(part.detach().requires_grad_() for part in parts) for parts in constants]
    kl_weight = objective.kl_weight / objective.num_data

    def gradient(x: Tensor, y: Tensor, generator: torch.Generator) -> StepGradient:
        noise = posterior.noise(objective.num_theta, generator=generator)
        with torch.no_grad():
            thetas.copy_(posterior.at(noise))
        if objective.through:
            drawn = thetas.clone().requires_grad_()
            x_adv = objective.corrupt(model, drawn, channel, x, y, generator=generator)
            found = objective.theta_gradient(model, drawn, x, x_adv, y)
        else:
            x_adv = objective.corrupt(model, constants, channel, x, y, generator=generator)
            found = objective.theta_gradient(model, leaves, x, x_adv, y)
        kl, gradients = posterior.pull_back(noise, found.gradient, model.prior_scale, kl_weight)
        return StepGradient(found.log_likelihood, kl, found.penalty, norm(gradients), gradients)

    return gradient


def norm(gradients: list[Tensor]) -> float:
    """Of all of them together.

    >>> norm([torch.tensor([3.0]), torch.tensor([4.0])])
    5.0
    """
    return math.sqrt(sum(float(flat.dot(flat)) for flat in (g.reshape(-1) for g in gradients)))

"""One stochastic gradient of -bound / N in the posterior's parameters: what `fit` takes its steps along.

Four stages: theta from the posterior, x' from the channel, the gradient in theta, the chain rule from theta to the posterior.
`eager_gradient` runs them one by one; `CompiledGradient` runs as many of them as can be as one native program, on the same
random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from advbayes.channels import Draws, draws, sample_at
from advbayes.model import BayesianModel
from advbayes.objectives import ChannelELBO
from advbayes.posteriors import MeanField, _Posterior, gaussian_pull_back
from advbayes.tracing import Compiled, compiled
from advbayes.types import Channel


class StepGradient(NamedTuple):
    """The bound's parts for the whole data set; the gradient of -bound / N in each trainable parameter, and its norm."""

    log_likelihood: float
    kl: float
    penalty: float
    norm: float
    gradients: list[Tensor]


Gradient = Callable[[Tensor, Tensor, torch.Generator], StepGradient]  # (x, y, generator), seeded for the step


def eager_gradient(model: BayesianModel, posterior: _Posterior, channel: Channel, objective: ChannelELBO) -> Gradient:
    """The four stages one by one.

    >>> from torch import nn
    >>> from advbayes import Categorical, Noise
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
        return StepGradient(found.log_likelihood, kl, found.penalty, _norm(gradients), gradients)

    return gradient


class CompiledGradient:
    """The same, compiled at the first batch of each shape.

    Compiled are always the gradient in theta; the channel where its randomness can be drawn beforehand (noise, one-step
    attacks, stratified mixtures of them), else its samples come from eager code; theta and the chain rule for `MeanField`.

    >>> from torch import nn
    >>> from advbayes import Categorical, Noise
    >>> model = BayesianModel(nn.Linear(2, 2), Categorical())
    >>> CompiledGradient(model, MeanField(model), Noise(0.1), ChannelELBO(4, through=True))
    Traceback (most recent call last):
    ...
    ValueError: compile must be False for an objective with through=True: second derivatives run in eager code alone
    """

    def __init__(self, model: BayesianModel, posterior: _Posterior, channel: Channel, objective: ChannelELBO) -> None:
        if objective.through:
            raise ValueError(
                "compile must be False for an objective with through=True: second derivatives run in eager code alone"
            )
        self.model, self.posterior, self.channel, self.objective = model, posterior, channel, objective
        self.kl_weight = objective.kl_weight / objective.num_data
        self.programs: dict[tuple[torch.Size, torch.Size], Compiled] = {}
        self.gaussian = type(posterior) is MeanField and posterior.mu.requires_grad and posterior.rho.requires_grad
        if isinstance(posterior, MeanField) and self.gaussian:
            posterior.kl(model.prior_scale)  # refuses a prior without a KL
            self.mean_field = posterior.mu.detach(), posterior.rho.detach()  # the same memory, which training changes in place

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator) -> StepGradient:
        objective, posterior = self.objective, self.posterior
        noise = posterior.noise(objective.num_theta, generator=generator)
        given = self._draw(x, generator)
        if self.gaussian:
            source: tuple[Tensor, ...] = (*self.mean_field, noise)
        else:
            with torch.no_grad():
                source = (posterior.at(noise).clone(),)
        if given is None:
            thetas = source[0] if not self.gaussian else posterior.at(noise).detach()
            inputs: tuple[Tensor, ...] = (objective.corrupt(self.model, thetas, self.channel, x, y, generator=generator),)
        else:
            inputs = tuple(tensor for one in given for tensor in one if tensor.numel())
        key = (x.shape, y.shape)
        if key not in self.programs:
            empty = [] if given is None else [tensor.new_empty(0) if not tensor.numel() else None for tensor in given[0]]
            function = self._function(len(source), empty)
            what = f"a step of {self.model} with a channel of type {type(self.channel).__name__}"
            self.programs[key] = compiled(function, (*source, x, y, *inputs), what)
        numbers, *gradients = self.programs[key](*source, x, y, *inputs)
        log_likelihood, penalty, kl, squares = numbers.tolist()
        if not self.gaussian:
            kl, gradients = posterior.pull_back(noise, gradients[0], self.model.prior_scale, self.kl_weight)
            return StepGradient(log_likelihood, kl, penalty, _norm(gradients), gradients)
        return StepGradient(log_likelihood, kl, penalty, math.sqrt(squares), gradients)

    def _draw(self, x: Tensor, generator: torch.Generator) -> list[Draws] | None:
        """The channel's randomness for each theta; None where it cannot be drawn beforehand."""
        if self.objective.num_channel > 1:
            return None
        drawn = [draws(self.channel, x, generator=generator) for _ in range(self.objective.num_theta)]
        found = [one for one in drawn if one is not None]
        return found if len(found) == len(drawn) else None

    def _function(self, num_source: int, empty: list[Tensor | None]) -> Callable[..., tuple[Tensor, ...]]:
        """(posterior's tensors and noise or thetas), x, y, (channel's draws or samples) -> numbers, gradients.

        `empty` has the fields of Draws, those that are not passed because they hold nothing; none where samples come in.
        """
        passed = sum(field is None for field in empty)

        def step(*arguments: Tensor) -> tuple[Tensor, ...]:
            source, (x, y), inputs = arguments[:num_source], arguments[num_source : num_source + 2], arguments[num_source + 2 :]
            if self.gaussian:
                mu, rho, noise = source
                scale = functional.softplus(rho)
                thetas = torch.addcmul(mu, scale, noise)
            else:
                (thetas,) = source
            totals, penalties, rows = [], [], []
            for s, theta in enumerate(thetas):
                if empty:
                    given = iter(inputs[passed * s : passed * (s + 1)])
                    drawn = Draws(*(next(given) if field is None else field for field in empty))
                    total, penalty, row = self._one_theta(theta, x, y, drawn)
                else:
                    total, penalty, row = self._gradient_at(theta, x, y, inputs[0][s])
                totals.append(total)
                penalties.append(penalty)
                rows.append(row)
            gradient = torch.stack(rows)
            scale_up = self.objective.num_data / (len(x) * len(thetas))
            sums = [scale_up * torch.stack(parts).sum().double() for parts in (totals, penalties)]
            if not self.gaussian:
                zero = torch.zeros_like(sums[0])
                return torch.stack([*sums, zero, zero]), gradient
            of_mu, of_rho = gaussian_pull_back(mu, rho, scale, noise, gradient, self.model.prior_scale, self.kl_weight)
            # Compiled sums run in one register: in float64, or 20,000 terms lose five digits.
            spread = (mu.square() + scale.square()) * (0.5 / self.model.prior_scale**2) - scale.log()
            kl = spread.sum(dtype=torch.float64) + len(mu) * (math.log(self.model.prior_scale) - 0.5)
            squares = (of_mu.square() + of_rho.square()).sum(dtype=torch.float64)
            return torch.stack([*sums, kl, squares]), of_mu, of_rho

        return step

    def _one_theta(self, theta: Tensor, x: Tensor, y: Tensor, drawn: Draws) -> tuple[Tensor, Tensor, Tensor]:
        if drawn.order.numel():  # the bound is a sum over examples: their order does not matter
            x, y = x[drawn.order], y[drawn.order]
        x_adv = sample_at(self.channel, drawn, self.model.at(self.model.parts(theta)), x, y)
        return self._gradient_at(theta, x, y, x_adv.unsqueeze(0))

    def _gradient_at(self, theta: Tensor, x: Tensor, y: Tensor, x_adv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        objective = self.objective
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            log_p, omega = objective._score_all(self.model, [self.model.parts(leaf)], x, x_adv.unsqueeze(0), y)
            total, penalty = objective.reduce(log_p).sum(), omega.sum() / omega.shape[1]
            (row,) = torch.autograd.grad((penalty - total) / (len(x) * objective.num_theta), leaf)
        return total.detach(), penalty.detach(), row


def _norm(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(float(flat.dot(flat)) for flat in (g.reshape(-1) for g in gradients)))

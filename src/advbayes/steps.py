"""One step of `fit`: a gradient, and Adam along it where everything is finite.

`eager_step` does one after the other. `CompiledStep` runs as much of a step as can be as one native program, from gathering the
batch to Adam, on the same random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from advbayes.adam import Adam, updated
from advbayes.batches import Batch
from advbayes.channels import Draws, draws, sample_at
from advbayes.gradients import eager_gradient, norm
from advbayes.model import BayesianModel
from advbayes.objectives import ChannelELBO, _AttackedTheta
from advbayes.posteriors import MeanField, Posterior, gaussian_pull_back
from advbayes.tracing import Compiled, compiled
from advbayes.types import Channel


class Taken(NamedTuple):
    """The bound and its parts for the whole data set, and the norm of the gradient of -bound / N."""

    bound: float
    log_likelihood: float
    kl: float
    penalty: float
    norm: float

    def is_finite(self) -> bool:
        """Whether the step was taken: one that is not finite leaves posterior and optimiser as they were."""
        return math.isfinite(self.bound) and math.isfinite(self.norm)


Step = Callable[[Batch, torch.Generator, float], Taken]  # (batch, generator seeded for the step, learning rate)


def eager_step(model: BayesianModel, posterior: Posterior, channel: Channel, objective: ChannelELBO, adam: Adam) -> Step:
    """The gradient, then Adam.

    >>> from torch import nn
    >>> from advbayes import Categorical, Noise
    >>> model = BayesianModel(nn.Linear(2, 2), Categorical())
    >>> posterior = MeanField(model)
    >>> step = eager_step(model, posterior, Noise(0.1), ChannelELBO(4), Adam(posterior.parameters(), 1e-3))
    >>> step(Batch(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)), torch.Generator(), 1e-3).is_finite()
    True
    """
    gradient = eager_gradient(model, posterior, channel, objective)

    def step(batch: Batch, generator: torch.Generator, lr: float) -> Taken:
        x, y, _ = batch.gathered()
        found = gradient(x, y, generator)
        taken = _taken(objective, found.log_likelihood, found.kl, found.penalty, found.norm)
        if taken.is_finite():
            adam.step(found.gradients, lr)
        return taken

    return step


def _taken(objective: ChannelELBO, log_likelihood: float, kl: float, penalty: float, length: float) -> Taken:
    return Taken(log_likelihood - objective.kl_weight * kl - penalty, log_likelihood, kl, penalty, length)


class CompiledStep:
    """The same, compiled at the first batch of each shape.

    Compiled are always the gradient in theta; the channel where its randomness can be drawn beforehand (noise, one-step
    attacks, stratified mixtures of them), else its samples come from eager code; for `MeanField` also theta, the chain rule
    and Adam, which then changes the posterior only where bound and gradient are finite.

    >>> from torch import nn
    >>> from advbayes import Categorical, Noise
    >>> model = BayesianModel(nn.Linear(2, 2), Categorical())
    >>> CompiledStep(model, MeanField(model), Noise(0.1), ChannelELBO(4, through=True), Adam([], 1e-3))
    Traceback (most recent call last):
    ...
    ValueError: compile must be False for an objective with through=True: second derivatives run in eager code alone
    """

    def __init__(self, model: BayesianModel, posterior: Posterior, channel: Channel, objective: ChannelELBO, adam: Adam) -> None:
        if objective.through:
            raise ValueError(
                "compile must be False for an objective with through=True: second derivatives run in eager code alone"
            )
        self.model, self.posterior, self.channel, self.objective, self.adam = model, posterior, channel, objective, adam
        self.kl_weight = objective.kl_weight / objective.num_data
        self.programs: dict[tuple[torch.Size, torch.Size], Compiled] = {}
        self.state: tuple[Tensor, ...] = ()  # what the program changes in place
        self.gaussian = type(posterior) is MeanField and posterior.mu.requires_grad and posterior.rho.requires_grad
        if self.gaussian:
            posterior.kl(model.prior_scale)  # refuses a prior without a KL
            slots = adam.slots
            self.state = (*adam.memory, *slots["exp_avg"], *slots["exp_avg_sq"], slots["step"][0])
        self.lr = torch.zeros((), dtype=torch.float64, device=model.device)
        self.inside = objective.num_channel == 1  # whether the channel is compiled; its first draw may find that it cannot be
        self.empty: list[Tensor | None] = []  # the fields of Draws that hold nothing and are not passed
        self.draws_nothing = False
        self.like: Tensor | None = None

    def __call__(self, batch: Batch, generator: torch.Generator, lr: float) -> Taken:
        objective, posterior = self.objective, self.posterior
        if batch.x.ndim > 2:  # measured: gathered inside the program, images take convolutional nets twice the time
            batch = batch.gathered()
        noise = posterior.noise(objective.num_theta, generator=generator)
        drawn = self._draw(batch, generator)
        if self.gaussian:
            self.lr.fill_(lr)
            source: tuple[Tensor, ...] = (*self.state, self.lr, noise)
        else:
            with torch.no_grad():
                source = (posterior.at(noise).clone(),)
        if drawn is None:
            batch = batch.gathered()
            thetas = posterior.at(noise).detach() if self.gaussian else source[0]
            drawn = [objective.corrupt(self.model, thetas, self.channel, batch.x, batch.y, generator=generator)]
        x, y, rows = batch
        inputs = [x, y, *drawn] if rows is None else [x, y, rows, *drawn]
        key = (x.shape, y.shape) if rows is None else (rows.shape, y.shape)
        if key not in self.programs:
            self.programs[key] = self._compile((*source, *inputs), batch)
        numbers, *gradients = self.programs[key](*source, *inputs)
        bound, log_likelihood, kl, penalty, squares = numbers.tolist()
        if self.gaussian:
            return Taken(bound, log_likelihood, kl, penalty, math.sqrt(squares))
        kl, gradients = posterior.pull_back(noise, gradients[0], self.model.prior_scale, self.kl_weight)
        taken = _taken(objective, log_likelihood, kl, penalty, norm(gradients))
        if taken.is_finite():
            self.adam.step(gradients, lr)
        return taken

    def _draw(self, batch: Batch, generator: torch.Generator) -> list[Tensor] | None:
        """The channel's randomness for each theta, one after the other; None where it cannot be drawn beforehand."""
        if self.draws_nothing or not self.inside:
            return [] if self.inside else None
        like = batch.x if batch.rows is None else self._first(batch.x, len(batch.rows))
        found: list[Tensor] = []
        for _ in range(self.objective.num_theta):
            drawn = draws(self.channel, like, generator=generator)
            if drawn is None:
                self.inside = False
                return None
            found += [field for field in drawn if field.numel()]
            if not self.empty:
                self.empty = [None if field.numel() else field for field in drawn]
        self.draws_nothing = not found
        return found

    def _first(self, x: Tensor, num: int) -> Tensor:
        """A tensor like the batch that is not gathered yet."""
        if self.like is None or len(self.like) != num:
            self.like = x[:num]
        return self.like

    def _compile(self, arguments: tuple[Tensor, ...], batch: Batch) -> Compiled:
        what = f"a step of {self.model} with a channel of type {type(self.channel).__name__}"
        return compiled(self._program(batch.rows is not None), arguments, what, num_changed=len(self.state))

    def _program(self, gathers: bool) -> Callable[..., tuple[Tensor, ...]]:
        """(state, learning rate and noise, or thetas), x, y, (rows), (the channel's draws, or samples) -> numbers, gradients."""

        def step(*arguments: Tensor) -> tuple[Tensor, ...]:
            given = iter(arguments)
            state = tuple(islice(given, len(self.state)))
            if self.gaussian:
                lr, noise = islice(given, 2)
                scale = functional.softplus(state[1])
                thetas = torch.addcmul(state[0], scale, noise)
            else:
                thetas = next(given)
            x, y = islice(given, 2)
            if gathers:
                rows = next(given)
                x, y = x[rows], y[rows]
            log_likelihood, penalty, gradient = self._gradient(thetas, x, y, given)
            if not self.gaussian:
                zero = torch.zeros_like(penalty)
                return torch.stack([zero, log_likelihood, zero, penalty, zero]), gradient
            kl, gradients = self._pull_back(state[0], state[1], scale, noise, gradient)
            squares = sum(part.square() for part in gradients).sum(dtype=torch.float64)  # type: ignore[union-attr]
            bound = log_likelihood - self.objective.kl_weight * kl - penalty
            _adam(state, gradients, lr, torch.isfinite(bound) & torch.isfinite(squares))
            return (torch.stack([bound, log_likelihood, kl, penalty, squares]),)

        return step

    def _gradient(self, thetas: Tensor, x: Tensor, y: Tensor, given: Iterator[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-likelihood and penalty for the whole data set, and the gradient in the thetas."""
        totals, penalties, rows = [], [], []
        samples = None if self.inside else next(given)
        for s, theta in enumerate(thetas):
            if samples is None:
                drawn = Draws(*(next(given) if field is None else field for field in self.empty))
                total, penalty, row = self._one_theta(theta, x, y, drawn)
            else:
                total, penalty, row = self._gradient_at(theta, x, y, samples[s])
            totals.append(total)
            penalties.append(penalty)
            rows.append(row)
        scale = self.objective.num_data / (len(x) * len(thetas))
        log_likelihood, penalty = (scale * torch.stack(parts).sum().double() for parts in (totals, penalties))
        return log_likelihood, penalty, torch.stack(rows)

    def _one_theta(self, theta: Tensor, x: Tensor, y: Tensor, drawn: Draws) -> tuple[Tensor, Tensor, Tensor]:
        if drawn.order.numel():  # the bound is a sum over examples: their order does not matter
            x, y = x[drawn.order], y[drawn.order]
        x_adv = sample_at(self.channel, drawn, _AttackedTheta(self.model, theta), x, y)
        return self._gradient_at(theta, x, y, x_adv.unsqueeze(0))

    def _gradient_at(self, theta: Tensor, x: Tensor, y: Tensor, x_adv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        objective = self.objective
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            log_p, omega = objective._score_all(self.model, [self.model.parts(leaf)], x, x_adv.unsqueeze(0), y)
            total, penalty = objective.reduce(log_p).sum(), omega.sum() / omega.shape[1]
            (row,) = torch.autograd.grad((penalty - total) / (len(x) * objective.num_theta), leaf)
        return total.detach(), penalty.detach(), row

    def _pull_back(
        self, mu: Tensor, rho: Tensor, scale: Tensor, noise: Tensor, gradient: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """KL, and the gradient in mu and rho."""
        prior_scale = self.model.prior_scale
        gradients = gaussian_pull_back(mu, rho, scale, noise, gradient, prior_scale, self.kl_weight)
        # Compiled sums run in one register: in float64, or 20,000 terms lose five digits.
        spread = (mu.square() + scale.square()) * (0.5 / prior_scale**2) - scale.log()
        return spread.sum(dtype=torch.float64) + len(mu) * (math.log(prior_scale) - 0.5), gradients


def _adam(state: tuple[Tensor, ...], gradients: tuple[Tensor, Tensor], lr: Tensor, finite: Tensor) -> None:
    """A step in place of (parameters, their exp_avg, their exp_avg_sq, the count), where it is finite."""
    *tensors, count = state
    after = count + finite
    for k, gradient in enumerate(gradients):
        parameter, first, second = held = tensors[k :: len(gradients)]
        for tensor, value in zip(held, updated(parameter, gradient, first, second, after, lr), strict=True):
            tensor.copy_(torch.where(finite, value, tensor))
    count.copy_(after)

"""A step of `fit` as one native program, from gathering the batch to Adam, on the random numbers of
an eager step.

What is traced is the definition: theta from the posterior, x' from the channel,
    `ChannelELBO.terms`, autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from advbayes.accelerated.compiling import Program, compiled
from advbayes.accelerated.draws import Draws, draws, sample_at
from advbayes.checks import InputError
from advbayes.model import BayesianModel
from advbayes.objectives import ChannelELBO, Terms
from advbayes.posteriors import Posterior
from advbayes.types import Channel

if TYPE_CHECKING:
    from advbayes.training.batches import Batch

_SLOTS = ("exp_avg", "exp_avg_sq", "step")  # of Adam's state


class CompiledStep:
    """(batch, generator, learning rate, spared) -> bound, log-likelihood, KL, penalty, norm of the
    gradient of -(bound + spared * KL) / N.

    Compiled at the first batch of each shape. The channel is part of the program where its
    randomness can be drawn beforehand (noise, one-step attacks, stratified mixtures of them), else
    its samples come from eager code. Posterior and optimiser change only where bound and gradient
    are finite.

    >>> from advbayes import Categorical, MeanField, Noise
    >>> model = BayesianModel(nn.Linear(2, 2), Categorical())
    >>> posterior, objective = MeanField(model), ChannelELBO(4, through=True)
    >>> adam = torch.optim.Adam(posterior.parameters())
    >>> CompiledStep(model, posterior, Noise(0.1), objective, adam)
    Traceback (most recent call last):
    ...
    advbayes.checks.InputError: compile must be False for an objective with through=True, got True
    """

    def __init__(
        self,
        model: BayesianModel,
        posterior: Posterior,
        channel: Channel,
        objective: ChannelELBO,
        optimiser: torch.optim.Adam,  # with a state for each parameter
    ) -> None:
        if objective.through:
            # second derivatives run in eager code alone
            raise InputError("compile must be False for an objective with through=True, got True")
        self.model, self.posterior = model, posterior
        self.channel, self.objective = channel, objective
        self.settings = optimiser.defaults
        trained = {name: p for name, p in posterior.named_parameters() if p.requires_grad}
        self.names = [f"posterior.{name}" for name in trained]
        # what the program changes in place
        self.state = [
            tensor
            for p in trained.values()
            for tensor in (p.detach(), *map(optimiser.state[p].get, _SLOTS))
        ]
        self.lr = torch.zeros((), dtype=torch.float64, device=model.device)
        self.spared = torch.zeros((), dtype=model.dtype, device=model.device)
        self.programs: dict[tuple[torch.Size, torch.Size], Program] = {}
        # whether the channel is compiled; its first draw may show that it cannot be
        self.inside = objective.num_channel == 1

    def __call__(
        self, batch: Batch, generator: torch.Generator, lr: float, spared: float = 0.0
    ) -> list[float]:
        objective, posterior = self.objective, self.posterior
        if batch.x.ndim > 2:  # gathered inside the program, images take twice the time (measured)
            batch = batch.gathered()
        noise = posterior.noise(objective.num_theta, generator=generator)
        drawn = self._draw(batch, generator)
        if drawn is None:
            batch = batch.gathered()
            with torch.no_grad():
                thetas = posterior.at(noise)
            sources = (self.model, thetas, self.channel, batch.x, batch.y)
            drawn = [objective.corrupt(*sources, generator=generator)]
        x, y, rows, *_ = batch
        self.lr.fill_(lr)
        self.spared.fill_(spared)
        data = (x, y) if rows is None else (x, y, rows)
        arguments = (*self.state, self.lr, self.spared, noise, *data, *drawn)
        key = (x.shape, y.shape) if rows is None else (rows.shape, y.shape)
        if key not in self.programs:
            what = f"a step of {self.model} with a channel of type {type(self.channel).__name__}"
            self.programs[key] = compiled(
                self._program(rows is not None), arguments, what, num_changed=len(self.state)
            )
        (numbers,) = self.programs[key](*arguments)
        values: list[float] = numbers.tolist()
        return values

    def _draw(self, batch: Batch, generator: torch.Generator) -> list[Tensor] | None:
        """The channel's randomness theta by theta; None where it cannot be drawn beforehand."""
        like = batch.x if batch.rows is None else batch.x[: batch.num]
        fields: list[Tensor] = []
        for _ in range(self.objective.num_theta if self.inside else 0):
            drawn = draws(self.channel, like, generator=generator)
            self.inside = drawn is not None
            fields += drawn or ()
        return fields if self.inside else None

    def _program(self, gathers: bool) -> Callable[..., tuple[Tensor, ...]]:
        """(state), learning rate, spared, noise, x, y, (rows), (the channel's draws, or samples)
        -> numbers, the state changed."""
        step = _Bound(self)

        def program(*arguments: Tensor) -> tuple[Tensor, ...]:
            rest = iter(arguments)
            state = list(islice(rest, len(self.state)))
            lr, spared, noise, x, y = islice(rest, 5)
            if gathers:
                rows = next(rest)
                x, y = x[rows], y[rows]
            with torch.enable_grad():
                leaves = [parameter.detach().requires_grad_() for parameter in state[::4]]
                parameters = dict(zip(self.names, leaves, strict=True))
                terms: Terms = functional_call(step, parameters, (noise, x, y, rest))
                loss = -(terms.bound + spared * terms.kl) / self.objective.num_data
                gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
            squares = torch.stack(
                [gradient.square().sum(dtype=torch.float64) for gradient in gradients]
            ).sum()
            bound = terms.bound.detach()
            finite = torch.isfinite(bound) & torch.isfinite(squares)
            for k, gradient in enumerate(gradients):
                self._adam(state[4 * k : 4 * k + 4], gradient, lr, finite)
            return (torch.stack([*(term.detach().double() for term in terms), squares.sqrt()]),)

        return program

    def _adam(self, state: list[Tensor], gradient: Tensor, lr: Tensor, finite: Tensor) -> None:
        """One step of Adam in place, where everything is finite."""
        parameter, exp_avg, exp_avg_sq, step = state
        count, settings = step + finite, (self.settings["betas"], self.settings["eps"])
        after = (*adam(parameter, exp_avg, exp_avg_sq, gradient, count, lr, *settings), count)
        for tensor, value in zip(state, after, strict=True):
            tensor.copy_(torch.where(finite, value, tensor))


def adam(
    parameter: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    step: Tensor,  # (), with this one counted
    lr: Tensor | float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one step of `torch.optim.Adam` makes of parameter, exp_avg and exp_avg_sq."""
    count = step.double()
    first = torch.lerp(exp_avg, gradient, 1 - betas[0])
    second = betas[1] * exp_avg_sq + (1 - betas[1]) * gradient.square()
    rate = (lr / (1 - betas[0] ** count)).to(parameter.dtype)
    spread = (1 - betas[1] ** count).sqrt().to(parameter.dtype)
    return parameter - rate * first / (second.sqrt() / spread + eps), first, second


class _Bound(nn.Module):
    """The terms of the bound as a module of the posterior's parameters."""

    def __init__(self, step: CompiledStep) -> None:
        super().__init__()
        self.step, self.posterior = step, step.posterior

    def forward(self, noise: Tensor, x: Tensor, y: Tensor, rest: Iterator[Tensor]) -> Terms:
        step, thetas = self.step, self.posterior.at(noise)
        if not step.inside:
            return step.objective.terms(step.model, self.posterior, thetas, x, next(rest), y)
        # Each theta has an order of the examples of its own. The bound is a sum over them: it is
        # taken theta by theta.
        each = [self._at_one(theta, x, y, Draws(*islice(rest, 3))) for theta in thetas]
        return Terms(*(sum(parts) / len(each) for parts in zip(*each, strict=True)))

    def _at_one(self, theta: Tensor, x: Tensor, y: Tensor, drawn: Draws) -> Terms:
        step = self.step
        if drawn.order.numel():
            x, y = x[drawn.order], y[drawn.order]
        with torch.no_grad():
            x_adv = sample_at(step.channel, drawn, step.model.at(theta.detach()), x, y)
        one = (theta.unsqueeze(0), x, x_adv.unsqueeze(0).unsqueeze(0), y)  # S = K = 1
        return step.objective.terms(step.model, self.posterior, *one)

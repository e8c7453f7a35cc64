"""One step of `fit`: a gradient of -bound / N, and Adam along it where everything is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from advbayes.checks import InputError
from advbayes.distributed import ALONE, Ranks
from advbayes.model import BayesianModel
from advbayes.objectives import ChannelELBO
from advbayes.posteriors import Posterior
from advbayes.training.batches import Batch
from advbayes.types import Channel

try:
    from advbayes import accelerated
except ImportError:  # a package without it trains the same, but for compile=True
    accelerated = None  # type: ignore[assignment]


class Taken(NamedTuple):
    """The bound and its parts for the whole data set, and the norm of the gradient of -bound / N,
    `spared` of the KL term added to the bound."""

    bound: float
    log_likelihood: float
    kl: float
    penalty: float
    norm: float

    def is_finite(self) -> bool:
        """Whether the step was taken; if not, posterior and optimiser are as they were."""
        return math.isfinite(self.bound) and math.isfinite(self.norm)


# One step along the gradient of bound + spared * kl, where `spared` is the part of the KL term's
# weight that a warm-up leaves out: (batch, generator seeded for the step, lr, spared) -> the fields
# of `Taken`, with the true bound.
Step = Callable[[Batch, torch.Generator, float, float], list[float]]


def eager_step(
    model: BayesianModel,
    posterior: Posterior,
    channel: Channel,
    objective: ChannelELBO,
    optimiser: torch.optim.Adam,
    ranks: Ranks = ALONE,
) -> Step:
    """One estimate of the bound, its gradient by autograd, and Adam along it if all is finite."""
    parameters = [p for p in posterior.parameters() if p.requires_grad]

    def step(
        batch: Batch, generator: torch.Generator, lr: float, spared: float = 0.0
    ) -> list[float]:
        total = objective.num_data if batch.weight is None else float(batch.weight.sum())
        x, y, _, weight, share = batch.gathered()
        terms = objective(model, posterior, channel, x, y, weight=weight, generator=generator)
        gain = terms.bound + spared * terms.kl if spared else terms.bound
        of_share = torch.autograd.grad(-gain / total, parameters, materialize_grads=True)
        values = torch.stack([term.detach() for term in terms])
        *gradients, values = ranks.mean([*of_share, values], share)
        norm = math.hypot(*(torch.linalg.vector_norm(gradient).item() for gradient in gradients))
        numbers = [*values.tolist(), norm]
        if Taken(*numbers).is_finite():
            descend(optimiser, parameters, gradients, lr)
        return numbers

    return step


def step_maker(compile: bool, ranks: Ranks) -> Callable[..., Step]:
    """`eager_step`, or the same as one native program, for one process."""
    if accelerated is not None and accelerated.is_enabled():
        accelerated.recycle_blocks()
    if not compile:
        return partial(eager_step, ranks=ranks)
    if ranks.size > 1:
        raise InputError(f"compile must be False on {ranks.size} ranks, got True")
    if accelerated is None:
        raise ImportError(
            "compile must be False without the package advbayes.accelerated, which cannot be "
            "imported"
        )
    return accelerated.CompiledStep


def adam_for(module: nn.Module, lr: float) -> torch.optim.Adam:
    """Adam for the module's trainable parameters, its state in place before the first step."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=lr, fused=True)
    for p in parameters:
        optimiser.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }
    return optimiser


def descend(
    optimiser: torch.optim.Adam,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor],
    lr: float,
) -> None:
    """One step of the optimiser along given gradients."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimiser.param_groups[0]["lr"] = lr
    optimiser.step()
    for parameter in parameters:
        parameter.grad = None

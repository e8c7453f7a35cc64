"""Likelihood-free purification: for channels that can only be sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import checks
from advbayes.channels import GaussianDensity
from advbayes.model import BayesianModel
from advbayes.purification.diagnosis import Diagnosis
from advbayes.purification.purifier import Purifier, _reference
from advbayes.seeds import generator_for
from advbayes.types import Channel, Predictor

_PILOTS = 256
_OTHERS = 2000


@dataclass(frozen=True, eq=False)
class Simulated:
    """Any channel with a density from samples: a Gaussian kernel on `num` simulated x' each.

    p(x' | x, theta) is approximated by 1/M sum_m N(x'; x'_m, bandwidth^2), approximate Bayesian
    computation with a smooth kernel: exact as the bandwidth goes to 0 and M (or the reference set)
    grows.

    >>> from advbayes import Noise
    >>> Simulated(Noise(0.0), 1, 0.1, torch.Generator()).density(None, torch.zeros(2, 3)).scales
    (0.1,)
    """

    channel: Channel
    num: int
    bandwidth: float
    generator: torch.Generator

    def __post_init__(self) -> None:
        checks.count("num", self.num)
        checks.number("bandwidth", self.bandwidth, low=0, open_low=True)

    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return self.channel.sample(predict, x, y, generator=generator)

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> GaussianDensity:
        num, draw = self.num, partial(self.sample, predict, x, y, generator=self.generator)
        drawn = tuple(draw().detach() for _ in range(num))
        return GaussianDensity((-math.log(num),) * num, drawn, (self.bandwidth,) * num)


@torch.no_grad()
def choose_bandwidth(
    channel: Channel,
    predict: Predictor,
    x: Tensor,  # (N, *event)
    y: Tensor | None = None,
    *,
    num: int = 1,
    generator: torch.Generator | None = None,
) -> float:
    """The kernel width that makes some points' simulated x' likeliest given the others'.

    Likelihood cross-validation on at most 2,000 points with `num` simulations each, then shrunk to
    all N of them by the kernel estimate's own rate, N^(-1/(4 + d)).

    >>> from advbayes import Noise
    >>> seeded = torch.Generator().manual_seed(0)
    >>> x = torch.randn(2000, 1, generator=seeded)
    >>> 0.1 < choose_bandwidth(Noise(0.5), None, x, generator=seeded) < 0.6
    True
    """
    total = len(x)
    if total < 2:
        raise checks.InputError(
            f"reference must hold at least two points to choose a bandwidth from, got {total}"
        )
    order = torch.randperm(total, generator=generator, device=x.device)
    pilots = order[: min(_PILOTS, total // 2)]
    others = order[len(pilots) : len(pilots) + _OTHERS]

    def simulate(rows: Tensor) -> Tensor:
        labels = None if y is None else y[rows]
        return channel.sample(predict, x[rows], labels, generator=generator).flatten(1).double()

    asked, known = simulate(pilots), torch.cat([simulate(others) for _ in range(num)])
    distances, width = torch.cdist(asked, known), asked.shape[1]
    square = distances.square()
    largest = float(distances.max()) / math.sqrt(width)
    if largest == 0:
        raise checks.InputError(
            "channel must give different x' for different inputs to choose a bandwidth, got one "
            "point only"
        )
    least = max(1e-3 * largest, 1e-2 * float(distances.amin(1).median()) / math.sqrt(width))

    def score(bandwidth: Tensor) -> Tensor:
        log_p = torch.logsumexp(square * (-0.5 / bandwidth**2), 1) - width * bandwidth.log()
        return log_p.mean()

    best = low = math.log(least)
    high = math.log(largest)
    for _ in range(2):  # a grid, then a finer one around its best
        grid = torch.linspace(low, high, 25, dtype=torch.float64, device=x.device)
        best = float(grid[int(torch.stack([score(g.exp()) for g in grid]).argmax())])
        step = (high - low) / 24
        low, high = best - step, best + step
    shrink = (len(others) / max(total, len(others))) ** (1.0 / (4 + width))
    return float(math.exp(best) * shrink)


class SimulatedPurifier:
    """A Purifier for channels without a density, by `num_simulations` draws of x' each.

    `bandwidth=None` chooses it (see `choose_bandwidth`); the choice is in `.bandwidth`, and the
    effective sample size in `.diagnose(x).ess_reference`. Everything else is a
    `Purifier`, the attribute `.purifier`: the gradient too, so it can be attacked adaptively.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical, MeanField, Noise
    >>> model = BayesianModel(nn.Linear(4, 3), Categorical())
    >>> thetas, x = MeanField(model).sample(5), torch.randn(100, 4)
    >>> purified = SimulatedPurifier(model, Noise(0.0), thetas, x)
    >>> purified(torch.ones(2, 4)).probs.shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        model: BayesianModel,
        channel: Channel,
        thetas: Tensor,  # (S, P)
        reference: Any,
        update: str = "online",
        *,
        num_simulations: int = 1,
        bandwidth: float | None = None,
        num_samples: int = 10_000,
        seed: int = 0,
        memory_limit: int = 2 << 30,
        folder: str | Path | None = None,
    ) -> None:
        if not callable(getattr(channel, "sample", None)):
            raise checks.InputTypeError("channel must have sample", got=channel)
        checks.count("num_simulations", num_simulations)
        model._check_theta("thetas", thetas, 2)
        x, y = _reference(reference, checks.count("num_samples", num_samples), model)
        if bandwidth is None:
            source = generator_for(seed, "bandwidth", device=x.device)
            bandwidth = choose_bandwidth(
                channel, model.at(thetas[0]), x, y, num=num_simulations, generator=source
            )
        self.bandwidth = checks.number("bandwidth", bandwidth, low=0, open_low=True)
        source = generator_for(seed, "simulate", device=x.device)
        simulated = Simulated(channel, num_simulations, self.bandwidth, source)
        known = x if y is None else (x, y)
        self.purifier = Purifier(
            model, simulated, thetas, known, update, memory_limit=memory_limit, folder=folder
        )
        self._note = (
            f"SimulatedPurifier({model}, {channel}, num_thetas={len(thetas)}, "
            f"num_reference={len(x)}, update={update!r}, "
            f"num_simulations={num_simulations}, bandwidth={self.bandwidth:g}, seed={seed})"
        )

    def __repr__(self) -> str:
        return self._note

    def __call__(self, x: Tensor) -> Distribution:
        return self.purifier(x)

    def diagnose(self, x: Tensor) -> Diagnosis:
        """As `Purifier.diagnose`; the log evidence is that of the kernel estimate."""
        return self.purifier.diagnose(x)

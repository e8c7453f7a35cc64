"""What several ranks do in tests: run by torchrun (`test_distributed.py`), `python tests/ranks.py`
alone does the same in one process. Writes what it found to the file named by its argument."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Learned,
    LowRank,
    MeanField,
    Mixture,
    Noise,
    Posterior,
    Trades,
    distributed,
    fit,
    margin,
    nll,
    one_step,
    pgd,
)
from advbayes.networks import FullyConnectedGenerator
from advbayes.seeds import generator_for
from advbayes.types import Channel

Found = dict[str, Tensor]


def data(num: int = 61) -> tuple[Tensor, Tensor]:
    x = torch.randn(num, 3, generator=generator_for(0, "data"), dtype=torch.float64)
    return x, (x[:, 0] + x[:, 1] > 0).long()


def model() -> BayesianModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    return BayesianModel(net, Categorical())


def attack(loss: Callable[..., Tensor]) -> AttackChannel:
    return AttackChannel(one_step(L2(0.5), loss), 0.1)


def learned() -> Learned:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Learned(FullyConnectedGenerator(3).double(), L2(0.5), entropy_bonus=0.1)


def channels() -> dict[str, Channel]:
    mix = Mixture([0.4, 0.2, 0.4], [Noise(0.1), attack(nll), attack(margin)])
    return {
        "noise": Noise(0.3),
        "mix": mix,
        "learned": learned(),
        # multi-step attacks, nested and iid mixtures, some of whose parts a rank has no rows of
        "nested": Mixture(
            [0.5, 0.2, 0.2, 0.1],
            [mix, Noise(0.2), learned(), AttackChannel(pgd(L2(0.5), steps=3), 0.1)],
            stratified=False,
        ),
    }


def trained(channel: Channel, posterior: Posterior | None = None, **options: object) -> Found:
    one = model()
    with torch.random.fork_rng():
        torch.manual_seed(distributed.ranks().rank)  # the first rank's start counts
        q = posterior if posterior is not None else MeanField(one)
    settings: dict[str, object] = {"steps": 7, "batch_size": 9, "lr": 0.01, "seed": 3}
    result = fit(one, q, channel, data(), **(settings | options))  # type: ignore[arg-type]
    found = {name: tensor for name, tensor in result.state.tensors.items()}
    return found | {
        name: torch.tensor(result.history[name], dtype=torch.float64)
        for name in ("bound", "log_likelihood", "kl", "penalty", "gradient_norm")
    }

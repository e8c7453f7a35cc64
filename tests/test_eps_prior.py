"""A prior over the adversary's budget: its quantiles, samples, density, and its way through
training and files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.distributions import Beta, Categorical, Exponential, Gamma, LogNormal, Normal, Uniform

from advbayes import (
    L2,
    ChannelELBO,
    Linf,
    MeanField,
    Mixture,
    Purifier,
    eps_prior,
    fit,
    load,
    one_step,
    pgd,
    save,
)
from advbayes.channels.prior import quantiles
from tests.contracts import ChannelContract, small_data, small_model
from tests.oracles import FLOAT, generator, randn

SLOPE = torch.tensor([3.0, 0.0, 4.0], dtype=FLOAT)


def line(x: Tensor) -> Normal:
    return Normal(x @ SLOPE, torch.full((len(x),), 0.5, dtype=x.dtype))


class TestEpsPrior(ChannelContract):
    def make(self, task: str, dtype: torch.dtype) -> Mixture:
        return eps_prior(one_step(L2(1.0)), {0.0: 0.2, 0.3: 0.5, 0.8: 0.3}, sigma=0.3)


class TestGammaPrior(ChannelContract):
    def make(self, task: str, dtype: torch.dtype) -> Mixture:
        return eps_prior(pgd(L2(1.0), steps=3), Gamma(3.0, 6.0), sigma=0.3, num=4)


@pytest.mark.parametrize(
    ("prior", "known"),
    [
        (Beta(2.0, 5.0), scipy.stats.beta(2, 5)),
        (Beta(0.5, 0.7), scipy.stats.beta(0.5, 0.7)),
        (Beta(40.0, 1.0), scipy.stats.beta(40, 1)),
        (Beta(0.1, 0.05), scipy.stats.beta(0.1, 0.05)),
        (Beta(2e3, 3e3), scipy.stats.beta(2e3, 3e3)),
        (Gamma(3.0, 2.0), scipy.stats.gamma(3, scale=0.5)),
        (Gamma(0.5, 0.01), scipy.stats.gamma(0.5, scale=100)),
        (Uniform(1.0, 3.0), scipy.stats.uniform(1, 2)),
        (Exponential(2.0), scipy.stats.expon(scale=0.5)),
        (LogNormal(0.0, 0.5), scipy.stats.lognorm(0.5)),
    ],
)
@pytest.mark.parametrize("num", [1, 5])
def test_a_distribution_stands_for_the_midpoints_of_its_quantiles(
    prior: object, known: object, num: int
) -> None:
    wanted = [float(known.ppf((k + 0.5) / num)) for k in range(num)]  # type: ignore[attr-defined]
    assert quantiles(prior, num) == pytest.approx(wanted, rel=2e-5, abs=1e-9)  # type: ignore[arg-type]


def test_the_density_is_the_sum_over_budgets_in_closed_form() -> None:
    """One step on a line goes from x to x + eps w / |w| where y lies below: a mixture of shifted
    Gaussians."""
    prior = {0.0: 0.2, 0.5: 0.5, 2.0: 0.3}
    x, at = randn(4, 3), randn(6, 3, seed=1)
    density = eps_prior(one_step(L2(1.0)), prior, sigma=0.4).density(line, x, line(x).mean - 1)
    parts = [
        math.log(weight) + Normal(x + eps * SLOPE / 5, 0.4).log_prob(at.unsqueeze(1)).sum(-1).T
        for eps, weight in prior.items()
    ]
    torch.testing.assert_close(density.log_prob(at), torch.stack(parts).logsumexp(0))


def test_shares_of_a_batch_are_the_prior_s() -> None:
    x = randn(100, 3)
    channel = eps_prior(one_step(L2(1.0)), {0.0: 0.2, 0.5: 0.5, 2.0: 0.3})
    lengths = (channel.sample(line, x, line(x).mean - 1, generator=generator(0)) - x).norm(dim=1)
    assert [int((lengths - eps).abs().lt(1e-9).sum()) for eps in (0.0, 0.5, 2.0)] == [20, 50, 30]


def test_step_sizes_stay_in_proportion_and_the_ball_keeps_the_rest() -> None:
    channel = eps_prior(
        pgd(Linf(1.0, box=(0, 1)), 5, step_size=0.4), [0.5, 2.0], 0.1, stratified=False
    )
    assert [part.attack.step_size for part in channel.channels] == [0.2, 0.8]  # type: ignore[attr-defined]
    assert [part.attack.ball for part in channel.channels] == [
        Linf(0.5, box=(0, 1)),
        Linf(2.0, box=(0, 1)),
    ]  # type: ignore[attr-defined]
    assert channel.weights == (0.5, 0.5)
    assert not channel.stratified
    assert all(part.sigma == 0.1 for part in channel.channels)  # type: ignore[attr-defined]


def test_it_trains_purifies_and_is_saved(tmp_path: Path) -> None:
    model = small_model("classification", torch.float32)
    x, y = small_data("classification", torch.float32, 40)
    posterior, channel = MeanField(model), eps_prior(one_step(L2(1.0)), Gamma(2.0, 4.0), 0.2, num=3)
    result = fit(model, posterior, channel, (x, y), objective=ChannelELBO(40), steps=5)
    assert result.skipped == 0
    save(tmp_path / "m.advbayes", model=model, posterior=posterior, channel=channel)
    loaded = load(tmp_path / "m.advbayes").channel
    assert loaded == channel
    thetas = posterior.sample(3, generator=generator(0))
    mine, its = (Purifier(model, each, thetas, (x, y))(x[:5]).probs for each in (channel, loaded))
    assert torch.equal(mine, its)


def test_bad_priors_are_named() -> None:
    attack = one_step(L2(1.0))
    for eps, message in (
        ({-1.0: 1.0}, "eps must be a finite number >= 0, got -1"),
        ({1.0: 0.7}, "Mixture weights must be non-negative and sum to 1"),
        ([], "weights must be as many as channels"),
        (Normal(0.0, 1.0), "eps must be a finite number >= 0"),
        (Gamma(torch.ones(2), torch.ones(2)), "eps must be a distribution of one number"),
        (Categorical(torch.ones(3)), "eps must be a distribution"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            eps_prior(attack, eps, 0.1)  # type: ignore[arg-type]

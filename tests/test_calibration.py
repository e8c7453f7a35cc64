"""Simulation-based calibration (identity 24): parameters drawn from the prior are uniform within
their posteriors.

Thousands of one-parameter regressions stand side by side in one model (output j is weight_j x_j),
so one fit is thousands of simulated posteriors. Each negative control is a mistake that a library
can make, and must fail.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from advbayes import BayesianModel, ChannelELBO, Gaussian, MeanField, Noise, fit
from tests.oracles import (
    FLOAT,
    STANDARD_NORMAL_MEANS,
    LinearRegression,
    Verdict,
    generator,
    mean_test,
    normal_log_prob,
    standard_normal_features,
    uniform_cells,
)

PRIOR, SCALE, NUM_DATA, BATCH = 0.8, 2.5, 8, 2
RESOLUTION = torch.tensor([0.03, 0.03] + [0.01] * 8, dtype=FLOAT)


class Columns(nn.Module):
    """Many one-parameter regressions side by side: output j is weight_j x_j."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num, dtype=FLOAT))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def simulate(num: int, source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """theta ~ prior, (x, y) given theta, for `num` data sets: (num,), (N, num), (N, num)."""
    theta = PRIOR * torch.randn(num, dtype=FLOAT, generator=source)
    x = 1 + 0.5 * torch.randn(NUM_DATA, num, dtype=FLOAT, generator=source)
    return theta, x, x * theta + SCALE * torch.randn(NUM_DATA, num, dtype=FLOAT, generator=source)


# --- exact posteriors ---------------------------------------------------------------------------


def exact_ranks(assumed_prior: float) -> Verdict:
    """Ranks of a two-parameter draw among 15 draws of its conjugate posterior: uniform on 16
    places."""

    def draw(num: int, source: torch.Generator) -> Tensor:
        ranks = []
        for _ in range(num):
            theta = PRIOR * torch.randn(2, dtype=FLOAT, generator=source)
            x = torch.randn(5, 2, dtype=FLOAT, generator=source)
            y = x @ theta + SCALE * torch.randn(5, dtype=FLOAT, generator=source)
            draws = LinearRegression(x, y, SCALE, assumed_prior).sample(15, source)
            # two coordinates and a length, which sees the spread that coordinates of mean zero hide
            statistic, drawn = (
                torch.stack([t[..., 0], t[..., 0] + t[..., 1], t.norm(dim=-1)], -1)
                for t in (theta, draws)
            )
            ranks.append((drawn < statistic).sum(0))
        place = (torch.stack(ranks) + 0.5) / 16
        return torch.stack([uniform_cells(column, 16) for column in place.T], 1)

    return mean_test(
        draw, torch.full((3, 16), 1 / 16, dtype=FLOAT), resolution=0.006, num=2048, max_num=8192
    )


def test_24_the_conjugate_sampler_is_calibrated() -> None:
    assert exact_ranks(PRIOR)


def test_24_the_conjugate_sampler_with_twice_the_prior_is_not() -> None:
    assert not exact_ranks(2 * PRIOR)


# --- variational posteriors ---------------------------------------------------------------------


def variational(prior_factor: float = 1.0, kl_weight: float = 1.0) -> Verdict:
    """z = (theta - mu)/s of `fit`'s mean fields, which are exact here: standard normal if all is
    well."""
    steps, first, last = 500, 0.05, 0.002

    def draw(num: int, source: torch.Generator) -> Tensor:
        theta, x, y = simulate(num, source)
        model = BayesianModel(Columns(num), Gaussian(SCALE), prior_scale=prior_factor * PRIOR)
        posterior = MeanField(model, init_scale=0.5)
        objective = ChannelELBO(NUM_DATA, kl_weight=kl_weight)
        decay = (last / first) ** (NUM_DATA / BATCH / steps)
        fit(
            model,
            posterior,
            Noise(0.0),
            (x, y),
            objective=objective,
            steps=steps,
            batch_size=BATCH,
            lr=first,
            decay=decay,
        )
        return standard_normal_features((theta - posterior.mean) / posterior.scale.detach())

    return mean_test(draw, STANDARD_NORMAL_MEANS, resolution=RESOLUTION, num=4096, max_num=16_384)


def test_24_variational_inference_is_calibrated() -> None:
    assert variational()


CONTROLS = {
    "prior sd doubled": {"prior_factor": 2.0},
    "KL dropped": {"kl_weight": 0.0},
    # B/N of the bound without its N/B: the same optimum as that of sum_b log p_b - KL
    "N/B dropped": {"kl_weight": NUM_DATA / BATCH},
    "KL halved": {"kl_weight": 0.5},
}


@pytest.mark.parametrize("name", CONTROLS)
def test_24_mistakes_fail_calibration(name: str) -> None:
    assert not variational(**CONTROLS[name])


def test_24_dropping_the_data_scale_is_weighting_the_kl() -> None:
    """The control's equivalence, exactly: (B/N) (N/B LL - (N/B) KL) = LL - KL."""
    _, x, y = simulate(3, generator(1))
    model = BayesianModel(Columns(3), Gaussian(SCALE), prior_scale=PRIOR)
    posterior = MeanField(model, init_scale=0.5)
    right, wrong = (
        objective(
            model, posterior, Noise(0.0), x[:BATCH], y[:BATCH], generator=generator(2)
        ).bound.detach()
        for objective in (ChannelELBO(NUM_DATA, kl_weight=NUM_DATA / BATCH), ChannelELBO(BATCH))
    )
    torch.testing.assert_close(right * BATCH / NUM_DATA, wrong, rtol=1e-12, atol=0)


# --- the proactive posterior --------------------------------------------------------------------


def proactive(noise_in_the_model: float, noise: float = 1.2, scale: float = 0.6) -> Verdict:
    """theta given data that passed through the library's channel and likelihood, by quadrature of
    r_theta."""
    grid = torch.linspace(-9 * PRIOR, 9 * PRIOR, 801, dtype=FLOAT)

    def draw(num: int, source: torch.Generator) -> Tensor:
        theta = PRIOR * torch.randn(num, dtype=FLOAT, generator=source)
        x = 1 + 0.5 * torch.randn(2, num, dtype=FLOAT, generator=source)
        predict = BayesianModel(Columns(num), Gaussian(scale)).at(theta)
        prediction = predict(Noise(noise).sample(predict, x, generator=source))
        y = prediction.mean + prediction.stddev * torch.randn(2, num, dtype=FLOAT, generator=source)
        variance = scale**2 + grid**2 * noise_in_the_model**2
        log_p = normal_log_prob(grid, 0.0, PRIOR**2)
        for one_x, one_y in zip(x, y, strict=True):
            # (num, grid)
            log_p = log_p + normal_log_prob(one_y[:, None], grid * one_x[:, None], variance)
        weights = torch.softmax(log_p, 1)
        cumulated = weights.cumsum(1) - 0.5 * weights
        place = ((theta - grid[0]) / (grid[1] - grid[0])).clamp(0, len(grid) - 1.001)
        left = place.long()[:, None]
        share = place - left[:, 0]
        u = torch.lerp(cumulated.gather(1, left)[:, 0], cumulated.gather(1, left + 1)[:, 0], share)
        return uniform_cells(u, 16)

    return mean_test(draw, torch.full((16,), 1 / 16, dtype=FLOAT), resolution=0.004, max_num=2**15)


def test_24_the_proactive_posterior_is_calibrated_under_its_channel() -> None:
    assert proactive(noise_in_the_model=1.2)


def test_24_the_clean_posterior_is_not_calibrated_under_a_channel() -> None:
    assert not proactive(noise_in_the_model=0.0)

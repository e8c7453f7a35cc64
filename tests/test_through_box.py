"""Gradients through projections: exact in and on the box, finite where nothing moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    AttackChannel,
    Ball,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Linf,
    MeanField,
    fit,
    one_step,
    pgd,
)
from tests.oracles import FLOAT, generator, randn

SCALE = torch.tensor([0.5, 1.0, 2.0, 1.0, 3.0, 1.0], dtype=FLOAT)


def corners(num: int, seed: int = 0) -> Tensor:
    """0/1 data: every coordinate on a face of the box."""
    return torch.randint(2, (num, 6), generator=generator(seed)).to(FLOAT)


@pytest.mark.parametrize(
    "ball", [L2(0.9, box=(0, 1)), L2(0.9, box=(0, 1), scale=SCALE), L2(0.9), Linf(0.4, box=(0, 1))]
)
def test_the_gradient_of_a_projection_is_that_of_differences(ball: Ball) -> None:
    """Half of the points lie within the ball, all coordinates of x on faces."""
    x = corners(12)
    size = torch.tensor([0.1, 2.0], dtype=FLOAT).repeat(6).unsqueeze(1)
    point = (x + size * randn(12, 6, seed=3)).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: ball.project(p, x), (point,), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize(
    "ball", [L2(2.0, box=(0, 1)), L2(0.0, box=(0, 1)), L2(2.0), Linf(2.0, box=(0, 1))]
)
@pytest.mark.parametrize("dtype", [torch.float32, FLOAT])
def test_gradients_stay_finite_where_nothing_moves(ball: Ball, dtype: torch.dtype) -> None:
    """No move, a move that the box takes back whole, one that leaves all faces; a direction of
    zeros."""
    x = corners(8).to(dtype)
    for point in (x, x + (2 * x - 1), x + 5 * (2 * x - 1), x - 0.1 * (2 * x - 1), 1 - x):
        leaf = point.clone().requires_grad_()
        for value in (
            ball.project(leaf, x),
            ball.ascend(leaf - point, 1.0),
            ball.ascend(leaf - point, ball.eps),
        ):
            (gradient,) = torch.autograd.grad(value.square().sum() + value.sum(), leaf)
            assert bool(torch.isfinite(gradient).all())


def objective_and_parts(
    dtype: torch.dtype, seed: int
) -> tuple[ChannelELBO, BayesianModel, MeanField, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    model = BayesianModel(net, Categorical())
    y = torch.randint(3, (16,), generator=generator(seed + 1))
    return ChannelELBO(16, through=True), model, MeanField(model), corners(16, seed).to(dtype), y


@pytest.mark.parametrize("seed", range(8))
def test_training_through_an_attack_on_the_faces_skips_no_step(seed: int) -> None:
    for attack in (one_step(L2(2.0, box=(0, 1))), pgd(L2(2.0, box=(0, 1)), steps=4)):
        objective, model, posterior, x, y = objective_and_parts(torch.float32, seed)
        result = fit(
            model, posterior, AttackChannel(attack, 0.1), (x, y), objective=objective, steps=2
        )
        assert result.skipped == 0


def test_the_pathwise_gradient_on_the_faces_is_that_of_differences() -> None:
    objective, model, posterior, x, y = objective_and_parts(FLOAT, 0)
    channel = AttackChannel(pgd(L2(0.7, box=(0, 1)), steps=3), 0.1)

    def bound() -> Tensor:
        return objective(model, posterior, channel, x, y, generator=generator(5)).bound

    (gradient,) = torch.autograd.grad(bound(), posterior.mu)
    for index in range(0, len(posterior.mu), 7):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                posterior.mu[index] += sign * 1e-6
                values.append(float(bound().detach()))
                posterior.mu[index] -= sign * 1e-6
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(
            float(gradient[index]), rel=1e-4, abs=1e-5
        )

"""Bayesian adversarial learning has no posterior (SM-1): its two conditionals, on a 2x2 table, have
no common joint.

theta and the perturbed data each take two values, with losses `loss[theta, data]`. A joint has one
log-odds ratio, and each of its two conditionals has the same one. The learner's is -D and the
adversary's +D.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

LOSS = torch.tensor([[0.3, 1.9], [1.1, 0.2]], dtype=torch.float64)  # [theta, data]
PRIOR = torch.tensor([0.35, 0.65], dtype=torch.float64)
COST = torch.tensor([0.0, 0.8], dtype=torch.float64)  # of perturbing the data
D = float(LOSS[0, 0] + LOSS[1, 1] - LOSS[0, 1] - LOSS[1, 0])


def learner(loss: Tensor = LOSS) -> Tensor:
    """p(theta | data), proportional to exp(-loss) p(theta): columns sum to one."""
    return torch.softmax(PRIOR.log()[:, None] - loss, 0)


def adversary(loss: Tensor = LOSS, sign: float = 1.0, alpha: float = 0.7) -> Tensor:
    """p(data | theta), proportional to exp(+loss - alpha cost): rows sum to one."""
    return torch.softmax(sign * loss - alpha * COST, 1)


def log_odds(table: Tensor) -> float:
    """The log-odds ratio, the same for a joint and for either conditional of it."""
    log = table.log()
    return float(log[0, 0] + log[1, 1] - log[0, 1] - log[1, 0])


def stationary(sweep: Tensor) -> Tensor:
    """The law that a Markov kernel (rows sum to one) leaves alone."""
    power: Tensor = torch.linalg.matrix_power(sweep, 2**12)
    torch.testing.assert_close(power[0], power[1], rtol=1e-12, atol=0)
    return power[0]


def half_sweeps(given_data: Tensor, given_theta: Tensor) -> tuple[Tensor, Tensor]:
    """The Gibbs sampler's stationary joints, seen after theta was drawn and after the data were
    drawn."""
    data = stationary(given_data.T @ given_theta)  # data -> theta -> data
    theta = given_data @ data
    return given_data * data, theta[:, None] * given_theta


def test_a_conditional_keeps_the_log_odds_of_its_joint() -> None:
    joint = torch.tensor([[0.1, 0.4], [0.3, 0.2]], dtype=torch.float64)
    for conditional in (joint / joint.sum(0), joint / joint.sum(1, keepdim=True)):
        assert log_odds(conditional) == pytest.approx(log_odds(joint), rel=1e-12)


def test_the_log_odds_are_minus_d_and_plus_d() -> None:
    assert abs(D) > 1
    assert log_odds(learner()) == pytest.approx(-D, rel=1e-12)
    assert log_odds(adversary()) == pytest.approx(+D, rel=1e-12)


def test_no_choice_of_prior_or_cost_makes_them_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        tilt = torch.randn(2, 2, dtype=torch.float64, generator=generator)
        theta_side = torch.softmax(tilt[0][:, None] - LOSS, 0)
        data_side = torch.softmax(LOSS - tilt[1], 1)
        assert log_odds(theta_side) - log_odds(data_side) == pytest.approx(-2 * D, rel=1e-12)


def test_the_joints_after_the_two_half_sweeps_differ() -> None:
    after_theta, after_data = half_sweeps(learner(), adversary())
    for joint in (after_theta, after_data):
        assert float(joint.sum()) == pytest.approx(1, rel=1e-12)
    # the same margins, as both are the same chain seen at two times, and yet another joint
    torch.testing.assert_close(after_theta.sum(0), after_data.sum(0), rtol=1e-10, atol=0)
    torch.testing.assert_close(after_theta.sum(1), after_data.sum(1), rtol=1e-10, atol=0)
    assert log_odds(after_theta) == pytest.approx(-D, rel=1e-10)
    assert log_odds(after_data) == pytest.approx(+D, rel=1e-10)
    assert float((after_theta - after_data).abs().sum()) > 0.3


@pytest.mark.parametrize("case", ["the adversary helps", "the loss is additive"])
def test_compatible_conditionals_have_one_joint(case: str) -> None:
    """The same code finds no fault where there is none: sign flipped, or losses without interaction
    (D = 0)."""
    additive = torch.tensor([[0.3, 1.9], [1.1, 2.7]], dtype=torch.float64)
    pair = (
        (learner(), adversary(sign=-1))
        if case == "the adversary helps"
        else (learner(additive), adversary(additive))
    )
    after_theta, after_data = half_sweeps(*pair)
    torch.testing.assert_close(after_theta, after_data, rtol=1e-10, atol=1e-14)

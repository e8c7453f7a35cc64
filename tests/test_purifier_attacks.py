"""The attacks that know the purifier, and how far the limit sigma to 0 lets them get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    Gaussian,
    Linf,
    Noise,
    PosteriorPredictive,
    margin,
    nll,
    one_step,
    pgd,
)
from advbayes.attacks import ByLoss
from advbayes.attacks.gradients import loss_and_gradient
from advbayes.attacks.search import Problem
from advbayes.purification import Purifier
from advbayes.purification.attacks import (
    Annealed,
    NearestCentre,
    StraightThrough,
    nearest_centre_radius,
    neighbours,
)
from tests.oracles import FLOAT, randn

# Class 0 where the first coordinate is positive, certain of it.
THETA = torch.tensor([[30.0, 0.0, -30.0, 0.0, 0.0, 0.0]], dtype=FLOAT)


def plane() -> BayesianModel:
    return BayesianModel(nn.Linear(2, 2).to(FLOAT), Categorical())


def crowd(num: int = 200, seed: int = 0) -> Tensor:
    """Points on both sides, at least 0.3 from the boundary."""
    x = randn(num, 2, seed=seed)
    x[:, 0] += 0.3 * x[:, 0].sign()
    return x


def wrong(purifier: Purifier, x: Tensor, y: Tensor) -> Tensor:
    return purifier(x).probs.argmax(1) != y


def test_closed_form_radius_of_two_centres_is_where_the_prediction_flips() -> None:
    reference = torch.tensor([[1.0, 0.0], [-1.0, 0.5]], dtype=FLOAT)
    purifier = Purifier(plane(), Noise(0.01), THETA, reference)
    x, y = torch.tensor([[1.3, 0.4], [0.4, 0.9], [-1.0, 0.4]], dtype=FLOAT), torch.tensor([0, 0, 0])
    radius = nearest_centre_radius(purifier, x, y)
    normal = reference[1] - reference[0]
    middle = reference.mean(0)
    # the distance to the plane between them
    wanted = ((middle - x) @ normal / normal.norm()).clamp_min(0)
    torch.testing.assert_close(radius, wanted, rtol=1e-10, atol=1e-12)
    assert float(radius[2]) == 0.0
    for row in (0, 1):
        for share, flips in ((0.999, False), (1.001, True)):
            attack = NearestCentre(L2(float(radius[row]) * share))
            moved = attack(purifier, x[row : row + 1], y[:1])
            assert bool(wrong(purifier, moved, y[:1])) is flips


@pytest.mark.parametrize("scale", [None, torch.tensor([0.3, 2.0], dtype=FLOAT)])
@pytest.mark.parametrize("kind", [L2, Linf])
def test_two_centres_are_told_apart_by_the_nearest_point_of_any_ball(
    kind: type[L2 | Linf], scale: Tensor | None
) -> None:
    """The plane between the centres is dual_norm(scale normal) away: there is the least eps."""
    reference = torch.tensor([[1.0, 0.0], [-1.0, 0.7]], dtype=FLOAT)
    purifier = Purifier(plane(), Noise(0.01), THETA, reference)
    x, y = torch.tensor([[1.3, 0.4]], dtype=FLOAT), torch.tensor([0])
    normal = reference[1] - reference[0]
    stretched = normal if scale is None else normal * scale
    reach = torch.linalg.vector_norm(stretched, 2 if kind is L2 else 1)
    eps = float((reference.mean(0) - x[0]) @ normal / reach)
    for share, flips in ((0.999, False), (1.001, True)):
        moved = NearestCentre(kind(eps * share, scale=scale))(purifier, x, y)
        assert bool(wrong(purifier, moved, y)) is flips


@pytest.mark.parametrize(
    "kept", [{"mask": torch.tensor([True, False, False])}, {"indicators": ((1, 2, -1.0),)}]
)
@pytest.mark.parametrize("kind", [L2, Linf])
def test_the_budget_goes_to_what_may_move(kind: type[L2 | Linf], kept: dict[str, Any]) -> None:
    """Only feature 0 may move, and x is far from all centres in feature 1: straight at the centre
    of the other class, between two of its own, is within the budget all the same."""
    model = BayesianModel(nn.Linear(3, 2).to(FLOAT), Categorical())
    theta = torch.tensor([[0.0, 0.0, 50.0, 0.0, 0.0, -50.0, 0.0, 0.0]], dtype=FLOAT)
    reference = torch.tensor([[0.0, 0.0, 0.1], [1.0, 0.0, -0.1], [2.0, 0.0, 0.1]], dtype=FLOAT)
    purifier = Purifier(model, Noise(0.05), theta, reference)
    x, y = torch.tensor([[0.2, 9.0, 0.0]], dtype=FLOAT), torch.tensor([0])
    assert not bool(wrong(purifier, x, y))
    assert bool(wrong(purifier, NearestCentre(kind(1.5, **kept))(purifier, x, y), y))


def test_no_attack_succeeds_within_the_closed_form_radius() -> None:
    reference = crowd()
    purifier = Purifier(plane(), Noise(1e-3), THETA, reference)
    x = crowd(40, seed=1)
    y = (x[:, 0] < 0).long()
    right = ~wrong(purifier, x, y)
    radius = nearest_centre_radius(purifier, x, y)
    assert bool((radius[right] > 0).all())
    directions = torch.nn.functional.normalize(randn(500, 1, 2, seed=2), dim=-1)
    for direction in directions:
        moved = x + 0.999 * radius.unsqueeze(1) * direction
        assert not bool((wrong(purifier, moved, y) & right).any())
    # The bound is no empty one: given all centres of the class, a little farther there mostly is an
    # attack.
    tight = nearest_centre_radius(purifier, x, y, num=len(reference))
    broken = torch.stack(
        [wrong(purifier, x + 1.1 * tight.unsqueeze(1) * d, y) for d in directions]
    ).any(0)
    assert float(broken[right].double().mean()) > 0.5
    assert bool((radius <= tight + 1e-12).all())


def test_saturated_weights_hide_from_plain_ascent_but_not_from_these() -> None:
    reference = crowd(400)
    purifier = Purifier(
        BayesianModel(nn.Linear(2, 2), Categorical()),
        Noise(0.005),
        THETA.float(),
        reference.float(),
    )
    x = crowd(60, seed=3).float()
    y = (x[:, 0] < 0).long()
    ball = L2(1.0)
    right = ~wrong(purifier, x, y)
    attacks = {
        "plain": pgd(ball, steps=20),
        "nearest": NearestCentre(ball),
        "annealed": Annealed(ball, start=NearestCentre(ball)),
    }
    left = {
        name: float((~wrong(purifier, attack(purifier, x, y), y) & right).double().mean())
        for name, attack in attacks.items()
    }
    assert left["annealed"] <= left["nearest"] < left["plain"] - 0.1
    # All of the disc, point by point: what the strongest attack would leave.
    angles, radii = torch.linspace(0, 6.2832, 60), torch.linspace(0.05, 1.0, 15)
    steps = torch.stack(
        [torch.outer(radii, angles.cos()), torch.outer(radii, angles.sin())], -1
    ).view(-1, 2)
    truth = float(
        (~torch.stack([wrong(purifier, x + step, y) for step in steps]).any(0) & right)
        .double()
        .mean()
    )
    assert truth <= left["annealed"] <= truth + 0.05


@pytest.mark.parametrize("ball", [L2(0.8), Linf(0.5), L2(0.8, box=(-0.5, 4.0)), L2(0.0)], ids=str)
def test_points_stay_in_the_ball_and_are_never_worse(ball: L2) -> None:
    reference = crowd()
    thetas = THETA.repeat(2, 1) + 0.3 * randn(2, 6, seed=4)
    for channel in (Noise(0.1), AttackChannel(one_step(L2(0.3)), 0.1)):
        purifier = Purifier(plane(), channel, thetas, reference)
        x = crowd(20, seed=5).clamp(-0.5, 4.0)
        y = (x[:, 0] < 0).long()
        before = margin(purifier(x), y)
        for attack in (
            NearestCentre(ball),
            Annealed(ball, steps=4),
            Annealed(ball, steps=4, start=NearestCentre(ball)),
        ):
            moved = attack(purifier, x, y)
            assert bool(ball.contains(moved, x).all())
            assert bool((margin(purifier(moved), y) >= before - 1e-9).all())
            assert torch.equal(moved, attack(purifier, x, y))
            assert attack(purifier, x).shape == x.shape


def test_straight_through_is_the_base_s_gradient_at_the_denoised_point() -> None:
    reference = crowd()
    thetas = 0.05 * THETA + 0.3 * randn(3, 6, seed=4)
    purifier = Purifier(plane(), Noise(0.3), thetas, reference)
    x = crowd(10, seed=5)
    y = torch.zeros(10, dtype=torch.int64)
    weights = Noise(0.3).density(None, reference).log_prob(x).softmax(0)  # type: ignore[arg-type]
    torch.testing.assert_close(purifier.denoise(x), weights.T @ reference, rtol=1e-10, atol=1e-12)
    value, broken, gradient = loss_and_gradient(StraightThrough(purifier), margin, x, y)
    torch.testing.assert_close(value, margin(purifier(x), y))
    assert torch.equal(broken, purifier(x).probs.argmax(1) != y)
    base = PosteriorPredictive(plane(), thetas)
    torch.testing.assert_close(gradient, loss_and_gradient(base, margin, purifier.denoise(x), y)[2])


def test_neighbours_know_their_classes() -> None:
    reference = crowd()
    purifier = Purifier(plane(), Noise(0.2), THETA, reference)
    x = crowd(10, seed=6)
    y = (x[:, 0] < 0).long()
    own, others = neighbours(purifier, x, y, 3)
    distance = torch.cdist(x, reference)
    same = (reference[:, 0] < 0).long() == y.unsqueeze(1)
    torch.testing.assert_close(
        own[:, 0], reference[distance.masked_fill(~same, 1e9).argmin(1)], rtol=0, atol=1e-12
    )
    wanted = reference[distance.masked_fill(same, 1e9).topk(3, largest=False).indices]
    torch.testing.assert_close(others, wanted, rtol=0, atol=1e-12)


def test_steps_are_long_from_x_alone_and_otherwise_a_share_of_eps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one of all goes to the edge, 2.5 eps / steps are the others', from each start and
    through each width."""
    lengths: list[float] = []
    original = Problem.move

    def move(self: Problem, point: Tensor, gradient: Tensor, step: float) -> Tensor:
        lengths.append(float(step))
        return original(self, point, gradient, step)

    monkeypatch.setattr(Problem, "move", move)
    purifier = Purifier(plane(), Noise(0.3), THETA, crowd())
    attack = Annealed(L2(0.1), (2.0, 1.0), steps=5, loss=ByLoss(nll), start=one_step(L2(0.1)))
    attack(purifier, crowd(4, seed=7), torch.zeros(4, dtype=torch.long))
    here = [length for length in lengths if length != 0.1]
    assert lengths[-20:] == pytest.approx([0.1, *[0.05] * 19])
    assert here == pytest.approx([0.05] * 19)


def test_annealed_attacks_regressions_too() -> None:
    model = BayesianModel(nn.Linear(2, 1).to(FLOAT), Gaussian(0.3))
    purifier = Purifier(model, Noise(0.3), randn(3, 3), crowd())
    x, y = crowd(6, seed=7), randn(6, seed=8)
    moved = Annealed(L2(0.5), steps=5)(purifier, x, y)
    assert bool((purifier(moved).log_prob(y) < purifier(x).log_prob(y)).all())


def test_bad_arguments_are_named() -> None:
    purifier = Purifier(plane(), Noise(0.2), THETA.repeat(2, 1), crowd(), "offline")
    x, y = crowd(3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(TypeError, match="predict must be a Purifier"):
        NearestCentre(L2(1.0))(lambda x: purifier(x), x, y)
    with pytest.raises(ValueError, match="factors must end with 1"):
        Annealed(L2(1.0), factors=(4.0, 2.0))
    with pytest.raises(ValueError, match="steps must be"):
        Annealed(L2(1.0), steps=0)
    attacked = Purifier(
        plane(), AttackChannel(one_step(L2(0.3)), 0.1), THETA.repeat(2, 1), crowd(), "offline"
    )
    with pytest.raises(ValueError, match="update='online'"):
        nearest_centre_radius(attacked, x, y)
    regression = Purifier(
        BayesianModel(nn.Linear(2, 1).to(FLOAT), Gaussian(0.3)), Noise(0.3), randn(3, 3), crowd()
    )
    with pytest.raises(ValueError, match="for classification"):
        nearest_centre_radius(regression, x, y)


@pytest.mark.parametrize("make", [Annealed, NearestCentre])
def test_what_is_no_ball_is_named(make: type[Annealed] | type[NearestCentre]) -> None:
    with pytest.raises(TypeError, match="ball must be a ball such as L2"):
        make(0.3)  # type: ignore[arg-type]

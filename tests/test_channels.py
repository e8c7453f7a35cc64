"""Channels: which component, label, loss entry and start each example meets."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Gaussian,
    Learned,
    MarginTo,
    Mixture,
    Noise,
    Purifier,
    Square,
    entropy,
    eps_prior,
    lower_mean,
    margin,
    nll,
    one_step,
    pgd,
    raise_mean,
)
from advbayes.accelerated.draws import Draws, draws, sample_at
from advbayes.channels import components, learned_in
from advbayes.types import Channel, Predictor
from tests.oracles import FLOAT, generator, randn

SLOPE = torch.tensor([3.0, 0.0, 4.0], dtype=FLOAT)


def line(x: Tensor) -> torch.distributions.Normal:
    return torch.distributions.Normal(x @ SLOPE, torch.full((len(x),), 0.5, dtype=x.dtype))


def bent(x: Tensor) -> torch.distributions.Normal:
    return torch.distributions.Normal((x @ SLOPE).sin(), torch.sigmoid(x[:, 1]))


def classes(x: Tensor) -> CategoricalDistribution:
    weight = randn(3, 4, seed=2)
    return CategoricalDistribution(logits=x @ weight + (x @ weight).square(), validate_args=False)


# --- Components ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_components_that_share_a_pass_need_not_be_neighbours(
    stratified: bool, compiled: bool
) -> None:
    """Up, stay, down, stay: shares 0.2, 0.3, 0.4, 0.1 whatever is computed together."""
    if compiled and not stratified:
        return
    channels = [
        AttackChannel(one_step(L2(1.0), raise_mean)),
        Noise(0.0),
        AttackChannel(one_step(L2(1.0), lower_mean)),
        Noise(0.0),
    ]
    channel = Mixture([0.2, 0.3, 0.4, 0.1], channels, stratified=stratified)
    num = 40 if stratified else 4000
    x = randn(num, 3)
    if compiled:
        drawn = draws(channel, x, generator=generator(3))
        assert isinstance(drawn, Draws)
        x = x[drawn.order]
        moved = sample_at(channel, drawn, line, x, line(x).mean) - x
    else:
        moved = channel.sample(line, x, line(x).mean, generator=generator(3)) - x
    height = (moved @ SLOPE / 5.0).round()
    counts = [int((height == side).sum()) for side in (1, -1, 0)]
    if stratified:
        assert counts == [8, 16, 16]
    else:
        for count, share in zip(counts, (0.2, 0.4, 0.4), strict=True):
            assert abs(count - num * share) < 5 * math.sqrt(num * share * (1 - share))


def test_weights_follow_their_components_into_the_density() -> None:
    channels = [
        AttackChannel(one_step(L2(1.0), raise_mean), 0.1),
        Noise(0.2),
        AttackChannel(one_step(L2(1.0), lower_mean), 0.1),
    ]
    x = randn(2, 3)
    density = Mixture([0.2, 0.5, 0.3], channels).density(line, x, line(x).mean)
    heights = [float(((centres - x) @ SLOPE / 5.0)[0].round()) for centres in density.centres]
    assert heights == [1, 0, -1]
    assert [math.exp(weight) for weight in density.log_weights] == pytest.approx([0.2, 0.5, 0.3])
    assert density.scales == (0.1, 0.2, 0.1)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_entries_of_losses_go_where_their_examples_go(steps: int, nested: bool) -> None:
    """Each example of a mixture moves as in a batch that one component has for itself."""
    x, y = randn(24, 3), torch.zeros(24, dtype=torch.long)
    goal = torch.randint(1, 4, (24,), generator=generator(1))
    parts: list[Channel] = [
        AttackChannel(pgd(L2(0.3), steps, MarginTo(to))) for to in (goal, goal % 3 + 1)
    ]
    alone = torch.stack([x, *(part.sample(classes, x, y) for part in parts)])
    channel = Mixture([1 / 3] * 3, [Noise(0.0), *parts])
    if nested:
        channel = Mixture([1 / 3, 2 / 3], [Noise(0.0), Mixture([0.5, 0.5], parts)])
    assert draws(channel, x) is None
    for seed in range(3):
        moved = channel.sample(classes, x, y, generator=generator(seed))
        which = (moved - alone).abs().amax(2)
        assert bool((which.amin(0) < 1e-12).all())
        assert torch.bincount(which.argmin(0), minlength=3).tolist() == [8, 8, 8]


class ByLabel(nn.Module):
    """A shift that depends on the label alone."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return 0.3 * torch.sin(1.0 + y.to(x.dtype)).unsqueeze(1).expand_as(x), torch.zeros_like(x)


TINY = 1e-7
LEARNED = Learned(ByLabel(), L2(1.0), (TINY, TINY))
STEP = AttackChannel(one_step(L2(0.5)), TINY)


@pytest.mark.parametrize(
    "channel",
    [
        LEARNED,
        AttackChannel(pgd(L2(0.5), 3), TINY),
        Mixture([0.3, 0.2, 0.5], [Noise(TINY), LEARNED, AttackChannel(one_step(L2(0.4)), TINY)]),
        Mixture([0.4, 0.6], [STEP, Mixture([0.2, 0.8], [LEARNED, Noise(2 * TINY)])], False),
        eps_prior(one_step(L2(1.0, scale=torch.tensor([1.0, 2.0, 0.5]))), [0.2, 0.4, 0.9], TINY),
    ],
    ids=["learned", "attack", "mixture", "nested, iid", "eps prior"],
)
@pytest.mark.parametrize("predict", [bent, classes])
@pytest.mark.parametrize("labelled", [True, False])
def test_samples_lie_where_the_density_has_its_centres(
    channel: Channel, predict: Predictor, labelled: bool
) -> None:
    """As often as their weights say, with labels and without."""
    x = randn(400, 3)
    y = None
    if labelled:
        y = torch.arange(400) % 4 if predict is classes else x[:, 0] - 1
    density = channel.density(predict, x, y)
    moved = channel.sample(predict, x, y, generator=generator(0))
    away = (torch.stack(density.centres) - moved).norm(dim=2)
    assert float(away.amin(0).max()) < 20 * TINY
    counts = torch.bincount(away.argmin(0), minlength=len(away))
    for count, log_weight in zip(counts.tolist(), density.log_weights, strict=True):
        share = math.exp(log_weight)
        assert abs(count - 400 * share) <= 5 * math.sqrt(400 * share * (1 - share))


def test_a_learned_channel_in_two_places_is_one_adversary() -> None:
    other = Learned(ByLabel(), L2(1.0))
    nested = Mixture([0.3, 0.3, 0.4], [LEARNED, other, Mixture([0.5, 0.5], [LEARNED, Noise()])])
    assert learned_in(nested) == [LEARNED, other]
    assert len(list(components(nested))) == 4
    assert learned_in(LEARNED) == [LEARNED]


# --- Labels -------------------------------------------------------------------------------------


def test_a_regression_without_labels_is_attacked_from_both_sides() -> None:
    """At its own mean a regression has no gradient: y = mean + sd or mean - sd, each for half of
    the draws."""
    x = randn(3, 3)
    step = SLOPE / 5.0
    channel = AttackChannel(one_step(L2(0.7)), 0.1)
    density = channel.density(line, x)
    assert [math.exp(weight) for weight in density.log_weights] == pytest.approx([0.5, 0.5])
    torch.testing.assert_close(density.centres[0], x - 0.7 * step)  # y above the mean: away is down
    torch.testing.assert_close(density.centres[1], x + 0.7 * step)
    for drawing in (
        AttackChannel(one_step(L2(0.7))),
        Mixture([0.0, 1.0], [Noise(), AttackChannel(one_step(L2(0.7)))]),
    ):
        moved = drawing.sample(line, x[:1].expand(1000, -1), generator=generator(1)) - x[:1]
        torch.testing.assert_close(moved.abs(), (0.7 * step).expand(1000, -1))
        assert abs(int((moved[:, 0] > 0).sum()) - 500) < 5 * math.sqrt(250)


def test_several_outputs_without_labels() -> None:
    model = BayesianModel(nn.Linear(3, 2).to(FLOAT), Gaussian(0.5, num_outputs=2))
    predict, x = model.at(model.initial_theta()), randn(5, 3)
    channel = AttackChannel(one_step(L2(0.7)), 0.1)
    up, down = channel.density(predict, x).centres
    torch.testing.assert_close(up - x, x - down)
    assert bool(((up - x).norm(dim=1) > 0.69).all())
    assert channel.sample(predict, x, generator=generator(0)).shape == x.shape


def test_a_purifier_without_labels_is_not_a_purifier_by_noise() -> None:
    model = BayesianModel(nn.Linear(3, 1).to(FLOAT), Gaussian(0.5))
    thetas, x = model.initial_theta() + 0.1 * randn(4, model.num_params), randn(20, 3)
    at = x[:5] + 0.5
    attacked = Purifier(model, AttackChannel(one_step(L2(0.7)), 0.3), thetas, x)
    noisy = Purifier(model, Noise(0.3), thetas, x)
    assert float((attacked(at).mean - noisy(at).mean).abs().max()) > 1e-3


# --- Starts -------------------------------------------------------------------------------------


def constant(x: Tensor) -> CategoricalDistribution:
    """No gradient at the data, a peak beside them."""
    return CategoricalDistribution(
        logits=torch.stack([0.0 * x[:, 0], 0.0 * x[:, 0]], 1), validate_args=False
    )


@pytest.mark.parametrize(
    "attack", [pgd(L2(0.5), 4), pgd(L2(0.5, box=(-9, 9)), 4, restarts=2), pgd(L2(0.5), 4, margin)]
)
def test_a_start_without_gradient_is_the_same_in_every_batch(attack: object) -> None:
    x, y = randn(6, 3), torch.zeros(6, dtype=torch.long)
    channel = AttackChannel(attack, 0.1)  # type: ignore[arg-type]
    whole = channel.density(constant, x, y).centres[0]
    assert bool(((whole - x).norm(dim=1) > 0.01).all())  # it does leave x
    torch.testing.assert_close(channel.density(constant, x[3:5], y[3:5]).centres[0], whole[3:5])
    for seed in (0, 1):
        torch.testing.assert_close(
            channel.centre(constant, x[2:], y[2:], generator=generator(seed)), whole[2:]
        )


def test_an_attack_that_is_random_throughout_has_samples_and_no_density() -> None:
    x = randn(6, 3)
    y = classes(x).probs.argmax(1)  # nothing is broken before the attack begins
    for attack in (Square(L2(0.5), queries=5), pgd(L2(0.5), 2, restarts=4)):
        channel = AttackChannel(attack, 0.1)
        with pytest.raises(ValueError, match="has no density: its attack is random throughout"):
            channel.density(classes, x, y)
        first, second = (
            channel.centre(classes, x, y, generator=generator(seed)) for seed in (0, 0)
        )
        assert torch.equal(first, second)


def test_deterministic_attacks_draw_nothing_but_the_noise() -> None:
    """One-step channels in eager code and in a compiled step see the same noise."""
    x, y = randn(6, 3), torch.zeros(6, dtype=torch.long)
    channel = AttackChannel(one_step(L2(0.5), entropy), 0.1)
    predict: Predictor = classes
    drawn = draws(channel, x, generator=generator(4))
    assert drawn is not None
    torch.testing.assert_close(
        channel.sample(predict, x, y, generator=generator(4)),
        sample_at(channel, drawn, predict, x, y),
    )
    torch.testing.assert_close(
        channel.density(predict, x, y).centres[0], one_step(L2(0.5), entropy)(predict, x, y)
    )
    assert nll(predict(x), y).shape == (6,)


@pytest.mark.parametrize(("off", "accepted"), [(0.0, True), (9e-7, True), (1.1e-6, False)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_weights_sum_to_one_but_for_rounding(off: float, sign: int, accepted: bool) -> None:
    """And are then exactly in their proportions."""
    weights = (0.25, 0.75 + sign * off)
    if not accepted:
        with pytest.raises(ValueError, match="sum to 1"):
            Mixture(weights, [Noise(0.1), Noise(0.2)])
        return
    kept = Mixture(weights, [Noise(0.1), Noise(0.2)]).weights
    assert sum(kept) == pytest.approx(1, abs=1e-15)
    assert kept[1] / kept[0] == pytest.approx(weights[1] / weights[0], rel=1e-12)

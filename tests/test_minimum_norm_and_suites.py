"""The robust radius in a box and among many classes; suites and transfer of attacks that want
something else than to leave y."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, Independent, Normal

from advbayes import L2, Linf, entropy, margin, nll, one_step, pgd, raise_mean, squared_error
from advbayes.attacks import (
    APGD,
    ByLoss,
    DivergenceFrom,
    Exceeding,
    MarginTo,
    MinimumNorm,
    PerExample,
    RandomSearch,
    Suite,
    Toward,
    Transfer,
    certainty,
    default_attacks,
    losses_of,
    strong_suite,
)
from advbayes.types import Attack, Loss, Predictor


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labels(predict: Predictor, x: Tensor) -> Tensor:
    prediction = predict(x)
    assert isinstance(prediction, CategoricalDistribution)
    return prediction.logits.argmax(1)


def linear(weight: Tensor) -> Predictor:  # (C, D)
    return lambda x: CategoricalDistribution(logits=x @ weight.T)


# --- The radius in a box ------------------------------------------------------------------------


def halfspace(
    seed: int, dtype: torch.dtype, num: int = 1000
) -> tuple[Predictor, Tensor, Tensor, Tensor]:
    """Two classes apart by a plane through the middle of the unit box; also the way towards it, (N,
    D)."""
    generator = seeded(seed)
    weight = torch.randn(20, dtype=dtype, generator=generator)
    x = torch.rand(num, 20, dtype=dtype, generator=generator)
    predict: Predictor = lambda z: CategoricalDistribution(  # noqa: E731
        logits=torch.stack([(z - 0.5) @ weight, (0.5 - z) @ weight], 1)
    )
    return predict, x, labels(predict, x), -((x - 0.5) @ weight).sign().unsqueeze(1) * weight


def nearest_in_box(x: Tensor, way: Tensor, ball: L2 | Linf) -> Tensor:
    """The norm of the least change that brings x in the box to the plane: clip(t way) for L2,
    clip(t sign(way)) for Linf."""
    x, way = x.double(), way.double()
    step = way if isinstance(ball, L2) else way.sign()
    low, high = (
        torch.zeros(len(x), 1, dtype=torch.float64),
        torch.full((len(x), 1), 1e4, dtype=torch.float64),
    )
    for _ in range(100):
        middle = (low + high) / 2
        beyond = (((x + middle * step).clamp(0, 1) - 0.5) * way).sum(1, keepdim=True) > 0
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return ball.norm((x + high * step).clamp(0, 1) - x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_in_a_box_every_radius_is_found_and_exact(seed: int, dtype: torch.dtype) -> None:
    predict, x, y, way = halfspace(seed, dtype)
    ball = L2(9.0, box=(0, 1))
    found = MinimumNorm(ball).radius(predict, x, y)
    assert bool(found.isfinite().all())
    exact = nearest_in_box(x, way, ball)
    inexact = 1e-9 if dtype is torch.float64 else 1e-3
    far = exact > 1e-3  # nearer than that float32 itself is inexact
    assert bool((found >= exact * (1 - inexact))[far].all())
    assert bool((found <= exact * 1.001)[far].all())


def test_in_a_box_the_largest_change_is_exact_too() -> None:
    predict, x, y, way = halfspace(5, torch.float64, num=300)
    ball = Linf(0.9, box=(0, 1))
    torch.testing.assert_close(
        MinimumNorm(ball).radius(predict, x, y), nearest_in_box(x, way, ball), rtol=2e-3, atol=0
    )


def test_a_search_that_stops_short_is_followed_by_the_whole_ball() -> None:
    """Three steps break nothing on a loss that bends away from the guess, yet the whole budget
    does, and is brought back."""
    predict: Predictor = lambda x: CategoricalDistribution(  # noqa: E731
        logits=torch.stack([torch.zeros(len(x)), (1 - (-x[:, 0]).exp()) * 10 - 9.999], 1)
    )
    x = torch.zeros(4, 1)
    assert bool(
        (labels(predict, pgd(L2(50.0), 3)(predict, x, torch.zeros(4, dtype=torch.long))) == 1).all()
    )
    found = MinimumNorm(L2(50.0), steps=3).radius(predict, x, torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(found, torch.full_like(found, 9.2103), rtol=0.02, atol=0)


# --- Many classes, and what can break at all ----------------------------------------------------


def test_the_default_tries_every_class_of_a_few() -> None:
    """With classes of unequal slope the nearest boundary is often that of an unlikely class."""
    generator = seeded()
    slope = torch.tensor([0.3, 1.0, 2.0, 0.5, 3.0], dtype=torch.float64).unsqueeze(1)
    weight = torch.randn(5, 8, dtype=torch.float64, generator=generator) * slope
    bias = torch.randn(5, dtype=torch.float64, generator=generator)
    predict: Predictor = lambda x: CategoricalDistribution(logits=x @ weight.T + bias)  # noqa: E731
    x = torch.randn(400, 8, dtype=torch.float64, generator=generator)
    y, logits = labels(predict, x), x @ weight.T + bias
    to_each = (logits.gather(1, y.unsqueeze(1)) - logits) / (
        weight.unsqueeze(0) - weight[y].unsqueeze(1)
    ).norm(dim=2)
    exact = to_each.scatter(1, y.unsqueeze(1), torch.inf).amin(1)
    torch.testing.assert_close(
        MinimumNorm(L2(100.0)).radius(predict, x, y), exact, rtol=1e-3, atol=0
    )


@pytest.mark.parametrize(
    "loss", [squared_error, nll, ByLoss(squared_error), Toward(nll), DivergenceFrom(0.0, 1.0)]
)
def test_a_radius_in_regression_needs_a_loss_that_says_what_broken_means(loss: Loss) -> None:
    with pytest.raises(
        TypeError, match=r"loss must say when an example is broken, such as Exceeding"
    ):
        MinimumNorm(L2(9.0), loss, steps=3).radius(
            lambda x: Normal(x[:, 0], 1.0), torch.ones(3, 1), torch.ones(3)
        )


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("y", [0.01, -0.01])
@pytest.mark.parametrize("make", [L2, Linf])
def test_a_radius_in_regression_is_that_of_the_nearer_side_of_y(
    make: type[L2 | Linf], y: float, outputs: int
) -> None:
    """The prediction rises slowly and falls fast; an ascent from x goes up where it is above y."""

    def predict(x: Tensor) -> Distribution:
        steep = torch.where(x[:, :1] > 0, 0.2 * x[:, :1], 3 * x[:, :1])
        mean = steep if outputs == 1 else torch.cat([x[:, 1:] * 1e-3, steep], 1)
        return Independent(Normal(mean, 1.0), 1)

    x, target = torch.zeros(1, 2), torch.full((1, outputs), y)
    for eps in (2.0, 20.0):  # on one side alone, and on both
        attack = MinimumNorm(make(eps), Exceeding(squared_error, 1.0))
        radius = attack.radius(predict, x, target, generator=seeded())
        assert float(radius) == pytest.approx((1 - y) / 3, rel=1e-2)


def test_a_radius_of_classes_needs_one_too() -> None:
    predict = linear(torch.eye(2))
    with pytest.raises(TypeError, match="loss must say when an example is broken"):
        MinimumNorm(L2(9.0), ByLoss(certainty), steps=3).radius(
            predict, torch.ones(3, 2), torch.zeros(3, dtype=torch.long)
        )
    found = MinimumNorm(L2(9.0), Toward(margin)).radius(
        predict, torch.tensor([[2.0, 0.0]]), torch.tensor([1])
    )
    torch.testing.assert_close(found, torch.tensor([2**0.5]), rtol=1e-3, atol=0)


# --- Targeted attacks within attacks ------------------------------------------------------------

WEIGHT = torch.randn(3, 4, generator=seeded(1))
X = torch.randn(100, 4, generator=seeded(2))
PREDICT = linear(WEIGHT)
Y = labels(PREDICT, X)
TARGET = (Y + 1) % 3
TARGETED = pgd(L2(3.0), 50, Toward(nll))


@pytest.mark.parametrize(
    "attack",
    [
        Suite((TARGETED,)),
        Suite((one_step(L2(3.0), Toward(nll)), TARGETED, APGD(L2(3.0), Toward(margin), 20))),
        Transfer(TARGETED, (PREDICT,)),
        Transfer(Suite((TARGETED,)), (PREDICT,)),
        Suite((Transfer(TARGETED, (PREDICT,)), TARGETED)),
        Suite((pgd(L2(3.0), 50, ByLoss(Toward(nll))),)),
        Suite((TARGETED,), rank=Toward(margin)),
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_targeted_parts_reach_their_target(attack: Attack) -> None:
    alone = (labels(PREDICT, TARGETED(PREDICT, X, TARGET)) == TARGET).float().mean()
    reached = (labels(PREDICT, attack(PREDICT, X, TARGET)) == TARGET).float().mean()
    assert float(alone) > 0.9
    if isinstance(losses_of(attack)[0], ByLoss):
        # the likelihood counts, not the class
        points = (each(PREDICT, X, TARGET) for each in (attack, TARGETED))
        ours, theirs = (float(PREDICT(x_adv).log_prob(TARGET).mean()) for x_adv in points)
        assert ours >= theirs
        return
    assert float(reached) >= float(alone)


def test_points_and_radii_come_without_history() -> None:
    x = X.clone().requires_grad_()
    for attack in (Suite((TARGETED,)), Transfer(TARGETED, (PREDICT,))):
        assert not attack(PREDICT, x, TARGET).requires_grad
    assert not MinimumNorm(L2(3.0), steps=3).radius(PREDICT, x, Y).requires_grad


def test_a_given_rank_wins() -> None:
    """By the likelihood of y alone a point that goes towards y is worse than none."""
    assert torch.equal(Suite((TARGETED,), rank=nll)(PREDICT, X, TARGET), X)
    assert torch.equal(Transfer(TARGETED, (PREDICT,), rank=nll)(PREDICT, X, TARGET), X)


def test_in_regression_the_largest_error_is_kept() -> None:
    """The least likely point of a scale that depends on x is another one: kept in its place, an
    RMSE under the suite is below that of the suite's own members."""

    def predict(x: Tensor) -> Distribution:
        return Normal(x[:, 0], (-0.8 * x[:, 0]).exp())  # larger errors below, likelier there

    x, y = torch.zeros(5, 2), torch.linspace(0.02, 0.1, 5)
    ball = L2(1.0)
    members = default_attacks(ball, "regression", steps=10).values()
    suites = (strong_suite(ball, steps=10, queries=5), Suite(tuple(members)))
    above, below = (lambda x, k=k: Normal(x[:, 0] + k, 1.0) for k in (1, -1))
    moved = Transfer(pgd(ball, 10, squared_error), (above, below))
    for attack in (*suites, moved):
        prediction = predict(attack(predict, x, y, generator=seeded(0)))
        assert torch.allclose(squared_error(prediction, y), (1 + y).square(), rtol=1e-3)
    least = Suite(tuple(members), rank=nll)(predict, x, y, generator=seeded(0))
    alone = pgd(ball, 10, nll)(predict, x, y)
    assert bool((nll(predict(least), y) >= nll(predict(alone), y) - 1e-5).all())


def test_targeted_and_untargeted_attacks_do_not_mix_unless_rank_decides() -> None:
    untargeted = pgd(L2(3.0), 5)
    for parts in ((TARGETED, untargeted), (untargeted, Transfer(TARGETED, (PREDICT,)))):
        with pytest.raises(ValueError, match="attacks must be all targeted or all untargeted"):
            Suite(parts)
        Suite(parts, rank=nll)
    with pytest.raises(ValueError, match="regression must be all targeted or all untargeted"):
        Suite((untargeted,), regression=(untargeted, TARGETED))
    with pytest.raises(ValueError, match="all targeted or all untargeted"):
        strong_suite(L2(1.0), others=(TARGETED,))


def test_a_suite_moves_towards_a_distribution_and_a_score() -> None:
    wish = DivergenceFrom(torch.tensor([0.2, 0.3, 0.5]))
    for loss in (wish, ByLoss(entropy), ByLoss(certainty)):
        attack = pgd(L2(3.0), 50, loss)
        alone, within = (
            loss(PREDICT(a(PREDICT, X, Y)), Y)
            for a in (attack, Suite((attack, pgd(L2(3.0), 5, loss))))
        )
        assert bool((within >= alone - 1e-5).all())
    # too small to break much: the most certain point, not the least likely y
    trust = pgd(L2(0.1), 20, certainty)
    torch.testing.assert_close(Suite((trust,))(PREDICT, X, Y), trust(PREDICT, X, Y))


def test_the_largest_error_and_the_least_likely_point_are_two_attacks() -> None:
    """Where the scale falls the density falls faster than the error grows: mean x1, scale least at
    x2 = -0.5."""

    def predict(x: Tensor) -> Distribution:
        scale = 0.05 + (x[:, 1:] + 0.5).square()
        return Independent(Normal(x[:, :1], scale), 1)

    x, y = torch.zeros(3, 2), torch.full((3, 1), 0.2)
    at: dict[str, Distribution] = {}
    for error in (squared_error, nll):
        suite = strong_suite(L2(1.0), steps=30, queries=100, error=error)
        at[error.__name__] = predict(suite(predict, x, y))
    assert torch.allclose(squared_error(at["squared_error"], y), torch.tensor(1.44), rtol=1e-3)
    assert (squared_error(at["nll"], y) < 1.2).all()
    assert (nll(at["nll"], y) > 20 * nll(at["squared_error"], y)).all()


def test_a_suite_in_regression_goes_where_its_attacks_go() -> None:
    predict: Predictor = lambda x: Normal(x[:, 0], 1.0)  # noqa: E731
    x, above, ball = torch.zeros(3, 1), torch.full((3,), 5.0), L2(1.0)
    for loss in (Toward(nll), Toward(squared_error), raise_mean):
        for attack in (Suite((pgd(ball, 5, loss),)), Transfer(pgd(ball, 5, loss), (predict,))):
            torch.testing.assert_close(attack(predict, x, above), torch.ones(3, 1))
    for parts in (
        (pgd(ball, 5), pgd(ball, 5, squared_error)),
        (lambda predict, x, y=None, *, generator=None: x - 1,),
    ):
        torch.testing.assert_close(Suite(parts)(predict, x, above), -torch.ones(3, 1))
    # Classes and regression have their own attacks, and each follows its own.
    both = Suite((pgd(ball, 5),), regression=(pgd(ball, 5, Toward(nll)),))
    torch.testing.assert_close(both(predict, x, above), torch.ones(3, 1))


# --- Losses with an entry for each example ------------------------------------------------------


def half_broken(
    predict: Predictor,
    x: Tensor,
    y: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Breaks every other example of 100 by brute force."""
    assert y is not None
    far = x.clone()
    far[::2] = 100 * (WEIGHT[(y + 1) % 3] - WEIGHT[y])[::2]
    return far


@pytest.mark.parametrize(
    "kind", ["margin_to", "apgd", "per_example", "random", "transfer", "suite"]
)
def test_later_attacks_see_the_entries_of_their_own_rows(kind: str) -> None:
    """What the later attack does to the rows that are left is what it does to them alone, with
    their own entries."""
    ball, second = L2(0.3), torch.randint(3, (100,), generator=seeded(3))
    to_second = MarginTo(torch.where(second == Y, (Y + 1) % 3, second))
    per_example = PerExample((to_second, nll), torch.arange(100) % 3 % 2)
    attacks: dict[str, Attack] = {
        "margin_to": pgd(ball, 20, to_second),
        "apgd": APGD(ball, to_second, 20),
        "per_example": pgd(ball, 20, per_example),
        "random": RandomSearch(ball, 100, to_second),
        "transfer": Transfer(pgd(ball, 20, to_second), (linear(2 * WEIGHT),), rank=to_second),
        "suite": Suite((pgd(ball, 3), pgd(ball, 20, to_second)), rank=per_example),
    }
    attack = attacks[kind]
    taken = labels(PREDICT, half_broken(PREDICT, X, Y)) != Y
    assert torch.equal(taken, torch.arange(100) % 2 == 0)
    together = Suite((half_broken, attack), rank=ByRank())(PREDICT, X, Y, generator=seeded(4))
    assert torch.equal(together[taken], half_broken(PREDICT, X, Y)[taken])
    if kind != "random":  # whose draws depend on how many rows there are
        alone = attack(PREDICT, X, Y, generator=seeded(4))
        torch.testing.assert_close(together[~taken], alone[~taken])
    else:
        before = to_second(PREDICT(X), Y)
        most = to_second(PREDICT(attacks["margin_to"](PREDICT, X, Y)), Y) - before
        to_gain = ~taken & (most > 0.3)  # near a tie with the third class few directions help
        assert int(to_gain.sum()) > 25
        gained = to_second(PREDICT(together), Y) > before
        gained |= labels(PREDICT, together) != Y  # a point of any other class is kept
        assert bool(gained[to_gain].all())


class ByRank:
    """No preference: the later point is kept."""

    def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
        return torch.zeros(len(y))


def test_a_rank_with_entries_follows_the_rows() -> None:
    """The first attack reaches some targets; the rest are ranked by their own wish, not by that of
    the first rows."""
    wish = DivergenceFrom(torch.softmax(torch.randn(100, 3, generator=seeded(5)), 1))
    both = PerExample((Toward(nll), wish), (torch.arange(100) < 50).long())
    weak, strong = pgd(L2(1.0), 2, both), pgd(L2(1.0), 30, both)
    found = Suite((weak, strong))(PREDICT, X, TARGET)
    value = both(PREDICT(found), TARGET)
    reached = both.succeeded(PREDICT(weak(PREDICT, X, TARGET)), TARGET)
    assert 0 < int(reached.sum()) < len(X)
    assert bool((value >= both(PREDICT(strong(PREDICT, X, TARGET)), TARGET) - 1e-5)[~reached].all())


# --- What is refused ----------------------------------------------------------------------------


def test_what_is_no_attack_or_rank_is_refused() -> None:
    with pytest.raises(TypeError, match="attack must be an attack"):
        Transfer(3, (PREDICT,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rank must be a loss"):
        Transfer(TARGETED, (PREDICT,), rank="nll")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rank must be a loss"):
        Suite((TARGETED,), rank=3)  # type: ignore[arg-type]


def test_equal_thresholds_are_one_loss() -> None:
    """Two attacks with the same threshold agree on what is broken: the second leaves it alone."""
    predict: Predictor = lambda x: Normal(x[:, 0], 1.0)  # noqa: E731
    x, y = torch.tensor([[0.0], [10.0]]), torch.tensor([0.5, 10.0])
    suite = Suite(
        (
            MinimumNorm(L2(2.0), Exceeding(squared_error, 1.0)),
            pgd(L2(2.0), 5, Exceeding(squared_error, 1.0)),
        )
    )
    assert float((suite(predict, x, y) - x).norm(dim=1).max()) < 1.01

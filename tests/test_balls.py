"""Projections, ascent directions and random starts, as properties over balls, shapes and points."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical

from advbayes import APGD, L2, Linf, MinimumNorm, one_step, pgd
from tests.contracts import seeded

FAMILIES = (L2, Linf)


@st.composite
def cases(draw: st.DrawFn) -> tuple[object, Tensor, Tensor, Tensor]:
    """A ball, clean points inside its box, and two far-flung points for each."""
    generator = seeded(draw(st.integers(0, 10_000)))
    event = draw(st.sampled_from([(3,), (1,), (2, 4), (1, 3, 3)]))
    x = torch.rand(5, *event, generator=generator, dtype=torch.float64)
    reach = draw(st.sampled_from([1e-6, 0.1, 1.0, 1e3]))
    ball = draw(st.sampled_from(FAMILIES))(
        draw(st.sampled_from([0.0, 1e-8, 0.3, 2.0, 1e4])),
        box=draw(st.sampled_from([None, (0.0, 1.0), (-0.5, 1.5)])),
        scale=draw(
            st.sampled_from(
                [None, 0.5 + torch.rand(event, generator=generator, dtype=torch.float64)]
            )
        ),
        mask=draw(st.sampled_from([None, torch.rand(event, generator=generator) > 0.3])),
    )
    a, b = (
        x + reach * torch.randn(x.shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return ball, x, a, b


@settings(max_examples=150, deadline=None)
@given(cases())
def test_projection_is_feasible_idempotent_and_leaves_the_inside_alone(
    case: tuple[object, Tensor, Tensor, Tensor],
) -> None:
    ball, x, a, _ = case
    once = ball.project(a, x)
    assert bool(ball.contains(once, x).all())
    torch.testing.assert_close(ball.project(once, x), once, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ball.project(x, x), x, rtol=0, atol=0)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_projection_is_non_expansive_in_the_ball_s_own_euclidean_norm(
    case: tuple[object, Tensor, Tensor, Tensor],
) -> None:
    ball, x, a, b = case
    scale = 1.0 if ball.scale is None else ball.scale
    before = torch.linalg.vector_norm(((a - b) / scale).flatten(1), dim=1)
    after = torch.linalg.vector_norm(
        ((ball.project(a, x) - ball.project(b, x)) / scale).flatten(1), dim=1
    )
    assert bool((after <= before * (1 + 1e-9) + 1e-12).all())


@settings(max_examples=150, deadline=None)
@given(cases())
def test_ascent_is_the_best_move_of_its_length(case: tuple[object, Tensor, Tensor, Tensor]) -> None:
    """<g, ascend> is the dual norm times the step, and no random move of that length does
    better."""
    ball, x, a, _ = case
    gradient = a - x
    move = ball.ascend(gradient, 0.7)
    assert bool((ball.norm(move) <= 0.7 * (1 + 1e-9)).all())
    gain = (gradient * move).flatten(1).sum(1)
    other = type(ball)(0.7, scale=ball.scale, mask=ball.mask).random(
        torch.zeros_like(x), generator=seeded(3)
    )
    assert bool((gain >= (gradient * other).flatten(1).sum(1) - 1e-9).all())
    touched = torch.ones_like(x, dtype=torch.bool) if ball.mask is None else ball.mask.expand_as(x)
    assert bool((move[~touched] == 0).all())
    moving = ((gradient != 0) & touched).flatten(1).any(1)
    torch.testing.assert_close(ball.norm(move)[moving], torch.full_like(gain[moving], 0.7))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_random_points_are_feasible(case: tuple[object, Tensor, Tensor, Tensor]) -> None:
    ball, x, *_ = case
    assert bool(ball.contains(ball.random(x, generator=seeded(1)), x).all())


@pytest.mark.parametrize("size", [1e-30, 1e-38, 1e-44])
def test_tiny_gradients_still_give_a_full_step(size: float) -> None:
    """Flooring the squared norm would hide gradients below 1e-6; in float32 even denormal ones must
    count."""
    gradient = torch.full((1, 3), size, dtype=torch.float32)
    assert float(L2(1.0).norm(L2(1.0).ascend(gradient, 1.0))) == pytest.approx(1.0, rel=1e-3)


def test_huge_gradients_do_not_overflow() -> None:
    gradient = torch.full((1, 3), 1e38, dtype=torch.float32)
    assert float(L2(1.0).norm(L2(1.0).ascend(gradient, 1.0))) == pytest.approx(1.0)


def test_a_zero_gradient_moves_nothing() -> None:
    for family in FAMILIES:
        assert bool((family(1.0).ascend(torch.zeros(2, 3), 1.0) == 0).all())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_uniform_in_the_ball_fills_it(family: type, masked: bool) -> None:
    """With d features to move, (radius / eps)^d is uniform on [0, 1], whatever is masked and in
    whatever units: its moments are 1 / (k + 1)."""
    mask = torch.tensor([True, True, True, *[not masked] * 3])
    scale = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0, 1.0], dtype=torch.float64)
    ball, num = family(2.0, scale=scale, mask=mask), 20_000
    x = torch.zeros(num, 6, dtype=torch.float64)
    share = (ball.norm(ball.random(x, generator=seeded())) / 2.0) ** int(mask.sum())
    for power in (1, 2, 3):
        sd = (1 / (2 * power + 1) - 1 / (power + 1) ** 2) ** 0.5
        assert float((share**power).mean()) == pytest.approx(1 / (power + 1), abs=5 * sd / num**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_points_are_in_the_ball_whatever_the_dtype_rounds(family: type, dtype: torch.dtype) -> None:
    """By a norm in float64: that of bfloat16 is itself off by 0.4 %."""
    scale, weight = torch.tensor([0.7, 1.0, 1.3, 2.1]), torch.randn(4, 3, generator=seeded(1))
    mask = torch.tensor([True, True, False, True])

    def predict(x: Tensor) -> Categorical:
        return Categorical(logits=x.float() @ weight)

    x = torch.rand(40, 4, generator=seeded(2)).to(dtype)
    y = predict(x).probs.argmax(1)
    for eps, more in ((0.03, {"box": (0, 1)}), (0.5, {"scale": scale, "mask": mask})):
        ball = family(eps, **more)
        attacks = (one_step(ball), pgd(ball, 5), APGD(ball, steps=5), MinimumNorm(ball, steps=5))
        found = [attack(predict, x, y, generator=seeded(3)) for attack in attacks]
        found += [ball.random(x, generator=seeded(4)), ball.sphere(x, generator=seeded(5))]
        for x_adv in found:
            assert x_adv.dtype == dtype
            assert bool(ball.contains(x_adv, x).all())
            assert bool(ball.contains(x_adv.double(), x.double()).all())
        norms = ball.norm(found[1].double() - x.double())  # and no nearer than rounding asks for
        assert float(norms.max()) > eps * (1 - 8 * torch.finfo(dtype).eps / eps)
    far = x + torch.tensor(0.0351, dtype=dtype)
    assert not bool(family(0.0349).contains(far, x).all())


def test_contains_sees_each_kind_of_leak() -> None:
    x = torch.full((1, 2), 0.5)
    ball = L2(0.1, box=(0.0, 1.0), mask=torch.tensor([True, False]))
    assert bool(ball.contains(x + torch.tensor([0.1, 0.0]), x))
    assert not bool(ball.contains(x + torch.tensor([0.1001, 0.0]), x))
    assert not bool(ball.contains(x + torch.tensor([0.0, 0.01]), x))
    assert not bool(ball.contains(x * float("nan"), x))
    assert not bool(L2(9.0, box=(0.0, 1.0)).contains(x + 0.6, x))


def test_balls_compare_and_show_by_value() -> None:
    scale = torch.tensor([1.0, 2.0])
    assert L2(1.0, scale=scale) == L2(1.0, scale=scale.clone())
    assert L2(1.0) != Linf(1.0)
    assert L2(1.0, box=(0.0, 1.0)) != L2(1.0)
    assert repr(L2(2.0, box=(0, 1))) == "L2(2, box=(0, 1))"

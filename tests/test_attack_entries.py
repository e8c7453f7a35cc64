"""What every attack does with what it is given: shapes and types of y, losses with entries, boxes,
large inputs, histories."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal

from advbayes import (
    APGD,
    L2,
    DivergenceFrom,
    Linf,
    MarginTo,
    MinimumNorm,
    Toward,
    dlr,
    margin,
    nll,
    one_step,
    pgd,
    pgd_plus,
    squared_error,
    strong_suite,
    with_eps,
)
from advbayes.attacks.balls import Ball
from advbayes.attacks.gradients import NoGradientWarning
from advbayes.seeds import generator_for
from advbayes.types import Attack, Predictor

from .attacks import EVERY


def linear(num_in: int, shift: float = 0.0) -> tuple[Predictor, Tensor]:
    weights = torch.randn(3, num_in, generator=generator_for(0, "weights"))

    def predict(x: Tensor) -> Distribution:
        return Categorical(logits=(x - shift) @ weights.T)

    return predict, weights


def labelled(
    num: int, num_in: int, shift: float = 0.0, spread: float = 1.0
) -> tuple[Predictor, Tensor, Tensor]:
    predict, _ = linear(num_in, shift)
    x = shift + spread * torch.randn(num, num_in, generator=generator_for(1, "x"))
    return predict, x, predict(x).logits.argmax(1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "ball", [L2(0.5), Linf(0.3), L2(0.5, box=(1990.0, 2010.0), scale=0.5)], ids=repr
)
def test_points_stay_in_the_ball_where_x_is_large(name: str, ball: Ball) -> None:
    predict, x, y = labelled(60, 5, shift=2000.0, spread=0.5)
    x_adv = EVERY[name](ball)(predict, x, y, generator=generator_for(0, "attack"))
    assert bool(ball.contains(x_adv, x).all())
    assert not torch.equal(x_adv, x)


def test_rounding_towards_x_is_rare_and_small() -> None:
    x = torch.rand(50, 784, generator=generator_for(0, "x"))
    ball = L2(2.0, box=(0, 1))
    drawn = x + torch.randn(x.shape, generator=generator_for(0, "d"))
    assert torch.equal(ball.project(drawn, x), ball.clip(x + ball._shrink(drawn - x, x)))
    far = L2(1e-2)
    centre = x + 300
    inside = far.project(centre + drawn, centre)
    plain = centre + far._shrink(centre + drawn - centre, centre)
    assert not bool(far.contains(plain, centre).all())
    assert bool(far.contains(inside, centre).all())
    assert float((inside - plain).abs().max()) < 1e-4


@pytest.mark.parametrize("name", EVERY)
def test_inputs_outside_the_box_are_named(name: str) -> None:
    predict, x, y = labelled(10, 4)
    with pytest.raises(ValueError, match="box must contain the data"):
        EVERY[name](L2(0.5, box=(0, 1)))(predict, x, y)
    with pytest.raises(ValueError, match="mask must broadcast against the event shape"):
        EVERY[name](L2(0.5, mask=torch.ones(3, dtype=torch.bool)))(predict, x, y)


@pytest.mark.parametrize("name", EVERY)
def test_no_history_comes_with_the_result(name: str) -> None:
    predict, x, y = labelled(10, 4)
    for eps, num in ((0.5, 10), (0.0, 10), (0.5, 0)):
        leaf = x[:num].clone().requires_grad_()
        attack = with_eps(EVERY[name](L2(0.5)), eps)
        assert not attack(predict, leaf, y[:num]).requires_grad


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_inputs_may_have_any_floating_dtype(name: str, dtype: torch.dtype) -> None:
    predict, x, y = labelled(12, 4)
    x = x.to(dtype)

    def rounded(x: Tensor) -> Distribution:
        return predict(x.float())

    for ball in (L2(1.0, scale=0.5), Linf(0.3)):
        x_adv = EVERY[name](ball)(rounded, x, y, generator=generator_for(0, "attack"))
        assert x_adv.dtype == dtype
        assert bool(ball.contains(x_adv, x).all())
        assert not torch.equal(x_adv, x)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("ball", [L2(0.5), Linf(0.3, scale=2.0)], ids=repr)
def test_the_predictor_may_answer_in_another_dtype(name: str, ball: Ball) -> None:
    """As somebody else's model in numpy does: x_adv stays in the dtype of x."""
    predict, x, y = labelled(12, 4)

    def wide(x: Tensor) -> Distribution:
        return Categorical(logits=predict(x).logits.double())  # type: ignore[attr-defined]

    attack = EVERY[name](ball)
    x_adv = attack(wide, x, y, generator=generator_for(0, "attack"))
    assert x_adv.dtype == x.dtype
    assert bool(ball.contains(x_adv, x).all())


@pytest.mark.parametrize("name", EVERY)
def test_labels_may_be_whole_numbers_of_any_width(name: str) -> None:
    predict, x, y = labelled(12, 4)
    attack = EVERY[name](L2(0.5))
    wanted = attack(predict, x, y, generator=generator_for(0, "attack"))
    for dtype in (torch.uint8, torch.int16, torch.int32):
        x_adv = attack(predict, x, y.to(dtype), generator=generator_for(0, "attack"))
        assert torch.equal(x_adv, wanted)


ALONE = {
    "one_step": one_step,
    "PGD": lambda ball: pgd(ball, 6),
    "PGD, until broken": lambda ball: pgd(ball, 6, stop_at_success=True),
    "PGD+": lambda ball: pgd_plus(ball, 3),
    "APGD": lambda ball: APGD(ball, nll, 8, targets=2, stop_at_success=True),
    "MinimumNorm": lambda ball: MinimumNorm(ball, steps=8),
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize(
    "ball",
    [
        L2(0.5, box=(-4, 4), mask=torch.tensor([True, True, False, True])),
        Linf(0.3, scale=torch.tensor([1.0, 0.5, 2.0, 1.0])),
    ],
    ids=["L2", "Linf"],
)
def test_an_example_is_attacked_as_if_alone(name: str, ball: Ball) -> None:
    """Without restarts an attack is a function of each example: of its batch, the order of rows and
    the memory they lie in nothing is seen."""
    weights = torch.randn(4, 3, generator=generator_for(0, "weights"), dtype=torch.float64)

    def predict(x: Tensor) -> Distribution:
        return Categorical(logits=(x @ weights).sin() + x[:, :3])

    x = torch.randn(9, 4, generator=generator_for(1, "x"), dtype=torch.float64)
    y = predict(x).logits.argmax(1)  # type: ignore[attr-defined]
    y[0] = (y[0] + 1) % 3  # broken before it begins
    attack = ALONE[name](ball)
    whole = attack(predict, x, y)
    for rows in (slice(0, 1), slice(4, 5), slice(2, 7), torch.arange(9).flip(0)):
        torch.testing.assert_close(
            attack(predict, x[rows], y[rows]), whole[rows], rtol=0, atol=1e-9
        )
    strided = x.repeat_interleave(2, dim=1)[:, ::2]
    torch.testing.assert_close(attack(predict, strided, y), whole, rtol=0, atol=1e-9)
    with torch.no_grad():
        assert torch.equal(attack(predict, x, y), whole)


REGRESSION: dict[str, Callable[[Ball], Attack]] = {
    "PGD": lambda ball: pgd(ball, 5),
    "APGD": lambda ball: APGD(ball, nll, 5),
    "PGD+": lambda ball: pgd_plus(ball, 3),
    "squared error": lambda ball: pgd(ball, 5, squared_error),
    "strong_suite": lambda ball: strong_suite(ball, steps=5, queries=5),
}


@pytest.mark.parametrize("name", REGRESSION)
def test_one_output_in_either_shape(name: str) -> None:
    weights = torch.randn(4, generator=generator_for(0, "w"))
    x = torch.randn(30, 4, generator=generator_for(1, "x"))
    y = x @ weights + 0.3

    def flat(x: Tensor) -> Distribution:
        return Normal(x @ weights, 0.5)

    def column(x: Tensor) -> Distribution:
        return Normal((x @ weights).unsqueeze(1), 0.5)

    attack = REGRESSION[name](L2(0.5))
    wanted = attack(flat, x, y, generator=generator_for(0, "attack"))
    for predict in (flat, column):
        for target in (y, y[:, None], y.double(), y.double()[:, None]):
            assert torch.allclose(
                attack(predict, x, target, generator=generator_for(0, "attack")), wanted, atol=1e-5
            )


def test_targets_of_another_shape_are_named() -> None:
    def predict(x: Tensor) -> Distribution:
        return Normal(x[:, 0], 1.0)

    for loss in (nll, squared_error):
        with pytest.raises(
            ValueError, match=r"y must have the prediction's shape \(5,\), got .* of shape \(5, 2\)"
        ):
            pgd(L2(1.0), 3, loss)(predict, torch.zeros(5, 3), torch.zeros(5, 2))


def test_a_wanted_distribution_in_every_shape() -> None:
    x = torch.randn(40, 4, generator=generator_for(0, "x"))
    wish = torch.linspace(-1, 1, 40)

    def predict(x: Tensor) -> Distribution:
        return Normal(x[:, 0], 1.0)

    def two(x: Tensor) -> Distribution:
        return Independent(Normal(x[:, :2], torch.ones(2)), 1)

    y = torch.zeros(40)
    attack = [
        pgd(L2(1.0), 20, DivergenceFrom(target, 1.0), restarts=2)
        for target in (wish, wish[:, None])
    ]
    first, second = (each(predict, x, y, generator=generator_for(0, "attack")) for each in attack)
    assert torch.equal(first, second)
    nearest = x[:, 0] + (wish - x[:, 0]).clamp(-1, 1)
    assert torch.allclose(first[:, 0], nearest, atol=0.07)  # half a step
    number, same = (
        pgd(L2(1.0), 20, DivergenceFrom(t, 1.0))(predict, x, y)
        for t in (2.0, torch.full((40,), 2.0))
    )
    assert torch.equal(number, same)
    shared, each = (
        pgd(L2(1.0), 10, DivergenceFrom(t, 1.0), restarts=2)(
            two, x, torch.zeros(40, 2), generator=generator_for(0, "attack")
        )
        for t in (torch.tensor([[1.0, 2.0]]), torch.tensor([1.0, 2.0]).expand(40, 2).clone())
    )
    assert torch.equal(shared, each)
    with pytest.raises(
        ValueError,
        match=r"target must be a number or \(40, 2\) for these examples, got shape \(40,\)",
    ):
        pgd(L2(1.0), 3, DivergenceFrom(wish, 1.0))(two, x, torch.zeros(40, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda c: MarginTo(c),
        lambda c: Toward(MarginTo(c)),
        lambda c: DivergenceFrom(c.float(), 1.0),
    ],
)
@pytest.mark.parametrize(
    "attack", [lambda loss: pgd(L2(1.0), 3, loss), lambda loss: APGD(L2(1.0), loss, 3)]
)
def test_losses_for_other_examples_are_refused(make: Callable, attack: Callable) -> None:  # type: ignore[type-arg]
    predict, x, y = labelled(20, 4)
    with pytest.raises(
        ValueError,
        match="loss must hold one entry for each of the 10 examples of x, got one for 20",
    ):
        attack(make(y))(predict, x[10:], y[10:])


def test_a_loss_of_ones_own_needs_rows_alone() -> None:
    predict, x, y = labelled(30, 4)

    class ByWayOf:
        def __init__(self, classes: Tensor) -> None:
            self.classes = classes

        def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
            return MarginTo(self.classes)(prediction, y)

        def rows(self, index: Tensor | slice) -> ByWayOf:
            return ByWayOf(self.classes[index])

    classes = (y + 1) % 3
    own, ours = (
        pgd(L2(1.0), 5, loss, restarts=2, stop_at_success=True)
        for loss in (ByWayOf(classes), MarginTo(classes))
    )
    found, wanted = (
        attack(predict, x, y, generator=generator_for(0, "attack")) for attack in (own, ours)
    )
    assert torch.equal(found, wanted)


BAD: list[tuple[str, Callable[[Predictor, Tensor, Tensor], object], type[Exception], str]] = [
    (
        "float labels",
        lambda p, x, y: pgd(L2(1.0), 3)(p, x, y.float()),
        TypeError,
        "y must hold integer class labels",
    ),
    (
        "truth values",
        lambda p, x, y: pgd(L2(1.0), 3)(p, x, y > 0),
        TypeError,
        "y must hold integer class labels",
    ),
    (
        "no such class",
        lambda p, x, y: pgd(L2(1.0), 3)(p, x, y + 2),
        ValueError,
        "y must hold labels from 0 to 2, got 2 to 4",
    ),
    (
        "columns",
        lambda p, x, y: pgd(L2(1.0), 3)(p, x, y[:, None]),
        ValueError,
        r"is y of shape \(B,\)\?",
    ),
    (
        "regression's loss",
        lambda p, x, y: pgd(L2(1.0), 3, squared_error)(p, x, y),
        TypeError,
        "is a loss for regression",
    ),
    (
        "logits",
        lambda p, x, y: pgd(L2(1.0), 3)(lambda x: p(x).logits, x, y),
        TypeError,
        "predict must return a torch Distrib",
    ),  # type: ignore[attr-defined]
    (
        "nothing",
        lambda p, x, y: pgd(L2(1.0), 3)(None, x, y),
        TypeError,
        "predict must be a Predictor",
    ),  # type: ignore[arg-type]
    (
        "one answer",
        lambda p, x, y: pgd(L2(1.0), 3)(lambda x: Categorical(logits=torch.zeros(3)), x, y),
        ValueError,
        r"of batch shape \(20,\) for 20 inputs, got \(\)",
    ),
    (
        "words",
        lambda p, x, y: L2(1.0, box=("a", "b")),
        TypeError,
        "box must hold numbers or tensors, got 'a'",
    ),  # type: ignore[arg-type]
    (
        "a word",
        lambda p, x, y: L2(1.0, scale="a"),
        TypeError,
        "scale must hold numbers or tensors, got 'a'",
    ),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(
    ("call", "error", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_bad_input_is_named(call: Callable, error: type[Exception], words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(error, match=words):
        call(*labelled(20, 4))


def test_boxes_of_arrays_and_with_constant_features() -> None:
    x = torch.tensor([[0.0, 0.5]])
    arrays = L2(1.0, box=(np.array([0.0, 0.0]), np.array([0.0, 1.0])))  # type: ignore[arg-type]
    assert torch.equal(arrays.project(torch.tensor([[3.0, 3.0]]), x), torch.tensor([[0.0, 1.0]]))
    with pytest.raises(ValueError, match="low < high"):
        L2(1.0, box=(torch.zeros(2), torch.zeros(2)))


def test_predictors_without_gradients_are_named() -> None:
    predict, x, y = labelled(20, 4)

    def blind(x: Tensor) -> Distribution:
        return predict(x.detach())

    for name in ("one_step", "PGD", "APGD"):
        with pytest.warns(
            NoGradientWarning,
            match="predict gives no gradient, so attacks that need one move at random",
        ):
            EVERY[name](L2(0.5))(blind, x, y)
    for name in ("Square", "HardLabel", "RandomSearch"):
        EVERY[name](L2(0.5))(blind, x, y)
    # A loss that is flat is another matter: the entropy of a fixed scale.
    pgd_plus(L2(0.5), 2)(lambda x: Normal(x[:, 0], 1.0), x, torch.zeros(20))


def test_dlr_where_a_class_is_impossible() -> None:
    logits = torch.tensor([[2.0, 1.0, -torch.inf]], requires_grad=True)
    value = dlr(Categorical(logits=logits), torch.tensor([0]))
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert bool(torch.isfinite(value).all())
    assert bool(gradient[0, :2].abs().min() > 0)
    assert torch.sign(value) == torch.sign(margin(Categorical(logits=logits), torch.tensor([0])))

"""Decisions by expected and worst-case utility, and conformal sets and intervals with the coverage
that they promise."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    Laplace,
    MultivariateNormal,
    Normal,
)

from advbayes import (
    L2,
    BayesianModel,
    Gaussian,
    GaussianMixture,
    Noise,
    PosteriorPredictive,
    Purifier,
    pgd,
    squared_error,
)
from advbayes.checks import AdvBayesError, InputError, InputTypeError
from advbayes.predictive import (
    Choices,
    ConformalIntervals,
    ConformalSets,
    Spoiling,
    conformal_intervals,
    conformal_quantile,
    conformal_sets,
    decide,
    utility_under,
    worst_case_utility,
)
from advbayes.seeds import generator_for
from advbayes.types import Predictor

WEIGHT = torch.randn(3, 4, generator=generator_for(0, "weight"))


def test_whole_numbers_are_worth_what_they_are_as_floating_point_ones() -> None:
    matrix = torch.tensor([[1, 0], [-9, 0]])
    y = torch.tensor([0, 1])
    whole, real = (Choices(each, abstain=0.25) for each in (matrix, matrix.float()))
    torch.testing.assert_close(whole.realised(y), real.realised(y))
    near = Choices(lambda action, y: -(action - y).abs(), torch.tensor([0.5, 1.5]), abstain=0.25)
    torch.testing.assert_close(near.realised(y), near.realised(y.float()))
    x = torch.tensor([[0.0], [1.0]])
    values = [
        utility_under(lambda x: Normal(x[:, 0], 0.1), (x, each), near).value
        for each in (y, y.float())
    ]
    assert values == [-0.25, -0.25]


def test_what_choices_hold_is_not_given_twice() -> None:
    choices = Choices(torch.eye(3))
    with pytest.raises(ValueError, match="must come within Choices"):
        decide(lambda x: Categorical(logits=x @ WEIGHT.T), torch.ones(2, 4), choices, abstain=0.1)


SLOPE = torch.randn(4, generator=generator_for(0, "slope"))


def classes(x: Tensor) -> Distribution:
    return Categorical(logits=x @ WEIGHT.T)


def line(x: Tensor) -> Distribution:
    return Normal(x @ SLOPE, 0.3)  # too sure of itself: the noise is 0.5


def examples(seed: int, num: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = generator_for(seed, "examples")
    x = torch.randn(num, 4, generator=generator)
    y = torch.multinomial((x @ WEIGHT.T).softmax(1), 1, generator=generator).squeeze(1)
    return x, y, x @ SLOPE + 0.5 * torch.randn(num, generator=generator)


@pytest.mark.parametrize("level", [0.8, 0.9])
@pytest.mark.parametrize("attacked", [False, True])
def test_conformal_coverage_is_what_was_asked_for(level: float, attacked: bool) -> None:
    """On average over calibration sets of n the coverage lies in [level, level + 1 / (n + 1)],
    attacked or not."""
    num = 60
    attack, error = (pgd(L2(0.5), 5), pgd(L2(0.5), 5, squared_error)) if attacked else (None, None)
    shares: dict[str, list[float]] = {"sets": [], "intervals": []}
    for seed in range(60):
        x, y, target = examples(seed, num + 150)
        sets = conformal_sets(classes, (x[:num], y[:num]), level=level, attack=attack)
        intervals = conformal_intervals(line, (x[:num], target[:num]), level=level, attack=error)
        new = x[num:]
        here = new if attack is None else attack(classes, new, y[num:])
        there = new if error is None else error(line, new, target[num:])
        shares["sets"].append(float(sets.covers(here, y[num:]).double().mean()))
        shares["intervals"].append(float(intervals.covers(there, target[num:]).double().mean()))
    for name, each in shares.items():
        average = sum(each) / len(each)
        # the spread of one coverage is that of Beta(k, n + 1 - k) and of 150 new examples
        error_of_mean = (level * (1 - level) * (1 / (num + 2) + 1 / 150) / len(each)) ** 0.5
        assert level - 3 * error_of_mean <= average, name
        if name == "intervals":
            assert average <= level + 1 / (num + 1) + 3 * error_of_mean


def test_clean_calibration_does_not_cover_attacked_inputs() -> None:
    x, _, target = examples(0, 800)
    attack = pgd(L2(0.5), 5, squared_error)
    clean = conformal_intervals(line, (x[:400], target[:400]))
    robust = conformal_intervals(line, (x[:400], target[:400]), attack=attack)
    x_adv = attack(line, x[400:], target[400:])
    assert float(clean.covers(x[400:], target[400:]).double().mean()) == pytest.approx(
        0.9, abs=0.05
    )
    assert float(clean.covers(x_adv, target[400:]).double().mean()) < 0.6
    assert float(robust.covers(x_adv, target[400:]).double().mean()) == pytest.approx(0.9, abs=0.05)


def test_conformal_quantiles_and_bad_input() -> None:
    scores = torch.arange(1.0, 10.0)
    assert [conformal_quantile(scores, level) for level in (0.1, 0.5, 0.9)] == [1.0, 5.0, 9.0]
    assert conformal_quantile(scores, 0.91) == float("inf")
    with pytest.raises(ValueError, match="level"):
        conformal_quantile(scores, 1.0)
    with pytest.raises(TypeError, match="see conformal_sets"):
        conformal_intervals(classes, (torch.zeros(3, 4), torch.zeros(3)))
    with pytest.raises(TypeError, match="see conformal_intervals"):
        conformal_sets(line, (torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_tie_with_the_quantile_are_covered(dtype: torch.dtype) -> None:
    """Targets that are whole numbers, predictions of one scale: at the quantile a third of all
    scores are equal, and rounding must not leave them outside."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.zeros(90, 1, dtype=dtype), torch.arange(90, dtype=dtype) % 3
    for _ in range(200):
        mean, scale = torch.rand(2, generator=generator, dtype=dtype).unbind()

        def steady(at: Tensor, m: Tensor = mean, s: Tensor = scale) -> Distribution:
            return Normal(m + 0 * at[:, 0], s)

        intervals = conformal_intervals(steady, (x, y + mean), level=0.9)
        assert bool(intervals.covers(x, y + mean).all())
    probs = torch.tensor([[0.6, 0.3, 0.1]], dtype=dtype)
    for digits in (-2, 0, 2):  # probabilities from a batch of another size differ by as many
        others = probs * (1 + digits * torch.finfo(dtype).eps)
        sets = conformal_sets(
            lambda at: Categorical(probs=probs.expand(len(at), 3)),
            (x, torch.full((90,), 2)),
            level=0.9,
        )
        there = Categorical(probs=torch.ones(90, 3, dtype=dtype))
        there.probs = others.expand(90, 3)
        assert bool(ConformalSets(lambda at, p=there: p, sets.threshold, 0.9)(x).all())  # type: ignore[misc]


def test_sets_are_never_empty_and_ends_belong_to_intervals() -> None:
    x, y, _ = examples(0, 30)
    probs: Tensor = classes(x).probs  # type: ignore[attr-defined]
    for threshold in (0.0, 0.4, 1.0):
        found = ConformalSets(classes, threshold, 0.9)(x)
        wanted = probs >= 1 - threshold
        wanted[torch.arange(30), probs.argmax(1)] = True
        assert torch.equal(found, wanted)
        covered = ConformalSets(classes, threshold, 0.9).covers(x, y)
        assert torch.equal(covered, wanted[torch.arange(30), y])
    flat = ConformalIntervals(lambda at: Normal(torch.zeros(len(at)), 0.5), 2.0, 0.9)
    ends = torch.tensor([-1.01, -1.0, 1.0, 1.01])
    assert flat.covers(torch.zeros(4, 1), ends).tolist() == [False, True, True, False]


def test_the_action_of_largest_expected_utility_is_taken() -> None:
    x, _, _ = examples(0, 50)
    utility = torch.randn(3, 5, generator=generator_for(0, "utility"))
    probs: Tensor = classes(x).probs  # type: ignore[attr-defined]
    assert torch.equal(decide(classes, x, utility), (probs @ utility).argmax(1))
    assert torch.equal(decide(classes, x, torch.eye(3)), probs.argmax(1))
    held = decide(classes, x, torch.eye(3), abstain=-0.6)  # abstaining is worth 0.6
    assert torch.equal(held == 3, probs.amax(1) < 0.6)


def test_decisions_in_regression_follow_the_loss() -> None:
    """Squared error: the mean; absolute error with weights 3 and 1: the 25 % quantile."""
    x, _, _ = examples(0, 6)
    grid = torch.linspace(-8, 8, 801)
    squared = grid[decide(line, x, lambda action, y: -((action - y) ** 2), actions=grid)]
    torch.testing.assert_close(squared, line(x).mean, atol=0.07, rtol=0)
    tilted = grid[
        decide(line, x, lambda a, y: -torch.where(a > y, 3 * (a - y), y - a), actions=grid)
    ]
    torch.testing.assert_close(tilted, line(x).mean - 0.6745 * 0.3, atol=0.1, rtol=0)


def test_expected_utilities_in_regression_are_integrals_whatever_the_batch() -> None:
    """Quadratic utilities exactly, a threshold to within one part in `num`; a mixture too."""
    x, _, _ = examples(0, 30)
    means, scales = torch.stack([x[:, 0], 2 * x[:, 1]]), torch.stack([0.3 + x[:, 2] ** 2] * 2)
    log_weights = torch.tensor([0.2, 0.8]).log()

    def mixed(rows: slice) -> Distribution:
        return GaussianMixture(means[:, rows], scales[:, rows], log_weights)

    actions, whole = torch.tensor([-1.0, 0.5, 2.0]), slice(0, 30)
    squared = Choices(lambda a, y: -((a - y) ** 2), actions)
    limit = Choices(lambda a, y: (y > a).double(), actions, num=400)
    for at in (mixed, lambda rows: line(x[rows])):
        mean, variance = at(whole).mean.unsqueeze(1), at(whole).variance.unsqueeze(1)
        found = squared.expected(at(whole))
        torch.testing.assert_close(found, -((mean - actions) ** 2 + variance))
        torch.testing.assert_close(squared.expected(at(slice(3, 5))), found[3:5])
        above = torch.stack([1 - at(whole).cdf(a.expand(30)) for a in actions], 1)
        assert float((limit.expected(at(whole)) - above).abs().max()) < 1 / 200


@pytest.mark.parametrize("purified", [False, True])
def test_the_worst_case_of_a_regression_is_found(purified: bool) -> None:
    """Through a linear model that is x moved against the slope: away from the action."""
    model = BayesianModel(torch.nn.Linear(4, 1), Gaussian(0.3))
    thetas = torch.cat([SLOPE, torch.zeros(1)]).expand(3, 5)
    x, _, _ = examples(1, 20)
    predict: Predictor = PosteriorPredictive(model, thetas)
    ball, grid = L2(0.5), torch.tensor([-1.0, 0.0, 2.0])
    choices = Choices(lambda a, y: -((a - y) ** 2), grid)
    moved = (x @ SLOPE).unsqueeze(1) - grid
    exact = -((moved.abs() + 0.5 * SLOPE.norm()) ** 2 + 0.3**2)
    if purified:  # the best of what moves one way or the other is what one can ask for
        predict = Purifier(model, Noise(1.0), thetas, examples(2, 200)[0])
        ends = [x + side * 0.5 * SLOPE / SLOPE.norm() for side in (-1, 1)]
        exact = torch.stack([choices.expected(predict(end)) for end in ends]).amin(0)
        found = worst_case_utility(predict, x, choices, ball)
        assert float((found <= exact + 0.1).double().mean()) > 0.9
    else:
        found = worst_case_utility(predict, x, choices, ball)
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)
    assert bool((found <= choices.expected(predict(x)) + 1e-6).all())


def test_the_squared_error_of_a_sampled_prediction_is_that_of_its_moments() -> None:
    """A purified regression and a Laplace prediction, of shape (B,) and (B, 1): E (a - y)^2 =
    Var[y] + (a - E[y])^2, whatever the batch."""
    model = BayesianModel(nn.Linear(2, 1), Gaussian(0.3))
    thetas = torch.tensor([[2.0, -1.0, 0.0], [1.0, 1.0, 0.5]])
    purified = Purifier(
        model, Noise(0.5), thetas, torch.randn(200, 2, generator=generator_for(1, "x"))
    )
    actions = torch.linspace(-2.0, 2.0, 5)
    choices = Choices(lambda action, y: -((action - y) ** 2), actions)
    x = torch.randn(7, 2, generator=generator_for(2, "x"))
    mean, scale = x[:, :1], 0.5 + x[:, 1:].square()
    for prediction in (purified(x), Laplace(mean[:, 0], scale[:, 0]), Laplace(mean, scale)):
        center, variance = prediction.mean.reshape(7, 1), prediction.variance.reshape(7, 1)
        wanted = -(variance + (actions - center).square())
        torch.testing.assert_close(choices.expected(prediction), wanted, rtol=1e-4, atol=1e-4)


def test_the_worst_case_of_a_wavy_regression_is_found() -> None:
    """Where one ascent from x ends in a local optimum: against a fine grid of the ball, and the
    same answer at every call."""

    def wavy(x: Tensor) -> Distribution:
        mean = (5 * x[:, 0] + 1).sin() * (2 * x[:, 1]).cos() + 0.5 * x[:, 0]
        return Normal(mean, 0.2 * torch.ones_like(mean))

    x = torch.rand(200, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    choices = Choices(lambda a, y: -(a - y).abs(), torch.linspace(-2, 2, 3), num=64)
    side = torch.linspace(-1, 1, 61)
    grid = torch.cartesian_prod(side, side)
    grid = grid[grid.norm(dim=1) <= 1]
    exact = torch.stack([choices.expected(wavy(row + grid)).amin(0) for row in x])
    found = worst_case_utility(wavy, x, choices, L2(1.0))
    # from one point alone 92 % are missed, and some 4 % of all, with a standard error of 0.014
    missed = ((found - exact).amax(1) > 0.01).double().mean()
    assert float(missed) < 0.1
    assert torch.equal(found, worst_case_utility(wavy, x, choices, L2(1.0)))


def test_decisions_over_several_outputs_are_refused() -> None:
    choices = Choices(lambda a, y: -((a - y) ** 2), torch.tensor([0.0, 1.0]))
    two = Normal(torch.zeros(3, 2), 1.0)
    for prediction in (Independent(two, 1), MultivariateNormal(torch.zeros(3, 2), torch.eye(2))):
        with pytest.raises(ValueError, match=r"need one output, got .*\(3, 2\)"):
            choices.expected(prediction)
    with pytest.raises(ValueError, match="need one output"):
        choices.realised(torch.zeros(3, 2))
    assert torch.equal(choices.realised(torch.ones(3, 1)), torch.tensor([[-1.0, 0.0]] * 3))


def test_the_worst_case_is_below_the_expectation_and_exact_on_two_classes() -> None:
    def two(x: Tensor) -> Distribution:
        return Categorical(logits=torch.stack([x @ SLOPE, torch.zeros(len(x))], 1))

    x, _, _ = examples(0, 40)
    choices, ball = Choices(torch.eye(2), abstain=0.1), L2(0.4)
    found = worst_case_utility(two, x, choices, ball)
    shift = 0.4 * SLOPE.norm()
    exact = torch.stack(
        [
            torch.sigmoid(x @ SLOPE - shift),
            torch.sigmoid(-(x @ SLOPE) - shift),
            torch.full((40,), -0.1),
        ],
        1,
    )
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-3)
    assert bool((found <= choices.expected(two(x)) + 1e-6).all())


def test_deciding_robustly_pays_under_attack_and_costs_a_little_without() -> None:
    """Acting is worth 1 when right and costs 10 when wrong; leaving it alone is worth nothing."""
    x, y, _ = examples(1, 6000)
    choices, ball = Choices(11 * torch.eye(3) - 10, abstain=0.0), L2(0.5)
    attack = pgd(ball, 20, Spoiling(choices))
    moved = attack(classes, x, y, generator=generator_for(0, "start"))
    plain, robust = (
        decide(classes, moved, choices, worst_case=each).unsqueeze(1) for each in (None, ball)
    )
    gain = (choices.realised(y).gather(1, robust) - choices.realised(y).gather(1, plain)).squeeze(1)
    assert float(gain.mean()) > 2 * float(gain.std()) / len(x) ** 0.5  # standard errors
    # never acts at a loss that the model can see
    assert float(choices.expected(classes(x)).gather(1, robust).min()) >= -1e-6
    clean, careful = (
        utility_under(classes, (x, y), choices, worst_case=each) for each in (None, ball)
    )
    assert careful.value <= clean.value + 0.05


@pytest.mark.parametrize("abstain", [None, 0.0, 0.2, -0.2])
def test_abstaining_is_an_action_whatever_it_costs(abstain: float | None) -> None:
    x, y, _ = examples(1, 5)
    near = lambda action, y: -(action - y).abs()  # noqa: E731
    for choices, predict, target, num in (
        (Choices(torch.eye(3), abstain=abstain), classes, y, 3),
        (Choices(near, torch.tensor([0.0, 1.0]), abstain), line, torch.zeros(5), 2),
    ):
        assert choices.num_actions == num + (abstain is not None)
        for worth in (
            choices.expected(predict(x)),
            choices.realised(target),
            worst_case_utility(predict, x, choices, L2(0.1), steps=1),
        ):
            assert worth.shape == (5, choices.num_actions)
            if abstain is not None:
                torch.testing.assert_close(worth[:, -1], torch.full((5,), -abstain))


def test_bad_utilities_are_named() -> None:
    x, squared = torch.zeros(2, 4), lambda action, y: -((action - y) ** 2)
    for predict, utility, actions, said in (
        (classes, torch.ones(3), None, r"utility must be a tensor \(classes.*got a .*\(3,\)"),
        (classes, torch.eye(3).numpy(), None, r"utility must be a tensor \(classes.*got array"),
        (classes, torch.eye(2), None, "predict must give 2 classes"),
        (classes, torch.eye(3), torch.ones(3), r"actions must be left out.*got a .*\(3,\)"),
        (classes, squared, torch.ones(3), r"utility must be a tensor.* of classes, got <function"),
        (line, squared, None, r"actions must be a tensor \(A,\).*got None"),
        (line, squared, [0.0, 1.0], r"actions must be a tensor \(A,\).*got \[0.0, 1.0\]"),
        (line, squared, torch.eye(2), r"actions must be a tensor \(A,\).*got a .*\(2, 2\)"),
    ):
        with pytest.raises(AdvBayesError, match=said):
            decide(predict, x, utility, actions=actions)  # type: ignore[arg-type]
    for y in (torch.tensor([0, -1]), torch.tensor([3, 0])):  # -1 is no last class
        with pytest.raises(InputError, match="y must hold labels from 0 to 2"):
            utility_under(classes, (x, y), Choices(torch.eye(3)))


def test_what_cannot_be_asked_cannot_be_decided_on() -> None:
    x, ask = torch.zeros(2, 4), Choices(torch.eye(3))
    for decided in (decide, partial(worst_case_utility, ball=L2(1.0))):
        with pytest.raises(InputTypeError, match="of an estimator: its `predictor_`"):
            decided(object(), x, ask)  # type: ignore[arg-type]
    y, matrix, asked = torch.zeros(2), torch.eye(3), r"choices must be Choices\(utility.*got a"
    with pytest.raises(InputTypeError, match=asked):
        worst_case_utility(classes, x, matrix, L2(1.0))  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match=asked):
        utility_under(classes, (x, y), matrix)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match=asked):
        Spoiling(matrix)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match=r"attack must be an attack such as pgd\(ball\)"):
        utility_under(classes, (x, y), ask, attack=L2(1.0))  # type: ignore[arg-type]


def test_a_utility_may_look_at_the_action_or_the_outcome_alone() -> None:
    """Whatever it broadcasts to, there is one worth for each action, and abstaining comes last."""
    x, y, actions = torch.zeros(2, 4), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0, 2.0])
    for utility, expected in (
        (lambda action, y: y, [[1.0] * 3 + [-0.1], [2.0] * 3 + [-0.1]]),
        (lambda action, y: action, [[0.0, 1.0, 2.0, -0.1]] * 2),
        (lambda action, y: 1.0, [[1.0, 1.0, 1.0, -0.1]] * 2),
    ):
        choices = Choices(utility, actions, abstain=0.1)
        torch.testing.assert_close(choices.realised(y), torch.tensor(expected))
        assert choices.expected(line(x)).shape == (2, 4)
    wrong = Choices(lambda action, y: action[:2], actions)
    with pytest.raises(InputError, match=r"utility must broadcast actions.*got a .*\(2,\)"):
        decide(line, x, wrong)


@pytest.mark.unshifted("the page prints what one split gave")
def test_the_page_runs_as_printed() -> None:
    page = Path(__file__).parent.parent / "docs" / "decisions.md"
    scope: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, str(page), "exec"), scope)


def test_intervals_of_several_outputs_hold_all_of_them_as_often_as_they_say() -> None:
    """Covered is what lies inside in every output; the share of that is the level."""
    slopes = torch.randn(4, 3, generator=generator_for(1, "slopes"))
    shares = []
    for seed in range(40):
        generator = generator_for(seed, "outputs")
        x = torch.randn(260, 4, generator=generator)
        y = x @ slopes + torch.randn(260, 3, generator=generator) * torch.tensor([0.2, 0.5, 1.0])
        intervals = conformal_intervals(
            lambda x: Independent(Normal(x @ slopes, 0.3), 1), (x[:60], y[:60]), level=0.8
        )
        low, high = intervals(x[60:])
        inside = (low <= y[60:]) & (y[60:] <= high)
        assert torch.equal(intervals.covers(x[60:], y[60:]), inside.all(1))
        assert bool((inside.any(1) & ~inside.all(1)).any())
        shares.append(float(inside.all(1).double().mean()))
    assert sum(shares) / len(shares) == pytest.approx(0.8 + 0.5 / 61, abs=0.03)


@pytest.mark.parametrize("calibrate", [conformal_intervals, conformal_sets])
def test_what_cannot_be_asked_cannot_be_calibrated(calibrate: Any) -> None:
    data = torch.zeros(2, 1), torch.zeros(2)
    with pytest.raises(InputTypeError, match="of an estimator: its `predictor_`"):
        calibrate(object(), data)
    with pytest.raises(InputTypeError, match=r"attack must be an attack such as pgd\(ball\)"):
        calibrate(line, data, attack=L2(1.0))


def test_labels_of_sets_may_be_a_column_of_any_whole_numbers_and_nothing_else() -> None:
    x, y, _ = examples(0, 80)
    wanted = conformal_sets(classes, (x, y))
    for labels in (y.unsqueeze(1), y.to(torch.int32), y.to(torch.uint8)):
        assert conformal_sets(classes, (x, labels)).threshold == wanted.threshold
        assert torch.equal(wanted.covers(x, labels), wanted.covers(x, y))
    with pytest.raises(InputTypeError, match="y must be a tensor of integer class labels"):
        conformal_sets(classes, (x, y.float()))
    with pytest.raises(InputError, match=r"labels from 0 to \d, got 0 to 9"):
        conformal_sets(classes, (x, y.clamp(0, 0).index_fill(0, torch.tensor([3]), 9)))
    with pytest.raises(InputError, match="y must have one label per prediction"):
        conformal_sets(classes, (x, y.unsqueeze(1).expand(-1, 2)))


def test_nan_is_no_decision_and_no_coverage() -> None:
    """NaN counts as the largest of utilities, so that its action was taken; as a score it made a
    threshold that holds one class, or none."""

    def classes(x: Tensor) -> Categorical:
        logits = torch.cat([x, -x], 1) * torch.where(x > 5, torch.nan, 1.0)
        return Categorical(logits=logits, validate_args=False)

    def values(x: Tensor) -> Normal:
        mean = torch.where(x[:, 0] > 5, torch.nan, x[:, 0])
        return Normal(mean, torch.ones(len(x)), validate_args=False)

    x = torch.linspace(-3, 3, 20).unsqueeze(1)
    far = torch.tensor([[1.0], [6.0]])
    worth = torch.eye(2)
    assert decide(classes, x[:1], worth).tolist() == [1]
    quadratic = Choices(lambda action, y: -((action - y) ** 2), torch.tensor([0.0, 1.0]))
    for predict, choices in ((classes, worth), (values, quadratic)):
        with pytest.raises(InputError, match="NaN"):
            decide(predict, far, choices)
        with pytest.raises(InputError, match="NaN"):
            decide(predict, torch.tensor([[4.5]]), choices, worst_case=L2(1.0))
    y = (x[:, 0] < 0).long()
    sets, intervals = conformal_sets(classes, (x, y)), conformal_intervals(values, (x, x[:, 0] + 1))
    for call in (
        lambda: sets(far),
        lambda: intervals(far),
        lambda: conformal_sets(classes, (x + 4, y)),
        lambda: conformal_intervals(values, (x + 4, x[:, 0])),
        lambda: conformal_quantile(torch.tensor([0.1, torch.nan]), 0.5),
    ):
        with pytest.raises(InputError, match="NaN"):
            call()


def test_a_deviation_of_nothing_is_covered_where_it_is_right() -> None:
    def predict(x: Tensor) -> Normal:
        return Normal(x[:, 0], (x[:, 0] < 0).double(), validate_args=False)

    x = torch.linspace(-1, 1, 40, dtype=torch.float64).unsqueeze(1)
    exact = conformal_intervals(predict, (x, x[:, 0]))
    assert exact.factor == 0.0
    assert bool(exact.covers(x, x[:, 0]).all())
    unknown = conformal_intervals(predict, (x[-3:], x[-3:, 0] + 1), level=0.9)
    assert unknown.factor == torch.inf
    assert bool(unknown.covers(x, x[:, 0] + 9).all())

"""Metrics against other people's implementations, brute force, exact small cases and what must hold
for all inputs."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import sklearn.metrics
import torch
import torchmetrics.functional as torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import (
    Categorical,
    Gamma,
    Independent,
    Laplace,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    OneHotCategorical,
)

from advbayes import metrics
from advbayes.likelihoods import GaussianMixture
from advbayes.metrics import reductions

quick = settings(max_examples=50, deadline=None)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=gen(seed), dtype=torch.float64)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=gen(seed), dtype=torch.float64)


def randint(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=gen(seed))


def categorical(
    num: int = 200, num_classes: int = 5, seed: int = 0
) -> tuple[Categorical, torch.Tensor]:
    return Categorical(logits=2 * randn(num, num_classes, seed=seed)), randint(
        num_classes, num, seed=seed + 1
    )


def mixture(
    num: int = 6, parts: int = 3, outputs: int | None = None, seed: int = 0
) -> GaussianMixture:
    shape = (parts, num) if outputs is None else (parts, num, outputs)
    return GaussianMixture(
        2 * randn(*shape, seed=seed), 0.2 + rand(*shape, seed=seed + 1), randn(parts, seed=seed + 2)
    )


# --- scores per example, classification


def test_classification_scores_against_sklearn() -> None:
    prediction, y = categorical()
    probs = prediction.probs.numpy()
    assert metrics.nll(prediction, y).mean().item() == pytest.approx(
        sklearn.metrics.log_loss(y, probs), rel=1e-12
    )
    assert metrics.correct(prediction, y).double().mean().item() == sklearn.metrics.accuracy_score(
        y, probs.argmax(1)
    )
    expected = sklearn.metrics.brier_score_loss(y, probs, scale_by_half=False)
    assert metrics.brier(prediction, y).mean().item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(metrics.confidence(prediction), prediction.probs.amax(1))
    np.testing.assert_allclose(
        metrics.entropy(prediction), scipy.stats.entropy(probs, axis=1), rtol=1e-12
    )


def test_scores_are_per_example_and_keep_the_graph() -> None:
    logits = randn(7, 3).requires_grad_()
    y = randint(3, 7)
    for score in (metrics.log_prob, metrics.nll, metrics.brier):
        value = score(Categorical(logits=logits), y)
        assert value.shape == (7,)
        assert torch.autograd.grad(value.sum(), logits)[0].abs().sum() > 0


@quick
@given(st.integers(1, 30), st.integers(2, 6), st.integers(0, 10**6))
def test_classification_bounds_and_class_relabelling(num: int, num_classes: int, seed: int) -> None:
    prediction, y = categorical(num, num_classes, seed)
    brier, entropy, confidence = (
        metrics.brier(prediction, y),
        metrics.entropy(prediction),
        metrics.confidence(prediction),
    )
    assert brier.min() >= 0
    assert brier.max() <= 2
    assert entropy.min() >= 0
    assert entropy.max() <= math.log(num_classes) + 1e-12
    assert 1 / num_classes <= confidence.min()
    assert confidence.max() <= 1
    order = torch.randperm(num_classes, generator=gen(seed))
    renamed, y_renamed = Categorical(logits=prediction.logits[:, order]), order.argsort()[y]
    for score in (metrics.nll, metrics.brier, metrics.correct):
        torch.testing.assert_close(score(renamed, y_renamed), score(prediction, y))


def test_impossible_class_has_infinite_nll() -> None:
    prediction = Categorical(logits=torch.tensor([[0.0, -math.inf]]), validate_args=False)
    assert metrics.nll(prediction, torch.tensor([1])).item() == math.inf
    assert metrics.nll(prediction, torch.tensor([0])).item() == 0


# --- scores per example, regression


def test_one_output_in_any_spelling_gives_the_same_scores() -> None:
    mean, y = randn(5), randn(5, seed=1)
    spellings = [
        Normal(mean, 0.5),
        Normal(mean[:, None], 0.5),
        Independent(Normal(mean[:, None], 0.5), 1),
    ]
    spellings.append(GaussianMixture(mean[None], torch.full((1, 5), 0.5, dtype=torch.float64)))
    for prediction, target in itertools.product(spellings, (y, y[:, None])):
        for score in (metrics.log_prob, metrics.nll, metrics.squared_error, metrics.crps):
            value = score(prediction, target)
            assert value.shape == (5,)
            torch.testing.assert_close(value, score(spellings[0], y))
        found = metrics.interval(prediction, target, level=0.5)
        for part in (found.low, found.high, found.inside, found.width):
            assert part.shape == (5,)
        assert metrics.entropy(prediction).shape == (5,)


def test_regression_scores_with_several_outputs() -> None:
    mean, y = randn(50, 3), randn(50, 3, seed=1)
    prediction = Independent(Normal(mean, 0.5), 1)
    expected = scipy.stats.norm.logpdf(y, mean, 0.5).sum(1)
    np.testing.assert_allclose(metrics.log_prob(prediction, y), expected, rtol=1e-12)
    value = metrics.rmse(metrics.squared_error(prediction, y)).value
    assert value == pytest.approx(math.sqrt(sklearn.metrics.mean_squared_error(y, mean)), rel=1e-12)
    each = [metrics.crps(Normal(mean[:, d], 0.5), y[:, d]) for d in range(3)]
    torch.testing.assert_close(metrics.crps(prediction, y), torch.stack(each).mean(0))


def test_integer_targets_are_numbers() -> None:
    prediction = Normal(torch.zeros(2), 1.0)
    torch.testing.assert_close(
        metrics.squared_error(prediction, torch.tensor([1, 3])), torch.tensor([1.0, 9.0])
    )


# --- CRPS and quantiles


def brute_crps(cdf: object, y: float) -> float:
    below = scipy.integrate.quad(lambda t: cdf(t) ** 2, y - 60, y, limit=500, points=[y - 5])[0]  # type: ignore[operator]
    above = scipy.integrate.quad(lambda t: (1 - cdf(t)) ** 2, y, y + 60, limit=500, points=[y + 5])[
        0
    ]  # type: ignore[operator]
    return float(below + above)


def test_crps_of_a_gaussian_is_the_textbook_formula() -> None:
    mean, scale, y = randn(20), 0.1 + rand(20), randn(20, seed=2)
    z = (y - mean) / scale
    pdf, cdf = scipy.stats.norm.pdf(z), scipy.stats.norm.cdf(z)
    expected = scale.numpy() * (z.numpy() * (2 * cdf - 1) + 2 * pdf - 1 / math.sqrt(math.pi))
    np.testing.assert_allclose(
        metrics.crps(Normal(mean, scale), y), expected, rtol=1e-10, atol=1e-14
    )


def test_crps_of_a_mixture_is_the_integral_of_the_squared_cdf_gap() -> None:
    prediction, y = mixture(), randn(6, seed=9)
    weights = prediction.log_weights.exp().numpy()
    for i, value in enumerate(metrics.crps(prediction, y).tolist()):
        mean, scale = prediction.means[:, i].numpy(), prediction.scales[:, i].numpy()
        expected = brute_crps(
            lambda t, i=i, m=mean, s=scale: weights[:, i] @ scipy.stats.norm.cdf(t, m, s),
            float(y[i]),
        )
        assert value == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("outputs", [None, 2])
def test_torch_mixtures_score_like_ours(outputs: int | None) -> None:
    ours = mixture(outputs=outputs)
    means, scales = ours.means.transpose(0, 1), ours.scales.transpose(0, 1)
    parts = Normal(means, scales) if outputs is None else Independent(Normal(means, scales), 1)
    theirs = MixtureSameFamily(Categorical(logits=ours.log_weights.T), parts)
    y = randn(*ours.mean.shape, seed=9)
    for score in (metrics.crps, metrics.log_prob, metrics.squared_error):
        torch.testing.assert_close(score(theirs, y), score(ours, y))
    for q in (0.05, 0.5, 0.9):
        torch.testing.assert_close(metrics.quantile(theirs, q), metrics.quantile(ours, q))


def test_crps_does_not_depend_on_how_rows_are_cut() -> None:
    prediction = mixture(num=3, parts=1500)  # 2^22 // 1500^2 = 1 row at a time
    y = randn(3, seed=9)
    each = [
        metrics.crps(
            GaussianMixture(
                prediction.means[:, [i]], prediction.scales[:, [i]], prediction.log_weights[:, [i]]
            ),
            y[[i]],
        )
        for i in range(3)
    ]
    torch.testing.assert_close(metrics.crps(prediction, y), torch.cat(each))


def test_sampled_crps_is_unbiased_and_keyed() -> None:
    prediction, y = (
        Laplace(torch.zeros(1, dtype=torch.float64), 1.0),
        torch.tensor([0.7], dtype=torch.float64),
    )
    expected = brute_crps(lambda t: scipy.stats.laplace.cdf(t), 0.7)
    draws = metrics.crps(
        prediction.expand((20_000,)), y.expand(20_000), num_samples=5, generator=gen(1)
    )
    z = (draws.mean() - expected) / (draws.std() / math.sqrt(len(draws)))
    assert abs(z) < 4.5  # two-sided 7e-6
    state = torch.get_rng_state()
    first = metrics.crps(prediction, y, generator=gen(3))
    assert torch.equal(torch.get_rng_state(), state)  # the global stream is left alone
    assert torch.equal(first, metrics.crps(prediction, y, generator=gen(3)))
    assert not torch.equal(first, metrics.crps(prediction, y, generator=gen(4)))


def test_many_components_are_sampled_to_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction, y = mixture(), randn(6, seed=9)
    exact = metrics.crps(prediction, y)
    monkeypatch.setattr("advbayes.metrics.marginals.MOST_PAIRED", 2)
    sampled = metrics.crps(prediction, y, num_samples=20_000, generator=gen())
    assert not torch.equal(exact, sampled)
    # 5 sd of |X - y| / sqrt(20000), sd about 1.5
    torch.testing.assert_close(sampled, exact, rtol=0, atol=0.06)


@quick
@given(
    st.floats(-5, 5), st.floats(0.01, 5), st.floats(-5, 5), st.floats(-100, 100), st.floats(0.1, 10)
)
def test_crps_moves_and_scales_with_the_data(
    mean: float, scale: float, y: float, shift: float, factor: float
) -> None:
    def at(*numbers: float) -> float:
        m, s, t = torch.tensor(numbers, dtype=torch.float64)[:, None]
        return metrics.crps(Normal(m, s), t).item()

    base = at(mean, scale, y)
    assert 0 <= base <= abs(y - mean) + scale
    assert at(factor * mean + shift, factor * scale, factor * y + shift) == pytest.approx(
        factor * base, rel=1e-9
    )


@pytest.mark.parametrize("q", [0.001, 0.025, 0.5, 0.9, 0.999])
def test_quantiles_invert_the_cdf(q: float) -> None:
    mean, scale = randn(4), 0.1 + rand(4)
    np.testing.assert_allclose(
        metrics.quantile(Normal(mean, scale), q),
        scipy.stats.norm.ppf(q, mean, scale),
        rtol=1e-10,
        atol=1e-12,
    )
    prediction = mixture()
    torch.testing.assert_close(
        prediction.cdf(metrics.quantile(prediction, q)), torch.full((6,), q).double()
    )
    laplace = Laplace(mean, scale)  # has an icdf
    np.testing.assert_allclose(
        metrics.quantile(laplace, q), scipy.stats.laplace.ppf(q, mean, scale), rtol=1e-10
    )
    gamma = Gamma(1 + rand(4), scale)  # has a cdf only
    np.testing.assert_allclose(
        metrics.quantile(gamma, q),
        scipy.stats.gamma.ppf(q, gamma.concentration, scale=1 / scale),
        rtol=1e-8,
    )


@pytest.mark.parametrize("tail", [1e-9, 1e-7, 1e-4])
def test_quantiles_in_float32_are_those_in_float64(tail: float) -> None:
    """Near 0 and 1 too, where a cdf in float32 is rounding."""
    means = 3 * torch.randn(20, 6, generator=gen(5))
    scales = 0.05 + torch.rand(20, 6, generator=gen(6))
    single = GaussianMixture(means, scales)
    double = GaussianMixture(means.double(), scales.double())
    for q in (tail, 1 - tail):
        exact = metrics.quantile(double, q)
        beyond = torch.special.ndtr(
            (exact - means.double()) / scales.double() * (1 - 2 * (q > 0.5))
        )
        torch.testing.assert_close(
            beyond.mean(0), torch.full((6,), tail).double(), rtol=1e-6, atol=0
        )
        level = torch.tensor(q, dtype=torch.float64)
        for found in (metrics.quantile(single, q), single.icdf(level), double.icdf(level)):
            torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-6)
        laplace = metrics.quantile(Laplace(torch.zeros(2), torch.ones(2)), q)
        assert float(laplace[0]) == pytest.approx(scipy.stats.laplace.ppf(q), rel=1e-6)


def test_interval_of_several_outputs_is_marginal() -> None:
    prediction, y = mixture(outputs=2), randn(6, 2, seed=9)
    found = metrics.interval(prediction, y, level=0.8)
    for d in range(2):
        one = metrics.interval(
            GaussianMixture(
                prediction.means[..., d], prediction.scales[..., d], prediction.log_weights
            ),
            y[:, d],
            level=0.8,
        )
        torch.testing.assert_close(found.low[:, d], one.low)
        torch.testing.assert_close(found.width[:, d], one.width)
        assert torch.equal(found.inside[:, d], one.inside)
    covariance = torch.tensor([[1.0, 0.5], [0.5, 4.0]]).double()
    width = metrics.interval(
        MultivariateNormal(randn(3, 2), covariance), randn(3, 2), level=0.95
    ).width
    torch.testing.assert_close(
        width, 2 * scipy.stats.norm.ppf(0.975) * torch.tensor([[1.0, 2.0]]).double().expand(3, 2)
    )


def test_intervals_of_a_true_model_cover_as_claimed() -> None:
    prediction = mixture(num=4000)
    y = prediction.sample(generator=gen(5))
    found = metrics.coverage(metrics.interval(prediction, y, level=0.8).inside, level=1 - 1e-5)
    assert found.low <= 0.8 <= found.high
    assert found.high - found.low < 0.06


# --- binomial intervals


@quick
@given(st.floats(0, 1, allow_subnormal=False), st.floats(1e-2, 1e4), st.floats(1e-2, 1e4))
def test_incomplete_beta_against_scipy(x: float, a: float, b: float) -> None:
    """As exact as the rounding of lgamma allows; below the normal floats scipy itself is off (see
    the next test)."""
    rounding = 4 * math.ulp(
        abs(math.lgamma(a + b)) + abs(math.lgamma(a)) + abs(math.lgamma(b))
    ) + 4 * math.ulp(1.0)
    expected = scipy.special.betainc(a, b, x)
    assert metrics.incomplete_beta(x, a, b) == pytest.approx(expected, rel=1e-10, abs=rounding)


@pytest.mark.parametrize("x", [5e-324, 1e-300, 1e-9, 0.25, 1 - 1e-9])
@pytest.mark.parametrize("a", [0.03125, 1.0, 7.5])
def test_incomplete_beta_closed_form(x: float, a: float) -> None:
    expected = math.exp(a * math.log(x)) * (1 + a - a * x)  # b = 2
    assert metrics.incomplete_beta(x, a, 2.0) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("size", [10, 10**3, 10**6, 10**8])
@pytest.mark.parametrize("x", [1e-6, 0.3, 0.5, 0.999])
def test_incomplete_beta_at_any_size(x: float, size: int) -> None:
    for a in (1.0, size * x, size * x + 2 * math.sqrt(size * x * (1 - x)) + 1e-3):
        expected = scipy.special.betainc(a, size - a + 1, x)
        assert metrics.incomplete_beta(x, a, size - a + 1) == pytest.approx(
            expected, rel=1e-6, abs=1e-12
        )


@quick
@given(st.data(), st.integers(1, 2000), st.sampled_from([0.5, 0.9, 0.95, 0.999]))
def test_binomial_intervals_against_scipy(data: st.DataObject, num: int, level: float) -> None:
    successes = data.draw(st.integers(0, num))
    test = scipy.stats.binomtest(successes, num)
    for mine, theirs in ((metrics.clopper_pearson, "exact"), (metrics.wilson, "wilson")):
        expected = test.proportion_ci(level, method=theirs)
        low, high = mine(successes, num, level=level)
        assert low == pytest.approx(expected.low, rel=1e-9, abs=1e-12)
        assert high == pytest.approx(expected.high, rel=1e-9, abs=1e-12)
        assert 0 <= low <= successes / num <= high <= 1


def test_one_sided_clopper_pearson() -> None:
    for successes, num, alpha in (
        (99_500, 100_000, 0.001),
        (1, 10_000, 0.05),
        (9_990, 10_000, 1e-6),
    ):
        low, top = metrics.clopper_pearson(successes, num, level=1 - alpha, side="lower")
        assert top == 1
        assert low == pytest.approx(
            scipy.stats.beta.ppf(alpha, successes, num - successes + 1), rel=1e-8
        )
        bottom, high = metrics.clopper_pearson(successes, num, level=1 - alpha, side="upper")
        assert bottom == 0
        assert high == pytest.approx(
            scipy.stats.beta.isf(alpha, successes + 1, num - successes), rel=1e-8
        )
    assert metrics.clopper_pearson(0, 10) == (0.0, 1 - 0.025**0.1)
    assert metrics.clopper_pearson(0, 10, side="lower") == (0.0, 1.0)


def test_wilson_of_fractional_successes_lies_between() -> None:
    below, between, above = (metrics.wilson(s, 20) for s in (7, 7.5, 8))
    assert below[0] < between[0] < above[0]
    assert below[1] < between[1] < above[1]


def test_clopper_pearson_covers_at_least_its_level() -> None:
    num, level = 30, 0.9
    bounds = [metrics.clopper_pearson(k, num, level=level) for k in range(num + 1)]
    for p in np.linspace(0.01, 0.99, 99):
        inside = sum(
            scipy.stats.binom.pmf(k, num, p)
            for k, (low, high) in enumerate(bounds)
            if low <= p <= high
        )
        assert inside >= level


# --- reductions


def test_accuracy_and_coverage_are_wilson() -> None:
    correct = randint(2, 300) == 1
    found = metrics.accuracy(correct, level=0.99)
    assert (found.low, found.high) == metrics.wilson(int(correct.sum()), 300, level=0.99)
    assert (found.value, found.num, found.level) == (correct.double().mean().item(), 300, 0.99)
    assert metrics.coverage(correct, level=0.99) == found
    pairs = torch.stack([correct, correct], 1)
    assert metrics.coverage(pairs, level=0.99) == found  # the second output is no second example
    assert metrics.accuracy(correct.numpy(), level=0.99) == found  # arrays
    assert metrics.accuracy(correct.tolist(), level=0.99) == found  # lists
    assert metrics.accuracy(correct[:, None], level=0.99) == found


def test_mean_interval_against_scipy() -> None:
    scores = rand(400).square()
    found = metrics.mean(scores)
    low, high = scipy.stats.norm.interval(0.95, scores.mean().item(), scipy.stats.sem(scores))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)
    resampled = metrics.mean(scores, method="bootstrap", num_resamples=4000)
    theirs = scipy.stats.bootstrap(
        (scores.numpy(),), np.mean, n_resamples=4000, method="percentile", rng=0
    )
    half = (high - low) / 2
    assert resampled.low == pytest.approx(theirs.confidence_interval.low, abs=0.15 * half)
    assert resampled.high == pytest.approx(theirs.confidence_interval.high, abs=0.15 * half)


def test_a_list_counts_as_the_array_of_its_numbers() -> None:
    """In float64: as torch reads a list, its floats are rounded to float32."""
    values = [0.1, 0.2, 0.35]
    assert metrics.mean(values) == metrics.mean(np.array(values))
    assert metrics.mean([0.1, 0.1]).value == 0.1
    assert metrics.rmse(values) == metrics.rmse(np.array(values))


def test_bootstrap_is_keyed() -> None:
    errors = rand(50)
    first = metrics.rmse(errors)
    assert first == metrics.rmse(errors)
    assert metrics.rmse(errors, generator=gen(1)) == metrics.rmse(errors, generator=gen(1))
    assert metrics.rmse(errors, generator=gen(1)) != metrics.rmse(errors, generator=gen(2))
    assert first.low < first.value < first.high
    state = torch.get_rng_state()
    metrics.rmse(errors)
    assert torch.equal(torch.get_rng_state(), state)


def test_bootstrap_covers() -> None:
    """The RMSE of Gaussian errors is 1; 400 intervals at 90 % miss it about 40 times (binomial
    bounds at 1e-5)."""
    hits = 0
    for seed in range(400):
        found = metrics.rmse(
            randn(100, seed=seed).square(), level=0.9, num_resamples=200, generator=gen(seed)
        )
        hits += found.low <= 1 <= found.high
    # percentile intervals at n = 100 fall a little short
    low, high = scipy.stats.binom.ppf([1e-5, 1 - 1e-5], 400, 0.88)
    assert low <= hits <= high


def test_one_example_says_nothing_about_spread() -> None:
    assert metrics.mean([2.0]) == metrics.Estimate(2.0, -math.inf, math.inf, 1, 0.95)
    assert metrics.mean([2.0], method="bootstrap") == metrics.Estimate(
        2.0, -math.inf, math.inf, 1, 0.95
    )
    assert metrics.rmse([4.0]) == metrics.Estimate(2.0, 0.0, math.inf, 1, 0.95)
    assert metrics.ece([0.75], [1]) == metrics.Estimate(0.25, 0.0, 1.0, 1, 0.95)


def test_infinite_scores_make_infinite_means() -> None:
    for method in ("normal", "bootstrap"):
        found = metrics.mean([1.0, math.inf, 2.0], method=method)
        assert (found.value, found.low, found.high) == (math.inf, math.inf, math.inf)
    assert metrics.rmse([math.inf, 1.0]).value == math.inf
    with pytest.raises(ValueError, match="both"):
        metrics.mean([math.inf, -math.inf])


# --- calibration


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_against_torchmetrics(bins: int) -> None:
    prediction, y = categorical(500)
    expected = torchmetrics.calibration_error(
        prediction.probs, y, task="multiclass", n_bins=bins, num_classes=5
    ).item()
    confidence, correct = metrics.confidence(prediction), metrics.correct(prediction, y)
    found = metrics.ece(confidence, correct, bins=bins, binning="equal_width", num_resamples=50)
    assert found.value == pytest.approx(expected, rel=1e-5)  # torchmetrics bins in float32
    assert found.low <= found.value <= found.high


def test_equal_mass_ece_by_hand() -> None:
    confidence, correct = rand(97), (randint(2, 97, seed=1) == 1).double()
    order = confidence.argsort()
    groups: list[list[int]] = [[] for _ in range(10)]
    for rank, index in enumerate(order.tolist()):
        groups[rank * 10 // 97].append(index)
    expected = sum(
        len(g) / 97 * abs((correct[g].mean() - confidence[g].mean()).item()) for g in groups
    )
    assert metrics.ece(confidence, correct, bins=10, num_resamples=2).value == pytest.approx(
        expected, rel=1e-12
    )
    found = metrics.reliability(confidence, correct, bins=10)
    assert sorted({b.accuracy.num for b in found}) == [9, 10]
    assert [b.confidence for b in found] == pytest.approx(
        [confidence[g].mean().item() for g in groups]
    )


@quick
@given(
    st.integers(1, 60),
    st.integers(1, 8),
    st.integers(0, 10**6),
    st.sampled_from(["equal_mass", "equal_width"]),
)
def test_ece_properties(num: int, bins: int, seed: int, binning: str) -> None:
    # many ties
    confidence, correct = ((4 * rand(num, seed=seed)).round() / 4, randint(2, num, seed=seed + 1))
    found = metrics.ece(confidence, correct, bins=bins, binning=binning, num_resamples=20)
    assert 0 <= found.low <= found.value <= found.high <= 1
    order = torch.randperm(num, generator=gen(seed))
    again = metrics.ece(
        confidence[order], correct[order], bins=bins, binning=binning, num_resamples=20
    )
    assert again.value == pytest.approx(found.value, abs=1e-12)
    # one bin is least
    assert found.value >= abs(confidence.mean().item() - correct.double().mean().item()) - 1e-12
    diagram = metrics.reliability(confidence, correct, bins=bins, binning=binning)
    assert sum(b.accuracy.num for b in diagram) == num
    assert all(b.low - 1e-12 <= b.confidence <= b.high + 1e-12 for b in diagram)
    total = sum(b.accuracy.num / num * abs(b.accuracy.value - b.confidence) for b in diagram)
    assert total == pytest.approx(found.value, abs=1e-12)


def test_equal_width_edges() -> None:
    found = metrics.reliability([0.0, 0.5, 1.0], [0, 1, 1], bins=2, binning="equal_width")
    assert [(b.low, b.high, b.accuracy.num) for b in found] == [(0.0, 0.5, 1), (0.5, 1.0, 2)]
    # empty bins are left out
    assert len(metrics.reliability([0.95], [1], bins=10, binning="equal_width")) == 1


@pytest.mark.parametrize("binning", ["equal_mass", "equal_width"])
@pytest.mark.parametrize("gap", [0.0, 0.1])
def test_ece_interval_holds_the_truth(gap: float, binning: str) -> None:
    """At 95 %, 60 trials miss more than 12 times with probability 1e-5; a plain percentile interval
    misses all at gap 0."""
    misses = 0
    for seed in range(60):
        confidence = 0.5 + 0.5 * rand(300, seed=2 * seed)
        correct = rand(300, seed=2 * seed + 1) < confidence - gap
        found = metrics.ece(confidence, correct, bins=10, binning=binning, num_resamples=100)
        misses += not found.low <= gap <= found.high
    assert scipy.stats.binom.sf(12, 60, 0.05) < 1e-5
    assert misses <= 12


# --- selection


def brute_risks(losses: list[float], confidence: list[float]) -> list[float]:
    """Mean over every order of the examples that is sorted by confidence."""
    num = len(losses)
    total, ways = [Fraction(0)] * num, 0
    for order in itertools.permutations(range(num)):
        if all(confidence[a] >= confidence[b] for a, b in itertools.pairwise(order)):
            ways += 1
            for k in range(num):
                total[k] += Fraction(sum(Fraction(losses[i]) for i in order[: k + 1]), k + 1)
    return [float(t / ways) for t in total]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=6))
def test_risk_coverage_is_the_mean_over_tie_breaking(pairs: list[tuple[int, int]]) -> None:
    losses, confidence = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    expected = brute_risks(losses, confidence)
    found = metrics.risk_coverage(losses, confidence)
    assert found.risk == pytest.approx(expected, abs=1e-12)
    assert found.coverage == pytest.approx([(k + 1) / len(pairs) for k in range(len(pairs))])
    assert found.aurc == pytest.approx(sum(expected) / len(expected), abs=1e-12)
    estimate = metrics.aurc(losses, confidence, num_resamples=10)
    assert estimate.value == pytest.approx(found.aurc, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=6),
    st.floats(0.01, 1.0),
)
def test_selective_accuracy_is_the_mean_over_tie_breaking(
    pairs: list[tuple[int, int]], coverage: float
) -> None:
    correct, confidence = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    found = metrics.selective_accuracy(correct, confidence, coverage=coverage)
    assert coverage * len(pairs) - 1e-6 <= found.num < coverage * len(pairs) + 1
    assert found.value == pytest.approx(brute_risks(correct, confidence)[found.num - 1], abs=1e-12)
    assert (found.low, found.high) == pytest.approx(
        metrics.wilson(found.value * found.num, found.num)
    )


def test_selection_extremes_and_invariance() -> None:
    correct, score = randint(2, 200), randn(200, seed=1)
    everything = metrics.selective_accuracy(correct, score, coverage=1.0)
    assert everything.value == pytest.approx(metrics.accuracy(correct).value)
    oracle = metrics.selective_accuracy(correct, correct, coverage=correct.double().mean().item())
    assert oracle.value == 1
    first = metrics.risk_coverage(1 - correct, score)
    # only the order matters
    assert metrics.risk_coverage(1 - correct, score.exp()).risk == first.risk
    order = torch.randperm(200, generator=gen())
    assert metrics.risk_coverage(1 - correct[order], score[order]).risk == pytest.approx(first.risk)
    assert (
        metrics.risk_coverage(1 - correct, correct).aurc
        < first.aurc
        < metrics.risk_coverage(1 - correct, -correct).aurc
    )
    assert (
        metrics.selective_accuracy([1, 1, 0], [math.inf, 0.0, -math.inf], coverage=0.6).value == 1
    )
    assert (
        metrics.selective_accuracy([1] * 55 + [0] * 45, list(range(100, 0, -1)), coverage=0.55).num
        == 55
    )


# --- AUROC


@quick
@given(
    st.integers(2, 60),
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from(["delong", "hanley_mcneil"]),
)
def test_auroc_against_sklearn_and_pairs(num: int, seed: int, ties: bool, method: str) -> None:
    scores, positive = randn(num, seed=seed), randint(2, num, seed=seed + 1) == 1
    positive[0], positive[1] = True, False
    scores = scores.round() if ties else scores
    found = metrics.auroc(scores, positive, method=method)
    assert found.value == pytest.approx(sklearn.metrics.roc_auc_score(positive, scores), abs=1e-12)
    difference = scores[positive][:, None] - scores[~positive]
    pairs = (difference > 0).double() + 0.5 * (difference == 0)
    assert found.value == pytest.approx(pairs.mean().item(), abs=1e-12)
    assert 0 <= found.low <= found.value <= found.high <= 1
    flipped = metrics.auroc(-scores, positive, method=method)
    assert flipped.value == pytest.approx(1 - found.value, abs=1e-12)
    assert (1 - flipped.high, 1 - flipped.low) == pytest.approx((found.low, found.high), abs=1e-9)
    if method == "delong" and min(positive.sum(), (~positive).sum()) > 1:
        variance = pairs.mean(1).var() / len(pairs) + pairs.mean(0).var() / pairs.shape[1]
        half = scipy.stats.norm.ppf(0.975) * variance.sqrt().item()
        assert found.low == pytest.approx(max(0, found.value - half), abs=1e-9)


def test_auroc_interval_solves_the_score_equation() -> None:
    scores, positive = randn(80), randint(2, 80, seed=1) == 1
    scores = scores + positive.double()
    found = metrics.auroc(scores, positive)
    m, n = int(positive.sum()), int((~positive).sum())
    for a in (found.low, found.high):
        rest = 1 + ((m + n) / 2 - 1) * ((1 - a) / (2 - a) + a / (1 + a))
        assert (found.value - a) ** 2 == pytest.approx(
            3.8414588 * a * (1 - a) * rest / (m * n), rel=1e-6
        )


def test_auroc_extremes() -> None:
    perfect = metrics.auroc([0, 1, 2, 3], [0, 0, 1, 1])
    assert (perfect.value, perfect.high) == (1, 1)
    assert 0.1 < perfect.low < 0.7  # four examples do not make certain
    assert metrics.auroc([0, 1, 2, 3], [0, 0, 1, 1], method="delong").low == 1
    assert metrics.auroc([5, 5, 5], [0, 1, 1]).value == 0.5
    assert metrics.auroc([-math.inf, math.inf], [0, 1]).value == 1
    assert metrics.auroc([0.0, 1.0], [0, 1], method="delong").low == 0  # one of each: nothing known


@pytest.mark.parametrize("method", ["delong", "hanley_mcneil"])
def test_auroc_interval_covers(method: str) -> None:
    truth, hits = scipy.stats.norm.cdf(1 / math.sqrt(2)), 0
    positive = torch.arange(100) < 40
    for seed in range(400):
        found = metrics.auroc(randn(100, seed=seed) + positive, positive, method=method)
        hits += found.low <= truth <= found.high
    low, high = scipy.stats.binom.ppf([1e-5, 1 - 1e-5], 400, [0.94, 0.96])
    assert low <= hits <= high


# --- comparison


@quick
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 5))
def test_mcnemar_is_the_exact_sign_test(only_first: int, only_second: int, both: int) -> None:
    first = [1] * only_first + [0] * only_second + [1] * (both + 1)
    second = [0] * only_first + [1] * only_second + [1] * (both + 1)
    expected = scipy.stats.binomtest(
        only_first, max(1, only_first + only_second), alternative="greater"
    ).pvalue
    assert metrics.mcnemar(first, second) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_of_many_pairs() -> None:
    first, second = torch.zeros(10_000), torch.zeros(10_000)
    first[:5100], second[5100:] = 1, 1
    expected = scipy.stats.binom.sf(5099, 10_000, 0.5)
    assert metrics.mcnemar(first, second) == pytest.approx(expected, rel=1e-9)
    assert metrics.mcnemar(second, first) == pytest.approx(
        1 - scipy.stats.binom.cdf(4899, 10_000, 0.5), rel=1e-9
    )


def test_paired_difference_sees_what_unpaired_would_miss() -> None:
    hard = 10 * randn(300).abs()  # examples differ far more than the two predictors do
    first, second = hard + 0.1 * rand(300, seed=1), hard + 0.05 + 0.1 * rand(300, seed=2)
    found = metrics.paired_difference(first, second)
    assert found.value == pytest.approx((first - second).mean().item())
    assert -0.07 < found.low < found.high < -0.03
    back = metrics.paired_difference(second, first)
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low), abs=1e-12)


@quick
@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_by_definition(p_values: list[float]) -> None:
    adjusted = metrics.holm(p_values)
    for alpha in (0.01, 0.05, 0.3):
        rejected = set()
        for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
            if (len(p_values) - rank) * p_values[index] > alpha:
                break
            rejected.add(index)
        assert rejected == {i for i, p in enumerate(adjusted) if p <= alpha}
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))


# --- trivial predictors


def test_uniform_scores_log_c() -> None:
    x, y = randn(50, 3), randint(4, 50)
    torch.testing.assert_close(
        metrics.nll(metrics.uniform(4)(x), y), torch.full((50,), math.log(4)).double()
    )


def test_majority_is_the_best_constant_answer() -> None:
    y = torch.tensor([2] * 5 + [0] * 3)
    predict = metrics.majority(y, num_classes=4)
    prediction = predict(torch.zeros(8, 2, 2))
    assert metrics.accuracy(metrics.correct(prediction, y)).value == 5 / 8
    torch.testing.assert_close(prediction.probs[0], torch.tensor([4, 1, 6, 1]) / 12)
    assert len(metrics.majority(y).probs) == 3
    assert predict == metrics.majority(y[:, None], num_classes=4)


def test_constant_reaches_the_standard_deviation_and_the_gaussian_floor() -> None:
    y = 3 + 2 * randn(100)
    prediction = metrics.constant(y)(torch.zeros(100, 7, dtype=torch.float64))
    root = metrics.rmse(metrics.squared_error(prediction, y)).value
    assert root == pytest.approx(y.std(correction=0).item(), rel=1e-5)
    floor = 0.5 * math.log(2 * math.pi * math.e) + math.log(root)
    assert metrics.mean(metrics.nll(prediction, y)).value == pytest.approx(floor, rel=1e-5)
    several = metrics.constant(randn(20, 3))(torch.zeros(5, 2))
    assert (several.batch_shape, several.event_shape) == ((5,), (3,))


@pytest.mark.parametrize(
    "predict", [metrics.uniform(3), metrics.constant(torch.tensor([0.0, 1.0]))]
)
def test_trivial_predictors_can_be_attacked_in_vain(predict: metrics.ConstantClasses) -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    score = metrics.nll(predict(x), torch.tensor([1, 0])).sum()
    assert torch.equal(torch.autograd.grad(score, x)[0], torch.zeros(2, 3))


# --- bad input


class Unnormalised(torch.distributions.Distribution):
    """What a careless predictor might hand over."""

    def __init__(self, probs: torch.Tensor) -> None:
        self.probs = probs
        super().__init__(probs.shape[:1], validate_args=False)


FOUR = Normal(torch.zeros(4), 1.0)
CLASSES = Categorical(logits=torch.zeros(4, 3))
Y = torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: metrics.brier(Unnormalised(torch.full((2, 2), 0.6)), Y[:2]),
            ValueError,
            "probs must .* sum to 1.*0.2",
        ),
        (
            lambda: metrics.confidence(Unnormalised(torch.tensor([[1.5, -0.5]]))),
            ValueError,
            "non-negative",
        ),
        (
            lambda: metrics.confidence(Unnormalised(torch.tensor([[math.nan, 1.0]]))),
            ValueError,
            "probs must be finite",
        ),
        (lambda: metrics.correct(FOUR, Y), TypeError, "prediction must be categorical"),
        (
            lambda: metrics.confidence(OneHotCategorical(logits=torch.zeros(4, 3))),
            TypeError,
            "categorical",
        ),
        (lambda: metrics.squared_error(CLASSES, Y), TypeError, "squared_error wants a regression"),
        (
            lambda: metrics.entropy(torch.zeros(3)),
            TypeError,
            "prediction must be a torch Distribution",
        ),
        (
            lambda: metrics.nll(Categorical(logits=torch.zeros(2, 4, 3)), Y),
            ValueError,
            r"batch shape \(B,\).*\(2, 4\)",
        ),
        (lambda: metrics.nll(Normal(torch.zeros(0), 1.0), torch.zeros(0)), ValueError, "B >= 1"),
        (
            lambda: metrics.nll(Normal(torch.zeros(4, 2), 1.0), torch.zeros(4, 2)),
            ValueError,
            "batch shape",
        ),
        (
            lambda: metrics.nll(CLASSES, torch.zeros(4)),
            TypeError,
            "y must be a tensor of integer class labels",
        ),
        (
            lambda: metrics.nll(CLASSES, torch.zeros(4, dtype=torch.bool)),
            TypeError,
            "integer class labels",
        ),
        (
            lambda: metrics.nll(CLASSES, Y[:3]),
            ValueError,
            r"one label per prediction, shape \(4,\)",
        ),
        (
            lambda: metrics.nll(CLASSES, torch.zeros(4, 3, dtype=torch.long)),
            ValueError,
            "one label per",
        ),
        (lambda: metrics.nll(CLASSES, Y + 3), ValueError, "labels from 0 to 2, got 3 to 3"),
        (lambda: metrics.nll(CLASSES, Y - 1), ValueError, "labels from 0 to 2, got -1"),
        (lambda: metrics.nll(FOUR, torch.zeros(4, 4)), ValueError, r"prediction's shape \(4,\)"),
        (lambda: metrics.nll(FOUR, torch.zeros(1)), ValueError, r"prediction's shape \(4,\)"),
        (lambda: metrics.crps(FOUR, torch.zeros(1, 4)), ValueError, r"prediction's shape \(4,\)"),
        (
            lambda: metrics.squared_error(FOUR, torch.full((4,), math.nan)),
            ValueError,
            "y must be finite, got 4 NaN",
        ),
        (lambda: metrics.squared_error(FOUR, [0.0] * 4), TypeError, "y must be a real tensor"),
        (lambda: metrics.quantile(FOUR, 1.0), ValueError, "q must be .* < 1"),
        (
            lambda: metrics.interval(FOUR, torch.zeros(4), level=95),
            ValueError,
            "level must be .* < 1",
        ),
        (
            lambda: metrics.quantile(Independent(Laplace(torch.zeros(4, 2), 1.0), 1), 0.5),
            TypeError,
            "quantiles of Independent .* outputs are not known",
        ),
        (
            lambda: metrics.quantile(torch.distributions.StudentT(5.0, torch.zeros(4)), 0.5),
            TypeError,
            "must have a cdf",
        ),
        (
            lambda: metrics.crps(Laplace(torch.zeros(4), 1.0), torch.zeros(4), num_samples=1),
            ValueError,
            "num_samples",
        ),
        (lambda: metrics.accuracy([]), ValueError, r"correct must have shape \(N,\) with N >= 1"),
        (lambda: metrics.accuracy([0.5, 1.0]), ValueError, "correct must hold True and False"),
        (lambda: metrics.accuracy("yes"), TypeError, "correct must be a tensor or an array"),
        (lambda: metrics.accuracy([True], level=1.0), ValueError, "level must be"),
        (
            lambda: metrics.balanced_accuracy([1, 0], [0, 0.9999]),
            ValueError,
            "labels must hold whole numbers",
        ),
        (lambda: metrics.recall([1, 0], [0, 1.5], of=1), ValueError, "whole numbers"),
        (lambda: metrics.coverage(torch.zeros(0, 2)), ValueError, "N >= 1"),
        (lambda: metrics.coverage(torch.full((2, 2), 0.5)), ValueError, "inside must hold"),
        (
            lambda: metrics.mean([1.0, math.nan]),
            ValueError,
            "scores must not be NaN, got 1 NaN of 2",
        ),
        (lambda: metrics.mean(torch.zeros(3, 2)), ValueError, r"scores must have shape \(N,\)"),
        (
            lambda: metrics.mean(torch.zeros(3, dtype=torch.complex64)),
            TypeError,
            "scores must be real",
        ),
        (lambda: metrics.mean([1.0], method="student"), ValueError, "method must be one of"),
        (lambda: metrics.rmse([-1.0, 1.0]), ValueError, "squared_errors must be >= 0"),
        (lambda: metrics.rmse([1.0, 1.0], num_resamples=1), ValueError, "num_resamples"),
        (lambda: metrics.ece([0.5, 1.2], [1, 0]), ValueError, r"confidence must lie in \[0, 1\]"),
        (
            lambda: metrics.ece([0.5, 0.5], [1]),
            ValueError,
            "confidence and correct must .* got 2 and 1",
        ),
        (lambda: metrics.ece([0.5], [1], bins=0), ValueError, "bins"),
        (lambda: metrics.ece([0.5], [1], binning="quantile"), ValueError, "binning must be one of"),
        (
            lambda: metrics.risk_coverage([1.0, math.inf], [1, 2]),
            ValueError,
            "losses must be finite",
        ),
        (
            lambda: metrics.risk_coverage([1.0], [math.nan]),
            ValueError,
            "confidence must not be NaN",
        ),
        (
            lambda: metrics.selective_accuracy([1], [1], coverage=0.0),
            ValueError,
            "coverage must be",
        ),
        (
            lambda: metrics.auroc([1, 2], [1, 1]),
            ValueError,
            "both kinds, got 2 positive and 0 negative",
        ),
        (
            lambda: metrics.auroc([1, 2], [1, 0], method="exact"),
            ValueError,
            "method must be one of",
        ),
        (lambda: metrics.mcnemar([1, 0], [1]), ValueError, "first and second"),
        (lambda: metrics.paired_difference([1.0, 2.0], [1.0]), ValueError, "first and second"),
        (lambda: metrics.holm([0.5, 1.5]), ValueError, r"p_values\[1\]"),
        (lambda: metrics.wilson(5, 0), ValueError, "num must be"),
        (lambda: metrics.wilson(5, 4), ValueError, "successes must be"),
        (lambda: metrics.clopper_pearson(5, 4), ValueError, "successes must be at most num = 4"),
        (lambda: metrics.clopper_pearson(0.5, 4), TypeError, "successes"),  # type: ignore[arg-type]
        (lambda: metrics.clopper_pearson(1, 4, side="left"), ValueError, "side must be one of"),
        (lambda: metrics.Estimate(1.0, 2.0, 3.0, 1, 0.95), ValueError, "low <= value <= high"),
        (lambda: metrics.Estimate(math.nan, 0.0, 1.0, 1, 0.95), ValueError, "low <= value <= high"),
        (lambda: metrics.uniform(0), ValueError, "num_classes"),
        (lambda: metrics.majority(torch.zeros(3)), TypeError, "integer class labels"),
        (lambda: metrics.majority(Y + 2, num_classes=2), ValueError, "labels from 0 to 1, got 2"),
        (lambda: metrics.majority(Y[:0]), ValueError, "N >= 1"),
        (lambda: metrics.constant(torch.ones(3)), ValueError, "y must vary"),
        (lambda: metrics.constant(torch.tensor([1.0, math.nan])), ValueError, "y must be finite"),
        (lambda: metrics.ConstantClasses((0.5, 0.6)), ValueError, "sum to 1"),
        (lambda: metrics.ConstantGaussian((0.0,), (0.0,)), ValueError, "scale must be > 0"),
    ],
)
def test_bad_input_is_named(call: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()  # type: ignore[operator]


def test_float32_rounding_of_probabilities_is_no_error() -> None:
    prediction = Categorical(logits=torch.randn(64, 1000, generator=gen()) * 10)
    confidence = metrics.confidence(prediction)
    assert confidence.max() <= 1
    assert 0 <= reductions.ece(confidence, randint(2, 64), num_resamples=2).value <= 1

"""Likelihoods and predictive mixtures against torch's own distributions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Independent, MixtureSameFamily, Normal

from advbayes import Categorical, Gaussian, GaussianMixture, HeteroscedasticGaussian
from advbayes.likelihoods import mix
from tests.contracts import seeded

NONE = torch.empty(0, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("likelihood", "output", "y", "extra"),
    [
        (Categorical(), normal(6, 4), torch.arange(6) % 4, NONE),
        (Gaussian(0.3), normal(6, 1), normal(6, seed=1), NONE),
        (Gaussian(0.3), normal(6, 1), normal(6, 1, seed=1), NONE),
        (Gaussian(0.3), normal(6, 3), normal(6, 3, seed=1), NONE),
        (Gaussian((0.3, 1.0, 2.0), num_outputs=3), normal(6, 3), normal(6, 3, seed=1), NONE),
        (Gaussian(learned=True), normal(6, 1), normal(6, seed=1), normal(1, seed=2)),
        (
            Gaussian(learned=True, num_outputs=3),
            normal(6, 3),
            normal(6, 3, seed=1),
            normal(3, seed=2),
        ),
        (Gaussian(learned=True, unit=3.0), normal(6, 1), normal(6, seed=1), normal(1, seed=2)),
        (HeteroscedasticGaussian(unit=(2.0, 3.0, 4.0)), normal(6, 6), normal(6, 3, seed=1), NONE),
        (HeteroscedasticGaussian(), normal(6, 2), normal(6, seed=1), NONE),
        (HeteroscedasticGaussian(), normal(6, 6), normal(6, 3, seed=1), NONE),
    ],
)
def test_the_short_way_to_log_prob_is_the_distribution_s(likelihood, output, y, extra) -> None:  # type: ignore[no-untyped-def]
    prediction = likelihood(output, extra)
    assert prediction.batch_shape == (6,)
    torch.testing.assert_close(
        likelihood.log_prob(output, y, extra),
        prediction.log_prob(y.squeeze(-1) if y.ndim == 2 and y.shape[1] == 1 else y),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("scale", [0.5, (0.5,), (0.5, 0.5, 0.5)])
def test_learned_scales_start_at_the_one_given_for_all(scale: float | tuple[float, ...]) -> None:
    likelihood = Gaussian(scale, learned=True, num_outputs=3)
    assert likelihood.initial_extra() == [math.log(0.5)] * 3


def test_scales_are_in_their_unit() -> None:
    output, units = normal(6, 4), torch.tensor([1e-9, 1e9], dtype=torch.float64)
    unit = tuple(units.tolist())
    learned = Gaussian((2e-9, 3e9), learned=True, num_outputs=2, unit=unit)
    start = torch.tensor(learned.initial_extra(), dtype=torch.float64)
    torch.testing.assert_close(start.exp(), torch.tensor([2.0, 3.0], dtype=torch.float64))
    stddev = learned(output[:, :2], start).stddev
    torch.testing.assert_close(stddev, (torch.tensor([2.0, 3.0]) * units).expand(6, 2))
    by_input = HeteroscedasticGaussian(0.5, unit=unit)(output, NONE).stddev
    torch.testing.assert_close(by_input, output[:, 2:].exp().clamp_min(0.5) * units)
    with pytest.raises(ValueError, match="unit must be one number or 1"):
        HeteroscedasticGaussian(unit=unit)(output[:, :2], NONE)
    with pytest.raises(ValueError, match="unit must be one number or 3"):
        Gaussian(num_outputs=3, unit=unit)


def test_gaussian_mixture_is_torch_s_mixture() -> None:
    means, scales, logits = normal(5, 7), normal(5, 7, seed=1).exp(), normal(5, 7, seed=2)
    ours = GaussianMixture(means, scales, logits)
    oracle = MixtureSameFamily(TorchCategorical(logits=logits.T), Normal(means.T, scales.T))
    y = normal(7, seed=3)
    for name in ("mean", "variance"):
        torch.testing.assert_close(
            getattr(ours, name), getattr(oracle, name), rtol=1e-12, atol=1e-12
        )
    torch.testing.assert_close(ours.log_prob(y), oracle.log_prob(y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.cdf(y), oracle.cdf(y), rtol=1e-12, atol=1e-12)
    for level in (0.01, 0.5, 0.975):
        torch.testing.assert_close(
            ours.cdf(ours.icdf(torch.tensor(level))), torch.full((7,), level, dtype=torch.float64)
        )


def test_gaussian_mixture_of_vectors_shares_its_component() -> None:
    means, scales = normal(5, 7, 2), normal(5, 7, 2, seed=1).exp()
    ours = GaussianMixture(means, scales)
    oracle = MixtureSameFamily(
        TorchCategorical(logits=torch.zeros(7, 5, dtype=torch.float64)),
        Independent(Normal(means.transpose(0, 1), scales.transpose(0, 1)), 1),
    )
    y = normal(7, 2, seed=3)
    torch.testing.assert_close(ours.log_prob(y), oracle.log_prob(y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.variance, oracle.variance, rtol=1e-12, atol=1e-12)
    assert ours.entropy().shape == (7,)
    assert ours.sample((4,), generator=seeded()).shape == (4, 7, 2)


def test_entropy_of_one_gaussian_is_exact_and_of_many_an_upper_bound() -> None:
    one = GaussianMixture(normal(1, 3), torch.full((1, 3), 0.7, dtype=torch.float64))
    torch.testing.assert_close(
        one.entropy(),
        torch.full((3,), 0.5 * math.log(2 * math.pi * math.e * 0.49), dtype=torch.float64),
    )
    many = GaussianMixture(3 * normal(4, 3), torch.full((4, 3), 0.2, dtype=torch.float64))
    sampled = many.monte_carlo_entropy(20_000, generator=seeded())
    assert bool((sampled < many.entropy()).all())


def test_samples_follow_the_mixture() -> None:
    mixture = GaussianMixture(
        torch.tensor([[-2.0], [3.0]]),
        torch.tensor([[0.5], [1.0]]),
        torch.tensor([0.25, 0.75]).log(),
    )
    draws = mixture.sample((40_000,), generator=seeded())
    error = 6 * float(mixture.variance.sqrt()) / 200
    assert float(draws.mean()) == pytest.approx(float(mixture.mean), abs=error)
    below = float((draws <= 0).double().mean())
    assert below == pytest.approx(float(mixture.cdf(torch.zeros(1))), abs=6 * 0.5 / 200)


def test_mixing_averages_probabilities_not_logits() -> None:
    logits = normal(3, 5, 4)
    each = Categorical()(logits, NONE)
    torch.testing.assert_close(mix(each).probs, each.probs.mean(0), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(mix(each).probs, logits.mean(0).softmax(-1))


def test_certain_but_disagreeing_thetas_stay_finite() -> None:
    each = Categorical()(torch.tensor([[[1000.0, 0.0]], [[0.0, 1000.0]]]), torch.empty(0))
    prediction = mix(each)
    assert prediction.log_prob(torch.tensor([0])).item() == pytest.approx(math.log(0.5), rel=1e-6)
    assert math.isfinite(float(prediction.entropy()))


def test_targets_are_never_broadcast() -> None:
    prediction = Gaussian(1.0)(normal(4, 1), NONE)
    column, row = normal(4, 1, seed=2), normal(4, seed=2)
    torch.testing.assert_close(prediction.log_prob(column), prediction.log_prob(column.squeeze(1)))
    for wrong in (row[:3], row.view(1, 4), row.expand(4, 4)):
        with pytest.raises(ValueError, match="y must have the prediction's shape"):
            prediction.log_prob(wrong)

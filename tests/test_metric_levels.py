"""The level, the overlap and the coverage that metrics are asked for are those they answer with."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributions import Normal

from advbayes import metrics
from advbayes.metrics import Estimate
from advbayes.metrics.intervals import resamples
from advbayes.seeds import generator_for


def _risk_coverage(generator: torch.Generator, level: float) -> tuple[Estimate, float]:
    """Answers as often wrong as they say: the j-th surest of N is wrong with probability j / (N +
    1), and the mean risk 1/4 + 1 / (2 (N + 1))."""
    confidence = torch.rand(100, generator=generator)
    losses = (torch.rand(100, generator=generator) < 1 - confidence).float()
    found = metrics.aurc(losses, confidence, level=level, num_resamples=200, generator=generator)
    return found, 0.25 + 1 / 202


@lru_cache(None)
def _precision() -> float:
    """Of scores of two normals one apart, two in five positive, by quadrature."""
    at = torch.linspace(-8.0, 9.0, 4001, dtype=torch.float64)
    above, below = Normal(1.0, 1.0), Normal(0.0, 1.0)
    hits, alarms = 0.4 * (1 - above.cdf(at)), 0.6 * (1 - below.cdf(at))
    return float(torch.trapezoid(hits / (hits + alarms) * above.log_prob(at).exp(), at))


def _average_precision(generator: torch.Generator, level: float) -> tuple[Estimate, float]:
    positive = torch.arange(100) < 40
    scores = torch.randn(100, generator=generator) + positive
    found = metrics.auprc(scores, positive, level=level, num_resamples=200, generator=generator)
    return found, _precision()


@pytest.mark.parametrize("level", [0.6, 0.9])
@pytest.mark.parametrize("make", [_risk_coverage, _average_precision])
def test_areas_under_curves_cover_as_they_say(
    make: Callable[[torch.Generator, float], tuple[Estimate, float]], level: float
) -> None:
    """Within 3.5 standard errors, and three points that a percentile interval may be off by."""
    num = 300
    held = [make(generator_for(seed, make.__name__), level) for seed in range(num)]
    share = sum(found.low <= truth <= found.high for found, truth in held) / num
    assert share == pytest.approx(level, abs=0.03 + 3.5 * math.sqrt(level * (1 - level) / num))


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("binning", ["equal_mass", "equal_width"])
def test_the_interval_of_the_calibration_error_has_the_tails_of_its_level(
    level: float, binning: str
) -> None:
    """Up to the upper (1 + level) / 2 quantile of the resampled errors, down by that of the sum of
    the bins' own errors: with one bin both are those of |accuracy - confidence|."""
    generator = generator_for(0, "calibration")
    confidence = 0.5 + 0.5 * torch.rand(120, generator=generator, dtype=torch.float64)
    correct = (torch.rand(120, generator=generator) < confidence - 0.1).double()
    for bins in (1, 4):
        found = metrics.ece(
            confidence,
            correct,
            bins=bins,
            binning=binning,
            level=level,
            num_resamples=200,
            generator=generator_for(1, "calibration"),
        )
        drawn = [
            metrics.ece(c, y, bins=bins, binning=binning, num_resamples=2).value
            for rows in resamples(
                confidence, correct, num_resamples=200, generator=generator_for(1, "calibration")
            )
            for c, y in zip(*rows, strict=True)
        ]
        assert found.high == pytest.approx(
            max(found.value, float(np.quantile(drawn, 0.5 + level / 2)))
        )
        assert found.level == level
        if bins == 1:
            gap = float((correct - confidence).mean())
            errors = [
                abs(float((y - c).mean()) - gap)
                for rows in resamples(
                    confidence,
                    correct,
                    num_resamples=200,
                    generator=generator_for(1, "calibration"),
                )
                for c, y in zip(*rows, strict=True)
            ]
            low = max(0.0, found.value - float(np.quantile(errors, 0.5 + level / 2)))
            assert found.low == pytest.approx(low)


@pytest.mark.parametrize("num", [2, 5, 10])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 1.0])
def test_repetitions_that_share_rows_are_corrected_for_it(num: int, overlap: float) -> None:
    """t = mean(d) / (sd(d) sqrt(1/K + overlap)) with K - 1 degrees of freedom, by scipy; without
    overlap the ordinary paired test."""
    first, second = torch.randn(2, num, generator=generator_for(num, "t"), dtype=torch.float64)
    difference = (first - second).numpy()
    t = difference.mean() / (difference.std(ddof=1) * math.sqrt(1 / num + overlap))
    found = metrics.paired_t(first, second, overlap=overlap)
    assert found == pytest.approx(float(stats.t.cdf(t, num - 1)), rel=1e-9)
    if overlap == 0:
        wanted = stats.ttest_rel(first.numpy(), second.numpy(), alternative="less").pvalue
        assert found == pytest.approx(float(wanted), rel=1e-9)

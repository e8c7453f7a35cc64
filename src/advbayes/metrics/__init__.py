"""Scores per example first, reduced last: `accuracy(correct(predict(x), y))` is an `Estimate` with
its interval."""

from __future__ import annotations

from advbayes.metrics.comparison import holm, mcnemar, paired_difference, paired_t
from advbayes.metrics.floor import rmse_floor
from advbayes.metrics.intervals import Estimate, bootstrap, clopper_pearson, incomplete_beta, wilson
from advbayes.metrics.marginals import Interval, crps, interval, quantile
from advbayes.metrics.ranking import (
    RiskCoverage,
    auprc,
    aurc,
    auroc,
    risk_coverage,
    selective_accuracy,
)
from advbayes.metrics.reductions import (
    Bin,
    accuracy,
    balanced_accuracy,
    coverage,
    ece,
    mean,
    recall,
    reliability,
    rmse,
)
from advbayes.metrics.scores import (
    brier,
    confidence,
    correct,
    entropy,
    expected_correct,
    log_prob,
    nll,
    squared_error,
)
from advbayes.metrics.trivial import ConstantClasses, ConstantGaussian, constant, majority, uniform

__all__ = [
    "Bin",
    "ConstantClasses",
    "ConstantGaussian",
    "Estimate",
    "Interval",
    "RiskCoverage",
    "accuracy",
    "auprc",
    "aurc",
    "auroc",
    "balanced_accuracy",
    "bootstrap",
    "brier",
    "clopper_pearson",
    "confidence",
    "constant",
    "correct",
    "coverage",
    "crps",
    "ece",
    "entropy",
    "expected_correct",
    "holm",
    "incomplete_beta",
    "interval",
    "log_prob",
    "majority",
    "mcnemar",
    "mean",
    "nll",
    "paired_difference",
    "paired_t",
    "quantile",
    "recall",
    "reliability",
    "risk_coverage",
    "rmse",
    "rmse_floor",
    "selective_accuracy",
    "squared_error",
    "uniform",
    "wilson",
]

"""Attacks on any Predictor: an attack sees `x -> Distribution` and nothing else, so it meets every defense unchanged.

Which thetas it goes through is the Predictor's business: one theta (`model.at(theta)`), the posterior predictive
(`PosteriorPredictive`), fresh thetas at each call (`FreshPredictive`), the posterior's mean (`model.at(posterior.mean)`).
"""

from advbayes.attacks.apgd import APGD
from advbayes.attacks.ascent import PGD, entropy_pgd, one_step, pgd, pgd_plus
from advbayes.attacks.black_box import RandomSearch, Square
from advbayes.attacks.gradients import HasInputGradient, loss_and_gradient, through_attacks
from advbayes.attacks.hard_label import HardLabel
from advbayes.attacks.losses import (
    ByLoss,
    DivergenceFrom,
    Exceeding,
    HasRows,
    HasSuccess,
    MarginTo,
    PerExample,
    Toward,
    certainty,
    deflate_variance,
    dlr,
    entropy,
    for_rows,
    inflate_variance,
    lower_mean,
    margin,
    mode,
    nll,
    raise_mean,
    squared_error,
    succeeded,
    success,
)
from advbayes.attacks.minimum_norm import MinimumNorm
from advbayes.attacks.suite import Suite, Transfer, strong_suite, with_ball

__all__ = [
    "APGD",
    "PGD",
    "ByLoss",
    "DivergenceFrom",
    "Exceeding",
    "HardLabel",
    "HasInputGradient",
    "HasRows",
    "HasSuccess",
    "MarginTo",
    "MinimumNorm",
    "PerExample",
    "RandomSearch",
    "Square",
    "Suite",
    "Toward",
    "Transfer",
    "certainty",
    "deflate_variance",
    "dlr",
    "entropy",
    "entropy_pgd",
    "for_rows",
    "inflate_variance",
    "loss_and_gradient",
    "lower_mean",
    "margin",
    "mode",
    "nll",
    "one_step",
    "pgd",
    "pgd_plus",
    "raise_mean",
    "squared_error",
    "strong_suite",
    "succeeded",
    "success",
    "through_attacks",
    "with_ball",
]

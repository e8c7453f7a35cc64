"""Attacks on any Predictor: an attack sees `x -> Distribution` and nothing else, so it meets every defense unchanged.

Which thetas it goes through is the Predictor's business: one theta (`model.at(theta)`), the posterior predictive
(`PosteriorPredictive`), fresh thetas at each call (`FreshPredictive`), the posterior's mean (`model.at(posterior.mean)`).
"""

from advbayes.attacks.gradients import HasInputGradient, loss_and_gradient, through_attacks
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
from advbayes.attacks.pgd import PGD, entropy_pgd, one_step, pgd, pgd_plus

__all__ = [
    "PGD",
    "ByLoss",
    "DivergenceFrom",
    "Exceeding",
    "HasInputGradient",
    "HasRows",
    "HasSuccess",
    "MarginTo",
    "PerExample",
    "Toward",
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
    "succeeded",
    "success",
    "through_attacks",
]

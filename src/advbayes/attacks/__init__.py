"""Attacks on any Predictor: an attack sees `x -> Distribution` and nothing else, so it meets every
defense unchanged.

Which thetas it goes through is the Predictor's business: one theta (`model.at(theta)`), the
posterior predictive (`PosteriorPredictive`), fresh thetas at each call (`FreshPredictive`), the
posterior's mean (`model.at(posterior.mean)`).
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
    MeanAlong,
    MeanOf,
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
from advbayes.attacks.multi_start import MultiStart
from advbayes.attacks.parts import (
    HasScope,
    applies_to,
    ball_of,
    losses_of,
    on_rows,
    parts_of,
    rebuilt,
    restarts_of,
    settings,
    steps_of,
    with_ball,
    with_eps,
    with_restarts,
    with_steps,
)
from advbayes.attacks.suite import Suite, Transfer, default_attacks, for_task, strong_suite

__all__ = [
    "APGD",
    "PGD",
    "ByLoss",
    "DivergenceFrom",
    "Exceeding",
    "HardLabel",
    "HasInputGradient",
    "HasRows",
    "HasScope",
    "HasSuccess",
    "MarginTo",
    "MeanAlong",
    "MeanOf",
    "MinimumNorm",
    "MultiStart",
    "PerExample",
    "RandomSearch",
    "Square",
    "Suite",
    "Toward",
    "Transfer",
    "applies_to",
    "ball_of",
    "certainty",
    "default_attacks",
    "deflate_variance",
    "dlr",
    "entropy",
    "entropy_pgd",
    "for_rows",
    "for_task",
    "inflate_variance",
    "loss_and_gradient",
    "losses_of",
    "lower_mean",
    "margin",
    "mode",
    "nll",
    "on_rows",
    "one_step",
    "parts_of",
    "pgd",
    "pgd_plus",
    "raise_mean",
    "rebuilt",
    "restarts_of",
    "settings",
    "squared_error",
    "steps_of",
    "strong_suite",
    "succeeded",
    "success",
    "through_attacks",
    "with_ball",
    "with_eps",
    "with_restarts",
    "with_steps",
]

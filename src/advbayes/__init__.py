"""Bayesian predictive models that withstand inference-time attacks, and proof of how far they do."""

from advbayes.attacks import (
    PGD,
    entropy,
    entropy_pgd,
    margin,
    nll,
    one_step,
    pgd,
    pgd_plus,
    squared_error,
)
from advbayes.balls import L2, Linf
from advbayes.channels import AttackChannel, Learned, Mixture, Noise
from advbayes.likelihoods import Categorical, Gaussian, GaussianMixture, HeteroscedasticGaussian
from advbayes.model import BayesianModel
from advbayes.objectives import ChannelELBO, LogitPairing, Trades
from advbayes.posteriors import Ensemble, LowRank, MeanField, PointMass, Samples
from advbayes.predictive import FreshPredictive, PosteriorPredictive
from advbayes.training import FitResult, NonFiniteError, fit

__version__ = "0.1.0"

__all__ = [
    "L2",
    "PGD",
    "AttackChannel",
    "BayesianModel",
    "Categorical",
    "ChannelELBO",
    "Ensemble",
    "FitResult",
    "FreshPredictive",
    "Gaussian",
    "GaussianMixture",
    "HeteroscedasticGaussian",
    "Learned",
    "Linf",
    "LogitPairing",
    "LowRank",
    "MeanField",
    "Mixture",
    "Noise",
    "NonFiniteError",
    "PointMass",
    "PosteriorPredictive",
    "Samples",
    "Trades",
    "entropy",
    "entropy_pgd",
    "fit",
    "margin",
    "nll",
    "one_step",
    "pgd",
    "pgd_plus",
    "squared_error",
]

"""Predictive distributions, and what is made of them: smoothed votes with certified radii,
conformal sets and intervals, decisions."""

from advbayes.predictive.certification import ABSTAIN, Certificates, certify
from advbayes.predictive.conformal import (
    ConformalIntervals,
    ConformalSets,
    conformal_intervals,
    conformal_quantile,
    conformal_sets,
)
from advbayes.predictive.decisions import (
    Choices,
    Spoiling,
    Utility,
    Worthless,
    decide,
    utility_under,
    worst_case_utility,
)
from advbayes.predictive.posterior import FreshPredictive, PosteriorPredictive
from advbayes.predictive.smoothing import Smoothed

__all__ = [
    "ABSTAIN",
    "Certificates",
    "Choices",
    "ConformalIntervals",
    "ConformalSets",
    "FreshPredictive",
    "PosteriorPredictive",
    "Smoothed",
    "Spoiling",
    "Utility",
    "Worthless",
    "certify",
    "conformal_intervals",
    "conformal_quantile",
    "conformal_sets",
    "decide",
    "utility_under",
    "worst_case_utility",
]

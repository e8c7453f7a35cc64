"""Predictive distributions, and what is made of them: smoothed votes with certified radii,
conformal sets and intervals, decisions."""

from advbayes.predictive.certification import ABSTAIN as ABSTAIN
from advbayes.predictive.certification import Certificates as Certificates
from advbayes.predictive.certification import certify as certify
from advbayes.predictive.conformal import ConformalIntervals as ConformalIntervals
from advbayes.predictive.conformal import ConformalSets as ConformalSets
from advbayes.predictive.conformal import conformal_intervals as conformal_intervals
from advbayes.predictive.conformal import conformal_quantile as conformal_quantile
from advbayes.predictive.conformal import conformal_sets as conformal_sets
from advbayes.predictive.decisions import Choices as Choices
from advbayes.predictive.decisions import Spoiling as Spoiling
from advbayes.predictive.decisions import Utility as Utility
from advbayes.predictive.decisions import Worthless as Worthless
from advbayes.predictive.decisions import decide as decide
from advbayes.predictive.decisions import utility_under as utility_under
from advbayes.predictive.decisions import worst_case_utility as worst_case_utility
from advbayes.predictive.posterior import FreshPredictive as FreshPredictive
from advbayes.predictive.posterior import PosteriorPredictive as PosteriorPredictive
from advbayes.predictive.smoothing import Smoothed as Smoothed
from advbayes.predictive.smoothing import SmoothedAttack as SmoothedAttack

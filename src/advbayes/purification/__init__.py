"""The reactive defense (section 3.2): infer the clean input behind x', exactly."""

from advbayes.purification.attacks import Annealed, NearestCentre, StraightThrough
from advbayes.purification.diagnosis import Diagnosis
from advbayes.purification.purifier import Purifier
from advbayes.purification.regression import PurifiedMixture
from advbayes.purification.simulation import Simulated, SimulatedPurifier, choose_bandwidth

__all__ = [
    "Annealed",
    "Diagnosis",
    "NearestCentre",
    "PurifiedMixture",
    "Purifier",
    "Simulated",
    "SimulatedPurifier",
    "StraightThrough",
    "choose_bandwidth",
]

"""The reactive defense (section 3.2): infer the clean input behind x', exactly."""

from advbayes.purification.attacks import Annealed as Annealed
from advbayes.purification.attacks import NearestCentre as NearestCentre
from advbayes.purification.attacks import StraightThrough as StraightThrough
from advbayes.purification.diagnosis import Diagnosis as Diagnosis
from advbayes.purification.purifier import Purifier as Purifier
from advbayes.purification.regression import PurifiedMixture as PurifiedMixture
from advbayes.purification.simulation import Simulated as Simulated
from advbayes.purification.simulation import SimulatedPurifier as SimulatedPurifier
from advbayes.purification.simulation import choose_bandwidth as choose_bandwidth

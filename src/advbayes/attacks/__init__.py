"""Attacks on any Predictor: an attack sees `x -> Distribution` and nothing else, so it meets every
defense unchanged.

Which thetas it goes through is the Predictor's business: one theta (`model.at(theta)`), the
posterior predictive (`PosteriorPredictive`), fresh thetas at each call (`FreshPredictive`), the
posterior's mean (`model.at(posterior.mean)`).
"""

from advbayes.attacks.apgd import APGD as APGD
from advbayes.attacks.ascent import PGD as PGD
from advbayes.attacks.ascent import entropy_pgd as entropy_pgd
from advbayes.attacks.ascent import one_step as one_step
from advbayes.attacks.ascent import pgd as pgd
from advbayes.attacks.ascent import pgd_plus as pgd_plus
from advbayes.attacks.black_box import RandomSearch as RandomSearch
from advbayes.attacks.black_box import Square as Square
from advbayes.attacks.gradients import HasInputGradient as HasInputGradient
from advbayes.attacks.gradients import loss_and_gradient as loss_and_gradient
from advbayes.attacks.gradients import through_attacks as through_attacks
from advbayes.attacks.hard_label import HardLabel as HardLabel
from advbayes.attacks.losses import ByLoss as ByLoss
from advbayes.attacks.losses import DivergenceFrom as DivergenceFrom
from advbayes.attacks.losses import Exceeding as Exceeding
from advbayes.attacks.losses import HasRows as HasRows
from advbayes.attacks.losses import HasSuccess as HasSuccess
from advbayes.attacks.losses import MarginTo as MarginTo
from advbayes.attacks.losses import MeanAlong as MeanAlong
from advbayes.attacks.losses import MeanOf as MeanOf
from advbayes.attacks.losses import PerExample as PerExample
from advbayes.attacks.losses import Toward as Toward
from advbayes.attacks.losses import certainty as certainty
from advbayes.attacks.losses import deflate_variance as deflate_variance
from advbayes.attacks.losses import dlr as dlr
from advbayes.attacks.losses import entropy as entropy
from advbayes.attacks.losses import for_rows as for_rows
from advbayes.attacks.losses import inflate_variance as inflate_variance
from advbayes.attacks.losses import lower_mean as lower_mean
from advbayes.attacks.losses import margin as margin
from advbayes.attacks.losses import mode as mode
from advbayes.attacks.losses import nll as nll
from advbayes.attacks.losses import raise_mean as raise_mean
from advbayes.attacks.losses import squared_error as squared_error
from advbayes.attacks.losses import succeeded as succeeded
from advbayes.attacks.losses import success as success
from advbayes.attacks.minimum_norm import MinimumNorm as MinimumNorm
from advbayes.attacks.multi_start import MultiStart as MultiStart
from advbayes.attacks.parts import HasScope as HasScope
from advbayes.attacks.parts import applies_to as applies_to
from advbayes.attacks.parts import ball_of as ball_of
from advbayes.attacks.parts import losses_of as losses_of
from advbayes.attacks.parts import on_rows as on_rows
from advbayes.attacks.parts import parts_of as parts_of
from advbayes.attacks.parts import rebuilt as rebuilt
from advbayes.attacks.parts import restarts_of as restarts_of
from advbayes.attacks.parts import settings as settings
from advbayes.attacks.parts import steps_of as steps_of
from advbayes.attacks.parts import with_ball as with_ball
from advbayes.attacks.parts import with_eps as with_eps
from advbayes.attacks.parts import with_restarts as with_restarts
from advbayes.attacks.parts import with_steps as with_steps
from advbayes.attacks.suite import Suite as Suite
from advbayes.attacks.suite import Transfer as Transfer
from advbayes.attacks.suite import default_attacks as default_attacks
from advbayes.attacks.suite import for_task as for_task
from advbayes.attacks.suite import strong_suite as strong_suite

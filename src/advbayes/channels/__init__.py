"""Adversarial channels p(x' | x, theta) (SM-5): each has `sample`, and `density` where one exists.

Theta reaches a channel only through the Predictor that `sample` and `density` take.
"""

from advbayes.channels.attack import AttackChannel as AttackChannel
from advbayes.channels.density import GaussianDensity as GaussianDensity
from advbayes.channels.density import MixtureDensity as MixtureDensity
from advbayes.channels.learned import Learned as Learned
from advbayes.channels.learned import learned_in as learned_in
from advbayes.channels.mixture import Mixture as Mixture
from advbayes.channels.mixture import components as components
from advbayes.channels.noise import Noise as Noise
from advbayes.channels.prior import eps_prior as eps_prior

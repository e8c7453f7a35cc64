"""Bayesian predictive models that withstand inference-time attacks, and proof of how far they do.

Names are imported when first used, so that the command line starts without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "attacks": "PGD entropy entropy_pgd margin nll one_step pgd pgd_plus squared_error",
    "balls": "L2 Linf",
    "channels": "AttackChannel Learned Mixture Noise",
    "likelihoods": "Categorical Gaussian GaussianMixture HeteroscedasticGaussian",
    "model": "BayesianModel",
    "objectives": "ChannelELBO LogitPairing Trades",
    "posteriors": "Ensemble LowRank MeanField PointMass Samples",
    "predictive": "FreshPredictive PosteriorPredictive",
    "store": "load save",
    "training": "FitResult NonFiniteError fit",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'advbayes' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"advbayes.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if TYPE_CHECKING:
    from advbayes.attacks import PGD as PGD
    from advbayes.attacks import entropy as entropy
    from advbayes.attacks import entropy_pgd as entropy_pgd
    from advbayes.attacks import margin as margin
    from advbayes.attacks import nll as nll
    from advbayes.attacks import one_step as one_step
    from advbayes.attacks import pgd as pgd
    from advbayes.attacks import pgd_plus as pgd_plus
    from advbayes.attacks import squared_error as squared_error
    from advbayes.balls import L2 as L2
    from advbayes.balls import Linf as Linf
    from advbayes.channels import AttackChannel as AttackChannel
    from advbayes.channels import Learned as Learned
    from advbayes.channels import Mixture as Mixture
    from advbayes.channels import Noise as Noise
    from advbayes.likelihoods import Categorical as Categorical
    from advbayes.likelihoods import Gaussian as Gaussian
    from advbayes.likelihoods import GaussianMixture as GaussianMixture
    from advbayes.likelihoods import HeteroscedasticGaussian as HeteroscedasticGaussian
    from advbayes.model import BayesianModel as BayesianModel
    from advbayes.objectives import ChannelELBO as ChannelELBO
    from advbayes.objectives import LogitPairing as LogitPairing
    from advbayes.objectives import Trades as Trades
    from advbayes.posteriors import Ensemble as Ensemble
    from advbayes.posteriors import LowRank as LowRank
    from advbayes.posteriors import MeanField as MeanField
    from advbayes.posteriors import PointMass as PointMass
    from advbayes.posteriors import Samples as Samples
    from advbayes.predictive import FreshPredictive as FreshPredictive
    from advbayes.predictive import PosteriorPredictive as PosteriorPredictive
    from advbayes.store import load as load
    from advbayes.store import save as save
    from advbayes.training import FitResult as FitResult
    from advbayes.training import NonFiniteError as NonFiniteError
    from advbayes.training import fit as fit

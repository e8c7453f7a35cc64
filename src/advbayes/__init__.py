"""Bayesian predictive models that withstand inference-time attacks, and proof of how far they do.

Names are imported when first used, so that the command line starts without waiting for torch, or
even for `typing`.
"""

from __future__ import annotations

import gc
import importlib
import sys
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False

__version__ = "0.1.0"

_HOMES = {
    "adapters": "from_function from_sklearn from_torch to_art to_autoattack to_foolbox",
    "attacks": (
        "APGD PGD DivergenceFrom HardLabel MarginTo MinimumNorm MultiStart RandomSearch Square "
        "Suite Toward Transfer certainty deflate_variance dlr entropy entropy_pgd inflate_variance "
        "lower_mean margin nll one_step pgd pgd_plus raise_mean squared_error strong_suite"
    ),
    "auditing": "Claim Support ThreatModel Verdict audit audit_cost audit_records",
    "attacks.balls": "L2 Ball Linf",
    "checks": "AdvBayesError",
    "channels": "AttackChannel Learned Mixture Noise eps_prior",
    "evaluation": "Evaluation evaluate load_evaluation rescore selective_task with_eps",
    "likelihoods": "Categorical Gaussian GaussianMixture HeteroscedasticGaussian",
    "model": "BayesianModel",
    "objectives": "ChannelELBO Consistency LogitPairing Trades",
    "posteriors": "Ensemble LowRank MeanField PointMass Posterior Samples",
    "predictive": (
        "FreshPredictive PosteriorPredictive Smoothed SmoothedAttack certify conformal_intervals "
        "conformal_sets decide utility_under"
    ),
    "purification": "Annealed NearestCentre Purifier SimulatedPurifier StraightThrough",
    "store": "load save",
    "training": "FitResult NonFiniteError fit",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'advbayes' has no attribute {name!r}")
    collects = gc.isenabled()
    gc.disable()  # an import leaves no garbage, and a collection walks through all of torch: 0.1 s
    try:
        value: object = getattr(importlib.import_module(f"advbayes.{_HOME_OF[name]}"), name)
    finally:
        if collects:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


_MOVED = {
    "advbayes.balls": "advbayes.attacks.balls",
    "advbayes.certification": "advbayes.predictive.certification",
    "advbayes.config": "advbayes.runs.config",
    "advbayes.conformal": "advbayes.predictive.conformal",
    "advbayes.decisions": "advbayes.predictive.decisions",
    "advbayes.smoothing": "advbayes.predictive.smoothing",
}


class _Moved:
    """Finds modules by the names that they had before as well."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in _MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: object) -> None:
        name: str = module.__name__  # type: ignore[attr-defined]
        sys.modules[name] = importlib.import_module(_MOVED[name])


sys.meta_path.append(_Moved())


if TYPE_CHECKING:
    from advbayes.adapters import from_function as from_function
    from advbayes.adapters import from_sklearn as from_sklearn
    from advbayes.adapters import from_torch as from_torch
    from advbayes.adapters import to_art as to_art
    from advbayes.adapters import to_autoattack as to_autoattack
    from advbayes.adapters import to_foolbox as to_foolbox
    from advbayes.attacks import APGD as APGD
    from advbayes.attacks import PGD as PGD
    from advbayes.attacks import DivergenceFrom as DivergenceFrom
    from advbayes.attacks import HardLabel as HardLabel
    from advbayes.attacks import MarginTo as MarginTo
    from advbayes.attacks import MinimumNorm as MinimumNorm
    from advbayes.attacks import MultiStart as MultiStart
    from advbayes.attacks import RandomSearch as RandomSearch
    from advbayes.attacks import Square as Square
    from advbayes.attacks import Suite as Suite
    from advbayes.attacks import Toward as Toward
    from advbayes.attacks import Transfer as Transfer
    from advbayes.attacks import certainty as certainty
    from advbayes.attacks import deflate_variance as deflate_variance
    from advbayes.attacks import dlr as dlr
    from advbayes.attacks import entropy as entropy
    from advbayes.attacks import entropy_pgd as entropy_pgd
    from advbayes.attacks import inflate_variance as inflate_variance
    from advbayes.attacks import lower_mean as lower_mean
    from advbayes.attacks import margin as margin
    from advbayes.attacks import nll as nll
    from advbayes.attacks import one_step as one_step
    from advbayes.attacks import pgd as pgd
    from advbayes.attacks import pgd_plus as pgd_plus
    from advbayes.attacks import raise_mean as raise_mean
    from advbayes.attacks import squared_error as squared_error
    from advbayes.attacks import strong_suite as strong_suite
    from advbayes.attacks.balls import L2 as L2
    from advbayes.attacks.balls import Ball as Ball
    from advbayes.attacks.balls import Linf as Linf
    from advbayes.auditing import Claim as Claim
    from advbayes.auditing import Support as Support
    from advbayes.auditing import ThreatModel as ThreatModel
    from advbayes.auditing import Verdict as Verdict
    from advbayes.auditing import audit as audit
    from advbayes.auditing import audit_cost as audit_cost
    from advbayes.auditing import audit_records as audit_records
    from advbayes.channels import AttackChannel as AttackChannel
    from advbayes.channels import Learned as Learned
    from advbayes.channels import Mixture as Mixture
    from advbayes.channels import Noise as Noise
    from advbayes.channels import eps_prior as eps_prior
    from advbayes.checks import AdvBayesError as AdvBayesError
    from advbayes.evaluation import Evaluation as Evaluation
    from advbayes.evaluation import evaluate as evaluate
    from advbayes.evaluation import load_evaluation as load_evaluation
    from advbayes.evaluation import rescore as rescore
    from advbayes.evaluation import selective_task as selective_task
    from advbayes.evaluation import with_eps as with_eps
    from advbayes.likelihoods import Categorical as Categorical
    from advbayes.likelihoods import Gaussian as Gaussian
    from advbayes.likelihoods import GaussianMixture as GaussianMixture
    from advbayes.likelihoods import HeteroscedasticGaussian as HeteroscedasticGaussian
    from advbayes.model import BayesianModel as BayesianModel
    from advbayes.objectives import ChannelELBO as ChannelELBO
    from advbayes.objectives import Consistency as Consistency
    from advbayes.objectives import LogitPairing as LogitPairing
    from advbayes.objectives import Trades as Trades
    from advbayes.posteriors import Ensemble as Ensemble
    from advbayes.posteriors import LowRank as LowRank
    from advbayes.posteriors import MeanField as MeanField
    from advbayes.posteriors import PointMass as PointMass
    from advbayes.posteriors import Posterior as Posterior
    from advbayes.posteriors import Samples as Samples
    from advbayes.predictive import FreshPredictive as FreshPredictive
    from advbayes.predictive import PosteriorPredictive as PosteriorPredictive
    from advbayes.predictive import Smoothed as Smoothed
    from advbayes.predictive import SmoothedAttack as SmoothedAttack
    from advbayes.predictive import certify as certify
    from advbayes.predictive import conformal_intervals as conformal_intervals
    from advbayes.predictive import conformal_sets as conformal_sets
    from advbayes.predictive import decide as decide
    from advbayes.predictive import utility_under as utility_under
    from advbayes.purification import Annealed as Annealed
    from advbayes.purification import NearestCentre as NearestCentre
    from advbayes.purification import Purifier as Purifier
    from advbayes.purification import SimulatedPurifier as SimulatedPurifier
    from advbayes.purification import StraightThrough as StraightThrough
    from advbayes.store import load as load
    from advbayes.store import save as save
    from advbayes.training import FitResult as FitResult
    from advbayes.training import NonFiniteError as NonFiniteError
    from advbayes.training import fit as fit

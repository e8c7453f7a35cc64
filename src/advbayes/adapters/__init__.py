"""Others' models as Predictors, and Predictors for others' attacks (Foolbox, AutoAttack, ART)."""

from __future__ import annotations

from advbayes.adapters.attackers import PredictorModule, to_art, to_autoattack, to_foolbox
from advbayes.adapters.models import FunctionPredictor, from_function, from_torch
from advbayes.adapters.sklearn import Scaled, from_sklearn, with_estimators

__all__ = [
    "FunctionPredictor",
    "PredictorModule",
    "Scaled",
    "from_function",
    "from_sklearn",
    "from_torch",
    "to_art",
    "to_autoattack",
    "to_foolbox",
    "with_estimators",
]

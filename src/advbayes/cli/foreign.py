"""Models of other people, and data in raw units to judge them on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, is_classifier
from torch import Tensor, nn

from advbayes.adapters import from_function, from_sklearn, from_torch
from advbayes.adapters.models import rmse_of
from advbayes.attacks.balls import Ball
from advbayes.auditing import ThreatModel, Verdict, audit, audit_cost
from advbayes.datasets import Dataset
from advbayes.evaluation import evaluate
from advbayes.report import ReportPaths, write_report
from advbayes.runs import make_attack, make_ball, prepare
from advbayes.runs.building import import_factory, reach_of
from advbayes.runs.config import FILE_SUFFIXES, ConfigError, make_config
from advbayes.types import Predictor

_OTHERWISE = (
    "a factory may also return what advbayes.adapters makes of it, such as from_torch(net, 'probs')"
)


@dataclass(frozen=True, eq=False)
class Foreign:
    """A model, as a Predictor, with the rows that it is judged on and the data they are from."""

    predict: Predictor
    x: Tensor
    y: Tensor
    class_names: tuple[str, ...]
    dataset: Dataset
    title: str
    assumed: bool = False  # whether the order of its outputs is that of the data's classes

    def ball(self, norm: str, eps: float, fixed: Sequence[str], feature_eps: Sequence[str]) -> Ball:
        """The ball in the data's own units."""
        mask, scale = reach_of(self.dataset.feature_names, None, eps, fixed, feature_eps)
        return make_ball(norm, eps, self.dataset.box, mask, scale)

    def audit(
        self,
        ball: Ball,
        *,
        tier: str,
        num: int | None,
        seed: int,
        tell: Callable[[str], None] | None = None,
    ) -> Verdict:
        """Its audit within the ball; `tell` hears the cost before anything starts."""
        rows, threat = (self.x[:num], self.y[:num]), ThreatModel(units="raw")
        if tell is not None:
            tell(str(audit_cost(self.predict, rows, ball=ball, tier=tier)))
        return audit(self.predict, rows, ball=ball, tier=tier, threat_model=threat, seed=seed)

    def report(self, out: str, ball: Ball, verdict: Verdict, *, num: int, seed: int) -> ReportPaths:
        """A report of the usual attacks and of the audit."""
        names = ("pgd", "pgd_plus", "apgd", "square")
        attacks = {name: make_attack(name, ball, task=self.dataset.task) for name in names}
        rows = self.x[:num], self.y[:num]
        evaluation = evaluate({"model": self.predict}, rows, attacks=attacks, seed=seed)
        return write_report(
            out,
            title=self.title,
            evaluation=evaluation,
            audit={"model": verdict},
            threat_model={"norm": type(ball).__name__, "eps": ball.eps, "units": "raw"},
            class_names=self.class_names,
            feature_names=self.dataset.feature_names,
            reproduce={"commands": [shlex.join(["advbayes", *sys.argv[1:]])]},
        )


def load_foreign(
    model: str, data: str, *, target: str | None, task: str | None, classes: Sequence[str] = ()
) -> Foreign:
    """What `module:factory` gives, with all rows of a file, or a built-in test set, to judge it."""
    made = import_factory("model", model)
    kind = _kind(made)
    if task is None and Path(data).suffix.lower() in FILE_SUFFIXES:
        task = kind
    given = {"data": data, "target": target, "task": task}
    config = make_config({key: value for key, value in given.items() if value is not None})
    dataset = prepare(config).dataset
    if dataset.encoding is not None:
        wanted = "data: must hold numbers alone, as a model of your own takes them"
        raise ConfigError(f"{wanted}, got text or missing values in {data}")
    if kind not in (None, dataset.task):
        wanted = f"model: must be for {dataset.task}, as {data} is"
        raise ConfigError(f"{wanted}, got one for {kind} ({type(made).__name__})")
    x, y = dataset.x_test, dataset.y_test
    if config.file is not None:
        x, y = torch.cat([dataset.x_train, x]), torch.cat([dataset.y_train, y])
    names = tuple(classes) or dataset.class_names
    try:
        predict = _predictor(made, x, y, dataset.task)
        says = kind == "classification" or hasattr(made, "classes_")
        if says:
            names = tuple(map(str, made.classes_))
        predict(x[:2])
    except Exception as error:  # whatever the user's code raises is the user's to mend
        wanted = f"model: must answer rows of shape {tuple(x.shape[1:])} for {dataset.task}"
        if names := dataset.feature_names:
            wanted += f" ({', '.join(names[:10])}{', ...' if len(names) > 10 else ''})"
        got = f"{type(error).__name__}: {error!s:.400}"
        raise ConfigError(f"{wanted}, got {got}; {_OTHERWISE}") from error
    y = _places(y, dataset.class_names, names)
    assumed = bool(names) and not (says or classes)
    return Foreign(predict, x, y, names, dataset, f"A model on {Path(data).stem}", assumed)


def _predictor(made: Any, x: Tensor, y: Tensor, task: str) -> Predictor:
    regression = task == "regression"
    match made:
        case nn.Module():
            made.eval()
            if regression:
                unit = from_torch(made, "mean", scale=1.0)  # which takes x to the net's own dtype
                with torch.no_grad():
                    scale = rmse_of(unit(x).mean, y)
                return from_torch(made, "mean", scale=scale)
            return from_torch(made)
        case BaseEstimator():
            return from_sklearn(made, data=(x.numpy(), y.numpy()))
    if hasattr(made, "predict_proba"):
        return from_function(made.predict_proba, "probs", numpy=True)
    return _called(made, x[:2])


def _called(made: Any, x: Tensor) -> Predictor:
    """A function that gives distributions is a Predictor, one that gives an array of probabilities
    becomes one; what refuses a tensor with a gradient is asked without."""
    try:
        answer = made(x.clone().requires_grad_())
    except RuntimeError as error:
        if "requires grad" not in str(error):
            raise
        answer, made = made(x), partial(_without_gradient, made)
    match answer:
        case np.ndarray() | Tensor() if _are_probabilities(torch.as_tensor(answer)):
            return from_function(made, "probs")
    return made  # type: ignore[no-any-return]


def _are_probabilities(answer: Tensor) -> bool:
    answer = answer.detach().double()
    sums = answer.ndim == 2 and bool(((answer.sum(1) - 1).abs() < 1e-3).all())
    return sums and bool((answer >= 0).all())


def _without_gradient(function: Any, x: Tensor) -> Any:
    return function(x.detach())


def _kind(model: Any) -> str | None:
    """The task that a scikit-learn estimator says it is for; None for others, which do not say."""
    match model:
        case BaseEstimator() if is_classifier(model) and not hasattr(model, "classes_"):
            wanted = "model: must give a fitted estimator"
            raise ConfigError(f"{wanted}, got a {type(model).__name__} without classes_")
        case BaseEstimator():
            return "classification" if is_classifier(model) else "regression"
        case _ if callable(model) or hasattr(model, "predict_proba"):
            return None
    kinds = "a torch.nn.Module, a fitted estimator, what has predict_proba, or a Predictor"
    raise ConfigError(f"model: must give {kinds}, got {type(model).__name__}")


def _places(y: Tensor, names: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """Labels as places among the model's classes."""
    if not names or tuple(names) == tuple(wanted):
        return y
    missing = [names[label] for label in sorted(set(y.tolist())) if names[label] not in wanted]
    if missing:
        known, extra = ", ".join(wanted), ", ".join(missing[:5])
        raise ConfigError(f"data: must hold the model's classes ({known}), got {extra} as well")
    return torch.tensor([wanted.index(name) if name in wanted else -1 for name in names])[y]

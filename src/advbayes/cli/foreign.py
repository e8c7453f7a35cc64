"""Models of other people: a torch net, a fitted scikit-learn estimator or any Predictor, and data
in raw units to judge it on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from advbayes.adapters import from_sklearn, from_torch
from advbayes.attacks.balls import Ball
from advbayes.auditing import ThreatModel, Verdict, audit
from advbayes.evaluation import evaluate
from advbayes.report import ReportPaths, write_report
from advbayes.runs import make_attack, make_ball, prepare
from advbayes.runs.building import import_factory, reach_of
from advbayes.runs.config import FILE_SUFFIXES, ConfigError, make_config
from advbayes.types import Predictor


@dataclass(frozen=True, eq=False)
class Foreign:
    """A model, as a Predictor, with the rows that it is judged on."""

    predict: Predictor
    x: Tensor
    y: Tensor
    task: str
    class_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    box: tuple[float, float] | None
    dataset: str

    def ball(
        self, norm: str, eps: float, fixed: Sequence[str], budgets: Mapping[str, float]
    ) -> Ball:
        """The ball in the data's own units."""
        mask, scale = reach_of(self.feature_names, None, eps, fixed, budgets)
        return make_ball(norm, eps, self.box, mask, scale)

    def audit(self, ball: Ball, *, tier: str, num: int | None, seed: int) -> Verdict:
        """Its audit within the ball."""
        rows = self.x[:num], self.y[:num]
        return audit(
            self.predict,
            rows,
            ball=ball,
            tier=tier,
            threat_model=ThreatModel(units="raw"),
            seed=seed,
        )

    def report(
        self, out: str, ball: Ball, verdict: Verdict, *, num: int, seed: int, command: str
    ) -> ReportPaths:
        """A report of the usual attacks and of the audit."""
        attacks = {
            name: make_attack(name, ball, task=self.task)
            for name in ("pgd", "pgd_plus", "apgd", "square")
        }
        evaluation = evaluate(
            {"model": self.predict}, (self.x[:num], self.y[:num]), attacks=attacks, seed=seed
        )
        return write_report(
            out,
            title=f"A model on {self.dataset}",
            evaluation=evaluation,
            audit={"model": verdict},
            threat_model={"norm": type(ball).__name__, "eps": ball.eps, "units": "raw"},
            class_names=self.class_names or None,
            feature_names=self.feature_names or None,
            reproduce=[command],
        )


def load_foreign(
    model: str, data: str, *, target: str | None, task: str | None, classes: Sequence[str] = ()
) -> Foreign:
    """What `module:factory` gives, with all rows of a file or the test set of a built-in one to
    judge it on."""
    made = import_factory("model", model)
    kind = _kind(made)
    own_file = Path(data).suffix.lower() in FILE_SUFFIXES
    task = kind if task is None and own_file else task
    config = make_config(
        {"data": data}
        | {key: value for key, value in (("target", target), ("task", task)) if value is not None}
    )
    dataset = prepare(config).dataset
    if dataset.encoding is not None:
        raise ConfigError(
            f"data: must hold numbers alone, as a model of your own takes them, got text or "
            f"missing values in {data}"
        )
    if kind not in (None, dataset.task):
        raise ConfigError(
            f"model: must be for {dataset.task}, as {data} is, got one for {kind} "
            f"({type(made).__name__})"
        )
    x, y = dataset.x_test, dataset.y_test
    if config.file is not None:
        x, y = torch.cat([dataset.x_train, x]), torch.cat([dataset.y_train, y])
    names = tuple(classes) or dataset.class_names
    regression = dataset.task == "regression"
    try:
        if isinstance(made, nn.Module):
            made.eval()
            predict: Predictor = (
                from_torch(made, "mean", scale=_rmse(made, x, y))
                if regression
                else from_torch(made)
            )
        elif hasattr(made, "predict"):
            predict = from_sklearn(
                made, scale=_rmse(made.predict, x.numpy(), y) if regression else None
            )
            names = names if regression else tuple(str(label) for label in made.classes_)
        else:
            predict = made
        predict(x[:2])
    except Exception as error:  # whatever the user's code raises is the user's to mend
        wanted = f"model: must answer rows of shape {tuple(x.shape[1:])} for {dataset.task}"
        raise ConfigError(f"{wanted}, got {type(error).__name__}: {error!s:.200}") from error
    return Foreign(
        predict,
        x,
        _places(y, dataset.class_names, names),
        dataset.task,
        names,
        dataset.feature_names,
        dataset.box,
        Path(data).stem,
    )


def _kind(model: Any) -> str | None:
    """The task that a scikit-learn estimator says it is for; None for others, which do not say."""
    from sklearn.base import BaseEstimator, is_classifier

    if isinstance(model, BaseEstimator):
        return "classification" if is_classifier(model) else "regression"
    if isinstance(model, nn.Module) or callable(model):
        return None
    raise ConfigError(
        f"model: must give a torch.nn.Module, a fitted estimator or a Predictor, got "
        f"{type(model).__name__}"
    )


def _places(y: Tensor, names: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """Labels as places among the model's classes."""
    if not names or tuple(names) == tuple(wanted):
        return y
    missing = [names[label] for label in sorted(set(y.tolist())) if names[label] not in wanted]
    if missing:
        raise ConfigError(
            f"data: must hold the model's classes ({', '.join(wanted)}), got "
            f"{', '.join(missing[:5])} as well"
        )
    return torch.tensor([wanted.index(name) if name in wanted else -1 for name in names])[y]


def _rmse(predict: Any, x: Any, y: Tensor) -> float:
    """The error that a model without a scale of its own is taken to expect."""
    with torch.no_grad():
        said = torch.as_tensor(predict(x)).reshape(y.shape)
    return max(float((said - y).double().square().mean().sqrt()), 1e-6)

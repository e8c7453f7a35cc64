"""Arrays as they come: backwards, read-only, in another byte order, wider than torch's numbers. The
same values give the same answer at every door that takes arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression
from torch import nn

from advbayes import (
    L2,
    BayesianModel,
    Categorical,
    Gaussian,
    Noise,
    PointMass,
    PosteriorPredictive,
    audit_records,
    evaluate,
    fit,
    from_sklearn,
    load,
    metrics,
    one_step,
    save,
    selective_task,
)
from advbayes.datasets import Standardize
from advbayes.estimators import RobustClassifier, RobustRegressor

Array = NDArray[Any]
Form = Callable[[Array], Array]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3))
LABELS, TARGETS = np.arange(24) % 3, RNG.normal(size=24)
FIRST, ONES = LABELS == 0, np.ones(24)


def _read_only(values: Array) -> Array:
    values = values.copy()
    values.flags.writeable = False
    return values


FORMS: dict[str, Form] = {
    "backwards": lambda values: np.ascontiguousarray(values[::-1])[::-1],
    "mirrored": lambda values: np.ascontiguousarray(values[..., ::-1])[..., ::-1],
    "byte order": lambda values: values.astype(values.dtype.newbyteorder(">")),
    "read-only": _read_only,
    "every other": lambda values: np.repeat(values, 2, 0)[::2],
    "Fortran": np.asfortranarray,
    "wide": lambda values: values.astype(np.longdouble if values.dtype.kind == "f" else np.uint16),
}


def model(classes: bool = True) -> BayesianModel:
    weight = torch.linspace(-1, 1, 9 if classes else 3).reshape(-1, 3).double()
    net = nn.Linear(3, len(weight), bias=False, dtype=torch.float64)
    net.load_state_dict({"weight": weight})
    return BayesianModel(net, Categorical() if classes else Gaussian(1.0))


def predictive(classes: bool = True) -> PosteriorPredictive:
    of = model(classes)
    return PosteriorPredictive(of, of.initial_theta().unsqueeze(0))


def _fit(form: Form) -> Any:
    posterior, of = PointMass(model()), model()
    data, weight = (form(X), form(LABELS)), form(ONES)
    fit(of, posterior, Noise(0.1), data, steps=2, batch_size=24, sample_weight=weight)
    return posterior.mean.detach()


def _evaluate(form: Form, classes: bool) -> Any:
    y, attacks = form(LABELS if classes else TARGETS), {"one step": one_step(L2(0.3))}
    found = evaluate(predictive(classes), (form(X), y), attacks=attacks, train_y=y)
    return [found.estimate("nll", name, "clean").value for name in found.predictors]


def _records(form: Form) -> Any:
    arrays, claimed = {"a": form(X)}, {"a": form(FIRST)}
    verdict = audit_records(
        (form(X), form(LABELS)),
        arrays,
        predict=predictive(),
        ball=L2(0.3),
        correct=claimed,
        only=("E1", "E16"),
    )
    return [finding.status == "passed" for finding in verdict.findings]


def _selective(form: Form) -> Any:
    ball = L2(0.3)
    attacks: Any = {"inside_attack": one_step(ball), "outside_attack": one_step(ball)}
    points = selective_task(
        predictive(), (form(X), form(LABELS)), form(X + 3), ball=ball, radii=[0.1], **attacks
    )
    return points[0].aurc.value


def _classifier(form: Form) -> Any:
    robust = RobustClassifier(None, epochs=1, random_state=0)
    robust.fit(form(X), form(LABELS), sample_weight=form(ONES))
    return robust.predict_proba(form(X))


def _regressor(form: Form) -> Any:
    robust = RobustRegressor(None, epochs=1, random_state=0).fit(form(X), form(TARGETS))
    return [*robust.predict(form(X)), robust.score(form(X), form(TARGETS), form(ONES))]


DOORS: dict[str, Callable[[Form], Any]] = {
    "fit": _fit,
    "evaluate classes": lambda form: _evaluate(form, True),
    "evaluate targets": lambda form: _evaluate(form, False),
    "audit_records": _records,
    "selective_task": _selective,
    "RobustClassifier": _classifier,
    "RobustRegressor": _regressor,
    "from_sklearn": lambda form: (
        from_sklearn(LinearRegression().fit(X, TARGETS), data=(form(X), form(TARGETS))).scale  # type: ignore[attr-defined]
    ),
    "accuracy": lambda form: metrics.accuracy(form(FIRST)).value,
    "coverage": lambda form: metrics.coverage(form(FIRST)).value,
    "balanced": lambda form: metrics.balanced_accuracy(form(FIRST), form(LABELS)).value,
    "auroc": lambda form: metrics.auroc(form(TARGETS), form(FIRST)).value,
    "aurc": lambda form: metrics.aurc(form(TARGETS**2), form(X[:, 0])).value,
    "paired": lambda form: metrics.paired_difference(form(TARGETS), form(X[:, 0])).value,
}


@cache
def as_they_are(door: str) -> Any:
    return DOORS[door](lambda values: values)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("form", FORMS)
def test_arrays_are_taken_as_they_come(door: str, form: str) -> None:
    wanted, found = as_they_are(door), DOORS[door](FORMS[form])
    np.testing.assert_allclose(np.asarray(found, float), np.asarray(wanted, float), rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_loaded_model_takes_rows_as_they_come(form: str, tmp_path: Path) -> None:
    scaling = Standardize.fit(torch.tensor(X)).to_dict()
    save(tmp_path / "m", model=model(), posterior=PointMass(model()), scaling=scaling)
    predict: Any = load(tmp_path / "m").predictor()
    assert torch.equal(predict(FORMS[form](X)).logits, predict(X).logits)

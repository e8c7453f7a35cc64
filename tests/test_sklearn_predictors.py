"""Estimators and pipelines go straight into evaluate and audit; linear ones have exact
gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    PoissonRegressor,
    Ridge,
    RidgeClassifier,
    SGDClassifier,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, PolynomialFeatures, RobustScaler, StandardScaler
from sklearn.svm import SVC, LinearSVC

from advbayes import L2, audit, evaluate, from_sklearn, nll, one_step, pgd
from advbayes.attacks import RandomSearch, loss_and_gradient, margin
from advbayes.auditing import Support, ThreatModel
from advbayes.checks import InputError
from advbayes.estimators import RobustClassifier, RobustRegressor
from advbayes.evaluation import Evaluation

RNG = np.random.default_rng(0)
SPREAD = np.array([1.0, 50.0, 0.02])
X = RNG.normal(size=(90, 3)) * SPREAD + np.array([0.0, 300.0, -1.0])
SCORE = (X - X.mean(0)) / SPREAD @ np.array([[1.0, -0.5, 0.2], [0.3, 1.0, -1.0], [-1.0, 0.2, 1.0]])
THREE = np.array(["a", "b", "c"])[(SCORE + RNG.gumbel(size=SCORE.shape)).argmax(1)]
TWO = np.where(THREE == "c", "b", THREE)
BALL = L2(0.5, scale=torch.tensor(SPREAD))  # half a deviation of each feature, in its own unit
FRONTS: dict[str, tuple[Any, ...]] = {
    "alone": (),
    "standard": (StandardScaler(),),
    "two": (MinMaxScaler(), RobustScaler()),
    "not centred": (StandardScaler(with_mean=False), "passthrough"),
}
LINEAR = [
    LogisticRegression(max_iter=5000),
    RidgeClassifier(),
    LinearSVC(max_iter=50_000),
    CalibratedClassifierCV(LinearSVC(max_iter=50_000), cv=3),
]


def clean(report: Evaluation, metric: str = "accuracy") -> float:
    return report.estimate(metric, attack="clean", eps=0.0).value


def behind(front: str, last: Any) -> Any:
    return make_pipeline(*FRONTS[front], last) if front != "alone" else last


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("labels", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("last", LINEAR, ids=lambda last: type(last).__name__)
def test_a_linear_model_answers_as_itself_and_has_its_gradient(
    last: Any, labels: Any, front: str
) -> None:
    fitted = behind(front, last).fit(X, labels)
    predict = from_sklearn(fitted)
    x, y = torch.tensor(X), torch.tensor(np.searchsorted(fitted.classes_, labels))
    found = predict(x)
    if hasattr(fitted, "predict_proba"):
        np.testing.assert_allclose(found.probs.numpy(), fitted.predict_proba(X), atol=1e-9)  # type: ignore[attr-defined]
    assert (fitted.classes_[found.logits.argmax(1).numpy()] == fitted.predict(X)).all()  # type: ignore[attr-defined]
    rows = slice(0, 4)
    _, _, gradient = loss_and_gradient(predict, nll, x[rows], y[rows])
    for k in range(3):  # central differences of the very numbers that the estimator gives
        step = torch.zeros(3, dtype=torch.float64)
        step[k] = 1e-5 * SPREAD[k]
        sides = [nll(predict(x[rows] + sign * step), y[rows]) for sign in (1, -1)]
        slope = (sides[0] - sides[1]) / (2 * step[k])
        torch.testing.assert_close(gradient[:, k], slope, rtol=1e-4, atol=1e-6 / SPREAD[k])


@pytest.mark.parametrize(
    "fitted",
    [
        RandomForestClassifier(3, random_state=0).fit(X, THREE),
        SGDClassifier(loss="log_loss", random_state=0).fit(X / SPREAD, THREE),  # one against all
        SVC(kernel="linear").fit(X / SPREAD, THREE),  # pairwise coefficients
        make_pipeline(PolynomialFeatures(2), StandardScaler(), LogisticRegression()).fit(X, TWO),
        make_pipeline(MinMaxScaler(clip=True), LogisticRegression()).fit(X, TWO),
    ],
    ids=lambda fitted: type(fitted).__name__,
)
def test_what_is_not_affine_stays_a_black_box(fitted: Any) -> None:
    predict: Any = from_sklearn(fitted)
    assert predict.numpy
    assert not predict(torch.tensor(X, requires_grad=True)).logits.requires_grad


@pytest.mark.parametrize("front", FRONTS)
def test_decisions_of_pairs_are_no_logits(front: str) -> None:
    """Three classes have three pairs, and of a linear kernel each is affine in x."""
    last = SVC(kernel="linear", decision_function_shape="ovo")
    with pytest.raises(InputError, match="one decision value for each class"):
        from_sklearn(behind(front, last).fit(X, THREE))


def test_regressors() -> None:
    y = X[:, 1] / 50 + RNG.normal(size=90)
    for last in (Ridge(), LinearRegression()):
        fitted = make_pipeline(StandardScaler(), last).fit(X, y)
        found = from_sklearn(fitted, data=(X, y))(torch.tensor(X, requires_grad=True))
        assert found.mean.requires_grad
        np.testing.assert_allclose(found.mean.detach().numpy(), fitted.predict(X), rtol=1e-9)
        rmse = np.sqrt(np.mean((fitted.predict(X) - y) ** 2))
        assert float(found.stddev[0]) == pytest.approx(rmse)
    counts = PoissonRegressor().fit(X / SPREAD, np.arange(90) % 4)  # exp(w x + b)
    assert from_sklearn(counts, scale=1.0).numpy  # type: ignore[attr-defined]


@pytest.mark.parametrize("unit", [1.0, 1e-9, 1e9])
@pytest.mark.parametrize("fitted_on", [(-1,), (-1, 1)], ids=["vector", "column"])
@pytest.mark.parametrize("judged_on", [(-1,), (-1, 1)], ids=["vector", "column"])
def test_the_scale_of_residuals_knows_no_unit_and_no_broadcasting(
    unit: float, fitted_on: tuple[int, ...], judged_on: tuple[int, ...]
) -> None:
    draw = np.random.default_rng(0)
    X = draw.normal(size=(30, 2))
    y = unit * (X @ [1.0, 2.0] + draw.normal(size=30))
    fitted = LinearRegression().fit(X, y.reshape(fitted_on))
    predict = from_sklearn(fitted, data=(X, y.reshape(judged_on)))
    wanted = np.sqrt(np.mean((fitted.predict(X).ravel() - y) ** 2))
    assert predict.scale == pytest.approx(wanted, rel=1e-12)  # type: ignore[attr-defined]


def test_the_residuals_of_other_targets_are_refused() -> None:
    X = np.eye(4)
    fitted = LinearRegression().fit(X, np.arange(4.0))
    exact = from_sklearn(fitted, data=(X, fitted.predict(X)))
    assert 0 < exact.scale < 1e-9  # type: ignore[attr-defined]
    for y in (np.ones((4, 2)), np.ones(3), np.ones(0)):
        with pytest.raises(InputError, match="y must have the shape of the predictions"):
            from_sklearn(fitted, data=(X, y))


def test_a_pipeline_is_evaluated_in_raw_units_with_its_own_labels() -> None:
    fitted = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, THREE)
    report = evaluate(fitted, (X, THREE), attacks={"PGD": pgd(BALL, 20)}, train_y=THREE)
    assert clean(report) == pytest.approx(fitted.score(X, THREE))
    # as by hand
    predict = from_sklearn(fitted)
    x, y = torch.tensor(X), torch.tensor(np.searchsorted(fitted.classes_, THREE))
    x_adv = pgd(BALL, 20)(predict, x, y)
    assert float(BALL.norm(x_adv - x).max()) <= 0.5 * (1 + 1e-6)
    left = (fitted.classes_[predict(x_adv).logits.argmax(1).numpy()] == THREE).mean()  # type: ignore[attr-defined]
    assert report.estimate("accuracy", attack="PGD", eps=0.5).value == pytest.approx(left)
    assert left < fitted.score(X, THREE)
    both = {"linear": fitted, "forest": RandomForestClassifier(3, random_state=0).fit(X, THREE)}
    found = evaluate(both, (X, THREE), attacks={"random": RandomSearch(BALL, 5)})
    assert set(found.predictors) >= {"linear", "forest"}


def test_our_own_estimator_behind_a_scaler_keeps_its_gradient() -> None:
    robust = RobustClassifier(None, epochs=150, random_state=0)
    fitted = make_pipeline(StandardScaler(), robust).fit(X, TWO)
    predict = from_sklearn(fitted)
    x = torch.tensor(X, requires_grad=True)
    found: Any = predict(x)
    np.testing.assert_allclose(found.probs.detach().numpy(), fitted.predict_proba(X), atol=1e-9)
    assert found.logits.requires_grad
    report = evaluate(fitted, (X, TWO), attacks={"PGD": pgd(BALL, 5, margin)})
    assert report.estimate("accuracy", attack="PGD", eps=0.5).value < fitted.score(X, TWO)
    alone = RobustRegressor(None, epochs=20, random_state=0).fit(X, X[:, 1])
    report = evaluate(alone, (X, X[:, 1]), attacks={"step": one_step(alone.ball_)})
    rmse = np.sqrt(np.mean((alone.predict(X) - X[:, 1]) ** 2))
    assert clean(report, "rmse") == pytest.approx(rmse)


def test_an_audit_of_a_pipeline_is_not_black_box() -> None:
    fitted = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, TWO)
    verdict = audit(
        fitted,
        (X[:60], TWO[:60]),  # as many as the tier takes
        ball=BALL,
        tier="quick",
        only=("E0", "E1", "E9", "E22"),
        threat_model=ThreatModel(units="standardised", scale=SPREAD),
        support=Support(train_y=TWO),
    )
    assert verdict["E9"].status == verdict["E0"].status == "passed"
    assert verdict.summary["clean accuracy"] == pytest.approx(fitted.score(X[:60], TWO[:60]))


def test_columns_by_name_and_columns_of_text() -> None:
    frame = pd.DataFrame(X, columns=["p", "q", "r"])
    named = ColumnTransformer([("q", StandardScaler(), ["q"])], remainder="passthrough")
    fitted = make_pipeline(named, LogisticRegression()).fit(frame, TWO)
    report = evaluate(fitted, (frame, TWO), attacks={"random": RandomSearch(BALL, 5)})
    assert clean(report) == pytest.approx(fitted.score(frame, TWO))
    frame["r"] = "text"
    with pytest.raises(TypeError, match="X must hold numbers"):
        evaluate(fitted, (frame, TWO), attacks={"step": one_step(BALL)})
    with pytest.raises(ValueError, match="classes seen by fit"):
        evaluate(LogisticRegression().fit(X, TWO), (X, THREE), attacks={"step": one_step(BALL)})

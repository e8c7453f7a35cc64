"""scikit-learn's estimators as Predictors: with gradients where the model is linear or one of ours,
as a black box elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import Distribution

from advbayes import checks
from advbayes.adapters.models import FunctionPredictor, rmse_of
from advbayes.types import Predictor

Array = NDArray[Any]
PROBES = 32  # random points at which a linear model is compared with the estimator itself


def from_sklearn(estimator: Any, *, scale: float | None = None, data: Any = None) -> Predictor:
    """A fitted scikit-learn estimator or pipeline as a Predictor of raw rows; y then holds
    positions in `estimator.classes_`.

    Classifiers give probabilities or, without them, decision values as logits. Regressors give a
    mean, with `scale` for its error, or else their own standard deviation where `predict` has
    `return_std`, or else the RMSE on `data` = (X, y) that they were not fitted to. Linear models
    (also calibrated by sigmoids) and the estimators of this package have gradients, alone or behind
    StandardScaler, MinMaxScaler and RobustScaler; only attacks without gradients reach the others.

    >>> from sklearn.linear_model import LogisticRegression
    >>> fitted = LogisticRegression().fit(np.array([[0.0], [1.0]]), np.array([0, 1]))
    >>> x = torch.tensor([[1.0]], requires_grad=True)
    >>> from_sklearn(fitted)(x).logits.requires_grad
    True
    """
    if not hasattr(estimator, "predict"):
        raise checks.InputTypeError(
            f"estimator must be a fitted scikit-learn estimator, got {checks.describe(estimator)}; "
            f"from_function(model.predict_proba, 'probs', numpy=True) takes what has no predict"
        )
    last, front = _apart(estimator)
    if front is not None and hasattr(last, "predictor_"):
        predictor: Predictor = last.predictor_
        if last is estimator:
            return predictor
        return Scaled(predictor, *front, last.thetas_.dtype, last.event_shape)
    frame = _frame_of(None if data is None else data[0])
    net = None if front is None else _net(estimator, last, front)
    if hasattr(estimator, "classes_"):
        if net is not None:
            return FunctionPredictor(net, "probs" if isinstance(net, _Calibrated) else "logits")
        if hasattr(estimator, "predict_proba"):
            return FunctionPredictor(
                lambda x: estimator.predict_proba(frame(x)), "probs", None, True
            )
        return FunctionPredictor(_Decisions(estimator, frame), "logits", None, True)
    if scale is None and "return_std" in inspect.signature(last.predict).parameters:
        return FunctionPredictor(
            lambda x: estimator.predict(frame(x), return_std=True), "mean_and_scale", None, True
        )
    if scale is None and data is None:
        raise checks.InputError(
            f"scale must be given for {type(estimator).__name__}, which says nothing of its error: "
            f"a standard deviation, or data=(X, y) that it was not fitted to, from whose residuals "
            f"it is taken; got neither"
        )
    scale = rmse_of(estimator.predict(data[0]), data[1]) if scale is None else scale
    if net is not None:
        return FunctionPredictor(net, "mean", scale)
    return FunctionPredictor(lambda x: estimator.predict(frame(x)), "mean", scale, True)


def with_estimators(predict: Any, data: Any, *others: Any) -> tuple[Any, Any, *tuple[Any, ...]]:
    """Estimators among the predictors as Predictors, and (X, y) in raw units as tensors for them;
    without any, all as it came.

    Labels become positions in `classes_`, also in `others`: further targets or pairs (X, y), or
    None.

    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = np.array([[0.0], [1.0]]), np.array(["no", "yes"])
    >>> with_estimators(LogisticRegression().fit(X, y), (X, y))[1][1]
    tensor([0, 1])
    """
    named = predict if isinstance(predict, Mapping) else {"predict": predict}
    estimators = [each for each in named.values() if is_estimator(each)]
    if not estimators:
        return predict, data, *others
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise checks.InputTypeError("data must be a pair (X, y) for an estimator", got=data)
    first = estimators[0]
    classes = getattr(first, "classes_", None)
    for other in estimators[1:]:
        if np.asarray(classes).tolist() != np.asarray(getattr(other, "classes_", None)).tolist():
            raise checks.InputError(
                "predict must hold estimators of the same classes, got different ones"
            )

    def taken(named: Any) -> Any:
        match named:
            case None | Tensor() | (Tensor(), _) | (_, Tensor()):
                return named
            case (X, y) if hasattr(first, "as_tensors"):
                return first.as_tensors(X, y)
            case (X, y):
                return torch.as_tensor(_numbers(X)), _target(np.asarray(y), classes)
        return _target(np.asarray(named), classes)

    made = {
        name: from_sklearn(each, data=data) if is_estimator(each) else each
        for name, each in named.items()
    }
    chosen = made if isinstance(predict, Mapping) else made["predict"]
    return chosen, *map(taken, (data, *others))


def is_estimator(value: Any) -> bool:
    """Whether a value is a scikit-learn estimator: it has `predict`, and is no Predictor itself."""
    return hasattr(value, "predict") and hasattr(value, "fit") and not callable(value)


@dataclass(frozen=True, eq=False, repr=False)
class Scaled:
    """A predictor of scaled rows, asked in raw units: predict(weight * x + bias).

    >>> from torch.distributions import Categorical
    >>> doubled = Scaled(lambda z: Categorical(logits=z), torch.tensor(2.0), torch.tensor(1.0))
    >>> doubled(torch.tensor([[0.0, 1.0]])).logits.exp()
    tensor([[0.1192, 0.8808]])
    """

    predict: Predictor
    weight: Tensor
    bias: Tensor
    dtype: torch.dtype | None = None
    event_shape: tuple[int, ...] | None = None

    def __call__(self, x: Tensor, /) -> Distribution:
        seen = x * self.weight.to(x.device) + self.bias.to(x.device)
        seen = seen if self.dtype is None else seen.to(self.dtype)
        return self.predict(seen if self.event_shape is None else seen.view(-1, *self.event_shape))


def _numbers(X: Any) -> Array:
    values = np.asarray(X)
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        raise checks.InputTypeError(
            "X must hold numbers, which an attack can change, got text: transform it first and "
            "evaluate the last step, evaluate(pipeline[-1], (pipeline[:-1].transform(X), y), ...), "
            "with a mask in the ball for what cannot be changed"
        ) from None


def _target(y: Array, classes: Any) -> Tensor:
    if classes is None:
        return torch.as_tensor(y.astype(np.float64))
    unknown = sorted(set(y.tolist()) - set(np.asarray(classes).tolist()))
    if unknown:
        raise checks.InputError(f"y must hold classes seen by fit, got {unknown[:5]}")
    order = np.argsort(classes)
    return torch.as_tensor(order[np.searchsorted(classes, y, sorter=order)])


def _frame_of(X: Any) -> Callable[[Array], Any]:
    """Arrays as the frame that X is, for estimators that know columns by name."""
    if not hasattr(X, "columns"):
        return lambda x: x
    return lambda x: type(X)(x, columns=X.columns)


# --- Models that are affine in x ------------------------------------------------------------------


def _apart(estimator: Any) -> tuple[Any, tuple[Tensor, Tensor] | None]:
    """The last step, and weight and bias of the scalers before it; None with any other step."""
    if not hasattr(estimator, "steps"):
        return estimator, (torch.ones((), dtype=torch.double), torch.zeros((), dtype=torch.double))
    weight, bias = np.ones(()), np.zeros(())
    for _, step in estimator.steps[:-1]:
        match type(step).__name__:
            case "StandardScaler" | "RobustScaler" as scaler:
                standard = scaler == "StandardScaler"
                centre = (step.mean_ if step.with_mean else None) if standard else step.center_
                factor = 1 / (np.ones(()) if step.scale_ is None else step.scale_)
                shift = np.zeros(()) if centre is None else -centre * factor
            case "MinMaxScaler" if not step.clip:
                factor, shift = step.scale_, step.min_
            case "str" | "NoneType":  # passthrough
                continue
            case _:
                return estimator[-1], None
        weight, bias = weight * factor, bias * factor + shift
    return estimator[-1], (torch.as_tensor(weight), torch.as_tensor(bias))


def _affine(last: Any, weight: Tensor, bias: Tensor, *, logits: bool = False) -> nn.Linear | None:
    """coef_ and intercept_ of the last step, in raw units, in float64; with `logits`, one decision
    d becomes two, -d/2 and d/2."""
    coef, intercept = getattr(last, "coef_", None), getattr(last, "intercept_", None)
    if not isinstance(coef, np.ndarray) or intercept is None or coef.ndim > 2:
        return None
    own = torch.tensor(np.atleast_2d(coef), dtype=torch.float64)  # (O, D)
    shift = torch.tensor(np.atleast_1d(intercept), dtype=torch.float64)
    if logits and len(own) == 1:
        half = torch.tensor([-0.5, 0.5], dtype=torch.float64)
        own, shift = half.unsqueeze(1) * own, half * shift
    layer = nn.Linear(own.shape[1], own.shape[0], dtype=torch.float64).requires_grad_(False)
    layer.weight.copy_(own * weight)
    layer.bias.copy_((own * bias).sum(1) + shift)
    return layer.eval()


def _agrees(net: nn.Module, says: Callable[[Array], Any], front: tuple[Tensor, Tensor]) -> bool:
    """Whether a net gives what the estimator says at random rows of unit size, scaled."""
    size = next(net.parameters()).shape[-1]
    drawn = np.random.default_rng(0).normal(size=(PROBES, size))
    rows = (torch.as_tensor(drawn) - front[1]) / front[0]
    try:
        wanted = np.asarray(says(rows.numpy()))
    except Exception:  # an estimator that takes no plain array
        return False
    ours = net(rows).numpy()
    if ours.size != wanted.size:
        return False
    return np.allclose(ours.reshape(wanted.shape), wanted, rtol=1e-6, atol=1e-8)


def _net(estimator: Any, last: Any, front: tuple[Tensor, Tensor]) -> nn.Module | None:
    """The net whose outputs are the estimator's, if it is linear (or calibrated by sigmoids) and
    agrees with it."""
    calibrated = hasattr(last, "calibrated_classifiers_")
    is_classifier = hasattr(estimator, "classes_")
    net: nn.Module | None = _affine(last, *front, logits=is_classifier)
    if calibrated:
        net = _calibrated(last, *front)
    if net is None or (is_classifier and _is_pairwise(last)):
        return None
    if not is_classifier:
        same = _agrees(net, estimator.predict, front)
    elif hasattr(estimator, "predict_proba"):
        probs = net if calibrated else nn.Sequential(net, nn.Softmax(-1))
        same = _agrees(probs, estimator.predict_proba, front)
    else:
        same = _agrees(net, lambda x: _two_columns(estimator.decision_function(x)), front)
    return net if same else None


class _Calibrated(nn.ModuleList):
    """The mean of linear layers that go through sigmoids: decisions after Platt's scaling."""

    def forward(self, x: Tensor) -> Tensor:  # (B, C)
        shares = [torch.sigmoid(layer(x)) for layer in self]
        parts = [
            torch.cat([1 - p, p], 1) if p.shape[1] == 1 else p / p.sum(1, keepdim=True)
            for p in shares
        ]
        return torch.stack(parts).mean(0)


def _calibrated(last: Any, weight: Tensor, bias: Tensor) -> _Calibrated | None:
    """p = sigmoid(-(slope * decision + offset)) of each member, slope and offset in its layer."""
    members = _Calibrated()
    for each in last.calibrated_classifiers_:
        decision = _affine(each.estimator, weight, bias)
        if decision is None or not all(hasattr(c, "a_") for c in each.calibrators):
            return None
        slope, offset = (
            torch.tensor([getattr(c, name) for c in each.calibrators], dtype=torch.float64)
            for name in ("a_", "b_")
        )
        decision.weight.mul_(-slope.unsqueeze(1))
        decision.bias.mul_(-slope).sub_(offset)
        members.append(decision)
    return members.eval()


@dataclass(frozen=True, eq=False)
class _Decisions:
    """Decision values with one column for each class, compared with what the estimator itself
    predicts on the first rows.

    Pairwise values (one against one) come in as many columns as there are classes when there are
    three of them, so that counting columns does not tell. Votes that tie may be broken differently
    by `predict`, hence some leeway.
    """

    estimator: Any
    frame: Callable[[Array], Any]
    rows: int = 256  # to compare
    # rows compared, rows that disagree
    _seen: list[int] = field(default_factory=lambda: [0, 0], repr=False)

    def __post_init__(self) -> None:
        if _is_pairwise(_apart(self.estimator)[0]):
            raise checks.InputError(
                "estimator must give one decision value for each class, got "
                "decision_function_shape='ovo' (one for each pair): "
                "set estimator.decision_function_shape = 'ovr', or fit it with probability=True"
            )

    def __call__(self, x: Array) -> Array:
        decision = _two_columns(np.asarray(self.estimator.decision_function(self.frame(x))))
        classes = np.asarray(self.estimator.classes_)
        if decision.ndim != 2 or decision.shape[1] != len(classes):
            raise checks.InputError(
                f"estimator must give one decision value for each of its {len(classes)} classes, "
                f"got shape {decision.shape}"
            )
        if self._seen[0] < self.rows:
            part = slice(0, self.rows - self._seen[0])
            own = np.asarray(self.estimator.predict(self.frame(x[part])))
            ours = classes[decision[part].argmax(1)]
            self._seen[0] += len(own)
            self._seen[1] += int((own != ours).sum())
            if self._seen[1] > 1 + 0.1 * self._seen[0]:
                raise checks.InputError(
                    f"the largest of the estimator's decision values must be at the class that it "
                    f"predicts, got another on {self._seen[1]} of {self._seen[0]} examples: are "
                    f"they pairwise (decision_function_shape='ovo')?"
                )
        return decision


def _is_pairwise(last: Any) -> bool:
    """Whether a classifier has a decision value for each pair of its classes, not for each class:
    with three of them these are as many."""
    return getattr(last, "decision_function_shape", None) == "ovo" and len(last.classes_) > 2


def _two_columns(decision: Array) -> Array:
    return np.stack([-decision, decision], axis=1) / 2 if decision.ndim == 1 else decision

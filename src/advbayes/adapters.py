"""Others' models as Predictors, and Predictors for others' attacks (Foolbox, AutoAttack, ART).

A model that comes in says what its outputs are (`kind`), and the first call checks that they look
like it: probabilities taken for logits are soft-maxed twice, which flattens gradients and makes any
    model look robust.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution

from advbayes import checks
from advbayes.attacks.balls import L2, Ball, Linf
from advbayes.likelihoods import gaussian_prediction
from advbayes.types import Predictor

KINDS = ("logits", "log_probs", "probs", "mean", "mean_and_scale")


@dataclass(frozen=True, eq=False)
class FunctionPredictor:
    """A function whose outputs are of a stated kind, as a Predictor; see `from_function`.

    >>> FunctionPredictor(lambda x: x, "logits")(torch.tensor([[1.0, 1.0]])).probs
    tensor([[0.5000, 0.5000]])
    """

    function: Callable[[Any], Any]
    kind: str
    scale: float | None = None
    numpy: bool = False  # the function takes and gives arrays: no gradients
    _seen: list[bool] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise checks.InputTypeError(
                f"function must be callable on a batch x, got {checks.describe(self.function)}"
            )
        checks.choice("kind", self.kind, KINDS)
        if self.kind == "mean":
            if self.scale is None:
                raise checks.InputError(
                    "scale must be given with kind='mean': the standard deviation of the errors, "
                    "such as the RMSE on data that "
                    "the function was not fitted to; likelihoods, CRPS and coverage rest on it, "
                    "got None"
                )
            checks.number("scale", self.scale, low=0, open_low=True)
        elif self.scale is not None:
            raise checks.InputError(f"scale goes with kind='mean' alone, got kind={self.kind!r}")

    def __call__(self, x: Tensor) -> Distribution:
        output = self.function(
            x.detach().cpu().numpy() if self.numpy else _for_net(self.function, x)
        )
        if self.kind == "mean_and_scale":
            if not isinstance(output, (tuple, list)) or len(output) != 2:
                raise checks.InputTypeError(
                    f"function must give a pair (mean, scale) for this kind, got "
                    f"{checks.describe(output)}"
                )
            mean, scale = (_tensor(part, x) for part in output)
            self._check(mean, x, 1)
            return _normal(_as(x, mean), _as(x, _scale_for(mean, scale)))
        scores = _tensor(output, x)
        if self.kind == "mean":
            self._check(scores, x, 1)
            scores = _as(x, scores)
            assert self.scale is not None
            return _normal(scores, torch.full_like(scores, self.scale))
        self._check(scores, x, 2)
        if self.kind == "probs":
            # log of the smallest normal number, so that p = 0 has a finite log-probability and no
            # NaN in its gradient
            scores = scores.clamp_min(torch.finfo(scores.dtype).tiny).log()
        return CategoricalDistribution(logits=_as(x, scores), validate_args=False)

    def _check(self, output: Tensor, x: Tensor, least: int) -> None:
        """Shape and finiteness always; what the numbers look like at the first call."""
        wanted = "(B, C) with C >= 2" if least == 2 else "(B,) or (B, D)"
        if (
            output.ndim not in (least, 2)
            or len(output) != len(x)
            or (least == 2 and output.shape[1] < 2)
        ):
            raise checks.InputError(
                f"function must give {self.kind} of shape {wanted} for x of shape "
                f"{tuple(x.shape)}, got {checks.describe(output)}"
            )
        checks.finite(f"the function's {self.kind}", output.detach())
        if not self._seen and len(x):
            _looks_like(self.kind, output.detach())
            self._seen.append(True)


def _for_net(function: Callable[[Any], Any], x: Tensor) -> Tensor:
    """x in the floating dtype of a torch network; predictions (`_as`) and gradients come back in
    x's own."""
    if not isinstance(function, nn.Module) or not x.is_floating_point():
        return x
    dtype = next(
        (value.dtype for value in function.parameters() if value.is_floating_point()), x.dtype
    )
    return x.to(dtype)


def _as(x: Tensor, output: Tensor) -> Tensor:
    return output.to(x.dtype) if x.is_floating_point() and output.is_floating_point() else output


def _scale_for(mean: Tensor, scale: Tensor) -> Tensor:
    """Standard deviations in the mean's shape: positive, a number, one for each output or one for
    each mean."""
    checks.finite("the function's scale", scale.detach())
    if not bool((scale > 0).all()):
        raise checks.InputError(
            f"the function's scale must be positive (standard deviations), got a smallest value "
            f"of {float(scale.min()):g}"
        )
    if scale.shape != mean.shape and {tuple(scale.shape), tuple(mean.shape)} == {
        (len(mean),),
        (len(mean), 1),
    }:
        return scale.reshape(mean.shape)  # (B,) and (B, 1) are the same, and never broadcast
    try:
        return scale.expand_as(mean)
    except RuntimeError:
        raise checks.InputError(
            f"the function's scale must fit its mean of shape {tuple(mean.shape)}, got "
            f"{checks.describe(scale)}"
        ) from None


def _looks_like(kind: str, scores: Tensor) -> None:
    """Refuse scores that are plainly of another kind."""
    if kind in ("mean", "mean_and_scale"):
        return
    low, total = float(scores.min()), scores.sum(1)
    if kind == "logits":
        if not bool(scores.any()):
            raise checks.InputError(
                "the function's logits are all zero: every class is equally likely and no attack "
                "finds a gradient"
            )
        if low >= 0 and bool(((total - 1).abs() < 1e-4).all()):
            raise checks.InputError(
                "the function's logits look like probabilities (non-negative, summing to 1): pass "
                "kind='probs'"
            )
    elif kind == "probs":
        if low < 0 or bool(((total - 1).abs() > 1e-3).any()):
            raise checks.InputError(
                "the function's probs must be non-negative and sum to 1, got values from "
                f"{low:g} and sums from {float(total.min()):g} to {float(total.max()):g}: pass "
                f"kind='logits' or kind='log_probs'"
            )
    elif float(scores.max()) > 1e-4 or bool((scores.logsumexp(1).abs() > 1e-3).any()):
        raise checks.InputError(
            f"the function's log_probs must be <= 0 with logsumexp 0, got a largest value of "
            f"{float(scores.max()):g}: "
            "pass kind='probs' for probabilities, kind='logits' for scores"
        )


def from_function(
    function: Callable[[Any], Any], kind: str, *, scale: float | None = None, numpy: bool = False
) -> FunctionPredictor:
    """A function of a batch as a Predictor: `kind` says what it gives.

    Classes: "logits", "log_probs" or "probs", (B, C). Regression: "mean", (B,) or (B, D), which
    needs a standard deviation, `scale`, or "mean_and_scale", a pair of them. `numpy`: it takes and
    gives arrays, and only attacks without gradients reach it.

    >>> from_function(lambda x: x.softmax(-1), "logits")(torch.randn(2, 3))
    Traceback (most recent call last):
    ...
    advbayes.checks.InputError: the function's logits look like probabilities (non-negative, summing to 1): pass kind='probs'
    """  # noqa: E501
    return FunctionPredictor(function, kind, scale, numpy)


def from_torch(
    net: nn.Module, kind: str = "logits", *, scale: float | None = None
) -> FunctionPredictor:
    """A trained torch network as a Predictor; inputs are taken to the dtype of its parameters.

    >>> from_torch(nn.Linear(4, 3).eval())(torch.ones(2, 4)).probs.shape
    torch.Size([2, 3])
    """
    if not isinstance(net, nn.Module):
        raise checks.InputTypeError(f"net must be a torch.nn.Module, got {checks.describe(net)}")
    for name, layer in net.named_modules():
        if layer.training and isinstance(
            layer, (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
        ):
            raise checks.InputError(
                f"net must be in evaluation mode, got layer {name!r}: {layer} in training mode; "
                f"call net.eval()"
            )
    return FunctionPredictor(net, kind, scale)


def from_sklearn(estimator: Any, *, scale: float | None = None) -> FunctionPredictor:
    """A fitted scikit-learn estimator as a Predictor; y then holds positions in
    `estimator.classes_`.

    Classifiers give probabilities or, without them, decision values as logits. Regressors give a
    mean, with `scale` for its error, or else with their own standard deviation where `predict` has
    `return_std`.

    >>> from sklearn.linear_model import LogisticRegression
    >>> import numpy as np
    >>> fitted = LogisticRegression().fit(np.array([[0.0], [1.0]]), np.array([0, 1]))
    >>> from_sklearn(fitted)(torch.tensor([[1.0]])).probs.argmax(-1)
    tensor([1])
    """
    if hasattr(estimator, "predict_proba"):
        return FunctionPredictor(estimator.predict_proba, "probs", None, True)
    if hasattr(estimator, "decision_function") and hasattr(estimator, "classes_"):
        return FunctionPredictor(_Decisions(estimator), "logits", None, True)
    if not hasattr(estimator, "predict"):
        raise checks.InputTypeError(
            f"estimator must be a fitted scikit-learn estimator, got {checks.describe(estimator)}"
        )
    if scale is None:
        if "return_std" in inspect.signature(estimator.predict).parameters:
            return FunctionPredictor(
                lambda x: estimator.predict(x, return_std=True), "mean_and_scale", None, True
            )
        warnings.warn(
            f"{type(estimator).__name__} gives no standard deviation: scale = 1 is assumed, and "
            f"likelihoods, CRPS and coverage "
            "mean nothing unless its errors are about 1; pass scale=, such as the RMSE on data it "
            "was not fitted to",
            UserWarning,
            stacklevel=2,
        )
    return FunctionPredictor(estimator.predict, "mean", 1.0 if scale is None else scale, True)


@dataclass(frozen=True, eq=False)
class _Decisions:
    """Decision values with one column for each class, held against what the estimator itself
    predicts on the first rows.

    Pairwise values (one against one) come in as many columns as there are classes when there are
    three of them, so that counting columns does not tell. Votes that tie may be broken differently
    by `predict`, hence some leeway.
    """

    estimator: Any
    rows: int = 256  # to compare
    # rows compared, rows that disagree
    _seen: list[int] = field(default_factory=lambda: [0, 0], repr=False)

    def __post_init__(self) -> None:
        if (
            getattr(self.estimator, "decision_function_shape", None) == "ovo"
            and len(self.estimator.classes_) > 2
        ):
            raise checks.InputError(
                "estimator must give one decision value for each class, got "
                "decision_function_shape='ovo' (one for each pair): "
                "set estimator.decision_function_shape = 'ovr', or fit it with probability=True"
            )

    def __call__(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        decision = _two_columns(np.asarray(self.estimator.decision_function(x)))
        classes = np.asarray(self.estimator.classes_)
        if decision.ndim != 2 or decision.shape[1] != len(classes):
            raise checks.InputError(
                f"estimator must give one decision value for each of its {len(classes)} classes, "
                f"got shape {decision.shape}"
            )
        if self._seen[0] < self.rows:
            part = slice(0, self.rows - self._seen[0])
            own, ours = (
                np.asarray(self.estimator.predict(x[part])),
                classes[decision[part].argmax(1)],
            )
            self._seen[0] += len(own)
            self._seen[1] += int((own != ours).sum())
            if self._seen[1] > 1 + 0.1 * self._seen[0]:
                raise checks.InputError(
                    "the largest of the estimator's decision values must be at the class that it "
                    "predicts, got another on "
                    f"{self._seen[1]} of {self._seen[0]} examples: are they pairwise "
                    f"(decision_function_shape='ovo')?"
                )
        return decision


def _two_columns(decision: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.stack([-decision, decision], axis=1) / 2 if decision.ndim == 1 else decision


def _tensor(output: Any, like: Tensor) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return torch.as_tensor(np.asarray(output), dtype=like.dtype, device=like.device)


def _normal(mean: Tensor, scale: Tensor) -> Distribution:
    if mean.ndim == 2 and mean.shape[1] == 1:
        mean, scale = mean.squeeze(1), scale.squeeze(1)
    return gaussian_prediction(mean, scale, 1 if mean.ndim == 1 else mean.shape[1])


# --- A Predictor for others' attacks ------------------------------------------------------------


class PredictorModule(nn.Module):
    """A Predictor as a torch module: log-probabilities of the classes (which are logits), or the
    mean.

    What another library was told, it cannot check: `num_classes` and `ndim` (of x) are held against
    every call.

    >>> PredictorModule(lambda x: CategoricalDistribution(logits=x))(torch.zeros(1, 2))
    tensor([[-0.6931, -0.6931]])
    """

    def __init__(
        self, predict: Predictor, *, num_classes: int | None = None, ndim: int | None = None
    ) -> None:
        super().__init__()
        self.predict = predict
        self.num_classes, self.ndim = num_classes, ndim
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.ndim is not None and x.ndim != self.ndim:
            raise checks.InputError(
                f"x must have {self.ndim} dimensions, (B, channels, height, width), for this "
                f"library's attacks, got "
                f"{checks.describe(x)}: reshape x, and let the predictor flatten it"
            )
        prediction = self.predict(x)
        if not isinstance(prediction, CategoricalDistribution):
            if self.num_classes is not None:
                raise checks.InputTypeError(
                    f"predict must predict {self.num_classes} classes, got "
                    f"{type(prediction).__name__}"
                )
            return prediction.mean
        if self.num_classes is not None and prediction.logits.shape[-1] != self.num_classes:
            raise checks.InputError(
                f"num_classes must be the number that predict knows, "
                f"{prediction.logits.shape[-1]}, got {self.num_classes}"
            )
        return prediction.logits


def to_foolbox(
    predict: Predictor,
    bounds: tuple[float, float] = (0.0, 1.0),
    *,
    device: torch.device | str = "cpu",
) -> Any:
    """A `foolbox.PyTorchModel`. Foolbox's default step size is weak: pass
    `rel_stepsize=2.5 / steps` to its attacks.

    >>> to_foolbox(lambda x: CategoricalDistribution(logits=x)).bounds  # doctest: +SKIP
    Bounds(lower=0.0, upper=1.0)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its imports use old scipy names
        from foolbox.models.pytorch import PyTorchModel
    return PyTorchModel(PredictorModule(predict), bounds=bounds, device=torch.device(device))


def to_autoattack(
    predict: Predictor,
    ball: Ball,
    num_classes: int,
    *,
    version: str = "standard",
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Any:
    """A `pyautoattack.AutoAttack` for the ball; its `run_standard_evaluation(x, y)` gives a pair:
    the adversarial examples, and what is predicted for them.

    AutoAttack knows images (B, channels, height, width) in [0, 1] and plain balls only. It aims at
    nine wrong classes: with fewer, at all of them, and below four classes its targeted losses do
    not exist, so that APGD-CE, FAB and Square remain.

    >>> from advbayes import Linf
    >>> to_autoattack(
    ...     lambda x: CategoricalDistribution(logits=x), Linf(0.1, box=(0, 1)), 5
    ... ).norm  # doctest: +SKIP
    'Linf'
    """
    checks.count("num_classes", num_classes, low=2)
    if (
        not isinstance(ball, (L2, Linf))
        or ball.scale is not None
        or ball.mask is not None
        or not _is_unit(ball.box)
    ):
        raise checks.InputError(
            f"ball must be L2 or Linf with box=(0, 1) and neither scale nor mask for AutoAttack, "
            f"got {ball}"
        )
    from pyautoattack import AutoAttack

    arguments = {
        "norm": "L2" if isinstance(ball, L2) else "Linf",
        "eps": ball.eps,
        "seed": seed,
        "device": torch.device(device),
    }
    module = PredictorModule(predict, num_classes=num_classes, ndim=4)
    if num_classes < 4:
        attack = AutoAttack(
            module, version="custom", attacks=["apgd-ce", "fab", "square"], **arguments
        )
    else:
        attack = AutoAttack(module, version=version, **arguments)
    for part in (attack.apgd_targeted, attack.fab):
        part.n_target_classes = min(9, num_classes - 1)
    return attack


def _is_unit(box: tuple[Any, Any] | None) -> bool:
    """Whether a box of numbers or tensors is [0, 1] everywhere."""
    return box is not None and all(
        bool((torch.as_tensor(side) == at).all()) for side, at in zip(box, (0, 1), strict=True)
    )


def to_art(
    predict: Predictor,
    input_shape: tuple[int, ...],
    num_classes: int | None = None,
    *,
    box: tuple[float, float] | None = None,
    device: str = "cpu",
) -> Any:
    """An ART `PyTorchClassifier`, or without `num_classes` a `PyTorchRegressor`, whose y must have
    shape (n,).

    >>> to_art(lambda x: CategoricalDistribution(logits=x), (3,), 3).nb_classes  # doctest: +SKIP
    3
    """
    module = PredictorModule(predict, num_classes=num_classes)
    shared = {
        "model": module,
        "input_shape": tuple(input_shape),
        "clip_values": box,
        "device_type": device,
    }
    if num_classes is None:
        from art.estimators.regression.pytorch import PyTorchRegressor

        return PyTorchRegressor(loss=nn.MSELoss(), **shared)
    from art.estimators.classification import PyTorchClassifier

    return PyTorchClassifier(
        loss=nn.CrossEntropyLoss(),
        nb_classes=checks.count("num_classes", num_classes, low=2),
        **shared,
    )

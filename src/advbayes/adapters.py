"""Others' models as Predictors, and Predictors for others' attacks (Foolbox, AutoAttack, ART).

A model that comes in says what its outputs are (`kind`), and the first call checks that they look like it: probabilities taken
for logits are soft-maxed twice, which flattens gradients and makes any model look robust.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, Independent, Normal

from advbayes import checks
from advbayes.balls import L2
from advbayes.balls import _Ball as Ball
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
            raise TypeError(f"function must be callable on a batch x, got {checks.describe(self.function)}")
        checks.choice("kind", self.kind, KINDS)
        if self.kind == "mean":
            checks.number("scale", 1.0 if self.scale is None else self.scale, low=0, open_low=True)
        elif self.scale is not None:
            raise ValueError(f"scale goes with kind='mean' alone, got kind={self.kind!r}")

    def __call__(self, x: Tensor) -> Distribution:
        output = self.function(x.detach().cpu().numpy() if self.numpy else x)
        if self.kind == "mean_and_scale":
            if not isinstance(output, (tuple, list)) or len(output) != 2:
                raise TypeError(f"function must give a pair (mean, scale) for this kind, got {checks.describe(output)}")
            mean, scale = (_tensor(part, x) for part in output)
            self._check(mean, x, 1)
            return _normal(mean, scale.expand_as(mean))
        scores = _tensor(output, x)
        if self.kind == "mean":
            self._check(scores, x, 1)
            return _normal(scores, torch.full_like(scores, 1.0 if self.scale is None else self.scale))
        self._check(scores, x, 2)
        if self.kind == "probs":
            # log of the smallest normal number, so that p = 0 has a finite log-probability and no NaN in its gradient
            scores = scores.clamp_min(torch.finfo(scores.dtype).tiny).log()
        return CategoricalDistribution(logits=scores, validate_args=False)

    def _check(self, output: Tensor, x: Tensor, least: int) -> None:
        """Shape and finiteness always; what the numbers look like at the first call."""
        wanted = "(B, C) with C >= 2" if least == 2 else "(B,) or (B, D)"
        if output.ndim not in (least, 2) or len(output) != len(x) or (least == 2 and output.shape[1] < 2):
            raise ValueError(
                f"function must give {self.kind} of shape {wanted} for x of shape {tuple(x.shape)}, got {checks.describe(output)}"
            )
        checks.finite(f"the function's {self.kind}", output.detach())
        if not self._seen and len(x):
            _looks_like(self.kind, output.detach())
            self._seen.append(True)


def _looks_like(kind: str, scores: Tensor) -> None:
    """Refuse scores that are plainly of another kind."""
    if kind in ("mean", "mean_and_scale"):
        return
    low, total = float(scores.min()), scores.sum(1)
    if kind == "logits":
        if not bool(scores.any()):
            raise ValueError("the function's logits are all zero: every class is equally likely and no attack finds a gradient")
        if low >= 0 and bool(((total - 1).abs() < 1e-4).all()):
            raise ValueError("the function's logits look like probabilities (non-negative, summing to 1): pass kind='probs'")
    elif kind == "probs":
        if low < 0 or bool(((total - 1).abs() > 1e-3).any()):
            raise ValueError(
                "the function's probs must be non-negative and sum to 1, got values from "
                f"{low:g} and sums from {float(total.min()):g} to {float(total.max()):g}: pass kind='logits' or kind='log_probs'"
            )
    elif float(scores.max()) > 1e-4 or bool((scores.logsumexp(1).abs() > 1e-3).any()):
        raise ValueError(
            f"the function's log_probs must be <= 0 with logsumexp 0, got a largest value of {float(scores.max()):g}: "
            "pass kind='probs' for probabilities, kind='logits' for scores"
        )


def from_function(
    function: Callable[[Any], Any], kind: str, *, scale: float | None = None, numpy: bool = False
) -> FunctionPredictor:
    """A function of a batch as a Predictor: `kind` says what it gives.

    Classes: "logits", "log_probs" or "probs", (B, C). Regression: "mean", (B,) or (B, D), with a standard deviation `scale`,
    or "mean_and_scale", a pair of them. `numpy`: it takes and gives arrays, and only attacks without gradients reach it.

    >>> from_function(lambda x: x.softmax(-1), "logits")(torch.randn(2, 3))
    Traceback (most recent call last):
    ...
    ValueError: the function's logits look like probabilities (non-negative, summing to 1): pass kind='probs'
    """
    return FunctionPredictor(function, kind, scale, numpy)


def from_torch(net: nn.Module, kind: str = "logits", *, scale: float | None = None) -> FunctionPredictor:
    """A trained torch network as a Predictor.

    >>> from_torch(nn.Linear(4, 3).eval())(torch.ones(2, 4)).probs.shape
    torch.Size([2, 3])
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be a torch.nn.Module, got {checks.describe(net)}")
    for name, layer in net.named_modules():
        if layer.training and isinstance(layer, (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)):
            raise ValueError(f"net must be in evaluation mode, got layer {name!r}: {layer} in training mode; call net.eval()")
    return FunctionPredictor(net, kind, scale)


def from_sklearn(estimator: Any, *, scale: float | None = None) -> FunctionPredictor:
    """A fitted scikit-learn estimator as a Predictor; y then holds positions in `estimator.classes_`.

    Classifiers give probabilities or, without them, decision values as logits; regressors a mean, with `scale` for its error.

    >>> from sklearn.linear_model import LogisticRegression
    >>> import numpy as np
    >>> fitted = LogisticRegression().fit(np.array([[0.0], [1.0]]), np.array([0, 1]))
    >>> from_sklearn(fitted)(torch.tensor([[1.0]])).probs.argmax(-1)
    tensor([1])
    """
    if hasattr(estimator, "predict_proba"):
        return FunctionPredictor(estimator.predict_proba, "probs", None, True)
    if hasattr(estimator, "decision_function") and hasattr(estimator, "classes_"):
        return FunctionPredictor(lambda x: _two_columns(estimator.decision_function(x)), "logits", None, True)
    if not hasattr(estimator, "predict"):
        raise TypeError(f"estimator must be a fitted scikit-learn estimator, got {checks.describe(estimator)}")
    return FunctionPredictor(estimator.predict, "mean", scale, True)


def _two_columns(decision: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.stack([-decision, decision], axis=1) / 2 if decision.ndim == 1 else decision


def _tensor(output: Any, like: Tensor) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return torch.as_tensor(np.asarray(output), dtype=like.dtype, device=like.device)


def _normal(mean: Tensor, scale: Tensor) -> Distribution:
    if mean.ndim == 2 and mean.shape[1] == 1:
        mean, scale = mean.squeeze(1), scale.squeeze(1)
    normal = Normal(mean, scale, validate_args=False)
    return normal if mean.ndim == 1 else Independent(normal, 1, validate_args=False)


# --- A Predictor for others' attacks ----------------------------------------------------------------------------------


class PredictorModule(nn.Module):
    """A Predictor as a torch module: log-probabilities of the classes (which are logits), or the mean.

    >>> PredictorModule(lambda x: CategoricalDistribution(logits=x))(torch.zeros(1, 2))
    tensor([[-0.6931, -0.6931]])
    """

    def __init__(self, predict: Predictor) -> None:
        super().__init__()
        self.predict = predict
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        prediction = self.predict(x)
        return prediction.logits if isinstance(prediction, CategoricalDistribution) else prediction.mean


def to_foolbox(predict: Predictor, bounds: tuple[float, float] = (0.0, 1.0), *, device: torch.device | str = "cpu") -> Any:
    """A `foolbox.PyTorchModel`. Foolbox's default step size is weak: pass `rel_stepsize=2.5 / steps` to its attacks.

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
    """A `pyautoattack.AutoAttack` for the ball; its `run_standard_evaluation(x, y)` gives adversarial examples.

    AutoAttack knows inputs in [0, 1] and plain balls only. It aims at nine wrong classes: with fewer, at all of them, and
    below four classes its targeted losses do not exist, so that APGD-CE, FAB and Square remain.

    >>> from advbayes import Linf
    >>> to_autoattack(lambda x: CategoricalDistribution(logits=x), Linf(0.1, box=(0, 1)), 5).norm  # doctest: +SKIP
    'Linf'
    """
    checks.count("num_classes", num_classes, low=2)
    if ball.scale is not None or ball.mask is not None or ball.box is None or tuple(ball.box) != (0, 1):
        raise ValueError(f"ball must have box=(0, 1) and neither scale nor mask for AutoAttack, got {ball}")
    from pyautoattack import AutoAttack

    arguments = {"norm": "L2" if isinstance(ball, L2) else "Linf", "eps": ball.eps, "seed": seed, "device": torch.device(device)}
    if num_classes < 4:
        attack = AutoAttack(PredictorModule(predict), version="custom", attacks=["apgd-ce", "fab", "square"], **arguments)
    else:
        attack = AutoAttack(PredictorModule(predict), version=version, **arguments)
    for part in (attack.apgd_targeted, attack.fab):
        part.n_target_classes = min(9, num_classes - 1)
    return attack


def to_art(
    predict: Predictor,
    input_shape: tuple[int, ...],
    num_classes: int | None = None,
    *,
    box: tuple[float, float] | None = None,
    device: str = "cpu",
) -> Any:
    """An ART `PyTorchClassifier`, or without `num_classes` a `PyTorchRegressor`, whose y must have shape (n,).

    >>> to_art(lambda x: CategoricalDistribution(logits=x), (3,), 3).nb_classes  # doctest: +SKIP
    3
    """
    shared = {"model": PredictorModule(predict), "input_shape": tuple(input_shape), "clip_values": box, "device_type": device}
    if num_classes is None:
        from art.estimators.regression.pytorch import PyTorchRegressor

        return PyTorchRegressor(loss=nn.MSELoss(), **shared)
    from art.estimators.classification import PyTorchClassifier

    return PyTorchClassifier(loss=nn.CrossEntropyLoss(), nb_classes=checks.count("num_classes", num_classes, low=2), **shared)

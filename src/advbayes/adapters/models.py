"""Others' models as Predictors.

A model that comes in says what its outputs are (`kind`), and the first call checks that they look
like it: probabilities taken for logits are soft-maxed twice, which flattens gradients and makes any
model look robust.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution

from advbayes import checks
from advbayes.likelihoods import gaussian_prediction

KINDS = ("logits", "log_probs", "probs", "mean", "mean_and_scale")


def rmse_of(said: Any, y: Any) -> float:
    """The root of the mean squared residual: the scale of a model that states none.

    Where nothing but rounding is left, a residual of 1e-12 of the largest target is.

    >>> rmse_of(np.array([1.0, 2.0]), np.array([[1.0], [4.0]]))
    1.4142135623730951
    """
    means, targets = (np.asarray(value, dtype=float) for value in (said, y))
    if not targets.size or (len(means), means.size) != (len(targets), targets.size):
        raise checks.InputError(
            f"y must have the shape of the predictions, {means.shape}, got {targets.shape}"
        )
    error = float(np.sqrt(np.mean(np.square(means.reshape(targets.shape) - targets))))
    return max(error, 1e-12 * (float(np.abs(targets).max()) or 1.0))


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
        checks.function("function", self.function, "callable on a batch x")
        checks.choice("kind", self.kind, KINDS)
        if self.kind == "mean":
            if self.scale is None:
                raise checks.InputError(
                    "scale must be given with kind='mean': the standard deviation of the errors, "
                    "such as the RMSE on data that the function was not fitted to; likelihoods, "
                    "CRPS and coverage rest on it, got None"
                )
            checks.number("scale", self.scale, low=0, open_low=True)
        elif self.scale is not None:
            raise checks.InputError(f"scale goes with kind='mean' alone, got kind={self.kind!r}")

    def __call__(self, x: Tensor) -> Distribution:
        output = self.function(
            x.detach().cpu().numpy() if self.numpy else _for_net(self.function, x)
        )
        if self.kind in ("mean", "mean_and_scale"):
            match (output, self.scale) if self.kind == "mean" else output:
                case (mean, scale):
                    mean = _tensor(mean, x)
                case _:
                    wanted = "function must give a pair (mean, scale) for this kind"
                    raise checks.InputTypeError(wanted, got=output)
            self._check(mean, x, 1)
            return _normal(_as(x, mean), _as(x, _scale_for(mean, _tensor(scale, mean))))
        scores = _tensor(output, x)
        self._check(scores, x, 2)
        if self.kind == "probs":
            # log of the smallest normal number, so that p = 0 has a finite log-probability and no
            # NaN in its gradient
            scores = scores.clamp_min(torch.finfo(scores.dtype).tiny).log()
        return CategoricalDistribution(logits=_as(x, scores), validate_args=False)

    def _check(self, output: Tensor, x: Tensor, least: int) -> None:
        """Shape and finiteness always; what the numbers look like at the first call."""
        wanted = "(B, C) with C >= 2" if least == 2 else "(B,) or (B, D)"
        fits = output.ndim in (least, 2) and len(output) == len(x)
        if not fits or (least == 2 and output.shape[1] < 2):
            raise checks.InputError(
                f"function must give {self.kind} of shape {wanted} for x of shape {tuple(x.shape)}",
                got=output,
            )
        checks.finite(f"the function's {self.kind}", output.detach())
        if least == 2 and not self._seen and len(x):
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
    """Standard deviations in the mean's shape: positive; one, or one for each output or mean."""
    checks.finite("the function's scale", scale.detach())
    if not bool((scale > 0).all()):
        raise checks.InputError(
            f"the function's scale must be positive (standard deviations), got a smallest value "
            f"of {float(scale.min()):g}"
        )
    shapes = {tuple(scale.shape), tuple(mean.shape)}
    if shapes == {(len(mean),), (len(mean), 1)}:
        return scale.reshape(mean.shape)  # (B,) and (B, 1) are the same, and never broadcast
    try:
        return scale.expand_as(mean)
    except RuntimeError:
        raise checks.InputError(
            f"the function's scale must fit its mean of shape {tuple(mean.shape)}", got=scale
        ) from None


def _looks_like(kind: str, scores: Tensor) -> None:  # (B, C)
    """Refuse scores that are plainly of another kind."""
    low, total = float(scores.min()), scores.sum(1)
    match kind:
        case "logits" if not bool(scores.any()):
            fault = "are all zero: every class is equally likely and no attack finds a gradient"
        case "logits" if low >= 0 and bool(((total - 1).abs() < 1e-4).all()):
            fault = "look like probabilities (non-negative, summing to 1): pass kind='probs'"
        case "probs" if low < 0 or bool(((total - 1).abs() > 1e-3).any()):
            fault = (
                f"must be non-negative and sum to 1, got values from {low:g} and sums from "
                f"{float(total.min()):g} to {float(total.max()):g}: pass kind='logits' or "
                f"kind='log_probs'"
            )
        case "log_probs" if float(scores.max()) > 1e-4 or bool(
            (scores.logsumexp(1).abs() > 1e-3).any()
        ):
            fault = (
                f"must be <= 0 with logsumexp 0, got a largest value of {float(scores.max()):g}: "
                f"pass kind='probs' for probabilities, kind='logits' for scores"
            )
        case _:
            return
    raise checks.InputError(f"the function's {kind} {fault}")


def from_function(
    function: Callable[[Any], Any], kind: str, *, scale: float | None = None, numpy: bool = False
) -> FunctionPredictor:
    """A function of a batch as a Predictor; `kind` says what it returns.

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
    checks.instance("net", net, nn.Module, "a torch.nn.Module")
    for name, layer in net.named_modules():
        differs = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
        if layer.training and isinstance(layer, differs):
            raise checks.InputError(
                f"net must be in evaluation mode, got layer {name!r}: {layer} in training mode; "
                f"call net.eval()"
            )
    return FunctionPredictor(net, kind, scale)


def _tensor(output: Any, like: Tensor) -> Tensor:
    if isinstance(output, Tensor):
        return output
    try:
        return torch.as_tensor(np.asarray(output), dtype=like.dtype, device=like.device)
    except (TypeError, ValueError, RuntimeError):
        raise checks.InputTypeError(
            f"function must give one tensor or array, got {checks.outlined(output)}; pick the part "
            f"that is meant, as from_function(lambda x: net(x)[0], kind) does"
        ) from None


def _normal(mean: Tensor, scale: Tensor) -> Distribution:
    if mean.ndim == 2 and mean.shape[1] == 1:
        mean, scale = mean.squeeze(1), scale.squeeze(1)
    return gaussian_prediction(mean, scale, 1 if mean.ndim == 1 else mean.shape[1])

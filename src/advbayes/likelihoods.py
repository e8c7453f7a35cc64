"""p(y | network output): likelihoods, and the predictive mixtures over theta (section 3.1).

A likelihood turns a network's output into a `Distribution` over `y`. Some own a few numbers of
theta themselves (a learned scale); those are the last coordinates of theta and reach the likelihood
as `extra`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, Independent, Normal, constraints
from torch.nn import functional

from advbayes import checks
from advbayes.seeds import normal_like

if TYPE_CHECKING:
    from typing_extensions import TypeIs

LOG_TWO_PI = math.log(2.0 * math.pi)


class Likelihood(Protocol):
    """Network output -> Distribution over y, and its log-density without building it."""

    def num_extra(self) -> int: ...  # its coordinates of theta

    def initial_extra(self) -> list[float]: ...  # where they start

    def __call__(
        self,
        output: Tensor,  # (*, B, O)
        extra: Tensor,  # (*, num_extra)
    ) -> Distribution: ...  # batch shape (*, B)

    def log_prob(
        self,
        output: Tensor,  # (B, O)
        y: Tensor,  # (B,) or (B, D)
        extra: Tensor,  # (num_extra,)
    ) -> Tensor: ...  # (B,)

    def check_target(
        self,
        output: Tensor,  # (B, O)
        y: Tensor,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Categorical:
    """Classes: the network's outputs are logits.

    >>> Categorical()(torch.zeros(2, 4), torch.empty(0)).probs
    tensor([[0.2500, 0.2500, 0.2500, 0.2500],
            [0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def num_extra(self) -> int:
        return 0

    def initial_extra(self) -> list[float]:
        return []

    def __call__(self, output: Tensor, extra: Tensor) -> CategoricalDistribution:
        return CategoricalDistribution(logits=output, validate_args=False)

    def log_prob(self, output: Tensor, y: Tensor, extra: Tensor) -> Tensor:
        return -functional.cross_entropy(output, y, reduction="none")

    def check_target(self, output: Tensor, y: Tensor) -> Tensor:
        """Class indices of shape (B,), as int64."""
        if output.ndim != 2 or output.shape[1] < 2:
            raise checks.InputError(
                "net must give logits of shape (B, C) with C >= 2 for Categorical", got=output
            )
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise checks.InputTypeError("y must hold class indices (integers)", got=y)
        if y.ndim != 1:
            raise checks.InputError("y must have shape (B,) for Categorical", got=y)
        num_classes = output.shape[1]
        if y.numel() and (int(y.min()) < 0 or int(y.max()) >= num_classes):
            raise checks.InputError(
                f"y must hold class indices in [0, {num_classes - 1}] (the net has {num_classes} "
                f"outputs), got values from {int(y.min())} to {int(y.max())}"
            )
        return y.long()


def predicts_classes(prediction: Distribution) -> TypeIs[CategoricalDistribution]:
    """Whether a prediction is over classes; if not, it has a mean and a variance."""
    return isinstance(prediction, CategoricalDistribution)


def gaussian_log_density(value: Tensor, mean: Tensor, scale: Tensor | float) -> Tensor:
    """ln N(value; mean, scale^2) = -0.5 ((value - mean) / scale)^2 - ln scale - 0.5 ln 2 pi."""
    log_scale = scale.log() if isinstance(scale, Tensor) else math.log(scale)
    return -0.5 * ((value - mean) / scale).square() - (log_scale + 0.5 * LOG_TWO_PI)


def targets_like(prediction: Tensor | Distribution, y: Tensor) -> Tensor:
    """`y` in the shape of a prediction or its mean: (B, 1) is (B,), and nothing is ever broadcast.

    >>> targets_like(torch.zeros(2), torch.ones(2, 1))
    tensor([1., 1.])
    """
    if isinstance(prediction, Tensor):
        shape = prediction.shape
    else:
        shape = prediction.batch_shape + prediction.event_shape
    if y.shape == shape:
        return y
    if y.shape == (*shape, 1) or (*y.shape, 1) == shape:
        return y.reshape(shape)
    raise checks.InputError(f"y must have the prediction's shape {tuple(shape)}", got=y)


def _outputs(output: Tensor) -> Tensor:
    """(*, B, 1) -> (*, B); (*, B, D) stays."""
    return output.squeeze(-1) if output.shape[-1] == 1 else output


class _GaussianPrediction(Normal):
    """One output: a Normal of batch shape (*, B) that takes (B, 1) and never broadcasts."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = loc, scale  # of one shape: nothing to broadcast
        Distribution.__init__(self, loc.shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        return gaussian_log_density(targets_like(self.loc, value), self.loc, self.scale)

    def cdf(self, value: Tensor) -> Tensor:
        level: Tensor = super().cdf(targets_like(self.loc, value))  # type: ignore[no-untyped-call]
        return level


class _GaussianVector(Independent):  # type: ignore[type-arg]
    """Several outputs: event shape (D,), and nothing broadcast either."""

    def log_prob(self, value: Tensor) -> Tensor:
        density: Tensor = super().log_prob(targets_like(self.mean, value))  # type: ignore[no-untyped-call]
        return density


def gaussian_prediction(mean: Tensor, scale: Tensor, num_outputs: int) -> Distribution:
    """N(mean, scale^2) over y of shape (B,) or (B, D); (B, 1) is taken for (B,)."""
    if num_outputs == 1:
        return _GaussianPrediction(mean, scale)
    return _GaussianVector(Normal(mean, scale, validate_args=False), 1, validate_args=False)


def _check_regression(mean: Tensor, y: Tensor) -> Tensor:
    if not y.is_floating_point():
        raise checks.InputTypeError("y must be floating-point for a Gaussian likelihood", got=y)
    y = targets_like(mean, y)
    if y.dtype != mean.dtype:
        raise checks.InputTypeError(f"y must have the model's dtype {mean.dtype}", got=y)
    return y


def _check_positive(name: str, value: float | tuple[float, ...]) -> tuple[float, ...]:
    """One positive number, or several."""
    each = value if isinstance(value, tuple) else (value,)
    return tuple(checks.number(name, number, low=0, open_low=True) for number in each)


def _in_units(scale: Tensor, unit: float | tuple[float, ...]) -> Tensor:  # (*, D)
    """Scales in units of `unit`, in those of y."""
    if unit == 1:
        return scale
    return scale * torch.tensor(unit, dtype=scale.dtype, device=scale.device)


class _GaussianLikelihood(ABC):
    """N(y; mean, scale^2), where a subclass says what an output's mean and scale are."""

    @abstractmethod
    def _moments(
        self, output: Tensor, extra: Tensor
    ) -> tuple[Tensor, Tensor | float]: ...  # (*, B) for one output, else (*, B, D)

    def num_extra(self) -> int:
        return 0

    def initial_extra(self) -> list[float]:
        return []

    def __call__(self, output: Tensor, extra: Tensor) -> Distribution:
        mean, scale = self._moments(output, extra)
        scale = torch.as_tensor(scale, dtype=output.dtype, device=output.device).expand_as(mean)
        return gaussian_prediction(mean, scale, mean.shape[-1] if mean.ndim == output.ndim else 1)

    def log_prob(self, output: Tensor, y: Tensor, extra: Tensor) -> Tensor:
        mean, scale = self._moments(output, extra)
        density = gaussian_log_density(targets_like(mean, y), mean, scale)
        return density if mean.ndim == 1 else density.sum(-1)


@dataclass(frozen=True)
class Gaussian(_GaussianLikelihood):
    """Regression, N(y; output, scale^2): `scale` fixed, or learned with theta (ln(scale / unit),
    one per output, last in theta).

    With several outputs, `scale` and `unit` are one number or one per output, and learning needs
    `num_outputs`. The prior of a learned scale is around `unit`.

    >>> Gaussian(0.5)(torch.zeros(3, 1), torch.empty(0)).variance
    tensor([0.2500, 0.2500, 0.2500])
    """

    scale: float | tuple[float, ...] = 1.0
    learned: bool = False
    num_outputs: int = 1
    unit: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        checks.count("num_outputs", self.num_outputs)
        for name, value in (("scale", self.scale), ("unit", self.unit)):
            if len(_check_positive(name, value)) not in (1, self.num_outputs):
                raise checks.InputError(
                    f"{name} must be one number or {self.num_outputs} (num_outputs), got {value}"
                )

    def _of_each(self, value: float | tuple[float, ...]) -> tuple[float, ...]:
        values = value if isinstance(value, tuple) else (value,)
        return values * self.num_outputs if len(values) == 1 else values

    def num_extra(self) -> int:
        return self.num_outputs if self.learned else 0

    def initial_extra(self) -> list[float]:
        if not self.learned:
            return []
        scales, units = self._of_each(self.scale), self._of_each(self.unit)
        return [math.log(scale / unit) for scale, unit in zip(scales, units, strict=True)]

    def _moments(self, output: Tensor, extra: Tensor) -> tuple[Tensor, Tensor | float]:
        mean = _outputs(output)
        if self.learned:
            scale = _in_units(extra.exp(), self.unit)  # (*, D)
            return mean, scale if self.num_outputs == 1 else scale.unsqueeze(-2)
        if isinstance(self.scale, tuple):
            return mean, torch.as_tensor(self.scale, dtype=output.dtype, device=output.device)
        return mean, self.scale

    def check_target(self, output: Tensor, y: Tensor) -> Tensor:
        """Targets of shape (B,) for one output, (B, D) for D."""
        one_scale_for_all = not self.learned and not isinstance(self.scale, tuple)
        if output.ndim != 2 or (output.shape[1] != self.num_outputs and not one_scale_for_all):
            raise checks.InputError(
                f"net must give an output of shape (B, {self.num_outputs}) for {self}", got=output
            )
        return _check_regression(_outputs(output), y)


@dataclass(frozen=True)
class HeteroscedasticGaussian(_GaussianLikelihood):
    """Regression with a scale for every input: the network gives D means, then D log-scales.

    The log-scales, and the least scale, are in units of `unit`: one number, or one per mean.

    >>> HeteroscedasticGaussian()(torch.zeros(3, 2), torch.empty(0)).stddev
    tensor([1., 1., 1.])
    """

    min_scale: float = 1e-3
    unit: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        checks.number("min_scale", self.min_scale, low=0)
        _check_positive("unit", self.unit)

    def _moments(self, output: Tensor, extra: Tensor) -> tuple[Tensor, Tensor | float]:
        if output.shape[-1] % 2:
            raise checks.InputError(
                "net must give D means and D log-scales (an even number of outputs)", got=output
            )
        mean, log_scale = output.chunk(2, dim=-1)
        if isinstance(self.unit, tuple) and len(self.unit) not in (1, mean.shape[-1]):
            raise checks.InputError(
                f"unit must be one number or {mean.shape[-1]} (means), got {self.unit}"
            )
        # The clamp keeps exp finite; it is far outside what data of unit scale call for.
        scale = log_scale.clamp(-15.0, 15.0).exp().clamp_min(self.min_scale)
        return _outputs(mean), _outputs(_in_units(scale, self.unit))

    def check_target(self, output: Tensor, y: Tensor) -> Tensor:
        """Targets of shape (B,) for one mean, (B, D) for D."""
        if output.ndim != 2:
            raise checks.InputError("net must give an output of shape (B, 2 D)", got=output)
        return _check_regression(self._moments(output, output[:0])[0], y)


class GaussianPredictive(Distribution):
    """A regression predictive that is a mixture of Gaussians, whatever it is computed from.

    `entropy()` is that of the moment-matched Gaussian, an upper bound (exact for one component)
    with a gradient in the means; `monte_carlo_entropy` is unbiased and noisy.
    """

    arg_constraints = {}  # noqa: RUF012 (torch's own protocol)
    support = constraints.real
    has_rsample = False

    @property
    def mode(self) -> Tensor:
        """The mean: what an attacker without a label takes for y."""
        return self.mean

    def entropy(self) -> Tensor:
        """Of the Gaussian with this mean and (per-output) variance: 0.5 ln(2 pi e Var), summed."""
        per_output = 0.5 * self.variance.log() + 0.5 + 0.5 * LOG_TWO_PI
        return per_output.sum(-1) if self.event_shape else per_output

    def monte_carlo_entropy(
        self, num: int = 1000, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """-mean log p over `num` draws."""
        draws = self.sample(torch.Size([num]), generator=generator)
        return -torch.stack([self.log_prob(draw) for draw in draws]).mean(0)

    @abstractmethod
    def sample(
        self, sample_shape: Any = (), *, generator: torch.Generator | None = None
    ) -> Tensor: ...


class GaussianMixture(GaussianPredictive):
    """sum_s w_s N(means_s, scales_s^2), components on axis 0; D outputs share their component.

    >>> two = GaussianMixture(torch.tensor([[-1.0], [1.0]]), torch.full((2, 1), 0.5))
    >>> two.mean, two.variance
    (tensor([0.]), tensor([1.2500]))
    """

    def __init__(
        self,
        means: Tensor,  # (S, B) or (S, B, D)
        scales: Tensor,  # as means
        log_weights: Tensor | None = None,  # (S,) or (S, B); absent: equal
    ) -> None:
        if means.shape != scales.shape or means.ndim not in (2, 3):
            raise checks.InputError(
                "means and scales must share a shape (S, B) or (S, B, D), "
                f"got {checks.describe(means)} and {checks.describe(scales)}"
            )
        self.means = means
        self.scales = scales
        num, batch = means.shape[:2]
        if log_weights is None:
            self.log_weights = means.new_full((num, batch), -math.log(num))
        else:
            columns = log_weights if log_weights.ndim == 2 else log_weights.unsqueeze(-1)
            self.log_weights = columns.expand(num, batch).log_softmax(0)
        super().__init__(torch.Size([batch]), means.shape[2:], validate_args=False)

    def _weights(self) -> Tensor:
        weights = self.log_weights.exp()
        return weights if self.means.ndim == 2 else weights.unsqueeze(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        density = gaussian_log_density(targets_like(self.means[0], value), self.means, self.scales)
        if self.means.ndim == 3:
            density = density.sum(-1)
        return torch.logsumexp(self.log_weights + density, dim=0)

    @property
    def mean(self) -> Tensor:
        return (self._weights() * self.means).sum(0)

    @property
    def variance(self) -> Tensor:
        """E[s^2] + Var[m]."""
        weights, mean = self._weights(), self.mean
        return (weights * (self.scales.square() + (self.means - mean).square())).sum(0)

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value) for one output."""
        if self.means.ndim == 3:
            raise checks.InputError("cdf is defined for one output, got several")
        z = (targets_like(self.means[0], value) - self.means) / (self.scales * math.sqrt(2.0))
        return (self.log_weights.exp() * 0.5 * (1.0 + torch.erf(z))).sum(0)

    def icdf(self, value: Tensor) -> Tensor:
        """Quantiles for one output, by bisection in float64: a float32 cdf is rounding in its
        tails."""
        if self.means.dtype != torch.float64:
            parts = (self.means, self.scales, self.log_weights)
            wide = GaussianMixture(*(part.double() for part in parts))
            return wide.icdf(value).to(self.means.dtype)
        level = torch.as_tensor(value, dtype=self.means.dtype, device=self.means.device).expand(
            self.batch_shape
        )
        reach = 40.0 * self.scales.amax(0)
        low, high = self.means.amin(0) - reach, self.means.amax(0) + reach
        for _ in range(100):
            middle = 0.5 * (low + high)
            above = self.cdf(middle) >= level
            high, low = torch.where(above, middle, high), torch.where(above, low, middle)
        return 0.5 * (low + high)

    def sample(self, sample_shape: Any = (), *, generator: torch.Generator | None = None) -> Tensor:
        shape = torch.Size(sample_shape)
        with torch.no_grad():
            num = max(1, math.prod(shape))
            pick = torch.multinomial(
                self.log_weights.exp().T, num, replacement=True, generator=generator
            ).T  # (num, B)
            rows = torch.arange(self.means.shape[1], device=self.means.device)
            means, scales = self.means[pick, rows], self.scales[pick, rows]
            noise = normal_like(means, generator)
            return (means + scales * noise).reshape(shape + self.batch_shape + self.event_shape)


def mix(each: Distribution) -> Distribution:  # batch shape (S, B) -> (B,)
    """The predictive 1/S sum_s p_s: probabilities are averaged, never logits.

    >>> each = CategoricalDistribution(logits=torch.tensor([[[9.0, 0.0]], [[0.0, 9.0]]]))
    >>> mix(each).probs
    tensor([[0.5000, 0.5000]])
    """
    if predicts_classes(each):
        log_probs = each.logits  # (S, B, C), normalised by torch
        mixed = torch.logsumexp(log_probs, dim=0) - math.log(log_probs.shape[0])
        return CategoricalDistribution(logits=mixed, validate_args=False)
    normal = each.base_dist if isinstance(each, Independent) else each
    return GaussianMixture(normal.mean, normal.stddev)

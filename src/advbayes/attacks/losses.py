"""What the attacker wants large: one value per example, and when an example is broken (SM-5).

A loss is a function `(prediction, y) -> (B,)`. By default an example is broken when its class is
wrong; a loss with a method `succeeded` says otherwise, and a loss that holds one entry per example
has a method `rows` that picks some of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution  # noqa: F401 (for the examples)

from advbayes import checks
from advbayes.likelihoods import predicts_classes, targets_like
from advbayes.types import Loss

R = TypeVar("R", bound="_Rowwise")


@runtime_checkable
class HasSuccess(Protocol):
    """A loss that knows when an example is broken."""

    def succeeded(self, prediction: Distribution, y: Tensor) -> Tensor: ...  # (B,) bool


@runtime_checkable
class HasRows(Protocol):
    """A loss that holds something for each example."""

    def rows(self, index: Tensor | slice) -> Loss: ...


def succeeded(prediction: Distribution, y: Tensor) -> Tensor:
    """Whether the class is wrong, (B,) bool; regression has no such notion and gives False.

    >>> succeeded(Categorical(logits=torch.tensor([[0.0, 1.0]])), torch.tensor([0]))
    tensor([True])
    """
    if predicts_classes(prediction):
        return prediction.logits.argmax(-1) != y
    return never(prediction, y)


def never(prediction: Distribution, y: Tensor) -> Tensor:
    """No example counts as broken."""
    return torch.zeros(prediction.batch_shape[:1], dtype=torch.bool, device=y.device)


def success(loss: Loss, prediction: Distribution, y: Tensor) -> Tensor:
    """Whether an attack on `loss` may call these examples broken: by the loss, or a wrong class.

    >>> success(nll, Categorical(logits=torch.tensor([[0.0, 1.0]])), torch.tensor([0]))
    tensor([True])
    """
    broken: Tensor = getattr(loss, "succeeded", succeeded)(prediction, y)
    return broken


def for_rows(loss: Loss, index: Tensor | slice) -> Loss:
    """The loss of some of the examples, when others have left the batch.

    >>> for_rows(PerExample((nll, margin), torch.tensor([0, 1])), torch.tensor([1])).index
    tensor([1])
    """
    rows = getattr(loss, "rows", None)
    return loss if rows is None else rows(index)


def num_rows(loss: Loss) -> int | None:
    """For how many examples a loss holds something; None where it is one for all or silent."""
    num: int | None = getattr(loss, "num_rows", None)
    return num


class _Rowwise:
    """A loss, a dataclass, whose tensors have an entry for each example, as may its own losses."""

    def _by_row(self) -> dict[str, Any]:
        """What may have an entry for each example, by the name of its field."""
        return vars(self)

    @property
    def num_rows(self) -> int | None:
        sizes = (
            len(value) if isinstance(value, Tensor) else num_rows(value)
            for value in self._by_row().values()
        )
        return next((size for size in sizes if size is not None), None)

    def rows(self: R, index: Tensor | slice) -> R:
        return replace(self, **{name: _cut(value, index) for name, value in self._by_row().items()})  # type: ignore[type-var]


def _cut(value: Any, index: Tensor | slice) -> Any:
    match value:
        case Tensor():
            return value[index]
        case tuple():
            return tuple(for_rows(loss, index) for loss in value)
    return for_rows(value, index)


def mode(prediction: Distribution) -> Tensor:
    """What the attacker without a label takes for y: the likeliest class, or the mean.

    >>> mode(Categorical(logits=torch.tensor([[0.0, 1.0]])))
    tensor([1])
    """
    if predicts_classes(prediction):
        return prediction.logits.argmax(-1)
    return prediction.mean


# --- Away from y --------------------------------------------------------------------------------


def nll(prediction: Distribution, y: Tensor) -> Tensor:
    """-log p(y): through a predictive the loss of the log-mean-exp over theta, not of mean logits.

    (B, 1) targets meet (B,) predictions without broadcasting.

    >>> nll(Categorical(logits=torch.zeros(1, 2)), torch.tensor([0]))
    tensor([0.6931])
    """
    if predicts_classes(prediction):
        density: Tensor = prediction.log_prob(y)  # type: ignore[no-untyped-call]
        return -density
    return _per_example(-prediction.log_prob(targets_like(prediction, y)))


def margin(prediction: Distribution, y: Tensor) -> Tensor:
    """max_{c != y} log p(c) - log p(y) (Carlini and Wagner): positive when the class is wrong.

    >>> margin(Categorical(logits=torch.tensor([[2.0, 0.0, 1.0]])), torch.tensor([0]))
    tensor([-1.])
    """
    logits = _logits(prediction, "margin")
    right = logits.gather(1, y.unsqueeze(1)).squeeze(1)
    others = logits.scatter(1, y.unsqueeze(1), float("-inf"))
    return others.amax(1) - right


def dlr(prediction: Distribution, y: Tensor) -> Tensor:
    """The margin over the spread of the three largest logits (Croce and Hein), blind to their
    scale; for two classes the margin.

    >>> dlr(Categorical(logits=torch.tensor([[4.0, 0.0, 2.0]])), torch.tensor([0]))
    tensor([-0.5000])
    """
    logits = _logits(prediction, "dlr")
    if logits.shape[1] < 3:
        return margin(prediction, y)
    top = logits.topk(3, dim=1).values
    spread = top[:, 0] - top[:, 2]
    # infinite where p(third) = 0
    return margin(prediction, y) / spread.clamp(torch.finfo(spread.dtype).eps, 1e12)


def squared_error(prediction: Distribution, y: Tensor) -> Tensor:
    """|E[y] - y|^2, summed over outputs; (B, 1) targets meet (B,) means without broadcasting.

    >>> squared_error(torch.distributions.Normal(torch.zeros(2), 1.0), torch.tensor([[1.0], [2.0]]))
    tensor([1., 4.])
    """
    mean = _moment(prediction, "squared_error").mean
    return _per_example((mean - targets_like(mean, y)).square())


# --- The predictive itself ----------------------------------------------------------------------


def entropy(prediction: Distribution, y: Tensor) -> Tensor:
    """The predictive's entropy: the attacker who wants doubt.

    >>> entropy(Categorical(logits=torch.zeros(1, 2)), torch.tensor([0]))
    tensor([0.6931])
    """
    return _per_example(prediction.entropy())


def certainty(prediction: Distribution, y: Tensor) -> Tensor:
    """Minus the entropy: the attacker who wants misplaced trust.

    >>> certainty(Categorical(logits=torch.zeros(1, 2)), torch.tensor([0]))
    tensor([-0.6931])
    """
    return -entropy(prediction, y)


def raise_mean(prediction: Distribution, y: Tensor) -> Tensor:
    """E[y], summed over outputs: raises the prediction, whatever y is; `lower_mean` lowers it.

    >>> raise_mean(torch.distributions.Normal(torch.tensor([2.0]), 1.0), torch.zeros(1))
    tensor([2.])
    """
    return _per_example(_moment(prediction, "raise_mean").mean)


def lower_mean(prediction: Distribution, y: Tensor) -> Tensor:
    """-E[y], summed over outputs.

    >>> lower_mean(torch.distributions.Normal(torch.tensor([2.0]), 1.0), torch.zeros(1))
    tensor([-2.])
    """
    return -_per_example(_moment(prediction, "lower_mean").mean)


@dataclass(frozen=True, eq=False)
class MeanAlong(_Rowwise):
    """u . E[y], the mean of several outputs along a direction of each example's own.

    >>> two = torch.distributions.Normal(torch.tensor([[2.0, 3.0]]), 1.0)
    >>> MeanAlong(torch.tensor([[0.5, -1.0]]))(two, torch.zeros(1, 2))
    tensor([-2.])
    """

    directions: Tensor  # (B, D)

    def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
        mean = _moment(prediction, "MeanAlong").mean
        return (mean.reshape(len(mean), -1) * self.directions.to(mean)).sum(1)


@dataclass(frozen=True)
class MeanOf:
    """sign E[y_k] of one output k; of a single output, `raise_mean` or `lower_mean`.

    >>> MeanOf(0, -1)(torch.distributions.Normal(torch.tensor([2.0]), 1.0), torch.zeros(1))
    tensor([-2.])
    """

    output: int
    sign: int = 1

    def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
        mean = _moment(prediction, "MeanOf").mean
        return self.sign * mean.reshape(len(mean), -1)[:, self.output]


def inflate_variance(prediction: Distribution, y: Tensor) -> Tensor:
    """ln Var[y], summed over outputs: intervals too wide to be of use.

    >>> inflate_variance(torch.distributions.Normal(torch.zeros(1), 1.0), torch.zeros(1))
    tensor([0.])
    """
    return _per_example(_moment(prediction, "inflate_variance").variance.log())


def deflate_variance(prediction: Distribution, y: Tensor) -> Tensor:
    """-ln Var[y], summed over outputs: intervals too narrow to be true.

    >>> deflate_variance(torch.distributions.Normal(torch.zeros(1), 1.0), torch.zeros(1))
    tensor([-0.])
    """
    return -inflate_variance(prediction, y)


@dataclass(frozen=True, eq=False)
class DivergenceFrom(_Rowwise):
    """-KL(target | prediction): how near the predictive comes to one that the attacker wants.

    Classes: `target` holds probabilities, (C,) or (B, C). Regression: `target` and `scale` are the
    wanted mean and standard deviation, each a number or of the prediction's shape, (B,) or (B, D);
    (1, D) is one for all. The prediction counts through its first two moments. Ranked by the loss
    alone.

    >>> wish = DivergenceFrom(torch.tensor([0.5, 0.5]))
    >>> wish(Categorical(logits=torch.zeros(1, 2)), torch.tensor([0])).abs()
    tensor([0.])
    >>> normal = torch.distributions.Normal(torch.tensor([2.0]), 1.0)
    >>> DivergenceFrom(2.0, 1.0)(normal, torch.zeros(1)).abs()
    tensor([0.])
    """

    target: Tensor | float
    scale: Tensor | float | None = None
    succeeded = staticmethod(never)

    def __post_init__(self) -> None:
        for name, value in tuple(vars(self).items()):
            if value is not None and not isinstance(value, Tensor):
                object.__setattr__(self, name, torch.tensor(checks.number(name, value)))
        target = checks.finite("target", torch.as_tensor(self.target))
        if self.scale is None:
            is_whole = (target.sum(-1) - 1).abs() < 1e-4
            if target.ndim not in (1, 2) or not bool((target >= 0).all() & is_whole.all()):
                raise checks.InputError(
                    "target must hold probabilities (non-negative, summing to 1), or be a mean "
                    "with its scale"
                )
        elif not bool((torch.as_tensor(self.scale) > 0).all()):
            raise checks.InputError("scale must be positive", got=self.scale)

    def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
        if self.scale is None:
            logits = _logits(prediction, "DivergenceFrom a target without scale")
            target = self._fitting("target", self.target, logits, logits.shape[1:])
            return (target * logits - torch.xlogy(target, target)).sum(-1)
        moments = _moment(prediction, "DivergenceFrom a target with scale")
        mean, variance = moments.mean, moments.variance
        target, scale = (
            self._fitting(name, value, mean, torch.Size([])) for name, value in vars(self).items()
        )
        ratio = scale.square() / variance
        shift = (mean - target).square() / variance
        return _per_example(0.5 * (1 + ratio.log() - ratio - shift))

    def _fitting(
        self, name: str, value: Tensor | float, like: Tensor, shared: torch.Size
    ) -> Tensor:
        """The value for each example: one for all (of shape `shared`, or one row) or a row each."""
        value = torch.as_tensor(value).to(like)
        if value.ndim == like.ndim + 1 and value.shape[-1] == 1:
            value = value.squeeze(-1)
        if value.shape not in (shared, (1, *like.shape[1:]), like.shape):
            wanted = f"{tuple(shared) or 'a number'} or {tuple(like.shape)}"
            raise checks.InputError(
                f"{name} must be {wanted} for these examples, got shape {tuple(value.shape)}"
            )
        return value.expand_as(like)

    def _by_row(self) -> dict[str, Any]:
        least = 2 if self.scale is None else 1
        both = ((k, torch.as_tensor(v)) for k, v in vars(self).items() if v is not None)
        return {name: value for name, value in both if value.ndim >= least and len(value) > 1}


# --- Combinators: a loss in, a loss out ---------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PerExample(_Rowwise):
    """A loss for each example, `losses[index[b]]`: one gradient pass serves them all.

    >>> both = PerExample((nll, margin), torch.tensor([0, 1]))
    >>> both(Categorical(logits=torch.zeros(2, 2)), torch.tensor([0, 1]))
    tensor([0.6931, 0.0000])
    """

    losses: tuple[Loss, ...]
    index: Tensor  # (B,)

    def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
        values = torch.stack([loss(prediction, y) for loss in self.losses], dim=1)  # (B, losses)
        return values.gather(1, self.index.unsqueeze(1)).squeeze(1)

    def succeeded(self, prediction: Distribution, y: Tensor) -> Tensor:
        if all(isinstance(loss, FunctionType) for loss in self.losses):
            return succeeded(prediction, y)
        each = torch.stack([success(loss, prediction, y) for loss in self.losses], dim=1)
        return each.gather(1, self.index.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class Toward(_Rowwise):
    """Targeted: the loss is minimised, and an example is broken once its class is y.

    >>> wish = Toward(nll)
    >>> wish.succeeded(Categorical(logits=torch.tensor([[0.0, 1.0]])), torch.tensor([1]))
    tensor([True])
    """

    loss: Loss = nll

    def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
        return -self.loss(prediction, y)

    def succeeded(self, prediction: Distribution, y: Tensor) -> Tensor:
        if predicts_classes(prediction):
            return prediction.logits.argmax(-1) == y
        return never(prediction, y)


@dataclass(frozen=True)
class ByLoss(_Rowwise):
    """The same loss, but no example is ever broken: iterates are ranked by the loss alone.

    >>> wrong = Categorical(logits=torch.tensor([[0.0, 1.0]]))
    >>> ByLoss(certainty).succeeded(wrong, torch.tensor([0]))
    tensor([False])
    """

    loss: Loss
    succeeded = staticmethod(never)

    def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
        return self.loss(prediction, y)


@dataclass(frozen=True)
class Exceeding(_Rowwise):
    """loss - threshold, broken where positive: gives regression a notion of success.

    >>> far = Exceeding(squared_error, 1.0)
    >>> far(torch.distributions.Normal(torch.zeros(1), 1.0), torch.tensor([2.0]))
    tensor([3.])
    """

    loss: Loss
    threshold: float

    def __post_init__(self) -> None:
        checks.number("threshold", self.threshold)

    def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
        return self.loss(prediction, y) - self.threshold

    def succeeded(self, prediction: Distribution, y: Tensor) -> Tensor:
        return self(prediction, y) > 0


@dataclass(frozen=True, eq=False)
class MarginTo(_Rowwise):
    """log p(c) - log p(y) for a wrong class c of each example; exact ascent on linear models.

    >>> three = Categorical(logits=torch.tensor([[2.0, 0.0, 1.0]]))
    >>> MarginTo(torch.tensor([1]))(three, torch.tensor([0]))
    tensor([-2.])
    """

    classes: Tensor  # (B,)

    def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
        pair = _logits(prediction, "MarginTo").gather(1, torch.stack([self.classes, y], dim=1))
        return pair[:, 0] - pair[:, 1]


def margins_to_wrong_classes(prediction: Distribution, y: Tensor, num: int) -> list[MarginTo]:
    """Margins to the `num` likeliest wrong classes (no more than there are), likeliest first.

    >>> four = Categorical(logits=torch.tensor([[3.0, 1.0, 0.0, 2.0]]))
    >>> [int(loss.classes) for loss in margins_to_wrong_classes(four, torch.tensor([3]), 2)]
    [0, 1]
    """
    others = _logits(prediction, "MarginTo").scatter(1, y.unsqueeze(1), float("-inf"))
    order = others.argsort(dim=1, descending=True)
    return [MarginTo(order[:, k]) for k in range(min(num, order.shape[1] - 1))]


def _logits(prediction: Distribution, name: str) -> Tensor:
    if not predicts_classes(prediction):
        raise checks.InputTypeError(
            f"{name} is a loss for classification, got a prediction of type "
            f"{type(prediction).__name__}"
        )
    return prediction.logits


def _moment(prediction: Distribution, name: str) -> Distribution:
    if predicts_classes(prediction):
        raise checks.InputTypeError(
            f"{name} is a loss for regression, got a prediction of type {type(prediction).__name__}"
        )
    return prediction


def _per_example(value: Tensor) -> Tensor:
    return value if value.ndim == 1 else value.flatten(1).sum(1)

"""The data of `fit`: checked before training starts, cut into batches that the step's number alone decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from advbayes import checks
from advbayes.balls import Ball
from advbayes.channels import AttackChannel, Learned, Mixture
from advbayes.model import BayesianModel
from advbayes.seeds import generator_for
from advbayes.types import Channel

Data = tuple[Tensor | np.ndarray[Any, Any], Tensor | np.ndarray[Any, Any]] | DataLoader[Any]


class Batch(NamedTuple):
    """Examples, or all of the data with the rows that are meant: a compiled step gathers them itself.

    >>> Batch(torch.arange(6).view(3, 2), torch.arange(3), torch.tensor([2])).gathered().x
    tensor([[4, 5]])
    """

    x: Tensor  # (B, *event), or (N, *event) with rows
    y: Tensor  # (B, ...), or (N, ...)
    rows: Tensor | None = None  # (B,)

    def gathered(self) -> Batch:
        if self.rows is None:
            return self
        return Batch(self.x.index_select(0, self.rows), self.y.index_select(0, self.rows))


class TensorBatches:
    """Batch `step` of an endless concatenation of shuffled passes: all batches are full, all examples are used alike.

    >>> TensorBatches(torch.zeros(4, 2), torch.zeros(4), batch_size=3, seed=0)(1).rows.shape
    torch.Size([3])
    """

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, seed: int) -> None:
        self.x, self.y, self.seed = x, y, seed
        self.num_data = len(x)
        self.batch_size = min(batch_size, self.num_data)
        self.steps_per_epoch = self.num_data / self.batch_size
        self._orders: dict[int, Tensor] = {}

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            self._orders = {k: order for k, order in self._orders.items() if k == epoch - 1}
            order = torch.randperm(self.num_data, generator=generator_for(self.seed, "order", epoch))
            self._orders[epoch] = order.to(self.x.device)
        return self._orders[epoch]

    def __call__(self, step: int) -> Batch:
        epoch, offset = divmod(step * self.batch_size, self.num_data)
        left = self.num_data - offset
        rows = self._order(epoch).narrow(0, offset, min(left, self.batch_size))
        if left < self.batch_size:
            rows = torch.cat([rows, self._order(epoch + 1)[: self.batch_size - left]])
        return Batch(self.x, self.y, rows)


class LoaderBatches:
    """A DataLoader's own batches, pass after pass, in its own order.

    >>> loader = DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.zeros(4)), batch_size=2)
    >>> LoaderBatches(loader, 4, 2.0, lambda x, y: (x, y))(0).x.shape
    torch.Size([2, 2])
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        num_data: int,
        steps_per_epoch: float,
        check: Callable[[Any, Any], tuple[Tensor, Tensor]],
    ) -> None:
        self.loader, self.num_data, self.steps_per_epoch, self.check = loader, num_data, steps_per_epoch, check
        self._iterator: Iterator[Any] = iter(())

    def __call__(self, step: int) -> Batch:
        found = next(self._iterator, None)
        if found is None:
            self._iterator = iter(self.loader)
            found = next(self._iterator, None)
        if found is None:
            raise ValueError("data must hold at least one example, got an empty DataLoader")
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise TypeError(f"data must be a DataLoader of pairs (x, y), got batches like {checks.describe(found)}")
        return Batch(*self.check(*found))


Batches = TensorBatches | LoaderBatches


def batches_of(
    model: BayesianModel,
    channel: Channel,
    data: Data,
    batch_size: int,
    seed: int,
    num_data: int | None = None,  # for a DataLoader over an IterableDataset, which does not know it
) -> Batches:
    """The data's batches; what is wrong with the data is said here.

    >>> from advbayes import BayesianModel, Categorical, Noise
    >>> model = BayesianModel(torch.nn.Linear(2, 2), Categorical())
    >>> batches_of(model, Noise(), (torch.zeros(6, 2), torch.zeros(6, dtype=torch.long)), 4, seed=0).steps_per_epoch
    1.5
    """
    check = _Check(model, channel)
    if isinstance(data, DataLoader):
        return LoaderBatches(data, *_length(data, num_data), check.of_loader)
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise TypeError(f"data must be a pair (x, y) or a DataLoader, got {checks.describe(data)}")
    return TensorBatches(*check(*data), checks.count("batch_size", batch_size), seed)


def _length(loader: DataLoader[Any], num_data: int | None) -> tuple[int, float]:
    """Examples and steps of one pass."""
    try:
        found, steps = len(loader.dataset), float(len(loader))  # type: ignore[arg-type]
    except TypeError:  # an IterableDataset
        if num_data is None or loader.batch_size is None:
            raise ValueError(
                "data must have a length, got a DataLoader over an iterable data set; give the number of its examples by "
                "objective=ChannelELBO(num_data) and let the DataLoader make the batches (batch_size=...)"
            ) from None
        return num_data, num_data / loader.batch_size
    if found == 0 or steps == 0:
        raise ValueError("data must hold at least one example, got an empty DataLoader")
    return found, steps


class _Check:
    """x and y in the model's dtype and device, refused when of the wrong shape, not finite or out of range."""

    def __init__(self, model: BayesianModel, channel: Channel) -> None:
        self.model, self.channel = model, channel
        self._outputs: dict[torch.Size, Tensor] = {}  # of the net at one input, by its shape

    def of_loader(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        device = self.model.device
        return self(*(value.to(device) if isinstance(value, Tensor) else value for value in (x, y)))

    def __call__(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        model = self.model
        if isinstance(x, np.ndarray):  # arrays follow the model; tensors must agree with it
            x = torch.tensor(x, device=model.device, dtype=model.dtype)
        if isinstance(y, np.ndarray):
            y = torch.tensor(y, device=model.device)
            y = y.to(model.dtype) if y.is_floating_point() else y
        for name, value in (("x", x), ("y", y)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} must be a tensor or an array, got {checks.describe(value)}")
        if not len(x):
            raise ValueError(f"x must hold at least one example, got {checks.describe(x)}")
        model._check_input(x)
        if y.ndim == 0 or len(y) != len(x):
            raise ValueError(f"y must hold one target for each of the {len(x)} examples of x, got {checks.describe(y)}")
        if y.device != x.device:
            raise TypeError(f"y must be on {x.device} as x, got {checks.describe(y)}")
        checks.finite("x", x)
        checks.finite("y", y)
        y = model.likelihood.check_target(self._output(x).expand(len(y), -1), y)
        _check_channel(self.channel, x)
        return x, y

    def _output(self, x: Tensor) -> Tensor:  # (1, O)
        if x.shape[1:] not in self._outputs:
            try:
                with torch.no_grad():
                    output, _ = self.model.output(self.model.initial_theta(), x[:1])
            except (RuntimeError, ValueError, IndexError) as error:
                raise ValueError(f"x must have the shape that net takes, got {checks.describe(x)}: {error}") from error
            if output.ndim != 2 or len(output) != 1:
                raise ValueError(f"net must give one output row for each input, got {checks.describe(output)} for one input")
            self._outputs[x.shape[1:]] = output
        return self._outputs[x.shape[1:]]


def _check_channel(channel: Channel, x: Tensor) -> None:
    """The balls of a channel must fit the data."""
    if isinstance(channel, Mixture):
        for part in channel.channels:
            _check_channel(part, x)
    elif isinstance(channel, AttackChannel):
        ball = getattr(channel.attack, "ball", None)
        if isinstance(ball, Ball):
            ball.check(x)
    elif isinstance(channel, Learned):
        channel.ball.check(x)

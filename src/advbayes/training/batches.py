"""The data of `fit`: checked at first, cut into batches by the step's number alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from advbayes import checks
from advbayes.attacks.parts import ball_of
from advbayes.channels import components
from advbayes.model import BayesianModel
from advbayes.seeds import GlobalStream, generator_for, seed_for
from advbayes.types import Channel

Data = tuple[Tensor | np.ndarray[Any, Any], Tensor | np.ndarray[Any, Any]] | DataLoader[Any]


class Batch(NamedTuple):
    """Examples, or all of the data with the rows meant: a compiled step gathers them itself."""

    x: Tensor  # (B, *event), or (N, *event) with rows
    y: Tensor  # (B, ...), or (N, ...)
    rows: Tensor | None = None  # (B,)
    weight: Tensor | None = None  # (B,), or (N,): how often each example counts; None: once
    share: float = 1.0  # of the batch that these examples are a part of

    @property
    def num(self) -> int:
        return len(self.x if self.rows is None else self.rows)

    def part(self, rows: slice, share: float) -> Batch:
        if self.rows is not None:
            return self._replace(rows=self.rows[rows], share=share)
        weight = None if self.weight is None else self.weight[rows]
        return Batch(self.x[rows], self.y[rows], None, weight, share)

    def gathered(self) -> Batch:
        if self.rows is None:
            return self
        x, y = self.x.index_select(0, self.rows), self.y.index_select(0, self.rows)
        weight = None if self.weight is None else self.weight.index_select(0, self.rows)
        return Batch(x, y, None, weight, self.share)


class TensorBatches:
    """Batch `step` of an endless run of shuffled passes: all full, all examples used alike."""

    def __init__(
        self, x: Tensor, y: Tensor, batch_size: int, seed: int, weight: Tensor | None = None
    ) -> None:
        self.x, self.y, self.seed, self.weight = x, y, seed, weight
        self.num_data = len(x)
        self.batch_size = min(batch_size, self.num_data)
        self.steps_per_epoch = self.num_data / self.batch_size
        self._orders: dict[int, Tensor] = {}

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            self._orders = {k: order for k, order in self._orders.items() if k == epoch - 1}
            order = torch.randperm(
                self.num_data, generator=generator_for(self.seed, "order", epoch), device="cpu"
            )
            self._orders[epoch] = order.to(self.x.device)
        return self._orders[epoch]

    def __call__(self, step: int) -> Batch:
        epoch, offset = divmod(step * self.batch_size, self.num_data)
        left = self.num_data - offset
        rows = self._order(epoch).narrow(0, offset, min(left, self.batch_size))
        if left < self.batch_size:
            rows = torch.cat([rows, self._order(epoch + 1)[: self.batch_size - left]])
        return Batch(self.x, self.y, rows, self.weight)


class LoaderBatches:
    """A DataLoader's own batches, pass after pass.

    The global generator, from which a DataLoader without one of its own shuffles and a data set
    augments, is a stream keyed by the seed and the step at which the pass begins.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        num_data: int,
        steps_per_epoch: float,
        check: Callable[[Any, Any], tuple[Tensor, Tensor]],
        seed: int,
    ) -> None:
        self.loader, self.num_data, self.steps_per_epoch = loader, num_data, steps_per_epoch
        self.check, self.seed = check, seed
        self._stream = GlobalStream(seed)
        self._iterator: Iterator[Any] | None = None
        self._num_seen = 0  # in this pass

    def __call__(self, step: int) -> Batch:
        batch = self._next()
        if batch is None:
            self._count(0, is_whole=True)
            self._stream, self._num_seen = GlobalStream(seed_for(self.seed, "loader", step)), 0
            with self._stream:
                self._iterator = iter(self.loader)
            batch = self._next()
        if batch is None:
            raise checks.InputError("data must hold at least one example, got an empty DataLoader")
        match batch:
            case [x, y]:
                x, y = self.check(x, y)
                self._count(len(x), is_whole=False)
                return Batch(x, y)
            case _:
                raise checks.InputTypeError(
                    f"data must be a DataLoader of pairs (x, y), got batches like "
                    f"{checks.describe(batch)}"
                )

    def _next(self) -> Any:
        if self._iterator is None:
            return None
        with self._stream:
            return next(self._iterator, None)

    def _count(self, num: int, is_whole: bool) -> None:
        """A pass with another number of examples than N would weigh the prior wrongly."""
        self._num_seen += num
        if self._num_seen > self.num_data or (
            is_whole and self._num_seen not in (0, self.num_data)
        ):
            raise checks.InputError(
                f"data must yield num_data = {self.num_data} examples in one pass, got "
                f"{self._num_seen}{'' if is_whole else ' and more'}; give the right number by "
                f"objective=ChannelELBO(num_data)"
            )


Batches = TensorBatches | LoaderBatches


def batches_of(
    model: BayesianModel,
    channel: Channel,
    data: Data,
    batch_size: int,
    seed: int,
    num_data: int | None = None,  # for a DataLoader that does not know it
    weight: Any = None,  # (N,)
) -> Batches:
    """The data's batches; what is wrong with the data is said here."""
    check = _Check(model, channel)
    if isinstance(data, DataLoader):
        if weight is not None:
            raise checks.InputTypeError("sample_weight must be left out for a DataLoader, got one")
        if isinstance(data.sampler, DistributedSampler):
            raise checks.InputError(
                "data must be the same DataLoader on all ranks, each of which takes its rows of "
                "every batch, got one with a DistributedSampler"
            )
        return LoaderBatches(data, *_length(data, num_data), check.of_loader, seed)
    match data:
        case [x, y]:
            x, y = check(x, y)
        case _:
            raise checks.InputTypeError("data must be a pair (x, y) or a DataLoader", got=data)
    size, weights = checks.count("batch_size", batch_size), _weights(weight, len(x), model)
    return TensorBatches(x, y, size, seed, weights)


def _weights(weight: Any, num: int, model: BayesianModel) -> Tensor | None:
    """One weight >= 0 for each example, some of them positive."""
    if weight is None:
        return None
    each = torch.as_tensor(checks.native(weight), dtype=model.dtype, device=model.device)
    if each.shape != (num,):
        raise checks.InputError(
            f"sample_weight must hold one number for each of the {num} examples", got=weight
        )
    checks.finite("sample_weight", each)
    if float(each.min()) < 0 or not float(each.sum()) > 0:
        raise checks.InputError("sample_weight must be >= 0 and positive somewhere, got others")
    return each


def _length(loader: DataLoader[Any], num_data: int | None) -> tuple[int, float]:
    """Examples and steps of one pass."""
    num = _num_in_pass(loader)
    if num is None:
        if num_data is None:
            raise checks.InputError(
                "data must say how many examples a pass has, got a DataLoader over an iterable "
                "data set, or with a sampler of batches that does not; give the number by "
                "objective=ChannelELBO(num_data)"
            )
        num = num_data
    try:
        steps = float(len(loader))
    except TypeError:  # an IterableDataset or a sampler without a length
        if loader.batch_size is None:
            raise checks.InputError(
                "data must have a length or let the DataLoader make the batches (batch_size=...)",
                got=loader,
            ) from None
        steps = num / loader.batch_size
    if num == 0 or steps == 0:
        raise checks.InputError("data must hold at least one example, got an empty DataLoader")
    return num, steps


def _num_in_pass(loader: DataLoader[Any]) -> int | None:
    """How many examples one pass yields, where its sampler or its data set says so.

    >>> data = torch.utils.data.TensorDataset(torch.zeros(5, 2))
    >>> _num_in_pass(DataLoader(data, batch_size=2, drop_last=True))
    4
    """
    batches = loader.batch_sampler
    if isinstance(batches, (list, tuple)):  # of lists of indices
        return sum(map(len, batches))
    if not isinstance(batches, BatchSampler):  # None: the data set makes the batches
        return None
    source = loader.dataset if isinstance(loader.dataset, IterableDataset) else batches.sampler
    try:
        num = len(source)  # type: ignore[arg-type]
    except TypeError:
        return None
    return num // batches.batch_size * batches.batch_size if batches.drop_last else num


class _Check:
    """x and y in the model's dtype and device, refused if misshapen, not finite or out of range."""

    def __init__(self, model: BayesianModel, channel: Channel) -> None:
        self.model, self.channel = model, channel
        self._outputs: dict[torch.Size, Tensor] = {}  # of the net at one input, by its shape

    def of_loader(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        device = self.model.device
        return self(*(value.to(device) if isinstance(value, Tensor) else value for value in (x, y)))

    def __call__(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        model = self.model
        if isinstance(x, np.ndarray):  # arrays follow the model; tensors must agree with it
            x = torch.tensor(checks.native(x), device=model.device, dtype=model.dtype)
        if isinstance(y, np.ndarray):
            y = torch.tensor(checks.native(y), device=model.device)
            y = y.to(model.dtype) if y.is_floating_point() else y
        for name, value in (("x", x), ("y", y)):
            checks.instance(name, value, Tensor, "a tensor or an array")
        if not len(x):
            raise checks.InputError("x must hold at least one example", got=x)
        model._check_input(x)
        if y.ndim == 0 or len(y) != len(x):
            raise checks.InputError(
                f"y must hold one target for each of the {len(x)} examples of x", got=y
            )
        if y.device != x.device:
            raise checks.InputTypeError(f"y must be on {x.device} as x", got=y)
        checks.finite("x", x)
        checks.finite("y", y)
        y = model.likelihood.check_target(self._output(x).expand(len(y), -1), y)
        for part in components(self.channel):
            if (ball := ball_of(part)) is not None:
                ball.check(x)
        return x, y

    def _output(self, x: Tensor) -> Tensor:  # (1, O)
        if x.shape[1:] not in self._outputs:
            try:
                with torch.no_grad():
                    output, _ = self.model.output(self.model.initial_theta(), x[:1])
            except (RuntimeError, ValueError, IndexError) as error:
                raise checks.InputError(
                    f"x must have the shape that net takes, got {checks.describe(x)}: {error}"
                ) from error
            if output.ndim != 2 or len(output) != 1:
                raise checks.InputError(
                    f"net must give one output row for each input, got {checks.describe(output)} "
                    f"for one input"
                )
            self._outputs[x.shape[1:]] = output
        return self._outputs[x.shape[1:]]

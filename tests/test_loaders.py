"""DataLoaders in `fit`: N is what one pass yields, the order comes from the seed, the global
generator stays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from advbayes import ChannelELBO, FitResult, MeanField, Noise, fit
from tests.contracts import seeded, small_model

NUM = 40
X = torch.randn(NUM, 4, generator=seeded(1))
Y = torch.randn(NUM, generator=seeded(2))
DATA = TensorDataset(X, Y)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X[: self.num], Y[: self.num], strict=True))


class LongStream(Stream):
    def __len__(self) -> int:
        return self.num


class Batched(Dataset[tuple[Tensor, Tensor]]):
    """A data set whose items are batches."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= 5:
            raise IndexError
        return X[8 * index : 8 * index + 8], Y[8 * index : 8 * index + 8]


class Unmeasured:
    """A sampler of batches that has a length but does not say how many examples it holds."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3, 4], [5]])

    def __len__(self) -> int:
        return 3


LOADERS = {
    "all": (lambda: DataLoader(DATA, batch_size=7, shuffle=True), 40),
    "drop_last": (lambda: DataLoader(DATA, batch_size=7, shuffle=True, drop_last=True), 35),
    "subset": (lambda: DataLoader(DATA, batch_size=4, sampler=SubsetRandomSampler(range(10))), 10),
    "weighted": (
        lambda: DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler([1.0] * NUM, 14)),
        14,
    ),
    "replacement": (
        lambda: DataLoader(DATA, batch_size=8, sampler=RandomSampler(DATA, num_samples=24)),
        24,
    ),
    "batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(range(9)), 4, True)),
        8,
    ),
    "list of batches": (lambda: DataLoader(DATA, batch_sampler=[[0, 1, 2], [3, 4], [5]]), 6),
    "stream with a length": (lambda: DataLoader(LongStream(12), batch_size=5), 12),
}
UNKNOWN = {
    "stream": (lambda: DataLoader(Stream(12), batch_size=5), 12),
    "batches of the data set's own": (lambda: DataLoader(Batched(), batch_size=None), 40),
    "batch sampler that does not say": (lambda: DataLoader(DATA, batch_sampler=Unmeasured()), 6),
}


def train(
    loader: DataLoader[object], num_data: int | None, **settings: object
) -> tuple[FitResult, Tensor]:
    model = small_model("regression", torch.float32)
    posterior = MeanField(model)
    objective = None if num_data is None else ChannelELBO(num_data)
    options = settings if "steps" in settings else {"epochs": 3} | settings
    return fit(
        model, posterior, Noise(0.0), loader, objective=objective, **options
    ), posterior.mu.detach()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LOADERS)
def test_the_number_of_data_is_that_of_one_pass(name: str) -> None:
    """The likelihood's scale N / B: an objective with the right number gives the same run, a wrong
    one is refused."""
    make, num = LOADERS[name]
    default, right = train(make(), None), train(make(), num)
    assert default[0].history["log_likelihood"] == right[0].history["log_likelihood"]
    assert torch.equal(default[1], right[1])
    seen = sum(len(x) for x, _ in make())
    assert seen == num
    for wrong in {num - 1, num + 1, NUM + 2}:
        with pytest.raises(
            ValueError, match=f"number of examples in one pass over the data, {num}, got {wrong}$"
        ):
            train(make(), wrong)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_number_that_only_a_pass_can_tell_is_asked_for_and_checked(name: str) -> None:
    make, num = UNKNOWN[name]
    with pytest.raises(ValueError, match=r"objective=ChannelELBO\(num_data\)"):
        train(make(), None)
    train(make(), num)
    with pytest.raises(
        ValueError, match=re.escape(f"num_data = {num + 1} examples in one pass, got {num};")
    ):
        train(make(), num + 1)
    with pytest.raises(
        ValueError,
        match=re.escape(f"num_data = {num - 1} examples in one pass, got {num} and more;"),
    ):
        train(make(), num - 1, epochs=1.3)


def test_the_prior_weighs_as_in_a_run_on_the_subset_itself() -> None:
    """bound = N / B sum log p - KL: a loader over 10 of 40 examples is the run on those 10."""
    subset = train(
        DataLoader(DATA, batch_size=10, sampler=SubsetRandomSampler(range(10))), None, steps=1
    )
    alone = train((X[:10], Y[:10]), None, steps=1, batch_size=10)  # type: ignore[arg-type]
    for column in ("log_likelihood", "kl"):
        assert subset[0].history[column] == pytest.approx(alone[0].history[column], rel=1e-5)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Draws from the global generator, as transforms do."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + torch.randn(4), Y[index]


def test_the_seed_alone_decides_and_the_global_generator_stays() -> None:
    def run(seed: int) -> Tensor:
        return train(DataLoader(Augmented(), batch_size=8, shuffle=True), None, seed=seed)[1]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = run(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(run(0), first)
    assert not torch.equal(run(1), first)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(found, first) for found in pool.map(run, [0] * 4))


def test_passes_differ_and_a_run_resumed_between_them_goes_on() -> None:
    orders: list[Tensor] = []

    class Recording(Augmented):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            orders.append(torch.tensor(index))
            return super().__getitem__(index)

    def loader() -> DataLoader[object]:
        return DataLoader(Recording(), batch_size=8, shuffle=True)

    whole = train(loader(), None, steps=10)
    order = torch.stack(orders).view(2, NUM)
    assert order.sort(1).values.equal(torch.arange(NUM).expand(2, -1))
    assert not torch.equal(order[0], order[1])
    half = train(loader(), None, steps=5)
    resumed = train(loader(), None, steps=10, state=half[0].state)
    assert torch.equal(resumed[1], whole[1])

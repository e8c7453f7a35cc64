"""Randomness keyed by (seed, purpose, step): a resumed run draws what a whole one would."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

_States = tuple[Tensor, list[Tensor]]  # of the CPU's generator and of each CUDA device's


def seed_for(seed: int, purpose: str, step: int = 0) -> int:
    """A 63-bit seed that depends on nothing but the key; different keys give independent streams.

    >>> (
    ...     seed_for(0, "theta", 3) == seed_for(0, "theta", 3),
    ...     seed_for(0, "theta", 3) == seed_for(0, "channel", 3),
    ... )
    (True, False)
    """
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(
    seed: int, purpose: str, step: int = 0, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A fresh generator for the key.

    >>> torch.equal(
    ...     torch.randn(2, generator=generator_for(1, "a")),
    ...     torch.randn(2, generator=generator_for(1, "a")),
    ... )
    True
    """
    return torch.Generator(device).manual_seed(seed_for(seed, purpose, step))


class SharedStarts(torch.Generator):
    """A generator with which `Ball.random` moves all `num_rows` examples of a batch alike, the same
    way each time.

    An attack whose only randomness is its start is then a function of each example alone. All else
    that is drawn from it is random as from any other generator, and moves its state.

    >>> from advbayes import L2
    >>> L2(1.0).random(torch.zeros(2, 3), generator=SharedStarts(2)).unique(dim=0).shape
    torch.Size([1, 3])
    """

    num_rows: int

    def __new__(
        cls, num_rows: int, device: torch.device | str = "cpu", seed: int = 0
    ) -> SharedStarts:
        made = super().__new__(cls, device)  # type: ignore[call-arg]
        made.num_rows = num_rows
        made.manual_seed(seed)
        return made

    def start(self) -> torch.Generator:
        """The generator of one start."""
        return generator_for(0, "start", device=self.device)


class Share(torch.Generator):
    """The generator of one of several processes, each with some rows of one batch.

    What `drawn` draws from it are those rows of what one process would have drawn for the whole
    batch; `for_thetas` is the same in all processes, or this one's own. All else that is drawn from
    it is independent of the other processes.

    >>> whole = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    >>> share = Share(torch.Generator().manual_seed(0), torch.tensor([2, 3]), num=4, seed=1)
    >>> drawn(torch.randn, (2, 2), share).equal(whole[2:])
    True
    """

    whole: torch.Generator
    rows: Tensor  # (b,)
    num: int
    own_thetas: bool

    def __new__(
        cls, whole: torch.Generator, rows: Tensor, num: int, seed: int, own_thetas: bool = False
    ) -> Share:
        made = super().__new__(cls, whole.device)  # type: ignore[call-arg]
        made.manual_seed(seed)
        made.whole, made.rows, made.num, made.own_thetas = whole, rows, num, own_thetas
        return made


def drawn(
    draw: Callable[..., Tensor],
    shape: tuple[int, ...],  # (B, ...)
    generator: torch.Generator | None,
    **options: Any,
) -> Tensor:
    """`draw(shape)`, a row for each example of the batch at hand.

    >>> drawn(torch.rand, (3,), None).shape
    torch.Size([3])
    """
    match generator:
        case Share(whole=whole, rows=rows, num=num):
            return draw((num, *shape[1:]), generator=whole, **options)[rows]
    return draw(shape, generator=generator, **options)


def normal_like(
    x: Tensor, generator: torch.Generator | None, shape: tuple[int, ...] | None = None
) -> Tensor:
    """Standard normal numbers in x's dtype and on its device, of its shape or another."""
    shape = x.shape if shape is None else shape
    return torch.randn(shape, generator=generator, dtype=x.dtype, device=x.device)


def num_drawn(num: int, generator: torch.Generator | None) -> int:
    """How many rows `drawn` draws for a batch of `num`: more where that is a share of a larger
    one."""
    return generator.num if isinstance(generator, Share) else num


def narrowed(
    generator: torch.Generator | None,
    rows: Tensor,  # (b,)
    num: int | None = None,
) -> torch.Generator | None:
    """For a part of the batch that is drawn for by itself: of its `num` rows (absent: as many as
    before) those at hand are `rows`."""
    match generator:
        case Share(whole=whole, num=before, own_thetas=own_thetas):
            seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
            return Share(whole, rows, before if num is None else num, seed, own_thetas)
    return generator


def sorted_share(
    order: Tensor,  # (N,)
    edges: list[int],
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, list[int]]:
    """The rows at hand in the order of the whole batch: which come first, second, ..., their places
    in `order`, and between which of them its edges fall.

    >>> share = Share(torch.Generator(), torch.tensor([2, 3]), num=4, seed=1)
    >>> sorted_share(torch.tensor([3, 0, 1, 2]), [0, 3, 4], share)
    (tensor([1, 0]), tensor([0, 3]), [0, 1, 2])
    """
    match generator:
        case Share(rows=rows):
            places, index = order.argsort()[rows].sort()
            cuts = torch.searchsorted(places, torch.tensor(edges, device=order.device))
            return index, places, cuts.tolist()
    return order, torch.arange(len(order), device=order.device), edges


def for_batch(generator: torch.Generator | None) -> torch.Generator | None:
    """The generator for what is drawn once for the whole batch."""
    return generator.whole if isinstance(generator, Share) else generator


def seed_from(generator: torch.Generator | None, device: torch.device) -> int:
    """A seed drawn once for the batch; each process with a share derives its own from it."""
    seed = int(torch.randint(1 << 62, (), generator=for_batch(generator), device=device))
    if isinstance(generator, Share):
        return seed_for(seed, "share", generator.initial_seed())
    return seed


def for_thetas(generator: torch.Generator | None) -> torch.Generator | None:
    """The generator for thetas."""
    match generator:
        case Share(own_thetas=True):
            return generator
    return for_batch(generator)


class GlobalStream:
    """Within, torch's global generator draws from a separate stream; afterwards it is as it was.

    For code that draws from the global generators alone (the CPU's, and those of CUDA devices in
    use), such as a DataLoader and its data set. One thread at a time: the others wait.

    >>> before, stream = torch.get_rng_state(), GlobalStream(3)
    >>> with stream:
    ...     first = torch.rand(2)
    >>> with GlobalStream(3):
    ...     torch.equal(first, torch.rand(2)), torch.equal(before, torch.get_rng_state())
    (True, False)
    >>> torch.equal(before, torch.get_rng_state())
    True
    """

    _one_at_a_time = threading.RLock()

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: _States | None = None  # where it stopped

    def __enter__(self) -> None:
        self._one_at_a_time.acquire()
        self._before = _states()
        if self._state is not None:
            _restore(self._state)
            return
        torch.default_generator.manual_seed(self._seed)
        if _uses_cuda():
            torch.cuda.manual_seed_all(self._seed)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._state = _states()
        _restore(self._before)
        self._one_at_a_time.release()


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _states() -> _States:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if _uses_cuda() else []


def _restore(states: _States) -> None:
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])

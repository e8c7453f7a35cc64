"""Randomness keyed by (seed, purpose, step): a resumed run draws what it would have."""

from __future__ import annotations

import hashlib
import threading
from types import TracebackType

import torch


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
        """What one start is drawn from."""
        return generator_for(0, "start", device=self.device)


class GlobalStream:
    """A stream of its own in the place of torch's global generator, which is left as it was.

    For code that draws from the global generator alone, such as a DataLoader and its data set. One
    thread at a time: the others wait.

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
        self._state = torch.Generator().manual_seed(seed).get_state()

    def __enter__(self) -> None:
        self._one_at_a_time.acquire()
        self._before = torch.get_rng_state()
        torch.set_rng_state(self._state)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._before)
        self._one_at_a_time.release()

"""Several processes that compute as one, under torchrun (`torch.distributed`: gloo, nccl).

`ranks()` is the group of processes that a call runs in. Functions that can run on several ask it
for their rows and for exchanges with the others. `Ranks()` is one process, for which every exchange
is the identity. All ranks call the same functions with the same arguments and get the same answers;
the first one alone writes files.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from advbayes import checks
from advbayes.seeds import Share, seed_for

T = TypeVar("T")
BEAT = 2.0  # seconds between two signs of life
SILENCE = 30.0  # seconds without one after which a rank is lost
AWAKE = 0.02  # seconds for which a rank waits for the others without going to sleep
START = 50.0  # seconds in which all ranks must have given their first
_alone: ContextVar[bool] = ContextVar("alone", default=False)
_own_turn: ContextVar[bool] = ContextVar("own_turn", default=False)


class LostRankError(checks.AdvBayesError, ConnectionError):
    """Raised when another rank died or cannot be reached, so that this one cannot continue."""


class _TogetherError(RuntimeError):
    """An exchange was asked for in the middle of one rank's own task."""


@dataclass(frozen=True)
class Ranks:
    """The processes that work together: this one's number, and how many there are.

    >>> Ranks().sum(torch.ones(2)), Ranks(1, 4).rows(10)
    (tensor([1., 1.]), slice(2, 5, None))
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def shown(self, progress: bool | None) -> bool | None:
        """Whether a progress line is shown: the first rank's alone."""
        return progress if self.is_first else False

    def rows(self, num: int) -> slice:
        """This rank's share of `num` rows: all shares in order are all rows."""
        return slice(num * self.rank // self.size, num * (self.rank + 1) // self.size)

    # --- exchanges: all ranks call, all get the same ---------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """The largest over ranks."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def min(self, tensor: Tensor) -> Tensor:
        """The smallest over ranks."""
        return self._reduced(tensor, dist.ReduceOp.MIN)

    def logsumexp(self, tensor: Tensor) -> Tensor:
        """log of the sum over ranks of exp."""
        if self.size == 1:
            return tensor
        top = self.max(tensor)
        level = top.masked_fill(top == -math.inf, 0.0)
        return level + self.sum((tensor - level).exp()).log()

    def asked(self, wanted: bool) -> Callable[[], bool]:
        """Ask all ranks without waiting for them: the answer is whether any says so.

        >>> Ranks().asked(True)()
        True
        """
        if self.size == 1:
            return lambda: wanted
        with _exchange():
            told = torch.tensor(int(wanted), device=_device())
            work = dist.all_reduce(told, dist.ReduceOp.MAX, async_op=True)

        def answer() -> bool:
            with _exchange():
                _finish(work)
                return bool(told)

        return answer

    def same(self, tensor: Tensor) -> Tensor:
        """The first rank's."""
        if self.size == 1:
            return tensor
        with _exchange():
            told = tensor.detach().clone().contiguous()
            dist.broadcast(told, 0)
            return told

    def gathered(self, tensor: Tensor) -> Tensor:  # (...) of one shape on all ranks -> (R, ...)
        """Every rank's, stacked."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        if tensor.dtype == torch.bool:
            return self.gathered(tensor.byte()).bool()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with _exchange():
            dist.all_gather(parts, tensor.contiguous())
            return torch.stack(parts)

    def mean(self, tensors: Sequence[Tensor], weight: float) -> list[Tensor]:
        """sum over ranks of weight * tensor, all tensors in one exchange; the weights sum to 1."""
        if self.size == 1:
            return list(tensors)
        flat = self.sum(torch.cat([tensor.flatten() for tensor in tensors]) * weight)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view_as(like) for part, like in zip(parts, tensors, strict=True)]

    def agree(self, **counts: int) -> None:
        """Refuse what differs from rank to rank.

        >>> Ranks().agree(num_data=10)
        """
        each = self.gathered(torch.tensor(list(counts.values()), device=_device())).T.tolist()
        for name, values in zip(counts, each, strict=True):
            if len(set(values)) > 1:
                raise checks.InputError(f"{name} must be the same on all ranks, got {values}")

    def mapped(
        self, compute: Callable[[T], Mapping[str, Tensor]], tasks: Sequence[T]
    ) -> Iterator[Mapping[str, Tensor]]:
        """compute(task) for all tasks, in order: each rank computes every R-th, all get all. What
        one rank raises all raise.

        Tasks that need an exchange themselves (a purifier with a sharded reference) are computed by
        all ranks together, one after the other.
        """
        if self.size == 1:
            yield from map(compute, tasks)
            return
        for start in range(0, len(tasks), self.size):
            turn = tasks[start : start + self.size]
            error: Exception | None = None
            data = b""
            if self.rank < len(turn):
                try:
                    with alone(), _within(_own_turn):
                        data = b"+" + _packed(compute(turn[self.rank]))
                except Exception as raised:  # whatever is computed
                    error, told = raised, [type(raised).__name__, str(raised)]
                    data = b"-" + json.dumps(told).encode()
            found = self._bytes(data)[: len(turn)]
            failed = {
                rank: json.loads(each[1:]) for rank, each in enumerate(found) if each[:1] == b"-"
            }
            if any(name == _TogetherError.__name__ for name, _ in failed.values()):
                for task in turn:
                    with alone():
                        result = compute(task)
                    yield result
                continue
            for rank, (name, text) in failed.items():
                mine = error if rank == self.rank else None
                raise mine or type(name, (RuntimeError,), {})(text)
            for each in found:
                yield _unpacked(each[1:])

    def on_first(self, compute: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """What the first rank computes, or raises, on all."""
        (found,) = self.mapped(lambda _: compute(), [None])
        return found

    def _reduced(self, tensor: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return tensor
        with _exchange():
            reduced = tensor.detach().clone().contiguous()
            _finish(dist.all_reduce(reduced, how, async_op=True))
            return reduced

    def _bytes(self, data: bytes) -> list[bytes]:
        sizes = self.gathered(torch.tensor([len(data)], device=_device())).flatten().tolist()
        mine = torch.zeros(max(sizes), dtype=torch.uint8, device=_device())
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        whole = self.gathered(mine).cpu()
        return [row[:size].numpy().tobytes() for row, size in zip(whole, sizes, strict=True)]

    # --- randomness ------------------------------------------------------------------------------

    def generator(
        self, seed: int, num: int, device: torch.device, own_thetas: bool = False
    ) -> torch.Generator:
        """For this rank's rows of a batch of `num`: together the ranks draw what one process would
        (see `seeds.Share`)."""
        whole = torch.Generator(device).manual_seed(seed)
        if self.size == 1:
            return whole
        rows, _ = self.share(num)
        index = torch.arange(rows.start, rows.stop, device=device)
        own = seed_for(seed, "rank", self.rank)
        return Share(whole, index, num, own, own_thetas)

    def share(self, num: int) -> tuple[slice, float]:
        """This rank's rows of a batch, at least one, and their weight: 0 where there are fewer rows
        than ranks and it has none.

        >>> Ranks(0, 2).share(1), Ranks(1, 2).share(1)
        ((slice(0, 1, None), 0.0), (slice(0, 1, None), 1.0))
        """
        rows = self.rows(num)
        if rows.stop > rows.start:
            return rows, (rows.stop - rows.start) / num
        return slice(0, 1), 0.0


ALONE = Ranks()


def _packed(found: Mapping[str, Tensor]) -> bytes:
    return save(
        {
            f"{place:06d}{name}": tensor.detach().contiguous().cpu()
            for place, (name, tensor) in enumerate(found.items())
        }
    )


def _unpacked(data: bytes) -> dict[str, Tensor]:
    return {name[6:]: tensor for name, tensor in sorted(load(data).items())}


def _device() -> torch.device:
    """Where bytes and counts travel."""
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda" if nccl else "cpu")


def _finish(work: dist.Work | None) -> None:
    """Wait for an exchange: awake at first, for a core that has gone to sleep takes milliseconds to
    come back, as long as a short step's whole exchange."""
    assert work is not None  # this process belongs to the group
    until = time.perf_counter() + AWAKE
    while not work.is_completed() and time.perf_counter() < until:
        time.sleep(0) if sys.platform == "win32" else os.sched_yield()
    work.wait()


@contextmanager
def _exchange() -> Iterator[None]:
    if _own_turn.get():
        raise _TogetherError
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(_lost(ranks(), "the exchange with it failed")) from error


def _lost(group: Ranks, why: str) -> str:
    return (
        f"rank {group.rank} of {group.size} ends, for another one is gone or out of reach ({why}). "
        f"What is on disk is whole: the same command, or --resume, goes on from it"
    )


def ranks() -> Ranks:
    """The processes that this call runs in: those of torch's process group, or this one alone.

    >>> ranks()
    Ranks(rank=0, size=1)
    """
    if _alone.get() or not dist.is_available() or not dist.is_initialized():
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size())


@contextmanager
def alone() -> Iterator[None]:
    """Within, each rank works as if there were no others.

    >>> with alone():
    ...     ranks().size
    1
    """
    with _within(_alone):
        yield


@contextmanager
def _within(flag: ContextVar[bool]) -> Iterator[None]:
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


@contextmanager
def joined() -> Iterator[Ranks]:
    """Within, the ranks that torchrun started, joined over gloo; without torchrun the existing
    group, or this process alone.

    If a rank gives no sign of life for thirty seconds, or does not start within fifty, the others
    end, whatever they are waiting for.

    >>> with joined() as group:
    ...     group.size
    1
    """
    if dist.is_initialized() or not dist.is_torchelastic_launched():
        yield ranks()
        return
    group = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    pulse = _Pulse(group) if group.size > 1 else None  # first: a rank may never come
    dist.init_process_group("gloo", timeout=timedelta(days=1))
    try:
        yield group
        group.sum(torch.zeros(1))  # nobody leaves while others may still wait for an exchange
    finally:
        if pulse is not None:
            pulse.stop()
        with suppress(RuntimeError):
            dist.destroy_process_group()


class _Pulse:
    """Signs of life through torchrun's store, for what a connection does not tell: a host that is
    gone, a link that is cut, a process that stands still."""

    def __init__(self, group: Ranks) -> None:
        self.group, self.leaving = group, threading.Event()
        self.seen = {other: (-1, time.monotonic()) for other in range(group.size)}
        for target in (self._beat, self._watch):
            threading.Thread(target=target, daemon=True).start()

    def stop(self) -> None:
        self.leaving.set()

    def _beat(self) -> None:
        """May hang where the store is out of reach, which `_watch` then sees as silence."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        keys = [f"advbayes/pulse/{rank}" for rank in range(self.group.size)]
        with suppress(RuntimeError):  # the store is gone
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, is_master=False, timeout=timedelta(seconds=SILENCE)
            )
            while not self.leaving.wait(BEAT if self.seen[self.group.rank][0] > 0 else 0.0):
                counts = [
                    store.add(key, int(rank == self.group.rank)) for rank, key in enumerate(keys)
                ]
                for other, count in enumerate(counts):
                    if count != self.seen[other][0]:
                        self.seen[other] = count, time.monotonic()

    def _watch(self) -> None:
        while not self.leaving.wait(BEAT):
            now = time.monotonic()
            silent = {
                other: SILENCE if count > 0 else START for other, (count, _) in self.seen.items()
            }
            silent = {
                other: limit for other, limit in silent.items() if now - self.seen[other][1] > limit
            }
            if silent:
                named = ", ".join(map(str, silent))
                why = f"no sign of life from rank {named} for {max(silent.values()):.0f} seconds"
                print(f"advbayes: {_lost(self.group, why)}", file=sys.stderr, flush=True)
                os._exit(2)

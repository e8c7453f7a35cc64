"""How the process gets its memory: what is freed at every step should not be asked of the system again."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = 1 << 30


@cache
def recycle_blocks() -> None:
    """Free one block of 31 MB, once in a process: what `fit` and attacks do before they start.

    The GNU C library learns from it that blocks of this size come and go: it takes them from memory of its own from then on and
    keeps up to twice as much, where it would let every block return to the system and be mapped and cleared anew.

    >>> recycle_blocks()
    """
    torch.empty(31 << 20, dtype=torch.uint8)  # never touched: it costs two system calls


def keep_freed_memory(num_bytes: int = _KEPT) -> bool:
    """Let the C library keep up to `num_bytes` of freed memory for reuse; whether it could be set (Linux with glibc only).

    Beyond what `recycle_blocks` gives: for steps that free more than 60 MB, or blocks above 32 MB. Call it once, before
    training. The process then holds on to its peak memory, and there is no way back but to end it.

    >>> keep_freed_memory(-1)
    Traceback (most recent call last):
    ...
    ValueError: num_bytes must be between 0 and 2147483647, got -1
    """
    if not 0 <= num_bytes < 1 << 31:
        raise ValueError(f"num_bytes must be between 0 and {(1 << 31) - 1}, got {num_bytes}")
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, num_bytes)) and bool(mallopt(_M_TRIM_THRESHOLD, num_bytes))

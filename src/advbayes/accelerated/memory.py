"""How the process gets its memory: what is freed at a step is not asked of the system again."""

from __future__ import annotations

from functools import cache

import torch


@cache
def recycle_blocks() -> None:
    """Free one block of 31 MB, once in a process: what `fit` and attacks do before they start.

    The GNU C library learns from it that blocks of this size come and go: it takes them from memory
    of its own from then on and keeps up to twice as much, where it would let every block return to
    the system and be mapped and cleared anew.

    >>> recycle_blocks()
    """
    torch.empty(31 << 20, dtype=torch.uint8)  # never touched: it costs two system calls

"""Settings of the whole process that make training faster: asked for, never made by themselves."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = 1 << 30


def keep_freed_memory(num_bytes: int = _KEPT) -> bool:
    """Let the C library keep up to `num_bytes` of freed memory for reuse; whether it could be set (Linux with glibc only).

    By default every tensor above 128 kB to 32 MB is returned to the system when freed, and its pages are cleared and mapped
    anew at the next step: up to a third of a convolutional net's training time. Call it once, before training. The process then
    holds on to its peak memory, and there is no way back but to end it.

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

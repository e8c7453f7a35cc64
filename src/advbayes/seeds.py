"""Randomness keyed by (seed, purpose, step): a resumed run draws what an uninterrupted one would have drawn."""

from __future__ import annotations

import hashlib

import torch


def seed_for(seed: int, purpose: str, step: int = 0) -> int:
    """A 63-bit seed that depends on nothing but the key; different keys give independent streams.

    >>> seed_for(0, "theta", 3) == seed_for(0, "theta", 3), seed_for(0, "theta", 3) == seed_for(0, "channel", 3)
    (True, False)
    """
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(seed: int, purpose: str, step: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for the key.

    >>> torch.equal(torch.randn(2, generator=generator_for(1, "a")), torch.randn(2, generator=generator_for(1, "a")))
    True
    """
    return torch.Generator(device).manual_seed(seed_for(seed, purpose, step))

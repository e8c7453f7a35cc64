"""Code that draws from torch's global generator is given a stream of its own, one thread at a
time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from advbayes.estimators import RobustRegressor
from advbayes.seeds import GlobalStream
from tests.contracts import small_data


def test_threads_draw_what_each_would_alone_and_the_global_generator_stays() -> None:
    def draw(seed: int) -> Tensor:
        stream = GlobalStream(seed)
        parts = []
        for _ in range(20):  # a stream goes on where it stopped
            with stream:
                parts.append(torch.rand(50))
        return torch.cat(parts)

    before = torch.get_rng_state()
    alone = [draw(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(draw, range(8)))
    assert all(map(torch.equal, alone, together))
    assert len({float(part.sum()) for part in alone}) == 8
    assert torch.equal(alone[3], torch.rand(1000, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(before, torch.get_rng_state())


def test_estimators_fitted_in_threads_are_those_fitted_alone() -> None:
    x, y = (part.numpy() for part in small_data("regression", torch.float32, 40))

    def thetas(seed: int) -> Tensor:
        return (
            RobustRegressor(hidden=(5,), epochs=1, num_thetas=2, random_state=seed)
            .fit(x, y)
            .posterior_.mean
        )

    before = torch.get_rng_state()
    alone = [thetas(seed) for seed in range(4)]
    assert torch.equal(before, torch.get_rng_state())
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, alone, pool.map(thetas, range(4))))

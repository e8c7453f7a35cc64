"""Code that draws from torch's global generator is given a stream of its own, one thread at a
time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Laplace, Normal

from advbayes import L2, evaluate, metrics, pgd
from advbayes.auditing.case import Frozen
from advbayes.estimators import RobustRegressor
from advbayes.predictive.decisions import Choices
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


class Drawing:
    """A predictor that draws from the global generator, slowly: another thread gets its turn in
    between."""

    def __call__(self, x: Tensor) -> Categorical:
        logits = torch.rand(len(x), 3)
        time.sleep(0.002)
        return Categorical(logits=logits + torch.rand(len(x), 3) + x[:, :1])


class Slow(Laplace):
    """Neither a Gaussian nor with draws of its own generator."""

    has_rsample = False

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        first = super().sample(sample_shape)
        time.sleep(0.002)
        return 0.5 * (first + super().sample(sample_shape))


def evaluated(seed: int) -> Tensor:
    data = torch.zeros(4, 2), torch.tensor([0, 1, 2, 0])
    attacks = {"PGD": pgd(L2(0.1), 2)}
    found = evaluate(Drawing(), data, attacks=attacks, seed=seed, rescore=3, progress=False)
    return torch.stack([rows["log_prob"] for rows in found.cells.values()])


def frozen(seed: int) -> Tensor:
    return Frozen(Drawing(), seed)(torch.zeros(4, 2)).probs


def sampled_crps(seed: int) -> Tensor:
    prediction = Slow(torch.zeros(4), torch.ones(4))
    generator = torch.Generator().manual_seed(seed)
    return metrics.crps(prediction, torch.zeros(4), num_samples=20, generator=generator)


def expected_utility(seed: int) -> Tensor:
    class Sampled(Normal):
        has_rsample = False

        def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
            time.sleep(0.002)
            return super().sample(sample_shape)

    choices = Choices(lambda action, y: -((action - y) ** 2), torch.tensor([0.0, 1.0]), num=20)
    return choices.expected(Sampled(torch.full((4,), float(seed)), torch.ones(4)))


@pytest.mark.parametrize("draw", [evaluated, frozen, sampled_crps, expected_utility])
def test_what_draws_from_the_global_generator_draws_in_threads_what_it_does_alone(
    draw: Callable[[int], Tensor],
) -> None:
    before = torch.get_rng_state()
    alone = [draw(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(draw, (0, 1, 2, 3) * 2))
    assert all(map(torch.equal, alone * 2, together))
    assert len({float(part.flatten()[0]) for part in alone}) == 4
    assert torch.equal(before, torch.get_rng_state())

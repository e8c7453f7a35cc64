"""Answers from the nearest centres of an index: within the bound that is told, everywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from advbayes import (
    L2,
    Annealed,
    AttackChannel,
    BayesianModel,
    Categorical,
    Gaussian,
    Mixture,
    Noise,
    Purifier,
    nll,
    one_step,
)
from advbayes.purification.index import Cells
from tests.oracles import generator
from tests.test_purifier_same_answer import PerFeature, cosine, with_gradient

pytest.importorskip("faiss")
CHANNEL = Mixture([0.5, 0.5], [Noise(0.2), AttackChannel(one_step(L2(0.3)), 0.25)])


def both(
    outputs: int, update: str = "online", **options: Any
) -> tuple[Purifier, Purifier, torch.Tensor]:
    """With and without an index, and queries: near clusters, between them and far from all."""
    source = generator(1)
    x = 8.0 * torch.randn(40, 6, generator=source).repeat_interleave(50, 0)
    x = x + 0.3 * torch.randn(2000, 6, generator=source)
    model = BayesianModel(
        nn.Linear(6, max(1, outputs)), Categorical() if outputs else Gaussian(0.3)
    )
    thetas = 0.3 * torch.randn(3, model.num_params, generator=source)
    query = torch.cat(
        [x[::40] + 0.1 * torch.randn(50, 6, generator=source), 0.5 * (x[::200] + x[100::200])]
    )
    exact = Purifier(model, CHANNEL, thetas, x, update)
    return exact, Purifier(model, CHANNEL, thetas, x, update, index="faiss", **options), query


@pytest.mark.parametrize("update", ["online", "offline"])
@pytest.mark.parametrize("outputs", [0, 3])
def test_answers_and_gradients_are_those_of_all_centres(outputs: int, update: str) -> None:
    exact, indexed, x = both(outputs, update, num_nearest=60)
    assert sum(len(query) for query in indexed.queries(x) if query.nearest is not None) > len(x) / 2
    assert float(indexed.diagnose(x).left_out.max()) <= 1e-6
    y = torch.zeros(len(x), dtype=torch.int64 if outputs else torch.float32)
    wanted, direction = with_gradient(exact, nll, x, y)
    value, gradient = with_gradient(indexed, nll, x, y)
    torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)
    counted = direction.norm(dim=1) > 1e-5  # smaller ones may be what was left out
    assert int(counted.sum()) > 10
    assert float(cosine(gradient, direction)[counted].min()) > 0.99
    torch.testing.assert_close(indexed.denoise(x), exact.denoise(x), rtol=1e-4, atol=1e-4)


def test_what_is_left_out_is_no_more_than_told() -> None:
    exact, indexed, x = both(3, num_nearest=25, left_out=0.3)
    # some from all centres
    assert {query.nearest is not None for query in indexed.queries(x)} == {False, True}
    left_out = indexed.diagnose(x).left_out
    assert 1e-6 < float(left_out.max()) <= 0.3
    found, wanted = (torch.softmax(purifier(x).logits, 1).double() for purifier in (indexed, exact))  # type: ignore[attr-defined]
    assert bool((0.5 * (found - wanted).abs().sum(1) <= left_out + 1e-6).all())
    assert float((found - wanted).abs().max()) > 1e-9


def test_the_bound_holds_for_any_number_of_neighbours() -> None:
    exact, indexed, x = both(3)
    bank: Any = exact.store.banks[0]
    centres = bank.centres.block(slice(0, 1), slice(0, 2000))[0]
    cells = Cells.of(centres)
    for num in (1, 5, 50, 2000):
        for scale in (0.2, 1.0, 5.0):
            rows, log_left = cells.search(x.double(), num, scale)
            weight = (-0.5 * torch.cdist(x.double(), centres.double()).square() / scale**2).exp()
            mine = (
                torch.zeros_like(weight).scatter_add_(1, rows.clamp_min(0), (rows >= 0).double())
                > 0
            )
            left = weight.masked_fill(mine, 0.0).sum(1)
            assert bool((left <= log_left.exp() * (1 + 1e-9)).all())
    assert float(indexed.diagnose(x).left_out.max()) <= 1e-6


def test_nothing_is_left_out_where_nothing_may_be() -> None:
    exact, indexed, x = both(3, left_out=0.0, num_nearest=2000)
    torch.testing.assert_close(indexed(x).logits, exact(x).logits, rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]
    assert float(indexed.diagnose(x).left_out.max()) == 0.0
    assert float(exact.diagnose(x).left_out.max()) == 0.0


def test_attacks_go_through_it_and_other_settings_are_refused() -> None:
    exact, indexed, x = both(3, num_nearest=60)
    y = exact(x).logits.argmax(1)  # type: ignore[attr-defined]
    moved = Annealed(L2(1.5), steps=4)(indexed, x[:20], y[:20])
    found, wanted = (purifier(moved).logits.argmax(1) for purifier in (indexed, exact))  # type: ignore[attr-defined]
    assert torch.equal(found, wanted)
    assert bool((wanted != y[:20]).any())
    model = BayesianModel(nn.Linear(6, 3), Categorical())
    arguments: tuple[Any, ...] = (model, Noise(0.2), torch.zeros(1, model.num_params), x)
    with pytest.raises(ValueError, match="index must be one of 'faiss'"):
        Purifier(*arguments, index="annoy")
    with pytest.raises(ValueError, match="left_out must be"):
        Purifier(*arguments, index="faiss", left_out=-math.inf)
    with pytest.raises(ValueError, match="one noise for all centres"):
        Purifier(model, PerFeature(0.5), *arguments[2:], index="faiss")

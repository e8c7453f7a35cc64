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
from tests.test_purifier_same_answer import PerFeature, cosine, log_densities, with_gradient

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
    exact, indexed, x = both(3, num_nearest=25, left_out=0.03)
    # some from all centres
    assert {query.nearest is not None for query in indexed.queries(x)} == {False, True}
    left_out = indexed.diagnose(x).left_out
    assert 1e-6 < float(left_out.max()) <= 0.03
    found, wanted = (torch.softmax(purifier(x).logits, 1).double() for purifier in (indexed, exact))  # type: ignore[attr-defined]
    assert bool((0.5 * (found - wanted).abs().sum(1) <= left_out + 1e-6).all())
    assert float((found - wanted).abs().max()) > 1e-9


@pytest.mark.parametrize("update", ["online", "offline"])
def test_diagnoses_and_quantiles_are_those_of_all_centres(update: str) -> None:
    """Also where an index finds fewer centres than it may give, near the first of them all."""
    for num_nearest in (60, 1500):
        exact, indexed, x = both(0, update, num_nearest=num_nearest)
        x = torch.cat(
            [x[::6], exact.store.banks[0].centres.block(slice(0, 1), slice(0, 3))[0] + 0.05]
        )  # type: ignore[union-attr]
        told, wanted = indexed.diagnose(x), exact.diagnose(x)
        assert torch.equal(told.nearest, wanted.nearest)
        for name in ("log_evidence", "ess_reference", "ess_theta", "distance"):
            torch.testing.assert_close(
                getattr(told, name), getattr(wanted, name), rtol=1e-4, atol=1e-4
            )
        found, prediction = indexed(x), exact(x)
        y = prediction.mean + 0.1
        torch.testing.assert_close(found.cdf(y), prediction.cdf(y), rtol=1e-4, atol=1e-5)
        level = torch.tensor(0.3)
        torch.testing.assert_close(found.icdf(level), prediction.icdf(level), rtol=1e-3, atol=1e-3)
        draws = found.sample((500,), generator=generator(0))
        error = (draws.mean(0) - prediction.mean) / (prediction.variance / 500).sqrt()
        assert float(error.abs().max()) < 4.9


def test_as_many_cells_are_visited_as_the_bound_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    x, query = points_of("everywhere")
    model = BayesianModel(nn.Linear(6, 3).double(), Categorical())
    thetas = torch.zeros(1, model.num_params, dtype=torch.float64)
    purified = Purifier(model, Noise(0.1), thetas, x, index="faiss", num_nearest=40)
    assert purified._index is not None

    def proven(first: int, most: float) -> int:
        monkeypatch.setattr("advbayes.purification.index._FIRST", first)
        monkeypatch.setattr("advbayes.purification.index._MOST", most)
        bound = purified._index.search(purified.store, purified.query(query), 1e-6)[1]  # type: ignore[union-attr]
        return int((bound <= 1e-6).sum())

    few, many = proven(2, 0.0), proven(2, 0.5)
    assert many > 1.5 * few
    assert abs(many - proven(8, 0.5)) <= 2  # wherever the search began


def points_of(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Centres and queries: clusters with some points twice, points all over, a line far away."""
    source = generator(4)
    spread = torch.randn(2000, 6, generator=source, dtype=torch.float64)
    if kind == "clusters":
        x = spread[:40].repeat_interleave(50, 0) * 8.0 + 0.3 * spread
        x[::7] = x[3]
    elif kind == "line":  # narrow against its distance from zero: float32 keeps three digits of it
        x = 1000.0 + spread[:, :1] * torch.ones(6, dtype=torch.float64) + 1e-3 * spread
    else:
        x = spread
    near = x[::50] + 0.1 * torch.randn(40, 6, generator=source, dtype=torch.float64)
    return x, torch.cat([near, 0.5 * (x[::100] + x[50::100]), 30.0 + x[:3]])


@pytest.mark.parametrize("kind", ["clusters", "everywhere", "line"])
def test_no_centre_of_a_cell_is_nearer_than_possible(kind: str) -> None:
    x, query = points_of(kind)
    x, query = x - x.mean(0), query - x.mean(0)
    cells = Cells.of(x)
    distance = torch.cdist(query, x, compute_mode="donot_use_mm_for_euclid_dist")
    near = cells.nearest_possible(query)
    owner = torch.from_numpy(cells.index.quantizer.search(x.float().numpy(), 1)[1][:, 0])
    assert torch.equal(cells.counts.long(), torch.bincount(owner, minlength=len(cells.counts)))
    assert bool((distance >= near[:, owner]).all())
    least = distance.new_full(near.shape, math.inf).scatter_reduce(
        1, owner.expand(len(query), -1), distance, "amin"
    )
    far = torch.isfinite(least) & (least > 0.5 * least.masked_fill(least == math.inf, 0).mean())
    assert float((near / least)[far].median()) > 0.5  # and mostly not much farther than said
    visited = cells.nearest(query, 3)
    assert torch.equal(visited.sum(1), torch.full((len(query),), 3))
    rows, last = cells.search(query, visited, 5)
    chosen = torch.zeros_like(distance, dtype=torch.bool).scatter_(1, rows.clamp_min(0), True)
    rest = visited[:, owner] & ~chosen
    assert bool((distance >= last.unsqueeze(1))[rest].all())
    assert float(distance.masked_fill(~rest, math.inf).amin(1).sub(last).median()) < 0.1
    rows, last = cells.search(query, visited, 2000)  # all that these cells have
    assert torch.equal((rows >= 0).sum(1), (visited * cells.counts).sum(1).long())
    assert bool((last == math.inf).all())


@pytest.mark.parametrize("kind", ["clusters", "everywhere", "line"])
def test_the_bound_is_one_whatever_it_is_asked_for(kind: str) -> None:
    x, query = points_of(kind)
    model = BayesianModel(nn.Linear(6, 3).double(), Categorical())
    thetas = 0.3 * torch.randn(2, model.num_params, generator=generator(1), dtype=torch.float64)
    proven = 0
    for sigma in (0.02, 0.2, 1.0):
        channel = Mixture([0.3, 0.7], [Noise(sigma), AttackChannel(one_step(L2(0.3)), sigma)])
        purified = Purifier(model, channel, thetas, x, index="faiss", num_nearest=20)
        assert purified._index is not None
        log_p = log_densities(purified.store, query)  # (S, N, B)
        for left_out in (0.0, 1e-6, 1e-2):
            asked = purified.query(query)
            rows, bound = purified._index.search(purified.store, asked, left_out)
            kept = purified._index._evidence(purified.store, asked, [*rows[0], *rows[1]])
            share = 1.0 - (kept - log_p.logsumexp(1)).exp()  # (S, B)
            assert bool((share <= bound + 1e-7).all())  # the rounding of log-densities of 1e7
            proven += int((bound <= left_out).sum())
    assert proven > 20


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

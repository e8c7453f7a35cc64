"""A purifier's answer and its gradient are those of the formula in float64, wherever its tables
lie.

The oracle weighs all reference points at once from the differences x' - centre, in float64, by
plain autograd. Every configuration is drawn at random: size, width, sigma, spread of the data,
thetas, channel, update and task; and answered in memory, from a folder, under a memory limit, at
once and in blocks, with small and large batches.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    Gaussian,
    GaussianMixture,
    Mixture,
    Noise,
    margin,
    nll,
    one_step,
    pgd,
)
from advbayes.channels import GaussianDensity
from advbayes.purification import Purifier
from advbayes.purification.banks import GaussianBank
from advbayes.purification.store import Store
from advbayes.types import Channel, Loss, Predictor
from tests.oracles import generator

PLACES = ("memory", "folder", "limit", "blocks", "blocks again", "saved")
LIMIT = 1_500_000


class PerFeature:
    """Noise with a width for each reference point and feature."""

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma

    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        raise NotImplementedError

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> GaussianDensity:
        wave = 1.0 + 0.3 * torch.sin(3.0 * x + torch.arange(x.shape[1], dtype=x.dtype))
        return GaussianDensity((0.0,), (x,), (self.sigma * wave,))


def channel_of(kind: str, sigma: float) -> Channel:
    attack = AttackChannel(one_step(L2(2.0 * sigma)), sigma)
    return {
        "noise": Noise(sigma),
        "attack": attack,
        "mixture": Mixture([0.6, 0.4], [Noise(sigma), attack]),
        "features": PerFeature(sigma),
    }[kind]


@dataclass(frozen=True)
class Setting:
    num: int
    width: int
    sigma: float
    spread: float
    thetas: int
    channel: str
    update: str
    outputs: int  # 0: three classes
    batch: int
    seed: int

    def model(self) -> BayesianModel:
        likelihood = (
            Gaussian((0.3,) * self.outputs, num_outputs=self.outputs)
            if self.outputs > 1
            else Gaussian(0.3)
        )
        return BayesianModel(
            nn.Linear(self.width, self.outputs or 3), likelihood if self.outputs else Categorical()
        )

    def draw(self) -> tuple[BayesianModel, Tensor, Tensor, Tensor]:
        """Clusters `spread` apart, neighbours a few sigma from each other, queries between
        neighbours."""
        source = generator(self.seed)
        model = self.model()
        thetas = (
            torch.randn(self.thetas, model.num_params, generator=source)
            * 3.0
            / math.sqrt(self.width)
        )
        clusters = self.spread * torch.randn(max(2, self.num // 40), self.width, generator=source)
        member = torch.randint(0, len(clusters), (self.num,), generator=source)
        step = self.sigma * 8.0 / math.sqrt(self.width)
        x = clusters[member] + step * torch.randn(self.num, self.width, generator=source)
        first, other = (
            torch.randint(0, self.num, (self.batch,), generator=source) for _ in range(2)
        )
        near = torch.where(member[first] == member[other], other, first)
        between = torch.rand(self.batch, 1, generator=source)
        query = x[first] + between * (x[near] - x[first])
        query += 0.3 * self.sigma * torch.randn(self.batch, self.width, generator=source)
        return model, thetas, x, query

    def target(self) -> Tensor:
        source = generator(self.seed + 1)
        if not self.outputs:
            return torch.randint(0, 3, (self.batch,), generator=source)
        shape = (self.batch,) if self.outputs == 1 else (self.batch, self.outputs)
        return torch.randn(shape, generator=source)

    def build(self, **options: object) -> Purifier:
        model, thetas, x, _ = self.draw()
        return Purifier(
            model, channel_of(self.channel, self.sigma), thetas, x, self.update, **options
        )  # type: ignore[arg-type]


def random_setting(seed: int) -> Setting:
    draw = random.Random(seed)
    width = draw.choice([1, 2, 8, 50, 300])
    return Setting(
        num=draw.choice([1, 5, 300, 1100]),
        width=width,
        sigma=draw.choice([0.02, 0.1, 0.5, 2.0]),
        spread=draw.choice([0.0, 1.0, 50.0, 500.0]),
        thetas=draw.choice([1, 3]),
        channel=draw.choice(["noise", "attack", "mixture", "features"]),
        update=draw.choice(["online", "offline"]),
        outputs=draw.choice([0, 0, 1, 2]),
        batch=draw.choice([1, 7, 40]),
        seed=seed,
    )


def log_densities(store: Store, x: Tensor) -> Tensor:  # (S, N, B) float64
    parts = []
    for bank in store.banks:
        assert isinstance(bank, GaussianBank)
        centres = bank.centres.block(slice(None), slice(None)).double()
        scale = (
            bank.scale
            if bank.scales is None
            else bank.scales.block(slice(None), slice(None)).double()
        )
        scales = torch.as_tensor(scale, dtype=torch.float64).expand_as(centres) * bank.factor
        away = (x - centres.unsqueeze(2)) / scales.unsqueeze(2)  # (G, N, B, d)
        log_p = -0.5 * away.square().sum(-1) - scales.log().sum(-1, keepdim=True)
        log_p = log_p + bank.log_weight - 0.5 * x.shape[1] * math.log(2 * math.pi)
        parts.append(log_p.expand(store.num_thetas, -1, -1))
    return torch.stack(parts).logsumexp(0)


def oracle(
    purifier: Purifier, x: Tensor
) -> tuple[torch.distributions.Distribution, Tensor]:  # and (S, N, B)
    """Eq. 4 and 5 as they stand, on the purifier's own tables."""
    store, log_p = purifier.store, log_densities(purifier.store, x)
    evidence = log_p.logsumexp(1)
    equal = torch.full_like(evidence, -math.log(len(evidence)))
    shares = evidence.log_softmax(0) if purifier.update == "online" else equal
    weights = (log_p.log_softmax(1) + shares.unsqueeze(1)).transpose(0, 1)  # (N, S, B)
    values = store.value_block(slice(0, store.num_reference))  # (N, S, V)
    if not store.num_outputs:
        # log-sum-exp, for the log of a small probability
        logits = (weights.unsqueeze(-1) + values.log().unsqueeze(2)).flatten(0, 1).logsumexp(0)
        return torch.distributions.Categorical(logits=logits, validate_args=False), weights
    mean, variance, _ = values.chunk(3, -1)
    means, scales = (
        part.flatten(0, 1).unsqueeze(1).expand(-1, len(x), -1)
        for part in (mean + store.middle, variance.sqrt())
    )
    if store.num_outputs == 1:
        means, scales = means.squeeze(-1), scales.squeeze(-1)
    return GaussianMixture(means, scales, weights.flatten(0, 1)), weights


def with_gradient(predict: Predictor, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    at = x.clone().requires_grad_()
    value = loss(predict(at), y.to(x.dtype) if y.is_floating_point() else y)
    (gradient,) = torch.autograd.grad(value.sum(), at)
    return value.detach().double(), gradient.double()


def exactly(purifier: Purifier) -> Predictor:
    return lambda at: oracle(purifier, at)[0]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Without torch's floor on the norms: these gradients may be tiny."""
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp_min(1e-300)


def everywhere(
    setting: Setting, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Purifier]:
    """The same purifier, its tables in every place and read in every way."""
    made = {}
    for place in PLACES:
        with monkeypatch.context() as patch:
            if place.startswith("blocks"):
                patch.setattr("advbayes.purification.store._SMALL", 0)
            options: dict[str, object] = {}
            if place == "folder":
                options["folder"] = folder / "tables"
            if place == "limit":
                options["memory_limit"] = LIMIT
            made[place] = setting.build(**options)
            if place == "saved":
                made[place].save(folder / "saved")
                made[place] = Purifier.load(folder / "saved", memory_limit=1)
    return made


@pytest.mark.parametrize("seed", range(40))
def test_every_place_gives_the_answer_of_the_formula(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = random_setting(seed)
    _, _, _, x = setting.draw()
    y = setting.target()
    monkeypatch.setattr("advbayes.purification.banks._TILE", 0)
    monkeypatch.setattr("advbayes.purification.banks.FEWEST_ROWS", 128)
    for place, purifier in everywhere(setting, tmp_path, monkeypatch).items():
        if place == "blocks again":
            monkeypatch.setattr("advbayes.purification.sweep.KEPT", 0)
        for loss in (nll,) if setting.outputs else (nll, margin):
            wanted, direction = with_gradient(exactly(purifier), loss, x.double(), y)
            value, gradient = with_gradient(purifier, loss, x, y)
            torch.testing.assert_close(
                value, wanted, rtol=2e-5, atol=2e-5, msg=f"{place}, {loss.__name__}: {setting}"
            )
            # smaller ones are rounded away: weights by exponents as large as log p
            counted = direction.norm(dim=1) > 1e-10 * (1 + wanted.abs())
            if loss is margin:  # at a tie of two other classes it has no gradient
                others = oracle(purifier, x.double())[0].logits.scatter(
                    1, y.unsqueeze(1), -math.inf
                )
                counted &= others.sort(1)[0].diff(dim=1)[:, -1] > 1e-3
            close = cosine(gradient, direction)[counted] > 0.999
            assert bool(close.all()), (
                place,
                loss.__name__,
                setting,
                cosine(gradient, direction)[counted].min(),
            )
            ratio = (gradient.norm(dim=1) / direction.norm(dim=1))[counted]
            # positions are rounded at their spread, which exponents feel in units of sigma
            rtol = max(2e-3, 2e-7 * setting.spread / setting.sigma)
            torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=rtol, atol=0)


class Pairs:
    """Images of two classes, and queries that lie between the nearest images of both so that the
    nearer one outweighs the other by exp(gap)."""

    def __init__(self, num: int, sigma: float, gap: Tensor, width: int = 784) -> None:
        source = generator(5)
        x = torch.rand(num, width, generator=source) * (
            torch.rand(num, width, generator=source) < 0.2
        )
        self.labels = torch.arange(num) % 2
        x[:, :5] += 2.0 * self.labels.unsqueeze(1)
        self.theta = torch.zeros(1, 2 * width + 2)
        self.theta[0, :5], self.theta[0, width : width + 5], self.theta[0, -2:] = (
            -4.0,
            4.0,
            torch.tensor([20.0, -20.0]),
        )
        self.model = BayesianModel(nn.Linear(width, 2), Categorical())
        self.x, self.channel, self.y = x, Noise(sigma), self.labels[: len(gap)]
        distance = torch.cdist(x[: len(gap)], x)
        distance[self.y.unsqueeze(1) == self.labels] = math.inf
        length, other = distance.min(1)
        self.to_boundary = gap * sigma**2 / length
        self.query = x[: len(gap)] + (0.5 - self.to_boundary / length).unsqueeze(1) * (
            x[other] - x[: len(gap)]
        )

    def purifier(self, **options: object) -> Purifier:
        return Purifier(self.model, self.channel, self.theta, self.x, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("place", ["memory", "folder", "float32"])
def test_saturated_weights_leave_the_direction_of_the_gradient(
    sigma: float, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reference point has all the weight but exp(-14) to exp(-25): rounding is no direction."""
    pairs = Pairs(200, sigma, torch.linspace(14.0, 25.0, 30))
    if place == "float32":
        monkeypatch.setattr("advbayes.purification.store._SMALL", 0)
        monkeypatch.setattr("advbayes.purification.purifier._TOLERATED", math.inf)
    purifier = pairs.purifier(**({"folder": tmp_path} if place == "folder" else {}))
    for loss in (nll, margin):
        _, direction = with_gradient(exactly(purifier), loss, pairs.query.double(), pairs.y)
        _, gradient = with_gradient(purifier, loss, pairs.query, pairs.y)
        counted = direction.norm(dim=1) > 1e-10
        assert int(counted.sum()) > 25
        assert float((cosine(gradient, direction)[counted] > 0.9).double().mean()) >= 0.97


def test_an_attack_leaves_as_much_in_memory_as_from_disk(tmp_path: Path) -> None:
    pairs = Pairs(640, 0.1, torch.full((40,), 20.0))
    ball = L2(1.5 * float(pairs.to_boundary.max()))
    for options in ({}, {"folder": tmp_path}):
        purifier = pairs.purifier(**options)
        moved = pgd(ball, steps=20)(purifier, pairs.query, pairs.y)
        assert float((purifier(moved).logits.argmax(1) == pairs.y).double().mean()) < 0.05  # type: ignore[attr-defined]


@pytest.mark.parametrize("spread", [0.5, 50.0, 500.0])
@pytest.mark.parametrize("channel", ["noise", "mixture", "features"])
def test_diagnosis_and_denoising_with_clusters_far_apart(
    spread: float, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(2000, 8, 0.1, spread, 3, channel, "online", 0, 30, seed=3)
    _, _, x, query = setting.draw()
    monkeypatch.setattr("advbayes.purification.store._SMALL", 0)
    purifier = setting.build()
    log_p = log_densities(purifier.store, query.double())
    weights = oracle(purifier, query.double())[1].exp().sum(1)  # (N, B)
    diagnosis = purifier.diagnose(query)
    torch.testing.assert_close(
        diagnosis.ess_reference.double(), 1 / weights.square().sum(0), rtol=2e-3, atol=0
    )
    evidence = log_p.flatten(0, 1).logsumexp(0) - math.log(3 * 2000)
    torch.testing.assert_close(diagnosis.log_evidence, evidence, rtol=1e-6, atol=1e-3)
    centres = torch.zeros(30, 8, dtype=torch.float64)
    joint = torch.stack(
        [part_weights(purifier, bank, query.double()) for bank in range(len(purifier.store.banks))]
    )
    for bank, share in zip(purifier.store.banks, joint, strict=True):
        assert isinstance(bank, GaussianBank)
        table = bank.centres.block(slice(None), slice(None)).double().expand(3, -1, -1)
        centres += torch.einsum("snb,snd->bd", share, table)
    assert float((purifier.denoise(query).double() - centres).norm(dim=1).max()) < 1e-3
    if channel == "noise":
        nearest = torch.cdist(query.double(), x.double()).argmin(1)
        assert torch.equal(diagnosis.nearest, nearest)


def part_weights(purifier: Purifier, bank: int, x: Tensor) -> Tensor:  # (S, N, B)
    """p(n, theta, bank | x'), online."""
    store = purifier.store
    each = [log_densities(replace(store, banks=(part,)), x) for part in store.banks]
    return (each[bank] - torch.stack(each).logsumexp(0).flatten(0, 1).logsumexp(0)).exp()


@pytest.mark.parametrize("outputs", [0, 1])
def test_neither_batch_nor_order_nor_threads_matter(
    outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of both precisions in one batch: near ones in float32 and tiles of a few hundred
    centres, far ones in float64 and one tile, as a row alone."""
    setting = Setting(1000, 20, 0.5, 1.0, 3, "mixture", "online", outputs, 200, seed=4)
    monkeypatch.setattr("advbayes.purification.store._SMALL", 0)
    monkeypatch.setattr("advbayes.purification.banks._TILE", 1 << 16)
    _, _, _, x = setting.draw()
    x[::3] *= 3.0
    y, purifier = setting.target(), setting.build()
    bank = purifier.store.banks[0]
    assert isinstance(bank, GaussianBank)
    norms = (x.double() - purifier.store.origin).norm(dim=1)
    monkeypatch.setattr(
        "advbayes.purification.purifier._TOLERATED", float(bank.rounding(norms).quantile(0.8))
    )
    assert {query.dtype for query in purifier.queries(x)} == {torch.float32, torch.float64}
    value, gradient = with_gradient(purifier, nll, x, y)
    order = torch.randperm(200, generator=generator(8))
    again = with_gradient(purifier, nll, x[order], y[order])
    rows = torch.tensor([0, 1, 2, 100, 199])
    alone = [with_gradient(purifier, nll, x[row : row + 1], y[row : row + 1]) for row in rows]
    torch.set_num_threads(2)
    threads = with_gradient(purifier, nll, x, y)
    torch.set_num_threads(1)
    pairs = [
        (again, (value[order], gradient[order])),
        (threads, (value, gradient)),
        (
            (torch.cat([v for v, _ in alone]), torch.cat([g for _, g in alone])),
            (value[rows], gradient[rows]),
        ),
    ]
    for (found, slope), (wanted, direction) in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert (
            float((slope - direction).norm(dim=1).div(direction.norm(dim=1).clamp_min(1e-6)).max())
            < 1e-3
        )
    if outputs:
        levels = torch.linspace(0.05, 0.95, 50)  # each is searched for by dozens of cdfs
        for name, argument in (("cdf", y[order]), ("icdf", levels)):
            some = x[order][: len(argument)]
            whole = getattr(purifier(some), name)(argument)
            part = getattr(purifier(some[40:45]), name)(argument[40:45])
            torch.testing.assert_close(whole[40:45], part, rtol=1e-5, atol=1e-5)


def test_a_store_of_any_size_keeps_the_place_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the reference points does not matter."""
    setting = Setting(1500, 6, 0.3, 1.0, 2, "noise", "online", 0, 20, seed=9)
    monkeypatch.setattr("advbayes.purification.store._SMALL", 0)
    model, thetas, x, query = setting.draw()
    order = torch.randperm(1500, generator=generator(1))
    y = setting.target()
    first, second = (
        with_gradient(Purifier(model, Noise(0.3), thetas, points), nll, query, y)
        for points in (x, x[order])
    )
    torch.testing.assert_close(first[0], second[0], rtol=1e-5, atol=1e-6)
    assert float((first[1] - second[1]).norm() / first[1].norm()) < 1e-4


@pytest.mark.parametrize("kind", ["one noise", "both", "attacked"])
def test_the_evidence_itself_is_that_of_the_sweep(kind: str) -> None:
    """Not only its shares, in which whatever all thetas have in common cancels."""
    model = BayesianModel(nn.Linear(2, 3).double(), Categorical())
    thetas = torch.randn(4, 9, generator=generator(1), dtype=torch.float64)
    x = torch.randn(20, 2, generator=generator(2), dtype=torch.float64)
    channels: dict[str, Channel] = {
        "one noise": Noise(0.5),
        "both": Mixture([0.3, 0.7], [Noise(0.5), AttackChannel(one_step(L2(0.5)), sigma=0.5)]),
        "attacked": AttackChannel(one_step(L2(0.5)), sigma=0.5),
    }
    purifier = Purifier(model, channels[kind], thetas, (x, torch.arange(20) % 3))
    points = 3 * torch.randn(5, 2, generator=generator(3), dtype=torch.float64)
    assert purifier._small is not None
    fast = purifier.evidence(purifier.query(points), len(points))
    purifier._small = None
    slow = purifier.evidence(purifier.query(points), len(points))
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other)
    known = torch.logsumexp(slow[0], 0) - math.log(4 * 20)
    torch.testing.assert_close(purifier.diagnose(points).log_evidence, known)

"""The Purifier: against brute force, in float32, on disk, with every channel, and with bad
input."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    Gaussian,
    GaussianMixture,
    HeteroscedasticGaussian,
    Learned,
    MeanField,
    Mixture,
    Noise,
    audit,
    margin,
    nll,
    one_step,
    pgd,
    pgd_plus,
)
from advbayes.auditing import Budget, Support
from advbayes.channels import GaussianDensity
from advbayes.likelihoods import Likelihood
from advbayes.networks import FullyConnectedGenerator, mlp
from advbayes.purification import Purifier, SimulatedPurifier
from advbayes.purification.sweep import sweep
from advbayes.types import Channel, Predictor
from tests.oracles import FLOAT, generator, randn
from tests.ranks import Box
from tests.test_purifier_same_answer import oracle

WIDTH = 4


@pytest.fixture(autouse=True, params=["blocks", "at_once"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Few reference points are weighed at once, many in blocks that are computed again: both ways
    for every test."""
    if request.param == "blocks":
        monkeypatch.setattr("advbayes.purification.store._SMALL", 0)
        monkeypatch.setattr("advbayes.purification.sweep.KEPT", 0)
        # tables are computed, differences taken and diagnoses made piece by piece
        monkeypatch.setattr("advbayes.purification.store._BLOCK", 50)
        monkeypatch.setattr("advbayes.purification.banks._DIFFERENCES", 3 * 8 * WIDTH)
        monkeypatch.setattr("advbayes.purification.diagnosis._WEIGHTS", 300)
    return str(request.param)


def learned(
    num_outputs: int = 1, num_classes: int | None = None, dtype: torch.dtype = FLOAT
) -> Learned:
    torch.manual_seed(7)
    return Learned(
        FullyConnectedGenerator(WIDTH, num_outputs, num_classes, width=8).to(dtype),
        L2(1.0),
        sigma_range=(0.2, 0.8),
    )


CHANNELS: dict[str, Callable[[Learned], Channel]] = {
    "noise": lambda _: Noise(0.4),
    "one_step": lambda _: AttackChannel(one_step(L2(1.0)), 0.4),
    "pgd": lambda _: AttackChannel(pgd(L2(0.7), steps=3), 0.5),
    "pgd_plus": lambda _: AttackChannel(pgd_plus(L2(0.7), steps=2), 0.5),
    "learned": lambda one: one,
    "mixture": lambda _: Mixture(
        [0.4, 0.0, 0.6], [Noise(0.3), Noise(0.1), AttackChannel(one_step(L2(1.0)), 0.5)]
    ),
    "nested": lambda one: Mixture(
        [0.5, 0.5], [Noise(0.4), Mixture([0.3, 0.7], [AttackChannel(one_step(L2(1.0)), 0.4), one])]
    ),
}


class Unstructured:
    """The same density with its Gaussian structure hidden, so that the general path is taken."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return self.channel.sample(predict, x, y, generator=generator)

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> object:
        inner = self.channel.density(predict, x, y)

        class Density:
            def log_prob(self, x_adv: Tensor) -> Tensor:
                return inner.log_prob(x_adv)

        return Density()


def setting(
    likelihood: Likelihood, num_outputs: int, num: int = 120, dtype: torch.dtype = FLOAT
) -> tuple[BayesianModel, Tensor, Tensor, Tensor]:
    """A model, three thetas, and a reference set with labels."""
    model = BayesianModel(mlp(WIDTH, num_outputs, hidden=(8,)).to(dtype), likelihood)
    thetas = (0.6 * randn(3, model.num_params)).to(dtype)
    x = randn(num, WIDTH, seed=1).to(dtype)
    if isinstance(likelihood, Categorical):
        return model, thetas, x, torch.randint(0, num_outputs, (num,), generator=generator(2))
    shape = (
        (num,)
        if num_outputs == 1 or isinstance(likelihood, HeteroscedasticGaussian)
        else (num, num_outputs)
    )
    return model, thetas, x, randn(*shape, seed=2).to(dtype)


def brute_force(
    model: BayesianModel,
    channel: Channel,
    thetas: Tensor,
    x: Tensor,
    y: Tensor | None,
    x_adv: Tensor,
    update: str,
) -> Distribution:
    """Eq. 4 and 5 as they stand, all of S x N x B at once."""
    # (S, N, B)
    log_p = torch.stack(
        [channel.density(model.at(theta), x, y).log_prob(x_adv) for theta in thetas]
    )
    evidence = log_p.logsumexp(1)
    shares = (
        evidence.log_softmax(0)
        if update == "online"
        else torch.full_like(evidence, -math.log(len(thetas)))
    )
    log_weights = (log_p.log_softmax(1) + shares.unsqueeze(1)).flatten(0, 1)  # (S N, B)
    each = model.at_each(thetas)(x)
    if hasattr(each, "probs"):
        probs = torch.einsum("kb,kc->bc", log_weights.exp(), each.probs.flatten(0, 1))
        return torch.distributions.Categorical(probs=probs, validate_args=False)
    base = getattr(each, "base_dist", each)
    means, scales = (
        part.flatten(0, 1).unsqueeze(1).expand(-1, len(x_adv), *part.shape[2:])
        for part in (base.loc, base.scale)
    )
    return GaussianMixture(means, scales, log_weights)


@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "no_labels"])
@pytest.mark.parametrize("update", ["online", "offline"])
@pytest.mark.parametrize("name", list(CHANNELS))
def test_classification_is_brute_force_with_every_channel(
    name: str, update: str, labelled: bool
) -> None:
    model, thetas, x, y = setting(Categorical(), 3)
    channel = CHANNELS[name](learned(num_classes=3))
    x_adv = randn(5, WIDTH, seed=3).requires_grad_()
    labels = y if labelled else None
    wanted = brute_force(model, channel, thetas, x, labels, x_adv, update)
    reference = (x, y) if labelled else x
    for given in (channel, Unstructured(channel)):
        found = Purifier(model, given, thetas, reference, update)(x_adv)
        torch.testing.assert_close(found.probs, wanted.probs, rtol=1e-10, atol=1e-14)
        for loss in (nll, margin):
            target = torch.tensor([0, 1, 2, 0, 1])
            gradients = [
                torch.autograd.grad(loss(p, target).sum(), x_adv, retain_graph=True)[0]
                for p in (found, wanted)
            ]
            torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-11)


class Doubtful:
    """Gaussian noise of one's own, of which the named parts depend on what theta says at x."""

    def __init__(self, depends: str, bar: float) -> None:
        self.depends, self.bar = depends, bar

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
        entropy: Tensor = predict(x).entropy()  # type: ignore[no-untyped-call]
        doubt = entropy.unsqueeze(1)  # (N, 1)
        share = float(predict(torch.ones_like(x[:1])).probs[0, 0])
        match self.depends:
            case "the scale of a point":
                return GaussianDensity((0.0,), (x,), (0.2 + doubt,))
            case "the scale of a feature":
                return GaussianDensity((0.0,), (x,), (0.2 + doubt * torch.arange(WIDTH),))
            case "one scale":
                return GaussianDensity((0.0,), (x,), (0.2 + share,))
            case "weights":
                log_weights = math.log(share), math.log1p(-share)
                return GaussianDensity(log_weights, (x, x + 1), (0.5, 0.3))
            case "some centres":  # not the first one
                moves = x[:, :1] > self.bar
                moved = torch.where(moves, x + doubt, x) if bool(moves.any()) else x
                return GaussianDensity((0.0,), (moved,), (0.5,))
            case _:
                return GaussianDensity((0.0,), (x,), (torch.linspace(0.2, 1.0, WIDTH).double(),))


@pytest.mark.parametrize("update", ["online", "offline"])
@pytest.mark.parametrize(
    "depends",
    ["the scale of a point", "the scale of a feature", "one scale", "weights", "some centres", ""],
)
def test_whatever_a_channel_of_one_s_own_makes_of_theta_is_in_the_answer(
    depends: str, update: str, tmp_path: Path
) -> None:
    model, thetas, x, y = setting(Categorical(), 3)
    channel, x_adv = Doubtful(depends, float(x[0, 0])), randn(5, WIDTH, seed=3).requires_grad_()
    wanted = brute_force(model, channel, thetas, x, y, x_adv, update)
    target = torch.tensor([0, 1, 2, 0, 1])
    for folder in (None, tmp_path / "tables"):
        found = Purifier(model, channel, thetas, (x, y), update, folder=folder)(x_adv)
        torch.testing.assert_close(found.probs, wanted.probs, rtol=1e-10, atol=1e-14)
        gradients = [
            torch.autograd.grad(nll(p, target).sum(), x_adv, retain_graph=True)[0]
            for p in (found, wanted)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("update", ["online", "offline"])
@pytest.mark.parametrize("name", list(CHANNELS))
@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [(Gaussian(0.3), 1), (Gaussian((0.3, 0.5), num_outputs=2), 2), (HeteroscedasticGaussian(), 2)],
)
def test_regression_is_the_full_mixture(
    likelihood: Likelihood, outputs: int, name: str, update: str
) -> None:
    model, thetas, x, y = setting(likelihood, outputs, num=60)
    channel = CHANNELS[name](learned(num_outputs=y.shape[1] if y.ndim == 2 else 1))
    x_adv = randn(5, WIDTH, seed=3).requires_grad_()
    target = randn(5, *y.shape[1:], seed=4)
    wanted = brute_force(model, channel, thetas, x, y, x_adv, update)
    found = Purifier(model, channel, thetas, (x, y), update)(x_adv)
    for pair in (
        (found.mean, wanted.mean),
        (found.variance, wanted.variance),
        (found.entropy(), wanted.entropy()),
        (found.log_prob(target), wanted.log_prob(target)),
    ):
        torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-12)
        gradients = [
            torch.autograd.grad(value.sum(), x_adv, retain_graph=True)[0] for value in pair
        ]
        torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-10)
    if y.ndim == 1:
        torch.testing.assert_close(
            found.cdf(target), wanted.cdf(target).detach(), rtol=1e-9, atol=1e-12
        )
        for level in (0.01, 0.5, 0.95):
            at = torch.tensor(level, dtype=FLOAT)
            torch.testing.assert_close(
                found.icdf(at), wanted.icdf(at).detach(), rtol=1e-7, atol=1e-7
            )
        torch.testing.assert_close(found.log_prob(target.unsqueeze(1)), found.log_prob(target))


def test_regression_samples_have_the_mixture_s_distribution() -> None:
    model, thetas, x, y = setting(Gaussian(0.3), 1)
    prediction = Purifier(model, CHANNELS["nested"](learned()), thetas, (x, y))(
        randn(3, WIDTH, seed=3)
    )
    draws = prediction.sample((20_000,), generator=generator(0))
    assert draws.shape == (20_000, 3)
    # uniform if the draws are right
    levels = torch.stack([prediction.cdf(draw) for draw in draws[:400]])
    assert float((levels.mean(0) - 0.5).abs().max()) < 4.9 * math.sqrt(1 / 12 / 400)
    deviation = (draws.mean(0) - prediction.mean) / (prediction.variance / 20_000).sqrt()
    assert float(deviation.abs().max()) < 4.9
    assert float((draws.var(0) / prediction.variance - 1).abs().max()) < 0.1
    again = prediction.sample((20_000,), generator=generator(0))
    assert torch.equal(draws, again)
    entropy = prediction.monte_carlo_entropy(500, generator=generator(1))
    assert bool((entropy < prediction.entropy() + 0.2).all())


@pytest.mark.parametrize("update", ["online", "offline"])
def test_a_query_that_all_exclude_has_the_plain_average(update: str) -> None:
    model, thetas, x, y = setting(Gaussian(0.3), 1)
    purifier = Purifier(model, Box(), thetas, (x, y), update)
    far = torch.full((2, WIDTH), 60.0, dtype=FLOAT)
    found = purifier(torch.cat([far, x[:1]]))
    means = torch.stack([model.at(theta)(x).mean for theta in thetas]).flatten()
    wanted = GaussianMixture(means.unsqueeze(1).expand(-1, 2), torch.full((len(means), 2), 0.3))
    at = torch.tensor([-0.4, 0.9], dtype=FLOAT)
    for value, other in (
        (found.mean, wanted.mean),
        (found.variance, wanted.variance),
        (found.log_prob(torch.cat([at, at[:1]])), wanted.log_prob(at)),
        (found.cdf(torch.cat([at, at[:1]])), wanted.cdf(at)),
        (found.icdf(torch.tensor(0.2, dtype=FLOAT)), wanted.icdf(torch.tensor(0.2, dtype=FLOAT))),
    ):
        torch.testing.assert_close(value[:2], other, rtol=1e-6, atol=1e-6)
    draws = found.sample((4000,), generator=generator(0))[:, :2]
    error = (draws.mean(0) - wanted.mean) / (wanted.variance / 4000).sqrt()
    assert float(error.abs().max()) < 4.9
    assert float((draws.var(0) / wanted.variance - 1).abs().max()) < 0.15
    told = purifier.diagnose(far)
    assert bool(told.out_of_support.all())
    torch.testing.assert_close(told.ess_reference, torch.full((2,), len(x) * 1.0, dtype=FLOAT))


def test_many_queries_are_answered_block_by_block() -> None:
    model, thetas, x, y = setting(Categorical(), 3)
    purifier = Purifier(model, Noise(0.4), thetas, (x, y))
    x_adv = randn(1100, WIDTH, seed=3)
    torch.testing.assert_close(
        purifier(x_adv).probs[700:705], purifier(x_adv[700:705]).probs, rtol=1e-12, atol=0
    )
    assert purifier(x_adv[:0]).probs.shape == (0, 3)
    assert len(purifier.diagnose(x_adv).nearest) == 1100
    model, thetas, x, y = setting(Gaussian(0.3), 1)
    prediction = Purifier(model, Noise(0.4), thetas, (x, y))(x_adv)
    target = randn(1100, seed=5)
    alone = Purifier(model, Noise(0.4), thetas, (x, y))(x_adv[600:603])
    torch.testing.assert_close(
        prediction.log_prob(target)[600:603], alone.log_prob(target[600:603]), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(
        prediction.cdf(target)[600:603], alone.cdf(target[600:603]), rtol=1e-12, atol=0
    )


# --- float32 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [784, 3072])
@pytest.mark.parametrize("sigma", [0.05, 0.1, 0.4, 2.0])
def test_float32_rounding_is_bounded(width: int, sigma: float) -> None:
    """At sigma 0.05 on images the plain expansion is off by 1e-2 in the log-weights: the leading
    terms must not be."""
    model = BayesianModel(nn.Linear(width, 3), Categorical())
    thetas = 0.1 * torch.randn(2, model.num_params, generator=generator(0))
    base = torch.rand(40, width, generator=generator(1))
    # Families of near neighbours, so that several terms share the weight at every sigma.
    spread = sigma * torch.randn(40, 10, width, generator=generator(2)) * (2.0 / width) ** 0.5
    x = (base.unsqueeze(1) + spread).flatten(0, 1)
    x_adv = base[:20] + 0.02 * torch.randn(20, width, generator=generator(3))
    found = Purifier(model, Noise(sigma), thetas, x)
    exact_model = BayesianModel(nn.Linear(width, 3).double(), Categorical())
    exact = Purifier(exact_model, Noise(sigma), thetas.double(), x.double())
    torch.testing.assert_close(
        found(x_adv).probs.double(), exact(x_adv.double()).probs, rtol=0, atol=3e-6
    )
    ours, theirs = found.diagnose(x_adv), exact.diagnose(x_adv.double())
    torch.testing.assert_close(ours.log_evidence, theirs.log_evidence, rtol=1e-6, atol=2e-4)
    gradients = []
    for purifier, at in ((found, x_adv), (exact, x_adv.double())):
        at = at.clone().requires_grad_()
        gradients.append(
            torch.autograd.grad(nll(purifier(at), torch.zeros(20, dtype=torch.int64)).sum(), at)[
                0
            ].double()
        )
    cosine = torch.nn.functional.cosine_similarity(*gradients)
    assert float(cosine.min()) > 0.999


def test_the_leading_terms_are_what_bounds_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BayesianModel(nn.Linear(784, 2), Categorical())
    x = torch.rand(300, 784, generator=generator(1))
    x[150:] = x[:150]
    x[150:, 0] += 0.04  # pairs that differ in the one feature that the model looks at
    x_adv = x[:50] + 0.02 * torch.randn(50, 784, generator=generator(3))
    theta = torch.zeros(1, model.num_params)
    theta[0, 0], theta[0, -1] = 200.0, 100.0
    exact_model = BayesianModel(nn.Linear(784, 2).double(), Categorical())
    exact = Purifier(exact_model, Noise(0.02), theta.double(), x.double())(x_adv.double()).probs
    # float32 products at any sigma
    monkeypatch.setattr("advbayes.purification.purifier._TOLERATED", math.inf)
    purifier = Purifier(model, Noise(0.02), theta, x)
    corrected = float((purifier(x_adv).probs - exact).abs().max())
    monkeypatch.setattr("advbayes.purification.sweep._LEADING", 1)
    plain = float((purifier(x_adv).probs - exact).abs().max())
    assert corrected < 1e-5
    assert plain > 5e-4 or path == "at_once"  # which has nothing to correct


@pytest.mark.parametrize("update", ["online", "offline"])
@pytest.mark.parametrize("name", ["noise", "one_step"])
def test_float32_moments_are_those_of_float64(name: str, update: str) -> None:
    """Means far from zero and queries far from the centres: what cancels must not be what was
    rounded."""
    _, thetas, x, _ = setting(Gaussian(0.3), 1)
    thetas[:, -1] += 50.0  # the last bias
    x_adv = torch.cat([randn(20, WIDTH, seed=3), 30.0 + randn(20, WIDTH, seed=4)])
    narrow = BayesianModel(mlp(WIDTH, 1, hidden=(8,)), Gaussian(0.3))
    purifier = Purifier(narrow, CHANNELS[name](learned()), thetas.float(), x.float(), update)
    found, (wanted, _) = purifier(x_adv.float()), oracle(purifier, x_adv.float().double())
    torch.testing.assert_close(found.mean.double(), wanted.mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.variance.double(), wanted.variance, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("update", ["online", "offline"])
@pytest.mark.parametrize("name", ["noise", "one_step"])
def test_float32_keeps_a_small_variance_of_means_far_apart(name: str, update: str) -> None:
    """With and without a gradient: a scale of 0.1 beside means from -100 to 100."""
    model = BayesianModel(nn.Linear(1, 1), Gaussian(0.1))
    thetas = torch.tensor([[100.0, 0.0], [100.01, 0.0]])
    channel = {"noise": Noise(0.001), "one_step": AttackChannel(one_step(L2(0.002)), 0.001)}[name]
    x = torch.linspace(-1.0, 1.0, 50).unsqueeze(1)
    purifier = Purifier(model, channel, thetas, (x, torch.zeros(50)), update)
    x_adv = torch.linspace(-0.95, 0.95, 7).unsqueeze(1)
    wanted = oracle(purifier, x_adv.double())[0].variance
    for asked in (x_adv, x_adv.clone().requires_grad_()):
        variance = purifier(asked).variance.detach().double()
        torch.testing.assert_close(variance, wanted, rtol=1e-4, atol=0)


def test_a_density_found_without_a_gradient_does_not_take_it_from_the_next() -> None:
    model, thetas, x, y = setting(Gaussian(0.3), 1)
    purifier = Purifier(model, CHANNELS["one_step"](learned()), thetas, (x, y))
    at = randn(5, WIDTH, seed=3).requires_grad_()
    prediction = purifier(at)
    with torch.no_grad():
        prediction.log_prob(y[:5])
    found, wanted = (
        torch.autograd.grad(p.log_prob(y[:5]).sum(), at)[0] for p in (prediction, purifier(at))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", list(CHANNELS))
def test_kept_blocks_give_the_gradient_of_blocks_computed_again(
    name: str, dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "at_once":
        pytest.skip("has no blocks")
    # Many small blocks, the nearest points in the last ones, so that the level rises from block to
    # block.
    monkeypatch.setattr("advbayes.purification.banks._TILE", 0)
    monkeypatch.setattr("advbayes.purification.banks.FEWEST_ROWS", 32)
    for likelihood, outputs in ((Categorical(), 3), (Gaussian(0.3), 1)):
        model, thetas, x, y = setting(likelihood, outputs, num=130, dtype=dtype)
        x = x[x.norm(dim=1).argsort(descending=True)]
        channel = CHANNELS[name](learned(num_classes=3 if outputs == 3 else None, dtype=dtype))
        for given in (channel, Unstructured(channel)):
            purifier = Purifier(model, given, thetas, (x, y))
            at = (0.3 * randn(7, WIDTH, seed=3).to(dtype)).requires_grad_()
            gradients = []
            for limit in (0, 1 << 25):
                monkeypatch.setattr("advbayes.purification.sweep.KEPT", limit)
                value = nll(purifier(at), y[:7]).sum()
                gradients += [
                    torch.autograd.grad(value, at, retain_graph=True)[0] for _ in range(2)
                ]
            again, _, kept, twice = gradients
            assert torch.equal(kept, twice)  # a backward pass leaves what it reads
            size = float(again.abs().max())
            torch.testing.assert_close(
                kept, again, rtol=0, atol=size * (1e-5 if dtype == torch.float32 else 1e-12)
            )


def test_blocks_are_kept_for_the_whole_batch_or_not_at_all(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "at_once":
        pytest.skip("has no blocks")
    model, thetas, x, y = setting(Categorical(), 3)
    purifier = Purifier(model, Noise(0.4), thetas, (x, y))
    kept = []

    def spy(*arguments: object, keep: bool = False, **keywords: object) -> object:
        kept.append(keep)
        return sweep(*arguments, keep=keep, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr("advbayes.purification.sweep.sweep", spy)
    monkeypatch.setattr("advbayes.purification.sweep.KEPT", 600 * len(x))
    purifier(randn(600, WIDTH).requires_grad_())  # two blocks of queries
    purifier(randn(601, WIDTH).requires_grad_())
    purifier(randn(600, WIDTH))
    assert kept == [True, True, False, False, False, False]


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 30), (torch.float64, 300)])
@pytest.mark.parametrize("num", [5, 600_000])
def test_how_wrong_a_purified_answer_can_be(dtype: torch.dtype, digits: int, num: int) -> None:
    """Its NLL is the model's up to what the tables can hold, and finite beyond."""
    net = nn.Linear(1, 2, bias=False, dtype=dtype)
    model = BayesianModel(net, Categorical())
    thetas, most = torch.tensor([[1.0, 0.0]], dtype=dtype), digits * math.log(10)
    for size in (10.0, 60.0, most, 2 * most) if num < 1000 else (60.0, 2 * most):
        x = torch.full((num, 1), size, dtype=dtype)
        purified = Purifier(model, Noise(0.1), thetas, reference=(x, torch.zeros(num).long()))
        query = x[:1].clone().requires_grad_()
        value = -purified(query).log_prob(torch.tensor([1]))
        assert float(value.detach()) == pytest.approx(min(size, most), rel=1e-4)
        (gradient,) = torch.autograd.grad(value.sum(), query)
        assert bool(gradient.isfinite().all())


def test_saturated_gradients_point_the_right_way_in_float32() -> None:
    """Where the prediction is certain to 1e-20, the gradient of the likelihood is tiny but no
    rounding noise."""
    model = BayesianModel(nn.Linear(2, 2), Categorical())
    theta = torch.tensor([[20.0, 0.0, -20.0, 0.0, 0.0, 0.0]])
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.2]])
    at = torch.tensor([[0.9, 0.3]], requires_grad=True)
    for loss in (nll, margin):
        (gradient,) = torch.autograd.grad(
            loss(Purifier(model, Noise(0.25), theta, x)(at), torch.tensor([0])).sum(), at
        )
        direction = gradient / gradient.norm()
        away = (x[1] - x[0]) / (x[1] - x[0]).norm()
        torch.testing.assert_close(direction[0], away, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("width", [1, 784, 3072])
@pytest.mark.parametrize("distance", [1e2, 1e6, 1e15, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_queries_are_answered_flagged_and_never_nan(
    width: int, distance: float, dtype: torch.dtype
) -> None:
    model = BayesianModel(nn.Linear(width, 3).to(dtype), Categorical())
    thetas = 0.1 * torch.randn(2, model.num_params, generator=generator(0)).to(dtype)
    x = torch.rand(50, width, generator=generator(1)).to(dtype)
    channel = Mixture([0.5, 0.5], [Noise(0.3), AttackChannel(one_step(L2(1.0)), 0.2)])
    purifier = Purifier(model, channel, thetas, x)
    at = (
        x[:4] + distance * torch.randn(4, width, generator=generator(2)).sign().to(dtype)
    ).requires_grad_()
    prediction = purifier(at)
    assert bool(torch.isfinite(prediction.logits).all())
    for loss in (nll, margin):
        (gradient,) = torch.autograd.grad(
            loss(prediction, torch.tensor([0, 1, 2, 0])).sum(), at, retain_graph=True
        )
        assert bool(torch.isfinite(gradient).all())
    diagnosis = purifier.diagnose(at.detach())
    assert bool(diagnosis.out_of_support.all())
    for value in vars(diagnosis).values():
        assert bool(torch.isfinite(value).all())
    assert not bool(purifier.diagnose(x[:4]).out_of_support.any())


# --- diagnostics --------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["online", "offline"])
def test_diagnosis_is_what_it_says(update: str) -> None:
    model, thetas, x, y = setting(Categorical(), 3)
    channel = CHANNELS["mixture"](learned())
    x_adv = randn(5, WIDTH, seed=3)
    # (S, N, B)
    log_p = torch.stack(
        [channel.density(model.at(theta), x, y).log_prob(x_adv) for theta in thetas]
    )
    evidence = log_p.logsumexp(1)
    shares = (
        evidence.softmax(0) if update == "online" else torch.full_like(evidence, 1 / len(thetas))
    )
    weights = (log_p.softmax(1) * shares.unsqueeze(1)).sum(0)  # (N, B)
    found = Purifier(model, channel, thetas, (x, y), update).diagnose(x_adv)
    torch.testing.assert_close(
        found.log_evidence,
        log_p.flatten(0, 1).logsumexp(0) - math.log(3 * len(x)),
        rtol=1e-10,
        atol=0,
    )
    torch.testing.assert_close(found.ess_reference, 1 / weights.square().sum(0), rtol=1e-9, atol=0)
    torch.testing.assert_close(found.ess_theta, 1 / shares.square().sum(0), rtol=1e-9, atol=0)
    nearest = Purifier(model, Noise(0.4), thetas, (x, y), update).diagnose(x_adv)
    distance, index = torch.cdist(x_adv, x).min(1)
    assert torch.equal(nearest.nearest, index)
    torch.testing.assert_close(nearest.distance, distance, rtol=1e-6, atol=0)


# --- where the tables are -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["noise", "nested"])
def test_from_disk_and_saved_answers_are_the_same(name: str, tmp_path: Path) -> None:
    for likelihood, outputs in ((Categorical(), 3), (Gaussian(0.3), 1)):
        model, thetas, x, y = setting(likelihood, outputs, num=700)
        channel = CHANNELS[name](learned(num_classes=3 if outputs == 3 else None))
        x_adv = randn(5, WIDTH, seed=3)
        in_memory = Purifier(model, channel, thetas, (x, y))
        folder = tmp_path / f"{name}-{outputs}"
        on_disk = Purifier(model, channel, thetas, (x, y), folder=folder / "tables")
        assert in_memory.store.folder is None
        assert on_disk.store.folder == folder / "tables"
        on_disk.save(folder / "a")
        in_memory.save(folder / "b")
        answers = []
        for purifier in (
            in_memory,
            on_disk,
            Purifier.load(folder / "a"),
            Purifier.load(folder / "b", memory_limit=1),
        ):
            at = x_adv.clone().requires_grad_()
            value = nll(purifier(at), y[:5])
            answers.append((value.detach(), torch.autograd.grad(value.sum(), at)[0]))
            diagnosis = purifier.diagnose(x_adv)
            assert torch.equal(diagnosis.nearest, in_memory.diagnose(x_adv).nearest)
        for value, gradient in answers[1:]:
            torch.testing.assert_close(value, answers[0][0], rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(gradient, answers[0][1], rtol=1e-9, atol=1e-12)


def test_tables_beyond_the_limit_go_to_a_folder_that_is_cleaned_up() -> None:
    model = BayesianModel(nn.Linear(300, 3), Categorical())
    x = torch.rand(5000, 300)
    thetas = torch.randn(2, model.num_params)
    purifier = Purifier(model, Noise(0.5), thetas, x, memory_limit=3_000_000)
    folder = purifier.store.folder
    assert folder is not None
    assert (folder / "centres-0.table").stat().st_size == 6_000_000
    whole = Purifier(model, Noise(0.5), thetas, x)
    assert whole.store.folder is None
    torch.testing.assert_close(purifier(x[:3]).probs, whole(x[:3]).probs)
    del purifier
    assert not folder.exists()


@pytest.mark.parametrize("kind", [Purifier, SimulatedPurifier])
def test_a_folder_of_ones_own_outlives_its_purifier(kind: Any, tmp_path: Path) -> None:
    model, thetas, x, y = setting(Categorical(), 3, num=20)
    purifier = kind(model, Noise(0.4), thetas, (x, y), folder=tmp_path / "tables")
    tables = {path.name: path.read_bytes() for path in (tmp_path / "tables").iterdir()}
    assert set(tables) == {"values.table", "centres-0.table"}
    wanted = purifier(x[:3]).probs
    del purifier
    assert {path.name: path.read_bytes() for path in (tmp_path / "tables").iterdir()} == tables
    again = kind(model, Noise(0.4), thetas, (x, y), folder=tmp_path / "tables")
    assert torch.equal(again(x[:3]).probs, wanted)


def test_a_saved_purifier_outlives_its_reader(tmp_path: Path) -> None:
    model, thetas, x, y = setting(Categorical(), 3, num=20)
    Purifier(model, Noise(0.4), thetas, (x, y)).save(tmp_path / "a")
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    for limit in (1, 10**9):  # read from there, and into memory
        loaded = Purifier.load(tmp_path / "a", memory_limit=limit)
        loaded(x[:3])
        del loaded
        assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == files


def test_noise_centres_are_held_once_and_attacks_once_for_each_theta() -> None:
    model, thetas, x, y = setting(Categorical(), 3)
    groups = {
        name: [
            bank.groups
            for bank in Purifier(
                model, CHANNELS[name](learned(num_classes=3)), thetas, (x, y)
            ).store.banks
        ]
        for name in CHANNELS
    }
    assert groups["noise"] == [1]
    assert groups["one_step"] == [3]
    assert groups["learned"] == [1]
    assert groups["mixture"] == [1, 3]
    # then the labels are each theta's own
    unlabelled = Purifier(model, learned(num_classes=3), thetas, x)
    assert [bank.groups for bank in unlabelled.store.banks] == [3]


# --- generative references ----------------------------------------------------------------------


def test_a_generative_model_is_a_reference() -> None:
    mixture = pytest.importorskip("sklearn.mixture")
    model, thetas, x, _ = setting(Categorical(), 3)
    fitted = mixture.GaussianMixture(2, random_state=0).fit(x.numpy())
    purifier = Purifier(model, Noise(0.4), thetas, fitted, num_samples=500)
    assert purifier.store.num_reference == 500
    drawn = torch.as_tensor(fitted.sample(500)[0], dtype=FLOAT)
    assert Purifier(model, Noise(0.4), thetas, drawn)(x[:2]).probs.shape == (2, 3)

    class Standard:
        def sample(self, n: int) -> Tensor:
            return randn(n, WIDTH, seed=11)

    found = Purifier(model, Noise(0.4), thetas, Standard(), num_samples=50)(x[:2]).probs
    torch.testing.assert_close(
        found, Purifier(model, Noise(0.4), thetas, randn(50, WIDTH, seed=11))(x[:2]).probs
    )


def test_features_measure_distance_and_are_attacked_through() -> None:
    model, thetas, x, y = setting(Categorical(), 3)
    matrix = randn(WIDTH, 2, seed=6)
    purifier = Purifier(
        model, Noise(0.4), thetas, (x, y), features=lambda points: torch.tanh(points @ matrix)
    )
    at = randn(5, WIDTH, seed=3).requires_grad_()
    log_p = (
        Noise(0.4)
        .density(model.at(thetas[0]), torch.tanh(x @ matrix))
        .log_prob(torch.tanh(at @ matrix))
    )
    wanted = log_p.softmax(0).T @ model.at_each(thetas)(x).probs.mean(0)
    found = purifier(at).probs
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)
    gradients = [
        torch.autograd.grad(p[:, 0].log().sum(), at, retain_graph=True)[0] for p in (found, wanted)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


# --- other thetas -------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["online", "offline"])
def test_with_thetas_is_the_purifier_of_a_fresh_draw(update: str) -> None:
    model, thetas, x, y = setting(Categorical(), 3)
    posterior, channel = MeanField(model, init_scale=0.5), CHANNELS["mixture"](learned())
    purifier = Purifier(model, channel, thetas, (x, y), update, posterior=posterior)
    at = randn(5, WIDTH, seed=3)
    found = purifier.with_thetas(7, generator=generator(8))
    wanted = Purifier(model, channel, posterior.sample(7, generator=generator(8)), (x, y), update)
    assert torch.equal(found(at).probs, wanted(at).probs)
    assert found.with_thetas(2).store.num_thetas == 2  # and so on
    assert not torch.equal(purifier.with_thetas(7)(at).probs, purifier.with_thetas(7)(at).probs)

    class Drawn:
        def sample(self, n: int) -> Tensor:
            return torch.randn(n, WIDTH, dtype=FLOAT)

    drawn = Purifier(model, Noise(0.4), thetas, Drawn(), num_samples=20, posterior=posterior)
    # the same reference points
    assert torch.equal(drawn.with_thetas(2).store.origin, drawn.store.origin)


@pytest.mark.parametrize(
    "options",
    [
        {"index": "faiss", "num_nearest": 7, "left_out": 1e-3},
        {"features": torch.tanh, "memory_limit": 123_456_789, "sharded": True},
    ],
    ids=["index", "features"],
)
def test_a_fresh_draw_keeps_every_setting(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for where its tables lie."""
    if "index" in options:
        pytest.importorskip("faiss")
    asked: list[dict[str, Any]] = []
    original = Purifier.__init__

    def watched(self: Purifier, *given: Any, **more: Any) -> None:
        bound = inspect.signature(original).bind(self, *given, **more)
        bound.apply_defaults()
        asked.append({key: bound.arguments[key] for key in SETTINGS})
        original(self, *given, **more)

    monkeypatch.setattr(Purifier, "__init__", watched)
    model, thetas, x, y = setting(Categorical(), 3)
    x, y = x.repeat(9, 1), y.repeat(9)
    options = options | {"posterior": MeanField(model), "update": "offline"}
    Purifier(model, Noise(0.4), thetas, (x, y), **options).with_thetas(4).with_thetas(2)
    first, second, third = asked
    assert first == second == third
    assert options.items() <= first.items()


SETTINGS = {"model", "channel", "update", "memory_limit", "features", "posterior"}
SETTINGS |= {"index", "num_nearest", "left_out", "sharded"}


def test_with_thetas_needs_the_posterior_of_the_model() -> None:
    model, thetas, x, y = setting(Categorical(), 3)
    with pytest.raises(ValueError, match="with_thetas needs the posterior to draw from"):
        Purifier(model, Noise(0.4), thetas, (x, y)).with_thetas(3)
    other = MeanField(setting(Gaussian(0.3), 1)[0])
    with pytest.raises(ValueError, match="posterior must be over the model's 67 parameters"):
        Purifier(model, Noise(0.4), thetas, (x, y), posterior=other)
    with pytest.raises(ValueError, match="num must be"):
        Purifier(model, Noise(0.4), thetas, (x, y), posterior=MeanField(model)).with_thetas(0)


def test_the_audit_draws_thetas_from_it() -> None:
    model, thetas, x, y = setting(Categorical(), 3)
    posterior = MeanField(model, init_scale=0.05, init=thetas[0])
    thetas = posterior.sample(3, generator=generator(2))
    purifier = Purifier(model, Noise(1.0), thetas, (x, y), posterior=posterior)
    at = randn(24, WIDTH, seed=3)
    verdict = audit(
        purifier,
        (at, purifier(at).probs.argmax(1)),  # type: ignore[attr-defined]
        ball=L2(0.3),
        attacks={"PGD": pgd(L2(0.3), steps=3)},
        tier=Budget(
            num=24, steps=3, restarts=1, random_points=2, queries=5, max_steps=6, max_thetas=40
        ),
        only=("E10", "E14", "E15"),
        support=Support(fresh=purifier.with_thetas(3, generator=generator(1))),
        progress=False,
    )
    for id in ("E10", "E14", "E15"):
        assert verdict[id].status in ("passed", "failed"), verdict[id].line()
    assert verdict["E10"].figures["thetas"] == 20


# --- bad input ----------------------------------------------------------------------------------


class NeedsLabels:
    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return x

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> GaussianDensity:
        return GaussianDensity((0.0,), (x + y.unsqueeze(1),), (0.1,))  # type: ignore[union-attr]


class NoDensity:
    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channel": NoDensity()}, "channel must have a density.*SimulatedPurifier"),
        ({"channel": Noise(0.0)}, "sigma = 0"),
        ({"channel": Mixture([0.5, 0.5], [Noise(0.1), Noise(0.0)])}, "sigma = 0"),
        ({"channel": NeedsLabels(), "reference": randn(9, WIDTH)}, "reference must hold labels"),
        ({"channel": Noise(1e-200)}, "sigma must be large enough"),
        ({"reference": randn(0, WIDTH)}, "at least one point"),
        (
            {"reference": (randn(9, WIDTH), torch.zeros(8, dtype=torch.int64))},
            "one for each of the 9 points",
        ),
        ({"reference": (randn(9, WIDTH),)}, "got 1 parts"),
        ({"reference": torch.full((9, WIDTH), math.nan, dtype=FLOAT)}, "reference must be finite"),
        ({"reference": randn(9, WIDTH).float()}, "must be torch.float64"),
        ({"reference": "mnist"}, "reference must hold a tensor"),
        ({"thetas": randn(3, 17)}, "thetas must be a tensor of shape"),
        ({"thetas": randn(3, 67) * math.nan}, "thetas must be finite"),
        ({"update": "sometimes"}, "update must be one of 'online', 'offline'"),
        ({"memory_limit": 1000}, "memory_limit must be at least .* one block"),
        ({"model": nn.Linear(2, 2)}, "model must be a BayesianModel"),
        ({"num_samples": 0}, "num_samples must be a whole number"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    model, thetas, x, y = setting(Categorical(), 3)
    assert model.num_params == 67
    arguments: dict[str, object] = {
        "model": model,
        "channel": Noise(0.4),
        "thetas": thetas,
        "reference": (x, y),
    }
    with pytest.raises((ValueError, TypeError), match=message):
        Purifier(**(arguments | change))  # type: ignore[arg-type]


def test_bad_queries_are_named(tmp_path: Path) -> None:
    model, thetas, x, y = setting(Categorical(), 3)
    purifier = Purifier(model, Noise(0.4), thetas, (x, y))
    for query, message in (
        (randn(2, 3), r"x must have shape \(B, 4\)"),
        (randn(4), r"x must have shape \(B, 4\)"),
        (randn(2, WIDTH).float(), "x must be torch.float64"),
        (randn(2, WIDTH) * math.inf, "x must be finite"),
    ):
        for call in (purifier, purifier.diagnose):
            with pytest.raises((ValueError, TypeError), match=message):
                call(query)
    with pytest.raises(ValueError, match="saved purifier"):
        Purifier.load(tmp_path)
    with pytest.raises(ValueError, match="save needs a channel with a Gaussian density"):
        Purifier(model, Unstructured(Noise(0.4)), thetas, x).save(tmp_path)
    model, thetas, x, y = setting(Gaussian(0.3), 1)
    prediction = Purifier(model, Noise(0.4), thetas, x)(x[:2])
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        prediction.icdf(torch.tensor(0.0))
    with pytest.raises(ValueError, match="y must have the prediction's shape"):
        prediction.log_prob(randn(3))

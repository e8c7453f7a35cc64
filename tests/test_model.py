"""theta is one flat vector: every parameter once, in order, by name; nets keep what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from advbayes import (
    BayesianModel,
    Categorical,
    Ensemble,
    Gaussian,
    LowRank,
    MeanField,
    Noise,
    PointMass,
    PosteriorPredictive,
    Purifier,
    Samples,
)
from advbayes.networks import conv_net, mlp, with_group_norm
from tests.contracts import seeded


def thetas_for(model: BayesianModel, num: int = 3) -> torch.Tensor:
    return torch.randn(num, model.num_params, generator=seeded(), dtype=model.dtype)


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (mlp(11), (5, 11)),
        (conv_net(), (2, 1, 28, 28)),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)), (3, 2, 8)),
        (
            with_group_norm(
                nn.Sequential(
                    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 3)
                )
            ),
            (2, 3, 8, 8),
        ),
    ],
)
def test_at_is_functional_call(net: nn.Module, shape: tuple[int, ...]) -> None:
    model = BayesianModel(
        net, Categorical() if net(torch.zeros(shape)).shape[1] > 1 else Gaussian(1.0)
    )
    x = torch.randn(shape, generator=seeded(1))
    for theta in thetas_for(model):
        parts = torch.split(theta, [p.numel() for p in net.parameters()])
        named = {
            name: part.view(p.shape)
            for (name, p), part in zip(net.named_parameters(), parts, strict=True)
        }
        expected = functional_call(net.eval(), named, (x,))
        torch.testing.assert_close(model.output(theta, x)[0], expected, rtol=1e-4, atol=1e-4)
    assert model.num_params == sum(p.numel() for p in net.parameters())


def test_the_user_s_net_is_neither_changed_nor_needed() -> None:
    net = mlp(4)
    before = [p.detach().clone() for p in net.parameters()]
    model = BayesianModel(net, Gaussian(1.0))
    theta = model.initial_theta()
    model.at(theta + 1.0)(torch.zeros(2, 4))
    for p, kept in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, kept)
        assert p.requires_grad
    assert net.training
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert torch.equal(model.initial_theta(), theta)


def test_the_net_is_whole_again_after_an_error() -> None:
    model = BayesianModel(mlp(4), Gaussian(1.0))
    theta = model.initial_theta()
    with pytest.raises(RuntimeError):
        model.at(theta + 1.0)(torch.zeros(2, 5))
    assert torch.equal(model.initial_theta(), theta)


def test_frozen_and_tied_parameters() -> None:
    net = mlp(4)
    net[0].weight.requires_grad_(False)
    assert BayesianModel(net, Gaussian(1.0)).num_params == sum(
        p.numel() for p in net.parameters() if p.requires_grad
    )
    tied = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    model = BayesianModel(tied, Categorical())
    assert model.num_params == 9 + 3 + 3
    x = torch.randn(2, 3, generator=seeded())
    torch.testing.assert_close(model.output(model.initial_theta(), x)[0], tied(x))
    theta = torch.zeros(model.num_params)
    assert bool((model.output(theta, x)[0] == 0).all())


def test_dropout_does_nothing() -> None:
    model = BayesianModel(
        nn.Sequential(nn.Linear(3, 20), nn.Dropout(0.9), nn.Linear(20, 2)), Categorical()
    )
    predict = model.at(model.initial_theta())
    x = torch.randn(4, 3, generator=seeded())
    assert torch.equal(predict(x).logits, predict(x).logits)


def test_at_each_stacks_and_gradients_reach_theta() -> None:
    model = BayesianModel(mlp(4, 3), Categorical())
    thetas = thetas_for(model).requires_grad_()
    x = torch.randn(5, 4, generator=seeded(2))
    each = model.at_each(thetas)(x)
    assert each.batch_shape == (3, 5)
    for row, theta in zip(each.logits, thetas, strict=True):
        torch.testing.assert_close(row, model.at(theta)(x).logits)
    each.logits.square().sum().backward()
    assert bool((thetas.grad != 0).any())


def test_group_norm_has_no_batch_statistics_and_keeps_the_shape() -> None:
    net = nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.Sequential(nn.BatchNorm2d(12)))
    converted = with_group_norm(net, num_groups=5)
    assert [type(m).__name__ for m in converted.modules() if "Norm" in type(m).__name__] == [
        "GroupNorm"
    ] * 2
    assert converted[1].num_groups == 4
    assert isinstance(net[1], nn.BatchNorm2d)
    assert converted(torch.zeros(2, 3, 5, 5)).shape == net(torch.zeros(2, 3, 5, 5)).shape
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=0.1, affine=False)).double()
    for wide in (with_group_norm(net.double()), with_group_norm(plain)):
        assert wide(torch.zeros(1, 3, 5, 5, dtype=torch.float64)).dtype == torch.float64
    assert wide[1].eps == 0.1
    for features, most, groups in ((8, 8, 8), (8, 7, 4), (7, 8, 7), (7, 6, 1), (32, 8, 8)):
        assert with_group_norm(nn.BatchNorm1d(features), most).num_groups == groups  # type: ignore[union-attr]
    assert not list(wide[1].parameters())


def test_warm_starts() -> None:
    trained = mlp(4)
    with torch.no_grad():
        for p in trained.parameters():
            p.add_(1.0)
    model = BayesianModel(mlp(4), Gaussian(0.5, learned=True))
    for posterior in (
        MeanField(model, init=trained),
        PointMass(model, init=trained),
        LowRank(model, init=trained),
    ):
        torch.testing.assert_close(posterior.mean, model.theta_of(trained))
    assert float(model.theta_of(trained)[-1]) == pytest.approx(-0.6931, abs=1e-4)


def test_low_rank_is_its_dense_gaussian() -> None:
    model = BayesianModel(nn.Linear(3, 2).double(), Categorical())
    posterior = LowRank(model, rank=2, init_scale=0.3)
    factor, diagonal = (
        posterior.factor.detach(),
        torch.nn.functional.softplus(posterior.rho.detach()),
    )
    covariance = factor @ factor.T + torch.diag(diagonal**2)
    dense = torch.distributions.MultivariateNormal(posterior.mean, covariance)
    prior = torch.distributions.MultivariateNormal(
        torch.zeros(8).double(), 0.49 * torch.eye(8).double()
    )
    torch.testing.assert_close(
        posterior.kl(0.7).detach(),
        torch.distributions.kl_divergence(dense, prior),
        rtol=1e-10,
        atol=0,
    )
    draws = posterior.sample(100_000, generator=seeded())
    torch.testing.assert_close(
        torch.cov(draws.T),
        covariance,
        rtol=0,
        atol=6 * float(covariance.abs().max()) * (2 / 100_000) ** 0.5,
    )


def test_ensembles_and_samples_use_their_members_equally() -> None:
    model = BayesianModel(nn.Linear(3, 2), Categorical())
    ensemble = Ensemble(model, num=4)
    assert len({tuple(row.tolist()) for row in ensemble.thetas.detach()}) == 4
    given = Samples(torch.arange(4.0).view(4, 1).expand(4, 8))
    for posterior, members in ((ensemble, ensemble.thetas.detach()), (given, given.thetas)):
        assert torch.equal(posterior.sample(4, generator=seeded()), members)
        counts = [
            int((posterior.sample(10, generator=seeded(1)) == member).all(1).sum())
            for member in members
        ]
        assert sorted(counts) == [2, 2, 3, 3]


def test_what_is_given_is_copied() -> None:
    """Who goes on with a tensor, as a training does, changes nothing that was made of it."""
    model = BayesianModel(nn.Linear(3, 2), Categorical())
    theta = torch.randn(4, model.num_params, generator=seeded(0))
    x = torch.ones(2, 3)
    reference = torch.randn(9, 3, generator=seeded(1))
    made: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "predictive": lambda t, _: PosteriorPredictive(model, t),
        "purifier": lambda t, r: Purifier(model, Noise(0.5), t, r),
        "mean field": lambda t, _: MeanField(model, 0.1, t[0]),
        "point": lambda t, _: PointMass(model, t[0]),
        "ensemble": lambda t, _: Ensemble(model, 4, init=t),
        "samples": lambda t, _: Samples(t),
        "low rank": lambda t, _: LowRank(model, 2, init=t[0]),
    }
    for name, make in made.items():
        given = theta.clone(), reference.clone()
        one = make(*given)

        def answer(one: Any = one, name: str = name) -> Tensor:
            if name in ("predictive", "purifier"):
                return one(x).probs  # type: ignore[no-any-return]
            return one.sample(8, generator=seeded())  # type: ignore[no-any-return]

        before = answer().clone()
        for tensor in given:
            tensor.fill_(7.0)
        assert torch.equal(before, answer()), name


@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
def test_instance_norm_is_refused_with_running_statistics_alone(kind: type[nn.Module]) -> None:
    x = torch.randn(2, 3, *[4] * int(kind.__name__[-2]), generator=seeded())

    def net(**options: bool) -> nn.Module:
        return nn.Sequential(kind(3, affine=True, **options), nn.Flatten(), nn.LazyLinear(2))

    plain = net()
    plain(x)
    model = BayesianModel(plain, Categorical())
    torch.testing.assert_close(
        model.at(model.initial_theta())(x).logits.softmax(1), plain(x).softmax(1)
    )
    running = net(track_running_stats=True)
    running(x)
    with pytest.raises(ValueError, match="free of batch statistics, got layer '0': InstanceNorm"):
        BayesianModel(running, Categorical())

"""Purifying by simulation: converges to the exact answer where there is one, and works where there
is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    Gaussian,
    Mixture,
    Noise,
    nll,
    one_step,
)
from advbayes.purification import Purifier, SimulatedPurifier, choose_bandwidth
from advbayes.types import Predictor
from tests.oracles import FLOAT, LinearGaussian, generator, randn

SM2 = LinearGaussian()


class BlackBox:
    """SM-2's channel as a simulator: it can be asked for x' and for nothing else."""

    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return (1 + SM2.eps) * x + SM2.sd * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def test_converges_to_the_closed_form() -> None:
    model = BayesianModel(nn.Linear(1, 1, bias=False).to(FLOAT), Gaussian(SM2.sy))
    thetas = SM2.mu + SM2.v**0.5 * randn(200, 1, seed=1)
    x_adv = torch.tensor([[-1.5], [0.4], [2.0]], dtype=FLOAT)
    theta = thetas[:20].mean()
    for num, draws, bandwidth in ((100, 1, 0.8), (10_000, 4, 0.2)):
        reference = SM2.sx * randn(num, 1, seed=2)
        purifier = SimulatedPurifier(
            model, BlackBox(), thetas[:20], reference, num_simulations=draws, bandwidth=bandwidth
        )
        # the kernel adds its variance to the channel's: then x given x' is N(lam x', var)
        slope = 1 + SM2.eps
        lam = slope * SM2.sx**2 / ((slope * SM2.sx) ** 2 + SM2.sd**2 + bandwidth**2)
        var = SM2.sx**2 * (1 - slope * lam)
        # draws of one x count as one
        num_effective = purifier.diagnose(x_adv).ess_reference / draws
        standard_error = theta.abs() * (var / num_effective).sqrt()
        away = purifier(x_adv).mean - theta * lam * x_adv[:, 0]
        assert bool((away.abs() < 4.9 * standard_error).all())
    assert float(standard_error.max()) < 0.05
    assert abs(lam - SM2.lam) < 0.01  # in the end the closed form itself


def test_equals_the_purifier_of_the_kernel_when_the_channel_is_still() -> None:
    """sigma = 0 has no density; with a kernel of width h it is purified as if it had noise h."""
    model = BayesianModel(nn.Linear(3, 3).to(FLOAT), Categorical())
    thetas, x = 0.7 * randn(4, model.num_params), randn(200, 3, seed=1)
    y = torch.randint(0, 3, (200,), generator=generator(2))
    x_adv = randn(5, 3, seed=3)
    attack = one_step(L2(0.8))
    found = SimulatedPurifier(model, AttackChannel(attack, 0.0), thetas, (x, y), bandwidth=0.3)
    wanted = Purifier(model, AttackChannel(attack, 0.3), thetas, (x, y))
    torch.testing.assert_close(found(x_adv).probs, wanted(x_adv).probs, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        found.diagnose(x_adv).ess_reference, wanted.diagnose(x_adv).ess_reference
    )
    at = x_adv.clone().requires_grad_()
    gradients = [torch.autograd.grad(nll(p(at), y[:5]).sum(), at)[0] for p in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_a_mixture_that_asks_theta_at_some_points_alone(tmp_path: Path) -> None:
    """Whichever component the first point meets: each centre is x or its own theta's attack."""
    model = BayesianModel(nn.Linear(3, 3).to(FLOAT), Categorical())
    thetas, x = randn(4, model.num_params), randn(20, 3, seed=1)
    y = torch.randint(0, 3, (20,), generator=generator(2))
    attack = one_step(L2(0.8))
    channel = Mixture([0.5, 0.5], [Noise(0.0), AttackChannel(attack, 0.0)])
    for seed in range(8):
        made = SimulatedPurifier(
            model, channel, thetas, (x, y), bandwidth=0.3, seed=seed, folder=tmp_path / str(seed)
        )
        (bank,) = made.purifier.store.gaussians
        centres = bank.centres.block(slice(0, 4), slice(0, 20))
        moved = torch.stack([attack(model.at(theta), x, y) for theta in thetas])
        attacked = torch.isclose(centres, moved, rtol=0, atol=1e-12).all(-1)
        assert attacked.sum(1).tolist() == [10] * 4
        assert bool((attacked | (centres == x).all(-1)).all())


def test_effective_sample_size_grows_with_the_bandwidth_and_runs_repeat() -> None:
    model = BayesianModel(nn.Linear(3, 3).to(FLOAT), Categorical())
    thetas, x = randn(2, model.num_params), randn(300, 3, seed=1)
    sizes = [
        float(
            SimulatedPurifier(model, Noise(0.2), thetas, x, bandwidth=h)
            .diagnose(x[:20])
            .ess_reference.mean()
        )
        for h in (0.05, 0.3, 2.0)
    ]
    assert sizes[0] < sizes[1] < sizes[2]
    first, again, other = (
        SimulatedPurifier(model, Noise(0.2), thetas, x, num_simulations=2, seed=s)(x[:3]).probs
        for s in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_bandwidth_of_a_gaussian_is_near_its_rule() -> None:
    """Silverman's rule for a Gaussian in one dimension: 1.06 s N^(-1/5)."""
    for num in (500, 1500):
        x = randn(num, 1, seed=num)
        found = choose_bandwidth(Noise(0.0), None, x, generator=generator(0))  # type: ignore[arg-type]
        assert 0.4 < found / (1.06 * num**-0.2) < 2.0


def test_bad_arguments_are_named() -> None:
    model = BayesianModel(nn.Linear(3, 3).to(FLOAT), Categorical())
    thetas, x = randn(2, model.num_params), randn(30, 3)
    for settings, message in (
        ({"bandwidth": 0.0}, "bandwidth must be a finite number > 0"),
        ({"num_simulations": 0}, "num_simulations must be"),
        ({"reference": x[:1]}, "at least two points"),
        ({"reference": x[:1].repeat(9, 1)}, "different x'"),
        ({"channel": 3}, "channel must have sample"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            SimulatedPurifier(
                **(
                    {"model": model, "channel": Noise(0.0), "thetas": thetas, "reference": x}
                    | settings
                )
            )  # type: ignore[arg-type]


@pytest.mark.parametrize("num", [1, 3])
def test_the_bandwidth_is_that_of_as_many_simulations(num: int) -> None:
    """One draw for each pilot, `num` for each of the others."""
    drawn: list[int] = []

    class Counted(BlackBox):
        def sample(self, predict: Predictor, x: Tensor, *rest: Any, **options: Any) -> Tensor:
            drawn.append(len(x))
            return super().sample(predict, x, *rest, **options)

    x = randn(600, 1, seed=4)
    choose_bandwidth(Counted(), None, x, num=num, generator=generator(0))  # type: ignore[arg-type]
    assert drawn == [256] + [344] * num


def test_the_bandwidth_maximises_the_likelihood_and_shrinks_with_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a finer search over the same points, then by the rate N^(-1 / (4 + d))."""
    monkeypatch.setattr("advbayes.purification.simulation._OTHERS", 200)
    x = randn(1000, 2, seed=4)
    order = torch.randperm(1000, generator=generator(0))
    square = torch.cdist(x[order[:256]], x[order[256:456]]).square()
    grid = torch.linspace(-4, 2, 4000, dtype=torch.float64).exp()
    scores = [(square * (-0.5 / h**2)).logsumexp(1).mean() - 2 * h.log() for h in grid]
    best = float(grid[int(torch.stack(scores).argmax())])
    found = choose_bandwidth(Noise(0.0), None, x, generator=generator(0))  # type: ignore[arg-type]
    assert found == pytest.approx(best * (200 / 1000) ** (1 / 6), rel=0.04)


def test_options_reach_the_purifier_within(tmp_path: Path) -> None:
    model = BayesianModel(nn.Linear(3, 3).to(FLOAT), Categorical())
    thetas = randn(2, model.num_params)

    class Standard:
        def sample(self, n: int) -> Tensor:
            return randn(n, 3, seed=11)

    options: dict[str, Any] = {"bandwidth": 0.3, "num_simulations": 4, "num_samples": 30}
    made = SimulatedPurifier(
        model, Noise(0.2), thetas, Standard(), "offline", folder=tmp_path / "tables", **options
    )
    store = made.purifier.store
    assert (made.purifier.update, store.num_reference, store.num_thetas) == ("offline", 30, 2)
    assert store.folder == tmp_path / "tables"
    weights = [bank.log_weight for bank in store.banks]  # type: ignore[union-attr]
    assert weights == pytest.approx([-math.log(4)] * 4)
    with pytest.raises(ValueError, match="memory_limit must be at least"):
        SimulatedPurifier(model, Noise(0.2), thetas, Standard(), memory_limit=1, **options)

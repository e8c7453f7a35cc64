"""The parts of `fit`: Adam, batches, gradients without autograd, programs that change nothing where a step is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Ensemble,
    Gaussian,
    LowRank,
    MeanField,
    Noise,
    NonFiniteError,
    PointMass,
    Samples,
    fit,
    one_step,
)
from advbayes.adam import Adam
from advbayes.batches import Batch
from advbayes.dense import Dense
from advbayes.objectives import _AttackedTheta
from advbayes.steps import CompiledStep, eager_step
from tests.contracts import seeded

X = torch.randn(40, 5, generator=seeded(1))
Y = torch.randn(40, generator=seeded(2))


def regressor(*, activation: nn.Module | None = None, bias: bool = True) -> BayesianModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 8, bias=bias), activation or nn.ReLU(), nn.Linear(8, 1))
    return BayesianModel(net, Gaussian(0.5))


# --- Adam --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_adam_is_torch_s(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    adam, reference = Adam([ours], 1e-2), torch.optim.Adam([theirs], lr=1e-2)
    if not fused:
        monkeypatch.delattr(torch, "_fused_adam_")
    for k in range(5):
        gradient = torch.randn(7, generator=seeded(k))
        adam.step([gradient], lr=1e-2 * 0.9**k)
        reference.param_groups[0]["lr"] = 1e-2 * 0.9**k
        theirs.grad = gradient
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


# --- Gradients without autograd ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.Sigmoid()])
@pytest.mark.parametrize("bias", [True, False])
def test_a_dense_net_s_gradients_are_autograd_s(activation: nn.Module, bias: bool) -> None:
    model = regressor(activation=activation, bias=bias)
    dense = model.dense(X)
    assert dense is not None
    theta = model.initial_theta().requires_grad_()
    x = X.clone().requires_grad_()
    weight = torch.randn(40, 1, generator=seeded(3))
    output, _ = model.output(theta, x)
    of_theta, of_x = torch.autograd.grad(output, (theta, x), weight)
    parts = model.parts(theta.detach())
    values = dense.values(X, parts)
    flat = torch.full_like(of_theta, math.nan)
    dense.gradient(values, weight, parts, model.parts(flat))
    torch.testing.assert_close(values[-1], output.detach())
    torch.testing.assert_close(flat, of_theta, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dense.input_gradient(values, weight, parts), of_x, rtol=1e-4, atol=1e-5)


def test_nets_with_anything_else_are_not_dense() -> None:
    tied = nn.Linear(5, 5)
    for net in (nn.Sequential(tied, tied), nn.Sequential(nn.Linear(5, 5), nn.GELU()), nn.Linear(5, 1)):
        assert Dense.of(net, list(net.parameters())) is None
    frozen = nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 1))
    assert BayesianModel(frozen, Gaussian(1.0)).dense(X) is None


def test_a_hook_on_a_dense_net_is_still_called() -> None:
    model, seen = regressor(), []
    model.net[0].register_forward_hook(lambda layer, inputs, output: seen.append(output))
    _AttackedTheta(model, model.initial_theta()).input_gradient(one_step(L2(1.0)).stages[0][0], X, Y)
    fit(model, MeanField(model), Noise(0.0), (X, Y), steps=2)
    assert len(seen) >= 3


# --- Compiled steps ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_step_that_is_not_finite_changes_nothing() -> None:
    model = regressor()
    posterior = MeanField(model)
    adam = Adam(posterior.parameters(), 1e-2)
    step = CompiledStep(model, posterior, Noise(0.0), ChannelELBO(40), adam)
    rows = torch.arange(16)
    assert step(Batch(X, Y, rows), seeded(0), 1e-2).is_finite()
    held = [tensor.clone() for tensor in step.state]
    broken = X.clone()
    broken[3] = math.nan
    assert not step(Batch(broken, Y, rows), seeded(1), 1e-2).is_finite()
    assert all(torch.equal(a, b) for a, b in zip(step.state, held, strict=True))
    # And the next good one goes on as if the bad one had never been.
    assert step(Batch(X, Y, rows), seeded(2), 1e-2).is_finite()
    assert len(step.programs) == 1
    other = MeanField(model)
    eager = eager_step(model, other, Noise(0.0), ChannelELBO(40), Adam(other.parameters(), 1e-2))
    for seed in (0, 2):
        eager(Batch(X, Y, rows), seeded(seed), 1e-2)
    torch.testing.assert_close(posterior.mu, other.mu, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(posterior.rho, other.rho, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_compiled_run_stops_after_ten_bad_steps_at_its_last_finite_state() -> None:
    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((5,), 1e30))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).square()

    model = BayesianModel(Overflowing(), Gaussian(1.0))
    posterior = MeanField(model)
    with pytest.raises(NonFiniteError, match="the cause is the likelihood"):
        fit(model, posterior, Noise(0.0), (X, Y), steps=20, compile=True)
    assert torch.equal(posterior.mu.detach(), model.initial_theta())


# --- Batches ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, Y, strict=True))


def test_a_stream_trains_when_its_size_is_told() -> None:
    model = regressor()
    loader = DataLoader(Stream(), batch_size=8)
    result = fit(model, MeanField(model), Noise(0.0), loader, objective=ChannelELBO(40), epochs=2)
    assert result.steps == 10
    with pytest.raises(ValueError, match=r"objective=ChannelELBO\(num_data\)"):
        fit(model, MeanField(model), Noise(0.0), loader, epochs=2)


def test_a_loader_s_batches_are_checked_but_the_net_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = regressor()
    probes = []
    output = BayesianModel.output
    monkeypatch.setattr(BayesianModel, "output", lambda self, theta, x: probes.append(len(x)) or output(self, theta, x))
    fit(model, MeanField(model), Noise(0.0), DataLoader(TensorDataset(X, Y), batch_size=8), epochs=2)
    assert probes.count(1) == 1
    bad = Y.clone()
    bad[20] = math.nan
    with pytest.raises(ValueError, match="y must be finite"):
        fit(model, MeanField(model), Noise(0.0), DataLoader(TensorDataset(X, bad), batch_size=8), epochs=1)


def test_a_loader_of_something_else_is_refused() -> None:
    model = regressor()
    with pytest.raises(TypeError, match=r"pairs \(x, y\)"):
        fit(model, MeanField(model), Noise(0.0), DataLoader(TensorDataset(X), batch_size=8), steps=1)


# --- Bad input, good words --------------------------------------------------------------------------------------------


def test_classes_instead_of_instances_are_refused() -> None:
    model = regressor()
    with pytest.raises(TypeError, match="likelihood must be one such as"):
        BayesianModel(nn.Linear(2, 2), Categorical)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="objective must be a ChannelELBO"):
        fit(model, MeanField(model), Noise(0.0), (X, Y), objective=ChannelELBO, steps=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="channel must have"):
        fit(model, MeanField(model), AttackChannel, (X, Y), steps=1)  # type: ignore[arg-type]


def test_lazy_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="lazy layer '0'"):
        BayesianModel(nn.Sequential(nn.LazyLinear(3)), Categorical())


def test_posteriors_say_what_they_are() -> None:
    model = regressor()
    assert repr(MeanField(model)) == "MeanField(num_params=57)"
    assert repr(PointMass(model)) == "PointMass(num_params=57)"
    assert repr(LowRank(model, rank=2)) == "LowRank(rank=2, num_params=57)"
    assert repr(Ensemble(model, num=3)) == "Ensemble(num=3, num_params=57)"
    assert repr(Samples(torch.zeros(4, 57))) == "Samples(num=4, num_params=57)"

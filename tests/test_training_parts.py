"""The parts of `fit`: its step against the bound and torch's Adam, batches, what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
    LogitPairing,
    LowRank,
    MeanField,
    Noise,
    PointMass,
    Samples,
    fit,
    one_step,
)
from advbayes.seeds import generator_for
from advbayes.training import State
from advbayes.training.batches import TensorBatches
from tests.contracts import seeded

X = torch.randn(40, 5, generator=seeded(1))
Y = torch.randn(40, generator=seeded(2))


def regressor(*, activation: nn.Module | None = None, bias: bool = True) -> BayesianModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 8, bias=bias), activation or nn.ReLU(), nn.Linear(8, 1))
    return BayesianModel(net, Gaussian(0.5))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_may_be_begun_from_more_than_once(steps: int) -> None:
    state, ends = State(), []
    if steps:
        model = regressor()
        state = fit(model, MeanField(model), Noise(0.1), (X, Y), steps=steps, batch_size=8).state
    for _ in range(2):
        model = regressor()
        posterior = MeanField(model)
        result = fit(model, posterior, Noise(0.1), (X, Y), steps=4, batch_size=8, state=state)
        assert len(result.history["bound"]) == 4
        assert state.step == len(state.history["bound"]) == steps
        ends.append(posterior.mean)
    assert torch.equal(*ends)


@pytest.mark.parametrize("every", [1, 2, 3, 5, None])
def test_checkpoints_come_when_asked_for_and_stay_as_they_were(every: int | None) -> None:
    """After every k steps and at the end; each of them goes on to the same end."""
    states: list[State] = []
    model = regressor()
    posterior = MeanField(model)
    options = {"batch_size": 8, "lr": 0.1}
    result = fit(
        model,
        posterior,
        Noise(0.1),
        (X, Y),
        steps=5,
        checkpoint=states.append,
        checkpoint_every=every,
        **options,  # type: ignore[arg-type]
    )
    wanted = [step for step in range(1, 6) if every and step % every == 0]
    assert [state.step for state in states] == [*wanted, 5]
    assert not result.interrupted
    assert result.steps == 5
    for state in states:
        other = MeanField(model)
        fit(model, other, Noise(0.1), (X, Y), steps=5, state=state, **options)  # type: ignore[arg-type]
        assert torch.equal(other.mu, posterior.mu)
        assert [len(column) for column in state.history.values()] == [state.step] * 6


@pytest.mark.parametrize(("at", "interrupted"), [(1, True), (3, True), (4, False), (9, False)])
def test_a_run_that_is_stopped_says_so_unless_it_was_at_its_end(at: int, interrupted: bool) -> None:
    model, asked = regressor(), iter(range(1, 10))
    result = fit(
        model, MeanField(model), Noise(0.1), (X, Y), steps=4, stop=lambda: next(asked) == at
    )
    assert result.interrupted == interrupted
    assert result.steps == len(result.history["bound"]) == min(at, 4)
    assert f"interrupted={interrupted}" in repr(result)
    assert f"bound={result.history['bound'][-1]:.6g}" in repr(result)


def test_the_history_is_of_the_whole_data_set() -> None:
    """bound = log-likelihood - KL - penalty, each for all N examples; the gradient that of the
    bound over N; seconds grow."""
    model = regressor()
    posterior = MeanField(model)
    before = MeanField(model)
    objective = ChannelELBO(40, penalty=LogitPairing(2.0), kl_weight=0.5)
    history = fit(
        model, posterior, Noise(0.2), (X, Y), objective=objective, steps=3, batch_size=40
    ).history
    for bound, log_likelihood, kl, penalty in zip(
        *(history[name] for name in ("bound", "log_likelihood", "kl", "penalty")), strict=True
    ):
        assert bound == pytest.approx(log_likelihood - 0.5 * kl - penalty, rel=1e-5)
        assert penalty > 0
    assert history["kl"][0] == pytest.approx(float(before.kl(1.0).detach()))
    rows = torch.randperm(40, generator=generator_for(0, "order", 0))
    keyed = generator_for(0, "step", 0)
    first = objective(model, before, Noise(0.2), X[rows], Y[rows], generator=keyed)
    gradients = torch.autograd.grad(first.bound / 40, list(before.parameters()))
    norm = math.hypot(*(float(gradient.norm()) for gradient in gradients))
    assert history["bound"][0] == pytest.approx(float(first.bound.detach()), rel=1e-5)
    assert history["gradient_norm"][0] == pytest.approx(norm, rel=1e-5)
    assert sorted(history["seconds"]) == history["seconds"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("posterior_type", [MeanField, PointMass, LowRank, Ensemble])
def test_the_kl_of_coarse_parameters_is_summed_in_float32(
    posterior_type: type[MeanField], dtype: torch.dtype
) -> None:
    """30,000 parameters: the sum is beyond float16, and LowRank's determinant beyond bfloat16."""

    def model(dtype: torch.dtype) -> BayesianModel:
        return BayesianModel(nn.Linear(300, 100).to(dtype), Categorical())

    coarse, exact = posterior_type(model(dtype)), posterior_type(model(torch.float64))
    exact.load_state_dict({name: value.double() for name, value in coarse.state_dict().items()})
    assert coarse.kl(1.3).item() == pytest.approx(exact.kl(1.3).item(), rel=1e-5)
    small = BayesianModel(nn.Linear(5, 1).to(dtype), Gaussian(0.5))
    posterior = posterior_type(small)
    data = X.to(dtype), Y.to(dtype)
    assert fit(small, posterior, Noise(0.1), data, steps=3, batch_size=8).skipped == 0


# --- A step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("posterior_type", [MeanField, PointMass, LowRank])
def test_fit_is_adam_on_the_bound(posterior_type: type[MeanField], through: bool) -> None:
    """Five steps of `fit` against a loop of five lines: the objective, autograd,
    torch.optim.Adam."""
    model = regressor()
    channel = AttackChannel(one_step(L2(0.5)), 0.1)
    objective = ChannelELBO(40, num_theta=2, kl_weight=0.7, through=through)
    ours, theirs = posterior_type(model), posterior_type(model)
    history = fit(
        model, ours, channel, (X, Y), objective=objective, steps=5, batch_size=8, lr=1e-2, decay=0.5
    ).history
    batches = TensorBatches(X, Y, 8, seed=0)
    reference = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    for step in range(5):
        x, y = batches(step).gathered()[:2]
        terms = objective(model, theirs, channel, x, y, generator=generator_for(0, "step", step))
        reference.zero_grad()
        (-terms.bound / 40).backward()
        reference.param_groups[0]["lr"] = 1e-2 * 0.5 ** (step / 5)
        norm = math.sqrt(
            sum(float(p.grad.square().sum()) for p in theirs.parameters() if p.grad is not None)
        )
        reference.step()
        assert history["bound"][step] == pytest.approx(terms.bound.item(), rel=1e-5)
        assert history["gradient_norm"][step] == pytest.approx(norm, rel=1e-5)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        assert one.grad is None


@pytest.mark.parametrize("posterior_type", [MeanField, PointMass])
def test_a_warm_up_leaves_most_of_the_kl_out_of_the_gradient(
    posterior_type: type[MeanField],
) -> None:
    """Two of five steps against a loop whose objective has 0.03 of the KL's weight, the others
    against one with all of it; the history's bound is the whole one, its norm that of the gradient
    that was followed."""
    model = regressor()
    channel = AttackChannel(one_step(L2(0.5)), 0.1)
    objective = ChannelELBO(40, kl_weight=0.7)
    ours, theirs, cold = posterior_type(model), posterior_type(model), posterior_type(model)
    settings: dict[str, Any] = {"objective": objective, "steps": 5, "batch_size": 8, "lr": 1e-2}
    history = fit(model, ours, channel, (X, Y), warmup=0.4, **settings).history
    without = fit(model, cold, channel, (X, Y), **settings).history
    batches = TensorBatches(X, Y, 8, seed=0)
    reference = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    for step in range(5):
        x, y = batches(step).gathered()[:2]
        followed = replace(objective, kl_weight=0.03 * 0.7 if step < 2 else 0.7)
        keyed = generator_for(0, "step", step)
        terms = followed(model, theirs, channel, x, y, generator=keyed)
        whole = terms.log_likelihood - 0.7 * terms.kl
        reference.zero_grad()
        (-terms.bound / 40).backward()
        norm = math.sqrt(
            sum(float(p.grad.square().sum()) for p in theirs.parameters() if p.grad is not None)
        )
        reference.step()
        assert history["bound"][step] == pytest.approx(whole.item(), rel=1e-5)
        assert history["kl"][step] == pytest.approx(terms.kl.item(), rel=1e-5)
        assert history["gradient_norm"][step] == pytest.approx(norm, rel=1e-5)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert history["bound"][0] == without["bound"][0]
    assert history["gradient_norm"][0] != without["gradient_norm"][0]


@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_training_goes_on_exactly_before_at_and_after_the_end_of_its_warm_up(at: int) -> None:
    model = regressor()
    settings: dict[str, Any] = {"steps": 8, "batch_size": 8, "warmup": 0.5}
    whole, parts = MeanField(model), MeanField(model)
    first = fit(model, whole, Noise(0.1), (X, Y), **settings)
    seen: list[State] = []
    fit(
        model,
        MeanField(model),
        Noise(0.1),
        (X, Y),
        checkpoint=seen.append,
        checkpoint_every=at,
        **settings,
    )
    state = next(state for state in seen if state.step == at)
    rest = fit(model, parts, Noise(0.1), (X, Y), state=state, **settings)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)
    assert rest.history["gradient_norm"] == first.history["gradient_norm"]


def test_without_a_warm_up_nothing_changes_and_a_share_beyond_one_is_refused() -> None:
    model = regressor()
    posteriors = [MeanField(model) for _ in range(3)]
    for posterior, options in zip(posteriors, ({}, {"warmup": 0.0}, {"warmup": 0.1}), strict=True):
        fit(model, posterior, Noise(0.1), (X, Y), steps=4, batch_size=8, **options)
    # a tenth of four steps is none
    for other in posteriors[1:]:
        assert torch.equal(posteriors[0].mu, other.mu)
    with pytest.raises(ValueError, match=r"warmup must be .* <= 1, got 1\.5"):
        fit(model, MeanField(model), Noise(0.1), (X, Y), steps=4, warmup=1.5)


def test_gradients_through_the_attack_differ_from_those_that_stop_there() -> None:
    model = regressor()
    ends = []
    for through in (False, True):
        posterior = MeanField(model)
        channel = AttackChannel(one_step(L2(0.5)), 0.1)
        result = fit(
            model, posterior, channel, (X, Y), objective=ChannelELBO(40, through=through), steps=1
        )
        ends.append(result.history["gradient_norm"][0])
    assert ends[0] != pytest.approx(ends[1], rel=1e-3)


def test_a_frozen_parameter_stays() -> None:
    model = regressor()
    posterior = MeanField(model)
    posterior.rho.requires_grad_(False)
    before = posterior.rho.detach().clone(), posterior.mu.detach().clone()
    fit(model, posterior, Noise(0.1), (X, Y), steps=3, progress=False)
    assert torch.equal(posterior.rho, before[0])
    assert not torch.equal(posterior.mu, before[1])
    posterior.mu.requires_grad_(False)
    with pytest.raises(ValueError, match="posterior must have a trainable parameter"):
        fit(model, posterior, Noise(0.1), (X, Y), steps=3, progress=False)


def test_one_channel_images_really_run_channels_last() -> None:
    model = BayesianModel(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 3)), Categorical()
    )
    seen: list[Tensor] = []
    model.net[0].register_forward_hook(lambda layer, inputs, output: seen.append(output))
    model.output(model.initial_theta(), torch.rand(3, 1, 6, 6))
    assert seen[0].stride(1) == 1


# --- Batches ------------------------------------------------------------------------------------


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


def test_a_loader_s_batches_are_checked_but_the_net_is_probed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = regressor()
    probes = []
    output = BayesianModel.output
    monkeypatch.setattr(
        BayesianModel,
        "output",
        lambda self, theta, x: probes.append(len(x)) or output(self, theta, x),
    )
    fit(
        model, MeanField(model), Noise(0.0), DataLoader(TensorDataset(X, Y), batch_size=8), epochs=2
    )
    assert probes.count(1) == 1
    bad = Y.clone()
    bad[20] = math.nan
    with pytest.raises(ValueError, match="y must be finite"):
        fit(
            model,
            MeanField(model),
            Noise(0.0),
            DataLoader(TensorDataset(X, bad), batch_size=8),
            epochs=1,
        )


def test_a_loader_of_something_else_is_refused() -> None:
    model = regressor()
    with pytest.raises(TypeError, match=r"pairs \(x, y\)"):
        fit(
            model, MeanField(model), Noise(0.0), DataLoader(TensorDataset(X), batch_size=8), steps=1
        )


# --- Bad input, good words ----------------------------------------------------------------------


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


def test_a_state_has_the_names_of_every_run_folder_so_far() -> None:
    """What older checkpoints hold is what this reads: these names are a file format."""
    model = regressor()
    state = fit(model, MeanField(model), Noise(0.1), (X, Y), steps=2, progress=False).state
    slots = ("exp_avg", "exp_avg_sq", "step")
    wanted = {"posterior/mu", "posterior/rho"} | {
        f"posterior/adam/{k}/{name}" for k in (0, 1) for name in slots
    }
    assert set(state.tensors) == wanted
    assert [float(state.tensors[f"posterior/adam/{k}/step"]) for k in (0, 1)] == [2.0, 2.0]
    del state.tensors["posterior/adam/1/exp_avg"]
    with pytest.raises(ValueError, match="state must hold posterior/adam/1/exp_avg of shape"):
        fit(model, MeanField(model), Noise(0.1), (X, Y), steps=3, state=state, progress=False)

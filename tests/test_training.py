"""`fit`: reproducible bit for bit, exact when it goes on, honest about what it skips, kind to
Ctrl-C."""

from __future__ import annotations

import json
import math
import os
import signal
import time

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Ensemble,
    Gaussian,
    Learned,
    LowRank,
    MeanField,
    Mixture,
    Noise,
    NonFiniteError,
    PointMass,
    fit,
    nll,
    one_step,
    pgd,
)
from advbayes.networks import FullyConnectedGenerator
from advbayes.training import SkippedStepWarning, State
from advbayes.types import Predictor
from tests import forking
from tests.contracts import seeded, small_model

X = torch.rand(60, 4, generator=seeded(1))
Y = (X.sum(1) > 2).long()


def learned(seed: int = 0) -> Learned:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Learned(FullyConnectedGenerator(4, num_classes=3, width=16), L2(0.5))


CHANNELS = {
    "identity": lambda: Noise(0.0),
    "one_step": lambda: AttackChannel(one_step(L2(0.3)), 0.1),
    "mixture": lambda: Mixture([0.4, 0.6], [Noise(0.1), AttackChannel(pgd(L2(0.3), 3), 0.1)]),
    "learned": learned,
    "half_learned": lambda: Mixture([0.5, 0.5], [Noise(0.0), learned()]),
}


def weights(posterior: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in posterior.state_dict().values()]


@pytest.mark.parametrize("name", CHANNELS)
def test_same_seed_same_bits_and_a_state_goes_on_exactly(name: str) -> None:
    model = small_model("classification", torch.float32)
    settings = {"batch_size": 16, "lr": 1e-2, "decay": 0.9, "seed": 3}
    whole, again, parts = MeanField(model), MeanField(model), MeanField(model)
    first = fit(model, whole, CHANNELS[name](), (X, Y), steps=9, **settings)
    second = fit(model, again, CHANNELS[name](), (X, Y), steps=9, **settings)
    saved: list[State] = []
    fit(
        model,
        parts,
        CHANNELS[name](),
        (X, Y),
        steps=9,
        stop=lambda: True,
        checkpoint=saved.append,
        **settings,
    )
    assert saved[-1].step == 1
    rest = fit(
        model, MeanField(model), CHANNELS[name](), (X, Y), steps=9, state=saved[-1], **settings
    )
    resumed = [rest.state.tensors[f"posterior/{key}"] for key in whole.state_dict()]
    for a, b, c in zip(weights(whole), weights(again), resumed, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    for column in ("bound", "log_likelihood", "kl", "gradient_norm"):
        assert first.history[column] == second.history[column] == rest.history[column]


def test_another_seed_another_run() -> None:
    model = small_model("classification", torch.float32)
    runs = []
    for seed in (0, 1):
        posterior = MeanField(model)
        fit(model, posterior, Noise(0.1), (X, Y), steps=3, seed=seed)
        runs.append(posterior.mu.detach().clone())
    assert not torch.equal(*runs)


@pytest.mark.parametrize("kind", [MeanField, PointMass, Ensemble, LowRank])
def test_every_posterior_improves_its_bound(kind: type) -> None:
    model = small_model("classification", torch.float32)
    result = fit(
        model, kind(model), AttackChannel(one_step(L2(0.1)), 0.05), (X, Y), steps=150, lr=2e-2
    )
    bounds = result.history["bound"]
    assert sum(bounds[-20:]) > sum(bounds[:20])
    assert result.steps == len(bounds) == 150
    assert all(math.isfinite(value) for column in result.history.values() for value in column)


def test_every_example_is_used_equally_often_whatever_the_batch_size() -> None:
    seen: list[Tensor] = []

    class Recorder:
        def sample(
            self,
            predict: Predictor,
            x: Tensor,
            y: Tensor | None = None,
            *,
            generator: object = None,
        ) -> Tensor:
            seen.append(x[:, 0].clone())
            return x

        def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> object:
            raise AssertionError

    model = small_model("classification", torch.float32)
    result = fit(model, PointMass(model), Recorder(), (X, Y), epochs=4, batch_size=16)
    assert result.steps == 15
    values, counts = torch.cat(seen).unique(return_counts=True)
    assert len(values) == 60
    assert bool((counts == 4).all())


def test_a_loader_trains_too() -> None:
    model = small_model("classification", torch.float32)
    loader = DataLoader(TensorDataset(X, Y), batch_size=20)
    result = fit(model, MeanField(model), Noise(0.0), loader, epochs=2)
    assert result.steps == 6


def test_the_learned_adversary_learns_and_stays_in_its_ball() -> None:
    model = small_model("classification", torch.float32)
    posterior = PointMass(model)
    fit(model, posterior, Noise(0.0), (X, Y), steps=200, lr=2e-2)
    channel = learned()
    predict = model.at(posterior.mean)
    before = float(
        -predict(channel.sample(predict, X, Y, generator=seeded()).detach()).log_prob(Y).mean()
    )
    fit(model, posterior, channel, (X, Y), steps=150, lr=1e-8, adversary_lr=1e-2)
    after = float(
        -predict(channel.sample(predict, X, Y, generator=seeded()).detach()).log_prob(Y).mean()
    )
    assert after > before + 0.05
    centre, std = channel.moments(predict, X, Y)
    assert bool(L2(0.5).contains(centre.detach(), X).all())
    assert 1e-2 <= float(std.detach().min()) <= float(std.detach().max()) <= 0.5


def test_the_entropy_bonus_widens_the_learned_channel() -> None:
    spreads = []
    for bonus in (0.0, 10.0):
        model = small_model("classification", torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            channel = Learned(
                FullyConnectedGenerator(4, num_classes=3, width=16), L2(0.5), entropy_bonus=bonus
            )
        fit(model, PointMass(model), channel, (X, Y), steps=60, adversary_lr=1e-2)
        spreads.append(
            float(channel.moments(model.at(model.initial_theta()), X, Y)[1].detach().mean())
        )
    assert spreads[1] > spreads[0] + 0.05


class Poison:
    """A channel that gives NaN at chosen steps."""

    def __init__(self, bad: range) -> None:
        self.bad, self.calls = bad, 0

    def sample(
        self, predict: Predictor, x: Tensor, y: Tensor | None = None, *, generator: object = None
    ) -> Tensor:
        self.calls += 1
        return x * math.nan if self.calls - 1 in self.bad else x

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> object:
        raise AssertionError


def test_a_bad_step_is_skipped_and_counted() -> None:
    model = small_model("classification", torch.float32)
    posterior = MeanField(model)
    with pytest.warns(SkippedStepWarning, match="step 4 was skipped: its bound is nan") as warned:
        result = fit(model, posterior, Poison(range(3, 6)), (X, Y), steps=10)
    assert len(warned) == 1
    assert result.skipped == 3
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(posterior))


def test_ten_bad_steps_in_a_row_stop_name_the_channel_and_keep_the_last_finite_state() -> None:
    model = small_model("classification", torch.float32)
    posterior, reference = MeanField(model), MeanField(model)
    fit(model, reference, Poison(range(0)), (X, Y), steps=4)
    with (
        pytest.warns(SkippedStepWarning),
        pytest.raises(NonFiniteError, match="the cause is the channel"),
    ):
        fit(model, posterior, Poison(range(4, 99)), (X, Y), steps=50)
    for kept, wanted in zip(weights(posterior), weights(reference), strict=True):
        assert torch.equal(kept, wanted)


@pytest.mark.parametrize("bad", [[*range(9), *range(10, 19)], [*range(0, 40, 2)]])
def test_bad_steps_that_are_not_ten_in_a_row_never_stop(bad: list[int]) -> None:
    """Nine, a good one, nine; or every other of forty."""
    model = small_model("classification", torch.float32)
    with pytest.warns(SkippedStepWarning):
        result = fit(model, MeanField(model), Poison(bad), (X, Y), steps=bad[-1] + 2)
    assert (result.skipped, result.steps) == (len(bad), bad[-1] + 2)


def test_the_likelihood_is_named_when_it_overflows() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 1e30))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).square()

    model = BayesianModel(Square(), Gaussian(1.0))
    with (
        pytest.warns(SkippedStepWarning),
        pytest.raises(NonFiniteError, match="the cause is the likelihood"),
    ):
        fit(model, PointMass(model), Noise(0.0), (X, X[:, 0]), steps=20)


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    model = small_model("classification", torch.float32)
    fit(model, MeanField(model), Noise(0.1), (X, Y), steps=3)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


SCRIPT = """
import json, signal, sys, torch
from advbayes import *
# whoever started the tests may have it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
x = torch.rand(512, 50); y = (x.sum(1) > 25).long()
net = torch.nn.Sequential(torch.nn.Linear(50, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
model = BayesianModel(net, Categorical())
posterior = MeanField(model)
started = []
def stop():  # called after every step, never stops
    if not started:
        started.append(print("ready", flush=True))
    return False
result = fit(model, posterior, AttackChannel(pgd(L2(1.0), 10), 0.1), (x, y), steps=10**6, stop=stop)
finite = all(bool(torch.isfinite(t).all()) for t in posterior.state_dict().values())
entries = len(result.history["bound"])
said = {"interrupted": result.interrupted, "steps": result.steps, "entries": entries}
print(json.dumps({**said, "finite": finite}))
"""


def test_ctrl_c_keeps_what_is_trained() -> None:
    """A real process, a real SIGINT."""
    reads, writes = os.pipe()
    pid = forking.start(SCRIPT, writes, 2)
    os.close(writes)
    try:
        with open(reads) as output, forking.limited(pid, 30):
            assert output.readline().strip() == "ready"
            time.sleep(0.5)
            os.kill(pid, signal.SIGINT)
            out = output.read()
    finally:
        os.kill(pid, signal.SIGKILL)  # a process that goes on is not left behind
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0
    answer = json.loads(out)
    assert answer["interrupted"]
    assert answer["finite"]
    assert answer["steps"] == answer["entries"] > 0


def test_the_learning_rate_decays_from_epoch_to_epoch() -> None:
    """With a decay to nothing only the first epoch moves the posterior; without one every epoch
    does."""

    def reached(epochs: int, decay: float) -> torch.Tensor:
        posterior = MeanField(model)
        fit(
            model,
            posterior,
            Noise(0.1),
            (X, Y),
            epochs=epochs,
            batch_size=len(X),
            lr=1e-2,
            decay=decay,
        )
        return posterior.mu.detach()

    model = small_model("classification", torch.float32)
    assert torch.allclose(reached(4, 1e-9), reached(1, 1e-9), rtol=0, atol=1e-6)
    assert not torch.allclose(reached(4, 1.0), reached(1, 1.0), rtol=0, atol=1e-3)


def test_minibatches_and_objective_settings_reach_the_bound() -> None:
    """The KL weight and the number of thetas and channel samples show in the history, not only in
    the configuration."""
    model = small_model("classification", torch.float64)
    x, y = X.double(), Y
    posterior = MeanField(model)
    kl = float(posterior.kl(1.0).detach())
    heavy = fit(
        model,
        posterior,
        Noise(0.1),
        (x, y),
        steps=1,
        objective=ChannelELBO(60, 3, 2, kl_weight=5.0),
    )
    assert heavy.history["kl"][0] == pytest.approx(kl)
    assert heavy.history["bound"][0] == pytest.approx(heavy.history["log_likelihood"][0] - 5.0 * kl)


def test_categorical_and_learned_scale_regression_recover_the_noise() -> None:
    generator = seeded(5)
    x = torch.randn(400, 2, generator=generator)
    y = x @ torch.tensor([1.0, -2.0]) + 0.3 * torch.randn(400, generator=generator)
    model = BayesianModel(nn.Linear(2, 1), Gaussian(1.0, learned=True))
    posterior = MeanField(model)
    fit(model, posterior, Noise(0.0), (x, y), steps=1500, lr=2e-2, decay=0.995)
    assert math.exp(float(posterior.mean[-1])) == pytest.approx(0.3, rel=0.1)
    assert isinstance(model.likelihood, Gaussian)
    assert not Categorical().initial_extra()
    assert nll(model.at(posterior.mean)(x), y).shape == (400,)

"""The compiled step is the eager one up to rounding, and falls back where torch lacks what it is
made with."""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Consistency,
    Gaussian,
    Linf,
    LogitPairing,
    LowRank,
    MeanField,
    Mixture,
    Noise,
    NonFiniteError,
    Trades,
    fit,
)
from advbayes.accelerated import CompiledStep, CompileError, compiling
from advbayes.accelerated.draws import Draws, draws, sample_at
from advbayes.accelerated.step import adam
from advbayes.attacks import entropy, margin, nll, one_step, pgd, squared_error
from advbayes.training import SkippedStepWarning
from advbayes.training.batches import Batch
from advbayes.training.steps import adam_for, eager_step
from advbayes.types import Channel


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classifier(seed: int = 0) -> BayesianModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 3),
        )
    return BayesianModel(net, Categorical())


def regressor(seed: int = 0) -> BayesianModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    return BayesianModel(net, Gaussian(0.5))


IMAGES = (
    torch.rand(70, 1, 6, 6, generator=generator(1)),
    torch.randint(3, (70,), generator=generator(2)),
)
ROWS = torch.randn(70, 5, generator=generator(3)), torch.randn(70, generator=generator(4))


def image_mix() -> Mixture:
    attacks = [AttackChannel(one_step(L2(1.0), loss), 0.1) for loss in (nll, margin, entropy)]
    return Mixture([0.4, 0.2, 0.2, 0.2], [Noise(0.1), *attacks])


def row_mix() -> Mixture:
    return Mixture([0.4, 0.6], [Noise(0.1), AttackChannel(one_step(L2(1.0), squared_error), 0.1)])


# --- Compiled is eager --------------------------------------------------------------------------

# Each costs a cold compilation, so each covers several paths.
CASES = {
    "mean field, two thetas, mixture inside": (regressor, MeanField, row_mix, {"num_theta": 2}),
    "low rank, penalty, losses by example": (
        classifier,
        LowRank,
        image_mix,
        {"penalty": Trades(2.0)},
    ),
    "mean field, channel outside, importance weights": (
        regressor,
        MeanField,
        lambda: AttackChannel(pgd(Linf(0.1), 3, squared_error), 0.1),
        {"bound": "importance_weighted", "num_channel": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_fit_is_the_eager_one_up_to_rounding(case: str) -> None:
    make_model, make_posterior, make_channel, settings = CASES[case]
    ends, histories = [], []
    for compile in (False, True):
        model = make_model()
        posterior = make_posterior(model)
        data = ROWS if make_model is regressor else IMAGES
        result = fit(
            model,
            posterior,
            make_channel(),
            data,
            objective=ChannelELBO(70, **settings),  # type: ignore[arg-type]
            steps=8,
            batch_size=32,
            lr=1e-2,
            seed=3,
            warmup=0.5,
            progress=False,
            compile=compile,
        )
        ends.append(posterior.mean)
        histories.append(result.history)
    for column in ("bound", "log_likelihood", "kl", "penalty", "gradient_norm"):
        assert histories[1][column] == pytest.approx(histories[0][column], rel=2e-4, abs=1e-5), (
            column
        )
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)


PLAIN: dict[str, Channel] = {
    "identity": Noise(0.0),
    "noise": Noise(0.2),
    "one step": AttackChannel(one_step(L2(0.5)), 0.1),
    "without noise": AttackChannel(one_step(Linf(0.5, scale=2.0))),
    "mixture": row_mix(),
    "outside": AttackChannel(pgd(L2(0.5), 2), 0.1),
    "iid": Mixture([0.5, 0.5], [Noise(0.1), Noise(0.2)], stratified=False),
}


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(("num_theta", "num_channel"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("name", PLAIN)
def test_the_program_before_it_is_compiled_is_an_eager_step(
    name: str, num_theta: int, num_channel: int, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "advbayes.accelerated.step.compiled", lambda program, *_, num_changed: program
    )
    model = regressor().to(dtype=torch.float64)
    x, y = (rows.double() for rows in ROWS)
    objective = ChannelELBO(
        70, num_theta, num_channel, "importance_weighted", Trades(0.5), kl_weight=0.3
    )
    posteriors = [LowRank(model, 2, 0.1), LowRank(model, 2, 0.1)]
    steps = [
        make(model, posterior, PLAIN[name], objective, adam_for(posterior, 1e-2))
        for make, posterior in zip((eager_step, CompiledStep), posteriors, strict=True)
    ]
    for number in range(3):
        rows = torch.randperm(70, generator=generator(number))[:9]
        batch = Batch(x, y, rows) if gathers else Batch(x[rows], y[rows])
        rate, spared = 1e-2 / (1 + number), (0.2, 0.1, 0.0)[number]
        eager, program = (step(batch, generator(number), rate, spared) for step in steps)
        assert program == pytest.approx(eager, rel=1e-9)
    for one, other in zip(*(p.parameters() for p in posteriors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


class Standardised(nn.Module):
    """With a buffer and a frozen parameter: what a program holds beside its arguments."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, 5))
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 5), requires_grad=False)
        self.layer = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(((x - self.shift) / self.scale).tanh())
        return y


def test_what_nets_and_balls_hold_is_part_of_the_traced_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch._inductor.compile", lambda graph, examples, options: graph)
    x, y = (rows.double() for rows in ROWS)
    of_features: dict[str, Any] = {
        "scale": torch.tensor([0.5, 1.0, 2.0, 1.0, 1.0]),
        "mask": torch.tensor([True, True, False, True, True]),
    }
    balls = (
        L2(0.5, box=(x.amin(0) - 0.1, x.amax(0) + 0.1), **of_features),
        Linf(0.3, indicators=((0, 3, 0.2),)),
    )
    attacks = [AttackChannel(one_step(ball, squared_error), 0.1) for ball in balls]
    model = BayesianModel(Standardised().double(), Gaussian(0.5))
    ends = []
    for compile in (False, True):
        posterior = MeanField(model, 0.1)
        fit(
            model,
            posterior,
            Mixture([0.3, 0.3, 0.4], [Noise(0.1), *attacks]),
            (x, y),
            steps=3,
            batch_size=9,
            lr=1e-2,
            progress=False,
            compile=compile,
        )
        ends.append(posterior)
    for one, other in zip(*(posterior.parameters() for posterior in ends), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


PENALTIES = (Trades(2.0), Trades(2.0, likelihood="clean"), LogitPairing(0.5), Consistency(3.0, 0.5))


@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
def test_every_penalty_can_be_traced(penalty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile", lambda graph, examples, options: graph)
    model = classifier().to(dtype=torch.float64)
    objective = ChannelELBO(70, num_channel=2, penalty=penalty)
    data = IMAGES[0].double(), IMAGES[1]
    ends = []
    for compile in (False, True):
        posterior = MeanField(model, 0.1)
        settings: Any = {"objective": objective, "steps": 2, "batch_size": 7, "lr": 1e-2}
        fit(model, posterior, Noise(0.3), data, **settings, progress=False, compile=compile)
        ends.append(posterior)
    for one, other in zip(*(posterior.parameters() for posterior in ends), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


class Root(nn.Module):
    """|w x| by a root, which has no derivative at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).square().sqrt()


@pytest.mark.parametrize("make", [eager_step, CompiledStep])
@pytest.mark.parametrize(("fault", "bound"), [(math.nan, False), (0.0, True)])
def test_a_step_without_a_finite_bound_or_gradient_changes_nothing(
    make: Any, fault: float, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which one may be finite alone."""
    monkeypatch.setattr(
        "advbayes.accelerated.step.compiled", lambda program, *_, num_changed: program
    )
    model = BayesianModel(Root(), Gaussian(1.0))
    posterior = MeanField(model)
    step = make(model, posterior, Noise(0.0), ChannelELBO(70), adam_for(posterior, 1e-2))
    good = step(Batch(*ROWS), generator(0), 1e-2)
    assert all(map(math.isfinite, good))
    before = [tensor.clone() for tensor in posterior.parameters()]
    x = ROWS[0].clone()
    x[3] = fault
    bad = step(Batch(x, ROWS[1]), generator(1), 1e-2)
    assert (math.isfinite(bad[0]), math.isfinite(bad[-1])) == (bound, False)
    assert all(map(torch.equal, posterior.parameters(), before))
    assert all(map(math.isfinite, step(Batch(*ROWS), generator(2), 1e-2)))
    assert not any(map(torch.equal, posterior.parameters(), before))


def test_compiling_what_branches_on_values_says_so() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y if float(y.detach().sum()) > 0 else 2 * y

    model = BayesianModel(Branching(), Gaussian(0.5))
    with pytest.raises(
        CompileError, match="compile=True could not compile a step of BayesianModel"
    ):
        fit(model, MeanField(model), Noise(0.0), ROWS, steps=1, progress=False, compile=True)


def test_compiling_gradients_through_the_attack_is_refused() -> None:
    model = regressor()
    with pytest.raises(ValueError, match="through=True"):
        fit(
            model,
            MeanField(model),
            row_mix(),
            ROWS,
            objective=ChannelELBO(70, through=True),
            steps=1,
            compile=True,
        )


# --- The channel, its randomness drawn beforehand -----------------------------------------------

CHANNELS: dict[str, Channel] = {
    "identity": Noise(0.0),
    "noise": Noise(0.3),
    "one step": AttackChannel(one_step(L2(1.0)), 0.1),
    "mixture": image_mix(),
    "interleaved": Mixture(
        [0.3, 0.2, 0.1, 0.4],
        [
            AttackChannel(one_step(L2(1.0), nll), 0.2),
            Noise(0.1),
            AttackChannel(one_step(L2(1.0), entropy), 0.2),
            Noise(0.0),
        ],
    ),
    "nothing of one": Mixture([0.0, 1.0], [AttackChannel(one_step(L2(1.0)), 0.1), Noise(0.1)]),
}


@pytest.mark.parametrize("name", CHANNELS)
@pytest.mark.parametrize("seed", range(4))
def test_a_channel_at_its_draws_is_its_sample(name: str, seed: int) -> None:
    channel, model = CHANNELS[name], classifier()
    predict = model.at(model.initial_theta())
    x, y = IMAGES[0][:33], IMAGES[1][:33]
    expected = channel.sample(predict, x, y, generator=generator(seed))
    drawn = draws(channel, x, generator=generator(seed))
    assert isinstance(drawn, Draws)
    order = drawn.order if drawn.order.numel() else torch.arange(33)
    found = torch.empty_like(x)
    found[order] = sample_at(channel, drawn, predict, x[order], y[order])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_channels_whose_attack_draws_have_no_draws_beforehand() -> None:
    x = IMAGES[0]
    random = AttackChannel(pgd(L2(1.0), 3), 0.1)
    iid = Mixture([0.5, 0.5], [Noise(0.1), Noise(0.2)], stratified=False)
    for channel in (random, iid, Mixture([0.5, 0.5], [Noise(0.1), random])):
        assert draws(channel, x, generator=generator()) is None


# --- The program --------------------------------------------------------------------------------


def test_its_adam_is_torch_s() -> None:
    ours = [torch.linspace(-1, 1, 7), torch.zeros(7), torch.zeros(7)]
    theirs = nn.Parameter(ours[0].clone())
    reference = torch.optim.Adam([theirs], lr=1e-2)
    for k in range(5):
        theirs.grad = torch.randn(7, generator=generator(k))
        reference.param_groups[0]["lr"] = 1e-2 * 0.9**k
        ours = list(adam(*ours, theirs.grad, torch.tensor(k + 1.0), 1e-2 * 0.9**k))
        reference.step()
    torch.testing.assert_close(ours[0], theirs.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_compiled_step_that_is_not_finite_changes_nothing() -> None:
    model = regressor()
    posterior, other = MeanField(model), MeanField(model)
    step = CompiledStep(model, posterior, Noise(0.0), ChannelELBO(70), adam_for(posterior, 1e-2))
    rows = torch.arange(16)
    assert all(map(math.isfinite, step(Batch(*ROWS, rows), generator(0), 1e-2)))
    before = [tensor.clone() for tensor in step.state]
    broken = ROWS[0].clone()
    broken[3] = math.nan
    assert not all(map(math.isfinite, step(Batch(broken, ROWS[1], rows), generator(1), 1e-2)))
    assert all(torch.equal(a, b) for a, b in zip(step.state, before, strict=True))
    # And the next good one goes on as if the bad one had never been.
    assert all(map(math.isfinite, step(Batch(*ROWS, rows), generator(2), 1e-2)))
    assert len(step.programs) == 1
    eager = eager_step(model, other, Noise(0.0), ChannelELBO(70), adam_for(other, 1e-2))
    for seed in (0, 2):
        eager(Batch(*ROWS, rows), generator(seed), 1e-2)
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
    with (
        pytest.warns(SkippedStepWarning),
        pytest.raises(NonFiniteError, match="the cause is the likelihood"),
    ):
        fit(model, posterior, Noise(0.0), ROWS, steps=20, compile=True)
    assert torch.equal(posterior.mu.detach(), model.initial_theta())


@pytest.mark.slow
def test_a_run_may_be_resumed_compiled_or_not() -> None:
    ends = []
    for first, second in ((False, False), (True, False), (False, True)):
        model = regressor()
        posterior = MeanField(model)
        state = fit(
            model, posterior, row_mix(), ROWS, steps=4, batch_size=32, compile=first, progress=False
        ).state
        fit(
            model,
            posterior,
            row_mix(),
            ROWS,
            steps=8,
            batch_size=32,
            compile=second,
            state=state,
            progress=False,
        )
        ends.append(posterior.mean)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ends[2], ends[0], rtol=1e-3, atol=1e-4)


# --- A torch without the names that it is made with ---------------------------------------------


@pytest.mark.parametrize(
    ("missing", "instead"),
    [
        ("torch._inductor.decomposition", "torch.compile"),
        ("torch.fx.experimental.proxy_tensor", "nothing"),
    ],
)
@pytest.mark.slow
def test_a_torch_that_lacks_a_private_name_still_trains(
    missing: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling._warn_once.cache_clear()
    monkeypatch.setitem(sys.modules, missing, None)
    # what stands for it here is not under test
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    ends = []
    for compile in (False, True):
        model = regressor()
        posterior = MeanField(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(
                model,
                posterior,
                row_mix(),
                ROWS,
                steps=4,
                batch_size=32,
                progress=False,
                compile=compile,
            )
        told = [
            str(warning.message)
            for warning in caught
            if "lacks what compile=True" in str(warning.message)
        ]
        assert len(told) == int(compile)
        assert all(f"uses {instead}" in text for text in told)
        ends.append(posterior.mean)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)
    compiling._warn_once.cache_clear()

"""Tensors are made where the user's are. A machine without an accelerator cannot run on one, but it
can show that nothing relies on the default device: with that set to `meta`, a tensor made without
saying where holds no numbers, and whatever touches it fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advbayes import (
    APGD,
    L2,
    Annealed,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Gaussian,
    Learned,
    Linf,
    MeanField,
    Mixture,
    NearestCentre,
    Noise,
    PosteriorPredictive,
    Purifier,
    SimulatedPurifier,
    Smoothed,
    StraightThrough,
    certify,
    evaluate,
    fit,
    metrics,
    one_step,
    pgd,
)
from advbayes.adapters import from_torch
from advbayes.attacks import (
    HardLabel,
    RandomSearch,
    Square,
    dlr,
    entropy,
    loss_and_gradient,
    margin,
    nll,
    strong_suite,
)
from advbayes.cli.app import run as command
from advbayes.networks import FullyConnectedGenerator, conv_net, mlp
from advbayes.objectives import Trades
from advbayes.posteriors import Ensemble, LowRank, PointMass
from advbayes.predictive import conformal_intervals, conformal_sets, decide
from advbayes.purification.attacks import nearest_centre_radius
from advbayes.runs import load_trained
from advbayes.seeds import generator_for

HAVE = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
DEVICES = [
    pytest.param(name, marks=pytest.mark.skipif(not there, reason=f"no {name} device here"))
    for name, there in HAVE.items()
]
MASKED = L2(0.5, mask=torch.tensor([True, False, True, True]), scale=torch.tensor([1.0, 2, 3, 4]))
BALLS = [L2(0.5), Linf(0.5, box=(-9, 9)), MASKED, L2(0.5, box=(-9 * torch.ones(4), 9.0))]


class Parts:
    """A small model of each task, thetas and data, on a device."""

    def __init__(self, device: str) -> None:
        self.device = device
        torch.manual_seed(0)
        self.x = torch.randn(8, 4).to(device)
        self.y, self.target = (torch.arange(8) % 3).to(device), torch.randn(8).to(device)
        self.model = BayesianModel(mlp(4, 3, (8,)), Categorical()).to(device)
        self.regression = BayesianModel(mlp(4, 1, (8,)), Gaussian(1.0, learned=True)).to(device)
        self.posterior = MeanField(self.model)
        self.thetas = self.posterior.sample(3, generator=self.generator())
        self.predict = PosteriorPredictive(self.model, self.thetas)
        self.generated = Learned(FullyConnectedGenerator(4, 1, 3).to(device), L2(0.5))

        self.net = nn.Linear(4, 3).to(device)

    def slopes(self) -> Tensor:
        return MeanField(self.regression).sample(2, generator=self.generator())

    def generator(self) -> torch.Generator:
        return generator_for(0, "test", device=self.device)


def channels(ball: Any) -> list[Any]:
    attacked = AttackChannel(one_step(ball), 0.1)
    return [Noise(0.1), attacked, Mixture([0.5, 0.5], [Noise(0.1), attacked])]


CASES: dict[str, Callable[[Parts], Any]] = {
    **{
        f"posterior {name}": lambda p, make=make: (make(p.model).rsample(2), make(p.model).kl(1.0))
        for name, make in {
            "mean field": MeanField,
            "point": PointMass,
            "low rank": lambda model: LowRank(model, 2),
            "ensemble": lambda model: Ensemble(model, 2),
        }.items()
    },
    "one theta": lambda p: p.model.at(p.thetas[0])(p.x).logits,
    "each theta": lambda p: p.model.at_each(p.thetas)(p.x).logits,
    "predictive": lambda p: p.predict(p.x).logits,
    "regression": lambda p: PosteriorPredictive(
        p.regression, MeanField(p.regression).sample(2, generator=p.generator())
    )(p.x).log_prob(p.target),
    "convolutions": lambda p: conv(p.device),
    **{
        f"loss {loss.__name__}": lambda p, loss=loss: loss_and_gradient(p.predict, loss, p.x, p.y)
        for loss in (nll, margin, entropy, dlr)
    },
    **{
        f"{type(make(ball)).__name__}, ball {k}": lambda p, make=make, ball=ball: make(ball)(
            p.predict, p.x, p.y, generator=p.generator()
        )
        for k, ball in enumerate(BALLS)
        for make in (
            lambda ball: pgd(ball, 3),
            lambda ball: APGD(ball, steps=4),
            lambda ball: RandomSearch(ball, 3),
            lambda ball: Square(ball, queries=3),
            lambda ball: strong_suite(ball, steps=2),
        )
    },
    "hard label": lambda p: HardLabel(L2(0.5), rounds=2)(
        p.predict, p.x, p.y, generator=p.generator()
    ),
    **{
        f"channel {j}, ball {k}": lambda p, channel=channel: (
            channel.sample(p.model.at(p.thetas[0]), p.x, p.y, generator=p.generator()),
            channel.density(p.model.at(p.thetas[0]), p.x, p.y).log_prob(p.x),
        )
        for k, ball in enumerate(BALLS)
        for j, channel in enumerate(channels(ball))
    },
    "learned channel": lambda p: p.generated.sample(p.predict, p.x, p.y, generator=p.generator()),
    **{
        f"bound {name}": lambda p, objective=objective: objective(
            p.model, p.posterior, channels(L2(0.5))[2], p.x, p.y, generator=p.generator()
        )
        for name, objective in {
            "two thetas": ChannelELBO(8, 2, 2),
            "importance": ChannelELBO(8, 1, 2, "importance_weighted"),
            "penalty": ChannelELBO(8, penalty=Trades(1.0)),
            "class weights": ChannelELBO(8, class_weight=(1.0, 2.0, 1.0)),
        }.items()
    },
    "fit": lambda p: fit(
        p.model,
        p.posterior,
        channels(L2(0.5))[2],
        (p.x, p.y),
        steps=2,
        batch_size=4,
        sample_weight=[1.0] * 8,
    ).history["bound"],
    "fit a learned channel": lambda p: fit(
        p.model, p.posterior, p.generated, (p.x, p.y), steps=2
    ).history["bound"],
    "purifier": lambda p: Purifier(p.model, Noise(0.3), p.thetas, (p.x, p.y))(p.x).logits,
    **{
        f"purifier {name}": lambda p, ask=ask: ask(
            Purifier(p.model, channels(L2(0.5))[2], p.thetas, (p.x, p.y), memory_limit=2_000_000), p
        )
        for name, ask in {
            "denoised": lambda made, p: made.denoise(p.x),
            "diagnosed": lambda made, p: tuple(vars(made.diagnose(p.x)).values()),
            "widened": lambda made, p: made.widened(2.0)(p.x).logits,
            "radius": lambda made, p: nearest_centre_radius(made.widened(1.0), p.x, p.y),
            "annealed": lambda made, p: Annealed(L2(0.5), steps=2, start=NearestCentre(L2(0.5)))(
                made, p.x, p.y
            ),
            "straight through": lambda made, p: pgd(L2(0.5), 2)(StraightThrough(made), p.x, p.y),
        }.items()
    },
    "purified regression": lambda p: everything(
        Purifier(p.regression, channels(L2(0.5))[2], p.slopes(), (p.x, p.target))(p.x), p
    ),
    "purifier with an index": lambda p: (
        pytest.importorskip("faiss"),
        Purifier(p.model, Noise(0.3), p.thetas, p.x, index="faiss")(p.x).logits,
    )[1:],
    "simulated purifier": lambda p: (
        SimulatedPurifier(p.model, Noise(0.0), p.thetas, p.x)(p.x).logits
    ),
    "smoothed regression": lambda p: (
        Smoothed(PosteriorPredictive(p.regression, p.slopes()), 0.1, 5)(p.x).mean
    ),
    "conformal": lambda p: (
        conformal_sets(p.predict, (p.x, p.y), level=0.5)(p.x),
        *conformal_intervals(
            PosteriorPredictive(p.regression, p.slopes()), (p.x, p.target), level=0.5
        )(p.x),
    ),
    "decisions": lambda p: (
        decide(
            p.predict, p.x, torch.eye(3, device="cpu"), abstain=0.1, worst_case=L2(0.2), steps=2
        ),
        decide(
            PosteriorPredictive(p.regression, p.slopes()),
            p.x,
            lambda action, y: -(action - y).abs(),
            actions=torch.zeros(2, device="cpu"),
            worst_case=L2(0.2),
            steps=2,
        ),
    ),
    "a net of others": lambda p: from_torch(p.net)(p.x).logits,
    "smoothed": lambda p: Smoothed(p.predict, 0.1)(p.x).logits,
    "certify": lambda p: (
        certify(Smoothed(p.predict, 0.1), p.x[:1], n=20, generator=p.generator()).radii
    ),
    # its records are kept on the CPU
    "evaluate": lambda p: evaluate(p.predict, (p.x, p.y), attacks={"PGD": pgd(MASKED, 2)}),
    "trivial": lambda p: (metrics.uniform(3)(p.x).logits, metrics.constant(p.target)(p.x).mean),
}


def conv(device: str) -> Tensor:
    model = BayesianModel(conv_net(size=8), Categorical()).to(device)
    thetas = MeanField(model).sample(2, generator=generator_for(0, "test", device=device))
    found: Any = PosteriorPredictive(model, thetas)(torch.full((2, 1, 8, 8), 0.5, device=device))
    return found.logits  # type: ignore[no-any-return]


def everything(prediction: Any, p: Parts) -> tuple[Tensor, ...]:
    level = torch.full((8,), 0.3, device=p.device)
    draws = prediction.sample((3,), generator=p.generator())
    moments = prediction.mean, prediction.variance, prediction.entropy()
    return *moments, prediction.log_prob(p.target), prediction.icdf(level), draws


def tensors_in(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [t for each in found for t in tensors_in(each)] if isinstance(found, tuple) else []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_made_on_another_device(name: str, device: str) -> None:
    if name == "convolutions":  # makes its net, too
        found = CASES[name](Parts(device))
    else:
        parts = Parts(device)
        with torch.device("meta"):
            found = CASES[name](parts)
    for tensor in tensors_in(found):
        assert tensor.device.type == device
        # a radius is infinite where no class is any centre's but the point's own
        infinite = tensor.isposinf() if name == "purifier radius" else False
        assert bool((torch.isfinite(tensor.detach()) | infinite).all())


def test_the_check_sees_a_tensor_made_elsewhere() -> None:
    x = torch.ones(2)
    with torch.device("meta"), pytest.raises((RuntimeError, NotImplementedError)):
        (x + torch.ones(2)).sum().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_moves_and_predicts_the_same(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    net[0].requires_grad_(False)  # stays a constant
    model = BayesianModel(net, Categorical(), prior_scale=2.0)
    moved = model.to("cpu", dtype)
    assert (moved.num_params, moved.names, moved.prior_scale) == (10, model.names, 2.0)
    x, theta = torch.randn(5, 3), model.initial_theta()
    torch.testing.assert_close(
        moved.at(theta.to(dtype))(x.to(dtype)).logits,  # type: ignore[attr-defined]
        model.at(theta)(x).logits.to(dtype),  # type: ignore[attr-defined]
    )
    assert model.dtype == torch.float32  # the one that was given stays as it was


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast_trains_and_attacks_in_lower_precision(dtype: torch.dtype) -> None:
    """Outputs are those of the lower precision, theta and its gradient stay float32."""
    p = Parts("cpu")
    plain = p.predict(p.x).logits  # type: ignore[attr-defined]
    with torch.autocast("cpu", dtype):
        lower: Any = p.predict(p.x)
        x_adv = pgd(L2(0.5), 5)(p.predict, p.x, p.y)
        result = fit(p.model, p.posterior, Noise(0.1), (p.x, p.y), steps=3, lr=0.01)
    assert not torch.equal(lower.logits, plain)
    torch.testing.assert_close(lower.logits, plain, atol=0.05, rtol=0.05)
    assert float((lower.logits.exp().sum(-1) - 1).abs().max()) < 1e-6  # rounded before, not after
    assert x_adv.dtype == torch.float32
    assert bool((nll(p.predict(x_adv), p.y) > nll(p.predict(p.x), p.y)).all())
    assert result.skipped == 0
    assert p.posterior.mean.dtype == torch.float32


@pytest.mark.parametrize("kind", [MeanField, LowRank, PointMass, Ensemble])
def test_thetas_and_their_kl_are_not_rounded_under_autocast(
    kind: type[MeanField | LowRank | PointMass | Ensemble],
) -> None:
    p = Parts("cpu")
    posterior = kind(p.model)

    def numbers() -> tuple[torch.Tensor, ...]:
        thetas = posterior.rsample(2, generator=torch.Generator().manual_seed(0))
        return thetas, posterior.kl(0.7)

    plain = numbers()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, numbers(), plain))
        assert fit(p.model, posterior, Noise(0.1), (p.x, p.y), steps=2).skipped == 0


@pytest.mark.parametrize("device", DEVICES)
def test_every_command_takes_a_device(device: str, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    rows = [f"{k % 7},{k % 5},{'ab'[k % 2]}" for k in range(60)]
    table.write_text("\n".join(["p,q,y", *rows]))
    where = str(tmp_path / "run")
    data = ["--data", str(table), "--target", "y", "--epochs", "2", "--out", where]
    assert command(["train", *data, "--device", device, "--quiet"]) == 0
    few = ["--device", device, "--num", "6"]
    assert command(["evaluate", where, "--attack", "pgd", "--steps", "2", *few]) == 0
    assert command(["certify", where, "--draws", "20", *few]) == 0
    assert command(["predict", where, str(table), "--device", device]) == 0
    kept = load_trained(where)
    moved = kept.to(device)
    assert moved.model.device.type == device
    assert torch.equal(moved.thetas(3).cpu(), kept.thetas(3))


@pytest.mark.parametrize("name", ["meta", "abacus"] + ["cuda"] * (not HAVE["cuda"]))
def test_a_device_that_is_not_there_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert command(["train", "--data", "digits", "--out", str(out), "--device", name]) == 2
    assert f"device: must be one that torch has on this machine, such as cpu, got '{name}'" in (
        capsys.readouterr().err
    )
    assert not out.exists()

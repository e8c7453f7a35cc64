"""Channels and attacks of one's own in bundles, configurations and run folders: by name, and
trusted explicitly."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from advbayes import L2, AttackChannel, Ball, MeanField, Mixture, Noise, load, nll, save
from advbayes.attacks import loss_and_gradient
from advbayes.channels import GaussianDensity
from advbayes.checks import InputTypeError
from advbayes.cli import main
from advbayes.evaluation import load_evaluation
from advbayes.runs import create_run, load_trained, train
from advbayes.runs.config import ConfigError, make_config
from advbayes.runs.folder import command_of
from advbayes.store import StoreError, kinds
from advbayes.testing import AttackContract, check
from advbayes.types import Predictor
from tests.contracts import seeded, small_model


@dataclass(frozen=True)
class Gain:
    """x' = gain x + sigma noise."""

    gain: float
    sigma: float

    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return self.gain * x + self.sigma * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> GaussianDensity:
        return GaussianDensity((0.0,), (self.gain * x,), (self.sigma,))


@dataclass(frozen=True)
class Half:
    """Half a step."""

    ball: Ball

    def __call__(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        assert y is not None
        return x + self.ball.ascend(loss_and_gradient(predict, nll, x, y)[2], 0.5 * self.ball.eps)


CHANNELS = (
    Gain(1.5, 0.1),
    Mixture([0.25, 0.75], [Noise(0.1), Gain(1.5, 0.2)]),
    AttackChannel(Half(L2(0.5, box=(0.0, 1.0), scale=torch.tensor([1.0, 2.0, 1.0, 1.0]))), 0.1),
)


@pytest.mark.parametrize("channel", CHANNELS, ids=("channel", "within a mixture", "attack"))
def test_a_bundle_keeps_the_settings_and_needs_the_class(channel: object, tmp_path: Path) -> None:
    model = small_model("classification", torch.float32)
    place = tmp_path / "m.advbayes"
    save(place, model=model, posterior=MeanField(model), channel=channel)  # type: ignore[arg-type]
    assert load(place, own=(Gain, Half)).channel == channel
    for own in ((), (Noise,), (dict, int)):
        with pytest.raises(StoreError, match=r"own=.*tests.test_own_parts:(Gain|Half)"):
            load(place, own=own)
    for wrong in (Gain, (Gain(1.0, 0.1),), "Gain"):
        with pytest.raises(InputTypeError, match=r"own must be a tuple of classes.*got .*Gain"):
            load(place, own=wrong)  # type: ignore[arg-type]


class Faulty:
    """Moves nothing, and has one fault."""

    def __init__(self, fault: str, ball: Ball) -> None:
        self.fault, self.ball = fault, ball

    def __call__(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        x_adv = x.clone()
        match self.fault:
            case "writes into x":
                x.add_(0.01)
            case "another shape":
                return x_adv.unsqueeze(0)
            case "another dtype":
                return x_adv.to(torch.float64 if x.dtype == torch.float32 else torch.float32)
            case "outside":
                return x_adv + 10 * self.ball.eps
            case "moves at eps 0":
                return x_adv + 1e-6 * (self.ball.eps == 0)
            case "another generator":
                return x_adv + 1e-9 * torch.rand(()).to(x) * (self.ball.eps > 0)
            case "keeps the graph":
                return x_adv.requires_grad_()
            case "needs labels":
                assert y is not None
        return x_adv


FAULTS = "writes into x, another shape, another dtype, outside, moves at eps 0, keeps the graph"


@pytest.mark.parametrize("fault", [*FAULTS.split(", "), "another generator", "needs labels"])
def test_the_contract_of_attacks_refuses_each_fault(fault: str) -> None:
    check(AttackContract, lambda ball: Faulty("", ball))
    with pytest.raises(AssertionError):
        check(AttackContract, lambda ball: Faulty(fault, ball))


@dataclass(frozen=True)
class Several:
    """A part that holds others, anywhere."""

    parts: tuple[object, ...]
    other: object = None


@pytest.mark.parametrize(
    ("value", "needed"),
    [
        (Gain(1.5, 0.1), {Gain}),
        ((0.5, (Gain(1.5, 0.1),)), {Gain}),
        (Mixture([0.5, 0.5], [Noise(0.1), Gain(1.5, 0.1)]), {Gain}),
        (AttackChannel(Half(L2(0.5)), 0.1), {Half}),
        (Several(()), {Several}),
        (Several((Noise(0.1), (Gain(1.5, 0.1), None)), Half(L2(0.5))), {Several, Gain, Half}),
        (Several((), Several((Half(L2(0.5)),))), {Several, Half}),
    ],
)
def test_a_class_of_ones_own_is_built_at_any_depth_and_only_if_listed(
    value: object, needed: set[type]
) -> None:
    document = kinds.encode(value, "channel", {})
    assert kinds.decode(document, "channel", {}, tuple(needed)) == value
    for missing in needed:
        with pytest.raises(StoreError, match=rf"own=.*test_own_parts:{missing.__name__}"):
            kinds.decode(document, "channel", {}, tuple(needed - {missing}))


def test_what_a_file_says_of_a_class_is_checked(tmp_path: Path) -> None:
    document = kinds.encode(Gain(1.5, 0.1), "channel", {})
    assert document == {
        "kind": "own",
        "name": "tests.test_own_parts:Gain",
        "settings": {"gain": 1.5, "sigma": 0.1},
    }
    for settings in ({"gain": 1.5}, {"gain": 1.5, "sigma": 0.1, "more": 1}):
        with pytest.raises(StoreError, match="wanted Gain with"):
            kinds.decode({**document, "settings": settings}, "channel", {}, (Gain,))
    with pytest.raises(StoreError, match="got 'os:system'"):
        kinds.decode({**document, "name": "os:system"}, "channel", {}, (Gain,))

    @dataclass(frozen=True)
    class Hidden:
        gain: float

    with pytest.raises(StoreError, match="Hidden"):  # nobody could name it again
        kinds.encode(Hidden(1.0), "channel", {})


SOURCE = """
from dataclasses import dataclass
import torch
from advbayes import pgd
from advbayes.channels import GaussianDensity

@dataclass(frozen=True)
class Louder:
    gain: float
    sigma: float
    def sample(self, predict, x, y=None, *, generator=None):
        return self.gain * x + self.sigma * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    def density(self, predict, x, y=None):
        return GaussianDensity((0.0,), (self.gain * x,), (self.sigma,))

def louder(ball, sigma):
    return Louder(1 + ball.eps, sigma)

def steps(ball, sigma):
    return pgd(ball, 3)

def nothing(ball, sigma):
    return 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_louder_channel.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "my_louder_channel", raising=False)
    return "my_louder_channel"


def small(channel: str) -> object:
    return make_config(
        {
            "data": "diabetes",
            "hidden": [3],
            "epochs": 1,
            "eps": 0.5,
            "sigma": 0.2,
            "channel": channel,
        }
    )


@pytest.mark.parametrize("factory", ["louder", "steps"])
def test_a_run_trains_through_it_and_is_loaded_when_trusted(
    factory: str, module: str, tmp_path: Path
) -> None:
    with create_run(small(f"{module}:{factory}"), tmp_path / "run") as run:  # type: ignore[arg-type]
        with pytest.raises(
            ConfigError, match=f"channel: '{module}:{factory}' names code of your own"
        ):
            train(run, progress=False)
        assert train(run, progress=False, trusted=True).skipped == 0
    with pytest.raises(ConfigError, match="names code of your own"):
        load_trained(tmp_path / "run")
    trained = load_trained(tmp_path / "run", trusted=True)
    assert trained.defense == f"{module}:{factory}"
    if factory == "louder":
        assert repr(trained.channel) == "Louder(gain=1.5, sigma=0.2)"
    else:
        assert isinstance(trained.channel, AttackChannel)
        assert trained.channel.attack.ball == L2(0.5)  # type: ignore[attr-defined]
    drawn = trained.channel.sample(
        trained.predict(2), torch.zeros(3, 10), torch.zeros(3), generator=seeded()
    )  # type: ignore[union-attr]
    assert drawn.shape == (3, 10)


def test_bad_names_and_factories_are_told(module: str, tmp_path: Path) -> None:
    for name in ("louder", ":louder", "a:b:c"):
        with pytest.raises(ConfigError, match="channel: must be module:factory"):
            small(name)
    for name, message in (
        (f"{module}:nothing", "must return a channel or an attack, got int"),
        (f"{module}:absent", "absent"),
    ):
        with (
            create_run(small(name), tmp_path / name.split(":")[1]) as run,
            pytest.raises(ConfigError, match=message),
        ):  # type: ignore[arg-type]
            train(run, progress=False, trusted=True)


OWN_ATTACK = """
from dataclasses import dataclass
import torch
from advbayes import Ball


@dataclass(frozen=True)
class Push:
    ball: Ball
    far: float = 1.0

    def __call__(self, predict, x, y=None, *, generator=None):
        push = torch.zeros_like(x)
        push[:, 0] = self.far * self.ball.eps
        return x + push


def too_far(ball):
    return Push(ball, 3.0)


def nothing(ball):
    return 3
"""


@pytest.fixture
def attacked_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pushing.py").write_text(OWN_ATTACK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "pushing", raising=False)
    argv = ["train", "--data", "diabetes", "--defense", "none", "--posterior", "point"]
    assert main([*argv, "--epochs", "1", "--out", "run", "--quiet"]) == 0
    return tmp_path / "run"


EVALUATED = ["evaluate", "run", "--attack", "pgd1", "--num", "6", "--eps", "0.5", "--eps", "1"]


def test_an_attack_of_ones_own_is_evaluated_when_trusted(
    attacked_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*EVALUATED, "--attack", "pushing:Push"]) == 2
    assert "attack: 'pushing:Push' names code of your own" in capsys.readouterr().err
    asked = [*EVALUATED, "--attack", "pushing:Push", "--trust-network"]
    for _ in range(2):  # made, and found again
        capsys.readouterr()
        assert main([*asked, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
    folder = Path(told["evaluation"])
    assert ":" not in folder.name
    rows = {(row["attack"], row["eps"]): row for row in told["rows"]}
    assert {("pushing:Push", 0.5), ("pushing:Push", 1.0), ("worst", 1.0)} <= rows.keys()
    found = load_evaluation(folder)
    norms = found.columns("none", "pushing:Push", 1.0)["norm"]
    torch.testing.assert_close(norms, torch.ones(6, dtype=torch.float64))
    assert command_of(folder)[-1] == "--trust-network"
    out = ["--attack", "pushing:Push", "--num", "3", "--eps", "1", "--out", "pushed.npz"]
    assert main(["attack", "run", *out, "--trust-network"]) == 0
    assert main(["report", "run"]) == 0


def test_an_attack_of_ones_own_that_is_none_or_leaves_its_ball(
    attacked_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*EVALUATED, "--attack", "pushing:nothing", "--trust-network"]) == 2
    assert "attack: 'pushing:nothing' must return an attack" in capsys.readouterr().err
    assert main([*EVALUATED, "--attack", "pushing:absent", "--trust-network"]) == 2
    assert "must be an importable module:factory" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="'pushing:too_far' goes up to 3 times as far"):
        assert main([*EVALUATED, "--attack", "pushing:too_far", "--trust-network"]) == 0

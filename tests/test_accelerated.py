"""The faster passes through many thetas are those of `BayesianModel.run`, for every kind of net,
and can be switched off."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import advbayes
from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    MeanField,
    Mixture,
    Noise,
    PosteriorPredictive,
    accelerated,
    fit,
    margin,
    nll,
    one_step,
    pgd,
)
from advbayes.networks import conv_net
from advbayes.seeds import generator_for
from tests import forking
from tests.test_threads import Own, Residual


class Twice(nn.Module):
    """Convolves x itself in two ways, once by a function, and adds x to the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kernel = (
            nn.Conv2d(1, 1, 3, padding=1),
            nn.Parameter(torch.randn(1, 1, 5, 5)),
        )
        self.last = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + functional.conv2d(x, self.kernel, None, (1, 1), (2, 2), (1, 1), 1)
        out: Tensor = self.last((torch.tanh(h) + x + self.first(h)).flatten(1))
        return out


class Sideways(nn.Module):
    """Convolves x turned by the same numbers in memory, and x without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.stopped = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3)
        self.last = nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.turned(x.transpose(2, 3)), self.stopped(x.detach())], dim=1)
        out: Tensor = self.last(torch.tanh(h).flatten(1))
        return out


class Branching(nn.Module):
    """Looks at its numbers, which cannot be vectorised."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if float(y.detach().sum()) > 0 else 2 * y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(x)[0][:, -1])
        return out


def frozen_first() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    net[0].requires_grad_(False)
    return net


NETS = {
    "paper": (lambda: conv_net(3, size=8), (1, 8, 8)),
    "two channels": (lambda: conv_net(3, channels=2, size=8), (2, 8, 8)),
    "three channels": (lambda: conv_net(3, channels=3, size=8), (3, 8, 8)),
    "odd after pooling": (lambda: conv_net(3, size=10), (1, 10, 10)),
    "no bias, even kernel, uneven padding": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, (2, 3), padding=(0, 1), bias=False),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(80, 3),
        ),
        (1, 9, 10),
    ),
    "odd first output": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3)
        ),
        (1, 9, 9),
    ),
    "stride, dilation, groups": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2),
            nn.Tanh(),
            nn.Conv2d(4, 6, 2, dilation=2, groups=2),
            nn.Flatten(),
            nn.Linear(24, 3),
        ),
        (1, 9, 9),
    ),
    "edges that no kernel reaches": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(4, 6, 2, stride=2),
            nn.Flatten(),
            nn.Linear(36, 3),
        ),
        (1, 12, 16),
    ),
    "many activations": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GELU(),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3),
            nn.ReLU(),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(16, 5),
            nn.ReLU(),
            nn.Identity(),
            nn.Linear(5, 3),
        ),
        (1, 8, 8),
    ),
    "in place": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 1),
            nn.ELU(inplace=True),
            nn.Conv2d(4, 4, 3),
            nn.LeakyReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(64, 3),
        ),
        (1, 8, 8),
    ),
    "ends in an activation": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten(), nn.ReLU()),
        (1, 8, 8),
    ),
    "flatten, linear": (
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(6, 5),
            nn.ReLU(),
            nn.Linear(5, 4, bias=False),
            nn.Tanh(),
            nn.Linear(4, 3),
        ),
        (2, 3),
    ),
    "linear alone": (lambda: nn.Linear(6, 3), (6,)),
    "not a stack": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 5), nn.Softplus()), nn.Linear(5, 3)),
        (6,),
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3)),
        (6,),
    ),
    "residual, group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), GroupResidual(), nn.Flatten(), nn.Linear(144, 3)
        ),
        (1, 8, 8),
    ),
    "a module of one's own": (Own, (6,)),
    "the first convolution twice": (Twice, (1, 8, 8)),
    "views of x": (Sideways, (1, 8, 8)),
    "frozen first layer": (frozen_first, (1, 8, 8)),
    "branches on values": (Branching, (6,)),
    "recurrent": (Recurrent, (3, 2)),
    "tied": (lambda: nn.Sequential(*[nn.Linear(3, 3)] * 3), (3,)),
    "parametrized": (
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 3)
        ),
        (6,),
    ),
    "parametrized convolution": (
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Conv2d(1, 2, 3)), nn.Flatten(), nn.Linear(72, 3)
        ),
        (1, 8, 8),
    ),
}


class GroupResidual(Residual):
    def __init__(self) -> None:
        super().__init__(4)
        self.norms = nn.ModuleList(nn.GroupNorm(2, 4) for _ in range(2))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def stacked(name: str, dtype: torch.dtype, num: int = 5) -> tuple[BayesianModel, Tensor, Tensor]:
    make, event = NETS[name]
    generator = generator_for(0, name)
    model = BayesianModel(make().to(dtype), Categorical())
    thetas = 0.5 * torch.randn(num, model.num_params, dtype=dtype, generator=generator)
    return model, thetas, torch.randn(7, *event, dtype=dtype, generator=generator)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("pixels", [0, 3072], ids=("theta by theta", "one batch"))
def test_outputs_and_gradients_are_those_of_each_theta(
    name: str, dtype: torch.dtype, pixels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advbayes.accelerated.passes._PIXELS", pixels)
    model, thetas, x = stacked(name, dtype)
    before = x.clone()
    outputs, vjp = accelerated.run(model, thetas, x)
    wanted_outputs, wanted_vjp = model.run(thetas, x)
    cotangent = torch.randn(outputs.shape, dtype=dtype, generator=generator_for(1, name))
    kept = cotangent.clone()
    wanted = wanted_vjp(cotangent)
    tolerance = 1e-4 if dtype is torch.float32 else 1e-12
    assert torch.allclose(outputs, wanted_outputs, rtol=tolerance, atol=tolerance)
    # In float32 rounding may put a number on the other side of a ReLU, which changes one path of
    # thousands.
    off = float((vjp(cotangent) - wanted).norm() / wanted.norm())
    assert off < (1e-2 if dtype is torch.float32 else 1e-12), off
    assert torch.equal(cotangent, kept)
    assert torch.equal(x, before)
    assert not x.requires_grad
    assert not outputs.requires_grad
    with torch.no_grad():
        assert torch.allclose(
            accelerated.run(model, thetas, x)[0], outputs, rtol=tolerance, atol=tolerance
        )


IN_MEMORY = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "turned": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "every other": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "one for all": lambda x: x[:1].expand_as(x),
    "one by one": lambda x: x[:1],
    "none": lambda x: x[:0],
}


@pytest.mark.parametrize("pixels", [0, 3072], ids=("theta by theta", "one batch"))
@pytest.mark.parametrize("laid", IN_MEMORY)
@pytest.mark.parametrize("name", ["paper", "two channels", "three channels"])
def test_images_may_lie_in_memory_as_they_like(
    name: str, laid: str, pixels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advbayes.accelerated.passes._PIXELS", pixels)
    model, thetas, x = stacked(name, torch.float64)
    x = IN_MEMORY[laid](x)
    plain = x.clone(memory_format=torch.contiguous_format)
    cotangent = torch.randn(5, len(x), 3, dtype=torch.float64, generator=generator_for(1, name))
    wanted, wanted_vjp = model.run(thetas, plain)
    gradient = wanted_vjp(cotangent)
    for outputs, vjp in (model.run(thetas, x), accelerated.run(model, thetas, x)):
        assert torch.allclose(outputs, wanted, rtol=1e-12, atol=1e-12)
        assert torch.allclose(vjp(cotangent), gradient, rtol=1e-12, atol=1e-12)


def test_the_definition_is_the_network_at_each_theta() -> None:
    model, thetas, x = stacked("a module of one's own", torch.float64)
    outputs, vjp = model.run(thetas, x)
    leaf = x.clone().requires_grad_()
    nets = []
    for theta in thetas:
        net = Own().double()
        nn.utils.vector_to_parameters(theta, net.parameters())
        nets.append(net.requires_grad_(False))
    apart = torch.stack([net(leaf) for net in nets])
    cotangent = torch.randn(outputs.shape, dtype=torch.float64, generator=generator_for(1, "own"))
    assert torch.allclose(outputs, apart, rtol=1e-12, atol=1e-12)
    assert torch.allclose(
        vjp(cotangent), torch.autograd.grad(apart, leaf, cotangent)[0], rtol=1e-12, atol=1e-12
    )


def test_a_hook_sees_every_pass_of_every_theta() -> None:
    model, thetas, x = stacked("layer norm", torch.float32)
    seen: list[torch.Size] = []
    model.net[0].register_forward_hook(lambda layer, inputs, output: seen.append(output.shape))
    accelerated.run(model, thetas, x)
    assert seen == [torch.Size([7, 5])] * 5


def test_threads_share_the_work_and_change_nothing(two_threads: None) -> None:
    model = BayesianModel(conv_net(), Categorical())
    thetas = 0.1 * torch.randn(10, model.num_params, generator=generator_for(0, "thetas"))
    x, y = torch.rand(150, 1, 28, 28, generator=generator_for(0, "x")), torch.arange(150) % 10
    predict = PosteriorPredictive(model, thetas)
    together, logits = predict.loss_and_gradient(nll, x, y), predict(x).logits
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    for one, other in zip(together, predict.loss_and_gradient(nll, x, y), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(logits, predict(x).logits)


@pytest.mark.parametrize("numbers", [1, 1 << 20], ids=("parts", "whole"))
@pytest.mark.parametrize("name", ["paper", "flatten, linear"])
def test_autocast_is_heeded(
    name: str, numbers: int, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advbayes.accelerated.passes._NUMBERS", numbers)
    model, thetas, x = stacked(name, torch.float32)
    predict, y = PosteriorPredictive(model, thetas), torch.arange(7) % 3
    x = x.repeat(10, *[1] * (x.ndim - 1))  # enough for two threads
    exact = predict.loss_and_gradient(nll, x, y.repeat(10))[2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = predict.loss_and_gradient(nll, x, y.repeat(10))[2]
        assert predict(x).logits.dtype == torch.float32  # of layers in bfloat16
    assert rounded.dtype == torch.float32
    assert 1e-5 < float((rounded - exact).norm() / exact.norm()) < 0.1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_parts_run_in_the_modes_of_the_caller(
    mode: type, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advbayes.accelerated.passes._NUMBERS", 1)
    model, thetas, _ = stacked("flatten, linear", torch.float32)
    x = torch.randn(70, 2, 3, generator=generator_for(0, "x"))
    wanted = PosteriorPredictive(model, thetas)(x).logits

    def modes(rows: slice) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with mode():
        seen = accelerated.in_parts(modes, model, thetas, x)
        assert len(seen) > 1
        assert set(seen) == {modes(slice(0))}
        assert torch.equal(PosteriorPredictive(model, thetas)(x.clone()).logits, wanted)


def test_an_error_in_a_thread_is_the_callers(two_threads: None) -> None:
    model = BayesianModel(conv_net(), Categorical())
    predict = PosteriorPredictive(model, torch.zeros(10, model.num_params))

    def refusing(prediction: torch.distributions.Distribution, y: Tensor) -> Tensor:
        raise ArithmeticError("refused")

    with pytest.raises(ArithmeticError, match="refused"):
        predict.loss_and_gradient(
            refusing, torch.rand(150, 1, 28, 28), torch.zeros(150, dtype=torch.long)
        )
    assert torch.get_num_threads() == 2


# --- Switched off, blocked, and behind one door -------------------------------------------------


def answers() -> list[Tensor]:
    """Predictions, an attack and a training run on a small convolutional net."""
    model, thetas, x = stacked("paper", torch.float64)
    y = torch.arange(7) % 3
    predict = PosteriorPredictive(model, thetas)
    attacks = [AttackChannel(one_step(L2(0.5), loss), 0.1) for loss in (nll, margin)]
    posterior = MeanField(model, init=thetas[0])
    fit(
        model,
        posterior,
        Mixture([0.4, 0.3, 0.3], [Noise(0.1), *attacks]),
        (x, y),
        steps=4,
        progress=False,
    )
    return [predict(x).logits, pgd(L2(0.5), 3)(predict, x, y), posterior.mu.detach()]


def test_switched_off_all_answers_are_those_of_the_definitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = answers()
    calls: list[object] = []
    monkeypatch.setattr(accelerated, "run", lambda *given: calls.append(given))
    monkeypatch.setattr(accelerated, "in_parts", lambda *given: calls.append(given))
    with accelerated.disabled():
        assert not accelerated.is_enabled()
        plain = answers()
    monkeypatch.setenv("ADVBAYES_ACCELERATED", "0")
    again = answers()
    assert not calls
    for one, other, third in zip(fast, plain, again, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)
        assert torch.equal(other, third)


BLOCKED = """
import sys
sys.modules["advbayes.accelerated"] = None
import torch
from torch import nn
from advbayes import *
net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
model = BayesianModel(net, Categorical())
x, y = torch.rand(20, 3), torch.arange(20) % 2
posterior = MeanField(model)
ball = L2(0.5, box=(0, 1))
channel = AttackChannel(one_step(ball), 0.1)
fit(model, posterior, channel, (x, y), steps=3)
predict = PosteriorPredictive(model, posterior.sample(3))
evaluate(predict, (x, y), attacks={"PGD": pgd(ball, 3)})
Purifier(model, channel, posterior.sample(2), reference=(x, y))(x)
certify(Smoothed(predict, sigma=0.5, num=4), x[:2], n0=4, n=8)
assert [name for name in sys.modules if name.startswith("advbayes.accelerated.")] == []
try:
    fit(model, posterior, channel, (x, y), steps=1, compile=True)
except ImportError as error:
    assert "compile must be False" in str(error)
else:
    raise AssertionError("compiled without the folder")
"""


def test_without_the_folder_everything_but_compiling_works() -> None:
    done = forking.ran(BLOCKED, anew=True)
    assert done.returncode == 0, done.stderr


def test_no_mechanism_is_named_outside_the_folder() -> None:
    """No private name of torch, no operator table, no compiler, no tracer."""
    root = Path(advbayes.__file__).parent
    private = re.compile(
        r"torch\.(\w+\.)*_[a-z]|torch\.ops|\baten\b|inductor|make_fx|is_compiling|is_tracing|vmap|torch\.compile\b"
    )
    # the base of all layers with batch statistics
    allowed = {"torch.nn.modules.batchnorm import _NormBase"}
    named = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        if "accelerated" not in path.parts
        for line in path.read_text().splitlines()
        if private.search(line) and not any(name in line for name in allowed)
    ]
    assert named == []


def test_the_folder_stays_small() -> None:
    files = (Path(advbayes.__file__).parent / "accelerated").glob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in files) <= 700

"""The joint pass of many thetas against the network run theta by theta with autograd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from advbayes import BayesianModel, Categorical, PosteriorPredictive, nll
from advbayes.networks import conv_net
from advbayes.seeds import generator_for
from advbayes.stacked import Stacked

NETS = {
    "paper": (lambda: conv_net(3, size=8), (1, 8, 8)),
    "two channels": (lambda: conv_net(3, channels=2, size=8), (2, 8, 8)),
    "three channels": (lambda: conv_net(3, channels=3, size=8), (3, 8, 8)),
    "odd after pooling": (lambda: conv_net(3, size=10), (1, 10, 10)),
    "no bias, even kernel, uneven padding": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, (2, 3), padding=(0, 1), bias=False), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(80, 3)
        ),
        (1, 9, 10),
    ),
    "odd first output": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3)),
        (1, 9, 9),
    ),
    "stride, dilation, groups": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.Conv2d(4, 6, 2, dilation=2, groups=2), nn.Flatten(), nn.Linear(24, 3)
        ),
        (1, 9, 9),
    ),
    "edges that no kernel reaches": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 6, 2, stride=2), nn.Flatten(), nn.Linear(36, 3)
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
    "ends in an activation": (lambda: nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten(), nn.ReLU()), (1, 8, 8)),
    "flatten, linear": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)),
        (2, 3),
    ),
    "linear alone": (lambda: nn.Linear(6, 3), (6,)),
    "not a stack": (lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 5), nn.Softplus()), nn.Linear(5, 3)), (6,)),
}


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
def test_outputs_and_gradients_are_those_of_each_theta(name: str, dtype: torch.dtype) -> None:
    model, thetas, x = stacked(name, dtype)
    with torch.no_grad():  # as attacks may be called
        outputs, pull = Stacked(model, thetas).traced(x)
    cotangent = torch.randn(outputs.shape, dtype=dtype, generator=generator_for(1, name))
    kept = cotangent.clone()
    at = x.clone().requires_grad_()
    apart = torch.stack([model.output(theta, at)[0] for theta in thetas])
    (wanted,) = torch.autograd.grad(apart, at, cotangent)
    tolerance = 1e-4 if dtype is torch.float32 else 1e-12
    assert torch.allclose(outputs, apart, rtol=tolerance, atol=tolerance)
    # In float32 rounding may put a number on the other side of a ReLU, which changes one path of thousands.
    off = float((pull(cotangent) - wanted).norm() / wanted.norm())
    assert off < (1e-2 if dtype is torch.float32 else 1e-12), off
    assert torch.equal(cotangent, kept)
    assert torch.equal(Stacked(model, thetas)(x), outputs)
    assert not outputs.requires_grad


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


@pytest.mark.parametrize("name", ["paper", "flatten, linear"])
def test_autocast_is_heeded(name: str, two_threads: None) -> None:
    model, thetas, x = stacked(name, torch.float32)
    predict, y = PosteriorPredictive(model, thetas), torch.arange(7) % 3
    x = x.repeat(10, *[1] * (x.ndim - 1))  # enough for two threads
    exact = predict.loss_and_gradient(nll, x, y.repeat(10))[2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = predict.loss_and_gradient(nll, x, y.repeat(10))[2]
        assert predict(x).logits.dtype == torch.bfloat16
    assert rounded.dtype == torch.float32
    assert 1e-5 < float((rounded - exact).norm() / exact.norm()) < 0.1


def test_an_error_in_a_thread_is_the_callers(two_threads: None) -> None:
    model = BayesianModel(conv_net(), Categorical())
    predict = PosteriorPredictive(model, torch.zeros(10, model.num_params))

    def refusing(prediction: torch.distributions.Distribution, y: Tensor) -> Tensor:
        raise ArithmeticError("refused")

    with pytest.raises(ArithmeticError, match="refused"):
        predict.loss_and_gradient(refusing, torch.rand(150, 1, 28, 28), torch.zeros(150, dtype=torch.long))
    assert torch.get_num_threads() == 2

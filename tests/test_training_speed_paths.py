"""The fast paths compute what the plain ones do: compiled is eager up to rounding, hand-made gradients are autograd's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Gaussian,
    Linf,
    LowRank,
    MeanField,
    Mixture,
    Noise,
    PointMass,
    Trades,
    fit,
)
from advbayes.attacks import entropy, loss_and_gradient, margin, nll, one_step, pgd, squared_error
from advbayes.channels import Draws, draws, sample_at
from advbayes.gradients import eager_gradient
from advbayes.layers import _ThinConvolution, is_thin, thin_forward
from advbayes.objectives import _AttackedTheta
from advbayes.tracing import CompileError
from advbayes.types import Channel, Loss


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classifier(seed: int = 0) -> BayesianModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3))
    return BayesianModel(net, Categorical())


def regressor(seed: int = 0, learned: bool = False) -> BayesianModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    return BayesianModel(net, Gaussian(0.5, learned=learned))


IMAGES = torch.rand(70, 1, 6, 6, generator=generator(1)), torch.randint(3, (70,), generator=generator(2))
ROWS = torch.randn(70, 5, generator=generator(3)), torch.randn(70, generator=generator(4))


def image_mix() -> Mixture:
    attacks = [AttackChannel(one_step(L2(1.0), loss), 0.1) for loss in (nll, margin, entropy)]
    return Mixture([0.4, 0.2, 0.2, 0.2], [Noise(0.1), *attacks])


def row_mix() -> Mixture:
    return Mixture([0.4, 0.6], [Noise(0.1), AttackChannel(one_step(L2(1.0), squared_error), 0.1)])


# --- Compiled is eager ------------------------------------------------------------------------------------------------

# Each costs a cold compilation, so each covers several paths.
CASES = {
    "mean field, two thetas, mixture inside": (regressor, MeanField, row_mix, {"num_theta": 2}),
    "low rank, penalty, losses by example": (classifier, LowRank, image_mix, {"penalty": Trades(2.0)}),
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
            progress=False,
            compile=compile,
        )
        ends.append(posterior.mean)
        histories.append(result.history)
    for column in ("bound", "log_likelihood", "kl", "penalty", "gradient_norm"):
        assert histories[1][column] == pytest.approx(histories[0][column], rel=2e-4, abs=1e-5), column
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)


def test_compiling_what_branches_on_values_says_so() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y if float(y.detach().sum()) > 0 else 2 * y

    model = BayesianModel(Branching(), Gaussian(0.5))
    with pytest.raises(CompileError, match="compile=True could not compile a step of BayesianModel"):
        fit(model, MeanField(model), Noise(0.0), ROWS, steps=1, progress=False, compile=True)


def test_compiling_gradients_through_the_attack_is_refused() -> None:
    model = regressor()
    with pytest.raises(ValueError, match="through=True"):
        fit(model, MeanField(model), row_mix(), ROWS, objective=ChannelELBO(70, through=True), steps=1, compile=True)


# --- The channel, its randomness drawn beforehand ----------------------------------------------------------------------

CHANNELS: dict[str, Channel] = {
    "identity": Noise(0.0),
    "noise": Noise(0.3),
    "one step": AttackChannel(one_step(L2(1.0)), 0.1),
    "mixture": image_mix(),
    "interleaved": Mixture(
        [0.3, 0.2, 0.1, 0.4],
        [AttackChannel(one_step(L2(1.0), nll), 0.2), Noise(0.1), AttackChannel(one_step(L2(1.0), entropy), 0.2), Noise(0.0)],
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


# --- Gradients by hand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("posterior_type", [MeanField, PointMass, LowRank])
@pytest.mark.parametrize("learned", [False, True])
def test_a_step_s_gradient_is_that_of_the_bound(posterior_type: type[MeanField], learned: bool, through: bool) -> None:
    model = regressor(learned=learned)
    posterior = posterior_type(model)
    objective = ChannelELBO(70, num_theta=2, through=through, kl_weight=0.7)
    x, y = ROWS
    found = eager_gradient(model, posterior, row_mix(), objective)(x, y, generator(5))
    terms = objective(model, posterior, row_mix(), x, y, generator=generator(5))
    expected = torch.autograd.grad(-terms.bound / 70, list(posterior.parameters()))
    for one, other in zip(found.gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
    assert found.log_likelihood == pytest.approx(float(terms.log_likelihood.detach()), rel=1e-5)
    assert found.kl == pytest.approx(float(terms.kl.detach()), rel=1e-5, abs=1e-5)
    assert found.norm == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in expected)), rel=1e-4)


def test_gradients_through_the_attack_differ_from_those_that_stop_there() -> None:
    model = regressor()
    posterior = MeanField(model)
    steps = [
        eager_gradient(model, posterior, row_mix(), ChannelELBO(70, through=through))(*ROWS, generator(5)) for through in (0, 1)
    ]
    assert not torch.allclose(steps[0].gradients[0], steps[1].gradients[0], rtol=1e-3)


def test_classification_s_output_gradient_is_autograd_s() -> None:
    output, y = torch.randn(9, 4, generator=generator()).requires_grad_(), torch.randint(4, (9,), generator=generator())
    total, gradient = Categorical().weighted_gradient(output.detach(), y, -0.25)
    log_p = Categorical().log_prob(output, y, torch.empty(0)).sum()
    assert total == pytest.approx(float(log_p.detach()), rel=1e-6)
    torch.testing.assert_close(gradient, -0.25 * torch.autograd.grad(log_p, output)[0])


@pytest.mark.parametrize("loss", [nll, squared_error, margin, entropy])
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_the_attack_s_shortcut_is_the_gradient_through_the_prediction(loss: Loss, scale: float) -> None:
    if loss in (margin, entropy, nll):
        model, (x, y) = classifier(), IMAGES
    else:
        model, (x, y) = BayesianModel(regressor().net.requires_grad_(), Gaussian(scale)), ROWS
    theta = model.initial_theta()
    short = _AttackedTheta(model, theta)
    expected = loss_and_gradient(model.at(theta), loss, x, y)[2]
    torch.testing.assert_close(short.input_gradient(loss, x, y), expected, rtol=1e-4, atol=1e-6)


def test_a_frozen_parameter_stays() -> None:
    model = regressor()
    posterior = MeanField(model)
    posterior.rho.requires_grad_(False)
    before = posterior.rho.detach().clone(), posterior.mu.detach().clone()
    fit(model, posterior, Noise(0.1), ROWS, steps=3, progress=False)
    assert torch.equal(posterior.rho, before[0])
    assert not torch.equal(posterior.mu, before[1])


# --- Convolutions ------------------------------------------------------------------------------------------------------


def test_the_thin_convolution_has_right_first_and_second_derivatives() -> None:
    layer = nn.Conv2d(2, 3, (3, 2), padding=(1, 0)).double()
    assert is_thin(layer)
    x = torch.randn(2, 2, 4, 5, dtype=torch.float64, generator=generator()).requires_grad_()

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return _ThinConvolution.apply(x, weight, bias, (1, 0))  # type: ignore[no-any-return, no-untyped-call]

    assert torch.autograd.gradcheck(convolve, (x, layer.weight, layer.bias))
    assert torch.autograd.gradgradcheck(convolve, (x, layer.weight, layer.bias))
    torch.testing.assert_close(thin_forward(layer)(x), layer(x))


def test_layers_in_sequence_are_the_net() -> None:
    tied = nn.Linear(6, 6, bias=False)
    nets = {
        "nested and tied": (nn.Sequential(nn.Sequential(nn.Flatten(), tied, nn.Tanh()), tied, nn.Linear(6, 2)), (4, 1, 2, 3)),
        "convolutions": (
            nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, bias=False), nn.Conv2d(4, 4, 3, padding="same", groups=2), nn.Flatten(1)),
            (3, 1, 7, 7),
        ),
    }
    for name, (net, shape) in nets.items():
        model, x = BayesianModel(net, Categorical()), torch.randn(shape, generator=generator())
        assert model._layers is not None, name
        torch.testing.assert_close(model.output(model.initial_theta(), x)[0], net(x), rtol=1e-4, atol=1e-5)
    frozen = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    assert BayesianModel(frozen, Categorical())._layers is None


def test_one_channel_images_really_run_channels_last() -> None:
    model = classifier()
    seen: list[Tensor] = []
    model.net[0].register_forward_hook(lambda layer, inputs, output: seen.append(output))
    model.output(model.initial_theta(), IMAGES[0])
    assert seen[0].stride(1) == 1
    assert "forward" not in vars(model.net[0])

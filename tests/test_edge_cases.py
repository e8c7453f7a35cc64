"""What users do that the authors did not: repeated modules, odd shapes, inference mode, broadcast
labels, plain autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    Ensemble,
    FreshPredictive,
    Gaussian,
    MeanField,
    Mixture,
    Noise,
    PosteriorPredictive,
    evaluate,
    fit,
    nll,
    one_step,
    pgd,
)
from advbayes.training import State
from advbayes.types import Predictor
from tests.contracts import seeded, small_data, small_model

ACT = nn.ReLU()
SHARED = nn.Linear(6, 6)
NETS = {
    "one activation used twice": (
        nn.Sequential(nn.Linear(4, 6), ACT, nn.Linear(6, 6), ACT, nn.Linear(6, 3)),
        (5, 4),
    ),
    "one linear layer used twice": (
        nn.Sequential(nn.Linear(4, 6), SHARED, nn.Tanh(), SHARED, nn.Linear(6, 3)),
        (5, 4),
    ),
    "in-place activation after Flatten": (
        nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(4, 3)),
        (5, 1, 8, 8),
    ),
    "spectral norm": (
        nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)
        ),
        (5, 4),
    ),
    "strided first convolution": (
        nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)),
        (5, 1, 8, 8),
    ),
    "two channels": (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 3),
        ),
        (5, 2, 8, 8),
    ),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("num", [1, 40])
def test_the_fast_predictive_computes_the_net(name: str, num: int) -> None:
    net, shape = NETS[name]
    model = BayesianModel(net.double(), Categorical())
    thetas = torch.randn(num, model.num_params, generator=seeded(), dtype=torch.float64)
    x, y = torch.rand(shape, generator=seeded(1), dtype=torch.float64), torch.arange(shape[0]) % 3
    predict = PosteriorPredictive(model, thetas)
    plain = torch.stack([model.at(theta)(x).probs for theta in thetas]).mean(0)
    torch.testing.assert_close(predict(x).probs, plain)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(predict(leaf).probs.detach(), plain)
    expected = torch.autograd.grad(nll(predict(leaf), y).sum(), leaf)[0]
    torch.testing.assert_close(predict.loss_and_gradient(nll, x, y)[2], expected)


def test_one_predictive_sees_images_of_two_shapes() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 3)
    )
    model = BayesianModel(net, Categorical())
    thetas = torch.randn(3, model.num_params, generator=seeded())
    predict = PosteriorPredictive(model, thetas)
    for shape in ((2, 1, 4, 8), (2, 1, 8, 4)):
        x = torch.rand(shape, generator=seeded(1))
        plain = torch.stack([model.at(theta)(x).probs for theta in thetas]).mean(0)
        torch.testing.assert_close(predict(x).probs, plain)


def test_attacks_and_fit_refuse_inference_mode() -> None:
    model = small_model("classification", torch.float32)
    x, y = small_data("classification", torch.float32)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        one_step(L2(0.3))(model.at(model.initial_theta()), x, y)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        fit(model, MeanField(model), Noise(0.0), (x, y), steps=1)


def test_fit_under_no_grad_is_fit() -> None:
    x, y = small_data("classification", torch.float32)
    model = small_model("classification", torch.float32)
    outside, inside = MeanField(model), MeanField(model)
    channel = AttackChannel(pgd(L2(0.3), 3), 0.1)
    fit(model, outside, channel, (x, y), steps=3)
    with torch.no_grad():
        fit(model, inside, channel, (x, y), steps=3)
    assert torch.equal(outside.mu, inside.mu)


@pytest.mark.parametrize("attack", [one_step(L2(0.3)), pgd(L2(0.3), 3)])
def test_labels_and_losses_are_never_broadcast(attack: object) -> None:
    model = small_model("classification", torch.float32)
    x, y = small_data("classification", torch.float32)
    for predict in (
        model.at(model.initial_theta()),
        PosteriorPredictive(model, MeanField(model).sample(3)),
    ):
        with pytest.raises(ValueError, match="one value for each of the 12 examples"):
            attack(predict, x, y.unsqueeze(1))  # type: ignore[operator]
        with pytest.raises(ValueError, match="one target for each of the 12 examples"):
            attack(predict, x, y[:1])  # type: ignore[operator]
    with pytest.raises(ValueError, match="one value for each"):
        pgd(L2(0.3), 3, lambda p, t: nll(p, t).mean())(model.at(model.initial_theta()), x, y)


def test_targets_of_many_outputs_are_never_broadcast() -> None:
    model = BayesianModel(nn.Linear(4, 3), Gaussian(1.0))
    prediction = model.at(model.initial_theta())(torch.rand(6, 4))
    assert prediction.log_prob(torch.zeros(6, 3)).shape == (6,)
    for wrong in (torch.zeros(6, 1), torch.zeros(3), torch.zeros(1, 3)):
        with pytest.raises(ValueError, match="y must have"):
            prediction.log_prob(wrong)


def test_checkpoints_are_copies() -> None:
    model = small_model("classification", torch.float32)
    x, y = small_data("classification", torch.float32)
    saved: list[State] = []
    fit(
        model,
        MeanField(model),
        Noise(0.1),
        (x, y),
        steps=5,
        checkpoint=saved.append,
        checkpoint_every=2,
    )
    assert [state.step for state in saved] == [2, 4, 5]
    assert [len(state.history["bound"]) for state in saved] == [2, 4, 5]


def test_an_epoch_of_a_loader_is_one_pass() -> None:
    model = small_model("classification", torch.float32)
    x, y = small_data("classification", torch.float32, num=10)
    assert (
        fit(
            model,
            MeanField(model),
            Noise(0.0),
            DataLoader(TensorDataset(x, y), batch_size=4),
            epochs=2,
        ).steps
        == 6
    )


def test_members_that_cannot_be_drawn_are_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    with pytest.raises(ValueError, match="reset_parameters"):
        Ensemble(BayesianModel(Bare(), Categorical()), num=3)


def test_a_custom_attack_with_plain_autograd_trains() -> None:
    def signs(
        predict: Predictor, x: Tensor, y: Tensor | None = None, *, generator: object = None
    ) -> Tensor:
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(nll(predict(leaf), y).sum(), leaf)
        return x + 0.1 * gradient.sign()

    model = small_model("classification", torch.float32)
    x, y = small_data("classification", torch.float32)
    assert fit(model, MeanField(model), AttackChannel(signs, 0.1), (x, y), steps=2).skipped == 0


def test_float64_arrays_meet_float64_models() -> None:
    model = small_model("classification", torch.float64)
    x, y = small_data("classification", torch.float64)
    predict = PosteriorPredictive(model, MeanField(model).sample(2))
    assert (
        evaluate(predict, (x.numpy(), y.numpy()), attacks={"PGD": pgd(L2(0.3), 2)})
        .estimate("accuracy")
        .num
        == 12
    )


def test_mixed_dtypes_and_foreign_posteriors_are_named() -> None:
    model = small_model("classification", torch.float32)
    x, y = small_data("classification", torch.float32)
    with pytest.raises(TypeError, match=r"posterior must be torch.float32"):
        fit(model, MeanField(model).double(), Noise(0.0), (x, y), steps=1)
    with pytest.raises(ValueError, match="posterior must be over the model's"):
        FreshPredictive(model, MeanField(small_model("regression", torch.float32)), 3)
    with pytest.raises(ValueError, match="x must have the shape that net takes"):
        fit(model, MeanField(model), Noise(0.0), (x[:, :2], y), steps=1)
    with pytest.raises(ValueError, match="box must contain the data"):
        pgd(L2(1.0, box=(0.0, 0.1)), 3)(model.at(model.initial_theta()), x, y)


def test_components_without_weight_never_run() -> None:
    class Failing:
        def sample(self, *arguments: object, **keywords: object) -> Tensor:
            raise AssertionError("a component of weight zero was run")

        density = sample

    channel = Mixture(
        [0.3333333, 0.3333333, 0.3333333, 0.0], [Noise(0.1), Noise(0.2), Noise(0.3), Failing()]
    )
    x = torch.zeros(7, 2)
    for seed in range(300):
        channel.sample(None, x, generator=seeded(seed))  # type: ignore[arg-type]
    assert channel.sample(None, x[:0], generator=seeded()).shape == (0, 2)  # type: ignore[arg-type]


def test_read_only_arrays_do() -> None:
    model = small_model("classification", torch.float32)
    x, y = (tensor.numpy() for tensor in small_data("classification", torch.float32))
    x.flags.writeable = y.flags.writeable = False
    assert fit(model, MeanField(model), Noise(0.0), (x, y), steps=1).steps == 1
    assert isinstance(x, np.ndarray)

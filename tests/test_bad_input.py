"""Bad input is refused before any training starts, naming the argument, what was wanted and what
came."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from advbayes import (
    APGD,
    L2,
    PGD,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    FreshPredictive,
    Gaussian,
    HeteroscedasticGaussian,
    Learned,
    Linf,
    LogitPairing,
    LowRank,
    MeanField,
    Mixture,
    Noise,
    PosteriorPredictive,
    Samples,
    Square,
    Trades,
    Transfer,
    checks,
    fit,
    nll,
    one_step,
    pgd,
)
from advbayes.types import Attack


def classifier() -> BayesianModel:
    return BayesianModel(nn.Linear(3, 2), Categorical())


def regressor() -> BayesianModel:
    return BayesianModel(nn.Linear(3, 1), Gaussian(1.0))


X = torch.rand(8, 3)
Y = torch.zeros(8, dtype=torch.long)
NAN = X.clone().index_fill_(0, torch.tensor([2]), math.nan)
INF = X.clone().index_fill_(0, torch.tensor([2]), math.inf)


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: L2(-1.0), ValueError, "eps must be a finite number >= 0, got -1.0"),
        (lambda: L2(math.nan), ValueError, "eps"),
        (lambda: Linf("1"), TypeError, "eps must be a finite number >= 0, got '1'"),
        (
            lambda: L2(1.0, box=(1, 0)),
            ValueError,
            r"box must be a pair \(low, high\) with low < high, got \(1, 0\)",
        ),
        (lambda: L2(1.0, box=1), ValueError, "box"),
        (
            lambda: L2(1.0, scale=torch.tensor([1.0, 0.0])),
            ValueError,
            "scale must be finite and positive",
        ),
        (lambda: L2(1.0, mask=torch.ones(3)), TypeError, "mask must be a bool tensor"),
        (lambda: Noise(-0.1), ValueError, "sigma must be a finite number >= 0, got -0.1"),
        (lambda: AttackChannel("pgd"), TypeError, "attack must be an attack"),
        (lambda: AttackChannel(one_step(L2(1.0)), sigma=-1), ValueError, "sigma"),
        (
            lambda: Mixture([0.5, 0.6], [Noise(), Noise()]),
            ValueError,
            r"sum to 1, got \[0.5, 0.6\]",
        ),
        (lambda: Mixture([1.5, -0.5], [Noise(), Noise()]), ValueError, "non-negative"),
        (lambda: Mixture([1.0], [Noise(), Noise()]), ValueError, "1 weights and 2 channels"),
        (lambda: Mixture([1.0], [object()]), TypeError, "channels must have sample and density"),
        (
            lambda: Learned(lambda x, y: x, L2(1.0)),
            TypeError,
            "generator must be a torch.nn.Module",
        ),
        (lambda: PGD(L2(1.0), stages=()), ValueError, "stages must hold at least one"),
        (
            lambda: PGD(L2(1.0), stages=((nll, 0),)),
            ValueError,
            "steps must be a whole number >= 1, got 0",
        ),
        (lambda: PGD(L2(1.0), step_size=0.0), ValueError, "step_size"),
        (lambda: PGD(L2(1.0), restarts=0), ValueError, "restarts"),
        (lambda: PGD(2.0), TypeError, "ball must be a ball"),
        (lambda: Gaussian(0.0), ValueError, "scale must be a finite number > 0, got 0.0"),
        (lambda: Gaussian((1.0, 2.0, 3.0), num_outputs=2), ValueError, "scale"),
        (lambda: HeteroscedasticGaussian(-1.0), ValueError, "min_scale"),
        (lambda: ChannelELBO(0), ValueError, "num_data"),
        (lambda: ChannelELBO(5, num_theta=0), ValueError, "num_theta"),
        (
            lambda: ChannelELBO(5, bound="elbo"),
            ValueError,
            "bound must be one of 'surrogate', 'importance_weighted', got 'elbo'",
        ),
        (lambda: ChannelELBO(5, kl_weight=-1), ValueError, "kl_weight"),
        (lambda: Trades(-1.0), ValueError, "beta"),
        (lambda: Trades(likelihood="both"), ValueError, "likelihood"),
        (lambda: LogitPairing(-1.0), ValueError, "weight"),
        (
            lambda: BayesianModel(nn.ReLU(), Categorical()),
            ValueError,
            "net must have at least one trainable parameter, got none",
        ),
        (lambda: BayesianModel("net", Categorical()), TypeError, "net must be a torch.nn.Module"),
        (
            lambda: BayesianModel(nn.Linear(2, 2), Categorical(), prior_scale=0),
            ValueError,
            "prior_scale",
        ),
        (
            lambda: BayesianModel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), Categorical()),
            ValueError,
            r"'1'.*BatchNorm1d.*with_group_norm",
        ),
        (
            lambda: BayesianModel(
                nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), Categorical()
            ),
            TypeError,
            "one dtype",
        ),
        (
            lambda: BayesianModel(
                nn.Sequential(nn.Linear(2, 2), nn.FractionalMaxPool2d(2, 1)), Categorical()
            ),
            ValueError,
            "random",
        ),
        (lambda: MeanField(classifier(), init_scale=0), ValueError, "init_scale"),
        (
            lambda: MeanField(classifier(), init=torch.zeros(3)),
            ValueError,
            r"init must be a tensor of shape \(8,\)",
        ),
        (lambda: MeanField(classifier(), init=nn.Linear(4, 2)), ValueError, "'weight' of shape"),
        (lambda: LowRank(classifier(), rank=0), ValueError, "rank"),
        (lambda: Samples(torch.full((2, 3), math.nan)), ValueError, "thetas must be finite"),
        (
            lambda: PosteriorPredictive(classifier(), torch.zeros(2, 5)),
            ValueError,
            r"thetas must be a tensor of shape \(S, 8\)",
        ),
        (
            lambda: PosteriorPredictive(classifier(), torch.zeros(2, 8).double()),
            TypeError,
            "float32",
        ),
        (
            lambda: classifier().at(torch.zeros(8))(torch.zeros(2, 3).double()),
            TypeError,
            "x must be torch.float32",
        ),
        (lambda: classifier().at(torch.zeros(8))("x"), TypeError, "x must be a tensor"),
    ],
)
def test_construction(make: object, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        make()  # type: ignore[operator]


BOXED = AttackChannel(one_step(L2(1.0, box=(0.0, 0.5))))


@pytest.mark.parametrize(
    ("model", "channel", "data", "error", "named"),
    [
        (classifier(), Noise(), (X[:, :2], Y), ValueError, "x must have the shape that net takes"),
        (classifier(), Noise(), (X, Y[:5]), ValueError, "one target for each of the 8 examples"),
        (classifier(), Noise(), (X, Y + 2), ValueError, r"class indices in \[0, 1\].*from 2 to 2"),
        (classifier(), Noise(), (X, Y - 1), ValueError, "from -1 to -1"),
        (classifier(), Noise(), (X, Y.float()), TypeError, "class indices"),
        (classifier(), Noise(), (X, Y.unsqueeze(1)), ValueError, r"shape \(B,\)"),
        (classifier(), Noise(), (NAN, Y), ValueError, "x must be finite, got 3 NaN"),
        (classifier(), Noise(), (INF, Y), ValueError, "3 infinite"),
        (classifier(), Noise(), (X[:0], Y[:0]), ValueError, "at least one example"),
        (classifier(), Noise(), (X.double(), Y), TypeError, "torch.float32"),
        (classifier(), Noise(), X, TypeError, r"a pair \(x, y\)"),
        (classifier(), "channel", (X, Y), TypeError, "channel must have sample and density"),
        (classifier(), BOXED, (X, Y), ValueError, r"box must contain the data, got box \(0, 0.5\)"),
        (
            classifier(),
            Mixture([0.5, 0.5], [Noise(), BOXED]),
            (X, Y),
            ValueError,
            "box must contain the data",
        ),
        (
            classifier(),
            AttackChannel(one_step(L2(1.0, scale=torch.ones(4)))),
            (X, Y),
            ValueError,
            r"scale must broadcast against the event shape \(3,\)",
        ),
        (regressor(), Noise(), (X, Y), TypeError, "floating-point"),
        (regressor(), Noise(), (X, X[:, 0].double()), TypeError, "dtype"),
        (regressor(), Noise(), (X, X), ValueError, r"y must have the prediction's shape \(8,\)"),
        (regressor(), Noise(), (X, NAN[:, 0]), ValueError, "y must be finite"),
        (BayesianModel(nn.Linear(3, 1), Categorical()), Noise(), (X, Y), ValueError, "C >= 2"),
        (
            BayesianModel(nn.Linear(3, 3), HeteroscedasticGaussian()),
            Noise(),
            (X, X[:, 0]),
            ValueError,
            "even number",
        ),
        (
            BayesianModel(nn.Linear(3, 2), Gaussian(learned=True)),
            Noise(),
            (X, X[:, :2]),
            ValueError,
            r"\(B, 1\)",
        ),
    ],
)
def test_fit_refuses(
    model: BayesianModel, channel: object, data: object, error: type[Exception], named: str
) -> None:
    posterior = MeanField(model)
    before = posterior.mu.detach().clone()
    with pytest.raises(error, match=named):
        fit(model, posterior, channel, data, steps=1)  # type: ignore[arg-type]
    assert torch.equal(posterior.mu, before)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "exactly one of epochs and steps"),
        ({"epochs": 1, "steps": 1}, "exactly one of epochs and steps"),
        ({"steps": 0}, "steps must be a whole number >= 1, got 0"),
        ({"epochs": -1}, "epochs"),
        ({"steps": 1, "lr": 0}, "lr"),
        ({"steps": 1, "decay": 1.5}, "decay must be a finite number > 0 and <= 1, got 1.5"),
        ({"steps": 1, "batch_size": 0}, "batch_size"),
        ({"steps": 1, "seed": -1}, "seed"),
        ({"steps": 1, "objective": ChannelELBO(9)}, "in one pass over the data, 8, got 9"),
    ],
)
def test_fit_settings(settings: dict[str, object], named: str) -> None:
    model = classifier()
    with pytest.raises(ValueError, match=named):
        fit(model, MeanField(model), Noise(), (X, Y), **settings)  # type: ignore[arg-type]


def test_posteriors_that_cannot_be_trained_or_belong_elsewhere() -> None:
    model = classifier()
    with pytest.raises(TypeError, match="posterior must be trainable"):
        fit(model, Samples(torch.zeros(2, 8)), Noise(), (X, Y), steps=1)
    with pytest.raises(
        ValueError, match="posterior must be over the model's 8 parameters, got one over 4"
    ):
        fit(model, MeanField(regressor()), Noise(), (X, Y), steps=1)


def test_empty_loader() -> None:
    model = classifier()
    empty = DataLoader(TensorDataset(X[:0], Y[:0]), batch_size=2)
    with pytest.raises(ValueError, match="empty DataLoader"):
        fit(model, MeanField(model), Noise(), empty, steps=1)


def test_arrays_follow_the_model_and_column_targets_are_one_output() -> None:
    model = regressor()
    result = fit(
        model, MeanField(model), Noise(), (X.numpy().astype(np.float64), X[:, :1].numpy()), steps=2
    )
    assert result.steps == 2


@pytest.mark.parametrize(
    "attack",
    [pgd(L2(1.0), 2), one_step(L2(1.0)), APGD(L2(1.0), nll, 2), Square(L2(1.0), 2)],
    ids=repr,
)
@pytest.mark.parametrize(
    ("x", "y", "error", "named"),
    [
        (X.numpy(), Y, TypeError, "x must be a floating-point tensor"),
        (X.long(), Y, TypeError, "x must be a floating-point tensor"),
        (NAN, Y, ValueError, "x must be finite"),
        (X, Y.numpy(), TypeError, "y must be a tensor"),
        (X, Y[:3], ValueError, "one target for each of the 8 examples"),
        (X, Y + 5, ValueError, "y must hold labels from 0 to 1, got 5 to 5"),
        (X, Y - 5, ValueError, "y must hold labels from 0 to 1"),
    ],
)
def test_attacks_refuse(
    attack: Attack, x: Tensor, y: Tensor, error: type[Exception], named: str
) -> None:
    model = classifier()
    with pytest.raises(error, match=named):
        attack(PosteriorPredictive(model, torch.zeros(2, model.num_params)), x, y)


def test_stages_sources_and_posteriors_by_name() -> None:
    model = classifier()
    with pytest.raises(TypeError, match=r"stages must hold \(loss, steps\) pairs"):
        PGD(L2(1.0), stages=(nll, 5))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sources must be a tuple of predictors"):
        Transfer(pgd(L2(1.0), 2), model.at(torch.zeros(model.num_params)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"weights\[0\] must be a finite number"):
        Mixture("ab", [Noise(), Noise()])  # type: ignore[arg-type]
    for posterior in (None, MeanField):
        with pytest.raises(TypeError, match="posterior must be a posterior such as"):
            FreshPredictive(model, posterior, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [True, "1", None, 1j, np.True_, torch.tensor([1.0, 2.0]), np.array([1, 2]), [1.0]],
    ids=repr,
)
def test_what_is_no_number_is_named(value: object) -> None:
    for check in (checks.number, checks.count):
        with pytest.raises(checks.InputTypeError, match=r"^n must be a .* number"):
            check("n", value)


def test_numbers_of_every_kind() -> None:
    for value in (2, 2.0, np.float32(2), np.int64(2), torch.tensor(2.0), np.array([2])):
        number = checks.number("n", value)
        assert type(number) is float
        assert number == 2
    for value in (2, np.int64(2), torch.tensor(2)):
        whole = checks.count("n", value)
        assert type(whole) is int
        assert whole == 2
    for value in (2.0, np.float32(2), torch.tensor(2.5)):
        with pytest.raises(checks.InputTypeError, match="n must be a whole number >= 1"):
            checks.count("n", value)
    for value in (math.nan, math.inf, -math.inf, 10**400, -(10**400)):
        with pytest.raises(checks.InputError, match="n must be a finite number"):
            checks.number("n", value)


@pytest.mark.parametrize("open_low", [False, True])
@pytest.mark.parametrize("open_high", [False, True])
@pytest.mark.parametrize("value", [-0.1, 0.0, 0.5, 1.0, 1.1])
def test_limits_of_a_number_from_both_sides(value: float, open_low: bool, open_high: bool) -> None:
    limits = {"low": 0, "high": 1, "open_low": open_low, "open_high": open_high}
    if value in {0.5} | ({0.0} if not open_low else set()) | ({1.0} if not open_high else set()):
        assert checks.number("n", value, **limits) == value  # type: ignore[arg-type]
        return
    low, high = (">" if open_low else ">="), ("<" if open_high else "<=")
    wanted = f"n must be a finite number {low} 0 and {high} 1, got {value}"
    with pytest.raises(checks.InputError, match=f"^{re.escape(wanted)}$"):
        checks.number("n", value, **limits)  # type: ignore[arg-type]


def test_the_least_count() -> None:
    assert checks.count("n", 3, low=3) == 3
    with pytest.raises(checks.InputError, match="n must be a whole number >= 3, got 2"):
        checks.count("n", 2, low=3)

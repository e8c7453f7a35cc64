"""Every predictor keeps the contract: its answer is that of the example alone."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    FreshPredictive,
    MeanField,
    Mixture,
    Noise,
    PosteriorPredictive,
    Purifier,
    SimulatedPurifier,
    Smoothed,
    StraightThrough,
    from_function,
    from_sklearn,
    from_torch,
    one_step,
)
from advbayes.types import Channel, Predictor
from tests.contracts import PredictorContract, seeded, small_data


def thetas(model: BayesianModel, num: int = 7) -> Tensor:
    return MeanField(model, init_scale=0.2).sample(num, generator=seeded(3))


class TestOneTheta(PredictorContract):
    def make(self, model: BayesianModel) -> Predictor:
        return model.at(model.initial_theta())


class TestPosteriorPredictive(PredictorContract):
    chunks = (
        ("advbayes.accelerated.passes._NUMBERS", (1,)),
        ("advbayes.predictive.posterior._THETAS", (2,)),
    )

    def make(self, model: BayesianModel) -> Predictor:
        return PosteriorPredictive(model, thetas(model))


class TestFreshPredictive(PredictorContract):
    stochastic = True
    chunks = TestPosteriorPredictive.chunks

    def make(self, model: BayesianModel) -> Predictor:
        return FreshPredictive(model, MeanField(model, init_scale=0.2), 5, generator=seeded(3))


class TestSmoothed(PredictorContract):
    chunks = (("advbayes.predictive.smoothing._ROWS", (1, 250, 10_000)),)

    def make(self, model: BayesianModel) -> Predictor:
        return Smoothed(model.at(model.initial_theta()), 0.5, num=20)


class TestSmoothedMixture(PredictorContract):
    chunks = (("advbayes.predictive.smoothing._ROWS", (1, 250, 10_000)),)

    def make(self, model: BayesianModel) -> Predictor:
        return Smoothed(PosteriorPredictive(model, thetas(model, 3)), 0.5, num=10)


class TestSmoothedFresh(PredictorContract):
    def make(self, model: BayesianModel) -> Predictor:
        return Smoothed(FreshPredictive(model, MeanField(model, init_scale=0.2), 1), 0.5, num=10)


# --- Purified -----------------------------------------------------------------------------------


class PurifierContract(PredictorContract):
    """The small tables, the large ones and those on disk answer alike."""

    update = "online"
    sigma = 0.3
    units = 512.0  # log-densities of |x' - c|^2 / sigma^2, and differences of their slopes

    def channel(self, task: str) -> Channel:
        return Mixture(
            [0.4, 0.6], [Noise(self.sigma), AttackChannel(one_step(L2(0.3)), self.sigma)]
        )

    def make(self, model: BayesianModel, **settings: Any) -> Purifier:
        task = "classification" if isinstance(model.likelihood, Categorical) else "regression"
        x, y = small_data(task, model.dtype, 70)
        return Purifier(
            model, self.channel(task), thetas(model, 4), (x, y), self.update, **settings
        )

    def same(self, model: BayesianModel) -> Sequence[Predictor]:
        with mock.patch("advbayes.purification.store._SMALL", 0):
            in_memory = self.make(model)
        folder = tempfile.mkdtemp(prefix="contract-")
        atexit.register(shutil.rmtree, folder, True)
        return in_memory, self.make(model, folder=folder)


class TestOnlinePurifier(PurifierContract):
    chunks = (("advbayes.purification.purifier._QUERIES", (1, 10)),)


class TestOfflinePurifier(PurifierContract):
    update = "offline"


class TestSharpPurifier(PurifierContract):
    """Where the weights saturate: gradients fall to 1e-29, and their direction is kept down to
    1e-10."""

    sigma = 0.02
    least = 1e-10


class TestSimulatedPurifier(PredictorContract):
    units = PurifierContract.units

    def make(self, model: BayesianModel) -> Predictor:
        task = "classification" if isinstance(model.likelihood, Categorical) else "regression"
        x, y = small_data(task, model.dtype, 50)
        channel = AttackChannel(one_step(L2(0.3)))
        return SimulatedPurifier(model, channel, thetas(model, 3), (x, y), bandwidth=0.3)


class TestStraightThrough(PredictorContract):
    units = PurifierContract.units

    def make(self, model: BayesianModel) -> Predictor:
        return StraightThrough(TestOnlinePurifier().make(model))

    def test_own_gradient_is_autograd_s(self) -> None:  # type: ignore[override]
        """It is the unpurified model's at the denoised input, by design."""


# --- Other people's -----------------------------------------------------------------------------


class TestFromTorch(PredictorContract):
    def make(self, model: BayesianModel) -> Predictor:
        net = model.net
        return (
            from_torch(net)
            if isinstance(model.likelihood, Categorical)
            else from_torch(net, "mean", scale=0.5)
        )


class TestFromFunction(PredictorContract):
    def make(self, model: BayesianModel) -> Predictor:
        predict = model.at(model.initial_theta())
        if isinstance(model.likelihood, Categorical):
            return from_function(lambda x: predict(x).probs, "probs")
        return from_function(lambda x: predict(x).mean, "mean", scale=0.5)


class TestFromSklearn(PredictorContract):
    has_gradient = False

    def make(self, model: BayesianModel) -> Predictor:
        from sklearn.linear_model import LogisticRegression, Ridge

        if isinstance(model.likelihood, Categorical):
            x, y = small_data("classification", torch.float64, 50)
            return from_sklearn(LogisticRegression().fit(x.numpy(), y.numpy()))
        x, y = small_data("regression", torch.float64, 50)
        return from_sklearn(Ridge().fit(x.numpy(), y.numpy()), scale=0.5)


class TestRobustEstimators(PredictorContract):
    def make(self, model: BayesianModel) -> Predictor:
        from advbayes.estimators import RobustClassifier, RobustRegressor

        task = "classification" if isinstance(model.likelihood, Categorical) else "regression"
        kind = RobustClassifier if task == "classification" else RobustRegressor
        x, y = small_data(task, model.dtype, 40)
        estimator = kind(hidden=(8,), epochs=1, num_thetas=3, random_state=0)
        return estimator.fit(x.numpy(), y.numpy()).predictor_

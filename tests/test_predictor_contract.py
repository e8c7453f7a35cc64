"""Every predictor keeps the contract: its answer is that of the example alone."""

from __future__ import annotations

from torch import Tensor

from advbayes import BayesianModel, FreshPredictive, MeanField, PosteriorPredictive, Smoothed
from advbayes.types import Predictor
from tests.contracts import PredictorContract, seeded


def thetas(model: BayesianModel, num: int = 7) -> Tensor:
    return MeanField(model, init_scale=0.2).sample(num, generator=seeded(3))


class TestOneTheta(PredictorContract):
    def make(self, model: BayesianModel) -> Predictor:
        return model.at(model.initial_theta())


class TestPosteriorPredictive(PredictorContract):
    chunks = (("advbayes.predictive._NUMBERS", (1,)), ("advbayes.predictive._THETAS", (2,)))

    def make(self, model: BayesianModel) -> Predictor:
        return PosteriorPredictive(model, thetas(model))


class TestFreshPredictive(PredictorContract):
    stochastic = True
    chunks = TestPosteriorPredictive.chunks

    def make(self, model: BayesianModel) -> Predictor:
        return FreshPredictive(model, MeanField(model, init_scale=0.2), 5, generator=seeded(3))


class TestSmoothed(PredictorContract):
    chunks = (("advbayes.smoothing._ROWS", (1, 250, 10_000)),)

    def make(self, model: BayesianModel) -> Predictor:
        return Smoothed(model.at(model.initial_theta()), 0.5, num=20)


class TestSmoothedMixture(PredictorContract):
    chunks = (("advbayes.smoothing._ROWS", (1, 250, 10_000)),)

    def make(self, model: BayesianModel) -> Predictor:
        return Smoothed(PosteriorPredictive(model, thetas(model, 3)), 0.5, num=10)


class TestSmoothedFresh(PredictorContract):
    def make(self, model: BayesianModel) -> Predictor:
        return Smoothed(FreshPredictive(model, MeanField(model, init_scale=0.2), 1), 0.5, num=10)

"""Every member of every family runs through its contract; a new member is one class of two
lines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    PGD,
    AttackChannel,
    BayesianModel,
    Ensemble,
    Learned,
    LowRank,
    MeanField,
    Mixture,
    Noise,
    PointMass,
    Samples,
    SmoothedAttack,
    entropy,
    entropy_pgd,
    margin,
    nll,
    one_step,
    pgd,
    pgd_plus,
    squared_error,
)
from advbayes.networks import FullyConnectedGenerator
from advbayes.types import Channel
from tests.contracts import AttackContract, ChannelContract, PosteriorContract, seeded


class TestMeanField(PosteriorContract):
    def make(self, model: BayesianModel) -> nn.Module:
        return MeanField(model)


class TestPointMass(PosteriorContract):
    def make(self, model: BayesianModel) -> nn.Module:
        return PointMass(model)


class TestEnsemble(PosteriorContract):
    def make(self, model: BayesianModel) -> nn.Module:
        return Ensemble(model, num=3)


class TestLowRank(PosteriorContract):
    def make(self, model: BayesianModel) -> nn.Module:
        return LowRank(model, rank=2)


class TestSamples(PosteriorContract):
    trainable = False

    def make(self, model: BayesianModel) -> nn.Module:
        return Samples(
            model.initial_theta()
            + 0.1 * torch.randn(6, model.num_params, generator=seeded(8), dtype=model.dtype)
        )


class TestNoise(ChannelContract):
    def make(self, task: str, dtype: torch.dtype) -> Channel:
        return Noise(0.3)


class TestIdentity(ChannelContract):
    has_density = False

    def make(self, task: str, dtype: torch.dtype) -> Channel:
        return Noise(0.0)


class TestOneStepChannel(ChannelContract):
    def make(self, task: str, dtype: torch.dtype) -> Channel:
        return AttackChannel(one_step(L2(0.5)), sigma=0.3)


class TestPGDChannel(ChannelContract):
    def make(self, task: str, dtype: torch.dtype) -> Channel:
        return AttackChannel(pgd(L2(0.5), steps=5), sigma=0.3)


class TestDiracChannel(ChannelContract):
    has_density = False

    def make(self, task: str, dtype: torch.dtype) -> Channel:
        return AttackChannel(one_step(L2(0.5)))


class TestMixture(ChannelContract):
    def make(self, task: str, dtype: torch.dtype) -> Channel:
        losses = (nll, margin, entropy) if task == "classification" else (nll, squared_error)
        rest = [AttackChannel(one_step(L2(0.5), loss), 0.3) for loss in losses]
        return Mixture([0.4] + [0.6 / len(rest)] * len(rest), [Noise(0.3), *rest])


class TestIidMixture(ChannelContract):
    def make(self, task: str, dtype: torch.dtype) -> Channel:
        return Mixture(
            [0.5, 0.5], [Noise(0.3), AttackChannel(one_step(L2(0.5)), 0.4)], stratified=False
        )


class TestNestedMixture(ChannelContract):
    def make(self, task: str, dtype: torch.dtype) -> Channel:
        inner = Mixture(
            [0.5, 0.5, 0.0], [Noise(0.3), AttackChannel(one_step(L2(0.5)), 0.3), Noise(0.2)]
        )
        return Mixture([0.3, 0.7], [Noise(0.5), inner])


class TestLearned(ChannelContract):
    def make(self, task: str, dtype: torch.dtype) -> Channel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            generator = FullyConnectedGenerator(
                4, num_classes=3 if task == "classification" else None
            ).to(dtype)
        return Learned(generator, L2(0.5), sigma_range=(0.1, 0.6))


class TestOneStep(AttackContract):
    def make(self, ball: object) -> PGD:
        return one_step(ball)


class TestPGD(AttackContract):
    def make(self, ball: object) -> PGD:
        return pgd(ball, steps=6, restarts=2)


class TestSmoothedAttack(AttackContract):
    def make(self, ball: object) -> SmoothedAttack:
        return SmoothedAttack(one_step(ball), sigma=0.3)


class TestMarginPGD(AttackContract):
    tasks = ("classification",)

    def make(self, ball: object) -> PGD:
        return PGD(ball, stages=((margin, 5),))


class TestSquaredErrorPGD(AttackContract):
    tasks = ("regression",)

    def make(self, ball: object) -> PGD:
        return PGD(ball, stages=((squared_error, 5),), step_size=0.2)


class TestPGDPlus(AttackContract):
    def make(self, ball: object) -> PGD:
        return pgd_plus(ball, steps=4)


class TestEntropyPGD(AttackContract):
    def make(self, ball: object) -> PGD:
        return entropy_pgd(ball, steps=4)


@pytest.mark.parametrize("stratified", [True, False])
def test_mixture_computes_an_attack_only_for_the_examples_that_use_it(stratified: bool) -> None:
    seen: list[int] = []

    def predict(x: Tensor) -> torch.distributions.Categorical:
        seen.append(len(x))
        return torch.distributions.Categorical(logits=torch.stack([x.sum(1), -x.sum(1)], 1))

    attacks = [AttackChannel(one_step(L2(0.5), loss), 0.1) for loss in (nll, margin, entropy)]
    channel = Mixture([0.4, 0.2, 0.2, 0.2], [Noise(0.1), *attacks], stratified=stratified)
    channel.sample(
        predict,
        torch.randn(100, 3, generator=seeded()),
        torch.zeros(100, dtype=torch.long),
        generator=seeded(),
    )
    assert len(seen) == 1, "one-step attacks that differ in their loss share one gradient pass"
    assert seen == [60] if stratified else 40 <= seen[0] <= 80

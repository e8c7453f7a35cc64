"""Calls of the mathematics: metrics, likelihoods, posteriors, channels, objectives, attacks,
predictors, purifiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, StudentT, Uniform

import advbayes.attacks as attacks
from advbayes import (
    L2,
    AttackChannel,
    ChannelELBO,
    Ensemble,
    FreshPredictive,
    Gaussian,
    GaussianMixture,
    HeteroscedasticGaussian,
    Learned,
    Linf,
    LogitPairing,
    LowRank,
    MeanField,
    Mixture,
    Noise,
    PointMass,
    PosteriorPredictive,
    Purifier,
    RandomSearch,
    Samples,
    SimulatedPurifier,
    Smoothed,
    SmoothedAttack,
    Trades,
    certify,
    conformal_intervals,
    conformal_sets,
    decide,
    entropy_pgd,
    eps_prior,
    fit,
    metrics,
    nll,
    one_step,
    pgd,
    pgd_plus,
    strong_suite,
    utility_under,
    with_eps,
)
from advbayes.attacks import margin, squared_error
from advbayes.likelihoods import gaussian_log_density, mix
from advbayes.metrics import rmse_floor
from advbayes.metrics.intervals import resamples
from advbayes.networks import FullyConnectedGenerator
from advbayes.objectives import divergence
from advbayes.predictive import Choices, Spoiling, conformal_quantile, worst_case_utility
from advbayes.predictive.decisions import outcomes
from advbayes.predictive.smoothing import components
from advbayes.purification import choose_bandwidth
from advbayes.purification.attacks import (
    Annealed,
    NearestCentre,
    StraightThrough,
    nearest_centre_radius,
    neighbours,
)
from advbayes.seeds import GlobalStream, Share, drawn, seed_for
from advbayes.testing import seeded, small_data, small_model

from .calls import call
from .test_settings import SETTINGS, trace

D = torch.float64
MODEL, NUMBERS = (small_model(task, D) for task in ("classification", "regression"))
X, Y = small_data("classification", D)
_, T = small_data("regression", D)
THETAS = MeanField(MODEL, 1.5).sample(3, generator=seeded(4))
OTHER = MeanField(NUMBERS, 0.4).sample(3, generator=seeded(4))
CLASSES, REGRESSION = PosteriorPredictive(MODEL, THETAS), PosteriorPredictive(NUMBERS, OTHER)
BALL, CUBE = L2(0.4, box=(0.0, 1.0)), Linf(0.2)
G = {"generator": lambda: seeded(5)}


def uniform(num: int, seed: int) -> Tensor:
    return torch.rand(num, generator=seeded(seed), dtype=D)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=D)


# --- metrics -------------------------------------------------------------------------------------

HITS, SURE = uniform(37, 1) < 0.6, uniform(37, 2).mul(10).round().div(10)
SCORES, LABELS = gaussian(37, seed=3), torch.randint(3, (37,), generator=seeded(4))
FEW = {"num_resamples": 60}
LEVEL = {"level": 0.6}
call(metrics.accuracy, {"correct": HITS}, LEVEL)
call(metrics.coverage, {"inside": torch.stack([HITS, HITS.roll(1)], 1)}, LEVEL)
call(metrics.balanced_accuracy, {"correct": HITS, "labels": LABELS}, LEVEL)
call(metrics.recall, {"correct": HITS, "labels": LABELS, "of": 1}, LEVEL | {"of": 2})
call(metrics.auroc, {"scores": SURE, "positive": HITS}, LEVEL | {"method": "delong"})
call(metrics.auprc, {"scores": SURE, "positive": HITS}, LEVEL | FEW | G)
call(
    metrics.aurc, {"losses": SCORES.square(), "confidence": SURE}, LEVEL | FEW | G | {"most": 30.0}
)
call(metrics.risk_coverage, {"losses": SCORES.square(), "confidence": SURE})
call(
    metrics.selective_accuracy,
    {"correct": HITS, "confidence": SURE, "coverage": 0.5},
    LEVEL | {"coverage": 0.31},
)
call(metrics.mean, {"scores": SCORES}, LEVEL | {"method": "bootstrap"})
call(metrics.mean, {"scores": SCORES, "method": "bootstrap"}, LEVEL | FEW | G, name="mean, drawn")
call(metrics.rmse, {"squared_errors": SCORES.square()}, LEVEL | FEW | G)
call(metrics.paired_difference, {"first": SCORES, "second": SURE}, LEVEL | FEW | G)
call(metrics.paired_t, {"first": SCORES - 0.1, "second": SURE - 0.3}, {"overlap": 0.3})
call(metrics.mcnemar, {"first": HITS, "second": HITS.roll(3)})
call(metrics.holm, {"p_values": [0.01, 0.2, 0.03, 0.4, 0.004]})
call(
    lambda column, **more: metrics.bootstrap(lambda rows: rows.square().mean(1), column, **more),
    {"column": SCORES},
    LEVEL | FEW | G | {"column": SCORES[:1]},
    {"support": (-3.0, 3.0)},
    name="bootstrap",
    of=metrics.bootstrap,
)
call(
    lambda column, **more: metrics.bootstrap(lambda rows: rows.square().mean(1), column, **more),
    {"column": SCORES[:1]},
    {"support": (-3.0, 3.0), "level": 0.6},
    name="bootstrap of one",
)
call(
    metrics.ece,
    {"confidence": SURE, "correct": HITS, "bins": 5},
    LEVEL | FEW | G | {"bins": 4, "binning": "equal_width"},
)
call(
    metrics.reliability,
    {"confidence": SURE, "correct": HITS, "bins": 5},
    LEVEL | {"bins": 4, "binning": "equal_width"},
)
call(metrics.wilson, {"successes": 7.5, "num": 11}, LEVEL)
call(metrics.clopper_pearson, {"successes": 7, "num": 11}, LEVEL | {"side": "upper"})
call(
    metrics.clopper_pearson,
    {"successes": 7, "num": 11, "side": "lower"},
    LEVEL,
    name="clopper_pearson, one side",
)
call(metrics.incomplete_beta, {"x": 0.3, "a": 2.5, "b": 4.0})
call(metrics.majority, {"y": LABELS}, {"num_classes": 5})
call(metrics.constant, {"y": torch.stack([SCORES, SURE], 1)})
call(metrics.uniform, {"num_classes": 3})
PAIR = GaussianMixture(gaussian(3, 6, seed=1), gaussian(3, 6, seed=2).exp(), gaussian(3, seed=3))
WIDE = GaussianMixture(gaussian(3, 6, 2), gaussian(3, 6, 2, seed=2).exp(), gaussian(3, 6, seed=3))
TWO = Independent(Normal(gaussian(6, 2), gaussian(6, 2, seed=1).exp()), 1)
SIX, DUO = gaussian(6, seed=7), gaussian(6, 2, seed=8)
for mixture, target, word in ((PAIR, SIX, "mixture"), (WIDE, DUO, "outputs"), (TWO, DUO, "two")):
    call(
        metrics.interval,
        {"prediction": mixture, "y": target, "level": 0.8},
        {"level": 0.3},
        name=f"metrics.interval, {word}",
    )
    call(metrics.crps, {"prediction": mixture, "y": target}, name=f"metrics.crps, {word}")
    call(
        metrics.quantile,
        {"prediction": mixture, "q": 0.9},
        {"q": 0.2},
        name=f"metrics.quantile, {word}",
    )
    for score in (metrics.log_prob, metrics.nll, metrics.squared_error):
        call(score, {"prediction": mixture, "y": target}, name=f"{score.__name__}, {word}")
HEAVY = StudentT(torch.full((6,), 4.0, dtype=D), SIX)
call(
    metrics.crps,
    {"prediction": HEAVY, "y": SIX + 1, "generator": lambda: seeded(1), "num_samples": 50},
    G | {"num_samples": 40},
    name="metrics.crps, drawn",
)
THREE = torch.distributions.Categorical(logits=gaussian(12, 3, seed=9).mul(2).round())
for score in (
    metrics.log_prob,
    metrics.nll,
    metrics.brier,
    metrics.correct,
    metrics.expected_correct,
):
    call(score, {"prediction": THREE, "y": Y}, name=f"{score.__name__}, classes")
for score in (metrics.entropy, metrics.confidence):
    call(score, {"prediction": THREE}, name=f"{score.__name__}, classes")
call(
    lambda values, **more: [rows[0] for rows in resamples(values, **more)],
    {"values": SCORES},
    FEW | G,
    name="metrics.resamples",
)

# --- likelihoods, posteriors ---------------------------------------------------------------------


def of_likelihood(likelihood: Any) -> Any:
    extra = torch.tensor([0.3, -0.2], dtype=D)[: len(likelihood.initial_extra())]
    outputs = gaussian(5, 4 if isinstance(likelihood, HeteroscedasticGaussian) else 2, seed=3)
    y = gaussian(5, 2, seed=4)
    return [
        likelihood.initial_extra(),
        likelihood(outputs, extra),
        likelihood.log_prob(outputs, y, extra),
        likelihood(outputs, extra).log_prob(y),
    ]


call(
    Gaussian,
    {"scale": (0.5, 2.0), "learned": False, "num_outputs": 2},
    {"scale": 0.7, "learned": True},
    look=of_likelihood,
)
call(HeteroscedasticGaussian, {}, {"min_scale": 2.0}, look=of_likelihood)


def of_mixture(mixture: GaussianMixture) -> list[Any]:
    one = mixture.means.ndim == 2
    level = torch.full((6,), 0.3, dtype=D)
    return [
        mixture,
        mixture.mean,
        mixture.mode,
        mixture.variance,
        mixture.entropy(),
        mixture.log_prob(SIX if one else DUO),
        mixture.sample((3,), generator=seeded(3)),
        mixture.monte_carlo_entropy(20, generator=seeded(4)),
        [mixture.cdf(SIX), mixture.icdf(level)] if one else [],
    ]


call(
    GaussianMixture,
    {"means": PAIR.means, "scales": PAIR.scales},
    {"log_weights": gaussian(3, seed=3), "scales": 2 * PAIR.scales},
    look=of_mixture,
)
call(
    GaussianMixture,
    {"means": WIDE.means, "scales": WIDE.scales},
    {"log_weights": gaussian(3, 6, seed=3)},
    look=of_mixture,
    name="GaussianMixture of outputs",
)
EACH = torch.distributions.Categorical(logits=gaussian(3, 5, 4))
for word, each in (
    ("classes", EACH),
    ("numbers", Normal(PAIR.means, PAIR.scales)),
    ("outputs", Independent(Normal(WIDE.means, WIDE.scales), 1)),
):
    call(mix, {"each": each}, name=f"mix of {word}")
call(gaussian_log_density, {"value": SIX, "mean": SIX + 1, "scale": 0.3}, {"scale": SIX.exp()})


def of_posterior(posterior: Any) -> list[Any]:
    kl = None if isinstance(posterior, Samples) else posterior.kl(0.7)
    some = [posterior.rsample(num, generator=seeded(6)) for num in (1, 2, 5)]
    return [posterior, posterior.mean, some, kl, posterior.num_params]


START = {"init": gaussian(MODEL.num_params, seed=2)}
call(MeanField, {"model": MODEL}, {"init_scale": 0.3} | START, look=of_posterior)
call(PointMass, {"model": MODEL}, START, look=of_posterior)
call(
    LowRank,
    {"model": MODEL, "rank": 3},
    {"rank": 2, "init_scale": 0.3, "seed": 4} | START,
    look=of_posterior,
)
call(
    Ensemble,
    {"model": MODEL, "num": 3},
    {"num": 2, "seed": 4, "init": gaussian(2, MODEL.num_params)},
    look=of_posterior,
)
call(Samples, {"thetas": gaussian(3, 5)}, look=of_posterior)

# --- balls, losses, attacks ----------------------------------------------------------------------

HALF = torch.tensor([True, False, True, True])
UNITS = torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=D)


def of_ball(ball: Any) -> list[Any]:
    far, slope = X + gaussian(12, 4, seed=3), gaussian(12, 4, seed=4)
    edge = ball.project(X + 9 * ball.ascend(slope, ball.eps), X)
    steps = torch.linspace(0.1, 0.4, 12, dtype=D)
    return [
        repr(ball),
        ball.norm(slope),
        ball.project(far, X),
        ball.ascend(slope, 0.3),
        ball.ascend(slope, steps),
        ball.random(X, generator=seeded(5)),
        ball.sphere(X, generator=seeded(6)),
        ball.unblocked(slope, edge),
        ball.clip(far),
        [ball.contains(X + (edge - X) * share, X) for share in (0.99, 1.0001, 1.0 - 1e-7)],
        ball.contains(far, X),
    ]


for kind in (L2, Linf):
    call(
        kind,
        {"eps": 0.3},
        {"eps": 0.2, "box": (0.0, 1.0), "scale": UNITS, "mask": HALF},
        look=of_ball,
    )
    call(
        kind,
        {"eps": 0.3, "box": (0.0, 1.0), "scale": UNITS, "mask": HALF},
        {"scale": 2.0},
        look=of_ball,
        name=f"{kind.__name__} in full",
    )

WRONG = (Y + 1) % 3
LOSSES: dict[str, Any] = {
    "nll": nll,
    "margin": margin,
    "dlr": attacks.dlr,
    "entropy": attacks.entropy,
    "certainty": attacks.certainty,
    "toward": attacks.Toward(margin),
    "by loss": attacks.ByLoss(attacks.certainty),
    "exceeding": attacks.Exceeding(nll, 1.0),
    "margin to": attacks.MarginTo(WRONG),
    "per example": attacks.PerExample((nll, attacks.MarginTo(WRONG)), Y % 2),
    "divergence": attacks.DivergenceFrom(torch.tensor([0.2, 0.5, 0.3], dtype=D)),
    "spoiling": Spoiling(Choices(gaussian(3, 2, seed=1), abstain=0.2)),
}
ERRORS: dict[str, Any] = {
    "nll": nll,
    "squared error": squared_error,
    "entropy": attacks.entropy,
    "raise": attacks.raise_mean,
    "lower": attacks.lower_mean,
    "inflate": attacks.inflate_variance,
    "deflate": attacks.deflate_variance,
    "mean of": attacks.MeanOf(0, -1),
    "along": attacks.MeanAlong(gaussian(12, 1)),
    "exceeding": attacks.Exceeding(squared_error, 0.4),
    "divergence": attacks.DivergenceFrom(T, 0.6),
}
SOME = torch.tensor([7, 2, 3])
for losses, predict, y, task in (
    (LOSSES, CLASSES, Y, "classes"),
    (ERRORS, REGRESSION, T, "numbers"),
):
    for word, loss in losses.items():
        call(
            lambda loss, x, y, predict: [
                *attacks.loss_and_gradient(predict, loss, x, y),
                attacks.success(loss, predict(x), y),
                attacks.for_rows(loss, SOME)(predict(x[SOME]), y[SOME]),
            ],
            {"loss": loss, "x": X, "y": y, "predict": predict},
            name=f"loss, {task}: {word}",
        )
call(one_step, {"ball": BALL}, {"loss": margin, "ball": CUBE})
call(
    pgd,
    {"ball": BALL},
    {"steps": 7, "loss": margin, "step_size": 0.1, "restarts": 3, "stop_at_success": True},
)
call(pgd_plus, {"ball": BALL}, {"steps": 7, "restarts": 3})
call(entropy_pgd, {"ball": BALL}, {"steps": 7, "restarts": 3})
for task, error in (("classification", {}), ("regression", {"error": nll})):
    call(
        attacks.default_attacks,
        {"ball": BALL, "task": task},
        {"steps": 90, "restarts": 3, "targets": 4, **error},
        name=f"default_attacks, {task}",
    )
call(
    strong_suite,
    {"ball": BALL},
    {
        "steps": 90,
        "restarts": 3,
        "targets": 4,
        "queries": 7,
        "error": nll,
        "others": (one_step(CUBE),),
    },
)
SUITE = strong_suite(L2(0.4, scale=UNITS, mask=HALF), steps=12, queries=5)
call(with_eps, {"attack": SUITE, "eps": 0.2}, {"eps": 0.9, "free": True})
call(attacks.with_ball, {"attack": SUITE, "ball": CUBE})
call(attacks.with_steps, {"attack": SUITE, "factor": 2}, {"factor": 3})
call(attacks.with_restarts, {"attack": SUITE, "factor": 2}, {"factor": 3})
for kind, (base, others) in SETTINGS.items():
    call(
        lambda kind=kind, **settings: trace(kind(**settings)),
        base,
        {name: value for name, value in others.items() if name != "regression"},
        name=f"attack {kind.__name__}",
        look=lambda found: [
            [len(found[0]), sum(map(len, found[0]))],
            torch.cat(found[0]),
            found[1],
        ],
    )
for word, attack in (
    ("pgd", pgd(BALL, 4, squared_error, restarts=2)),
    ("apgd", attacks.APGD(BALL, squared_error, 9, restarts=2, targets=1)),
    ("starts", attacks.MultiStart(BALL, squared_error, 6, 9)),
    ("square", attacks.Square(BALL, 20, nll)),
    ("far", attacks.MinimumNorm(BALL, attacks.Exceeding(squared_error, 0.5), 9, restarts=3)),
):
    call(
        lambda attack: attack(REGRESSION, X, T, generator=seeded(2)),
        {"attack": attack},
        name=f"attack on numbers, {word}",
    )
PIXELS, FILTERS = uniform(3 * 2 * 49, 6).view(3, 2, 7, 7), gaussian(98, 3, seed=7)
for word, attack in (
    ("square", attacks.Square(L2(1.5, box=(0.0, 1.0)), 40)),
    ("square in a cube", attacks.Square(Linf(0.1, box=(0.0, 1.0)), 40)),
    ("random", RandomSearch(L2(1.5, box=(0.0, 1.0)), 20)),
    ("hard label", attacks.HardLabel(L2(1.5, box=(0.0, 1.0)), 60)),
    ("starts", attacks.MultiStart(L2(1.5, box=(0.0, 1.0)), nll, 4, 5)),
    ("apgd", attacks.APGD(Linf(0.1, box=(0.0, 1.0)), nll, 9)),
):
    call(
        lambda attack: attack(
            lambda x: torch.distributions.Categorical(logits=x.flatten(1) @ FILTERS),
            PIXELS,
            (PIXELS.flatten(1) @ FILTERS).argmax(1),
            generator=seeded(2),
        ),
        {"attack": attack},
        name=f"attack on images, {word}",
    )
call(
    lambda attack: attack.radius(CLASSES, X, Y, generator=seeded(3)),
    {"attack": attacks.MinimumNorm(L2(2.0), steps=20, restarts=2)},
    {"attack": attacks.MinimumNorm(Linf(2.0), steps=20)},
    name="MinimumNorm.radius",
)

# --- channels ------------------------------------------------------------------------------------


def of_channel(channel: Any) -> list[Any]:
    found = [
        channel.sample(CLASSES, X, Y, generator=seeded(3)),
        channel.sample(CLASSES, X, generator=seeded(4)),
    ]
    return [*found, channel.density(CLASSES, X[:5], Y[:5]).log_prob(X + 0.1)]


def of_prior(channel: Any) -> list[Any]:
    budgets = [part.attack.ball.eps for part in channel.channels]
    return [channel.weights, budgets, channel.stratified, *of_channel(channel)]


def generator_net() -> nn.Module:
    with GlobalStream(2):
        return FullyConnectedGenerator(4, 1, 3).to(D)


OS = AttackChannel(one_step(BALL), 0.2)
call(Noise, {"sigma": 0.3}, {"sigma": 0.2}, look=of_channel)
call(
    AttackChannel,
    {"attack": one_step(BALL), "sigma": 0.3},
    {"attack": pgd(CUBE, 3), "sigma": 0.2},
    look=of_channel,
)
call(
    Mixture,
    {
        "weights": (0.3, 0.5, 0.2),
        "channels": (Noise(0.1), OS, AttackChannel(one_step(BALL, margin), 0.2)),
    },
    {"weights": (0.6, 0.2, 0.2), "stratified": False},
    look=of_channel,
)
call(
    Learned,
    {"generator": lambda: generator_net(), "ball": BALL},
    {"ball": L2(0.01), "sigma_range": (0.2, 0.3)},
    look=of_channel,
)
call(
    eps_prior,
    {"attack": one_step(BALL), "eps": Uniform(0.0, 1.0), "sigma": 0.2},
    {"sigma": 0.3, "num": 3, "stratified": False, "eps": {0.1: 0.3, 0.4: 0.7}},
    look=of_prior,
)

# --- objectives, training ------------------------------------------------------------------------


def of_objective(weight: Any = None, task: str = "classes", **settings: Any) -> list[Any]:
    objective = ChannelELBO(40, **settings)
    posterior = MeanField(MODEL, 0.2)
    terms = objective(MODEL, posterior, OS, X, Y, weight=weight, generator=seeded(5))
    slopes = torch.autograd.grad(terms.bound, list(posterior.parameters()))
    return [terms, *slopes]


WEIGHT = uniform(12, 4)
for word, penalty in (("none", None), ("trades", Trades(2.0)), ("alp", LogitPairing(0.3, "clean"))):
    call(
        of_objective,
        {"num_theta": 2, "num_channel": 3, "penalty": penalty},
        {
            "num_theta": 1,
            "num_channel": 2,
            "penalty": Trades(2.0, "clean"),
            "kl_weight": 0.3,
            "class_weight": (0.5, 2.0, 1.0),
            "weight": WEIGHT,
            **({} if penalty else {"bound": "importance_weighted", "through": True}),
        },
        name=f"ChannelELBO, penalty {word}",
    )
call(
    divergence, {"p": EACH, "q": torch.distributions.Categorical(logits=gaussian(3, 5, 4, seed=2))}
)


def trained(channel: Any = None, **settings: Any) -> list[Any]:
    model = small_model("classification", D)
    posterior = MeanField(model, 0.1)
    found = fit(model, posterior, OS if channel is None else channel, (X, Y), **settings)
    history = {name: column for name, column in found.history.items() if name != "seconds"}
    return [posterior, history, found.steps, found.skipped, found.interrupted]


BASE = {"steps": 3, "batch_size": 5, "progress": False, "lr": 0.02}
call(
    trained,
    BASE,
    {
        "objective": ChannelELBO(12, kl_weight=0.1),
        "sample_weight": WEIGHT,
        "steps": 5,
        "batch_size": 7,
        "lr": 0.01,
        "decay": 0.3,
        "warmup": 0.5,
        "seed": 4,
        "stop": lambda: _stop_after(2),
        "channel": Mixture([0.4, 0.6], [Noise(0.2), OS]),
    },
    {
        "own_thetas": True,
        "adversary_lr": 0.5,
        "checkpoint": lambda: print_nothing,
        "checkpoint_every": 2,
    },
    name="fit",
    of=fit,
)
call(trained, BASE | {"stop": lambda: _stop_after(3)}, name="fit, stopped at its last step")
call(
    trained,
    {"epochs": 1.5, "batch_size": 5, "progress": False},
    {"epochs": 1.0},
    name="fit, passes",
    of=fit,
)
call(
    trained,
    BASE | {"channel": lambda: Learned(generator_net(), BALL)},
    {
        "adversary_lr": 0.5,
        "sample_weight": WEIGHT,
        "channel": lambda: Learned(generator_net(), BALL, entropy_bonus=1.0),
    },
    name="fit, against a learned channel",
    of=fit,
)


def _stop_after(num: int) -> Any:
    asked = iter(range(num - 1))
    return lambda *_: next(asked, None) is None


def print_nothing(state: Any) -> None:
    pass


# --- predictors ----------------------------------------------------------------------------------


def asked(predict: Any) -> list[Any]:
    return [predict(X), predict(X[:1])]


call(PosteriorPredictive, {"model": MODEL, "thetas": THETAS}, {"thetas": THETAS[:2]}, look=asked)
call(
    lambda **settings: FreshPredictive(MODEL, MeanField(MODEL, 0.4), **settings),
    {"num": 3, "generator": lambda: seeded(1)},
    {"num": 2} | G,
    look=asked,
    name="FreshPredictive",
)
SMOOTH = {"predict": CLASSES, "sigma": 0.3, "num": 7}
call(Smoothed, SMOOTH, {"sigma": 0.2, "num": 6, "seed": 3}, look=asked)
call(
    Smoothed,
    SMOOTH | {"seed": None, "generator": lambda: seeded(2)},
    G,
    look=asked,
    name="Smoothed, drawn anew",
)
call(
    lambda generator, **settings: SmoothedAttack(**settings)(CLASSES, X, Y, generator=generator),
    {"attack": one_step(BALL), "sigma": 0.3, "generator": lambda: seeded(2)},
    {"attack": one_step(BALL, margin), "sigma": 0.9, "num": 5} | G,
    name="SmoothedAttack",
)
call(
    certify,
    {
        "smoothed": Smoothed(CLASSES, 0.1),
        "x": X,
        "n0": 4,
        "n": 60,
        "alpha": 0.1,
        "generator": lambda: seeded(3),
    },
    {"n0": 9, "n": 50, "alpha": 0.01, "batch": 5} | G,
)
call(conformal_quantile, {"scores": SCORES, "level": 0.8}, {"level": 0.5})
FOUND = RandomSearch(BALL, 3)
for function, predict, y in ((conformal_intervals, REGRESSION, T), (conformal_sets, CLASSES, Y)):
    call(
        function,
        {
            "predict": predict,
            "data": (X, y),
            "level": 0.6,
            "attack": FOUND,
            "generator": lambda: seeded(1),
        },
        {"level": 0.3, "attack": None} | G,
        look=lambda made: [made(X), getattr(made, "factor", 0), getattr(made, "threshold", 0)],
    )
UTILITY, GRID = (
    torch.eye(3, dtype=D) + 0.1 * gaussian(3, 3, seed=5),
    torch.linspace(-1.0, 1.0, 5, dtype=D),
)


def worth(action: Tensor, y: Tensor) -> Tensor:
    return -(action - y).abs()


WAGER = {"predict": CLASSES, "x": X, "utility": UTILITY}
call(decide, WAGER, {"abstain": -0.5, "worst_case": L2(1.5)})
call(
    decide,
    {"predict": REGRESSION, "x": X, "utility": worth, "actions": GRID},
    {"actions": GRID + 0.5},
    name="decide, numbers",
)
call(
    worst_case_utility,
    {
        "predict": CLASSES,
        "x": X,
        "choices": Choices(UTILITY, abstain=0.1),
        "ball": BALL,
        "steps": 3,
    },
    {"steps": 1, "ball": L2(0.2)},
)
call(
    utility_under,
    {
        "predict": CLASSES,
        "data": (X, Y),
        "choices": Choices(UTILITY),
        "generator": lambda: seeded(1),
        "attack": pgd(L2(1.0), 5, margin),
        "worst_case": L2(0.8),
    },
    {"attack": None, "worst_case": None, "choices": Choices(UTILITY, abstain=-0.3)},
    {"steps": 21},
)
call(
    Choices,
    {"utility": worth, "actions": GRID},
    {"abstain": 0.2, "num": 20},
    look=lambda made: [made.expected(REGRESSION(X)), made.realised(T)],
)
for word, prediction in (("mixture", PAIR), ("other", HEAVY), ("normal", Normal(SIX, SIX.exp()))):
    call(outcomes, {"prediction": prediction, "num": 20}, {"num": 9}, name=f"outcomes, {word}")
call(components, {"prediction": WIDE})

# --- purification --------------------------------------------------------------------------------


def of_purifier(purifier: Any) -> list[Any]:
    inner = getattr(purifier, "purifier", purifier)
    found = [
        purifier(X),
        purifier.diagnose(X),
        inner.widened(2.0)(X),
        getattr(purifier, "bandwidth", 0),
    ]
    if inner.features is None:
        found.append(inner.denoise(X))
    if inner.store.num_outputs:
        prediction = inner(X)
        found += [
            prediction.log_prob(T),
            prediction.cdf(T),
            prediction.icdf(torch.tensor(0.3, dtype=D)),
            prediction.entropy(),
            prediction.sample((2,), generator=seeded(1)),
            prediction.monte_carlo_entropy(5, generator=seeded(2)),
        ]
    return found


def halved(x: Tensor) -> Tensor:
    return x[:, :2] * 3


class Generative:
    """A reference of one's own: points on a curve."""

    def sample(self, num: int) -> Tensor:
        return torch.linspace(0.0, 1.0, num, dtype=D).unsqueeze(1).expand(num, 4)


REFERENCE = torch.rand(30, 4, generator=seeded(8), dtype=D)
GIVEN = {
    "model": MODEL,
    "channel": AttackChannel(one_step(L2(0.2)), 0.2),
    "thetas": THETAS,
    "reference": REFERENCE,
}
call(
    Purifier,
    GIVEN,
    {
        "update": "offline",
        "features": lambda: halved,
        "thetas": THETAS[:2],
        "reference": lambda: (REFERENCE, torch.arange(30) % 3),
    },
    {"memory_limit": 1 << 21, "posterior": MeanField(MODEL, 0.4), "num_samples": 7},
    look=of_purifier,
)
call(
    Purifier,
    GIVEN | {"reference": Generative()},
    {"num_samples": 20},
    look=of_purifier,
    name="Purifier, points drawn",
)
call(
    Purifier,
    GIVEN | {"index": "faiss", "num_nearest": 6, "left_out": 0.2, "channel": Noise(0.08)},
    {"num_nearest": 3, "left_out": 0.0},
    look=lambda made: [made(X), made.diagnose(X)],
    name="Purifier, with an index",
)
call(
    Purifier,
    {
        "model": NUMBERS,
        "channel": Mixture(
            [0.5, 0.5], [Noise(0.2), AttackChannel(one_step(L2(0.3), squared_error), 0.3)]
        ),
        "thetas": OTHER,
        "reference": (REFERENCE, gaussian(30)),
    },
    {"update": "offline"},
    look=of_purifier,
    name="Purifier of numbers",
)
call(
    Purifier,
    GIVEN | {"posterior": MeanField(MODEL, 0.4)},
    {"update": "offline"},
    look=lambda made: [
        (fresh := made.with_thetas(4, generator=seeded(1)))(X),
        fresh.update,
        fresh.widened(2.0).update,
    ],
    name="Purifier.with_thetas",
)
call(
    SimulatedPurifier,
    GIVEN,
    {"update": "offline", "num_simulations": 3, "bandwidth": 0.3, "seed": 4},
    look=of_purifier,
)
call(
    SimulatedPurifier,
    GIVEN | {"reference": Generative(), "num_samples": 10},
    {"num_samples": 20},
    look=of_purifier,
    name="SimulatedPurifier, points drawn",
)
call(
    rmse_floor,
    {"x": X, "y": Y.double(), "ball": L2(0.4)},
    {"ball": L2(0.2), "clean_rmse": 0.3, "steps": 10},
)
MANY = torch.rand(2600, 2, generator=seeded(3), dtype=D)
call(
    choose_bandwidth,
    {"channel": Noise(0.1), "predict": None, "x": MANY, "generator": lambda: seeded(1)},
    G | {"num": 2},
)
PURE = Purifier(**GIVEN)  # type: ignore[arg-type]
SIMPLE = Purifier(MODEL, Noise(0.2), THETAS, REFERENCE)
call(neighbours, {"purifier": PURE, "x": X, "y": Y}, {"num": 3})
call(
    nearest_centre_radius, {"purifier": SIMPLE, "x": X, "y": CLASSES(X).probs.argmax(1)}, {"num": 1}
)
call(
    Annealed,
    {"ball": L2(0.3), "steps": 4},
    {"ball": L2(0.2), "factors": (3.0, 1.0), "steps": 3, "loss": nll, "start": one_step(L2(0.1))},
    look=lambda attack: attack(PURE, X, Y, generator=seeded(1)),
)
call(
    NearestCentre,
    {"ball": L2(0.3)},
    {"num": 1, "ball": Linf(0.1)},
    look=lambda attack: attack(PURE, X, Y),
)
call(
    StraightThrough,
    {"purifier": PURE},
    {"base": MODEL.at(THETAS[0])},
    look=lambda made: made.loss_and_gradient(nll, X, Y),
)

# --- randomness ----------------------------------------------------------------------------------

call(seed_for, {"seed": 3, "purpose": "a"}, {"step": 2, "purpose": "b", "seed": 4})
call(
    lambda rows, num: drawn(torch.randn, (len(rows), 2), Share(seeded(0), rows, num, 1), dtype=D),
    {"rows": torch.tensor([2, 3]), "num": 5},
    {"rows": torch.tensor([0, 4])},
    name="drawn by a share",
)

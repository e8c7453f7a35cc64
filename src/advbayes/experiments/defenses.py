"""The paper's defenses (SM-5, SM-6) and those beside them, as data.

Where section 4 and SM-5 disagree, SM-5 is followed: its mixed channels hold the *noisy* identity
N(x, sigma^2), where section 4 calls the other half "clean data". The defenses of the command line
(`os50`, `nn50`) follow section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from advbayes.attacks import nll, one_step, pgd, squared_error
from advbayes.channels import AttackChannel, Mixture, Noise
from advbayes.metrics import constant, majority, uniform
from advbayes.predictive import SmoothedAttack
from advbayes.runs import Prepared
from advbayes.runs.building import learned_channel
from advbayes.runs.config import RunConfig
from advbayes.types import Channel, Predictor

MakeChannel = Callable[[RunConfig, Prepared], Channel]
MakePredictor = Callable[[Prepared, int], Predictor]


@dataclass(frozen=True)
class Purify:
    """The reactive defense; online, thetas are weighed by x', offline they are not."""

    update: str
    sigma: float
    num_reference: int = 100
    num_thetas: int = 5


@dataclass(frozen=True)
class Defense:
    """One row: keys of a run, a channel or a purifier that they cannot name, or a predictor.

    >>> DEFENSES["MIX"].settings
    {'defense': 'mix'}
    """

    about: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    channel: MakeChannel | None = None
    purify: Purify | None = None
    reference: MakePredictor | None = None
    has_gradient: bool = True


def _attack(
    config: RunConfig, data: Prepared, *, steps: int = 1, eps: float | None = None, sigma: float
) -> AttackChannel:
    """The error's ascent of so many steps within eps (absent: the run's), and noise."""
    loss = squared_error if data.dataset.task == "regression" else nll
    ball = data.ball(config.norm, config.eps if eps is None else eps)
    return AttackChannel(one_step(ball, loss) if steps == 1 else pgd(ball, steps, loss), sigma)


def mixed(weight: float, attacked: MakeChannel) -> MakeChannel:
    """weight N(x, sigma^2) + (1 - weight) attacked: SM-5's mixture with the noisy identity."""
    return lambda config, data: Mixture(
        [weight, 1 - weight], [Noise(config.sigma), attacked(config, data)]
    )


def deterministic(clean: float = 0.5, steps: int = 1) -> MakeChannel:
    """Adversarial training on batches of which a share is clean; no noise anywhere."""

    def make(config: RunConfig, data: Prepared) -> Channel:
        attacked = _attack(config, data, steps=steps, sigma=0.0)
        return attacked if clean == 0 else Mixture([clean, 1 - clean], [Noise(0.0), attacked])

    return make


def weighted(clean: float) -> MakeChannel:
    """clean N(x, sigma^2) + (1 - clean) attack: the regression MIX is `weighted(0.4)`."""

    def attacked(config: RunConfig, data: Prepared) -> Channel:
        return _attack(config, data, sigma=config.sigma)

    return attacked if clean == 0 else mixed(clean, attacked)


def prior_over_eps(config: RunConfig, data: Prepared) -> Channel:
    """eps uniform on four values up to twice the run's: the attacker's budget is unknown too."""
    values = [0.5 * config.eps, config.eps, 1.5 * config.eps, 2 * config.eps]
    return Mixture(
        [0.25] * 4, [_attack(config, data, eps=eps, sigma=config.sigma) for eps in values]
    )


def smoothed_attack(config: RunConfig, data: Prepared) -> Channel:
    """One step on the smoothed predictive, then the noise that it is smoothed by."""
    attack = one_step(data.ball(config.norm, config.eps), nll)
    return AttackChannel(SmoothedAttack(attack, config.sigma), config.sigma)


def within_the_box(config: RunConfig, data: Prepared) -> Channel:
    """Many-step attacks within the data's box; eps has a prior, for stable first steps."""
    loss = squared_error if data.dataset.task == "regression" else nll
    shares = {0.3: 0.1, 0.7: 0.2, 1.1: 0.7}
    attacks = [
        pgd(data.ball(config.norm, share * config.eps, data.box), config.attack_steps, loss)
        for share in shares
    ]
    return Mixture(
        list(shares.values()), [AttackChannel(attack, config.sigma) for attack in attacks]
    )


def least_squares(data: Prepared, seed: int) -> Predictor:
    """Ordinary least squares, differentiable, with the training residuals' scale."""
    ones = torch.ones(len(data.x_train), 1, dtype=torch.float64)
    design = torch.cat([data.x_train.double(), ones], 1)
    # Energy's columns are linearly dependent: the smallest weights among the best, not any
    weights = torch.linalg.lstsq(
        design, data.y_train.double()[:, None], rcond=1e-5, driver="gelsd"
    ).solution[:, 0]
    scale = float((design @ weights - data.y_train.double()).square().mean().sqrt())
    slope, intercept = weights[:-1].float(), float(weights[-1])
    return lambda x: torch.distributions.Normal(
        x @ slope.to(x) + intercept, torch.full((len(x),), scale, dtype=x.dtype)
    )


def _forest(data: Prepared, seed: int) -> Predictor:
    """A random forest of 100 trees, with the out-of-bag residuals' scale."""
    from sklearn.ensemble import RandomForestRegressor

    from advbayes.adapters import from_sklearn

    forest = RandomForestRegressor(100, oob_score=True, random_state=seed, n_jobs=1)
    forest.fit(data.x_train.numpy(), data.y_train.numpy())
    scale = float((forest.oob_prediction_ - data.y_train.numpy()).std())
    return from_sklearn(forest, scale=scale)


_MULTI_STEP = 7

DEFENSES: dict[str, Defense] = {
    "BL": Defense("undefended mean-field posterior, clean data", {"defense": "none"}),
    "noise": Defense("noise alone", {"defense": "noise"}),
    "consistency": Defense(
        "noise alone, and a penalty where two draws of it disagree",
        {"defense": "consistency", "num_channel": 2},
    ),
    "OS": Defense("one-step attack plus noise", {"defense": "os"}),
    "OS50": Defense(
        "half noisy identity, half one-step attack plus noise (SM-5)", channel=weighted(0.5)
    ),
    "MIX": Defense(
        "0.4 noisy identity, 0.6 one-step attacks on several losses plus noise", {"defense": "mix"}
    ),
    "NN": Defense("learned adversary", {"defense": "nn"}),
    "NN50": Defense(
        "half noisy identity, half learned adversary (SM-5)",
        channel=mixed(
            0.5, lambda run, data: learned_channel(run, data, data.ball(run.norm, run.eps))
        ),
    ),
    "onPure": Defense(
        "online purifier on BL, N = 100, S = 5", {"defense": "none"}, purify=Purify("online", 0.5)
    ),
    "offPure": Defense(
        "offline purifier on BL, N = 100, S = 5", {"defense": "none"}, purify=Purify("offline", 0.5)
    ),
    "full purifier": Defense(
        "online purifier on BL over all training images, S = 5",
        {"defense": "none"},
        purify=Purify("online", 1.5, num_reference=60_000),
    ),
    "AT": Defense(
        "point estimate, half clean, half one-step attack", {"posterior": "point"}, deterministic()
    ),
    "multi-step AT": Defense(
        f"point estimate, half clean, half {_MULTI_STEP}-step PGD",
        {"posterior": "point"},
        deterministic(steps=_MULTI_STEP),
    ),
    "PGD channel": Defense(
        f"{_MULTI_STEP}-step PGD at eps 2 plus noise",
        {"defense": "pgd", "eps": 2.0, "attack_steps": _MULTI_STEP},
    ),
    "TRADES": Defense("point estimate, TRADES", {"defense": "trades", "posterior": "point"}),
    "ALP": Defense(
        "point estimate, adversarial logit pairing",
        {"defense": "alp", "posterior": "point", "beta": 1.0},
    ),
    "Gibbs": Defense(
        "MIX with the KL term weighed by 0.1: a robust Gibbs posterior",
        {"defense": "mix", "kl_weight": 0.1},
    ),
    "eps prior": Defense(
        "one-step attack plus noise, eps uniform on four values", channel=prior_over_eps
    ),
    "wide PGD": Defense(
        "point estimate of the wide net, ten-step PGD within the box, a prior over eps up to 2.4",
        {
            "network": "advbayes.networks:wide_conv_net",
            "posterior": "point",
            "eps": 2.2,
            "sigma": 0.05,
            "attack_steps": 10,
        },
        channel=within_the_box,
    ),
    "constant": Defense(
        "training mean and spread", reference=lambda data, seed: constant(data.y_train)
    ),
    "uniform": Defense(
        "every class equally probable",
        reference=lambda data, seed: uniform(len(data.dataset.class_names)),
    ),
    "majority": Defense(
        "the training frequencies",
        reference=lambda data, seed: majority(data.y_train, len(data.dataset.class_names)),
    ),
    "least squares": Defense("ordinary least squares", reference=least_squares),
    "random forest": Defense(
        "100 trees, attacked without gradients", reference=_forest, has_gradient=False
    ),
}
DEFENSES |= {"none": DEFENSES["BL"], "pgd": DEFENSES["PGD channel"]}  # as `train` calls them

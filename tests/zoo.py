"""Twelve evaluations that are broken on purpose, each with the check that must catch it, and five honest ones.

Small nets on the digits that scikit-learn carries, trained here in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributions import Categorical as Classes
from torch.distributions import Distribution

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    FreshPredictive,
    Gaussian,
    Linf,
    MeanField,
    Noise,
    PosteriorPredictive,
    entropy,
    fit,
    margin,
    nll,
    one_step,
    pgd,
)
from advbayes.attacks import APGD, loss_and_gradient
from advbayes.auditing import Budget, Claim, ThreatModel, Verdict, audit
from advbayes.evaluation import evaluate
from advbayes.purification import Purifier

BALL = L2(0.5, box=(0, 1))
CONTROL = L2(1.5, box=(0, 1))
SMALL = Budget(num=60, steps=12, restarts=1, random_points=10, queries=60, max_steps=200, max_thetas=80)
RAW = ThreatModel(units="raw")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,200 training and 150 test images, flat, in [0, 1]."""
    held = load_digits()
    order = torch.randperm(len(held.target), generator=generator(0))
    x, y = torch.tensor(held.data / 16, dtype=torch.float32)[order], torch.tensor(held.target)[order]
    return x[:1200], y[:1200], x[1200:1350], y[1200:1350]


@dataclass(frozen=True)
class Trained:
    model: BayesianModel
    posterior: MeanField

    def thetas(self, num: int = 20, seed: int = 1) -> Tensor:
        return self.posterior.sample(num, generator=generator(seed))

    def predictive(self, num: int = 20, seed: int = 1) -> PosteriorPredictive:
        return PosteriorPredictive(self.model, self.thetas(num, seed))

    def fresh(self, num: int = 20) -> FreshPredictive:
        return FreshPredictive(self.model, self.posterior, num, generator(3))


@lru_cache(maxsize=8)
def trained(defended: bool = False, seed: int = 0, spread: float | None = None) -> Trained:
    """A small net; `spread` widens its posterior, so that one theta says little about the others."""
    x, y, _, _ = digits()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = BayesianModel(net, Categorical())
    posterior = MeanField(model)
    channel = AttackChannel(pgd(L2(0.5, box=(0, 1)), 3), 0.05) if defended else Noise(0.0)
    fit(model, posterior, channel, (x, y), epochs=10, lr=2e-2, batch_size=100, seed=seed, progress=False)
    if spread is not None:
        with torch.no_grad():
            for name, parameter in posterior.named_parameters():
                if "rho" in name or "scale" in name:
                    parameter.copy_(torch.full_like(parameter, torch.tensor(spread).expm1().log().item()))
    return Trained(model, posterior)


def judge(predict: Any, attacks: dict[str, Any], *check: str, through: Any = None, **options: Any) -> Verdict:
    """The verdict of some checks on a claim: arrays made by `attacks` through `through`, scored by `predict`."""
    x, y = options.pop("data", digits()[2:])
    arrays = options.pop("arrays", None) or {
        name: attack(predict if through is None else through, x, y, generator=generator(5)) for name, attack in attacks.items()
    }
    with torch.no_grad():
        correct = {name: predict(x_adv).logits.argmax(1) == y for name, x_adv in arrays.items()}
    worst = torch.stack(list(correct.values())).all(0)
    fields = {"correct": correct, "worst": worst, "through": through, "seed": 5, "config": {"steps": 20}, "code": "0" * 64}
    claim = Claim(arrays, **(fields | options.pop("claim", {})))
    chosen = {"ball": BALL, "threat_model": RAW, "budget": SMALL, "only": check, "progress": False} | options
    return audit(predict, (x, y), attacks=attacks, claim=claim, **chosen)


# --- the broken ones --------------------------------------------------------------------------------------------------


def one_theta_attack() -> Verdict:
    """The attack goes through one theta, the score through twenty."""
    wide = trained(spread=0.25)
    one = wide.model.at(wide.thetas()[0])
    said = ThreatModel(units="raw", knowledge="thetas known", attack_thetas=1, evaluation_thetas=20, randomness="fixed")
    return judge(wide.predictive(), {"PGD": pgd(BALL, 20)}, "E10", through=one, threat_model=said, fresh=wide.fresh())


def double_softmax() -> Verdict:
    """Probabilities are handed over as logits."""
    plain = trained().predictive()
    return judge(lambda x: Classes(logits=plain(x).probs), {"PGD": pgd(BALL, 20), "margin": pgd(BALL, 20, margin)}, "E16")


def ball_leak() -> Verdict:
    """A conversion after the projection stretches the change by 2 %."""
    predict, (x, y) = trained().predictive(), digits()[2:]
    leaked = {"PGD": x + 1.02 * (pgd(BALL, 20)(predict, x, y) - x)}
    return judge(predict, {"PGD": pgd(BALL, 20)}, "E1", arrays=leaked)


def one_step_only() -> Verdict:
    """A single step is all there is."""
    return judge(trained().predictive(), {"one step": one_step(BALL)}, "E6")


def zero_gradient_layer() -> Verdict:
    """A hard threshold in front of the net has no gradient."""
    plain = trained().predictive()
    return judge(lambda x: plain((x > 0.4).float()), {"PGD": pgd(BALL, 20), "margin": pgd(BALL, 20, margin)}, "E9")


def quantiser() -> Verdict:
    """Inputs are rounded to five levels: harmless to a transferred attack, invisible to a gradient."""
    plain = trained().predictive()
    quantised = lambda x: plain((4 * x).round() / 4)  # noqa: E731
    return judge(quantised, {"PGD": pgd(BALL, 20)}, "E13", siblings={"without rounding": plain})


def thetas_redrawn() -> Verdict:
    """Said to be fixed, the thetas are drawn anew between attack and score."""
    wide = trained(spread=0.25)
    said = ThreatModel(units="raw", knowledge="thetas known", attack_thetas=5, evaluation_thetas=5, randomness="fixed")
    attacked = PosteriorPredictive(wide.model, wide.thetas(5, seed=8))
    return judge(wide.fresh(5), {"PGD": pgd(BALL, 20)}, "E14", through=attacked, threat_model=said, fresh=wide.fresh())


@dataclass(frozen=True)
class LastIterate:
    """PGD+ that forgets: error first, then entropy, and wherever that ends."""

    ball: Any
    steps: int = 15

    def __call__(self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        point = x
        for loss in (nll, entropy):
            for _ in range(self.steps):
                gradient = loss_and_gradient(predict, loss, point, y)[2]
                point = self.ball.project(point + self.ball.ascend(gradient, 2.5 * self.ball.eps / self.steps), x)
        return point


def last_iterate() -> Verdict:
    """The last iterate is returned instead of the best."""
    return judge(trained().predictive(), {"PGD+": LastIterate(BALL)}, "E8")


def wrong_units() -> Verdict:
    """eps = 0.5 is claimed in the units of the pixels, but was spent in units of their standard deviation."""
    deviation = float(digits()[0].std())
    standardised = pgd(L2(BALL.eps * deviation, box=(0, 1)), 20)
    said = ThreatModel(units="raw", knowledge="thetas known", attack_thetas=20, evaluation_thetas=20, randomness="fixed")
    return judge(trained().predictive(), {"PGD": standardised}, "E0", threat_model=said)


def stale_model() -> Verdict:
    """The scores are those of a model that has since been trained anew."""
    old, new = trained().predictive(), trained(seed=1).predictive()
    x, y = digits()[2:]
    x_adv = pgd(BALL, 20)(old, x, y)
    with torch.no_grad():
        stale = old(x_adv).logits.argmax(1) == y
    return judge(new, {"PGD": pgd(BALL, 20)}, "E27", arrays={"PGD": x_adv}, claim={"correct": {"PGD": stale}})


def purifier_bypassed() -> Verdict:
    """A purifier is attacked through the model behind it."""
    plain = trained()
    purified = Purifier(plain.model, Noise(0.3), plain.thetas(3), digits()[0][:300])
    base = PosteriorPredictive(plain.model, plain.thetas(3))
    data = tuple(part[:60] for part in digits()[2:])
    bypassed = {"purifier_attacks": ("transfer",)}
    return judge(purified, {"PGD": pgd(BALL, 10)}, "E23", through=base, claim=bypassed, data=data)


def label_leak() -> Verdict:
    """The label sits in columns of x that the attacker may not touch."""
    plain, (x, y) = trained().predictive(), digits()[2:]
    mask = torch.arange(74) < 64
    ball = L2(BALL.eps, box=(0, 1), mask=mask)

    def predict(x: Tensor) -> Distribution:
        return Classes(logits=plain(x[:, :64]).logits + 100 * x[:, 64:])  # type: ignore[attr-defined]

    data = torch.cat([x, nn.functional.one_hot(y, 10).float()], 1), y
    return judge(predict, {"PGD": pgd(ball, 20)}, "E5", data=data, ball=ball)


BROKEN: dict[str, tuple[str, Callable[[], Verdict]]] = {
    "one-theta attack": ("E10", one_theta_attack),
    "double softmax": ("E16", double_softmax),
    "ball leak": ("E1", ball_leak),
    "one step": ("E6", one_step_only),
    "zero-gradient layer": ("E9", zero_gradient_layer),
    "quantiser": ("E13", quantiser),
    "thetas redrawn between attack and score": ("E14", thetas_redrawn),
    "last iterate": ("E8", last_iterate),
    "wrong units": ("E0", wrong_units),
    "stale model": ("E27", stale_model),
    "purifier bypassed": ("E23", purifier_bypassed),
    "label leak": ("E5", label_leak),
}


def honest_claim() -> Verdict:
    """The same kind of claim with nothing wrong, before every check that catches one of the broken ones."""
    plain = trained()
    attacks = {"nll": APGD(BALL, nll, 20), "margin": APGD(BALL, margin, 20, 1, 2)}
    said = ThreatModel(units="raw", knowledge="thetas known", attack_thetas=10, evaluation_thetas=10, randomness="fixed")
    return judge(
        plain.predictive(10),
        attacks,
        *(check for check, _ in BROKEN.values()),
        "E17",
        data=tuple(part[:50] for part in digits()[2:]),
        threat_model=said,
        fresh=plain.fresh(),
        siblings={"another": trained(seed=1).predictive()},
    )


# --- the honest ones --------------------------------------------------------------------------------------------------


def honest(predict: Any, folder: Path, **options: Any) -> Verdict:
    """Everything an audit can ask for is given."""
    data = options.pop("data", digits()[2:])
    ball = options.get("ball", BALL)
    attack = options.pop("recorded", pgd(ball, 10))
    evaluation = evaluate(predict, data, attacks={"PGD": attack}, out=folder, progress=False)
    chosen = {"ball": ball, "threat_model": RAW, "budget": SMALL, "channel": Noise(0.0), "progress": False} | options
    return audit(predict, data, evaluation=evaluation, **chosen)


def honest_undefended(folder: Path) -> Verdict:
    """A posterior predictive with known thetas, undefended."""
    plain, other = trained(), trained(seed=1)
    return honest(plain.predictive(10), folder, fresh=plain.fresh(), undefended=other.predictive(5), control_ball=CONTROL)


def honest_defended(folder: Path) -> Verdict:
    """The same, trained through a PGD channel."""
    defended = trained(defended=True)
    channel = AttackChannel(pgd(L2(0.5, box=(0, 1)), 3), 0.05)
    return honest(
        defended.predictive(10),
        folder,
        fresh=defended.fresh(),
        undefended=trained().predictive(5),
        control_ball=CONTROL,
        channel=channel,
    )


def honest_stochastic(folder: Path) -> Verdict:
    """Fresh thetas at every call, scored ten times."""
    plain = trained()
    return honest(plain.fresh(5), folder, fresh=plain.fresh(), undefended=trained(seed=1).predictive(5), control_ball=CONTROL)


def honest_single_net(folder: Path) -> Verdict:
    """One net, no thetas, in the maximum norm."""
    ball = Linf(0.1, box=(0, 1))
    predict, other = (trained(seed=seed).model.at(trained(seed=seed).posterior.mean.detach()) for seed in (0, 1))
    return honest(predict, folder, ball=ball, undefended=other, control_ball=Linf(0.5, box=(0, 1)))


@lru_cache(maxsize=1)
def regression() -> tuple[PosteriorPredictive, FreshPredictive, Tensor, Tensor]:
    """A curve through 400 noisy points in four dimensions."""
    x = torch.randn(500, 4, generator=generator(0))
    y = x[:, 0].sin() + 0.5 * x[:, 1] * x[:, 2] + 0.2 * torch.randn(500, generator=generator(1))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    model = BayesianModel(net, Gaussian(0.3))
    posterior = MeanField(model)
    fit(model, posterior, Noise(0.0), (x[:400], y[:400]), epochs=40, lr=1e-2, batch_size=50, progress=False)
    predict = PosteriorPredictive(model, posterior.sample(20, generator=generator(2)))
    return predict, FreshPredictive(model, posterior, 20, generator(3)), x[400:], y[400:]


def honest_regression(folder: Path) -> Verdict:
    """A regression predictive."""
    predict, fresh, x, y = regression()
    ball = L2(0.3)
    return honest(predict, folder, data=(x, y), ball=ball, recorded=APGD(ball, nll, 10), fresh=fresh, siblings={"fresh": fresh})


HONEST: dict[str, Callable[[Path], Verdict]] = {
    "undefended posterior predictive": honest_undefended,
    "adversarially trained predictive": honest_defended,
    "stochastic predictor": honest_stochastic,
    "single net, maximum norm": honest_single_net,
    "regression": honest_regression,
}

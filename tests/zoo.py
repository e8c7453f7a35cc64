"""Evaluations that are broken on purpose, each with the check that must catch it, and honest ones.

Small nets on the digits that scikit-learn carries, trained here in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributions import Categorical as Classes
from torch.distributions import Distribution, Independent, Normal

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
from advbayes.attacks import APGD, Square, loss_and_gradient
from advbayes.auditing import Budget, Claim, Support, ThreatModel, Verdict, audit
from advbayes.auditing.controls import trained_control
from advbayes.evaluation import evaluate
from advbayes.evaluation.files import data_hash
from advbayes.predictive import Certificates, Smoothed, certify
from advbayes.purification import Purifier

BALL = L2(0.5, box=(0, 1))
CONTROL = L2(1.5, box=(0, 1))
QUERIES = 60  # of the black box: 5,000 are tested apart
SMALL = Budget(
    num=50, steps=10, restarts=1, random_points=10, queries=QUERIES, max_steps=200, max_thetas=80
)
RAW = ThreatModel(units="raw")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@lru_cache(maxsize=1)
def images() -> tuple[Tensor, Tensor]:
    """1,797 images, flat, in [0, 1], in random order."""
    held = load_digits()
    order = torch.randperm(len(held.target), generator=generator(0))
    return (
        torch.tensor(held.data / 16, dtype=torch.float32)[order],
        torch.tensor(held.target)[order],
    )


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,200 training and 150 test images."""
    x, y = images()
    return x[:1200], y[:1200], x[1200:1350], y[1200:1350]


def held_out() -> tuple[Tensor, Tensor]:
    """All 597 images that nothing is trained on: for what compares two nets."""
    x, y = images()
    return x[1200:], y[1200:]


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


def small_net(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@lru_cache(maxsize=8)
def trained(defended: bool = False, seed: int = 0, spread: float | None = None) -> Trained:
    """A small net; `spread` widens its posterior, so that one theta says little about the
    others."""
    x, y, _, _ = digits()
    model = BayesianModel(small_net(seed), Categorical())
    posterior = MeanField(model)
    channel = AttackChannel(pgd(L2(0.5, box=(0, 1)), 3), 0.05) if defended else Noise(0.0)
    fit(
        model,
        posterior,
        channel,
        (x, y),
        epochs=10,
        lr=2e-2,
        batch_size=100,
        seed=seed,
        progress=False,
    )
    if spread is not None:
        with torch.no_grad():
            for name, parameter in posterior.named_parameters():
                if "rho" in name or "scale" in name:
                    parameter.copy_(
                        torch.full_like(parameter, torch.tensor(spread).expm1().log().item())
                    )
    return Trained(model, posterior)


def judge(
    predict: Any, attacks: dict[str, Any], *check: str, through: Any = None, **options: Any
) -> Verdict:
    """The verdict of some checks on a claim: arrays made by `attacks` through `through`, scored by
    `predict`."""
    x, y = options.pop("data", digits()[2:])
    arrays = options.pop("arrays", None) or {
        name: attack(predict if through is None else through, x, y, generator=generator(5))
        for name, attack in attacks.items()
    }
    with torch.no_grad():
        correct = {name: predict(x_adv).logits.argmax(1) == y for name, x_adv in arrays.items()}
    worst = torch.stack(list(correct.values())).all(0)
    fields = {
        "correct": correct,
        "worst": worst,
        "through": through,
        "seed": 5,
        "config": {"steps": 20},
        "code": "0" * 64,
    }
    fields |= {"test_size": len(x), "test_hash": data_hash(x, y)}
    claim = Claim(arrays, **(fields | options.pop("claim", {})))
    chosen = {
        "ball": BALL,
        "threat_model": RAW,
        "tier": SMALL,
        "only": check,
        "progress": False,
    } | options
    return audit(predict, (x, y), attacks=attacks, claim=claim, **chosen)


# --- the broken ones ----------------------------------------------------------------------------


def one_theta_attack() -> Verdict:
    """The attack goes through one theta, the score through twenty."""
    wide = trained(spread=0.25)
    one = wide.model.at(wide.thetas()[0])
    said = ThreatModel(
        units="raw",
        knowledge="thetas known",
        attack_thetas=1,
        evaluation_thetas=20,
        randomness="fixed",
    )
    return judge(
        wide.predictive(),
        {"PGD": pgd(BALL, 20)},
        "E10",
        through=one,
        threat_model=said,
        support=Support(fresh=wide.fresh()),
    )


def double_softmax() -> Verdict:
    """Probabilities are handed over as logits."""
    plain = trained().predictive()
    return judge(
        lambda x: Classes(logits=plain(x).probs),
        {"PGD": pgd(BALL, 20), "margin": pgd(BALL, 20, margin)},
        "E16",
    )


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
    return judge(
        lambda x: plain((x > 0.4).float()),
        {"PGD": pgd(BALL, 20), "margin": pgd(BALL, 20, margin)},
        "E9",
    )


def quantiser() -> Verdict:
    """Inputs are rounded to five levels: harmless to a transferred attack, invisible to a
    gradient."""
    plain = trained().predictive()
    quantised = lambda x: plain((4 * x).round() / 4)  # noqa: E731
    return judge(
        quantised,
        {"PGD": pgd(BALL, 20)},
        "E13",
        support=Support(siblings={"without rounding": plain}),
    )


def thetas_redrawn() -> Verdict:
    """Said to be fixed, the thetas are drawn anew between attack and score."""
    wide = trained(spread=0.25)
    said = ThreatModel(
        units="raw",
        knowledge="thetas known",
        attack_thetas=5,
        evaluation_thetas=5,
        randomness="fixed",
    )
    attacked = PosteriorPredictive(wide.model, wide.thetas(5, seed=8))
    return judge(
        wide.fresh(5),
        {"PGD": pgd(BALL, 20)},
        "E14",
        through=attacked,
        threat_model=said,
        support=Support(fresh=wide.fresh()),
    )


@dataclass(frozen=True)
class LastIterate:
    """PGD+ that forgets: error first, then entropy, and wherever that ends."""

    ball: Any
    steps: int = 15

    def __call__(
        self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        point = x
        for loss in (nll, entropy):
            for _ in range(self.steps):
                gradient = loss_and_gradient(predict, loss, point, y)[2]
                point = self.ball.project(
                    point + self.ball.ascend(gradient, 2.5 * self.ball.eps / self.steps), x
                )
        return point


def last_iterate() -> Verdict:
    """The last iterate is returned instead of the best."""
    return judge(trained().predictive(), {"PGD+": LastIterate(BALL)}, "E8")


def wrong_units() -> Verdict:
    """eps = 0.5 is claimed in the units of the pixels, but was spent in units of their standard
    deviation."""
    deviation = float(digits()[0].std())
    standardised = pgd(L2(BALL.eps * deviation, box=(0, 1)), 20)
    said = ThreatModel(
        units="raw",
        knowledge="thetas known",
        attack_thetas=20,
        evaluation_thetas=20,
        randomness="fixed",
    )
    return judge(trained().predictive(), {"PGD": standardised}, "E0", threat_model=said)


def stale_model() -> Verdict:
    """The scores are those of a model that has since been trained anew."""
    old, new = trained().predictive(), trained(seed=1).predictive()
    x, y = digits()[2:]
    x_adv = pgd(BALL, 20)(old, x, y)
    with torch.no_grad():
        stale = old(x_adv).logits.argmax(1) == y
    return judge(
        new, {"PGD": pgd(BALL, 20)}, "E27", arrays={"PGD": x_adv}, claim={"correct": {"PGD": stale}}
    )


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


# --- memory -------------------------------------------------------------------------------------


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """One thing's value with another's gradient: what a predictor that hides its memory would
    do."""
    return value.detach() + gradient_of - gradient_of.detach()


class Recogniser:
    """Answers within `reach` of a known point as at that point; `points` are the test set, or
    whatever was asked before."""

    def __init__(self, plain: Any, points: Tensor | None, reach: float) -> None:
        self.plain, self.reach = plain, reach
        self.learns = points is None
        self.points = torch.empty(0, 1) if points is None else points

    def __call__(self, x: Tensor) -> Distribution:
        flat = x.detach().flatten(1)
        if self.learns and len(flat):
            if not len(self.points):
                self.points = flat[:1].clone()
            for row in flat:
                if float((self.points - row).norm(dim=1).min()) > self.reach:
                    self.points = torch.cat([self.points, row.unsqueeze(0)])
        distance, nearest = torch.cdist(flat, self.points).min(1)
        known = torch.where(
            (distance <= self.reach).unsqueeze(1), self.points[nearest], flat
        ).view_as(x)
        honest = self.plain(x)
        with torch.no_grad():
            remembered = self.plain(known)
        if isinstance(honest, Classes):
            return Classes(logits=straight_through(remembered.logits, honest.logits))
        return Normal(straight_through(remembered.mean, honest.mean), remembered.variance.sqrt())


def looked_at(
    predict: Any, *check: str, data: Any = None, ball: Any = BALL, **options: Any
) -> Verdict:
    """An audit of our own by some checks."""
    chosen = {
        "ball": ball,
        "threat_model": RAW,
        "tier": SMALL,
        "only": check,
        "progress": False,
    } | options
    return audit(predict, digits()[2:] if data is None else data, **chosen)


def recognises_test_points() -> Verdict:
    """Near a test point it answers as at the test point."""
    return looked_at(Recogniser(trained().predictive(5), digits()[2], 1.01 * BALL.eps), "E28")


def recognises_test_points_in_regression() -> Verdict:
    """The same in regression."""
    x, y = (part[400:] for part in regression_data())
    known = lambda x: Normal(curve(x), 0.2)  # noqa: E731  # errs by the noise alone, unless attacked
    return looked_at(Recogniser(known, x, 0.51), "E28", data=(x, y), ball=L2(0.5))


class Covered:
    """Near a known point its variance is the largest squared error in the ball around it, which was
    found out before; the mean is honest, and so is the gradient."""

    def __init__(self, plain: Any, points: Tensor, y: Tensor, ball: Any) -> None:
        self.plain, self.points, self.reach = plain, points, 1.01 * ball.eps
        moved = pgd(ball, 20)(plain, points, y)
        with torch.no_grad():
            errors = torch.stack([(plain(each).mean - y).abs() for each in (points, moved)])
        self.scale = errors.amax(0).clamp_min(0.02)

    def __call__(self, x: Tensor) -> Distribution:
        honest = self.plain(x)
        distance, nearest = torch.cdist(x.detach(), self.points).min(1)
        scale = honest.variance.sqrt()
        stated = torch.where(distance <= self.reach, self.scale[nearest], scale.detach())
        return Normal(honest.mean, straight_through(stated, scale))


def states_a_fitting_variance_at_test_points() -> Verdict:
    """Near a test point its variance is the error that it will make."""
    predict, _, x, y = regression()
    ball, tier = L2(0.5), replace(SMALL, num=100)
    covered = Covered(predict, x, y, ball)
    return looked_at(covered, "E28", data=(x, y), ball=ball, tier=tier)


def remembers_queries() -> Verdict:
    """Near whatever it was asked before it answers as there: attacks begin at x."""
    return looked_at(Recogniser(trained().predictive(5), None, 1.01 * BALL.eps), "E29")


def remembers_queries_in_regression() -> Verdict:
    """The same in regression."""
    predict, _, x, y = regression()
    return looked_at(Recogniser(predict, None, 0.51), "E29", data=(x, y), ball=L2(0.5))


def remembers_in_a_closure() -> Verdict:
    """The memory is a list that a function closes over."""
    plain = trained().predictive(5)
    seen: list[Tensor] = []

    def predict(x: Tensor) -> Distribution:
        seen.append(x.detach())
        return plain(seen[0] if len(seen[0]) == len(x) else x)

    return looked_at(predict, "E29")


SEEN: dict[str, Any] = {}


class RemembersElsewhere:
    """Its memory is not its own: it lies in an object of the module."""

    def __init__(self, plain: Any) -> None:
        SEEN["memory"] = Recogniser(plain, None, 1.01 * BALL.eps)

    def __call__(self, x: Tensor) -> Distribution:
        return SEEN["memory"](x)  # type: ignore[no-any-return]


def remembers_in_a_global() -> Verdict:
    """The memory is an object of the module, which a copy of the predictor does not hold."""
    return looked_at(RemembersElsewhere(trained().predictive(5)), "E29")


def remembers_on_disk() -> Verdict:
    """The memory is a file, which a copy shares."""
    plain = point()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "seen.npy"

        def predict(x: Tensor) -> Distribution:
            memory = Recogniser(plain, None, 1.01 * BALL.eps)
            if path.exists():
                memory.points = torch.from_numpy(np.load(path))
            prediction = memory(x)
            np.save(path, memory.points.numpy())
            return prediction

        return looked_at(predict, "E29")


def remembers_in_a_cache() -> Verdict:
    """The memory is a value that `functools` keeps, with a reach of three eps."""
    plain = point()
    memory = lru_cache(maxsize=1)(lambda: Recogniser(plain, None, 3 * BALL.eps))
    return looked_at(lambda x: memory()(x), "E29")


# --- answers that depend on how they are asked --------------------------------------------------


def two_faced() -> Verdict:
    """Whoever wants a gradient is answered by another net."""
    plain, other = point(), point(seed=1)
    return looked_at(lambda x: (other if x.requires_grad else plain)(x), "E9")


def depends_on_the_batch() -> Verdict:
    """Normalises by the batch, as a net does that was left in training mode: the company of an
    input has a say."""
    plain = point()

    def predict(x: Tensor) -> Distribution:
        return plain(x - 0.5 * (x.mean(0) - 0.3) if len(x) > 1 else x)  # type: ignore[no-any-return]

    return looked_at(predict, "E29")


def depends_on_large_batches() -> Verdict:
    """The same, but not in the batches of 64 that are easily looked at."""
    plain = point()

    def predict(x: Tensor) -> Distribution:
        return plain(x - 0.5 * (x.mean(0) - 0.3) if len(x) > 64 else x)  # type: ignore[no-any-return]

    return looked_at(predict, "E29", tier=replace(SMALL, num=100))


def nearest_neighbour() -> Verdict:
    """Answers for the nearest training image, with the gradient of the net itself; nobody calls it
    a purifier."""
    plain, (known, labels) = point(), digits()[:2]

    def predict(x: Tensor) -> Distribution:
        nearest = known[torch.cdist(x.detach(), known).argmin(1)]
        return Classes(logits=straight_through(plain(nearest).logits, plain(x).logits))

    support = Support(training=(known, labels))
    return looked_at(predict, "E12", support=support, ball=L2(1.0, box=(0, 1)))


class Floored(Normal):
    """A Gaussian whose density never falls below a floor."""

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value).clamp_min(-1.5)  # type: ignore[no-untyped-call, no-any-return]


def density_that_is_none() -> Verdict:
    """No error is so large that it costs more than 1.5 nats."""
    plain, _, x, y = regression()
    predict = lambda x: Floored(plain(x).mean, plain(x).variance.sqrt())  # noqa: E731
    return looked_at(predict, "E22", data=(x, y), ball=L2(0.3))


def leak_in_regression() -> Verdict:
    """The target sits in a column that the attacker may not touch; the others have hardly a
    say."""
    plain, _, x, y = regression()
    data, ball = (torch.cat([x, y.unsqueeze(1)], 1), y), L2(0.5, mask=torch.arange(5) < 4)
    predict = lambda x: Normal(x[:, 4] + 1e-3 * plain(x[:, :4]).mean, 0.3)  # noqa: E731
    return looked_at(predict, "E5", data=data, ball=ball)


def leak_by_units() -> Verdict:
    """The label sits in columns whose units are so large that eps is nothing in them."""
    plain, (x, y) = point(), digits()[2:]
    data, ball = (torch.cat([x, 100 * nn.functional.one_hot(y, 10).float()], 1), y), L2(BALL.eps)

    def predict(x: Tensor) -> Distribution:
        return Classes(logits=plain(x[:, :64]).logits + x[:, 64:])

    return looked_at(predict, "E5", data=data, ball=ball, attacks={"PGD": pgd(ball, 10, margin)})


# --- claims -------------------------------------------------------------------------------------


def better_than_the_union() -> Verdict:
    """Each column is right, the worst case is that of the best attack."""
    predict, (x, y) = trained().predictive(), digits()[2:]
    attacks = {"weak": one_step(BALL), "strong": pgd(BALL, 20)}
    with torch.no_grad():
        weak = predict(attacks["weak"](predict, x, y, generator=generator(5))).logits.argmax(1) == y
    strong = pgd(BALL, 20)(predict, x, y, generator=generator(5))
    correct = {"weak": weak}
    return judge(
        predict,
        attacks,
        "E17",
        claim={"worst": weak, "correct": correct},
        arrays={"weak": x, "strong": strong},
    )


def array_without_its_scores() -> Verdict:
    """An array that nothing is claimed for."""
    predict, (x, y) = trained().predictive(), digits()[2:]
    x_adv = pgd(BALL, 20)(predict, x, y)
    with torch.no_grad():
        said = predict(x).logits.argmax(1) == y
    return judge(predict, {}, "E27", arrays={"a": x, "b": x_adv}, claim={"correct": {"a": said}})


def cherry_picked() -> Verdict:
    """The examples are those that stood, and the size of the test set is not said."""
    predict, (x, y) = trained().predictive(), digits()[2:]
    x_adv = pgd(BALL, 20)(predict, x, y)
    with torch.no_grad():
        stood = predict(x_adv).logits.argmax(1) == y
    unsaid = {"test_size": None, "test_hash": None}
    return judge(
        predict, {}, "E27", data=(x[stood], y[stood]), arrays={"PGD": x_adv[stood]}, claim=unsaid
    )


def member_of_an_ensemble() -> Verdict:
    """Five nets vote, one of them is attacked; there are no thetas to speak of."""
    members = [point(seed) for seed in range(1, 6)]

    def predict(x: Tensor) -> Distribution:
        return Classes(probs=torch.stack([each(x).probs for each in members]).mean(0))

    return judge(predict, {"PGD": pgd(BALL, 20)}, "E10", through=members[0])


def cherry_picked_as_the_whole() -> Verdict:
    """The same, with the hash of the whole test set and the size of the selection."""
    predict, (x, y) = trained().predictive(), digits()[2:]
    said = {"test_size": 40, "test_hash": data_hash(x, y)}
    return judge(predict, {"PGD": pgd(BALL, 20)}, "E27", data=(x[:40], y[:40]), claim=said)


# --- what helps ---------------------------------------------------------------------------------


def point(seed: int = 0) -> Any:
    """One net: the mean of a posterior."""
    held = trained(seed=seed)
    return held.model.at(held.posterior.mean.detach())


def untrained_control() -> Verdict:
    """A net that knows nothing falls to any attack."""
    support = Support(undefended=untrained(), control_ball=CONTROL)
    return looked_at(trained().predictive(5), "E20", support=support)


def averaging_control() -> Verdict:
    """A variational posterior as control: averaging is a defense of a kind."""
    support = Support(undefended=trained(seed=1).predictive(5), control_ball=CONTROL)
    return looked_at(trained().predictive(5), "E20", support=support)


def evaluation_of_another_ball(folder: Path | None = None) -> Verdict:
    """The saved arrays are those of a smaller radius."""
    return _saved(pgd(L2(0.25, box=(0, 1)), 5), digits()[2:])


def evaluation_of_other_data() -> Verdict:
    """The saved arrays are those of other examples."""
    return _saved(pgd(BALL, 5), tuple(part[:150] for part in digits()[:2]))


def _saved(attack: Any, data: Any) -> Verdict:
    predict = trained().predictive(5)
    with TemporaryDirectory() as folder:
        evaluation = evaluate(
            predict, data, attacks={"PGD": attack}, out=Path(folder) / "run", progress=False
        )
        return looked_at(predict, "E27", support=Support(evaluation=evaluation))


def weak_baseline() -> Verdict:
    """The adversarial training to be beaten is no better than an undefended net."""
    predict = trained(defended=True).predictive(5)
    support = Support(undefended=undefended(predict, held_out()), baseline=point(seed=2))
    return looked_at(predict, "E21", data=held_out(), support=support)


def baseline_without_gradients() -> Verdict:
    """The control itself, with its gradients hidden, is called adversarial training."""
    plain = point(seed=1)

    def hides(x: Tensor) -> Any:
        return Classes(logits=straight_through(plain(x.detach()).logits, 0 * x[:, :10]))

    support = Support(undefended=point(seed=1), baseline=hides, control_ball=CONTROL)
    return looked_at(trained(defended=True).predictive(5), "E21", data=held_out(), support=support)


def attack_in_another_norm() -> Verdict:
    """The same eps, in a norm in which it is much less."""
    attacks = {"PGD": pgd(L2(0.1, box=(0, 1)), 10)}
    return looked_at(point(), "E0", ball=Linf(0.1, box=(0, 1)), attacks=attacks)


def attack_on_half_of_the_image() -> Verdict:
    """The attacker may change everything, the attack changes the upper half."""
    upper = L2(0.5, box=(0, 1), mask=torch.arange(64) < 32)
    return looked_at(point(), "E0", attacks={"PGD": pgd(upper, 10)})


def attack_on_the_large_features() -> Verdict:
    """On average over the features the attack goes as far as the ball; in three of four it does not
    move."""
    ball, less = (
        L2(0.1, scale=torch.tensor([1000.0, small, small, small])) for small in (1.0, 1e-6)
    )
    units = torch.tensor([1000.0, 1, 1, 1])
    x, y = blobs(40, 5)
    said = ThreatModel(units="standardised", scale=ball.scale)
    predict = lambda x: linear(discriminant(0))(x / units)  # noqa: E731
    options: Any = {"attacks": {"PGD": pgd(less, 10)}, "threat_model": said}
    return looked_at(predict, "E0", data=(x * units, y), ball=ball, **options)


def pixels_of_other_units() -> Verdict:
    """eps = 0.3 of pixels in [0, 1], for pixels from 0 to 255."""
    plain, (x, y) = point(), digits()[2:]
    data, ball = ((255 * x).round(), y), Linf(0.3, box=(0, 255))
    return judge(lambda x: plain(x / 255), {"PGD": pgd(ball, 5)}, "E0", data=data, ball=ball)


def more_said_than_done() -> Verdict:
    """A thousand steps are said, ten were taken."""
    said = ThreatModel(units="raw", steps=1000)
    return looked_at(point(), "E0", attacks={"PGD": pgd(BALL, 10)}, threat_model=said)


def larger_than_the_test_set() -> Verdict:
    """More examples are scored than the test set is said to hold."""
    said = {"test_size": 100}
    return judge(point(), {"PGD": pgd(BALL, 20)}, "E27", claim=said)


def altered_rows_of_a_stochastic_claim() -> Verdict:
    """Each point is scored ten times; for six that broke, ten successes are written down."""
    attack, (x, y) = pgd(BALL, 5), digits()[2:]
    predict = trained(spread=0.15).fresh(3)
    x_adv = attack(predict, x, y, generator=generator(5))
    with torch.no_grad():
        calls = [predict(x_adv).logits.argmax(1) == y for _ in range(10)]
    correct = torch.stack(calls).double().mean(0)
    correct[(correct < 0.3).nonzero().squeeze(1)[:6]] = 1.0
    said = {"correct": {"PGD": correct}, "worst": correct, "rescored": 10}
    return judge(predict, {"PGD": attack}, "E27", arrays={"PGD": x_adv}, claim=said)


def density_of_two_that_is_none() -> Verdict:
    """The floor under a density of two outputs."""
    plain, _, x, y = regression()

    def predict(x: Tensor) -> Distribution:
        mean = plain(x).mean
        return FlooredPair(Normal(torch.stack([mean, mean], 1), 0.3), 1)

    return looked_at(predict, "E22", data=(x, torch.stack([y, y], 1)), ball=L2(0.3))


class FlooredPair(Independent):
    """Gaussians whose joint density never falls below a floor."""

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value).clamp_min(-2.0)  # type: ignore[no-untyped-call, no-any-return]


def array_without_its_scores_in_regression() -> Verdict:
    """Log-probabilities of the weaker attack alone."""
    predict, _, x, y = regression()
    ball = L2(0.3)
    arrays = {"weak": one_step(ball)(predict, x, y), "strong": pgd(ball, 10)(predict, x, y)}
    with torch.no_grad():
        said = {"weak": predict(arrays["weak"]).log_prob(y)}
    whole = {"test_size": len(x), "test_hash": data_hash(x, y)}
    claim = Claim(arrays, log_prob=said, seed=5, config={"steps": 10}, code="0" * 64, **whole)
    return looked_at(predict, "E27", data=(x, y), ball=ball, claim=claim, attacks={})


def changes_with_use() -> Verdict:
    """After some hundred calls, wherever they are counted, it answers with less confidence."""
    plain = point()
    calls = lru_cache(maxsize=1)(lambda: [0])

    def predict(x: Tensor) -> Distribution:
        calls()[0] += 1
        return Classes(logits=plain(x).logits * (1.0 if calls()[0] < 50 else 0.3))

    return looked_at(predict, "E3", "E29", attacks={"PGD": pgd(BALL, 20)})


def altered_errors_of_an_evaluation() -> Verdict:
    """In the saved table every squared error is half of what it was."""
    predict, _, x, y = regression()
    ball = L2(0.3)
    with TemporaryDirectory() as folder:
        made = evaluate(
            predict, (x, y), attacks={"PGD": pgd(ball, 5)}, out=Path(folder) / "run", progress=False
        )
        halved = {
            cell: rows | {"squared_error": 0.5 * rows["squared_error"]}
            for cell, rows in made.cells.items()
        }
        support = Support(evaluation=replace(made, cells=halved))
        return looked_at(predict, "E27", data=(x, y), ball=ball, support=support)


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
    "recognises test points": ("E28", recognises_test_points),
    "recognises test points (regression)": ("E28", recognises_test_points_in_regression),
    "fitting variance at test points": ("E28", states_a_fitting_variance_at_test_points),
    "remembers queries": ("E29", remembers_queries),
    "remembers queries (regression)": ("E29", remembers_queries_in_regression),
    "remembers queries in a closure": ("E29", remembers_in_a_closure),
    "remembers queries in a global": ("E29", remembers_in_a_global),
    "remembers queries on disk": ("E29", remembers_on_disk),
    "remembers queries in a cache": ("E29", remembers_in_a_cache),
    "two-faced": ("E9", two_faced),
    "depends on the batch": ("E29", depends_on_the_batch),
    "depends on large batches": ("E29", depends_on_large_batches),
    "nearest neighbour": ("E12", nearest_neighbour),
    "density that is none": ("E22", density_that_is_none),
    "leak in regression": ("E5", leak_in_regression),
    "leak by units": ("E5", leak_by_units),
    "better than the union": ("E17", better_than_the_union),
    "array without its scores": ("E27", array_without_its_scores),
    "member of an ensemble": ("E10", member_of_an_ensemble),
    "cherry-picked": ("E27", cherry_picked),
    "cherry-picked as the whole": ("E27", cherry_picked_as_the_whole),
    "untrained control": ("E20", untrained_control),
    "averaging control": ("E20", averaging_control),
    "evaluation of another ball": ("E27", evaluation_of_another_ball),
    "evaluation of other data": ("E27", evaluation_of_other_data),
    "weak baseline": ("E21", weak_baseline),
    "baseline without gradients": ("E21", baseline_without_gradients),
    "attack in another norm": ("E0", attack_in_another_norm),
    "attack on half of the image": ("E0", attack_on_half_of_the_image),
    "attack on the large features": ("E0", attack_on_the_large_features),
    "pixels of other units": ("E0", pixels_of_other_units),
    "more said than done": ("E0", more_said_than_done),
    "larger than the test set": ("E27", larger_than_the_test_set),
    "altered rows of a stochastic claim": ("E27", altered_rows_of_a_stochastic_claim),
    "density of two that is none": ("E22", density_of_two_that_is_none),
    "array without its scores (regression)": ("E27", array_without_its_scores_in_regression),
    "changes with use": ("E29", changes_with_use),
    "altered errors of an evaluation": ("E27", altered_errors_of_an_evaluation),
}
ORIGINAL = tuple(BROKEN.values())[:12]


# --- what helps nothing: a check that leans on it has not run -----------------------------------


def twin_as_sibling() -> Verdict:
    """The sibling that examples are transferred from is the model itself, made a second time."""
    return looked_at(point(), "E13", support=Support(siblings={"twin": point()}))


def control_ball_too_wide() -> Verdict:
    """In the ball that the control falls in everything does."""
    support = Support(undefended=point(), control_ball=L2(4.0, box=(0, 1)))
    return looked_at(point(), "E20", support=support)


def control_ball_of_another_norm() -> Verdict:
    """The control falls in another norm than the one that counts."""
    support = Support(undefended=point(), control_ball=Linf(0.5, box=(0, 1)))
    return looked_at(point(), "E20", support=support)


def constant_baseline() -> Verdict:
    """The adversarial training to be beaten says the mean, whatever it is asked."""
    predict, fresh, x, y = regression()
    mean = float(regression_data()[1][:400].mean())
    baseline = lambda x: Normal(mean + 0 * x.sum(1), 1.0)  # noqa: E731
    control = predict.model.at(predict.thetas[0])
    support = Support(undefended=control, baseline=baseline, fresh=fresh)
    return looked_at(predict, "E21", data=(x, y), ball=L2(1.0), support=support)


@dataclass(frozen=True)
class NeverFresh:
    """Says that it draws thetas, and has the evaluated ones."""

    predict: Any

    def __call__(self, x: Tensor) -> Distribution:
        return self.predict(x)  # type: ignore[no-any-return]

    def with_thetas(self, num: int) -> NeverFresh:
        return self


def thetas_never_fresh(id: str = "E14") -> Verdict:
    """The attacker who does not know the thetas knows them."""
    predict = trained(spread=0.25).predictive(20)
    return looked_at(predict, id, support=Support(fresh=NeverFresh(predict)))


@dataclass(frozen=True)
class Idle:
    """A black-box attack that asks as often as is due, and returns x."""

    ball: Any
    loss: Any = margin
    queries: int = 5000

    def __call__(
        self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        for _ in range(self.queries):
            predict(x)
        return x.clone()


def nothing_to_climb(prediction: Any, y: Tensor) -> Tensor:
    """A loss that is the same everywhere."""
    return 0.0 * prediction.logits[:, 0]


def idle_black_box() -> Verdict:
    """The black box asks, and does nothing with the answers."""
    return looked_at(point(), "E11", support=Support(black_box=Idle(BALL, queries=QUERIES)))


def aimless_black_box() -> Verdict:
    """Square, with a loss that says nothing."""
    black_box = Square(BALL, QUERIES, nothing_to_climb)
    return looked_at(point(), "E11", support=Support(black_box=black_box))


def six_examples() -> Verdict:
    """So few examples that no test can show what the predictor remembers."""
    x, y = (part[:6] for part in digits()[2:])
    return looked_at(Recogniser(point(), x, 1.01 * BALL.eps), "E28", data=(x, y))


def least_right(predictors: Iterable[Any]) -> Any:
    """Of several that know nothing: one in some twenty beats the most frequent class by luck."""
    x, y = digits()[2:]
    return min(predictors, key=lambda predict: int((predict(x).logits.argmax(1) == y).sum()))


def untrained() -> Any:
    """A net that knows nothing."""
    model = trained().model
    thetas = torch.randn(5, model.num_params, generator=generator(0))
    return least_right(model.at(theta) for theta in thetas)


def untrained_sibling() -> Verdict:
    """Examples are transferred from a net that knows nothing."""
    return looked_at(point(), "E13", support=Support(siblings={"untrained": untrained()}))


def thetas_of_nothing() -> Verdict:
    """The fresh thetas are those of a posterior that was never trained."""
    held = trained(spread=0.25)
    models = [BayesianModel(small_net(seed), Categorical()) for seed in range(5)]
    fresh = [FreshPredictive(each, MeanField(each), 20, generator(3)) for each in models]
    return looked_at(held.predictive(20), "E14", support=Support(fresh=least_right(fresh)))


def brittle_control() -> Verdict:
    """The control is right at the test points and wrong wherever else it is asked."""
    plain, known = point(), digits()[2]

    def predict(x: Tensor) -> Distribution:
        at_one = (torch.cdist(x, known).amin(1, keepdim=True) < 1e-4).float()
        return Classes(logits=(2 * at_one - 1) * plain(x).logits)

    return looked_at(point(), "E20", support=Support(undefended=predict))


def published_figure_of_ones_own() -> Verdict:
    """A published figure so low that a net which knows nothing reaches it."""
    support = Support(undefended=point(seed=1), baseline=untrained(), published=(0.0, 0.0))
    return looked_at(point(), "E21", support=support)


def factory_of_itself() -> Verdict:
    """The predictor "made anew" is the one that remembers."""
    memory = Recogniser(point(), None, 0.5 * BALL.eps)
    return looked_at(memory, "E29", support=Support(factory=lambda: memory))


class SquareInName(Square):
    """Square where it is tried out, nothing where it counts."""

    def __call__(
        self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        return super().__call__(predict, x, y, generator=generator) if x.shape[1] == 20 else x


def square_in_name() -> Verdict:
    """A subclass of Square that asks nothing."""
    return looked_at(point(), "E11", support=Support(black_box=SquareInName(BALL, QUERIES)))


def idle_purifier_attacks() -> Verdict:
    """The attacks that a purifier must meet, by name; none of them moves anything."""
    plain = point()
    idle = {name: Idle(BALL, queries=1) for name in ("straight_through", "nearest_centre")}
    support = Support(unpurified=plain, purifier_attacks=idle)
    return looked_at(lambda x: plain((4 * x).round() / 4), "E23", support=support)


def purifier_that_holds_the_test_set() -> Verdict:
    """The reference points of a purifier are the test points and some others."""
    held, data = trained(), digits()
    reference = torch.cat([data[0][:100], data[2]])
    predict = Purifier(held.model, Noise(0.3), held.thetas(2), reference)
    return looked_at(predict, "E28", attacks={"PGD": pgd(BALL, 3)})


VOID: dict[str, tuple[str, Callable[[], Verdict], str]] = {
    "twin as sibling": ("E13", twin_as_sibling, "twin answers as the audited model itself"),
    "control ball too wide": ("E20", control_ball_too_wide, "everything falls"),
    "control ball of another norm": ("E20", control_ball_of_another_norm, "give one of the norm"),
    "constant baseline": ("E21", constant_baseline, "no better .*the mean"),
    "thetas never fresh": ("E14", thetas_never_fresh, "does not know the evaluated thetas"),
    "idle black box": ("E11", idle_black_box, "breaks 0.00 of what can be broken"),
    "aimless black box": ("E11", aimless_black_box, "of what can be broken on a linear model"),
    "six examples": ("E28", six_examples, "6 examples are too few"),
    "untrained sibling": ("E13", untrained_sibling, "untrained is no better than a constant"),
    "thetas of nothing": ("E14", thetas_of_nothing, "does not know the evaluated thetas"),
    "brittle control": ("E20", brittle_control, "falls to noise says nothing of an attack"),
    "published figure of one's own": ("E21", published_figure_of_ones_own, "has learnt something"),
    "factory of itself": ("E29", factory_of_itself, "one and the same predictor"),
    "Square in name": ("E11", square_in_name, "this one has 0"),
    "idle purifier attacks": ("E23", idle_purifier_attacks, "straight_through, nearest_centre"),
    "purifier that holds the test set": (
        "E28",
        purifier_that_holds_the_test_set,
        "holds 50 of the 50 audited inputs",
    ),
}


def honest_claim() -> Verdict:
    """The same kind of claim with nothing wrong, before every check that catches one of the broken
    ones."""
    plain = trained()
    attacks = {"nll": APGD(BALL, nll, 20), "margin": APGD(BALL, margin, 20, 1, 2)}
    said = ThreatModel(
        units="raw",
        knowledge="thetas known",
        attack_thetas=10,
        evaluation_thetas=10,
        randomness="fixed",
    )
    predict, data = plain.predictive(10), tuple(part[:50] for part in digits()[2:])
    return judge(
        predict,
        attacks,
        *(check for check, _ in ORIGINAL),
        *("E20", "E28", "E29"),
        "E17",
        data=data,
        threat_model=said,
        support=Support(
            fresh=plain.fresh(),
            siblings={"another": trained(seed=1).predictive()},
            undefended=undefended(predict, data),
            control_ball=CONTROL,
            evaluation=None,
        ),
    )


# --- the honest ones ----------------------------------------------------------------------------


def honest(predict: Any, folder: Path, **options: Any) -> Verdict:
    """Everything an audit can ask for is given."""
    data = options.pop("data", held_out())
    ball = options.pop("ball", BALL)
    attack = options.pop("recorded", pgd(ball, 10))
    evaluation = evaluate(predict, data, attacks={"PGD": attack}, out=folder, progress=False)
    support = Support(
        **({"channel": Noise(0.0), "evaluation": evaluation} | options.pop("support"))
    )
    # the default list takes twice as long
    attacks = {"nll": APGD(ball, nll, 10), "margin": APGD(ball, margin, 10, 1, 2)}
    chosen = {"threat_model": RAW, "tier": SMALL, "progress": False, "attacks": attacks} | options
    return audit(predict, data, ball=ball, support=support, **chosen)


@lru_cache(maxsize=1)
def adversarially_trained() -> Any:
    """One net trained by PGD without noise, in about the ball in which E21 compares it."""
    channel = AttackChannel(pgd(L2(0.8, box=(0, 1)), 5), 0.0)
    return trained_control(trained().model, channel, digits()[:2], None, seed=0, progress=False)


def undefended(predict: Any, data: tuple[Tensor, Tensor]) -> Any:
    """One net trained as usual, until it is about as often right as the audited predictor: nets of
    different seeds may be more than the three points apart that E20 allows."""
    x, y = data

    def right(net: Any) -> float:
        with torch.no_grad():
            return float((net(x).logits.argmax(1) == y).double().mean())

    target = right(predict)
    away = lambda net: abs(right(net) - target)  # noqa: E731
    options: Any = {"seed": 1, "progress": False}
    return trained_control(trained().model, Noise(0.0), digits()[:2], away, **options)


def controls(predict: Any) -> dict[str, Any]:
    return {
        "undefended": undefended(predict, held_out()),
        "baseline": adversarially_trained(),
        "control_ball": CONTROL,
    }


def honest_undefended(folder: Path, **options: Any) -> Verdict:
    """A posterior predictive with known thetas, undefended."""
    plain = trained()
    predict = plain.predictive(5)
    return honest(predict, folder, support={**controls(predict), "fresh": plain.fresh()}, **options)


def honest_defended(folder: Path, **options: Any) -> Verdict:
    """The same, trained through a PGD channel; its controls are trained by the audit."""
    defended = trained(defended=True)
    channel = AttackChannel(pgd(L2(0.5, box=(0, 1)), 3), 0.05)
    support = {"fresh": defended.fresh(), "channel": channel, "training": digits()[:2]}
    return honest(defended.predictive(5), folder, support=support, **options)


def honest_stochastic(folder: Path, **options: Any) -> Verdict:
    """Fresh thetas at every call, scored ten times."""
    plain = trained()
    controlled = controls(plain.predictive(5))
    return honest(plain.fresh(5), folder, support={**controlled, "fresh": plain.fresh()}, **options)


def honest_single_net(folder: Path, **options: Any) -> Verdict:
    """One net, no thetas, in the maximum norm."""
    support = {**controls(point()), "control_ball": Linf(0.5, box=(0, 1))}
    return honest(point(), folder, ball=Linf(0.1, box=(0, 1)), support=support, **options)


def blobs(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two classes that one feature tells apart safely and three others better, but by little."""
    y = torch.arange(num) % 2
    means, spread = torch.tensor([1.0, 0.12, 0.12, 0.12]), torch.tensor([0.8, 0.1, 0.1, 0.1])
    return (2.0 * y.unsqueeze(1) - 1) * means + spread * torch.randn(
        num, 4, generator=generator(seed)
    ), y


def linear(direction: Tensor, detached: bool = False) -> Any:
    return lambda x: Classes(
        logits=(x.detach() if detached else x) @ torch.stack([-direction, direction], 1)
    )


def discriminant(seed: int) -> Tensor:
    """Fisher's, from a training set: it leans on the fragile features."""
    x, y = blobs(400, seed)
    apart = x[y == 1].mean(0) - x[y == 0].mean(0)
    return torch.linalg.solve(
        torch.cov(torch.cat([x[y == 0] - x[y == 0].mean(0), x[y == 1] - x[y == 1].mean(0)]).T),
        apart,
    )


def honest_black_box(folder: Path) -> Verdict:
    """Answers without any gradient."""
    support = {
        "undefended": linear(discriminant(1)),
        "baseline": linear(torch.tensor([3.0, 0, 0, 0])),
        "control_ball": L2(0.6),
    }
    data, ball = blobs(40, 5), L2(0.1)
    options: dict[str, Any] = {
        "data": data,
        "ball": ball,
        "recorded": Square(ball, 50),
        "support": support,
        "attacks": None,
    }
    return honest(linear(discriminant(0), detached=True), folder, **options)


def regression_training() -> tuple[Tensor, Tensor]:
    return tuple(part[:400] for part in regression_data())  # type: ignore[return-value]


def curve(x: Tensor) -> Tensor:
    return x[:, 0].sin() + 0.5 * x[:, 1] * x[:, 2]


def regression_data() -> tuple[Tensor, Tensor]:
    x = torch.randn(500, 4, generator=generator(0))
    return x, curve(x) + 0.2 * torch.randn(500, generator=generator(1))


@lru_cache(maxsize=1)
def regression() -> tuple[PosteriorPredictive, FreshPredictive, Tensor, Tensor]:
    """A curve through 400 noisy points in four dimensions."""
    x, y = regression_data()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    model = BayesianModel(net, Gaussian(0.3))
    posterior = MeanField(model)
    fit(
        model,
        posterior,
        Noise(0.0),
        (x[:400], y[:400]),
        epochs=40,
        lr=1e-2,
        batch_size=50,
        progress=False,
    )
    predict = PosteriorPredictive(model, posterior.sample(20, generator=generator(2)))
    return predict, FreshPredictive(model, posterior, 20, generator(3)), x[400:], y[400:]


def honest_regression(folder: Path) -> Verdict:
    """A regression predictive, with controls trained by the audit."""
    predict, fresh, x, y = regression()
    ball = L2(0.3)
    support = {"fresh": fresh, "siblings": {"fresh": fresh}, "training": regression_training()}
    return honest(
        predict,
        folder,
        data=(x, y),
        ball=ball,
        recorded=APGD(ball, nll, 10),
        support=support,
        attacks=None,
    )


HONEST: dict[str, Callable[..., Verdict]] = {
    "undefended posterior predictive": honest_undefended,
    "adversarially trained predictive": honest_defended,
    "stochastic predictor": honest_stochastic,
    "single net, maximum norm": honest_single_net,
    "black box": honest_black_box,
    "regression": honest_regression,
}


# --- certificates -------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def smoothed() -> tuple[Smoothed, Certificates]:
    """A smoothed net whose predictor has 32 draws, and honest certificates of the vote of
    infinitely many."""
    predictor = Smoothed(point(), 0.25, num=32)
    return predictor, certify(predictor, digits()[2][:40], n=1000, generator=generator(7))


def certificate(factor: float = 1.0, folder: Path | None = None, **options: Any) -> Verdict:
    """The audit of certificates whose radii were multiplied."""
    predictor, held = smoothed()
    claimed = replace(held, radii=factor * held.radii)
    data = tuple(part[:40] for part in digits()[2:])
    chosen = {
        "ball": L2(0.25),
        "tier": replace(SMALL, num=40, steps=5, certified_again=40),
    } | options
    return audit(predictor, data, certified=claimed, threat_model=RAW, progress=False, **chosen)


def forget() -> None:
    """Everything is trained anew at the next asking, for it is to have other seeds."""
    for made in (images, trained, adversarially_trained, regression, smoothed):
        made.cache_clear()

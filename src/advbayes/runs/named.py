"""What the names of the command line stand for: balls, attacks, channels, posteriors; and how long
to train where nothing is said."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from advbayes import attacks, checks
from advbayes.attacks.balls import L2, Ball, Linf
from advbayes.channels import AttackChannel, Mixture, Noise
from advbayes.model import BayesianModel
from advbayes.posteriors import Ensemble, LowRank, MeanField, PointMass, Posterior
from advbayes.purification.attacks import Annealed, NearestCentre
from advbayes.runs.config import ATTACKS
from advbayes.types import Attack, Channel

_CLASSES_ONLY = ("minimum_norm", "hard_label")
NAMED_CHANNELS = ("none", "noise", "at", "os", "os50", "mix", "pgd", "trades", "alp", "consistency")
MIN_STEPS, MIN_EPOCHS, MAX_EPOCHS = 2000, 10.0, 500.0
LR, LAST_LR = 0.01, 0.01  # the second of the first, at the end of the training
TABLE_STEPS, TABLE_LR, TABLE_WARMUP = 4000, 0.02, 0.1


def make_ball(
    norm: str,
    eps: float,
    box: tuple[float, float] | None = None,
    mask: Tensor | None = None,
    scale: Tensor | float | None = None,
    indicators: tuple[tuple[int, int, float], ...] | None = None,
) -> Ball:
    """The ball of a named norm.

    >>> make_ball("linf", 0.1, (0, 1))
    Linf(0.1, box=(0, 1))
    """
    return (L2 if norm == "l2" else Linf)(eps, box, scale, mask, indicators)


def make_attack(
    name: str,
    ball: Ball,
    *,
    task: str = "classification",
    steps: int = 50,
    restarts: int = 1,
    queries: int = 500,
) -> Attack:
    """A named attack; on a regression the squared error takes the place of the likelihood.

    >>> from advbayes import L2
    >>> make_attack("pgd_plus", L2(1.0), steps=10)
    PGD(ball=L2(1), stages=((nll, 5), (entropy, 5)), step_size=None, restarts=1, stop_at_success=False)
    """  # noqa: E501
    checks.choice("attack", name, tuple(ATTACKS))
    checks.count("steps", steps)
    regression = task == "regression"
    if regression and name in _CLASSES_ONLY:
        wanted = "attack must be one for regression"
        raise checks.InputError(f"{wanted}, got {name!r}, which wants classes")
    main = attacks.squared_error if regression else attacks.nll
    half = max(1, steps // 2)
    match name:
        case "pgd1":
            return attacks.one_step(ball, main)
        case "pgd":
            return attacks.pgd(ball, steps, main, restarts=restarts)
        case "pgd_plus":
            return attacks.PGD(ball, ((main, half), (attacks.entropy, half)), restarts=restarts)
        case "ent":
            return attacks.entropy_pgd(ball, steps, restarts=restarts)
        case "apgd":
            return attacks.APGD(ball, main if regression else attacks.margin, steps, restarts)
        case "minimum_norm":
            return attacks.MinimumNorm(ball, steps=steps, restarts=restarts)
        case "hard_label":
            return attacks.HardLabel(ball)
        case "square":
            return attacks.Square(ball, queries, main if regression else attacks.margin)
        case "random":
            return attacks.RandomSearch(ball, queries, main)
        case _:
            error = attacks.nll if name == "strong_nll" else attacks.squared_error
            return attacks.strong_suite(
                ball, steps=steps, restarts=restarts, queries=queries, error=error
            )


def adaptive_attack(ball: Ball, *, task: str = "classification", steps: int = 50) -> Attack:
    """The worst of the attacks that know what a purifier is made of."""
    annealed = Annealed(ball, steps=max(1, steps // 2))
    return attacks.Suite(
        (annealed, NearestCentre(ball)) if task == "classification" else (annealed,)
    )


def named_channel(
    name: str, ball: Ball, sigma: float, *, regression: bool = False, steps: int = 7
) -> Channel:
    """The channel of a named defense, in the units of the ball.

    >>> named_channel("noise", L2(1.0), 0.1)
    Noise(sigma=0.1)
    """
    checks.choice("channel", name, NAMED_CHANNELS)
    main = attacks.squared_error if regression else attacks.nll
    clean = Noise(0.0)
    match name:
        case "none":
            return clean
        case "noise" | "consistency":
            return Noise(sigma)
        case "at":
            return Mixture([0.5, 0.5], [clean, AttackChannel(attacks.one_step(ball, main))])
        case "os":
            return AttackChannel(attacks.one_step(ball, main), sigma)
        case "os50":
            return Mixture([0.5, 0.5], [clean, AttackChannel(attacks.one_step(ball, main), sigma)])
        case "mix":
            losses = (main,) if regression else (attacks.nll, attacks.margin, attacks.entropy)
            attacked = [AttackChannel(attacks.one_step(ball, loss), sigma) for loss in losses]
            return Mixture([0.4] + [0.6 / len(losses)] * len(losses), [Noise(sigma), *attacked])
        case "pgd":
            return AttackChannel(attacks.pgd(ball, steps, main), sigma)
    # the penalties of trades and alp compare with what the attack gives
    return AttackChannel(attacks.pgd(ball, steps, main))


def named_posterior(
    name: str,
    model: BayesianModel,
    *,
    seed: int = 0,
    members: int = 5,
    rank: int = 5,
    init_scale: float = 0.02,
) -> Posterior:
    """An untrained posterior of a named family.

    >>> from advbayes import Categorical
    >>> from torch import nn
    >>> model = BayesianModel(nn.Linear(2, 2), Categorical())
    >>> named_posterior("ensemble", model, members=3).thetas.shape
    torch.Size([3, 6])
    """
    match checks.choice("posterior", name, ("mean_field", "point", "ensemble", "low_rank")):
        case "mean_field":
            return MeanField(model, init_scale)
        case "point":
            return PointMass(model)
        case "ensemble":
            return Ensemble(model, members, seed=seed)
        case _:
            return LowRank(model, rank, init_scale, seed=seed)


class Schedule(NamedTuple):
    """How long `fit` trains, and how fast."""

    epochs: float
    lr: float
    decay: float
    warmup: float


def schedule(
    epochs: float | None,
    lr: float | None,
    decay: float | None,
    x: Tensor,  # (N, *event), what is trained on
    batch_size: int,
) -> Schedule:
    """What is left open of passes over the data, learning rate and its factor for each pass.

    A table with `epochs` left open: enough passes for 4,000 steps, but at least 10; a tenth of them
    warms up (see `fit`), at a rate of 0.02. Images, or `epochs` given: 2,000 steps, but 10 to 500
    passes; no warm-up, a rate of 0.01. The rate falls to a hundredth over these passes, or over
    `epochs` if that is more. In fewer it falls no faster, so that a short training is not one at a
    rate of nothing.

    >>> import torch
    >>> rows = torch.zeros(1280, 3)
    >>> schedule(None, None, None, rows, 128)
    Schedule(epochs=400.0, lr=0.02, decay=0.9885530946569389, warmup=0.1)
    >>> schedule(5, None, None, rows, 128)
    Schedule(epochs=5.0, lr=0.01, decay=0.9772372209558107, warmup=0.0)
    """
    passes_of_a_step = min(batch_size, len(x)) / len(x)
    if epochs is None and x.ndim == 2:
        usual = max(TABLE_STEPS * passes_of_a_step, MIN_EPOCHS)
        first_lr, warmup = TABLE_LR, TABLE_WARMUP
    else:
        usual = min(max(MIN_STEPS * passes_of_a_step, MIN_EPOCHS), MAX_EPOCHS)
        first_lr, warmup = LR, 0.0
    epochs = usual if epochs is None else checks.number("epochs", epochs, low=0, open_low=True)
    falls = LAST_LR ** (1 / max(epochs, usual)) if decay is None else decay
    return Schedule(epochs, first_lr if lr is None else lr, falls, warmup)

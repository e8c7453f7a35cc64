"""Who attacks, how far: the flags that attack, evaluate and audit share, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from advbayes.checks import nearest
from advbayes.cli.screen import usable
from advbayes.runs.config import ATTACKS, ConfigError, parse_feature_eps

if TYPE_CHECKING:
    from advbayes.attacks.balls import Ball
    from advbayes.runs import Prepared, Trained
    from advbayes.runs import Run as Folder
    from advbayes.types import Attack, Predictor

NORMS = ("l2", "linf")
_DEFAULTS = ("pgd1", "pgd", "pgd_plus", "ent", "strong")
DEFAULTS = {"classification": _DEFAULTS, "regression": (*_DEFAULTS, "strong_nll")}


def _complete(incomplete: str) -> list[tuple[str, str]]:
    return [(name, what) for name, what in ATTACKS.items() if name.startswith(incomplete)]


Eps = Annotated[
    float | None,
    typer.Option(
        "--eps", min=0, help="Budget in the model's units (else the run's training budget)"
    ),
]
Norm = Annotated[
    str | None, typer.Option("--norm", metavar="l2|linf", help="Norm (else the run's)")
]
Fixed = Annotated[
    list[str] | None,
    typer.Option(
        "--fixed", metavar="NAME", help="A feature that the attacker cannot change; repeat it"
    ),
]
FeatureEps = Annotated[
    list[str] | None,
    typer.Option(
        "--feature-eps",
        metavar="NAME=NUMBER",
        help="Budget of a feature in its own unit; repeat it",
    ),
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Steps of iterative attacks")]
Restarts = Annotated[int, typer.Option("--restarts", min=1, help="Restarts of iterative attacks")]
Queries = Annotated[
    int, typer.Option("--queries", min=1, help="Queries of attacks without gradients")
]
NUM = ("--num", "--num-test")  # the second for old scripts
Num = Annotated[int, typer.Option(*NUM, min=1, help="How many test examples, from the first")]
One = Annotated[
    str,
    typer.Option(
        "--attack", metavar="NAME", help=f"One of {', '.join(ATTACKS)}", autocompletion=_complete
    ),
]
Many = Annotated[
    list[str] | None,
    typer.Option(
        "--attack",
        metavar="NAME",
        help=f"Any of {', '.join(ATTACKS)}; repeat it for several",
        autocompletion=_complete,
    ),
]


def check_names(names: Sequence[str]) -> None:
    """Refuse an unknown attack, with the nearest name.

    >>> check_names(["pgd", "pdg"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    advbayes.runs.config.ConfigError: attack: must be one of ..., got 'pdg'; did you mean 'pgd'?
    """
    for name in names:
        if name not in ATTACKS:
            known, hint = ", ".join(ATTACKS), nearest(name, ATTACKS)
            raise ConfigError(f"attack: must be one of {known}, got {name!r}{hint}")


@dataclass(frozen=True, eq=False)
class Subject:
    """A finished run and its data, as the commands that judge it want them."""

    folder: Folder
    trained: Trained
    data: Prepared


def open_run(path: str, *, trusted: bool, device: str = "cpu") -> Subject:
    """A run with its model and data on a device, and its number of threads in use."""
    import torch

    from advbayes.runs import Run, load_trained, prepare

    folder = Run.open(path)
    config = folder.config
    torch.set_num_threads(config.threads)
    trained = load_trained(path, trusted=trusted).to(usable(device))
    return Subject(folder, trained, prepare(config).to(device))


def ball_for(
    trained: Trained,
    norm: str | None,
    eps: float | None,
    fixed: Sequence[str] | None = None,
    feature_eps: Sequence[str] | None = None,
) -> Ball:
    """The ball that is asked for, or the one trained against, within the data's box."""
    eps = trained.eps if eps is None else eps
    return trained.ball(norm, eps, fixed or (), budgets(feature_eps, eps))


def budgets(entries: Sequence[str] | None, eps: float) -> dict[str, float]:
    """`--feature-eps` by name; multiples of eps in the ball, which must not be 0 then.

    >>> budgets(["age=5"], 0.3)
    {'age': 5.0}
    """
    if entries and eps == 0:
        raise ConfigError("eps: must be > 0 where feature_eps is given, got 0")
    try:
        return parse_feature_eps(tuple(entries or ()))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def attacks_for(names: Sequence[str], ball: Ball, task: str, **spent: int) -> dict[str, Attack]:
    """The named attacks, each with its steps, restarts and queries."""
    from advbayes.runs import make_attack

    return {name: make_attack(name, ball, task=task, **spent) for name in names}


def purifier_for(subject: Subject, num_thetas: int, update: str) -> Predictor:
    """The purified predictive of a run, exact over its training set."""
    from advbayes.purification import Purifier

    trained, data = subject.trained, subject.data
    channel: Any = trained.channel
    if channel is None or not _has_density(channel):
        wanted = "purify: must go with a run whose channel is noisy (os, mix, noise)"
        got = f"defense {trained.defense!r}, whose channel has no density"
        raise ConfigError(f"{wanted}, got {got}")
    reference = data.x_train, data.y_train
    return Purifier(trained.model, channel, trained.thetas(num_thetas), reference, update)


def purifier_attacks(ball: Ball, task: str, *, steps: int) -> dict[str, Attack]:
    """The attack made for purifiers, by its name."""
    from advbayes.runs.attacking import adaptive_attack

    return {"adaptive": adaptive_attack(ball, task=task, steps=steps)}


def _has_density(channel: Any) -> bool:
    """A Gaussian somewhere in every component; a channel of one's own is believed to have one."""
    from advbayes import AttackChannel, Mixture, Noise

    match channel:
        case Mixture():
            return all(map(_has_density, channel.channels))
        case AttackChannel() | Noise():
            return float(channel.sigma) > 0
    return True

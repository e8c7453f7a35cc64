"""Who is attacked and how far: a run opened, and what the shared flags mean for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from advbayes.checks import InputError
from advbayes.cli import flags
from advbayes.cli.screen import usable, warn
from advbayes.runs.config import SPENDING, ConfigError, names_code

if TYPE_CHECKING:
    from advbayes.attacks.balls import Ball
    from advbayes.runs import Prepared, Trained
    from advbayes.runs import Run as Folder
    from advbayes.types import Attack, Predictor


def open_run(path: str, *, trusted: bool, device: str = "cpu") -> tuple[Folder, Trained, Prepared]:
    """A finished run, its model and its data on a device, and its number of threads in use."""
    import torch

    from advbayes.runs import Run, load_trained, prepare

    folder = Run.open(path)
    torch.set_num_threads(folder.config.threads)
    trained = load_trained(path, trusted=trusted).to(usable(device))
    return folder, trained, prepare(folder.config, encoding=trained.encoding).to(device)


def remark_thetas(trained: Trained, num: int) -> None:
    """A line where a number of thetas is asked of a posterior that has a fixed one."""
    from advbayes.posteriors import Ensemble, PointMass, Samples

    match trained.posterior:
        case Ensemble() | PointMass() | Samples() if num != flags.THETAS:
            of, has = type(trained.posterior).__name__, len(trained.thetas(num))
            warn(f"thetas: {num} has no effect on this model, whose posterior ({of}) has {has}")


def remark_spent(names: Sequence[str], spent: Mapping[str, int]) -> None:
    """A line for each budget, other than the usual one, that none of these attacks spends.

    >>> remark_spent(["pgd", "square"], {"steps": 7, "queries": 9})
    """
    for option, value in spent.items():
        takers = [name for name, takes in SPENDING.items() if option in takes]
        if value != flags.SPENT[option] and not set(names) & set(takers):
            idle = f"{option}: {value} has no effect on {', '.join(names)}"
            warn(f"{idle}; it is for {', '.join(takers)}")


def attack_for(
    name: str, ball: Ball, trained: Trained, spent: Mapping[str, int], *, trusted: bool
) -> Attack:
    """A named attack on a run, or one of the user's own if `trusted`."""
    from advbayes.runs import make_attack
    from advbayes.runs.building import own_attack

    if names_code(name):
        return own_attack(name, ball, trusted=trusted)
    return make_attack(name, ball, task=trained.task, **spent)


def purifier_for(trained: Trained, data: Prepared, num_thetas: int, update: str) -> Predictor:
    """The purified predictive of a run whose channel has a density."""
    try:
        return trained.purified(data, num_thetas, update)
    except InputError as error:
        wanted = "purify: must go with a run whose channel is noisy (os, mix, noise)"
        raise ConfigError(f"{wanted}, got defense {trained.defense!r}: {error}") from None

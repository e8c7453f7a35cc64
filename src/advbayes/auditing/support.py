"""What an audit may lean on besides the predictor: controls, a baseline, siblings, files. All of it
is checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from advbayes.attacks.balls import Ball
from advbayes.checks import InputError, InputTypeError, count, number
from advbayes.evaluation.result import Evaluation
from advbayes.evaluation.run import load_evaluation
from advbayes.types import Attack, Channel, Predictor

# adversarial training, clean and worst case over many attacks
PUBLISHED = {("MNIST", "L2", 2.0): (0.992, 0.692)}


@dataclass(frozen=True)
class Baseline:
    """A recorded result of a published adversarial-training recipe, trained and attacked here.

    >>> Baseline("MNIST", "L2", 2.0, 0.99, 0.68, 1000, "a net", "PGD, 20 steps", "0a1b2c3").worst
    0.68
    """

    dataset: str
    norm: str
    eps: float
    clean: float
    worst: float
    num_examples: int
    architecture: str
    recipe: str
    commit: str

    def __post_init__(self) -> None:
        number("clean", self.clean, low=0, high=1)
        number("worst", self.worst, low=0, high=1)
        count("num_examples", self.num_examples)
        for name, value in vars(self).items():
            if value == "":
                raise InputError(f"{name} must be said in a recorded baseline, got nothing")

    @staticmethod
    def load(path: str | Path) -> Baseline:
        """Read a record from JSON; what it lacks is named."""
        document = json.loads(Path(path).read_text())
        names = [each.name for each in fields(Baseline)]
        said = document if isinstance(document, dict) else {}
        if absent := [name for name in names if name not in said]:
            everything = "everything" if len(absent) == len(names) else ", ".join(absent)
            raise InputError(f"a baseline record must say {everything}, got {path}")
        return Baseline(**{name: document[name] for name in names})

    def is_of(self, dataset: str, ball: Ball) -> bool:
        """Whether it was measured on these data and in this ball."""
        here = (dataset.upper(), type(ball).__name__, float(ball.eps))
        return (self.dataset.upper(), self.norm, float(self.eps)) == here


def published_for(dataset: str, ball: Ball) -> tuple[float, float] | None:
    """Clean and worst-case accuracy of the published recipe, where there is one."""
    return PUBLISHED.get((dataset.upper(), type(ball).__name__, float(ball.eps)))


def recorded_for(dataset: str, ball: Ball) -> Baseline | None:
    """The record that the package carries for this threat model, if any."""
    for place in resources.files("advbayes.auditing").joinpath("baselines").iterdir():
        if place.name.endswith(".json"):
            with resources.as_file(place) as path:
                record = Baseline.load(path)
            if record.is_of(dataset, ball):
                return record
    return None


@dataclass(frozen=True, eq=False)
class Support:
    """What helps an audit. A check for which something is missing is "not run".

    `training` = (x, y) lets the audit train the controls that are missing (see `with_controls`).
    `factory` makes the predictor anew, for E29, where it cannot be copied.

    >>> Support(dataset="MNIST").undefended is None
    True
    """

    # E13, E20, E21: a deterministic net of the same architecture without a defense
    undefended: Predictor | None = None
    # E20: where `ball` is too small to break it; absent, it is looked for
    control_ball: Ball | None = None
    # E21: adversarial training, or the record of a published recipe
    baseline: Predictor | Baseline | None = None
    siblings: Mapping[str, Predictor] = field(default_factory=dict)  # E13
    fresh: Any = None  # E10, E14, E15: a FreshPredictive, or a predictor with `with_thetas(num)`
    evaluation: Evaluation | str | Path | None = None  # E27, made with `evaluate(..., out=folder)`
    channel: Channel | None = None  # E30: the training's; Noise(0) for none
    unpurified: Predictor | None = None  # E13, E23
    purifier_attacks: Mapping[str, Attack] = field(default_factory=dict)  # E23
    black_box: Attack | None = None  # E11; absent, Square with 5,000 queries
    factory: Callable[[], Predictor] | None = None  # E29
    dataset: str = ""  # E21
    # E21: clean and worst-case accuracy of a published recipe
    published: tuple[float, float] | None = None
    training: tuple[Any, Any] | None = None
    train_y: Tensor | None = None  # E22
    detector: str | None = None  # E26
    num_seeds: int | None = None  # E25
    better: bool = False  # E22, E25: whether the row is said to beat others

    def __post_init__(self) -> None:
        object.__setattr__(self, "siblings", named("siblings", self.siblings))
        attacks = named("purifier_attacks", self.purifier_attacks)
        object.__setattr__(self, "purifier_attacks", attacks)
        if isinstance(self.evaluation, (str, Path)):
            object.__setattr__(self, "evaluation", load_evaluation(self.evaluation))
        if self.training is not None and self.train_y is None:
            object.__setattr__(self, "train_y", self.training[1])

    @property
    def saved(self) -> Evaluation | None:
        """The evaluation, read from its folder."""
        return cast(Evaluation | None, self.evaluation)

    @property
    def to_train(self) -> tuple[str, ...]:
        """The controls that are missing, where there are data to train them on."""
        controls = {"undefended": self.undefended, "baseline": self.baseline}
        absent = tuple(name for name, control in controls.items() if control is None)
        return () if self.training is None else absent


def named(argument: str, mapping: Mapping[str, Any] | None) -> dict[str, Any]:
    """A mapping from names; an error says what came instead."""
    if mapping is not None and not isinstance(mapping, Mapping):
        raise InputTypeError(
            f"{argument} must be a mapping from names, such as {{'PGD': ...}}", got=mapping
        )
    return dict(mapping or {})

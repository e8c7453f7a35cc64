"""What there is to play with: digits or wines, each with three models and a purifier."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks.balls import Ball
from advbayes.channels import Noise
from advbayes.datasets import DataMissingError, load_dataset
from advbayes.datasets.fetching import cache_folder
from advbayes.experiments.catalogue import BASE
from advbayes.experiments.demo import PURIFIED, PURIFIER_SIGMA, SETTINGS, trained_run
from advbayes.runs import Prepared, prepare
from advbayes.runs.config import RunConfig, make_config
from advbayes.store import write_bytes
from advbayes.types import Predictor

WORLDS = ("digits", "wine")
DEFENSES = (*SETTINGS, PURIFIED)
NUM_THETAS = 5
_EPOCHS = {"digits": 20, "wine": 40}
_SIGMA = {"digits": PURIFIER_SIGMA, "wine": 1.0}  # of the purifier


@dataclass(frozen=True, eq=False)
class World:
    """A data set as its models see it, and what answers about it."""

    name: str
    data: Prepared
    predictors: dict[str, Predictor]

    @property
    def is_image(self) -> bool:
        return self.data.scaling is None

    @property
    def task(self) -> str:
        return self.data.dataset.task

    def ball(self, eps: float) -> Ball:
        return self.data.ball("l2", eps, self.data.box)

    def raw(self, x: Tensor) -> Tensor:  # (B, F)
        """A table's rows in their own units."""
        return x if self.data.scaling is None else self.data.scaling.inverse(x)

    def seen(self, raw: Tensor) -> Tensor:
        """Raw rows as the models see them."""
        return raw if self.data.scaling is None else self.data.scaling.transform(raw)


def playground_folder() -> Path:
    """Where the models are kept: `playground/` of the data cache (`ADVBAYES_CACHE`).

    >>> from unittest import mock
    >>> with mock.patch.dict(os.environ, ADVBAYES_CACHE="/var/cache/mine"):
    ...     str(playground_folder())
    '/var/cache/mine/playground'
    """
    return cache_folder() / "playground"


def load_world(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    epochs: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> World:
    """A world by name; its models are trained if the folder does not hold them yet.

    `tell` is called with what is being done. A run that was stopped is resumed; runs of
    other settings lie in folders of their own.
    """
    checks.choice("name", name, WORLDS)
    place = playground_folder() if folder is None else Path(folder)
    torch.set_num_threads(1)  # as the runs; small nets gain nothing from more
    source = {"data": "digits"} if name == "digits" else _wine(place)
    common = {**BASE, **source}
    configs = {
        defense: make_config({**common, **settings, "epochs": epochs or _EPOCHS[name]})
        for defense, settings in SETTINGS.items()
    }
    data = prepare(configs["undefended"])
    trained = {}
    for defense, config in configs.items():
        tell(f"{name}: {defense}")
        trained[defense] = trained_run(config, place / f"{name}-{fingerprint(config)}")
    purifier = trained["undefended"].purified(data, NUM_THETAS, channel=Noise(_SIGMA[name]))
    predictors: dict[str, Predictor] = {
        defense: one.predict(1 if configs[defense].posterior == "point" else NUM_THETAS)
        for defense, one in trained.items()
    }
    return World(name, data, predictors | {PURIFIED: purifier})


def fingerprint(config: RunConfig) -> str:
    """A name for the settings, so that models of other settings are never taken for these."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return f"{config.defense}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _wine(place: Path) -> dict[str, Any]:
    """Red wines where the file is at hand, else scikit-learn's table of three cultivars."""
    try:
        load_dataset("wine", download=False)
        return {"data": "wine"}
    except DataMissingError:
        from sklearn.datasets import load_wine

        table = load_wine()
        file = place / "wine.csv"
        header = ",".join(name.replace("/", " of ") for name in table.feature_names)
        names = ("first", "second", "third")
        rows = [
            ",".join([*map(repr, row.tolist()), names[target]])
            for row, target in zip(table.data, table.target, strict=True)
        ]
        place.mkdir(parents=True, exist_ok=True)
        write_bytes(file, "\n".join([f"{header},cultivar", *rows, ""]).encode())
        return {"data": str(file), "target": "cultivar"}

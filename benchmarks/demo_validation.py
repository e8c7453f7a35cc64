"""How the demo's settings were chosen: accuracy on a fifth of the training data; the test set is
not looked at.

python benchmarks/demo_validation.py
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from advbayes import L2, AttackChannel, Noise, PosteriorPredictive, fit, one_step, pgd
from advbayes.datasets import split_rows
from advbayes.experiments.catalogue import BASE
from advbayes.purification import Purifier
from advbayes.purification.attacks import Annealed, NearestCentre
from advbayes.runs import Prepared, build_defense, build_model, prepare, record, thetas_of
from advbayes.runs.config import make_config
from advbayes.types import Predictor

EPS = (0.5, 0.75)
TRIED: list[dict[str, Any]] = [
    {"defense": "none", "epochs": 30, "lr": 0.01},
    {"defense": "none", "epochs": 60, "lr": 0.02},
    {"defense": "at", "posterior": "point", "eps": 0.7, "epochs": 60, "lr": 0.01},
    {"defense": "at", "posterior": "point", "eps": 1.0, "epochs": 80, "lr": 0.01},
    {"defense": "at", "posterior": "point", "eps": 1.0, "epochs": 80, "lr": 0.02},
    {"defense": "mix", "eps": 0.7, "epochs": 60, "lr": 0.01},
    {"defense": "mix", "eps": 1.0, "epochs": 80, "lr": 0.02},
    {"defense": "mix", "eps": 1.0, "epochs": 80, "lr": 0.02, "kl_weight": 0.1},
    {"defense": "mix", "eps": 1.0, "epochs": 80, "lr": 0.01, "kl_weight": 0.1, "init_scale": 0.01},
]
CHANNELS = [
    Noise(0.1),
    Noise(0.2),
    Noise(0.3),
    *(AttackChannel(one_step(L2(0.5)), sigma) for sigma in (0.1, 0.2, 0.3)),
]


def halves() -> Prepared:
    """The training data cut in four fifths to train on and one to choose on."""
    data = prepare(make_config({"data": "digits"}))
    train, held = split_rows(len(data.x_train), seed=1, labels=data.y_train)
    x, y = data.x_train, data.y_train
    return dataclasses.replace(
        data, x_train=x[train], y_train=y[train], x_test=x[held], y_test=y[held]
    )


def trained(settings: dict[str, Any], data: Prepared) -> PosteriorPredictive:
    config = make_config({**BASE, "data": "digits", **settings})
    model, posterior = build_model(config, data)
    channel, objective = build_defense(config, data)
    fit(
        model,
        posterior,
        channel,
        (data.x_train, data.y_train),
        objective=objective,
        epochs=config.epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        decay=config.decay,
        progress=False,
    )
    return PosteriorPredictive(model, thetas_of(posterior, 8, 0))


def main() -> None:
    torch.set_num_threads(1)
    data = halves()
    x, y = data.x_test, data.y_test

    def accuracy(predict: Predictor, inputs: torch.Tensor) -> float:
        return round(float((predict(inputs).probs.argmax(1) == y).double().mean()), 4)  # type: ignore[attr-defined]

    rows: list[dict[str, Any]] = []
    for settings in TRIED:
        predict = trained(settings, data)
        found = {
            f"pgd {eps}": accuracy(predict, pgd(L2(eps, box=(0, 1)), 20)(predict, x, y))
            for eps in EPS
        }
        rows.append({"settings": settings, "clean": accuracy(predict, x), **found})
        print(rows[-1], flush=True)
    base = trained(TRIED[1], data)
    for channel in CHANNELS:
        purified = Purifier(
            base.model, channel, base.thetas, (data.x_train, data.y_train), "online"
        )
        found = {}
        for eps in EPS:
            ball = L2(eps, box=(0, 1))
            attacks = {
                "pgd": pgd(ball, 20),
                "annealed": Annealed(ball, steps=10),
                "nearest": NearestCentre(ball),
            }
            found |= {
                f"{name} {eps}": accuracy(purified, attack(purified, x, y))
                for name, attack in attacks.items()
            }
        rows.append({"purifier": repr(channel), "clean": accuracy(purified, x), **found})
        print(rows[-1], flush=True)
    path = Path(__file__).with_name("results") / "demo_validation.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps({**record([Path(sys.executable).name, *sys.argv]), "rows": rows}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()

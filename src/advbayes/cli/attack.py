"""`advbayes attack`: adversarial examples as arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from advbayes.cli.screen import Json, Run, Thetas, Trust, emit, say
from advbayes.cli.signals import watched
from advbayes.cli.threat import (
    Eps,
    FeatureEps,
    Fixed,
    Norm,
    Num,
    One,
    Queries,
    Restarts,
    Steps,
    attacks_for,
    ball_for,
    check_names,
    check_norm,
)

HELP = """Attack test examples of a run and keep the arrays (x, x_adv, y; in the model's units).

Examples:

advbayes attack RUN --attack pgd_plus --eps 1 --out adversarial.safetensors

advbayes attack RUN --attack strong --eps 0.5 --num 50 --out adversarial.npz
"""
_ROWS = 256


def add_to(app: typer.Typer) -> None:
    app.command("attack", help=HELP)(attack)


def attack(
    run: Run,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="A new .safetensors or .npz file")
    ],
    attack: One = "pgd",
    eps: Eps = None,
    norm: Norm = None,
    feature_eps: FeatureEps = None,
    fixed: Fixed = None,
    steps: Steps = 50,
    restarts: Restarts = 1,
    queries: Queries = 500,
    num: Num = 100,
    thetas: Thetas = 20,
    seed: Annotated[int, typer.Option(min=0, help="Keys the attack's randomness")] = 0,
    trust_network: Trust = False,
    json: Json = False,
) -> None:
    from advbayes.cli.files import check_new

    check_names([attack])
    check_norm(norm)
    check_new("out", out, (".safetensors", ".npz"))

    import torch

    from advbayes.cli.describe import said_units, units_of
    from advbayes.evaluation import score
    from advbayes.evaluation.measuring import attacked_in_batches
    from advbayes.progress import Progress
    from advbayes.runs import Run as Folder
    from advbayes.runs import load_trained, prepare

    config = Folder.open(run).config
    torch.set_num_threads(config.threads)
    trained = load_trained(run, trusted=trust_network)
    data = prepare(config)
    x, y = data.x_test[:num], data.y_test[:num]
    ball = ball_for(trained, norm, eps, fixed, feature_eps)
    method = attacks_for(
        [attack], ball, trained.task, steps=steps, restarts=restarts, queries=queries
    )[attack]
    predict = trained.predict(thetas)
    parts = []
    with Progress("attack", len(x)) as bar:
        for part in attacked_in_batches(
            predict, method, x, y, seed=seed, key=f"attack/{attack}", batch_size=_ROWS
        ):
            parts.append(part)
            bar.advance(num=len(part))
    x_adv = torch.cat(parts)
    task = "classification" if trained.task == "classification" else "regression"
    name = "correct" if task == "classification" else "squared_error"
    before, after = (float(score(predict, each, y, task)[name].mean()) for each in (x, x_adv))  # type: ignore[arg-type]
    with watched():
        _write(Path(out), {"x": x, "x_adv": x_adv, "y": y})
    units = units_of(ball.eps, trained.scaling, trained.feature_names, ball.mask, ball.scale)
    label = "accuracy" if name == "correct" else "mean squared error (standardised)"
    if json:
        result = {
            "run": run,
            "out": out,
            "attack": attack,
            "norm": norm or trained.norm,
            "num": len(x),
            "threat_model": units,
        }
        emit({**result, "metric": label, "clean": before, "attacked": after})
    else:
        say(f"{attack} within {norm or trained.norm} {said_units(units)}")
        say(f"{len(x)} examples: {label} {before:.4g} before, {after:.4g} after; arrays in {out}")


def _write(path: Path, arrays: dict[str, object]) -> None:
    import io

    import numpy as np
    from safetensors.torch import save

    from advbayes.store import write_bytes

    if path.suffix.lower() == ".npz":
        buffer = io.BytesIO()
        np.savez(buffer, **{name: value.numpy() for name, value in arrays.items()})  # type: ignore[attr-defined]
        write_bytes(path, buffer.getvalue())
    else:
        write_bytes(path, save({name: value.contiguous() for name, value in arrays.items()}))  # type: ignore[attr-defined]

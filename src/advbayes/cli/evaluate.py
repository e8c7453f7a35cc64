"""`advbayes evaluate`: attack, predict, score; resumed where it stopped."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advbayes.cli.screen import Device, Json, Run, Thetas, Trust, emit, say, table, usable
from advbayes.cli.signals import watched
from advbayes.cli.threat import (
    DEFAULTS,
    FeatureEps,
    Fixed,
    Many,
    Norm,
    Num,
    Queries,
    Restarts,
    Steps,
    attacks_for,
    ball_for,
    check_names,
    check_norm,
    purifier_attacks,
    purifier_for,
)

if TYPE_CHECKING:
    from advbayes.types import Attack, Predictor

HELP = """Score a run under attack: one record for each example, tables with intervals, the worst
case over attacks.

Examples:

advbayes evaluate RUN --attack pgd --eps 2

advbayes evaluate RUN --attack pgd --attack strong --eps 0.5 --eps 1 --eps 2 --num 1000

advbayes evaluate RUN --purify online

The same command resumes where a killed one stopped.
"""


def add_to(app: typer.Typer) -> None:
    app.command("evaluate", help=HELP)(evaluate)


def evaluate(
    run: Run,
    attack: Many = None,
    eps: Annotated[
        list[float] | None,
        typer.Option("--eps", min=0, help="Budget in the model's units; repeat it for a curve"),
    ] = None,
    norm: Norm = None,
    feature_eps: FeatureEps = None,
    fixed: Fixed = None,
    steps: Steps = 50,
    restarts: Restarts = 1,
    queries: Queries = 500,
    num: Num = 500,
    thetas: Thetas = 20,
    purify: Annotated[
        str | None,
        typer.Option(metavar="online|offline", help="Evaluate the purified predictive, too"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Folder in RUN/evaluation (else made from the settings)")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Examples written (and resumed) at a time")
    ] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Keys the attacks' randomness")] = 0,
    device: Device = "cpu",
    trust_network: Trust = False,
    json: Json = False,
) -> None:
    from advbayes.runs.config import ConfigError

    names = list(dict.fromkeys(attack or DEFAULTS))
    check_names(names)
    check_norm(norm)
    if purify not in (None, "online", "offline"):
        raise ConfigError(f"purify: must be one of online, offline, got {purify!r}")
    if name is not None and (
        not name.replace("-", "").replace("_", "").replace(".", "").isalnum()
        or name.startswith(".")
    ):
        raise ConfigError(f"name: must be letters, digits, -, _ and ., got {name!r}")

    import torch

    from advbayes.cli.describe import said_units, units_of
    from advbayes.cli.scores import SHOWN, column_of, legend
    from advbayes.distributed import ranks
    from advbayes.evaluation import evaluate as measure
    from advbayes.report.folders import merged
    from advbayes.report.words import TRIVIAL
    from advbayes.runs import Run as Folder
    from advbayes.runs import load_trained, prepare
    from advbayes.store import write_document

    command = ["evaluate", run, *(part for name in names for part in ("--attack", name))]
    folder = Folder.open(run)
    config = folder.config
    torch.set_num_threads(config.threads)
    trained = load_trained(run, trusted=trust_network).to(usable(device))
    data = prepare(config).to(device)
    radii = sorted(set(eps)) if eps else [trained.eps]
    ball = ball_for(trained, norm, max(radii), fixed, feature_eps)
    options = {
        "norm": norm or trained.norm,
        "steps": steps,
        "restarts": restarts,
        "queries": queries,
        "num": num,
        "thetas": thetas,
    }
    options |= {"batch-size": batch_size, "seed": seed} | (
        {} if purify is None else {"purify": purify}
    )
    options |= {} if name is None else {"name": name}
    many = {"eps": radii, "feature-eps": feature_eps or (), "fixed": fixed or ()}
    command += [
        part
        for flag, values in many.items()
        for value in values
        for part in (f"--{flag}", str(value))
    ]
    command += [part for flag, value in options.items() for part in (f"--{flag}", str(value))]
    settings = f"{'-'.join(names)}-{norm or trained.norm}-{'-'.join(f'{r:g}' for r in radii)}"
    if feature_eps or fixed:
        settings += f"-{hashlib.sha256(repr((feature_eps, fixed)).encode()).hexdigest()[:8]}"
    settings += f"-s{steps}-r{restarts}-q{queries}-n{num}-t{thetas}-seed{seed}"
    place = folder.path / "evaluation" / (name or settings)
    attacks = attacks_for(
        names, ball, trained.task, steps=steps, restarts=restarts, queries=queries
    )
    jobs: list[tuple[Path, dict[str, Predictor], dict[str, Attack]]] = [
        (place, {trained.defense: trained.predict(thetas)}, attacks)
    ]
    if (
        purify is not None
    ):  # a purifier also meets the attacks made for purifiers: plain ones flatter it
        purified: dict[str, Predictor] = {
            f"{trained.defense} purified {purify}": purifier_for(trained, data, thetas, purify)
        }
        adaptive = purifier_attacks(ball, trained.task, steps=steps)
        jobs.append(
            (place.with_name(f"{place.name}-purified-{purify}"), purified, attacks | adaptive)
        )
    with watched():
        measured = [
            measure(
                predictors,
                (data.x_test[:num], data.y_test[:num]),
                attacks=method,
                radii=radii,
                train_y=data.y_train,
                batch_size=batch_size,
                seed=seed,
                out=where,
            )
            for where, predictors, method in jobs
        ]
        for where, _, _ in jobs if ranks().is_first else ():
            write_document(where / "command.json", ["advbayes", *command])
    evaluation = merged(measured)
    units = [
        units_of(radius, trained.scaling, trained.feature_names, ball.mask, ball.scale)
        for radius in radii
    ]
    result = evaluation.table()
    if json:
        emit(
            {
                "run": run,
                "evaluation": str(place),
                "threat_model": units,
                "norm": norm or trained.norm,
                **result.json(),
            }
        )
        return
    for each in units:
        say(f"{norm or trained.norm} {said_units(each)}")
    level = float(evaluation.config["interval_level"])
    metrics = SHOWN[trained.task]
    columns = {
        name: column_of(name, trained.scaling, trained.target_names, level) for name in metrics
    }
    title = (
        f"{trained.defense} on {config.data}, {min(num, len(data.x_test))} test examples, with 95 "
        f"% intervals"
    )
    table(evaluation.table(metrics).grid(columns, title))
    told = [f"{name} {TRIVIAL[name]}" for name in evaluation.trivial]
    say(f"{legend(SHOWN[trained.task])}.")
    say(f"Never look at the input: {'; '.join(told)}.\nRecords and arrays: {place}")

"""`advbayes evaluate`: attack, predict, score; resumed where it stopped."""

from __future__ import annotations

import hashlib
import re
import warnings
from typing import TYPE_CHECKING, Annotated

import typer

from advbayes.checks import counted
from advbayes.cli import flags, threat
from advbayes.cli.screen import emit, resumable, say, table
from advbayes.runs.config import ConfigError, names_code

if TYPE_CHECKING:
    from advbayes.types import Predictor

_ATTACKS = ("pgd1", "pgd", "pgd_plus", "ent", "strong")
DEFAULTS = {"classification": _ATTACKS, "regression": (*_ATTACKS, "strong_nll")}


def evaluate(
    run: flags.Run,
    attack: flags.Many = None,
    eps: Annotated[
        list[float] | None,
        typer.Option("--eps", min=0, help="Budget in the model's units; repeat it for a curve"),
    ] = None,
    norm: flags.Norm = None,
    feature_eps: flags.FeatureEps = None,
    fixed: flags.Fixed = None,
    steps: flags.Steps = flags.SPENT["steps"],
    restarts: flags.Restarts = flags.SPENT["restarts"],
    queries: flags.Queries = flags.SPENT["queries"],
    num: flags.Num = 500,
    thetas: flags.Thetas = flags.THETAS,
    purify: Annotated[
        str | None, flags.words("online", "offline", help="Evaluate the purified predictive, too")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Folder in RUN/evaluation (else made from the settings)")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Examples written (and resumed) at a time")
    ] = 128,
    seed: flags.Seed = 0,
    device: flags.Device = "cpu",
    trust_network: flags.Trust = False,
    quiet: flags.Quiet = False,
    json: flags.Json = False,
) -> None:
    """Score a run under attack: one record for each example, tables with intervals, the worst
    case over attacks.

    Examples:

    advbayes evaluate RUN --attack pgd --eps 2

    advbayes evaluate RUN --attack pgd --attack strong --eps 0.5 --eps 1 --eps 2 --num 1000

    advbayes evaluate RUN --purify online

    The same command resumes where a killed one stopped.
    """
    if name is not None and not re.fullmatch(r"[\w-][\w.-]*", name):
        raise ConfigError(f"name: must be letters, digits, -, _ and ., got {name!r}")

    from advbayes.cli.describe import SHOWN, column_of, legend, price, said_units, uneven, units_of
    from advbayes.distributed import ranks
    from advbayes.evaluation import evaluate as measure
    from advbayes.report.folders import merged
    from advbayes.report.words import TRIVIAL
    from advbayes.runs.named import adaptive_attack
    from advbayes.store import write_document

    folder, trained, data = threat.open_run(run, trusted=trust_network, device=device)
    names = list(dict.fromkeys(attack or DEFAULTS[data.dataset.task]))
    radii = sorted(set(eps)) if eps else [trained.eps]
    norm = norm or trained.norm
    ball = trained.ball(norm, max(radii), fixed or (), feature_eps or ())
    spent = {"steps": steps, "restarts": restarts, "queries": queries}
    used = spent if purify is None else {"queries": queries, "restarts": restarts}
    threat.remark_spent(names, used)
    threat.remark_thetas(trained, thetas)
    options = {
        "attack": names,
        "eps": radii,
        "feature-eps": feature_eps or (),
        "fixed": fixed or (),
        "norm": [norm],
        **{key: [value] for key, value in spent.items()},
        "num": [num],
        "thetas": [thetas],
        "batch-size": [batch_size],
        "seed": [seed],
        "purify": [purify] if purify else (),
        "name": [name] if name else (),
    }
    words = [(f"--{flag}", str(value)) for flag, values in options.items() for value in values]
    command = ["advbayes", "evaluate", run, *(word for pair in words for word in pair)]
    if trust_network:
        command.append("--trust-network")
    named = (re.sub(r"[^\w.-]", "_", each) for each in names)
    settings = f"{'-'.join(named)}-{norm}-{'-'.join(f'{r:g}' for r in radii)}"
    if feature_eps or fixed:
        settings += f"-{hashlib.sha256(repr((feature_eps, fixed)).encode()).hexdigest()[:8]}"
    settings += f"-s{steps}-r{restarts}-q{queries}-n{num}-t{thetas}-seed{seed}"
    place = folder.path / "evaluation" / (name or settings)
    attacks = {
        each: threat.attack_for(each, ball, trained, spent, trusted=trust_network) for each in names
    }
    predict: Predictor = trained.predict(thetas)
    jobs = [(place, {trained.defense: predict}, attacks)]
    if purify is not None:
        # it also meets the attacks made for purifiers: plain ones flatter it
        purified = threat.purifier_for(trained, data, thetas, purify)
        adaptive = {"adaptive": adaptive_attack(ball, task=trained.task, steps=steps)}
        beside = place.with_name(f"{place.name}-purified-{purify}")
        name_of = f"{trained.defense} purified {purify}"
        jobs.append((beside, {name_of: purified}, attacks | adaptive))
    with resumable("; the same command goes on from the first batch that is missing"):
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
                progress=False if quiet else None,
            )
            for where, predictors, method in jobs
        ]
        for where, _, _ in jobs if ranks().is_first else ():
            write_document(where / "command.json", command)
    evaluation = merged(measured)
    for own in filter(names_code, names):
        cells = [(cell.eps, rows) for cell, rows in evaluation.cells.items() if cell.attack == own]
        far = max(float(rows["norm"].max()) / (radius or 1.0) for radius, rows in cells)
        if far > 1 + 1e-3:
            warnings.warn(
                f"attack {own!r} goes up to {far:.4g} times as far as its eps: it leaves its ball, "
                f"and its rows are no answer to --eps",
                stacklevel=1,
            )
    known = trained.scaling, trained.feature_names, ball.mask, ball.scale
    units = [units_of(radius, *known) for radius in radii]
    if json:
        told = {"run": run, "evaluation": str(place), "threat_model": units, "norm": norm}
        emit({**told, **evaluation.table().json()})
        return
    for each in units:
        say(f"{norm} {said_units(each)}")
    level = float(evaluation.config["interval_level"])
    metrics = SHOWN[trained.task]
    if trained.task == "classification" and uneven(data.y_train):
        metrics = ("accuracy", "balanced_accuracy", "nll")
    columns = {
        metric: column_of(metric, trained.scaling, trained.target_names, level)
        for metric in metrics
    }
    tested = counted(min(num, len(data.x_test)), "test example")
    title = f"{trained.defense} on {folder.config.data}, {tested}, with 95 % intervals"
    table(evaluation.table(metrics).grid(columns, title))
    trivial = "; ".join(f"{name} {TRIVIAL[name]}" for name in evaluation.trivial)
    say(f"{legend(metrics)}.")
    places = " and ".join(str(where) for where, _, _ in jobs)
    say(f"Never look at the input: {trivial}.")
    if cost := price(folder.config):
        say(cost)
    say(f"Records and arrays: {places}")

"""`advbayes audit`: may the numbers be believed?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from advbayes.cli.screen import Device, Json, Thetas, Trust, emit, say, usable
from advbayes.cli.signals import watched
from advbayes.cli.threat import Eps, FeatureEps, Fixed, Norm, ball_for, budgets, check_norm

if TYPE_CHECKING:
    from advbayes.auditing import Verdict

HELP = """Check whether a run's robustness may be believed: each check with its figure, and a level
from A to D.

Examples:

advbayes audit RUN

advbayes audit RUN --tier quick --undefended BASELINE

advbayes audit RUN --require B

advbayes audit --model nets:make --data test.npz --eps 0.03

The third one ends with exit code 3 when the level is below B. The last one judges a model of your
own: `make()` gives a
torch network, a fitted scikit-learn estimator or a Predictor; eps is then in the data's own units.
"""
BELOW = 3


def add_to(app: typer.Typer) -> None:
    app.command("audit", help=HELP)(audit)


def audit(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run folder made by `advbayes train`")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="A model of your own, instead of a run"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Its test data: a .csv or .npz file or a built-in set"),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Target column of a .csv file")] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="classification|regression", help="Of the file, if not clear"),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Classes in the order of a network's outputs"),
    ] = None,
    report: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write a report of the model, too")
    ] = None,
    tier: Annotated[
        str, typer.Option(metavar="quick|standard|full", help="How much to spend")
    ] = "standard",
    eps: Eps = None,
    norm: Norm = None,
    feature_eps: FeatureEps = None,
    fixed: Fixed = None,
    undefended: Annotated[
        str | None, typer.Option(metavar="RUN", help="An undefended run on these data, as control")
    ] = None,
    control_eps: Annotated[
        float | None, typer.Option(min=0, help="Budget that must break the undefended run")
    ] = None,
    num: Annotated[
        int | None, typer.Option(min=2, help="Test examples to draw from (the tier says how many)")
    ] = None,
    thetas: Thetas = 20,
    require: Annotated[
        str | None, typer.Option(metavar="A|B|C", help="Exit with 3 when the level is worse")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Keys the randomness")] = 0,
    device: Device = "cpu",
    trust_network: Trust = False,
    json: Json = False,
) -> int:
    from advbayes.runs.config import ConfigError

    check_norm(norm)
    if tier not in ("quick", "standard", "full"):
        raise ConfigError(f"tier: must be one of quick, standard, full, got {tier!r}")
    if require not in (None, "A", "B", "C"):
        raise ConfigError(f"require: must be one of A, B, C, got {require!r}")

    foreign = {
        "--data": data,
        "--target": target,
        "--task": task,
        "--classes": classes,
        "--report": report,
    }
    if model is not None:
        if run is not None:
            raise ConfigError(f"model: must be given without a run, got {run!r} as well")
        if ":" not in model:
            raise ConfigError(f"model: must be MODULE:FACTORY, got {model!r:.60}")
        if data is None or eps is None:
            missing = [name for name, value in (("--data", data), ("--eps", eps)) if value is None]
            raise ConfigError(
                f"model: must go with --data and --eps, got no {' and '.join(missing)}"
            )
        of_runs = {
            "--undefended": undefended,
            "--control-eps": control_eps,
            "--thetas": None if thetas == 20 else thetas,
            "--device": None if device == "cpu" else device,
        }
        if extra := [name for name, value in of_runs.items() if value is not None]:
            raise ConfigError(f"{', '.join(extra)}: must go with a run, got --model")
        return _foreign(
            model,
            data,
            target,
            task,
            classes,
            report,
            tier,
            eps,
            norm or "l2",
            fixed or (),
            budgets(feature_eps, eps),
            num,
            require,
            seed,
            json,
        )
    if run is None:
        raise ConfigError(
            "RUN: must be a run folder, or --model and --data must be given, got neither"
        )
    if extra := [name for name, value in foreign.items() if value is not None]:
        raise ConfigError(f"{', '.join(extra)}: must go with --model, got a run")

    from contextlib import nullcontext

    import torch

    from advbayes.cli.describe import said_units, units_of
    from advbayes.distributed import ranks
    from advbayes.runs import Run as Folder
    from advbayes.runs import load_trained, prepare
    from advbayes.runs.verdict import audit_run

    folder = Folder.open(run)
    config = folder.config
    torch.set_num_threads(config.threads)
    trained = load_trained(run, trusted=trust_network).to(usable(device))
    prepared = prepare(config).to(device)
    control = (
        None
        if undefended is None
        else load_trained(undefended, trusted=trust_network).to(device).point()
    )
    ball = ball_for(trained, norm, eps, fixed, feature_eps)
    with watched(), folder.lock() if ranks().is_first else nullcontext():
        verdict = audit_run(
            folder,
            trained,
            prepared,
            ball,
            tier=tier,
            num=num,
            num_thetas=thetas,
            undefended=control,
            control_ball=None
            if control_eps is None
            else ball_for(trained, norm, control_eps, fixed, feature_eps),
            seed=seed,
            tell=None if json else say,
        )
    units = units_of(ball.eps, trained.scaling, trained.feature_names, ball.mask, ball.scale)
    if json:
        emit({"run": run, "threat_model": units, "norm": norm or trained.norm, **verdict.json()})
    else:
        say(
            f"{norm or trained.norm} {said_units(units)}\n{verdict}\n{plain(verdict)}\nVerdict: "
            f"{folder.path / 'audit.json'}"
        )
    return BELOW if require is not None and verdict.level > require else 0


def plain(verdict: Verdict) -> str:
    """What the level means."""
    from advbayes.report.words import sentence

    passed = sum(finding.status == "passed" for finding in verdict.findings)
    failed, missing = len(verdict.failed), len(verdict.not_run)
    return (
        f"Level {verdict.level}: "
        f"{sentence(verdict.level, verdict.tier, passed=passed, failed=failed, missing=missing)}"
    )


def _foreign(
    model: str,
    data: str,
    target: str | None,
    task: str | None,
    classes: str | None,
    report: str | None,
    tier: str,
    eps: float,
    norm: str,
    fixed: Sequence[str],
    feature_eps: Mapping[str, float],
    num: int | None,
    require: str | None,
    seed: int,
    json: bool,
) -> int:
    import shlex
    import sys

    from advbayes.cli.foreign import load_foreign

    foreign = load_foreign(
        model, data, target=target, task=task, classes=classes.split(",") if classes else ()
    )
    ball = foreign.ball(norm, eps, fixed, feature_eps)
    with watched():
        verdict = foreign.audit(ball, tier=tier, num=num, seed=seed)
        command = shlex.join(["advbayes", *sys.argv[1:]])
        paths = report and foreign.report(
            report, ball, verdict, num=num or 200, seed=seed, command=command
        )
    if json:
        emit(
            {
                "model": model,
                "norm": norm,
                "eps": eps,
                **verdict.json(),
                "report": str(paths.html) if paths else None,
            }
        )
    else:
        say(
            f"{model} on {data} ({foreign.task}), {norm} eps = {eps:g} in the data's own "
            f"units\n{verdict}\n{plain(verdict)}"
        )
        if paths:
            say(f"Report: {paths.html}")
    return BELOW if require is not None and verdict.level > require else 0

"""`advbayes audit`: may the numbers be believed?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from advbayes.cli import flags
from advbayes.cli.screen import emit, resumable, say
from advbayes.cli.signals import watched
from advbayes.cli.threat import open_run, remark_thetas
from advbayes.runs.config import ConfigError, listed

BELOW = 3
OF_MODELS = ("data", "target", "task", "classes", "report")
OF_RUNS = ("undefended", "control_eps", "thetas", "device")


def audit(
    context: typer.Context,
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
        str, flags.words("quick", "standard", "full", help="How much to spend")
    ] = "standard",
    eps: flags.Eps = None,
    norm: flags.Norm = None,
    feature_eps: flags.FeatureEps = None,
    fixed: flags.Fixed = None,
    undefended: Annotated[
        str | None, typer.Option(metavar="RUN", help="An undefended run on these data, as control")
    ] = None,
    control_eps: Annotated[
        float | None, typer.Option(min=0, help="Budget that must break the undefended run")
    ] = None,
    num: Annotated[
        int | None,
        typer.Option(*flags.NUM, min=2, help="Test examples to draw from (the tier says how many)"),
    ] = None,
    thetas: flags.Thetas = flags.THETAS,
    require: Annotated[
        str | None, flags.words("A", "B", "C", help="Exit with 3 when the level is worse")
    ] = None,
    seed: flags.Seed = 0,
    device: flags.Device = "cpu",
    trust_network: flags.Trust = False,
    json: flags.Json = False,
) -> int:
    """Check whether a run's robustness may be believed: each check with its figure, and a level
    from A to D.

    Examples:

    advbayes audit RUN

    advbayes audit RUN --tier quick --undefended BASELINE

    advbayes audit RUN --require B

    advbayes audit --model nets:make --data test.npz --eps 0.03

    The third one ends with exit code 3 when the level is below B. The last one judges a model of
    your own: `make()` gives a torch network, a fitted scikit-learn estimator, anything that
    answers an array with probabilities (by predict_proba or when called; --classes names their
    order) or a Predictor; eps is then in the data's own units.
    """
    reach = fixed or (), feature_eps or ()
    if model is None and run is None:
        wanted = "RUN: must be a run folder, or --model and --data must be given"
        raise ConfigError(f"{wanted}, got neither")
    if model is not None and run is not None:
        raise ConfigError(f"model: must be given without a run, got {run!r} as well")
    if model is not None:
        _refuse_flags(context, OF_RUNS, "a run", "--model")
        if ":" not in model:
            raise ConfigError(f"model: must be MODULE:FACTORY, got {model!r:.60}")
        if data is None or eps is None:
            missing = ["--data"] * (data is None) + ["--eps"] * (eps is None)
            wanted = "model: must go with --data and --eps"
            raise ConfigError(f"{wanted}, got no {' and '.join(missing)}")
        from advbayes.cli.foreign import load_foreign

        norm = norm or "l2"
        names = listed(classes) if classes else ()
        foreign = load_foreign(model, data, target=target, task=task, classes=names)
        within = foreign.ball(norm, eps, *reach)
        told: dict[str, Any] = {"model": model, "norm": norm, "eps": eps, "report": None}
        kind = foreign.dataset.task
        begin = f"{model} on {data} ({kind}), {norm} eps = {eps:g} in the data's own units"
        if foreign.assumed:
            order = ", ".join(foreign.class_names[:10])
            begin += f"\noutputs taken to be in the order of the classes {order} (else --classes)"
        end = ""
        with watched():
            tell = None if json else say
            verdict = foreign.audit(within, tier=tier, num=num, seed=seed, tell=tell)
            if report is not None:
                paths = foreign.report(report, within, verdict, num=num or 200, seed=seed)
                told["report"], end = str(paths.html), f"\nReport: {paths.html}"
    else:
        assert run is not None
        _refuse_flags(context, OF_MODELS, "--model", "a run")
        from contextlib import nullcontext

        from advbayes.cli.describe import said_units, units_within
        from advbayes.distributed import ranks
        from advbayes.runs import load_trained
        from advbayes.runs.folder import REACH
        from advbayes.runs.verdict import audit_run

        folder, trained, rows = open_run(run, trusted=trust_network, device=device)
        remark_thetas(trained, thetas)
        norm = norm or trained.norm
        control = control_ball = None
        if undefended is not None:
            control = load_trained(undefended, trusted=trust_network).to(device).point()
        if control_eps is not None:
            control_ball = trained.ball(norm, control_eps, *reach)
        ball = trained.ball(norm, eps, *reach)
        given = zip(REACH, reach, strict=True)
        words = [word for flag, each in given for value in each for word in (flag, value)]
        hint = " before a verdict; the one of an earlier audit, if any, stands"
        with resumable(hint), folder.lock() if ranks().is_first else nullcontext():
            verdict = audit_run(
                folder,
                trained,
                rows,
                ball,
                tier=tier,
                num=num,
                num_thetas=thetas,
                undefended=control,
                control_ball=control_ball,
                reach=words,
                seed=seed,
                tell=None if json else say,
            )
        units = units_within(trained, ball)
        told = {"run": run, "threat_model": units, "norm": norm}
        begin = f"{norm} {said_units(units)}"
        end = f"\nVerdict: {folder.path / 'audit.json'}"
    if json:
        emit({**told, **verdict.json()})
    else:
        from advbayes.report.words import sentence

        say(f"{begin}\n{verdict}\nLevel {verdict.level}: {sentence(verdict)}{end}")
    return BELOW if require is not None and verdict.level > require else 0


def _refuse_flags(context: typer.Context, names: Sequence[str], kind: str, came: str) -> None:
    sources = {name: context.get_parameter_source(name) for name in names}
    given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    if unwanted := [f"--{name.replace('_', '-')}" for name in given]:
        raise ConfigError(f"{', '.join(unwanted)}: must go with {kind}, got {came}")

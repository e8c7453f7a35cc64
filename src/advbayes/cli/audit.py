"""`advbayes audit`: may the numbers be believed?"""

from __future__ import annotations

from typing import Annotated

import typer

from advbayes.cli.screen import Json, Run, Thetas, Trust, emit, say
from advbayes.cli.signals import watched
from advbayes.cli.threat import Eps, FeatureEps, Fixed, Norm, ball_for, check_norm

HELP = """Check whether a run's robustness may be believed: each check with its figure, and a level from A to D.

Examples:

advbayes audit RUN

advbayes audit RUN --tier quick --undefended BASELINE

advbayes audit RUN --require B

The last one ends with exit code 3 when the level is below B.
"""
BELOW = 3


def add_to(app: typer.Typer) -> None:
    app.command("audit", help=HELP)(audit)


def audit(
    run: Run,
    tier: Annotated[str, typer.Option(metavar="quick|standard|full", help="How much to spend")] = "standard",
    eps: Eps = None,
    norm: Norm = None,
    feature_eps: FeatureEps = None,
    fixed: Fixed = None,
    undefended: Annotated[str | None, typer.Option(metavar="RUN", help="An undefended run on these data, as control")] = None,
    control_eps: Annotated[float | None, typer.Option(min=0, help="Budget that must break the undefended run")] = None,
    num: Annotated[int | None, typer.Option(min=2, help="Test examples to draw from (the tier says how many)")] = None,
    thetas: Thetas = 20,
    require: Annotated[str | None, typer.Option(metavar="A|B|C", help="Exit with 3 when the level is worse")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Keys the randomness")] = 0,
    trust_network: Trust = False,
    json: Json = False,
) -> int:
    from advbayes.config import ConfigError

    check_norm(norm)
    if tier not in ("quick", "standard", "full"):
        raise ConfigError(f"tier: must be one of quick, standard, full, got {tier!r}")
    if require not in (None, "A", "B", "C"):
        raise ConfigError(f"require: must be one of A, B, C, got {require!r}")

    import torch

    from advbayes.cli.describe import said_units, units_of
    from advbayes.runs import Run as Folder
    from advbayes.runs import load_trained, prepare
    from advbayes.runs.verdict import audit_run

    folder = Folder.open(run)
    config = folder.config
    torch.set_num_threads(config.threads)
    trained = load_trained(run, trusted=trust_network)
    data = prepare(config)
    control = None if undefended is None else load_trained(undefended, trusted=trust_network).point()
    ball = ball_for(trained, norm, eps, fixed, feature_eps)
    with watched(), folder.lock():
        verdict = audit_run(
            folder,
            trained,
            data,
            ball,
            tier=tier,
            num=num,
            num_thetas=thetas,
            undefended=control,
            control_ball=None if control_eps is None else ball_for(trained, norm, control_eps, fixed, feature_eps),
            seed=seed,
        )
    units = units_of(ball.eps, trained.scaling, trained.feature_names, ball.mask, ball.scale)
    if json:
        emit({"run": run, "threat_model": units, "norm": norm or trained.norm, **verdict.json()})
    else:
        say(f"{norm or trained.norm} {said_units(units)}\n{verdict}\nVerdict: {folder.path / 'audit.json'}")
    return BELOW if require is not None and verdict.level > require else 0

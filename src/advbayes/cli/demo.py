"""`advbayes demo`: the whole of it in about two minutes."""

from __future__ import annotations

from typing import Annotated

import typer

from advbayes.cli import flags
from advbayes.cli.screen import emit
from advbayes.cli.signals import watched


def demo(
    out: Annotated[
        str, typer.Option("--out", metavar="FOLDER", help="Where the report goes")
    ] = "demo-report",
    seed: flags.Seed = 0,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A few seconds: tiny trainings, to see that all is installed"),
    ] = False,
    json: flags.Json = False,
) -> None:
    """Train an undefended, an adversarially trained and a MIX model on digits, purify, attack,
    audit, report: two minutes.

    Examples:

    advbayes demo

    advbayes demo --out ./somewhere --seed 1
    """
    from advbayes.experiments.demo import run_demo

    with watched():
        result = run_demo(out, seed=seed, quick=quick, quiet=json)
    if json:
        emit(result)
    else:
        print(result["report"])

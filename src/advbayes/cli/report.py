"""`advbayes report`: one HTML file to look at and to send."""

from __future__ import annotations

from typing import Annotated

import typer

from advbayes.cli import flags
from advbayes.cli.screen import emit, resumable, say


def report(
    run: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run folders that `advbayes evaluate` was used on"),
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FOLDER", help="Where to (else the first RUN/report)"),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page")] = None,
    thetas: flags.Thetas = 20,
    trust_network: flags.Trust = False,
    json: flags.Json = False,
) -> None:
    """Write a report of one or several runs: one HTML file that needs nothing else, with
    Markdown and JSON beside it.

    Examples:

    advbayes report RUN

    advbayes report RUN OTHER-RUN --out comparison
    """
    from pathlib import Path

    from advbayes.report import report_runs

    place = Path(out) if out is not None else Path(run[0]) / "report"
    with resumable(" before the report was complete; the same command writes it"):
        paths = report_runs(run, place, title=title, trusted=trust_network, num_thetas=thetas)
    if json:
        names = ("html", "markdown", "json", "csv")
        files = (paths.html, paths.markdown, paths.json, paths.csv)
        told = dict(zip(names, map(str, files), strict=True))
        emit({"runs": run, "sha256": paths.digest, **told})
    else:
        say(str(paths.html))

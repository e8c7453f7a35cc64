"""`advbayes report`: one HTML file to look at and to send."""

from __future__ import annotations

from typing import Annotated

import typer

from advbayes.cli.screen import Json, Run, Trust, emit, say

HELP = """Write a run's report: one HTML file that needs nothing else, with Markdown and JSON beside it.

Examples:

advbayes report RUN

advbayes report RUN --out ~/report
"""


def add_to(app: typer.Typer) -> None:
    app.command("report", help=HELP)(report)


def report(
    run: Run,
    out: Annotated[str | None, typer.Option("--out", metavar="FOLDER", help="Where to (else RUN/report)")] = None,
    trust_network: Trust = False,
    json: Json = False,
) -> None:
    from pathlib import Path

    from advbayes.report import write_report
    from advbayes.runs import Run as Folder

    folder = Folder.open(run)
    place = Path(out) if out is not None else folder.path / "report"
    page = write_report(folder.path, place)
    emit({"run": run, "report": str(page)}) if json else say(str(page))

"""`advbayes show`: what is in a run or a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from advbayes.cli.screen import Json, emit, say, table

HELP = """Show what is in a run folder or in a bundle (hashes are checked, nothing in it is
executed).

Examples:

advbayes show RUN

advbayes show model.advbayes --json
"""


def add_to(app: typer.Typer) -> None:
    app.command("show", help=HELP)(show)


def show(
    path: Annotated[
        str,
        typer.Argument(
            metavar="RUN|BUNDLE", help="A run folder, or a model that `advbayes.save` wrote"
        ),
    ],
    json: Json = False,
) -> None:
    from advbayes.cli.describe import described_bundle, described_run, lines_of_run
    from advbayes.evaluation.tables import Grid
    from advbayes.runs import Run

    if (Path(path) / "config.toml").is_file():
        run = Run.open(path)
        if json:
            emit(described_run(run))
        else:
            say(f"{path}:\n{lines_of_run(run)}")
        return
    described = described_bundle(Path(path))
    if json:
        emit(described)
        return
    versions = _pairs(described["versions"])
    say(f"{path}: a bundle of schema {described['schema']}, written by {versions}")
    for name in ("posterior", "channel", "class_names", "threat_model", "extra", "audit"):
        if described[name] is not None:
            say(f"  {name}: {_short(described[name])}")
    rows = [(name, part["bytes"], part["sha256"]) for name, part in described["parts"].items()]
    table(Grid(("part", "bytes", "SHA-256"), rows, "parts", right=(1,)))


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."

"""`advbayes show`: what is in a run or a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from advbayes.cli import flags
from advbayes.cli.screen import emit, say, table


def show(
    path: Annotated[
        str,
        typer.Argument(
            metavar="RUN|BUNDLE", help="A run folder, or a model that `advbayes.save` wrote"
        ),
    ],
    json: flags.Json = False,
) -> None:
    """Show what is in a run folder or in a bundle (hashes are checked, nothing in it is
    executed).

    Examples:

    advbayes show RUN

    advbayes show model.advbayes --json
    """
    from advbayes.cli.describe import SHOWN_PARTS, described_bundle, described_run, lines_of_run
    from advbayes.evaluation.tables import Grid
    from advbayes.runs import Run

    run = Run(Path(path)) if (Path(path) / "config.toml").is_file() else None
    if json:
        emit(described_bundle(Path(path)) if run is None else described_run(run))
        return
    if run is not None:
        say(f"{path}:\n{lines_of_run(run)}")
        return
    described = described_bundle(Path(path))
    versions = ", ".join(f"{name} {value}" for name, value in described["versions"].items())
    say(f"{path}: a bundle of schema {described['schema']}, written by {versions}")
    for name in SHOWN_PARTS:
        if described[name] is not None:
            text = str(described[name])
            say(f"  {name}: {text if len(text) <= 200 else f'{text[:197]}...'}")
    rows = [(name, part["bytes"], part["sha256"]) for name, part in described["parts"].items()]
    table(Grid(("part", "bytes", "SHA-256"), rows, "parts", right=(1,)))

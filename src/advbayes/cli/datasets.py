"""`advbayes datasets`: the built-in data sets and where they are."""

from __future__ import annotations

from typing import Annotated

import typer

from advbayes.cli.screen import Json, emit, say, table
from advbayes.cli.signals import watched

HELP = """List the built-in data sets and where they are; fetch one.

Examples:

advbayes datasets

advbayes datasets --fetch mnist

ADVBAYES_DATA=/data advbayes datasets --json
"""


def add_to(app: typer.Typer) -> None:
    app.command("datasets", help=HELP)(datasets)


def datasets(
    fetch: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Load one, downloading what is missing; hashes are checked"
        ),
    ] = None,
    root: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Look in this folder alone")
    ] = None,
    json: Json = False,
) -> None:
    from advbayes.cli.downloads import Downloads
    from advbayes.datasets import SOURCES, find_dataset, load_dataset, names
    from advbayes.evaluation.tables import Grid

    if fetch is not None:
        with watched(), Downloads(show=False if json else None) as downloads:
            dataset = load_dataset(fetch, root, progress=downloads)
        where = dataset.provenance
        one = {
            "name": dataset.name,
            "task": dataset.task,
            "train": len(dataset.x_train),
            "test": len(dataset.x_test),
            "shape": list(dataset.x_train.shape[1:]),
            "source": where.source,
            "sha256": dict(where.sha256),
            "verified": where.verified,
            "note": where.note,
        }
        emit(one) if json else say(
            f"{dataset!r}\n  {where.source}\n  {'verified' if where.verified else 'NOT verified'}: "
            f"{where.note}"
        )
        return
    rows = []
    for name in names():
        source = SOURCES.get(name)
        folder = find_dataset(name, root)
        place = (
            "comes with scikit-learn"
            if source is None
            else str(folder)
            if folder
            else "not here (fetched when used)"
        )
        summary = {"digits": "8x8 handwritten digits", "diabetes": "disease progression"}.get(
            name, ""
        )
        task = {"digits": "classification", "diabetes": "regression"}.get(name, "")
        rows.append(
            (name, source.task if source else task, source.summary if source else summary, place)
        )
    if json:
        emit(
            {
                "datasets": [
                    dict(zip(("name", "task", "summary", "place"), row, strict=True))
                    for row in rows
                ]
            }
        )
    else:
        table(Grid(("name", "task", "what", "where"), rows))

"""`advbayes datasets`: the built-in data sets and where they are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from advbayes.cli import flags
from advbayes.cli.screen import downloads, emit, say, table
from advbayes.cli.signals import watched

_EMBEDDED = {
    "digits": ("classification", "8x8 handwritten digits"),
    "diabetes": ("regression", "disease progression"),
}


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
    json: flags.Json = False,
) -> None:
    """List the built-in data sets and where they are; fetch one.

    Examples:

    advbayes datasets

    advbayes datasets --fetch mnist

    ADVBAYES_DATA=/data advbayes datasets --json
    """
    from advbayes.datasets import SOURCES, find_dataset, load_dataset, names
    from advbayes.evaluation.tables import Grid

    if fetch is not None:
        with watched(), downloads(quiet=json) as progress:
            dataset = load_dataset(fetch, root, progress=progress)
        where = dataset.provenance
        if json:
            shape = list(dataset.x_train.shape[1:])
            size = {"train": len(dataset.x_train), "test": len(dataset.x_test), "shape": shape}
            emit({"name": dataset.name, "task": dataset.task, **size, **asdict(where)})
        else:
            verified = "verified" if where.verified else "NOT verified"
            say(f"{dataset!r}\n  {where.source}\n  {verified}: {where.note}")
        return
    rows = []
    for name in names():
        task, summary = _EMBEDDED.get(name) or (SOURCES[name].task, SOURCES[name].summary)
        place = "comes with scikit-learn"
        if name in SOURCES:
            place = str(find_dataset(name, root) or "not here (fetched when used)")
        rows.append((name, task, summary, place))
    if json:
        keys = ("name", "task", "summary", "place")
        emit({"datasets": [dict(zip(keys, row, strict=True)) for row in rows]})
    else:
        table(Grid(("name", "task", "what", "where"), rows))

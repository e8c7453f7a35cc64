"""`advbayes datasets`, `show`, `report`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from advbayes.cli import flags
from advbayes.cli.screen import downloads, emit, resumable, say, table
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
        if name in _EMBEDDED:
            rows.append((name, *_EMBEDDED[name], "comes with scikit-learn"))
        else:
            place = str(find_dataset(name, root) or "not here (fetched when used)")
            rows.append((name, SOURCES[name].task, SOURCES[name].summary, place))
    if json:
        keys = ("name", "task", "summary", "place")
        emit({"datasets": [dict(zip(keys, row, strict=True)) for row in rows]})
    else:
        table(Grid(("name", "task", "what", "where"), rows))


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

    if (Path(path) / "config.toml").is_file():
        run = Run(Path(path))
        emit(described_run(run)) if json else say(f"{path}:\n{lines_of_run(run)}")
        return
    described = described_bundle(Path(path))
    if json:
        emit(described)
        return
    versions = ", ".join(f"{name} {value}" for name, value in described["versions"].items())
    say(f"{path}: a bundle of schema {described['schema']}, written by {versions}")
    for name in SHOWN_PARTS:
        if described[name] is not None:
            text = str(described[name])
            say(f"  {name}: {text if len(text) <= 200 else f'{text[:197]}...'}")
    rows = [(name, part["bytes"], part["sha256"]) for name, part in described["parts"].items()]
    table(Grid(("part", "bytes", "SHA-256"), rows, "parts", right=(1,)))


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
    thetas: flags.Thetas = flags.THETAS,
    trust_network: flags.Trust = False,
    json: flags.Json = False,
) -> None:
    """Write a report of one or several runs: one HTML file that needs nothing else, with
    Markdown and JSON beside it.

    Examples:

    advbayes report RUN

    advbayes report RUN OTHER-RUN --out comparison
    """
    from advbayes.report import report_runs

    place = Path(out) if out is not None else Path(run[0]) / "report"
    with resumable(" before the report was complete; the same command writes it"):
        paths = report_runs(run, place, title=title, trusted=trust_network, num_thetas=thetas)
        _remark_thetas(run, thetas, trusted=trust_network)
    if json:
        files = {name: str(path) for name, path in vars(paths).items() if name != "digest"}
        emit({"runs": run, "sha256": paths.digest, **files})
    else:
        say(str(paths.html))


def _remark_thetas(runs: list[str], num: int, *, trusted: bool) -> None:
    """A line for each run on whose model the number of thetas has no effect."""
    if num == flags.THETAS:
        return
    from advbayes.cli.threat import remark_thetas
    from advbayes.runs import Run, load_trained

    for run in map(Run.open, runs):
        if run.model_path.exists() and (trusted or ":" not in run.config.network):
            remark_thetas(load_trained(run.path, trusted=trusted), num)

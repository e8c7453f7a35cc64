"""`advbayes predict`: predictions for rows of a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from advbayes.cli import flags
from advbayes.cli.screen import check_new, emit, say, usable
from advbayes.cli.signals import watched
from advbayes.cli.threat import remark_thetas
from advbayes.runs.config import ConfigError


def predict(
    model: Annotated[
        str, typer.Argument(metavar="RUN|BUNDLE", help="A finished run, or a saved model")
    ],
    input: Annotated[str, typer.Argument(metavar="INPUT", help="A .csv or .npz file")],
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE", help="A new .csv, .npz or .json file; else a table"),
    ] = None,
    thetas: flags.Thetas = flags.THETAS,
    level: Annotated[
        float | None,
        typer.Option(min=0.01, max=0.999, help="Of the intervals (regression)", show_default="0.9"),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Answer --positive from this probability on (two classes)"),
    ] = None,
    positive: Annotated[
        str | None, typer.Option(metavar="CLASS", help="The class that --threshold is about")
    ] = None,
    device: flags.Device = "cpu",
    trust_network: flags.Trust = False,
    json: flags.Json = False,
) -> None:
    """Predict for the rows of a .csv file (by column names) or of an .npz file (array x), in
    raw units.

    Examples:

    advbayes predict RUN patients.csv --out predictions.csv

    advbayes predict model.advbayes images.npz --json
    """
    if Path(input).suffix.lower() not in (".csv", ".npz"):
        raise ConfigError(f"INPUT: must be a .csv or .npz file, got {input!r}")
    if (threshold is None) != (positive is None):
        raise ConfigError("threshold, positive: must be given together, got one of them")
    check_new("out", out, (".csv", ".npz", ".json"))

    from advbayes.cli import predicting
    from advbayes.runs import load_trained

    trained = load_trained(model, trusted=trust_network)
    predicting.check_task(trained, level=level, threshold=threshold)
    remark_thetas(trained, thetas)
    x = predicting.read_inputs(trained, Path(input)).to(usable(device))
    level = predicting.LEVEL if level is None else level
    columns = predicting.tabulate(trained.to(device), x, num_thetas=thetas, level=level)
    if threshold is not None and positive is not None:
        predicting.decide(columns, trained.class_names, positive, threshold)
    num = len(next(iter(columns.values())))
    if out is not None:
        with watched():
            predicting.write_columns(Path(out), columns)
    if json:
        emit({"model": model, "num": num, **({"out": out} if out else {"predictions": columns})})
    elif out is not None:
        say(f"{num} predictions written to {out}")
    else:
        text = predicting.as_csv(columns).rstrip("\r\n")
        say(text.replace("\r\n", "\n")) if sys.stdout.isatty() else print(text)

"""What commands say: tables and sentences for people, one JSON object for machines."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from advbayes.checks import inert

if TYPE_CHECKING:
    from rich.console import Console

    from advbayes.evaluation.tables import Grid

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-network", help="Run the code of a network or channel of your own (module:factory)"
    ),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder made by `advbayes train`")]
Device = Annotated[
    str, typer.Option("--device", metavar="cpu|cuda|mps", help="Where to compute, as torch says it")
]
Thetas = Annotated[int, typer.Option("--thetas", min=1, help="Thetas in the predictive")]


def usable(device: str) -> str:
    """The device, if torch has it here.

    >>> usable("cpu")
    'cpu'
    """
    import torch

    from advbayes.runs.config import ConfigError

    try:
        torch.Generator(device)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"device: must be one that torch has on this machine, such as cpu, got {device!r:.40} "
            f"({first:.100})"
        ) from None
    return device


def console(*, stderr: bool = False) -> Console:
    """A rich console on the stream as it is now."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else 140)


def say(text: str) -> None:
    """A plain line for people; nothing in it is markup or a command to the terminal."""
    print(inert(text), flush=True)


def emit(result: dict[str, Any]) -> None:
    """The JSON object."""
    print(json.dumps(result, allow_nan=False, indent=1, sort_keys=True), flush=True)


def table(grid: Grid) -> None:
    """A table for people."""
    console().print(grid.rich())


def fault(message: str) -> None:
    """One clean message on standard error."""
    print(inert(f"advbayes: {message}"), file=sys.stderr, flush=True)

"""What commands say: tables and sentences for people, one JSON object on standard output for
machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-network", help="Run the code of a network or channel of your own (module:factory)"
    ),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder made by `advbayes train`")]
Thetas = Annotated[int, typer.Option("--thetas", min=1, help="Thetas in the predictive")]


def console(*, stderr: bool = False) -> Console:
    """A rich console on the stream as it is now."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else 140)


def inert(text: str) -> str:
    """Text that cannot drive a terminal: what is neither visible nor a line break is spelled out.

    >>> print(inert("\\x1b[31mred\\u202e"))
    \\x1b[31mred\\u202e
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)


def say(text: str) -> None:
    """A plain line for people; nothing in it is taken for markup or for a command to the
    terminal."""
    print(inert(text), flush=True)


def emit(result: dict[str, Any]) -> None:
    """The JSON object."""
    print(json.dumps(result, allow_nan=False, indent=1, sort_keys=True), flush=True)


def table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()
) -> None:
    """A table; cells are text, never markup."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=Text(inert(title)) if title else None, title_justify="left")
    for number, name in enumerate(head):
        shown.add_column(Text(inert(name)), justify="right" if number in right else "left")
    for row in rows:
        shown.add_row(*(Text(inert(str(cell))) for cell in row))
    console().print(shown)


def fault(message: str) -> None:
    """One clean message on standard error."""
    print(inert(f"advbayes: {message}"), file=sys.stderr, flush=True)

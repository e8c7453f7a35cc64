"""Flags that several commands share; a word or an attack that is not known is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from advbayes.checks import nearest
from advbayes.runs.config import ATTACKS, ConfigError, names_code

THETAS = 20  # what is asked for, unless said otherwise
SPENT = {"steps": 50, "restarts": 1, "queries": 500}
NUM = ("--num", "--num-test")  # the second for old scripts


def words(*options: str, **settings: Any) -> Any:
    """A flag that takes one of these words.

    >>> words("l2", "linf").metavar
    'l2|linf'
    """

    def known(param: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and value not in options:
            raise ConfigError(f"{param.name}: must be one of {', '.join(options)}, got {value!r}")
        return value

    return typer.Option(metavar="|".join(options), callback=known, **settings)


def known_attacks(names: Sequence[str]) -> Sequence[str]:
    """Refuse an unknown attack, with the nearest name; module:factory is one of your own.

    >>> known_attacks(["pgd", "pdg"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    advbayes.runs.config.ConfigError: attack: must be one of ... or module:factory, got 'pdg'; did you mean 'pgd'?
    """  # noqa: E501
    for name in names:
        if name not in ATTACKS and not names_code(name):
            known, hint = ", ".join(ATTACKS), nearest(name, ATTACKS)
            raise ConfigError(
                f"attack: must be one of {known} or module:factory, got {name!r}{hint}"
            )
    return names


def _attacks(what: str, check: Any) -> Any:
    def complete(incomplete: str) -> list[tuple[str, str]]:
        return [(name, what) for name, what in ATTACKS.items() if name.startswith(incomplete)]

    text = what.format(", ".join(ATTACKS))
    return typer.Option(metavar="NAME", help=text, autocompletion=complete, callback=check)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-network",
        help="Run the code of a network, channel or attack of your own (module:factory)",
    ),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder made by `advbayes train`")]
Device = Annotated[
    str, typer.Option(metavar="cpu|cuda|mps", help="Where to compute, as torch says it")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress")]
Thetas = Annotated[int, typer.Option(min=1, help="Thetas in the predictive")]
Seed = Annotated[int, typer.Option(min=0, help="Keys all randomness")]
Num = Annotated[int, typer.Option(*NUM, min=1, help="How many test examples, from the first")]

One = Annotated[
    str, _attacks("One of {}, or module:factory of your own", lambda name: known_attacks([name])[0])
]
Many = Annotated[
    list[str] | None,
    _attacks(
        "Any of {}, or module:factory of your own; repeat it for several",
        lambda names: known_attacks(names or ()),
    ),
]
Eps = Annotated[
    float | None,
    typer.Option(min=0, help="Budget in the model's units (else the run's training budget)"),
]
Norm = Annotated[str | None, words("l2", "linf", help="Norm (else the run's)")]
Fixed = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A feature that the attacker cannot change; repeat it"),
]
FeatureEps = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=NUMBER", help="Budget of a feature in its own unit; repeat it"),
]
Steps = Annotated[int, typer.Option(min=1, help="Steps of iterative attacks")]
Restarts = Annotated[int, typer.Option(min=1, help="Restarts of iterative attacks")]
Queries = Annotated[int, typer.Option(min=1, help="Queries of attacks without gradients")]

"""The command line:
`advbayes demo|train|predict|attack|evaluate|audit|certify|report|datasets|show|playground`.

torch is imported inside the commands, so that help, completion and refusals come at once; nothing
is imported here, so that a signal is answered from the first instruction on.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, without `argv` as the console program; the exit code.

    >>> main(["train", "--lr", "-1"])
    2
    """
    if argv is None:
        from advbayes.cli.signals import take_over

        take_over()

    from advbayes.cli.app import run

    return run(argv)

"""The command line: `advbayes demo|train|predict|attack|evaluate|audit|certify|report|datasets|show`.

torch is imported inside the commands, so that help, completion and refusals come at once.
"""

from __future__ import annotations

from advbayes.cli.app import app, main

__all__ = ["app", "main"]

"""The one door for speed: faster passes through many thetas, and the compiled training step.

Everything here computes what plain code elsewhere defines, equal up to rounding: `run` what
`BayesianModel.run` does, `CompiledStep` what `fit` does with `ChannelELBO.terms`, autograd and
Adam. `disabled()`, or the environment variable `ADVBAYES_ACCELERATED=0`, switches all of it off but
`fit(compile=True)`, which asks for it by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from advbayes.accelerated.compiling import CompileError as CompileError
from advbayes.accelerated.passes import in_parts as in_parts
from advbayes.accelerated.passes import recycle_blocks as recycle_blocks
from advbayes.accelerated.passes import run as run
from advbayes.accelerated.step import CompiledStep as CompiledStep

_is_disabled: ContextVar[bool] = ContextVar("disabled", default=False)


def is_enabled() -> bool:
    """Whether faster code may be used here, in this thread."""
    return not _is_disabled.get() and os.environ.get("ADVBAYES_ACCELERATED", "1") != "0"


@contextmanager
def disabled() -> Iterator[None]:
    """Within, plain code runs: the definitions themselves.

    >>> with disabled():
    ...     is_enabled()
    False
    """
    token = _is_disabled.set(True)
    try:
        yield
    finally:
        _is_disabled.reset(token)

"""Compile a function of tensors once, call it with little overhead: what `fit(compile=True)` runs.

The function is traced operation by operation (automatic differentiation included), then compiled to one native program. Against
`torch.compile` this saves the checks at each call that nothing has changed, 50 to 100 microseconds, which on a small network is
the time of the step itself; in return the caller promises that shapes, and all that the function reads beside its arguments,
stay as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

Compiled = Callable[..., tuple[Tensor, ...]]

MAX_LOOP = 1 << 16  # multiplications up to which a product is written as a loop; at twice as many the library is faster

_tracing: ContextVar[bool] = ContextVar("tracing", default=False)  # of this thread alone


class CompileError(RuntimeError):
    """A function could not be traced or compiled; the message says which and why."""


def is_tracing() -> bool:
    """Whether code runs to be compiled, and so must not look at the values of tensors.

    >>> is_tracing()
    False
    """
    return _tracing.get() or torch.compiler.is_compiling()


@contextmanager
def _trace() -> Iterator[None]:
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)


def compiled(
    function: Callable[..., tuple[Tensor, ...]], examples: tuple[Tensor, ...], what: str, num_changed: int = 0
) -> Compiled:
    """The function, compiled for arguments of the examples' shapes and dtypes; arguments must not ask for a gradient.

    The first `num_changed` arguments may be changed in place.

    >>> try:
    ...     compiled(lambda a: (a * float(a.sum()),), (torch.ones(2),), "a branch on values")
    ... except CompileError as error:
    ...     print(str(error)[:49])
    compile=True could not compile a branch on values
    """
    try:
        with warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning):  # of the compiler about itself
                warnings.simplefilter("ignore", kind)
            program = _program(function, examples, num_changed)
    except Exception as error:  # whatever a compiler may raise
        reason = (str(error) or repr(error)).strip().splitlines()[0]
        raise CompileError(
            f"compile=True could not compile {what}: {type(error).__name__}: {reason}. It needs a C++ compiler (g++) and code "
            "that does not branch on the values of tensors; compile=False trains the same without it"
        ) from error
    return program


def _program(function: Callable[..., tuple[Tensor, ...]], examples: tuple[Tensor, ...], num_changed: int) -> Compiled:
    from torch._inductor import compile as compile_graph
    from torch._inductor import config
    from torch.fx.experimental.proxy_tensor import make_fx

    with _trace(), torch.no_grad(), config.patch(compile_threads=1):  # no worker processes that outlive the call
        graph = make_fx(function, decomposition_table=_decompositions(), tracing_mode="fake")(*examples)
        program: Compiled = compile_graph(graph, list(examples), options=_options())
        # The first call compiles what was left for it, and fails here if it fails.
        program(*(tensor.clone() for tensor in examples[:num_changed]), *examples[num_changed:])
    return program


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """The compiler's own, and small matrix products as loops: they are fused with what surrounds them, where calling the
    library costs as much as the product."""
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    product, with_bias = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    library_product, library_with_bias = table[product], table[with_bias]

    def mm(a: Tensor, b: Tensor) -> Any:
        if a.device.type == "cpu" and a.shape[0] * b.numel() <= MAX_LOOP:
            return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)
        return library_product(a, b)

    def addmm(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Any:
        if beta == alpha == 1 and a.device.type == "cpu" and a.shape[0] * b.numel() <= MAX_LOOP:
            return bias + mm(a, b)
        return library_with_bias(bias, a, b, beta, alpha)

    return {**table, product: mm, with_bias: addmm}


def _options() -> dict[str, Any]:
    """The C++ wrapper calls kernels without Python in between. Theta is read once for each example where products are loops:
    better to compute it once and store it."""
    return {"cpp_wrapper": True, "realize_reads_threshold": 1}

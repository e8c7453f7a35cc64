"""Compile a function of tensors once, call it with little overhead: what `fit(compile=True)` runs.

The function is traced operation by operation (automatic differentiation included), then compiled to
one native program. Against `torch.compile` this saves the checks at each call that nothing has
changed, 50 to 100 microseconds, which on a small network is the time of the step itself; in return
the caller promises that shapes, and all that the function reads beside its arguments, stay as they
were. The names that this needs are not part of torch's public interface: where a release lacks
them, `torch.compile` takes their place, or the plain function does.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from advbayes.checks import AdvBayesError

Program = Callable[..., tuple[Tensor, ...]]

MAX_LOOP = 1 << 16  # multiplications up to which a loop is faster than the library
MAX_SUM = 1 << 10  # terms up to which single precision is enough for a sum
# By shapes alone. What a net or a ball holds beside the arguments (buffers, frozen parameters, the
# scale, box and mask of features) becomes a constant of the program.
_TRACING: dict[str, Any] = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
_ONE_AT_A_TIME = threading.Lock()  # torch's compiler is not made for several threads


class CompileError(AdvBayesError, RuntimeError):
    """A function could not be traced or compiled; the message says which and why."""


def compiled(
    function: Program, examples: tuple[Tensor, ...], what: str, num_changed: int = 0
) -> Program:
    """The function, compiled for the examples' shapes and dtypes, none with a gradient.

    The first `num_changed` arguments may be changed in place.

    >>> try:
    ...     compiled(lambda a: (a * float(a.sum()),), (torch.ones(2),), "a branch on values")
    ... except CompileError as error:
    ...     print(str(error)[:49])
    compile=True could not compile a branch on values
    """
    try:
        with warnings.catch_warnings(), _ONE_AT_A_TIME, torch.no_grad():
            for kind in (DeprecationWarning, FutureWarning):  # of the compiler about itself
                warnings.simplefilter("ignore", kind)
            return _program(function, examples, num_changed)
    except Exception as error:  # whatever a compiler may raise
        reason = (str(error) or repr(error)).strip().splitlines()[0]
        raise CompileError(
            f"compile=True could not compile {what}: {type(error).__name__}: {reason}. It needs a "
            "C++ compiler (g++) and code that does not branch on the values of tensors; "
            "compile=False trains the same without it"
        ) from error


def _program(function: Program, examples: tuple[Tensor, ...], num_changed: int) -> Program:
    try:
        from torch.fx.experimental.proxy_tensor import make_fx
    except (ImportError, AttributeError):
        _warn_once("nothing: the step runs as it is")
        return function
    try:
        from torch._inductor import compile as compile_graph
        from torch._inductor import config

        table = _decompositions()
    except (ImportError, AttributeError, KeyError):
        _warn_once("torch.compile")
        graph = make_fx(function, **_TRACING)(*examples)
        return torch.compile(graph, dynamic=False)
    # Not several worker processes, which would outlive the call. The C++ wrapper calls kernels
    # without Python in between. Theta is read once for each example where products are loops:
    # better to compute it once and store it.
    with config.patch(compile_threads=1):
        graph = make_fx(function, table, **_TRACING)(*examples)
        options = {"cpp_wrapper": True, "realize_reads_threshold": 1}
        program: Program = compile_graph(graph, list(examples), options=options)
        # The first call compiles what was left for it, and fails here if it fails.
        program(*(tensor.clone() for tensor in examples[:num_changed]), *examples[num_changed:])
    return program


@cache
def _warn_once(instead: str) -> None:
    message = f"lacks what compile=True is made with; it uses {instead} and is slower"
    warnings.warn(f"torch {torch.__version__} {message}", RuntimeWarning, stacklevel=2)


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """The compiler's own, and small matrix products as loops: they are fused with what surrounds
    them, where calling the library costs as much as the product."""
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

    def total(a: Tensor, *, dtype: torch.dtype | None = None) -> Any:
        """Compiled sums run in one register, where 20,000 terms lose two digits."""
        long = dtype is None and a.dtype is torch.float32 and a.numel() > MAX_SUM
        return a.sum(dtype=torch.float64).float() if long else NotImplemented

    def dot(a: Tensor, b: Tensor) -> Any:
        return (a * b).sum()

    sums: dict[Any, Any] = {torch.ops.aten.sum.default: total, torch.ops.aten.dot.default: dot}
    return {**table, **sums, product: mm, with_bias: addmm}

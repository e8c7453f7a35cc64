"""Argument checks: every message names the argument, what was wanted and what came."""

from __future__ import annotations

import csv
import difflib
import io
import math
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")


class AdvBayesError(Exception):
    """Raised when the package refuses something on purpose; any other error is a bug.

    >>> import advbayes
    >>> try:
    ...     advbayes.L2(-1.0)
    ... except advbayes.AdvBayesError as error:
    ...     print(error)
    eps must be a finite number >= 0, got -1.0
    """

    def __init__(self, message: str = "", *, got: object = ...) -> None:
        """The message; with `got`, what came is described at its end."""
        super().__init__(message if got is ... else f"{message}, got {describe(got)}")

    def __reduce__(self) -> tuple[Any, ...]:
        """How it comes back from a worker process, whatever the arguments of its class."""
        return _as_it_was, (type(self), self.args, dict(vars(self)))


def _as_it_was(kind: type[AdvBayesError], args: Any, fields: dict[str, Any]) -> AdvBayesError:
    made = OSError if issubclass(kind, OSError) else Exception  # the one that the others build on
    error: AdvBayesError = made.__new__(kind, *args)
    vars(error).update(fields)
    return error


class InputError(AdvBayesError, ValueError):
    """Raised for a value that cannot be used."""


class InputTypeError(AdvBayesError, TypeError):
    """Raised for a value of a type that cannot be used."""


def printable(text: str, limit: int = 500) -> str:
    r"""Text from a file, safe to show in a message: at most `limit` characters, and none that
    control a terminal.

    >>> printable("a\x1b[2Jb\u202ec"), printable("x" * 20, limit=10)
    ('a\\x1b[2Jb\\u202ec', 'xxxxxxx...')
    """
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text[: limit + 1]
    )
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def counted(num: int, what: str = "example") -> str:
    """A number of things in words.

    >>> counted(1), counted(60), counted(2000, "test example")
    ('1 example', '60 examples', '2,000 test examples')
    """
    return f"{num:,} {what}{'' if num == 1 else 's'}"


def inert(text: str) -> str:
    """Text that cannot control a terminal: invisible characters but line breaks are spelled out.

    >>> print(inert("\\x1b[31mred\\u202e"))
    \\x1b[31mred\\u202e
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)


def describe(value: object) -> str:
    """A value, described briefly enough for an error message.

    >>> import torch
    >>> describe(torch.zeros(2, 3)), describe(-1.0)
    ('a torch.float32 tensor of shape (2, 3) on cpu', '-1.0')
    """
    from torch import Tensor  # here, because the command line refuses mistakes without torch

    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def outlined(value: object) -> str:
    """The same for what a model gave, which may hold tensors: their shapes, not their numbers.

    >>> import torch
    >>> outlined((torch.zeros(2, 3), None))
    'a tuple (a torch.float32 tensor of shape (2, 3) on cpu, None)'
    >>> outlined({"logits": 1.0})
    "a dict of 'logits'"
    """
    if isinstance(value, (tuple, list)):
        parts = [describe(part) for part in value[:2]] + ["..."] * (len(value) > 2)
        return f"a {type(value).__name__} ({', '.join(parts)})"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(repr, list(value)[:5]))}"
    return describe(value)


def number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> float:
    """A finite real number within bounds, as a float.

    >>> number("eps", -1, low=0)
    Traceback (most recent call last):
    ...
    advbayes.checks.InputError: eps must be a finite number >= 0, got -1
    """
    wanted = "a finite number"
    if low > -math.inf:
        wanted += f" {'>' if open_low else '>='} {low:g}"
    if high < math.inf:
        wanted += f"{' and' if low > -math.inf else ''} {'<' if open_high else '<='} {high:g}"
    plain = value
    if not isinstance(value, (int, float)):
        try:
            plain = value.item()  # of an array or a tensor
        except (AttributeError, ValueError, RuntimeError):
            plain = None
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise InputTypeError(f"{name} must be {wanted}", got=value)
    below = plain <= low if open_low else plain < low
    above = plain >= high if open_high else plain > high
    # compared first, because a whole number may be too large for a float
    if below or above or not abs(plain) <= sys.float_info.max:
        raise InputError(f"{name} must be {wanted}", got=plain)
    return float(plain)


def count(name: str, value: Any, *, low: int = 1) -> int:
    """A whole number, at least `low`.

    >>> count("num_theta", 0)
    Traceback (most recent call last):
    ...
    advbayes.checks.InputError: num_theta must be a whole number >= 1, got 0
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        whole = operator.index(value)
    except TypeError:
        raise InputTypeError(f"{name} must be a whole number >= {low}", got=value) from None
    if whole < low:
        raise InputError(f"{name} must be a whole number >= {low}, got {value}")
    return whole


def choice(name: str, value: Any, options: Sequence[str]) -> str:
    """One of a few words.

    >>> choice("update", "on", ("online", "offline"))
    Traceback (most recent call last):
    ...
    advbayes.checks.InputError: update must be one of 'online', 'offline', got 'on'
    """
    if value not in options:
        raise InputError(f"{name} must be one of {', '.join(map(repr, options))}", got=value)
    return str(value)


def function(name: str, value: T, wanted: str) -> T:
    """A value that can be called.

    >>> function("loss", 2.0, "a loss such as nll")
    Traceback (most recent call last):
    ...
    advbayes.checks.InputTypeError: loss must be a loss such as nll, got 2.0
    """
    if not callable(value):
        raise InputTypeError(f"{name} must be {wanted}", got=value)
    return value


def nearest(value: object, options: Iterable[str]) -> str:
    """The end of a message about a word that is not known.

    >>> nearest("minst", ("mnist", "wine")), nearest("x", ("mnist", "wine"))
    ("; did you mean 'mnist'?", '')
    """
    near = difflib.get_close_matches(str(value), options, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def joined(names: Iterable[object]) -> str:
    """Names as a flag takes them: divided by commas, one with a comma in it in double quotes.

    >>> joined(["age", "weight, kg"])
    'age,"weight, kg"'
    """
    csv.writer(line := io.StringIO(), lineterminator="").writerow(names)
    return line.getvalue()


@contextmanager
def extra(what: str, name: str, otherwise: str = "") -> Iterator[None]:
    """Around the imports of what an extra brings: where they fail, the message says how to get it.

    >>> with extra("a sketch needs inkpot", "sketch"):
    ...     import inkpot
    Traceback (most recent call last):
    ...
    ModuleNotFoundError: a sketch needs inkpot: pip install 'advbayes[sketch]'
    """
    try:
        yield
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"{what}: pip install 'advbayes[{name}]'{otherwise}") from None


def instance(name: str, value: T, kind: type | tuple[type, ...], wanted: str) -> T:
    """Check that a value is an instance of a type.

    >>> instance("ball", 2.0, str, "a ball such as L2(eps)")
    Traceback (most recent call last):
    ...
    advbayes.checks.InputTypeError: ball must be a ball such as L2(eps), got 2.0
    """
    if not isinstance(value, kind):
        raise InputTypeError(f"{name} must be {wanted}", got=value)
    return value


def finite(name: str, value: Tensor) -> Tensor:
    """A tensor without NaN and infinity.

    >>> import torch
    >>> finite("x", torch.tensor([0.0, float("nan")]))
    Traceback (most recent call last):
    ...
    advbayes.checks.InputError: x must be finite, got 1 NaN and 0 infinite values in a torch.float32 tensor of shape (2,) on cpu
    """  # noqa: E501
    if value.is_floating_point() and not known(value.isfinite().all(), otherwise=True):
        nan = int(value.isnan().sum())
        infinite = int(value.isinf().sum())
        raise InputError(
            f"{name} must be finite, got {nan} NaN and {infinite} infinite values in "
            f"{describe(value)}"
        )
    return value


def known(condition: Tensor, *, otherwise: bool) -> bool:
    """Whether a condition holds; `otherwise` where it has no value yet, as while compiling.

    >>> import torch
    >>> known(torch.tensor(1.0) > 0, otherwise=False)
    True
    """
    try:
        return bool(condition)
    except RuntimeError:
        return otherwise


def native(value: T) -> T:
    """An array that torch takes: not backwards, writable, in this machine's byte order and of a
    dtype that torch computes with; anything else as it came.

    >>> import numpy as np
    >>> native(np.array([1.0, 2.0], dtype=">f8")[::-1])
    array([2., 1.])
    """
    import numpy as np

    if not isinstance(value, np.ndarray):
        return value
    dtype = value.dtype.newbyteorder("=")
    if dtype.kind == "f" and dtype.itemsize > 8:
        dtype = np.dtype(np.float64)
    elif dtype in (np.uint16, np.uint32):
        dtype = np.dtype(np.int64)
    if dtype == value.dtype and min(value.strides, default=0) >= 0 and value.flags.writeable:
        return value
    return np.array(value, dtype, order="C")  # type: ignore[return-value]

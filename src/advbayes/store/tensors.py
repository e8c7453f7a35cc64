"""Named tensors to safetensors bytes and back, with the size of the header bounded."""

from __future__ import annotations

from collections.abc import Mapping

import safetensors
import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from advbayes.checks import describe

from .documents import decode as decode_document
from .errors import FAULTS, StoreError, refusing

MAX_HEADER = 1 << 20  # theta is one vector, so a header is a few hundred bytes
MAX_DIMS = 16
_FIELDS = {"dtype", "shape", "data_offsets"}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPES = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def encode(tensors: Mapping[str, Tensor], name: str = "tensors") -> bytes:
    """The bytes of a safetensors file, the same for the same tensors; they must be finite.

    >>> encode({"mean": torch.tensor([1.0, float("nan")])}, "posterior")
    Traceback (most recent call last):
    ...
    advbayes.store.errors.StoreError: posterior: wanted finite tensors, got 1 NaN and 0 infinite values in mean
    """  # noqa: E501
    plain: dict[str, Tensor] = {}
    for key, value in tensors.items():
        match key, value:
            case str(), Tensor(is_sparse=False, dtype=dtype, ndim=num) if (
                dtype in _DTYPES and num <= MAX_DIMS
            ):
                pass
            case _:
                wanted = "named dense tensors of a plain type"
                raise StoreError(name, wanted, f"{key!r:.80}: {describe(value)}")
        if key == "__metadata__" or not key.isprintable():
            wanted = "a printable tensor name other than __metadata__"
            raise StoreError(name, wanted, f"{key!r:.80}")
        plain[key] = value.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        _check_finite(name, key, plain[key])
    data = to_safetensors(plain)
    _check_header(data, name)
    return data


def decode(data: bytes, name: str = "tensors") -> dict[str, Tensor]:
    """The tensors in the bytes of a safetensors file, refused when anything is amiss."""
    _check_header(data, name)
    with refusing(name, "safetensors", (safetensors.SafetensorError, *FAULTS)):
        tensors = from_safetensors(data)
    for key, value in tensors.items():
        if value.dtype not in _DTYPES or value.ndim > MAX_DIMS:
            wanted = f"plain types and at most {MAX_DIMS} axes"
            raise StoreError(name, wanted, f"{key:.80}: {describe(value)}")
        _check_finite(name, key, value)
    return tensors


def _check_finite(name: str, key: str, value: Tensor) -> None:
    if value.is_floating_point() and not bool(value.isfinite().all()):
        got = f"{int(value.isnan().sum())} NaN and {int(value.isinf().sum())} infinite values"
        raise StoreError(name, "finite tensors", f"{got} in {key}")


def _check_header(data: bytes, name: str) -> None:
    """Strict JSON of bounded size that lists tensors and nothing else."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(MAX_HEADER, len(data) - 8):
        wanted = f"a safetensors header of 2 to {MAX_HEADER} bytes within the file"
        raise StoreError(name, wanted, f"{length} in a file of {len(data)}")
    header = decode_document(data[8 : 8 + length], name, limit=MAX_HEADER)
    if type(header) is not dict:
        raise StoreError(name, "a safetensors header", f"{header!r:.80}")
    for key, entry in header.items():
        if type(entry) is not dict or (key != "__metadata__" and entry.keys() != _FIELDS):
            wanted = f"tensors with {', '.join(sorted(_FIELDS))}"
            raise StoreError(name, wanted, f"{key:.80}: {entry!r:.80}")

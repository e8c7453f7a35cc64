"""A purifier as a bundle of tables: sealed, hashed, replaced atomically; loaded without the model,
from disk if large."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from advbayes.checks import InputError
from advbayes.purification.rows import DiskRows, MemoryRows, Rows, num_bytes, spans
from advbayes.purification.store import Store, gaussian_bank

if TYPE_CHECKING:
    from advbayes.store.parts import Content
    from advbayes.store.tables import SavedTable

_BLOCK = 1000
_TEXT = "purifier"
_LEAST, _MOST = 1e-70, 1e70  # of scales: their products and squares are numbers too


def save(store: Store, folder: Path, update: str, note: str, features: bool) -> None:
    """Tables, vectors and one document, replaced in one step."""
    from advbayes.store import SUFFIX, write_bundle

    store.check_gaussian("save")
    if store.folder is not None and folder.resolve() == store.folder.resolve():
        raise InputError(f"folder must not be the one that the purifier reads from, got {folder}")
    if folder.suffix == SUFFIX:  # its tables are read from disk, piece by piece
        raise InputError(
            f"folder must not end in {SUFFIX}, which is the name of a single file, got {folder}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    tables = {"values": _table(store.values, store.dtype)}
    banks: list[dict[str, object]] = []
    for k, bank in enumerate(store.gaussians):
        tables[f"centres-{k}"] = _table(bank.centres, store.dtype)
        scale = bank.scale if bank.scales is None else None
        if bank.scales is not None:
            tables[f"scales-{k}"] = _table(bank.scales, store.dtype)
        banks.append({"log_weight": bank.log_weight, "factor": bank.factor, "scale": scale})
    text = {
        "update": update,
        "note": note,
        "banks": banks,
        "num_thetas": store.num_thetas,
        "num_outputs": store.num_outputs,
        "event_shape": list(store.event_shape),
        "features": features,
    }
    vectors = {"origin": store.origin, "middle": store.middle}
    write_bundle(folder, {"vectors": vectors}, {_TEXT: text}, tables)


def _table(rows: Rows, dtype: torch.dtype) -> Content:
    from advbayes.store.tables import streamed

    def blocks() -> Iterator[Tensor]:
        for group in range(rows.shape[0]):
            for start, stop in spans(rows.shape[1], _BLOCK):
                yield rows.block(slice(group, group + 1), slice(start, stop))[0]

    return streamed(rows.shape, dtype, blocks())


def load(folder: Path, memory_limit: int, features: bool) -> tuple[Store, str, str]:
    """The store, update and note, all checked; tables beyond `memory_limit` stay on disk."""
    from advbayes.store import StoreError
    from advbayes.store.tables import read_tables

    if not (folder / "manifest.json").exists():
        got = "none"
        if (folder / f"{_TEXT}.json").exists():
            got = "one of an earlier version, without hashes: make it again with Purifier(...).save"
        raise StoreError(folder, wanted="a saved purifier", got=got)
    bundle = read_tables(folder)

    def refuse(wanted: str, got: object) -> StoreError:
        return StoreError(folder, wanted=f"a saved purifier with {wanted}", got=f"{got!r:.200}")

    text, vectors = bundle.texts.get(_TEXT), bundle.parts.get("vectors", {})
    match text:
        case {
            "update": ("online" | "offline") as update,
            "note": str(note),
            "banks": [_, *_] as entries,
            "num_thetas": int(num_thetas),
            "num_outputs": int(num_outputs),
            "event_shape": [_, *_] as event_shape,
            "features": bool(with_features),
            **others,
        } if not others and num_thetas >= 1 and num_outputs >= 0:
            pass
        case _:
            raise refuse("its seven fields", text)
    # not bool, which is an int too
    counts = all(type(n) is int for n in (num_thetas, num_outputs, *event_shape))
    if not counts or min(event_shape) < 1:
        raise refuse("counts and an event shape", text)
    shape = tuple(event_shape)
    if features != with_features:
        raise InputError(
            f"features must be given if and only if the purifier was saved with them, got "
            f"{features}"
        )
    total = sum(num_bytes(saved.shape, saved.dtype) for saved in bundle.tables.values())
    on_disk = total > memory_limit

    def table(name: str, wanted: str, fits: Any) -> Rows:
        saved: SavedTable | None = bundle.tables.pop(name, None)
        if saved is None or not fits(saved.shape):
            raise refuse(f"a table {name} of {wanted}", None if saved is None else saved.shape)
        rows = DiskRows(saved.file, saved.shape, saved.dtype, saved.offset)
        return rows if on_disk else MemoryRows(rows.block(slice(None), slice(None)).clone())

    per_theta = 2 * num_outputs
    values = table(
        "values",
        f"shape (1, N, {num_thetas} V)",
        lambda s: s[0] == 1 and s[2] % num_thetas == 0 and per_theta in (0, s[2] // num_thetas),
    )
    dtype, num = _dtype(values), values.shape[1]
    shapes = {name: tuple(vector.shape) for name, vector in vectors.items()}
    named = sorted(shapes) == ["middle", "origin"]
    if not named or len(shapes["origin"]) != 1 or shapes["middle"] != (num_outputs,):
        raise refuse("the vectors origin and middle", shapes)
    origin, middle = vectors["origin"], vectors["middle"]
    if not with_features and len(origin) != math.prod(shape):
        raise refuse(f"centres of {math.prod(shape)} numbers", len(origin))
    if origin.dtype != torch.float64 or middle.dtype != torch.float64:
        raise refuse("vectors in float64", (origin.dtype, middle.dtype))
    banks = []
    for k, entry in enumerate(entries):
        match entry:
            case {
                "log_weight": float(log_weight),
                "factor": float(factor),
                "scale": (float() | None) as scale,
            } if len(entry) == 3:
                pass
            case _:
                raise refuse("log_weight, factor and scale of every bank", entry)
        scaled = (factor, factor if scale is None else scale)
        if not math.isfinite(log_weight) or not all(_LEAST < each < _MOST for each in scaled):
            raise refuse("a finite weight and positive scales", entry)

        def fits(s: tuple[int, ...]) -> bool:
            return s[0] in (1, num_thetas) and s[1:] == (num, len(origin))

        wanted = f"shape (1 or {num_thetas}, {num}, {len(origin)})"
        centres = table(f"centres-{k}", wanted, fits)
        scales = None
        if scale is None:
            scales = table(f"scales-{k}", wanted, lambda s, c=centres: s == c.shape)
        for rows in (centres, scales or centres):
            if _dtype(rows) != dtype:
                raise refuse(f"tables of one dtype, {dtype}", _dtype(rows))
        try:
            banks.append(gaussian_bank(log_weight, centres, scale, scales, origin, factor))
        except ValueError as error:
            raise refuse("finite centres and positive scales", str(error)) from None
    if bundle.tables:
        raise refuse("no other tables", sorted(bundle.tables))
    for start, stop in spans(num, _BLOCK):
        block = values.block(slice(0, 1), slice(start, stop))[0].view(stop - start, num_thetas, -1)
        positive = block[..., num_outputs:]  # variances, or probabilities
        if not bool(torch.isfinite(block).all()) or not bool((positive > 0).all()):
            wanted = "finite predictions, their probabilities or variances positive"
            raise refuse(wanted, float(positive.min()))
        if not num_outputs and float((block.double().sum(-1) - 1).abs().max()) > 1e-4:
            raise refuse("probabilities that sum to 1", float(block.double().sum(-1).max()))
    of_model = (num_thetas, num_outputs, shape, origin, middle, dtype)
    return Store(tuple(banks), values, *of_model, folder if on_disk else None), update, note


def _dtype(rows: Rows) -> torch.dtype:
    return rows.block(slice(0, 1), slice(0, 1)).dtype

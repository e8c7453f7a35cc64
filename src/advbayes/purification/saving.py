"""A purifier as a bundle of tables: sealed, hashed, replaced atomically; loaded without the model,
from disk if large."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from advbayes.checks import InputError
from advbayes.purification.rows import DiskRows, MemoryRows, Rows, num_bytes, spans
from advbayes.purification.store import Store, gaussian_bank

if TYPE_CHECKING:
    from advbayes.store.parts import Content

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
            for span in spans(rows.shape[1], _BLOCK):
                yield rows.block(slice(group, group + 1), span)[0]

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
    shapes = {name: tuple(vector.shape) for name, vector in vectors.items()}
    named = sorted(shapes) == ["middle", "origin"]
    if not named or len(shapes["origin"]) != 1 or shapes["middle"] != (num_outputs,):
        raise refuse("the vectors origin and middle", shapes)
    origin, middle = vectors["origin"], vectors["middle"]
    if not with_features and len(origin) != math.prod(shape):
        raise refuse(f"centres of {math.prod(shape)} numbers", len(origin))
    if origin.dtype != torch.float64 or middle.dtype != torch.float64:
        raise refuse("vectors in float64", (origin.dtype, middle.dtype))
    described, wanted = [], {"values"}
    for k, entry in enumerate(entries):
        match entry:
            case {
                "log_weight": float(log_weight),
                "factor": float(factor),
                "scale": (float() | None) as scale,
            } if len(entry) == 3:
                described.append((log_weight, factor, scale))
                wanted |= {f"centres-{k}"} if scale else {f"centres-{k}", f"scales-{k}"}
            case _:
                raise refuse("log_weight, factor and scale of every bank", entry)
        scaled = (factor, factor if scale is None else scale)
        if not math.isfinite(log_weight) or not all(_LEAST < each < _MOST for each in scaled):
            raise refuse("a finite weight and positive scales", entry)
    saved = bundle.tables
    if saved.keys() != wanted:
        raise refuse(f"the tables {', '.join(sorted(wanted))}", sorted(saved))
    one, num, width = saved["values"].shape
    dtype, per_theta = saved["values"].dtype, 2 * num_outputs or width // num_thetas
    if one != 1 or width != num_thetas * per_theta:
        raise refuse(f"values of shape (1, N, {num_thetas} V)", saved["values"].shape)
    for name in wanted - {"values"}:
        each, groups = saved[name], saved[name.replace("scales", "centres")].shape[0]
        fits = groups in (1, num_thetas) and each.shape == (groups, num, len(origin))
        if not fits or each.dtype != dtype:
            shown = f"{name} of shape (1 or {num_thetas}, {num}, {len(origin)}) and {dtype}"
            raise refuse(shown, (each.shape, each.dtype))
    on_disk = sum(num_bytes(each.shape, dtype) for each in saved.values()) > memory_limit

    def table(name: str) -> Rows:
        rows = DiskRows(saved[name].file, saved[name].shape, dtype, saved[name].offset)
        return rows if on_disk else MemoryRows(rows.block(slice(None), slice(None)).clone())

    values, banks = table("values"), []
    for k, (log_weight, factor, scale) in enumerate(described):
        centres, scales = table(f"centres-{k}"), None if scale else table(f"scales-{k}")
        try:
            banks.append(gaussian_bank(log_weight, centres, scale, scales, origin, factor))
        except ValueError as error:
            raise refuse("finite centres and positive scales", str(error)) from None
    for rows in spans(num, _BLOCK):
        block = values.block(slice(0, 1), rows)[0].view(-1, num_thetas, per_theta)
        positive = block[..., num_outputs:]  # variances, or probabilities
        if not bool(torch.isfinite(block).all()) or not bool((positive > 0).all()):
            what = "finite predictions, their probabilities or variances positive"
            raise refuse(what, float(positive.min()))
        if not num_outputs and float((block.double().sum(-1) - 1).abs().max()) > 1e-4:
            raise refuse("probabilities that sum to 1", float(block.double().sum(-1).max()))
    of_model = num_thetas, shape, origin, middle, dtype
    kept_in = folder if on_disk else None
    return Store(tuple(banks), values, *of_model, kept_in, (num,)), update, note

"""The gallery as part of the document: pictures with predictive bars, or changes of features in
their own units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from advbayes.report.pictures import UNTOUCHED, Gallery, View, is_image, picture
from advbayes.report.text import clean

MOST_FEATURES = 12


def gallery_of(
    gallery: Gallery,
    class_names: Sequence[str] | None,
    scaling: Mapping[str, Any] | None,
    threat: Mapping[str, Any],
    pictures: dict[str, str],
) -> dict[str, Any]:
    """Examples, in each the predictors, in each the views: untouched, then attacked.

    >>> view = View("MIX", "untouched", torch.zeros(1, 1, 2, 2), torch.tensor([[0.25, 0.75]]))
    >>> found = gallery_of(Gallery(view.x, torch.tensor([1]), (view,)), ("no", "yes"), None, {}, {})
    >>> found["kind"], found["examples"][0]["predictors"][0]["views"][0]["says"]
    ('images', 'yes')
    """
    event = tuple(gallery.x.shape[1:])
    images = is_image(event)
    box = _box(gallery)
    examples = []
    for row in range(len(gallery.x)):
        grouped: dict[str, list[dict[str, Any]]] = {}
        for view in gallery.views:
            shown = _said(gallery, view, row, class_names, scaling)
            change = (view.x[row] - gallery.x[row]).double().flatten()
            shown |= {
                "label": clean(view.label),
                "untouched": view.label == UNTOUCHED,
                "eps": view.eps,
                "l2": float(torch.linalg.vector_norm(change)),
                "linf": float(change.abs().max()),
                "picture": picture(view.x[row], box, pictures) if images else None,
            }
            grouped.setdefault(clean(view.predictor), []).append(shown)
        truth = gallery.y[row]
        example: dict[str, Any] = {
            "index": int(gallery.index[row]),
            "truth": _class(int(truth), class_names)
            if gallery.task == "classification"
            else _target(float(truth.reshape(-1)[0]), scaling),
            "picture": picture(gallery.x[row], box, pictures) if images else None,
            "predictors": [{"name": name, "views": views} for name, views in grouped.items()],
        }
        if not images:
            example["features"] = _features(gallery, row, scaling)
        examples.append(example)
    return {
        "kind": "images" if images else "features",
        "task": gallery.task,
        "shape": list(event),
        "norm": clean(threat.get("norm", "L2")),
        "how_chosen": clean(gallery.how_chosen),
        "classes": _classes(gallery, class_names),
        "examples": examples,
        "raw_units": bool(scaling and scaling.get("std")),
    }


def _box(gallery: Gallery) -> tuple[float, float]:
    """[0, 1] for images that live there, else from the smallest to the largest value shown."""
    low, high = (float(edge) for edge in gallery.x.aminmax())
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    return low, high if high > low else low + 1


def _class(label: int, names: Sequence[str] | None) -> str:
    return clean(names[label], 60) if names is not None and label < len(names) else str(label)


def _classes(gallery: Gallery, names: Sequence[str] | None) -> list[str] | None:
    if gallery.task == "regression" or not gallery.views:
        return None
    return [_class(label, names) for label in range(gallery.views[0].prediction.shape[1])]


def _target(value: float, scaling: Mapping[str, Any] | None) -> float:
    """A target in its own units."""
    if scaling is None or not scaling.get("target_std"):
        return value
    return float(value * scaling["target_std"][0] + scaling["target_mean"][0])


def _said(
    gallery: Gallery,
    view: View,
    row: int,
    names: Sequence[str] | None,
    scaling: Mapping[str, Any] | None,
) -> dict[str, Any]:
    values = view.prediction[row].double()
    if gallery.task == "classification":
        best = int(values.argmax())
        return {
            "says": _class(best, names),
            "class": best,
            "truth_class": int(gallery.y[row]),
            "right": best == int(gallery.y[row]),
            "probabilities": values.tolist(),
        }
    spread = float(values[1]) * (
        scaling["target_std"][0] if scaling and scaling.get("target_std") else 1.0
    )
    return {"mean": _target(float(values[0]), scaling), "spread": spread}


def _features(gallery: Gallery, row: int, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those features that an attack moved most (in the model's units), with value and changes in
    their own units."""
    before = gallery.x[row].double().flatten()
    moves = [
        (view, (view.x[row] - gallery.x[row]).double().flatten())
        for view in gallery.views
        if view.label != UNTOUCHED
    ]
    names = (
        scaling["features"]
        if scaling and len(scaling["features"]) == len(before)
        else [f"feature {i}" for i in range(len(before))]
    )
    mean, std = _moments(scaling, len(before))
    largest = (
        torch.stack([move.abs() for _, move in moves]).amax(0)
        if moves
        else torch.zeros_like(before)
    )
    order = sorted(range(len(before)), key=lambda i: -float(largest[i]))[:MOST_FEATURES]
    top = max(float(largest.max()), 1e-300)
    return {
        "columns": [
            {"predictor": clean(view.predictor), "attack": clean(view.label)} for view, _ in moves
        ],
        "left_out": max(0, len(before) - MOST_FEATURES),
        "rows": [
            {
                "name": names[i],
                "value": _raw(float(before[i]), float(mean[i]), float(std[i])),
                "changes": [float(move[i] * std[i]) for _, move in moves],
                "standardised": [float(move[i]) for _, move in moves],
                "share": [float(move[i]) / top for _, move in moves],
            }
            for i in order
        ],
    }


def _raw(value: float, mean: float, std: float) -> float:
    """A feature in its own unit; what is left of a zero after standardising it in float32 is zero.

    >>> _raw(-0.5000001, 1.0, 2.0), _raw(1.0, 1.0, 2.0)
    (0.0, 3.0)
    """
    raw = value * std + mean
    return 0.0 if abs(raw) <= 1e-6 * abs(mean) else raw


def _moments(scaling: Mapping[str, Any] | None, num: int) -> tuple[Tensor, Tensor]:
    if scaling is None or not scaling.get("std") or len(scaling["std"]) != num:
        return torch.zeros(num, dtype=torch.float64), torch.ones(num, dtype=torch.float64)
    return torch.tensor(scaling["mean"], dtype=torch.float64), torch.tensor(
        scaling["std"], dtype=torch.float64
    )

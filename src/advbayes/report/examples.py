"""The gallery as part of the document: pictures with bars, or changes of features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from advbayes.report.pictures import UNTOUCHED, Gallery, View, is_image, picture
from advbayes.report.text import clean

MOST_FEATURES = 12


class Units(NamedTuple):
    """From the model's units to those of the data; the model's are kept where nothing is known."""

    features: Sequence[str]
    mean: Sequence[float]
    std: Sequence[float]
    target_mean: float
    target_std: float

    @staticmethod
    def of(scaling: Mapping[str, Any] | None, num: int) -> Units:
        """As the document has them, for `num` features."""
        known = {name: value for name, value in (scaling or {}).items() if value}
        fitting = {name: value for name, value in known.items() if len(value) == num}
        return Units(
            fitting.get("features", [f"feature {i}" for i in range(num)]),
            fitting.get("mean", [0.0] * num),
            fitting.get("std", [1.0] * num),
            known.get("target_mean", [0.0])[0],
            known.get("target_std", [1.0])[0],
        )

    def target(self, value: float) -> float:
        """A target in its own unit."""
        return value * self.target_std + self.target_mean


def gallery_of(
    gallery: Gallery,
    class_names: Sequence[str] | None,
    scaling: Mapping[str, Any] | None,
    threat: Mapping[str, Any],
    pictures: dict[str, str],
) -> dict[str, Any]:
    """Examples, in each the predictors, in each the views: untouched, then attacked.

    >>> view = View("MIX", "untouched", torch.zeros(1, 1, 2, 2), torch.tensor([[0.25, 0.75]]))
    >>> made = gallery_of(Gallery(view.x, torch.tensor([1]), (view,)), ("no", "yes"), None, {}, {})
    >>> made["kind"], made["examples"][0]["predictors"][0]["views"][0]["says"]
    ('images', 'yes')
    """
    event = tuple(gallery.x.shape[1:])
    images = is_image(event)
    low, high = (float(edge) for edge in gallery.x.aminmax())
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    box = (low, high if high > low else low + 1)  # what is black and what is white
    units = Units.of(scaling, gallery.x[0].numel() if len(gallery.x) else 0)
    classes = _classes(gallery, class_names)
    examples = []
    for row, x in enumerate(gallery.x):
        grouped: dict[str, list[dict[str, Any]]] = {}
        for view in gallery.views:
            change = (view.x[row] - x).double().flatten()
            shown = {
                "label": clean(view.label),
                "untouched": view.label == UNTOUCHED,
                "eps": view.eps,
                "l2": float(torch.linalg.vector_norm(change)),
                "linf": float(change.abs().max()),
                "picture": picture(view.x[row], box, pictures) if images else None,
                **_answer(gallery, view, row, classes, units),
            }
            grouped.setdefault(clean(view.predictor), []).append(shown)
        truth = gallery.y[row]
        example: dict[str, Any] = {
            "index": int(gallery.index[row]),
            "truth": _class(int(truth), class_names)
            if gallery.task == "classification"
            else units.target(float(truth.reshape(-1)[0])),
            "picture": picture(x, box, pictures) if images else None,
            "predictors": [{"name": name, "views": views} for name, views in grouped.items()],
        }
        if not images:
            example["features"] = _features(gallery, row, units)
        examples.append(example)
    return {
        "kind": "images" if images else "features",
        "task": gallery.task,
        "shape": list(event),
        "norm": clean(threat.get("norm", "L2")),
        "how_chosen": clean(gallery.how_chosen),
        "classes": classes,
        "examples": examples,
        "raw_units": bool(scaling and scaling.get("std")),
    }


def _class(label: int, names: Sequence[str] | None) -> str:
    return clean(names[label], 60) if names is not None and label < len(names) else str(label)


def _classes(gallery: Gallery, names: Sequence[str] | None) -> list[str] | None:
    if gallery.task == "regression" or not gallery.views:
        return None
    return [_class(label, names) for label in range(gallery.views[0].prediction.shape[1])]


def _answer(
    gallery: Gallery, view: View, row: int, classes: Sequence[str] | None, units: Units
) -> dict[str, Any]:
    values = view.prediction[row].double()
    if classes is None:
        spread = float(values[1]) * units.target_std
        return {"mean": units.target(float(values[0])), "spread": spread}
    best, truth = int(values.argmax()), int(gallery.y[row])
    return {
        "says": classes[best],
        "class": best,
        "truth_class": truth,
        "right": best == truth,
        "probabilities": values.tolist(),
    }


def _features(gallery: Gallery, row: int, units: Units) -> dict[str, Any]:
    """The features that an attack moved most, in their own units."""
    before = gallery.x[row].double().flatten()
    attacked = [view for view in gallery.views if view.label != UNTOUCHED]
    moves = [(view.x[row] - gallery.x[row]).double().flatten() for view in attacked]
    largest = torch.stack([torch.zeros_like(before), *(move.abs() for move in moves)]).amax(0)
    order = sorted(range(len(before)), key=lambda i: -float(largest[i]))[:MOST_FEATURES]
    top = max(float(largest.max()), 1e-300)
    return {
        "columns": [
            {"predictor": clean(view.predictor), "attack": clean(view.label)} for view in attacked
        ],
        "left_out": max(0, len(before) - MOST_FEATURES),
        "rows": [
            {
                "name": units.features[i],
                "value": _raw(float(before[i]), units.mean[i], units.std[i]),
                "changes": [float(move[i] * units.std[i]) for move in moves],
                "standardised": [float(move[i]) for move in moves],
                "share": [float(move[i]) / top for move in moves],
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

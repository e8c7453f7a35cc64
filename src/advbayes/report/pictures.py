"""The gallery: inputs as they were and as attacks left them, as pictures or as changed features."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from advbayes import checks
from advbayes.likelihoods import predicts_classes
from advbayes.report.text import clean
from advbayes.types import Predictor

UNTOUCHED = "untouched"
MOST_FEATURES = 12


@dataclass(frozen=True, eq=False)
class View:
    """What one predictor says of all inputs of the gallery, untouched or as an attack left them.

    `prediction` holds class probabilities (G, C), or mean and standard deviation (G, 2) for
    regression.
    """

    predictor: str
    label: str
    x: Tensor  # (G, *event)
    prediction: Tensor
    eps: float | None = None

    def __post_init__(self) -> None:
        if self.prediction.ndim != 2 or len(self.prediction) != len(self.x):
            wanted = f"prediction must have one row for each of the {len(self.x)} inputs"
            raise checks.InputError(f"{wanted}, got {checks.describe(self.prediction)}")


@dataclass(frozen=True, eq=False)
class Gallery:
    """A few examples with all views of them; `index` are their numbers in the test set."""

    x: Tensor  # (G, *event)
    y: Tensor  # (G,)
    views: tuple[View, ...] = field(default=())
    task: str = "classification"
    index: tuple[int, ...] = ()
    how_chosen: str = "the first of the test set, whatever came of them"

    def __post_init__(self) -> None:
        checks.choice("task", self.task, ("classification", "regression"))
        if len(self.y) != len(self.x):
            wanted = f"y must hold one target for each of the {len(self.x)} inputs"
            raise checks.InputError(f"{wanted}, got {checks.describe(self.y)}")
        if not self.index:
            object.__setattr__(self, "index", tuple(range(len(self.x))))
        for view in self.views:
            if view.x.shape != self.x.shape:
                wanted = f"a view's x must have shape {tuple(self.x.shape)}"
                raise checks.InputError(f"{wanted}, got {checks.describe(view.x)}")


@torch.no_grad()
def make_gallery(
    predictors: Predictor | Mapping[str, Predictor],
    x: Tensor,  # (N, *event)
    y: Tensor,  # (N,)
    # attack -> x_adv, or attack -> predictor -> x_adv
    attacked: Mapping[str, Tensor | Mapping[str, Tensor]],
    *,
    eps: float | None = None,
    num: int = 6,
) -> Gallery:
    """The first `num` examples, untouched and under each attack, with every prediction.

    >>> from torch.distributions import Categorical
    >>> x = torch.tensor([[2.0, 0.0]])
    >>> gallery = make_gallery(
    ...     lambda x: Categorical(logits=x), x, torch.tensor([0]), {"PGD": x - 3}
    ... )
    >>> [view.label for view in gallery.views]
    ['untouched', 'PGD']
    """
    x, y = x[:num].detach().cpu(), y[:num].detach().cpu()
    named = predictors if isinstance(predictors, Mapping) else {"predict": predictors}
    views, task = [], "classification"
    for name, predict in named.items():
        found = {
            attack: arrays.get(name) if isinstance(arrays, Mapping) else arrays
            for attack, arrays in attacked.items()
        }
        states = {UNTOUCHED: x} | {
            attack: x_adv[: len(x)].detach().cpu()
            for attack, x_adv in found.items()
            if x_adv is not None
        }
        for label, state in states.items():
            prediction = predict(state)
            if predicts_classes(prediction):
                answer = prediction.probs
            else:
                task = "regression"
                moments = (prediction.mean, prediction.stddev)
                answer = torch.stack([each.reshape(len(x), -1)[:, 0] for each in moments], 1)
            budget = None if label == UNTOUCHED else eps
            views.append(View(name, label, state, answer.detach().cpu(), budget))
    return Gallery(x, y, tuple(views), task)


def is_image(event: tuple[int, ...]) -> bool:
    """Grey or coloured pictures, (H, W) or (C, H, W).

    >>> is_image((1, 8, 8)), is_image((13,))
    (True, False)
    """
    return (len(event) == 3 and event[0] in (1, 3)) or (len(event) == 2 and min(event) > 1)


def png(image: Tensor, box: tuple[float, float] = (0.0, 1.0)) -> bytes:
    """An image (C, H, W) or (H, W) as a PNG file, the same bytes every time.

    >>> png(torch.zeros(1, 2, 2))[:4]
    b'\\x89PNG'
    """
    from PIL import Image

    pixels = _pixels(image, box).permute(1, 2, 0).squeeze(-1).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG", optimize=True)
    return file.getvalue()


def _pixels(image: Tensor, box: tuple[float, float]) -> Tensor:  # (C, H, W), bytes
    low, high = box
    image = image[None] if image.ndim == 2 else image
    return (255 * (image.double() - low) / (high - low)).round().clamp(0, 255).to(torch.uint8)


def picture(image: Tensor, box: tuple[float, float], pictures: dict[str, str]) -> str:
    """Keep an image in `pictures` as a data address, by the SHA-256 of its pixels."""
    name = hashlib.sha256(_pixels(image, box).contiguous().numpy().tobytes()).hexdigest()
    pictures[name] = f"data:image/png;base64,{base64.b64encode(png(image, box)).decode()}"
    return name


class Units(NamedTuple):
    """From the model's units to those of the data; the model's are kept where nothing is known."""

    features: Sequence[str]
    mean: Sequence[float]
    std: Sequence[float]
    target_mean: Sequence[float] = (0.0,)
    target_std: Sequence[float] = (1.0,)

    @staticmethod
    def of(scaling: Mapping[str, Any] | None, num: int) -> Units:
        """As the document has them, for `num` features."""
        own = Units([f"feature {i}" for i in range(num)], [0.0] * num, [1.0] * num)
        known = {name: value for name, value in (scaling or {}).items() if value}
        of_target = ("target_mean", "target_std")
        fits = {name: known[name] for name in known if name in of_target or len(known[name]) == num}
        return own._replace(**fits)

    def target(self, value: float) -> float:
        """A target in its own unit."""
        return value * self.target_std[0] + self.target_mean[0]


def gallery_of(
    gallery: Gallery,
    class_names: Sequence[str],
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
        truth = float(gallery.y[row].reshape(-1)[0])
        is_class = gallery.task == "classification"
        example: dict[str, Any] = {
            "index": int(gallery.index[row]),
            "truth": _class(int(truth), class_names) if is_class else units.target(truth),
            "picture": picture(x, box, pictures) if images else None,
            "predictors": [{"name": name, "views": views} for name, views in grouped.items()],
        }
        if not images:
            example["features"] = _features(gallery, row, units)
        examples.append(example)
    several = ""
    if gallery.task == "regression" and gallery.y[0].numel() > 1:
        several = f"; of the {gallery.y[0].numel()} targets, the first"
    return {
        "kind": "images" if images else "features",
        "task": gallery.task,
        "shape": list(event),
        "norm": clean(threat.get("norm", "L2")),
        "how_chosen": clean(gallery.how_chosen) + several,
        "classes": classes,
        "examples": examples,
        "raw_units": bool(scaling and scaling.get("std")),
    }


def _class(label: int, names: Sequence[str]) -> str:
    return clean(names[label], 60) if label < len(names) else str(label)


def _classes(gallery: Gallery, names: Sequence[str]) -> list[str] | None:
    if gallery.task == "regression" or not gallery.views:
        return None
    return [_class(label, names) for label in range(gallery.views[0].prediction.shape[1])]


def _answer(
    gallery: Gallery, view: View, row: int, classes: Sequence[str] | None, units: Units
) -> dict[str, Any]:
    values = view.prediction[row].double()
    if classes is None:
        spread = float(values[1]) * units.target_std[0]
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

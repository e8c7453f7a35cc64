"""Inputs as they were and as attacks left them: the gallery."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from advbayes import checks
from advbayes.likelihoods import predicts_classes
from advbayes.types import Predictor

UNTOUCHED = "untouched"


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
    named = dict(predictors) if isinstance(predictors, Mapping) else {"predict": predictors}
    x, y = x[:num].detach().cpu(), y[:num].detach().cpu()
    views, task = [], "classification"
    for name, predict in named.items():
        states: dict[str, Tensor] = {UNTOUCHED: x}
        for attack, arrays in attacked.items():
            x_adv = arrays.get(name) if isinstance(arrays, Mapping) else arrays
            if x_adv is not None:
                states[attack] = x_adv[: len(x)].detach().cpu()
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

"""Predictors for others' attacks: Foolbox, AutoAttack, ART."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution

from advbayes import checks
from advbayes.attacks.balls import L2, Ball, Linf
from advbayes.types import Predictor


class PredictorModule(nn.Module):
    """A Predictor as a torch module: log-probabilities of the classes, or the mean.

    What another library was told, it cannot check: `num_classes` and `ndim` (of x) are checked at
    every call.

    >>> PredictorModule(lambda x: CategoricalDistribution(logits=x))(torch.zeros(1, 2))
    tensor([[-0.6931, -0.6931]])
    """

    def __init__(
        self, predict: Predictor, *, num_classes: int | None = None, ndim: int | None = None
    ) -> None:
        super().__init__()
        self.predict = predict
        self.num_classes, self.ndim = num_classes, ndim
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.ndim is not None and x.ndim != self.ndim:
            raise checks.InputError(
                f"x must have {self.ndim} dimensions, (B, channels, height, width), for this "
                f"library's attacks, got "
                f"{checks.describe(x)}: reshape x, and let the predictor flatten it"
            )
        prediction = self.predict(x)
        if not isinstance(prediction, CategoricalDistribution):
            if self.num_classes is not None:
                raise checks.InputTypeError(
                    f"predict must predict {self.num_classes} classes, got "
                    f"{type(prediction).__name__}"
                )
            return prediction.mean
        if self.num_classes is not None and prediction.logits.shape[-1] != self.num_classes:
            raise checks.InputError(
                f"num_classes must be the number that predict knows, "
                f"{prediction.logits.shape[-1]}, got {self.num_classes}"
            )
        return prediction.logits


def to_foolbox(
    predict: Predictor,
    bounds: tuple[float, float] = (0.0, 1.0),
    *,
    device: torch.device | str = "cpu",
) -> Any:
    """A `foolbox.PyTorchModel`. Foolbox's default step size is weak: pass
    `rel_stepsize=2.5 / steps` to its attacks.

    >>> to_foolbox(lambda x: CategoricalDistribution(logits=x)).bounds  # doctest: +SKIP
    Bounds(lower=0.0, upper=1.0)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its imports use old scipy names
        from foolbox.models.pytorch import PyTorchModel
    return PyTorchModel(PredictorModule(predict), bounds=bounds, device=torch.device(device))


def to_autoattack(
    predict: Predictor,
    ball: Ball,
    num_classes: int,
    *,
    version: str = "standard",
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Any:
    """A `pyautoattack.AutoAttack` for the ball; its `run_standard_evaluation(x, y)` gives a pair:
    the adversarial examples, and what is predicted for them.

    AutoAttack knows images (B, channels, height, width) in [0, 1] and plain balls only. It aims at
    nine wrong classes: with fewer, at all of them, and below four classes its targeted losses do
    not exist, so that APGD-CE, FAB and Square remain.

    >>> from advbayes import Linf
    >>> predict = lambda x: CategoricalDistribution(logits=x)
    >>> to_autoattack(predict, Linf(0.1, box=(0, 1)), 5).norm  # doctest: +SKIP
    'Linf'
    """
    checks.count("num_classes", num_classes, low=2)
    norm = {L2: "L2", Linf: "Linf"}.get(type(ball))
    plain = norm is not None and ball.scale is None and ball == ball.freed()
    low, high = map(torch.as_tensor, (-1, -1) if ball.box is None else ball.box)
    if not plain or not bool((low == 0).all() and (high == 1).all()):
        raise checks.InputError(
            f"ball must be L2 or Linf with box=(0, 1) and neither scale nor mask nor indicators "
            f"for AutoAttack, got {ball}"
        )
    from pyautoattack import AutoAttack

    module = PredictorModule(predict, num_classes=num_classes, ndim=4)
    chosen: dict[str, Any] = {"version": version}
    if num_classes < 4:
        chosen = {"version": "custom", "attacks": ["apgd-ce", "fab", "square"]}
    where = torch.device(device)
    attack = AutoAttack(module, norm=norm, eps=ball.eps, seed=seed, device=where, **chosen)
    for part in (attack.apgd_targeted, attack.fab):
        part.n_target_classes = min(9, num_classes - 1)
    return attack


def to_art(
    predict: Predictor,
    input_shape: tuple[int, ...],
    num_classes: int | None = None,
    *,
    box: tuple[float, float] | None = None,
    device: str = "cpu",
) -> Any:
    """An ART `PyTorchClassifier`, or without `num_classes` a `PyTorchRegressor`, whose y must have
    shape (n,).

    >>> to_art(lambda x: CategoricalDistribution(logits=x), (3,), 3).nb_classes  # doctest: +SKIP
    3
    """
    shared = {
        "model": PredictorModule(predict, num_classes=num_classes),
        "input_shape": tuple(input_shape),
        "clip_values": box,
        "device_type": device,
    }
    if num_classes is None:
        from art.estimators.regression.pytorch import PyTorchRegressor

        return PyTorchRegressor(loss=nn.MSELoss(), **shared)
    from art.estimators.classification import PyTorchClassifier

    return PyTorchClassifier(
        loss=nn.CrossEntropyLoss(),
        nb_classes=checks.count("num_classes", num_classes, low=2),
        **shared,
    )

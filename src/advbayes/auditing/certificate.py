"""Certified radii against the numbers they are to back: what level A rests on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from advbayes import checks
from advbayes.auditing.case import Case
from advbayes.evaluation.inputs import Task


def radii_of(certified: Any, num: int, task: Task) -> Tensor:  # (num,) float64
    """Certified radii, one for each example of the data.

    >>> radii_of(torch.tensor([0.5, float("nan")]), 2, "classification")
    Traceback (most recent call last):
    ...
    ValueError: certified must be finite, got 1 NaN and 0 infinite values in a torch.float64 tensor of shape (2,) on cpu
    """
    if task != "classification":
        raise ValueError(f"certified radii say that a class does not change: they have no meaning in {task}")
    if not isinstance(certified, (Tensor, np.ndarray)):
        raise TypeError(
            f"certified must be a tensor or an array of radii in the ball's norm (of Certificates: their .radii), "
            f"got {checks.describe(certified)}"
        )
    radii = torch.as_tensor(certified)
    if radii.dtype == torch.bool or radii.is_complex():
        raise TypeError(f"certified must hold radii, got {checks.describe(radii)}")
    if tuple(radii.shape) not in ((num,), (num, 1)):
        raise ValueError(f"certified must hold one radius for each of the {num} examples of x, got {checks.describe(radii)}")
    radii = checks.finite("certified", radii.detach().cpu().double().reshape(num))
    if bool((radii < 0).any()):
        raise ValueError(f"certified must hold radii >= 0, got a smallest one of {float(radii.min()):g}")
    return radii


def certificate(case: Case) -> tuple[bool, dict[str, Any]]:
    """Whether the certificate backs the number that is claimed, and the figures: the certified accuracy first of all.

    It does if some right example is certified at eps, no attack broke one that is, and the certified accuracy (right, and a
    radius of at least eps) is no less than the worst-case accuracy claimed, or else measured here.
    """
    if case.radii is None:
        return False, {}
    holds = (case.radii >= case.ball.eps) & (case.clean["correct"] > 0.5)
    left = case.worst()
    share = float(holds.double().mean())
    broken = int((holds & (left["correct"] < 0.5)).sum())
    figures: dict[str, Any] = {
        "certified accuracy": share,
        "certified at eps": float(case.ball.eps),
        "certified but broken": broken,
    }
    backed = case.value(left)
    if case.claim is not None and case.claim.worst is not None:
        backed = figures["claimed worst accuracy"] = float(case.claim.worst.double().mean())
    return share > 0 and broken == 0 and share >= backed - 1e-9, figures

"""Standardisation, fitted on training rows, kept with the model; eps in either unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advbayes.checks import InputError, InputTypeError, describe, finite

_FIELDS = ("mean", "std", "target_mean", "target_std")


@dataclass(frozen=True, eq=False)
class Standardize:
    """`z = (x - mean) / std` for each feature, and the same for a regression target.

    A constant feature has no scale of its own: its std is set to 1, so that it maps to 0 and back.

    >>> x, y = torch.tensor([[1.0, 7.0], [5.0, 7.0]]), torch.tensor([10.0, 30.0])
    >>> scaling = Standardize.fit(x, y)
    >>> scaling.transform(x), scaling.inverse(torch.tensor([0.5, 0.0]))
    (tensor([[-1.,  0.],
            [ 1.,  0.]]), tensor([4., 7.]))
    >>> scaling.transform_target(y), scaling.inverse_target(torch.tensor(0.5))
    (tensor([-1.,  1.]), tensor(25.))
    >>> scaling.raw_eps(0.5), scaling.standardised_eps(0.5)
    (tensor([1.0000, 0.5000]), tensor([0.2500, 0.5000]))
    >>> Standardize.from_dict({"mean": [0.0], "std": [2.0]}).to_json()
    {'mean': [0.0], 'std': [2.0]}
    """

    mean: Tensor  # (*event)
    std: Tensor  # (*event), positive
    target_mean: Tensor | None = None  # () or (D,)
    target_std: Tensor | None = None  # () or (D,), positive

    def __post_init__(self) -> None:
        _check("mean", self.mean, "std", self.std)
        if self.target_mean is not None and self.target_std is not None:
            _check("target_mean", self.target_mean, "target_std", self.target_std)
        elif self.target_mean is not None or self.target_std is not None:
            raise InputError("target_mean and target_std must be given together or not at all")

    @classmethod
    def fit(
        cls,
        x: Tensor,  # (N, *event)
        y: Tensor | None = None,  # (N,) or (N, D); absent: the target is not scaled
    ) -> Standardize:
        """Means and (biased) standard deviations of the rows, computed in double precision and kept
        in the rows' own (float32 at least)."""
        mean, std = _moments("x", x)
        if y is None:
            return cls(mean, std)
        if len(y) != len(x):
            raise InputError(f"y must have as many rows as x ({len(x)})", got=y)
        return cls(mean, std, *_moments("y", y))

    def transform(self, x: Tensor) -> Tensor:
        """Raw to standardised features; differentiable."""
        return _scaled("x", x, self.mean, self.std)

    def inverse(self, z: Tensor) -> Tensor:
        """Standardised to raw features; differentiable."""
        return _unscaled("z", z, self.mean, self.std)

    def transform_target(self, y: Tensor) -> Tensor:
        """Raw to standardised targets; unchanged where the target is not scaled."""
        if self.target_mean is None or self.target_std is None:
            return y
        return _scaled("y", y, self.target_mean, self.target_std)

    def inverse_target(self, z: Tensor) -> Tensor:
        """Standardised to raw targets; unchanged where the target is not scaled."""
        if self.target_mean is None or self.target_std is None:
            return z
        return _unscaled("z", z, self.target_mean, self.target_std)

    def raw_eps(self, eps: float | Tensor) -> Tensor:  # (*event)
        """A radius of standardised units in each feature's own: for an Linf ball the half-widths of
        the box, for an L2 ball the half-axes of the ellipsoid."""
        return eps * self.std

    def standardised_eps(self, raw: float | Tensor) -> Tensor:  # (*event)
        """What a radius of `raw` units of each feature is in standardised units."""
        return raw / self.std

    def to_dict(self) -> dict[str, Tensor]:
        """The tensors by name, without those that are absent."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """The same as nested lists; `from_dict` makes float32 of them, which survives exactly."""
        return {name: value.tolist() for name, value in self.to_dict().items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Standardize:
        """Inverse of `to_dict` or `to_json`."""
        unknown = sorted(set(values) - set(_FIELDS))
        missing = sorted({"mean", "std"} - set(values))
        if unknown or missing:
            wanted = f"scaling must have {', '.join(_FIELDS)}"
            raise InputError(f"{wanted}, got unknown {unknown} and missing {missing}")
        tensors = {}
        for name, value in values.items():
            try:
                given = torch.as_tensor(value)
                tensors[name] = given if given.is_floating_point() else given.float()
            except (TypeError, ValueError, RuntimeError, OverflowError):
                raise InputTypeError(f"scaling {name} must be numbers", got=value) from None
        return cls(**tensors)


def _check(mean_name: str, mean: Tensor, std_name: str, std: Tensor) -> None:
    for name, value in ((mean_name, mean), (std_name, std)):
        if not torch.is_floating_point(value):
            raise InputTypeError(f"{name} must be a floating tensor", got=value)
        finite(name, value)
    if mean.shape != std.shape:
        wanted = f"{std_name} must have {mean_name}'s shape"
        raise InputError(f"{wanted}, got {describe(std)} for {describe(mean)}")
    if not bool((std > 0).all()):
        raise InputError(f"{std_name} must be positive, got a smallest value of {std.min():g}")


def _moments(name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    if rows.ndim < 1 or rows.numel() == 0:
        raise InputError(f"{name} must have at least one row and one column", got=rows)
    exact = finite(name, rows).double()
    mean, std = exact.mean(0), exact.std(0, correction=0)
    # Rounding leaves a constant column a spread of about 1e-16 of its value: that is no scale.
    constant = std <= 1e-12 * mean.abs().clamp_min(1e-300)
    spread = torch.where(constant, torch.ones_like(std), std)
    dtype = torch.float64 if rows.dtype is torch.float64 else torch.float32
    return mean.to(dtype), spread.to(dtype)


def _scaled(name: str, value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    value = _matched(name, value, mean)
    return (value - mean.to(value)) / std.to(value)


def _unscaled(name: str, value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    value = _matched(name, value, mean)
    return value * std.to(value) + mean.to(value)


def _matched(name: str, value: Tensor, mean: Tensor) -> Tensor:
    """The value, of the fitted shape; integers as floating-point numbers, which means are."""
    if value.shape[value.ndim - mean.ndim :] != mean.shape or value.ndim < mean.ndim:
        raise InputError(f"{name} must end in the fitted shape {tuple(mean.shape)}", got=value)
    return value if value.is_floating_point() else value.to(mean.dtype)

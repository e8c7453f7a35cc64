"""What an adversary may do to an input: {x + d : norm(d / scale) <= eps, x + d in the box, d = 0
where masked or missing} (SM-5)."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from advbayes import checks
from advbayes.seeds import SharedStarts, normal_like

Bound = float | Tensor  # a Tensor broadcasts against the event
_ROUNDS = 12  # of the projection onto a ball and a box; three or four are the rule


@dataclass(frozen=True, eq=False)
class Ball(ABC):
    """What balls share: `eps` in units of `scale`, `box` (low, high), `mask` (True: may move).

    `indicators` are for tables with missing values: (feature, indicator, threshold) says that the
    feature is imputed, and cannot be touched, in every example whose indicator exceeds the
    threshold. Nobody can touch an indicator.
    """

    eps: float
    box: tuple[Bound, Bound] | None = None
    # per-feature units of the norm, broadcastable against the event
    scale: Tensor | float | None = None
    mask: Tensor | None = None  # bool, broadcastable against the event
    indicators: tuple[tuple[int, int, float], ...] | None = None  # for events of one axis

    def __post_init__(self) -> None:
        checks.number("eps", self.eps, low=0)
        if self.box is not None:
            if not isinstance(self.box, (tuple, list)) or len(self.box) != 2:
                raise checks.InputError("box must be a pair (low, high)", got=self.box)
            object.__setattr__(self, "box", tuple(_bound("box", side) for side in self.box))
            low, high = (torch.as_tensor(side, dtype=torch.float64) for side in self.box)
            # a feature may be constant, not all; NaN is neither
            ordered = bool((low <= high).all()) and bool((low < high).any())
            if not ordered:
                raise checks.InputError(
                    f"box must be a pair (low, high) with low < high, got {_short(self.box)}"
                )
        if self.scale is not None:
            object.__setattr__(self, "scale", _bound("scale", self.scale))
            scale = torch.as_tensor(self.scale)
            if not bool(torch.isfinite(scale).all()) or not bool((scale > 0).all()):
                raise checks.InputError("scale must be finite and positive", got=self.scale)
        if self.mask is not None and getattr(self.mask, "dtype", None) is not torch.bool:
            raise checks.InputTypeError("mask must be a bool tensor (True: moves)", got=self.mask)
        if self.indicators is not None:
            object.__setattr__(self, "indicators", _triples(self.indicators))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            map(_same, vars(self).values(), vars(other).values())
        )

    def __hash__(self) -> int:
        return hash((type(self), self.eps))

    def __repr__(self) -> str:
        rest = {name: value for name, value in vars(self).items() if name != "eps"}
        shown = [f"{name}={_short(value)}" for name, value in rest.items() if value is not None]
        return f"{type(self).__name__}({', '.join([f'{self.eps:g}', *shown])})"

    def check(self, x: Tensor) -> None:
        """Refuse data outside the box, and a scale, mask or box of another shape."""
        sides = () if self.box is None else (("box", self.box[0]), ("box", self.box[1]))
        for name, value in (("scale", self.scale), ("mask", self.mask), *sides):
            if isinstance(value, Tensor) and value.ndim:
                try:
                    torch.broadcast_to(value, x.shape[1:])
                except RuntimeError:
                    raise checks.InputError(
                        f"{name} must broadcast against the event shape {tuple(x.shape[1:])}",
                        got=value,
                    ) from None
        if self.indicators is not None:
            last = max(place for triple in self.indicators for place in triple[:2])
            if x.ndim != 2 or last >= x.shape[1]:
                raise checks.InputError(
                    f"indicators must name features of a table, up to {last}, got examples of "
                    f"shape {tuple(x.shape[1:])}"
                )
        if self.box is not None:
            low, high = self.box
            outside = (x < _on(low, x)) | (x > _on(high, x))
            if checks.known(outside.any(), otherwise=False):
                raise checks.InputError(
                    f"box must contain the data, got box {_short(self.box)} and x from "
                    f"{float(x.min()):g} to {float(x.max()):g}"
                )

    def _unit(self, x: Tensor) -> Tensor | float:
        """The length of one unit of the norm in each feature; zero where masked."""
        unit = self.units(x)
        return unit if self.mask is None else unit * self.mask.to(device=x.device, dtype=x.dtype)

    def reach(self, x: Tensor) -> Tensor | None:
        """What may be touched of each example, bool and broadcastable against x; None: all of it.

        >>> ball = L2(1.0, indicators=((0, 2, 0.5),))  # column 2 says where column 0 is missing
        >>> ball.reach(torch.tensor([[7.0, 1.0, 0.0], [5.0, 1.0, 1.0]]))
        tensor([[ True,  True, False],
                [False,  True, False]])
        """
        mask = None if self.mask is None else self.mask.to(x.device)
        if self.indicators is None:
            return mask
        where, above = list(range(x.shape[-1])), [math.inf] * x.shape[-1]
        for feature, indicator, threshold in self.indicators:
            where[feature], above[feature], above[indicator] = indicator, threshold, -math.inf
        known = x.detach()[..., where] <= torch.tensor(above, dtype=x.dtype, device=x.device)
        return known if mask is None else known & mask

    def freed(self) -> Self:
        """The same ball, in which everything may be touched."""
        return replace(self, mask=None, indicators=None)

    def within_reach(self, d: Tensor, x: Tensor) -> Tensor:
        """d, zero where x may not be touched."""
        reach = self.reach(x)
        return d if reach is None else torch.where(reach, d, torch.zeros_like(d))

    def units(self, x: Tensor) -> Tensor | float:
        """`scale` as x has it, 1 where there is none."""
        return 1.0 if self.scale is None else _on(self.scale, x)

    def _scaled(self, d: Tensor) -> Tensor:
        """d in units of the norm."""
        return d if self.scale is None else d / _on(self.scale, d)

    def clip(self, x: Tensor) -> Tensor:
        """Into the box."""
        if self.box is None:
            return x
        low, high = self.box
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            return torch.minimum(torch.maximum(x, _on(low, x)), _on(high, x))
        return x.clamp(low, high)

    def unblocked(self, gradient: Tensor, point: Tensor) -> Tensor:
        """The gradient without what is imputed or pushes against the box: no such step is kept."""
        if self.indicators is not None:
            gradient = self.within_reach(gradient, point)
        if self.box is None:
            return gradient
        low, high = (_on(side, point) for side in self.box)
        # Signs and products in place of comparisons and where, which take five to ten times as
        # long.
        below, above = (point - low).sign().clamp_min(0.0), (high - point).sign().clamp_min(0.0)
        return gradient.clamp_max(0.0) * below + gradient.clamp_min(0.0) * above

    def project(
        self,
        x_adv: Tensor,  # (B, *event)
        x: Tensor,  # (B, *event), inside the box
    ) -> Tensor:
        """The nearest point of the ball around x and the box together."""
        if _is_coarse(x):
            return _rounded_towards(x, self.project(x_adv.float(), x.float()))
        d = self.within_reach(x_adv - x, x)
        return self.shifted(x, self._shrink(d, x))

    def shifted(self, x: Tensor, d: Tensor) -> Tensor:
        """x + d in the box, for d within the ball; rounded towards x where it would leave the ball.

        Rounding matters where x is large beside eps: years, kelvins, pixels up to 255.
        """
        if _is_coarse(x):
            wide = x.float()
            return _rounded_towards(x, self.shifted(wide, self._shrink(d.float(), wide)))
        point = self.clip(x + d)
        with torch.no_grad():
            moved = point - x
            outside = self.norm(moved) > self.eps * (1 + 1e-6)
            if not checks.known(outside.any(), otherwise=False):
                return point
            nearer = torch.where(moved.abs() > d.abs(), torch.nextafter(point, x), point)
            back = torch.where(per_row(outside, x), nearer, point) - point
        return point + back

    @abstractmethod
    def norm(self, d: Tensor) -> Tensor:
        """norm(d / scale) of each example, (B,)."""

    @abstractmethod
    def _shrink(self, d: Tensor, x: Tensor) -> Tensor:
        """The nearest move within the ball, up to a last clip into the box."""

    @abstractmethod
    def ascend(self, gradient: Tensor, step: float | Tensor) -> Tensor:
        """argmax <gradient, d> over norm(d / scale) <= step: the steepest move; 0 where it is 0."""

    @abstractmethod
    def _offsets(self, x: Tensor, num: int, generator: torch.Generator | None) -> Tensor:
        """Moves drawn uniformly from the norm ball, of x's shape; `num` of them, x's rows or 1."""

    def random(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Points drawn uniformly from the norm ball around x, then clipped to the box."""
        if isinstance(generator, SharedStarts) and generator.num_rows == len(x):
            return self.shifted(x, self._offsets(x, 1, generator.start()).expand_as(x))
        return self.shifted(x, self._offsets(x, len(x), generator))

    def sphere(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Points drawn from the edge of the ball (L2: every direction alike in units of the norm;
        Linf: its corners), then moved into the box; nothing moves where masked.

        >>> Linf(0.5, scale=2.0).sphere(torch.zeros(1, 3)).abs()
        tensor([[1., 1., 1.]])
        """
        noise = self.within_reach(self._scaled(normal_like(x, generator)), x)
        return self.project(x + self.ascend(noise, self.eps), x)

    def contains(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """(B,) bool: finite, within eps (1 + 1e-5) + 1e-7 and the box, unmoved where masked."""
        inside = self.clip(x_adv) == x_adv
        if _is_coarse(x):
            x_adv, x = x_adv.float(), x.float()
        d = x_adv - x
        near = self.norm(d) <= self.eps * (1 + 1e-5) + 1e-7
        fine = near & torch.isfinite(x_adv).flatten(1).all(1) & inside.flatten(1).all(1)
        reach = self.reach(x)
        if reach is not None:
            fine &= (reach | (d == 0)).flatten(1).all(1)
        return fine


@dataclass(frozen=True, eq=False, repr=False)
class L2(Ball):
    """Euclidean ball.

    >>> ball = L2(1.0, box=(0, 1))
    >>> ball.project(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0]]))
    tensor([[0.6000, 0.8000]])
    """

    def norm(self, d: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(self._scaled(d).flatten(1), dim=1)
        return norm

    def _shrink(self, d: Tensor, x: Tensor) -> Tensor:
        """t d clipped to the box, with the largest t <= 1 whose clipped move is no longer than eps.

        Without a box t is eps / norm(d). Clipping makes the move shorter, so t grows from there:
        given which features are clipped, the others' share of the budget says how far; each round
        clips a few more and none ever overshoots.
        """
        norm = self.norm(d).clamp_min(max(self.eps, torch.finfo(d.dtype).tiny))
        t = per_row(self.eps / norm, d)
        if self.box is None:
            return d * t
        low, high = (_on(side, x) - x for side in self.box)
        for _ in range(_ROUNDS):
            z = d * t
            cut = torch.clamp(z, low, high)
            clipped = (z - cut).sign().abs()  # 1 or 0
            spent = self.norm(cut * clipped).square()
            free = self.norm(d - d * clipped).square()
            left = self.eps**2 - spent
            inside = (left > 0) & (left < free)  # elsewhere the root is 0 or 1, and has no gradient
            ratio = torch.where(inside, left, 1.0) / torch.where(inside, free, 1.0)
            further = torch.where(inside, ratio.sqrt(), (left > 0).to(ratio.dtype))
            before, t = t, torch.maximum(further.view(t.shape), t)
            if not checks.known((t > before * (1 + 1e-6)).any(), otherwise=True):
                break
        return d * t

    def ascend(self, gradient: Tensor, step: float | Tensor) -> Tensor:
        if self.scale is None and self.mask is None:
            return _normalised(gradient) * _each(step, gradient)
        unit = self._unit(gradient)
        direction = _normalised(gradient * unit)
        return _each(step, direction) * direction * unit

    def _offsets(self, x: Tensor, num: int, generator: torch.Generator | None) -> Tensor:
        noise = normal_like(x[:num], generator)
        radius = torch.rand(num, generator=generator, dtype=x.dtype, device=x.device)
        event, reach = x.shape[1:], self.reach(x)
        free: Tensor | int = event.numel()  # axes of the ball
        if reach is not None:
            noise = noise * reach
            each = self.indicators is not None
            free = reach.sum(1).clamp_min(1) if each else max(int(reach.expand(event).sum()), 1)
        length = self.eps * radius ** (1.0 / free)
        return _each(length, x) * _normalised(noise) * self._unit(x)


@dataclass(frozen=True, eq=False, repr=False)
class Linf(Ball):
    """Largest change of any feature.

    >>> Linf(0.1).project(torch.tensor([[0.5, -0.05]]), torch.zeros(1, 2))
    tensor([[ 0.1000, -0.0500]])
    """

    def norm(self, d: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(self._scaled(d).flatten(1), ord=math.inf, dim=1)
        return norm

    def _shrink(self, d: Tensor, x: Tensor) -> Tensor:
        if self.scale is None:
            return d.clamp(-self.eps, self.eps)
        reach = self.eps * _on(self.scale, d)
        return torch.minimum(torch.maximum(d, -reach), reach)

    def ascend(self, gradient: Tensor, step: float | Tensor) -> Tensor:
        return _each(step, gradient) * gradient.sign() * self._unit(gradient)

    def _offsets(self, x: Tensor, num: int, generator: torch.Generator | None) -> Tensor:
        noise = torch.rand(
            num, *x.shape[1:], generator=generator, dtype=x.dtype, device=x.device
        ).expand_as(x)
        return self.within_reach(self.eps * (2 * noise - 1) * self._unit(x), x)


def _normalised(d: Tensor) -> Tensor:
    """Unit vectors, 0 where d is; scaled by the largest entry where squares leave the range."""
    flat = d.flatten(1)
    norm: Tensor = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    if norm.numel():
        low, high = norm.detach().aminmax()
        safe = (low > 1e3 * math.sqrt(torch.finfo(d.dtype).tiny)) & (high < math.inf)
        if checks.known(safe, otherwise=False):
            return (flat / norm).view_as(d)
    flat = flat / _or_infinite(flat.abs().amax(1, keepdim=True))
    return (flat / _or_infinite(torch.linalg.vector_norm(flat, dim=1, keepdim=True))).view_as(d)


def _is_coarse(x: Tensor) -> bool:
    """Whether norms and differences in x's dtype are further off than a ball is wide: bfloat16."""
    return torch.finfo(x.dtype).eps > 1e-6


def _rounded_towards(x: Tensor, point: Tensor) -> Tensor:
    """A point in x's coarser dtype, each entry no further from x than it was."""
    near = point.to(x.dtype)
    with torch.no_grad():
        beyond = (near.float() - x.float()).abs() > (point - x.float()).abs()
        back = torch.where(beyond, torch.nextafter(near, x), near) - near
    return near + back


def _or_infinite(size: Tensor) -> Tensor:
    """What to divide by: zeros stay zero, and so does their gradient."""
    return torch.where(size > 0, size, math.inf)


def per_row(value: Tensor, like: Tensor) -> Tensor:  # (B,) -> (B, 1, ...)
    """A number of each example, broadcastable against `like`."""
    return value.view(-1, *[1] * (like.ndim - 1))


def _each(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A number of each example, in the dtype of `like` whatever the predictor answers in."""
    if isinstance(value, Tensor) and value.ndim:
        return per_row(value.to(like.dtype), like)
    return value


def _bound(name: str, value: object) -> Bound:
    """A number or a tensor; arrays become tensors."""
    match value:
        case Tensor() if not value.is_complex():
            return value
        case np.ndarray() if value.dtype.kind in "fiu":
            return torch.as_tensor(value)
        case int() if value is not True and value is not False:
            return value
        case float() | np.number():
            return float(value)
    raise checks.InputTypeError(f"{name} must hold numbers or tensors", got=value)


def _triples(value: object) -> tuple[tuple[int, int, float], ...]:
    """(feature, indicator, threshold): each feature once, and none of them an indicator."""
    wanted = "indicators must hold (feature, indicator, threshold), no feature twice"
    match value:
        case tuple() | list() if value:
            triples = tuple(map(tuple, value))
        case _:
            raise checks.InputTypeError(wanted, got=value)
    for triple in triples:
        match triple:
            case (int(feature), int(indicator), int() | float()) if min(feature, indicator) >= 0:
                continue
        raise checks.InputTypeError(wanted, got=triple)
    features, shown = [triple[0] for triple in triples], {triple[1] for triple in triples}
    if len(set(features)) < len(features) or shown & set(features):
        raise checks.InputError(wanted, got=value)
    return tuple((feature, shows, float(above)) for feature, shows, above in triples)


def _on(value: Bound, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def _same(a: object, b: object) -> bool:
    match a, b:
        case tuple(), tuple():
            return len(a) == len(b) and all(map(_same, a, b))
        case Tensor(), Tensor():
            return a.shape == b.shape and torch.equal(a, b)
        case (Tensor(), _) | (_, Tensor()):
            return False
    return a == b


def _short(value: object) -> str:
    match value:
        case ((_, _, _), *_):  # indicators: two balls that differ look different
            return f"<{len(value)} columns, {zlib.crc32(repr(value).encode()):08x}>"
        case tuple():
            return f"({', '.join(map(_short, value))})"
        case Tensor() if value.numel() > 4:
            return f"<tensor {tuple(value.shape)}>"
        case Tensor():
            return str(value.tolist())
        case float():
            return f"{value:g}"
    return str(value)

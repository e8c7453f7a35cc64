"""Attacks that know how a purifier works (evaluation rules E23): exact gradients are what any attack gets from it; these
are the three that saturated weights do not hide from.

At small sigma the weights sit on one reference point and the exact gradient is blind beyond it. The straight-through
attack ignores the weights, the annealed one widens the channel first, and the nearest-centre one walks to the nearest
reference point of another class, which in the limit sigma to 0 is all that counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution

from advbayes import attacks, checks
from advbayes.attacks import margin, mode, nll
from advbayes.attacks.gradients import Best, score
from advbayes.balls import _Ball as Ball
from advbayes.purification.banks import GaussianBank
from advbayes.purification.purifier import Purifier
from advbayes.types import Attack, Loss, Predictor


@dataclass(frozen=True, eq=False)
class StraightThrough:
    """A purifier whose gradient is that of the unpurified model at the denoised input, as if purifying were the identity.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical, L2, MeanField, Noise, pgd
    >>> from advbayes.purification import Purifier
    >>> model = BayesianModel(nn.Linear(4, 3), Categorical())
    >>> purified = Purifier(model, Noise(0.1), MeanField(model).sample(5), torch.randn(100, 4))
    >>> pgd(L2(1.0), steps=3)(StraightThrough(purified), torch.ones(2, 4), torch.tensor([0, 1])).shape
    torch.Size([2, 4])
    """

    purifier: Purifier
    base: Predictor | None = None  # absent: the posterior predictive of the purifier's own thetas

    def __post_init__(self) -> None:
        if self.base is None and self.purifier.base is None:
            raise ValueError("base must be given for a purifier that was loaded, for it has no model, got None")

    def __call__(self, x: Tensor) -> Distribution:
        return self.purifier(x)

    def loss_and_gradient(self, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        base = self.base or self.purifier.base
        assert base is not None
        value, wrong = score(self.purifier, loss, x, y)
        _, _, gradient = attacks.loss_and_gradient(base, loss, self.purifier.denoise(x.detach()), y)
        return value, wrong, gradient


@dataclass(frozen=True)
class Annealed:
    """Projected ascent through the purifier with its noise widened by each factor in turn, the last one 1; best point kept.

    Each factor goes on from where the one before ended. `start` is an attack whose points are tried first and climbed from
    as well.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical, L2, MeanField, Noise
    >>> model = BayesianModel(nn.Linear(4, 3), Categorical())
    >>> purified = Purifier(model, Noise(0.1), MeanField(model).sample(5), torch.randn(100, 4))
    >>> Annealed(L2(1.0), steps=3)(purified, torch.ones(2, 4), torch.tensor([0, 1])).shape
    torch.Size([2, 4])
    """

    ball: Ball
    factors: tuple[float, ...] = (8.0, 4.0, 2.0, 1.0)
    steps: int = 20  # for each factor
    loss: Loss = margin
    start: Attack | None = None

    def __post_init__(self) -> None:
        checks.count("steps", self.steps)
        for factor in self.factors:
            checks.number("factors", factor, low=0, open_low=True)
        if not self.factors or self.factors[-1] != 1:
            raise ValueError(f"factors must end with 1, the purifier itself, got {self.factors}")

    def __call__(
        self, predict: Predictor, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        purifier = _purifier(predict)
        if self.ball.eps == 0 or not len(x):
            return x.clone()
        if y is None:
            with torch.no_grad():
                y = mode(purifier(x))
        loss = self.loss if isinstance(purifier(x[:1]), CategoricalDistribution) or self.loss is not margin else nll
        best = Best(x, *score(purifier, loss, x, y))
        starts = [x]
        if self.start is not None:
            found = self.start(purifier, x, y, generator=generator)
            best = best.or_better(Best(found, *score(purifier, loss, found, y)))
            starts.append(found)
        for start in starts:
            best = best.or_better(self._climb(purifier, loss, start, x, y))
        return best.x

    def _climb(self, purifier: Purifier, loss: Loss, start: Tensor, x: Tensor, y: Tensor) -> Best:
        point, size = start, 2.5 * self.ball.eps / self.steps
        best: Best | None = None
        for factor in self.factors:
            wide = purifier if factor == 1 else purifier.widened(factor)
            for step in range(self.steps):
                value, wrong, gradient = attacks.loss_and_gradient(wide, loss, point, y)
                if factor == 1:
                    here = Best(point, value, wrong)
                    best = here if best is None else best.or_better(here)
                # From x itself the first step goes to the edge, as one step would.
                length = self.ball.eps if step == 0 and point is x else size
                point = self.ball.project(point + self.ball.ascend(gradient, length), x)
            here = Best(point, *score(purifier, loss, point, y))
            best = here if best is None else best.or_better(here)
        assert best is not None
        return best


@dataclass(frozen=True)
class NearestCentre:
    """Moves to the edge of the ball towards each of the `num` nearest centres of another class, by the two directions that
    the limit sigma to 0 knows: straight at the centre, and across the plane between it and the nearest centre of the own class.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical, L2, MeanField, Noise
    >>> model = BayesianModel(nn.Linear(4, 3), Categorical())
    >>> purified = Purifier(model, Noise(0.1), MeanField(model).sample(5), torch.randn(100, 4))
    >>> NearestCentre(L2(1.0))(purified, torch.ones(2, 4), torch.tensor([0, 1])).shape
    torch.Size([2, 4])
    """

    ball: Ball
    num: int = 8

    def __post_init__(self) -> None:
        checks.count("num", self.num)

    @torch.no_grad()
    def __call__(
        self, predict: Predictor, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        purifier = _purifier(predict)
        if self.ball.eps == 0 or not len(x):
            return x.clone()
        if y is None:
            y = mode(purifier(x))
        own, others = neighbours(purifier, x, y, self.num)
        best = Best(x, *score(purifier, margin, x, y))
        for k in range(others.shape[1]):
            for direction, whole in ((others[:, k] - x, False), (others[:, k] - own, True)):
                norm = self.ball.norm(direction).clamp_min(1e-12)
                length = self.ball.eps / norm
                length = length if whole else length.clamp_max(1.0)  # not past the centre
                moved = x + direction * length.view(-1, *[1] * (x.ndim - 1))
                point = self.ball.project(torch.where(torch.isfinite(moved), moved, x), x)
                best = best.or_better(Best(point, *score(purifier, margin, point, y)))
        return best.x


def _purifier(predict: object) -> Purifier:
    if isinstance(predict, Purifier):
        return predict
    inner = getattr(predict, "purifier", None)
    if isinstance(inner, Purifier):
        return inner
    raise TypeError(f"predict must be a Purifier for this attack, got {checks.describe(predict)}")


def _classes(purifier: Purifier, bank: GaussianBank, groups: slice, rows: slice) -> Tensor:  # (g, n)
    """The class that the model gives each centre's reference point."""
    values = purifier.store.value_block(rows)  # (n, S, C)
    if bank.groups == 1:
        return values.mean(1).argmax(-1).unsqueeze(0)
    return values[:, groups].argmax(-1).T


def _banks(purifier: Purifier) -> list[GaussianBank]:
    store = purifier.store
    banks = [bank for bank in store.banks if isinstance(bank, GaussianBank)]
    if store.num_outputs or len(banks) < len(store.banks) or purifier.features is not None:
        raise ValueError(
            "the nearest-centre attack is for classification with a Gaussian channel in the space of x, "
            f"got {checks.describe(purifier)}"
        )
    return banks


@torch.no_grad()
def neighbours(
    purifier: Purifier,
    x: Tensor,  # (B, *event)
    y: Tensor,  # (B,)
    num: int = 1,
) -> tuple[Tensor, Tensor]:  # (B, *event), (B, num, *event)
    """The likeliest centre of class y, and the `num` likeliest of other classes; x itself where there is none.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical, Noise
    >>> model = BayesianModel(nn.Linear(1, 2), Categorical())
    >>> purified = Purifier(model, Noise(0.1), torch.tensor([[1.0, -1.0, 0.0, 0.0]]), torch.tensor([[1.0], [-3.0]]))
    >>> neighbours(purified, torch.tensor([[0.5]]), torch.tensor([0]))
    (tensor([[1.]]), tensor([[[-3.]]]))
    """
    banks, query = _banks(purifier), purifier.query(x)
    right: list[tuple[Tensor, Tensor]] = []  # scores (B, k) and codes (B, k)
    wrong: list[tuple[Tensor, Tensor]] = []
    total = purifier.store.num_reference
    for k, bank in enumerate(banks):
        offset = bank.offset(query)
        for groups, rows in bank.tiles(len(query)):
            logits = bank.logits(query, groups, rows)
            same = _classes(purifier, bank, groups, rows).unsqueeze(1) == y.view(1, -1, 1)
            for kept, hidden, most in ((right, ~same, 1), (wrong, same, num)):
                value, index = logits.masked_fill(hidden, -math.inf).topk(min(most, logits.shape[-1]), dim=-1)
                for g in range(len(value)):
                    code = (k * purifier.store.num_thetas + groups.start + g) * total + rows.start + index[g]
                    kept.append((value[g].double() + offset.unsqueeze(1), code))
    return _fetch(purifier, banks, right, x, 1)[:, 0], _fetch(purifier, banks, wrong, x, num)


def _fetch(
    purifier: Purifier, banks: list[GaussianBank], kept: list[tuple[Tensor, Tensor]], x: Tensor, num: int
) -> Tensor:  # (B, num, *event)
    value, code = torch.cat([v for v, _ in kept], 1), torch.cat([c for _, c in kept], 1)
    value, place = value.topk(min(num, value.shape[1]), dim=1)
    code = code.gather(1, place)
    total, num_thetas = purifier.store.num_reference, purifier.store.num_thetas
    found = x.unsqueeze(1).flatten(2).repeat(1, code.shape[1], 1)
    for source in torch.unique(code // total).tolist():
        mine = (code // total == source) & (value > -math.inf)
        rows = banks[source // num_thetas].centres.pick(source % num_thetas, code[mine] % total)
        found[mine] = rows + purifier.store.centre
    return found.view(len(x), -1, *x.shape[1:])


@torch.no_grad()
def nearest_centre_radius(
    purifier: Purifier,
    x: Tensor,  # (B, *event)
    y: Tensor,  # (B,)
) -> Tensor:  # (B,)
    """How far, in L2, x is from any other class in the limit sigma to 0: no smaller perturbation can change the prediction.

    min over centres c_j of other classes of (|x - c_j|^2 - |x - c|^2) / (2 |c_j - c|), c the nearest centre of class y: the
    distance to the plane between them, exact if c stays the nearest of its class on the way, a lower bound in any case;
    0 where the prediction is wrong already. One noise for all centres; online, or with one theta.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical, Noise
    >>> model = BayesianModel(nn.Linear(1, 2), Categorical())
    >>> purified = Purifier(model, Noise(0.1), torch.tensor([[1.0, -1.0, 0.0, 0.0]]), torch.tensor([[1.0], [-3.0]]))
    >>> nearest_centre_radius(purified, torch.tensor([[0.5]]), torch.tensor([0]))
    tensor([1.5000])
    """
    banks = _banks(purifier)
    scales = {bank.scale * bank.factor if isinstance(bank.scale, float) else math.nan for bank in banks}
    if len(scales) > 1 or math.nan in scales or any(not isinstance(bank.scale, float) for bank in banks):
        raise ValueError("the closed form needs one noise for all centres, got several")
    if purifier.update == "offline" and any(bank.groups > 1 for bank in banks):
        raise ValueError("the closed form needs update='online', or one theta, got 'offline' with several")
    own, _ = neighbours(purifier, x, y, 1)
    here, there = purifier.query(x).flat, purifier.query(own).flat
    known = (here - there).square().sum(1) > 0
    base = (here - there).double().square().sum(1)
    radius = here.new_full((len(x),), math.inf)
    query = purifier.query(x)
    for bank in banks:
        for groups, rows in bank.tiles(len(query)):
            centres, half = bank.centres.block(groups, rows), bank.half_norms[groups, rows].unsqueeze(1)
            from_x = 2 * half - 2 * torch.matmul(here, centres.transpose(1, 2)) + here.square().sum(1).unsqueeze(1)
            from_own = 2 * half - 2 * torch.matmul(there, centres.transpose(1, 2)) + there.square().sum(1).unsqueeze(1)
            plane = (from_x - base.to(here.dtype).unsqueeze(1)) / (2 * from_own.clamp_min(1e-12).sqrt())
            same = _classes(purifier, bank, groups, rows).unsqueeze(1) == y.view(1, -1, 1)
            radius = torch.minimum(radius, plane.masked_fill(same, math.inf).amin(-1).amin(0))
    # Without a centre of class y at all (own is x itself) the prediction is wrong wherever x is.
    has_own = known | _has_class(purifier, banks, y)
    return torch.where(has_own, radius.clamp_min(0.0), torch.zeros_like(radius))


def _has_class(purifier: Purifier, banks: list[GaussianBank], y: Tensor) -> Tensor:
    found = torch.zeros(len(y), dtype=torch.bool, device=y.device)
    for bank in banks:
        for groups, rows in bank.tiles(1):
            classes = _classes(purifier, bank, groups, rows)
            found |= torch.isin(y, classes)
    return found

"""Attacks that know how a purifier works (evaluation rules E23): exact gradients are what any
attack gets from it; these are the three that saturated weights do not hide from.

At small sigma the weights sit on one reference point and the exact gradient is blind beyond it. The
straight-through attack ignores the weights, the annealed one widens the channel first, and the
nearest-centre one walks to the nearest reference point of another class, which in the limit sigma
to 0 is all that counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import checks
from advbayes.attacks import loss_and_gradient, margin, nll
from advbayes.attacks.balls import Ball, per_row
from advbayes.attacks.gradients import score
from advbayes.attacks.search import Best, Problem, Search, check_ball
from advbayes.purification.banks import GaussianBank, Room
from advbayes.purification.purifier import Purifier
from advbayes.types import Attack, Loss, Predictor


@dataclass(frozen=True, eq=False)
class StraightThrough:
    """A purifier with the unpurified model's gradient at the denoised input.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical, L2, MeanField, Noise, pgd
    >>> from advbayes.purification import Purifier
    >>> model = BayesianModel(nn.Linear(4, 3), Categorical())
    >>> purified = Purifier(model, Noise(0.1), MeanField(model).sample(5), torch.randn(100, 4))
    >>> attack, predict = pgd(L2(1.0), steps=3), StraightThrough(purified)
    >>> attack(predict, torch.ones(2, 4), torch.tensor([0, 1])).shape
    torch.Size([2, 4])
    """

    purifier: Purifier
    base: Predictor | None = None  # absent: the posterior predictive of the purifier's own thetas

    def __post_init__(self) -> None:
        if self.base is None and self.purifier.base is None:
            raise checks.InputError(
                "base must be given for a purifier that was loaded, for it has no model, got None"
            )

    def __call__(self, x: Tensor) -> Distribution:
        return self.purifier(x)

    def loss_and_gradient(self, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        base = self.base or self.purifier.base
        assert base is not None
        value, wrong = score(self.purifier, loss, x, y)
        _, _, gradient = loss_and_gradient(base, loss, self.purifier.denoise(x.detach()), y)
        return value, wrong, gradient


@dataclass(frozen=True)
class Annealed(Search):
    """Projected ascent with the purifier's noise widened by each factor in turn, the last one 1.

    Each factor starts where the one before it ended. `start` is an attack whose points are tried
    first and used as starting points too.

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
    loss: Loss | None = None  # absent: the margin, in regression the likelihood
    start: Attack | None = None

    def __post_init__(self) -> None:
        check_ball(self.ball)
        checks.count("steps", self.steps)
        for factor in self.factors:
            checks.number("factors", factor, low=0, open_low=True)
        if not self.factors or self.factors[-1] != 1:
            raise checks.InputError("factors must end with 1, the purifier", got=self.factors)

    @property
    def _losses(self) -> tuple[Loss, ...]:
        return (self.loss or margin,)

    def _search(self, problem: Problem) -> Tensor:
        purifier = _purifier(problem.predict)
        loss = self.loss or (nll if purifier.store.num_outputs else margin)
        problem = replace(problem, predict=purifier, loss=loss)
        best, starts = problem.score(problem.x), [problem.x]
        if self.start is not None:
            starts.append(self.start(purifier, problem.x, problem.y, generator=problem.generator))
            best = best.or_better(problem.score(starts[1]))
        for number, start in enumerate(starts):
            rows = best.unbroken  # what is broken is done with
            if len(rows):
                part = self._climb(purifier, problem.rows(rows), start[rows], fresh=number == 0)
                best = best.improved(rows, part)
        return best.x

    def _climb(self, purifier: Purifier, problem: Problem, start: Tensor, fresh: bool) -> Best:
        point, size = start, 2.5 * self.ball.eps / self.steps
        best = problem.score(start)
        for stage, factor in enumerate(self.factors):
            rows = best.unbroken
            if not len(rows):
                break
            here, narrow, kept = point[rows], problem.rows(rows), best.pick(rows)
            wide = narrow if factor == 1 else replace(narrow, predict=purifier.widened(factor))
            for step in range(self.steps):
                reached, gradient = wide.climb(here)
                if factor == 1:
                    kept = kept.or_better(reached)
                # From x itself the first step goes to the edge, as one step would.
                length = self.ball.eps if fresh and stage == 0 and step == 0 else size
                here = wide.move(here, gradient, length)
            best = best.put(rows, kept.or_better(narrow.score(here)))
            point = point.index_copy(0, rows, here)
        return best

    def applies_to(self, predict: Predictor) -> bool:
        """Purifiers, and predictors that hold one as `purifier`."""
        return _within(predict) is not None


@dataclass(frozen=True)
class NearestCentre(Search):
    """Moves x to the edge of the ball towards each of the `num` nearest reference points of another
    class: straight at the point, and across the plane that separates it from the nearest point of
    the right class. As sigma tends to 0 the purifier decides by the nearest point alone, and these
    are the moves that change it.

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
        check_ball(self.ball)
        checks.count("num", self.num)

    @property
    def _losses(self) -> tuple[Loss, ...]:
        return (margin,)

    @torch.no_grad()
    def _search(self, problem: Problem) -> Tensor:
        purifier, x = _purifier(problem.predict), problem.x
        problem = replace(problem, predict=purifier)
        best = problem.score(x)
        same, others = neighbours(purifier, x, problem.y, self.num)
        for k in range(others.shape[1]):
            towards = self.ball.within_reach(others[:, k] - x, x)
            length = self.ball.eps / self.ball.norm(towards).clamp_min(1e-12)
            straight = towards * per_row(length.clamp_max(1.0), x)  # not past the centre
            apart = self.ball.within_reach(others[:, k] - same[:, 0], x)
            across = self.ball.ascend(apart, self.ball.eps)
            for moved in (x + straight, x + across):
                point = self.ball.project(torch.where(torch.isfinite(moved), moved, x), x)
                best = best.or_better(problem.score(point))
        return best.x

    def applies_to(self, predict: Predictor) -> bool:
        """Purifiers of classes whose channel is Gaussian in the space of x."""
        purifier = _within(predict)
        return purifier is not None and not _unfit(purifier)


def _within(predict: object) -> Purifier | None:
    """The purifier that a predictor is or holds."""
    inner = getattr(predict, "purifier", predict)
    return inner if isinstance(inner, Purifier) else None


def _purifier(predict: object) -> Purifier:
    purifier = _within(predict)
    if purifier is None:
        raise checks.InputTypeError("predict must be a Purifier for this attack", got=predict)
    return purifier


def _same_class(
    purifier: Purifier, bank: GaussianBank, groups: slice, rows: slice, y: Tensor
) -> Tensor:  # (g, B, n)
    """Whether the model gives the reference point of each centre the class y."""
    values = purifier.store.value_block(rows)  # (n, S, C)
    shared = bank.groups == 1
    classes = (values.mean(1, keepdim=True) if shared else values[:, groups]).argmax(-1).T
    return classes.unsqueeze(1) == y.view(1, -1, 1)


def _unfit(purifier: Purifier) -> bool:
    """Whether nearest centres mean nothing: regression, another channel, another space."""
    store = purifier.store
    return bool(store.num_outputs) or not store.gaussians or purifier.features is not None


def _banks(purifier: Purifier) -> tuple[GaussianBank, ...]:
    if _unfit(purifier):
        raise checks.InputError(
            "the nearest-centre attack is for classification with a Gaussian channel in the space "
            "of x",
            got=purifier,
        )
    return purifier.store.gaussians


@torch.no_grad()
def neighbours(
    purifier: Purifier,
    x: Tensor,  # (B, *event)
    y: Tensor,  # (B,)
    num: int = 1,
) -> tuple[Tensor, Tensor]:  # (B, num, *event) each
    """The `num` likeliest centres of class y, and of other classes; NaN where there are fewer.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical, Noise
    >>> model = BayesianModel(nn.Linear(1, 2), Categorical())
    >>> thetas, centres = torch.tensor([[1.0, -1.0, 0.0, 0.0]]), torch.tensor([[1.0], [-3.0]])
    >>> purified = Purifier(model, Noise(0.1), thetas, centres)
    >>> neighbours(purified, torch.tensor([[0.5]]), torch.tensor([0]))
    (tensor([[[1.]]]), tensor([[[-3.]]]))
    """
    query, room, ranks = purifier.query(x), Room(), purifier.store.ranks
    nobody = (
        query.points.new_full((len(x), num), -math.inf),
        x.new_full((len(x), num, x[0].numel()), math.nan),
    )
    kept = [nobody, nobody]  # of class y, of others
    for bank in _banks(purifier):
        offset = bank.offset(query).unsqueeze(1)
        for groups, rows in bank.tiles(len(query)):
            logits = bank.logits(query, groups, rows, room)
            same = _same_class(purifier, bank, groups, rows, y)
            for k, hidden in enumerate((~same, same)):
                shown = logits.masked_fill(hidden, -math.inf)
                value, index = shown.topk(min(num, shown.shape[-1]), dim=-1)
                for g in range(len(value)):
                    centres = bank.centres.pick(groups.start + g, rows.start + index[g])
                    kept[k] = _likeliest([kept[k], (value[g] + offset, centres)], num)
    kept = [
        _likeliest(list(zip(ranks.gathered(value), ranks.gathered(centres), strict=True)), num)
        for value, centres in kept
    ]
    right, wrong = (centres.view(len(x), num, *x.shape[1:]) for _, centres in kept)
    return right, wrong


def _likeliest(
    parts: list[tuple[Tensor, Tensor]],  # log-densities (B, k) and centres (B, k, d)
    num: int,
) -> tuple[Tensor, Tensor]:  # (B, num), (B, num, d)
    """The likeliest of several candidates; NaN for those that are none."""
    value, order = torch.cat([value for value, _ in parts], 1).topk(num, dim=1)
    centres = torch.cat([centres for _, centres in parts], 1)
    centres = centres.gather(1, order.unsqueeze(-1).expand(-1, -1, centres.shape[-1]))
    return value, centres.masked_fill((value == -math.inf).unsqueeze(-1), math.nan)


@torch.no_grad()
def nearest_centre_radius(
    purifier: Purifier,
    x: Tensor,  # (B, *event)
    y: Tensor,  # (B,)
    num: int = 8,
) -> Tensor:  # (B,)
    """The L2 radius within which nothing changes the prediction in the limit sigma to 0.

    min_j max_i (|x - c_j|^2 - |x - c_i|^2) / (2 |c_j - c_i|) over centres c_j of other classes and
    the `num` nearest c_i of class y: c_j must come nearer than every c_i, and that is the distance
    to the plane between the two. Exact if one c_i decides, a lower bound in any case; 0 where the
    prediction is wrong already. One noise for all centres; online, or with centres that all thetas
    share.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical, Noise
    >>> model = BayesianModel(nn.Linear(1, 2), Categorical())
    >>> thetas, centres = torch.tensor([[1.0, -1.0, 0.0, 0.0]]), torch.tensor([[1.0], [-3.0]])
    >>> purified = Purifier(model, Noise(0.1), thetas, centres)
    >>> nearest_centre_radius(purified, torch.tensor([[0.5]]), torch.tensor([0]))
    tensor([1.5000])
    """
    banks = _banks(purifier)
    if len({bank.sigma for bank in banks}) > 1 or any(bank.scales is not None for bank in banks):
        raise checks.InputError("the closed form needs one noise for all centres, got several")
    if purifier.update == "offline" and any(bank.groups > 1 for bank in banks):
        raise checks.InputError(
            "the closed form needs update='online', or centres that all thetas share, got neither"
        )
    right, _ = neighbours(purifier, x, y, checks.count("num", num))
    query = purifier.query(x)
    here = query.around
    middles = right.flatten(2).double() - purifier.store.origin  # (B, k, d)
    known = ~torch.isnan(middles[..., 0])  # (B, k)
    middles = torch.where(known.unsqueeze(-1), middles, here.unsqueeze(1))
    from_x_to_right = (here.unsqueeze(1) - middles).square().sum(-1)  # (B, k)
    radius = here.new_full((len(x),), math.inf)
    for bank in banks:
        for groups, rows in bank.tiles(len(x)):
            centres = bank.centres.block(groups, rows).double() - query.origin
            to_x = torch.cdist(here.expand(len(centres), -1, -1), centres).square()  # (g, B, n)
            plane = torch.full_like(to_x, -math.inf)
            for k in range(middles.shape[1]):
                to_right = torch.cdist(middles[:, k].expand(len(centres), -1, -1), centres)
                to_right = to_right.clamp_min(1e-6)
                each = (to_x - from_x_to_right[:, k].unsqueeze(1)) / (2 * to_right)
                plane = torch.where(known[:, k].view(1, -1, 1), torch.maximum(plane, each), plane)
            same = _same_class(purifier, bank, groups, rows, y)
            radius = torch.minimum(radius, plane.masked_fill(same, math.inf).amin(-1).amin(0))
    return purifier.store.ranks.min(radius).clamp_min(0.0).to(x.dtype)

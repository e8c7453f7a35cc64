"""log p(x', y | x_n, theta_s): a bank of x' and of the outputs y that come with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from advbayes.likelihoods import LOG_TWO_PI, gaussian_log_density
from advbayes.purification.banks import Bank, Query, Room, Tile
from advbayes.purification.store import Store


def log_outputs(store: Store, y: Tensor, thetas: slice, rows: slice) -> Tensor:  # (s, B, n)
    """log N(y_b; mean_sn, scale_sn^2), summed over outputs, as one product: -(y^2 / 2 - y m + m^2 /
    2) / s^2 - log s."""
    # (s, n, D)
    mean, variance, square = store.value_block(rows)[:, thetas].transpose(0, 1).chunk(3, -1)
    constant = (-0.5 * square / variance - 0.5 * variance.log() - 0.5 * LOG_TWO_PI).sum(-1)
    right = torch.cat([-0.5 / variance, mean / variance], -1)  # (s, n, 2 D)
    return torch.matmul(torch.cat([y.square(), y], -1), right.mT) + constant.unsqueeze(1)


@dataclass(frozen=True, eq=False)
class JointBank(Bank):
    """log p(x' | x_n, theta_s) + log p(y | x_n, theta_s), with `query.y` for y.

    The second term differs from theta to theta even if the first does not.
    """

    bank: Bank
    store: Store

    @property
    def has_centres(self) -> bool:  # type: ignore[override]
        return self.bank.has_centres

    @property
    def groups(self) -> int:
        return self.store.num_thetas

    def _inner(self, groups: slice) -> slice:
        return groups if self.bank.groups > 1 else slice(0, 1)

    def tiles(self, batch: int) -> Iterator[Tile]:
        for groups, rows in self.bank.tiles(batch):
            yield groups if self.bank.groups > 1 else slice(0, self.groups), rows

    def logits(self, query: Query, groups: slice, rows: slice, room: Room) -> Tensor:
        assert query.y is not None
        logits = self.bank.logits(query, self._inner(groups), rows, room)
        return logits + log_outputs(self.store, query.y, groups, rows).to(logits.dtype)

    def offset(self, query: Query) -> Tensor:
        return self.bank.offset(query)

    def gradient(self, query: Query, groups: slice, rows: slice, coefficients: Tensor) -> Tensor:
        if self.bank.groups == 1:
            coefficients = coefficients.sum(0, keepdim=True)
        return self.bank.gradient(query, self._inner(groups), rows, coefficients)

    def exact_at(self, query: Query, group: int, index: Tensor) -> Tensor:
        assert query.y is not None
        mean, variance, _ = self.store.value_of(group, index).chunk(3, -1)
        log_y = gaussian_log_density(query.y.unsqueeze(1), mean, variance.sqrt()).sum(-1)
        return self.bank.exact_at(query, min(group, self.bank.groups - 1), index) + log_y

    def gradient_at(self, query: Query, group: int, index: Tensor, coefficients: Tensor) -> Tensor:
        return self.bank.gradient_at(query, min(group, self.bank.groups - 1), index, coefficients)

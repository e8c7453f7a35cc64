"""Attacks do not depend on the units of the features, on how many rows share a pass, or on which
member of a family comes first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as Classes
from torch.distributions import Distribution, Normal

from advbayes import L2, Linf, entropy, nll, pgd, pgd_plus
from advbayes.attacks import APGD, Suite, Transfer, ascent
from advbayes.attacks.balls import Ball

from .attacks import EVERY

NUM = 12
UNITS = torch.tensor([1.0, 4.0, 0.25, 2.0, 0.5])  # powers of two: nothing is rounded
X = torch.rand(NUM, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
NET = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double().requires_grad_(False)
for parameter in NET.parameters():
    parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
Y = NET(X).argmax(1)


def classes(x: Tensor) -> Distribution:
    return Classes(logits=NET(x))


def values(x: Tensor) -> Distribution:
    return Normal(NET(x)[:, 0], 0.5)


@pytest.mark.parametrize("boxed", [False, True], ids=["free", "boxed"])
@pytest.mark.parametrize("kind", [L2, Linf])
@pytest.mark.parametrize(
    ("name", "predict"),
    [(name, classes) for name in EVERY]
    + [(name, values) for name in ("PGD", "APGD", "MultiStart", "ZerothOrder", "strong_suite")],
)
def test_an_attack_does_not_depend_on_the_units_of_the_features(
    name: str, predict: Any, kind: Any, boxed: bool
) -> None:
    """x in other units, and a ball whose scale follows: the same points, in those units."""
    y = Y if predict is classes else NET(X)[:, 0] + 0.3
    zero, one = torch.zeros(5, dtype=X.dtype), torch.ones(5, dtype=X.dtype)
    plain = kind(0.3, box=(zero, one) if boxed else None)
    scaled = kind(0.3, box=(zero, UNITS.double()) if boxed else None, scale=UNITS)

    def run(ball: Ball, asked: Any, x: Tensor) -> Tensor:
        found: Tensor = EVERY[name](ball)(asked, x, y, generator=torch.Generator().manual_seed(0))
        return found

    here = run(plain, predict, X)
    there = run(scaled, lambda x: predict(x / UNITS), X * UNITS)
    assert not torch.equal(here, X)
    torch.testing.assert_close(there / UNITS, here, rtol=1e-6, atol=1e-9)


def test_restarts_beyond_the_first_pass_begin_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascent, "_ROWS", NUM)  # one restart in each pass
    asked: list[Tensor] = []

    def recording(x: Tensor) -> Distribution:
        asked.append(x.detach().clone())
        return classes(x)

    steps, restarts, ball = 3, 4, L2(0.3)
    pgd(ball, steps, restarts=restarts)(recording, X, Y, generator=torch.Generator().manual_seed(0))
    starts = asked[:: steps + 1][:restarts]  # each restart asks for every step and for its end
    assert torch.equal(starts[0], X)
    for number, start in enumerate(starts[1:], 1):
        assert ball.contains(start, X).all()
        for other in starts[:number]:
            assert not (start == other).all(1).any()


@pytest.mark.parametrize("momentum", [0.0, 0.25, 0.6])
def test_apgd_moves_on_by_its_momentum(momentum: float) -> None:
    """The second step is the gradient's, and goes on by a share of the first."""
    asked: list[Tensor] = []
    weight = torch.tensor([0.6, 0.8], dtype=torch.float64)

    def bowl(x: Tensor) -> Distribution:
        asked.append(x.detach().clone())
        return Normal(x @ weight - 0.3 * x[:, 0].square(), 1.0)

    x, y, ball = torch.zeros(1, 2, dtype=torch.float64), torch.full((1,), -5.0).double(), L2(1.0)
    APGD(ball, nll, steps=10, momentum=momentum, targets=0)(bowl, x, y)
    _, before, point, after = asked[:4]  # after a first look at x
    slope = torch.autograd.functional.jacobian(
        lambda z: -Normal(z @ weight - 0.3 * z[:, 0].square(), 1.0).log_prob(y).sum(), point
    )
    step = ball.project(point + 2.0 * slope / slope.norm(), x)
    wanted = point + (1 - momentum) * (step - point) + momentum * (point - before)
    wanted = ball.project(wanted, x) if momentum else step
    torch.testing.assert_close(after, wanted)


@pytest.mark.parametrize("wrap", ["suite", "transfer"])
def test_points_of_two_stages_are_ranked_by_the_last(wrap: str) -> None:
    ball = L2(0.002)  # breaks nothing
    members = (pgd_plus(ball, 1), pgd_plus(ball, 3), pgd_plus(L2(0.001), 2))
    attack = Suite(members)
    whole = attack if wrap == "suite" else Transfer(attack, (classes,))
    generator = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    each = torch.stack(
        [entropy(classes(member(classes, X, Y, generator=generator())), Y) for member in members]
    )
    kept = entropy(classes(whole(classes, X, Y, generator=generator())), Y)
    assert (kept >= each.amax(0) - 1e-9).all()
    by_likelihood = Suite(members, rank=nll)(classes, X, Y, generator=generator())
    assert (entropy(classes(by_likelihood), Y) < kept - 1e-9).any()  # the two ranks differ here

"""One walk over an attack: another ball, budget or number of steps reaches every part, and no
defense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

from advbayes import (
    APGD,
    L2,
    PGD,
    BayesianModel,
    Linf,
    MarginTo,
    Noise,
    RandomSearch,
    Square,
    audit,
    pgd,
)
from advbayes import Categorical as Classes
from advbayes.attacks import (
    ByLoss,
    DivergenceFrom,
    PerExample,
    Suite,
    Toward,
    Transfer,
    applies_to,
    ball_of,
    margin,
    nll,
    on_rows,
    parts_of,
    steps_of,
    strong_suite,
    with_ball,
    with_eps,
    with_restarts,
    with_steps,
)
from advbayes.attacks.balls import Ball
from advbayes.attacks.losses import success
from advbayes.attacks.parts import family_of, loss_names, settings, text_of
from advbayes.auditing import Support
from advbayes.auditing.claim import said_by
from advbayes.purification import Purifier
from advbayes.purification.attacks import Annealed, NearestCentre
from advbayes.seeds import generator_for
from advbayes.types import Attack, Predictor

from .attacks import EVERY

WEIGHT = torch.randn(3, 6, generator=generator_for(0, "weight"))
X = torch.randn(60, 6, generator=generator_for(0, "x"))
Y = (X @ WEIGHT.T).argmax(1)


def linear(x: Tensor) -> Distribution:
    return Categorical(logits=x @ WEIGHT.T)


@dataclass(frozen=True)
class Wrapped:
    """An attack of one's own around others."""

    first: Any
    more: Any

    def __call__(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        x_adv: Tensor = self.first(predict, x, y, generator=generator)
        return x_adv


@dataclass(frozen=True)
class Defense:
    """A predictor that holds an attack of its own, as a purifier's channel does."""

    attack: Attack

    def __call__(self, x: Tensor) -> Distribution:
        return linear(x)


ATTACKS: dict[str, Callable[[Ball], Any]] = {
    **EVERY,
    "NearestCentre": lambda ball: NearestCentre(ball, 6),
    "Annealed": lambda ball: Annealed(ball, steps=6, start=pgd(ball, 6, step_size=0.1 * ball.eps)),
    "suite": lambda ball: strong_suite(
        ball, steps=6, queries=6, others=(Annealed(ball, start=pgd(ball)),)
    ),
    "transfer": lambda ball: Transfer(Suite((pgd(ball, 6), APGD(ball))), (linear,)),
    "wrapped": lambda ball: Wrapped(
        pgd(ball, 6, step_size=ball.eps), {"a": [Square(ball, 6)], "b": (pgd(ball),)}["a"]
    ),
    "mapping": lambda ball: Wrapped(pgd(ball, 6), {"a": Square(ball, 6), "b": pgd(ball)}),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_made_again_in_a_ball_is_the_attack_made_in_it(name: str) -> None:
    """with_ball, with_eps and the constructor agree on every part: balls, and step sizes in
    proportion."""
    make, old, new = ATTACKS[name], L2(1.0, box=(-5, 5)), Linf(0.25)
    assert with_ball(make(old), new) == make(new)
    assert (
        with_eps(make(old), 0.25)
        == with_ball(make(old), replace(old, eps=0.25))
        == make(replace(old, eps=0.25))
    )
    assert text_of(with_eps(make(old), 1.0)) == text_of(make(old))
    assert ball_of(make(old)) == old


@pytest.mark.parametrize("name", ATTACKS)
def test_steps_are_scaled_in_every_part(name: str) -> None:
    attack = ATTACKS[name](L2(1.0))
    twice = with_steps(attack, 2)
    assert steps_of(twice) == 2 * (steps_of(attack) or 0) > 0
    assert with_steps(twice, 0.5) == attack
    restarted = [
        settings(part)["restarts"]
        for part in parts_of(with_restarts(attack, 3))
        if "restarts" in settings(part)
    ]
    assert restarted == [
        3 * settings(part)["restarts"] for part in parts_of(attack) if "restarts" in settings(part)
    ]


@pytest.mark.parametrize("make", [Square, RandomSearch], ids=lambda make: make.__name__)
def test_twice_the_steps_are_twice_the_queries(make: Any) -> None:
    asked = 0

    def counting(x: Tensor) -> Distribution:
        nonlocal asked
        asked += len(x)
        return Categorical(logits=torch.stack([torch.full_like(x[:, 0], 9.0), x[:, 0] * 0], 1))

    used = []
    for factor in (1, 2):
        asked = 0
        with_steps(make(L2(1.0), 40), factor)(counting, X[:5], torch.zeros(5, dtype=torch.long))
        used.append(asked)
    assert used[1] - 5 == 2 * (used[0] - 5)  # 5: what is asked about x itself


def test_rows_reach_every_part() -> None:
    classes = torch.arange(60) % 3
    inner = pgd(L2(1.0), 2, MarginTo(classes))
    attack = Wrapped(inner, [Annealed(L2(1.0), loss=MarginTo(classes), start=inner)])
    held = [loss for part in parts_of(on_rows(attack, slice(5, 9))) for loss in _margins(part)]
    assert len(held) == 3
    assert all(torch.equal(loss.classes, classes[5:9]) for loss in held)
    assert on_rows(attack, slice(0, 60)) is not attack
    assert on_rows(ATTACKS["suite"](L2(1.0)), slice(0, 4)) == ATTACKS["suite"](L2(1.0))


def _margins(part: object) -> list[MarginTo]:
    held = settings(part)
    found = [held.get("loss"), *(loss for loss, _ in held.get("stages", ()))]
    return [loss for loss in found if isinstance(loss, MarginTo)]


def test_a_defense_keeps_what_it_holds() -> None:
    module = nn.Linear(6, 3)
    attack = Transfer(pgd(L2(1.0), 5), (Defense(pgd(L2(1.0), 5)), module))  # type: ignore[arg-type]
    moved = with_steps(with_ball(attack, L2(2.0)), 2)
    assert moved.attack == pgd(L2(2.0), 10)
    assert moved.sources[0] == Defense(pgd(L2(1.0), 5))
    assert moved.sources[1] is module
    assert len(list(parts_of(attack))) == 2


def test_a_closed_part_cannot_be_moved_in_silence() -> None:
    def closed(
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return x

    for attack in (closed, Suite((pgd(L2(1.0)), closed)), Wrapped(pgd(L2(1.0)), (closed,))):
        with pytest.raises(TypeError, match="needs a field `ball`"):
            with_ball(attack, L2(2.0))
        with pytest.raises(TypeError, match="needs a field `ball`"):
            with_eps(attack, 2.0)


# --- which predictors an attack is made for -----------------------------------------------------


def purified() -> Purifier:
    thetas = torch.cat([WEIGHT.flatten(), torch.zeros(3)]).repeat(2, 1)
    return Purifier(BayesianModel(nn.Linear(6, 3), Classes()), Noise(0.4), thetas, X)


def test_an_attack_says_which_predictors_it_is_made_for() -> None:
    whole, ball = purified(), L2(0.5)
    for attack in (Annealed(ball), NearestCentre(ball), Wrapped(pgd(ball), (Annealed(ball),))):
        assert applies_to(attack, whole)
        assert not applies_to(attack, linear)
    assert applies_to(pgd(ball), linear)
    assert applies_to(Transfer(Annealed(ball), (whole,)), linear)
    assert not applies_to(Transfer(Annealed(ball), (linear,)), whole)
    assert not applies_to(Suite((Annealed(ball),)), linear)
    both = Suite((pgd(ball, 3), Annealed(ball)))
    assert applies_to(both, linear)
    assert torch.equal(both(linear, X, Y), Suite((pgd(ball, 3),))(linear, X, Y))
    with pytest.raises(TypeError, match="attacks must hold one that applies to this predictor"):
        Suite((Annealed(ball),))(linear, X, Y)


def test_an_audit_by_a_purifiers_own_attacks_comes_to_an_end() -> None:
    ball, data, controls = L2(0.5), (X[:16], Y[:16]), ("E13", "E19", "E20")
    attacks = {"a": Annealed(ball, steps=2, start=pgd(ball, 2)), "n": NearestCentre(ball)}
    verdict = audit(
        purified(),
        data,
        ball=ball,
        tier="quick",
        attacks=attacks,
        support=Support(undefended=linear),
    )
    assert verdict["E1"].status == "passed"
    assert [verdict[id].status for id in controls] == ["not run"] * 3
    mixed = audit(
        purified(),
        data,
        ball=ball,
        attacks={**attacks, "p": APGD(ball)},
        support=Support(undefended=linear),
        only=controls,
    )
    assert [mixed[id].status != "not run" for id in controls] == [True] * 3


# --- the sphere ---------------------------------------------------------------------------------


def test_points_of_the_sphere_heed_scale_and_mask() -> None:
    scale, mask = torch.tensor([1.0, 10.0, 0.1, 3.0]), torch.tensor([True, True, True, False])
    x = torch.zeros(4000, 4)
    drawn = L2(2.0, scale=scale, mask=mask).sphere(x, generator=generator_for(0, "sphere")) / scale
    assert torch.allclose(drawn.norm(dim=1), torch.full((4000,), 2.0), atol=1e-5)
    assert not bool(drawn[:, 3].any())
    # every direction alike: a third of the budget in each
    share = drawn[:, :3].square().mean(0) / 4
    # Var of u^2 on the 2-sphere is 4/45
    assert float((share - 1 / 3).abs().max()) < 5 * float((4 / 45 / 4000) ** 0.5)
    corners = Linf(0.5, scale=scale, mask=mask).sphere(x[:9], generator=generator_for(0, "sphere"))
    assert torch.equal(corners.abs(), (0.5 * scale * mask).expand(9, 4))
    boxed = L2(2.0, box=(0, 1)).sphere(x[:50], generator=generator_for(0, "sphere"))
    assert bool(L2(2.0, box=(0, 1)).contains(boxed, x[:50]).all())


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        (nll, ("nll",)),
        (ByLoss(nll), ("nll",)),
        (Toward(margin), ("margin",)),
        (ByLoss(Toward(nll)), ("nll",)),
        (MarginTo(Y), ("MarginTo",)),
        (ByLoss(MarginTo(Y)), ("MarginTo",)),
    ],
)
def test_a_loss_is_known_by_the_one_inside(loss: Any, wanted: tuple[str, ...]) -> None:
    """In records, in E16 and among the families of E30."""
    attack = PGD(L2(1.0), ((loss, 3), (loss, 2)))
    assert loss_names(attack) == wanted
    assert family_of(attack) == (f"PGD on {wanted[0]} (L2)",)
    assert said_by(L2(1.0), {"a": attack})["loss"] == wanted[0]


def test_what_counts_as_success() -> None:
    """Another class than y; y itself where it is wished for; nothing where a score is attacked."""
    prediction = Categorical(logits=torch.tensor([[0.0, 5.0], [5.0, 0.0]]))  # classes 1 and 0
    y = torch.tensor([0, 0])
    for loss, wanted in (
        (nll, [True, False]),
        (margin, [True, False]),
        (MarginTo(torch.tensor([1, 1])), [True, False]),
        (Toward(nll), [False, True]),
        (ByLoss(nll), [False, False]),
        (DivergenceFrom(torch.tensor([0.5, 0.5])), [False, False]),
        (PerExample((nll, ByLoss(nll)), torch.tensor([1, 0])), [False, False]),
        (PerExample((nll, ByLoss(nll)), torch.tensor([0, 1])), [True, False]),
    ):
        assert success(loss, prediction, y).tolist() == wanted, loss

"""A first audit: plain calls say something in seconds, and fail for nothing that was not asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from advbayes import (
    L2,
    BayesianModel,
    Claim,
    PosteriorPredictive,
    Square,
    ThreatModel,
    audit,
    from_function,
    margin,
    nll,
)
from advbayes import Categorical as Classes
from advbayes.accelerated import passes
from advbayes.attacks import APGD
from advbayes.attacks.balls import Ball
from advbayes.attacks.parts import steps_of
from advbayes.attacks.zeroth_order import blind_attacks
from advbayes.auditing import TIERS, Budget
from advbayes.auditing.copies import Forgetful
from advbayes.networks import conv_net
from advbayes.types import Loss, Predictor

SMALL = Budget(num=40, steps=6, restarts=1, random_points=5, queries=20, max_steps=12)
WEIGHT = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Counted:
    """Linear classes, with gradients or without; counts its calls."""

    def __init__(self, blind: bool = False) -> None:
        self.calls, self.blind = 0, blind

    def __call__(self, x: Tensor) -> Distribution:
        self.calls += 1
        return Categorical(logits=(x.detach() if self.blind else x) @ WEIGHT.T)


def points(num: int, spacing: float = 1.0) -> tuple[Tensor, Tensor]:
    """Inputs on a grid, no two nearer than the spacing, labelled by the linear map itself."""
    x = torch.cartesian_prod(*[torch.arange(-2.0, 2.0)] * 4)[:: 256 // num][:num] * spacing
    return x, (x @ WEIGHT.T).argmax(1)


def found(*ids: str, model: Predictor | None = None, **options: Any) -> Any:
    chosen: dict[str, Any] = {
        "ball": L2(0.3),
        "tier": SMALL,
        "progress": False,
        "data": points(40),
    } | options
    data = chosen.pop("data")
    return audit(Counted() if model is None else model, data, only=ids, **chosen)


# --- E0: units ----------------------------------------------------------------------------------


@pytest.mark.parametrize("box", [None, (-3.0, 3.0)])
def test_a_plain_call_is_in_raw_units_and_says_so(box: tuple[float, float] | None) -> None:
    e0 = found("E0", ball=L2(0.3, box=box))["E0"]
    assert e0.status == "passed"
    assert "units = raw" in e0.line()


def test_units_stay_missing_where_a_scale_speaks_of_others() -> None:
    assert "say units" in found("E0", ball=L2(0.3, scale=torch.full((4,), 2.0)))["E0"].advice
    assert "say units" in found("E0", threat_model=ThreatModel(scale=2.0))["E0"].advice
    assert "say scale" in found("E0", threat_model=ThreatModel(units="standardised"))["E0"].advice


def test_a_claim_must_say_its_units() -> None:
    x, y = points(40)
    claim = Claim({"a": x + torch.tensor([0.3, 0.0, 0.0, 0.0])})
    for said, missing in ((None, True), ("raw", False)):
        e0 = found(
            "E0",
            data=(x, y),
            claim=claim,
            attacks={"a": APGD(L2(0.3), nll, 5)},
            threat_model=ThreatModel(units=said),
        )["E0"]
        assert ("say units" in e0.advice) == missing


# --- E8: many examples watched in one run -------------------------------------------------------


@dataclass(frozen=True)
class Shrinking:
    """Moves every example past the boundary and, if `forgets`, returns it where it began; asks
    about ever fewer rows."""

    ball: Ball
    forgets: bool
    loss: Loss = margin
    steps: int = 2

    def __call__(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        broken = APGD(self.ball, self.loss, 20)(predict, x, y, generator=generator)
        for start in range(len(x)):
            predict(broken[start:])
        return x.clone() if self.forgets else broken


@pytest.mark.parametrize("eps", [0.45, 3.0])  # balls that do not meet, and balls that do
def test_e8_sees_through_rows_that_leave_the_batch(eps: float) -> None:
    ball = L2(eps)
    for forgets, wanted in ((True, "failed"), (False, "passed")):
        e8 = found("E8", ball=ball, attacks={"a": Shrinking(ball, forgets)})["E8"]
        assert e8.status == wanted
        assert e8.figures["watched"] >= (32 if eps < 0.5 else 16)


@dataclass(frozen=True)
class Choosy(Shrinking):
    """Attacks the examples whose second feature is positive, and lets the others alone."""

    def __call__(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        x_adv = torch.where(x[:, 1:2] > 0, x - torch.tensor([0.2, 0.0, 0.0]), x)
        for start in range(len(x)):
            predict(x_adv[start:])
        return x_adv


def test_e8_does_not_take_a_neighbour_for_the_example() -> None:
    """Where balls meet, a broken point of one example may lie in another's ball: that one has
    missed nothing."""
    x = torch.cartesian_prod(
        torch.tensor([0.1]), torch.tensor([-0.01, 0.01]), 2 * torch.arange(16.0)
    )
    straight = from_function(lambda z: torch.stack([z[:, 0], -z[:, 0]], 1), "logits")
    ball, y = L2(0.3), torch.zeros(32, dtype=torch.long)
    e8 = found("E8", model=straight, data=(x, y), ball=ball, attacks={"a": Choosy(ball, False)})[
        "E8"
    ]
    assert (e8.status, e8.figures["watched"]) == ("passed", 32)


def test_e8_asks_about_examples_together() -> None:
    """With balls apart a run of all examples is all that is asked for, whatever leaves the
    batch."""
    ball, attack = L2(0.45), APGD(L2(0.45), margin, 10, stop_at_success=True)
    model, alone, idle = Counted(), Counted(), Counted()
    found("E8", model=model, ball=ball, attacks={"a": attack})
    found("E0", model=idle, ball=ball, attacks={"a": attack})  # what every audit asks
    x, y = points(40)
    attack(alone, x[:32], y[:32])
    assert model.calls <= idle.calls + alone.calls + 2


# --- black boxes --------------------------------------------------------------------------------


def test_the_quick_tier_spends_a_tenth_of_the_queries_on_black_boxes_and_no_other_does() -> None:
    assert {name: budget.blind_queries or budget.queries for name, budget in TIERS.items()} == {
        "quick": 500, "standard": 5000, "full": 5000
    }  # fmt: skip
    # E11's, which it asks for at any tier
    assert {budget.queries for budget in TIERS.values()} == {5000}


def test_a_quick_audit_of_a_black_box_takes_few_calls() -> None:
    model = Counted(blind=True)
    verdict = found("E1", "E2", "E4", "E5", "E8", "E28", model=model, tier="quick")
    assert not verdict.failed
    assert model.calls < 10_000  # of some 0.3 ms each; 5,000 queries a run made 60,000


def test_queries_of_black_box_mode_are_the_budgets_where_nothing_else_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    call = Square.__call__

    def counted(self: Square, *args: Any, **options: Any) -> Tensor:
        asked.append(self.queries)
        return call(self, *args, **options)

    monkeypatch.setattr(Square, "__call__", counted)
    found("E1", model=Counted(blind=True))
    assert asked == [SMALL.queries]
    assert steps_of(blind_attacks(L2(0.3), "classification", 5, 77)["Square"]) == 77


# --- passes that are not made twice -------------------------------------------------------------


def test_e4_takes_the_audited_radius_from_the_table() -> None:
    attack = APGD(L2(0.3), nll, 10)
    verdict = found("E1", "E4", "E17", attacks={"a": attack})
    assert verdict["E4"].figures["at eps 0.3"] == verdict["E17"].figures["least_attack"]


def test_a_forgetful_copy_has_the_gradient_of_the_original() -> None:
    torch.manual_seed(0)
    model = BayesianModel(conv_net(size=8), Classes())
    predict = PosteriorPredictive(model, 0.1 * torch.randn(3, model.num_params))
    x, y = torch.rand(4, 1, 8, 8), torch.arange(4)
    for ours, own in zip(
        Forgetful(lambda: predict).loss_and_gradient(nll, x, y),
        predict.loss_and_gradient(nll, x, y),
        strict=True,
    ):
        assert torch.equal(ours, own)


# of 64 pixels: up to 48 all thetas run as one batch
@pytest.mark.parametrize("rows", [1, 47, 48, 49])
def test_small_images_run_all_thetas_at_once_and_give_the_same(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = BayesianModel(conv_net(size=8), Classes())
    thetas, x = 0.1 * torch.randn(5, model.num_params), torch.rand(rows, 1, 8, 8)
    together: list[int] = []
    as_one = passes._as_one_batch

    def counted(*args: Any) -> Any:
        together.append(1)
        return as_one(*args)

    monkeypatch.setattr(passes, "_as_one_batch", counted)
    (outputs, vjp), (plain, plain_vjp) = passes.run(model, thetas, x), model.run(thetas, x)
    assert len(together) == (rows <= 48)
    assert torch.allclose(outputs, plain, atol=1e-5)
    cotangent = torch.tensor(np.random.default_rng(0).normal(size=plain.shape), dtype=torch.float32)
    assert torch.allclose(vjp(cotangent), plain_vjp(cotangent), atol=1e-4)

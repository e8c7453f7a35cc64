"""What rounding may be off by, from both sides: a little less is let through, a little more is
not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributions import Categorical

from advbayes import L2, evaluate, metrics, one_step
from advbayes.adapters import from_function
from advbayes.attacks import DivergenceFrom
from advbayes.auditing import Claim
from advbayes.evaluation.files import _alike
from advbayes.metrics import ConstantClasses
from advbayes.report.pictures import _raw

X = torch.rand(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
HALF = torch.full((6, 2), 0.5, dtype=torch.float64)


def off(by: float) -> torch.Tensor:  # (6, 2): one of twelve numbers is off
    return HALF + by * torch.nn.functional.one_hot(torch.tensor(9), 12).view(6, 2)


def scored(by: float) -> Any:
    prediction = Categorical(probs=HALF)
    prediction.probs = off(by)
    return metrics.brier(prediction, torch.zeros(6, dtype=torch.long))


def apart(by: float) -> Any:
    """Logits that differ by so little."""
    data = X, torch.zeros(6, dtype=torch.long)
    predict = lambda x: Categorical(logits=torch.tensor([by, 0.0]) + 0 * x[:, :2])  # noqa: E731
    return evaluate(predict, data, attacks={"a": one_step(L2(0.1))}, progress=False)


# what is called, the difference allowed, and the sign of those that are not
REFUSED: dict[str, tuple[Callable[[float], Any], float, tuple[int, ...]]] = {
    "constant probabilities": (lambda by: ConstantClasses((0.5, 0.5 + by)), 1e-6, (-1, 1)),
    "a confidence": (lambda by: metrics.reliability([0.5, 1 + by], [1, 1]), 1e-5, (1,)),
    "a wanted distribution": (lambda by: DivergenceFrom(off(by)), 1e-4, (-1, 1)),
    "probabilities that are scored": (scored, 1e-3, (-1, 1)),
    "probabilities of a function": (
        lambda by: from_function(lambda x: off(by), "probs")(X),
        1e-3,
        (-1, 1),
    ),
    "log-probabilities of a function": (
        lambda by: from_function(lambda x: HALF.log() + by, "log_probs")(X),
        1e-3,
        (-1, 1),
    ),
    "log-probabilities of a claim": (
        lambda by: Claim({"a": X}, log_prob={"a": torch.full((6,), by)}),
        1e-6,
        (1,),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_as_much_is_let_through_and_no_more(name: str) -> None:
    make, limit, signs = REFUSED[name]
    make(0.0)
    for sign in (-1, 1):
        if sign in signs or name != "a confidence":
            make(sign * 0.9 * limit)
    for sign in signs:
        with pytest.raises(ValueError, match="must"):
            make(sign * 1.1 * limit)


def test_logits_that_look_like_probabilities() -> None:
    """Sums within 1e-4 of one are taken for probabilities."""
    from_function(lambda x: off(1.1e-4), "logits")(X)
    for by in (0.0, 0.9e-4, -0.9e-4):
        with pytest.raises(ValueError, match="look like probabilities"):
            from_function(lambda x, by=by: off(by), "logits")(X)  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore::advbayes.evaluation.UnchangedWarning")
@pytest.mark.filterwarnings("ignore::advbayes.attacks.gradients.NoGradientWarning")
def test_classes_are_told_apart_by_a_ten_millionth() -> None:
    apart(1.1e-7)
    with pytest.raises(ValueError, match="must tell the classes apart"):
        apart(0.9e-7)


@pytest.mark.parametrize(("by", "alike"), [(1.9e-4, True), (2.1e-4, False), (-2.1e-4, False)])
def test_records_of_other_machines_are_alike_to_a_ten_thousandth(by: float, alike: bool) -> None:
    """Of one and the value; words and whole numbers are equal or not."""
    assert _alike({"a": [1.0, 1.0 + by]}, {"a": [1.0, 1.0]}) is alike
    assert _alike([by / 2], [0.0]) is alike
    assert not _alike([1, "b"], [1, "c"])
    assert not _alike([1.0], [1.0, 1.0])


@pytest.mark.parametrize(("off_zero", "shown"), [(0.9e-6, 0.0), (1.1e-6, 1.1e-6)])
def test_a_zero_in_raw_units_is_a_millionth_of_the_mean(off_zero: float, shown: float) -> None:
    assert _raw(-1.0 + off_zero, 2.0, 2.0) == pytest.approx(2 * shown, rel=1e-6, abs=1e-15)

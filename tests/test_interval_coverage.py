"""Intervals by their coverage, not only their values: a 90 % interval holds the truth in 90 % of
the samples, from both sides."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from advbayes import L2, evaluate, metrics, pgd
from advbayes.evaluation import score
from advbayes.metrics import Estimate
from advbayes.seeds import generator_for

LEVELS = (0.8, 0.9, 0.95)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "interval", [metrics.wilson, metrics.clopper_pearson], ids=lambda f: f.__name__
)
def test_binomial_intervals_cover_as_they_say(
    interval: Callable[..., tuple[float, float]], level: float
) -> None:
    """Exactly, summed over all outcomes; Wilson's is right on average over p, Clopper's and
    Pearson's never below."""
    num = 40
    ends = [interval(k, num, level=level) for k in range(num + 1)]
    found = []
    for p in torch.linspace(0.05, 0.95, 91).tolist():
        weights = [math.comb(num, k) * p**k * (1 - p) ** (num - k) for k in range(num + 1)]
        found.append(
            sum(w for w, (low, high) in zip(weights, ends, strict=True) if low <= p <= high)
        )
    average = sum(found) / len(found)
    if interval is metrics.wilson:
        assert average == pytest.approx(level, abs=0.012)
    else:
        assert min(found) >= level
        assert average < level + 0.6 * (1 - level)


def _normal_mean(generator: torch.Generator, level: float) -> tuple[Estimate, float]:
    return metrics.mean(torch.randn(60, generator=generator), level=level), 0.0


def _bootstrap(generator: torch.Generator, level: float) -> tuple[Estimate, float]:
    scores = torch.randn(60, generator=generator)
    return metrics.mean(
        scores, level=level, method="bootstrap", num_resamples=300, generator=generator
    ), 0.0


def _rmse(generator: torch.Generator, level: float) -> tuple[Estimate, float]:
    return metrics.rmse(
        torch.randn(80, generator=generator) ** 2,
        level=level,
        num_resamples=300,
        generator=generator,
    ), 1.0


def _paired(generator: torch.Generator, level: float) -> tuple[Estimate, float]:
    shared = 5 * torch.randn(60, generator=generator)  # what a paired comparison takes out
    first, second = (shared + torch.randn(60, generator=generator) for _ in range(2))
    return metrics.paired_difference(first + 0.3, second, level=level), 0.3


def _auroc(generator: torch.Generator, level: float) -> tuple[Estimate, float]:
    scores = torch.randn(80, generator=generator)
    positive = torch.arange(80) < 40
    return metrics.auroc(scores + positive, positive, level=level), 0.5 * (1 + math.erf(0.5))


def _balanced(generator: torch.Generator, level: float) -> tuple[Estimate, float]:
    labels = (torch.arange(120) < 90).long()
    rates = torch.where(labels == 1, 0.9, 0.6)
    return metrics.balanced_accuracy(
        torch.rand(120, generator=generator) < rates, labels, level=level
    ), 0.75


def _recall(generator: torch.Generator, level: float) -> tuple[Estimate, float]:
    labels = (torch.arange(120) < 40).long()
    return metrics.recall(
        torch.rand(120, generator=generator) < 0.7, labels, of=1, level=level
    ), 0.7


SAMPLED: dict[
    str, tuple[Callable[[torch.Generator, float], tuple[Estimate, float]], float]
] = {  # with their known bias
    "normal mean": (_normal_mean, 0.005),
    "bootstrap": (_bootstrap, 0.015),
    "rmse": (_rmse, 0.025),
    "paired difference": (_paired, 0.015),
    "auroc": (_auroc, 0.015),
    "balanced accuracy": (_balanced, 0.015),
    "recall": (_recall, 0.025),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_intervals_of_samples_cover_as_they_say(name: str) -> None:
    """Within 3.5 standard errors and what is known of each: percentile intervals are a little
    short, counts come in steps."""
    make, bias = SAMPLED[name]
    num = 1200
    for level in (0.8, 0.9):
        held = [make(generator_for(seed, name), level) for seed in range(num)]
        share = sum(estimate.low <= truth <= estimate.high for estimate, truth in held) / num
        assert share == pytest.approx(level, abs=bias + 3.5 * math.sqrt(level * (1 - level) / num))


def test_the_balanced_accuracy_of_many_small_classes_is_held() -> None:
    """Ten of ten examples each: Wilson's centres are all drawn towards 1/2, and an interval around
    their mean held the truth in 60 % of the samples."""
    num, labels = 400, torch.arange(100) % 10
    held = 0
    for seed in range(num):
        right = torch.rand(100, generator=generator_for(seed, "many classes")) < 0.95
        found = metrics.balanced_accuracy(right, labels)
        held += found.low <= 0.95 <= found.high
    assert held / num > 0.93


@pytest.mark.parametrize("hits", [0, 3, 49])
def test_the_balanced_accuracy_of_one_class_is_its_recall(hits: int) -> None:
    right, labels = torch.arange(49) < hits, torch.zeros(49)
    found, wanted = metrics.balanced_accuracy(right, labels), metrics.recall(right, labels, of=0)
    assert (found.value, found.low, found.high) == pytest.approx(
        (wanted.value, wanted.low, wanted.high), abs=1e-12
    )


def test_an_order_without_a_mistake_is_not_certain() -> None:
    """Every resample of it is perfect too; so are many samples of an area that is not quite."""
    for num in (7, 20, 60):
        positive = torch.arange(2 * num) < num
        found = metrics.auprc(positive, positive)
        assert (found.low, found.high) == (metrics.wilson(num, num)[0], 1.0)
        found, worth = metrics.aurc(torch.zeros(num), torch.arange(num)), 0.0
        for place in range(1, num + 1):
            worth += sum(1 / k for k in range(place, num + 1)) ** 2 / num**2
        assert found.low == 0
        assert found.high == pytest.approx(metrics.wilson(0, int(1 / worth + 1e-9))[1])
    assert metrics.aurc(torch.full((9,), 0.5), torch.arange(9)).high == 0.5  # no truth values


def test_an_area_of_bounded_losses_knows_their_bound() -> None:
    none, hardly = torch.zeros(30), torch.eye(30)[7] / 1000
    order = torch.arange(30)
    bounds = [metrics.aurc(losses, order, most=1.0).high for losses in (none, hardly)]
    assert bounds[1] == pytest.approx(bounds[0], abs=1e-3)
    shares = torch.rand(30, generator=generator_for(0, "shares"))
    found, tenfold = (
        metrics.aurc(shares, order, most=1.0),
        metrics.aurc(10 * shares, order, most=10),
    )
    for name in ("value", "low", "high"):
        assert getattr(tenfold, name) == pytest.approx(10 * getattr(found, name))
    for losses in (shares - 1, 2 * shares):
        with pytest.raises(ValueError, match="losses must be from 0 to most"):
            metrics.aurc(losses, order, most=1.0)


@pytest.mark.parametrize("num", [20, 60])
def test_areas_near_their_end_are_held(num: int) -> None:
    """A bootstrap alone held them in 11 to 59 % of the samples."""
    repeats, held = 300, [0, 0, 0]
    spaced = torch.linspace(0, 1, 20001, dtype=torch.float64)
    true_aurc = metrics.risk_coverage(0.05 * (1 - spaced), spaced).aurc
    many = torch.randn(400_000, generator=generator_for(0, "many"))
    half = torch.arange(400_000) % 2
    true_auprc = metrics.auprc(many + 4 * half, half, num_resamples=2).value
    for seed in range(repeats):
        generator = generator_for(seed, "areas")
        confidence = torch.rand(num, generator=generator)
        wrong = torch.rand(num, generator=generator) < 0.05 * (1 - confidence)
        few: Any = {"num_resamples": 50, "generator": generator}
        found = metrics.aurc(wrong, confidence, **few)
        held[0] += found.low <= true_aurc <= found.high
        shares = wrong * torch.rand(num, generator=generator)  # wrong in some of several answers
        found = metrics.aurc(shares, confidence, most=1.0, **few)
        held[2] += found.low <= true_aurc / 2 <= found.high
        positive = torch.arange(num) % 2
        scores = torch.randn(num, generator=generator) + 4 * positive
        found = metrics.auprc(scores, positive, **few)
        held[1] += found.low <= true_auprc <= found.high
    assert min(held) / repeats > 0.93


# --- scores and tables --------------------------------------------------------------------------


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_halves_of_odd_counts_share_every_call_once(repeats: int) -> None:
    """Call k is right for the examples up to k: each half is the mean of its own calls, and
    together they are the whole."""
    calls = iter(range(100))

    def predict(x: Tensor) -> Distribution:
        right = (torch.arange(6) <= next(calls)).double()
        return Categorical(probs=torch.stack([0.2 + 0.6 * right, 0.8 - 0.6 * right], 1))

    columns = score(
        predict,
        torch.zeros(6, 1),
        torch.zeros(6).long(),
        "classification",
        repeats=repeats,
        halves=True,
    )
    right = torch.stack([(torch.arange(6) <= call).double() for call in range(repeats)])
    first = repeats // 2
    torch.testing.assert_close(columns["correct_first"], right[:first].mean(0))
    torch.testing.assert_close(columns["correct_second"], right[first:].mean(0))
    torch.testing.assert_close(columns["correct"], right.mean(0))
    torch.testing.assert_close(
        repeats * columns["log_prob"],
        first * columns["log_prob_first"] + (repeats - first) * columns["log_prob_second"],
    )


WEIGHT = torch.randn(2, 4, generator=generator_for(0, "weight"))
X = torch.randn(90, 4, generator=generator_for(0, "x"))
Y = (
    (X @ (WEIGHT[1] - WEIGHT[0]) + torch.randn(90, generator=generator_for(0, "noise"))) > 0.8
).long()


def predict(x: Tensor) -> Distribution:
    return Categorical(logits=x @ WEIGHT.T)


def test_printed_tables_say_the_numbers_behind_them() -> None:
    report = evaluate(predict, (X, Y), attacks={"PGD": pgd(L2(0.3), 5)}, radii=(0.1, 0.3))
    names = ("accuracy", "nll", "brier", "ece", "balanced_accuracy", "recall", "auroc", "auprc")
    table = report.table(names)
    cell = re.compile(r"^(\S+) \[(\S+), (\S+)\]$")
    lines = [
        [part.strip() for part in line.strip("|").split("|")]
        for line in table.markdown().splitlines()
    ]
    text = [re.split(r"\s{2,}", line.strip()) for line in table.text().splitlines()]
    assert lines[0] == text[0] == ["predictor", "attack", "eps", *names]
    assert lines[2:] == [
        [*row] if len(row) == len(lines[0]) else [row[0], row[1], "", *row[2:]] for row in text[2:]
    ]
    for name, attack, eps, *values in lines[2:]:
        label = "clean" if attack == "any" else attack
        for metric, shown in zip(names, values, strict=True):
            if not shown:
                continue
            estimate = report.estimate(
                metric, name, label, float(eps) if eps and label != "clean" else None
            )
            found = cell.match(shown)
            assert found is not None, shown
            for printed, value in zip(
                found.groups(), (estimate.value, estimate.low, estimate.high), strict=True
            ):
                assert float(printed) == pytest.approx(value, abs=5.1e-4, rel=5e-3)
    assert {row[1] for row in lines[2:]} == {"clean", "PGD", "worst", "any"}


def test_unequal_classes_are_scored_under_attack_as_scikit_learn_scores_them() -> None:
    from sklearn.metrics import (
        average_precision_score,
        balanced_accuracy_score,
        recall_score,
        roc_auc_score,
    )

    attack = pgd(L2(0.3), 5)
    report = evaluate(predict, (X, Y), attacks={"PGD": attack})
    for label in ("clean", "PGD"):
        points = X if label == "clean" else attack(predict, X, Y)
        prediction: Any = predict(points)
        guess, chance = prediction.logits.argmax(1), prediction.probs[:, 1]
        wanted = {
            "balanced_accuracy": balanced_accuracy_score(Y, guess),
            "recall": recall_score(Y, guess),
            "auroc": roc_auc_score(Y, chance),
            "auprc": average_precision_score(Y, chance),
        }
        for name, value in wanted.items():
            assert report.estimate(name, attack=label).value == pytest.approx(value, abs=1e-6)
    tied = torch.tensor([1.0, 1.0, 0.5, 0.5, 0.5, 0.0]), torch.tensor([1, 0, 1, 0, 1, 1])
    assert metrics.auprc(*tied).value == pytest.approx(average_precision_score(tied[1], tied[0]))
    with pytest.raises(ValueError, match="of must be a class that occurs"):
        metrics.recall([1, 0], [0, 0], of=1)

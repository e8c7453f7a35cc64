"""Scores against their formulas where one case is not enough: any coverage, any units, both halves,
both sides of a limit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, Normal, kl_divergence

from advbayes import (
    L2,
    BayesianModel,
    Categorical,
    Gaussian,
    Linf,
    Noise,
    evaluate,
    one_step,
    pgd,
    selective_task,
)
from advbayes.attacks import DivergenceFrom
from advbayes.attacks.balls import Ball
from advbayes.evaluation import worst
from advbayes.purification import Purifier
from advbayes.purification.diagnosis import chi_square_limit

from .contracts import seeded


def line(x: Tensor) -> Distribution:
    return CategoricalDistribution(logits=torch.stack([x[:, 0], -x[:, 0]], 1))


@pytest.mark.parametrize("coverage", [0.2, 0.5, 0.75, 0.9, 1.0])
def test_the_selective_task_keeps_the_surest_share(coverage: float) -> None:
    """Untouched: of 40 known and 40 foreign inputs those of lowest entropy are kept."""
    known, foreign = (
        2 * torch.randn(40, 1, generator=seeded(1)),
        torch.randn(40, 1, generator=seeded(2)),
    )
    y = (torch.rand(40, generator=seeded(3)) < 0.5).long()
    (point,) = selective_task(
        line, (known, y), foreign, ball=L2(1.0), radii=(0.0,), coverage=coverage
    )
    doubt = line(torch.cat([known, foreign])).entropy()
    kept = doubt.argsort()[: math.ceil(round(80 * coverage, 9))]
    right = torch.cat([line(known).probs.argmax(1) == y, torch.zeros(40, dtype=torch.bool)])
    assert point.kept_outside == pytest.approx(float((kept >= 40).double().mean()))
    assert point.selective_accuracy.value == pytest.approx(float(right[kept].double().mean()))


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_worst_of_noisy_scores_is_chosen_on_one_half_and_read_from_the_other(task: str) -> None:
    """Both ways round, and averaged; the name of an example's worst attack may differ between the
    halves."""
    main, harm = ("correct", -1) if task == "classification" else ("squared_error", 1)
    num, columns = 50, []
    for seed in range(3):
        halves = {
            f"{name}_{half}": torch.rand(num, generator=seeded(10 * seed + k), dtype=torch.float64)
            for k, (name, half) in enumerate(
                (name, half) for name in (main, "log_prob") for half in ("first", "second")
            )
        }
        halves |= {
            name: (halves[f"{name}_first"] + halves[f"{name}_second"]) / 2
            for name in (main, "log_prob")
        }
        columns.append(halves)
    found = worst(columns, task)  # type: ignore[arg-type]
    for name, direction in ((main, harm), ("log_prob", -1)):
        first, second = (
            torch.stack([rows[f"{name}_{half}"] for rows in columns])
            for half in ("first", "second")
        )
        wanted = torch.zeros(num, dtype=torch.float64)
        for chosen_on, read in ((first, second), (second, first)):
            pick = (direction * chosen_on).argmax(0)
            wanted += read[pick, torch.arange(num)] / 2
        assert torch.allclose(found[name], wanted), name


@pytest.mark.parametrize("kind", [L2, Linf])
def test_the_norm_of_a_change_is_recorded_in_the_units_of_its_ball(kind: type) -> None:
    scale = torch.tensor([0.1, 2.0, 5.0])
    ball: Ball = kind(0.7, scale=scale)
    weight = torch.randn(2, 3, generator=seeded(4))
    x, y = torch.randn(20, 3, generator=seeded(5)), torch.zeros(20, dtype=torch.long)

    def predict(x: Tensor) -> Distribution:
        return CategoricalDistribution(logits=x @ weight.T)

    found = evaluate(predict, (x, y), attacks={"one": one_step(ball)}, progress=False)
    norms = found.columns(attack="one")["norm"]
    assert torch.allclose(norms, torch.full((20,), 0.7, dtype=torch.float64), rtol=1e-4)


def test_a_wanted_gaussian_is_approached_in_the_divergence_from_it() -> None:
    """-KL(N(target, scale^2) | N(mean, sd^2)), number by number."""
    mean, sd, target, scale = (
        torch.rand(4, 30, generator=seeded(6), dtype=torch.float64) + 0.3
    ).unbind()
    found = DivergenceFrom(target, scale)(Normal(mean, sd), torch.zeros(30))
    assert torch.allclose(found, -kl_divergence(Normal(target, scale), Normal(mean, sd)))
    x = torch.zeros(1, 1)
    near = pgd(L2(3.0), 40, DivergenceFrom(2.0, 0.5))(
        lambda x: Normal(x[:, 0], 0.5), x, torch.zeros(1)
    )
    assert float(near) == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize("sigma", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_support_ends_at_six_standard_deviations_of_the_noise(sigma: float, task: str) -> None:
    """In units of the noise, whatever those of the data are: the squared distance to the centre,
    over sigma^2, from both sides of the limit."""
    outputs, likelihood = (3, Categorical()) if task == "classification" else (1, Gaussian(0.5))
    model = BayesianModel(nn.Linear(5, outputs).double(), likelihood)  # type: ignore[arg-type]
    reference = torch.zeros(1, 5, dtype=torch.float64)
    purifier = Purifier(
        model, Noise(sigma), model.initial_theta().unsqueeze(0), reference.expand(3, 5)
    )
    edge = sigma * math.sqrt(chi_square_limit(5))
    direction = torch.nn.functional.normalize(torch.ones(1, 5, dtype=torch.float64))
    asked = torch.cat([0.999 * edge * direction, 1.001 * edge * direction])
    found = purifier.diagnose(asked)
    assert found.out_of_support.tolist() == [False, True]
    assert torch.allclose(found.distance, torch.tensor([0.999, 1.001]).double() * edge, rtol=1e-6)

"""What `evaluate` scores: alignment with the examples, shapes, stochastic predictors, and
predictions that give less."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Laplace, Normal, StudentT
from torch.utils.data import DataLoader, TensorDataset

from advbayes import (
    L2,
    evaluate,
    from_function,
    load_evaluation,
    metrics,
    pgd,
    rescore,
    selective_task,
    squared_error,
)
from advbayes.attacks import (
    ByLoss,
    DivergenceFrom,
    MarginTo,
    PerExample,
    Suite,
    Transfer,
    entropy,
    margin,
    nll,
)
from advbayes.evaluation import Cell, UnitsWarning, score, worst
from advbayes.evaluation.result import REDUCTIONS
from advbayes.evaluation.selective import _point
from advbayes.store import RecordLog


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


WEIGHT = torch.randn(3, 6, generator=generator(0))
X = torch.randn(100, 6, generator=generator(1))
Y = (X @ WEIGHT.T).argmax(1)
NEXT = (Y + 1) % 3
WISH = torch.nn.functional.one_hot(NEXT, 3) * 0.98 + 0.02 / 3
SLOPE = torch.randn(6, generator=generator(2))
TARGETS = X @ SLOPE + 0.3 * torch.randn(100, generator=generator(3))

# an attack that does nothing is meant
IDLE = pytest.mark.filterwarnings("ignore::advbayes.evaluation.UnchangedWarning")


def predict(x: Tensor) -> Distribution:
    return Categorical(logits=x @ WEIGHT.T)


def normal(x: Tensor) -> Distribution:
    return Normal(x @ SLOPE, 0.3)


# --- losses with one entry for each example -----------------------------------------------------

HELD = {
    "divergence": pgd(L2(1.0), 20, DivergenceFrom(WISH)),
    "margin to": pgd(L2(1.0), 20, ByLoss(MarginTo(NEXT))),
    "per example": pgd(L2(1.0), 20, ByLoss(PerExample((nll, entropy), torch.arange(100) % 2))),
    "suite": Suite((pgd(L2(1.0), 20, DivergenceFrom(WISH)),), rank=DivergenceFrom(WISH)),
    "transfer": Transfer(
        pgd(L2(1.0), 20, ByLoss(MarginTo(NEXT))), (predict,), rank=ByLoss(MarginTo(NEXT))
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_blocks_meet_their_own_entries(name: str) -> None:
    attacks = {"d": HELD[name]}
    whole, parts = (
        evaluate(predict, (X, Y), attacks=attacks, batch_size=size).columns(attack="d")
        for size in (100, 30)
    )
    assert torch.equal(whole["correct"], parts["correct"])
    for column in ("log_prob", "loss", "entropy", "norm"):
        torch.testing.assert_close(whole[column], parts[column], rtol=1e-4, atol=1e-4)


def test_batches_of_the_selective_task_meet_their_own_entries() -> None:
    attack = pgd(L2(1.0), 20, DivergenceFrom(WISH))
    whole, parts = (
        selective_task(
            predict, (X, Y), 0.1 * X[:80], ball=L2(1.0), inside_attack=attack, batch_size=size
        )
        for size in (100, 30)
    )
    assert whole[0].selective_accuracy == parts[0].selective_accuracy


def test_entries_for_other_examples_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"attacks\['d'\] must hold a loss with one entry for each of the 100 examples, got "
        r"one for 50",
    ):
        evaluate(
            predict, (X, Y), attacks={"d": pgd(L2(1.0), 2, MarginTo(NEXT[:50]))}, batch_size=50
        )


# --- shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [nll, squared_error])
def test_targets_of_one_output_may_have_an_axis_of_one_and_are_never_broadcast(loss: Any) -> None:
    attacks = {"a": pgd(L2(0.5), 5, loss)}
    p = from_function(lambda z: z @ SLOPE, "mean", scale=0.3)
    flat = evaluate(p, (X, TARGETS), attacks=attacks, train_y=TARGETS[:, None].numpy())
    column = evaluate(p, (X, TARGETS[:, None]), attacks=attacks)
    for attack in ("clean", "a", "worst"):
        for name, values in flat.columns(attack=attack).items():
            assert values.shape == (100,)
            assert torch.equal(values, column.columns(attack=attack)[name]), (attack, name)


@pytest.mark.parametrize(
    "shaped",
    [
        lambda x: Normal((x @ SLOPE)[:, None], 0.3),
        lambda x: Independent(Normal((x @ SLOPE)[:, None], 0.3 * torch.ones(len(x), 1)), 1),
    ],
)
def test_predictions_with_an_axis_of_one_take_flat_targets(shaped: Any) -> None:
    wanted = evaluate(normal, (X, TARGETS), attacks={"a": pgd(L2(0.5), 5)})
    found = evaluate(shaped, (X, TARGETS), attacks={"a": pgd(L2(0.5), 5)})
    for name in ("loss", "log_prob", "squared_error", "crps", "inside"):
        torch.testing.assert_close(
            found.columns(attack="clean")[name], wanted.columns(attack="clean")[name]
        )


# --- Suites of two tasks ------------------------------------------------------------------------


def test_the_recorded_loss_is_one_that_ran() -> None:
    suite = Suite((pgd(L2(0.5), 5, margin),), regression=(pgd(L2(0.5), 5, squared_error),))
    rows = evaluate(predict, (X, Y), attacks={"s": suite}).columns(attack="s")
    assert torch.equal(rows["loss"] > 0, rows["correct"] == 0)  # the margin's sign
    rows = evaluate(normal, (X, TARGETS), attacks={"s": Transfer(suite, (normal,))}).columns(
        attack="s"
    )
    torch.testing.assert_close(rows["loss"], rows["squared_error"])


# --- stochastic predictors ----------------------------------------------------------------------


def coin(x: Tensor) -> Distribution:
    p = torch.where(torch.rand(len(x)) < 0.6, 0.6, 0.4)
    return Categorical(probs=torch.stack([p, 1 - p], 1))


def null(predict: Any, x: Tensor, y: Tensor, generator: Any = None) -> Tensor:
    return x.clone()


@IDLE
def test_attacks_that_do_nothing_cost_a_stochastic_predictor_nothing() -> None:
    data = torch.randn(2000, 3, generator=generator(4)), torch.zeros(2000).long()
    attacks = {f"null {number}": null for number in range(4)}
    report = evaluate(coin, data, attacks=attacks, batch_size=2000)
    assert report.estimate("accuracy", attack="clean").value == pytest.approx(0.6, abs=0.015)
    # sd 0.0035
    assert report.estimate("accuracy", attack="worst").value == pytest.approx(0.6, abs=0.015)
    mean = -0.6 * np.log(0.6) - 0.4 * np.log(0.4)
    assert report.estimate("nll", attack="worst").value == pytest.approx(mean, abs=0.01)
    assert report.columns(attack="worst")["norm"].abs().max() == 0


@IDLE
def test_scores_by_class_of_a_stochastic_predictor_are_those_of_its_records() -> None:
    """However often it was asked: the mean of ten labels is not quite the label."""
    label = torch.arange(60) % 3
    for classes, asked in ((2, 10), (3, 10), (3, 7)):

        def shaky(x: Tensor, classes: int = classes) -> Distribution:
            return Categorical(logits=2 * torch.randn(len(x), classes) + x[:, :1])

        y = label % classes
        x = torch.randn(60, 3, generator=generator(4))
        report = evaluate(shaky, (x, y), attacks={"null": null}, rescore=asked)
        for attack in ("clean", "null", "worst"):
            rows = report.columns(attack=attack)
            assert torch.equal(rows["label"], y.double())
            recalls = [float(rows["correct"][y == c].mean()) for c in range(classes)]
            balanced = report.estimate("balanced_accuracy", attack=attack).value
            assert balanced == pytest.approx(sum(recalls) / classes)
            assert report.estimate("recall", attack=attack).value == pytest.approx(recalls[1])
        if classes == 2:
            expected = metrics.auroc(rows["positive"], y).value
            assert report.estimate("auroc", attack="worst").value == expected


@IDLE
def test_a_folder_gives_the_worst_of_a_stochastic_predictor_again(tmp_path: Path) -> None:
    report = evaluate(
        coin, (X, torch.zeros(100).long()), attacks={"a": null, "b": null}, out=tmp_path
    )
    loaded = load_evaluation(tmp_path)
    assert torch.equal(
        loaded.columns(attack="worst")["correct"], report.columns(attack="worst")["correct"]
    )
    again = rescore(tmp_path, coin)
    assert torch.equal(
        again.columns(attack="worst")["correct"], report.columns(attack="worst")["correct"]
    )


def test_the_worst_attack_of_each_example_is_still_found() -> None:
    """Two attacks that each break the other half, under noise: the union breaks nearly all."""

    def shaky(x: Tensor) -> Distribution:
        return Categorical(
            logits=torch.stack([3 * x[:, 0], -3 * x[:, 0]], 1) + 0.5 * torch.randn(len(x), 2)
        )

    x = torch.ones(200, 1)

    def on(even: int) -> Any:
        return lambda predict, x, y, generator=None: torch.where(
            torch.arange(len(x))[:, None] % 2 == even, -x, x
        )

    report = evaluate(shaky, (x, torch.zeros(200).long()), attacks={"even": on(0), "odd": on(1)})
    assert report.estimate("accuracy", attack="even").value == pytest.approx(0.5, abs=0.01)
    assert report.estimate("accuracy", attack="worst").value < 0.01


@IDLE
def test_halves_are_those_of_the_scorings_and_deterministic_predictors_have_none() -> None:
    data = torch.randn(50, 3, generator=generator(4)), torch.zeros(50).long()
    rows = evaluate(coin, data, attacks={"null": null}).columns(attack="null")
    for name in ("correct", "log_prob", "brier", "entropy", "confidence", "loss"):
        torch.testing.assert_close((rows[f"{name}_first"] + rows[f"{name}_second"]) / 2, rows[name])
    plain = evaluate(predict, (X, Y), attacks={"a": pgd(L2(0.5), 5), "b": pgd(L2(0.5), 5, margin)})
    each = [plain.columns(attack=name) for name in ("clean", "a", "b")]
    assert not [name for name in each[0] if name.endswith(("_first", "_second"))]
    union = plain.columns(attack="worst")
    for name, take in (("correct", torch.amin), ("log_prob", torch.amin), ("brier", torch.amax)):
        assert torch.equal(union[name], take(torch.stack([rows[name] for rows in each]), 0))


@IDLE
def test_records_without_halves_still_load_and_are_gone_on_with(tmp_path: Path) -> None:
    data = torch.randn(60, 3, generator=generator(4)), torch.zeros(60).long()
    attacks = {"a": null, "b": null}
    report = evaluate(coin, data, attacks=attacks, batch_size=30, out=tmp_path)
    log = RecordLog(tmp_path / "records.jsonl")
    old = [
        {key: value for key, value in line.items() if not key.endswith(("_first", "_second"))}
        for line in log.read()
    ]
    log.keep(0)
    log.append(*old)
    loaded = load_evaluation(tmp_path)
    each = [report.columns(attack=name)["correct"] for name in ("clean", "a", "b")]
    assert torch.equal(loaded.columns(attack="worst")["correct"], torch.stack(each).amin(0))
    log.keep(90)
    resumed = evaluate(coin, data, attacks=attacks, batch_size=30, out=tmp_path)
    assert torch.equal(resumed.columns(attack="b")["correct"], each[2])
    assert torch.equal(resumed.columns(attack="worst")["correct"], torch.stack(each).amin(0))


@IDLE
def test_worst_of_one_column_is_that_column() -> None:
    rows = evaluate(coin, (X, torch.zeros(100).long()), attacks={"null": null}).columns(
        attack="null"
    )
    assert torch.equal(worst([rows], "classification")["correct"], rows["correct"])


def test_shares_are_not_rounded() -> None:
    rows = {
        "confidence": torch.full((50,), 0.7),
        "correct": torch.full((50,), 0.7),
        "entropy": torch.arange(50.0),
    }
    assert REDUCTIONS["classification"]["ece"](rows).value == pytest.approx(0.0, abs=1e-12)
    assert REDUCTIONS["classification"]["selective_accuracy"](rows).value == pytest.approx(0.7)
    point = _point(1.0, rows["correct"], torch.zeros(50), torch.ones(50), coverage=0.5)
    assert point.selective_accuracy.value == pytest.approx(0.7)
    assert [b.accuracy.value for b in metrics.reliability([0.5], [0.25], bins=1)] == [0.25]
    with pytest.raises(
        ValueError,
        match=r"correct must hold truth values or shares in \[0, 1\], got values in \[1, 1.5\]",
    ):
        metrics.ece([0.5, 0.5], [1.0, 1.5])


# --- predictions that give less -----------------------------------------------------------------


class Bare(Distribution):
    """Mean, variance and log-density, and nothing else."""

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, mean: Tensor) -> None:
        self.normal = Normal(mean, 0.3)
        super().__init__(batch_shape=mean.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.normal.mean

    @property
    def variance(self) -> Tensor:
        return self.normal.variance

    def log_prob(self, value: Tensor) -> Tensor:
        return self.normal.log_prob(value)


@pytest.mark.parametrize("df", [1.5, 5.0])
def test_a_prediction_without_a_cdf_has_no_coverage(tmp_path: Path, df: float) -> None:
    def student(x: Tensor) -> Distribution:
        return StudentT(df, x @ SLOPE, 0.3)

    report = evaluate(student, (X, TARGETS), attacks={"a": pgd(L2(0.3), 5)}, out=tmp_path)
    rows = report.columns(attack="a")
    assert "inside" not in rows
    torch.testing.assert_close(
        report.columns(attack="clean")["log_prob"], student(X).log_prob(TARGETS).double()
    )
    assert report.estimate("rmse").value > report.estimate("rmse", attack="clean").value
    with pytest.raises(
        ValueError,
        match="metric must be one that the predictions can give, got 'coverage' without 'inside'",
    ):
        report.estimate("coverage")
    assert report.table().metrics == ("rmse", "nll", "crps", "aurc")
    assert load_evaluation(tmp_path).table().json() == report.table().json()
    assert (
        evaluate(student, (X, TARGETS), attacks={"a": pgd(L2(0.3), 5)}, out=tmp_path).table().json()
        == report.table().json()
    )


def test_mean_variance_and_log_prob_are_enough() -> None:
    report = evaluate(
        {"bare": lambda x: Bare(x @ SLOPE), "normal": normal},
        (X, TARGETS),
        attacks={"a": pgd(L2(0.3), 5)},
    )
    assert set(report.columns("bare", "a")) == {"loss", "squared_error", "log_prob", "norm"}
    torch.testing.assert_close(
        report.columns("bare", "a")["log_prob"], report.columns("normal", "a")["log_prob"]
    )
    table = report.table()
    assert table.metrics == ("rmse", "nll", "crps", "coverage", "aurc")
    assert [set(row.values) for row in table.rows if row.predictor == "bare"] == [
        {"rmse", "nll"}
    ] * 3
    assert table.markdown().splitlines()[2].endswith("|  |  |  |")
    assert Cell("bare", "a", 0.3) in report.cells


# --- what is refused, and warned of -------------------------------------------------------------


def test_every_radius_is_held_against_the_data() -> None:
    with pytest.warns(UnitsWarning, match="eps = 10000, but the data extend over"):
        evaluate(predict, (X, Y), attacks={"P": pgd(L2(0.5), 1)}, radii=(0.5, 1e4))
    # that of the attack itself is not used
    evaluate(predict, (X, Y), attacks={"P": pgd(L2(1e4), 1)}, radii=(0.5,))


def test_bad_arguments_are_named() -> None:
    attacks = {"P": pgd(L2(0.5), 1)}

    def run(data: Any = (X, Y), **kwargs: Any) -> Any:
        return evaluate(predict, data, attacks=attacks, **kwargs)

    with pytest.raises(
        TypeError, match=r"radii must be a sequence of numbers such as \(0.5, 1.0\), got 0.5"
    ):
        run(radii=0.5)
    with pytest.raises(ValueError, match="radii must hold at least one eps"):
        run(radii=())
    with pytest.raises(ValueError, match="radii must be a finite number >= 0, got -1"):
        run(radii=(0.5, -1.0))
    with pytest.raises(
        ValueError, match="interval_level must be a finite number > 0 and < 1, got 2"
    ):
        run(interval_level=2)
    with pytest.raises(TypeError, match="train_y must be a tensor, an array or a list"):
        run(train_y="labels")
    with pytest.raises(ValueError, match=r"train_y must have shape \(N,\)"):
        run(train_y=[])
    with pytest.raises(
        ValueError, match=r"data must be a DataLoader of pairs \(x, y\), got batches of 3 parts"
    ):
        run(DataLoader(TensorDataset(X, Y, Y), batch_size=50))
    with pytest.raises(ValueError, match="DataLoader of pairs"):
        run(DataLoader(X, batch_size=50))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ball must be a ball such as L2\(1.0\), got 1.0"):
        selective_task(predict, (X, Y), X, ball=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="radii must hold at least one eps"):
        selective_task(predict, (X, Y), X, ball=L2(1.0), radii=())


def test_training_targets_may_be_arrays_and_lists() -> None:
    labels = torch.tensor([0, 1, 1, 1, 2])
    wanted = (
        evaluate(predict, (X, Y), attacks={"P": pgd(L2(0.5), 1)}, train_y=labels)
        .estimate("nll", "majority")
        .value
    )
    for given in (labels.numpy(), labels.tolist(), labels[:, None].numpy()):
        found = evaluate(predict, (X, Y), attacks={"P": pgd(L2(0.5), 1)}, train_y=given)
        assert found.estimate("nll", "majority").value == wanted
    assert (
        wanted
        != evaluate(predict, (X, Y), attacks={"P": pgd(L2(0.5), 1)})
        .estimate("nll", "majority")
        .value
    )
    regression = evaluate(normal, (X, TARGETS), attacks={"P": pgd(L2(0.5), 1)}, train_y=[1.0, 3.0])
    assert regression.estimate("rmse", "constant").value == pytest.approx(
        float((TARGETS - 2).square().mean().sqrt()), rel=1e-5
    )


def test_intervals_of_several_outputs_without_quantiles_are_those_of_draws() -> None:
    """Where a target is not at an edge, the rank among draws says what the quantiles say."""
    means = X[:, :2]
    edge = float(Laplace(0.0, 0.3).icdf(torch.tensor(0.9)))  # of central intervals at 0.8
    share = torch.tensor([0.5, 2.0])[
        torch.randint(2, (100, 2), generator=torch.Generator().manual_seed(3))
    ]
    y = means + edge * share
    columns = score(
        lambda x: Independent(Laplace(x[:, :2], 0.3), 1), X, y, "regression", interval_level=0.8
    )
    assert torch.equal(columns["inside"], (share < 1).double().mean(1))


def test_intervals_end_where_their_score_does() -> None:
    """No Brier score, CRPS or NLL of classes is negative, and no Brier score is above 2: of three
    sure answers, one of them wrong or two, a normal interval goes beyond."""
    sure = torch.tensor([[9.0, 0.0], [9.0, 0.0], [9.0, 0.0]])
    for y in ([0, 0, 1], [0, 1, 1]):
        columns = score(lambda x: Categorical(logits=x), sure, torch.tensor(y), "classification")
        brier, surprise = (REDUCTIONS["classification"][name](columns) for name in ("brier", "nll"))
        assert 0.0 <= brier.low <= brier.value == pytest.approx(2 * sum(y) / 3, abs=1e-3)
        assert brier.value <= brier.high <= 2.0
        assert (surprise.low == 0.0) == (sum(y) == 1)
    far = torch.tensor([0.0, 0.0, 50.0])
    columns = score(lambda x: Normal(0 * x, 1.0), far, far, "regression")
    crps = REDUCTIONS["regression"]["crps"](columns)
    assert crps.low == 0.0 < crps.value < crps.high
    assert REDUCTIONS["regression"]["nll"](columns).low < 0  # of a density

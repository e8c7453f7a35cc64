"""`evaluate`: records, worst case, curves, resumption, the selective task, and what it refuses."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as Classes
from torch.distributions import Distribution, Normal
from torch.utils.data import DataLoader, TensorDataset

from advbayes import (
    L2,
    BayesianModel,
    Categorical,
    FreshPredictive,
    Linf,
    MeanField,
    PosteriorPredictive,
    audit,
    margin,
    one_step,
    pgd,
    pgd_plus,
)
from advbayes.attacks import APGD, Suite, Transfer
from advbayes.attacks.parts import family_of, loss_names, with_restarts, with_steps
from advbayes.evaluation import (
    Cell,
    SoftmaxWarning,
    UnitsWarning,
    ball_of,
    evaluate,
    load_evaluation,
    rescore,
    restarts_of,
    selective_task,
    steps_of,
    with_eps,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True, eq=False)
class Linear:
    weight: Tensor

    def __call__(self, x: Tensor) -> Classes:
        return Classes(logits=x @ self.weight.T)


MODEL = Linear(torch.randn(3, 5, generator=generator(1)))
X = torch.randn(70, 5, generator=generator(2))
Y = MODEL(X).logits.argmax(1)
ATTACKS: dict[str, Any] = {"one step": one_step(L2(0.5)), "PGD": pgd(L2(0.5), 5, margin)}


def test_there_is_one_record_per_example_attack_and_predictor() -> None:
    report = evaluate(
        {"a": MODEL, "b": Linear(-MODEL.weight)}, (X, Y), attacks=ATTACKS, batch_size=32
    )
    records = list(report.records())
    # clean and two attacks for each, clean for uniform and majority
    assert len(records) == 70 * (2 * 3 + 2)
    assert set(records[0]) >= {
        "predictor",
        "attack",
        "eps",
        "index",
        "loss",
        "correct",
        "log_prob",
        "entropy",
        "norm",
        "iterations",
        "seed",
    }
    assert report.estimate("accuracy", "a", "clean").value == 1.0
    assert report.estimate("accuracy", "b", "clean").value < 0.2
    assert float(report.columns("a", "PGD")["norm"].max()) <= 0.5 + 1e-5
    assert report.config["iterations"] == {"one step": 1, "PGD": 5}


def test_scores_agree_with_the_predictions() -> None:
    report = evaluate(MODEL, (X, Y), attacks=ATTACKS)
    x_adv = pgd(L2(0.5), 5, margin)(MODEL, X, Y)
    held = report.columns(attack="PGD")
    torch.testing.assert_close(held["log_prob"], MODEL(x_adv).log_prob(Y).double())
    assert torch.equal(held["correct"].bool(), MODEL(x_adv).logits.argmax(1) == Y)
    torch.testing.assert_close(held["loss"], margin(MODEL(x_adv), Y).double())
    torch.testing.assert_close(held["entropy"], MODEL(x_adv).entropy().double())


def test_worst_is_the_union_per_example_and_never_above_an_attack() -> None:
    """The class is made of the signs of x_0 and x_2, of which each attack moves one: of 70 examples
    two in five fall to each."""
    signs = Linear(torch.tensor([[a, 0.0, b, 0.0, 0.0] for a in (-1.0, 1.0) for b in (-1.0, 1.0)]))
    left = pgd(L2(0.5, mask=torch.tensor([True, True, False, False, False])), 10)
    right = pgd(L2(0.5, mask=torch.tensor([False, False, True, True, True])), 10)
    data = X, signs(X).logits.argmax(1)
    report = evaluate(signs, data, attacks={"left": left, "right": right})
    each = [report.columns(attack=name) for name in ("clean", "left", "right")]
    union = report.columns(attack="worst")
    assert torch.equal(union["correct"], torch.stack([rows["correct"] for rows in each]).amin(0))
    assert torch.equal(union["log_prob"], torch.stack([rows["log_prob"] for rows in each]).amin(0))
    values = {
        name: report.estimate("accuracy", attack=name).value for name in ("left", "right", "worst")
    }
    # the two break different examples
    assert values["worst"] < min(values["left"], values["right"])
    assert report.estimate("nll").value >= max(
        report.estimate("nll", attack=name).value for name in ("left", "right")
    )


def test_a_security_curve_falls_from_the_clean_point() -> None:
    report = evaluate(MODEL, (X, Y), attacks={"PGD": ATTACKS["PGD"]}, radii=(0.25, 1.0, 4.0))
    curve = report.curve()
    assert [eps for eps, _ in curve] == [0.0, 0.25, 1.0, 4.0]
    values = [found.value for _, found in curve]
    assert values == sorted(values, reverse=True)
    assert values[0] == 1.0
    assert values[-1] < 0.1
    assert all(found.low <= found.value <= found.high for _, found in curve)


def test_trivial_predictors_are_rows_of_every_table() -> None:
    table = evaluate(MODEL, (X, Y), attacks=ATTACKS).table()
    names = [row.predictor for row in table.rows]
    assert names[-2:] == ["uniform", "majority"]
    uniform = table.rows[-2]
    assert uniform.values["nll"].value == pytest.approx(math.log(3), abs=1e-5)
    assert "| uniform | any |" in table.markdown()
    assert table.text().splitlines()[0].split()[:3] == ["predictor", "attack", "eps"]
    assert json.loads(json.dumps(table.json()))["rows"][0]["accuracy"]["value"] == 1.0


def test_regression_has_its_own_columns() -> None:
    def predict(x: Tensor) -> Distribution:
        return Normal(x[:, 0], 0.5)

    y = X[:, 0] + 0.5 * torch.randn(70, generator=generator(3))
    report = evaluate(predict, (X, y), attacks={"PGD": pgd(L2(0.3), 5)})
    assert report.estimate("rmse").value > report.estimate("rmse", attack="clean").value
    clean = {
        name: report.estimate(name, attack="clean").value
        for name in ("rmse", "nll", "crps", "coverage", "aurc")
    }
    assert clean["rmse"] == pytest.approx(float((y - X[:, 0]).square().mean().sqrt()), abs=1e-6)
    assert 0.7 < clean["coverage"] <= 1.0  # of 90 % intervals
    constant = report.estimate("rmse", "constant", "clean").value
    assert constant == pytest.approx(float(y.std(correction=0)), abs=1e-5)


def test_arrays_and_loaders_are_data_too() -> None:
    wanted = evaluate(MODEL, (X, Y), attacks=ATTACKS).estimate("nll").value
    loader = DataLoader(TensorDataset(X, Y), batch_size=16)
    for data in ((X.numpy(), Y.numpy()), (X.double().numpy(), Y.numpy().astype(np.int32)), loader):
        assert evaluate(MODEL, data, attacks=ATTACKS).estimate("nll").value == pytest.approx(
            wanted, abs=1e-6
        )


# --- on disk ------------------------------------------------------------------------------------


class Stop(Exception):
    pass


@dataclass(frozen=True)
class Failing:
    """An attack that is interrupted after a few calls."""

    ball: Any
    calls: list[int]
    limit: int

    def __call__(
        self, predict: Any, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> Tensor:
        self.calls.append(len(x))
        if len(self.calls) > self.limit:
            raise Stop
        return self.ball.random(x, generator=generator)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"Failing({self.ball})"


def fresh_predictive() -> FreshPredictive:
    torch.manual_seed(0)
    model = BayesianModel(nn.Linear(5, 3), Categorical())
    return FreshPredictive(model, MeanField(model, init_scale=0.5), 3, generator(7))


@pytest.mark.parametrize("stochastic", [False, True])
def test_an_interrupted_evaluation_goes_on_exactly_where_it_stopped(
    tmp_path: Path, stochastic: bool
) -> None:
    predict: Any = fresh_predictive() if stochastic else MODEL
    kwargs: dict[str, Any] = {"batch_size": 16, "seed": 3, "radii": (0.2, 0.6), "progress": False}
    whole = evaluate(
        predict,
        (X, Y),
        attacks={"noise": Failing(L2(1.0), [], 99)},
        out=tmp_path / "whole",
        **kwargs,
    )
    with pytest.raises(Stop):
        evaluate(
            predict,
            (X, Y),
            attacks={"noise": Failing(L2(1.0), [], 3)},
            out=tmp_path / "cut",
            **kwargs,
        )
    log = tmp_path / "cut" / "records.jsonl"
    log.write_bytes(log.read_bytes()[:-100])  # the last line was torn, and its block with it
    again: list[int] = []
    resumed = evaluate(
        predict,
        (X, Y),
        attacks={"noise": Failing(L2(1.0), again, 99)},
        out=tmp_path / "cut",
        **kwargs,
    )
    assert len(again) == 2 * 5 - 2  # two of ten batches had been kept whole
    assert resumed.cells.keys() == whole.cells.keys()
    for cell, rows in whole.cells.items():
        for name, values in rows.items():
            assert torch.equal(values, resumed.cells[cell][name]), (cell, name)
    assert (tmp_path / "cut" / "records.jsonl").read_bytes() == (
        tmp_path / "whole" / "records.jsonl"
    ).read_bytes()


@dataclass(frozen=True)
class Asking:
    """An attack that keeps what its predictor answered."""

    ball: Any
    heard: list[Tensor]

    def __call__(
        self, predict: Any, x: Tensor, y: Tensor | None = None, *, generator: Any = None
    ) -> Tensor:
        self.heard.append(predict(x).probs.detach())
        return x + 0.1


def test_every_part_of_an_attack_has_draws_of_its_own() -> None:
    """Two sources of one transfer, each batch of each and the predictor itself draw other thetas;
    all of them the same ones again."""
    model = BayesianModel(nn.Linear(5, 3), Categorical())
    fresh = FreshPredictive(model, MeanField(model, 1.0, torch.ones(model.num_params)), 1)
    told = []
    for _ in range(2):
        heard: list[Tensor] = []
        attacks = {
            "a": Transfer(Asking(L2(0.5), heard), (fresh, fresh), rank=margin),
            "b": Asking(L2(0.5), heard),
        }
        x = X[:1].repeat(8, 1)
        evaluate(fresh, (x, Y[:1].repeat(8)), attacks=attacks, batch_size=4, rescore=1)
        told.append(torch.stack([answer[0] for answer in heard]))
    assert torch.equal(*told)
    assert len(told[0].unique(dim=0)) == len(told[0]) == 6


def test_a_folder_gives_the_table_again(tmp_path: Path) -> None:
    report = evaluate(MODEL, (X, Y), attacks=ATTACKS, batch_size=32, out=tmp_path / "run")
    loaded = load_evaluation(tmp_path / "run")
    assert loaded.table().json() == report.table().json()
    again = rescore(tmp_path / "run", MODEL)
    for cell, rows in again.cells.items():
        assert torch.equal(rows["correct"], report.cells[cell]["correct"])
    stale = rescore(tmp_path / "run", Linear(2 * MODEL.weight))
    key = Cell("predict", "PGD", 0.5)
    assert float((stale.cells[key]["log_prob"] - report.cells[key]["log_prob"]).abs().max()) > 0.1
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert {"seed", "code", "versions", "data", "attacks"} <= config.keys()


def test_another_evaluations_folder_is_refused(tmp_path: Path) -> None:
    evaluate(MODEL, (X, Y), attacks=ATTACKS, out=tmp_path / "run")
    with pytest.raises(ValueError, match="whose seed is 0, not 1"):
        evaluate(MODEL, (X, Y), attacks=ATTACKS, out=tmp_path / "run", seed=1)
    with pytest.raises(ValueError, match="whose predictors"):
        evaluate(Linear(2 * MODEL.weight), (X, Y), attacks=ATTACKS, out=tmp_path / "run")


def test_a_stochastic_predictor_is_scored_ten_times() -> None:
    predict = fresh_predictive()
    report = evaluate(predict, (X, Y), attacks={"PGD": pgd(L2(0.5), 3)})
    assert report.config["rescored"] == {"predict": 10}
    tenths = report.columns(attack="PGD")["correct"] * 10
    torch.testing.assert_close(tenths, tenths.round())
    assert bool(((tenths > 0) & (tenths < 10)).any())
    again = evaluate(predict, (X, Y), attacks={"PGD": pgd(L2(0.5), 3)})
    # keyed, whatever the stream was before
    assert torch.equal(again.columns()["log_prob"], report.columns()["log_prob"])


def test_entropy_tells_foreign_inputs_and_when_to_answer() -> None:
    report = evaluate(MODEL, (X, Y), attacks=ATTACKS)
    # next to the origin every class is as likely
    foreign = evaluate(MODEL, (0.1 * X, Y), attacks=ATTACKS)
    assert report.ood_auroc(foreign).value > 0.9
    assert report.ood_auroc(report).value == pytest.approx(0.5)
    curve = report.risk_coverage(attack="PGD")
    assert curve.risk[-1] == pytest.approx(1 - report.estimate("accuracy", attack="PGD").value)


# --- the selective task -------------------------------------------------------------------------


def test_the_selective_task_counts_kept_outsiders_as_errors() -> None:
    x = torch.cat([torch.full((50, 1), 3.0), torch.full((50, 1), -3.0)])
    y = (x[:, 0] < 0).long()

    def predict(x: Tensor) -> Distribution:
        return Classes(logits=torch.stack([x[:, 0], -x[:, 0]], 1))

    curve = selective_task(
        predict, (x, y), torch.zeros(100, 1), ball=L2(4.0), radii=(0.0, 2.0, 4.0)
    )
    assert [point.selective_accuracy.value for point in curve] == [1.0, 0.0, 0.0]
    assert [point.kept_outside for point in curve] == [0.0, 1.0, 1.0]
    assert curve[0].ood_auroc.value == 1.0
    assert curve[-1].ood_auroc.value == 0.0


# --- attacks read as data -----------------------------------------------------------------------


def test_any_attack_is_remade_with_another_eps() -> None:
    suite = Suite((pgd(L2(1.0, box=(0, 1)), 5), APGD(L2(1.0, box=(0, 1)), margin, 7)))
    moved: Any = with_eps(Transfer(suite, (MODEL,)), 0.25)
    assert [part.ball.eps for part in moved.attack.attacks] == [0.25, 0.25]
    assert ball_of(moved) == L2(0.25, box=(0, 1))
    assert steps_of(suite) == 12
    assert steps_of(with_steps(suite, 2)) == 24
    assert restarts_of(with_restarts(pgd(L2(1.0), restarts=3), 2)) == 6
    assert loss_names(pgd_plus(L2(1.0))) == ("nll", "entropy")
    assert family_of(one_step(L2(1.0))) != family_of(pgd(L2(1.0)))
    with pytest.raises(TypeError, match="needs a field `ball`"):
        with_eps(lambda *_, **__: None, 1.0)  # type: ignore[arg-type, return-value]


# --- bad input ----------------------------------------------------------------------------------


def test_bad_input_is_named() -> None:
    def run(
        predict: Any = MODEL, data: Any = (X, Y), attacks: Any = ATTACKS, **kwargs: Any
    ) -> None:
        evaluate(predict, data, attacks=attacks, **kwargs)

    with pytest.raises(ValueError, match="attacks must be a mapping of at least one named attack"):
        run(attacks={})
    with pytest.raises(
        TypeError, match="predict must return a torch Distribution over y, got a torch"
    ):
        run(lambda x: MODEL(x).probs)
    with pytest.raises(
        ValueError, match=r"batch shape \(70,\) for 70 inputs, got batch shape \(1,\)"
    ):
        run(lambda x: MODEL(x[:1]))
    with pytest.raises(ValueError, match="equal logits for all 3 classes"):
        run(lambda x: Classes(logits=0 * MODEL(x).logits))
    with pytest.raises(
        ValueError, match="the log-probabilities of predict must be finite, got 210 NaN"
    ):
        run(lambda x: Classes(logits=MODEL(x).logits * math.nan, validate_args=False))
    with pytest.raises(TypeError, match="y must be a tensor of integer class labels"):
        run(data=(X, Y.float()))
    with pytest.raises(ValueError, match="labels from 0 to 2"):
        run(data=(X, Y + 1))
    with pytest.raises(ValueError, match="one target for each of the 70 examples"):
        run(data=(X, Y[:5]))
    with pytest.raises(ValueError, match="x must be finite"):
        run(data=(X / 0, Y))
    with pytest.raises(ValueError, match="must not be named 'clean' or 'worst'"):
        run(attacks={"worst": ATTACKS["PGD"]})
    with pytest.raises(ValueError, match="radii"):
        run(radii=())
    with pytest.raises(ValueError, match="predictors of one task"):
        run({"a": MODEL, "b": lambda x: Normal(x[:, 0], 1.0)})
    with pytest.raises(ValueError, match="trivial"):
        run({"uniform": MODEL})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["x", "y"])
@pytest.mark.parametrize("loaded", [False, True])
def test_data_that_is_not_finite_is_named_before_the_model_is_asked(
    value: float, side: str, loaded: bool, tmp_path: Path
) -> None:
    asked = []

    def predict(x: Tensor) -> Distribution:
        asked.append(x)
        return Normal(x[:, 0], 1.0)

    x, y = torch.randn(6, 2, generator=generator()), torch.zeros(6)
    {"x": x[:, 0], "y": y}[side][5] = value
    got = "1 NaN and 0 infinite" if math.isnan(value) else "0 NaN and 1 infinite"
    data: Any = DataLoader(TensorDataset(x, y), 4) if loaded else (x, y)
    for judge in (
        lambda: evaluate(
            predict, data, attacks={"PGD": pgd(L2(0.1), 1)}, batch_size=2, out=tmp_path / "a"
        ),
        lambda: audit(predict, data, ball=L2(0.1)),
    ):
        with pytest.raises(ValueError, match=f"^{side} must be finite, got {got} "):
            judge()
    assert not asked
    assert not any(tmp_path.iterdir())


def test_scores_that_become_infinite_under_attack_are_named() -> None:
    def predict(x: Tensor) -> Distribution:
        moved = (x != X[: len(x)]).any(1, keepdim=True)
        return Classes(logits=MODEL(x).logits.masked_fill(moved, math.nan), validate_args=False)

    with pytest.raises(ValueError, match="the scores of 'predict' under 'noise'"):
        evaluate(predict, (X, Y), attacks={"noise": Failing(L2(1.0), [], 99)})


def test_eps_in_other_units_is_warned_about_with_both_scales() -> None:
    pixels = (X - X.amin(0)) / (X.amax(0) - X.amin(0))
    with pytest.warns(
        UnitsWarning,
        match=r"eps = 8, but the data extend over 1 in its norm \(x from 0 to 1\): more than",
    ):
        evaluate(MODEL, (pixels, Y), attacks={"PGD": pgd(Linf(8.0), 1)})
    with pytest.warns(UnitsWarning, match="less than a thousandth"):
        evaluate(MODEL, (255 * pixels, Y), attacks={"PGD": pgd(Linf(8 / 255), 1)})


def test_probabilities_given_as_logits_are_warned_about() -> None:
    sure = Linear(20 * MODEL.weight)
    with pytest.warns(SoftmaxWarning, match="soft-maxed twice"):
        evaluate(lambda x: Classes(logits=sure(x).probs), (X, Y), attacks=ATTACKS)
    torch.manual_seed(0)
    model = BayesianModel(nn.Linear(5, 3), Categorical())
    timid = PosteriorPredictive(
        model, MeanField(model, init_scale=0.01).sample(3, generator=generator())
    )
    # small logits alone are no offence (warnings are errors)
    evaluate(timid, (X, Y), attacks=ATTACKS)


def test_records_in_another_order_are_refused_not_swapped(tmp_path: Path) -> None:
    """Two predictors given the other way round must not get each other's rows."""
    other = lambda x: MODEL(-x)  # noqa: E731
    attacks = {"PGD": pgd(L2(0.1), 2)}
    evaluate({"a": MODEL, "b": other}, (X, Y), attacks=attacks, out=tmp_path / "run")
    with pytest.raises(ValueError, match="in their first order"):
        evaluate({"b": other, "a": MODEL}, (X, Y), attacks=attacks, out=tmp_path / "run")

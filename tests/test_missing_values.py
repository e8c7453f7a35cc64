"""What is missing cannot be moved, example by example: closed forms and explicit masks as oracles,
from the balls to the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import Tensor
from torch.distributions import Normal

from advbayes import L2, Linf, audit, evaluate, pgd, store
from advbayes.attacks import (
    APGD,
    Exceeding,
    MinimumNorm,
    MultiStart,
    Square,
    one_step,
    squared_error,
)
from advbayes.channels import AttackChannel, Learned, Mixture, Noise
from advbayes.checks import InputError
from advbayes.cli import main
from advbayes.datasets import Encoding, from_csv
from advbayes.datasets.dataset import split_rows
from advbayes.estimators import (
    RobustClassifier,
    RobustRegressor,
    load_pipeline,
    robust_scorer,
    save_pipeline,
)
from advbayes.experiments.units import prepared
from advbayes.networks import FullyConnectedGenerator
from advbayes.runs import build_defense, load_trained, prepare
from advbayes.runs.config import make_config
from tests.contracts import seeded

# Features 0 and 1 can be missing, as 3 and 4 say (in units in which they are -1 or 2); 2 cannot.
MISSING = ((0, 3, 0.5), (1, 4, 0.5))
SCALE = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0], dtype=torch.float64)
SLOPE = torch.tensor([3.0, -1.0, 0.5, 7.0, -5.0], dtype=torch.float64)


def examples(num: int = 40) -> tuple[Tensor, Tensor]:
    """Rows of every pattern of missing values, and what may be touched of each."""
    x = torch.randn(num, 5, generator=seeded(3), dtype=torch.float64)
    lost = torch.rand(num, 2, generator=seeded(4)) < 0.4
    x[:, 3:] = torch.where(lost, 2.0, -1.0).double()
    free = torch.cat([~lost, torch.ones(num, 1).bool(), torch.zeros(num, 2).bool()], 1)
    assert len({tuple(row) for row in free.tolist()}) == 4
    return x, free


def linear(x: Tensor) -> Normal:
    return Normal(x @ SLOPE.to(x), torch.ones(len(x), dtype=x.dtype))


@pytest.mark.parametrize("family", [L2, Linf])
def test_the_most_that_an_attack_can_do_to_a_linear_model(family: Any) -> None:
    """max |<slope, d>| over the ball is eps times the dual norm of what may be touched, and every
    attack gets there; the clean target is on the line, so that both directions are the same."""
    x, free = examples()
    y = linear(x).mean.clone()
    ball = family(0.7, scale=SCALE, indicators=MISSING)
    weights = SLOPE * SCALE * free
    wanted = 0.7 * (weights.norm(dim=1) if family is L2 else weights.abs().sum(1))
    attacks = {
        "one step": one_step(ball, squared_error),
        "PGD": pgd(ball, 40, squared_error),
        "restarts": pgd(ball, 40, squared_error, restarts=3),
        "APGD": APGD(ball, squared_error, 60),
        "MultiStart": MultiStart(ball, squared_error, 40, 8),
    }
    for name, attack in attacks.items():
        x_adv = attack(linear, x, y + 1e-3, generator=seeded())
        moved = x_adv - x
        assert bool((moved[~free] == 0).all()), name
        assert bool(ball.contains(x_adv, x).all()), name
        reached = (linear(x_adv).mean - y).abs()
        torch.testing.assert_close(reached, wanted, rtol=1e-3, atol=0, msg=name)


@pytest.mark.parametrize("family", [L2, Linf])
def test_as_if_each_example_had_a_mask_of_its_own(family: Any) -> None:
    """Without random starts an attack in the ball gives, row by row, what it gives in a ball with
    that row's mask; so do projection, random points and the edge."""
    x, free = examples()
    y = torch.randn(len(x), generator=seeded(5), dtype=torch.float64)
    ball = family(0.7, scale=SCALE, indicators=MISSING)
    curved = lambda z: Normal((0.1 * z @ SLOPE.to(z)).tanh(), 1.0 + 0 * z[:, 0])  # noqa: E731
    far = x + 5 * torch.randn(x.shape, generator=seeded(6), dtype=torch.float64)
    for attack in (pgd(ball, 15, squared_error), Square(ball, 30, squared_error)):
        assert bool(ball.contains(attack(curved, x, y, generator=seeded()), x).all())

    def results(ball: Any, one: slice) -> dict[str, Tensor]:
        return {
            "project": ball.project(far[one], x[one]),
            "reach": ball.reach(x[one]).expand(1, 5),
            "random": ball.random(x[one], generator=seeded(one.start)),
            "sphere": ball.sphere(x[one], generator=seeded(one.start)),
            "pgd": pgd(ball, 15, squared_error)(curved, x[one], y[one]),
        }

    for row in range(len(x)):
        one, alone = slice(row, row + 1), family(0.7, scale=SCALE, mask=free[row])
        own = results(alone, one)
        for name, value in results(ball, one).items():
            message = f"{name} of row {row}"
            torch.testing.assert_close(value, own[name], rtol=1e-6, atol=1e-9, msg=message)
    assert not bool(ball.contains(x + 0.1 * ~free, x).any())
    torch.testing.assert_close(
        pgd(ball, 15, squared_error)(curved, x, y)[:1],
        pgd(family(0.7, scale=SCALE, mask=free[0]), 15, squared_error)(curved, x[:1], y[:1]),
        rtol=1e-6,
        atol=1e-9,
    )


def test_random_points_fill_the_ball_of_what_is_known() -> None:
    """(radius / eps)^d is uniform, d being what may be touched of each example."""
    x, free = examples(20_000)
    share = L2(2.0, scale=SCALE, indicators=MISSING)
    power = (share.norm(share.random(x, generator=seeded()) - x) / 2.0) ** free.sum(1)
    for d in (1, 2, 3):
        mean = float(power[free.sum(1) == d].mean())
        num = int((free.sum(1) == d).sum())
        assert mean == pytest.approx(0.5, abs=5 * (1 / 12) ** 0.5 / num**0.5)


def test_the_nearest_break_is_one_within_reach() -> None:
    """The smallest change that moves the mean by 1: 1 / dual norm of what may be touched."""
    x, free = examples()
    y = linear(x).mean.clone()
    search = MinimumNorm(
        L2(100.0, scale=SCALE, indicators=MISSING), Exceeding(squared_error, 1.0), steps=60
    )
    x_adv = search(linear, x, y, generator=seeded())
    assert bool(((x_adv - x)[~free] == 0).all())
    wanted = 1 / (SLOPE * SCALE * free).norm(dim=1)
    found = L2(1.0, scale=SCALE).norm(x_adv - x)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=0)


def test_a_channel_moves_only_what_is_known() -> None:
    x, free = examples()
    y = linear(x).mean + 1
    ball = Linf(0.7, indicators=MISSING)
    attacked = AttackChannel(one_step(ball, squared_error))
    for channel in (attacked, Mixture([0.5, 0.5], [Noise(0.0), attacked])):
        moved = channel.sample(linear, x, y, generator=seeded()) - x
        assert bool((moved[~free] == 0).all())
        assert bool((moved[free] != 0).any())
    learned = Learned(FullyConnectedGenerator(5).double(), ball)
    moved = learned.moments(linear, x, y)[0] - x
    assert bool((moved[~free] == 0).all())
    assert bool((moved[free] != 0).any())


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (5, "indicators must hold"),
        ((), "indicators must hold"),
        (((0, 1),), "indicators must hold"),
        (((0, 0, 0.5),), "indicators must hold"),
        (((0, 3, 0.5), (0, 4, 0.5)), "no feature twice"),
        (((0, 3, 0.5), (3, 4, 0.5)), "no feature twice"),
        (((-1, 3, 0.5),), "indicators must hold"),
    ],
)
def test_indicators_that_say_nothing_are_refused(bad: Any, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        L2(1.0, indicators=bad)


def test_indicators_of_another_table_are_refused() -> None:
    with pytest.raises(ValueError, match="indicators must name features of a table, up to 4"):
        pgd(L2(1.0, indicators=MISSING))(linear, torch.zeros(2, 4), torch.zeros(2))


def test_a_ball_with_indicators_is_saved_and_shown(tmp_path: Path) -> None:
    ball = L2(1.0, indicators=MISSING)
    assert re.fullmatch(r"L2\(1, indicators=<2 columns, [0-9a-f]{8}>\)", repr(ball))
    assert repr(ball) != repr(L2(1.0, indicators=(MISSING[0], (1, 4, 0.6))))
    assert ball != L2(1.0)
    assert ball.freed() == L2(1.0)
    tensors: dict[str, Tensor] = {}
    written = store.kinds.encode(ball, "ball", tensors)
    assert store.kinds.decode(written, "ball", tensors) == ball
    before = {"kind": "L2", "eps": 1.0, "box": None, "scale": None, "mask": None}
    assert store.kinds.decode(before, "ball", {}) == L2(1.0)  # files of earlier versions


# --- Tables -------------------------------------------------------------------------------------


def table(path: Path, num: int = 80) -> Path:
    """`dose` decides and is missing in every fourth row, `age` in every seventh."""
    rng = np.random.default_rng(1)
    lines = ["age,sex,dose,outcome"]
    for row in range(num):
        age, dose = rng.normal(50, 10), rng.normal(2, 1)
        outcome = "ill" if dose > 2 else "well"
        lines.append(
            f"{'' if row % 7 == 0 else round(age, 1)},{'fm'[row % 2]},"
            f"{'NA' if row % 4 == 0 else round(dose, 2)},{outcome}"
        )
    path.write_text("\n".join(lines))
    return path


def lost_of(x: Tensor, names: tuple[str, ...], column: str) -> Tensor:
    indicator = x[:, names.index(f"{column} missing")]
    return indicator > indicator.mean()


def test_train_evaluate_and_audit_leave_missing_numbers_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv_file, run = table(tmp_path / "t.csv"), str(tmp_path / "run")
    given = {"data": str(csv_file), "target": "outcome", "eps": 0.8}
    config = make_config({**given, "defense": "at"})
    data = prepare(config)
    names = data.dataset.feature_names
    channel, _ = build_defense(config, data)
    moved = channel.sample(
        lambda x: torch.distributions.Categorical(logits=x[:, :2] * 3),
        data.x_train,
        data.y_train,
        generator=seeded(),
    )
    moved = moved - data.x_train
    for column in ("age", "dose"):
        lost, place = lost_of(data.x_train, names, column), names.index(column)
        assert 0 < int(lost.sum()) < len(lost)
        assert bool((moved[lost, place] == 0).all())
        assert bool((moved[~lost, place] != 0).any())
    asked = [f"--{key}={value}" for key, value in {**given, "epochs": 20, "out": run}.items()]
    assert main(["train", *asked, "--quiet"]) == 0
    assert main(["evaluate", run, "--attack", "pgd", "--attack", "strong", "--quiet"]) == 0
    trained = load_trained(run)
    ball = trained.ball()
    assert ball.indicators == data.dataset.indicators
    assert ball.indicators is not None
    assert [triple[:2] for triple in ball.indicators] == [(0, 2), (1, 3)]
    (folder,) = (tmp_path / "run" / "evaluation").iterdir()
    arrays = [load_file(file) for file in sorted(folder.rglob("*.safetensors"))]
    assert arrays
    lost, dose = lost_of(data.x_test, names, "dose"), names.index("dose")
    moved = torch.stack([array["x_adv"] - data.x_test for array in arrays])  # clean, PGD, strong
    assert bool((moved[:, lost, dose] == 0).all())
    assert bool((moved[:, ~lost, dose] != 0).any())
    assert trained.scaling is not None
    raw = trained.scaling.raw_eps(0.8)
    age, dose = (f"{float(raw[names.index(name)]):.3g}" for name in ("age", "dose"))
    said = f"age {age} where known, dose {dose} where known, sex fixed"
    assert said in capsys.readouterr().out
    assert main(["audit", run, "--tier", "quick"]) == 0


def test_unless_said_otherwise(tmp_path: Path) -> None:
    csv_file = table(tmp_path / "t.csv")
    assert from_csv(csv_file, "outcome", movable=["dose", "age"]).indicators is None
    (only,) = from_csv(csv_file, "outcome", movable=["dose"]).indicators or ()
    assert only[:2] == (0, 2)
    assert from_csv(csv_file, "outcome", features=["sex"]).indicators is None


def test_a_comparison_has_the_reach_of_a_run(tmp_path: Path) -> None:
    """The same columns, the same mask, the same budgets as `train` with these settings."""
    values: dict[str, Any] = {"data": str(table(tmp_path / "t.csv")), "target": "outcome"}
    config = make_config({**values, "drop": ["sex"], "fixed": ["age"], "feature_eps": ["dose=2"]})
    mine = prepared(config)["test"]
    own = prepare(config)
    assert mine.dataset.feature_names == own.dataset.feature_names
    assert mine.ball("l2", 0.3) == own.ball("l2", 0.3)
    assert mine.ball("l2", 0.3).indicators is not None


# --- Estimators ---------------------------------------------------------------------------------


def rows(num: int = 120) -> tuple[Any, Any]:
    rng = np.random.default_rng(2)
    x = rng.normal(5.0, 2.0, (num, 3))
    y = np.where(x[:, 0] + 0.3 * x[:, 1] > 6.5, "yes", "no")
    x[::4, 0] = np.nan
    x[::5, 1] = np.nan
    return x, y


def test_an_estimator_leaves_alone_what_an_imputer_filled_in(tmp_path: Path) -> None:
    x, y = rows()
    pipeline = make_pipeline(
        SimpleImputer(add_indicator=True),
        RobustClassifier("os", eps=0.6, epochs=20, indicators=[(0, 3), (1, 4)], random_state=0),
    ).fit(x, y)
    last, filled = pipeline[-1], pipeline[:-1].transform(x)
    assert last.ball_.indicators == ((0, 3, 0.5), (1, 4, 0.5))
    given = last.as_tensors(filled, y)
    x_adv = pgd(last.ball_, 10)(last.predictor_, *given, generator=seeded())
    lost = np.isnan(x[:, :2])
    moved = (x_adv - given[0]).numpy()
    assert (moved[:, :2][lost] == 0).all()
    assert (moved[:, :2][~lost] != 0).any()
    assert (moved[:, 3:] == 0).all()
    # the channel that it trains through is in other units, and leaves the same alone
    channel = last._channel(*last._scaling(given[0], torch.ones(len(x))))
    seen = (given[0] - given[0].mean(0)) / given[0].std(0, correction=0)
    sampled = channel.attack(last.predictor_, seen, given[1], generator=seeded()) - seen
    assert (sampled.numpy()[:, :2][lost] == 0).all()
    assert (sampled.numpy()[:, :2][~lost] != 0).any()
    # saved and loaded, scored, searched over
    save_pipeline(pipeline, tmp_path / "p.advbayes")
    again = load_pipeline(tmp_path / "p.advbayes")
    assert again[-1].ball_ == last.ball_
    assert clone(again[-1]).fit(filled, y).ball_ == last.ball_
    assert robust_scorer()(again, x, y) == robust_scorer()(pipeline, x, y)
    search = GridSearchCV(
        pipeline, {"robustclassifier__eps": [0.2]}, scoring=robust_scorer(), cv=2
    ).fit(x, y)
    assert search.best_estimator_[-1].ball_.indicators == last.ball_.indicators
    report = evaluate(last, (filled, y), attacks={"PGD": pgd(last.ball_, 20)})
    assert report.estimate("accuracy", attack="PGD").value == robust_scorer()(pipeline, x, y)
    verdict = audit(last, (filled, y), ball=last.ball_, tier="quick", only=("E0", "E1", "E9"))
    assert {verdict[check].status for check in ("E0", "E1", "E9")} == {"passed"}
    assert "units = standardised" in verdict["E0"].line()


def test_names_that_an_imputer_gives_are_recognised() -> None:
    pandas = pytest.importorskip("pandas")
    x, _ = rows()
    frame = pandas.DataFrame(x, columns=["age", "dose", "size"]).assign(sex=["f", "m"] * 60)
    numbers = make_pipeline(SimpleImputer(add_indicator=True), StandardScaler())
    prepare_columns = ColumnTransformer(
        [
            ("sex", OneHotEncoder(sparse_output=False), ["sex"]),
            ("numbers", numbers, ["age", "dose", "size"]),
        ]
    ).set_output(transform="pandas")
    model = RobustRegressor("os", eps=0.5, epochs=5, random_state=0)
    pipeline = Pipeline([("columns", prepare_columns), ("model", model)])
    pipeline.fit(frame, np.arange(len(x)) / 10.0)
    found = pipeline[-1].ball_.indicators
    assert [triple[:2] for triple in found] == [(2, 5), (3, 6)]
    told = clone(model).set_params(indicators=()).fit(pipeline[:-1].transform(frame), x[:, 2])
    assert told.ball_.indicators is None


@pytest.mark.parametrize("pair", [(0, 9), ("age", "nothing"), (0, -1)])
def test_indicators_of_no_column_are_refused(pair: Any) -> None:
    x, y = rows()
    with pytest.raises(ValueError, match="indicators must hold pairs of columns of X"):
        RobustClassifier(indicators=[pair]).fit(np.nan_to_num(x), y)


def late_table(path: Path, gap: str = "") -> tuple[Path, int]:
    """A table of which one number is missing, in a test row: that row's place among them."""
    rng = np.random.default_rng(2)
    rows = [
        f"{a:.2f},{b:.2f},{c},{3 * a - b:.2f}"
        for a, b, c in zip(*rng.normal(size=(2, 60)), ["red", "blue"] * 30, strict=True)
    ]
    _, test = split_rows(60, seed=0, test_fraction=0.2)
    row = int(test[4])
    rows[row] = ",".join([gap, *rows[row].split(",")[1:]])
    path.write_text("a,b,colour,y\n" + "\n".join(rows))
    return path, 4


TRAINED = ["--target", "y", "--defense", "at", "--epochs", "20", "--lr", "0.05", "--quiet"]
EVALUATED = [
    "--attack",
    "pgd",
    "--attack",
    "square",
    "--queries",
    "40",
    "--eps",
    "1",
    "--name",
    "e",
]


def test_what_is_missing_from_test_rows_alone_cannot_be_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, place = late_table(tmp_path / "t.csv")
    data = from_csv(table, "y")
    assert data.feature_names[:3] == ("a", "b", "a missing")
    assert data.encoding is not None
    assert data.encoding.late == ("a",)
    known = from_csv(late_table(tmp_path / "known.csv", "0.5")[0], "y")
    assert float(data.x_test[place, 0]) == pytest.approx(np.median(known.x_train[:, 0]), abs=1e-6)
    with pytest.warns(UserWarning, match="'a' is missing in 1 test rows and in no training row"):
        assert main(["train", "--data", str(table), *TRAINED, "--out", f"{tmp_path}/run"]) == 0
    assert main(["evaluate", f"{tmp_path}/run", *EVALUATED]) == 0
    assert f"a {data.x_train[:, 0].double().std(correction=0):.3g} where known" in (
        capsys.readouterr().out
    )
    moved = np.zeros((12, 5), bool)
    folder = tmp_path / "run/evaluation/e/blocks"
    clean, *attacked = [load_file(each)["x_adv"] for each in sorted(folder.iterdir())[:3]]
    for x_adv in attacked:
        moved |= (x_adv != clean).numpy()
    assert moved[:, 0].tolist() == [row != place for row in range(12)]
    assert moved[:, 1].all()
    assert not moved[:, 2:].any()


def test_a_mark_that_was_never_seen_is_not_heard(tmp_path: Path) -> None:
    """The prediction is that of the training median, were it known; files keep it so."""
    table, place = late_table(tmp_path / "t.csv")
    with pytest.warns(UserWarning, match="in no training row"):
        assert main(["train", "--data", str(table), *TRAINED, "--out", f"{tmp_path}/run"]) == 0
    trained = load_trained(tmp_path / "run")
    assert trained.encoding is not None
    assert trained.encoding.late == ("a",)
    data = prepare(make_config({"data": str(table), "target": "y"}), encoding=trained.encoding)
    x = data.x_test[place : place + 1]
    known = x.clone()
    known[:, 2] = 0.0
    assert float(x[0, 2]) > 0
    torch.testing.assert_close(
        trained.predict()(x).mean, trained.predict()(known).mean, rtol=1e-3, atol=1e-3
    )
    (tmp_path / "new.csv").write_text("a,b,colour\n,0.3,red\n")
    with pytest.warns(UserWarning, match="'a' is missing in 1 of 1 rows, and never was"):
        assert main(["predict", f"{tmp_path}/run", f"{tmp_path}/new.csv"]) == 0


def test_a_model_without_the_mark_is_still_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions trained it: the rows are encoded as the model takes them, and it is said
    that what was filled in counts as known."""
    table, _ = late_table(tmp_path / "t.csv")
    fit = Encoding.fit
    with monkeypatch.context() as patch:
        patch.setattr(Encoding, "fit", lambda *args, later, **kwargs: fit(*args, **kwargs))
        assert main(["train", "--data", str(table), *TRAINED, "--out", f"{tmp_path}/run"]) == 0
    with pytest.warns(UserWarning, match="'a' is missing in 1 of 60 rows, and the encoding does"):
        assert main(["evaluate", f"{tmp_path}/run", *EVALUATED]) == 0


def test_rows_in_an_encoding_of_earlier_ones(tmp_path: Path) -> None:
    table, _ = late_table(tmp_path / "t.csv")
    first = from_csv(table, "y")
    again = from_csv(table, "y", encoding=first.encoding)
    assert torch.equal(first.x_test, again.x_test)
    assert again.feature_names == first.feature_names
    (tmp_path / "few.csv").write_text("a,b,colour,y\n" + "1,2,7,3\n2,1,red,4\n" * 5)
    few = from_csv(tmp_path / "few.csv", "y", encoding=first.encoding)
    assert few.x_train.shape[1:] == (5,)
    assert set(few.x_train[:, 3:].sum(1).tolist()) == {0.0, 1.0}
    with pytest.raises(InputError, match="encoding must be of the columns"):
        from_csv(table, "y", drop=["b"], encoding=first.encoding)
    with pytest.raises(InputError, match="movable must be left out with an encoding"):
        from_csv(table, "y", movable=["b"], encoding=first.encoding)

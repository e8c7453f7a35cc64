"""Estimators and pipelines, saved without pickle: what comes back predicts the same, in any
process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Ridge
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from torch import Tensor, nn

import advbayes
from advbayes import L2, AttackChannel, nll, one_step, store
from advbayes.cli import main
from advbayes.estimators import (
    RobustClassifier,
    RobustRegressor,
    load_pipeline,
    robust_scorer,
    save_pipeline,
)
from advbayes.runs import load_trained

RNG = np.random.default_rng(0)
X = RNG.normal([50.0, -3.0, 0.1], [20.0, 0.1, 1.0], (48, 3))
SCORE = 1000 + 7 * X[:, 0] + 300 * X[:, 1]
LABEL = np.where(np.median(SCORE) < SCORE, "dear", "cheap")
QUICK: dict[str, Any] = {"epochs": 4, "hidden": (5,), "num_thetas": 4, "random_state": 3}


class Own(nn.Module):
    """A network with code of its own."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh())


def channel() -> AttackChannel:
    return AttackChannel(
        one_step(L2(0.3, scale=torch.tensor([20.0, 0.1, 1.0], dtype=torch.float64)), nll), 0.1
    )


ESTIMATORS: dict[str, tuple[Any, Any]] = {
    "classifier": (RobustClassifier(**QUICK), LABEL),
    "numbered classes": (RobustClassifier("os", **QUICK), (LABEL == "dear") + 3),
    "channel of one's own": (RobustClassifier(channel(), **QUICK), LABEL),
    "named channel, raw eps": (
        RobustClassifier("mix", eps=(1.0, 0.0, 2.0), units="raw", norm="linf", **QUICK),
        LABEL,
    ),
    "ensemble": (RobustClassifier(posterior="ensemble", **QUICK), LABEL),
    "low rank": (RobustRegressor(posterior="low_rank", **QUICK), SCORE),
    "point": (RobustRegressor(posterior="point", **QUICK), SCORE),
    "purifier": (RobustClassifier("os", defense="reactive", **QUICK), LABEL),
    "both": (RobustRegressor("noise", defense="both", **QUICK), SCORE),
    "plain layers": (RobustClassifier(net=nn.Sequential(nn.Linear(3, 2)), **QUICK), LABEL),
    "regressor": (RobustRegressor("os", abstain=500.0, **QUICK), SCORE),
    "one column": (RobustRegressor(**QUICK), SCORE[:, None]),
    "two outputs": (RobustRegressor(**QUICK), np.column_stack([SCORE, -SCORE])),
    "heteroscedastic": (RobustRegressor(noise_scale="heteroscedastic", **QUICK), SCORE),
}


def answers(estimator: Any, x: Any = X) -> Any:
    return (
        estimator.predict_proba(x)
        if hasattr(estimator, "predict_proba")
        else np.stack(estimator.predict(x, return_std=True))
    )


@pytest.mark.parametrize("case", ESTIMATORS, ids=lambda case: case.replace(" ", "-"))
@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_what_comes_back_is_the_same(case: str, kind: type, tmp_path: Path) -> None:
    prototype, y = ESTIMATORS[case]
    x = X.astype(kind)
    fitted = clone(prototype).fit(x, y)
    fitted.save(tmp_path / "m.advbayes")
    came = type(fitted).load(tmp_path / "m.advbayes")
    np.testing.assert_array_equal(answers(came, x), answers(fitted, x))
    np.testing.assert_array_equal(came.predict(x), fitted.predict(x))
    assert came.score(x, y) == fitted.score(x, y)
    assert came.ball_ == fitted.ball_
    assert {k: str(v) for k, v in came.get_params().items()} == {
        k: str(v) for k, v in fitted.get_params().items()
    }
    for name, value in fitted.posterior_.state_dict().items():
        assert torch.equal(came.posterior_.state_dict()[name], value)
    if isinstance(fitted, RobustClassifier):
        assert came.classes_.tolist() == fitted.classes_.tolist()
    inputs, targets = fitted.as_tensors(x, y)
    again = came.as_tensors(x, y)
    assert torch.equal(inputs, again[0])
    assert torch.equal(targets, again[1])
    if case in ("classifier", "regressor", "purifier"):  # saved again, and trained again
        came.save(tmp_path / "again.advbayes")
        np.testing.assert_array_equal(
            answers(type(fitted).load(tmp_path / "again.advbayes"), x), answers(fitted, x)
        )
        np.testing.assert_array_equal(answers(clone(came).fit(x, y), x), answers(fitted, x))


@pytest.mark.parametrize("regression", [False, True])
@pytest.mark.parametrize("channel_name", [None, "os"])
def test_a_network_with_code_of_its_own_is_given(
    tmp_path: Path, regression: bool, channel_name: str | None
) -> None:
    if regression:
        fitted: Any = RobustRegressor(channel_name, net=Own(1), **QUICK).fit(X, SCORE)
    else:
        fitted = RobustClassifier(channel_name, net=Own(), **QUICK).fit(X, LABEL)
    fitted.save(tmp_path / "m")
    with pytest.raises(store.StoreError, match="net="):
        type(fitted).load(tmp_path / "m")
    came = type(fitted).load(tmp_path / "m", net=Own(1 if regression else 2))
    np.testing.assert_array_equal(answers(came), answers(fitted))


TEXT = RNG.choice(["red", "blue"], (48, 1)).astype(object)
MIXED = np.column_stack([np.where(RNG.random((48, 3)) < 0.2, np.nan, X).astype(object), TEXT])


def mixed_pipeline(last: Any) -> Pipeline:
    numbers = make_pipeline(SimpleImputer(add_indicator=True), StandardScaler())
    text = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return Pipeline(
        [
            ("columns", ColumnTransformer([("n", numbers, [0, 1, 2]), ("t", text, [3])])),
            ("robust", last),
        ]
    )


def test_pipelines(tmp_path: Path) -> None:
    scaled = make_pipeline(StandardScaler(), RobustRegressor("os", **QUICK)).fit(X, SCORE)
    save_pipeline(scaled, tmp_path / "scaled.advbayes")
    came = load_pipeline(tmp_path / "scaled.advbayes")
    assert [name for name, _ in came.steps] == [name for name, _ in scaled.steps]
    np.testing.assert_array_equal(came.predict(X), scaled.predict(X))
    mixed = mixed_pipeline(RobustClassifier(**QUICK)).fit(MIXED, LABEL)
    save_pipeline(mixed, tmp_path / "mixed.advbayes")
    np.testing.assert_array_equal(
        load_pipeline(tmp_path / "mixed.advbayes").predict_proba(MIXED), mixed.predict_proba(MIXED)
    )
    with pytest.raises(store.StoreError, match="a RobustClassifier, got a Pipeline"):
        RobustClassifier.load(tmp_path / "mixed.advbayes")
    RobustRegressor(**QUICK).fit(X, SCORE).save(tmp_path / "r")
    with pytest.raises(store.StoreError, match="a RobustClassifier, got a RobustRegressor"):
        RobustClassifier.load(tmp_path / "r")


def test_the_command_line_takes_them(tmp_path: Path) -> None:
    mixed = mixed_pipeline(RobustRegressor("os", **QUICK)).fit(MIXED, SCORE)
    save_pipeline(mixed, tmp_path / "m.advbayes", feature_names=["a", "b", "c", "colour"])
    rows = MIXED[:5].tolist()
    lines = ["colour,c,b,a"] + [
        ",".join("" if v != v else str(v) for v in reversed(row)) for row in rows
    ]
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n")
    assert (
        main(
            [
                "predict",
                str(tmp_path / "m.advbayes"),
                str(tmp_path / "new.csv"),
                "--out",
                str(tmp_path / "p.json"),
            ]
        )
        == 0
    )
    columns = json.loads((tmp_path / "p.json").read_text())
    mean, std = mixed.predict(MIXED[:5], return_std=True)
    np.testing.assert_allclose(columns["y0"], mean, rtol=1e-6)
    np.testing.assert_allclose(columns["y0 std"], std, rtol=1e-6)
    scaled = make_pipeline(StandardScaler(), RobustClassifier(**QUICK)).fit(X, LABEL)
    save_pipeline(scaled, tmp_path / "s.advbayes")
    np.savez(tmp_path / "x.npz", x=X)
    assert (
        main(
            [
                "predict",
                str(tmp_path / "s.advbayes"),
                str(tmp_path / "x.npz"),
                "--out",
                str(tmp_path / "q.json"),
            ]
        )
        == 0
    )
    assert json.loads((tmp_path / "q.json").read_text())["class"] == scaled.predict(X).tolist()


def test_a_purifier_is_never_answered_for_without_it(tmp_path: Path) -> None:
    RobustClassifier("os", defense="reactive", **QUICK).fit(X, LABEL).save(tmp_path / "m")
    with pytest.raises(store.StoreError, match="purifies its inputs"):
        load_trained(tmp_path / "m")
    with pytest.raises(store.StoreError, match="purifies its inputs"):
        advbayes.load(tmp_path / "m").predictor()


def test_load_gives_a_predictor_of_the_whole_pipeline(tmp_path: Path) -> None:
    mixed = mixed_pipeline(RobustRegressor("os", **QUICK)).fit(MIXED, SCORE)
    save_pipeline(mixed, tmp_path / "m.advbayes")
    predict = advbayes.load(tmp_path / "m.advbayes").predictor()
    np.testing.assert_array_equal(predict(MIXED).mean.numpy(), mixed.predict(MIXED))
    seen = torch.from_numpy(np.asarray(mixed[:-1].transform(MIXED)))
    np.testing.assert_array_equal(predict(seen).mean.numpy(), mixed.predict(MIXED))
    low, high = predict.interval(MIXED, 0.8)
    edges = mixed[-1].predict_interval(mixed[:-1].transform(MIXED), 0.8)
    np.testing.assert_array_equal(np.stack([low.numpy(), high.numpy()]), np.stack(edges))
    alone = RobustClassifier(**QUICK).fit(X, LABEL)
    alone.save(tmp_path / "a")
    assert advbayes.load(tmp_path / "a").predictor().classes(X) == alone.predict(X).tolist()


def test_another_process(tmp_path: Path) -> None:
    fitted = make_pipeline(StandardScaler(), RobustClassifier("os", **QUICK)).fit(X, LABEL)
    save_pipeline(fitted, tmp_path / "m.advbayes")
    np.savez(tmp_path / "x.npz", x=X)
    program = (
        "import sys, numpy as np; from advbayes.estimators import load_pipeline\n"
        "x = np.load(sys.argv[2])['x']; np.savez(sys.argv[3], "
        "p=load_pipeline(sys.argv[1]).predict_proba(x))"
    )
    arguments = [str(tmp_path / name) for name in ("m.advbayes", "x.npz", "p.npz")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=120)
    np.testing.assert_array_equal(np.load(tmp_path / "p.npz")["p"], fitted.predict_proba(X))


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    ready = RobustClassifier(**QUICK).fit(X, LABEL)
    with pytest.raises(store.StoreError, match=r"steps/log: wanted one of StandardScaler"):
        save_pipeline(
            Pipeline([("log", FunctionTransformer(np.cbrt)), ("r", ready)]).fit(X, LABEL),
            tmp_path / "m",
        )
    with pytest.raises(store.StoreError, match="wanted RobustClassifier or RobustRegressor"):
        save_pipeline(StandardScaler().fit(X), tmp_path / "m")
    with pytest.raises(ValueError, match="feature_names must name the 3 columns"):
        save_pipeline(ready, tmp_path / "m", feature_names=["a"])
    with pytest.raises(store.StoreError, match="random_state: wanted a plain setting"):
        RobustClassifier(**{**QUICK, "random_state": np.random.RandomState(0)}).fit(X, LABEL).save(
            tmp_path / "m"
        )
    with pytest.raises(Exception, match="not fitted"):
        RobustClassifier().save(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_altered_files_are_refused(tmp_path: Path) -> None:
    RobustClassifier(**QUICK).fit(X, LABEL).save(tmp_path / "m")
    tensors, documents = store.read_bundle(tmp_path / "m")
    said: Any = documents["extra"]
    for change in (
        {"class": "os.system"},
        {"settings": {"epoch": 3}},
        {"settings": 3},
        {"layout": []},
        {"posterior": "LowRank"},
        {"num_features": "three"},
        {"classes": {"dtype": "|V8", "values": []}},
        {"purified": True},
    ):
        altered = {**documents, "extra": {**said, "estimator": {**said["estimator"], **change}}}
        store.write_bundle(tmp_path / "x", tensors, altered)
        with pytest.raises(store.StoreError):
            load_pipeline(tmp_path / "x")
    store.write_bundle(tmp_path / "x", {**tensors, "extra": {"more": torch.zeros(1)}}, documents)
    with pytest.raises(store.StoreError):
        load_pipeline(tmp_path / "x")
    model = advbayes.BayesianModel(nn.Linear(3, 2), advbayes.Categorical())
    advbayes.save(tmp_path / "y", model=model, posterior=advbayes.PointMass(model))
    with pytest.raises(store.StoreError, match="wanted an estimator saved by save_pipeline"):
        load_pipeline(tmp_path / "y")


def by_names(output: str, num: int = 60) -> Any:
    """A pipeline as people write it: columns by their names, missing values imputed."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "sex": np.where(rng.random(num) < 0.5, "f", "m"),
            "age": np.where(rng.random(num) < 0.2, np.nan, rng.normal(50, 10, num)),
            "dose": rng.normal(2, 1, num),
        }
    )
    numbers = make_pipeline(SimpleImputer(add_indicator=True), StandardScaler())
    columns = ColumnTransformer(
        [
            ("numbers", numbers, ["age", "dose"]),
            ("text", OneHotEncoder(handle_unknown="ignore", sparse_output=False), ["sex"]),
        ]
    ).set_output(transform=output)
    model = RobustClassifier(epochs=2, class_weight={"ill": 2.0, "well": 1.0}, random_state=0)
    whole = Pipeline([("columns", columns), ("model", model)])
    return frame, whole.fit(frame, np.where(frame["dose"] > 2, "ill", "well"))


@pytest.mark.parametrize("output", ["default", "pandas"])
def test_columns_by_name(tmp_path: Path, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Saved, loaded, asked with the columns in another order, and from the command line; without a
    warning."""
    frame, pipeline = by_names(output)
    place = tmp_path / "p.advbayes"
    save_pipeline(pipeline, place)
    again = load_pipeline(place)
    wanted = pipeline.predict_proba(frame)
    assert np.array_equal(again.predict_proba(frame), wanted)
    assert np.array_equal(again.predict_proba(frame[["dose", "sex", "age"]]), wanted)
    assert again[-1].class_weight == {"ill": 2.0, "well": 1.0}
    assert (again[-1].ball_.indicators is not None) == (output == "pandas")
    csv_file = tmp_path / "new.csv"
    frame[["dose", "age", "sex"]].to_csv(csv_file, index=False)
    assert main(["predict", str(place), str(csv_file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert np.allclose(said["predictions"]["p(ill)"], wanted[:, 0], rtol=1e-6)


def test_a_search_scores_what_it_can_attack() -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 2)), np.arange(20) / 10.0
    with pytest.raises(TypeError, match=r"robust_scorer scores RobustClassifier and.*got Ridge"):
        robust_scorer("rmse")(Ridge().fit(x, y), x, y)
    with pytest.raises(ValueError, match="RobustRegressor must be one of 'nll', 'rmse'"):
        robust_scorer("accuracy")(RobustRegressor(epochs=1).fit(x, y), x, y)
    with pytest.raises(ValueError, match="RobustClassifier must be one of 'accuracy', 'nll'"):
        robust_scorer("rmse")(RobustClassifier(epochs=1).fit(x, y > 1), x, y > 1)

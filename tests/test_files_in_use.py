"""Run folders and bundles as people use them: what was refused, edited, sent on or asked in raw
units."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import advbayes
from advbayes import BayesianModel, Categorical, Gaussian, MeanField, PointMass, Samples, store
from advbayes.cli import main
from advbayes.datasets import DataError, Standardize, from_csv
from advbayes.networks import mlp
from advbayes.runs import Run, create_run, load_trained, train
from advbayes.runs.config import make_config
from advbayes.runs.training import read_checkpoint
from advbayes.store import documents, kinds
from advbayes.store.nets import build_net
from tests import faults

SMALL = {
    "data": "diabetes",
    "hidden": [4],
    "defense": "none",
    "epochs": 2,
    "batch_size": 64,
    "lr": 0.01,
    "checkpoint_every": 2,
}


def interrupted(folder: Path, **changes: Any) -> Run:
    """A run that was stopped after its first checkpoint."""
    calls = iter(range(10**6))
    with create_run(make_config({**SMALL, **changes}), folder) as run:
        assert train(run, stop=lambda: next(calls) >= 3).interrupted
    return run


def edit(run: Run, old: str, new: str) -> None:
    text = (run.path / "config.toml").read_text()
    assert old in text
    (run.path / "config.toml").write_text(text.replace(old, new))


# The configuration is sealed


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("lr = 0.01", "lr = 0.03", "lr"),
        ("seed = 0", "seed = 1", "seed"),
        ("epochs = 2.0", "epochs = 3.0", "epochs"),
        ("hidden = [4]", "hidden = [5]", "hidden"),
        ("# num_train is not set", "num_train = 100", "num_train"),
    ],
)
def test_a_configuration_edited_after_a_kill_is_refused(
    tmp_path: Path, old: str, new: str, key: str
) -> None:
    run = interrupted(tmp_path / "run")
    edit(run, old, new)
    with (
        pytest.raises(
            store.StoreError, match=rf"config\.toml: wanted {key} = .*checkpoint was made with"
        ),
        run.lock(),
    ):
        train(run)
    edit(run, new, old)
    with run.lock():
        train(run)
    assert run.status == "trained"
    edit(run, old, new)
    with pytest.raises(
        store.StoreError, match=rf"config\.toml: wanted {key} = .*model was made with"
    ):
        load_trained(run.path)


def test_where_the_data_lie_may_change_and_old_checkpoints_go_on(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "run")
    edit(run, "# root is not set", f'root = "{tmp_path}"')
    assert read_checkpoint(run) is not None
    tensors, texts = store.read_bundle(run.path / "checkpoint")
    del texts["config"]  # as the first release wrote it
    store.write_bundle(run.path / "checkpoint", tensors, texts)
    edit(run, "lr = 0.01", "lr = 0.03")
    assert read_checkpoint(run) is not None


def test_the_command_line_says_which_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = interrupted(tmp_path / "run")
    edit(run, "lr = 0.01", "lr = 0.03")
    assert main(["train", "--resume", str(run.path), "--quiet"]) == 2
    assert "wanted lr = 0.01" in re.sub(r"\s+", " ", capsys.readouterr().err)


@pytest.mark.parametrize(
    "document",
    [
        [],
        "trained",
        {"status": 3},
        {"data": []},
        {"data": "x"},
        {"versions": 1},
        {"started": []},
        {"steps": "9"},
    ],
    ids=str,
)
def test_a_manifest_of_another_shape_is_a_clear_line(
    tmp_path: Path, document: object, capsys: pytest.CaptureFixture[str]
) -> None:
    run = interrupted(tmp_path / "run")
    (run.path / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(store.StoreError, match=r"manifest\.json"):
        run.manifest  # noqa: B018
    assert main(["train", "--resume", str(run.path), "--quiet"]) == 2
    assert "manifest.json" in capsys.readouterr().err.replace("\n", "")


def test_a_pipe_in_place_of_the_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = interrupted(tmp_path / "run")
    os.mkfifo(run.path / ".lock")
    assert main(["train", "--resume", str(run.path), "--quiet"]) == 2
    assert "wanted a lock file" in re.sub(r"\s+", " ", capsys.readouterr().err)


# What is refused leaves nothing


@pytest.fixture
def bad_csv(tmp_path: Path) -> Path:
    path = tmp_path / "bad.csv"
    path.write_text("a,b,y\n1,2,3\n4,oops\x1b[2J,6\n7,8\n")
    return path


@pytest.mark.parametrize("out", [True, False])
def test_a_refused_table_leaves_nothing(
    tmp_path: Path,
    bad_csv: Path,
    out: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", "--data", str(bad_csv), "--target", "y", "--quiet", "--epochs", "1"]
    command += ["--out", "mine"] if out else []
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "\x1b[2J" not in said
    assert not (tmp_path / "mine").exists()
    assert not (tmp_path / "runs").exists() or not os.listdir(tmp_path / "runs")
    bad_csv.write_text(
        "a,b,y\n" + "\n".join(f"{i / 4},{i * i % 7},{i / 2}" for i in range(40)) + "\n"
    )
    assert main(command) == 0
    made = tmp_path / ("mine" if out else "runs/bad-mix")
    assert Run.open(made).status == "trained"


def test_a_folder_that_was_there_stays_and_work_is_never_removed(
    tmp_path: Path, bad_csv: Path
) -> None:
    config = make_config({"data": str(bad_csv), "target": "y"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError), create_run(config, tmp_path / "empty") as run:
        train(run)
    assert os.listdir(tmp_path / "empty") == []

    def work_and_fail(run: Run) -> None:
        run.log("something was done")
        raise RuntimeError

    with pytest.raises(RuntimeError), create_run(make_config(SMALL), tmp_path / "run") as run:
        work_and_fail(run)
    assert sorted(os.listdir(tmp_path / "run")) == ["config.toml", "log.txt"]


# Raw units


def test_load_takes_a_run_folder_and_answers_in_raw_units(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal([50.0, -3.0], [20.0, 0.1], (80, 2))
    target = 1000 + 7 * rows[:, 0] + 300 * rows[:, 1]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "y"], *np.column_stack([rows, target]).tolist()])
    config = {
        **SMALL,
        "data": str(tmp_path / "t.csv"),
        "target": "y",
        "epochs": 60,
        "lr": 0.03,
        "seed": 3,
    }
    with create_run(make_config(config), tmp_path / "run") as run:
        train(run)
    bundle = advbayes.load(run.path)
    predict = bundle.predictor(20)
    assert (predict.feature_names, predict.target_names) == (("a", "b"), ("y",))
    mean = predict(rows[:10]).mean.numpy()
    # standardised rows would be off by 100 deviations
    assert np.median(abs(mean - target[:10])) < 0.5 * target.std()  # single rows may be far out
    # The command line gives the same numbers.
    out = tmp_path / "p.json"
    assert (
        main(
            ["predict", str(run.path), str(tmp_path / "t.csv"), "--out", str(out), "--thetas", "20"]
        )
        == 0
    )
    np.testing.assert_allclose(mean, json.loads(out.read_text())["y"][:10], rtol=1e-5)
    # log_prob has the change of units in it: densities integrate to one in raw y.
    grid = torch.linspace(float(mean[0]) - 3000, float(mean[0]) + 3000, 20001)
    density = predict(torch.tensor(rows[:1])).log_prob
    total = sum(math.exp(float(density(value.reshape(1)))) for value in grid[::10]) * 3.0
    assert total == pytest.approx(1.0, abs=1e-3)
    low, high = predict.interval(rows[:10], 0.8)
    inside = predict(rows[:10])
    torch.testing.assert_close(inside.cdf(low.flatten()), torch.full((10,), 0.1), atol=1e-3, rtol=0)
    torch.testing.assert_close(
        inside.cdf(high.flatten()), torch.full((10,), 0.9), atol=1e-3, rtol=0
    )


def test_several_outputs_in_raw_units() -> None:
    model = BayesianModel(nn.Linear(1, 2, bias=False), Gaussian(0.5, num_outputs=2))
    scaling = Standardize(
        torch.tensor([10.0]),
        torch.tensor([2.0]),
        torch.tensor([0.0, 5.0]),
        torch.tensor([1.0, 4.0]),
    )
    predict = store.RawPredictor(
        advbayes.PosteriorPredictive(model, torch.tensor([[1.0, -1.0]])), scaling=scaling
    )
    prediction = predict([[14.0]])
    torch.testing.assert_close(prediction.mean, torch.tensor([[2.0, -3.0]]))
    torch.testing.assert_close(prediction.variance.sqrt(), torch.tensor([[0.5, 2.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_raw_units_far_from_zero_keep_the_precision_of_their_scaling(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x = 1e9 + torch.randn(20, 2, generator=draw, dtype=torch.float64)
    y = 5e8 + 3 * torch.randn(20, generator=draw, dtype=torch.float64)
    scaling = Standardize.fit(x, y)
    model = BayesianModel(nn.Linear(2, 1, dtype=dtype), Gaussian(0.5))
    thetas = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.2, 0.1]], dtype=dtype)
    inside = advbayes.PosteriorPredictive(model, thetas)(scaling.transform(x).to(dtype))
    predict = store.RawPredictor(advbayes.PosteriorPredictive(model, thetas), scaling=scaling)
    found, unit = predict(x), scaling.target_std
    assert unit is not None
    torch.testing.assert_close(
        found.mean, inside.mean.double() * unit + scaling.target_mean, rtol=1e-14, atol=1e-6
    )
    wanted = inside.log_prob(scaling.transform_target(y).to(dtype)).double() - unit.log()
    torch.testing.assert_close(found.log_prob(y), wanted, rtol=1e-5, atol=1e-5)


def test_class_names_seed_and_number_of_thetas(tmp_path: Path) -> None:
    model = BayesianModel(mlp(3, 2), Categorical())
    scaling = Standardize(torch.ones(3), 2 * torch.ones(3))
    posterior = MeanField(model, init_scale=0.5)
    save = {
        "model": model,
        "scaling": scaling.to_dict(),
        "class_names": ["no", "yes"],
        "extra": {"seed": 7},
    }
    advbayes.save(tmp_path / "m.advbayes", posterior=posterior, **save)  # type: ignore[arg-type]
    bundle = advbayes.load(tmp_path / "m.advbayes")
    x = torch.randn(5, 3)
    thetas = store.thetas_of(bundle.posterior, 4, 7)
    wanted = advbayes.PosteriorPredictive(bundle.model, thetas)(scaling.transform(x)).logits  # type: ignore[attr-defined]
    assert torch.equal(bundle.predictor(4)(x).logits, wanted)  # type: ignore[attr-defined]
    assert not torch.equal(bundle.predictor(4, seed=8)(x).logits, wanted)  # type: ignore[attr-defined]
    assert not torch.equal(bundle.predictor(5)(x).logits, wanted)  # type: ignore[attr-defined]
    assert bundle.predictor(4).classes(x) == [["no", "yes"][index] for index in wanted.argmax(-1)]
    advbayes.save(tmp_path / "s", posterior=Samples(torch.zeros(3, model.num_params)), model=model)
    assert len(advbayes.load(tmp_path / "s").predictor(20).inner.thetas) == 3
    advbayes.save(tmp_path / "p", posterior=PointMass(model), model=model)
    assert len(advbayes.load(tmp_path / "p").predictor(20).inner.thetas) == 1
    # as an estimator's, it would be called with raw rows, and answer in standardised units
    assert not hasattr(advbayes.load(tmp_path / "p").predictor(), "predict")
    assert set(advbayes.load(tmp_path / "p").predictor().classes(x)) <= {"0", "1"}


def test_the_gradient_passes_through_the_scaling() -> None:
    model = BayesianModel(nn.Linear(1, 1, bias=False), Gaussian(0.5))
    scaling = Standardize(
        torch.tensor([10.0]), torch.tensor([2.0]), torch.tensor(100.0), torch.tensor(4.0)
    )
    predict = store.RawPredictor(
        advbayes.PosteriorPredictive(model, torch.full((1, 1), 3.0)), scaling=scaling
    )
    x = torch.tensor([[12.0]], requires_grad=True)
    (slope,) = torch.autograd.grad(predict(x).mean.sum(), x)
    torch.testing.assert_close(slope, torch.tensor([[6.0]]))  # 4 * 3 / 2


def test_an_unfinished_run_is_named(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "run")
    with pytest.raises(store.StoreError, match=r"run: wanted a finished run .*--resume"):
        advbayes.load(run.path)


# Limits, from both sides


def test_the_number_of_layers(tmp_path: Path) -> None:
    def layers(num: int) -> Any:
        return {
            "kind": "Sequential",
            "layers": [[f"{i}", {"kind": "Tanh"}] for i in range(num - 1)],
        }

    kinds.check_number(layers(kinds.MAX_KINDS), "net")
    with pytest.raises(store.StoreError, match=f"at most {kinds.MAX_KINDS} layers"):
        kinds.check_number(layers(kinds.MAX_KINDS + 1), "net")


@pytest.mark.parametrize(
    ("described", "key"),
    [
        ({"kind": "LeakyReLU", "negative_slope": "0.1", "inplace": False}, "negative_slope"),
        ({"kind": "ELU", "alpha": None, "inplace": False}, "alpha"),
        ({"kind": "Softplus", "beta": 1, "threshold": [20]}, "threshold"),
        ({"kind": "ReLU", "inplace": "no"}, "inplace"),
        ({"kind": "ReLU", "inplace": 0}, "inplace"),
        ({"kind": "Flatten", "start_dim": 1.0, "end_dim": -1}, "start_dim"),
        ({"kind": "GELU", "approximate": "exact"}, "approximate"),
        ({"kind": "AdaptiveAvgPool2d", "output_size": ["1", 1]}, "output_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_a_layer_takes_and_fails_with_later(
    described: dict[str, object], key: str
) -> None:
    with pytest.raises(store.StoreError, match=rf"net\.{key}: wanted"):
        build_net(described, "net")


def test_the_number_of_values(tmp_path: Path) -> None:
    most = [0] * documents.MAX_VALUES  # commas: one less; one bracket
    store.write_bundle(tmp_path / "a", {}, {"one": most})
    assert len(store.read_bundle(tmp_path / "a")[1]["one"]) == documents.MAX_VALUES  # type: ignore[arg-type]
    with pytest.raises(store.StoreError, match=f"at most {documents.MAX_VALUES} values"):
        store.write_bundle(tmp_path / "a", {}, {"one": [*most, 0]})
    with pytest.raises(store.StoreError, match=f"at most {documents.MAX_VALUES} values"):
        store.write_bundle(tmp_path / "a", {}, {"one": most, "two": [0]})
    half = json.dumps([0] * (documents.MAX_VALUES // 2 + 1)).encode()
    manifest, files = faults.sealed({"one.json": half, "two.json": half})
    for name, data in {"manifest.json": manifest, **files}.items():
        (tmp_path / "a" / name).write_bytes(data)
    with pytest.raises(store.StoreError, match=f"at most {documents.MAX_VALUES} values"):
        store.read_bundle(tmp_path / "a")


def test_every_model_that_is_hostile_is_one_change_from_a_good_one(tmp_path: Path) -> None:
    """The small model that the hostile ones are made from loads: each is refused for what it
    tries."""
    contents = faults.hostile_models()["a theta of two axes"]
    good = faults.hostile_models()["a width that is text"]["posterior.safetensors"]
    manifest, files = faults.sealed({**contents, "posterior.safetensors": good})
    (tmp_path / "m").mkdir()
    for name, data in {"manifest.json": manifest, **files}.items():
        (tmp_path / "m" / name).write_bytes(data)
    assert store.load(tmp_path / "m").model.num_params == 6


def test_column_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a\x1b]0;owned\x07,b,y\n" + "1,2,3\n" * 5)
    for target in ("nothing", "z"):
        with pytest.raises(DataError) as caught:
            from_csv(path, target=target)
        assert str(caught.value).isprintable()
        assert "\\x1b]0;owned" in str(caught.value)

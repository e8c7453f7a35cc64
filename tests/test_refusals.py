"""What no other file gives: input that each function refuses, with what it says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Normal
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from advbayes import (
    L2,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Gaussian,
    GaussianMixture,
    HeteroscedasticGaussian,
    Learned,
    MeanField,
    Mixture,
    Noise,
    PointMass,
    Purifier,
    Samples,
    Suite,
    evaluate,
    fit,
    metrics,
    pgd,
)
from advbayes.adapters import PredictorModule, from_function, with_estimators
from advbayes.adapters.sklearn import _affine
from advbayes.attacks import DivergenceFrom
from advbayes.channels.density import log_normal
from advbayes.checks import AdvBayesError
from advbayes.cli import main
from advbayes.cli.experiments import _seeds, _settings
from advbayes.cli.foreign import _places
from advbayes.cli.predicting import read_inputs
from advbayes.cli.screen import check_new
from advbayes.datasets import (
    SOURCES,
    Standardize,
    fetching,
    find_dataset,
    from_csv,
    from_npz,
    load_dataset,
)
from advbayes.datasets.dataset import Provenance
from advbayes.datasets.loading import _idx
from advbayes.evaluation import selective_task
from advbayes.evaluation.inputs import as_tensors
from advbayes.evaluation.scoring import worst
from advbayes.predictive import conformal_sets
from advbayes.purification import Simulated, StraightThrough
from advbayes.purification.attacks import nearest_centre_radius
from advbayes.report import Gallery, View
from advbayes.runs import make_attack
from advbayes.runs.building import reach_of
from advbayes.runs.config import make_config
from advbayes.store import documents

X, Y = torch.rand(8, 3), torch.tensor([0, 1] * 4)
THETAS = torch.zeros(1, 8)


def classes(x: Tensor) -> CategoricalDistribution:
    return CategoricalDistribution(logits=torch.stack([x[:, 0], -x[:, 0]], 1))


def normals(x: Tensor) -> Normal:
    return Normal(x[:, 0], 1.0)


def classifier() -> BayesianModel:
    return BayesianModel(nn.Linear(3, 2), Categorical())


def purifier(channel: Any, **options: Any) -> Purifier:
    return Purifier(classifier(), channel, THETAS, (X, Y), **options)


def outputs(num: int) -> Purifier:
    model = BayesianModel(nn.Linear(3, num), Gaussian(1.0, num_outputs=num))
    return Purifier(model, Noise(0.1), torch.zeros(1, 4 * num), X)


class Pixels(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :1], x


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(X, Y)])


class Unlike:
    """A channel with a density of its own kind, of the wrong shape where asked."""

    def __init__(self, turned: bool = False) -> None:
        self.turned = turned

    def sample(self, predict: Any, x: Tensor, y: Any = None, *, generator: Any = None) -> Tensor:
        return x

    def density(self, predict: Any, x: Tensor, y: Any = None) -> Any:
        def log_prob(x_adv: Tensor) -> Tensor:
            found = -torch.cdist(x.flatten(1), x_adv.flatten(1))
            return found.T if self.turned else found

        return SimpleNamespace(log_prob=log_prob)


def fitted(labels: str) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression().fit(X.numpy(), np.array(list(labels))[Y.numpy()])


def train(data: Any, **options: Any) -> Any:
    model = options.pop("model", classifier())
    return fit(model, PointMass(model), Noise(0.0), data, epochs=1, **options)


def evaluated(**options: Any) -> Any:
    given: dict[str, Any] = {"predict": classes, "data": (X, Y), "attacks": {"a": pgd(L2(0.1), 2)}}
    given.update(options)
    return evaluate(given.pop("predict"), given.pop("data"), **given)


def shorter(predict: Any, x: Tensor, y: Any = None, *, generator: Any = None) -> Tensor:
    return x[:-1]


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    # --- models, likelihoods, channels
    "scales of a mixture": (
        lambda: GaussianMixture(torch.zeros(2, 3), torch.ones(3)),
        "means and scales must share a shape (S, B) or (S, B, D), got a torch.float32 tensor of "
        "shape (2, 3) on cpu and a torch.float32 tensor of shape (3,) on cpu",
    ),
    "axes of a mixture": (
        lambda: GaussianMixture(torch.zeros(2), torch.ones(2)),
        "means and scales must share a shape (S, B) or (S, B, D), got",
    ),
    "cdf of two outputs": (
        lambda: GaussianMixture(torch.zeros(1, 2, 2), torch.ones(1, 2, 2)).cdf(torch.zeros(2, 2)),
        "cdf is defined for one output, got several",
    ),
    "outputs of a net with scales": (
        lambda: HeteroscedasticGaussian().check_target(torch.zeros(4), torch.zeros(4)),
        "net must give an output of shape (B, 2 D), got a torch.float32 tensor of shape (4,)",
    ),
    "a posterior is called": (
        lambda: MeanField(classifier())(X),
        "a posterior is not called; use rsample, sample or kl",
    ),
    "samples without one": (
        lambda: Samples(torch.zeros(0, 3)),
        "thetas must be a non-empty tensor of shape (S, P), got a torch.float32 tensor of shape (0",
    ),
    "samples of one axis": (
        lambda: Samples(torch.zeros(3)),
        "thetas must be a non-empty tensor of shape (S, P), got",
    ),
    "another event": (
        lambda: log_normal(torch.zeros(2, 4), torch.zeros(5, 3), 1.0),
        "x_adv must have the event shape (3,) of the reference, got a torch.float32 tensor of "
        "shape (2, 4)",
    ),
    "a generator of another shape": (
        lambda: Learned(Pixels(), L2(1.0)).moments(classes, X, Y),
        "generator must return mean and log-std of x's shape (8, 3), got (8, 1) and (8, 3)",
    ),
    # --- attacks
    "no attack in a suite": (
        lambda: Suite((pgd(L2(1.0)), 3)),  # type: ignore[arg-type]
        "attacks[1] must be an attack such as pgd(L2(1.0)), got 3",
    ),
    "a scale of nothing": (
        lambda: DivergenceFrom(2.0, scale=0.0),
        "scale must be positive, got a torch.float32 tensor of shape ()",
    ),
    "an attack on classes": (
        lambda: make_attack("hard_label", L2(1.0), steps=2, task="regression"),
        "attack must be one for regression, got 'hard_label', which wants classes",
    ),
    "numbers where classes were": (
        lambda: PredictorModule(normals, num_classes=2)(X),
        "predict must predict 2 classes, got Normal",
    ),
    # --- training
    "a loader with parts of the data": (
        lambda: train(
            DataLoader(
                TensorDataset(X, Y),
                sampler=DistributedSampler(TensorDataset(X, Y), num_replicas=1, rank=0),
            )
        ),
        "data must be the same DataLoader on all ranks, each of which takes its rows of every "
        "batch, got one with a DistributedSampler",
    ),
    "a loader without a length": (
        lambda: train(DataLoader(Stream(), batch_size=None), objective=ChannelELBO(8)),
        "data must have a length or let the DataLoader make the batches (batch_size=...), got",
    ),
    "a net that joins the rows": (
        lambda: train(
            (X, Y),
            model=BayesianModel(nn.Sequential(nn.Linear(3, 2), nn.Flatten(0)), Categorical()),
        ),
        "net must give one output row for each input, got a torch.float32 tensor of shape (2, 1) "
        "on cpu for one input",
    ),
    # --- evaluation and metrics
    "a loader with nothing": (
        lambda: as_tensors(DataLoader(TensorDataset(X[:0], Y[:0])), torch.float32),
        "data must hold at least one example, got an empty DataLoader",
    ),
    "no pair": (
        lambda: as_tensors((X,), torch.float32),  # type: ignore[arg-type]
        "data must be a pair (x, y) or a DataLoader, got (tensor(",
    ),
    "inputs of one axis": (
        lambda: as_tensors((X[:, 0], Y), torch.float32),
        "x must be a floating-point tensor of shape (N, *event) with N >= 1, got a torch.float32 "
        "tensor of shape (8,)",
    ),
    "no inputs": (
        lambda: as_tensors((X[:0], Y[:0]), torch.float32),
        "x must be a floating-point tensor of shape (N, *event) with N >= 1, got",
    ),
    "no predictors": (
        lambda: evaluated(predict={}),
        "predict must be a predictor or a mapping of at least one, got none",
    ),
    "a path for a name": (
        lambda: evaluated(predict={"a/b": classes}),
        "names of predictors must not hold '/', got ['a/b']",
    ),
    "an attack that loses a row": (
        lambda: evaluated(attacks={"short": shorter}),
        "predict/short/None must return inputs of shape (8, 3), got a torch.float32 tensor of "
        "shape (7, 3)",
    ),
    "another radius": (
        lambda: evaluated().columns(attack="a", eps=0.7),
        "eps must be one of [0.1] for 'a', got 0.7",
    ),
    "the worst of nothing": (
        lambda: worst([], "classification"),
        "worst wants at least one attack's columns, got none",
    ),
    "numbers for a task of classes": (
        lambda: selective_task(normals, (X, X[:, 0]), X, ball=L2(0.1), radii=(0.1,)),
        "selective_task is about classes, got a regression predictor",
    ),
    "another event outside": (
        lambda: selective_task(classes, (X, Y), X[:, :2], ball=L2(0.1), radii=(0.1,)),
        "outside must have the event shape (3,) of inside, got a torch.float32 tensor of shape (8",
    ),
    "never positive": (
        lambda: metrics.auprc([0.1, 0.2], [0, 0]),
        "positive must be True somewhere, got 2 times False",
    ),
    "targets of words": (
        lambda: metrics.constant(torch.tensor([True, False])),
        "y must be a real tensor, got a torch.bool tensor",
    ),
    "no targets": (
        lambda: metrics.constant(torch.zeros(0)),
        "y must have shape (N,) or (N, D) with N >= 1, got a torch.float32 tensor of shape (0,)",
    ),
    "targets of three axes": (
        lambda: metrics.constant(torch.rand(2, 2, 2)),
        "y must have shape (N,) or (N, D) with N >= 1, got",
    ),
    "nothing to calibrate on": (
        lambda: conformal_sets(classes, (X[:0], Y[:0])),
        "data must hold one y for each x, and at least one, got 0 and 0",
    ),
    "a label too few to calibrate on": (
        lambda: conformal_sets(classes, (X, Y[1:])),
        "data must hold one y for each x, and at least one, got 8 and 7",
    ),
    # --- purification
    "denoised features": (
        lambda: purifier(Noise(0.1), features=lambda x: x[:, :1]).denoise(X),
        "denoise needs centres like x, got a purifier with features",
    ),
    "denoised by another density": (
        lambda: purifier(Unlike()).denoise(X),
        "denoise needs a channel with a Gaussian density, got one of another kind",
    ),
    "features of another density": (
        lambda: purifier(Unlike(), features=lambda x: x[:, :1]),
        "features need a channel with a Gaussian density, got one of another kind",
    ),
    "a density the other way round": (
        lambda: purifier(Unlike(turned=True))(X[:2]),
        "the channel's log_prob must return shape (N, B) = (8, 2), got (2, 8)",
    ),
    "nothing to diagnose": (
        lambda: purifier(Noise(0.1)).diagnose(X[:0]),
        "x must hold at least one input, got none",
    ),
    "nothing to purify": (lambda: outputs(1)(X[:0]), "x must hold at least one input, got none"),
    "the level of two outputs": (
        lambda: outputs(2)(X).cdf(torch.zeros(8)),
        "cdf is defined for one output, got 2",
    ),
    "the quantile of two outputs": (
        lambda: outputs(2)(X).icdf(torch.tensor(0.5)),
        "icdf is defined for one output, got 2",
    ),
    "a closed form of several noises": (
        lambda: nearest_centre_radius(
            purifier(Mixture([0.5, 0.5], [Noise(0.1), Noise(0.2)])), X[:1], Y[:1]
        ),
        "the closed form needs one noise for all centres, got several",
    ),
    "straight through nothing": (
        lambda: StraightThrough(SimpleNamespace(base=None)),  # type: ignore[arg-type]
        "base must be given for a purifier that was loaded, for it has no model, got None",
    ),
    "nothing simulated": (
        lambda: Simulated(Noise(0.1), 0, 0.1, torch.Generator()),
        "num must be a whole number >= 1, got 0",
    ),
    "simulated points without width": (
        lambda: Simulated(Noise(0.1), 1, 0.0, torch.Generator()),
        "bandwidth must be a finite number > 0, got 0.0",
    ),
    "weights of nothing": (
        lambda: train((X, Y), sample_weight=torch.zeros(8)),
        "sample_weight must be >= 0 and positive somewhere, got others",
    ),
    "a negative weight": (
        lambda: train((X, Y), sample_weight=torch.tensor([1.0] * 7 + [-1e-6])),
        "sample_weight must be >= 0 and positive somewhere, got others",
    ),
    # --- data and estimators
    "a mean without a spread": (
        lambda: from_function(lambda x: x[:, 0], kind="mean", scale=0.0),
        "scale must be a finite number > 0, got 0.0",
    ),
    "one array for an estimator": (
        lambda: with_estimators(fitted("ab"), X.numpy()),
        "data must be a pair (X, y) for an estimator, got array(",
    ),
    "estimators of other classes": (
        lambda: with_estimators({"a": fitted("ab"), "b": fitted("bc")}, (X.numpy(), Y.numpy())),
        "predict must hold estimators of the same classes, got different ones",
    ),
    "rows without targets": (
        lambda: Standardize.fit(X, X[1:, 0]),
        "y must have as many rows as x (8), got a torch.float32 tensor of shape (7,)",
    ),
    "whole numbers for moments": (
        lambda: Standardize(torch.tensor([1]), torch.tensor([1])),
        "mean must be a floating tensor, got a torch.int64 tensor",
    ),
    "no rows": (
        lambda: Standardize.fit(X[:0]),
        "x must have at least one row and one column, got a torch.float32 tensor of shape (0, 3)",
    ),
    "a view of other inputs": (
        lambda: Gallery(X, Y, (View("a", "clean", X[:, :2], torch.rand(8, 2)),)),
        "a view's x must have shape (8, 3), got a torch.float32 tensor of shape (8, 2)",
    ),
    # --- runs and commands
    "features that are not there": (
        lambda: reach_of(("a", "b"), None, 0.5, ["c"], []),
        "fixed: must name features of the data, got c; there are a, b",
    ),
    "budgets of what is not there": (
        lambda: reach_of((), None, 0.5, [], ["c=1"]),
        "feature_eps: must name features of the data, got c; there are none with a name",
    ),
    "nothing left to change": (
        lambda: reach_of(("a", "b"), None, 0.5, ["a", "b"], []),
        "fixed: must leave at least one feature that the attacker may change, got all of them",
    ),
    "features and what is left out": (
        lambda: make_config({"data": "t.csv", "target": "y", "features": ["a"], "drop": ["b"]}),
        "features, drop: must not be given together, got both",
    ),
    "a budget of an attacker without one": (
        lambda: make_config({"data": "wine", "eps": 0.0, "feature_eps": ["alcohol=1"]}),
        "eps: must be > 0 where feature_eps is given, got 0",
    ),
    "a budget that is no number": (
        lambda: make_config({"data": "wine", "feature_eps": ["alcohol=much"]}),
        "feature_eps: must be name=number with a number > 0, got 'alcohol=much'",
    ),
    "a budget of nothing": (
        lambda: make_config({"data": "wine", "feature_eps": ["alcohol=0"]}),
        "feature_eps: must be name=number with a number > 0, got 'alcohol=0'",
    ),
    "a budget without end": (
        lambda: make_config({"data": "wine", "feature_eps": ["alcohol=inf"]}),
        "feature_eps: must be name=number with a number > 0, got 'alcohol=inf'",
    ),
    "a budget of nobody": (
        lambda: make_config({"data": "wine", "feature_eps": ["=1"]}),
        "feature_eps: must be name=number with a number > 0, got '=1'",
    ),
    "a task for known data": (
        lambda: make_config({"data": "wine", "task": "regression"}),
        "task: must be left out for the built-in 'wine', got 'regression'",
    ),
    "half a factory": (
        lambda: make_config({"data": "wine", "network": "module:"}),
        "network: must be auto, conv, mlp or module:factory, got 'module:'",
    ),
    "budgets by hand": (
        lambda: reach_of(("age",), None, 0.0, [], ["age=5"]),
        "eps: must be > 0 where feature_eps is given, got 0",
    ),
    "budgets of no number": (
        lambda: reach_of(("age",), None, 1.0, [], ["age=x"]),
        "feature_eps: must be name=number with a number > 0, got 'age=x'",
    ),
    "a folder that is not there": (
        lambda: check_new("out", "/nowhere/x.csv", (".csv",)),
        "out: must be in a folder that is there, got /nowhere/x.csv",
    ),
    "seeds in words": (
        lambda: _seeds("two"),
        "seeds must be a number, or numbers with commas between them, got 'two'",
    ),
    "a setting without a value": (
        lambda: _settings(["epochs"]),
        "--set must be KEY=VALUE, got 'epochs'",
    ),
    "classes that a model does not know": (
        lambda: _places(torch.tensor([0, 2]), ["a", "b", "c"], ["b", "a"]),
        "data: must hold the model's classes (b, a), got c as well",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_and_said_why(name: str) -> None:
    call, said = REFUSED[name]
    with pytest.raises(AdvBayesError) as refused:
        call()
    assert said in str(refused.value)


def table(path: Path, text: str, **options: Any) -> Any:
    path.write_text(text)
    return from_csv(path, **options)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (
            "a,b,c\n" + "1,2,x\n2,3,y\n" * 5,
            {"target": "c", "drop": ["b", "c"]},
            "drop must name neither the target nor a feature, got ['c']",
        ),
        (
            "a,b,c\n" + "1,2,x\n2,3,y\n" * 5,
            {"target": "c", "features": ["a"], "drop": ["a"]},
            "drop must name neither the target nor a feature, got ['a']",
        ),
        (
            "a,b,c\n" + "1,2,x\n2,3,y\n" * 5,
            {"target": ["b", "c"], "task": "classification"},
            "target must be one column for classification, got ['b', 'c']",
        ),
    ],
)
def test_a_table_is_refused(tmp_path: Path, text: str, options: Any, said: str) -> None:
    with pytest.raises(AdvBayesError) as refused:
        table(tmp_path / "t.csv", text, **options)
    assert said in str(refused.value)


def test_where_nothing_is_asked_nothing_is_refused() -> None:
    """The other side of some of these: the least that is taken."""
    assert purifier(Noise(0.1)).denoise(X[:0]).shape == (0, 3)
    assert _seeds(None) is None
    assert metrics.paired_t([1.0], [2.0]) == 1.0
    assert reach_of(("age",), None, 0.0, [], []) == (None, None)
    assert _places(torch.tensor([0, 1]), ["a", "b", "c"], ["b", "a"]).tolist() == [1, 0]


def trained(**options: Any) -> Any:
    """What a prediction asks a run about."""
    model = SimpleNamespace(dtype=torch.float32)
    known = {"event": (3,), "feature_names": ("a", "b", "c"), "model": model}
    return SimpleNamespace(**known, encoding=None, steps=None, scaling=None, box=None, **options)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": np.zeros((2, 4))}, "INPUT: must hold inputs of shape (3,), got (4,) in"),
        ({"x": np.zeros((0, 3))}, "must hold at least one row of finite numbers, got (0, 3) in"),
        ({"x": np.full((2, 3), np.inf)}, "must hold at least one row of finite numbers, got (2"),
        ({"y": np.zeros(2)}, "INPUT: must hold an array x, got"),
    ],
)
def test_inputs_that_no_model_takes(tmp_path: Path, arrays: Any, said: str) -> None:
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(AdvBayesError) as refused:
        read_inputs(trained(), tmp_path / "t.npz")
    assert said in str(refused.value)


def test_inputs_that_a_model_takes(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.arange(6.0).reshape(2, 3))
    found = read_inputs(trained(), tmp_path / "t.npz")
    assert found.dtype == torch.float32
    assert found.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["a-run", "--model", "m:f"], "model: must be given without a run, got 'a-run' as well"),
        (["--model", "m:f"], "model: must go with --data and --eps, got no --data and --eps"),
        (["--model", "m:f", "--eps", "1"], "must go with --data and --eps, got no --data"),
        (["--model", "m:f", "--data", "d.csv"], "must go with --data and --eps, got no --eps"),
        (["--model", "mf", "--data", "d"], "model: must be MODULE:FACTORY, got 'mf'"),
        ([], "RUN: must be a run folder, or --model and --data must be given, got neither"),
    ],
)
def test_an_audit_of_both_or_of_half(
    asked: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *asked]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def idx(*shape: int) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    return bytes([0, 0, 8, len(shape)]) + sizes + bytes(int(np.prod(shape)))


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        ((2, 27, 28), (2,), "N images of 28x28 and N labels, got (2, 27, 28) and labels (2,)"),
        ((2, 28, 28), (3,), "N images of 28x28 and N labels, got (2, 28, 28) and labels (3,)"),
        ((2, 28), (2,), "N images of 28x28 and N labels, got (2, 28) and labels (2,)"),
    ],
)
@pytest.mark.parametrize("part", ["train", "test"])
def test_images_of_another_size(images: Any, labels: Any, said: str, part: str) -> None:
    source = SOURCES["mnist"]
    shapes = [(2, 28, 28), (2,), (2, 28, 28), (2,)]
    first = 0 if part == "train" else 2
    shapes[first : first + 2] = [images, labels]
    contents = {
        content.name: idx(*shape) for content, shape in zip(source.contents, shapes, strict=True)
    }
    with pytest.raises(AdvBayesError) as refused:
        _idx(source, contents)
    assert said in str(refused.value)
    assert str(refused.value).startswith(source.contents[first].name)


def test_a_table_without_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    name = SOURCES["energy"].contents[0].name
    read = {name: b"X1,X2,Y1\n" + b"1,2,3\n" * 20}, Provenance("here")
    monkeypatch.setattr(fetching, "find_contents", lambda *given: {name: "here"})
    monkeypatch.setattr(fetching, "read_contents", lambda *given: read)
    with pytest.raises(AdvBayesError) as refused:
        load_dataset("energy")
    assert "wanted a column 'Y2', got X1, X2, Y1" in str(refused.value)


def test_what_comes_with_another_package_has_no_folder() -> None:
    assert find_dataset("diabetes") is None


@pytest.mark.parametrize("label", [0.5, np.nan, np.inf, -1.0, 1e9])
def test_labels_that_are_no_classes(tmp_path: Path, label: float) -> None:
    x, y = np.random.default_rng(0).random((20, 3)), np.arange(20.0) % 2
    np.savez(tmp_path / "t.npz", x=x, y=y)
    assert from_npz(tmp_path / "t.npz", task="classification").y_train.dtype == torch.int64
    y[3] = label
    np.savez(tmp_path / "t.npz", x=x, y=y)
    with pytest.raises(AdvBayesError, match=r"y as classes 0, 1, \.\.\. below"):
        from_npz(tmp_path / "t.npz", task="classification")


@pytest.mark.parametrize("weight", [0.01, 1.0])
def test_weights_need_not_sum_to_anything(weight: float) -> None:
    assert train((X, Y), sample_weight=torch.tensor([weight] + [0.0] * 7)).steps >= 1


def test_a_document_may_be_as_large_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"a": [1, 2, 3]}
    size = len(documents.encode(document))
    monkeypatch.setattr(documents, "MAX_BYTES", size)
    assert len(documents.encode(document)) == size
    monkeypatch.setattr(documents, "MAX_BYTES", size - 1)
    with pytest.raises(AdvBayesError, match=f"at most {size - 1} bytes, got {size}"):
        documents.encode(document)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_of_an_estimator_are_taken_in_float64(dtype: Any) -> None:
    last = SimpleNamespace(coef_=np.ones((2, 3), dtype), intercept_=np.zeros(2, dtype))
    net = _affine(last, torch.ones(3).double(), torch.zeros(3).double())
    assert net is not None
    assert {each.dtype for each in net.parameters()} == {torch.float64}

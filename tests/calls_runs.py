"""Calls of data, files, runs and estimators."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from torch import nn

import advbayes
from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Gaussian,
    Linf,
    LowRank,
    MeanField,
    PosteriorPredictive,
    adapters,
    attacks,
    auditing,
    datasets,
    evaluation,
    load,
    metrics,
    one_step,
    predictive,
    purification,
    save,
    store,
)
from advbayes.cli.app import app
from advbayes.cli.train import parse
from advbayes.datasets import (
    Encoding,
    Standardize,
    class_weights,
    from_csv,
    from_npz,
    load_dataset,
    split_rows,
)
from advbayes.distributed import Ranks
from advbayes.estimators import RobustClassifier, RobustRegressor, robust_scorer
from advbayes.networks import (
    conv_net,
    large_kernel_net,
    mlp,
    resnet18,
    wide_conv_net,
    with_group_norm,
)
from advbayes.runs import make_attack, prepare
from advbayes.runs.building import build_defense, build_model, reach_of
from advbayes.runs.config import ATTACKS, RunConfig, accepted, make_config
from advbayes.runs.named import NAMED_CHANNELS, make_ball, named_channel, named_posterior, schedule
from advbayes.runs.training import clean_metrics
from advbayes.seeds import GlobalStream
from advbayes.store import thetas_of

from .calls import call, exported, plain
from .calls_core import BALL, MODEL
from .calls_users import AIMS, TRUE, WIDE

# --- data ----------------------------------------------------------------------------------------


def of_data(found: Any) -> list[Any]:
    parts = [found.x_train, found.y_train, found.x_test, found.y_test, found.mask]
    names = [
        found.name,
        found.task,
        found.class_names,
        found.feature_names,
        found.target_names,
        found.box,
    ]
    return [*parts, *names, None if found.scaling is None else found.scaling.to_json()]


@contextlib.contextmanager
def file(name: str, text: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_text(text)
        yield Path(folder) / name


LINES = [
    (f"{i * 7 % 11}.5", f"{i % 3}", ("red", "blue", "")[i % 3], f"{i * i % 5}") for i in range(20)
]


def read(cells: str = "", sep: str = ",", head: str = "a,b,colour,d\n", **settings: Any) -> Any:
    rows = cells or head.replace(",", sep) + "".join(sep.join(line) + "\n" for line in LINES)
    with file("table.csv", rows) as path:
        return from_csv(path, **settings)


EARLIER = Encoding.fit(
    ("a", "b", "colour"),
    np.array([[1.0, np.nan, "red"], [2.0, 1.0, "green"]], object),
    (True, True, False),
)
call(
    read,
    {"target": "d"},
    {
        "target": ("b", "d"),
        "task": "classification",
        "features": ("a", "b"),
        "drop": ("colour",),
        "movable": ("colour",),
        "text": ("a",),
        "encoding": EARLIER,
        "seed": 4,
        "test_fraction": 0.4,
        "head": "p,a,colour,d\n",
    },
    {"delimiter": ",", "max_bytes": 10_000, "sep": ";"},
    of=from_csv,
    look=of_data,
)
call(
    read,
    {"target": "d", "head": "", "header": ("p", "q", "r", "d")},
    {"header": ("p", "d", "r", "q")},
    look=of_data,
    name="from_csv without a head",
    of=from_csv,
)
PIPES = "a|b,c;d|y\n" + "".join(f"{i}|{i % 4}|{i % 3}\n" for i in range(12))
call(
    read,
    {"cells": PIPES, "target": "y", "delimiter": "|"},
    look=of_data,
    name="from_csv with a delimiter of its own",
)


def arrays(**settings: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arrays.npz"
        np.savez(path, x=np.arange(60.0).reshape(20, 3) % 7, y=np.arange(20) % 3)
        return from_npz(path, **settings)


call(
    arrays,
    {},
    {"task": "regression", "seed": 4, "test_fraction": 0.4},
    {"max_bytes": 1 << 20},
    of=from_npz,
    look=of_data,
)
for name in ("digits", "diabetes"):
    call(
        load_dataset,
        {"name": name},
        {"seed": 3, "test_fraction": 0.4},
        look=of_data,
        name=f"load_dataset, {name}",
    )
call(split_rows, {"num": 23}, {"seed": 2, "test_fraction": 0.4, "labels": torch.arange(23) % 3})
call(
    class_weights,
    {"y": torch.tensor([0, 0, 1, 2, 2, 2])},
    {"y": torch.tensor([0, 1, 1, 2])},
    {"num_classes": 3},
)
SCALES = Standardize(
    torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0]), torch.tensor(5.0), torch.tensor(20.0)
)
call(
    Standardize.fit,
    {"x": WIDE, "y": AIMS},
    {"y": None},
    look=lambda made: [
        made.to_json(),
        made.transform(WIDE),
        made.inverse(WIDE),
        made.transform_target(AIMS),
        made.inverse_target(AIMS),
        made.raw_eps(0.3),
        made.standardised_eps(0.3),
    ],
)

# --- files ---------------------------------------------------------------------------------------


def kept(**settings: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        save(f"{folder}/m.advbayes", **settings)
        found = load(f"{folder}/m.advbayes")
    shown = {
        field.name: getattr(found, field.name)
        for field in dataclasses.fields(found)
        if field.name not in ("manifest", "versions", "model")
    }
    return [
        plain(shown),
        repr(found.channel),
        type(found.posterior).__name__,
        found.model.prior_scale,
        found.model.likelihood,
        found.model.net,
    ]


with GlobalStream(4):
    BASE_MODEL = BayesianModel(nn.Linear(2, 1), Gaussian(0.5), 0.7)
call(
    kept,
    {"model": BASE_MODEL, "posterior": lambda: MeanField(BASE_MODEL, 0.1, torch.ones(3))},
    {
        "posterior": lambda: LowRank(BASE_MODEL, 2, 0.1, torch.ones(3)),
        "channel": AttackChannel(one_step(Linf(0.2)), 0.3),
        "scaling": SCALES.to_dict(),
        "class_names": ("a", "b"),
        "threat_model": {"ball": L2(0.3), "eps": 0.3},
        "audit": {"level": "B"},
        "extra": {"seed": 5},
        "tensors": {"more": torch.arange(3.0)},
    },
    name="save and load",
    of=save,
)


def answered(seed: Any = None, num: int = 3, **settings: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        save(
            f"{folder}/m",
            model=BASE_MODEL,
            posterior=MeanField(BASE_MODEL, 0.5, torch.ones(3)),
            **settings,
        )
        predict = load(f"{folder}/m").predictor(num, seed=seed)
    return predict(torch.tensor([[1.0, 2.0], [0.5, 3.0]]))


call(
    answered,
    {},
    {"seed": 4, "num": 5, "scaling": SCALES.to_dict(), "extra": {"seed": 6}},
    name="Bundle.predictor",
)
call(thetas_of, {"posterior": MeanField(MODEL, 0.3), "num": 3, "seed": 1}, {"num": 2, "seed": 2})

# --- runs ----------------------------------------------------------------------------------------


def built(**settings: Any) -> list[Any]:
    config = make_config({"data": "diabetes", "num_train": 40, "hidden": [3]} | settings)
    data = prepare(config)
    model, posterior = build_model(config, data)
    channel, objective = build_defense(config, data)
    metrics = clean_metrics(PosteriorPredictive(model, thetas_of(posterior, 3, config.seed)), data)
    return [
        model.likelihood,
        model.prior_scale,
        posterior,
        channel,
        objective,
        [data.mask, data.scale, data.x_train, data.y_test],
        [data.box, data.num_outputs, None if data.scaling is None else data.scaling.to_json()],
        metrics,
    ]


SETTINGS: dict[str, Any] = {
    "data": "digits",
    "num_train": 30,
    "hidden": [4, 2],
    "posterior": "low_rank",
    "prior_scale": 0.3,
    "init_scale": 0.2,
    "noise_scale": 0.4,
    "defense": "pgd",
    "norm": "linf",
    "eps": 0.4,
    "feature_eps": ("age=3",),
    "fixed": ("bmi",),
    "sigma": 0.3,
    "num_theta": 2,
    "num_channel": 3,
    "bound": "importance_weighted",
    "kl_weight": 0.3,
    "seed": 2,
}
call(built, {}, SETTINGS, {"network": "mlp"}, name="a run's parts", brief=True)
call(built, {"posterior": "ensemble"}, {"members": 2}, name="a run's members")
call(built, {"posterior": "low_rank"}, {"rank": 2}, name="a run's rank")
for defense in ("trades", "alp", "nn", "nn50"):
    call(
        built,
        {"defense": defense},
        {"beta": 2.0, "attack_steps": 3} if defense in ("trades", "alp") else {"eps": 0.5},
        name=f"a run's parts, {defense}",
    )
for name in NAMED_CHANNELS:
    call(
        named_channel,
        {"name": name, "ball": BALL, "sigma": 0.2},
        {"regression": True} if name not in ("none", "noise", "consistency") else {},
        {} if name in ("pgd", "trades", "alp") else {"steps": 3},
        look=lambda made: [type(made).__name__, made],
        name=f"named_channel, {name}",
    )
for name in ("mean_field", "point", "ensemble", "low_rank"):
    call(
        named_posterior,
        {"name": name, "model": MODEL},
        {
            "mean_field": {"init_scale": 0.3},
            "point": {},
            "ensemble": {"members": 3, "seed": 2},
            "low_rank": {"rank": 3, "seed": 2, "init_scale": 0.3},
        }[name],
        look=lambda made: [type(made).__name__, made],
        name=f"named_posterior, {name}",
    )
for name in ATTACKS:
    used = {
        "steps": {"pgd", "pgd_plus", "ent", "apgd", "minimum_norm", "strong", "strong_nll"},
        "restarts": {"pgd", "pgd_plus", "ent", "apgd", "minimum_norm", "strong", "strong_nll"},
        "queries": {"square", "random", "strong", "strong_nll"},
    }
    other = {"steps": 21, "restarts": 3, "queries": 7}
    call(
        make_attack,
        {"name": name, "ball": BALL},
        {key: value for key, value in other.items() if name in used[key]},
        {key: value for key, value in other.items() if name not in used[key]},
        name=f"make_attack, {name}",
    )
    if name not in ("minimum_norm", "hard_label"):
        call(
            make_attack,
            {"name": name, "ball": BALL, "task": "regression"},
            name=f"make_attack for numbers, {name}",
        )
call(
    make_ball,
    {"norm": "l2", "eps": 0.3},
    {
        "norm": "linf",
        "box": (0.0, 1.0),
        "mask": torch.tensor([True, False]),
        "scale": torch.tensor([1.0, 2.0]),
    },
    look=lambda made: [repr(made), made],
)
call(
    reach_of,
    {
        "names": ("a", "b=x", "b=y"),
        "scaling": None,
        "eps": 0.5,
        "fixed": (),
        "feature_eps": ("a=2",),
    },
    {
        "scaling": Standardize(torch.zeros(3), torch.tensor([2.0, 1.0, 1.0])),
        "eps": 0.25,
        "fixed": ("b",),
        "feature_eps": (),
    },
)
call(
    schedule,
    {"epochs": None, "lr": None, "decay": None, "x": torch.zeros(1000, 3), "batch_size": 128},
    {"epochs": 3, "lr": 0.5, "decay": 0.5, "x": torch.zeros(1000, 1, 1, 3), "batch_size": 32},
)
call(
    lambda: [
        accepted(key)
        for key in ("lr", "norm", "hidden", "noise_scale", "seed", "compile", "data", "eps")
    ],
    {},
    name="accepted",
)
call(
    lambda: [
        parse(key, text)
        for key, text in (
            ("hidden", "3, 4"),
            ("lr", "0.1"),
            ("epochs", "2"),
            ("drop", "a,b"),
            ("decay", "1e-1"),
            ("seed", "7"),
            ("noise_scale", "0.2"),
        )
    ],
    {},
    name="parse",
)


def shapes(make: Any, **settings: Any) -> Any:
    with GlobalStream(0):
        return [list(p.shape) for p in make(**settings).parameters()]


call(
    lambda **s: shapes(mlp, **s),
    {"num_features": 3},
    {"num_outputs": 2, "hidden": (5,)},
    name="mlp",
)
call(
    lambda **s: shapes(conv_net, **s),
    {},
    {"num_classes": 3, "channels": 2, "size": 16},
    name="conv_net",
)
call(
    lambda **s: shapes(wide_conv_net, **s),
    {},
    {"num_classes": 3, "channels": 2, "size": 16},
    name="wide_conv_net",
)
call(
    lambda **s: shapes(large_kernel_net, **s),
    {},
    {"num_classes": 3, "channels": 2, "size": 16},
    name="large_kernel_net",
)
call(
    lambda **s: shapes(resnet18, **s),
    {"width": 8},
    {"num_classes": 3, "channels": 1, "width": 16},
    name="resnet18",
)
call(
    lambda **s: str(with_group_norm(nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)), **s)),
    {},
    {"num_groups": 2},
    name="with_group_norm",
)
call(
    Ranks,
    {"rank": 1, "size": 3},
    {"rank": 2, "size": 4},
    look=lambda made: [
        [(s.start, s.stop) for s in map(made.rows, (2, 7, 10))],
        [(s.start, s.stop, w) for s, w in map(made.share, (1, 2, 7, 10))],
        made.is_first,
        made.shown(None),
    ],
)

# --- estimators ----------------------------------------------------------------------------------


@lru_cache(None)
def fitted(kind: Any, **settings: Any) -> Any:
    y = TRUE.numpy() if kind is RobustClassifier else AIMS.numpy()
    return kind(epochs=3, random_state=0, hidden=(4,), num_thetas=3, **settings).fit(
        WIDE.numpy(), y
    )


def of_estimator(made: Any) -> list[Any]:
    x, y = WIDE.numpy(), (TRUE if isinstance(made, RobustClassifier) else AIMS).numpy()
    weights = np.linspace(0.0, 1.0, 40)
    found = [
        made.predict(x),
        made.score(x, y),
        made.score(x, y, sample_weight=weights),
        made.ball_,
        made.thetas_,
    ]
    if isinstance(made, RobustClassifier):
        return [*found, made.predict_proba(x), made.classes_]
    edges = [made.predict_interval(x, level) for level in (0.5, 0.9)]
    return [*found, made.predict(x, return_std=True), edges, made.predict_quantiles(x, (0.1, 0.7))]


for kind, loose in ((RobustClassifier, 0.45), (RobustRegressor, 0.3)):
    call(
        lambda kind=kind, **settings: fitted(kind, **settings),
        {"channel": "os", "sigma": 1.0},
        {
            "channel": None,
            "defense": "reactive",
            "posterior": "ensemble",
            "eps": 0.5,
            "units": "raw",
            "norm": "linf",
            "kl_weight": 9.0,
            "abstain": loose,
        },
        look=of_estimator,
        name=kind.__name__,
    )
    scores = ("nll", "accuracy" if kind is RobustClassifier else "rmse")
    call(
        lambda kind=kind, **settings: robust_scorer(**settings)(
            fitted(kind, eps=1.5),
            WIDE.numpy(),
            (TRUE if kind is RobustClassifier else AIMS).numpy(),
        ),
        {"metric": scores[0], "steps": 3},
        {"metric": scores[1], "steps": 1, "eps": 0.4}
        | ({"seed": 4} if kind is RobustRegressor else {}),
        name=f"robust_scorer, {kind.__name__}",
    )


# --- defaults ------------------------------------------------------------------------------------


def by_default(*modules: Any) -> dict[str, Any]:
    """What the public functions and classes take where nothing is given."""
    found: dict[str, Any] = {}
    for module in modules:
        for name in exported(module):
            made = getattr(module, name)
            if inspect.isfunction(made) or (inspect.isclass(made) and is_ours(made)):
                given = inspect.signature(made).parameters.values()
                values = {each.name: each.default for each in given}
                kept = {
                    key: plain(v) for key, v in values.items() if v is not inspect.Parameter.empty
                }
                found |= {name: kept} if kept else {}
    return found


def is_ours(kind: type) -> bool:
    return kind.__module__.startswith("advbayes") and not issubclass(kind, (BaseException, Warning))


def by_flags() -> dict[str, Any]:
    """The same of every command."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {
        command: {each.name: [plain(each.default), each.required] for each in made.params}
        for command, made in commands.items()
    }


PUBLIC = (advbayes, adapters, attacks, auditing, datasets, evaluation, metrics, predictive)
call(lambda: by_default(*PUBLIC, purification, store), {}, name="defaults of functions and classes")
call(by_flags, {}, name="defaults of commands")
call(
    lambda: {
        name: [plain(field.default), sorted(map(str, field.metadata)), field.is_required()]
        for name, field in RunConfig.model_fields.items()
    },
    {},
    name="defaults of a run",
)

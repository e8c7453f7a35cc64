"""Calls of evaluations, audits and other people's models."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from advbayes import (
    L2,
    PGD,
    AttackChannel,
    FreshPredictive,
    Linf,
    MeanField,
    Noise,
    PosteriorPredictive,
    Purifier,
    RandomSearch,
    audit,
    audit_cost,
    audit_records,
    entropy,
    evaluate,
    from_function,
    from_sklearn,
    from_torch,
    load_evaluation,
    nll,
    one_step,
    pgd,
    rescore,
    selective_task,
    squared_error,
    to_art,
    to_autoattack,
    to_foolbox,
)
from advbayes.adapters import PredictorModule, Scaled, with_estimators
from advbayes.auditing import Baseline, Budget, Claim, Support, ThreatModel
from advbayes.evaluation import score, worst
from advbayes.evaluation.inputs import check_units, extent_of, softmaxed_twice
from advbayes.posteriors import Samples
from advbayes.testing import seeded

from .calls import call
from .calls_core import BALL, CLASSES, MODEL, NUMBERS, OTHER, REGRESSION, THETAS, D, X, gaussian

# --- evaluation ----------------------------------------------------------------------------------

WIDE = torch.rand(40, 4, generator=seeded(11), dtype=D)
SAID = CLASSES(WIDE).probs.argmax(1)
TRUE = torch.where(torch.rand(40, generator=seeded(12)) < 0.8, SAID, (SAID + 1) % 3)
AIMS = REGRESSION(WIDE).mean + 0.3 * gaussian(40, seed=13)
DATA = {"classification": (WIDE, TRUE), "regression": (WIDE, AIMS)}
ONE = {"classification": MODEL.at(THETAS[0]), "regression": NUMBERS.at(OTHER[0])}
ALL = {"classification": CLASSES, "regression": REGRESSION}


def of_evaluation(found: Any) -> list[Any]:
    config = {
        key: found.config[key]
        for key in (
            "task",
            "seed",
            "num",
            "rescored",
            "trivial",
            "attacks",
            "losses",
            "iterations",
            "radii",
        )
    }
    curve = found.curve()
    return [
        found.cells.keys().__len__(),
        config,
        found.table().json(),
        curve,
        repr(found),
        *found.cells.values(),
    ]


@lru_cache(None)
def evaluated(task: str, shift: float = 0.0) -> Any:
    x, y = DATA[task]
    attacks = {
        "PGD": pgd(BALL, 4, squared_error if task == "regression" else nll, restarts=2),
        "random": RandomSearch(BALL, 3),
    }
    return evaluate(
        {"MIX": ALL[task], "BL": ONE[task]},
        ((x + shift).clamp(0, 1), y),
        attacks=attacks,
        radii=(0.1, 0.3),
        progress=False,
    )


FRESH = FreshPredictive(MODEL, MeanField(MODEL, 0.4), 2)
for task, data in DATA.items():
    call(
        evaluate,
        {
            "predict": ALL[task],
            "data": data,
            "attacks": {"found": RandomSearch(BALL, 3), "PGD": pgd(BALL, 2)},
            "progress": False,
        },
        {"radii": (0.1, 0.2), "train_y": data[1].flip(0)[:30], "seed": 3}
        | ({"interval_level": 0.5} if task == "regression" else {}),
        {"interval_level": 0.5} if task == "classification" else {},
        look=of_evaluation,
        name=f"evaluate, {task}",
        brief=True,
    )
    call(
        score,
        {"predict": ALL[task], "x": WIDE[:12], "y": data[1][:12], "task": task},
        {"loss": entropy} | ({"interval_level": 0.3} if task == "regression" else {}),
        {"repeats": 3},
        name=f"score, {task}",
    )
    call(
        lambda task: worst(
            [evaluated(task).columns("MIX", "clean"), evaluated(task).columns("MIX", "PGD", 0.3)],
            task,
        ),
        {"task": task},
        name=f"worst, {task}",
    )
    call(
        lambda task: (
            [
                [
                    evaluated(task).estimate(metric, "MIX", attack, 0.3)
                    for attack in ("clean", "PGD", "worst")
                ]
                for metric in (
                    ("balanced_accuracy", "recall", "ece", "selective_accuracy", "aurc", "brier")
                    if task == "classification"
                    else ("crps", "coverage", "aurc")
                )
            ]
            + [
                evaluated(task).risk_coverage("MIX", "PGD", 0.3),
                *list(evaluated(task).records())[::37],
            ]
        ),
        {"task": task},
        name=f"Evaluation.estimate, {task}",
    )
call(
    lambda **more: evaluated("classification").ood_auroc(
        evaluated("classification", 0.4), "MIX", **more
    ),
    {},
    name="ood_auroc, clean",
)
call(
    lambda attack, eps: evaluated("classification").ood_auroc(
        evaluated("classification", 0.4), "MIX", attack, eps
    ),
    {"attack": "PGD", "eps": 0.3},
    {"attack": "clean", "eps": 0.1},
    name="ood_auroc",
)
call(
    evaluate,
    {
        "predict": FRESH,
        "data": DATA["classification"],
        "attacks": {"found": RandomSearch(BALL, 3)},
        "rescore": 5,
        "progress": False,
        "batch_size": 16,
    },
    {"rescore": 4, "seed": 3, "batch_size": 20},
    look=of_evaluation,
    name="evaluate, fresh thetas",
    brief=True,
)


def in_folder(**settings: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        evaluate(
            {"MIX": CLASSES},
            DATA["classification"],
            attacks={"PGD": pgd(BALL, 2)},
            radii=(0.2,),
            out=folder,
            progress=False,
            **settings,
        )
        found, again = load_evaluation(folder), rescore(folder, CLASSES)
        lines = (Path(folder) / "records.jsonl").read_text().splitlines()
        keys = [sorted(json.loads(line)) for line in (lines[0], lines[-1])]
        return [of_evaluation(found), again.table().json(), keys]


call(in_folder, {"batch_size": 16}, {"seed": 3}, name="an evaluation on disk", brief=True)
call(
    selective_task,
    {
        "predict": CLASSES,
        "inside": DATA["classification"],
        "outside": WIDE.flip(1)[:30],
        "ball": BALL,
        "progress": False,
    },
    {
        "radii": (0.1, 0.4),
        "inside_attack": pgd(BALL, 3),
        "outside_attack": RandomSearch(BALL, 2, entropy),
        "coverage": 0.3,
    },
    {"batch_size": 7, "rescore": 3},
)
call(check_units, {"ball": L2(1e-4), "x": WIDE}, {"ball": L2(9.0), "name": "threat"})
call(
    lambda shares: [
        check_units(L2(share * extent_of(L2(1.0), WIDE)), WIDE) is None for share in shares
    ],
    {"shares": (0.0005, 0.0011, 0.99, 1.01)},
    name="check_units, limits",
)
call(
    softmaxed_twice,
    {"log_probs": torch.eye(3).repeat(40, 1).log_softmax(1), "y": torch.arange(3).repeat(40)},
)

# --- auditing ------------------------------------------------------------------------------------

SMALL = Budget(num=16, steps=4, restarts=1, random_points=4, max_steps=8, left_out=("E10", "E11"))


def of_audit(verdict: Any) -> Any:
    return verdict.json()


def near(thetas: torch.Tensor, num: int) -> torch.Tensor:
    """Thetas near those that are evaluated: of a model that has learnt what they have."""
    return thetas.repeat(num // len(thetas), 1) + 0.1 * gaussian(num, thetas.shape[1], seed=15)


CONTROLS = {
    "undefended": ONE["classification"],
    "baseline": MODEL.at(THETAS[1]),
    "siblings": {"sibling": PosteriorPredictive(MODEL, near(THETAS, 3))},
    "fresh": FreshPredictive(MODEL, Samples(near(THETAS, 30)), 4),
    "channel": AttackChannel(one_step(BALL), 0.1),
    "num_seeds": 6,
}
ELSEWHERE = torch.rand(40, 4, generator=seeded(14), dtype=D)
CHEAP = tuple(
    f"E{number}" for number in (0, 1, 2, 3, 9, 12, 13, 16, 17, 18, 20, 21, 22, 25, 26, 28, 30)
)
AUDIT: dict[str, Any] = {
    "predict": CLASSES,
    "data": DATA["classification"],
    "ball": L2(0.15),
    "tier": SMALL,
    "progress": False,
}
call(
    audit,
    AUDIT | {"support": Support(**CONTROLS), "only": CHEAP},
    {
        "ball": L2(0.1),
        "tier": dataclasses.replace(SMALL, steps=3, num=12),
        "attacks": {"one": PGD(L2(0.15), ((nll, 3),))},
        "threat_model": ThreatModel(norm="Linf", units="raw"),
        "support": Support(
            detector="entropy",
            better=True,
            num_seeds=2,
            published=(0.99, 0.5),
            baseline=MODEL.at(THETAS[1]),
        ),
        "only": ("E1", "E3", "E9"),
    },
    look=of_audit,
    brief=True,
)
call(audit, AUDIT | {"support": Support(**CONTROLS)}, look=of_audit, name="audit, in full")
call(
    audit,
    {
        "predict": REGRESSION,
        "data": DATA["regression"],
        "ball": L2(0.15),
        "tier": SMALL,
        "progress": False,
        "support": Support(
            undefended=PosteriorPredictive(NUMBERS, near(OTHER, 3)),
            baseline=NUMBERS.at(OTHER[1]),
            channel=Noise(0.0),
        ),
    },
    look=of_audit,
    name="audit, regression",
)
call(
    audit,
    AUDIT
    | {
        "predict": Purifier(MODEL, Noise(0.15), THETAS, ELSEWHERE),
        "ball": L2(0.1),
        "tier": dataclasses.replace(SMALL, num=10, left_out=("E10", "E11", "E6", "E7")),
    },
    look=of_audit,
    name="audit, purifier",
)


call(
    audit,
    AUDIT
    | {
        "support": Support(fresh=CONTROLS["fresh"]),
        "tier": Budget(num=8, steps=2, restarts=1, random_points=2),
        "only": ("E10", "E14", "E15"),
    },
    look=of_audit,
    name="audit, thetas",
)


TINY = Budget(8, 2, 1, 2, queries=12, blind_queries=20, max_steps=4, max_thetas=20)
call(
    audit,
    AUDIT
    | {
        "predict": lambda: without_gradient,
        "tier": dataclasses.replace(TINY, num=5, left_out=("E10", "E11", "E19")),
    },
    look=of_audit,
    name="audit, black box",
)
call(
    audit,
    AUDIT
    | {
        "predict": FreshPredictive(MODEL, MeanField(MODEL, 0.4), 4),
        "tier": dataclasses.replace(TINY, left_out=("E10", "E11", "E14", "E15", "E19")),
    },
    look=of_audit,
    name="audit, stochastic",
)


def without_gradient(x: torch.Tensor) -> Any:
    return torch.distributions.Categorical(probs=CLASSES(x.detach()).probs.detach())


def shifted(share: float) -> torch.Tensor:
    return (WIDE + share * L2(0.15).ascend(gaussian(40, 4, seed=5), 0.15)).detach()


def claimed(share: float = 0.9, off: int = 0, **more: Any) -> Any:
    points = shifted(share)
    right = CLASSES(points).probs.argmax(1) == TRUE
    right[:off] = ~right[:off]
    return audit_records(
        DATA["classification"],
        {"PGD": points},
        predict=CLASSES,
        ball=L2(0.15),
        correct={"PGD": right.double()},
        worst=right.double(),
        tier=SMALL,
        progress=False,
        **more,
    )


call(
    claimed,
    {},
    {
        "share": 0.3,
        "off": 3,
        "log_prob": lambda: {"PGD": CLASSES(shifted(0.9)).log_prob(TRUE).detach() - 0.01},
    },
    look=of_audit,
    name="audit, somebody's arrays",
    of=audit_records,
    brief=True,
)
call(
    audit_cost,
    {"predict": CLASSES, "data": DATA["classification"], "ball": BALL},
    {
        "tier": "quick",
        "attacks": {"PGD": pgd(BALL, 7)},
        "support": Support(undefended=ONE["classification"]),
    },
    look=lambda cost: [cost.tier, cost.examples, cost.passes, cost.by_check, cost.trained],
)
call(
    Baseline,
    {
        "dataset": "MNIST",
        "norm": "L2",
        "eps": 2.0,
        "clean": 0.99,
        "worst": 0.7,
        "num_examples": 9,
        "architecture": "a",
        "recipe": "b",
        "commit": "c",
    },
    look=lambda made: [
        made.is_of("mnist", L2(2.0)),
        made.is_of("mnist", L2(1.0)),
        made.is_of("wine", L2(2.0)),
    ],
)
call(
    Claim,
    {"x_adv": {"a": WIDE}, "correct": {"a": TRUE == SAID}},
    look=lambda made: made.accuracy("a"),
)

# --- other people's models -----------------------------------------------------------------------


def logits(x: torch.Tensor) -> torch.Tensor:
    return 3 * x[:, :3]


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:, 0], 0.2 + x[:, 1]


for kind, function in {
    "logits": logits,
    "log_probs": lambda x: logits(x).log_softmax(1),
    "probs": lambda x: logits(x).softmax(1),
    "mean_and_scale": both,
}.items():
    call(
        from_function,
        {"function": function, "kind": kind},
        look=lambda made: made(X),
        name=f"from_function, {kind}",
    )
call(
    from_function,
    {"function": lambda x: x[:, 0], "kind": "mean", "scale": 0.3},
    {"scale": 0.4},
    look=lambda made: made(X),
    name="from_function, mean",
)
call(
    from_function,
    {
        "function": lambda x: np.exp(x[:, :3]) / np.exp(x[:, :3]).sum(1, keepdims=True),
        "kind": "probs",
        "numpy": True,
    },
    look=lambda made: made(X),
    name="from_function, arrays",
)
LINEAR = nn.Linear(4, 3, dtype=D).requires_grad_(False)
LINEAR.weight.copy_(gaussian(3, 4, seed=2)), LINEAR.bias.copy_(gaussian(3, seed=3))
call(from_torch, {"net": LINEAR}, look=lambda made: made(X))
call(
    from_torch,
    {"net": LINEAR, "kind": "mean", "scale": 0.4},
    {"scale": 0.5},
    look=lambda made: made(X),
    name="from_torch, mean",
)


def estimators(name: str) -> Any:
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler
    from sklearn.svm import SVC
    from sklearn.tree import DecisionTreeClassifier

    x, y, t = WIDE.numpy(), TRUE.numpy(), AIMS.numpy()
    made = {
        "logistic": (make_pipeline(StandardScaler(), LogisticRegression()), y),
        "two": (make_pipeline(MinMaxScaler(), LogisticRegression()), y == 0),
        "calibrated": (CalibratedClassifierCV(LogisticRegression(), cv=2), y),
        "tree": (DecisionTreeClassifier(max_depth=2, random_state=0), y),
        "machine": (SVC(), y),
        "line": (make_pipeline(RobustScaler(), LinearRegression()), t),
        "process": (GaussianProcessRegressor(alpha=0.1), t),
    }
    estimator, target = made[name]
    return estimator.fit(x, target)


for name in ("logistic", "two", "calibrated", "tree", "machine", "process"):
    call(
        lambda name=name, **more: from_sklearn(estimators(name), **more),
        {},
        look=lambda made: made(X),
        name=f"from_sklearn, {name}",
    )
call(
    lambda **more: from_sklearn(estimators("line"), **more),
    {"data": (WIDE.numpy(), AIMS.numpy())},
    {"scale": 0.7, "data": (WIDE.numpy(), AIMS.numpy() + 1)},
    look=lambda made: made(X),
    name="from_sklearn, line",
    of=from_sklearn,
)
call(
    lambda: with_estimators(
        estimators("logistic"), (WIDE.numpy()[:5], TRUE.numpy()[:5]), TRUE.numpy()[:3]
    )[1:],
    {},
    name="with_estimators",
)
call(
    Scaled,
    {
        "predict": from_function(lambda x: x.flatten(1)[:, :3], "logits"),
        "weight": torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=D),
        "bias": torch.tensor(0.3, dtype=D),
    },
    {"weight": torch.tensor(2.0, dtype=D), "bias": X[0]},
    {"event_shape": (2, 2)},
    look=lambda made: made(X),
)
call(
    PredictorModule,
    {"predict": CLASSES},
    {"predict": REGRESSION},
    {"num_classes": 3, "ndim": 2},
    look=lambda made: made(X),
)
call(
    to_foolbox,
    {"predict": CLASSES},
    {"bounds": (-1.0, 2.0)},
    look=lambda made: [*made.bounds, str(made.device)],
)
call(
    to_autoattack,
    {"predict": CLASSES, "ball": L2(0.4, box=(0, 1)), "num_classes": 5},
    {"ball": Linf(0.3, box=(0, 1)), "num_classes": 3, "version": "plus", "seed": 4},
    look=lambda made: [
        made.norm,
        made.epsilon if hasattr(made, "epsilon") else made.eps,
        made.seed,
        made.attacks_to_run,
        made.apgd_targeted.n_target_classes,
        made.fab.n_target_classes,
        str(made.device),
    ],
)
call(
    to_art,
    {"predict": CLASSES, "input_shape": (4,), "num_classes": 3},
    {"box": (0.0, 2.0), "input_shape": (2, 2), "num_classes": None},
    look=lambda made: [
        type(made).__name__,
        getattr(made, "nb_classes", None),
        made.input_shape,
        None if made.clip_values is None else np.asarray(made.clip_values),
    ],
)

"""The demo: digits, four defenses, their attacks, an audit, a report; about two minutes.

Settings were chosen on a fifth of the training data (`benchmarks/demo_validation.py`), never on the
test set.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from advbayes import store
from advbayes.attacks import entropy_pgd, nll, one_step, pgd, pgd_plus, strong_suite
from advbayes.attacks.balls import L2
from advbayes.channels import Noise
from advbayes.evaluation import Evaluation, evaluate
from advbayes.evaluation.tables import Column, Grid
from advbayes.experiments.catalogue import BASE
from advbayes.report import make_gallery, write_report
from advbayes.report.folders import histories, merged
from advbayes.report.words import sentence
from advbayes.runs import Prepared, Run, Trained, create_run, load_trained, prepare, record, train
from advbayes.runs.config import ConfigError, RunConfig, make_config
from advbayes.runs.named import adaptive_attack
from advbayes.runs.verdict import audit_run
from advbayes.seeds import generator_for
from advbayes.types import Attack, Predictor

EPS = 0.5
RADII = (0.25, 0.5, 0.75)
CONTROL_EPS = 2.0  # at which an attack that deserves the name leaves nothing of an undefended model
PURIFIER_SIGMA = 0.3
SETTINGS: dict[str, dict[str, Any]] = {  # beside those of `BASE`: trained at eps 1, sigma 0.1
    "undefended": {"defense": "none", "epochs": 60, "lr": 0.02},
    "adversarial training": {"defense": "at", "posterior": "point", "epochs": 80, "lr": 0.01},
    "MIX": {"defense": "mix", "kl_weight": 0.1, "init_scale": 0.01, "epochs": 80, "lr": 0.01},
}
PURIFIED = "purified"


def run_demo(
    out: str | os.PathLike[str] = "demo-report",
    *,
    seed: int = 0,
    quick: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train, purify, attack, audit, report; the paths and the main numbers.

    Everything is kept below `out` (one run folder for each trained model), so that a demo that was
    stopped is resumed.
    """
    began, folder = time.monotonic(), Path(out)
    num, num_thetas, steps = (24, 2, 2) if quick else (200, 8, 20)

    def tell(text: str) -> None:
        if not quiet:
            print(f"[{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr, flush=True)

    torch.set_num_threads(1)  # as the runs; small nets gain nothing from more
    data = prepare(make_config({"data": "digits", "seed": seed}))

    trained: dict[str, Trained] = {}
    for name, settings in SETTINGS.items():
        tell(f"training: {name}")
        config = {**BASE, "data": "digits", "seed": seed, **settings}
        config |= {"epochs": 1} if quick else {}
        trained[name] = trained_run(make_config(config), folder / name.replace(" ", "-"))
    predictors: dict[str, Predictor] = {
        name: each.predict(num_thetas) for name, each in trained.items()
    }
    tell("purifying the undefended model")
    noise = Noise(PURIFIER_SIGMA)
    predictors[PURIFIED] = trained["undefended"].purified(data, num_thetas, channel=noise)

    tell(f"attacking {num} test images")
    run = Run(folder / "MIX")
    evaluation = _evaluated(run, predictors, data, num, steps, seed)
    if not quiet:
        _show(evaluation)

    tell("auditing MIX")
    with run.lock():
        verdict = audit_run(
            run,
            trained["MIX"],
            data,
            L2(EPS, box=data.box),
            tier="quick",
            num=num,
            num_thetas=num_thetas,
            undefended=trained["undefended"].point(),
            control_ball=L2(CONTROL_EPS, box=data.box),
            evaluation=run.path / "evaluation" / "demo",
            seed=seed,
        )
    tell(f"audit of MIX, level {verdict.level}: {sentence(verdict)}")

    tell("writing the report")
    runs = {name: Run(each.path) for name, each in trained.items()}
    paths = write_report(
        folder,
        title="Four defenses on handwritten digits",
        evaluation=evaluation,
        audit={"MIX": verdict},
        threat_model={
            "norm": "L2",
            "eps": EPS,
            "units": "raw",
            "box": "[0, 1]",
            "knowledge": "all thetas known",
        },
        run={name: one.described() for name, one in runs.items()},
        history=histories(runs),
        gallery=_gallery(predictors, data, steps, seed),
        class_names=data.dataset.class_names,
        reproduce={
            **record(),
            "commands": [f"advbayes demo --seed {seed}"],
            "versions": store.versions(),
        },
    )
    worst = {name: evaluation.estimate("accuracy", name, "worst", EPS).value for name in predictors}
    return {
        "report": str(paths.html),
        "json": str(paths.json),
        "sha256": paths.digest,
        "eps": EPS,
        "level": verdict.level,
        "clean": {name: evaluation.estimate("accuracy", name, "clean").value for name in worst},
        "worst": worst,
        "weights": {name: one.manifest["weights"] for name, one in runs.items()},
        "seconds": round(time.monotonic() - began, 1),
    }


def trained_run(config: RunConfig, place: Path) -> Trained:
    """A run of this configuration: trained now, resumed, or already finished."""
    if (place / "config.toml").is_file():
        run = Run.open(place)
        if run.config != config:
            wanted = "out: wanted a new folder or one of this demo"
            raise ConfigError(f"{wanted}, got {place} with another configuration")
        with run.lock():
            if run.status != "trained":
                train(run)
    else:
        with create_run(config, place) as run:
            train(run)
    return load_trained(place)


def _evaluated(
    run: Run, predictors: Mapping[str, Predictor], data: Prepared, num: int, steps: int, seed: int
) -> Evaluation:
    """All predictors under the common attacks; the purifier under its own as well."""
    ball = L2(EPS, box=data.box)
    attacks: dict[str, Attack] = {
        "PGD1": one_step(ball, nll),
        "PGD": pgd(ball, steps),
        "PGD+": pgd_plus(ball, max(1, steps // 2)),
        "ENT": entropy_pgd(ball, steps),
        "strong": strong_suite(ball, steps=steps, targets=4, queries=5 * steps),
    }
    plain = {name: each for name, each in predictors.items() if name != PURIFIED}
    adaptive = {"adaptive": adaptive_attack(ball, steps=steps)}
    parts = {
        # the audit scores the first predictor's arrays again
        "demo": ({"MIX": plain["MIX"], **plain}, attacks),
        "demo-purified": ({PURIFIED: predictors[PURIFIED]}, attacks | adaptive),
    }
    rows, place = (data.x_test[:num], data.y_test[:num]), run.path / "evaluation"
    measure = partial(evaluate, radii=RADII, train_y=data.y_train, seed=seed)
    return merged(
        [measure(who, rows, attacks=how, out=place / name) for name, (who, how) in parts.items()]
    )


def _gallery(predictors: Mapping[str, Predictor], data: Prepared, steps: int, seed: int) -> Any:
    """The first test images, each attacked through each predictor."""
    x, y = data.x_test[:6], data.y_test[:6]
    attack = pgd(L2(EPS, box=data.box), steps)
    attacked = {
        name: attack(each, x, y, generator=generator_for(seed, f"gallery/{name}"))
        for name, each in predictors.items()
    }
    return make_gallery(predictors, x, y, {"PGD": attacked}, eps=EPS)


def _show(evaluation: Evaluation) -> None:
    """Accuracy of each predictor untouched, under each attack, and in the worst case."""
    from rich.console import Console

    table = evaluation.table(("accuracy",))
    names, rows = ("clean", *evaluation.attacks), []
    for predictor in (*SETTINGS, PURIFIED):
        of_it = [row for row in table.rows if row.predictor == predictor and row.eps in (0.0, EPS)]
        at = {row.attack: row.values["accuracy"] for row in of_it}
        values = [f"{at[name].value:.3f}" if name in at else "" for name in names]
        worst = at["worst"]
        rows.append((predictor, *values, Column("").cell(worst.value, worst.low, worst.high)))
    head = ("", *names, "worst case")
    title = f"Accuracy on {evaluation.config['num']} test images, L2, eps = {EPS:g}"
    grid = Grid(head, rows, title, right=range(1, len(head)))
    Console(width=None if sys.stdout.isatty() else 120).print(grid.rich())

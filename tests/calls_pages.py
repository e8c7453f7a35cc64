"""Calls of reports, experiments and commands: what is told, and what is drawn."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import tempfile
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from advbayes import L2, one_step
from advbayes.auditing import Finding, ThreatModel
from advbayes.cli import main
from advbayes.cli.describe import (
    column_of,
    legend,
    no_better,
    said_scores,
    said_units,
    units_of,
    why_task,
)
from advbayes.datasets import Standardize
from advbayes.evaluation import evaluate
from advbayes.experiments import units as experiment_units
from advbayes.experiments import views
from advbayes.experiments.catalogue import EXPERIMENTS, Experiment, Row
from advbayes.experiments.defenses import DEFENSES
from advbayes.experiments.running import MANIFEST, RECORDS, packed
from advbayes.experiments.scores import Scores
from advbayes.report import Gallery, View, make_gallery, write_report
from advbayes.report import figures as drawings
from advbayes.report.gather import gather
from advbayes.runs import prepare
from advbayes.runs.config import make_config
from advbayes.store import read_document, write_document
from advbayes.testing import seeded

from .calls import call, plain
from .calls_core import gaussian
from .calls_users import ALL, DATA, evaluated

# --- reports -------------------------------------------------------------------------------------


class Pen:
    """Axes on which nothing is drawn: it remembers what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("xaxis", "yaxis"):
            return self
        return lambda *given, **more: (
            self.asked.append([name, plain(given), plain(more)]) or (0.1, 0.9)
        )


def told(text: str) -> list[Any]:
    """Lines of text as words and numbers, without what differs from place to place."""
    # not the decimals of a number
    text = re.sub(r"(?<![.\d])\b(?=\d*[a-f])[0-9a-f]{12,64}\b", "HASH", text)
    lines = []
    for line in text.splitlines():
        parts = re.split(
            r"((?<![\w.])[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?)", " ".join(line.split())
        )
        if any(parts):
            lines.append(
                [
                    part if i % 2 == 0 else float(part.replace("−", "-").replace(",", ""))
                    for i, part in enumerate(parts)
                ]
            )
    return lines


VERDICT = {
    "level": "C",
    "tier": "standard",
    "summary": {"examples": 24},
    "findings": [
        {"id": "E1", "title": "feasible", "status": "passed", "figures": {"infeasible": 0}},
        {
            "id": "E4",
            "title": "monotone",
            "status": "failed",
            "figures": {"at eps 1": 0.25},
            "advice": "mend",
        },
        {"id": "E25", "title": "statistics", "status": "failed", "mandatory": False},
        {"id": "E9", "title": "gradients", "status": "not run", "advice": "give more"},
    ],
}
RUN = {
    "config": {
        "defense": "mix",
        "data": "wine",
        "network": "mlp",
        "posterior": "mean_field",
        "epochs": 7,
        "eps": 0.3,
        "sigma": 0.1,
        "norm": "l2",
        "seed": 4,
    },
    "manifest": {
        "steps": 1234,
        "skipped": 2,
        "weights": "w",
        "started": {"commit": "c0ffee", "command": ["advbayes", "train"], "machine": "m"},
        "versions": {"torch": "2"},
    },
}


def reported(task: str = "classification", **settings: Any) -> list[Any]:
    pens: dict[str, Pen] = {}

    def drawn(paint: Any, *, name: str, title: str, description: str, size: Any = None) -> str:
        paint(pens.setdefault(name, Pen()))
        return f"<figure>{title}\n{description}</figure>"

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(drawings, "draw", drawn):
        paths = write_report(
            folder, title=settings.pop("title", "A title"), evaluation=evaluated(task), **settings
        )
        page = paths.html.read_text()
        page = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)
        page = re.sub(r'src="data:[^"]*"', "", page)
        shown = re.sub(r"<[^>]+>", "\n", page)
        widths = re.findall(r'style="[^"]*"', page)
        return [
            told(paths.markdown.read_text()),
            told(shown),
            told("\n".join(widths)),
            told(paths.csv.read_text()),
            {name: pen.asked for name, pen in pens.items()},
            json.loads(paths.json.read_text())["gallery"],
        ]


def shown(task: str) -> Gallery:
    x, y = DATA[task]
    attacked = (x + 0.1 * gaussian(40, 4, seed=9)).clamp(0, 1)
    return make_gallery({"MIX": ALL[task]}, x, y, {"PGD": {"MIX": attacked}}, eps=0.3, num=2)


COLUMNS = Standardize(
    torch.tensor([1.0, 0.0, -2.0, 5.0]),
    torch.tensor([2.0, 10.0, 0.5, 1.0]),
    torch.tensor(7.0),
    torch.tensor(20.0),
)
# more steps than a curve has points
HISTORY = {
    "bound": [float("nan") if step == 2 else -500.0 / (3 + step) for step in range(250)],
    "kl": [0.1 * step for step in range(250)],
}
OPTIONS = {
    "title": "Of mine",
    "audit": {"MIX": VERDICT},
    "threat_model": ThreatModel(
        eps=0.1, norm="L2", units="raw", attack_thetas=3, evaluation_thetas=4, steps=5, loss="nll"
    ),
    "run": {"mix": RUN},
    "history": {"MIX": HISTORY},
    "feature_names": ("age", "size", "a|b", "<d>"),
    "scaling": COLUMNS,
    "reproduce": {
        "commands": ["advbayes x"],
        "commit": "abc",
        "machine": "one",
        "versions": {"a": "1"},
    },
    "left_out": ("other",),
}
call(
    reported,
    {"gallery": lambda: shown("classification")},
    OPTIONS | {"gallery": None, "class_names": ("x", "y", "z")},
    name="a report on classes",
    brief=True,
)
call(
    reported,
    {"task": "regression", "gallery": lambda: shown("regression"), "scaling": COLUMNS},
    {"audit": {"MIX": VERDICT | {"level": "B"}}, "scaling": None, "run": {"one": RUN, "two": RUN}},
    name="a report on numbers",
    brief=True,
)


def documented(task: str = "classification", num: int = 200, **sources: Any) -> Any:
    """All that a report is made from, of more examples than its curves have points."""
    x = torch.rand(num, 4, generator=seeded(3), dtype=torch.float64)
    y = torch.randint(3, (num,), generator=seeded(4))
    evaluation = evaluate(
        {"MIX": ALL[task]},
        (x, y if task == "classification" else 0.5 * y.double()),
        attacks={"one": one_step(L2(0.2))},
        radii=(0.1, 0.2),
        train_y=y if task == "classification" else y.double(),
        progress=False,
    )
    return gather(title="A title", evaluation=evaluation, **sources)


for task in ("classification", "regression"):
    call(
        documented,
        {
            "task": task,
            "audit": {"MIX": VERDICT},
            "run": {"mix": RUN},
            "history": {"MIX": HISTORY},
            "scaling": COLUMNS,
        },
        {"num": 150},
        name=f"the document of a report, {task}",
        brief=True,
    )
PICTURES = Gallery(
    torch.rand(2, 1, 3, 3, generator=seeded(1)),
    torch.tensor([0, 1]),
    tuple(
        View(
            "MIX",
            label,
            torch.rand(2, 1, 3, 3, generator=seeded(seed)),
            torch.tensor([[0.25, 0.75, 0.0], [0.6, 0.1, 0.3]]),
            0.3,
        )
        for seed, label in ((1, "untouched"), (2, "PGD"))
    ),
    index=(4, 9),
)
call(
    reported,
    {"gallery": PICTURES, "class_names": ("x", "y", "z")},
    {"threat_model": {"norm": "Linf"}},
    name="a report on pictures",
    brief=True,
)

# --- experiments ---------------------------------------------------------------------------------

ROWS = ("BL", "MIX", "AT", "OS", "OS50")


def folder_of(
    experiment: Experiment, rows: Any, seeds: int, about: dict[str, Any], more: Any = None
) -> Path:
    """Records of as many rows and seeds as an experiment would make, drawn."""
    folder, records = Path(tempfile.mkdtemp()), []
    draw = np.random.default_rng(0)
    cells = [(split, "clean", 0.0) for split in experiment.splits]
    cells += [
        (split, attack, eps)
        for split in experiment.splits
        for attack in experiment.attacks
        for eps in experiment.radii
    ]
    for place, row in enumerate(rows):
        for seed in range(seeds if place else 2 * seeds):
            for split, attack, eps in cells:
                for index in range(6):
                    worse = (attack != "clean") * (1 + eps) / (1 + place)
                    base = {
                        "row": row,
                        "seed": seed,
                        "split": split,
                        "attack": attack,
                        "eps": eps,
                        "index": index,
                    }
                    error = float(draw.exponential() * (1 + worse))
                    records.append(
                        {
                            **base,
                            "correct": float(draw.random() > 0.3 * worse),
                            "log_prob": -error - 0.1,
                            "entropy": float(draw.random()),
                            "squared_error": error,
                        }
                        if more is None
                        else {**base, **more(draw, row)}
                    )
    units = {
        f"{row} / seed {seed}": {"row": row, "seed": seed, **about}
        for row in rows
        for seed in range(seeds)
    }
    (folder / RECORDS).write_bytes(packed(records))
    write_document(
        folder / MANIFEST,
        {
            "units": units,
            "seeds": list(range(seeds)),
            "seconds": 12.3,
            "commits": ["c"],
            "machine": "m",
        },
    )
    return folder


def viewed(
    view: str,
    rows: Any = ROWS,
    seeds: int = 6,
    about: Any = None,
    more: Any = None,
    **settings: Any,
) -> list[Any]:
    pens: list[Any] = []
    experiment = dataclasses.replace(
        Experiment("A title", {}, {row: Row(DEFENSES["BL"]) for row in rows}), **settings
    )
    folder = folder_of(experiment, rows, seeds, about or {}, more)

    @contextlib.contextmanager
    def unsaved(path: Path, size: Any) -> Any:
        pens.append([path.name, size])
        with drawings.canvas(size, drawings.AS_FILE) as figure:
            yield figure

    with mock.patch.object(views, "saved_figure", unsaved):
        text = "\n\n".join(views.VIEWS[view](experiment, Scores(folder), folder))
    return [told(text), pens]


NUMBERS_OF = {"metrics": ("rmse", "nll"), "reported": "energy"}
READ = tuple(
    f"{row}, x {units}" for units in ("standardised", "min-max", "raw") for row in ("BL", "MIX")
)
PAPER = ("PGD1", "PGD", "PGD+", "ENT")
UNIT = {"y_sd": 10.0, "y_range": 37.0}
call(
    viewed,
    {"view": "attack_table", "reported": "mnist"},
    {"metrics": ("rmse",), "radii": (1.0, 2.5), "about": {"overlap": 0.25}, "seeds": 3},
    name="attack_table",
    brief=True,
)
call(
    viewed,
    {"view": "pairs"},
    {"metrics": ("nll",), "about": {"overlap": 0.25}},
    name="pairs",
    brief=True,
)
call(
    viewed,
    {"view": "readings", "rows": READ, "about": UNIT, **NUMBERS_OF},
    {"about": UNIT | {"y_sd": 7.0}, "reported": "california"},
    name="readings",
    brief=True,
)
call(
    viewed,
    {
        "view": "front",
        "rows": ("BL", "constant", "posterior, eps 1", "point, eps 2"),
        "metrics": ("rmse",),
        "attacks": ("strong",),
        "radii": (0.5, 1.0),
        "splits": ("validation", "test"),
    },
    {"radii": (0.5, 2.0)},
    name="front",
    brief=True,
)
call(
    viewed,
    {"view": "curves", "attacks": ("PGD",), "radii": (1.0, 2.0)},
    {"metrics": ("nll",)},
    name="curves",
    brief=True,
)
call(
    viewed,
    {
        "view": "curves",
        "measure": "selective",
        "metrics": ("selective_accuracy",),
        "splits": ("known", "foreign"),
        "attacks": ("both",),
        "radii": (1.0, 2.0),
    },
    {"seeds": 3},
    name="curves, selective",
)
call(
    viewed,
    {"view": "multi_step", "rows": ("BL",), "radii": (0.01, 0.51)},
    {"radii": (0.51, 0.01)},
    name="multi_step",
)
call(
    viewed,
    {
        "view": "effects",
        "rows": (
            "posterior noisy half clean",
            "point noisy half clean",
            "posterior deterministic half clean",
            "posterior noisy all attacked",
        ),
    },
    {"metrics": ("nll",)},
    name="effects",
)
call(viewed, {"view": "certified", "rows": ("A",), "more": lambda: radius_of}, name="certified")
call(viewed, {"view": "times", "rows": ("wine",), "more": lambda: time_of}, name="times")
call(
    viewed,
    {
        "view": "limits",
        "rows": ("wine", "energy"),
        "seeds": 1,
        "radii": (0.5, 1.0),
        "about": {"num_rows": 7},
        "more": lambda: floor_of,
    },
    {"radii": (1.0,)},
    name="limits",
)
call(
    viewed,
    {
        "view": "verdicts",
        "rows": ("A", "B"),
        "seeds": 1,
        "about": {"level": "B", "verdict": "fine"},
        "more": lambda: check_of,
    },
    name="verdicts",
)
call(
    lambda: {
        name: [
            e.title,
            e.settings,
            list(e.rows),
            e.metrics,
            e.attacks,
            e.radii,
            e.steps,
            e.num_test,
            e.seeds,
            e.thetas,
            e.splits,
            e.views,
            [(r.units, dict(r.settings)) for r in e.rows.values()],
        ]
        for name, e in EXPERIMENTS.items()
    },
    {},
    name="the catalogue",
)


PLACES = ("seconds", "processor_seconds", "training_seconds", "commit", "trained_at", "model")
SKETCH = {"data": "diabetes", "epochs": 0.5, "num_train": 60, "hidden": [3]}
IMAGES = {"data": "digits", "epochs": 0.2, "num_train": 60, "hidden": [4]}


def worked(
    measure: str = "attacked",
    row: str = "BL",
    units: str = "standardised",
    seed: int = 1,
    of: Any = SKETCH,
    **settings: Any,
) -> list[Any]:
    """The records of one unit, and its line of the manifest, but for times and places."""
    few = {"attacks": ("PGD",), "steps": 2, "num_test": 10, "radii": (0.5, 1.0), "thetas": 2}
    rows = {"row": Row(DEFENSES[row], units=units)}
    experiment = Experiment("", of, rows, **few | {"measure": measure} | settings)
    asked: list[Any] = []
    verdict = SimpleNamespace(
        findings=[Finding("E1", "feasible", "failed", advice="mend")],
        level="C",
        line=lambda: "a line",
        summary={"examples": 3},
    )

    def audited(predict: Any, rows: Any, **given: Any) -> Any:
        given["support"] = dataclasses.replace(given["support"], evaluation=None)
        asked.append([plain(rows), plain(given)])
        return verdict

    with (
        mock.patch.object(experiment_units, "_images", return_value=ONES),
        mock.patch.object(experiment_units, "audit", audited),
    ):
        records, about = experiment_units.run_unit(experiment_units.Unit(experiment, "row", seed))
    for each in records:
        each.pop("ms", None)
    kept = {key: value for key, value in about.items() if key not in PLACES}
    return [[list(each.items()) for each in records], kept, asked]


ONES = torch.rand(360, 1, 8, 8, generator=seeded(8))
call(
    worked,
    {},
    {
        "row": "least squares",
        "units": "min-max",
        "seed": 2,
        "of": SKETCH | {"num_train": 50},
        "splits": ("validation", "test"),
        "num_test": 12,
        "thetas": 3,
        "steps": 3,
        "radii": (0.5, 2.0),
        "attacks": ("PGD+", "strong"),
    },
    name="a unit of an experiment",
    brief=True,
)
call(
    worked,
    {"row": "onPure", "of": IMAGES, "attacks": ("PGD", "strong"), "num_test": 3},
    name="a unit of an experiment, purified",
    brief=True,
)
for measure in ("selective", "certified", "pictured", "audited"):
    call(
        worked,
        {"measure": measure, "of": IMAGES | {"sigma": 0.3}, "num_test": 5, "draws": 30},
        {"seed": 2} if measure != "audited" else {"of": SKETCH},
        name=f"a unit of an experiment, {measure}",
        brief=True,
    )
call(worked, {"measure": "timed", "steps": 6}, {"steps": 7}, name="a unit of an experiment, timed")


def radius_of(draw: Any, row: str) -> dict[str, Any]:
    return {"correct": bool(draw.random() > 0.3), "radius": float(2.5 * draw.random())}


def time_of(draw: Any, row: str) -> dict[str, Any]:
    kinds = ("standard training", "robust training", "standard inference", "robust inference")
    time_of.turn = (getattr(time_of, "turn", -1) + 1) % 4  # type: ignore[attr-defined]
    return {"what": kinds[time_of.turn], "ms": float(draw.random())}  # type: ignore[attr-defined]


def floor_of(draw: Any, row: str) -> dict[str, Any]:
    floor_of.turn = (getattr(floor_of, "turn", -1) + 1) % 6  # type: ignore[attr-defined]
    turn: int = floor_of.turn  # type: ignore[attr-defined]
    clean = (None, 0.2, 0.4)[turn % 3]
    return {"clean": clean, "radius": (0.5, 1.0)[turn // 3], "floor": float(draw.random())}


def check_of(draw: Any, row: str) -> dict[str, Any]:
    return {
        "check": f"E{int(9 * draw.random())}",
        "status": ("passed", "failed", "not run")[int(3 * draw.random())],
        "mandatory": bool(draw.random() > 0.3),
    }


def channel_of(name: str) -> Any:
    config = make_config({"data": "diabetes", "num_train": 40, "eps": 0.4, "sigma": 0.2})
    make = DEFENSES[name].channel
    assert make is not None
    return make(config, prepare(config))


for name in DEFENSES:
    call(
        lambda name=name: [
            DEFENSES[name].settings,
            DEFENSES[name].purify,
            channel_of(name) if DEFENSES[name].channel else None,
        ],
        {},
        name=f"defense {name}",
    )


def guessed(name: str) -> Any:
    config = make_config({"data": "diabetes", "num_train": 60})
    data = prepare(config)
    reference = DEFENSES[name].reference
    assert reference is not None
    return reference(data, 0)(data.x_test[:9])


for name in ("constant", "least squares", "random forest"):
    call(guessed, {"name": name}, name=f"reference {name}")

# --- commands ------------------------------------------------------------------------------------

call(
    units_of,
    {"eps": 0.5, "scaling": COLUMNS, "names": ("a", "b", "c", "d")},
    {
        "eps": 0.2,
        "scaling": None,
        "names": (),
        "mask": torch.tensor([True, False, True, True]),
        "scale": torch.tensor([1.0, 2.0, 0.5, 1.0]),
    },
    look=lambda found: [found, said_units(found)],
)
for metric in ("rmse", "crps", "coverage", "nll", "accuracy"):
    call(
        column_of,
        {"metric": metric, "scaling": COLUMNS, "targets": ["price"]},
        {"scaling": None, "targets": ["a", "b"]}
        if metric in ("rmse", "crps")
        else {"level": 0.5}
        if metric == "coverage"
        else {},
        look=lambda found: [found.name, found.factor, found.cell(0.5, None, 1234.5, "†")],
        name=f"column_of, {metric}",
    )
ESTIMATE = {"value": 0.8, "low": 0.7, "high": 0.9}
call(
    said_scores,
    {
        "values": {"nll": ESTIMATE, "accuracy": ESTIMATE, "coverage": ESTIMATE, "rmse": ESTIMATE},
        "scaling": COLUMNS,
        "targets": ["price"],
    },
    {"scaling": None, "level": 0.5},
)
call(
    legend,
    {"metrics": ["accuracy", "rmse", "nll", "brier", "coverage", "ece", "balanced_accuracy"]},
)
call(
    lambda: [
        no_better(
            {
                "clean": {
                    "accuracy": {**ESTIMATE, "low": low},
                    "balanced_accuracy": {**ESTIMATE, "low": other},
                },
                "trivial": {"accuracy": 0.75, "balanced_accuracy": 0.5},
            }
        )
        for low, other in ((0.7, 0.4), (0.7, 0.6), (0.8, 0.6))
    ],
    {},
    name="no_better",
)
call(
    lambda: [
        why_task(make_config(each), task)
        for each, task in (
            ({"data": "digits"}, "classification"),
            ({"data": "a.csv", "target": "b"}, "regression"),
            ({"data": "a.csv", "target": "b", "task": "regression"}, "regression"),
            ({"data": "a.npz"}, "classification"),
            ({"data": "a.npz"}, "regression"),
            ({"data": "a.csv", "target": "b"}, "classification"),
        )
    ],
    {},
    name="why_task",
)


OTHERS = r'Commit|Machine|Versions|SHA-256|"(python|torch|safetensors|advbayes|bytes)":'


@lru_cache(None)
def walk(task: str) -> dict[str, Any]:
    """A run by the command line, from its training to its report: what it tells."""
    draw = np.random.default_rng(3)
    x = draw.normal(size=(60, 3)) * [1, 10, 100] + [0, 5, 0]
    goal = x @ [1.0, -0.2, 0.01]
    target = [
        f"{500 + 40 * g:.2f}" if task == "regression" else "up" if g > -1 else "down" for g in goal
    ]
    rows = "".join(
        ",".join(f"{v:.3f}" for v in row) + f",{t}\n" for row, t in zip(x, target, strict=True)
    )
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "t.csv").write_text("a,b,c,y\n" + rows)
        run = str(folder / "run")

        def placed(text: str) -> str:
            """Without what differs from one place or machine to another."""
            text = text.replace(name.replace("_", "\\_"), "DIR").replace(name, "DIR")
            lines = text.splitlines()
            return "\n".join(line for line in lines if not re.search(OTHERS, line))

        def ask(key: str, *words: str, code: int = 0) -> None:
            out = io.StringIO()
            with (
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(io.StringIO()),
                mock.patch.dict("os.environ", {"COLUMNS": "300"}),
                mock.patch("sys.argv", ["advbayes", words[0]]),
            ):
                assert main(list(words)) == code, (words, out.getvalue())
            text = placed(out.getvalue())
            found[key] = told(re.sub(r"about [\d,]+ s;", "about S s;", text))

        ask(
            "train",
            "train",
            "--data",
            str(folder / "t.csv"),
            "--target",
            "y",
            "--epochs",
            "12",
            "--lr",
            "0.03",
            "--eps",
            "0.3",
            "--seed",
            "2",
            "--fixed",
            "b",
            "--out",
            run,
            "--quiet",
        )
        few = ("--num", "9", "--thetas", "3")
        evaluation = (
            "evaluate",
            run,
            *few,
            "--steps",
            "3",
            "--eps",
            "0.2",
            "--eps",
            "0.5",
            "--feature-eps",
            "a=2",
            "--name",
            "one",
        )
        ask("evaluate", *evaluation, "--attack", "pgd", "--attack", "pgd1")
        ask("evaluate for machines", *evaluation, "--attack", "pgd", "--attack", "pgd1", "--json")
        ask(
            "purify",
            "evaluate",
            run,
            *few,
            "--steps",
            "4",
            "--attack",
            "pgd1",
            "--purify",
            "offline",
            "--name",
            "pure",
        )
        ask(
            "predict",
            "predict",
            run,
            str(folder / "t.csv"),
            "--thetas",
            "3",
            *(
                ("--level", "0.5")
                if task == "regression"
                else ("--threshold", "0.3", "--positive", "up")
            ),
        )
        ask(
            "attack",
            "attack",
            run,
            *few,
            "--steps",
            "3",
            "--restarts",
            "2",
            "--attack",
            "pgd_plus",
            "--seed",
            "3",
            "--out",
            str(folder / "a.npz"),
        )
        with np.load(folder / "a.npz") as arrays:
            found["arrays"] = {key: plain(value) for key, value in arrays.items()}
        if task == "classification":
            ask(
                "certify",
                "certify",
                run,
                "--num",
                "5",
                "--draws",
                "30",
                "--sigma",
                "0.4",
                "--alpha",
                "0.05",
                "--seed",
                "2",
            )
            ask(
                "audit",
                "audit",
                run,
                "--tier",
                "quick",
                "--num",
                "12",
                "--thetas",
                "3",
                "--control-eps",
                "0.9",
                "--fixed",
                "a",
                "--undefended",
                run,
            )
        ask("show", "show", run)
        ask("show for machines", "show", run, "--json")
        ask("show the model", "show", f"{run}/model.advbayes", "--json")
        ask("report", "report", run, "--thetas", "3", "--title", "T")
        found["page"] = told(placed((folder / "run" / "report" / "report.md").read_text()))
        found["metrics"] = plain(read_document(folder / "run" / "metrics.json"))
        found["attacks"] = {
            each.name: plain(read_document(each / "config.json")["attacks"])  # type: ignore[index,call-overload]
            for each in sorted((folder / "run" / "evaluation").iterdir())
        }
    return found


for task in ("classification", "regression"):
    call(walk, {"task": task}, name=f"the commands in turn, {task}")

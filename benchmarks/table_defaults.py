"""Clean error of the defaults of `advbayes train` and of the estimators on eight small public
tables, beside ridge or logistic regression, a random forest and a plainly trained mean-field net.

    nice -n 10 python benchmarks/table_defaults.py SPLITS DEFENDED [TABLE ...]

on SPLITS splits, the defended nets on DEFENDED of them; with names of tables (or parts of names)
on these alone, and what is recorded of the others stays.

The splits are of the training rows, and other ones than those that the defaults were chosen on
(seeds 10 to 14). The test rows of every table (a fifth, as `advbayes train` splits) are set aside
first and looked at at the end, by models trained on all training rows: once, and once more after
held-out training rows had shown that repeated rows reward memory. Rows whose features are those of
a row that was trained on are not counted since then. A setting passes on a table if its RMSE is at
most 3 % above, or its accuracy at most 3 % below, the best of the others and the undefended
default. About two processor minutes for each split.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from advbayes.datasets import load_dataset, split_rows
from advbayes.estimators import RobustClassifier, RobustRegressor
from advbayes.runs import record

MAX_ROWS = 1000  # of a table, to train on and to choose on
FIRST_SEED = 20  # of the splits
PLAIN_STEPS = 2000
# one set of defaults, without and with the command line's adversary
TRIED: dict[str, dict[str, Any]] = {"undefended": {}, "mix": {"channel": "mix"}}
RESULTS = Path(__file__).parent / "results"


def tables() -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Name, X and y of the training rows, X and y of the test rows."""
    for name in ("diabetes", "iris", "wine", "breast_cancer"):
        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        train, test = (part.numpy() for part in split_rows(len(x), seed=0))
        x = x.astype(np.float32)
        yield f"{name} (scikit-learn)", x[train], y[train], x[test], y[test]
    for name in ("wine", "wine-white", "energy", "california"):
        data = load_dataset(name, seed=0)
        y_train, y_test = (
            (y if y.ndim == 1 else y[:, 0]).numpy() for y in (data.y_train, data.y_test)
        )
        title = {"wine": "wine quality, red", "wine-white": "wine quality, white"}.get(name, name)
        x_train, x_test = data.x_train[:MAX_ROWS].numpy(), data.x_test.numpy()
        yield title, x_train, y_train[:MAX_ROWS], x_test, y_test


def others(regression: bool, num: int) -> dict[str, Any]:
    """What the defaults are compared with; the net as it was trained before there was a warm-up."""
    plain = {"epochs": PLAIN_STEPS * min(num, 128) / num, "lr": 0.01, "random_state": 0}
    if regression:
        return {
            "linear": make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13))),
            "forest": RandomForestRegressor(200, random_state=0),
            "plain mean field": RobustRegressor(**plain),
        }
    return {
        "linear": make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000)),
        "forest": RandomForestClassifier(200, random_state=0),
        "plain mean field": RobustClassifier(**plain),
    }


def error(predicted: np.ndarray, y: np.ndarray, regression: bool) -> float:
    """RMSE, or the share that is wrong."""
    wrong = (predicted - y) ** 2 if regression else predicted != y
    return float(np.sqrt(wrong.mean()) if regression else wrong.mean())


def ratio(own: float, best: float, regression: bool) -> float:
    """How much worse than the best: of RMSE, or of accuracy."""
    return own / best - 1 if regression else 1 - (1 - own) / (1 - best)


def unseen(x_train: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Which rows of x are none of the training rows."""
    known = {row.tobytes() for row in x_train}
    return np.array([row.tobytes() not in known for row in x])


def errors_of(
    names: list[str], x: np.ndarray, y: np.ndarray, x_new: np.ndarray, y_new: np.ndarray
) -> dict[str, float]:
    """The error of each on the new rows that it was not trained on."""
    new = unseen(x, x_new)
    x_new, y_new = x_new[new], y_new[new]
    regression = y.dtype.kind == "f"
    robust = RobustRegressor if regression else RobustClassifier
    made = others(regression, len(x)) | {
        name: robust(**settings, random_state=0) for name, settings in TRIED.items()
    }
    return {n: error(made[n].fit(x, y).predict(x_new), y_new, regression) for n in names}


def compared(regression: bool, found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Mean error of each, and of each default how much worse it is than the best of the others and
    the undefended default on the same splits."""
    worse = {}
    for name in TRIED:
        num = len(found[name])
        means = {other: float(np.mean(each[:num])) for other, each in found.items()}
        best = min(value for other, value in means.items() if other not in ("mix", name))
        worse[name] = ratio(means[name], best, regression)
    return {"errors": {name: float(np.mean(each)) for name, each in found.items()}, "worse": worse}


def main(splits: int, defended_splits: int, wanted: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = RESULTS / "table_defaults.json"
    for title, x, y, x_test, y_test in tables():
        if wanted and not any(part in title for part in wanted):
            continue
        began, regression = time.process_time(), y.dtype.kind == "f"
        names = [*others(regression, len(x)), *TRIED]
        found: dict[str, list[float]] = {name: [] for name in names}
        repeated: list[float] = []
        for split in range(splits):
            train, held = (part.numpy() for part in split_rows(len(x), seed=FIRST_SEED + split))
            asked = names if split < defended_splits else [n for n in names if n != "mix"]
            repeated.append(1 - unseen(x[train], x[held]).mean())
            for name, value in errors_of(asked, x[train], y[train], x[held], y[held]).items():
                found[name].append(value)
        test = {name: [value] for name, value in errors_of(names, x, y, x_test, y_test).items()}
        row = {
            "metric": "RMSE" if regression else "error rate",
            "splits": splits,
            "defended_splits": defended_splits,
            "repeated": {
                "validation": float(np.mean(repeated)),
                "test": float(1 - unseen(x, x_test).mean()),
            },
            "validation": compared(regression, found),
            "test": compared(regression, test),
            "processor_seconds": round(time.process_time() - began),
            **record(),
        }
        print(title, json.dumps(row), flush=True)
        rows = {**json.loads(path.read_text()), title: row} if path.exists() else {title: row}
        path.write_text(json.dumps(rows, indent=1) + "\n")
        RESULTS.joinpath("table_defaults.md").write_text(markdown(rows))


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    names = ["linear", "forest", "plain mean field", *TRIED]

    def part(which: str) -> str:
        head = ["table", "splits (MIX)", "repeated rows", "metric", *names]
        lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for title, row in rows.items():
            errors, worse = row[which]["errors"], row[which]["worse"]
            cells = [
                f"{errors[n]:.3g}" + (f" ({100 * worse[n]:+.1f} %)" if n in worse else "")
                for n in names
            ]
            num = f"{row['splits']} ({row['defended_splits']})" if which == "validation" else ""
            left_out = f"{100 * row['repeated'][which]:.0f} %"
            lines.append(
                f"| {title} | {num} | {left_out} | {row['metric']} | {' | '.join(cells)} |"
            )
        passed = [
            f"{sum(row[which]['worse'][n] <= 0.03 for row in rows.values())} of {len(rows)}"
            if n in TRIED
            else ""
            for n in names
        ]
        return "\n".join([*lines, f"| **within 3 %** | | | | {' | '.join(passed)} |"])

    return (
        "# Clean error of the defaults\n\n"
        "Linear model, forest, a mean-field net trained without a warm-up, and the defaults: "
        "undefended, and through MIX at the default eps and sigma. In brackets how much worse than "
        "the best of the others and the undefended default, of RMSE or of accuracy. Rows with the "
        "features of a row that was trained on are not counted (repeated rows: their share): on "
        "those a forest remembers the answer. Written by `benchmarks/table_defaults.py`.\n\n"
        "## Held-out training rows\n\nMean over the splits, MIX over the number in brackets and "
        f"compared on the same.\n\n{part('validation')}\n\n"
        f"## Test rows\n\nBy models of all training rows (at most {MAX_ROWS}): looked at once, and "
        "once more when repeated rows were left out.\n\n"
        f"{part('test')}\n"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

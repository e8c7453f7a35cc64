"""What MIX costs and gains on eight small public tables, by the eps that it is trained with.

    nice -n 10 python benchmarks/table_adversary.py SPLITS [TABLE ...]

With names of tables (or parts of names) on these alone, and what is recorded of the others stays.
Clean error and error under attack, on held-out training rows that are not trained on: the test rows
are never looked at. Splits and tables as those of `table_defaults.py`, but the seeds are those that
defaults may be chosen on. About four processor minutes for each split.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from table_defaults import error, tables, unseen

from advbayes.datasets import split_rows
from advbayes.estimators import RobustClassifier, RobustRegressor, robust_scorer
from advbayes.runs import record

FIRST_SEED = 10  # of the splits
MAX_ATTACKED = 60  # rows
STEPS = 10
RADII = (0.1, 0.3)  # of the attacks, in standard deviations
TRAINED: dict[str, dict[str, Any]] = {
    "undefended": {},
    **{f"MIX, eps {eps}": {"channel": "mix", "eps": eps, "sigma": 0.1} for eps in RADII},
}
RESULTS = Path(__file__).parent / "results"


def errors_of(
    settings: dict[str, Any], x: np.ndarray, y: np.ndarray, x_new: np.ndarray, y_new: np.ndarray
) -> dict[str, float]:
    """Clean, and under attack at each radius."""
    regression = y.dtype.kind == "f"
    robust = RobustRegressor if regression else RobustClassifier
    model = robust(**settings, random_state=0).fit(x, y)
    found = {"clean": error(model.predict(x_new), y_new, regression)}
    for eps in RADII:
        scorer = robust_scorer("rmse" if regression else "accuracy", eps=eps, steps=STEPS)
        score = scorer(model, x_new[:MAX_ATTACKED], y_new[:MAX_ATTACKED])
        found[f"eps {eps}"] = -score if regression else 1 - score
    return found


def main(splits: int, wanted: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = RESULTS / "table_adversary.json"
    rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for title, x, y, _, _ in tables():
        if wanted and not any(part in title for part in wanted):
            continue
        began = time.process_time()
        found: dict[str, list[dict[str, float]]] = {name: [] for name in TRAINED}
        for split in range(splits):
            train, held = (part.numpy() for part in split_rows(len(x), seed=FIRST_SEED + split))
            held = held[unseen(x[train], x[held])]
            for name, settings in TRAINED.items():
                each = errors_of(settings, x[train], y[train], x[held], y[held])
                found[name].append(each)
        rows[title] = {
            "metric": "RMSE" if y.dtype.kind == "f" else "error rate",
            "splits": splits,
            "errors": {
                name: {key: float(np.mean([one[key] for one in each])) for key in each[0]}
                for name, each in found.items()
            },
            "processor_seconds": round(time.process_time() - began),
            **record(),
        }
        print(title, json.dumps(rows[title]), flush=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")
        RESULTS.joinpath("table_adversary.md").write_text(markdown(rows))


def markdown(rows: dict[str, Any]) -> str:
    inputs = ["clean", *(f"eps {eps}" for eps in RADII)]
    head = ["table", "splits", "metric", *(f"{name}: {key}" for name in TRAINED for key in inputs)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for title, row in rows.items():
        cells = [f"{row['errors'][name][key]:.3g}" for name in TRAINED for key in inputs]
        lines.append(f"| {title} | {row['splits']} | {row['metric']} | {' | '.join(cells)} |")
    return (
        "# What MIX costs and gains, by the eps that it is trained with\n\n"
        f"Held-out training rows that were not trained on, mean over the splits; attacked: at "
        f"most {MAX_ATTACKED} of them, within L2 eps of the standardised features, by "
        f"`robust_scorer` ({STEPS} steps). Sigma is 0.1. Written by "
        f"`benchmarks/table_adversary.py`.\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

"""An ordinary user's audit of an ordinary run: nothing is given, what is missing is trained and
made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from advbayes import L2
from advbayes.auditing import Budget, others
from advbayes.runs import create_run, load_trained, prepare, train
from advbayes.runs.config import make_config
from advbayes.runs.verdict import audit_run

SMALL = Budget(
    num=50, steps=10, restarts=1, random_points=10, queries=40, max_steps=160, max_thetas=160
)
SETTINGS: dict[str, dict[str, Any]] = {
    "classification": {
        "data": "digits",
        "network": "mlp",
        "hidden": [32],
        "epochs": 6,
        "lr": 0.02,
        "defense": "os",
        "eps": 0.5,
    },
    "regression": {
        "data": "diabetes",
        "hidden": [16],
        "epochs": 30,
        "lr": 0.01,
        "defense": "os",
        "eps": 0.3,
    },
}


@pytest.mark.parametrize("task", SETTINGS)
def test_an_ordinary_audit_of_an_ordinary_run_reaches_b(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "QUERIES", SMALL.queries)
    config = make_config({"batch_size": 64, "sigma": 0.1, **SETTINGS[task]})
    with create_run(config, tmp_path / "run") as run:
        train(run, progress=False)
        trained, data = load_trained(run.path), prepare(config)
        told: list[str] = []
        ball = L2(trained.eps, box=data.box)
        verdict = audit_run(
            run, trained, data, ball, tier=SMALL, num=100, num_thetas=4, tell=told.append
        )
    assert verdict.level == "B", verdict.text()
    assert "trains undefended and baseline first" in told[0]
    assert "may be quoted" in verdict.sentence()
    saved = json.loads((run.path / "audit.json").read_text())
    assert (saved["level"], saved["sentence"]) == ("B", verdict.sentence())
    assert len(run.evaluations) == 1  # made for E27, and found by the next audit

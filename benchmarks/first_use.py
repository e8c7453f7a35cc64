"""A first real use: five defenses on MNIST, the paper's attacks beside the strong suite at L2 eps =
2, and an audit of each.

    python benchmarks/first_use.py RUNS OUT [evaluate | audit | all] [row ...]

RUNS holds the folders `none`, `at`, `mix` and `pgd` made by `advbayes train` (docs/first-use.md has
the commands); OUT gets the records, the tables and the verdicts. An interrupted evaluation goes on
where it stopped.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from advbayes.attacks import Transfer, entropy_pgd, one_step, pgd, pgd_plus, strong_suite
from advbayes.attacks.balls import L2
from advbayes.auditing import Support, ThreatModel, audit
from advbayes.channels import Noise
from advbayes.evaluation import evaluate
from advbayes.predictive import FreshPredictive
from advbayes.purification import Purifier
from advbayes.purification.attacks import Annealed, NearestCentre, StraightThrough
from advbayes.runs import load_trained, prepare, record
from advbayes.runs.folder import Run
from advbayes.seeds import generator_for
from advbayes.store import write_document
from advbayes.types import Attack, Predictor

EPS = 2.0
NUM_TEST, NUM_AUDIT = 1000, 100
NUM_PURIFIER_AUDIT = 50  # a pass through 60,000 reference points takes six times as long
NUM_THETAS = 5
RESTARTS = 2  # of the strong suite; one for the purifier, which has more attacks of its own
SIGMA = 1.5  # of the purifier, chosen on training data held out (docs/purification.md)


def predictors(runs: Path) -> tuple[dict[str, Predictor], dict[str, Any], Any]:
    """The five rows, what was trained, and the data."""
    trained = {name: load_trained(runs / name) for name in ("none", "at", "mix", "pgd")}
    data = prepare(Run.open(runs / "none").config)
    rows: dict[str, Predictor] = {name: each.predict(NUM_THETAS) for name, each in trained.items()}
    base = trained["none"]
    rows["purifier"] = Purifier(
        base.model,
        Noise(SIGMA),
        base.thetas(NUM_THETAS),
        (data.x_train, data.y_train),
        posterior=base.posterior,
    )
    return rows, trained, data


def run(runs: Path, out: Path, stage: str = "all", only: tuple[str, ...] = ()) -> None:
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    rows, trained, data = predictors(runs)
    index = torch.randperm(len(data.x_test), generator=generator_for(0, "first use"))[:NUM_TEST]
    x, y = data.x_test[index], data.y_test[index]
    ball = L2(EPS, box=(0.0, 1.0))
    paper = {
        "PGD1": one_step(ball),
        "PGD": pgd(ball, 50),
        "PGD+": pgd_plus(ball),
        "ENT": entropy_pgd(ball),
    }
    for name, predict in rows.items():
        if only and name not in only:
            continue
        began = time.perf_counter()
        if stage in ("evaluate", "all"):
            own: tuple[Attack, ...] = ()
            restarts = RESTARTS
            if isinstance(predict, Purifier):
                straight = Transfer(pgd(ball, 50), (StraightThrough(predict), rows["none"]))
                own, restarts = (Annealed(ball), NearestCentre(ball), straight), 1
            strong = strong_suite(
                ball, steps=50, restarts=restarts, targets=3, queries=100, others=own
            )
            result = evaluate(
                predict,
                (x, y),
                attacks={**paper, "strong": strong},
                train_y=data.y_train,
                out=out / "records" / name,
            )
            table = result.table()
            seconds = round(time.perf_counter() - began)
            write_document(
                out / f"{name}.json",
                {"table": table.json(), **record(), "seconds": seconds, "seed": 0},
            )
            (out / f"{name}.md").write_text(f"{table.markdown()}\n")
            print(name, seconds, "s", flush=True)
        if stage in ("audit", "all"):
            one = trained.get(name, trained["none"])
            generator = generator_for(0, "fresh")
            if isinstance(predict, Purifier):
                fresh: Predictor = predict.with_thetas(NUM_THETAS, generator=generator)
                num = NUM_PURIFIER_AUDIT
            else:
                num = NUM_AUDIT
                fresh = FreshPredictive(one.model, one.posterior, NUM_THETAS, generator=generator)
            recorded = out / "records" / name
            verdict = audit(
                predict,
                (x[:num], y[:num]),
                ball=ball,
                tier="standard",
                threat_model=ThreatModel(units="raw"),
                support=Support(
                    undefended=trained["none"].point(),
                    siblings={
                        other: row for other, row in rows.items() if other not in (name, "purifier")
                    },
                    dataset="mnist",
                    fresh=fresh,
                    evaluation=recorded if recorded.exists() else None,
                    unpurified=rows["none"] if name == "purifier" else None,
                    channel=one.channel,
                    train_y=data.y_train,
                ),
            )
            seconds = round(time.perf_counter() - began)
            write_document(
                out / f"{name}-audit.json",
                {"verdict": verdict.json(), **record(), "seconds": seconds, "seed": 0},
            )
            (out / f"{name}-audit.txt").write_text(f"{verdict.text()}\n")
            print(name, verdict.line(), seconds, "s", flush=True)


if __name__ == "__main__":
    run(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        sys.argv[3] if len(sys.argv) > 3 else "all",
        tuple(sys.argv[4:]),
    )

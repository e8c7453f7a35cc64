"""The audit of a run, with everything that the run can supply; what is missing is made first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from advbayes import store
from advbayes.attacks.balls import Ball
from advbayes.auditing import Budget, Support, ThreatModel, Verdict, audit, audit_cost
from advbayes.distributed import ranks
from advbayes.evaluation import evaluate
from advbayes.evaluation.files import fingerprint
from advbayes.predictive import FreshPredictive
from advbayes.runs.building import Prepared
from advbayes.runs.folder import REACH, Run, flags_of
from advbayes.runs.named import make_attack
from advbayes.runs.trained import Trained
from advbayes.types import Predictor


def audit_run(
    run: Run,
    trained: Trained,
    data: Prepared,
    ball: Ball,
    *,
    tier: str | Budget = "standard",
    num: int | None = None,
    num_thetas: int = 20,
    undefended: Predictor | None = None,
    control_ball: Ball | None = None,
    evaluation: Path | None = None,
    reach: Sequence[str] = (),
    seed: int = 0,
    tell: Callable[[str], None] | None = None,
) -> Verdict:
    """Audit a trained run within a ball and write `audit.json`; the caller holds the folder's lock.

    `evaluation` is the folder whose arrays are checked; absent, the run's last one in this ball, or
    one that is made here. `reach` are the flags of the command line that say which features the
    ball leaves alone and by how much it moves others, kept with that evaluation. Controls that are
    absent are trained on the run's own data. The tier "quick" makes and trains nothing. `tell`
    hears the cost before anything starts.
    """
    scaling = trained.scaling
    threat = ThreatModel.in_units_of(None if scaling is None else scaling.std)
    predict, rows = trained.predict(num_thetas), (data.x_test[:num], data.y_test[:num])
    quick = tier == "quick"
    support = Support(
        undefended=undefended,
        control_ball=control_ball,
        dataset=run.config.data,
        fresh=FreshPredictive(trained.model, trained.posterior, num_thetas),
        channel=trained.channel,
        training=None if quick else (data.x_train, data.y_train),
        train_y=data.y_train,
    )
    if tell is not None:
        tell(str(audit_cost(predict, rows, ball=ball, tier=tier, support=support)))
    saved = evaluation or _saved(run, predict, rows[0], ball, reach)
    if saved is None and not quick:
        name = f"audit-{type(ball).__name__}-{ball.eps:g}-{len(rows[0])}-{num_thetas}"
        if reach:
            name += f"-{hashlib.sha256(repr(list(reach)).encode()).hexdigest()[:8]}"
        saved = run.path / "evaluation" / name
        # named as `advbayes evaluate` does, so that a report has one row for one predictor
        evaluate(
            {trained.defense: predict},
            rows,
            attacks={"pgd": make_attack("pgd", ball, task=trained.task)},
            radii=(ball.eps,),
            train_y=data.y_train,
            seed=seed,
            out=saved,
        )
        if ranks().is_first:
            options = {"eps": ball.eps, "norm": type(ball).__name__.lower(), "num": len(rows[0])}
            options |= {"thetas": num_thetas, "seed": seed}
            words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
            command = ["advbayes", "audit", str(run.path), *words, *reach]
            store.write_document(saved / "command.json", command)
    verdict = audit(
        predict,
        rows,
        ball=ball,
        tier=tier,
        threat_model=threat,
        support=replace(support, evaluation=saved),
        seed=seed,
    )
    raw = {} if scaling is None else {"raw_eps": scaling.raw_eps(ball.eps).tolist()}
    described = {"norm": type(ball).__name__, "eps": ball.eps, "units": threat.units, **raw}
    if ranks().is_first:
        store.write_document(run.path / "audit.json", {**verdict.json(), "threat_model": described})
    return verdict


def _saved(
    run: Run, predict: Predictor, x: Tensor, ball: Ball, reach: Sequence[str]
) -> Path | None:
    """The last evaluation by this predictor in this ball, of at least as many examples."""
    ours = fingerprint(predict, x[:4])
    flags = sorted(zip(reach[::2], reach[1::2], strict=True))

    def fits(path: Path) -> bool:
        config: Any = store.read_document(path / "config.json")
        near = any(
            len(marks) == len(ours)
            and all(abs(a - b) <= 1e-4 * (1 + abs(b)) for a, b in zip(marks, ours, strict=True))
            for marks in config.get("predictors", {}).values()  # trivial ones among them
        )
        radii = config.get("radii") or []
        asked = sorted(pair for pair in flags_of(path) if pair[0] in REACH)
        if not near or ball.eps not in radii or asked != flags or config.get("num", 0) < len(x):
            return False
        widest = repr(replace(ball, eps=max(radii)))  # as its attacks name it, reach and all
        return any(widest in text for text in config.get("attacks", {}).values())

    return next(filter(fits, reversed(run.evaluations)), None)

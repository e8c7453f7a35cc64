"""The audit of a run, with all that a run can give to the checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from advbayes import store
from advbayes.auditing import Support, ThreatModel, Verdict, audit
from advbayes.balls import Ball
from advbayes.predictive import FreshPredictive
from advbayes.runs.building import Prepared
from advbayes.runs.folder import Run
from advbayes.runs.trained import Trained
from advbayes.types import Predictor


def audit_run(
    run: Run,
    trained: Trained,
    data: Prepared,
    ball: Ball,
    *,
    tier: str = "standard",
    num: int | None = None,
    num_thetas: int = 20,
    undefended: Predictor | None = None,
    control_ball: Ball | None = None,
    evaluation: Path | None = None,
    seed: int = 0,
) -> Verdict:
    """Audit a trained run within a ball and write `audit.json`; the caller holds the folder's lock.

    `evaluation` is the folder whose arrays are checked; absent, the run's last one at this radius.
    """
    scaling = trained.scaling
    units: dict[str, Any] = {"units": "raw"} if scaling is None else {"units": "standardised", "scale": scaling.std}
    verdict = audit(
        trained.predict(num_thetas),
        (data.x_test[:num], data.y_test[:num]),
        ball=ball,
        tier=tier,
        threat_model=ThreatModel(**units),
        support=Support(
            evaluation=evaluation or _matching(run, ball),
            undefended=undefended,
            control_ball=control_ball,
            dataset=run.config.data,
            fresh=FreshPredictive(trained.model, trained.posterior, num_thetas),
            channel=trained.channel,
            training=None if tier == "quick" else (data.x_train, data.y_train),
            train_y=data.y_train,
        ),
        seed=seed,
    )
    raw = {} if scaling is None else {"raw_eps": scaling.raw_eps(ball.eps).tolist()}
    said = {"norm": type(ball).__name__, "eps": ball.eps, "units": units["units"], **raw}
    store.write_document(run.path / "audit.json", {**verdict.json(), "threat_model": said})
    return verdict


def _matching(run: Run, ball: Ball) -> Path | None:
    """The last evaluation of the run at this radius, for the checks that look at saved arrays."""
    found = [path for path in run.evaluations if ball.eps in _radii(path)]
    return found[-1] if found else None


def _radii(path: Path) -> list[float]:
    document = store.read_document(path / "config.json")
    radii = document.get("radii") if isinstance(document, dict) else None
    return [float(eps) for eps in radii if isinstance(eps, (int, float))] if isinstance(radii, list) else []

"""Checks of a purifier: adaptive attacks on it (E23), and how many reference points speak for each answer (E24)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from advbayes.attacks import mode, succeeded
from advbayes.auditing.case import Case, finding, judged, not_applicable, not_run
from advbayes.auditing.findings import Finding
from advbayes.balls import _Ball as Ball
from advbayes.evaluation.scoring import worst
from advbayes.types import Predictor

KINDS = ("exact", "straight_through", "transfer", "nearest_centre")


@dataclass(frozen=True, eq=False)
class StraightThrough:
    """The purifier's answer with the unpurified model's gradient: what an attacker does when the purifier's own vanishes."""

    predict: Predictor
    unpurified: Predictor

    def __call__(self, x: Tensor) -> Distribution:
        with torch.no_grad():
            answer: Any = self.predict(x)
        plain: Any = self.unpurified(x)
        return Categorical(logits=plain.logits + (answer.logits - plain.logits).detach(), validate_args=False)


@dataclass(frozen=True, eq=False)
class NearestCentre:
    """Toward the nearest reference inputs that the predictor takes for another class, as far as the ball allows.

    >>> from advbayes import L2
    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> NearestCentre(L2(2.0), torch.tensor([[-1.0], [5.0]]), 1)(predict, torch.tensor([[1.0]]), torch.tensor([0]))
    tensor([[-1.]])
    """

    ball: Ball
    reference: Tensor  # (N, *event)
    num: int = 8

    def __call__(
        self, predict: Predictor, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        with torch.no_grad():
            y = mode(predict(x)) if y is None else y
            classes = mode(predict(self.reference))
            distance = torch.cdist(x.flatten(1), self.reference.flatten(1))
            distance = distance.masked_fill(classes.unsqueeze(0) == y.unsqueeze(1), torch.inf)
            best, done = x.clone(), succeeded(predict(x), y)
            for column in distance.argsort(1)[:, : self.num].T:
                point = self.ball.project(self.reference[column], x)
                broken = succeeded(predict(point), y) & ~done & torch.isfinite(distance.gather(1, column.unsqueeze(1))[:, 0])
                best = torch.where(broken.view(-1, *[1] * (x.ndim - 1)), point, best)
                done |= broken
        return best


def adaptive_attacks(case: Case) -> Finding:
    """E23: exact and straight-through gradients, transfer from the unpurified model, and the nearest-centre attack."""
    if not case.is_purifier:
        return not_applicable("E23", "the predictor does not purify")
    if case.task == "regression":
        return not_run("E23", "the purifier's attacks are made for classes; give them as `purifier_attacks`")
    unpurified: Predictor | None = case.unpurified or getattr(case.predict, "base", None)
    figures: dict[str, Any] = {}
    results = {}
    if case.attacks:
        for kind, through in (
            ("exact", case.predict),
            ("straight_through", None if unpurified is None else StraightThrough(case.predict, unpurified)),
            ("transfer", unpurified),
        ):
            if through is not None:
                parts = [
                    case.scored(case.attacked(attack, f"{kind} {name}", through=through), f"{kind} {name}")
                    for name, attack in case.attacks.items()
                ]
                results[kind] = worst(parts, case.task)
    given = dict(case.purifier_attacks)
    if case.reference is not None and "nearest_centre" not in given:
        given["nearest_centre"] = NearestCentre(case.ball, case.reference)
    for kind, attack in given.items():
        results[kind] = case.scored(case.attacked(attack, kind, through=case.predict), kind)
    for kind, columns in results.items():
        case.join(f"purifier {kind}", columns)
        figures[kind] = case.value(columns)
    if case.claim is not None:  # the table is theirs: what they did not run is missing, whatever it gives here
        absent = [kind for kind in KINDS if kind not in case.claim.purifier_attacks]
        figures["claimed attacks leave"] = case.value(case.gradient())
        return judged("E23", bool(absent), f"add {', '.join(absent)}", **figures)
    absent = [kind for kind in KINDS if kind not in results]
    if absent:
        return not_run("E23", f"give what {', '.join(absent)} needs: the unpurified model, the reference inputs, or the attacks")
    return finding("E23", "passed", **figures)


def effective_sample_size(case: Case) -> Finding:
    """E24: at most 5 % of the queries rest on fewer than two reference points, and underflow is flagged."""
    if not case.is_purifier:
        return not_applicable("E24", "the predictor does not purify")
    diagnose = getattr(case.predict, "diagnose", None)
    if diagnose is None:
        return not_run("E24", "the purifier does not report its weights (a method `diagnose`)")
    few, silent, total = 0, 0, 0
    for points in (case.x, *case.arrays().values()):
        seen = diagnose(points)
        few += int((seen.ess_reference < 2).sum())
        silent += int((~torch.isfinite(seen.log_evidence) & ~seen.out_of_support).sum())
        total += len(points)
    advice = "widen the channel's noise: the answer is that of the nearest reference point" if not silent else "flag underflow"
    return judged("E24", few > 0.05 * total or silent > 0, advice, few=few / total, underflow_not_flagged=silent)

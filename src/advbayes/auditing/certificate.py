"""Certified radii against the numbers they are to back: what level A rests on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes.attacks.balls import L2, Ball
from advbayes.auditing.case import Case
from advbayes.auditing.findings import Figure, Finding
from advbayes.checks import InputError, InputTypeError, finite
from advbayes.evaluation.inputs import Task
from advbayes.evaluation.measuring import batches
from advbayes.metrics.intervals import clopper_pearson
from advbayes.predictive import Certificates, Smoothed, certify
from advbayes.seeds import generator_for
from advbayes.types import Predictor

ATTACK_CHECKS = ("E1", "E2", "E3", "E4", "E5", "E6", "E7", "E8", "E9", "E11", "E12", "E28", "E29")
# a certificate says nothing for a table that fails one of these
MUST_PASS = ("E1", "E2", "E17", "E28", "E29")
# of noise when certifying again; examples certified again however many draws each takes
DRAWS, FEWEST = (320_000, 16)
SURE = 0.01  # the largest alpha of a certificate
CONFIDENCE, EXCHANGES = 0.001, 9999  # of a contradiction; permutations


def radii_of(certified: Any, num: int, task: Task) -> Certificates | Tensor:
    """Certificates, or radii alone (float64), one for each example of the data.

    >>> radii_of(torch.tensor([0.5, float("nan")]), 2, "classification")
    Traceback (most recent call last):
    ...
    advbayes.checks.InputError: certified must be finite, got 1 NaN and 0 infinite values in a torch.float64 tensor of shape (2,) on cpu
    """  # noqa: E501
    if task != "classification":
        raise InputError(
            f"certified radii say that a class does not change: they have no meaning in {task}"
        )
    match certified:
        case Certificates():
            radii = certified.radii
        case Tensor() | np.ndarray():
            radii = torch.as_tensor(certified)
        case _:
            raise InputTypeError(
                "certified must be what certify(...) gives, or a tensor or an array of radii",
                got=certified,
            )
    if radii.dtype == torch.bool or radii.is_complex():
        raise InputTypeError("certified must hold radii", got=radii)
    if tuple(radii.shape) not in ((num,), (num, 1)):
        raise InputError(
            f"certified must hold one radius for each of the {num} examples of x", got=radii
        )
    radii = finite("certified", radii.detach().cpu().double().reshape(num))
    if bool((radii < 0).any()):
        raise InputError(
            f"certified must hold radii >= 0, got a smallest one of {float(radii.min()):g}"
        )
    return replace(certified, radii=radii) if isinstance(certified, Certificates) else radii


def cut(certified: Certificates | Tensor | None, rows: Tensor) -> Certificates | Tensor | None:
    """Those of some examples."""
    if isinstance(certified, Certificates):
        there = rows.to(certified.classes.device)
        classes, lower = certified.classes[there], certified.lower[there]
        return replace(certified, radii=certified.radii[rows], classes=classes, lower=lower)
    return None if certified is None else certified[rows]


def certificate(
    case: Case, findings: tuple[Finding, ...], only: object
) -> tuple[bool, dict[str, Figure]]:
    """Whether the audit confirms the certificate, and the figures, certified accuracy first."""
    match case.certified:
        case None:
            return False, {}
        case Certificates(radii=radii, classes=classes):
            right, wanted = classes.cpu() == case.y.cpu(), farthest_within(case.ball, case.x[0])
        case radii:
            right, wanted = case.clean["correct"] > 0.5, float(case.ball.eps)
    share = float(((radii >= wanted) & right).double().mean())
    figures: dict[str, Figure] = {
        "certified accuracy": share,
        "certified at eps": float(case.ball.eps),
    }
    match case.certified, case.predict:
        case Certificates() as claimed, Smoothed() as smoothed if only is None:
            why = _unsettled(case, smoothed, claimed, findings, share)
            if not why:
                again = certified_again(case, smoothed, claimed)
                broken = broken_at_their_radius(case, smoothed, claimed)
                figures |= {
                    "certified again": again.num,
                    "above what was certified again": again.above,
                    "broken at their radius": broken,
                }
                contradicted = f"{broken} examples were broken within their own radius"
                why = again.why or beyond_votes(case, smoothed, claimed)
                why = why or contradicted * bool(broken)
        case _:
            why = (
                "no level A under `only`"
                if only is not None
                else "to certify a sample again the audit needs the Smoothed predictor and the "
                "Certificates themselves, not radii alone"
            )
    return not why, {**figures, "certificate": why or "confirmed"}


def farthest_within(ball: Ball, x: Tensor) -> float:
    """The largest L2 distance, in the units of x, of a point in the ball around it: what an L2
    radius must cover.

    >>> from advbayes import Linf
    >>> farthest_within(L2(0.5), torch.zeros(4)), farthest_within(Linf(0.5), torch.zeros(4))
    (0.5, 1.0)
    """
    moves = (torch.ones_like(x) * ball.units(x)).double()
    moves = moves if ball.mask is None else moves * ball.mask.to(x.device)
    return float(ball.eps) * float(moves.max() if isinstance(ball, L2) else moves.norm())


def _unsettled(
    case: Case,
    smoothed: Smoothed,
    claimed: Certificates,
    findings: tuple[Finding, ...],
    share: float,
) -> str:
    """Why the certificate cannot be confirmed, before anything is spent on it."""
    status = {finding.id: finding.status for finding in findings}
    if type(case.ball) is not L2 or case.ball.scale is not None:
        return "the radii are L2 radii in the units of x, the ball is not"
    if claimed.sigma != smoothed.sigma:
        return f"it is for sigma = {claimed.sigma:g}, the predictor has {smoothed.sigma:g}"
    if claimed.alpha > SURE:
        return f"each radius may be wrong with probability {claimed.alpha:g}, more than {SURE:g}"
    left_out = [id for id in ATTACK_CHECKS if status.get(id) == "not run"]
    failed = [id for id in MUST_PASS if status.get(id) == "failed"]
    if left_out or failed:
        return f"{', '.join(left_out or failed)} {'did not run' if left_out else 'failed'}"
    if case.claim is not None and case.claim.worst is not None:
        said = float(case.claim.worst.double().mean())
        if said > share + 1e-9:
            return f"it proves {share:.4g}, but {said:.4g} is claimed"
    return "" if share > 0 else "it certifies nothing at eps"


@dataclass(frozen=True)
class Again:
    """A sample certified again: how many, how many claimed radii are above the new ones, and what
    is wrong with that."""

    num: int
    above: int
    why: str = ""


def certified_again(case: Case, smoothed: Smoothed, claimed: Certificates) -> Again:
    """Some examples again: old and new radii of an honest certificate are exchangeable.

    It falls if one is larger than n votes can certify at all, if one is beyond what the new votes
    allow (Clopper and Pearson's upper bound, 0.1 % shared among the examples), or if the claimed
    radii are larger on average, weighed by how well they are known (a permutation test that
    exchanges old and new, 0.1 %).
    """
    order = torch.randperm(len(case.x), generator=generator_for(case.seed, "audit/certified again"))
    most_votes = max(DRAWS // claimed.n, FEWEST)
    # abstained or not: a choice by radius would favour the lucky
    rows = order[: min(case.budget.certified_again, most_votes)]
    x = case.x[rows]
    generator = generator_for(case.seed, "audit/certify", device=x.device)
    new = certify(smoothed, x, n0=claimed.n0, n=claimed.n, alpha=claimed.alpha, generator=generator)
    votes = smoothed.votes(x, claimed.n, generator=generator)
    said, classes = claimed.radii[rows], claimed.classes[rows].clamp_min(0)  # abstained: radius 0
    every = clopper_pearson(claimed.n, claimed.n, level=1 - claimed.alpha, side="lower")[0]
    cap = float(_radii(smoothed, every))
    most = _allowed(smoothed, votes, classes, claimed.n)
    impossible = int(((said > 0) & (said > most.clamp(max=cap) + 1e-9)).sum())
    excess = said - new.radii.cpu()
    # the same whichever of the two is the old one
    middle = (said + new.radii.cpu()) / (2 * smoothed.sigma)
    # of a radius, to a factor
    noise = torch.special.ndtr(middle) * torch.special.ndtr(-middle) * middle.square().exp()
    weighed = excess * middle / noise  # most for the examples whose radius is known best
    coins = generator_for(case.seed, "audit/exchange")
    signs = torch.randint(2, (EXCHANGES, len(rows)), generator=coins).double() * 2 - 1
    p = (1 + int((signs @ weighed >= weighed.sum() - 1e-12).sum())) / (1 + EXCHANGES)
    above, why = int((excess > 1e-9).sum()), ""
    if impossible:
        why = f"{impossible} radii are larger than the votes allow"
    elif p <= CONFIDENCE:
        why = f"{above} of {len(rows)} radii are larger than when certified again (p = {p:.2g})"
    return Again(len(rows), above, why)


def beyond_votes(case: Case, smoothed: Smoothed, claimed: Certificates) -> str:
    """What is wrong with any of the radii, those that were not certified again included: larger
    than the bound of its own vote says, or than a vote of fewer draws allows (0.1 % shared among
    the examples)."""
    own = _radii(smoothed, claimed.lower)
    if unlike := int(((claimed.radii > 0) & (claimed.radii > own + 1e-6)).sum()):
        return f"{unlike} radii are larger than the bounds of their own votes say"
    draws = max(1, min(claimed.n, DRAWS // len(case.x)))
    generator = generator_for(case.seed, "audit/votes of all", device=case.x.device)
    parts = torch.split(case.x, case.budget.batch_size)
    votes = torch.cat([smoothed.votes(x, draws, generator=generator) for x in parts])
    over = claimed.radii > _allowed(smoothed, votes, claimed.classes.clamp_min(0), draws) + 1e-9
    impossible = int(((claimed.radii > 0) & over).sum())
    return f"{impossible} radii are larger than a vote of {draws} allows" * bool(impossible)


def _upper(votes: int, num: int, shared: int) -> float:
    """Clopper and Pearson's upper bound of a vote, where `shared` examples share the 0.1 %."""
    return clopper_pearson(votes, num, level=1 - CONFIDENCE / max(1, shared), side="upper")[1]


def _allowed(
    smoothed: Smoothed,
    votes: Tensor,  # (B, C), of `num` each
    classes: Tensor,  # (B,)
    num: int,
) -> Tensor:  # (B,)
    """The largest radii that the votes for the classes allow."""
    counts = votes.gather(1, classes.to(votes.device).unsqueeze(1)).squeeze(1).tolist()
    return _radii(smoothed, [_upper(count, num, len(votes)) for count in counts])


def _radii(smoothed: Smoothed, bounds: Any) -> Tensor:
    """sigma Phi^-1(p) for bounds p of a class's probability under the noise."""
    p = torch.as_tensor(bounds, dtype=torch.float64, device="cpu").clamp(0, 1)
    radii: Tensor = smoothed.sigma * torch.special.ndtri(p)
    return radii


@dataclass(frozen=True, eq=False)
class AtTheirRadius:
    """Examples in units of their own radius: a row is (change / radius, x, radius), flat, and the
    change alone is attacked."""

    predict: Predictor
    shape: tuple[int, ...]

    def __call__(self, rows: Tensor) -> Distribution:
        return self.predict(self.points(rows))

    def points(self, rows: Tensor) -> Tensor:
        """The inputs that the rows stand for."""
        size = (rows.shape[1] - 1) // 2
        return (rows[:, size:-1] + rows[:, -1:] * rows[:, :size]).view(-1, *self.shape)


def broken_at_their_radius(case: Case, smoothed: Smoothed, claimed: Certificates) -> int:
    """How many examples an attack within their own certified radius breaks.

    The certificate is about the vote of infinitely many draws: a point counts as broken only if its
    vote for the certified class is below one half beyond doubt (Clopper and Pearson's upper bound),
    not if the predictor's few draws err there.
    """
    rows = ((claimed.radii > 0) & (claimed.classes.cpu() == case.y.cpu())).nonzero().squeeze(1)
    if not len(rows):
        return 0
    x, y = case.x[rows].flatten(1), case.y[rows]
    radii = claimed.radii[rows].to(x).unsqueeze(1)
    wrapped = AtTheirRadius(smoothed, tuple(case.x.shape[1:]))
    start = torch.cat([torch.zeros_like(x), x, radii], 1)
    ball = L2(1.0, mask=torch.arange(start.shape[1]) < x.shape[1])
    broken = torch.zeros(len(rows), dtype=torch.bool)
    for name, attack in case.attacks_on(wrapped, ball).items():
        generator = generator_for(case.seed, f"audit/own radius {name}", device=x.device)
        attacked = [
            attack(wrapped, start[part], y[part], generator=generator)
            for part in batches(len(rows), case.budget.batch_size)
        ]
        points = wrapped.points(torch.cat(attacked))
        with torch.no_grad():
            doubtful = smoothed(points).logits.argmax(-1).cpu() != y.cpu()  # type: ignore[attr-defined]
        for row in (doubtful & ~broken).nonzero().squeeze(1).tolist():
            votes = smoothed.votes(points[row : row + 1], claimed.n, generator=generator)[0]
            upper = _upper(int(votes[y[row]]), claimed.n, len(rows))
            broken[row] = upper < 0.5
    return int(broken.sum())

"""What a check is: a function of a Case, with its id, its title, its cost, and when it counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from advbayes.auditing.case import Budget, Case
from advbayes.auditing.findings import Finding

Measure = Callable[[Case], Finding]


@dataclass(frozen=True)
class Size:
    """What the costs are made of: gradient passes of all attacks once, their number, the tier, the
    sources of transfer."""

    passes: float
    attacks: int
    sources: int
    thetas: bool
    budget: Budget


@dataclass(frozen=True)
class Check:
    """One check of the audit. `cost` is in passes through the predictor for each example.

    `attacks`: it runs attacks, not only their arrays. `calm`: it is about the attack, and the
    predictor's randomness, which would only blur it, is fixed.
    """

    id: str
    title: str
    measure: Measure
    cost: Callable[[Size], float] = lambda size: 0.0
    mandatory: Callable[[Case], bool] = lambda case: True
    # a tier does not leave out what has nothing to say anyway
    applies: Callable[[Case], bool] = lambda case: True
    attacks: bool = False
    calm: bool = False

    def __call__(self, case: Case) -> Finding:
        """What the check says about the case."""
        if self.attacks and not case.attacks:
            return self.named(no_attacks(), case)
        return self.named(self.measure(case.calm() if self.calm else case), case)

    def named(self, finding: Finding, case: Case) -> Finding:
        """The finding under the check's id and title."""
        return replace(finding, id=self.id, title=self.title, mandatory=self.mandatory(case))


def check(id: str, title: str, **options: Any) -> Callable[[Measure], Check]:
    """Make a check of the function that measures it; `options` are the other fields of `Check`.

    >>> @check("E99", "nothing at all", cost=lambda size: size.passes)
    ... def nothing(case):
    ...     return judged(False, "do something", things=0)
    >>> nothing.id, nothing.title
    ('E99', 'nothing at all')
    """
    return lambda measure: Check(id, title, measure, **options)


def judged(bad: bool, advice: str, **figures: Any) -> Finding:
    """Failed with advice if `bad`, passed otherwise."""
    return Finding("", "", "failed" if bad else "passed", figures, advice if bad else "")


def not_run(why: str) -> Finding:
    """A check that would have needed something that is not there."""
    return Finding("", "", "not run", {}, why)


def no_attacks() -> Finding:
    """A check that runs attacks, where there are arrays alone."""
    return not_run("give the attacks, not only their arrays")


def not_applicable(why: str) -> Finding:
    """A check that has nothing to say here."""
    return Finding("", "", "not applicable", {}, why)

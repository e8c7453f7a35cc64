"""What a check is (a function of a Case, with its id, title and cost, and when it counts), what it
found, and what all of them say together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from advbayes.auditing.case import Case
from advbayes.checks import choice

Status = Literal["passed", "failed", "not run", "not applicable"]
Figure = float | int | str | bool | None
_SIGN = {"passed": "ok", "failed": "FAILED", "not run": "not run", "not applicable": "n/a"}


@dataclass(frozen=True)
class Finding:
    """One check's verdict: its figures, and what to do about it.

    >>> Finding("E1", "feasible", "failed", {"infeasible": 3}, "project").line()
    'E1   FAILED   feasible: infeasible = 3. project'
    """

    id: str
    title: str
    status: Status
    figures: dict[str, Figure] = field(default_factory=dict)
    advice: str = ""
    mandatory: bool = True

    def __post_init__(self) -> None:
        choice("status", self.status, tuple(_SIGN))

    def line(self) -> str:
        """One line of text."""
        figures = ", ".join(f"{name} = {_shown(value)}" for name, value in self.figures.items())
        said = f"{self.title}: {figures}" if figures else self.title
        advice = f". {self.advice}" if self.advice else ""
        return f"{self.id:<4} {_SIGN[self.status]:<8} {said}{advice}"

    def json(self) -> dict[str, Any]:
        """A dictionary that JSON can hold."""
        figures = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self.figures.items()
        }
        return vars(self) | {"figures": figures}


def _shown(value: Figure) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


Measure = Callable[[Case], Finding]


@dataclass(frozen=True)
class Check:
    """One check of the audit. `cost` is in passes through the predictor for each example.

    `attacks`: it runs attacks, not only their arrays. `calm`: it is about the attack, and the
    predictor's randomness, which would only blur it, is fixed.
    """

    id: str
    title: str
    measure: Measure
    cost: Callable[[Case], float] = lambda case: 0.0
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

    >>> @check("E99", "nothing at all", cost=lambda case: case.passes)
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


@dataclass(frozen=True)
class Verdict:
    """All findings, and a level: A certified, B every mandatory check passed, C all ran and some
    failed, D some not run.

    `certified`: a certificate that the audit confirmed (see `auditing.certificate`). `notes` name
    what a reader should know of the data: duplicate rows, a clean accuracy of exactly 1.

    >>> findings = Finding("E1", "feasible", "passed"), Finding("E2", "null attack", "not run")
    >>> Verdict(findings).level
    'D'
    """

    findings: tuple[Finding, ...]
    tier: str = "standard"
    certified: bool = False
    summary: dict[str, Figure] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        """A to D; a check that did not run never counts as passed."""
        if self.certified:
            return "A"
        if self.not_run:
            return "D"
        return "C" if self.failed_mandatory else "B"

    @property
    def failed(self) -> tuple[str, ...]:
        """The ids of the checks that failed."""
        return self._ids("failed")

    @property
    def failed_mandatory(self) -> tuple[str, ...]:
        """The ids of the mandatory checks that failed: these put a dagger on attacked values."""
        return self._ids("failed", mandatory=True)

    @property
    def not_run(self) -> tuple[str, ...]:
        """The ids of the mandatory checks that did not run."""
        return self._ids("not run", mandatory=True)

    def _ids(self, status: Status, mandatory: bool = False) -> tuple[str, ...]:
        return tuple(
            finding.id
            for finding in self.findings
            if finding.status == status and (finding.mandatory or not mandatory)
        )

    def _certified(self) -> tuple[str, str]:
        names = ("certified accuracy", "certified at eps")
        share, eps = (_shown(self.summary.get(name)) for name in names)
        return share, eps

    def __getitem__(self, id: str) -> Finding:
        """The finding of one check, by its id."""
        by_id = {finding.id: finding for finding in self.findings}
        if id not in by_id:
            raise KeyError(f"no check {id!r}; there are {', '.join(by_id)}")
        return by_id[id]

    def sentence(self) -> str:
        """The level in plain words.

        >>> Verdict((Finding("E5", "unbounded attack wins", "failed"),)).sentence()
        'The attacked numbers must not be quoted as they are: one check failed.'
        """
        if self.level == "A":
            share, eps = self._certified()
            return (
                f"A share of {share} of the examples is proven right within eps = {eps}, "
                f"whatever the attack."
            )
        if self.level == "B":
            return "Every check that must pass did: the attacked numbers may be quoted."
        failed, absent = len(self.failed_mandatory), len(self.not_run)
        missing = f"{_count(absent)} did not run"
        if not failed:
            return f"Nothing speaks against the attacked numbers so far, but {missing}."
        also = f", and {missing}" if absent else ""
        return (
            f"The attacked numbers must not be quoted as they are: {_count(failed)} failed{also}."
        )

    def line(self) -> str:
        """The line beneath a table."""
        parts = [f"audit ({self.tier}): level {self.level}. {self.sentence()[:-1]}"]
        if "certified accuracy" in self.summary and self.level != "A":
            share, eps = self._certified()
            parts.append(
                f"certified accuracy {share} at eps {eps}, not confirmed: "
                f"{self.summary.get('certificate')}"
            )
        if self.failed:
            parts.append(f"failed {', '.join(self.failed)}{' †' if self.failed_mandatory else ''}")
        if self.not_run:
            parts.append(f"not run {', '.join(self.not_run)}")
        return "; ".join([*parts, *self.notes])

    def text(self) -> str:
        """All findings, one line each, and the level."""
        head = ", ".join(f"{name} {_shown(value)}" for name, value in self.summary.items())
        lines = [head] if head else []
        return "\n".join([*lines, *(finding.line() for finding in self.findings), self.line()])

    __str__ = text

    def json(self) -> dict[str, Any]:
        """A dictionary that JSON can hold."""
        return {
            "level": self.level,
            "sentence": self.sentence(),
            "tier": self.tier,
            "certified": self.certified,
            "failed": list(self.failed),
            "not_run": list(self.not_run),
            "notes": list(self.notes),
            "summary": self.summary,
            "findings": [finding.json() for finding in self.findings],
        }


def is_first_look(level: str, tier: str | None, failed: int) -> bool:
    """Whether a verdict is no more than a first look: the quick tier left checks out, and none of
    those that ran failed.

    >>> is_first_look("D", "quick", failed=0)
    True
    """
    return level == "D" and tier == "quick" and not failed


def _count(num: int) -> str:
    return "one check" if num == 1 else f"{num} checks"

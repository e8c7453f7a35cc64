"""`audit`: may these numbers be believed? One small function for each check, a table of them, a level from A to D."""

from __future__ import annotations

from advbayes.audit.case import TIERS, Budget, Case, Claim
from advbayes.audit.findings import Finding, Verdict
from advbayes.audit.purifier import NearestCentre, StraightThrough
from advbayes.audit.run import CHECKS, Check, Cost, audit, audit_cost, audit_records
from advbayes.audit.threat import ThreatModel

__all__ = [
    "CHECKS",
    "TIERS",
    "Budget",
    "Case",
    "Check",
    "Claim",
    "Cost",
    "Finding",
    "NearestCentre",
    "StraightThrough",
    "ThreatModel",
    "Verdict",
    "audit",
    "audit_cost",
    "audit_records",
]

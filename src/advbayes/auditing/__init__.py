"""`audit`: may these numbers be believed? One small function for each check, a table of them, a
level from A to D."""

from __future__ import annotations

from advbayes.auditing.case import TIERS, Budget, Case
from advbayes.auditing.claim import Claim, ThreatModel
from advbayes.auditing.findings import Check, Finding, Verdict, is_first_look
from advbayes.auditing.run import CHECKS, Cost, audit, audit_cost, audit_records
from advbayes.auditing.support import Baseline, Support

__all__ = [
    "CHECKS",
    "TIERS",
    "Baseline",
    "Budget",
    "Case",
    "Check",
    "Claim",
    "Cost",
    "Finding",
    "Support",
    "ThreatModel",
    "Verdict",
    "audit",
    "audit_cost",
    "audit_records",
    "is_first_look",
]

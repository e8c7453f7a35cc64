"""A report to look at and to send: one HTML page that needs nothing else, Markdown, JSON, CSV."""

from __future__ import annotations

from advbayes.report.folders import report_run, report_runs
from advbayes.report.gather import gather
from advbayes.report.pictures import Gallery, View, make_gallery
from advbayes.report.write import ReportPaths, write_report

__all__ = [
    "Gallery",
    "ReportPaths",
    "View",
    "gather",
    "make_gallery",
    "report_run",
    "report_runs",
    "write_report",
]

"""Records read back, and their reductions: mean and spread over seeds, paired tests."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from advbayes import metrics, store
from advbayes.experiments.running import MANIFEST, RECORDS, read_lines
from advbayes.report.words import METRICS

Array = npt.NDArray[np.float64]
MIN_SEEDS = 5  # of a row that may be called best (E25)


class Cell(NamedTuple):
    """One column of records: which rows of the data, by what, how far."""

    split: str
    attack: str
    eps: float


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation over seeds, and a 95 % interval.

    Of an accuracy it is Wilson's over examples (their answers averaged over seeds), of the others
    Student's over seeds, with Nadeau and Bengio's correction where each seed divides the data anew.
    """

    values: tuple[float, ...]
    low: float
    high: float

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def sd(self) -> float:
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else math.nan

    def __str__(self) -> str:
        sd = "" if math.isnan(self.sd) else f" ({self.sd:.3f})"
        inside = "" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.mean:.3f}{sd}{inside}"


def _sign(metric: str) -> int:
    """What makes less of a metric better."""
    return 1 if METRICS[metric].better == "lower" else -1


class Scores:
    """All records of an experiment's folder."""

    def __init__(self, folder: Path) -> None:
        manifest: Any = store.read_document(folder / MANIFEST)
        self.manifest: dict[str, Any] = manifest
        self.records: list[dict[str, Any]] = [*map(json.loads, read_lines(folder / RECORDS))]
        columns: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for each in self.records:
            if "eps" in each:
                cell = Cell(each["split"], each["attack"], each["eps"])
                for name in ("correct", "log_prob", "entropy", "squared_error"):
                    if name in each:
                        columns[each["row"], each["seed"], cell][name].append(each[name])
        self.cells: dict[tuple[str, int, Cell], dict[str, Array]] = {
            key: {name: np.asarray(values) for name, values in cell.items()}
            for key, cell in columns.items()
        }
        self.rows = list(dict.fromkeys(each["row"] for each in self.records))

    def seeds(self, row: str) -> list[int]:
        """The seeds that a row was run with."""
        return sorted({seed for name, seed, _ in self.cells if name == row})

    def about(self, row: str) -> dict[str, Any]:
        """The manifest's line of the row's first unit."""
        return next(unit for unit in self.manifest["units"].values() if unit["row"] == row)

    def overlap(self, row: str) -> float:
        """Test rows for each training row where every seed divides the data anew, else 0."""
        return float(self.about(row).get("overlap", 0.0))

    def of(self, row: str) -> list[dict[str, Any]]:
        """The records of a row."""
        return [each for each in self.records if each["row"] == row]

    def mean(self, metric: str, row: str, cell: Cell) -> float:
        """Over all seeds of the row."""
        return self.summary(metric, row, cell).mean

    def losses(self, metric: str, row: str, seed: int, cell: Cell) -> Array:
        """One number for each example, before the mean; of `worst` that of the worst attack."""
        if cell.attack == "worst":
            records = [
                self.losses(metric, row, seed, other)
                for name, number, other in self.cells
                if (name, number, other.split) == (row, seed, cell.split)
                and (other.attack == "clean" or other.eps == cell.eps)
            ]
            worst = np.min if metric == "accuracy" else np.max
            return np.asarray(worst(records, axis=0))
        columns = self.cells[row, seed, cell]
        if metric == "accuracy":
            return columns["correct"]
        return -columns["log_prob"] if metric == "nll" else columns["squared_error"]

    def value(self, metric: str, row: str, seed: int, cell: Cell) -> float:
        """The metric of one seed."""
        if metric == "selective_accuracy":
            known = self.cells[row, seed, cell._replace(split="known")]
            foreign = self.cells[row, seed, cell._replace(split="foreign")]
            right = np.concatenate([known["correct"], np.zeros_like(foreign["entropy"])])
            doubt = np.concatenate([known["entropy"], foreign["entropy"]])
            return metrics.selective_accuracy(right, -doubt, coverage=0.5).value
        mean = float(self.losses(metric, row, seed, cell).mean())
        return math.sqrt(mean) if metric == "rmse" else mean

    def summary(self, metric: str, row: str, cell: Cell) -> Summary:
        """Over all seeds of the row."""
        seeds = self.seeds(row)
        values = tuple(self.value(metric, row, seed, cell) for seed in seeds)
        if metric == "accuracy":
            share = np.mean([self.losses(metric, row, seed, cell) for seed in seeds], axis=0)
            return Summary(values, *metrics.wilson(float(share.sum()), len(share)))
        if len(values) < 2:
            return Summary(values, math.nan, math.nan)
        # redrawn splits share most of their rows: their spread alone would make it too narrow
        spread = float(np.std(values, ddof=1)) * math.sqrt(1 / len(values) + self.overlap(row))
        mean, half = float(np.mean(values)), float(stdtrit(len(values) - 1, 0.975)) * spread
        return Summary(values, mean - half, mean + half)

    def text(self, metric: str, row: str, cell: Cell, *, bold: bool) -> str:
        """Mean, spread and interval, as Markdown."""
        text = str(self.summary(metric, row, cell))
        return f"**{text}**" if bold else text

    def p_better(self, metric: str, row: str, other: str, cell: Cell) -> float:
        """Paired, one-sided: the p-value against "`row` is no better than `other`".

        Over the seeds that both have; on a fixed test set also over its examples, and the larger of
        the two counts.
        """
        seeds = sorted(set(self.seeds(row)) & set(self.seeds(other)))
        if len(seeds) < 2:
            return 1.0
        sign, overlap = _sign(metric), self.overlap(row)
        both = [
            [sign * self.value(metric, name, seed, cell) for seed in seeds] for name in (row, other)
        ]
        p_seeds = metrics.paired_t(*both, overlap=overlap)
        if overlap or metric == "selective_accuracy":
            return p_seeds
        means = [
            sign * np.mean([self.losses(metric, name, seed, cell) for seed in seeds], axis=0)
            for name in (row, other)
        ]
        return max(p_seeds, metrics.paired_t(*means))

    def best(self, metric: str, rows: Sequence[str], cell: Cell) -> str | None:
        """The row with the best mean, if better than all that have enough seeds (Holm, 5 %)."""
        sign = _sign(metric)
        first = min(rows, key=lambda row: sign * self.summary(metric, row, cell).mean)
        enough = [row for row in rows if len(self.seeds(row)) >= MIN_SEEDS]
        if first not in enough or len(enough) < 2:
            return None
        p_values = metrics.holm(
            [self.p_better(metric, first, other, cell) for other in enough if other != first]
        )
        return first if max(p_values) < 0.05 else None

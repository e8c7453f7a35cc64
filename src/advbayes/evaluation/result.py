"""What `evaluate` returns: records per example, and every table and curve reduced from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advbayes import metrics
from advbayes.checks import InputError, choice
from advbayes.evaluation.inputs import Task
from advbayes.evaluation.scoring import Columns, worst
from advbayes.evaluation.tables import Row, Table
from advbayes.metrics import Estimate
from advbayes.metrics.intervals import proportion

CLEAN, WORST = "clean", "worst"


def _within(estimate: Estimate, most: float = math.inf) -> Estimate:
    """The interval without what the mean of a score from 0 to `most` cannot be; a value that
    rounding or a few draws put outside stays in it."""
    value = estimate.value
    low, high = max(estimate.low, min(0.0, value)), min(estimate.high, max(most, value))
    return replace(estimate, low=low, high=high)


def _labels(rows: Columns) -> Tensor:
    """The classes; in records of earlier versions they may be the mean of ten, not quite whole."""
    return rows["label"].round()


REDUCTIONS: dict[Task, dict[str, Callable[[Columns], Estimate]]] = {
    "classification": {
        "accuracy": lambda rows: proportion(rows["correct"]),
        "nll": lambda rows: _within(metrics.mean(-rows["log_prob"])),
        "brier": lambda rows: _within(metrics.mean(rows["brier"]), 2.0),
        "ece": lambda rows: metrics.ece(rows["confidence"], rows["correct"]),
        "selective_accuracy": lambda rows: metrics.selective_accuracy(
            rows["correct"], -rows["entropy"], coverage=0.5
        ),
        "aurc": lambda rows: metrics.aurc(1 - rows["correct"], -rows["entropy"], most=1.0),
    },
    "regression": {
        "rmse": lambda rows: metrics.rmse(rows["squared_error"]),
        "nll": lambda rows: metrics.mean(-rows["log_prob"]),
        "crps": lambda rows: _within(metrics.mean(rows["crps"])),
        "coverage": lambda rows: proportion(rows["inside"]),
        "aurc": lambda rows: metrics.aurc(rows["squared_error"], -rows["entropy"]),
    },
}

ON_REQUEST: dict[Task, dict[str, Callable[[Columns], Estimate]]] = {  # not in a table unless named
    "classification": {
        "balanced_accuracy": lambda rows: metrics.balanced_accuracy(rows["correct"], _labels(rows)),
        "recall": lambda rows: metrics.recall(rows["correct"], _labels(rows), of=1),
        "auroc": lambda rows: metrics.auroc(rows["positive"], _labels(rows)),
        "auprc": lambda rows: metrics.auprc(rows["positive"], _labels(rows)),
    },
    "regression": {},
}

NEEDED = {  # columns that not every prediction can give
    "crps": "crps",
    "coverage": "inside",
    "aurc": "entropy",
    "balanced_accuracy": "label",
    "recall": "label",
    "auroc": "positive",
    "auprc": "positive",
}


@dataclass(frozen=True)
class Cell:
    """One column of records: whom, by what, how far (eps None: the attack does not say)."""

    predictor: str
    attack: str
    eps: float | None


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Scores of every example under every attack; reductions and tables are made from them.

    >>> clean = {"correct": torch.tensor([1.0, 1.0]), "log_prob": torch.tensor([-0.1, -0.2])}
    >>> under = {"correct": torch.tensor([1.0, 0.0]), "log_prob": torch.tensor([-0.3, -0.9])}
    >>> cells = {Cell("MIX", "clean", 0.0): clean, Cell("MIX", "PGD", 2.0): under}
    >>> Evaluation("classification", cells, trivial=()).estimate("accuracy", attack="worst").value
    0.5
    """

    task: Task
    cells: Mapping[Cell, Columns]
    trivial: tuple[str, ...]  # predictors that never look at x
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    def __str__(self) -> str:
        return self.table().text()

    def __repr__(self) -> str:
        num = len(next(iter(self.cells.values()))["log_prob"]) if self.cells else 0
        names = f"predictors={self.predictors}, attacks={self.attacks}"
        return f"Evaluation({self.task}, {names}, radii={self.radii}, num={num})"

    @property
    def predictors(self) -> tuple[str, ...]:
        """Names, trivial ones last."""
        return tuple(dict.fromkeys(cell.predictor for cell in self.cells))

    @property
    def attacks(self) -> tuple[str, ...]:
        """Names, without clean and worst."""
        return tuple(dict.fromkeys(cell.attack for cell in self.cells if cell.attack != CLEAN))

    @property
    def radii(self) -> tuple[float | None, ...]:
        """The budgets, smallest first."""
        radii = {cell.eps for cell in self.cells if cell.attack != CLEAN}
        return tuple(sorted(radii, key=_outward))

    def _name(self, predictor: str | None) -> str:
        name = self.predictors[0] if predictor is None else predictor
        return choice("predictor", name, self.predictors)

    def columns(
        self, predictor: str | None = None, attack: str = WORST, eps: float | None = None
    ) -> Columns:
        """The scores of one cell, one value per example; eps may be left out where there is one.

        `worst` is the union of clean and every attack at that radius.
        """
        predictor = self._name(predictor)
        choice("attack", attack, (CLEAN, WORST, *self.attacks))
        if attack == CLEAN or predictor in self.trivial:
            return self.cells[Cell(predictor, CLEAN, 0.0)]
        radii = self.radii_of(predictor, attack)
        if eps is None and len(radii) == 1:
            eps = radii[0]
        if eps not in radii:
            raise InputError(f"eps must be one of {radii} for {attack!r}, got {eps}")
        if attack != WORST:
            return self.cells[Cell(predictor, attack, eps)]
        cells = [Cell(predictor, CLEAN, 0.0), *self._at(predictor, eps)]
        return worst([self.cells[cell] for cell in cells], self.task)

    def radii_of(self, predictor: str, attack: str = WORST) -> list[float | None]:
        """The budgets at which a predictor was attacked (`worst`: by any attack), as evaluated."""
        cells = [cell for cell in self._attacked(predictor) if attack in (WORST, cell.attack)]
        return list(dict.fromkeys(cell.eps for cell in cells))

    def _attacked(self, predictor: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.predictor == predictor and cell.attack != CLEAN]

    def _at(self, predictor: str, eps: float | None) -> list[Cell]:
        return [cell for cell in self._attacked(predictor) if cell.eps == eps]

    def shown(self, predictor: str) -> list[Cell]:
        """The rows of a predictor in a table: clean, then at each radius every attack and the
        worst case."""
        cells = [Cell(predictor, CLEAN, 0.0)]
        if predictor not in self.trivial:
            for eps in sorted(self.radii_of(predictor), key=_outward):
                cells += [*self._at(predictor, eps), Cell(predictor, WORST, eps)]
        return cells

    def records(self) -> Iterator[dict[str, Any]]:
        """One dictionary per example, predictor, attack and radius."""
        for cell, rows in self.cells.items():
            yield from records_of(cell, rows, self.config)

    def estimate(
        self,
        metric: str,
        predictor: str | None = None,
        attack: str = WORST,
        eps: float | None = None,
    ) -> Estimate:
        """One number with its confidence interval."""
        reductions = REDUCTIONS[self.task] | ON_REQUEST[self.task]
        choice("metric", metric, tuple(reductions))
        rows = self.columns(predictor, attack, eps)
        if not gives(rows, metric):
            raise InputError(
                f"metric must be one that the predictions can give, got {metric!r} without "
                f"{NEEDED[metric]!r}"
            )
        return reductions[metric](rows)

    def curve(
        self, metric: str | None = None, predictor: str | None = None, attack: str = WORST
    ) -> list[tuple[float, Estimate]]:
        """The security curve: (eps, estimate), from the clean point outward."""
        metric = metric or next(iter(REDUCTIONS[self.task]))
        predictor = self._name(predictor)
        clean = (0.0, self.estimate(metric, predictor, CLEAN))
        attacked = self.predictors[0] if predictor in self.trivial else predictor
        points = sorted(eps for eps in self.radii_of(attacked, attack) if eps)
        return [clean, *((eps, self.estimate(metric, predictor, attack, eps)) for eps in points)]

    def risk_coverage(
        self, predictor: str | None = None, attack: str = WORST, eps: float | None = None
    ) -> metrics.RiskCoverage:
        """Error (or squared error) among the k answers of lowest entropy, for every k."""
        return risk_coverage_of(self.columns(predictor, attack, eps), self.task)

    def ood_auroc(
        self,
        outside: Evaluation,
        predictor: str | None = None,
        attack: str = CLEAN,
        eps: float | None = None,
    ) -> Estimate:
        """How well entropy tells the examples of `outside` (foreign inputs, any labels) from these,
        under the same attack."""
        here, there = (each.columns(predictor, attack, eps)["entropy"] for each in (self, outside))
        foreign = torch.cat([torch.zeros_like(here), torch.ones_like(there)])
        return metrics.auroc(torch.cat([here, there]), foreign)

    def table(self, metrics: Sequence[str] | None = None, *, verdict: Any = None) -> Table:
        """Rows predictor x attack x eps, clean first, the worst case after its attacks, trivial
        predictors last.

        A metric that a row's predictions cannot give is empty there, and absent where no predictor
        under attack gives it. With a verdict (of `audit`) of which a mandatory check failed, the
        attacked rows carry a dagger.
        """
        names = tuple(REDUCTIONS[self.task]) if metrics is None else tuple(metrics)
        rows = []
        for cell in [cell for predictor in self.predictors for cell in self.shown(predictor)]:
            key = (cell.predictor, cell.attack, cell.eps)
            columns = self.columns(*key)
            values = {name: self.estimate(name, *key) for name in names if gives(columns, name)}
            label, eps = key[1:] if cell.predictor not in self.trivial else ("any", None)
            rows.append(Row(cell.predictor, label, eps, values, marked=cell.attack != CLEAN))
        if metrics is None:
            names = tuple(
                name
                for name in names
                if any(name in row.values for row in rows if row.predictor not in self.trivial)
            )
        note = "" if verdict is None else verdict.line()
        dagger = verdict is not None and bool(verdict.failed_mandatory)
        return Table(names, tuple(rows), note=note, dagger=dagger)


def records_of(
    cell: Cell,
    rows: Columns,
    config: Mapping[str, Any],
    start: int = 0,
    block: int | None = None,
    array: str = "",
) -> Iterator[dict[str, Any]]:
    """The records of examples from `start` on; on disk with the number of their block, the first
    one with the SHA-256 of its array."""
    columns = {name: values.tolist() for name, values in rows.items()}
    for row in range(len(rows["log_prob"])):
        yield {
            "predictor": cell.predictor,
            "attack": cell.attack,
            "eps": cell.eps,
            "index": start + row,
            **({} if block is None else {"block": block}),
            "seed": config.get("seed"),
            "iterations": config.get("iterations", {}).get(cell.attack, 0),
            **({"array": array} if array and not row else {}),
            **{name: values[row] for name, values in columns.items()},
        }


def _outward(eps: float | None) -> float:
    return math.inf if eps is None else eps


def risk_coverage_of(rows: Columns, task: Task) -> metrics.RiskCoverage:
    """Error (or squared error) among the k answers of lowest entropy, for every k."""
    losses = 1 - rows["correct"] if task == "classification" else rows["squared_error"]
    return metrics.risk_coverage(losses, -rows["entropy"])


def gives(rows: Columns, metric: str) -> bool:
    """Whether the records have what the metric needs."""
    return metric not in NEEDED or NEEDED[metric] in rows

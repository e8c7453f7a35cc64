"""Draws docs/figures/mnist.svg from the records under `results/`: what is left of each defense on
MNIST, clean, under PGD and under the strong suite."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from advbayes.experiments.scores import Cell, Scores, Summary

HERE = Path(__file__).parent
ROWS = {
    "BL": "undefended",
    "AT": "adversarial\ntraining",
    "OS50": "OS50",
    "MIX": "MIX",
    "NN50": "NN50",
    "PGD channel": "PGD\nchannel",
    "full purifier": "purified",
    "wide PGD": "wide net,\nPGD channel",
}
COLUMNS = {
    "clean": ("clean", 0.0, "#56b4e9"),
    "PGD": ("PGD, 50 steps", 2.0, "#e69f00"),
    "strong": ("strong suite", 2.0, "#d55e00"),
}


def cell(results: list[Scores], row: str, attack: str, eps: float) -> Summary | None:
    """From the first experiment that has it."""
    key = Cell("test", attack, eps)
    for scores in results:
        if any((name, each) == (row, key) for name, _, each in scores.cells):
            return scores.summary("accuracy", row, key)
    return None


def main(folder: Path) -> None:
    names = ("mnist", "mnist-own", "mnist-strong")
    results = [Scores(folder / name) for name in names if (folder / name).exists()]
    plt.rcParams.update({"svg.hashsalt": "advbayes", "font.size": 9})
    figure, axes = plt.subplots(figsize=(7.6, 2.8), layout="constrained")
    shown = [row for row in ROWS if cell(results, row, "strong", 2.0) is not None]
    for place, row in enumerate(shown):
        for shift, (attack, (label, eps, colour)) in enumerate(COLUMNS.items()):
            found = cell(results, row, attack, eps)
            if found is None:
                continue
            x = place + 0.27 * (shift - 1)
            axes.bar(x, found.mean, 0.25, color=colour, label=None if place else label)
            axes.plot([x, x], [found.low, found.high], color="black", linewidth=1)
    axes.set_xticks(range(len(shown)), [ROWS[row] for row in shown])
    axes.set_ylim(0, 1)
    axes.set_ylabel("accuracy")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(HERE / "mnist.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "results")

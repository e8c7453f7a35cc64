"""Draws docs/figures/mnist.svg from the records under `results/`: what is left of each defense on
MNIST, clean, under PGD and under the strong suite."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("svg")
from matplotlib import pyplot as plt

from advbayes.experiments.scores import Cell, Scores
from advbayes.metrics import wilson

HERE = Path(__file__).parent
ROWS = {
    "BL": "undefended",
    "AT": "adversarial\ntraining",
    "OS50": "OS50",
    "MIX": "MIX",
    "NN50": "NN50",
}
COLUMNS = {
    "clean": ("clean", 0.0, "#56b4e9"),
    "PGD": ("PGD, 50 steps", 2.0, "#e69f00"),
    "strong": ("strong suite", 2.0, "#d55e00"),
}


def main(folder: Path) -> None:
    """The images and seeds that the strong suite has met, in all three columns."""
    paper, strong = Scores(folder / "mnist"), Scores(folder / "mnist-strong")
    plt.rcParams.update({"svg.hashsalt": "advbayes", "font.size": 9})
    figure, axes = plt.subplots(figsize=(7.6, 2.8), layout="constrained")
    shown = [row for row in ROWS if row in strong.rows]
    for place, row in enumerate(shown):
        for shift, (attack, (label, eps, colour)) in enumerate(COLUMNS.items()):
            scores = strong if attack == "strong" else paper
            met = Cell("test", "strong", 2.0)
            num = len(strong.losses("accuracy", row, strong.seeds(row)[0], met))
            right = np.mean(
                [
                    scores.losses("accuracy", row, seed, Cell("test", attack, eps))[:num]
                    for seed in strong.seeds(row)
                ],
                axis=0,
            )
            x = place + 0.27 * (shift - 1)
            axes.bar(x, right.mean(), 0.25, color=colour, label=None if place else label)
            axes.plot([x, x], wilson(float(right.sum()), num), color="black", linewidth=1)
    axes.set_xticks(range(len(shown)), [ROWS[row] for row in shown])
    axes.set_ylim(0, 1)
    axes.set_ylabel("accuracy")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(HERE / "mnist.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "results")

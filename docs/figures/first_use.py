"""Draws docs/figures/first_use.svg from `benchmarks/results/first-use/*.json`: what is left of five
defenses on MNIST."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
RECORDS = HERE.parents[1] / "benchmarks" / "results" / "first-use"
ROWS = {
    "none": "undefended",
    "at": "adversarial\ntraining",
    "mix": "MIX",
    "pgd": "PGD channel",
    "purifier": "purified",
}
COLUMNS = {
    "clean": ("clean", "#56b4e9"),
    "PGD": ("PGD, 50 steps", "#e69f00"),
    "worst": ("worst of all attacks", "#d55e00"),
}


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "advbayes", "font.size": 9})
    figure, axes = plt.subplots(figsize=(7.2, 2.7), layout="constrained")
    for place, name in enumerate(ROWS):
        rows = json.loads((RECORDS / f"{name}.json").read_text())["table"]["rows"]
        for shift, (attack, (label, colour)) in enumerate(COLUMNS.items()):
            found = next(row["accuracy"] for row in rows if row["attack"] == attack)
            x = place + 0.27 * (shift - 1)
            axes.bar(x, found["value"], 0.25, color=colour, label=None if place else label)
            axes.plot([x, x], [found["low"], found["high"]], color="black", linewidth=1)
    axes.set_xticks(range(len(ROWS)), list(ROWS.values()))
    axes.set_ylim(0, 1)
    axes.set_ylabel("accuracy")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(HERE / "first_use.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

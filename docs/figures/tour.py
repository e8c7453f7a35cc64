"""Draws docs/figures/tour.svg: one digit before and after, by the models of docs/tour.md."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent


def main() -> None:
    page = (HERE.parent / "tour.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    for block in blocks[:4]:  # up to the evaluation
        exec(compile(block, "tour.md", "exec"), names)
    from advbayes import pgd

    x, y = names["test"][0], names["test"][1]
    attack = pgd(names["ball"], 10)
    attacked = {name: attack(predict, x, y) for name, predict in names["predictors"].items()}
    lost = names["predictors"]["undefended"](attacked["undefended"]).probs.argmax(1) != y
    kept = names["predictors"]["MIX"](attacked["MIX"]).probs.argmax(1) == y
    chosen = int((lost & kept).nonzero()[0])  # the first that one loses and the other keeps
    plt.rcParams.update({"svg.hashsalt": "advbayes", "font.size": 8})
    figure, grid = plt.subplots(
        len(attacked),
        4,
        figsize=(7.2, 1.5 * len(attacked)),
        layout="constrained",
        width_ratios=(1, 1, 1, 2.4),
    )
    for row, (name, x_adv) in zip(grid, attacked.items(), strict=True):
        before, after = x[chosen, 0], x_adv[chosen, 0]
        row[0].imshow(1 - before, cmap="gray", vmin=0, vmax=1)
        row[1].imshow(after - before, cmap="RdBu_r", vmin=-0.3, vmax=0.3)
        row[2].imshow(1 - after, cmap="gray", vmin=0, vmax=1)
        for axes in row[:3]:
            axes.set_xticks([])
            axes.set_yticks([])
        row[0].set_ylabel(name)
        predict = names["predictors"][name]
        for shift, images, label, colour in (
            (-0.2, x, "before", "#0072b2"),
            (0.2, x_adv, "after", "#d55e00"),
        ):
            probs = predict(images[chosen : chosen + 1]).probs[0]
            row[3].bar([k + shift for k in range(10)], probs, 0.4, label=label, color=colour)
        row[3].set_xticks(range(10))
        row[3].set_ylim(0, 1)
        row[3].spines[["top", "right"]].set_visible(False)
    for axes, title in zip(
        grid[0], ("input", "perturbation", "attacked", "what it predicts"), strict=True
    ):
        axes.set_title(title)
    grid[0][3].legend(frameon=False)
    figure.savefig(HERE / "tour.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

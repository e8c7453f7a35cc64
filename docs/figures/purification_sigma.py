"""Draws docs/figures/purification_sigma.svg from the study's records: accuracy and effective sample
size against sigma."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
RECORDS = HERE.parents[1] / "benchmarks" / "results" / "purification"


def main() -> None:
    records = [json.loads(path.read_text()) for path in RECORDS.glob("validation-noise-*.json")]
    records.sort(key=lambda record: float(record["variant"].split("-")[1]))
    sigma = [float(record["variant"].split("-")[1]) for record in records]
    plt.rcParams.update({"svg.hashsalt": "advbayes", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.8), layout="constrained")
    left.plot(sigma, [record["clean"] for record in records], "o-", label="clean")
    left.plot(
        sigma,
        [record["robust"]["exact nll"] for record in records],
        "s--",
        label="plain PGD through it, eps 2",
    )
    left.plot(
        sigma, [record["worst"] for record in records], "v-", label="worst of all attacks, eps 2"
    )
    left.set(xlabel="sigma of the channel", ylabel="accuracy", ylim=(0, 1))
    left.legend(fontsize=7, loc="center right")
    right.plot(
        sigma, [record["ess_reference_median"] for record in records], "o-", color="tab:green"
    )
    right.axhline(2, color="grey", lw=0.8, ls=":")
    right.set(xlabel="sigma of the channel", ylabel="effective sample size (median)", yscale="log")
    figure.savefig(
        HERE / "purification_sigma.svg",
        metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
    )


if __name__ == "__main__":
    main()

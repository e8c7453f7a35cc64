"""Tables and figures, made from records alone; the paper's number beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from advbayes import metrics, store
from advbayes.evaluation.tables import Grid
from advbayes.experiments.catalogue import TRIVIAL, Experiment, Spec
from advbayes.experiments.reported import CERTIFIED, COST, MULTI_STEP, REPORTED
from advbayes.experiments.scores import LOWER_IS_BETTER, MIN_SEEDS, Cell, Scores
from advbayes.report import figures

NAMES = {
    "accuracy": "Accuracy",
    "nll": "NLL",
    "rmse": "RMSE",
    "selective_accuracy": "Selective accuracy",
}
# What section 4 compares.
PAIRS = (
    ("MIX", "AT"),
    ("NN50", "AT"),
    ("MIX", "OS50"),
    ("MIX", "NN50"),
    ("MIX", "BL"),
    ("AT", "BL"),
)
_ARROWS = {"accuracy": "higher is better", "selective_accuracy": "higher is better"}


def write_views(folder: Path) -> Path:
    """`table.md` and the figures of a folder of records, anew."""
    document: Any = store.read_document(folder / "manifest.json")
    experiment, scores = Spec.from_json(document["spec"]).experiment(), Scores(folder)
    parts = [f"# {experiment.title}", _preamble(experiment, scores)]
    parts += [VIEWS[name](experiment, scores, folder) for name in experiment.views]
    if experiment.note:
        parts.append(experiment.note)
    store.write_bytes(
        folder / "table.md", ("\n\n".join(part for part in parts if part) + "\n").encode()
    )
    return folder / "table.md"


def _preamble(experiment: Experiment, scores: Scores) -> str:
    made = scores.manifest
    missing = [row for row in experiment.rows if row not in scores.rows]
    lines = [
        f"Seeds {', '.join(map(str, made['seeds']))}; {made['seconds']:.0f} s in all; commit "
        f"{', '.join(made['commits'])}; {made['machine']}."
    ]
    if missing:
        lines.append(f"Not run: {', '.join(missing)}.")
    return " ".join(lines)


def _cells(experiment: Experiment, eps: float, split: str) -> dict[str, Cell]:
    attacks = {name: Cell(split, name, eps) for name in experiment.attacks}
    worst = {"worst": Cell(split, "worst", eps)} if len(attacks) > 1 else {}
    return {"clean": Cell(split, "clean", 0.0), **attacks, **worst}


def attack_table(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Rows against attacks at the last radius: mean (sd over seeds) [95 % interval], the paper's
    number below."""
    split = experiment.splits[-1]
    cells = _cells(experiment, experiment.radii[-1], split)
    levels = _levels(folder)
    head = ["row", "seeds", *(["audit"] if levels else []), *cells]
    out = []
    for metric in experiment.metrics:
        best = {name: scores.best(metric, scores.rows, cell) for name, cell in cells.items()}
        body = []
        for row in scores.rows:
            reported = REPORTED.get(experiment.reported, {}).get(metric, {}).get(row, {})
            shown = []
            for name, cell in cells.items():
                text = str(scores.summary(metric, row, cell))
                text = f"**{text}**" if best[name] == row else text
                if name in reported:
                    mean, sd = reported[name]
                    text += f"<br>paper {mean:.2f}" + ("" if sd is None else f" ({sd:.2f})")
                shown.append(text)
            audited = [levels.get(row, "")] if levels else []
            body.append(
                [
                    f"*{row}*" if row in TRIVIAL else row,
                    str(len(scores.seeds(row))),
                    *audited,
                    *shown,
                ]
            )
        arrow = _ARROWS.get(metric, "lower is better")
        out.append(f"## {NAMES[metric]} ({arrow})\n\n" + Grid(head, body).markdown())
    few = [row for row in scores.rows if len(scores.seeds(row)) < MIN_SEEDS]
    rule = "Bold: better than every other row of its column (paired tests, Holm, 5 %)."
    if few:
        rule += (
            f" Of the {len(few)} rows with fewer than {MIN_SEEDS} seeds none can be bold; a bold "
            "one is ahead of them without a test."
        )
    floor = (
        " Above ln 10 = 2.303 an NLL is worse than the uniform predictor's."
        if "uniform" in scores.rows
        else ""
    )
    out.append(
        f"Mean (standard deviation over seeds) [95 % interval]. `worst` is the worst attack for "
        f"each example. {rule}{floor}"
    )
    return "\n\n".join(out)


def pairs(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """The comparisons that the paper draws, each with its paired test."""
    drawn = [pair for pair in PAIRS if all(len(scores.seeds(row)) >= MIN_SEEDS for row in pair)]
    if not drawn:
        return ""
    cells = _cells(experiment, experiment.radii[-1], experiment.splits[-1])
    out = []
    for metric in experiment.metrics:
        body = []
        for first, second in drawn:
            shown = []
            for cell in cells.values():
                gap = (
                    scores.summary(metric, first, cell).mean
                    - scores.summary(metric, second, cell).mean
                )
                better = (gap < 0) == LOWER_IS_BETTER[metric]
                ahead = (first, second) if better else (second, first)
                shown.append(f"{gap:+.3f} (p = {scores.p_better(metric, *ahead, cell):.2g})")
            body.append([f"{first} - {second}", *shown])
        out.append(f"### {NAMES[metric]}\n\n" + Grid(["rows", *cells], body).markdown())
    return (
        "## Paired differences\n\nMean over seeds, and the one-sided p-value of the sign seen, not "
        "corrected for the number of comparisons.\n\n" + "\n\n".join(out)
    )


def _levels(folder: Path) -> dict[str, str]:
    """The level of each row in the audit beside the experiment, with a dagger and the failed checks
    below level B."""
    beside = folder.with_name(f"{folder.name}-audit")
    if not (beside / "manifest.json").is_file():
        return {}
    audited = Scores(beside)
    failed = {
        unit["row"]: [
            each["check"]
            for each in audited.records
            if each["row"] == unit["row"] and each["status"] == "failed"
        ]
        for unit in audited.manifest["units"].values()
    }
    return {
        unit["row"]: unit["level"]
        if unit["level"] in "AB"
        else f"{unit['level']}† {', '.join(failed[unit['row']])}"
        for unit in audited.manifest["units"].values()
    }


def readings(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Nine readings of the units, by their distance from the paper's RMSE cells; the nearest one in
    full."""
    about = scores.about(scores.rows[0])
    sd, span = about["y_sd"], about["y_range"]
    factors = {"standardised": 1.0, "min-max": sd / span, "raw": sd}
    if experiment.reported == "california":
        factors["raw"] = sd / 1e5  # the usual unit, 100,000 dollars
    reported = REPORTED[experiment.reported]["rmse"]
    cells = _cells(experiment, 2.0, "test")
    done = {row.split(", x ")[1] for row in scores.rows}
    names = sorted(
        {row.split(", x ")[0] for row in scores.rows}, key=scores.rows[0].startswith, reverse=True
    )

    def rmse(row: str, units: str, name: str, factor: float) -> float:
        return factor * scores.summary("rmse", f"{row}, x {units}", cells[name]).mean

    distance = {
        (x, y): float(
            np.mean(
                [
                    abs(math.log(rmse(row, x, name, factor) / reported[row][name][0]))
                    for row in names
                    for name in reported[row]
                ]
            )
        )
        for x in ("standardised", "min-max", "raw")
        if x in done
        for y, factor in factors.items()
    }
    nearest = min(distance, key=distance.__getitem__)
    table = Grid(
        ["units of x and eps", *(f"y {y}" for y in factors)],
        [
            [x, *(f"{distance[x, y]:.2f}" for y in factors)]
            for x in dict.fromkeys(x for x, _ in distance)
        ],
    ).markdown()
    out = [
        "## Which reading comes nearest\n\nMean |ln(measured / reported)| over the paper's RMSE "
        "cells of "
        f"{', '.join(names)} (0.69 is a factor of two). The model is trained on y standardised; "
        f"only its RMSE is converted."
        f"\n\n{table}\n\nNearest: x {nearest[0]}, y {nearest[1]}, "
        f"off by a factor of {math.exp(distance[nearest]):.2f} on average."
    ]
    for metric in ("rmse", "nll"):
        body = []
        for row in names:
            shown = []
            for name in REPORTED[experiment.reported][metric][row]:
                mean = scores.summary(metric, f"{row}, x {nearest[0]}", cells[name]).mean
                factor = factors[nearest[1]]
                mean = mean * factor if metric == "rmse" else mean + math.log(factor)
                shown.append(
                    f"{mean:.2f}<br>paper {REPORTED[experiment.reported][metric][row][name][0]:.2f}"
                )
            body.append([row, *shown])
        columns = [name for name in cells if name != "worst"]
        out.append(
            f"## {NAMES[metric]} in that reading\n\n" + Grid(["row", *columns], body).markdown()
        )
    return "\n\n".join(out)


def front(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Clean against attacked RMSE on the test rows; for each eps one defense chosen on the
    validation rows, and tests."""
    references = [
        row for row in ("BL", "constant", "least squares", "random forest") if row in scores.rows
    ]
    defended = [row for row in scores.rows if row not in references]
    clean = {split: Cell(split, "clean", 0.0) for split in experiment.splits}
    strong = {
        (split, eps): Cell(split, "strong", eps)
        for split in experiment.splits
        for eps in experiment.radii
    }

    def mean(row: str, cell: Cell) -> float:
        return scores.summary("rmse", row, cell).mean

    best = {eps: scores.best("rmse", scores.rows, strong["test", eps]) for eps in experiment.radii}
    body = [
        [
            f"*{row}*" if row in TRIVIAL else row,
            str(len(scores.seeds(row))),
            str(scores.summary("rmse", row, clean["test"])),
            *(
                f"**{text}**" if best[eps] == row else text
                for eps in experiment.radii
                for text in [str(scores.summary("rmse", row, strong["test", eps]))]
            ),
        ]
        for row in scores.rows
    ]
    out = [
        "## RMSE on the test rows, in standard deviations of y\n\n"
        + Grid(
            ["row", "seeds", "clean", *(f"eps {eps:g}" for eps in experiment.radii)], body
        ).markdown()
    ]
    limit = 1.1 * mean("BL", clean["validation"])
    chosen = []
    for eps in experiment.radii:
        allowed = [row for row in defended if mean(row, clean["validation"]) <= limit] or defended
        pick = min(allowed, key=lambda row: mean(row, strong["validation", eps]))
        cost = mean(pick, clean["test"]) / mean("BL", clean["test"]) - 1
        p_values = metrics.holm(
            [scores.p_better("rmse", pick, other, strong["test", eps]) for other in references]
        )
        tests = ", ".join(
            f"{other} {mean(other, strong['test', eps]):.3f} (p = {p:.3g})"
            for other, p in zip(references, p_values, strict=True)
        )
        beaten = max(p_values) < 0.05 and cost <= 0.1
        chosen.append(
            [
                f"{eps:g}",
                pick,
                f"{100 * cost:+.1f} %",
                f"{mean(pick, strong['test', eps]):.3f}",
                tests,
                "yes" if beaten else "no",
            ]
        )
    head = [
        "eps",
        "chosen on validation rows",
        "clean RMSE against BL",
        "attacked RMSE",
        "against (Holm)",
        "beats all for <= 10 %",
    ]
    out.append(
        "## One defense for each eps\n\nChosen on validation rows: the lowest attacked RMSE among "
        "those whose clean RMSE "
        "there is within 10 % of BL's. The random forest has no gradient: "
        "its attacked RMSE (by queries and transfer) is a lower bound.\n\n"
        + Grid(head, chosen).markdown()
    )
    last = experiment.radii[-1]
    worse = [
        row
        for row in defended
        if mean(row, strong["test", last]) > mean("constant", strong["test", last])
    ]
    out.append(
        f"At eps {last:g}, {len(worse)} of {len(defended)} defenses are worse than the constant: "
        f"{', '.join(worse) or 'none'}."
    )
    _draw_front(
        scores,
        references,
        defended,
        clean["test"],
        {eps: strong["test", eps] for eps in experiment.radii},
        folder,
    )
    out.append("![front](front.svg)")
    return "\n\n".join(out)


def _draw_front(
    scores: Scores,
    references: Sequence[str],
    defended: Sequence[str],
    clean: Cell,
    strong: dict[float, Cell],
    folder: Path,
) -> None:
    def paint(figure: Any) -> None:
        for axes, (eps, cell) in zip(
            figure.subplots(1, len(strong), sharex=True), strong.items(), strict=True
        ):
            kinds = {"posterior": "o", "point": "^"}
            for start, marker in kinds.items():
                rows = [row for row in defended if row.startswith(start)]
                x = [scores.summary("rmse", row, clean).mean for row in rows]
                y = [scores.summary("rmse", row, cell).mean for row in rows]
                axes.scatter(x, y, marker=marker, s=18, label=start)
            for index, row in enumerate(references):
                point = [scores.summary("rmse", row, which).mean for which in (clean, cell)]
                axes.scatter(
                    *([value] for value in point),
                    marker="*",
                    s=70,
                    color=f"C{index + 2}",
                    label=row,
                )
            axes.set_title(f"eps {eps:g}")
            axes.set_xlabel("clean RMSE")
        figure.axes[0].set_ylabel("attacked RMSE")
        figure.axes[-1].legend(fontsize=7)

    save_figure(folder / "front", paint, (3 * len(strong), 3.2))


def curves(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Each metric over eps, one figure an attack; bands are one standard deviation over seeds."""
    out = []
    split = "known" if experiment.measure == "selective" else "test"
    attacks = ("both",) if experiment.measure == "selective" else experiment.attacks
    cells = {
        a: [Cell(split, "clean", 0.0), *(Cell(split, a, eps) for eps in experiment.radii)]
        for a in attacks
    }
    for attack, points in cells.items():

        def paint(figure: Any, points: list[Cell] = points) -> None:
            axes_row = np.atleast_1d(figure.subplots(1, len(experiment.metrics)))
            for axes, metric in zip(axes_row, experiment.metrics, strict=True):
                for row in scores.rows:
                    summaries = [scores.summary(metric, row, cell) for cell in points]
                    x, y = (
                        [cell.eps for cell in points],
                        np.array([each.mean for each in summaries]),
                    )
                    spread = np.nan_to_num(np.array([each.sd for each in summaries]))
                    (line,) = axes.plot(x, y, marker=".", label=row)
                    axes.fill_between(x, y - spread, y + spread, alpha=0.15, color=line.get_color())
                axes.set_xlabel("eps (L2)")
                axes.set_ylabel(NAMES[metric])
            axes_row[0].legend(fontsize=7)

        name = {"PGD+": "pgd-plus"}.get(attack, attack.lower())
        save_figure(folder / name, paint, (4.5 * len(experiment.metrics), 3.4))
        for metric in experiment.metrics:
            body = [
                [row, *(str(scores.summary(metric, row, cell)) for cell in points)]
                for row in scores.rows
            ]
            head = ["row", "clean", *(f"eps {eps:g}" for eps in experiment.radii)]
            out.append(
                f"## {NAMES[metric]}, {attack}\n\n![{attack}]({name}.svg)\n\n"
                + Grid(head, body).markdown()
            )
    return "\n\n".join(out)


def multi_step(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """The table of SM-6 beside ours."""
    out = []
    for metric, columns in MULTI_STEP.items():
        body = [
            [
                f"{eps:g}",
                *(
                    f"{scores.summary(metric, scores.rows[0], Cell('test', name, eps)).mean:.2f}"
                    f"<br>paper {values[index]:.2f}"
                    for name, values in columns.items()
                ),
            ]
            for index, eps in enumerate(experiment.radii)
        ]
        out.append(
            f"## {NAMES[metric]} beside the paper's\n\n" + Grid(["eps", *columns], body).markdown()
        )
    return "\n\n".join(out)


def effects(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """What each factor of the factorial is worth: the mean difference between its two levels, over
    the other two."""
    factors = {"posterior": "point", "noisy": "deterministic", "half clean": "all attacked"}
    split = experiment.splits[-1]
    cells = _cells(experiment, experiment.radii[-1], split)
    out = []
    for metric in experiment.metrics:
        body = []
        for high, low in factors.items():
            shown = []
            for cell in cells.values():
                pairs = [(row, row.replace(high, low)) for row in scores.rows if high in row]
                pairs = [pair for pair in pairs if pair[1] in scores.rows]
                gaps = [
                    scores.summary(metric, a, cell).mean - scores.summary(metric, b, cell).mean
                    for a, b in pairs
                ]
                shown.append(
                    f"{np.mean(gaps):+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f})" if gaps else ""
                )
            body.append([f"{high} instead of {low}", *shown])
        out.append(
            f"## Effects on {NAMES[metric]}: mean and range of the differences\n\n"
            + Grid(["factor", *cells], body).markdown()
        )
    return "\n\n".join(out)


def certified(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Average certified radius (0 where wrong) and certified accuracy, beside published ones."""
    at = (0.5, 1.0, 1.5, 2.0)
    body = []
    for row in scores.rows:
        radii = np.array([e["correct"] * e["radius"] for e in scores.records if e["row"] == row])
        right = np.array([e["correct"] for e in scores.records if e["row"] == row])
        shares = [((radii >= radius) & right).mean() for radius in at]
        body.append([row, f"{radii.mean():.3f}", *(f"{share:.3f}" for share in shares)])
    for name, radius, share in CERTIFIED:
        body.append([f"*{name} (published)*", f"{radius:.2f}", "", "", "", f"{share:.2f}"])
    head = ["row", "average radius", *(f"accuracy at {radius:g}" for radius in at)]
    return Grid(head, body).markdown()


def times(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Median ms of a training step (batch of 128) and of one answer, beside the paper's A100."""
    kinds = ("standard training", "robust training", "standard inference", "robust inference")
    body = []
    for row in scores.rows:
        shown = []
        for index, kind in enumerate(kinds):
            values = [
                each["ms"] for each in scores.records if each["row"] == row and each["what"] == kind
            ]
            shown.append(f"{np.median(values):.2f}<br>paper {COST[row][index]:g}")
        body.append([row, *shown])
    return (
        Grid(["data", *kinds], body).markdown()
        + "\n\nMedian ms on one thread of this machine; the paper's on one A100."
    )


def pictures(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Images above their predictive bars, one figure a row."""
    out = []
    for row in scores.rows:
        records = [
            each
            for each in scores.records
            if each["row"] == row and each["seed"] == scores.records[0]["seed"]
        ]
        attacks = list(dict.fromkeys(each["attack"] for each in records))
        num = 1 + max(each["index"] for each in records)

        def paint(
            figure: Any, records: list[Any] = records, attacks: list[str] = attacks, num: int = num
        ) -> None:
            grid = figure.subplots(2 * len(attacks), num, squeeze=False)
            for each in records:
                top = 2 * attacks.index(each["attack"])
                image, bars = grid[top][each["index"]], grid[top + 1][each["index"]]
                pixels = np.frombuffer(bytes.fromhex(each["pixels"]), np.uint8)
                side = math.isqrt(len(pixels))
                image.imshow(pixels.reshape(side, side), cmap="gray", vmin=0, vmax=255)
                colours = ["C2" if k == each["y"] else "C3" for k in range(len(each["probs"]))]
                bars.bar(range(len(each["probs"])), each["probs"], color=colours)
                bars.set_ylim(0, 1)
                for axes in (image, bars):
                    axes.set_xticks([])
                    axes.set_yticks([])
                if each["index"] == 0:
                    image.set_ylabel(each["attack"], fontsize=7)

        save_figure(folder / row.lower(), paint, (1.1 * num, 1.6 * len(attacks)))
        out.append(f"## {row}\n\n![{row}]({row.lower()}.svg)")
    return "\n\n".join(out) + "\n\nGreen: the true class."


def verdicts(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Each row's level, and the mandatory checks that failed or did not run."""
    body = []
    for unit in scores.manifest["units"].values():
        records = [
            each
            for each in scores.records
            if (each["row"], each["seed"]) == (unit["row"], unit["seed"])
        ]
        named = {
            status: ", ".join(
                each["check"] for each in records if each["status"] == status and each["mandatory"]
            )
            for status in ("failed", "not run")
        }
        body.append(
            [
                unit["row"],
                str(unit["seed"]),
                unit["level"],
                named["failed"],
                named["not run"],
                unit["verdict"],
            ]
        )
    return Grid(["row", "seed", "level", "failed", "not run", "in words"], body).markdown()


def save_figure(path: Path, paint: Callable[[Any], None], size: tuple[float, float]) -> None:
    """The figure as SVG and as PNG, the same bytes for the same records."""
    import io

    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'advbayes[report]'") from error
    with matplotlib.rc_context(figures.AS_FILE):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        for kind, metadata in (
            ("svg", {"Date": None, "Creator": None}),
            ("png", {"Software": None}),
        ):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
            store.write_bytes(path.with_suffix(f".{kind}"), buffer.getvalue())


VIEWS: dict[str, Callable[[Experiment, Scores, Path], str]] = {
    view.__name__: view
    for view in (
        attack_table,
        pairs,
        readings,
        front,
        curves,
        multi_step,
        effects,
        certified,
        times,
        pictures,
        verdicts,
    )
}

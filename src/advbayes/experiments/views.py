"""Tables and figures, made from records alone; the paper's number beside ours."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from advbayes import metrics, store
from advbayes.checks import extra
from advbayes.evaluation.tables import Grid
from advbayes.experiments.catalogue import TRIVIAL, Experiment, Spec
from advbayes.experiments.reported import CERTIFIED, COST, MULTI_STEP, REPORTED
from advbayes.experiments.scores import MIN_SEEDS, Cell, Scores
from advbayes.report import figures
from advbayes.report.words import METRICS

# What section 4 compares.
PAIRS = [
    pair.split("-") for pair in ("MIX-AT", "NN50-AT", "MIX-OS50", "MIX-NN50", "MIX-BL", "AT-BL")
]
_FRONT = (
    "## One defense for each eps\n\nChosen on validation rows: the lowest attacked RMSE among "
    "those whose clean RMSE there is within 10 % of BL's. The random forest has no gradient: its "
    "attacked RMSE (by queries and transfer) is a lower bound.\n\n"
)


def write_views(folder: Path) -> Path:
    """`table.md` and the figures of a folder of records, anew."""
    document: Any = store.read_document(folder / "manifest.json")
    experiment, scores = Spec.from_json(document["spec"]).experiment(), Scores(folder)
    parts = [f"# {experiment.title}", _preamble(experiment, scores)]
    parts += [VIEWS[name](experiment, scores, folder) for name in experiment.views]
    text = "\n\n".join(part for part in (*parts, experiment.note) if part)
    store.write_bytes(folder / "table.md", f"{text}\n".encode())
    return folder / "table.md"


def _preamble(experiment: Experiment, scores: Scores) -> str:
    made = scores.manifest
    missing = [row for row in experiment.rows if row not in scores.rows]
    return (
        f"Seeds {', '.join(map(str, made['seeds']))}; {made['seconds']:.0f} s in all; commit "
        f"{', '.join(made['commits'])}; {made['machine']}."
    ) + (f" Not run: {', '.join(missing)}." if missing else "")


def _cells(experiment: Experiment, eps: float | None = None) -> dict[str, Cell]:
    """The columns of a table at a radius (absent: the last), of the last split."""
    split, eps = experiment.splits[-1], experiment.radii[-1] if eps is None else eps
    attacks = {name: Cell(split, name, eps) for name in experiment.attacks}
    worst = {"worst": Cell(split, "worst", eps)} if len(attacks) > 1 else {}
    return {"clean": Cell(split, "clean", 0.0), **attacks, **worst}


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return f"## {title}\n\n{Grid(head, rows).markdown()}"


def _named(row: str) -> str:
    return f"*{row}*" if row in TRIVIAL else row


def _summed(scores: Scores, metric: str, row: str, cell: Cell, best: str | None) -> str:
    """Mean, spread and interval, bold where the row is the best."""
    text = str(scores.summary(metric, row, cell))
    return f"**{text}**" if best == row else text


def attack_table(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Rows against attacks at the last radius: mean (sd over seeds) [95 % interval], the paper's
    number below."""
    cells, levels, out = _cells(experiment), _levels(folder), []
    head = ["row", "seeds", *(["audit"] if levels else []), *cells]
    for metric in experiment.metrics:
        best = {name: scores.best(metric, scores.rows, cell) for name, cell in cells.items()}
        body = []
        for row in scores.rows:
            reported = REPORTED.get(experiment.reported, {}).get(metric, {}).get(row, {})
            line = [_named(row), str(len(scores.seeds(row)))]
            line += [levels.get(row, "")] if levels else []
            for name, cell in cells.items():
                text = _summed(scores, metric, row, cell, best[name])
                if name in reported:
                    mean, sd = reported[name]
                    text += f"<br>paper {mean:.2f}" + ("" if sd is None else f" ({sd:.2f})")
                line.append(text)
            body.append(line)
        about = METRICS[metric]
        out.append(_section(f"{about.label} ({about.better} is better)", head, body))
    few = [row for row in scores.rows if len(scores.seeds(row)) < MIN_SEEDS]
    rule = "Bold: better than every other row of its column (paired tests, Holm, 5 %)."
    if few:
        rule += (
            f" Of the {len(few)} rows with fewer than {MIN_SEEDS} seeds none can be bold; a bold "
            "one is ahead of them without a test."
        )
    if "uniform" in scores.rows:
        rule += " Above ln 10 = 2.303 an NLL is worse than the uniform predictor's."
    out.append(
        f"Mean (standard deviation over seeds) [95 % interval]. `worst` is the worst attack for "
        f"each example. {rule}"
    )
    return "\n\n".join(out)


def pairs(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """The comparisons that the paper draws, each with its paired test."""
    drawn = [pair for pair in PAIRS if all(len(scores.seeds(row)) >= MIN_SEEDS for row in pair)]
    if not drawn:
        return ""
    cells = _cells(experiment)
    out = [
        "## Paired differences\n\nMean over seeds, and the one-sided p-value of the sign seen, not "
        "corrected for the number of comparisons."
    ]
    for metric in experiment.metrics:
        body = []
        for first, second in drawn:
            line = [f"{first} - {second}"]
            for cell in cells.values():
                gap = scores.mean(metric, first, cell) - scores.mean(metric, second, cell)
                better = (gap < 0) == (METRICS[metric].better == "lower")
                ahead = (first, second) if better else (second, first)
                line.append(f"{gap:+.3f} (p = {scores.p_better(metric, *ahead, cell):.2g})")
            body.append(line)
        out.append("#" + _section(METRICS[metric].label, ["rows", *cells], body))
    return "\n\n".join(out)


def _levels(folder: Path) -> dict[str, str]:
    """The level of each row in the audit beside the experiment, with a dagger and the failed checks
    below level B."""
    beside = folder.with_name(f"{folder.name}-audit")
    if not (beside / "manifest.json").is_file():
        return {}
    audited, levels = Scores(beside), {}
    for unit in audited.manifest["units"].values():
        row, level = unit["row"], unit["level"]
        failed = [r["check"] for r in audited.of(row) if r["status"] == "failed"]
        levels[row] = level if level in "AB" else f"{level}† {', '.join(failed)}"
    return levels


def readings(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Nine readings of the units, by their distance from the paper's RMSE cells; the nearest one in
    full."""
    about = scores.about(scores.rows[0])
    sd, span = about["y_sd"], about["y_range"]
    factors = {"standardised": 1.0, "min-max": sd / span, "raw": sd}
    if experiment.reported == "california":
        factors["raw"] = sd / 1e5  # the usual unit, 100,000 dollars
    reported, cells = REPORTED[experiment.reported], _cells(experiment, 2.0)
    done = {row.split(", x ")[1] for row in scores.rows}
    names = list(dict.fromkeys(row.split(", x ")[0] for row in scores.rows))

    def measured(metric: str, row: str, units: str, name: str, factor: float) -> float:
        mean = scores.mean(metric, f"{row}, x {units}", cells[name])
        return factor * mean if metric == "rmse" else mean + math.log(factor)

    def distance(x: str, factor: float) -> float:
        said = [
            (row, name, cell[0]) for row in names for name, cell in reported["rmse"][row].items()
        ]
        gaps = [
            abs(math.log(measured("rmse", row, x, name, factor) / mean)) for row, name, mean in said
        ]
        return float(np.mean(gaps))

    distances = {
        (x, y): distance(x, factor)
        for x in ("standardised", "min-max", "raw")
        if x in done
        for y, factor in factors.items()
    }
    nearest = min(distances, key=distances.__getitem__)
    tried = dict.fromkeys(x for x, _ in distances)
    table = Grid(
        ["units of x and eps", *(f"y {y}" for y in factors)],
        [[x, *(f"{distances[x, y]:.2f}" for y in factors)] for x in tried],
    )
    out = [
        "## Which reading comes nearest\n\nMean |ln(measured / reported)| over the paper's RMSE "
        f"cells of {', '.join(names)} (0.69 is a factor of two). The model is trained on y "
        "standardised; only its RMSE is converted."
        f"\n\n{table.markdown()}\n\nNearest: x {nearest[0]}, y {nearest[1]}, "
        f"off by a factor of {math.exp(distances[nearest]):.2f} on average."
    ]
    columns = [name for name in cells if name != "worst"]
    for metric in ("rmse", "nll"):
        body = []
        for row in names:
            line = [row]
            for name, (mean, _) in reported[metric][row].items():
                value = measured(metric, row, nearest[0], name, factors[nearest[1]])
                line.append(f"{value:.2f}<br>paper {mean:.2f}")
            body.append(line)
        out.append(_section(f"{METRICS[metric].label} in that reading", ["row", *columns], body))
    return "\n\n".join(out)


def front(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Clean against attacked RMSE on the test rows; for each eps one defense chosen on the
    validation rows, and tests."""
    known = ("BL", "constant", "least squares", "random forest")
    references = [row for row in known if row in scores.rows]
    defended = [row for row in scores.rows if row not in references]
    radii = experiment.radii
    clean = {split: Cell(split, "clean", 0.0) for split in experiment.splits}
    tested = {eps: Cell("test", "strong", eps) for eps in radii}

    def mean(row: str, cell: Cell) -> float:
        return scores.mean("rmse", row, cell)

    best = {cell: scores.best("rmse", scores.rows, cell) for cell in tested.values()}
    columns = {clean["test"]: None, **best}
    body = [
        [
            _named(row),
            str(len(scores.seeds(row))),
            *(_summed(scores, "rmse", row, cell, first) for cell, first in columns.items()),
        ]
        for row in scores.rows
    ]
    head = ["row", "seeds", "clean", *(f"eps {eps:g}" for eps in radii)]
    out = [_section("RMSE on the test rows, in standard deviations of y", head, body)]
    limit = 1.1 * mean("BL", clean["validation"])
    allowed = [row for row in defended if mean(row, clean["validation"]) <= limit] or defended
    chosen = []
    for eps, cell in tested.items():
        held_out = cell._replace(split="validation")
        pick = min(allowed, key=lambda row, held_out=held_out: mean(row, held_out))  # type: ignore[misc]
        cost = mean(pick, clean["test"]) / mean("BL", clean["test"]) - 1
        p_values = metrics.holm([scores.p_better("rmse", pick, row, cell) for row in references])
        tests = ", ".join(
            f"{other} {mean(other, cell):.3f} (p = {p:.3g})"
            for other, p in zip(references, p_values, strict=True)
        )
        beaten = "yes" if max(p_values) < 0.05 and cost <= 0.1 else "no"
        percent, attacked = f"{100 * cost:+.1f} %", f"{mean(pick, cell):.3f}"
        chosen.append([f"{eps:g}", pick, percent, attacked, tests, beaten])
    head = ["eps", "chosen on validation rows", "clean RMSE against BL", "attacked RMSE"]
    head += ["against (Holm)", "beats all for <= 10 %"]
    out.append(_FRONT + Grid(head, chosen).markdown())
    last = tested[radii[-1]]
    worse = [row for row in defended if mean(row, last) > mean("constant", last)]
    out.append(
        f"At eps {last.eps:g}, {len(worse)} of {len(defended)} defenses are worse than the "
        f"constant: {', '.join(worse) or 'none'}."
    )

    def paint(figure: Any) -> None:
        grid = figure.subplots(1, len(tested), sharex=True)
        for axes, (eps, cell) in zip(grid, tested.items(), strict=True):

            def dots(
                rows: Sequence[str], axes: Any = axes, cell: Cell = cell, **style: Any
            ) -> None:
                x, y = ([mean(row, at) for row in rows] for at in (clean["test"], cell))
                axes.scatter(x, y, **style)

            for start, marker in {"posterior": "o", "point": "^"}.items():
                rows = [row for row in defended if row.startswith(start)]
                dots(rows, marker=marker, s=18, label=start)
            for index, row in enumerate(references):
                dots([row], marker="*", s=70, color=f"C{index + 2}", label=row)
            axes.set_title(f"eps {eps:g}")
            axes.set_xlabel("clean RMSE")
        figure.axes[0].set_ylabel("attacked RMSE")
        figure.axes[-1].legend(fontsize=7)

    save_figure(folder / "front", paint, (3 * len(tested), 3.2))
    out.append("![front](front.svg)")
    return "\n\n".join(out)


def curves(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Each metric over eps, one figure an attack; bands are one standard deviation over seeds."""
    selective = experiment.measure == "selective"
    split = "known" if selective else "test"
    head = ["row", "clean", *(f"eps {eps:g}" for eps in experiment.radii)]
    out = []
    for attack in ("both",) if selective else experiment.attacks:
        points = [
            Cell(split, "clean", 0.0),
            *(Cell(split, attack, eps) for eps in experiment.radii),
        ]
        summaries = {
            metric: {
                row: [scores.summary(metric, row, cell) for cell in points] for row in scores.rows
            }
            for metric in experiment.metrics
        }

        def paint(figure: Any, points: Any = points, summaries: Any = summaries) -> None:
            grid = np.atleast_1d(figure.subplots(1, len(summaries)))
            x = [cell.eps for cell in points]
            for axes, (metric, by_row) in zip(grid, summaries.items(), strict=True):
                for row, each in by_row.items():
                    y = np.array([one.mean for one in each])
                    spread = np.nan_to_num(np.array([one.sd for one in each]))
                    (line,) = axes.plot(x, y, marker=".", label=row)
                    axes.fill_between(x, y - spread, y + spread, alpha=0.15, color=line.get_color())
                axes.set_xlabel("eps (L2)")
                axes.set_ylabel(METRICS[metric].label)
            grid[0].legend(fontsize=7)

        name = {"PGD+": "pgd-plus"}.get(attack, attack.lower())
        save_figure(folder / name, paint, (4.5 * len(summaries), 3.4))
        for metric, by_row in summaries.items():
            table = Grid(head, [[row, *each] for row, each in by_row.items()]).markdown()
            out.append(
                f"## {METRICS[metric].label}, {attack}\n\n![{attack}]({name}.svg)\n\n{table}"
            )
    return "\n\n".join(out)


def multi_step(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """The table of SM-6 beside ours."""
    out = []
    for metric, columns in MULTI_STEP.items():
        body = []
        for index, eps in enumerate(experiment.radii):
            line = [f"{eps:g}"]
            for name, values in columns.items():
                mean = scores.mean(metric, scores.rows[0], Cell("test", name, eps))
                line.append(f"{mean:.2f}<br>paper {values[index]:.2f}")
            body.append(line)
        out.append(_section(f"{METRICS[metric].label} beside the paper's", ["eps", *columns], body))
    return "\n\n".join(out)


def effects(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """What each factor of the factorial is worth: the mean difference between its two levels, over
    the other two."""
    factors = {"posterior": "point", "noisy": "deterministic", "half clean": "all attacked"}
    cells, out = _cells(experiment), []
    for metric in experiment.metrics:
        body = []
        for high, low in factors.items():
            both = [(row, row.replace(high, low)) for row in scores.rows if high in row]
            both = [(a, b) for a, b in both if b in scores.rows]
            line = [f"{high} instead of {low}"]
            for cell in cells.values():
                gaps = [
                    scores.mean(metric, a, cell) - scores.mean(metric, b, cell) for a, b in both
                ]
                line.append(
                    f"{np.mean(gaps):+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f})" if gaps else ""
                )
            body.append(line)
        title = f"Effects on {METRICS[metric].label}: mean and range of the differences"
        out.append(_section(title, ["factor", *cells], body))
    return "\n\n".join(out)


def certified(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Average certified radius (0 where wrong) and certified accuracy, beside published ones."""
    at = (0.5, 1.0, 1.5, 2.0)
    body = []
    for row in scores.rows:
        right = np.array([each["correct"] for each in scores.of(row)])
        radii = right * np.array([each["radius"] for each in scores.of(row)])
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
        line = [row]
        for kind, paper in zip(kinds, COST[row], strict=True):
            values = [each["ms"] for each in scores.of(row) if each["what"] == kind]
            line.append(f"{np.median(values):.2f}<br>paper {paper:g}")
        body.append(line)
    note = "Median ms on one thread of this machine; the paper's on one A100."
    return f"{Grid(['data', *kinds], body).markdown()}\n\n{note}"


def pictures(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Images above their predictive bars, one figure a row."""
    out = []
    for row in scores.rows:
        records = [each for each in scores.of(row) if each["seed"] == scores.records[0]["seed"]]
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
    return "\n\n".join([*out, "Green: the true class."])


def verdicts(experiment: Experiment, scores: Scores, folder: Path) -> str:
    """Each row's level, and the mandatory checks that failed or did not run."""
    body = []
    for unit in scores.manifest["units"].values():
        checks = [r for r in scores.of(unit["row"]) if r["seed"] == unit["seed"] and r["mandatory"]]
        failed, not_run = (
            ", ".join(each["check"] for each in checks if each["status"] == status)
            for status in ("failed", "not run")
        )
        body.append([unit["row"], unit["seed"], unit["level"], failed, not_run, unit["verdict"]])
    return Grid(["row", "seed", "level", "failed", "not run", "in words"], body).markdown()


def save_figure(path: Path, paint: Callable[[Any], None], size: tuple[float, float]) -> None:
    """The figure as SVG and as PNG, the same bytes for the same records."""
    with extra("figures need matplotlib", "report"):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context(figures.AS_FILE):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        for kind, unsaid in (("svg", ("Date", "Creator")), ("png", ("Software",))):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=150, metadata=dict.fromkeys(unsaid))
            store.write_bytes(path.with_suffix(f".{kind}"), buffer.getvalue())


_VIEWS = (attack_table, pairs, readings, front, curves, multi_step, effects, certified, times)
VIEWS: dict[str, Callable[[Experiment, Scores, Path], str]] = {
    view.__name__: view for view in (*_VIEWS, pictures, verdicts)
}

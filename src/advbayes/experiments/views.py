"""Tables and figures, made from records alone; the paper's number beside ours."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from advbayes import metrics, store
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
    "those whose clean RMSE there is within 10 % of BL's, or among all where none is. The random "
    "forest has no gradient: its attacked RMSE (by queries and transfer) is a lower bound.\n\n"
)


View = Iterator[str]  # the paragraphs of a view, in Markdown


def write_views(folder: Path) -> Path:
    """`table.md` and the figures of a folder of records, anew."""
    document: Any = store.read_document(folder / "manifest.json")
    experiment, scores = Spec.from_json(document["spec"]).experiment(), Scores(folder)
    parts = [f"# {experiment.title}", _preamble(experiment, scores)]
    for name in experiment.views:
        parts += VIEWS[name](experiment, scores, folder)
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


def _cells(experiment: Experiment) -> dict[str, Cell]:
    """The columns of a table: the last radius, on the last split."""
    split, eps = experiment.splits[-1], experiment.radii[-1]
    attacks = {name: Cell(split, name, eps) for name in experiment.attacks}
    worst = {"worst": Cell(split, "worst", eps)} if len(attacks) > 1 else {}
    return {"clean": Cell(split, "clean", 0.0), **attacks, **worst}


def _table(head: Sequence[str], rows: Mapping[str, Iterable[object]]) -> str:
    """Rows by their names, a trivial predictor's in italics."""
    names = {row: f"*{row}*" if row in TRIVIAL else row for row in rows}
    return Grid(head, [[names[row], *cells] for row, cells in rows.items()]).markdown()


def _section(title: str, head: Sequence[str], rows: Mapping[str, Iterable[object]]) -> str:
    return f"## {title}\n\n{_table(head, rows)}"


def _beside(ours: str, mean: float, sd: float | None = None) -> str:
    """Our number above the paper's."""
    return f"{ours}<br>paper {mean:.2f}" + ("" if sd is None else f" ({sd:.2f})")


def attack_table(experiment: Experiment, scores: Scores, folder: Path) -> View:
    """Rows against attacks at the last radius, with the paper's numbers."""
    cells, levels = _cells(experiment), _levels(folder)

    def line(metric: str, row: str, best: Mapping[str, str | None]) -> View:
        yield str(len(scores.seeds(row)))
        yield from [levels.get(row, "")] if levels else []
        reported = REPORTED.get(experiment.reported, {}).get(metric, {}).get(row, {})
        for name, cell in cells.items():
            text = scores.text(metric, row, cell, bold=best[name] == row)
            yield _beside(text, *reported[name]) if name in reported else text

    for metric in experiment.metrics:
        best = {name: scores.best(metric, scores.rows, cell) for name, cell in cells.items()}
        head = ["row", "seeds", *(["audit"] if levels else []), *cells]
        title = f"{METRICS[metric].label} ({METRICS[metric].better} is better)"
        yield _section(title, head, {row: line(metric, row, best) for row in scores.rows})
    few = [row for row in scores.rows if len(scores.seeds(row)) < MIN_SEEDS]
    rule = "Bold: better than every other row of its column (paired tests, Holm, 5 %)."
    if few:
        rule += (
            f" Of the {len(few)} rows with fewer than {MIN_SEEDS} seeds none can be bold; a bold "
            "one is ahead of them without a test."
        )
    if "uniform" in scores.rows and "nll" in experiment.metrics:
        nll = scores.mean("nll", "uniform", next(iter(cells.values())))
        uniform = f"ln {math.exp(nll):.0f} = {nll:.3f}"
        rule += f" Above {uniform} an NLL is worse than the uniform predictor's."
    over = "of an accuracy over examples, of the others over seeds"
    if "rmse" in experiment.metrics:
        over, rule = "over seeds", f"{rule} RMSE and NLL are those of the standardised target."
    if any(scores.overlap(row) and len(scores.seeds(row)) > 1 for row in scores.rows):
        rule += " Each seed divides the data anew; intervals and tests over seeds allow for the "
        rule += "rows that the splits share."
    yield (
        f"Mean (standard deviation over seeds) [95 % interval, {over}]. `worst` is the worst "
        f"attack for each example. {rule}"
    )


def pairs(experiment: Experiment, scores: Scores, folder: Path) -> View:
    """The comparisons that the paper draws, each with its paired test."""
    drawn = [pair for pair in PAIRS if all(len(scores.seeds(row)) >= MIN_SEEDS for row in pair)]
    cells = _cells(experiment)

    def difference(metric: str, first: str, second: str, cell: Cell) -> str:
        gap = scores.mean(metric, first, cell) - scores.mean(metric, second, cell)
        better = (gap < 0) == (METRICS[metric].better == "lower")
        ahead = (first, second) if better else (second, first)
        return f"{gap:+.3f} (p = {scores.p_better(metric, *ahead, cell):.2g})"

    if drawn:
        yield (
            "## Paired differences\n\nMean over seeds, and the one-sided p-value of the sign seen, "
            "not corrected for the number of comparisons."
        )
    for metric in experiment.metrics if drawn else ():
        rows = {
            f"{first} - {second}": [difference(metric, first, second, c) for c in cells.values()]
            for first, second in drawn
        }
        yield "#" + _section(METRICS[metric].label, ["rows", *cells], rows)


def _levels(folder: Path) -> dict[str, str]:
    """The level of each row in the audit beside the experiment, below B with its failed checks."""
    beside = folder.with_name(f"{folder.name}-audit")
    if not (beside / "manifest.json").is_file():
        return {}
    audited, levels = Scores(beside), {}
    for unit in audited.manifest["units"].values():
        row, level = unit["row"], unit["level"]
        failed = [r["check"] for r in audited.of(row) if r["status"] == "failed"]
        levels[row] = level if level in "AB" else f"{level}† {', '.join(failed)}"
    return levels


def readings(experiment: Experiment, scores: Scores, folder: Path) -> View:
    """Nine readings of the units, by their distance from the paper's RMSE; the nearest in full."""
    about = scores.about(scores.rows[0])
    sd, span = about["y_sd"], about["y_range"]
    factors = {"standardised": 1.0, "min-max": sd / span, "raw": sd}
    if experiment.reported == "california":
        factors["raw"] = sd / 1e5  # the usual unit, 100,000 dollars
    reported, cells = REPORTED[experiment.reported], _cells(experiment)
    done = {row.split(", x ")[1] for row in scores.rows}
    names = list(dict.fromkeys(row.split(", x ")[0] for row in scores.rows))

    def measured(metric: str, row: str, units: str, name: str, factor: float) -> float:
        mean = scores.mean(metric, f"{row}, x {units}", cells[name])
        return factor * mean if metric == "rmse" else mean + math.log(factor)

    def distance(x: str, factor: float) -> float:
        gaps = [
            abs(math.log(measured("rmse", row, x, name, factor) / mean))
            for row in names
            for name, (mean, _) in reported["rmse"][row].items()
        ]
        return float(np.mean(gaps))

    distances = {
        x: {y: distance(x, factor) for y, factor in factors.items()} for x in factors if x in done
    }
    x, y = min(product(distances, factors), key=lambda units: distances[units[0]][units[1]])
    rows = {name: [f"{each:.2f}" for each in by_y.values()] for name, by_y in distances.items()}
    table = _table(["units of x and eps", *(f"y {name}" for name in factors)], rows)
    yield (
        "## Which reading comes nearest\n\nMean |ln(measured / reported)| over the paper's RMSE "
        f"cells of {', '.join(names)} (0.69 is a factor of two). The model is trained on y "
        "standardised; only its RMSE is converted."
        f"\n\n{table}\n\nNearest: x {x}, y {y}, "
        f"off by a factor of {math.exp(distances[x][y]):.2f} on average."
    )
    columns = [name for name in cells if name != "worst"]
    for metric in ("rmse", "nll"):
        rows = {
            row: [
                _beside(f"{measured(metric, row, x, name, factors[y]):.2f}", mean)
                for name, (mean, _) in reported[metric][row].items()
            ]
            for row in names
        }
        yield _section(f"{METRICS[metric].label} in that reading", ["row", *columns], rows)


def front(experiment: Experiment, scores: Scores, folder: Path) -> View:
    """Clean against attacked RMSE; for each eps one defense chosen on the validation rows."""
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
    rows = {
        row: [
            str(len(scores.seeds(row))),
            *(scores.text("rmse", row, cell, bold=top == row) for cell, top in columns.items()),
        ]
        for row in scores.rows
    }
    head = ["row", "seeds", "clean", *(f"eps {eps:g}" for eps in radii)]
    yield _section("RMSE on the test rows, in standard deviations of y", head, rows)
    limit = 1.1 * mean("BL", clean["validation"])
    allowed = [row for row in defended if mean(row, clean["validation"]) <= limit] or defended
    chosen = {}
    for eps, cell in tested.items():
        attacked = {row: mean(row, cell._replace(split="validation")) for row in allowed}
        pick = min(attacked, key=attacked.__getitem__)
        cost = mean(pick, clean["test"]) / mean("BL", clean["test"]) - 1
        p_values = metrics.holm([scores.p_better("rmse", pick, row, cell) for row in references])
        tests = ", ".join(
            f"{other} {mean(other, cell):.3f} (p = {p:.3g})"
            for other, p in zip(references, p_values, strict=True)
        )
        beaten = "yes" if max(p_values) < 0.05 and cost <= 0.1 else "no"
        numbers = f"{100 * cost:+.1f} %", f"{mean(pick, cell):.3f}"
        chosen[f"{eps:g}"] = [pick, *numbers, tests, beaten]
    head = ["eps", "chosen on validation rows", "clean RMSE against BL", "attacked RMSE"]
    head += ["against (Holm)", "beats all for <= 10 %"]
    yield _FRONT + _table(head, chosen)
    last = tested[radii[-1]]
    good = [row for row in defended if mean(row, last) <= mean("constant", last)]
    yield (
        f"At eps {last.eps:g}, {len(defended) - len(good)} of {len(defended)} defenses are worse "
        f"than the constant{', all but ' if good else ''}{', '.join(good)}."
    )
    with saved_figure(folder / "front", (3 * len(tested), 3.2)) as figure:
        grid = figure.subplots(1, len(tested), sharex=True)
        for axes, (eps, cell) in zip(grid, tested.items(), strict=True):
            for kind, marker in {"posterior": "o", "point": "^"}.items():
                rows_of = [row for row in defended if row.startswith(kind)]
                x, y = ([mean(row, at) for row in rows_of] for at in (clean["test"], cell))
                axes.scatter(x, y, marker=marker, s=18, label=kind)
            for i, row in enumerate(references, 2):
                at = mean(row, clean["test"]), mean(row, cell)
                axes.scatter(*at, marker="*", s=70, color=f"C{i}", label=row)
            axes.set_title(f"eps {eps:g}")
            axes.set_xlabel("clean RMSE")
        grid[0].set_ylabel("attacked RMSE")
        grid[-1].legend(fontsize=7)
    yield "![front](front.svg)"


def limits(experiment: Experiment, scores: Scores, folder: Path) -> View:
    """The least attacked RMSE that is possible, for each clean RMSE that is allowed."""
    head = ["clean RMSE at most", *(f"eps {eps:g}" for eps in experiment.radii)]
    with saved_figure(folder / "limits", (3 * len(scores.rows), 3.2)) as figure:
        grid = figure.subplots(1, len(scores.rows), sharey=True, squeeze=False)[0]
        for axes, row in zip(grid, scores.rows, strict=True):
            floors = {(each["clean"], each["radius"]): each["floor"] for each in scores.of(row)}
            allowed = list(dict.fromkeys(clean for clean, _ in floors))
            rows = {
                "any" if clean is None else f"{clean:g}": [
                    f"{floors[clean, eps]:.3f}" for eps in experiment.radii
                ]
                for clean in allowed
            }
            num = scores.about(row)["num_rows"]
            yield _section(
                f"{row.capitalize()} ({num} rows), in standard deviations of y", head, rows
            )
            for eps in experiment.radii:
                curve = [(clean, floors[clean, eps]) for clean in allowed if clean is not None]
                axes.plot(*zip(*curve, strict=True), label=f"eps {eps:g}")
            axes.axhline(1, color="grey", linestyle=":", label="a constant")
            axes.set_title(row.capitalize())
            axes.set_xlabel("clean RMSE")
        grid[0].set_ylabel("attacked RMSE, at least")
        grid[-1].legend(fontsize=7)
    yield "![limits](limits.svg)"


def curves(experiment: Experiment, scores: Scores, folder: Path) -> View:
    """Each metric over eps, one figure an attack; bands are one standard deviation over seeds."""
    selective = experiment.measure == "selective"
    split = "known" if selective else "test"
    head = ["row", "clean", *(f"eps {eps:g}" for eps in experiment.radii)]
    for attack in ("both",) if selective else experiment.attacks:
        attacked = [Cell(split, attack, eps) for eps in experiment.radii]
        points = [Cell(split, "clean", 0.0), *attacked]
        summaries = {
            metric: {
                row: [scores.summary(metric, row, cell) for cell in points] for row in scores.rows
            }
            for metric in experiment.metrics
        }
        name = {"PGD+": "pgd-plus"}.get(attack, attack.lower())
        with saved_figure(folder / name, (4.5 * len(summaries), 3.4)) as figure:
            grid = figure.subplots(1, len(summaries), squeeze=False)[0]
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
        for metric, by_row in summaries.items():
            picture = f"![{attack}]({name}.svg)"
            yield f"## {METRICS[metric].label}, {attack}\n\n{picture}\n\n{_table(head, by_row)}"


def multi_step(experiment: Experiment, scores: Scores, folder: Path) -> View:
    """The table of SM-6 beside ours."""
    row = scores.rows[0]
    for metric, columns in MULTI_STEP.items():
        rows = {
            f"{eps:g}": [
                _beside(f"{scores.mean(metric, row, Cell('test', name, eps)):.2f}", values[index])
                for name, values in columns.items()
            ]
            for index, eps in enumerate(experiment.radii)
        }
        yield _section(f"{METRICS[metric].label} beside the paper's", ["eps", *columns], rows)


def effects(experiment: Experiment, scores: Scores, folder: Path) -> View:
    """The mean difference between the two levels of each factor, over the other two."""
    factors = {"posterior": "point", "noisy": "deterministic", "half clean": "all attacked"}
    cells = _cells(experiment)

    def effect(metric: str, high: str, low: str, cell: Cell) -> str:
        pairs = {row: row.replace(high, low) for row in scores.rows if high in row}
        gaps = [
            scores.mean(metric, row, cell) - scores.mean(metric, other, cell)
            for row, other in pairs.items()
            if other in scores.rows
        ]
        return f"{np.mean(gaps):+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f})" if gaps else ""

    for metric in experiment.metrics:
        rows = {
            f"{high} instead of {low}": [effect(metric, high, low, cell) for cell in cells.values()]
            for high, low in factors.items()
        }
        title = f"Effects on {METRICS[metric].label}: mean and range of the differences"
        yield _section(title, ["factor", *cells], rows)


def certified(experiment: Experiment, scores: Scores, folder: Path) -> View:
    """Average certified radius (0 where wrong) and certified accuracy, beside published ones."""
    at, rows = (0.5, 1.0, 1.5, 2.0), {}
    for row in scores.rows:
        right = np.array([each["correct"] for each in scores.of(row)])
        radii = right * np.array([each["radius"] for each in scores.of(row)])
        shares = [((radii >= radius) & right).mean() for radius in at]
        rows[row] = [f"{each:.3f}" for each in (radii.mean(), *shares)]
    for name, (radius, share) in CERTIFIED.items():
        rows[f"*{name} (published)*"] = [f"{radius:.2f}", "", "", "", f"{share:.2f}"]
    yield _table(["row", "average radius", *(f"accuracy at {radius:g}" for radius in at)], rows)


def times(experiment: Experiment, scores: Scores, folder: Path) -> View:
    """Median ms of a training step (batch of 128) and of one answer, beside the paper's A100."""
    kinds = ("standard training", "robust training", "standard inference", "robust inference")

    def beside(row: str, kind: str, paper: float) -> str:
        values = [each["ms"] for each in scores.of(row) if each["what"] == kind]
        return f"{np.median(values):.2f}<br>paper {paper:g}"

    rows = {row: map(partial(beside, row), kinds, COST[row]) for row in scores.rows}
    yield _table(["data", *kinds], rows)
    yield "Median ms on one thread of this machine; the paper's on one A100."


def pictures(experiment: Experiment, scores: Scores, folder: Path) -> View:
    """Images above their predictive bars, one figure a row."""
    for row in scores.rows:
        records = [each for each in scores.of(row) if each["seed"] == scores.records[0]["seed"]]
        attacks = list(dict.fromkeys(each["attack"] for each in records))
        num = 1 + max(each["index"] for each in records)
        with saved_figure(folder / row.lower(), (1.1 * num, 1.6 * len(attacks))) as figure:
            ticks: Any = {"xticks": [], "yticks": []}
            grid = figure.subplots(2 * len(attacks), num, squeeze=False, subplot_kw=ticks)
            for each in records:
                top = 2 * attacks.index(each["attack"])
                image, bars = grid[top : top + 2, each["index"]]
                pixels = np.frombuffer(bytes.fromhex(each["pixels"]), np.uint8)
                side = math.isqrt(len(pixels))
                image.imshow(pixels.reshape(side, side), cmap="gray", vmin=0, vmax=255)
                colours = ["C2" if k == each["y"] else "C3" for k in range(len(each["probs"]))]
                bars.bar(range(len(each["probs"])), each["probs"], color=colours)
                bars.set_ylim(0, 1)
                if each["index"] == 0:
                    image.set_ylabel(each["attack"], fontsize=7)
        yield f"## {row}\n\n![{row}]({row.lower()}.svg)"
    yield "Green: the true class."


def verdicts(experiment: Experiment, scores: Scores, folder: Path) -> View:
    """Each row's level, and the mandatory checks that failed or did not run."""
    body = []
    for unit in scores.manifest["units"].values():
        checks = [r for r in scores.of(unit["row"]) if r["seed"] == unit["seed"] and r["mandatory"]]
        failed, not_run = (
            ", ".join(each["check"] for each in checks if each["status"] == status)
            for status in ("failed", "not run")
        )
        body.append([unit["row"], unit["seed"], unit["level"], failed, not_run, unit["verdict"]])
    yield Grid(["row", "seed", "level", "failed", "not run", "in words"], body).markdown()


@contextmanager
def saved_figure(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """A figure to paint, saved as SVG and as PNG: the same bytes for the same records."""
    with figures.canvas(size, figures.AS_FILE) as figure:
        yield figure
        for kind, unsaid in (("svg", ("Date", "Creator")), ("png", ("Software",))):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=150, metadata=dict.fromkeys(unsaid))
            store.write_bytes(path.with_suffix(f".{kind}"), buffer.getvalue())


_VIEWS = (attack_table, pairs, readings, front, limits, curves, multi_step, effects, certified)
VIEWS: dict[str, Callable[[Experiment, Scores, Path], View]] = {
    view.__name__: view for view in (*_VIEWS, times, pictures, verdicts)
}

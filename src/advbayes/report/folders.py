"""Reports of run folders, gathered from what is in them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advbayes import store
from advbayes.checks import InputError, counted
from advbayes.evaluation import Cell, Evaluation, load_evaluation
from advbayes.evaluation.files import Block, Folder
from advbayes.evaluation.result import CLEAN
from advbayes.report.pictures import Gallery, is_image, make_gallery
from advbayes.report.text import clean
from advbayes.report.write import ReportPaths, command_line, write_report

if TYPE_CHECKING:
    from torch import Tensor

    from advbayes.runs import Run, Trained

SHOWN, SHOWN_TABLES = 6, 4  # examples of the gallery


def report_run(
    run_folder: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    trusted: bool = False,
    num_thetas: int = 20,
) -> ReportPaths:
    """The report of one run, in `out` or RUN/report: evaluations, audit, history, configuration.

    A network with code of its own is built only when `trusted`; else the gallery is left out.

    >>> report_run("absent")
    Traceback (most recent call last):
    ...
    advbayes.runs.config.ConfigError: absent: wanted a run folder (made by advbayes train), got nothing (no such folder)
    """  # noqa: E501
    where = Path(run_folder) / "report" if out is None else Path(out)
    return report_runs([run_folder], where, title=title, trusted=trusted, num_thetas=num_thetas)


def report_runs(
    run_folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    title: str | None = None,
    trusted: bool = False,
    num_thetas: int = 20,
) -> ReportPaths:
    """One report that compares several runs; they must have been evaluated on the same examples.

    >>> report_runs([], "report")
    Traceback (most recent call last):
    ...
    advbayes.checks.InputError: run_folders must hold at least one run folder, got none
    """
    if not run_folders:
        raise InputError("run_folders must hold at least one run folder, got none")
    from advbayes.runs import Run, load_trained

    runs = [Run.open(folder) for folder in run_folders]
    names = _names(runs)
    evaluations = {name: _evaluations(run, name) for name, run in names.items()}
    evaluation = merged([one for several in evaluations.values() for one in several])
    for name, several in evaluations.items():
        if not any(_comparable(one, evaluation) for one in several):
            raise InputError(
                f"RUN must have been evaluated on the same examples, and by attackers of the same "
                f"reach, as the others, got {names[name].path}; make a report of it alone, or "
                f"evaluate it as them"
            )
    trained = {
        name: load_trained(run.path, trusted=trusted)
        for name, run in names.items()
        if run.model_path.exists() and (trusted or ":" not in run.config.network)
    }
    example = next(iter(trained.values()), None)
    datasets = sorted({Path(run.config.data).stem for run in runs})
    audits: dict[str, Any] = {
        name: store.read_document(run.path / "audit.json")
        for name, run in names.items()
        if (run.path / "audit.json").is_file()
    }
    threat: dict[Any, Any] = {} if example is None else _reach(example, evaluation)
    match list(audits.values()):
        case [{"threat_model": {**beside_the_verdict}}, *_]:
            threat = beside_the_verdict | threat
    if len(runs) == 1 and audits:
        audits = {evaluation.predictors[0]: next(iter(audits.values()))}
    return write_report(
        out,
        title=title or f"{', '.join(names)} on {', '.join(datasets)}",
        left_out=_left_out(evaluation, evaluations),
        evaluation=evaluation,
        audit=audits,
        threat_model=threat,
        run={name: run.described() for name, run in names.items()},
        history=histories(names),
        gallery=_gallery(evaluations, trained, evaluation, num_thetas),
        class_names=example.class_names if example else (),
        feature_names=example.feature_names if example else (),
        scaling=example.scaling if example else None,
        reproduce={"commands": _commands(names), "folder": ", ".join(str(r.path) for r in runs)},
    )


def histories(runs: Mapping[str, Run]) -> dict[str, dict[str, list[Any]]]:
    """The bound at each step of each run, as `write_report` takes it."""
    read = {name: run.history.read() for name, run in runs.items()}
    return {name: {"bound": [row.get("bound") for row in rows]} for name, rows in read.items()}


def _reach(trained: Trained, evaluation: Evaluation) -> dict[str, Any]:
    """The features out of the attacker's reach, and the multiples of eps of the others."""
    fixed, budgets, radii = _asked(evaluation)
    try:
        eps = max(map(float, radii)) if budgets else trained.eps
        mask, scale = trained.reach(eps, fixed, budgets)
    except ValueError as error:
        wanted = "the command of an evaluation of this run"
        raise store.StoreError(evaluation.folder or "", wanted, f"{error!s:.200}") from None
    names, threat = trained.feature_names, dict[str, Any]()
    if mask is not None and mask.numel() == len(names) and not bool(mask.all()):
        free = mask.flatten().tolist()
        threat["fixed"] = [clean(name) for name, one in zip(names, free, strict=True) if not one]
    if scale is not None and scale.numel() == len(names):
        threat["multiples"] = scale.flatten().tolist()
    return threat


def _asked(evaluation: Evaluation) -> tuple[tuple[str, ...], ...]:
    """The fixed features, the budgets of features and, with these, the radii of an evaluation."""
    from advbayes.runs.folder import REACH, flags_of

    asked = [] if evaluation.folder is None else flags_of(evaluation.folder)
    fixed, budgets, radii = (
        tuple(value for name, value in asked if name == flag) for flag in (*REACH, "--eps")
    )
    return fixed, budgets, radii if budgets else ()


def _left_out(whole: Evaluation, by_run: Mapping[str, Sequence[Evaluation]]) -> list[str]:
    """Evaluations that cannot stand in one table with the others."""
    return [
        f"{name}: {one.folder.name} ({counted(one.config['num'])})"
        for name, evaluations in by_run.items()
        for one in evaluations
        if one.folder is not None and not _comparable(one, whole)
    ]


def _comparable(one: Evaluation, other: Evaluation) -> bool:
    """Whether two evaluations are of the same examples and of attackers of the same reach."""
    same = one.config.get("data") == other.config.get("data") and one.task == other.task
    return same and _asked(one) == _asked(other)


def _names(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by their defense; by folder where two have the same."""
    by_defense: dict[str, Run] = {run.config.defense: run for run in runs}
    by_folder = {run.path.resolve().name: run for run in runs}
    whole = (names for names in (by_defense, by_folder) if len(names) == len(runs))
    return next(whole, {str(run.path): run for run in runs})


def _evaluations(run: Run, name: str) -> list[Evaluation]:
    """The evaluations of a run, whose predictors carry its name."""
    if not run.evaluations:
        wanted = f"at least one evaluation in the run (`advbayes evaluate {run.path}` makes one)"
        raise store.StoreError(run.path, wanted=wanted, got="none")
    return [
        _renamed(load_evaluation(folder), run.config.defense, name) for folder in run.evaluations
    ]


def _renamed(evaluation: Evaluation, old: str, new: str) -> Evaluation:
    def renamed(cell: Cell) -> Cell:
        if cell.predictor in evaluation.trivial:
            return cell
        return replace(cell, predictor=cell.predictor.replace(old, new, 1))

    cells = {renamed(cell): rows for cell, rows in evaluation.cells.items()}
    return replace(evaluation, cells=cells)


def merged(evaluations: Sequence[Evaluation]) -> Evaluation:
    """One evaluation of several on the same examples and of the same reach; else of the largest.

    A cell that two of them have is that of the later one.
    """

    def size(one: Evaluation) -> tuple[int, bool]:
        return int(one.config.get("num", 0)), not any(_asked(one))

    largest = max(evaluations, key=size)
    same = [one for one in evaluations if _comparable(one, largest)]
    cells: dict[Cell, Any] = {}
    trivial: dict[str, None] = {}
    config = dict(largest.config)
    for one in same:
        trivial |= dict.fromkeys(one.trivial)
        for key in ("attacks", "losses", "iterations", "rescored"):
            config[key] = {**config.get(key, {}), **one.config.get(key, {})}
        cells |= one.cells
    order = sorted(cells, key=lambda cell: cell.predictor in trivial)
    ordered = {cell: cells[cell] for cell in order}
    return Evaluation(largest.task, ordered, tuple(trivial), config, largest.folder)


def _commands(names: Mapping[str, Run]) -> list[str]:
    """The commands that made the runs and their evaluations, as far as the folders know them."""
    from advbayes.runs.folder import command_of

    lines = []
    for run in names.values():
        if command := (run.manifest.get("started") or {}).get("command"):
            lines.append(command_line(command))
        without = f"advbayes evaluate {shlex.quote(str(run.path))}"
        known = {folder.name: command_of(folder) for folder in run.evaluations}
        lines += dict.fromkeys(
            command_line(words) or f"{without}  # {name}: with which options was not kept"
            for name, words in known.items()
        )
    return lines


def _gallery(
    evaluations: Mapping[str, Sequence[Evaluation]],
    trained: Mapping[str, Trained],
    whole: Evaluation,
    num_thetas: int,
) -> Gallery | None:
    """The first test examples under the strongest attack of each run, from the saved arrays."""
    attack, eps = label = _strongest(whole)
    predictors, attacked, clean = {}, {}, None
    for name, model in trained.items():
        for evaluation in evaluations[name]:
            arrays = _arrays(evaluation, label) if _comparable(evaluation, whole) else None
            if arrays is not None:
                clean, attacked[name] = arrays
                predictors[name] = model.predict(num_thetas)
    if clean is None:
        return None
    num = SHOWN if is_image(tuple(clean[0].shape[1:])) else SHOWN_TABLES
    return make_gallery(predictors, *clean, {attack: attacked}, eps=eps, num=num)


def _strongest(evaluation: Evaluation) -> tuple[str, float | None]:
    """The attack and radius that hurt the first predictor most."""
    first = evaluation.predictors[0]
    cells = [c for c in evaluation.cells if c.predictor == first and c.attack != CLEAN]
    radius = max((c.eps for c in cells if c.eps is not None), default=None)
    at = [c for c in cells if c.eps == radius] or cells
    name = "correct" if evaluation.task == "classification" else "log_prob"
    worst = min(at, key=lambda c: (float(evaluation.cells[c][name].mean()), c.attack))
    return worst.attack, worst.eps


def _arrays(
    evaluation: Evaluation, label: tuple[str, float | None]
) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
    """(x, y) and x_adv of the first block of an attack on the first predictor."""
    if evaluation.folder is None:
        return None
    folder, trivial = Folder(evaluation.folder), evaluation.config.get("trivial", [])
    first: dict[tuple[str, float | None], Block] = {}
    for block, _ in folder.saved():
        if block.start == 0 and block.cell.predictor not in trivial:
            first.setdefault(block.job, block)
    if label not in first or (CLEAN, 0.0) not in first:
        return None
    return folder.read_array(first[CLEAN, 0.0]), folder.read_array(first[label])[0]

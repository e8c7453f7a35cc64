"""`evaluate`: attack, predict, score -> one record per example; written as they are made, resumed
where they stopped."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import checks, distributed
from advbayes.adapters import with_estimators
from advbayes.attacks import nll
from advbayes.attacks.gradients import one_blind_warning
from advbayes.attacks.parts import (
    ball_of,
    check_rows,
    loss_names,
    losses_of,
    on_rows,
    restarts_of,
    steps_of,
    text_of,
    with_eps,
)
from advbayes.attacks.suite import for_task
from advbayes.evaluation.contents import contents_of
from advbayes.evaluation.files import Block, Folder, data_hash, fingerprint
from advbayes.evaluation.inputs import (
    Data,
    Task,
    as_radii,
    as_targets,
    as_tensors,
    check_predictor,
    dtype_of,
    in_shape_of,
    is_stochastic,
    warn_units,
)
from advbayes.evaluation.measuring import attacked, batches, keyed, scored, seeded
from advbayes.evaluation.result import CLEAN, WORST, Cell, Evaluation, records_of
from advbayes.evaluation.scoring import Columns, column_names, joined
from advbayes.likelihoods import predicts_classes
from advbayes.metrics import constant, majority, uniform
from advbayes.progress import Progress
from advbayes.store import Lock, StoreError
from advbayes.types import Attack, Loss, Predictor


def evaluate(
    predict: Predictor | Mapping[str, Predictor] | Any,  # or a fitted estimator
    data: Data | Any,
    *,
    attacks: Mapping[str, Attack],
    radii: Sequence[float] | None = None,
    train_y: Any = None,  # (N,), (N, 1) or (N, D), a tensor, an array or a list
    batch_size: int = 256,
    seed: int = 0,
    rescore: int = 10,
    interval_level: float = 0.9,
    out: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Evaluation:
    """Every predictor under every attack at every radius, scored example by example.

    - A predictor may be a fitted scikit-learn estimator or pipeline: `data` are then its (X, y),
      and eps is in the units of X. One whose answers differ from call to call is scored `rescore`
      times at each final point.
    - `radii` repeats each attack at each eps (security curves); by default each keeps its own.
    - Trivial predictors are added from `train_y` (absent: from y).
    - A loss with one entry for each example has them for all of the data.
    - With `out`, records and adversarial arrays are on disk before the next batch starts. The same
      call resumes at the first missing batch: randomness is keyed by (seed, predictor, attack, eps,
      batch). The records name the SHA-256 of every array; a missing or altered one is computed
      anew, and refused if it is not the same.

    Under a process group (torchrun) the ranks take the batches in turn, all return the whole
    evaluation, and the first one alone writes: the files are those of one process, to the byte.

    >>> from torch.distributions import Categorical
    >>> from advbayes import L2, pgd
    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> data = torch.tensor([[2.0], [-0.3]]), torch.tensor([0, 1])
    >>> report = evaluate(predict, data, attacks={"PGD": pgd(L2(1.0), steps=5)}, radii=(0.1, 1.0))
    >>> [(eps, accuracy.value) for eps, accuracy in report.curve("accuracy")]
    [(0.0, 1.0), (0.1, 1.0), (1.0, 0.5)]
    """
    predict, data, train_y = with_estimators(predict, data, train_y)
    predictors = dict(predict) if isinstance(predict, Mapping) else {"predict": predict}
    x, y = as_tensors(data, dtype_of(*predictors.values()))
    checks.count("batch_size", batch_size)
    checks.count("seed", seed, low=0)
    checks.count("rescore", rescore)
    checks.number("interval_level", interval_level, low=0, high=1, open_low=True, open_high=True)
    budgets = None if radii is None else as_radii(radii)
    jobs = _jobs(attacks, budgets, x)
    # predictors without a generator of their own draw from the global stream
    with seeded(seed, "checks", 0), torch.no_grad():
        task = _checked(predictors, x, y)
        predictions = [each(x[:2]) for each in predictors.values()]
        y = in_shape_of(predictions, y)
        seen = y if train_y is None else as_targets("train_y", train_y)
        trivial = _trivial(predictors, predictions[0], seen)
        repeats = {
            name: rescore if is_stochastic(each, x) else 1 for name, each in predictors.items()
        }

    def marks(each: Predictor, name: str = "") -> list[float]:
        with seeded(seed, f"{name}/fingerprint/global", 0):
            return fingerprint(keyed(each, seed, "fingerprint", 0), x[:4])

    config: dict[str, Any] = {
        "task": task,
        "seed": seed,
        "num": len(x),
        "batch_size": batch_size,
        "interval_level": interval_level,
        "rescored": repeats,
        "trivial": list(trivial),
        "attacks": {name: text_of(attack) for name, attack in attacks.items()},
        "contents": {name: contents_of(attack, marks) for name, attack in attacks.items()},
        "losses": {name: list(loss_names(attack)) for name, attack in attacks.items()},
        "iterations": {
            name: (steps_of(attack) or 0) * restarts_of(attack) for name, attack in attacks.items()
        },
        "radii": None if budgets is None else list(budgets),
        "data": data_hash(x, y),
        "predictors": {name: marks(each, name) for name, each in (predictors | trivial).items()},
    }
    blocks = _blocks(predictors, jobs, trivial, len(x), batch_size)
    scorer = Scorer(task, seed, interval_level, repeats)

    def measure(block: Block) -> dict[str, Tensor]:
        each, attack = (predictors | trivial)[block.cell.predictor], jobs.get(block.job)
        return scorer.measured(each, attack, x, y, block)

    folder = None if out is None else Path(out)
    cells = _measured(blocks, measure, y, config, folder, progress)
    _warn_unchanged(cells, attacks, x)
    return Evaluation(task, cells, tuple(trivial), config, folder)


def _measured(
    blocks: Sequence[Block],
    measure: Callable[[Block], dict[str, Tensor]],
    y: Tensor,
    config: dict[str, Any],
    out: Path | None,
    progress: bool | None,
) -> dict[Cell, Columns]:
    """The columns of every cell, measured block by block unless the folder has them already; what
    is new is on disk before the next block starts."""
    group, task = distributed.ranks(), config["task"]
    cells: dict[Cell, list[Columns]] = {}
    with ExitStack() as stack:
        folder = Folder(out) if out is not None and group.is_first else None
        done: dict[int, tuple[Block, Columns]] = {}

        def opened() -> dict[str, Tensor]:
            """The blocks whose columns are there already, and those that are left to make."""
            if folder is not None:
                folder.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(Lock(folder.path))
                folder.open(config)
                done.update(_resumed(folder, blocks, task))
                folder.log.keep(sum(block.stop - block.start for block, _ in done.values()))
            whole = {n for n, (block, _) in done.items() if folder is None or folder.holds(block)}
            left = [block.number for block in blocks if block.number not in whole]
            numbers = {"kept": list(done), "left": left}
            return {key: torch.tensor(n, device="cpu").long() for key, n in numbers.items()}

        def saved(number: int) -> Columns:
            return dict(group.on_first(lambda: done[number][1]))

        found = group.on_first(opened)
        kept, left = set(found["kept"].tolist()), set(found["left"].tolist())
        bar = Progress("evaluate", len(blocks), group.shown(progress), start=len(kept))
        stack.enter_context(bar)
        stack.enter_context(one_blind_warning())
        made = group.mapped(measure, [block for block in blocks if block.number in left])
        for block in blocks:
            rows = saved(block.number) if block.number in kept else None
            if block.number in left:
                new = dict(next(made))
                x_adv, array = new.pop("x_adv"), ""
                if folder is not None:
                    before, _ = done.get(block.number, (block, None))
                    array = folder.write_array(before, x_adv, y[block.rows])
                if rows is None:
                    rows = new
                    if folder is not None:
                        at = (block.start, block.number, array)
                        folder.log.append(*records_of(block.cell, rows, config, *at))
                    bar.advance(f"{block.cell.predictor}, {block.cell.attack}")
            assert rows is not None
            cells.setdefault(block.cell, []).append(rows)
    return {cell: joined(parts, task) for cell, parts in cells.items()}


class UnchangedWarning(UserWarning):
    """An attack that changed no input: its row is the clean one under another name."""


def _warn_unchanged(
    cells: Mapping[Cell, Columns], attacks: Mapping[str, Attack], x: Tensor
) -> None:
    for cell, rows in cells.items():
        if cell.attack == CLEAN or cell.eps == 0 or bool(rows["norm"].any()):
            continue
        # nothing to do where all are wrong already
        clean = cells[Cell(cell.predictor, CLEAN, 0.0)]
        if bool(clean.get("correct", torch.ones(1)).any()):
            ball = ball_of(attacks[cell.attack]) if cell.attack in attacks else None
            why = "is its ball in the units of the data, and does the predictor have gradients?"
            if ball is not None and not bool(ball.within_reach(torch.ones_like(x), x).any()):
                why = "its ball keeps every feature from it"
            warnings.warn(
                f"attack {cell.attack!r} changed no input of {cell.predictor!r} (eps = "
                f"{cell.eps}): what it leaves standing says nothing; {why}",
                UnchangedWarning,
                stacklevel=3,
            )


def _jobs(
    attacks: Mapping[str, Attack], radii: tuple[float, ...] | None, x: Tensor
) -> dict[tuple[str, float | None], Attack]:
    """Name and radius -> attack, checked against the data."""
    if not isinstance(attacks, Mapping) or not attacks:
        raise checks.InputError(
            "attacks must be a mapping of at least one named attack", got=attacks
        )
    jobs: dict[tuple[str, float | None], Attack] = {}
    warned: set[tuple[type, float]] = set()
    for name, attack in attacks.items():
        if name in (CLEAN, WORST):
            raise checks.InputError(
                f"attacks must not be named {CLEAN!r} or {WORST!r}: these rows are always there"
            )
        checks.function(f"attacks[{name!r}]", attack, "an attack such as pgd(ball)")
        check_rows(attack, len(x), f"attacks[{name!r}]")
        for each in (attack,) if radii is None else (with_eps(attack, eps) for eps in radii):
            ball = ball_of(each)
            jobs[name, None if ball is None else float(ball.eps)] = each
            if ball is not None:
                ball.check(x)
                if (type(ball), ball.eps) not in warned:
                    warn_units(ball, x, f"attacks[{name!r}]")
                    warned.add((type(ball), ball.eps))
    return jobs


def _checked(predictors: Mapping[str, Predictor], x: Tensor, y: Tensor) -> Task:
    if not predictors:
        raise checks.InputError(
            "predict must be a predictor or a mapping of at least one, got none"
        )
    tasks = {name: check_predictor(each, x, y, name) for name, each in predictors.items()}
    if len(set(tasks.values())) > 1:
        raise checks.InputError(f"predict must hold predictors of one task, got {tasks}")
    if any("/" in name for name in predictors):
        raise checks.InputError(f"names of predictors must not hold '/', got {sorted(predictors)}")
    return next(iter(tasks.values()))


def _trivial(
    predictors: Mapping[str, Predictor], prediction: Distribution, train_y: Tensor
) -> dict[str, Predictor]:
    """Rows that any result must beat."""
    trivial: dict[str, Predictor]
    if predicts_classes(prediction):
        num = prediction.logits.shape[-1]
        trivial = {"uniform": uniform(num), "majority": majority(train_y.reshape(-1), num)}
    else:
        trivial = {"constant": constant(train_y)}
    clash = sorted(trivial.keys() & predictors.keys())
    if clash:
        raise checks.InputError(f"predictors must not be named as the trivial ones, got {clash}")
    return trivial


def _blocks(
    predictors: Mapping[str, Predictor],
    jobs: Mapping[tuple[str, float | None], Attack],
    trivial: Mapping[str, Predictor],
    num: int,
    batch_size: int,
) -> list[Block]:
    clean = (CLEAN, 0.0)
    cells = [Cell(name, *job) for name in predictors for job in (clean, *jobs)]
    cells += [Cell(name, *clean) for name in trivial]
    parts = enumerate(product(cells, batches(num, batch_size)))
    return [Block(number, cell, rows.start, rows.stop) for number, (cell, rows) in parts]


@dataclass(frozen=True)
class Scorer:
    """How the blocks of an evaluation are scored, the first time and again from the files; draws
    depend on the seed and the block's key alone."""

    task: Task
    seed: int
    interval_level: float
    rescored: Mapping[str, int]  # by predictor; absent: once

    def measured(
        self, predict: Predictor, attack: Attack | None, x: Tensor, y: Tensor, block: Block
    ) -> dict[str, Tensor]:
        """A block's scores and, as "x_adv", its array."""
        rows = block.rows
        x_adv, ball = x[rows], None
        loss: Loss = nll
        if attack is not None:
            x_adv = attacked(predict, attack, x, y, rows, seed=self.seed, key=block.key)
            checks.finite(f"the adversarial inputs of {block.cell.attack!r}", x_adv)
            loss, ball = _recorded_loss(on_rows(attack, rows), self.task), ball_of(attack)
        columns = self.scored(predict, x_adv, y[rows], block, loss)
        change = x_adv - x[rows]
        plain = torch.linalg.vector_norm(change.flatten(1), dim=1)
        norm = plain if ball is None else ball.norm(change)
        columns["norm"] = norm.detach().cpu().double()
        return {"x_adv": x_adv, **joined([columns], self.task)}

    def scored(
        self, predict: Predictor, x_adv: Tensor, y: Tensor, block: Block, loss: Loss = nll
    ) -> Columns:
        """The scores of a block's array."""
        cell = block.cell
        return scored(
            predict,
            x_adv,
            y,
            self.task,
            seed=self.seed,
            key=block.key,
            start=block.start,
            repeats=self.rescored.get(cell.predictor, 1),
            loss=loss,
            interval_level=self.interval_level,
            what=f"the scores of {cell.predictor!r} under {cell.attack!r} (eps = {cell.eps})",
        )


def _recorded_loss(attack: Attack, task: Task) -> Loss:
    """The last loss that the attack climbs in this task, where it is a plain one of (prediction,
    y); else the NLL."""
    losses = losses_of(for_task(attack, task))
    if losses and hasattr(losses[-1], "__name__") and losses[-1].__module__.startswith("advbayes."):
        return losses[-1]
    return nll


def _resumed(
    folder: Folder, blocks: Sequence[Block], task: Task
) -> dict[int, tuple[Block, Columns]]:
    """The whole blocks at the head of the log; one that was cut is made again."""
    done: dict[int, tuple[Block, Columns]] = {}
    for block, (saved, records) in zip(blocks, folder.saved(), strict=False):
        if saved.number != block.number or len(records) < block.stop - block.start:
            break
        if replace(saved, array="") != block:
            there, here = saved.cell, block.cell
            raise checks.InputError(
                f"out must hold the records of this evaluation in its order, got "
                f"{there.predictor!r} under {there.attack!r} where {here.predictor!r} under "
                f"{here.attack!r} was wanted; give the predictors and attacks in their first order"
            )
        done[block.number] = saved, _columns(records, task)
    return done


def _columns(records: Sequence[Mapping[str, Any]], task: Task) -> Columns:
    """The columns that every one of the records has."""
    return {
        name: torch.tensor([float(record[name]) for record in records], dtype=torch.float64)
        for name in column_names(task)
        if all(name in record for record in records)
    }


def load_evaluation(folder: str | os.PathLike[str]) -> Evaluation:
    """The evaluation that a folder holds. A missing or altered array is refused, and so is an
    evaluation that was not finished."""
    place = Folder(Path(folder))
    config = place.config()
    try:
        task: Task = "classification" if config["task"] == "classification" else "regression"
        cells: dict[Cell, list[Mapping[str, Any]]] = {}
        for block, records in place.saved():
            if block.array:
                place.check_array(block)
            cells.setdefault(block.cell, []).extend(records)
        # What is scored last: without it, a worst case would be one over fewer attacks or examples.
        last = Cell(config["trivial"][-1], CLEAN, 0.0)
        if (num := len(cells.get(last, ()))) != config["num"]:
            raise StoreError(
                place.log.path,
                wanted=f"all records, to the last {config['num']} of {last.predictor}",
                got=f"{num} of these (interrupted or cut); evaluate into this folder once more",
            )
        columns = {cell: _columns(records, task) for cell, records in cells.items()}
        return Evaluation(task, columns, tuple(config["trivial"]), config, place.path)
    except checks.InputError:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        got = f"{type(error).__name__}: {error!s:.80}"
        raise StoreError(place.path, wanted="an evaluation by evaluate", got=got) from None


def rescore(
    folder: str | os.PathLike[str], predict: Predictor | Mapping[str, Predictor]
) -> Evaluation:
    """Score the saved adversarial arrays again, without attacking: the table must not change.

    `predict` maps the names of the saved evaluation to predictors; those not given are left out.
    """
    place = Folder(Path(folder))
    claimed = load_evaluation(folder)
    config = claimed.config
    predictors = dict(predict) if isinstance(predict, Mapping) else {claimed.predictors[0]: predict}
    scorer = Scorer(
        claimed.task, int(config["seed"]), float(config["interval_level"]), config["rescored"]
    )
    cells: dict[Cell, list[Columns]] = {}
    for block, _ in place.saved():
        name = block.cell.predictor
        if name not in predictors:
            continue
        rows = scorer.scored(predictors[name], *place.read_array(block), block)
        rows["norm"] = claimed.cells[block.cell]["norm"][block.rows]
        # The attack's own loss is not known to the files.
        kept = {name: values for name, values in rows.items() if not name.startswith("loss")}
        cells.setdefault(block.cell, []).append(kept)
    again = {cell: joined(parts, claimed.task) for cell, parts in cells.items()}
    return Evaluation(claimed.task, again, (), config, place.path)

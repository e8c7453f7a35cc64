"""`evaluate`: attack, predict, score -> one record per example; written as they are made, resumed where they stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advbayes import checks
from advbayes.attacks import nll
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
from advbayes.balls import Ball
from advbayes.evaluation.attackers import with_generator
from advbayes.evaluation.contents import contents_of
from advbayes.evaluation.files import Block, Folder, data_hash, fingerprint
from advbayes.evaluation.inputs import (
    ASKED,
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
from advbayes.evaluation.result import CLEAN, WORST, Cell, Evaluation
from advbayes.evaluation.scoring import Columns, column_names, score
from advbayes.metrics import constant, majority, uniform
from advbayes.progress import Progress
from advbayes.seeds import generator_for, seed_for
from advbayes.store import Lock
from advbayes.types import Attack, Loss, Predictor

PROBE = 256  # examples that a predictor is tried on before anything starts


def evaluate(
    predict: Predictor | Mapping[str, Predictor],
    data: Data,
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

    `radii` re-makes each attack at each eps (security curves); absent, each keeps its own. Trivial predictors are added from
    `train_y` (absent: from y). A predictor whose answers differ from call to call is scored `rescore` times at each final
    point. A loss that holds one entry for each example holds it for the whole of the data. With `out`, records and
    adversarial arrays are on disk before the next batch starts, and calling again with the same arguments goes on with the
    first batch that is missing: randomness is keyed by (seed, predictor, attack, eps, batch).

    >>> from torch.distributions import Categorical
    >>> from advbayes import L2, pgd
    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> data = torch.tensor([[2.0], [-0.3]]), torch.tensor([0, 1])
    >>> report = evaluate(predict, data, attacks={"PGD": pgd(L2(1.0), steps=5)}, radii=(0.1, 1.0))
    >>> [(eps, accuracy.value) for eps, accuracy in report.curve("accuracy")]
    [(0.0, 1.0), (0.1, 1.0), (1.0, 0.5)]
    """
    x, y = as_tensors(data, dtype_of(*(predict.values() if isinstance(predict, Mapping) else (predict,))))
    checks.count("batch_size", batch_size)
    checks.count("seed", seed, low=0)
    checks.count("rescore", rescore)
    checks.number("interval_level", interval_level, low=0, high=1, open_low=True, open_high=True)
    predictors = dict(predict) if isinstance(predict, Mapping) else {"predict": predict}
    budgets = None if radii is None else as_radii(radii)
    jobs = _jobs(attacks, budgets, x)
    with _seeded(seed, "checks", 0), torch.no_grad():  # predictors without a generator of their own draw from the global stream
        task = _checked(predictors, x, y)
        y = y.reshape(-1).long() if task == "classification" else in_shape_of([each(x[:2]) for each in predictors.values()], y)
        trivial = _trivial(predictors, task, x, y if train_y is None else as_targets("train_y", train_y))
        repeats = {name: rescore if is_stochastic(each, x[:ASKED]) else 1 for name, each in predictors.items()}

    def marks(each: Predictor, name: str = "") -> list[float]:
        with _seeded(seed, f"{name}/fingerprint/global", 0):
            return fingerprint(_keyed(each, seed, "fingerprint", 0), x[:4])

    blocks = _blocks(predictors, jobs, trivial, len(x), batch_size)
    iterations = {name: (steps_of(attack) or 0) * restarts_of(attack) for name, attack in attacks.items()}
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
        "iterations": iterations,
        "radii": None if budgets is None else list(budgets),
        "data": data_hash(x, y),
        "predictors": {name: marks(each, name) for name, each in (predictors | trivial).items()},
    }
    cells: dict[Cell, list[Columns]] = {}
    with ExitStack() as stack:
        folder, done = None, {}
        if out is not None:
            Path(out).mkdir(parents=True, exist_ok=True)
            stack.enter_context(Lock(out))
            folder = Folder(Path(out))
            folder.open(config)
            log = folder.log
            done = _resumed(folder, blocks, task)
            log.keep(sum(blocks[number].stop - blocks[number].start for number in done))
        bar = stack.enter_context(Progress("evaluate", len(blocks), progress, start=len(done)))
        for block in blocks:
            rows = done.get(block.number)
            if rows is None:
                each = (predictors | trivial)[block.predictor]
                attack = jobs.get((block.attack, block.eps))
                part = slice(block.start, block.stop)
                x_adv, rows = _measure(
                    each, attack, x[part], y[part], block, task, seed, repeats.get(block.predictor, 1), interval_level
                )
                if folder is not None:
                    folder.write_array(block, x_adv, y[part])
                    log.append(*_lines(block, rows, seed, iterations.get(block.attack, 0)))
                bar.advance(f"{block.predictor}, {block.attack}")
            cells.setdefault(Cell(block.predictor, block.attack, block.eps), []).append(rows)
    joined = {cell: _joined(parts, task) for cell, parts in cells.items()}
    return Evaluation(task, joined, tuple(trivial), config, folder.path if folder else None)


def _joined(parts: Sequence[Columns], task: Task) -> Columns:
    """The columns of a cell from those of its blocks; blocks of an older version may have fewer."""
    return {name: torch.cat([rows[name] for rows in parts]) for name in column_names(task) if all(name in rows for rows in parts)}


def _jobs(attacks: Mapping[str, Attack], radii: tuple[float, ...] | None, x: Tensor) -> dict[tuple[str, float | None], Attack]:
    """Name and radius -> attack, checked against the data."""
    if not isinstance(attacks, Mapping) or not attacks:
        raise ValueError(f"attacks must be a mapping of at least one named attack, got {checks.describe(attacks)}")
    jobs: dict[tuple[str, float | None], Attack] = {}
    warned: set[tuple[type, float]] = set()
    for name, attack in attacks.items():
        if name in (CLEAN, WORST):
            raise ValueError(f"attacks must not be named {CLEAN!r} or {WORST!r}: these rows are always there")
        if not callable(attack):
            raise TypeError(f"attacks[{name!r}] must be an attack such as pgd(ball), got {checks.describe(attack)}")
        check_rows(attack, len(x), f"attacks[{name!r}]")
        for each in (attack,) if radii is None else (with_eps(attack, eps) for eps in radii):
            ball = ball_of(each)
            jobs[name, None if ball is None else float(ball.eps)] = each
            if isinstance(ball, Ball):
                ball.check(x)
                if (type(ball), ball.eps) not in warned:
                    warn_units(ball, x, f"attacks[{name!r}]")
                    warned.add((type(ball), ball.eps))
    return jobs


def _checked(predictors: Mapping[str, Predictor], x: Tensor, y: Tensor) -> Task:
    if not predictors:
        raise ValueError("predict must be a predictor or a mapping of at least one, got none")
    tasks = {name: check_predictor(each, x[:PROBE], y[:PROBE], name) for name, each in predictors.items()}
    if len(set(tasks.values())) > 1:
        raise ValueError(f"predict must hold predictors of one task, got {tasks}")
    if isinstance(predictors, dict) and any("/" in name for name in predictors):
        raise ValueError(f"names of predictors must not hold '/', got {sorted(predictors)}")
    return next(iter(tasks.values()))


def _trivial(predictors: Mapping[str, Predictor], task: Task, x: Tensor, train_y: Tensor) -> dict[str, Predictor]:
    """Rows that any result must beat."""
    if task == "regression":
        found: dict[str, Predictor] = {"constant": constant(train_y)}
    else:
        with torch.no_grad():
            prediction: Any = next(iter(predictors.values()))(x[:1])
        num_classes = prediction.logits.shape[-1]
        found = {"uniform": uniform(num_classes), "majority": majority(train_y.reshape(-1), num_classes)}
    clash = sorted(found.keys() & predictors.keys())
    if clash:
        raise ValueError(f"predictors must not be named as the trivial ones, got {clash}")
    return found


def _blocks(
    predictors: Mapping[str, Predictor],
    jobs: Mapping[tuple[str, float | None], Attack],
    trivial: Mapping[str, Predictor],
    num: int,
    batch_size: int,
) -> list[Block]:
    cells: list[tuple[str, str, float | None]] = []
    for name in predictors:
        cells.append((name, CLEAN, 0.0))
        cells += [(name, attack, eps) for attack, eps in jobs]
    cells += [(name, CLEAN, 0.0) for name in trivial]
    starts = range(0, num, batch_size)
    return [
        Block(number, *cell, start, min(start + batch_size, num))
        for number, (cell, start) in enumerate((cell, start) for cell in cells for start in starts)
    ]


def _keyed(predict: Predictor, seed: int, purpose: str, step: int) -> Predictor:
    return with_generator(predict, generator_for(seed, purpose, step, getattr(getattr(predict, "model", None), "device", "cpu")))


@contextmanager
def _seeded(seed: int, purpose: str, step: int) -> Iterator[None]:
    """Seed a copy of the global stream, for predictors without a generator of their own, and put it back."""
    with torch.random.fork_rng():
        torch.manual_seed(seed_for(seed, purpose, step))
        yield


def _measure(
    predict: Predictor,
    attack: Attack | None,
    x: Tensor,
    y: Tensor,
    block: Block,
    task: Task,
    seed: int,
    repeats: int,
    interval_level: float,
) -> tuple[Tensor, Columns]:
    """The adversarial array of a block and its scores; every draw depends on the block's key alone."""
    key = f"{block.predictor}/{block.attack}/{block.eps!r}"
    what = f"the scores of {block.predictor!r} under {block.attack!r} (eps = {block.eps})"
    with _seeded(seed, f"{key}/global", block.start):
        x_adv = x
        loss: Loss = nll
        if attack is not None:
            attack = on_rows(attack, slice(block.start, block.stop))
            through = _keyed(predict, seed, f"{key}/attack theta", block.start)
            x_adv = attack(through, x, y, generator=generator_for(seed, f"{key}/attack", block.start, x.device)).detach()
            loss = _recorded_loss(attack, task)
            if x_adv.shape != x.shape:
                raise ValueError(f"{block.attack!r} must return inputs of shape {tuple(x.shape)}, got {checks.describe(x_adv)}")
        checks.finite(f"the adversarial inputs of {block.attack!r}", x_adv)
    rows = _scored(predict, x_adv, y, block, task, seed, repeats, interval_level, loss=loss, what=what)
    ball = None if attack is None else ball_of(attack)
    change = x_adv - x
    norm = ball.norm(change) if ball is not None else torch.linalg.vector_norm(change.flatten(1), dim=1)
    rows["norm"] = norm.detach().cpu().double()
    return x_adv, _joined([rows], task)


def _scored(
    predict: Predictor,
    x_adv: Tensor,
    y: Tensor,
    block: Block,
    task: Task,
    seed: int,
    repeats: int,
    interval_level: float,
    *,
    loss: Loss = nll,
    what: str = "the scores",
) -> Columns:
    """The scores of a block's array: the same whenever they are made."""
    key = f"{block.predictor}/{block.attack}/{block.eps!r}"
    with _seeded(seed, f"{key}/score", block.start):
        scored = _keyed(predict, seed, f"{key}/score theta", block.start)
        return score(
            scored, x_adv, y, task, loss=loss, repeats=repeats, halves=repeats > 1, interval_level=interval_level, what=what
        )


def _recorded_loss(attack: Attack, task: Task) -> Loss:
    """The last loss that the attack climbs in this task, where it is a plain one of (prediction, y); else the NLL."""
    losses = losses_of(for_task(attack, task))
    plain = losses and getattr(losses[-1], "__module__", "").startswith("advbayes.") and hasattr(losses[-1], "__name__")
    return losses[-1] if plain else nll


def _lines(block: Block, rows: Columns, seed: int, iterations: int) -> list[dict[str, Any]]:
    table = {name: values.tolist() for name, values in rows.items()}
    return [
        {
            "predictor": block.predictor,
            "attack": block.attack,
            "eps": block.eps,
            "index": block.start + row,
            "block": block.number,
            "seed": seed,
            "iterations": iterations,
            **{name: values[row] for name, values in table.items()},
        }
        for row in range(block.stop - block.start)
    ]


def _resumed(folder: Folder, blocks: Sequence[Block], task: Task) -> dict[int, Columns]:
    """The whole blocks at the head of the log; one that was cut is made again."""
    records = folder.log.read()
    done: dict[int, Columns] = {}
    position = 0
    for block in blocks:
        size = block.stop - block.start
        part = records[position : position + size]
        if len(part) < size or any(record.get("block") != block.number for record in part):
            break
        for index, record in zip(range(block.start, block.stop), part, strict=True):
            found = (record.get("predictor"), record.get("attack"), record.get("eps"), record.get("index"))
            if found != (block.predictor, block.attack, block.eps, index):
                raise ValueError(
                    f"out must hold the records of this evaluation in its order, got {found[0]!r} under {found[1]!r} where "
                    f"{block.predictor!r} under {block.attack!r} was wanted; give the predictors and attacks in their first order"
                )
        done[block.number] = _read(part, task)
        position += size
    return done


def _read(records: Sequence[Mapping[str, object]], task: Task) -> Columns:
    """The columns that every one of the records has."""
    return {
        name: torch.tensor([float(record[name]) for record in records], dtype=torch.float64)  # type: ignore[arg-type]
        for name in column_names(task)
        if all(name in record for record in records)
    }


def load_evaluation(folder: str | os.PathLike[str]) -> Evaluation:
    """The evaluation in a folder, from its records alone."""
    place = Folder(Path(folder))
    config = place.config()
    task: Task = "classification" if config["task"] == "classification" else "regression"
    cells: dict[Cell, list[Mapping[str, object]]] = {}
    for record in place.log.read():
        eps = record["eps"]
        cell = Cell(str(record["predictor"]), str(record["attack"]), None if eps is None else float(eps))  # type: ignore[arg-type]
        cells.setdefault(cell, []).append(record)
    columns = {cell: _read(records, task) for cell, records in cells.items()}
    return Evaluation(task, columns, tuple(config["trivial"]), config, place.path)


def rescore(folder: str | os.PathLike[str], predict: Predictor | Mapping[str, Predictor]) -> Evaluation:
    """The same table made again from the saved arrays: what was attacked is what is scored.

    `predict` names the predictors as they were named; rows of predictors that are not given are left out.
    """
    place = Folder(Path(folder))
    claimed = load_evaluation(folder)
    config = claimed.config
    given = dict(predict) if isinstance(predict, Mapping) else {claimed.predictors[0]: predict}
    seed = int(config["seed"])
    cells: dict[Cell, list[Columns]] = {}
    for block in saved_blocks(place):
        if block.predictor not in given:
            continue
        x_adv, y = place.read_array(block)
        repeats, level = int(config["rescored"].get(block.predictor, 1)), float(config["interval_level"])
        rows = _scored(given[block.predictor], x_adv, y, block, claimed.task, seed, repeats, level)
        cell = Cell(block.predictor, block.attack, block.eps)
        rows["norm"] = claimed.cells[cell]["norm"][block.start : block.stop]
        # The attack's own loss is not known to the files.
        cells.setdefault(cell, []).append({name: values for name, values in rows.items() if not name.startswith("loss")})
    joined = {cell: _joined(parts, claimed.task) for cell, parts in cells.items()}
    return Evaluation(claimed.task, joined, (), config, place.path)


def saved_blocks(folder: Folder) -> list[Block]:
    """The blocks whose records are in a folder, in order."""
    found: dict[int, list[Any]] = {}
    for record in folder.log.read():
        index, number = int(record["index"]), int(record["block"])  # type: ignore[arg-type]
        held = found.setdefault(number, [record["predictor"], record["attack"], record["eps"], index, index])
        held[4] = index
    return [Block(number, held[0], held[1], held[2], held[3], held[4] + 1) for number, held in sorted(found.items())]

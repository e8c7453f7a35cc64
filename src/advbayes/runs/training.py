"""Train a run: from its configuration, or from its last checkpoint, bit for bit."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from advbayes import store
from advbayes.channels import learned_in
from advbayes.datasets.fetching import Downloading
from advbayes.distributed import ranks
from advbayes.evaluation.inputs import Task
from advbayes.evaluation.measuring import batches
from advbayes.evaluation.result import ON_REQUEST, REDUCTIONS
from advbayes.evaluation.scoring import joined, score
from advbayes.metrics import expected_correct, majority
from advbayes.model import BayesianModel
from advbayes.objectives import ChannelELBO
from advbayes.posteriors import Posterior
from advbayes.predictive import PosteriorPredictive
from advbayes.runs import building
from advbayes.runs.building import Prepared
from advbayes.runs.config import RunConfig, make_config
from advbayes.runs.folder import Run, record
from advbayes.runs.named import schedule
from advbayes.runs.remarks import remarks, without_effect
from advbayes.store import thetas_of
from advbayes.training import COLUMNS, FitResult, State, fit
from advbayes.types import Channel

# Wall time is no part of what is trained: without it, two runs of one seed have the same history,
# byte for byte.
_KEPT = tuple(name for name in COLUMNS if name != "seconds")
_ROWS = 500  # that are scored at once

# Those that need no resampling for their intervals; `advbayes evaluate` has the others.
_CLEAN: dict[Task, tuple[str, ...]] = {
    "classification": ("accuracy", "balanced_accuracy", "nll", "brier"),
    "regression": ("rmse", "nll", "coverage"),
}


def train(
    run: Run,
    *,
    trusted: bool = False,
    progress: bool | None = None,
    stop: Callable[[], bool] | None = None,
    downloading: Downloading | None = None,
    device: str = "cpu",
    tell: Callable[[str], None] | None = None,
) -> FitResult:
    """Train a run, from its last checkpoint if it has one; the caller holds the folder's lock.
    What is saved does not depend on the device, but for rounding and its random numbers. Keys that
    have no effect go to the log, and to `tell`.

    >>> import tempfile
    >>> from advbayes.runs.config import make_config
    >>> from advbayes.runs import create_run
    >>> config = make_config({"data": "diabetes", "defense": "none", "epochs": 1, "hidden": [4]})
    >>> with tempfile.TemporaryDirectory() as folder, create_run(config, f"{folder}/a") as run:
    ...     train(run).steps, run.status
    (3, 'trained')
    """
    config = run.config
    data = building.prepare(config, downloading=downloading)
    state = read_checkpoint(run)
    parts = _parts(config, data, trusted)
    _begin(run, data, state)
    for remark in without_effect(config, data) if state is None else ():
        run.log(remark)
        if tell is not None:
            tell(remark)
    history = run.history
    history.keep(0 if state is None else state.step)
    written = 0 if state is None else state.step

    def checkpoint(now: State) -> None:
        """The history first: what is beyond the last checkpoint is cut off when the run resumes."""
        nonlocal written
        rows = (
            {"step": row, **{c: _plain(now.history[c][row]) for c in _KEPT}}
            for row in range(written, now.step)
        )
        history.append(*rows)
        written = now.step
        place = {"step": now.step, "skipped": now.skipped, "seconds": now.history["seconds"][-1]}
        documents = {"state": place, "config": config.model_dump(mode="json")}
        tensors = {name: tensor.cpu() for name, tensor in now.tensors.items()}
        store.write_bundle(run.path / "checkpoint", {"state": tensors}, documents)

    sealed = config.model_dump_json().encode()
    ranks().on_first(lambda: {"config": torch.frombuffer(bytearray(sealed), dtype=torch.uint8)})
    saving = {"checkpoint": checkpoint, "checkpoint_every": config.checkpoint_every}
    result = _fit(config, data, parts, device, progress=progress, stop=stop, state=state, **saving)
    if result.interrupted:
        run.log(f"interrupted at step {result.steps}")
        run.write_manifest(status="interrupted", steps=result.steps)
        return result
    model, posterior, channel, _ = parts
    store.save(
        run.model_path,
        model=model,
        posterior=posterior,
        channel=channel,
        scaling=None if data.scaling is None else data.scaling.to_dict(),
        class_names=data.dataset.class_names or None,
        threat_model={
            "norm": config.norm,
            "eps": config.eps,
            "box": None if data.box is None else list(data.box),
            "mask": None if data.mask is None else data.mask.tolist(),
            "scale": None if data.scale is None else data.scale.tolist(),
        },
        extra=_extra(config, data),
    )
    predict = PosteriorPredictive(model, thetas_of(posterior, 20, config.seed))
    store.write_document(run.path / "metrics.json", clean_metrics(predict, data))
    hashes = {part.name: part.sha256 for part in store.read_manifest(run.model_path).parts}
    run.log(f"finished at step {result.steps}, {result.skipped} skipped")
    done = {"steps": result.steps, "skipped": result.skipped}
    run.write_manifest(status="trained", weights=hashes["posterior.safetensors"], **done)
    return result


def follow(
    *,
    trusted: bool = False,
    stop: Callable[[], bool] | None = None,
    downloading: Downloading | None = None,
    device: str = "cpu",
) -> None:
    """What every rank but the first does: train along, write nothing."""
    for sealed in ranks().on_first(dict).values():  # none where there is nothing left to do
        config = make_config(json.loads(sealed.numpy().tobytes()))
        data = building.prepare(config, downloading=downloading)
        _fit(config, data, _parts(config, data, trusted), device, progress=False, stop=stop)


Parts = tuple[BayesianModel, Posterior, Channel, ChannelELBO]


def _parts(config: RunConfig, data: Prepared, trusted: bool) -> Parts:
    model = building.build_model(config, data, trusted=trusted)
    return *model, *building.build_defense(config, data, trusted=trusted)


def _fit(config: RunConfig, data: Prepared, parts: Parts, device: str, **options: Any) -> FitResult:
    """`fit` on the device; what is trained comes back from there."""
    torch.set_num_threads(config.threads)
    model, posterior, channel, objective = parts
    moved = (posterior, *(learned.generator for learned in learned_in(channel)))
    for module in moved:
        module.to(device)
    options |= {"compile": config.compile, "own_thetas": config.own_thetas}
    there = data.to(device), model.to(device)
    result = fit_run(config, *there, posterior, channel, objective, **options)
    for module in moved:
        module.cpu()
    return result


def fit_run(
    config: RunConfig,
    data: Prepared,
    model: BayesianModel,
    posterior: Posterior,
    channel: Channel,
    objective: ChannelELBO | None,
    **options: Any,
) -> FitResult:
    """`fit` with the settings of a run."""
    how_long = (config.epochs, config.lr, config.decay)
    chosen = schedule(*how_long, data.x_train, config.batch_size)
    lower = config.precision == "bfloat16"
    with torch.autocast(data.x_train.device.type, torch.bfloat16, enabled=lower):
        return fit(
            model,
            posterior,
            channel,
            (data.x_train, data.y_train),
            objective=objective,
            batch_size=config.batch_size,
            **chosen._asdict(),
            adversary_lr=config.adversary_lr,
            seed=config.seed,
            **options,
        )


def clean_metrics(predict: PosteriorPredictive, data: Prepared) -> dict[str, Any]:
    """Scores on the clean test set, with intervals."""
    task: Task = "classification" if data.dataset.task == "classification" else "regression"
    parts = batches(len(data.x_test), _ROWS)
    scores = [score(predict, data.x_test[rows], data.y_test[rows], task) for rows in parts]
    columns = joined(scores, task)
    known = REDUCTIONS[task] | ON_REQUEST[task]
    estimates = {name: known[name](columns) for name in _CLEAN[task]}
    values = {
        name: {"value": _plain(e.value), "low": _plain(e.low), "high": _plain(e.high)}
        for name, e in estimates.items()
    }
    return {
        "task": task,
        "num": len(data.x_test),
        "thetas": len(predict.thetas),
        "clean": values,
        "trivial": _trivial(task, data),
    }


def _trivial(task: Task, data: Prepared) -> dict[str, float]:
    """The main score of a predictor that never looks at its input."""
    if task == "classification":
        guess = majority(data.y_train, len(data.dataset.class_names))(data.x_test)
        return {
            "accuracy": float(expected_correct(guess, data.y_test).mean()),
            "balanced_accuracy": 1 / len(set(data.y_test.tolist())),
        }
    return {"rmse": float((data.y_test - data.y_train.mean(0)).double().square().mean().sqrt())}


def _begin(run: Run, data: Prepared, state: State | None) -> None:
    """Record what the run is made from; a resumed run must find the data that it began with."""
    where = data.dataset.provenance
    now = {"source": where.source, "sha256": dict(where.sha256)}
    versions = store.versions()
    if state is None:
        for remark in remarks(data.dataset) if run.config.file is not None else ():
            warnings.warn(remark, stacklevel=3)
        run.write_manifest(status="training", started=record(), versions=versions, data=now)
        run.log("training from the start")
        return
    before = run.manifest
    began = before.get("data", {}).get("sha256")
    if began != now["sha256"]:
        wanted = f"the data that the run began with, SHA-256 {began}"
        raise store.StoreError(run.path, wanted, f"{now['sha256']}")
    run.write_manifest(status="training")
    run.log(f"training from step {state.step}")
    if before.get("versions") != versions:
        remark = "other versions than at the start, results may differ in the last bits"
        run.log(f"{remark}: {before.get('versions')}, now {versions}")


def _extra(config: RunConfig, data: Prepared) -> dict[str, Any]:
    """What a prediction needs to know of the data."""
    return {
        "data": config.data,
        "task": data.dataset.task,
        "defense": config.channel or config.defense,
        "channel": config.channel,
        "network": config.network,
        "seed": config.seed,
        "config": config.model_dump(mode="json"),
        "event": list(data.x_train.shape[1:]),
        "feature_names": list(data.dataset.feature_names),
        "encoding": None if data.dataset.encoding is None else data.dataset.encoding.to_json(),
        "target_names": list(data.dataset.target_names),
    }


def _plain(value: float) -> float | None:
    """JSON has no NaN: a skipped step's values become null."""
    return value if math.isfinite(value) else None


def read_checkpoint(run: Run) -> State | None:
    """The last checkpoint with the history up to it; None before the first."""
    path = run.path / "checkpoint"
    if not path.exists():
        return None
    tensors, documents = store.read_bundle(path)
    run.check_sealed(documents.get("config"), "checkpoint")
    match documents.get("state"):
        case {
            "step": int(step),
            "skipped": int(skipped),
            "seconds": float() | int() as seconds,
        } if "state" in tensors:
            pass
        case other:
            raise store.StoreError(path, "a checkpoint of a run", f"{other!r:.80}")
    rows = run.history.read()[:step]
    if len(rows) < step:
        wanted = f"{step} records, as the checkpoint"
        raise store.StoreError(run.path / "history.jsonl", wanted, f"{len(rows)}")
    history: dict[str, list[float]] = {
        c: [math.nan if row[c] is None else float(row[c]) for row in rows]  # type: ignore[arg-type]
        for c in _KEPT
    }
    history["seconds"] = [math.nan] * (step - 1) + [float(seconds)] if step else []
    return State(step, skipped, dict(tensors["state"]), history)

"""A run folder: configuration, history, checkpoints, the model, records, log. What is in it survives a kill at any moment.

config.toml      every key, defaults included
manifest.json    status, versions, commit, machine, command
history.jsonl    one record a step, up to the last checkpoint
checkpoint/      posterior, optimisers and adversaries at the last checkpoint
model.advbayes   the finished model, which `advbayes.load` reads
evaluation/      records and adversarial arrays of `advbayes evaluate`
log.txt          what happened when
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from advbayes import store
from advbayes.attacks import entropy, margin, nll, one_step, pgd, squared_error
from advbayes.balls import L2, Linf
from advbayes.channels import AttackChannel, Learned, Mixture, Noise
from advbayes.config import ConfigError, RunConfig, make_config, read_toml, to_toml
from advbayes.datasets import Dataset, Standardize, from_csv, from_npz, load_dataset
from advbayes.likelihoods import Categorical, Gaussian
from advbayes.model import BayesianModel
from advbayes.networks import ConvGenerator, FullyConnectedGenerator, conv_net, mlp
from advbayes.objectives import ChannelELBO, LogitPairing, Trades
from advbayes.posteriors import Ensemble, LowRank, MeanField, PointMass, _Posterior
from advbayes.seeds import generator_for, seed_for
from advbayes.training import COLUMNS, FitResult, State, fit
from advbayes.types import Channel

# --- From a configuration to objects ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prepared:
    """A data set as the model sees it: tables standardised, images as they are."""

    dataset: Dataset
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    scaling: Standardize | None

    @property
    def box(self) -> tuple[float, float] | None:
        return self.dataset.box


def prepare(config: RunConfig) -> Prepared:
    """Load and scale the configuration's data."""
    path = Path(config.data)
    if path.suffix.lower() == ".csv":
        assert config.target is not None
        target = config.target if "," not in config.target else config.target.split(",")
        dataset = from_csv(path, target=target, task=config.task, seed=config.seed)
    elif path.suffix.lower() == ".npz":
        dataset = from_npz(path, task=config.task, seed=config.seed)
    else:
        dataset = load_dataset(config.data, config.root, target=config.target, seed=config.seed)
    scaling = dataset.scaling
    num = config.num_train
    x_train, y_train, x_test, y_test = dataset.x_train[:num], dataset.y_train[:num], dataset.x_test, dataset.y_test
    if scaling is not None:
        x_train, x_test = scaling.transform(x_train), scaling.transform(x_test)
        if dataset.task == "regression":
            y_train, y_test = scaling.transform_target(y_train), scaling.transform_target(y_test)
    return Prepared(dataset, x_train, y_train, x_test, y_test, scaling)


def build_net(config: RunConfig, data: Prepared, *, trusted: bool = False) -> nn.Module:
    """The configuration's network, drawn from its seed. A `module:factory` is imported only when `trusted`."""
    dataset, event = data.dataset, tuple(data.x_train.shape[1:])
    images = len(event) == 3
    outputs = len(dataset.class_names) if dataset.task == "classification" else max(1, data.y_train[0].numel())
    kind = ("conv" if images and event[1] == event[2] else "mlp") if config.network == "auto" else config.network
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, "network"))
        if kind == "conv":
            if not images or event[1] != event[2]:
                raise ConfigError(f"network: 'conv' wants square images (C, S, S), got inputs of shape {event}")
            return conv_net(outputs, event[0], event[1])
        if kind == "mlp":
            layers = mlp(math.prod(event), outputs, tuple(config.hidden))
            return nn.Sequential(nn.Flatten(), *layers) if images else layers
        if not trusted:
            raise ConfigError(f"network: {kind!r} names code of your own, which runs only with --trust-network")
        return _own_net(kind)


def _own_net(spec: str) -> nn.Module:
    import importlib

    module_name, factory_name = spec.split(":")
    try:
        net = getattr(importlib.import_module(module_name), factory_name)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"network: wanted an importable {spec!r}, got {error}") from None
    if not isinstance(net, nn.Module):
        raise ConfigError(f"network: {spec!r} must return a torch.nn.Module, got {type(net).__name__}")
    return net


def build_model(config: RunConfig, data: Prepared, *, trusted: bool = False) -> tuple[BayesianModel, _Posterior]:
    """Model and untrained posterior."""
    net = build_net(config, data, trusted=trusted)
    outputs = 1 if data.y_train.ndim == 1 else data.y_train.shape[1]
    if data.dataset.task == "classification":
        model = BayesianModel(net, Categorical(), config.prior_scale)
    elif config.noise_scale == "learned":
        model = BayesianModel(net, Gaussian(1.0, learned=True, num_outputs=outputs), config.prior_scale)
    else:
        model = BayesianModel(net, Gaussian(config.noise_scale, num_outputs=outputs), config.prior_scale)
    posteriors: dict[str, Callable[[], _Posterior]] = {
        "mean_field": lambda: MeanField(model, config.init_scale),
        "point": lambda: PointMass(model),
        "ensemble": lambda: Ensemble(model, config.members, seed=config.seed),
        "low_rank": lambda: LowRank(model, config.rank, config.init_scale, seed=config.seed),
    }
    return model, posteriors[config.posterior]()


def build_defense(config: RunConfig, data: Prepared) -> tuple[Channel, ChannelELBO]:
    """Channel and objective of a named defense (docs/defenses.md)."""
    regression = data.dataset.task == "regression"
    ball = (L2 if config.norm == "l2" else Linf)(config.eps)
    main = squared_error if regression else nll
    noisy = AttackChannel(one_step(ball, main), config.sigma)
    losses = (squared_error,) if regression else (nll, margin, entropy)

    def learned() -> Learned:
        event = tuple(data.x_train.shape[1:])
        classes = None if regression else len(data.dataset.class_names)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(config.seed, "adversary"))
            if len(event) == 3 and event[1] == event[2] and classes is not None:
                return Learned(ConvGenerator(classes, event[0], event[1]), ball)
            outputs = max(1, data.y_train[0].numel())
            return Learned(FullyConnectedGenerator(math.prod(event), outputs, classes), ball)

    deterministic = AttackChannel(one_step(ball, main))
    channels: dict[str, Callable[[], Channel]] = {
        "none": lambda: Noise(0.0),
        "noise": lambda: Noise(config.sigma),
        "at": lambda: Mixture([0.5, 0.5], [Noise(0.0), deterministic]),
        "os": lambda: noisy,
        "os50": lambda: Mixture([0.5, 0.5], [Noise(0.0), noisy]),
        "mix": lambda: Mixture(
            [0.4] + [0.6 / len(losses)] * len(losses),
            [Noise(config.sigma), *(AttackChannel(one_step(ball, loss), config.sigma) for loss in losses)],
        ),
        "pgd": lambda: AttackChannel(pgd(ball, config.attack_steps, main), config.sigma),
        "trades": lambda: AttackChannel(pgd(ball, config.attack_steps, main)),
        "alp": lambda: AttackChannel(pgd(ball, config.attack_steps, main)),
        "nn": learned,
        "nn50": lambda: Mixture([0.5, 0.5], [Noise(0.0), learned()]),
    }
    penalty = {"trades": Trades(config.beta, likelihood="clean"), "alp": LogitPairing(config.beta)}.get(config.defense)
    objective = ChannelELBO(
        len(data.x_train), config.num_theta, config.num_channel, config.bound, penalty, kl_weight=config.kl_weight
    )
    return channels[config.defense](), objective


# --- The folder -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run folder and what it holds."""

    path: Path

    @property
    def config(self) -> RunConfig:
        return make_config(read_toml(self.path / "config.toml"))

    @property
    def manifest(self) -> dict[str, Any]:
        document = store.read_document(self.path / "manifest.json")
        if not isinstance(document, dict):
            raise store.StoreError(self.path / "manifest.json", wanted="a JSON object", got=type(document).__name__)
        return document

    @property
    def model_path(self) -> Path:
        return self.path / "model.advbayes"

    @property
    def history(self) -> store.RecordLog:
        return store.RecordLog(self.path / "history.jsonl")

    def log(self, message: str) -> None:
        with (self.path / "log.txt").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {message}\n")

    def write_manifest(self, status: str, **more: Any) -> None:
        try:
            before = self.manifest
        except FileNotFoundError:
            before = {}
        store.write_document(self.path / "manifest.json", {**before, **more, "status": status, "versions": store.versions()})

    @staticmethod
    def open(path: str | Path) -> Run:
        """An existing run folder."""
        run = Run(Path(path))
        if not (run.path / "config.toml").is_file():
            raise ConfigError(f"{path}: wanted a run folder (made by advbayes train), got no config.toml in it")
        return run


def record(command: list[str] | None = None) -> dict[str, Any]:
    """What proves a figure: command, commit, machine."""
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"
    return {
        "command": command if command is not None else sys.argv,
        "commit": commit,
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }


def train(
    run: Run,
    *,
    trusted: bool = False,
    progress: bool | None = None,
    stop: Callable[[], bool] | None = None,
) -> FitResult:
    """Train a run from its configuration, from its last checkpoint if it has one; the caller holds the folder's lock."""
    config = run.config
    torch.set_num_threads(config.threads)
    data = prepare(config)
    model, posterior = build_model(config, data, trusted=trusted)
    channel, objective = build_defense(config, data)
    history = run.history
    state = _read_checkpoint(run)
    history.keep(0 if state is None else state.step)
    written = 0 if state is None else state.step
    run.write_manifest("training", **({} if state is not None else {"started": record()}))
    run.log(f"training from step {written}")

    def checkpoint(now: State) -> None:
        nonlocal written
        rows = range(written, now.step)
        history.append(*({"step": row, **{c: _plain(now.history[c][row]) for c in COLUMNS}} for row in rows))
        written = now.step
        store.write_bundle(run.path / "checkpoint", {"state": now.tensors}, {"state": {"step": now.step, "skipped": now.skipped}})

    result = fit(
        model,
        posterior,
        channel,
        (data.x_train, data.y_train),
        objective=objective,
        epochs=config.epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        decay=config.decay,
        adversary_lr=config.adversary_lr,
        seed=config.seed,
        compile=config.compile,
        progress=progress,
        state=state,
        checkpoint=checkpoint,
        checkpoint_every=config.checkpoint_every,
        stop=stop,
    )
    if result.interrupted:
        run.log(f"interrupted at step {result.steps}")
        run.write_manifest("interrupted", steps=result.steps)
        return result
    store.save(
        run.model_path,
        model=model,
        posterior=posterior,
        channel=channel,
        scaling=None if data.scaling is None else data.scaling.to_dict(),
        class_names=data.dataset.class_names or None,
        threat_model={"norm": config.norm, "eps": config.eps, "box": None if data.box is None else list(data.box)},
        extra={"data": config.data, "defense": config.defense, "seed": config.seed},
    )
    run.log(f"finished at step {result.steps}, {result.skipped} skipped")
    run.write_manifest("trained", steps=result.steps, skipped=result.skipped)
    return result


def _plain(value: float) -> float | None:
    """JSON has no NaN: a skipped step's values become null."""
    return value if math.isfinite(value) else None


def _read_checkpoint(run: Run) -> State | None:
    if not (run.path / "checkpoint").exists():
        return None
    tensors, documents = store.read_bundle(run.path / "checkpoint")
    place = documents["state"]
    assert isinstance(place, dict)
    step, skipped = int(place["step"]), int(place["skipped"])  # type: ignore[arg-type]
    rows = run.history.read()[:step]
    if len(rows) < step:
        raise store.StoreError(run.path / "history.jsonl", wanted=f"{step} records, as the checkpoint", got=f"{len(rows)}")
    history = {c: [math.nan if row[c] is None else float(row[c]) for row in rows] for c in COLUMNS}  # type: ignore[arg-type]
    return State(step, skipped, dict(tensors["state"]), history)


def thetas_of(posterior: Any, num: int, seed: int) -> Tensor:
    """The `num` thetas that a run's predictions use, keyed by its seed."""
    thetas: Tensor = posterior.sample(num, generator=generator_for(seed, "predict"))
    return thetas

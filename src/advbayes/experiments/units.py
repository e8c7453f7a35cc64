"""One unit of work, row x seed: a model is trained or loaded, attacked and scored."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from advbayes import store
from advbayes.attacks import (
    PGD,
    ByLoss,
    RandomSearch,
    Square,
    Suite,
    Transfer,
    certainty,
    margin,
    nll,
    pgd,
    squared_error,
)
from advbayes.attacks.balls import Ball
from advbayes.auditing import Support, ThreatModel, audit
from advbayes.channels import Noise
from advbayes.datasets import load_dataset, split_rows
from advbayes.evaluation import evaluate
from advbayes.experiments.catalogue import Experiment, Row
from advbayes.experiments.defenses import DEFENSES, Defense, least_squares
from advbayes.metrics import rmse_floor
from advbayes.model import BayesianModel
from advbayes.objectives import ChannelELBO
from advbayes.posteriors import Posterior
from advbayes.predictive import FreshPredictive, PosteriorPredictive, Smoothed, certify
from advbayes.purification import Purifier
from advbayes.purification.attacks import Annealed, NearestCentre, StraightThrough
from advbayes.runs import (
    Prepared,
    build_defense,
    build_model,
    load_trained,
    make_attack,
    prepare,
    record,
    thetas_of,
)
from advbayes.runs.config import RunConfig, make_config
from advbayes.runs.training import fit_run
from advbayes.seeds import generator_for
from advbayes.training import fit
from advbayes.types import Attack, Channel, Predictor

Record = dict[str, Any]
Rows = tuple[Tensor, Tensor]
Measured = tuple[list[Record], dict[str, Any]]  # records, and what the manifest says of the unit
OFFICIAL_SPLIT = ("mnist", "fashion-mnist", "cifar10")
_COLUMNS = {
    "classification": ("correct", "log_prob", "entropy"),
    "regression": ("squared_error", "log_prob"),
}


@dataclass(frozen=True)
class Unit:
    """What is to be done: one row with one seed; `models` is where trained ones are kept."""

    experiment: Experiment
    row: str
    seed: int
    models: Path | None = None

    @property
    def what(self) -> Row:
        return self.experiment.rows[self.row]

    @cached_property
    def config(self) -> RunConfig:
        row = self.what
        return make_config(
            {**self.experiment.settings, **row.defense.settings, **row.settings, "seed": self.seed}
        )

    @cached_property
    def parts(self) -> dict[str, Prepared]:
        """The data that it is trained and tested on, and what is held out for validation."""
        held_out = "validation" in self.experiment.splits
        return prepared(self.config, self.what.units, validation=held_out)

    @property
    def data(self) -> Prepared:
        return self.parts["test"]

    @property
    def ball(self) -> Ball:
        """The attacker at the last radius."""
        return self.data.ball(self.config.norm, self.experiment.radii[-1], self.data.box)

    @property
    def content(self) -> dict[str, str]:
        """SHA-256 of a file of one's own, which may be another one tomorrow."""
        return {} if self.config.file is None else dict(self.data.dataset.provenance.sha256)

    def rows(self, split: str = "test") -> Rows:
        """The same test rows for every row and seed of an official split."""
        part, generator = self.parts[split], generator_for(0, "experiments/test")
        index = torch.randperm(len(part.x_test), generator=generator)[: self.experiment.num_test]
        return part.x_test[index], part.y_test[index]


def made_from(unit: Unit) -> dict[str, Any]:
    """What the records of a comparison depend on: settings, test rows, the content of the data."""
    return {
        **unit.config.model_dump(mode="json", exclude_none=True),
        "num_test": min(unit.experiment.num_test, len(unit.data.x_test)),
        "content": unit.content,
    }


def run_unit(unit: Unit) -> Measured:
    """The unit's records, and its line of the manifest."""
    began, worked = time.perf_counter(), time.process_time()
    torch.set_num_threads(1)
    records, info = MEASURES[unit.experiment.measure](unit)
    config = unit.config.model_dump(mode="json", exclude_none=True)
    spent = {
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(time.process_time() - worked, 1),
    }
    about = {"config": config, **spent, "commit": record()["commit"], **info}

    def rounded(value: Any) -> Any:  # to six digits: what a table can show, at half the size
        return float(f"{value:.6g}") if type(value) is float else value

    of = {"row": unit.row, "seed": unit.seed}
    return [of | {key: rounded(each[key]) for key in each} for each in records], about


# --- Data ---------------------------------------------------------------------------------------


_OF_DATA = {"data", "target", "task", "root", "seed", "features", "drop", "text"}
_OF_REACH = {"eps", "fixed", "feature_eps"}


@lru_cache(maxsize=4)
def _loaded(settings: str, written: int) -> Prepared:
    return prepare(make_config(json.loads(settings)))


@lru_cache(maxsize=4)
def _images() -> Tensor:
    return load_dataset("fashion-mnist").x_test


def prepared(
    config: RunConfig, units: str = "standardised", *, validation: bool = False
) -> dict[str, Prepared]:
    """The data in the units of eps, with a fifth of the training rows held out for validation."""
    written = 0 if config.file is None else config.file.stat().st_mtime_ns
    data = _loaded(config.model_dump_json(include=_OF_DATA | _OF_REACH), written)
    x_train, x_test = data.dataset.x_train, data.dataset.x_test
    if units == "raw":
        data = replace(data, x_train=x_train, x_test=x_test)
    elif units == "min-max":
        low, high = x_train.amin(0), x_train.amax(0)
        span = (high - low).clamp_min(1e-12)
        data = replace(data, x_train=(x_train - low) / span, x_test=(x_test - low) / span)
    parts = {}
    if validation:
        train, other = split_rows(len(data.x_train), seed=config.seed)
        parts["validation"] = replace(data, x_test=data.x_train[other], y_test=data.y_train[other])
        data = replace(data, x_train=data.x_train[train], y_train=data.y_train[train])
    num = config.num_train
    return parts | {"test": replace(data, x_train=data.x_train[:num], y_train=data.y_train[:num])}


# --- Predictors ---------------------------------------------------------------------------------


def predictor(unit: Unit) -> tuple[Predictor, dict[str, Any]]:
    """The row's predictor, and what the manifest says of its training."""
    defense, data = unit.what.defense, unit.data
    if defense.reference is not None:
        return defense.reference(data, unit.seed), {}
    model, posterior, info = trained(unit)
    how = defense.purify
    if how is None:
        thetas = thetas_of(posterior, unit.experiment.thetas, unit.seed)
        return PosteriorPredictive(model, thetas), info
    generator = generator_for(unit.seed, "experiments/reference")
    index = torch.randperm(len(data.x_train), generator=generator)[: how.num_reference]
    reference = data.x_train[index], data.y_train[index]
    thetas = thetas_of(posterior, how.num_thetas, unit.seed)
    channel = Noise(how.sigma)
    return Purifier(model, channel, thetas, reference, how.update, posterior=posterior), info


def _channel(unit: Unit) -> tuple[Channel, ChannelELBO]:
    """The row's channel and objective; the defense's own channel where it has one."""
    channel, objective = build_defense(unit.config, unit.data)
    make = unit.what.defense.channel
    return channel if make is None else make(unit.config, unit.data), objective


def trained(unit: Unit) -> tuple[BayesianModel, Posterior, dict[str, Any]]:
    """The row's model and posterior: from `models`, or trained now and put there."""
    config, data = unit.config, unit.data
    model, posterior = build_model(config, data, trusted=config.network.startswith("advbayes."))
    channel, objective = _channel(unit)
    text = f"{config!r} {channel!r} {objective!r} {unit.what.units} {len(data.x_train)}"
    text += "".join([*unit.content.values(), *config.text])
    key = hashlib.sha256(text.encode()).hexdigest()[:20]
    place = None if unit.models is None else unit.models / key
    info: Any
    if place is not None and place.exists():
        tensors, documents = store.read_bundle(place)
        posterior.load_state_dict(tensors["posterior"])
        info = documents["trained"]
    else:
        began = time.perf_counter()
        result = fit_run(config, data, model, posterior, channel, objective, progress=False)
        info = {
            "trained_at": record()["commit"],
            "training_seconds": round(time.perf_counter() - began, 1),
            "steps": result.steps,
            "skipped": result.skipped,
        }
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            store.write_bundle(place, {"posterior": posterior.state_dict()}, {"trained": info})
    return model, posterior, {"model": key, **info}


def attacks_on(unit: Unit, predict: Predictor) -> dict[str, Attack]:
    """The experiment's attacks by the paper's names; queries and transfer without gradients.

    Against a purifier the strong suite holds the attacks that know it, too.
    """
    ball, steps = unit.ball, unit.experiment.steps
    if not unit.what.defense.has_gradient:
        source, ascent = least_squares(unit.data, unit.seed), pgd(ball, steps, squared_error)
        parts = (
            Square(ball, 2 * steps, nll),
            RandomSearch(ball, steps, squared_error),
            Transfer(ascent, (source,), rank=squared_error),
        )
        return {name: Suite(parts, parts) for name in unit.experiment.attacks}
    attacks, task = {}, unit.data.dataset.task
    for name in unit.experiment.attacks:
        known = name.lower().replace("+", "_plus").replace(" ", "_")
        attacks[name] = make_attack(known, ball, task=task, steps=steps, queries=2 * steps)
    if isinstance(predict, Purifier) and "strong" in attacks:
        attacks["strong"] = Suite((attacks["strong"], *_adaptive(predict, ball, steps)))
    return attacks


def _adaptive(purified: Purifier, ball: Ball, steps: int) -> tuple[Attack, ...]:
    """Rule E23: transfer, straight through, the nearest centres, annealed from them."""
    straight = StraightThrough(purified)
    sources = (straight,) if purified.base is None else (purified.base, straight)
    around = Transfer(pgd(ball, steps, margin), sources)
    nearest = NearestCentre(ball, num=8)
    return around, nearest, Annealed(ball, steps=steps, start=nearest)


# --- Measures -----------------------------------------------------------------------------------


def _attacked(unit: Unit) -> Measured:
    """Clean and under every attack at every radius, on every split."""
    experiment, data = unit.experiment, unit.data
    predict, info = predictor(unit)
    attacks = attacks_on(unit, predict)
    records: list[Record] = []
    for split in experiment.splits:
        records += _scored(unit, predict, unit.rows(split), attacks, split)
    if data.dataset.task == "regression":
        raw = data.dataset.y_train
        info |= {"y_sd": float(raw.std(correction=0)), "y_range": float(raw.max() - raw.min())}
    num = min(experiment.num_test, len(data.x_test))
    resplit = unit.config.data not in OFFICIAL_SPLIT  # then every seed divides the same rows anew
    info |= {
        "num_train": len(data.x_train),
        "num_test": num,
        "overlap": num / len(data.x_train) if resplit else 0.0,
        "content": unit.content,
    }
    return records, info


def _scored(
    unit: Unit, predict: Predictor, rows: Rows, attacks: Mapping[str, Attack], split: str
) -> Iterator[Record]:
    with warnings.catch_warnings():
        # A constant and a forest have no gradient, and eps 2 of min-max units is beyond the data:
        # both are meant.
        warnings.simplefilter("ignore")
        result = evaluate(
            predict,
            rows,
            attacks=attacks,
            radii=unit.experiment.radii,
            train_y=unit.data.y_train,
            seed=unit.seed,
            progress=False,
        )
    keys = ("attack", "eps", "index", *_COLUMNS[unit.data.dataset.task])
    for each in result.records():
        if each["predictor"] == "predict":
            yield {"split": split, **{key: each[key] for key in keys if key in each}}


def _selective(unit: Unit) -> Measured:
    """Known images under PGD+, foreign ones under a PGD that lowers the entropy."""
    predict, info = predictor(unit)
    known, steps = unit.rows(), unit.experiment.steps
    foreign = _images()[: len(known[0])]
    nobody = torch.zeros(len(foreign), dtype=torch.long)
    inside = make_attack("pgd_plus", unit.ball, steps=steps)
    outside = PGD(unit.ball, stages=((ByLoss(certainty), steps),))
    records = [*_scored(unit, predict, known, {"both": inside}, "known")]
    records += _scored(unit, predict, (foreign, nobody), {"both": outside}, "foreign")
    return records, info


def _certified(unit: Unit) -> Measured:
    """Certified radii of the Bayesian vote: every draw of noise has a theta of its own."""
    config, data, draws = unit.config, unit.data, unit.experiment.draws
    model, posterior, info = trained(unit)
    generator = generator_for(unit.seed, "experiments/certified")
    fresh = FreshPredictive(model, posterior, 1, generator=generator)
    every = len(data.x_test) // unit.experiment.num_test
    x, y = data.x_test[::every], data.y_test[::every]
    lower = config.precision == "bfloat16"
    smoothed = Smoothed(fresh, config.sigma)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=lower):
        certificates = certify(smoothed, x, n=draws, alpha=0.001, generator=generator)
    pairs = zip(certificates.classes == y, certificates.radii, strict=True)
    records: list[Record] = [
        {"index": every * index, "correct": bool(right), "radius": float(radius)}
        for index, (right, radius) in enumerate(pairs)
    ]
    return records, {**info, "sigma": config.sigma, "draws": draws, "alpha": 0.001}


CLEAN = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of the spread of y
_ASCENTS = 200  # of the bound: a hundred come within 3 % of four hundred (700 rows)


def _floored(unit: Unit) -> Measured:
    """What no predictor is below on rows drawn from the whole table, in standard deviations of y,
    for every clean RMSE that it may have; none: any."""
    data = unit.data
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    generator = generator_for(unit.seed, "experiments/floor")
    index = torch.randperm(len(x), generator=generator)[: unit.experiment.num_test]
    x, y = x[index], y[index]
    y = (y - y.mean()) / y.std(correction=0)
    records: list[Record] = []
    for eps in unit.experiment.radii:
        ball = data.ball(unit.config.norm, eps)
        least = rmse_floor(x, y, ball, steps=_ASCENTS)
        records.append({"radius": eps, "clean": None, "floor": least})
        for clean in CLEAN:  # both are bounds: the higher one holds
            floor = rmse_floor(x, y, ball, clean_rmse=clean, steps=_ASCENTS)
            records.append({"radius": eps, "clean": clean, "floor": max(least, floor)})
    return records, {"num_rows": len(x)}


def _timed(unit: Unit) -> Measured:
    """100 training steps (first ten dropped) without and with MIX; 100 answers."""
    data = unit.data
    rows, repeats = (data.x_train, data.y_train), max(10, 2 * unit.experiment.steps)
    clock: dict[str, list[float]] = {}  # the seconds after each step or answer
    for kind, name in (("MIX", "robust training"), ("BL", "standard training")):
        chosen = unit.config.model_copy(update={**DEFENSES[kind].settings})
        model, posterior = build_model(chosen, data)
        channel, objective = build_defense(chosen, data)
        steps: Any = {"objective": objective, "steps": repeats + 10, "progress": False}
        clock[name] = fit(model, posterior, channel, rows, **steps).history["seconds"][9:]
    thetas, reference = thetas_of(posterior, 5, unit.seed), (rows[0][:100], rows[1][:100])
    predictors: dict[str, Predictor] = {
        "standard inference": PosteriorPredictive(model, thetas),
        "robust inference": Purifier(model, Noise(0.5), thetas, reference, "online"),
    }
    for name, predict in predictors.items():
        clock[name] = [time.perf_counter()]
        for index in range(repeats):
            with torch.no_grad():
                predict(data.x_test[index % len(data.x_test)][None])
            clock[name].append(time.perf_counter())
    records: list[Record] = [
        {"what": name, "index": index, "ms": 1e3 * (after - before)}
        for name, seconds in clock.items()
        for index, (before, after) in enumerate(pairwise(seconds))
    ]
    return records, {}


def _pictured(unit: Unit) -> Measured:
    """Images and class probabilities, clean and under each attack; pixels in hexadecimal."""
    predict, info = predictor(unit)
    x, y = unit.rows()
    records: list[Record] = []
    for name, attack in {"clean": None, **attacks_on(unit, predict)}.items():
        generator = generator_for(unit.seed, f"experiments/examples/{name}")
        moved = x if attack is None else attack(predict, x, y, generator=generator)
        with torch.no_grad():
            prediction: Any = predict(moved)
        probs: Tensor = prediction.probs
        pixels = (255 * moved.clamp(0, 1)).round().to(torch.uint8).flatten(1)
        for index in range(len(x)):
            shown = [float(f"{p:.4f}") for p in probs[index].tolist()]
            about = {"attack": name, "index": index, "y": int(y[index]), "probs": shown}
            records.append({**about, "pixels": bytes(pixels[index].tolist()).hex()})
    return records, info


def control_of(unit: Unit) -> Unit:
    """The undefended point estimate of the same network.

    >>> from advbayes.experiments.catalogue import EXPERIMENTS
    >>> control_of(Unit(EXPERIMENTS["mnist-own-audit"], "wide PGD", 0)).config.network
    'advbayes.networks:wide_conv_net'
    """
    same = {"network": unit.config.network, "defense": "none", "posterior": "point"}
    rows = {"control": Row(Defense("", same), unit.what.settings)}
    return replace(unit, experiment=replace(unit.experiment, rows=rows), row="control")


def _audited(unit: Unit) -> Measured:
    """The audit at tier standard, one record a check; the control is an undefended point estimate.

    MNIST's baseline (E21) is the run or bundle `baseline` beside the trained models, where there is
    one.
    """
    data, rows, num_thetas = unit.data, unit.rows(), unit.experiment.thetas
    predict, info = predictor(unit)
    control, _ = predictor(control_of(unit))
    model, posterior, _ = trained(unit)
    generator = generator_for(unit.seed, "experiments/fresh")
    place = None if unit.models is None else unit.models / "baseline"
    baseline = None
    if place is not None and place.exists():
        baseline = load_trained(place).predict(num_thetas)
    threat = ThreatModel.in_units_of(None if data.scaling is None else data.scaling.std)
    with TemporaryDirectory() as folder:
        evaluate(
            predict,
            rows,
            attacks=attacks_on(unit, predict),
            train_y=data.y_train,
            out=folder,
            progress=False,
        )
        verdict = audit(
            predict,
            rows,
            ball=unit.ball,
            threat_model=threat,
            support=Support(
                undefended=control,
                baseline=baseline,
                dataset=unit.config.data,
                evaluation=folder,
                fresh=FreshPredictive(model, posterior, num_thetas, generator=generator),
                channel=_channel(unit)[0],
                training=(data.x_train, data.y_train),
            ),
            seed=unit.seed,
            progress=False,
        )
    keys = ("title", "status", "mandatory", "advice", "figures")
    records = [
        {"check": each.id, **{key: each.json()[key] for key in keys}} for each in verdict.findings
    ]
    judged = {"level": verdict.level, "verdict": verdict.line(), "summary": dict(verdict.summary)}
    return records, {**info, **judged}


MEASURES: dict[str, Callable[[Unit], Measured]] = {
    "attacked": _attacked,
    "selective": _selective,
    "certified": _certified,
    "floored": _floored,
    "timed": _timed,
    "pictured": _pictured,
    "audited": _audited,
}

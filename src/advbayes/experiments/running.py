"""Do what is left of an experiment, one unit after the other or side by side; a kill loses at most
the units under way.

OUT/NAME/parts/  each unit (row x seed) until it is collected: records, then a line of the manifest
OUT/NAME/        records.jsonl.gz, manifest.json, table.md, figures: all of what is done
OUT/models/      trained posteriors, shared by the experiments
"""

from __future__ import annotations

import gzip
import importlib
import json
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advbayes import checks, store
from advbayes.checks import AdvBayesError, InputError
from advbayes.evaluation.tables import Grid
from advbayes.experiments.catalogue import Experiment, Spec
from advbayes.runs import record

Record = dict[str, Any]
Key = tuple[str, int]  # row and seed of a unit
MANIFEST, RECORDS = "manifest.json", "records.jsonl.gz"
CLUSTERS = ("slurm", "local")
POLL = 0.05  # seconds between two looks at what runs
COLLECT = 60.0  # seconds between two collections of what is done


def run(
    spec: Spec,
    out: Path,
    *,
    seeds: Sequence[int] | None = None,
    rows: Sequence[str] | None = None,
    jobs: int = 1,
    cluster: str | None = None,
    again: bool = False,
    quiet: bool = False,
) -> Path:
    """Run what is missing of an experiment into `out/name`, collect the records; the folder.

    Each unit is written whole or not at all. Units go seed by seed, so that a run that is stopped
    has every row of the first seeds. `again` replaces what is there. At most `jobs` units run at a
    time, in this process (one), in others, or as jobs of a `cluster`. Records and manifest are
    brought up to date every minute, for `write_views` at any time.
    """
    experiment = spec.experiment()
    folder = out / spec.name
    folder.mkdir(parents=True, exist_ok=True)
    chosen = list(experiment.rows) if rows is None else list(rows)
    if unknown := sorted(set(chosen) - experiment.rows.keys()):
        known = ", ".join(experiment.rows)
        raise InputError(f"rows must be among {known}, got {', '.join(unknown)}")
    numbers = range(experiment.seeds) if seeds is None else seeds
    wanted = [(row, seed) for seed in numbers for row in chosen]
    with store.Lock(folder):
        done = finished(folder)
        if spec.defenses:
            _check_same(folder, experiment, done)
        left = [unit for unit in wanted if again or key_of(*unit) not in done]
        board, collected = Board(spec.name, len(wanted), left, quiet), time.monotonic()
        units = _work_through(spec, folder, left, jobs, cluster, board)
        try:
            for row, seed, seconds in units:
                board.done(row, seed, seconds)
                if time.monotonic() - collected > COLLECT:
                    collect(folder, spec, experiment)
                    collected = time.monotonic()
        except UnitsFailedError:
            collect(folder, spec, experiment)
            raise
        finally:
            board.close()
        collect(folder, spec, experiment)
    return folder


def _check_same(folder: Path, experiment: Experiment, done: dict[str, dict[str, Any]]) -> None:
    """Refuse to go on with a comparison that was made with other settings or of other data."""
    from advbayes.experiments.units import Unit, made_from
    from advbayes.runs.config import RunConfig

    default = RunConfig().model_dump(mode="json", exclude_none=True)
    for about in done.values():
        if about["row"] not in experiment.rows:
            continue  # a defense that is not asked for this time
        now = made_from(Unit(experiment, about["row"], about["seed"]))
        told = {key: about.get(key, now[key]) for key in ("num_test", "content")}
        before = default | about["config"] | told  # a key that was not there yet had its default
        keys = sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key))
        if keys:
            was, wanted = (
                ", ".join(f"{key} {part.get(key)}" for key in keys) for part in (before, now)
            )
            raise InputError(
                f"{folder} holds a comparison with {was}; asked for {wanted}. Give another --out, "
                f"or delete that folder"
            )


def key_of(row: str, seed: int) -> str:
    """The name of a unit."""
    return f"{row} / seed {seed}"


def _part(folder: Path, row: str, seed: int) -> Path:
    slug = re.sub(r"[^A-Za-z0-9.=+-]+", "_", row)
    return folder / "parts" / f"{slug}.{seed}.json"


def work(spec: Spec, folder: Path, row: str, seed: int) -> float:
    """One unit, from nothing to its part of the records; the seconds it took."""
    from advbayes.experiments.units import Unit, run_unit

    began = time.monotonic()
    records, about = run_unit(Unit(spec.experiment(), row, seed, folder.parent / "models"))
    place = _part(folder, row, seed)
    place.parent.mkdir(exist_ok=True)
    store.write_bytes(place.with_suffix(".jsonl.gz"), packed(records))
    store.write_document(place, {"row": row, "seed": seed, **about})
    return time.monotonic() - began


def packed(records: Sequence[Record]) -> bytes:
    """JSON lines, compressed; the same records give the same bytes."""
    lines = (json.dumps(each, separators=(",", ":"), allow_nan=False) for each in records)
    return _compressed(f"{line}\n".encode() for line in lines)


def _compressed(lines: Iterable[bytes]) -> bytes:
    return gzip.compress(b"".join(lines), 9, mtime=0)


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file of records."""
    return gzip.decompress(path.read_bytes()).splitlines(keepends=True)


class UnitsFailedError(AdvBayesError, ChildProcessError):
    """Units that failed twice; the others are done."""


Job = Future[Any]  # submitit's jobs, too, have `done` and `exception`


class Here(Executor):
    """In this process, at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Job:
        job: Job = Future()
        try:
            job.set_result(fn(*args, **options))
        except Exception as error:
            job.set_exception(error)
        return job


class Processes(Executor):
    """In processes of this machine; one that dies takes no other along."""

    def __init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the workers
        self.pools: dict[Job, ProcessPoolExecutor] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Job:
        idle = next((job for job in self.pools if job.done()), None)
        pool = None if idle is None else self.pools.pop(idle)
        if pool is None or (idle is not None and isinstance(idle.exception(), BrokenProcessPool)):
            pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        job = pool.submit(fn, *args, **options)
        self.pools[job] = pool
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for pool in self.pools.values():
            pool.shutdown(wait, cancel_futures=cancel_futures)


class Cluster(Executor):
    """As jobs of a scheduler, by submitit: `slurm`, or `local` processes of the same kind."""

    def __init__(self, kind: str, folder: Path) -> None:
        with checks.extra("--cluster needs submitit", "scale"):
            submitit = importlib.import_module("submitit")
        self.jobs: list[Any] = []
        self.executor = submitit.AutoExecutor(folder=folder, cluster=kind)
        self.executor.update_parameters(timeout_min=24 * 60, name="advbayes")
        if kind == "slurm":
            self.executor.update_parameters(cpus_per_task=1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Job:
        self.jobs.append(self.executor.submit(fn, *args, **options))
        return self.jobs[-1]  # type: ignore[no-any-return]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for job in self.jobs:
            if not job.done():
                job.cancel()


def _work_through(
    spec: Spec, folder: Path, left: Sequence[Key], jobs: int, cluster: str | None, board: Board
) -> Iterator[tuple[str, int, float]]:
    """The units as they are done; those that fail twice are raised at the end, with their logs."""
    executor: Executor = Here() if jobs == 1 else Processes()
    if cluster is not None:
        executor = Cluster(checks.choice("cluster", cluster, CLUSTERS), folder / "jobs")
    waiting, running, failed = list(left), dict[Job, Key](), set[Key]()
    logs: dict[Path, BaseException] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                row, seed = waiting.pop(0)
                board.begin(row, seed)
                running[executor.submit(work, spec, folder, row, seed)] = row, seed
            for job in [job for job in running if job.done()]:
                unit = running.pop(job)
                error = job.exception()
                if error is None:
                    yield *unit, job.result()
                elif isinstance(error, store.DiskFullError):  # another try needs the room, too
                    raise error
                elif unit in failed:
                    logs[_log(folder, *unit, job, error)] = error
                else:
                    failed.add(unit)
                    waiting.append(unit)
            if running:
                time.sleep(POLL if cluster is None else 20 * POLL)
    finally:
        executor.shutdown(cancel_futures=True)
    if logs:
        raise UnitsFailedError(
            f"{len(logs)} of {len(left)} units failed twice, the others are done; why is in "
            f"{', '.join(map(str, logs))}; the first: {next(iter(logs.values()))!s:.300}. The same "
            f"command tries them again"
        )


def _log(folder: Path, row: str, seed: int, job: Any, error: BaseException) -> Path:
    """What is known of a failure: a job's own log, where it has one, and the error."""
    place = folder / "failed" / _part(folder, row, seed).with_suffix(".log").name
    place.parent.mkdir(exist_ok=True)
    printed = "" if isinstance(job, Future) else job.stderr() or ""
    text = printed + "".join(traceback.format_exception(error))
    store.write_bytes(place, text.encode())
    return place


def finished(folder: Path) -> dict[str, dict[str, Any]]:
    """The units that are done, by name: those of the manifest, and parts not yet collected."""
    units: dict[str, dict[str, Any]] = {}
    if (folder / MANIFEST).is_file():
        manifest: Any = store.read_document(folder / MANIFEST)
        units |= manifest["units"]
    for path in sorted((folder / "parts").glob("*.json")):
        about: Any = store.read_document(path)
        units[key_of(about["row"], about["seed"])] = about
    return units


def collect(folder: Path, spec: Spec, experiment: Experiment) -> None:
    """All finished units as one file of records and one manifest, in place of the parts."""
    units = finished(folder)
    records: dict[str, list[bytes]] = {}
    if (folder / RECORDS).is_file():
        for line in read_lines(folder / RECORDS):
            each = json.loads(line)
            records.setdefault(key_of(each["row"], each["seed"]), []).append(line)
    parts = {name: _part(folder, unit["row"], unit["seed"]) for name, unit in units.items()}
    parts = {name: path for name, path in parts.items() if path.exists()}
    for name, path in parts.items():
        records[name] = read_lines(path.with_suffix(".jsonl.gz"))
    order = {row: index for index, row in enumerate(experiment.rows)}

    def place(name: str) -> tuple[int, int]:
        return order.get(units[name]["row"], len(order)), units[name]["seed"]

    names = sorted(units, key=place)
    whole = _compressed(line for name in names for line in records[name])
    store.write_bytes(folder / RECORDS, whole)
    manifest = {
        "experiment": spec.name,
        "preset": spec.preset,
        "title": experiment.title,
        **record(),
        "commits": sorted({unit["commit"] for unit in units.values()}),
        "seeds": sorted({unit["seed"] for unit in units.values()}),
        "seconds": round(sum(unit["seconds"] for unit in units.values()), 1),
        "versions": store.versions(),
        "spec": spec.to_json(),
        "units": {name: units[name] for name in names},
    }
    store.write_document(folder / MANIFEST, manifest)
    for path in parts.values():
        path.unlink()  # first: without its line of the manifest a part is no part
        path.with_suffix(".jsonl.gz").unlink()


@dataclass
class Board:
    """What runs and what is left: a live table on a terminal, a line for each unit elsewhere."""

    name: str
    total: int
    left: Sequence[Key]
    quiet: bool = False
    running: dict[Key, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    live: Any = None

    def begin(self, row: str, seed: int) -> None:
        self.running[row, seed] = time.monotonic()
        if self.live is None and not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            screen = Console(stderr=True)
            self.live = Live(console=screen, get_renderable=self._table, refresh_per_second=1)
            self.live.start()

    def done(self, row: str, seed: int, seconds: float) -> None:
        del self.running[row, seed]
        self.seconds.append(seconds)
        num = len(self.left) - len(self.seconds)
        if self.live is None and not self.quiet:
            line = f"{self.name}: {row}, seed {seed}: {seconds:.0f} s; {num} of {self.total} left"
            print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Give the terminal back."""
        if self.live is not None:
            self.live.stop()

    def _table(self) -> Any:
        num = len(self.left) - len(self.seconds) - len(self.running)
        title = f"{self.name}: {num} of {self.total} waiting"
        if self.seconds:
            mean = sum(self.seconds) / len(self.seconds)
            title += f", about {mean * num / max(1, len(self.running)) / 60:.0f} min"
        now = time.monotonic()
        rows = [(*unit, f"{now - began:.0f}") for unit, began in self.running.items()]
        return Grid(("row", "seed", "seconds"), rows, title).rich()

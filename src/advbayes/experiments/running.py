"""Do what is left of an experiment, one unit after the other or side by side; a kill loses at most
the units under way.

<out>/<experiment>/parts/    each unit (row x seed) while the experiment grows: records, then its
line of the manifest <out>/<experiment>/          records.jsonl.gz, manifest.json, table.md,
figures: all of what is done <out>/models/                trained posteriors, shared by the
    experiments
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advbayes import store
from advbayes.checks import InputError
from advbayes.evaluation.tables import Grid
from advbayes.experiments.catalogue import Experiment, Spec
from advbayes.runs import record

Record = dict[str, Any]
MANIFEST, RECORDS = "manifest.json", "records.jsonl.gz"


def run(
    spec: Spec,
    out: Path,
    *,
    seeds: Sequence[int] | None = None,
    rows: Sequence[str] | None = None,
    jobs: int = 1,
    again: bool = False,
    quiet: bool = False,
) -> Path:
    """Run what is missing of an experiment into `out/name`, collect the records; the folder.

    Each unit is written whole or not at all. Units go seed by seed, so that a run that is stopped
    has every row of the first seeds. `again` replaces what is there.
    """
    experiment = spec.experiment()
    folder = out / spec.name
    folder.mkdir(parents=True, exist_ok=True)
    chosen = list(experiment.rows) if rows is None else list(rows)
    unknown = sorted(set(chosen) - experiment.rows.keys())
    if unknown:
        raise InputError(
            f"rows must be among {', '.join(experiment.rows)}, got {', '.join(unknown)}"
        )
    wanted = [
        (row, seed)
        for seed in (range(experiment.seeds) if seeds is None else seeds)
        for row in chosen
    ]
    with store.Lock(folder):
        done = set(finished(folder))
        left = [unit for unit in wanted if again or key_of(*unit) not in done]
        board = Board(spec.name, len(wanted), left, quiet)
        for row, seed, seconds in _work_through(spec, folder, out / "models", left, jobs, board):
            board.done(row, seed, seconds)
        collect(folder, spec, experiment)
    return folder


def key_of(row: str, seed: int) -> str:
    """The name of a unit.

    >>> key_of("BL, lr 0.01", 3)
    'BL, lr 0.01 / seed 3'
    """
    return f"{row} / seed {seed}"


def _part(folder: Path, row: str, seed: int) -> Path:
    slug = re.sub(r"[^A-Za-z0-9.=+-]+", "_", row)
    return folder / "parts" / f"{slug}.{seed}.json"


def work(spec: Spec, folder: Path, models: Path, row: str, seed: int) -> float:
    """One unit, from nothing to its part of the records; the seconds it took."""
    from advbayes.experiments.units import Unit, run_unit

    began = time.monotonic()
    records, about = run_unit(Unit(spec.experiment(), row, seed, models))
    place = _part(folder, row, seed)
    place.parent.mkdir(exist_ok=True)
    store.write_bytes(place.with_suffix(".jsonl.gz"), packed(records))
    store.write_document(place, {"row": row, "seed": seed, **about})
    return time.monotonic() - began


def packed(records: Sequence[Record]) -> bytes:
    """JSON lines, compressed; the same records give the same bytes."""
    lines = "".join(
        json.dumps(each, separators=(",", ":"), allow_nan=False) + "\n" for each in records
    )
    return gzip.compress(lines.encode(), 9, mtime=0)


def _work_through(
    spec: Spec, folder: Path, models: Path, left: Sequence[tuple[str, int]], jobs: int, board: Board
) -> Iterator[tuple[str, int, float]]:
    if jobs == 1:
        for row, seed in left:
            board.begin(row, seed)
            yield row, seed, work(spec, folder, models, row, seed)
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the workers
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting, running = list(left), dict[Future[float], tuple[str, int]]()
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    row, seed = waiting.pop(0)
                    running[pool.submit(work, spec, folder, models, row, seed)] = row, seed
                    board.begin(row, seed)
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    row, seed = running.pop(future)
                    yield row, seed, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


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
        for line in gzip.decompress((folder / RECORDS).read_bytes()).splitlines(keepends=True):
            each = json.loads(line)
            records.setdefault(key_of(each["row"], each["seed"]), []).append(line)
    parts = sorted((folder / "parts").glob("*.json"))
    for path in parts:
        about: Any = store.read_document(path)
        lines = gzip.decompress(path.with_suffix(".jsonl.gz").read_bytes()).splitlines(
            keepends=True
        )
        records[key_of(about["row"], about["seed"])] = lines
    order = {row: index for index, row in enumerate(experiment.rows)}
    names = sorted(
        units, key=lambda name: (order.get(units[name]["row"], len(order)), units[name]["seed"])
    )
    whole = gzip.compress(b"".join(line for name in names for line in records[name]), 9, mtime=0)
    store.write_bytes(folder / RECORDS, whole)
    seconds = round(sum(unit["seconds"] for unit in units.values()), 1)
    manifest = {
        "experiment": spec.name,
        "preset": spec.preset,
        "title": experiment.title,
        **record(),
        "commits": sorted({unit["commit"] for unit in units.values()}),
        "seeds": sorted({unit["seed"] for unit in units.values()}),
        "seconds": seconds,
        "versions": store.versions(),
        "spec": spec.to_json(),
        "units": {name: units[name] for name in names},
    }
    store.write_document(folder / MANIFEST, manifest)
    for path in parts:
        path.unlink()  # first: without its line of the manifest a part is no part
        path.with_suffix(".jsonl.gz").unlink()


@dataclass
class Board:
    """What runs and what is left: a live table on a terminal, a line for each unit elsewhere."""

    name: str
    total: int
    left: Sequence[tuple[str, int]]
    quiet: bool = False
    running: dict[tuple[str, int], float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    live: Any = None

    def begin(self, row: str, seed: int) -> None:
        self.running[row, seed] = time.monotonic()
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            if self.live is None:
                self.live = Live(
                    console=Console(stderr=True), get_renderable=self._table, refresh_per_second=1
                )
                self.live.start()

    def done(self, row: str, seed: int, seconds: float) -> None:
        del self.running[row, seed]
        self.seconds.append(seconds)
        num = len(self.left) - len(self.seconds)
        if self.live is not None:
            if num == 0:
                self.live.stop()
        elif not self.quiet:
            line = f"{self.name}: {row}, seed {seed}: {seconds:.0f} s; {num} of {self.total} left"
            print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)

    def _table(self) -> Any:
        num = len(self.left) - len(self.seconds) - len(self.running)
        mean = sum(self.seconds) / len(self.seconds) if self.seconds else 0.0
        guess = (
            f", about {mean * num / max(1, len(self.running)) / 60:.0f} min" if self.seconds else ""
        )
        rows = [
            (row, seed, f"{time.monotonic() - began:.0f}")
            for (row, seed), began in self.running.items()
        ]
        title = f"{self.name}: {num} of {self.total} waiting{guess}"
        return Grid(("row", "seed", "seconds"), rows, title).rich()

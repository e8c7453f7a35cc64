"""Units of an experiment side by side: in processes, as jobs of submitit; failures are tried once
more, then told with their log, and everything else is done and can be read meanwhile."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from advbayes import store
from advbayes.experiments import running
from advbayes.experiments.catalogue import Spec
from advbayes.experiments.running import UnitsFailedError, run

MODULES = Path(__file__).parent


def unit(spec: Spec, folder: Path, row: str, seed: int) -> float:
    """A unit that takes no time. In seed 1 it fails at the first try, in seed 2 always; a worker
    that it kills cannot say anything."""
    tries = folder / f"tries-{row}-{seed}"
    count = int(tries.read_text()) if tries.exists() else 0
    tries.write_text(str(count + 1))
    if seed == 2 and row == "MIX":
        os._exit(9)
    if seed == 2 or (seed == 1 and count == 0):
        raise ArithmeticError(f"try {count} of seed {seed}")
    place = running._part(folder, row, seed)
    place.parent.mkdir(exist_ok=True)
    records = [{"row": row, "seed": seed, "value": seed}]
    store.write_bytes(place.with_suffix(".jsonl.gz"), running.packed(records))
    about = {"row": row, "seed": seed, "seconds": 0.0, "commit": "none"}
    store.write_document(place, about)
    return 0.0


@pytest.mark.parametrize(("jobs", "cluster"), [(1, None), (2, None), (3, "local")])
def test_failures_are_tried_again_and_then_told(
    jobs: int, cluster: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = multiprocessing.get_context("fork")  # which has torch already
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: forked)
    monkeypatch.setattr(running, "work", unit)
    monkeypatch.setenv("PYTHONPATH", f"{MODULES.parent}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spec = Spec("wine", "quick")
    rows = ["BL", "MIX"] if jobs == 2 else ["BL"]  # nobody may kill this process
    seeds = [0, 2] if cluster else [0, 1, 2]  # a job is two processes
    options = {"rows": rows, "seeds": seeds, "jobs": jobs, "cluster": cluster, "quiet": True}
    total = len(seeds) * len(rows)
    with pytest.raises(UnitsFailedError, match=f"^{len(rows)} of {total} units failed"):
        run(spec, tmp_path, **options)  # type: ignore[arg-type]
    folder = tmp_path / "wine"
    done = {f"{row} / seed {seed}" for row in rows for seed in seeds[:-1]}
    assert running.finished(folder).keys() == done
    assert (folder / "manifest.json").exists()
    for row in rows:
        tries = [(folder / f"tries-{row}-{seed}").read_text() for seed in seeds]
        assert tries == ["1" if seed == 0 else "2" for seed in seeds]
    assert "try 1 of seed 2" in (folder / "failed" / "BL.2.log").read_text()
    assert (folder / "failed" / "MIX.2.log").exists() == ("MIX" in rows)
    if jobs == 1:  # the same command does what is left, and that alone
        monkeypatch.setattr(running, "work", lambda *place: unit(*place[:3], place[3] + 5))
        run(spec, tmp_path, **options)  # type: ignore[arg-type]
        assert sorted(path.name for path in folder.glob("tries-*")) == [
            f"tries-BL-{seed}" for seed in (0, 1, 2, 7)
        ]


def test_what_is_done_can_be_read_while_the_rest_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def watching(spec: Spec, folder: Path, row: str, seed: int) -> float:
        manifest = folder / "manifest.json"
        held = store.read_document(manifest) if manifest.exists() else {"units": {}}
        seen.append(len(held["units"]))  # type: ignore[index,arg-type,call-overload]
        return unit(spec, folder, row, 0 * seed + 10 + seed)

    monkeypatch.setattr(running, "work", watching)
    monkeypatch.setattr(running, "COLLECT", 0.0)
    run(Spec("wine", "quick"), tmp_path, rows=["BL"], seeds=[0, 3, 4], quiet=True)
    assert seen == [0, 1, 2]


def test_an_unknown_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cluster must be one of"):
        run(Spec("wine", "quick"), tmp_path, seeds=[0], rows=["BL"], cluster="pbs", quiet=True)

"""Eight processes, one run name, 100 rounds, some killed at a random moment: no mixed folder, no
lost run.

In each round all eight want the folder RUN. Half ask for it alone (a resumed run: the lock
decides), half for a folder of their own under that name (a new run). Whoever holds a folder logs
records and replaces its checkpoint; two of the eight are killed while they do. Afterwards every
folder must hold one whole checkpoint, written by a process that held the lock, and its log must
show that holders never overlapped.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
import warnings
from pathlib import Path

import outcome
from tests import faults

from advbayes.store import Lock, LockedError, RecordLog, claim, read_bundle

SEED = 0
ROUNDS, PROCESSES, SAVES = 100, 8, 3


def work(folder: Path, who: int) -> None:
    """What a run does: record the start, save, record the end of each save."""
    log = RecordLog(folder / "history.jsonl")
    log.append({"who": who, "event": "enter"})
    for step in range(SAVES):
        version = 1000 * who + step
        faults.small_bundle(folder / "checkpoint", version)
        log.append({"who": who, "event": "saved", "version": version})
    log.append({"who": who, "event": "leave"})


def rival(base: Path, who: int, gate: float) -> int:
    """One process of a round: 0 finished, 2 refused by the lock."""
    time.sleep(max(0.0, gate - time.time()))
    lock = claim(base / "run") if who % 2 else Lock(base / "run")
    try:
        with lock:
            work(Path(lock.folder), who)
    except LockedError:
        return 2
    return 0


def check(folder: Path, killed: set[int]) -> None:
    """One holder at a time, and the checkpoint is the last recorded, or one that a killed holder
    did not come to record."""
    holder: int | None = None
    possible: set[object] = {None}
    for record in RecordLog(folder / "history.jsonl").read():
        who, event = record["who"], record["event"]
        assert isinstance(who, int)
        if event == "enter":
            assert holder is None or holder in killed, (
                f"{who} entered while {holder} held {folder.name}"
            )
            holder = who
            possible |= {1000 * who} if who in killed else set()
        else:
            assert who == holder, f"{who} wrote in the folder of {holder}"
            if event == "saved":
                version = record["version"]
                assert isinstance(version, int)
                possible = {version, version + 1} if who in killed else {version}
            else:
                holder = None
    found = (
        faults.small_version(read_bundle(folder / "checkpoint"))
        if (folder / "checkpoint").exists()
        else None
    )
    assert found in possible, f"{folder.name} holds {found}, not one of {possible}"


def main() -> None:
    start = time.time()
    draw = random.Random(SEED)
    finished, refused, killed_in_all, folders, failures = 0, 0, 0, 0, []
    for round_ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as temporary:
            base = Path(temporary)
            (base / "run").mkdir()
            gate = time.time() + 0.05
            children: dict[int, int] = {}
            for who in range(PROCESSES):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    pid = os.fork()
                if pid == 0:
                    status = 1
                    try:
                        status = rival(base, who, gate)
                    finally:
                        os._exit(status)
                children[pid] = who
            victims = draw.sample(sorted(children), 2)
            for pid in victims:
                time.sleep(draw.random() * 0.2)
                os.kill(pid, signal.SIGKILL)  # it is our child and not yet waited for
            ended = {
                children[pid]: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children
            }
            killed = {who for who, code in ended.items() if code == -signal.SIGKILL}
            finished += sum(code == 0 for code in ended.values())
            refused += sum(code == 2 for code in ended.values())
            killed_in_all += len(killed)
            try:
                assert not set(ended.values()) - {0, 2, -signal.SIGKILL}, (
                    f"a process failed: {ended}"
                )
                runs = sorted(base.iterdir())
                folders += len(runs)
                for folder in runs:
                    check(folder, killed)
                done = {who for who, code in ended.items() if code == 0}
                left = {
                    record["who"]
                    for folder in runs
                    for record in RecordLog(folder / "history.jsonl").read()
                    if record["event"] == "leave"
                }
                assert done <= left, f"runs lost: {done - left}"
                for folder in runs:  # a killed holder is no obstacle
                    with Lock(folder):
                        work(folder, 99)
                    assert (
                        faults.small_version(read_bundle(folder / "checkpoint"))
                        == 99_000 + SAVES - 1
                    )
            except Exception as error:
                failures.append(f"round {round_}: {error!r}")
    outcome.write(
        "bundle_rivals",
        wanted="8 processes on one run name, 100 rounds: no mixed folder, no lost run",
        passed=not failures,
        seed=SEED,
        seconds=time.time() - start,
        rounds=ROUNDS,
        processes=PROCESSES,
        finished=finished,
        refused_by_lock=refused,
        killed=killed_in_all,
        folders=folders,
        failures=failures[:20],
    )


if __name__ == "__main__":
    main()

"""Damage and kills: the same trials for everything that is saved."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import outcome
from tests import faults

from advbayes.store import StoreError

SEED = 0
FLIPS, CUTS = 1000, 100


def damage(
    name: str,
    places: Sequence[tuple[Path, Path]],  # a file, and what is loaded of which it is a part
    load: Callable[[Path, int], object],  # what to load, number of the trial
    intact: Callable[[], bool],  # asked when all is mended
) -> None:
    """Single-bit flips and truncations of each file in turn: every load is refused, naming it."""
    start, draw = time.time(), random.Random(SEED)
    failures: list[str] = []
    by_file: Counter[str] = Counter()
    for trial in range(FLIPS + CUTS):
        file, whole = places[trial % len(places)]
        data = file.read_bytes()
        damaged = bytearray(data)
        if trial < FLIPS:
            bit = draw.randrange(8 * len(data))
            damaged[bit // 8] ^= 1 << bit % 8
        else:
            del damaged[draw.randrange(len(data)) :]
        file.write_bytes(damaged)
        try:
            load(whole, trial)
            failures.append(f"{file.name}: loaded")
        except StoreError as error:
            if file.name not in str(error):
                failures.append(f"{file.name}: not named: {error}")
        except BaseException as error:
            failures.append(f"{file.name}: {type(error).__name__}: {error}")
        by_file[file.name] += 1
        file.write_bytes(data)
    assert intact()
    outcome.write(
        name,
        wanted="1,100 of 1,100 refused, naming the file",
        passed=not failures,
        seed=SEED,
        seconds=time.time() - start,
        flips=FLIPS,
        truncations=CUTS,
        refused=FLIPS + CUTS - len(failures),
        failures=failures[:20],
        by_file=by_file,
    )


def kills(
    name: str,
    scene: Path,
    forms: dict[str, int],  # what it is saved as, and how many files that makes (1: no folder)
    save: Callable[[Path, int], object],  # where, which of three versions
    version: Callable[[Path], int],
) -> None:
    """SIGKILL before, halfway through and after every system call that changes the disk."""
    start, failures = time.time(), []
    ended, calls = Counter[str](), Counter[str]()
    for form, num_files in forms.items():
        for replacing in (True, False):

            def fresh(trial: object, form: str = form, replacing: bool = replacing) -> Path:
                path = scene / f"{form}-{replacing}-{trial}" / form
                path.parent.mkdir()
                if replacing:
                    save(path, 1)
                return path

            first = fresh("first")
            points = faults.kill_points(lambda first=first: save(first, 2))
            for number, point in enumerate(points):
                path = fresh(number)
                calls[f"{point[1]}, {point[2]}"] += 1
                try:
                    killed = faults.killed_at(point, lambda path=path: save(path, 2))
                    assert killed, "was not killed"
                    found = version(path) if replacing or path.exists() else 0
                    assert found in ((1, 2) if replacing else (0, 2)), f"found version {found}"
                    ended["new" if found == 2 else "old"] += 1
                    save(path, 3)
                    assert version(path) == 3, "the next save is not there"
                    beside = os.listdir(path.parent)
                    assert beside == [form], f"left behind {beside}"
                    inside = [n for n in os.listdir(path) if n != ".lock"] if path.is_dir() else [1]
                    assert len(inside) == num_files, f"left behind {inside}"
                except Exception as error:
                    failures.append(f"{form}, replacing {replacing}, {point}: {error!r}")
    outcome.write(
        name,
        wanted="at least 200 kill points; always the old or the new one, whole; the next save "
        "works and cleans up",
        passed=calls.total() >= 200 and not failures,
        seed=None,
        seconds=time.time() - start,
        kill_points=calls.total(),
        old=ended["old"],
        new=ended["new"],
        failures=failures[:20],
        calls=calls,
    )

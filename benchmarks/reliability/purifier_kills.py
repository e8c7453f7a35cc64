"""Kill a purifier's save (SIGKILL) at every system call that changes the disk; then load and save
again."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import outcome
import torch
from tests import faults
from tests.test_purifier_saving import answer, purifier_of

from advbayes import Purifier


def main() -> None:
    start = time.time()
    points, kept, advanced, failures = 0, 0, 0, []
    calls: dict[str, int] = {}
    old, new = purifier_of(1, num=6), purifier_of(2, num=6)
    wanted = {1: answer(old), 2: answer(new)}
    with tempfile.TemporaryDirectory() as folder:
        for replacing in (True, False):

            def fresh(name: str, replacing: bool = replacing) -> Path:
                home = Path(folder) / f"{replacing}-{name}"
                home.mkdir()
                if replacing:
                    old.save(home / "a")
                return home / "a"

            trial = fresh("trial")
            for number, point in enumerate(faults.kill_points(lambda trial=trial: new.save(trial))):
                path = fresh(f"{number}")
                points += 1
                calls[f"{point[1]}, {point[2]}"] = calls.get(f"{point[1]}, {point[2]}", 0) + 1
                try:
                    assert faults.killed_at(point, lambda path=path: new.save(path)), (
                        "was not killed"
                    )
                    version = 0
                    if replacing or path.exists():
                        found = answer(Purifier.load(path))
                        version = next(
                            (v for v, known in wanted.items() if torch.equal(found, known)), -1
                        )
                    assert version in ((1, 2) if replacing else (0, 2)), f"version {version}"
                    kept += version != 2
                    advanced += version == 2
                    old.save(path)
                    assert torch.equal(answer(Purifier.load(path)), wanted[1]), (
                        "the next save is not there"
                    )
                    assert os.listdir(path.parent) == ["a"], (
                        f"left behind {os.listdir(path.parent)}"
                    )
                    left = [name for name in os.listdir(path) if name != ".lock"]
                    assert len(left) == 6, f"left behind {left}"
                except Exception as error:
                    failures.append(f"replacing {replacing}, {point}: {error!r}")
    outcome.write(
        "purifier_kills",
        wanted="at least 200 kill points; always the old or the new purifier, whole; the next "
        "save works and cleans up",
        passed=points >= 200 and not failures,
        seed=None,
        seconds=time.time() - start,
        kill_points=points,
        old_purifier=kept,
        new_purifier=advanced,
        failures=failures[:20],
        calls=calls,
    )


if __name__ == "__main__":
    main()

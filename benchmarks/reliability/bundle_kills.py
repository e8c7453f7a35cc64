"""Kill a save (SIGKILL) before, halfway through and after every system call that changes the disk;
then load and save again."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import outcome
from tests import faults

from advbayes.store import read_bundle


def main() -> None:
    start = time.time()
    points, kept, advanced, failures = 0, 0, 0, []
    calls: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for form in ("checkpoint", "checkpoint.advbayes"):
            for before in (True, False):
                scene = Path(folder) / f"{form}-{before}"
                scene.mkdir()

                def fresh(
                    name: str, scene: Path = scene, form: str = form, before: bool = before
                ) -> Path:
                    (scene / name).mkdir()
                    if before:
                        faults.small_bundle(scene / name / form, 1)
                    return scene / name / form

                trial = fresh("trial")
                for number, point in enumerate(
                    faults.kill_points(lambda trial=trial: faults.small_bundle(trial, 2))
                ):
                    path = fresh(f"{number}")
                    points += 1
                    calls[f"{point[1]}, {point[2]}"] = calls.get(f"{point[1]}, {point[2]}", 0) + 1
                    try:
                        assert faults.killed_at(
                            point, lambda path=path: faults.small_bundle(path, 2)
                        ), "was not killed"
                        found = (
                            faults.small_version(read_bundle(path))
                            if before or path.exists()
                            else 0
                        )
                        assert found in ((1, 2) if before else (0, 2)), f"found version {found}"
                        kept += found != 2
                        advanced += found == 2
                        faults.small_bundle(path, 3)
                        assert faults.small_version(read_bundle(path)) == 3, (
                            "the next save is not there"
                        )
                        assert os.listdir(path.parent) == [form], (
                            f"left behind {os.listdir(path.parent)}"
                        )
                        assert form != "checkpoint" or len(os.listdir(path)) == 5, (
                            f"left behind {os.listdir(path)}"
                        )
                    except Exception as error:
                        failures.append(f"{form}, replacing {before}, {point}: {error!r}")
    outcome.write(
        "bundle_kills",
        wanted="at least 200 kill points; always the old or the new checkpoint, whole; the next "
        "save works and cleans up",
        passed=points >= 200 and not failures,
        seed=None,
        seconds=time.time() - start,
        kill_points=points,
        old_checkpoint=kept,
        new_checkpoint=advanced,
        failures=failures,
        calls=calls,
    )


if __name__ == "__main__":
    main()

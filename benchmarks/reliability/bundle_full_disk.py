"""Save to a disk that fills up at every possible point (a real, small tmpfs; needs the right to
mount)."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

import outcome
from tests import faults

from advbayes.store import DiskFullError, RecordLog, read_bundle

PAGE = 4096


def filled(base: Path, leave: int) -> Path:
    """Take all but `leave` bytes."""
    filler = base / "filler"
    free = os.statvfs(base).f_bavail * os.statvfs(base).f_frsize
    with filler.open("wb") as file:
        file.write(bytes(max(0, free - leave)))
    return filler


def main() -> None:
    start = time.time()
    refused, saved, failures = 0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
        try:
            base = Path(folder)
            for form in ("checkpoint", "checkpoint.advbayes"):
                for leave in range(0, 20 * PAGE, PAGE):
                    version, home = 10 + leave, base / "home"
                    home.mkdir()
                    faults.small_bundle(home / form, 1)
                    log = RecordLog(home / "log")
                    log.append({"step": 0, "note": "x" * 2000}, {"step": 1, "note": "x" * 2000})
                    filler = filled(base, leave)
                    try:
                        try:
                            faults.small_bundle(home / form, version)
                            saved += 1
                            assert faults.small_version(read_bundle(home / form)) == version
                        except DiskFullError as error:
                            refused += 1
                            if not re.search(
                                r"wanted \d+ bytes of disk, got \d+ bytes free", str(error)
                            ):
                                failures.append(f"unclear: {error}")
                            assert faults.small_version(read_bundle(home / form)) == 1
                        try:
                            log.append({"step": 2, "note": "x" * 40 * PAGE})
                            assert len(log.read()) == 3
                        except DiskFullError:
                            assert len(log.read()) == 2
                        filler.unlink()
                        faults.small_bundle(home / form, 3)
                        assert faults.small_version(read_bundle(home / form)) == 3
                        log.append({"step": 3})
                        assert log.read()[-1] == {"step": 3}
                        assert sorted(os.listdir(home)) == [form, "log"], os.listdir(home)
                    except Exception as error:
                        failures.append(f"{form}, {leave} bytes left: {error!r}")
                    subprocess.run(["rm", "-r", os.fspath(home)], check=True)
                    filler.unlink(missing_ok=True)
        finally:
            subprocess.run(["umount", folder], check=True)
    outcome.write(
        "bundle_full_disk",
        wanted="the last checkpoint intact, the message says bytes needed and free, the next save "
        "works",
        passed=not failures and refused > 0 and saved > 0,
        seed=None,
        seconds=time.time() - start,
        trials=refused + saved,
        refused=refused,
        saved=saved,
        failures=failures[:20],
    )


if __name__ == "__main__":
    main()

"""Kill a save (SIGKILL) before, halfway through and after every system call that changes the disk;
then load and save again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import trials
from tests import faults

from advbayes.store import read_bundle


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trials.kills(
            "bundle_kills",
            Path(folder),
            {"checkpoint": 5, "checkpoint.advbayes": 1},
            faults.small_bundle,
            lambda path: faults.small_version(read_bundle(path)),
        )


if __name__ == "__main__":
    main()

"""Kill a purifier's save (SIGKILL) at every system call that changes the disk; then load and save
again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import trials
from tests.test_purifier_saving import answer, purifier_of

from advbayes import Purifier


def main() -> None:
    purifiers = {number: purifier_of(number, num=6) for number in (1, 2, 3)}
    answers = {number: answer(purifier) for number, purifier in purifiers.items()}

    def version(path: Path) -> int:
        found = answer(Purifier.load(path))
        return next((n for n, wanted in answers.items() if torch.equal(found, wanted)), -1)

    with tempfile.TemporaryDirectory() as folder:
        trials.kills(
            "purifier_kills",
            Path(folder),
            {"a": 6},
            lambda path, number: purifiers[number].save(path),
            version,
        )


if __name__ == "__main__":
    main()

"""1,000 single-bit flips and 100 truncations of a saved purifier, read into memory and from disk:
all refused."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import trials
from tests.test_purifier_saving import answer, purifier_of

from advbayes import Purifier


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, purifier = Path(folder) / "purifier", purifier_of(1)
        purifier.save(path)

        def load(whole: Path, trial: int) -> Purifier:
            return Purifier.load(whole, memory_limit=1 if trial % 2 else 1 << 30)

        def intact() -> bool:
            return torch.equal(answer(Purifier.load(path)), answer(purifier))

        places = [(file, path) for file in sorted(path.iterdir())]
        trials.damage("purifier_damage", places, load, intact)


if __name__ == "__main__":
    main()

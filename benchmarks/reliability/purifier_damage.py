"""1,000 single-bit flips and 100 truncations of a saved purifier, read into memory and from disk:
all refused."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import outcome
import torch
from tests.test_purifier_saving import answer, purifier_of

from advbayes import Purifier
from advbayes.store import StoreError

SEED = 0
FLIPS, CUTS = 1000, 100


def refused(path: Path, name: str, limit: int) -> str | None:
    """What went wrong, if the load was not refused with an error that names the file."""
    try:
        Purifier.load(path, memory_limit=limit)
    except StoreError as error:
        return None if name in str(error) else f"not named: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def main() -> None:
    start = time.time()
    draw = random.Random(SEED)
    failures: list[str] = []
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "purifier"
        purifier = purifier_of(1)
        purifier.save(path)
        files = sorted(path.iterdir())
        for trial in range(FLIPS + CUTS):
            file = files[trial % len(files)]
            data = file.read_bytes()
            damaged = bytearray(data)
            if trial < FLIPS:
                bit = draw.randrange(8 * len(data))
                damaged[bit // 8] ^= 1 << bit % 8
            else:
                del damaged[draw.randrange(len(data)) :]
            counts[file.name] = counts.get(file.name, 0) + 1
            file.write_bytes(damaged)
            problem = refused(path, file.name, 1 if trial % 2 else 1 << 30)
            if problem:
                failures.append(f"{file.name}: {problem}")
            file.write_bytes(data)
        assert torch.equal(answer(Purifier.load(path)), answer(purifier))
    outcome.write(
        "purifier_damage",
        wanted="1,100 of 1,100 refused, naming the file",
        passed=not failures,
        seed=SEED,
        seconds=time.time() - start,
        flips=FLIPS,
        truncations=CUTS,
        refused=FLIPS + CUTS - len(failures),
        failures=failures[:20],
        by_file=counts,
    )


if __name__ == "__main__":
    main()

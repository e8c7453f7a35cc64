"""1,000 single-bit flips and 100 truncations of a saved model: all refused, naming the file."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import outcome
import torch

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    MeanField,
    Mixture,
    Noise,
    one_step,
)
from advbayes.networks import conv_net
from advbayes.store import StoreError, load, save

SEED = 0
FLIPS, CUTS = 1000, 100


def refused(path: Path, name: str) -> str | None:
    """What went wrong, if the load was not refused with an error that names the file."""
    try:
        load(path)
    except StoreError as error:
        return None if name in str(error) else f"not named: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def main() -> None:
    start = time.time()
    draw = random.Random(SEED)
    model = BayesianModel(conv_net(size=8), Categorical())
    channel = Mixture([0.5, 0.5], [Noise(0.1), AttackChannel(one_step(L2(1.0)), 0.1)])
    failures: list[str] = []
    flips: dict[str, int] = {}
    cuts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        for form in ("model", "model.advbayes"):
            save(
                base / form,
                model=model,
                posterior=MeanField(model),
                channel=channel,
                class_names="0123456789",
            )
        # Half of the trials on the one file, half on the folder, there on each file alike: small
        # ones are hit as often.
        files = sorted((base / "model").iterdir())
        for trial in range(FLIPS + CUTS):
            file = base / "model.advbayes" if trial % 2 else files[trial // 2 % len(files)]
            bundle = file if trial % 2 else base / "model"
            data = file.read_bytes()
            if trial < FLIPS:
                bit = draw.randrange(8 * len(data))
                damaged = bytearray(data)
                damaged[bit // 8] ^= 1 << bit % 8
                flips[file.name] = flips.get(file.name, 0) + 1
            else:
                damaged = bytearray(data[: draw.randrange(len(data))])
                cuts[file.name] = cuts.get(file.name, 0) + 1
            file.write_bytes(damaged)
            problem = refused(bundle, file.name)
            if problem:
                failures.append(f"{file.name}: {problem}")
            file.write_bytes(data)
        for form in ("model", "model.advbayes"):
            assert torch.equal(load(base / form).model.initial_theta(), model.initial_theta())
    outcome.write(
        "bundle_damage",
        wanted="1,100 of 1,100 refused, naming the file",
        passed=not failures,
        seed=SEED,
        seconds=time.time() - start,
        flips=FLIPS,
        truncations=CUTS,
        refused=FLIPS + CUTS - len(failures),
        failures=failures[:20],
        flips_by_file=flips,
        truncations_by_file=cuts,
    )


if __name__ == "__main__":
    main()

"""Load random bundles for a while, as a model, as a predictor of raw rows and as a run's: altered
settings and bytes under correct hashes, and altered archives; typed errors only."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import outcome
import torch
from sklearn.preprocessing import StandardScaler
from tests import faults

from advbayes import (
    L2,
    PGD,
    AttackChannel,
    BayesianModel,
    Categorical,
    Learned,
    Linf,
    MeanField,
    Mixture,
    Noise,
    entropy,
    nll,
)
from advbayes.checks import InputError
from advbayes.datasets import Encoding, Standardize
from advbayes.networks import FullyConnectedGenerator, mlp
from advbayes.runs import load_trained
from advbayes.store import archive, load, preprocessing, read_manifest, save

SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    start = time.time()
    draw = random.Random(SEED)
    ball = L2(
        0.5,
        box=(-1, 1),
        scale=torch.tensor([1.0, 2.0, 3.0]),
        mask=torch.tensor([True, False, True]),
    )
    attack = AttackChannel(PGD(ball, stages=((nll, 3), (entropy, 2))), 0.3)
    learned = Learned(FullyConnectedGenerator(3, num_classes=2, width=8), Linf(0.3))
    model = BayesianModel(mlp(3, 2), Categorical())
    rows = np.array([[1.0, "red"], [2.0, "blue"]], object)
    encoding = Encoding.fit(("size", "colour"), rows, numeric=(True, False))
    ended: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        base, path = Path(folder) / "m", Path(folder) / "x.advbayes"
        channel = Mixture([0.4, 0.3, 0.3], [Noise(0.1), attack, learned])
        save(
            base,
            model=model,
            posterior=MeanField(model),
            channel=channel,
            class_names="ab",
            scaling=Standardize.fit(torch.rand(4, 3)).to_dict(),
            threat_model={
                "ball": ball,
                "norm": "l2",
                "eps": 0.5,
                "box": [-1, 1],
                "mask": [True] * 3,
            },
            extra={
                "event": [3],
                "seed": 1,
                "feature_names": list(encoding.feature_names),
                "encoding": encoding.to_json(),
                "steps": preprocessing.encode(StandardScaler().fit(torch.rand(4, 2).numpy())),
            },
        )
        parts = {part.name: (base / part.file).read_bytes() for part in read_manifest(base).parts}
        while time.time() - start < seconds:
            kind = draw.choice(("parts", "parts", "parts", "archive"))
            manifest, files = faults.sealed(
                faults.mutated(parts, draw) if kind == "parts" else parts
            )
            data = archive.pack({"manifest.json": manifest, **files}, "x")
            if kind == "archive":
                whole = data
                for _ in range(draw.randint(1, 4)):
                    place = draw.choice(
                        (
                            draw.randrange(len(data)),
                            len(data) - 1 - draw.randrange(min(len(data), 900)),
                        )
                    )
                    data = (
                        data[:place]
                        + draw.randbytes(draw.choice((0, 1, 2, 4)))
                        + data[place + draw.choice((0, 1, 2, 4)) :]
                    )
                if data == whole:
                    continue
            path.write_bytes(data)
            try:
                load(path).predictor(2)
                load_trained(path)
                ended[f"{kind}: loaded"] += 1
                if kind == "archive":
                    failures.append("an altered archive was loaded")
            except InputError:
                ended[f"{kind}: refused"] += 1
            except BaseException as error:
                ended[f"{kind}: failed"] += 1
                failures.append(f"{type(error).__name__}: {error!s:.200}")
    outcome.write(
        "bundle_fuzz",
        wanted="typed errors only",
        passed=not failures,
        seed=SEED,
        seconds=time.time() - start,
        loads=sum(ended.values()),
        ended=dict(sorted(ended.items())),
        failures=failures[:20],
    )


if __name__ == "__main__":
    main()

"""What makes a purifier robust? Variants on MNIST under the attacks that know it, at L2 eps = 2.

    ADVBAYES_DATA=... python benchmarks/purification_study.py validation     # every variant, on 100
    training images held out ADVBAYES_DATA=... python benchmarks/purification_study.py test NAME ...
    # the chosen ones, once, on 300 test images

Each run writes one JSON record for each variant under benchmarks/results/purification/.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    Learned,
    MeanField,
    Mixture,
    Noise,
    PosteriorPredictive,
    fit,
    one_step,
    pgd,
)
from advbayes.attacks import APGD, margin
from advbayes.networks import ConvGenerator, conv_net
from advbayes.purification import Purifier
from advbayes.purification.attacks import Annealed, NearestCentre, StraightThrough
from advbayes.seeds import generator_for
from advbayes.types import Predictor

RESULTS = Path(__file__).parent / "results" / "purification"
EPS, SEED, HELD_OUT, STEPS = 2.0, 0, 5000, 50
NUM = {"validation": 100, "test": 300}
BALL = L2(EPS, box=(0.0, 1.0))


def read_idx(path: Path) -> np.ndarray:
    """An IDX file, as MNIST is published."""
    with gzip.open(path) as file:
        raw = file.read()
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def mnist(part: str) -> tuple[Tensor, Tensor]:
    folder = Path(os.environ["ADVBAYES_DATA"]) / "mnist"
    x = (
        torch.from_numpy(read_idx(folder / f"{part}-images-idx3-ubyte.gz").copy())
        .float()
        .div_(255)
        .unsqueeze(1)
    )
    return x, torch.from_numpy(read_idx(folder / f"{part}-labels-idx1-ubyte.gz").copy()).long()


def posterior(kind: str, x: Tensor, y: Tensor, cache: Path) -> tuple[BayesianModel, Tensor]:
    """The model and five thetas: trained plainly, or against a one-step adversary within the full
    eps."""
    torch.manual_seed(SEED)
    model = BayesianModel(conv_net(), Categorical())
    path = cache / f"thetas-{kind}.npy"
    if path.exists():
        return model, torch.from_numpy(np.load(path, allow_pickle=False))
    channel = (
        Noise(0.0)
        if kind == "standard"
        else Mixture([0.3, 0.7], [Noise(0.0), AttackChannel(one_step(BALL), 0.0)])
    )
    trained = MeanField(model)
    fit(model, trained, channel, (x, y), epochs=3, seed=SEED)
    thetas = trained.sample(5, generator=generator_for(SEED, "thetas"))
    cache.mkdir(parents=True, exist_ok=True)
    np.save(path, thetas.numpy())
    return model, thetas


def learned_channel(
    model: BayesianModel, x: Tensor, y: Tensor, cache: Path
) -> tuple[Tensor, Learned]:
    """An adversary trained against its own posterior for an epoch, with noise as wide as what does
    best without it."""
    torch.manual_seed(SEED)
    channel = Learned(ConvGenerator(), BALL, sigma_range=(0.5, 1.5), entropy_bonus=0.01)
    path = cache / "learned.npz"
    if not path.exists():
        trained = MeanField(model)
        fit(model, trained, Mixture([0.5, 0.5], [Noise(0.0), channel]), (x, y), epochs=1, seed=SEED)
        weights = {name: value.numpy() for name, value in channel.generator.state_dict().items()}
        thetas = trained.sample(1, generator=generator_for(SEED, "thetas")).numpy()
        np.savez(path, thetas, **weights)
    with np.load(path, allow_pickle=False) as held:
        channel.generator.load_state_dict(
            {name: torch.from_numpy(held[name]) for name in channel.generator.state_dict()}
        )
        return torch.from_numpy(held["arr_0"]), channel


class Penultimate:
    """The robust net's features before its last layer, at one theta, scaled so that distances are
    of the order of pixels'."""

    def __init__(self, model: BayesianModel, theta: Tensor, x: Tensor) -> None:
        weights = torch.split(theta, [shape.numel() for shape in model.shapes])
        values = {
            name: w.view(shape)
            for name, w, shape in zip(model.names, weights, model.shapes, strict=True)
        }
        self.net = conv_net()
        self.net.load_state_dict(values)
        self.body = nn.Sequential(*list(self.net)[:-1]).requires_grad_(False)
        self.scale = 1.0
        self.scale = float(
            torch.pdist(x[:300].flatten(1)).median() / torch.pdist(self(x[:300])).median()
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1) * self.scale


def variants(x: Tensor, y: Tensor, cache: Path) -> dict[str, Callable[[], Predictor]]:
    """Everything that the study compares; built when asked for."""
    standard = posterior("standard", x, y, cache)
    robust = posterior("robust", x, y, cache)
    step = one_step(BALL)

    def purified(
        base: tuple[BayesianModel, Tensor], channel: object, num: int = 5, **settings: object
    ) -> Callable[[], Predictor]:
        return lambda: Purifier(base[0], channel, base[1][:num], (x, y), **settings)  # type: ignore[arg-type]

    found: dict[str, Callable[[], Predictor]] = {
        "standard": lambda: PosteriorPredictive(*standard),
        "robust": lambda: PosteriorPredictive(*robust),
    }
    for sigma in (0.2, 0.5, 1.0, 1.5, 2.0):
        found[f"noise-{sigma}"] = purified(standard, Noise(sigma))
    found["robust-noise-1.0"] = purified(robust, Noise(1.0))
    found["robust-noise-1.5"] = purified(robust, Noise(1.5))
    found["attack-1.0"] = purified(standard, AttackChannel(step, 1.0), 1)
    found["mixture-1.0"] = purified(
        standard, Mixture([0.5, 0.5], [Noise(1.0), AttackChannel(step, 1.0)]), 1
    )
    found["robust-attack-1.0"] = purified(robust, AttackChannel(step, 1.0), 1)

    def learned() -> Predictor:
        thetas, channel = learned_channel(standard[0], x, y, cache)
        return Purifier(standard[0], channel, thetas, (x, y))

    found["learned"] = learned
    for sigma in (0.5, 1.0, 1.5):
        found[f"features-{sigma}"] = purified(
            robust, Noise(sigma), features=Penultimate(robust[0], robust[1][0], x)
        )
    return found


def broken_by(
    predict: Predictor, attacks: dict[str, Callable[[], Tensor]], y: Tensor
) -> dict[str, list[bool]]:
    found = {}
    for name, attack in attacks.items():
        with torch.no_grad():
            found[name] = (predict(attack()).logits.argmax(-1) != y).tolist()
    return found


def measure(
    name: str,
    predict: Predictor,
    base: Predictor,
    x: Tensor,
    y: Tensor,
    clean: Tensor,
    pixels: Purifier | None,
) -> dict[str, object]:
    """Clean accuracy, accuracy under each attack and under their union, and what the diagnostics
    say."""
    begun = time.process_time()
    with torch.no_grad():
        wrong = (predict(x).logits.argmax(-1) != y).tolist()
        nll = float(-predict(x).log_prob(y).mean())
    attacks: dict[str, Callable[[], Tensor]] = {
        "exact nll": lambda: pgd(BALL, STEPS)(predict, x, y),
        "exact margin": lambda: APGD(BALL, margin, STEPS)(predict, x, y),
        "transfer": lambda: APGD(BALL, margin, STEPS)(base, x, y),
    }
    points: dict[str, Tensor] = {}
    record: dict[str, object] = {}
    if isinstance(predict, Purifier):
        factors = (4.0, 2.0, 1.0)
        # With features the nearest centres are those in pixels: a transfer, and a start for the
        # ascent.
        known = predict if pixels is None else pixels

        def nearest(*_: object, **__: object) -> Tensor:
            if "nearest" not in points:
                points["nearest"] = NearestCentre(BALL, num=8)(known, x, y)
            return points["nearest"]

        attacks["nearest centre"] = nearest
        if predict.features is None:
            attacks["straight-through"] = lambda: pgd(BALL, STEPS, margin)(
                StraightThrough(predict), x, y
            )

        def annealed() -> Tensor:
            if "annealed" not in points:
                points["annealed"] = Annealed(BALL, factors, STEPS, start=nearest)(predict, x, y)
            return points["annealed"]

        attacks["annealed"] = annealed
        diagnosis = predict.diagnose(x)
        threshold = float(predict.diagnose(clean).log_evidence.quantile(0.05))
        adversarial = annealed()
        with torch.no_grad():
            fooled = predict(adversarial).logits.argmax(-1) != y
        rejected = predict.diagnose(adversarial).log_evidence < threshold
        record = {
            "ess_reference_median": float(diagnosis.ess_reference.median()),
            "ess_below_2": float((diagnosis.ess_reference < 2).double().mean()),
            "rejected_of_fooled": float(rejected[fooled].double().mean())
            if bool(fooled.any())
            else None,
        }
    found = broken_by(predict, attacks, y)
    worst = np.any([wrong, *found.values()], axis=0)
    return {
        "variant": name,
        "clean": 1 - float(np.mean(wrong)),
        "nll": nll,
        "robust": {attack: 1 - float(np.mean(values)) for attack, values in found.items()},
        "worst": 1 - float(worst.mean()),
        "num": len(x),
        **record,
        "cpu_seconds": time.process_time() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["validation", "test"])
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x, y = mnist("train")
    order = torch.randperm(len(x), generator=generator_for(SEED, "split"))
    held, kept = order[:HELD_OUT], order[HELD_OUT:]
    cache = RESULTS / "cache"
    made = variants(x[kept], y[kept], cache)
    clean = x[held[-1000:]]
    num = NUM[arguments.part]
    asked, labels = (
        (x[held[:num]], y[held[:num]])
        if arguments.part == "validation"
        else (part[:num] for part in mnist("t10k"))
    )
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    for name in arguments.names or made:
        predict = made[name]()
        base = made["robust" if "robust" in name or "features" in name else "standard"]()
        pixels = made["robust-noise-1.0"]() if "features" in name else None
        record = measure(name, predict, base, asked, labels, clean, pixels)  # type: ignore[arg-type]
        record |= {
            "part": arguments.part,
            "eps": EPS,
            "seed": SEED,
            "num_reference": len(kept),
            "command": " ".join(sys.argv),
            "commit": commit,
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
        }
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{arguments.part}-{name}.json").write_text(json.dumps(record, indent=2) + "\n")
        print(
            json.dumps(
                {key: record[key] for key in ("variant", "clean", "worst", "robust", "cpu_seconds")}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()

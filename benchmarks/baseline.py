"""The published baseline of rule E21: many-step adversarial training on MNIST at L2 eps = 2, on the
published net.

    ADVBAYES_DATA=... python benchmarks/baseline.py train FOLDER      # resumes where it stopped
    ADVBAYES_DATA=... python benchmarks/baseline.py evaluate FOLDER   # 1,000 test images under the
    strong suite

Training is `fit` with a point mass, a flat prior and a channel without noise: the objective of
adversarial training (Eq. 12). The record goes where the audit looks for it; a reported worst case
of 0.692 and a clean accuracy of 0.992 stand beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    PointMass,
    PosteriorPredictive,
    evaluate,
    fit,
    strong_suite,
)
from advbayes.datasets import load_dataset
from advbayes.networks import wide_conv_net
from advbayes.seeds import seed_for
from advbayes.training import COLUMNS, State
from advbayes.types import Predictor

EPS, SEED, HELD_OUT, BATCH = 2.0, 0, 5000, 128
BOX = (0.0, 1.0)
ROOT = Path(__file__).parent.parent
RESULT = ROOT / "src" / "advbayes" / "auditing" / "baselines" / "mnist-l2-2.json"


@dataclass(frozen=True)
class Phase:
    """Epochs of adversarial training at one eps, with PGD of `steps` steps of 2.5 eps / steps."""

    epochs: float
    eps: float
    steps: int
    lr: float
    decay: float = 1.0


# Few steps teach a net to hide its gradients, so the last epochs take the most; the first ones are
# a warm-up.
PHASES = (
    Phase(1, eps=0.5, steps=3, lr=1e-3),
    Phase(1, eps=1.5, steps=5, lr=1e-3),
    Phase(4, eps=2.0, steps=10, lr=1e-3, decay=0.8),
    Phase(1, eps=2.0, steps=20, lr=3e-4, decay=0.5),
)


@dataclass(frozen=True)
class RandomStart:
    """PGD on the cross entropy from a random point of the ball; its last iterate, as adversarial
    training is published."""

    ball: L2
    steps: int

    def __call__(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        point = self.ball.random(x, generator=generator)
        for _ in range(self.steps):
            point = point.detach().requires_grad_()
            loss = -predict(point).log_prob(y).sum()
            (gradient,) = torch.autograd.grad(loss, point)
            move = self.ball.ascend(gradient, 2.5 * self.ball.eps / self.steps)
            point = self.ball.project(point.detach() + move, x)
        return point


def train(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = load_dataset("mnist")
    x, y = data.x_train[:-HELD_OUT], data.y_train[:-HELD_OUT]
    x_val, y_val = data.x_train[-500:], data.y_train[-500:]
    torch.manual_seed(seed_for(SEED, "init", 0) % 2**31)
    model = BayesianModel(wide_conv_net(), Categorical(), prior_scale=math.inf)
    posterior = PointMass(model)
    for index, phase in enumerate(PHASES):
        path, done = folder / f"phase{index}.safetensors", folder / f"phase{index}.json"
        state = _read(path) if path.exists() else None
        steps = math.ceil(phase.epochs * len(x) / BATCH)
        if state is not None and state.step >= steps:
            posterior.load_state_dict(
                {k.split("/", 1)[1]: v for k, v in state.tensors.items() if "adam" not in k}
            )
            continue
        began = time.time()
        channel = AttackChannel(RandomStart(L2(phase.eps, box=BOX), phase.steps), sigma=0.0)
        result = fit(
            model,
            posterior,
            channel,
            (x, y),
            steps=steps,
            batch_size=BATCH,
            lr=phase.lr,
            decay=phase.decay,
            seed=SEED + index,
            state=state,
            checkpoint=lambda s, path=path: _write(path, s),
            checkpoint_every=50,
        )
        if result.interrupted:
            sys.exit(130)
        predict = PosteriorPredictive(model, posterior.sample(1))
        attacked = RandomStart(L2(EPS, box=BOX), 40)(
            predict, x_val, y_val, generator=torch.Generator().manual_seed(0)
        )
        with torch.no_grad():
            clean, robust = (
                float((predict(v).logits.argmax(-1) == y_val).float().mean())
                for v in (x_val, attacked)
            )
        note = {
            "phase": repr(phase),
            "held_out_clean": clean,
            "held_out_pgd40": robust,
            "seconds": time.time() - began,
        }
        done.write_text(json.dumps(note, indent=1))
        print(note, flush=True)


def _write(path: Path, state: State) -> None:
    history = torch.tensor([state.history[name] for name in COLUMNS], dtype=torch.float64)
    counts = torch.tensor([state.step, state.skipped])
    tensors = {name: tensor.contiguous() for name, tensor in state.tensors.items()}
    save_file({**tensors, "history": history, "counts": counts}, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def _read(path: Path) -> State:
    tensors = load_file(path)
    step, skipped = tensors.pop("counts").tolist()
    history = dict(zip(COLUMNS, tensors.pop("history").tolist(), strict=True))
    return State(step, skipped, tensors, history)


def judge(folder: Path, num: int) -> None:
    data = load_dataset("mnist")
    model = BayesianModel(wide_conv_net(), Categorical(), prior_scale=math.inf)
    posterior = PointMass(model)
    phases = [p for p in range(len(PHASES)) if (folder / f"phase{p}.safetensors").exists()]
    state = _read(folder / f"phase{phases[-1]}.safetensors")
    posterior.load_state_dict(
        {k.split("/", 1)[1]: v for k, v in state.tensors.items() if "adam" not in k}
    )
    predict = PosteriorPredictive(model, posterior.sample(1))
    began = time.time()
    ball = L2(EPS, box=BOX)
    attacks = {"strong": strong_suite(ball)}
    report = evaluate(
        predict,
        (data.x_test[:num], data.y_test[:num]),
        attacks=attacks,
        seed=SEED,
        out=folder / "evaluation",
    )
    measured = {name: report.estimate("accuracy", attack=name) for name in ("clean", "worst")}
    print(report)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    record = {
        "what": "MNIST, L2 eps 2, adversarial training on four convolutions 32-32-64-64 and two "
        "dense layers of 200",
        "dataset": "MNIST",
        "norm": "L2",
        "eps": EPS,
        "architecture": "four convolutions 32-32-64-64 of 3x3, two dense layers of 200",
        "recipe": f"adversarial training by PGD: {', '.join(map(repr, PHASES))}",
        "clean": measured["clean"].value,
        "worst": measured["worst"].value,
        "reported": {"clean": 0.992, "worst": 0.692},
        "measured": {
            k: {"value": e.value, "low": e.low, "high": e.high, "level": e.level}
            for k, e in measured.items()
        },
        "num_examples": num,
        "phases": [
            json.loads((folder / f"phase{p}.json").read_text())
            for p in phases
            if (folder / f"phase{p}.json").exists()
        ],
        "steps_in_last_phase": state.step,
        "command": "python benchmarks/baseline.py train FOLDER; python benchmarks/baseline.py "
        "evaluate FOLDER",
        "seed": SEED,
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "seconds": time.time() - began,
    }
    RESULT.write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("train", "evaluate"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num", type=int, default=1000, help="test images")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "train":
        train(arguments.folder)
    else:
        judge(arguments.folder, arguments.num)

"""How fast purification is, as ratios within one run, and how much memory it takes.

    python benchmarks/purification.py                 # everything: about ten quiet minutes
    python benchmarks/purification.py query paper     # of query, paper, attack, linear, memory

Inputs are random images of MNIST's shape and sparsity: the time of a matrix product does not depend
on what is in it. The compared calls alternate, medians are reported, and each target is printed
with its verdict. Results go to benchmarks/results/purification.json and .md, part by part, each
with its command, seed, commit, machine and load; the parts that were not run stay as they were.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    Gaussian,
    MeanField,
    Noise,
    PosteriorPredictive,
    one_step,
    pgd,
)
from advbayes.channels import GaussianDensity
from advbayes.networks import conv_net, mlp
from advbayes.purification import Purifier
from advbayes.purification.banks import GaussianBank
from advbayes.seeds import generator_for
from advbayes.types import Predictor

RESULTS = Path(__file__).parent / "results"
SEED = 0
FULL = 60_000


def images(num: int, purpose: str = "images") -> Tensor:
    source = generator_for(SEED, purpose)
    x = torch.rand(num, 1, 28, 28, generator=source)
    return x * (torch.rand(num, 1, 28, 28, generator=source) < 0.2)


class Shifted:
    """An attack-like channel whose centres cost nothing: x + 0.01 p(x) differs from theta to theta,
    as an attack's would."""

    def sample(
        self,
        predict: Predictor,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        raise NotImplementedError

    def density(self, predict: Predictor, x: Tensor, y: Tensor | None = None) -> GaussianDensity:
        certain = predict(x).probs.amax(-1).view(-1, 1, 1, 1)
        return GaussianDensity((0.0,), (x + 0.01 * certain,), (0.4,))


def classifier(num_thetas: int) -> tuple[BayesianModel, Tensor]:
    torch.manual_seed(SEED)
    # A linear net: the reference side is computed once and not timed, and queries never touch the
    # net.
    model = BayesianModel(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)), Categorical()
    )
    return model, MeanField(model).sample(num_thetas, generator=generator_for(SEED, "thetas"))


def timed(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each call, the calls taking turns so that a busy moment meets them all."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:  # the first turn warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def products(purifier: Purifier, x: Tensor) -> Callable[[], None]:
    """The matrix products of a query and nothing else, block by block as the query does them."""
    flat = next(iter(purifier.queries(x))).around

    def run() -> None:
        for bank in purifier.store.banks:
            assert isinstance(bank, GaussianBank)
            for groups, rows in bank.tiles(len(flat)):
                logits = torch.matmul(flat, bank.centres.block(groups, rows).transpose(1, 2))
                values = purifier.store.value_block(rows).to(flat.dtype)
                right = (
                    values.reshape(1, len(values), -1)
                    if bank.groups == 1
                    else values[:, groups].transpose(0, 1)
                )
                torch.matmul(logits, right)

    return run


def ask(predict: Predictor, x: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            prediction = predict(x)
            return (
                prediction.probs
                if hasattr(prediction, "probs")
                else (prediction.mean, prediction.variance)
            )

    return run


def query() -> list[dict[str, object]]:
    """A query over all of MNIST against its own matrix products."""
    rows = []
    model, thetas = classifier(5)
    x, reference = images(256, "queries"), images(FULL)
    for name, channel in (("noise", Noise(0.4)), ("per theta", Shifted())):
        purifier = Purifier(model, channel, thetas, reference, memory_limit=4 << 30)
        seconds = timed({"query": ask(purifier, x), "products": products(purifier, x)}, 5)
        rows.append(
            row(
                f"query, N = 60,000, S = 5, 256 images, {name} centres",
                seconds["query"],
                seconds["products"],
                1.6,
            )
        )
        del purifier
    return rows


def paper() -> list[dict[str, object]]:
    """The paper's setting, S = 5 and N = 100, against a standard posterior-predictive query."""
    rows = []
    torch.manual_seed(SEED)
    settings = [("conv net", BayesianModel(conv_net(), Categorical()), images(100), 1.0)]
    for name, width in (("wine net", 11), ("energy net", 8), ("housing net", 8)):
        x = torch.randn(100, width, generator=generator_for(SEED, name))
        settings.append((name, BayesianModel(mlp(width), Gaussian(0.5)), x, 2.0))
    for name, model, reference, target in settings:
        thetas = MeanField(model).sample(5, generator=generator_for(SEED, "thetas"))
        standard = PosteriorPredictive(model, thetas)
        attacked = AttackChannel(one_step(L2(1.0)), 0.4)
        # With shared centres the two updates are the same.
        for kind, channel, update in (
            ("noise channel", Noise(0.4), "online"),
            ("one-step channel", attacked, "online"),
            ("one-step channel offline", attacked, "offline"),
        ):
            purifier = Purifier(model, channel, thetas, reference, update)
            for batch in (1, 256):
                x = reference.repeat(3, *[1] * (reference.ndim - 1))[:batch]
                seconds = timed({"purified": ask(purifier, x), "standard": ask(standard, x)}, 200)
                label = f"{name}, N = 100, S = 5, {kind}, batch {batch}: purified / standard"
                rows.append(row(label, seconds["purified"], seconds["standard"], target))
    return rows


def attack() -> list[dict[str, object]]:
    """Fifty steps of ascent through the purifier against their forward passes."""
    rows = []
    model, thetas = classifier(5)
    x, reference = images(100, "queries"), images(FULL)
    y = torch.randint(0, 10, (100,), generator=generator_for(SEED, "labels"))
    for sigma in (0.4, 2.0):
        purifier = Purifier(model, Noise(sigma), thetas, reference)
        forward = ask(purifier, x)

        def forwards(forward: Callable[[], object] = forward) -> None:
            for _ in range(50):
                forward()

        def run(purifier: Purifier = purifier) -> None:
            pgd(L2(2.0), steps=50)(purifier, x, y)

        seconds = timed({"attack": run, "forwards": forwards}, 2)
        label = (
            f"50-step attack on 100 images, N = 60,000, sigma {sigma}: attack / 50 forward passes"
        )
        rows.append(row(label, seconds["attack"], seconds["forwards"], 3.5))
    return rows


def linear() -> list[dict[str, object]]:
    """Cost against N and S: linear, or better, if the cost of one reference point and theta does
    not grow."""
    rows = []
    x = images(256, "queries")
    made = {}
    for num, num_thetas in ((1000, 5), (10_000, 5), (FULL, 5), (10_000, 1), (10_000, 20)):
        model, thetas = classifier(num_thetas)
        made[f"N = {num}, S = {num_thetas}"] = ask(
            Purifier(model, Shifted(), thetas, images(num), memory_limit=4 << 30), x
        )
    seconds = timed(made, 3)
    unit = {name: seconds[name] / size_of(name) for name in seconds}
    for name, value in seconds.items():
        # Against the smaller ones of its own line; below 1 is the fixed cost of a call being
        # shared.
        least = (
            "N = 1000, S = 5" if name.endswith("S = 5") and "60000" in name else "N = 10000, S = 1"
        )
        least = name if name in ("N = 1000, S = 5", "N = 10000, S = 1") else least
        rows.append(
            row(
                f"{name}, 256 images: cost for each point and theta against {least}",
                unit[name],
                unit[least],
                1.3,
            )
        )
        rows[-1]["seconds"] = value
    return rows


def size_of(name: str) -> int:
    num, thetas = (int(part.split("=")[1]) for part in name.split(","))
    return num * thetas


def memory() -> list[dict[str, object]]:
    """Peak memory of a process of its own: in memory, and from disk under a limit."""
    rows = []
    for limit, target in ((4 << 30, 3.0), (500_000_000, 3.0)):
        done = subprocess.run(
            [sys.executable, __file__, "--child", str(limit)],
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout)
        rows.append(
            {
                "what": f"peak memory, S = 10, N = 60,000, limit {limit // 1_000_000} MB, from "
                f"{found['place']}",
                "seconds": found["seconds"],
                "ratio": round(found["peak"] / 1e9, 3),
                "unit": "GB",
                "target": target,
                "passed": found["peak"] <= target * 1e9
                and found["finite"]
                and (found["place"] == "disk") == (limit < 1 << 30),
            }
        )
    return rows


def child(limit: int) -> None:
    model, thetas = classifier(10)
    reference, x = images(FULL), images(256, "queries")
    purifier = Purifier(model, Shifted(), thetas, reference, memory_limit=limit)
    start = time.perf_counter()
    with torch.no_grad():
        answer = purifier(x).probs
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    place, finite = (
        "memory" if purifier.store.folder is None else "disk",
        bool(torch.isfinite(answer).all()),
    )
    print(json.dumps({"peak": peak, "seconds": seconds, "place": place, "finite": finite}))


def row(what: str, seconds: float, against: float, target: float | None) -> dict[str, object]:
    ratio = seconds / against
    passed = None if target is None else ratio <= target
    return {
        "what": what,
        "seconds": seconds,
        "ratio": round(ratio, 3),
        "unit": "x",
        "target": target,
        "passed": passed,
    }


PARTS: dict[str, Callable[[], list[dict[str, object]]]] = {
    "query": query,
    "paper": paper,
    "attack": attack,
    "linear": linear,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {list(PARTS)}; absent: all")
    parser.add_argument("--child", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.child is not None:
        child(arguments.child)
        return
    for name in arguments.parts or PARTS:
        rows = PARTS[name]()
        for entry in rows:
            print(
                f"{entry['what']}: {entry['ratio']} {entry['unit']} (target {entry['target']}) "
                f"{verdict(entry)}",
                flush=True,
            )
        record(name, rows)
    if any(entry["passed"] is False for part in recorded().values() for entry in part["rows"]):
        sys.exit(1)


def verdict(entry: dict[str, Any]) -> str:
    return {True: "pass", False: "**fail**", None: ""}[entry["passed"]]


def recorded() -> dict[str, dict[str, Any]]:
    """The parts in the results file, by name."""
    path = RESULTS / "purification.json"
    found: dict[str, dict[str, Any]] = (
        json.loads(path.read_text())["parts"] if path.exists() else {}
    )
    return found


def about() -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "command": " ".join(["python", *sys.argv]),
        "seed": SEED,
        "commit": commit,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.processor() or platform.machine()}, 1 thread",
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def record(name: str, rows: list[dict[str, object]]) -> None:
    """Puts one part in its place in both files, the others as they were."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    parts = recorded() | {name: {"about": about(), "rows": rows}}
    parts = {name: parts[name] for name in PARTS if name in parts}
    (RESULTS / "purification.json").write_text(json.dumps({"parts": parts}, indent=2) + "\n")
    lines = ["# Purification: ratios within one run", ""]
    for part, found in parts.items():
        lines += [
            f"## {part}",
            "",
            *(f"- {key}: `{value}`" for key, value in found["about"].items()),
        ]
        lines += ["", "| what | seconds | ratio | target | |", "|---|---|---|---|---|"]
        for entry in found["rows"]:
            ratio = f"{entry['ratio']} {entry['unit']}"
            lines.append(
                f"| {entry['what']} | {entry['seconds']:.4g} | {ratio} | {entry['target'] or ''} "
                f"| {verdict(entry)} |"
            )
        lines.append("")
    (RESULTS / "purification.md").write_text("\n".join(lines[:-1]) + "\n")


if __name__ == "__main__":
    main()

"""What a second process is worth, what goes over the wire, what costs grow with, and what 64 ranks
would take.

    python benchmarks/scaling/scaling.py              # everything, about eight minutes of two cores
    python benchmarks/scaling/scaling.py training     # or some of the parts

One thread for each process. Writes results.json and results.md beside this file; parts that are not
run keep their figures of before.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import numpy as np
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    MeanField,
    Mixture,
    Noise,
    PosteriorPredictive,
    Purifier,
    distributed,
    entropy,
    evaluate,
    fit,
    margin,
    nll,
    one_step,
    pgd,
)
from advbayes.networks import conv_net
from advbayes.seeds import generator_for

HERE = Path(__file__).parent
SPEED_UP, FASTER, MASS, SHARE = 1.7, 20.0, 1e-3, 0.99  # targets
SIGMA = 0.05  # of the channel, and of the clusters, in FAISS's part
Figures = dict[str, Any]


# --- Work of one or two ranks -------------------------------------------------------------------


def images(num: int) -> tuple[Tensor, Tensor]:
    draw = generator_for(0, "images")
    return torch.rand(num, 1, 28, 28, generator=draw), torch.randint(10, (num,), generator=draw)


def paper_model() -> BayesianModel:
    torch.manual_seed(0)
    return BayesianModel(conv_net(), Categorical())


def mix() -> Mixture:
    attacks = [AttackChannel(one_step(L2(1.0), loss), 0.1) for loss in (nll, margin, entropy)]
    return Mixture([0.4, 0.2, 0.2, 0.2], [Noise(0.1), *attacks])


def median_step(model: BayesianModel, steps: int, batch: int, **objective: Any) -> float:
    """Seconds of a step of MIX training, all of fit's bookkeeping included."""
    x, y = images(2048)
    x = x if isinstance(model.net[0], nn.Conv2d) else x.flatten(1)  # type: ignore[index]
    options: Any = {"objective": ChannelELBO(len(x), **objective), "batch_size": batch}
    result = fit(model, MeanField(model), mix(), (x, y), steps=steps, progress=False, **options)
    return float(np.median(np.diff(result.history["seconds"])[3:]))


def training() -> Figures:
    return {"seconds": median_step(paper_model(), 120, 128)}


def evaluation() -> Figures:
    model = paper_model()
    predict = PosteriorPredictive(
        model, MeanField(model).sample(5, generator=generator_for(0, "t"))
    )
    data, attacks = images(320), {"PGD50": pgd(L2(2.0, box=(0, 1)), steps=50)}
    began = time.perf_counter()
    evaluate(predict, data, attacks=attacks, batch_size=32, progress=False)
    return {"seconds": time.perf_counter() - began}


def flat_purifier(num: int, num_thetas: int = 5) -> Purifier:
    torch.manual_seed(0)
    model = BayesianModel(nn.Linear(784, 10), Categorical())
    x = torch.rand(num, 784, generator=generator_for(0, "reference"))
    rows = distributed.ranks().rows(num)
    thetas = MeanField(model).sample(num_thetas, generator=generator_for(1, "thetas"))
    return Purifier(model, Noise(0.5), thetas, x[rows].clone(), sharded=True)


def query_seconds(purified: Purifier, repeats: int) -> float:
    """Seconds of a prediction of 256 queries and its gradient."""
    x = torch.rand(256, 784, generator=generator_for(2, "queries"))
    seconds = []
    for _ in range(repeats + 1):
        asked = x.clone().requires_grad_()
        began = time.perf_counter()
        torch.autograd.grad(purified(asked).logits[:, 0].sum(), asked)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[1:]))


def purifier() -> Figures:
    return {"seconds": query_seconds(flat_purifier(60_000), 9)}


def wire() -> Figures:
    """Bytes that a rank hands to its exchanges, in a step and in a block of purified queries."""
    sent: list[int] = []
    reduced = distributed.Ranks._reduced

    def counted(self: distributed.Ranks, tensor: Tensor, how: Any) -> Tensor:
        sent.append(tensor.numel() * tensor.element_size())
        return reduced(self, tensor, how)

    distributed.Ranks._reduced = counted  # type: ignore[method-assign]
    model, figures = paper_model(), {}
    fit(model, MeanField(model), mix(), images(256), steps=4, batch_size=64, progress=False)
    figures["step"] = sent[-2:]  # the gradient with the bound's parts, and whether to stop
    purified = flat_purifier(2000)
    x = torch.rand(256, 784, generator=generator_for(2, "queries"), requires_grad=True)
    sent.clear()
    predicted = purified(x)
    figures["purified prediction"] = list(sent)
    sent.clear()
    torch.autograd.grad(predicted.logits[:, 0].sum(), x)
    figures["its gradient"] = list(sent)
    return {"num_params": model.num_params, **figures}


SHARED: dict[str, Callable[[], Figures]] = {
    "training": training,
    "evaluation": evaluation,
    "purifier": purifier,
    "wire": wire,
}
TITLES = {
    "training": "MIX training, the paper's conv net, batch 128 (a step)",
    "evaluation": "PGD50 evaluation, 320 examples, 5 thetas",
    "purifier": "purified prediction and gradient, N = 60,000, d = 784, 256 queries",
}


def on(size: int, part: str) -> Figures:
    """A part on so many processes; what the first one found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(size):
        place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
        env = {name: str(value) for name, value in place.items()} | {"TORCHELASTIC_RUN_ID": "bench"}
        command = [sys.executable, __file__, "--work", part]
        started.append(
            subprocess.Popen(
                command, env=os.environ | (env if size > 1 else {}), stdout=subprocess.PIPE
            )
        )
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{part} on {size} processes failed")
    found: Figures = json.loads(said[0].splitlines()[-1])
    return found


def work(part: str) -> None:
    torch.set_num_threads(1)
    with distributed.joined() as ranks:
        found = SHARED[part]()
        if ranks.is_first:
            print(json.dumps(found), flush=True)


def speed_up(part: str) -> Figures:
    """One process, two processes and one again, so that a slow minute is seen."""
    first, two, second = (on(size, part)["seconds"] for size in (1, 2, 1))
    one = min(first, second)
    return {"one": one, "one again": max(first, second), "two": two, "speed-up": one / two}


# --- Growth, in one process ---------------------------------------------------------------------


def wide_model(width: int) -> BayesianModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
    return BayesianModel(net, Categorical())


def growth() -> Figures:
    torch.set_num_threads(1)
    paper = paper_model()
    counts = (1, 2, 4, 8)
    steps = {
        "S, thetas": {n: median_step(paper, 14, 128, num_theta=n) for n in counts},
        "K, channel samples": {n: median_step(paper, 14, 128, num_channel=n) for n in counts},
        "batch": {n: median_step(paper, 14, n) for n in (32, 64, 128, 256, 512)},
        "parameters (784-w-10)": {
            (model := wide_model(width)).num_params: median_step(model, 14, 128)
            for width in (16, 64, 256, 1024)
        },
    }
    points = (7_500, 15_000, 30_000, 60_000)
    queries = {n: query_seconds(flat_purifier(n), 3) for n in points}
    return {"seconds of a step": steps, "seconds of 256 purified queries with gradient": queries}


# --- 64 ranks, simulated ------------------------------------------------------------------------

NETWORKS = {  # seconds before a message arrives, bytes a second
    "10 Gb/s Ethernet": (50e-6, 1.25e9),
    "100 Gb/s": (10e-6, 12.5e9),
}
JITTER = 0.05  # standard deviation of the log of a rank's time for its share


def ring(num_bytes: float, ranks: int, latency: float, speed: float) -> float:
    """Seconds of a ring all-reduce: 2 (R - 1) messages of 1/R of the bytes, one after the other."""
    return 2 * (ranks - 1) * (latency + num_bytes / ranks / speed)


def slowest(ranks: int) -> float:
    """The slowest of so many ranks against the median: all wait for it."""
    draws = np.random.default_rng(0).lognormal(0.0, JITTER, (2000, ranks))
    return float(draws.max(1).mean())


def simulation(found: Figures) -> Figures:
    """From the measured cost of an example and of a point, at 1 to 64 ranks."""
    step = found["training"]["one"]
    point = found["purifier"]["one"] / (60_000 * 784 * 256)  # of one query, one dimension
    sizes, out = (1, 2, 8, 64), {}
    for network, (latency, speed) in NETWORKS.items():
        for params, batch in ((20_490, 128), (20_490, 8192), (11_000_000, 8192)):
            own = step * batch / 128 * max(1.0, params / 20_490) ** 0.5
            each = {
                size: own / size * slowest(size) + ring(8 * params + 16, size, latency, speed)
                for size in sizes
            }
            name = f"training, {params:,} parameters, batch {batch:,}, {network}"
            out[name] = {size: each[1] / seconds for size, seconds in each.items()}
        num, width, queries = 100_000_000, 64, 256
        numbers = 5 * queries * (10 + 2) + queries * width
        each = {
            size: point * num * width * queries / size * slowest(size)
            + 3 * ring(8 * numbers / 3, size, latency, speed)
            for size in sizes
        }
        name = f"purifier, 1e8 points in 64 dimensions, 256 queries with gradient, {network}"
        out[name] = {size: each[1] / seconds for size, seconds in each.items()}
        out[f"{name}: seconds"] = each
    held = 100_000_000 / 64 * (64 * 4 + 5 * 10 * 4 + 8)
    return {"speed-up by ranks": out, "bytes of the reference on each of 64 ranks": held}


# --- A million points by FAISS ------------------------------------------------------------------


def clustered(num: int) -> Tensor:
    """Points close to one of a few hundred places, as near-duplicates and prototypes lie."""
    draw, kinds = generator_for(0, "places"), round(num**0.5 / 4)
    places = torch.randn(kinds, 64, generator=draw)
    own = places[torch.randint(kinds, (num,), generator=draw)]
    return own + SIGMA * torch.randn(num, 64, generator=draw)


def isotropic(num: int) -> Tensor:
    return torch.randn(num, 64, generator=generator_for(1, "points"))


def faiss(num: int = 1_000_000, queries: int = 256) -> Figures:
    """The index against the exact sweep; where its bound proves nothing the exact sweep answers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = BayesianModel(nn.Linear(64, 10), Categorical())
    thetas = MeanField(model).sample(5, generator=generator_for(1, "thetas"))
    figures: Figures = {}
    for name, make in (("clustered", clustered), ("isotropic", isotropic)):
        reference = make(num)
        noise = torch.randn(queries, 64, generator=generator_for(3, "queries"))
        x = reference[:queries] + SIGMA * noise
        exact = Purifier(model, Noise(SIGMA), thetas, reference)
        began = time.perf_counter()
        indexed = Purifier(model, Noise(SIGMA), thetas, reference, index="faiss", left_out=MASS)
        built = time.perf_counter() - began
        seconds = {}
        for kind, purified in (("exact", exact), ("indexed", indexed)):
            took = []
            for _ in range(3):
                began = time.perf_counter()
                logits = purified(x).logits
                took.append(time.perf_counter() - began)
            seconds[kind] = min(took)
            seconds[f"{kind} logits"] = logits
        assert indexed._index is not None
        bound = indexed._index.search(indexed.store, indexed.flat(x))[1]
        apart = (seconds.pop("exact logits").exp() - seconds.pop("indexed logits").exp()).abs()
        figures[name] = {
            **seconds,
            "faster": seconds["exact"] / seconds["indexed"],
            "share of queries with a left-out mass below 1e-3": float(
                (bound < MASS).double().mean()
            ),
            "99th percentile of the bound": float(bound.clamp_max(1e300).quantile(0.99)),
            "largest difference of a probability": float(apart.max()),
            "seconds to build the index": built,
        }
    return figures


# --- Tables -------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def table(found: Figures) -> str:
    """results.md."""
    lines = [f"Measured at load {found['load']}, commit {found['commit']}, {found['date']}.", ""]
    if all(part in found for part in TITLES):
        lines += [
            "| two gloo processes against one, one thread each | one (s) | two (s) | speed-up "
            "| target |",
            "|---|---|---|---|---|",
        ]
        for part, title in TITLES.items():
            each = found[part]
            values = (number(each[key]) for key in ("one", "two", "speed-up"))
            lines.append(f"| {title} | {' | '.join(values)} | {SPEED_UP} |")
    if "wire" in found:
        lines += [
            "",
            f"Bytes that a rank hands to an exchange ({found['wire']['num_params']:,} parameters, "
            "float32; purifier: S = 5, 10 classes, 256 queries in 784 dimensions, float64):",
            "",
        ]
        for name in ("step", "purified prediction", "its gradient"):
            lines.append(f"- {name}: {' + '.join(f'{n:,}' for n in found['wire'][name])}")
    if "faiss" in found:
        lines += [
            "",
            f"| a million points in 64 dimensions, sigma = {SIGMA}, 256 queries | exact (s) "
            "| FAISS (s) | faster | queries with a left-out mass below 1e-3 |",
            "|---|---|---|---|---|",
        ]
        for name, each in found["faiss"].items():
            share = each["share of queries with a left-out mass below 1e-3"]
            values = (number(each[key]) for key in ("exact", "indexed", "faster"))
            lines.append(f"| {name} | {' | '.join(values)} | {share:.1%} |")
    if "growth" in found:
        lines += ["", "| cost against | seconds |", "|---|---|"]
        groups = dict(found["growth"]["seconds of a step"])
        groups["N, 256 purified queries"] = found["growth"][
            "seconds of 256 purified queries with gradient"
        ]
        for name, each in groups.items():
            told = ", ".join(f"{int(n):,}: {number(value)}" for n, value in each.items())
            lines.append(f"| {name} | {told} |")
    if "simulation" in found:
        lines += ["", "| simulated speed-up | 2 ranks | 8 | 64 |", "|---|---|---|---|"]
        for name, each in found["simulation"]["speed-up by ranks"].items():
            if not name.endswith("seconds"):
                told = (number(each[size]) for size in ("2", "8", "64"))
                lines.append(f"| {name} | {' | '.join(told)} |")
        held = found["simulation"]["bytes of the reference on each of 64 ranks"]
        lines += ["", f"Each of 64 ranks holds {held / 1e9:.2g} GB of the reference."]
    return "\n".join(lines) + "\n"


def main(parts: list[str]) -> None:
    results = HERE / "results.json"
    found: Figures = json.loads(results.read_text()) if results.exists() else {}
    for part in parts:
        began = time.time()
        if part in TITLES:
            found[part] = speed_up(part)
        elif part == "wire":
            found[part] = on(2, "wire")
        elif part == "simulation":
            found[part] = simulation(found)
        else:
            found[part] = {"growth": growth, "faiss": faiss}[part]()
        print(f"{part}: {time.time() - began:.0f} s: {json.dumps(found[part])}", flush=True)
        commit = ["git", "describe", "--always", "--dirty"]
        found |= {
            "load": f"{os.getloadavg()[0]:.1f}",
            "commit": subprocess.run(
                commit, capture_output=True, text=True, cwd=HERE, check=False
            ).stdout.strip(),
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{os.cpu_count()} cores, torch {torch.__version__}",
        }
        results.write_text(json.dumps(found, indent=1) + "\n")
        found = json.loads(results.read_text())
        (HERE / "results.md").write_text(table(found))
    for part in TITLES:
        if part in found:
            met = "met" if found[part]["speed-up"] >= SPEED_UP else "MISSED"
            print(f"{met}: {part}: {found[part]['speed-up']:.2f} of {SPEED_UP}")
    if "faiss" in found:
        each = found["faiss"]["clustered"]
        share = each["share of queries with a left-out mass below 1e-3"]
        met = "met" if each["faster"] >= FASTER and share >= SHARE else "MISSED"
        print(f"{met}: faiss: {each['faster']:.1f} of {FASTER} at {share:.1%} of {SHARE:.0%}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    else:
        main(sys.argv[1:] or [*TITLES, "wire", "growth", "simulation", "faiss"])

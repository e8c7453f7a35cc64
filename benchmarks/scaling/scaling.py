"""What a second process is worth, what goes over the wire, what costs grow with, and what 64 ranks
would take.

    python benchmarks/scaling/scaling.py              # everything, about eight minutes of two cores
    python benchmarks/scaling/scaling.py training     # or some of the parts
    python benchmarks/scaling/scaling.py --tiny       # a rehearsal: small sizes, nothing is written

One thread for each process. Writes results.json and results.md beside this file; parts that are not
run keep their figures of before. MNIST is looked for where `advbayes datasets` finds it; without it
the part "faiss" leaves that row out.
"""

from __future__ import annotations

import copy
import itertools
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
from torch.nn import functional

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
from advbayes.datasets import find_dataset, load_dataset
from advbayes.networks import conv_net
from advbayes.purification.banks import Query
from advbayes.seeds import generator_for

HERE = Path(__file__).parent
SPEED_UP, FASTER, MASS, SHARE = 1.7, 20.0, 1e-3, 0.99  # targets
SIGMA = 0.05  # of the channel, and of the clusters, in FAISS's part
TINY = "SCALING_TINY" in os.environ  # also read by the processes that this one starts
Figures = dict[str, Any]


def sized(num: int) -> int:
    return max(1, num // 50) if TINY else num


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


def training(batch: int = 128) -> Figures:
    return {"seconds": median_step(paper_model(), max(8, sized(100)), batch)}


def large_batches(batch: int = 512) -> Figures:
    return {"seconds": median_step(paper_model(), max(8, sized(30)), batch)}


EXAMPLES = 256


def evaluation() -> Figures:
    model = paper_model()
    predict = PosteriorPredictive(
        model, MeanField(model).sample(5, generator=generator_for(0, "t"))
    )
    data, attacks = images(EXAMPLES), {"PGD50": pgd(L2(2.0, box=(0, 1)), steps=sized(50))}
    began = time.perf_counter()
    evaluate(predict, data, attacks=attacks, batch_size=32, progress=False)
    return {"seconds": time.perf_counter() - began}


def flat_purifier(num: int, num_thetas: int = 5, width: int = 784) -> Purifier:
    torch.manual_seed(0)
    model = BayesianModel(nn.Linear(width, 10), Categorical())
    x = torch.rand(num, width, generator=generator_for(0, "reference"))
    rows = distributed.ranks().rows(num)
    thetas = MeanField(model).sample(num_thetas, generator=generator_for(1, "thetas"))
    return Purifier(model, Noise(0.5), thetas, x[rows].clone(), sharded=True)


def query_seconds(purified: Purifier, repeats: int) -> float:
    """Seconds of a prediction of 256 queries and its gradient."""
    x = torch.rand(256, *purified.store.event_shape, generator=generator_for(2, "queries"))
    seconds = []
    for _ in range(repeats + 1):
        asked = x.clone().requires_grad_()
        began = time.perf_counter()
        torch.autograd.grad(purified(asked).logits[:, 0].sum(), asked)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[1:]))


def purifier() -> Figures:
    return {"seconds": query_seconds(flat_purifier(sized(60_000)), 5)}


def wire() -> Figures:
    """Bytes that a rank hands to its exchanges, in a step and in a block of purified queries."""
    sent: list[int] = []
    all_reduce = torch.distributed.all_reduce

    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *arguments, **options)

    torch.distributed.all_reduce = counted
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
    "large batches": large_batches,
    "evaluation": evaluation,
    "purifier": purifier,
    "wire": wire,
}
HALVES: dict[str, Callable[[], Figures]] = {  # a rank's work without its exchanges
    "training": lambda: training(64),
    "large batches": lambda: large_batches(256),
}
APART = ("two apart", "ceiling")
TITLES = {
    "training": "MIX training, the paper's conv net, batch 128 (a step)",
    "large batches": "the same, batch 512",
    "evaluation": f"PGD50 evaluation, {EXAMPLES} examples, 5 thetas",
    "purifier": "purified prediction and gradient, N = 60,000, d = 784, 256 queries",
}


def on(size: int, part: str, half: bool = False) -> Figures:
    """A part on so many processes that work together, or half of it on each of so many that do not
    know of each other; what the slowest found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    place |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "bench"}
    together = {name: str(value) for name, value in place.items()} if size > 1 and not half else {}
    command = [sys.executable, __file__, "--half" if half else "--work", part]
    started = [
        subprocess.Popen(
            command,
            env=os.environ | together | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{part} on {size} processes failed")
    found: list[Figures] = [json.loads(each.splitlines()[-1]) for each in said]
    return max(found, key=lambda each: each.get("seconds", 0.0))


def work(part: Callable[[], Figures]) -> None:
    torch.set_num_threads(1)
    with distributed.joined():
        print(json.dumps(part()), flush=True)


def speed_up(part: str) -> Figures:
    """One process, two processes and one again, so that a slow minute is seen; and where it says
    something, two that do not wait for each other: what the machine itself would allow."""
    first, two, second = (on(size, part)["seconds"] for size in (1, 2, 1))
    one = min(first, second)
    found = {"one": one, "one again": max(first, second), "two": two, "speed-up": one / two}
    if part in HALVES:
        apart = on(2, part, half=True)["seconds"]
        found |= dict(zip(APART, (apart, one / apart), strict=True))
    return found


# --- Growth, in one process ---------------------------------------------------------------------


def wide_model(width: int) -> BayesianModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
    return BayesianModel(net, Categorical())


def noise_seconds() -> float:
    """Seconds to draw the noise of one image."""
    draw, took = torch.Generator(), []
    for _ in range(200):
        began = time.perf_counter()
        torch.randn(128, 1, 28, 28, generator=draw)
        took.append(time.perf_counter() - began)
    return float(np.median(took)) / 128


def growth() -> Figures:
    torch.set_num_threads(1)
    paper = paper_model()
    counts, num = (1, 2, 4, 8), 6 if TINY else 14
    steps = {
        "S, thetas": {n: median_step(paper, num, 128, num_theta=n) for n in counts},
        "K, channel samples": {n: median_step(paper, num, 128, num_channel=n) for n in counts},
        "batch": {n: median_step(paper, num, n) for n in (32, 64, 128, 256, 512)},
        "parameters (784-w-10)": {
            (model := wide_model(width)).num_params: median_step(model, num, 128)
            for width in (16, 64, 256, 1024)
        },
    }
    points = (7_500, 15_000, 30_000, 60_000)
    queries = {n: query_seconds(flat_purifier(sized(n)), 3) for n in points}
    return {
        "seconds of a step": steps,
        "seconds of 256 purified queries with gradient": queries,
        "the same for 60,000 points in 64 dimensions": query_seconds(
            flat_purifier(sized(60_000), width=64), 3
        ),
        "seconds to draw the noise of an image": noise_seconds(),
    }


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


def lost(found: Figures, drawn_twice: float = 0.0) -> float:
    """Seconds that two ranks of this machine took beyond the slower one's half and the noise that
    both draw: exchanges, bookkeeping, falling asleep and waking up. Every rank is given as many."""
    return max(0.0, float(found["two"] - found["one"] / 2 * slowest(2) - drawn_twice))


def simulation(found: Figures) -> Figures:
    """From the measured cost of an example, of a point and of a second rank, at 1 to 64 ranks."""
    step, noise = found["training"]["one"], found["growth"]["seconds to draw the noise of an image"]
    point = found["growth"]["the same for 60,000 points in 64 dimensions"] / sized(60_000)
    of_step, of_block = lost(found["training"], 64 * noise), lost(found["purifier"])

    def ranked(own: float, batch: int, size: int) -> float:
        """A step on so many ranks, but for the network between them."""
        if size == 1:
            return own
        return own / size * slowest(size) + batch * (1 - 1 / size) * noise + of_step

    sizes, out = (1, 2, 8, 64), {}
    for network, (latency, speed) in NETWORKS.items():
        for params, batch in ((20_490, 128), (20_490, 8192), (11_000_000, 8192)):
            own = step * batch / 128 * max(1.0, params / 20_490) ** 0.5
            each = {
                size: ranked(own, batch, size) + ring(8 * params + 16, size, latency, speed)
                for size in sizes
            }
            name = f"training, {params:,} parameters, batch {batch:,}, {network}"
            out[name] = {size: each[1] / seconds for size, seconds in each.items()}
        num, width, queries = 100_000_000, 64, 256
        numbers = 5 * queries * (10 + 2) + queries * width
        each = {
            size: point * num / size * slowest(size)
            + (of_block if size > 1 else 0.0)
            + 3 * ring(8 * numbers / 3, size, latency, speed)
            for size in sizes
        }
        name = f"purifier, 1e8 points in 64 dimensions, 256 queries with gradient, {network}"
        out[name] = {size: each[1] / seconds for size, seconds in each.items()}
        out[f"{name}: seconds"] = each
    held = 100_000_000 / 64 * (64 * 4 + 5 * 10 * 4 + 8)
    large = found["large batches"]
    return {
        "speed-up by ranks": out,
        "bytes of the reference on each of 64 ranks": held,
        "seconds lost by a rank": {"training": of_step, "purifier": of_block},
        "batch 512 on two ranks of this machine": large["one"] / ranked(large["one"], 512, 2),
    }


# --- A million points by FAISS ------------------------------------------------------------------


def clustered(num: int, queries: int) -> tuple[Tensor, Tensor]:
    """Points close to one of a few hundred places, as near-duplicates and prototypes lie; queries
    are reference points behind the channel's noise."""
    draw, kinds = generator_for(0, "places"), round(num**0.5 / 4)
    places = torch.randn(kinds, 64, generator=draw)
    own = places[torch.randint(kinds, (num,), generator=draw)]
    return behind_noise(own + SIGMA * torch.randn(num, 64, generator=draw), queries)


def isotropic(num: int, queries: int) -> tuple[Tensor, Tensor]:
    """Points all over, in 64 dimensions; queries are reference points behind the noise."""
    return behind_noise(torch.randn(num, 64, generator=generator_for(1, "points")), queries)


def strangers(num: int, queries: int) -> tuple[Tensor, Tensor]:
    """Points all over, and queries that are near none of them."""
    x = torch.randn(num + queries, 64, generator=generator_for(1, "points"))
    return x[queries:], x[:queries]


def behind_noise(reference: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    noise = torch.randn(queries, 64, generator=generator_for(3, "queries"))
    return reference, reference[:queries] + SIGMA * noise


def digits(num: int, queries: int) -> tuple[Tensor, Tensor]:
    """MNIST at 8 x 8 pixels: training images, moved by up to two pixels; test images ask."""
    mnist = load_dataset("mnist")
    train, test = mnist.x_train, mnist.x_test
    shifts = sorted(itertools.product(range(-2, 3), repeat=2), key=lambda s: s[0] ** 2 + s[1] ** 2)
    copies = -(-num // len(train))
    moved = torch.cat([train.roll(shift, (2, 3)) for shift in shifts[:copies]])[:num]
    return tuple(  # type: ignore[return-value]
        functional.avg_pool2d(functional.pad(x, (2, 2, 2, 2)), 4).flatten(1)
        for x in (moved, test[:queries])
    )


CASES: dict[str, Callable[[int, int], tuple[Tensor, Tensor]]] = {
    "clusters": clustered,
    "evenly spread": isotropic,
    "evenly spread, queries near no point": strangers,
    "MNIST at 8 x 8, test images": digits,
}


def faiss(num: int = 1_000_000, queries: int = 256) -> Figures:
    """The index against the exact sweep; where its bound proves nothing the exact sweep answers."""
    there = find_dataset("mnist") is not None
    cases = {name: make for name, make in CASES.items() if there or make is not digits}
    return {name: indexed(make, sized(num), queries) for name, make in cases.items()}


def indexed(make: Callable[[int, int], tuple[Tensor, Tensor]], num: int, queries: int) -> Figures:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = BayesianModel(nn.Linear(64, 10), Categorical())
    thetas = MeanField(model).sample(5, generator=generator_for(1, "thetas"))
    reference, x = make(num, queries)
    began = time.perf_counter()
    quick = Purifier(model, Noise(SIGMA), thetas, reference, index="faiss", left_out=MASS)
    built = time.perf_counter() - began
    exact = copy.copy(quick)  # the same tables
    exact._index = None
    seconds, answers = {}, {}
    for kind, purified, repeats in (("exact", exact, 2), ("indexed", quick, 3)):
        took = []
        for _ in range(repeats):
            began = time.perf_counter()
            answers[kind] = purified(x).probs  # type: ignore[attr-defined]
            took.append(time.perf_counter() - began)
        seconds[kind] = min(took)
    assert quick._index is not None
    whole = Query(x, quick.flat(x), quick.store.origin, torch.float64)
    bound = quick._index.search(quick.store, whole, MASS)[1]
    return {
        **seconds,
        "faster": seconds["exact"] / seconds["indexed"],
        "share of queries with a left-out mass below 1e-3": float((bound < MASS).double().mean()),
        "median effective sample size": float(exact.diagnose(x[:32]).ess_reference.median()),
        "largest difference of a probability": float(
            (answers["exact"] - answers["indexed"]).abs().max()
        ),
        "seconds to make the purifier": built,
    }


# --- Tables -------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def table(found: Figures) -> str:
    """results.md."""
    lines = [f"Measured on {found['machine']}, commit {found['commit']}, {found['date']}.", ""]
    if any(part in found for part in TITLES):
        lines += [
            "| two gloo processes against one, one thread each | one (s) | two (s) | speed-up "
            "| target | two that never meet (s) | the machine's ceiling | load before |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for part, title in TITLES.items():
            each = found.get(part)
            if each is not None:
                values = (number(each[key]) for key in ("one", "two", "speed-up"))
                target = "" if part == "large batches" else SPEED_UP
                apart = (number(each[key]) if key in each else "" for key in APART)
                cells = (title, *values, target, *apart, each["load"])
                lines.append(f"| {' | '.join(map(str, cells))} |")
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
            "| FAISS (s) | faster | queries with a left-out mass below 1e-3 "
            "| effective sample size |",
            "|---|---|---|---|---|---|",
        ]
        for name, each in found["faiss"].items():
            share = each["share of queries with a left-out mass below 1e-3"]
            values = (number(each[key]) for key in ("exact", "indexed", "faster"))
            size = number(each["median effective sample size"])
            lines.append(f"| {name} | {' | '.join(values)} | {share:.1%} | {size} |")
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
        waste = found["simulation"]["seconds lost by a rank"]
        told = " and ".join(f"{1000 * waste[kind]:.2g} ms in {kind}" for kind in waste)
        simulated = found["simulation"]["batch 512 on two ranks of this machine"]
        measured = found["large batches"]["speed-up"]
        lines.append(
            f"Each of several ranks is charged what the two measured ones lost: {told}. Batch 512 "
            f"on two ranks of this machine, of which it knows nothing: simulated "
            f"{number(simulated)}, measured {number(measured)}."
        )
        for name, each in found["simulation"]["speed-up by ranks"].items():
            if name.endswith("seconds"):
                lines.append(
                    f"{name}: {number(each['1'])} on one rank, {number(each['64'])} on 64."
                )
    return "\n".join(lines) + "\n"


def commit() -> str:
    """The code that ran: the last commit, and whether anything but the results differs from it."""

    def git(*argv: str) -> str:
        told = subprocess.run(["git", *argv], capture_output=True, text=True, cwd=HERE, check=False)
        return told.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", ":/", ":!results.*")
    return git("describe", "--always") + ("-dirty" if changed else "")


def main(parts: list[str]) -> None:
    results = HERE / "results.json"
    found: Figures = {} if TINY or not results.exists() else json.loads(results.read_text())
    for part in parts:
        began, load = time.time(), round(os.getloadavg()[0], 1)
        if part in TITLES:
            found[part] = speed_up(part)
        elif part == "wire":
            found[part] = on(2, "wire")
        elif part == "simulation":
            found[part] = simulation(found)
        else:
            found[part] = {"growth": growth, "faiss": faiss}[part]()
        if part in TITLES:
            found[part]["load"] = load
        print(f"{part}: {time.time() - began:.0f} s: {json.dumps(found[part])}", flush=True)
        found |= {
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{os.cpu_count()} cores, torch {torch.__version__}",
        }
        text = json.dumps(found, indent=1) + "\n"
        found = json.loads(text)
        if not TINY:
            results.write_text(text)
            (HERE / "results.md").write_text(table(found))
    if TINY:
        print(table(found))
    for part in TITLES.keys() - {"large batches"}:
        if part in found:
            met = "met" if found[part]["speed-up"] >= SPEED_UP else "MISSED"
            print(f"{met}: {part}: {found[part]['speed-up']:.2f} of {SPEED_UP}")
    if "faiss" in found:
        each = found["faiss"]["clusters"]
        share = each["share of queries with a left-out mass below 1e-3"]
        met = "met" if each["faster"] >= FASTER and share >= SHARE else "MISSED"
        print(f"{met}: faiss: {each['faster']:.1f} of {FASTER} at {share:.1%} of {SHARE:.0%}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(SHARED[sys.argv[2]])
    elif sys.argv[1:2] == ["--half"]:
        work(HALVES[sys.argv[2]])
    else:
        if "--tiny" in sys.argv:
            sys.argv.remove("--tiny")
            os.environ["SCALING_TINY"], TINY = "1", True
        main(sys.argv[1:] or [*TITLES, "wire", "growth", "simulation", "faiss"])

"""How long a step of `fit` takes: against the deterministic net, against itself with attacks,
against other libraries.

    python benchmarks/core.py                 # everything; the first run builds .venv-peers here
    python benchmarks/core.py --skip-peers

One thread. All loops stay alive in turn and take a few steps each, round after round, so that a
slow minute of the machine meets all of them; a step's time is from the end of one step to the end
of the next, all of `fit`'s bookkeeping included. Reported are medians over all rounds. Writes
benchmarks/results/core.json and core.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from nets import UserNet, residual_net
from torch import Tensor, nn
from torch.nn import functional

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    Gaussian,
    MeanField,
    Mixture,
    Noise,
    fit,
)
from advbayes.attacks import entropy, margin, nll, one_step, squared_error
from advbayes.networks import conv_net, mlp
from advbayes.types import Channel

HERE = Path(__file__).parent
PEERS = HERE / ".venv-peers"
NUM_DATA, BATCH = 2048, 128
STEPS = {"conv": 4, "mlp": 60, "resnet": 2, "user": 4}  # of each loop in each round
NETS = {"mlp": lambda: mlp(11), "conv": conv_net, "resnet": residual_net, "user": UserNet}
TITLES = {
    "conv": "conv net 28x28",
    "mlp": "16-16 regression net",
    "resnet": "residual net, GroupNorm",
    "user": "user's module, LayerNorm",
}
OURS_ALONE = ("resnet", "user")  # a plain step beside the deterministic one

# (net, numerator, denominator, bound, at most or at least): times are divided, so "at least" is a
# speed-up.
TARGETS = [
    ("conv", "plain", "deterministic", 1.15, "<="),
    ("resnet", "plain", "deterministic", 1.1, "<="),
    ("user", "plain", "deterministic", 1.1, "<="),
    ("conv", "MIX", "plain", 1.8, "<="),
    ("mlp", "MIX", "plain", 1.8, "<="),
    ("conv", "MIX compiled", "plain compiled", 1.7, "<="),
    ("mlp", "MIX compiled", "plain compiled", 1.7, "<="),
    ("conv", "bayesian-torch", "plain compiled", 2.0, ">="),
    ("conv", "pyro", "plain compiled", 2.5, ">="),
    ("mlp", "bayesian-torch", "plain compiled", 10.0, ">="),
    ("mlp", "pyro", "plain compiled", 30.0, ">="),
    ("mlp", "bayesian-torch", "plain", 1.8, ">="),
    ("mlp", "pyro", "plain", 3.5, ">="),
]


def data(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name == "mlp":
        x = torch.randn(NUM_DATA, 11, generator=generator)
        return x, x[:, 0] + 0.1 * torch.randn(NUM_DATA, generator=generator)
    return torch.rand(NUM_DATA, 1, 28, 28, generator=generator), torch.randint(
        10, (NUM_DATA,), generator=generator
    )


def network(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return NETS[name]()


def mix(name: str) -> Channel:
    if name == "mlp":
        return Mixture(
            [0.4, 0.6], [Noise(0.1), AttackChannel(one_step(L2(1.0), squared_error), 0.1)]
        )
    attacks = [AttackChannel(one_step(L2(1.0), loss), 0.1) for loss in (nll, margin, entropy)]
    return Mixture([0.4, 0.2, 0.2, 0.2], [Noise(0.1), *attacks])


def fit_loop(
    name: str, channel: Channel, compile: bool, seed: int
) -> Callable[[Callable[[], bool]], None]:
    """A run of `fit` that calls `stop` after each step."""

    def run(stop: Callable[[], bool]) -> None:
        model = BayesianModel(
            network(name, seed), Gaussian(0.5) if name == "mlp" else Categorical()
        )
        posterior = MeanField(model)
        fit(
            model,
            posterior,
            channel,
            data(name),
            steps=10**9,
            seed=seed,
            progress=False,
            compile=compile,
            stop=stop,
        )

    return run


def deterministic_loop(name: str, seed: int) -> Callable[[Callable[[], bool]], None]:
    """The same net by maximum likelihood: the plainest training loop there is."""

    def run(stop: Callable[[], bool]) -> None:
        net, (x, y) = network(name, seed), data(name)
        optimiser = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
        at, order = 0, torch.randperm(NUM_DATA, generator=torch.Generator().manual_seed(seed))
        done = False
        while not done:
            index = order[at : at + BATCH]
            at = (at + BATCH) % NUM_DATA
            output, target = net(x[index]), y[index]
            loss = (
                functional.mse_loss(output.squeeze(-1), target)
                if name == "mlp"
                else functional.cross_entropy(output, target)
            )
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            done = stop()

    return run


class Paced(threading.Thread):
    """A training loop that takes steps when told to, and waits between."""

    def __init__(self, loop: Callable[[Callable[[], bool]], None]) -> None:
        super().__init__(daemon=True)
        self.loop = loop
        self.go, self.rest = threading.Semaphore(0), threading.Semaphore(0)
        self.left, self.ended, self.failure = 0, False, ""
        self.times: list[float] = []

    def run(self) -> None:
        self.go.acquire()
        try:
            self.loop(self.stop)
        except Exception as error:  # shown in the table instead of a time
            self.failure = f"{type(error).__name__}: {error}"
        self.ended = True
        self.rest.release()

    def stop(self) -> bool:
        self.times.append(time.perf_counter())
        self.left -= 1
        if self.left <= 0:
            self.rest.release()
            self.go.acquire()
        return self.ended

    def steps(self, num: int) -> list[float]:
        """Seconds of `num` steps; one more is taken first, and not counted."""
        if not self.is_alive() and not self.ended:
            self.start()
        if self.failure:
            return []
        self.left, self.times = num + 1, []
        self.go.release()
        self.rest.acquire()
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    def end(self) -> None:
        self.ended = True
        self.go.release()


class Peer:
    """A library's loop in the peers' virtual environment."""

    def __init__(self, library: str, name: str) -> None:
        self.failure = ""
        self.process = subprocess.Popen(
            [str(PEERS / "bin" / "python"), str(HERE / "peers.py"), library, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def steps(self, num: int) -> list[float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.failure:
            return []
        try:
            self.process.stdin.write(f"{num + 1}\n")
            self.process.stdin.flush()
            seconds: list[float] = json.loads(self.process.stdout.readline())
        except (OSError, ValueError) as error:
            self.failure = f"the process ended: {error}"
            return []
        return seconds[1:]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def build_peers() -> str:
    """The peers' virtual environment, with the same torch; what went wrong, if anything."""
    python = PEERS / "bin" / "python"
    if python.exists():
        return ""
    version = torch.__version__.split("+")[0]
    for command in (
        [sys.executable, "-m", "venv", str(PEERS)],
        [str(python), "-m", "pip", "install", "-q", f"torch=={version}", "pyro-ppl"],
        # It asks for torchvision without using it here.
        [str(python), "-m", "pip", "install", "-q", "--no-deps", "bayesian-torch"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{' '.join(command)}: {done.stderr.strip()[-300:]}"
    return ""


def measure(name: str, rounds: int, seed: int, with_peers: bool) -> dict[str, Any]:
    loops: dict[str, Paced | Peer] = {
        "deterministic": Paced(deterministic_loop(name, seed)),
        "plain": Paced(fit_loop(name, Noise(0.0), False, seed)),
        "MIX": Paced(fit_loop(name, mix(name), False, seed)),
        "plain compiled": Paced(fit_loop(name, Noise(0.0), True, seed)),
        "MIX compiled": Paced(fit_loop(name, mix(name), True, seed)),
    }
    if name in OURS_ALONE:
        loops = {loop: loops[loop] for loop in ("deterministic", "plain")}
    elif with_peers:
        loops |= {library: Peer(library, name) for library in ("bayesian-torch", "pyro")}
    seconds: dict[str, list[float]] = {loop: [] for loop in loops}
    first: dict[str, float] = {}
    for loop, runner in loops.items():
        began = time.perf_counter()
        runner.steps(3)
        first[loop] = time.perf_counter() - began
        print(f"  {name} {loop}: first steps after {first[loop]:.1f} s", flush=True)
    for _ in range(rounds):
        for loop, runner in loops.items():
            seconds[loop] += runner.steps(STEPS[name])
    for runner in loops.values():
        runner.end()
    return {
        loop: {
            "median_ms": 1e3 * statistics.median(times) if times else None,
            "min_ms": 1e3 * min(times) if times else None,
            "steps": len(times),
            "first_steps_s": first[loop],
            "failure": loops[loop].failure,
        }
        for loop, times in seconds.items()
    }


def judged(measured: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, over, under, bound, sense in TARGETS:
        above, below = (measured[name].get(key, {}).get("median_ms") for key in (over, under))
        ratio = above / below if above and below else None
        verdict = (
            "not measured"
            if ratio is None
            else "pass"
            if (ratio <= bound if sense == "<=" else ratio >= bound)
            else "FAIL"
        )
        rows.append(
            {
                "net": name,
                "ratio": f"{over} / {under}",
                "value": ratio,
                "target": f"{sense} {bound:g}",
                "verdict": verdict,
            }
        )
    return rows


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def table(report: dict[str, Any]) -> str:
    lines = [
        "# A step of `fit`: measured",
        "",
        f"`{report['command']}`, seed {report['seed']}, commit {report['commit']}, "
        f"{report['date']}.",
        f"{report['machine']['cpu']}, one thread of {report['machine']['cores']} cores, torch "
        f"{report['machine']['torch']}, "
        f"load average {report['load_before']:.2f} before and {report['load_after']:.2f} after. "
        f"Batch {BATCH}; medians of interleaved steps.",
        "",
        f"| ms a step (least) | {' | '.join(TITLES.values())} |",
        "|---|" + "---|" * len(TITLES),
    ]
    for loop in report["measured"]["conv"]:
        cells = []
        for name in TITLES:
            one = report["measured"][name].get(loop, {"median_ms": None, "failure": "-"})
            cells.append(
                f"{one['median_ms']:.3f} ({one['min_ms']:.3f})"
                if one["median_ms"]
                else one["failure"] or "not measured"
            )
        lines.append(f"| {loop} | {' | '.join(cells)} |")
    lines += ["", "| net | ratio | measured | target | verdict |", "|---|---|---|---|---|"]
    for row in report["targets"]:
        value = "" if row["value"] is None else f"{row['value']:.2f}"
        lines.append(
            f"| {row['net']} | {row['ratio']} | {value} | {row['target']} | {row['verdict']} |"
        )
    compiled = ", ".join(
        f"{name} {loop.removesuffix(' compiled')} "
        f"{report['measured'][name][loop]['first_steps_s']:.0f} s"
        for name in ("conv", "mlp")
        for loop in ("plain compiled", "MIX compiled")
    )
    lines += ["", f"First compiled steps (cold or from torch's cache on disk): {compiled}."]
    if report["peers"]:
        lines += ["", f"Peers not measured: {report['peers']}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip-peers", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "core")
    options = parser.parse_args()
    torch.set_num_threads(1)
    missing = "--skip-peers was given" if options.skip_peers else build_peers()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE,
    )
    report: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/core.py", *sys.argv[1:]]),
        "seed": options.seed,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": machine(),
        "load_before": os.getloadavg()[0],
        "peers": missing,
    }
    report["measured"] = {
        name: measure(name, options.rounds, options.seed, not missing) for name in TITLES
    }
    report["load_after"] = os.getloadavg()[0]
    report["targets"] = judged(report["measured"])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    text = table(report)
    options.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

"""Speed of PGD on the posterior predictive: against the code a user would write, and against
Foolbox.

    python benchmarks/attacks.py [--rounds 5] [--steps 50] [--quick]

S = 10 thetas, images of MNIST's size, L2 ball. The conv net of the paper with 256 images against
all contestants; a residual net with GroupNorm and a user's module with LayerNorm against naive
stacking. All contestants are timed in turn, round by round, in one process; the figures are medians
of the rounds and ratios of medians. Results go to benchmarks/results/attacks.{json,md}.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from nets import LinearNet, UserNet, residual_net
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from advbayes import L2, BayesianModel, Categorical, MeanField, PosteriorPredictive, fit, pgd
from advbayes.channels import Noise
from advbayes.networks import conv_net
from advbayes.seeds import generator_for

RESULTS = Path(__file__).parent / "results"
EPS, SEED = 2.0, 0


def blobs(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images in [0, 1] with ten classes: a bright spot whose place is the class, under noise.
    Learnable, no download."""
    generator = generator_for(seed, "images")
    y = torch.randint(10, (num,), generator=generator)
    x = 0.3 * torch.rand(num, 1, 28, 28, generator=generator)
    for label in range(10):
        row, column = 3 + 12 * (label // 5), 2 + 5 * (label % 5)
        x[y == label, 0, row : row + 8, column : column + 4] += 0.5
    return x.clamp(0, 1), y


def naive_pgd(
    net: nn.Module,
    weights: list[dict[str, Tensor]],
    x: Tensor,
    y: Tensor,
    steps: int,
    channels_last: bool,
) -> Tensor:
    """What a user would write: stack S functional calls, autograd through log-mean-exp, normalised
    steps, project, clip.

    The weights need no gradient. `channels_last` is the one tuning that such code may well have.
    """
    step, point = 2.5 * EPS / steps, x.clone()
    for _ in range(steps):
        point = point.detach().requires_grad_()
        inputs = point.contiguous(memory_format=torch.channels_last) if channels_last else point
        log_probs = torch.stack(
            [functional.log_softmax(functional_call(net, w, (inputs,)), -1) for w in weights]
        )
        loss = functional.nll_loss(torch.logsumexp(log_probs, 0), y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, point)
        with torch.no_grad():
            length = gradient.flatten(1).norm(dim=1).clamp_min(1e-30).view(-1, 1, 1, 1)
            d = point + step * gradient / length - x
            d = d * (EPS / d.flatten(1).norm(dim=1).clamp_min(1e-30)).clamp_max(1).view(-1, 1, 1, 1)
            point = (x + d).clamp(0, 1)
    return point.detach()


def peak_memory(num_theta: int, steps: int) -> float:
    """Peak resident memory in MB of an attack through `num_theta` thetas, in a process of its own,
    less an idle one's."""

    def run(what: str) -> float:
        command = [sys.executable, __file__, "--memory", what, "--steps", str(steps)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    return run(str(num_theta)) - run("0")


def report_memory(num_theta: int, steps: int) -> None:
    x, y = blobs(256, SEED)
    model = BayesianModel(conv_net(), Categorical())
    if num_theta:
        predict = PosteriorPredictive(
            model,
            MeanField(model).sample(num_theta, generator=generator_for(SEED, "thetas")).detach(),
        )
        pgd(L2(EPS, box=(0, 1)), steps)(predict, x, y)
    # Not ru_maxrss, which a child process inherits from its parent.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    sys.stdout.write(str(float(status["VmHWM"].split()[0]) / 1024))


def bfloat16(predict: PosteriorPredictive, x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """With the network's products in bfloat16: the time of a short attack over float32's, and the
    accuracy that each leaves.

    On one thread, for autocast is a setting of the thread. Below 1 and with as much success it
    would be worth offering.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    attack = pgd(L2(EPS, box=(0, 1)), 5)

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        x_adv = attack(predict, x, y)
        seconds = time.perf_counter() - start
        with torch.autocast("cpu", enabled=False):
            return seconds, float((predict(x_adv).logits.argmax(-1) == y).double().mean())

    full, left = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, left_by_half = run()
    torch.set_num_threads(threads)
    return half / full, left, left_by_half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--quick", action="store_true", help="one round of five steps, nothing written"
    )
    parser.add_argument("--memory", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory is not None:
        return report_memory(options.memory, options.steps)
    rounds, steps = (1, 5) if options.quick else (options.rounds, options.steps)

    train, (x, y) = blobs(2000, 1), blobs(256, SEED)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        net = conv_net()
    model = BayesianModel(net, Categorical())
    posterior = MeanField(model)
    fit(model, posterior, Noise(0.1), train, epochs=3, seed=SEED)
    thetas = posterior.sample(10, generator=generator_for(SEED, "thetas")).detach()
    predict = PosteriorPredictive(model, thetas)
    bare = copy.deepcopy(net).requires_grad_(False)
    weights = [dict(zip(model.names, model.parts(theta), strict=False)) for theta in thetas]
    ball = L2(EPS, box=(0, 1))
    contestants: dict[str, Callable[[], Tensor]] = {
        "advbayes": lambda: pgd(ball, steps)(predict, x, y),
        "advbayes, broken examples leave": lambda: pgd(ball, steps, stop_at_success=True)(
            predict, x, y
        ),
        "naive stack": lambda: naive_pgd(bare, weights, x, y, steps, False),
        "naive stack, channels_last": lambda: naive_pgd(bare, weights, x, y, steps, True),
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import foolbox

            from advbayes.adapters import to_foolbox

            theirs = foolbox.attacks.L2PGD(
                rel_stepsize=2.5 / steps, steps=steps, random_start=False
            )
            outside = to_foolbox(predict)
        contestants["Foolbox L2PGD"] = lambda: theirs(outside, x, y, epsilons=EPS)[1]
    except ImportError:
        sys.stdout.write("Foolbox is not installed: left out\n")

    every = sorted({1, torch.get_num_threads()}, reverse=True)  # numbers of threads
    seconds: dict[int, dict[str, list[float]]] = {
        num: {name: [] for name in contestants} for num in every
    }
    results: dict[str, Tensor] = {}
    for num in every:
        torch.set_num_threads(num)
        for _ in range(rounds):
            for name, attack in contestants.items():
                start = time.perf_counter()
                results[name] = attack()
                seconds[num][name].append(time.perf_counter() - start)
    torch.set_num_threads(every[0])
    medians = {
        num: {name: statistics.median(values) for name, values in seconds[num].items()}
        for num in every
    }
    with torch.no_grad():
        clean = float((predict(x).logits.argmax(-1) == y).double().mean())
        accuracy = {
            name: float((predict(x_adv).logits.argmax(-1) == y).double().mean())
            for name, x_adv in results.items()
        }
        loss = {name: float(-predict(x_adv).log_prob(y).mean()) for name, x_adv in results.items()}
    slowdown, left, left_by_half = bfloat16(predict, x, y)
    memory = {num: peak_memory(num, 2) for num in (10, 40, 160)}
    targets: list[tuple[str, float, float | None]] = []
    for num in every:
        own, where = medians[num]["advbayes"], f"{num} thread{'s' * (num > 1)}"
        targets.append((f"naive stack / advbayes, {where}", medians[num]["naive stack"] / own, 2.2))
        targets.append(
            (
                f"naive stack, channels_last / advbayes, {where}",
                medians[num]["naive stack, channels_last"] / own,
                None,
            )
        )
        if "Foolbox L2PGD" in contestants:
            targets.append(
                (f"Foolbox / advbayes, {where}", medians[num]["Foolbox L2PGD"] / own, 1.0)
            )
    others = other_nets(every, rounds)
    for name, by_threads in others.items():
        for num, ratio in by_threads.items():
            targets.append(
                (
                    f"naive stack / advbayes, {name}, {num} thread{'s' * (num > 1)}",
                    ratio,
                    OTHERS[name][3],
                )
            )
    targets += [
        ("memory of S = 160 / of S = 40 (naive: 4)", memory[160] / memory[40], -1.5),
        ("a five-step attack in bfloat16 / in float32, 1 thread", slowdown, None),
    ]
    lines = [
        f"PGD, {steps} steps, S = 10, 256 images 1x28x28, conv net; clean accuracy {clean:.3f}; "
        f"medians of {rounds} rounds.",
        "",
        f"| attack | {' | '.join(f's, threads: {num}' for num in every)} | accuracy left | mean "
        f"NLL |",
        "|---|" + "---|" * (len(every) + 2),
        *(
            f"| {name} | {' | '.join(f'{medians[num][name]:.2f}' for num in every)} | "
            f"{accuracy[name]:.3f} | {loss[name]:.2f} |"
            for name in contestants
        ),
        "",
        "| ratio | measured | target |",
        "|---|---|---|",
        *(f"| {name} | {value:.2f} | {_wanted(value, goal)} |" for name, value, goal in targets),
        "",
        f"Accuracy left by the five-step attack: {left:.3f} in float32, {left_by_half:.3f} in "
        f"bfloat16.",
        "",
        f"Peak memory over an idle process, MB: "
        f"{', '.join(f'S = {num}: {value:.0f}' for num, value in memory.items())}.",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.quick:
        return None
    where = {
        "command": "python benchmarks/attacks.py " + " ".join(sys.argv[1:]),
        "seed": SEED,
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent
        ).stdout.strip(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}",
        "load": ", ".join(f"{value:.2f}" for value in os.getloadavg()),
    }
    RESULTS.mkdir(exist_ok=True)
    record = {
        **where,
        "steps": steps,
        "seconds": seconds,
        "accuracy": accuracy,
        "nll": loss,
        "memory_mb": memory,
    }
    record["other_nets"] = others
    record["bfloat16"] = {
        "slowdown": slowdown,
        "accuracy_float32": left,
        "accuracy_bfloat16": left_by_half,
    }
    (RESULTS / "attacks.json").write_text(json.dumps(record, indent=1) + "\n")
    heading = [
        "# Speed of the attacks",
        "",
        *(f"{key}: `{value}`  " for key, value in where.items()),
        "",
    ]
    (RESULTS / "attacks.md").write_text("\n".join([*heading, *lines]) + "\n")
    return None


OTHERS: dict[str, tuple[Callable[[], nn.Module], int, int, float]] = {  # net, images, steps, target
    "residual net with GroupNorm": (residual_net, 64, 5, 1.2),
    "a user's module with LayerNorm": (UserNet, 128, 10, 1.2),
    "linear layers with LayerNorm": (LinearNet, 256, 50, 1.0),
}


def other_nets(every: list[int], rounds: int) -> dict[str, dict[int, float]]:
    """Naive stacking's time over ours, for each net and number of threads; weights as they are
    initialised."""
    ratios: dict[str, dict[int, float]] = {}
    for name, (make, num, steps, _) in OTHERS.items():
        x, y = blobs(num, SEED)
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            net = make()
        model = BayesianModel(net, Categorical())
        thetas = MeanField(model).sample(10, generator=generator_for(SEED, "thetas")).detach()
        predict, ball = PosteriorPredictive(model, thetas), L2(EPS, box=(0, 1))
        bare = copy.deepcopy(net).requires_grad_(False)
        weights = [dict(zip(model.names, model.parts(theta), strict=False)) for theta in thetas]
        ratios[name] = {}
        for threads in every:
            torch.set_num_threads(threads)
            seconds: dict[str, list[float]] = {"ours": [], "naive": []}
            for _ in range(rounds + 1):
                for who in seconds:
                    start = time.perf_counter()
                    if who == "ours":
                        pgd(ball, steps)(predict, x, y)
                    else:
                        naive_pgd(bare, weights, x, y, steps, False)
                    seconds[who].append(time.perf_counter() - start)
            # the first warms up
            naive, ours = (statistics.median(seconds[who][1:]) for who in ("naive", "ours"))
            ratios[name][threads] = naive / ours
    return ratios


def _wanted(value: float, goal: float | None) -> str:
    if goal is None:
        return "-"
    met = value >= goal if goal > 0 else value <= -goal
    return f"{'>=' if goal > 0 else '<='} {abs(goal):g}: {'met' if met else 'MISSED'}"


if __name__ == "__main__":
    main()

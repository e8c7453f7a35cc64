"""What several ranks do in `test_distributed.py`, and one process for comparison; the ranks are
forked children (torch is loaded once)."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Gaussian,
    Learned,
    LowRank,
    MeanField,
    Mixture,
    Noise,
    PosteriorPredictive,
    Purifier,
    Trades,
    audit,
    distributed,
    evaluate,
    fit,
    margin,
    nll,
    one_step,
    pgd,
)
from advbayes.auditing import Budget, Support
from advbayes.networks import FullyConnectedGenerator
from advbayes.purification.attacks import nearest_centre_radius
from advbayes.purification.banks import GaussianBank
from advbayes.seeds import generator_for
from advbayes.training import FitResult, State
from advbayes.types import Channel

Found = dict[str, Tensor]


# --- Processes ----------------------------------------------------------------------------------


def start(size: int, work: Callable[[], object], log: Path) -> list[int]:
    """`work` in `size` children that torchrun could have started; their ids. `log` takes what they
    say."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(size):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                sys.stdout = sys.stderr = log.open("a", buffering=1)
                place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
                os.environ |= {name: str(value) for name, value in place.items()}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}
                code = int(work() or 0)  # type: ignore[call-overload]
            except SystemExit as end:
                code = int(str(end))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    return children


def wait(children: list[int], limit: float = 120.0) -> list[int]:
    """How they ended: exit codes, or minus the signal."""
    codes: dict[int, int] = {}
    began = time.monotonic()
    while len(codes) < len(children):
        for pid in set(children) - codes.keys():
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        assert time.monotonic() - began < limit, f"still there after {limit} s"
        time.sleep(0.01)
    return [codes[pid] for pid in children]


# --- Work ---------------------------------------------------------------------------------------


def data(num: int = 61) -> tuple[Tensor, Tensor]:
    x = torch.randn(num, 3, generator=generator_for(0, "data"), dtype=torch.float64)
    return x, (x[:, 0] + x[:, 1] > 0).long()


def model(outputs: int = 2) -> BayesianModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    return BayesianModel(net, Categorical() if outputs == 2 else Gaussian(0.3))


def attack(loss: Callable[..., Tensor]) -> AttackChannel:
    return AttackChannel(one_step(L2(0.5), loss), 0.1)


def learned() -> Learned:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Learned(FullyConnectedGenerator(3).double(), L2(0.5), entropy_bonus=0.1)


def mix() -> Mixture:
    return Mixture([0.4, 0.2, 0.4], [Noise(0.1), attack(nll), attack(margin)])


def channels() -> dict[str, Channel]:
    return {
        "noise": Noise(0.3),
        "mix": mix(),
        "learned": learned(),
        # multi-step attacks, nested and iid mixtures, some of whose parts a rank has no rows of
        "nested": Mixture(
            [0.5, 0.2, 0.2, 0.1],
            [mix(), Noise(0.2), learned(), AttackChannel(pgd(L2(0.5), steps=3), 0.1)],
            stratified=False,
        ),
    }


def trained(channel: Channel, rank: str = "mean field", **options: Any) -> FitResult:
    one = model()
    posterior = LowRank(one, 2) if rank == "low" else MeanField(one)
    with torch.no_grad():  # the first rank's start counts
        posterior.mu += distributed.ranks().rank
    settings: dict[str, Any] = {"steps": 6, "batch_size": 9, "lr": 0.01, "seed": 3}
    return fit(one, posterior, channel, data(), **(settings | options))


def numbers(result: FitResult) -> Found:
    history = {name: column for name, column in result.history.items() if name != "seconds"}
    found = {name: torch.tensor(column, dtype=torch.float64) for name, column in history.items()}
    return found | result.state.tensors


def trainings() -> dict[str, Found]:
    weighted = ChannelELBO(
        61, num_theta=3, num_channel=2, bound="importance_weighted", penalty=Trades(2.0)
    )
    found = {name: numbers(trained(channel)) for name, channel in channels().items()}
    found["weighted"] = numbers(trained(mix(), "low", objective=weighted))
    found["tiny batches"] = numbers(trained(mix(), batch_size=2))  # fewer rows than three ranks
    found["warm-up"] = numbers(trained(mix(), warmup=0.5))
    found["own thetas"] = numbers(trained(mix(), own_thetas=True))
    return found


def predictor() -> PosteriorPredictive:
    one = model()
    return PosteriorPredictive(one, MeanField(one).sample(4, generator=generator_for(5, "thetas")))


def evaluation(out: Path, predict: Any = None) -> Found:
    report = evaluate(
        {"net": predictor() if predict is None else predict},
        data(23),
        attacks={"PGD": pgd(L2(0.5), steps=4)},
        radii=(0.2, 0.6),
        batch_size=5,
        out=out,
    )
    return {f"{cell}/{name}": v for cell, c in report.cells.items() for name, v in c.items()}


def verdict() -> dict[str, Any]:
    x, y = data(40)
    budget = Budget(
        num=12, steps=3, restarts=1, random_points=4, queries=20, max_steps=6, batch_size=5
    )
    support = Support(undefended=predictor())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        only = ("E1", "E3", "E4", "E11", "E20", "E28", "E29")
        return audit(
            predictor(), (x, y), ball=L2(0.5), tier=budget, support=support, only=only
        ).json()


class Box:
    """Uniform noise: most reference points exclude most queries, and all of them some."""

    sample = Noise(0.1).sample

    def density(self, predict: Any, x: Tensor, y: Tensor | None = None) -> Any:
        class Density:
            def log_prob(self, x_adv: Tensor) -> Tensor:
                far = (x_adv - x.unsqueeze(1)).abs().amax(-1) > 0.8
                return torch.zeros(far.shape, dtype=x.dtype).masked_fill(far, -math.inf)

        return Density()


def purifier(outputs: int, channel: Channel, update: str, num: int) -> Purifier:
    x, y = data(num)
    one, rows = model(outputs), distributed.ranks().rows(num)
    thetas = MeanField(one).sample(4, generator=generator_for(1, "thetas"))
    part = (x[rows], y[rows] if outputs == 2 else x[rows, 0])
    own = thetas + distributed.ranks().rank  # the first rank's count
    return Purifier(one, channel, own, part, update, sharded=True)


def asked(purified: Purifier) -> Found:
    """Everything that a purifier answers, at reasonable and at unreasonable inputs."""
    x = torch.randn(9, 3, generator=generator_for(2, "queries"), dtype=torch.float64)
    x = (x * torch.tensor([60.0] + [1.0] * 8, dtype=torch.float64).unsqueeze(1)).requires_grad_()
    predicted = purified(x)
    gaussian = isinstance(purified.store.banks[0], GaussianBank)
    found: Found = {"denoised": purified.denoise(x.detach())} if gaussian else {}
    if purified.store.num_outputs:
        y = torch.linspace(-2, 2, 9, dtype=torch.float64)
        found["log_prob"], found["mean"] = predicted.log_prob(y), predicted.mean
        found["variance"], found["cdf"] = predicted.variance, predicted.cdf(y)  # type: ignore[attr-defined]
    else:
        found["log_prob"] = predicted.log_prob(torch.ones(9))
        labels = torch.zeros(9, dtype=torch.long)
        if purified.update == "online" and gaussian:
            found["radius"] = nearest_centre_radius(purified, x.detach(), labels, 3)
    total = sum(value.sum() for value in found.values())
    assert isinstance(total, Tensor)
    if gaussian:  # the others are flat
        found["gradient"] = torch.autograd.grad(total, x)[0]
    told = purified.diagnose(x.detach())
    # of uniform densities all that are not zero are the largest
    nearest = ("nearest",) if gaussian else ()
    for name in ("log_evidence", "ess_reference", "ess_theta", "distance", *nearest):
        found[name] = getattr(told, name).double()
    return {name: value.detach().clone() for name, value in found.items()}


def purifications() -> dict[str, Found]:
    return {
        f"{outputs} outputs, {update}, {name}, {num}": asked(
            purifier(outputs, channel, update, num)
        )
        for outputs in (1, 2)
        for update in ("online", "offline")
        for name, channel in (("noise", Noise(0.4)), ("attack", attack(nll)), ("box", Box()))
        for num in (4, 400)
    }


def everything(folder: Path) -> dict[str, Found]:
    """All that must not depend on the number of ranks."""
    parts = {"train": trainings(), "purify": purifications()}
    found = {f"{kind} {name}": part for kind, each in parts.items() for name, part in each.items()}
    found["evaluate"] = evaluation(folder / "evaluation")
    sharded = purifier(2, Noise(0.4), "online", 50)
    found["evaluate a sharded purifier"] = evaluation(folder / "purified", sharded)
    return found


def resumed(state: State | None, steps: int) -> FitResult:
    return trained(channels()["nested"], state=state, steps=steps)

"""A plain ELBO step of another library, timed on request; runs in the benchmark's own virtual
environment.

`python peers.py LIBRARY NET` reads numbers of steps from standard input, one a line, and answers
each with the list of seconds. It imports nothing of advbayes: the networks and the data are those
of `core.py`, written out again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_DATA, BATCH = 2048, 128


def network(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(
            nn.Linear(11, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)
        )
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip


def data(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name == "mlp":
        x = torch.randn(NUM_DATA, 11, generator=generator)
        return x, x[:, 0] + 0.1 * torch.randn(NUM_DATA, generator=generator)
    return torch.rand(NUM_DATA, 1, 28, 28, generator=generator), torch.randint(
        10, (NUM_DATA,), generator=generator
    )


def negative_log_likelihood(name: str, output: Tensor, y: Tensor) -> Tensor:
    if name == "mlp":
        return (
            -torch.distributions.Normal(output.squeeze(-1), 0.5, validate_args=False)
            .log_prob(y)
            .mean()
        )
    return functional.cross_entropy(output, y)


def bayesian_torch_step(name: str) -> Callable[[Tensor, Tensor], None]:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    net = network(name)
    dnn_to_bnn(
        net,
        {
            "prior_mu": 0.0,
            "prior_sigma": 1.0,
            "posterior_mu_init": 0.0,
            "posterior_rho_init": -3.9,
            "type": "Reparameterization",
            "moped_enable": False,
            "moped_delta": 0.5,
        },
    )
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)

    def step(x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad()
        loss = negative_log_likelihood(name, net(x), y) + get_kl_loss(net) / NUM_DATA
        loss.backward()
        optimiser.step()

    return step


def pyro_step(name: str) -> Callable[[Tensor, Tensor], None]:
    import pyro
    from pyro import distributions as dist
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoDiagonalNormal
    from pyro.nn import PyroSample
    from pyro.nn.module import to_pyro_module_

    pyro.enable_validation(False)
    net = network(name)
    to_pyro_module_(net)
    for module in net.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            prior = dist.Normal(torch.zeros_like(parameter), 1.0).to_event(parameter.dim())
            setattr(module, key, PyroSample(prior))

    def model(x: Tensor, y: Tensor) -> None:
        output = net(x)
        with pyro.plate("data", size=NUM_DATA, subsample_size=len(x)):
            if name == "mlp":
                pyro.sample("y", dist.Normal(output.squeeze(-1), 0.5), obs=y)
            else:
                pyro.sample("y", dist.Categorical(logits=output), obs=y)

    svi = SVI(
        model,
        AutoDiagonalNormal(model, init_scale=0.02),
        pyro.optim.Adam({"lr": 1e-3}),
        Trace_ELBO(),
    )
    return lambda x, y: svi.step(x, y)


def main() -> None:
    torch.set_num_threads(1)
    library, name = sys.argv[1:]
    step = {"bayesian-torch": bayesian_torch_step, "pyro": pyro_step}[library](name)
    x, y = data(name)
    order = torch.randperm(NUM_DATA, generator=torch.Generator().manual_seed(1))
    at = 0
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            began = time.perf_counter()
            index = order[at : at + BATCH]
            at = (at + BATCH) % NUM_DATA
            step(x[index], y[index])
            seconds.append(time.perf_counter() - began)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()

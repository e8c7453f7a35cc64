"""Eight threads answer as one: predictions, attacks, training, evaluation; whatever the net is made
of."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    ChannelELBO,
    Ensemble,
    MeanField,
    Mixture,
    Noise,
    PosteriorPredictive,
    evaluate,
    fit,
    margin,
    nll,
    one_step,
    pgd,
)
from advbayes.attacks import through_attacks
from advbayes.networks import with_group_norm

THREADS = 8


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norms[1](self.second(torch.relu(self.norms[0](self.first(x))))))


class Own(nn.Module):
    """A user's module: tied weights, a buffer, a list beside the registered layers, a method kept
    as an attribute."""

    scale: Tensor

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.inner, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.layers = [self.inner, self.norm]
        self.again = self._again
        self.recompute = recompute
        self.register_buffer("scale", torch.tensor(1.5))

    def _again(self, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(h)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = torch.relu(layer(h))
        h = checkpoint(self.again, h, use_reentrant=False) if self.recompute else self.again(h)
        out: Tensor = self.last(h)
        return out


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    net[0].requires_grad_(False)
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "sequential conv": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 4, 2),
        nn.Flatten(),
        nn.Linear(4, 3),
    ),
    "layer norm": lambda: nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)
    ),
    "group norm resnet": lambda: with_group_norm(
        nn.Sequential(nn.Conv2d(1, 4, 3), Residual(4), Residual(4), nn.Flatten(), nn.Linear(64, 3))
    ),
    "frozen layers": frozen,
    "own module": Own,
}


def make(kind: str) -> tuple[BayesianModel, Tensor, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BayesianModel(NETS[kind](), Categorical())
        x = (
            torch.rand(40, 1, 6, 6)
            if kind in ("sequential conv", "group norm resnet")
            else torch.rand(40, 6)
        )
        thetas = torch.randn(12, model.num_params)
    return model, thetas, x, torch.arange(40) % 3


def in_threads(work: Callable[[int], Any], num: int) -> list[Any]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(num)))


@pytest.mark.parametrize("kind", NETS)
def test_predictions_and_gradients_of_eight_threads_are_those_of_one(kind: str) -> None:
    model, thetas, x, y = make(kind)
    predictors = [PosteriorPredictive(model, part) for part in thetas.split(3)]

    def answer(i: int) -> list[Tensor]:
        rows = slice(i % 8, i % 8 + 5)
        predict = predictors[i % 4]
        one = model.at(thetas[i % 12])
        leaf = thetas[i % 12].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model.log_likelihood(leaf, x[rows], y[rows]).sum(), leaf)
        return [
            predict(x[rows]).logits,
            one(x[rows]).logits,
            predict.loss_and_gradient(nll, x[rows], y[rows])[2],
            gradient,
        ]

    wanted = [answer(i) for i in range(24)]
    got = in_threads(lambda i: answer(i % 24), 240)
    assert all(
        torch.equal(a, b)
        for i, parts in enumerate(got)
        for a, b in zip(parts, wanted[i % 24], strict=True)
    )


@pytest.mark.parametrize("kind", ["group norm resnet", "own module"])
def test_attacks_and_evaluations_of_eight_threads_are_those_of_one(kind: str) -> None:
    model, thetas, x, y = make(kind)
    predict = PosteriorPredictive(model, thetas[:2])

    def attacked(i: int) -> Tensor:
        generator = torch.Generator().manual_seed(i)
        return pgd(L2(0.5), steps=3, restarts=2)(predict, x[:8], y[:8], generator=generator)

    def evaluated(i: int) -> str:
        return str(
            evaluate(
                predict,
                (x[i : i + 10], y[i : i + 10]),
                attacks={"PGD": pgd(L2(0.5), 2)},
                progress=False,
            ).table()
        )

    wanted = [attacked(i) for i in range(4)], [evaluated(i) for i in range(4)]
    assert all(
        torch.equal(a, wanted[0][i % 4])
        for i, a in enumerate(in_threads(lambda i: attacked(i % 4), 16))
    )
    assert all(
        a == wanted[1][i % 4] for i, a in enumerate(in_threads(lambda i: evaluated(i % 4), 8))
    )


@pytest.mark.parametrize("through", [False, True])
def test_fits_side_by_side_of_one_model_and_one_channel_are_those_of_one_thread(
    through: bool,
) -> None:
    model, _, x, y = make("own module")
    attacks = [AttackChannel(one_step(L2(0.5), loss), 0.1) for loss in (nll, margin)]
    channel = Mixture([0.4, 0.3, 0.3], [Noise(0.1), *attacks])

    def trained(i: int) -> Tensor:
        posterior = MeanField(model)
        # Only half of them send gradients through the attack: a flag shared by threads would show.
        objective = ChannelELBO(len(x), through=through and i % 2 == 0)
        fit(
            model,
            posterior,
            channel,
            (x, y),
            steps=12,
            batch_size=20,
            seed=i,
            objective=objective,
            progress=False,
        )
        return posterior.mu.detach()

    wanted = [trained(i) for i in range(2)]
    assert all(
        torch.equal(mu, wanted[i % 2])
        for i, mu in enumerate(in_threads(lambda i: trained(i % 2), 16))
    )


def test_ensembles_begun_side_by_side_have_the_members_of_one_thread() -> None:
    model = make("layer norm")[0]
    wanted = [Ensemble(model, num=3, seed=i).thetas for i in range(4)]
    got = in_threads(lambda i: Ensemble(model, num=3, seed=i % 4).thetas, 32)
    assert all(torch.equal(members, wanted[i % 4]) for i, members in enumerate(got))


def test_the_net_keeps_its_own_weights_while_it_runs() -> None:
    seen: list[bool] = []
    model, thetas, x, _ = make("own module")
    start = model.initial_theta()

    def look(*_: object) -> None:
        seen.append(torch.equal(model.initial_theta(), start))

    model.net.register_forward_hook(look)
    model.output(thetas[0], x)
    assert seen == [True]


def test_hooks_and_changes_made_later_are_seen() -> None:
    model, thetas, x, _ = make("own module")
    before = model.output(thetas[0], x)[0]
    seen: list[int] = []
    handle = model.net.get_submodule("last").register_forward_hook(lambda *_: seen.append(1))
    model.output(thetas[0], x)
    handle.remove()
    model.output(thetas[0], x)
    assert seen == [1]
    model.net.scale.fill_(0.5)
    changed = model.output(thetas[0], x)[0]
    assert not torch.equal(changed, before)
    model.net.norm = nn.Identity()  # what theta says of it has no place any more
    model.net.layers[1] = model.net.norm
    assert not torch.equal(model.output(thetas[0], x)[0], changed)


def test_a_net_may_call_its_own_model() -> None:
    """A hook that asks the model at another theta, in the middle of a pass."""
    model, thetas, x, _ = make("own module")
    wanted = [model.output(theta, x)[0] for theta in thetas[:2]]
    inner: list[Tensor] = []

    def ask(*_: object) -> None:
        if len(inner) < 1:
            inner.append(x)
            inner.append(model.output(thetas[1], x)[0])

    handle = model.net.get_submodule("inner").register_forward_hook(ask)
    outer = model.output(thetas[0], x)[0]
    handle.remove()
    assert torch.equal(outer, wanted[0])
    assert torch.equal(inner[1], wanted[1])


def test_recomputed_passes_see_the_theta_of_their_graph() -> None:
    """torch.utils.checkpoint runs parts of the net again in the backward pass, when other thetas
    have been run since."""
    torch.manual_seed(0)
    net = Own()
    plain, recomputing = BayesianModel(net, Categorical()), BayesianModel(net, Categorical())
    recomputing.net.recompute = True
    x, thetas = torch.randn(5, 6), torch.randn(3, plain.num_params)

    def gradients(model: BayesianModel) -> list[Tensor]:
        leaves = [theta.clone().requires_grad_() for theta in thetas]
        outputs = [model.output(leaf, x)[0].square().sum() for leaf in leaves]
        return [
            torch.autograd.grad(output, leaf)[0]
            for output, leaf in zip(outputs, leaves, strict=True)
        ]

    for a, b in zip(gradients(plain), gradients(recomputing), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)


class Guarded(nn.Module):
    """A module whose state cannot be copied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.copied = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Guarded:
        if self.copied:
            raise TypeError("cannot pickle '_thread.lock' object")
        made = Guarded()
        made.load_state_dict(self.state_dict())
        made.copied, made.lock = True, threading.Lock()
        return made

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def test_a_net_that_cannot_be_copied_runs_one_pass_at_a_time() -> None:
    model = BayesianModel(Guarded(), Categorical())
    thetas, x = torch.randn(8, model.num_params), torch.randn(64, 6)
    wanted = [model.output(theta, x)[0] for theta in thetas]
    got = in_threads(lambda i: model.output(thetas[i % 8], x)[0], 400)
    assert all(torch.equal(output, wanted[i % 8]) for i, output in enumerate(got))


def test_a_model_that_has_run_can_be_copied_and_pickled() -> None:
    model, thetas, x, _ = make("group norm resnet")
    wanted = model.output(thetas[0], x)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert torch.equal(other.output(thetas[0], x)[0], wanted)


def test_gradients_go_through_the_attacks_of_the_thread_that_asked_for_it() -> None:
    model, thetas, x, y = make("layer norm")
    predict = PosteriorPredictive(model, thetas)
    inside, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with through_attacks():
            inside.set()
            done.wait(60)

    other = threading.Thread(target=elsewhere)
    other.start()
    assert inside.wait(60)
    attacked = one_step(L2(0.5))(predict, x.requires_grad_(), y)
    done.set()
    other.join()
    assert not attacked.requires_grad
    with through_attacks():
        assert one_step(L2(0.5))(predict, x, y).requires_grad

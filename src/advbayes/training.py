"""`fit`: one loop for every defense (section 3.3, SM-5).

Randomness is keyed by (seed, purpose, step) and the batches by (seed, epoch), so a run that goes on from a `State` draws what an
uninterrupted one would have drawn.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from advbayes import checks
from advbayes.attacks.gradients import refuse_inference_mode
from advbayes.balls import _Ball as Ball
from advbayes.channels import AttackChannel, Learned, Mixture, learned_in
from advbayes.gradients import CompiledGradient, Gradient, eager_gradient
from advbayes.model import BayesianModel
from advbayes.objectives import ChannelELBO
from advbayes.posteriors import Samples, _Posterior
from advbayes.progress import Progress
from advbayes.seeds import generator_for, seed_for
from advbayes.types import Channel

COLUMNS = ("bound", "log_likelihood", "kl", "penalty", "gradient_norm", "seconds")
MAX_SKIPPED_IN_A_ROW = 10

Data = tuple[Tensor | np.ndarray[Any, Any], Tensor | np.ndarray[Any, Any]] | DataLoader[Any]


class NonFiniteError(FloatingPointError):
    """Training met NaN or infinity ten steps in a row; the posterior is at its last finite state."""


@dataclass
class State:
    """All that the next step needs: tensors by name (posterior, optimisers, adversaries), the step and the history."""

    step: int = 0
    skipped: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    history: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in COLUMNS})


@dataclass(frozen=True)
class FitResult:
    """What `fit` returns beside the trained posterior: one history entry for each step taken."""

    history: dict[str, list[float]]
    steps: int
    skipped: int
    interrupted: bool
    state: State

    def __repr__(self) -> str:
        last = f", bound={self.history['bound'][-1]:.6g}" if self.history["bound"] else ""
        return f"FitResult(steps={self.steps}, skipped={self.skipped}, interrupted={self.interrupted}{last})"


@torch.enable_grad()  # training needs gradients, whatever the caller's mode
def fit(
    model: BayesianModel,
    posterior: _Posterior,
    channel: Channel,
    data: Data,
    *,
    objective: ChannelELBO | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int = 128,
    lr: float = 1e-3,
    decay: float = 1.0,
    adversary_lr: float = 1e-3,
    seed: int = 0,
    progress: bool | None = None,
    compile: bool = False,
    state: State | None = None,
    checkpoint: Callable[[State], None] | None = None,
    checkpoint_every: int | None = None,
    stop: Callable[[], bool] | None = None,
) -> FitResult:
    """Train the posterior through the channel: maximise the objective by Adam, in place.

    The learning rate falls by the factor `decay` over each pass through the data. Learned channels take a step of their own
    (against the model) before each step of the posterior. A step whose gradient is not finite is skipped and counted; ten in
    a row raise `NonFiniteError`. Ctrl-C (or `stop()` returning true) finishes the step and returns what is trained, with
    `interrupted=True`. `progress=None` shows a bar on a terminal alone. `checkpoint(state)` is called every
    `checkpoint_every` steps and at the end; passing a saved state as `state` goes on from there, bit for bit (tensors and
    arrays; a DataLoader, whose order is its own, starts a new pass).
    `compile=True` compiles the step at its first batch (ten to sixty seconds, less when cached): two to five times faster on
    small nets, the same draws, results equal up to rounding.

    >>> from advbayes import BayesianModel, Categorical, MeanField, Noise
    >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    >>> model = BayesianModel(nn.Linear(2, 2), Categorical())
    >>> fit(model, MeanField(model), Noise(0.1), (x, (x[:, 0] > 0).long()), epochs=2, batch_size=32).steps
    4
    """
    refuse_inference_mode()
    batches = _batches(model, posterior, channel, data, batch_size, seed)
    objective = _objective(objective, batches.num_data)
    total = _total_steps(epochs, steps, batches)
    checks.number("lr", lr, low=0, open_low=True)
    checks.number("decay", decay, low=0, high=1, open_low=True)
    checks.number("adversary_lr", adversary_lr, low=0, open_low=True)
    if checkpoint_every is not None:
        checks.count("checkpoint_every", checkpoint_every)

    adam = _Adam(posterior.parameters(), lr)
    adversaries = [_Adversary(learned, adversary_lr) for learned in learned_in(channel)]
    held = _Held(posterior, adam, adversaries)
    state = State() if state is None else held.restore(state)
    make = CompiledGradient if compile else eager_gradient
    take_gradient: Gradient = make(model, posterior, channel, objective)
    generator = torch.Generator(model.device)
    skipped_in_a_row = 0
    interrupted = False
    origin = time.perf_counter() - (state.history["seconds"][-1] if state.history["seconds"] else 0.0)
    columns = [state.history[name] for name in COLUMNS]

    with _deferred_interrupt() as interrupt, Progress("fit", total, progress, start=state.step) as bar:
        for step in range(state.step, total):
            x, y = batches(step)
            for adversary in adversaries:
                generator.manual_seed(seed_for(seed, "adversary", step))
                adversary.step(model, posterior, x, y, generator)
            generator.manual_seed(seed_for(seed, "step", step))
            found = take_gradient(x, y, generator)
            bound = found.log_likelihood - objective.kl_weight * found.kl - found.penalty
            if math.isfinite(found.norm) and math.isfinite(bound):
                adam.step(found.gradients, lr * decay ** (step / batches.steps_per_epoch))
                skipped_in_a_row = 0
            else:
                state.skipped += 1
                skipped_in_a_row += 1
            values = (bound, found.log_likelihood, found.kl, found.penalty, found.norm, time.perf_counter() - origin)
            for column, value in zip(columns, values, strict=True):
                column.append(value)
            state.step = step + 1
            bar.advance(f"bound {bound:.4g}")
            if skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                generator.manual_seed(seed_for(seed, "step", step))
                raise NonFiniteError(_cause(model, posterior, channel, objective, x, y, generator, step))
            if interrupt() or (stop is not None and stop()):
                interrupted = state.step < total
                break
            if checkpoint is not None and checkpoint_every is not None and state.step % checkpoint_every == 0:
                checkpoint(held.save(state))
        state = held.save(state)
        if checkpoint is not None:
            checkpoint(state)
    return FitResult(state.history, state.step, state.skipped, interrupted, state)


class _Adam:
    """Adam, one fused kernel for all parameters: `torch.optim.Adam.step` spends twenty times as long on small models."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self.parameters: list[Tensor] = [p for p in parameters if p.requires_grad]
        self._memory = [p.detach() for p in self.parameters]  # the same numbers, without autograd's interest in them
        self.lr = lr
        self.slots: dict[str, list[Tensor]] = {
            "exp_avg": [torch.zeros_like(p) for p in self._memory],
            "exp_avg_sq": [torch.zeros_like(p) for p in self._memory],
            "step": [torch.zeros((), dtype=torch.float32, device=p.device) for p in self.parameters[:1]] * len(self.parameters),
        }

    def step(self, gradients: list[Tensor], lr: float | None = None) -> None:
        if not self.parameters:
            return
        steps = self.slots["step"]  # one tensor, counted once
        steps[0] += 1
        torch._fused_adam_(
            self._memory,
            gradients,
            self.slots["exp_avg"],
            self.slots["exp_avg_sq"],
            [],
            steps,
            lr=self.lr if lr is None else lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


# --- Data ---------------------------------------------------------------------------------------------------------


class _TensorBatches:
    """Batch `step` of an endless concatenation of shuffled passes: all batches are full, all examples are used alike."""

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, seed: int) -> None:
        self.x, self.y, self.seed = x, y, seed
        self.num_data = len(x)
        self.batch_size = min(batch_size, self.num_data)
        self.steps_per_epoch = self.num_data / self.batch_size
        self._orders: dict[int, Tensor] = {}

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            self._orders = {k: order for k, order in self._orders.items() if k == epoch - 1}
            order = torch.randperm(self.num_data, generator=generator_for(self.seed, "order", epoch))
            self._orders[epoch] = order.to(self.x.device)
        return self._orders[epoch]

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        epoch, offset = divmod(step * self.batch_size, self.num_data)
        index = self._order(epoch)[offset : offset + self.batch_size]
        if len(index) < self.batch_size:
            index = torch.cat([index, self._order(epoch + 1)[: self.batch_size - len(index)]])
        return self.x.index_select(0, index), self.y.index_select(0, index)


class _LoaderBatches:
    """A DataLoader's own batches, pass after pass, in its own order."""

    def __init__(self, loader: DataLoader[Any], num_data: int, check: Callable[[Any, Any], tuple[Tensor, Tensor]]) -> None:
        self.loader, self.check = loader, check
        self.num_data = num_data
        self.steps_per_epoch = float(len(loader))
        self._iterator = iter(loader)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        try:
            x, y = next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            x, y = next(self._iterator)
        return self.check(x, y)


def as_tensors(model: BayesianModel, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Data in the model's dtype and device, refused when of the wrong shape, not finite or out of range.

    >>> from advbayes import BayesianModel, Categorical
    >>> x, y = as_tensors(BayesianModel(nn.Linear(2, 2), Categorical()), np.zeros((3, 2)), np.array([0, 1, 1]))
    >>> x.dtype, y.dtype
    (torch.float32, torch.int64)
    """
    if isinstance(x, np.ndarray):  # arrays follow the model; tensors must agree with it
        x = torch.tensor(x, device=model.device, dtype=model.dtype)
    if isinstance(y, np.ndarray):
        y = torch.tensor(y, device=model.device)
        y = y.to(model.dtype) if y.is_floating_point() else y
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor or an array, got {checks.describe(value)}")
    if not len(x):
        raise ValueError(f"x must hold at least one example, got {checks.describe(x)}")
    model._check_input(x)
    if y.ndim == 0 or len(y) != len(x):
        raise ValueError(f"y must hold one target for each of the {len(x)} examples of x, got {checks.describe(y)}")
    if y.device != x.device:
        raise TypeError(f"y must be on {x.device} as x, got {checks.describe(y)}")
    checks.finite("x", x)
    checks.finite("y", y)
    try:
        with torch.no_grad():
            probe, _ = model.output(model.initial_theta(), x[:1])
    except (RuntimeError, ValueError, IndexError) as error:
        raise ValueError(f"x must have the shape that net takes, got {checks.describe(x)}: {error}") from error
    if probe.ndim != 2 or len(probe) != 1:
        raise ValueError(f"net must give one output row for each input, got {checks.describe(probe)} for one input")
    return x, model.likelihood.check_target(probe.expand(len(y), -1), y)


def _batches(
    model: BayesianModel, posterior: _Posterior, channel: Channel, data: Data, batch_size: int, seed: int
) -> _TensorBatches | _LoaderBatches:
    """Everything that can be refused before training starts is refused here."""
    if not isinstance(model, BayesianModel):
        raise TypeError(f"model must be a BayesianModel, got {checks.describe(model)}")
    if isinstance(posterior, Samples) or not isinstance(posterior, _Posterior):
        raise TypeError(f"posterior must be trainable (MeanField, LowRank, ...), got {checks.describe(posterior)}")
    if posterior.num_params != model.num_params:
        raise ValueError(f"posterior must be over the model's {model.num_params} parameters, got one over {posterior.num_params}")
    for parameter in posterior.parameters():
        if parameter.dtype != model.dtype or parameter.device != model.device:
            raise TypeError(f"posterior must be {model.dtype} on {model.device} as the net, got {checks.describe(parameter)}")
    if not isinstance(channel, Channel):
        raise TypeError(f"channel must have sample and density, got {checks.describe(channel)}")
    checks.count("seed", seed, low=0)
    if isinstance(data, DataLoader):
        num_data = len(data.dataset)  # type: ignore[arg-type]
        if num_data == 0 or len(data) == 0:
            raise ValueError("data must hold at least one example, got an empty DataLoader")

        def check(x: Any, y: Any) -> tuple[Tensor, Tensor]:
            x, y = as_tensors(model, x.to(model.device), y.to(model.device))
            _check_channel(channel, x)
            return x, y

        return _LoaderBatches(data, num_data, check)
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise TypeError(f"data must be a pair (x, y) or a DataLoader, got {checks.describe(data)}")
    x, y = as_tensors(model, *data)
    _check_channel(channel, x)
    return _TensorBatches(x, y, checks.count("batch_size", batch_size), seed)


def _check_channel(channel: Channel, x: Tensor) -> None:
    """The balls of a channel must fit the data."""
    if isinstance(channel, Mixture):
        for part in channel.channels:
            _check_channel(part, x)
    elif isinstance(channel, AttackChannel):
        ball = getattr(channel.attack, "ball", None)
        if isinstance(ball, Ball):
            ball.check(x)
    elif isinstance(channel, Learned):
        channel.ball.check(x)


def _objective(objective: ChannelELBO | None, num_data: int) -> ChannelELBO:
    if objective is None:
        return ChannelELBO(num_data)
    if not isinstance(objective, ChannelELBO):
        raise TypeError(f"objective must be a ChannelELBO, got {checks.describe(objective)}")
    if objective.num_data != num_data:
        raise ValueError(f"objective.num_data must be the size of the data, {num_data}, got {objective.num_data}")
    return objective


def _total_steps(epochs: float | None, steps: int | None, batches: _TensorBatches | _LoaderBatches) -> int:
    if (epochs is None) == (steps is None):
        raise ValueError(f"exactly one of epochs and steps must be given, got epochs={epochs} and steps={steps}")
    if steps is not None:
        return checks.count("steps", steps)
    assert epochs is not None
    checks.number("epochs", epochs, low=0, open_low=True)
    return max(1, math.ceil(round(epochs * batches.steps_per_epoch, 9)))


# --- The adversary of a learned channel -----------------------------------------------------------------------------


class _Adversary:
    """Trains one learned channel to make the model's likelihood small: maximise -log p(y | x', theta) + bonus."""

    def __init__(self, channel: Learned, lr: float) -> None:
        self.channel = channel
        self.adam = _Adam(channel.generator.parameters(), lr)

    def step(self, model: BayesianModel, posterior: _Posterior, x: Tensor, y: Tensor, generator: torch.Generator) -> None:
        theta = posterior.sample(1, generator=generator)[0]
        centre, std = self.channel.moments(model.at(theta), x, y)
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        gain = -model.log_likelihood(theta, centre + std * noise, y).mean()
        gain = gain + self.channel.entropy_bonus * std.log().mean()
        gradients = list(torch.autograd.grad(-gain, self.adam.parameters, allow_unused=True, materialize_grads=True))
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            self.adam.step(gradients)


# --- State ------------------------------------------------------------------------------------------------------------


class _Held:
    """Copies between the live objects (posterior, optimisers, adversaries) and a State's named tensors."""

    def __init__(self, posterior: _Posterior, adam: _Adam, adversaries: list[_Adversary]) -> None:
        self.modules: dict[str, nn.Module] = {"posterior": posterior}
        self.optimisers = {"posterior": adam}
        for k, adversary in enumerate(adversaries):
            self.modules[f"adversary{k}"] = adversary.channel.generator
            self.optimisers[f"adversary{k}"] = adversary.adam

    def save(self, state: State) -> State:
        """A copy that later steps do not change."""
        tensors: dict[str, Tensor] = {}
        for owner, module in self.modules.items():
            for name, tensor in module.state_dict().items():
                tensors[f"{owner}/{name}"] = tensor.detach().clone()
        for owner, optimiser in self.optimisers.items():
            for name, slots in optimiser.slots.items():
                for index, tensor in enumerate(slots):
                    tensors[f"{owner}/adam/{index}/{name}"] = tensor.clone()
        return State(state.step, state.skipped, tensors, {name: list(column) for name, column in state.history.items()})

    def restore(self, state: State) -> State:
        if not state.tensors and state.step == 0:
            return state
        for owner, module in self.modules.items():
            names = module.state_dict()
            missing = [name for name in names if f"{owner}/{name}" not in state.tensors]
            if missing:
                raise ValueError(f"state must hold the tensors of {owner}, got none for {missing}")
            for name, tensor in names.items():
                if state.tensors[f"{owner}/{name}"].shape != tensor.shape:
                    came = checks.describe(state.tensors[f"{owner}/{name}"])
                    raise ValueError(f"state must hold {owner}/{name} of shape {tuple(tensor.shape)}, got {came}")
            module.load_state_dict({name: state.tensors[f"{owner}/{name}"] for name in names})
        for owner, optimiser in self.optimisers.items():
            for name, tensors in optimiser.slots.items():
                for index, tensor in enumerate(tensors):
                    key = f"{owner}/adam/{index}/{name}"
                    if key not in state.tensors:
                        raise ValueError(f"state must hold the optimiser's tensor {key!r}, got none")
                    tensor.copy_(state.tensors[key])
        history = {name: list(state.history[name]) for name in COLUMNS}
        return State(state.step, state.skipped, dict(state.tensors), history)


# --- What went wrong ---------------------------------------------------------------------------------------------------


def _cause(
    model: BayesianModel,
    posterior: _Posterior,
    channel: Channel,
    objective: ChannelELBO,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    step: int,
) -> str:
    """Where the first NaN or infinity stands on the way from data to gradient, the step's draws made anew."""
    with torch.no_grad():
        thetas = posterior.at(posterior.noise(objective.num_theta, generator=generator))
        x_adv = objective.corrupt(model, thetas, channel, x, y, generator=generator).detach()
        scores = objective._score(model, thetas, x_adv, y)
    suspects = (
        ("the data (x)", x),
        ("the data (y)", y),
        ("the posterior's draws (its scale or the learning rate is too large)", thetas),
        ("the channel (its samples x')", x_adv),
        ("the likelihood (log p(y | x', theta))", scores),
    )
    cause = next(
        (name for name, value in suspects if value.is_floating_point() and not bool(torch.isfinite(value).all())),
        "the gradient (the likelihood is finite; lower the learning rate)",
    )
    return (
        f"{MAX_SKIPPED_IN_A_ROW} steps in a row gave a bound or gradient that is not finite, up to step {step + 1}; the cause is "
        f"{cause}. The posterior is left at its last finite state"
    )


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag that the loop reads between steps; a second Ctrl-C interrupts at once."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not (
        signal.default_int_handler
    ):
        yield lambda: False
        return

    def note(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)

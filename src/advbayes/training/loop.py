"""`fit`: one loop for every defense (section 3.3, SM-5).

Randomness is keyed by (seed, purpose, step) and the batches by (seed, epoch), so a run resumed
from a `State` draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from advbayes import checks, distributed
from advbayes.attacks.gradients import refuse_inference_mode
from advbayes.channels import Learned, learned_in
from advbayes.channels.noise import noise_like
from advbayes.distributed import Ranks
from advbayes.model import BayesianModel
from advbayes.objectives import ChannelELBO
from advbayes.posteriors import Posterior, Samples, check_over
from advbayes.progress import Progress
from advbayes.seeds import for_thetas, seed_for
from advbayes.training.batches import Batch, Batches, Data, batches_of
from advbayes.training.steps import Taken, adam_for, descend, step_maker
from advbayes.types import Channel

COLUMNS = ("bound", "log_likelihood", "kl", "penalty", "gradient_norm", "seconds")
MAX_SKIPPED_IN_A_ROW = 10
WARMUP_KL = 0.03  # of the KL term's weight, while warming up


class SkippedStepWarning(RuntimeWarning):
    """A step of training met NaN or infinity and was not taken; `FitResult.skipped` counts all of
    them."""


class NonFiniteError(checks.AdvBayesError, FloatingPointError):
    """Training met NaN or infinity ten steps running; the posterior is at its last finite state."""


@dataclass
class State:
    """All that the next step needs: tensors by name (posterior, optimisers, adversaries), the step
    and the history."""

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
        return (
            f"FitResult(steps={self.steps}, skipped={self.skipped}, "
            f"interrupted={self.interrupted}{last})"
        )


@torch.enable_grad()  # training needs gradients, whatever the caller's mode
def fit(
    model: BayesianModel,
    posterior: Posterior,
    channel: Channel,
    data: Data,
    *,
    objective: ChannelELBO | None = None,
    sample_weight: Any = None,  # (N,), how often each example counts; absent: once
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int = 128,
    lr: float = 1e-3,
    decay: float = 1.0,
    warmup: float = 0.0,
    adversary_lr: float = 1e-3,
    seed: int = 0,
    progress: bool | None = None,
    compile: bool = False,
    own_thetas: bool = False,
    state: State | None = None,
    checkpoint: Callable[[State], None] | None = None,
    checkpoint_every: int | None = None,
    stop: Callable[[], bool] | None = None,
) -> FitResult:
    """Train the posterior through the channel: maximise the objective by Adam, in place.

    - `decay`: the learning rate falls by this factor over each pass through the data.
    - `warmup`: for this share of the steps (0 to 1) the KL term has only `WARMUP_KL` of its weight
      in the gradient, so that a net learns what it can before the prior switches off units that
      explain nothing yet. The bound in the history is always the whole one.
    - `checkpoint(state)` is called every `checkpoint_every` steps and at the end. A saved state
      given as `state` continues from there, bit for bit (a DataLoader starts a new pass).
    - `stop()` returning true, or Ctrl-C, finishes the step and returns what is trained, with
      `interrupted=True`.
    - `compile=True` compiles the step at its first batch (ten to sixty seconds, less when cached):
      two to five times faster on small nets, the same draws, results equal up to rounding.
    - `progress=None` shows a bar on a terminal alone.

    Learned channels take a step of their own (against the model) before each step of the posterior.
    A step whose gradient is not finite is skipped and counted, the first with a warning; ten in a
    row raise `NonFiniteError`. A DataLoader without a generator takes its order from `seed`; N is
    the number of examples that one pass of it yields. The global generator is left as it was.

    Under a process group (torchrun) all ranks call `fit` with the same arguments. Each takes its
    rows of every batch, gradients are averaged in one exchange, and all end with the same
    posterior, that of one process up to rounding: thetas and the channel's draws are those of one
    process. `own_thetas=True` draws thetas for each rank instead, which has less variance. The
    first rank alone shows progress and calls `checkpoint`; its `state` is where all begin.

    >>> from advbayes import BayesianModel, Categorical, MeanField, Noise
    >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    >>> model = BayesianModel(nn.Linear(2, 2), Categorical())
    >>> fit(
    ...     model, MeanField(model), Noise(0.1), (x, (x[:, 0] > 0).long()), epochs=2, batch_size=32
    ... ).steps
    4
    """
    refuse_inference_mode()
    _check_parts(model, posterior, channel, objective)
    checks.count("seed", seed, low=0)
    told = None if objective is None else objective.num_data
    batches = batches_of(model, channel, data, batch_size, seed, told, sample_weight)
    if compile and sample_weight is not None:
        raise checks.InputError("compile must be False with sample_weight, got True")
    objective = objective or ChannelELBO(batches.num_data)
    if objective.num_data != batches.num_data:
        raise checks.InputError(
            f"objective.num_data must be the number of examples in one pass over the data, "
            f"{batches.num_data}, got {objective.num_data}"
        )
    total = _total_steps(epochs, steps, batches)
    checks.number("lr", lr, low=0, open_low=True)
    checks.number("decay", decay, low=0, high=1, open_low=True)
    num_warm = round(checks.number("warmup", warmup, low=0, high=1) * total)
    checks.number("adversary_lr", adversary_lr, low=0, open_low=True)
    if checkpoint_every is not None:
        checks.count("checkpoint_every", checkpoint_every)

    ranks = distributed.ranks()
    checkpoint = checkpoint if ranks.is_first else None
    ranks.agree(num_data=batches.num_data, num_params=model.num_params, steps=total, seed=seed)
    optimiser = adam_for(posterior, lr)
    adversaries = [_Adversary(learned, adversary_lr, ranks) for learned in learned_in(channel)]
    kept = _Held(posterior, optimiser, adversaries)
    state = kept.begin(State() if state is None else kept.restore(state), ranks)
    take_step = step_maker(compile, ranks)(model, posterior, channel, objective, optimiser)
    skipped_in_a_row = 0
    has_warned = interrupted = False
    asked = distributed.ALONE.asked(False)  # several ranks hear of a stop one step later
    origin = time.perf_counter() - (state.history["seconds"] or [0.0])[-1]
    columns = [state.history[name] for name in COLUMNS]

    with (
        _deferred_interrupt() as interrupt,
        Progress("fit", total, ranks.shown(progress), start=state.step) as bar,
    ):
        for step in range(state.step, total):
            whole = batches(step)
            batch = whole.part(*ranks.share(whole.num))

            def keyed(purpose: str, num: int = whole.num, step: int = step) -> torch.Generator:
                return ranks.generator(seed_for(seed, purpose, step), num, model.device, own_thetas)

            for adversary in adversaries:
                adversary.step(model, posterior, objective, batch, keyed("adversary"))
            rate = lr * decay ** (step / batches.steps_per_epoch)
            spared = (1 - WARMUP_KL) * objective.kl_weight if step < num_warm else 0.0
            taken = Taken(*take_step(batch, keyed("step"), rate, spared))
            if taken.is_finite():
                skipped_in_a_row = 0
            else:
                state.skipped += 1
                skipped_in_a_row += 1
                if not has_warned:
                    has_warned = True
                    warnings.warn(
                        f"step {step + 1} was skipped: its bound is {taken.bound:g} and the norm "
                        f"of its gradient {taken.norm:g}. FitResult.skipped counts such steps",
                        SkippedStepWarning,
                        stacklevel=3,
                    )
            for column, value in zip(columns, (*taken, time.perf_counter() - origin), strict=True):
                column.append(value)
            state.step = step + 1
            bar.advance("bound", taken.bound)
            if skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                raise NonFiniteError(
                    _cause(model, posterior, channel, objective, batch, keyed("step"), step)
                )
            answer, asked = asked, ranks.asked(interrupt() or (stop is not None and stop()))
            if (asked if ranks.size == 1 else answer)():
                interrupted = state.step < total
                break
            if checkpoint and checkpoint_every and state.step % checkpoint_every == 0:
                checkpoint(kept.save(state))
        asked()  # no exchange is left open
        state = kept.save(state)
        if checkpoint:
            checkpoint(state)
    return FitResult(state.history, state.step, state.skipped, interrupted, state)


def _check_parts(
    model: BayesianModel, posterior: Posterior, channel: Channel, objective: ChannelELBO | None
) -> None:
    checks.instance("model", model, BayesianModel, "a BayesianModel")
    if isinstance(posterior, Samples) or not isinstance(posterior, Posterior):
        raise checks.InputTypeError(
            "posterior must be trainable (MeanField, LowRank, ...)", got=posterior
        )
    check_over(model, posterior)
    if not any(parameter.requires_grad for parameter in posterior.parameters()):
        raise checks.InputError(
            f"posterior must have a trainable parameter, got none in {posterior}"
        )
    for parameter in posterior.parameters():
        if parameter.dtype != model.dtype or parameter.device != model.device:
            raise checks.InputTypeError(
                f"posterior must be {model.dtype} on {model.device} as the net", got=parameter
            )
    if isinstance(channel, type) or not isinstance(channel, Channel):
        raise checks.InputTypeError("channel must have sample and density", got=channel)
    if objective is not None:
        checks.instance("objective", objective, ChannelELBO, "a ChannelELBO")


def _total_steps(epochs: float | None, steps: int | None, batches: Batches) -> int:
    if (epochs is None) == (steps is None):
        raise checks.InputError(
            f"exactly one of epochs and steps must be given, got epochs={epochs} and steps={steps}"
        )
    if steps is not None:
        return checks.count("steps", steps)
    assert epochs is not None
    checks.number("epochs", epochs, low=0, open_low=True)
    return max(1, math.ceil(round(epochs * batches.steps_per_epoch, 9)))


# --- The adversary of a learned channel ---------------------------------------------------------


class _Adversary:
    """Trains one learned channel to make the model's likelihood small: maximise -log p(y | x',
    theta) + bonus."""

    def __init__(self, channel: Learned, lr: float, ranks: Ranks) -> None:
        self.channel, self.lr, self.ranks = channel, lr, ranks
        self.adam = adam_for(channel.generator, lr)
        self.parameters = [p for p in channel.generator.parameters() if p.requires_grad]

    def step(
        self,
        model: BayesianModel,
        posterior: Posterior,
        objective: ChannelELBO,
        batch: Batch,
        generator: torch.Generator,
    ) -> None:
        x, y, _, weight, share = batch.gathered()
        weight = objective._weigh(x, y, weight)
        theta = posterior.sample(1, generator=for_thetas(generator))[0]
        centre, std = self.channel.moments(model.at(theta), x, y)
        gain = -model.log_likelihood(theta, centre + std * noise_like(x, generator), y)
        gain = gain + self.channel.entropy_bonus * std.log().flatten(1).mean(1)
        gain = gain if weight is None else gain * weight
        of_share = torch.autograd.grad(-gain.mean(), self.parameters, materialize_grads=True)
        gradients = self.ranks.mean(of_share, share)
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            descend(self.adam, self.parameters, gradients, self.lr)


# --- State --------------------------------------------------------------------------------------


class _Held:
    """Copies between the live objects (posterior, optimisers, adversaries) and a State's named
    tensors."""

    def __init__(
        self, posterior: Posterior, adam: torch.optim.Adam, adversaries: list[_Adversary]
    ) -> None:
        self.modules: dict[str, nn.Module] = {"posterior": posterior}
        self.optimisers = {"posterior": adam}
        for k, adversary in enumerate(adversaries):
            self.modules[f"adversary{k}"] = adversary.channel.generator
            self.optimisers[f"adversary{k}"] = adversary.adam

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All of them by name, an optimiser's by its parameter's place and what it holds."""
        for owner, module in self.modules.items():
            for name, tensor in module.state_dict().items():
                yield f"{owner}/{name}", tensor
        for owner, optimiser in self.optimisers.items():
            for index, parameter in enumerate(optimiser.param_groups[0]["params"]):
                for name, tensor in optimiser.state[parameter].items():
                    yield f"{owner}/adam/{index}/{name}", tensor

    def save(self, state: State) -> State:
        """A copy that later steps do not change."""
        tensors = {name: tensor.detach().clone() for name, tensor in self._tensors()}
        history = {name: list(column) for name, column in state.history.items()}
        return State(state.step, state.skipped, tensors, history)

    def begin(self, state: State, ranks: Ranks) -> State:
        """From where the first rank is, on all ranks."""
        if ranks.size == 1:
            return state

        def told() -> dict[str, Tensor]:
            columns = torch.tensor([state.history[name] for name in COLUMNS], dtype=torch.float64)
            place = torch.tensor([state.step, state.skipped])
            return {**self.save(state).tensors, "": place, "history": columns}

        tensors = dict(ranks.on_first(told))
        step, skipped = tensors.pop("").tolist()
        history = dict(zip(COLUMNS, tensors.pop("history").tolist(), strict=True))
        return self.restore(State(step, skipped, tensors, history))

    def restore(self, state: State) -> State:
        """Go back to the state; what the loop goes on with is a copy of it."""
        if not state.tensors and state.step == 0:
            return State()
        for name, tensor in self._tensors():
            saved = state.tensors.get(name)
            if saved is None or saved.shape != tensor.shape:
                raise checks.InputError(
                    f"state must hold {name} of shape {tuple(tensor.shape)}", got=saved
                )
        for name, tensor in self._tensors():
            tensor.copy_(state.tensors[name])
        history = {name: list(state.history[name]) for name in COLUMNS}
        return State(state.step, state.skipped, dict(state.tensors), history)


# --- What went wrong ----------------------------------------------------------------------------


def _cause(
    model: BayesianModel,
    posterior: Posterior,
    channel: Channel,
    objective: ChannelELBO,
    batch: Batch,
    generator: torch.Generator,
    step: int,
) -> str:
    """Where the first NaN or infinity stands on the way from data to gradient, the step's draws
    made anew."""
    x, y, *_ = batch.gathered()
    with torch.no_grad():
        thetas = posterior.at(posterior.noise(objective.num_theta, generator=for_thetas(generator)))
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
        (
            name
            for name, value in suspects
            if value.is_floating_point() and not bool(torch.isfinite(value).all())
        ),
        "the gradient (the likelihood is finite; lower the learning rate)",
    )
    return (
        f"{MAX_SKIPPED_IN_A_ROW} steps in a row gave a bound or gradient that is not finite, up to "
        f"step {step + 1}; the cause is {cause}. The posterior is left at its last finite state"
    )


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag that the loop reads between steps; a second Ctrl-C interrupts at once."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(
        signal.SIGINT
    ) is not (signal.default_int_handler):
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

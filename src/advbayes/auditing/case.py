"""The case under audit: what is evaluated, by which attacks, what was claimed. Figures that several
checks need are made once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import checks
from advbayes.attacks import applies_to, with_ball
from advbayes.attacks.balls import Ball, per_row
from advbayes.attacks.parts import on_rows, settings, steps_of
from advbayes.auditing.claim import Claim, ThreatModel
from advbayes.auditing.copies import Copies, Forgetful
from advbayes.auditing.support import Support
from advbayes.distributed import ranks
from advbayes.evaluation.inputs import Task, is_stochastic
from advbayes.evaluation.measuring import attacked_in_batches, batches, scored, with_generator
from advbayes.evaluation.scoring import Columns, joined, worst
from advbayes.predictive import Certificates
from advbayes.purification import Purifier
from advbayes.seeds import GlobalStream
from advbayes.types import Attack, Predictor

T = TypeVar("T")
POINT = 0.005  # half a point of accuracy, the resolution of most rules


@dataclass(frozen=True)
class Budget:
    """How much a tier spends: examples, steps, restarts, points, queries; the ids it leaves out."""

    num: int
    steps: int
    restarts: int
    random_points: int
    queries: int = 5000
    # of Square where there is no gradient at all; absent: `queries`
    blind_queries: int | None = None
    max_steps: int = 1600
    max_restarts: int = 8  # times those of the audit's own attacks
    max_thetas: int = 160
    certified_again: int = 32  # examples
    batch_size: int = 256
    left_out: tuple[str, ...] = ()


TIERS = {
    "quick": Budget(
        num=64,
        steps=20,
        restarts=1,
        random_points=20,
        blind_queries=500,
        left_out=("E6", "E7", "E10", "E11"),
    ),
    "standard": Budget(num=256, steps=50, restarts=1, random_points=100),
    "full": Budget(num=1000, steps=100, restarts=2, random_points=1000),
}


@dataclass(frozen=True)
class Frozen:
    """A stochastic predictor with its randomness fixed: every call draws the same."""

    predict: Predictor
    seed: int

    def __call__(self, x: Tensor) -> Distribution:
        with GlobalStream(self.seed):
            return with_generator(self.predict, torch.Generator(x.device).manual_seed(self.seed))(x)


@dataclass(eq=False)
class Case:
    """Everything a check may ask for."""

    predict: Predictor
    x: Tensor  # (N, *event), the examples audited
    y: Tensor
    whole: tuple[Tensor, Tensor]  # the data they were drawn from
    ball: Ball
    task: Task
    budget: Budget
    attacks: dict[str, Attack]
    threat_model: ThreatModel
    stochastic: bool
    own_attacks: bool  # the audit chose them
    black_box: bool  # no gradient to be had at all: attacks that ask for answers alone
    copies: Copies
    in_turn: tuple[Tensor, Tensor]  # see `asked_in_turn`
    at_first: Distribution  # the answers at the first examples, before anything else was done
    held: Tensor  # (N,) bool: the examples that the predictor carried with it then
    support: Support = field(default_factory=Support)
    claim: Claim | None = None
    certified: Certificates | Tensor | None = None
    seed: int = 0
    rescored: int = 10
    memory: dict[Any, Any] = field(default_factory=dict)

    # --- doing things once -----------------------------------------------------------------------

    def once(self, key: str, make: Callable[[], T]) -> T:
        """The value of `make()`, computed at the first asking."""
        if key not in self.memory:
            self.memory[key] = make()
        return cast(T, self.memory[key])

    def attacked(
        self,
        attack: Attack,
        purpose: str,
        *,
        through: Predictor | None = None,
        rows: Tensor | None = None,
        centre: Tensor | None = None,
    ) -> Tensor:
        """x (or another centre; some rows, or all) after the attack, in batches."""
        x, y = self.x if centre is None else centre, self.y
        if rows is not None:
            x, y, attack = x[rows], y[rows], on_rows(attack, rows)
        predict = self.target if through is None else through
        key: Any = {"seed": self.seed, "key": f"audit/{purpose}"}
        size = self.budget.batch_size
        parts = list(attacked_in_batches(predict, attack, x, y, batch_size=size, **key))
        return torch.cat(parts) if parts else x.clone()

    def scored(
        self,
        x_adv: Tensor,
        purpose: str = "score",
        *,
        by: Predictor | None = None,
        rows: Tensor | None = None,
    ) -> Columns:
        """The scores of points; a stochastic predictor is asked `rescored` times, in two halves
        (see `worst`)."""
        y = self.y if rows is None else self.y[rows]
        predict = self.predict if by is None else by
        options: Any = {
            "seed": self.seed,
            "key": f"audit/{purpose}",
            "repeats": self.rescored if self.stochastic and by is None else 1,
            "what": f"the scores ({purpose})",
        }
        parts = ranks().mapped(
            lambda part: scored(
                predict, x_adv[part], y[part], self.task, start=part.start, **options
            ),
            batches(len(x_adv), self.budget.batch_size),
        )
        return joined(list(parts), self.task)

    @torch.no_grad()
    def classes_of(self, x: Tensor) -> Tensor:
        """The class answered at each row of x, the same at every asking wherever randomness can be
        fixed."""
        fixed = self.calm().predict
        parts = [
            fixed(x[part]).logits.argmax(-1)  # type: ignore[attr-defined]
            for part in batches(len(x), self.budget.batch_size)
        ]
        return torch.cat(parts)

    def attacks_on(self, predict: Predictor, ball: Ball | None = None) -> dict[str, Attack]:
        """The attacks under audit that are made for a predictor (a purifier's own do not run on its
        controls), in their own ball or another."""
        attacks = self.attacks.items()
        fit = {name: attack for name, attack in attacks if applies_to(attack, predict)}
        return fit if ball is None else {name: with_ball(fit[name], ball) for name in fit}

    @property
    def target(self) -> Predictor:
        """What the attacks under audit go through: the predictor itself, or whatever a claim's
        attacks went through."""
        through = None if self.claim is None else self.claim.through
        return self.predict if through is None else through

    def calm(self) -> Case:
        """The same case with the predictor's randomness fixed: for checks of the attack, which
        noise would only blur. Where no seed reaches it, every question goes to a copy, which draws
        what the one before drew."""
        if not self.stochastic:
            return self
        fixed: Predictor = Frozen(self.predict, self.seed)
        make = self.copies.make
        if not self.can_be_fixed and make is not None:
            fixed = Forgetful(lambda: Frozen(make(), self.seed))
        calm = dataclasses.replace(self, predict=fixed, stochastic=False, memory={})
        return self.once("calm", lambda: calm)

    @property
    def can_be_fixed(self) -> bool:
        """Whether a seed decides what the predictor draws, if anything: not where it draws from a
        source of its own."""
        fixed = Frozen(self.predict, self.seed)
        steady = not self.stochastic
        return steady or self.once("can be fixed", lambda: not is_stochastic(fixed, self.x))

    # --- shared figures --------------------------------------------------------------------------

    @property
    def clean(self) -> Columns:
        """The scores of x itself."""
        return self.once("clean", lambda: self.scored(self.x, "clean"))

    def arrays(self) -> dict[str, Tensor]:
        """The adversarial arrays of every attack: those claimed, or else made here."""
        if self.claim is not None:
            return dict(self.claim.x_adv)
        return self.once(
            "arrays",
            lambda: {
                name: self.attacked(attack, f"attack {name}")
                for name, attack in self.attacks.items()
            },
        )

    def columns(self) -> dict[str, Columns]:
        """The scores of every attack's array, made here."""
        return self.once(
            "columns",
            lambda: {
                name: self.scored(self.usable(x_adv), f"attack {name}")
                for name, x_adv in self.arrays().items()
            },
        )

    def usable(self, x_adv: Tensor) -> Tensor:
        """The points, x in place of those that are not finite: they have no score, and E1 fails."""
        finite = torch.isfinite(x_adv).flatten(1).all(1)
        return torch.where(per_row(finite, x_adv), x_adv, self.x)

    def gradient(self) -> Columns:
        """The union of clean and the attacks under audit."""
        return self.once(
            "gradient", lambda: worst([self.clean, *self.columns().values()], self.task)
        )

    def join(self, name: str, columns: Columns, rows: Tensor | None = None) -> None:
        """Let another attack's results (on some rows, or all) into `worst`."""
        full = columns if rows is None else overwritten(self.clean, columns, rows)
        self.memory.setdefault("joined", {})[name] = full

    def union(
        self,
        attacks: dict[str, Attack],
        purpose: str,
        *,
        by: Predictor | None = None,
        join: bool = False,
        **where: Any,
    ) -> Columns:
        """The scores of the worst of several attacks; `where` as in `attacked`. `join` lets them
        into `worst`."""
        rows = where.get("rows")
        parts = []
        for name, attack in attacks.items():
            made = self.attacked(attack, f"{purpose} {name}", **where)
            parts.append(self.scored(made, f"{purpose} {name}", by=by, rows=rows))
            if join:
                self.join(f"{purpose} {name}", parts[-1], rows)
        return worst(parts, self.task)

    def worst(self) -> Columns:
        """The union of everything that was tried so far; where noise in it leaves more than one
        attack alone, that attack."""
        tried = [self.clean, *self.columns().values(), *self.memory.get("joined", {}).values()]
        return min((worst(tried, self.task), *tried), key=self.value)

    def unbroken(self, columns: Columns) -> Tensor:
        """The rows that are still answered right (in regression: all)."""
        if self.task == "regression":
            return torch.arange(len(self.x))
        return (columns["correct"] >= 0.5).nonzero().squeeze(1)

    def value(self, columns: Columns) -> float:
        """Accuracy; in regression minus the RMSE in standard deviations of y, so that larger is
        better in both."""
        if self.task == "classification":
            return float(columns["correct"].mean())
        return -float(columns["squared_error"].mean().sqrt()) / self.spread

    @property
    def label(self) -> str:
        """What `value` is."""
        return "accuracy" if self.task == "classification" else "-RMSE/sd(y)"

    @property
    def spread(self) -> float:
        """sd(y), or 1 where y does not vary."""
        y = self.y.double()
        return float(((y - y.mean(0)) ** 2).mean().sqrt()) or 1.0

    @property
    def num_thetas(self) -> int | None:
        """How many thetas the predictor averages over, where it has any."""
        return num_thetas(self.predict)

    @property
    def is_bayesian(self) -> bool:
        """Whether there are thetas to know."""
        return self.num_thetas is not None or self.support.fresh is not None

    @property
    def has_randomness(self) -> bool:
        """Whether there are thetas or draws to know."""
        return self.is_bayesian or self.stochastic

    @property
    def passes(self) -> float:
        """The gradient passes of all attacks, once each."""
        return float(sum(steps_of(attack) or 1 for attack in self.attacks.values()))

    @property
    def sources(self) -> int:
        """How many models there are to transfer from, a control that is to be trained included."""
        support = self.support
        return len(support.siblings) + (support.undefended is not None or bool(support.to_train))

    @property
    def known(self) -> Tensor:  # (M, *event)
        """The inputs of the training, as x has them; none where they are not there, or are other
        things than x."""
        training = self.support.training
        inputs = None if training is None else training[0]
        if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "iuf":
            inputs = torch.as_tensor(checks.native(inputs))
        if not isinstance(inputs, Tensor) or inputs.shape[1:] != self.x.shape[1:]:
            return self.x[:0]
        return inputs.detach().to(self.x)

    @property
    def unpurified(self) -> Predictor | None:
        """The model behind a purifier, where it is known."""
        base: Predictor | None = getattr(self.predict, "base", None)
        return base if self.support.unpurified is None else self.support.unpurified

    @property
    def is_purifier(self) -> bool:
        """Whether the predictor purifies its input."""
        return isinstance(self.predict, Purifier) or self.support.unpurified is not None


def overwritten(columns: Columns, part: Columns, rows: Tensor) -> Columns:
    """The columns with those of `part` in some of their rows."""
    full = {name: values.clone() for name, values in columns.items()}
    for name, values in part.items():
        full[name][rows] = values
    return full


def layers_of(predict: Predictor | None) -> list[Any]:
    """The predictor and those within it: a purifier's base, the one that is smoothed or frozen."""
    layers: list[Any] = []
    inner: Any = predict
    while inner is not None:
        layers.append(inner)
        inner = getattr(inner, "base", None) or getattr(inner, "predict", None)
    return layers


def num_thetas(predict: Predictor | None) -> int | None:
    """How many different thetas a predictor averages over, where it has any."""
    for inner in layers_of(predict):
        match inner:
            case object(thetas=Tensor(ndim=2) as thetas):
                return len(thetas)
            case object(posterior=_, num=int() as num):
                return num
    return None


def num_different(predict: Predictor | None) -> int:
    """How many different thetas there are, of those that a predictor lists; 1 where it has none."""
    for inner in layers_of(predict):
        match inner:
            case object(thetas=Tensor() as thetas):
                return len(torch.unique(thetas, dim=0))
    return num_thetas(predict) or 1


def with_thetas(fresh: Any, num: int) -> Predictor | None:
    """The same fresh predictor drawing `num` thetas, or None where it cannot."""
    if "num" in settings(fresh):
        return cast(Predictor, dataclasses.replace(fresh, num=num))
    make = getattr(fresh, "with_thetas", None)
    return None if make is None else cast(Predictor, make(num))

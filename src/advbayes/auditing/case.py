"""The case under audit: what is evaluated, by which attacks, what was claimed. Figures that several checks need are made once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes.attacks import APGD, applies_to, lower_mean, margin, nll, raise_mean, squared_error
from advbayes.auditing.claim import Claim
from advbayes.auditing.findings import Finding, Status
from advbayes.auditing.threat import ThreatModel
from advbayes.balls import Ball
from advbayes.evaluation.attackers import with_generator
from advbayes.evaluation.inputs import Task
from advbayes.evaluation.result import Evaluation
from advbayes.evaluation.scoring import Columns, score, worst
from advbayes.purification import Purifier
from advbayes.seeds import generator_for, seed_for
from advbayes.types import Attack, Channel, Predictor

POINT = 0.005  # half a point of accuracy, the resolution of most rules


@dataclass(frozen=True)
class Budget:
    """How much a tier spends: examples, steps, restarts, random points; the ids it leaves out."""

    num: int
    steps: int
    restarts: int
    random_points: int
    queries: int = 5000
    max_steps: int = 1600
    max_thetas: int = 160
    left_out: tuple[str, ...] = ()


TIERS = {
    "quick": Budget(num=64, steps=20, restarts=1, random_points=20, left_out=("E6", "E7", "E10", "E11")),
    "standard": Budget(num=256, steps=50, restarts=1, random_points=100),
    "full": Budget(num=1000, steps=100, restarts=2, random_points=1000),
}


@dataclass(frozen=True)
class Frozen:
    """A stochastic predictor with its randomness fixed: every call draws the same."""

    predict: Predictor
    seed: int

    def __call__(self, x: Tensor) -> Distribution:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return with_generator(self.predict, torch.Generator(x.device).manual_seed(self.seed))(x)


@dataclass(eq=False)
class Case:
    """Everything a check may ask for."""

    predict: Predictor
    x: Tensor  # (N, *event), the examples audited
    y: Tensor
    ball: Ball
    task: Task
    budget: Budget
    attacks: dict[str, Attack]
    threat_model: ThreatModel
    stochastic: bool
    seed: int = 0
    batch_size: int = 256
    rescored: int = 10
    claim: Claim | None = None
    evaluation: Evaluation | None = None
    undefended: Predictor | None = None
    siblings: Mapping[str, Predictor] = field(default_factory=dict)
    control_ball: Ball | None = None
    baseline: Predictor | None = None
    published: tuple[float, float] | None = None  # clean and worst-case accuracy of a published recipe
    dataset: str = ""
    fresh: Any = None  # FreshPredictive
    unpurified: Predictor | None = None
    purifier_attacks: Mapping[str, Attack] = field(default_factory=dict)
    channel: Channel | None = None
    black_box: Attack | None = None
    detector: str | None = None
    num_seeds: int | None = None
    better: bool = False  # whether the row is claimed to be better than others
    train_y: Tensor | None = None
    radii: Tensor | None = None  # (N,) certified, in the ball's norm
    memory: dict[Any, Any] = field(default_factory=dict)

    # --- doing things once ---------------------------------------------------------------------------------------------

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value of `make()`, computed at the first asking."""
        if key not in self.memory:
            self.memory[key] = make()
        return self.memory[key]

    def keyed(self, predict: Predictor, purpose: str, step: int = 0) -> Predictor:
        """The predictor with its randomness keyed."""
        return with_generator(predict, generator_for(self.seed, f"audit/{purpose}", step))

    def attacked(self, attack: Attack, purpose: str, *, through: Predictor | None = None, rows: Tensor | None = None) -> Tensor:
        """x after the attack (some rows, or all), in batches."""
        x, y = (self.x, self.y) if rows is None else (self.x[rows], self.y[rows])
        predict = self.target if through is None else through
        parts = []
        for start in range(0, len(x), self.batch_size):
            part = slice(start, start + self.batch_size)
            with torch.random.fork_rng():
                torch.manual_seed(seed_for(self.seed, f"audit/{purpose}/global", start))
                keyed = self.keyed(predict, f"{purpose}/theta", start)
                generator = generator_for(self.seed, f"audit/{purpose}", start, x.device)
                parts.append(attack(keyed, x[part], y[part], generator=generator).detach())
        return torch.cat(parts) if parts else x.clone()

    def scored(
        self, x_adv: Tensor, purpose: str = "score", *, by: Predictor | None = None, rows: Tensor | None = None
    ) -> Columns:
        """The scores of points; a stochastic predictor is asked `rescored` times."""
        y = self.y if rows is None else self.y[rows]
        predict = self.predict if by is None else by
        parts: list[Columns] = []
        for start in range(0, len(x_adv), self.batch_size):
            part = slice(start, start + self.batch_size)
            with torch.random.fork_rng():
                torch.manual_seed(seed_for(self.seed, f"audit/{purpose}/score", start))
                keyed = self.keyed(predict, f"{purpose}/score", start)
                repeats = self.rescored if self.stochastic and by is None else 1
                parts.append(score(keyed, x_adv[part], y[part], self.task, repeats=repeats, what=f"the scores ({purpose})"))
        return {name: torch.cat([columns[name] for columns in parts]) for name in parts[0]} if parts else {}

    def attacks_on(self, predict: Predictor) -> dict[str, Attack]:
        """The attacks under audit that are made for a predictor: a purifier's own do not run on its controls."""
        return {name: attack for name, attack in self.attacks.items() if applies_to(attack, predict)}

    @property
    def target(self) -> Predictor:
        """What the attacks under audit go through: the predictor itself, or whatever a claim's attacks went through."""
        return self.predict if self.claim is None or self.claim.through is None else self.claim.through

    def calm(self) -> Case:
        """The same case with the predictor's randomness fixed: for checks of the attack, which noise would only blur."""
        if not self.stochastic:
            return self
        fixed = Frozen(self.predict, self.seed)
        return self.once("calm", lambda: dataclasses.replace(self, predict=fixed, stochastic=False, memory={}))  # type: ignore[no-any-return]

    # --- shared figures ------------------------------------------------------------------------------------------------

    @property
    def clean(self) -> Columns:
        """The scores of x itself."""
        return self.once("clean", lambda: self.scored(self.x, "clean"))  # type: ignore[no-any-return]

    def arrays(self) -> dict[str, Tensor]:
        """The adversarial arrays of every attack: those claimed, or else made here."""
        if self.claim is not None:
            return dict(self.claim.x_adv)
        return self.once(  # type: ignore[no-any-return]
            "arrays", lambda: {name: self.attacked(attack, f"attack {name}") for name, attack in self.attacks.items()}
        )

    def columns(self) -> dict[str, Columns]:
        """The scores of every attack's array, made here. A point that is not finite has none: E1 fails, x stands in for it."""

        def make() -> dict[str, Columns]:
            found = {}
            for name, x_adv in self.arrays().items():
                usable = torch.isfinite(x_adv).flatten(1).all(1).reshape(-1, *[1] * (x_adv.ndim - 1))
                found[name] = self.scored(torch.where(usable, x_adv, self.x), f"attack {name}")
            return found

        return self.once("columns", make)  # type: ignore[no-any-return]

    def gradient(self) -> Columns:
        """The union of clean and the attacks under audit."""
        return self.once("gradient", lambda: worst([self.clean, *self.columns().values()], self.task))  # type: ignore[no-any-return]

    def join(self, name: str, columns: Columns) -> None:
        """Let other attacks' results into `worst`."""
        self.memory.setdefault("joined", {})[name] = columns

    def worst(self) -> Columns:
        """The union of everything that was tried so far."""
        return worst([self.gradient(), *self.memory.get("joined", {}).values()], self.task)

    def standing(self) -> Tensor:
        """Indices of the examples that the attacks under audit did not break (in regression: all)."""
        if self.task == "regression":
            return torch.arange(len(self.x))
        return (self.gradient()["correct"] >= 0.5).nonzero().squeeze(1)

    def value(self, columns: Columns) -> float:
        """Accuracy; in regression minus the RMSE in standard deviations of y, so that larger is better in both."""
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
        inner: Any = self.predict
        while inner is not None:
            thetas = getattr(inner, "thetas", None)
            if isinstance(thetas, Tensor) and thetas.ndim == 2:
                return len(thetas)
            if hasattr(inner, "posterior") and isinstance(getattr(inner, "num", None), int):
                return int(inner.num)
            # A purifier has the thetas of its base, a smoothed or frozen predictor those of the one within.
            inner = getattr(inner, "base", None) or getattr(inner, "predict", None)
        return None

    @property
    def is_bayesian(self) -> bool:
        """Whether there are thetas to know."""
        return self.num_thetas is not None or self.fresh is not None

    @property
    def is_purifier(self) -> bool:
        """Whether the predictor purifies its input."""
        return isinstance(self.predict, Purifier) or self.unpurified is not None


def default_attacks(ball: Ball, task: Task, budget: Budget) -> dict[str, Attack]:
    """Adaptive steps on two losses through the predictive, and by way of the likeliest wrong classes."""
    if task == "regression":
        losses = (squared_error, nll, raise_mean, lower_mean)  # an error has two directions, and ascent goes one way
        return {f"APGD {loss.__name__}": APGD(ball, loss, budget.steps, budget.restarts) for loss in losses}
    return {
        "APGD nll": APGD(ball, nll, budget.steps, budget.restarts),
        "APGD margin": APGD(ball, margin, budget.steps, budget.restarts, 3),
    }


def finding(id: str, status: Status, advice: str = "", **figures: Any) -> Finding:
    """A finding whose title and mandatoriness the table of checks fills in."""
    return Finding(id, "", status, figures, advice)


def judged(id: str, bad: bool, advice: str, **figures: Any) -> Finding:
    """Failed with advice if `bad`, passed otherwise."""
    return finding(id, "failed", advice, **figures) if bad else finding(id, "passed", **figures)


def not_run(id: str, why: str) -> Finding:
    """A check that would have needed something that was not given."""
    return finding(id, "not run", why)


def not_applicable(id: str, why: str) -> Finding:
    """A check that has nothing to say here."""
    return finding(id, "not applicable", why)


def with_thetas(fresh: Any, num: int) -> Predictor | None:
    """The same fresh predictor drawing `num` thetas, or None where it cannot."""
    if dataclasses.is_dataclass(fresh) and not isinstance(fresh, type) and hasattr(fresh, "num"):
        return cast(Predictor, dataclasses.replace(fresh, num=num))
    make = getattr(fresh, "with_thetas", None)
    return None if make is None else cast(Predictor, make(num))

"""Acting on a prediction: the action of largest expected utility, or of largest worst-case expected
utility under attack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution  # noqa: F401 (for the examples)

from advbayes import checks
from advbayes.attacks import MultiStart, pgd
from advbayes.attacks.balls import Ball
from advbayes.attacks.losses import never
from advbayes.likelihoods import predicts_classes
from advbayes.metrics import Estimate, mean
from advbayes.metrics.scores import class_labels
from advbayes.predictive.conformal import ATTACK, PREDICTOR
from advbayes.predictive.smoothing import components
from advbayes.seeds import GlobalStream, generator_for
from advbayes.types import Attack, Predictor

_LEAST = 16  # values that stand for one component
_STARTS = 16  # of the search for the worst case in regression
_WANTED = "a tensor (classes, actions), or a function (action, y) with actions"
_CHOICES = "Choices(utility, actions, abstain)"
Utility = Callable[[Tensor, Tensor], Tensor]  # (action, y), broadcast against each other


@dataclass(frozen=True, eq=False)
class Choices:
    """What may be done and what it is worth.

    Classes: `utility` is a matrix (C, A), what action a is worth if the class is c. Regression:
    `utility` is a function of (action, y), such as `lambda action, y: -(action - y) ** 2`, and
    `actions` (A,) the actions to choose from. With `abstain` there is one more action, the last,
    that always costs as much.

    >>> Choices(torch.eye(2), abstain=0.2).num_actions
    3
    """

    utility: Tensor | Utility
    actions: Tensor | None = None
    abstain: float | None = None
    num: int = 256  # values of y that stand for a prediction of a regression

    def __post_init__(self) -> None:
        if isinstance(self.utility, Tensor):
            if self.utility.ndim != 2:
                raise checks.InputError(f"utility must be {_WANTED}", got=self.utility)
            if self.actions is not None:
                wanted = "actions must be left out with a matrix, whose columns they are"
                raise checks.InputError(wanted, got=self.actions)
            checks.finite("utility", self.utility)
        else:
            checks.function("utility", self.utility, _WANTED)
            actions = self.actions
            if not isinstance(actions, Tensor) or actions.ndim != 1 or not len(actions):
                wanted = "actions must be a tensor (A,), what a function (action, y) is asked about"
                raise checks.InputError(wanted, got=actions)
        if self.abstain is not None:
            checks.number("abstain", self.abstain)
        checks.count("num", self.num)

    @property
    def num_actions(self) -> int:
        """With abstention."""
        num = self.utility.shape[1] if isinstance(self.utility, Tensor) else len(self._grid)
        return num + (self.abstain is not None)

    @property
    def _grid(self) -> Tensor:
        assert self.actions is not None
        return self.actions

    def expected(self, prediction: Distribution) -> Tensor:  # (B, A)
        """E[utility(a, y)] under a prediction, differentiable in it: over classes, or over values
        of y that stand for the prediction (see `outcomes`)."""
        if isinstance(self.utility, Tensor):
            if not predicts_classes(prediction) or prediction.probs.shape[-1] != len(self.utility):
                raise checks.InputTypeError(
                    f"predict must give {len(self.utility)} classes for this utility, got "
                    f"{prediction}"
                )
            worth = prediction.probs @ self.utility.to(prediction.probs)
        elif predicts_classes(prediction):
            wanted = "utility must be a tensor (classes, actions) for a prediction of classes"
            raise checks.InputTypeError(wanted, got=self.utility)
        else:
            y, weights = outcomes(prediction, self.num)
            each = self._of_each(y.unsqueeze(-1))  # (K, B, A)
            worth = (weights.unsqueeze(-1) * each).sum(0)
        if checks.known(worth.isnan().any(), otherwise=False):  # it would count as the largest
            raise checks.InputError(
                "predict and utility must give numbers, got expected utilities of NaN"
            )
        return self._with_abstention(worth)

    def realised(self, y: Tensor) -> Tensor:  # (B, A)
        """utility(a, y): what each action turns out to be worth."""
        if isinstance(self.utility, Tensor):
            return self._with_abstention(self.utility[class_labels(y, len(y), len(self.utility))])
        return self._with_abstention(self._of_each(_floating(_one_output(y)).unsqueeze(1)))

    def _of_each(self, y: Tensor) -> Tensor:  # (..., B, 1) -> (..., B, A)
        """utility(a, y) of every action, also where the function looks at one of the two alone."""
        assert not isinstance(self.utility, Tensor)
        worth = torch.as_tensor(self.utility(self._grid.to(y), y), device=y.device)
        try:
            return worth.expand(*y.shape[:-1], len(self._grid))
        except RuntimeError:
            wanted = "utility must broadcast actions (A,) against y (B, 1) to (B, A)"
            raise checks.InputError(wanted, got=worth) from None

    def _with_abstention(self, worth: Tensor) -> Tensor:
        worth = _floating(worth)
        if self.abstain is None:
            return worth
        return torch.cat([worth, torch.full_like(worth[:, :1], -self.abstain)], 1)


def outcomes(prediction: Distribution, num: int) -> tuple[Tensor, Tensor]:  # (K, B) each
    """Values of y that stand for the prediction of one output, and their weights.

    A Gaussian is cut into `num` parts of equal probability, each of which its mean stands for,
    scaled so that their variance is the Gaussian's: exact for utilities that are quadratic in y.
    The components of a mixture share `num` values, sixteen each at least. Both are the same
    whatever the batch. A prediction of another kind (a purified regression) is sampled, from a
    stream that is keyed by the place in the batch, and its draws are given its own mean and
    standard deviation: exact for those utilities too, and with a gradient.

    >>> y, weights = outcomes(torch.distributions.Normal(torch.tensor([1.0]), 2.0), 100)
    >>> mean, variance = (weights * y).sum(), (weights * (y - 1) ** 2).sum()
    >>> round(float(mean), 4), round(float(variance), 4)
    (1.0, 4.0)
    """
    try:
        means, scales, log_weights = components(prediction)
    except checks.InputTypeError:
        with GlobalStream(0):
            draws = prediction.sample((num,))
        mean, spread = _one_output(prediction.mean), _one_output(prediction.stddev)
        away = draws.view(num, -1) - draws.view(num, -1).mean(0)
        away = away / away.square().mean(0).sqrt().clamp_min(1e-30)
        y = mean + spread * away
        return y, torch.full_like(y, 1.0 / num)
    means, scales = (torch.stack([_one_output(one) for one in part]) for part in (means, scales))
    size = max(-(-num // len(means)), min(num, _LEAST))
    y = means + scales * _stand_ins(size, means).view(-1, 1, 1)  # (size, S, B)
    weights = (log_weights.exp() / size).expand_as(y)
    return y.flatten(0, 1), weights.flatten(0, 1)


def _stand_ins(num: int, like: Tensor) -> Tensor:  # (num,)
    """The means of `num` equally likely parts of the standard normal, scaled to unit variance."""
    levels = torch.linspace(0.0, 1.0, num + 1, dtype=torch.float64, device=like.device)
    cuts: Tensor = torch.special.ndtri(levels)
    heights = (-0.5 * cuts.square()).exp()
    means = heights[:-1] - heights[1:]
    return (means / means.square().mean().sqrt() if num > 1 else means).to(like)


def _floating(values: Tensor) -> Tensor:
    """Whole numbers as floating-point ones: actions and costs may lie between them."""
    return values if values.is_floating_point() else values.to(torch.get_default_dtype())


def _one_output(y: Tensor) -> Tensor:  # (B,) or (B, 1) -> (B,)
    if y.ndim == 2 and y.shape[1] == 1:
        return y.squeeze(1)
    if y.ndim != 1:
        raise checks.InputError("decisions in regression need one output", got=y)
    return y


@dataclass(frozen=True)
class Worthless:
    """Minus an action's expected utility, for attackers who want it to look bad."""

    choices: Choices
    action: int
    succeeded = staticmethod(never)

    def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
        return -self.choices.expected(prediction)[:, self.action]


@dataclass(frozen=True)
class Spoiling:
    """Minus the utility of the action taken, for attackers who want bad decisions.

    Smoothed by a softmax over expected utilities at `temperature`, for gradients; broken where the
    action taken is worth less than the best one.
    """

    choices: Choices
    temperature: float = 0.05

    def __post_init__(self) -> None:
        checks.instance("choices", self.choices, Choices, _CHOICES)

    def __call__(self, prediction: Distribution, y: Tensor) -> Tensor:
        taken = (self.choices.expected(prediction) / self.temperature).softmax(1)
        return -(taken * self.choices.realised(y).to(taken)).sum(1)

    def succeeded(self, prediction: Distribution, y: Tensor) -> Tensor:
        worth = self.choices.realised(y)
        taken = self.choices.expected(prediction).argmax(1, keepdim=True)
        return worth.gather(1, taken).squeeze(1) < worth.amax(1)


@torch.no_grad()
def decide(
    predict: Predictor,
    x: Tensor,  # (B, *event)
    utility: Tensor | Utility | Choices,
    *,
    actions: Tensor | None = None,
    abstain: float | None = None,
    worst_case: Ball | None = None,
    steps: int = 20,
    generator: torch.Generator | None = None,
) -> Tensor:  # (B,) indices of actions
    """The action of largest expected utility; with `worst_case`, the one whose least expected
    utility over the ball is largest.

    The ball is around the given input; it contains the clean one if the attacker's budget is the
    ball's. The least is searched for by projected ascent.

    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> worth = torch.tensor([[1.0, 0.0], [-9.0, 0.0]])  # acting: 1 in class 0, -9 in class 1
    >>> decide(predict, torch.tensor([[3.0], [0.5]]), worth)
    tensor([0, 1])
    >>> from advbayes import L2
    >>> decide(predict, torch.tensor([[3.0], [0.5]]), worth, worst_case=L2(2.5))
    tensor([1, 1])
    """
    if isinstance(utility, Choices):
        if actions is not None or abstain is not None:
            raise checks.InputError("actions and abstain must come within Choices, got both")
        choices = utility
    else:
        choices = Choices(utility, actions, abstain)
    checks.function("predict", predict, PREDICTOR)
    if worst_case is None:
        return choices.expected(predict(x)).argmax(1)
    least = worst_case_utility(predict, x, choices, worst_case, steps=steps, generator=generator)
    return least.argmax(1)


def worst_case_utility(
    predict: Predictor,
    x: Tensor,
    choices: Choices,
    ball: Ball,
    *,
    steps: int = 20,
    generator: torch.Generator | None = None,
) -> Tensor:  # (B, A)
    """The least expected utility of each action over the ball around x, by projected ascent; in
    regression also from several points, for one ascent often ends in a local optimum there. Every
    point reached counts for every action."""
    checks.function("predict", predict, PREDICTOR)
    checks.instance("choices", choices, Choices, _CHOICES)
    nobody = torch.zeros(len(x), dtype=torch.long, device=x.device)  # these losses do not look at y
    if generator is None:
        generator = generator_for(0, "worst case", device=x.device)
    with torch.no_grad():
        least = choices.expected(predict(x))
    for action in range(choices.num_actions):
        loss = Worthless(choices, action)
        attacks: list[Attack] = [pgd(ball, steps, loss)]
        if not isinstance(choices.utility, Tensor):
            attacks.append(MultiStart(ball, loss, steps, _STARTS))
        for attack in attacks:
            x_adv = attack(predict, x, nobody, generator=generator)
            with torch.no_grad():
                least = torch.minimum(least, choices.expected(predict(x_adv)))
    return least


def utility_under(
    predict: Predictor,
    data: tuple[Tensor, Tensor],
    choices: Choices,
    *,
    attack: Attack | None = None,
    worst_case: Ball | None = None,
    steps: int = 20,
    generator: torch.Generator | None = None,
) -> Estimate:
    """The mean utility of the decisions, on clean inputs or after an attack, with its interval.

    >>> predict = lambda x: Categorical(logits=torch.stack([x[:, 0], -x[:, 0]], 1))
    >>> data = torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 0])
    >>> utility_under(predict, data, Choices(torch.eye(2))).value
    0.5
    """
    checks.instance("choices", choices, Choices, _CHOICES)
    x, y = data
    if attack is not None:
        checks.function("attack", attack, ATTACK)
        x = attack(predict, x, y, generator=generator)
    action = decide(predict, x, choices, worst_case=worst_case, steps=steps, generator=generator)
    return mean(choices.realised(y).gather(1, action.unsqueeze(1)).squeeze(1))

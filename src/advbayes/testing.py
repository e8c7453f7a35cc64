"""Contracts that every posterior, channel, attack and predictor must satisfy, your own included.

One line of pytest checks a part of any kind:

    def test_mine(): testing.check(testing.ChannelContract, lambda task, dtype: MyChannel(0.3))

To see failures test by test, write `class TestMine(ChannelContract)` with a method `make`. Parts
are tried on small problems of four features in [0, 1], three classes or one output, in
float32 and float64.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Normal

from advbayes.attacks import HasInputGradient, margin, nll, squared_error
from advbayes.attacks.balls import L2, Ball, Linf
from advbayes.attacks.gradients import NoGradientWarning
from advbayes.likelihoods import Categorical, Gaussian, predicts_classes
from advbayes.model import BayesianModel
from advbayes.seeds import GlobalStream
from advbayes.types import Attack, Channel, ChannelDensity, Predictor

DTYPES = (torch.float32, torch.float64)
TASKS = ("classification", "regression")


def check(contract: type[Any], make: Callable[..., Any], **settings: Any) -> None:
    """Run a contract's tests on what `make` gives; `settings` such as has_density=False.

    >>> from advbayes import Noise
    >>> check(ChannelContract, lambda task, dtype: Noise(0.3))
    """
    member = type(contract.__name__, (contract,), {"make": staticmethod(make), **settings})()
    for name in dir(member):
        if name.startswith("test_"):
            getattr(member, name)()


def seeded(seed: int = 0) -> torch.Generator:
    """A new generator with this seed."""
    return torch.Generator().manual_seed(seed)


def small_model(task: str, dtype: torch.dtype) -> BayesianModel:
    """A smooth two-layer net on four features: three classes, or one output."""
    with GlobalStream(3):
        outputs = 3 if task == "classification" else 1
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).to(dtype)
    return BayesianModel(net, Categorical() if task == "classification" else Gaussian(0.5))


def small_data(task: str, dtype: torch.dtype, num: int = 12) -> tuple[Tensor, Tensor]:
    """`num` points of the unit cube with targets of the task."""
    x = torch.rand(num, 4, generator=seeded(1), dtype=dtype)
    if task == "classification":
        return x, torch.randint(3, (num,), generator=seeded(2))
    return x, torch.randn(num, generator=seeded(2), dtype=dtype)


class _Contract:
    """Every case of task and dtype; a failure says in which."""

    tasks: tuple[str, ...] = TASKS

    def cases(self, num: int = 12) -> Iterator[tuple[str, torch.dtype, Tensor, Tensor]]:
        for task, dtype in product(self.tasks, DTYPES):
            yield task, dtype, *small_data(task, dtype, num)


@contextmanager
def case(*words: object) -> Iterator[None]:
    """Adds to a failure the case in which it occurred."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case {', '.join(map(str, words))}")
        raise


@contextmanager
def refused(kinds: type[Exception] | tuple[type[Exception], ...], words: str) -> Iterator[None]:
    """Asserts that an error of these kinds is raised, with the words in its message."""
    came = "none"
    try:
        yield
    except kinds as error:
        came = str(error)
    assert words in came, f"an error that says {words!r} was wanted, got {came}"


def assert_slopes(function: Callable[[Tensor], Tensor], leaf: Tensor) -> None:
    """Asserts that autograd's derivatives in the leaf (float64) are those of finite differences."""
    torch.autograd.gradcheck(
        function, leaf, rtol=1e-5, atol=1e-7, nondet_tol=1e-9, check_undefined_grad=False
    )


# --- Posteriors ---------------------------------------------------------------------------------


class PosteriorContract(_Contract):
    """`make(model) -> posterior`; `trainable = False` for given samples."""

    trainable = True

    def make(self, model: BayesianModel) -> Any:
        raise NotImplementedError

    def test_draws_have_shape_dtype_and_no_gradient_unless_asked(self) -> None:
        for dtype in DTYPES:
            model = small_model("classification", dtype)
            posterior = self.make(model)
            draws = posterior.sample(5, generator=seeded())
            assert draws.shape == (5, model.num_params)
            assert draws.dtype == dtype
            assert not draws.requires_grad
            assert posterior.rsample(2, generator=seeded()).requires_grad is self.trainable
            assert posterior.mean.shape == (model.num_params,)
            assert posterior.num_params == model.num_params

    def test_the_generator_decides_and_the_global_one_stays(self) -> None:
        posterior = self.make(small_model("regression", torch.float32))
        before = torch.get_rng_state()
        first, second = (posterior.sample(4, generator=seeded(7)) for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(before, torch.get_rng_state())

    def test_draws_do_not_alias_the_parameters(self) -> None:
        posterior = self.make(small_model("regression", torch.float32))
        draws = posterior.sample(3, generator=seeded())
        mean = posterior.mean.clone()
        draws.zero_()
        assert torch.equal(posterior.mean, mean)

    def test_kl_gradient_matches_finite_differences_for_every_parameter(self) -> None:
        posterior = self.make(small_model("regression", torch.float64))
        if not self.trainable:
            with refused(TypeError, "kl"):
                posterior.kl(1.0)
            return
        for parameter in posterior.parameters():
            (gradient,) = torch.autograd.grad(posterior.kl(0.7), parameter)
            assert bool((gradient != 0).any())
            assert_slopes(lambda _: posterior.kl(0.7), parameter)

    def test_bad_counts_and_priors_are_named(self) -> None:
        posterior = self.make(small_model("regression", torch.float32))
        with refused(ValueError, "num must be"):
            posterior.sample(0)
        if self.trainable:
            with refused(ValueError, "prior_scale"):
                posterior.kl(-1.0)

    def test_state_round_trips(self) -> None:
        model = small_model("regression", torch.float32)
        posterior, other = self.make(model), self.make(model)
        with torch.no_grad():
            for tensor in posterior.state_dict().values():
                tensor.add_(0.1)
        other.load_state_dict(posterior.state_dict())
        first, second = (each.sample(3, generator=seeded()) for each in (posterior, other))
        assert torch.equal(first, second)


# --- Channels -----------------------------------------------------------------------------------


class ChannelContract(_Contract):
    """`make(task, dtype) -> channel`; `has_density = False` where `density` refuses."""

    has_density = True

    def make(self, task: str, dtype: torch.dtype) -> Channel:
        raise NotImplementedError

    def predictor(self, task: str, dtype: torch.dtype) -> Predictor:
        model = small_model(task, dtype)
        return model.at(model.initial_theta())

    def test_sample_keeps_shape_dtype_and_its_input(self) -> None:
        for task, dtype, x, y in self.cases():
            before = x.clone()
            channel, predict = self.make(task, dtype), self.predictor(task, dtype)
            for labels in (y, None):
                with case(task, dtype, "with labels" if labels is y else "without labels"):
                    drawn = channel.sample(predict, x, labels, generator=seeded())
                    assert drawn.shape == x.shape
                    assert drawn.dtype == dtype
                    assert bool(torch.isfinite(drawn).all())
                    assert torch.equal(x, before)
                    assert not x.requires_grad

    def test_same_generator_same_sample(self) -> None:
        for task, dtype, x, y in self.cases():
            channel, predict = self.make(task, dtype), self.predictor(task, dtype)
            before = torch.get_rng_state()
            first, second = (channel.sample(predict, x, y, generator=seeded(5)) for _ in range(2))
            assert torch.equal(first, second)
            assert torch.equal(before, torch.get_rng_state()), (
                "the global generator must stay as it was"
            )

    def test_density_has_shape_and_does_not_depend_on_what_was_asked_before(self) -> None:
        for task, dtype, x, y in self.cases():
            channel, predict = self.make(task, dtype), self.predictor(task, dtype)
            if not self.has_density:
                with refused(ValueError, "no density"):
                    channel.density(predict, x, y)
                continue
            with case(task, dtype):
                density = channel.density(predict, x[:5], y[:5])
                queries = x[5:] + 0.1
                log_p = density.log_prob(queries)
                assert log_p.shape == (5, len(queries))
                assert log_p.dtype == dtype
                torch.testing.assert_close(log_p[:, 2:3], density.log_prob(queries[2:3]))
                torch.testing.assert_close(
                    log_p[3:4], channel.density(predict, x[3:4], y[3:4]).log_prob(queries)
                )

    def test_density_integrates_to_one(self) -> None:
        """By importance sampling from a wide Gaussian around the centre."""
        if not self.has_density:
            return
        for task in self.tasks:
            x, y = small_data(task, torch.float64, num=3)
            channel, predict = self.make(task, torch.float64), self.predictor(task, torch.float64)
            density, wide = channel.density(predict, x, y), Normal(x.mean(0), 0.8)
            noise = torch.randn(200_000, 4, generator=seeded(9), dtype=torch.float64)
            points = x.mean(0) + 0.8 * noise
            ratios = (density.log_prob(points) - wide.log_prob(points).sum(1)).exp()  # type: ignore[no-untyped-call]
            error = ratios.std(1) / math.sqrt(ratios.shape[1])
            assert bool(((ratios.mean(1) - 1).abs() < 6 * error + 1e-9).all())
            assert bool((error < 0.1).all())

    def test_samples_fit_the_density(self) -> None:
        """Means and squares agree, with labels and without, also where no gradient is."""
        if not self.has_density:
            return
        for task in self.tasks:
            x, y = small_data(task, torch.float64, num=1)
            channel, predict = self.make(task, torch.float64), self.predictor(task, torch.float64)
            many = x.expand(4000, -1)
            for asked, labels in product((predict, _flat(predict)), (y, None)):
                with case(task, "with labels" if labels is y else "without labels"):
                    each = None if labels is None else labels.expand(4000)
                    drawn = channel.sample(asked, many, each, generator=seeded(4)).detach()
                    assert_drawn_from(channel.density(asked, x, labels), drawn)


def _flat(predict: Predictor) -> Predictor:
    """The same prediction for every input: a gradient of zeros."""
    point = torch.full((1, 4), 0.4, dtype=torch.float64)
    return lambda x: predict(point.expand_as(x) + 0.0 * x)


def assert_drawn_from(density: ChannelDensity, drawn: Tensor) -> None:
    """E f(x') over samples (B, d), and under the density of one x by importance sampling; f = 1,
    x', x'^2, x'_i x'_j."""
    middle, spread = drawn.mean(0), 1.5 * drawn.std(0)
    noise = torch.randn(40_000, drawn.shape[1], generator=seeded(9), dtype=drawn.dtype)
    points = middle + spread * noise
    log_q = Normal(middle, spread).log_prob(points).sum(1)  # type: ignore[no-untyped-call]
    ratios = (density.log_prob(points)[0] - log_q).exp()

    def features(points: Tensor) -> Tensor:
        z = (points - middle) / spread
        return torch.cat([torch.ones_like(z[:, :1]), z, z.square(), z * z.roll(1, 1)], 1)

    wanted, drawn_features = ratios.unsqueeze(1) * features(points), features(drawn)
    error = (wanted.var(0) / len(points) + drawn_features.var(0) / len(drawn)).sqrt()
    off = (wanted.mean(0) - drawn_features.mean(0)).abs() / error
    most = float(off.max())  # over 5.5 by chance: 5e-7
    assert most < 5.5, f"samples are {most:.1f} standard errors off their density"


# --- Attacks ------------------------------------------------------------------------------------


class AttackContract(_Contract):
    """`make(ball) -> attack`; `tasks` where it is for one kind of prediction alone."""

    def make(self, ball: Ball) -> Attack:
        raise NotImplementedError

    def run(self, ball: Ball, task: str, dtype: torch.dtype, labels: bool = True) -> Tensor:
        model = small_model(task, dtype)
        predict, (x, y) = model.at(model.initial_theta()), small_data(task, dtype)
        x_adv = self.make(ball)(predict, x, y if labels else None, generator=seeded(6))
        assert torch.equal(x, small_data(task, dtype)[0])
        return x_adv

    def balls(self, dtype: torch.dtype) -> list[Ball]:
        scale = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=dtype)
        mask = torch.tensor([True, False, True, True])
        missing = ((0, 3, 0.5),)  # the last feature says where the first one cannot be touched
        return [
            ball(eps, box, s, m, i)
            for ball in (L2, Linf)
            for eps, box, s, m, i in (
                (0.3, (0.0, 1.0), None, None, None),
                (0.3, None, scale, mask, None),
                (5.0, (0.0, 1.0), scale, None, None),
                (0.3, None, scale, mask, missing),
            )
        ]

    def test_feasible_finite_and_of_the_input_s_shape(self) -> None:
        for task, dtype, x, _ in self.cases():
            for ball, labels in product(self.balls(dtype), (True, False)):
                with case(task, dtype, ball, f"labels={labels}"):
                    x_adv = self.run(ball, task, dtype, labels)
                    assert x_adv.shape == x.shape
                    assert x_adv.dtype == dtype
                    assert bool(ball.contains(x_adv, x).all())
                    assert not x_adv.requires_grad

    def test_zero_budget_changes_no_bit(self) -> None:
        for task in self.tasks:
            for ball in (L2(0.0, box=(0.0, 1.0)), Linf(0.0)):
                x, _ = small_data(task, torch.float32)
                assert torch.equal(x, self.run(ball, task, torch.float32))

    def test_same_generator_same_attack(self) -> None:
        for task in self.tasks:
            first, second = (self.run(L2(0.5), task, torch.float64) for _ in range(2))
            assert torch.equal(first, second)

    def test_a_prediction_without_gradient_is_survived(self) -> None:
        if "classification" not in self.tasks:
            return

        def constant(x: Tensor) -> CategoricalDistribution:
            return CategoricalDistribution(
                logits=torch.zeros(len(x), 3, dtype=x.dtype), validate_args=False
            )

        x, y = small_data("classification", torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoGradientWarning)  # from those that need one
            x_adv = self.make(L2(0.5))(constant, x, y, generator=seeded())
        assert bool(L2(0.5).contains(x_adv, x).all())


# --- Predictors ---------------------------------------------------------------------------------


def answer(predict: Predictor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What a prediction says of each example, and the gradients of log p(y) in the input."""
    with torch.no_grad():
        prediction: Any = predict(x)
        said = {"log_prob": prediction.log_prob(y), "entropy": prediction.entropy()}
        if predicts_classes(prediction):
            said["probs"] = prediction.probs
        else:
            said |= {"mean": prediction.mean, "variance": prediction.variance}
    leaf = x.clone().requires_grad_()
    again: Any = predict(leaf)
    value = again.log_prob(y)
    if value.requires_grad:
        (said["gradient"],) = torch.autograd.grad(value.sum(), leaf)
    if isinstance(predict, HasInputGradient):
        said["loss"], _, said["loss_gradient"] = predict.loss_and_gradient(nll, x, y)
    return said


def assert_same(
    answer: dict[str, Tensor],
    wanted: dict[str, Tensor],
    units: float,
    least: float = 0.0,
    rows: Tensor | slice = slice(None),  # of `wanted`, to which the answer is
) -> None:
    """Equal up to `units` in the last place of the largest answer, or of 1; of a gradient's row (or
    the median row: where parts cancel, they are rounded as those of others) times 1 + |log p|, for
    so large are the exponents that weigh its parts; and a tenth of `least`."""
    assert answer.keys() == wanted.keys()
    exponents = 1 + wanted["log_prob"].abs().unsqueeze(1)
    for name, value in answer.items():
        goal = wanted[name][rows]
        assert value.shape == goal.shape
        assert value.dtype == goal.dtype
        is_gradient = "gradient" in name
        if is_gradient:
            size = wanted[name].abs().amax(1, keepdim=True)
            size = (torch.maximum(size, size.median()) * exponents)[rows]
        else:
            size = goal.abs().max().clamp_min(1.0)
        allowed = units * torch.finfo(value.dtype).eps * size + 0.1 * least * is_gradient
        over = (value - goal).abs() - allowed
        got, wanted_here = (each.flatten()[over.argmax()] for each in (value, goal))
        assert bool((over <= 0).all()), f"{name} is {got:.9g}, not {wanted_here:.9g}"


Ask = Callable[[Tensor, Tensor], dict[str, Tensor]]


class PredictorContract(_Contract):
    """`make(model) -> predictor`; `stochastic = True` if two calls may differ,
    `has_gradient = False` without one.

    The answer and its gradient must depend on the example alone: not on the batch, the order of
    rows, the size of chunks (`chunks`: the names of the constants that set it, with values to try),
    the number of threads, or where tables lie (`same`: the same predictor with its tables
    elsewhere).
    """

    stochastic = False
    has_gradient = True
    num = 33  # examples asked of it
    # in the last place: what other orders of sums cost, the more the worse conditioned it is
    units = 8.0
    least = 0.0  # the smallest gradient whose direction counts
    chunks: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def make(self, model: BayesianModel) -> Predictor:
        raise NotImplementedError

    def same(self, model: BayesianModel) -> Sequence[Predictor]:
        return ()

    def asking(self, task: str, dtype: torch.dtype) -> Ask:
        """(x, y) -> answer and gradient; a stochastic predictor is made anew each time."""
        model = small_model(task, dtype)
        predict = self.make(model)
        return lambda x, y: answer(self.make(model) if self.stochastic else predict, x, y)

    def test_prediction_has_batch_shape_and_consistent_parts(self) -> None:
        for task, dtype, x, y in self.cases():
            with case(task, dtype):
                prediction: Any = self.make(small_model(task, dtype))(x)
                assert prediction.batch_shape == (len(x),)
                log_p = prediction.log_prob(y)
                assert log_p.shape == prediction.entropy().shape == (len(x),)
                assert log_p.dtype == dtype
                assert bool(torch.isfinite(log_p).all())
                if task == "classification":
                    torch.testing.assert_close(
                        prediction.probs.sum(1), torch.ones(len(x), dtype=dtype)
                    )
                    torch.testing.assert_close(prediction.logits.exp(), prediction.probs)
                    assert bool((prediction.entropy() >= -1e-6).all())
                    assert bool((prediction.entropy() <= math.log(3) + 1e-6).all())
                else:
                    assert prediction.mean.shape == prediction.variance.shape == (len(x),)
                    assert bool((prediction.variance > 0).all())
                    torch.testing.assert_close(prediction.log_prob(y.unsqueeze(1)), log_p)
                    with refused(ValueError, "y must have"):
                        prediction.log_prob(y[:, None].expand(-1, 2))

    def test_answer_and_gradient_do_not_depend_on_batch_or_order(self) -> None:
        """Up to the order of sums, as in another matrix product: `units` in the last place."""
        for task, dtype, x, y in self.cases(self.num):
            ask = self.asking(task, dtype)
            whole = ask(x, y)
            order = torch.randperm(len(x), generator=seeded(11))
            for rows in (order, order[:1], order[1:2], order[2:4], order[4:12], order[12:]):
                with case(task, dtype, f"{len(rows)} rows"):
                    assert_same(ask(x[rows], y[rows]), whole, self.units, self.least, rows)

    def test_answer_and_gradient_do_not_depend_on_chunks_or_tables(self) -> None:
        for task, dtype, x, y in self.cases(self.num):
            model = small_model(task, dtype)
            whole = answer(self.make(model), x, y)
            for k, other in enumerate(self.same(model)):
                with case(task, dtype, f"same {k}"):
                    assert_same(answer(other, x, y), whole, self.units, self.least)
            for place, size in [(place, size) for place, sizes in self.chunks for size in sizes]:
                with mock.patch(place, size), case(task, dtype, place, size):
                    assert_same(answer(self.make(model), x, y), whole, self.units, self.least)

    def test_answer_and_gradient_do_not_depend_on_threads(self) -> None:
        """Asked by four threads at once, answers keep every bit; torch's own threads may round."""
        for task, dtype, x, y in self.cases(self.num):
            ask = self.asking(task, dtype)
            starts = [0, 5, 10, len(x) - 1]
            alone = [ask(x[start:], y[start:]) for start in starts]
            with ThreadPoolExecutor(len(starts)) as pool:
                together = list(pool.map(lambda start: ask(x[start:], y[start:]), starts * 3))  # noqa: B023
            for one, other in zip(alone * 3, together, strict=True):
                with case(task, dtype):
                    assert all(torch.equal(other[name], value) for name, value in one.items())
            before = torch.get_num_threads()
            try:
                for num in (1, 3):
                    torch.set_num_threads(num)
                    with case(task, dtype, f"{num} threads of torch"):
                        assert_same(ask(x, y), alone[0], self.units, self.least)
            finally:
                torch.set_num_threads(before)

    def test_input_gradient_matches_finite_differences(self) -> None:
        if self.stochastic or not self.has_gradient:
            return
        for task in self.tasks:
            predict: Any = self.make(small_model(task, torch.float64))
            x, y = small_data(task, torch.float64, num=3)
            assert_slopes(lambda x: predict(x).log_prob(y), x.requires_grad_())  # noqa: B023

    def test_own_gradient_is_autograd_s(self) -> None:
        """A faster way to a predictor's gradient gives the same numbers as autograd."""
        for task in self.tasks:
            predict = self.make(small_model(task, torch.float64))
            if self.stochastic or not isinstance(predict, HasInputGradient):
                return
            x, y = small_data(task, torch.float64)
            for loss in (nll, margin if task == "classification" else squared_error):
                value, _, gradient = predict.loss_and_gradient(loss, x, y)
                leaf = x.clone().requires_grad_()
                plain = loss(predict(leaf), y)
                (expected,) = torch.autograd.grad(plain.sum(), leaf)
                torch.testing.assert_close(value, plain.detach())
                torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-10)

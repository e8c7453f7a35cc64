"""What every posterior, channel, attack and predictor must keep. A new member is one row in `tests/test_contracts.py`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from advbayes import BayesianModel, Categorical, Gaussian
from advbayes.attacks.gradients import NoGradientWarning
from advbayes.types import Attack, Channel, ChannelDensity, Predictor

DTYPES = (torch.float32, torch.float64)
TASKS = ("classification", "regression")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small_model(task: str, dtype: torch.dtype) -> BayesianModel:
    """A smooth two-layer net on four features: three classes, or one output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        outputs = 3 if task == "classification" else 1
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).to(dtype)
    return BayesianModel(net, Categorical() if task == "classification" else Gaussian(0.5))


def small_data(task: str, dtype: torch.dtype, num: int = 12) -> tuple[Tensor, Tensor]:
    x = torch.rand(num, 4, generator=seeded(1), dtype=dtype)
    if task == "classification":
        return x, torch.randint(3, (num,), generator=seeded(2))
    return x, torch.randn(num, generator=seeded(2), dtype=dtype)


# --- Posteriors -----------------------------------------------------------------------------------------------------


class PosteriorContract:
    """Subclass with `make(model) -> posterior`; `trainable = False` for given samples."""

    trainable = True

    def make(self, model: BayesianModel) -> nn.Module:
        raise NotImplementedError

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_draws_have_shape_dtype_and_no_gradient_unless_asked(self, dtype: torch.dtype) -> None:
        model = small_model("classification", dtype)
        posterior = self.make(model)
        draws = posterior.sample(5, generator=seeded())
        assert draws.shape == (5, model.num_params)
        assert draws.dtype == dtype
        assert not draws.requires_grad
        assert posterior.rsample(2, generator=seeded()).requires_grad is self.trainable
        assert posterior.mean.shape == (model.num_params,)
        assert posterior.num_params == model.num_params

    def test_same_generator_same_draws(self) -> None:
        posterior = self.make(small_model("regression", torch.float32))
        torch.testing.assert_close(
            posterior.sample(4, generator=seeded(7)), posterior.sample(4, generator=seeded(7)), rtol=0, atol=0
        )

    def test_global_generator_is_never_seeded(self) -> None:
        before = torch.get_rng_state()
        self.make(small_model("regression", torch.float32)).sample(4, generator=seeded(7))
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
            with pytest.raises(TypeError, match="kl"):
                posterior.kl(1.0)
            return
        for parameter in posterior.parameters():
            posterior.zero_grad()
            posterior.kl(0.7).backward()
            gradient = parameter.grad.flatten()
            assert bool((gradient != 0).any())
            for index in (0, gradient.numel() // 2, gradient.numel() - 1):
                flat = parameter.data.view(-1)
                value, step = float(flat[index]), 1e-6
                flat[index] = value + step
                up = float(posterior.kl(0.7).detach())
                flat[index] = value - step
                down = float(posterior.kl(0.7).detach())
                flat[index] = value
                assert float(gradient[index]) == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-7)

    def test_bad_counts_and_priors_are_named(self) -> None:
        posterior = self.make(small_model("regression", torch.float32))
        with pytest.raises(ValueError, match="num must be"):
            posterior.sample(0)
        if self.trainable:
            with pytest.raises(ValueError, match="prior_scale"):
                posterior.kl(-1.0)

    def test_state_round_trips(self) -> None:
        model = small_model("regression", torch.float32)
        posterior, other = self.make(model), self.make(model)
        with torch.no_grad():
            for tensor in posterior.state_dict().values():
                tensor.add_(0.1)
        other.load_state_dict(posterior.state_dict())
        assert torch.equal(posterior.sample(3, generator=seeded()), other.sample(3, generator=seeded()))


# --- Channels ---------------------------------------------------------------------------------------------------------


class ChannelContract:
    """Subclass with `make(task) -> channel`; `has_density = False` for those without one."""

    has_density = True
    tasks: tuple[str, ...] = TASKS

    def make(self, task: str, dtype: torch.dtype) -> Channel:
        raise NotImplementedError

    def cases(self) -> list[tuple[str, torch.dtype]]:
        return [(task, dtype) for task in self.tasks for dtype in DTYPES]

    def predictor(self, task: str, dtype: torch.dtype) -> Predictor:
        model = small_model(task, dtype)
        return model.at(model.initial_theta())

    def test_sample_keeps_shape_dtype_and_its_input(self) -> None:
        for task, dtype in self.cases():
            x, y = small_data(task, dtype)
            before = x.clone()
            for labels in (y, None):
                drawn = self.make(task, dtype).sample(self.predictor(task, dtype), x, labels, generator=seeded())
                assert drawn.shape == x.shape
                assert drawn.dtype == dtype
                assert bool(torch.isfinite(drawn).all())
            assert torch.equal(x, before)
            assert not x.requires_grad

    def test_same_generator_same_sample(self) -> None:
        for task, dtype in self.cases():
            x, y = small_data(task, dtype)
            channel, predict = self.make(task, dtype), self.predictor(task, dtype)
            first = channel.sample(predict, x, y, generator=seeded(5))
            assert torch.equal(first, channel.sample(predict, x, y, generator=seeded(5)))

    def test_density_has_shape_and_does_not_depend_on_what_was_asked_before(self) -> None:
        for task, dtype in self.cases():
            x, y = small_data(task, dtype)
            channel, predict = self.make(task, dtype), self.predictor(task, dtype)
            if not self.has_density:
                with pytest.raises(ValueError, match="no density"):
                    channel.density(predict, x, y)
                continue
            density = channel.density(predict, x[:5], y[:5])
            queries = x[5:] + 0.1
            log_p = density.log_prob(queries)
            assert log_p.shape == (5, len(queries))
            assert log_p.dtype == dtype
            torch.testing.assert_close(log_p[:, 2:3], density.log_prob(queries[2:3]))

    def test_density_integrates_to_one(self) -> None:
        """Importance sampling from a wide Gaussian around the centre, in float64."""
        if not self.has_density:
            return
        for task in self.tasks:
            x, y = small_data(task, torch.float64, num=3)
            density = self.make(task, torch.float64).density(self.predictor(task, torch.float64), x, y)
            wide = torch.distributions.Normal(x.mean(0), torch.full((4,), 0.8, dtype=torch.float64))
            points = x.mean(0) + 0.8 * torch.randn(200_000, 4, generator=seeded(9), dtype=torch.float64)
            ratios = (density.log_prob(points) - wide.log_prob(points).sum(1)).exp()
            error = ratios.std(1) / math.sqrt(ratios.shape[1])
            assert bool(((ratios.mean(1) - 1).abs() < 6 * error + 1e-9).all())
            assert bool((error < 0.1).all())

    def test_samples_fit_the_density(self) -> None:
        """Means and squares of samples are those of the density, with labels and without, and where no gradient is."""
        if not self.has_density:
            return
        for task in self.tasks:
            x, y = small_data(task, torch.float64, num=1)
            channel, model = self.make(task, torch.float64), small_model(task, torch.float64)
            for predict in (model.at(model.initial_theta()), _flat(model.at(model.initial_theta()))):
                for labels in (y, None):
                    many = None if labels is None else labels.expand(4000)
                    drawn = channel.sample(predict, x.expand(4000, -1), many, generator=seeded(4)).detach()
                    assert_drawn_from(channel.density(predict, x, labels), drawn)


def _flat(predict: Predictor) -> Predictor:
    """The same prediction for every input: a gradient of zeros."""
    point = torch.full((1, 4), 0.4, dtype=torch.float64)
    return lambda x: predict(point.expand_as(x) + 0.0 * x)


def assert_drawn_from(density: ChannelDensity, drawn: Tensor) -> None:
    """E f(x') over samples and, by importance sampling from a wider Gaussian, under the density; f = x', x'^2, x'_i x'_j."""
    middle, spread = drawn.mean(0), 1.5 * drawn.std(0)
    points = middle + spread * torch.randn(40_000, drawn.shape[1], generator=seeded(9), dtype=drawn.dtype)
    log_q = torch.distributions.Normal(middle, spread).log_prob(points).sum(1)
    ratios = (density.log_prob(points)[0] - log_q).exp()

    def features(points: Tensor) -> Tensor:
        z = (points - middle) / spread
        return torch.cat([torch.ones_like(z[:, :1]), z, z.square(), z * z.roll(1, 1)], 1)

    wanted, found = ratios.unsqueeze(1) * features(points), features(drawn)
    error = (wanted.var(0) / len(points) + found.var(0) / len(drawn)).sqrt()
    off = (wanted.mean(0) - found.mean(0)).abs() / error
    assert float(off.max()) < 5.5, off  # false alarm 5e-7 for all features together


# --- Attacks ------------------------------------------------------------------------------------------------------------


class AttackContract:
    """Subclass with `make(ball) -> attack`."""

    tasks: tuple[str, ...] = TASKS

    def make(self, ball: object) -> Attack:
        raise NotImplementedError

    def run(self, ball: object, task: str, dtype: torch.dtype, labels: bool = True) -> tuple[Tensor, Tensor]:
        model = small_model(task, dtype)
        x, y = small_data(task, dtype)
        before = x.clone()
        x_adv = self.make(ball)(model.at(model.initial_theta()), x, y if labels else None, generator=seeded(6))
        assert torch.equal(x, before)
        return x, x_adv

    def balls(self, dtype: torch.dtype) -> list[object]:
        from advbayes import L2, Linf

        scale = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=dtype)
        mask = torch.tensor([True, False, True, True])
        return [
            ball(eps, box=box, scale=s, mask=m)
            for ball in (L2, Linf)
            for eps, box, s, m in ((0.3, (0.0, 1.0), None, None), (0.3, None, scale, mask), (5.0, (0.0, 1.0), scale, None))
        ]

    def test_feasible_finite_and_of_the_input_s_shape(self) -> None:
        for task in self.tasks:
            for dtype in DTYPES:
                for ball in self.balls(dtype):
                    for labels in (True, False):
                        x, x_adv = self.run(ball, task, dtype, labels)
                        assert x_adv.shape == x.shape
                        assert x_adv.dtype == dtype
                        assert bool(ball.contains(x_adv, x).all()), (task, ball)
                        assert not x_adv.requires_grad

    def test_zero_budget_changes_no_bit(self) -> None:
        from advbayes import L2, Linf

        for task in self.tasks:
            for ball in (L2(0.0, box=(0.0, 1.0)), Linf(0.0)):
                x, x_adv = self.run(ball, task, torch.float32)
                assert torch.equal(x, x_adv)

    def test_same_generator_same_attack(self) -> None:
        from advbayes import L2

        for task in self.tasks:
            first, second = (self.run(L2(0.5), task, torch.float64)[1] for _ in range(2))
            assert torch.equal(first, second)

    def test_a_prediction_without_gradient_is_survived(self) -> None:
        from advbayes import L2

        def constant(x: Tensor) -> torch.distributions.Categorical:
            return torch.distributions.Categorical(logits=torch.zeros(len(x), 3, dtype=x.dtype))

        x, y = small_data("classification", torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoGradientWarning)  # from those that need one
            x_adv = self.make(L2(0.5))(constant, x, y, generator=seeded())
        assert bool(L2(0.5).contains(x_adv, x).all())


# --- Predictors ------------------------------------------------------------------------------------------------------------


def answer(predict: Predictor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """All that a prediction says of each example, and the gradient of log p(y) in the input, both ways where there are two."""
    from advbayes import nll
    from advbayes.attacks import HasInputGradient

    with torch.no_grad():
        prediction = predict(x)
        said = {"log_prob": prediction.log_prob(y), "entropy": prediction.entropy()}
        if isinstance(prediction, torch.distributions.Categorical):
            said["probs"] = prediction.probs
        else:
            said |= {"mean": prediction.mean, "variance": prediction.variance}
    leaf = x.clone().requires_grad_()
    value = predict(leaf).log_prob(y)
    if value.requires_grad:
        (said["gradient"],) = torch.autograd.grad(value.sum(), leaf)
    if isinstance(predict, HasInputGradient):
        said["loss"], _, said["loss_gradient"] = predict.loss_and_gradient(nll, x, y)
    return said


def assert_rounded(name: str, value: Tensor, wanted: Tensor, units: float) -> None:
    """Equal up to `units` in the last place of the row's largest entry (gradients) or of the largest, or of 1 (answers)."""
    assert value.shape == wanted.shape
    assert value.dtype == wanted.dtype
    size = wanted.abs().amax(1, keepdim=True) if "gradient" in name else wanted.abs().max().clamp_min(1.0)
    allowed = units * torch.finfo(value.dtype).eps * size
    worst = (value - wanted).abs().sub(allowed).argmax()
    assert bool(((value - wanted).abs() <= allowed).all()), (
        f"{name} is {value.flatten()[worst]:.9g} where {wanted.flatten()[worst]:.9g} was wanted, {value.dtype}"
    )


class PredictorContract:
    """Subclass with `make(model) -> predictor`; `stochastic = True` if two calls may differ.

    The answer and its gradient are those of the example alone: neither the batch, the order of rows, the size of chunks
    (`chunks`: the names of the constants that set it, with values to try), the number of threads nor where tables lie
    (`same`: the predictor over again, with its tables elsewhere) has a part in them.
    """

    stochastic = False
    has_gradient = True
    num = 33  # examples asked of it
    units = 16.0  # in the last place: what other orders of sums may cost; the more, the worse conditioned the answer is
    chunks: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def same(self, model: BayesianModel) -> Sequence[Predictor]:
        return ()

    def make(self, model: BayesianModel) -> Predictor:
        raise NotImplementedError

    @pytest.mark.parametrize("task", TASKS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_prediction_has_batch_shape_and_consistent_parts(self, task: str, dtype: torch.dtype) -> None:
        predict = self.make(small_model(task, dtype))
        x, y = small_data(task, dtype)
        prediction = predict(x)
        assert prediction.batch_shape == (len(x),)
        log_p = prediction.log_prob(y)
        assert log_p.shape == (len(x),)
        assert log_p.dtype == dtype
        assert bool(torch.isfinite(log_p).all())
        assert prediction.entropy().shape == (len(x),)
        if task == "classification":
            torch.testing.assert_close(prediction.probs.sum(1), torch.ones(len(x), dtype=dtype))
            torch.testing.assert_close(prediction.logits.exp(), prediction.probs)
            assert bool((prediction.entropy() >= -1e-6).all())
            assert bool((prediction.entropy() <= math.log(3) + 1e-6).all())
        else:
            assert prediction.mean.shape == prediction.variance.shape == (len(x),)
            assert bool((prediction.variance > 0).all())
            torch.testing.assert_close(prediction.log_prob(y.unsqueeze(1)), log_p)
            with pytest.raises(ValueError, match="y must have"):
                prediction.log_prob(y[:, None].expand(-1, 2))

    @pytest.mark.parametrize("task", TASKS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_answer_and_gradient_do_not_depend_on_batch_or_order(self, task: str, dtype: torch.dtype) -> None:
        """Up to the order of sums, as in a matrix product of another shape: `units` in the last place."""
        ask = self._asking(task, dtype)
        x, y = small_data(task, dtype, self.num)
        whole = ask(x, y)
        order = torch.randperm(len(x), generator=seeded(11))
        for rows in (order, order[:1], order[1:2], order[2:4], order[4:12], order[12:]):
            for name, value in ask(x[rows], y[rows]).items():
                assert_rounded(name, value, whole[name][rows], self.units)

    @pytest.mark.parametrize("task", TASKS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_answer_and_gradient_do_not_depend_on_chunks_or_tables(self, task: str, dtype: torch.dtype) -> None:
        x, y = small_data(task, dtype, self.num)
        model = small_model(task, dtype)
        whole = answer(self.make(model), x, y)
        for other in self.same(model):
            for name, value in answer(other, x, y).items():
                assert_rounded(name, value, whole[name], self.units)
        for place, sizes in self.chunks:
            for size in sizes:
                with mock.patch(place, size):
                    for name, value in answer(self.make(model), x, y).items():
                        assert_rounded(name, value, whole[name], self.units)

    @pytest.mark.parametrize("task", TASKS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_answer_and_gradient_do_not_depend_on_threads(self, task: str, dtype: torch.dtype) -> None:
        """Asked by eight threads at once the answers keep every bit; other numbers of torch's threads may round anew."""
        ask = self._asking(task, dtype)
        x, y = small_data(task, dtype, self.num)
        starts = [0, 5, 10, len(x) - 1]
        alone = [ask(x[start:], y[start:]) for start in starts]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda start: ask(x[start:], y[start:]), starts * 3))
        for one, other in zip(alone * 3, together, strict=True):
            assert all(torch.equal(other[name], value) for name, value in one.items())
        before = torch.get_num_threads()
        try:
            for num in (1, 3):
                torch.set_num_threads(num)
                for name, value in ask(x, y).items():
                    assert_rounded(name, value, alone[0][name], self.units)
        finally:
            torch.set_num_threads(before)

    def _asking(self, task: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
        """(x, y) -> answer and gradient; a stochastic predictor is made anew each time, its generator as at first."""
        model = small_model(task, dtype)
        predict = self.make(model)
        return lambda x, y: answer(self.make(model) if self.stochastic else predict, x, y)

    @pytest.mark.parametrize("task", TASKS)
    def test_input_gradient_matches_finite_differences(self, task: str) -> None:
        if self.stochastic or not self.has_gradient:
            return
        predict = self.make(small_model(task, torch.float64))
        x, y = small_data(task, torch.float64, num=3)
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(predict(leaf).log_prob(y).sum(), leaf)
        step = 1e-6
        for column in range(x.shape[1]):
            shift = torch.zeros_like(x)
            shift[:, column] = step
            slope = (predict(x + shift).log_prob(y) - predict(x - shift).log_prob(y)) / (2 * step)
            torch.testing.assert_close(gradient[:, column], slope.detach(), rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("task", TASKS)
    def test_own_gradient_is_autograd_s(self, task: str) -> None:
        """A predictor with a faster way to its gradient gives the same numbers as autograd through its call."""
        from advbayes import margin, nll, squared_error
        from advbayes.attacks import HasInputGradient

        predict = self.make(small_model(task, torch.float64))
        if self.stochastic or not isinstance(predict, HasInputGradient):
            return
        x, y = small_data(task, torch.float64)
        losses: list[Callable[..., Tensor]] = [nll, margin if task == "classification" else squared_error]
        for loss in losses:
            value, _, gradient = predict.loss_and_gradient(loss, x, y)
            leaf = x.clone().requires_grad_()
            plain = loss(predict(leaf), y)
            (expected,) = torch.autograd.grad(plain.sum(), leaf)
            torch.testing.assert_close(value, plain.detach())
            torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-10)

"""Answers that are known beforehand: closed forms, exact quadrature and sequential tests, all in
float64.

Nothing here uses the library, so that a test compares two things written apart. The notation is
that of the paper's SM-2: x ~ N(0, sx^2); x' = (1 + eps) x + v, v ~ N(0, sd^2); y | x ~ N(t x,
sy^2); t ~ N(0, st^2); r = y - theta.x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

FLOAT = torch.float64
FALSE_ALARM = 1e-5  # of one whole sequential test: over all its stages and all its components


def generator(seed: int = 0) -> torch.Generator:
    """A generator of its own for every test.

    >>> float(randn(1, seed=3)) == float(torch.randn(1, dtype=FLOAT, generator=generator(3)))
    True
    """
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal float64 numbers that depend on the seed alone.

    >>> randn(2, 3).shape, randn(1).dtype
    (torch.Size([2, 3]), torch.float64)
    """
    return torch.randn(*shape, dtype=FLOAT, generator=generator(seed))


def assert_exact(actual: Any, expected: Any) -> None:
    """Equal to 1e-10 relative: for everything in which nothing is random.

    >>> assert_exact(torch.ones(2, dtype=FLOAT), torch.full((2,), 1 + 1e-12, dtype=FLOAT))
    """
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def normal_log_prob(value: Tensor, mean: Tensor | float, variance: Tensor | float) -> Tensor:
    """log N(value; mean, variance).

    >>> round(float(normal_log_prob(torch.tensor(1.0), 0.0, 1.0)), 6)
    -1.418939
    """
    variance = torch.as_tensor(variance, dtype=FLOAT)
    return -0.5 * (torch.log(2 * math.pi * variance) + (value - mean) ** 2 / variance)


def normal_kl(
    mean: Tensor, variance: Tensor, to_mean: Tensor | float, to_variance: Tensor | float
) -> Tensor:
    """KL(N(mean, variance) || N(to_mean, to_variance)), coordinate by coordinate.

    >>> normal_kl(torch.tensor(1.0), torch.tensor(1.0), 0.0, 1.0)
    tensor(0.5000, dtype=torch.float64)
    """
    to_variance = torch.as_tensor(to_variance, dtype=FLOAT)
    return 0.5 * (
        variance / to_variance
        + (to_mean - mean) ** 2 / to_variance
        - 1
        - torch.log(variance / to_variance)
    )


def integrate(
    log_density: Callable[[Tensor], Tensor], low: float, high: float, num: int = 40_001
) -> Quadrature:
    """A one-dimensional density known up to its constant, by the trapezoid rule (spectrally exact
    when the tails fit).

    >>> q = integrate(lambda t: -0.5 * (t - 3) ** 2, -9.0, 15.0)
    >>> round(q.mean, 10), round(q.variance, 10), abs(q.log_z - 0.5 * math.log(2 * math.pi)) < 1e-12
    (3.0, 1.0, True)
    """
    grid = torch.linspace(low, high, num, dtype=FLOAT)
    log_p = log_density(grid)
    if float(torch.maximum(log_p[0], log_p[-1]) - log_p.max()) > -40:
        raise ValueError("the tails do not fit between low and high")
    log_z = torch.logsumexp(log_p, 0) + math.log((high - low) / (num - 1))
    return Quadrature(grid, torch.softmax(log_p, 0), float(log_z))


@dataclass(frozen=True)
class Quadrature:
    """A density on a grid."""

    grid: Tensor
    weights: Tensor
    log_z: float

    def expect(self, values: Tensor) -> float:
        return float((self.weights * values).sum())

    @property
    def mean(self) -> float:
        return self.expect(self.grid)

    @property
    def variance(self) -> float:
        return self.expect((self.grid - self.mean) ** 2)

    def cdf(self, at: float) -> float:
        below = self.grid <= at
        inside = self.weights[below].sum()
        # half a cell belongs to each side of the last point below
        return float(inside - 0.5 * self.weights[below][-1]) if bool(below.any()) else 0.0


# --- sequential tests ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What a sequential test found out."""

    accepted: bool
    p_value: float
    num: int
    mean: Tensor
    expected: Tensor
    error: Tensor  # the standard error of the mean

    def __bool__(self) -> bool:
        return self.accepted


def mean_test(
    draw: Callable[[int, torch.Generator], Tensor],  # -> (num, *shape) independent draws
    expected: Any,
    *,
    resolution: Any,
    seed: int = 0,
    num: int = 4096,
    max_num: int = 2**22,
) -> Verdict:
    """Is E[draw] = expected, in every component? False alarm at most 1e-5 over all stages and
    components.

    The sample doubles until the standard error is below `resolution` (so that an error of some six
    resolutions cannot pass) and the p-value is not in doubt; at every stage p < 1e-5/stages
    rejects.

    >>> good, bad = (
    ...     mean_test(
    ...         lambda n, g: shift + torch.randn(n, dtype=FLOAT, generator=g), 0.0, resolution=0.01
    ...     )
    ...     for shift in (0.0, 0.08)
    ... )
    >>> bool(good), bool(bad)
    (True, False)
    """
    expected = torch.as_tensor(expected, dtype=FLOAT)
    resolution = torch.as_tensor(resolution, dtype=FLOAT)
    source = generator(seed)
    stages = 1 + max(0, math.ceil(math.log2(max_num / num)))
    total, mean, squares = 0, torch.zeros_like(expected), torch.zeros_like(expected)
    verdict: Verdict | None = None
    for stage in range(stages):
        fresh = num if stage == 0 else total
        draws = draw(fresh, source).detach().to(FLOAT)
        if draws.shape != (fresh, *expected.shape):
            raise ValueError(
                f"draw must return {(fresh, *expected.shape)}, got {tuple(draws.shape)}"
            )
        batch_mean = draws.mean(0)
        # Chan's merge of two samples' moments
        squares = (
            squares
            + ((draws - batch_mean) ** 2).sum(0)
            + (batch_mean - mean) ** 2 * total * fresh / (total + fresh)
        )
        mean = mean + (batch_mean - mean) * fresh / (total + fresh)
        total += fresh
        error = torch.sqrt(squares / (total - 1) / total)
        gap = (mean - expected).abs()
        rounding = 1e-12 * (1 + expected.abs())  # a draw without variance must equal its mean
        z = torch.where(gap <= rounding, 0.0, gap / torch.clamp(error, min=1e-300))
        p_value = min(1.0, float(torch.special.erfc(z / math.sqrt(2)).min()) * expected.numel())
        verdict = Verdict(True, p_value, total, mean, expected, error)
        if p_value < FALSE_ALARM / stages:
            return Verdict(False, p_value, total, mean, expected, error)
        if bool((error <= resolution).all()) and p_value > 0.01:
            return verdict
    assert verdict is not None
    if bool((verdict.error > resolution).any()):
        raise RuntimeError(
            f"inconclusive: the standard error stayed above {resolution} after {verdict.num} draws"
        )
    return verdict


def uniform_cells(u: Tensor, num: int = 8) -> Tensor:
    """Indicators of the `num` equal cells of [0, 1]: under uniformity each has mean 1/num.

    >>> uniform_cells(torch.tensor([0.1, 0.9]), 2)
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    cell = (u * num).long().clamp(0, num - 1)
    return torch.nn.functional.one_hot(cell, num).to(FLOAT)


def standard_normal_features(z: Tensor) -> Tensor:
    """z, z^2 and the cells of Phi(z): their means are 0, 1 and 1/8 each if and (nearly) only if z ~
    N(0, 1).

    >>> standard_normal_features(torch.zeros(5)).shape
    torch.Size([5, 10])
    """
    u = torch.special.ndtr(z.to(FLOAT))
    return torch.cat([z[:, None], z[:, None] ** 2, uniform_cells(u)], 1).to(FLOAT)


STANDARD_NORMAL_MEANS = torch.tensor([0.0, 1.0] + [1 / 8] * 8, dtype=FLOAT)


# --- SM-2: one covariate, one parameter, one training pair --------------------------------------


@dataclass(frozen=True)
class LinearGaussian:
    """SM-2's model with all its closed forms.

    >>> m = LinearGaussian()
    >>> mean, variance = m.reactive(0.0)
    >>> abs(variance - m.proactive(0.0)[1] - m.tau2 * (m.mu**2 + m.v)) < 1e-12
    True
    """

    eps: float = 0.3
    sx: float = 1.3
    sd: float = 0.7
    sy: float = 0.5
    st: float = 1.1
    x1: float = 0.8
    y1: float = 1.2

    # the clean posterior N(mu, v)
    @property
    def mu(self) -> float:
        return self.st**2 * self.x1 * self.y1 / (self.sy**2 + self.st**2 * self.x1**2)

    @property
    def v(self) -> float:
        return self.st**2 * self.sy**2 / (self.sy**2 + self.st**2 * self.x1**2)

    # the latent clean input given x': N(lam x', tau2)
    @property
    def lam(self) -> float:
        return (1 + self.eps) * self.sx**2 / ((1 + self.eps) ** 2 * self.sx**2 + self.sd**2)

    @property
    def tau2(self) -> float:
        return (1 - self.lam * (1 + self.eps)) * self.sx**2

    def reactive(self, x_adv: float) -> tuple[float, float]:
        """The mean and variance of y given x' (identity 1)."""
        variance = self.sy**2 + self.lam**2 * x_adv**2 * self.v + self.tau2 * (self.mu**2 + self.v)
        return self.lam * x_adv * self.mu, variance

    def online_mean(self, x_adv: float, c: float) -> float:
        """E[y | x'] when the channel is x' = x + c t + v and t is updated by x' (identity 2)."""
        spread = self.sx**2 + self.sd**2
        v_on = 1 / (1 / self.v + c**2 / spread)
        mu_on = v_on * (self.mu / self.v + c * x_adv / spread)
        return self.sx**2 / spread * (x_adv * mu_on - c * (mu_on**2 + v_on))

    def offline_mean(self, x_adv: float, c: float) -> float:
        """E[y | x'] for the same channel when t keeps its clean posterior (identity 2)."""
        return (
            self.sx**2 / (self.sx**2 + self.sd**2) * (x_adv * self.mu - c * (self.mu**2 + self.v))
        )

    def log_marginal(self, t: Tensor) -> Tensor:
        """log r_t(y1 | x1), the channel-marginalised likelihood (identity 8)."""
        y = torch.as_tensor(self.y1, dtype=FLOAT)
        return normal_log_prob(y, (1 + self.eps) * t * self.x1, self.sy**2 + t**2 * self.sd**2)

    def mean_log_likelihood(self, t: Tensor) -> Tensor:
        """E log p(y1 | x', t) over the channel: the surrogate's term."""
        residual = self.y1 - (1 + self.eps) * t * self.x1
        return -0.5 * math.log(2 * math.pi * self.sy**2) - (residual**2 + t**2 * self.sd**2) / (
            2 * self.sy**2
        )

    @cached_property
    def proactive_posterior(self) -> Quadrature:
        """p_R(t | D), which is not Gaussian, by quadrature."""
        return integrate(
            lambda t: self.log_marginal(t) + normal_log_prob(t, 0.0, self.st**2),
            -14 * self.st,
            14 * self.st,
        )

    def proactive(self, x_adv: float) -> tuple[float, float]:
        """The mean and variance of y given x' under the proactive posterior (identity 8)."""
        posterior = self.proactive_posterior
        return x_adv * posterior.mean, self.sy**2 + x_adv**2 * posterior.variance


# --- linear regression: conjugate, and its Gibbs posterior under a noise channel ----------------


@dataclass(frozen=True)
class LinearRegression:
    """y ~ N(theta.x, scale^2), theta ~ N(0, prior_scale^2 I), channel x' = gain x + N(0, noise^2
    I).

    The surrogate ELBO's optimum q* is Gaussian (identity 12); with gain 1 and noise 0 it is the
    conjugate posterior.

    >>> one = LinearRegression(
    ...     torch.tensor([[0.8]], dtype=FLOAT), torch.tensor([1.2], dtype=FLOAT), 0.5, 1.1
    ... )
    >>> sm2 = LinearGaussian()
    >>> abs(float(one.mean[0]) - sm2.mu) < 1e-12, abs(float(one.covariance[0, 0]) - sm2.v) < 1e-12
    (True, True)
    """

    x: Tensor  # (N, d)
    y: Tensor  # (N,)
    scale: float
    prior_scale: float
    gain: float = 1.0
    noise: float = 0.0

    @cached_property
    def precision(self) -> Tensor:  # (d, d)
        num, dim = self.x.shape
        eye = torch.eye(dim, dtype=FLOAT)
        gram = self.gain**2 * self.x.T @ self.x + num * self.noise**2 * eye
        return eye / self.prior_scale**2 + gram / self.scale**2

    @cached_property
    def covariance(self) -> Tensor:
        covariance: Tensor = torch.linalg.inv(self.precision)
        return covariance

    @cached_property
    def mean(self) -> Tensor:
        mean: Tensor = self.covariance @ (self.gain * self.x.T @ self.y / self.scale**2)
        return mean

    @cached_property
    def log_z(self) -> float:
        """log of the integral of p(theta) exp(-sum of the channel-averaged losses); the evidence if
        noise is 0."""
        num, dim = self.x.shape
        quadratic = float(
            self.mean @ self.precision @ self.mean - (self.y**2).sum() / self.scale**2
        )
        log_det = float(torch.logdet(self.precision))
        return 0.5 * (
            quadratic - num * math.log(2 * math.pi * self.scale**2) - log_det
        ) - dim * math.log(self.prior_scale)

    def surrogate(self, mean: Tensor, scale: Tensor) -> Tensor:
        """The surrogate ELBO of a mean-field Gaussian, written out term by term (not through
        log_z)."""
        num = len(self.y)
        residual = self.y - self.gain * self.x @ mean
        second = (residual**2).sum() + self.gain**2 * ((self.x**2) @ scale**2).sum()
        second = second + num * self.noise**2 * (mean**2 + scale**2).sum()
        log_likelihood = -0.5 * num * math.log(2 * math.pi * self.scale**2) - second / (
            2 * self.scale**2
        )
        return log_likelihood - normal_kl(mean, scale**2, 0.0, self.prior_scale**2).sum()

    def kl_to_optimum(self, mean: Tensor, scale: Tensor) -> Tensor:
        """KL(mean-field Gaussian || q*)."""
        optimum = torch.distributions.MultivariateNormal(self.mean, self.covariance)
        q = torch.distributions.MultivariateNormal(mean, torch.diag(scale**2))
        return torch.distributions.kl_divergence(q, optimum)

    def sample(self, num: int, source: torch.Generator) -> Tensor:  # (num, d)
        draws = torch.randn(num, len(self.mean), dtype=FLOAT, generator=source)
        factor: Tensor = torch.linalg.cholesky(self.covariance)
        return self.mean + draws @ factor.T


# --- linear worst cases -------------------------------------------------------------------------


def dual_norm(direction: Tensor, norm: str) -> Tensor:
    """max of direction.d over the unit ball.

    >>> dual_norm(torch.tensor([3.0, -4.0]), "l2"), dual_norm(torch.tensor([3.0, -4.0]), "linf")
    (tensor(5.), tensor(7.))
    """
    return direction.norm(dim=-1) if norm == "l2" else direction.abs().sum(-1)


def worst_squared_error(
    theta: Tensor, x: Tensor, y: Tensor, eps: float, norm: str = "l2"
) -> Tensor:
    """max of (y - theta.(x + d))^2 over the ball: (|r| + eps |theta|_*)^2 (identity 16).

    >>> worst_squared_error(torch.tensor([3.0, 4.0]), torch.zeros(1, 2), torch.tensor([-1.0]), 2.0)
    tensor([121.])
    """
    return ((y - x @ theta).abs() + eps * dual_norm(theta, norm)) ** 2


def worst_inputs(theta: Tensor, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """The point of the L2 ball at which worst_squared_error is reached.

    >>> worst_inputs(torch.tensor([3.0, 4.0]), torch.zeros(1, 2), torch.tensor([-1.0]), 5.0)
    tensor([[3., 4.]])
    """
    length: Tensor = theta.norm()
    return x - eps * torch.sign(y - x @ theta)[:, None] * theta / length


def worst_shift(direction: Tensor, x: Tensor, eps: float, box: tuple[float, float]) -> Tensor:
    """argmax of direction.d over |d|_2 <= eps and x + d in the box: d = clip(t direction) with t
    found by bisection.

    >>> worst_shift(torch.tensor([1.0, 1.0]), torch.tensor([[1.0, 0.0]]), 0.5, (0.0, 1.0))
    tensor([[0.0000, 0.5000]])
    """
    low, high = box[0] - x, box[1] - x

    def clipped(t: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(t * direction, low), high)

    lower, upper = (
        torch.zeros(len(x), 1, dtype=x.dtype),
        torch.full((len(x), 1), 1e9, dtype=x.dtype),
    )
    for _ in range(200):
        middle = 0.5 * (lower + upper)
        inside = clipped(middle).norm(dim=-1, keepdim=True) <= eps
        lower, upper = torch.where(inside, middle, lower), torch.where(inside, upper, middle)
    return clipped(lower)


# --- channels with known answers ----------------------------------------------------------------


class GaussianRows:
    """log N(x'_b; centre_n, sigma^2 I) for every pair, as (N, B)."""

    def __init__(self, centres: Tensor, sigma: float) -> None:
        self.centres, self.sigma = centres, sigma

    def log_prob(self, x_adv: Tensor) -> Tensor:
        gap = x_adv.flatten(1)[None] - self.centres.flatten(1)[:, None]
        constant = gap.shape[-1] * math.log(2 * math.pi * self.sigma**2)
        return -0.5 * ((gap**2).sum(-1) / self.sigma**2 + constant)


@dataclass(frozen=True)
class AffineChannel:
    """SM-2's channel x' = (1 + eps) x + v, v ~ N(0, sigma^2 I).

    >>> AffineChannel(1.0, 0.5).density(None, torch.zeros(3, 2)).log_prob(torch.zeros(4, 2)).shape
    torch.Size([3, 4])
    """

    eps: float
    sigma: float

    def sample(
        self,
        predict: Any,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        noise = torch.randn(x.shape, dtype=x.dtype, generator=generator)
        return (1 + self.eps) * x + self.sigma * noise

    def density(self, predict: Any, x: Tensor, y: Tensor | None = None) -> GaussianRows:
        return GaussianRows((1 + self.eps) * x, self.sigma)


@dataclass(frozen=True)
class ShiftChannel:
    """x' = x + c theta + v for a one-parameter linear model: theta is the prediction at 1, all that
    a channel may see.

    >>> class Double:
    ...     def __call__(self, x):
    ...         return torch.distributions.Normal(2 * x[..., 0], 1.0)
    >>> ShiftChannel(0.5).sample(Double(), torch.zeros(3, 1)).flatten()
    tensor([1., 1., 1.])
    """

    c: float
    sigma: float = 0.0

    def centres(self, predict: Any, x: Tensor) -> Tensor:
        theta: Tensor = predict(torch.ones_like(x)).mean
        return x + self.c * theta.reshape(x.shape)

    def sample(
        self,
        predict: Any,
        x: Tensor,
        y: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        noise = torch.randn(x.shape, dtype=x.dtype, generator=generator) if self.sigma else 0.0
        return self.centres(predict, x) + self.sigma * noise

    def density(self, predict: Any, x: Tensor, y: Tensor | None = None) -> GaussianRows:
        return GaussianRows(self.centres(predict, x), self.sigma)

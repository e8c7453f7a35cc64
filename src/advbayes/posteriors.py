"""Distributions over theta, trained here or sampled elsewhere (section 3.3)."""

from __future__ import annotations

import copy
import itertools
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from advbayes import checks
from advbayes.model import BayesianModel, check_prior_scale
from advbayes.seeds import GlobalStream, normal_like, seed_for


class Posterior(nn.Module, ABC):
    """A distribution over theta that `fit` can train: the base class of all posteriors.

    Your own subclass sets `num_params` and defines `noise`, `at`, `kl` and `mean`.

    >>> from advbayes import BayesianModel, Categorical, Noise, fit
    >>> class FixedScale(Posterior):
    ...     def __init__(self, model, scale=0.1):
    ...         super().__init__()
    ...         self.mu, self.scale = nn.Parameter(model.initial_theta()), scale
    ...         self.num_params = model.num_params
    ...
    ...     def noise(self, num, *, generator=None):
    ...         return torch.randn(num, self.num_params, generator=generator)
    ...
    ...     def at(self, noise):
    ...         return self.mu + self.scale * noise
    ...
    ...     def kl(self, prior_scale):  # up to a constant
    ...         return 0.5 * self.mu.square().sum() / prior_scale**2
    ...
    ...     @property
    ...     def mean(self):
    ...         return self.mu.detach()
    >>> model = BayesianModel(nn.Linear(2, 2), Categorical())
    >>> data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
    >>> fit(model, FixedScale(model), Noise(0.1), data, steps=2).steps
    2
    """

    num_params: int

    @abstractmethod
    def noise(self, num: int, *, generator: torch.Generator | None = None) -> Tensor:
        """All the randomness of `num` thetas."""

    @abstractmethod
    def at(self, noise: Tensor) -> Tensor:
        """theta = f(noise): the reparameterisation, (num, P), differentiable in the posterior."""

    def rsample(self, num: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """`num` thetas, (num, P), differentiable in the posterior."""
        return self.at(self.noise(checks.count("num", num), generator=generator))

    @abstractmethod
    def kl(self, prior_scale: float) -> Tensor: ...

    @property
    @abstractmethod
    def mean(self) -> Tensor: ...

    @torch.no_grad()
    def sample(self, num: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """`num` thetas without a gradient, (num, P)."""
        return self.rsample(num, generator=generator).detach().clone()

    def extra_repr(self) -> str:
        return f"num_params={self.num_params}"

    def forward(self, *args: Any) -> Any:
        raise checks.InputTypeError("a posterior is not called; use rsample, sample or kl")


def check_over(model: BayesianModel, posterior: Posterior) -> None:
    """Refuse what is no posterior over the model's parameters."""
    num_params = getattr(posterior, "num_params", None)
    if isinstance(posterior, type) or not isinstance(num_params, int):
        raise checks.InputTypeError(
            "posterior must be a posterior such as MeanField(model)", got=posterior
        )
    if num_params != model.num_params:
        raise checks.InputError(
            f"posterior must be over the model's {model.num_params} parameters, got one over "
            f"{num_params}"
        )


def _start(model: BayesianModel, init: Tensor | nn.Module | None) -> Tensor:
    checks.instance("model", model, BayesianModel, "a BayesianModel")
    if init is None:
        return model.initial_theta()
    if isinstance(init, nn.Module):
        return model.theta_of(init)
    model._check_theta("init", init, 1)
    return init.detach().clone()


def _inverse_softplus(scale: float) -> float:
    return scale + math.log(-math.expm1(-scale))


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least: a sum over all parameters leaves the range of float16, and slogdet knows
    nothing narrower."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class MeanField(Posterior):
    """q(theta) = N(mu, diag(softplus(rho)^2)), started at the net's own weights.

    >>> from advbayes import BayesianModel, Categorical
    >>> posterior = MeanField(BayesianModel(nn.Linear(4, 3), Categorical()))
    >>> posterior.rsample(2).shape, bool(posterior.kl(1.0) > 0)
    (torch.Size([2, 15]), True)
    """

    def __init__(
        self, model: BayesianModel, init_scale: float = 0.02, init: Tensor | nn.Module | None = None
    ) -> None:
        super().__init__()
        checks.number("init_scale", init_scale, low=0, open_low=True)
        self.mu = nn.Parameter(_start(model, init))
        self.rho = nn.Parameter(torch.full_like(self.mu, _inverse_softplus(init_scale)))
        self.num_params = model.num_params

    @property
    def scale(self) -> Tensor:
        """Standard deviations, (P,)."""
        return functional.softplus(self.rho)

    @property
    def mean(self) -> Tensor:
        return self.mu.detach()

    def noise(self, num: int, *, generator: torch.Generator | None = None) -> Tensor:
        return normal_like(self.mu, generator, (num, self.num_params))

    def at(self, noise: Tensor) -> Tensor:
        return torch.addcmul(self.mu, self.scale, noise)

    def kl(self, prior_scale: float) -> Tensor:
        """0.5 sum((s^2 + mu^2)/t^2 - 1 - ln(s^2/t^2)), over every parameter."""
        prior_scale = checks.number("prior_scale", prior_scale, low=0, open_low=True)
        mu, scale = _wide(self.mu), functional.softplus(_wide(self.rho))
        constant = self.num_params * (math.log(prior_scale) - 0.5)
        squares = (scale.dot(scale) + mu.dot(mu)) / (2 * prior_scale**2)
        return squares - scale.log().sum() + constant


class PointMass(Posterior):
    """One theta: maximum a posteriori. `kl` is -ln p(theta) without its constant.

    >>> from advbayes import BayesianModel, Categorical
    >>> posterior = PointMass(BayesianModel(nn.Linear(4, 3), Categorical()))
    >>> torch.equal(*posterior.sample(2))
    True
    """

    def __init__(self, model: BayesianModel, init: Tensor | nn.Module | None = None) -> None:
        super().__init__()
        self.theta = nn.Parameter(_start(model, init))
        self.num_params = model.num_params

    @property
    def mean(self) -> Tensor:
        return self.theta.detach()

    def noise(self, num: int, *, generator: torch.Generator | None = None) -> Tensor:
        return self.theta.new_empty(num, 0)

    def at(self, noise: Tensor) -> Tensor:
        return self.theta.expand(len(noise), -1)

    def kl(self, prior_scale: float) -> Tensor:
        """0.5 |theta|^2 / t^2; zero for the flat prior."""
        theta = _wide(self.theta)
        return 0.5 * theta.dot(theta) / check_prior_scale(prior_scale) ** 2


class _Members(Posterior):
    """Equal weights on the rows of `thetas`, each drawn as often as any other up to one."""

    thetas: Tensor  # (M, P)

    @property
    def mean(self) -> Tensor:
        return self.thetas.detach().mean(0)

    def noise(self, num: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Indices into the members; all of them in order where num = M."""
        total, device = len(self.thetas), self.thetas.device
        if num == total:
            return torch.arange(total, device=device)
        rounds = [
            torch.randperm(total, generator=generator, device=device)
            for _ in range(-(-num // total))
        ]
        return torch.cat(rounds)[:num]

    def at(self, noise: Tensor) -> Tensor:
        return self.thetas[noise]

    def extra_repr(self) -> str:
        return f"num={len(self.thetas)}, num_params={self.num_params}"


class Ensemble(_Members):
    """Equal-weight point masses from independent starts, each drawn as often as any other.

    `kl` is the members' mean -ln p(theta) without its constant: each is a MAP estimate.

    >>> from advbayes import BayesianModel, Categorical
    >>> Ensemble(BayesianModel(nn.Linear(4, 3), Categorical()), num=5).sample(5).shape
    torch.Size([5, 15])
    """

    def __init__(
        self, model: BayesianModel, num: int = 5, seed: int = 0, init: Tensor | None = None
    ) -> None:
        super().__init__()
        checks.count("num", num)
        if init is not None:
            model._check_theta("init", init, 2)
            members = init.detach().clone()
        else:
            seeds = [seed_for(seed, "member", i) for i in range(num)]
            members = torch.stack([_reinitialised(model, each) for each in seeds])
            if any(torch.equal(a, b) for a, b in itertools.combinations(members, 2)):
                raise checks.InputError(
                    "net must have layers with reset_parameters to draw members from, got equal "
                    "members; pass init="
                )
        self.thetas = nn.Parameter(members)
        self.num_params = model.num_params

    def kl(self, prior_scale: float) -> Tensor:
        """mean_m 0.5 |theta_m|^2 / t^2."""
        squares = _wide(self.thetas).square().sum() / len(self.thetas)
        return 0.5 * squares / check_prior_scale(prior_scale) ** 2


def _reinitialised(model: BayesianModel, seed: int) -> Tensor:
    """The net's weights drawn anew by its layers' own rule, off the global generator."""
    net = copy.deepcopy(model.net)
    with GlobalStream(seed):
        for layer in net.modules():
            reset = getattr(layer, "reset_parameters", None)
            if callable(reset):
                reset()
    return model.theta_of(net)


class LowRank(Posterior):
    """q(theta) = N(mu, F F' + diag(softplus(rho)^2)) with F of `rank` columns.

    >>> from advbayes import BayesianModel, Categorical
    >>> LowRank(BayesianModel(nn.Linear(4, 3), Categorical()), rank=2).rsample(3).shape
    torch.Size([3, 15])
    """

    def __init__(
        self,
        model: BayesianModel,
        rank: int = 5,
        init_scale: float = 0.02,
        init: Tensor | nn.Module | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        checks.count("rank", rank)
        checks.number("init_scale", init_scale, low=0, open_low=True)
        self.mu = nn.Parameter(_start(model, init))
        self.rho = nn.Parameter(torch.full_like(self.mu, _inverse_softplus(init_scale)))
        generator = torch.Generator(self.mu.device).manual_seed(seed_for(seed, "factor"))
        factor = normal_like(self.mu, generator, (model.num_params, rank))
        # a zero factor is a saddle point
        self.factor = nn.Parameter(factor * (init_scale / math.sqrt(rank)))
        self.num_params = model.num_params

    @property
    def mean(self) -> Tensor:
        return self.mu.detach()

    def noise(self, num: int, *, generator: torch.Generator | None = None) -> Tensor:
        columns = self.num_params + self.factor.shape[1]
        return normal_like(self.mu, generator, (num, columns))

    def at(self, noise: Tensor) -> Tensor:
        diagonal, low = torch.split(noise, [self.num_params, self.factor.shape[1]], dim=1)
        with self._own_precision():
            along = low @ self.factor.T
        return self.mu + functional.softplus(self.rho) * diagonal + along

    def _own_precision(self) -> torch.autocast:
        """Under `torch.autocast` it is layers that are to be of lower precision, not thetas."""
        return torch.autocast(self.mu.device.type, enabled=False)

    def extra_repr(self) -> str:
        return f"rank={self.factor.shape[1]}, {super().extra_repr()}"

    def kl(self, prior_scale: float) -> Tensor:
        """0.5 [(tr C + |mu|^2)/t^2 - P + P ln t^2 - ln det C], C = F F' + D."""
        prior_scale = checks.number("prior_scale", prior_scale, low=0, open_low=True)
        mu, factor = _wide(self.mu), _wide(self.factor)
        variance = functional.softplus(_wide(self.rho)).square()
        with self._own_precision():
            inner = factor.T @ (factor / variance.unsqueeze(-1))
        eye = torch.eye(inner.shape[0], dtype=inner.dtype, device=inner.device)
        log_det: Tensor = variance.log().sum() + torch.linalg.slogdet(eye + inner)[1]
        squares = variance.sum() + factor.square().sum() + mu.dot(mu)
        constant = self.num_params * (2 * math.log(prior_scale) - 1)
        return 0.5 * (squares / prior_scale**2 + constant - log_det)


class Samples(_Members):
    """Given thetas, from MCMC or elsewhere: they predict and purify, but are not trained.

    >>> Samples(torch.randn(8, 15)).sample(3).shape
    torch.Size([3, 15])
    """

    def __init__(self, thetas: Tensor) -> None:
        super().__init__()
        if not isinstance(thetas, Tensor) or thetas.ndim != 2 or not thetas.numel():
            raise checks.InputError("thetas must be a non-empty tensor of shape (S, P)", got=thetas)
        self.register_buffer("thetas", checks.finite("thetas", thetas.detach().clone()))
        self.num_params = thetas.shape[1]

    def kl(self, prior_scale: float) -> Tensor:
        raise checks.InputTypeError(
            "Samples has no kl: single thetas have no density. Train a MeanField or LowRank "
            "started at their mean"
        )

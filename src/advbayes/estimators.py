"""scikit-learn estimators: a posterior trained through a channel, behind `fit`, `predict` and `predict_proba`.

They go where scikit-learn's own do (pipelines, cross-validation, grid search), and what they predict with is a Predictor, so that
everything in this package can attack it: `evaluate(estimator.predictor_, estimator.as_tensors(X, y), attacks=...)`.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from advbayes import checks
from advbayes.channels import Noise
from advbayes.likelihoods import Categorical, Gaussian, Likelihood
from advbayes.model import BayesianModel
from advbayes.networks import mlp
from advbayes.objectives import ChannelELBO
from advbayes.posteriors import MeanField
from advbayes.predictive import PosteriorPredictive
from advbayes.seeds import generator_for
from advbayes.training import fit
from advbayes.types import Channel


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """What both tasks share. Parameters are kept as given and looked at by `fit`, as scikit-learn wants it."""

    def __init__(
        self,
        channel: Channel | None = None,
        *,
        net: nn.Module | None = None,
        hidden: tuple[int, ...] = (16, 16),
        event_shape: tuple[int, ...] | None = None,
        prior_scale: float = 1.0,
        kl_weight: float = 1.0,
        epochs: float = 200,
        batch_size: int = 128,
        lr: float = 1e-2,
        num_thetas: int = 20,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.channel = channel
        self.net = net
        self.hidden = hidden
        self.event_shape = event_shape
        self.prior_scale = prior_scale
        self.kl_weight = kl_weight
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.num_thetas = num_thetas
        self.random_state = random_state

    def _train(self, x: Tensor, y: Tensor, num_outputs: int, likelihood: Likelihood, last: nn.Module | None = None) -> None:
        """Build, train, draw thetas. After Ctrl-C the estimator holds what was trained and the interrupt goes on."""
        checks.count("num_thetas", self.num_thetas)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        net = self._own_net(x, num_outputs, seed)
        self.model_ = BayesianModel(net if last is None else nn.Sequential(net, last), likelihood, self.prior_scale)
        self.posterior_ = MeanField(self.model_)
        self.result_ = fit(
            self.model_,
            self.posterior_,
            Noise(0.0) if self.channel is None else copy.deepcopy(self.channel),  # a learned one is trained
            (x, y),
            objective=ChannelELBO(len(x), kl_weight=self.kl_weight),
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            seed=seed,
        )
        thetas = self.posterior_.sample(self.num_thetas, generator=generator_for(seed, "thetas"))
        self.predictor_ = PosteriorPredictive(self.model_, thetas)
        if self.result_.interrupted:
            raise KeyboardInterrupt

    def _own_net(self, x: Tensor, num_outputs: int, seed: int) -> nn.Module:
        if self.net is not None:
            if not isinstance(self.net, nn.Module):
                raise TypeError(f"net must be a torch.nn.Module with {num_outputs} outputs, got {checks.describe(self.net)}")
            net = copy.deepcopy(self.net).to(x.dtype)
            with torch.no_grad():
                shape = tuple(net(x[:1]).shape)
            if shape != (1, num_outputs):
                raise ValueError(f"net must give {num_outputs} outputs for this y, got shape {shape} for one input")
            return net
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = mlp(x[0].numel(), num_outputs, tuple(self.hidden))
        return (nn.Sequential(nn.Flatten(), *layers) if x.ndim > 2 else layers).to(x.dtype)

    def _taken(self, X: ArrayLike, y: ArrayLike, **settings: Any) -> tuple[Tensor, NDArray[Any]]:
        values, wanted = validate_data(self, X, y, dtype=[np.float64, np.float32], **settings)
        self._dtype = torch.float32 if values.dtype == np.float32 else torch.float64
        return self._inputs(values), wanted

    def _inputs(self, values: NDArray[Any]) -> Tensor:
        """X as the network sees it: float32 where X was that for `fit`, else float64."""
        x = torch.tensor(values, dtype=self._dtype)
        if self.event_shape is None:
            return x
        if math.prod(self.event_shape) != x.shape[1]:
            raise ValueError(f"event_shape must have as many entries as X has features ({x.shape[1]}), got {self.event_shape}")
        return x.view(len(x), *self.event_shape)

    def _checked(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self, "predictor_")
        return self._inputs(validate_data(self, X, reset=False, dtype=[np.float64, np.float32]))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.random_state is None
        return tags


class RobustClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A Bayesian classifier trained through a channel (absent: without an adversary).

    `net` is a module with an output for each class (absent: fully connected, with layers as in `hidden`); `event_shape` is the
    shape in which it wants a row of X. eps and sigma of the channel are in the units of X: scale before, in a pipeline.

    >>> from sklearn.datasets import load_iris
    >>> from advbayes import AttackChannel, L2, one_step
    >>> X, y = load_iris(return_X_y=True)
    >>> robust = RobustClassifier(AttackChannel(one_step(L2(0.3)), sigma=0.1), epochs=60, random_state=0).fit(X, y)
    >>> robust.predict_proba(X[:2]).shape, bool(robust.score(X, y) > 0.85)
    ((2, 3), True)
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train from the beginning; `classes_`, `model_`, `posterior_`, `predictor_` and `result_` are there afterwards."""
        x, labels = self._taken(X, y)
        check_classification_targets(labels)
        self.classes_, index = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least two classes, got one class: {self.classes_.tolist()}")
        self._train(x, torch.as_tensor(index, dtype=torch.long), len(self.classes_), Categorical())
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:  # (B, C)
        """The posterior predictive's probabilities, in the order of `classes_`."""
        x = self._checked(X)
        probs: NDArray[np.float64] = self.predictor_(x).probs.double().numpy()  # type: ignore[attr-defined]
        return probs

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # (B,)
        """The likeliest class."""
        place = self.predict_proba(X).argmax(1)
        likeliest: NDArray[Any] = self.classes_[place]
        return likeliest

    def as_tensors(self, X: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
        """(x, y) as `predictor_` and attacks on it take them: y as the place in `classes_`."""
        x, labels = self._checked(X), np.asarray(y)
        unknown = sorted(set(labels.tolist()) - set(self.classes_.tolist()))
        if unknown:
            raise ValueError(f"y must hold classes seen by fit, got {unknown[:5]}")
        return x, torch.as_tensor(np.searchsorted(self.classes_, labels))


class RobustRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """Bayesian regression trained through a channel (absent: without an adversary), with Gaussian noise of learned scale.

    As `RobustClassifier`; predictions, and attacks on `predictor_`, are in the units of y.

    >>> from sklearn.datasets import load_diabetes
    >>> from advbayes import AttackChannel, L2, one_step, squared_error
    >>> X, y = load_diabetes(return_X_y=True, scaled=False)
    >>> X = (X - X.mean(0)) / X.std(0)
    >>> robust = RobustRegressor(AttackChannel(one_step(L2(0.3), squared_error), sigma=0.1), epochs=60, random_state=0).fit(X, y)
    >>> mean, std = robust.predict(X[:2], return_std=True)
    >>> mean.shape, bool(std.min() > 20), bool(robust.score(X, y) > 0.3)
    ((2,), True, True)
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train from the beginning; `model_`, `posterior_`, `predictor_` and `result_` are there afterwards."""
        x, wanted = self._taken(X, y, multi_output=True, y_numeric=True)
        self._columns = wanted.ndim == 2
        targets = self._targets(wanted)
        many = targets if targets.ndim == 2 else targets.unsqueeze(1)
        shift, spread = many.mean(0), many.std(0, correction=0)
        spread = torch.where(spread > 0, spread, 1.0)
        likelihood = Gaussian(tuple(spread.tolist()), learned=True, num_outputs=many.shape[1])
        self._train(x, targets, many.shape[1], likelihood, _units(shift, spread))
        return self

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:  # (B,) or (B, D); with return_std a pair of them
        """The predictive mean, and its standard deviation: the noise's and what the thetas differ by."""
        x = self._checked(X)
        prediction = self.predictor_(x)
        mean, std = (value.double().numpy() for value in (prediction.mean, prediction.variance.sqrt()))
        if self._columns and mean.ndim == 1:
            mean, std = mean[:, None], std[:, None]
        return (mean, std) if return_std else mean

    def as_tensors(self, X: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
        """(x, y) as `predictor_` and attacks on it take them."""
        return self._checked(X), self._targets(y)

    def _targets(self, y: ArrayLike) -> Tensor:  # (B,) or (B, D)
        targets = torch.tensor(np.asarray(y), dtype=self._dtype)
        return targets.squeeze(1) if targets.ndim == 2 and targets.shape[1] == 1 else targets

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _units(shift: Tensor, spread: Tensor) -> nn.Linear:
    """From standard units to those of y, a layer that is not trained: the prior is on the weights of the standardised problem."""
    layer = nn.Linear(len(shift), len(shift), dtype=shift.dtype).requires_grad_(False)
    layer.weight.copy_(spread.diag())
    layer.bias.copy_(shift)
    return layer

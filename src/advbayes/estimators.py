"""scikit-learn estimators: a posterior trained through a channel, behind `fit` and `predict`.

They go where scikit-learn's own do (pipelines, cross-validation, grid search), and what they
predict with is a Predictor, so that everything in this package can attack it:
`evaluate(estimator.predictor_, estimator.as_tensors(X, y), attacks=...)`, where `estimator.ball_`
is the adversary that it was trained against.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.pipeline import Pipeline
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn
from torch.distributions import Distribution

from advbayes import checks, metrics
from advbayes.adapters import Scaled
from advbayes.attacks import MultiStart, margin, pgd, squared_error
from advbayes.attacks.balls import Ball
from advbayes.channels import Noise
from advbayes.evaluation import score as scored
from advbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from advbayes.metrics.scores import class_probs
from advbayes.model import BayesianModel
from advbayes.networks import mlp
from advbayes.objectives import ChannelELBO
from advbayes.posteriors import Samples
from advbayes.predictive import PosteriorPredictive
from advbayes.purification import Purifier
from advbayes.runs import thetas_of
from advbayes.runs.named import make_ball, named_channel, named_posterior, schedule
from advbayes.seeds import GlobalStream, generator_for, seed_for
from advbayes.store import StoreError, bundle, nets, preprocessing, read_bundle
from advbayes.training import fit
from advbayes.types import Attack, Channel, Predictor

DEFENSES = ("proactive", "reactive", "both", "none")
CHANNELS = ("none", "noise", "at", "os", "os50", "mix", "pgd")


class _Reference(NamedTuple):
    """What the reactive defense purifies with, in the units that the net is trained in."""

    x: Tensor
    y: Tensor
    channel: Channel
    shift: Tensor
    spread: Tensor | None = None  # None: X as it is
    weights: Tensor | None = None  # None: all alike


@dataclass(eq=False, repr=False)
class _Estimator(BaseEstimator):  # type: ignore[misc]
    """What both tasks share. Parameters are kept as they came; `fit` looks at them."""

    _task: ClassVar[str]
    _columns = False  # whether y was a matrix

    channel: Channel | str | None = None
    _: KW_ONLY
    defense: str = "proactive"
    eps: float | Sequence[float] = 0.3
    units: str = "standardised"
    norm: str = "l2"
    indicators: Sequence[tuple[int | str, int | str]] | None = None
    sigma: float = 0.1
    posterior: str = "mean_field"
    net: nn.Module | None = None
    hidden: tuple[int, ...] = (16, 16)
    event_shape: tuple[int, ...] | None = None
    prior_scale: float = 1.0
    kl_weight: float = 1.0
    init_scale: float = 0.02
    epochs: float | None = None
    batch_size: int = 128
    lr: float | None = None
    decay: float | None = None
    num_thetas: int = 20
    abstain: float | None = None
    random_state: int | np.random.RandomState | None = None

    def _train(
        self,
        x: Tensor,
        y: Tensor,
        num_outputs: int,
        likelihood: Likelihood,
        weights: Tensor,
        last: nn.Linear | None = None,
    ) -> None:
        """Build, train, draw thetas. After Ctrl-C the estimator holds what was trained and the
        interrupt is raised again."""
        checks.count("num_thetas", self.num_thetas)
        checks.choice("defense", self.defense, DEFENSES)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        net = self._own_net(x, num_outputs, seed)
        inner = net if last is None else nn.Sequential(net, last)
        shift, spread = self._scaling(x, weights)
        self.ball_ = self._ball(x, spread)
        channel = self._channel(shift, spread)
        # Trained on standardised inputs where the channel is in those units; the same thetas then
        # answer for X as it is.
        self.model_ = model = BayesianModel(inner, likelihood, self.prior_scale)
        seen = x
        if spread is not None:
            seen = (x - shift) / spread
            whole = nn.Sequential(_affine(1 / spread, -shift / spread), inner)
            self.model_ = BayesianModel(whole, likelihood, self.prior_scale)
        self.posterior_ = named_posterior(
            self.posterior, model, seed=seed, init_scale=self.init_scale
        )
        proactive = self.defense in ("proactive", "both")
        self.result_ = fit(
            model,
            self.posterior_,
            copy.deepcopy(channel) if proactive else Noise(0.0),  # a learned one is trained
            (seen, y),
            objective=ChannelELBO(len(x), kl_weight=self.kl_weight),
            sample_weight=None if bool((weights == 1).all()) else weights,
            batch_size=self.batch_size,
            seed=seed,
            **schedule(self.epochs, self.lr, self.decay, x, self.batch_size)._asdict(),
        )
        thetas = self.posterior_.sample(self.num_thetas, generator=generator_for(seed, "thetas"))
        if self.posterior in ("point", "ensemble"):
            thetas = thetas_of(self.posterior_, self.num_thetas, seed_for(seed, "thetas"))
        self.thetas_ = thetas
        # layers around the net
        self._layout = (spread is not None, 0 if last is None else len(last.bias))
        self.predictor_: Predictor = PosteriorPredictive(self.model_, thetas)
        if self.defense in ("reactive", "both"):
            counted = weights > 0
            each = weights[counted]
            unequal = each if bool((each != each[0]).any()) else None
            reference = _Reference(seen[counted], y[counted], channel, shift, spread, unequal)
            self._purify(model, reference)
        if self.result_.interrupted:
            raise KeyboardInterrupt

    def _purify(self, model: BayesianModel, reference: _Reference) -> None:
        self._reference = reference
        x, y, channel, shift, spread, weights = reference
        purifier = Purifier(model, channel, self.thetas_, (x, y), "online")
        if weights is not None:
            purifier = purifier._weighed(weights)
        self.predictor_ = (
            purifier if spread is None else Scaled(purifier, 1 / spread, -shift / spread)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the fitted estimator as a bundle, without pickle; `load` gives it back.

        The history of the training (`result_`) is not in it.
        """
        save_pipeline(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, net: nn.Module | None = None) -> Self:
        """What `save` saved; a network with code of its own has to be given as `net`."""
        estimator = load_pipeline(path, net=net)
        if not isinstance(estimator, cls):
            raise StoreError(path, wanted=f"a {cls.__name__}", got=f"a {type(estimator).__name__}")
        return estimator

    def _scaling(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean and spread of each feature; no spread where X is taken as it is."""
        shift, spread = _moments(x, weights, "X", _names_of(self))
        as_it_is = self.event_shape is not None or self._own_channel is not None
        return shift, None if as_it_is else spread

    def _ball(self, x: Tensor, spread: Tensor | None) -> Ball:
        """The adversary in the units of X."""
        checks.choice("units", self.units, ("standardised", "raw"))
        checks.choice("norm", self.norm, ("l2", "linf"))
        unit = spread if self.units == "standardised" else None
        missing = self._missing(x)
        if np.ndim(self.eps) == 0:
            eps = float(self.eps)  # type: ignore[arg-type]
            return make_ball(self.norm, eps, scale=unit, indicators=missing)
        dtype = torch.float64 if spread is None else spread.dtype
        each = torch.as_tensor(np.asarray(self.eps), dtype=dtype)
        if each.shape != (self.n_features_in_,):
            raise checks.InputError(
                f"eps must be a number or hold one for each of {self.n_features_in_} features, "
                f"got {self.eps!r}"
            )
        each = each if unit is None else each * unit
        mask = None if bool((each > 0).all()) else each > 0
        scale = torch.where(each > 0, each, 1.0)
        return make_ball(self.norm, 1.0, mask=mask, scale=scale, indicators=missing)

    def _missing(self, x: Tensor) -> tuple[tuple[int, int, float], ...] | None:
        """Each imputed column, its indicator, and halfway between the two values of that."""
        names, pairs = _names_of(self), self.indicators
        if pairs is None:  # as SimpleImputer names them, behind the name of a ColumnTransformer
            mark = "missingindicator_"
            named = {name.replace(mark, "", 1): name for name in names if mark in name}
            pairs = [(name, named[name]) for name in names if name in named]
        triples = []
        for pair in pairs:
            places = [names.index(name) if name in names else name for name in pair]
            if not all(
                isinstance(place, (int, np.integer)) and 0 <= place < self.n_features_in_
                for place in places
            ):
                raise checks.InputError(
                    f"indicators must hold pairs of columns of X, by place (0 to "
                    f"{self.n_features_in_ - 1}) or name, got {pair!r}"
                )
            feature, indicator = map(int, places)
            low, high = (float(edge) for edge in x[:, indicator].aminmax())
            triples.append((feature, indicator, 0.5 * (low + high) if low < high else 0.5))
        return tuple(triples) or None

    @property
    def _own_channel(self) -> Channel | None:
        """A channel that came as such and not by its name."""
        return None if self.channel is None or isinstance(self.channel, str) else self.channel

    def _channel(self, shift: Tensor, spread: Tensor | None) -> Channel:
        """The channel, in the units that the net is trained in."""
        if self.channel is None:
            return Noise(0.0 if self.defense in ("proactive", "none") else self.sigma)
        if self._own_channel is not None:
            return self._own_channel
        name = checks.choice("channel", self.channel, CHANNELS)
        scale = self.ball_.scale
        missing = self.ball_.indicators
        if spread is not None:
            scale = (1.0 if scale is None else scale) / spread
            missing = missing and tuple(
                (feature, indicator, float((above - shift[indicator]) / spread[indicator]))
                for feature, indicator, above in missing
            )
        ball = make_ball(self.norm, self.ball_.eps, None, self.ball_.mask, scale, missing)
        return named_channel(name, ball, self.sigma, regression=self._task == "regression")

    def _own_net(self, x: Tensor, num_outputs: int, seed: int) -> nn.Module:
        if self.net is not None:
            wanted = f"a torch.nn.Module with {num_outputs} outputs"
            net = copy.deepcopy(checks.instance("net", self.net, nn.Module, wanted)).to(x.dtype)
            with torch.no_grad():
                shape = tuple(net(x[:1]).shape)
            if shape != (1, num_outputs):
                raise checks.InputError(
                    f"net must give {num_outputs} outputs for this y, got shape {shape} for one "
                    f"input"
                )
            return net
        try:
            widths = tuple(self.hidden)
        except TypeError:
            raise checks.InputTypeError(
                f"hidden must hold the width of each layer, such as (16, 16), got {self.hidden!r}"
            ) from None
        with GlobalStream(seed):
            layers = mlp(x[0].numel(), num_outputs, widths)
        return (nn.Sequential(nn.Flatten(), *layers) if x.ndim > 2 else layers).to(x.dtype)

    def _taken(self, X: ArrayLike, y: ArrayLike, **settings: Any) -> tuple[Tensor, NDArray[Any]]:
        values, wanted = validate_data(self, X, y, dtype=[np.float64, np.float32], **settings)
        self._dtype = torch.float32 if values.dtype == np.float32 else torch.float64
        return self._inputs(values), wanted

    def _weights(self, x: Tensor, sample_weight: ArrayLike | None) -> Tensor:  # (N,)
        each = _check_sample_weight(sample_weight, x.numpy(), ensure_non_negative=True)
        return torch.as_tensor(checks.native(each), dtype=self._dtype)

    def _inputs(self, values: NDArray[Any]) -> Tensor:
        """X as the network sees it: float32 where X was that for `fit`, else float64."""
        x = torch.tensor(checks.native(values), dtype=self._dtype)
        if self.event_shape is None:
            return x
        if math.prod(self.event_shape) != x.shape[1]:
            raise checks.InputError(
                f"event_shape must have as many entries as X has features ({x.shape[1]}), got "
                f"{self.event_shape}"
            )
        return x.view(len(x), *self.event_shape)

    @torch.no_grad()
    def _predicted(self, X: ArrayLike) -> Distribution:
        x = self._checked(X)
        return self.predictor_(x)

    def _checked(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self, "predictor_")
        return self._inputs(validate_data(self, X, reset=False, dtype=[np.float64, np.float32]))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.random_state is None
        return tags


@dataclass(eq=False, repr=False)
class RobustClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A Bayesian classifier trained through a channel, or one that purifies its inputs.

    - `channel`: a name (noise, at, os, os50, mix, pgd), or a channel, whose eps and sigma are then
      in the units of X; None: no adversary. A defense costs clean error: `advbayes compare` shows
      how much, and what it gains, against none. `defense`: "proactive" trains through it,
      "reactive" purifies with it, "both", or "none".
    - `eps`: the adversary's budget, or one for each feature (0: cannot be changed), in standard
      deviations of the features or with `units="raw"` in their own; in the norm `norm`. `sigma`:
      noise of the channel, in standard deviations.
    - `indicators`: pairs of columns, by place or name: the adversary cannot change the first where
      the second says that it is missing, nor the second at all; None: those that SimpleImputer
      named so (`missingindicator_age` for `age`).
    - `posterior`: mean_field, point, ensemble or low_rank. `net`: a module with an output for each
      class (absent: fully connected, with layers as in `hidden`); `event_shape`: the shape in which
      it wants a row of X.
    - `abstain`: `predict` gives None where the likeliest class is less probable than this.
      `class_weight`: "balanced", or a weight for each class.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> robust = RobustClassifier("os", eps=0.3, epochs=60, random_state=0).fit(X, y)
    >>> robust.predict_proba(X[:2]).shape, bool(robust.score(X, y) > 0.85)
    ((2, 3), True)
    """

    _task = "classification"

    _: KW_ONLY
    class_weight: Mapping[Any, float] | str | None = None

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train from the beginning; `classes_`, `model_`, `posterior_`, `predictor_`, `ball_`,
        `result_` are there then. An example of weight w counts w times."""
        x, labels = self._taken(X, y)
        try:
            check_classification_targets(labels)
            self.classes_, index = np.unique(labels, return_inverse=True)
        except TypeError:
            kinds = ", ".join(sorted({type(label).__name__ for label in labels}))
            raise checks.InputTypeError(
                f"y must hold labels of one type, all numbers or all text, got {kinds}"
            ) from None
        if len(self.classes_) < 2:
            raise checks.InputError(
                f"y must hold at least two classes, got one class: {self.classes_.tolist()}"
            )
        places = torch.as_tensor(index, dtype=torch.long)
        weights = self._weights(x, sample_weight)
        if self.class_weight == "balanced":
            weights = _balanced(weights, places)
        elif self.class_weight is not None:
            each = compute_sample_weight(self.class_weight, labels)
            weights = weights * torch.as_tensor(each, dtype=self._dtype)
        self._train(x, places, len(self.classes_), Categorical(), weights)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:  # (B, C)
        """The predictive's probabilities, in the order of `classes_`."""
        probs: NDArray[np.float64] = class_probs(self._predicted(X)).double().numpy()
        return probs

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # (B,)
        """The likeliest class; None where that is less probable than `abstain`."""
        probs = self.predict_proba(X)
        likeliest: NDArray[Any] = self.classes_[probs.argmax(1)]
        if self.abstain is None:
            return likeliest
        checks.number("abstain", self.abstain, low=0.0, high=1.0)
        answers: NDArray[Any] = likeliest.astype(object)
        answers[probs.max(1) < self.abstain] = None
        return answers

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Accuracy, among the rows that are answered; NaN where none is."""
        predicted = self.predict(X)
        answered = np.array([value is not None for value in predicted])
        weights = np.ones(len(predicted)) if sample_weight is None else np.asarray(sample_weight)
        if not weights[answered].sum() > 0:
            return math.nan
        return float(np.average((predicted == np.asarray(y))[answered], weights=weights[answered]))

    def as_tensors(self, X: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
        """(x, y) as `predictor_` and attacks on it take them: y as the place in `classes_`."""
        x, labels = self._checked(X), np.asarray(y)
        unknown = sorted(set(labels.tolist()) - set(self.classes_.tolist()))
        if unknown:
            raise checks.InputError(f"y must hold classes seen by fit, got {unknown[:5]}")
        return x, torch.as_tensor(np.searchsorted(self.classes_, labels))


@dataclass(eq=False, repr=False)
class RobustRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """Bayesian regression trained through a channel, or one that purifies its inputs.

    As `RobustClassifier`; predictions, and attacks on `predictor_`, are in the units of y.
    `noise_scale`: "learned", one number in the units of y, or "heteroscedastic": one for each
    input. `abstain`: `predict` gives NaN where the standard deviation is larger than this; `score`
    counts only what was answered.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True, scaled=False)
    >>> robust = RobustRegressor("os", eps=0.3, epochs=60, random_state=0).fit(X, y)
    >>> low, high = robust.predict_interval(X[:2], level=0.9)
    >>> low.shape, bool((low < high).all()), bool(robust.score(X, y) > 0.3)
    ((2,), True, True)
    """

    _task = "regression"

    _: KW_ONLY
    noise_scale: float | str = "learned"

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train from the beginning; `model_`, `posterior_`, `predictor_`, `ball_` and `result_` are
        there afterwards. An example of weight w counts w times."""
        x, wanted = self._taken(X, y, multi_output=True, y_numeric=True)
        self._columns = wanted.ndim == 2
        targets = self._targets(wanted)
        many = targets if targets.ndim == 2 else targets.unsqueeze(1)
        weights = self._weights(x, sample_weight)
        shift, spread = _moments(many, weights, "y")
        num, last = many.shape[1], _affine(spread, shift)
        unit = tuple(spread.tolist())
        likelihood: Likelihood
        if self.noise_scale == "heteroscedastic":  # means and log-scales
            likelihood = HeteroscedasticGaussian(unit=unit)
            ones, zeros = torch.ones_like(spread), torch.zeros_like(shift)
            last = _affine(torch.cat([spread, ones]), torch.cat([shift, zeros]))
        elif self.noise_scale == "learned":
            likelihood = Gaussian(unit, learned=True, num_outputs=num, unit=unit)
        else:
            scale = checks.number("noise_scale", self.noise_scale, low=0.0, open_low=True)
            likelihood = Gaussian(scale, num_outputs=num)
        self._train(x, targets, len(last.bias), likelihood, weights, last)
        return self

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """The predictive mean, (B,) or (B, D), and its standard deviation: of noise and thetas."""
        prediction = self._predicted(X)
        mean, std = self._shaped(prediction.mean), self._shaped(prediction.variance.sqrt())
        if self.abstain is not None:
            mean = np.where(std <= checks.number("abstain", self.abstain, low=0.0), mean, np.nan)
        return (mean, std) if return_std else mean

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """R^2, 1 - sum (y - mean)^2 / sum (y - average)^2, among the rows that are answered; NaN
        where fewer than two are."""
        predicted, wanted = self.predict(X), np.asarray(y)
        answered = ~np.isnan(predicted).reshape(len(predicted), -1).any(1)
        if self.abstain is not None and answered.sum() < 2:
            return math.nan
        weights = None if sample_weight is None else np.asarray(sample_weight)[answered]
        return float(r2_score(wanted[answered], predicted[answered], sample_weight=weights))

    def predict_quantiles(
        self, X: ArrayLike, quantiles: Sequence[float] = (0.05, 0.5, 0.95)
    ) -> NDArray[np.float64]:
        """Quantiles of the predictive, one column for each: (B, Q), or (B, Q, D) for D outputs."""
        prediction = self._predicted(X)
        return np.stack([self._shaped(metrics.quantile(prediction, q)) for q in quantiles], axis=1)

    def predict_interval(
        self, X: ArrayLike, level: float = 0.9
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Edges of the central interval that holds the target with probability `level`."""
        checks.number("level", level, low=0.0, high=1.0, open_low=True, open_high=True)
        edges = self.predict_quantiles(X, (0.5 - level / 2, 0.5 + level / 2))
        return edges[:, 0], edges[:, 1]

    def _shaped(self, values: Tensor) -> NDArray[np.float64]:
        found: NDArray[np.float64] = values.double().numpy()
        return found[:, None] if self._columns and found.ndim == 1 else found

    def as_tensors(self, X: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
        """(x, y) as `predictor_` and attacks on it take them."""
        return self._checked(X), self._targets(y)

    def _targets(self, y: ArrayLike) -> Tensor:  # (B,) or (B, D)
        values = np.asarray(y)
        if values.dtype.kind not in "biuf":
            raise checks.InputTypeError(f"y must hold numbers, got an array of {values.dtype}")
        targets = torch.tensor(checks.native(values), dtype=self._dtype)
        return targets.squeeze(1) if targets.ndim == 2 and targets.shape[1] == 1 else targets

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _names_of(fitted: Any) -> list[str]:
    """The columns of the X that it was fitted to, where they had names."""
    return [str(name) for name in getattr(fitted, "feature_names_in_", ())]


def _moments(
    values: Tensor, weights: Tensor, what: str, names: Sequence[str] = ()
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column (1 for a constant one), rows by weight."""
    weights = weights.double()
    share = (weights / weights.sum()).reshape(-1, *[1] * (values.ndim - 1))
    mean = (share * values).sum(0)
    spread = (share * (values - mean).square()).sum(0).sqrt()
    counted = values[weights > 0]
    lost = ~spread.isfinite() | ((spread == 0) & (counted != counted[:1]).any(0))
    if bool(lost.any()):
        column = int(lost.flatten().nonzero()[0])
        named = f"column {column}" + (f" ({names[column]!r})" if names else "")
        size = float(values.flatten(1)[:, column].abs().max())
        raise checks.InputError(
            f"{what} must hold numbers whose squares are finite and not 0, got a magnitude of "
            f"{size:.3g} in {named}; rescale or drop it"
        )
    # Rounding leaves a constant column a spread of about 1e-16 of its value: that is no scale.
    spread = torch.where(spread <= 1e-12 * mean.abs(), 1.0, spread)
    return mean.to(values.dtype), spread.to(values.dtype)


def _balanced(weights: Tensor, places: Tensor) -> Tensor:
    """The weights with every class that has any counting alike: times W / (C W_c)."""
    of_class = torch.bincount(places, weights.double())
    factor = of_class.sum() / ((of_class > 0).sum() * of_class)
    return weights * torch.where(of_class > 0, factor, 0.0)[places].to(weights.dtype)


def _affine(weight: Tensor, bias: Tensor) -> nn.Linear:
    """`weight * x + bias` as a layer that is not trained."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, len(bias), len(bias), dtype=bias.dtype)  # type: ignore[no-untyped-call]
    layer.requires_grad_(False)
    layer.weight.copy_(weight.diag())
    layer.bias.copy_(bias)
    return layer


def robust_scorer(
    metric: str = "accuracy", *, eps: float | None = None, steps: int = 20, seed: int = 0
) -> Callable[[Any, ArrayLike, ArrayLike], float]:
    """A scorer for `GridSearchCV` and `cross_val_score`: accuracy, -NLL or -RMSE under attack
    within the estimator's own `ball_`, or within `eps` in the unit of the estimator's eps.

    A search over the estimator's eps wants `eps`: otherwise every candidate meets the adversary
    that it was trained against, and the smallest eps looks best.

    Classifiers meet PGD on the margin, regressors ascent from 64 points (`MultiStart`): what one
    ascent reaches there is often a local maximum. In a pipeline the attack is on what the last
    step is given.

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.model_selection import cross_val_score
    >>> X, y = load_iris(return_X_y=True)
    >>> robust = RobustClassifier("os", eps=0.5, epochs=30, random_state=0)
    >>> attacked, clean = (
    ...     cross_val_score(robust, X, y, cv=3, scoring=s).mean()
    ...     for s in (robust_scorer(), "accuracy")
    ... )
    >>> bool(attacked <= clean)
    True
    """
    checks.choice("metric", metric, ("accuracy", "nll", "rmse"))
    if eps is not None:
        checks.number("eps", eps, low=0)

    def scorer(estimator: Any, X: ArrayLike, y: ArrayLike) -> float:
        before, last, _ = _taken_apart(estimator)
        if type(last) not in _KINDS.values():
            raise checks.InputTypeError(
                f"robust_scorer scores {' and '.join(_KINDS)}, alone or at the end of a Pipeline, "
                f"got {type(last).__name__}; evaluate takes any estimator"
            )
        known = ("nll", "rmse") if last._task == "regression" else ("accuracy", "nll")
        checks.choice(f"metric for a {type(last).__name__}", metric, known)
        x, target = last.as_tensors(Pipeline(before).transform(X) if before else X, y)
        ball: Ball = last.ball_
        if eps is not None:
            if np.ndim(last.eps) > 0:
                raise checks.InputError(
                    f"eps of robust_scorer must be left out for an estimator with a budget for "
                    f"each feature, got {eps!r} for {last.eps!r}"
                )
            ball = replace(ball, eps=float(eps))
        attack: Attack = pgd(ball, steps, margin)
        if last._task == "regression":
            attack = MultiStart(ball, squared_error, steps, 64)
        x_adv = attack(last.predictor_, x, target, generator=generator_for(seed, "scorer"))
        columns = scored(last.predictor_, x_adv, target, last._task)
        if metric == "rmse":
            return -float(columns["squared_error"].mean().sqrt())
        return float(columns["correct" if metric == "accuracy" else "log_prob"].mean())

    return scorer


def _taken_apart(pipeline: Any) -> tuple[list[tuple[str, Any]], Any, str | None]:
    """The steps before the last one, the last one, and its name where there is a pipeline."""
    if not isinstance(pipeline, Pipeline):
        return [], pipeline, None
    *before, (name, last) = pipeline.steps
    return before, last, name


def save_pipeline(
    pipeline: Any, path: str | os.PathLike[str], *, feature_names: Sequence[str] | None = None
) -> None:
    """Save a fitted estimator of this module, or a pipeline that ends in one, without pickle.

    The steps before it may be StandardScaler, MinMaxScaler, RobustScaler, SimpleImputer,
    OneHotEncoder, and Pipeline and ColumnTransformer of these. `feature_names` are the columns of
    X, by which `advbayes predict` reads a CSV file (absent: those that `fit` saw).

    >>> import tempfile
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> X, y = np.random.default_rng(0).normal(5.0, 2.0, (20, 3)), np.arange(20) % 2
    >>> pipeline = make_pipeline(StandardScaler(), RobustClassifier(epochs=2, random_state=0)).fit(
    ...     X, y
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pipeline(pipeline, f"{folder}/m.advbayes")
    ...     again = load_pipeline(f"{folder}/m.advbayes")
    >>> bool((again.predict_proba(X) == pipeline.predict_proba(X)).all())
    True
    """
    steps, last, step = _taken_apart(pipeline)
    if type(last) not in _KINDS.values():
        raise StoreError(
            path,
            wanted=f"{' or '.join(_KINDS)}, or a pipeline that ends in one",
            got=f"{last!r:.80}",
        )
    check_is_fitted(last, "predictor_")
    names = _names_of(pipeline) if feature_names is None else [*map(str, feature_names)]
    if names and len(names) != pipeline.n_features_in_:
        raise checks.InputError(
            f"feature_names must name the {pipeline.n_features_in_} columns of X, got {len(names)}"
        )
    settings = last.get_params(deep=False).items()
    own_channel, classes = last._own_channel, getattr(last, "classes_", None)
    kind, state = nets.encode_posterior(last.posterior_, last.model_, "estimator")
    tensors = {f"posterior/{name}": value for name, value in state.items()}
    reference = last._reference if last.defense in ("reactive", "both") else None
    channel = own_channel
    if reference is not None:
        parts = reference._asdict()
        channel = parts.pop("channel")
        tensors |= {f"reference/{name}": part for name, part in parts.items() if part is not None}
    ball = last.ball_
    bundle.save(
        path,
        model=last.model_,
        # what it predicts with, so that everything that reads bundles gives its numbers
        posterior=Samples(last.thetas_),
        channel=channel,
        class_names=None if classes is None else [str(name) for name in classes],
        threat_model={
            "norm": last.norm,
            "eps": ball.eps,
            "mask": None if ball.mask is None else ball.mask.tolist(),
            "scale": None if ball.scale is None else ball.scale.tolist(),
            "ball": ball,
        },
        extra={
            "task": last._task,
            "defense": last.defense,
            "event": list(last.event_shape or (last.n_features_in_,)),
            "feature_names": names,
            "steps": preprocessing.encode(Pipeline(steps), "steps") if steps else None,
            "estimator": {
                "class": type(last).__name__,
                "step": step,
                "settings": {
                    name: preprocessing.plain(value, name)
                    for name, value in settings
                    if name not in ("channel", "net")
                },
                # its name, or whether it came as such
                "channel": (last.channel or False) if own_channel is None else True,
                "net": last.net is not None,
                "layout": list(last._layout),
                "posterior": kind["kind"],
                "classes": None if classes is None else preprocessing.plain(classes, "classes_"),
                "num_features": int(last.n_features_in_),
                "names": _names_of(last),
                "double": last._dtype == torch.float64,
                "columns": last._columns,
                "purified": reference is not None,
            },
        },
        tensors=tensors,
    )


def load_pipeline(path: str | os.PathLike[str], *, net: nn.Module | None = None) -> Any:
    """What `save_pipeline` saved; a network with code of its own has to be given as `net`."""
    try:
        manifest: Any = read_bundle(path)[1]
        match manifest:
            case {"extra": {"estimator": {"class": kind} as said, **extra}} if kind in _KINDS:
                last = _restored(path, said, net)
            case _:
                raise StoreError(
                    path, wanted="an estimator saved by save_pipeline", got="another bundle"
                )
        if said["step"] is None:
            return last
        before = preprocessing.decode(extra["steps"], "steps").steps if extra["steps"] else []
        return Pipeline([*before, (said["step"], last)])
    except StoreError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        got = f"{type(error).__name__}: {error!s:.200}"
        raise StoreError(path, wanted="an estimator saved by save_pipeline", got=got) from None


def _restored(path: str | os.PathLike[str], said: dict[str, Any], net: nn.Module | None) -> Any:
    front, back = said["layout"]
    dtype, whole = torch.float64 if said["double"] else torch.float32, net
    if net is not None:
        whole = copy.deepcopy(net).to(dtype)

        def layer(size: int) -> nn.Linear:
            return _affine(torch.ones(size, dtype=dtype), torch.zeros(size, dtype=dtype))

        whole = nn.Sequential(whole, layer(back)) if back else whole
        whole = nn.Sequential(layer(said["num_features"]), whole) if front else whole
    loaded: Any = bundle.load(path, net=whole)
    settings = {name: preprocessing.array(value, name) for name, value in said["settings"].items()}
    lists = {name: tuple(value) for name, value in settings.items() if type(value) is list}
    estimator = _KINDS[said["class"]](**settings | lists)
    if said["channel"]:
        estimator.channel = loaded.channel if said["channel"] is True else said["channel"]
    model = loaded.model
    inner: Any = copy.deepcopy(model.net)
    for name, parameter in inner.named_parameters():
        parameter.requires_grad_(name in model.names)
    inner = inner[1] if front else inner
    if said["net"]:
        estimator.net = net if net is not None else inner[0] if back else inner
    estimator._dtype, estimator._columns = dtype, bool(said["columns"])
    estimator._layout = bool(front), int(back)
    estimator.n_features_in_ = int(said["num_features"])
    if said["names"]:
        estimator.feature_names_in_ = np.array(said["names"], object)
    if estimator._task == "classification":
        estimator.classes_ = preprocessing.array(said["classes"], "classes_")
        if not isinstance(estimator.classes_, np.ndarray):
            raise StoreError(path, wanted="classes_ as an array", got=f"{said['classes']!r:.80}")
    kept: dict[str, dict[str, Tensor]] = {"posterior": {}, "reference": {}}
    for key, value in loaded.tensors.items():
        part, _, name = key.partition("/")
        kept[part][name] = value
    estimator.model_, estimator.thetas_ = model, loaded.posterior.thetas
    estimator.ball_ = loaded.threat_model["ball"]
    estimator.posterior_ = nets.decode_posterior(
        {"kind": said["posterior"]}, kept["posterior"], model, os.fspath(path)
    )
    estimator.predictor_ = PosteriorPredictive(model, estimator.thetas_)
    if said["purified"]:
        trained_on = BayesianModel(inner, model.likelihood, model.prior_scale)
        estimator._purify(trained_on, _Reference(channel=loaded.channel, **kept["reference"]))
    return estimator


_KINDS: dict[str, Any] = {"RobustClassifier": RobustClassifier, "RobustRegressor": RobustRegressor}

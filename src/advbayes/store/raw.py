"""A saved model as people use it: raw rows in, answers in the target's unit or class names out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from advbayes import metrics
from advbayes.checks import InputError, InputTypeError, number
from advbayes.likelihoods import GaussianMixture, predicts_classes
from advbayes.posteriors import Ensemble, PointMass, Samples
from advbayes.predictive import PosteriorPredictive
from advbayes.seeds import generator_for

from . import preprocessing

if TYPE_CHECKING:
    from advbayes.datasets import Encoding, Standardize


def thetas_of(posterior: Any, num: int, seed: int) -> Tensor:
    """`num` thetas keyed by the seed; all members of a posterior that has finitely many.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Categorical
    >>> thetas_of(PointMass(BayesianModel(nn.Linear(2, 2), Categorical())), 20, seed=0).shape
    torch.Size([1, 6])
    """
    match posterior:
        case Ensemble() | Samples():
            return posterior.thetas.detach().clone()
        case PointMass():
            num = 1
    thetas: Tensor = posterior.sample(num, generator=generator_for(seed, "predict"))
    return thetas


@dataclass(frozen=True, eq=False)
class RawPredictor:
    """A predictor over raw inputs: p(y | x) with x and y in their own units.

    >>> from torch import nn
    >>> from advbayes import BayesianModel, Gaussian
    >>> from advbayes.datasets import Standardize
    >>> model = BayesianModel(nn.Linear(1, 1, bias=False), Gaussian(0.5))
    >>> scaling = Standardize(
    ...     torch.tensor([10.0]), torch.tensor([2.0]), torch.tensor(100.0), torch.tensor(4.0)
    ... )
    >>> predict = RawPredictor(
    ...     PosteriorPredictive(model, torch.ones(1, 1)), scaling
    ... )  # z_y = z_x + 0.5 noise
    >>> predict(torch.tensor([[12.0]])).mean, predict(torch.tensor([[12.0]])).variance.sqrt()
    (tensor([104.]), tensor([2.]))
    """

    predict: PosteriorPredictive  # in the model's units
    scaling: Standardize | None = None
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    target_names: tuple[str, ...] = ()
    encoding: Encoding | None = None  # of a table with text or missing values
    steps: Any = None  # scikit-learn transformers in front of the model

    def __call__(self, x: Any) -> Distribution:
        """The predictive at raw rows (a tensor or an array), differentiable in them.

        For a table with text or missing values, or with transformers in front of the model: rows as
        they come, or a tensor of what the transformers give.
        """
        if not isinstance(x, Tensor):
            if self.steps is not None:
                x = preprocessing.dense(self.steps.transform(np.asarray(x))).astype(np.float64)
            if self.encoding is not None:
                x = self.encoding.transform(x)
        rows = torch.as_tensor(x).to(self.predict.model.device, self.predict.model.dtype)
        if self.scaling is None:
            return self.predict(rows)
        prediction = self.predict(self.scaling.transform(rows))
        if not isinstance(prediction, GaussianMixture) or self.scaling.target_std is None:
            return prediction
        means = self.scaling.inverse_target(prediction.means)
        return GaussianMixture(
            means, prediction.scales * self.scaling.target_std.to(means), prediction.log_weights
        )

    def interval(self, x: Any, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the central interval of each row, in the target's own unit."""
        number("level", level, low=0, high=1, open_low=True, open_high=True)
        with torch.no_grad():
            prediction = self(x)
            low, high = (metrics.quantile(prediction, 0.5 + 0.5 * end) for end in (-level, level))
            return low, high

    def classes(self, x: Any) -> list[str]:
        """The name of the most probable class of each row."""
        with torch.no_grad():
            prediction = self(x)
        if not predicts_classes(prediction):
            raise InputTypeError("classes is for a classifier, got a regression model")
        num = prediction.logits.shape[-1]
        names = self.class_names or tuple(map(str, range(num)))
        if len(names) != num:
            raise InputError(f"class_names must name the model's {num} classes, got {len(names)}")
        return [names[index] for index in prediction.logits.argmax(-1).tolist()]

"""A model that others can use: `save` and `load` all that its predictions and claims need."""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from advbayes import metrics
from advbayes.checks import InputError, InputTypeError, native, number
from advbayes.likelihoods import GaussianMixture, predicts_classes
from advbayes.metrics.scores import class_probs
from advbayes.model import BayesianModel
from advbayes.posteriors import Ensemble, PointMass, Posterior, Samples
from advbayes.predictive import PosteriorPredictive
from advbayes.seeds import generator_for
from advbayes.types import Channel

from . import kinds, preprocessing
from .documents import JSON
from .errors import StoreError, refusing
from .nets import build_net, decode_posterior, describe_net, encode_posterior, fill_net
from .parts import Manifest, read_all, write_bundle

if TYPE_CHECKING:
    from advbayes.datasets import Encoding, Standardize

_MODEL = "model.advbayes"  # in a run folder

_DOCUMENTS = ("model", "posterior", "channel", "class_names", "threat_model", "audit", "extra")
_TENSORS = ("net", "posterior", "channel", "scaling", "threat_model", "extra")
_PARTS = {f"{name}.json" for name in _DOCUMENTS} | {f"{name}.safetensors" for name in _TENSORS}


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


@dataclass(frozen=True, eq=False, kw_only=True)
class Preparation:
    """What stands between raw rows and a model, and the names of what goes in and comes out."""

    scaling: Standardize | None = None
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    target_names: tuple[str, ...] = ()
    encoding: Encoding | None = None  # of a table with text or missing values
    steps: Any = None  # scikit-learn transformers in front of the model


@dataclass(frozen=True, eq=False)
class RawPredictor(Preparation):
    """A predictor over raw inputs: p(y | x) with x and y in their own units.

    >>> from advbayes import Gaussian
    >>> from advbayes.datasets import Standardize
    >>> model = BayesianModel(nn.Linear(1, 1, bias=False), Gaussian(0.5))
    >>> scaling = Standardize.from_dict(
    ...     {"mean": [10.0], "std": [2.0], "target_mean": 100.0, "target_std": 4.0}
    ... )
    >>> posterior = PosteriorPredictive(model, torch.ones(1, 1))  # z_y = z_x + 0.5 noise
    >>> prediction = RawPredictor(posterior, scaling=scaling)(torch.tensor([[12.0]]))
    >>> prediction.mean, prediction.variance.sqrt()
    (tensor([104.]), tensor([2.]))
    """

    inner: PosteriorPredictive  # in the model's units

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
        device, dtype = self.inner.model.device, self.inner.model.dtype
        rows = torch.as_tensor(native(x)).to(device)
        if self.scaling is None:
            return self.inner(rows.to(dtype))
        # in the scaling's precision: what is small beside its mean would be lost in less
        rows = rows.to(torch.promote_types(dtype, self.scaling.mean.dtype))
        prediction = self.inner(self.scaling.transform(rows).to(dtype))
        if not isinstance(prediction, GaussianMixture) or self.scaling.target_std is None:
            return prediction
        wide = torch.promote_types(dtype, self.scaling.target_std.dtype)
        means = self.scaling.inverse_target(prediction.means.to(wide))
        scales = prediction.scales.to(wide) * self.scaling.target_std.to(means)
        return GaussianMixture(means, scales, prediction.log_weights.to(wide))

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
        return [names[index] for index in class_probs(prediction).argmax(-1).tolist()]


@dataclass(frozen=True, eq=False)
class Bundle:
    """What `load` returns. `predictor()` answers in raw units; `model` and `posterior` do not.

    `scaling` holds the tensors of `datasets.Standardize` (`Standardize.from_dict`).
    """

    model: BayesianModel
    posterior: Any  # the class that was saved: MeanField, LowRank, ...
    channel: Channel | None
    scaling: dict[str, Tensor] | None
    class_names: tuple[str, ...] | None
    threat_model: Any
    audit: JSON
    extra: JSON
    tensors: dict[str, Tensor]  # what was saved beside `extra`
    versions: dict[str, str]
    manifest: Manifest

    def predictor(self, num: int = 20, *, seed: int | None = None) -> RawPredictor:
        """The posterior predictive for raw rows, through `num` thetas, in the target's own unit.

        `seed` keys the thetas; absent: the run's own, so that the command line and this give the
        same numbers.
        """
        key = self._extra.get("seed") if seed is None else seed
        thetas = thetas_of(self.posterior, num, key if type(key) is int else 0)
        return RawPredictor(PosteriorPredictive(self.model, thetas), **vars(self.preparation()))

    def preparation(self) -> Preparation:
        """What its predictions need to know of the data that it was trained on."""
        from advbayes.datasets import Encoding, Standardize  # stand below this module in the layout

        match self._extra.get("estimator"):
            case {"purified": True}:
                hint = "advbayes.estimators.load_pipeline loads this one"
                wanted = f"a model that predicts by itself ({hint})"
                raise StoreError("predictor", wanted, "an estimator that purifies its inputs")
        steps, encoding = self._extra.get("steps"), self._extra.get("encoding")
        return Preparation(
            scaling=None if self.scaling is None else Standardize.from_dict(self.scaling),
            class_names=self.class_names or (),
            feature_names=tuple(map(str, _listed(self._extra.get("feature_names")))),
            target_names=tuple(map(str, _listed(self._extra.get("target_names")))),
            encoding=None if encoding is None else Encoding.from_json(encoding),
            steps=None if steps is None else preprocessing.decode(steps, "steps"),
        )

    @property
    def _extra(self) -> dict[str, JSON]:
        return self.extra if type(self.extra) is dict else {}


def _listed(value: JSON) -> list[JSON]:
    return value if type(value) is list else []


def model_file(path: str | os.PathLike[str]) -> Path:
    """The bundle at a path: itself, or the finished model of a run folder.

    >>> model_file("digits.advbayes").name
    'digits.advbayes'
    """
    place = Path(path)
    if not (place / "config.toml").is_file():
        return place
    if not (place / _MODEL).exists():
        wanted = f"a finished run (`advbayes train --resume {place}` goes on with it)"
        raise StoreError(place, wanted, f"no {_MODEL} in it")
    return place / _MODEL


def save(
    path: str | os.PathLike[str],
    *,
    model: BayesianModel,
    posterior: Posterior,
    channel: Channel | None = None,
    scaling: Mapping[str, Tensor] | None = None,
    class_names: Sequence[str] | None = None,
    threat_model: object = None,
    audit: object = None,
    extra: object = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Save a model as a folder, or as one file when `path` ends in `.advbayes`; atomic, without
    pickle, never with NaN.

    `threat_model` is a ball, an attack, or a dictionary of such and of plain values; `audit` and
    `extra` are plain values, `tensors` whatever arrays belong to `extra`.

    >>> import tempfile
    >>> from advbayes import Categorical, MeanField, Noise
    >>> model = BayesianModel(nn.Linear(4, 3), Categorical())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/m", model=model, posterior=MeanField(model), channel=Noise(0.1))
    ...     load(f"{folder}/m").channel
    Noise(sigma=0.1)
    """
    place = os.fspath(path)
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    parts |= {"net": model.net.state_dict(), "extra": dict(tensors or {})}
    kind, parts["posterior"] = encode_posterior(posterior, model, place)
    parameters: list[JSON] = [
        [name, [*shape]] for name, shape in zip(model.names, model.shapes, strict=True)
    ]
    documents: dict[str, object] = {
        "model": {
            "net": describe_net(model.net),
            "likelihood": kinds.encode(model.likelihood, f"{place}:likelihood", {}),
            "prior_scale": kinds.encode(model.prior_scale, f"{place}:prior_scale", {}),
            "parameters": parameters,
        },
        "posterior": kind,
        "channel": kinds.encode(channel, "channel", parts["channel"]),
        "threat_model": kinds.encode_document(threat_model, "threat_model", parts["threat_model"]),
        "class_names": None if class_names is None else list(map(str, class_names)),
        "audit": audit,
        "extra": extra,
    }
    parts = {name: values for name, values in parts.items() if values}
    parts |= {} if scaling is None else {"scaling": dict(scaling)}
    written = {name: document for name, document in documents.items() if document is not None}
    write_bundle(path, parts, written)


def load(
    path: str | os.PathLike[str],
    *,
    net: nn.Module | None = None,
    own: Sequence[type] = (),
    device: torch.device | str = "cpu",
) -> Bundle:
    """Load what `save` saved, or the model of a run folder; safe for a stranger's file: hashes
    first, an explicit list of classes, nothing executed.

    A network with code of its own has to be given as `net` (its weights come from the file), and
    the classes of a channel of one's own, dataclasses, as `own` (their settings come from the
    file).

    >>> load("absent")
    Traceback (most recent call last):
    ...
    advbayes.store.errors.MissingError: absent: wanted a bundle, got nothing (no such file)
    """
    if not isinstance(own, (tuple, list)) or not all(isinstance(each, type) for each in own):
        raise InputTypeError("own must be a tuple of classes, such as (MyChannel,)", got=own)
    place = os.fspath(model_file(path))
    manifest, tensors, documents = read_all(place, known=_PARTS)
    for name in ("model", "channel", "threat_model"):
        kinds.check_number(documents.get(name), f"{place}:{name}")
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for part, values in tensors.items():
        parts[part] = {key: value.to(device) for key, value in values.items()}
    with _named(place):
        # a part's name is also the beginning of its tensors' names
        described, threat = documents.get("channel"), documents.get("threat_model")
        channel = kinds.decode(described, "channel", parts["channel"], own)
        threat_model = kinds.decode_document(threat, "threat_model", parts["threat_model"], own)
        if channel is not None and not isinstance(channel, Channel):
            raise StoreError("channel", "a channel", type(channel).__name__)
        class_names = _class_names(documents.get("class_names"))
        model = _decode_model(documents.get("model"), parts["net"], net)
    return Bundle(
        model=model,
        posterior=decode_posterior(documents.get("posterior"), parts["posterior"], model, place),
        channel=channel,
        scaling=parts.get("scaling"),
        class_names=class_names,
        threat_model=threat_model,
        audit=documents.get("audit"),
        extra=documents.get("extra"),
        tensors=parts["extra"],
        versions=manifest.versions,
        manifest=manifest,
    )


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Add the file's name to what is said of a part."""
    try:
        yield
    except StoreError as error:
        raise StoreError(f"{place}:{error.file}", error.wanted, error.got) from None


def _class_names(document: JSON) -> tuple[str, ...] | None:
    names = [name for name in _listed(document) if type(name) is str]
    if document is not None and names != document:
        raise StoreError("class_names", "a list of names", f"{document!r:.80}")
    return None if document is None else tuple(names)


def _decode_model(
    document: JSON, state: dict[str, Tensor], custom: nn.Module | None
) -> BayesianModel:
    match document:
        case {
            "net": description,
            "likelihood": likelihood,
            "prior_scale": prior_scale,
            "parameters": list(parameters),
            **rest,
        } if not rest:
            pass
        case _:
            wanted = "net, likelihood, prior_scale and parameters"
            raise StoreError("model", wanted, f"{document!r:.200}")
    if custom is not None:
        net = copy.deepcopy(custom)
    elif description is None:
        wanted = "load(path, net=...): this network has code of its own, which a file cannot bring"
        raise StoreError("model", wanted, "no net")
    else:
        net = build_net(description, "model")
    fill_net(net, state, "model")
    recorded = {str(entry[0]) for entry in map(_listed, parameters) if entry}
    for name, value in net.named_parameters():
        value.requires_grad_(name in recorded)
    built = [[name, [*v.shape]] for name, v in net.named_parameters() if v.requires_grad]
    if built != parameters or not built:
        raise StoreError("model", f"parameters as {parameters!r:.200}", f"{built!r:.200}")
    chosen = kinds.decode(likelihood, "likelihood", {})
    if type(chosen) not in kinds.LIKELIHOODS:
        raise StoreError("likelihood", "a likelihood", type(chosen).__name__)
    with refusing("model", "a network that fits a BayesianModel"):
        return BayesianModel(net, chosen, kinds.decode(prior_scale, "prior_scale", {}))

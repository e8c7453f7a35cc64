"""A model that others can use: `save` and `load` all that its predictions and claims need."""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from advbayes import posteriors
from advbayes.checks import InputTypeError
from advbayes.model import BayesianModel
from advbayes.predictive import PosteriorPredictive
from advbayes.types import Channel

from . import kinds, preprocessing
from .documents import JSON
from .errors import StoreError, refusing
from .manifest import Manifest
from .nets import build_net, describe_net, fill_net
from .parts import read_all, write_bundle
from .raw import RawPredictor, thetas_of

_MODEL = "model.advbayes"  # in a run folder

_DOCUMENTS = ("model", "posterior", "channel", "class_names", "threat_model", "audit", "extra")
_TENSORS = ("net", "posterior", "channel", "scaling", "threat_model", "extra")
_PARTS = {f"{name}.json" for name in _DOCUMENTS} | {f"{name}.safetensors" for name in _TENSORS}


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
        from advbayes.datasets import Encoding, Standardize  # stand below this module in the layout

        extra = self.extra if type(self.extra) is dict else {}
        match extra.get("estimator"):
            case {"purified": True}:
                hint = "advbayes.estimators.load_pipeline loads this one"
                wanted = f"a model that predicts by itself ({hint})"
                raise StoreError("predictor", wanted, "an estimator that purifies its inputs")
        key = extra.get("seed") if seed is None else seed
        thetas = thetas_of(self.posterior, num, key if type(key) is int else 0)
        steps, encoding = extra.get("steps"), extra.get("encoding")
        return RawPredictor(
            PosteriorPredictive(self.model, thetas),
            None if self.scaling is None else Standardize.from_dict(self.scaling),
            self.class_names or (),
            tuple(map(str, _listed(extra.get("feature_names")))),
            tuple(map(str, _listed(extra.get("target_names")))),
            None if encoding is None else Encoding.from_json(encoding),
            None if steps is None else preprocessing.decode(steps, "steps"),
        )


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
    posterior: posteriors.Posterior,
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
    ...     save(
    ...         f"{folder}/m.advbayes",
    ...         model=model,
    ...         posterior=MeanField(model),
    ...         channel=Noise(0.1),
    ...         class_names="abc",
    ...     )
    ...     bundle = load(f"{folder}/m.advbayes")
    >>> bundle.channel, bundle.class_names
    (Noise(sigma=0.1), ('a', 'b', 'c'))
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


# Each posterior's tensors with their axes (P: the model's parameters, others: at least one); the
# first is what it is made from.
_POSTERIORS: dict[str, tuple[Any, dict[str, str]]] = {
    "MeanField": (posteriors.MeanField, {"mu": "P", "rho": "P"}),
    "PointMass": (posteriors.PointMass, {"theta": "P"}),
    "Ensemble": (posteriors.Ensemble, {"thetas": "SP"}),
    "LowRank": (posteriors.LowRank, {"mu": "P", "rho": "P", "factor": "PR"}),
    "Samples": (posteriors.Samples, {"thetas": "SP"}),
}


def encode_posterior(
    posterior: Any, model: BayesianModel, place: str
) -> tuple[dict[str, JSON], dict[str, Tensor]]:
    """A posterior's kind and its tensors."""
    kind = type(posterior).__name__
    if kind not in _POSTERIORS or type(posterior) is not _POSTERIORS[kind][0]:
        raise StoreError(f"{place}:posterior", f"one of {', '.join(_POSTERIORS)}", kind)
    if posterior.num_params != model.num_params:
        wanted = f"a posterior over the model's {model.num_params} parameters"
        raise StoreError(f"{place}:posterior", wanted, f"{posterior.num_params}")
    return {"kind": kind}, dict(posterior.state_dict())


def decode_posterior(
    document: JSON, state: dict[str, Tensor], model: BayesianModel, place: str
) -> Any:
    """Inverse of `encode_posterior`."""
    part, size = f"{place}:posterior", model.num_params
    match document:
        case {"kind": str(kind), **rest} if kind in _POSTERIORS and not rest:
            made, axes = _POSTERIORS[kind]
        case _:
            raise StoreError(part, f"one of {', '.join(_POSTERIORS)}", f"{document!r:.80}")
    if state.keys() != axes.keys():
        raise StoreError(part, f"the tensors {', '.join(axes)}", f"{sorted(state)!r:.200}")
    for name, letters in axes.items():  # before a constructor allocates what the shapes say
        shape = tuple(state[name].shape)
        pairs = zip(shape, letters, strict=False)
        fits = [length == size if axis == "P" else length > 0 for length, axis in pairs]
        if len(shape) != len(letters) or not all(fits):
            axes_wanted = ", ".join(letters).replace("P", str(size))
            wanted = f"{name} of shape ({axes_wanted}), no axis of length 0"
            raise StoreError(part, wanted, f"{shape}")
    first = state[next(iter(axes))]
    with refusing(part, f"tensors that fit {kind} and the model"):
        if kind == "Samples":
            posterior = made(first)
        else:
            rank = {"rank": state["factor"].shape[1]} if kind == "LowRank" else {}
            posterior = made(model, init=first, **rank)
        posterior.load_state_dict(state)
        return posterior

"""A model that others can use: `save` and `load` all that its predictions and claims need."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from advbayes import posteriors
from advbayes.likelihoods import Likelihood
from advbayes.model import BayesianModel
from advbayes.predictive import PosteriorPredictive
from advbayes.types import Channel

from . import kinds, preprocessing
from .documents import JSON
from .errors import StoreError
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
        """The posterior predictive for raw rows, through `num` thetas: scaling applied, answers in
        the target's own unit.

        `seed` keys the thetas; absent: the run's own, so that the command line and this give the
        same numbers.
        """
        from advbayes.datasets import Encoding, Standardize  # stand below this module in the layout

        extra = self.extra if isinstance(self.extra, dict) else {}
        if isinstance(said := extra.get("estimator"), dict) and said.get("purified"):
            wanted = (
                "a model that predicts by itself (advbayes.estimators.load_pipeline loads this one)"
            )
            raise StoreError(
                "predictor", wanted=wanted, got="an estimator that purifies its inputs"
            )
        key = extra.get("seed", 0) if seed is None else seed
        names = {
            name: tuple(map(str, value)) if isinstance(value := extra.get(name), list) else ()
            for name in ("feature_names", "target_names")
        }
        return RawPredictor(
            PosteriorPredictive(
                self.model, thetas_of(self.posterior, num, key if isinstance(key, int) else 0)
            ),
            None if self.scaling is None else Standardize.from_dict(self.scaling),
            self.class_names or (),
            steps=None
            if extra.get("steps") is None
            else preprocessing.decode(extra["steps"], "steps"),
            encoding=None
            if extra.get("encoding") is None
            else Encoding.from_json(extra["encoding"]),
            **names,
        )


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
        raise StoreError(place, wanted=wanted, got=f"no {_MODEL} in it")
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
    parts: dict[str, dict[str, Tensor]] = {
        "net": dict(model.net.state_dict()),
        "channel": {},
        "threat_model": {},
    }
    described: dict[str, object] = {
        "net": describe_net(model.net),
        "likelihood": kinds.encode(model.likelihood, f"{place}:likelihood", {}),
        "prior_scale": kinds.encode(model.prior_scale, f"{place}:prior_scale", {}),
        "parameters": [
            [name, list(shape)] for name, shape in zip(model.names, model.shapes, strict=True)
        ],
    }
    documents: dict[str, object] = {"model": described}
    documents["posterior"], parts["posterior"] = encode_posterior(posterior, model, place)
    documents["channel"] = kinds.encode(channel, "channel", parts["channel"])
    documents["threat_model"] = kinds.encode_document(
        threat_model, "threat_model", parts["threat_model"]
    )
    documents["class_names"] = None if class_names is None else [str(name) for name in class_names]
    documents |= {"audit": audit, "extra": extra}
    parts["extra"] = dict(tensors or {})
    if scaling is not None:
        parts["scaling"] = dict(scaling)
    write_bundle(
        path,
        {name: values for name, values in parts.items() if values or name == "scaling"},
        {name: document for name, document in documents.items() if document is not None},
    )


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
    place = os.fspath(model_file(path))
    manifest, tensors, documents = read_all(place, known=_PARTS)
    for name in ("model", "channel", "threat_model"):
        kinds.check_number(documents.get(name), f"{place}:{name}")
    tensors = {
        part: {key: value.to(device) for key, value in held.items()}
        for part, held in tensors.items()
    }
    model = _decode_model(documents.get("model"), tensors.get("net", {}), net, place)
    names = documents.get("class_names")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise StoreError(f"{place}:class_names", wanted="a list of names", got=f"{names!r:.80}")
    channel, threat_model = (
        _decode_part(name, documents.get(name), tensors.get(name, {}), place, own)
        for name in ("channel", "threat_model")
    )
    if channel is not None and not isinstance(channel, Channel):
        raise StoreError(f"{place}:channel", wanted="a channel", got=type(channel).__name__)
    return Bundle(
        model=model,
        posterior=decode_posterior(
            documents.get("posterior"), tensors.get("posterior", {}), model, place
        ),
        channel=channel,
        scaling=tensors.get("scaling"),
        class_names=None if names is None else tuple(str(name) for name in names),
        threat_model=threat_model,
        audit=documents.get("audit"),
        extra=documents.get("extra"),
        tensors=tensors.get("extra", {}),
        versions=manifest.versions,
        manifest=manifest,
    )


def _decode_part(
    name: str, document: JSON, tensors: dict[str, Tensor], place: str, own: Sequence[type]
) -> Any:
    try:  # a part's name is also the beginning of its tensors' names, so the file's is added here
        return (kinds.decode_document if name == "threat_model" else kinds.decode)(
            document, name, tensors, own
        )
    except StoreError as error:
        raise StoreError(f"{place}:{error.file}", wanted=error.wanted, got=error.got) from None


def _decode_model(
    document: JSON, state: dict[str, Tensor], given: nn.Module | None, place: str
) -> BayesianModel:
    part = f"{place}:model"
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
            raise StoreError(part, wanted=wanted, got=f"{document!r:.200}")
    if given is not None:
        net = copy.deepcopy(given)
    elif description is None:
        wanted = "load(path, net=...): this network has code of its own, which a file cannot bring"
        raise StoreError(part, wanted=wanted, got="no net")
    else:
        net = build_net(description, part)
    fill_net(net, state, part)
    recorded = [(name, tuple(shape)) for name, shape in _pairs(parameters, part)]
    named = dict(net.named_parameters())
    for name, value in named.items():
        value.requires_grad_(name in dict(recorded))
    built = [(name, tuple(value.shape)) for name, value in named.items() if value.requires_grad]
    if built != recorded or not recorded:
        raise StoreError(part, wanted=f"parameters {recorded!r:.200}", got=f"{built!r:.200}")
    try:
        chosen: Likelihood = kinds.decode(likelihood, f"{place}:likelihood", {})
        if not isinstance(chosen, kinds.LIKELIHOODS):
            raise StoreError(
                f"{place}:likelihood", wanted="a likelihood", got=type(chosen).__name__
            )
        return BayesianModel(net, chosen, kinds.decode(prior_scale, f"{place}:prior_scale", {}))
    except StoreError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise StoreError(
            part, wanted="a network that fits a BayesianModel", got=f"{error!s:.200}"
        ) from None


def _pairs(parameters: list[JSON], part: str) -> list[tuple[str, list[int]]]:
    pairs = []
    for entry in parameters:
        match entry:
            case [str(name), list(shape)] if all(isinstance(size, int) for size in shape):
                pairs.append((name, [size for size in shape if isinstance(size, int)]))
            case _:
                raise StoreError(part, wanted="parameters as [name, shape]", got=f"{entry!r:.80}")
    return pairs


# Each posterior: its class, its tensors with their axes (P: the model's parameters, others: at
# least one), how it is made.
_POSTERIORS: dict[
    str, tuple[Any, dict[str, str], Callable[[BayesianModel, dict[str, Tensor]], nn.Module]]
] = {
    "MeanField": (
        posteriors.MeanField,
        {"mu": "P", "rho": "P"},
        lambda model, state: posteriors.MeanField(model, init=state["mu"]),
    ),
    "PointMass": (
        posteriors.PointMass,
        {"theta": "P"},
        lambda model, state: posteriors.PointMass(model, init=state["theta"]),
    ),
    "Ensemble": (
        posteriors.Ensemble,
        {"thetas": "SP"},
        lambda model, state: posteriors.Ensemble(model, init=state["thetas"]),
    ),
    "LowRank": (
        posteriors.LowRank,
        {"mu": "P", "rho": "P", "factor": "PR"},
        lambda model, state: posteriors.LowRank(
            model, rank=state["factor"].shape[1], init=state["mu"]
        ),
    ),
    "Samples": (
        posteriors.Samples,
        {"thetas": "SP"},
        lambda model, state: posteriors.Samples(state["thetas"]),
    ),
}


def encode_posterior(
    posterior: object, model: BayesianModel, place: str
) -> tuple[dict[str, JSON], dict[str, Tensor]]:
    """A posterior's kind and its tensors."""
    kind = type(posterior).__name__
    if kind not in _POSTERIORS or type(posterior) is not _POSTERIORS[kind][0]:
        raise StoreError(f"{place}:posterior", wanted=f"one of {', '.join(_POSTERIORS)}", got=kind)
    assert isinstance(posterior, nn.Module)
    if posterior.num_params != model.num_params:
        wanted = f"a posterior over the model's {model.num_params} parameters"
        raise StoreError(f"{place}:posterior", wanted=wanted, got=f"{posterior.num_params}")
    return {"kind": kind}, dict(posterior.state_dict())


def decode_posterior(
    document: JSON, state: dict[str, Tensor], model: BayesianModel, place: str
) -> Any:
    """Back from `encode_posterior`."""
    part = f"{place}:posterior"
    kind = document.get("kind") if isinstance(document, dict) and len(document) == 1 else None
    if not isinstance(kind, str) or kind not in _POSTERIORS:
        raise StoreError(part, wanted=f"one of {', '.join(_POSTERIORS)}", got=f"{document!r:.80}")
    _, axes, build = _POSTERIORS[kind]
    if state.keys() != axes.keys():
        raise StoreError(
            part, wanted=f"the tensors {', '.join(axes)}", got=f"{sorted(state)!r:.200}"
        )
    for (
        name,
        letters,
    ) in axes.items():  # before anything is built: a constructor allocates what the shapes say
        shape, size = tuple(state[name].shape), model.num_params
        fits = len(shape) == len(letters) and 0 not in shape
        if not fits or any(
            axis != size for axis, letter in zip(shape, letters, strict=True) if letter == "P"
        ):
            wanted = (
                f"{name} of shape ({', '.join(letters).replace('P', str(size))}), no axis of "
                f"length 0"
            )
            raise StoreError(part, wanted=wanted, got=f"{shape}")
    try:
        posterior = build(model, state)
        posterior.load_state_dict(state)
        return posterior
    except (ValueError, TypeError, RuntimeError, LookupError) as error:
        raise StoreError(
            part, wanted=f"tensors that fit {kind} and the model", got=f"{error!s:.200}"
        ) from None

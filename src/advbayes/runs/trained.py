"""A trained model ready to predict: from a run folder or from a bundle that somebody sent."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advbayes import store
from advbayes.attacks.balls import Ball
from advbayes.channels import Noise
from advbayes.checks import InputError
from advbayes.model import BayesianModel
from advbayes.posteriors import Ensemble, Samples
from advbayes.predictive import PosteriorPredictive
from advbayes.purification import Purifier
from advbayes.runs.building import Prepared, own_classes, own_net, reach_of
from advbayes.runs.config import NETWORKS
from advbayes.runs.folder import Run
from advbayes.runs.named import make_ball
from advbayes.store import thetas_of
from advbayes.store.bundle import Preparation
from advbayes.types import Channel


@dataclass(frozen=True, eq=False, kw_only=True)
class Trained(Preparation):
    """What a bundle holds, and what predictions need to know of the data it was trained on."""

    path: Path
    model: BayesianModel
    posterior: Any
    channel: Channel | None
    task: str
    event: tuple[int, ...]
    box: tuple[float, float] | None
    norm: str
    eps: float
    defense: str
    seed: int
    mask: Tensor | None = None
    scale: Tensor | None = None

    def to(self, device: torch.device | str) -> Trained:
        """The same model on another device."""
        posterior = copy.deepcopy(self.posterior).to(device)
        return replace(self, model=self.model.to(device), posterior=posterior)

    def reach(
        self, eps: float, fixed: Sequence[str] = (), feature_eps: Sequence[str] = ()
    ) -> tuple[Tensor | None, Tensor | None]:
        """Mask and scale of a ball around its examples: what is asked for, or as it was trained."""
        mask, scale = reach_of(self.feature_names, self.scaling, eps, fixed, feature_eps)
        if mask is None:
            mask = self.mask
        elif self.encoding is not None:  # text and what is missing stay out of reach
            mask = mask & self.encoding.mask
        return mask, self.scale if scale is None else scale

    def ball(
        self,
        norm: str | None = None,
        eps: float | None = None,
        fixed: Sequence[str] = (),
        feature_eps: Sequence[str] = (),  # name=number, in raw units
    ) -> Ball:
        """The ball that is asked for, or the one trained against, within the data's box."""
        eps = self.eps if eps is None else eps
        mask, scale = self.reach(eps, fixed, feature_eps)
        missing = None if self.encoding is None else self.encoding.indicators(self.scaling)
        return make_ball(norm or self.norm, eps, self.box, mask, scale, missing)

    def thetas(self, num: int = 20) -> Tensor:
        """The thetas that predictions use, keyed by the run's seed: the same on every device."""
        posterior = copy.deepcopy(self.posterior).cpu()
        return thetas_of(posterior, num, self.seed).to(self.model.device)

    def predict(self, num: int = 20) -> PosteriorPredictive:
        """The posterior predictive."""
        return PosteriorPredictive(self.model, self.thetas(num))

    def purified(
        self, data: Prepared, num: int, update: str = "online", channel: Channel | None = None
    ) -> Purifier:
        """The purified predictive, exact over the training set; absent, the channel is its own."""
        through, reference = channel or self.channel or Noise(0.0), (data.x_train, data.y_train)
        return Purifier(self.model, through, self.thetas(num), reference, update)

    def point(self) -> PosteriorPredictive:
        """One net, not averaged: the posterior's mean, or the first of finitely many members."""
        match self.posterior:
            case Ensemble() | Samples():
                theta = self.thetas(1)[:1]
            case posterior:
                theta = posterior.mean.unsqueeze(0)
        return PosteriorPredictive(self.model, theta)


def load_trained(path: str | os.PathLike[str], *, trusted: bool = False) -> Trained:
    """The model of a finished run, or of a bundle; code of its own runs only when `trusted`.

    >>> load_trained("absent")
    Traceback (most recent call last):
    ...
    advbayes.store.errors.MissingError: absent: wanted a run folder or a bundle, got nothing (no such file)
    """  # noqa: E501
    place = Path(path)
    if not place.exists():
        raise store.MissingError(place, "a run folder or a bundle")
    described = _mapping(store.read_bundle(store.model_file(place))[1].get("extra"))
    network, channel = described.get("network"), described.get("channel")
    custom = type(network) is str and network not in NETWORKS
    bundle = store.load(
        place,
        net=own_net(str(network), trusted=trusted) if custom else None,
        own=() if channel is None else own_classes(str(channel), trusted=trusted),
    )
    extra, threat = _mapping(bundle.extra), _mapping(bundle.threat_model)
    if (place / "config.toml").is_file():
        Run.open(place).check_sealed(extra.get("config"), "model")
    try:
        return _trained(place, bundle, extra, threat)
    except InputError:
        raise
    except (TypeError, ValueError, LookupError, OverflowError, RuntimeError) as error:
        wanted = "a model whose extra and threat_model are as advbayes train writes them"
        got = f"{type(error).__name__}: {error!s:.80}"
        raise store.StoreError(path, wanted, got) from None


def _trained(
    path: Path, bundle: store.Bundle, extra: dict[str, Any], threat: dict[str, Any]
) -> Trained:
    box, mask, scale = (threat.get(name) for name in ("box", "mask", "scale"))
    names = {key: tuple(map(str, extra.get(key, ()))) for key in ("feature_names", "target_names")}
    return Trained(
        path=path,
        model=bundle.model,
        posterior=bundle.posterior,
        channel=bundle.channel,
        task=str(extra.get("task", "classification" if bundle.class_names else "regression")),
        event=tuple(int(size) for size in extra.get("event", ())),
        box=None if box is None else (float(box[0]), float(box[1])),
        norm=str(threat.get("norm", "l2")),
        eps=float(threat.get("eps", 0.0)),
        defense=str(extra.get("defense", "model")),
        seed=int(extra.get("seed", 0)),
        mask=None if mask is None else torch.as_tensor(mask, dtype=torch.bool),
        scale=None if scale is None else torch.as_tensor(scale, dtype=torch.float32),
        **vars(bundle.preparation()) | names,
    )


def _mapping(value: Any) -> dict[str, Any]:
    return value if type(value) is dict else {}

"""From a configuration to objects: data, network, model, posterior, channel, objective."""

from __future__ import annotations

import importlib
import math
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from advbayes.attacks.balls import Ball
from advbayes.attacks.parts import is_attack
from advbayes.channels import AttackChannel, Learned, Mixture, Noise
from advbayes.datasets import Dataset, Standardize, class_weights, from_csv, from_npz, load_dataset
from advbayes.datasets.encoding import Encoding
from advbayes.datasets.fetching import Downloading
from advbayes.evaluation.inputs import warn_units
from advbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from advbayes.model import BayesianModel
from advbayes.networks import ConvGenerator, FullyConnectedGenerator, conv_net, mlp
from advbayes.objectives import ChannelELBO, Consistency, LogitPairing, Penalty, Trades
from advbayes.posteriors import Posterior
from advbayes.runs.config import ConfigError, RunConfig, listed, parse_feature_eps
from advbayes.runs.named import make_ball, named_channel, named_posterior
from advbayes.seeds import GlobalStream, seed_for
from advbayes.types import Attack, Channel


@dataclass(frozen=True, eq=False)
class Prepared:
    """A data set as the model sees it: tables standardised, images as they are.

    >>> from advbayes.runs.config import make_config
    >>> prepare(make_config({"data": "diabetes"})).x_train.mean(0).abs().max() < 1e-5
    tensor(True)
    """

    dataset: Dataset
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    scaling: Standardize | None
    mask: Tensor | None = None  # features that the attacker may change; None: all
    scale: Tensor | None = None  # how much more or less than eps each may change; None: all alike

    @property
    def num_outputs(self) -> int:
        """Classes, or targets of a regression."""
        return len(self.dataset.class_names) or max(1, self.y_train[0].numel())

    @property
    def box(self) -> tuple[float, float] | None:
        return self.dataset.box

    def ball(self, norm: str, eps: float, box: tuple[float, float] | None = None) -> Ball:
        """The adversary of this data: its mask, its per-feature budgets, nothing that is missing.

        >>> from advbayes.runs.config import make_config
        >>> prepare(make_config({"data": "diabetes", "fixed": ["sex"]})).ball("l2", 0.3)
        L2(0.3, mask=<tensor (10,)>)
        """
        return make_ball(norm, eps, box, self.mask, self.scale, self.dataset.indicators)

    def to(self, device: torch.device | str) -> Prepared:
        """The examples on another device; the data set itself stays where it is."""
        names = ("x_train", "y_train", "x_test", "y_test")
        return replace(self, **{name: vars(self)[name].to(device) for name in names})


def prepare(
    config: RunConfig, *, downloading: Downloading | None = None, encoding: Encoding | None = None
) -> Prepared:
    """Load and scale the configuration's data; with the encoding of a trained model, as that model
    takes them.

    >>> from advbayes.runs.config import make_config
    >>> prepare(make_config({"data": "digits", "num_train": 100})).x_train.shape
    torch.Size([100, 1, 8, 8])
    """
    dataset = _load(config, downloading, encoding)
    num, scaling = config.num_train, dataset.scaling
    x_train, y_train = dataset.x_train[:num], dataset.y_train[:num]
    x_test, y_test = dataset.x_test, dataset.y_test
    if scaling is not None:
        x_train, x_test = scaling.transform(x_train), scaling.transform(x_test)
        if dataset.task == "regression":
            y_train, y_test = scaling.transform_target(y_train), scaling.transform_target(y_test)
    asked = config.eps, config.fixed, config.feature_eps
    mask, scale = reach_of(dataset.feature_names, scaling, *asked)
    if dataset.mask is not None:
        mask = dataset.mask if mask is None else mask & dataset.mask
    return Prepared(dataset, x_train, y_train, x_test, y_test, scaling, mask, scale)


def _load(config: RunConfig, downloading: Downloading | None, encoding: Encoding | None) -> Dataset:
    path, target = config.file, config.target
    if path is None:
        return load_dataset(
            config.data, config.root, target=target, seed=config.seed, progress=downloading
        )
    how: Any = {"task": config.task, "seed": config.seed}
    if path.suffix.lower() != ".csv":
        return from_npz(path, **how)
    assert target is not None
    targets = listed(target)
    how |= {"features": config.features, "drop": config.drop, "encoding": encoding}
    how |= {"text": config.text if encoding is None else ()}
    return from_csv(path, targets, **how)


def reach_of(
    names: Sequence[str],
    scaling: Standardize | None,
    eps: float,
    fixed: Sequence[str],
    feature_eps: Sequence[str],  # name=number, in raw units
) -> tuple[Tensor | None, Tensor | None]:
    """Mask and scale of the ball: which features may change, and by how much of eps.

    >>> scaling = Standardize(torch.zeros(2), torch.tensor([1.0, 10.0]))
    >>> reach_of(("a", "b"), scaling, 0.5, ["a"], ["b=10"])
    (tensor([False,  True]), tensor([1., 2.]))
    >>> reach_of(("age", "sex=f", "sex=m"), None, 0.5, ["sex"], [])[0]  # a column of text, whole
    tensor([ True, False, False])
    """
    columns = [name.partition("=")[0] for name in names]
    budgets = parse_feature_eps(feature_eps)
    if budgets and eps == 0:  # of which they are multiples
        raise ConfigError("eps: must be > 0 where feature_eps is given, got 0")
    for key, given in (("fixed", fixed), ("feature_eps", budgets)):
        known = {*names, *columns} if key == "fixed" else names
        if unknown := [name for name in given if name not in known]:
            there = ", ".join(names[:20]) if names else "none with a name"
            wanted = f"{key}: must name features of the data"
            raise ConfigError(f"{wanted}, got {', '.join(unknown)}; there are {there}")
    fixed = [name for name, column in zip(names, columns, strict=True) if {name, column} & {*fixed}]
    mask = torch.tensor([name not in fixed for name in names]) if fixed else None
    if mask is not None and not bool(mask.any()):
        wanted = "fixed: must leave at least one feature that the attacker may change"
        raise ConfigError(f"{wanted}, got all of them")
    if not budgets:
        return mask, None
    std = torch.ones(len(names)) if scaling is None else scaling.std.reshape(-1).float()
    scales = [
        budgets[name] / (eps * float(spread)) if name in budgets else 1.0
        for name, spread in zip(names, std, strict=True)
    ]
    return mask, torch.tensor(scales)


def build_net(config: RunConfig, data: Prepared, *, trusted: bool = False) -> nn.Module:
    """The configuration's network, drawn from its seed; a `module:factory` only when `trusted`.

    >>> from advbayes.runs.config import make_config
    >>> config = make_config({"data": "diabetes", "hidden": [3]})
    >>> [tuple(p.shape) for p in build_net(config, prepare(config)).parameters()]
    [(3, 10), (3,), (1, 3), (1,)]
    """
    event = tuple(data.x_train.shape[1:])
    square = len(event) == 3 and event[1] == event[2]
    outputs = data.num_outputs
    if data.dataset.task == "regression" and config.noise_scale == "heteroscedastic":
        outputs *= 2  # means, then log-scales
    kind = network_kind(config, event)
    with GlobalStream(seed_for(config.seed, "network")):
        if kind == "conv":
            if not square:
                wanted = f"network: must be auto or mlp for inputs of shape {event}"
                raise ConfigError(f"{wanted}, got 'conv' (for square images)")
            return conv_net(outputs, event[0], event[1])
        if kind == "mlp":
            layers = mlp(math.prod(event), outputs, tuple(config.hidden))
            return nn.Sequential(nn.Flatten(), *layers) if len(event) > 1 else layers
        return own_net(kind, trusted=trusted)


def network_kind(config: RunConfig, event: tuple[int, ...]) -> str:
    """conv, mlp or module:factory; auto is conv for square images.

    >>> from advbayes.runs.config import make_config
    >>> network_kind(make_config({"data": "digits"}), (1, 8, 8))
    'conv'
    """
    if config.network != "auto":
        return config.network
    square = len(event) == 3 and event[1] == event[2]
    return "conv" if square and event[1] >= 4 else "mlp"


def own_net(network: str, *, trusted: bool = False) -> nn.Module:
    """What the user's `module:factory` makes; nothing is imported unless `trusted`.

    >>> own_net("os:getcwd")
    Traceback (most recent call last):
    ...
    advbayes.runs.config.ConfigError: network: 'os:getcwd' names code of your own, which runs only with --trust-network
    """  # noqa: E501
    match net := import_factory("network", network, trusted=trusted):
        case nn.Module():
            return net
    wanted = f"network: {network!r} must return a torch.nn.Module"
    raise ConfigError(f"{wanted}, got {type(net).__name__}")


def own_channel(name: str, ball: Ball, sigma: float, *, trusted: bool = False) -> Channel:
    """The channel that the user's `module:factory` makes; an attack becomes one with noise."""
    made = import_factory("channel", name, ball, sigma, trusted=trusted)
    if isinstance(made, Channel):
        return made
    if is_attack(made):
        return AttackChannel(made, sigma)
    wanted = f"channel: {name!r} must return a channel or an attack"
    raise ConfigError(f"{wanted}, got {type(made).__name__}")


def own_attack(name: str, ball: Ball, *, trusted: bool = False) -> Attack:
    """The attack within the ball that the user's `module:factory` makes."""
    made = import_factory("attack", name, ball, trusted=trusted)
    if not is_attack(made):
        wanted = f"attack: {name!r} must return an attack, attack(predict, x, y, generator=...)"
        raise ConfigError(f"{wanted}, got {type(made).__name__}")
    return made  # type: ignore[no-any-return]


def own_classes(name: str, *, trusted: bool = False) -> list[type]:
    """The classes in the module of the user's channel, which its saved settings may name."""
    module = _own_module("channel", name, trusted)
    return [value for value in vars(module).values() if isinstance(value, type)]


def _own_module(key: str, name: str, trusted: bool) -> ModuleType:
    """The module of a `module:factory`, imported only if `trusted`."""
    if not trusted:
        wanted = "names code of your own, which runs only with --trust-network"
        raise ConfigError(f"{key}: {name!r} {wanted}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name.partition(":")[0])


def import_factory(key: str, name: str, *arguments: object, trusted: bool = True) -> Any:
    """What the user's `module:factory` gives when called."""
    try:
        return getattr(_own_module(key, name, trusted), name.partition(":")[2])(*arguments)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises is the user's to mend
        wanted = f"{key}: must be an importable module:factory, got {name!r}"
        raise ConfigError(f"{wanted}: {type(error).__name__}: {error}") from error


def build_model(
    config: RunConfig, data: Prepared, *, trusted: bool = False
) -> tuple[BayesianModel, Posterior]:
    """Model and untrained posterior.

    >>> from advbayes.runs.config import make_config
    >>> config = make_config({"data": "diabetes", "hidden": [3], "posterior": "point"})
    >>> build_model(config, prepare(config))[1].num_params
    38
    """
    likelihood: Likelihood
    outputs = data.num_outputs
    if data.dataset.task == "classification":
        likelihood = Categorical()
    elif config.noise_scale == "heteroscedastic":
        likelihood = HeteroscedasticGaussian()
    elif config.noise_scale == "learned":
        likelihood = Gaussian(1.0, learned=True, num_outputs=outputs)
    else:
        likelihood = Gaussian(config.noise_scale, num_outputs=outputs)
    net = build_net(config, data, trusted=trusted)
    model = BayesianModel(net, likelihood, config.prior_scale)
    chosen = {"members": config.members, "rank": config.rank, "seed": config.seed}
    return model, named_posterior(config.posterior, model, init_scale=config.init_scale, **chosen)


def build_defense(
    config: RunConfig, data: Prepared, *, trusted: bool = False
) -> tuple[Channel, ChannelELBO]:
    """Channel and objective of a named defense (docs/defenses.md), or of one's own if `trusted`.

    >>> from advbayes.runs.config import make_config
    >>> config = make_config({"data": "diabetes", "defense": "noise", "sigma": 0.5})
    >>> build_defense(config, prepare(config))[0]
    Noise(sigma=0.5)
    """
    regression = data.dataset.task == "regression"
    ball = data.ball(config.norm, config.eps)
    if config.defense not in ("none", "noise", "consistency"):
        warn_units(ball, data.x_train, "the training adversary")
        if data.mask is not None and not bool(data.mask.any()):
            warnings.warn(
                "every feature is text, missing or fixed, so the attacker can change none of "
                "them: this is training without an adversary",
                stacklevel=2,
            )

    if config.channel is not None:
        channel: Channel = own_channel(config.channel, ball, config.sigma, trusted=trusted)
    elif config.defense in ("nn", "nn50"):
        channel = learned_channel(config, data, ball)
        if config.defense == "nn50":
            channel = Mixture([0.5, 0.5], [Noise(0.0), channel])
    else:
        channel = named_channel(
            config.defense, ball, config.sigma, regression=regression, steps=config.attack_steps
        )
    penalties: dict[str, Penalty] = {
        "trades": Trades(config.beta, likelihood="clean"),
        "alp": LogitPairing(config.beta),
        "consistency": Consistency(config.beta),
    }
    if regression and config.defense == "consistency":
        wanted = "defense: must be another than consistency for regression, where no classes vote"
        raise ConfigError(f"{wanted}, got 'consistency'")
    weights = None
    if config.class_weight is not None:
        if regression:
            wanted = "class_weight: must be left out for regression"
            raise ConfigError(f"{wanted}, got {config.class_weight!r}")
        weights = class_weights(data.y_train, data.num_outputs)
    objective = ChannelELBO(
        len(data.x_train),
        config.num_theta,
        config.num_channel,
        config.bound,
        penalties.get(config.defense),
        kl_weight=config.kl_weight,
        class_weight=weights,
    )
    return channel, objective


def learned_channel(config: RunConfig, data: Prepared, ball: Ball) -> Learned:
    """The learned adversary, for square images a convolutional one."""
    event, outputs = tuple(data.x_train.shape[1:]), data.num_outputs
    classes = None if data.dataset.task == "regression" else outputs
    with GlobalStream(seed_for(config.seed, "adversary")):
        if len(event) == 3 and event[1] == event[2] and classes is not None:
            return Learned(ConvGenerator(classes, event[0], event[1]), ball)
        num_targets = outputs if classes is None else 1
        return Learned(FullyConnectedGenerator(math.prod(event), num_targets, classes), ball)

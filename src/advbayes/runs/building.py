"""From a configuration to objects: data, network, model, posterior, channel, objective."""

from __future__ import annotations

import importlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from advbayes import checks
from advbayes.attacks import entropy, margin, nll, one_step, pgd, squared_error
from advbayes.attacks.balls import L2, Ball, Linf
from advbayes.attacks.parts import is_attack
from advbayes.channels import AttackChannel, Learned, Mixture, Noise
from advbayes.datasets import Dataset, Standardize, class_weights, from_csv, from_npz, load_dataset
from advbayes.evaluation.inputs import warn_units
from advbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from advbayes.model import BayesianModel
from advbayes.networks import ConvGenerator, FullyConnectedGenerator, conv_net, mlp
from advbayes.objectives import ChannelELBO, Consistency, LogitPairing, Penalty, Trades
from advbayes.posteriors import Ensemble, LowRank, MeanField, PointMass, Posterior
from advbayes.runs.config import ConfigError, RunConfig, parse_feature_eps
from advbayes.seeds import GlobalStream, seed_for
from advbayes.types import Channel

Downloading = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all


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
    def box(self) -> tuple[float, float] | None:
        return self.dataset.box

    def to(self, device: torch.device | str) -> Prepared:
        """The examples on another device; the data set itself stays where it is."""
        names = ("x_train", "y_train", "x_test", "y_test")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def prepare(config: RunConfig, *, downloading: Downloading | None = None) -> Prepared:
    """Load and scale the configuration's data.

    >>> from advbayes.runs.config import make_config
    >>> prepare(make_config({"data": "digits", "num_train": 100})).x_train.shape
    torch.Size([100, 1, 8, 8])
    """
    path = config.file
    if path is None:
        dataset = load_dataset(
            config.data, config.root, target=config.target, seed=config.seed, progress=downloading
        )
    elif path.suffix.lower() == ".csv":
        assert config.target is not None
        target = config.target if "," not in config.target else config.target.split(",")
        dataset = from_csv(
            path,
            target=target,
            task=config.task,
            features=config.features,
            drop=config.drop,
            seed=config.seed,
        )
    else:
        dataset = from_npz(path, task=config.task, seed=config.seed)
    scaling = dataset.scaling
    num = config.num_train
    x_train, y_train, x_test, y_test = (
        dataset.x_train[:num],
        dataset.y_train[:num],
        dataset.x_test,
        dataset.y_test,
    )
    if scaling is not None:
        x_train, x_test = scaling.transform(x_train), scaling.transform(x_test)
        if dataset.task == "regression":
            y_train, y_test = scaling.transform_target(y_train), scaling.transform_target(y_test)
    mask, scale = reach_of(
        dataset.feature_names,
        scaling,
        config.eps,
        config.fixed,
        parse_feature_eps(config.feature_eps),
    )
    if dataset.mask is not None:
        mask = dataset.mask if mask is None else mask & dataset.mask
    return Prepared(dataset, x_train, y_train, x_test, y_test, scaling, mask, scale)


def numbers_of_rows(dataset: Dataset) -> list[str]:
    """Features that only number the rows of a table: consecutive whole numbers, each once.

    >>> x, y = torch.tensor([[3.0, 1.0], [2.0, 1.0], [4.0, 2.0]]), torch.zeros(3)
    >>> names = ("id", "age")
    >>> numbers_of_rows(Dataset("t", "regression", x[:2], y[:2], x[2:], y[2:], feature_names=names))
    ['id']
    """
    if not dataset.feature_names:  # images
        return []
    steps = torch.cat([dataset.x_train, dataset.x_test]).sort(0).values.diff(dim=0)
    consecutive = (steps == 1).all(0).tolist()
    return [name for name, one in zip(dataset.feature_names, consecutive, strict=True) if one]


def reach_of(
    names: Sequence[str],
    scaling: Standardize | None,
    eps: float,
    fixed: Sequence[str],
    feature_eps: Mapping[str, float],  # in raw units
) -> tuple[Tensor | None, Tensor | None]:
    """Mask and scale of the ball: which features may change, and by how much of eps.

    >>> scaling = Standardize(torch.zeros(2), torch.tensor([1.0, 10.0]))
    >>> reach_of(("a", "b"), scaling, 0.5, ["a"], {"b": 10.0})
    (tensor([False,  True]), tensor([1., 2.]))
    >>> reach_of(("age", "sex=f", "sex=m"), None, 0.5, ["sex"], {})[0]  # a column of text, whole
    tensor([ True, False, False])
    """
    columns = [name.partition("=")[0] for name in names]
    for key, given in (("fixed", fixed), ("feature_eps", feature_eps)):
        known = {*names, *columns} if key == "fixed" else names
        if unknown := [name for name in given if name not in known]:
            there = ", ".join(names[:20]) if names else "none with a name"
            raise ConfigError(
                f"{key}: must name features of the data, got {', '.join(unknown)}; there are "
                f"{there}"
            )
    fixed = [name for name, column in zip(names, columns, strict=True) if {name, column} & {*fixed}]
    mask = torch.tensor([name not in fixed for name in names]) if fixed else None
    if mask is not None and not bool(mask.any()):
        raise ConfigError(
            "fixed: must leave at least one feature that the attacker may change, got all of them"
        )
    if not feature_eps:
        return mask, None
    std = torch.ones(len(names)) if scaling is None else scaling.std.reshape(-1).float()
    scales = [
        feature_eps[name] / (eps * float(spread)) if name in feature_eps else 1.0
        for name, spread in zip(names, std, strict=True)
    ]
    return mask, torch.tensor(scales)


def build_net(config: RunConfig, data: Prepared, *, trusted: bool = False) -> nn.Module:
    """The configuration's network, drawn from its seed. A `module:factory` is imported only when
    `trusted`.

    >>> from advbayes.runs.config import make_config
    >>> config = make_config({"data": "diabetes", "hidden": [3]})
    >>> [tuple(p.shape) for p in build_net(config, prepare(config)).parameters()]
    [(3, 10), (3,), (1, 3), (1,)]
    """
    dataset, event = data.dataset, tuple(data.x_train.shape[1:])
    images = len(event) == 3
    outputs = (
        len(dataset.class_names)
        if dataset.task == "classification"
        else max(1, data.y_train[0].numel())
    )
    if dataset.task == "regression" and config.noise_scale == "heteroscedastic":
        outputs *= 2  # means, then log-scales
    kind = (
        ("conv" if images and event[1] == event[2] >= 4 else "mlp")
        if config.network == "auto"
        else config.network
    )
    with GlobalStream(seed_for(config.seed, "network")):
        if kind == "conv":
            if not images or event[1] != event[2]:
                raise ConfigError(
                    f"network: must be auto or mlp for inputs of shape {event}, got 'conv' (for "
                    f"square images)"
                )
            return conv_net(outputs, event[0], event[1])
        if kind == "mlp":
            layers = mlp(math.prod(event), outputs, tuple(config.hidden))
            return nn.Sequential(nn.Flatten(), *layers) if len(event) > 1 else layers
        return own_net(kind, trusted=trusted)


def own_net(network: str, *, trusted: bool = False) -> nn.Module:
    """Call the user's `module:factory`, looked for in the working folder first; nothing is imported
    unless `trusted`.

    >>> own_net("os:getcwd")
    Traceback (most recent call last):
    ...
    advbayes.runs.config.ConfigError: network: 'os:getcwd' names code of your own, which runs only with --trust-network
    """  # noqa: E501
    _refuse_unless(trusted, "network", network)
    net = import_factory("network", network)
    if not isinstance(net, nn.Module):
        raise ConfigError(
            f"network: {network!r} must return a torch.nn.Module, got {type(net).__name__}"
        )
    return net


def own_channel(name: str, ball: Ball, sigma: float, *, trusted: bool = False) -> Channel:
    """What the user's `module:factory` makes of the ball and sigma: a channel, or an attack, which
    sigma makes one."""
    _refuse_unless(trusted, "channel", name)
    made = import_factory("channel", name, ball, sigma)
    if isinstance(made, Channel):
        return made
    if is_attack(made):
        return AttackChannel(made, sigma)
    raise ConfigError(
        f"channel: {name!r} must return a channel or an attack, got {type(made).__name__}"
    )


def own_classes(name: str, *, trusted: bool = False) -> list[type]:
    """The classes in the module of the user's channel, which its saved settings may name."""
    _refuse_unless(trusted, "channel", name)
    return [value for value in vars(_module(name)).values() if isinstance(value, type)]


def _refuse_unless(trusted: bool, key: str, name: str) -> None:
    if not trusted:
        raise ConfigError(
            f"{key}: {name!r} names code of your own, which runs only with --trust-network"
        )


def _module(name: str) -> ModuleType:
    """The module of a `module:factory`, looked for in the working folder first."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name.partition(":")[0])


def import_factory(key: str, name: str, *arguments: object) -> Any:
    """What the user's `module:factory` gives when called; the module is looked for in the working
    folder first."""
    try:
        return getattr(_module(name), name.partition(":")[2])(*arguments)
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
    net = build_net(config, data, trusted=trusted)
    outputs = 1 if data.y_train.ndim == 1 else data.y_train.shape[1]
    if data.dataset.task == "classification":
        model = BayesianModel(net, Categorical(), config.prior_scale)
    elif config.noise_scale == "heteroscedastic":
        model = BayesianModel(net, HeteroscedasticGaussian(), config.prior_scale)
    elif config.noise_scale == "learned":
        model = BayesianModel(
            net, Gaussian(1.0, learned=True, num_outputs=outputs), config.prior_scale
        )
    else:
        model = BayesianModel(
            net, Gaussian(config.noise_scale, num_outputs=outputs), config.prior_scale
        )
    posterior = named_posterior(
        config.posterior,
        model,
        seed=config.seed,
        members=config.members,
        rank=config.rank,
        init_scale=config.init_scale,
    )
    return model, posterior


def named_posterior(
    name: str,
    model: BayesianModel,
    *,
    seed: int = 0,
    members: int = 5,
    rank: int = 5,
    init_scale: float = 0.02,
) -> Posterior:
    """An untrained posterior of a named family.

    >>> named_posterior(
    ...     "ensemble", BayesianModel(nn.Linear(2, 2), Categorical()), members=3
    ... ).thetas.shape
    torch.Size([3, 6])
    """
    match checks.choice("posterior", name, ("mean_field", "point", "ensemble", "low_rank")):
        case "mean_field":
            return MeanField(model, init_scale)
        case "point":
            return PointMass(model)
        case "ensemble":
            return Ensemble(model, members, seed=seed)
        case _:
            return LowRank(model, rank, init_scale, seed=seed)


def make_ball(
    norm: str,
    eps: float,
    box: tuple[float, float] | None = None,
    mask: Tensor | None = None,
    scale: Tensor | float | None = None,
) -> Ball:
    """The ball of a named norm.

    >>> make_ball("linf", 0.1, (0, 1))
    Linf(0.1, box=(0, 1))
    """
    return (L2 if norm == "l2" else Linf)(eps, box=box, scale=scale, mask=mask)


def build_defense(
    config: RunConfig, data: Prepared, *, trusted: bool = False
) -> tuple[Channel, ChannelELBO]:
    """Channel and objective of a named defense (docs/defenses.md); a channel of one's own is made
    only when `trusted`.

    >>> from advbayes.runs.config import make_config
    >>> config = make_config({"data": "diabetes", "defense": "noise", "sigma": 0.5})
    >>> build_defense(config, prepare(config))[0]
    Noise(sigma=0.5)
    """
    regression = data.dataset.task == "regression"
    ball = make_ball(config.norm, config.eps, mask=data.mask, scale=data.scale)
    if config.defense not in ("none", "noise", "consistency"):
        warn_units(ball, data.x_train, "the training adversary")
        if data.mask is not None and not bool(data.mask.any()):
            warnings.warn(
                "every feature is text, missing or fixed, so the attacker can change none of "
                "them: this is training without an adversary",
                stacklevel=2,
            )

    def learned() -> Learned:
        event = tuple(data.x_train.shape[1:])
        classes = None if regression else len(data.dataset.class_names)
        with GlobalStream(seed_for(config.seed, "adversary")):
            if len(event) == 3 and event[1] == event[2] and classes is not None:
                return Learned(ConvGenerator(classes, event[0], event[1]), ball)
            outputs = max(1, data.y_train[0].numel())
            return Learned(FullyConnectedGenerator(math.prod(event), outputs, classes), ball)

    if config.channel is not None:
        channel: Channel = own_channel(config.channel, ball, config.sigma, trusted=trusted)
    elif config.defense in ("nn", "nn50"):
        channel = (
            learned() if config.defense == "nn" else Mixture([0.5, 0.5], [Noise(0.0), learned()])
        )
    else:
        channel = named_channel(
            config.defense, ball, config.sigma, regression=regression, steps=config.attack_steps
        )
    penalties: dict[str, Penalty] = {
        "trades": Trades(config.beta, likelihood="clean"),
        "alp": LogitPairing(config.beta),
        "consistency": Consistency(config.beta),
    }
    penalty = penalties.get(config.defense)
    if regression and config.defense == "consistency":
        raise ConfigError(
            "defense: must be another than consistency for regression, where no classes vote, got "
            "'consistency'"
        )
    weights = None
    if config.class_weight is not None:
        if data.dataset.task != "classification":
            raise ConfigError(
                f"class_weight: must be left out for regression, got {config.class_weight!r}"
            )
        weights = class_weights(data.y_train, len(data.dataset.class_names))
    objective = ChannelELBO(
        len(data.x_train),
        config.num_theta,
        config.num_channel,
        config.bound,
        penalty,
        kl_weight=config.kl_weight,
        class_weight=weights,
    )
    return channel, objective


MIN_STEPS, MIN_EPOCHS, MAX_EPOCHS = 2000, 10.0, 500.0
LAST_LR = 0.01  # of the first, at the end of the training


def schedule(
    epochs: float | None, decay: float | None, num_data: int, batch_size: int
) -> tuple[float, float]:
    """Passes over the data and the factor on the learning rate for each, where they are left open:
    enough passes for 2,000 steps, but 10 to 500 of them; a rate that falls to a hundredth over
    these, or over `epochs` if that is more. In fewer passes it falls no faster, so that a short
    training is not one at a rate of nothing.

    >>> schedule(None, None, 1280, 128), schedule(5, None, 1280, 128), schedule(5, 0.9, 1280, 128)
    ((200.0, 0.9772372209558107), (5.0, 0.9772372209558107), (5.0, 0.9))
    """
    enough = MIN_STEPS * min(batch_size, num_data) / num_data
    usual = min(max(enough, MIN_EPOCHS), MAX_EPOCHS)
    epochs = usual if epochs is None else checks.number("epochs", epochs, low=0, open_low=True)
    return epochs, LAST_LR ** (1 / max(epochs, usual)) if decay is None else decay


NAMED_CHANNELS = ("none", "noise", "at", "os", "os50", "mix", "pgd", "trades", "alp", "consistency")


def named_channel(
    name: str, ball: Ball, sigma: float, *, regression: bool = False, steps: int = 7
) -> Channel:
    """The channel of a named defense, in the units of the ball.

    >>> named_channel("noise", L2(1.0), 0.1)
    Noise(sigma=0.1)
    """
    checks.choice("channel", name, NAMED_CHANNELS)
    main = squared_error if regression else nll
    losses = (squared_error,) if regression else (nll, margin, entropy)
    match name:
        case "none":
            return Noise(0.0)
        case "noise" | "consistency":
            return Noise(sigma)
        case "at":
            return Mixture([0.5, 0.5], [Noise(0.0), AttackChannel(one_step(ball, main))])
        case "os":
            return AttackChannel(one_step(ball, main), sigma)
        case "os50":
            return Mixture([0.5, 0.5], [Noise(0.0), AttackChannel(one_step(ball, main), sigma)])
        case "mix":
            attacked = [AttackChannel(one_step(ball, loss), sigma) for loss in losses]
            return Mixture([0.4] + [0.6 / len(losses)] * len(losses), [Noise(sigma), *attacked])
        case "pgd":
            return AttackChannel(pgd(ball, steps, main), sigma)
        case _:  # the penalties of trades and alp compare with what the attack gives
            return AttackChannel(pgd(ball, steps, main))

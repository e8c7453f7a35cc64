"""`save` and `load`: what comes back predicts the same, and nothing but the listed classes can
come."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    PGD,
    AttackChannel,
    BayesianModel,
    Categorical,
    Ensemble,
    Gaussian,
    HeteroscedasticGaussian,
    Learned,
    Linf,
    LowRank,
    MeanField,
    Mixture,
    Noise,
    PointMass,
    PosteriorPredictive,
    Purifier,
    Samples,
    attacks,
    entropy,
    margin,
    nll,
    one_step,
    squared_error,
)
from advbayes.networks import ConvGenerator, FullyConnectedGenerator, conv_net, mlp, with_group_norm
from advbayes.runs import load_trained
from advbayes.store import (
    StoreError,
    archive,
    kinds,
    load,
    read_bundle,
    read_manifest,
    save,
    versions,
    write_bundle,
)
from tests import faults

DATA = Path(__file__).parent / "data"


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scrambled(posterior: Any) -> Any:
    """Every tensor of the posterior its own random numbers, so that none is what the constructor
    makes."""
    for index, value in enumerate(posterior.state_dict().values()):
        value.copy_(torch.randn(value.shape, generator=seeded(index)))
    return posterior


POSTERIORS: dict[str, Callable[[BayesianModel], Any]] = {
    "MeanField": MeanField,
    "PointMass": PointMass,
    "Ensemble": lambda model: Ensemble(model, num=3),
    "LowRank": lambda model: LowRank(model, rank=2),
    "Samples": lambda model: Samples(torch.zeros(4, model.num_params)),
}


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("form", ["m", "m.advbayes"])
def test_posteriors_come_back(tmp_path: Path, kind: str, form: str) -> None:
    model = BayesianModel(mlp(3, 2), Categorical(), prior_scale=0.7)
    posterior = scrambled(POSTERIORS[kind](model))
    save(tmp_path / form, model=model, posterior=posterior)
    bundle = load(tmp_path / form)
    assert type(bundle.posterior) is type(posterior)
    assert bundle.model.prior_scale == 0.7
    assert torch.equal(bundle.model.initial_theta(), model.initial_theta())
    for name, value in posterior.state_dict().items():
        assert torch.equal(bundle.posterior.state_dict()[name], value)
    thetas = posterior.sample(5, generator=seeded())
    assert torch.equal(bundle.posterior.sample(5, generator=seeded()), thetas)
    x = torch.randn(6, 3, generator=seeded(1))
    mine, theirs = (
        PosteriorPredictive(model, thetas)(x),
        PosteriorPredictive(bundle.model, thetas)(x),
    )
    assert torch.equal(mine.probs, theirs.probs)  # type: ignore[attr-defined]
    assert bundle.versions == versions()
    assert (bundle.channel, bundle.scaling, bundle.class_names, bundle.audit, bundle.extra) == (
        None,
    ) * 5


@pytest.mark.parametrize(
    "net",
    [
        conv_net(num_classes=3, channels=2, size=8),
        mlp(4, hidden=()),
        nn.Linear(4, 3, bias=False),
        nn.Sequential(
            OrderedDict(
                first=nn.Linear(4, 6), act=nn.GELU("tanh"), last=nn.Sequential(nn.Linear(6, 3))
            )
        ),
        nn.Sequential(
            nn.Conv2d(1, 4, (3, 2), stride=2, padding="valid", bias=False),
            nn.MaxPool2d(2),
            nn.Flatten(),
        ),
        with_group_norm(
            nn.Sequential(nn.Conv2d(1, 6, 3, padding_mode="reflect", padding=1), nn.BatchNorm2d(6))
        ),
        nn.Sequential(
            nn.LayerNorm((4,)),
            nn.Linear(4, 2),
            nn.LeakyReLU(0.3),
            nn.Dropout(0.2),
            nn.Softplus(),
            nn.ELU(),
        ),
        nn.Sequential(
            nn.Conv1d(2, 2, 3), nn.SiLU(), nn.Flatten(), nn.Tanh(), nn.Sigmoid(), nn.Identity()
        ),
        nn.Sequential(
            nn.Conv2d(1, 2, 1), nn.AdaptiveAvgPool2d((None, 2)), nn.AvgPool2d(2, ceil_mode=True)
        ),
        mlp(4).double(),
        mlp(2, hidden=(3,) * 12),  # layers 10, 11, ... after 9
    ],
    ids=repr,
)
def test_networks_of_plain_layers_come_back(tmp_path: Path, net: nn.Module) -> None:
    model = BayesianModel(net, Gaussian())
    save(tmp_path / "m", model=model, posterior=PointMass(model))
    state = torch.random.get_rng_state()
    bundle = load(tmp_path / "m")
    assert torch.equal(torch.random.get_rng_state(), state)  # nothing was drawn
    assert repr(bundle.model.net) == repr(model.net)
    assert bundle.model.dtype == model.dtype
    assert (bundle.model.names, bundle.model.shapes) == (model.names, model.shapes)
    assert torch.equal(bundle.posterior.theta, model.initial_theta())


def test_frozen_weights_stay_frozen(tmp_path: Path) -> None:
    net = mlp(3, 2)
    net[0].weight.requires_grad_(False)
    model = BayesianModel(net, Categorical())
    save(tmp_path / "m", model=model, posterior=MeanField(model))
    bundle = load(tmp_path / "m")
    assert bundle.model.names == model.names
    assert "0.weight" not in bundle.model.names
    assert torch.equal(bundle.model.net[0].weight, net[0].weight)  # type: ignore[index]


@pytest.mark.parametrize(
    "likelihood",
    [
        Gaussian(0.3),
        Gaussian(0.3, learned=True),
        Gaussian((0.1, 0.2), num_outputs=2),
        HeteroscedasticGaussian(),
    ],
)
def test_likelihoods_and_flat_prior(tmp_path: Path, likelihood: Any) -> None:
    model = BayesianModel(mlp(3, 2), likelihood, prior_scale=math.inf)
    save(tmp_path / "m", model=model, posterior=PointMass(model))
    bundle = load(tmp_path / "m")
    assert bundle.model.likelihood == likelihood
    assert bundle.model.prior_scale == math.inf


def full_channel() -> Mixture:
    scale, mask = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True])
    ball = L2(0.5, box=(torch.zeros(3) - 1, math.inf), scale=scale, mask=mask)
    attack = PGD(ball, stages=((nll, 3), (entropy, 2)), step_size=0.1, restarts=2)
    inner = Mixture(
        [1.0],
        [AttackChannel(one_step(Linf(0.1, box=(-1, 1)), squared_error), 0.2)],
        stratified=False,
    )
    learned = Learned(
        FullyConnectedGenerator(3, num_classes=2, width=8), Linf(0.3), (0.02, 0.4), 0.1
    )
    return Mixture([0.4, 0.3, 0.2, 0.1], [Noise(0.1), AttackChannel(attack, 0.3), inner, learned])


def test_channels_come_back(tmp_path: Path) -> None:
    model = BayesianModel(mlp(3, 2), Categorical())
    channel = full_channel()
    save(tmp_path / "m.advbayes", model=model, posterior=MeanField(model), channel=channel)
    came: Any = load(tmp_path / "m.advbayes").channel
    assert came.weights == channel.weights
    assert came.channels[:3] == channel.channels[:3]
    learned, original = came.channels[3], channel.channels[3]
    assert (learned.ball, learned.sigma_range, learned.entropy_bonus) == (
        Linf(0.3),
        (0.02, 0.4),
        0.1,
    )
    assert all(value.requires_grad for value in learned.generator.parameters())
    for name, value in original.generator.state_dict().items():  # type: ignore[attr-defined]
        assert torch.equal(learned.generator.state_dict()[name], value)
    x, y = torch.rand(8, 3, generator=seeded(1)), torch.randint(2, (8,), generator=seeded(2))
    predict = model.at(model.initial_theta())
    inner = Mixture((0.4, 0.6), [Noise(0.1), original])
    again = Mixture((0.4, 0.6), [Noise(0.1), learned])
    assert torch.equal(
        inner.sample(predict, x, y, generator=seeded(3)),
        again.sample(predict, x, y, generator=seeded(3)),
    )


BALL = L2(0.5, box=(0, 1))


@pytest.mark.parametrize(
    "attack",
    [
        attacks.APGD(BALL, loss=attacks.dlr),
        attacks.MinimumNorm(BALL),
        attacks.RandomSearch(BALL, 7, attacks.certainty),
        attacks.Square(BALL),
        attacks.HardLabel(BALL),
        attacks.Suite(
            (attacks.pgd(BALL), attacks.pgd(BALL, loss=attacks.Toward(attacks.margin))),
            rank=attacks.nll,
        ),
        PGD(
            BALL,
            stages=(
                (attacks.ByLoss(attacks.inflate_variance), 2),
                (attacks.Exceeding(squared_error, 2.0), 1),
            ),
        ),
        PGD(
            BALL,
            stages=tuple(
                (loss, 1)
                for loss in (attacks.deflate_variance, attacks.raise_mean, attacks.lower_mean)
            ),
        ),
        PGD(BALL, stages=((attacks.MarginTo(torch.tensor([1, 0])), 2),)),
        PGD(BALL, stages=((attacks.DivergenceFrom(torch.tensor([0.5, 0.5])), 2),)),
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_attacks_come_back(attack: Any) -> None:
    tensors: dict[str, Tensor] = {}
    document = json.loads(json.dumps(kinds.encode(attack, "attack", tensors)))
    came = kinds.decode(document, "attack", tensors)
    assert repr(came) == repr(attack)
    again: dict[str, Tensor] = {}
    assert kinds.encode(came, "attack", again) == document
    assert {name: value.tolist() for name, value in again.items()} == {
        name: v.tolist() for name, v in tensors.items()
    }


@pytest.mark.parametrize(
    "generator", [ConvGenerator(3, 2, 8), FullyConnectedGenerator(5), FullyConnectedGenerator(5, 2)]
)
def test_generators_come_back(tmp_path: Path, generator: nn.Module) -> None:
    model = BayesianModel(mlp(5), Gaussian())
    save(
        tmp_path / "m", model=model, posterior=PointMass(model), channel=Learned(generator, L2(1.0))
    )
    came: Any = load(tmp_path / "m").channel
    assert repr(came.generator) == repr(generator)


def test_all_the_rest_comes_back(tmp_path: Path) -> None:
    model = BayesianModel(mlp(3, 2), Categorical())
    scaling = {"mean": torch.randn(3), "std": torch.rand(3) + 1}
    threat = {
        "ball": L2(2.0, box=(0, 1)),
        "attacks": {"PGD": one_step(L2(2.0), margin)},
        "knows": ["weights", "channel"],
    }
    audit = {"verdict": "believe", "accuracy": 0.5}
    names = ["cat", "<script>alert(1)</script>", "=1+1"]
    write = {
        "scaling": scaling,
        "threat_model": threat,
        "audit": audit,
        "class_names": names,
        "extra": [1, None],
    }
    save(tmp_path / "m", model=model, posterior=MeanField(model), **write)  # type: ignore[arg-type]
    bundle = load(tmp_path / "m")
    assert bundle.scaling is not None
    assert all(torch.equal(bundle.scaling[name], value) for name, value in scaling.items())
    assert bundle.threat_model == threat
    assert bundle.audit == audit
    assert bundle.class_names == tuple(names)
    assert bundle.extra == [1, None]
    save(tmp_path / "m", model=model, posterior=MeanField(model), threat_model=L2(1.0))
    assert load(tmp_path / "m").threat_model == L2(1.0)


# Networks with code of their own


class Own(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(3, width)
        self.outer = nn.Linear(width, 2)
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer((self.inner(x + self.shift)).tanh())


def test_own_network_is_given_never_imported(tmp_path: Path) -> None:
    net = Own()
    model = BayesianModel(net, Categorical())
    save(tmp_path / "m", model=model, posterior=MeanField(model))
    assert "Own" not in "".join(file.read_text("latin1") for file in (tmp_path / "m").iterdir())
    with pytest.raises(StoreError, match=r"m:model: wanted load\(path, net=...\).*got no net"):
        load(tmp_path / "m")
    with pytest.raises(StoreError, match=r"wanted inner\.bias of shape \(5,\), got \(4,\)"):
        load(tmp_path / "m", net=Own(5))
    with pytest.raises(StoreError, match=r"wanted 0\.bias of shape \(16,\), got none"):
        load(tmp_path / "m", net=mlp(3, 2))
    given = Own()
    bundle = load(tmp_path / "m", net=given)
    x = torch.randn(4, 3)
    theta = model.initial_theta()
    assert torch.equal(bundle.model.at(theta)(x).logits, model.at(theta)(x).logits)  # type: ignore[attr-defined]
    assert not torch.equal(given.shift, net.shift)  # type: ignore[arg-type]  # the caller's own net is untouched


def test_tied_weights_and_hooks_need_the_net(tmp_path: Path) -> None:
    layer = nn.Linear(3, 3)
    tied = nn.Sequential(layer, nn.Tanh(), layer)
    hooked = nn.Sequential(nn.Linear(3, 3))
    hooked[0].register_forward_hook(lambda module, arguments, output: 2 * output)
    for net in (tied, hooked):
        model = BayesianModel(net, Categorical())
        save(tmp_path / "m", model=model, posterior=PointMass(model))
        with pytest.raises(StoreError, match="code of its own"):
            load(tmp_path / "m")
        assert load(tmp_path / "m", net=net).model.names == model.names


# Refused


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    model = BayesianModel(mlp(3, 2), Categorical())
    posterior = MeanField(model)
    ok: dict[str, Any] = {"model": model, "posterior": posterior}
    own_loss = PGD(L2(1.0), stages=((lambda prediction, y: -prediction.log_prob(y), 1),))
    with pytest.raises(
        StoreError, match=r"channel/attack/stages/0/0: wanted one of Categorical, .*, got <function"
    ):
        save(tmp_path / "m", **ok, channel=AttackChannel(own_loss))
    with pytest.raises(StoreError, match="channel/generator: wanted a network of plain layers"):
        save(tmp_path / "m", **ok, channel=Learned(Own(), L2(1.0)))
    with pytest.raises(StoreError, match="threat_model: wanted other names than kind"):
        save(tmp_path / "m", **ok, threat_model={"kind": "L2"})
    with pytest.raises(StoreError, match=r"m:extra.a: wanted text, numbers"):
        save(tmp_path / "m", **ok, extra={"a": object()})
    with pytest.raises(StoreError, match=r"m:audit.acc: wanted a finite number, got nan"):
        save(tmp_path / "m", **ok, audit={"acc": math.nan})
    with pytest.raises(
        StoreError, match="m:posterior: wanted a posterior over the model's 370 parameters, got 2"
    ):
        save(tmp_path / "m", model=model, posterior=Samples(torch.zeros(1, 2)))
    with pytest.raises(StoreError, match=r"m:posterior: wanted one of MeanField, .*, got Own"):
        save(tmp_path / "m", model=model, posterior=Own())  # type: ignore[arg-type]
    with torch.no_grad():
        posterior.rho[3] = math.nan
    with pytest.raises(
        StoreError,
        match="m:posterior: wanted finite tensors, got 1 NaN and 0 infinite values in rho",
    ):
        save(tmp_path / "m", **ok)
    assert not (tmp_path / "m").exists()


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    path = tmp_path_factory.mktemp("saved") / "m"
    model = BayesianModel(mlp(3, 2), Categorical())
    save(
        path,
        model=model,
        posterior=MeanField(model),
        channel=full_channel(),
        class_names="ab",
        threat_model=L2(1.0),
    )
    return read_bundle(path)


def change(document: Any, place: str, value: object) -> Any:
    """A copy with one value put, or removed (...)."""
    copied = json.loads(json.dumps(document))
    *path, last = place.split("/")
    inner = copied
    for key in path:
        inner = inner[int(key) if isinstance(inner, list) else key]
    if value is ...:
        del inner[last]
    else:
        inner[int(last) if isinstance(inner, list) else last] = value
    return copied


@pytest.mark.parametrize(
    ("place", "value", "wanted"),
    [
        ("model/net/kind", "os.system", "a layer of kind"),
        ("model/net/kind", "Bilinear", "a layer of kind"),
        ("model/net/layers/0/1/kind", "__class__", "a layer of kind"),
        ("model/net/layers/0/1/in_features", 2**40, "0.weight of shape"),
        ("model/net/layers/0/1/in_features", -1, "settings that Linear accepts"),
        ("model/net/layers/0/1/in_features", "3", "a whole number"),
        ("model/net/layers/0/1/in_features", ..., "Linear with in_features"),
        ("model/net/layers/0/1/device", "cpu", "Linear with in_features"),
        ("model/net/layers/0/1/bias", False, "0.bias of shape no such tensor"),
        ("model/net/layers/0/0", "forward", "layers as"),
        ("model/net/layers/0", {}, "layers as"),
        ("model/net/layers", {}, "a layer of kind"),
        ("model/net", None, "net="),
        ("model/net", "advbayes.networks:mlp", "a layer of kind"),
        ("model/likelihood", {"kind": "Noise"}, "a likelihood"),
        ("model/likelihood/kind", "builtins.eval", "a known kind"),
        ("model/likelihood/scale", 1.0, "Categorical with no fields"),
        ("model/prior_scale", -1.0, "a network that fits"),
        ("model/prior_scale", "wide", "a network that fits"),
        ("model/prior_scale", {"kind": "number", "value": "nan"}, "a known kind"),
        ("model/parameters", [], "parameters"),
        ("model/parameters/0", ["0.weight", [3, 16]], "parameters"),
        ("model/parameters/0", "0.weight", "parameters as"),
        ("model/more", 1, "net, likelihood"),
        ("model", None, "net, likelihood"),
        ("posterior/kind", "Samples", "the tensors thetas"),
        ("posterior/kind", "torch.nn.Module", "one of MeanField"),
        ("posterior/more", 1, "one of MeanField"),
        ("channel/kind", "subprocess.run", "a known kind"),
        ("channel/weights", [1.0], "settings that Mixture accepts"),
        ("channel/more", 1, "Mixture with weights"),
        ("channel/channels", ..., "missing a required argument: 'channels'"),
        ("channel/channels/0/sigma", -0.1, "settings that Noise accepts"),
        ("channel/channels/0/sigma", "0.1", "settings that Noise accepts"),
        ("channel/channels/1/attack/ball/scale/name", "posterior", "a known kind"),
        ("channel/channels/1/attack/stages/0/0/name", "eval", "a known kind"),
        ("channel/channels/1/attack/stages/0", 1, "settings that PGD accepts"),
        ("channel/channels/3/generator/net/width", 9, "of shape"),
        ("channel/channels/3/generator/net/width", 2**30, "of shape"),
        (
            "channel/channels/3/generator/net/width",
            2**40,
            "settings that FullyConnectedGenerator accepts",
        ),
        ("channel", {"kind": "L2", "eps": 1.0}, "a channel"),
        ("channel", {"eps": 1.0}, "a setting"),
        ("threat_model/eps", -1.0, "settings that L2 accepts"),
        ("class_names", "ab", "a list of names"),
        ("class_names/0", 1, "a list of names"),
        ("weights", {}, "the parts of a model"),
    ],
)
def test_altered_documents_are_refused(
    tmp_path: Path,
    saved: tuple[dict[str, dict[str, Tensor]], dict[str, Any]],
    place: str,
    value: object,
    wanted: str,
) -> None:
    tensors, documents = saved
    write_bundle(tmp_path / "m", tensors, change(documents, place, value))
    with pytest.raises(StoreError, match=f"wanted .*{wanted}"):
        load(tmp_path / "m")


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("posterior", "mu", torch.zeros(3)),
        ("posterior", "rho", torch.zeros(3)),
        ("posterior", "mu", torch.zeros(370, dtype=torch.float64)),
        ("posterior", "more", torch.zeros(1)),
        ("net", "0.weight", torch.zeros(3, 16)),
        ("net", "0.weight", torch.zeros(16, 3, dtype=torch.int64)),
        ("net", "0.weight", torch.zeros(16, 3, dtype=torch.float64)),
        ("net", "more", torch.zeros(1)),
    ],
)
def test_altered_tensors_are_refused(
    tmp_path: Path,
    saved: tuple[dict[str, dict[str, Tensor]], dict[str, Any]],
    part: str,
    name: str,
    value: Tensor,
) -> None:
    tensors, documents = saved
    write_bundle(tmp_path / "m", {**tensors, part: {**tensors[part], name: value}}, documents)
    with pytest.raises(StoreError, match=r"m:(posterior|model): wanted"):
        load(tmp_path / "m")


def test_unaltered_is_not_refused(
    tmp_path: Path, saved: tuple[dict[str, dict[str, Tensor]], dict[str, Any]]
) -> None:
    write_bundle(tmp_path / "m", *saved)
    assert load(tmp_path / "m").class_names == ("a", "b")


@pytest.mark.parametrize(
    ("extra", "threat"),
    [
        ({"event": 3}, {}),
        ({"event": ["x"]}, {}),
        ({"seed": {}}, {}),
        ({"feature_names": 1.5}, {}),
        ({}, {"box": True}),
        ({}, {"box": [0]}),
        ({}, {"eps": "far"}),
        ({}, {"mask": {"a": 1}}),
        ({}, {"scale": [[1], [1, 2]]}),
    ],
    ids=str,
)
def test_what_predictions_need_is_refused_where_it_is_something_else(
    tmp_path: Path, extra: dict[str, object], threat: dict[str, object]
) -> None:
    model = BayesianModel(mlp(3, 2), Categorical())
    fine = {"event": [3], "seed": 1, "feature_names": list("abc")}
    within = {"box": [0, 1], "eps": 0.5, "mask": [True] * 3, "scale": [1.0] * 3}
    for settings, ball in ((fine, within), (fine | extra, within | threat)):
        save(
            tmp_path / "m",
            model=model,
            posterior=MeanField(model),
            class_names="ab",
            extra=settings,
            threat_model=ball,
        )
        with nullcontext() if settings == fine and ball == within else pytest.raises(StoreError):
            assert load_trained(tmp_path / "m").event == (3,)


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_there_is_a_name_for_each_class(tmp_path: Path, names: str) -> None:
    model = BayesianModel(mlp(3, 2), Categorical())
    save(tmp_path / "m", model=model, posterior=PointMass(model), class_names=names)
    predict = load(tmp_path / "m").predictor()
    if len(names) == 2:
        assert set(predict.classes(torch.randn(50, 3, generator=seeded()))) <= set("ab")
    else:
        with pytest.raises(ValueError, match=f"the model's 2 classes, got {len(names)}"):
            predict.classes(torch.zeros(1, 3))


def test_no_class_is_named_where_the_net_overflows(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    nn.init.constant_(net.weight, 9.0)
    model = BayesianModel(net, Categorical())
    save(tmp_path / "m", model=model, posterior=PointMass(model, init=net), class_names="ab")
    predict = load(tmp_path / "m").predictor()
    with pytest.raises(ValueError, match=r"prediction\.probs must be finite, got 2 NaN"):
        predict.classes(torch.full((1, 3), 3e38))


@pytest.mark.parametrize("factor", [1e-200, 1e-71, 1e71, 1e200])
def test_scales_of_a_purifier_have_squares(tmp_path: Path, factor: float) -> None:
    model = BayesianModel(mlp(3, 2), Categorical())
    thetas = MeanField(model).sample(2)
    Purifier(model, Noise(0.3), thetas, reference=(torch.rand(5, 3), torch.arange(5) % 2)).save(
        tmp_path / "p"
    )
    parts = {
        part.name: (tmp_path / "p" / part.file).read_bytes()
        for part in read_manifest(tmp_path / "p").parts
    }
    text = json.loads(parts["purifier.json"])
    text["banks"][0]["factor"] = factor
    manifest, files = faults.sealed({**parts, "purifier.json": json.dumps(text).encode()})
    for name, data in {"manifest.json": manifest, **files}.items():
        (tmp_path / "p" / name).write_bytes(data)
    with pytest.raises(StoreError, match="a finite weight and positive scales"):
        Purifier.load(tmp_path / "p")


def test_random_bundles_give_typed_errors_or_models(tmp_path: Path) -> None:
    model = BayesianModel(mlp(3, 2), Categorical())
    save(
        tmp_path / "m",
        model=model,
        posterior=MeanField(model),
        channel=full_channel(),
        threat_model=L2(1.0),
    )
    files = {
        part.name: (tmp_path / "m" / part.file).read_bytes()
        for part in read_manifest(tmp_path / "m").parts
    }
    draw = random.Random(0)
    refused = 0
    for _ in range(500):  # the reliability script goes on for longer
        manifest, changed = faults.sealed(faults.mutated(files, draw))
        path = tmp_path / "x.advbayes"
        path.write_bytes(archive.pack({"manifest.json": manifest, **changed}, "x"))
        try:
            load(path)
        except StoreError:
            refused += 1
    assert 300 < refused < 500


# Versions


def test_schema_1_still_loads() -> None:
    """Written once, by the first release; the expected numbers stand beside it."""
    bundle = load(DATA / "schema1.advbayes")
    expected = json.loads((DATA / "schema1.json").read_text())
    assert bundle.manifest.schema == 1
    ball = L2(1.0, box=(-3, 3), scale=torch.tensor([1.0, 2.0, 3.0]))
    attack = AttackChannel(PGD(ball, stages=((nll, 3), (entropy, 2))), sigma=0.2)
    assert bundle.channel == Mixture([0.5, 0.5], [Noise(0.1), attack])
    assert bundle.threat_model == {"ball": Linf(0.1)}
    assert bundle.class_names == ("cat", "dog")
    predict = PosteriorPredictive(bundle.model, bundle.posterior.mean.unsqueeze(0))
    probabilities: Tensor = predict(torch.tensor(expected["x"])).probs  # type: ignore[attr-defined]
    torch.testing.assert_close(probabilities, torch.tensor(expected["probabilities"]))


def test_a_future_schema_is_refused_clearly(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "manifest.json").write_bytes(
        faults.sealed({}, schema=7, parts={"x.arrow": 1})[0]
    )
    with pytest.raises(
        StoreError,
        match=r"manifest\.json: wanted schema 1, got 7 \(written by a newer advbayes: update",
    ):
        load(tmp_path / "m")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta", torch.device("meta")])
def test_everything_is_loaded_onto_the_device_asked_for(tmp_path: Path, device: Any) -> None:
    """Posterior, network and scaling; "meta" is a device that every machine has beside the CPU."""
    model = BayesianModel(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), Categorical())
    scaling = {"mean": torch.zeros(3), "std": torch.ones(3)}
    save(tmp_path / "m", model=model, posterior=MeanField(model), scaling=scaling)
    found = load(tmp_path / "m", device=device)
    assert found.scaling is not None
    held = [
        *found.posterior.state_dict().values(),
        *found.model.net.state_dict().values(),
        *found.scaling.values(),
    ]
    assert len(held) >= 8
    assert {value.device for value in held} == {torch.device(device)}
    assert found.model.device == torch.device(device)

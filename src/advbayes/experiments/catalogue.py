"""The experiments by name: what is trained, how it is attacked, which views are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from advbayes.checks import choice
from advbayes.experiments.defenses import (
    DEFENSES,
    Defense,
    deterministic,
    smoothed_attack,
    weighted,
)

PAPER_ATTACKS = ("PGD1", "PGD", "PGD+", "ENT")
PAPER_RADII = (0.01, 0.51, 1.01, 1.5, 2.0, 2.5, 3.0)
TRIVIAL = ("uniform", "majority", "constant")


@dataclass(frozen=True)
class Row:
    """A defense with keys of its own, and the units of x that eps is meant in."""

    defense: Defense
    settings: Mapping[str, Any] = field(default_factory=dict)
    units: str = "standardised"  # min-max, raw: of tables alone


@dataclass(frozen=True)
class Experiment:
    """Rows x seeds, each trained, attacked and scored example by example.

    >>> EXPERIMENTS["wine"].metrics
    ('rmse', 'nll')
    """

    title: str
    settings: Mapping[str, Any]  # keys of a run, shared by all rows
    rows: Mapping[str, Row]
    metrics: tuple[str, ...] = ("accuracy", "nll")
    attacks: tuple[str, ...] = PAPER_ATTACKS
    radii: tuple[float, ...] = (2.0,)
    steps: int = 50
    draws: int = 10_000  # of a certificate
    num_test: int = 1000
    seeds: int = 5
    thetas: int = 5
    # with "validation" a fifth of the training rows is kept for it
    splits: tuple[str, ...] = ("test",)
    measure: str = "attacked"  # the function of `units` that makes the records
    views: tuple[str, ...] = ("attack_table",)
    reported: str = ""  # the key of the paper's cells
    note: str = ""


def _rows(*names: str) -> dict[str, Row]:
    return {name: Row(DEFENSES[name]) for name in names}


# What the settings below leave open, whatever the defaults of a run are.
BASE = {
    "hidden": (16, 16),
    "init_scale": 0.02,
    "prior_scale": 1.0,
    "kl_weight": 1.0,
    "eps": 1.0,
    "sigma": 0.1,
    "epochs": 20,
    "batch_size": 128,
    "lr": 3e-3,
    "decay": 0.97,
}
MNIST = {"data": "mnist", "epochs": 5, "lr": 2e-3, "decay": 0.7, "sigma": 0.1, "eps": 1.0}
_TABLE = {"epochs": 100, "batch_size": 128, "lr": 1e-2, "decay": 0.97, "sigma": 0.1, "eps": 1.0}
TABLES: dict[str, dict[str, Any]] = {
    "wine": {"data": "wine", **_TABLE},
    "energy": {"data": "energy", **_TABLE, "epochs": 200, "lr": 3e-2, "decay": 0.985},
    "california": {"data": "california", **_TABLE, "epochs": 20, "lr": 3e-2, "decay": 0.85},
}
_REGRESSION_ROWS = ("BL", "MIX", "NN50", "AT", "eps prior", "Gibbs", "constant", "least squares")


def _regression(name: str) -> Experiment:
    return Experiment(
        f"{name.capitalize()}: RMSE and NLL, L2, eps 2, features and target standardised",
        TABLES[name],
        _rows(*_REGRESSION_ROWS),
        metrics=("rmse", "nll"),
        # the paper's attacks stop at local maxima here
        attacks=(*PAPER_ATTACKS, "strong", "strong NLL"),
        num_test=500,
        views=("attack_table", "pairs"),
        reported=name,
    )


def _readings(name: str) -> Experiment:
    return Experiment(
        f"{name.capitalize()}: what units eps and y may have had in the paper",
        TABLES[name],
        {
            f"{row}, x {units}": Row(DEFENSES[row], units=units)
            for units in ("standardised", "min-max", "raw")
            for row in ("BL", "MIX", "AT")
        },
        metrics=("rmse", "nll"),
        num_test=300,
        seeds=2,
        views=("readings",),
        reported=name,
    )


def _front(name: str) -> Experiment:
    """Posteriors as in the paper, and point estimates, over the share of unattacked rows."""
    rows = _rows("BL", "constant", "least squares", "random forest")
    some, all_radii = (0.25, 0.5, 1.0), (0.25, 0.5, 1.0, 2.0)
    kinds = (  # posterior, clean share, eps of the channel
        ("mean_field", 0.0, all_radii),
        ("mean_field", 0.4, (0.5, 1.0)),
        ("point", 0.0, all_radii),
        ("point", 0.5, some),
        ("point", 0.75, some),
    )
    for posterior, clean, radii in kinds:
        short = "point" if posterior == "point" else "posterior"
        for eps in radii:
            defense = Defense("", {"posterior": posterior, "eps": eps}, weighted(clean))
            rows[f"{short}, eps {eps:g}, clean {clean:g}"] = Row(defense)
    return Experiment(
        f"{name.capitalize()}: clean against attacked RMSE (standardised), L2, strong suite",
        TABLES[name],
        rows,
        metrics=("rmse",),
        attacks=("strong",),
        radii=(0.25, 0.5, 1.0, 2.0),
        steps=20,
        num_test=100,
        splits=("validation", "test"),
        views=("front",),
    )


# From benchmarks/demo_validation.py, which chose them on a fifth of the training images.
DIGITS = {
    "data": "digits",
    "epochs": 40,
    "lr": 1e-2,
    "decay": 0.95,
    "kl_weight": 0.1,
    "init_scale": 0.01,
    "eps": 0.5,
}


def _factorial() -> dict[str, Row]:
    return {
        f"{kind}, {name}, {share}": Row(Defense("", {"posterior": posterior}, channel(clean)))
        for kind, posterior in (("point", "point"), ("posterior", "mean_field"))
        for name, channel in (("deterministic", deterministic), ("noisy", weighted))
        for share, clean in (("all attacked", 0.0), ("half clean", 0.5))
    }


def _iwae(*numbers: int) -> dict[str, Row]:
    return {
        f"{name} K={num}": Row(Defense("", {"defense": "mix", "bound": bound, "num_channel": num}))
        for name, bound in (("surrogate", "surrogate"), ("IWAE", "importance_weighted"))
        for num in numbers
    }


def _tried(defense: str, key: str, *values: float, label: str = "") -> dict[str, Row]:
    """A defense with each value of one key."""
    label = label or key.replace("_", " ")
    return {f"{defense}, {label} {each:g}": Row(DEFENSES[defense], {key: each}) for each in values}


def _tried_beside(*sigmas: float) -> dict[str, Row]:
    """What is tried of the defenses on all data."""
    return {
        **_tried("MIX", "sigma", *sigmas),
        **_tried("NN50", "adversary_lr", 1e-3, 1e-2),
        **_tried("Gibbs", "kl_weight", 0.01, 0.1, label="KL weight"),
    }


_LARGE = "large kernels, smoothed attack, point"


def _smoothed() -> dict[str, Row]:
    """Nets trained through noise: the paper's and one of large kernels, without and with
    consistency, then through an attack on the smoothed predictive; the wide net beside them."""
    consistent = {"defense": "consistency", "num_channel": 2, "beta": 5.0}
    large = {"network": "advbayes.networks:large_kernel_net", "batch_size": 256}
    wide = {"network": "advbayes.networks:wide_conv_net", **consistent, "beta": 10.0}
    rows = {
        f"{net}, {loss}, {name}": Row(
            Defense("", {**shape, **penalty, "posterior": posterior, **more})
        )
        for net, shape in (("small", {}), ("large kernels", large))
        for loss, penalty in (("noise", {}), ("consistency", consistent))
        for name, posterior, more in (
            ("point", "point", {}),
            ("posterior", "mean_field", {"init_scale": 0.01}),
        )
    }
    point: dict[str, Any] = {"posterior": "point"}
    through = Defense("", {**large, **consistent, **point}, smoothed_attack)
    return {
        **rows,
        _LARGE: Row(through),
        "wide, consistency, point": Row(Defense("", {**wide, **point})),
    }


_MNIST_ROWS = (
    *("BL", "AT", "OS50", "MIX", "PGD channel", "OS", "NN", "NN50", "multi-step AT", "onPure"),
    *("offPure", "eps prior", "Gibbs", "TRADES", "ALP", "uniform", "majority"),
)


def _mnist_rows() -> dict[str, Row]:
    """With the noise that `validation-mnist` prefers: the other rows have what was taken first."""
    return {**_rows(*_MNIST_ROWS), **_tried("MIX", "sigma", 0.2)}


_CERTIFIED = {
    **MNIST,
    "epochs": 12,
    "lr": 1e-3,
    "decay": 0.78,
    "sigma": 1.0,
    "defense": "noise",
    "precision": "bfloat16",
}
_CURVE_ROWS = ("BL", "AT", "OS50", "MIX", "NN50", "PGD channel", "onPure", "offPure")

EXPERIMENTS: dict[str, Experiment] = {
    **{name: _regression(name) for name in TABLES},
    **{f"{name}-readings": _readings(name) for name in TABLES},
    **{f"{name}-front": _front(name) for name in TABLES},
    "mnist": Experiment(
        "MNIST, L2, eps 2 (Tables 1 and 2)",
        MNIST,
        _mnist_rows(),
        views=("attack_table", "pairs"),
        reported="mnist",
    ),
    "mnist-strong": Experiment(
        "MNIST, L2, eps 2: the same models under the strong suite",
        MNIST,
        {**_mnist_rows(), **_rows("full purifier")},
        attacks=("strong",),
        num_test=200,
    ),
    "mnist-own": Experiment(
        "MNIST, L2, eps 2: rows beyond the paper, under its attacks and the strong suite",
        {**MNIST, "epochs": 20, "lr": 1e-3, "decay": 0.86, "precision": "bfloat16"},
        _rows("wide PGD", "uniform", "majority"),
        attacks=(*PAPER_ATTACKS, "strong"),
        thetas=1,
        seeds=1,
        reported="mnist",
    ),
    "mnist-curves": Experiment(
        "MNIST: accuracy and NLL over eps (Figures 3, 4 and SM)",
        MNIST,
        _rows(*_CURVE_ROWS),
        radii=PAPER_RADII,
        num_test=200,
        views=("curves",),
    ),
    "selective": Experiment(
        "Selective accuracy, MNIST and Fashion-MNIST, both attacked (Figure 5)",
        MNIST,
        _rows(*_CURVE_ROWS),
        metrics=("selective_accuracy",),
        radii=(0.5, 1.0, 1.5, 2.0, 3.0),
        num_test=200,
        measure="selective",
        views=("curves",),
    ),
    "certified": Experiment(
        "MNIST: certified L2 radii of the Bayesian vote, trained through Noise(1.0)",
        _CERTIFIED,
        _smoothed(),
        metrics=(),
        attacks=(),
        num_test=500,
        seeds=1,
        measure="certified",
        views=("certified",),
        note="Every twentieth test image. Smaller than the published certificates: 10,000 draws "
        "for each image, not 100,000, which can only shorten a radius, and 12 epochs, not 90.",
    ),
    "certified-own": Experiment(
        "MNIST: certified L2 radii of a net of large kernels, trained longer, 100,000 draws",
        {**_CERTIFIED, "epochs": 32, "decay": 0.9},
        {name: row for name, row in _smoothed().items() if name == _LARGE},
        metrics=(),
        attacks=(),
        draws=100_000,
        num_test=500,
        seeds=1,
        measure="certified",
        views=("certified",),
        note="Every twentieth test image; the published averages are over all of them.",
    ),
    "iwae": Experiment(
        "Surrogate against importance-weighted bound, MIX on MNIST, L2, eps 2 (SM-3): smaller, "
        "three epochs on 10,000 images",
        {**MNIST, "num_train": 10_000, "epochs": 3},
        _iwae(1, 5, 10, 50),
        metrics=("accuracy",),
        attacks=("PGD",),
        num_test=500,
        reported="iwae",
        note="At full size: advbayes reproduce iwae --set num_train=60000 --set epochs=5",
    ),
    "multi-step-at": Experiment(
        "Adversarial training by multi-step PGD on MNIST over eps (SM-6)",
        MNIST,
        _rows("multi-step AT"),
        radii=PAPER_RADII,
        num_test=300,
        views=("curves", "multi_step"),
    ),
    "factorial": Experiment(
        "Point or posterior x deterministic or noisy channel x clean half or not; MNIST, one "
        "step, L2, eps 2: smaller, 20,000 training images",
        {**MNIST, "num_train": 20_000},
        _factorial(),
        attacks=("PGD1", "PGD"),
        num_test=500,
        views=("attack_table", "effects"),
    ),
    "digits": Experiment(
        "Handwritten digits of 8x8 pixels, smaller than the paper's MNIST: trained at L2 eps 0.5, "
        "attacked at 0.75",
        DIGITS,
        {**_rows("BL"), **_factorial(), **_rows("MIX", "uniform", "majority")},
        radii=(0.75,),
        num_test=200,
        views=("attack_table", "effects"),
    ),
    "digits-iwae": Experiment(
        "Surrogate against importance-weighted bound, MIX on 8x8 digits (smaller than SM-3's "
        "MNIST), L2, eps 0.75",
        DIGITS,
        _iwae(1, 5, 10),
        metrics=("accuracy", "nll"),
        attacks=("PGD",),
        radii=(0.75,),
        num_test=200,
    ),
    "limits": Experiment(
        "What no predictor is below: worst-case RMSE, L2, features and target standardised",
        {},
        {name: Row(DEFENSES["BL"], settings) for name, settings in TABLES.items()},
        radii=(0.25, 0.5, 1.0, 2.0),
        num_test=2000,
        seeds=1,
        measure="floored",
        views=("limits",),
        note="`metrics.rmse_floor` on rows drawn from the whole table (all of Energy and Wine): "
        "the error of any function at all, trained or not, at its worst points within eps of these "
        "rows. Denser rows give a higher floor.",
    ),
    "cost": Experiment(
        "Training and inference times in ms (SM-6)",
        {},
        {
            name: Row(DEFENSES["BL"], settings)
            for name, settings in {"mnist": MNIST, **TABLES}.items()
        },
        measure="timed",
        views=("times",),
    ),
    "examples": Experiment(
        "Attacked images and their predictive distributions (SM-6)",
        MNIST,
        _rows("BL", "MIX"),
        num_test=8,
        measure="pictured",
        views=("pictures",),
    ),
    "cifar10": Experiment(
        "CIFAR-10, shallow net, L2, eps 2 (SM-7): smaller, two epochs on 10,000 images",
        {"data": "cifar10", "epochs": 2, "num_train": 10_000, "lr": 2e-3, "decay": 0.9},
        _rows("BL", "MIX", "AT", "uniform", "majority"),
        num_test=200,
        reported="cifar10",
        note="At full size, on a GPU: advbayes reproduce cifar10 --set epochs=50 --set "
        "num_train=50000 --num-test 1000",
    ),
    "resnet18": Experiment(
        "CIFAR-10, ResNet-18 with GroupNorm at width 16, L2, eps 2 (SM-7): smaller, five epochs on "
        "8,000 images",
        {
            "data": "cifar10",
            "network": "advbayes.networks:resnet18_narrow",
            "epochs": 5,
            "num_train": 8000,
            "batch_size": 64,
            "lr": 1e-3,
        },
        _rows("BL", "MIX", "NN", "AT", "uniform", "majority"),
        attacks=("PGD1", "PGD"),
        steps=10,
        num_test=100,
        thetas=3,
        reported="resnet18",
        note="At full size, on a GPU: advbayes reproduce resnet18 --set "
        "network=advbayes.networks:resnet18 --set epochs=50 --set num_train=50000 --num-test 1000",
    ),
    "validation-mnist": Experiment(
        "What the paper leaves out, tried on held-out training images of MNIST (20,000 images, 4 "
        "epochs)",
        {**MNIST, "num_train": 20_000, "epochs": 4},
        {**_tried("BL", "lr", 1e-3, 2e-3, 5e-3), **_tried_beside(0.05, 0.1, 0.2, 0.3)},
        attacks=("PGD",),
        num_test=300,
        seeds=1,
        splits=("validation",),
    ),
}


def _validation(name: str) -> Experiment:
    base = TABLES[name]
    few = int(base["epochs"])
    rows = {
        f"BL, lr {lr:g}, {epochs} epochs": Row(DEFENSES["BL"], {"lr": lr, "epochs": epochs})
        for lr in (3e-3, 1e-2, 3e-2)
        for epochs in (few, 2 * few)
    }
    return Experiment(
        f"What the paper leaves out, tried on held-out training rows of {name}",
        base,
        {**rows, **_tried_beside(0.03, 0.1, 0.3)},
        metrics=("rmse", "nll"),
        attacks=("PGD",),
        num_test=500,
        seeds=2,
        splits=("validation",),
    )


def _audit(name: str) -> Experiment:
    base = EXPERIMENTS[name]
    rows = {
        row: each
        for row, each in base.rows.items()
        if each.defense.reference is None and each.defense.purify is None
    }
    return replace(
        base,
        title=f"{base.title}: the audit at tier standard",
        rows=rows,
        attacks=("strong",),
        num_test=100,
        seeds=1,
        measure="audited",
        views=("verdicts",),
    )


EXPERIMENTS |= {f"{name}-audit": _audit(name) for name in ("mnist", "mnist-own", *TABLES)}
EXPERIMENTS |= {f"validation-{name}": _validation(name) for name in TABLES}
EXPERIMENTS = {
    name: replace(each, settings={**BASE, **each.settings}) for name, each in EXPERIMENTS.items()
}


_SKETCH: dict[str, Any] = {"steps": 2, "draws": 400, "num_test": 20, "thetas": 2, "seeds": 2}


@dataclass(frozen=True)
class Spec:
    """What to run: an experiment and what differs from it, or defenses to compare on any data.

    `quick` is a sketch of an experiment, for tests and for a first look.

    >>> Spec("wine", "quick").experiment().num_test
    20
    """

    name: str
    preset: str = "paper"
    # keys of a run that override the experiment's
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_test: int | None = None
    defenses: tuple[str, ...] = ()  # compare these instead
    task: str = "classification"
    eps: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """As plain values, without those that say nothing.

        >>> Spec("wine").to_json()
        {'name': 'wine', 'preset': 'paper'}
        """
        unused = () if self.defenses else ("task", "eps")  # of comparisons alone
        values = {key: value for key, value in vars(self).items() if key not in unused}
        return {key: value for key, value in values.items() if value not in ({}, (), None)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Spec:
        """What `to_json` gave.

        >>> Spec.from_json({"name": "wine", "preset": "paper"}) == Spec("wine")
        True
        """
        return cls(**{**values, "defenses": tuple(values.get("defenses", ()))})

    def experiment(self) -> Experiment:
        """The experiment meant."""
        choice("preset", self.preset, ("quick", "paper"))
        if self.defenses:
            base = self._comparison()
        else:
            base = EXPERIMENTS[choice("experiment", self.name, tuple(EXPERIMENTS))]
        changes = dict(self.settings)
        if self.preset == "quick":
            changes = {"epochs": 1, "num_train": 200, **changes}
            title = f"{base.title}: a sketch (200 examples, one epoch)"
            base = replace(base, title=title, radii=base.radii[-2:], **_SKETCH)
        rows = {
            name: replace(row, settings={**row.settings, **changes})
            for name, row in base.rows.items()
        }
        return replace(base, rows=rows, num_test=self.num_test or base.num_test)

    def _comparison(self) -> Experiment:
        trivial = ("constant",) if self.task == "regression" else ("uniform", "majority")
        metrics = ("rmse", "nll") if self.task == "regression" else ("accuracy", "nll")
        names = dict.fromkeys((*self.defenses, *trivial))
        by_name = {name.lower(): name for name in DEFENSES}
        chosen = [by_name[choice("defense", name.lower(), tuple(by_name))] for name in names]
        title = f"{', '.join(chosen[: -len(trivial)])}: L2, eps {self.eps:g}"
        attacks = (*PAPER_ATTACKS, "strong")
        note = f"Rows: {'; '.join(f'{name}: {DEFENSES[name].about}' for name in chosen)}."
        return Experiment(
            title, {}, _rows(*chosen), metrics, attacks, (self.eps,), thetas=10, note=note
        )

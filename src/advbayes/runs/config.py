"""What a run is made of: one strict, frozen, flat configuration, from TOML or flags, without
importing torch."""

from __future__ import annotations

import difflib
import functools
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from advbayes.checks import InputError

IMAGE_SETS = ("cifar10", "digits", "fashion-mnist", "mnist")
TABLE_SETS = ("california", "diabetes", "energy", "wine", "wine-white")
DATA_SETS = tuple(sorted(IMAGE_SETS + TABLE_SETS))
FILE_SUFFIXES = (".csv", ".npz")
NETWORKS = ("auto", "conv", "mlp")
ATTACKS = {
    "pgd1": "one step to the edge of the ball",
    "pgd": "projected gradient ascent on the error",
    "pgd_plus": "half of the steps on the error, half on the entropy",
    "ent": "projected gradient ascent on the entropy",
    "strong": "worst of adaptive PGD on several losses, targeted ones, PGD, random points and "
    "queries",
    "apgd": "adaptive step sizes on the margin (regression: on the squared error)",
    "minimum_norm": "the nearest point of another class, if within the ball",
    "square": "random squares, by queries alone",
    "hard_label": "by the predicted class alone",
    "random": "random points on the edge of the ball",
}
MAX_TOML_BYTES = 1 << 20

Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=10_000)]


class ConfigError(InputError):
    """A configuration that cannot be used: a line for each key, what was wanted and what came."""


class RunConfig(BaseModel):
    """All keys of `advbayes train`; each is also a flag (`lr` is `--lr`, `batch_size` is
    `--batch-size`)."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    data: Annotated[
        str, Field(min_length=1, description="A built-in data set, or a .csv or .npz file")
    ] = "digits"
    root: Annotated[
        str | None,
        Field(description="Folder of the data sets (else ADVBAYES_DATA, then the cache)"),
    ] = None
    target: Annotated[
        str | None, Field(description="Target column of a .csv file, or Y1, Y2, both for energy")
    ] = None
    task: Annotated[
        Literal["classification", "regression"] | None,
        Field(description="Of your own file, if not clear"),
    ] = None
    features: Annotated[
        Names | None, Field(description="Feature columns of a .csv file (else all but the target)")
    ] = None
    drop: Annotated[Names, Field(description="Columns of a .csv file to leave out")] = ()
    num_train: Annotated[
        Count | None, Field(description="Use only the first so many training examples")
    ] = None

    network: Annotated[
        str, Field(min_length=1, description="auto, conv, mlp, or module:factory of your own")
    ] = "auto"
    hidden: Annotated[
        tuple[Annotated[Count, Field(le=65536)], ...],
        Field(max_length=8, description="Hidden widths of the mlp"),
    ] = (16, 16)
    posterior: Annotated[
        Literal["mean_field", "point", "ensemble", "low_rank"],
        Field(description="Family of the posterior"),
    ] = "mean_field"
    members: Annotated[Count, Field(le=1000, description="Members of the ensemble")] = 5
    rank: Annotated[Count, Field(le=1000, description="Rank of the low-rank posterior")] = 5
    prior_scale: Annotated[
        Positive, Field(description="Standard deviation of the prior on theta")
    ] = 1.0
    init_scale: Annotated[
        Positive, Field(le=10, description="Initial standard deviation of the posterior")
    ] = 0.02
    noise_scale: Annotated[
        Positive | Literal["learned", "heteroscedastic"],
        Field(
            description="Regression noise: a number (of the standardised target), learned, or "
            "heteroscedastic: one for each input"
        ),
    ] = "learned"

    defense: Annotated[
        Literal[
            "none",
            "noise",
            "consistency",
            "at",
            "os",
            "os50",
            "mix",
            "pgd",
            "trades",
            "alp",
            "nn",
            "nn50",
        ],
        Field(description="The channel trained through; docs/defenses.md lists them"),
    ] = "mix"
    channel: Annotated[
        str | None,
        Field(
            description="module:factory of a channel or attack of your own, in the place of the "
            "defense's"
        ),
    ] = None
    norm: Annotated[Literal["l2", "linf"], Field(description="Norm of the training adversary")] = (
        "l2"
    )
    eps: Annotated[
        NonNegative, Field(description="Budget of the training adversary, in the model's units")
    ] = 0.3
    feature_eps: Annotated[
        Names,
        Field(
            description="Budgets of single features in their own units, name=number; the others "
            "have eps"
        ),
    ] = ()
    fixed: Annotated[Names, Field(description="Features that the attacker cannot change")] = ()
    sigma: Annotated[NonNegative, Field(description="Noise of the channel")] = 0.1
    attack_steps: Annotated[Count, Field(le=10_000, description="Steps of the pgd defense")] = 7
    beta: Annotated[
        NonNegative, Field(description="Weight of the TRADES, logit-pairing or consistency penalty")
    ] = 6.0

    epochs: Annotated[
        Positive | None,
        Field(description="Passes over the data (else enough for 4,000 steps, images 2,000)"),
    ] = None
    batch_size: Annotated[Count, Field(description="Examples a step")] = 128
    lr: Annotated[
        Annotated[Positive, Field(le=10)] | None,
        Field(description="Adam's learning rate (else 0.02 for a table without epochs, 0.01)"),
    ] = None
    decay: Annotated[
        Annotated[float, Field(gt=0, le=1)] | None,
        Field(description="Factor on lr for each epoch (else so that it falls to a hundredth)"),
    ] = None
    adversary_lr: Annotated[
        Positive, Field(le=10, description="Learning rate of a learned channel")
    ] = 1e-3
    num_theta: Annotated[Count, Field(le=1000, description="Thetas a step")] = 1
    num_channel: Annotated[
        Count, Field(le=1000, description="Channel samples a step and theta")
    ] = 1
    bound: Annotated[
        Literal["surrogate", "importance_weighted"],
        Field(description="The bound that is maximised"),
    ] = "surrogate"
    class_weight: Annotated[
        Literal["balanced"] | None, Field(description="balanced: every class counts alike")
    ] = None
    kl_weight: Annotated[
        NonNegative, Field(description="Weight of the KL term; 1 is the evidence lower bound")
    ] = 1.0
    seed: Annotated[int, Field(ge=0, le=2**62, description="Keys all randomness")] = 0
    compile: Annotated[
        bool, Field(description="compile the step: slow to start, faster to run")
    ] = False
    precision: Annotated[
        Literal["float32", "bfloat16"],
        Field(
            description="Of the layers in training, weights stay float32: bfloat16 is faster where "
            "the processor has it, slower where not"
        ),
    ] = "float32"
    own_thetas: Annotated[
        bool, Field(description="on several ranks, thetas for each of them: less variance")
    ] = False
    threads: Annotated[
        Count, Field(le=1024, description="Threads of torch; one is fastest for small nets")
    ] = 1
    checkpoint_every: Annotated[Count, Field(description="Steps between checkpoints")] = 200

    @property
    def file(self) -> Path | None:
        """The user's own data file; None for a built-in set."""
        return None if self.data in DATA_SETS else Path(self.data)

    @model_validator(mode="after")
    def _together(self) -> RunConfig:
        """What single keys cannot say; found before anything is loaded."""
        suffix = "" if self.file is None else self.file.suffix.lower()
        if self.file is not None and suffix not in FILE_SUFFIXES:
            near = difflib.get_close_matches(self.data, DATA_SETS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(
                f"data: must be one of {', '.join(DATA_SETS)} or a .csv or .npz file, got "
                f"{self.data!r:.60}{hint}"
            )
        if suffix == ".csv" and self.target is None:
            raise InputError(f"target: must name the target column of {self.data!r}, got nothing")
        if (
            suffix != ".csv"
            and self.target is not None
            and (self.data != "energy" or self.target not in ("Y1", "Y2", "both"))
        ):
            wanted = (
                "must be Y1, Y2 or both for energy, a column's name for a .csv file, and "
                "left out otherwise"
            )
            raise InputError(f"target: {wanted}, got {self.target!r:.60} for {self.data!r}")
        if suffix != ".csv" and (self.features is not None or self.drop):
            raise InputError(
                f"features, drop: must be left out unless the data are a .csv file, got "
                f"{self.data!r}"
            )
        if self.features is not None and self.drop:
            raise InputError("features, drop: must not be given together, got both")
        parse_feature_eps(self.feature_eps)
        if self.feature_eps and self.eps == 0:
            raise InputError("eps: must be > 0 where feature_eps is given, got 0")
        if self.file is None and self.task is not None:
            raise InputError(
                f"task: must be left out for the built-in {self.data!r}, got {self.task!r}"
            )
        if self.network not in NETWORKS and not all(part.strip() for part in _halves(self.network)):
            raise InputError(
                f"network: must be auto, conv, mlp or module:factory, got {self.network!r:.60}"
            )
        if self.channel is not None and not all(part.strip() for part in _halves(self.channel)):
            raise InputError(f"channel: must be module:factory, got {self.channel!r:.60}")
        if self.network == "conv" and (self.data in TABLE_SETS or suffix == ".csv"):
            raise InputError(
                f"network: must be auto or mlp for a table, got 'conv' for {self.data!r}"
            )
        if self.defense in ("os", "os50", "mix", "noise", "consistency") and self.sigma == 0:
            raise InputError(
                f"sigma: must be > 0 for defense {self.defense!r} (its channel is noisy), got 0"
            )
        if self.defense == "consistency" and self.num_channel < 2:
            raise InputError(
                f"num_channel: must be >= 2 for defense 'consistency', which compares channel "
                f"samples, got {self.num_channel}"
            )
        return self


def parse_feature_eps(entries: tuple[str, ...]) -> dict[str, float]:
    """Budgets by feature.

    >>> parse_feature_eps(("age=5", "income=1e3"))
    {'age': 5.0, 'income': 1000.0}
    """
    budgets = {}
    for entry in entries:
        name, _, text = entry.rpartition("=")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not name or not 0 < value < float("inf"):
            raise InputError(
                f"feature_eps: must be name=number with a number > 0, got {entry!r:.60}"
            )
        budgets[name] = value
    return budgets


def _halves(name: str) -> tuple[str, str]:
    module, _, factory = name.partition(":")
    return module, "" if ":" in factory else factory


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """A checked configuration; what is wrong is said for all keys at once.

    >>> make_config({"epochs": 5, "defence": "mix"})
    Traceback (most recent call last):
    ...
    advbayes.runs.config.ConfigError: defence: there is no such key; did you mean 'defense'?
    >>> make_config({"epochs": 5}).epochs
    5.0
    """
    values = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(dict.fromkeys(_sentence(item) for item in error.errors()))
        ) from None


def _sentence(item: Any) -> str:
    """One fault as `key: what was wanted, got what came`."""
    key = next(
        (str(part) for part in item["loc"] if part in RunConfig.model_fields),
        ".".join(map(str, item["loc"])),
    )
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, RunConfig.model_fields, 1)
        return f"{key:.80}: there is no such key" + (f"; did you mean {near[0]!r}?" if near else "")
    if item["type"] == "value_error":  # ours, from _together
        return str(item["msg"]).removeprefix("Value error, ")
    got = repr(item["input"])
    return f"{key}: must be {accepted(key)}, got {got if len(got) <= 60 else got[:57] + '...'}"


def accepted(key: str) -> str:
    """What a key accepts, in words, from the schema.

    >>> accepted("lr"), accepted("norm")
    ('a number > 0 and <= 10', "one of 'l2', 'linf'")
    """
    schema = _schema()["properties"][key]
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    return " or ".join(_words(option) for option in options)


@functools.cache
def _schema() -> dict[str, Any]:
    return RunConfig.model_json_schema()


def _words(schema: dict[str, Any]) -> str:
    if "const" in schema or "enum" in schema:
        words = schema.get("enum", [schema.get("const")])
        return repr(words[0]) if len(words) == 1 else f"one of {', '.join(map(repr, words))}"
    kind = schema.get("type")
    if kind == "array":
        return f"a list of at most {schema['maxItems']} items, each {_words(schema['items'])}"
    if kind in ("number", "integer"):
        signs = (
            ("exclusiveMinimum", ">"),
            ("minimum", ">="),
            ("exclusiveMaximum", "<"),
            ("maximum", "<="),
        )
        edges = " and ".join(f"{sign} {schema[name]:g}" for name, sign in signs if name in schema)
        return f"{'a whole number' if kind == 'integer' else 'a number'} {edges}"
    return {
        "boolean": "true or false",
        "string": "text, not empty" if schema.get("minLength") else "text",
    }[str(kind)]


def read_toml(path: str | Path) -> dict[str, Any]:
    """The keys of a TOML file, unchecked."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_TOML_BYTES:
            raise ConfigError(
                f"{path}: wanted a configuration of at most {MAX_TOML_BYTES} bytes, got "
                f"{path.stat().st_size}"
            )
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: wanted a configuration file, got nothing (no such file)"
        ) from None
    except (
        UnicodeDecodeError,
        tomllib.TOMLDecodeError,
        RecursionError,
        OSError,
        ValueError,
    ) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path}: wanted a TOML file, got one that does not parse: {error}"
        ) from None


def to_toml(config: RunConfig) -> str:
    """The whole configuration, defaults included, each key with its description.

    >>> make_config(tomllib.loads(to_toml(make_config({"seed": 3, "hidden": [4]})))) == make_config(
    ...     {"seed": 3, "hidden": [4]}
    ... )
    True
    """
    lines = [
        "# All that this run was made of. `advbayes train --config THIS` makes the same run again.",
        "",
    ]
    for key, field in RunConfig.model_fields.items():
        value = getattr(config, key)
        lines.append(f"# {field.description}")
        lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """JSON is TOML for our values, but for characters beyond 16 bits (JSON escapes halves of them)
    and for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

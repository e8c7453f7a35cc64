"""What a run is made of: one strict, flat configuration, read without importing torch."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from advbayes.checks import InputError, nearest

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
    "strong_nll": "the same, but in regression the least likely point instead of the largest error",
    "apgd": "adaptive step sizes on the margin (regression: on the squared error)",
    "minimum_norm": "the nearest point of another class, if within the ball",
    "square": "random squares, by queries alone",
    "hard_label": "by the predicted class alone",
    "random": "random points on the edge of the ball",
}
_ITERATES = ("steps", "restarts")
SPENDING = {  # which of steps, restarts and queries an attack takes
    **dict.fromkeys(("pgd", "pgd_plus", "ent", "apgd", "minimum_norm"), _ITERATES),
    **dict.fromkeys(("strong", "strong_nll"), (*_ITERATES, "queries")),
    **dict.fromkeys(("square", "random"), ("queries",)),
}
MAX_TOML_BYTES = 1 << 20

Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Rate = Annotated[Positive, Field(le=10)]
NonNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Few = Annotated[Count, Field(le=1000)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=10_000)]
_Unattacked = Literal["none", "noise", "consistency"]
_Attacked = Literal["at", "os", "os50", "mix", "pgd", "trades", "alp", "nn", "nn50"]
Defense = Literal[_Unattacked, _Attacked]


def key(default: Any, about: str, **limits: Any) -> Any:
    """A key of the configuration: what it is where nothing is said, what it is for, its limits."""
    return Field(default, description=about, **limits)


class ConfigError(InputError):
    """A configuration that cannot be used: a line for each key, what was wanted and what came."""


class RunConfig(BaseModel):
    """All keys of `advbayes train`; each is also a flag (`batch_size` is `--batch-size`)."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    data: str = key("digits", "A built-in data set, or a .csv or .npz file", min_length=1)
    root: str | None = key(None, "Folder of the data sets (else ADVBAYES_DATA, then the cache)")
    target: str | None = key(
        None, "Target column of a .csv file, or several, or Y1, Y2, both for energy"
    )
    task: Literal["classification", "regression"] | None = key(
        None, "Of your own file, if not clear"
    )
    features: Names | None = key(
        None,
        "Feature columns of a .csv file (else all but the target); a name with a comma in quotes",
    )
    drop: Names = key((), "Columns of a .csv file to leave out")
    text: Names = key(  # not in the repr, by which experiments know models that they kept
        (), "Columns of numbers that are codes, such as 00150: taken for text", repr=False
    )
    num_train: Count | None = key(None, "Use only the first so many training examples")

    network: str = key("auto", "auto, conv, mlp, or module:factory of your own", min_length=1)
    hidden: tuple[Annotated[Count, Field(le=65536)], ...] = key(
        (16, 16), "Hidden widths of the mlp", max_length=8
    )
    posterior: Literal["mean_field", "point", "ensemble", "low_rank"] = key(
        "mean_field", "Family of the posterior"
    )
    members: Few = key(5, "Members of the ensemble")
    rank: Few = key(5, "Rank of the low-rank posterior")
    prior_scale: Positive = key(1.0, "Standard deviation of the prior on theta")
    init_scale: Rate = key(0.02, "Initial standard deviation of the posterior")
    noise_scale: Positive | Literal["learned", "heteroscedastic"] = key(
        "learned",
        "Regression noise: a number (of the standardised target), learned, or heteroscedastic: "
        "one for each input",
    )

    defense: Defense = key(
        "mix",
        "The channel trained through (docs/defenses.md). A defense costs clean error: `advbayes "
        "compare` shows how much, and what it gains, against none",
    )
    channel: str | None = key(
        None, "module:factory of a channel or attack of your own, in the place of the defense's"
    )
    norm: Literal["l2", "linf"] = key("l2", "Norm of the training adversary")
    eps: NonNegative = key(0.3, "Budget of the training adversary, in the model's units")
    feature_eps: Names = key(
        (), "Budgets of single features in their own units, name=number; the others have eps"
    )
    fixed: Names = key((), "Features that the attacker cannot change")
    sigma: NonNegative = key(0.1, "Noise of the channel")
    attack_steps: Annotated[Count, Field(le=10_000)] = key(7, "Steps of the pgd defense")
    beta: NonNegative = key(6.0, "Weight of the TRADES, logit-pairing or consistency penalty")

    epochs: Positive | None = key(
        None, "Passes over the data (else enough for 4,000 steps, images 2,000)"
    )
    batch_size: Count = key(128, "Examples a step")
    lr: Rate | None = key(None, "Adam's learning rate (else 0.02 for a table without epochs, 0.01)")
    decay: Annotated[float, Field(gt=0, le=1)] | None = key(
        None, "Factor on lr for each epoch (else so that it falls to a hundredth)"
    )
    adversary_lr: Rate = key(1e-3, "Learning rate of a learned channel")
    num_theta: Few = key(1, "Thetas a step")
    num_channel: Few = key(1, "Channel samples a step and theta")
    bound: Literal["surrogate", "importance_weighted"] = key(
        "surrogate", "The bound that is maximised"
    )
    class_weight: Literal["balanced"] | None = key(None, "balanced: every class counts alike")
    kl_weight: NonNegative = key(1.0, "Weight of the KL term; 1 is the evidence lower bound")
    seed: int = key(0, "Keys all randomness", ge=0, le=2**62)
    compile: bool = key(False, "compile the step: slow to start, faster to run")
    precision: Literal["float32", "bfloat16"] = key(
        "float32",
        "Of the layers in training, weights stay float32: bfloat16 is faster where the processor "
        "has it, slower where not",
    )
    own_thetas: bool = key(False, "on several ranks, thetas for each of them: less variance")
    threads: Annotated[Count, Field(le=1024)] = key(
        1, "Threads of torch; one is fastest for small nets"
    )
    checkpoint_every: Count = key(200, "Steps between checkpoints")

    @property
    def file(self) -> Path | None:
        """The user's own data file; None for a built-in set."""
        return None if self.data in DATA_SETS else Path(self.data)

    @model_validator(mode="after")
    def _together(self) -> RunConfig:
        """What single keys cannot say; found before anything is loaded."""
        suffix = "" if self.file is None else self.file.suffix.lower()
        if self.file is not None and suffix not in FILE_SUFFIXES:
            wanted = f"data: must be one of {', '.join(DATA_SETS)} or a .csv or .npz file"
            raise InputError(f"{wanted}, got {self.data!r:.60}{nearest(self.data, DATA_SETS)}")
        of_energy = self.data == "energy" and self.target in ("Y1", "Y2", "both")
        if suffix == ".csv" and self.target is None:
            raise InputError(f"target: must name the target column of {self.data!r}, got nothing")
        if suffix != ".csv" and self.target is not None and not of_energy:
            wanted = "Y1, Y2 or both for energy, a column's name for a .csv file, and left out"
            got = f"{self.target!r:.60} for {self.data!r}"
            raise InputError(f"target: must be {wanted} otherwise, got {got}")
        if suffix != ".csv" and (self.features is not None or self.drop or self.text):
            wanted = "features, drop, text: must be left out unless the data are a .csv file"
            raise InputError(f"{wanted}, got {self.data!r}")
        if self.features is not None and self.drop:
            raise InputError("features, drop: must not be given together, got both")
        parse_feature_eps(self.feature_eps)
        if self.feature_eps and self.eps == 0:
            raise InputError("eps: must be > 0 where feature_eps is given, got 0")
        if self.file is None and self.task is not None:
            wanted = f"task: must be left out for the built-in {self.data!r}"
            raise InputError(f"{wanted}, got {self.task!r}")
        if self.network not in NETWORKS and not names_code(self.network):
            wanted = "network: must be auto, conv, mlp or module:factory"
            raise InputError(f"{wanted}, got {self.network!r:.60}")
        if self.channel is not None and not names_code(self.channel):
            raise InputError(f"channel: must be module:factory, got {self.channel!r:.60}")
        if self.network == "conv" and (self.data in TABLE_SETS or suffix == ".csv"):
            wanted = "network: must be auto or mlp for a table"
            raise InputError(f"{wanted}, got 'conv' for {self.data!r}")
        if self.defense in ("os", "os50", "mix", "noise", "consistency") and self.sigma == 0:
            wanted = f"sigma: must be > 0 for defense {self.defense!r} (its channel is noisy)"
            raise InputError(f"{wanted}, got 0")
        if self.defense == "consistency" and self.num_channel < 2:
            wanted = "num_channel: must be >= 2 for defense 'consistency', which compares channel"
            raise InputError(f"{wanted} samples, got {self.num_channel}")
        return self


def listed(text: str) -> list[str]:
    """Names divided by commas; one with a comma in it stands in quotes.

    >>> listed('age,"weight, kg"')
    ['age', 'weight, kg']
    """
    try:
        row = next(csv.reader([text], skipinitialspace=True), [])
    except csv.Error:  # a line end, which no name has
        row = text.split(",")
    return [name for part in row if (name := part.strip())]


def parse_feature_eps(entries: Sequence[str]) -> dict[str, float]:
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
            wanted = "feature_eps: must be name=number with a number > 0"
            raise ConfigError(f"{wanted}, got {entry!r:.60}")
        budgets[name] = value
    return budgets


def names_code(name: str) -> bool:
    """Whether it is `module:factory`, code of the user's own."""
    parts = name.split(":")
    return len(parts) == 2 and all(map(str.strip, parts))


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
        faults = dict.fromkeys(map(_sentence, error.errors()))
        raise ConfigError("\n".join(faults)) from None


def _sentence(item: Any) -> str:
    """One fault as `key: what was wanted, got what came`."""
    key = next(
        (str(part) for part in item["loc"] if part in RunConfig.model_fields),
        ".".join(map(str, item["loc"])),
    )
    if item["type"] == "extra_forbidden":
        return f"{key:.80}: there is no such key{nearest(key, RunConfig.model_fields)}"
    if item["type"] == "value_error":  # ours, from _together
        return str(item["msg"]).removeprefix("Value error, ")
    got = repr(item["input"])
    return f"{key}: must be {accepted(key)}, got {got if len(got) <= 60 else got[:57] + '...'}"


def accepted(key: str) -> str:
    """What a key accepts, in words, from the schema.

    >>> accepted("lr"), accepted("norm")
    ('a number > 0 and <= 10', "one of 'l2', 'linf'")
    """
    schema = RunConfig.model_json_schema()["properties"][key]
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    return " or ".join(_words(option) for option in options)


def _words(schema: dict[str, Any]) -> str:
    if "const" in schema or "enum" in schema:
        words = schema.get("enum", [schema.get("const")])
        return repr(words[0]) if len(words) == 1 else f"one of {', '.join(map(repr, words))}"
    kind = schema.get("type")
    if kind == "array":
        return f"a list of at most {schema['maxItems']} items, each {_words(schema['items'])}"
    if kind in ("number", "integer"):
        signs = {"exclusiveMinimum": ">", "minimum": ">=", "maximum": "<="}
        edges = " and ".join(f"{signs[name]} {schema[name]:g}" for name in signs if name in schema)
        return f"{'a whole number' if kind == 'integer' else 'a number'} {edges}"
    if kind == "boolean":
        return "true or false"
    return "text, not empty" if schema.get("minLength") else "text"


def read_toml(path: str | Path) -> dict[str, Any]:
    """The keys of a TOML file, unchecked."""
    path = Path(path)
    try:
        if (size := path.stat().st_size) <= MAX_TOML_BYTES:
            return tomllib.loads(path.read_bytes().decode("utf-8"))
        wanted = f"{path}: wanted a configuration of at most {MAX_TOML_BYTES} bytes"
    except FileNotFoundError:
        wanted = f"{path}: wanted a configuration file"
        raise ConfigError(f"{wanted}, got nothing (no such file)") from None
    except (OSError, ValueError, RecursionError) as error:  # bad UTF-8 and bad TOML are ValueErrors
        wanted = f"{path}: wanted a TOML file"
        raise ConfigError(f"{wanted}, got one that does not parse: {error}") from None
    raise ConfigError(f"{wanted}, got {size}")


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
        # JSON is TOML for our values, but for characters beyond 16 bits (of which JSON escapes
        # halves) and for DEL
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"# {field.description}")
        lines.append(f"# {key} is not set" if value is None else f"{key} = {text}")
    return "\n".join(lines) + "\n"

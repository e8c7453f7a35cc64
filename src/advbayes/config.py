"""What a run is made of: one strict, frozen, flat configuration, from TOML or flags, without importing torch."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

DATA_SETS = ("california", "cifar10", "diabetes", "digits", "energy", "fashion-mnist", "mnist", "wine", "wine-white")
MAX_TOML_BYTES = 1 << 20

Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9)]


class ConfigError(ValueError):
    """A configuration that cannot be used: one line for each key, with what was wanted and what came."""


class RunConfig(BaseModel):
    """All keys of `advbayes train`; each is also a flag (`lr` is `--lr`, `batch_size` is `--batch-size`)."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    data: Annotated[str, Field(min_length=1, description="A built-in data set, or a .csv or .npz file")] = "digits"
    root: Annotated[str | None, Field(description="Folder of the data sets (else ADVBAYES_DATA, then the cache)")] = None
    target: Annotated[str | None, Field(description="Target column of a .csv file, or Y1, Y2, both for energy")] = None
    task: Annotated[Literal["classification", "regression"] | None, Field(description="Of your own file, if not clear")] = None
    num_train: Annotated[Count | None, Field(description="Use only the first so many training examples")] = None

    network: Annotated[str, Field(min_length=1, description="auto, conv, mlp, or module:factory of your own")] = "auto"
    hidden: Annotated[tuple[Count, ...], Field(max_length=8, description="Hidden widths of the mlp")] = (16, 16)
    posterior: Annotated[Literal["mean_field", "point", "ensemble", "low_rank"], Field(description="Family of the posterior")] = (
        "mean_field"
    )
    members: Annotated[Count, Field(le=1000, description="Members of the ensemble")] = 5
    rank: Annotated[Count, Field(le=1000, description="Rank of the low-rank posterior")] = 5
    prior_scale: Annotated[Positive, Field(description="Standard deviation of the prior on theta")] = 1.0
    init_scale: Annotated[Positive, Field(le=10, description="Initial standard deviation of the posterior")] = 0.02
    noise_scale: Annotated[
        Positive | Literal["learned"], Field(description="Regression noise: a number (of the standardised target) or learned")
    ] = "learned"

    defense: Annotated[
        Literal["none", "noise", "at", "os", "os50", "mix", "pgd", "trades", "alp", "nn", "nn50"],
        Field(description="The channel trained through; docs/defenses.md lists them"),
    ] = "mix"
    norm: Annotated[Literal["l2", "linf"], Field(description="Norm of the training adversary")] = "l2"
    eps: Annotated[NonNegative, Field(description="Budget of the training adversary, in the model's units")] = 1.0
    sigma: Annotated[NonNegative, Field(description="Noise of the channel")] = 0.1
    attack_steps: Annotated[Count, Field(le=10_000, description="Steps of the pgd defense")] = 7
    beta: Annotated[NonNegative, Field(description="Weight of the TRADES or logit-pairing penalty")] = 6.0

    epochs: Annotated[Positive, Field(description="Passes over the training data")] = 20.0
    batch_size: Annotated[Count, Field(description="Examples a step")] = 128
    lr: Annotated[Positive, Field(le=10, description="Adam's learning rate")] = 3e-3
    decay: Annotated[float, Field(gt=0, le=1, description="Factor on the learning rate for each epoch")] = 0.97
    adversary_lr: Annotated[Positive, Field(le=10, description="Learning rate of a learned channel")] = 1e-3
    num_theta: Annotated[Count, Field(le=1000, description="Thetas a step")] = 1
    num_channel: Annotated[Count, Field(le=1000, description="Channel samples a step and theta")] = 1
    bound: Annotated[Literal["surrogate", "importance_weighted"], Field(description="The bound that is maximised")] = "surrogate"
    kl_weight: Annotated[NonNegative, Field(description="Weight of the KL term; 1 is the evidence lower bound")] = 1.0
    seed: Annotated[int, Field(ge=0, le=2**62, description="Keys all randomness")] = 0
    compile: Annotated[bool, Field(description="torch.compile the step: slow to start, faster to run")] = False
    threads: Annotated[Count, Field(le=1024, description="Threads of torch; one is fastest for small nets")] = 1
    checkpoint_every: Annotated[Count, Field(description="Steps between checkpoints")] = 200

    @model_validator(mode="after")
    def _together(self) -> RunConfig:
        suffix = Path(self.data).suffix.lower()
        if self.data not in DATA_SETS and suffix not in (".csv", ".npz"):
            near = difflib.get_close_matches(self.data, DATA_SETS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"data must be one of {', '.join(DATA_SETS)} or a .csv or .npz file, got {self.data!r}{hint}")
        if suffix == ".csv" and self.target is None:
            raise ValueError(f"target must name the target column of {self.data!r}, got nothing")
        if self.network not in ("auto", "conv", "mlp") and self.network.count(":") != 1:
            raise ValueError(f"network must be auto, conv, mlp or module:factory, got {self.network!r}")
        if self.defense in ("os", "os50", "mix", "noise") and self.sigma == 0:
            raise ValueError(f"sigma must be > 0 for defense {self.defense!r} (its channel is noisy), got 0")
        return self


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """A checked configuration; what is wrong is said for all keys at once.

    >>> make_config({"epochs": 5, "defence": "mix"})
    Traceback (most recent call last):
    ...
    advbayes.config.ConfigError: defence: there is no such key; did you mean 'defense'?
    >>> make_config({"epochs": 5}).epochs
    5.0
    """
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_sentence(item) for item in error.errors()))) from None


def _sentence(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"] if part in RunConfig.model_fields or not RunConfig.model_fields)
    key = key or ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, RunConfig.model_fields, 1)
        return f"{key}: there is no such key" + (f"; did you mean {near[0]!r}?" if near else "")
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "value_error":
        return message
    got = repr(item["input"])
    wanted = _range(key) or f"{message[0].lower()}{message[1:]}"
    return f"{key}: {wanted}, got {got if len(got) <= 60 else got[:57] + '...'}"


def _range(key: str) -> str:
    """What a numeric key accepts, from the schema; empty for other keys."""
    schema = RunConfig.model_json_schema()["properties"].get(key, {})
    schema = schema.get("items", schema)
    options = schema.get("anyOf", [schema])
    number = next((option for option in options if option.get("type") in ("number", "integer")), None)
    if number is None:
        return ""
    signs = (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))
    edges = " and ".join(f"{sign} {number[name]:g}" for name, sign in signs if name in number)
    words = "".join(f" or {option['const']!r}" for option in options if "const" in option)
    return f"must be {'a whole number' if number['type'] == 'integer' else 'a number'} {edges}{words}"


def read_toml(path: str | Path) -> dict[str, Any]:
    """The keys of a TOML file, unchecked."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_TOML_BYTES:
            raise ConfigError(f"{path}: wanted a configuration of at most {MAX_TOML_BYTES} bytes, got {path.stat().st_size}")
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: wanted a configuration file, got nothing (no such file)") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError, OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: wanted a TOML file, got one that does not parse: {error}") from None


def to_toml(config: RunConfig) -> str:
    """The whole configuration, defaults included, each key with its description.

    >>> make_config(tomllib.loads(to_toml(make_config({"seed": 3, "hidden": [4]})))) == make_config({"seed": 3, "hidden": [4]})
    True
    """
    lines = ["# All that this run was made of. `advbayes train --config THIS` makes the same run again.", ""]
    for key, field in RunConfig.model_fields.items():
        value = getattr(config, key)
        lines.append(f"# {field.description}")
        lines.append(f"# {key} is not set" if value is None else f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"

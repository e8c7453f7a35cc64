"""`advbayes train`: every key of the configuration is a flag."""

from __future__ import annotations

import inspect
import typing
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from advbayes.cli import flags
from advbayes.cli.screen import downloads, emit, say, usable, warn
from advbayes.cli.signals import Finishing
from advbayes.runs.config import (
    DATA_SETS,
    NETWORKS,
    ConfigError,
    RunConfig,
    listed,
    make_config,
    read_toml,
)

if TYPE_CHECKING:
    from advbayes.runs import Run

_of_run = partial(typer.Option, rich_help_panel="Run")
PANELS = {
    "Data": "data root target task features drop text num_train",
    "Model": "network hidden posterior members rank prior_scale init_scale noise_scale",
    "Defense": "defense channel norm eps feature_eps fixed sigma attack_steps beta adversary_lr",
    "Training": "epochs batch_size lr decay num_theta num_channel bound class_weight kl_weight "
    "seed compile precision own_thetas threads checkpoint_every",
}


def _with_files(config: RunConfig) -> RunConfig:
    """Files must exist; by their absolute paths, the run can be resumed from any folder."""
    root = None if config.root is None else Path(config.root)
    if config.file is not None and not config.file.is_file():
        raise ConfigError(f"data: must be a file that is there, got {config.data!r}")
    if root is not None and not root.is_dir():
        raise ConfigError(f"root: must be a folder that is there, got {config.root!r}")
    places = {"data": config.file, "root": root}
    found = {key: str(path.resolve()) for key, path in places.items() if path is not None}
    return config.model_copy(update=found)


def _tell(run: Run, as_json: bool, what: str, hint: str = "") -> None:
    from advbayes.cli.describe import described_run, lines_of_run

    if as_json:
        emit(described_run(run))
    else:
        say(f"{run.path}: {what}\n{lines_of_run(run)}{hint}")


def parse(key: str, text: Any) -> Any:
    """The value of a flag as text; what does not fit is left for the schema to refuse.

    >>> parse("hidden", "32,16"), parse("noise_scale", "learned"), parse("lr", "fast")
    ([32, 16], 'learned', 'fast')
    >>> parse("drop", 'id,"weight, kg"')
    ['id', 'weight, kg']
    >>> parse("epochs", "5")
    5
    """
    kinds = _kinds(RunConfig.model_fields[key].annotation)
    if bool in kinds:
        return text
    if tuple not in kinds:
        return _number(text, kinds)
    return [_number(part, [int] if key == "hidden" else []) for part in listed(text)]


def _number(text: str, kinds: list[Any]) -> Any:
    for kind in (int, float):
        if kind in kinds or float in kinds:
            with suppress(ValueError):
                return kind(text)
    return text


def _kinds(annotation: Any) -> list[Any]:
    """The plain types and words in an annotation."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return [tuple]
    if origin is Annotated:
        return _kinds(inner[0])
    if origin is typing.Literal:
        return list(inner)
    return [kind for part in inner for kind in _kinds(part)] or [annotation]


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _key_option(key: str, panel: str) -> Any:
    """The flag of a key of the configuration."""
    field = RunConfig.model_fields[key]
    kinds = _kinds(field.annotation)
    default = field.default
    shown = ",".join(map(str, default)) if type(default) is tuple else default
    settings: dict[str, Any] = {
        "help": field.description,
        "rich_help_panel": panel,
        "show_default": False if shown in (None, "") else str(shown),
    }
    if bool in kinds:
        names = f"{_flag(key)}/--no-{key.replace('_', '-')}"
        return Annotated[bool | None, typer.Option(names, **settings)]
    words = [kind for kind in kinds if type(kind) is str]
    if choices := {"data": DATA_SETS, "network": NETWORKS}.get(key, words):
        settings["autocompletion"] = lambda incomplete: [  # typer knows it by this name
            one for one in choices if one.startswith(incomplete)
        ]
    metavars = {tuple: "LIST", float: "NUMBER", int: "N"}
    metavar = next((word for kind, word in metavars.items() if kind in kinds), "TEXT")
    if words:
        metavar = "TEXT" if key == "noise_scale" else "|".join(words)
    return Annotated[str | None, typer.Option(metavar=metavar, **settings)]


def _with_keys(command: Any) -> Any:
    """A command with a flag for each key of the configuration in place of its `**keys`."""
    signature = inspect.signature(command, eval_str=True)
    *own, keys = signature.parameters.values()
    for panel, names in PANELS.items():
        for name in names.split():
            option = _key_option(name, panel)
            own.append(keys.replace(name=name, kind=own[0].kind, annotation=option, default=None))
    command.__signature__ = signature.replace(parameters=own)
    command.__annotations__ = {each.name: each.annotation for each in own}
    return command


@_with_keys
def train(
    *,
    config: Annotated[
        str | None, _of_run(metavar="FILE", help="A TOML file of these keys; flags override it")
    ] = None,
    out: Annotated[
        str | None, _of_run(metavar="RUN", help="New run folder (else runs/DATA-DEFENSE-N)")
    ] = None,
    resume: Annotated[
        str | None, _of_run(metavar="RUN", help="Go on with a run, bit for bit")
    ] = None,
    trust_network: flags.Trust = False,
    json: flags.Json = False,
    device: flags.Device = "cpu",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar")] = False,
    **keys: Any,
) -> int:
    """Train a model through an adversarial channel, into a run folder that survives a kill at
    any moment.

    Examples:

    advbayes train --data digits --defense mix --epochs 5 --out RUN

    advbayes train --data patients.csv --target outcome --defense at --eps 0.3

    advbayes train --config settings.toml --seed 1

    advbayes train --resume RUN

    torchrun --nproc-per-node 4 -m advbayes train --data mnist --defense mix --epochs 20 --out RUN
    """
    given = {key: value for key, value in keys.items() if value is not None}
    made = None
    if resume is None:  # what the flags say, on top of the file, on top of the defaults
        values = {} if config is None else read_toml(config)
        made = make_config({**values, **{key: parse(key, value) for key, value in given.items()}})
        made = _with_files(made)
    else:
        beside = {"config": config, "out": out, **given}
        if extra := [_flag(key) for key, value in beside.items() if value is not None]:
            wanted = f"resume: goes on with the configuration in {resume}"
            raise ConfigError(f"{wanted}, got {', '.join(extra)} beside it")
    usable(device)  # last: torch, which has to be asked, takes seconds to load

    from contextlib import ExitStack

    from advbayes.distributed import ranks
    from advbayes.runs import Run, create_run, follow
    from advbayes.runs import train as trained

    with Finishing() as stop:
        shared: dict[str, Any] = {"trusted": trust_network, "stop": stop, "device": device}
        if not ranks().is_first:
            follow(**shared)
            return stop.code
        with ExitStack() as stack:
            if made is not None:
                run = stack.enter_context(create_run(made, out))
            else:
                assert resume is not None
                run = Run.open(resume)
                make_config(read_toml(run.path / "config.toml"))  # refused before all is written
                stack.enter_context(run.lock())
                if run.status == "trained":
                    ranks().on_first(dict)  # the others need not wait
                    _tell(run, json, "was trained already")
                    return 0
            shared["downloading"] = stack.enter_context(downloads(quiet=quiet or json))
            result = trained(run, progress=False if quiet else None, tell=warn, **shared)
        if result.interrupted:
            _tell(run, json, "stopped", f"\nGo on with: advbayes train --resume {run.path}")
            return stop.code
        from advbayes.cli.describe import price

        hint = f"\nNext: advbayes evaluate {run.path}    advbayes audit {run.path}"
        if cost := price(run.config):
            hint += f"\n{cost}"
        _tell(run, json, "trained", hint)
    return 0

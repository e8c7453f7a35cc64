"""`advbayes train`: every key of the configuration is a flag."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from advbayes.cli.screen import Device, Json, Trust, emit, say, usable
from advbayes.cli.signals import Finishing
from advbayes.runs.config import ConfigError, RunConfig, make_config, read_toml

PANELS = {
    "Data": ("data", "root", "target", "task", "features", "drop", "num_train"),
    "Model": (
        "network",
        "hidden",
        "posterior",
        "members",
        "rank",
        "prior_scale",
        "init_scale",
        "noise_scale",
    ),
    "Defense": (
        "defense",
        "channel",
        "norm",
        "eps",
        "feature_eps",
        "fixed",
        "sigma",
        "attack_steps",
        "beta",
        "adversary_lr",
    ),
    "Training": (
        *(
            "epochs",
            "batch_size",
            "lr",
            "decay",
            "num_theta",
            "num_channel",
            "bound",
            "class_weight",
            "kl_weight",
        ),
        *("seed", "compile", "precision", "own_thetas", "threads", "checkpoint_every"),
    ),
}
HELP = """Train a model through an adversarial channel, into a run folder that survives a kill at
any moment.

Examples:

advbayes train --data digits --defense mix --epochs 5 --out RUN

advbayes train --data patients.csv --target outcome --defense at --eps 0.3

advbayes train --config settings.toml --seed 1

advbayes train --resume RUN

torchrun --nproc-per-node 4 -m advbayes train --data mnist --defense mix --epochs 20 --out RUN
"""


def add_to(app: typer.Typer) -> None:
    app.command("train", help=HELP)(_command())


def _train(**options: Any) -> int:
    """What the flags say, on top of the file, on top of the defaults."""
    config, out, resume = options.pop("config"), options.pop("out"), options.pop("resume")
    trusted, as_json, quiet = (
        options.pop("trust_network"),
        options.pop("json"),
        options.pop("quiet"),
    )
    device = options.pop("device")
    flags = {key: value for key, value in options.items() if value is not None}
    if resume is not None:
        extra = [
            name for name, value in (("--config", config), ("--out", out)) if value is not None
        ]
        extra += [_flag(key) for key in flags]
        if extra:
            raise ConfigError(
                f"resume: goes on with the configuration in {resume}, got {', '.join(extra)} "
                f"beside it"
            )
        return _run(None, None, resume, trusted, as_json, quiet, usable(device))
    values = {} if config is None else read_toml(config)
    made = make_config({**values, **{key: parse(key, value) for key, value in flags.items()}})
    # the device last: torch, which has to be asked, takes seconds to load
    return _run(_with_files(made), out, None, trusted, as_json, quiet, usable(device))


def _with_files(config: RunConfig) -> RunConfig:
    """Files that must be there, by their whole paths, so that the run goes on from any folder."""
    update: dict[str, Any] = {}
    if config.file is not None:
        if not config.file.is_file():
            raise ConfigError(f"data: must be a file that is there, got {config.data!r}")
        update["data"] = str(config.file.resolve())
    if config.root is not None:
        if not Path(config.root).is_dir():
            raise ConfigError(f"root: must be a folder that is there, got {config.root!r}")
        update["root"] = str(Path(config.root).resolve())
    return config.model_copy(update=update)


def _run(
    config: RunConfig | None,
    out: str | None,
    resume: str | None,
    trusted: bool,
    as_json: bool,
    quiet: bool,
    device: str,
) -> int:
    from contextlib import ExitStack

    from advbayes.cli.downloads import Downloads
    from advbayes.distributed import ranks
    from advbayes.runs import Run, create_run, follow, train

    with Finishing() as stop:
        with ExitStack() as stack:
            if not ranks().is_first:
                quietly = Downloads(show=False)
                follow(trusted=trusted, stop=stop, downloading=quietly, device=device)
                return stop.code
            if resume is None:
                assert config is not None
                run = stack.enter_context(create_run(config, out))
            else:
                run = Run.open(resume)
                # refused before anything is written
                make_config(read_toml(run.path / "config.toml"))
                stack.enter_context(run.lock())
                if run.status == "trained":
                    ranks().on_first(dict)  # the others need not wait
                    _tell(run, as_json, "was trained already")
                    return 0
            downloads = stack.enter_context(Downloads(show=False if quiet or as_json else None))
            result = train(
                run,
                trusted=trusted,
                progress=False if quiet else None,
                stop=stop,
                downloading=downloads,
                device=device,
            )
        if result.interrupted:
            _tell(run, as_json, "stopped", f"Go on with: advbayes train --resume {run.path}")
            return stop.code
        _tell(
            run,
            as_json,
            "trained",
            f"Next: advbayes evaluate {run.path}    advbayes audit {run.path}",
        )
    return 0


def _tell(run: Any, as_json: bool, what: str, hint: str = "") -> None:
    from advbayes.cli.describe import described_run, lines_of_run

    if as_json:
        emit(described_run(run))
    else:
        say(f"{run.path}: {what}\n{lines_of_run(run)}" + (f"\n{hint}" if hint else ""))


def parse(key: str, text: Any) -> Any:
    """The value that a flag's text stands for, where it stands for one; what does not fit is left
    for the schema to refuse.

    >>> (
    ...     parse("hidden", "32,16"),
    ...     parse("epochs", "5"),
    ...     parse("noise_scale", "learned"),
    ...     parse("lr", "fast"),
    ... )
    ([32, 16], 5, 'learned', 'fast')
    """
    if not isinstance(text, str):
        return text
    kinds = _kinds(RunConfig.model_fields[key].annotation)
    if tuple in kinds:
        return [
            _number(part.strip(), [int] if key == "hidden" else [])
            for part in text.split(",")
            if part.strip()
        ]
    return _number(text, kinds)


def _number(text: str, kinds: list[Any]) -> Any:
    for kind in (int, float):
        if kind in kinds or (kind is int and float in kinds):
            try:
                return kind(text)
            except ValueError:
                pass
    return text


def _kinds(annotation: Any) -> list[Any]:
    """The plain types and words in an annotation."""
    origin = typing.get_origin(annotation)
    if origin is tuple:
        return [tuple]
    if origin is Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin is typing.Literal:
        return list(typing.get_args(annotation))
    return [kind for part in typing.get_args(annotation) for kind in _kinds(part)] or [annotation]


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _choices(key: str) -> list[str]:
    from advbayes.runs.config import DATA_SETS, NETWORKS

    named = {"data": DATA_SETS, "network": NETWORKS}
    return list(
        named.get(
            key,
            [
                kind
                for kind in _kinds(RunConfig.model_fields[key].annotation)
                if isinstance(kind, str)
            ],
        )
    )


def _completion(choices: list[str]) -> Any:
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def _command() -> Any:
    """`_train` with a parameter for each key of RunConfig."""

    def option(*names: str, **settings: Any) -> Any:
        return Annotated[settings.pop("kind", str | None), typer.Option(*names, **settings)]

    file = {"rich_help_panel": "Run"}
    parameters: dict[str, tuple[Any, Any]] = {
        "config": (
            option(
                "--config",
                metavar="FILE",
                help="A TOML file of these keys; flags override it",
                **file,
            ),
            None,
        ),
        "out": (
            option(
                "--out", metavar="RUN", help="New run folder (else runs/DATA-DEFENSE-N)", **file
            ),
            None,
        ),
        "resume": (
            option("--resume", metavar="RUN", help="Go on with a run, bit for bit", **file),
            None,
        ),
    }
    for panel, keys in PANELS.items():
        for key in keys:
            field = RunConfig.model_fields[key]
            shown = (
                ",".join(map(str, field.default))
                if isinstance(field.default, tuple)
                else field.default
            )
            settings: dict[str, Any] = {
                "help": field.description,
                "rich_help_panel": panel,
                "show_default": False if shown in (None, "") else str(shown),
            }
            names = [_flag(key)]
            if bool in _kinds(field.annotation):
                names = [f"{_flag(key)}/--no-{key.replace('_', '-')}"]
                settings["kind"] = bool | None
            elif choices := _choices(key):
                settings["autocompletion"] = _completion(choices)
                settings["metavar"] = (
                    "|".join(choices) if key not in ("data", "network", "noise_scale") else "TEXT"
                )
            else:
                settings["metavar"] = _metavar(_kinds(field.annotation))
            parameters[key] = (option(*names, **settings), None)
    parameters["trust_network"] = (Trust, False)
    parameters["json"] = (Json, False)
    parameters["device"] = (Device, "cpu")
    parameters["quiet"] = (option("--quiet", kind=bool, help="No progress bar"), False)

    def command(**options: Any) -> int:
        return _train(**options)

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default
            )
            for name, (kind, default) in parameters.items()
        ]
    )
    command.__annotations__ = {name: kind for name, (kind, _) in parameters.items()}
    return command


def _metavar(kinds: list[Any]) -> str:
    return (
        "LIST"
        if tuple in kinds
        else "NUMBER"
        if float in kinds
        else "N"
        if int in kinds
        else "TEXT"
    )

"""The folder of a run: created by one process, whole or not at all, and what it holds."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from advbayes import store
from advbayes.runs.config import ConfigError, RunConfig, make_config, read_toml, to_toml

# What a manifest says, where it says it.
_FIELDS: dict[str, tuple[type, str]] = {
    "status": (str, "text"),
    **dict.fromkeys(("started", "versions", "data"), (dict, "a JSON object")),
    **dict.fromkeys(("steps", "skipped"), (int, "a whole number")),
}
REACH = ("--fixed", "--feature-eps")  # the flags that change which features are in reach


def command_of(evaluation: Path) -> list[str]:
    """The command that made an evaluation, word by word; no words where it was not kept.

    >>> command_of(Path("absent"))
    []
    """
    path = evaluation / "command.json"
    match store.read_document(path) if path.is_file() else None:
        case [*words]:
            return [str(word) for word in words]
    return []


def flags_of(evaluation: Path) -> list[tuple[str, str]]:
    """The flags of that command, each with its value."""
    return [pair for pair in pairwise(command_of(evaluation)) if pair[0].startswith("--")]


@dataclass(frozen=True)
class Run:
    """A run folder and what it holds.

    >>> Run(Path("runs/digits-mix")).model_path.as_posix()
    'runs/digits-mix/model.advbayes'
    """

    path: Path

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Run:
        """An existing run folder."""
        run = Run(Path(path))
        if not (run.path / "config.toml").is_file():
            got = "a file" if run.path.exists() else "nothing (no such folder)"
            if run.path.is_dir():
                got = "no config.toml in it"
            raise ConfigError(f"{path}: wanted a run folder (made by advbayes train), got {got}")
        return run

    @property
    def config(self) -> RunConfig:
        """What the run is made of."""
        try:
            return make_config(read_toml(self.path / "config.toml"))
        except ConfigError as error:
            raise ConfigError(f"{self.path / 'config.toml'}: {error}") from None

    @property
    def manifest(self) -> dict[str, Any]:
        """Status, versions, where it comes from; nothing before the training began."""
        path = self.path / "manifest.json"
        if not path.exists() and self.model_path.exists():
            raise store.StoreError(path, "the manifest of a trained run", "no such file")
        document = store.read_document(path) if path.exists() else {}
        if type(document) is not dict:
            raise store.StoreError(path, "a JSON object", type(document).__name__)
        for field in document.keys() & _FIELDS.keys():
            kind, wanted = _FIELDS[field]
            if type(document[field]) is not kind:
                raise store.StoreError(f"{path}:{field}", wanted, f"{document[field]!r:.80}")
        return document

    @property
    def status(self) -> str:
        """new, training, interrupted or trained."""
        return str(self.manifest.get("status", "new"))

    @property
    def model_path(self) -> Path:
        """The finished model."""
        return self.path / "model.advbayes"

    @property
    def history(self) -> store.RecordLog:
        """One record a step."""
        return store.RecordLog(self.path / "history.jsonl")

    @property
    def evaluations(self) -> tuple[Path, ...]:
        """The folders of its evaluations, by name."""
        return tuple(sorted(path.parent for path in self.path.glob("evaluation/*/config.json")))

    def described(self) -> dict[str, Any]:
        """What a report says of it."""
        return {"config": self.config.model_dump(mode="json"), "manifest": self.manifest}

    def lock(self) -> store.Lock:
        """The right to write here, to be entered."""
        return store.Lock(self.path)

    def changed(self, sealed: object) -> dict[str, tuple[Any, Any]]:
        """The keys of config.toml that differ from the one that the run's files were made with:
        before and now; the location of the data may change.

        `sealed` is the configuration as a checkpoint or model holds it; None: from a version that
        did not seal it.
        """
        if sealed is None:
            return {}
        before = sealed if type(sealed) is dict else {}
        now, default = (each.model_dump(mode="json") for each in (self.config, RunConfig()))
        return {
            key: (before.get(key), now[key])
            for key in sorted(now.keys() - {"root"})
            if now[key] != before.get(key, default[key])
        }

    def check_sealed(self, sealed: object, place: str) -> None:
        """Refuse a config.toml that differs from the one that the run's files were made with."""
        for key, (before, now) in self.changed(sealed).items():
            wanted = f"{key} = {before!r}, which the run's {place} was made with (or a new run)"
            raise store.StoreError(self.path / "config.toml", wanted, f"{now!r}")

    def log(self, message: str) -> None:
        """A dated line in log.txt; a log that cannot be written stops nothing."""
        with suppress(OSError), (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {message}\n")

    def write_manifest(self, **more: Any) -> None:
        """Replace fields of the manifest."""
        store.write_document(self.path / "manifest.json", {**self.manifest, **more})


@contextmanager
def create_run(config: RunConfig, out: str | os.PathLike[str] | None = None) -> Iterator[Run]:
    """A new run folder, locked for the length of the block: `out`, or `runs/DATA-DEFENSE` with a
    number where that is taken.

    A folder that exists is refused unless it is empty; of any number of processes that ask for one
    name, one gets it. When the block fails before anything but the configuration is in the folder,
    nothing stays.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent, create_run(RunConfig(), f"{parent}/a") as run:
    ...     run.config.epochs is None
    True
    """
    with ExitStack() as stack:
        if out is not None:
            folder = Path(out)
            if not folder.exists():
                stack.callback(_remove_empty, folder)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                got = f"{folder}, which is or is below a file"
                raise ConfigError(f"out: wanted a new folder, got {got}") from None
            _refuse_used(folder)  # before the lock, which would blame the living writer
            stack.enter_context(store.Lock(folder))
            _refuse_used(folder)
        else:
            folder = _claimed(config, stack)
        run = Run(folder)
        try:
            store.write_bytes(folder / "config.toml", to_toml(config).encode())
            yield run
        except BaseException:
            # refused before anything was done: as if never asked
            if set(os.listdir(folder)) <= {"config.toml", ".lock"}:
                (folder / "config.toml").unlink(missing_ok=True)
            raise


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _claimed(config: RunConfig, stack: ExitStack) -> Path:
    """The first free name, taken and locked; one filled in between is passed over."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(config.data).stem) or "data"
    base = Path("runs") / f"{name}-{config.defense}"
    base.parent.mkdir(exist_ok=True)
    while True:
        lock = store.claim(base)
        stack.callback(_remove_empty, Path(lock.folder))
        with suppress(store.LockedError):
            stack.enter_context(lock)
            if not _used(Path(lock.folder)):
                return Path(lock.folder)


def _used(folder: Path) -> bool:
    """Whether the folder holds more than a lock or a dead process's half-written file."""
    return any(name != ".lock" and not name.endswith(".tmp") for name in os.listdir(folder))


def _refuse_used(folder: Path) -> None:
    if _used(folder):
        advice = "files that are not a run's"
        if (folder / "config.toml").is_file():
            advice = f"a run; continue it with `advbayes train --resume {folder}`"
        raise ConfigError(f"out: wanted a new or empty folder, got {folder}, which holds {advice}")


def record(command: list[str] | None = None) -> dict[str, Any]:
    """What proves a figure: command, commit, machine.

    >>> sorted(record(["advbayes", "demo"]))
    ['command', 'commit', 'machine']
    """
    try:
        git = ["git", "-C", os.fspath(Path(__file__).parent), "describe", "--always", "--dirty"]
        quiet = subprocess.DEVNULL
        commit = subprocess.check_output(git, stderr=quiet, text=True, timeout=10).strip()
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"
    return {
        "command": command if command is not None else sys.argv,
        "commit": commit,
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
    }

"""Files that commands write: new ones only."""

from __future__ import annotations

from pathlib import Path

from advbayes.runs.config import ConfigError


def check_new(key: str, path: str | None, suffixes: tuple[str, ...]) -> None:
    """Refuse a file that exists, has another ending, or has no folder, before the work starts.

    >>> check_new("out", "x.exe", (".csv", ".npz"))
    Traceback (most recent call last):
    ...
    advbayes.runs.config.ConfigError: out: must end in .csv or .npz, got 'x.exe'
    """
    if path is None:
        return
    if Path(path).suffix.lower() not in suffixes:
        raise ConfigError(f"{key}: must end in {' or '.join(suffixes)}, got {path!r}")
    if Path(path).exists():
        raise ConfigError(f"{key}: must be a new file, got {path}, which exists")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"{key}: must be in a folder that is there, got {path}")

"""Where data sets are looked for, and reading what is found there with its content checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from advbayes.datasets.containers import archived, read_gzip, read_plain, read_tar_gzip
from advbayes.datasets.dataset import Provenance
from advbayes.datasets.errors import INSTALL, DataError, DataMissingError, problem
from advbayes.datasets.formats import values_sha256
from advbayes.datasets.sources import Content, Source
from advbayes.datasets.tables import parse_table


def cache_folder() -> Path:
    """Where downloads are kept: `ADVBAYES_CACHE`, or the system's cache folder.

    >>> from unittest import mock
    >>> with mock.patch.dict(os.environ, ADVBAYES_CACHE="/var/cache/mine"):
    ...     str(cache_folder())
    '/var/cache/mine'
    """
    if os.environ.get("ADVBAYES_CACHE"):
        return Path(os.environ["ADVBAYES_CACHE"]).expanduser()
    try:
        import pooch
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"the data cache needs pooch: {INSTALL}, or set ADVBAYES_CACHE"
        ) from None
    return Path(pooch.os_cache("advbayes"))


def places(root: str | Path | None = None) -> tuple[Path, ...]:
    """The folders looked in: `root` alone when given, else `ADVBAYES_DATA` and then the cache.

    >>> [str(place) for place in places("here")]
    ['here']
    """
    if root is not None:
        return (Path(root).expanduser(),)
    named = os.environ.get("ADVBAYES_DATA")
    folders = [Path(named).expanduser()] if named else []
    try:
        folders.append(cache_folder())
    except ModuleNotFoundError:
        if not folders:
            raise
    return tuple(folders)


def find_contents(source: Source, root: Path) -> dict[str, Path]:
    """The file that holds each content, from the first folder of the layout that has most of them.

    >>> from advbayes.datasets.sources import SOURCES
    >>> find_contents(SOURCES["wine"], Path("/nowhere"))
    {}
    """
    best: dict[str, Path] = {}
    for folder in source.folders:
        paths: dict[str, Path] = {}
        for content in source.contents:
            names = [
                content.name,
                f"{content.name}.gz",
                *([source.archive] if source.archive else []),
            ]
            files = [root / folder / name for name in names]
            present = next((file for file in files if file.is_file()), None)
            if present is not None:
                paths[content.name] = present
        if len(paths) > len(best):
            best = paths
    return best


def read_file(
    source: Source, path: Path, names: tuple[str, ...], kept_as: str | None = None
) -> dict[str, bytes]:
    """The named contents out of one file; `kept_as` names its kind when the path does not."""
    wanted = {content.name: content for content in source.contents if content.name in names}
    kind = kept_as or path.name
    if archived(kind):
        return read_tar_gzip(path, {name: content.size for name, content in wanted.items()})
    (content,) = wanted.values()
    if kind.endswith(".gz"):
        return {content.name: read_gzip(path, content.size)}
    if content.decimals is not None:
        return {content.name: read_plain(path, 8 * content.size)}
    return {content.name: read_plain(path, content.size, exact=True)}


def check_contents(
    source: Source,
    contents: Mapping[str, bytes],
    where: Mapping[str, object],
    verify: bool | None = None,
) -> Provenance:
    """Compare every content with the published one.

    `verify=None`: any difference is an error, except that a set known to exist in other complete
    copies (CIFAR-10 re-encoded) is accepted, and marked, when not one of its files is the published
    one. `True`: no exception. `False`: accept, and mark.
    """
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    bad = [
        content
        for content in source.contents
        if content.name in contents and not _published(content, contents)
    ]
    origin = str(where[next(iter(contents))])
    if not bad:
        return Provenance(origin, hashes, verified=True, note="the published content")
    if verify is False or (
        verify is None and source.other_copies and len(bad) == len(contents) > 1
    ):
        return Provenance(
            origin,
            hashes,
            note="unverified content: of the right form, but not the published bytes",
        )
    first = bad[0]
    got = hashes[first.name]
    if first.decimals is not None:
        got = f"other numbers (file {got})"
    raise DataError(
        problem(
            where[first.name],
            f"the published {first.name} of {source.homepage} (SHA-256 {first.sha256})",
            got,
            f"Delete it and fetch it again, or pass verify=False to use it all the same. "
            f"{source.hint}".strip(),
        )
    )


def read_contents(
    source: Source, files: Mapping[str, Path], verify: bool | None
) -> tuple[dict[str, bytes], Provenance]:
    """Every content of a set from the files that hold them, each file opened once, checked."""
    contents: dict[str, bytes] = {}
    for path in dict.fromkeys(files.values()):
        contents |= read_file(
            source, path, tuple(name for name, file in files.items() if file == path)
        )
    return contents, check_contents(source, contents, files, verify)


def missing(
    source: Source, looked: tuple[Path, ...], paths: Mapping[str, Path]
) -> DataMissingError:
    """The error for a set that is not there, or not all there."""
    absent = [content.name for content in source.contents if content.name not in paths]
    where = ", ".join(str(place / source.folders[0]) for place in looked)
    file = " or ".join(
        dict.fromkeys(
            [remote.file for remote in source.remotes if absent[0] in remote.contents] + absent[:1]
        )
    )
    return DataMissingError(
        problem(
            f"data set {source.name!r}",
            f"{file} in {where}",
            f"no such file ({len(absent)} of {len(source.contents)} missing)",
            f"Put it there from {source.homepage}, set ADVBAYES_DATA to the folder that has "
            f"{source.folders[0]}/, "
            f"or pass download=True (with mirror= for another address). {source.hint}".strip(),
        )
    )


def _published(content: Content, contents: Mapping[str, bytes]) -> bool:
    data = contents[content.name]
    if content.decimals is None:
        return hashlib.sha256(data).hexdigest() == content.sha256
    return (
        values_sha256(parse_table(data, content.name).numbers, content.decimals) == content.sha256
    )

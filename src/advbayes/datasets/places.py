"""Where data sets are looked for, and reading what is found there with its content checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from advbayes.checks import extra
from advbayes.datasets.containers import read_gzip, read_plain, read_tar_gzip
from advbayes.datasets.dataset import Provenance
from advbayes.datasets.errors import DataError, DataMissingError
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
    with extra("the data cache needs pooch", "data", ", or set ADVBAYES_CACHE"):
        import pooch
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


def find_contents(source: Source, roots: Iterable[Path]) -> dict[str, Path]:
    """The file that holds each content, from the first folder of the layout that has most of them.

    >>> from advbayes.datasets.sources import SOURCES
    >>> find_contents(SOURCES["wine"], [Path("/nowhere")])
    {}
    """
    best: dict[str, Path] = {}
    for folder in (root / name for root in roots for name in source.folders):
        paths: dict[str, Path] = {}
        for content in source.contents:
            names = (content.name, f"{content.name}.gz", *filter(None, [source.archive]))
            files = (folder / name for name in names)
            if (present := next(filter(Path.is_file, files), None)) is not None:
                paths[content.name] = present
        best = max(best, paths, key=len)
        if len(best) == len(source.contents):
            break
    return best


def read_file(
    source: Source, path: Path, names: Collection[str], kept_as: str | None = None
) -> dict[str, bytes]:
    """The named contents out of one file; `kept_as` names its kind when the path does not."""
    wanted = [content for content in source.contents if content.name in names]
    kind = kept_as or path.name
    if kind.endswith((".tar.gz", ".tgz")):
        return read_tar_gzip(path, {content.name: content.size for content in wanted})
    (content,) = wanted
    if kind.endswith(".gz"):
        data = read_gzip(path, content.size)
    elif content.decimals is not None:
        data = read_plain(path, 8 * content.size)
    else:
        data = read_plain(path, content.size, exact=True)
    return {content.name: data}


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
        if content.name in contents and not _published(content, contents[content.name])
    ]
    origin = str(where[next(iter(contents))])
    if not bad:
        return Provenance(origin, hashes, verified=True, note="the published content")
    other_copy = source.other_copies and len(bad) == len(contents) > 1
    if verify is False or (verify is None and other_copy):
        note = "unverified content: of the right form, but not the published bytes"
        return Provenance(origin, hashes, note=note)
    file, got = bad[0].name, hashes[bad[0].name]
    if bad[0].decimals is not None:
        got = f"other numbers (file {got})"
    wanted = f"the published {file} of {source.homepage} (SHA-256 {bad[0].sha256})"
    remedy = "Delete it and fetch it again."
    raise DataError(where[file], wanted, got, f"{remedy} {source.hint}".strip())


def read_contents(
    source: Source, files: Mapping[str, Path], verify: bool | None
) -> tuple[dict[str, bytes], Provenance]:
    """Every content of a set from the files that hold them, each file opened once, checked."""
    contents: dict[str, bytes] = {}
    for path in dict.fromkeys(files.values()):
        contents |= read_file(source, path, [name for name, file in files.items() if file == path])
    return contents, check_contents(source, contents, files, verify)


def missing(
    source: Source, looked: tuple[Path, ...], paths: Mapping[str, Path]
) -> DataMissingError:
    """The error for a set that is not there, or not all there."""
    absent = [content.name for content in source.contents if content.name not in paths]
    packed = [remote.file for remote in source.remotes if absent[0] in remote.contents]
    file = " or ".join(dict.fromkeys([*packed, absent[0]]))
    folder = source.folders[0]
    where = ", ".join(str(place / folder) for place in looked)
    remedy = (
        f"Put it there from {source.homepage}, set ADVBAYES_DATA to the folder that has {folder}/, "
        f"or fetch it with `advbayes datasets --fetch {source.name}` (in Python, download=True; "
        f"mirror= for another address). {source.hint}".strip()
    )
    got = f"no such file ({len(absent)} of {len(source.contents)} missing)"
    return DataMissingError(f"data set {source.name!r}", f"{file} in {where}", got, remedy)


def _published(content: Content, data: bytes) -> bool:
    if content.decimals is None:
        return hashlib.sha256(data).hexdigest() == content.sha256
    values = parse_table(data, content.name).numbers
    return values_sha256(values, content.decimals) == content.sha256

"""Where data sets are looked for, what is found there with its content checked, and downloads that
happen once, continue where they were cut off, and are kept only when their content is right."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from advbayes.checks import InputError, extra
from advbayes.datasets.dataset import Provenance
from advbayes.datasets.errors import DataError, DataMissingError, DownloadError
from advbayes.datasets.formats import REFETCH, read_gzip, read_plain, read_tar_gzip, values_sha256
from advbayes.datasets.sources import Content, Source
from advbayes.datasets.tables import parse_table
from advbayes.store import Lock, LockedError

Downloading = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if known
_CHUNK = 1 << 16
_ATTEMPTS = 5
_TIMEOUT = 30.0  # seconds without a byte
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_PASSING = (408, 425, 429)  # besides 5xx: answers that may be different next time

# HTTP alone: a redirection to ftp:, file: or data: meets nobody who would open it.
_OPENER = urllib.request.OpenerDirector()
for _handler in (
    urllib.request.ProxyHandler(),
    urllib.request.HTTPHandler(),
    urllib.request.HTTPSHandler(),
    urllib.request.HTTPRedirectHandler(),
    urllib.request.HTTPDefaultErrorHandler(),
    urllib.request.HTTPErrorProcessor(),
    urllib.request.UnknownHandler(),
):
    _OPENER.add_handler(_handler)


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
    raise DataError(where[file], wanted, got, f"{REFETCH} {source.hint}".strip())


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
    packed = [file for file in source.remotes if absent[0] in source.inside(file)]
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


def fetch_source(
    source: Source,
    folder: Path,  # the root; files go to its sub-folder for the set
    *,
    mirror: str | None = None,
    progress: Downloading | None = None,
    deadline: float = 3600.0,  # seconds for one file in all
) -> None:
    """Fetch what is missing of a set, from its own addresses or from `mirror`/<folder>/<file>."""
    if mirror is not None and not mirror.startswith(("https://", "http://")):
        raise InputError(f"mirror must be an http:// or https:// address, got {mirror!r}")
    home = folder / source.folders[0]
    try:
        home.mkdir(parents=True, exist_ok=True)
        with Lock(home, wait=deadline):  # others wait, and find the file there
            for file in source.remotes:
                _fetch(source, file, home, mirror, progress, deadline)
    except LockedError as error:
        remedy = "Wait for it, or set ADVBAYES_CACHE to another folder."
        raise DownloadError(error.file, error.wanted, error.got, remedy) from None
    except OSError as error:  # DownloadError is none: these are the disk's
        free = shutil.disk_usage(next(p for p in (home, *home.parents) if p.exists())).free
        wanted, got = f"to write up to {source.limit} bytes", f"{error} ({free} bytes free)"
        raise DownloadError(home, wanted, got, "Make room or set ADVBAYES_CACHE.") from None


def _fetch(
    source: Source,
    wanted: str,
    home: Path,
    mirror: str | None,
    progress: Downloading | None,
    deadline: float,
) -> None:
    """A file from the first of its addresses that has it."""
    candidates = [(wanted, url) for url in source.remotes[wanted]]
    if mirror is not None:  # which may have the plain file, where there is one content
        inside = source.inside(wanted)
        names = dict.fromkeys((wanted, *(inside if len(inside) == 1 else ())))
        candidates = [(file, f"{mirror.rstrip('/')}/{source.folders[0]}/{file}") for file in names]
    if any((home / file).is_file() for file, _ in candidates):
        return
    faults = []
    for file, url in candidates:
        try:
            end = time.monotonic() + deadline
            _Download(source, home / file, url, progress, end).run()
            break
        except DataError as error:
            faults.append(str(error))
    else:
        remedy = (
            "Try again (it continues where it stopped; in Python, mirror= is another address). Or "
            f"put {wanted} into {home} yourself (from {source.homepage}). {source.hint}"
        )
        raise DownloadError(
            f"data set {source.name!r}",
            f"{wanted} from one of its addresses",
            "; ".join(faults),
            remedy.strip(),
        )
    for file, _ in candidates:
        (home / f"{file}.part").unlink(missing_ok=True)


@dataclass(frozen=True)
class _Download:
    """One file from one address; what has come is in a `.part` file, and only the rest is asked for
    (HTTP Range)."""

    source: Source
    path: Path
    url: str
    progress: Downloading | None
    end: float  # the deadline, on the monotonic clock

    @property
    def part(self) -> Path:
        return self.path.with_name(f"{self.path.name}.part")

    def run(self) -> None:
        resumed = self._size() > 0
        self._complete()
        try:
            names = self.source.inside(self.path.name)
            contents = read_file(self.source, self.part, names, kept_as=self.path.name)
            check_contents(self.source, contents, dict.fromkeys(contents, self.url), verify=True)
        except DataError as error:
            self.part.unlink(missing_ok=True)
            if not resumed:
                got = f"what is not the data set: {error}"
                raise DownloadError(self.url, "the file", got) from None
            # the part may have been of another version of the file: once more from the start
            self.run()
            return
        os.replace(self.part, self.path)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _complete(self) -> None:
        fault = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(min(0.1 * 4.0 ** (attempt - 1), 5.0))
            try:
                if self._transfer():
                    return
                fault = f"the connection ended after {self._size()} bytes"
            except urllib.error.HTTPError as error:
                fault = f"the server says {error.code} {error.reason}"
                error.close()
                if error.code == 416:  # what is here is no beginning of what is there
                    self.part.unlink(missing_ok=True)
                elif error.code < 500 and error.code not in _PASSING:
                    break
            except urllib.error.URLError as error:
                fault = str(error.reason)
                if isinstance(error.reason, socket.gaierror) or "unknown url type" in fault:
                    break
            except http.client.HTTPException as error:
                fault = f"{type(error).__name__} after {self._size()} bytes"
            except OSError as error:
                if error.filename is not None or error.errno in _DISK:
                    raise
                fault = f"{type(error).__name__} after {self._size()} bytes"
        raise DownloadError(self.url, "the file", fault)

    def _transfer(self) -> bool:
        """Ask for what is missing and append it; whether the file is then complete."""
        have = self._size()
        headers = {"User-Agent": "advbayes", "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        request = urllib.request.Request(self.url, headers=headers)
        timeout = min(_TIMEOUT, max(0.1, self.end - time.monotonic()))
        with _OPENER.open(request, timeout=timeout) as response:
            start = _range_start(response.headers.get("Content-Range", ""))
            if response.status != 206 or start != have:
                have = 0  # the server sends the whole file
            length = response.headers.get("Content-Length", "")
            total = have + int(length) if length.isdecimal() and len(length) < 20 else None
            self._bound(total or 0)
            with self.part.open("ab" if have else "wb") as stream:
                # as it comes: a trickle must not outlast the deadline
                while piece := response.read1(_CHUNK):
                    have += len(piece)
                    self._bound(have)
                    stream.write(piece)
                    if self.progress is not None:
                        self.progress(self.path.name, have, total)
                stream.flush()
                os.fsync(stream.fileno())
        return total is None or have == total

    def _bound(self, num: int) -> None:
        if num > self.source.limit:
            self.part.unlink(missing_ok=True)
            raise DownloadError(self.url, f"at most {self.source.limit} bytes", f"{num} or more")
        if time.monotonic() > self.end:
            raise DownloadError(self.url, "the file in time", f"{num} bytes by the deadline")


def _range_start(content_range: str) -> int | None:
    start = content_range.removeprefix("bytes ").split("-")[0]
    return int(start) if start.isdecimal() and len(start) < 20 else None

"""Downloads that happen once, continue where they were cut off, and are kept only when their content is right."""

from __future__ import annotations

import errno
import http.client
import os
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from advbayes.datasets.errors import DataError, DownloadError, problem
from advbayes.datasets.places import INSTALL, check_contents, read_file
from advbayes.datasets.sources import Remote, Source

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if known
_CHUNK = 1 << 16
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_PASSING = (408, 425, 429)  # besides 5xx: answers that may be different next time


def fetch_source(
    source: Source,
    folder: Path,  # the root; files go to its sub-folder for the set
    *,
    mirror: str | None = None,
    progress: Progress | None = None,
    timeout: float = 30.0,
) -> None:
    """Fetch what is missing of a set, from its own addresses or from `mirror`/<folder>/<file>."""
    if mirror is not None and not mirror.startswith(("https://", "http://")):
        raise ValueError(f"mirror must be an http:// or https:// address, got {mirror!r}")
    home = folder / source.folders[0]
    for remote in source.remotes:
        candidates = _candidates(source, remote, mirror)
        if any((home / file).is_file() for file, _ in candidates):
            continue
        faults: list[DataError] = []
        for file, url in candidates:
            try:
                _fetch(source, remote, home / file, url, progress, timeout)
                break
            except DataError as error:
                faults.append(error)
        else:
            reasons = " ".join(str(fault) for fault in faults)
            remedy = f"Or put {remote.file} into {home} yourself (from {source.homepage}). {source.hint}".strip()
            raise DownloadError(f"{reasons} {remedy}")


def _candidates(source: Source, remote: Remote, mirror: str | None) -> list[tuple[str, str]]:
    """File names and addresses to try: a mirror may have a packed file or, where it is one content, the plain one."""
    if mirror is None:
        return [(remote.file, url) for url in remote.urls]
    files = [remote.file, *(name for name in remote.contents if len(remote.contents) == 1 and name != remote.file)]
    return [(file, f"{mirror.rstrip('/')}/{source.folders[0]}/{file}") for file in files]


def _fetch(source: Source, remote: Remote, path: Path, url: str, progress: Progress | None, timeout: float) -> None:
    try:
        import pooch
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"downloading {source.name} needs pooch: {INSTALL}") from None

    def check(part: Path) -> None:
        contents = read_file(source, part, remote.contents, kept_as=path.name)
        check_contents(source, contents, dict.fromkeys(contents, url), verify=True)

    download = Resuming(path.with_name(f"{path.name}.part"), source.limit, check, progress, timeout)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(path.with_name(f".{path.name}.lock")), _quiet(pooch):
            # A file that another process has fetched meanwhile is found there and left alone.
            registry = pooch.create(path.parent, base_url="", registry={path.name: None}, urls={path.name: url})
            registry.fetch(path.name, downloader=download)
    except OSError as error:  # DownloadError is none: these are the disk's
        free = shutil.disk_usage(next(p for p in (path.parent, *path.parents) if p.exists())).free
        wanted = f"to write up to {source.limit} bytes"
        raise DownloadError(problem(path, wanted, f"{error} ({free} bytes free)", "Make room or set ADVBAYES_CACHE.")) from None


@dataclass(frozen=True)
class Resuming:
    """A downloader for pooch that keeps what has come in a `.part` file and asks only for the rest (HTTP Range)."""

    part: Path
    limit: int  # bytes; more is refused
    check: Callable[[Path], None]  # raises DataError when the content is wrong
    progress: Progress | None = None
    timeout: float = 30.0
    attempts: int = 5

    def __call__(self, url: str, output_file: str | Path, _pooch: object = None) -> None:
        resumed = self._size() > 0
        self._complete(url)
        try:
            self.check(self.part)
        except DataError as error:
            self.part.unlink(missing_ok=True)
            if not resumed:
                raise DownloadError(f"what came from {url} is not the data set: {error}") from None
            # The part may have been of another version of the file: once more from the start.
            self(url, output_file)
            return
        os.replace(self.part, output_file)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _complete(self, url: str) -> None:
        fault = ""
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(min(0.1 * 4.0 ** (attempt - 1), 5.0))
            try:
                if self._transfer(url):
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
                if isinstance(error.reason, socket.gaierror):
                    break
            except (http.client.HTTPException, OSError) as error:
                if isinstance(error, OSError) and (error.filename is not None or error.errno in _DISK):
                    raise
                fault = f"{type(error).__name__} after {self._size()} bytes"
        remedy = "Try again (it continues where it stopped), or give another mirror= address."
        raise DownloadError(problem(url, "the file", fault, remedy))

    def _transfer(self, url: str) -> bool:
        """Ask for what is missing and append it; whether the file is then complete."""
        have = self._size()
        headers = {"User-Agent": "advbayes", "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            if response.status != 206 or _range_start(response.headers.get("Content-Range", "")) != have:
                have = 0  # the server sends the whole file
            length = response.headers.get("Content-Length", "")
            total = have + int(length) if length.isdecimal() and len(length) < 20 else None
            self._bound(url, total or 0)
            with self.part.open("ab" if have else "wb") as stream:
                while piece := response.read(_CHUNK):
                    have += len(piece)
                    self._bound(url, have)
                    stream.write(piece)
                    if self.progress is not None:
                        self.progress(self.part.name.removesuffix(".part"), have, total)
                stream.flush()
                os.fsync(stream.fileno())
        return total is None or have == total

    def _bound(self, url: str, num: int) -> None:
        if num > self.limit:
            self.part.unlink(missing_ok=True)
            raise DownloadError(problem(url, f"at most {self.limit} bytes", f"{num} or more", "Give another mirror= address."))


def _range_start(content_range: str) -> int | None:
    start = content_range.removeprefix("bytes ").split("-")[0]
    return int(start) if start.isdecimal() and len(start) < 20 else None


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """One process at a time; the others wait. Where the system has no such locks, they do not."""
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    with lock.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def _quiet(pooch: object) -> Iterator[None]:
    """Pooch writes what it does to the terminal: a library does not."""
    logger = pooch.get_logger()  # type: ignore[attr-defined]
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)

"""Downloads that happen once, continue where they were cut off, and are kept only when their
content is right."""

from __future__ import annotations

import errno
import http.client
import os
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from advbayes.checks import InputError
from advbayes.datasets.errors import DataError, DownloadError
from advbayes.datasets.places import check_contents, read_file
from advbayes.datasets.sources import Remote, Source
from advbayes.store import Lock, LockedError

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if known
_CHUNK = 1 << 16
_ATTEMPTS = 5
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


def fetch_source(
    source: Source,
    folder: Path,  # the root; files go to its sub-folder for the set
    *,
    mirror: str | None = None,
    progress: Progress | None = None,
    timeout: float = 30.0,  # seconds without a byte
    deadline: float = 3600.0,  # seconds for one file in all
) -> None:
    """Fetch what is missing of a set, from its own addresses or from `mirror`/<folder>/<file>."""
    if mirror is not None and not mirror.startswith(("https://", "http://")):
        raise InputError(f"mirror must be an http:// or https:// address, got {mirror!r}")
    home = folder / source.folders[0]
    try:
        home.mkdir(parents=True, exist_ok=True)
        with Lock(home, wait=deadline):  # others wait, and find the file there
            for remote in source.remotes:
                _fetch(source, remote, home, mirror, _Limits(progress, timeout, deadline))
    except LockedError as error:
        remedy = "Wait for it, or set ADVBAYES_CACHE to another folder."
        raise DownloadError(error.file, error.wanted, error.got, remedy) from None
    except OSError as error:  # DownloadError is none: these are the disk's
        free = shutil.disk_usage(next(p for p in (home, *home.parents) if p.exists())).free
        wanted, got = f"to write up to {source.limit} bytes", f"{error} ({free} bytes free)"
        raise DownloadError(home, wanted, got, "Make room or set ADVBAYES_CACHE.") from None


@dataclass(frozen=True)
class _Limits:
    progress: Progress | None
    timeout: float
    deadline: float


def _fetch(source: Source, remote: Remote, home: Path, mirror: str | None, limits: _Limits) -> None:
    """A file from the first of its addresses that has it."""
    candidates = [(remote.file, url) for url in remote.urls]
    if mirror is not None:  # which may have the plain file, where there is one content
        plain = remote.contents if len(remote.contents) == 1 else ()
        names = dict.fromkeys((remote.file, *plain))
        candidates = [(file, f"{mirror.rstrip('/')}/{source.folders[0]}/{file}") for file in names]
    if any((home / file).is_file() for file, _ in candidates):
        return
    faults = []
    for file, url in candidates:
        try:
            _Download(source, remote, home / file, url, limits).run()
            break
        except DataError as error:
            faults.append(str(error))
    else:
        remedy = (
            "Try again (it continues where it stopped; in Python, mirror= is another address). Or "
            f"put {remote.file} into {home} yourself (from {source.homepage}). {source.hint}"
        )
        wanted = f"{remote.file} from one of its addresses"
        raise DownloadError(f"data set {source.name!r}", wanted, "; ".join(faults), remedy.strip())
    for file, _ in candidates:
        (home / f"{file}.part").unlink(missing_ok=True)


class _Download:
    """One file from one address; what has come is in a `.part` file, and only the rest is asked for
    (HTTP Range)."""

    def __init__(
        self, source: Source, remote: Remote, path: Path, url: str, limits: _Limits
    ) -> None:
        self.source, self.remote, self.path, self.url = source, remote, path, url
        self.progress, self.timeout = limits.progress, limits.timeout
        self.end = time.monotonic() + limits.deadline
        self.part = path.with_name(f"{path.name}.part")

    def run(self) -> None:
        resumed = self._size() > 0
        self._complete()
        try:
            names = self.remote.contents
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
        timeout = min(self.timeout, max(0.1, self.end - time.monotonic()))
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

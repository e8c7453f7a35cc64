"""Small stand-ins for the built-in data sets, and a server on the loopback address that can
misbehave."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from advbayes.datasets.sources import SOURCES, Content, Source


def idx(array: np.ndarray) -> bytes:
    """The IDX bytes of an unsigned byte array."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def tar_gz(members: dict[str, bytes]) -> bytes:
    """A .tar.gz with these members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def with_contents(source: Source, contents: dict[str, bytes]) -> Source:
    """The same set with other published contents, so that a test needs no real files."""
    rows = tuple(
        Content(name, len(data), hashlib.sha256(data).hexdigest())
        for name, data in ((content.name, contents[content.name]) for content in source.contents)
    )
    return replace(source, contents=rows)


def small_mnist() -> dict[str, bytes]:
    """20 training and 10 test images in MNIST's layout."""
    rng = np.random.default_rng(0)
    parts = {}
    for prefix, num in (("train", 20), ("t10k", 10)):
        parts[f"{prefix}-images-idx3-ubyte"] = idx(rng.integers(0, 256, (num, 28, 28), np.uint8))
        parts[f"{prefix}-labels-idx1-ubyte"] = idx(np.arange(num, dtype=np.uint8) % 10)
    return parts


def small_cifar(seed: int = 0) -> dict[str, bytes]:
    """Six batches of 10 images, each class once."""
    rng = np.random.default_rng(seed)
    batches = {}
    for content in SOURCES["cifar10"].contents:
        records = rng.integers(0, 256, (10, 3073), np.uint8)
        records[:, 0] = rng.permutation(10)
        batches[content.name] = records.tobytes()
    return batches


def small_wine(rows: int = 40) -> bytes:
    """A table in the layout of winequality-red.csv."""
    rng = np.random.default_rng(1)
    names = [f"feature {index}" for index in range(11)] + ["quality"]
    lines = [";".join(f'"{name}"' for name in names)]
    lines += [
        ";".join(f"{value:.3f}" for value in rng.normal(5, 2, 11)) + f";{rng.integers(3, 9)}"
        for _ in range(rows)
    ]
    return ("\n".join(lines) + "\n").encode()


def write_mnist(folder: Path, contents: dict[str, bytes]) -> None:
    """The four files, gzipped, as MNIST is distributed."""
    folder.mkdir(parents=True)
    for name, data in contents.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(data, mtime=0))


@dataclass
class Server:
    """What the loopback server has, how it behaves, and what it was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    # bytes of the body after which each connection is dropped
    cut_after: list[int] = field(default_factory=list)
    ranges: bool = True
    whole: bool = False  # a part is answered by the whole file, said to be a part
    status: int | None = None  # answer everything with this
    redirect: str | None = None  # where the first request is sent on to
    pause: float = 0.0  # seconds after every 64 bytes
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path, Range header


@contextmanager
def serving() -> Iterator[Server]:
    """A web server on 127.0.0.1 for the time of a test."""
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append((self.path, wanted))
            if state.redirect is not None:
                place, state.redirect = state.redirect, None
                self.send_response(302)
                self.send_header("Location", place)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = state.files.get(self.path)
            if state.status is not None or data is None:
                self.send_error(state.status or 404)
                return
            start = (
                int(wanted.removeprefix("bytes=").split("-")[0]) if wanted and state.ranges else 0
            )
            if start >= len(data) > 0:
                self.send_error(416)
                return
            is_part = start > 0
            start = 0 if state.whole else start
            body = data[start:]
            self.send_response(206 if is_part else 200)
            self.send_header("Content-Length", str(len(body)))
            if is_part:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            cut = state.cut_after.pop(0) if state.cut_after else len(body)
            with suppress(ConnectionError):  # the client may have hung up: some tests make it
                step = 64 if state.pause else max(1, cut)
                for index in range(0, cut, step):
                    self.wfile.write(body[index : min(cut, index + step)])
                    threading.Event().wait(state.pause)  # time.sleep is what tests make instant

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

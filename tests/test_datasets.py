"""Data sets: what loads, what is refused, what is downloaded; hostile files get a typed error and
nothing else."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import random
import signal
import struct
import sys
import tarfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advbayes.datasets import (
    SOURCES,
    DataError,
    DataMissingError,
    Dataset,
    DownloadError,
    Standardize,
    find_dataset,
    from_csv,
    from_npz,
    load_dataset,
    names,
    split_rows,
)
from advbayes.datasets.fetching import fetch_source
from advbayes.datasets.formats import (
    parse_cifar,
    parse_idx,
    read_gzip,
    read_npz,
    read_plain,
    read_tar_gzip,
)
from advbayes.datasets.tables import parse_table
from tests import faults
from tests.data_fixtures import (
    Server,
    idx,
    serving,
    small_cifar,
    small_mnist,
    small_wine,
    tar_gz,
    with_contents,
    write_mnist,
)

REAL = os.environ.get("ADVBAYES_DATA")
needs_real = pytest.mark.skipif(
    not REAL, reason="ADVBAYES_DATA does not name a folder with the data sets"
)


@pytest.fixture(autouse=True)
def _no_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the user's folders, or goes out through a proxy."""
    for name in ("ADVBAYES_DATA", "ADVBAYES_MIRROR", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ADVBAYES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("advbayes.datasets.fetching.time.sleep", lambda _: None)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as state:
        yield state


@pytest.fixture
def mnist(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    contents = small_mnist()
    monkeypatch.setitem(SOURCES, "mnist", with_contents(SOURCES["mnist"], contents))
    return contents


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    contents = small_cifar()
    monkeypatch.setitem(SOURCES, "cifar10", with_contents(SOURCES["cifar10"], contents))
    return contents


@pytest.fixture
def wine(monkeypatch: pytest.MonkeyPatch) -> bytes:
    data = small_wine()
    monkeypatch.setitem(
        SOURCES, "wine", with_contents(SOURCES["wine"], {"winequality-red.csv": data})
    )
    return data


# --- what loads ---------------------------------------------------------------------------------


def test_mnist_from_gzip_and_from_plain_files(mnist: dict[str, bytes], tmp_path: Path) -> None:
    write_mnist(tmp_path / "gz" / "mnist", mnist)
    (tmp_path / "plain" / "MNIST" / "raw").mkdir(parents=True)
    for name, data in mnist.items():
        (tmp_path / "plain" / "MNIST" / "raw" / name).write_bytes(data)
    first, second = (load_dataset("mnist", tmp_path / kind) for kind in ("gz", "plain"))
    pixels = np.frombuffer(mnist["train-images-idx3-ubyte"], np.uint8, offset=16).reshape(
        20, 1, 28, 28
    )
    assert torch.equal(first.x_train, torch.tensor(pixels / 255, dtype=torch.float32))
    assert torch.equal(first.x_train, second.x_train)
    assert first.y_test.tolist() == list(range(10))
    assert (first.box, first.scaling, first.class_names[3]) == ((0.0, 1.0), None, "3")
    assert first.provenance.verified
    assert first.provenance.sha256 == second.provenance.sha256
    assert find_dataset("mnist", tmp_path / "gz") == tmp_path / "gz" / "mnist"


def test_cifar_from_archive_and_from_batches(cifar: dict[str, bytes], tmp_path: Path) -> None:
    archive = tmp_path / "a" / "cifar10" / "cifar-10-binary.tar.gz"
    archive.parent.mkdir(parents=True)
    members = {f"cifar-10-batches-bin/{name}": data for name, data in cifar.items()}
    archive.write_bytes(tar_gz({"cifar-10-batches-bin/readme.html": b"hello", **members}))
    (tmp_path / "b" / "cifar-10-batches-bin").mkdir(parents=True)
    for name, data in cifar.items():
        (tmp_path / "b" / "cifar-10-batches-bin" / name).write_bytes(data)
    first, second = (load_dataset("cifar10", tmp_path / kind) for kind in "ab")
    assert first.x_train.shape == (50, 3, 32, 32)
    assert torch.equal(first.x_train, second.x_train)
    assert first.provenance.verified
    record = np.frombuffer(cifar["data_batch_2.bin"], np.uint8)[:3073]
    assert int(first.y_train[10]) == record[0]
    assert float(first.x_train[10, 2, 31, 31]) == pytest.approx(record[-1] / 255)


def test_a_complete_other_copy_of_cifar_is_accepted_and_marked(
    cifar: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    other = small_cifar(seed=1)
    for name, data in other.items():
        (folder / name).write_bytes(data)
    loaded = load_dataset("cifar10", tmp_path)
    assert not loaded.provenance.verified
    assert "unverified" in loaded.provenance.note
    with pytest.raises(DataError, match=r"data_batch_1.bin.*published"):
        load_dataset("cifar10", tmp_path, verify=True)
    # One published batch among the others: then the rest was altered.
    (folder / "data_batch_3.bin").write_bytes(cifar["data_batch_3.bin"])
    with pytest.raises(DataError, match=r"data_batch_1\.bin"):
        load_dataset("cifar10", tmp_path)


def test_cifar_with_a_changed_label_is_refused_in_any_copy(
    cifar: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "cifar10").mkdir()
    for name, data in small_cifar(seed=1).items():
        changed = bytes([(data[0] + 1) % 10]) + data[1:] if name == "test_batch.bin" else data
        (tmp_path / "cifar10" / name).write_bytes(changed)
    with pytest.raises(DataError, match="as many images of each class"):
        load_dataset("cifar10", tmp_path)


def test_wine_splits_by_seed_and_scales_by_the_training_rows(wine: bytes, tmp_path: Path) -> None:
    (tmp_path / "wine-quality").mkdir()
    (tmp_path / "wine-quality" / "winequality-red.csv").write_bytes(wine)
    first, again, other = (load_dataset("wine", tmp_path, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.x_train, again.x_train)
    assert not torch.equal(first.x_train, other.x_train)
    assert (len(first.x_train), len(first.x_test), first.target_names) == (32, 8, ("quality",))
    assert first.scaling is not None
    assert torch.allclose(first.scaling.mean, first.x_train.mean(0))
    assert torch.allclose(
        first.scaling.transform(first.x_train).std(0, correction=0), torch.ones(11), atol=1e-5
    )
    everything = torch.cat([first.x_train, first.x_test])
    assert not torch.allclose(first.scaling.mean, everything.mean(0), rtol=1e-6)
    assert len(load_dataset("wine", tmp_path, test_fraction=0.5).x_test) == 20


def test_energy_is_known_by_its_numbers_however_they_are_spelt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dataclasses import replace

    from advbayes.datasets.formats import values_sha256

    header = "X1,X2,X3,X4,X5,X6,X7,X8,Y1,Y2"
    values = np.round(np.random.default_rng(0).uniform(0, 40, (30, 10)), 2)
    content = replace(SOURCES["energy"].contents[0], sha256=values_sha256(values, 2))
    monkeypatch.setitem(SOURCES, "energy", replace(SOURCES["energy"], contents=(content,)))
    file = tmp_path / "energy-efficiency" / "ENB2012_data.csv"
    file.parent.mkdir()
    for form in ("{:.2f}", "{:g}", "{!r}"):
        rows = [",".join(form.format(float(value)) for value in row) for row in values]
        file.write_text("\n".join([header, *rows]))
        loaded = load_dataset("energy", tmp_path)
        assert loaded.provenance.verified
        assert (loaded.y_train.shape, loaded.target_names) == ((24,), ("Y1",))
    both = load_dataset("energy", tmp_path, target="both")
    assert both.y_train.shape == (24, 2)
    assert both.scaling is not None
    assert both.scaling.target_std is not None
    assert both.scaling.target_std.shape == (2,)
    assert torch.equal(load_dataset("energy", tmp_path, target="Y2").y_train, both.y_train[:, 1])
    file.write_text(file.read_text().replace(rows[3], ",".join(["1.0"] * 10)))
    with pytest.raises(DataError, match=r"other numbers.*spreadsheet"):
        load_dataset("energy", tmp_path)
    assert not load_dataset("energy", tmp_path, verify=False).provenance.verified


def test_embedded_sets() -> None:
    digits, diabetes = load_dataset("digits"), load_dataset("diabetes", seed=3)
    assert digits.x_train.shape[1:] == (1, 8, 8)
    assert digits.x_train.max() == 1
    assert digits.box == (0.0, 1.0)
    share = digits.y_test.bincount() / (digits.y_test.bincount() + digits.y_train.bincount())
    assert torch.allclose(share, torch.full((10,), 0.2), atol=0.01)
    assert diabetes.feature_names[:3] == ("age", "sex", "bmi")
    assert diabetes.x_train[:, 0].max() > 60  # raw years, not scikit-learn's scaled ones
    assert diabetes.provenance.verified


def test_embedded_set_with_other_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(load_dataset.__globals__["_EMBEDDED"], "digits", "0" * 64)
    with pytest.raises(DataError, match="Reinstall scikit-learn"):
        load_dataset("digits")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "mnits"}, "did you mean 'mnist'"),
        ({"name": "mnist", "test_fraction": 0.1}, "official test set"),
        ({"name": "wine", "target": "Y1"}, "left out otherwise"),
        ({"name": "energy", "target": "Y3"}, "'Y1', 'Y2' or 'both'"),
        ({"name": "diabetes", "test_fraction": 1.0}, "test_fraction"),
        ({"name": "mnist", "mirror": "file:///etc"}, "http:// or https://"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_dataset(**arguments)  # type: ignore[arg-type]


def test_the_given_root_is_the_only_place_and_the_environment_comes_before_the_cache(
    wine: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("data", "cache"):
        (tmp_path / place / "wine-quality").mkdir(parents=True)
        (tmp_path / place / "wine-quality" / "winequality-red.csv").write_bytes(wine)
    assert load_dataset("wine", download=False).provenance.source.startswith(
        str(tmp_path / "cache")
    )
    monkeypatch.setenv("ADVBAYES_DATA", str(tmp_path / "data"))
    assert load_dataset("wine", download=False).provenance.source.startswith(str(tmp_path / "data"))
    with pytest.raises(DataMissingError, match="elsewhere"):
        load_dataset("wine", tmp_path / "elsewhere")
    assert find_dataset("wine") == tmp_path / "data" / "wine-quality"


def test_extras_are_named_when_absent(monkeypatch: pytest.MonkeyPatch, wine: bytes) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "pooch", None)
    # where it is set, nobody needs to find the system's folder
    monkeypatch.delenv("ADVBAYES_CACHE")
    for name in ("digits", "wine"):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'advbayes\[data\]'"):
            load_dataset(name)


# --- truncated, altered, missing ----------------------------------------------------------------


def test_missing_file_says_which_and_what_to_do(mnist: dict[str, bytes], tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", mnist)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"t10k-labels-idx1-ubyte.gz.*1 of 4 missing.*download=True"
    ):
        load_dataset("mnist", tmp_path)


def test_every_truncation_and_alteration_of_a_gzip_file_is_refused(
    mnist: dict[str, bytes], tmp_path: Path
) -> None:
    write_mnist(tmp_path / "mnist", mnist)
    file = tmp_path / "mnist" / "train-labels-idx1-ubyte.gz"
    packed = file.read_bytes()
    for cut in range(len(packed)):
        file.write_bytes(packed[:cut])
        with pytest.raises(DataError, match="train-labels"):
            load_dataset("mnist", tmp_path)
    content = mnist["train-labels-idx1-ubyte"]
    for position in range(len(content)):  # repacked, so that gzip's own checksum is right
        altered = bytearray(content)
        altered[position] ^= 1
        file.write_bytes(gzip.compress(bytes(altered)))
        with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.*published.*SHA-256"):
            load_dataset("mnist", tmp_path)


def test_an_altered_table_is_refused(wine: bytes, tmp_path: Path) -> None:
    (tmp_path / "wine-quality").mkdir()
    file = tmp_path / "wine-quality" / "winequality-red.csv"
    file.write_bytes(wine.replace(b"5", b"6", 1))
    with pytest.raises(DataError, match=r"winequality-red.csv.*fetch it again"):
        load_dataset("wine", tmp_path)
    file.write_bytes(wine[:-1])
    with pytest.raises(DataError, match=f"exactly {len(wine)} bytes, got {len(wine) - 1} bytes"):
        load_dataset("wine", tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(DataMissingError):
        load_dataset("wine", tmp_path)


# --- hostile files ------------------------------------------------------------------------------


def _zip(members: dict[str, bytes], *, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def _npy(
    descr: str, shape: str, body: bytes, *, version: int = 1, length: int | None = None
) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    width = "<H" if version == 1 else "<I"
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + struct.pack(width, length or len(header))
        + header
        + body
    )


def _lying_zip() -> bytes:
    """A directory that says 128 bytes where the member unpacks to 50 million."""
    data = bytearray(_zip({"x.npy": _npy("'<f8'", "(6250000,)", bytes(50_000_000))}))
    directory = data.rfind(b"PK\1\2")
    data[directory + 24 : directory + 28] = struct.pack("<I", 128)
    return bytes(data)


def _crowded_zip() -> bytes:
    return _zip({f"{index}.npy": b"" for index in range(5_000)})


def _tar_bomb_header() -> bytes:
    """A pax record that says it is 7 GiB long: the standard reader would take it into memory."""
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 7 << 30
    return gzip.compress(info.tobuf(tarfile.USTAR_FORMAT) + bytes(60_000_000))


_MEMBERS = {"data_batch_1.bin": 3073}
_HOSTILE: dict[str, tuple[Callable[[], bytes], Callable[[Path], object]]] = {
    "gzip bomb": (lambda: gzip.compress(bytes(100_000_000)), lambda path: read_gzip(path, 10_008)),
    "gzip bomb in a tar's place": (
        lambda: gzip.compress(b"\1" * 100_000_000),
        lambda path: read_tar_gzip(path, _MEMBERS),
    ),
    "many empty gzip members": (
        lambda: gzip.compress(b"") * 100_000,
        lambda path: read_gzip(path, 10_008),
    ),
    "tar record of 7 GiB": (_tar_bomb_header, lambda path: read_tar_gzip(path, _MEMBERS)),
    "tar member too large": (
        lambda: tar_gz({"data_batch_1.bin": bytes(60_000_000)}),
        lambda path: read_tar_gzip(path, _MEMBERS),
    ),
    "tar with a huge other member": (
        lambda: tar_gz({"other": bytes(60_000_000), "data_batch_1.bin": bytes(3073)}),
        lambda path: read_tar_gzip(path, _MEMBERS),
    ),
    "tar member twice": (
        lambda: gzip.compress(
            gzip.decompress(tar_gz({"data_batch_1.bin": bytes(3073)}))[:4096]
            + gzip.decompress(
                tar_gz({"a/data_batch_1.bin": bytes(3073), "data_batch_2.bin": bytes(3073)})
            )
        ),
        lambda path: read_tar_gzip(path, {"data_batch_1.bin": 3073, "data_batch_2.bin": 3073}),
    ),
    "idx header of 2**96 bytes": (
        lambda: bytes([0, 0, 8, 3]) + b"\xff" * 12 + bytes(100),
        lambda path: parse_idx(path.read_bytes(), "idx"),
    ),
    "pickle in disguise": (
        lambda: b"cos\nsystem\n(S'touch owned'\ntR.",
        lambda path: from_npz(path),
    ),
    "npz with an object array": (
        lambda: _zip(
            {"x.npy": _npy("'|O'", "(1,)", b"cos\nsystem\n(S'touch owned'\ntR."), "y.npy": b""}
        ),
        lambda path: from_npz(path),
    ),
    "npz with code in its header": (
        lambda: _zip({"x.npy": _npy("__import__('os').system('touch owned')", "(1,)", b"")}),
        lambda path: from_npz(path),
    ),
    "npz with nested brackets": (
        lambda: _zip({"x.npy": _npy("[" * 3000, "(1,)", b"")}),
        lambda path: from_npz(path),
    ),
    "npz with names that are no characters": (
        lambda: _zip(
            {
                "x.npy": _npy("'<f8'", "(1,)", bytes(8)),
                "class_names.npy": _npy("'<U1'", "(1,)", b"\xff\xff\xff\x7f"),
            }
        ),
        lambda path: from_npz(path),
    ),
    "npz shape beyond its bytes": (
        lambda: _zip({"x.npy": _npy("'<f8'", "(999999999999, 999999)", bytes(80))}),
        lambda path: from_npz(path),
    ),
    "npz header of 4 GiB": (
        lambda: _zip({"x.npy": _npy("'<f8'", "(1,)", bytes(8), version=2, length=0xFFFFFFF0)}),
        lambda path: from_npz(path),
    ),
    "zip bomb": (
        lambda: _zip({"x.npy": _npy("'<f8'", "(12500000,)", bytes(100_000_000))}),
        lambda path: from_npz(path, max_bytes=50_000_000),
    ),
    "zip with a lying directory": (_lying_zip, lambda path: from_npz(path)),
    "zip with five thousand members": (_crowded_zip, lambda path: from_npz(path)),
    "zip packed with bzip2": (
        lambda: _zip({"x.npy": bytes(10_000_000)}, compression=zipfile.ZIP_BZIP2),
        lambda path: from_npz(path),
    ),
    "zip with a path": (
        lambda: _zip({"../../x.npy": _npy("'<f8'", "(1,)", bytes(8))}),
        lambda path: from_npz(path),
    ),
    "csv above the limit": (
        lambda: b"a,b\n" + b"1,2\n" * 1_000_000,
        lambda path: from_csv(path, "b", max_bytes=1000),
    ),
    "csv of one endless field": (
        lambda: b'a,b\n"' + b"1" * 10_000_000,
        lambda path: from_csv(path, "b"),
    ),
    "csv of zero bytes": (lambda: bytes(1_000_000), lambda path: from_csv(path, "b")),
    "csv row over many lines": (
        lambda: b"a,b\n" + b'"1\n","2\n",' * 500_000,
        lambda path: from_csv(path, "b"),
    ),
    "csv line of a million cells": (
        lambda: b"a,b\n" + b"12," * 1_000_000,
        lambda path: from_csv(path, "b"),
    ),
    "csv with 200,000 columns": (lambda: b"a," * 200_000 + b"\n", lambda path: from_csv(path, "b")),
    "csv with a million columns": (
        lambda: b",".join(b"%d" % index for index in range(1_000_000)) + b",a\n",
        lambda path: from_csv(path, "b"),
    ),
}


@pytest.mark.parametrize("case", _HOSTILE, ids=lambda case: case.replace(" ", "-"))
def test_hostile_file_gets_a_typed_error_within_memory(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tracemalloc

    make, read = _HOSTILE[case]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hostile"
    path.write_bytes(make())
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught:
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000_000, f"{peak} bytes"
    assert ". " in str(caught.value)  # the fault, then the remedy
    assert len(str(caught.value)) < 2000
    assert os.listdir(tmp_path) == ["hostile"]


def test_devices_and_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for path in (Path("/dev/zero"), tmp_path / "pipe.csv", tmp_path):
        for read in (lambda path: from_csv(path, "y"), from_npz, lambda path: read_plain(path, 10)):
            with pytest.raises(DataError, match="regular file"):
                read(path)
    with pytest.raises(DataMissingError):
        from_csv(tmp_path / "absent.csv", "y")
    with pytest.raises(DataError):
        from_csv("a\0b", "y")


def _mutations(seeds: list[bytes], num: int) -> Iterator[bytes]:
    """Bit flips, cuts, repeats, inserted extremes and splices of valid files."""
    rng = random.Random(0)
    for _ in range(num):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) + 1)
            kind = rng.randrange(6)
            if kind == 0 and data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del data[at : at + rng.randint(1, 64)]
            elif kind == 2:
                data[at:at] = data[at : at + rng.randint(1, 64)]
            elif kind == 3:
                data[at : at + 4] = rng.choice(
                    [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\0\0\0\x01"]
                )
            elif kind == 4:
                data[at:at] = rng.choice(
                    [
                        b"nan",
                        b"1e999",
                        b'"',
                        b"\n",
                        b",",
                        b";",
                        b"\xef\xbb\xbf",
                        b"PK\5\6",
                        b"\x1f\x8b",
                    ]
                )
            else:
                data = data[:at] + rng.choice(seeds)[at:]
        yield bytes(data)


def _saved(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _member(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _in_intact_zip(member: bytes) -> bytes:
    """Past the zip's checksums, to the array's own header and values."""
    return _zip({"x.npy": member, "y.npy": _member(np.arange(6))})


def _fuzz(parse: Callable[[], object]) -> bool:
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            parse()
    except DataError:
        return False
    return True


def test_fuzzed_files_get_typed_errors_only(tmp_path: Path) -> None:
    """7 loaders, 1,000 mutated files each: DataError or success, never another exception."""
    path = tmp_path / "file"
    rng = np.random.default_rng(0)
    batch = small_cifar()["test_batch.bin"]
    images = idx(rng.integers(0, 256, (3, 5, 5), np.uint8))
    table = b'"a";"b";"y"\n' + b"".join(
        b"%d.5;%d;%d\n" % (row, row * 7, row % 3) for row in range(12)
    )
    archives = [
        tar_gz({"x/one.bin": b"1" * 600, "two.bin": b"2" * 10}),
        tar_gz({"two.bin": b"2" * 10, "one.bin": b"1" * 600}),
    ]
    arrays = [
        _saved(x=rng.normal(size=(12, 3)), y=np.arange(12) % 3),
        _saved(
            x=rng.integers(0, 255, (12, 4, 4), np.uint8),
            y=np.arange(12) % 2,
            class_names=np.array(["a", "b"]),
        ),
        _saved(
            x_train=rng.normal(size=(4, 2)),
            y_train=rng.normal(size=(4, 1)),
            x_test=np.ones((2, 2)),
            y_test=np.ones(2),
        ),
    ]
    loaders: dict[str, tuple[list[bytes], Callable[[bytes], object]]] = {
        "idx": ([images, idx(np.arange(9, dtype=np.uint8))], lambda data: parse_idx(data, "f")),
        "cifar": ([batch], lambda data: parse_cifar(data, "f")),
        "csv": ([table, table.replace(b";", b",")], lambda _: from_csv(path, "y")),
        "npz": (arrays, lambda _: from_npz(path)),
        "npy": (
            [_member(x) for x in (rng.normal(size=(6, 3)), np.ones((6, 4, 4), np.uint8))],
            lambda _: from_npz(path),
        ),
        "gzip": (
            [gzip.compress(images), gzip.compress(b"")],
            lambda _: read_gzip(path, len(images)),
        ),
        "tar": (archives, lambda _: read_tar_gzip(path, {"one.bin": 600, "two.bin": 10})),
    }
    passed = dict.fromkeys(loaders, 0)
    for name, (seeds, parse) in loaders.items():
        wrap = _in_intact_zip if name == "npy" else bytes
        path.write_bytes(wrap(seeds[0]))
        parse(seeds[0])  # what is mutated is valid
        for data in _mutations(seeds, 1000):
            path.write_bytes(wrap(data))
            passed[name] += _fuzz(lambda parse=parse, data=data: parse(data))  # type: ignore[misc]
    # Were every file refused, nothing past the first check would have been fuzzed; were none, the
    # checks would be idle.
    assert 0 < passed["csv"] < 1000
    assert 0 < passed["npy"] < 1000
    assert passed["npz"] < 500
    assert passed["idx"] < 1000


@settings(max_examples=300, deadline=None, database=None)
@given(st.binary(max_size=400))
def test_any_bytes_get_typed_errors_only(data: bytes) -> None:
    for parse in (
        lambda: parse_idx(data, "f"),
        lambda: parse_idx(b"\0\0\x08" + data, "f"),
        lambda: parse_cifar(data, "f"),
        lambda: parse_table(data, "f"),
        lambda: parse_table(b"a,b\n" + data, "f", text=["a"]),
    ):
        _fuzz(parse)


@settings(max_examples=150, deadline=None, database=None)
@given(st.text(max_size=60), st.integers(0, 2**32), st.binary(max_size=64))
def test_any_npy_header_gets_typed_errors_only(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int, body: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "header.npz"
    for header in (text, f"'<f8', 'fortran_order': False, 'shape': ({size},), }}#{text}"):
        array = b"\x93NUMPY\1\0" + struct.pack("<H", len(header.encode())) + header.encode() + body
        path.write_bytes(_zip({"x.npy": array, "y.npy": _npy("'<f8'", f"({size},)", body)}))
        _fuzz(lambda: from_npz(path))


# --- a user's own files -------------------------------------------------------------------------


def _csv(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_delimiters_quotes_and_byte_order_mark(tmp_path: Path, delimiter: str) -> None:
    rows = [f'"x, one"{delimiter}"b;c"{delimiter}y'] + [
        delimiter.join((str(i), f"{i}.5", str(2 * i))) for i in range(10)
    ]
    loaded = from_csv(_csv(tmp_path, "\ufeff\r\n\r\n" + "\r\n".join(rows) + "\r\n\r\n"), "y")
    assert loaded.feature_names == ("x, one", "b;c")
    assert loaded.task == "regression"
    assert torch.equal(loaded.y_train, 2 * loaded.x_train[:, 0])
    assert loaded.scaling is not None
    assert loaded.scaling.target_mean is not None
    assert float(loaded.scaling.target_mean) == pytest.approx(float(loaded.y_train.mean()))


def test_csv_classes_are_text_or_asked_for(tmp_path: Path) -> None:
    path = _csv(tmp_path, "a,kind\n" + "1,10\n2,9\n" * 5)
    assert from_csv(path, "kind").task == "regression"
    numbered = from_csv(path, "kind", task="classification")
    assert numbered.class_names == ("9", "10")
    assert torch.equal(numbered.y_train, (numbered.x_train[:, 0] == 1).long())
    assert numbered.scaling is not None
    assert numbered.scaling.target_mean is None


def test_csv_several_targets_chosen_features_and_given_header(tmp_path: Path) -> None:
    path = _csv(tmp_path, "".join(f"{i},word,{2 * i},{3 * i}\n" for i in range(10)))
    loaded = from_csv(path, ["d", "c"], header=["a", "b", "c", "d"], features=["a"])
    assert loaded.feature_names == ("a",)
    assert torch.equal(loaded.y_train, loaded.x_train * torch.tensor([3.0, 2.0]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n3,x\n", r"row 2 below the header, column 'b', got 'x'.*Correct"),
        ("a;b;y\n1;1.002,5;3\n2;3,5;4\n3;4,5;4\n", "row 1 below.*, column 'b'.*between thousands"),
        ("a,b,y\n1,nan,3\n2,,4\n", "values in 'b', got none.*--drop b "),
        ("a,b,y\n1,1,3\n1,inf,4\n", "row 2 below the header, column 'b'"),
        ("a,b,y\n1,1,3\n1,1_0,4\n", "row 2 below the header, column 'b'"),
        (
            "a,b,y\n" + "".join(f"1,w{i},2\n" for i in range(51)),
            "at most 50 different words.*'b', got 51 such as 'w0'.*--drop b .*plain numbers",
        ),
        ("a,b,y\n1,1e39,3\n1,2,3\n", "float32"),
        ("a,b,y\n1,2,3\n1,2\n", "3 cells in line 3, got 2"),
        ("a,b,a\n1,2,3\n", "'a' for column 3, as for column 1"),
        ("a,b,\n1,2,3\n", "'' for column 3"),
        ("a,b,,\n1,2,,\n", "'' for column 3"),
        ("a,y\n1,2,\n3,4,5\n", "2 cells in line 3, got 3"),
        ("a,y,\n1,2,\n3,4,5\n", "2 cells in line 3, got 3"),
        ("1,2,3\n4,5,6\n", "names the columns"),
        ("a,b,y\n", "rows below the header"),
        ("", "empty file"),
        ("\n \n,,\n", "table|column|empty"),
        ("y\n1\n2\n", "besides the target"),
        ("a,target_\n1,2\n", "a column 'y'"),
        ("a,y\n1,2\n", "at least 2 rows"),
        ("a|b|y\n1|2|3\n", "divided by commas, semicolons or tabs"),
        ('a,y\n"1,234",2\n"2,345",3\n', "column 'a', got '1,234'.*nothing between thousands"),
    ],
)
def test_csv_faults_are_located(tmp_path: Path, text: str, words: str) -> None:
    target = "a" if text.startswith("a,b\n1,2\n3") else "y"
    with pytest.raises(DataError, match=words):
        from_csv(_csv(tmp_path, text), target)


@pytest.mark.parametrize("header", ["a,b,y", "a,b,y,"])
def test_a_delimiter_at_the_end_of_a_line_is_no_column(tmp_path: Path, header: str) -> None:
    loaded = from_csv(_csv(tmp_path, f"{header}\n" + "1,2,3,\n4,5,6, \n" * 5), "y")
    assert loaded.feature_names == ("a", "b")
    assert sorted(set(loaded.y_train.tolist())) == [3.0, 6.0]


@pytest.mark.parametrize(("magic", "said"), [(b"\x1f\x8b", "a gzip"), (b"PK\x03\x04", "workbook")])
def test_what_is_packed_is_named(tmp_path: Path, magic: bytes, said: str) -> None:
    path = tmp_path / "packed.csv"
    path.write_bytes(magic + bytes(50))
    with pytest.raises(DataError, match=f"{said}.*Unpack it"):
        from_csv(path, "y")


def test_csv_argument_faults(tmp_path: Path) -> None:
    path = _csv(tmp_path, "alpha,beta,y\n" + "1,2,a\n2,3,b\n" * 3)
    with pytest.raises(DataError, match="Did you mean 'alpha'"):
        from_csv(path, "alpa")
    for arguments in (
        {"target": []},
        {"target": "y", "features": ["y"]},
        {"target": "y", "task": "ranking"},
    ):
        with pytest.raises(ValueError):
            from_csv(path, **arguments)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="numbers in the target 'y'"):
        from_csv(path, "y", task="regression")
    path.write_bytes("ä,y\n1,2\n".encode("utf-16"))
    with pytest.raises(DataError, match="UTF-8"):
        from_csv(path, "y")
    path.write_bytes(b"x,y\n1,a\n2,\xf6\n3,b\n")
    with pytest.raises(DataError, match="byte 0xf6 in line 3"):
        from_csv(path, "y")


def test_npz_tables_images_and_splits(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    rng = np.random.default_rng(0)
    x = np.asfortranarray(rng.normal(size=(20, 3))).astype(">f8")
    np.savez(
        path,
        x=x,
        y=np.arange(20) % 2,
        class_names=np.array(["no", "yes"]),
        feature_names=np.array(list("abc")),
    )
    loaded = from_npz(path)
    assert (loaded.task, loaded.class_names, loaded.feature_names) == (
        "classification",
        ("no", "yes"),
        ("a", "b", "c"),
    )
    rows = {tuple(row) for row in torch.cat([loaded.x_train, loaded.x_test]).tolist()}
    assert rows == {tuple(row) for row in x.astype(np.float32).tolist()}
    images = rng.integers(0, 256, (6, 4, 4), np.uint8)
    np.savez_compressed(
        path, x_train=images[:4], y_train=[0, 1, 2, 1], x_test=images[4:], y_test=[2, 0]
    )
    loaded = from_npz(path)
    assert torch.equal(loaded.x_train, torch.tensor(images[:4, None] / 255, dtype=torch.float32))
    assert (loaded.box, loaded.scaling, len(loaded.class_names)) == ((0.0, 1.0), None, 3)
    np.savez(path, x=np.ones((5, 2)), y=np.ones((5, 1), np.float16))
    assert from_npz(path).y_train.shape == (4,)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.ones((5, 2))}, "x and y, or x_train"),
        ({"x": np.ones((5, 2)), "z": np.ones(5)}, "arrays named"),
        ({"x": np.ones((5, 2)), "y": np.ones(4)}, "as many rows"),
        ({"x": np.full((5, 2), np.nan), "y": np.ones(5)}, "finite"),
        ({"x": np.ones((5, 2)), "y": np.array([0, 1, -1, 0, 1])}, "classes 0, 1"),
        ({"x": np.ones((5, 2)), "y": np.array(list("abcde"))}, "y as numbers"),
        ({"x": np.ones((5, 32, 32, 3)), "y": np.ones(5)}, "transpose"),
        ({"x": np.ones(5), "y": np.ones(5)}, r"\(N, F\)"),
        ({"x": np.ones((5, 0)), "y": np.ones(5)}, "rows"),
        ({"x": np.ones((0, 3)), "y": np.ones(0)}, "at least 2 rows"),
        ({"x": np.ones((5, 2)), "y": np.zeros((5, 0))}, "rows"),
        ({"x": np.ones((5, 2), complex), "y": np.ones(5)}, "plain numbers"),
        (
            {
                "x_train": np.ones((5, 2)),
                "y_train": np.ones(5),
                "x_test": np.ones((5, 3)),
                "y_test": np.ones(5),
            },
            "one shape",
        ),
    ],
)
def test_npz_faults_are_named(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    np.savez(tmp_path / "own.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=words):
        from_npz(tmp_path / "own.npz")


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_the_limit_of_an_npz_is_of_all_its_arrays_unpacked(write: Any, tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    write(path, x=np.zeros((500, 4)), y=np.zeros(500))
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
    assert unpacked > 500 * 5 * 8
    assert read_npz(path, ("x", "y"), unpacked)["x"].shape == (500, 4)
    words = rf"at most {unpacked - 1} bytes unpacked, got {unpacked} bytes"
    with pytest.raises(DataError, match=words):
        read_npz(path, ("x", "y"), unpacked - 1)


@pytest.mark.parametrize("shape", [(6,), (3, 5), (2, 3, 4), (2, 3, 4, 5)])
def test_arrays_are_read_in_the_order_they_were_written_in(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    values = np.arange(math.prod(shape), dtype=float).reshape(shape)
    np.savez(tmp_path / "own.npz", x=values, y=np.asfortranarray(values), z=values.T)
    read = read_npz(tmp_path / "own.npz", ("x", "y", "z"), 10**6)
    for key, wanted in (("x", values), ("y", values), ("z", values.T)):
        np.testing.assert_array_equal(read[key], wanted)


def test_a_file_may_be_linked_to(wine: bytes, tmp_path: Path) -> None:
    """Of every kind: a table, arrays, the file of a built-in data set, and their folder."""
    real, links = tmp_path / "real", tmp_path / "links"
    real.mkdir()
    links.mkdir()
    (real / "t.csv").write_text("a,y\n" + "".join(f"{k},{k % 3}.5\n" for k in range(9)))
    np.savez(real / "t.npz", x=np.arange(10.0).reshape(5, 2), y=np.arange(5.0))
    (real / "wine-quality").mkdir()
    (real / "wine-quality" / "winequality-red.csv").write_bytes(wine)
    (links / "wine-quality").mkdir()
    for name in ("t.csv", "t.npz", "wine-quality/winequality-red.csv"):
        (links / name).symlink_to(real / name)
    (tmp_path / "folder").symlink_to(real, target_is_directory=True)
    for place in (links, tmp_path / "folder"):
        for read in (
            lambda folder: from_csv(folder / "t.csv", "y"),
            lambda folder: from_npz(folder / "t.npz"),
            lambda folder: load_dataset("wine", root=folder),
        ):
            assert torch.equal(read(place).x_train, read(real).x_train)
    (links / "nowhere.csv").symlink_to(tmp_path / "absent.csv")
    with pytest.raises(DataMissingError, match=r"nowhere\.csv"):
        from_csv(links / "nowhere.csv", "y")


def test_every_bit_flip_of_an_npz_is_refused_or_harmless(tmp_path: Path) -> None:
    """The zip's checksums cover the values: whatever loads after a flip has the same numbers."""
    path = tmp_path / "own.npz"
    intact = _saved(x=np.arange(24.0).reshape(8, 3), y=np.arange(8.0))
    path.write_bytes(intact)
    before = read_npz(path, ("x", "y"), 10_000)
    refused = 0
    for position in range(len(intact)):
        path.write_bytes(intact[:position] + bytes([intact[position] ^ 4]) + intact[position + 1 :])
        try:
            after = read_npz(path, ("x", "y"), 10_000)
        except DataError:
            refused += 1
            continue
        assert all(np.array_equal(before[key], after[key]) for key in after)
    assert refused > len(intact) // 2


# --- downloads ----------------------------------------------------------------------------------


def _serve_mnist(server: Server, contents: dict[str, bytes]) -> None:
    server.files = {
        f"/mnist/{name}.gz": gzip.compress(data, mtime=0) for name, data in contents.items()
    }


def test_download_once_into_the_cache(
    server: Server, mnist: dict[str, bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _serve_mnist(server, mnist)
    seen: list[tuple[str, int, int | None]] = []
    loaded = load_dataset("mnist", mirror=server.url, progress=lambda *step: seen.append(step))
    assert loaded.provenance.verified
    assert len(server.asked) == 4
    assert seen[-1][1] == seen[-1][2] == len(server.files["/mnist/t10k-labels-idx1-ubyte.gz"])
    again = load_dataset("mnist", mirror=server.url)
    assert len(server.asked) == 4  # nothing asked for the second time
    assert torch.equal(loaded.x_train, again.x_train)
    left = set(os.listdir(tmp_path / "cache" / "mnist"))
    assert left == {f"{name}.gz" for name in mnist}
    assert capfd.readouterr() == ("", "")


def test_download_goes_to_the_given_root_only_when_asked(
    server: Server, wine: bytes, tmp_path: Path
) -> None:
    server.files = {"/wine-quality/winequality-red.csv": wine}
    with pytest.raises(DataMissingError, match="download=True"):
        load_dataset("wine", tmp_path / "root", mirror=server.url)
    assert server.asked == []
    load_dataset("wine", tmp_path / "root", mirror=server.url, download=True)
    assert (tmp_path / "root" / "wine-quality" / "winequality-red.csv").read_bytes() == wine


def test_mirror_from_the_environment(
    server: Server, wine: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files = {"/data/wine-quality/winequality-red.csv": wine}
    monkeypatch.setenv("ADVBAYES_MIRROR", f"{server.url}/data/")
    assert load_dataset("wine").provenance.verified


def test_a_cut_connection_is_continued(server: Server, cifar: dict[str, bytes]) -> None:
    data = tar_gz(cifar)
    server.files = {"/cifar10/cifar-10-binary.tar.gz": data}
    server.cut_after = [70_000, 0, 30_000]
    assert load_dataset("cifar10", mirror=server.url).provenance.verified
    ranges = [wanted for _, wanted in server.asked]
    assert ranges == [None, "bytes=70000-", "bytes=70000-", "bytes=100000-"]


def test_an_interrupted_download_is_continued_by_the_next_call(
    server: Server, cifar: dict[str, bytes], tmp_path: Path
) -> None:
    data = tar_gz(cifar)
    server.files = {"/cifar10/cifar-10-binary.tar.gz": data}

    def stop(file: str, done: int, total: int | None) -> None:
        if done > 60_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_dataset("cifar10", mirror=server.url, progress=stop)
    part = tmp_path / "cache" / "cifar10" / "cifar-10-binary.tar.gz.part"
    kept = part.read_bytes()
    assert 60_000 < len(kept) < len(data)
    assert data.startswith(kept)
    assert load_dataset("cifar10", mirror=server.url).provenance.verified
    assert server.asked[-1][1] == f"bytes={len(kept)}-"
    assert not part.exists()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_part_of_another_file_is_started_over(
    server: Server, wine: bytes, tmp_path: Path, ranges: bool
) -> None:
    server.files = {"/wine-quality/winequality-red.csv": wine}
    server.ranges = ranges
    folder = tmp_path / "cache" / "wine-quality"
    folder.mkdir(parents=True)
    for rubbish in (b"rubbish", b"r" * len(wine), b"r" * (2 * len(wine))):
        (folder / "winequality-red.csv").unlink(missing_ok=True)
        (folder / "winequality-red.csv.part").write_bytes(rubbish)
        assert load_dataset("wine", mirror=server.url).provenance.verified
        assert (folder / "winequality-red.csv").read_bytes() == wine


def test_another_part_than_asked_for_is_not_appended(
    server: Server, wine: bytes, tmp_path: Path
) -> None:
    """A server that answers with the file from its beginning, and says so: once is enough."""
    server.files, server.whole = {"/wine-quality/winequality-red.csv": wine}, True
    folder = tmp_path / "cache" / "wine-quality"
    folder.mkdir(parents=True)
    (folder / "winequality-red.csv.part").write_bytes(wine[:1000])
    assert load_dataset("wine", mirror=server.url).provenance.verified
    assert [wanted for _, wanted in server.asked] == ["bytes=1000-"]


def test_wrong_content_is_refused_and_not_kept(server: Server, wine: bytes, tmp_path: Path) -> None:
    for wrong in (wine.replace(b"5", b"6", 1), b"<html>please log in</html>", b"", wine + b" "):
        server.files = {"/wine-quality/winequality-red.csv": wrong}
        with pytest.raises(
            DownloadError, match=r"is not the data set.*Or put winequality-red.csv into"
        ):
            load_dataset("wine", mirror=server.url)
        assert os.listdir(tmp_path / "cache" / "wine-quality") == []


def test_a_download_of_another_complete_copy_of_cifar_is_refused(
    server: Server, cifar: dict[str, bytes]
) -> None:
    server.files = {"/cifar10/cifar-10-binary.tar.gz": tar_gz(small_cifar(seed=1))}
    with pytest.raises(DownloadError, match="published"):
        load_dataset("cifar10", mirror=server.url)


def test_an_endless_download_is_cut_off(server: Server, wine: bytes, tmp_path: Path) -> None:
    server.files = {"/wine-quality/winequality-red.csv": bytes(5_000_000)}
    with pytest.raises(DownloadError, match=r"at most \d+ bytes"):
        load_dataset("wine", mirror=server.url)
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_not_found_and_failing_servers(server: Server, wine: bytes) -> None:
    with pytest.raises(DownloadError, match=r"404 Not Found.*mirror="):
        load_dataset("wine", mirror=server.url)
    assert len(server.asked) == 1  # no use in asking again
    server.status = 503
    with pytest.raises(DownloadError, match="503"):
        load_dataset("wine", mirror=server.url)
    assert len(server.asked) == 6
    with pytest.raises(DownloadError, match="refused"):
        load_dataset("wine", mirror="http://127.0.0.1:9")


@pytest.mark.parametrize("scheme", ["ftp", "file", "data"])
def test_a_redirection_away_from_http_is_not_followed(
    server: Server, wine: bytes, tmp_path: Path, scheme: str
) -> None:
    (tmp_path / "secret.csv").write_bytes(wine)
    place = {
        "ftp": f"ftp://127.0.0.1:9{tmp_path}",
        "file": f"file://{tmp_path}",
        "data": "data:text/csv,a",
    }[scheme]
    server.redirect = place if scheme == "data" else f"{place}/secret.csv"
    with pytest.raises(DownloadError, match=f"{scheme}.*mirror=") as caught:
        load_dataset("wine", mirror=server.url)
    assert len(server.asked) == 1
    assert str(caught.value).isprintable()


def test_a_redirection_within_http_is_followed(server: Server, wine: bytes) -> None:
    server.files = {"/elsewhere.csv": wine}
    server.redirect = f"{server.url}/elsewhere.csv"
    assert load_dataset("wine", mirror=server.url).provenance.verified


def test_a_trickle_ends_at_the_deadline(server: Server, wine: bytes, tmp_path: Path) -> None:
    server.files = {"/wine-quality/winequality-red.csv": wine}
    server.pause = 0.05  # after every few bytes: no single wait is long
    began = time.monotonic()
    with pytest.raises(DownloadError, match="by the deadline"):
        fetch_source(SOURCES["wine"], tmp_path / "late", mirror=server.url, deadline=0.5)
    assert time.monotonic() - began < 5
    server.pause = 0.0
    fetch_source(SOURCES["wine"], tmp_path / "late", mirror=server.url, deadline=30)
    assert os.listdir(tmp_path / "late" / "wine-quality") == ["winequality-red.csv"]


def test_what_a_killed_download_leaves_is_used_or_removed(
    server: Server, wine: bytes, tmp_path: Path
) -> None:
    server.files = {"/wine-quality/winequality-red.csv": wine}

    def die(file: str, done: int, total: int | None) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    home = tmp_path / "cache" / "wine-quality"
    assert (
        faults.forked(lambda: load_dataset("wine", mirror=server.url, progress=die))
        == -signal.SIGKILL
    )
    assert set(os.listdir(home)) <= {".lock", "winequality-red.csv.part"}
    assert load_dataset("wine", mirror=server.url).provenance.verified
    assert os.listdir(home) == ["winequality-red.csv"]


def test_a_mirror_may_have_the_plain_file(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(b"%d,1,2,3,4,5,6,7,8\n" % row for row in range(20))
    source = with_contents(SOURCES["california"], {"cal_housing.data": data})
    monkeypatch.setitem(SOURCES, "california", source)
    server.files = {"/california-housing/cal_housing.data": data}
    loaded = load_dataset("california", mirror=server.url)
    assert loaded.feature_names[0] == "longitude"
    assert float(loaded.y_train[0]) == 8
    assert [path for path, _ in server.asked] == [
        f"/california-housing/cal_housing.{end}" for end in ("tgz", "data")
    ]


def test_four_at_once_share_one_download(server: Server, wine: bytes) -> None:
    """They wait for the first: the file is fetched once and intact."""
    import threading

    server.files = {"/wine-quality/winequality-red.csv": wine}
    faults: list[BaseException] = []

    def load() -> None:
        try:
            assert load_dataset("wine", mirror=server.url).provenance.verified
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert len(server.asked) == 1


def test_a_full_disk_is_said(server: Server, wine: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    server.files = {"/wine-quality/winequality-red.csv": wine}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("advbayes.datasets.fetching.os.fsync", full)
    with pytest.raises(DownloadError, match=r"No space left.*bytes free"):
        load_dataset("wine", mirror=server.url)


# --- scaling and the Dataset itself -------------------------------------------------------------


@settings(max_examples=50, deadline=None, database=None)
@given(
    st.integers(1, 20), st.integers(1, 5), st.integers(0, 2**31), st.floats(-6, 6), st.floats(-4, 4)
)
def test_scaling_inverts(rows: int, columns: int, seed: int, size: float, shift: float) -> None:
    x = (
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10**size
        + shift * 10**size
    )
    y = x.sum(1)
    scaling = Standardize.fit(x, y)
    assert torch.allclose(scaling.inverse(scaling.transform(x)), x, rtol=1e-4, atol=1e-4 * 10**size)
    assert torch.allclose(
        scaling.inverse_target(scaling.transform_target(y)), y, rtol=1e-4, atol=1e-3 * 10**size
    )


def test_scaling_in_double_precision_is_not_rounded() -> None:
    draw = torch.Generator().manual_seed(0)
    x = 1e9 + torch.randn(50, 2, generator=draw, dtype=torch.float64)
    scaling = Standardize.fit(x, x[:, 0])
    assert {value.dtype for value in scaling.to_dict().values()} == {torch.float64}
    assert float(scaling.transform(x).mean(0).abs().max()) < 1e-6
    assert float(scaling.transform_target(x[:, 0]).mean().abs()) < 1e-6
    assert Standardize.fit(x.bfloat16()).mean.dtype == torch.float32


def test_scaling_of_a_constant_column_and_its_eps() -> None:
    x = torch.stack([torch.full((50,), 0.1), torch.arange(50.0)], dim=1)
    scaling = Standardize.fit(x)
    assert float(scaling.std[0]) == 1
    assert scaling.transform(x)[:, 0].abs().max() < 1e-7
    moved = scaling.transform(x[:1] + scaling.raw_eps(0.3)) - scaling.transform(x[:1])
    assert torch.allclose(moved, torch.full((1, 2), 0.3), atol=1e-6)
    assert torch.allclose(scaling.standardised_eps(scaling.raw_eps(0.3)), torch.full((2,), 0.3))


def test_whole_numbers_are_scaled_as_floating_point_ones() -> None:
    x, y = torch.tensor([[1, 2], [2, 5]]), torch.tensor([1, 2])
    scaling = Standardize.fit(x, y)
    assert scaling.transform(x).tolist() == [[-1.0, -1.0], [1.0, 1.0]]
    assert scaling.inverse(torch.tensor([[1, -1]])).tolist() == [[2.0, 2.0]]
    assert scaling.transform_target(y).tolist() == [-1.0, 1.0]
    assert scaling.inverse_target(torch.tensor([1, -1])).tolist() == [2.0, 1.0]


def test_scaling_survives_json_exactly_and_refuses_nonsense() -> None:
    scaling = Standardize.fit(
        torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), torch.randn(9, 2)
    )
    for values in (scaling.to_dict(), json.loads(json.dumps(scaling.to_json()))):
        back = Standardize.from_dict(values)
        assert all(
            torch.equal(value, back.to_dict()[name]) for name, value in scaling.to_dict().items()
        )
    for wrong in (
        {"mean": [0.0]},
        {"mean": [0.0], "std": [0.0]},
        {"mean": [0.0], "std": [float("nan")]},
        {"mean": [0.0], "std": [1.0, 1.0]},
        {"mean": [0.0], "std": [1.0], "target_mean": 0.0},
        {"mean": [0.0], "std": [1.0], "more": 1},
    ):
        with pytest.raises(ValueError):
            Standardize.from_dict(wrong)
    with pytest.raises(TypeError):
        Standardize.from_dict({"mean": ["a"], "std": [1.0]})
    with pytest.raises(ValueError, match="fitted shape"):
        scaling.transform(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="finite"):
        Standardize.fit(torch.tensor([[float("inf")]]))


def test_split_is_a_partition_and_keeps_the_classes() -> None:
    labels = torch.tensor([0] * 50 + [1] * 10 + [2])
    train, test = split_rows(61, seed=5, labels=labels)
    assert sorted(torch.cat([train, test]).tolist()) == list(range(61))
    assert labels[test].bincount(minlength=3).tolist() == [10, 2, 0]
    assert torch.equal(test, split_rows(61, seed=5, labels=labels)[1])
    assert not torch.equal(test, split_rows(61, seed=6, labels=labels)[1])
    assert [len(part) for part in split_rows(2, test_fraction=0.9)] == [1, 1]


def test_dataset_refuses_what_does_not_fit() -> None:
    x, y = torch.rand(4, 2), torch.rand(4)
    Dataset("toy", "regression", x, y, x, y)
    for arguments, kind in (
        (("ranking", x, y, x, y), ValueError),
        (("regression", x.double(), y, x, y), TypeError),
        (("regression", x, y.long(), x, y), TypeError),
        (("regression", x, y[:3], x, y), DataError),
        (("regression", x * float("nan"), y, x, y), DataError),
        (("regression", x, y, x[:, :1], y), DataError),
        (("classification", x, y.long(), x, y.long()), DataError),  # no class names
    ):
        with pytest.raises(kind):
            Dataset("toy", *arguments)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="within"):
        Dataset("toy", "regression", x + 1, y, x, y, box=(0.0, 1.0))


# --- the real files -----------------------------------------------------------------------------

_REAL = {
    "mnist": ((60_000, 1, 28, 28), 10_000),
    "fashion-mnist": ((60_000, 1, 28, 28), 10_000),
    "wine": ((1_279, 11), 320),
    "wine-white": ((3_918, 11), 980),
    "energy": ((614, 8), 154),
    "california": ((16_512, 8), 4_128),
}


@needs_real
@pytest.mark.parametrize("name", _REAL)
def test_real_files_are_the_published_ones(name: str) -> None:
    assert REAL is not None
    loaded = load_dataset(name, REAL)
    assert (tuple(loaded.x_train.shape), len(loaded.x_test)) == _REAL[name]
    assert loaded.provenance.verified
    if name == "mnist":
        assert loaded.y_train.bincount().tolist() == [
            5923,
            6742,
            5958,
            6131,
            5842,
            5421,
            5918,
            6265,
            5851,
            5949,
        ]
        assert float(loaded.x_train.mean()) == pytest.approx(0.1307, abs=1e-4)
    if name == "fashion-mnist":
        assert loaded.y_train.bincount().tolist() == [6000] * 10
    if name == "energy":
        both = torch.cat([loaded.y_train, loaded.y_test])
        assert float(both.mean()) == pytest.approx(22.3072, abs=1e-4)


def test_names_and_sources_agree() -> None:
    assert set(SOURCES) | {"digits", "diabetes"} == set(names())
    for source in SOURCES.values():
        fetched = [name for file in source.remotes for name in source.inside(file)]
        assert sorted(fetched) == sorted(content.name for content in source.contents)
        assert all(len(content.sha256) == 64 for content in source.contents)
    assert {content.size for content in SOURCES["cifar10"].contents} == {10_000 * 3073}
    for source in SOURCES.values():
        assert all(url.startswith("http") for urls in source.remotes.values() for url in urls)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("target", ["y", "when"])
def test_a_column_that_float32_cannot_tell_apart_is_refused(
    tmp_path: Path, missing: bool, target: str
) -> None:
    """Seconds since 1970 within a minute are one number in float32, whose rounding is 64."""
    rows = [f"{1_700_000_000 + k},{k % 7},{k / 3}" for k in range(60)]
    rows += ["1700000000,,1"] if missing else []
    path = tmp_path / "t.csv"
    path.write_text("when,a,y\n" + "\n".join(rows) + "\n")
    with pytest.raises(DataError, match=r"column 'when'.*1700000000.*[Ss]ubtract"):
        from_csv(path, target=target)
    later = "\n".join(row.replace("17000000", "1", 1) for row in rows)
    path.write_text("when,a,y\n" + later + "\n")
    assert len(from_csv(path, target=target).x_train.unique(dim=0)) > 40

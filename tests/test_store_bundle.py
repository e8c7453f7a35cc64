"""Bundles: what is saved is loaded, what was altered is refused, and a kill loses nothing."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import sys
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from advbayes.store import (
    DiskFullError,
    MissingError,
    StoreError,
    load,
    read_bundle,
    read_manifest,
    versions,
    write_bundle,
)
from advbayes.store import tensors as strict
from tests import faults

FORMS = ["bundle", "bundle.advbayes"]
pytestmark = pytest.mark.forks


@pytest.mark.parametrize("form", FORMS)
def test_round_trip(tmp_path: Path, form: str) -> None:
    kinds = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int8,
        torch.uint8,
    )
    values = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    values |= {
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.0),
    }
    values["strided"] = torch.arange(6.0).reshape(2, 3).T
    values["view"] = values["strided"]  # shared memory is saved twice
    values["grad"] = torch.ones(2, requires_grad=True)
    documents = {"config": {"eps": 0.1, "names": ["a", "é"]}, "none": None}
    write_bundle(tmp_path / form, {"values": values, "nothing": {}}, documents)
    tensors, texts = read_bundle(tmp_path / form)
    assert texts == documents
    assert tensors["nothing"] == {}
    assert tensors["values"].keys() == values.keys()
    for name, value in values.items():
        assert tensors["values"][name].dtype == value.dtype
        assert torch.equal(tensors["values"][name], value)
    manifest = read_manifest(tmp_path / form)
    assert manifest.versions == versions()
    assert {part.name for part in manifest.parts} == {
        "values.safetensors",
        "nothing.safetensors",
        "config.json",
        "none.json",
    }


def test_same_content_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        faults.small_bundle(tmp_path / f"{name}.advbayes")
    assert (tmp_path / "a.advbayes").read_bytes() == (tmp_path / "b.advbayes").read_bytes()


def test_one_file_is_an_ordinary_zip(tmp_path: Path) -> None:
    faults.small_bundle(tmp_path / "a.advbayes")
    with zipfile.ZipFile(tmp_path / "a.advbayes") as file:
        assert file.testzip() is None
        assert file.namelist()[0] == "manifest.json"
        file.extractall(tmp_path / "unzipped")
    assert faults.small_version(read_bundle(tmp_path / "unzipped")) == 0


@pytest.mark.parametrize("form", FORMS)
def test_replaced(tmp_path: Path, form: str) -> None:
    for version in range(3):
        faults.small_bundle(tmp_path / form, version)
        assert faults.small_version(read_bundle(tmp_path / form)) == version
    assert os.listdir(tmp_path) == [form]
    if form == "bundle":
        assert len(os.listdir(tmp_path / form)) == 5  # nothing of older versions, no lock


# Altered


def test_every_byte_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.advbayes"
    write_bundle(path, {"theta": {"mean": torch.ones(2)}}, {"config": {}})
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), 7):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=r"a\.advbayes"):
            read_bundle(path)


def test_truncations_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.advbayes"
    faults.small_bundle(path)
    data = path.read_bytes()
    for size in range(0, len(data), 3):
        path.write_bytes(data[:size])
        with pytest.raises(StoreError, match=r"a\.advbayes"):
            read_bundle(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(StoreError, match=r"a\.advbayes"):
        read_bundle(path)


def test_a_file_of_another_kind_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "patients.csv"
    path.write_text("age,outcome\n40,ill\n" * 10)
    with pytest.raises(StoreError, match="wanted a bundle that save wrote, got a file of another"):
        read_bundle(path)


def test_every_file_of_a_folder(tmp_path: Path) -> None:
    faults.small_bundle(tmp_path / "a")
    for file in sorted((tmp_path / "a").iterdir()):
        data = file.read_bytes()
        for bit in range(0, 8 * len(data), 11):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            with pytest.raises(StoreError, match=file.name):
                read_bundle(tmp_path / "a")
        for size in range(0, len(data), 23):
            file.write_bytes(data[:size])
            with pytest.raises(StoreError, match=file.name):
                read_bundle(tmp_path / "a")
        file.unlink()
        with pytest.raises(MissingError, match=file.name):
            read_bundle(tmp_path / "a")
        file.write_bytes(data)
    assert faults.small_version(read_bundle(tmp_path / "a")) == 0


def test_nothing_is_parsed_before_every_hash_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.small_bundle(tmp_path / "a")
    parsed = []
    monkeypatch.setattr(strict, "decode", lambda data, name: parsed.append(name))
    last = max((tmp_path / "a").glob("*.safetensors"))
    last.write_bytes(bytes(last.stat().st_size))
    with pytest.raises(StoreError, match="SHA-256"):
        read_bundle(tmp_path / "a")
    assert parsed == []


def test_another_schema(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for schema, got in (
        (2, "2 .written by a newer advbayes: update it"),
        (0, "0"),
        (True, "True"),
        ("1", "'1'"),
    ):
        (tmp_path / "a" / "manifest.json").write_bytes(faults.sealed({}, schema=schema)[0])
        with pytest.raises(StoreError, match=rf"manifest\.json: wanted schema 1, got {got}"):
            read_bundle(tmp_path / "a")
    for changes in (
        {"format": "x"},
        {"more": 1},
        {"versions": []},
        {"parts": {"a.pkl": {}}},
        {"parts": []},
    ):
        (tmp_path / "a" / "manifest.json").write_bytes(faults.sealed({}, **changes)[0])
        with pytest.raises(StoreError, match=r"manifest\.json: wanted"):
            read_bundle(tmp_path / "a")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(7),
        faults.header(b"[]"),
        faults.header({"a": 1}),
        faults.header(
            {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "more": 1}}, bytes(4)
        ),
        faults.header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)),
        faults.header({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, bytes(4)),
        faults.header({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        faults.header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
        faults.header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(5)),
        faults.header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(3)),
        faults.header({"a": {"dtype": "F32", "shape": [1] * 17, "data_offsets": [0, 4]}}, bytes(4)),
        faults.header(b'{"a": {}, "a": {}}'),
        faults.header({"__metadata__": {"a": 1}}),
        faults.header(
            {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0\0\xc0\x7f"
        ),
        faults.header(
            {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0\0\x80\x7f"
        ),
    ],
)
def test_tensor_files_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match=r"^x: wanted "):
        strict.decode(data, "x")


# Refused on saving


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_nan_is_never_saved(tmp_path: Path, bad: float, kind: torch.dtype, form: str) -> None:
    faults.small_bundle(tmp_path / form)
    with pytest.raises(
        StoreError, match=r"theta: wanted finite tensors, got . NaN and . infinite values in rho"
    ):
        write_bundle(tmp_path / form, {"theta": {"rho": torch.tensor([1.0, bad], dtype=kind)}}, {})
    with pytest.raises(StoreError, match=r"history\.loss\[1\]: wanted a finite number"):
        write_bundle(tmp_path / form, {}, {"history": {"loss": [1.0, bad]}})
    assert faults.small_version(read_bundle(tmp_path / form)) == 0


@pytest.mark.parametrize("name", ["", "../a", "a/b", "a.b", ".a", "manifest", "é", "x" * 65, "a\n"])
def test_part_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="part names"):
        write_bundle(tmp_path / "a", {}, {name: {}})
    assert not os.listdir(tmp_path)


def test_parts_differ_by_more_than_case(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="differ by more than case"):
        write_bundle(tmp_path / "a", {}, {"a": 1, "A": 1})


@pytest.mark.parametrize(
    "value", [[1.0], torch.ones(2, dtype=torch.complex64), torch.ones(2).to_sparse()]
)
def test_what_is_no_plain_tensor(tmp_path: Path, value: object) -> None:
    with pytest.raises(StoreError, match="theta: wanted named dense tensors"):
        write_bundle(tmp_path / "a", {"theta": {"mean": value}}, {})  # type: ignore[dict-item]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match="home: wanted an empty folder or a bundle, got 1 other"):
        faults.small_bundle(tmp_path / "home")
    (tmp_path / "home" / "manifest.json").write_text("{}")
    with pytest.raises(StoreError, match=r"manifest\.json"):
        faults.small_bundle(tmp_path / "home")
    assert sorted(os.listdir(tmp_path / "home")) == ["manifest.json", "thesis.tex"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="file: wanted a folder to write"):
        faults.small_bundle(tmp_path / "file")
    (tmp_path / "folder.advbayes").mkdir()
    with pytest.raises(StoreError, match="got a folder"):
        faults.small_bundle(tmp_path / "folder.advbayes")
    (tmp_path / "empty").mkdir()
    faults.small_bundle(tmp_path / "empty")
    assert faults.small_version(read_bundle(tmp_path / "empty")) == 0


def test_own_files_in_a_bundle_folder_stay(tmp_path: Path) -> None:
    faults.small_bundle(tmp_path / "a", 0)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    faults.small_bundle(tmp_path / "a", 1)
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


def test_too_large(tmp_path: Path) -> None:
    for form in FORMS:
        faults.small_bundle(tmp_path / form)
        with pytest.raises(StoreError, match=r"(at most|to) 300 bytes"):
            read_bundle(tmp_path / form, max_bytes=300)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("before", [False, True])
def test_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, before: bool
) -> None:
    if before:
        faults.small_bundle(tmp_path / form, 0)
    whole, left = os.write, [700]

    def filling(descriptor: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = whole(descriptor, data[: left[0]])
        left[0] -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", filling)
        with pytest.raises(
            DiskFullError, match=r"wanted \d+ bytes of disk, got \d+ bytes free"
        ) as caught:
            faults.small_bundle(tmp_path / form, 1)
    assert caught.value.needed > 700
    if before:
        assert faults.small_version(read_bundle(tmp_path / form)) == 0
    assert os.listdir(tmp_path) == [form] * before
    faults.small_bundle(tmp_path / form, 2)
    assert faults.small_version(read_bundle(tmp_path / form)) == 2
    if form == "bundle":
        assert len(os.listdir(tmp_path / form)) == 5


# Killed


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("before", [False, True])
def test_killed_at_every_call(tmp_path: Path, form: str, before: bool) -> None:
    def fresh(folder: Path) -> Path:
        folder.mkdir()
        if before:
            faults.small_bundle(folder / form, 1)
        return folder / form

    trial = fresh(tmp_path / "trial")
    points = faults.kill_points(lambda: faults.small_bundle(trial, 2))
    assert {"write", "fsync", "replace" if before or form != "bundle" else "rename"} <= {
        name for _, name, _ in points
    }
    for number, point in enumerate(points[:: 3 if before and form == "bundle" else 1]):
        path = fresh(tmp_path / f"{number}")
        assert faults.killed_at(point, lambda path=path: faults.small_bundle(path, 2)), point  # type: ignore[misc]
        if before or path.exists():
            assert faults.small_version(read_bundle(path)) in (1, 2), point
        faults.small_bundle(path, 3)  # the dead writer's lock and leftovers are no obstacle
        assert faults.small_version(read_bundle(path)) == 3, point
        assert os.listdir(path.parent) == [form], point
        if form == "bundle":
            assert len(os.listdir(path)) == 5, point


def test_a_reader_sees_one_version(tmp_path: Path) -> None:
    faults.small_bundle(tmp_path / "a", 0)

    def read_many() -> None:
        seen = -1
        while seen < 60:
            now = faults.small_version(read_bundle(tmp_path / "a"))
            assert now >= seen
            seen = now

    def write_many() -> None:
        for version in range(1, 61):
            faults.small_bundle(tmp_path / "a", version)

    import threading

    writer = threading.Thread(target=lambda: faults.forked(write_many))
    writer.start()
    try:
        read_many()
    finally:
        writer.join()


# Hostile


@pytest.fixture(scope="module")
def attacks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Path]:
    folder = tmp_path_factory.mktemp("hostile") / "in"
    folder.mkdir()
    canary = folder.parent / "canary"
    return faults.hostile(folder, canary), canary


def test_hostile_files(attacks: tuple[dict[str, Path], Path]) -> None:
    made, canary = attacks
    assert len(made) == 60
    # whatever loading imports is imported here
    load(Path(__file__).parent / "data" / "schema1.advbayes")

    def watched(loads: Mapping[str, Callable[[], object]]) -> None:
        def watch(event: str, arguments: tuple[object, ...]) -> None:
            forbidden = (
                "exec",
                "os.system",
                "subprocess.Popen",
                "os.mkdir",
                "pickle.find_class",
                "import",
                "compile",
            )
            if event in forbidden or (event == "open" and "w" in str(arguments[1])):
                os._exit(3)

        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sys.addaudithook(watch)
        for name, attempt in loads.items():
            try:
                attempt()
            except StoreError as error:
                growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start
                if name not in str(error) or growth > 100_000:
                    os._exit(4)
            else:
                os._exit(5)
            os.write(writing, b".")
        os._exit(0)

    reading, writing = os.pipe()  # a dot for each file that was refused
    loads = {str(path): partial(load, path) for path in made.values()}
    ended = faults.forked(lambda: watched(loads))
    os.close(writing)
    with os.fdopen(reading) as pipe:
        refused = len(pipe.read())
    assert (ended, list(made)[refused:]) == (0, [])
    assert not canary.exists()
    assert sorted(os.listdir(canary.parent)) == ["in"]
    # The watch works: the same pickle, loaded as one, is caught in the act.
    program = pickle.dumps(faults.Payload(canary))
    assert faults.forked(lambda: watched({"": lambda: pickle.loads(program)})) == 3  # noqa: S301

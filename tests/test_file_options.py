"""Every option of the functions that read and write files has its effect; every limit holds from
both sides."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from advbayes import store
from advbayes.datasets import DataError, from_csv, from_npz, split_rows
from advbayes.datasets.formats import read_npz, read_plain
from advbayes.datasets.own import _names
from advbayes.datasets.tables import parse_table
from advbayes.store import archive, documents, tensors
from tests import faults

FORMS = ["m", "m.advbayes"]


@pytest.mark.parametrize("form", FORMS)
def test_max_bytes_of_a_bundle(tmp_path: Path, form: str) -> None:
    faults.small_bundle(tmp_path / form)
    parts = store.read_manifest(tmp_path / form).parts
    size = (
        (tmp_path / form).stat().st_size
        if form.endswith("advbayes")
        else sum(part.size for part in parts)
    )
    assert faults.small_version(store.read_bundle(tmp_path / form, max_bytes=size)) == 0
    with pytest.raises(store.StoreError, match=f"at most {size - 1} bytes"):
        store.read_bundle(tmp_path / form, max_bytes=size - 1)


def test_limits_of_documents() -> None:
    def nested(depth: int) -> Any:
        return [nested(depth - 1)] if depth else 0

    for value, wrong in (
        (nested(documents.MAX_DEPTH), nested(documents.MAX_DEPTH + 1)),
        (2**63 - 1, 2**63),
        (-(2**63), -(2**63) - 1),
        # two quotes and a line end
        ("x" * (documents.MAX_BYTES - 3), "x" * (documents.MAX_BYTES - 2)),
    ):
        assert documents.decode(documents.encode(value)) == value
        with pytest.raises(store.StoreError, match="document"):
            documents.encode(wrong)
        with pytest.raises(store.StoreError, match="document"):
            documents.decode(json.dumps(wrong).encode() + b" ")


def test_limits_of_parts(tmp_path: Path) -> None:
    store.write_bundle(tmp_path / "m", {}, {"x" * 64: 1})
    with pytest.raises(store.StoreError, match="part names"):
        store.write_bundle(tmp_path / "m", {}, {"x" * 65: 1})
    store.write_bundle(tmp_path / "n.advbayes", {}, {f"p{index}": 1 for index in range(256)})
    assert len(store.read_bundle(tmp_path / "n.advbayes")[1]) == 256
    assert archive.MAX_MEMBERS == 257
    with pytest.raises(store.StoreError, match="at most 256 parts"):
        store.write_bundle(tmp_path / "n.advbayes", {}, {f"p{index}": 1 for index in range(257)})
    assert tensors.decode(tensors.encode({"a": torch.zeros((1,) * 16)}))["a"].ndim == 16
    with pytest.raises(store.StoreError, match=r"'a': a torch\.float32 tensor of shape"):
        tensors.encode({"a": torch.zeros((1,) * 17)})


def test_a_file_beyond_two_gigabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.advbayes"
    path.write_bytes(b"PK\3\4")
    for size, words in (
        (archive.MAX_FILE + 1, "at most 2147483647 bytes"),
        (archive.MAX_FILE, "another end"),
    ):
        os.truncate(path, size)
        with pytest.raises(store.StoreError, match=words):
            store.read_bundle(path)


def csv_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(text)
    return path


def test_max_bytes_of_tables_and_arrays(tmp_path: Path) -> None:
    text = "a,y\n" + "1,2\n3,4\n" * 5
    path = csv_of(tmp_path, text)
    assert len(from_csv(path, "y", max_bytes=len(text)).x_train) == 8
    with pytest.raises(DataError, match=f"at most {len(text) - 1} bytes"):
        from_csv(path, "y", max_bytes=len(text) - 1)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((10, 3)), y=np.arange(10.0))
    size = 2 * 128 + 8 * 40
    assert len(from_npz(tmp_path / "a.npz", max_bytes=size).x_train) == 8
    with pytest.raises(DataError, match=f"at most {size - 1} bytes unpacked"):
        from_npz(tmp_path / "a.npz", max_bytes=size - 1)


def test_delimiter_and_header(tmp_path: Path) -> None:
    path = csv_of(tmp_path, "a|b,c|y\n" + "1|2|3\n4|5|6\n" * 5)
    assert from_csv(path, "y", delimiter="|").feature_names == ("a", "b,c")
    with pytest.raises(DataError):
        from_csv(path, "y")
    for wrong in ("", "||", "\n", '"'):
        with pytest.raises(ValueError, match="delimiter must be one character"):
            from_csv(path, "y", delimiter=wrong)


def test_lines_and_classes(tmp_path: Path) -> None:
    for extra, fits in ((0, True), (1, False)):
        line = "1," + "2".rjust((1 << 20) - 3 + extra) + "\n"  # with its end, one mebibyte
        if fits:
            assert parse_table(b"a,y\n" + line.encode(), "t").numbers.tolist() == [[1.0, 2.0]]
        else:
            with pytest.raises(DataError, match="at most 1048576 characters in line 2"):
                parse_table(b"a,y\n" + line.encode(), "t")
    for num, fits in ((10_000, True), (10_001, False)):
        path = csv_of(tmp_path, "a,y\n" + "".join(f"1,{i}\n" for i in range(num)))
        if fits:
            assert len(from_csv(path, "y", task="classification").class_names) == num
        else:
            with pytest.raises(DataError, match="2 to 10000 classes, got 10001"):
                from_csv(path, "y", task="classification")
    with pytest.raises(DataError, match="2 to 10000 classes, got 1"):
        from_csv(csv_of(tmp_path, "a,y\n1,x\n2,x\n"), "y")


@pytest.mark.parametrize("wrong", ["1e400", "inf", "7 kg", "1.5.5"])
def test_a_number_that_is_none_makes_no_classes_of_the_others(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "t.csv"
    for others, ok in ((["1.5", "2.5"], False), (["1.5"], True), (["a", "b"], True)):
        lines = [f'{index};"{cell}"' for index, cell in enumerate([*others, wrong] * 4)]
        path.write_text("\n".join(["x;y", *lines]))
        if ok:
            assert from_csv(path, "y").task == "classification"
        else:
            with pytest.raises(DataError, match=r"numbers in the target 'y', got .* in row 3"):
                from_csv(path, "y")
            assert len(from_csv(path, "y", task="classification").class_names) == 3


def test_options_of_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.random.default_rng(0).normal(size=(20, 3)), y=np.arange(20) % 4)
    one = from_npz(path)
    assert (one.task, len(one.x_test)) == ("classification", 4)
    assert from_npz(path, task="regression").y_train.dtype == torch.float32
    assert not torch.equal(from_npz(path, seed=1).x_test, one.x_test)
    assert torch.equal(from_npz(path, seed=0).x_test, one.x_test)
    assert len(from_npz(path, test_fraction=0.6).x_test) == 12  # three of the five of each class


@pytest.mark.parametrize("kind", ["?", "u1", "i2", ">i4", "i8", "f2", "f4", ">f8"])
def test_arrays_of_every_plain_kind_are_read(kind: str, tmp_path: Path) -> None:
    """Of features and of targets; truth values and whole numbers are classes."""
    values = (np.arange(40).reshape(20, 2) // 3 % 2).astype(kind)
    np.savez(tmp_path / "a.npz", x=values, y=values[:, 0])
    data = from_npz(tmp_path / "a.npz")
    assert data.task == ("regression" if "f" in kind else "classification")
    rows = torch.cat([data.x_train, data.x_test]).tolist()
    assert sorted(rows) == sorted(values.astype(float).tolist())
    targets = torch.cat([data.y_train, data.y_test])
    assert int(targets.sum()) == int(values[:, 0].sum())


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("code", "is_text"),
    [
        (0xD7FF, True),
        (0xD800, False),
        (0xDFFF, False),
        (0xE000, True),
        (0x10FFFF, True),
        (0x110000, False),
    ],
    ids=hex,
)
def test_only_characters_are_text(code: int, is_text: bool, order: str) -> None:
    value = np.frombuffer(np.array([code], f"{order}u4").tobytes(), f"{order}U1")
    if is_text:
        assert _names(Path("a.npz"), "class_names", value) == (chr(code),)
    else:
        with pytest.raises(DataError, match="numbers that are no characters"):
            _names(Path("a.npz"), "class_names", value)


def test_split_options() -> None:
    one = split_rows(100)
    assert [len(part) for part in one] == [80, 20]
    assert [len(part) for part in split_rows(100, test_fraction=0.35)] == [65, 35]
    assert not torch.equal(split_rows(100, seed=1)[1], one[1])
    labels = torch.arange(100) % 10 == 0
    assert int(labels[split_rows(100, labels=labels.long())[1]].sum()) == 2
    for fraction in (0.0, 1.0, -0.1, 1.1):
        with pytest.raises(ValueError, match="test_fraction"):
            split_rows(100, test_fraction=fraction)
    assert [len(part) for part in split_rows(2, test_fraction=0.01)] == [1, 1]
    with pytest.raises(DataError, match="at least 2 rows"):
        split_rows(1)


def test_out_of_memory_says_what_was_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    faults.small_bundle(tmp_path / "m")
    faults.small_bundle(tmp_path / "m.advbayes")
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    (tmp_path / "t.csv").write_text("a,y\n1,2\n")
    with monkeypatch.context() as patch:
        patch.setattr(tensors, "decode", full)
        for form in FORMS:
            with pytest.raises(
                store.StoreError,
                match=r"wanted some \d+ bytes of memory to load \d+ bytes, got less",
            ):
                store.read_bundle(tmp_path / form)
    with monkeypatch.context() as patch:
        patch.setattr(np, "frombuffer", full)
        with pytest.raises(DataError, match="memory for arrays of a file of"):
            read_npz(tmp_path / "a.npz", ["x"], 10**6)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(DataError, match="wanted 8 bytes of memory to read it, got less"):
            read_plain(tmp_path / "t.csv", 100)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.6])
@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_a_file_is_divided_as_asked_for(tmp_path: Path, kind: str, fraction: float) -> None:
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    path = tmp_path / f"rows.{kind}"
    if kind == "csv":
        path.write_text("a,b,y\n" + "\n".join(f"{a},{b},{a + b}" for a, b in x))
        data = from_csv(path, target="y", test_fraction=fraction)
    else:
        np.savez(path, x=x, y=x.sum(1))
        data = from_npz(path, test_fraction=fraction)
    assert (len(data.x_train), len(data.x_test)) == (40 - 40 * fraction, 40 * fraction)

"""A saved purifier: any damage is refused, a kill leaves one of two versions, a full disk says
so."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advbayes import (
    L2,
    AttackChannel,
    BayesianModel,
    Categorical,
    Gaussian,
    Mixture,
    Noise,
    Purifier,
    one_step,
)
from advbayes.purification.rows import DiskRows
from advbayes.store import DiskFullError, StoreError, read_bundle
from advbayes.store import tables as tables_module
from advbayes.store.parts import Manifest, Part, encode_manifest, versions
from tests import faults
from tests.oracles import generator
from tests.test_purifier_same_answer import PerFeature

WIDTH = 6


def purifier_of(version: int = 0, outputs: int = 3, channel: Any = None, num: int = 40) -> Purifier:
    source = generator(version)
    model = BayesianModel(
        nn.Linear(WIDTH, outputs), Categorical() if outputs > 1 else Gaussian(0.3)
    )
    thetas = torch.randn(2, model.num_params, generator=source)
    x = torch.randn(num, WIDTH, generator=source)
    mixed = Mixture([0.4, 0.6], [Noise(0.5), AttackChannel(one_step(L2(1.0)), 0.7)])
    return Purifier(model, channel or mixed, thetas, x)


X = torch.randn(5, WIDTH, generator=generator(9))


def answer(purifier: Purifier) -> Tensor:
    prediction: Any = purifier(X)
    return prediction.mean if purifier.store.num_outputs else prediction.logits


@pytest.mark.parametrize("limit", [1, 1 << 30])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("kind", ["mixture", "features", "widened"])
def test_what_is_loaded_answers_as_what_was_saved(
    kind: str, outputs: int, limit: int, tmp_path: Path
) -> None:
    purifier = purifier_of(outputs=outputs, channel=PerFeature(0.5) if kind == "features" else None)
    purifier = purifier.widened(2.0) if kind == "widened" else purifier
    purifier.save(tmp_path / "a")
    loaded = Purifier.load(tmp_path / "a", memory_limit=limit)
    assert (loaded.store.folder is None) is (limit > 1)
    torch.testing.assert_close(answer(loaded), answer(purifier), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loaded.denoise(X), purifier.denoise(X), rtol=1e-6, atol=1e-6)
    assert repr(loaded) == repr(purifier)
    assert loaded.update == purifier.update
    loaded.save(tmp_path / "b")  # and so on
    torch.testing.assert_close(
        answer(Purifier.load(tmp_path / "b")), answer(loaded), rtol=1e-6, atol=1e-6
    )


def test_it_is_a_bundle_like_any_other(tmp_path: Path) -> None:
    purifier = purifier_of()
    purifier.save(tmp_path / "a")
    parts, texts = read_bundle(tmp_path / "a")
    assert torch.equal(
        parts["centres-0"]["table"], purifier.store.banks[0].centres.block(slice(None), slice(None))
    )  # type: ignore[union-attr]
    assert set(parts) == {"values", "centres-0", "centres-1", "vectors"}
    assert set(texts) == {"purifier"}


def test_a_name_that_means_a_single_file_is_refused(tmp_path: Path) -> None:
    """It would be written as one and could not be loaded."""
    with pytest.raises(ValueError, match=r"folder must not end in \.advbayes"):
        purifier_of(num=8).save(tmp_path / "a.advbayes")
    assert not list(tmp_path.iterdir())


def test_any_flipped_bit_and_any_cut_is_refused(tmp_path: Path) -> None:
    purifier_of(num=8).save(tmp_path / "a")
    draw = random.Random(0)
    for file in sorted((tmp_path / "a").iterdir()):
        data = file.read_bytes()
        for trial in range(25):
            damaged = bytearray(data)
            if trial < 20:
                damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            else:
                del damaged[draw.randrange(len(data)) :]
            file.write_bytes(damaged)
            with pytest.raises(StoreError, match=file.name.split(".")[0]):
                Purifier.load(tmp_path / "a")
        file.write_bytes(data)
    Purifier.load(tmp_path / "a")
    (tmp_path / "a" / file.name).unlink()
    with pytest.raises(StoreError):
        Purifier.load(tmp_path / "a")


def sealed_again(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Alter a part and make every hash right again, as one who means harm would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    parts = []
    for part, entry in manifest["parts"].items():
        file = folder / Part(part, entry["sha256"], entry["bytes"]).file
        data = change(file.read_bytes()) if part == name else file.read_bytes()
        file.unlink()
        parts.append(Part(part, hashlib.sha256(data).hexdigest(), len(data)))
        (folder / parts[-1].file).write_bytes(data)
    (folder / "manifest.json").write_bytes(
        encode_manifest(Manifest(1, versions(), tuple(parts)), folder / "manifest.json")
    )


def nan_at_the_end(data: bytes) -> bytes:
    return data[:-4] + torch.tensor(math.nan).numpy().tobytes()


def number_at_the_end(value: float) -> Callable[[bytes], bytes]:
    return lambda data: data[:-4] + torch.tensor(value).numpy().tobytes()


def text(**changes: object) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        fields = json.loads(data)
        for key, value in changes.items():
            if key in ("scale", "factor", "log_weight"):
                fields["banks"][0][key] = value
            else:
                fields[key] = value
        return json.dumps(fields).encode()

    return change


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("scales-0.safetensors", nan_at_the_end),
        ("scales-0.safetensors", number_at_the_end(math.inf)),
        ("scales-0.safetensors", number_at_the_end(0.0)),
        ("scales-0.safetensors", number_at_the_end(-1.0)),
        ("centres-0.safetensors", nan_at_the_end),
        ("centres-0.safetensors", lambda data: data + bytes(4)),
        ("values.safetensors", nan_at_the_end),
        ("values.safetensors", number_at_the_end(-0.5)),
        ("values.safetensors", number_at_the_end(1e-6)),  # the sum is less than 1
        ("values.safetensors", number_at_the_end(1.0)),  # and more
        ("values.safetensors", lambda data: data.replace(b"40", b"41", 1)),
        (
            "vectors.safetensors",
            lambda data: data[:-8] + torch.tensor(math.nan, dtype=torch.float64).numpy().tobytes(),
        ),
        ("purifier.json", text(num_thetas=3)),
        ("purifier.json", text(num_thetas=0)),
        ("purifier.json", text(num_thetas=True)),
        ("purifier.json", text(num_outputs=1)),
        ("purifier.json", text(update="sometimes")),
        ("purifier.json", text(event_shape=[-2, 3])),
        ("purifier.json", text(event_shape=[7])),
        ("purifier.json", text(scale=0.5)),
        ("purifier.json", text(factor=-1.0)),
        ("purifier.json", text(factor="wide")),
        ("purifier.json", text(log_weight=None)),
        ("purifier.json", text(banks=[])),
        ("purifier.json", text(other=1)),
        ("purifier.json", lambda data: b"[]"),
    ],
)
def test_what_does_not_fit_is_refused_whatever_its_hash(
    part: str, change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    purifier_of(channel=PerFeature(0.5)).save(tmp_path / "a")
    Purifier.load(tmp_path / "a")
    sealed_again(tmp_path / "a", part, change)
    for limit in (1, 1 << 30):
        with pytest.raises(StoreError):
            Purifier.load(tmp_path / "a", memory_limit=limit)


@pytest.mark.forks
@pytest.mark.parametrize("replacing", [True, False])
def test_a_kill_leaves_one_of_two_versions_whole(replacing: bool, tmp_path: Path) -> None:
    versions_of = [purifier_of(version, num=6) for version in (1, 2)]
    wanted = [answer(purifier) for purifier in versions_of]
    path = tmp_path / "trial" / "a"

    def fresh() -> None:
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        if replacing:
            versions_of[0].save(path)

    fresh()
    points = faults.kill_points(lambda: versions_of[1].save(path))
    draw = random.Random(0)
    for point in draw.sample(points, 12):
        fresh()
        assert faults.killed_at(point, lambda: versions_of[1].save(path))
        if not replacing and not path.exists():
            continue
        found = answer(Purifier.load(path))
        assert any(torch.equal(found, other) for other in (wanted if replacing else wanted[1:])), (
            point
        )
        versions_of[0].save(path)
        assert torch.equal(answer(Purifier.load(path)), wanted[0])
        assert os.listdir(path.parent) == ["a"]


def test_a_full_disk_says_the_bytes_before_anything_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = purifier_of(1), purifier_of(2)
    first.save(tmp_path / "a")
    before = answer(first)

    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskFullError, match=r"wanted \d+ bytes of disk, got \d+ bytes free"):
            second.save(tmp_path / "a")
    assert torch.equal(answer(Purifier.load(tmp_path / "a")), before)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type(usage)(usage.total, usage.used, 100))
    with pytest.raises(DiskFullError, match="got 100 bytes free"):
        second.save(tmp_path / "a")
    model = BayesianModel(nn.Linear(WIDTH, 3), Categorical())
    with pytest.raises(OSError, match=r"need \d+ bytes of disk, got 100 bytes free"):
        Purifier(
            model,
            Noise(0.5),
            torch.zeros(1, model.num_params),
            torch.zeros(9, WIDTH),
            folder=tmp_path / "tables",
        )


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(StoreError, match="wanted an empty folder or a bundle"):
        purifier_of().save(tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "purifier.json").write_text('{"format": 1}')
    with pytest.raises(StoreError, match="an earlier version, without hashes: make it again"):
        Purifier.load(tmp_path / "old")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        purifier_of().save(tmp_path / "file")
    purifier_of().save(tmp_path / "a")
    loaded = Purifier.load(tmp_path / "a", memory_limit=1)
    with pytest.raises(ValueError, match="must not be the one that the purifier reads from"):
        loaded.save(tmp_path / "a")


def test_tables_are_hashed_without_being_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No read while loading from disk is larger than a piece."""
    purifier_of(num=4000).save(tmp_path / "a")
    sizes = []
    original = tables_module.read_at

    def spy(path: Path, descriptor: int, offset: int, size: int) -> bytes:
        sizes.append(size)
        return original(path, descriptor, offset, size)

    monkeypatch.setattr(tables_module, "read_at", spy)
    Purifier.load(tmp_path / "a", memory_limit=1)
    assert max(sizes) <= 4096


def test_features_are_given_again(tmp_path: Path) -> None:
    model = BayesianModel(nn.Linear(WIDTH, 3), Categorical())
    thetas, x = torch.zeros(1, model.num_params), torch.randn(9, WIDTH, generator=generator(1))
    purifier = Purifier(model, Noise(0.5), thetas, x, features=torch.tanh)
    purifier.save(tmp_path / "a")
    assert torch.equal(answer(Purifier.load(tmp_path / "a", features=torch.tanh)), answer(purifier))
    with pytest.raises(ValueError, match="features must be given if and only if"):
        Purifier.load(tmp_path / "a")


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="space cannot be taken here")
def test_the_space_of_a_table_is_taken_at_once(tmp_path: Path) -> None:
    """A file of holes would end the process where the disk is full."""
    DiskRows.create(tmp_path / "table", (2, 1000, 50), torch.float64)
    found = (tmp_path / "table").stat()
    assert found.st_size == 2 * 1000 * 50 * 8
    assert found.st_blocks * 512 >= found.st_size

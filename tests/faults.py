"""Ways to fail: death at any system call that changes the disk, and files made to harm whoever
loads them."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import random
import signal
import struct
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from advbayes.store import archive, write_bundle
from advbayes.store import parts as bundles

CALLS = (
    "open",
    "write",
    "fsync",
    "close",
    "replace",
    "rename",
    "mkdir",
    "unlink",
    "rmdir",
    "ftruncate",
)
MOMENTS = ("before", "halfway", "after")


def forked(action: Callable[[], object]) -> int:
    """Run in a child process; how it ended (0, or minus the signal)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_points(action: Callable[[], object]) -> list[tuple[int, str, str]]:
    """(index, call, moment) for every call with which `action` changes the disk; a write can also
    die halfway."""
    reading, writing = os.pipe()

    def traced() -> None:
        seen: list[str] = []
        _wrap(lambda name, call, args, options: (seen.append(name), call(*args, **options))[1])
        action()
        _ORIGINAL["write"](writing, json.dumps(seen).encode())

    assert forked(traced) == 0
    os.close(writing)
    with os.fdopen(reading) as pipe:
        names = json.load(pipe)
    return [
        (index, name, moment)
        for index, name in enumerate(names)
        for moment in MOMENTS
        if moment != "halfway" or name == "write"
    ]


def killed_at(point: tuple[int, str, str], action: Callable[[], object]) -> bool:
    """Run `action` in a child that is killed (SIGKILL) at a point; whether it got there."""
    index, wanted, moment = point
    left = [index]

    def maybe(
        name: str, call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        left[0] -= 1
        if left[0] != -1:
            return call(*args, **options)
        assert name == wanted
        with suppress(OSError):  # a call may fail as it does in a run that lives
            if moment == "after":
                call(*args, **options)
            elif moment == "halfway":
                call(args[0], args[1][: len(args[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def dying() -> None:
        _wrap(maybe)
        action()

    return forked(dying) == -signal.SIGKILL


_ORIGINAL = {name: getattr(os, name) for name in CALLS}


def _wrap(
    around: Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> None:
    for name, call in _ORIGINAL.items():

        def wrapped(
            *args: Any, _name: str = name, _call: Callable[..., Any] = call, **options: Any
        ) -> Any:
            return around(_name, _call, args, options)

        setattr(os, name, wrapped)


# Hostile bundles. Each carries correct hashes wherever its author could have made them so.


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (os.fspath(self.canary),))


def header(fields: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file with any header."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def sealed(contents: dict[str, bytes], **changes: object) -> tuple[bytes, dict[str, bytes]]:
    """A manifest with a correct seal over any content, and the parts under the names that it
    expects."""
    described = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in contents.items()
    }
    fields = {"format": bundles.FORMAT, "parts": described, "schema": 1, "versions": {}, **changes}
    body = json.dumps(fields, indent=1).encode().removesuffix(b"\n}")
    seal = b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()
    files = {
        bundles.Part(name, hashlib.sha256(data).hexdigest(), len(data)).file: data
        for name, data in contents.items()
    }
    return body + seal, files


def hostile(folder: Path, canary: Path) -> dict[str, Path]:
    """Sixty bundles, by what they try; `canary` is where they would leave a trace."""
    made: dict[str, Path] = {}

    def target(name: str, suffix: str = ".advbayes") -> Path:
        made[name] = folder / f"{len(made):02d}{suffix}"
        return made[name]

    def as_file(name: str, contents: dict[str, bytes], **changes: object) -> None:
        manifest, files = sealed(contents, **changes)
        target(name).write_bytes(archive.pack({"manifest.json": manifest, **files}, name))

    def as_folder(name: str, contents: dict[str, bytes], **changes: object) -> Path:
        manifest, files = sealed(contents, **changes)
        path = target(name, "")
        path.mkdir()
        for file, data in {"manifest.json": manifest, **files}.items():
            (path / file).write_bytes(data)
        return path

    def as_zip(name: str, members: list[tuple[zipfile.ZipInfo, bytes]], tail: bytes = b"") -> None:
        with warnings.catch_warnings(), zipfile.ZipFile(target(name), "w") as file:
            warnings.simplefilter("ignore")
            for info, data in members:
                file.writestr(info, data)
        with made[name].open("ab") as end:
            end.write(tail)

    def member(
        name: str, method: int = zipfile.ZIP_STORED, mode: int = 0o100644
    ) -> zipfile.ZipInfo:
        info = zipfile.ZipInfo(name)
        info.compress_type, info.external_attr = method, mode << 16
        return info

    theta = header({"mean": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    manifest, files = sealed({"posterior.safetensors": theta})
    (part,) = files
    program = pickle.dumps(Payload(canary))
    torch_file = io.BytesIO()
    torch.save(Payload(canary), torch_file)

    # Pickles in disguise
    target("a pickle named bundle").write_bytes(program)
    target("a torch.save file named bundle").write_bytes(torch_file.getvalue())
    as_file("a pickle as tensors", {"posterior.safetensors": program})
    as_file("a torch.save file as tensors", {"posterior.safetensors": torch_file.getvalue()})
    as_file("a pickle as document", {"extra.json": program})
    as_folder("a pickle as part of a folder", {"posterior.safetensors": program})
    path = as_folder("a pickle as manifest", {})
    (path / "manifest.json").write_bytes(program)
    # Names
    as_zip(
        "a member that climbs",
        [(member("manifest.json"), manifest), (member(f"../{canary.name}"), b"x")],
    )
    as_zip(
        "an absolute member",
        [(member("manifest.json"), manifest), (member(os.fspath(canary)), b"x")],
    )
    as_zip(
        "a member with backslashes",
        [(member("manifest.json"), manifest), (member(f"..\\{canary.name}"), b"x")],
    )
    as_zip(
        "a link as member",
        [(member("manifest.json"), manifest), (member(part, mode=0o120777), b"/etc/passwd")],
    )
    as_zip(
        "a member twice",
        [(member("manifest.json"), manifest), (member(part), theta), (member(part), theta)],
    )
    as_file(
        "a manifest that names a path",
        {},
        parts={f"../{canary.name}.json": {"bytes": 2, "sha256": 64 * "0"}},
    )
    as_folder(
        "a manifest that names a device",
        {},
        parts={"/dev/zero": {"bytes": 2**40, "sha256": 64 * "0"}},
    )
    path = as_folder("a part that is a link", {"posterior.safetensors": theta})
    (path / part).unlink()
    (path / part).symlink_to("/dev/zero")
    path = as_folder("a part that is a pipe", {"posterior.safetensors": theta})
    (path / part).unlink()
    os.mkfifo(path / part)
    path = as_folder("a manifest that is a link", {})
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to("/etc/passwd")
    # Sizes
    as_zip("a zip bomb", [(member("manifest.json", zipfile.ZIP_DEFLATED), bytes(1 << 28))])
    nested = io.BytesIO()
    with zipfile.ZipFile(nested, "w", zipfile.ZIP_DEFLATED) as inner:
        inner.writestr("manifest.json", bytes(1 << 26))
    as_zip(
        "a bomb within a bomb", [(member("manifest.json", zipfile.ZIP_DEFLATED), nested.getvalue())]
    )
    as_zip("five thousand members", [(member(f"{index}"), b"") for index in range(5_000)])
    as_zip(
        "bytes after the end",
        [(member("manifest.json"), manifest), (member(part), theta)],
        tail=program,
    )
    path = as_folder("a sparse terabyte", {"posterior.safetensors": theta})
    os.truncate(path / part, 1 << 40)
    path = as_folder(
        "half a sparse gigabyte with a false hash",
        {},
        parts={"extra.json": {"bytes": 1 << 29, "sha256": 64 * "0"}},
    )
    (path / f"extra.{16 * '0'}.json").touch()
    os.truncate(path / f"extra.{16 * '0'}.json", 1 << 29)
    as_file("a header of 2^63 bytes", {"posterior.safetensors": header({}, length=2**63)})
    as_file(
        "a header of two megabytes",
        {"posterior.safetensors": header(b"{" + (2 << 20) * b" " + b"}")},
    )
    huge = {"mean": {"dtype": "F32", "shape": [2**31, 2**31], "data_offsets": [0, 2**64]}}
    as_file("a tensor of 2^62 numbers", {"posterior.safetensors": header(huge)})
    shared = {
        f"t{i}": {"dtype": "F32", "shape": [1 << 18], "data_offsets": [0, 1 << 20]}
        for i in range(9000)
    }
    as_file(
        "nine thousand tensors in one place",
        {"posterior.safetensors": header(shared, bytes(1 << 20))},
    )
    as_file("JSON a million deep", {"extra.json": 1_000_000 * b"[" + 1_000_000 * b"]"})
    as_file(
        "JSON of two megabytes, all dictionaries",
        {"extra.json": b"[" + 290_000 * b'{"":0},' + b"NaN]"},
    )
    as_file("a number of a million digits", {"extra.json": 1_000_000 * b"9"})
    for name, contents in hostile_models().items():
        as_file(name, contents)
    path = as_folder(
        "half a gigabyte of a part that no model has",
        {},
        parts={"x.json": {"bytes": 1 << 29, "sha256": 64 * "0"}},
    )
    (path / f"x.{16 * '0'}.json").touch()
    os.truncate(path / f"x.{16 * '0'}.json", 1 << 29)
    return made


def hostile_models() -> dict[str, dict[str, bytes]]:
    """The parts of models whose settings and shapes ask for more than the file holds, or for what
    no layer can be."""
    linear = {"kind": "Linear", "in_features": 2, "out_features": 2, "bias": True}
    weights = {"weight": (2, 2), "bias": (2,)}
    made: dict[str, dict[str, bytes]] = {}

    def tensors(shapes: dict[str, tuple[int, ...]]) -> bytes:
        """Zeros of these shapes; an axis of length 0 makes any other free."""
        fields, offset = {}, 0
        for key, shape in shapes.items():
            size = 4 * math.prod(shape)
            fields[key] = {
                "dtype": "F32",
                "shape": list(shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        return header(fields, bytes(offset))

    def model(
        name: str,
        *,
        net: object = linear,
        state: dict[str, tuple[int, ...]] | None = None,
        likelihood: object = None,
        kind: str = "PointMass",
        posterior: dict[str, tuple[int, ...]] | None = None,
        scale: tuple[int, ...] | None = None,
        **documents: object,
    ) -> None:
        shapes = weights if state is None else state
        described = {
            "net": net,
            "likelihood": likelihood or {"kind": "Categorical"},
            "prior_scale": documents.pop("prior_scale", 1.0),
            "parameters": [[key, list(shape)] for key, shape in shapes.items()],
        }
        contents = {"model.json": described, "posterior.json": {"kind": kind}}
        contents |= {f"{key}.json": document for key, document in documents.items()}
        made[name] = {key: json.dumps(document).encode() for key, document in contents.items()}
        made[name]["net.safetensors"] = tensors(shapes)
        made[name]["posterior.safetensors"] = tensors(
            {"theta": (6,)} if posterior is None else posterior
        )
        if scale is not None:
            made[name]["channel.safetensors"] = tensors({"s": scale})

    # Posteriors whose shapes allocate
    low = {"mu": (6,), "rho": (6,)}
    model("an empty factor of rank 2^25", kind="LowRank", posterior={**low, "factor": (0, 1 << 25)})
    model("a factor of rank 0", kind="LowRank", posterior={**low, "factor": (6, 0)})
    model("a factor on its side", kind="LowRank", posterior={**low, "factor": (2, 6)})
    model("a factor of three axes", kind="LowRank", posterior={**low, "factor": (6, 1, 1)})
    model("2^40 members of nothing", kind="Ensemble", posterior={"thetas": (1 << 40, 0)})
    model("2^40 samples of nothing", kind="Samples", posterior={"thetas": (1 << 40, 0)})
    model("an empty mean", kind="MeanField", posterior={"mu": (0,), "rho": (0,)})
    model("a theta of two axes", posterior={"theta": (6, 1)})
    # Layers
    flat = {"kind": "Sequential", "layers": [[f"{i}", {"kind": "Tanh"}] for i in range(30_000)]}
    model("thirty thousand layers", net=flat)
    nests = [
        [f"{i}", {"kind": "Sequential", "layers": [["0", {"kind": "Tanh"}]] * 9}]
        for i in range(3_000)
    ]
    model("three thousand nests of nine layers", net={"kind": "Sequential", "layers": nests})
    deep: object = linear
    for _ in range(12):
        deep = {"kind": "Sequential", "layers": [["0", deep]]}
    model("layers deeper than documents go", net=deep)
    model(
        "a layer of width 2^40 over nothing",
        net={**linear, "in_features": 0, "out_features": 1 << 40, "bias": False},
        state={"weight": (1 << 40, 0)},
    )
    model("a width that is text", net={**linear, "in_features": "2"})
    model("a width that is true", net={**linear, "in_features": True})
    model("a width that is a fraction", net={**linear, "in_features": 2.0})
    model("a bias that is text", net={**linear, "bias": "yes"})
    model(
        "an eps that is text",
        net={
            "kind": "GroupNorm",
            "num_groups": 1,
            "num_channels": 2,
            "eps": "1e-5",
            "affine": True,
        },
    )
    model("a dropout of lists", net={"kind": "Dropout", "p": [0.5], "inplace": False})
    model("a threshold that is nothing", net={"kind": "Softplus", "beta": 1.0, "threshold": None})
    model(
        "a hundred thousand axes",
        net={
            "kind": "LayerNorm",
            "normalized_shape": [1] * 100_000,
            "eps": 1e-5,
            "elementwise_affine": True,
        },
    )
    conv = {
        "kind": "Conv2d",
        "in_channels": 1,
        "out_channels": 1,
        "kernel_size": [1, 1],
        "stride": [1, 1],
        "padding": [0, 0],
        "dilation": [1, 1],
        "groups": 1,
        "bias": True,
        "padding_mode": "zeros",
    }
    model("a kernel of text", net={**conv, "kernel_size": ["1", "1"]})
    model("a padding by name of a function", net={**conv, "padding_mode": "os.system"})
    model(
        "a generator of 2^40 pixels",
        net={"kind": "ConvGenerator", "num_classes": 2, "channels": 1, "size": 1 << 20},
    )
    # Likelihoods, channels, documents
    model(
        "2^40 learned scales",
        likelihood={"kind": "Gaussian", "scale": 1.0, "learned": True, "num_outputs": 1 << 40},
    )
    model("a prior of settings", prior_scale={"kind": "Noise", "sigma": 1.0})
    noise = {"kind": "Noise", "sigma": 0.1}
    model(
        "fifty thousand channels",
        channel={"kind": "Mixture", "weights": [0.0] * 50_000, "channels": [noise] * 50_000},
    )
    ball = {"kind": "L2", "eps": 1.0, "scale": {"kind": "tensor", "name": "s"}}
    stage = [{"kind": "loss", "name": "nll"}, 1]
    attack = {"kind": "PGD", "ball": ball, "stages": [stage]}
    model(
        "2^40 scales of nothing",
        channel={"kind": "AttackChannel", "attack": attack},
        scale=(1 << 40, 0),
    )
    long = {**attack, "ball": {"kind": "L2", "eps": 1.0}, "stages": [stage] * 40_000}
    model("forty thousand stages", channel={"kind": "AttackChannel", "attack": long})
    many = [{"": 0}] * 60_000
    model(
        "six large documents",
        audit=many,
        extra=many,
        class_names=many,
        threat_model=many,
        channel=many,
    )
    return made


def small_bundle(path: Path, version: int = 0) -> None:
    """A bundle of four parts whose every number tells its version."""
    tensors = {
        "theta": {
            "mean": torch.full((17,), float(version)),
            "rho": torch.full((17,), float(version)),
        },
        "moments": {"step": torch.tensor(version)},
    }
    write_bundle(
        path, tensors, {"config": {"version": version}, "state": {"history": [version] * 5}}
    )


def small_version(loaded: tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]) -> int:
    """The version of a small bundle, having checked that all of it is of that version."""
    tensors, documents = loaded
    numbers = {
        *tensors["theta"]["mean"].tolist(),
        *tensors["theta"]["rho"].tolist(),
        tensors["moments"]["step"].item(),
        documents["config"]["version"],
        *documents["state"]["history"],
    }
    assert len(numbers) == 1, f"a mixed bundle: {numbers}"
    return int(numbers.pop())


# Random bundles, their hashes right, so that what lies behind the hashes is reached


def mutated(contents: dict[str, bytes], draw: random.Random) -> dict[str, bytes]:
    """The parts of a bundle with one to three random changes to settings or bytes."""
    changed = dict(contents)
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(sorted(changed))
        if name.endswith(".json") and draw.random() < 0.7:
            changed[name] = _mutated_document(changed[name], draw)
        else:
            changed[name] = _mutated_bytes(changed[name], draw)
    return changed


def _mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    place, size = draw.randrange(len(data) + 1), draw.choice((0, 1, 8, 64))
    # The header of a tensor file is where a change tells.
    place = min(place, draw.choice((8, 400, len(data))))
    return data[:place] + draw.randbytes(draw.choice((0, size, 1, 4))) + data[place + size :]


def _mutated_document(data: bytes, draw: random.Random) -> bytes:
    try:
        document = json.loads(data)
    except ValueError:
        return _mutated_bytes(data, draw)
    junk: list[Any] = [
        None,
        True,
        -1,
        0,
        2**62,
        1e300,
        -0.5,
        "",
        "inf",
        "nll",
        "../x",
        [],
        {},
        [[]],
        {"kind": "L2"},
        "é" * 99,
    ]
    junk += [
        {"kind": "tensor", "name": "x"},
        {"kind": "number", "value": "inf"},
        {"kind": "net", "net": None},
        ["x", 1],
    ]
    junk += [
        {"kind": kind}
        for kind in (
            "Mixture",
            "PGD",
            "Noise",
            "Learned",
            "Sequential",
            "Linear",
            "MeanField",
            "Samples",
        )
    ]
    spots: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            spots.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    if not isinstance(document, (dict, list)) or not document:
        return json.dumps(draw.choice(junk)).encode()
    walk(document)
    node, key = draw.choice(spots)
    action = draw.randrange(4)
    if action == 0:
        del node[key]
    elif action == 1 and isinstance(node, dict):
        node[draw.choice(["more", "kind", "eps", "weights"])] = draw.choice(junk)
    elif action == 2:
        other, place = draw.choice(spots)
        node[key] = (
            json.loads(json.dumps(other[place]))
            if place in other or isinstance(other, list)
            else None
        )
    else:
        node[key] = draw.choice(junk)
    return json.dumps(document).encode()

"""`load_dataset`: a built-in set by name, from a local folder or downloaded once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from advbayes.checks import InputError
from advbayes.datasets.dataset import Dataset, Provenance, split_rows
from advbayes.datasets.errors import INSTALL, DataError, problem
from advbayes.datasets.fetching import Progress, fetch_source
from advbayes.datasets.formats import parse_cifar, parse_idx, values_sha256
from advbayes.datasets.places import cache_folder, find_contents, missing, places, read_contents
from advbayes.datasets.scaling import Standardize
from advbayes.datasets.sources import SOURCES, Source
from advbayes.datasets.tables import parse_table

_DIGITS = tuple("0123456789")
_CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_PHOTOGRAPHS = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_HOUSING = (
    "longitude",
    "latitude",
    "housingMedianAge",
    "totalRooms",
    "totalBedrooms",
    "population",
    "households",
    "medianIncome",
    "medianHouseValue",
)
_EMBEDDED = {
    "digits": "462f423d6c34198dde809c6f8f062af926a9d6eafa19e42ab4b7d5e4bf62f3bf",
    "diabetes": "b1d09226473a78a690c3d876e376e9469a094baafbb5c24b1262d465c67144c3",
}
_OFFICIAL_SPLIT = ("mnist", "fashion-mnist", "cifar10")


@dataclass(frozen=True)
class _Options:
    seed: int
    test_fraction: float
    target: str | None


def names() -> tuple[str, ...]:
    """The built-in data sets.

    >>> names()
    ('mnist', 'fashion-mnist', 'cifar10', 'wine', 'wine-white', 'energy', 'california', 'digits', 'diabetes')
    """  # noqa: E501
    return (*SOURCES, *_EMBEDDED)


def load_dataset(
    name: str,
    root: str
    | Path
    | None = None,  # the only folder to look in; absent: ADVBAYES_DATA, then the cache
    *,
    download: bool | None = None,  # absent: what is missing is downloaded unless a root was given
    mirror: str
    # an address to download from instead; absent: ADVBAYES_MIRROR, or the official ones
    | None = None,
    seed: int = 0,  # of the split, for sets without an official one
    test_fraction: float | None = None,  # the same; absent: 0.2
    target: str | None = None,  # energy: "Y1" (heating, the default), "Y2" (cooling) or "both"
    verify: bool
    | None = None,  # True: published content only; False: any content of the right form
    progress: Progress | None = None,  # called with (file, bytes so far, bytes in all or None)
) -> Dataset:
    """A built-in data set, its content compared with the published SHA-256 on every load.

    >>> load_dataset("diabetes")
    Dataset('diabetes', regression, 354 train, 88 test, x (10,), target progression)
    """
    if name not in names():
        near = difflib.get_close_matches(str(name), names(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"name must be one of {', '.join(map(repr, names()))}, got {name!r}{hint}")
    if test_fraction is not None and name in _OFFICIAL_SPLIT:
        raise InputError(
            f"test_fraction must be left out for {name}, which has an official test set, got "
            f"{test_fraction}"
        )
    if target is not None and (name != "energy" or target not in ("Y1", "Y2", "both")):
        raise InputError(
            f"target must be 'Y1', 'Y2' or 'both' for energy and left out otherwise, got "
            f"{target!r} for {name}"
        )
    options = _Options(seed, 0.2 if test_fraction is None else test_fraction, target)
    if name in _EMBEDDED:
        return _embedded(name, options)
    source = SOURCES[name]
    mirror = mirror if mirror is not None else os.environ.get("ADVBAYES_MIRROR") or None
    files = _files(source, root, root is None if download is None else download, mirror, progress)
    contents, provenance = read_contents(source, files, verify)
    return _READERS[name](source, contents, provenance, options)


def find_dataset(name: str, root: str | Path | None = None) -> Path | None:
    """The folder that has all of a set's files, without reading them; None if none has, or if it
    needs none.

    >>> find_dataset("mnist", "/nowhere") is None
    True
    """
    if name not in SOURCES:
        return None
    for place in places(root):
        paths = find_contents(SOURCES[name], place)
        if len(paths) == len(SOURCES[name].contents):
            return next(iter(paths.values())).parent
    return None


def _files(
    source: Source,
    root: str | Path | None,
    download: bool,
    mirror: str | None,
    progress: Progress | None,
) -> dict[str, Path]:
    looked = places(root)
    best: dict[str, Path] = {}
    for place in looked:
        paths = find_contents(source, place)
        if len(paths) == len(source.contents):
            return paths
        best = max(best, paths, key=len)
    if not download:
        raise missing(source, looked, best)
    home = looked[0] if root is not None else cache_folder()
    fetch_source(source, home, mirror=mirror, progress=progress)
    paths = find_contents(source, home)
    if len(paths) < len(source.contents):
        raise missing(source, (home,), paths)
    return paths


def _idx_images(
    source: Source, contents: dict[str, bytes], provenance: Provenance, _: _Options
) -> Dataset:
    arrays = [parse_idx(contents[content.name], content.name) for content in source.contents]
    for (images, labels), content in zip(
        (arrays[:2], arrays[2:]), source.contents[::2], strict=True
    ):
        if images.ndim != 3 or images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
            got = f"{images.shape} and labels {labels.shape}"
            raise DataError(
                problem(content.name, "N images of 28x28 and N labels", got, "Fetch the set again.")
            )
    names = _DIGITS if source.name == "mnist" else _CLOTHES
    x_train, x_test = (_pixels(images[:, None]) for images in arrays[::2])
    y_train, y_test = (_labels(labels) for labels in arrays[1::2])
    return _images(source.name, (x_train, y_train, x_test, y_test), names, provenance)


def _cifar(
    source: Source, contents: dict[str, bytes], provenance: Provenance, __: _Options
) -> Dataset:
    batches = [parse_cifar(contents[content.name], content.name) for content in source.contents]
    parts = [
        (
            np.concatenate([images for images, _ in part]),
            np.concatenate([labels for _, labels in part]),
        )
        for part in (batches[:-1], batches[-1:])
    ]
    for part, (_, labels) in zip(("training", "test"), parts, strict=True):
        counts = np.bincount(labels, minlength=10)
        if counts.min() != counts.max():
            got = f"{counts.tolist()}"
            raise DataError(
                problem(
                    f"cifar10's {part} batches",
                    "as many images of each class",
                    got,
                    "Fetch the set again.",
                )
            )
    (train, y_train), (test, y_test) = parts
    tensors = (_pixels(train), _labels(y_train), _pixels(test), _labels(y_test))
    return _images(source.name, tensors, _PHOTOGRAPHS, provenance)


def _tabular(
    source: Source, contents: dict[str, bytes], provenance: Provenance, options: _Options
) -> Dataset:
    content = source.contents[0]
    header = _HOUSING if source.name == "california" else None
    table = parse_table(contents[content.name], content.name, header=header)
    wanted = {"energy": ("Y1", "Y2"), "california": ("medianHouseValue",)}.get(
        source.name, ("quality",)
    )
    absent = [column for column in wanted if column not in table.columns]
    if absent:
        raise DataError(
            problem(
                content.name,
                f"a column {absent[0]!r}",
                f"{', '.join(table.columns)[:300]}",
                source.hint,
            )
        )
    features = tuple(column for column in table.columns if column not in wanted)
    targets = wanted if options.target == "both" else (options.target or wanted[0],)
    columns = list(table.columns)
    x = torch.from_numpy(
        table.numbers[:, [columns.index(name) for name in features]].astype(np.float32)
    )
    y = torch.from_numpy(
        table.numbers[:, [columns.index(name) for name in targets]].astype(np.float32)
    )
    return _regression(
        source.name, x, y if len(targets) > 1 else y[:, 0], features, targets, provenance, options
    )


def _embedded(name: str, options: _Options) -> Dataset:
    try:
        import sklearn
        from sklearn import datasets
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"the {name} set comes with scikit-learn: {INSTALL}") from None
    bunch = datasets.load_digits() if name == "digits" else datasets.load_diabetes(scaled=False)
    values = np.column_stack([bunch.data, bunch.target]).astype(np.float64)
    digest = values_sha256(values, 0 if name == "digits" else 4)
    where = f"scikit-learn {sklearn.__version__}"
    if digest != _EMBEDDED[name]:
        wanted = f"the numbers with SHA-256 {_EMBEDDED[name]}"
        raise DataError(problem(f"{name} of {where}", wanted, digest, "Reinstall scikit-learn."))
    provenance = Provenance(where, {name: digest}, verified=True, note="the published numbers")
    if name == "diabetes":
        x, y = (torch.from_numpy(array.astype(np.float32)) for array in (bunch.data, bunch.target))
        features = tuple(str(feature) for feature in bunch.feature_names)
        return _regression(name, x, y, features, ("progression",), provenance, options)
    x = torch.from_numpy((bunch.images[:, None] / 16).astype(np.float32))
    y = _labels(bunch.target)
    train, test = split_rows(
        len(x), seed=options.seed, test_fraction=options.test_fraction, labels=y
    )
    return _images(name, (x[train], y[train], x[test], y[test]), _DIGITS, provenance)


def _images(
    name: str,
    parts: tuple[Tensor, Tensor, Tensor, Tensor],
    class_names: tuple[str, ...],
    provenance: Provenance,
) -> Dataset:
    return Dataset(
        name,
        "classification",
        *parts,
        class_names=class_names,
        box=(0.0, 1.0),
        provenance=provenance,
    )


def _regression(
    name: str,
    x: Tensor,
    y: Tensor,
    features: tuple[str, ...],
    targets: tuple[str, ...],
    provenance: Provenance,
    options: _Options,
) -> Dataset:
    train, test = split_rows(len(x), seed=options.seed, test_fraction=options.test_fraction)
    return Dataset(
        name,
        "regression",
        x[train],
        y[train],
        x[test],
        y[test],
        feature_names=features,
        target_names=targets,
        scaling=Standardize.fit(x[train], y[train]),
        provenance=provenance,
    )


def _pixels(images: npt.NDArray[np.uint8]) -> Tensor:
    scaled = images.astype(np.float32)
    scaled /= 255
    return torch.from_numpy(scaled)


def _labels(labels: npt.NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))


_READERS: dict[str, Callable[[Source, dict[str, bytes], Provenance, _Options], Dataset]] = {
    "mnist": _idx_images,
    "fashion-mnist": _idx_images,
    "cifar10": _cifar,
    "wine": _tabular,
    "wine-white": _tabular,
    "energy": _tabular,
    "california": _tabular,
}

"""`load_dataset`: a built-in set by name, from a local folder or downloaded once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from advbayes.checks import InputError, extra, nearest
from advbayes.datasets import fetching
from advbayes.datasets.dataset import Dataset, Provenance, split_rows
from advbayes.datasets.errors import DataError
from advbayes.datasets.fetching import Downloading
from advbayes.datasets.formats import parse_cifar, parse_idx, values_sha256
from advbayes.datasets.scaling import Standardize
from advbayes.datasets.sources import SOURCES, Source
from advbayes.datasets.tables import parse_table

_EMBEDDED = {
    "digits": "462f423d6c34198dde809c6f8f062af926a9d6eafa19e42ab4b7d5e4bf62f3bf",
    "diabetes": "b1d09226473a78a690c3d876e376e9469a094baafbb5c24b1262d465c67144c3",
}
_AGAIN = "Fetch the set again."
Arrays = list[npt.NDArray[Any]]  # training images and labels, test images and labels


def names() -> tuple[str, ...]:
    """The built-in data sets.

    >>> names()
    ('mnist', 'fashion-mnist', 'cifar10', 'wine', 'wine-white', 'energy', 'california', 'digits', 'diabetes')
    """  # noqa: E501
    return (*SOURCES, *_EMBEDDED)


def load_dataset(
    name: str,
    # the only folder to look in; absent: ADVBAYES_DATA, then the cache
    root: str | Path | None = None,
    *,
    download: bool | None = None,  # absent: what is missing is downloaded unless a root was given
    # an address to download from instead; absent: ADVBAYES_MIRROR, or the official ones
    mirror: str | None = None,
    seed: int = 0,  # of the split, for sets without an official one
    test_fraction: float | None = None,  # the same; absent: 0.2
    target: str | None = None,  # energy: "Y1" (heating, the default), "Y2" (cooling) or "both"
    # True: published content only; False: any content of the right form
    verify: bool | None = None,
    progress: Downloading | None = None,  # called with (file, bytes so far, bytes in all or None)
) -> Dataset:
    """A built-in data set, its content compared with the published SHA-256 on every load.

    >>> load_dataset("diabetes")
    Dataset('diabetes', regression, 354 train, 88 test, x (10,), target progression)
    """
    if name not in names():
        known, hint = ", ".join(map(repr, names())), nearest(name, names())
        raise InputError(f"name must be one of {known}, got {name!r}{hint}")
    if test_fraction is not None and name in SOURCES and SOURCES[name].class_names:
        wanted = f"test_fraction must be left out for {name}, which has an official test set"
        raise InputError(f"{wanted}, got {test_fraction}")
    if target is not None and (name != "energy" or target not in ("Y1", "Y2", "both")):
        wanted = "target must be 'Y1', 'Y2' or 'both' for energy and left out otherwise"
        raise InputError(f"{wanted}, got {target!r} for {name}")
    fraction = 0.2 if test_fraction is None else test_fraction
    if name in _EMBEDDED:
        return _embedded(name, seed, fraction)
    source = SOURCES[name]
    mirror = mirror if mirror is not None else os.environ.get("ADVBAYES_MIRROR") or None
    looked = fetching.places(root)
    paths = fetching.find_contents(source, looked)
    if len(paths) < len(source.contents) and (root is None if download is None else download):
        looked = looked[:1] if root is not None else (fetching.cache_folder(),)
        fetching.fetch_source(source, looked[0], mirror=mirror, progress=progress)
        paths = fetching.find_contents(source, looked)
    if len(paths) < len(source.contents):
        raise fetching.missing(source, looked, paths)
    contents, provenance = fetching.read_contents(source, paths, verify)
    if source.class_names:
        arrays = _cifar(source, contents) if name == "cifar10" else _idx(source, contents)
        return _images(name, source.class_names, arrays, 255, provenance)
    content = source.contents[0]
    table = parse_table(contents[content.name], content.name, header=source.header)
    if absent := [column for column in source.targets if column not in table.columns]:
        got = f"{', '.join(table.columns)[:300]}"
        raise DataError(content.name, f"a column {absent[0]!r}", got, source.hint)
    targets = source.targets if target == "both" else (target or source.targets[0],)
    features = tuple(column for column in table.columns if column not in source.targets)
    x, y = table.select(features), table.select(targets)
    y = y if target == "both" else y[:, 0]
    return _regression(name, x, y, features, targets, provenance, seed, fraction)


def find_dataset(name: str, root: str | Path | None = None) -> Path | None:
    """The folder that has all of a set's files, without reading them; None if none has, or if it
    needs none.

    >>> find_dataset("mnist", "/nowhere") is None
    True
    """
    if name not in SOURCES:
        return None
    paths = fetching.find_contents(SOURCES[name], fetching.places(root))
    whole = len(paths) == len(SOURCES[name].contents)
    return next(iter(paths.values())).parent if whole else None


def _idx(source: Source, contents: dict[str, bytes]) -> Arrays:
    arrays = [parse_idx(contents[content.name], content.name) for content in source.contents]
    for first in (0, 2):
        images, labels = arrays[first : first + 2]
        if images.ndim != 3 or images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
            file, got = source.contents[first].name, f"{images.shape} and labels {labels.shape}"
            raise DataError(file, "N images of 28x28 and N labels", got, _AGAIN)
    return [array[:, None] if array.ndim == 3 else array for array in arrays]


def _cifar(source: Source, contents: dict[str, bytes]) -> Arrays:
    batches = [parse_cifar(contents[content.name], content.name) for content in source.contents]
    arrays = []
    for part, chosen in (("training", batches[:-1]), ("test", batches[-1:])):
        images, labels = map(np.concatenate, zip(*chosen, strict=True))
        counts = np.bincount(labels, minlength=10)
        if counts.min() != counts.max():
            file, wanted = f"cifar10's {part} batches", "as many images of each class"
            raise DataError(file, wanted, f"{counts.tolist()}", _AGAIN)
        arrays += [images, labels]
    return arrays


def _embedded(name: str, seed: int, test_fraction: float) -> Dataset:
    with extra(f"the {name} set comes with scikit-learn", "data"):
        import sklearn
        from sklearn import datasets
    bunch = datasets.load_digits() if name == "digits" else datasets.load_diabetes(scaled=False)
    values = np.column_stack([bunch.data, bunch.target]).astype(np.float64)
    digest = values_sha256(values, 0 if name == "digits" else 4)
    where = f"scikit-learn {sklearn.__version__}"
    if digest != _EMBEDDED[name]:
        wanted = f"the numbers with SHA-256 {_EMBEDDED[name]}"
        raise DataError(f"{name} of {where}", wanted, digest, "Reinstall scikit-learn.")
    provenance = Provenance(where, {name: digest}, verified=True, note="the published numbers")
    if name == "diabetes":
        features, targets = tuple(map(str, bunch.feature_names)), ("progression",)
        table = bunch.data, bunch.target, features, targets
        return _regression(name, *table, provenance, seed, test_fraction)
    train, test = split_rows(
        len(bunch.target), seed=seed, test_fraction=test_fraction, labels=torch.tensor(bunch.target)
    )
    images, labels = bunch.images[:, None], bunch.target
    arrays = [images[train], labels[train], images[test], labels[test]]
    return _images(name, tuple("0123456789"), arrays, 16, provenance)


def _images(
    name: str, class_names: tuple[str, ...], arrays: Arrays, white: float, provenance: Provenance
) -> Dataset:
    x_train, x_test = (
        torch.from_numpy(each.astype(np.float32)).div_(white) for each in arrays[::2]
    )
    y_train, y_test = (torch.from_numpy(each.astype(np.int64)) for each in arrays[1::2])
    return Dataset(
        name,
        "classification",
        *(x_train, y_train, x_test, y_test),
        class_names=class_names,
        box=(0.0, 1.0),
        provenance=provenance,
    )


def _regression(
    name: str,
    x: npt.NDArray[np.float64],  # (N, F)
    y: npt.NDArray[np.float64],  # (N,) or (N, D)
    features: tuple[str, ...],
    targets: tuple[str, ...],
    provenance: Provenance,
    seed: int,
    test_fraction: float,
) -> Dataset:
    train, test = split_rows(len(x), seed=seed, test_fraction=test_fraction)
    inputs, outputs = (torch.from_numpy(values.astype(np.float32)) for values in (x, y))
    return Dataset(
        name,
        "regression",
        *(inputs[train], outputs[train], inputs[test], outputs[test]),
        feature_names=features,
        target_names=targets,
        scaling=Standardize.fit(inputs[train], outputs[train]),
        provenance=provenance,
    )

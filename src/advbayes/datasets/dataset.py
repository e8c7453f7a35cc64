"""What a loaded data set is, and how rows without an official split are divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from advbayes.checks import InputError, InputTypeError, choice, number
from advbayes.datasets.encoding import Encoding
from advbayes.datasets.errors import DataError
from advbayes.datasets.scaling import Standardize
from advbayes.seeds import generator_for


@dataclass(frozen=True)
class Provenance:
    """Where the numbers came from: each content's SHA-256, and whether it is the published one."""

    source: str
    sha256: Mapping[str, str] = field(default_factory=dict)
    verified: bool = False
    note: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A task's training and test rows: images in [0, 1] as (N, C, H, W), or a table in its raw
    units as (N, F).

    >>> x, y = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
    >>> Dataset("toy", "classification", x, y, x[:1], y[:1], class_names=("no", "yes"))
    Dataset('toy', classification, 4 train, 1 test, x (2,), 2 classes)
    """

    name: str
    task: str  # "classification" or "regression"
    x_train: Tensor  # (N, *event), float32
    y_train: Tensor  # (N,) int64, or float32 of shape (N,) or (N, D)
    x_test: Tensor
    y_test: Tensor
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    target_names: tuple[str, ...] = ()
    box: tuple[float, float] | None = None
    scaling: Standardize | None = None  # fitted on the training rows
    encoding: Encoding | None = None  # the same: how text and missing values became numbers
    provenance: Provenance = Provenance("memory")

    def __post_init__(self) -> None:
        choice("task", self.task, ("classification", "regression"))
        self._check("x_train", self.x_train, "y_train", self.y_train)
        self._check("x_test", self.x_test, "y_test", self.y_test)
        parts = (self.x_train, self.x_test, self.y_train, self.y_test)
        x_train, x_test, y_train, y_test = (tuple(part.shape[1:]) for part in parts)
        if x_train != x_test or y_train != y_test:
            got = f"x {x_train} and {x_test}, y {y_train} and {y_test}"
            raise DataError(self.name, "train and test rows of one shape", got)

    def _check(self, x_name: str, x: Tensor, y_name: str, y: Tensor) -> None:
        classes = self.task == "classification"
        if x.dtype != torch.float32 or x.ndim < 2:
            raise InputTypeError(f"{x_name} must be a float32 tensor (N, *event)", got=x)
        dtype, axes = (torch.int64, (1,)) if classes else (torch.float32, (1, 2))
        if y.dtype != dtype or y.ndim not in axes:
            raise InputTypeError(f"{y_name} must be a {dtype} tensor for {self.task}", got=y)
        if x.numel() == 0 or y.numel() == 0 or len(x) != len(y):
            wanted = f"as many rows in {x_name} as in {y_name}, at least one"
            raise DataError(self.name, wanted, f"shapes {tuple(x.shape)} and {tuple(y.shape)}")
        for name, value in ((x_name, x), (y_name, y)):
            if not bool(value.isfinite().all()):
                raise DataError(self.name, f"finite numbers in {name}", "NaN or infinity")
        low, high = (float(edge) for edge in x.aminmax())
        if self.box is not None and not (self.box[0] <= low and high <= self.box[1]):
            raise DataError(self.name, f"{x_name} within {self.box}", f"{low:g} to {high:g}")
        first, last = (int(edge) for edge in y.aminmax())
        if classes and not (first >= 0 and last < len(self.class_names)):
            wanted = f"{y_name} from 0 to {len(self.class_names) - 1}"
            raise DataError(self.name, wanted, f"{first} to {last}")

    @property
    def mask(self) -> Tensor | None:
        """Which features an attacker may change: the numbers of an encoded table; None: all."""
        return None if self.encoding is None else self.encoding.mask

    @property
    def indicators(self) -> tuple[tuple[int, int, float], ...] | None:
        """Which standardised feature says where which other is missing, as a ball takes it."""
        return None if self.encoding is None else self.encoding.indicators(self.scaling)

    def __repr__(self) -> str:
        event = tuple(self.x_train.shape[1:])
        outputs = f"target {', '.join(self.target_names)}"
        if self.class_names:
            outputs = f"{len(self.class_names)} classes"
        rows = f"{len(self.x_train)} train, {len(self.x_test)} test"
        return f"Dataset({self.name!r}, {self.task}, {rows}, x {event}, {outputs})"


def class_weights(y: Tensor, num_classes: int | None = None) -> tuple[float, ...]:
    """Weights for `ChannelELBO(class_weight=...)` that make every class count alike: N / (C N_c),
    whose mean over rows is 1.

    >>> class_weights(torch.tensor([0, 0, 0, 1]))
    (0.6666666666666666, 2.0)
    """
    counts = torch.bincount(y, minlength=num_classes or 0)
    if y.ndim != 1 or not len(y) or int(counts.min()) == 0:
        wanted = "y must hold at least one row of every class"
        raise InputError(f"{wanted}, got counts {counts.tolist()}")
    return tuple(len(y) / (len(counts) * count) for count in counts.tolist())


def split_rows(
    num: int,
    *,
    seed: int = 0,
    test_fraction: float = 0.2,
    labels: Tensor | None = None,  # (N,): each class is then divided in the same proportion
) -> tuple[Tensor, Tensor]:
    """Training and test row numbers: a shuffle by the seed and the number of rows alone.

    >>> train, test = split_rows(10, seed=1)
    >>> len(train), len(test), sorted(torch.cat([train, test]).tolist()) == list(range(10))
    (8, 2, True)
    """
    number("test_fraction", test_fraction, low=0, high=1, open_low=True, open_high=True)
    if num < 2:
        raise DataError("the data", "at least 2 rows, to train and to test on", f"{num}")
    order = torch.randperm(num, generator=generator_for(seed, "datasets/split"))
    if labels is None:
        cut = min(max(1, round(num * test_fraction)), num - 1)
        return order[cut:], order[:cut]
    test = torch.zeros(num, dtype=torch.bool)
    for label in torch.unique(labels):
        members = order[labels[order] == label]
        test[members[: round(len(members) * test_fraction)]] = True
    if not bool(test.any()):  # classes too small to divide: still one row to test on
        test[order[0]] = True
    return order[~test[order]], order[test[order]]

"""What is odd about a user's table, and settings that change nothing, each said with the reason."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import compress

import torch

from advbayes.checks import joined
from advbayes.datasets import Dataset
from advbayes.datasets.tables import MISSING, finite_number
from advbayes.runs.building import Prepared, network_kind
from advbayes.runs.config import RunConfig

REPEATED = 0.05  # of the test rows: a larger share with the features of a training row
# rows of a class that is remarked on (features, repeated rows), of a table that is no sketch
FEW, ENOUGH = 5, 50
_AMOUNT = re.compile(r"[$€£¥]?\s*[-+]?\d[\d.,' ]*\s*[%$€£¥]?")


def remarks(dataset: Dataset) -> list[str]:
    """What is odd about a table, and what to do about it.

    >>> x, y = torch.tensor([[5.0, 1.0], [5.0, 3.0], [5.0, 4.0]]), torch.tensor([0, 1, 0])
    >>> data = Dataset("t", "classification", x, y, x, y, ("NA", "ill"), ("site", "age"))
    >>> print(*remarks(data), sep="\\n")
    'site' has the same value in every training row, and an attacker may move it; --drop site leaves it out
    'NA' is taken for a class like any other; if it means that the class is not known, leave those rows out
    >>> x, y = torch.tensor([[3.0, 1.0], [2.0, 5.0], [4.0, 2.0]]), torch.zeros(3)
    >>> data = Dataset("t", "regression", x[:2], y[:2], x[2:], y[2:], (), ("id", "age"))
    >>> remarks(data)[0].partition(",")[0]
    "'id' only numbers the rows"
    """  # noqa: E501
    of_columns = _of_columns(dataset) if dataset.feature_names else ()  # images have none
    return [*of_columns, *_of_rows(dataset), *_of_target(dataset)]


def _of_rows(dataset: Dataset) -> Iterator[str]:
    """Of test rows that were trained on, where chance would not make them so: in a table of several
    features in which most rows differ."""
    x_train, x_test = (part.flatten(1).numpy() for part in (dataset.x_train, dataset.x_test))
    known = {row.tobytes() for row in x_train}
    again = sum(row.tobytes() in known for row in x_test)
    several = len(x_train) >= ENOUGH and min(x_train.shape[1], again) >= FEW
    if several and 2 * len(known) > len(x_train) and again > REPEATED * len(x_test):
        yield (
            f"{again} of {len(x_test)} test rows have the features of a training row, and a model "
            f"that remembers it looks better than it is; if they are the same cases, leave the "
            f"copies out"
        )


def _of_columns(dataset: Dataset) -> Iterator[str]:
    names, encoding = dataset.feature_names, dataset.encoding
    steps = torch.cat([dataset.x_train, dataset.x_test]).sort(0).values.diff(dim=0)
    if numbers := list(compress(names, (steps == 1).all(0).tolist())):
        yield (
            f"{_quoted(numbers)} only numbers the rows, and new ones have other numbers; --drop "
            f"{_typed(numbers)} leaves it out"
        )
    same = (dataset.x_train == dataset.x_train[:1]).all(0)
    same = same if dataset.mask is None else same & dataset.mask  # within the attacker's reach
    if constant := list(compress(names, same.tolist())):
        yield (
            f"{_quoted(constant)} has the same value in every training row, and an attacker may "
            f"move it; --drop {_typed(constant)} leaves it out"
        )
    for name in () if encoding is None else encoding.late:
        lost = dataset.x_test[:, names.index(f"{name} missing")]
        yield (
            f"{name!r} is missing in {int(lost.sum())} test rows and in no training row; the "
            f"training median stands in, nothing is learned of the gap, and an attacker cannot "
            f"change what was filled in"
        )
    for name, column in zip(names, dataset.x_train.T, strict=True):
        values, counts = column.unique(return_counts=True)
        for place, rest in ((0, values[1:]), (-1, values[:-1])):
            value, num = float(values[place]), int(counts[place])
            nines = set(f"{abs(value):g}") == {"9"} and abs(value) > 10
            if not nines or num < 2 or len(rest) < 2:
                continue
            if float((rest - value).abs().min()) > float(rest.max() - rest.min()):
                yield (
                    f"{name!r} is {value:g} in {num} training rows, far from its other values; if "
                    f"that means that it is not known, leave those cells empty"
                )
    for name, words in ({} if encoding is None else encoding.words).items():
        named = filter(_AMOUNT.fullmatch, words)
        amounts = [word for word in named if finite_number(word) is None]  # codes are meant as text
        if len(amounts) > 2 and 2 * len(amounts) > len(words):
            yield (
                f"{name!r} is taken for text of {len(words)} words, such as {amounts[0]!r}; if "
                f"they are amounts, write plain numbers"
            )


def _of_target(dataset: Dataset) -> Iterator[str]:
    y_train, classes = dataset.y_train, dataset.class_names
    if dataset.task == "classification":
        counts = torch.bincount(y_train, minlength=len(classes)).tolist()
        rare = [name for name, num in zip(classes, counts, strict=True) if num < FEW]
        if rare and dataset.feature_names and len(y_train) >= ENOUGH:
            yield (
                f"{_quoted(rare[:5])}{' and others' if len(rare) > 5 else ''} has fewer than {FEW} "
                f"training rows: what is learned of it, and any score of it, is mostly chance"
            )
    else:
        values = sorted(set(torch.cat([y_train, dataset.y_test]).flatten().tolist()))
        if y_train.ndim == 1 and len(values) == 2:
            yield (
                f"the target has two values, {values[0]:g} and {values[1]:g}, and is regressed on; "
                f"if they are classes, say --task classification"
            )
        if bool((y_train == y_train[:1]).all()):
            yield (
                "the target has the same value in every training row, so that there is nothing to "
                "predict; check --target"
            )
    if unknown := [name for name in classes if name.lower() in MISSING]:
        yield (
            f"{_quoted(unknown)} is taken for a class like any other; if it means that the class "
            f"is not known, leave those rows out"
        )


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _typed(names: list[str]) -> str:
    return shlex.quote(joined(names))


def without_effect(config: RunConfig, data: Prepared) -> list[str]:
    """Keys that were set and change nothing here, each with the reason.

    >>> from advbayes.runs.building import prepare
    >>> from advbayes.runs.config import make_config
    >>> config = make_config({"data": "digits", "noise_scale": 0.1, "rank": 9, "num_train": 10})
    >>> print(*without_effect(config, prepare(config)), sep="\\n")
    rank = 9 has no effect: the posterior is 'mean_field'
    noise_scale = 0.1 has no effect: the task is classification
    """
    kind = network_kind(config, tuple(data.x_train.shape[1:]))
    posterior = f"the posterior is {config.posterior!r}"
    own = config.channel is not None
    defense = f"the channel is {config.channel!r}" if own else f"the defense is {config.defense!r}"
    noisy = own or config.defense in ("noise", "consistency", "os", "os50", "mix", "pgd")
    iterates = not own and config.defense in ("pgd", "trades", "alp")
    learns = own or config.defense in ("nn", "nn50")
    idle = {
        "root": (config.file is not None, "the data are a file"),
        "hidden": (kind != "mlp", f"the network is {kind!r}"),
        "members": (config.posterior != "ensemble", posterior),
        "rank": (config.posterior != "low_rank", posterior),
        "init_scale": (config.posterior in ("point", "ensemble"), posterior),
        "noise_scale": (data.dataset.task == "classification", "the task is classification"),
        "sigma": (not noisy, defense),
        "attack_steps": (not iterates, defense),
        "beta": (
            config.defense not in ("trades", "alp", "consistency"),
            f"the defense is {config.defense!r}",
        ),
        "adversary_lr": (not learns, defense),
        "bound": (config.num_channel == 1, "num_channel is 1, where both bounds are the same"),
    }
    return [
        f"{key} = {value!r} has no effect: {why}"
        for key, (is_idle, why) in idle.items()
        if is_idle and (value := vars(config)[key]) != RunConfig.model_fields[key].default
    ]

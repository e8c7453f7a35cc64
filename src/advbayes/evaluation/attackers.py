"""Predictors that draw from a given generator."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch

from advbayes.types import Predictor


def with_generator(predict: Predictor, generator: torch.Generator) -> Predictor:
    """The same predictor drawing from `generator`, where it (or a predictor in it) has such a field.

    >>> with_generator(len, torch.Generator()) is len
    True
    """
    whole: Any = predict
    if not dataclasses.is_dataclass(whole) or isinstance(whole, type):
        return predict
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(whole):
        value = getattr(predict, field.name)
        if not field.init:
            continue
        if field.name == "generator" and getattr(whole, "seed", None) is None:  # a seed keys the draws already
            moved[field.name] = generator
        elif dataclasses.is_dataclass(value) and not isinstance(value, type) and callable(value):
            inner = with_generator(cast(Predictor, value), generator)
            if inner is not value:
                moved[field.name] = inner
    return cast(Predictor, dataclasses.replace(whole, **moved)) if moved else predict

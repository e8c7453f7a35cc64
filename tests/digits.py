"""A small convolutional net trained on scikit-learn's digits in seconds."""

from __future__ import annotations

from functools import lru_cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from advbayes import from_torch
from advbayes.adapters import FunctionPredictor


@lru_cache(maxsize=1)
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, y) to train on and (x, y) to test on: 1437 and 360 images of 8 x 8."""
    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1437], y[:1437], x[1437:], y[1437:]


@lru_cache(maxsize=1)
def net() -> FunctionPredictor:
    """A net of two convolutions, right on 97 % of the test images."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, 10),
        )
        x, y, _, _ = data()
        optimiser = torch.optim.Adam(layers.parameters(), 5e-3)
        for _ in range(12):
            for rows in torch.randperm(len(x)).split(64):
                optimiser.zero_grad()
                functional.cross_entropy(layers(x[rows]), y[rows]).backward()
                optimiser.step()
    return from_torch(layers.eval().requires_grad_(False))

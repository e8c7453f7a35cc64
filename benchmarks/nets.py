"""Nets beside the paper's two: a residual net with GroupNorm, and a user's module with a forward of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions with GroupNorm, and a way round them."""

    def __init__(self, channels: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, num_out, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, num_out) for _ in range(2))
        is_same = stride == 1 and channels == num_out
        self.round = nn.Identity() if is_same else nn.Conv2d(channels, num_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(h)) + self.round(x))


def residual_net() -> nn.Module:
    """A small ResNet with GroupNorm for images of 1x28x28."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.GroupNorm(8, 16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class LayerNormNet(nn.Module):
    """Linear layers with LayerNorm and a way round the second, for images of 1x28x28."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(784, width), nn.Linear(width, width), nn.Linear(width, 10)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.norms[0](self.first(x.flatten(1))))
        h = h + nn.functional.gelu(self.norms[1](self.second(h)))
        out: Tensor = self.last(h)
        return out

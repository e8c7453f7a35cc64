"""Nets beside the paper's two: a residual net with GroupNorm, and users' modules with a forward of
their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Two convolutions with GroupNorm, and a way round them."""

    def __init__(self, channels: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, num_out, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, num_out) for _ in range(2))
        is_same = stride == 1 and channels == num_out
        self.round = (
            nn.Identity() if is_same else nn.Conv2d(channels, num_out, 1, stride, bias=False)
        )

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


class UserNet(nn.Module):
    """Convolutions, then LayerNorm and a way round a linear layer, in a forward of its own, for
    images of 1x28x28."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.norms = nn.ModuleList(nn.LayerNorm(32 * 7 * 7 if k == 0 else 32) for k in range(2))
        self.narrow, self.mixed, self.last = (
            nn.Linear(32 * 7 * 7, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = functional.avg_pool2d(functional.gelu(self.stem(x)), 2)
        h = functional.avg_pool2d(functional.gelu(self.body(h)), 2)
        h = self.narrow(self.norms[0](h.flatten(1)))
        h = h + functional.gelu(self.mixed(self.norms[1](h)))
        out: Tensor = self.last(h)
        return out


class LinearNet(nn.Module):
    """Linear layers with LayerNorm and a way round the second, for images of 1x28x28."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(784, width),
            nn.Linear(width, width),
            nn.Linear(width, 10),
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.norms[0](self.first(x.flatten(1))))
        h = h + functional.gelu(self.norms[1](self.second(h)))
        out: Tensor = self.last(h)
        return out

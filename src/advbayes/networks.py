"""The paper's architectures (SM-5, SM-6), and GroupNorm for nets that came with BatchNorm."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from advbayes import checks


def conv_net(num_classes: int = 10, channels: int = 1, size: int = 28) -> nn.Sequential:
    """SM-6 classification: two blocks of 3x3 convolution (16, 32), ReLU, 2x2 average pooling; one
    dense layer.

    >>> conv_net()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    checks.count("size", size, low=4)
    flat = 32 * (size // 4) ** 2
    return nn.Sequential(
        nn.Conv2d(checks.count("channels", channels), 16, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(flat, checks.count("num_classes", num_classes)),  # 1: a regression on images
    )


def wide_conv_net(num_classes: int = 10, channels: int = 1, size: int = 28) -> nn.Sequential:
    """Four 3x3 convolutions (32, 32, 64, 64), max pooling after each pair, two dense layers of 200.

    The net on which robustness on MNIST is usually published (Carlini and Wagner 2017).

    >>> wide_conv_net()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    checks.count("size", size, low=16)
    side = ((size - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(checks.count("channels", channels), 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * side**2, 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, checks.count("num_classes", num_classes, low=2)),
    )


def large_kernel_net(num_classes: int = 10, channels: int = 1, size: int = 28) -> nn.Sequential:
    """A 9x9 convolution in strides of 3, a 3x3 one (64 each), a dense layer of 512.

    For inputs under heavy noise, as smoothing and certification have them: its first layer averages
    over 81 pixels where that of `wide_conv_net` averages over 9, and the whole needs half the
    multiplications.

    >>> large_kernel_net()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    checks.count("size", size, low=5)
    side = (size + 4 - 9) // 3 + 1
    return nn.Sequential(
        nn.Conv2d(checks.count("channels", channels), 64, 9, stride=3, padding=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * side**2, 512),
        nn.ReLU(),
        nn.Linear(512, checks.count("num_classes", num_classes, low=2)),
    )


def mlp(
    num_features: int, num_outputs: int = 1, hidden: tuple[int, ...] = (16, 16)
) -> nn.Sequential:
    """SM-6 regression: fully connected, two hidden layers of 16 with ReLU, a dense output.

    >>> mlp(11)(torch.zeros(2, 11)).shape
    torch.Size([2, 1])
    """
    sizes = [checks.count("num_features", num_features), *hidden]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, checks.count("hidden", after)), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], checks.count("num_outputs", num_outputs)))


class ConvGenerator(nn.Module):
    """SM-5's convolutional adversary: (x, class) -> mean perturbation and raw log-std of x's shape.

    >>> shift, raw = ConvGenerator()(torch.zeros(2, 1, 28, 28), torch.tensor([0, 9]))
    >>> shift.shape, raw.shape
    (torch.Size([2, 1, 28, 28]), torch.Size([2, 1, 28, 28]))
    """

    def __init__(self, num_classes: int = 10, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        self.num_classes = checks.count("num_classes", num_classes, low=2)
        self.channels, self.size = channels, size
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
        )
        self.mean = nn.Conv2d(16, channels, 3, padding=1)
        self.log_std = nn.Conv2d(16, channels, 3, padding=1)
        self.label = nn.Linear(num_classes, channels * size * size)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        label = self.label(functional.one_hot(y, self.num_classes).to(x.dtype)).view_as(x)
        return self.mean(features) + label, self.log_std(features)


class FullyConnectedGenerator(nn.Module):
    """SM-5's adversary for tabular data: (x, y) -> mean perturbation and raw log-std, both of x's
    shape.

    `num_classes` one-hot encodes class labels; without it y is a real target of `num_outputs`.

    >>> shift, raw = FullyConnectedGenerator(3)(torch.zeros(2, 3), torch.zeros(2))
    >>> shift.shape, raw.shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """

    def __init__(
        self,
        num_features: int,
        num_outputs: int = 1,
        num_classes: int | None = None,
        width: int = 128,
    ) -> None:
        super().__init__()
        self.num_classes, self.num_outputs = num_classes, num_outputs
        self.num_features, self.width = num_features, width
        self.label = nn.Linear(num_classes or num_outputs, num_features)
        self.hidden = nn.Sequential(
            nn.Linear(2 * num_features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.mean = nn.Linear(width, num_features)
        self.log_std = nn.Linear(width, num_features)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.num_classes is not None:
            y = functional.one_hot(y, self.num_classes)
        flat = x.flatten(1)
        label = self.label(y.to(x.dtype).view(len(x), -1))
        hidden = self.hidden(torch.cat([flat, label], dim=1))
        return self.mean(hidden).view_as(x), self.log_std(hidden).view_as(x)


class _Block(nn.Module):
    """Two 3x3 convolutions with GroupNorm, and a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.GroupNorm(8, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.GroupNorm(8, after),
        )
        same = stride == 1 and before == after
        projected = nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(8, after)
        )
        self.shortcut = nn.Identity() if same else projected

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.main(x) + self.shortcut(x))


def resnet18(num_classes: int = 10, channels: int = 3, width: int = 64) -> nn.Sequential:
    """SM-7's ResNet-18 for 32x32 images (3x3 stem, no pooling), with GroupNorm, not BatchNorm.

    >>> resnet18(width=8)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    sizes = [checks.count("width", width, low=8), width, 2 * width, 4 * width, 8 * width]
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, 1, 1, bias=False),
        nn.GroupNorm(8, width),
        nn.ReLU(),
    ]
    for stage, (before, after) in enumerate(itertools.pairwise(sizes)):
        layers += [_Block(before, after, 1 if stage == 0 else 2), _Block(after, after, 1)]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], num_classes)
    )


def resnet18_narrow() -> nn.Sequential:
    """`resnet18` at a quarter of the width.

    >>> sum(p.numel() for p in resnet18_narrow().parameters()) < 750_000
    True
    """
    return resnet18(width=16)


def with_group_norm(net: nn.Module, num_groups: int = 8) -> nn.Module:
    """A copy of the net in which every BatchNorm is a GroupNorm (the largest number of groups <=
    `num_groups` that divides).

    >>> with_group_norm(nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)))[1].num_groups
    6
    """
    net = copy.deepcopy(net)

    def convert(layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            groups = max(g for g in range(1, num_groups + 1) if layer.num_features % g == 0)
            norm = nn.GroupNorm(groups, layer.num_features, eps=layer.eps, affine=layer.affine)
            return norm.to(layer.weight) if layer.affine else norm
        for name, child in layer.named_children():
            setattr(layer, name, convert(child))
        return layer

    return convert(net)

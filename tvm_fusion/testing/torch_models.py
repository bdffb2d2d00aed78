"""Networks written in PyTorch, with seeded random weights. Importing this module needs PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def _conv(inner: int, outer: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outer),
    ]


class InvertedResidual(nn.Module):
    """1×1 expand, depthwise 3×3, 1×1 project; the input added where shapes allow it."""

    def __init__(self, inner: int, outer: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inner * expand
        layers = [*_conv(inner, hidden, 1), nn.ReLU6()] if expand > 1 else []
        layers += [*_conv(hidden, hidden, 3, stride, hidden), nn.ReLU6(), *_conv(hidden, outer, 1)]
        self.body = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inner == outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.shortcut else self.body(x)


class MobileNetV2(nn.Module):
    """MobileNetV2 of width 1 (Sandler et al., 2018, table 2). ``[N, 3, H, W]`` → ``[N, classes]``.

    Parameters
    ----------
    settings : sequence of (expand, channels, repeat, stride)
        The stages.
    last : int
        Channels of the last 1×1 convolution.
    classes : int
        Results.
    """

    SETTINGS = (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    )  # fmt: skip

    def __init__(
        self,
        settings: Sequence[tuple[int, int, int, int]] = SETTINGS,
        last: int = 1280,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        channels = 32
        layers: list[nn.Module] = [*_conv(3, channels, 3, 2), nn.ReLU6()]
        for expand, outer, repeat, stride in settings:
            for i in range(repeat):
                layers.append(InvertedResidual(channels, outer, stride if i == 0 else 1, expand))
                channels = outer
        self.features = nn.Sequential(*layers, *_conv(channels, last, 1), nn.ReLU6())
        self.classifier = nn.Linear(last, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def randomise(net: nn.Module, seed: int = 0) -> nn.Module:
    """Give a network seeded weights that keep activations of one size; evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fan_in = layer.weight[0].numel()
            layer.weight.data.normal_(0, (1.5 / fan_in) ** 0.5, generator=generator)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.weight.data.uniform_(0.8, 1.2, generator=generator)
            layer.bias.data.uniform_(-0.1, 0.1, generator=generator)
            layer.running_mean.uniform_(-0.1, 0.1, generator=generator)
            layer.running_var.uniform_(0.8, 1.2, generator=generator)
    return net.eval()


def exported(
    name: str, *, size: int = 224, seed: int = 0, **options: Any
) -> torch.export.ExportedProgram:
    """Export a network of this file for one image ``[1, 3, size, size]``.

    Parameters
    ----------
    name : str
        ``"mobilenet_v2"``.
    size : int
        Height and width of the image.
    seed : int
        Seed of the weights.
    **options
        Arguments of the network's class.

    Raises
    ------
    ValueError
        If there is no such network.
    """
    nets = {"mobilenet_v2": MobileNetV2}
    if name not in nets:
        raise ValueError(f"unknown network {name!r}; choose from {', '.join(nets)}")
    torch.manual_seed(seed)  # the constructors draw weights too
    net = randomise(nets[name](**options), seed)
    return torch.export.export(net, (torch.randn(1, 3, size, size),))

"""A residual convolutional network with group norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gradguess_lab.models import ACTIVATIONS
from gradguess_lab.models.common import AsImage, channels, convolution, drawn, refuse_text
from gradguess_lab.names import lookup

if TYPE_CHECKING:
    from gradguess_lab.data import Shape

GROUPS = 8


class Block(nn.Module):
    """`skip(x) + conv φ norm conv φ norm x`; the skip is a 1 × 1 convolution where the shape changes."""

    def __init__(self, shape: Shape, below: int, above: int, stride: int, activation: str) -> None:
        super().__init__()
        conv = convolution(shape)
        make = lookup(ACTIVATIONS, activation, "activation")
        self.norm1, self.act1 = norm(below), make()
        self.conv1 = conv(below, above, 3, stride=stride, padding=1)
        self.norm2, self.act2 = norm(above), make()
        self.conv2 = conv(above, above, 3, padding=1)
        self.skip = conv(below, above, 1, stride=stride) if stride > 1 or below != above else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.conv1(self.act1(self.norm1(x)))
        return self.skip(x) + self.conv2(self.act2(self.norm2(branch)))


def norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(next(groups for groups in (GROUPS, 4, 2, 1) if width % groups == 0), width)


class Head(nn.Module):
    """Mean over positions, then a linear layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(2).mean(2))


def resnet(
    shape: Shape, width: int, depth: int, bias: bool, activation: str, generator: torch.Generator
) -> nn.Sequential:
    """A stem and `depth` pre-activation blocks of two convolutions; every second one halves the image, twice at most.

    `width` channels at first, doubled where the image is halved.
    """
    refuse_text(shape, "resnet")

    def build() -> nn.Sequential:
        layers: list[nn.Module] = [AsImage()] if shape.kind == "signal" else []
        layers.append(convolution(shape)(channels(shape), width, 3, padding=1))
        below = width
        for i in range(depth):
            stride = 2 if i in (1, 3) else 1
            layers.append(Block(shape, below, below * stride, stride, activation))
            below *= stride
        act = lookup(ACTIVATIONS, activation, "activation")()
        return nn.Sequential(*layers, norm(below), act, Head(below, shape.classes))

    return drawn(build, generator)

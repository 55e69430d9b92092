"""ResNet-18 (He et al. 2016) as it is used on CIFAR-10: a 3 × 3 stem, no pooling before the head, batch norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gradguess_lab.models import ACTIVATIONS
from gradguess_lab.models.common import AsImage, channels, convolution, drawn, refuse_text
from gradguess_lab.models.resnet import Head
from gradguess_lab.names import lookup

if TYPE_CHECKING:
    from gradguess_lab.data import Shape

STAGES, BLOCKS = 4, 2  # a stage is two blocks, and each but the first halves the image and doubles the channels


class Block(nn.Module):
    """`φ(skip(x) + norm conv φ norm conv x)`; the skip is a 1 × 1 convolution with a norm where the shape changes."""

    def __init__(self, shape: Shape, below: int, above: int, stride: int, activation: str) -> None:
        super().__init__()
        make = lookup(ACTIVATIONS, activation, "activation")
        self.conv1, self.norm1 = _convolved(shape, below, above, 3, stride)
        self.conv2, self.norm2 = _convolved(shape, above, above, 3)
        self.act1, self.act2 = make(), make()
        changes = stride > 1 or below != above
        self.skip = nn.Sequential(*_convolved(shape, below, above, 1, stride)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x)))))
        return self.act2(self.skip(x) + branch)


def _convolved(shape: Shape, below: int, above: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """A convolution without a bias, and its batch norm."""
    norm = nn.BatchNorm2d if shape.kind == "image" else nn.BatchNorm1d
    return convolution(shape)(below, above, size, stride=stride, padding=size // 2, bias=False), norm(above)


def resnet18(
    shape: Shape, width: int, depth: int, bias: bool, activation: str, generator: torch.Generator
) -> nn.Sequential:
    """A stem, four stages of two residual blocks, a linear head: 11.17 million parameters with `width` 64.

    `depth` is not read: there are always eight blocks. `sites=4` cuts at the stages, `sites=8` at the blocks.
    """
    refuse_text(shape, "resnet18")

    def build() -> nn.Sequential:
        stem = _convolved(shape, channels(shape), width, 3)
        layers: list[nn.Module] = [AsImage(), *stem, lookup(ACTIVATIONS, activation, "activation")()]
        below = width
        for stage in range(STAGES):
            for block in range(BLOCKS):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Block(shape, below, below * stride, stride, activation))
                below *= stride
        return nn.Sequential(*layers, Head(below, shape.classes))

    return drawn(build, generator)

"""A plain convolutional network: strided convolutions and a linear head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from gradguess_lab.models import ACTIVATIONS
from gradguess_lab.models.common import (
    AsImage,
    channels,
    convolution,
    drawn,
    extent,
    refuse_text,
)
from gradguess_lab.names import lookup

if TYPE_CHECKING:
    from gradguess_lab.data import Shape


def cnn(shape: Shape, width: int, depth: int, bias: bool, activation: str, generator: torch.Generator) -> nn.Sequential:
    """`depth` convolutions of stride 2 with `width`, then 2 `width`, from then on 4 `width` channels; a linear head."""
    refuse_text(shape, "cnn")
    make = lookup(ACTIVATIONS, activation, "activation")
    conv = convolution(shape)

    def build() -> nn.Sequential:
        layers: list[nn.Module] = [AsImage()] if shape.kind == "signal" else []
        below, side = channels(shape), extent(shape)
        for i in range(depth):
            above = width * min(2**i, 4)
            layers += [conv(below, above, 3, stride=2, padding=1), make()]
            below, side = above, (side + 1) // 2
        positions = side**2 if shape.kind == "image" else side
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(below * positions, shape.classes))

    return drawn(build, generator)

"""A residual MLP with pre-norm blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gradguess_lab.models import ACTIVATIONS
from gradguess_lab.models.common import refuse_text
from gradguess_lab.models.mlp import linear
from gradguess_lab.names import lookup

if TYPE_CHECKING:
    from gradguess_lab.data import Shape


class ResidualBlock(nn.Module):
    """`x + W_2 φ(W_1 norm(x))`."""

    def __init__(self, width: int, activation: str, generator: torch.Generator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = linear(width, width, True, generator)
        self.activation = lookup(ACTIVATIONS, activation, "activation")()
        self.outer = linear(width, width, True, generator)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.activation(self.inner(self.norm(x))))


def residual(
    shape: Shape, width: int, depth: int, bias: bool, activation: str, generator: torch.Generator
) -> nn.Sequential:
    """`depth` blocks of `width` units between a stem and a head."""
    refuse_text(shape, "residual")
    blocks = [ResidualBlock(width, activation, generator) for _ in range(depth)]
    stem, head = linear(shape.inputs, width, True, generator), linear(width, shape.classes, True, generator)
    flatten = [nn.Flatten()] if len(shape.size) > 1 else []
    return nn.Sequential(*flatten, stem, *blocks, nn.LayerNorm(width), head)

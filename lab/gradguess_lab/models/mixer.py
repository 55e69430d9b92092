"""An MLP-mixer: perceptrons over the tokens and over the features in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gradguess_lab.models import ACTIVATIONS
from gradguess_lab.models.common import Patches, drawn, refuse_text
from gradguess_lab.names import lookup

if TYPE_CHECKING:
    from gradguess_lab.data import Shape


class Perceptron(nn.Sequential):
    """Two layers, the inner one `factor` times as wide."""

    def __init__(self, width: int, factor: int, activation: str) -> None:
        make = lookup(ACTIVATIONS, activation, "activation")
        super().__init__(nn.Linear(width, factor * width), make(), nn.Linear(factor * width, width))


class Block(nn.Module):
    """Mix the tokens, then the features; each behind a norm and beside a skip."""

    def __init__(self, tokens: int, width: int, activation: str) -> None:
        super().__init__()
        self.norm1, self.tokens = nn.LayerNorm(width), Perceptron(tokens, 2, activation)
        self.norm2, self.features = nn.LayerNorm(width), Perceptron(width, 2, activation)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.features(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, shape: Shape, width: int, depth: int, activation: str) -> None:
        super().__init__()
        self.patches = Patches(shape, width)
        self.blocks = nn.Sequential(*(Block(self.patches.tokens, width, activation) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(x))).mean(1))


def mixer(shape: Shape, width: int, depth: int, bias: bool, activation: str, generator: torch.Generator) -> Mixer:
    """`depth` blocks on patches of `width` features; mean over tokens."""
    refuse_text(shape, "mixer")
    return drawn(lambda: Mixer(shape, width, depth, activation), generator)

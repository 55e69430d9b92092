"""A recurrent network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gradguess_lab.models.common import drawn

if TYPE_CHECKING:
    from gradguess_lab.data import Shape


class Recurrent(nn.Module):
    """GRU layers and a linear head: at every character of a text, else after the last time step.

    A signal is read number by number, an image row by row.
    """

    def __init__(self, shape: Shape, width: int, depth: int) -> None:
        super().__init__()
        self.text = shape.kind == "text"
        self.embed = nn.Embedding(shape.classes, width) if self.text else nn.Identity()
        inputs = width if self.text else shape.size[-1] if shape.kind == "image" else 1
        sizes = [inputs] + [width] * (depth - 1)
        self.layers = nn.ModuleList(nn.GRU(size, width, batch_first=True) for size in sizes)
        self.head = nn.Linear(width, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if not self.text:  # (batch, time, features)
            x = x.unsqueeze(-1) if x.dim() == 2 else x.flatten(1, 2)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x if self.text else x[:, -1])


def gru(shape: Shape, width: int, depth: int, bias: bool, activation: str, generator: torch.Generator) -> Recurrent:
    """`depth` layers of `width` units."""
    return drawn(lambda: Recurrent(shape, width, depth), generator)

"""The networks of the experiments, initialised from an explicit generator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import nn

from gradguess.experiments.names import lookup

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}


def linear(inputs: int, outputs: int, bias: bool, generator: torch.Generator | None) -> nn.Linear:
    """A linear layer with weights (and biases) from `U(-1/√inputs, 1/√inputs)`: PyTorch's own default.

    Written out because PyTorch's initialisation draws from the global generator.
    """
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias)
    bound = 1 / math.sqrt(inputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    return layer


def mlp(
    inputs: int,
    width: int,
    depth: int,
    classes: int,
    bias: bool = False,
    activation: str = "relu",
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """`depth` hidden layers of `width` units and a linear output layer.

    >>> [tuple(p.shape) for p in mlp(40, 128, 3, 10).parameters()]
    [(128, 40), (128, 128), (128, 128), (10, 128)]
    """
    make = lookup(ACTIVATIONS, activation, "activation")
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    sizes = [inputs] + [width] * depth
    layers: list[nn.Module] = []
    for below, above in itertools.pairwise(sizes):
        layers += [linear(below, above, bias, generator), make()]
    return nn.Sequential(*layers, linear(sizes[-1], classes, bias, generator))


class ResidualBlock(nn.Module):
    """`x + W_2 φ(W_1 norm(x))`."""

    def __init__(self, width: int, activation: str, generator: torch.Generator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = linear(width, width, True, generator)
        self.activation = lookup(ACTIVATIONS, activation, "activation")()
        self.outer = linear(width, width, True, generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.activation(self.inner(self.norm(x))))


def residual(
    inputs: int,
    width: int,
    depth: int,
    classes: int,
    bias: bool = False,
    activation: str = "relu",
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """A residual MLP: `depth` pre-norm blocks of `width` units between a stem and a head."""
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    blocks = [ResidualBlock(width, activation, generator) for _ in range(depth)]
    stem, head = linear(inputs, width, True, generator), linear(width, classes, True, generator)
    return nn.Sequential(stem, *blocks, nn.LayerNorm(width), head)


MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "residual": residual}

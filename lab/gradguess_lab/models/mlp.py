"""The paper's network: a multilayer perceptron."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from gradguess_lab.models import ACTIVATIONS
from gradguess_lab.models.common import refuse_text
from gradguess_lab.names import lookup

if TYPE_CHECKING:
    from gradguess_lab.data import Shape


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


def mlp_on(
    shape: Shape, width: int, depth: int, bias: bool, activation: str, generator: torch.Generator
) -> nn.Sequential:
    """`mlp` for the samples of a data set."""
    refuse_text(shape, "mlp")
    layers = mlp(shape.inputs, width, depth, shape.classes, bias, activation, generator)
    return nn.Sequential(nn.Flatten(), *layers) if len(shape.size) > 1 else layers

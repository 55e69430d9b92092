"""The names of the networks and of their elementwise functions. The networks stand in `gradguess_lab.networks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gradguess_lab.names import later

if TYPE_CHECKING:
    from torch import nn

# name -> (shape of a sample, width, depth, bias, activation, generator) -> network
MODELS: dict[str, Callable[..., nn.Module]] = {
    name: later("gradguess_lab.networks", name)
    for name in ("mlp", "residual", "cnn", "resnet", "resnet18", "mixer", "vit", "charformer", "gru")
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": later("torch.nn", "ReLU"),
    "gelu": later("torch.nn", "GELU"),
    "tanh": later("torch.nn", "Tanh"),
}

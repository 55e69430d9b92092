"""The networks of the experiments, one file each, initialised from an explicit generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gradguess_lab.names import later

if TYPE_CHECKING:
    from torch import nn

# name -> (shape of a sample, width, depth, bias, activation, generator) -> network
MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": later(f"{__name__}.mlp", "mlp_on"),
    "residual": later(f"{__name__}.residual", "residual"),
    "cnn": later(f"{__name__}.cnn", "cnn"),
    "resnet": later(f"{__name__}.resnet", "resnet"),
    "resnet18": later(f"{__name__}.resnet18", "resnet18"),
    "mixer": later(f"{__name__}.mixer", "mixer"),
    "vit": later(f"{__name__}.transformer", "vit"),
    "charformer": later(f"{__name__}.transformer", "charformer"),
    "gru": later(f"{__name__}.gru", "gru"),
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": later("torch.nn", "ReLU"),
    "gelu": later("torch.nn", "GELU"),
    "tanh": later("torch.nn", "Tanh"),
}

__all__ = ["ACTIVATIONS", "MODELS"]

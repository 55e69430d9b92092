"""The networks of the experiments, one file each, initialised from an explicit generator."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gradguess.experiments.models.cnn import cnn
from gradguess.experiments.models.common import ACTIVATIONS
from gradguess.experiments.models.gru import gru
from gradguess.experiments.models.mixer import mixer
from gradguess.experiments.models.mlp import mlp, mlp_on
from gradguess.experiments.models.residual import residual
from gradguess.experiments.models.resnet import resnet
from gradguess.experiments.models.resnet18 import resnet18
from gradguess.experiments.models.transformer import charformer, vit

# name -> (shape of a sample, width, depth, bias, activation, generator) -> network
MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp_on,
    "residual": residual,
    "cnn": cnn,
    "resnet": resnet,
    "resnet18": resnet18,
    "mixer": mixer,
    "vit": vit,
    "charformer": charformer,
    "gru": gru,
}

__all__ = ["ACTIVATIONS", "MODELS", "mlp"]

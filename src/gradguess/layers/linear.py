"""Linear layers. Their parameter gradient is the outer product of eq. (3) of the paper, `ĝ xᵀ`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gradguess.layers.entry import Layer, apply_linear


def gradient(layer: nn.Linear, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    rows = g.reshape(-1, layer.out_features)
    grads = {}
    if layer.weight.requires_grad:
        grads["weight"] = rows.t() @ x.reshape(-1, layer.in_features)  # ĝ xᵀ, summed over the batch
    if layer.bias is not None and layer.bias.requires_grad:
        grads["bias"] = rows.sum(0)
    return grads


LAYER = Layer(modules=(nn.Linear,), functions=(F.linear,), gradient=gradient, tangent=apply_linear, is_matrix=True)

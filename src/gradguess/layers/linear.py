"""Linear layers. Their parameter gradient is the outer product of eq. (3) of the paper, `ĝ xᵀ`."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn

from gradguess.layers.entry import Layer, apply_linear, is_constant, unpack


def gradient(layer: nn.Linear, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    rows = g.reshape(-1, layer.out_features)
    grads = {}
    if layer.weight.requires_grad:
        grads["weight"] = rows.t() @ x.reshape(-1, layer.in_features)  # ĝ xᵀ, summed over the batch
    if layer.bias is not None and layer.bias.requires_grad:
        grads["bias"] = rows.sum(0)
    return grads


def affine(function: Any, *args: Any, **options: Any) -> Tensor | None:
    """`torch.addmm(b, x, W)`, the linear layer of Hugging Face's GPT-2."""
    if len(args) != 3 or options:
        return None
    bias, x, weight = args
    p, t = unpack(x)
    if t is None or not is_constant(bias, weight):
        return None
    return fwAD.make_dual(function(bias, p, weight), torch.mm(t, weight))


LAYER = Layer(
    modules=(nn.Linear,), functions=(F.linear,), gradient=gradient, tangent=apply_linear, always=True, is_matrix=True
)
ADDMM = Layer(functions=(torch.addmm,), tangent=affine, always=True)

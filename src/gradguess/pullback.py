"""The local chain rule of a layer: from an estimate at its output to the gradient of its parameters.

For a linear layer this is the outer product of eq. (3) of the paper, `ĝ xᵀ`. The layers below have a closed form;
every other module gets a vjp of its own short piece of the graph (`gradguess.passes.pull_back`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _linear(layer: nn.Linear, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    g2 = g.reshape(-1, layer.out_features)
    grads = {}
    if layer.weight.requires_grad:
        grads["weight"] = g2.t() @ x.reshape(-1, layer.in_features)  # ĝ xᵀ summed over the batch
    if layer.bias is not None and layer.bias.requires_grad:
        grads["bias"] = g2.sum(0)
    return grads


_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def _convolution(layer: _Conv, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    spatial = len(layer.kernel_size)
    x, g = x.reshape(-1, *x.shape[-spatial - 1 :]), g.reshape(-1, *g.shape[-spatial - 1 :])
    want_bias = layer.bias is not None and layer.bias.requires_grad
    _, weight, bias = torch.ops.aten.convolution_backward(
        g,
        x,
        layer.weight,
        [layer.out_channels] if want_bias else None,
        list(layer.stride),
        [int(p) for p in layer.padding],
        list(layer.dilation),
        layer.transposed,
        list(layer.output_padding),
        layer.groups,
        [False, layer.weight.requires_grad, want_bias],
    )
    return {name: grad for name, grad in (("weight", weight), ("bias", bias)) if grad is not None}


def _affine(layer: nn.Module, normal: Tensor, g: Tensor, channel_dims: list[int]) -> dict[str, Tensor]:
    """Scale and shift of a normalised input `normal`; `channel_dims` are the dimensions that own a parameter."""
    others = [dim for dim in range(g.dim()) if dim not in channel_dims]
    grads = {}
    weight, bias = layer.weight, getattr(layer, "bias", None)
    if isinstance(weight, Tensor) and weight.requires_grad:
        grads["weight"] = _sum(g * normal, others).reshape(weight.shape)
    if isinstance(bias, Tensor) and bias.requires_grad:
        grads["bias"] = _sum(g, others).reshape(bias.shape)
    return grads


def _sum(t: Tensor, dims: list[int]) -> Tensor:
    return t.sum(dims) if dims else t


def _layer_norm(layer: nn.LayerNorm, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    normal = F.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
    return _affine(layer, normal, g, list(range(g.dim() - len(layer.normalized_shape), g.dim())))


def _rms_norm(layer: nn.RMSNorm, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    normal = F.rms_norm(x, list(layer.normalized_shape), None, layer.eps)
    return _affine(layer, normal, g, list(range(g.dim() - len(layer.normalized_shape), g.dim())))


def _group_norm(layer: nn.GroupNorm, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    return _affine(layer, F.group_norm(x, layer.num_groups, None, None, layer.eps), g, [1])


_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def _batch_norm(layer: _BatchNorm, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    if layer.training or layer.running_mean is None:
        normal = F.batch_norm(x, None, None, training=True, eps=layer.eps)
    else:
        normal = F.batch_norm(x, layer.running_mean, layer.running_var, training=False, eps=layer.eps)
    return _affine(layer, normal, g, [1])


def _embedding(layer: nn.Embedding, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    if not layer.weight.requires_grad:
        return {}
    padding = -1 if layer.padding_idx is None else layer.padding_idx
    grad = torch.ops.aten.embedding_dense_backward(g, x, layer.num_embeddings, padding, layer.scale_grad_by_freq)
    return {"weight": grad}


_RULES: dict[type[nn.Module], Any] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    **dict.fromkeys(
        (
            nn.Conv1d,
            nn.Conv2d,
            nn.Conv3d,
            nn.ConvTranspose1d,
            nn.ConvTranspose2d,
            nn.ConvTranspose3d,
        ),
        _convolution,
    ),
}


def has_closed_form(module: nn.Module) -> bool:
    """Exact types only: a subclass may compute something else."""
    if type(module) not in _RULES:
        return False
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.sparse
    return True


def parameter_gradients(module: nn.Module, x: Tensor, g: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Gradients of the module's own parameters from the cotangent `g` of its output, by closed form."""
    for name, grad in _RULES[type(module)](module, x, g).items():
        yield getattr(module, name), grad

"""Linear maps, whose tangent is the same map of the tangent: layers, convolutions, embeddings, arithmetic.

The parameter gradient of a linear layer is the outer product of eq. (3) of the paper, `ĝ xᵀ`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn

from gradguess.layers.entry import Layer, is_constant, unpack

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d

# --- parameter gradients -------------------------------------------------------------------------------------


def linear_gradient(layer: nn.Linear, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    rows = g.reshape(-1, layer.out_features)
    grads = {}
    if layer.weight.requires_grad:
        grads["weight"] = rows.t() @ x.reshape(-1, layer.in_features)  # ĝ xᵀ, summed over the batch
    if layer.bias is not None and layer.bias.requires_grad:
        grads["bias"] = rows.sum(0)
    return grads


def convolution_gradient(layer: Convolution, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    spatial = len(layer.kernel_size)
    x, g = x.reshape(-1, *x.shape[-spatial - 1 :]), g.reshape(-1, *g.shape[-spatial - 1 :])
    wants_bias = layer.bias is not None and layer.bias.requires_grad
    wanted = [False, layer.weight.requires_grad, wants_bias]
    steps = list(layer.stride), [int(p) for p in layer.padding], list(layer.dilation)
    turned = layer.transposed, list(layer.output_padding), layer.groups
    _, weight, bias = torch.ops.aten.convolution_backward(
        g, x, layer.weight.to(g.dtype), [layer.out_channels] if wants_bias else None, *steps, *turned, wanted
    )
    return {name: grad for name, grad in (("weight", weight), ("bias", bias)) if grad is not None}


def embedding_gradient(layer: nn.Embedding, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Each row of the table gets the sum of the cotangents at the places where it was read."""
    if not layer.weight.requires_grad:
        return {}
    padding = -1 if layer.padding_idx is None else layer.padding_idx
    grad = torch.ops.aten.embedding_dense_backward(g, x, layer.num_embeddings, padding, layer.scale_grad_by_freq)
    return {"weight": grad}


# --- tangents ------------------------------------------------------------------------------------------------


def linear_tangent(
    function: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor | None:
    """`W t`, where the layer is `W x + b`, a convolution for instance."""
    p, t = unpack(x)
    if t is None or not is_constant(weight, bias):
        return None
    return fwAD.make_dual(
        function(p, weight, bias, *rest, **options), function(t, weight.detach(), None, *rest, **options)
    )


def addmm_tangent(function: Any, *args: Any, **options: Any) -> Tensor | None:
    """`torch.addmm(b, x, W)`, the linear layer of Hugging Face's GPT-2."""
    if len(args) != 3 or options:
        return None
    bias, x, weight = args
    p, t = unpack(x)
    if t is None or not is_constant(bias, weight):
        return None
    return fwAD.make_dual(function(bias, p, weight), torch.mm(t, weight))


_DIFFERENCES = (Tensor.sub, torch.sub)
_SUMS = (Tensor.add, torch.add, *_DIFFERENCES)
_QUOTIENTS = (Tensor.div, torch.div)


def arithmetic_tangent(function: Any, a: Any, b: Any, **options: Any) -> Tensor | None:
    """`x + k`, `x - k`, `x · k`, `x / k`, and with the two exchanged; but not `k / x`, which is not linear."""
    if options or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None
    (p, t), (q, u) = unpack(a), unpack(b)
    if (t is None) == (u is None) or (t is None and function in _QUOTIENTS):
        return None
    if function not in _SUMS:
        moved = function(p, u) if t is None else function(t, q)
    elif t is None:
        assert u is not None
        moved = -u if function in _DIFFERENCES else u
    else:
        moved = t
    out = function(p, q)
    if out.dtype != moved.dtype:
        return None
    # The result owns its tangent: a later in-place operation on the result must not write to another tensor.
    return fwAD.make_dual(out, moved.expand(out.shape).clone())


LINEAR = Layer(
    modules=(nn.Linear,),
    functions=(F.linear,),
    gradient=linear_gradient,
    folds=lambda layer: True,
    tangent=linear_tangent,
    always=True,
    is_matrix=True,
)
LAYERS = (
    LINEAR,
    Layer(
        modules=(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        functions=(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        gradient=convolution_gradient,
        holds_for=lambda layer: layer.padding_mode == "zeros" and not isinstance(layer.padding, str),
        tangent=linear_tangent,
        always=True,
        channels_first=True,
    ),
    Layer(
        modules=(nn.Embedding,),
        gradient=embedding_gradient,
        holds_for=lambda layer: layer.max_norm is None and not layer.sparse,
    ),
    Layer(functions=(torch.addmm,), tangent=addmm_tangent, always=True),
    Layer(functions=(*_SUMS, Tensor.mul, torch.mul, *_QUOTIENTS), tangent=arithmetic_tangent),
)

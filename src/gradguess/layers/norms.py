"""Layer norm, RMS norm, group norm and batch norm: scale and shift of a normalised input.

The tangent of `n = (p - mean p) / √(var p + eps)` is `(t - mean t - n mean(n t)) / √(var p + eps)`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn

from gradguess.backends.policy import group_norm_layout
from gradguess.layers.entry import Layer, is_constant, unpack

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

# --- parameter gradients -------------------------------------------------------------------------------------


def layer_norm_gradient(layer: nn.LayerNorm, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    normal = F.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
    return _affine(layer, normal, g, list(range(g.dim() - len(layer.normalized_shape), g.dim())))


def rms_norm_gradient(layer: nn.RMSNorm, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    normal = F.rms_norm(x, list(layer.normalized_shape), None, layer.eps)
    return _affine(layer, normal, g, list(range(g.dim() - len(layer.normalized_shape), g.dim())))


def group_norm_gradient(layer: nn.GroupNorm, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    return _affine(layer, F.group_norm(x, layer.num_groups, None, None, layer.eps), g, [1])


def batch_norm_gradient(layer: BatchNorm, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    if layer.training or layer.running_mean is None:
        normal = F.batch_norm(x, None, None, training=True, eps=layer.eps)
    else:
        normal = F.batch_norm(x, layer.running_mean, layer.running_var, training=False, eps=layer.eps)
    return _affine(layer, normal, g, [1])


def _affine(layer: nn.Module, normal: Tensor, g: Tensor, own: list[int]) -> dict[str, Tensor]:
    """Gradients of scale and shift; `own` are the dimensions that have a parameter for each entry."""
    others = [dim for dim in range(g.dim()) if dim not in own]
    grads = {}
    weight, bias = layer.weight, getattr(layer, "bias", None)
    if isinstance(weight, Tensor) and weight.requires_grad:
        grads["weight"] = _sum(g * normal, others).reshape(weight.shape)
    if isinstance(bias, Tensor) and bias.requires_grad:
        grads["bias"] = _sum(g, others).reshape(bias.shape)
    return grads


def _sum(t: Tensor, dims: list[int]) -> Tensor:
    return t.sum(dims) if dims else t


# --- tangents ------------------------------------------------------------------------------------------------


def layer_norm_tangent(
    function: Any, x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor | None:
    p, t = unpack(x)
    if t is None or not is_constant(weight, bias):
        return None
    runs = -1, math.prod(shape)
    moved = _through_normal(p.reshape(runs), t.reshape(runs), eps).reshape(p.shape)
    return _dual(function(p, shape, weight, bias, eps), moved, weight)


def group_norm_tangent(
    function: Any, x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor | None:
    p, t = unpack(x)
    if t is None or not is_constant(weight, bias):
        return None
    out, mean, inverse = _group_norm(p, groups, weight, bias, eps)
    p, t = _wide(p), _wide(t)
    if out.dtype != p.dtype:  # what PyTorch returns is rounded
        mean = _mean_of_groups(p, groups)
        inverse = (_mean_of_groups((p - _of_groups(mean, p)).square(), groups) + eps).rsqrt()
    mean, inverse = _of_groups(mean, p), _of_groups(inverse, p)
    normal = (p - mean) * inverse
    moved, along = (_of_groups(_mean_of_groups(values, groups), p) for values in (t, normal * t))
    moved = (t - moved).addcmul(normal, along, value=-1) * inverse
    return _dual(out, moved, weight if weight is None else _of_channels(weight, p))


def batch_norm_tangent(
    function: Any,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    p, t = unpack(x)
    if t is None or not is_constant(weight, bias, running_mean, running_var):
        return None
    out = function(p, running_mean, running_var, weight, bias, training, momentum, eps)
    if training:
        rows = p.transpose(0, 1)
        moved = _through_normal(rows.flatten(1), t.transpose(0, 1).flatten(1), eps).reshape(rows.shape).transpose(0, 1)
    else:
        assert running_var is not None
        moved = _wide(t) * _of_channels((_wide(running_var) + eps).rsqrt().to(_wide(t).dtype), p)
    return _dual(out, moved, weight if weight is None else _of_channels(weight, p))


def rms_norm_tangent(
    function: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    p, t = unpack(x)
    if t is None or not is_constant(weight):
        return None
    out, dims = function(p, shape, weight, eps), list(range(-len(shape), 0))
    p, t = _wide(p), _wide(t)
    scale = (p.square().mean(dims, keepdim=True) + (torch.finfo(p.dtype).eps if eps is None else eps)).rsqrt()
    return _dual(out, scale * (t - p * scale.square() * (p * t).mean(dims, keepdim=True)), weight)


def _wide(t: Tensor) -> Tensor:
    """In float32 at least: squares and sums of float16 overflow where their means do not."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _dual(out: Tensor, moved: Tensor, weight: Tensor | None) -> Tensor:
    """The output with the tangent of `n`, scaled by `weight` and rounded once."""
    return fwAD.make_dual(out, (moved if weight is None else moved * weight).to(out.dtype))


def _through_normal(p: Tensor, t: Tensor, eps: float) -> Tensor:
    """The tangent of `n`, normalised over the last dimension, in float32 at least."""
    p, t = _wide(p), _wide(t)
    normal, _, inverse = torch.native_layer_norm(p, p.shape[1:], None, None, eps)
    along = torch.linalg.vecdot(normal, t)[:, None] / p.shape[1]
    return torch.addcmul(t - t.mean(1, keepdim=True), normal, along, value=-1).mul_(inverse)


def _group_norm(
    p: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What `F.group_norm` returns, with the mean and the inverse deviation of every group.

    Its kernel reads tensors without looking at their strides.
    """
    batch, channels = p.shape[:2]
    p = p.contiguous(memory_format=group_norm_layout(p))
    weight, bias = (None if values is None else values.contiguous() for values in (weight, bias))
    return torch.native_group_norm(p, weight, bias, batch, channels, p[0, 0].numel(), groups, eps)


def _mean_of_groups(values: Tensor, groups: int) -> Tensor:
    """(batch, groups): first the mean over positions, since channels may lie side by side in memory."""
    of_channels = values.flatten(2).mean(2) if values.dim() > 2 else values
    return of_channels.reshape(len(values), groups, -1).mean(2)


def _of_groups(values: Tensor, like: Tensor) -> Tensor:
    """(batch, groups) as (batch, channels, 1, ...)."""
    batch, channels = like.shape[:2]
    repeated = values[:, :, None].expand(-1, -1, channels // values.shape[1])
    return repeated.reshape(batch, channels, *[1] * (like.dim() - 2))


def _of_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.dim() - 2))


LAYERS = (
    Layer((nn.LayerNorm,), (F.layer_norm,), gradient=layer_norm_gradient, tangent=layer_norm_tangent),
    Layer((nn.RMSNorm,), (F.rms_norm,), gradient=rms_norm_gradient, tangent=rms_norm_tangent),
    Layer(
        (nn.GroupNorm,), (F.group_norm,), gradient=group_norm_gradient, tangent=group_norm_tangent, channels_first=True
    ),
    Layer(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        (F.batch_norm,),
        gradient=batch_norm_gradient,
        tangent=batch_norm_tangent,
        channels_first=True,
    ),
    Layer(
        (nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), channels_first=True
    ),  # positions alone
)

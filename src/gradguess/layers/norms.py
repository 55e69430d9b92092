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

from gradguess.layers.entry import Layer, is_constant, unpack

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

# --- parameter gradients -------------------------------------------------------------------------------------


def layer_normal(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, layer.normalized_shape, None, None, layer.eps)


def rms_normal(layer: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, list(layer.normalized_shape), None, layer.eps)


def group_normal(layer: nn.GroupNorm, x: Tensor) -> Tensor:
    return F.group_norm(x, layer.num_groups, None, None, layer.eps)


def batch_normal(layer: BatchNorm, x: Tensor) -> Tensor:
    of_batch = layer.training or layer.running_mean is None
    mean, var = (None, None) if of_batch else (layer.running_mean, layer.running_var)
    return F.batch_norm(x, mean, var, training=of_batch, eps=layer.eps)


def of_positions(layer: nn.LayerNorm | nn.RMSNorm) -> bool:
    """Whether it normalises each position by itself."""
    return len(layer.normalized_shape) == 1


def norm_gradient(layer: Any, normal: Tensor, g: Tensor) -> dict[str, Tensor]:
    """The gradients of weight and bias: one number for each channel, or for each entry of the last dimensions."""
    channels = not isinstance(layer, nn.LayerNorm | nn.RMSNorm)
    grads = {}
    for name, terms in (("weight", g * normal), ("bias", g)):
        values = getattr(layer, name, None)
        if isinstance(values, Tensor) and values.requires_grad:
            like = _of_channels(values, g) if channels else values
            grads[name] = terms.sum_to_size(like.shape).reshape(values.shape)
    return grads


# --- tangents ------------------------------------------------------------------------------------------------


def layer_norm_tangent(
    function: Any,
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    tracked: bool = False,
) -> Tensor | None:
    p, t = unpack(x)
    if t is None or not is_constant(weight, bias):
        return None
    runs = -1, math.prod(shape)
    moved = _through_normal(p.reshape(runs), t.reshape(runs), eps, tracked).reshape(p.shape)
    return _dual(function(p, shape, weight, bias, eps), moved, weight)


def group_norm_tangent(
    function: Any,
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    tracked: bool = False,
) -> Tensor | None:
    p, t = unpack(x)
    if t is None or not is_constant(weight, bias):
        return None
    runs = -1, math.prod(p.shape[1:]) // groups
    moved = _through_normal(p.reshape(runs), t.reshape(runs), eps, tracked).reshape(p.shape)
    return _dual(function(p, groups, weight, bias, eps), moved, weight if weight is None else _of_channels(weight, p))


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
    tracked: bool = False,
) -> Tensor | None:
    p, t = unpack(x)
    if t is None or not is_constant(weight, bias, running_mean, running_var):
        return None
    out = function(p, running_mean, running_var, weight, bias, training, momentum, eps)
    if training:
        rows = p.transpose(0, 1)
        moved = (
            _through_normal(rows.flatten(1), t.transpose(0, 1).flatten(1), eps, tracked)
            .reshape(rows.shape)
            .transpose(0, 1)
        )
    else:
        assert running_var is not None
        moved = _wide(t)
        moved = moved * _of_channels((_wide(running_var) + eps).rsqrt().to(moved.dtype), p)
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


def _through_normal(p: Tensor, t: Tensor, eps: float, tracked: bool) -> Tensor:
    """The tangent of `n`, normalised over the last dimension, in float32 at least."""
    p, t = _wide(p), _wide(t)
    normal, _, inverse = torch.native_layer_norm(p, p.shape[1:], None, None, eps)
    if tracked:  # no derivative passes through that one
        inverse = (p.var(1, correction=0, keepdim=True) + eps).rsqrt()
    along = torch.linalg.vecdot(normal, t)[:, None] / p.shape[1]
    return torch.addcmul(t - t.mean(1, keepdim=True), normal, along, value=-1).mul_(inverse)


def _of_channels(values: Tensor, like: Tensor) -> Tensor:
    """A number for each channel, in a shape that broadcasts to (batch, channels, ...)."""
    return values.reshape(-1, *[1] * (like.dim() - 2))


LAYERS = (
    Layer(
        (nn.LayerNorm,),
        (F.layer_norm,),
        gradient=norm_gradient,
        reads=layer_normal,
        folds=of_positions,
        tangent=layer_norm_tangent,
        tracked=True,
    ),
    Layer(
        (nn.RMSNorm,),
        (F.rms_norm,),
        gradient=norm_gradient,
        reads=rms_normal,
        folds=of_positions,
        tangent=rms_norm_tangent,
    ),
    Layer(
        (nn.GroupNorm,),
        (F.group_norm,),
        gradient=norm_gradient,
        reads=group_normal,
        tangent=group_norm_tangent,
        tracked=True,
        channels_first=True,
    ),
    Layer(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        (F.batch_norm,),
        gradient=norm_gradient,
        reads=batch_normal,
        tangent=batch_norm_tangent,
        tracked=True,
        channels_first=True,
    ),
    Layer(
        (nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), channels_first=True
    ),  # positions alone
)

"""Tangents in closed form through the layers that PyTorch's forward mode carries slowly.

Where one of an operation's tensors has no tangent (a weight, a constant), PyTorch puts a symbolic zero in its place,
and the shapes of what is computed with it are worked out in Python: a quarter of a millisecond each time, many times
what the operation takes. The rules below know which tangent is missing. All other operations, and these ones with a
dual number in another place, go to PyTorch's own formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradguess import kernels

Rule = Callable[..., Tensor | None]


class ClosedForms(TorchFunctionMode):
    """Uses the rules of this module wherever one applies."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None and args:
            out = rule(func, *args, **kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)


def _parts(x: Any) -> tuple[Tensor, Tensor | None]:
    return fwAD.unpack_dual(x) if type(x) is Tensor else (x, None)


def _plain(*others: Any) -> bool:
    """Is there no tangent in any of them?"""
    return all(
        other is None or type(other) is nn.Parameter or (type(other) is Tensor and _parts(other)[1] is None)
        for other in others
    )


def _linear(
    func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor | None:
    """`W x + b` of any kind, convolutions included: the tangent is `W t`."""
    p, t = _parts(x)
    if t is None or not _plain(weight, bias):
        return None
    return fwAD.make_dual(func(p, weight, bias, *rest, **options), func(t, weight, None, *rest, **options))


def _with_constant(func: Any, a: Any, b: Any, **options: Any) -> Tensor | None:
    """`x + k`, `x - k`, `x · k`, `x / k` and the same the other way round, but for `k / x`."""
    if options or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None
    (p, t), (q, u) = _parts(a), _parts(b)
    if (t is None) == (u is None) or (t is None and func in _QUOTIENTS):
        return None
    if func not in _SUMS:
        moved = func(p, u) if t is None else func(t, q)
    elif t is None:
        moved = -u if func in _DIFFERENCES else u  # type: ignore[operator]
    else:
        moved = t
    out = func(p, q)
    if out.dtype != moved.dtype:
        return None
    # a tangent of its own: what is done to the result in place must not reach another's
    return fwAD.make_dual(out, moved.expand(out.shape).clone())


def _layer_norm(
    func: Any, x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor | None:
    p, t = _parts(x)
    if t is None or not _plain(weight, bias):
        return None
    return _normalised(func(p, shape, weight, bias, eps), p, t, math.prod(shape), weight, eps)


def _group_norm(
    func: Any, x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor | None:
    p, t = _parts(x)
    if t is None or not _plain(weight, bias):
        return None
    out, size = func(p, groups, weight, bias, eps), p[0].numel() // groups
    return _normalised(out, p, t, size, None if weight is None else _of_channels(weight, p), eps)


def _normalised(out: Tensor, p: Tensor, t: Tensor, size: int, weight: Tensor | None, eps: float) -> Tensor:
    """`out`, which is `p` normalised over runs of `size` numbers, with its tangent."""
    moved = _through_normal(p.reshape(-1, size), t.reshape(-1, size), eps).reshape(p.shape)
    return fwAD.make_dual(out, moved if weight is None else moved * weight)


def _batch_norm(
    func: Any,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    p, t = _parts(x)
    if t is None or not _plain(weight, bias, running_mean, running_var):
        return None
    out = func(p, running_mean, running_var, weight, bias, training, momentum, eps)
    if training:
        rows = p.transpose(0, 1)
        moved = _through_normal(rows.flatten(1), t.transpose(0, 1).flatten(1), eps).reshape(rows.shape).transpose(0, 1)
    else:
        assert running_var is not None
        moved = t * _of_channels((running_var + eps).rsqrt().to(t.dtype), p)
    return fwAD.make_dual(out, moved if weight is None else moved * _of_channels(weight, p))


def _rms_norm(
    func: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    p, t = _parts(x)
    if t is None or not _plain(weight):
        return None
    dims = list(range(-len(shape), 0))
    scale = (p.square().mean(dims, keepdim=True) + (torch.finfo(p.dtype).eps if eps is None else eps)).rsqrt()
    moved = scale * (t - p * scale.square() * (p * t).mean(dims, keepdim=True))
    return fwAD.make_dual(func(p, shape, weight, eps), moved if weight is None else moved * weight)


def _cross_entropy(
    func: Any,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """On a GPU, with classes as targets and a loss for each: a dozen kernels in one. Elsewhere it is no faster."""
    p, t = _parts(x)
    if t is None or p.dim() != 2 or p.shape[1] > kernels.CLASSES or not kernels.usable(p):
        return None
    usual = weight is None and size_average is None and reduce is None and label_smoothing == 0
    if not usual or reduction != "none" or target.shape != p.shape[:1] or target.is_floating_point():
        return None
    return fwAD.make_dual(*kernels.cross_entropy(p, t, target, ignore_index))


def _through_normal(p: Tensor, t: Tensor, eps: float) -> Tensor:
    """The tangent of `n = (p - mean p) / √(var p + eps)` over the last dimension: `(t - mean t - n mean(n t)) / √…`."""
    normal, _, inverse = torch.native_layer_norm(p, p.shape[1:], None, None, eps)
    along = torch.linalg.vecdot(normal, t)[:, None] / p.shape[1]
    return torch.addcmul(t - t.mean(1, keepdim=True), normal, along, value=-1).mul_(inverse)


def _of_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.dim() - 2))


_DIFFERENCES = {Tensor.sub, torch.sub}
_SUMS = {Tensor.add, torch.add, *_DIFFERENCES}
_QUOTIENTS = {Tensor.div, torch.div}
_LINEAR = (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_LINEAR, _linear),
    **dict.fromkeys((*_SUMS, Tensor.mul, torch.mul, *_QUOTIENTS), _with_constant),
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.rms_norm: _rms_norm,
    F.cross_entropy: _cross_entropy,
}

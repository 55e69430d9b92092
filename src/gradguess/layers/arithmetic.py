"""Sums, differences, products and quotients of a dual number and a constant."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from gradguess.layers.entry import Layer, unpack

_DIFFERENCES = (Tensor.sub, torch.sub)
_SUMS = (Tensor.add, torch.add, *_DIFFERENCES)
_QUOTIENTS = (Tensor.div, torch.div)


def with_constant(function: Any, a: Any, b: Any, **options: Any) -> Tensor | None:
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


LAYER = Layer(functions=(*_SUMS, Tensor.mul, torch.mul, *_QUOTIENTS), tangent=with_constant)

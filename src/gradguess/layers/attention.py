"""Attention. PyTorch's tangent holds the matrix of all pairs of positions, that of `backends.attention` does not."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradguess.backends import attention as backend
from gradguess.backends.policy import full_precision
from gradguess.backends.tracing import tracing
from gradguess.layers.entry import Layer, is_constant, unpack

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def tangent(
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """For a constant mask, and without dropout: PyTorch draws its mask for all pairs of positions."""
    if dropout_p or not _usable(attn_mask, is_causal):
        return None
    duals = [unpack(t) for t in (query, key, value)]
    q, k, v = (_as_autocast(p) for p, _ in duals)
    if not _fit(q, k, v, enable_gqa):
        return None
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.double() if q.dtype == torch.float64 else _as_autocast(attn_mask)  # float32 is misread
    attend = function if backend.fused(q, k, v, attn_mask) else partial(_in_blocks, function)
    if tracing() and backend.few(q, k):
        attend = backend.plain
    with full_precision(q.device):
        with sdpa_kernel(_KERNELS):
            out = attend(q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        dq, dk, dv = (t for _, t in duals)
        if dq is None and dk is None and dv is None:
            return out
        moved = _tangent(q, dq), _tangent(k, dk), _tangent(v, dv)
        with torch.no_grad():
            dout = backend.attention_tangent(q, k, v, out, moved, attn_mask, is_causal, scale)
        return fwAD.make_dual(out, dout)


def _in_blocks(
    function: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, **options: Any
) -> Tensor:
    """A few queries at a time."""
    parts = []
    for start, stop, seen in backend.blocks(q.shape[-2], k.shape[-2], is_causal):
        shown = backend.mask_of(mask, start, stop)
        if is_causal:
            shown = torch.ones(stop - start, seen, dtype=torch.bool, device=q.device).tril(start)
        parts.append(function(q[..., start:stop, :], k[..., :seen, :], v[..., :seen, :], shown, **options))
    return torch.cat(parts, -2)


def _tangent(primal: Tensor, tangent: Tensor | None) -> Tensor:
    """In the dtype of its primal; zero where there is none."""
    return torch.zeros_like(primal) if tangent is None else tangent.to(primal.dtype)


def _usable(mask: Tensor | None, causal: bool) -> bool:
    if mask is None:
        return True
    return is_constant(mask) and not causal and (mask.dtype == torch.bool or mask.is_floating_point())


def _fit(q: Tensor, k: Tensor, v: Tensor, shared: bool) -> bool:
    """Have they the same batch and heads? With `shared`, several heads of queries may have one of keys and values."""
    if not (q.dtype == k.dtype == v.dtype) or k.shape[:-1] != v.shape[:-1]:
        return False
    if shared and q.dim() == k.dim() > 2:
        return q.shape[:-3] == k.shape[:-3] and q.shape[-3] % k.shape[-3] == 0
    return q.shape[:-2] == k.shape[:-2]


def _as_autocast(t: Tensor) -> Tensor:
    """What autocast makes of an argument of attention."""
    device = t.device.type
    lower = torch.is_autocast_enabled(device) and t.dtype != torch.float64
    return t.to(torch.get_autocast_dtype(device)) if lower else t


def multi_head(function: Any, *args: Any, **options: Any) -> Any:
    """The code of `F.multi_head_attention_forward`, which asks for modes no more: they see the functions it calls."""
    seen = {**function.__globals__, "has_torch_function": lambda tensors: False}
    inner = FunctionType(function.__code__, seen, function.__name__, function.__defaults__, function.__closure__)
    return inner(*args, **options)


LAYERS = (
    Layer(functions=(F.scaled_dot_product_attention,), tangent=tangent, always=True),
    Layer(functions=(F.multi_head_attention_forward,), written_out=multi_head),
)

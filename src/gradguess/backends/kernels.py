"""Launching the Triton kernels: attention with its tangent, and noise.

Triton comes with PyTorch for CUDA. Callers ask `attends` or `fills` first. The slow twins are in `layers.attention` and
`noise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TRITON = find_spec("triton") is not None  # a constant: `torch.compile` cannot follow a search for it
HALF = (torch.float16, torch.bfloat16)
HEAD = 128  # the largest head of attention
ROWS, KEYS, WARPS = 64, 32, 4  # a block of attention: what a warp holds fits into its registers, at all head sizes
EXACT = "bf16x6"  # products of float32 on tensor cores: as exact as others, and three times as fast as without these
BLOCK = 512  # words of noise for each program


def attends(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether the kernel for attention can work on these queries, keys and values."""
    if q.dim() != 4 or q.dtype not in (*HALF, torch.float32) or scale <= 0:
        return False
    return q.numel() > 0 and k.numel() > 0 and q.shape[-1] == v.shape[-1] <= HEAD and _here(q)


def fuses_attention(device: torch.device, dtype: torch.dtype, *, shared: bool, masked: bool) -> bool:
    """Whether PyTorch's attention has a kernel without a matrix of all pairs; `shared`: fewer heads of keys."""
    if device.type != "cuda":
        return True
    return dtype != torch.float64 and not (shared and (masked or dtype == torch.float32))


def fills(key: Tensor) -> bool:
    """Whether the kernel for noise can read this key."""
    return _here(key)


def _here(t: Tensor) -> bool:
    return t.is_cuda and t.device.index == torch.cuda.current_device() and TRITON


def attention(
    q: Tensor, k: Tensor, v: Tensor, tangents: Sequence[Tensor | None], mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`F.scaled_dot_product_attention` and `layers.attention.attention_tangent` in one kernel, where it `attends`."""
    out, dout = like_queries(q, v), like_queries(q, v)
    batch, heads, queries, d = q.shape
    keys = k.shape[-2]
    D = max(16, 1 << (d - 1).bit_length())
    dq, dk, dv = tangents
    told = [
        _described(t, block, D) for t, block in ((q, ROWS), (dq, ROWS), (k, KEYS), (dk, KEYS), (v, KEYS), (dv, KEYS))
    ]
    if mask is not None:
        mask = (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).expand(batch, heads, queries, keys)
    strides = (*((0, 0, 0, 0) if mask is None else mask.stride()), *out.stride()[:3])
    _jit().attention[(-(-queries // ROWS) * batch * heads,)](
        *told, mask, out, dout, *strides, heads, heads // k.shape[1], queries, keys, scale,
        causal, d, D, ROWS, KEYS, EXACT, min(3, 512 // (D * q.element_size())), num_warps=WARPS,
    )  # fmt: skip
    return out, dout


def _described(t: Tensor | None, rows: int, D: int) -> Any:
    """For the hardware that copies blocks: a tensor whose positions start at multiples of 16 bytes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if t is None:
        return None
    step = 16 // t.element_size()
    if t.stride(-1) != 1 or t.data_ptr() % 16 or any(n % step or n == 0 for n in t.stride()[:-1]):
        t = F.pad(t, (0, -t.shape[-1] % step)).contiguous()
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, rows, D])


def like_queries(q: Tensor, v: Tensor) -> Tensor:
    """Room for the output of attention, which lies in memory as the queries do: what follows undoes a transposition."""
    if q.shape[-1] == v.shape[-1]:
        like = torch.empty_like(q)
        if like.stride(-1) == 1:  # not where queries overlap, or lie in another order
            return like
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def normal_numbers(key: Tensor, row: int, rows: int, column: int, columns: int, dtype: torch.dtype) -> Tensor:
    """`noise.normal_numbers` in one kernel."""
    z, words = key.new_empty((rows, columns), dtype=dtype), -(-columns // 2)
    if z.numel():
        _jit().normal_numbers[(-(-rows * words // BLOCK),)](key, z, row, column, rows, words, columns, BLOCK)
    return z


@cache
def _jit() -> Any:
    """The kernels, compiled when they are first used; Triton is imported only where there is a GPU."""
    from gradguess.backends import triton_kernels

    return triton_kernels

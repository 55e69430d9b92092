"""Launching the Triton kernels: the tangent of attention, and noise.

Triton comes with PyTorch for CUDA. Callers ask `attends` or `fills` first. The slow twins are in `layers.attention` and
`noise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
HEAD = 128  # the largest head of attention
BLOCK = 512  # words of noise for each program
# By head size: queries and keys of a block of attention, warps, stages. What a warp holds fits into its registers.
TILES = {16: (128, 64, 8, 3), 32: (64, 64, 4, 3), 64: (64, 64, 4, 2), 128: (128, 32, 8, 2)}


def attends(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel for attention can work on these queries, keys and values. It is for half precision."""
    if q.dim() != 4 or q.dtype not in HALF:
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
    return t.is_cuda and t.device.index == torch.cuda.current_device() and _installed()


def attention_tangent(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, tangents: Sequence[Tensor], mask: Tensor | None, causal: bool,
    scale: float, tiles: tuple[int, int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """`layers.attention.attention_tangent` in one kernel, for four dimensions; `tiles` as in `TILES`."""
    result = like_queries(q, v)
    (q, dq), (k, dk), (v, dv) = (_alike(*pair) for pair in zip((q, k, v), tangents, strict=True))
    out = out if out.stride(-1) == 1 else out.contiguous()
    batch, heads, queries, d = q.shape
    keys = k.shape[-2]
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    bias = q if mask is None else mask.view(torch.uint8) if kind == 1 else mask
    shown = (0, 0, 0, 0) if mask is None else bias.expand(batch, heads, queries, keys).stride()
    D = max(16, 1 << (d - 1).bit_length())
    rows, columns, warps, stages = tiles or TILES[D]
    rows = min(rows, max(16, 1 << (queries - 1).bit_length()))
    columns = min(columns, max(16, 1 << (keys - 1).bit_length()))
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *shown, *out.stride()[:3], *result.stride()[:3])
    _jit().attention_tangent[(-(-queries // rows) * batch * heads,)](
        q, dq, k, dk, v, dv, bias, out, result, *strides, heads, heads // k.shape[1], queries, keys, scale,
        kind, causal, d, D, rows, columns,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return result


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


def _alike(t: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """With the same strides, and the numbers of one position side by side."""
    return (t, dt) if t.stride() == dt.stride() and t.stride(-1) == 1 else (t.contiguous(), dt.contiguous())


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


@cache
def _jit() -> Any:
    """The kernels, compiled when they are first used; Triton is imported only where there is a GPU."""
    from gradguess.backends import triton_kernels

    return triton_kernels

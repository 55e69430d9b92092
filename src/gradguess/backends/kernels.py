"""Launching the Triton kernels: small factorisations on a GPU, the tangent of attention, and noise.

A batch of k × k problems is too small for the libraries: a factorisation, two solves and what lies between them are a
dozen launches that each take as long to start as to run. Here a sample's matrix stays in registers. Triton comes with
PyTorch for CUDA. Callers ask `usable`, `attends` or `fills` first. The slow twins are the other paths of
`cholesky`, `orthonormal`, `attention` and `normal`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from gradguess.backends.tracing import tracing

LARGEST = 32  # k; a larger matrix does not fit into the registers of a warp
HALF = (torch.float16, torch.bfloat16)
HEAD = 128  # the largest head of attention
BLOCK = 512  # words of noise for each program
PASSES = 3  # of Cholesky QR, until rows are orthonormal
# By head size: queries and keys of a block of attention, warps, stages. What a warp holds fits into its registers.
TILES = {16: (128, 64, 8, 3), 32: (64, 64, 4, 3), 64: (64, 64, 4, 2), 128: (128, 32, 8, 2)}


def usable(t: Tensor, k: int = 1) -> bool:
    """Can these kernels work on tensors like `t` with matrices of this size? They run on the current device."""
    return t.dtype == torch.float32 and k <= LARGEST and _here(t)


def attends(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Can the kernel for attention work on these queries, keys and values? It is for half precision."""
    if q.dim() != 4 or q.dtype not in HALF:
        return False
    return q.numel() > 0 and k.numel() > 0 and q.shape[-1] == v.shape[-1] <= HEAD and _here(q)


def fills(key: Tensor) -> bool:
    """Can the kernel for noise read this key?"""
    return _here(key)


def _here(t: Tensor) -> bool:
    if tracing() or not t.is_cuda:
        return False
    return t.device.index == torch.cuda.current_device() and _installed()


def solve(C: Tensor, z: Tensor) -> Tensor:
    """`C^{-½} z`, that is `L^{-T} z` with `L Lᵀ = C`: (batch, k, k), (..., batch, k) -> the same."""
    batch, k = z.shape[-2:]
    w = torch.empty_like(z, memory_format=torch.contiguous_format)
    _jit().solve[(batch,)](
        C.contiguous(), z.contiguous(), w, batch, tolerance(k), math.prod(z.shape[:-2]), k, _padded(k), num_warps=1
    )
    return w


def tolerance(k: int) -> float:
    """The relative size of a pivot that counts as zero, as in `semidefinite_cholesky`."""
    return 100 * k * torch.finfo(torch.float32).eps


def orthonormal_rows(R: Tensor, rtol: float, passes: int = PASSES) -> tuple[Tensor, Tensor]:
    """Rows (B, k, d) orthonormalised by `passes` of Cholesky QR, and what was left of each (`orthonormal`).

    A pass is two products and one small kernel, which works out the inverse factor of the Gram matrix of the rows.
    """
    k = R.shape[-2]
    left = R.new_empty(R.shape[:-1])
    for i in range(passes):
        C = R @ R.mT
        M = torch.empty_like(C)
        _jit().whiten[(len(C),)](C, left, M, rtol, tolerance(k), i == 0, i == PASSES - 1, k, _padded(k), num_warps=1)
        R = M @ R
    return R, left[..., None]


def attention_tangent(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, tangents: Sequence[Tensor], mask: Tensor | None, causal: bool,
    scale: float, tiles: tuple[int, int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """`attention.attention_tangent` in one kernel, for four dimensions; `tiles` as in `TILES`."""
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
    """`normal.normal_numbers` in one kernel."""
    z, words = key.new_empty((rows, columns), dtype=dtype), -(-columns // 2)
    if z.numel():
        _jit().normal_numbers[(-(-rows * words // BLOCK),)](key, z, row, column, rows, words, columns, BLOCK)
    return z


def _alike(t: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """With the same strides, and the numbers of one position side by side."""
    return (t, dt) if t.stride() == dt.stride() and t.stride(-1) == 1 else (t.contiguous(), dt.contiguous())


def _padded(k: int) -> int:
    """One of two sizes, so that few kernels are compiled."""
    return 16 if k <= 16 else 32


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


@cache
def _jit() -> Any:
    """The kernels, compiled when they are first used; Triton is imported only where there is a GPU."""
    from gradguess.backends import triton_kernels

    return triton_kernels

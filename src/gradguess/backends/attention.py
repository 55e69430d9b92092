"""Attention and its tangent together, without the matrix of all pairs of positions.

With `S = scale Q Kᵀ + mask`, `P = softmax(S)` and `O = P V`, the tangents `dQ`, `dK`, `dV` give

    dS = scale (dQ Kᵀ + Q dKᵀ),        dO = P dV + (P ∘ dS) V - rowsum(P ∘ dS) O.

A few queries need their own rows of `P` and `dS` alone. So memory grows with the length, and not with its square.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradguess.backends import kernels

__all__ = ["attention"]

BLOCK = 128  # queries at a time; 64 and 256 take a tenth longer on a CPU, all at once twice as long


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`F.scaled_dot_product_attention(q, k, v)` and its derivative along `dq`, `dk`, `dv`.

    Half precision is summed in float32. Queries that see no key get zeros. In a trace it is one operation.

    Args:
        q: (..., heads, T, d), and `dq` like it.
        k: (..., heads, N, d), and `dk` like it. Where it has fewer heads than `q`, neighbouring heads share one.
        v: (..., heads, N, e), and `dv` like it.
        mask: broadcasts to (..., heads, T, N). True where a query sees a key, or a number that is added to the score.
        causal: a query sees the keys up to its own position.
        scale: of the scores; 1/√d if not given.

    Returns:
        output and tangent, (..., heads, T, e) each.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    found: tuple[Tensor, Tensor] = torch.ops.gradguess.attention(q, k, v, dq, dk, dv, mask, causal, scale)
    return found


_NAME = "gradguess::attention"
torch.library.define(
    _NAME,
    "(Tensor q, Tensor k, Tensor v, Tensor dq, Tensor dk, Tensor dv, Tensor? mask, bool causal, float scale)"
    " -> (Tensor, Tensor)",
)


@torch.library.register_fake(_NAME)
def _empty(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return kernels.like_queries(q, v), kernels.like_queries(q, v)


def in_blocks(
    q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """In plain operations, `BLOCK` queries at a time."""
    out, dout = _empty(q, k, v)
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    queries = torch.cat([dq, q], -1).to(wide) * scale
    shared = 1 if q.dim() < 3 else q.shape[-3] // k.shape[-3]
    if shared > 1:
        k, dk, v, dv = (t.repeat_interleave(shared, -3) for t in (k, dk, v, dv))
    keys, values = torch.cat([k, dk], -1).to(wide).mT, torch.cat([v, dv], -1).to(wide)
    d, e, T, N = k.shape[-1], v.shape[-1], q.shape[-2], k.shape[-2]
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], T, N)
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        seen = min(stop, N) if causal else N  # keys
        rows = queries[..., start:stop, :]
        S = rows[..., d:] @ keys[..., :d, :seen]
        if causal and start < seen:
            above = torch.ones(stop - start, seen - start, dtype=torch.bool, device=q.device).triu(1)
            S[..., start:].masked_fill_(above, -math.inf)
        if mask is None:
            P = torch.softmax(S, -1)
        else:
            part = mask[..., start:stop, :]
            S = S.masked_fill_(~part, -math.inf) if part.dtype == torch.bool else S.add_(part)
            P = torch._safe_softmax(S, -1)
        del S  # as large as P
        W = (rows @ keys[..., :seen]).mul_(P)  # P ∘ dS
        both = P @ values[..., :seen, :]
        o = both[..., :e]
        out[..., start:stop, :] = o
        dout[..., start:stop, :] = both[..., e:] + W @ values[..., :seen, :e] - W.sum(-1, keepdim=True) * o
    return out, dout


@torch.library.impl(_NAME, "CompositeExplicitAutograd")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    work = kernels.attention if scale > 0 and kernels.attends(q, k, v) else in_blocks
    return work(q, k, v, dq, dk, dv, mask, causal, scale)

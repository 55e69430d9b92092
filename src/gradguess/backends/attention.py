"""The tangent of attention, without the matrix of all pairs of positions.

With `S = scale Q Kᵀ + mask`, `P = softmax(S)` and `O = P V`, the tangents `dQ`, `dK`, `dV` give

    dS = scale (dQ Kᵀ + Q dKᵀ),        dO = P dV + (P ∘ dS) V - rowsum(P ∘ dS) O.

A few queries need their own rows of `P` and `dS` alone. So memory grows with the length, and not with its square. `O`
is PyTorch's own: a graph that is recorded beside the tangent, or in a second pass of a trace, shares it. Of few queries
and keys a trace has `plain` operations instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradguess.backends import kernels

BLOCK = 128  # queries at a time: as fast on a CPU as 64 and 256; all 2048 at once take up to three times as long


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Has PyTorch a kernel for these that holds less than all pairs of positions? Few queries need none."""
    if q.shape[-2] <= BLOCK:
        return True
    if q.dim() != 4 or q.shape[-1] != v.shape[-1] or (mask is not None and mask.dim() not in (2, 4)):
        return False
    if not q.is_cuda:
        return True
    shares = q.shape[1] != k.shape[1]
    return q.dtype != torch.float64 and not (shares and (mask is not None or q.dtype == torch.float32))


def few(q: Tensor, k: Tensor) -> bool:
    """Is it one block of queries, with few keys, that no kernel is for? Plain operations, fused, are faster then."""
    return 0 < q.shape[-2] <= BLOCK and k.shape[-2] <= 4 * BLOCK and q.dtype not in kernels.HALF


def plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool = False
) -> Tensor:
    """Attention of few queries by the operations of its tangent, so that a graph of both has them once."""
    _, _, seen = next(blocks(q.shape[-2], k.shape[-2], is_causal))
    k, v = (_for_each_head(t, q)[..., :seen, :] for t in (k, v))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    return _weights(q, k, mask, is_causal) @ v


def blocks(queries: int, keys: int, causal: bool) -> Iterator[tuple[int, int, int]]:
    """The first query of each block, the one behind its last, and how many keys they see."""
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        yield start, stop, min(stop, keys) if causal else keys


def mask_of(mask: Tensor | None, start: int, stop: int) -> Tensor | None:
    """The mask of a block of queries: its own rows, if it has one for each query."""
    return mask if mask is None or mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., start:stop, :]


def attention_tangent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    tangents: Sequence[Tensor],
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The derivative of `out = F.scaled_dot_product_attention(q, k, v)` along `tangents`.

    Half precision is summed in float32. Queries that see no key get zeros. In a trace it is one operation, but plain
    ones, which are fused there, for a block of queries that no kernel is for. The kernel subtracts a multiple of the
    rounded `out`, so that it loses accuracy where a tangent moves all scores of a query alike.

    Args:
        q: (..., heads, T, d).
        k: (..., heads, N, d). Where it has fewer heads than `q`, neighbouring heads share one.
        v: (..., heads, N, e).
        out: (..., heads, T, e).
        tangents: of `q`, `k` and `v`, and like these.
        mask: broadcasts to (..., heads, T, N). True where a query sees a key, or a number that is added to the score.
        causal: a query sees the keys up to its own position.
        scale: of the scores; 1/√d if not given.

    Returns:
        like `out`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if few(q, k):
        return next(_rows(q, k, v, tangents, mask, causal, scale))[-1]
    found: Tensor = torch.ops.gradguess.attention_tangent(q, k, v, out, list(tangents), mask, causal, scale)
    return found


_NAME = "gradguess::attention_tangent"
torch.library.define(
    _NAME,
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor[] tangents, Tensor? mask, bool causal, float scale) -> Tensor",
)


@torch.library.register_fake(_NAME)
def _empty(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return kernels.like_queries(q, v)


def in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    tangents: Sequence[Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """In plain operations, `BLOCK` queries at a time. `out` is not needed: P is there."""
    result = _empty(q, k, v)
    for start, stop, rows in _rows(q, k, v, tangents, mask, causal, scale):
        result[..., start:stop, :] = rows
    return result


def _rows(
    q: Tensor, k: Tensor, v: Tensor, tangents: Sequence[Tensor], mask: Tensor | None, causal: bool, scale: float
) -> Iterator[tuple[int, int, Tensor]]:
    """The first query of each block, the one behind its last, and the tangent of their outputs."""
    dq, dk, dv = tangents
    k, v, dk, dv = (_for_each_head(t, q) for t in (k, v, dk, dv))
    wide = torch.float32 if q.dtype in kernels.HALF else q.dtype
    q, k, v, dq, dk, dv = (t.to(wide) for t in (q, k, v, dq, dk, dv))
    q = q * scale
    moving, along = torch.cat([dq * scale, q], -1), torch.cat([k, dk], -1)  # dS is one product of the two
    for start, stop, seen in blocks(q.shape[-2], k.shape[-2], causal):
        shown = mask_of(mask, start, stop)
        P = _weights(q[..., start:stop, :], k[..., :seen, :], shown, causal, start)
        dout = P @ dv[..., :seen, :]
        W = (moving[..., start:stop, :] @ along[..., :seen, :].mT).mul_(P)  # P ∘ dS
        W -= P * W.sum(-1, keepdim=True)  # what moves all scores of a query alike cancels here, before it is rounded
        yield start, stop, dout + W @ v[..., :seen, :]


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, start: int = 0) -> Tensor:
    """P of some queries, which are scaled already; `start` is the position of the first."""
    S = q @ k.mT
    if causal and start < S.shape[-1]:
        above = torch.ones(S.shape[-2], S.shape[-1] - start, dtype=torch.bool, device=q.device).triu(1)
        (S[..., start:] if start else S).masked_fill_(above, -math.inf)
    if mask is None:
        return torch.softmax(S, -1)
    return torch._safe_softmax(S.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else S.add_(mask), -1)


def _for_each_head(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each head of the queries."""
    shared = 1 if q.dim() < 3 else q.shape[-3] // t.shape[-3]
    return t.repeat_interleave(shared, -3) if shared > 1 else t


@torch.library.impl(_NAME, "CompositeExplicitAutograd")
def _tangent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    tangents: list[Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    work = kernels.attention_tangent if scale > 0 and kernels.attends(q, k, v) else in_blocks
    return work(q, k, v, out, tangents, mask, causal, scale)

"""Attention. PyTorch's tangent holds the matrix of all pairs of positions, this one does not.

With `S = scale Q Kᵀ + mask`, `P = softmax(S)` and `O = P V`, the tangents `dQ`, `dK`, `dV` give

    dS = scale (dQ Kᵀ + Q dKᵀ),        dO = P dV + (P ∘ dS) V - rowsum(P ∘ dS) O.

A block of queries needs no other rows of `P` and `dS` than its own. So memory grows with the length, and not with its
square. On CUDA one kernel makes `O` and `dO`. Where there is none, or a graph is recorded, `O` is PyTorch's: in blocks,
a graph beside the tangent and one in a second pass of a trace share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradguess.backends import kernels
from gradguess.backends.policy import full_precision
from gradguess.errors import ForwardModeError
from gradguess.layers.entry import Layer, is_constant, is_differentiated, recorded, rewired, unpack

BLOCK = 128  # queries at a time: as fast on a CPU as 64 and 256; all 2048 at once take up to three times as long
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
    tracked: bool = False,
) -> Tensor:
    """For a constant mask, and without dropout: PyTorch draws its mask for all pairs of positions.

    Other derivatives pass through a tangent that is `tracked`.
    """
    arguments = query, key, value, attn_mask, dropout_p, is_causal
    if dropout_p or not is_constant(attn_mask) or (is_causal and attn_mask is not None) or is_differentiated(tracked):
        return _by_formula(function, *arguments, scale=scale, enable_gqa=enable_gqa)
    duals = [unpack(t) for t in (query, key, value)]
    q, k, v = (_as_autocast(p) for p, _ in duals)
    if not _fit(q, k, v, enable_gqa):
        return _by_formula(function, *arguments, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.double() if q.dtype == torch.float64 else _as_autocast(attn_mask)  # float32 is misread
    attend = function if _fused(q, k, v, attn_mask) else partial(_attend_in_blocks, function)
    with full_precision(q.device):
        given = (q, k, v, [t if t is None else t.to(q.dtype) for _, t in duals], attn_mask, is_causal, scale)
        out, dout = None, None
        if any(t is not None for _, t in duals):
            if tracked and torch.is_grad_enabled():
                dout = _tracked(*given)
            else:
                with torch.no_grad():
                    out, dout = attention_tangent(*given)
        if out is None or (torch.is_grad_enabled() and any(recorded(p) for p in (q, k, v))):
            with sdpa_kernel(_KERNELS):
                out = attend(q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        return out if dout is None else fwAD.make_dual(out, dout)


def _by_formula(function: Any, *args: Any, **options: Any) -> Tensor:
    """PyTorch's own attention with all pairs of positions, through which all derivatives pass."""
    with sdpa_kernel(SDPBackend.MATH):
        out: Tensor = function(*args, **options)
    return out


def _attend_in_blocks(
    function: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, **options: Any
) -> Tensor:
    """A few queries at a time."""
    parts = [
        function(q[..., rows, :], k[..., keys, :], v[..., keys, :], shown, **options)
        for rows, keys, shown in _blocks(q, k, mask, is_causal)
    ]
    return torch.cat(parts, -2)


def _blocks(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """A few queries at a time: which they are, the keys that they may see, and the mask of these pairs."""
    queries, keys = q.shape[-2], k.shape[-2]
    for start in range(0, queries, BLOCK):
        rows = slice(start, min(start + BLOCK, queries))
        seen = min(rows.stop, keys) if causal else keys
        shown: Tensor | None = None
        if causal:
            shown = torch.ones(rows.stop - start, seen, dtype=torch.bool, device=q.device).tril(start)
        elif mask is not None:  # its own rows, if it has one for each query
            shown = mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., rows, :]
        yield rows, slice(seen), shown


def _fit(q: Tensor, k: Tensor, v: Tensor, shared: bool) -> bool:
    """Whether batch and heads are the same. With `shared`, several heads of queries may have one of keys and values."""
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


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether PyTorch has a kernel for these that holds less than all pairs of positions; few queries need none."""
    if q.shape[-2] <= BLOCK:
        return True
    if q.dim() != 4 or q.shape[-1] != v.shape[-1] or (mask is not None and mask.dim() not in (2, 4)):
        return False
    return kernels.fuses_attention(q.device, q.dtype, shared=q.shape[1] != k.shape[1], masked=mask is not None)


def attention_tangent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tangents: Sequence[Tensor | None],
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor | None, Tensor]:
    """The derivative of `F.scaled_dot_product_attention(q, k, v)` along `tangents`, beside its value.

    Half precision is summed in float32 and rounded once. Queries that see no key get zeros. In a trace it is one
    operation, but plain ones, which are fused there, for a block of queries in full precision.

    Args:
        q: (..., heads, T, d).
        k: (..., heads, N, d). Where it has fewer heads than `q`, neighbouring heads share one.
        v: (..., heads, N, e).
        tangents: of `q`, `k` and `v`, and like these; None for a constant.
        mask: broadcasts to (..., heads, T, N). True where a query sees a key, or a number that is added to the score.
        causal: a query sees the keys up to its own position.
        scale: of the scores; 1/√d if not given.

    Returns:
        (..., heads, T, e): the value, or None where no kernel makes both, and the derivative.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rest = (q, k, v, list(tangents), mask, causal, scale)
    if 0 < q.shape[-2] <= BLOCK and k.shape[-2] <= 4 * BLOCK and q.dtype not in kernels.HALF:
        return None, next(_rows(*rest))[-1]
    if kernels.attends(q, k, v, scale):
        value, moved = torch.ops.gradguess.attention(*rest)
        return value, moved
    return None, torch.ops.gradguess.attention_tangent(*rest)


def _operation(name: str, schema: str, work: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """One operation for traces."""
    torch.library.define(f"gradguess::{name}", schema)
    torch.library.impl(f"gradguess::{name}", "CompositeExplicitAutograd")(work)
    torch.library.register_fake(f"gradguess::{name}")(fake)


def in_blocks(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """`attention_tangent` in plain operations, `BLOCK` queries at a time."""
    result = kernels.like_queries(q, v)
    for rows, moved in _rows(q, k, v, *rest):
        result[..., rows, :] = moved
    return result


_GIVEN = "(Tensor q, Tensor k, Tensor v, Tensor?[] tangents, Tensor? mask, bool causal, float scale)"
_operation("attention_tangent", f"{_GIVEN} -> Tensor", in_blocks, lambda q, k, v, *rest: kernels.like_queries(q, v))
_operation(
    "attention", f"{_GIVEN} -> (Tensor, Tensor)", lambda *given: kernels.attention(*given),
    lambda q, k, v, *rest: (kernels.like_queries(q, v), kernels.like_queries(q, v)),
)  # fmt: skip


def _rows(
    q: Tensor, k: Tensor, v: Tensor, tangents: Sequence[Tensor | None], mask: Tensor | None, causal: bool, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """The queries of each block, and the tangent of their outputs."""
    wide = torch.float32 if q.dtype in kernels.HALF else q.dtype
    k, v = (_for_each_head(t.to(wide), q) for t in (k, v))
    dq, dk, dv = (None if t is None else t.to(wide) for t in tangents)
    dk, dv = (None if t is None else _for_each_head(t, q) for t in (dk, dv))
    q = q.to(wide) * scale
    sides = [] if dq is None else [(dq * scale, k)]
    sides += [] if dk is None else [(q, dk)]
    moving, along = (torch.cat(side, -1) for side in zip(*sides, strict=True)) if sides else (q, k)
    for rows, keys, shown in _blocks(q, k, mask, causal):
        P = _weights(q[..., rows, :] @ k[..., keys, :].mT, shown)
        moved: Any = 0 if dv is None else P @ dv[..., keys, :]
        if sides:
            W = (moving[..., rows, :] @ along[..., keys, :].mT).mul_(P)  # P ∘ dS, which is one product
            W -= P * W.sum(-1, keepdim=True)  # what moves all scores of a query alike cancels here, before rounding
            moved = moved + W @ v[..., keys, :]
        yield rows, moved


def _weights(S: Tensor, shown: Tensor | None) -> Tensor:
    """`P`, from scores without their mask, which it may overwrite."""
    if shown is None:
        return torch.softmax(S, -1)
    S = S.masked_fill_(~shown, -math.inf) if shown.dtype == torch.bool else S.add_(shown)
    P: Tensor = torch.ops.aten._safe_softmax(S, -1)
    return P


def _tracked(
    q: Tensor, k: Tensor, v: Tensor, tangents: Sequence[Tensor | None], mask: Tensor | None, causal: bool, scale: Any
) -> Tensor:
    """`attention_tangent`, through which gradients pass. They hold a block of queries at a time as well."""
    moved = [torch.zeros_like(p) if t is None else t for p, t in zip((q, k, v), tangents, strict=True)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    found: Tensor = torch.ops.gradguess.tracked_tangent(q, k, v, *moved, mask, causal, scale)
    return found


def _tangent_alone(q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, *rest: Any) -> Tensor:
    given = (q, k, v, (dq, dk, dv), *rest)
    return kernels.attention(*given)[1] if kernels.attends(q, k, v, rest[-1]) else in_blocks(*given)


def _gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    mask: Tensor | None, causal: bool, scale: float,
) -> list[Tensor]:  # fmt: skip
    """What the cotangent `g` of `dO` gives those of `q`, `k`, `v`, of their tangents, and of a mask of numbers.

    With `W = P ∘ dS - P rowsum(P ∘ dS)`, the tangent of `P`, it is the reverse of `dO = P dV + W V`.
    """
    wide = torch.float32 if q.dtype in kernels.HALF else q.dtype
    Q, dQ, G = (t.to(wide) for t in (q, dq, g))
    K, V, dK, dV = (_for_each_head(t.to(wide), q) for t in (k, v, dk, dv))
    bias = torch.zeros_like(mask, dtype=wide) if mask is not None and mask.is_floating_point() else Q.new_empty(0)
    found = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (Q, K, V, dQ, dK, dV)]
    for rows, keys, shown in _blocks(q, k, mask, causal):
        at, dat, out = (t[..., rows, :] for t in (Q, dQ, G))
        to, value, dto, dvalue = (t[..., keys, :] for t in (K, V, dK, dV))
        P = _weights(scale * at @ to.mT, shown)
        dS = scale * (dat @ to.mT + at @ dto.mT)
        mean = (P * dS).sum(-1, keepdim=True)
        of_W = out @ value.mT
        of_PdS = of_W - (of_W * P).sum(-1, keepdim=True)
        of_P, of_dS = out @ dvalue.mT - of_W * mean + of_PdS * dS, of_PdS * P
        of_S = P * (of_P - (of_P * P).sum(-1, keepdim=True))
        if bias.numel():
            assert shown is not None
            (bias if shown.shape == bias.shape else bias[..., rows, :]).add_(of_S.sum_to_size(shown.shape))
        of_S, of_dS = scale * of_S, scale * of_dS
        found[0][..., rows, :] = of_S @ to + of_dS @ dto
        found[3][..., rows, :] = of_dS @ to
        found[1][..., keys, :] += of_S.mT @ at + of_dS.mT @ dat
        found[2][..., keys, :] += (P * (dS - mean)).mT @ out
        found[4][..., keys, :] += of_dS.mT @ at
        found[5][..., keys, :] += P.mT @ out
    for i, t in ((1, k), (2, v), (4, dk), (5, dv)):  # heads of queries that share one
        found[i] = found[i] if found[i].shape == t.shape else found[i].unflatten(-3, (t.shape[-3], -1)).sum(-3)
    return [*(t.to(q.dtype) for t in found), bias if mask is None else bias.to(mask.dtype)]


def _like_all(g: Tensor, *given: Any) -> list[Tensor]:
    mask = given[6]
    found = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in given[:6]]
    return [*found, torch.empty_like(mask) if mask is not None and mask.is_floating_point() else g.new_empty(0)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.rest = inputs[7:]


def _pull(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    *found, bias = torch.ops.gradguess.tracked_gradients(g, *ctx.saved_tensors, *ctx.rest)
    return (*found, bias if bias.numel() else None, None, None)


def _refuse(ctx: Any, *gs: Any) -> Any:
    raise ForwardModeError(
        "Second derivatives of the tangent of attention are taken by PyTorch's own formulas alone: call "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) in the place of gg.forward_mode()."
    )


_EACH = "Tensor q, Tensor k, Tensor v, Tensor dq, Tensor dk, Tensor dv, Tensor? mask, bool causal, float scale"
_operation("tracked_tangent", f"({_EACH}) -> Tensor", _tangent_alone, lambda q, k, v, *_: kernels.like_queries(q, v))
_operation("tracked_gradients", f"(Tensor g, {_EACH}) -> Tensor[]", _gradients, _like_all)
torch.library.register_autograd("gradguess::tracked_tangent", _pull, setup_context=_keep)
torch.library.register_autograd("gradguess::tracked_gradients", _refuse)


def _for_each_head(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each head of the queries."""
    shared = 1 if q.dim() < 3 else q.shape[-3] // t.shape[-3]
    return t.repeat_interleave(shared, -3) if shared > 1 else t


def _check_mask(*args: Any) -> None:
    """PyTorch's own, whose message `torch.compile` cannot follow beside a mode."""
    if not torch.compiler.is_dynamo_compiling():
        vars(F)["_check_key_padding_mask"](*args)


_multi_head = rewired(
    F.multi_head_attention_forward, has_torch_function=lambda tensors: False, _check_key_padding_mask=_check_mask
)


def multi_head(function: Any, *args: Any, **options: Any) -> Any:
    """`F.multi_head_attention_forward` without the look for modes: they see what it calls."""
    return _multi_head(*args, **options)


LAYERS = (
    Layer(functions=(F.scaled_dot_product_attention,), tangent=tangent, always=True, tracked=True),
    Layer(functions=(F.multi_head_attention_forward,), written_out=multi_head),
)

"""The cross entropy of each sample, in blocks where there are many classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor

from gradguess.layers.entry import Layer, is_constant, unpack

BLOCK = 2**23  # numbers: a vocabulary of 8192 for as many tokens is 8 blocks, of 32 MiB each in float32
Losses = Callable[[Tensor, Tensor], Tensor]  # (logits, targets) -> one loss each


def tangent(function: Any, x: Tensor, target: Tensor, **options: Any) -> Tensor | None:
    """For one loss of each row. `F.cross_entropy` names all of its options to a rule."""
    old = options["size_average"] is not None or options["reduce"] is not None
    if old or options["reduction"] != "none" or x.dim() < 2 or target.shape[:1] != x.shape[:1]:
        return None
    p, t = unpack(x)
    weight = options["weight"]
    compiler = torch._guards.TracingContext.try_get() is not None  # it has blocks of its own
    wrapped = type(x) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(p)
    if p.numel() <= BLOCK or len(p) == 1 or compiler or wrapped or not _given(target) or not _given(weight):
        return None
    return _in_blocks(partial(function, **options), p, t, target, weight)


def _given(other: Tensor | None) -> bool:
    """Whether a tensor is a constant, for tangents and for gradients."""
    return other is None or (is_constant(other) and not other.requires_grad)


def _in_blocks(losses: Losses, p: Tensor, t: Tensor | None, target: Tensor, weight: Tensor | None) -> Tensor:
    """Row by row the same as at once. What is as large as the logits, many times over, is held of one block alone."""
    rows = max(1, BLOCK // p[0].numel())
    values, tangents = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for start in range(0, len(p), rows):
            part, own = slice(start, start + rows), p[start : start + rows]
            loss = losses(own if t is None else fwAD.make_dual(own, t[part]), target[part])
            value, moved = unpack(loss)
            values.append(value)
            tangents += [] if moved is None else [moved]
        value = torch.cat(values)
    if torch.is_grad_enabled() and p.requires_grad:
        value = _Recomputed.apply(p, value, losses, target, weight, rows)
    return value if t is None else fwAD.make_dual(value, torch.cat(tangents))


class _Recomputed(torch.autograd.Function):
    """Losses that are known. Their graph holds the logits alone, and is made block by block when it is needed."""

    @staticmethod
    def forward(
        ctx: Any, p: Tensor, value: Tensor, losses: Losses, target: Tensor, weight: Tensor | None, rows: int
    ) -> Tensor:
        ctx.save_for_backward(p, target, weight)  # so that PyTorch notices if one is written to
        kind = p.device.type
        ctx.autocast = partial(
            torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )
        ctx.losses, ctx.rows = losses, rows
        return value.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        p, target, _ = ctx.saved_tensors
        if torch.is_grad_enabled():  # its gradient is differentiated as well: at once, with a graph
            with ctx.autocast():
                loss = ctx.losses(p, target)
            return (*torch.autograd.grad(loss, p, g, create_graph=True), None, None, None, None, None)
        found = torch.empty_like(p)
        for start in range(0, len(p), ctx.rows):
            part = slice(start, start + ctx.rows)
            with torch.enable_grad(), ctx.autocast():
                own = p[part].detach().requires_grad_()
                loss = ctx.losses(own, target[part])
            (found[part],) = torch.autograd.grad(loss, own, g[part])
        return found, None, None, None, None, None


def in_one_piece(function: Any, x: Tensor, linear: Tensor, target: Tensor, **options: Any) -> Tensor | None:
    """`F.linear_cross_entropy` without its chunks: a tangent is lost there, and PyTorch does not say so."""
    if options["options"] is None or is_constant(x, linear, options["linear_bias"]):
        return None
    whole: Tensor = function(x, linear, target, **options | {"options": None})
    return whole


LAYERS = (
    Layer(functions=(F.cross_entropy,), tangent=tangent, always=True),
    Layer(functions=tuple(filter(None, [getattr(F, "linear_cross_entropy", None)])), written_out=in_one_piece),
)

"""The cross entropy of each sample, in blocks where there are many classes; so is the layer that makes the logits."""

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
Losses = Callable[..., Tensor]  # (rows, their targets, what all rows share) -> one loss each


def tangent(function: Any, x: Tensor, target: Tensor, **options: Any) -> Tensor | None:
    """For one loss of each row. `F.cross_entropy` names all of its options to a rule, but for the compiler."""
    old = options.get("size_average") is not None or options.get("reduce") is not None
    if old or options.get("reduction") != "none" or x.dim() < 2 or target.shape[:1] != x.shape[:1]:
        return None
    p = unpack(x)[0]
    if p.numel() <= BLOCK or not _splits(x, target, options.get("weight")):
        return None
    return _in_blocks(partial(function, **options), max(1, BLOCK // p[0].numel()), target, options.get("weight"), x)


def linear(function: Any, x: Tensor, matrix: Tensor, target: Tensor, **options: Any) -> Tensor | None:
    """`F.linear_cross_entropy`: no more logits than a block at once, or without PyTorch's chunks, which lose a tangent
    and do not say so.
    """
    bias, chunks, options["options"] = options.pop("linear_bias", None), options.get("options"), None

    def losses(x: Tensor, target: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = function(x, matrix, target, linear_bias=bias, **options)
        return found

    many = options.get("reduction") == "none" and x.dim() == matrix.dim() == 2 and len(x) * len(matrix) > BLOCK
    if many and _splits(x, target, options.get("weight"), matrix, bias):
        return _in_blocks(losses, max(1, BLOCK // len(matrix)), target, options.get("weight"), x, matrix, bias)
    return None if chunks is None or is_constant(x, matrix, bias) else losses(x, target, matrix, bias)


def _splits(x: Tensor, target: Tensor, weight: Tensor | None, *shared: Tensor | None) -> bool:
    """Whether rows can be taken apart: several, not in a trace, and what is not differentiated here is a constant."""
    if torch.compiler.is_dynamo_compiling() or torch._guards.TracingContext.try_get() is not None:
        return False  # the compiler has blocks of its own
    inner = [unpack(t)[0] for t in (x, *shared) if t is not None]
    wrapped = type(x) is not Tensor or any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in inner)
    given = all(other is None or (is_constant(other) and not other.requires_grad) for other in (target, weight))
    return len(x) > 1 and not wrapped and given


def _in_blocks(
    losses: Losses, rows: int, target: Tensor, constant: Tensor | None, x: Tensor, *shared: Tensor | None
) -> Tensor:
    """Row by row the same as at once. What is as large as the logits, many times over, is held of one block alone."""
    values, tangents = list[Tensor](), list[Tensor]()
    (p, t), others = unpack(x), [unpack(other) for other in shared]
    with torch.no_grad():
        for start in range(0, len(p), rows):
            part = slice(start, start + rows)
            given = [(p[part], None if t is None else t[part]), *others]
            own, *rest = (value if moved is None else fwAD.make_dual(value, moved) for value, moved in given)
            value, moved = unpack(losses(own, target[part], *rest))
            values.append(value)
            tangents += [] if moved is None else [moved]
        value = torch.cat(values)
    leaves = [p, *(other for other, _ in others)]
    if torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves):
        value = _Recomputed.apply(value, losses, rows, target, constant, *leaves)
    return fwAD.make_dual(value, torch.cat(tangents)) if tangents else value


class _Recomputed(torch.autograd.Function):
    """Losses that are known. Their graph holds what they were made of, and is made block by block when it is needed."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, losses: Losses, rows: int, target: Tensor, constant: Tensor | None, *leaves: Tensor
    ) -> Tensor:
        ctx.save_for_backward(target, constant, *leaves)  # so that PyTorch notices if one is written to
        kind = target.device.type
        ctx.autocast = partial(
            torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )
        ctx.losses, ctx.rows = losses, rows
        return value.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        target, _, *leaves = ctx.saved_tensors
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[5:]) if needed]
        if torch.is_grad_enabled():  # its gradient is differentiated as well: at once, with a graph
            with ctx.autocast():
                loss = ctx.losses(leaves[0], target, *leaves[1:])
            found = torch.autograd.grad(loss, [leaves[i] for i in wanted], g, create_graph=True)
        else:
            found = tuple(torch.zeros_like(leaves[i]) for i in wanted)
            for start in range(0, len(target), ctx.rows):
                part = slice(start, start + ctx.rows)
                own = [t if t is None else t.detach() for t in (leaves[0][part], *leaves[1:])]
                with torch.enable_grad(), ctx.autocast():
                    inputs = [t.requires_grad_() for i, t in enumerate(own) if t is not None and i in wanted]
                    loss = ctx.losses(own[0], target[part], *own[1:])
                for i, sums, moved in zip(wanted, found, torch.autograd.grad(loss, inputs, g[part]), strict=True):
                    (sums if i else sums[part]).add_(moved)
        return (*(None,) * 5, *(found[wanted.index(i)] if i in wanted else None for i in range(len(leaves))))


LAYERS = (
    Layer(functions=(F.cross_entropy,), tangent=tangent, always=True),
    Layer(functions=tuple(filter(None, [getattr(F, "linear_cross_entropy", None)])), written_out=linear),
)

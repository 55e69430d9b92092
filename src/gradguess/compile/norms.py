"""The gradients of a norm from those of the layers above it, without products of their own.

A branch often begins with `W (γ x̂ + β)`, where `x̂` is its input made normal, and nothing below the norm needs an error.
For errors `δ` at the layer, `γ` and `β` have the gradients `Σ x̂ Wᵀδ` and `Σ Wᵀδ`, sums over all rows: a product for
each row, for the sake of two vectors. With `G = Σ δ x̂ᵀ` they are the sums of the columns of `W G` (elementwise) and
`Wᵀ Σ δ`. The gradient of `W`, which is a product for each row anyway, is `G diag(γ) + (Σ δ) βᵀ`.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import getitem
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_LAYER_NORM, _RMS_NORM = aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default
_RESHAPED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default)


def without_products(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph, where the gradients of norms come from those of the layers above them."""
    for node in list(graph.graph.nodes):
        if node.target in (_LAYER_NORM, _RMS_NORM) and all(user.args[1] for user in node.users):
            _rewrite(graph.graph, node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    given: Any = node.args
    errors, x, sizes, *statistics, _ = given
    mean, rstd, gamma, beta = statistics if len(statistics) == 4 else (None, *statistics, None)
    layers = [(product, _gradient_of_weight(product, rstd)) for product in _products(errors)]
    if not layers or gamma is None or any(weights is None for _, weights in layers):
        return
    if any(list(sizes) != [_about(product).shape[1]] for product, _ in layers):
        return
    full = _about(gamma).dtype

    def call(target: Any, *given: Any, **options: Any) -> fx.Node:
        return graph.call_function(target, given, options)

    def cast(tensor: Any, dtype: torch.dtype) -> fx.Node:
        return call(aten._to_copy.default, tensor, dtype=dtype)

    of_gamma, of_beta = list[fx.Node](), list[fx.Node]()
    for product, weights in layers:
        assert weights is not None
        delta, W = product.args  # (rows, m) and (m, d)
        dtype = _about(delta).dtype
        with graph.inserting_before(min(weights, node)):
            normal = call(aten.mul.Tensor, x if mean is None else call(aten.sub.Tensor, x, mean), rstd)
            normal = cast(call(aten.reshape.default, normal, [-1, *sizes]), dtype)
            total = call(aten.unsqueeze.default, call(aten.sum.dim_IntList, delta, [0], dtype=full), 1)
            G = cast(call(aten.mm.default, call(aten.t.default, delta), normal), full)
            of_weight = call(aten.mul.Tensor, G, gamma)
            if beta is not None:
                of_weight = call(aten.add.Tensor, of_weight, call(aten.mul.Tensor, total, beta))
            of_weight = cast(of_weight, dtype)
            if weights.args[1] is delta:  # yᵀ δ, in memory too
                turned = call(aten.t.default, of_weight)
                of_weight = call(aten.clone.default, turned, memory_format=torch.contiguous_format)
            weights.replace_all_uses_with(of_weight)
        with graph.inserting_before(node):
            for sums, factor in (of_gamma, G), (of_beta, total):
                sums.append(call(aten.sum.dim_IntList, call(aten.mul.Tensor, cast(W, full), factor), [0]))
    with graph.inserting_before(node):
        for part in list(node.users):
            terms = of_gamma if part.args[1] == 1 else of_beta
            part.replace_all_uses_with(reduce(partial(call, aten.add.Tensor), terms))


def _about(node: Any) -> Any:
    """Shape and type of what a node of the trace makes; None for a node without, such as a new one."""
    about = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    return about if hasattr(about, "shape") else None


def _products(errors: Any) -> list[fx.Node]:
    """The products of which the errors are the sum, if nothing else needs them; else none."""
    if _about(errors) is None or len(errors.users) != 1:
        return []
    if (below := _reshaped(errors)) is not None:
        return _products(below)
    if errors.target is aten.add.Tensor and not errors.kwargs:
        left, right = (_products(side) for side in errors.args)
        return left + right if left and right else []
    fits = errors.target is aten.mm.default and _about(errors).dtype is not torch.float16  # G could be too large for it
    return [errors] if fits else []


def _gradient_of_weight(product: fx.Node, rstd: fx.Node) -> fx.Node | None:
    """`δᵀ y` or `yᵀ δ`, where `y` is what the norm with these statistics gave."""
    delta = product.args[0]
    assert isinstance(delta, fx.Node)
    for outer in [outer for user in delta.users for outer in (user, *user.users)]:
        if outer.target is aten.mm.default and _about(outer) is not None:
            sides: Any = outer.args
            left, right = sides
            transposed = left.args[0] if left.target is aten.t.default else None
            y = right if transposed is delta else transposed if right is delta else None
            if y is not None and (found := _uncast(y)).target is getitem and found.args == (rstd.args[0], 0):
                return outer
    return None


def _uncast(node: Any) -> fx.Node:
    """Where its numbers come from, through changes of shape and at most one of type: a second one would round."""
    own = _about(node).dtype
    while (below := _reshaped(node)) is not None and _about(node).dtype in (own, _about(below).dtype):
        node = below
    found: fx.Node = node
    return found


def _reshaped(node: fx.Node) -> fx.Node | None:
    """The node whose numbers `node` has in the same order, in another shape, or rounded to another type."""
    below = node.args[0] if node.target in (*_RESHAPED, aten._to_copy.default) else None
    return below if isinstance(below, fx.Node) and _about(below) is not None else None

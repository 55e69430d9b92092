"""The gradients of a norm from those of the layer above it, without a product of their own.

A branch often begins with `W (γ x̂ + β)`, where `x̂` is its input made normal, and nothing below the norm needs an error.
For errors `δ` at the layer, `γ` and `β` have the gradients `Σ x̂ Wᵀδ` and `Σ Wᵀδ`, sums over all rows: a product for
each row, for the sake of two vectors. With `G = Σ δ x̂ᵀ` they are the sums of the columns of `W G` (elementwise) and
`Wᵀ Σ δ`. The gradient of `W`, which is a product for each row anyway, is `G diag(γ) + (Σ δ) βᵀ`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import getitem
from typing import Any

import torch
from torch import fx

from gradguess.backends.rewriting import aten, before, call, dtype_of, is_tensor, laid_out, shape_of, transposed


def without_products(graph: fx.GraphModule, small: int) -> fx.GraphModule:
    """The same graph, where the gradients of norms come from those of the layers above them.

    Not where a product has no more than `small` multiplications.
    """
    place = {node: i for i, node in enumerate(graph.graph.nodes)}
    for node in list(graph.graph.nodes):
        if node.target is aten.native_layer_norm_backward.default and all(user.args[1] for user in node.users):
            _rewrite(graph.graph, node, place, small)
    graph.graph.eliminate_dead_code()
    return graph


def _rewrite(graph: fx.Graph, node: fx.Node, place: dict[fx.Node, int], small: int) -> None:
    given: Any = node.args
    errors, x, sizes, mean, rstd, gamma, beta, _ = given
    layers = [(product, _gradient_of_weight(product, mean)) for product in _products(errors, small)]
    whole = all(list(sizes) == [shape_of(product)[1]] for product, _ in layers)
    if not layers or not whole or gamma is None or beta is None or any(weights is None for _, weights in layers):
        return
    add, full = partial(call, graph), dtype_of(gamma)
    parts = []
    for product, weights in layers:
        assert weights is not None
        delta, W = product.args  # (rows, m) and (m, d)
        with graph.inserting_before(min(weights, node, key=place.__getitem__)):
            normed = add(aten.reshape.default, add(aten.mul.Tensor, add(aten.sub.Tensor, x, mean), rstd), [-1, *sizes])
            total = add(aten.reshape.default, add(aten.sum.dim_IntList, delta, [0], True, dtype=full), [-1, 1])
            G = add(aten.mm.default, add(aten.t.default, delta), _cast(add, normed, dtype_of(delta)))
            G = _cast(add, G, full)
            of_weight = add(aten.add.Tensor, add(aten.mul.Tensor, G, gamma), add(aten.mul.Tensor, total, beta))
            of_weight = _cast(add, of_weight, dtype_of(delta))
            if weights.args[1] is delta:  # yᵀ δ, in memory too
                of_weight = laid_out(add, add(aten.t.default, of_weight))
            weights.replace_all_uses_with(of_weight)
        with graph.inserting_before(node):
            W = _cast(add, W, full)
            terms = (add(aten.mul.Tensor, W, factor) for factor in (G, total))
            parts.append([add(aten.sum.dim_IntList, term, [0]) for term in terms])
    with graph.inserting_before(node):
        gradients = [reduce(partial(add, aten.add.Tensor), terms) for terms in zip(*parts, strict=True)]
    for part in list(node.users):
        part.replace_all_uses_with(gradients[0 if part.args[1] == 1 else 1])


def _products(errors: Any, small: int) -> list[fx.Node]:
    """The products of which the errors are the sum, if nothing else needs them and they are large; else none."""
    if not is_tensor(errors) or len(errors.users) != 1:
        return []
    if (below := before(errors)) is not None:
        return _products(below, small)
    if errors.target is aten.add.Tensor and not errors.kwargs:
        left, right = (_products(side, small) for side in errors.args)
        return left + right if left and right else []
    is_product = (
        errors.target is aten.mm.default and dtype_of(errors) is not torch.float16
    )  # G could be too large for it
    return [errors] if is_product and shape_of(errors).numel() * shape_of(errors.args[1])[0] > small else []


def _gradient_of_weight(product: fx.Node, mean: Any) -> fx.Node | None:
    """`δᵀ y` or `yᵀ δ`, where `y` is what the norm with this mean gave."""
    delta = product.args[0]
    assert isinstance(delta, fx.Node)
    norm = mean.args[0] if mean.target is getitem else None
    for outer in [outer for user in delta.users for outer in (user, *user.users)]:
        if outer.target is aten.mm.default:
            sides: Any = outer.args
            left, right = sides
            y = right if transposed(left) is delta else transposed(left) if right is delta else None
            if y is not None and (found := _uncast(y)).target is getitem and found.args == (norm, 0):
                return outer
    return None


def _uncast(node: Any) -> fx.Node:
    """Where its numbers come from, through changes of shape and at most one of type: a second one would round."""
    own = dtype_of(node)
    while (below := before(node)) is not None and dtype_of(node) in (own, dtype_of(below)):
        node = below
    found: fx.Node = node
    return found


def _cast(add: Callable[..., fx.Node], node: Any, dtype: torch.dtype) -> fx.Node:
    found: fx.Node = node if dtype_of(node) == dtype else add(aten._to_copy.default, node, dtype=dtype)
    return found

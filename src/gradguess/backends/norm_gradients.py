"""The gradients of a norm from those of the layer above it, without a product of their own.

A branch often begins with `W (γ x̂ + β)`, where `x̂` is its input made normal, and nothing below the norm needs an error.
For errors `δ` at the layer, `γ` and `β` have the gradients `Σ x̂ Wᵀδ` and `Σ Wᵀδ`, sums over all rows: a product for
each row, for the sake of two vectors. With `G = Σ δ x̂ᵀ` they are the sums of the columns of `W G` (elementwise) and
`Wᵀ Σ δ`. The gradient of `W`, which is a product for each row anyway, is `G diag(γ) + (Σ δ) βᵀ`.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import getitem
from typing import Any

from torch import fx

from gradguess.backends.rewriting import SMALL, aten, before, call, dtype_of, shape_of, source


def without_products(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph, where the gradients of norms come from those of the layers above them."""
    place = {node: i for i, node in enumerate(graph.graph.nodes)}
    for node in list(graph.graph.nodes):
        if node.target is aten.native_layer_norm_backward.default and all(user.args[1] for user in node.users):
            _rewrite(graph.graph, node, place)
    graph.graph.eliminate_dead_code()
    return graph


def _rewrite(graph: fx.Graph, node: fx.Node, place: dict[fx.Node, int]) -> None:
    errors, x, sizes, mean, rstd, gamma, beta, _ = node.args
    products = _products(errors)
    if not products or gamma is None or beta is None or len(sizes) != 1:  # type: ignore[arg-type]
        return
    layers = [(product, _gradient_of_weight(product, mean)) for product in products]
    if any(weights is None for _, weights in layers):
        return
    add, parts = partial(call, graph), []
    for product, weights in layers:
        assert weights is not None
        delta, W = product.args  # (rows, m) and (m, d)
        full, own = dtype_of(x), dtype_of(delta)
        with graph.inserting_before(min(weights, node, key=place.__getitem__)):
            normed = add(aten.mul.Tensor, add(aten.sub.Tensor, x, mean), rstd)
            rows = _cast(graph, add(aten.reshape.default, normed, [-1, shape_of(product)[1]]), own)
            total = add(aten.reshape.default, add(aten.sum.dim_IntList, delta, [0], True, dtype=full), [-1, 1])
            G = _cast(graph, add(aten.mm.default, add(aten.t.default, delta), rows), full)
            of_weight = add(aten.add.Tensor, add(aten.mul.Tensor, G, gamma), add(aten.mul.Tensor, total, beta))
            of_weight = _cast(graph, of_weight, own)
            weights.replace_all_uses_with(of_weight if weights.args[1] is not delta else add(aten.t.default, of_weight))
        with graph.inserting_before(node):
            whole = _cast(graph, W, full)
            of_gamma = add(aten.sum.dim_IntList, add(aten.mul.Tensor, whole, G), [0])
            parts.append((of_gamma, add(aten.sum.dim_IntList, add(aten.mul.Tensor, whole, total), [0])))
    with graph.inserting_before(node):
        of_gamma, of_beta = (reduce(partial(add, aten.add.Tensor), terms) for terms in zip(*parts, strict=True))
    for part in list(node.users):
        part.replace_all_uses_with(of_gamma if part.args[1] == 1 else of_beta)


def _products(errors: Any) -> list[fx.Node]:
    """The products of which the errors are the sum, if nothing else needs them and they are large; else none."""
    if len(errors.users) != 1:
        return []
    if (below := before(errors)) is not None:
        return _products(below)
    if errors.target is aten.add.Tensor and not errors.kwargs:
        left, right = map(_products, errors.args)
        return left + right if left and right else []
    is_large = errors.target is aten.mm.default and shape_of(errors).numel() * shape_of(errors.args[1])[0] > SMALL
    return [errors] if is_large else []


def _gradient_of_weight(product: fx.Node, mean: Any) -> fx.Node | None:
    """`δᵀ y` or `yᵀ δ`, where `y` is what the norm with this mean gave."""
    delta = product.args[0]
    assert isinstance(delta, fx.Node)
    normed = [part for part in mean.args[0].users if part.target is getitem and part.args[1] == 0]
    for user in delta.users:
        if user.target is aten.t.default:
            for outer in user.users:
                if outer.target is aten.mm.default and outer.args[0] is user and source(outer.args[1]) in normed:
                    return outer
        elif user.target is aten.mm.default and user.args[1] is delta:
            turned = user.args[0]
            if turned.target is aten.t.default and source(turned.args[0]) in normed:  # type: ignore[union-attr]
                return user
    return None


def _cast(graph: fx.Graph, node: Any, dtype: Any) -> fx.Node:
    found: fx.Node = node if dtype_of(node) == dtype else call(graph, aten._to_copy.default, node, dtype=dtype)
    return found

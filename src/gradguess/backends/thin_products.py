"""Small products with a short inner dimension, written out: a compiler then makes them part of what reads them.

The directions `Z Vᵀ` of W⊥ are such products, of `k` terms. Libraries split them into parts that are added up again.
"""

from __future__ import annotations

from functools import partial, reduce

from torch import fx

from gradguess.backends.rewriting import aten, call, dtype_of, is_fine, shape_of

SHORT = 16  # terms of a sum
LARGE = 2**16  # numbers that it makes; for more of them libraries are faster


def written_out(graph: fx.GraphModule, small: int) -> fx.GraphModule:
    """The same graph, with such products as sums of outer products, up to `small` multiplications each."""
    for node in list(graph.graph.nodes):
        if node.target is not aten.mm.default:
            continue
        left, right = node.args
        (n, k), m = shape_of(left), shape_of(right)[1]
        if 0 < k <= SHORT and n * m <= LARGE and n * k * m <= small and is_fine(dtype_of(left)):
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(_sum(graph.graph, left, right, k))
    graph.graph.eliminate_dead_code()
    return graph


def _sum(graph: fx.Graph, left: fx.Node, right: fx.Node, k: int) -> fx.Node:
    add = partial(call, graph)

    def term(i: int) -> fx.Node:
        column = add(aten.slice.Tensor, left, 1, i, i + 1)
        return add(aten.mul.Tensor, column, add(aten.slice.Tensor, right, 0, i, i + 1))

    return reduce(partial(add, aten.add.Tensor), map(term, range(k)))

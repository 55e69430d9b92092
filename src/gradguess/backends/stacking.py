"""Products of a graph that share their matrix, as one: a tangent goes through the layer that its value goes through.

`W x` and `W t` become `W [x; t]`: the matrix is read once, and where layers are small one kernel does the work of two.
Large layers gain nothing, and a tangent would live as long as the value beside it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import fx
from torch.fx.passes.tools_common import legalize_graph

from gradguess.backends.rewriting import shape_of

_MM, _ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
_CONVOLUTION = torch.ops.aten.convolution.default


def stacked(graph: fx.GraphModule, large: int) -> fx.GraphModule:
    """The same graph with such products of up to `large` numbers stacked, where none of them waits for another."""
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in () if any(map(_writes, graph.graph.nodes)) else graph.graph.nodes:
        if (key := _matrix(node, large)) is not None:
            groups.setdefault(key, []).append(node)
    for nodes in groups.values():
        for free in _levels(nodes) if len(nodes) > 1 else ():
            if len(free) > 1:
                _stack(graph.graph, free)
    if groups:
        legalize_graph(graph)  # what was stacked may stand behind what reads it
        graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _writes(node: fx.Node) -> bool:
    """Does it write to what others read, or read memory by its place? Then the order, or the memory, must stay.

    Batch norm writes to its buffers, and its schema does not say so.
    """
    schema = getattr(node.target, "_schema", None)
    named = any(name in str(node.target) for name in ("batch_norm", "as_strided"))
    return named or (schema is not None and schema.is_mutable)


def _matrix(node: fx.Node, large: int) -> Hashable | None:
    """By what the products that can be stacked agree: the matrix, and the shape of what it is multiplied with."""
    if node.target is _MM:
        rest: tuple[object, ...] = node.args[1:]
    elif node.target is _ADDMM and not node.kwargs and _is_row(shape_of(node.args[0]), shape_of(node)[-1]):
        rest = node.args[2:]
    elif node.target is _CONVOLUTION and not node.args[6]:  # not transposed
        rest = (node.args[1], *map(str, node.args[3:]))
    else:
        return None
    about = _rows(node).meta["tensor_meta"]
    rounds = about.dtype.itemsize < 4  # a bias that is added apart would be rounded once more
    layout = about.memory_format if node.target is _CONVOLUTION else None  # that of its output
    return None if rounds or about.shape.numel() > large else (*rest, tuple(about.shape), layout)


def _rows(node: fx.Node) -> fx.Node:
    """What is multiplied with the matrix."""
    rows = node.args[1 if node.target is _ADDMM else 0]
    assert isinstance(rows, fx.Node)
    return rows


def _bias(node: fx.Node) -> fx.Node | None:
    bias = node.args[0] if node.target is _ADDMM else node.args[2] if node.target is _CONVOLUTION else None
    assert bias is None or isinstance(bias, fx.Node)
    return bias


def _is_row(shape: torch.Size, n: int) -> bool:
    """Is a bias of this shape the same for all rows?"""
    return shape.numel() == n and shape[-1:].numel() == n


def _levels(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The nodes by how many of the others they wait for, one after another: those of a level wait for none of it."""
    own, level, todo = set(nodes), dict[fx.Node, int](), list(nodes)
    while todo:
        left = [below for below in todo[-1].all_input_nodes if below not in level]
        if left:
            todo += left
        else:
            node = todo.pop()
            level[node] = max((level[below] + (below in own) for below in node.all_input_nodes), default=0)
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(level[node], []).append(node)
    return list(found.values())


def _stack(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Replace products by one, in the place of the last of them."""
    with graph.inserting_before(nodes[-1]):
        call = graph.call_function
        rows = call(torch.ops.aten.cat.default, ([_rows(node) for node in nodes],))
        if nodes[0].target is _CONVOLUTION:
            product = call(_CONVOLUTION, (rows, nodes[0].args[1], None, *nodes[0].args[3:]))
        else:
            product = call(_MM, (rows, nodes[0].args[-1]))
        size = shape_of(_rows(nodes[0]))[0]
        for i, node in enumerate(nodes):
            found = call(torch.ops.aten.slice.Tensor, (product, 0, i * size, (i + 1) * size))
            if (bias := _bias(node)) is not None:
                sides = len(shape_of(node)) - 2
                shaped = call(torch.ops.aten.view.default, (bias, [-1] + [1] * sides))
                found = call(torch.ops.aten.add.Tensor, (found, shaped))
            found.meta = dict(node.meta)
            node.replace_all_uses_with(found)

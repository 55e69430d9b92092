"""The reverse pass of convolutions with the channels behind the positions in memory, as a GPU computes them.

The compiler lays out what convolutions read in this way, but for the reverse pass takes the layout of the trace, and
the kernels would turn every tensor on the way in and out.
"""

from __future__ import annotations

from functools import partial
from operator import getitem

import torch
from torch import fx

from gradguess.backends.rewriting import Add, aten, call, laid_out, layout_of, shape_of

MANY = 300  # operations for each convolution: the compiler's own number


def channels_last(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph, in which the reverse passes of plain two-dimensional convolutions read and write this layout.

    Not those in groups: there it can be slower by far. Nor where convolutions are few among many operations: there the
    compiler leaves the layout as it is.
    """
    nodes = list(graph.graph.nodes)
    if len(nodes) >= MANY * sum(node.target is aten.convolution.default for node in nodes):
        return graph
    for node in nodes:
        if node.target is aten.convolution_backward.default and node.args[9] == 1 and len(shape_of(node.args[2])) == 4:
            with graph.graph.inserting_before(node):
                _turn(partial(call, graph.graph), node)
    graph.graph.eliminate_dead_code()
    return graph


def _turn(add: Add, node: fx.Node) -> None:
    tensors = (laid_out(add, tensor, torch.channels_last) for tensor in node.args[:3])
    made = add(aten.convolution_backward.default, *tensors, *node.args[3:])
    for part in list(node.users):
        part.replace_all_uses_with(laid_out(add, add(getitem, made, part.args[1]), layout_of(part)))

"""A traced graph in pieces: each value that it returns becomes a compiled function with a reverse graph."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from gradguess.backends.policy import full_precision
from gradguess.backends.tracing import Graph, NotTraceable

__all__ = ["TracedPiece", "pieces_of"]


class TracedPiece:
    """One value of a graph as a function of its arguments, and of the value before."""

    def __init__(self, fused: Graph, places: Sequence[int]) -> None:
        self.fused, self.places = fused, places

    def __call__(self, given: Sequence[Tensor], before: Tensor | None) -> Tensor:
        """Its value, where the graph has the arguments `given`, and `before` in the place of the value before."""
        rest = [] if before is None else [before]
        (value,) = self.fused(*[given[i] for i in self.places], *rest)
        return value


def pieces_of(graph: fx.GraphModule, arguments: Sequence[Tensor]) -> list[TracedPiece]:
    """The pieces of a graph, compiled; those with the same operations are compiled once.

    Args:
        graph: its last arguments stand for the values that it returns, one for each: what it computes after a value
            starts from its argument, so that every value depends on the argument of the one before alone.
        arguments: an example. Pieces have gradients by the arguments that stand for values, and by no others.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    (values,) = graph.graph.output_node().args
    assert isinstance(values, list | tuple)
    own = len(inputs) - len(values)
    known: dict[str, Graph] = {}
    pieces, starts = [], [None, *inputs[own:]]
    for number, (value, start) in enumerate(zip(values, starts, strict=False)):
        needed = _needed(value)
        places = [i for i, node in enumerate(inputs[:own]) if node in needed]
        if any(node in needed and node is not start for node in inputs[own:]):
            raise NotTraceable("its sites do not lie in a line")
        taken = [inputs[i] for i in places] + ([] if start is None else [start])
        module = _function(graph, taken, [node for node in graph.graph.nodes if node in needed], value)
        if module.code not in known:
            known[module.code] = torch.compile(module, fullgraph=True, dynamic=False)
        pieces.append(TracedPiece(known[module.code], places))
        _compile(pieces[-1], arguments[:own], arguments[own + number - 1] if number else None)
    return pieces


def _needed(value: fx.Node) -> set[fx.Node]:
    """The nodes that a value is made of, itself among them."""
    found, waiting = set[fx.Node](), [value]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _function(
    graph: fx.GraphModule, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], value: fx.Node
) -> fx.GraphModule:
    """A graph of some nodes, with names that tell nothing of where they were."""
    new, there = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        there[node] = new.placeholder(f"x{len(there)}")
    for node in nodes:
        if node not in there and node.op != "placeholder":
            args, kwargs = fx.map_arg((node.args, node.kwargs), there.__getitem__)
            there[node] = new.create_node(node.op, node.target, args, kwargs, name=f"v{len(there)}")
    new.output([there[value]])
    return fx.GraphModule(graph, new)


def _compile(piece: TracedPiece, given: Sequence[Tensor], before: Tensor | None) -> None:
    """Run a piece forward and back once, since that is when it is compiled: it will be pulled back through again."""
    try:
        with (
            torch.enable_grad(),
            full_precision(given[0].device),
            torch._functorch.config.patch(donated_buffer=False),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # the compiler's own
            before = before.detach().requires_grad_() if before is not None else None
            value = piece(given, before)
            if before is not None:
                torch.autograd.grad(value, before, torch.zeros_like(value), retain_graph=True)
    except Exception as error:  # no compiler on this machine, for instance
        raise NotTraceable(f"torch.compile: {(str(error).splitlines() or [''])[0][:200]}") from error

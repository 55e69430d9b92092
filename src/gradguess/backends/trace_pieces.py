"""A traced graph in pieces, each a compiled function with a compiled vjp."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx

from gradguess.backends.inductor import compiled
from gradguess.backends.policy import full_precision
from gradguess.backends.tracing import Graph, NotTraceable

Nodes = Sequence[fx.Node]
_aten = torch.ops.aten
_MOVES = {  # operations that compute nothing
    _aten._to_copy.default, _aten._unsafe_view.default, _aten.clone.default, _aten.expand.default,
    _aten.permute.default, _aten.slice.Tensor, _aten.split.Tensor, _aten.t.default, _aten.transpose.int,
    _aten.unsqueeze.default, _aten.view.default,
}  # fmt: skip


class TracedPiece:
    """A value as a function of some arguments of a graph, and of the value before it.

    Args:
        forward: (arguments at `places`, value before) -> value, what else is kept for `back`.
        back: (what was kept, arguments at `held`, value before, vector) -> the vector, pulled back. None: no vjp.
    """

    def __init__(self, forward: Graph, places: Sequence[int], back: Graph | None, held: Sequence[int]) -> None:
        self.forward, self.places, self.back, self.held = forward, places, back, held

    def __call__(self, given: Sequence[Tensor], before: Tensor | None) -> Tensor:
        """The value, with a reverse graph to the value before."""
        if before is None:
            return _run(self.forward, [given[i] for i in self.places])[0]
        value: Tensor = _Piece.apply(before, self, given)
        return value


class _Piece(torch.autograd.Function):
    """It can be pulled back through again and again, but is not differentiated twice."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, piece: TracedPiece, given: Sequence[Tensor]) -> Tensor:
        before = before.detach().contiguous()  # as in the trace
        value, *kept = _run(piece.forward, [*(given[i] for i in piece.places), before])
        ctx.back = piece.back
        ctx.save_for_backward(*kept, *(given[i] for i in piece.held), before)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, vector: Tensor) -> tuple[Tensor, None, None]:
        return _run(ctx.back, [*ctx.saved_tensors, vector.contiguous()])[0], None, None


def _run(graph: Graph, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
    # Its casts are in it already. A search has no torch functions, and a compiled graph is made for one state of them.
    with torch.no_grad(), torch._C.DisableTorchFunction(), full_precision(arguments[0].device):
        return graph(*arguments)


def pieces_of(graph: fx.GraphModule, arguments: Sequence[Tensor], count: int) -> list[TracedPiece]:
    """The pieces of a graph, compiled; those with the same operations on the same shapes are compiled once.

    Args:
        graph: it returns `count` values and then, for all of them but the first, a vector that is pulled back to the
            value before. Of its arguments the last ones stand for the vectors, and those before them for the values: a
            piece starts from the argument, and not from what the piece before has made.
        arguments: an example.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    outputs: Any = graph.graph.output_node().args[0]
    own, starts, vectors = inputs[: -2 * count], inputs[-2 * count : -count], inputs[-count:]
    values, pulled = outputs[:count], [None, *outputs[count:]]
    _check_apart(values, starts)
    numbers = dict(zip(inputs, arguments, strict=True))
    place = {node: i for i, node in enumerate(own)}
    known: dict[Hashable, Graph] = {}

    def function(taken: Nodes, results: Nodes) -> Graph:
        module, example = _function(graph, taken, results), [numbers[node] for node in taken]
        key = module.code, *((t.shape, t.stride(), t.dtype) for t in example)
        if key not in known:
            with torch._C.DisableTorchFunction():
                known[key] = compiled(module, example)
        return known[key]

    pieces = []
    for number, value in enumerate(values):
        start = starts[number - 1 : number]  # none below the first piece
        needed = _needed_back(pulled[number], vectors[number], start[0]) if start else []
        kept, held = [node for node in needed if node not in place], [node for node in needed if node in place]
        made_of = _made_of([value, *kept])
        taken = [node for node in own if node in made_of]
        forward = function([*taken, *start], [value, *kept])
        back = None
        if start:
            numbers |= zip([value, *kept], _run(forward, [numbers[node] for node in (*taken, *start)]), strict=True)
            back = function([*kept, *held, *start, vectors[number]], [pulled[number]])
            for node in kept:
                del numbers[node]
        pieces.append(TracedPiece(forward, [place[n] for n in taken], back, [place[n] for n in held]))
    return pieces


def _check_apart(values: Nodes, starts: Nodes) -> None:
    """Refuse a graph of which a piece needs more than the value before, or shares most of what it does with another.

    Masks of attention, which all blocks of a transformer make of the inputs, are little.
    """
    moving = _made_from(starts)
    parts = [_made_of([value]) for value in values]
    for part, start in zip(parts, [None, *starts], strict=False):
        if part & set(starts) - {start}:
            raise NotTraceable("its sites do not lie in a line")
    for one, other in combinations(parts[1:], 2):
        if len([node for node in one & other - moving if node.op == "call_function"]) > len(one & moving):
            raise NotTraceable("its pieces share what they compute from the inputs")


def _needed_back(pulled: fx.Node, vector: fx.Node, start: fx.Node) -> list[fx.Node]:
    """What a pull needs besides the start: what is light is computed again from that, and not kept."""
    back, moving = _made_from([vector]), _made_from([start])
    found, seen, waiting = dict[fx.Node, None](), set[fx.Node](), [pulled]
    while waiting:
        node = waiting.pop()
        if node in seen or node is start or node is vector:
            continue
        seen.add(node)
        if node in back or (node in moving and _is_light(node)):
            waiting += node.all_input_nodes
        else:
            found[node] = None
    return list(found)


def _is_light(node: fx.Node) -> bool:
    """Does an operation work number by number, or compute nothing at all?"""
    if node.target is operator.getitem:
        return _is_light(node.all_input_nodes[0])
    return node.target in _MOVES or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _made_of(nodes: Nodes, given: Nodes = ()) -> set[fx.Node]:
    """All that these nodes are made of, where some are given, and themselves."""
    return _reached(nodes, lambda node: node.all_input_nodes, given)


def _made_from(nodes: Nodes) -> set[fx.Node]:
    """All that is made from these nodes, and themselves."""
    return _reached(nodes, lambda node: node.users)


def _reached(nodes: Nodes, next_to: Callable[[fx.Node], Iterable[fx.Node]], given: Nodes = ()) -> set[fx.Node]:
    found, waiting = set(given), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += next_to(node)
    return found


def _function(graph: fx.GraphModule, taken: Nodes, results: Nodes) -> fx.GraphModule:
    """The results as a function of what is taken, under names that tell nothing of where it was."""
    new = fx.Graph()
    there = {node: new.placeholder(f"x{i}") for i, node in enumerate(taken)}
    wanted = _made_of(results, taken)
    for node in graph.graph.nodes:
        if node in wanted and node not in there:
            args, kwargs = fx.map_arg((node.args, node.kwargs), there.__getitem__)
            there[node] = new.create_node(node.op, node.target, args, kwargs, name=f"v{len(there)}")
    new.output([there[node] for node in results])
    return fx.GraphModule(graph, new)

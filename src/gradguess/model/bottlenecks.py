"""A model in pieces (`sites=n`): a few sites, each where all of the model passes through one tensor.

Between two of them lies one piece. Its parameters get their gradient by a vjp of that piece, from the estimate at its
upper end. Only what crosses from piece to piece is guessed, or predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradguess.errors import InputError
from gradguess.model.autograd_graph import AutogradGraph
from gradguess.model.cut_pass import candidates, watched_run
from gradguess.model.hooks import CallHooks
from gradguess.model.task import Task, tensors


@dataclass(frozen=True)
class _Place:
    """A call that returned one tensor."""

    module: nn.Module
    index: int
    node: Any  # of the autograd graph
    depth: int  # layers with parameters that were called up to here


def bottleneck_calls(task: Task, count: int) -> set[tuple[nn.Module, int]]:
    """The calls whose outputs cut the model into `count` pieces of about equal depth; the last is its own output."""
    if isinstance(count, bool) or count < 1:
        raise InputError(f"sites: expected at least 1 piece, found {count!r}.")
    places, depth, ends, losses = _survey(task)
    outputs = {end.grad_fn for end in ends}
    narrow = [place for place in _narrow(losses, places) if place.node not in outputs]
    if len(narrow) < count - 1:
        hint = "Use fewer, name" if narrow else "Name"
        raise InputError(
            f"sites: for {count} pieces all of the model must pass through one module at {count - 1} or more places; "
            f"found {len(narrow)}. {hint} modules with sites=[...], or use sites='auto'."
        )
    chosen: list[_Place] = []
    for piece in range(1, count):
        left = [place for place in narrow if place not in chosen]
        chosen.append(min(left, key=lambda place: abs(place.depth - piece * depth / count)))
    chosen += [place for place in places.values() if place.node in outputs]
    return {(place.module, place.index) for place in chosen}


def _survey(task: Task) -> tuple[dict[Any, _Place], int, list[Tensor], Tensor]:
    """One pass: the places by node, in call order; the depth of the model; its outputs and losses."""
    places: dict[Any, _Place] = {}
    depth = 0

    def note(module: nn.Module, index: int, x: Any, output: Any) -> Any:
        nonlocal depth
        depth += any(p.requires_grad for p in module.parameters(recurse=False))
        if isinstance(output, Tensor) and output.grad_fn is not None and output.grad_fn not in places:
            places[output.grad_fn] = _Place(module, index, output.grad_fn, depth)
        return output

    with CallHooks([module for _, module in candidates(task.model, explicit=True)], note):
        outputs, losses = watched_run(task, grad=True)
    return places, depth, tensors(outputs), losses


def _narrow(losses: Tensor, places: dict[Any, _Place]) -> list[_Place]:
    """The places that every path from the losses to a place below must pass, in call order.

    The loop takes nodes one by one, each after all nodes that use it. If no other node waits when a node is taken,
    then every path passes through it. Nodes without a place below them (a transposed weight) do not count.
    """
    graph = AutogradGraph([losses])
    root: Any = losses.grad_fn
    waiting_for = {node: len(graph.consumers.get(node, ())) for node in graph.nodes}  # edges from nodes not taken yet
    counts = graph.above(node for node in places if node in graph.nodes)
    ready, waiting, narrow = [root], {root}, []
    while ready:
        node = ready.pop()
        waiting.discard(node)
        if node in places and not waiting:
            narrow.append(places[node])
        for below, _ in node.next_functions:
            if below is not None:
                waiting_for[below] -= 1
                if below in counts:
                    waiting.add(below)
                if waiting_for[below] == 0:
                    ready.append(below)
    return narrow[::-1]

"""A model in pieces (`sites=n`): a few sites, each where all of the model passes through one tensor.

Between two of them lies one piece. Its parameters get their gradient by a vjp of that piece, from the estimate at its
upper end. Only what crosses from piece to piece is guessed, or predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from gradguess.errors import InputError
from gradguess.layers.table import CHANNELS_FIRST
from gradguess.model.autograd_graph import AutogradGraph
from gradguess.model.cut_pass import candidates, watched_run
from gradguess.model.hooks import CallHooks
from gradguess.model.task import Task, check_differentiable, tensors

Call = tuple[nn.Module, int]  # a module, and the number of its call


@dataclass(frozen=True)
class _Place:
    """Calls that returned one and the same tensor."""

    inner: Call
    outer: Call  # the outermost that ends with it
    node: Any  # of the autograd graph
    depth: int  # layers with parameters that were called up to here

    @property
    def cut(self) -> Call:
        """Where to cut. While a module runs, it holds tensors of its own, so that the end of the outermost is best: but
        a layer with parameters is better known than what is around it.
        """
        layer, _ = self.inner
        known = isinstance(layer, CHANNELS_FIRST) or any(True for _ in layer.parameters(recurse=False))
        return self.inner if known else self.outer


def bottleneck_calls(task: Task, count: int) -> set[Call]:
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
    return {place.cut for place in chosen} | {place.inner for place in places.values() if place.node in outputs}


def _survey(task: Task) -> tuple[dict[Any, _Place], int, list[Tensor], Tensor]:
    """One pass: the places by node, in call order; the depth of the model; its outputs and losses."""
    places: dict[Any, _Place] = {}
    depth = 0
    latest: Any = None  # what the latest call returned, as long as no other has begun

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal latest
        latest = None

    def note(module: nn.Module, index: int, x: Any, output: Any) -> Any:
        nonlocal depth, latest
        depth += any(p.requires_grad for p in module.parameters(recurse=False))
        node, call = getattr(output, "grad_fn", None), (module, index)
        if isinstance(output, Tensor) and node is not None:
            if node not in places:
                places[node] = _Place(call, call, node, depth)
            elif output is latest:
                places[node] = replace(places[node], outer=call)
        latest = output
        return output

    with CallHooks([module for _, module in candidates(task.model, explicit=True)], note, before=begin):
        outputs, losses = watched_run(task, grad=True)
    check_differentiable(losses)
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

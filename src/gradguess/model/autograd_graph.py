"""What the autograd graph of a pass tells: which nodes use a node, and which leaves lie below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


class AutogradGraph:
    """The graph below a set of roots."""

    def __init__(self, roots: Iterable[Tensor]) -> None:
        self.consumers: dict[Any, list[Any]] = {}
        self.nodes: dict[Any, None] = {}
        self._alive = list(roots)  # nodes die with the tensors that hold them
        todo = [root.grad_fn for root in self._alive if root.grad_fn is not None]
        while todo:
            node = todo.pop()
            if node in self.nodes:
                continue
            self.nodes[node] = None
            for below, _ in node.next_functions:
                if below is not None:
                    self.consumers.setdefault(below, []).append(node)
                    todo.append(below)

    @staticmethod
    def leaves(root: Tensor | Any, stop: Callable[[Any], bool] = lambda node: False) -> set[int]:
        """`id`s of the leaf tensors reached from `root` along nodes for which `stop` is false."""
        start = root.grad_fn if isinstance(root, Tensor) else root
        seen: set[Any] = set()
        found: set[int] = set()
        todo = [start] if start is not None else []
        while todo:
            node = todo.pop()
            if node in seen or (node is not start and stop(node)):
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                found.add(id(node.variable))
            todo.extend(below for below, _ in node.next_functions if below is not None)
        return found

    def leaf_nodes(self) -> dict[int, Any]:
        """The node of each leaf tensor, by its `id`."""
        return {id(node.variable): node for node in self.nodes if hasattr(node, "variable")}

    def above(self, nodes: Iterable[Any]) -> set[Any]:
        """`nodes`, and all nodes that use them, directly or through others."""
        found = set(nodes)
        todo = list(found)
        while todo:
            for user in self.consumers.get(todo.pop(), []):
                if user not in found:
                    found.add(user)
                    todo.append(user)
        return found

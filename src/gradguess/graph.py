"""The autograd graph of one small pass, cut where sites are, and what can be read off it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradguess.sites import first_tensor
from gradguess.task import Task, tensors


@dataclass(eq=False)
class Call:
    """One call seen in the cut pass: its input, and per returned tensor the value below and above the cut."""

    name: str
    module: nn.Module
    index: int
    x: Any
    slots: dict[int, tuple[Tensor, Tensor]]  # slot -> (s with the graph below it, leaf above the cut)


Want = Callable[[nn.Module, int], bool]


class CutPass:
    """A pass with a reverse graph that is cut at every call that `want` names (default: every leaf)."""

    def __init__(self, model: nn.Module, want: Want | None) -> None:
        self.model = model
        self.want = want
        self.calls: list[Call] = []
        self.counts: dict[nn.Module, int] = {}
        self.stack: list[bool] = []  # per open module: was a site met inside?
        self.ends: list[Tensor] = []  # the model's outputs

    def run(self, task: Task) -> Tensor:
        handles = []
        for name, module in candidates(self.model, self.want is not None):
            handles.append(module.register_forward_pre_hook(lambda *_: self.stack.append(False)))
            handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        try:
            with torch.enable_grad():
                outputs = task.outputs()
                self.ends = tensors(outputs)
                return task.losses(outputs)
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            index = self.counts.get(module, 0)
            self.counts[module] = index + 1
            container = self.stack.pop()
            wanted = not container if self.want is None else self.want(module, index)
            if not wanted:
                if container and self.stack:
                    self.stack[-1] = True
                return output
            if self.stack:
                self.stack[-1] = True
            return self._cut(name, module, index, first_tensor(args, kwargs), output)

        return hook

    def _cut(self, name: str, module: nn.Module, index: int, x: Any, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        slots = {}
        for slot, s in enumerate(leaves):
            if isinstance(s, Tensor) and s.is_floating_point() and s.requires_grad:
                leaf = s.detach().requires_grad_()
                slots[slot] = (s, leaf)
                leaves[slot] = leaf.clone()  # a leaf must not be changed in place, a clone may
        if slots:
            self.calls.append(Call(name, module, index, x, slots))
        return tree_unflatten(leaves, spec)


def candidates(model: nn.Module, explicit: bool) -> Iterable[tuple[str, nn.Module]]:
    """Modules that own trainable parameters themselves; with `explicit`, every module."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        parametrized = parametrize.is_parametrized(module)
        if parametrized:
            inside.update(module.parametrizations.modules())
        owned = module.parameters(recurse=parametrized)
        if (explicit and module is not model) or any(p.requires_grad for p in owned):
            yield name, module


class Graph:
    """The autograd graph below a set of roots: who consumes a node, and which leaves a root reaches."""

    def __init__(self, roots: Iterable[Tensor]) -> None:
        self.consumers: dict[Any, list[Any]] = {}
        self.nodes: dict[Any, None] = {}
        self.alive = list(roots)
        todo = [root.grad_fn for root in self.alive if root.grad_fn is not None]
        while todo:
            node = todo.pop()
            if node in self.nodes:
                continue
            self.nodes[node] = None
            for below, _ in node.next_functions:
                if below is not None:
                    self.consumers.setdefault(below, []).append(node)
                    todo.append(below)

    def leaves(self, root: Tensor | Any, stop: Callable[[Any], bool] = lambda node: False) -> set[int]:
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
        return {id(node.variable): node for node in self.nodes if hasattr(node, "variable")}

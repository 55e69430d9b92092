"""A pass with a reverse graph that is cut at every possible site. The sites of a model are found from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gradguess.model.autograd_graph import AutogradGraph
from gradguess.model.hooks import CallHooks, OwnOutputs
from gradguess.model.task import Task, tensors

Want = Callable[[nn.Module, int], bool]  # (module, number of the call): is this call a site?


@dataclass(eq=False)
class Call:
    """One call that was cut: its input, and per returned tensor the value below and the leaf above the cut."""

    name: str
    module: nn.Module
    index: int
    x: Any
    slots: dict[int, tuple[Tensor, Tensor]]  # slot -> (s with the graph below it, leaf above the cut)


@dataclass(frozen=True, eq=False)
class Owner:
    """A call of a module with trainable parameters of its own, around calls that were cut. Tensors by their `id`."""

    module: nn.Module
    index: int
    inside: set[int]  # leaves above the cuts inside of it
    below: set[int]  # leaves that its output depends on


class CutPass:
    """One pass over a task, cut at every call that `want` names; by default at every innermost module that owns
    trainable parameters.

    Attributes:
        calls: what was cut, in call order.
        owners: modules around what was cut, where `want` is None.
        counts: how often each watched module was called.
        ends: the model's outputs.
        outputs: the same in the model's own structure, with meta tensors in the place of tensors.
        losses: one per sample.
        altered: modules whose output is not what their class says.
    """

    def __init__(self, task: Task, want: Want | None) -> None:
        names = {module: name for name, module in candidates(task.model, want is not None)}
        self.calls: list[Call] = []
        self.owners: list[Owner] = []
        open_modules: list[bool] = []  # for each module that is running: was a site met inside?
        begun: list[int] = []  # and how many calls were cut before it

        def after(module: nn.Module, index: int, x: Any, output: Any) -> Any:
            container, start = open_modules.pop(), begun.pop()
            wanted = not container if want is None else want(module, index)
            if open_modules and (wanted or container):
                open_modules[-1] = True
            if want is None and container and isinstance(output, Tensor):
                inside = {id(leaf) for call in self.calls[start:] for _, leaf in call.slots.values()}
                self.owners.append(Owner(module, index, inside, AutogradGraph.leaves(output)))
            return self._cut(names[module], module, index, x, output) if wanted else output

        def begin(module: nn.Module, args: Any) -> None:
            open_modules.append(False)
            begun.append(len(self.calls))

        hooks = CallHooks(names, after, before=begin)
        own = OwnOutputs(list(names))
        with own, hooks:  # in this order: what `hooks` puts in the place of an output is no change
            outputs, self.losses = watched_run(task, grad=True)
        self.counts = hooks.calls
        self.altered = own.altered
        self.ends = tensors(outputs)
        self.outputs = tree_map(_without_numbers, outputs)

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

    @cached_property
    def reach(self) -> dict[int, set[int]]:
        """By the `id` of the leaf above each cut: the leaves that what lies below it depends on, down to other cuts."""
        return {id(leaf): AutogradGraph.leaves(s) for call in self.calls for s, leaf in call.slots.values()}

    def reached(self, more: Iterable[int] = ()) -> set[int]:
        """The leaves above cuts that the losses, or `more` of these leaves, depend on."""
        todo, found = {*AutogradGraph.leaves(self.losses), *more}, set[int]()
        while todo:
            leaf = todo.pop()
            if leaf in self.reach and leaf not in found:
                found.add(leaf)
                todo |= self.reach[leaf]
        return found


def _without_numbers(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().to("meta")
    return leaf if isinstance(leaf, bool | int | float | str) else None  # a cache would be kept alive


def watched_run(task: Task, grad: bool) -> tuple[Any, Tensor]:
    """Run the model once to learn about it: its outputs and losses."""
    with torch.enable_grad() if grad else torch.no_grad():
        outputs = task.outputs()
        return outputs, task.losses(outputs)


def candidates(model: nn.Module, explicit: bool) -> Iterator[tuple[str, nn.Module]]:
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

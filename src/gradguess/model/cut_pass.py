"""A pass whose reverse graph is cut at every possible site, and walks over that graph.

The sites of a model are read off it. The graph is the same whether a model is written with modules or with functions,
and it needs no tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from gradguess.model.hooks import call_hooks
from gradguess.model.task import Task, tensors

CallKey = tuple[nn.Module, int]  # a module, and the number of its call


def nodes_below(starts: Iterable[Any], stop: Callable[[Any], bool] = lambda node: False) -> dict[Any, None]:
    """The nodes of an autograd graph that are reached from `starts` along nodes for which `stop` is false."""
    found: dict[Any, None] = dict.fromkeys(node for node in starts if node is not None)
    todo = list(found)
    while todo:
        for below, _ in todo.pop().next_functions:
            if below is not None and below not in found and not stop(below):
                found[below] = None
                todo.append(below)
    return found


def leaves_below(start: Any, stop: Callable[[Any], bool] = lambda node: False) -> set[int]:
    """`id`s of the leaf tensors that a tensor, or a node, depends on, along nodes for which `stop` is false."""
    start = start.grad_fn if isinstance(start, Tensor) else start
    return {id(node.variable) for node in nodes_below([start], stop) if hasattr(node, "variable")}


@dataclass(eq=False)
class Cut:
    """A tensor that a call returned: `s` ends the graph below it, and `leaf` starts the one above."""

    name: str  # of the module
    module: nn.Module
    index: int  # number of the call
    slot: int  # which tensor of the module's output
    alone: bool  # whether the output is this tensor and nothing else
    x: Any  # the first input of the call
    begun: int  # how many cuts there were when the call began
    s: Tensor
    leaf: Tensor

    @property
    def call(self) -> CallKey:
        return self.module, self.index

    @cached_property
    def below(self) -> set[int]:
        """`id`s of the leaves, of cuts and of parameters, that `s` depends on without crossing a cut."""
        return leaves_below(self.s)


class CutPass:
    """One pass over a task with a reverse graph, cut at the outputs of some calls.

    Args:
        chosen: modules, of which every call is cut, and single calls; None: every innermost module that owns trainable
            parameters.

    Attributes:
        cuts: in call order.
        wholes: where `chosen` is None, by the `id` of a cut's leaf: the call around it whose output depends on this
            cut alone and on trainable parameters of the calling module's own.
        counts: how often each watched module was called.
        ends: the model's outputs.
        outputs: the same in the model's own structure, with meta tensors in the place of tensors.
        losses: one per sample.
        altered: modules whose output is not what their class says: a hook changed it, or `forward` is another.
    """

    def __init__(self, task: Task, chosen: Collection[nn.Module | CallKey] | None = None) -> None:
        names = {module: name for name, module in candidates(task.model, chosen is not None)}
        self.cuts: list[Cut] = []
        self.wholes: dict[int, CallKey] = {}
        self.altered = {m for m in names if _module._global_forward_hooks or "forward" in m.__dict__}
        wanted = 0  # calls so far that were to be cut
        begun: list[tuple[int, int]] = []  # for each module that is running: how many such calls, and cuts, before it
        returned: dict[nn.Module, tuple[Any, list[int]]] = {}  # by `forward` itself

        def before(module: nn.Module, args: Any) -> None:
            begun.append((wanted, len(self.cuts)))

        def first(module: nn.Module, args: Any, output: Any) -> None:
            returned[module] = output, _versions(output)

        def after(module: nn.Module, index: int, x: Any, output: Any) -> Any:
            nonlocal wanted
            itself, versions = returned.pop(module, (None, None))
            if versions is not None and (output is not itself or _versions(output) != versions):
                self.altered.add(module)
            wanted_before, cuts_before = begun.pop()
            if wanted == wanted_before if chosen is None else (module in chosen or (module, index) in chosen):
                wanted += 1
                return self._cut(names[module], module, index, x, cuts_before, output)
            if chosen is None and isinstance(output, Tensor):
                self._note_whole(module, index, cuts_before, output)
            return output

        with call_hooks(names, after, before=before, first=first) as self.counts:
            outputs, self.losses = task.run(grad=True)
        self.ends = tensors(outputs)
        self.outputs = tree_map(_without_numbers, outputs)

    def _cut(self, name: str, module: nn.Module, index: int, x: Any, begun: int, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        for slot, s in enumerate(leaves):
            if isinstance(s, Tensor) and s.is_floating_point() and s.requires_grad:
                leaf = s.detach().requires_grad_()
                self.cuts.append(Cut(name, module, index, slot, s is output, x, begun, s, leaf))
                leaves[slot] = leaf.clone()  # a leaf must not be changed in place, a clone may
        return tree_unflatten(leaves, spec)

    def _note_whole(self, module: nn.Module, index: int, begun: int, output: Tensor) -> None:
        below, own = leaves_below(output), {id(p) for p in module.parameters(recurse=False)}
        cut_below = [number for number, cut in enumerate(self.cuts) if id(cut.leaf) in below]
        if len(cut_below) == 1 and cut_below[0] >= begun and own & below:
            self.wholes[id(self.cuts[cut_below[0]].leaf)] = module, index

    def reached(self, more: Iterable[int] = ()) -> set[int]:
        """`id`s of the leaves above cuts that the losses, or `more` of these leaves, depend on."""
        by_leaf = {id(cut.leaf): cut for cut in self.cuts}
        todo, found = {*leaves_below(self.losses), *more}, set[int]()
        while todo:
            leaf = todo.pop()
            if leaf in by_leaf and leaf not in found:
                found.add(leaf)
                todo |= by_leaf[leaf].below
        return found


def _versions(output: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _without_numbers(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().to("meta")
    return leaf if isinstance(leaf, bool | int | float | str) else None  # a cache would be kept alive


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

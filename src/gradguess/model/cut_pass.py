"""A pass whose reverse graph is cut at every possible site; and which calls become sites where the caller names no
modules: branches (`sites="auto"`) or ends of pieces (`sites=n`).

Pieces are cut where all of the model passes through one tensor. The parameters of a piece get their gradient by a vjp
of that piece, from the estimate at its upper end. Only what crosses from piece to piece is guessed, or predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from gradguess.errors import InputError
from gradguess.layers.table import CHANNELS_FIRST
from gradguess.model.hooks import call_hooks, untouched
from gradguess.model.task import Task, check_differentiable, tensors

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


def branch_calls(cut: CutPass, severed: set[int]) -> set[CallKey]:
    """The calls that feed an addition directly, and those with no call above; nothing in a model without additions.

    A call inside a module that uses parameters of its own stands for that module: an embedding that adds positions is
    a site as a whole. Were the layer inside it the site, then positions would be used above the site, and their
    gradient would need the errors at the inputs of all branches.
    """
    calls = {id(one.leaf): one.call for one in cut.cuts}

    def adds_activations(node: Any) -> bool:
        """Whether a node adds two activations that come from different sites: a residual connection or a merge."""
        below = [n for n, _ in node.next_functions if n is not None]
        if node.name() != "AddBackward0" or len(below) != 2:
            return False
        left, right = (leaves_below(n) & calls.keys() for n in below)
        return bool(left) and bool(right) and left != right

    inside = nodes_below([end.grad_fn for end in (*cut.ends, *(one.s for one in cut.cuts))])  # not the loss's
    additions = set(filter(adds_activations, inside))
    if not additions:
        return set()
    below = {n for node in additions for n, _ in node.next_functions if n is not None} - additions
    feeding = set[int]().union(*(leaves_below(node, stop=additions.__contains__) for node in below))
    tops = (leaves_below(cut.losses) | severed).difference(*(one.below for one in cut.cuts))
    chosen = (feeding | tops) & calls.keys()
    return {cut.wholes.get(leaf, calls[leaf]) if leaf in feeding else calls[leaf] for leaf in chosen}


@dataclass(eq=False)
class _Narrow:
    """A tensor through which all of the model passes."""

    inner: Cut  # the call that made it
    outer: Cut  # the outermost call around that one which returned it unchanged
    depth: int  # calls of layers with trainable parameters up to here

    @property
    def end(self) -> CallKey:
        """The call whose output ends the piece.

        Outside of `outer` the tensors that its modules held while they ran are free: all the more memory is saved. But
        where `inner` is a layer that the table knows, or that has parameters, more is known of its output.
        """
        layer = self.inner.module
        known = isinstance(layer, CHANNELS_FIRST) or any(True for _ in layer.parameters(recurse=False))
        return self.inner.call if known else self.outer.call


def piece_calls(task: Task, count: int) -> set[CallKey]:
    """The calls whose outputs cut the model into `count` pieces of about equal depth; the last is its own output."""
    if isinstance(count, bool) or count < 1:
        raise InputError(f"sites: expected at least 1 piece, found {count!r}.")
    cut = CutPass(task, set(task.model.modules()))
    check_differentiable(cut.losses)
    narrow, outputs, depth = _narrow(cut)
    if len(narrow) < count - 1:
        hint = "Use fewer, name" if narrow else "Name"
        raise InputError(
            f"sites: for {count} pieces all of the model must pass through one module at {count - 1} or more places; "
            f"found {len(narrow)}. {hint} modules with sites=[...], or use sites='auto'."
        )
    chosen: list[_Narrow] = []
    for piece in range(1, count):
        left = [place for place in narrow if place not in chosen]
        chosen.append(min(left, key=lambda place: abs(place.depth - piece * depth / count)))
    return {place.end for place in chosen} | {one.call for one in outputs}


def _narrow(cut: CutPass) -> tuple[list[_Narrow], set[Cut], int]:
    """The narrow places in call order, the cuts that made the model's outputs, and the depth of the model.

    A call uses only what earlier calls returned. So all that came before passes through a cut, if no later call and not
    the losses use a cut that is earlier than this one.
    """
    reached, number = cut.reached(), {id(one.leaf): n for n, one in enumerate(cut.cuts)}
    earliest = min((number[leaf] for leaf in leaves_below(cut.losses) & reached), default=0)  # that is used later
    passed: set[Cut] = set()
    for n, one in reversed(list(enumerate(cut.cuts))):
        if id(one.leaf) in reached:
            if earliest >= n and one.alone:
                passed.add(one)
            earliest = min([earliest, *(number[leaf] for leaf in one.below & reached)])
    made_by: dict[int, Cut] = {}  # leaf -> the cut whose call made the tensor: later ones returned it unchanged
    narrow: dict[Cut, _Narrow] = {}  # by `inner`
    layers: set[CallKey] = set()
    for one in cut.cuts:
        if any(p.requires_grad for p in one.module.parameters(recurse=False)):
            layers.add(one.call)
        inner = made_by.get(_unchanged(one.s), one)
        inner = made_by[id(one.leaf)] = inner if inner.alone else one
        if one in passed and inner is one:
            narrow[one] = _Narrow(one, one, len(layers))
        elif one in passed and inner in narrow and one.begun <= inner.begun:
            narrow[inner].outer = one
    ends = [made_by.get(_unchanged(end)) for end in cut.ends]
    outputs = {inner for inner in ends if inner is not None and inner.alone}
    return [place for inner, place in narrow.items() if inner not in outputs], outputs, len(layers)


def _unchanged(t: Tensor) -> int:
    """The `id` of the leaf above the cut whose tensor this is. It has a copy, since a leaf must not be changed."""
    node = t.grad_fn
    below = node.next_functions[0][0] if node is not None and node.name() == "CloneBackward0" else None
    return id(getattr(below, "variable", None))


def severed_leaves(task: Task, cut: CutPass) -> set[int]:
    """`id`s of the cut leaves from which no path of the graph leads to the losses, though these depend on them.

    A kernel that is called directly, or a detour through NumPy, records no graph: whether the losses depend on such a
    call is found by trying.
    """
    reached = cut.reached()
    silent = {one.call for one in cut.cuts} - {one.call for one in cut.cuts if id(one.leaf) in reached}
    if not silent:
        return set()
    losses = _losses(task)
    moved = {call for call in silent if not torch.equal(losses, _losses(task, call))}
    return {id(one.leaf) for one in cut.cuts if one.call in moved}


def _losses(task: Task, changed: CallKey | None = None) -> Tensor:
    """The losses, where the output of the call `changed` is another."""

    def change(module: nn.Module, index: int, x: Any, output: Any) -> Any:
        return tree_map_only(Tensor, _changed, output) if (module, index) == changed else output

    with untouched(task.model), call_hooks([] if changed is None else [changed[0]], change):
        return task.run(grad=False)[1]


def _changed(t: Tensor) -> Tensor:
    """Not by a constant or a factor, which a norm or a softmax would not see."""
    return t + torch.arange(t.numel(), device=t.device).cos().view_as(t) if t.is_floating_point() else t

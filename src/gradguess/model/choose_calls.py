"""Which calls become sites where the caller names no modules: branches (`sites="auto"`) or ends of pieces (`sites=n`),
and which of them lie below an operation that records no graph.

Pieces are cut where all of the model passes through one tensor. The parameters of a piece get their gradient by a vjp
of that piece, from the estimate at its upper end. Only what crosses from piece to piece is guessed, or predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradguess.errors import InputError
from gradguess.layers.table import CHANNELS_FIRST
from gradguess.model.cut_pass import CallKey, Cut, CutPass, leaves_below, nodes_below
from gradguess.model.hooks import call_hooks, untouched
from gradguess.model.task import Task, check_differentiable


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

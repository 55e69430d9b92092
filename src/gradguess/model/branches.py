"""The branches of a residual network (`sites="auto"`): sites where activations are added."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradguess.model.autograd_graph import AutogradGraph
from gradguess.model.cut_pass import CutPass


def _is_data_addition(node: Any, cut_leaves: set[int]) -> bool:
    """An addition of two activations that come from different sites: a residual connection or a merge."""
    if node.name() != "AddBackward0":
        return False
    below = [n for n, _ in node.next_functions if n is not None]
    if len(below) != 2:
        return False
    left, right = (AutogradGraph.leaves(n) & cut_leaves for n in below)
    return bool(left) and bool(right) and left != right


def branch_calls(cut: CutPass, severed: set[int]) -> set[tuple[nn.Module, int]]:
    """The calls that feed an addition directly, and those with no call above; nothing in a model without additions."""
    owner = {id(leaf): call for call in cut.calls for _, leaf in call.slots.values()}
    inside = AutogradGraph([*cut.ends, *(s for call in cut.calls for s, _ in call.slots.values())])
    additions = {node for node in inside.nodes if _is_data_addition(node, set(owner))}  # not the loss's
    if not additions:
        return set()
    feeding: set[int] = set()
    for node in additions:
        for below, _ in node.next_functions:
            if below is not None and below not in additions:
                feeding |= AutogradGraph.leaves(below, stop=lambda n: n in additions)
    tops = (AutogradGraph.leaves(cut.losses) | severed) - set().union(*cut.reach.values())
    whole = {key: call for key, call in _wholes(cut, set(owner)).items() if key in feeding}
    return {whole.get(key, (owner[key].module, owner[key].index)) for key in feeding | tops if key in owner}


def _wholes(cut: CutPass, cut_leaves: set[int]) -> dict[int, tuple[nn.Module, int]]:
    """For a call inside a module whose output depends on that call and on parameters of the module's own: the module's.

    An embedding that adds positions is a site as a whole. Were the layer inside it the site, then positions would be
    used above the site, and their gradient would need the errors at the inputs of all branches.
    """
    found = {}
    for owner in cut.owners:
        below = owner.below & cut_leaves
        own = {id(p) for p in owner.module.parameters(recurse=False)}
        if len(below) == 1 and below <= owner.inside and own & owner.below:
            found[below.pop()] = owner.module, owner.index
    return found

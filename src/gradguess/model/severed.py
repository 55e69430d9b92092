"""Sites below an operation that has no derivative in PyTorch. Nothing is known of what lies above them.

A kernel that is called directly, or a detour through NumPy, records no graph: whether the loss depends on such a site
is found by trying. Other operations, such as quantised layers, record a graph that cannot be used.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradguess.model.cut_pass import Call, CutPass, watched_run
from gradguess.model.hooks import CallHooks
from gradguess.model.side_effects import untouched
from gradguess.model.task import Task


def severed_leaves(task: Task, cut: CutPass) -> set[int]:
    """`id`s of the cut leaves from which no path of the graph leads to the losses, though these depend on them."""
    reached = cut.reached()
    rest = [call for call in cut.calls if not any(id(leaf) in reached for _, leaf in call.slots.values())]
    losses = _losses(task) if rest else None
    moved = [call for call in rest if not torch.equal(losses, _losses(task, call))]  # type: ignore[arg-type]
    return {id(leaf) for call in moved for _, leaf in call.slots.values()}


def pulls_back(ends: list[Tensor], leaf: Tensor) -> bool:
    """Does reverse mode lead from `ends` to `leaf`?"""
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns where an operation is not differentiable
            return torch.autograd.grad(ends, leaf, ends, retain_graph=True, allow_unused=True)[0] is not None
    except (RuntimeError, NotImplementedError):
        return False


def _losses(task: Task, call: Call | None = None) -> Tensor:
    """The losses, where the output of `call` is another."""

    def change(module: nn.Module, index: int, x: Any, output: Any) -> Any:
        return tree_map_only(Tensor, _changed, output) if call is not None and index == call.index else output

    with untouched(task.model), CallHooks([] if call is None else [call.module], change):
        return watched_run(task, grad=False)[1]


def _changed(t: Tensor) -> Tensor:
    """Not by a constant or a factor, which a norm or a softmax would not see."""
    return t + torch.arange(t.numel(), device=t.device).cos().view_as(t) if t.is_floating_point() else t

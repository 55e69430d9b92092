"""What a traced graph holds fast. A step that differs in any of it needs another graph."""

from __future__ import annotations

from collections.abc import Hashable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from gradguess.backends.tracing import NotTraceable
from gradguess.model.site import Layout
from gradguess.model.task import Task
from gradguess.step.base import Kept

PLAIN = (bool, int, float, str, bytes, type(None))
HELD = (*PLAIN, Tensor, FunctionType, BuiltinFunctionType, list, tuple)
PYTORCHS = frozenset(vars(nn.Module())) - {"training"}  # what every module has, hooks for instance: the layout knows it


class _Same:
    """A key for an object that may not be hashable: equal to itself alone. It keeps the object alive."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def signature(task: Task, layout: Layout, *state: Kept) -> Hashable:
    """What a step depends on: loss, targets and state besides the model."""
    loss_fn = task.loss_fn
    leaves, spec = tree_flatten(task.targets)
    closure = {str(i): cell.cell_contents for i, cell in enumerate(getattr(loss_fn, "__closure__", None) or ())}
    losses = _Same(loss_fn), _numbers(getattr(loss_fn, "__dict__", {})), _numbers(closure)
    kept = tuple(
        tuple((site, name, _leaf(value)) for site, values in part.items() for name, value in values.items())
        for part in state
    )
    return losses, str(spec), tuple(map(_leaf, leaves)), kept, model_signature(task, layout)


def model_signature(task: Task, layout: Layout) -> Hashable:
    """What the outputs depend on: training mode, hooks, the tensors but for their numbers, autocast, plain numbers."""
    leaves, spec = tree_flatten(task.inputs)
    own = (*layout.members.parameters.values(), *layout.members.buffers().values())
    kinds = tuple(map(_leaf, own))
    devices = dict.fromkeys(t.device.type for t in own)
    autocast = tuple(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in devices)
    numbers = tuple(_numbers(vars(module)) for module, _ in layout.members.modules)
    return layout, str(spec), tuple(map(_leaf, leaves)), kinds, autocast, numbers


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if isinstance(leaf, PLAIN):
        return type(leaf), leaf
    raise NotTraceable(f"Inputs or targets hold a {type(leaf).__name__}: expected tensors, numbers and text.")


def _numbers(attributes: Any) -> Hashable:
    """The plain values among attributes, such as dropout's `p`, alone or in lists and dicts.

    A tensor or a function, such as `self.act = F.relu`, stands for itself. What PyTorch keeps in dicts is no number.
    """
    return tuple(
        (name, value if isinstance(value, PLAIN) else _plain(value))
        for name, value in attributes.items()
        if name not in PYTORCHS and (isinstance(value, HELD) or (isinstance(value, dict) and not name.startswith("_")))
    )


def _plain(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple((key, _plain(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, PLAIN) else _Same(value)
